"""What a kernel's values are without a GPU: NumPy arrays that know their tile type."""

import functools
import itertools
from types import BuiltinFunctionType, FunctionType, MethodType

import numpy as np

from .compiling.numba_types import SCALARS, numba_type
from .compiling.unsupported import REFUSED, check_branch, refuse_attribute, refuse_values
from .numba_names import from_dtype
from .numba_names import types as numba
from .op import OPS, TypeArgument, operator
from .types import gl, pending, remote, rt, rv, st, sv


class Tile:
    """A register tile or vector: an immutable array with a type. `spec` is an rt or rv, `array` has its shape."""

    __slots__ = ("array", "spec")
    __array_ufunc__ = None  # numpy scalars leave `2 * tile` to us

    def __init__(self, spec, array):
        self.spec = spec
        array = spec.dtype.round(array)
        self.array = array if array.shape == spec.shape else np.broadcast_to(array, spec.shape)
        self.array.setflags(False)

    def __getattr__(self, name):
        try:
            return getattr(self.spec, name)
        except AttributeError:
            refuse_attribute(self.spec, name)
            raise

    def __str__(self):
        return "\n".join([str(self.spec), *(" ".join(f"{x:9.4f}" for x in row) for row in self.array.astype(np.float32))])

    __repr__ = __str__

    def __bool__(self):
        return refuse_values(check_branch, self)

    def __neg__(self):
        return OPS[operator.neg](self)

    def __abs__(self):
        return OPS[abs](self)

    def __invert__(self):
        return OPS[operator.invert](self)


class PendingTile:
    """A tile that an mma in flight will write; `group` counts the mmas of its warpgroup, `next` is where it was handed on to
    another mma."""

    __array_ufunc__ = None

    def __init__(self, tile, mma, group):
        self.spec, self.mma, self.group, self.next = _pending(tile), mma, group, None

    def part(self, rank):
        """What it holds for warp `rank` of its warpgroup, once its mma is done."""
        rows = self.spec.tile.rows
        return self.mma.value[rows * rank : rows * (rank + 1)]

    def __str__(self):
        return str(self.spec)

    __bool__, __neg__, __abs__, __invert__ = Tile.__bool__, Tile.__neg__, Tile.__abs__, Tile.__invert__


class SharedTile:
    """A tile in shared memory: its type, its address there, what to call it in messages; of a ring, also the slot that it
    lies in and its number; of a part, its first row in the whole."""

    def __init__(self, spec, address, name, slot=None, number=0, first=0):
        self.spec, self.address, self.name, self.slot, self.number, self.first = spec, address, name, slot, number, first

    rows, cols, dtype = (property(operator.attrgetter(f"spec.{name}")) for name in ("rows", "cols", "dtype"))

    def __getattr__(self, name):
        return getattr(self.spec, name)

    def __str__(self):
        return f"{self.name}: {self.spec}"

    __bool__, __neg__, __abs__, __invert__ = Tile.__bool__, Tile.__neg__, Tile.__abs__, Tile.__invert__


class Remote:
    """A shared tile or barrier of a block of the cluster: `item` as that block sees it."""

    def __init__(self, item, block):
        self.item, self.block, self.spec = item, block, remote(item.spec)

    def __getattr__(self, name):
        return getattr(self.spec.item, name)

    def __str__(self):
        return f"{self.item} of block {self.block.index}"


BINARY = "add sub mul truediv floordiv mod and or"  # Python calls __radd__ of the second operand, ...
COMPARISONS = "lt le gt ge eq ne"  # ... but of these it calls the mirror image
for _name, _class in itertools.product(f"{BINARY} {COMPARISONS}".split(), (Tile, PendingTile, SharedTile)):
    _op_function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(_class, f"__{_name}__", lambda self, other, op_function=_op_function: OPS[op_function](self, other))
    if _name in BINARY:
        setattr(_class, f"__r{_name}__", lambda self, other, op_function=_op_function: OPS[op_function](other, self))

for _row, _class in itertools.product(REFUSED, (Tile, PendingTile, SharedTile)):
    for _name in _row.methods:
        setattr(_class, f"__{_name}__", lambda *values, row=_row: refuse_values(row.check, *values))


TMA_BYTES = 16  # that TMA writes at once


