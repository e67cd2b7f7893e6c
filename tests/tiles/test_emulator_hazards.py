"""Kernels that are right as they are written, and wrong as compiled: their PTX, edited. The emulator must name the kind of
mistake, the instruction with its line in the text, and the line of Python that it comes from (`# guilty`)."""

import inspect
import re
from types import SimpleNamespace

import numpy as np
import pytest
from broken import guilty
from numba import cuda

from ops import cluster, commit_group, copy_async, load, raw, store, subtile, tile_any, wait_group, warpgroup, zeros
from tiles import Hazard, barrier, bf16, fp32, rt, shared, st, sv, tensor
from tiles.compiling.compiler import Lowered
from tiles.emulator import emulate
from tiles.emulator.text import read
from tiles.launching.arguments import parameter

S, G, R = st(16, 64, bf16), st(64, 64, bf16), rt(16, 64, fp32)
X = shared(x=S, full=barrier(1))
Y = shared(x=G, y=G)
CASES = []  # (name, kernel, edit, kinds, cause, guilty instruction, warps, plan, blocks)


def numbers(rows):
    return np.arange(rows * 64, dtype=np.float32).reshape(rows, 64).astype(bf16.np) / bf16.np.type(64)


def arguments(kernel):
    """What a kernel gets, by the names of its parameters."""
    known = {
        "small": lambda: tensor(numbers(16), S),
        "target": lambda: tensor(numbers(16) * 0, S),
        "source": lambda: numbers(64),
        "out": lambda: np.zeros((64, 64), np.float32),
    }
    return [known[name]() for name in inspect.signature(kernel).parameters]


def without(pattern, which=None):
    """An edit: these statements go (or only the one of this number)."""
    return instead(pattern, "", which)


def instead(pattern, other, which=None):
    """An edit: these statements, of instructions that begin so, become others."""

    def edit(text):
        found = list(re.finditer(rf"(?m)^[ \t]*(?:@\S+\s+)?{pattern}[^;]*;", text))
        assert found, f"{pattern} is not in {text}"
        for match in reversed(found if which is None else [found[which]]):
            text = text[: match.start()] + re.sub(pattern, other, match[0]) * bool(other) + text[match.end() :]
        return text

    return edit


def one_more(wait):
    """An edit: the wait leaves one group in flight."""
    return instead(f"{wait} 0", f"{wait} 1")


def broken(name, edit, kind, cause, instruction, warps=1, plan=None, blocks=1):
    """Decorator: so edited, the kernel stops with this kind (or one of several), words that match `cause`, at an instruction
    that begins so, which comes from a line marked guilty."""

    def register(kernel):
        kinds = {kind} if isinstance(kind, str) else set(kind)
        CASES.append(pytest.param(kernel, edit, kinds, cause, instruction, warps, plan, blocks, id=name.replace(" ", "-")))
        return kernel

    return register


# ---- what one lane hands to others -----------------------------------------------------------------------------------
@broken(
    "no bar.warp.sync",
    without("bar.warp.sync"),
    "race",
    "reads shared .* nothing orders this after the write",
    "ldmatrix",
    2,
    X,
)
@broken("no set-up sync", without("bar.sync"), "race", "nothing orders this after the set-up of", "mbarrier.try_wait", 2, X)
@broken(
    "two arrivals",
    instead("(mbarrier.arrive.*;)", r"\1 \1"),
    "phase",
    "which has completed 2 phases",
    "mbarrier.try_wait",
    2,
    X,
)
def hand_over(small, out):
    x, full = X.open()
    if cuda.threadIdx.x // 32 == 0:
        store(x, zeros(R))
        cuda.syncwarp()
        raw.arrive(full)  # guilty
    else:
        raw.wait(full, 1)  # guilty
        store(out, load(x, R), (0, 0))  # guilty


# ---- TMA loads -----------------------------------------------------------------------------------------------------
PARITY = r"(mbarrier.try_wait\S* \w+, \[\S+\]), \S+;"


