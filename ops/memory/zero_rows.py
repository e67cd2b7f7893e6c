"""Clearing the rows of a shared tile that lie after the end of a sequence, or ahead of what it sees. Ops of
`ops.warpgroup`."""

import numpy as np

from tiles.compiling.numba_types import void
from tiles.interpreter import current_warp
from tiles.layout import WARPGROUP
from tiles.op import integer, lowers, op
from tiles.types import st

from ..threads.warpgroups import emit_sync_warpgroups, sync_warpgroups
from ..threads.warps import MAX_GROUPS, THREADS

CHUNK_BYTES = 16  # that a thread writes at once


@op
def zero_rows(tile, first, groups=1):
    """tile[first:] = 0, in shared memory: past the end of a sequence lies the data of the next one. By the block's first
    `groups` warpgroups together (2 to 8; 1: by each that calls it, on a tile of its own). They all meet, and the zeros are
    then visible to them, to their wgmmas and to TMA."""
    _zero(tile, range(min(max(first, 0), tile.rows), tile.rows), groups)


@op
def zero_first_rows(tile, end, groups=1):
    """tile[:end] = 0, as zero_rows does it."""
    _zero(tile, range(min(max(end, 0), tile.rows)), groups)


def _zero(tile, zeroed, groups):
    """The meaning of both, of the rows in a range."""
    warp, count = current_warp(), WARPGROUP * groups
    rows_per_warp, rank = -(-len(zeroed) // count), warp.index if groups > 1 else warp.rank
    if rows := zeroed[rows_per_warp * rank : rows_per_warp * (rank + 1)]:
        warp.write(tile, np.zeros((len(rows), tile.cols), np.float32), rows)
    sync_warpgroups(warp, groups)


@lowers(zero_rows)
def _(tile, first, groups: int):
    return _lowered("zero_rows", ">=", tile, first, groups)


@lowers(zero_first_rows)
def _(tile, end, groups: int):
    return _lowered("zero_first_rows", "<", tile, end, groups)


def _lowered(name, side, tile, bound, groups):
    """The rule of both: `side` compares the rows that become 0 with the bound."""
    if not isinstance(tile, st) or not integer(bound) or not 1 <= groups <= MAX_GROUPS:
        raise TypeError(
            f"{name}: takes a shared tile, an integer and 1 to {MAX_GROUPS} warpgroups, got {tile}, {bound} and {groups}"
        )
    threads = THREADS * groups
    chunks = tile.width // CHUNK_BYTES

    def emit(b, address, row, _):
        rank, nothing = b.special("tid.x"), b.u32(0)
        if groups == 1:
            rank = b.and_(rank, b.u32(THREADS - 1))
        for panel in range(tile.panels):
            for start in range(0, tile.rows * chunks, threads):
                chunk = b.add(rank, b.u32(start))
                zeroed = b.icmp_signed(side, b.lshr(chunk, b.u32(chunks.bit_length() - 1)), b.u32(row))
                if start + threads > tile.rows * chunks:  # not all threads have one left
                    zeroed = b.and_(zeroed, b.icmp_signed("<", chunk, b.u32(tile.rows * chunks)))
                with b.if_then(zeroed):
                    at = b.add(address, b.add(b.mul(chunk, b.u32(CHUNK_BYTES)), b.u32(panel * tile.panel_bytes)))
                    b.do("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", at, nothing)
        emit_sync_warpgroups(b, groups)

    return void, emit
