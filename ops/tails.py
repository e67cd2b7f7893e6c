"""Several warpgroups of a block that work on one shared tile: where they meet, and the rows of it that are not there, for past
the end of a sequence lies whatever comes next in memory."""

import numpy as np

from tiles import ptx
from tiles.interpreter import here
from tiles.interpreter.block import WARPGROUP
from tiles.layout import LANES
from tiles.op import integer, lowers, op
from tiles.plumbing import void
from tiles.types import st

from .group import LAST_NAMED

CHUNK = 16  # bytes that a thread writes at once
THREADS = WARPGROUP * LANES
TOGETHER = LAST_NAMED - 7  # the named barrier of several warpgroups: that of the eighth


@op
def meet(groups):
    """The block's first `groups` warpgroups meet, 1 (each by itself) to 7. What they wrote to shared memory is then visible to
    all of them, to their wgmmas and to TMA."""
    _meet(here(), groups)


@lowers(meet)
def _(groups: int):
    if not 1 <= groups <= 7:
        raise TypeError(f"meet: takes 1 to 7 warpgroups, got {groups}")
    return void, lambda b, _: _emit_meet(b, groups)


def _meet(warp, groups):
    number, threads = TOGETHER if groups > 1 else LAST_NAMED - warp.group, THREADS * groups
    warp.fence_async()
    warp.block.named(number, threads).meet(warp, threads, what=f"the meeting of {groups} warpgroups: ")


def _emit_meet(b, groups):
    ptx.fence_async(b)
    number = b.u32(TOGETHER) if groups > 1 else b.sub(b.u32(LAST_NAMED), b.lshr(b.special("tid.x"), b.u32(7)))
    ptx.named_barrier(b, number, b.u32(THREADS * groups))


@op
def zero_rows(tile, first, groups=1):
    """tile[first:] = 0, in shared memory, by the block's first `groups` warpgroups together (2 to 7; 1: by each that calls it,
    of a tile of its own). All of them meet, and the zeros are then visible to them, to their wgmmas and to TMA."""
    warp = here()
    count = WARPGROUP * groups
    gone = range(min(max(first, 0), tile.rows), tile.rows)
    share, mine = -(-len(gone) // count), warp.index if groups > 1 else warp.rank
    if rows := gone[share * mine : share * (mine + 1)]:
        warp.write(tile, np.zeros((len(rows), tile.cols), np.float32), rows)
    _meet(warp, groups)


@lowers(zero_rows)
def _(tile, first, groups: int):
    if not isinstance(tile, st) or not integer(first) or not 1 <= groups <= 7:
        raise TypeError(f"zero_rows: takes a shared tile, an integer and 1 to 7 warpgroups, got {tile}, {first} and {groups}")
    threads = THREADS * groups
    row_chunks = tile.width // CHUNK

    def emit(b, address, row, _):
        mine, nothing = b.special("tid.x"), b.u32(0)
        if groups == 1:
            mine = b.and_(mine, b.u32(THREADS - 1))
        for panel in range(tile.panels):
            for start in range(0, tile.rows * row_chunks, threads):
                chunk = b.add(mine, b.u32(start))
                with b.if_then(b.icmp_signed(">=", b.lshr(chunk, b.u32(row_chunks.bit_length() - 1)), b.u32(row))):
                    at = b.add(address, b.add(b.mul(chunk, b.u32(CHUNK)), b.u32(panel * tile.panel_bytes)))
                    b.do("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", at, nothing)
        _emit_meet(b, groups)

    return void, emit
