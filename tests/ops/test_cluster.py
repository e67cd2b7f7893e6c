"""ops/cluster.py: ranks, the cluster's barrier, peers' shared memory, rings that blocks share."""

from collections import Counter

import numpy as np
import pytest
from banks import ways
from numba import cuda

import tiles
from ops import cluster, load, load_part_of_fragment, raw, store, subtile, warpgroup, zeros
from ops.cluster_sum import max_over_cluster, sum_over_cluster
from tiles import Hazard, barrier, bf16, fp8e4m3, fp8e5m2, fp16, fp32, ring, rt, shared, st, sv, tensor, tf32
from tiles.compiling import sass
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import parameter
from tiles.testing import blank, meaning, pairs, ptx, wide

DTYPES = [fp32, bf16, fp16, fp8e4m3, tf32, fp8e5m2]
SIDES = ["row", "col", "col", "row"]


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_ranks(run, blocks):
    T = rt(16, 16, fp32).row_vec

    @cuda.jit
    def body(y):
        store(y, zeros(T) + cluster.rank(), (cuda.blockIdx.x, 0))

    y = blank((blocks, 16))
    run(body, y, cluster=blocks)
    assert (y == np.arange(blocks)[:, None]).all()


@pytest.mark.parametrize(("dtype", "side", "blocks"), pairs(DTYPES, [*SIDES, *SIDES[1:]], [2, 4, 4]))
def test_every_block_stores_to_the_next_and_loads_from_it(run, sample, dtype, side, blocks):
    S, T, V = st(32, 64, dtype), rt(32, 64, dtype, side), rt(32, 64, dtype, side).col_vec
    smem = shared(first=sv(16, fp32), a=S, v=sv(32, dtype))

    @cuda.jit
    def body(x, down, up, vector, across):
        _, a, v = smem.open()
        rank = cluster.rank()
        right = (rank + 1) % blocks
        cluster.sync()
        cluster.store(cluster.map(a, right), load(x, T, (rank, 0, 0)))
        cluster.store(cluster.map(v, right), load(x, V, (rank, 0, 0)))
        cluster.arrive()
        cluster.wait()
        store(down, load(a, T), (rank, 0, 0))
        store(vector, load(v, V), (rank, 0))
        store(up, cluster.load(cluster.map(a, right), T), (rank, 0, 0))
        store(across, cluster.load(cluster.map(v, right), V), (rank, 0))
        cluster.sync()

    x = sample((blocks, 32, 64), dtype)
    down, up, vector, across = (
        blank(x.shape, dtype),
        blank(x.shape, dtype),
        blank((blocks, 32), dtype),
        blank((blocks, 32), dtype),
    )
    run(body, x, down, up, vector, across, shared=smem, cluster=blocks)
    x, down, up, vector, across = map(wide, (x, down, up, vector, across))
    assert (down == np.roll(x, 1, 0)).all() and (up == x).all()
    assert (vector == np.roll(x[:, 0, :32], 1, 0)).all() and (across == x[:, 0, :32]).all()


@pytest.mark.parametrize("blocks", [2, 4])
def test_numbers_of_all_blocks(run, blocks):
    """The sum and the maximum over blocks of several warps, twice."""
    smem, TILE = shared(parts=sv(16, fp32)), rt(16, 16, fp32)

    @cuda.jit
    def body(x, y):
        (parts,) = smem.open()
        cluster.sync()
        for n in range(2):
            value = x[cuda.blockIdx.x, n]
            total, greatest = sum_over_cluster(value, parts, blocks), max_over_cluster(value, parts, blocks)
            if warpgroup.rank() == 1:
                store(y, zeros(TILE) + total, (cuda.blockIdx.x, n, 0, 0, 0))
                store(y, zeros(TILE) + greatest, (cuda.blockIdx.x, n, 1, 0, 0))

    x, y = np.array([[-5, 8], [7, -2], [3, 0.5], [-6, 4]], np.float32)[:blocks], blank((blocks, 2, 2, 16, 16))
    run(body, x, y, warps=4, shared=smem, cluster=blocks)
    assert (y == np.stack([x.sum(0), x.max(0)], -1)[:, :, None, None]).all()


