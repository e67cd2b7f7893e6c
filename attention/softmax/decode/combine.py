"""After attend.py, where several blocks share a sequence's keys: a row's parts become its output. A part is a mean of values,
and x, where exp2(scale x) is the sum of its weights."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import col_sum, divmod, exp2, grid, load, log2, maximum, row_index, store, tile_max, tile_sum, where, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt, static
from tiles.arguments import FLOAT, INT, array, record
from tiles.layout import LANES

from ..online import LN2, TINY
from ..variants import At, Variant
from .reach import Reach
from .splits import Parted, Shares

AT_ONCE, COLUMNS = 16, 64  # parts that a block adds at a time, and of how many columns
PART = rt(AT_ONCE, COLUMNS, fp32)
EACH = Parted()


@static
class Joining:
    """How a row's parts become its output. sums: what joins the sum of weights."""

    sums: Variant

    @inlined
    def store(self, held, outputs, found, head, row, col, group, scale, given):
        """Write COLUMNS columns, from `col` on, and the row's log-sum-exp. held: (parts, sums), outputs: (out, lse), as
        results.py has them; found: the sequence's Parts."""
        (parts, sums), (out, lse) = held, outputs
        token, member = divmod(row, group)
        at = At(found.sequence, int32(head * group + member), token, 0, 0, 0, given, 0, 0)
        m, l, o = self.sums.lowest(at), float32(0.0), zeros(PART.row_vec)
        for n in range(0, found.count, AT_ONCE):
            exists = row_index(PART.col_vec) + n < found.count
            sizes = load(sums, PART.col_vec, (int32(found.first + n), found.of, head, row), cols=0)
            part = load(parts, PART, (int32(found.first + n), found.of, head, row, col), 0, 4, True)
            sizes = where(exists, sizes, -math.inf)
            most = max(m, tile_max(sizes))
            lag, weights = exp2((m - most) * scale), exp2((sizes - most) * scale)
            part = where(weights > 0.0, part * weights, 0.0)  # of what has no weight nothing was written
            m, l, o = most, l * lag + tile_sum(weights), o * lag + col_sum(part)
        l = self.sums.total(l, m, scale, at)
        store(out, o / maximum(l, TINY), (found.sequence, token, head, member, col))
        if lse.shape[0] > 0:
            lse[found.sequence, head, member, token] = (m * scale + log2(l)) * LN2


@dataclass(frozen=True)
class Config:
    """Of the kernel: the output's dtype; what joins the sum of weights; how keys were split. A block is a warp. early: may it
    begin while attend.py's grid ends?"""

    dtype: dtype
    sums: Variant
    split: Parted = EACH
    early: bool = False
    threads = LANES

    def __str__(self):
        scores = f" {self.sums}" * (type(self.sums) is not Variant)
        return f"{self.dtype}{scores} {self.split}" + " early" * self.early


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    early, shared = arch >= "sm_90", Shares(Reach(False, False, False), 64)
    yield from (Config(of, Variant(), split, early) for of in (bf16, fp16)[: 1 + everything] for split in (Parted(), shared))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    sums, split, EARLY, joining = config.sums, config.split, config.early, Joining(config.sums)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def combine(
        parts: array(5), sums_: array(4), out: array(5, config.dtype), lse: array(4),
        given: record(**sums.given, **split.given),
        heads: INT, rows: INT, slabs: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Of one of `rows` rows of a key head one of `slabs` slabs of columns; see attend.py."""
        every, slab = divmod(cuda.blockIdx.x, slabs)
        pair, row = divmod(every, rows)
        number, head = divmod(pair, heads)
        found = split.parts(number, splits, sequences, tokens, given)
        if EARLY and (found.count > 1 or cuda.blockIdx.x == 0):  # one block at least, so that this grid ends after that one
            grid.wait()
        if found.count > 1:
            joining.store((parts, sums_), (out, lse), found, head, row, int32(COLUMNS * slab), group, scale, given)

    return combine, None
