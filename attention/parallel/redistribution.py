"""Redistribution of an array among ranks: all messages of the schemes are sent by this module.

Each rank holds a `ShardRegion` of the array: some rows of all heads, some heads of all rows, or any rows and heads.
`redistribute` brings the array from the regions that ranks hold to those that they need, with a message for each rectangle that
two ranks have in common; a rectangle that is contiguous in the output is received there without a copy. `reduce_scatter` is its
transpose: the values that several ranks have of an element are added at the rank that holds the element, in float32 and in the
order of ranks, so that the bits do not depend on which message arrives first."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from tiles.launching.frameworks import kind_of

from .orders import Span, Spans, count_tokens, spans_with_offsets
from .peers import Peers, PendingMessages

WIDE = torch.float64  # the dtype of copies whose elements are 8 bytes


def _as_strided(x: Any, size: tuple[int, ...], strides: tuple[int, ...], first: int) -> Any:
    return x.as_strided(size, strides, x.storage_offset() + first)


# A view of an array from some element on, by the function of torch.compile's generated code: half of as_strided's host time
strided_view = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_reinterpret_tensor", _as_strided)


class ShardRegion(NamedTuple):
    """The part of an array (batch, rows, heads, ..) that a rank holds: the rows of some spans, packed, of these heads."""

    spans: Spans
    heads: Span

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, heads) = (count_tokens(spans), len(heads))"""
        return count_tokens(self.spans), len(self.heads)


class RegionOverlap(NamedTuple):
    """A rectangle that two regions have in common: its rows and heads in the first region and in the second."""

    rows: slice
    heads: slice
    to_rows: slice
    to_heads: slice


def intersect_regions(source: ShardRegion, target: ShardRegion) -> list[RegionOverlap]:
    """The rectangles that two regions have in common, in the same order on every rank."""
    heads = source.heads.intersect(target.heads)
    overlaps: list[RegionOverlap] = []
    if not len(heads):
        return []
    columns = [slice(heads.start - region.heads.start, heads.stop - region.heads.start) for region in (source, target)]
    for offset, span in spans_with_offsets(source.spans):
        for to_offset, to_span in spans_with_offsets(target.spans):
            rows = span.intersect(to_span)
            if len(rows):
                first, to_first = offset + rows.start - span.start, to_offset + rows.start - to_span.start
                overlap = RegionOverlap(
                    slice(first, first + len(rows)), columns[0], slice(to_first, to_first + len(rows)), columns[1]
                )
                last = overlaps[-1] if overlaps else None
                if last and (last.rows.stop, last.to_rows.stop) == (first, to_first):  # one message instead of two
                    overlaps[-1] = overlap._replace(
                        rows=slice(last.rows.start, overlap.rows.stop), to_rows=slice(last.to_rows.start, overlap.to_rows.stop)
                    )
                else:
                    overlaps.append(overlap)
    return overlaps


OffsetAndLength = tuple[int, int]
Rectangle = tuple[OffsetAndLength, OffsetAndLength]  # rows, heads
StridedView = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides, first element


def rectangle(rows: slice, heads: slice) -> Rectangle:
    """The Rectangle of these rows and heads."""
    return (rows.start, rows.stop - rows.start), (heads.start, heads.stop - heads.start)


class AxisSplit:
    """Takes several ranges out of an axis of `extent` elements. Ranges that do not overlap are split off by one torch call,
    which takes as long as taking one range."""

    def __init__(self, extent: int, ranges: Sequence[OffsetAndLength]):
        self.ranges, self.sizes = list(dict.fromkeys(ranges)), []
        self.is_whole_axis = self.ranges == [(0, extent)]
        parts, end = {}, 0
        for first, length in sorted(self.ranges):
            if first >= end:
                self.sizes += [first - end] * (first > end) + [length]
                parts[first, length], end = len(self.sizes) - 1, first + length
        self.sizes += [extent - end] * (extent > end)
        self.parts = [parts.get(one) for one in self.ranges]

    def split(self, x: Any, axis: int) -> Sequence[Any]:
        """The views of x that have these ranges of the axis."""
        if self.is_whole_axis:
            return (x,)
        parts = x.unsafe_split_with_sizes(self.sizes, axis)
        return [x.narrow(axis, *one) if at is None else parts[at] for one, at in zip(self.ranges, self.parts)]