MESSAGES = [(fp32, "row"), (fp32, "col"), (bf16, "row"), (fp16, "row"), (fp8e5m2, "row"), (tf32, "col")]


@pytest.mark.parametrize(("dtype", "side"), MESSAGES)
def test_messages(run, sample, dtype, side):
    """Two blocks send each other tiles repeatedly: st.async to a barrier of the peer, and a signal once a tile was read."""
    S, T, N, rounds = st(16, 32, dtype), rt(16, 32, dtype, side), st(16, 32, dtype).nbytes, 5
    smem = shared(a=S, full=barrier(1), free=barrier(1))

    @cuda.jit
    def body(x, y):
        a, full, free = smem.open()
        rank = cluster.rank()
        cluster.sync()
        peer = 1 - rank
        for i in range(rounds):
            raw.expect(full, N)
            if i > 0:
                cluster.receive(free, i)
            cluster.store_async(cluster.map(a, peer), load(x, T, (rank, 16 * i, 0)), cluster.map(full, peer))
            cluster.receive(full, i + 1)
            store(y, load(a, T), (rank, 16 * i, 0))
            cluster.signal(cluster.map(free, peer))
        cluster.sync()

    x = sample((2, 16 * rounds, 32), dtype)
    y = blank(x.shape, dtype)
    run(body, x, y, shared=smem, cluster=2)
    assert (wide(y) == wide(x[::-1])).all()


