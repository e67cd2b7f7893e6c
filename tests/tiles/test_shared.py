"""Shared memory as the host lays it out, and rings as plain arithmetic."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from numba import cuda
from numpy import float32, int32

from ops import load, store, warpgroup, zeros
from tiles import Hazard, barrier, bf16, fp32, inlined, ring, rt, shared, st, sv, tensor
from tiles.shared import ALIGN, BARRIER_BYTES
from tiles.testing import meaning, ptx

TILES = some.builds(
    lambda rows, cols, dtype: st(8 * rows, 16 * cols, dtype),
    some.integers(1, 24),
    some.integers(1, 12),
    some.sampled_from([bf16, fp32]),
)
VECTORS = some.builds(lambda n, dtype: sv(16 * n, dtype), some.integers(1, 16), some.sampled_from([bf16, fp32]))
ITEMS = some.one_of(
    TILES,
    VECTORS,
    some.builds(ring, VECTORS, some.integers(1, 5)),
    some.builds(ring, TILES, some.integers(1, 5), some.integers(1, 12)),
    some.builds(barrier, some.integers(1, 9)),
)


def regions(plan):
    """(start, end, alignment) of every tile and barrier."""
    for name, item in plan.items.items():
        if isinstance(item, ring):
            for s in range(item.stages):
                yield (
                    item.slot(s),
                    item.slot(s) + item.tile.nbytes,
                    min(item.tile.stage_bytes & -item.tile.stage_bytes, item.tile.align),
                )
            yield item.start, item.start, item.tile.align
            yield item.barriers, item.barriers + 2 * BARRIER_BYTES * item.stages, BARRIER_BYTES
        else:
            size, align = (BARRIER_BYTES, BARRIER_BYTES) if isinstance(item, barrier) else (item.nbytes, item.align)
            yield plan.starts[name], plan.starts[name] + size, align


@given(some.lists(ITEMS, min_size=1, max_size=6))
def test_nothing_overlaps_and_all_is_aligned(items):
    plan = shared(**{f"item{k}": item for k, item in enumerate(items)})
    placed = sorted(regions(plan))
    for start, _, align in placed:
        assert start % align == 0
    for (_, end, _), (start, _, _) in itertools.pairwise(placed):
        assert end <= start
    assert placed[-1][1] <= plan.nbytes - ALIGN, "the kernel may have to move its base up by less than that"
    assert plan.barriers == sum(2 * i.stages if isinstance(i, ring) else isinstance(i, barrier) for i in items)
    tiles = sum(i.stages * i.tile.nbytes if isinstance(i, ring) else getattr(i, "nbytes", 0) for i in items)
    assert plan.nbytes <= tiles + ALIGN * (len(items) + 1) + BARRIER_BYTES * plan.barriers, "no more than alignment is lost"


@given(TILES.filter(lambda tile: tile.nbytes % ALIGN), some.integers(2, 4))
def test_every_slot_of_a_ring_is_aligned_for_its_swizzle(tile, stages):
    """The swizzle XORs address bits: a tile must begin at a multiple of eight rows of its panels."""
    plan = shared(r=ring(tile, stages))
    assert all(plan.items["r"].slot(s) % (8 * tile.width) == 0 for s in range(stages))


def test_every_slot_of_a_ring_of_vectors_is_where_tma_can_begin():
    plan = shared(r=ring(sv(16, fp32), 3))
    assert [plan.items["r"].slot(s) for s in range(3)] == [0, 128, 256]


def test_the_jth_tile_goes_round():
    r = shared(a=st(8, 64, bf16), r=ring(st(64, 64, bf16), 3)).items["r"]
    assert [r.slot(j) for j in range(7)] == [1024 + 8192 * (j % 3) for j in range(7)]


def test_a_plan_is_a_value():
    make = lambda n: shared(q=ring(st(64, 64, bf16), n), full=barrier(1))
    assert make(2) == make(2) and hash(make(2)) == hash(make(2)) and make(2) != make(3)
    assert str(make(2)) == "shared(q=ring(st(64, 64, bf16), 2 stages, 4 readers), full=barrier(1))"


def test_a_notebook_shows_a_plan_and_a_tensor():
    plan = shared(a=ring(st(64, 64, bf16), 2), b=sv(64, fp32))
    assert repr(plan) == str(plan) == "shared(a=ring(st(64, 64, bf16), 2 stages, 4 readers), b=sv(64, fp32))"
    assert repr(tensor(np.zeros((8, 64), bf16.np), st(64, 64, bf16))) == "tensor(an array of shape (8, 64), st(64, 64, bf16))"


@pytest.mark.parametrize("item", [rt(16, 16, fp32), 64, "q"])
def test_only_rings_tiles_and_barriers_lie_in_shared_memory(item):
    with pytest.raises(TypeError, match="shared: x must be a ring, a pipeline, an st, an sv or a barrier, got"):
        shared(x=item)


@pytest.mark.parametrize("stages, readers", [(0, 4), (2, 0), (-1, 4)])
def test_rings_have_stages_and_readers(stages, readers):
    with pytest.raises(ValueError, match=f"ring: stages and readers must be positive, got {stages} and {readers}"):
        ring(st(64, 64, bf16), stages, readers)


@pytest.mark.parametrize("backend", [meaning, ptx])
def test_all_warps_open_it(backend):
    """All warps meet in open(), so one that skips it is a deadlock."""
    smem = shared(x=sv(16, fp32))

    @cuda.jit
    def body():
        if cuda.threadIdx.x < 32:
            smem.open()

    with pytest.raises(Hazard, match="named barrier 0, where 32 of 64 threads have arrived") as actual:
        backend(body, warps=2, shared=smem)
    assert actual.value.kind == "deadlock"


@pytest.mark.parametrize("backend", [meaning, ptx])
def test_items_have_their_names(backend):
    """By name in the kernel and in what it calls, whatever their order; a part of them by position."""
    plan = shared(first=st(16, 16, fp32), second=sv(16, fp32), third=st(16, 16, fp32))

    @inlined
    def swap(memory):
        return memory.third, memory.first

    @cuda.jit
    def body(x, y):
        memory = plan.open()
        a, b = swap(memory)
        store(a, load(x, T, (0, 0)))
        store(b, load(x, T, (0, 0)) * 2.0)
        cuda.syncthreads()
        store(y, load(memory.third, T) + load(memory[2], T) + load(memory[0], T), (0, 0))

    T = rt(16, 16, fp32)
    x, y = np.arange(256, dtype=np.float32).reshape(16, 16), np.zeros((16, 16), np.float32)
    backend(body, x, y, shared=plan)
    assert (y == 4 * x).all()


@pytest.mark.parametrize("backend", [meaning, ptx])
def test_a_copy_for_each_warpgroup(backend):
    """What one stores in its tile, or brings to its ring, the other does not see."""
    TILE, T = st(64, 16, fp32), rt(16, 16, fp32)
    plan = shared(x=TILE, r=ring(TILE, 1), full=barrier(1)).per_warpgroup(2)

    @cuda.jit
    def body(x, y):
        tile, r, _ = plan.open()
        group = warpgroup.id()
        r.fill(0, x, (group, 0))
        warpgroup.store(tile, zeros(T) + float32(group))
        warpgroup.sync()
        total = warpgroup.load(tile, T) + warpgroup.load(r.wait(0), T)
        r.release(0)
        warpgroup.store(y, total, (int32(64 * group), 0))

    x = np.arange(128 * 16, dtype=np.float32).reshape(128, 16)
    y = np.zeros_like(x)
    backend(body, tensor(x, TILE), y, warps=8, shared=plan)
    assert (y[:64] == x[:64]).all() and (y[64:] == x[64:] + 1).all()
    with pytest.raises(Hazard, match="a block of 4 warps opens .* 2 times, which is for 2 warpgroups"):
        meaning(body, tensor(x, TILE), y, warps=4, shared=plan)


def test_copies_do_not_overlap():
    plan = shared(x=st(16, 16, fp32), r=ring(sv(16, fp32), 3), full=barrier(1))
    copies = plan.per_warpgroup(3)
    starts = [[start for *_, start in copies.copied_items(n)] for n in range(3)]
    assert all(b - a == copies.copy_bytes for x, y in itertools.pairwise(starts) for a, b in zip(x, y, strict=True))
    assert copies.copy_bytes % ALIGN == 0 and plan.nbytes - ALIGN <= copies.copy_bytes
    assert copies.nbytes == plan.nbytes + 2 * copies.copy_bytes and copies.barriers == 3 * plan.barriers
    assert plan.per_warpgroup(1) is plan and copies != plan and copies == plan.per_warpgroup(3) != plan.per_warpgroup(2)
    with pytest.raises(ValueError, match="1 or more; got 0 of"):
        plan.per_warpgroup(0)
    with pytest.raises(ValueError, match="got 2 of shared.* 3 times"):
        copies.per_warpgroup(2)
