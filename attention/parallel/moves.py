"""Redistribution of an array among ranks: all that schemes send is sent by this module.

Each rank holds a `Cut` of the array: some rows of all heads, some heads of all rows, or any rows and heads. `move` brings the
array from the cuts that ranks hold to those that they want, with a message for each rectangle that two ranks have in common; a
rectangle that is contiguous in its place is received there without a copy. `gathered_sums` is the transpose: the values that
several ranks have of an element are added up at the rank that holds it, in float32 and in the order of ranks, so that the bits
do not depend on what arrives first."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from tiles.frameworks import kind_of

from .orders import Span, Spans, count_tokens, with_offsets
from .peers import Peers, PendingMessages

WIDE = torch.float64  # the dtype as which bytes are copied, eight at a time


def _as_strided(x: Any, size: tuple[int, ...], strides: tuple[int, ...], first: int) -> Any:
    return x.as_strided(size, strides, x.storage_offset() + first)


# A view of an array from some element on, made as torch.compile's code does, which takes half of the time of as_strided
strided = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_reinterpret_tensor", _as_strided)


class ShardRegion(NamedTuple):
    """What a rank holds of an array (batch, rows, heads, ..): the rows of some spans, one behind the other, of these heads."""

    spans: Spans
    heads: Span

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, heads) of the cut."""
        return count_tokens(self.spans), len(self.heads)


class RegionOverlap(NamedTuple):
    """A rectangle that two cuts have in common: its rows and heads in the first cut and in the second."""

    rows: slice
    heads: slice
    to_rows: slice
    to_heads: slice


def intersect_regions(source: ShardRegion, target: ShardRegion) -> list[RegionOverlap]:
    """The rectangles that two cuts have in common, in the same order on every rank."""
    heads = source.heads.within(target.heads)
    found: list[RegionOverlap] = []
    if not len(heads):
        return []
    columns = [slice(heads.start - cut.heads.start, heads.stop - cut.heads.start) for cut in (source, target)]
    for at, mine in with_offsets(source.spans):
        for to, its in with_offsets(target.spans):
            rows = mine.within(its)
            if len(rows):
                a, b = at + rows.start - mine.start, to + rows.start - its.start
                box = RegionOverlap(slice(a, a + len(rows)), columns[0], slice(b, b + len(rows)), columns[1])
                last = found[-1] if found else None
                if last and (last.rows.stop, last.to_rows.stop) == (a, b):  # one message, not two
                    found[-1] = box._replace(
                        rows=slice(last.rows.start, a + len(rows)), to_rows=slice(last.to_rows.start, b + len(rows))
                    )
                else:
                    found.append(box)
    return found


OffsetAndLength = tuple[int, int]  # the first of them, and how many
Rectangle = tuple[OffsetAndLength, OffsetAndLength]  # rows, heads
StridedView = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides, first element


def view_of(rows: slice, heads: slice) -> Rectangle:
    """The View of a rectangle."""
    return (rows.start, rows.stop - rows.start), (heads.start, heads.stop - heads.start)


class AxisSplit:
    """Several ranges of an axis of `extent` elements. Ranges that do not overlap are split off in one call, which takes no
    longer than one range by itself."""

    def __init__(self, extent: int, ranges: Sequence[OffsetAndLength]):
        self.ranges, self.sizes = list(dict.fromkeys(ranges)), []
        self.whole = self.ranges == [(0, extent)]
        pieces, end = {}, 0
        for first, length in sorted(self.ranges):
            if first >= end:
                self.sizes += [first - end] * (first > end) + [length]
                pieces[first, length], end = len(self.sizes) - 1, first + length
        self.sizes += [extent - end] * (extent > end)
        self.pieces = [pieces.get(one) for one in self.ranges]

    def of(self, x: Any, axis: int) -> Sequence[Any]:
        """These parts of x."""
        if self.whole:
            return (x,)
        pieces = x.unsafe_split_with_sizes(self.sizes, axis)
        return [x.narrow(axis, *one) if at is None else pieces[at] for one, at in zip(self.ranges, self.pieces)]


