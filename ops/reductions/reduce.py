"""Reductions along rows, along columns, and of a whole tile: fold the elements of a lane, then butterflies over the lanes that
hold the rest. Taken in fp32, and rounded once to the tile's dtype.

A row of a tile in row layout lies in the four lanes of a quad (two shuffles a row), a column in the eight lanes that have one
number in their quads (three); in column layout it is the other way round. A shared tile is read some rows at a time, in row
layout.

All of this is one warp's. A warpgroup's tile is four of them, and so its rows are reduced, too; its columns and all its
elements once the warps have met through shared memory (across_warps.py):

    most = warpgroup.reduce_max(col_max(tile), scratch)
"""

from dataclasses import replace
from functools import partial
from functools import reduce as fold

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.builder import f32, i32
from tiles.dtypes import OPERANDS, fp32
from tiles.interpreter import current_warp
from tiles.layout import LANES
from tiles.numba_names import types
from tiles.op import lowers, op
from tiles.types import finished_type, rt, rv, st, sv
from tiles.values import SharedTile

from ..elementwise.arithmetic import fadd, fmax, fmin, fmul
from ..memory import shared_tiles

CHAINS = 4  # independent partial folds in a lane, so that their latency hides
STRIP = 64  # elements a lane that are read at once of a shared tile
IN_QUAD, OF_QUAD = (1, 2), (4, 8, 16)  # the bits of a lane's number that say which lane of its quad it is, and which quad's
ZERO = f32(0.0)
FOLDS = {"max": (np.fmax, fmax), "min": (np.fmin, fmin), "sum": (np.add, fadd), "prod": (np.multiply, fmul)}


def _elements(x):
    """The elements of a tile or vector, in fp32; a shared tile's are read."""
    return (current_warp().read(x) if isinstance(x, SharedTile) else x.array).astype(np.float32)


def _reduced(kind, tile, axis, running=None):
    """What a reduction means: along an axis, or None for all elements."""
    ufunc = FOLDS[kind][0]
    out = ufunc.reduce(_elements(tile), axis=axis, keepdims=axis is not None)
    return out if running is None else ufunc(_elements(running), out)


# ---- rows and columns ----------------------------------------------------------------------------------------------
@op
def row_max(tile, running=None):
    """Greatest element of each row of a register or shared tile, as a col_vec; as in `maximum`, NaN loses against a number.
    With a `running` col_vec, the greatest of both."""
    return _reduced("max", tile, 1, running)


@op
def row_min(tile, running=None):
    """Least element of each row of a register or shared tile, as a col_vec; as in `minimum`, NaN loses against a number. With a
    `running` col_vec, the least of both."""
    return _reduced("min", tile, 1, running)


@op
def row_sum(tile, running=None):
    """Sum of each row of a register or shared tile, as a col_vec, taken in fp32. With a `running` col_vec, their sum. In a
    loop, `lane_sum` and one `finish_sum` at its end are cheaper."""
    return _reduced("sum", tile, 1, running)


@op
def row_prod(tile, running=None):
    """Product of each row of a register or shared tile, as a col_vec, taken in fp32. With a `running` col_vec, their
    product."""
    return _reduced("prod", tile, 1, running)


@op
def col_max(tile, running=None):
    """Greatest element of each column of a register or shared tile, as a row_vec; as in `maximum`, NaN loses against a number.
    With a `running` row_vec, the greatest of both."""
    return _reduced("max", tile, 0, running)


@op
def col_min(tile, running=None):
    """Least element of each column of a register or shared tile, as a row_vec; as in `minimum`, NaN loses against a number.
    With a `running` row_vec, the least of both."""
    return _reduced("min", tile, 0, running)


@op
def col_sum(tile, running=None):
    """Sum of each column of a register or shared tile, as a row_vec, taken in fp32. With a `running` row_vec, their sum."""
    return _reduced("sum", tile, 0, running)


@op
def col_prod(tile, running=None):
    """Product of each column of a register or shared tile, as a row_vec, taken in fp32. With a `running` row_vec, their
    product."""
    return _reduced("prod", tile, 0, running)


def _fold(b, elements, combine):
    """One register: the fold of a lane's registers, in chains."""
    combine = partial(combine, b)
    return fold(combine, [fold(combine, elements[c::CHAINS]) for c in range(min(CHAINS, len(elements)))])


def _register_tile(name, tile):
    """The type of a register tile with the elements of a shared one."""
    if tile.dtype in OPERANDS:
        raise TypeError(f"{name}: tiles of {tile.dtype} are only for products: load it and convert it, fp32(x); got {tile}")
    try:
        return rt(tile.rows, tile.cols, tile.dtype)
    except ValueError as error:
        raise TypeError(f"{name}: {tile} is read into registers: {error}") from None


