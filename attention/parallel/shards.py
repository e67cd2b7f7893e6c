"""shard, unshard, reorder: conversions between whole arrays and each rank's shard of them."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from .agreement import agree_on_plan
from .orders import Order, Span, find_order
from .peers import Peers, check_torch_tensors, disable_compile, one_dimensional_peers, peers_of
from .redistribution import ShardRegion, plan_redistribution, redistribute, reduce_scatter
from .whole_checks import parse_length

ShardRegions = tuple[ShardRegion, ...]


@disable_compile
def shard(x: Any, group: Any = None, dim: int = 1, order: str | Order = "zigzag") -> Any:
    """This rank's shard, along `dim`, of a tensor that every rank has as a whole: a contiguous copy.

    order: "zigzag", two parts at mirrored positions, or "contiguous". Any length is possible; shards may differ by a block of
    128, or be empty. group: a process group, a DeviceMesh (with two dimensions the ranks of both, row by row), or None for all
    processes. Nothing is sent. Shard positions like anything else: shard(torch.arange(length), dim=0)."""
    rank, world = rank_and_count(group)
    spans = find_order(order).spans(x.shape[dim], world)[rank]
    parts = [x.narrow(dim, span.start, len(span)) for span in spans]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


@disable_compile
def unshard(x: Any, group: Any = None, dim: int = 1, order: str | Order = "zigzag", length: int | None = None) -> Any:
    """The whole tensor on every rank, from the shards that `shard` made. length: that of the whole, if shards differ in length;
    by default the length of a shard times the number of ranks. Differentiable: the gradient of a shard is the sum over all
    ranks."""
    return _redistribute(x, one_dimensional_peers(group), dim, order, None, length)


@disable_compile
def reorder(
    x: Any,
    group: Any = None,
    dim: int = 1,
    order: str | Order = "zigzag",
    to: str | Order = "contiguous",
    length: int | None = None,
) -> Any:
    """Each rank's shard in another order, by one all-to-all: for a model that has both attention and a recurrence.
    Differentiable."""
    return _redistribute(x, one_dimensional_peers(group), dim, order, to, length)


def _redistribute(x: Any, peers: Peers, dim: int, order: str | Order, to: str | Order | None, length: int | None) -> Any:
    """A shard in another order, or with to=None the whole tensor. ValueError on every rank, before anything is sent."""

    def plan() -> tuple[str, tuple[int, ShardRegions, ShardRegions]]:
        check_torch_tensors(x=x)
        if not isinstance(dim, Integral) or not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim: must be an axis of x: {dim=}, x.shape={tuple(x.shape)}")
        axis = range(x.ndim)[dim]
        before = find_regions(x.shape[axis], peers, order, parse_length("length", length))
        total, others = sum([region.shape[0] for region in before]), (*x.shape[:axis], *x.shape[axis:][1:])
        spans = ((Span(0, total),),) * peers.world if to is None else find_order(to).spans(total, peers.world)
        shard_text = f"None of shards of {x.shape[axis]}: give length where these differ"
        description = (
            f"dim={axis}; other axes={others} of {x.dtype}; {order=}; {to=}; length={shard_text if length is None else total}"
        )
        return description, (axis, before, tuple([ShardRegion(one, Span(0, 1)) for one in spans]))

    try:
        key = "redistribute", x.shape, x.dtype, x.device, dim, order, to, length
        hash(key)
    except Exception:  # plan() raises what is wrong, on all ranks
        key = None
    axis, before, after = agree_on_plan((peers,), key, plan, getattr(x, "device", None))
    return _RedistributeFunction.apply(x, peers, axis, before, after)


class _RedistributeFunction(torch.autograd.Function):
    """`redistribute` of a tensor along a dimension. Its backward pass is _ReduceScatterFunction, and the other way round."""

    @staticmethod
    def forward(ctx, x, peers, dim, before, after):
        ctx.saved = peers, dim, before, after
        (shard_rows,) = redistribute(peers, (_rows(x, dim), plan_redistribution(peers.rank, before, after))).wait()
        return _unpack_rows(shard_rows, dim)

    @staticmethod
    def backward(ctx, dx):
        peers, dim, before, after = ctx.saved
        return _ReduceScatterFunction.apply(dx, peers, dim, after, before), None, None, None, None


class _ReduceScatterFunction(torch.autograd.Function):
    """`reduce_scatter` of a tensor along a dimension."""

    @staticmethod
    def forward(ctx, x, peers, dim, before, after):
        ctx.saved = peers, dim, before, after
        (sums,) = reduce_scatter(peers, (_rows(x, dim), plan_redistribution(peers.rank, before, after)))
        return _unpack_rows(sums, dim)

    @staticmethod
    def backward(ctx, dx):
        peers, dim, before, after = ctx.saved
        return _RedistributeFunction.apply(dx, peers, dim, after, before), None, None, None, None


def _rows(x, dim):
    """x as (1, rows, 1, ..), with the rows of dimension dim."""
    return x.movedim(dim, 0)[None, :, None]


def _unpack_rows(x, dim):
    """The tensor of which `x` is `_rows(.., dim)`."""
    return x[0, :, 0].movedim(0, dim).contiguous()


def find_regions(rows: int, peers: Peers, order: str | Order, length: int | None) -> ShardRegions:
    """Every rank's region, if this rank has so many rows. ValueError: it cannot have them."""
    total = rows * peers.world if length is None else length
    spans_of_ranks = find_order(order).spans(total, peers.world)
    local = ShardRegion(spans_of_ranks[peers.rank], Span(0, 1))
    if local.shape[0] != rows:
        reason = "by default shards are equal" if length is None else f"{length=}"
        expected = f"rank {peers.rank} of {peers.world} would have {local.shape[0]} of {total} tokens, and has {rows}"
        raise ValueError(f"length: {expected}: {reason}")
    return tuple([ShardRegion(spans, Span(0, 1)) for spans in spans_of_ranks])


def rank_and_count(group: Any) -> tuple[int, int]:
    """(rank, how many ranks there are), with the ranks of two dimensions counted row by row."""
    rank, world = 0, 1
    for peers in peers_of(group):
        rank, world = rank * peers.world + peers.rank, world * peers.world
    return rank, world
