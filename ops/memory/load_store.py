"""Between registers and memory: a warp's tile or vector to and from global arrays and shared tiles.

`load` and `store` take either: a shared tile of as many rows as the register tile, for a vector a shared vector, or a global
array with the index of the tile's first element. Their lowerings are in shared_tiles.py, shared_vectors.py,
global_vectorized.py, and global_elements.py for what cannot go by 16 bytes.
"""

import numpy as np

from tiles.compiling.numba_types import void
from tiles.dtypes import DTYPES
from tiles.interpreter import AccessStep, current_warp, note
from tiles.numba_names import types
from tiles.op import lowers, op
from tiles.types import remote, rt, rv, st, sv
from tiles.values import SharedTile

from . import global_elements, global_vectorized, lines, shared_tiles, shared_vectors


# ---- both scopes ---------------------------------------------------------------------------------------------------
def rows_of(spec, rank):
    """The rows of a warpgroup's tile, or the elements of its vector, of its warp `rank`."""
    if isinstance(spec, rv):
        return shared_vectors.part(spec, rank)
    if spec.layout == "line":
        return range(spec.cols)
    return range(spec.rows * rank, spec.rows * (rank + 1))


def _shared(spec):
    """The module that knows how such shared memory is read and written."""
    return shared_tiles if isinstance(spec, st) else shared_vectors


def check_store(name, target, value, at, rows, cols, is_aligned, warps):
    """The rule that stores at warp and warpgroup scope share."""
    if isinstance(value, (st, sv, types.Array)):
        way = "copy_async it" if isinstance(value, types.Array) else "tma_store it"
        raise TypeError(f"{name}: stores from registers, got {value}: load(...) it first, or {way}")
    if not isinstance(value, (rt, rv)) or getattr(value, "partial", False):
        raise TypeError(f"{name}: stores a register tile or whole vector, got {value}")
    if isinstance(target, (st, sv)):
        _shared(target).check(name, target, "take", value, at, warps)
        _check_unaligned(name, target, is_aligned)
    elif isinstance(target, types.Array):
        global_elements.check(name, target, value, at, rows, cols)
        if is_aligned:
            global_vectorized.check(name, target, value, is_aligned)
    else:
        raise TypeError(
            f"{name}: the target must be a shared tile or vector, or a global array, got {target}{_of_peers(target)}"
        )


def _of_peers(x):
    """The remedy that an error adds if x is another block's shared memory."""
    return ": each warp reads and writes its part of it by cluster.load and cluster.store" if isinstance(x, remote) else ""


def _check_unaligned(name, shared, is_aligned):
    if is_aligned:
        raise TypeError(f"{name}: `aligned` is for global arrays, got {shared}")


def check_load(name, source, spec, at, rows, cols, is_aligned, warps):
    """The rule that loads at warp and warpgroup scope share."""
    if not isinstance(spec, (rt, rv)) or getattr(spec, "partial", False):
        raise TypeError(f"{name}: the type to load must be an rt or a vector type, got {spec}")
    if isinstance(source, (st, sv)):
        _shared(source).check(name, source, "hold", spec, at, warps)
        _check_unaligned(name, source, is_aligned)
    elif isinstance(source, types.Array):
        global_elements.check(name, source, spec, at, rows, cols)
        if is_aligned:
            global_vectorized.check(name, source, spec, is_aligned, is_load=True)
    else:
        raise TypeError(
            f"{name}: the source must be a shared tile or vector, or a global array, got {source}{_of_peers(source)}"
        )


def lower_store(target, value, rows, cols, is_aligned, first_row):
    """The lowering of a store by a warp whose first row is `first_row(b)` of the tile."""
    if isinstance(target, (st, sv)):
        return _shared(target).lower_store(target, value, first_row)
    if is_aligned and value.layout == "line":
        return lines.lower_store(target, value, rows, cols)
    if is_aligned or (is_aligned is None and global_vectorized.suits(target, value, rows, cols)):
        return global_vectorized.lower_store(target, value, rows, cols, first_row, is_aligned)
    return global_elements.lower_store(target, value, rows, cols, first_row)


def lower_load(source, spec, rows, cols, is_aligned, first_row):
    """The lowering of a load, likewise."""
    if isinstance(source, (st, sv)):
        return _shared(source).lower_load(source, spec, first_row)
    if is_aligned and spec.layout == "line":
        return lines.lower_load(source, spec, rows, cols)
    if (is_aligned and isinstance(spec, rt)) or (is_aligned is None and global_vectorized.suits(source, spec, rows, cols)):
        return global_vectorized.lower_load(source, spec, rows, cols, first_row, is_aligned)
    return global_elements.lower_load(source, spec, rows, cols, first_row, is_aligned)


