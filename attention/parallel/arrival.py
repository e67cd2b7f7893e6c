"""Keys and values that are copied while attention reads them: which, in which order, and what each block of keys waits for.

Every rank of gather has room for all keys, each at its place in the whole, in memory that the others map (mapped.py). It puts
its own there, and copies from the others what its queries see. A thread block of attention reads keys from the last to the
first, so later ones are copied first, and waits for a copy only where it comes to its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..softmax.held import BLOCK
from .choice import ITEM
from .orders import Span, Spans, count, places
from .others import SERVED
from .pieces import Call, Piece

MOST, LEAST = 4, 2**22  # copies of a span, and bytes of one: the first must come soon, and each takes the host some 10 us


@dataclass(frozen=True, eq=False)
class Arrival:
    """What calls of a form have in common. keys: rows of the whole; seen: the first of these, which the rank's queries see.
    own: (where they lie in the rank's share, which) of its keys. copies: (whose, which) of the others', in their order.
    lengths: see attention.forward's lengths_k. awaits: see softmax.elsewhere."""

    keys: int
    seen: int
    own: tuple[tuple[int, Span], ...]
    copies: tuple[tuple[int, Span], ...]
    lengths: Any
    awaits: Any
    causal: bool
    scale: float | None


def arrival_of(rank: int, queries: Sequence[Spans], keys: Sequence[Spans], batch: int, call: Call) -> Arrival | None:
    """That of a rank, if each has one: the queries of all of them see keys from the first on, each as one launch."""
    pieces = [_piece(call, spans, batch) for spans in queries]
    at_blocks = all([span.start % BLOCK == 0 for spans in keys for span in spans])
    if batch != 1 or None in pieces or not at_blocks or not call.told.keys() <= SERVED:
        return None
    piece = pieces[rank]
    assert piece is not None, "every rank has one"
    seen = piece.keys.stop
    theirs = [(other, span.within(piece.keys)) for other, spans in enumerate(keys) for span in spans if other != rank]
    of_key = ITEM * len(call.kv_heads) * sum(call.head_dims)
    every = [(other, part) for other, span in theirs for part in _cut(span, min(MOST, len(span) * of_key // LEAST))]
    copies = sorted([one for one in every if len(one[1])], key=lambda one: -one[1].start)
    awaits = torch.zeros(-(-seen // BLOCK) + 1, dtype=torch.int32)
    awaits[-1] = len(copies)
    for n, (_, span) in enumerate(copies):
        awaits[span.start // BLOCK : -(-span.stop // BLOCK)] = n + 1
    scale, lengths = call.told.get("scale"), piece.options["lengths_k"]
    own, awaits = tuple(places(keys[rank])), awaits.to(call.device)
    return Arrival(sum(map(count, keys)), seen, own, tuple(copies), lengths, awaits, bool(call.told.get("causal")), scale)


def _cut(span: Span, pieces: int) -> list[Span]:
    """In so many pieces, or in one, of whole blocks."""
    each = max(1, -(-len(span) // (BLOCK * max(1, pieces)))) * BLOCK
    return [Span(first, min(span.stop, first + each)) for first in range(span.start, span.stop, each)]


def _piece(call: Call, spans: Spans, batch: int) -> Piece | None:
    """All of a rank's queries, as one launch."""
    return call.joined(spans, batch, least=1)
