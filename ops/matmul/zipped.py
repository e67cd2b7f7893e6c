"""The second product of attention in fp8, P V: its operands in the order that fp8 instructions want, with no shuffle.

An accumulator's lane has two neighbouring columns of each eight; as the left operand of an fp8 product it would have four of
sixteen. But the contracted axis may be counted in any order, if both operands have the same: `zipped` columns
(tiles/layout.py) are what a lane has. So P is rounded where it is, and V, which must be transposed anyway, for fp8 operands lie
along the contracted axis, is written in that order:

    p = zipped(p)                             # P's columns
    warpgroup.transpose_zipped(turned, v)     # V's rows, as columns
    o = warpgroup.mma_ABt(o, p, turned)       # o + P V
"""

import numpy as np

from tiles import layout
from tiles.compiling import ptx
from tiles.compiling.numba_types import void
from tiles.dtypes import fp8e4m3, fp32
from tiles.interpreter import current_warp
from tiles.layout import WARPGROUP
from tiles.op import lowers, op
from tiles.types import rt, st

from ..elementwise.convert import halves_of
from ..threads.warps import FOUR_WARPS

CHUNK = 16  # bytes of a row of an 8 x 8 matrix of 2-byte elements
KEYS = 32  # rows of V that one ldmatrix reads
EVEN, ODD = 0x6420, 0x7531  # prmt: every other byte of two registers
TOGETHER = 3  # ldmatrix under way at once: with 4 a producer of 40 registers spills


@op
def zipped(tile):
    """tile in fp8e4m3 (larger numbers become 448), with its columns in the order of layout.zipped: a left operand whose
    elements stay in their lanes. tile: fp32, in row layout, a multiple of 32 columns."""
    return tile.array[:, layout.zipped(np.arange(tile.shape[1]))]


@lowers(zipped)
def _(tile):
    if not isinstance(tile, rt) or tile.dtype is not fp32 or tile.layout != "row" or tile.cols % 32:
        raise TypeError(f"zipped: takes an fp32 tile in row layout, of a multiple of 32 columns, got {tile}")
    out = rt(tile.rows, tile.cols, fp8e4m3)

    def emit(b, value):
        elements, words = b.unpack(value), []
        for k in range(0, len(elements), 8):  # a lane's share of two rows and sixteen columns
            words += [b.quad(fp8e4m3, *(elements[k + row + i] for i in (0, 1, 4, 5))) for row in (0, 2)]
        return b.pack(words)

    return out, emit


@op
def transpose_zipped(target, source):
    """target[:] = source.T, with its columns in the order of layout.zipped, by four warps; each writes its quarter of target's
    rows. Both are shared tiles of fp8e4m3, source st(keys, n) and target st(n, keys), keys a multiple of 32 and n of 64.
    Afterwards the source may be given back and the target published, without a fence of its own."""
    warp, rows = current_warp(), target.rows // WARPGROUP
    rows_of_warp = range(rows * warp.rank, rows * (warp.rank + 1))
    matrices = warp.read(source)[layout.zipped(np.arange(source.rows))][:, rows_of_warp.start : rows_of_warp.stop]
    warp.write(target, matrices.T, rows_of_warp)
    warp.fence_async()


@lowers(transpose_zipped)
def _(target, source):
    fits = isinstance(target, st) and isinstance(source, st) and target.dtype is source.dtype is fp8e4m3
    if not fits or target.shape != source.shape[::-1] or source.rows % KEYS or source.cols % (WARPGROUP * CHUNK):
        raise TypeError(
            f"transpose_zipped: takes st(n, keys) and st(keys, n) of fp8e4m3, keys a multiple of {KEYS} and n of "
            f"{WARPGROUP * CHUNK}, got {target} and {source}"
        )
    chunks = target.rows // WARPGROUP // CHUNK  # a warp's chunks of source's columns

    def emit(b, to, at):
        lane, warp = b.lane(), FOUR_WARPS.emit_rank(b)
        start, swizzle = b.row_address(source, at, lane)
        # Lanes 4 g to 4 g + 3 have columns 2 g and 2 g + 1 of source's chunk, the target's rows. One of two matrices gets even
        # ones of the chunk's first half and odd ones of its second, the other the rest: eight rows each that share no bank.
        place, second, group = b.and_(lane, b.u32(7)), b.and_(b.lshr(lane, b.u32(3)), b.u32(1)), b.lshr(lane, b.u32(4))
        row = b.add(b.shl(place, b.u32(1)), b.xor(b.lshr(place, b.u32(2)), second))
        late = b.icmp_unsigned(">=", lane, b.u32(16))
        pick = [b.select(late, b.u32(x), b.u32(y)) for x, y in ((ODD, EVEN), (EVEN, ODD))]
        for chunk in range(chunks):
            column = b.add(b.mul(warp, b.u32(chunks)), b.u32(chunk))  # of source, in chunks
            panel, byte = _in_panel(b, source, column)
            read = b.add(b.add(start, panel), b.xor(byte, swizzle))
            first = b.add(b.mul(column, b.u32(CHUNK)), row)
            row_start, turn = b.row_address(target, to, first)
            for batch in range(0, source.rows, KEYS * TOGETHER):
                keys = range(batch, min(batch + KEYS * TOGETHER, source.rows), KEYS)
                matrices = [ptx.ldmatrix(b, b.add(read, b.u32(key * source.width)), transposed=True) for key in keys]
                for key, four in zip(keys, matrices, strict=True):
                    turned = [halves_of(b, *four[k : k + 2], half) for k in (0, 2) for half in pick]
                    panel, byte = divmod(key, target.width)
                    inside = b.xor(b.add(b.mul(group, b.u32(CHUNK)), b.u32(byte)), turn)
                    ptx.stmatrix(b, b.add(b.add(row_start, inside), b.u32(panel * target.panel_bytes)), turned)
        ptx.reads_done(b)

    return void, emit


def _in_panel(b, tile, chunk):
    """(bytes to the panel that a chunk of 16 bytes of a row lies in, bytes inside of it)."""
    each = tile.width // CHUNK
    panel = b.lshr(chunk, b.u32(each.bit_length() - 1))
    inside = b.mul(b.and_(chunk, b.u32(each - 1)), b.u32(CHUNK))
    return b.mul(panel, b.u32(tile.panel_bytes)), inside
