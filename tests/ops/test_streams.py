"""ops/streams.py, and rings whose tiles are filled in parts: one kernel for every stream."""

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import cluster, warpgroup, zeros
from ops.streams import Converted, Dense, Paged, Ragged
from tiles import Hazard, bf16, fp8e4m3, fp32, ring, rt, shared, st, tensor
from tiles.compiling.compiler import compile_kernel
from tiles.interpreter import interpret
from tiles.launching.arguments import parameter
from tiles.testing import blank, close, wide

TILE, COUNT, PAGES = st(64, 64, bf16), 3, 4
PART, SUM = rt(16, 64, bf16), rt(16, 64, fp32)
PAGE = st(TILE.rows // PAGES, 64, bf16)


def sums(stream, place):
    """(kernel, shared memory): y = the sum of COUNT tiles that the stream loads, the j-th from place(j)."""
    smem = shared(k=ring(TILE, 2, readers=4, writers=stream.writers))

    @cuda.jit(launch_bounds=(256, 1))
    def body(source, rest, y):
        (k,) = smem.open()
        if warpgroup.id() == 1:
            for j in range(COUNT):
                stream.fill(k, j, source, place(j), rest)
        else:
            acc = zeros(SUM)
            for j in range(COUNT):
                acc = acc + fp32(warpgroup.load(k.wait(j), PART))
                k.release(j)
            warpgroup.store(y, acc, (0, 0))

    return body, smem


def agree(run, stream, place, source, rest, want):
    body, smem = sums(stream, place)
    y = blank((64, 64))
    run(body, source, rest, y, warps=8, shared=smem)
    close(y, want, atol=1e-5)


@tiles.inlined
def block(j):
    return (1, j, 2)


@tiles.inlined
def row_from_5(j):
    return (5 + 64 * j, 1, 0)


@tiles.inlined
def element(j):
    return (1, 64 * j, 2, 0)


@tiles.inlined
def row_of_second(j):
    return (1, 64 * j, 2)


def test_dense(run, sample):
    """The array's end cuts the last tile."""
    x = sample((2, 64 * COUNT - 7, 3, 64), bf16)
    whole = np.zeros((64 * COUNT, 64))
    whole[:-7] = wide(x[1, :, 2])
    agree(run, Dense(), block, tensor(x, TILE, 1, 3), 0, whole.reshape(COUNT, 64, 64).sum(0))


@pytest.mark.parametrize("heads", [True, False])
def test_paged(run, sample, heads):
    """Pages are in any order, one of them used twice."""
    table = np.random.default_rng(1).permutation(30)[: 2 * PAGES * COUNT].reshape(2, -1).astype(np.int32)
    table[1, 2] = table[1, 7]
    x = sample((30, 16, 3, 64), bf16)
    x = x if heads else x[:, :, 2]
    place = block if heads else tiles.inlined(lambda j: (1, j))
    want = wide(x[:, :, 2] if heads else x)[table[1]].reshape(COUNT, 64, 64).sum(0)
    agree(run, Paged(PAGES), place, tensor(x, PAGE, 1, x.ndim - 1), table, want)


@tiles.static
class Looked:
    """ring.fill_pages of a sequence from row `begin` to row `end`, its pages being of 32 rows, and a tile's parts of 16."""

    end: int
    begin: int | None = None
    writers = 0

    @tiles.inlined
    def fill(self, ring, j, source, at, rest):
        ring.fill_pages(j, source, rest, 32, at, self.end, PAGES, self.begin)


@pytest.mark.parametrize("numbers", [np.int32, np.int64])
@pytest.mark.parametrize(("end", "begin"), [(64 * COUNT, 48), (64 * COUNT - 70, 47), (1, None)])
def test_pages_that_are_looked_up(run, sample, numbers, end, begin):
    """A part of a tile is in one page; rows past the last used page, and before the first one, are 0, and their page numbers
    are not read."""
    x, used = sample((30, 32, 3, 64), bf16), -(-end // 32)
    table = np.full((2, 2 * COUNT), -7, numbers)
    table[1, :used] = np.random.default_rng(1).permutation(30)[:used]
    rows = np.zeros((64 * COUNT, 64))
    rows[: 32 * used] = wide(x[:, :, 2])[table[1, :used]].reshape(-1, 64)
    whole = -(-end // 16) * 16  # of a part that begins before the end all is brought
    rows[whole:] = 0
    if begin is not None:
        rows[: begin // 16 * 16], table[1, : begin // 32] = 0, -7
    agree(run, Looked(end, begin), row_of_second, tensor(x, PAGE, 1, 3, 1), table, rows.reshape(COUNT, 64, 64).sum(0))


@pytest.mark.parametrize("length", [64 * COUNT, 64 * COUNT - 1, 65, 0])
def test_ragged(run, sample, length):
    """The rows after a sequence belong to the next one, and are NaN here."""
    x = sample((5 + 64 * COUNT + 9, 2, 64), bf16)
    x[5 + length :] = np.nan
    whole = np.zeros((64 * COUNT, 64))
    whole[:length] = wide(x[5 : 5 + length, 1])
    agree(run, Ragged(TILE, 0, 2), row_from_5, x, 5 + length, whole.reshape(COUNT, 64, 64).sum(0))


def test_rows_before_the_array(run, sample):
    """Rows before the array are zeros; the memory there is NaN here."""
    x = sample((5 + 64 * COUNT, 2, 64), bf16)
    x[:5] = np.nan
    x = x[5:]
    want = np.concatenate([np.zeros((5, 64)), wide(x[:-5, 1])]).reshape(COUNT, 64, 64).sum(0)
    agree(run, Ragged(TILE, 0, 2), tiles.inlined(lambda j: (64 * j - 5, 1, 0)), x, 64 * COUNT, want)


@pytest.mark.parametrize("aligned", [False, True])
def test_converted(run, sample, aligned):
    x = sample((2, 64 * COUNT, 3, 64), fp8e4m3)
    scaled = wide((wide(x[1, :, 2]) * 0.375).astype(bf16.np))
    want = scaled.reshape(COUNT, 64, 64).sum(0)
    agree(run, Converted(TILE, fp8e4m3, 1, 3, aligned), element, x, 0.375, want)


BESIDE = st(64, 128, bf16)


@pytest.mark.parametrize("blocks", [1, 2])
def test_parts_of_columns(run, sample, blocks):
    """The left half of a tile comes from one place, the right half from another; each is loaded by one of two blocks, for
    both."""
    smem = shared(k=ring(BESIDE, 2, readers=4, blocks=blocks))

    @cuda.jit(launch_bounds=(256, 1))
    def body(source, y):
        (k,) = smem.open()
        if warpgroup.id() == 1:
            for j in range(COUNT):
                for half in range(2):
                    k.fill(j, source, (1, j, 2 * half), half, 2)
        else:
            acc = zeros(rt(16, 128, fp32))
            for j in range(COUNT):
                acc = acc + fp32(warpgroup.load(k.wait(j), rt(16, 128, bf16)))
                k.release(j)
            warpgroup.store(y, acc, (64 * cuda.blockIdx.x, 0))
        cluster.sync()

    x, y = sample((2, 64 * COUNT, 3, 64), bf16), blank((64 * blocks, 128))
    run(body, tensor(x, TILE, 1, 3), y, warps=8, shared=smem, cluster=blocks)
    close(y, np.vstack([np.hstack([wide(x[1, :, h]).reshape(COUNT, 64, 64).sum(0) for h in (0, 2)])] * blocks), atol=1e-5)


def test_equal_streams_are_equal():
    assert Paged(4) == Paged(4) != Paged(2) and hash(Paged(4)) == hash(Paged(4))
    assert Converted(TILE, fp8e4m3, 1, 3) != Ragged(TILE, 1, 3)


# ---- tiles in parts: broken ----------------------------------------------------------------------------------------
RING = shared(k=ring(TILE, 2, readers=4))


@tiles.inlined
def consume(k, count):
    for j in range(count):
        warpgroup.load(k.wait(j), PART)
        k.release(j)


ORDERS = {  # the parts that come for tiles 0 and 1: what is said
    "missing": (
        [(0, 0), (0, 1), (0, 3)],
        r"fills part 3 of tile 0 .*\(4 parts\), and the next for slot 0 is part 2 of 4 of tile 0",
    ),
    "twice": (
        [(0, 0), (0, 1), (0, 1)],
        "fills part 1 of tile 0 .*, and the next for slot 0 is part 2 of 4 of tile 0, by warp 4",
    ),
    "first": ([(0, 1), (0, 0)], "fills part 1 of tile 0 .*, and part 0, which waits for the slot, has not come"),
    "next tile": (
        [(0, 0), (0, 1), (0, 2), (2, 0)],
        "fills part 0 of tile 2 .*, and the next for slot 0 is part 3 of 4 of tile 0",
    ),
    "again": ([(0, 0), (0, 1), (0, 2), (0, 3), (0, 0)], "fills part 0 of tile 0 .*, and the next tile for slot 0 is number 2"),
    "too many": ([(0, 0), (0, 4)], "fills part 4 of tile 0 of ring 'k', which comes in parts 0 to 3"),
    "last": ([(0, 0), (0, 1), (0, 2)], r"nobody fills part 3 of 4 after the last \(warp 4, .*k.fill"),
}


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_parts_that_do_not_come_once_each_in_order(order, seed):
    parts, words = ORDERS[order]

    @cuda.jit
    def body(x):
        (k,) = RING.open()
        if warpgroup.id() == 1:
            for j, part in parts:
                k.fill(j, x, (part, 0), part, 4)
        else:
            consume(k, 2 if order == "next tile" else 1)

    x = np.zeros((64, 64), bf16.np)
    with pytest.raises(Hazard, match=words) as actual:
        interpret(body, (1, 1, 1), 256, [tensor(x, PAGE)], RING, seed)
    assert "k.fill(j, x, (part, 0), part, 4)" in str(actual.value)


def test_two_producers_of_one_tile():
    @cuda.jit
    def body(x):
        (k,) = RING.open()
        for part in range(4):
            if warpgroup.id() == part % 2:
                k.fill(0, x, (part, 0), part, 4)

    with pytest.raises(Hazard, match="fills part . of tile 0 "):
        interpret(body, (1, 1, 1), 256, [tensor(np.zeros((64, 64), bf16.np), PAGE)], RING)


def test_mistakes():
    def refused(words, smem, box, *how):
        @cuda.jit
        def body(x):
            smem.open()[0].fill(0, x, (0, 0), *how)

        x = tensor(np.zeros((64, 64), bf16.np), box)
        with pytest.raises(TypeError, match=words):
            interpret(body, (smem.blocks, 1, 1), 128, [x], smem, None, (smem.blocks, 1, 1))

    refused(
        r"fill: the ring holds st\(64, 64, bf16\) in parts of st\(16, 64, bf16\), the source gives st\(64", RING, TILE, 0, 4
    )
    refused("fill: 16 parts: a tile of one block is filled in parts of a multiple of 8 rows", RING, TILE, 0, 16)
    refused("fill: 4 parts: .* of a multiple of 64 columns", shared(k=ring(BESIDE, 2)), TILE, 0, 4)
    refused("fill: 0 parts", RING, TILE, 0, 0)
    refused("fill: the part's number must be an integer", RING, PAGE, 0.5, 4)
    refused("fill: 4 parts: a tile of one block", shared(k=ring(TILE, 2, blocks=2)), PAGE, 0, 4)


def test_mistakes_about_pages():
    def refused(error, words, box=PAGE, table=((3,),), size=64, row=0, parts=4, unit=1, smem=RING):
        @cuda.jit
        def body(x, table):
            smem.open()[0].fill_pages(0, x, table, size, (0, row), 64, parts)

        x = tensor(np.zeros((2, 64, 64), bf16.np), box, 1, 2, unit)
        with pytest.raises(error, match=words):
            interpret(body, (1, 1, 1), 128, [x, np.array(table)], smem)

    refused(Hazard, "row 0 of sequence 0 lies in page 3, which is out of range for a pool of 2 pages")
    refused(Hazard, "row 16 of sequence 0 lies in no page of a table of shape", table=((1,),), size=16)
    refused(Hazard, "rows 8 to 23 lie in two pages of 16 rows", table=((1, 1, 1, 1),), size=16, row=8)
    refused(TypeError, "fill_pages: takes a tensor .* whose rows are counted by one", unit=16)
    refused(TypeError, "fill_pages: takes int32 or int64 numbers", table=((1.0,),))
    refused(TypeError, "fill_pages: fills tiles of one block by TMA", smem=shared(k=ring(TILE, 2, writers=4)))
    refused(TypeError, "fill_pages: size and last must be integers", size=0.5)
    refused(TypeError, "fill: 3 parts", parts=3)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_paged_compiles_for_newer_gpus(arch):
    body, _ = sums(Paged(PAGES), block)
    inputs = tensor(np.zeros((30, 16, 3, 64), bf16.np), PAGE, 1, 3), np.zeros((2, 12), np.int32), blank((64, 64))
    actual = compile_kernel(body, [parameter(f"x{k}", a).type for k, a in enumerate(inputs)], arch)
    assert (actual.local_bytes, actual.spill_bytes, actual.warnings) == (0, 0, [])
