"""Scheme "gather": keys and values come to the queries that see them, as in context parallelism by all-gather.

Each query sees all its keys in one call, in blocks of as many keys as one GPU takes (families.FamilyAndBlock), so out and lse
have the same bits as there, however many ranks there are; docs/parallel.md has the exceptions. A rank's own keys stay where
they are, if that is possible (gather_in_place.py). While keys are being received, the rank computes what it can: with a window,
the queries that see only keys of their own rank; with many keys, the first heads, which are sent before the others; between
ranks that map each other's memory, the blocks of keys that have arrived (copy_schedule.py). Gradients of keys and values are
added in float32, first at the rank that has the queries, then, in the order of ranks, at the rank that has the keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

import attention

from ..plans.softmax import remote_keys
from .choice import FULL_GPU_TILES, MIN_STEP_BYTES, count_first_heads, is_mostly_local
from .copy_schedule import CopySchedule, plan_copies
from .gather_in_place import InPlaceGather, fits_tma
from .gradients import GradientAccumulator, slice_dlse
from .orders import Span, Spans, contiguous_runs, count_tokens, spans_with_offsets
from .peers import Peers
from .redistribution import (
    PendingArrays,
    PendingSums,
    Redistribution,
    ShardRegion,
    all_heads,
    plan_redistribution,
    redistribute,
    start_reduce_scatter,
)
from .subcalls import TILE, ForwardCall, SubCall, use_alibi, write_unseen

STEP_BYTES = MIN_STEP_BYTES  # see count_first_heads


class GatherStep(NamedTuple):
    """Keys that arrive together, and what is computed with them. heads: which key heads; plan: the Redistribution of keys and
    values (None: this rank's own, where they are); query_heads: those that read these key heads (None: all); call: the call of
    these heads; parts: what is computed, as (rows of queries, SubCall, rows of the gathered keys), where None stands for all
    rows."""

    heads: Span
    plan: Redistribution | None
    query_heads: slice | None
    call: ForwardCall
    parts: list[tuple[slice | None, SubCall | None, slice | None]]


class GatherAttention:
    """Attention by the scheme "gather". queries, keys: the spans of each rank. An object serves calls with one signature."""

    name = "gather"
    moves_queries = False  # does the backward pass move queries and their gradients to other ranks?

    def __init__(self, peers: Peers, queries: tuple[Spans, ...], keys: tuple[Spans, ...]):
        self.peers, self.queries, self.keys = peers, queries, keys
        self.cached: dict[Any, Any] = {}  # what depends on the call's signature alone

    def attend(self, q: Any, k: Any, v: Any, call: ForwardCall) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries."""
        schedule = self._copy_schedule(q, call) if self.peers.overlaps_copies else None
        if schedule is not None:
            q, k, v = (x if fits_tma(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
            keys, values, arrived = self.peers.start_copies(schedule, k, v)
            return remote_keys.forward_streaming(
                q, keys, values, schedule.lengths, k, v, arrived, schedule.required, schedule.placement
            )
        in_place = self._in_place(k, v, call)
        if in_place is not None and fits_tma(q, k, v):
            return in_place.attend(self.peers, q, k, v)
        steps = self._steps(q, k, call)
        pending = [None if step.plan is None else redistribute(self.peers, (k, step.plan), (v, step.plan)) for step in steps]
        if len(steps) == 1 and len(steps[0].parts) == 1 and steps[0].parts[0][0] is None:  # a single call of forward
            ((_, subcall, gathered),) = steps[0].parts
            assert subcall is not None and pending[0] is not None, "all queries see keys, which are received"
            keys, values = pending[0].wait()
            if gathered is not None:
                keys, values = keys[:, gathered], values[:, gathered]
            return attention.forward(q, keys, values, return_lse=True, **subcall.options)
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        for step, arriving in zip(steps, pending):
            keys, values = arriving.wait() if arriving else (k, v)
            heads = slice(None) if step.query_heads is None else step.query_heads
            for rows, subcall, gathered in step.parts:
                rows = slice(None) if rows is None else rows
                out_part, lse_part = out[:, rows, heads], lse[:, heads, rows]
                if subcall is None:
                    write_unseen(out_part, lse_part, step.call)
                else:
                    arrays = q[:, rows, heads], *[x if gathered is None else x[:, gathered] for x in (keys, values)]
                    attention.forward(*arrays, out=out_part, lse=lse_part, return_lse=True, **subcall.options)
        return out, lse

    def differentiate(
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: ForwardCall, sums: GradientAccumulator
    ) -> None:
        """Add the gradients of `attend` to `sums`."""
        has_dropout = bool(call.options.get("dropout"))  # seeds depend on the subcall: the subcalls must be those of `attend`
        groups = self._head_groups(k, call) if has_dropout else self._head_groups_backward(k)
        runs = None if has_dropout else contiguous_runs(self.queries[self.peers.rank])
        pending = [(heads, self._gather(k, v, call, heads)) for heads in groups]
        returning: list[PendingSums] = []
        for heads, arriving in pending:
            keys, values = arriving.wait()
            dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values))
            query_heads, head_call = call.select_key_heads(heads)
            for rows, subcall, gathered in self._parts(head_call, runs):
                if subcall is not None:
                    arrays = dout[:, rows, query_heads], q[:, rows, query_heads], keys[:, gathered], values[:, gathered]
                    results = out[:, rows, query_heads], lse[:, query_heads, rows]
                    targets = sums.dq[:, rows, query_heads], dk[:, gathered], dv[:, gathered]
                    sums.add(subcall, head_call, *arrays, *results, slice_dlse(dlse, rows, query_heads), targets)
            owners = tuple([ShardRegion(spans, heads) for spans in self.keys])
            back = plan_redistribution(self.peers.rank, self._wanted_regions(call, heads), owners)
            totals = [x[:, :, slice(*heads)] for x in (sums.dk, sums.dv)]
            returning.append(start_reduce_scatter(self.peers, (dk, back), (dv, back), totals=totals))
        for gradients in returning:
            gradients.wait()

    def _copy_schedule(self, q: Any, call: ForwardCall) -> CopySchedule | None:
        """The copies that go on while attention reads; None if attention begins after all of them."""
        schedule = self.cached.get("copy schedule", False)
        if schedule is False:
            serves = call.plain and remote_keys.serves(q.device, *call.head_dims)
            schedule = plan_copies(self.peers.rank, self.queries, self.keys, q.shape[0], call) if serves else None
            self.cached["copy schedule"] = schedule
        return schedule

    def _in_place(self, k: Any, v: Any, call: ForwardCall) -> InPlaceGather | None:
        """The messages, if this rank's own keys and values stay where they are; else None."""
        in_place = self.cached.get("in place", False)
        if in_place is False:
            heads, rank = all_heads(k.shape[2]), self.peers.rank
            at_once = self._head_groups(k, call) == [heads] and not self.peers.maps_memory
            plan = self._kv_plan(k, call, heads) if at_once else None
            in_place = None if plan is None else InPlaceGather.create(k, v, self.queries[rank], self.keys[rank], plan, call)
            self.cached["in place"] = in_place
        return in_place

    def _steps(self, q: Any, k: Any, call: ForwardCall) -> list[GatherStep]:
        """The steps of a call; cached if calls with this signature differ in nothing but q, k and v."""
        steps = self.cached.get("steps")
        if steps is None:
            call = use_alibi(call, q.shape[0])
            steps = self._window_steps(k, call) or [self._step(q, k, call, heads) for heads in self._head_groups(k, call)]
            if call.plain:
                self.cached["steps"] = steps
        return steps

    def _step(self, q: Any, k: Any, call: ForwardCall, heads: Span) -> GatherStep:
        query_heads, head_call = call.select_key_heads(heads)
        parts: list[Any] = [*self._joined_parts(head_call, q)] or [*self._parts(head_call)]
        if len(parts) == 1 and parts[0][1] is not None:
            parts = [(None, *parts[0][1:])]
        total = count_tokens(call.key_ranges(self.queries[self.peers.rank]))
        parts = [(rows, subcall, None if gathered == slice(0, total) else gathered) for rows, subcall, gathered in parts]
        all_queries = heads == all_heads(k.shape[2])
        return GatherStep(heads, self._kv_plan(k, call, heads), None if all_queries else query_heads, head_call, parts)

    def _window_steps(self, k: Any, call: ForwardCall) -> list[GatherStep]:
        """Two steps for a window: first the queries that see only keys of their own rank, then the others, whose keys arrive
        meanwhile. [] if on some rank the former are not the majority."""
        if not is_mostly_local(call, self.queries, self.keys):
            return []
        rank, heads = self.peers.rank, all_heads(k.shape[2])
        splits = [[(at, run, call.first_local_query(run)) for at, run in contiguous_runs(spans)] for spans in self.queries]
        local_parts: list[Any] = []
        remote_parts: list[Any] = []
        remote = [tuple([Span(run.start, first) for _, run, first in split if first > run.start]) for split in splits]
        for at, run, first in splits[rank]:
            for rows, parts in (Span(first, run.stop), local_parts), (Span(run.start, first), remote_parts):
                row = at + rows.start - run.start
                subcall = call.subcall(rows, call.key_range(rows), row)
                if subcall is not None:
                    keys = slice(at + subcall.keys.start - run.start, at + subcall.keys.stop - run.start)
                    if parts is remote_parts:
                        keys = gathered_rows(call.key_ranges(remote[rank]), subcall.keys)
                    parts.append((slice(row, row + len(rows)), subcall, keys))
        needed_regions = tuple([ShardRegion(call.key_ranges(spans), heads) for spans in remote])
        sources = tuple([ShardRegion(spans, heads) for spans in self.keys])
        second = GatherStep(heads, plan_redistribution(rank, sources, needed_regions), None, call, remote_parts)
        return [GatherStep(heads, None, None, call, local_parts), second]

    def _head_groups(self, k: Any, call: ForwardCall) -> list[Span]:
        """The groups of key heads that are sent one after the other."""
        groups = self.cached.get("head groups")
        if groups is None:
            heads = k.shape[2]
            first = count_first_heads(call, k.shape[0], self.queries, self.keys, STEP_BYTES) if self.peers.world > 1 else 0
            groups = self.cached["head groups"] = [Span(0, first), Span(first, heads)] if first else [all_heads(heads)]
        return groups

    def _head_groups_backward(self, k: Any) -> list[Span]:
        """The groups of key heads of the backward pass: a quarter of the heads comes first, if its blocks of keys fill the
        GPU even on the rank with the fewest queries."""
        groups = self.cached.get("head groups backward")
        if groups is None:
            runs = [run for spans in self.queries for _, run in contiguous_runs(spans)]
            heads, fewest = k.shape[2], min(map(len, runs), default=0)
            first = max(heads // 4, -(-FULL_GPU_TILES * TILE // max(1, k.shape[0] * fewest)))
            splits = self.peers.world > 1 and 2 * first <= heads
            groups = [Span(0, first), Span(first, heads)] if splits else [all_heads(heads)]
            self.cached["head groups backward"] = groups
        return groups

    def _wanted_regions(self, call: ForwardCall, heads: Span) -> tuple[ShardRegion, ...]:
        """The region of keys that each rank's queries see."""
        regions = self.cached.get(heads)
        if regions is None:
            regions = self.cached[heads] = tuple([ShardRegion(call.key_ranges(spans), heads) for spans in self.queries])
        return regions

    def _kv_plan(self, k: Any, call: ForwardCall, heads: Span) -> Redistribution:
        """The Redistribution of these heads of the keys that this rank's queries see."""
        sources = tuple([ShardRegion(spans, all_heads(k.shape[2])) for spans in self.keys])
        return plan_redistribution(self.peers.rank, sources, self._wanted_regions(call, heads))

    def _gather(self, k: Any, v: Any, call: ForwardCall, heads: Span) -> PendingArrays:
        """Start to gather these heads of keys and values."""
        plan = self._kv_plan(k, call, heads)
        return redistribute(self.peers, (k, plan), (v, plan))

    def _joined_parts(self, call: ForwardCall, q: Any) -> list[tuple[slice, SubCall, slice]]:
        """This rank's spans as one part, if that is possible; else []."""
        subcall = self.cached.get("joined", False)
        if subcall is False:
            subcall = self.cached["joined"] = call.join_spans(self.queries[self.peers.rank], q.shape[0])
        if subcall is None:
            return []
        options = call.options | {"lengths_k": subcall.options["lengths_k"]}
        return [(slice(None), subcall._replace(options=options), slice(*subcall.keys))]

    def _parts(
        self, call: ForwardCall, runs: Iterable[tuple[int, Span]] | None = None
    ) -> Iterator[tuple[slice, SubCall | None, slice]]:
        """(rows, SubCall, rows of the gathered keys) of each of this rank's spans, or of `runs`, (offset, span); the
        SubCall is None where no key is seen."""
        spans = self.queries[self.peers.rank]
        for at, span in spans_with_offsets(spans) if runs is None else runs:
            subcall = call.subcall(span, call.key_range(span), at)
            keys = gathered_rows(call.key_ranges(spans), subcall.keys) if subcall else slice(0)
            yield slice(at, at + len(span)), subcall, keys


def gathered_rows(spans: Spans, one: Span) -> slice:
    """The rows of a span in an array that has the rows of `spans`."""
    rows = [at + one.start - span.start for at, span in spans_with_offsets(spans) if span.start <= one.start < span.stop]
    return slice(rows[0], rows[0] + len(one))
