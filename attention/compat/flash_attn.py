"""FlashAttention-2's functions: `from attention.compat.flash_attn import flash_attn_func`.

| FlashAttention                         | attention.forward                                                      |
| -------------------------------------- | ---------------------------------------------------------------------- |
| softmax_scale, causal, alibi_slopes    | scale, causal, alibi                                                   |
| window_size=(left, right), -1: open    | window=(left, right), None: open                                       |
| softcap=0.0: no softcap                | softcap=None                                                           |
| dropout_p                              | dropout; the seed is drawn, see `draw_dropout_options`                |
| qkv (.., 3, H, D), kv (.., 2, H, D)    | views of them as q, k, v                                               |
| q (total, H, D), cu_seqlens_q, .._k    | q (1, total, H, D), cu_seqlens, cu_seqlens_k                           |
| deterministic                          | the same, for gradients                                                |
| max_seqlen_q, .._k                     | not needed                                                             |
| return_attn_probs=True                 | return_lse=True: (out, lse, None), lse (B, H, Sq) or (H, total)        |
| block_table, cu_seqlens_k              | attention.decode's pages, lengths; no dropout, no gradients            |

flash_attn_with_kvcache is attention.decode:

| FlashAttention                         | attention.decode                                                       |
| -------------------------------------- | ---------------------------------------------------------------------- |
| k, v                                   | k_new, v_new, written into k_cache, v_cache at cache_seqlens           |
| rotary_cos, rotary_sin, .._interleaved | rotary, interleaved; q is rotated, too                                 |
| cache_seqlens; an integer is for all   | lengths                                                                |
| cache_batch_idx, cache_leftpad         | batch_index, leftpad                                                   |
| block_table (page_table)               | pages                                                                  |
| num_splits=0: a heuristic              | splits=None                                                            |
| return_softmax_lse=True                | return_lse=True: (out, lse)                                            |

Where a row sees no key its lse is -inf here, and inf in FlashAttention. A loss may depend on lse here; FlashAttention
drops that gradient.
"""

from __future__ import annotations

from typing import Any

import attention

from .arguments import ERRORS, draw_dropout_options, drop_none, full_int32, refuse, rename_arguments

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