class RectangleViews:
    """Several rectangles of an array (batch, rows, heads, ..)."""

    def __init__(self, shape: tuple[int, int], views: Sequence[Rectangle]):
        self.rows = AxisSplit(shape[0], [rows for rows, _ in views])
        self.heads = [AxisSplit(shape[1], [its for rows, its in views if rows == one]) for one in self.rows.ranges]
        at = [self.rows.ranges.index(rows) for rows, _ in views]
        self.order = [(n, self.heads[n].ranges.index(heads)) for n, (_, heads) in zip(at, views)]
        self.of_all_heads = at if all([split.whole for split in self.heads]) else None

    def of(self, x: Any) -> list[Any]:
        """These parts of x."""
        if not self.order:
            return []
        parts = self.rows.of(x, 1)
        if self.of_all_heads:
            return [parts[n] for n in self.of_all_heads]
        found = [split.of(part, 2) for split, part in zip(self.heads, parts)]
        return [found[n][m] for n, m in self.order]


class Redistribution:
    """How an array (batch, rows, heads, ..) gets from the cuts that ranks have to those that they want, as one rank sees it.
    Computed once for all calls of a form, because it takes time.

    own: what this rank has itself: where it lies, and where it goes. sends: what it sends, and to whom. kept: for each of
    these, where the same lies among what the rank wants, or None; if it is contiguous there but not in its source, the copy
    there is sent. receives: from whom; sources: which rows of the sender's. here, there: the Views of what the rank has (own
    and sent) and of what it wants (own and received). most: the most rows of a rank. shape: (rows, heads) of what it wants.
    whole: all of that comes from some rank. by_rows: the same, and all parts are rows of all heads."""

    def __init__(self, rank: int, sources: tuple[ShardRegion, ...], targets: tuple[ShardRegion, ...]):
        self.shape, self.nothing = targets[rank].shape, len(sources) == 1 and sources == targets
        have, want = sources[rank], targets[rank]
        # beginning with the next rank, so that no rank is everybody's first
        others = [(rank + step) % len(sources) for step in range(1, len(sources))]
        own = intersect_regions(have, want)
        going = [(other, box) for other in others for box in intersect_regions(have, targets[other])]
        coming = [(other, box) for other in others for box in intersect_regions(sources[other], want)]
        self.own, self.sends, self.receives = len(own), [to for to, _ in going], [whom for whom, _ in coming]
        self.sources = [(box.rows.start, box.rows.stop) for _, box in coming]
        self.most = max([cut.shape[0] for cut in sources])
        self.here = RectangleViews(have.shape, [view_of(box.rows, box.heads) for box in (*own, *[box for _, box in going])])
        every = [*own, *[box for _, box in coming]]
        self.there = RectangleViews(self.shape, [view_of(box.to_rows, box.to_heads) for box in every])
        self.whole = sum(map(_size, every)) == self.shape[0] * self.shape[1]
        kept = [next((place for place in [_within(box, one) for one in own] if place), None) for _, box in going]
        self.kept = [place and RectangleViews(self.shape, [view_of(*place)]) for place in kept]
        self.rows: dict[Any, RowCopies] = {}
        of_all_heads = have.heads == want.heads and None not in (self.here.of_all_heads, self.there.of_all_heads)
        self.by_rows = self.whole and not self.nothing and of_all_heads

    def rows_of(self, x: Any) -> RowCopies:
        """The Rows of an array, for a Way that is by_rows."""
        form = x.shape, x.stride(), x.dtype, x.device
        found = self.rows.get(form)
        if found is None:
            found = self.rows[form] = RowCopies(x, self)
        return found


@functools.lru_cache(1024)
def plan_redistribution(rank: int, sources: tuple[ShardRegion, ...], targets: tuple[ShardRegion, ...]) -> Redistribution:
    """The Way of a rank, from a table; callers for whom the lookup takes too long keep it."""
    return Redistribution(rank, sources, targets)


