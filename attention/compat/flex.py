"""torch.nn.attention.flex_attention's function: `from attention.compat.flex import create_block_mask, flex_attention`.

All but flex_attention is torch's own: create_block_mask, BlockMask, and_masks, ..."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import attention

from .asked import ERRORS, asked, attend_heads_first, refuse, rename
from .captured import freed

THEIRS = {"q": "query", "k": "key", "v": "value", "mask": "mask_mod", "score": "score_mod", "blocks": "block_mask"}  # in errors
WHOLE = 2**30  # the block size of a BlockMask that lists everything: torch's for no mask


class Listed(NamedTuple):
    """A BlockMask, and its lists in tiles of attention.forward's: see `listed`."""

    block_mask: Any
    lists: Any


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """softmax(score_mod(scale query key^T)) value where block_mask lets query i see key j. query: (B, Hq, Sq, D); key:
    (B, Hk, Sk, D); value: (B, Hk, Sk, Dv). Returns out, or with return_lse=True (out, lse), lse (B, Hq, Sq) in natural units;
    both are differentiable.

    | torch                                        | attention.forward                                             |
    | -------------------------------------------- | ------------------------------------------------------------- |
    | (B, H, S, D)                                 | layout="bhsd"                                                 |
    | score_mod(score, b, h, q_idx, kv_idx)        | score                                                         |
    | block_mask.mask_mod(b, h, q_idx, kv_idx)     | mask                                                          |
    | block_mask                                   | blocks, read by its fields: any object that has them will do; |
    |                                              | or what `listed` made of it, once for many calls              |
    | arrays that the two functions capture, also  | aux: see captured.py                                          |
    | as attributes, or in functions they call     |                                                               |
    | and_masks, or_masks, methods, partials,      | one function in the words of kernels: see rewritten.py        |
    | torch.where, x.abs(), x.clamp(..), s ** 2    |                                                               |
    | enable_gqa, kernel_options                   | not needed: heads are always shared, tiles are chosen here    |

    Without a BlockMask at hand call attention.forward(.., mask=..): it lists the blocks itself."""
    refuse("return_aux", return_aux is not None, "return_lse=True gives the lse; the maximum is not kept")
    block_mask, lists = block_mask if isinstance(block_mask, Listed) else (block_mask, None)
    options = _options(score_mod, block_mask) | asked(scale=scale, return_lse=return_lse or None, blocks=lists)
    try:
        return attend_heads_first(query, key, value, **options)
    except ERRORS as error:
        rename(error, THEIRS)
        raise


def __getattr__(name: str) -> Any:
    """What else is imported beside flex_attention, of torch."""
    torch = sys.modules.get("torch")
    theirs = torch and import_module("torch.nn.attention.flex_attention")
    if name.startswith("_") or not hasattr(theirs, name):
        why = "" if torch else "; what is torch's is here once torch is imported"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")
    return getattr(theirs, name)


def listed(query: Any, key: Any, value: Any, block_mask: Any, score_mod: Callable | None = None) -> Listed:
    """What flex_attention takes as block_mask in many calls on arrays of these shapes, and with a score_mod or without one as
    here, so that its blocks are not listed anew in each: attention.block_lists. What its mask captures must stay as it is."""
    return Listed(block_mask, attention.block_lists(query, key, value, layout="bhsd", **_options(score_mod, block_mask)))


def _options(score_mod: Any, block_mask: Any) -> dict[str, Any]:
    """forward's, of these two."""
    if block_mask is not None and not hasattr(block_mask, "mask_mod"):
        cure = "torch's create_block_mask makes one of a function; or call attention.forward(.., mask=..)"
        raise TypeError(f"block_mask: must be a BlockMask; {cure}: {block_mask=!r:.60}")
    mask = None if block_mask is None else block_mask.mask_mod
    functions, aux = freed({"mask": _own(mask, "noop_mask"), "score": _own(score_mod, "_identity")})
    return functions | asked(blocks=_blocks(block_mask), aux=aux or None)


def _own(function: Any, nothing: str) -> Any:
    """None for torch's function of this name, which does nothing."""
    theirs = (getattr(function, "__module__", None) or "").startswith("torch.nn.attention")
    return None if theirs and function.__name__ == nothing else function


def _blocks(block_mask: Any) -> Any:
    """None where all is listed in one block."""
    if block_mask is None:
        return None
    size = block_mask.BLOCK_SIZE
    return None if min((size, size) if isinstance(size, int) else size) >= WHOLE else block_mask
