"""ops/memory/global_vectorized.py: without a promise the warp checks at run time: 16 bytes at a time where the array allows it,
else word by word, with the same numbers. (Promised accesses: test_global_vectorized.py.)"""

import re
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

import ops
from ops import load, store, warpgroup
from ops.memory.global_vectorized import suits
from tiles import bf16, fp8e4m3, fp8e5m2, fp16, fp32, rt
from tiles.compiling import sass
from tiles.compiling.compiler import Lowered, compile_kernel
from tiles.emulator import emulate
from tiles.launching.arguments import parameter
from tiles.testing import blank, guarded, pairs
from tiles.values import NUMBA_SCALARS

AT_ONCE = "ld.global.v4.b32", "st.global.v4.b32"
CASES = ["whole", "upwards", "address", "stride", "apart", "down", "clipped"]


def made(case, dtype):
    """A NaN-filled array that does or does not let 16 bytes move at once, and a check that nothing around it was touched."""
    if case == "stride":
        return guarded((37, 71), dtype)
    if case == "rows":  # an aligned address, and of 2 bytes an element rows 168 bytes apart
        memory, check = guarded((37 * 96,), dtype, aligned=True)
        return memory[: 37 * 84].reshape(37, 84)[:, :80], check
    view, check = guarded((37, 80), dtype, aligned=True)
    ways = {
        "whole": np.s_[:],
        "upwards": np.s_[::-1],
        "address": np.s_[:, 1:65],
        "apart": np.s_[:, ::2],
        "clipped": np.s_[:, :69],
    }
    return (view[:, :37].T if case == "down" else view[ways[case]]), check


def cut(array, at, shape):
    """The elements that a tile of this shape at `at` covers, zeros outside the array; and which part of the tile is inside."""
    out, inside = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for index in np.ndindex(*shape):
        there = tuple(np.add(index, at))
        if all(0 <= x < size for x, size in zip(there, array.shape, strict=True)):
            out[index], inside[index] = array[there], True
    return out, inside


PLACES = [(0, 0), (0, 3), (3, 16), (-3, -16), (-5, -7), (30, 32), (0, 1000), (90, 0)]
KINDS = [(fp32, bf16, 64), (fp16, fp32, 48), (bf16, bf16, 48), (fp8e5m2, fp8e4m3, 32), (fp32, fp32, 16)]  # tile, array, columns


@pytest.mark.parametrize(("case", "kind"), pairs(CASES, KINDS), ids=str)
def test_tiles_at_every_edge(run, sample, case, kind):
    tile_dtype, dtype, cols = kind
    T, n = rt(32 if dtype.itemsize == 1 else 16, cols, tile_dtype), len(PLACES)

    @cuda.jit
    def body(x, at, out, y):
        for i in range(n):
            tile = load(x, T, (at[i, 0], at[i, 1]))
            store(out, tile, (i, 0, 0))
            if i == at[n, 0]:
                store(y, tile, (at[n, 1], at[n + 1, 0]))

    for chosen, target in ((2, (-2, 3)), (0, (25, 40))):
        (x, _), (y, check), out = made(case, dtype), made(case, dtype), blank((n, *T.shape), dtype)
        x[...] = sample(x.shape, dtype)
        run(body, x, np.array([*PLACES, (chosen, target[0]), (target[1], 0)], np.int32), out, y)
        check()
        for i, at in enumerate(PLACES):
            want = dtype.round(tile_dtype.round(cut(x.astype(np.float32), at, T.shape)[0]).astype(np.float32))
            assert np.array_equal(out[i].astype(np.float32), want.astype(np.float32)), f"load at {at}"
        want, there = cut(out[chosen].astype(np.float32), np.negative(target), y.shape)
        assert np.array_equal(y.astype(np.float32), np.where(there, want, np.nan), equal_nan=True), f"store at {target}"
        if case != "clipped":
            break


FOUND = [  # the array, the tile's index, do 16 bytes go at once?
    ("whole", (0, 0), True),
    ("whole", (-3, -8), True),
    ("whole", (30, 72), True),
    ("whole", (0, 4), False),
    ("whole", (0, -4), False),
    ("upwards", (5, 8), True),
    ("address", (0, 0), False),
    ("address", (2, 7), False),  # the address is a multiple, but the array's end is between two columns of an access
    ("address", (2, -1), False),  # and here its beginning
    ("stride", (0, 0), False),
    ("rows", (0, 0), False),
    ("rows", (1, 4), False),
    ("apart", (0, 0), False),
    ("down", (0, 0), False),
    ("clipped", (0, 0), True),  # its end is beyond the tile
    ("clipped", (0, 8), False),
]


def test_which_way_is_taken(sample):
    T, most = rt(16, 64, fp32), 4

    @cuda.jit
    def body(x, row, col, y):
        store(y, load(x, T, (row, col)), (row, col))

    matrix = parameter("argument", made("whole", bf16)[0]).type
    lowered = Lowered(body, (matrix, types.int32, types.int32, matrix), "sm_90a")
    for case, at, at_once in FOUND:
        (x, _), (y, check) = made(case, bf16), made(case, bf16)
        x[...] = sample(x.shape, bf16)
        counts = emulate(body, (1, 1, 1), 32, (x, *at, y), lowered=lowered)
        check()
        inside = np.isfinite(y.astype(np.float32))
        assert inside.sum() == cut(y, at, T.shape)[1].sum() and (y[inside] == x[inside]).all()
        assert [counts.executed[way] for way in AT_ONCE] == [most * at_once] * 2, (case, at)


