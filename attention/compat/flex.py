"""torch.nn.attention.flex_attention's function: `from attention.compat.flex import create_block_mask, flex_attention`.

Only flex_attention and `listed` are ours; create_block_mask, BlockMask, and_masks and so on are torch's own objects."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import attention

from .arguments import ERRORS, attend_heads_first, drop_none, refuse, rename_arguments
from .captured_arrays import lift_captured_arrays

__all__ = ["flex_attention", "listed"]

ARGUMENT_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "mask": "mask_mod",
    "score": "score_mod",
    "blocks": "block_mask",
}  # in errors
NO_MASK_BLOCK_SIZE = 2**30  # torch's block size for a BlockMask without a mask: one block that lists everything


class ListedBlockMask(NamedTuple):
    """A BlockMask, and its block lists for attention.forward's tiles, as `listed` made them."""

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
    |                                              | or the result of `listed`, for many calls                     |
    | arrays that the two functions capture, also  | aux: see captured_arrays.py                                          |
    | as attributes, or in functions they call     |                                                               |
    | and_masks, or_masks, methods, partials,      | one function that kernels can compile: see rewrite.py       |
    | torch.where, x.abs(), x.clamp(..), s ** 2    |                                                               |
    | enable_gqa, kernel_options                   | ignored: GQA follows from shapes, tiles are chosen here       |

    Without a BlockMask call attention.forward(.., mask=..): it lists the blocks itself."""
    refuse("return_aux", return_aux is not None, "return_lse=True gives the lse; row maxima are not stored")
    block_mask, lists = block_mask if isinstance(block_mask, ListedBlockMask) else (block_mask, None)
    options = _options(score_mod, block_mask) | drop_none(scale=scale, return_lse=return_lse or None, blocks=lists)
    try:
        return attend_heads_first(query, key, value, **options)
    except ERRORS as error:
        rename_arguments(error, ARGUMENT_NAMES)
        raise


def __getattr__(name: str) -> Any:
    """An attribute of torch.nn.attention.flex_attention. AttributeError: torch does not have it, or is not imported."""
    from tiles.calls.torch_op import imported_module  # imported late, because it imports Numba

    torch = imported_module("torch")
    theirs = torch and import_module("torch.nn.attention.flex_attention")
    if name.startswith("_") or not hasattr(theirs, name):
        why = "" if torch else "; import torch to have the attributes of torch.nn.attention.flex_attention here"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")
    return getattr(theirs, name)


def listed(query: Any, key: Any, value: Any, block_mask: Any, score_mod: Callable | None = None) -> ListedBlockMask:
    """A block_mask for many calls of flex_attention on arrays of these shapes, with or without a score_mod as here, whose
    blocks are listed once (attention.block_lists) instead of in each call. The arrays that its mask captures must not
    change."""
    return ListedBlockMask(
        block_mask, attention.block_lists(query, key, value, layout="bhsd", **_options(score_mod, block_mask))
    )


def _options(score_mod: Any, block_mask: Any) -> dict[str, Any]:
    """attention.forward's options for a score_mod and a block_mask. TypeError: block_mask is not a BlockMask."""
    if block_mask is not None and not hasattr(block_mask, "mask_mod"):
        cure = "torch's create_block_mask makes one of a function; or call attention.forward(.., mask=..)"
        raise TypeError(f"block_mask: must be a BlockMask; {cure}: {block_mask=!r:.60}")
    mask = None if block_mask is None else block_mask.mask_mod
    functions, aux = lift_captured_arrays(
        {"mask": _drop_torch_default(mask, "noop_mask"), "score": _drop_torch_default(score_mod, "_identity")}
    )
    return functions | drop_none(blocks=_drop_full_block_mask(block_mask), aux=aux or None)


def _drop_torch_default(function: Any, nothing: str) -> Any:
    """None if `function` is torch's function of the name `nothing`, which has no effect; otherwise `function`."""
    theirs = (getattr(function, "__module__", None) or "").startswith("torch.nn.attention")
    return None if theirs and function.__name__ == nothing else function


def _drop_full_block_mask(block_mask: Any) -> Any:
    """None if the BlockMask lists everything in one block; otherwise the BlockMask."""
    if block_mask is None:
        return None
    size = block_mask.BLOCK_SIZE
    return None if min((size, size) if isinstance(size, int) else size) >= NO_MASK_BLOCK_SIZE else block_mask