def _within(box: RegionOverlap, own: RegionOverlap) -> tuple[slice, slice] | None:
    """Where a box of the same source lies in the target of `own`; None unless that contains it and all of its heads."""
    if box.heads != own.heads or box.rows.start < own.rows.start or box.rows.stop > own.rows.stop:
        return None
    first = own.to_rows.start - own.rows.start
    return slice(box.rows.start + first, box.rows.stop + first), own.to_heads


class PendingArrays:
    """Arrays on their way; `wait` returns them."""

    def __init__(self, found: list[Any], pending: PendingMessages, late: Sequence[tuple[Any, Any]]):
        self.found, self.pending, self.late = found, pending, late

    def wait(self) -> list[Any]:
        """Wait until all messages have arrived; the arrays that this rank wanted."""
        self.pending.wait()
        for place, tensor in self.late:
            place.copy_(tensor)
        self.late = ()
        return self.found


def redistribute(peers: Peers, *routes: tuple[Any, Redistribution]) -> PendingArrays:
    """Send several arrays, each by its Way, with one message between any two ranks. Elements that no rank has are 0."""
    if all([its.by_rows and x.shape[0] == 1 and (peers.maps or x.is_contiguous()) for x, its in routes]):
        return _move_rows(peers, routes)
    every: list[Any] = []
    sends, receives, late = [], [], []
    todo, places, parts, gaps = [], [], [], False
    for x, its in routes:
        if its.nothing:
            every.append(x)
            continue
        made = x.new_empty if its.whole else x.new_zeros
        found = made((x.shape[0], *its.shape, *x.shape[3:]))
        every.append(found)
        if its.here.of_all_heads is None or not x.is_contiguous():
            gaps, (x, found) = True, wide(x, found)
        here, there = its.here.of(x), its.there.of(found)
        todo.append((its, found, here, there, every[-1].dtype))
        parts += here[: its.own]
        places += there[: its.own]
    if parts and gaps:  # then their copies are sent
        torch._foreach_copy_(places, parts)  # on a GPU one launch for all of one dtype
    for its, found, here, there, dtype in todo:
        for rank, part, kept in zip(its.sends, here[its.own :], its.kept):
            for at, tensor in enumerate(_batches(part)):
                if not tensor.is_contiguous():
                    tensor = (tensor if kept is None else _batches(kept.of(found)[0])[at]).contiguous()
                sends.append((rank, tensor if tensor.dtype == dtype else tensor.view(dtype)))
        for rank, part in zip(its.receives, there[its.own :]):
            for place in _batches(part):
                tensor = place
                if not place.is_contiguous():
                    tensor = torch.empty_like(place, memory_format=torch.contiguous_format)
                    late.append((place, tensor))
                receives.append((rank, tensor if tensor.dtype == dtype else tensor.view(dtype)))
    pending = peers.exchange(sends, receives)
    if parts and not gaps:
        torch._foreach_copy_(places, parts)  # while messages begin: otherwise these would find all multiprocessors busy
    return PendingArrays(every, pending, late)


def made_like(x: Any, rows: int) -> Callable[[], Any]:
    """A function that makes arrays like x with a batch of one and so many rows, in less time than torch.empty takes."""
    return kind_of(x, "x").maker(x.device, (1, rows, *x.shape[2:]), str(x.dtype).removeprefix("torch."))


class RowCopies:
    """What `move` need not compute again for arrays of the form of x, if rows of one batch travel: the function that makes the
    array they come to, and (size, strides, first element) of each part. own: of own rows here and there. sends, receives:
    (rank, part)."""

    def __init__(self, x: Any, its: Redistribution):
        shape = (1, *its.shape, *x.shape[3:])
        self.make = made_like(x, shape[1])
        each = math.prod(shape[2:])
        strides = (shape[1] * each, each, *[math.prod(x.shape[n + 1 :]) for n in range(2, x.ndim)])

        def parts(views: RectangleViews, strides: tuple[int, ...]) -> list[StridedView]:
            assert views.of_all_heads is not None, "rows of all heads"
            every = [views.rows.ranges[n] for n in views.of_all_heads]
            return [((1, rows, *x.shape[2:]), strides, first * strides[1]) for first, rows in every]

        here, there = parts(its.here, x.stride()), parts(its.there, strides)
        self.own_here, self.own_there = here[: its.own], there[: its.own]
        self.sends, self.receives = [*zip(its.sends, here[its.own :])], [*zip(its.receives, there[its.own :])]


