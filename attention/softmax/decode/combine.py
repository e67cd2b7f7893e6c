"""After attend.py, where several blocks share a sequence's keys: a row's parts become its output. A part is a mean of values,
and x, where exp2(scale x) is the sum of its weights."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import col_sum, divmod, exp2, full, load, log2, maximum, row_index, store, tile_max, tile_sum, where, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt
from tiles.arguments import FLOAT, INT, array, record
from tiles.layout import LANES

from ..online import LN2, LOWEST, TINY
from ..variants import At, Variant

AT_ONCE, COLUMNS = 16, 64  # parts that a block adds at a time, and of how many columns


@dataclass(frozen=True)
class Config:
    """Of the kernel: the output's dtype; what joins the sum of weights. A block is a warp."""

    dtype: dtype
    sums: Variant
    threads = LANES

    def __str__(self):
        return f"{self.dtype}" + f" {self.sums}" * (type(self.sums) is not Variant)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    yield from (Config(of, Variant()) for of in (bf16, fp16)[: 1 + everything])


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    sums, PART = config.sums, rt(AT_ONCE, COLUMNS, fp32)

    @inlined
    def found(gSums, splits, split, sequence, head, row):
        """What the parts' weights sum up to, of splits from `split` on."""
        exists = row_index(PART.col_vec) + split < splits
        return where(exists, load(gSums, PART.col_vec, (split, sequence, head, row), cols=0), -math.inf)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def combine(
        parts: array(5), sums_: array(4), out: array(5, config.dtype), lse: array(4), given: record(**sums.given),
        heads: INT, rows: INT, slabs: INT, splits: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Of one of `rows` rows of a key head one of `slabs` slabs of columns; see attend.py."""
        every, slab = divmod(cuda.blockIdx.x, slabs)
        pair, row = divmod(every, rows)
        sequence, head = divmod(pair, heads)
        token, member = divmod(row, group)
        at = At(sequence, int32(head * group + member), token, 0, 0, 0, given, 0, 0)
        most = full(PART.col_vec, LOWEST)
        for split in range(0, splits, AT_ONCE):
            most = maximum(most, found(sums_, splits, int32(split), sequence, head, row))
        m = maximum(tile_max(most), sums.lowest(at))
        o, l = zeros(PART.row_vec), 0.0
        for split in range(0, splits, AT_ONCE):
            weights = exp2((found(sums_, splits, int32(split), sequence, head, row) - m) * scale)
            part = load(parts, PART, (int32(split), sequence, head, row, int32(COLUMNS * slab)), 0, 4, True)
            o = o + col_sum(where(weights > 0.0, part * weights, 0.0))  # of what has no weight nothing was written
            l = l + tile_sum(weights)
        l = sums.total(l, m, scale, at)
        store(out, o / maximum(l, TINY), (sequence, token, head, member, int32(COLUMNS * slab)))
        if lse.shape[0] > 0:
            lse[sequence, head, member, token] = (m * scale + log2(l)) * LN2

    return combine, None
