"""Shared memory to global memory by TMA, by one warp alone, while others go on:

    tile = sums.wait(j)                  of a ring that others write
    tma_add(y, (i, k), tile)
    store_wait()
    sums.release(j)

The warp need not have written the tile; a ring hands it on. tma.py has what a warpgroup does.
"""

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.dtypes import bf16, fp16, fp32
from tiles.interpreter import current_warp
from tiles.layout import LANES
from tiles.op import lowers, op
from tiles.ring import elected

from .tma import rule, wait_rule


@op
def tma_store(target, at, tile):
    """target[at] = a shared tile, a part of one or a shared vector, by one warp: see warpgroup.tma_store and `tma_add`."""
    current_warp().fence_async()
    current_warp().store_async(target, at, tile)


@op
def tma_add(target, at, tile):
    """target[at] += a shared tile, a part of one or a shared vector, by one warp: see warpgroup.tma_add. It includes what this
    warp wrote, and what others handed to it. Follow with `store_wait` before the tile is given back."""
    current_warp().fence_async()
    current_warp().store_async(target, at, tile, np.add)


@op
def store_wait(newer=0):
    """Wait until the bulk stores of this warp, except the `newer` newest, have read their shared tiles."""
    current_warp().wait_stores(newer)


@op
def stores_done():
    """Wait until all bulk stores of this warp are done. What they wrote is then there, and this warp may say
    so (`count_up`, `count_stored`). `store_wait` waits for less."""
    warp = current_warp()
    warp.wait_stores()
    warp.stored = warp.stores


lowers(tma_store)(rule("tma_store", None, None, ptx.reads_done, LANES))
lowers(tma_add)(rule("tma_add", "add", (fp32, fp16, bf16), ptx.reads_done, LANES))
lowers(store_wait)(wait_rule(LANES))


@lowers(stores_done)
def _():
    def emit(b):
        with b.if_then(elected(b, LANES)):
            ptx.tma_store_done(b)

    return void, emit
