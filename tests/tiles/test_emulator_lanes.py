"""What is a lane's own: the emulator asks each lane, and not the warp, who has told TMA, fenced and committed."""

from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

from ops import raw, store, zeros
from tiles import Hazard, bf16, fp32, rt, shared, st, tensor
from tiles.emulator import emulate
from tiles.emulator.barriers import the_lane
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
    assert the_lane(lanes(3), "the TMA load") == 3
    with pytest.raises(Hazard, match="the TMA load by 2 lanes: each would do it once"):
        the_lane(lanes(3, 4), "the TMA load")


def test_bulk_groups_are_a_lanes_own():
    """Who commits has no share in what another lane has started."""
    store = SimpleNamespace(lane=0)
    commit = meaning(SimpleNamespace(opcode="cp.async.bulk.commit_group"))
    other, own = (lanes(lane, stores=[store], store_groups=[]) for lane in (1, 0))
    commit(other)
    assert (other.stores, other.store_groups) == ([store], [])
    commit(own)
    assert (own.stores, own.store_groups) == ([], [[store]])