def store_rows(target, value, at, rows, cols, is_aligned, rank):
    """The meaning of a store by warp `rank` of those that share the tile."""
    if isinstance(target, SharedTile):
        return current_warp().write(target, value.array.reshape(-1, *target.shape[1:]), rows_of(value.spec, rank))
    if is_aligned and (reason := global_vectorized.misaligned(target, value.spec, at, cols, is_aligned)):
        raise current_warp().hazard(f"aligned store: {reason}")
    at = shifted(value.spec, at, rows, cols, rank)
    view, part = global_elements.view_at(target, value.spec, at, rows, cols)
    array = value.array if isinstance(value.spec, rt) else value.array.ravel()
    current_warp().put(view, DTYPES[view.dtype].round(array[part]))
    note(AccessStep, view, True)


def load_rows(source, spec, at, rows, cols, is_aligned, rank, fenced=True):
    """The meaning of a load by warp `rank` of those that share the tile."""
    if isinstance(source, SharedTile):
        values = current_warp().read(source, rows_of(spec, rank), fence=fenced and isinstance(source.spec, st))
        return values.astype(np.float32).reshape(spec.shape)
    if is_aligned and (reason := global_vectorized.misaligned(source, spec, at, cols)):
        raise current_warp().hazard(f"aligned load: {reason}")
    view, part = global_elements.view_at(source, spec, shifted(spec, at, rows, cols, rank), rows, cols)
    out = np.zeros(spec.shape if isinstance(spec, rt) else spec.length, np.float32)
    out[part] = view
    note(AccessStep, view, False)
    return out.reshape(spec.shape)


def shifted(spec, at, rows, cols, rank):
    """`at`, moved down to the rows of warp `rank`."""
    if isinstance(spec, rv) and spec.axis == "row_vec":
        return at
    axis = (rows if isinstance(spec, rt) else cols) % len(at)
    step = spec.rows if isinstance(spec, rt) else spec.length
    return tuple(x + step * rank if k == axis else x for k, x in enumerate(at))


# ---- warp scope ----------------------------------------------------------------------------------------------------
@op(takes_operands=True)
def store(target, value, at=None, rows=-2, cols=-1, aligned=None):
    """target[...] = value, rounded to target's dtype, by one warp. target: a shared tile or vector of value's shape; or a
    global array, where `at` is the index of the first element and the tile runs along axes `rows` and `cols` (a vector along
    `cols`).

    A lane moves 16 bytes of a global array at a time if the warp sees that it can: for tiles in row layout (fp8 only to and
    from fp8), and for vectors along a tile's columns and the array's last axis. Of a line it moves its part at once if the
    kernel promises that it can.

    aligned: a promise that saves the check, and the code for the case that it fails. The array's columns are adjacent and
    come in multiples of 16 bytes, as does `at` along them, and its address and other strides are multiples of 16 bytes. A
    vector that can only be loaded this way promises that its elements are adjacent. aligned=8, 4 or 2, for stores to 2-byte
    arrays: the address and other strides are multiples of so many bytes, and columns come in pairs. The interpreter checks
    the promise; on the GPU a broken one reads or writes elsewhere. aligned=False: element by element, without a check."""
    store_rows(target, value, at, rows, cols, aligned, 0)


@lowers(store)
def _(target, value, at, rows: int, cols: int, aligned: int):
    check_store("store", target, value, at, rows, cols, aligned, 1)
    return void, lower_store(target, value, rows, cols, aligned, lambda b: b.u32(0))


@op(takes_operands=True)
def load(source, spec, at=None, rows=-2, cols=-1, aligned=None, fenced=True):
    """The register tile or vector of type `spec` from a shared tile or vector, or a global array (see `store`), by one warp.

    fenced=False, for a shared tile: without a fence after it, which would wait for everything that the warp has under way.
    Another fence must come before TMA writes there: that of `publish`, say."""
    return load_rows(source, spec, at, rows, cols, aligned, 0, fenced)


def rule_of_load(name, first_row, warps):
    """The rule of `load` by a warp or four, whose first row is first_row(spec)(b)."""

    def rule(source, spec: type, at, rows: int, cols: int, aligned: int, fenced: int):
        check_load(name, source, spec, at, rows, cols, aligned, warps)
        if not fenced:
            if not isinstance(source, st):
                raise TypeError(f"{name}: fenced=False is for a shared tile, got {source}")
            return spec, shared_tiles.lower_load(source, spec, first_row(spec), fenced=False)
        return spec, lower_load(source, spec, rows, cols, aligned, first_row(spec))

    return rule


lowers(load)(rule_of_load("load", lambda spec: lambda b: b.u32(0), 1))
