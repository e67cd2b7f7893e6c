"""Products of a 16-bit tile in registers and an fp8 or int8 tile in shared memory, which becomes fp16 on the way, exactly:

    q = unzipped(fp16(load(queries, Q)))             # once
    s = mma_ABt_unzipped(zeros(S), q, keys)          # Q K^T
    o = mma_AB_unzipped(o, fp16(p), values)          # O + P V, with O's columns unzipped
    store(out, rezipped(o), at)

ldmatrix moves two elements of one byte as one of two, so of the columns of such a tile a lane gets runs of four where it wants
pairs of each eight. Nothing is exchanged for that: the columns of the other tile, or those of the product, are counted in the
order that falls out, 0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15 of each sixteen: `unzipped`."""

from dataclasses import replace

import numpy as np

from tiles.compiling import ptx
from tiles.dtypes import bf16, fp8e4m3, fp8e5m2, fp16, fp32, int8, tf32
from tiles.interpreter import current_warp
from tiles.op import lowers, op
from tiles.types import rt, st

from ..memory.shared_tiles import matrix_addresses
from ..threads.lanes import gather, spread
from .mma import left_operand
from .product import product

SIXTEEN = np.array([0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15])
BYTES = fp8e4m3, fp8e5m2, int8


def _order(columns):
    return (np.arange(0, columns, 16)[:, None] + SIXTEEN).ravel()


def _back(columns):
    return np.argsort(_order(columns))


@op(takes_operands=True)
def unzipped(tile, dtype=None):
    """The columns of a tile in row layout in the order 0 1 4 5 8 9 12 13 2 3 6 7 10 11 14 15 of each sixteen. A tile of fp8 or
    int8 becomes `dtype`, bf16 or fp16, exactly, and lanes exchange nothing: it is the other operand, of 16 bits, for which they
    do. Other tiles, of 2 or 4 bytes an element, keep their dtype:

        acc = mma_ABt(acc, unzipped(x), unzipped(w, bf16))        # x: rt(m, k, bf16), w: rt(n, k, int8)"""
    return tile.array[:, _order(tile.shape[1])]


@op
def rezipped(tile):
    """The columns of an `unzipped` tile in their own order."""
    return tile.array[:, _back(tile.shape[1])]


def _is_in_rows(tile):
    return isinstance(tile, rt) and tile.layout == "row"


def _exchange(tile, exchanged):
    """(the tile's type, the code that exchanges its columns)"""
    step = 1 if tile.dtype.itemsize == 2 else 2  # registers of a row's pair

    def emit(b, value, *_):
        registers = b.unpack(value)
        for base in range(0, len(registers), 4 * step):
            for k in range(base, base + 2 * step):  # two rows' pairs of the first eight columns; of the next eight
                registers[k], registers[k + 2 * step] = exchanged(b, registers[k], registers[k + 2 * step])
        return b.pack(registers)

    return tile, emit


@lowers(unzipped)
def _(tile, dtype):
    if _is_in_rows(tile) and tile.dtype in BYTES and dtype in (bf16, fp16):
        return _widened(tile, dtype)
    if not _is_in_rows(tile) or tile.dtype in (*BYTES, tf32) or dtype is not None:
        takes = "takes a tile in row layout: of fp8 or int8 with a dtype that it becomes, bf16 or fp16; of others without one"
        raise TypeError(f"unzipped: {takes}; got {tile}{'' if dtype is None else f', {dtype}'}")
    return _exchange(tile, gather)


def _widened(tile, dtype):
    """(the type of the tile in 16 bits, the code). Of each sixteen columns a lane has four neighbours, which become the pairs
    that it has of the first and of the last eight."""
    out = replace(tile, dtype=dtype)

    def emit(b, value, *_):
        pairs = {}
        for k, register in enumerate(b.unpack(value)):
            row, col = tile.element(0, 4 * k)
            pairs[row, col], pairs[row, col + 8] = b.widened(tile.dtype, register, dtype)
        return b.pack([pairs[out.element(0, k)] for k in range(0, out.elements, 2)])

    return out, emit


@lowers(rezipped)
def _(tile):
    if not _is_in_rows(tile) or tile.dtype in BYTES:
        raise TypeError(f"rezipped: takes a tile in row layout, and not of fp8 or int8, got {tile}")
    return _exchange(tile, spread)


