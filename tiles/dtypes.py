"""Element types. A dtype is a value (`rt(16, 64, bf16)`) and, called in a kernel, the conversion to it: `p = bf16(p)`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from numpy import ndarray

from .op import OPS


@dataclass(frozen=True)
class dtype:
    """An element type: its NumPy dtype, its names in PTX and in the TMA driver API, and how numbers are rounded to it if not in
    NumPy's way."""

    name: str
    np: np.dtype
    ptx: str
    tma: str
    rounding: Callable[[ndarray], ndarray] | None = field(default=None, compare=False)

    @functools.cached_property
    def itemsize(self) -> int:
        """The number of bytes of an element."""
        return self.np.itemsize

    @functools.cached_property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest finite number."""
        info = np.iinfo(self.np) if self.np.kind == "i" else ml_dtypes.finfo(self.np)
        return float(info.min), float(info.max)

    @property
    def run(self) -> int:
        """How many neighbouring elements a lane of a register tile holds: those of one register, or two of 4 bytes."""
        return max(4 // self.itemsize, 2)

    def round(self, array) -> ndarray:
        """An array's elements rounded to the nearest value of this dtype, ties to even. Numbers beyond the range of fp8 or
        int8, inf too, become the end of it. A NaN becomes 0 in int8. tf32 ties go away from zero."""
        return np.asarray(array, self.np) if self.rounding is None else self.rounding(np.asarray(array))

    def copied(self, array) -> ndarray:
        """An array's elements as TMA brings them into shared memory: as they are; but tf32 rounded, and ties to even."""
        return _to_tf32(array, to_even=True) if self.ptx == "tf32" else array

    def __call__(self, x):
        """x rounded to this dtype (see `round`); x is a register tile or vector. An fp32 accumulator becomes the A operand of
        the next mma inside each lane, with no shuffle, unless that has one byte an element. (Lowering:
        ops/elementwise/convert.py.)"""
        return OPS[self](x)

    def __hash__(self):
        return hash(self.name)

    def __reduce__(self):
        return self.name  # the name of a global of this module, so that copies and pickles give the dtype itself

    def __str__(self):
        return self.name

    __repr__ = __str__


def _to_tf32(array, to_even=False):
    """Ten bits of mantissa; half a unit goes away from zero (cvt.rna.tf32.f32) or to even (TMA, as seen on an H200)."""
    numbers = np.asarray(array, np.float32)
    bits = numbers.view(np.uint32)
    half = np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1)) if to_even else np.uint32(0x1000)
    return np.where(np.isnan(numbers), numbers, (bits + half & np.uint32(0xFFFFE000)).view(np.float32))


def _saturating(to):
    """Round to fp8 as cvt.rn.satfinite does: what is out of range becomes the largest finite number."""
    greatest = np.float32(ml_dtypes.finfo(to).max)

    def rounded(array):
        if array.dtype == to:
            return array
        with np.errstate(invalid="ignore"):
            return np.clip(array.astype(np.float32), -greatest, greatest).astype(to)

    return rounded


def _to_int8(array):
    """Round to the nearest integer, ties to even, -128 at the least and 127 at the most; NaN becomes 0 (cvt.rni.s32.f32 and
    cvt.pack.sat)."""
    if array.dtype == np.int8:
        return array
    return np.clip(np.nan_to_num(np.rint(array.astype(np.float32))), -128, 127).astype(np.int8)


def _to_int32(array):
    """Round to the nearest integer, ties to even, as near as 32 bits come; NaN becomes 0 (cvt.rni.s32.f32)."""
    if array.dtype.kind == "i":
        return array.astype(np.int32)
    return np.clip(np.nan_to_num(np.rint(array.astype(np.float64))), -(2.0**31), 2.0**31 - 1).astype(np.int32)


E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
fp32 = dtype("fp32", np.dtype(np.float32), "f32", "FLOAT32")
tf32 = dtype("tf32", np.dtype(np.float32), "tf32", "TFLOAT32", _to_tf32)  # an fp32 number that the tensor cores take as it is
fp16 = dtype("fp16", np.dtype(np.float16), "f16", "FLOAT16")
bf16 = dtype("bf16", np.dtype(ml_dtypes.bfloat16), "bf16", "BFLOAT16")
fp8e4m3 = dtype("fp8e4m3", E4M3, "e4m3", "UINT8", _saturating(E4M3))
fp8e5m2 = dtype("fp8e5m2", E5M2, "e5m2", "UINT8", _saturating(E5M2))
int8 = dtype("int8", np.dtype(np.int8), "s8", "UINT8", _to_int8)
int32 = dtype("int32", np.dtype(np.int32), "s32", "INT32", _to_int32)

OPERANDS = tf32, fp8e4m3, fp8e5m2, int8  # of products: such tiles are loaded, stored, converted and multiplied, and that is all
SUMS = (int32,)  # of products of int8: such tiles are made, added to by products and converted, and that is all
DTYPES = {d.np: d for d in (fp32, fp16, bf16, fp8e4m3, fp8e5m2, int8)}  # of arrays


def dtype_of(array) -> dtype:
    """The tile dtype of an array's elements."""
    try:
        return DTYPES[np.dtype(array.dtype)]
    except KeyError:
        raise TypeError(f"no tile dtype for {array.dtype}; there are {', '.join(map(str, DTYPES.values()))}") from None
