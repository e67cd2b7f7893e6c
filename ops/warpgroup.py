"""What four warps do together. A warpgroup's tile of 64 rows is four rt(16, n), one a warp.

Here is what counts rows through all 64. Its matrix products are in matmul/wgmma.py, their steps along k in matmul/steps.py,
stores by TMA in memory/tma.py, transposes across its warps in memory/transposed.py and shape/diagonal.py, what several
warpgroups do in threads/warpgroups.py."""

from dataclasses import replace

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.interpreter import current_warp
from tiles.layout import WARPGROUP
from tiles.numba_names import types
from tiles.op import inlined, lowers, op
from tiles.types import st

from .elementwise import create, masks
from .matmul.steps import finish, give_back, issue_AB, issue_ABt, step_AB, step_ABt, steps_AB, steps_ABt
from .matmul.wgmma import ROWS, mm_AB, mm_ABt, mm_AtB, mm_AtBt, mma_AB, mma_ABt, mma_AtB, mma_AtBt, wait
from .matmul.zipped import transpose_zipped
from .memory import load_store
from .memory.lane_order import load_shared_fragment, store_fragment
from .memory.tma import store_wait, tma_add, tma_max, tma_min, tma_store
from .memory.transposed import load_transposed, store_transposed
from .memory.zero_rows import zero_first_rows, zero_rows
from .reductions.across_warps import lower_scope, reduced, voted
from .shape.diagonal import diagonal, diagonal_block, on_diagonal, warp_rows
from .shape.subtile import subtile as _subtile
from .threads.warpgroups import named_barrier, ping_pong, sync_several
from .threads.warps import FOUR_WARPS, THREADS

__all__ = [
    "ROWS", "THREADS", "causal", "claim_registers", "diagonal", "diagonal_block", "finish", "give_back", "id", "issue_AB",
    "issue_ABt", "load", "load_shared_fragment", "load_transposed", "lower_fill", "mm_AB", "mm_ABt", "mm_AtB", "mm_AtBt",
    "mma_AB", "mma_ABt", "mma_AtB", "mma_AtBt", "named_barrier", "on_diagonal", "outside_fill", "ping_pong", "quarter",
    "rank", "reduce_all", "reduce_any", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum", "release_registers",
    "row_index", "send", "step_AB", "step_ABt", "steps_AB", "steps_ABt", "store", "store_fragment", "store_transposed",
    "store_wait", "sync", "sync_several", "tma_add", "tma_max", "tma_min", "tma_store", "transpose_zipped", "tril", "triu",
    "upper_fill", "wait", "warp_rows", "zero_first_rows", "zero_rows",
]  # fmt: skip


def first_row(spec):
    """Where this warp's rows of a warpgroup's tile begin."""
    return lambda b: b.mul(FOUR_WARPS.emit_rank(b), b.u32(getattr(spec, "rows", None) or spec.length))


@op
def id():
    """Which warpgroup of the block this is."""
    return current_warp().group


@lowers(id)
def _():  # through a shuffle, so that ptxas knows it is uniform: 4 % fewer instructions in a loop that depends on it
    return types.int32, lambda b: ptx.uniform(b, b.warpgroup())


@op
def rank():
    """Which of its warpgroup's four warps this is."""
    return current_warp().rank


@lowers(rank)
def _():
    return types.int32, lambda b: ptx.uniform(b, FOUR_WARPS.emit_rank(b))


# ---- registers -----------------------------------------------------------------------------------------------------
@op
def claim_registers(n):
    """Give every thread of this warpgroup n registers (setmaxnreg.inc); waits until others have released enough."""
    current_warp().set_registers(n, increases=True)


@op
def release_registers(n):
    """Keep n registers per thread, free the rest for other warpgroups (setmaxnreg.dec)."""
    current_warp().set_registers(n, increases=False)


def _register_count(name, increases):
    def rule(n: int):
        if n % 8 or not 24 <= n <= 256:
            raise TypeError(f"{name}: a multiple of 8 from 24 to 256, got {n}")
        return void, lambda b, _: ptx.set_registers(b, n, increases)

    return rule


lowers(claim_registers)(_register_count("claim_registers", True))
lowers(release_registers)(_register_count("release_registers", False))


# ---- across the four warps ------------------------------------------------------------------------------------------
@op
def sync(fenced=True):
    """The four warps meet. What they wrote to shared memory is then visible to all of them, to their wgmmas and to TMA.
    fenced=False: the caller has seen to the fence (which waits for everything that a thread has under way, copies included),
    so there is none here; without one, wgmma and TMA may not see it."""
    FOUR_WARPS.sync(current_warp(), fenced)


@op
def reduce_max(x, scratch):
    """The maximum over the four warps of vectors, element by element, or numbers: reduce_max(col_max(tile), scratch).
    scratch: an fp32 shared vector of 4 x length elements or more; of 16 for numbers. All four get the result."""
    return reduced(FOUR_WARPS, "max", x, scratch)


@op
def reduce_min(x, scratch):
    """The minimum over the four warps; see reduce_max."""
    return reduced(FOUR_WARPS, "min", x, scratch)


