"""What several warpgroups of a block do together: meet, clear the rows of a shared tile that are not there, take turns. Ops
of `ops.warpgroup`."""

from dataclasses import dataclass

import numpy as np

from tiles import ptx
from tiles.interpreter import here
from tiles.layout import WARPGROUP
from tiles.op import integer, lowers, op
from tiles.plumbing import compile_time, void
from tiles.types import st

from .group import FOUR_WARPS, MOST_GROUPS, THREADS, TOGETHER

CHUNK = 16  # bytes that a thread writes at once


@op
def meet(groups):
    """The block's first `groups` warpgroups meet, 1 (each by itself) to 8. What they wrote to shared memory is then visible to
    all of them, to their wgmmas and to TMA."""
    _meet(here(), groups)


@lowers(meet)
def _(groups: int):
    if not 1 <= groups <= MOST_GROUPS:
        raise TypeError(f"meet: takes 1 to {MOST_GROUPS} warpgroups, got {groups}")
    return void, lambda b, _: _emit_meet(b, groups)


def _meet(warp, groups):
    if groups == 1:
        return FOUR_WARPS.meet(warp)
    threads = THREADS * groups
    warp.fence_async()
    warp.block.named(TOGETHER, threads).meet(warp, threads, what=f"the meeting of {groups} warpgroups: ")


def _emit_meet(b, groups):
    if groups == 1:
        return FOUR_WARPS.emit_meet(b)
    ptx.fence_async(b)
    ptx.named_barrier(b, b.u32(TOGETHER), b.u32(THREADS * groups))


@op
def zero_rows(tile, first, groups=1):
    """tile[first:] = 0, in shared memory: behind the end of a sequence lies whatever comes next. By the block's first `groups`
    warpgroups together (2 to 8; 1: by each that calls it, of a tile of its own). All of them meet, and the zeros are then
    visible to them, to their wgmmas and to TMA."""
    warp = here()
    count = WARPGROUP * groups
    gone = range(min(max(first, 0), tile.rows), tile.rows)
    share, mine = -(-len(gone) // count), warp.index if groups > 1 else warp.rank
    if rows := gone[share * mine : share * (mine + 1)]:
        warp.write(tile, np.zeros((len(rows), tile.cols), np.float32), rows)
    _meet(warp, groups)


@lowers(zero_rows)
def _(tile, first, groups: int):
    if not isinstance(tile, st) or not integer(first) or not 1 <= groups <= MOST_GROUPS:
        raise TypeError(
            f"zero_rows: takes a shared tile, an integer and 1 to {MOST_GROUPS} warpgroups, got {tile}, {first} and {groups}"
        )
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


# ---- taking turns --------------------------------------------------------------------------------------------------
@compile_time
@dataclass(frozen=True)
class turns:
    """`players` warpgroups, numbered from 0, take turns to issue their mmas, so that one's softmax runs under another's mma.
    Player i waits for named barrier `first` + i; more than one player."""

    players: int = 2
    first: int = 1

    def __post_init__(self):
        if self.players < 2 or self.first < 1 or self.first + self.players > TOGETHER:
            raise ValueError(
                f"turns: 2 or more players on named barriers 1 to {TOGETHER - 1}, got {self.players} from {self.first} on"
            )

    def __str__(self):
        return f"turns({self.players} players)"

    def _arrive(self, warp, player, sync):
        if not 0 <= player <= self.players:
            raise warp.hazard(f"{self} has no player {player}")
        player %= self.players
        what = f"the turn of player {player} (`begin` grants the first, `give` the next): "
        warp.block.named(self.first + player, 2 * THREADS).meet(warp, 2 * THREADS, sync, what)

    @op
    def begin(self, me):
        """Once, before the first `take`: the first turn is player 0's (unprimed, all would wait for ever)."""
        if me == self.players - 1:
            self._arrive(here(), 0, sync=False)

    @op
    def take(self, me):
        """Wait for my turn."""
        self._arrive(here(), me, sync=True)

    @op
    def give(self, me):
        """The next player's turn."""
        self._arrive(here(), me + 1, sync=False)


def _needs_player(name, me):
    if not integer(me):
        raise TypeError(f"{name}: the player's number must be an integer, got {me}")


@lowers(turns.begin)
def _(turn, me):
    _needs_player("begin", me)

    def emit(b, _, me):
        with b.if_then(b.icmp_unsigned("==", b.u32(me), b.u32(turn.players - 1))):
            ptx.named_barrier(b, b.u32(turn.first), 2 * THREADS, sync=False)

    return void, emit


@lowers(turns.take)
def _(turn, me):
    _needs_player("take", me)
    return void, lambda b, _, me: ptx.named_barrier(b, b.add(b.u32(me), b.u32(turn.first)), 2 * THREADS)


@lowers(turns.give)
def _(turn, me):
    _needs_player("give", me)

    def emit(b, _, me):
        last = b.icmp_unsigned("==", b.u32(me), b.u32(turn.players - 1))
        after = b.select(last, b.u32(turn.first), b.add(b.u32(me), b.u32(turn.first + 1)))
        ptx.named_barrier(b, after, 2 * THREADS, sync=False)

    return void, emit
