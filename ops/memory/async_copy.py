"""Copies by cp.async: global memory to shared memory, past the registers, by one warp (sm_80 and later).

    copy_async(tile, x, (row, col))         start
    commit_group()                          the copies since the last commit are a group
    wait_group(newer=1)                     all groups but the youngest are here: for this warp
    cuda.syncthreads()                      ... and for all warps, if these waited, too

`tiles.pipeline` does this for all warps of a block, stage by stage. Warps that load tiles for others, a ring's writers, do it
tile by tile. Rows may lie in pages, as in a paged cache (tiles/paged_copies.py). pages: the page table:

    page_rows = look_up(part, pages, size, (sequence, row), last)           a tile ahead
    copy_pages(subtile(k.claim(j), 16, warp), pool, page_rows, (row, 0), last)
"""

from tiles import cp_async, paged_copies
from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.interpreter import current_warp
from tiles.op import lowers, op
from tiles.types import st, sv


@op
def copy_async(tile, source, at, rows=-2, cols=-1, vector_bytes=cp_async.CHUNK_BYTES):
    """Start copying a part of a global array to a shared tile of its dtype. The part begins at index `at` and runs along axes
    `rows` and `cols`; what lies outside the array becomes 0. Columns must be adjacent, and the array's address, its strides
    and at[cols] multiples of `vector_bytes` bytes: 16, or else 8 or 4, which take 2 and 4 times as many instructions. 2-byte
    dtypes may lie at multiples of 2: the warp then loads and stores them, because cp.async copies 4 bytes or more, and waits
    for memory. A shared vector, of 4-byte numbers, lies along axis `cols` at any stride."""
    current_warp().copy_async(tile, source, at, rows, cols, vector_bytes, range(cp_async.rows_of(tile.spec)))


@lowers(copy_async)
def _(tile, source, at, rows: int, cols: int, vector_bytes: int):
    if not isinstance(tile, st) and not (isinstance(tile, sv) and tile.dtype.itemsize == cp_async.NUMBER):
        raise TypeError(f"copy_async: copies to a shared tile, got {tile}" + ": load and store it" * isinstance(tile, sv))
    cp_async.check_copy("copy_async", tile, source, at, rows, cols, vector_bytes)

    def emit(b, address, array, at, *_):
        if isinstance(tile, sv):
            return cp_async.lower_copy_numbers(b, source, tile, address, array, at, cols, tile.length, b.u32(0))
        cp_async.lower_copy(b, source, tile, address, array, at, rows, cols, vector_bytes, tile.rows, b.u32(0))

    return void, emit


@op
def look_up(part, pages, size, at, last, begin=None):
    """The pages in which the rows lie that `copy_pages` copies to a tile of type `part`: see tiles.pipeline.look_up."""
    return current_warp().look_up(pages, size, at, last, range(cp_async.rows_of(part)), begin)


@lowers(look_up)
def _(part: type, pages, size, at, last, begin):
    if not isinstance(part, st | sv):
        raise TypeError(f"look_up: takes the type of a shared tile, got {part}")
    page_rows, emit = paged_copies.look_up_rule(part, cp_async.rows_of(part), pages, size, at, last, begin)
    return page_rows, lambda b, _, *values: emit(b, b.u32(0), *values)


@op
def copy_pages(tile, pool, page_rows, at, last, vector_bytes=cp_async.CHUNK_BYTES):
    """copy_async of rows in pages. pool: an array (page, row, ..., column). page_rows: the pages, by look_up. at:
    (the tile's first row, ..., column), as if there were no pages; for a vector there is no column. Rows from `last` on
    become 0."""
    current_warp().copy_pages(tile, pool, page_rows, at, last, vector_bytes, range(cp_async.rows_of(tile.spec)))


@lowers(copy_pages)
def _(tile, pool, page_rows, at, last, vector_bytes: int):
    if not isinstance(tile, st | sv):
        raise TypeError(f"copy_pages: copies to a shared tile, got {tile}")
    copy = paged_copies.copy_pages_rule("copy_pages", tile, cp_async.rows_of(tile), pool, page_rows, at, last, vector_bytes)
    return void, lambda b, address, array, places, at, last, _: copy(b, address, b.u32(0), array, places, at, last)


@op
def commit_group():
    """Close a group: this warp's copies since the last one."""
    current_warp().commit_group()


@lowers(commit_group)
def _():
    return void, ptx.copy_commit


@op
def wait_group(newer=0):
    """Wait until all groups of this warp's copies, except the `newer` newest, are in shared memory. This warp may then read
    them; other warps may after a barrier."""
    current_warp().wait_group(newer)


@lowers(wait_group)
def _(newer: int):
    if newer < 0:
        raise TypeError(f"wait_group: newer must be 0 or more, got {newer}")

    def emit(b, _):
        ptx.copy_wait(b, newer)
        ptx.warp_sync(b)

    return void, emit
