"""Masks for transformers models, represented by a few numbers for each sequence.

transformers asks for a mask once a step and passes it to all layers. It must be None or, because masks of static caches are
made before a compiled step, a tensor with four axes; sdpa's mask has an element for each query and key. Ours is None if the
last query is at the last key and each query sees all keys up to its own. Otherwise it is a tensor of integers, (B, window,
kind, n):

| kind          | n      | for each sequence                                                            |
| ------------- | ------ | ---------------------------------------------------------------------------- |
| WINDOW        | 1      | no further numbers                                                           |
| END           | 1      | the number of keys: the last query is at the last of them                    |
| FIRST         | 1      | the first key that is not padding                                            |
| FIRST_AND_END | 2      | the first key that is not padding, and the number of keys                    |
| DOCUMENTS     | tokens | the document number of each token, which sees no other document              |

window: how many keys a query sees, up to its own; 1 means all. window and kind are extents of an expanded tensor, so the host
and torch.compile know them without reading memory. If padding lies between tokens, or the mask is of no such kind, sdpa's mask
is returned; as uint8 if there is no padding, because then positions may delimit documents, which they do not beside padding or
the caller's own mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

WINDOW, END, FIRST, FIRST_AND_END, DOCUMENTS = 1, 2, 3, 4, 5
CAUSAL, AND, WINDOWED, PACKED, MOVED = (  # the code objects by which we recognise transformers' mask functions
    getattr(function, "__code__", None)
    for function in (
        masking_utils.causal_mask_function,
        masking_utils.and_masks(masking_utils.causal_mask_function),
        masking_utils.sliding_window_overlay(1),
        masking_utils.packed_sequence_mask_function(None),
        hasattr(masking_utils, "remap_positions_for_packed_sequence")
        and masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, None),
    )
)
MAX_DECODE_TOKENS = 32  # the most new tokens for which attention.decode may be called, which needs the number of keys


class MaskInfo(NamedTuple):
    """What such a mask says. None: no window, no padding before the first key, as many keys as there are, one document.
    known_end: the end as an integer, if the host knows it, which it never does in a compiled graph."""

    window: int | None = None
    first: Any = None
    end: Any = None
    documents: Any = None
    known_end: int | None = None


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Any = None,
    device: Any = "cpu",
    **others: Any,
) -> Any:
    """A step's mask, as AttentionMaskInterface asks for it: q_length queries from position q_offset on see kv_length keys from
    kv_offset on where mask_function is true; attention_mask (B, tokens so far) is true where there is no padding. The host
    reads it, as it does for sdpa and FlashAttention; while torch.compile traces, it cannot, and sdpa's mask is returned."""
    info = _parse_mask_function(mask_function)
    if info and info.documents is None:
        info = _add_padding(info, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, device)
    if info and info.window and kv_length <= info.window:
        info = info._replace(window=None)
    if info and info.window != 1:
        return _encode_mask(info, batch_size, device)
    others |= {"allow_is_causal_skip": False, "device": device, "attention_mask": attention_mask}
    mask = masking_utils.sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **others)
    return mask.view(torch.uint8) if attention_mask is None else mask


def find_documents(position_ids: Any) -> Any:
    """The document number of each token (B or 1, tokens), int32; None if there is one document. A document begins where a
    position is not greater than the one before. To find this out the host reads memory, once for all layers that get this
    tensor, until it is written to. While torch.compile or a CUDA graph records, nothing can be read, and document numbers are
    always returned."""
    recorded = torch.compiler.is_compiling() or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing())
    # inference tensors have no version counter
    version = None if recorded or position_ids.is_inference() else position_ids._version
    if version is not None and (cached := getattr(position_ids, "documents", None)) and cached[0] == version:
        return cached[1]
    if is_tracing(position_ids):  # tested last, because it takes the host longest
        recorded, version = True, None
    begins = position_ids[:, 1:] <= position_ids[:, :-1]
    documents = None
    if recorded or begins.any():
        documents = torch.nn.functional.pad(begins.cumsum(1, dtype=torch.int32), (1, 0))
    if version is not None:
        position_ids.documents = version, documents
    return documents


def split_documents(mask: Any, position_ids: Any) -> Any:
    """sdpa's mask (B or 1, 1, tokens, tokens), restricted to keys of the query's document. position_ids (B or 1, tokens)."""
    documents = find_documents(position_ids)
    return mask if documents is None else mask & (documents[:, None, :, None] == documents[:, None, None])


