"""Results against a reference in float64: by the error rule, and by units in the last place. NaN never passes unasked."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ..dtypes import bf16, dtype, dtype_of, fp8e4m3, fp8e5m2, fp16, fp32, int8
from ..launching.arrays import numpy_view
from ..launching.frameworks import describe, without_grad

EPS = {
    fp32: 2.0**-23,
    fp16: 2.0**-10,
    bf16: 2.0**-7,
    fp8e4m3: 2.0**-3,
    fp8e5m2: 2.0**-2,
    int8: 2.0**-7,
}  # from 1 to the next number
END = {fp32: 2.0**128 * (1 - 2.0**-25), fp16: 65520.0, bf16: 2.0**128 * (1 - 2.0**-9)}  # from here on: inf
TINY = {fp32: 2.0**-126, fp16: 2.0**-24, bf16: 2.0**-126}  # an error below this is none (fp32 units flush to 0)
LEAST = {fp8e4m3: 2.0**-9, fp8e5m2: 2.0**-16, int8: 1.0}  # of one byte the units of the smallest numbers


def host(x: Any) -> np.ndarray:
    """An array in host memory, of any framework that `describe` knows, as NumPy's."""
    if isinstance(x, np.ndarray):
        return x
    array = describe(without_grad(x), "array")
    return numpy_view(array.pointer, array.form, array)


def tolerance(ref: Any, low: Any, dtype: Any, *, factor: float = 2) -> float:
    """factor * max|low - ref| + u * max|ref|, u being the unit roundoff of dtype: half the gap after 1.

    FlashAttention's rule (factor 2; 3 for gradients) with one rounding of the greatest element as its floor. Elements
    where ref is infinite do not count. Raises ValueError if ref or low has a NaN, or low is infinite where ref is not.
    """
    ref, low = (host(x).astype(np.float64) for x in (ref, low))
    if np.isnan(ref).any() or np.isnan(low).any():
        raise ValueError(f"NaN in {np.isnan(ref).sum()} elements of ref and {np.isnan(low).sum()} of low")
    finite = np.isfinite(ref)
    if np.isinf(low[finite]).any():
        raise ValueError(
            f"low is infinite in {np.isinf(low[finite]).sum()} elements where ref is finite: everything would pass"
        )
    roundoff = float(ml_dtypes.finfo(dtype).eps) / 2
    error = np.abs(low[finite] - ref[finite]).max(initial=0)
    return float(factor * error + roundoff * np.abs(ref[finite]).max(initial=0))


def assert_close(out: Any, ref: Any, low: Any, *, factor: float = 2, name: str = "out") -> None:
    """Assert |out - ref| <= tolerance(ref, low, out's dtype) everywhere, and equal infinities; NaN never passes.

    The AssertionError prints the worst element, its index and the limit. Shapes must be equal.
    """
    out, ref = host(out), host(ref)
    limit = tolerance(ref, low, out.dtype, factor=factor)
    assert out.shape == ref.shape, f"{name}: {out.shape=} is not {ref.shape=}"
    wide = out.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(wide == ref, 0, np.abs(wide - ref))
    bad = ~(error <= limit)
    if bad.any():
        worst = np.unravel_index(np.where(np.isnan(error), np.inf, error).argmax(), error.shape)
        raise AssertionError(
            f"{name}: {bad.sum()} of {bad.size} elements are off, {np.isnan(wide).sum()} of them NaN; the worst: "
            f"{name}{list(map(int, worst))} = {wide[worst]}, not {ref[worst]}; error {error[worst]:.2g} > {limit:.2g}"
        )


def wide(array: Any) -> np.ndarray:
    """The array in float64: what a reference is computed from."""
    return np.asarray(array).astype(np.float64)


def close(got: Any, want: Any, ulp: Any = 0.0, atol: Any = 0.0, dtype: dtype | None = None) -> None:
    """Assert |got - want| <= ulp units in the last place of got's dtype (or `dtype`) + atol, each a number or an array of them;
    inf and NaN where `want`, in float64, has them or is too large (of fp8 and int8: the end of the range). With
    neither ulp nor atol they must be equal.

    The AssertionError counts the elements that are off and prints the first."""
    dtype = dtype or dtype_of(got)
    got, want = wide(got), np.broadcast_to(wide(want), np.shape(got))
    if dtype.itemsize == 1:
        want = np.clip(want, *dtype.ends)
    else:
        want = np.where(np.abs(want) >= END[dtype], np.copysign(np.inf, want), want)
    finite = np.isfinite(want)
    same = np.where(np.isnan(want), np.isnan(got), got == want)
    assert same[~finite].all(), _worst(got, want, ~finite & ~same)
    unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 2.0**-149), where=finite, out=np.zeros(want.shape)))) * EPS[dtype]
    least, none = (LEAST[dtype], 0.0) if dtype in LEAST else (TINY[dtype] * EPS[dtype], TINY[dtype])
    allowed = ulp * np.maximum(unit, least) + atol + (none if np.any(ulp) else 0)
    wrong = finite & ~(np.abs(got - np.where(finite, want, 0)) <= allowed)
    assert not wrong.any(), _worst(got, want, wrong)


def _worst(got, want, wrong):
    if not wrong.any():
        return ""
    first = tuple(map(int, np.argwhere(wrong)[0]))
    return f"{wrong.sum()} of {got.size} elements are off, the first: {list(first)} is {got[first]!r}, not {want[first]!r}"
