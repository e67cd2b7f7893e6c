"""Tiles of global arrays in which the order of columns is of no concern: maps, and sums of whole rows, are all that is done.

    x, y = load_unordered(gX, T, at), load_unordered(gY, T, at)
    store_unordered(gZ, x + y * rsqrt(row_sum(x * x)), at)

A lane keeps the 16 bytes that it reads, so nothing waits for them before they are computed with: what is loaded early is on its
way meanwhile. (`load` exchanges them in the quad at once, for products and vectors must know where each column is.)

So are fp8 tiles that become 16 bits on their way to shared memory, where columns are in their own order again:

    x = load_unordered(gX, rt(16, 512, fp8e4m3), at, aligned=True)      rows that lie in pages: load_pages
    store_widened(tile, x)
"""

from dataclasses import replace

import numpy as np

from tiles.compiling.builder import i64
from tiles.compiling.numba_types import SCALARS, void
from tiles.dtypes import DTYPES, bf16
from tiles.interpreter import current_warp
from tiles.interpreter.accesses import READ
from tiles.numba_names import types
from tiles.op import integer, lowers, op
from tiles.types import rt, rv, st
from tiles.values import Tile

from . import global_elements, global_vectorized, quad_exchange
from .load_store import check_load, check_store, load_rows, store_rows

QUAD_OF_16 = 32  # columns of 2 bytes that a quad reads at once
QUAD_OF_8, BAND = 64, 16  # the same of 1 byte; rows of a tile of it


@op(takes_operands=True)
def load_unordered(source, spec, at, rows=-2, cols=-1, aligned=None):
    """The register tile or row_vec of type `spec` from a global array, as `load`, but with its columns in an order of their
    own. The order is the same for all arrays with as many bytes an element. Use it if columns are only added up, or stored
    by `store_unordered` to such an array.

    Tiles in row layout, of 32 columns or a multiple (64 for fp8, which come from fp8 only; 16 for arrays of fp32); rows
    before columns in the array. Vectors of as many columns, not of fp8, along the array's last axis. aligned: None, or for a
    tile True, a promise as in `load`. False: element by element, from arrays of any dtype but fp8 along any axes; the order is
    then always that of arrays with 2 bytes an element."""
    stored_dtype = bf16 if _by_element(aligned) else DTYPES[source.dtype]
    return load_rows(source, spec, at, rows, cols, aligned, 0)[:, quad_exchange.order(spec, stored_dtype)]


@op(takes_operands=True)
def store_unordered(target, value, at, rows=-2, cols=-1, aligned=None):
    """target[...] = value, as `store`, for a tile with columns as `load_unordered` gave them: those of arrays with as many
    bytes an element; for an fp8 array those of 2-byte arrays, unless the tile itself is fp8. aligned: None or True, as in
    `store`. False: element by element, also a vector, as in `load_unordered`."""
    stored_dtype = DTYPES[target.dtype]
    ordered_as = bf16 if _by_element(aligned) or _narrows(value.spec, stored_dtype) else stored_dtype
    places = np.argsort(quad_exchange.order(value.spec, ordered_as))
    store_rows(target, Tile(value.spec, stored_dtype.round(value.array[:, places])), at, rows, cols, aligned, 0)


def _by_element(aligned):
    """Are accesses to be element by element?"""
    return aligned is not None and not aligned


def _narrows(spec, stored_dtype):
    """Is a tile converted to fp8 when it is stored?"""
    return stored_dtype.itemsize == 1 < spec.dtype.itemsize


def _check(name, array, spec, rows, cols, stores=False):
    vector = isinstance(spec, rv) and not stores
    if not isinstance(array, types.Array) or not (isinstance(spec, rt) or vector):
        raise TypeError(f"{name}: takes register tiles and global arrays, got {spec} and {array}")
    stored_dtype, stored_spec = SCALARS[array.dtype], spec
    if stores and _narrows(spec, stored_dtype) and spec.cols % QUAD_OF_16 == 0:
        stored_spec = replace(spec, dtype=stored_dtype)
    columns = quad_exchange.columns_at_once(2 if stored_spec is not spec else stored_dtype.itemsize)
    if not global_vectorized.suits(array, stored_spec, rows, cols) or spec.shape[1] % columns:
        raise TypeError(
            f"{name}: takes tiles in row layout of a multiple of {columns} columns, along the later of two axes, "
            f"fp8 if the array is; got {spec} and {array}, axes {rows} and {cols}"
        )


