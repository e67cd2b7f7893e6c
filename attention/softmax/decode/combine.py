"""Runs after the attention kernel if several blocks share the keys of a sequence: merges the parts of a row. A part is a mean
of values, and x, where exp2(scale x) is the sum of its weights."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import col_sum, divmod, exp2, grid, load, log2, row_index, store, tile_max, tile_sum, where, zeros
from tiles import bf16, dtype, fp16, fp32, rt
from tiles.arguments import FLOAT, INT, array, record
from tiles.layout import LANES
from tiles.targets import capability, has_early_launch

from ..online import LN2, LOWEST_FLOAT, over_sum
from ..variants import ScoreContext, Variant
from .reach import KeyWindow
from .splits import FixedSplits, StreamKSplits

AT_ONCE, COLUMNS = 16, 64  # parts, and columns of each, that a block adds at a time
WARPS = 4  # of a block: one warp that added all parts took half a microsecond more
EACH = FixedSplits()


@dataclass(frozen=True)
class Config:
    """The configuration of the kernel that joins the parts. dtype: of the output. sums: what is added to the sum of weights.
    split: how keys were split. overlaps_previous: may it begin before the launch of attention has ended (PDL)?"""

    dtype: dtype
    sums: Variant
    split: FixedSplits = EACH
    overlaps_previous: bool = False
    threads = LANES * WARPS

    def __str__(self):
        scores = f" {self.sums}" * (type(self.sums) is not Variant)
        return f"{self.dtype}{scores} {self.split}" + " PDL" * self.overlaps_previous


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with."""
    pdl, shared = has_early_launch(capability(arch)), StreamKSplits(KeyWindow(False, False, False), 64)
    yield from (Config(of, Variant(), split, pdl) for of in (bf16, fp16)[: 1 + everything] for split in (FixedSplits(), shared))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    sums, split, PDL, PART = config.sums, config.split, config.overlaps_previous, rt(AT_ONCE, COLUMNS // WARPS, fp32)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def combine(
        out_partial: array(5), lse_partial: array(4), out: array(5, config.dtype), lse: array(4),
        params: record(**sums.params, **split.params),
        heads: INT, rows: INT, slabs: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Join the parts of one of `rows` rows of a key head, for one of `slabs` slabs of columns. See ampere.py."""
        every, slab = divmod(cuda.blockIdx.x, slabs)
        pair, row = divmod(every, rows)
        number, head = divmod(pair, heads)
        sequence, first, of, count = split.parts_of(number, splits, sequences, tokens, params)
        if count > 1:
            token, member = divmod(row, group)
            col = int32(COLUMNS * slab + PART.cols * (cuda.threadIdx.x // LANES))
            m, l, o = float32(LOWEST_FLOAT), float32(0.0), zeros(PART.row_vec)
            for n in range(0, count, AT_ONCE):
                if PDL and n == 0:
                    grid.follow()  # in the loop, before which the compiler puts all that computes addresses
                exists = row_index(PART.col_vec) + n < count
                sizes = load(lse_partial, PART.col_vec, (int32(first + n), of, head, row), cols=0)
                part = load(out_partial, PART, (int32(first + n), of, head, row, col), 0, 4, True)
                sizes = where(exists, sizes, -math.inf)
                most = max(m, tile_max(sizes))
                lag, weights = exp2((m - most) * scale), exp2((sizes - most) * scale)
                part = where(weights > 0.0, part * weights, 0.0)  # of what has no weight nothing was written
                m, l, o = most, l * lag + tile_sum(weights), o * lag + col_sum(part)
            ctx = ScoreContext(sequence, int32(head * group + member), token, 0, 0, 0, params, 0, 0)
            most = max(m, sums.initial_max(ctx, LOWEST_FLOAT))
            lag = exp2((m - most) * scale)
            l = sums.finish_row_sum(l * lag, most, scale, ctx)
            store(out, over_sum(o * lag, l), (sequence, token, head, member, col))
            if lse.shape[0] > 0:
                lse[sequence, head, member, token] = (most * scale + log2(l)) * LN2
        elif PDL and cuda.blockIdx.x == 0:  # one block at least waits, so that this grid ends after that one
            grid.wait()

    return combine, None
