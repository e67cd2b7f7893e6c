"""The rule by which a result is judged against the formula."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tiles.arrays import numpy_view
from tiles.frameworks import describe


def host(x: Any) -> np.ndarray:
    """An array in host memory, of any framework that `describe` knows, as NumPy's."""
    if isinstance(x, np.ndarray):
        return x
    array = describe(x, "array")
    return numpy_view(array.pointer, array.form, array)


def tolerance(ref: Any, low: Any, dtype: Any, *, factor: float = 2) -> float:
    """factor * max|low - ref| + u * max|ref|, u being the unit roundoff of dtype: half the gap after 1.

    FlashAttention's rule (factor 2; 3 for gradients) with one rounding of the greatest element as its floor. Elements
    where ref is infinite do not count. Raises ValueError if ref or low has a NaN.
    """
    ref, low = (host(x).astype(np.float64) for x in (ref, low))
    if np.isnan(ref).any() or np.isnan(low).any():
        raise ValueError(f"NaN in {np.isnan(ref).sum()} elements of ref and {np.isnan(low).sum()} of low")
    finite = np.isfinite(ref)
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
