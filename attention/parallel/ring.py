"""Scheme "ring": keys and values come a rank's share at a time, and what queries have seen of each share is merged.

A rank never holds more than its own share, the one it works on and the one that is on its way. What queries have seen, out and
lse in float32, attention.forward(accumulate=True) goes on with, whatever the number of ranks.

Step s brings the share of the rank s before this one, from that rank itself. Where memory is short ring goes round in turns,
for some of the key heads each, so that shares on their way and results in float32 are of these alone; as many bytes travel.
Gradients of a share are sums in float32, which go back to the rank it came from, and are added there in the order of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import attention

from .gradients import GradientAccumulator, dlse_of
from .joins import RingPart, fewer, of_parts
from .orders import Span, Spans, count_tokens, merge_spans, subtract_spans, with_offsets
from .peers import Peers, PendingMessages
from .pieces import ForwardCall, nothing


class RingSweep(NamedTuple):
    """Some key heads. heads: which; mine: the query heads that read them; call: of these; all: all rows; unseen: those to begin
    with as if they had seen nothing; todo: of each rank's share, in the order in which they come, the parts, and if a part is
    the first of its rows, so that there is nothing to merge it with."""

    heads: slice
    mine: slice
    call: ForwardCall
    all: slice
    unseen: list[slice]
    todo: dict[int, list[tuple[RingPart, bool]]]


class RingAttention:
    """Of ranks that have these queries and these keys each, going round so many times; turns_back: for gradients."""

    name = "ring"
    moves_queries = False

    def __init__(
        self, peers: Peers, queries: tuple[Spans, ...], keys: tuple[Spans, ...], sweeps: int = 1, sweeps_backward: int = 1
    ):
        self.peers, self.queries, self.keys = peers, queries, keys
        self.sweeps, self.sweeps_backward = sweeps, sweeps_backward
        self.known: list[RingSweep] | None = None  # what follows from the call's form

    def attend(self, q: Any, k: Any, v: Any, call: ForwardCall) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries."""
        sweeps = self._sweeps(q, call)
        if len(sweeps) == 1:
            out, lse = self._run_sweep(q, k, v, sweeps[0])
            return out.to(q.dtype), lse
        out = lse = None
        for sweep in sweeps:
            found = self._run_sweep(q[:, :, sweep.mine], k[:, :, sweep.heads], v[:, :, sweep.heads], sweep)
            if out is None:  # now that the turn holds no more than what it has found
                out = q.new_empty((*q.shape[:3], v.shape[3]))
                lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
            out[:, :, sweep.mine], lse[:, sweep.mine] = found
            del found
        return out, lse

    def _run_sweep(self, q: Any, k: Any, v: Any, sweep: RingSweep) -> tuple[Any, Any]:
        """What the queries of a turn see, in float32, and its sums."""
        out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.float32)
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        for unseen in sweep.unseen:
            nothing(out[:, unseen], lse[:, :, unseen], sweep.call)

        def see(share: int, keys: Any, values: Any) -> None:
            for (rows, seen, part), first in sweep.todo[share]:
                given = q, keys, values
                mine, its = out, lse
                if rows != sweep.all:
                    mine, its, given = out[:, rows], lse[:, :, rows], (q[:, rows], keys, values)
                if seen != slice(0, keys.shape[1]):
                    given = given[0], keys[:, seen], values[:, seen]
                attention.forward(*given, out=mine, lse=its, return_lse=True, accumulate=not first, **part.options)

        self._go_around(k, v, see)
        return out, lse

    def differentiate(
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: ForwardCall, found: GradientAccumulator
    ) -> None:
        """Add the gradients of `attend` to what is found."""
        back: list[list[tuple[PendingMessages, Any, Any]]] = []
        for heads, mine, of_turn in self._heads(call, self.sweeps_backward):
            alone = _without_sink(of_turn)
            dk, dv = found.dk[:, :, heads], found.dv[:, :, heads]

            def see(share: int, keys: Any, values: Any) -> None:
                of_keys, of_values = _zeros_like(keys), _zeros_like(values)
                for rows, seen, part in self._parts(alone, share):
                    asked = dout[:, rows, mine], q[:, rows, mine], keys[:, seen], values[:, seen], out[:, rows, mine]
                    into = found.dq[:, rows, mine], of_keys[:, seen], of_values[:, seen]
                    found.add(part, alone, *asked, lse[:, mine, rows], dlse_of(dlse, rows, mine), into)
                _add(back)
                back.append(self._return(share, of_keys, of_values, dk, dv))

            self._go_around(k[:, :, heads], v[:, :, heads], see)
        while back:
            _add(back)
        if "sink" in found.others:  # a key without a value: once, not once a piece
            delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
            delta = delta if dlse is None else delta - dlse
            found.others["sink"] -= ((call.options["sink"][:, None] - lse).exp() * delta).sum((0, 2))

    def _go_around(self, k: Any, v: Any, see: Callable[[int, Any, Any], None]) -> None:
        """see(whose it is, its keys, its values) of every rank's share, this one's first, while the next one comes."""
        rank, world = self.peers.rank, self.peers.world
        now = coming = mine = k.contiguous(), v.contiguous()
        for step in range(world):
            pending = PendingMessages(())
            if step + 1 < world:
                before, behind = (rank - step - 1) % world, (rank + step + 1) % world
                rows = count_tokens(self.keys[before])
                coming = tuple([x.new_empty((x.shape[0], rows, *x.shape[2:])) for x in (k, v)])
                pending = self.peers.exchange([(behind, x) for x in mine], [(before, x) for x in coming])
            see((rank - step) % world, *now)
            pending.wait()
            now = coming

    def _heads(self, call: ForwardCall, sweeps: int) -> Iterator[tuple[slice, slice, ForwardCall]]:
        """(key heads, query heads that read them, the call of these) of each of so many turns."""
        each = len(call.kv_heads) // sweeps
        for first in range(0, len(call.kv_heads), each):
            heads = Span(first, first + each)
            yield slice(*heads), *call.select_key_heads(heads)

    def _sweeps(self, q: Any, call: ForwardCall) -> list[RingSweep]:
        """What is done for a call; remembered as Gather does."""
        if self.known is not None:
            return self.known
        found = [self._sweep(q.shape[0], *its) for its in self._heads(call, self.sweeps)]
        if call.plain:
            self.known = found
        return found

    def _sweep(self, batch: int, heads: slice, mine: slice, call: ForwardCall) -> RingSweep:
        rank, world, alone = self.peers.rank, self.peers.world, _without_sink(call)
        sink = {name: x for name, x in call.options.items() if name == "sink"}  # it joins what rows see first
        begun: Spans = ()
        unseen: list[Span] = []
        todo: dict[int, list[tuple[RingPart, bool]]] = {}
        for share in [(rank - step) % world for step in range(world)]:
            parts, todo[share] = self._parts(alone, share), []
            for rows, seen, part in of_parts(parts, alone, batch) or parts:
                its = Span(rows.start, rows.stop)
                new = subtract_spans(its, begun)
                first = new == (its,)
                unseen += [] if first else new
                begun = merge_spans((*begun, its))
                part = part._replace(options=part.options | sink) if first else part
                todo[share].append(((rows, seen, part), first))
        every = Span(0, count_tokens(self.queries[rank]))
        unseen += subtract_spans(every, begun)
        return RingSweep(heads, mine, call, slice(*every), [slice(*span) for span in unseen], todo)

    def _parts(self, call: ForwardCall, share: int) -> list[RingPart]:
        """(rows of q, rows of the share, Piece) of what these queries see of it, in as few calls as can be."""
        found = []
        for at, span in with_offsets(self.queries[self.peers.rank]):
            for there, keys in with_offsets(self.keys[share]):
                part = call.piece(span, keys, at)
                if part is not None:
                    first, key = at + part.rows.start - span.start, there + part.keys.start - keys.start
                    found.append((slice(first, first + len(part.rows)), slice(key, key + len(part.keys)), part))
        return fewer(found)

    def _return(self, share: int, of_keys: Any, of_values: Any, dk: Any, dv: Any) -> list[tuple[PendingMessages, Any, Any]]:
        """The gradients of a share on their way home, and those of this rank's that another one has found: (what is waited for,
        where it is added, what) of keys and of values."""
        rank, world = self.peers.rank, self.peers.world
        if share == rank:
            return [(PendingMessages(()), dk, of_keys), (PendingMessages(()), dv, of_values)]
        finder = (2 * rank - share) % world  # who has worked on this rank's share in this step
        mine = _zeros_like(dk), _zeros_like(dv)
        pending = self.peers.exchange([(share, x) for x in (of_keys, of_values)], [(finder, x) for x in mine])
        return [(pending, dk, mine[0]), (pending, dv, mine[1])]


def _add(back: list[list[tuple[PendingMessages, Any, Any]]]) -> None:
    """What has come home first to where it belongs."""
    for pending, total, x in back.pop(0) if back else ():
        pending.wait()
        total += x


def _without_sink(call: ForwardCall) -> ForwardCall:
    return call._replace(options={name: x for name, x in call.options.items() if name != "sink"})


def _zeros_like(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
