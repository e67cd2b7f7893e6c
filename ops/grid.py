"""Grids that follow one another on a stream: one launched with tiles.launch(..., overlaps_previous=True) may begin while the
grid before it still runs (programmatic dependent launch; before sm_90 there is none, and these ops are nothing), and load what
that one does not write, such as weights.

    if wg == PRODUCER:
        w.fill(...)                # not written by the grid before
        grid.wait()                # the previous grid is done, and its writes are visible
        grid.release()             # the next grid may begin: as soon as all blocks have said so, and there is room
        x.fill(...)

Whoever launches so promises that what is read before `wait` was not written by the grid just before, and that nothing is
written before it. A block that releases only after it has waited keeps that promise short: of what ran two grids before, all is
done. In a launch without overlap `wait` is over at once. The interpreter runs grids one after the other. It checks that
nothing is written before one of the block's warps has waited, and cannot check what is read.

A grid need not wait for the end of the one before: it may follow it step by step. The one before counts what it has done
(ops/memory/counts.py), this one waits for counts:

    reset_count(counts, (block,))                    the grid before, which does not overlap its own predecessor: first
    block.sync()
    grid.release()
    ...
    stores_done()                                    what TMA stored is there
    count_up(counts, (block,))

    grid.wait_count(counts, (block,), n)             this grid
    x.fill(...)                                      what was stored before the n-th count
    ...
    grid.wait()                                      at the end: whoever comes later may rely on both grids' ends

This grid's blocks begin when all blocks of the one before run, or are done, so they cannot keep them from running; they need
room, so some blocks of the one before should end early. This grid may write after such a wait, but nothing that the one before
still reads or writes."""

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.interpreter import current_warp
from tiles.op import inlined, integer, lowers, op

from .memory.counts import lower_wait_count, wait_for_count


@op
def wait(after=None):
    """Wait until the grid before this one is done. Its writes are then visible to this thread, and to others that synchronise
    with it. after: an integer that is computed before. The compiler begins with a wait as soon as it can, and leaves behind it
    what a block might compute meanwhile, such as where its tiles lie."""
    current_warp().block.cluster.must_wait = current_warp().block.cluster.must_end_after = False


@op
def wait_count(counts, at, n):
    """Wait until blocks of the grid before have counted to n at counts[at] (ops.count_up). What they wrote before is then
    visible to this warp, and to TMA. A block that waits so calls `wait`, too, before it ends."""
    cluster = current_warp().block.cluster
    wait_for_count(counts, at, n)
    if cluster.must_wait:
        cluster.must_wait, cluster.must_end_after = False, True


@op
def release():
    """The grid after this one may begin, if it overlaps this one, once every block of this grid has called this or is done. The
    first of a block's warps that calls this speaks for the block."""
    current_warp().block.release_next(current_warp())


@lowers(wait)
def _(after):
    if not (after is None or integer(after)):
        raise TypeError(f"grid.wait: `after` must be an integer, got {after}")
    return void, lambda b, value: ptx.grid_wait(b, None if after is None else b.u32(value))


lowers(wait_count)(lower_wait_count)
lowers(release)(lambda: (void, ptx.grid_release))


@inlined
def follow():
    """wait, then release: by all threads of a kernel that reads nothing early."""
    wait()
    release()
