"""Runs a kernel's own source on the CPU and stops at what the hardware would silently get wrong.

**The kernel language.** What Numba accepts, run one whole warp at a time:

- Python integers, floats, booleans and tuples; `for ... in range(...)`, `while`, `if`, conditional expressions; `min`,
  `max`, `abs`, `math`; closures over numbers and frozen objects; other `@cuda.jit(device=True)` and `@inlined` functions,
  named directly or through their module.
- Tiles, vectors, rings and every op with a NumPy meaning.
- `cuda.blockIdx`, `gridDim`, `blockDim`, `syncthreads`, `syncwarp`. `cuda.threadIdx.x` and `cuda.laneid` are one number per
  lane. Arithmetic and comparisons keep them so. A result that is the same in all lanes (`cuda.threadIdx.x // 32`) becomes a
  plain number again. A branch, an index or an op needs a plain number; anything else would split the warp. Blocks have
  one dimension.
- Global arrays by integers and slices: `lengths[batch]` reads, `flags[block] = 1` is one store by the whole warp.
- `print(...)`, also of tiles; each line says which warp of which block printed it.

Not accepted: `cuda.shared`, `cuda.local`, atomics, shuffles and votes (use tiles and ops), and code that differs
from lane to lane.

**What it watches.** Shared memory (shadow.py), barriers (barriers.py, rings.py), mmas and copies in flight, the limits of
arrays, setmaxnreg; hazard.py lists the kinds of Hazard. A verdict depends on what the kernel orders, not on what happened to
come first in this run, so it is the same on every schedule. Where the PTX ISA is silent: a fence.proxy.async anywhere between
the ordinary access and the asynchronous one is enough. The blocks of a cluster run
together (cluster.py), and what they do to each other's shared memory is watched like the rest. In addition, a block must have
set up its memory before a peer accesses it, and must not end before such accesses are known to be over. The hardware's
barrier does not wait for warps that have ended; here they must arrive.

**What it does not see.** Another path through the kernel: other arguments, a branch on data. Races on global memory, between
blocks or within one, except for two stores of different values to one element (stores.py). Integers that pass 2^31, and
integers that must be known at compile time. A loop that waits for nothing and never ends. Registers that an mma in flight
still reads (the compiler keeps them).
"""

import contextlib
import itertools
import math

import numpy as np

from ..layout import LANES
from .accesses import global_accesses
from .barriers import Mbarrier, NamedBarrier
from .block import Block
from .cluster import Cluster, RecordingCluster, random_order
from .hazard import KINDS, Hazard
from .language import Bounded, current_warp, getcurrent, rebind
from .processes import run_all
from .progress import Progress
from .record import AccessStep, ArriveStep, CopyStep, MmaStep, OpStep, SignalStep, WaitStep, is_recording, note, record_op
from .rings import Slot
from .shadow import TileCells
from .warp import InterpretedWarp

__all__ = [
    "KINDS",
    "AccessStep",
    "ArriveStep",
    "Block",
    "Cluster",
    "CopyStep",
    "Hazard",
    "InterpretedWarp",
    "Mbarrier",
    "MmaStep",
    "NamedBarrier",
    "OpStep",
    "SignalStep",
    "Slot",
    "TileCells",
    "WaitStep",
    "current_warp",
    "global_accesses",
    "hazard_line",
    "interpret",
    "is_recording",
    "note",
    "record_clusters",
    "record_op",
]


def hazard_line():
    """The running warp and its line, as the end of a message; empty outside a kernel."""
    warp = getcurrent()
    return f"\n  at {warp}" if isinstance(warp, InterpretedWarp) else ""


def interpret(kernel, grid, threads, args, shared=None, seed=None, cluster=(1, 1, 1), overlaps_previous=False):
    """Run kernel[grid, threads](*args) here, cluster by cluster: NumPy arrays, tensors and numbers in, arrays written in place.

    grid: (x, y, z). threads: a multiple of 32. shared: the `tiles.shared` storage that the kernel opens. seed: None for the
    strict order (asynchronous work as late as possible), a number for a random one. cluster: (x, y, z) blocks, which run
    together; others one after the other, or as if they did (processes.py). overlaps_previous: may the grid begin while the one
    before it runs? Then nobody stores to an array before a warp of the cluster has called grid.wait. Hazard: what went wrong,
    where."""
    run = _runs(Cluster, kernel, grid, threads, shared, seed, overlaps_previous)
    indices_of_clusters = list(clusters(grid, cluster))
    progress = Progress(getattr(kernel, "py_func", kernel).__name__, len(indices_of_clusters), math.prod(cluster))
    with contextlib.closing(progress):
        run_all(
            len(indices_of_clusters),
            lambda n, *arguments: run(indices_of_clusters[n], n, *arguments, progress.tick).end(),
            _arguments(args),
            progress,
        )


def record_clusters(kernel, grid, threads, args, shared, selection):
    """Run the clusters `selection` of kernel[grid, threads](*args), each the indices of its blocks, in the strict order, and
    yield what the warps of each have done: {(block, warp): its steps}, see record.py. Other arguments: as for `interpret`."""
    run, arguments = _runs(RecordingCluster, kernel, grid, threads, shared, None), _arguments(args)
    for n, indices in enumerate(selection):
        cluster = run(indices, n, arguments)
        yield {(block.index, warp.index): warp.steps for block in cluster.blocks for warp in block.warp_list}


def _runs(kind, kernel, grid, threads, shared, seed, overlaps_previous=False):
    """run(indices, n, args) runs the n-th cluster, that of the blocks with these indices, and gives it back."""
    if threads % LANES or not 0 < threads <= 1024:
        raise ValueError(f"launch: block must be a multiple of {LANES} up to 1024, got {threads}")
    rebound = {}
    bounds = getattr(kernel, "targetoptions", {}).get("launch_bounds")
    ctas_per_sm = bounds[1] if isinstance(bounds, tuple) and len(bounds) > 1 else 1
    function = rebind(kernel, rebound)

    def run(indices, n, args, accesses=None, tick=Cluster.tick):
        one = kind(indices, grid, threads // LANES, shared, random_order(seed, n), rebound, ctas_per_sm)
        one.accesses, one.tick, one.must_wait = accesses, tick, overlaps_previous
        with np.errstate(all="ignore"):
            one.run(function, args)
        return one

    return run


def _arguments(args):
    """A launch's arguments as kernels see them."""
    return [_argument(a) for a in args]


def _argument(a):
    """An argument as kernels see it: a float in fp32, an integer without end, as none of theirs ends at 32 bits; an array that
    says where an index leaves it."""
    if isinstance(a, tuple):
        values = map(_argument, a)
        return type(a)(*values) if hasattr(a, "_fields") else tuple(values)
    if isinstance(a, np.integer):
        return int(a)
    return np.float32(a) if isinstance(a, float) else a.view(Bounded) if isinstance(a, np.ndarray) else a


def clusters(grid, cluster):
    """The indices of the blocks of each cluster of a grid."""
    for corner in _indices(*(range(0, g, c) for g, c in zip(grid, cluster))):
        yield _indices(*(range(at, at + n) for at, n in zip(corner, cluster)))


def _indices(*axes):
    """All (x, y, z) of these ranges, x running fastest."""
    return [index[::-1] for index in itertools.product(*reversed(axes))]
