"""The kernels that quantise arrays to e4m3. Each head of each sequence is divided by a number of its own, its descale, so that
its greatest element becomes 448. As the descale follows from all rows, that takes three kernels, one after the other:

    parts      for some rows of a head: the sum, the greatest and the least element of each column
    settle     for a head: its mean row, if that is to be subtracted, and its descale
    narrow     the rows themselves

If each block of 128 rows of a head has its own descale, one kernel does it all:

    blocks     the descale, and the rows themselves

And back:

    widen      rows of e4m3 times their descale, in 16 bits"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import abs, col_max, col_min, col_sum, divmod, full, load, lower_fill, maximum, minimum, store, tile_max, zeros
from tiles import bf16, dtype, fp8e4m3, fp16, fp32, inlined, rt
from tiles.arguments import FLOAT, INT, array
from tiles.layout import LANES
from tiles.targets import capability, has_fp8

from .scales import END, LEAST

WARPS, ROWS, COLUMNS = 4, 16, 64  # warps of a thread block; rows and columns of a tile
PARTS = 32  # the most parts into which the rows of a head are divided
BLOCK = 128  # rows that share a descale if a head has several descales
SUM, GREATEST, SMALLEST = range(3)  # their places in a part


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. kernel: which one. of: the dtype of the array. centred: is the mean subtracted?"""

    kernel: str
    of: dtype
    centred: bool
    threads = LANES * WARPS

    def __str__(self):
        return f"{self.kernel} {self.of}" + ", centred" * self.centred


def space(arch: str, everything: bool) -> Iterator[Config]:
    """Every kernel; for fp16 with `everything`."""
    if has_fp8(capability(arch)):
        for of in (bf16, fp16) if everything else (bf16,):
            yield Config("parts", of, False)
            yield Config("widen", of, False)
            for centred in (False, True):
                yield Config("narrow", of, centred)
                yield Config("blocks", of, centred)
                if of is bf16:  # once is enough: this kernel reads no element of the array
                    yield Config("settle", of, centred)


