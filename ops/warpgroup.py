"""What four warps do together. A warpgroup's tile of 64 rows is four rt(16, n), one a warp. Its matrix products: wgmma.py."""

from dataclasses import dataclass, replace

from numba.cuda import types

from tiles import ptx
from tiles.interpreter import here
from tiles.interpreter.block import WARPGROUP
from tiles.layout import LANES
from tiles.op import integer, lowers, op
from tiles.plumbing import compile_time, void
from tiles.types import st

from . import make, mask, memory
from .bulk import store_wait, tma_add, tma_max, tma_min, tma_store  # noqa: F401
from .group import LAST_NAMED, Group
from .subtile import subtile as _subtile
from .tails import meet, zero_rows  # noqa: F401
from .triangular import own_block  # noqa: F401
from .turned import load_transposed, own_rows, store_transposed  # noqa: F401
from .wgmma import ROWS, mm_AB, mm_ABt, mm_AtB, mm_AtBt, mma_AB, mma_ABt, mma_AtB, mma_AtBt, wait  # noqa: F401

THREADS = WARPGROUP * LANES
GROUP = Group("warpgroup", WARPGROUP)


def rank(b):
    """This warp's place in its warpgroup, as the lowering of `16 * rank` needs it."""
    return b.and_(b.lshr(b.special("tid.x"), b.u32(5)), b.u32(WARPGROUP - 1))


def first_row(spec):
    """Where this warp's rows of a warpgroup's tile begin."""
    return lambda b: b.mul(rank(b), b.u32(getattr(spec, "rows", None) or spec.length))


@op
def id():
    """Which warpgroup of the block this is."""
    return here().group


@lowers(id)
def _():  # through a shuffle, so that ptxas knows it is uniform: 4 % fewer instructions in a loop that depends on it
    return types.int32, lambda b: ptx.uniform(b, b.lshr(b.special("tid.x"), b.u32(7)))


# ---- registers -----------------------------------------------------------------------------------------------------
@op
def claim_registers(n):
    """Give every thread of this warpgroup n registers (setmaxnreg.inc); waits until others have released enough."""
    here().set_registers(n, more=True)


@op
def release_registers(n):
    """Keep n registers per thread, free the rest for other warpgroups (setmaxnreg.dec)."""
    here().set_registers(n, more=False)


def _register_count(name, more):
    def rule(n: int):
        if n % 8 or not 24 <= n <= 256:
            raise TypeError(f"{name}: a multiple of 8 from 24 to 256, got {n}")
        return void, lambda b, _: ptx.set_registers(b, n, more)

    return rule


lowers(claim_registers)(_register_count("claim_registers", True))
lowers(release_registers)(_register_count("release_registers", False))


# ---- across the four warps ------------------------------------------------------------------------------------------
@op
def sync():
    """The four warps meet. What they wrote to shared memory is then visible to all of them, to their wgmmas and to TMA."""
    GROUP.meet(here())


@op
def reduce_max(x, scratch):
    """The greatest of what the four warps bring, vectors element by element or numbers: reduce_max(col_max(tile), scratch).
    scratch: an fp32 shared vector of 4 x length elements or more; of 16 for numbers. All four get the result."""
    return GROUP.reduce("max", x, scratch)


@op
def reduce_min(x, scratch):
    """The least of what the four warps bring; see reduce_max."""
    return GROUP.reduce("min", x, scratch)


@op
def reduce_sum(x, scratch):
    """The sum of what the four warps bring, taken in fp32; see reduce_max."""
    return GROUP.reduce("sum", x, scratch)


@op
def reduce_prod(x, scratch):
    """The product of what the four warps bring, taken in fp32; see reduce_max."""
    return GROUP.reduce("prod", x, scratch)


@op
def reduce_any(condition):
    """Does the condition, such as tile_any(mask), hold in one of the four warps? They meet."""
    return GROUP.vote(any, condition)


@op
def reduce_all(condition):
    """Does the condition, such as tile_all(mask), hold in all four warps? They meet."""
    return GROUP.vote(all, condition)


GROUP.lower(reduce_max, reduce_min, reduce_sum, reduce_prod, reduce_any, reduce_all, sync)


# ---- masks and indices ---------------------------------------------------------------------------------------------
@op
def causal(tile, diagonal, value):
    """tile, with `value` in every element (row, col) with col > row + diagonal; rows count through the warpgroup's 64."""
    return mask.masked(mask.causal, tile, diagonal, value, tile.rows * here().rank)


