"""Pipelines by cp.async: stages that all warps of a block fill together, with no barriers of their own (sm_80 and later).

    smem = shared(k=pipeline(K, STAGES, warps=4))         # on the host
    (k,) = smem.open()                                    # in the kernel
    for j in range(STAGES - 1):
        k.fill(j, x, at(j), end=n)                        every warp starts copying its rows: one group
    for j in range(n):
        tile = k.wait(j, newer=STAGES - 2)                tile j, once all but the youngest groups are here; the block meets
        k.fill(j + STAGES - 1, x, at(...), end=n)         the block has met: its slot is free, nobody reads tile j - 1
        ...

As with rings, the j-th tile lies in slot j % stages, whoever asks. Groups are counted by each thread, over all its pipelines.

A warp that reads no rows but those that it copies itself needs no other warp: `own` waits for these alone, and nobody meets.
What lies in pages, `fill_pages` brings, once `look_up` has said in which. When all is read, `reuse` gives the memory to
something else.

Tiles may be vectors (`sv`), of numbers of 4 bytes: a lane brings a number, and they may lie any stride apart.
"""

import itertools
from dataclasses import dataclass, replace

from llvmlite import ir
from numba.cuda import types

from . import layout, ptx
from .builder import i32, i64
from .interpreter import here
from .op import integer, lowers, op
from .plumbing import SCALARS, compile_time, void
from .ring import needs_index
from .types import st, sv
from .values import SharedTile

PIECES = (16, 8, 4, 2)  # bytes that are copied at once: by a cp.async, or two by a load and a store
CHUNK_BYTES = PIECES[0]  # that a lane copies of a row
ELEMENT = PIECES[-1]  # bytes that cp.async cannot copy
VECTOR = 16  # elements that a vector has a multiple of
NUMBER = 4  # bytes of a vector's numbers, as cp.async copies them one by one


