"""Keys and values that are copied from other ranks while attention already reads: which, in which order, and for how many
copies each block of keys waits.

A rank puts its own keys where the others map them (mapped.py), and copies from the others what its queries see. A thread block
of attention reads keys from the last to the first, so later keys are copied first; it waits for a copy only when it needs its
keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..softmax.key_sources import BLOCK
from ..softmax.remote_keys import KeyPlacement
from .choice import ITEM_BYTES
from .gather_in_place import build_key_placement, count_keys_before, supports_options
from .orders import Span, Spans, count_tokens, with_offsets
from .pieces import ForwardCall

# the most copies for a span, the fewest bytes of one: the first must arrive soon, but each costs the host some 10 us
MAX_COPIES, MIN_COPY_BYTES = 4, 2**22


class RowCopy(NamedTuple):
    """A copy of some rows of a rank's share, of keys and of values, and where it goes among the rows of all other ranks."""

    rank: int
    source: Span
    place: Span


@dataclass(frozen=True, eq=False)
class CopySchedule:
    """What calls of a form have in common. most: rows of the longest share; rows: of others', that come; copies: in their
    order. lengths, required, placement: see softmax.remote_keys."""

    most: int
    rows: int
    copies: tuple[RowCopy, ...]
    lengths: Any
    required: Any
    placement: KeyPlacement


def plan_copies(
    rank: int, queries: Sequence[Spans], keys: Sequence[Spans], batch: int, call: ForwardCall
) -> CopySchedule | None:
    """That of a rank, if each has one: the queries of all of them see keys from the first on, each rank's as one launch."""
    pieces = [call.joined(spans, batch, least=1) for spans in queries]
    at_blocks = all([len(spans) <= 2 and all([span.start % BLOCK == 0 for span in spans]) for spans in keys])
    if batch != 1 or None in pieces or not at_blocks or not supports_options(call):
        return None
    piece, own = pieces[rank], keys[rank]
    assert piece is not None, "every rank has one"
    of_key, every = ITEM_BYTES * len(call.kv_heads) * sum(call.head_dims), []
    for other in [one for one in range(len(keys)) if one != rank]:
        for at, span in with_offsets(keys[other]):
            theirs = span.within(piece.keys)
            for part in _cut(theirs, min(MAX_COPIES, len(theirs) * of_key // MIN_COPY_BYTES)):
                first, to = at + part.start - span.start, part.start - count_keys_before(own, part.start)
                every.append((part, RowCopy(other, Span(first, first + len(part)), Span(to, to + len(part)))))
    every.sort(key=lambda one: -one[0].start)
    required = torch.zeros(-(-piece.keys.stop // BLOCK) + 1, dtype=torch.int32)
    required[-1] = len(every)
    for n, (part, _) in enumerate(every):
        required[part.start // BLOCK : -(-part.stop // BLOCK)] = n + 1
    most, copies = max(map(count_tokens, keys)), tuple([copy for _, copy in every])
    rows = max(1, sum([len(copy.place) for copy in copies]))  # TMA takes no array without elements
    return CopySchedule(
        most, rows, copies, piece.options["lengths_k"], required.to(call.device), build_key_placement(piece, own, call)
    )


def _cut(span: Span, pieces: int) -> list[Span]:
    """In so many pieces, or in one, of whole blocks."""
    each = max(1, -(-len(span) // (BLOCK * max(1, pieces)))) * BLOCK
    return [Span(first, min(span.stop, first + each)) for first in range(span.start, span.stop, each)]
