"""shard, unshard, reorder: arrays whole, and each rank's share of them."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from .agreement import agree_on_plan
from .moves import ShardRegion, plan_redistribution, redistribute, reduce_scatter
from .orders import Order, Span, find_order
from .peers import Peers, check_torch_tensors, disable_compile, one_dimensional_peers, peers_of
from .whole import parse_length

ShardRegions = tuple[ShardRegion, ...]


@disable_compile
def shard(x: Any, group: Any = None, dim: int = 1, order: str | Order = "zigzag") -> Any:
    """This rank's share of a tensor that every rank has as a whole, along `dim`: a copy, contiguous.

    order: "zigzag", two parts at mirrored places, or "contiguous". Any length; shares may differ by a block of 128, or be
    empty. group: a process group, a DeviceMesh (of two dimensions the ranks of both, row by row), or None for all processes.
    Nothing travels. Shard positions like anything else: shard(torch.arange(length), dim=0)."""
    rank, world = place_of(group)
    spans = find_order(order).spans(x.shape[dim], world)[rank]
    parts = [x.narrow(dim, span.start, len(span)) for span in spans]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


@disable_compile
def unshard(x: Any, group: Any = None, dim: int = 1, order: str | Order = "zigzag", length: int | None = None) -> Any:
    """The whole tensor on every rank, from the shares that `shard` gave. length: that of the whole, if shares differ; by
    default the length of a share times the number of ranks. Differentiable: the gradient of a share is the sum over all
    ranks."""
    return _moved(x, one_dimensional_peers(group), dim, order, None, length)


@disable_compile
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
    return _moved(x, one_dimensional_peers(group), dim, order, to, length)


def _moved(x: Any, peers: Peers, dim: int, order: str | Order, to: str | Order | None, length: int | None) -> Any:
    """A share in another order, or the whole of it for None. ValueError on every rank, before anything travels."""

    def plan() -> tuple[str, tuple[int, ShardRegions, ShardRegions]]:
        check_torch_tensors(x=x)
        if not isinstance(dim, Integral) or not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim: must be an axis of x: {dim=}, x.shape={tuple(x.shape)}")
        axis = range(x.ndim)[dim]
        before = cuts(x.shape[axis], peers, order, parse_length("length", length))
        total, others = sum([cut.shape[0] for cut in before]), (*x.shape[:axis], *x.shape[axis:][1:])
        spans = ((Span(0, total),),) * peers.world if to is None else find_order(to).spans(total, peers.world)
        of_shares = f"None of shares of {x.shape[axis]}: give length where these differ"
        said = f"dim={axis}; other axes={others} of {x.dtype}; {order=}; {to=}; length={of_shares if length is None else total}"
        return said, (axis, before, tuple([ShardRegion(one, Span(0, 1)) for one in spans]))

    try:
        form = "moved", x.shape, x.dtype, x.device, dim, order, to, length
        hash(form)
    except Exception:  # what is wrong the plan says, so that all ranks hear of it
        form = None
    axis, before, after = agree_on_plan((peers,), form, plan, getattr(x, "device", None))
    return _Redistribute.apply(x, peers, axis, before, after)


class _Redistribute(torch.autograd.Function):
    """`move` of a tensor along a dimension. Like _Summed, its transpose, it is the derivative of the other."""

    @staticmethod
    def forward(ctx, x, peers, dim, before, after):
        ctx.saved = peers, dim, before, after
        (found,) = redistribute(peers, (_rows(x, dim), plan_redistribution(peers.rank, before, after))).wait()
        return _along(found, dim)

    @staticmethod
    def backward(ctx, dx):
        peers, dim, before, after = ctx.saved
        return _ReduceScatter.apply(dx, peers, dim, after, before), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    """`gathered_sums` of a tensor along a dimension."""

    @staticmethod
    def forward(ctx, x, peers, dim, before, after):
        ctx.saved = peers, dim, before, after
        (found,) = reduce_scatter(peers, (_rows(x, dim), plan_redistribution(peers.rank, before, after)))
        return _along(found, dim)

    @staticmethod
    def backward(ctx, dx):
        peers, dim, before, after = ctx.saved
        return _Redistribute.apply(dx, peers, dim, after, before), None, None, None, None


def _rows(x, dim):
    """(1, rows, 1, ..) of a tensor's dimension."""
    return x.movedim(dim, 0)[None, :, None]


def _along(x, dim):
    """Its inverse."""
    return x[0, :, 0].movedim(0, dim).contiguous()


def cuts(rows: int, peers: Peers, order: str | Order, length: int | None) -> ShardRegions:
    """What every rank has, this one having so many rows. ValueError."""
    total = rows * peers.world if length is None else length
    found = find_order(order).spans(total, peers.world)
    mine = ShardRegion(found[peers.rank], Span(0, 1))
    if mine.shape[0] != rows:
        said = "length is what shares of one length make" if length is None else f"{length=}"
        raise ValueError(
            f"length: rank {peers.rank} of {peers.world} would have {mine.shape[0]} of {total} tokens, and has {rows}: {said}"
        )
    return tuple([ShardRegion(spans, Span(0, 1)) for spans in found])


def place_of(group: Any) -> tuple[int, int]:
    """(rank, how many there are), those of two dimensions row by row."""
    rank, world = 0, 1
    for peers in peers_of(group):
        rank, world = rank * peers.world + peers.rank, world * peers.world
    return rank, world