@op
def mma_ABt_unzipped(acc, a, b):
    """acc + rezipped(a) @ b.T in fp32, by one warp. acc: rt(m, n, fp32); a: an unzipped rt(m, k, fp16) or st(m, k, fp16);
    b: st(n, k) of fp8 or int8, n a multiple of 16 and k of 32."""
    return acc.array + product(_left(a)[:, _back(a.shape[1])], current_warp().read(b, fence=False).T)


def _left(a):
    """The elements of a left operand, wherever it lies."""
    return a.array if hasattr(a, "array") else current_warp().read(a, fence=False)


@op
def mma_AB_unzipped(acc, a, b):
    """acc + unzipped(a @ b) in fp32, by one warp. acc: rt(m, n, fp32), unzipped; a: rt(m, k, fp16) or st(m, k, fp16); b:
    st(k, n) of fp8 or int8, k a multiple of 16 and n of 32."""
    sums = product(_left(a), current_warp().read(b, fence=False))
    return acc.array + sums[:, _order(b.shape[1])]


def _check(name, acc, a, b, shape):
    fits = isinstance(a, st) or (isinstance(a, rt) and a.layout == "row")
    if (
        not fits
        or a.dtype is not fp16
        or not isinstance(b, st)
        or b.dtype not in BYTES
        or b.shape != shape
        or acc.shape[0] != a.rows
        or acc.dtype is not fp32
    ):
        raise TypeError(
            f"{name}: takes acc rt(m, n, fp32), a of fp16, rt(m, k) or st(m, k), and a shared tile b of fp8 or int8, "
            f"got {acc}, {a} and {b}"
        )


def _add(b, acc, at, left, right):
    """Add a product to four elements of acc, wherever they stand."""
    for k, x in zip(at, ptx.mma(b, (fp16, fp16), [acc[k] for k in at], left, right), strict=True):
        acc[k] = x


@lowers(mma_ABt_unzipped)
def _(acc, a, b):
    _check("mma_ABt_unzipped", acc, a, b, (acc.cols, a.cols))

    def emit(builder, vacc, left, address):
        c, fragment = builder.unpack(vacc), left_operand(builder, a, left, "row")
        addresses = matrix_addresses(builder, b, rt(b.rows, b.cols, b.dtype), address, builder.u32(0), True, recompute=True)
        addresses = list(addresses)
        across, bands = b.cols // 32, range(a.rows // 16)
        for along in range(across):
            left = {(band, step): fragment(band, 2 * along + step) for band in bands for step in (0, 1)}
            for rows in range(b.rows // 16):
                four = [builder.widened(b.dtype, x) for x in ptx.ldmatrix(builder, addresses[rows * across + along])]
                for half, step in ((half, step) for step in (0, 1) for half in (0, 1)):
                    for band in bands:
                        to = band * acc.cols // 2 + 4 * (2 * rows + half)
                        _add(builder, c, range(to, to + 4), left[band, step], four[2 * half + step])
        return builder.pack(c)

    return acc, emit


@lowers(mma_AB_unzipped)
def _(acc, a, b):
    _check("mma_AB_unzipped", acc, a, b, (a.cols, acc.cols))

    def emit(builder, vacc, left, address):
        c, fragment = builder.unpack(vacc), left_operand(builder, a, left, "row")
        addresses = matrix_addresses(builder, b, rt(b.rows, b.cols, b.dtype), address, builder.u32(0), recompute=True)
        for tile, at in enumerate(addresses):  # of 16 rows and 32 columns
            along, across = divmod(tile, b.cols // 32)
            # of two rows' two neighbours, the rows of one next to each other
            four = [builder.widened(b.dtype, x, order=(0, 2, 1, 3)) for x in ptx.ldmatrix(builder, at, transposed=True)]
            fragments = [fragment(band, along) for band in range(a.rows // 16)]
            for side in (0, 1):  # sixteen columns
                for odd in (0, 1):
                    right = four[2 * side][odd], four[2 * side + 1][odd]
                    for band in range(a.rows // 16):
                        to = band * acc.cols // 2 + 8 * (2 * across + side) + odd
                        _add(builder, c, (to, to + 4, to + 2, to + 6), fragments[band], right)
        return builder.pack(c)

    return acc, emit