@broken("the other parity", instead(PARITY, r"\1, 1;"), "in flight", "reads shared memory", "ldmatrix", 1, X)
@broken(
    "no fence of the set-up", without("fence.mbarrier_init"), "fence", "no fence.mbarrier_init", "cp.async.bulk.tensor", 1, X
)
@broken(
    "a fence of global memory after the set-up",
    instead("fence.mbarrier_init.release.cluster", "fence.proxy.async.global"),
    "fence",
    "no fence.mbarrier_init",
    "cp.async.bulk.tensor",
    1,
    X,
)
@broken(
    "one coordinate of two",
    instead(r"(cp.async.bulk.tensor.2d.*\{%r\d+), %r\d+", r"\1"),
    "plan",
    "1 coordinates for a tensor map of 2 axes",
    "cp.async.bulk.tensor.2d",
    1,
    X,
)
@broken(
    "a tensor map 64 bytes on",
    instead(r"(cp.async.bulk.tensor.2d.*\[)(%rd\d+),", r".reg .b64 far;\nadd.s64 far, \2, 64;\n\1far,"),
    "plan",
    "no tensor map lies at",
    "cp.async.bulk.tensor.2d",
    1,
    X,
)
@broken(
    "a copy to a block that there is not",
    instead(
        r"(cp.async.bulk.tensor.2d.shared::)cta(\S*)(.*\])",
        r".reg .b16 to;\nmov.b16 to, 2;\n\1cluster\2.multicast::cluster\3, to",
    ),
    "bounds",
    "the cluster has no block 1",
    "cp.async.bulk.tensor.2d",
    1,
    X,
)
@broken("no expect", without("mbarrier.arrive.expect_tx"), {"deadlock", "bytes"}, "", "mbarrier.try_wait", 1, X)
def bring(small, out):
    x, full = X.open()
    raw.expect(full, S.nbytes)
    raw.tma_load(x, small, (0, 0), full)  # guilty
    raw.wait(full, 1)  # guilty
    store(out, load(x, R), (0, 0))  # guilty


# ---- TMA stores ----------------------------------------------------------------------------------------------------
@broken(
    "store without fence", without("fence.proxy.async"), "fence", "no fence.proxy.async after the write", "cp.async.bulk", 1, X
)
@broken(
    "store with a fence of global memory",
    instead("fence.proxy.async.shared::cta", "fence.proxy.async.global"),
    "fence",
    "no fence.proxy.async after the write",
    "cp.async.bulk",
    1,
    X,
)
@broken(
    "store with a fence of barriers alone",
    instead("fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster"),
    "fence",
    "no fence.proxy.async after the write",
    "cp.async.bulk",
    1,
    X,
)
@broken("store without sync", without("bar.warp.sync"), {"race", "fence"}, "after the write", "cp.async.bulk.tensor", 1, X)
@broken(
    "store without wait", without("cp.async.bulk.wait_group"), "race", "nothing orders this after the TMA store", "st", 1, X
)
def take(target):
    x, _ = X.open()
    store(x, zeros(R))
    raw.fence_async()
    cuda.syncwarp()
    raw.tma_store(target, (0, 0), x)  # guilty
    raw.store_wait()
    cuda.syncwarp()
    store(x, zeros(R))  # guilty


@broken(
    "store never waited for", without("cp.async.bulk.wait_group"), "unfinished", "waited for the TMA store", "cp.async", 1, X
)
def take_and_leave(target):
    x, _ = X.open()
    store(x, zeros(R))
    raw.fence_async()
    cuda.syncwarp()
    raw.tma_store(target, (0, 0), x)  # guilty
    raw.store_wait()


# ---- cp.async ------------------------------------------------------------------------------------------------------
@broken(
    "wait_group too small",
    one_more("cp.async.wait_group"),
    "in flight",
    "after the end of the copy",
    "ldmatrix",
    1,
    X,
)
@broken("no commit_group", without("cp.async.commit_group"), "in flight", "after the end of the copy", "ldmatrix", 1, X)
def copy(source, out):
    x, _ = X.open()
    copy_async(x, source, (0, 0))
    commit_group()
    wait_group()
    cuda.syncwarp()
    store(out, load(x, rt(16, 64, bf16)), (0, 0))  # guilty


@broken("copies never waited for", without("cp.async.wait_group"), "unfinished", "waited for the copy", "cp.async.cg", 1, X)
def copy_and_leave(source):
    x, _ = X.open()
    copy_async(x, source, (0, 0))  # guilty
    commit_group()
    wait_group()


LANE_NUMBER = ".reg .b32 lane;\nmov.u32 lane, %tid.x;\n"


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
    "warp 2 has not come to a deed of its warpgroup: setmaxnreg 80",
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
    "named barrier 15 is met at by some, and voted at by others",
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


# ---- the test ------------------------------------------------------------------------------------------------------
def compiled(kernel, args):
    return Lowered(kernel, tuple(parameter("argument", a).type for a in args), "sm_90a", lines=True).ptx()


