"""Which keys the queries of a transformers model see, said in a few numbers a sequence.

transformers asks for a mask once a step and hands it to all layers. It must be None or, since the masks of static caches are
made ahead of a compiled step, a tensor of four axes; sdpa's has all queries and all keys. Ours is None where the last query
stands at the last key and all keys up to a query's place are seen. Otherwise it is one of integers, (B, window, kind, n):

| kind      | n      | of each sequence                                                                 |
| --------- | ------ | -------------------------------------------------------------------------------- |
| WINDOW    | 1      | nothing more                                                                     |
| END       | 1      | how many keys there are: the last query stands at the last of these              |
| FIRST     | 1      | the first key that is no padding                                                 |
| BOTH      | 2      | the first key that is no padding, and how many keys there are                    |
| DOCUMENTS | tokens | the number of each token's document, which sees no other one                     |

window: how many keys up to its place a query sees; 1 says all. As window and kind are extents, the integers being expanded, the
host and torch.compile know them without a look at memory. Where padding lies between tokens, and for masks that are none of
these, it is sdpa's mask after all; as uint8 if there is no padding, for then positions may say which documents there are, while
beside padding, or a mask of the caller's, they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

WINDOW, END, FIRST, BOTH, DOCUMENTS = 1, 2, 3, 4, 5
CAUSAL, AND, WINDOWED, PACKED, MOVED = (  # which mask of transformers a function is, its code says
    getattr(made, "__code__", None)
    for made in (
        masking_utils.causal_mask_function,
        masking_utils.and_masks(masking_utils.causal_mask_function),
        masking_utils.sliding_window_overlay(1),
        masking_utils.packed_sequence_mask_function(None),
        hasattr(masking_utils, "remap_positions_for_packed_sequence")
        and masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, None),
    )
)
FEW = 32  # new tokens that attention.decode may serve, which wants to know how many keys there are


class Seen(NamedTuple):
    """What such a mask says. None: no window, no padding before, as many keys as there are, one document. known: the end, if
    the host knows it, as a compiled graph never does."""

    window: int | None = None
    first: Any = None
    end: Any = None
    documents: Any = None
    known: int | None = None


def mask_of(
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
    """A step's mask, as AttentionMaskInterface asks for it: q_length queries from place q_offset on see kv_length keys from
    kv_offset on, where mask_function lets them; attention_mask (B, tokens so far) is true where there is no padding. That is
    looked at on the host, as it is for sdpa and FlashAttention, but where torch.compile traces this: then it is sdpa's mask."""
    seen = _said(mask_function)
    if seen and seen.documents is None:
        seen = _placed(seen, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, device)
    if seen and seen.window and kv_length <= seen.window:
        seen = seen._replace(window=None)
    if seen and seen.window != 1:
        return _small(seen, batch_size, device)
    others |= {"allow_is_causal_skip": False, "device": device, "attention_mask": attention_mask}
    made = masking_utils.sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **others)
    return made.view(torch.uint8) if attention_mask is None else made


def documents_of(position_ids: Any) -> Any:
    """The number of each token's document (B or 1, tokens), int32: one begins where a position is not above the one before;
    None: there is one document. To see that the host reads memory once for all layers that get this tensor, until it is written
    anew. While torch.compile or a CUDA graph records, nothing can be read, and all positions are documents."""
    recorded = torch.compiler.is_compiling() or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing())
    version = None if recorded or position_ids.is_inference() else position_ids._version  # inference tensors count no writes
    if version is not None and (kept := getattr(position_ids, "documents", None)) and kept[0] == version:
        return kept[1]
    if is_tracing(position_ids):  # which takes the host longer than all of the above
        recorded, version = True, None
    begins = position_ids[:, 1:] <= position_ids[:, :-1]
    documents = None
    if recorded or begins.any():
        documents = torch.nn.functional.pad(begins.cumsum(1, dtype=torch.int32), (1, 0))
    if version is not None:
        position_ids.documents = version, documents
    return documents


