"""The gradients of norms of queries and keys, which are computed around the gradients of attention. Before, rows are normalised
once more, into scratch memory. Afterwards the gradients of the rows and of the norm's weights follow from those of the
normalised rows.

With n = (x - mean) / deviation of a row x, y = n weights + bias, and dy the gradient of y:

    dn = dy weights    dx = (dn - mean(dn) - n mean(dn n)) / deviation    dweights = sum dy n    dbias = sum dy

for a layer norm; an RMS norm has no mean, no mean(dn) and no bias. The gradient of weights that heads share is the sum over the
heads. The order of sums depends on the shapes alone: the same bits every time.

If gradients are added to float32 arrays, dy is float32, too: attention's own kernels have added it up from zeros."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block, col_sum, divmod, load, row_sum, store, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt, shared, sv
from tiles.arguments import INT, array, record
from tiles.layout import LANES

from ..hopper import SHAPES
from ..norm_parts import Layer, Rms
from .results import StoreGradient, float32_output, times

WARPS, PART = 8, rt(16, 32, fp32)  # warps of a thread block; the tile that a warp works on at a time
SHARE = 8 * WARPS  # tiles, one below the other, whose columns a thread block sums up
ROWS_OF = {"q": "BSHD", "k": "BTGD"}  # the axes of the normalised array


@inlined
def normed_and_dy(gX, gDY, at, of_rows):
    """(n, dy) of a tile; of_rows: (mean, 1 / deviation) of its rows."""
    mean, scale = of_rows
    return (load(gX, PART, at, 1, 3) - mean) * scale, load(gDY, PART, at, 1, 3)


@inlined
def normed_and_dn(gX, gDY, at, of_rows, params):
    """(n, dn) of a tile; of_rows as in `seen`."""
    n, dy = normed_and_dy(gX, gDY, at, of_rows)
    return n, dy * load(params.norm_weights, PART.row_vec, (at[2], at[3]), 0, 1, True)


@inlined
def mean_of(sums, params):
    """The means of rows, from their sums."""
    return sums / params.columns


@dataclass(frozen=True)
class NormRowGradients:
    """The kernel that gives dx: the norm, the columns of a row as padded, whether rows begin at multiples of 16 bytes, whether
    dx is added to what is there."""

    norm: Rms
    head_dim: int
    dtype: dtype
    aligned: bool
    accumulate: bool = False
    threads = LANES * WARPS
    rows = PART.rows * WARPS

    @property
    def result(self) -> StoreGradient:
        """What becomes of dx."""
        return float32_output(True) if self.accumulate else StoreGradient(self.dtype)

    def __str__(self):
        of = f"{self.norm} rows, D {self.head_dim} {self.dtype}"
        return of + ", by elements" * (not self.aligned) + ", adds" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "NormRowGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, X, ALIGNED = config.dtype, rt(PART.rows, config.head_dim, fp32), config.aligned or None
        norm, CENTRED, PARAMS = config.norm, isinstance(config.norm, Layer), record(**config.norm.params)
        result, OUT = config.result, config.result.dtype

        @cuda.jit(launch_bounds=(config.threads, 1))
        def rows(
            gX: array(4, INPUT), gDY: array(4, OUT), gDX: array(4, OUT), gRows: array(3),
            params: PARAMS, blocks: INT, heads: INT,
        ):  # fmt: skip
            """dx of every row (batch, row, head, column); mean and 1 / deviation go to gRows (head, which, row)."""
            batch_head, block = divmod(cuda.blockIdx.x, blocks)
            batch, head = divmod(batch_head, heads)
            row = int32(PART.rows * (WARPS * block + cuda.threadIdx.x // LANES))
            of_rows = norm.of_rows(load(gX, X, (batch, row, head, 0), 1, 3, ALIGNED), params)
            mean, scale = of_rows
            store(gRows, mean, (batch_head, 0, row))
            store(gRows, scale, (batch_head, 1, row))
            mean_dn, mean_dn_n = zeros(PART.col_vec), zeros(PART.col_vec)
            for col in range(0, X.cols, PART.cols):
                n, dn = normed_and_dn(gX, gDY, (batch, row, head, col), of_rows, params)
                mean_dn_n = mean_dn_n + row_sum(times(dn, n))
                if CENTRED:
                    mean_dn = mean_dn + row_sum(dn)
            mean_dn, mean_dn_n = mean_of(mean_dn, params), mean_of(mean_dn_n, params)
            for col in range(0, X.cols, PART.cols):
                at = batch, row, head, col
                n, dn = normed_and_dn(gX, gDY, at, of_rows, params)
                result.store(gDX, times(dn - mean_dn - times(mean_dn_n, n), scale), at, ALIGNED)

        return rows, None


@dataclass(frozen=True)
class NormColumnSums:
    """The kernel that sums columns: of dy n, or of dy for a bias. adds: see Rows."""

    dtype: dtype
    bias: bool
    accumulate: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return f"columns of dy{' n' * (not self.bias)}, {self.dtype}" + ", adds" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "NormColumnSums"):
        """(kernel, shared memory) of a configuration."""
        INPUT, WEIGHTS, SLOPES = config.dtype, not config.bias, fp32 if config.accumulate else config.dtype
        smem = shared(scratch=sv(PART.cols * WARPS, fp32))

        @cuda.jit(launch_bounds=(config.threads, 1))
        def columns(
            gX: array(4, INPUT), gDY: array(4, SLOPES), gRows: array(3), gParts: array(3),
            batches: INT, heads: INT, tiles: INT, panels: INT, parts: INT,
        ):  # fmt: skip
            """Of 32 columns of a head, and one of `parts` shares of the rows: gParts is (head, share, column)."""
            (scratch,) = smem.open()
            rest, panel = divmod(cuda.blockIdx.x, panels)
            head, part = divmod(rest, parts)
            warp, col = int32(cuda.threadIdx.x // LANES), int32(PART.cols * panel)
            total = zeros(PART)
            for n in range(WARPS * part + warp, batches * tiles, WARPS * parts):
                batch, tile = divmod(int32(n), tiles)
                row = int32(PART.rows * tile)
                batch_head = int32(heads * batch + head)
                of_rows = load(gRows, PART.col_vec, (batch_head, 0, row)), load(gRows, PART.col_vec, (batch_head, 1, row))
                normed, dy = normed_and_dy(gX, gDY, (batch, row, head, col), of_rows)
                total = total + (times(dy, normed) if WEIGHTS else dy)
            found = block.reduce_sum(col_sum(total), scratch)
            if warp == 0:
                store(gParts, found, (head, part, col))

        return columns, smem


@dataclass(frozen=True)
class SumNormPartials:
    """The kernel that adds what `columns` left. adds: to what is there?"""

    accumulate: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return "total of columns" + ", adds" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "SumNormPartials"):
        """(kernel, shared memory) of a configuration."""
        smem, result = shared(scratch=sv(PART.cols * WARPS, fp32)), float32_output(config.accumulate)

        @cuda.jit(launch_bounds=(config.threads, 1))
        def total(gParts: array(3), gSum: array(2), panels: INT, parts: INT):
            """Of 32 columns: gSum (group, column) of gParts (group, part, column)."""
            (scratch,) = smem.open()
            group, panel = divmod(cuda.blockIdx.x, panels)
            warp, col = int32(cuda.threadIdx.x // LANES), int32(PART.cols * panel)
            some = zeros(PART)
            for row in range(PART.rows * warp, parts, PART.rows * WARPS):
                some = some + load(gParts, PART, (group, int32(row), col))
            found = block.reduce_sum(col_sum(some), scratch)
            if warp == 0:
                result.store_vector(gSum, found, PART.row_vec, (group, col))

        return total, smem


def space(arch: str, everything: bool) -> Iterator[NormRowGradients | NormColumnSums | SumNormPartials]:
    """What norms are differentiated with: of any GPU alike."""
    for of in (bf16, fp16) if everything else (bf16,):
        for norm, head_dim, aligned in itertools.product((Rms(), Layer()), SHAPES, (True, False) if everything else (True,)):
            yield NormRowGradients(norm, head_dim, of, aligned)
        yield from (NormColumnSums(of, bias) for bias in (False, True))
    yield SumNormPartials()


@functools.cache
def make(config: NormRowGradients | NormColumnSums | SumNormPartials):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
