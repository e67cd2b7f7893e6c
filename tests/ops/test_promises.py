"""ops/memory/global_vectorized.py: broken promises of alignment, as the interpreter and types see them."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, store, warpgroup
from tiles import Hazard, bf16, fp32, rt, st
from tiles.interpreter import interpret
from tiles.testing import blank, guarded, meaning, ptx


def unaligned(case):
    """(array, index) that break the promise in one way."""
    base, _ = guarded((40, 72), bf16, aligned=True)
    return {
        "address": (base[:, 4:68], (0, 0)),
        "stride": (np.zeros((40, 68), bf16.np)[:, :64], (0, 0)),
        "apart": (base[:, :64:2], (0, 0)),
        "down": (base[:, :32].T, (0, 0)),
        "at": (base, (0, 4)),
        "before": (base, (0, -4)),
        "columns": (base[:, :68], (0, 0)),
    }[case]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("address", r"the array \(strides \(208, 2\), address 0x\w+8\) is not aligned to 16 bytes"),
        ("stride", r"the array \(strides \(136, 2\), address 0x\w+\) is not aligned to 16 bytes"),
        ("apart", r"the array \(strides \(208, 4\)"),
        ("down", r"the array \(strides \(2, 208\)"),
        ("at", r"columns from 4 of 72 are not multiples of 8"),
        ("before", r"columns from -4 of 72 are not multiples of 8"),
        ("columns", r"columns from 0 of 68 are not multiples of 8"),
    ],
)
@pytest.mark.parametrize("scope", [1, 4])
def test_a_broken_promise(case, words, scope):
    T, (y, at) = rt(16, 32, bf16), unaligned(case)
    before = y.copy()

    def by_one(y, x, row, col):
        store(y, load(x, T, (0, 0)), (row, col), aligned=True)

    def by_four(y, x, row, col):
        warpgroup.store(y, load(x, T, (0, 0)), (row, col), aligned=True)

    def load_by_one(y, x, row, col):
        load(y, T, (row, col), aligned=True)

    def load_by_four(y, x, row, col):
        warpgroup.load(y, T, (row, col), aligned=True)

    for verb, kernels in (("store", (by_one, by_four)), ("load", (load_by_one, load_by_four))):
        with pytest.raises(Hazard, match=f"aligned {verb}: {words}"):
            interpret(cuda.jit(kernels[scope == 4]), (1, 1, 1), 32 * scope, [y, np.zeros((16, 32), bf16.np), *at])
    assert np.array_equal(before.view(np.uint16), y.view(np.uint16))


def test_a_broken_promise_in_fp32():
    """fp32 columns are accessed by four."""
    T, y = rt(16, 32, fp32), guarded((16, 40), fp32, aligned=True)[0]

    @cuda.jit
    def body(y):
        load(y, T, (0, 2), aligned=True)

    with pytest.raises(Hazard, match="aligned load: columns from 2 of 40 are not multiples of 4"):
        interpret(body, (1, 1, 1), 32, [y])


def test_a_vector_of_elements_that_are_apart():
    T = rt(16, 32, fp32)

    @cuda.jit
    def body(y):
        load(y, T.row_vec, (0,), aligned=True)

    with pytest.raises(
        Hazard, match=r"aligned load: the elements of the array \(strides \(8,\)\) are not adjacent along axis -1"
    ):
        interpret(body, (1, 1, 1), 32, [np.zeros(64, np.float32)[::2]])


S = st(64, 32, bf16)
SMEM = tiles.shared(s=S)
T, COLUMN = rt(16, 32, fp32), rt(16, 32, bf16, "col")


def of_a_vector(h, f):
    store(h, load(f, T.row_vec, (0, 0)), (0, 0), aligned=True)


def loaded_pairs(h, f):
    load(h, T, (0, 0), aligned=4)


def pairs_of_fp32(h, f):
    store(f, load(f, T, (0, 0)), (0, 0), aligned=4)


def in_column_layout(h, f):
    store(h, load(h, COLUMN, (0, 0)), (0, 0), aligned=True)


def by_four_warps(h, f):
    warpgroup.store(h, warpgroup.load(f, COLUMN, (0, 0)), (0, 0), aligned=True)


def to_a_shared_tile(h, f):
    (s,) = SMEM.open()
    warpgroup.store(s, warpgroup.load(f, T, (0, 0)), aligned=True)


def loaded_columns(h, f):
    load(h, COLUMN, (0, 0), aligned=True)


def from_a_shared_tile(h, f):
    (s,) = SMEM.open()
    warpgroup.load(s, T, aligned=True)


TAKES = "aligned accesses take tiles in row layout, of fp8 if the array is, "
MISTAKES = {
    of_a_vector: f"store: {TAKES}got row_vec(32, fp32)",
    in_column_layout: f"store: {TAKES}got rt(16, 32, bf16, col)",
    by_four_warps: f"warpgroup.store: {TAKES}got rt(16, 32, bf16, col)",
    loaded_pairs: "load: aligned must be True, or for stores to bf16 and fp16 arrays one of 16, 8, 4, 2, got 4",
    pairs_of_fp32: "store: aligned must be True, or for stores to bf16 and fp16 arrays one of 16, 8, 4, 2, got 4",
    to_a_shared_tile: "warpgroup.store: `aligned` is for global arrays, got st(64, 32, bf16)",
    loaded_columns: f"load: {TAKES}got rt(16, 32, bf16, col)",
    from_a_shared_tile: "warpgroup.load: `aligned` is for global arrays, got st(64, 32, bf16)",
}


@pytest.mark.parametrize("backend", [meaning, ptx])
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes(backend, mistake):
    with pytest.raises(TypeError) as error:
        backend(cuda.jit(mistake), blank((64, 64), bf16), blank((64, 64)), warps=4, shared=SMEM)
    assert str(error.value).startswith(MISTAKES[mistake])