def split_documents(mask: Any, position_ids: Any) -> Any:
    """sdpa's mask (B or 1, 1, tokens, tokens), and no key of another document. position_ids (B or 1, tokens)."""
    documents = documents_of(position_ids)
    return mask if documents is None else mask & (documents[:, None, :, None] == documents[:, None, None])


def read(mask: Any) -> Seen | None:
    """What a mask of ours says; of others, truth values and what is added to scores, None."""
    if mask is None:
        return Seen()
    if mask.dtype in (torch.bool, torch.uint8) or mask.dtype.is_floating_point:
        return None
    if not torch.compiler.is_compiling() and hasattr(mask, "seen"):
        return mask.seen
    window, kind = mask.shape[1:3]
    numbers, window = mask[:, 0, 0], window if window > 1 else None
    if kind == DOCUMENTS:
        return Seen(window, documents=numbers)
    first = numbers[:, 0] if kind in (FIRST, BOTH) else None
    return Seen(window, first, numbers[:, -1] if kind in (END, BOTH) else None)


def _small(seen: Seen, batch: int, device: Any) -> Any:
    """The mask that says this, or None."""
    window, first, end, documents, _ = seen
    if seen == Seen():
        return None
    kind, held = 0, [x for x in (first, end) if x is not None]
    if documents is not None:
        kind, made = DOCUMENTS, documents
    elif not held:
        kind, made = WINDOW, torch.zeros(batch, 1, dtype=torch.int32, device=device)
    else:
        kind = BOTH if len(held) == 2 else FIRST if end is None else END
        made = torch.stack(held, -1) if len(held) == 2 else held[0][:, None]
    made = made[:, None, None].expand(batch, window or 1, kind, -1)
    made.seen = seen  # for the layers: to cut it out again takes the host microseconds
    return made


def _said(mask_function: Callable) -> Seen | None:
    """The window and the documents of a causal mask; None: it is another, or torch.compile, which made the function itself,
    does not say what it holds (torch 2.13)."""
    window, documents = None, None
    try:
        for piece in _pieces(mask_function):
            if piece.__code__ is WINDOWED:
                (window,) = _held(piece)
            elif piece.__code__ is PACKED:
                (documents,) = _held(piece)
            elif piece.__code__ is not CAUSAL:
                return None
    except AttributeError:
        return None
    return Seen(window, documents=documents)


def _pieces(function: Callable) -> Iterator[Callable]:
    """The masks that must all hold. Tokens of a document are as far apart as their positions say, so it does not matter which
    of the two a mask compares."""
    if function.__code__ is AND:
        for piece in _held(function)[0]:
            yield from _pieces(piece)
    elif function.__code__ is MOVED:
        yield from _pieces(_held(function)[0])
    else:
        yield function


def _held(function: Callable) -> list[Any]:
    """What a function holds, in the order of the names."""
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _placed(
    seen: Seen, batch: int, queries: int, keys: int, place: Any, begin: int, attention_mask: Any, device: Any
) -> Seen | None:
    """With where keys begin and end; None: there is padding between tokens, or that cannot be known yet."""
    first = None
    if attention_mask is not None:
        if is_tracing(attention_mask):
            return None
        tokens = attention_mask[:, begin : begin + keys]
        if not tokens.all():
            begins = tokens.clone()  # where a token follows on padding
            begins[:, 1:] &= ~tokens[:, :-1]
            first = begins.int().argmax(1)
            most, last = torch.stack([begins.sum(1).max(), first.max()]).tolist()
            if most > 1:
                return None
            first = first.int() if last else None  # padding behind is no query's that counts
    if isinstance(place, torch.Tensor) and queries > FEW and not is_tracing(place):
        place = int(place)  # of a prompt: it is served faster when the host knows how many keys there are
    if isinstance(place, torch.Tensor):
        return seen._replace(first=first, end=(place + queries - begin).int().expand(batch))
    known = place + queries - begin
    if queries > FEW and known == keys:
        return seen._replace(first=first)
    return seen._replace(first=first, end=torch.full((batch,), known, dtype=torch.int32, device=device), known=known)
