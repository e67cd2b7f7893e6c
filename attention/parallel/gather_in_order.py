"""Scheme "gather" with deterministic=True: gradients, too, have the bits of one GPU; docs/parallel.md has the exceptions.

dq is a sum over keys, which come to their queries; dk and dv are sums over queries, in the order in which one GPU adds them.
So they are not added up from several ranks: queries, with out, lse and their gradients, come to the keys that they see, and
scores are computed twice, once for each side."""

from __future__ import annotations

from typing import Any

import attention

from .gather import GatherAttention, gathered_rows
from .gradients import GradientAccumulator, slice_dlse
from .orders import spans_with_offsets
from .redistribution import Redistribution, ShardRegion, all_heads, plan_redistribution, redistribute
from .subcalls import ForwardCall


class DeterministicGatherAttention(GatherAttention):
    """GatherAttention whose gradients are added in the order of one GPU."""

    moves_queries = True

    def differentiate(
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: ForwardCall, sums: GradientAccumulator
    ) -> None:
        """Add the gradients of `attend` to `sums`."""
        plan = self._query_plan(q, call)
        row_values = [x.transpose(1, 2) for x in (lse, dlse) if x is not None]
        pending = redistribute(self.peers, *[(x, plan) for x in (dout, q, out, *row_values)])
        keys, values = self._gather(k, v, call, all_heads(k.shape[2])).wait()
        for rows, subcall, gathered in self._parts(call):
            if subcall is not None:
                arrays = dout[:, rows], q[:, rows], keys[:, gathered], values[:, gathered], out[:, rows], lse[:, :, rows]
                targets = (sums.dq[:, rows],)  # without dk and dv, which this rank has of its own queries alone
                sums.add(subcall, call, *arrays, slice_dlse(dlse, rows), targets, accumulate=False)
        dout, q, out, *row_values = pending.wait()
        lse, dlse, *_ = *[x.transpose(1, 2).contiguous() for x in row_values], None
        rank = self.peers.rank
        for at, span in spans_with_offsets(self.keys[rank]):
            subcall = call.subcall(call.query_range(span), span)
            if subcall is None:
                continue
            rows = gathered_rows(call.query_ranges(self.keys[rank]), subcall.rows)
            local = slice(at + subcall.keys.start - span.start, at + subcall.keys.stop - span.start)
            arrays = dout[:, rows], q[:, rows], k[:, local], v[:, local], out[:, rows], lse[:, :, rows]
            _, dk, dv, *_ = attention.backward(*arrays, dlse=slice_dlse(dlse, rows), **subcall.options)
            sums.dk[:, local] += dk
            sums.dv[:, local] += dv

    @staticmethod
    def supports(call: ForwardCall) -> bool:
        """Can queries move to keys? Not with options that only their own ranks have (bias), that count from the last key, or
        whose dropout seed depends on the subcall."""
        return not {"bias", "cu_seqlens", "cu_seqlens_k", "lengths_k", "alibi", "blocks", "seed"} & call.options.keys()

    def _query_plan(self, q: Any, call: ForwardCall) -> Redistribution:
        """The Redistribution of queries to the ranks whose keys they see."""
        heads = all_heads(q.shape[2])
        needed_regions = tuple([ShardRegion(call.query_ranges(spans), heads) for spans in self.keys])
        return plan_redistribution(
            self.peers.rank, tuple([ShardRegion(spans, heads) for spans in self.queries]), needed_regions
        )