class RectangleViews:
    """Takes several rectangles out of an array (batch, rows, heads, ..)."""

    def __init__(self, shape: tuple[int, int], rectangles: Sequence[Rectangle]):
        self.rows = AxisSplit(shape[0], [rows for rows, _ in rectangles])
        self.heads = [AxisSplit(shape[1], [heads for rows, heads in rectangles if rows == one]) for one in self.rows.ranges]
        at = [self.rows.ranges.index(rows) for rows, _ in rectangles]
        self.order = [(n, self.heads[n].ranges.index(heads)) for n, (_, heads) in zip(at, rectangles)]
        self.all_head_rows = at if all([split.is_whole_axis for split in self.heads]) else None

    def take(self, x: Any) -> list[Any]:
        """The views of x that are these rectangles, in order."""
        if not self.order:
            return []
        parts = self.rows.split(x, 1)
        if self.all_head_rows:
            return [parts[n] for n in self.all_head_rows]
        views = [split.split(part, 2) for split, part in zip(self.heads, parts)]
        return [views[n][m] for n, m in self.order]


class Redistribution:
    """The messages and copies that bring an array (batch, rows, heads, ..) from the regions that ranks hold to those that they
    need, as one rank sees them. Computed once for all calls with one signature, because it takes time.

    num_local: how many rectangles this rank copies from its own source to its own target. sends: to which rank each message
    goes. output_views: for each message sent, the views of the output that hold the same elements, or None; if they are
    contiguous there but not in the source, the message is sent from there. receives: from which rank each message comes;
    source_rows: which rows of the sender's source it has. source_views, target_views: the RectangleViews of the source (local
    ones, and those sent) and of the target (local ones, and those received). max_rows: the most rows of a rank's source. shape:
    (rows, heads) of the target. complete: every element of the target comes from some rank. only_rows: complete, and all
    rectangles are rows of all heads."""

    def __init__(self, rank: int, sources: tuple[ShardRegion, ...], targets: tuple[ShardRegion, ...]):
        self.shape, self.is_identity = targets[rank].shape, len(sources) == 1 and sources == targets
        source, target = sources[rank], targets[rank]
        # beginning with the next rank, so that ranks do not all send to the same rank first
        others = [(rank + step) % len(sources) for step in range(1, len(sources))]
        local = intersect_regions(source, target)
        sent = [(other, overlap) for other in others for overlap in intersect_regions(source, targets[other])]
        received = [(other, overlap) for other in others for overlap in intersect_regions(sources[other], target)]
        self.num_local, self.sends, self.receives = len(local), [to for to, _ in sent], [sender for sender, _ in received]
        self.source_rows = [(overlap.rows.start, overlap.rows.stop) for _, overlap in received]
        self.max_rows = max([region.shape[0] for region in sources])
        from_source = [rectangle(one.rows, one.heads) for one in (*local, *[overlap for _, overlap in sent])]
        self.source_views = RectangleViews(source.shape, from_source)
        arriving = [*local, *[overlap for _, overlap in received]]
        self.target_views = RectangleViews(self.shape, [rectangle(one.to_rows, one.to_heads) for one in arriving])
        self.complete = sum(map(_size, arriving)) == self.shape[0] * self.shape[1]
        copies = [
            next((location for location in [_locate(overlap, one) for one in local] if location), None) for _, overlap in sent
        ]
        self.output_views = [location and RectangleViews(self.shape, [rectangle(*location)]) for location in copies]
        self.row_copies: dict[Any, RowCopies] = {}
        has_all_heads = source.heads == target.heads and None not in (
            self.source_views.all_head_rows,
            self.target_views.all_head_rows,
        )
        self.only_rows = self.complete and not self.is_identity and has_all_heads

    def row_copies_of(self, x: Any) -> RowCopies:
        """The RowCopies for an array, of a Redistribution that has only_rows."""
        key = x.shape, x.stride(), x.dtype, x.device
        row_copies = self.row_copies.get(key)
        if row_copies is None:
            row_copies = self.row_copies[key] = RowCopies(x, self)
        return row_copies


@functools.lru_cache(1024)
def plan_redistribution(rank: int, sources: tuple[ShardRegion, ...], targets: tuple[ShardRegion, ...]) -> Redistribution:
    """The Redistribution of a rank, cached; callers for which the lookup takes too long keep it."""
    return Redistribution(rank, sources, targets)


