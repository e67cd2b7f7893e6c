"""Lanes that part; and what is a lane's own: the emulator asks each lane, and not the warp, who has told TMA, fenced and
committed."""

from types import SimpleNamespace

import numpy as np
import pytest
from emulated import each_thread, execute, stops
from numba import cuda

from ops import raw, store, zeros
from tiles import Hazard, bf16, fp32, rt, shared, st, tensor
from tiles.emulator import emulate
from tiles.emulator.barriers import only_lane
from tiles.emulator.table import meaning

S = st(16, 64, bf16)
SMEM = shared(x=S)


def test_a_fence_is_a_lanes_own():
    """What the other lanes wrote it does not order before TMA's reads."""

    @cuda.jit
    def take_by_one(target):
        (x,) = SMEM.open()
        store(x, zeros(rt(16, 64, fp32)))
        if cuda.threadIdx.x == 0:
            raw.fence_async()
        cuda.syncwarp()
        raw.tma_store(target, (0, 0), x)
        raw.store_wait()

    with pytest.raises(Hazard) as caught:
        emulate(take_by_one, (1, 1, 1), 32, [tensor(np.zeros((16, 64), bf16.np), S)], SMEM)
    assert caught.value.kind == "fence"


def lanes(*active, **more):
    """A warp of which these lanes are active."""
    mask = np.isin(np.arange(32), active)
    return SimpleNamespace(mask=mask, hazard=lambda cause, kind="bounds": Hazard(kind, cause), **more)


def test_tma_is_told_by_one_lane():
    assert only_lane(lanes(3), "the TMA load") == 3
    with pytest.raises(Hazard, match="the TMA load by 2 lanes: each would do it once"):
        only_lane(lanes(3, 4), "the TMA load")


def test_bulk_groups_are_a_lanes_own():
    """Who commits has no share in what another lane has started."""
    store = SimpleNamespace(lane=0)
    commit = meaning(SimpleNamespace(opcode="cp.async.bulk.commit_group"))
    other, owner = (lanes(lane, stores=[store], store_groups=[]) for lane in (1, 0))
    commit(other)
    assert (other.stores, other.store_groups) == ([store], [])
    commit(owner)
    assert (owner.stores, owner.store_groups) == ([], [[store]])


# ---- lanes that part -----------------------------------------------------------------------------------------------
@cuda.jit
def collatz(x, steps):
    i = cuda.grid(1)
    if i >= x.shape[0]:
        return
    n = x[i]
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps[i] += 1


@cuda.jit
def triangle(out):
    """A loop in a loop, each as long as the lane says, with ways out of both."""
    i, total = cuda.threadIdx.x, 0
    for a in range(i):
        if a == 20:
            break
        for b in range(a):
            if b == i % 7:
                continue
            total += a * b
    out[i] = total


def collatz_of(n):
    steps = 0
    while n != 1:
        n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
    return steps


def test_each_lane_goes_its_own_way():
    x, steps = np.arange(1, 81, dtype=np.int32), np.zeros(80, np.int32)
    emulate(collatz, (3, 1, 1), 32, [x, steps])
    assert steps.tolist() == [collatz_of(n) for n in range(1, 81)]
    out = np.zeros(64, np.int64)
    emulate(triangle, (1, 1, 1), 64, [out])
    assert out.tolist() == [sum(a * b for a in range(min(i, 20)) for b in range(a) if b != i % 7) for i in range(64)]


def test_a_side_runs_for_its_lanes_alone():
    """A predicate, then a branch: what the others held stays, and both sides are counted."""
    out = np.zeros(32, np.uint32)
    body = """
    .reg .pred p; .reg .b32 x;
    setp.lt.u32 p, %t, 10;
    mov.b32 x, 1;
    @p mov.b32 x, 2;
    @p bra low;
    add.u32 x, x, 10;
    bra over;
    low: add.u32 x, x, 20;
    over: add.u32 x, x, 100;
    st.global.b32 [%p0], x;
    """
    counts = execute(each_thread("u4", 0) + body, out)
    assert out.tolist() == [122] * 10 + [111] * 22
    assert counts.executed["add.u32"] == 3


@pytest.mark.parametrize("what", ["bar.warp.sync 0xffffffff;", "bar.sync 0;", "shfl.sync.bfly.b32 x, x, 1, 31, -1;"])
def test_half_a_warp_cannot_meet(what):
    body = f".reg .pred p; .reg .b32 x; mov.b32 x, %t;\nsetp.lt.u32 p, %t, 16;\n@p bra over;\n{what}\nover:"
    actual = stops(
        "divergence", "takes all lanes of a warp, and lanes 0 .. are elsewhere", execute, body, np.zeros(32, np.uint32)
    )
    assert what[:-1] in actual.line