@pytest.mark.parametrize(("kernel", "edit", "kinds", "cause", "instruction", "warps", "plan", "blocks"), CASES)
def test_broken_as_compiled(kernel, edit, kinds, cause, instruction, warps, plan, blocks):
    jitted, args, cluster = cuda.jit(kernel), arguments(kernel), (blocks, 1, 1)
    text = edit(compiled(jitted, args))
    with pytest.raises(Hazard) as caught:
        emulate(jitted, cluster, 32 * warps, args, plan, None, cluster, lowered=SimpleNamespace(ptx=lambda: text))
    hazard, said = caught.value, str(caught.value)
    assert hazard.kind in kinds and re.search(cause, hazard.cause), said
    python, number, shown = re.fullmatch(r"(.*), PTX line (\d+) `([^`]*)`", hazard.line).groups()
    assert shown.removeprefix("@p ").startswith(instruction), said
    assert shown[:20] in " ".join(text.splitlines()[int(number) - 1].split()), said
    assert python in guilty(kernel) and hazard.line in said, said


@pytest.mark.parametrize(("kernel", "warps", "plan", "blocks"), {(c.values[0], *c.values[5:]) for c in CASES}, ids=lambda v: "")
@pytest.mark.parametrize("seed", [None, 1])
def test_right_as_it_was(kernel, warps, plan, blocks, seed):
    args, cluster = arguments(kernel), (blocks, 1, 1)
    emulate(cuda.jit(kernel), cluster, 32 * warps, args, plan, seed, cluster)


def test_a_tensor_copy_begins_at_a_multiple_of_128_bytes():
    """Vectors of 64 bytes may lie side by side for warps, not for TMA."""
    plan = shared(pair=sv(32, fp32), full=barrier(1))

    @cuda.jit
    def bring_the_second(x):
        pair, full = plan.open()
        raw.expect(full, 64)
        raw.tma_load(subtile(pair, 16, 1), x, (0,), full)
        raw.wait(full, 1)

    with pytest.raises(Hazard, match="the TMA load: shared memory at .* no multiple of 128"):
        emulate(bring_the_second, (1, 1, 1), 32, [tensor(np.zeros(16, np.float32), sv(16, fp32))], plan)


@pytest.mark.parametrize("fence", ["fence.proxy.async", "fence.proxy.async.shared::cta"])
def test_a_fence_of_shared_memory_is_one_of_barriers_too(fence):
    """For copies by the same block (CUDA C++ Programming Guide, on bulk copies)."""
    kernel = cuda.jit(bring)
    args = arguments(bring)
    text = instead("fence.mbarrier_init.release.cluster", fence)(compiled(kernel, args))
    emulate(kernel, (1, 1, 1), 32, args, X, lowered=SimpleNamespace(ptx=lambda: text))


def test_lines_are_found_for_what_fails():
    """A kernel is compiled without a table of lines: which line of Python is guilty is asked of one that has it."""

    def skip_the_wait(source, out):
        x, _ = X.open()
        copy_async(x, source, (0, 0))
        commit_group()
        store(out, load(x, R), (0, 0))  # guilty

    jitted, args = cuda.jit(skip_the_wait), arguments(skip_the_wait)
    with pytest.raises(Hazard) as caught:
        emulate(jitted, (1, 1, 1), 32, args, X)
    python, number = re.fullmatch(r"(.*), PTX line (\d+) `ld[^`]*`", caught.value.line).groups()
    assert python in guilty(skip_the_wait)
    assert compiled(jitted, args).splitlines()[int(number) - 1].strip().startswith("ld")


def test_lines_of_other_code_are_not_shown():
    """Nothing promises that a kernel with a table of lines is the same instructions."""
    text = compiled(cuda.jit(product), [numbers(64), np.zeros((64, 64), np.float32)])
    plain, other = read(text), read(text)
    plain.with_lines = lambda: other.code[1:]
    assert plain.shown is plain.code
    other.with_lines = lambda: plain.code
    assert other.shown is plain.code


def test_a_wgmma_that_subtracts():
    """Its scale of B says so."""
    x, out = numbers(64), np.zeros((64, 64), np.float32)
    text = compiled(cuda.jit(product), [x, out])
    edited, times = re.subn(r"\bp, 1, 1,", "p, 1, -1,", text)
    assert times == 4
    emulate(cuda.jit(product), (1, 1, 1), 128, [x, out], Y, lowered=SimpleNamespace(ptx=lambda: edited))
    np.testing.assert_allclose(out, -(x.astype(np.float64) @ x.astype(np.float64)), rtol=1e-5, atol=1e-4)
