"""Scheme "gather": keys and values come to the queries, as far as these see them.

Each query sees all its keys in one call, in blocks of as many keys as one GPU takes (families.FamilyAndBlock), so out and lse
have the same bits as there, however many ranks there are; docs/parallel.md has the exceptions. A rank's own keys stay where
they are, if that is possible (gather_in_place.py). While keys are under way, the rank computes what it can: with a window, the
queries that see only keys of their own rank; with many keys, the first heads, which are sent before the others; between ranks
that map each other's memory, the blocks of keys that have arrived (arrival.py). Gradients of keys and values are added up in
float32, first at the rank that has the queries, then, in the order of ranks, at the rank that has the keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

import attention

from ..softmax import remote_keys
from .arrival import CopySchedule, plan_copies
from .choice import FULL_GPU_TILES, MIN_STEP_BYTES, count_first_heads, is_mostly_local
from .gather_in_place import InPlaceGather, adjacent
from .gradients import GradientAccumulator, dlse_of
from .moves import (
    PendingArrays,
    PendingSums,
    Redistribution,
    ShardRegion,
    all_heads,
    plan_redistribution,
    redistribute,
    start_reduce_scatter,
)
from .orders import Span, Spans, contiguous_runs, count_tokens, with_offsets
from .peers import Peers
from .pieces import TILE, CallPiece, ForwardCall, nothing, use_alibi

STEP_BYTES = MIN_STEP_BYTES  # bytes: see first_heads


class GatherStep(NamedTuple):
    """Some key heads, which come together: the way of keys and values (None: they are this rank's own, where they are), the
    query heads that read them (None: all), the call of these, and what is computed, as (rows of queries, Piece, which of the
    fetched keys) each; None stands for all."""

    heads: Span
    plan: Redistribution | None
    mine: slice | None
    call: ForwardCall
    parts: list[tuple[slice | None, CallPiece | None, slice | None]]


class GatherAttention:
    """The scheme, for ranks that have these queries and these keys each."""

    name = "gather"
    moves_queries = False  # do gradients move what belongs to queries to other ranks?

    def __init__(self, peers: Peers, queries: tuple[Spans, ...], keys: tuple[Spans, ...]):
        self.peers, self.queries, self.keys = peers, queries, keys
        self.known: dict[Any, Any] = {}  # what follows from the form of a call; an object serves calls of one form

    def attend(self, q: Any, k: Any, v: Any, call: ForwardCall) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries."""
        arrival = self._copy_schedule(q, call) if self.peers.overlaps_copies else None
        if arrival is not None:
            q, k, v = (x if adjacent(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
            keys, values, arrived = self.peers.start_copies(arrival, k, v)
            return remote_keys.forward_streaming(
                q, keys, values, arrival.lengths, k, v, arrived, arrival.required, arrival.placement
            )
        others = self._in_place(k, v, call)
        if others is not None and adjacent(q, k, v):
            return others.attend(self.peers, q, k, v)
        turns = self._steps(q, k, call)
        moving = [None if turn.plan is None else redistribute(self.peers, (k, turn.plan), (v, turn.plan)) for turn in turns]
        if len(turns) == 1 and len(turns[0].parts) == 1 and turns[0].parts[0][0] is None:  # one call makes all there is
            ((_, part, seen),) = turns[0].parts
            assert part is not None and moving[0] is not None, "all of it"
            keys, values = moving[0].wait()
            if seen is not None:
                keys, values = keys[:, seen], values[:, seen]
            return attention.forward(q, keys, values, return_lse=True, **part.options)
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        for turn, on_their_way in zip(turns, moving):
            keys, values = on_their_way.wait() if on_their_way else (k, v)
            mine = slice(None) if turn.mine is None else turn.mine
            for rows, part, seen in turn.parts:
                rows = slice(None) if rows is None else rows
                place, sums = out[:, rows, mine], lse[:, mine, rows]
                if part is None:
                    nothing(place, sums, turn.call)
                else:
                    given = q[:, rows, mine], *[x if seen is None else x[:, seen] for x in (keys, values)]
                    attention.forward(*given, out=place, lse=sums, return_lse=True, **part.options)
        return out, lse

    def differentiate(
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: ForwardCall, found: GradientAccumulator
    ) -> None:
        """Add the gradients of `attend` to `found`."""
        drops = bool(call.options.get("dropout"))  # by piece: the pieces must be those of `attend`
        in_turn = self._head_groups(k, call) if drops else self._head_groups_backward(k)
        cut = None if drops else contiguous_runs(self.queries[self.peers.rank])
        moving = [(heads, self._fetch(k, v, call, heads)) for heads in in_turn]
        home: list[PendingSums] = []
        for heads, on_their_way in moving:
            keys, values = on_their_way.wait()
            sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values)]
            mine, theirs = call.select_key_heads(heads)
            for rows, part, seen in self._parts(theirs, cut):
                if part is not None:
                    given = dout[:, rows, mine], q[:, rows, mine], keys[:, seen], values[:, seen], out[:, rows, mine]
                    into = found.dq[:, rows, mine], sums[0][:, seen], sums[1][:, seen]
                    found.add(part, theirs, *given, lse[:, mine, rows], dlse_of(dlse, rows, mine), into)
            back = plan_redistribution(
                self.peers.rank, self._wanted_regions(call, heads), tuple([ShardRegion(spans, heads) for spans in self.keys])
            )
            totals = [x[:, :, slice(*heads)] for x in (found.dk, found.dv)]
            home.append(start_reduce_scatter(self.peers, *[(x, back) for x in sums], into=totals))
        for on_their_way_back in home:
            on_their_way_back.wait()

    def _copy_schedule(self, q: Any, call: ForwardCall) -> CopySchedule | None:
        """How keys and values arrive while they are read; None if all of them are waited for."""
        found = self.known.get("arrival", False)
        if found is False:
            serves = call.plain and remote_keys.serves(q.device, *call.head_dims)
            found = plan_copies(self.peers.rank, self.queries, self.keys, q.shape[0], call) if serves else None
            self.known["arrival"] = found
        return found

    def _in_place(self, k: Any, v: Any, call: ForwardCall) -> InPlaceGather | None:
        """How other ranks' keys and values arrive, if this rank's own stay where they are; else None."""
        found = self.known.get("others", False)
        if found is False:
            every, rank = all_heads(k.shape[2]), self.peers.rank
            at_once = self._head_groups(k, call) == [every] and not self.peers.maps
            its = self._kv_plan(k, call, every) if at_once else None
            found = None if its is None else InPlaceGather.of(k, v, self.queries[rank], self.keys[rank], its, call)
            self.known["others"] = found
        return found

    def _steps(self, q: Any, k: Any, call: ForwardCall) -> list[GatherStep]:
        """The turns of a call; remembered if calls of this form differ in nothing but q, k and v."""
        found = self.known.get("turns")
        if found is None:
            call = use_alibi(call, q.shape[0])
            found = self._window_steps(k, call) or [self._step(q, k, call, heads) for heads in self._head_groups(k, call)]
            if call.plain:
                self.known["turns"] = found
        return found

    def _step(self, q: Any, k: Any, call: ForwardCall, heads: Span) -> GatherStep:
        mine, theirs = call.select_key_heads(heads)
        parts: list[Any] = [*self._joined_parts(theirs, q)] or [*self._parts(theirs)]
        if len(parts) == 1 and parts[0][1] is not None:
            parts = [(None, *parts[0][1:])]
        fetched_rows = count_tokens(call.key_ranges(self.queries[self.peers.rank]))
        parts = [(rows, part, None if seen == slice(0, fetched_rows) else seen) for rows, part, seen in parts]
        return GatherStep(heads, self._kv_plan(k, call, heads), None if heads == all_heads(k.shape[2]) else mine, theirs, parts)

    def _window_steps(self, k: Any, call: ForwardCall) -> list[GatherStep]:
        """Two turns for a window: first the queries that see only keys of their own rank, then the others, whose keys arrive
        meanwhile. [] if on some rank the former are not the majority."""
        if not is_mostly_local(call, self.queries, self.keys):
            return []
        rank, every = self.peers.rank, all_heads(k.shape[2])
        cuts = [[(at, run, call.first_local_query(run)) for at, run in contiguous_runs(spans)] for spans in self.queries]
        at_home: list[Any] = []
        away: list[Any] = []
        others = [tuple([Span(run.start, first) for _, run, first in cut if first > run.start]) for cut in cuts]
        for at, run, first in cuts[rank]:
            for rows, parts in (Span(first, run.stop), at_home), (Span(run.start, first), away):
                place, reach = at + rows.start - run.start, call.key_range(rows)
                part = call.piece(rows, reach, place)
                if part is not None:
                    seen = slice(at + part.keys.start - run.start, at + part.keys.stop - run.start)
                    if parts is away:
                        seen = fetched_rows(call.key_ranges(others[rank]), part.keys)
                    parts.append((slice(place, place + len(rows)), part, seen))
        wanted = tuple([ShardRegion(call.key_ranges(spans), every) for spans in others])
        held = tuple([ShardRegion(spans, every) for spans in self.keys])
        coming = GatherStep(every, plan_redistribution(rank, held, wanted), None, call, away)
        return [GatherStep(every, None, None, call, at_home), coming]

    def _head_groups(self, k: Any, call: ForwardCall) -> list[Span]:
        """The groups of key heads that are sent one after the other."""
        found = self.known.get("in turn")
        if found is None:
            heads = k.shape[2]
            first = count_first_heads(call, k.shape[0], self.queries, self.keys, STEP_BYTES) if self.peers.world > 1 else 0
            found = self.known["in turn"] = [Span(0, first), Span(first, heads)] if first else [all_heads(heads)]
        return found

    def _head_groups_backward(self, k: Any) -> list[Span]:
        """The same for gradients: a quarter of the heads comes first, if their blocks of keys fill the GPU even on the rank
        with the fewest queries."""
        found = self.known.get("in turn back")
        if found is None:
            heads, fewest = (
                k.shape[2],
                min([len(run) for spans in self.queries for _, run in contiguous_runs(spans)], default=0),
            )
            first = max(heads // 4, -(-FULL_GPU_TILES * TILE // max(1, k.shape[0] * fewest)))
            worth = self.peers.world > 1 and 2 * first <= heads
            found = self.known["in turn back"] = [Span(0, first), Span(first, heads)] if worth else [all_heads(heads)]
        return found

    def _wanted_regions(self, call: ForwardCall, heads: Span) -> tuple[ShardRegion, ...]:
        """The cut of the keys that each rank wants."""
        found = self.known.get(heads)
        if found is None:
            found = self.known[heads] = tuple([ShardRegion(call.key_ranges(spans), heads) for spans in self.queries])
        return found

    def _kv_plan(self, k: Any, call: ForwardCall, heads: Span) -> Redistribution:
        """The Way of the keys, of these heads, that this rank's queries see."""
        held = tuple([ShardRegion(spans, all_heads(k.shape[2])) for spans in self.keys])
        return plan_redistribution(self.peers.rank, held, self._wanted_regions(call, heads))

    def _fetch(self, k: Any, v: Any, call: ForwardCall, heads: Span) -> PendingArrays:
        """Send for these keys and their values."""
        its = self._kv_plan(k, call, heads)
        return redistribute(self.peers, (k, its), (v, its))

    def _joined_parts(self, call: ForwardCall, q: Any) -> list[tuple[slice, CallPiece, slice]]:
        """This rank's spans as one call, if that is possible."""
        part = self.known.get("joined", False)
        if part is False:
            part = self.known["joined"] = call.joined(self.queries[self.peers.rank], q.shape[0])
        if part is None:
            return []
        options = call.options | {"lengths_k": part.options["lengths_k"]}
        return [(slice(None), part._replace(options=options), slice(*part.keys))]

    def _parts(
        self, call: ForwardCall, cut: Iterable[tuple[int, Span]] | None = None
    ) -> Iterator[tuple[slice, CallPiece | None, slice]]:
        """(rows, Piece, which of the fetched keys) of each of this rank's spans, or of what these are cut into otherwise, as
        (where it lies, which it is); a Piece is None where nothing is seen."""
        mine = self.queries[self.peers.rank]
        for at, span in with_offsets(mine) if cut is None else cut:
            part = call.piece(span, call.key_range(span), at)
            yield slice(at, at + len(span)), part, fetched_rows(call.key_ranges(mine), part.keys) if part else slice(0)


def fetched_rows(spans: Spans, one: Span) -> slice:
    """Where the rows of a span lie among those that were fetched, which are the rows of `spans`."""
    found = [at + one.start - span.start for at, span in with_offsets(spans) if span.start <= one.start < span.stop]
    return slice(found[0], found[0] + len(one))
