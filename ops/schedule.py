"""Which tiles a block of a persistent grid works on, and where they lie.

The blocks take the tiles in turn, back and forth: of 4 blocks, block 0 takes tiles 0, 7, 8, 15, ..., block 3 takes 3, 4, 11,
12, ... So if the tiles come longest first, every block gets about the same amount of work.

    r = 0                          # the grid has one axis: tiles.launch(kernel, grid=multiprocessors, ...)
    while persistent_tile(r) < tiles:
        ...                        # tile number persistent_tile(r)
        r += 1

Where there are sequences of any lengths, blocks can share all their tiles evenly: `line_up` says which sequence a tile is of.

`divmod` takes such numbers apart, in the 32 bits that the GPU has units for (Numba's // and % work on 64, with a sign).
"""

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.builder import i1, i32, i64
from tiles.interpreter import AccessStep, current_warp, note
from tiles.layout import LANES
from tiles.numba_names import types
from tiles.op import inlined, integer, lowers, op


@op
def divmod(index, extent):
    """(index // extent, index % extent), as Python's divmod, of integers: 0 <= index < 2**31, 1 <= extent < 2**31."""
    if not (0 <= index < 2**31 and 1 <= extent < 2**31):
        raise current_warp().hazard(f"divmod: takes 0 <= index < 2**31 and 1 <= extent < 2**31: index={index}, extent={extent}")
    return index // extent, index % extent


@lowers(divmod)
def _(index, extent):
    if not (integer(index) and integer(extent)):
        raise TypeError(f"divmod: takes two integers, got {index} and {extent}")

    def lower(b, index, extent):
        index, extent = b.u32(index), b.u32(extent)
        quotient = b.udiv(index, extent)
        return b.context.make_tuple(b, result, [quotient, b.sub(index, b.mul(quotient, extent))])

    result = types.UniTuple(types.int32, 2)
    return result, lower


@op
def warp_index():
    """Which of its block's warps this is: 0, 1, ... The compiler knows it to be the same for all lanes of the warp, unlike
    `cuda.threadIdx.x // 32`: values computed from it alone are in uniform registers."""
    return current_warp().index


@lowers(warp_index)
def _():
    return types.int32, lambda b: ptx.uniform(b, b.warp())


@op
def persistent_tile(r, cluster=1):
    """The number of the r-th tile, r from 0, that this block of a grid along x takes, together with its peers in a cluster of
    that many blocks. It grows with r, and is below 2**31."""
    block, blocks = current_warp().block.index[0] // cluster, current_warp().block.grid[0] // cluster
    return r * blocks + (blocks - 1 - block if r % 2 else block)


@lowers(persistent_tile)
def _(r, cluster: int):
    if not integer(r) or cluster < 1:
        raise TypeError(f"persistent_tile: takes an integer, and how many blocks a cluster has, got {r} and {cluster}")

    def lower(b, r, _):
        block, blocks = (b.udiv(b.special(name), b.u32(cluster)) for name in ("ctaid.x", "nctaid.x"))
        r = b.u32(r)
        back = b.sub(b.sub(blocks, b.u32(1)), block)
        return b.add(b.mul(r, blocks), b.select(b.trunc(r, i1), back, block))

    return types.int32, lower


@inlined
def rasterize(index, rows, cols, height):
    """(row, col) of tile number `index` in a grid of rows x cols tiles, taken in groups of `height` rows (the last may have
    fewer), each group column by column. Tiles that are computed at the same time then lie in few rows *and* few columns, so
    their products' operands stay in the L2 cache. height 1 is row by row."""
    group, inside = divmod(index, height * cols)
    col, row = divmod(inside, min(height, rows - height * group))
    return height * group + row, col