def read_mask(mask: Any) -> MaskInfo | None:
    """The MaskInfo of one of our masks; None for masks of booleans and floats."""
    if mask is None:
        return MaskInfo()
    if mask.dtype in (torch.bool, torch.uint8) or mask.dtype.is_floating_point:
        return None
    if not torch.compiler.is_compiling() and hasattr(mask, "info"):
        return mask.info
    window, kind = mask.shape[1:3]
    numbers, window = mask[:, 0, 0], window if window > 1 else None
    if kind == DOCUMENTS:
        return MaskInfo(window, documents=numbers)
    first = numbers[:, 0] if kind in (FIRST, FIRST_AND_END) else None
    return MaskInfo(window, first, numbers[:, -1] if kind in (END, FIRST_AND_END) else None)


def _encode_mask(info: MaskInfo, batch: int, device: Any) -> Any:
    """The tensor for a MaskInfo, or None."""
    window, first, end, documents, _ = info
    if info == MaskInfo():
        return None
    kind, numbers = 0, [x for x in (first, end) if x is not None]
    if documents is not None:
        kind, mask = DOCUMENTS, documents
    elif not numbers:
        kind, mask = WINDOW, torch.zeros(batch, 1, dtype=torch.int32, device=device)
    else:
        kind = FIRST_AND_END if len(numbers) == 2 else FIRST if end is None else END
        mask = torch.stack(numbers, -1) if len(numbers) == 2 else numbers[0][:, None]
    mask = mask[:, None, None].expand(batch, window or 1, kind, -1)
    mask.info = info  # layers read this attribute, because decoding the tensor takes the host microseconds
    return mask


def _parse_mask_function(mask_function: Callable) -> MaskInfo | None:
    """The window and the documents of a causal mask function. None: it is another function, or torch.compile made the function,
    whose closure cannot be read (torch 2.13)."""
    window, documents = None, None
    try:
        for part in _split_mask_function(mask_function):
            if part.__code__ is WINDOWED:
                (window,) = _closure_values(part)
            elif part.__code__ is PACKED:
                (documents,) = _closure_values(part)
            elif part.__code__ is not CAUSAL:
                return None
    except AttributeError:
        return None
    return MaskInfo(window, documents=documents)


def _split_mask_function(function: Callable) -> Iterator[Callable]:
    """The mask functions whose conjunction this one is. Tokens of a document are as far apart as their positions are, so it
    does not matter which of the two a function compares."""
    if function.__code__ is AND:
        for part in _closure_values(function)[0]:
            yield from _split_mask_function(part)
    elif function.__code__ is MOVED:
        yield from _split_mask_function(_closure_values(function)[0])
    else:
        yield function


def _closure_values(function: Callable) -> list[Any]:
    """The values in a function's closure, in the order of their names."""
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _add_padding(
    info: MaskInfo, batch: int, queries: int, keys: int, offset: Any, begin: int, attention_mask: Any, device: Any
) -> MaskInfo | None:
    """The info with the first key and the end of each sequence; None if there is padding between tokens, or if that cannot be
    known yet."""
    first = None
    if attention_mask is not None:
        if is_tracing(attention_mask):
            return None
        tokens = attention_mask[:, begin : begin + keys]
        if not tokens.all():
            begins = tokens.clone()  # true at each token that follows padding
            begins[:, 1:] &= ~tokens[:, :-1]
            first = begins.int().argmax(1)
            most, last = torch.stack([begins.sum(1).max(), first.max()]).tolist()
            if most > 1:
                return None
            first = first.int() if last else None  # padding at the end affects only queries that are padding
    if isinstance(offset, torch.Tensor) and queries > MAX_DECODE_TOKENS and not is_tracing(offset):
        offset = int(offset)  # a prompt is faster if the host knows the number of keys
    if isinstance(offset, torch.Tensor):
        return info._replace(first=first, end=(offset + queries - begin).int().expand(batch))
    known_end = offset + queries - begin
    if queries > MAX_DECODE_TOKENS and known_end == keys:
        return info._replace(first=first)
    return info._replace(
        first=first, end=torch.full((batch,), known_end, dtype=torch.int32, device=device), known_end=known_end
    )
