"""shard, unshard, reorder: arrays whole, and each rank's share of them."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from .agreement import agreed
from .moves import Cut, gathered_sums, move, way
from .orders import Order, Span, order_of
from .peers import Peers, of_torch, one_of, peers_of, uncompiled
from .whole import number_of_tokens

Cuts = tuple[Cut, ...]


@uncompiled
def shard(x: Any, group: Any = None, dim: int = 1, order: str | Order = "zigzag") -> Any:
    """This rank's share of a tensor that every rank has as a whole, along `dim`: a copy, contiguous.

    order: "zigzag", two parts at mirrored places, or "contiguous". Any length; shares may differ by a block of 128, or be
    empty. group: a process group, a DeviceMesh (of two dimensions the ranks of both, row by row), or None for all processes.
    Nothing travels. Shard positions like anything else: shard(torch.arange(length), dim=0)."""
    rank, world = place_of(group)
    spans = order_of(order).spans(x.shape[dim], world)[rank]
    parts = [x.narrow(dim, span.start, len(span)) for span in spans]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


@uncompiled
def unshard(x: Any, group: Any = None, dim: int = 1, order: str | Order = "zigzag", length: int | None = None) -> Any:
    """The whole tensor on every rank, from the shares that `shard` gave. length: that of the whole, if shares differ; by
    default the length of a share times the number of ranks. Differentiable: the gradient of a share is the sum over all
    ranks."""
    return _moved(x, one_of(group), dim, order, None, length)


@uncompiled
def reorder(
    x: Any,
    group: Any = None,
    dim: int = 1,
    order: str | Order = "zigzag",
    to: str | Order = "contiguous",
    length: int | None = None,
) -> Any:
    """Each rank's share in another order, by one all-to-all: for a model that has both attention and a recurrence.
    Differentiable."""
    return _moved(x, one_of(group), dim, order, to, length)


def _moved(x: Any, peers: Peers, dim: int, order: str | Order, to: str | Order | None, length: int | None) -> Any:
    """A share in another order, or the whole of it for None. ValueError on every rank, before anything travels."""

    def plan() -> tuple[str, tuple[int, Cuts, Cuts]]:
        of_torch(x=x)
        if not isinstance(dim, Integral) or not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim: must be an axis of x: {dim=}, x.shape={tuple(x.shape)}")
        axis = range(x.ndim)[dim]
        before = cuts(x.shape[axis], peers, order, number_of_tokens("length", length))
        total, others = sum([cut.shape[0] for cut in before]), (*x.shape[:axis], *x.shape[axis:][1:])
        spans = ((Span(0, total),),) * peers.world if to is None else order_of(to).spans(total, peers.world)
        of_shares = f"None of shares of {x.shape[axis]}: give length where these differ"
        said = f"dim={axis}; other axes={others} of {x.dtype}; {order=}; {to=}; length={of_shares if length is None else total}"
        return said, (axis, before, tuple([Cut(one, Span(0, 1)) for one in spans]))

    try:
        form = "moved", x.shape, x.dtype, x.device, dim, order, to, length
        hash(form)
    except Exception:  # what is wrong the plan says, so that all ranks hear of it
        form = None
    axis, before, after = agreed((peers,), form, plan, getattr(x, "device", None))
    return _Moved.apply(x, peers, axis, before, after)


class _Moved(torch.autograd.Function):
    """`move` of a tensor along a dimension. Like _Summed, its transpose, it is the derivative of the other."""

    @staticmethod
    def forward(ctx, x, peers, dim, before, after):
        ctx.told = peers, dim, before, after
        (found,) = move(peers, (_rows(x, dim), way(peers.rank, before, after))).wait()
        return _along(found, dim)

    @staticmethod
    def backward(ctx, dx):
        peers, dim, before, after = ctx.told
        return _Summed.apply(dx, peers, dim, after, before), None, None, None, None


class _Summed(torch.autograd.Function):
    """`gathered_sums` of a tensor along a dimension."""

    @staticmethod
    def forward(ctx, x, peers, dim, before, after):
        ctx.told = peers, dim, before, after
        (found,) = gathered_sums(peers, (_rows(x, dim), way(peers.rank, before, after)))
        return _along(found, dim)

    @staticmethod
    def backward(ctx, dx):
        peers, dim, before, after = ctx.told
        return _Moved.apply(dx, peers, dim, after, before), None, None, None, None


def _rows(x, dim):
    """(1, rows, 1, ..) of a tensor's dimension."""
    return x.movedim(dim, 0)[None, :, None]


def _along(x, dim):
    """Its inverse."""
    return x[0, :, 0].movedim(0, dim).contiguous()


def cuts(rows: int, peers: Peers, order: str | Order, length: int | None) -> Cuts:
    """What every rank has, this one having so many rows. ValueError."""
    total = rows * peers.world if length is None else length
    found = order_of(order).spans(total, peers.world)
    mine = Cut(found[peers.rank], Span(0, 1))
    if mine.shape[0] != rows:
        said = "length is what shares of one length make" if length is None else f"{length=}"
        raise ValueError(
            f"length: rank {peers.rank} of {peers.world} would have {mine.shape[0]} of {total} tokens, and has {rows}: {said}"
        )
    return tuple([Cut(spans, Span(0, 1)) for spans in found])


def place_of(group: Any) -> tuple[int, int]:
    """(rank, how many there are), those of two dimensions row by row."""
    rank, world = 0, 1
    for peers in peers_of(group):
        rank, world = rank * peers.world + peers.rank, world * peers.world
    return rank, world
