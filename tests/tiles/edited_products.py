"""Kernels that are wrong as compiled in products by wgmma, registers, named barriers and clusters."""

from edited_kernels import LANE_NUMBER, R, S, X, Y, broken, instead, one_more, without
from numba import cuda

from ops import cluster, load, raw, store, tile_any, warpgroup, zeros
from tiles import barrier, bf16, rt, shared


# ---- wgmma ---------------------------------------------------------------------------------------------------------
@broken("no fence before wgmma", without("fence.proxy.async"), "fence", "mma reads .* no fence.proxy.async", "wgmma.mma", 4, Y)
@broken("no sync before wgmma", without("bar.sync %r"), {"race", "never written"}, "mma reads shared", "wgmma.mma_async", 4, Y)
@broken("no wgmma.fence", without("wgmma.fence"), "fence", "written after the last wgmma.fence", "wgmma.mma_async", 4, Y)
@broken(
    "wgmma waited for too late",
    one_more("wgmma.wait_group.sync.aligned"),
    "wait",
    "an mma in flight is to write",
    "",
    4,
    Y,
)
@broken(
    "lanes that disagree on scale-d",
    instead("setp.ne.b32 p, 1, 0", f"{LANE_NUMBER}setp.ne.b32 p, lane, 0", 0),
    "divergence",
    "the lanes disagree on whether the wgmma accumulates",
    "wgmma.mma_async",
    4,
    Y,
)
@broken(
    "a descriptor for each lane",
    instead(
        r"(wgmma.mma_async.* )(%rd\d+), p",
        rf"{LANE_NUMBER}.reg .b64 own;\ncvt.u64.u32 own, lane;\nadd.s64 own, own, \2;\n\1own, p",
        0,
    ),
    "divergence",
    "the lanes' descriptors differ",
    "wgmma.mma_async",
    4,
    Y,
)
@broken(
    "wgmma of half a slice",
    instead("wgmma.mma_async.sync.aligned.m64n64k16", "wgmma.mma_async.sync.aligned.m64n64k8"),
    "language",
    "m64n64k8.* with 32 registers",
    "wgmma.mma_async",
    4,
    Y,
)
@broken("no wgmma commit", without("wgmma.commit_group"), "wait", "an mma in flight is to write", "", 4, Y)
def product(source, out):
    x, y = Y.open()
    mine = warpgroup.load(source, rt(16, 64, bf16), (0, 0))
    warpgroup.store(y, mine)
    warpgroup.sync()
    warpgroup.store(out, warpgroup.wait(warpgroup.mm_AB(mine, y)), (0, 0))  # guilty


@broken(
    "wgmma never waited for", without("wgmma.wait_group"), "unfinished", "this mma has not been waited for", "wgmma.mma", 4, Y
)
@broken(
    "wgmma of nothing", without("st(matrix|.shared)"), "never written", "mma reads shared .* nobody", "wgmma.mma_async", 4, Y
)
def product_for_nobody():
    x, y = Y.open()
    warpgroup.store(x, zeros(R))
    warpgroup.store(y, zeros(R))
    warpgroup.sync()
    warpgroup.wait(warpgroup.mm_AB(x, y))  # guilty


@broken("written after one's own wait", without("bar.sync %r", 1), "race", "after the end of the mma", "st", 4, Y)
def product_over_an_operand():
    x, y = Y.open()
    warpgroup.store(x, zeros(R))
    warpgroup.store(y, zeros(R))
    warpgroup.sync()
    z = warpgroup.wait(warpgroup.mm_AB(x, y))
    warpgroup.sync()
    warpgroup.store(y, z)  # guilty


@broken("left operand overwritten in flight", one_more("wgmma.wait_group.sync.aligned"), "race", "end of the mma", "st", 4, Y)
def product_over_its_left_operand():
    x, y = Y.open()
    warpgroup.store(x, zeros(R))
    warpgroup.store(y, zeros(R))
    warpgroup.sync()
    warpgroup.wait(warpgroup.mm_AB(x, y))
    warpgroup.store(x, zeros(R))  # guilty


@broken(
    "written while another reads",
    without(r"bar(?:rier)?\.sync\s+0", 2),
    "race",
    "nothing orders this after the read",
    "st",
    2,
    X,
)
def read_and_write(out):
    x, _ = X.open()
    if cuda.threadIdx.x // 32 == 0:
        store(x, zeros(R))
    cuda.syncthreads()
    store(out, load(x, R), (0, 0))
    cuda.syncthreads()
    if cuda.threadIdx.x // 32 == 1:
        store(x, zeros(R))  # guilty