# ---- sequences of any lengths -----------------------------------------------------------------------------------------
@op
def line_up(lengths, begins, most, size, first, count, before, tile, added=None):
    """Find a tile among those of many sequences, one sequence after the other. For the 32 sequences from number `first` on, of
    `count`, it returns: how many of them end at tile number `tile` or before it, where the last of these ends, and where all
    of them end. `before` tiles come before these sequences.

    Sequence n has the elements from begins[n] (0 if begins is None) to lengths[n], and `added` more after them, but only the
    last `most` of them. `size` elements are a tile, and each sequence has one at least. A lane looks at one sequence, and
    five shuffles add them up. All numbers are below 2**31."""
    numbers = np.arange(first, min(first + LANES, count))
    note(AccessStep, np.asarray(lengths)[numbers], False)
    elements = np.asarray(lengths)[numbers].astype(np.int64) + (added or 0)
    if begins is not None:
        note(AccessStep, np.asarray(begins)[numbers], False)
        elements = elements - np.asarray(begins)[numbers].astype(np.int64)
    ends = before + np.cumsum(np.maximum(-(-np.minimum(elements, most) // size), 1))
    passed = int(np.count_nonzero(ends <= tile))
    return passed, int(ends[passed - 1]) if passed else int(before), int(ends[-1]) if len(ends) else int(before)


@lowers(line_up)
def _(lengths, begins, most, size: int, first, count, before, tile, added):
    arrays = [lengths] if begins is None else [lengths, begins]
    wide = types.int32, types.int64
    if not all(isinstance(x, types.Array) and x.ndim == 1 and x.dtype in wide for x in arrays):
        raise TypeError(f"line_up: takes arrays of one axis of int32 or int64, got {lengths} and {begins}")
    if not all(map(integer, (most, first, count, before, tile, added or 0))) or size is None or size < 1 or size & size - 1:
        raise TypeError(f"line_up: takes integers, and a power of 2 that is known when the kernel is compiled, got {size=}")
    result = types.UniTuple(types.int32, 3)

    def element(b, array, value, n, exists):
        """The n-th element of an array, 0 if there is none."""
        data, _, (stride,) = b.array(array, value)
        letter, register = ("r", i32) if array.dtype.bitwidth == 32 else ("l", i64)
        kind = f"b{array.dtype.bitwidth}"
        text = f"{{.reg .pred p;\nsetp.ne.u32 p, $2, 0;\nmov.{kind} $0, 0;\n@p ld.global.{kind} $0, [$1];}}"
        value = b.asm(register, text, f"={letter},l,r", b.add(data, b.mul(b.zext(n, i64), stride)), b.zext(exists, i32))
        return b.u32(value)

    def lower(b, vlengths, vbegins, most, _, first, count, before, tile, vadded):
        lane = b.lane()
        n = b.add(b.u32(first), lane)
        exists = b.icmp_signed("<", n, b.u32(count))
        size_of = element(b, lengths, vlengths, n, exists)
        if added is not None:
            size_of = b.add(size_of, b.u32(vadded))
        if begins is not None:
            size_of = b.sub(size_of, element(b, begins, vbegins, n, exists))
        most, before = b.u32(most), b.u32(before)
        size_of = b.select(b.icmp_signed("<", size_of, most), size_of, most)
        tiles = b.ashr(b.add(size_of, b.u32(size - 1)), b.u32(size.bit_length() - 1))
        tiles = b.select(b.icmp_signed(">", tiles, b.u32(1)), tiles, b.u32(1))
        end = b.select(exists, tiles, b.u32(0))
        for distance in (1, 2, 4, 8, 16):
            previous_end = ptx.shuffle(b, end, b.sub(lane, b.u32(distance)))
            end = b.add(end, b.select(b.icmp_unsigned(">=", lane, b.u32(distance)), previous_end, b.u32(0)))
        end = b.add(end, before)
        is_past = b.and_(exists, b.icmp_signed("<=", end, b.u32(tile)))
        passed = b.asm(i32, "popc.b32 $0, $1;", "=r,r", ptx.ballot(b, b.zext(is_past, i32)), effect=False)
        last = ptx.shuffle(b, end, b.sub(passed, b.u32(1)))
        last = b.select(b.icmp_unsigned("!=", passed, b.u32(0)), last, before)
        return b.context.make_tuple(b, result, [passed, last, ptx.shuffle(b, end, b.u32(LANES - 1))])

    return result, lower