@op
def reduce_sum(x, scratch):
    """The sum over the four warps, in fp32; see reduce_max."""
    return reduced(FOUR_WARPS, "sum", x, scratch)


@op
def reduce_prod(x, scratch):
    """The product over the four warps, in fp32; see reduce_max."""
    return reduced(FOUR_WARPS, "prod", x, scratch)


@op
def reduce_any(condition):
    """Does the condition, such as tile_any(mask), hold in one of the four warps? They meet."""
    return voted(FOUR_WARPS, any, condition)


@op
def reduce_all(condition):
    """Does the condition, such as tile_all(mask), hold in all four warps? They meet."""
    return voted(FOUR_WARPS, all, condition)


lower_scope(FOUR_WARPS, reduce_max, reduce_min, reduce_sum, reduce_prod, reduce_any, reduce_all, sync)


# ---- masks and indices ---------------------------------------------------------------------------------------------
@op
def causal(tile, diagonal, value):
    """The lower triangle of tile: `value` in every element (row, col) with col > row + diagonal; rows count through the
    warpgroup's 64. Also called `tril`."""
    return masks.masked(masks.causal, tile, diagonal, value, tile.rows * current_warp().rank)


tril = causal


@op
def triu(tile, diagonal, value):
    """The upper triangle of tile: `value` in every element (row, col) with col < row + diagonal; rows count through the
    warpgroup's 64."""
    return masks.masked(masks.triu, tile, diagonal, value, tile.rows * current_warp().rank)


@op
def lower_fill(tile, row, value):
    """tile, with `value` in every row from `row` on; rows count through the warpgroup's 64."""
    return masks.masked(masks.lower_fill, tile, row, value, tile.rows * current_warp().rank)


@op
def upper_fill(tile, row, value):
    """tile, with `value` in every row before `row`; rows count through the warpgroup's 64."""
    return masks.masked(masks.upper_fill, tile, row, value, tile.rows * current_warp().rank)


for _op_function in (causal, triu, lower_fill, upper_fill):
    lowers(_op_function)(
        masks.mask_rule(f"warpgroup.{_op_function.__name__}", getattr(masks, _op_function.__name__), first_row)
    )


@op
def outside_fill(tile, rows, cols, value):
    """tile, with `value` in every row from `rows` on, counted through the warpgroup's 64, and every column from `cols` on."""
    return masks.outside_filled(tile, rows, cols, value, tile.rows * current_warp().rank)


lowers(outside_fill)(masks.outside_rule("warpgroup.outside_fill", first_row))


@op
def row_index(shape):
    """ops.row_index, with the rows of the four warps one below the other: 0 to 63 for rt(16, n)."""
    return create.index_array(shape, 0, shape.shape[0] * current_warp().rank)


@lowers(row_index)
def _(shape: type):
    return create.index_rule("warpgroup.row_index", shape, 0, first_row(shape))


# ---- memory --------------------------------------------------------------------------------------------------------
@op(takes_operands=True)
def store(target, value, at=None, rows=-2, cols=-1, aligned=None):
    """target[...] = value, as ops.store, with the rows of the four warps one below the other."""
    load_store.store_rows(target, value, at, rows, cols, aligned, current_warp().rank)


@lowers(store)
def _(target, value, at, rows: int, cols: int, aligned: int):
    load_store.check_store("warpgroup.store", target, value, at, rows, cols, aligned, WARPGROUP)
    return void, load_store.lower_store(target, value, rows, cols, aligned, first_row(value))


@inlined
def send(target, at, tile, value, newer=0):
    """target[at] = value, a register tile of the four warps, through the shared tile, as soon as what was sent from there
    before has left it (all except the `newer` newest of what these warps sent). TMA writes it while the warps go on. Call
    `store_wait` before the end."""
    store_wait(newer)
    sync()
    store(tile, value)
    tma_store(target, at, tile)


@op
def load(source, spec, at=None, rows=-2, cols=-1, aligned=None, fenced=True):
    """The type `spec` from source, as ops.load, with the rows of the four warps one below the other.

    fenced=False, for a shared tile: without a fence after it, which would wait for everything that the warp has under way.
    Before TMA or wgmma write there again a fence must have followed, such as that of a ring's `publish`."""
    return load_store.load_rows(source, spec, at, rows, cols, aligned, current_warp().rank, fenced)


lowers(load)(load_store.rule_of_load("warpgroup.load", first_row, WARPGROUP))


@op
def quarter(tile):
    """This warp's quarter of the rows of a shared tile, as a shared tile: row_max(quarter(x)). No copy."""
    return _subtile(tile, tile.rows // WARPGROUP, current_warp().rank)


@lowers(quarter)
def _(tile):
    if not isinstance(tile, st) or tile.rows % (8 * WARPGROUP):
        raise TypeError(f"warpgroup.quarter: takes a shared tile of 32, 64, 96, ... rows, got {tile}")
    part = replace(tile, rows=tile.rows // WARPGROUP)
    return part, lambda b, address: b.add(address, b.mul(FOUR_WARPS.emit_rank(b), b.u32(part.rows * part.width)))
