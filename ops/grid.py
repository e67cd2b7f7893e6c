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
nothing is written before one of the block's warps has waited, and cannot check what is read."""

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.interpreter import current_warp
from tiles.op import inlined, integer, lowers, op


@op
def wait(after=None):
    """Wait until the grid before this one is done. Its writes are then visible to this thread, and to others that synchronise
    with it. after: an integer that is computed before. The compiler begins with a wait as soon as it can, and leaves behind it
    what a block might compute meanwhile, such as where its tiles lie."""
    current_warp().block.cluster.must_wait = False


@op
def release():
    """The grid after this one may begin, if it overlaps this one, once every block of this grid has called this or is done."""


@lowers(wait)
def _(after):
    if not (after is None or integer(after)):
        raise TypeError(f"grid.wait: `after` must be an integer, got {after}")
    return void, lambda b, value: ptx.grid_wait(b, None if after is None else b.u32(value))


lowers(release)(lambda: (void, ptx.grid_release))


@inlined
def follow():
    """wait, then release: by all threads of a kernel that reads nothing early."""
    wait()
    release()