def _locate(overlap: RegionOverlap, local: RegionOverlap) -> tuple[slice, slice] | None:
    """(rows, heads) of an overlap of the same source inside the target of `local`; None unless that contains it, and has the
    same heads."""
    if overlap.heads != local.heads or overlap.rows.start < local.rows.start or overlap.rows.stop > local.rows.stop:
        return None
    shift = local.to_rows.start - local.rows.start
    return slice(overlap.rows.start + shift, overlap.rows.stop + shift), local.to_heads


class PendingArrays:
    """Arrays that are still being received; `wait` returns them. unpacking: (view of an output, the contiguous buffer whose
    elements belong there)."""

    def __init__(self, outputs: list[Any], pending: PendingMessages, unpacking: Sequence[tuple[Any, Any]]):
        self.outputs, self.pending, self.unpacking = outputs, pending, unpacking

    def wait(self) -> list[Any]:
        """Wait until all messages have arrived, and return the arrays."""
        self.pending.wait()
        for view, buffer in self.unpacking:
            view.copy_(buffer)
        self.unpacking = ()
        return self.outputs


def redistribute(peers: Peers, *routes: tuple[Any, Redistribution]) -> PendingArrays:
    """Start the redistribution of several arrays, with one message between any two ranks. Elements that no rank holds are 0."""
    if all([plan.only_rows and x.shape[0] == 1 and (peers.maps_memory or x.is_contiguous()) for x, plan in routes]):
        return _redistribute_rows(peers, routes)
    outputs: list[Any] = []
    sends, receives, unpacking = [], [], []
    todo, local_targets, local_sources, has_gaps = [], [], [], False
    for x, plan in routes:
        if plan.is_identity:
            outputs.append(x)
            continue
        allocate = x.new_empty if plan.complete else x.new_zeros
        output = allocate((x.shape[0], *plan.shape, *x.shape[3:]))
        outputs.append(output)
        if plan.source_views.all_head_rows is None or not x.is_contiguous():
            has_gaps, (x, output) = True, widen(x, output)
        sources, targets = plan.source_views.take(x), plan.target_views.take(output)
        todo.append((plan, output, sources, targets, outputs[-1].dtype))
        local_sources += sources[: plan.num_local]
        local_targets += targets[: plan.num_local]
    if local_sources and has_gaps:  # before sending: then the copies in the outputs are sent
        torch._foreach_copy_(local_targets, local_sources)  # one launch on a GPU for all arrays of one dtype
    for plan, output, sources, targets, dtype in todo:
        for rank, part, views in zip(plan.sends, sources[plan.num_local :], plan.output_views):
            for at, tensor in enumerate(_batches(part)):
                if not tensor.is_contiguous():
                    tensor = (tensor if views is None else _batches(views.take(output)[0])[at]).contiguous()
                sends.append((rank, tensor if tensor.dtype == dtype else tensor.view(dtype)))
        for rank, part in zip(plan.receives, targets[plan.num_local :]):
            for view in _batches(part):
                tensor = view
                if not view.is_contiguous():
                    tensor = torch.empty_like(view, memory_format=torch.contiguous_format)
                    unpacking.append((view, tensor))
                receives.append((rank, tensor if tensor.dtype == dtype else tensor.view(dtype)))
    pending = peers.exchange(sends, receives)
    if local_sources and not has_gaps:  # after sending: later the messages' kernels would find all multiprocessors busy
        torch._foreach_copy_(local_targets, local_sources)
    return PendingArrays(outputs, pending, unpacking)


def array_maker(x: Any, rows: int) -> Callable[[], Any]:
    """A function that makes arrays like x with a batch of one and so many rows, faster than torch.empty."""
    return kind_of(x, "x").allocator(x.device, (1, rows, *x.shape[2:]), str(x.dtype).removeprefix("torch."))


class RowCopies:
    """What `redistribute` computes once for all arrays with the shape and strides of x, if rows of a batch of one move. make:
    makes the output. local_sources, local_targets: views of local rows in x and in the output. sends, receives: (rank, view of
    x or of the output)."""

    def __init__(self, x: Any, plan: Redistribution):
        shape = (1, *plan.shape, *x.shape[3:])
        self.make = array_maker(x, shape[1])
        row_size = math.prod(shape[2:])
        strides = (shape[1] * row_size, row_size, *[math.prod(x.shape[n + 1 :]) for n in range(2, x.ndim)])

        def parts(views: RectangleViews, strides: tuple[int, ...]) -> list[StridedView]:
            assert views.all_head_rows is not None, "only_rows: rows of all heads"
            ranges = [views.rows.ranges[n] for n in views.all_head_rows]
            return [((1, rows, *x.shape[2:]), strides, first * strides[1]) for first, rows in ranges]

        sources, targets, n = parts(plan.source_views, x.stride()), parts(plan.target_views, strides), plan.num_local
        self.local_sources, self.local_targets = sources[:n], targets[:n]
        self.sends, self.receives = [*zip(plan.sends, sources[n:])], [*zip(plan.receives, targets[n:])]


