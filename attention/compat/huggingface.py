"""transformers models on our kernels: `from attention.compat import huggingface`, and

    huggingface.register()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="tiles")

Prompts and training use attention.forward, steps of generation attention.decode, with dynamic and static caches.

| transformers                                   | here                                                            |
| ---------------------------------------------- | --------------------------------------------------------------- |
| query, key, value (B, H, S, D)                 | views (B, S, H, D); value may have fewer columns                |
| scaling, softcap                               | scale, softcap                                                  |
| s_aux, a layer's sinks                         | sink, in float32                                                |
| is_causal, sliding_window                      | causal, window=(sliding_window - 1, None)                       |
| padding, unused entries of a static cache      | leftpad and lengths, or a mask and lengths_k                    |
| position_ids that restart, cu_seq_lens_q       | a mask of documents, cu_seqlens                                 |
| any other mask: booleans, floats               | a mask that reads it, bias                                      |
| position_bias                                  | bias                                                            |
| dropout                                        | dropout; the seed is drawn, see `draw_dropout_options`          |

huggingface_masks.py says how masks are represented. Sequences that are packed by position_ids alone do not see each other, as
with flash_attention_2, if all keys are new: see `find_documents`. Results of queries that are padding are undefined, and differ
from eager's. float32 is supported under torch.autocast alone. Written for transformers 5, which importing this module
imports."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

import attention

from .arguments import draw_dropout_options, drop_none, refuse
from .huggingface_layers import replace_layers as replace_layers
from .huggingface_layers import restore_layers as restore_layers
from .huggingface_linear import linear_layers as linear_layers
from .huggingface_masks import MAX_DECODE_TOKENS, MaskInfo, create_mask, find_documents, read_mask, split_documents

__all__ = ["linear_layers", "register", "replace_layers", "restore_layers"]


def register(name: str = "tiles") -> None:
    """Make transformers know our attention and its masks as attn_implementation=name."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, create_mask)


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    position_ids: Any = None,
    **others: Any,
) -> tuple[Any, None]:
    """(out, None), as AttentionInterface requires: query (B, H, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv), out (B, Sq,
    H, Dv). attention_mask: None, a mask of create_mask, or one of sdpa's or eager's."""
    if others.get("output_attentions") or others.get("cache") is not None:
        refuse("output_attentions", bool(others.get("output_attentions")), "weights are never materialised; load with 'eager'")
        refuse("cache", True, "generate_batch uses its own page tables; call generate")
    for name in "indices", "block_indices":  # keys that the indexer of sparse attention chose
        refuse(name, others.get(name) is not None, "load with 'sdpa', for which the model makes a mask from them")
    if query.dtype == torch.float32 != value.dtype:  # norms and rotary embeddings may return float32
        query, key = query.to(value.dtype), key.to(value.dtype)
    info, tokens, keys = read_mask(attention_mask), query.shape[2], key.shape[2]
    sink = None if s_aux is None else s_aux.float()
    if info is None:
        refuse(
            "cu_seq_lens_q", cu_seq_lens_q is not None, "with your own attention_mask, the mask must say where sequences end"
        )
        causal, window = False, None
        if attention_mask.dtype == torch.uint8:
            attention_mask = attention_mask[..., :keys].view(torch.bool)
            if cu_seq_lens_q is None and _positions_may_pack(position_ids, MaskInfo(), tokens, keys):
                attention_mask = split_documents(attention_mask, position_ids)
        position_bias, mask_options = _options_of_tensor_mask(attention_mask, position_bias, keys)
        is_step, info = not mask_options, MaskInfo()
    else:
        causal, last = True, info.window
        if attention_mask is None:  # then the layer's own attributes decide
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            last = sliding_window if causal and sliding_window and sliding_window < keys else None
        window = None if last is None else (last - 1, None)
        if cu_seq_lens_q is None and _positions_may_pack(position_ids, info, tokens, keys):
            documents = find_documents(position_ids)
            info = info._replace(documents=documents if documents is None else documents.expand(len(query), -1))
        is_step, mask_options = causal and info.documents is cu_seq_lens_q is None, None
    few = tokens == 1 or tokens * (query.shape[1] // key.shape[1]) <= MAX_DECODE_TOKENS
    if few and is_step and not dropout and not _differentiated(query, key, value, sink, position_bias):
        lengths = query.new_full((len(query),), keys, dtype=torch.int32) if info.end is None else info.end
        out = attention.decode(
            query, key, value, lengths=lengths, leftpad=info.first, causal=causal, window=window, softcap=softcap,
            bias=position_bias, sink=sink, scale=scaling, layout="bhsd",
        )  # fmt: skip
        return out.transpose(1, 2), None
    if mask_options is None:
        if info.known_end is not None:  # the static cache has unused entries after it
            key, value, info = key[:, :, : info.known_end], value[:, :, : info.known_end], info._replace(end=None)
            position_bias = None if position_bias is None else position_bias[..., : key.shape[2]]
        mask_options = _options_of_mask_info(info, cu_seq_lens_q, cu_seq_lens_k)
    options = drop_none(window=window, softcap=softcap, sink=sink, scale=scaling, bias=position_bias) | draw_dropout_options(
        dropout, query
    )
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return attention.forward(query, key, value, causal=causal, **options, **mask_options), None


def _differentiated(*tensors: Any) -> bool:
    """Does any of these tensors require a gradient?"""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _positions_may_pack(position_ids: Any, info: MaskInfo, tokens: int, keys: int) -> bool:
    """May position_ids (B or 1, tokens) delimit documents? Not if a cache holds earlier keys, and not beside padding."""
    if (
        tokens == 1
        or tokens != (keys if info.known_end is None else info.known_end)
        or not info.documents is info.first is None
    ):
        return False
    return position_ids is not None and position_ids.ndim == 2 and position_ids.shape[1] == tokens


def _options_of_mask_info(info: MaskInfo, cu_seqlens: Any, cu_seqlens_k: Any) -> dict[str, Any]:
    """attention.forward's options for a MaskInfo; cu_seqlens takes the place of its documents."""
    if cu_seqlens is not None:
        return drop_none(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    if info.documents is not None:
        return {"mask": same_document, "aux": (info.documents,)}
    options = drop_none(lengths_k=info.end)
    return options if info.first is None else options | {"mask": after_padding, "aux": (info.first,)}


def _options_of_tensor_mask(mask: Any, bias: Any, keys: int) -> tuple[Any, dict[str, Any]]:
    """(bias, attention.forward's options) for any other mask, (B, H or 1, Sq, Sk or more), and a bias."""
    mask = mask[..., :keys]
    if mask.dtype != torch.bool:
        return mask if bias is None else mask + bias, {}
    if mask.shape[1] == 1:
        return bias, {"mask": look_up_mask, "aux": (mask[:, 0],)}
    return bias, {"mask": look_up_mask_of_head, "aux": (mask,)}


def after_padding(b, h, i, j, first):
    """True for keys from first[b] on."""
    return j >= first[b]


def same_document(b, h, i, j, documents):
    """True if the query and the key belong to one document."""
    return documents[b, i] == documents[b, j]


def look_up_mask(b, h, i, j, mask):
    """mask[b, i, j], the same for all heads."""
    return mask[b, i, j]


def look_up_mask_of_head(b, h, i, j, mask):
    """mask[b, h, i, j], with a mask for each head."""
    return mask[b, h, i, j]
