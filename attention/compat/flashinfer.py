"""FlashInfer's wrappers: `from attention.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper`.

| FlashInfer                                       | attention.decode                                              |
| ------------------------------------------------ | ------------------------------------------------------------- |
| q (B, H, D); q (total, H, D), qo_indptr          | q (B, 1, H, D); q (1, total, H, D), cu_seqlens                |
| paged_kv_cache (pages, 2, ..), or a pair         | k, v, views of it; kv_layout="HND" is other strides           |
| indptr, indices, last_page_len                   | pages, a row a sequence, and lengths: `plan` makes them       |
| causal, sm_scale, logits_soft_cap, window_left   | causal, scale, softcap, window=(left, None)                   |
| custom_mask, the bits of all sequences           | mask, which reads them from aux                               |
| sinks                                            | sink                                                          |
| q_scale, k_scale, v_scale                        | factors of scale, and of the output                           |
| disable_split_kv=True                            | splits=1                                                      |
| return_lse=True: (out, lse), lse (total, H)      | return_lse=True, lse (B, H, Sq); in FlashInfer to the base 2  |

What `plan` was told of arrays is held against those of `run`: heads, columns, tokens, page size, dtypes where they are named.

Ragged keys are attention.forward's cu_seqlens_k: there out and lse have gradients. With pages, tensors that require grad are
refused. What a call plans is its page table alone: kernels are planned by shapes. With
use_cuda_graph=True the table lies in float_workspace_buffer, and `plan` writes into what `run` was captured with.
"""

from __future__ import annotations

import math
from typing import Any

import attention

from .asked import asked, refuse
from .flashinfer_plan import Planned, beside, ends_like, ends_of

LOG2_E = math.log2(math.e)
MOST_BITS = 2**24  # of a custom mask: they are counted in float32


def _given(found: Any, out: Any, lse: Any, return_lse: bool, v_scale: Any) -> Any:
    """What `run` gives: out (total, H, D) and lse (total, H), found by (1, total, H, D) and (1, H, total)."""
    made, sums = (found[0][0], found[1][0]) if return_lse else (found[0], None)
    if v_scale is not None:
        made *= v_scale
    made = made if out is None else out
    if sums is None:
        return made
    sums = sums.swapaxes(0, 1) * LOG2_E
    if lse is not None:
        lse[...] = sums
        sums = lse
    return made, sums


class BatchDecodeWithPagedKVCacheWrapper(Planned):
    """A query token a sequence, or q_len_per_req of them. The other buffers are not needed."""

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args)

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """The pages of each sequence: indices[indptr[b] : indptr[b + 1]], of which the last has last_page_len[b] keys."""
        refuse("fixed_split_size", fixed_split_size is not None, "disable_split_kv=True gives the same bits in any batch")
        where = self.paged(indptr, indices, last_page_len, page_size)
        several, q_type, kv_type = q_len_per_req or 1, q_data_type or data_type, kv_data_type or data_type
        tokens = len(where["lengths"]) * several
        self.expect(num_qo_heads, num_kv_heads, head_dim, None, tokens, q_type, kv_type, o_data_type)
        scores = self.scores(several > 1, sm_scale, window_left, logits_soft_cap, pos_encoding_mode, head_dim)
        self.told, self.each = where | scores | asked(splits=1 if disable_split_kv else None), several

    begin_forward = plan

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
    ) -> Any:
        """out (B, H, D), or with return_lse=True (out, lse), lse (B, H) to the base 2; q (B, H, D)."""
        told = self.options(q_scale, k_scale, window_left, sinks)
        k, v = self.caches(q, paged_kv_cache)
        total, heads, columns = q.shape
        rows = -1 if total else 0, self.each, heads
        result = {} if out is None else {"out": out.reshape(*rows, out.shape[-1])}
        found = attention.decode(q.reshape(*rows, columns), k, v, return_lse=return_lse, **told, **result)
        made, sums = found if return_lse else (found, None)
        made = made.reshape(1, total, heads, made.shape[-1])
        sums = sums if sums is None else sums.swapaxes(1, 2).reshape(1, total, heads).swapaxes(1, 2)
        return _given((made, sums) if return_lse else made, out, lse, return_lse, v_scale)


