"""ops/convert.py: fp32 <-> bf16, fp16 by calling the dtype."""

import numpy as np
import pytest
from numba import cuda
from sweep import blank, close

from ops import load, store
from tiles import bf16, fp16, fp32, rt


def corners(to):
    """Numbers at which rounding to `to` is decided: ties, the next ones beside them, the ends of the range."""
    info = {bf16: (8, 127, -126), fp16: (11, 15, -14)}[to]
    digits, top, bottom = info
    ulp = 2.0 ** (1 - digits)
    greatest = (2 - ulp) * 2.0**top
    subnormal = 2.0**bottom * ulp
    ties = [1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2.0**-23, 1 + ulp / 2 - 2.0**-23, 1 + 3 * ulp / 2 - 2.0**-23]
    ends = [greatest, greatest * (1 + ulp / 4 * 0.99), min(greatest * (1 + ulp / 2), 3.4028235e38), 3.4028235e38]
    small = [2.0**bottom, 2.0**bottom - subnormal / 2, *(subnormal * x for x in (1, 0.5, 1.5, 2.5, 0.51))]
    numbers = np.array(ties + ends + small + [0.0, np.inf], np.float64).astype(np.float32)
    return np.concatenate([numbers, -numbers, [np.nan, -np.nan]]).astype(np.float32)


@pytest.mark.parametrize("to", [bf16, fp16])
def test_rounds_to_nearest_even(run, sample, to):
    T = rt(16, 48, fp32)

    @cuda.jit
    def body(x, c, r, out, back, col, row):
        tile = to(load(x, T, (0, 0)))
        store(out, tile, (0, 0))
        store(back, fp32(tile), (0, 0))
        store(col, to(load(c, T.col_vec, (0,))), (0,))
        store(row, fp32(to(load(r, T.row_vec, (0,)))), (0,))

    x, r = sample((16, 48)), sample(48)
    special = corners(to)
    x[3, : len(special)] = special
    x[11, -len(special) :] = special
    c = special[:16].copy()
    out, back, col, row = blank(x.shape, to), np.zeros(x.shape, np.float32), blank(16, to), blank(48)
    run(body, x, c, r, out, back, col, row)
    with np.errstate(all="ignore"):
        want, c = x.astype(to.np), c.astype(to.np)
    same = lambda a, b: ((a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)).all()
    assert same(out, want)
    assert same(back, want.astype(np.float32))
    assert same(col, c)
    assert same(row, r.astype(to.np).astype(np.float32))


def test_between_two_byte_types(run, sample):
    T, H = rt(16, 16, bf16), rt(16, 16, fp16)

    @cuda.jit
    def body(x, y, halves, same, brains):
        a = load(x, T, (0, 0))
        store(halves, fp16(a), (0, 0))
        store(same, bf16(a), (0, 0))
        store(brains, bf16(load(y, H, (0, 0))), (0, 0))

    x, y = sample((16, 16), bf16), sample((16, 16), fp16)
    x[0, :4] = [1e30, -1e-30, 65504, 1e-7]
    halves, same, brains = blank((16, 16), fp16), blank((16, 16), bf16), blank((16, 16), bf16)
    run(body, x, y, halves, same, brains)
    with np.errstate(over="ignore"):
        assert (halves == x.astype(np.float32).astype(np.float16)).all()
    assert (same == x).all() and (brains == y.astype(bf16.np)).all()


def test_a_tile_knows_its_dtype(run, sample):
    """Generic code converts by the tile's own attribute."""
    T = rt(16, 32, bf16)

    @cuda.jit
    def body(x, out):
        a = load(x, T, (0, 0))
        store(out, a.dtype(fp32(a) * 2), (0, 0))

    x, out = sample((16, 32), bf16), blank((16, 32), bf16)
    run(body, x, out)
    close(out, x.astype(np.float32) * 2)
