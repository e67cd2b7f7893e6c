"""Which tokens of a sequence each rank holds: two orders, as objects with the same method.

A sequence is divided into blocks of `block` tokens, so that query tiles begin where they begin on one GPU. (Blocks are smaller
if there would be fewer than two for each rank.) The numbers of blocks of any two ranks differ by at most one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

BLOCK = 128  # rows of a query tile: see attention/kernels/softmax/forward_hopper.py and forward_ampere.py


class Span(NamedTuple):
    """The tokens (or heads) from `start` up to `stop`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def intersect(self, other: Span) -> Span:
        """The intersection of two spans."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


Spans = tuple[Span, ...]


def _check_block_size(block: Any) -> None:
    if not isinstance(block, Integral) or block < 1:
        raise ValueError(f"block: must be an integer, one or more: {block=}")


@dataclass(frozen=True)
class Contiguous:
    """Rank r holds the r-th of R parts, as a recurrence needs it. In causal attention the last rank has nearly twice the mean
    work."""

    block: int = BLOCK

    def __post_init__(self):
        _check_block_size(self.block)

    def spans(self, length: int, world: int) -> tuple[Spans, ...]:
        """The spans of each rank, in the order in which it holds them."""
        block = _block_size(self.block, length, world)
        ends = [0]
        for part in _blocks_per_rank(-(-length // block), world):
            ends.append(ends[-1] + part)
        return tuple([_drop_empty_spans([_span(first, end, block, length)]) for first, end in pairwise(ends)])


@dataclass(frozen=True)
class Zigzag:
    """Rank r holds the r-th of 2 R parts and the r-th from the end, so that all ranks have the same work in causal
    attention."""

    block: int = BLOCK

    def __post_init__(self):
        _check_block_size(self.block)

    def spans(self, length: int, world: int) -> tuple[Spans, ...]:
        """The spans of each rank, in the order in which it holds them."""
        block = _block_size(self.block, length, world)
        first, last = 0, -(-length // block)
        spans_of_ranks = []
        for part in _blocks_per_rank(last, world):
            first_half = (part + 1) // 2
            ends = first + first_half, last - (part - first_half)
            spans_of_ranks.append(
                _drop_empty_spans([_span(first, ends[0], block, length), _span(ends[1], last, block, length)])
            )
            first, last = ends
        return tuple(spans_of_ranks)


Order = Contiguous | Zigzag
ORDERS: dict[str, Order] = {"zigzag": Zigzag(), "contiguous": Contiguous()}


def find_order(order: str | Order) -> Order:
    """The order of this name; an object is returned as it is. ValueError: there is no such order."""
    if isinstance(order, (Contiguous, Zigzag)):
        return order
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(f"order: must be one of {tuple(ORDERS)}, or an object of attention.parallel.orders: {order=}")
    return ORDERS[order]


def merge_spans(spans: Spans) -> Spans:
    """The tokens of these spans as sorted spans that neither touch nor overlap."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def subtract_spans(span: Span, others: Spans) -> Spans:
    """The parts of a span outside of `others`, which are sorted and do not touch."""
    ends = [span.start, *[end for one in others if len(one.intersect(span)) for end in one.intersect(span)], span.stop]
    return tuple([Span(*pair) for pair in zip(ends[::2], ends[1::2]) if pair[0] < pair[1]])


def count_tokens(spans: Spans) -> int:
    """How many tokens the spans have."""
    return sum([len(span) for span in spans])


def _block_size(block: int, length: int, world: int) -> int:
    """Tokens of a block: `block`, or fewer, so that each rank has two blocks."""
    while block > 1 and 2 * world * block > length:
        block //= 2
    return block


def _blocks_per_rank(blocks: int, world: int) -> list[int]:
    """How many blocks each rank has."""
    return [blocks // world + (rank < blocks % world) for rank in range(world)]


def _span(first: int, end: int, block: int, length: int) -> Span:
    return Span(min(length, first * block), min(length, end * block))


def _drop_empty_spans(spans: list[Span]) -> Spans:
    """These spans without the empty ones, adjacent ones merged."""
    return merge_spans(tuple([span for span in spans if len(span)]))


def spans_with_offsets(spans: Spans) -> list[tuple[int, Span]]:
    """(offset, span) of each span, where offset counts the tokens of the spans before it."""
    offsets = itertools.accumulate(map(len, spans), initial=0)
    return list(zip(offsets, spans))


def contiguous_runs(spans: Spans) -> list[tuple[int, Span]]:
    """spans_with_offsets, where adjacent spans that continue each other are one."""
    runs: list[tuple[int, Span]] = []
    for offset, span in spans_with_offsets(spans):
        if runs and runs[-1][1].stop == span.start:
            runs[-1] = runs[-1][0], Span(runs[-1][1].start, span.stop)
        else:
            runs.append((offset, span))
    return runs
