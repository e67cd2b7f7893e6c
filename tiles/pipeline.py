"""Pipelines by cp.async: stages that all warps of a block fill together, with no barriers of their own (sm_80 and later).

    smem = shared(k=pipeline(K, STAGES, warps=4))         # on the host
    (k,) = smem.open()                                    # in the kernel
    for j in range(STAGES - 1):
        k.fill(j, x, at(j), end=n)                        every warp starts copying its rows: one group
    for j in range(n):
        tile = k.wait(j, newer=STAGES - 2)                tile j, once all but the newest groups have arrived; a barrier
        k.fill(j + STAGES - 1, x, at(...), end=n)         after the barrier nobody reads tile j - 1: its slot is free
        ...

As with rings, the j-th tile lies in slot j % stages, whoever asks. Groups are counted by each thread, over all its pipelines.

A warp that reads no rows but those that it copies itself needs no other warp: `wait_warp` waits for these alone, without a
barrier.
Rows in pages (a paged cache): `look_up` reads their page numbers from the page table, `fill_pages` copies them; both stand in
paged_copies.py. When all is read, `reuse` gives the memory to something else.

Tiles may be vectors (`sv`), of numbers of 4 bytes: a lane brings a number, and they may lie any stride apart.
"""

from dataclasses import dataclass, replace

from . import cp_async, layout, paged_copies
from .compiling import ptx
from .compiling.numba_types import compile_time, void
from .interpreter import current_warp
from .op import integer, lowers, op
from .ring import needs_index
from .types import st, sv
from .values import SharedTile