OPEN = (-1, -1)
SCORES = {"scale": "softmax_scale", "window": "window_size", "alibi": "alibi_slopes"}  # {our name: FlashAttention's}, in errors
FORWARD = SCORES | {"dropout": "dropout_p", "cu_seqlens": "cu_seqlens_q", "lengths_k": "seqused_k"}
PAGED = SCORES | {"cu_seqlens": "cu_seqlens_q", "lengths": "cu_seqlens_k", "pages": "block_table"}
CACHES = PAGED | {
    "lengths": "cache_seqlens",
    "batch_index": "cache_batch_idx",
    "leftpad": "cache_leftpad",
    "splits": "num_splits",
}
CACHES |= {"k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v", "cu_seqlens_new": "cu_seqlens_k_new"}
CACHES |= {"cos": "rotary_cos", "sin": "rotary_sin", "interleaved": "rotary_interleaved", "positions": "rotary_seqlens"}


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """out, or with return_attn_probs=True (out, lse, None). q, out: (B, Sq, H, D); k, v: (B, Sk, Hk, D)."""
    refuse_probabilities(return_attn_probs, dropout_p)
    options = convert_score_options(
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    ) | draw_dropout_options(dropout_p, q)
    return append_probabilities(attend(q, k, v, return_attn_probs, **options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with keys and values in one array kv (B, Sk, 2, Hk, D)."""
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *rest)


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with queries, keys and values in one array qkv (B, S, 3, H, D)."""
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *rest)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """flash_attn_func of packed sequences. q, out: (total_q, H, D); k, v: (total_k, Hk, D), or with block_table (pages, page
    size, Hk, D), where sequence n has cu_seqlens_k[n + 1] - cu_seqlens_k[n] keys; lse: (H, total_q)."""
    refuse_probabilities(return_attn_probs, dropout_p)
    if block_table is not None:
        refuse("dropout_p", bool(dropout_p), "block_table excludes dropout; set dropout_p=0.0, or gather the pages")
        options = convert_score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
        options |= {"pages": block_table, "cu_seqlens": cu_seqlens_q}
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        _check_packed("q", q)
        result = attend_cache(q[None], k, v, None, None, lengths, (None, None, True), None, return_attn_probs, options, PAGED)
        result = (result[0][0], result[1][0]) if return_attn_probs else result[0]
        return append_probabilities(result, return_attn_probs)
    options = convert_score_options(
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    ) | draw_dropout_options(dropout_p, q)
    result = attend_packed(q, k, v, return_attn_probs, cu_seqlens=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    return append_probabilities(result, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with keys and values in one array kv (total_k, 2, Hk, D)."""
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with queries, keys and values in one array qkv (total, 3, H, D)."""
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = (qkv[:, part] for part in range(3))
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """out, or with return_softmax_lse=True (out, lse); k and v are written into the caches. q, out: (B, Sq, H, D); caches:
    (B, Sk, Hk, D), or with block_table (pages, page size, Hk, D); k, v: (B, S, Hk, D); lse: (B, H, Sq)."""
    options = convert_score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= drop_none(pages=block_table, batch_index=cache_batch_idx, leftpad=cache_leftpad, splits=num_splits or None)
    rotary = rotary_cos, rotary_sin, rotary_interleaved
    return attend_cache(q, k_cache, v_cache, k, v, cache_seqlens, rotary, None, return_softmax_lse, options)


# ---- what FlashAttention-2 and -3 share ----------------------------------------------------------------------------
def convert_score_options(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any = None,
    deterministic: bool = False,
) -> dict[str, Any]:
    """forward's options for these arguments; a negative end of window_size is an open one. TypeError: it is no pair."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: must be (left, right), -1 where it is open: {window_size=}")
    left, right = (None if end is None or end < 0 else end for end in window_size)
    window = None if left is right is None else (left, right)
    options = drop_none(scale=softmax_scale, causal=causal or None, window=window, softcap=softcap or None, alibi=alibi_slopes)
    return options | drop_none(deterministic=deterministic or None)


def attend(q: Any, k: Any, v: Any, return_lse: bool, **options: Any) -> Any:
    """attention.forward's result: out, or (out, lse)."""
    try:
        return attention.forward(q, k, v, **options, **drop_none(return_lse=return_lse or None))
    except ERRORS as error:
        rename_arguments(error, FORWARD)
        raise


def attend_packed(q: Any, k: Any, v: Any, return_lse: bool, **options: Any) -> Any:
    """attention.forward's result for packed sequences, without the batch of 1: out (total, H, D), lse (H, total)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_packed(name, x)
    result = attend(q[None], k[None], v[None], return_lse, **options)
    return (result[0][0], result[1][0]) if return_lse else result[0]


def _check_packed(name: str, x: Any) -> None:
    """ValueError: the array does not have the three axes of packed sequences."""
    if len(x.shape) != 3:
        raise ValueError(f"{name}: must have the axes total, H, D of packed sequences: {name}.shape={tuple(x.shape)}")


def attend_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    lengths: Any,
    rotary: tuple[Any, Any, bool],
    positions: Any,
    return_lse: bool,
    options: dict[str, Any],
    names: dict[str, str] = CACHES,
) -> Any:
    """attention.decode's result: out, or (out, lse). lengths: keys in the caches, an array, an integer for all sequences, or
    None for full caches. rotary: cos, sin, and whether pairs of columns are interleaved. options: decode's; causal is False by
    default. names: the caller's names of decode's arguments, for errors."""
    cos, sin, interleaved = rotary
    options.setdefault("causal", False)
    if lengths is None:
        if k is not None:
            raise ValueError("cache_seqlens: is required with k, because it says where k is written")
        lengths = k_cache.shape[1] * (options["pages"].shape[1] if "pages" in options else 1)
    if isinstance(lengths, int):
        lengths = full_int32(len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else q.shape[0], lengths, q)
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: must not be None: k and v are written into the caches together")
    if k is None and not cos is sin is None:
        raise ValueError("rotary_cos: requires k and v: keys that are in the cache are rotated already")
    if k is not None:
        options |= {"k_new": k, "v_new": v} | drop_none(positions=positions if cos is not None else None)
        options |= {} if cos is None else {"rotary": (cos, sin), "interleaved": interleaved}
    try:
        return attention.decode(q, k_cache, v_cache, lengths=lengths, **options, **drop_none(return_lse=return_lse or None))
    except ERRORS as error:
        rename_arguments(error, names)
        raise


def refuse_probabilities(return_attn_probs: bool, dropout_p: float) -> None:
    """NotImplementedError: with dropout FlashAttention-2 would return the probabilities P too, which are never materialised
    here."""
    wants_mask = bool(return_attn_probs and dropout_p)
    refuse("return_attn_probs", wants_mask, "P is never materialised; leave it out, or set dropout_p=0.0")


def append_probabilities(result: Any, return_attn_probs: bool) -> Any:
    """FlashAttention-2's result: (out, lse, P), where P is None, because only dropout would need it."""
    return (*result, None) if return_attn_probs else result
