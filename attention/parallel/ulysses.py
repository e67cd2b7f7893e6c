"""Scheme "ulysses": an all-to-all exchanges tokens for heads. A rank receives all tokens of some heads, attends to them as one
GPU does, and sends the output back; on a mesh of two dimensions it attends together with the ranks of the other dimension, by
another scheme. MeshGatherAttention is the scheme "gather" of a mesh's inner dimension."""

from __future__ import annotations

from typing import Any

from .gradients import GradientAccumulator
from .orders import Span, Spans, count_tokens, merge_spans
from .peers import Peers
from .redistribution import (
    PendingArrays,
    Redistribution,
    ShardRegion,
    all_heads,
    plan_redistribution,
    redistribute,
    reduce_scatter,
)
from .subcalls import ForwardCall


class UlyssesAttention:
    """Attention by the scheme "ulysses". queries, keys: the spans of each rank. inner: the scheme by which ranks with the same
    heads attend, or GatherAttention of a single rank."""

    name = "ulysses"
    moves_queries = True

    def __init__(self, peers: Peers, queries: tuple[Spans, ...], keys: tuple[Spans, ...], inner: Any):
        self.peers, self.queries, self.keys, self.inner = peers, queries, keys, inner
        self.cached: dict[Any, Any] = {}  # what depends on the call's signature alone; an object serves calls with one

    @staticmethod
    def split_heads(heads: int, kv_heads: int, world: int) -> list[tuple[Span, Span]] | None:
        """The (query heads, key heads) of each rank; None if heads cannot be divided evenly."""
        if heads % world:
            return None
        size, group = heads // world, heads // kv_heads
        if size % group and group % size:
            return None
        splits = []
        for rank in range(world):
            first = rank * size // group
            splits.append((Span(rank * size, (rank + 1) * size), Span(first, first + max(1, size // group))))
        return splits

    def attend(self, q: Any, k: Any, v: Any, call: ForwardCall) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries, all heads."""
        q, k, v = self._exchange_for_heads(call, q=q, k=k, v=v).wait()
        out, lse = self.inner.attend(q, k, v, self._head_call(call))
        back = self._plan(call, "q", back=True)
        out, lse = redistribute(self.peers, (out, back), (lse.transpose(1, 2).contiguous(), back)).wait()
        return out, lse.transpose(1, 2)

    def differentiate(
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: ForwardCall, sums: GradientAccumulator
    ) -> None:
        """Add the gradients of `attend` to `sums`."""
        row_values = {name: x.transpose(1, 2).contiguous() for name, x in (("lse", lse), ("dlse", dlse)) if x is not None}
        dout, q, k, v, out, *rows = self._exchange_for_heads(call, dout=dout, q=q, k=k, v=v, out=out, **row_values).wait()
        lse, dlse, *_ = *[x.transpose(1, 2) for x in rows], None
        head_call = self._head_call(call)
        head_sums = GradientAccumulator.zeros(q, k, v, head_call, sums.wanted)
        self.inner.differentiate(dout, dlse, q, k, v, out, lse, head_call, head_sums)
        gradients = zip("qkv", (head_sums.dq, head_sums.dk, head_sums.dv))
        returned = reduce_scatter(self.peers, *[(x, self._plan(call, name, back=True)) for name, x in gradients])
        for total, x in zip((sums.dq, sums.dk, sums.dv), returned):
            total += x
        for name, x in head_sums.others.items():
            self._add_other(sums.others[name], name, x, call, head_call)

    def _add_other(self, total: Any, name: str, x: Any, call: ForwardCall, head_call: ForwardCall) -> None:
        """Add the gradient of another array than q, k and v, which has some heads, to its sum."""
        if name == "bias" and self._has_rows(total):
            owners = tuple([ShardRegion(spans, all_heads(total.shape[1])) for spans in self.queries])
            rows, shares = merge_rank_spans(self.queries), self._head_shares(call)
            sources = tuple([ShardRegion(rows, heads if total.shape[1] > 1 else Span(0, 1)) for heads, _ in shares])
            back = plan_redistribution(self.peers.rank, sources, owners)
            total += reduce_scatter(self.peers, (x.transpose(1, 2).contiguous(), back))[0].transpose(1, 2)
        elif name in ("bias", "alibi", "sink"):
            axis = {"bias": 1, "alibi": -1, "sink": 0}[name]
            total = total.movedim(axis, 0)
            total[slice(*head_call.heads) if len(total) > 1 else slice(None)] += x.movedim(axis, 0)
        else:
            total += x

    def _head_call(self, call: ForwardCall) -> ForwardCall:
        """The call of this rank's heads."""
        if call.plain and (head_call := self.cached.get("call")):
            return head_call
        head_call = self._select_heads(call)
        if call.plain:
            self.cached["call"] = head_call
        return head_call

    def _select_heads(self, call: ForwardCall) -> ForwardCall:
        """The call of this rank's heads; the rows of a bias are received from all ranks."""
        bias = call.options.get("bias")
        heads, key_heads = self._head_shares(call)[self.peers.rank]
        if bias is None or not self._has_rows(bias):
            return call.select_heads(heads, key_heads)
        bias_heads = [head_span if bias.shape[1] > 1 else Span(0, 1) for head_span, _ in self._head_shares(call)]
        sources = tuple([ShardRegion(spans, all_heads(bias.shape[1])) for spans in self.queries])
        rows = merge_rank_spans(self.queries)
        plan = plan_redistribution(self.peers.rank, sources, tuple([ShardRegion(rows, head_span) for head_span in bias_heads]))
        received = redistribute(self.peers, (bias.transpose(1, 2), plan)).wait()[0].transpose(1, 2)
        options = {name: x for name, x in call.options.items() if name != "bias"}
        selected = call._replace(options=options).select_heads(heads, key_heads)
        return selected._replace(options=selected.options | {"bias": received})

    def _has_rows(self, bias: Any) -> bool:
        """Does the bias have the rows of this rank's queries? If some rank has at most one query, all do (see softmax.py)."""
        return bias.shape[2] > 1 or min(map(count_tokens, self.queries)) < 2

    def _head_shares(self, call: ForwardCall) -> list[tuple[Span, Span]]:
        shares = self.split_heads(len(call.heads), len(call.kv_heads), self.peers.world)
        assert shares is not None, "choice.refusal has checked it"
        return shares

    def _token_regions(self, call: ForwardCall, name: str) -> tuple[ShardRegion, ...]:
        """Each rank's region of an array before attention, and of its results."""
        spans, heads = (self.keys, call.kv_heads) if name in "kv" else (self.queries, call.heads)
        return tuple([ShardRegion(one, all_heads(len(heads))) for one in spans])

    def _head_regions(self, call: ForwardCall, name: str) -> tuple[ShardRegion, ...]:
        """Each rank's region of an array during attention."""
        rows = merge_rank_spans(self.keys if name in "kv" else self.queries)
        return tuple([ShardRegion(rows, head_span[name in "kv"]) for head_span in self._head_shares(call)])

    def _exchange_for_heads(self, call: ForwardCall, **arrays: Any) -> PendingArrays:
        """Start to exchange this rank's tokens of all heads for all tokens of its heads."""
        return redistribute(self.peers, *[(x, self._plan(call, name)) for name, x in arrays.items()])

    def _plan(self, call: ForwardCall, name: str, back: bool = False) -> Redistribution:
        """The Redistribution of queries, or of keys, from tokens to heads, or back."""
        key = name in "kv", back
        plan = self.cached.get(key)
        if plan is None:
            ends = self._token_regions(call, name), self._head_regions(call, name)
            plan = self.cached[key] = plan_redistribution(self.peers.rank, *(ends[::-1] if back else ends))
        return plan


class MeshGatherAttention:
    """The scheme of a mesh of two dimensions: the ranks of the inner one gather their keys and values, and `outer` is the
    scheme by which the ranks of the outer dimension attend to these."""

    name = "gather"
    moves_queries = False

    def __init__(self, peers: Peers, queries: tuple[Spans, ...], keys: tuple[Spans, ...], outer: Any):
        self.peers, self.keys, self.outer = peers, keys, outer

    def attend(self, q: Any, k: Any, v: Any, call: ForwardCall) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries."""
        return self.outer.attend(q, *self._gather(k, v), call)

    def differentiate(
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: ForwardCall, sums: GradientAccumulator
    ) -> None:
        """Add the gradients of `attend` to `sums`."""
        keys, values = self._gather(k, v)
        gathered_sums = GradientAccumulator.zeros(q, keys, values, call, sums.wanted)
        gathered_sums.dq, gathered_sums.others = sums.dq, sums.others
        self.outer.differentiate(dout, dlse, q, keys, values, out, lse, call, gathered_sums)
        local, gathered = self._regions(k)
        back = plan_redistribution(self.peers.rank, gathered, local)
        dk, dv = reduce_scatter(self.peers, (gathered_sums.dk, back), (gathered_sums.dv, back))
        sums.dk += dk
        sums.dv += dv

    def _regions(self, k: Any) -> tuple[tuple[ShardRegion, ...], tuple[ShardRegion, ...]]:
        """Each rank's region of keys before and after they are gathered."""
        heads = all_heads(k.shape[2])
        gathered = ShardRegion(merge_rank_spans(self.keys), heads)
        return tuple([ShardRegion(spans, heads) for spans in self.keys]), (gathered,) * self.peers.world

    def _gather(self, k: Any, v: Any) -> list[Any]:
        plan = plan_redistribution(self.peers.rank, *self._regions(k))
        return redistribute(self.peers, (k, plan), (v, plan)).wait()


def merge_rank_spans(spans: tuple[Spans, ...]) -> Spans:
    """The spans of several ranks together, in the sequence's order."""
    merged = merge_spans(tuple([span for one in spans for span in one]))
    assert count_tokens(merged) == sum(map(count_tokens, spans)), "no two ranks have the same token"
    return merged