@compile_time
@dataclass(frozen=True)
class pipeline:
    """`stages` copies of one shared tile or vector, each filled by all `warps` warps of the block, a share of its rows each."""

    tile: st | sv
    stages: int
    warps: int
    name: str = ""  # these are set by `shared`: what it is called, and bytes from the base of shared memory
    start: int = 0

    def __post_init__(self):
        if self.stages < 1 or self.warps < 1 or rows_of(self.tile) % self.warps:
            raise ValueError(
                f"pipeline: stages and warps must be positive, and each warp copy as many rows, "
                f"got {self.stages} stages and {self.warps} warps for {self.tile}"
            )
        if isinstance(self.tile, sv) and (self.tile.dtype.itemsize != NUMBER or self.tile.length // self.warps % VECTOR):
            raise ValueError(f"pipeline: of a vector a warp copies a multiple of {VECTOR} numbers of {NUMBER} bytes: {self}")

    def __str__(self):
        return f"pipeline({self.tile}, {self.stages} stages, {self.warps} warps)"

    def slot(self, j):
        """Address of the j-th tile."""
        return self.start + j % self.stages * self.tile.room

    @property
    def share(self):
        """Rows that a warp copies."""
        return rows_of(self.tile) // self.warps

    @op
    def fill(self, j, source, at, rows=-2, cols=-1, end=None, piece=CHUNK_BYTES):
        """Start copying the tile at `at` of a global array into slot j % stages, as one group; all warps of the block call it.
        Nobody may read tile j - stages any more: call it after a `wait` since. With j >= `end` nothing is copied and the group
        is empty, so that counts of younger groups hold to the end. Other arguments: see ops.copy_async. A vector lies along
        axis `cols` of the array, at any stride."""
        warp = _opened(self, j)
        if end is None or j < end:
            warp.copy_async(_tile(self, j), source, at, rows, cols, piece, _own(self, warp))
        warp.commit_group((self.name, j))

    @op
    def look_up(self, pages, size, at, last):
        """In which pages this warp's rows of a tile lie, for `fill_pages`: row n of sequence s is row n % size of page
        pages[s, n // size], numbers of int32 or int64; or of page n // size, if `pages` is None. at: (sequence, the tile's
        first row). Behind row `last` no numbers are read. It is looked up here, and waited for where it is needed: two tiles
        before, it costs no time."""
        return here().look_up(pages, size, at, last, _own(self, here()))

    @op
    def fill_pages(self, j, pool, found, at, last, end=None, piece=CHUNK_BYTES):
        """`fill` with rows that lie in the pages that were `found` (see look_up) of a pool, an array (page, row, ..., column).
        at: (the tile's first row, ..., column), as if there were no pages; of a vector there is no column. Rows from `last` on
        are 0."""
        warp = _opened(self, j)
        if end is None or j < end:
            warp.copy_pages(_tile(self, j), pool, found, at, last, piece, _own(self, warp))
        warp.commit_group((self.name, j))

    @op
    def own(self, j, newer=0):
        """This warp's share of the rows of the j-th tile, which it has filled itself, once they are in shared memory: waits for
        all its groups of copies but the `newer` youngest, and for no other warp. Where a tile is only ever read so, a slot may
        be filled again as soon as the warp itself has read it, and waited since."""
        warp = _opened(self, j)
        warp.wait_group(newer, (self.name, j))
        return _share(self, j, warp.index)

    @op
    def reuse(self, tile):
        """Its memory as one shared tile of another type: the block has met since anybody read or filled a tile of it."""
        _opened(self, 0)
        return SharedTile(tile, self.start, f"the memory of pipeline {self.name!r}")

    @op
    def wait(self, j, newer=0):
        """The j-th tile, once it is in shared memory: waits for this thread's groups of copies but the `newer` youngest, then
        for all other warps of the block. What they have read before may then be overwritten."""
        warp = _opened(self, j)
        warp.wait_group(newer, (self.name, j))
        threads = layout.LANES * self.warps
        warp.block.named(0, threads).meet(warp, threads, what=f"tile {j} of pipeline {self.name!r}: ")
        return _tile(self, j)


# ---- meanings ------------------------------------------------------------------------------------------------------
def _opened(pipe, j):
    warp = here()
    if j < 0:
        raise warp.hazard(f"pipeline {pipe.name!r} has no tile {j}")
    if warp.block.opened is None or pipe.name not in warp.block.opened:
        raise warp.hazard(f"{pipe} is used, and the kernel has not opened it: `q, k = smem.open()`", "plan")
    if warp.block.size != pipe.warps:
        raise warp.hazard(f"{pipe} is filled by a block of {warp.block.size} warps", "collective")
    return warp


def _tile(pipe, j):
    return SharedTile(pipe.tile, pipe.slot(j), f"tile {j} of pipeline {pipe.name!r}")


def rows_of(tile):
    """Rows of a tile, elements of a vector."""
    return tile.length if isinstance(tile, sv) else tile.rows


def _own(pipe, warp):
    """The rows of a tile that a warp copies."""
    return range(pipe.share * warp.index, pipe.share * (warp.index + 1))


def _part(pipe):
    """(the type of a warp's share of a tile, its bytes)"""
    if isinstance(pipe.tile, sv):
        return replace(pipe.tile, length=pipe.share), pipe.share * NUMBER
    return replace(pipe.tile, rows=pipe.share), pipe.share * pipe.tile.width


def _share(pipe, j, warp):
    whole, (part, nbytes) = _tile(pipe, j), _part(pipe)
    first = 0 if isinstance(part, sv) else pipe.share * warp
    return SharedTile(part, whole.address + nbytes * warp, f"warp {warp}'s rows of {whole.name}", first=first)


# ---- lowerings -----------------------------------------------------------------------------------------------------
def check_copy(name, tile, source, at, rows, cols, piece):
    """TypeError if cp.async cannot fill a shared tile with this part of a global array."""
    if not isinstance(source, types.Array) or SCALARS.get(source.dtype) is not tile.dtype:
        raise TypeError(f"{name}: the source must be a global array of {tile.dtype} for {tile}, got {source}")
    if not (isinstance(at, types.BaseTuple) and len(at) == source.ndim and all(map(integer, at))):
        raise TypeError(f"{name}: `at` must be {source.ndim} integers for an array of {source.ndim} axes, got {at}")
    if isinstance(tile, sv):
        return
    if not all(-source.ndim <= axis < source.ndim for axis in (rows, cols)) or (rows - cols) % source.ndim == 0:
        raise TypeError(f"{name}: {tile} lies along 2 axes of the array, got {rows} and {cols} of {source.ndim}")
    pieces = PIECES if tile.dtype.itemsize == ELEMENT else PIECES[:-1]
    if piece not in pieces:
        raise TypeError(f"{name}: piece must be one of {pieces} bytes for {tile.dtype}, got {piece}")


def _parts(tile, unit):
    """What a lane copies of its row, `unit` bytes of a chunk at a time, a panel's after the other: (panel, byte in the row that
    the lane's first one is 0 of, byte in the chunk)."""
    for panel, part in itertools.product(range(tile.panels), range(0, CHUNK_BYTES, unit)):
        yield panel, panel * tile.width + part, part


def _clamped(b, x, most):
    """The 64-bit x as 32 bits, no less than 0 and no more than `most`."""
    low, high = i64(0), i64(most)
    x = b.select(b.icmp_signed("<", x, high), x, high)
    return b.u32(b.select(b.icmp_signed("<", x, low), low, x))


def _counts(b, tile, begin, end, piece):
    """How many bytes of each part to copy, where of a row those from `begin` on and before `end` lie inside the array; `begin`
    is where a part begins."""
    for _, low, _ in _parts(tile, piece):
        left = b.sub(end, b.u32(low))
        left = b.select(b.icmp_signed("<", left, b.u32(piece)), left, b.u32(piece))
        outside = b.or_(b.icmp_signed("<", left, b.u32(0)), b.icmp_signed(">", begin, b.u32(low)))
        yield b.select(outside, b.u32(0), left)


def _place(b, tile, address, share, first):
    """What a lane copies of the first rows from `first` on: (the lane, rows that a warp copies at once, the lane's row, the
    byte in the row that its chunk begins with, the row's address, where the chunk goes there, has the lane a row at all?)."""
    chunks = tile.width // CHUNK_BYTES  # of a panel's row
    step = layout.LANES // chunks
    lane = b.lane()
    own = b.udiv(lane, b.u32(chunks))
    row, byte = b.add(own, first), b.mul(b.and_(lane, b.u32(chunks - 1)), b.u32(CHUNK_BYTES))
    start, swizzle = b.row_address(tile, address, row)
    guard = b.zext(b.icmp_unsigned("<", own, b.u32(min(step, share))), i32)
    return lane, step, row, byte, start, b.xor(byte, swizzle), guard


def _further(b, tile, start, chunk, down):
    """Where a chunk goes that lies `down` rows further than the one that goes to `chunk` of the row at `start`."""
    return b.add(b.add(start, b.xor(chunk, b.u32(down * tile.width >> 3 & tile.width - 16))), b.u32(down * tile.width))


def lower_copy(b, ty, tile, address, array, at, rows, cols, piece, share, first):
    """Start copying rows first.. first + share of the tile at `at`, by one warp: lanes side by side along a row's chunks of 16
    bytes, so that a panel's row is one access to global memory and its chunks lie in different banks. A tile that lies inside
    the array is copied without looking at every row: most do, and the copies stand in a loop that has better to do."""
    data, extents, strides = b.array(ty, array)
    at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
    rows, cols, itemsize = rows % ty.ndim, cols % ty.ndim, tile.dtype.itemsize
    inside = b.icmp_unsigned("==", b.u32(0), b.u32(0))
    for axis, size in ((rows, tile.rows), (cols, tile.cols)):
        fits = b.icmp_signed("<=", at[axis], b.sub(extents[axis], ir.Constant(i64, size)))
        inside = b.and_(b.and_(inside, fits), b.icmp_signed(">=", at[axis], ir.Constant(i64, 0)))
    lane, step, row, byte, start, chunk, guard = _place(b, tile, address, share, first)
    source, first_row = b.add(data, b.zext(byte, i64)), b.add(b.trunc(at[rows], i32), row)  # rows are fewer than 2**31
    for axis in range(ty.ndim):
        if axis != rows:
            source = b.add(source, b.mul(at[axis], ir.Constant(i64, itemsize) if axis == cols else strides[axis]))
    source = b.add(source, b.mul(b.sext(first_row, i64), strides[rows]))  # what changes from tile to tile last
    nbytes, by_elements = tile.cols * itemsize, piece == ELEMENT
    unit = CHUNK_BYTES if by_elements else piece

    def copies(counts):
        """One after the other; counts(row): of each part of it, how many bytes; or by elements: which bytes of the row."""
        line, further = source, b.mul(strides[rows], ir.Constant(i64, step))
        for down in range(0, share, step):
            to = _further(b, tile, start, chunk, down)
            for (panel, low, part), count in zip(_parts(tile, unit), counts(down), strict=True):
                target, origin = b.add(to, b.u32(panel * tile.panel_bytes + part)), b.add(line, ir.Constant(i64, low))
                if by_elements:
                    ptx.copy_elements(b, target, origin, low, *count, guard)
                else:
                    ptx.copy_async(b, target, origin, count, guard, piece)
            line = b.add(line, further)  # not the first plus a multiple, each of which the loop would hold in registers

    with b.if_then(inside):
        all_of_it = (b.u32(0), b.u32(nbytes)) if by_elements else b.u32(piece)
        copies(lambda _: itertools.repeat(all_of_it, tile.panels * CHUNK_BYTES // unit))
    with b.if_then(b.not_(inside)):
        byte = ptx.shuffle(b, byte, lane)  # of this lane itself: now no loop can make the widths ahead and hold them
        first_byte = b.add(b.mul(at[cols], ir.Constant(i64, itemsize)), b.zext(byte, i64))
        begin = _clamped(b, b.sub(i64(0), first_byte), nbytes)  # of the row's bytes, counted from the lane's first one
        end = _clamped(b, b.sub(b.mul(extents[cols], i64(itemsize)), first_byte), nbytes)
        within = [] if by_elements else list(_counts(b, tile, begin, end, piece))

        def cut(down):
            exists = b.icmp_unsigned("<", b.add(first_row, b.u32(down)), b.trunc(extents[rows], i32))
            if by_elements:
                return itertools.repeat((begin, b.select(exists, end, b.u32(0))), tile.panels)
            return [b.select(exists, count, b.u32(0)) for count in within]

        copies(cut)


def _numbers(b, tile, address, share, first):
    """A lane's numbers among `share` of a shared vector from `first` on: (its number, its address, is there one?) of each."""
    lane = b.lane()
    for down in range(0, share, layout.LANES):
        own = b.add(lane, b.u32(down))
        guard = b.zext(b.icmp_unsigned("<", own, b.u32(share)), i32)
        own = b.add(own, first)
        yield own, b.add(address, b.mul(own, b.u32(NUMBER))), guard


def lower_copy_numbers(b, ty, tile, address, array, at, axis, share, first):
    """Start copying numbers first.. first + share of a vector that lies at `at` along an axis of a global array."""
    data, extents, strides = b.array(ty, array)
    at, axis = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)], axis % ty.ndim
    for k in range(ty.ndim):
        if k != axis:
            data = b.add(data, b.mul(at[k], strides[k]))
    for own, to, guard in _numbers(b, tile, address, share, first):
        place = b.add(at[axis], b.zext(own, i64))
        exists = b.and_(b.icmp_signed(">=", place, i64(0)), b.icmp_signed("<", place, extents[axis]))
        origin = b.add(data, b.mul(place, strides[axis]))
        ptx.copy_async(b, to, origin, b.select(exists, b.u32(NUMBER), b.u32(0)), guard, NUMBER)


def lower_number_pages(b, ty, tile, address, pool, found, at, last, share, first):
    """The same of numbers of which is known where in pages they lie."""
    data, _, strides = b.array(ty, pool)
    at, found = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)], b.unpack(found)
    for axis in range(2, ty.ndim):
        data = b.add(data, b.mul(at[axis - 1], strides[axis]))
    numbers = _numbers(b, tile, address, share, first)
    for (own, to, guard), number, inside in zip(numbers, found[::2], found[1::2], strict=True):
        exists = b.icmp_signed("<", b.add(b.trunc(at[0], i32), own), b.u32(last))
        origin = b.add(b.add(data, b.mul(b.sext(number, i64), strides[0])), b.mul(b.zext(inside, i64), strides[1]))
        ptx.copy_async(b, to, origin, b.select(exists, b.u32(NUMBER), b.u32(0)), guard, NUMBER)


