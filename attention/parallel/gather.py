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
from .arrival import Arrival, arrival_of
from .choice import FULL, WORTH, first_heads, mostly_at_home
from .gather_in_place import Others, adjacent
from .gradients import Gradients, dlse_of
from .moves import Cut, Moving, Sums, Way, all_heads, move, sums_on_their_way, way
from .orders import Span, Spans, count, places, runs
from .peers import Peers
from .pieces import TILE, Call, Piece, nothing, sloped

LONG = WORTH  # bytes: see first_heads


class Turn(NamedTuple):
    """Some key heads, which come together: the way of keys and values (None: they are this rank's own, where they are), the
    query heads that read them (None: all), the call of these, and what is computed, as (rows of queries, Piece, which of the
    fetched keys) each; None stands for all."""

    heads: Span
    way: Way | None
    mine: slice | None
    call: Call
    parts: list[tuple[slice | None, Piece | None, slice | None]]


class Gather:
    """The scheme, for ranks that have these queries and these keys each."""

    name = "gather"
    rows_travel = False  # do gradients move what belongs to queries to other ranks?

    def __init__(self, peers: Peers, queries: tuple[Spans, ...], keys: tuple[Spans, ...]):
        self.peers, self.queries, self.keys = peers, queries, keys
        self.known: dict[Any, Any] = {}  # what follows from the form of a call; an object serves calls of one form

    def attend(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries."""
        arrival = self._arrival(q, call) if self.peers.arrives else None
        if arrival is not None:
            q, k, v = (x if adjacent(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
            keys, values, arrived = self.peers.arrive(arrival, k, v)
            return remote_keys.arriving(q, keys, values, arrival.lengths, k, v, arrived, arrival.awaits, arrival.seen)
        others = self._others(k, v, call)
        if others is not None and adjacent(q, k, v):
            return others.attend(self.peers, q, k, v)
        turns = self._turns(q, k, call)
        moving = [None if turn.way is None else move(self.peers, (k, turn.way), (v, turn.way)) for turn in turns]
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
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: Call, found: Gradients
    ) -> None:
        """Add the gradients of `attend` to `found`."""
        drops = bool(call.told.get("dropout"))  # by piece: the pieces must be those of `attend`
        in_turn = self._in_turn(k, call) if drops else self._in_turn_back(k)
        cut = None if drops else runs(self.queries[self.peers.rank])
        moving = [(heads, self._fetch(k, v, call, heads)) for heads in in_turn]
        home: list[Sums] = []
        for heads, on_their_way in moving:
            keys, values = on_their_way.wait()
            sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values)]
            mine, theirs = call.of_key_heads(heads)
            for rows, part, seen in self._parts(theirs, cut):
                if part is not None:
                    given = dout[:, rows, mine], q[:, rows, mine], keys[:, seen], values[:, seen], out[:, rows, mine]
                    into = found.dq[:, rows, mine], sums[0][:, seen], sums[1][:, seen]
                    found.add(part, theirs, *given, lse[:, mine, rows], dlse_of(dlse, rows, mine), into)
            back = way(self.peers.rank, self._wanted(call, heads), tuple([Cut(spans, heads) for spans in self.keys]))
            totals = [x[:, :, slice(*heads)] for x in (found.dk, found.dv)]
            home.append(sums_on_their_way(self.peers, *[(x, back) for x in sums], into=totals))
        for on_their_way_back in home:
            on_their_way_back.wait()

    def _arrival(self, q: Any, call: Call) -> Arrival | None:
        """How keys and values arrive while they are read; None if all of them are waited for."""
        found = self.known.get("arrival", False)
        if found is False:
            serves = call.plain and remote_keys.serves(q.device, *call.head_dims)
            found = arrival_of(self.peers.rank, self.queries, self.keys, q.shape[0], call) if serves else None
            self.known["arrival"] = found
        return found

    def _others(self, k: Any, v: Any, call: Call) -> Others | None:
        """How other ranks' keys and values arrive, if this rank's own stay where they are; else None."""
        found = self.known.get("others", False)
        if found is False:
            every, rank = all_heads(k.shape[2]), self.peers.rank
            at_once = self._in_turn(k, call) == [every] and not self.peers.maps
            its = self._way(k, call, every) if at_once else None
            found = None if its is None else Others.of(k, v, self.queries[rank], self.keys[rank], its, call)
            self.known["others"] = found
        return found

    def _turns(self, q: Any, k: Any, call: Call) -> list[Turn]:
        """The turns of a call; remembered if calls of this form differ in nothing but q, k and v."""
        found = self.known.get("turns")
        if found is None:
            call = sloped(call, q.shape[0])
            found = self._by_rows(k, call) or [self._turn(q, k, call, heads) for heads in self._in_turn(k, call)]
            if call.plain:
                self.known["turns"] = found
        return found

    def _turn(self, q: Any, k: Any, call: Call, heads: Span) -> Turn:
        mine, theirs = call.of_key_heads(heads)
        parts: list[Any] = [*self._joined(theirs, q)] or [*self._parts(theirs)]
        if len(parts) == 1 and parts[0][1] is not None:
            parts = [(None, *parts[0][1:])]
        fetched = count(call.reach_of(self.queries[self.peers.rank]))
        parts = [(rows, part, None if seen == slice(0, fetched) else seen) for rows, part, seen in parts]
        return Turn(heads, self._way(k, call, heads), None if heads == all_heads(k.shape[2]) else mine, theirs, parts)

    def _by_rows(self, k: Any, call: Call) -> list[Turn]:
        """Two turns for a window: first the queries that see only keys of their own rank, then the others, whose keys arrive
        meanwhile. [] if on some rank the former are not the majority."""
        if not mostly_at_home(call, self.queries, self.keys):
            return []
        rank, every = self.peers.rank, all_heads(k.shape[2])
        cuts = [[(at, run, call.first_at_home(run)) for at, run in runs(spans)] for spans in self.queries]
        at_home: list[Any] = []
        away: list[Any] = []
        others = [tuple([Span(run.start, first) for _, run, first in cut if first > run.start]) for cut in cuts]
        for at, run, first in cuts[rank]:
            for rows, parts in (Span(first, run.stop), at_home), (Span(run.start, first), away):
                place, reach = at + rows.start - run.start, call.reach(rows)
                part = call.piece(rows, reach, place)
                if part is not None:
                    seen = slice(at + part.keys.start - run.start, at + part.keys.stop - run.start)
                    if parts is away:
                        seen = fetched(call.reach_of(others[rank]), part.keys)
                    parts.append((slice(place, place + len(rows)), part, seen))
        wanted = tuple([Cut(call.reach_of(spans), every) for spans in others])
        held = tuple([Cut(spans, every) for spans in self.keys])
        coming = Turn(every, way(rank, held, wanted), None, call, away)
        return [Turn(every, None, None, call, at_home), coming]

    def _in_turn(self, k: Any, call: Call) -> list[Span]:
        """The groups of key heads that are sent one after the other."""
        found = self.known.get("in turn")
        if found is None:
            heads = k.shape[2]
            first = first_heads(call, k.shape[0], self.queries, self.keys, LONG) if self.peers.world > 1 else 0
            found = self.known["in turn"] = [Span(0, first), Span(first, heads)] if first else [all_heads(heads)]
        return found

    def _in_turn_back(self, k: Any) -> list[Span]:
        """The same for gradients: a quarter of the heads comes first, if their blocks of keys fill the GPU even on the rank
        with the fewest queries."""
        found = self.known.get("in turn back")
        if found is None:
            heads, fewest = k.shape[2], min([len(run) for spans in self.queries for _, run in runs(spans)], default=0)
            first = max(heads // 4, -(-FULL * TILE // max(1, k.shape[0] * fewest)))
            worth = self.peers.world > 1 and 2 * first <= heads
            found = self.known["in turn back"] = [Span(0, first), Span(first, heads)] if worth else [all_heads(heads)]
        return found

    def _wanted(self, call: Call, heads: Span) -> tuple[Cut, ...]:
        """The cut of the keys that each rank wants."""
        found = self.known.get(heads)
        if found is None:
            found = self.known[heads] = tuple([Cut(call.reach_of(spans), heads) for spans in self.queries])
        return found

    def _way(self, k: Any, call: Call, heads: Span) -> Way:
        """The Way of the keys, of these heads, that this rank's queries see."""
        held = tuple([Cut(spans, all_heads(k.shape[2])) for spans in self.keys])
        return way(self.peers.rank, held, self._wanted(call, heads))

    def _fetch(self, k: Any, v: Any, call: Call, heads: Span) -> Moving:
        """Send for these keys and their values."""
        its = self._way(k, call, heads)
        return move(self.peers, (k, its), (v, its))

    def _joined(self, call: Call, q: Any) -> list[tuple[slice, Piece, slice]]:
        """This rank's spans as one call, if that is possible."""
        part = self.known.get("joined", False)
        if part is False:
            part = self.known["joined"] = call.joined(self.queries[self.peers.rank], q.shape[0])
        if part is None:
            return []
        told = call.told | {"lengths_k": part.options["lengths_k"]}
        return [(slice(None), part._replace(options=told), slice(*part.keys))]

    def _parts(self, call: Call, cut: Iterable[tuple[int, Span]] | None = None) -> Iterator[tuple[slice, Piece | None, slice]]:
        """(rows, Piece, which of the fetched keys) of each of this rank's spans, or of what these are cut into otherwise, as
        (where it lies, which it is); a Piece is None where nothing is seen."""
        mine = self.queries[self.peers.rank]
        for at, span in places(mine) if cut is None else cut:
            part = call.piece(span, call.reach(span), at)
            yield slice(at, at + len(span)), part, fetched(call.reach_of(mine), part.keys) if part else slice(0)


def fetched(spans: Spans, one: Span) -> slice:
    """Where the rows of a span lie among those that were fetched, which are the rows of `spans`."""
    found = [at + one.start - span.start for at, span in places(spans) if span.start <= one.start < span.stop]
    return slice(found[0], found[0] + len(one))
