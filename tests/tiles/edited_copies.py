"""Kernels that are wrong as compiled in what copies data: from lane to lane, by TMA, by cp.async."""

from edited_kernels import R, S, X, broken, instead, one_more, without
from numba import cuda

from ops import commit_group, copy_async, load, raw, store, wait_group, zeros
from tiles import bf16, rt


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
    "storage",
    "1 coordinates for a tensor map of 2 axes",
    "cp.async.bulk.tensor.2d",
    1,
    X,
)
@broken(
    "a tensor map 64 bytes on",
    instead(r"(cp.async.bulk.tensor.2d.*\[)(%rd\d+),", r".reg .b64 far;\nadd.s64 far, \2, 64;\n\1far,"),
    "storage",
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