def _check_elements(name, array, spec):
    """TypeError if tiles or vectors of this type have no order in which elements are moved one by one."""
    fits = (isinstance(spec, rt) and spec.layout == "row") or (isinstance(spec, rv) and spec.axis == "row_vec")
    takes_array = isinstance(array, types.Array) and SCALARS[array.dtype].itemsize > 1
    if not (fits and takes_array and spec.dtype.itemsize > 1 and spec.shape[1] % QUAD_OF_16 == 0):
        raise TypeError(
            f"{name}: aligned=False takes tiles in row layout and row_vecs of a multiple of {QUAD_OF_16} columns, and global "
            f"arrays, not fp8; got {spec} and {array}"
        )


@lowers(load_unordered)
def _(source, spec: type, at, rows: int, cols: int, aligned: int):
    check_load("load_unordered", source, spec, at, rows, cols, aligned, 1)
    if _by_element(aligned):
        _check_elements("load_unordered", source, spec)
        return spec, global_elements.lower_load(source, spec, rows, cols, lambda b: b.u32(0), ordered=False)
    _check("load_unordered", source, spec, rows, cols)
    if aligned and isinstance(spec, rv):
        raise TypeError(f"load_unordered: `aligned` is a promise about tiles, got {spec}")
    return spec, global_vectorized.lower_load(source, spec, rows, cols, lambda b: b.u32(0), aligned, ordered=False)


@lowers(store_unordered)
def _(target, value, at, rows: int, cols: int, aligned: int):
    check_store("store_unordered", target, value, at, rows, cols, aligned, 1)
    if _by_element(aligned):
        _check_elements("store_unordered", target, value)
        return void, global_elements.lower_store(target, value, rows, cols, lambda b: b.u32(0), ordered=False)
    _check("store_unordered", target, value, rows, cols, stores=True)
    if aligned not in (None, True) or (aligned and _narrows(value, SCALARS[target.dtype])):
        raise TypeError(f"store_unordered: aligned must be None, False or True, True not for fp8 arrays, got {aligned}")
    if _narrows(value, SCALARS[target.dtype]):
        return void, global_vectorized.lower_store_bytes(target, value, rows, cols, lambda b: b.u32(0))
    return void, global_vectorized.lower_store(target, value, rows, cols, lambda b: b.u32(0), aligned, ordered=False)


# ---- fp8 that becomes 16 bits on the way to shared memory ------------------------------------------------------------------
@op
def load_pages(pool, spec, page_rows, at, last):
    """The fp8 tile of type `spec`, rt(16, n), as load_unordered(aligned=True) would give it, from rows in pages. pool: an
    array (page, row, ..., column). page_rows: the pages, by ops.look_up for st(16, n, dtype, 64). at:
    (the tile's first row, ..., column), as if there were no pages. Rows from `last` on are 0."""
    warp = current_warp()
    if reason := global_vectorized.misaligned(pool, spec, (0, 0, *at[1:]), pool.ndim - 1):
        raise warp.hazard(f"load_pages: {reason}")
    warp.note_access(pool, READ)
    values, _ = warp.from_pages(np.asarray(pool), page_rows, at, last, range(spec.rows), spec.cols)
    return values().astype(np.float32)[:, quad_exchange.order(spec, spec.dtype)]


@op(takes_operands=True)
def store_widened(tile, value):
    """tile[:] = value, with its columns in their own order again. tile: st(16, n) of 2 bytes an element. value: rt(16, n) of
    fp8, as load_unordered and load_pages give it, n a multiple of 64."""
    current_warp().write(tile, value.array[:, np.argsort(quad_exchange.order(value.spec, value.dtype))])


