"""FlashInfer's wrappers: `from attention.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper`.

| FlashInfer                                       | attention.decode                                              |
| ------------------------------------------------ | ------------------------------------------------------------- |
| q (B, H, D); q (total, H, D), qo_indptr          | q (B, 1, H, D); q (1, total, H, D), cu_seqlens                |
| paged_kv_cache (pages, 2, ..), or a pair         | k, v, views of it; kv_layout="HND" is other strides           |
| indptr, indices, last_page_len                   | pages, a row for each sequence, and lengths; `plan` computes  |
| causal, sm_scale, logits_soft_cap, window_left   | causal, scale, softcap, window=(left, None)                   |
| custom_mask, the bits of all sequences           | mask, which reads them from aux                               |
| sinks                                            | sink                                                          |
| q_scale, k_scale, v_scale                        | factors of scale, and of the output                           |
| disable_split_kv=True                            | splits=1                                                      |
| return_lse=True: (out, lse), lse (total, H)      | return_lse=True, lse (B, H, Sq); in FlashInfer to the base 2  |

`run` checks its arrays against what `plan` was called with: heads, head dims, tokens, page size, and dtypes if they were named.

Ragged keys are attention.forward's cu_seqlens_k: there out and lse have gradients. With pages, tensors that require grad are
refused. `plan` computes only the page table: kernels are planned by shapes. With use_cuda_graph=True the table lies in
float_workspace_buffer, and a later `plan` writes into the arrays that the graph captured."""

from __future__ import annotations

import math
from typing import Any

import attention

from .arguments import drop_none, refuse
from .flashinfer_plan import PlannedWrapper, read_indptr, read_indptr_like, to_device_of

__all__ = ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"]

LOG2_E = math.log2(math.e)
MAX_MASK_BITS = 2**24  # bits of a custom mask: their indices are computed in float32


def _format_results(results: Any, out: Any, lse: Any, return_lse: bool, v_scale: Any) -> Any:
    """What `run` returns: out (total, H, D) and lse (total, H), from attention's results (1, total, H, D) and (1, H, total)."""
    values, lse_values = (results[0][0], results[1][0]) if return_lse else (results[0], None)
    if v_scale is not None:
        values *= v_scale
    values = values if out is None else out
    if lse_values is None:
        return values
    lse_values = lse_values.swapaxes(0, 1) * LOG2_E
    if lse is not None:
        lse[...] = lse_values
        lse_values = lse
    return values, lse_values


class PagedWrapper(PlannedWrapper):
    """What the wrappers of paged caches share. tokens_per_request: query tokens of each sequence; None if packed."""

    tokens_per_request: int | None = None

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
        planned = self.merge_options(q_scale, k_scale, window_left, sinks)
        k, v = self.split_caches(q, paged_kv_cache)
        total, heads, columns = q.shape
        rows = (1, total, heads) if self.tokens_per_request is None else (-1 if total else 0, self.tokens_per_request, heads)
        out_options = {} if out is None else {"out": out.reshape(*rows, out.shape[-1])}
        results = attention.decode(q.reshape(*rows, columns), k, v, return_lse=return_lse, **planned, **out_options)
        values, lse_values = results if return_lse else (results, None)
        values = values.reshape(1, total, heads, values.shape[-1])
        lse_values = lse_values if lse_values is None else lse_values.swapaxes(1, 2).reshape(1, total, heads).swapaxes(1, 2)
        return _format_results((values, lse_values) if return_lse else values, out, lse, return_lse, v_scale)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Decoding with one query token for each sequence, or q_len_per_req of them. The further buffers are ignored."""

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
        """The pages of sequence b are indices[indptr[b] : indptr[b + 1]], and the last of them has last_page_len[b] keys."""
        refuse("fixed_split_size", fixed_split_size is not None, "disable_split_kv=True gives the same bits in any batch")
        pages = self.page_options(indptr, indices, last_page_len, page_size)
        q_type, kv_type = q_data_type or data_type, kv_data_type or data_type
        self.tokens_per_request = q_len_per_req or 1
        tokens = len(pages["lengths"]) * self.tokens_per_request
        self.record_expected(num_qo_heads, num_kv_heads, head_dim, None, tokens, q_type, kv_type, o_data_type)
        causal = self.tokens_per_request > 1
        score_options = self.score_options(causal, sm_scale, window_left, logits_soft_cap, pos_encoding_mode, head_dim)
        self.planned = pages | score_options | drop_none(splits=1 if disable_split_kv else None)

    begin_forward = plan


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Prefill: the query tokens of packed sequences, where the last token of each sequence is at its last key. The further
    buffers are ignored."""

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
        """The tokens of sequence b are q[qo_indptr[b] : qo_indptr[b + 1]]. custom_mask: for all sequences, packed, a bit for
        each query token and key; causal is ignored with it."""
        refuse("packed_custom_mask", packed_custom_mask is not None, "pass custom_mask, an array of booleans")
        refuse("fixed_split_size", fixed_split_size is not None, "pass disable_split_kv=True: no sequence is split")
        items = prefix_len_ptr is not None or token_pos_in_items_ptr is not None or max_item_len_ptr is not None
        refuse("token_pos_in_items_ptr", items, "call attention.decode(.., mask=, aux=)")
        pages = self.page_options(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, "paged_kv_")
        tokens = int(read_indptr_like("qo_indptr", qo_indptr, "paged_kv_indptr", paged_kv_indptr)[-1])
        self.record_expected(
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, tokens, q_data_type, kv_data_type, o_data_type
        )
        ends = self.hold_for_graph("qo_indptr", to_device_of(qo_indptr, paged_kv_indices))
        causal = causal and custom_mask is None
        score_options = self.score_options(causal, sm_scale, window_left, logits_soft_cap, pos_encoding_mode, head_dim_qk)
        masked = {} if custom_mask is None else _mask_options(custom_mask, ends, pages["lengths"], self.hold_for_graph)
        self.planned = pages | {"cu_seqlens": ends} | score_options | masked | drop_none(splits=1 if disable_split_kv else None)

    begin_forward = plan