@pytest.mark.parametrize(("dtype", "length"), [(bf16, 96), (fp32, 48), (fp16, 48)])
def test_vectors(run, sample, dtype, length):
    """Of 48 halves a quad cannot hold a multiple of 32: element by element."""
    V, places = rt(16, length, fp32).row_vec, [0, 8, 3, -8, -5, 40, 200]
    n = len(places)

    @cuda.jit
    def body(x, at, out, y):
        for i in range(n):
            v = load(x, V, (at[i],))
            store(out, v, (i, 0))
            store(y, v, (i, at[i]))

    x, out, (y, check) = sample(96 + 16, dtype)[8:-8], blank((n, length), dtype), guarded((n, 80), dtype, aligned=True)
    counts = run(body, x, np.array(places, np.int32), out, y)
    check()
    for i, at in enumerate(places):
        assert np.array_equal(out[i].astype(np.float32), cut(x.astype(np.float32), (at,), (length,))[0]), at
        want, there = cut(out[i].astype(np.float32), (-at,), (80,))
        assert np.array_equal(y[i].astype(np.float32), np.where(there, want, np.nan), equal_nan=True), at
    if counts:
        assert (counts.executed[AT_ONCE[0]] > 0) == (counts.executed[AT_ONCE[1]] > 0) == (length * dtype.itemsize % 64 == 0)


def test_each_warp_looks_for_itself(run, sample):
    T = rt(16, 32, fp32)

    @cuda.jit
    def body(x, y, z):
        warp = cuda.threadIdx.x // 32
        store(y, load(x, T, (0, 9 * warp)), (16 * warp, 0))
        warpgroup.store(z, warpgroup.load(x, T, (1, 4)), (0, 4))

    (x, _), y, (z, check) = guarded((65, 64), fp32, aligned=True), blank((64, 32)), guarded((64, 36), fp32, aligned=True)
    x[...] = sample(x.shape)
    counts = run(body, x, y, z, warps=4)
    check()
    assert all((y[16 * w : 16 * w + 16] == x[:16, 9 * w : 9 * w + 32]).all() for w in range(4))
    assert (z[:, 4:] == x[1:, 4:36]).all() and np.isnan(z[:, :4]).all()
    if counts:
        assert counts.executed[AT_ONCE[0]] == 4 * (1 + 4)


def test_one_may_say_that_nobody_is_to_look(run, sample):
    T = rt(16, 16, fp32)

    @cuda.jit
    def body(x, y, z):
        store(y, load(x, T, (0, 0), aligned=False), (0, 0), aligned=None)
        store(z, load(x, T.row_vec, (1, 0), aligned=None), (0,), aligned=False)

    (x, _), (y, _), (z, _) = (guarded(shape, fp32, aligned=True) for shape in ((16, 16), (16, 16), (16,)))
    x[...] = sample(x.shape)
    counts = run(body, x, y, z)
    assert (y == x).all() and (z == x[1]).all()
    if counts:
        assert [counts.executed[way] for way in AT_ONCE] == [1, 2]


@pytest.mark.parametrize(
    ("layout", "axes", "rows", "cols", "tile", "vector"),
    [
        ("A", 3, -2, -1, True, True),
        ("C", 3, 0, 2, True, True),
        ("F", 3, 0, 2, False, False),
        ("F", 2, 0, 1, False, False),
        ("F", 1, 0, 0, False, True),
        ("A", 3, 2, 1, False, False),
        ("A", 3, 0, 1, True, False),
    ],
)
def test_what_types_say(layout, axes, rows, cols, tile, vector):
    array, T = types.Array(NUMBA_SCALARS[bf16.np], axes, layout), rt(16, 64, bf16)
    assert (suits(array, T, rows, cols), suits(array, T.row_vec, rows, cols)) == (tile, vector)
    assert not suits(array, rt(32, 64, fp8e4m3), rows, cols) and not suits(array, rt(16, 64, bf16, "col"), rows, cols)
    assert not suits(array, T.col_vec, rows, cols)


def rms_norm():
    """The kernel is read from the page docs/kernel.md."""
    text = (Path(__file__).parents[2] / "docs" / "kernel.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def rms_norm" in b)
    space = vars(ops) | {"np": np, "cuda": cuda, "rt": rt, "fp32": fp32, "bf16": bf16}
    source = block[block.index("ROWS = ") : block.index("\n\n\n", block.index("def rms_norm"))]
    exec(compile(source, "docs/kernel.md", "exec"), space)
    return space["rms_norm"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_rms_norm(arch):
    """Without any promise, all loads and stores but those of the word-by-word loops are of 128 bits."""
    x = np.zeros((16, 128), bf16.np)
    actual = compile_kernel(rms_norm(), [parameter("argument", a).type for a in (x, x[0], x, 1e-6)], arch)
    assert actual.registers <= 100 and not actual.spill_bytes and not actual.local_bytes
    code = [i.opcode for i in sass.listing(actual.cubin) if i.mnemonic in ("LDG", "STG")]
    whole = [opcode for opcode in code if ".128" in opcode]
    assert len(whole) == 3 * 8 + 4 and len(code) - len(whole) == 2 * len(whole)  # a round moves a word, two elements, of each
