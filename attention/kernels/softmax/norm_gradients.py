"""The gradients of norms of queries and keys, which are computed before and after the gradients of attention. Before, rows are
normalised once more, into scratch memory. After, the gradients of the rows and of the norm's weights follow from those of the
normalised rows.

With n = (x - mean) / deviation of a row x, y = n weights + bias, and dy the gradient of y:

    dn = dy weights    dx = (dn - mean(dn) - n mean(dn n)) / deviation    dweights = sum dy n    dbias = sum dy

for a layer norm; an RMS norm has no mean, no mean(dn) and no bias. The gradient of weights that heads share is the sum over the
heads. The order of sums depends on the shapes alone: the same bits every time.

If gradients accumulate in float32 arrays, dy is float32, too: attention's kernels have accumulated it, from zeros."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block, col_sum, divmod, load, row_sum, store, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt, shared, sv
from tiles.launching.arguments import INT, array, record
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.backward.gradient_outputs import StoreGradient, float32_output, times
from ...parts.norms import LayerNorm, RmsNorm
from .forward_hopper_shapes import SHAPES

WARPS, PART = 8, rt(16, 32, fp32)  # warps of a thread block; the tile that a warp works on at a time
TILES_PER_BLOCK = 8 * WARPS  # tiles of rows whose columns a thread block sums
ROWS_OF = {  # the axes of the normalised array
    "q": ("batch", "seqlen_q", "heads", "head_dim"),
    "k": ("batch", "seqlen_k", "heads_k", "head_dim"),
}


@inlined
def normed_and_dy(gX, gDY, at, row_stats):
    """(n, dy) of a tile. row_stats: (mean, 1 / deviation) of its rows."""
    mean, rstd = row_stats
    return (load(gX, PART, at, 1, 3) - mean) * rstd, load(gDY, PART, at, 1, 3)


@inlined
def normed_and_dn(gX, gDY, at, row_stats, params):
    """(n, dn) of a tile. row_stats: as for normed_and_dy."""
    n, dy = normed_and_dy(gX, gDY, at, row_stats)
    return n, dy * load(params.norm_weights, PART.row_vec, (at[2], at[3]), 0, 1, True)


@inlined
def mean_of(sums, params):
    """The means of rows from their sums. (params.columns is the number of columns, which are padded in the kernel.)"""
    return sums / params.columns


@dataclass(frozen=True)
class NormRowGradients:
    """The configuration of the kernel that computes dx: the norm, the columns of a row, padded, whether rows begin at multiples
    of 16 bytes, and whether dx is added to what the array holds."""

    norm: RmsNorm
    head_dim: int
    dtype: dtype
    aligned: bool
    accumulate: bool = False
    threads = LANES * WARPS
    rows = PART.rows * WARPS

    @property
    def result(self) -> StoreGradient:
        """How dx reaches its array."""
        return float32_output(True) if self.accumulate else StoreGradient(self.dtype)

    def __str__(self):
        label = f"{self.norm} rows, D {self.head_dim} {self.dtype}"
        return label + ", by elements" * (not self.aligned) + ", accumulates" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "NormRowGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, X, ALIGNED = config.dtype, rt(PART.rows, config.head_dim, fp32), config.aligned or None
        norm, CENTRED, PARAMS = config.norm, isinstance(config.norm, LayerNorm), record(**config.norm.params)
        result, OUT = config.result, config.result.dtype

        @cuda.jit(launch_bounds=(config.threads, 1))
        def rows(
            gX: array(4, INPUT), gDY: array(4, OUT), gDX: array(4, OUT), gRowStats: array(3),
            params: PARAMS, blocks: INT, heads: INT,
        ):  # fmt: skip
            """dx of every row of gX (batch, row, head, column). gRowStats (batch and head, 2, row) = mean and 1 / deviation."""
            batch_head, block = divmod(cuda.blockIdx.x, blocks)
            batch, head = divmod(batch_head, heads)
            row = int32(PART.rows * (WARPS * block + cuda.threadIdx.x // LANES))
            row_stats = norm.of_rows(load(gX, X, (batch, row, head, 0), 1, 3, ALIGNED), params)
            mean, rstd = row_stats
            store(gRowStats, mean, (batch_head, 0, row))
            store(gRowStats, rstd, (batch_head, 1, row))
            mean_dn, mean_dn_n = zeros(PART.col_vec), zeros(PART.col_vec)
            for col in range(0, X.cols, PART.cols):
                n, dn = normed_and_dn(gX, gDY, (batch, row, head, col), row_stats, params)
                mean_dn_n = mean_dn_n + row_sum(times(dn, n))
                if CENTRED:
                    mean_dn = mean_dn + row_sum(dn)
            mean_dn, mean_dn_n = mean_of(mean_dn, params), mean_of(mean_dn_n, params)
            for col in range(0, X.cols, PART.cols):
                at = batch, row, head, col
                n, dn = normed_and_dn(gX, gDY, at, row_stats, params)
                result.store(gDX, times(dn - mean_dn - times(mean_dn_n, n), rstd), at, ALIGNED)

        return rows, None


@dataclass(frozen=True)
class NormColumnSums:
    """The configuration of the kernel that sums columns over rows: of dy n, or of dy for the bias. accumulate: is dy
    float32?"""

    dtype: dtype
    bias: bool
    accumulate: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return f"columns of dy{' n' * (not self.bias)}, {self.dtype}" + ", accumulates" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "NormColumnSums"):
        """(kernel, shared memory) of a configuration."""
        INPUT, WEIGHTS, DY = config.dtype, not config.bias, fp32 if config.accumulate else config.dtype
        smem = shared(scratch=sv(PART.cols * WARPS, fp32))

        @cuda.jit(launch_bounds=(config.threads, 1))
        def columns(
            gX: array(4, INPUT), gDY: array(4, DY), gRowStats: array(3), gPartials: array(3),
            batches: INT, heads: INT, tiles: INT, panels: INT, splits: INT,
        ):  # fmt: skip
            """gPartials (head, split, column) = the sums of 32 columns of a head over one of `splits` parts of the rows."""
            (scratch,) = smem.open()
            rest, panel = divmod(cuda.blockIdx.x, panels)
            head, split = divmod(rest, splits)
            warp, col = int32(cuda.threadIdx.x // LANES), int32(PART.cols * panel)
            total = zeros(PART)
            for n in range(WARPS * split + warp, batches * tiles, WARPS * splits):
                batch, tile = divmod(int32(n), tiles)
                row = int32(PART.rows * tile)
                batch_head = int32(heads * batch + head)
                row_stats = (
                    load(gRowStats, PART.col_vec, (batch_head, 0, row)),
                    load(gRowStats, PART.col_vec, (batch_head, 1, row)),
                )
                normed, dy = normed_and_dy(gX, gDY, (batch, row, head, col), row_stats)
                total = total + (times(dy, normed) if WEIGHTS else dy)
            column_sums = block.reduce_sum(col_sum(total), scratch)
            if warp == 0:
                store(gPartials, column_sums, (head, split, col))

        return columns, smem


@dataclass(frozen=True)
class SumNormPartials:
    """The configuration of the kernel that sums the partial sums of `columns`. accumulate: does it add to what the array
    holds?"""

    accumulate: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return "norm partials" + ", accumulates" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "SumNormPartials"):
        """(kernel, shared memory) of a configuration."""
        smem, result = shared(scratch=sv(PART.cols * WARPS, fp32)), float32_output(config.accumulate)

        @cuda.jit(launch_bounds=(config.threads, 1))
        def sum_partials(gPartials: array(3), gSum: array(2), panels: INT, splits: INT):
            """gSum (group, column) = the sum of gPartials (group, split, column) over splits, for 32 columns."""
            (scratch,) = smem.open()
            group, panel = divmod(cuda.blockIdx.x, panels)
            warp, col = int32(cuda.threadIdx.x // LANES), int32(PART.cols * panel)
            total = zeros(PART)
            for row in range(PART.rows * warp, splits, PART.rows * WARPS):
                total = total + load(gPartials, PART, (group, int32(row), col))
            column_sums = block.reduce_sum(col_sum(total), scratch)
            if warp == 0:
                result.store_vector(gSum, column_sums, PART.row_vec, (group, col))

        return sum_partials, smem


def space(target: Target, everything: bool) -> Iterator[NormRowGradients | NormColumnSums | SumNormPartials]:
    """Configurations to compile and inspect, the same for all architectures."""
    for input_dtype in (bf16, fp16) if everything else (bf16,):
        for norm, head_dim, aligned in itertools.product(
            (RmsNorm(), LayerNorm()), SHAPES, (True, False) if everything else (True,)
        ):
            yield NormRowGradients(norm, head_dim, input_dtype, aligned)
        yield from (NormColumnSums(input_dtype, bias) for bias in (False, True))
    yield SumNormPartials()


@functools.cache
def make(config: NormRowGradients | NormColumnSums | SumNormPartials):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