class BatchPrefillWithRaggedKVCacheWrapper(PlannedWrapper):
    """Prefill where keys and values are packed as well: k, v (total keys, Hk, D)."""

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
        """The tokens of sequence b are q[qo_indptr[b] : qo_indptr[b + 1]], and its keys k[kv_indptr[b] : kv_indptr[b + 1]]."""
        refuse("packed_custom_mask", packed_custom_mask is not None, "pass custom_mask, an array of booleans")
        items = prefix_len_ptr is not None or token_pos_in_items_ptr is not None or max_item_len_ptr is not None
        refuse("token_pos_in_items_ptr", items, "call attention.forward(.., mask=, aux=)")
        causal = causal and custom_mask is None
        score_options = self.score_options(causal, sm_scale, window_left, logits_soft_cap, pos_encoding_mode, head_dim_qk)
        self.keys, of_q = (
            int(read_indptr("kv_indptr", kv_indptr)[-1]),
            read_indptr_like("qo_indptr", qo_indptr, "kv_indptr", kv_indptr),
        )
        self.record_expected(
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, int(of_q[-1]), q_data_type, kv_data_type, o_data_type
        )
        ends, ends_k = self.hold_for_graph("qo_indptr", qo_indptr), self.hold_for_graph("kv_indptr", kv_indptr)
        masked = {} if custom_mask is None else _mask_options(custom_mask, ends, ends_k[1:] - ends_k[:-1], self.hold_for_graph)
        self.planned = {"cu_seqlens": ends, "cu_seqlens_k": ends_k} | score_options | masked

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
        planned = self.merge_options(q_scale, k_scale, None, None) | ({} if out is None else {"out": out[None]})
        k, v = (x.swapaxes(0, 1) if self.heads_first else x for x in (k, v))
        self.check_arrays(q, k, v)
        for name, x in ("k", k), ("v", v):
            if x.shape[0] != self.keys and not (self.graph and x.shape[0] > self.keys):
                raise ValueError(f"{name}: must have the {self.keys} tokens that were planned: {name}.shape={tuple(x.shape)}")
        results = attention.forward(q[None], k[None], v[None], return_lse=return_lse, **planned)
        return _format_results(results, out, lse, return_lse, v_scale)


def _read_custom_mask(b: Any, h: Any, i: Any, j: Any, bits: Any, first: Any, keys: Any) -> Any:
    """mask(b, h, i, j) = bit first[b] + i keys[b] + j of `bits`."""
    return bits[i * keys[b] + (j + first[b])] != 0


def _mask_options(bits: Any, ends: Any, keys: Any, hold_for_graph: Any) -> dict[str, Any]:
    """decode's mask and aux. keys: how many each sequence has. ValueError: custom_mask does not have a bit for each query token
    and key."""
    if len(bits) >= MAX_MASK_BITS:
        raise ValueError(f"custom_mask: must have fewer than 2**24 bits; use attention.decode(.., mask=): {len(bits)=}")
    sizes = (ends[1:] - ends[:-1]) * keys
    if len(bits) != (expected := int(sizes.sum())):
        raise ValueError(
            f"custom_mask: must have a bit for each query token and key of each sequence, {expected}: {len(bits)=}"
        )
    first = sizes.cumsum(0) - sizes
    return {
        "mask": _read_custom_mask,
        "aux": (hold_for_graph("custom_mask", bits), hold_for_graph("first bits", first), hold_for_graph("keys", keys)),
    }
