"""Several warpgroups: ops/threads/warpgroups.py and ops/memory/zero_rows.py. They meet, zero rows, take turns, hand over."""

import functools

import numpy as np
import pytest
from numba import cuda

import tiles
from ops import load, ones, raw, store, subtile, warpgroup, zeros
from tiles import Hazard, bf16, fp16, fp32, ring, rt, st, tensor
from tiles.testing import blank, meaning

FIRST = pytest.mark.parametrize("first", [-1, 0, 5, 63, 64, 90])


@functools.cache
def clearing(cols, dtype, groups, ahead):
    """(kernel, its shared memory): rows from `first` on become 0, or those `ahead` of it; one kernel for any value."""
    S, T = st(64, cols, dtype), rt(16, cols, dtype)
    smem = tiles.shared(x=ring(S, 1, readers=4 * groups))

    @cuda.jit
    def body(x, y, first):
        (a,) = smem.open()
        if warpgroup.id() == 0:
            a.fill(0, x, (0, 0))
        tile = a.wait(0)
        if ahead:
            warpgroup.zero_first_rows(tile, first, groups)
        else:
            warpgroup.zero_rows(tile, first, groups)
        warpgroup.store(y, warpgroup.load(tile, T), (0, 0))

    return body, smem


def zeroed(run, sample, first, cols, dtype, groups, ahead=False):
    body, smem = clearing(cols, dtype, groups, ahead)
    x, y = sample((64, cols), dtype), blank((64, cols), dtype)
    gone = slice(None, max(first, 0)) if ahead else slice(max(first, 0), None)
    x[gone] = np.nan
    run(body, tensor(x, st(64, cols, dtype)), y, np.int32(first), warps=4 * groups, shared=smem)
    x[gone] = 0
    assert (y == x).all()


@FIRST
@pytest.mark.parametrize(("cols", "dtype"), [(64, bf16), (128, fp16), (16, bf16), (64, fp32)])
def test_zero_rows(run, sample, first, cols, dtype):
    zeroed(run, sample, first, cols, dtype, 1)


@FIRST
def test_zero_rows_of_two_warpgroups(run, sample, first):
    zeroed(run, sample, first, 128, bf16, 2)


@FIRST
@pytest.mark.parametrize("groups", [1, 2])
def test_zero_first_rows(run, sample, first, groups):
    zeroed(run, sample, first, 128, bf16, groups, ahead=True)


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
def test_meet(run, sample, groups):
    """The next warpgroup, and TMA without another fence, read what each warpgroup writes; a single one reads its own."""
    S, T = st(64 * groups, 64, bf16), rt(16, 64, bf16)
    smem = tiles.shared(x=S)

    @cuda.jit
    def body(x, y, z):
        (whole,) = smem.open()
        wg = warpgroup.id()
        warpgroup.store(subtile(whole, 64, wg), warpgroup.load(x, T, (64 * wg, 0)))
        warpgroup.sync_several(groups)
        neighbour = (wg + 1) % groups
        if cuda.threadIdx.x % 128 < 32:
            raw.tma_store(z, (neighbour, 0), subtile(whole, 64, neighbour))
            raw.store_wait()
        warpgroup.store(y, warpgroup.load(subtile(whole, 64, neighbour), T), (64 * neighbour, 0))

    x, y, z = sample(S.shape, bf16), blank(S.shape, bf16), blank(S.shape, bf16)
    run(body, x, y, tiles.tensor(z, st(64, 64, bf16)), warps=4 * groups, shared=smem)
    assert (y == x).all() and (z == x).all()


def test_seven_meet_and_the_eighth_by_itself(run):
    """sync_several and sync of one warpgroup use different barriers."""
    V = rt(16, 16, fp32).row_vec

    @cuda.jit
    def body(y):
        wg = warpgroup.id()
        if wg < 7:
            warpgroup.sync_several(7)
        else:
            warpgroup.sync()
        store(y, ones(V) * wg, (wg, 0))

    y = blank((8, 16))
    run(body, y, warps=32)
    assert (y == np.arange(8)[:, None]).all()


@pytest.mark.parametrize("groups", [0, 9])
def test_meetings_of_none_and_of_nine(run, groups):
    @cuda.jit
    def body():
        warpgroup.sync_several(groups)

    with pytest.raises(TypeError, match=f"sync_several: takes 1 to 8 warpgroups, got {groups}"):
        run(body, warps=4)


@pytest.mark.parametrize("players", [2, 3])
def test_turns_order_the_players(run, players):
    """Each player appends its number as a digit to base 4, in turn and without atomics."""
    turn, rounds = warpgroup.ping_pong(players), 4
    digits = rt(16, 16, fp32).col_vec

    @cuda.jit
    def body(log):
        wg = warpgroup.id()
        turn.begin(wg)
        for _ in range(rounds):
            turn.take(wg)
            if cuda.threadIdx.x % 128 < 32:
                store(log, load(log, digits, (0,)) * 4 + (wg + 1), (0,))
            warpgroup.sync()
            turn.give(wg)

    log = np.zeros(16, np.float32)
    run(body, log, warps=4 * players)
    want = 0
    for _ in range(rounds):
        for player in range(players):
            want = 4 * want + player + 1
    assert (log == np.float32(want)).all() and want < 2**24


@pytest.mark.parametrize("player", [-1, 3])
def test_a_player_that_there_is_not(player):
    turn = warpgroup.ping_pong(2)

    @cuda.jit
    def body(wg):
        turn.take(wg)

    with pytest.raises(Hazard, match=rf"ping_pong\(2 players\) has no player {player}"):
        meaning(body, player, warps=4)


def test_a_named_barrier_makes_some_warps_wait_for_others(run):
    """Warps 0 and 2 write what warps 1 and 3 read; each pair has a barrier of its own."""
    pair = warpgroup.named_barrier(2, first=2)
    smem = tiles.shared(rows=st(64, 16, fp32))
    row = rt(16, 16, fp32)

    @cuda.jit
    def body(x, y):
        rows, warp = smem.open().rows, warpgroup.rank()
        if warp % 2 == 0:
            store(subtile(rows, 16, warp), load(x, row, (16 * warp, 0)) * 2)
            pair.arrive(warp // 2)
        else:
            pair.sync(warp // 2)
            store(y, load(subtile(rows, 16, warp - 1), row), (16 * warp, 0))

    x, y = np.arange(1024, dtype=np.float32).reshape(64, 16), np.zeros((64, 16), np.float32)
    run(body, x, y, shared=smem, warps=4)
    assert (y[16:32] == 2 * x[:16]).all() and (y[48:] == 2 * x[32:48]).all()


def test_a_named_barrier_without_sync_is_a_race():
    smem = tiles.shared(rows=st(32, 16, fp32))

    @cuda.jit
    def body(y):
        rows, warp = smem.open().rows, warpgroup.rank()
        if warp == 0:
            store(subtile(rows, 16, 0), zeros(rt(16, 16, fp32)))
            warpgroup.named_barrier(2).arrive()
        elif warp == 1:
            store(y, load(subtile(rows, 16, 0), rt(16, 16, fp32)), (0, 0))

    with pytest.raises(Hazard):
        meaning(body, np.zeros((16, 16), np.float32), shared=smem, warps=4)


@pytest.mark.parametrize(("warps", "first"), [(1, 1), (2, 7), (2, 0)])
def test_named_barrier_refuses(warps, first):
    with pytest.raises(
        ValueError, match=f"named_barrier: 2 or more warps at barriers from 1 to 6, got {warps} from {first} on"
    ):
        warpgroup.named_barrier(warps, first)
