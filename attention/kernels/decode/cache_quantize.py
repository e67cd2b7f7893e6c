"""The kernels that quantise arrays to e4m3. Each head of each sequence is divided by its descale, max(abs(x)) / 448, so that
its largest absolute value becomes 448. As the descale depends on all rows, that takes three launches, one after the other:

    partial_stats    sum, maximum and minimum of each column, of a part of a head's rows
    reduce_stats     a head's mean row, if that is to be subtracted, and its descale
    quantize_rows    (x - mean) / descale

If each block of 128 rows of a head has its own descale, one launch does it all:

    quantize_blocks  descale, and (x - mean) / descale

And back:

    dequantize       x * descale in 16 bits, of rows x of e4m3"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import abs, col_max, col_min, col_sum, divmod, full, load, lower_fill, maximum, minimum, store, tile_max, zeros
from tiles import bf16, dtype, fp8e4m3, fp16, fp32, inlined, rt
from tiles.launching.arguments import FLOAT, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.cache_scales import MIN_DESCALE
from ...parts.descales import BLOCK

WARPS, ROWS, COLUMNS = 4, 16, 64  # warps of a thread block; rows and columns of a tile
PARTS = 32  # the most parts into which the rows of a head are divided
E4M3_MAX = 448.0
SUM, MAXIMUM, MINIMUM = range(3)  # indices of gStats' third axis


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. kernel: its name in the table above. dtype: of the array of 16 bits. centred: is the mean
    subtracted?"""

    kernel: str
    dtype: dtype
    centred: bool
    threads = LANES * WARPS

    def __str__(self):
        return f"{self.kernel} {self.dtype}" + ", centred" * self.centred


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Every kernel; for fp16 with `everything`."""
    if target.has_fp8:
        for input_dtype in (bf16, fp16) if everything else (bf16,):
            yield Config("partial_stats", input_dtype, False)
            yield Config("dequantize", input_dtype, False)
            for centred in (False, True):
                yield Config("quantize_rows", input_dtype, centred)
                yield Config("quantize_blocks", input_dtype, centred)
                if input_dtype is bf16:  # this kernel reads gStats alone, so it is the same for all dtypes
                    yield Config("reduce_stats", input_dtype, centred)


@functools.cache
def make(config: Config):
    """(kernel, shared memory: None) of a configuration."""
    INPUT, CENTRED, X = config.dtype, config.centred, rt(ROWS, COLUMNS, fp32)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def partial_stats(gX: array(4, INPUT), gStats: array(4), count: INT, part_rows: INT, batch_heads: INT, heads: INT):
        """Sum, maximum and minimum of each column, for `count` parts of `part_rows` rows of each head: gStats (batch and head,
        part, which of the three, column). A warp has one part and a tile's columns; blocks along y share out the columns."""
        batch_head, part = divmod(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES, count)
        if batch_head < batch_heads:
            batch, head = divmod(batch_head, heads)
            end, col = min(gX.shape[1], part_rows * (part + 1)), int32(COLUMNS * cuda.blockIdx.y)
            total, top, bottom = zeros(X.row_vec), full(X.row_vec, -math.inf), full(X.row_vec, math.inf)
            for row in range(part_rows * part, end, ROWS):
                x, left = load(gX, X, (batch, row, head, col), 1, 3), int32(end - row)
                total = col_sum(lower_fill(x, left, 0.0), total)
                top = col_max(lower_fill(x, left, -math.inf), top)
                bottom = col_min(lower_fill(x, left, math.inf), bottom)
            store(gStats, total, (batch_head, part, SUM, col))
            store(gStats, top, (batch_head, part, MAXIMUM, col))
            store(gStats, bottom, (batch_head, part, MINIMUM, col))

    @cuda.jit(launch_bounds=(config.threads, 1))
    def reduce_stats(
        gStats: array(4), gMean: array(3), gDescale: array(2), count: INT, rows: INT, batch_heads: INT, heads: INT
    ):  # fmt: skip
        """The descale of a head, and its mean row, from its `count` parts. Each warp has one head."""
        batch_head = int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES)
        if batch_head < batch_heads:
            batch, head = divmod(batch_head, heads)
            largest = full(X.row_vec, MIN_DESCALE)
            for col in range(0, gStats.shape[3], COLUMNS):
                total, top, bottom = zeros(X.row_vec), full(X.row_vec, -math.inf), full(X.row_vec, math.inf)
                for part in range(count):
                    total = total + load(gStats, X.row_vec, (batch_head, part, SUM, col))
                    top = maximum(top, load(gStats, X.row_vec, (batch_head, part, MAXIMUM, col)))
                    bottom = minimum(bottom, load(gStats, X.row_vec, (batch_head, part, MINIMUM, col)))
                if CENTRED:
                    mean = total / rows
                    store(gMean, mean, (batch, head, col))
                    top, bottom = top - mean, bottom - mean
                largest = maximum(largest, maximum(top, zeros(X.row_vec) - bottom))
            if gDescale.shape[0] > 0:
                gDescale[batch, head] = tile_max(zeros(X) + largest) / E4M3_MAX

    @cuda.jit(launch_bounds=(config.threads, 1))
    def quantize_rows(
        gX: array(4, INPUT), gOut: array(4, fp8e4m3), gMean: array(3), gDescale: array(2), count: INT, heads: INT
    ):
        """(x - mean) / descale. Each warp has one of the `count` tiles of 16 rows of a head, and a tile's columns; blocks along
        y share out the columns."""
        batch_head, part = divmod(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES, count)
        batch, head = divmod(batch_head, heads)
        if batch < gX.shape[0]:
            col = int32(COLUMNS * cuda.blockIdx.y)
            at = batch, int32(ROWS * part), head, col
            x = load(gX, X, at, 1, 3)
            if CENTRED:
                x = x - load(gMean, X.row_vec, (batch, head, col))
            store(gOut, fp8e4m3(x / max(gDescale[batch, head], MIN_DESCALE)), at, 1, 3)

    @inlined
    def load_rows(gX, gMean, batch, row, head, col):
        """Load 16 rows, minus the mean if that is subtracted; rows beyond the last are 0."""
        x = load(gX, X, (batch, row, head, col), 1, 3)
        if CENTRED:
            x = lower_fill(x - load(gMean, X.row_vec, (batch, head, col)), int32(gX.shape[1] - row), 0.0)
        return x

    @cuda.jit(launch_bounds=(config.threads, 1))
    def quantize_blocks(
        gX: array(4, INPUT), gOut: array(4, fp8e4m3), gMean: array(3), gDescale: array(3), count: INT, heads: INT
    ):  # fmt: skip
        """(x - mean) / descale, and the descale, for the `count` blocks of 128 rows of each head. Each warp has one block, and
        reads its rows twice: the second time from L1 or L2."""
        batch_head, block = divmod(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES, count)
        batch, head = divmod(batch_head, heads)
        if batch < gX.shape[0]:
            first = int32(BLOCK * block)
            end, top = int32(min(gX.shape[1], first + BLOCK)), zeros(X.row_vec)
            for col in range(0, gX.shape[3], COLUMNS):
                for row in range(first, end, ROWS):
                    top = col_max(abs(load_rows(gX, gMean, batch, row, head, col)), top)
            descale = max(tile_max(top) / E4M3_MAX, MIN_DESCALE)
            gDescale[batch, block, head] = descale
            for col in range(0, gX.shape[3], COLUMNS):
                for row in range(first, end, ROWS):
                    x = load_rows(gX, gMean, batch, row, head, col)
                    store(gOut, fp8e4m3(x / descale), (batch, row, head, col), 1, 3)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def dequantize(
        gX: array(4, fp8e4m3), gOut: array(4, INPUT), gDescale: array(2), unit: FLOAT, count: INT, heads: INT
    ):  # fmt: skip
        """x * descale * unit; without gDescale the descale is 1. A warp has the same tile as in `quantize_rows`."""
        batch_head, part = divmod(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES, count)
        batch, head = divmod(batch_head, heads)
        if batch < gX.shape[0]:
            at = batch, int32(ROWS * part), head, int32(COLUMNS * cuda.blockIdx.y)
            scale = gDescale[batch, head] * unit if gDescale.shape[0] > 0 else unit
            store(gOut, INPUT(fp32(load(gX, rt(ROWS, COLUMNS, fp8e4m3), at, 1, 3)) * scale), at, 1, 3)

    kernels = {"partial_stats": partial_stats, "reduce_stats": reduce_stats, "quantize_rows": quantize_rows}
    kernels |= {"quantize_blocks": quantize_blocks, "dequantize": dequantize}
    return kernels[config.kernel], None
