"""What calls of fused functions ask of the arrays that are given, and how results get to where they are to go."""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiles.checks import Check, Values
from tiles.frameworks import describe


def in_order(results: Any) -> Any:
    """What a definition returns; of a dictionary its values."""
    return tuple(results.values()) if isinstance(results, dict) else results


def as_rows(out: Any, lead: tuple[int, ...]) -> Any:
    """An array for a result, whose leading axes are one. ValueError: it has others, or they do not lie as one, so that reshape
    would copy it and the result go astray."""
    if tuple(out.shape[:-1]) != lead:
        raise ValueError(f"out: must have the result's leading axes, {lead}: out.shape={tuple(out.shape)}")
    strides = out.stride() if hasattr(out, "stride") else describe(out, "out").form.strides
    axes = [one for one in zip(lead, strides) if one[0] != 1]
    if any([far != n * step for (_, far), (n, step) in itertools.pairwise(axes)]):
        raise ValueError(f"out: leading axes must lie as one, for they are rows: {out.shape=}, strides {tuple(strides)}")
    return out.reshape(-1, out.shape[-1])


def written(outs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The results, where they were to go. ValueError: one has another shape."""
    for target, x in zip(outs, results):
        if target is not None:
            if tuple(target.shape) != tuple(x.shape):
                raise ValueError(f"out: must have the result's shape: out.shape={tuple(target.shape)}, {tuple(x.shape)}")
            target[...] = x
    return [x if target is None else target for target, x in zip(outs, results)]


def index_values(name: str, among: int) -> Values:
    """What an index into so many must be."""

    def wrong(values: np.ndarray, extents: Any) -> Any:
        beyond = np.argwhere(values >= among)
        return (beyond[0], f"must be below {among}") if len(beyond) else None

    return Values(wrong, "pass a negative one to choose nothing")


def refuse_index(name: str, index: np.ndarray, among: int) -> None:
    """ValueError that names an index which chooses what is not there."""
    Check([(name, 0, describe(index, name).form, index_values(name, among))], {}).run(0, [index.ctypes.data])


def dtype_of(x: Any) -> str:
    """The name of an array's dtype, "" of a number."""
    return str(getattr(x, "dtype", "")).removeprefix("torch.")


def cast(x: Any, dtype: str) -> Any:
    """An array of another dtype."""
    return x.to(getattr(sys.modules["torch"], dtype)) if hasattr(x, "to") else x.astype(np.dtype(dtype))