def _ownrows_of(b, tile, share, first):
    """(a lane's row, has it one?) of each row that it copies, or a part of."""
    if isinstance(tile, sv):
        return [(own, guard) for own, _, guard in _numbers(b, tile, b.u32(0), share, first)]
    _, step, row, *_, guard = _place(b, tile, b.u32(0), share, first)
    return [(b.add(row, b.u32(down)), guard) for down in range(0, share, step)]


def _looked_up(tile, share):
    """Of how many rows a lane knows where they lie."""
    return -(-share // (layout.LANES if isinstance(tile, sv) else layout.LANES * CHUNK_BYTES // tile.width))


def lower_look_up(b, tile, table_ty, table, size, at, last, share, first):
    """(number, row there) of each of a lane's rows, all looked up at once. Neighbours in a sequence are neighbours in the
    table, so that what several lanes look up is one access."""
    sequence, begin = b.unpack(at)
    begin, size, found = b.u32(begin), b.u32(size), []
    if table_ty is not None:
        numbers, _, steps = b.array(table_ty, table)
        numbers = b.add(numbers, b.mul(b.sext(sequence, i64) if sequence.type.width < 64 else sequence, steps[0]))
        wide = table_ty.dtype.bitwidth == 64
        register, letter, kind = (i64, "l", "b64") if wide else (i32, "r", "b32")
        text = f"{{.reg .pred p;\nsetp.ne.u32 p, $2, 0;\nmov.{kind} $0, 0;\n@p ld.global.{kind} $0, [$1];}}"
    for row, guard in _ownrows_of(b, tile, share, first):
        place = b.add(begin, row)
        page = number = b.udiv(place, size)
        if table_ty is not None:
            exists = b.and_(b.icmp_signed("<", place, b.u32(last)), b.icmp_signed("!=", guard, b.u32(0)))
            entry = b.add(numbers, b.mul(b.zext(page, i64), steps[1]))
            number = b.asm(register, text, f"={letter},l,r", entry, b.zext(exists, i32))
            number = b.trunc(number, i32) if wide else number
        found += number, b.sub(place, b.mul(page, size))
    return found


def lower_pages(b, ty, tile, address, pool, found, at, last, piece, share, first):
    """The same of rows of which is known where in pages they lie."""
    data, extents, strides = b.array(ty, pool)
    at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
    itemsize, cols, found = tile.dtype.itemsize, ty.ndim - 1, b.unpack(found)
    _, step, row, byte, start, chunk, guard = _place(b, tile, address, share, first)
    line = b.add(data, b.zext(byte, i64))
    for axis in range(2, ty.ndim):
        line = b.add(line, b.mul(at[axis - 1], ir.Constant(i64, itemsize) if axis == cols else strides[axis]))
    first_row = b.add(b.trunc(at[0], i32), row)
    nbytes, by_elements = tile.cols * itemsize, piece == ELEMENT
    first_byte = b.add(b.mul(at[-1], ir.Constant(i64, itemsize)), b.zext(byte, i64))
    begin = _clamped(b, b.sub(i64(0), first_byte), nbytes)
    end = _clamped(b, b.sub(b.mul(extents[cols], i64(itemsize)), first_byte), nbytes)
    within = [] if by_elements else list(_counts(b, tile, begin, end, piece))
    for down, number, inside in zip(range(0, share, step), found[::2], found[1::2], strict=True):
        exists = b.icmp_signed("<", b.add(first_row, b.u32(down)), b.u32(last))
        to = _further(b, tile, start, chunk, down)
        source = b.add(b.add(line, b.mul(b.sext(number, i64), strides[0])), b.mul(b.zext(inside, i64), strides[1]))
        for k, (panel, low, part) in enumerate(_parts(tile, CHUNK_BYTES if by_elements else piece)):
            target, origin = b.add(to, b.u32(panel * tile.panel_bytes + part)), b.add(source, ir.Constant(i64, low))
            if by_elements:
                ptx.copy_elements(b, target, origin, low, begin, b.select(exists, end, b.u32(0)), guard)
            else:
                ptx.copy_async(b, target, origin, b.select(exists, within[k], b.u32(0)), guard, piece)


def _address(b, pipe, base, j):
    slot = b.urem(b.u32(j), b.u32(pipe.stages))
    return b.add(b.add(base, b.mul(slot, b.u32(pipe.tile.room))), b.u32(pipe.start))


def _fill(b, pipe, base, j, end, copy):
    """A group of copies, which copy(address of the tile, the warp's first row) starts if j < end."""
    first = b.mul(b.warp(), b.u32(pipe.share))
    wanted = b.icmp_signed("<", b.u32(j), b.u32(2**31 - 1 if end is None else end))
    with b.if_then(wanted):
        copy(_address(b, pipe, base, j), first)
    ptx.copy_commit(b)


@lowers(pipeline.fill)
def _(pipe, j, source, at, rows: int, cols: int, end, piece: int):
    needs_index("fill", j)
    check_copy("fill", pipe.tile, source, at, rows, cols, piece)
    if not (end is None or integer(end)):
        raise TypeError(f"fill: end must be an integer, got {end}")
    share = pipe.share

    def emit(b, base, j, array, at, _, __, last, ___):
        def copy(address, first):
            if isinstance(pipe.tile, sv):
                return lower_copy_numbers(b, source, pipe.tile, address, array, at, cols, share, first)
            lower_copy(b, source, pipe.tile, address, array, at, rows, cols, piece, share, first)

        _fill(b, pipe, base, j, None if end is None else last, copy)

    return void, emit


def found_type(tile, share, pages, size, at, last):
    """(the type of what is found of `share` of a tile's rows, what emits it: of those from a `first` one on)"""
    numbers, table = (types.int32, types.int64), None if pages in (None, types.none) else pages
    if table is not None and not (isinstance(table, types.Array) and table.ndim == 2 and table.dtype in numbers):
        raise TypeError(f"look_up: takes int32 or int64 numbers (sequence, which of its pages), or None, got {pages}")
    if not (isinstance(at, types.BaseTuple) and len(at) == 2 and all(map(integer, at)) and integer(size) and integer(last)):
        raise TypeError(f"look_up: size, last and the two of `at` must be integers, got {size}, {last} and {at}")
    found = types.UniTuple(types.int32, 2 * _looked_up(tile, share))

    def emit(b, first, value, vsize, vat, vlast):
        return b.context.make_tuple(b, found, lower_look_up(b, tile, table, value, vsize, vat, vlast, share, first))

    return found, emit


@lowers(pipeline.look_up)
def _(pipe, pages, size, at, last):
    found, emit = found_type(pipe.tile, pipe.share, pages, size, at, last)
    return found, lambda b, _, *values: emit(b, b.mul(b.warp(), b.u32(pipe.share)), *values)


def lower_copy_pages(name, tile, share, pool, found, at, last, piece):
    """What emits the copies of `share` of a tile's rows; TypeError."""
    vector = isinstance(tile, sv)
    if not isinstance(pool, types.Array) or pool.ndim < 3 - vector or not isinstance(at, types.BaseTuple):
        raise TypeError(f"{name}: takes a pool (page, row, ..., column), and a tuple `at`, got {pool} and {at}")
    check_copy(name, tile, pool, types.BaseTuple.from_types((types.int32, *at)), 1, -1, piece)
    counts = 2 * _looked_up(tile, share), 2 * share  # a lane's, the interpreter's
    if not (isinstance(found, types.UniTuple) and integer(found.dtype) and found.count in counts):
        raise TypeError(f"{name}: takes what look_up of a pipeline of such tiles has found, got {found}")
    if not integer(last):
        raise TypeError(f"{name}: last must be an integer, got {last}")

    def emit(b, address, first, array, found, at, last):
        if vector:
            return lower_number_pages(b, pool, tile, address, array, found, at, last, share, first)
        lower_pages(b, pool, tile, address, array, found, at, last, piece, share, first)

    return emit


@lowers(pipeline.fill_pages)
def _(pipe, j, pool, found, at, last, end, piece: int):
    needs_index("fill_pages", j)
    copies = lower_copy_pages("fill_pages", pipe.tile, pipe.share, pool, found, at, last, piece)
    if not (end is None or integer(end)):
        raise TypeError(f"fill_pages: end must be an integer, got {end}")

    def emit(b, base, j, array, found, at, last, end_value, _):
        def copy(address, first):
            copies(b, address, first, array, found, at, last)

        _fill(b, pipe, base, j, None if end is None else end_value, copy)

    return void, emit


@lowers(pipeline.own)
def _(pipe, j, newer: int):
    needs_index("own", j)
    if newer < 0:
        raise TypeError(f"own: newer must be 0 or more, got {newer}")
    part, nbytes = _part(pipe)

    def emit(b, base, j, _):
        ptx.copy_wait(b, newer)
        ptx.warp_sync(b)
        return b.add(_address(b, pipe, base, j), b.mul(b.warp(), b.u32(nbytes)))

    return part, emit


@lowers(pipeline.reuse)
def _(pipe, tile: type):
    room = pipe.stages * pipe.tile.room
    if not isinstance(tile, st) or tile.room > room:
        raise TypeError(f"reuse: takes the type of a shared tile of up to the {room} bytes of {pipe}, got {tile}")
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
