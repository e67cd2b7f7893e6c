"""Shared memory to global memory by TMA, with TMA's reductions (add, min, max); prefetch to L2.

    warpgroup.tma_store(y, (i, j), tile)           y[i, j]  = tile
    warpgroup.tma_add(y, (i, j), tile)             y[i, j] += tile, element by element, atomically
    warpgroup.store_wait()                         `tile` may be written again

Called by a whole warpgroup; its first thread does it. They are ops of `ops.warpgroup`.

tma_by_warp.py has what one warp does alone.
"""

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.dtypes import bf16, fp16, fp32
from tiles.interpreter import current_warp
from tiles.layout import LANES
from tiles.numba_names import types
from tiles.op import integer, lowers, op
from tiles.ring import check_tensor, elected
from tiles.types import st, sv

from ..threads.warps import FOUR_WARPS, THREADS
from .shared_tiles import describe_index


def _to_global(warp, target, at, tile, fold=None):
    FOUR_WARPS.sync(warp)
    if warp.rank == 0:
        warp.store_async(target, at, tile, fold)


@op
def tma_store(target, at, tile):
    """target[at] = a shared tile, a part of one or a shared vector that this warpgroup wrote, by TMA. What lies outside the
    array is not written. The four warps meet first, so all their stores are in it. Follow with `store_wait` before the end,
    and with `store_wait` and `sync` before the tile is written again. TMA writes 16 bytes at a time. TypeError: the array's
    columns are not a multiple of that; past its edge TMA would write the tile's own values up to the next multiple."""
    _to_global(current_warp(), target, at, tile)


@op
def tma_add(target, at, tile):
    """target[at] += a shared tile, as `tma_store`. Each element is added atomically and rounded to the array's dtype every
    time, so any number of blocks may add to one tile in any order."""
    _to_global(current_warp(), target, at, tile, np.add)


@op
def tma_min(target, at, tile):
    """target[at] = the lesser of itself and a shared tile, as `tma_add`; bf16 and fp16."""
    _to_global(current_warp(), target, at, tile, np.fmin)


@op
def tma_max(target, at, tile):
    """target[at] = the greater of itself and a shared tile, as `tma_add`; bf16 and fp16."""
    _to_global(current_warp(), target, at, tile, np.fmax)


@op
def prefetch(source, at):
    """Load source[at], of a tensor, into the L2 cache, where a later copy finds it; no thread waits for it. By the first lane
    of one warp. What lies outside the array is left out."""
    current_warp().inside(source, at)


@op
def store_wait(newer=0):
    """Wait until the bulk stores of this warpgroup's first thread, except the `newer` newest, have read their shared tiles."""
    if current_warp().rank == 0:
        current_warp().wait_stores(newer)


def _check(name, target, at):
    check_tensor(name, target)
    if not (isinstance(at, types.BaseTuple) and 1 <= len(at) <= target.rank and all(map(integer, at))):
        raise TypeError(f"{name}: `at` must be up to {target.rank} integers, got {describe_index(at)}")


def rule(name, fold, dtypes=None, emit_sync=FOUR_WARPS.emit_sync, threads=THREADS):
    """The rule of a copy from shared memory to a tensor: what synchronises before it, and how many threads have a first that
    does it."""

    def checked(target, at, tile):
        _check(name, target, at)
        if dtypes and target.tile.dtype not in dtypes:
            raise TypeError(f"{name}: TMA does this for {', '.join(map(str, dtypes))}, got {target}")
        if not (isinstance(tile, (st, sv)) and target.tile.unsliced == tile.unsliced):
            raise TypeError(f"{name}: the target takes {target.tile}, got {tile}")
        if not target.storable:
            raise TypeError(
                f"{name}: TMA writes 16 bytes at a time, and would write past columns that are not a multiple of that, the "
                f"tile's own values up to the next one: {target}; use warpgroup.store, or an array with room"
            )

        def emit(b, vtarget, vat, vtile):
            emit_sync(b)
            with b.if_then(elected(b, threads)):
                ptx.tma_store(b, target, vtarget, b.unpack(vat), tile, vtile, fold)

        return void, emit

    return checked


lowers(tma_store)(rule("tma_store", None))
lowers(tma_add)(rule("tma_add", "add", (fp32, fp16, bf16)))
lowers(tma_min)(rule("tma_min", "min", (fp16, bf16)))
lowers(tma_max)(rule("tma_max", "max", (fp16, bf16)))


@lowers(prefetch)
def _(source, at):
    _check("prefetch", source, at)

    def emit(b, vsource, vat):
        with b.if_then(elected(b, LANES)):
            ptx.tma_prefetch(b, source, vsource, b.unpack(vat))

    return void, emit


def wait_rule(threads):
    """The rule of waiting for copies that the first of so many threads started."""

    def checked(newer: int):
        if newer < 0:
            raise TypeError(f"store_wait: newer must be 0 or more, got {newer}")

        def emit(b, _):
            with b.if_then(elected(b, threads)):
                ptx.tma_store_wait(b, newer)

        return void, emit

    return checked


lowers(store_wait)(wait_rule(THREADS))
