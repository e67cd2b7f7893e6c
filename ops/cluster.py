"""Blocks of a cluster, launched by tiles.launch(..., cluster=n): they run at the same time, close together, and reach into each
other's shared memory. Rings with `blocks=n` share what TMA brings; see tiles.ring.

    peer = cluster.rank() ^ 1
    ...
    cluster.sync()               # at the end: nobody goes while a peer may still reach into its shared memory
"""

from numba.cuda import types

from tiles import ptx
from tiles.interpreter import here
from tiles.op import lowers, op
from tiles.plumbing import void


@op
def rank():
    """Which block of its cluster this is: 0, 1, ..., along x first."""
    return here().block.rank


@lowers(rank)
def _():
    return types.int32, lambda b: ptx.uniform(b, b.special("cluster_ctarank"))


@op
def arrive():
    """This warp has come to the cluster's barrier. What it wrote before, to any shared memory of the cluster, is visible to
    those that `wait`. Every warp of every block of the cluster arrives, then waits, in turn."""
    here().block.cluster.barrier.arrive(here())


@op
def wait():
    """Until all warps of the cluster have arrived."""
    here().block.cluster.barrier.wait(here())


@op
def sync():
    """All warps of the cluster meet: arrive, and wait."""
    here().block.cluster.barrier.arrive(here())
    here().block.cluster.barrier.wait(here())


lowers(arrive)(lambda: (void, ptx.cluster_arrive))
lowers(wait)(lambda: (void, ptx.cluster_wait))


@lowers(sync)
def _():
    def emit(b):
        ptx.cluster_arrive(b)
        ptx.cluster_wait(b)

    return void, emit
