"""transformers' models on our kernels: `from attention.compat import huggingface`, and

    huggingface.register()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="tiles")

Prompts and training go through attention.forward, steps of generation through attention.decode, over dynamic and static caches.

| transformers                                   | here                                                            |
| ---------------------------------------------- | --------------------------------------------------------------- |
| query, key, value (B, H, S, D)                 | views (B, S, H, D); value may have fewer columns                |
| scaling, softcap                               | scale, softcap                                                  |
| s_aux, a layer's sinks                         | sink, in float32                                                |
| is_causal, sliding_window                      | causal, window=(sliding_window - 1, None)                       |
| padding, a static cache's room                 | leftpad and lengths, or a mask and lengths_k                    |
| position_ids that begin anew, cu_seq_lens_q    | a mask of documents, cu_seqlens                                 |
| any other mask: truth values, floats           | a mask that reads it, bias                                      |
| position_bias                                  | bias                                                            |
| dropout                                        | dropout; the seed is drawn, see `asked.seeded`                  |

What a mask says is in huggingface_masks.py. Sequences that are packed by position_ids alone are kept apart, as
flash_attention_2 keeps them, where all keys are new: see `documents_of`. No query that is padding counts: what comes of it
differs from eager's. float32 is served under torch.autocast alone. Written for transformers 5, which comes with this module.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

import attention

from .asked import asked, refuse, seeded
from .huggingface_linear import linear_layers as linear_layers
from .huggingface_masks import FEW, Seen, documents_of, mask_of, read, split_documents


def register(name: str = "tiles") -> None:
    """Have transformers know our attention as attn_implementation=name, with its masks."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask_of)


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
    """(out, None), as AttentionInterface has it: query (B, H, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv), out
    (B, Sq, H, Dv). attention_mask: None, what mask_of made, or one of sdpa's or eager's."""
    if others.get("output_attentions") or others.get("cache") is not None:
        refuse("output_attentions", bool(others.get("output_attentions")), "weights are never made; load with 'eager'")
        refuse("cache", True, "generate_batch has pages of its own; call generate")
    for name in "indices", "block_indices":  # the keys that an indexer chose, of sparse attention
        refuse(name, others.get(name) is not None, "load with 'sdpa', for which the model makes a mask of them")
    if query.dtype == torch.float32 != value.dtype:  # as norms and positions may leave them
        query, key = query.to(value.dtype), key.to(value.dtype)
    seen, tokens, keys = read(attention_mask), query.shape[2], key.shape[2]
    sink = None if s_aux is None else s_aux.float()
    if seen is None:
        refuse("cu_seq_lens_q", cu_seq_lens_q is not None, "a mask of your own says where sequences end")
        causal, window = False, None
        if attention_mask.dtype == torch.uint8:
            attention_mask = attention_mask[..., :keys].view(torch.bool)
            if cu_seq_lens_q is None and _all_new(position_ids, Seen(), tokens, keys):
                attention_mask = split_documents(attention_mask, position_ids)
        position_bias, more = _of_mask(attention_mask, position_bias, keys)
    else:
        causal, last = True, seen.window
        if attention_mask is None:  # the layer says it
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            last = sliding_window if causal and sliding_window and sliding_window < keys else None
        window = None if last is None else (last - 1, None)
        if cu_seq_lens_q is None and _all_new(position_ids, seen, tokens, keys):
            documents = documents_of(position_ids)
            seen = seen._replace(documents=documents if documents is None else documents.expand(len(query), -1))
        few = tokens == 1 or tokens * (query.shape[1] // key.shape[1]) <= FEW
        plain = causal and seen.documents is position_bias is cu_seq_lens_q is None and not dropout
        if few and plain and not _differentiated(query, key, value, sink):
            lengths = query.new_full((len(query),), keys, dtype=torch.int32) if seen.end is None else seen.end
            out = attention.decode(
                query, key, value, lengths=lengths, leftpad=seen.first, window=window, softcap=softcap, sink=sink,
                scale=scaling, layout="bhsd",
            )  # fmt: skip
            return out.transpose(1, 2), None
        if seen.known is not None:  # a static cache has room behind
            key, value, seen = key[:, :, : seen.known], value[:, :, : seen.known], seen._replace(end=None)
        more = _of_keys(seen, cu_seq_lens_q, cu_seq_lens_k)
    options = asked(window=window, softcap=softcap, sink=sink, scale=scaling, bias=position_bias) | seeded(dropout, query)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return attention.forward(query, key, value, causal=causal, **options, **more), None


def _differentiated(*tensors: Any) -> bool:
    """Does one of them want a gradient?"""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _all_new(position_ids: Any, seen: Seen, tokens: int, keys: int) -> bool:
    """Can positions (B or 1, tokens) be those of documents? Not behind keys of a cache, and not beside padding."""
    if tokens == 1 or tokens != (keys if seen.known is None else seen.known) or not seen.documents is seen.first is None:
        return False
    return position_ids is not None and position_ids.ndim == 2 and position_ids.shape[1] == tokens


def _of_keys(seen: Seen, cu_seqlens: Any, cu_seqlens_k: Any) -> dict[str, Any]:
    """forward's options of a small mask's numbers; where sequences end says what their documents say."""
    if cu_seqlens is not None:
        return asked(cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    if seen.documents is not None:
        return {"mask": of_one_document, "aux": (seen.documents,)}
    options = asked(lengths_k=seen.end)
    return options if seen.first is None else options | {"mask": behind_padding, "aux": (seen.first,)}


def _of_mask(mask: Any, bias: Any, keys: int) -> tuple[Any, dict[str, Any]]:
    """(the bias, forward's options) of another mask, (B, H or 1, Sq, Sk or more), and a bias."""
    mask = mask[..., :keys]
    if mask.dtype != torch.bool:
        return mask if bias is None else mask + bias, {}
    if mask.shape[1] == 1:
        return bias, {"mask": as_given, "aux": (mask[:, 0],)}
    return bias, {"mask": as_given_to_heads, "aux": (mask,)}


def behind_padding(b, h, i, j, first):
    """Keys from the first one of the sequence on."""
    return j >= first[b]


def of_one_document(b, h, i, j, documents):
    """Keys of the query's document."""
    return documents[b, i] == documents[b, j]


def as_given(b, h, i, j, mask):
    """A mask of each sequence, as it is."""
    return mask[b, i, j]


def as_given_to_heads(b, h, i, j, mask):
    """The same of each head."""
    return mask[b, h, i, j]