@pytest.mark.parametrize(("dtype", "cols"), [(fp32, 16), (fp32, 48), (bf16, 32), (fp16, 64)])
def test_messages_in_the_order_of_lanes(run, sample, dtype, cols):
    """Four warps of each block send the peer a tile by 16 bytes a lane, without bank conflicts where it is loaded."""
    T, width = rt(16, cols, dtype), 128 // dtype.itemsize
    S = st(64 * cols // width, width, dtype)
    smem, rows = shared(a=S, full=barrier(4)), S.rows // 4

    @cuda.jit
    def body(x, y):
        a, full = smem.open()
        rank, warp = cluster.rank(), warpgroup.rank()
        cluster.sync()
        raw.expect(full, S.nbytes // 4)
        part = cluster.map(subtile(a, rows, warp), 1 - rank)
        cluster.store_fragment_async(part, load(x, T, (rank, 16 * warp, 0)), cluster.map(full, 1 - rank))
        cluster.receive(full, 1)
        store(y, warpgroup.load_shared_fragment(a, T), (rank, 16 * warp, 0))
        cluster.sync()

    x, y = sample((2, 64, cols), dtype), blank((2, 64, cols), dtype)
    run(body, x, y, warps=4, shared=smem, cluster=2)
    assert (wide(y) == wide(x[::-1])).all()
    counts = ptx(body, x, y, warps=4, shared=smem, cluster=2, arch="sm_90a")
    assert ways(counts, "ld.shared.v4") == {1}


def test_parts_of_a_message(run, sample):
    """One warp gets what each of a peer's four has sent."""
    T = rt(16, 64, bf16)
    S = st(64, 64, bf16)
    smem = shared(a=S, full=barrier())

    @cuda.jit
    def body(x, y):
        a, full = smem.open()
        rank, warp = cluster.rank(), warpgroup.rank()
        cluster.sync()
        part = cluster.map(subtile(a, 16, warp), 1 - rank)
        cluster.store_fragment_async(part, load(x, T, (rank, 16 * warp, 0)), cluster.map(full, 1 - rank))
        if warp == 1:
            raw.expect(full, S.nbytes)
            cluster.receive(full, 1)
            for i in range(4):
                store(y, load_part_of_fragment(subtile(a, 16, i), T), (rank, 16 * i, 0))
        cluster.sync()

    x, y = sample((2, 64, 64), bf16), blank((2, 64, 64), bf16)
    run(body, x, y, warps=4, shared=smem, cluster=2)
    assert (wide(y) == wide(x[::-1])).all()
    assert ways(ptx(body, x, y, warps=4, shared=smem, cluster=2, arch="sm_90a"), "ld.shared.v4") == {1}


def test_what_a_signal_says(run, sample):
    """A vector is sent, its bytes counted once though eight lanes hold each element; another is stored and signalled."""
    V, N = rt(16, 32, fp32).row_vec, sv(32, fp32).nbytes
    smem = shared(sent=sv(32, fp32), stored=sv(32, fp32), full=barrier(1), said=barrier(1))

    @cuda.jit
    def body(x, y):
        sent, stored, full, said = smem.open()
        rank = cluster.rank()
        peer = 1 - rank
        raw.expect(full, N)
        cluster.sync()
        cluster.store_async(cluster.map(sent, peer), load(x, V, (rank, 0)), cluster.map(full, peer))
        cluster.store(cluster.map(stored, peer), load(x, V, (rank, 0)))
        cluster.signal(cluster.map(said, peer))
        cluster.receive(full, 1)
        cluster.receive(said, 1)
        store(y, load(sent, V), (rank, 0, 0))
        store(y, load(stored, V), (rank, 1, 0))
        cluster.sync()

    x, y = sample((2, 32)), blank((2, 2, 32))
    run(body, x, y, shared=smem, cluster=2)
    assert (y == x[::-1, None]).all()


def test_a_peer_reads_what_tma_brings_again(run, sample):
    """TMA may overwrite a tile once the peer signals that it has loaded it."""
    S, T = st(16, 32, fp32), rt(16, 32, fp32)
    smem = shared(a=S, full=barrier(1), there=barrier(1), free=barrier(1))

    @cuda.jit
    def body(x, y):
        a, full, there, free = smem.open()
        cluster.sync()
        for i in range(2):
            if cluster.rank() == 0:
                if i > 0:
                    cluster.receive(free, i)
                raw.expect(full, S.nbytes)
                raw.tma_load(a, x, (i, 0), full)
                raw.wait(full, i + 1)
                cluster.signal(cluster.map(there, 1))
            else:
                cluster.receive(there, i + 1)
                store(y, cluster.load(cluster.map(a, 0), T), (16 * i, 0))
                cluster.signal(cluster.map(free, 0))
        cluster.sync()

    x, y = sample((32, 32)), blank((32, 32))
    run(body, tensor(x, S), y, shared=smem, cluster=2)
    assert (y == x).all()


@pytest.mark.parametrize(("dtype", "blocks", "width"), pairs([bf16, fp32, fp16], [2, 4], [128, 64]))
def test_a_ring_that_blocks_share(run, sample, dtype, blocks, width):
    """Each block loads its part of the rows for all; all see whole tiles, with zeros outside the array."""
    S, T, count = st(64, 64, dtype, width), rt(16, 64, dtype), 6
    smem = shared(first=st(8, 64, dtype), r=ring(S, 2, readers=4, blocks=blocks))

    @cuda.jit
    def body(x, y):
        _, r = smem.open()
        if warpgroup.id() == 0:
            for j in range(count):
                r.fill(j, x, (j // 2, j % 2))
        else:
            for j in range(count):
                warpgroup.store(y, warpgroup.load(r.wait(j), T), (cuda.blockIdx.x, 64 * (j // 2), 64 * (j % 2)))
                r.release(j)
        cluster.sync()

    x, y = sample((185, 120), dtype), blank((blocks, 192, 128), dtype)
    part = smem.items["r"].part
    assert part == st(64 // blocks, 64, dtype, width)
    run(body, tensor(x, part), y, warps=8, shared=smem, cluster=blocks)
    assert (y[:, :185, :120] == x).all() and (y[:, 185:] == 0).all() and (y[:, :, 120:] == 0).all()


# ---- what is refused -----------------------------------------------------------------------------------------------
A = shared(a=st(32, 64, bf16), v=sv(32, bf16), full=barrier(1))
R, C = rt(32, 64, bf16), rt(32, 64, bf16, "col")


@tiles.inlined
def peer(item):
    return cluster.map(item, 0)


REFUSED = {
    "a register tile": (
        lambda a, v, f: cluster.map(zeros(R), 0),
        r"cluster.map: takes a shared tile, vector or barrier, and a num",
    ),
    "not mapped": (
        lambda a, v, f: cluster.store(a, zeros(R)),
        r"takes a peer's shared tile or vector \(cluster.map\), got st\(32",
    ),
    "a barrier": (
        lambda a, v, f: cluster.load(peer(f), R),
        r"cluster.load: takes a peer's shared tile or vector .* remote barrier",
    ),
    "another shape": (
        lambda a, v, f: cluster.load(peer(a), rt(16, 64, bf16)),
        r"st\(32, 64, bf16\) does not hold rt\(16, 64, bf16",
    ),
    "bytes of what is not": (
        lambda a, v, f: cluster.load(peer(a), rt(32, 64, fp8e4m3)),
        r"st\(32, 64, bf16\) does not hold rt\(32, 64, fp8e4m3\): fp8 tiles are converted in registers",
    ),
    "no remote barrier": (lambda a, v, f: cluster.store_async(peer(a), zeros(R), f), "takes a peer's barrier .* got barrier"),
    "2 bytes": (lambda a, v, f: cluster.store_async(peer(a), zeros(C), peer(f)), "stores no less than 4 bytes, and lanes hold"),
    "a fragment and no remote barrier": (
        lambda a, v, f: cluster.store_fragment_async(peer(a), zeros(rt(16, 64, fp32)), f),
        "takes a peer's shared tile and barrier .* got remote st.* and barrier",
    ),
    "a fragment for another tile": (
        lambda a, v, f: cluster.store_fragment_async(peer(a), zeros(rt(16, 64, fp32)), peer(f)),
        "store_fragment_async: takes a shared tile of 32 rows and 32 columns of fp32",
    ),
    "a signal": (
        lambda a, v, f: cluster.signal(f),
        r"cluster.signal: takes a peer's barrier \(cluster.map\), got barrier\(1\)",
    ),
    "a peer's message": (
        lambda a, v, f: cluster.receive(peer(f), 1),
        "receive: takes a barrier of this block and a number of pha",
    ),
    "read by an op": (
        lambda a, v, f: load(peer(a), R),
        "load: the source must be a shared tile or vector, or a global array, got rem",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    use, words = tiles.inlined(REFUSED[case][0]), REFUSED[case][1]

    @cuda.jit
    def body():
        a, v, f = A.open()
        use(a, v, f)

    with pytest.raises(TypeError, match=words):
        meaning(body, shared=A)


def test_rings_that_cannot_be_shared():
    with pytest.raises(
        ValueError, match=r"ring: 1 to 8 blocks share a tile, by multiples of 8 rows, got 3 for st\(64, 64, bf16\)"
    ):
        ring(st(64, 64, bf16), 2, blocks=3)
    with pytest.raises(ValueError, match="ring: 1 to 8 blocks share a tile, by multiples of 8 rows, got 16"):
        ring(st(256, 64, bf16), 2, blocks=16)
    with pytest.raises(ValueError, match="ring: what warps write stays in their block"):
        ring(st(64, 64, bf16), 2, writers=4, blocks=2)
    with pytest.raises(ValueError, match="shared: a ring is for all blocks of a cluster or for one"):
        shared(a=ring(st(64, 64, bf16), 2, blocks=2), b=ring(st(64, 64, bf16), 2, blocks=4))


def test_the_launch_and_the_plan_agree():
    smem = shared(a=ring(st(64, 64, bf16), 2, blocks=2))
    with pytest.raises(ValueError, match=r"launch: shared\(.*\) is for clusters of 2 blocks, got cluster=None"):
        tiles.launch(cuda.jit(lambda: None), 2, 32, shared=smem)
    with pytest.raises(ValueError, match="cluster=4"):
        tiles.launch(cuda.jit(lambda: None), 4, 32, shared=smem, cluster=4)


def test_a_shared_ring_wants_tensors_of_parts():
    S = st(64, 64, bf16)
    smem = shared(r=ring(S, 2, blocks=2))

    @cuda.jit
    def body(x):
        (r,) = smem.open()
        r.fill(0, x, (0, 0))

    words = r"fill: the ring holds .* in parts of st\(32, 64, bf16\), the source gives st\(64, 64, bf16\); pass tiles.tensor"
    for backend in (meaning, ptx):
        with pytest.raises(TypeError, match=words):
            backend(body, tensor(np.zeros((64, 64), bf16.np), S), warps=4, shared=smem, cluster=2)


def test_giving_a_shared_slot_back_costs_no_fence():
    """An arrival that releases to the cluster waits for all of the GPU's memory (a GEMM then runs at two thirds of its speed);
    who has only read need not. One TMA instruction brings a part to all blocks."""
    S, T = st(64, 64, bf16), rt(16, 64, fp32)
    smem = shared(a=ring(S, 2), r=ring(S, 2, blocks=2))
    try:
        sass.nvdisasm()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))

    @cuda.jit(launch_bounds=(256, 1))
    def body(x, y, out, steps):
        a, r = smem.open()
        if warpgroup.id() == 0:
            for j in range(steps):
                a.fill(j, x, (j, 0))
                r.fill(j, y, (j, 0))
        else:
            acc = zeros(T)
            for j in range(steps):
                acc = warpgroup.wait(warpgroup.mma_ABt(acc, a.wait(j), r.wait(j)))
                a.release(j)
                r.release(j)
            warpgroup.store(out, acc, (0, 0))
        cluster.sync()

    x = blank((64, 64), bf16)
    args = tensor(x, S), tensor(x, smem.items["r"].part), blank((64, 64)), 1
    actual = compile_kernel(body, [parameter("an argument", a).type for a in args], "sm_90a").cubin
    loop = {i.opcode for i in sass.main_loop(actual)}
    assert any(opcode.startswith("HGMMA") for opcode in loop) and "SYNCS.ARRIVE.TRANS64.RED.A1T0" in loop
    assert not any(opcode.startswith(("MEMBAR", "ERRBAR", "FENCE")) for opcode in loop)
    loads = Counter(i.opcode for i in sass.listing(actual) if i.mnemonic == "UTMALDG")
    assert set(loads) == {"UTMALDG.2D", "UTMALDG.2D.MULTICAST"} and len({*loads.values()}) == 1


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_block_that_the_cluster_has_not(rank):
    smem = shared(first=sv(16, fp32), a=st(16, 64, fp32))

    @cuda.jit
    def body(rank):
        _, a = smem.open()
        cluster.map(a, rank)
        cluster.sync()

    with pytest.raises(Hazard, match=f"there is no block {rank} in a cluster of 2 blocks"):
        meaning(body, rank, shared=smem, cluster=2)


def test_bytes_that_count_at_another_block():
    """A tile of the next block's memory, and a barrier of this block."""
    S, T = st(16, 64, fp32), rt(16, 64, fp32)
    smem = shared(first=sv(16, fp32), a=S, full=barrier(1))

    @cuda.jit
    def body():
        _, a, full = smem.open()
        cluster.sync()
        cluster.store_async(cluster.map(a, 1 - cluster.rank()), zeros(T), cluster.map(full, cluster.rank()))
        cluster.sync()

    with pytest.raises(Hazard, match="bytes: stores to .* of block .*, and counts on barrier 'full' of block"):
        meaning(body, shared=smem, cluster=2)
