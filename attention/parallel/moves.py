"""An array that is cut between ranks, cut otherwise: the one thing that travels.

Each rank has some rows of all heads, or some heads of all rows, or whatever a `Cut` says. `move` brings an array from the cuts
that ranks have to those that they want, a tensor for each rectangle that two ranks have in common; what comes to its place as
it is comes there without a copy. `gathered_sums` is its transpose: what several ranks have of an element is added up where it
belongs, in float32, in the order of ranks, so that its bits do not depend on what arrives first."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from operator import itemgetter
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


class Route(NamedTuple):
    """An array x (batch, rows, heads, ..), of which rank r has sources[r] and wants targets[r]."""

    x: Any
    sources: tuple[Cut, ...]
    targets: tuple[Cut, ...]


class Messages(NamedTuple):
    """What becomes of a route on a rank: boxes that it has itself, and those that it sends and receives, each with the other
    rank; whole: does all that it wants come from somewhere? kept: where, among what it wants, that lies which it sends, where
    it is among its own: so it is sent from there, and no memory is taken besides."""

    own: list[Box]
    sends: list[tuple[int, Box]]
    kept: list[tuple[slice, slice] | None]
    receives: list[tuple[int, Box]]
    whole: bool


@functools.lru_cache(1024)
def messages(rank: int, sources: tuple[Cut, ...], targets: tuple[Cut, ...]) -> Messages:
    """Those of a rank, found once. The next rank comes first: no rank is everybody's first."""
    world = len(sources)
    mine, others = targets[rank], [(rank + step) % world for step in range(1, world)]
    sends = [(other, box) for other in others for box in common(sources[rank], targets[other])]
    receives = [(other, box) for other in others for box in common(sources[other], mine)]
    own = common(sources[rank], mine)
    came = sum([_size(box) for box in (*own, *[box for _, box in receives])])
    kept = [next((_within(box, one) for one in own if _within(box, one)), None) for _, box in sends]
    return Messages(own, sends, kept, receives, came == mine.shape[0] * mine.shape[1])


def _within(box: Box, own: Box) -> tuple[slice, slice] | None:
    """Where a box of the same source lies in the target of `own`, if that has it, and all of its heads."""
    if box.heads != own.heads or box.rows.start < own.rows.start or box.rows.stop > own.rows.stop:
        return None
    first = own.to_rows.start - own.rows.start
    return slice(box.rows.start + first, box.rows.stop + first), own.to_heads


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
        todo = messages(peers.rank, sources, targets)
        made = x.new_empty if todo.whole else x.new_zeros
        found = made((len(batch), *mine.shape, *x.shape[3:]))
        every.append(found)
        for box in todo.own:
            found[:, box.to_rows, box.to_heads] = x[:, box.rows, box.heads]
        for (rank, box), kept in zip(todo.sends, todo.kept):
            for b in batch:
                tensor = x[b, box.rows, box.heads]
                if kept and not tensor.is_contiguous():
                    tensor = found[b, kept[0], kept[1]]
                sends.append((rank, tensor.contiguous()))
        for rank, box in todo.receives:
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
        todo, batch = messages(peers.rank, sources, targets), range(x.shape[0])
        sends += [(rank, x[b, box.rows, box.heads].contiguous()) for rank, box in todo.sends for b in batch]
        parts += [(peers.rank, n, box, x[:, box.rows, box.heads]) for box in todo.own]
        for rank, box in todo.receives:
            shape = len(batch), box.rows.stop - box.rows.start, box.heads.stop - box.heads.start, *x.shape[3:]
            part = x.new_empty(shape)
            receives += [(rank, part[b]) for b in batch]
            parts.append((rank, n, box, part))
    peers.exchange(sends, receives).wait()
    found = [x.new_zeros((x.shape[0], *targets[peers.rank].shape, *x.shape[3:])) for x, _, targets in routes]
    for _, n, box, part in sorted(parts, key=itemgetter(0)):
        found[n][:, box.to_rows, box.to_heads] += part
    return found


def _size(box: Box) -> int:
    return (box.rows.stop - box.rows.start) * (box.heads.stop - box.heads.start)


def all_heads(heads: int) -> Span:
    """All of so many."""
    return Span(0, heads)
