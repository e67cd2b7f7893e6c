"""FlashAttention-3's functions: `from attention.compat.flash_attn_interface import flash_attn_func`.

flash_attn.py has the arguments that FlashAttention-2 has as well. Here softmax_scale comes fourth, there is no dropout, and
return_attn_probs=True gives (out, lse). In addition:

| FlashAttention-3                                | attention.forward                                      |
| ----------------------------------------------- | ------------------------------------------------------ |
| v with another head dim than q and k            | the same                                               |
| seqused_k                                       | lengths_k                                              |
| num_heads_q, qkv (.., Hq + 2 Hk, D)             | views of it as q, k, v                                 |
| num_splits (but of caches), pack_gqa, sm_margin | ignored: scheduling is decided here                    |
| page_table, rotary_seqlens                      | decode's pages, positions                              |
| q (total_q, H, D), cu_seqlens_q                 | decode's q (1, total_q, H, D), cu_seqlens              |
| k (total_k_new, Hk, D), cu_seqlens_k_new        | decode's k_new (1, total_k_new, Hk, D), cu_seqlens_new |
| scheduler_metadata                              | ignored                                                |
| q_descale (but of caches), k_descale, v_descale | the same, of float8_e4m3fn                             |"""

from __future__ import annotations

from typing import Any

from .arguments import drop_none, refuse
from .flash_attn import CACHES, OPEN, attend, attend_cache, attend_packed, convert_score_options

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

CACHES_FA3 = CACHES | {"pages": "page_table"}


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = OPEN,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """out, or with return_attn_probs=True (out, lse). q, out: (B, Sq, H, D); k, v: (B, Sk, Hk, D)."""
    _refuse_unsupported(qv, attention_chunk)
    options = convert_score_options(softmax_scale, causal, window_size, softcap, None, deterministic)
    options |= drop_none(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return attend(q, k, v, return_attn_probs, **options)


def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = OPEN,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv (B, S, 3, H, D), or with num_heads_q of qkv (B, S, Hq + 2 Hk, D)."""
    if num_heads_q is None:
        q, k, v = (qkv[:, :, part] for part in range(3))
    else:
        keys_end = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:keys_end], qkv[:, :, keys_end:]
    scores = softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap
    return flash_attn_func(q, k, v, *scores, 1, None, deterministic, sm_margin, return_attn_probs)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = OPEN,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of packed sequences. q, out: (total_q, H, D); k, v: (total_k, Hk, D); lse: (H, total_q)."""
    refuse("seqused_q", seqused_q is not None, "all queries of cu_seqlens_q are computed: leave the unused ones out of q")
    _refuse_unsupported(qv, attention_chunk)
    options = convert_score_options(softmax_scale, causal, window_size, softcap, None, deterministic) | drop_none(
        lengths_k=seqused_k
    )
    options |= drop_none(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return attend_packed(q, k, v, return_attn_probs, cu_seqlens=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """out, or with return_softmax_lse=True (out, lse); k and v are written into the caches: see flash_attn.py. With
    cu_seqlens_q q, out: (total_q, H, D), lse: (H, total_q)."""
    _refuse_unsupported(qv, attention_chunk)
    refuse("q_descale", q_descale is not None, "queries over caches are bfloat16 or float16: multiply q by it")
    advice = "pass q and k both as (B, S, H, D), or both packed, with cu_seqlens_q and cu_seqlens_k_new"
    refuse("cu_seqlens_k_new", cu_seqlens_k_new is not None and cu_seqlens_q is None, advice)
    refuse("cu_seqlens_q", cu_seqlens_q is not None and k is not None and cu_seqlens_k_new is None, advice)
    options = convert_score_options(softmax_scale, causal, window_size, softcap) | drop_none(
        k_descale=k_descale, v_descale=v_descale
    )
    options |= drop_none(pages=page_table, batch_index=cache_batch_idx, leftpad=cache_leftpad, splits=num_splits or None)
    rotary, new = (rotary_cos, rotary_sin, rotary_interleaved), (k, v)
    if cu_seqlens_q is not None:
        same = k is None or cu_seqlens_k_new is cu_seqlens_q
        options |= drop_none(cu_seqlens=cu_seqlens_q, cu_seqlens_new=None if same else cu_seqlens_k_new)
        q, new = q[None], (k, v) if k is None else (k[None], v[None])
    caches, rest = (q, k_cache, v_cache, *new, cache_seqlens), (rotary, rotary_seqlens, return_softmax_lse, options)
    result = attend_cache(*caches, *rest, CACHES_FA3)
    if cu_seqlens_q is None:
        return result
    return (result[0][0], result[1][0]) if return_softmax_lse else result[0]


def _refuse_unsupported(qv, attention_chunk):
    advice = "concatenate it to q, and v to k, if they have at most 256 columns together"
    refuse("qv", qv is not None, f"{advice}; attention.mla_decode takes latent caches, with v and k side by side")
    advice = "call attention.forward(.., mask=lambda b, h, i, j: i // chunk == j // chunk)"
    refuse("attention_chunk", bool(attention_chunk), advice)
