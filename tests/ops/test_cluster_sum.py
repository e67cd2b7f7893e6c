"""ops/cluster_sum.py: sums of tiles over the blocks of a cluster, sums along rows for all blocks; ops/grid.py."""

import contextlib

import numpy as np
import pytest
from numba import cuda

from ops import cluster, grid, load, store, warpgroup
from ops.cluster_sum import ClusterSum, RowSums
from tiles import Hazard, barrier, bf16, fp32, launch, rt, shared, st, tensor
from tiles.testing import blank


@pytest.mark.parametrize(("blocks", "warps", "rows"), [(2, 8, 32), (4, 4, 16)])
def test_a_tile_is_finished_once(run, sample, blocks, warps, rows):
    """y is the sum over blocks, each of which writes its share of the warps' tiles."""
    tile = rt(16, rows, fp32)
    total = ClusterSum(blocks, warps, tile)
    smem = shared(parts=total.parts, full=barrier(total.finishers))

    @cuda.jit
    def body(x, y, who):
        parts, full = smem.open()
        cluster.sync()
        acc = load(x, tile, (cluster.rank(), 16 * total.warp(), 0))
        total.send(acc, parts, full)
        if total.is_finisher():
            store(y, total.receive(acc, parts, full), (16 * total.warp(), 0))
            who[total.warp()] = cluster.rank()

    x, y, who = sample((blocks, 16 * warps, rows)), blank((16 * warps, rows)), blank(warps)
    run(body, x, y, who, warps=warps, shared=smem, cluster=blocks)
    np.testing.assert_allclose(y, x.sum(0), rtol=1e-5, atol=1e-6)
    assert (who == np.arange(warps) // (warps // blocks)).all()


@pytest.mark.parametrize(("blocks", "rows"), [(2, 16), (4, 32)])
def test_every_block_gets_the_sums(run, sample, blocks, rows):
    """The sums of a band of rows are added up over the warps of the band and over the blocks."""
    sums = RowSums(blocks, rows)
    smem = shared(parts=sums.parts, full=barrier(4))
    band = rt(16, 16, fp32).col_vec

    @cuda.jit
    def body(x, y):
        parts, full = smem.open()
        cluster.sync()
        sums.send(load(x, band, (cluster.rank(), warpgroup.rank(), 0)), parts, full)
        actual = sums.receive(parts, full)
        if warpgroup.rank() == 0:
            store(y, actual, (cluster.rank(), 0))

    x, y = sample((blocks, 4, 16)), blank((blocks, rows))
    run(body, x, y, warps=4, shared=smem, cluster=blocks)
    exact = x.reshape(-1, rows // 16, 16).sum(0).ravel()
    np.testing.assert_allclose(y, np.broadcast_to(exact, y.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("blocks", "rows"), [(2, 32), (4, 64)])
def test_a_band_s_sums(run, sample, blocks, rows):
    """A warp gets the sums of its own 16 rows, as for rows on wgmma's left."""
    sums = RowSums(blocks, rows)
    smem = shared(parts=sums.parts, full=barrier(4))
    band = rt(16, 16, fp32)

    @cuda.jit
    def body(x, y):
        parts, full = smem.open()
        cluster.sync()
        sums.send(load(x, band.col_vec, (cluster.rank(), warpgroup.rank(), 0)), parts, full)
        mine = warpgroup.rank() % sums.bands
        actual = sums.receive_band(mine, parts, full)
        if warpgroup.rank() < sums.bands:
            store(y, actual, (cluster.rank(), 16 * mine))

    x, y = sample((blocks, 4, 16)), blank((blocks, rows))
    run(body, x, y, warps=4, shared=smem, cluster=blocks)
    exact = x.reshape(-1, rows // 16, 16).sum(0).ravel()
    np.testing.assert_allclose(y, np.broadcast_to(exact, y.shape), rtol=1e-5, atol=1e-6)


def test_what_they_take():
    with pytest.raises(ValueError, match="blocks must divide the warps, got 3 and 4"):
        ClusterSum(3, 4, rt(16, 16, fp32))
    with pytest.raises(ValueError, match="16 rows of fp32"):
        ClusterSum(2, 4, rt(16, 16, bf16))


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("by_tma", [True, False])
def test_a_grid_that_overlaps_the_one_before_waits_before_it_stores(sample, waits, by_tma):
    """One warp of the block is enough, as others synchronise with it."""
    T, Y = rt(16, 16, fp32), st(64, 16, fp32)
    smem = shared(y=Y)

    @cuda.jit
    def body(x, y, gY):
        (tile,) = smem.open()
        if waits and cuda.threadIdx.x // 32 == 0:
            grid.wait()
        part = load(x, T, (0, 0))
        if by_tma:
            warpgroup.store(tile, part)
            warpgroup.tma_store(gY, (0, 0), tile)
            warpgroup.store_wait()
        else:
            warpgroup.sync()
            store(y, part, (0, 0))

    x, y = sample((16, 16)), blank((64, 16))
    arguments = x, y, tensor(y, Y)
    launch(body, 1, 128, shared=smem)(*arguments)
    expected = contextlib.nullcontext() if waits else pytest.raises(Hazard, match="grid.wait.. comes first")
    with expected:
        launch(body, 1, 128, shared=smem, overlaps_previous=True)(*arguments)


def test_a_grid_waits_and_releases(run, sample):
    T = rt(16, 16, fp32)

    @cuda.jit
    def body(x, y):
        grid.wait(cuda.blockIdx.x)
        grid.release()
        store(y, load(x, T, (0, 0)), (0, 0))

    x, y = sample((16, 16)), blank((16, 16))
    run(body, x, y)
    assert (y == x).all()
    with pytest.raises(TypeError, match="^grid.wait: `after` must be an integer, got float32"):
        run(cuda.jit(lambda x, y: grid.wait(x[0, 0])), x, y)
