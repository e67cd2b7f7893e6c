"""ops/memory/async_copy.py and tiles.pipeline: cp.async by one warp and by all of a block."""

import numpy as np
import pytest
from banks import ways
from cut_tiles import DTYPES, PLACES, WIDTHS, cut
from numba import cuda

import tiles
from ops import commit_group, copy_async, copy_pages, load, look_up, store, subtile, truncate, wait_group, warpgroup
from tiles import bf16, fp8e4m3, fp16, fp32, inlined, int8, pipeline, ring, rt, st, sv
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import parameter
from tiles.testing import blank, pairs, ptx


def padded(x, columns, skip=0):
    """x inside an array of poison with so many columns, so that rows begin at multiples of as many bytes; the first `skip`
    columns are not part of it."""
    root = np.full((x.shape[0], columns), 7, x.dtype)
    root[:, skip : skip + x.shape[1]] = x
    return root[:, skip : skip + x.shape[1]]


SHAPES = [*pairs(WIDTHS, [*DTYPES, fp8e4m3, int8], [16, 8, 4, 16]), (128, bf16, 2), (64, fp16, 2), (32, bf16, 2)]


@pytest.mark.parametrize(("width", "dtype", "vector_bytes"), SHAPES)
def test_tiles_ragged_on_every_side(run, sample, width, dtype, vector_bytes):
    """Tiles begin at each multiple of vector_bytes, also left of the array; a panel, or part of a chunk, may lie before it."""
    S, T, step = st(16, 64, dtype, min(width, 64 * dtype.itemsize)), rt(16, 64, dtype), max(vector_bytes // dtype.itemsize, 1)
    aligned = [(row, col // step * step) for row, col in (*PLACES, (0, -1), (1, -43))]
    n = len(aligned)
    smem = tiles.shared(a=S)

    @cuda.jit
    def body(x, at, out):
        (a,) = smem.open()
        for i in range(n):
            copy_async(a, x, (at[i, 0], at[i, 1]), vector_bytes=vector_bytes)
            commit_group()
            wait_group()
            store(out, load(a, T), (i, 0, 0))
            cuda.syncthreads()

    x = padded(sample((37, 45), dtype), 64 + (vector_bytes == 2), skip=vector_bytes // dtype.itemsize)
    out = blank((n, 16, 64), dtype)
    run(body, x, np.array(aligned, np.int32), out, shared=smem)
    for i, at in enumerate(aligned):
        assert (out[i] == cut(x, at, (16, 64))).all(), f"at {at}"


@pytest.mark.parametrize(("warps", "stages", "width"), pairs([1, 2, 4], [1, 2, 3, 4], [128, 64, 32]))
def test_a_pipeline_brings_every_tile(run, sample, warps, stages, width):
    """A pipeline loads tiles along axes 1 and 3 of four; the last tile is ragged, and the groups after it are empty."""
    S, count = st(16 * warps, 64, bf16, width), 6
    smem = tiles.shared(first=st(8, 64, bf16), k=pipeline(S, stages, warps))
    whole = rt(S.rows, 64, bf16)
    rows, ahead, newer = S.rows, stages - 1, max(stages - 2, 0)

    @cuda.jit
    def body(x, out):
        _, k = smem.open()
        for j in range(max(ahead, 1)):
            k.fill(j, x, (1, j * rows, 2, 0), rows=1, cols=3, end=count)
        for j in range(count):
            tile = k.wait(j, newer)
            if ahead:
                k.fill(j + ahead, x, (1, (j + ahead) * rows, 2, 0), rows=1, cols=3, end=count)
            store(out, load(tile, whole), (j * rows, 0))
            if ahead == 0:
                cuda.syncthreads()
                k.fill(j + 1, x, (1, (j + 1) * rows, 2, 0), rows=1, cols=3, end=count)

    x, out = sample((2, rows * count - 5, 3, 64), bf16), blank((rows * count, 64), bf16)
    run(body, x, out, warps=warps, shared=smem)
    assert (out[:-5] == x[1, :, 2]).all() and (out[-5:] == 0).all()


@pytest.mark.parametrize(
    ("size", "vector_bytes", "dtype"), [(1, 16, np.int32), (5, 4, np.int64), (16, 2, np.int32), (100, 8, np.int32)]
)
def test_rows_that_lie_in_pages(run, sample, size, vector_bytes, dtype):
    """Of two sequences, each in pages of its own in any order, from any row on: every warp reads its own rows, meeting nobody.
    Neither rows past the end nor the numbers of their pages are read; columns behind a page's are zeros."""
    S, stages, columns, last = st(32, 128, bf16), 2, 72, 75
    count, most = 3, -(-80 // size)
    smem = tiles.shared(k=pipeline(S, stages, 2))

    @cuda.jit
    def body(pool, pages, out):
        (k,) = smem.open()
        warp = cuda.threadIdx.x // 32
        for j in range(stages):
            actual = k.look_up(pages, pool.shape[1], (1, 3 + 32 * j), last)
            k.fill_pages(j, pool, actual, (3 + 32 * j, 2, 0), last, count, vector_bytes)
        for j in range(count):
            store(out, load(k.wait_warp(j, stages - 1), rt(16, 128, bf16)), (32 * j + 16 * warp, 0))
            cuda.syncwarp()
            actual = k.look_up(pages, pool.shape[1], (1, 3 + 32 * (j + stages)), last)
            k.fill_pages(j + stages, pool, actual, (3 + 32 * (j + stages), 2, 0), last, count, vector_bytes)

    pool = np.full((2 * most + 1, size, 3, columns + 8), np.nan, bf16.np)[..., vector_bytes // 2 : vector_bytes // 2 + columns]
    rows, pages = sample((last, columns), bf16), np.full((2, most), -(2**20), dtype)
    used = -(-last // size)
    pages[1, :used] = np.random.default_rng(1).permutation(2 * most + 1)[:used]
    for n, row in enumerate(rows):
        pool[pages[1, n // size], n % size, 2] = row
    out = blank((32 * count, 128), bf16)
    run(body, pool, pages, out, warps=2, shared=smem)
    assert (out[: last - 3, :columns] == rows[3:]).all()
    assert (out[last - 3 :] == 0).all() and (out[:, columns:] == 0).all()


@pytest.mark.parametrize(("size", "warps"), pairs([None, 1, 5, 64], [1, 2]))
def test_vectors_of_numbers_any_stride_apart(run, sample, size, warps):
    """A lane brings a number: dense or, of sequence 1, in pages in any order. Those behind the end are 0, and neither they nor
    their pages' numbers are read."""
    length, count, last, stages = 48 * warps, 3, 48 * warps + 21, 2
    smem = tiles.shared(first=st(8, 64, bf16), d=pipeline(sv(length, fp32), stages, warps))
    PAGED, OWN = size is not None, rt(16, 48, fp32).row_vec

    @inlined
    def fill(d, j, x, pages):
        if PAGED:
            actual = d.look_up(pages, x.shape[1], (1, 2 + length * j), last)
            d.fill_pages(j, x, actual, (2 + length * j, 1), last, count)
        else:
            d.fill(j, truncate(x, 1, last), (1, 2 + length * j, 1), cols=1, end=count)

    @cuda.jit
    def body(x, pages, out):
        _, d = smem.open()
        warp = cuda.threadIdx.x // 32
        for j in range(stages):
            fill(d, j, x, pages)
        for j in range(count):
            store(out, load(d.wait_warp(j, stages - 1), OWN), (length * j + 48 * warp,))
            cuda.syncwarp()
            fill(d, j + stages, x, pages)

    numbers = sample((last,), fp32)
    most = -(-last // (size or 1))
    pages = np.full((2, most), -(2**20), np.int32)
    if size is None:
        x = np.full((2, last + 9, 3), np.nan, np.float32)
        x[1, :last, 1] = numbers
    else:
        x = np.full((2 * most + 1, size, 2), np.nan, np.float32)
        pages[1] = np.random.default_rng(1).permutation(len(x))[:most]
        for n, number in enumerate(numbers):
            x[pages[1, n // size], n % size, 1] = number
    out = blank((length * count,), fp32)
    run(body, x, pages, out, warps=warps, shared=smem)
    assert (out[: last - 2] == numbers[2:]).all() and (out[last - 2 :] == 0).all()


@pytest.mark.parametrize("size", [1, 5, 16, 100])
def test_warps_gather_rows_for_others(run, sample, size):
    """Each a quarter of a ring's tile, which a warpgroup multiplies once all have published theirs. Page numbers of the first
    rows are not read."""
    S, COUNT, LAST, BEGIN = st(64, 64, bf16), 3, 150, 20
    PART, ACC = st(16, 64, bf16), rt(16, 64, fp32)
    smem = tiles.shared(one=S, k=ring(S, 2, 4, writers=4))

    @cuda.jit
    def body(x, pool, pages, out):
        one, k = smem.open()
        if warpgroup.id() == 0:
            warpgroup.store(one, warpgroup.load(x, rt(16, 64, bf16), (0, 0)))
            warpgroup.sync()
            for j in range(COUNT):
                warpgroup.store(out, warpgroup.wait(warpgroup.mm_ABt(one, k.wait(j))), (64 * j, 0))
                k.release(j)
        else:
            rank = warpgroup.rank()
            for j in range(COUNT):
                row = 64 * j + 16 * rank
                actual = look_up(PART, pages, pool.shape[1], (1, row), LAST, BEGIN)
                copy_pages(subtile(k.claim(j), 16, rank), pool, actual, (row, 0), LAST)
                commit_group()
                wait_group()
                k.publish(j)

    most = -(-LAST // size)
    x, rows, pages = sample((64, 64), bf16), sample((LAST, 64), bf16), np.full((2, most), -(2**20), np.int32)
    pages[1] = np.random.default_rng(1).permutation(2 * most)[:most]
    pool = np.full((2 * most, size, 64), np.nan, bf16.np)
    for n, row in enumerate(rows):
        pool[pages[1, n // size], n % size] = row
    pages[1, : BEGIN // size] = -(2**20)
    out = blank((64 * COUNT, 64), fp32)
    run(body, x, pool, pages, out, warps=8, shared=smem)
    expected = np.zeros((64 * COUNT, 64), np.float32)
    for j in range(COUNT):
        part = rows[64 * j : 64 * (j + 1)].astype(np.float32)
        expected[64 * j : 64 * (j + 1), : len(part)] = x.astype(np.float32) @ part.T
    out[:64, :BEGIN] = expected[:64, :BEGIN]
    np.testing.assert_allclose(out, expected, rtol=2**-20, atol=2**-16)


def test_what_a_pipeline_of_vectors_refuses():
    for vector, warps in (sv(64, bf16), 2), (sv(64, fp32), 8):
        with pytest.raises(ValueError, match="of a vector a warp copies a multiple of 16 numbers of 4 bytes"):
            pipeline(vector, 2, warps)


def test_memory_that_is_used_again(run, sample):
    """After all tiles are read, a tile of another type uses the same memory."""
    smem = tiles.shared(first=st(8, 64, bf16), k=pipeline(st(32, 64, bf16), 2, 2))
    ROOM = st(32, 64, fp32)

    @cuda.jit
    def body(x, out):
        _, k = smem.open()
        k.fill(0, x, (0, 0))
        mine = load(k.wait_warp(0), rt(16, 64, bf16))
        cuda.syncthreads()
        room = k.reuse(ROOM)
        store(subtile(room, 16, cuda.threadIdx.x // 32), fp32(mine))
        cuda.syncthreads()
        store(out, load(subtile(room, 16, 1 - cuda.threadIdx.x // 32), rt(16, 64, fp32)), (16 * (cuda.threadIdx.x // 32), 0))

    x, out = sample((32, 64), bf16), blank((32, 64), fp32)
    run(body, x, out, warps=2, shared=smem)
    assert (out == np.concatenate([x[16:], x[:16]])).all()


def test_shares_of_fewer_rows_than_a_warp_copies_at_once(run, sample):
    """Eight rows per warp, where 32 lanes copy sixteen of 32 bytes; one row of the second tile lies outside."""
    S = st(32, 16, bf16)
    smem = tiles.shared(k=pipeline(S, 2, 4))

    @cuda.jit
    def body(x, out):
        (k,) = smem.open()
        for j in range(2):
            k.fill(j, x, (32 * j, 0))
        for j in range(2):
            store(out, load(k.wait(j), rt(32, 16, bf16)), (32 * j, 0))

    x, out = sample((63, 16), bf16), blank((64, 16), bf16)
    run(body, x, out, warps=4, shared=smem)
    assert (out[:63] == x).all() and (out[63:] == 0).all()


def test_a_warps_copy_asks_each_bank_once(sample):
    S = st(32, 64, bf16)
    smem = tiles.shared(a=S)

    @cuda.jit
    def body(x):
        (a,) = smem.open()
        copy_async(a, x, (0, 0))

        commit_group()
        wait_group()

    assert ways(ptx(body, sample((32, 64), bf16), shared=smem), "cp.async") == {1}


TURNS = {"backwards": np.s_[::-1], "every third row, backwards": np.s_[::-3], "one row for all": None}


@pytest.mark.parametrize("vector_bytes", [16, 4, 2])
@pytest.mark.parametrize("turn", TURNS)
def test_rows_in_any_order(run, sample, turn, vector_bytes):
    """Strides are negative or 0, in whole tiles and in ragged ones."""
    S, skip = st(16, 64, bf16), vector_bytes // 2
    smem = tiles.shared(a=S)

    @cuda.jit
    def body(x, out):
        (a,) = smem.open()
        for i in range(2):
            copy_async(a, x, (16 * i, 0), vector_bytes=vector_bytes)
            commit_group()
            wait_group()
            store(out, load(a, rt(16, 64, bf16)), (16 * i, 0))
            cuda.syncthreads()

    root = padded(sample((90, 64), bf16), 64 + 8 * 2 + (vector_bytes == 2), skip)
    x = np.broadcast_to(root[:1], (25, 64)) if TURNS[turn] is None else root[TURNS[turn]][:25]
    assert x.strides[0] <= 0
    out = blank((32, 64), bf16)
    run(body, x, out, shared=smem)
    assert (out[:25] == x).all() and (out[25:] == 0).all()


@pytest.mark.parametrize("vector_bytes", [16, 2])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_pipelines_compile_for_every_gpu(arch, vector_bytes):
    S = st(64, 128, bf16)
    smem = tiles.shared(k=pipeline(S, 2, 4))

    @cuda.jit
    def body(x, n):
        (k,) = smem.open()
        k.fill(0, x, (0, 0), end=n, vector_bytes=vector_bytes)
        k.wait(0)

    actual = compile_kernel(body, [parameter("x", blank((64, 128), bf16)).type, parameter("n", 1).type], arch)
    assert (actual.local_bytes, actual.spill_bytes, actual.warnings) == (0, 0, [])


def refused(body, words, *args):
    with pytest.raises(TypeError, match=words):
        ptx(body, *args, arch="sm_80")


def test_mistakes():
    S = st(16, 64, bf16)
    smem = tiles.shared(a=S)

    @cuda.jit
    def dtype(x):
        copy_async(smem.open()[0], x, (0, 0))

    @cuda.jit
    def index(x):
        copy_async(smem.open()[0], x, (0,))

    @cuda.jit
    def vector_bytes(x):
        copy_async(smem.open()[0], x, (0, 0), vector_bytes=6)

    WORDS = tiles.shared(a=st(16, 64, fp32))

    @cuda.jit
    def half(x):
        copy_async(WORDS.open()[0], x, (0, 0), vector_bytes=2)

    refused(dtype, "the source must be a global array of bf16", blank((16, 64), fp32))
    refused(index, "`at` must be 2 integers", blank((16, 64), bf16))
    refused(vector_bytes, r"vector_bytes must be one of \(16, 8, 4, 2\) bytes for bf16, got 6", blank((16, 64), bf16))
    refused(half, r"vector_bytes must be one of \(16, 8, 4\) bytes for fp32, got 2", blank((16, 64), fp32))
    with pytest.raises(ValueError, match="each warp copy as many rows, got 2 stages and 3 warps"):
        pipeline(S, 2, 3)
