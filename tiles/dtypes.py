"""Element types. A dtype is a value (`rt(16, 64, bf16)`) and, called in a kernel, the conversion to it: `p = bf16(p)`."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .op import OPS


@dataclass(frozen=True)
class dtype:
    """An element type: its NumPy dtype and its names in PTX and in the TMA driver API."""

    name: str
    np: np.dtype
    ptx: str
    tma: str

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.np.itemsize

    def __call__(self, x):
        """x rounded to the nearest value of this dtype, ties to even; x is a register tile or vector. An fp32 accumulator
        becomes the A operand of the next mma inside each lane, with no shuffle. (Lowering: ops/convert.py.)"""
        return OPS[self](x)

    def __hash__(self):
        return hash(self.name)

    def __str__(self):
        return self.name

    __repr__ = __str__


fp32 = dtype("fp32", np.dtype(np.float32), "f32", "FLOAT32")
fp16 = dtype("fp16", np.dtype(np.float16), "f16", "FLOAT16")
bf16 = dtype("bf16", np.dtype(ml_dtypes.bfloat16), "bf16", "BFLOAT16")
fp8e4m3 = dtype("fp8e4m3", np.dtype(ml_dtypes.float8_e4m3fn), "e4m3", "UINT8")
fp8e5m2 = dtype("fp8e5m2", np.dtype(ml_dtypes.float8_e5m2), "e5m2", "UINT8")

DTYPES = {d.np: d for d in (fp32, fp16, bf16, fp8e4m3, fp8e5m2)}


def dtype_of(array) -> dtype:
    """The tile dtype of an array's elements."""
    try:
        return DTYPES[np.dtype(array.dtype)]
    except KeyError:
        raise TypeError(f"no tile dtype for {array.dtype}; there are {', '.join(map(str, DTYPES.values()))}") from None