@compile_time
@dataclass(frozen=True)
class pipeline:
    """`stages` copies of one shared tile or vector. All `warps` warps of the block fill each of them, each warp its rows of
    the rows."""

    tile: st | sv
    stages: int
    warps: int
    name: str = ""  # these are set by `shared`: what it is called, and bytes from the base of shared memory
    start: int = 0

    def __post_init__(self):
        if self.stages < 1 or self.warps < 1 or cp_async.rows_of(self.tile) % self.warps:
            raise ValueError(
                f"pipeline: stages and warps must be positive, and each warp copy as many rows, "
                f"got {self.stages} stages and {self.warps} warps for {self.tile}"
            )
        if isinstance(self.tile, sv):
            cp_async.check_vector("pipeline", self.tile, self.tile.length // self.warps)

    def __str__(self):
        return f"pipeline({self.tile}, {self.stages} stages, {self.warps} warps)"

    def slot(self, j):
        """Address of the j-th tile."""
        return self.start + j % self.stages * self.tile.stage_bytes

    @property
    def warp_rows(self):
        """Rows (of a vector, numbers) of a tile that each warp copies."""
        return cp_async.rows_of(self.tile) // self.warps

    @op
    def fill(self, j, source, at, rows=-2, cols=-1, end=None, vector_bytes=cp_async.CHUNK_BYTES):
        """Start copying the tile at `at` of a global array into slot j % stages, as one group. All warps of the block call it.
        Nobody may still read tile j - stages: call it after a `wait` that came later. With j >= `end` nothing is copied and
        the group is empty, so that counts of newer groups hold to the end. Other arguments: see ops.copy_async. A vector
        lies along axis `cols` of the array, at any stride."""
        warp = _check_open(self, j)
        if end is None or j < end:
            warp.copy_async(_tile(self, j), source, at, rows, cols, vector_bytes, _rows_of_warp(self, warp))
        warp.commit_group((self.name, j))

    @op
    def look_up(self, pages, size, at, last, begin=None):
        """The pages in which this warp's rows of a tile lie, for `fill_pages`. pages: the page table, of int32 or int64: row n
        of sequence s is row n % size of page pages[s, n // size]; or of page n // size, if it is None. at: (sequence, the
        tile's first row). No page numbers are read from row `last` on, nor before row `begin`: of these rows something else
        arrives. The look-up starts here, and is waited for where it is needed: two tiles ahead it costs no time."""
        return current_warp().look_up(pages, size, at, last, _rows_of_warp(self, current_warp()), begin)

    @op
    def fill_pages(self, j, pool, page_rows, at, last, end=None, vector_bytes=cp_async.CHUNK_BYTES):
        """`fill` with rows in pages. pool: an array (page, row, ..., column). page_rows: the pages, by look_up. at:
        (the tile's first row, ..., column), as if there were no pages; for a vector there is no column. Rows from `last` on
        become 0."""
        warp = _check_open(self, j)
        if end is None or j < end:
            warp.copy_pages(_tile(self, j), pool, page_rows, at, last, vector_bytes, _rows_of_warp(self, warp))
        warp.commit_group((self.name, j))

    @op
    def wait_warp(self, j, newer=0):
        """This warp's rows of the j-th tile, which it has filled itself. It waits for all groups of its copies
        except the `newer` newest, and for no other warp. If a tile is only ever read this way, a slot may be filled again as
        soon as the warp itself has read it, and has waited since."""
        warp = _check_open(self, j)
        warp.wait_group(newer, (self.name, j))
        return _warp_tile(self, j, warp.index)

    @op
    def reuse(self, tile):
        """The pipeline's memory as one shared tile of another type. A barrier of the block must follow the last read and fill
        of its tiles."""
        _check_open(self, 0)
        return SharedTile(tile, self.start, f"the memory of pipeline {self.name!r}")

    @op
    def wait(self, j, newer=0):
        """The j-th tile. It waits for this thread's groups of copies except the `newer` newest, then for all other warps of the
        block. What these have read before may then be overwritten."""
        warp = _check_open(self, j)
        warp.wait_group(newer, (self.name, j))
        threads = layout.LANES * self.warps
        warp.block.named(0, threads).sync(warp, threads, description=f"tile {j} of pipeline {self.name!r}: ")
        return _tile(self, j)


# ---- meanings ------------------------------------------------------------------------------------------------------
def _check_open(pipe, j):
    warp = current_warp()
    if j < 0:
        raise warp.hazard(f"pipeline {pipe.name!r} has no tile {j}")
    if warp.block.shared_members is None or pipe.name not in warp.block.shared_members:
        raise warp.hazard(f"{pipe} is used, and the kernel has not opened it: `q, k = smem.open()`", "storage")
    if warp.block.size != pipe.warps:
        raise warp.hazard(f"{pipe} is filled by a block of {warp.block.size} warps", "collective")
    return warp


def _tile(pipe, j):
    return SharedTile(pipe.tile, pipe.slot(j), f"tile {j} of pipeline {pipe.name!r}")


def _rows_of_warp(pipe, warp):
    """The rows of a tile that a warp copies."""
    return range(pipe.warp_rows * warp.index, pipe.warp_rows * (warp.index + 1))


def _warp_tile_type(pipe):
    """(the type of the rows of a tile that a warp copies, their bytes)"""
    if isinstance(pipe.tile, sv):
        return replace(pipe.tile, length=pipe.warp_rows), pipe.warp_rows * cp_async.NUMBER
    return replace(pipe.tile, rows=pipe.warp_rows), pipe.warp_rows * pipe.tile.width


def _warp_tile(pipe, j, warp):
    """The rows of the j-th tile that a warp copies, as a tile."""
    full_tile, (part, nbytes) = _tile(pipe, j), _warp_tile_type(pipe)
    first = 0 if isinstance(part, sv) else pipe.warp_rows * warp
    return SharedTile(part, full_tile.address + nbytes * warp, f"warp {warp}'s rows of {full_tile.name}", first=first)


# ---- lowerings -----------------------------------------------------------------------------------------------------
def _address(b, pipe, base, j):
    slot = b.urem(b.u32(j), b.u32(pipe.stages))
    return b.add(b.add(base, b.mul(slot, b.u32(pipe.tile.stage_bytes))), b.u32(pipe.start))


def _fill(b, pipe, base, j, end, copy):
    """A group of copies, which copy(address of the tile, the warp's first row) starts if j < end."""
    first = b.mul(b.warp(), b.u32(pipe.warp_rows))
    wanted = b.icmp_signed("<", b.u32(j), b.u32(2**31 - 1 if end is None else end))
    with b.if_then(wanted):
        copy(_address(b, pipe, base, j), first)
    ptx.copy_commit(b)


@lowers(pipeline.fill)
def _(pipe, j, source, at, rows: int, cols: int, end, vector_bytes: int):
    needs_index("fill", j)
    cp_async.check_copy("fill", pipe.tile, source, at, rows, cols, vector_bytes)
    if not (end is None or integer(end)):
        raise TypeError(f"fill: end must be an integer, got {end}")
    warp_rows = pipe.warp_rows

    def emit(b, base, j, array, at, _, __, last, ___):
        def copy(address, first):
            if isinstance(pipe.tile, sv):
                return cp_async.lower_copy_numbers(b, source, pipe.tile, address, array, at, cols, warp_rows, first)
            cp_async.lower_copy(b, source, pipe.tile, address, array, at, rows, cols, vector_bytes, warp_rows, first)

        _fill(b, pipe, base, j, None if end is None else last, copy)

    return void, emit


@lowers(pipeline.look_up)
def _(pipe, pages, size, at, last, begin):
    page_rows, emit = paged_copies.look_up_rule(pipe.tile, pipe.warp_rows, pages, size, at, last, begin)
    return page_rows, lambda b, _, *values: emit(b, b.mul(b.warp(), b.u32(pipe.warp_rows)), *values)


@lowers(pipeline.fill_pages)
def _(pipe, j, pool, page_rows, at, last, end, vector_bytes: int):
    needs_index("fill_pages", j)
    copies = paged_copies.copy_pages_rule("fill_pages", pipe.tile, pipe.warp_rows, pool, page_rows, at, last, vector_bytes)
    if not (end is None or integer(end)):
        raise TypeError(f"fill_pages: end must be an integer, got {end}")

    def emit(b, base, j, array, page_rows, at, last, end_value, _):
        def copy(address, first):
            copies(b, address, first, array, page_rows, at, last)

        _fill(b, pipe, base, j, None if end is None else end_value, copy)

    return void, emit


@lowers(pipeline.wait_warp)
def _(pipe, j, newer: int):
    needs_index("wait_warp", j)
    if newer < 0:
        raise TypeError(f"wait_warp: newer must be 0 or more, got {newer}")
    part, nbytes = _warp_tile_type(pipe)

    def emit(b, base, j, _):
        ptx.copy_wait(b, newer)
        ptx.warp_sync(b)
        return b.add(_address(b, pipe, base, j), b.mul(b.warp(), b.u32(nbytes)))

    return part, emit


@lowers(pipeline.reuse)
def _(pipe, tile: type):
    stage_bytes = pipe.stages * pipe.tile.stage_bytes
    if not isinstance(tile, st) or tile.stage_bytes > stage_bytes:
        raise TypeError(f"reuse: takes the type of a shared tile of up to the {stage_bytes} bytes of {pipe}, got {tile}")
    return tile, lambda b, base, _: b.add(base, b.u32(pipe.start))


@lowers(pipeline.wait)
def _(pipe, j, newer: int):
    needs_index("wait", j)
    if newer < 0:
        raise TypeError(f"wait: newer must be 0 or more, got {newer}")

    def emit(b, base, j, _):
        ptx.copy_wait(b, newer)
        ptx.named_barrier(b, b.u32(0), layout.LANES * pipe.warps)
        return _address(b, pipe, base, j)

    return pipe.tile, emit