@functools.cache
def make(config: Config):
    """(kernel, None) of a configuration."""
    INPUT, CENTRED, X = config.of, config.centred, rt(ROWS, COLUMNS, fp32)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def parts(gX: array(4, INPUT), gParts: array(4), count: INT, each: INT, pairs: INT, heads: INT):
        """The sums and extremes of `count` parts of `each` rows of every head: gParts (head of a sequence, part, which,
        column). Each warp has a part, for some columns; blocks along y divide the columns."""
        pair, part = divmod(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES, count)
        if pair < pairs:
            batch, head = divmod(pair, heads)
            end, col = min(gX.shape[1], each * (part + 1)), int32(COLUMNS * cuda.blockIdx.y)
            total, top, bottom = zeros(X.row_vec), full(X.row_vec, -math.inf), full(X.row_vec, math.inf)
            for row in range(each * part, end, ROWS):
                x, left = load(gX, X, (batch, row, head, col), 1, 3), int32(end - row)
                total = col_sum(lower_fill(x, left, 0.0), total)
                top = col_max(lower_fill(x, left, -math.inf), top)
                bottom = col_min(lower_fill(x, left, math.inf), bottom)
            store(gParts, total, (pair, part, SUM, col))
            store(gParts, top, (pair, part, GREATEST, col))
            store(gParts, bottom, (pair, part, SMALLEST, col))

    @cuda.jit(launch_bounds=(config.threads, 1))
    def settle(gParts: array(4), gMean: array(3), gDescale: array(2), count: INT, rows: INT, pairs: INT, heads: INT):
        """The descale of a head, and its mean row. Each warp has a head."""
        pair = int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES)
        if pair < pairs:
            batch, head = divmod(pair, heads)
            greatest = full(X.row_vec, LEAST)
            for col in range(0, gParts.shape[3], COLUMNS):
                total, top, bottom = zeros(X.row_vec), full(X.row_vec, -math.inf), full(X.row_vec, math.inf)
                for part in range(count):
                    total = total + load(gParts, X.row_vec, (pair, part, SUM, col))
                    top = maximum(top, load(gParts, X.row_vec, (pair, part, GREATEST, col)))
                    bottom = minimum(bottom, load(gParts, X.row_vec, (pair, part, SMALLEST, col)))
                if CENTRED:
                    mean = total / rows
                    store(gMean, mean, (batch, head, col))
                    top, bottom = top - mean, bottom - mean
                greatest = maximum(greatest, maximum(top, zeros(X.row_vec) - bottom))
            if gDescale.shape[0] > 0:
                gDescale[batch, head] = tile_max(zeros(X) + greatest) / END

    @cuda.jit(launch_bounds=(config.threads, 1))
    def narrow(gX: array(4, INPUT), gOut: array(4, fp8e4m3), gMean: array(3), gDescale: array(2), count: INT, heads: INT):
        """(x - mean) / descale. Each warp has one of the `count` tiles of 16 rows of a head, and some columns; blocks along y
        divide the columns."""
        pair, part = divmod(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES, count)
        batch, head = divmod(pair, heads)
        if batch < gX.shape[0]:
            col = int32(COLUMNS * cuda.blockIdx.y)
            where = batch, int32(ROWS * part), head, col
            x = load(gX, X, where, 1, 3)
            if CENTRED:
                x = x - load(gMean, X.row_vec, (batch, head, col))
            store(gOut, fp8e4m3(x / max(gDescale[batch, head], LEAST)), where, 1, 3)

    @inlined
    def rows_of(gX, gMean, batch, row, head, col):
        """16 rows, minus the mean if that is subtracted; 0 behind the last row."""
        x = load(gX, X, (batch, row, head, col), 1, 3)
        if CENTRED:
            x = lower_fill(x - load(gMean, X.row_vec, (batch, head, col)), int32(gX.shape[1] - row), 0.0)
        return x

    @cuda.jit(launch_bounds=(config.threads, 1))
    def blocks(gX: array(4, INPUT), gOut: array(4, fp8e4m3), gMean: array(3), gDescale: array(3), count: INT, heads: INT):
        """(x - mean) / descale, for the `count` blocks of 128 rows of each head. Each warp has a block, and reads its rows
        twice: from memory, then from a cache."""
        pair, block = divmod(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES, count)
        batch, head = divmod(pair, heads)
        if batch < gX.shape[0]:
            first = int32(BLOCK * block)
            end, top = int32(min(gX.shape[1], first + BLOCK)), zeros(X.row_vec)
            for col in range(0, gX.shape[3], COLUMNS):
                for row in range(first, end, ROWS):
                    top = col_max(abs(rows_of(gX, gMean, batch, row, head, col)), top)
            descale = max(tile_max(top) / END, LEAST)
            gDescale[batch, block, head] = descale
            for col in range(0, gX.shape[3], COLUMNS):
                for row in range(first, end, ROWS):
                    x = rows_of(gX, gMean, batch, row, head, col)
                    store(gOut, fp8e4m3(x / descale), (batch, row, head, col), 1, 3)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def widen(
        gX: array(4, fp8e4m3), gOut: array(4, INPUT), gDescale: array(2), unit: FLOAT, count: INT, heads: INT
    ):  # fmt: skip
        """x * descale * unit; a descale that is absent is 1. Warps work as in `narrow`."""
        pair, part = divmod(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES, count)
        batch, head = divmod(pair, heads)
        if batch < gX.shape[0]:
            where = batch, int32(ROWS * part), head, int32(COLUMNS * cuda.blockIdx.y)
            scale = gDescale[batch, head] * unit if gDescale.shape[0] > 0 else unit
            store(gOut, INPUT(fp32(load(gX, rt(ROWS, COLUMNS, fp8e4m3), where, 1, 3)) * scale), where, 1, 3)

    kernels = {"parts": parts, "settle": settle, "narrow": narrow, "blocks": blocks, "widen": widen}
    return kernels[config.kernel], None