def _redistribute_rows(peers: Peers, routes: Sequence[tuple[Any, Redistribution]]) -> PendingArrays:
    """`redistribute` for rows of a batch of one, whose parts are all contiguous, so that nothing else is checked."""
    sends: list[Any] = []
    receives: list[Any] = []
    outputs, local_targets, local_sources, pulled = [], [], [], []
    for x, plan in routes:
        rows = plan.row_copies_of(x)
        output = rows.make()
        outputs.append(output)
        local_sources += [strided_view(x, *part) for part in rows.local_sources]
        local_targets += [strided_view(output, *part) for part in rows.local_targets]
        received = [(rank, strided_view(output, *part)) for rank, part in rows.receives]
        if peers.maps_memory:
            pulled.append((x, plan, [part for _, part in received]))
        else:
            sends += [(rank, strided_view(x, *part)) for rank, part in rows.sends]
            receives += received
    pending = peers.pull_rows(pulled) if peers.maps_memory else peers.exchange(sends, receives)
    if local_sources:
        torch._foreach_copy_(local_targets, local_sources)
    return PendingArrays(outputs, pending, ())


def widen(*arrays: Any) -> list[Any]:
    """Views of the arrays as elements of eight bytes, if that is possible for all of them: torch copies rows with gaps between
    them element by element."""
    for x in arrays:
        each = max(1, WIDE.itemsize // x.element_size())
        if x.ndim < 4 or x.stride(-1) != 1 or any([n % each for n in (*x.stride()[:-1], x.storage_offset(), x.shape[-1])]):
            return [*arrays]
    return [x.view(WIDE) for x in arrays]


class PendingSums:
    """Sums of arrays that are still being received; `wait` returns them. parts: (rank, view of a sum, what is added to it)."""

    def __init__(self, sums: list[Any], pending: PendingMessages, parts: list[tuple[int, Any, Any]]):
        self.sums, self.pending, self.parts = sums, pending, parts

    def wait(self) -> list[Any]:
        """Wait until all messages have arrived, and return the sums, added up in the order of ranks."""
        self.pending.wait()
        for _, view, part in sorted(self.parts, key=itemgetter(0)):
            view.add_(part)
        self.parts = []
        return self.sums


def reduce_scatter(peers: Peers, *routes: tuple[Any, Redistribution]) -> list[Any]:
    """Sum each element over all ranks, for the rank that holds it in the Redistribution. Sums are in the dtype of the
    array, which should be float32."""
    return start_reduce_scatter(peers, *routes).wait()


def start_reduce_scatter(peers: Peers, *routes: tuple[Any, Redistribution], totals: Sequence[Any] | None = None) -> PendingSums:
    """Start `reduce_scatter`. totals: arrays to which the sums are added."""
    sums = list(totals or [x.new_zeros((x.shape[0], *plan.shape, *x.shape[3:])) for x, plan in routes])
    sends, receives, parts = [], [], []
    for total, (x, plan) in zip(sums, routes):
        sources, targets, n = plan.source_views.take(x), plan.target_views.take(total), plan.num_local
        sends += [(rank, one.contiguous()) for rank, part in zip(plan.sends, sources[n:]) for one in _batches(part)]
        parts += [(peers.rank, view, part) for view, part in zip(targets, sources[:n])]
        for rank, view in zip(plan.receives, targets[n:]):
            part = torch.empty_like(view, memory_format=torch.contiguous_format)
            receives += [(rank, one) for one in _batches(part)]
            parts.append((rank, view, part))
    return PendingSums(sums, peers.exchange(sends, receives), parts)


def _batches(x: Any) -> Sequence[Any]:
    """The elements of the batch axis; each is contiguous if the array's rows are."""
    return (x,) if x.shape[0] == 1 else x.unbind(0)


def _size(overlap: RegionOverlap) -> int:
    return (overlap.rows.stop - overlap.rows.start) * (overlap.heads.stop - overlap.heads.start)


def all_heads(heads: int) -> Span:
    """The span of all heads."""
    return Span(0, heads)
