"""tiles/emulator: whole kernels, instructions that are more than arithmetic, counts, orders. (Lanes that part: see
test_emulator_lanes.py; what is forbidden: test_emulator_limits.py; the text and the flow: test_emulator_text.py; arithmetic:
test_emulator_arithmetic.py; kernels that are wrong as compiled: test_emulator_hazards.py.)"""

import functools
from collections import Counter

import correct
import numpy as np
import pytest
from emulated import SHARED, assemble, each_thread, execute, stops, written
from numba import cuda, float32, int8
from test_emulator_arithmetic import CASES

from ops import cluster, commit_group, copy_async, load, mma_ABt, raw, store, transpose, wait_group, warpgroup, zeros
from tiles import barrier, bf16, fp32, rt, shared, st, sv, tensor
from tiles.emulator import emulate, table

SEEDS = [None, 1, 2]
LANE = np.arange(32)
KERNELS = {name: check for name, check in vars(correct).items() if name.startswith("check_")}
F, ROW = rt(16, 32, fp32), st(16, 32, fp32)
MESSAGE = shared(tile=ROW, full=barrier(1), free=barrier(1))
PLAN = shared(x=st(16, 64, bf16), full=barrier(1))  # 2048 bytes from 1040 on, and a barrier


# ---- whole kernels -------------------------------------------------------------------------------------------------
@functools.cache
def counted(name, seed=None):
    """What a correct kernel executes; it gives the right numbers."""
    seen = Counter()

    def run(*args):
        seen.update(emulate(*args).executed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(correct, "interpret", run)
        KERNELS[name](seed)
    return seen


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", [None, 1, pytest.param(2, marks=pytest.mark.release)])
def test_correct_kernels(name, seed):
    """TMA, wgmma, rings, clusters: no false alarm in any order."""
    assert counted(name, seed)


B = rt(16, 64, bf16)


@cuda.jit
def by_a_warp(x, product, turned):
    """x x' by mma.sync, and x transposed, of what cp.async has brought."""
    tile, _ = PLAN.open()
    copy_async(tile, x, (0, 0))
    commit_group()
    wait_group()
    cuda.syncwarp()
    a = load(tile, B)
    store(product, mma_ABt(zeros(rt(16, 16, fp32)), a, tile), (0, 0))
    store(turned, transpose(a), (0, 0))


@pytest.mark.parametrize("seed", SEEDS)
def test_tiles_before_and_behind_the_array_are_zeros(seed):
    """To the sides of a middle one, too, beside which memory goes on."""
    T = rt(16, 64, bf16)

    @cuda.jit
    def body(x, down, across):
        tile, full = PLAN.open()
        for j in range(6):
            raw.expect(full, 2048)
            raw.tma_load(tile, x, (j - 1, 0) if j < 3 else (0, j - 4), full)
            raw.wait(full, j + 1)
            if j < 3:
                store(down, load(tile, T), (16 * j, 0))
            else:
                store(across, load(tile, T), (0, 64 * (j - 3)))

    x = np.random.default_rng(0).standard_normal((48, 192)).astype(bf16.np)
    down, across = np.zeros((48, 64), bf16.np), np.zeros((16, 192), bf16.np)
    emulate(body, (1, 1, 1), 32, [tensor(x[16:32, 64:128], st(16, 64, bf16)), down, across], PLAN, seed)
    nothing = np.zeros((16, 64), bf16.np)
    assert (down == np.vstack([nothing, x[16:32, 64:128], nothing])).all()
    assert (across == np.hstack([nothing, x[16:32, 64:128], nothing])).all()


@functools.cache
def count_a_warps(arch, seed):
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(bf16.np)
    product, turned = np.zeros((16, 16), np.float32), np.zeros((64, 16), bf16.np)
    counts = emulate(by_a_warp, (1, 1, 1), 32, [x, product, turned], PLAN, seed, arch=arch)
    np.testing.assert_allclose(product, x.astype(np.float32) @ x.astype(np.float32).T, rtol=1e-5, atol=1e-5)
    assert (turned == x.T).all()
    return counts


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_warps_kernel(arch, seed):
    """Counted: four steps of 16 along k for two halves of 8 columns."""
    counts = count_a_warps(arch, seed)
    assert sum(n for opcode, n in counts.executed.items() if opcode.startswith("mma.sync")) == 8
    assert counts.ways["cp.async.cg.shared.global"] == 1


@cuda.jit
def by_a_pair(x, y):
    """Each block sends its numbers to the other, which says when it has read them."""
    tile, full, free = MESSAGE.open()
    rank = cluster.rank()
    cluster.sync()
    raw.expect(full, ROW.nbytes)
    cluster.store_async(cluster.map(tile, 1 - rank), load(x, F, (rank, 0, 0)), cluster.map(full, 1 - rank))
    cluster.receive(full, 1)
    store(y, load(tile, F), (rank, 0, 0))
    cluster.signal(cluster.map(free, 1 - rank))
    cluster.receive(free, 1)
    cluster.sync()


@functools.cache
def count_a_pairs(seed):
    x = np.random.default_rng(0).standard_normal((2, 16, 32)).astype(np.float32)
    y = np.zeros_like(x)
    counts = emulate(by_a_pair, (2, 1, 1), 32, [x, y], MESSAGE, seed, (2, 1, 1))
    assert (y == x[::-1]).all()
    return counts


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pairs_kernel(seed):
    assert count_a_pairs(seed).executed["mapa.shared::cluster.u32"]


@pytest.mark.parametrize("threads", [0, 48, 1056])
def test_blocks_are_whole_warps(threads):
    with pytest.raises(ValueError, match=f"threads: a multiple of 32 up to 1024, got {threads}"):
        emulate(by_a_pair, (1, 1, 1), threads, [])


# ---- instructions that are more than arithmetic ----------------------------------------------------------------------
def shuffled(how, by, width):
    """Where CUDA's shuffles take a lane's number from."""
    first, last = LANE // width * width, LANE // width * width + width - 1
    source = {"bfly": LANE ^ by, "idx": first + by % width, "up": LANE - by, "down": LANE + by}[how]
    return np.where((source >= first) & (source <= last), source, LANE)


x, y, z = (np.random.default_rng(seed).integers(0, 2**32, 32, np.uint32) for seed in range(3))
halves = x[:, None].view(np.uint16)
matrix = halves.reshape(8, 8)
TWO = x[:, None].view(np.uint16).astype(np.uint32)
SNIPPETS = {  # name: (PTX that makes o of x and y and the thread's number, what o must be, for one warp)
    "parts of a register": (".reg .b16 l, h; mov.b32 {l, h}, x; mov.b32 o, {h, l};", TWO[:, 1] | TWO[:, 0] << 16),
    "one part of a register": (".reg .b16 h; mov.b32 {_, h}, x; cvt.u32.u16 o, h;", TWO[:, 1]),
    "two in one of 64 bits": (".reg .b64 w; .reg .b32 k; mov.b64 w, {x, y}; mov.b64 {k, o}, w;", y),
    "an address in generic memory": (
        ".reg .b64 g, s; cvta.to.global.u64 g, %a0; cvta.global.u64 s, g; mad.wide.u32 s, %t, 4, s; ld.b32 o, [s];", x),
    "signs are kept": (".reg .b64 s; mad.wide.u32 s, %t, 4, %a0; ld.global.s8 o, [s];", x.astype(np.int8).astype(np.uint32)),
    "zeros are put before": (".reg .b64 s; mad.wide.u32 s, %t, 4, %a0; ld.global.u16 o, [s+2];", TWO[:, 1]),
    "four at once": (
        ".reg .b64 s; .reg .b32 a, b, c; and.b32 a, %t, 28; mad.wide.u32 s, a, 4, %a0; ld.global.v4.b32 {a, b, c, o}, [s];",
        x[LANE // 4 * 4 + 3]),
    "shared memory": (
        ".reg .b32 s, l; mov.u32 s, dynamic_smem; mad.lo.u32 l, %t, 4, s; st.shared.b32 [l], x; bar.warp.sync -1;"
        "xor.b32 l, %t, 16; mad.lo.u32 l, l, 4, s; ld.shared.b32 o, [l];", x[LANE ^ 16]),
    "ballot": (".reg .pred p; setp.gt.u32 p, x, y; vote.sync.ballot.b32 o, p, -1;", np.full(32, (x > y) @ (1 << LANE))),
    "any": (".reg .pred p, q; setp.eq.u32 p, %t, 5; vote.sync.any.pred q, p, -1; selp.u32 o, 1, 0, q;", np.ones(32)),
    "all": (".reg .pred p, q; setp.ne.u32 p, %t, 5; vote.sync.all.pred q, p, -1; selp.u32 o, 1, 0, q;", np.zeros(32)),
    "a block's vote": (".reg .pred p, q; setp.eq.u32 p, %t, 5; bar.red.or.pred q, 1, 32, p; selp.u32 o, 1, 0, q;", np.ones(32)),
    "movmatrix": (
        "movmatrix.sync.aligned.m8n8.trans.b16 o, x;", np.ascontiguousarray(matrix.T).reshape(32, 2).view(np.uint32)[:, 0]),
    "numbers of the thread": (
        ".reg .b32 k; mov.u32 o, %ntid.x; mov.u32 k, %laneid; mad.lo.u32 o, o, 100, k; mov.u32 k, %nctaid.y; add.u32 o, o, k;",
        3201 + LANE),
    "sums in memory": (
        ".reg .b64 s; .reg .b32 h; .reg .f32 c; shr.u32 h, %t, 1; mad.wide.u32 s, h, 4, %a2; mov.f32 c, 0f3F800000;"
        "red.global.add.f32 [s], c; bar.warp.sync -1; ld.global.b32 o, [%p2];", np.where(LANE < 16, 0x40000000, 0)),
    "four sums at once": (
        ".reg .b64 s; .reg .b32 h; .reg .f32 c; shr.u32 h, %t, 3; mad.wide.u32 s, h, 16, %a2; mov.f32 c, 0f3F800000;"
        "red.global.add.v4.f32 [s], {c, c, c, c}; bar.warp.sync -1; ld.global.b32 o, [%p2];",
        np.where(LANE < 16, 0x41000000, 0)),
    "nothing that shows": (
        "prefetch.global.L2 [%a0]; fence.acq_rel.gpu; griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 o, x;", x),
    "an mbarrier that goes": (
        ".reg .b32 s; .reg .pred p; mov.u32 s, dynamic_smem; setp.eq.u32 p, %t, 0; @p mbarrier.init.shared.b64 [s], 1;"
        "bar.warp.sync -1; @p mbarrier.inval.shared.b64 [s]; bar.warp.sync -1; @p st.shared.b32 [s], x; mov.b32 o, x;", x),
}  # fmt: skip
for how, clamps in {"bfly": 31, "idx": 31, "up": 0, "down": 31}.items():
    for width in (32, 8):
        c = 32 - width << 8 | clamps
        SNIPPETS[f"shuffle {how} in {width}"] = f"shfl.sync.{how}.b32 o, x, 3, {c}, -1;", x[shuffled(how, 3, width)]
BYTES = {name: of.view(np.int8).reshape(8, 16).astype(np.int32) for name, of in (("x", x), ("y", y))}  # rows of four lanes
SNIPPETS["a product of int8"] = (
    ".reg .b32 d, e, f; mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {o, d, e, f}, {x, y, x, y}, {x, y}, {0, 0, 0, 0};",
    (np.hstack([BYTES["x"]] * 2) @ np.hstack([BYTES["x"], BYTES["y"]]).T)[LANE // 4, LANE % 4 * 2].view(np.uint32)
)  # fmt: skip
SNIPPETS["shuffle and say whether"] = (
    ".reg .pred p; shfl.sync.up.b32 o|p, x, 4, 0, -1; selp.u32 o, o, 7, p;", np.where(LANE < 4, 7, x[LANE - 4])
)  # fmt: skip


@functools.cache
def run_snippet(name):
    body, want = SNIPPETS[name]
    out = np.zeros(32, np.uint32)
    inputs = ".reg .b32 x, y, o;\nld.global.b32 x, [%p0];\nld.global.b32 y, [%p1];\n"
    counts = execute(each_thread("u4", 0, 1, 2) + inputs + body + "\nst.global.b32 [%p2], o;", x, y, out, shared=PLAN)
    return counts, out, want


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet(name):
    _, out, want = run_snippet(name)
    assert out.tolist() == np.asarray(want).astype(np.uint32).tolist()


def asleep():
    """What is executed where one warp asks, and sleeps, until the other has said that it may go on."""
    actual = np.zeros(2, np.uint32)
    body = """.reg .pred p, q; .reg .b32 f; setp.lt.u32 p, %t, 32; @p bra ask;
        red.release.gpu.global.add.u32 [%a0], 1; bra end;
        ask: ld.acquire.gpu.global.b32 f, [%a0]; setp.ge.u32 q, f, 32; @q bra told; nanosleep.u32 20; bra ask;
        told: st.global.b32 [%a0+4], f; end:"""
    counts = execute(body, actual, warps=2)
    assert actual.tolist() == [32, 32]
    return counts.executed


def test_who_sleeps_is_woken_by_what_is_written():
    assert asleep()["nanosleep.u32"]
    stops("deadlock", "wait for something to be written to global memory", execute, "nanosleep.u32 20;", np.zeros(1, np.uint32))


# ---- what there is a meaning for is tested ---------------------------------------------------------------------------
def test_every_meaning_is_executed():
    """By some test of the emulator."""
    done = set(CASES)
    for name in SNIPPETS:
        done |= run_snippet(name)[0].executed.keys()
    for name in KERNELS:
        done |= counted(name).keys()
    for arch in ("sm_80", "sm_90a"):
        done |= count_a_warps(arch, None).executed.keys()
    done |= count_a_pairs(None).executed.keys() | asleep().keys()
    missing = [pattern.pattern for pattern, _ in table.TABLE if not any(pattern.fullmatch(opcode) for opcode in done)]
    assert not missing, missing


def test_an_instruction_without_a_meaning_is_named():
    @cuda.jit
    def reverse(x):
        x[cuda.threadIdx.x] = cuda.brev(x[cuda.threadIdx.x])

    words = r"PTX line \d+: no meaning for brev.b32: `brev.b32 %r\d+, %r\d+`; tiles.emulator.table says how one is added"
    with pytest.raises(NotImplementedError, match=words):
        emulate(reverse, (1, 1, 1), 32, [np.zeros(32, np.uint32)])
    with pytest.raises(NotImplementedError, match="special register %clock"):
        execute(".reg .b32 x; mov.u32 x, %clock;")


def test_addresses_of_a_cluster_have_their_blocks_number():
    """From bit 24 on, a block's own too; mapa puts another's there. Offsets are the same in all."""
    body = ".reg .b32 a, r, s; mov.u32 s, dynamic_smem; mov.u32 r, %ctaid.x; mapa.shared::cluster.u32 a, s, 1;\n"
    body += ".reg .b64 d; mad.wide.u32 d, r, 8, %a0; st.global.v2.b32 [d], {s, a};"
    actual = np.zeros((2, 2), np.uint32)
    execute(body, actual, shared=PLAN, blocks=2)
    (local, mapped), (its, same) = actual & 0xFFFFFF, actual >> 24
    assert len({*local, *mapped}) == 1 and its.tolist() == [0, 1] and same.tolist() == [1, 1]


WIDE = shared(a=st(64, 64, bf16), b=st(64, 128, bf16))


@cuda.jit
def product_of_panels(a, b, c):
    """c = a b, of which b lies in two panels."""
    left, right = WIDE.open()
    warpgroup.store(left, warpgroup.load(a, rt(16, 64, bf16), (0, 0)))
    warpgroup.store(right, warpgroup.load(b, rt(16, 128, bf16), (0, 0)))
    warpgroup.sync()
    warpgroup.store(c, warpgroup.wait(warpgroup.mm_AB(left, right)), (64 * cuda.blockIdx.x, 0))


def test_a_blocks_number_in_a_descriptor():
    """As on the card (bench/notes/compilers.md): the address's upper bits are taken for a part of the panels' distance."""
    a, b, c = np.ones((64, 64), bf16.np), np.ones((64, 128), bf16.np), np.zeros((128, 128), np.float32)
    emulate(product_of_panels, (2, 1, 1), 128, (a, b, c), WIDE)
    assert (c == 64).all()
    args = product_of_panels, (2, 1, 1), 128, (a, b, c), WIDE, None, (2, 1, 1)
    stops("bounds", "of shared memory, which ends at", emulate, *args)


@cuda.jit
def product_of_own_panels(a, b, c):
    """The same, of an address without the block's number."""
    left, right = WIDE.open()
    warpgroup.store(left, warpgroup.load(a, rt(16, 64, bf16), (0, 0)))
    warpgroup.store(right, warpgroup.load(b, rt(16, 128, bf16), (0, 0)))
    warpgroup.sync()
    warpgroup.store(c, warpgroup.wait(warpgroup.mm_AB(left, cluster.unmap(right))), (64 * cuda.blockIdx.x, 0))


def test_an_own_tile_has_no_blocks_number():
    a, b, c = np.ones((64, 64), bf16.np), np.ones((64, 128), bf16.np), np.zeros((128, 128), np.float32)
    emulate(product_of_own_panels, (2, 1, 1), 128, (a, b, c), WIDE, None, (2, 1, 1))
    assert (c == 64).all()


def test_a_peers_address_takes_shared_cluster():
    body = SHARED + "mapa.shared::cluster.u32 s, s, 1; ld.shared.b32 x, [s]; barrier.cluster.arrive; barrier.cluster.wait;"
    stops("bounds", "an address of block 1 of the cluster, which takes shared::cluster", execute, body, shared=PLAN, blocks=2)


def test_a_threads_own_memory():
    """.local: of each thread its own, by the name of the space or by a generic address; nobody has written: all bits."""
    body = (
        each_thread(np.uint32, 0)
        + """
    .local .align 8 .b8 depot[24];
    .reg .b64 here, d; .reg .b32 x, y, z;
    mov.u64 here, depot; cvta.local.u64 d, here; and.b32 x, %t, 3; mad.wide.u32 here, x, 4, here;
    st.local.b32 [here], %t; ld.b32 y, [here]; ld.local.v2.b32 {x, z}, [d+16]; and.b32 y, y, z; st.global.b32 [%p0], y;"""
    )
    actual = np.zeros(32, np.uint32)
    execute(body, actual)
    assert (actual == np.arange(32)).all()
    beyond = body.replace("d+16", "d+24")
    stops("bounds", "8 bytes at 24 to 24 of local memory, which ends at 24", execute, beyond, actual)


def test_generic_addresses():
    """Lanes of one instruction may reach into global, local and shared memory, each into its own."""
    body = (
        each_thread(np.uint32, 0, 1)
        + """
    .local .align 8 .b8 depot[8];
    .reg .b64 l, s, g; .reg .b32 x, k, s32; .reg .pred p, q;
    mov.u64 l, depot; cvta.local.u64 l, l; mov.u32 s32, dynamic_smem; mad.lo.u32 s32, %t, 4, s32; cvt.u64.u32 s, s32;
    cvta.shared.u64 s, s; and.b32 k, %t, 3; setp.eq.u32 p, k, 1; setp.eq.u32 q, k, 2;
    mov.u64 g, %p0; selp.b64 g, l, g, p; selp.b64 g, s, g, q;
    add.u32 x, %t, 100; st.u32 [g], x; ld.u32 x, [g]; @q ld.shared.u32 x, [s32]; @p ld.local.u32 x, [l];
    cvta.to.shared.u64 s, s; @q ld.shared.u32 k, [s]; @q add.u32 x, x, k;
    st.global.u32 [%p1], x;"""
    )
    assemble(written(body, 1, 1))
    inputs, actual = np.zeros((2, 32), np.uint32)
    execute(body, inputs, actual, shared=PLAN)
    lane = np.arange(32)
    assert (actual == (lane + 100) * np.where(lane % 4 == 2, 2, 1)).all()
    assert (inputs == np.where((lane % 4 == 1) | (lane % 4 == 2), 0, lane + 100)).all()


@cuda.jit
def with_local_array(x, y):
    """A local array by an index of the data, and, by a pointer that may be either, it or a row of x."""
    i = cuda.threadIdx.x
    mine = cuda.local.array(8, float32)
    for k in range(8):
        mine[k] = 10 * x[i, k]
    n = int(x[i, 0])
    row = mine if i % 3 else x[i]
    y[i] = mine[n % 8] + 1000 * row[(n + 1) % 8]


@cuda.jit
def with_shared_arrays(x, y):
    """Threads read what others wrote into two arrays, beside the memory that the launch brings."""
    i = cuda.threadIdx.x
    numbers, flags = cuda.shared.array((64, 2), float32), cuda.shared.array(64, int8)
    more = cuda.shared.array(0, float32)
    numbers[i, 0], numbers[i, 1], flags[i], more[i] = x[i, 0], x[i, 1], i % 2, x[i, 2]
    cuda.syncthreads()
    y[i] = numbers[63 - i, 0] + numbers[i ^ 32, 1] * flags[(i + 1) % 64] + more[63 - i]


def test_a_local_array_of_numba_s():
    """And a generic load of an array of the launch's, which lies above it."""
    x = np.arange(512, dtype=np.float32).reshape(64, 8)
    y, lane = np.zeros(64, np.float32), np.arange(64)
    emulate(with_local_array, (1, 1, 1), 64, (x, y))
    n = x[:, 0].astype(int)
    assert (y == 10 * x[lane, n % 8] + 1000 * x[lane, (n + 1) % 8] * np.where(lane % 3, 10, 1)).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_shared_array_of_numba_s(arch):
    x = np.arange(256, dtype=np.float32).reshape(64, 4)
    y, lane, plan = np.zeros(64, np.float32), np.arange(64), shared(more=sv(64, fp32))
    emulate(with_shared_arrays, (1, 1, 1), 64, (x, y), plan, arch=arch)
    assert (y == x[63 - lane, 0] + x[lane ^ 32, 1] * ((lane + 1) % 2) + x[63 - lane, 2]).all()


def test_a_race_in_a_shared_array_of_numba_s():
    @cuda.jit
    def racing(x, y):
        s = cuda.shared.array(64, float32)
        s[cuda.threadIdx.x] = x[cuda.threadIdx.x]
        y[cuda.threadIdx.x] = s[63 - cuda.threadIdx.x]

    arrays = np.ones(64, np.float32), np.ones(64, np.float32)
    stops("race", "writes shared memory, and nothing orders this after the read", emulate, racing, (1, 1, 1), 64, arrays)


# ---- counts and orders -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("step", "ways"), [(4, 1), (8, 2), (16, 4), (128, 32), (0, 1), (132, 1)])
def test_ways_of_banks(step, ways):
    """How many words of one bank 32 lanes ask for, `step` bytes apart."""
    body = f"mad.lo.u32 s, %t, {step}, s; ld.shared.b32 x, [s];"
    counts = execute(SHARED + body, shared=shared(x=st(64, 64, fp32)))
    assert counts.ways == {"ld.shared.b32": ways}


def test_a_pass_is_of_128_bytes():
    """Eight lanes with 16 bytes each: what they ask of a bank, and not what all 32 do."""
    body = ".reg .b32 a; mad.lo.u32 s, %t, {}, s; ld.shared.v4.b32 {{x, a, a, a}}, [s];"
    for step, ways in [(16, 1), (32, 2), (144, 1)]:
        counts = execute(SHARED + body.format(step), shared=shared(x=st(64, 64, fp32)))
        assert counts.ways == {"ld.shared.v4.b32": ways}


def test_what_is_executed_is_counted_by_warps():
    counts = execute("bar.sync 0;", warps=3, blocks=1, grid=(2, 1, 1))
    assert counts.executed == {"mov.u32": 6, "bar.sync": 6, "ret": 6}


@pytest.mark.parametrize("seed", range(4))
def test_an_order_changes_nothing(seed):
    """Of what is executed, either: waits are no loops here."""
    assert counted("check_double", seed) == counted("check_double")