def _move_rows(peers: Peers, routes: Sequence[tuple[Any, Redistribution]]) -> PendingArrays:
    """The same for rows of one batch, all parts of which are contiguous, so that nothing else must be checked."""
    sends: list[Any] = []
    receives: list[Any] = []
    every, places, parts, brought = [], [], [], []
    for x, its in routes:
        rows = its.rows_of(x)
        found = rows.make()
        every.append(found)
        parts += [strided(x, *part) for part in rows.own_here]
        places += [strided(found, *part) for part in rows.own_there]
        coming = [(rank, strided(found, *part)) for rank, part in rows.receives]
        if peers.maps:
            brought.append((x, its, [part for _, part in coming]))
        else:
            sends += [(rank, strided(x, *part)) for rank, part in rows.sends]
            receives += coming
    pending = peers.pull_rows(brought) if peers.maps else peers.exchange(sends, receives)
    if parts:
        torch._foreach_copy_(places, parts)
    return PendingArrays(every, pending, ())


def wide(*arrays: Any) -> list[Any]:
    """The same bytes, seen as elements of eight bytes if that is possible for all arrays: torch copies rows with gaps between
    them element by element."""
    for x in arrays:
        each = max(1, WIDE.itemsize // x.element_size())
        if x.ndim < 4 or x.stride(-1) != 1 or any([n % each for n in (*x.stride()[:-1], x.storage_offset(), x.shape[-1])]):
            return [*arrays]
    return [x.view(WIDE) for x in arrays]


class PendingSums:
    """Sums on their way; `wait` returns them. parts: (rank, where it is added, what) of each message."""

    def __init__(self, found: list[Any], pending: PendingMessages, parts: list[tuple[int, Any, Any]]):
        self.found, self.pending, self.parts = found, pending, parts

    def wait(self) -> list[Any]:
        """Wait until all messages have arrived; the sums, added up in the order of ranks."""
        self.pending.wait()
        for _, place, part in sorted(self.parts, key=itemgetter(0)):
            place.add_(part)
        self.parts = []
        return self.found


def reduce_scatter(peers: Peers, *routes: tuple[Any, Redistribution]) -> list[Any]:
    """For each array, at the rank that holds an element, the sum of the values that other ranks have of it. Sums are in the
    dtype of the array, which should be float32."""
    return start_reduce_scatter(peers, *routes).wait()


def start_reduce_scatter(peers: Peers, *routes: tuple[Any, Redistribution], into: Sequence[Any] | None = None) -> PendingSums:
    """The same, without waiting for it. into: arrays to which the sums are added."""
    found = list(into or [x.new_zeros((x.shape[0], *its.shape, *x.shape[3:])) for x, its in routes])
    sends, receives, parts = [], [], []
    for total, (x, its) in zip(found, routes):
        here, there = its.here.of(x), its.there.of(total)
        sends += [(rank, one.contiguous()) for rank, part in zip(its.sends, here[its.own :]) for one in _batches(part)]
        parts += [(peers.rank, place, part) for place, part in zip(there, here[: its.own])]
        for rank, place in zip(its.receives, there[its.own :]):
            part = torch.empty_like(place, memory_format=torch.contiguous_format)
            receives += [(rank, one) for one in _batches(part)]
            parts.append((rank, place, part))
    return PendingSums(found, peers.exchange(sends, receives), parts)


def _batches(x: Any) -> Sequence[Any]:
    """The batches of an array; each is contiguous if the array's rows are."""
    return (x,) if x.shape[0] == 1 else x.unbind(0)


def _size(box: RegionOverlap) -> int:
    return (box.rows.stop - box.rows.start) * (box.heads.stop - box.heads.start)


def all_heads(heads: int) -> Span:
    """The span of all heads."""
    return Span(0, heads)