def _fits(spec, stored_dtype):
    """Do these ops take tiles of this type from arrays of dtype `stored_dtype`?"""
    shaped = isinstance(spec, rt) and spec.rows == BAND and spec.cols % QUAD_OF_8 == 0
    return shaped and spec.dtype is stored_dtype and stored_dtype.itemsize == 1 and spec.layout == "row"


@lowers(load_pages)
def _(pool, spec: type, page_rows, at, last):
    stored_dtype = SCALARS.get(pool.dtype) if isinstance(pool, types.Array) else None
    if not _fits(spec, stored_dtype):
        raise TypeError(f"load_pages: takes an fp8 array and a type rt({BAND}, {QUAD_OF_8} n) of its dtype, got {spec}, {pool}")
    if not (isinstance(page_rows, types.UniTuple) and page_rows.count in (2 * BAND // quad_exchange.HALF, 2 * BAND)):
        raise TypeError(
            f"load_pages: takes what look_up has found for st({BAND}, n, {stored_dtype}, {QUAD_OF_8}), got {page_rows}"
        )
    if not (isinstance(at, types.BaseTuple) and len(at) == pool.ndim - 1 and all(map(integer, (last, *at)))):
        raise TypeError(f"load_pages: `at` must be {pool.ndim - 1} integers and `last` one, got {at} and {last}")

    def emit(b, array, _, vpage_rows, vat, vlast):
        data, _, strides = b.array(pool, array)
        first, *rest = b.unpack(vat)
        for index, stride in zip(rest, strides[2:], strict=True):
            data = b.add(data, b.mul(b.sext(index, i64) if index.type.width < 64 else index, stride))
        lane, rows = b.lane(), b.unpack(vpage_rows)
        data = b.add(data, b.zext(b.mul(b.and_(lane, b.u32(3)), b.u32(16)), i64))
        row, words = b.add(b.u32(first), b.lshr(lane, b.u32(2))), []
        for down, page, page_row in zip(range(0, BAND, quad_exchange.HALF), rows[::2], rows[1::2], strict=True):
            exists = b.zext(b.icmp_signed("<", b.add(row, b.u32(down)), b.u32(vlast)), row.type)
            line = b.add(data, b.add(b.mul(b.sext(page, i64), strides[0]), b.mul(b.zext(page_row, i64), strides[1])))
            for col in range(0, spec.cols, QUAD_OF_8):
                words.append(global_vectorized.load_four(b, b.add(line, i64(col)), exists))
        return global_vectorized.packed(b, spec, words)

    return spec, emit


def _widened(b, spec, words, to):
    """Words of four elements of one byte each, as words of two of dtype `to`, exactly."""
    return [half for word in words for half in b.widened(spec.dtype, word, to)]


@lowers(store_widened)
def _(tile, value):
    fits = isinstance(tile, st) and tile.dtype.itemsize == 2 and tile.width == 2 * QUAD_OF_8
    if not fits or not _fits(value, value.dtype) or tile.shape != value.shape:
        shape = f"({BAND}, {QUAD_OF_8} n"
        raise TypeError(f"store_widened: takes st{shape}) of 2 bytes and rt{shape}) of fp8, got {tile}, {value}")

    def emit(b, address, registers):
        lane = b.lane()
        row, byte = b.lshr(lane, b.u32(2)), b.mul(b.and_(lane, b.u32(3)), b.u32(32))
        start, swizzle = b.row_address(tile, address, row)  # of eight lanes four have one row, four the next: no bank twice
        places = [b.add(start, b.xor(b.add(byte, b.u32(16 * half)), swizzle)) for half in (0, 1)]
        for (down, col), words in global_vectorized.accesses_of(b, value, registers):
            pairs = _widened(b, value, words, tile.dtype)
            further = down * tile.width + col // QUAD_OF_8 * tile.panel_bytes
            for half, place in enumerate(places):
                at = b.add(place, b.u32(further))
                b.do("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", at, *pairs[4 * half : 4 * half + 4])

    return void, emit
