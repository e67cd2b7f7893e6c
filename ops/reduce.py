"""Along rows: fold the elements of a lane, then over the four lanes of a quad, which hold a row between them."""

from functools import partial, reduce

import numpy as np

from tiles import ptx
from tiles.op import lowers, op
from tiles.types import rt, rv, whole

from .maps import _add, fmax

CHAINS = 4  # independent partial folds in a lane, so that their latency hides


def _needs_rows(name, tile):
    if not (isinstance(tile, rt) and tile.layout == "row"):
        raise TypeError(f"{name}: takes a register tile in row layout, got {tile}")


def _fold(b, tile, elements, combine):
    """One register a row of this lane's: the fold of its elements."""
    index = tile.lane_index(tile.col_vec)
    combine = partial(combine, b)
    rows = []
    for row in range(tile.col_vec.elements):
        mine = [e for e, k in zip(elements, index, strict=True) if k == row]
        rows.append(reduce(combine, [reduce(combine, mine[c::CHAINS]) for c in range(CHAINS)]))
    return rows


def _across_quad(b, rows, combine):
    """Fold over the four lanes of a quad; all of them get the result."""
    for lanes in (1, 2):
        rows = [combine(b, r, ptx.shuffle_xor(b, r, lanes)) for r in rows]
    return rows


def _row_reduction(face, combine):
    @lowers(face)
    def _(tile):
        _needs_rows(face.__name__, tile)
        out = tile.col_vec

        def lower(b, v):
            return b.from_elements(out, _across_quad(b, _fold(b, tile, b.elements(tile, v), combine), combine))

        return out, lower


@op
def row_max(tile):
    """Greatest element of each row, as tile.col_vec; as in `maximum`, NaN loses against a number."""
    return np.fmax.reduce(tile.array.astype(np.float32), axis=1, keepdims=True)


@op
def row_sum(tile):
    """Sum of each row, taken in fp32, as tile.col_vec. In a loop, `lane_sum` and one `total` at its end are cheaper."""
    return tile.array.sum(axis=1, keepdims=True, dtype=np.float32)


_row_reduction(row_max, fmax)
_row_reduction(row_sum, _add)


@op
def lane_sum(tile):
    """Sum of each row as a *partial* col_vec, each lane holding its share: scale and add partial sums, then `total`.
    Of a 2-byte tile each share is rounded; sum an fp32 tile where that matters."""
    return tile.array.sum(axis=1, keepdims=True, dtype=np.float32)


@lowers(lane_sum)
def _(tile):
    _needs_rows("lane_sum", tile)
    out = rv(tile.rows, tile.dtype, "col_vec", partial=True)
    return out, lambda b, v: b.from_elements(out, _fold(b, tile, b.elements(tile, v), _add))


@op
def total(vector):
    """The col_vec whose lanes' shares a partial sum holds."""
    return vector.array


@lowers(total)
def _(vector):
    if not (isinstance(vector, rv) and vector.partial):
        raise TypeError(f"total: takes a partial sum (from lane_sum), got {vector}")
    out = whole(vector)
    return out, lambda b, v: b.from_elements(out, _across_quad(b, b.elements(vector, v), _add))
