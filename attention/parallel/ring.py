"""Scheme "ring": ring attention. Keys and values come one rank's shard at a time, and partial results are merged.

A rank never holds more than its own shard, the one it works on and the one it receives. The partial result, out and lse in
float32, is continued by attention.forward(accumulate=True), whatever the number of ranks.

Step s receives the shard of the rank s before this one, from that rank itself. Where memory is short the ring runs in several
sweeps, each for some of the key heads, so that received shards and float32 results belong to these alone; as many bytes are
sent. Gradients of a shard are sums in float32, which are sent to the rank that owns it and added there in the order of
steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import attention

from .gradients import GradientAccumulator, slice_dlse
from .merge_parts import RingPart, merge_by_lengths, merge_parts
from .orders import Span, Spans, count_tokens, merge_spans, spans_with_offsets, subtract_spans
from .peers import Peers, PendingMessages
from .subcalls import ForwardCall, write_unseen


class RingSweep(NamedTuple):
    """Once around the ring for some key heads. heads: which; query_heads: those that read them; call: the call of these heads;
    all_rows: all query rows; initial: the rows whose result is first written as if they saw no key; todo: for each rank's
    shard, in the order of arrival, its parts, and whether each part is the first of its rows, so that there is no result to
    continue."""

    heads: slice
    query_heads: slice
    call: ForwardCall
    all_rows: slice
    initial: list[slice]
    todo: dict[int, list[tuple[RingPart, bool]]]


class RingAttention:
    """Attention by the scheme "ring". queries, keys: the spans of each rank. sweeps, sweeps_backward: how often keys go around
    the ring, forward and backward."""

    name = "ring"
    moves_queries = False

    def __init__(
        self, peers: Peers, queries: tuple[Spans, ...], keys: tuple[Spans, ...], sweeps: int = 1, sweeps_backward: int = 1
    ):
        self.peers, self.queries, self.keys = peers, queries, keys
        self.sweeps, self.sweeps_backward = sweeps, sweeps_backward
        self.cached: list[RingSweep] | None = None  # what depends on the call's signature alone

    def attend(self, q: Any, k: Any, v: Any, call: ForwardCall) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries."""
        sweeps = self._sweeps(q, call)
        if len(sweeps) == 1:
            out, lse = self._run_sweep(q, k, v, sweeps[0])
            return out.to(q.dtype), lse
        out = lse = None
        for sweep in sweeps:
            results = self._run_sweep(q[:, :, sweep.query_heads], k[:, :, sweep.heads], v[:, :, sweep.heads], sweep)
            if out is None:  # allocated only now: the first sweep has released everything but its results
                out = q.new_empty((*q.shape[:3], v.shape[3]))
                lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
            out[:, :, sweep.query_heads], lse[:, sweep.query_heads] = results
            del results
        return out, lse

    def _run_sweep(self, q: Any, k: Any, v: Any, sweep: RingSweep) -> tuple[Any, Any]:
        """(out, lse) of the heads of a sweep, both in float32."""
        out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.float32)
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        for rows in sweep.initial:
            write_unseen(out[:, rows], lse[:, :, rows], sweep.call)

        def attend_shard(owner: int, keys: Any, values: Any) -> None:
            for (rows, key_rows, subcall), is_first in sweep.todo[owner]:
                arrays = q, keys, values
                out_part, lse_part = out, lse
                if rows != sweep.all_rows:
                    out_part, lse_part, arrays = out[:, rows], lse[:, :, rows], (q[:, rows], keys, values)
                if key_rows != slice(0, keys.shape[1]):
                    arrays = arrays[0], keys[:, key_rows], values[:, key_rows]
                attention.forward(
                    *arrays, out=out_part, lse=lse_part, return_lse=True, accumulate=not is_first, **subcall.options
                )

        self._go_around(k, v, attend_shard)
        return out, lse

    def differentiate(
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: ForwardCall, sums: GradientAccumulator
    ) -> None:
        """Add the gradients of `attend` to `sums`."""
        returning: list[list[tuple[PendingMessages, Any, Any]]] = []
        for heads, query_heads, head_call in self._head_groups(call, self.sweeps_backward):
            sinkless = _without_sink(head_call)
            dk, dv = sums.dk[:, :, heads], sums.dv[:, :, heads]

            def differentiate_shard(owner: int, keys: Any, values: Any) -> None:
                dkeys, dvalues = _zeros_like(keys), _zeros_like(values)
                for rows, key_rows, subcall in self._parts(sinkless, owner):
                    arrays = dout[:, rows, query_heads], q[:, rows, query_heads], keys[:, key_rows], values[:, key_rows]
                    results = out[:, rows, query_heads], lse[:, query_heads, rows]
                    targets = sums.dq[:, rows, query_heads], dkeys[:, key_rows], dvalues[:, key_rows]
                    sums.add(subcall, sinkless, *arrays, *results, slice_dlse(dlse, rows, query_heads), targets)
                _add_first(returning)
                returning.append(self._return_gradients(owner, dkeys, dvalues, dk, dv))

            self._go_around(k[:, :, heads], v[:, :, heads], differentiate_shard)
        while returning:
            _add_first(returning)
        if "sink" in sums.others:  # a key without a value: its gradient is computed once, not in each subcall
            delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
            delta = delta if dlse is None else delta - dlse
            dsink = (call.options["sink"][:, None] - lse).exp() * delta
            sums.others["sink"] -= dsink.masked_fill_(lse == -torch.inf, 0.0).sum((0, 2))  # no key, and a sink of -inf

    def _go_around(self, k: Any, v: Any, visit: Callable[[int, Any, Any], None]) -> None:
        """Call visit(owner, keys, values) for every rank's shard, this rank's first, while the next one is received."""
        rank, world = self.peers.rank, self.peers.world
        current = next_shard = local = k.contiguous(), v.contiguous()
        for step in range(world):
            pending = PendingMessages(())
            if step + 1 < world:
                sender, receiver = (rank - step - 1) % world, (rank + step + 1) % world
                rows = count_tokens(self.keys[sender])
                next_shard = tuple([x.new_empty((x.shape[0], rows, *x.shape[2:])) for x in (k, v)])
                pending = self.peers.exchange([(receiver, x) for x in local], [(sender, x) for x in next_shard])
            visit((rank - step) % world, *current)
            pending.wait()
            current = next_shard

    def _head_groups(self, call: ForwardCall, sweeps: int) -> Iterator[tuple[slice, slice, ForwardCall]]:
        """(key heads, query heads that read them, the call of these heads) of each sweep."""
        size = len(call.kv_heads) // sweeps
        for first in range(0, len(call.kv_heads), size):
            heads = Span(first, first + size)
            yield slice(*heads), *call.select_key_heads(heads)

    def _sweeps(self, q: Any, call: ForwardCall) -> list[RingSweep]:
        """The sweeps of a call; cached if calls with this signature differ in nothing but q, k and v."""
        if self.cached is not None:
            return self.cached
        sweeps = [self._sweep(q.shape[0], *group) for group in self._head_groups(call, self.sweeps)]
        if call.plain:
            self.cached = sweeps
        return sweeps

    def _sweep(self, batch: int, heads: slice, query_heads: slice, call: ForwardCall) -> RingSweep:
        rank, world, sinkless = self.peers.rank, self.peers.world, _without_sink(call)
        sink = {name: x for name, x in call.options.items() if name == "sink"}  # the first part of each row has it
        visited: Spans = ()
        initial: list[Span] = []
        todo: dict[int, list[tuple[RingPart, bool]]] = {}
        for owner in [(rank - step) % world for step in range(world)]:
            parts, todo[owner] = self._parts(sinkless, owner), []
            for rows, key_rows, subcall in merge_by_lengths(parts, sinkless, batch) or parts:
                span = Span(rows.start, rows.stop)
                new = subtract_spans(span, visited)
                is_first = new == (span,)
                initial += [] if is_first else new
                visited = merge_spans((*visited, span))
                subcall = subcall._replace(options=subcall.options | sink) if is_first else subcall
                todo[owner].append(((rows, key_rows, subcall), is_first))
        all_rows = Span(0, count_tokens(self.queries[rank]))
        initial += subtract_spans(all_rows, visited)
        return RingSweep(heads, query_heads, call, slice(*all_rows), [slice(*span) for span in initial], todo)

    def _parts(self, call: ForwardCall, owner: int) -> list[RingPart]:
        """(rows of q, rows of the shard, SubCall) of what these queries see of a rank's shard, in few calls."""
        parts = []
        for at, span in spans_with_offsets(self.queries[self.peers.rank]):
            for key_at, keys in spans_with_offsets(self.keys[owner]):
                subcall = call.subcall(span, keys, at)
                if subcall is not None:
                    row, key_row = at + subcall.rows.start - span.start, key_at + subcall.keys.start - keys.start
                    parts.append((slice(row, row + len(subcall.rows)), slice(key_row, key_row + len(subcall.keys)), subcall))
        return merge_parts(parts)

    def _return_gradients(
        self, owner: int, dkeys: Any, dvalues: Any, dk: Any, dv: Any
    ) -> list[tuple[PendingMessages, Any, Any]]:
        """Send the gradients of a shard to its owner, and receive those of this rank's shard that another rank has computed:
        (messages to wait for, sum, what is added to it) for keys and for values."""
        rank, world = self.peers.rank, self.peers.world
        if owner == rank:
            return [(PendingMessages(()), dk, dkeys), (PendingMessages(()), dv, dvalues)]
        worker = (2 * rank - owner) % world  # the rank that has worked on this rank's shard in this step
        received = _zeros_like(dk), _zeros_like(dv)
        pending = self.peers.exchange([(owner, x) for x in (dkeys, dvalues)], [(worker, x) for x in received])
        return [(pending, dk, received[0]), (pending, dv, received[1])]


def _add_first(returning: list[list[tuple[PendingMessages, Any, Any]]]) -> None:
    """Remove the first gradients of the list, wait for them, and add them to their sums."""
    for pending, total, x in returning.pop(0) if returning else ():
        pending.wait()
        total += x


def _without_sink(call: ForwardCall) -> ForwardCall:
    return call._replace(options={name: x for name, x in call.options.items() if name != "sink"})


def _zeros_like(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
