"""Broken kernels of clusters: peers' shared memory too early, too late, unordered; barriers of the cluster; shared rings. See
test_hazards.py for how they are told."""

import pytest
from broken import Cases, R, S, check
from numba import cuda

from ops import cluster, load, raw, store, warpgroup, zeros
from tiles import Hazard, barrier, bf16, ring, shared, st
from tiles.interpreter import interpret

broken = Cases()
PAIR = shared(x=S, full=barrier(1))
BOTH = shared(r=ring(st(64, 64, bf16), 2, readers=4, blocks=2))  # filled by warpgroups 0, read by warpgroups 1


# ---- too early, too late -------------------------------------------------------------------------------------------
@broken(
    "lifetime",
    r"reaches for shared memory in block \(1, 0, 0\), and nothing orders this after that block's `smem.open",
    0,
    PAIR,
    32,
)
def peer_not_there_yet():
    x, full = PAIR.open()
    if cluster.rank() == 0:
        cluster.store(cluster.map(x, 1), zeros(R))  # guilty
    cluster.sync()


@broken("lifetime", "writes shared tile 'x' in block .*, and nothing orders that block's end after this", 0, PAIR, 32)
def peer_may_have_ended():
    x, full = PAIR.open()
    cluster.sync()
    if cluster.rank() == 0:
        cluster.store(cluster.map(x, 1), zeros(R))  # guilty


@broken("lifetime", "arrives on barrier 'full' in block .*, and nothing orders that block's end after this", 0, PAIR, 32)
def signal_to_one_that_may_have_ended():
    x, full = PAIR.open()
    cluster.sync()
    if cluster.rank() == 0:
        cluster.signal(cluster.map(full, 1))  # guilty


@broken(
    "lifetime", "arrives on 'empty' of slot . of ring 'r' in block .*, and nothing orders that block's end", range(4, 8), BOTH
)
def ends_without_its_peer(halves):
    (r,) = BOTH.open()
    if warpgroup.id() == 0:
        for j in range(4):
            r.fill(j, halves, (j, 0))
    else:
        for j in range(4):
            warpgroup.load(r.wait(j), R)
            r.release(j)  # guilty


# ---- unordered -----------------------------------------------------------------------------------------------------
@broken(
    "race", "(reads|writes) shared tile 'x', and nothing orders this after the (read|write) of shared tile 'x'", 0, PAIR, 32
)
def read_while_a_peer_writes():
    x, full = PAIR.open()
    store(x, zeros(R))
    cluster.sync()
    if cluster.rank() == 0:
        cluster.store(cluster.map(x, 1), zeros(R))  # guilty
    else:
        load(x, R)  # guilty
    cluster.sync()


@broken("never written", "reads shared tile 'x', which nobody has written", 0, PAIR, 32)
def written_at_home_only():
    x, full = PAIR.open()
    cluster.sync()
    if cluster.rank() == 0:
        store(x, zeros(R))
    cluster.sync()
    if cluster.rank() == 1:
        load(x, R)  # guilty


@broken(
    {"in flight", "never written"},
    "reads shared tile 'x', (and nothing orders this after the end of the store|which nobody)",
    0,
    PAIR,
    32,
)
def message_read_before_it_came():
    x, full = PAIR.open()
    cluster.sync()
    if cluster.rank() == 0:
        cluster.store_async(cluster.map(x, 1), zeros(R), cluster.map(full, 1))
    else:
        raw.expect(full, S.nbytes)
        load(x, R)  # guilty
        cluster.receive(full, 1)
    cluster.sync()


@broken("unfinished", "nobody has waited for the store to shared tile 'x'", 0, PAIR, 32)
def message_nobody_waits_for():
    x, full = PAIR.open()
    cluster.sync()
    if cluster.rank() == 0:
        cluster.store_async(cluster.map(x, 1), zeros(R), cluster.map(full, 1))  # guilty
    else:
        raw.expect(full, S.nbytes)
    cluster.sync()


@broken(
    "bytes", r"stores to shared tile 'x'.* of block \(1, 0, 0\), and counts on barrier 'full' of block \(0, 0, 0\)", 0, PAIR, 32
)
def message_that_counts_elsewhere():
    x, full = PAIR.open()
    cluster.sync()
    if cluster.rank() == 0:
        cluster.store_async(cluster.map(x, 1), zeros(R), cluster.map(full, 0))  # guilty
    cluster.sync()


# ---- the cluster's barrier -----------------------------------------------------------------------------------------
@broken(
    "deadlock", r"the cluster's barrier, where 1 of 2 warps have arrived; lacking are some of block \(1, 0, 0\)", 0, PAIR, 32
)
def one_block_stays_away():
    PAIR.open()
    if cluster.rank() == 0:
        cluster.sync()  # guilty


@broken("arrivals", "arrives on the cluster's barrier once more, and has not waited since", 0, PAIR, 32)
def arrives_twice():
    PAIR.open()
    cluster.arrive()
    cluster.arrive()  # guilty
    cluster.wait()


@broken("wait", "waits on the cluster's barrier, and has not arrived", 0, PAIR, 32)
def waits_without_arriving():
    PAIR.open()
    cluster.wait()  # guilty


@broken("bounds", "there is no block 2 in a cluster of 2 blocks", 0, PAIR, 32)
def no_such_peer():
    x, full = PAIR.open()
    cluster.sync()
    cluster.map(x, 2)  # guilty


# ---- rings that blocks share ---------------------------------------------------------------------------------------
@broken(
    "deadlock",
    r"the slot for tile 2 of ring 'r': tile 0 of ring 'r' lies there and was released by 4 of 8 readers",
    (0, *range(4, 8)),
    BOTH,
)
def only_one_block_releases(halves):
    (r,) = BOTH.open()
    if warpgroup.id() == 0:
        for j in range(3):
            r.fill(j, halves, (j, 0))  # guilty
    else:
        for j in range(3):
            warpgroup.load(r.wait(j), R)  # guilty
            if cluster.rank() == 0:
                r.release(j)
    cluster.sync()  # guilty


@broken("deadlock", "tile 0 of ring 'r': nobody fills it", (0, *range(4, 8)), BOTH)
def only_one_block_fills(halves):
    (r,) = BOTH.open()
    if warpgroup.id() == 0:
        if cluster.rank() == 0:
            r.fill(0, halves, (0, 0))
    else:
        warpgroup.load(r.wait(0), R)  # guilty
        r.release(0)
    cluster.sync()  # guilty


@broken.sweep
def test_stops(case, seed):
    check(case, seed, blocks=2)


def test_a_plan_for_pairs_needs_pairs():
    def kernel():
        BOTH.open()

    with pytest.raises(Hazard, match="is for clusters of 2 blocks, and the launch has clusters of 1"):
        interpret(cuda.jit(kernel), (1, 1, 1), 256, [], BOTH)
