"""Sums of Taylor features (ops.taylor) in the registers of a warp. For rows x of 16 numbers with weights w, the sum of the
features of a Taylor series consists of

    n = sum w        z = sum w x        Z = sum w x^T x

Each warp has all of them: z as a tile whose rows are the same."""

from ops import (
    col_index,
    col_max,
    equal,
    fma,
    less,
    load,
    row_index,
    row_sum,
    store,
    tile_sum,
    transpose,
    where,
    zeros,
)
from ops.for_attention.taylor_features import BASE, HALF
from tiles import fp32, inlined, rt

SQUARE = rt(BASE, BASE, fp32)
COL_VEC, ROW_VEC = SQUARE.col_vec, SQUARE.row_vec


@inlined
def is_diagonal(d):
    """The d-th diagonal of Z as a mask: 1 where (column - row) % 16 = d, otherwise 0."""
    offset = col_index(SQUARE) - row_index(SQUARE) - d
    return equal(offset, 0.0) + equal(offset, -float(BASE))


@inlined
def load_diagonals(gZ, sequence, head, first):
    """The diagonals of Z from the `first` one on, those below it left out, from the sum of features in memory."""
    zz, last = zeros(SQUARE), load(gZ, COL_VEC, (sequence, head, BASE * HALF), cols=2)
    for d in range(first, HALF):
        zz = zz + is_diagonal(d) * load(gZ, COL_VEC, (sequence, head, BASE * d), cols=2)
    return zz + is_diagonal(HALF) * where(less(row_index(COL_VEC), HALF), last, 0.0)


@inlined
def load_counts(gZ, sequence, head):
    """(n, z) from the sum of features in memory."""
    last = load(gZ, COL_VEC, (sequence, head, BASE * HALF), cols=2)
    z = zeros(SQUARE) + load(gZ, ROW_VEC, (sequence, head, BASE * (HALF + 1)), cols=2, aligned=False)
    return tile_sum(where(equal(row_index(COL_VEC), HALF), last, 0.0)), z


@inlined
def load_key_sums(gZ, sequence, head):
    """(n, z, Z) from the sum of f(k) in memory, whose squares are halved."""
    zz = load_diagonals(gZ, sequence, head, 0)
    n, z = load_counts(gZ, sequence, head)
    return n, z, zz + transpose(zz)


@inlined
def load_query_sums(gZ, sequence, head):
    """(n, z, Z) from the sum of f(q) in memory, whose squares are whole."""
    zz = load_diagonals(gZ, sequence, head, 1)
    n, z = load_counts(gZ, sequence, head)
    return n, z, zz + transpose(zz) + is_diagonal(0) * load(gZ, COL_VEC, (sequence, head, 0), cols=2)


@inlined
def store_sums(gZ, sequence, head, n, z, zz, squares, unused):
    """Store n, z and Z as the sum of features. squares: what features multiply squares by. unused: what stands where no feature
    is, in the last elements of 16. Each warp has all of them."""
    for d in range(HALF):
        factor = squares if d == 0 else 1.0
        store(gZ, row_sum(is_diagonal(d) * zz) * factor, (sequence, head, BASE * d), cols=2)
    row = row_index(COL_VEC)
    last = where(less(row, HALF), row_sum(is_diagonal(HALF) * zz), where(equal(row, HALF), n, unused))
    store(gZ, last, (sequence, head, BASE * HALF), cols=2)
    store(gZ, col_max(z), (sequence, head, BASE * (HALF + 1)), cols=2, aligned=False)


@inlined
def taylor_weights(s):
    """1 + s + s^2 / 2"""
    return fma(s, fma(s, 0.5, 1.0), 1.0)