@op
def tril(tile, diagonal, value):
    """The lower triangle of tile: `value` in every element (row, col) with col > row + diagonal, as causal has it; rows count
    through the warpgroup's 64."""
    return mask.masked(mask.tril, tile, diagonal, value, tile.rows * here().rank)


@op
def triu(tile, diagonal, value):
    """The upper triangle of tile: `value` in every element (row, col) with col < row + diagonal; rows count through the
    warpgroup's 64."""
    return mask.masked(mask.triu, tile, diagonal, value, tile.rows * here().rank)


@op
def lower_fill(tile, row, value):
    """tile, with `value` in every row from `row` on; rows count through the warpgroup's 64."""
    return mask.masked(mask.lower_fill, tile, row, value, tile.rows * here().rank)


@op
def upper_fill(tile, row, value):
    """tile, with `value` in every row before `row`; rows count through the warpgroup's 64."""
    return mask.masked(mask.upper_fill, tile, row, value, tile.rows * here().rank)


for _face in (causal, tril, triu, lower_fill, upper_fill):
    lowers(_face)(mask.mask_rule(f"warpgroup.{_face.__name__}", getattr(mask, _face.__name__), first_row))


@op
def bounds(tile, rows, cols, value):
    """tile, with `value` in every row from `rows` on, counted through the warpgroup's 64, and every column from `cols` on."""
    return mask.bounds_array(tile, rows, cols, value, tile.rows * here().rank)


lowers(bounds)(mask.bounds_rule("warpgroup.bounds", first_row))


@op
def row_index(shape):
    """ops.row_index, with the rows of the four warps one below the other: 0 to 63 for rt(16, n)."""
    return make.index_array(shape, 0, shape.shape[0] * here().rank)


@lowers(row_index)
def _(shape: type):
    return make.index_rule("warpgroup.row_index", shape, 0, first_row(shape))


# ---- memory --------------------------------------------------------------------------------------------------------
@op(takes_operands=True)
def store(target, value, at=None, rows=-2, cols=-1, aligned=False):
    """target[...] = value, as ops.store, with the rows of the four warps one below the other."""
    memory.store_rows(target, value, at, rows, cols, aligned, here().rank)


@lowers(store)
def _(target, value, at, rows: int, cols: int, aligned: int):
    memory.check_store("warpgroup.store", target, value, at, rows, cols, aligned, WARPGROUP)
    return void, memory.lower_store(target, value, rows, cols, aligned, first_row(value))


@op
def load(source, spec, at=None, rows=-2, cols=-1, aligned=False):
    """The type `spec` from source, as ops.load, with the rows of the four warps one below the other."""
    return memory.load_rows(source, spec, at, rows, cols, aligned, here().rank)


@lowers(load)
def _(source, spec: type, at, rows: int, cols: int, aligned: int):
    memory.check_load("warpgroup.load", source, spec, at, rows, cols, aligned, WARPGROUP)
    return spec, memory.lower_load(source, spec, rows, cols, aligned, first_row(spec))


@op
def quarter(tile):
    """This warp's quarter of the rows of a shared tile, as a shared tile: row_max(quarter(x)). No copy."""
    return _subtile(tile, tile.rows // WARPGROUP, here().rank)


@lowers(quarter)
def _(tile):
    if not isinstance(tile, st) or tile.rows % (8 * WARPGROUP):
        raise TypeError(f"warpgroup.quarter: takes a shared tile of 32, 64, 96, ... rows, got {tile}")
    part = replace(tile, rows=tile.rows // WARPGROUP)
    return part, lambda b, address: b.add(address, b.mul(rank(b), b.u32(part.rows * part.width)))


# ---- taking turns --------------------------------------------------------------------------------------------------
FREE_NAMED = LAST_NAMED - 7  # from here on named barriers are the warpgroups' own


@compile_time
@dataclass(frozen=True)
class turns:
    """`players` warpgroups, numbered from 0, take turns to issue their mmas, so that one's softmax runs under another's mma.
    Player i waits for named barrier `first` + i; more than one player."""

    players: int = 2
    first: int = 1

    def __post_init__(self):
        if self.players < 2 or self.first < 1 or self.first + self.players > FREE_NAMED:
            raise ValueError(
                f"turns: 2 or more players on named barriers 1 to {FREE_NAMED - 1}, got {self.players} from {self.first} on"
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
