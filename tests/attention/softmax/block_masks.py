"""BlockMasks as FlexAttention has them, from maps of classes: 0 for a block that is not seen, 1 for a partial one, 2 for a
whole."""

from types import SimpleNamespace

import numpy as np

FIELDS = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"


def lists_of(classes, what):
    """(how many blocks of a row have this class, their numbers first and then poison)."""
    count = (classes == what).sum(-1)
    order = np.argsort(classes != what, -1, kind="stable")
    return count.astype(np.int32), np.where(np.arange(classes.shape[-1]) < count[..., None], order, 10**6).astype(np.int32)


def block_mask(classes, size, whole=True):
    """A BlockMask of a map of classes."""
    full = lists_of(classes, 2) if whole else (None, None)
    return SimpleNamespace(**dict(zip(FIELDS, (*lists_of(classes, 1), *full))), BLOCK_SIZE=size)


def drawn(*shape):
    """A map of classes, of which a row of blocks sees nothing."""
    classes = np.random.default_rng(0).integers(0, 3, shape)
    classes[..., 1, :] = 0
    return classes