def _strips(b, x, value):
    """(type of some rows, this lane's elements of them), one strip after the other; a register tile or vector is one strip."""
    if not isinstance(x, st):
        yield x, b.elements(x, value)
        return
    step = max(STRIP * LANES // x.cols // 16, 1) * 16
    for row in range(0, x.rows, step):
        strip = rt(min(step, x.rows - row), x.cols, x.dtype)
        yield strip, b.elements(strip, shared_tiles.lower_load(x, strip, lambda b, row=row: b.u32(row))(b, value))


def _fold_strips(b, tile, axis, value, combine):
    """For each of this lane's elements of the vector of an axis, the fold of those elements of the tile that go with it."""
    folded = []
    for strip, elements in _strips(b, tile, value):
        part = _fold_lane(b, strip, _vector(strip, axis), elements, combine)
        if axis == "row":
            folded += part
        else:
            folded = [combine(b, x, y) for x, y in zip(folded, part, strict=True)] if folded else part
    return folded


def _vector(tile, axis):
    """The type of a tile's reduction along its rows or its columns. TypeError: a line has none."""
    if isinstance(tile, rt) and tile.layout == "line":
        raise TypeError(f"{tile} is a line, which has no vectors; tile_sum and its like reduce it")
    return tile.col_vec if axis == "row" else tile.row_vec


def _fold_lane(b, tile, vector, elements, combine):
    """For each of this lane's elements of `vector`, the fold of those elements of the tile that go with it."""
    index = tile.lane_index(vector)
    return [_fold(b, [e for e, k in zip(elements, index, strict=True) if k == i], combine) for i in range(vector.elements)]


def _across(b, registers, lanes, combine):
    """Fold over the lanes whose numbers differ in these bits; all of them get the result."""
    for bit in lanes:
        registers = [combine(b, r, ptx.shuffle_xor(b, r, bit)) for r in registers]
    return registers


def _sharers(vector):
    """The bits of a lane's number by which lanes differ that hold the same elements of a vector."""
    return IN_QUAD if vector.by_quad else OF_QUAD


def _reduction(name, axis, combine):
    def rule(tile, running):
        if not isinstance(tile, (rt, st)):
            raise TypeError(f"{name}: takes a register tile or a shared one, got {tile}")
        out = _vector(tile if isinstance(tile, rt) else _register_tile(name, tile), axis)
        if running not in (None, out):
            raise TypeError(f"{name}: the running value of {tile} must be {out}, got {running}")

        def lower(b, v, before):
            folded = _across(b, _fold_strips(b, tile, axis, v, combine), _sharers(out), combine)
            if running is not None:
                folded = [combine(b, x, y) for x, y in zip(b.elements(out, before), folded, strict=True)]
            return b.from_elements(out, folded)

        return out, lower

    return rule


for _op_function in (row_max, row_min, row_sum, row_prod, col_max, col_min, col_sum, col_prod):
    _axis, _kind = _op_function.__name__.split("_")
    lowers(_op_function)(_reduction(_op_function.__name__, _axis, FOLDS[_kind][1]))


# ---- partial sums --------------------------------------------------------------------------------------------------
@op
def lane_sum(tile):
    """Sum of each row as a *partial* col_vec, each lane holding its share: scale and add partial sums, then `finish_sum`.
    Of a 2-byte tile each share is rounded; sum an fp32 tile where that matters."""
    return _reduced("sum", tile, 1)


@lowers(lane_sum)
def _(tile):
    if not isinstance(tile, rt):
        raise TypeError(f"lane_sum: takes a register tile, got {tile}")
    out = replace(_vector(tile, "row"), partial=True)
    return out, lambda b, v: b.from_elements(out, _fold_lane(b, tile, out, b.elements(tile, v), fadd))


@op
def lane_col_sum(tile):
    """Each lane's share of the sum of each column: a partial row_vec. Its lanes' shares take half the registers of a tile of 16
    rows, or less."""
    return _reduced("sum", tile, 0)


@lowers(lane_col_sum)
def _(tile):
    if not isinstance(tile, rt):
        raise TypeError(f"lane_col_sum: takes a register tile, got {tile}")
    out = replace(_vector(tile, "col"), partial=True)
    return out, lambda b, v: b.from_elements(out, _fold_lane(b, tile, out, b.elements(tile, v), fadd))


@op
def lane_moment(tile):
    """Sum of each row's elements times the numbers of their columns, as a partial col_vec: see lane_sum. tile: of fp32, in row
    layout. The numbers take no registers."""
    return np.add.reduce(_elements(tile) * np.arange(tile.spec.cols, dtype=np.float32), axis=1, keepdims=True)


@lowers(lane_moment)
def _(tile):
    if not isinstance(tile, rt) or tile.dtype is not fp32 or tile.layout != "row":
        raise TypeError(f"lane_moment: takes a register tile of fp32 in row layout, got {tile}")
    out = replace(tile.col_vec, partial=True)
    numbers = [tile.element(0, i)[1] for i in range(tile.elements)]  # in lane 0; a pair in lane t is 2 t further

    def emit(b, value):
        elements = b.elements(tile, value)
        weighted = [fmul(b, x, b.real(n)) for x, n in zip(elements, numbers, strict=True)]
        partial = _fold_lane(b, tile, out, weighted, fadd)
        sums = _fold_lane(b, tile, out, elements, fadd)
        further = b.real(b.mul(b.and_(b.lane(), b.u32(3)), b.u32(2)))
        return b.from_elements(out, [fadd(b, x, fmul(b, y, further)) for x, y in zip(partial, sums, strict=True)])

    return out, emit


@op
def finish_sum(vector):
    """The vector of which a partial sum has each lane's share."""
    return vector.array


@lowers(finish_sum)
def _(vector):
    if not (isinstance(vector, rv) and vector.partial):
        raise TypeError(f"finish_sum: takes a partial sum (from lane_sum), got {vector}")
    out = finished_type(vector)
    return out, lambda b, v: b.from_elements(out, _across(b, b.elements(vector, v), _sharers(out), fadd))


@op
def group_sum(vector, size):
    """The sums of groups of `size` neighbouring elements of a vector with one element a row, such as row_sum gives: each
    element becomes the sum of its group. size: 1, 2, 4 or 8, known at compile time; a shuffle for each doubling."""
    sums = vector.array.reshape(-1, size).sum(1, dtype=np.float32)
    return np.repeat(sums, size)[:, None]


@lowers(group_sum)
def _(vector, size: int):
    if not isinstance(vector, rv) or vector.axis != "col_vec" or not vector.by_quad or vector.dtype is not fp32:
        raise TypeError(f"group_sum: takes a col_vec of fp32 of tiles in row layout, got {vector}")
    if size not in (1, 2, 4, 8):
        raise TypeError(f"group_sum: size must be 1, 2, 4 or 8, got {size}")
    lanes = [bit for bit in OF_QUAD if bit < 4 * size]
    return vector, lambda b, v, *_: b.from_elements(vector, _across(b, b.elements(vector, v), lanes, fadd))


# ---- everything ----------------------------------------------------------------------------------------------------
@op
def tile_max(x):
    """The greatest element of a register or shared tile or a vector, a number for every lane; NaN loses against a number."""
    return _reduced("max", x, None)


@op
def tile_min(x):
    """The least element of a register or shared tile or a vector, a number for every lane; NaN loses against a number."""
    return _reduced("min", x, None)


@op
def tile_sum(x):
    """The sum of a register or shared tile or a vector, an fp32 number for every lane."""
    return _reduced("sum", x, None)


@op
def tile_prod(x):
    """The product of the elements of a register or shared tile or a vector, an fp32 number for every lane."""
    return _reduced("prod", x, None)


@op
def tile_any(mask):
    """Is an element of a mask (what a comparison gives) not 0? The warp may branch on it."""
    return bool((_elements(mask) != 0).any())


@op
def tile_all(mask):
    """Is no element of a mask (what a comparison gives) 0? The warp may branch on it."""
    return bool((_elements(mask) != 0).all())


def _all_elements(name, x):
    """The bits of a lane's number: lanes that differ in them hold different elements, and together the whole tile or vector."""
    if isinstance(x, rt) or (isinstance(x, st) and _register_tile(name, x)):
        return IN_QUAD + OF_QUAD
    if isinstance(x, rv) and not x.partial:
        return OF_QUAD if x.by_quad else IN_QUAD
    if isinstance(x, sv):
        raise TypeError(f"{name}: {x} lies in shared memory: load(...) it first")
    raise TypeError(f"{name}: takes a tile or a whole vector, got {x}")


def _whole_reduction(name, combine):
    def rule(x):
        lanes = _all_elements(name, x)

        def lower(b, v):
            folded = [_fold(b, elements, combine) for _, elements in _strips(b, x, v)]
            return _across(b, [fold(partial(combine, b), folded)], lanes, combine)[0]

        return types.float32, lower

    return rule


def _vote(name, sign):
    """The rule of any (`!=`) and all (no element `==` 0), by a vote of the warp."""

    def rule(mask):
        _all_elements(name, mask)
        if mask.dtype is not fp32:
            raise TypeError(f"{name}: takes a mask, which is fp32, such as less(x, y), got {mask}")

        def lower(b, v):
            compare = b.fcmp_unordered if sign == "!=" else b.fcmp_ordered
            partial = fold(b.or_, [compare(sign, e, ZERO) for _, elements in _strips(b, mask, v) for e in elements])
            return b.icmp_unsigned("!=" if sign == "!=" else "==", ptx.ballot(b, b.zext(partial, i32)), b.u32(0))

        return types.boolean, lower

    return rule


for _all in (tile_max, tile_min, tile_sum, tile_prod):
    lowers(_all)(_whole_reduction(_all.__name__, FOLDS[_all.__name__.split("_")[1]][1]))
lowers(tile_any)(_vote("tile_any", "!="))
lowers(tile_all)(_vote("tile_all", "=="))
