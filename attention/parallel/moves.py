"""An array that is cut between ranks, cut otherwise: the one thing that travels.

Each rank has some rows of all heads, or some heads of all rows, or whatever a `Cut` says. `move` brings an array from the cuts
that ranks have to those that they want, a message for each rectangle that two ranks have in common; what comes to its place as
it is comes there without a copy. `gathered_sums` is its transpose: what several ranks have of an element is added up where it
belongs, in float32, in the order of ranks, so that its bits do not depend on what arrives first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .orders import Span, Spans, count
from .peers import Peers, Pending


class Cut(NamedTuple):
    """What a rank has of an array (batch, rows, heads, ..): the rows of spans, one behind the other, of these heads."""

    spans: Spans
    heads: Span

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, heads) of what it has."""
        return count(self.spans), len(self.heads)

    def places(self) -> Iterator[tuple[int, Span]]:
        """(where it lies, which it is) of each span."""
        at = 0
        for span in self.spans:
            yield at, span
            at += len(span)


class Box(NamedTuple):
    """A rectangle that two cuts have in common: its rows and heads in the one and in the other."""

    rows: slice
    heads: slice
    to_rows: slice
    to_heads: slice


def common(source: Cut, target: Cut) -> list[Box]:
    """The rectangles that both have, in one order whoever asks."""
    heads, found = source.heads.within(target.heads), []
    if not len(heads):
        return []
    columns = [slice(heads.start - cut.heads.start, heads.stop - cut.heads.start) for cut in (source, target)]
    for at, mine in source.places():
        for to, its in target.places():
            rows = mine.within(its)
            if len(rows):
                a, b = at + rows.start - mine.start, to + rows.start - its.start
                found.append(Box(slice(a, a + len(rows)), columns[0], slice(b, b + len(rows)), columns[1]))
    return found


class Moving:
    """An array on its way: `wait` gives it."""

    def __init__(self, found: Any, pending: Pending, late: Sequence[tuple[Any, Any]]):
        self.found, self.pending, self.late = found, pending, late

    def wait(self) -> Any:
        """The array, of this rank's target, when all of it is here."""
        self.pending.wait()
        for place, tensor in self.late:
            place.copy_(tensor)
        self.late = ()
        return self.found


def move(peers: Peers, x: Any, sources: Sequence[Cut], targets: Sequence[Cut]) -> Moving:
    """x (batch, rows, heads, ..), of which rank r has sources[r], as targets[r] wants it. What no rank has is 0."""
    mine = targets[peers.rank]
    if peers.world == 1 and mine == sources[0]:
        return Moving(x, Pending(()), ())
    batch = x.shape[0]
    sends, receives, late = [], [], []
    covered = sum([_size(box) for source in sources for box in common(source, mine)])
    made = torch.empty if covered == mine.shape[0] * mine.shape[1] else torch.zeros
    found = made((batch, *mine.shape, *x.shape[3:]), dtype=x.dtype, device=x.device)
    for box in common(sources[peers.rank], mine):
        found[:, box.to_rows, box.to_heads] = x[:, box.rows, box.heads]
    for rank in _others(peers):
        for box in common(sources[peers.rank], targets[rank]):
            sends += [(rank, x[b, box.rows, box.heads].contiguous()) for b in range(batch)]
        for box in common(sources[rank], mine):
            for place in [found[b, box.to_rows, box.to_heads] for b in range(batch)]:
                straight = place.is_contiguous()
                tensor = place if straight else torch.empty_like(place, memory_format=torch.contiguous_format)
                receives.append((rank, tensor))
                late += [] if straight else [(place, tensor)]
    return Moving(found, peers.exchange(sends, receives), late)


def gathered_sums(peers: Peers, x: Any, sources: Sequence[Cut], targets: Sequence[Cut]) -> Any:
    """The sum, over ranks that have an element in sources[r], of what they have, as targets[r] wants it; in x's dtype, which is
    float32 where sums matter."""
    if peers.world == 1 and targets[0] == sources[0]:
        return x
    batch, mine = x.shape[0], targets[peers.rank]
    sends, receives, parts = [], [], []
    for rank in _others(peers):
        for box in common(sources[peers.rank], targets[rank]):
            sends += [(rank, x[b, box.rows, box.heads].contiguous()) for b in range(batch)]
    for rank in range(peers.world):
        for box in common(sources[rank], mine):
            if rank == peers.rank:
                part = x[:, box.rows, box.heads]
            else:
                shape = batch, box.rows.stop - box.rows.start, box.heads.stop - box.heads.start, *x.shape[3:]
                part = torch.empty(shape, dtype=x.dtype, device=x.device)
                receives += [(rank, part[b]) for b in range(batch)]
            parts.append((box, part))
    peers.exchange(sends, receives).wait()
    found = torch.zeros((batch, *mine.shape, *x.shape[3:]), dtype=x.dtype, device=x.device)
    for box, part in parts:
        found[:, box.to_rows, box.to_heads] += part
    return found


def _others(peers: Peers) -> Iterator[int]:
    """The other ranks, the next one first: no rank is everybody's first."""
    return ((peers.rank + step) % peers.world for step in range(1, peers.world))


def _size(box: Box) -> int:
    return (box.rows.stop - box.rows.start) * (box.heads.stop - box.heads.start)


def all_heads(heads: int) -> Span:
    """All of so many."""
    return Span(0, heads)
