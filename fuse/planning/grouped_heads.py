"""Query heads that share key heads (grouped-query attention, GQA) in calls whose definition enables it. They become two axes,

    q (B, H, S, D), k (B, Hk, T, D)    ->    q (B, Hk, H / Hk, S, D), k (B, Hk, 1, T, D)

for which attention broadcasts, as views. Query head h reads key head h // (H / Hk)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class LeadingAxes(NamedTuple):
    """The leading axes of results that kernels see otherwise. extents: those of the call's results. passed: those that kernels
    see; (-1,): all are joined to rows."""

    extents: tuple[int, ...]
    passed: tuple[int, ...] = (-1,)


class GroupedArguments(NamedTuple):
    """The arguments of a call, with heads in two axes, and what that means for its results."""

    arrays: list[Any]
    leading: LeadingAxes


def group_heads(arrays: Sequence[Any]) -> GroupedArguments | None:
    """The arguments with heads in two axes, if those with the most axes, (H, rows, columns) or (B, H, rows, columns), have two
    numbers of heads, one a multiple of the other; else None."""
    shapes = [tuple(getattr(x, "shape", ())) for x in arrays]
    axes = max(map(len, shapes))
    counts = {shape[-3] for shape in shapes if len(shape) == axes} if axes in (3, 4) else set()
    few, many = min(counts, default=1), max(counts, default=1)
    if len(counts) != 2 or few == 1 or many % few:
        return None
    grouped = list(arrays)
    for n, (x, shape) in enumerate(zip(arrays, shapes)):
        if len(shape) == axes:
            *batch, heads, rows, columns = shape
            grouped[n] = x.reshape(*batch, few, heads // few, rows, columns)
    *batch, _, rows, _ = next(shape for shape in shapes if len(shape) == axes and shape[-3] == many)
    return GroupedArguments(grouped, LeadingAxes((*batch, many, rows), (*batch, few, many // few, rows)))