class BatchPrefillWithPagedKVCacheWrapper(Planned):
    """Query tokens of sequences one behind the other, the last of each at its last key. The other buffers are not needed."""

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args)

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Whose tokens are q[qo_indptr[b] : qo_indptr[b + 1]], and the pages of each sequence. custom_mask: of all sequences,
        one behind the other, a bit for each query token and key; causal is then left aside."""
        refuse("packed_custom_mask", packed_custom_mask is not None, "pass custom_mask, which is not packed")
        refuse("fixed_split_size", fixed_split_size is not None, "pass disable_split_kv=True: no sequence is split")
        items = prefix_len_ptr is not None or token_pos_in_items_ptr is not None or max_item_len_ptr is not None
        refuse("token_pos_in_items_ptr", items, "call attention.decode(.., mask=, aux=)")
        where = self.paged(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, "paged_kv_")
        tokens = int(ends_like("qo_indptr", qo_indptr, "paged_kv_indptr", paged_kv_indptr)[-1])
        self.expect(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, tokens, q_data_type, kv_data_type, o_data_type)
        ends = self.keep("qo_indptr", beside(qo_indptr, paged_kv_indices))
        causal = causal and custom_mask is None
        scores = self.scores(causal, sm_scale, window_left, logits_soft_cap, pos_encoding_mode, head_dim_qk)
        masked = {} if custom_mask is None else _masked(custom_mask, ends, where["lengths"], self.keep)
        self.told = where | {"cu_seqlens": ends} | scores | masked | asked(splits=1 if disable_split_kv else None)

    begin_forward = plan

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
    ) -> Any:
        """out (total, H, D), or with return_lse=True (out, lse), lse (total, H) to the base 2; q (total, H, D)."""
        told = self.options(q_scale, k_scale, window_left, sinks) | ({} if out is None else {"out": out[None]})
        k, v = self.caches(q, paged_kv_cache)
        found = attention.decode(q[None], k, v, return_lse=return_lse, **told)
        return _given(found, out, lse, return_lse, v_scale)


class BatchPrefillWithRaggedKVCacheWrapper(Planned):
    """The same where keys and values lie one behind the other, too: k, v (total keys, Hk, D)."""

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ):
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, jit_args)

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Whose tokens and keys are whose."""
        refuse("packed_custom_mask", packed_custom_mask is not None, "pass custom_mask, which is not packed")
        items = prefix_len_ptr is not None or token_pos_in_items_ptr is not None or max_item_len_ptr is not None
        refuse("token_pos_in_items_ptr", items, "call attention.forward(.., mask=, aux=)")
        causal = causal and custom_mask is None
        scores = self.scores(causal, sm_scale, window_left, logits_soft_cap, pos_encoding_mode, head_dim_qk)
        self.keys, of_q = int(ends_of("kv_indptr", kv_indptr)[-1]), ends_like("qo_indptr", qo_indptr, "kv_indptr", kv_indptr)
        self.expect(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, int(of_q[-1]), q_data_type, kv_data_type, o_data_type)
        ends, ends_k = self.keep("qo_indptr", qo_indptr), self.keep("kv_indptr", kv_indptr)
        masked = {} if custom_mask is None else _masked(custom_mask, ends, ends_k[1:] - ends_k[:-1], self.keep)
        self.told = {"cu_seqlens": ends, "cu_seqlens_k": ends_k} | scores | masked

    begin_forward = plan

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """out (total, H, D), or with return_lse=True (out, lse), lse (total, H) to the base 2; q (total, H, D)."""
        told = self.options(q_scale, k_scale, None, None) | ({} if out is None else {"out": out[None]})
        k, v = (x.swapaxes(0, 1) if self.heads_first else x for x in (k, v))
        self.check(q, k, v)
        for name, x in ("k", k), ("v", v):
            if x.shape[0] != self.keys and not (self.graph and x.shape[0] > self.keys):
                raise ValueError(f"{name}: must have the {self.keys} tokens that were planned: {name}.shape={tuple(x.shape)}")
        found = attention.forward(q[None], k[None], v[None], return_lse=return_lse, **told)
        return _given(found, out, lse, return_lse, v_scale)


def _allowed(b: Any, h: Any, i: Any, j: Any, bits: Any, first: Any, keys: Any) -> Any:
    """A mask: bit first[b] + i keys[b] + j."""
    return bits[i * keys[b] + (j + first[b])] != 0


def _masked(bits: Any, ends: Any, keys: Any, keep: Any) -> dict[str, Any]:
    """decode's mask and aux. keys: of each sequence. ValueError."""
    if len(bits) >= MOST_BITS:
        raise ValueError(f"custom_mask: must have fewer than 2**24 bits; use attention.decode(.., mask=): {len(bits)=}")
    sizes = (ends[1:] - ends[:-1]) * keys
    if len(bits) != (wanted := int(sizes.sum())):
        raise ValueError(f"custom_mask: must have a bit for each query token and key of each sequence, {wanted}: {len(bits)=}")
    first = sizes.cumsum(0) - sizes
    return {"mask": _allowed, "aux": (keep("custom_mask", bits), keep("first bits", first), keep("keys", keys))}