class tensor:
    """A global array cut into tiles for TMA: `tensor(q, st(64, 128, bf16), rows=1, cols=3)` for q of shape (B, S, H, D).

    array: NumPy, or anything with `__dlpack__` or `__cuda_array_interface__`. tile: the shared tile or vector that copies go
    to or come from. rows, cols: the axes of the array that a tile's rows and columns run along (the last two by default); a
    vector runs along `cols`. Other axes are indexed one at a time. The part of a tile outside the array is zero on load and
    left alone on store. unit: what an index along `rows` counts, by default the tile's rows; 1 lets tiles begin at any row.

    TMA writes 16 bytes at a time: past the edge, on a GPU, the tile's own values up to the next multiple of 16 bytes. So an
    array whose axis `cols` is not such a multiple can only be loaded from."""

    def __init__(self, array, tile: "st | sv", rows: int = -2, cols: int = -1, unit: int | None = None):
        if not hasattr(array, "shape") or not isinstance(tile, (st, sv)):
            argument = f"{array!r:.60}" if not hasattr(array, "shape") else str(tile)
            raise TypeError(f"tensor: takes an array and a tile in shared memory, st or sv, got {argument}")
        rank, is_tile = len(array.shape), isinstance(tile, st)
        if not 1 + is_tile <= rank <= 5:
            raise ValueError(f"tensor: TMA takes arrays of {1 + is_tile} to 5 axes for {tile}, got shape {tuple(array.shape)}")
        storable = array.shape[cols] * tile.dtype.itemsize % TMA_BYTES == 0
        axes = rows % rank if is_tile else None, cols % rank
        self.array, self.spec = array, gl(tile, rank, *axes, storable, unit or tile.rows)
        if self.spec.rows == self.spec.cols:
            raise ValueError(f"tensor: rows and cols must be different axes, got {rows} and {cols} of {rank}")

    def __repr__(self):
        return f"tensor(an array of shape {tuple(self.array.shape)}, {self.spec.tile})"

    def view_at(self, at):
        """What the tile at `at` covers of the array, as a view of the tile's axes, and which part of the tile that is."""
        index, inside = [], {}
        for axis, (start, size) in enumerate(zip(self.spec.origin(at), self.array.shape)):
            extent = self.spec.extents.get(axis)
            if extent is None:
                if not 0 <= start < size:
                    raise IndexError(f"index {start} is out of range for axis {axis} of an array of shape {self.array.shape}")
                index.append(start)
            else:
                low, high = min(max(start, 0), size), min(max(start + extent, 0), size)
                index.append(slice(low, high))
                inside[axis] = slice(low - start, high - start)
        part = self.array[tuple(index)]
        return part if list(inside) == list(self.spec.extents) else part.T, tuple(inside[axis] for axis in self.spec.extents)

    def load(self, at):
        """The tile at `at`, zeros outside the array."""
        tile = self.spec.tile
        out = np.zeros(tile.shape, tile.dtype.np)
        part, inside = self.view_at(at)
        out[inside] = tile.dtype.copied(part)
        return out

    def store(self, at, values, fold=None):
        """Write the tile at `at`, or what `fold` makes of what is there and it; what lies outside the array is dropped."""
        part, inside = self.view_at(at)
        part[...] = fold(part, values[inside]) if fold else values[inside]


def spec_of(value, fixed=False):
    """The type that an op's rule sees of a value; integers themselves where the rule wants them known (`fixed`)."""
    kind = value.__class__
    if kind is int:  # most arguments are one of these four: isinstance, of class after class, takes longer than many ops
        return value if fixed else numba.int64
    if kind is rt or kind is rv:
        return _type_argument(value)
    if value is None:
        return None
    if kind in OF_A_TYPE:
        return value.spec
    if isinstance(value, (bool, np.bool_)):
        return bool(value) if fixed else numba.boolean
    if isinstance(value, (int, np.integer)):
        return int(value) if fixed else numba.int64
    if isinstance(value, (float, np.floating)):
        return numba.float32
    if isinstance(value, tuple):
        kinds = [numba.int64 if hasattr(v, "__index__") else numba_type(spec_of(v)) for v in value]
        return _indices(len(kinds)) if kinds.count(numba.int64) == len(kinds) else numba.BaseTuple.from_types(kinds)
    if isinstance(value, np.ndarray):
        return _array(value.dtype, value.ndim, getattr(value, "captured", False))
    if isinstance(value, (rt, rv, st, sv)):
        return _type_argument(value)
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
        return FUNCTION
    return getattr(value, "spec", value)  # a barrier's; rings and shared storage are their own types


_type_argument, _pending = map(functools.cache, (TypeArgument, pending))  # one for each: `Op` looks specs up by identity


@functools.cache
def _indices(count):
    return numba.BaseTuple.from_types([numba.int64] * count)


@functools.cache
def _array(dtype, axes, captured):
    return numba.Array(NUMBA_SCALARS.get(dtype) or from_dtype(dtype), axes, "A", readonly=captured)


OF_A_TYPE = {Tile, PendingTile, SharedTile, tensor}
FUNCTION = numba.Opaque("function")
NUMBA_SCALARS = {d.np: scalar for scalar, d in SCALARS.items()}


def wrap(spec, value):
    """A meaning's result as a value of the type that the rule announced."""
    if spec.__class__ is rt or spec.__class__ is rv:
        if value.__class__ is Tile:
            return value
        try:
            if value is not None:
                return Tile(spec, value)
        except ValueError:
            pass
        argument = "None" if value is None else f"an array of shape {np.shape(value)}"
        raise TypeError(f"its meaning must give the elements of {spec}, and gives {argument}")
    return np.float32(value) if spec.__class__ is numba.Float else value