# ---- registers, named barriers, clusters -----------------------------------------------------------------------------
@broken("registers the wrong way", instead("setmaxnreg.dec", "setmaxnreg.inc"), "registers", "", "setmaxnreg.inc", 4, X)
def release():
    X.open()
    warpgroup.release_registers(24)  # guilty


HALF = ".reg .pred h;\n.reg .b32 t;\nmov.u32 t, %tid.x;\nsetp.lt.u32 h, t, 64;\n"  # h: of warps 0 and 1


@broken("registers set anew with no meeting", without("bar.sync", 1), "registers", "warpgroup.sync", "setmaxnreg.inc", 4, X)
def take_back():
    X.open()
    warpgroup.release_registers(80)
    warpgroup.sync()
    warpgroup.claim_registers(96)  # guilty


@broken(
    "registers of two warps",
    instead("setmaxnreg.dec", f"{HALF}@h setmaxnreg.dec"),
    "collective",
    "warp 2 has not come to an operation of its warpgroup: setmaxnreg 80",
    "@h setmaxnreg.dec",
    4,
    X,
)
def give():
    X.open()
    warpgroup.release_registers(80)  # guilty


@broken(
    "a vote that half of the warps take for a meeting",
    instead("bar.red", f"{HALF}@h bar.sync 15, 128;\n@!h bar.red"),
    "collective",
    "named barrier 15: some warps sync, others vote",
    "@",
    4,
    X,
)
def vote(out):
    X.open()
    if warpgroup.reduce_any(tile_any(load(out, R, (0, 0)))):  # guilty
        store(out, zeros(R), (0, 0))


@broken("a barrier for more than come", instead("mov.u32 \t%r3, 64", "mov.u32 %r3, 96"), "deadlock", "", "bar.sync", 3)
def meet():
    if cuda.threadIdx.x // 32 < 2:
        raw.named_sync(3, 64)  # guilty


PAIR = shared(x=S, full=barrier(1))
REACHES = "bounds", "an address of block 1 of the cluster, which takes shared::cluster"


@broken("no cluster barrier", without("barrier.cluster"), "lifetime", "after that block's `smem.open", "st", 1, PAIR, 2)
@broken("a peer written as if it were here", instead("st.shared::cluster", "st.shared::cta"), *REACHES, "st.shared", 1, PAIR, 2)
@broken("a peer read as if it were here", instead("ld.shared::cluster", "ld.shared::cta"), *REACHES, "ld.shared", 1, PAIR, 2)
def across(out):
    x, _ = PAIR.open()
    cluster.sync()
    if cluster.rank() == 0:
        cluster.store(cluster.map(x, 1), zeros(R))  # guilty
        store(out, cluster.load(cluster.map(x, 1), R), (0, 0))  # guilty
    cluster.sync()


@broken(
    "a cluster that meets and says nothing",
    instead("barrier.cluster.arrive.release", "barrier.cluster.arrive.relaxed", 1),
    "race",
    "nothing orders this after the write",
    "ld",
    1,
    PAIR,
    2,
)
def meet_again(out):
    x, _ = PAIR.open()
    cluster.sync()
    cluster.store(cluster.map(x, 1 - cluster.rank()), zeros(R))
    cluster.sync()
    store(out, load(x, R), (0, 0))  # guilty
    cluster.sync()


@broken(
    "a signal that publishes nothing",
    instead(r"mbarrier.arrive.release.cluster", "mbarrier.arrive"),
    "race",
    "nothing orders this after the write",
    "ld",
    1,
    PAIR,
    2,
)
@broken(
    "a signal that is not acquired",
    instead(r"mbarrier.try_wait.parity.acquire.cluster", "mbarrier.try_wait.parity"),
    "race",
    "nothing orders this after the write",
    "ld",
    1,
    PAIR,
    2,
)
def tell(out):
    x, full = PAIR.open()
    cluster.sync()
    peer = 1 - cluster.rank()
    cluster.store(cluster.map(x, peer), zeros(R))
    cluster.signal(cluster.map(full, peer))
    cluster.receive(full, 1)
    store(out, load(x, R), (0, 0))  # guilty
    cluster.sync()
