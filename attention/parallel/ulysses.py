"""Scheme "ulysses": heads for tokens. All tokens of some heads come to a rank, which attends to them as one GPU does, and its
output goes back; or, on a mesh of two dimensions, as the ranks of the other dimension do together, by another scheme."""

from __future__ import annotations

from typing import Any

from .gradients import GradientAccumulator
from .moves import PendingArrays, Redistribution, ShardRegion, all_heads, plan_redistribution, redistribute, reduce_scatter
from .orders import Span, Spans, count_tokens, merge_spans
from .peers import Peers
from .pieces import ForwardCall


class UlyssesAttention:
    """Of ranks that have these queries and these keys each, and `then` a scheme of those that have the same heads."""

    name = "ulysses"
    moves_queries = True

    def __init__(self, peers: Peers, queries: tuple[Spans, ...], keys: tuple[Spans, ...], then: Any):
        self.peers, self.queries, self.keys, self.then = peers, queries, keys, then
        self.known: dict[Any, Any] = {}  # what follows from the call's form, which is always the same

    @staticmethod
    def split_heads(heads: int, kv_heads: int, world: int) -> list[tuple[Span, Span]] | None:
        """The (query heads, key heads) of each rank; None if there are too few to share."""
        if heads % world:
            return None
        each, group = heads // world, heads // kv_heads
        if each % group and group % each:
            return None
        found = []
        for rank in range(world):
            first = rank * each // group
            found.append((Span(rank * each, (rank + 1) * each), Span(first, first + max(1, each // group))))
        return found

    def attend(self, q: Any, k: Any, v: Any, call: ForwardCall) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries, all heads."""
        q, k, v = self._moving(call, q=q, k=k, v=v).wait()
        out, lse = self.then.attend(q, k, v, self._call(call))
        home = self._home(call, "q")
        out, lse = redistribute(self.peers, *[(x, home) for x in (out, lse.transpose(1, 2).contiguous())]).wait()
        return out, lse.transpose(1, 2)

    def differentiate(
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: ForwardCall, found: GradientAccumulator
    ) -> None:
        """Add the gradients of `attend` to what is found."""
        of_rows = {name: x.transpose(1, 2).contiguous() for name, x in (("lse", lse), ("dlse", dlse)) if x is not None}
        dout, q, k, v, out, *rows = self._moving(call, dout=dout, q=q, k=k, v=v, out=out, **of_rows).wait()
        lse, dlse, *_ = *[x.transpose(1, 2) for x in rows], None
        theirs = self._call(call)
        its = GradientAccumulator.begin(q, k, v, theirs, found.wanted)
        self.then.differentiate(dout, dlse, q, k, v, out, lse, theirs, its)
        mine = zip("qkv", (its.dq, its.dk, its.dv))
        home = reduce_scatter(self.peers, *[(x, self._home(call, name)) for name, x in mine])
        for total, x in zip((found.dq, found.dk, found.dv), home):
            total += x
        for name, x in its.others.items():
            self._others(found.others[name], name, x, call, theirs)

    def _others(self, total: Any, name: str, x: Any, call: ForwardCall, theirs: ForwardCall) -> None:
        """The gradient of an array that is no q, k or v, of some heads, to what is found of it."""
        if name == "bias" and self._has_rows(total):
            cuts, every = (
                tuple([ShardRegion(spans, all_heads(total.shape[1])) for spans in self.queries]),
                join_spans(self.queries),
            )
            sources = tuple([ShardRegion(every, mine if total.shape[1] > 1 else Span(0, 1)) for mine, _ in self._shares(call)])
            home = plan_redistribution(self.peers.rank, sources, cuts)
            total += reduce_scatter(self.peers, (x.transpose(1, 2).contiguous(), home))[0].transpose(1, 2)
        elif name in ("bias", "alibi", "sink"):
            axis = {"bias": 1, "alibi": -1, "sink": 0}[name]
            total = total.movedim(axis, 0)
            total[slice(*theirs.heads) if len(total) > 1 else slice(None)] += x.movedim(axis, 0)
        else:
            total += x

    def _call(self, call: ForwardCall) -> ForwardCall:
        """What this rank's heads are asked for; a bias has rows, which travel."""
        if call.plain and (found := self.known.get("call")):
            return found
        found = self._of_heads(call)
        if call.plain:
            self.known["call"] = found
        return found

    def _of_heads(self, call: ForwardCall) -> ForwardCall:
        bias = call.options.get("bias")
        mine, keys = self._shares(call)[self.peers.rank]
        if bias is None or not self._has_rows(bias):
            return call.select_heads(mine, keys)
        heads = [share if bias.shape[1] > 1 else Span(0, 1) for share, _ in self._shares(call)]
        held, every = tuple([ShardRegion(spans, all_heads(bias.shape[1])) for spans in self.queries]), join_spans(self.queries)
        there = plan_redistribution(self.peers.rank, held, tuple([ShardRegion(every, share) for share in heads]))
        whole = redistribute(self.peers, (bias.transpose(1, 2), there)).wait()[0].transpose(1, 2)
        others = call._replace(options={name: x for name, x in call.options.items() if name != "bias"}).select_heads(mine, keys)
        return others._replace(options=others.options | {"bias": whole})

    def _has_rows(self, bias: Any) -> bool:
        """Has each rank rows of its own queries? Where one has a single query or none, all have: softmax.py sees to it."""
        return bias.shape[2] > 1 or min(map(count_tokens, self.queries)) < 2

    def _shares(self, call: ForwardCall) -> list[tuple[Span, Span]]:
        found = self.split_heads(len(call.heads), len(call.kv_heads), self.peers.world)
        assert found is not None
        return found

    def _here(self, call: ForwardCall, name: str) -> tuple[ShardRegion, ...]:
        """What each rank has of an array before, and of what is given back."""
        spans, heads = (self.keys, call.kv_heads) if name in "kv" else (self.queries, call.heads)
        return tuple([ShardRegion(one, all_heads(len(heads))) for one in spans])

    def _there(self, call: ForwardCall, name: str) -> tuple[ShardRegion, ...]:
        """What each has while it attends."""
        every = join_spans(self.keys if name in "kv" else self.queries)
        return tuple([ShardRegion(every, share[name in "kv"]) for share in self._shares(call)])

    def _moving(self, call: ForwardCall, **arrays: Any) -> PendingArrays:
        return redistribute(self.peers, *[(x, self._way(call, name)) for name, x in arrays.items()])

    def _way(self, call: ForwardCall, name: str, home: bool = False) -> Redistribution:
        """That of an array of queries or of keys to who attends with it, or `home` from there."""
        key = name in "kv", home
        found = self.known.get(key)
        if found is None:
            ends = self._here(call, name), self._there(call, name)
            found = self.known[key] = plan_redistribution(self.peers.rank, *(ends[::-1] if home else ends))
        return found

    def _home(self, call: ForwardCall, name: str) -> Redistribution:
        return self._way(call, name, True)


class MeshGatherAttention:
    """Keys and values of the ranks of one dimension come together, and `then` is a scheme of what these have together."""

    name = "gather"
    moves_queries = False

    def __init__(self, peers: Peers, queries: tuple[Spans, ...], keys: tuple[Spans, ...], then: Any):
        self.peers, self.keys, self.then = peers, keys, then

    def attend(self, q: Any, k: Any, v: Any, call: ForwardCall) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries."""
        return self.then.attend(q, *self._fetched(k, v), call)

    def differentiate(
        self, dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: ForwardCall, found: GradientAccumulator
    ) -> None:
        """Add the gradients of `attend` to what is found."""
        keys, values = self._fetched(k, v)
        its = GradientAccumulator.begin(q, keys, values, call, found.wanted)
        its.dq, its.others = found.dq, found.others
        self.then.differentiate(dout, dlse, q, keys, values, out, lse, call, its)
        here, there = self._cuts(k)
        back = plan_redistribution(self.peers.rank, there, here)
        home = reduce_scatter(self.peers, *[(x, back) for x in (its.dk, its.dv)])
        for total, x in zip((found.dk, found.dv), home):
            total += x

    def _cuts(self, k: Any) -> tuple[tuple[ShardRegion, ...], tuple[ShardRegion, ...]]:
        heads = all_heads(k.shape[2])
        return tuple([ShardRegion(spans, heads) for spans in self.keys]), (
            ShardRegion(join_spans(self.keys), heads),
        ) * self.peers.world

    def _fetched(self, k: Any, v: Any) -> list[Any]:
        its = plan_redistribution(self.peers.rank, *self._cuts(k))
        return redistribute(self.peers, (k, its), (v, its)).wait()


def join_spans(spans: tuple[Spans, ...]) -> Spans:
    """What ranks have together, in the sequence's order."""
    found = merge_spans(tuple([span for one in spans for span in one]))
    assert count_tokens(found) == sum(map(count_tokens, spans)), "ranks have no token twice"
    return found
