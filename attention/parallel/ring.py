"""Scheme "ring": keys and values come a rank's share at a time, and what queries have seen of each share is merged.

A rank never holds more than its own share, the one it works on and the one that is on its way. Partial results, out_i of lse_i,
are merged in float32 as the online softmax merges blocks (softmax/online.py), whatever the number of ranks:

    lse = log(sum_i exp(lse_i))        out = sum_i exp(lse_i - lse) out_i

Step s brings the share of the rank s before this one, from that rank itself. Gradients of a share are sums in float32, which go
back to the rank it came from, and are added there in the order of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import attention

from .gradients import Gradients
from .moves import Cut, all_heads
from .orders import Span, Spans
from .peers import Peers, Pending
from .pieces import Call, Piece


class Ring:
    """Of ranks that have these queries and these keys each."""

    name = "ring"

    def __init__(self, peers: Peers, queries: tuple[Spans, ...], keys: tuple[Spans, ...]):
        self.peers, self.queries, self.keys = peers, queries, keys
        self.known: Any = None  # what follows from the call's form

    def attend(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """(out, lse) of this rank's queries."""
        shares, (unseen, todo) = self._shares(k, v), self._todo(call)
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=torch.float32, device=q.device)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
        for rows in unseen:
            out[:, rows].zero_()
            lse[:, :, rows].fill_(-torch.inf)
        for share, (keys, values) in shares:
            for rows, seen, part, first in todo[share]:
                mine, its, given = out[:, rows], lse[:, :, rows], (q[:, rows], keys[:, seen], values[:, seen])
                found = mine if first else torch.empty_like(mine, memory_format=torch.contiguous_format)
                _, sums = attention.forward(*given, out=found, return_lse=True, **part.options)
                if first:
                    its.copy_(sums)
                else:
                    merge(mine, its, found, sums)
        if "sink" in call.told:
            merge(out, lse, None, call.told["sink"][:, None])
        return out.to(q.dtype), lse

    def differentiate(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, call: Call, found: Gradients) -> None:
        """Add the gradients of `attend` to what is found."""
        back: list[tuple[Pending, Any, Any]] = []
        alone = _without_sink(call)
        for share, (keys, values) in self._shares(k, v):
            of_keys, of_values = _zeros_like(keys), _zeros_like(values)
            for rows, seen, part in self._parts(alone, share):
                given = dout[:, rows], q[:, rows], keys[:, seen], values[:, seen], out[:, rows], lse[:, :, rows]
                found.add(part, alone, *given, (found.dq[:, rows], of_keys[:, seen], of_values[:, seen]))
            self._add(found, back)
            back.append(self._return(share, of_keys, of_values, k, v))
        while back:
            self._add(found, back)
        if "sink" in found.others:  # a key without a value: once, not once a piece
            weights = (call.told["sink"][:, None] - lse).exp()
            found.others["sink"] -= (weights * (dout.float() * out.float()).sum(-1).transpose(1, 2)).sum((0, 2))

    def _shares(self, k: Any, v: Any) -> Iterator[tuple[int, tuple[Any, Any]]]:
        """(whose it is, its keys and values) of every rank's share, this one's first."""
        rank, world = self.peers.rank, self.peers.world
        k, v = k.contiguous(), v.contiguous()
        now = (k, v)
        for step in range(world):
            owner, coming, pending = (rank - step) % world, now, Pending(())
            if step + 1 < world:
                before, behind = (rank - step - 1) % world, (rank + step + 1) % world
                (rows, _) = Cut(self.keys[before], Span(0, 1)).shape
                coming = (k.new_empty((k.shape[0], rows, *k.shape[2:])), v.new_empty((v.shape[0], rows, *v.shape[2:])))
                pending = self.peers.exchange([(behind, x) for x in (k, v)], [(before, x) for x in coming])
            yield owner, now
            pending.wait()
            now = coming

    def _todo(self, call: Call) -> tuple[list[slice], dict[int, list[tuple[slice, slice, Piece, bool]]]]:
        """(rows to begin with as if they had seen nothing, what `_parts` says of each share, and if a piece is the first of its
        rows, all of a span, so that there is nothing to merge it with); remembered as Gather does."""
        if self.known is not None:
            return self.known
        rank, world, alone = self.peers.rank, self.peers.world, _without_sink(call)
        spans = [slice(at, at + len(span)) for at, span in Cut(self.queries[rank], all_heads(1)).places()]
        begun: dict[int, bool] = {}  # of spans of which a piece was the first: was it of all rows?
        todo: dict[int, list[tuple[slice, slice, Piece, bool]]] = {}
        for share in [(rank - step) % world for step in range(world)]:
            todo[share] = []
            for rows, seen, part in self._parts(alone, share):
                (span,) = [one for one in spans if one.start <= rows.start < one.stop]
                first = span.start not in begun
                begun.setdefault(span.start, rows == span)
                todo[share].append((rows, seen, part, first and rows == span))
        found = [span for span in spans if not begun.get(span.start)], todo
        if call.plain:
            self.known = found
        return found

    def _parts(self, call: Call, share: int) -> Iterator[tuple[slice, slice, Piece]]:
        """(rows of q, rows of the share, Piece) of what these queries see of it."""
        heads = all_heads(1)
        for at, span in Cut(self.queries[self.peers.rank], heads).places():
            for there, keys in Cut(self.keys[share], heads).places():
                part = call.piece(span, keys, at)
                if part is not None:
                    first, key = at + part.rows.start - span.start, there + part.keys.start - keys.start
                    yield slice(first, first + len(part.rows)), slice(key, key + len(part.keys)), part

    def _return(self, share: int, of_keys: Any, of_values: Any, k: Any, v: Any) -> tuple[Pending, Any, Any]:
        """The gradients of a share on their way home, and those of this rank's that another one has found."""
        rank, world = self.peers.rank, self.peers.world
        if share == rank:
            return Pending(()), of_keys, of_values
        finder = (2 * rank - share) % world  # who has worked on this rank's share in this step
        mine = _zeros_like(k), _zeros_like(v)
        pending = self.peers.exchange([(share, x) for x in (of_keys, of_values)], [(finder, x) for x in mine])
        return pending, *mine

    @staticmethod
    def _add(found: Gradients, back: list[tuple[Pending, Any, Any]]) -> None:
        """What has come home to what is found."""
        if back:
            pending, dk, dv = back.pop(0)
            pending.wait()
            found.dk += dk
            found.dv += dv


def merge(out: Any, lse: Any, other: Any, its: Any) -> None:
    """Add to what queries have seen, out (batch, rows, heads, columns) and lse (batch, heads, rows) in float32, what they see
    of other keys: `other`, None for nothing, and its sums."""
    both = torch.logaddexp(lse, its.expand(lse.shape))
    top = torch.where(both == -torch.inf, 0, both)
    weights = [(x - top).exp().transpose(1, 2)[..., None] for x in (lse, its.expand(lse.shape))]
    out *= weights[0]
    if other is not None:
        out.addcmul_(other, weights[1])
    lse.copy_(both)


def _without_sink(call: Call) -> Call:
    return call._replace(told={name: x for name, x in call.told.items() if name != "sink"})


def _zeros_like(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
