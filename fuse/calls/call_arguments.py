"""Checks of a call's arguments, casts, and copies of results into the arrays of `out`."""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiles.launching.checks import Check, ValueRule
from tiles.launching.frameworks import describe

from ..planning.grouped_heads import LeadingAxes


def as_tuple(results: Any) -> Any:
    """The results of a definition as a tuple or one array; a dictionary gives its values."""
    return tuple(results.values()) if isinstance(results, dict) else results


def flatten_out(out: Any, leading: LeadingAxes) -> Any:
    """An array of `out` with its leading axes as kernels see them. ValueError: they are not those of the result; or they are
    joined into one, and their strides allow no view: reshape would copy the array, and the result would go to the copy."""
    if tuple(out.shape[:-1]) != leading.extents:
        raise ValueError(f"out: must have the result's leading axes, {leading.extents}: out.shape={tuple(out.shape)}")
    if len(leading.passed) > len(leading.extents):
        return out.reshape(*leading.passed, out.shape[-1])
    strides = out.stride() if hasattr(out, "stride") else describe(out, "out").form.strides
    axes = [one for one in zip(leading.extents, strides) if one[0] != 1]
    if any([far != n * step for (_, far), (n, step) in itertools.pairwise(axes)]):
        raise ValueError(f"out: leading axes are rows and must be contiguous: {out.shape=}, strides {tuple(strides)}")
    return out.reshape(-1, out.shape[-1])


def check_outs(outs: Sequence[Any], shapes: Sequence[Sequence[int]]) -> None:
    """ValueError: an array of `outs` has not the shape of its result."""
    for target, shape in zip(outs, shapes):
        if target is not None and tuple(target.shape) != tuple(shape):
            raise ValueError(f"out: must have the result's shape: out.shape={tuple(target.shape)}, {tuple(shape)}")


def copy_to_outs(outs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The results, each copied into its array of `outs` where there is one. ValueError: that array has another shape."""
    check_outs(outs, [x.shape for x in results])
    for target, x in zip(outs, results):
        if target is not None:
            target[...] = x
    return [x if target is None else target for target, x in zip(outs, results)]


def index_value_check(name: str, count: int) -> ValueRule:
    """The check of the values of an index into `count` things (tiles/launching/checks.py)."""

    def wrong(values: np.ndarray, extents: Any) -> Any:
        too_large = np.argwhere(values >= count)
        return (too_large[0], f"must be below {count}") if len(too_large) else None

    return ValueRule(wrong, "pass a negative one to choose nothing")


def refuse_index(name: str, index: np.ndarray, count: int) -> None:
    """ValueError, which names the index, if one of its values is `count` or more."""
    Check([(name, 0, describe(index, name).form, index_value_check(name, count))], {}).run(0, [index.ctypes.data])


def dtype_of(x: Any) -> str:
    """The name of an array's dtype; "" for a number."""
    return str(getattr(x, "dtype", "")).removeprefix("torch.")


def cast(x: Any, dtype: str) -> Any:
    """The array in another dtype, for arrays of NumPy, JAX and torch."""
    return x.to(getattr(sys.modules["torch"], dtype)) if hasattr(x, "to") else x.astype(np.dtype(dtype))
