"""Groups of warps that synchronise: the four of a warpgroup, or all of a block. Each has a named barrier of its own."""

from dataclasses import dataclass

from tiles.compiling import ptx
from tiles.layout import LANES, WARPGROUP

# Who synchronises at which of a block's 16 named barriers: all its warps at 0, warpgroups that play `ping_pong` at those before
# SEVERAL, several warpgroups at SEVERAL, warpgroup g by itself at LAST_NAMED - g.
LAST_NAMED, MAX_GROUPS = 15, 8
SEVERAL = LAST_NAMED - MAX_GROUPS
THREADS = WARPGROUP * LANES


@dataclass(frozen=True)
class Group:
    """A scope of several warps. `warps`: how many, None if that is the launch's to say."""

    name: str
    warps: int | None

    # -- in the interpreter
    def size(self, warp):
        """How many warps there are."""
        return self.warps or warp.block.size

    def rank(self, warp):
        """The warp's number among them."""
        return warp.index % self.size(warp)

    def barrier(self, warp):
        """The named barrier at which they synchronise."""
        return warp.block.named(LAST_NAMED - warp.group if self.warps else 0, LANES * self.size(warp))

    def sync(self, warp, fence=True):
        """Wait for all warps of the group. What they wrote to shared memory is then visible to all, and to the asynchronous
        proxy, unless there is no `fence`: that waits for all that a thread has under way, its loads from global memory, too."""
        if fence:
            warp.fence_async()
        self.barrier(warp).sync(warp, LANES * self.size(warp), description=f"the {self.name}'s sync: ")

    # -- as lowered
    def emit_warps(self, b):
        """How many warps there are."""
        return b.u32(self.warps) if self.warps else b.udiv(b.special("ntid.x"), b.u32(LANES))

    def emit_rank(self, b):
        """The warp's number among them."""
        return b.and_(b.warp(), b.u32(self.warps - 1)) if self.warps else b.warp()

    def emit_barrier(self, b):
        """(number, threads) of the named barrier at which they synchronise."""
        if self.warps:
            return b.sub(b.u32(LAST_NAMED), b.warpgroup()), b.u32(LANES * self.warps)
        return b.u32(0), b.special("ntid.x")

    def emit_sync(self, b, fence=True):
        """Emit the code of `sync`."""
        if fence:
            ptx.fence_async(b)
        ptx.named_barrier(b, *self.emit_barrier(b))


FOUR_WARPS, ALL_WARPS = Group("warpgroup", WARPGROUP), Group("block", None)
