"""Plans copies of other ranks' keys and values that go on while attention already reads them: which copies, in which order, and
how many must be done before each block of keys may be read.

A rank puts its own keys into memory that the others map (symmetric_memory.py), and copies from the others the keys that its
queries see. A CTA of attention reads blocks of keys from the last to the first, so later keys are copied first; it waits for a
copy only when it comes to that copy's keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..parts.key_sources import BLOCK
from ..plans.softmax.remote_keys import KeyPlacement
from .choice import ITEM_BYTES
from .gather_in_place import build_key_placement, count_keys_before, supports_options
from .orders import Span, Spans, count_tokens, spans_with_offsets
from .subcalls import ForwardCall

# a span is copied in at most so many copies of at least so many bytes: the first arrives soon, each takes 10 us of host time
MAX_COPIES, MIN_COPY_BYTES = 4, 2**22


class RowCopy(NamedTuple):
    """A copy of rows of a rank's keys and values: from these rows of its shard to those of the buffer for all other ranks'
    rows."""

    rank: int
    source: Span
    target: Span


@dataclass(frozen=True, eq=False)
class CopySchedule:
    """The copies for all calls with one signature. max_rows: rows of the longest shard; rows: rows that come from other ranks;
    copies: in the order in which they are made. lengths, required, placement: arguments of
    softmax.remote_keys.forward_streaming."""

    max_rows: int
    rows: int
    copies: tuple[RowCopy, ...]
    lengths: Any
    required: Any
    placement: KeyPlacement


def plan_copies(
    rank: int, queries: Sequence[Spans], keys: Sequence[Spans], batch: int, call: ForwardCall
) -> CopySchedule | None:
    """The copies of a rank. None if some rank cannot read keys while they are copied: each rank's queries must be one launch,
    and see keys from the first on."""
    subcalls = [call.join_spans(spans, batch, least=1) for spans in queries]
    at_blocks = all([len(spans) <= 2 and all([span.start % BLOCK == 0 for span in spans]) for spans in keys])
    if batch != 1 or None in subcalls or not at_blocks or not supports_options(call):
        return None
    subcall, own_keys = subcalls[rank], keys[rank]
    assert subcall is not None, "plan_copies returned None otherwise"
    bytes_per_key, copies_by_rows = ITEM_BYTES * len(call.kv_heads) * sum(call.head_dims), []
    for other in [one for one in range(len(keys)) if one != rank]:
        for at, span in spans_with_offsets(keys[other]):
            visible = span.intersect(subcall.keys)
            for part in _split_span(visible, min(MAX_COPIES, len(visible) * bytes_per_key // MIN_COPY_BYTES)):
                first, target = at + part.start - span.start, part.start - count_keys_before(own_keys, part.start)
                copies_by_rows.append((part, RowCopy(other, Span(first, first + len(part)), Span(target, target + len(part)))))
    copies_by_rows.sort(key=lambda one: -one[0].start)
    required = torch.zeros(-(-subcall.keys.stop // BLOCK) + 1, dtype=torch.int32)
    required[-1] = len(copies_by_rows)
    for n, (part, _) in enumerate(copies_by_rows):
        required[part.start // BLOCK : -(-part.stop // BLOCK)] = n + 1
    max_rows, copies = max(map(count_tokens, keys)), tuple([copy for _, copy in copies_by_rows])
    rows = max(1, sum([len(copy.target) for copy in copies]))  # TMA does not support empty arrays
    return CopySchedule(
        max_rows,
        rows,
        copies,
        subcall.options["lengths_k"],
        required.to(call.device),
        build_key_placement(subcall, own_keys, call),
    )


def _split_span(span: Span, parts: int) -> list[Span]:
    """The span in at most so many parts of whole blocks."""
    each = max(1, -(-len(span) // (BLOCK * max(1, parts)))) * BLOCK
    return [Span(first, min(span.stop, first + each)) for first in range(span.start, span.stop, each)]
