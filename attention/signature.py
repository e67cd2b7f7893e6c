"""The Numba types of a kernel's arguments, for `inspect`, which compiles kernels without arrays."""

from numba.cuda import types

from tiles import dtype, fp32, gl
from tiles.plumbing import Value
from tiles.values import NUMBA_SCALARS

INT, FLOAT = types.int32, types.float32
ENDS = types.Array(types.int32, 1, "A")  # cu_seqlens


def array(rank: int, of: dtype = fp32) -> types.Array:
    """A global array."""
    return types.Array(NUMBA_SCALARS[of.np], rank, "A")


def tiled(tile, rank: int = 4, rows: int = 1, cols: int = 3, unit: int = 0) -> Value:
    """A global array that TMA reads or writes, (B, S, H, D) by default: see tiles.tensor."""
    return Value(gl(tile, rank, rows, cols, unit=unit))
