"""An array that is cut between ranks, cut otherwise: the one thing that travels.

Each rank has some rows of all heads, or some heads of all rows, or whatever a `Cut` says. `move` brings an array from the cuts
that ranks have to those that they want, a tensor for each rectangle that two ranks have in common; what comes to its place as
it is comes there without a copy. `gathered_sums` is its transpose: what several ranks have of an element is added up where it
belongs, in float32, in the order of ranks, so that its bits do not depend on what arrives first."""

from __future__ import annotations

import functools
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


@functools.lru_cache(4096)
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


class Route(NamedTuple):
    """An array x (batch, rows, heads, ..), of which rank r has sources[r] and wants targets[r]."""

    x: Any
    sources: tuple[Cut, ...]
    targets: tuple[Cut, ...]


class Moving:
    """Arrays on their way: `wait` gives them."""

    def __init__(self, found: list[Any], pending: Pending, late: Sequence[tuple[Any, Any]]):
        self.found, self.pending, self.late = found, pending, late

    def wait(self) -> list[Any]:
        """The arrays, of this rank's targets, when all of them are here."""
        self.pending.wait()
        for place, tensor in self.late:
            place.copy_(tensor)
        self.late = ()
        return self.found


def move(peers: Peers, *routes: Route) -> Moving:
    """Arrays from what ranks have to what they want, as one message between two ranks. What no rank has is 0."""
    every: list[Any] = []
    sends, receives, late = [], [], []
    for x, sources, targets in routes:
        mine, batch = targets[peers.rank], range(x.shape[0])
        if peers.world == 1 and mine == sources[0]:
            every.append(x)
            continue
        made = torch.empty if covers(sources, mine) else torch.zeros
        found = made((len(batch), *mine.shape, *x.shape[3:]), dtype=x.dtype, device=x.device)
        every.append(found)
        for box in common(sources[peers.rank], mine):
            found[:, box.to_rows, box.to_heads] = x[:, box.rows, box.heads]
        for rank in _others(peers):
            for box in common(sources[peers.rank], targets[rank]):
                sends += [(rank, x[b, box.rows, box.heads].contiguous()) for b in batch]
            for box in common(sources[rank], mine):
                for place in [found[b, box.to_rows, box.to_heads] for b in batch]:
                    straight = place.is_contiguous()
                    tensor = place if straight else torch.empty_like(place, memory_format=torch.contiguous_format)
                    receives.append((rank, tensor))
                    late += [] if straight else [(place, tensor)]
    return Moving(every, peers.exchange(sends, receives), late)


def gathered_sums(peers: Peers, *routes: Route) -> list[Any]:
    """Of each array the sum, over ranks that have an element in sources[r], of what they have, as targets[r] wants it; in its
    dtype, which is float32 where sums matter."""
    sends, receives, parts = [], [], []
    for n, (x, sources, targets) in enumerate(routes):
        mine, batch = targets[peers.rank], range(x.shape[0])
        for rank in _others(peers):
            for box in common(sources[peers.rank], targets[rank]):
                sends += [(rank, x[b, box.rows, box.heads].contiguous()) for b in batch]
        for rank in range(peers.world):
            for box in common(sources[rank], mine):
                if rank == peers.rank:
                    part = x[:, box.rows, box.heads]
                else:
                    shape = len(batch), box.rows.stop - box.rows.start, box.heads.stop - box.heads.start, *x.shape[3:]
                    part = torch.empty(shape, dtype=x.dtype, device=x.device)
                    receives += [(rank, part[b]) for b in batch]
                parts.append((n, box, part))
    peers.exchange(sends, receives).wait()
    found = [x.new_zeros((x.shape[0], *targets[peers.rank].shape, *x.shape[3:])) for x, _, targets in routes]
    for n, box, part in parts:
        found[n][:, box.to_rows, box.to_heads] += part
    return found


@functools.lru_cache(4096)
def covers(sources: tuple[Cut, ...], target: Cut) -> bool:
    """Have ranks all of it?"""
    return sum([_size(box) for source in sources for box in common(source, target)]) == target.shape[0] * target.shape[1]


def _others(peers: Peers) -> Iterator[int]:
    """The other ranks, the next one first: no rank is everybody's first."""
    return ((peers.rank + step) % peers.world for step in range(1, peers.world))


def _size(box: Box) -> int:
    return (box.rows.stop - box.rows.start) * (box.heads.stop - box.heads.start)


def all_heads(heads: int) -> Span:
    """All of so many."""
    return Span(0, heads)
