"""Tiles of global arrays in which the order of columns is of no concern: maps, and sums of whole rows, are all that is done.

    x, y = load_unordered(gX, T, at), load_unordered(gY, T, at)
    store_unordered(gZ, x + y * rsqrt(row_sum(x * x)), at)

A lane keeps the 16 bytes that it reads, so nothing waits for them before they are computed with: what is loaded early is on its
way meanwhile. (`load` exchanges them in the quad at once, for products and vectors must know where each column is.)
"""

from dataclasses import replace

import numpy as np
from numba.cuda import types

from tiles.dtypes import DTYPES, bf16
from tiles.op import lowers, op
from tiles.plumbing import SCALARS, void
from tiles.types import rt
from tiles.values import Tile

from . import global_vectorized
from .load_store import check_load, check_store, load_rows, store_rows

QUAD_OF_16 = 32  # columns of 2 bytes that a quad reads at once


@op(takes_operands=True)
def load_unordered(source, spec, at, rows=-2, cols=-1):
    """The register tile of type `spec` from a global array, as `load`, with its columns in an order of their own, which all
    arrays of so many bytes an element share. Columns are added up, or stored by `store_unordered` to such an array.

    Tiles in row layout, of 32 columns or a multiple (64 of fp8, which come from fp8 alone; 16 of arrays of fp32); rows before
    columns in the array."""
    return load_rows(source, spec, at, rows, cols, None, 0)[:, global_vectorized.order(spec, DTYPES[source.dtype])]


@op(takes_operands=True)
def store_unordered(target, value, at, rows=-2, cols=-1):
    """target[...] = value, as `store`, of a tile whose columns are as `load_unordered` gave them: those of arrays of so many
    bytes an element; to an fp8 array those of arrays of 2 bytes, if the tile is not fp8 itself."""
    held = DTYPES[target.dtype]
    places = np.argsort(global_vectorized.order(value.spec, bf16 if _narrows(value.spec, held) else held))
    store_rows(target, Tile(value.spec, held.round(value.array[:, places])), at, rows, cols, None, 0)


def _narrows(spec, held):
    """Does a tile become fp8 as it is stored?"""
    return held.itemsize == 1 < spec.dtype.itemsize


def _check(name, array, spec, rows, cols, stores=False):
    if not isinstance(array, types.Array) or not isinstance(spec, rt):
        raise TypeError(f"{name}: takes register tiles and global arrays, got {spec} and {array}")
    held, moved = SCALARS[array.dtype], spec
    if stores and _narrows(spec, held) and spec.cols % QUAD_OF_16 == 0:
        moved = replace(spec, dtype=held)
    columns = global_vectorized.columns_at_once(2 if moved is not spec else held.itemsize)
    if not global_vectorized.suits(array, moved, rows, cols) or spec.cols % columns:
        raise TypeError(
            f"{name}: takes tiles in row layout of a multiple of {columns} columns, along the later of two axes, "
            f"fp8 if the array is; got {spec} and {array}, axes {rows} and {cols}"
        )


@lowers(load_unordered)
def _(source, spec: type, at, rows: int, cols: int):
    check_load("load_unordered", source, spec, at, rows, cols, None, 1)
    _check("load_unordered", source, spec, rows, cols)
    return spec, global_vectorized.lower_load(source, spec, rows, cols, lambda b: b.u32(0), None, ordered=False)


@lowers(store_unordered)
def _(target, value, at, rows: int, cols: int):
    check_store("store_unordered", target, value, at, rows, cols, None, 1)
    _check("store_unordered", target, value, rows, cols, stores=True)
    if _narrows(value, SCALARS[target.dtype]):
        return void, global_vectorized.lower_store_bytes(target, value, rows, cols, lambda b: b.u32(0))
    return void, global_vectorized.lower_store(target, value, rows, cols, lambda b: b.u32(0), None, ordered=False)
