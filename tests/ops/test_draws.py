"""tiles/philox.py and ops/elementwise/draws.py: published numbers, and the same draws wherever a tile lies."""

import re

import numpy as np
import pytest
from numba import cuda

from ops import bernoulli, bernoulli_of_row, store, store_unordered
from tiles import Hazard, bf16, fp32, rt
from tiles.philox import halves, philox4x32
from tiles.testing import blank, meaning

KNOWN = [  # Random123, tests/kat_vectors: counter, key and words of philox4x32 of 10 rounds
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
PLACES = [
    (row, col + n) for col in (0, 8) for row in (0, 8) for n in (0, 1)
]  # of the halves of a counter's words, low ones first
FIRST = [0xE8D5, 0x6627, 0xC58D, 0xE169, 0xAC4C, 0xBC57, 0xDBD8, 0x9B00]  # those of counter and key 0


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_numbers(counter, key, expected):
    assert [int(x) for x in philox4x32(words(counter), words(key))] == words(expected)


def test_where_the_words_lie():
    assert [int(halves(0, 0, 0, *place)) for place in PLACES] == FIRST
    counter = 5 * 8 + 3, 7 * 4 + 2, 9, 11
    assert int(halves(2**40 + 1, 11, 9, 5 * 16 + 3, 7 * 16 + 5)) == int(philox4x32(counter, (1, 256))[0]) >> 16


def test_draws_are_independent_enough():
    """Draws of neighbours and of other seeds, heads and batches are uncorrelated; each share is as frequent as it should be."""
    i, j = np.arange(256)[:, None], np.arange(256)
    draws = [halves(*at, i, j) / 65536 - 0.5 for at in ((0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 0, 1))]
    pairs = [(draws[0], other) for other in draws[1:]] + [(draws[0][1:], draws[0][:-1]), (draws[0][:, 1:], draws[0][:, :-1])]
    for one, other in pairs:
        assert abs((one * other).mean()) < 5 / 12 / one.size**0.5
    for draw in draws:
        assert abs(draw.mean()) < 5 / (12 * draw.size) ** 0.5 and abs(draw.var() * 12 - 1) < 0.02


T, COLUMNS = rt(32, 48, fp32), rt(32, 48, fp32, "col")


@cuda.jit
def drawn_by_columns(out, share, low, high, batch, head, row, col):
    store(out, bernoulli(COLUMNS, share, low, high, batch, head, row, col), (0, 0))


@cuda.jit
def drawn(out, share, low, high, batch, head, row, col):
    store(out, bernoulli(T, share, low, high, batch, head, row, col), (0, 0))


@pytest.mark.parametrize(("row", "col", "step"), [(0, 0, 48), (5, 32, 64), (2**20 + 12, 16, 256)])
def test_draws_of_a_row_in_parts(run, row, col, step):
    @cuda.jit
    def drawn_of_row(out, row, col, step):
        store(out, bernoulli_of_row(T, 0x27D5, 77, 3, 1, 2, row, col, step), (0, 0))

    out = blank(T.shape)
    run(drawn_of_row, out, row, col, step)
    columns = col + step * np.arange(T.rows)[:, None] + np.arange(T.cols)
    assert (out == (halves(77 | 3 << 32, 1, 2, row, columns) < 0x27D5)).all()


@pytest.mark.parametrize(("row", "col", "step"), [(0, 0, 64), (5, 32, 64), (2**20 + 12, 16, 256)])
def test_draws_of_a_row_whose_columns_are_unordered(run, row, col, step):
    """A tile of unordered columns, stored as such, has the draws of its elements' positions."""
    WIDE = rt(32, 64, fp32)

    @cuda.jit
    def drawn_of_row(out, row, col, step):
        store_unordered(out, bernoulli_of_row(WIDE, 0x27D5, 77, 3, 1, 2, row, col, step, unordered=True), (0, 0))

    out = blank(WIDE.shape, bf16)
    run(drawn_of_row, out, row, col, step)
    columns = col + step * np.arange(WIDE.rows)[:, None] + np.arange(WIDE.cols)
    assert (out == (halves(77 | 3 << 32, 1, 2, row, columns) < 0x27D5)).all()


@pytest.mark.parametrize("share", [0, 1, 0x27D5, 0x8000, 65535])
@pytest.mark.parametrize("drawn", [drawn, drawn_by_columns])
def test_draws(run, drawn, share):
    """A seed's two halves may have any sign, and a tile any position."""
    for seed, batch, head, row, col in ((0, 0, 0, 0, 0), (2**64 - 3, 3, 70, 4096, 112), (5 << 31, 1, 2, 16, 2**20)):
        out = blank((32, 48), fp32)
        run(drawn, out, share, *np.array([seed], np.uint64).view(np.int32).tolist(), batch, head, row, col)
        expected = halves(seed, batch, head, row + np.arange(32)[:, None], col + np.arange(48)) < share
        assert (out == expected).all() and expected.any() <= (share > 0)


def test_published_numbers_in_a_kernel(run):
    """A draw is 1 if the share is above its half word."""
    for share in sorted(FIRST)[::3]:
        out, above = blank((32, 48), fp32), blank((32, 48), fp32)
        run(drawn, out, share, 0, 0, 0, 0, 0, 0)
        run(drawn, above, share + 1, 0, 0, 0, 0, 0, 0)
        assert [out[at] for at in PLACES] == [half < share for half in FIRST] and above[PLACES[FIRST.index(share)]] == 1


@cuda.jit
def drawn_of_row(out, col, step):
    store(out, bernoulli_of_row(rt(32, 48, fp32), 1, 0, 0, 0, 0, 0, col, step), (0, 0))


def test_mistakes():
    with pytest.raises(Hazard, match="bernoulli: row and col must be multiples of 16: row=8, col=0"):
        meaning(drawn, blank((32, 48), fp32), 1, 0, 0, 0, 0, 8, 0)
    for col, step in (8, 48), (0, 24):
        with pytest.raises(Hazard, match=f"bernoulli_of_row: col and step must be multiples of 16: {col=}, {step=}"):
            meaning(drawn_of_row, blank((32, 48), fp32), col, step)
    with pytest.raises(TypeError, match=re.escape("takes integers, got float32")):
        meaning(drawn, blank((32, 48), fp32), 0.5, 0, 0, 0, 0, 0, 0)
    for shape in rt(16, 16, bf16), rt(16, 16, fp32).col_vec:
        with pytest.raises(TypeError, match=re.escape(f"such as rt(16, 64, fp32), got {shape}")):
            bernoulli(shape, 1, 0, 0, 0, 0, 0, 0)
    with pytest.raises(TypeError, match=re.escape("what is unordered has a multiple of 32 columns, got rt(16, 48")):
        bernoulli_of_row(rt(16, 48, fp32), 1, 0, 0, 0, 0, 0, 0, 48, unordered=True)
