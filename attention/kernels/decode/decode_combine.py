"""Merges the partial outputs of a row (split-KV), after the attention kernel. Of the parts o_i, and x_i with exp2(scale x_i)
the row sum of part i,

    o = sum(exp2(scale x_i) o_i) / sum(exp2(scale x_i))

Or, where row maxima m_i and row sums l_i are kept apart (PartialOutput.keeps_sums), of l_i exp2(scale m_i) instead."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import col_sum, divmod, exp2, grid, load, log2, row_index, store, tile_max, tile_sum, where, zeros
from tiles import bf16, dtype, fp16, fp32, rt
from tiles.launching.arguments import FLOAT, INT, array, record
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.decode.key_window import KeyWindow
from ...parts.decode.splits import FixedSplits, StreamKSplits
from ...parts.online_softmax import LN2, LOWEST_FLOAT, over_sum
from ...parts.variant import ScoreContext, Variant

AT_ONCE, COLUMNS = 16, 64  # parts, and columns of each, that a block merges at a time
WARPS = 4  # of a block, which share out the columns: one warp took half a microsecond more
FIXED_SPLITS = FixedSplits()


@dataclass(frozen=True)
class Config:
    """The kernel's configuration. dtype: of the output. sink: a variant that adds to the row sums. split: which blocks had
    which keys. overlaps_previous: may it begin before the launch of attention has ended (PDL)? keeps_sums: that of
    PartialOutput."""

    dtype: dtype
    sink: Variant
    split: FixedSplits = FIXED_SPLITS
    overlaps_previous: bool = False
    keeps_sums: bool = False
    threads = LANES * WARPS

    def __str__(self):
        scores = f" {self.sink}" * (type(self.sink) is not Variant)
        return f"{self.dtype}{scores} {self.split}" + " PDL" * self.overlaps_previous + " with sums" * self.keeps_sums


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with."""
    pdl, stream_k = target.has_early_launch, StreamKSplits(KeyWindow(False, False, False), 64)
    for input_dtype in (bf16, fp16)[: 1 + everything]:
        yield from (Config(input_dtype, Variant(), split, pdl) for split in (FixedSplits(), stream_k))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    sink, split, PDL, PART = config.sink, config.split, config.overlaps_previous, rt(AT_ONCE, COLUMNS // WARPS, fp32)
    KEEPS_SUMS, SUMS = config.keeps_sums, {"sum_partial": array(4)} if config.keeps_sums else {}

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def combine(
        out_partial: array(5), lse_partial: array(4), out: array(5, config.dtype), lse: array(4),
        params: record(**sink.params, **split.params, **SUMS),
        heads: INT, rows: INT, slabs: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Merge the parts of one of `rows` rows of a key head, for one of `slabs` slabs of columns. The other parameters are
        those of decode_ampere.py's kernel."""
        rest, slab = divmod(cuda.blockIdx.x, slabs)
        rest, row = divmod(rest, rows)
        number, head = divmod(rest, heads)
        sequence, first, part_batch, count = split.parts_of(number, splits, sequences, tokens, params)
        if count > 1:
            token, group_head = divmod(row, group)
            col = int32(COLUMNS * slab + PART.cols * (cuda.threadIdx.x // LANES))
            m, l, o = float32(LOWEST_FLOAT), float32(0.0), zeros(PART.row_vec)
            for n in range(0, count, AT_ONCE):
                if PDL and n == 0:
                    grid.follow()  # here, because the compiler computes addresses before the loop, which need not wait
                exists = row_index(PART.col_vec) + n < count
                lse_parts = load(lse_partial, PART.col_vec, (int32(first + n), part_batch, head, row), cols=0)
                part = load(out_partial, PART, (int32(first + n), part_batch, head, row, col), 0, 4, True)
                lse_parts = where(exists, lse_parts, -math.inf)
                new_max = max(m, tile_max(lse_parts))
                m_scale, weights = exp2((m - new_max) * scale), exp2((lse_parts - new_max) * scale)
                if KEEPS_SUMS:
                    sums = load(params.sum_partial, PART.col_vec, (int32(first + n), part_batch, head, row), cols=0)
                    weights = weights * where(exists, sums, 0.0)
                part = where(weights > 0.0, part * weights, 0.0)  # a part without weight may be unwritten memory
                m, l, o = new_max, l * m_scale + tile_sum(weights), o * m_scale + col_sum(part)
            ctx = ScoreContext(sequence, int32(head * group + group_head), token, 0, 0, 0, params, 0, 0)
            new_max = max(m, sink.initial_max(ctx, LOWEST_FLOAT))
            m_scale = exp2((m - new_max) * scale)
            l = sink.finish_row_sum(l * m_scale, new_max, scale, ctx)
            store(out, over_sum(o * m_scale, l), (sequence, token, head, group_head, col))
            if lse.shape[0] > 0:
                if KEEPS_SUMS:  # the maximum times the scale may be no float32
                    lse[sequence, head, group_head, token] = new_max * (scale * LN2) + log2(l) * LN2
                else:
                    lse[sequence, head, group_head, token] = (new_max * scale + log2(l)) * LN2
        elif PDL and cuda.blockIdx.x == 0:  # so that this grid does not end before the previous one
            grid.wait()

    return combine, None
