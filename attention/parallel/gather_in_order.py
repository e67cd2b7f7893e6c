"""Scheme "gather" with deterministic=True: gradients, too, have the bits of one GPU; docs/parallel.md has exceptions.

dq is a sum over keys, which come to their queries; dk and dv are sums over queries, in the order in which one GPU takes them.
So these are not added up from several ranks: queries and what belongs to them come to the keys that they see, and scores are
computed twice, once for each side."""

from __future__ import annotations

from typing import Any

import attention

from .gather import GatherAttention, fetched_rows
from .gradients import GradientAccumulator, dlse_of
from .moves import Redistribution, ShardRegion, all_heads, plan_redistribution, redistribute
from .orders import with_offsets
from .pieces import ForwardCall


class DeterministicGatherAttention(GatherAttention):
    """See above; forward is Gather's."""

    moves_queries = True

    def differentiate(
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: ForwardCall, found: GradientAccumulator
    ) -> None:
        """Add the gradients of `attend` to what is found."""
        there = self._facing(q, call)
        of_rows = [x.transpose(1, 2) for x in (lse, dlse) if x is not None]
        facing = redistribute(self.peers, *[(x, there) for x in (dout, q, out, *of_rows)])
        keys, values = self._fetch(k, v, call, all_heads(k.shape[2])).wait()
        for rows, part, seen in self._parts(call):
            if part is not None:
                given = dout[:, rows], q[:, rows], keys[:, seen], values[:, seen], out[:, rows], lse[:, :, rows]
                into = (found.dq[:, rows],)  # its dk and dv are not the whole's
                found.add(part, call, *given, dlse_of(dlse, rows), into, accumulate=False)
        dout, q, out, *of_rows = facing.wait()
        lse, dlse, *_ = *[x.transpose(1, 2).contiguous() for x in of_rows], None
        rank = self.peers.rank
        for at, span in with_offsets(self.keys[rank]):
            part = call.piece(call.query_range(span), span)
            if part is None:
                continue
            rows = fetched_rows(call.query_ranges(self.keys[rank]), part.rows)
            here = slice(at + part.keys.start - span.start, at + part.keys.stop - span.start)
            given = dout[:, rows], q[:, rows], k[:, here], v[:, here], out[:, rows], lse[:, :, rows]
            _, dk, dv, *_ = attention.backward(*given, dlse=dlse_of(dlse, rows), **part.options)
            found.dk[:, here] += dk
            found.dv[:, here] += dv

    @staticmethod
    def serves(call: ForwardCall) -> bool:
        """Can queries come to keys? Not with what only their own ranks have, what counts from the last key, or what a piece
        of other queries would drop otherwise."""
        return not {"bias", "cu_seqlens", "cu_seqlens_k", "lengths_k", "alibi", "blocks", "seed"} & call.options.keys()

    def _facing(self, q: Any, call: ForwardCall) -> Redistribution:
        """The way of queries to the keys that they see."""
        heads = all_heads(q.shape[2])
        wanted = tuple([ShardRegion(call.query_ranges(spans), heads) for spans in self.keys])
        return plan_redistribution(self.peers.rank, tuple([ShardRegion(spans, heads) for spans in self.queries]), wanted)
