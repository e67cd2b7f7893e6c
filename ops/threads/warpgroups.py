"""Several warpgroups of a block: they synchronise, or take turns. Some warps that wait for others. Ops of `ops.warpgroup`."""

from dataclasses import dataclass

from tiles.compiling import ptx
from tiles.compiling.numba_types import compile_time, void
from tiles.interpreter import current_warp
from tiles.layout import LANES
from tiles.op import integer, lowers, op

from .warps import FOUR_WARPS, MAX_GROUPS, SEVERAL, THREADS


@op
def sync_several(groups):
    """Synchronise the block's first `groups` warpgroups, 1 (each by itself) to 8. What they wrote to shared memory is then
    visible to all of them, to their wgmmas and to TMA."""
    sync_warpgroups(current_warp(), groups)


@lowers(sync_several)
def _(groups: int):
    if not 1 <= groups <= MAX_GROUPS:
        raise TypeError(f"sync_several: takes 1 to {MAX_GROUPS} warpgroups, got {groups}")
    return void, lambda b, _: emit_sync_warpgroups(b, groups)


def sync_warpgroups(warp, groups):
    """Synchronise the block's first `groups` warpgroups; with `groups` = 1 the warp's own."""
    if groups == 1:
        return FOUR_WARPS.sync(warp)
    threads = THREADS * groups
    warp.fence_async()
    warp.block.named(SEVERAL, threads).sync(warp, threads, description=f"the sync of {groups} warpgroups: ")


def emit_sync_warpgroups(b, groups):
    """Emit the code of `sync_warpgroups`."""
    if groups == 1:
        return FOUR_WARPS.emit_sync(b)
    ptx.fence_async(b)
    ptx.named_barrier(b, b.u32(SEVERAL), b.u32(THREADS * groups))


# ---- taking turns --------------------------------------------------------------------------------------------------
@compile_time
@dataclass(frozen=True)
class ping_pong:
    """`players` warpgroups, numbered from 0, take turns to issue their mmas, so that one's softmax runs under another's mma.
    Player i waits for named barrier `first` + i; more than one player."""

    players: int = 2
    first: int = 1

    def __post_init__(self):
        if self.players < 2 or self.first < 1 or self.first + self.players > SEVERAL:
            raise ValueError(
                f"ping_pong: 2 or more players on named barriers 1 to {SEVERAL - 1}, got {self.players} from {self.first} on"
            )

    def __str__(self):
        return f"ping_pong({self.players} players)"

    def _arrive(self, warp, player, wait):
        if not 0 <= player <= self.players:
            raise warp.hazard(f"{self} has no player {player}")
        player %= self.players
        description = f"the turn of player {player} (`begin` grants the first, `give` the next): "
        warp.block.named(self.first + player, 2 * THREADS).sync(warp, 2 * THREADS, wait, description)

    @op
    def begin(self, player):
        """Once, before the first `take`: the first turn is player 0's (unprimed, all would wait for ever)."""
        if player == self.players - 1:
            self._arrive(current_warp(), 0, wait=False)

    @op
    def take(self, player):
        """Wait for the turn of this player, which is a number."""
        self._arrive(current_warp(), player, wait=True)

    @op
    def give(self, player):
        """Grant the next player its turn."""
        self._arrive(current_warp(), player + 1, wait=False)


def _needs_player(name, player):
    if not integer(player):
        raise TypeError(f"{name}: the player's number must be an integer, got {player}")


@lowers(ping_pong.begin)
def _(turn, player):
    _needs_player("begin", player)

    def emit(b, _, player):
        with b.if_then(b.icmp_unsigned("==", b.u32(player), b.u32(turn.players - 1))):
            ptx.named_barrier(b, b.u32(turn.first), 2 * THREADS, sync=False)

    return void, emit


@lowers(ping_pong.take)
def _(turn, player):
    _needs_player("take", player)
    return void, lambda b, _, player: ptx.named_barrier(b, b.add(b.u32(player), b.u32(turn.first)), 2 * THREADS)


@lowers(ping_pong.give)
def _(turn, player):
    _needs_player("give", player)

    def emit(b, _, player):
        is_last = b.icmp_unsigned("==", b.u32(player), b.u32(turn.players - 1))
        after = b.select(is_last, b.u32(turn.first), b.add(b.u32(player), b.u32(turn.first + 1)))
        ptx.named_barrier(b, after, 2 * THREADS, sync=False)

    return void, emit


# ---- some warps that wait for others ---------------------------------------------------------------------------------
@compile_time
@dataclass(frozen=True)
class named_barrier:
    """A named barrier of `warps` warps: some `arrive` when they have written to shared memory, and go on; the others `sync`.
    It orders ordinary writes and reads, no copies. The k-th group of so many warps has the barrier numbered `first` + k."""

    warps: int
    first: int = 1

    def __post_init__(self):
        if self.warps < 2 or not 1 <= self.first < SEVERAL:
            raise ValueError(
                f"named_barrier: 2 or more warps at barriers from 1 to {SEVERAL - 1}, got {self.warps} from {self.first} on"
            )

    def __str__(self):
        return f"named_barrier({self.warps} warps)"

    def _arrive_at(self, warp, group, wait):
        if not 0 <= group < SEVERAL - self.first:
            raise warp.hazard(f"{self} has no group {group}")
        threads = LANES * self.warps
        warp.block.named(self.first + group, threads).sync(warp, threads, wait, f"the named barrier of group {group}: ")

    @op
    def arrive(self, group=0):
        """This warp has written its part; it does not wait."""
        self._arrive_at(current_warp(), group, wait=False)

    @op
    def sync(self, group=0):
        """Wait until the others have arrived."""
        self._arrive_at(current_warp(), group, wait=True)


def _barrier_rule(name, sync):
    def rule(barrier, group):
        if not integer(group):
            raise TypeError(f"{name}: the group's number must be an integer, got {group}")

        def emit(b, _, group):
            ptx.named_barrier(b, b.add(b.u32(group), b.u32(barrier.first)), LANES * barrier.warps, sync=sync)

        return void, emit

    return rule


lowers(named_barrier.arrive)(_barrier_rule("arrive", sync=False))
lowers(named_barrier.sync)(_barrier_rule("sync", sync=True))
