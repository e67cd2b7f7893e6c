"""Scores, computed once more for the gradients of what they depend on besides q and k: a bias, ALiBi's slopes, arrays that a
score in Python reads. Each gradient is a sum, over the scores that read an element, of dS times a derivative. Kernels of their
own take these sums in a fixed order: bias.py, elements.py. This module has what they share: a tile of queries and keys at a
time, of which each warp has 16 queries, by mma.sync, for every GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import abs, col_index, exp2, load, mma_ABt, row_index, subtile, truncate, where, zeros
from tiles import fp32, inlined, pipeline, rt, st, static
from tiles.arguments import Record, record
from tiles.layout import LANES

from ..base_config import BaseConfig
from ..key_block_lists import CLASSES
from ..sequences import BatchedLayout
from ..tiling import Tiling
from ..variants import Variant
from .dq_parts import BAND

SHAPES = {64: (64, 64), 128: (64, 64), 256: (32, 32)}  # padded head_dim: (queries, keys) of a tile


@static
class Added:
    """How a score depends on an element of a bias, which is added before a function in Python. both: that function's (score,
    derivative), or None. The subclasses say the same for other arrays that a score reads."""

    both: Callable | None

    @inlined
    def by(self, s, i, j, ctx):
        """The derivative of a score by the element; s is what the function is given."""
        if self.both is None:
            return 1.0
        else:
            s, slope = self.both(s, ctx.batch, ctx.head, i, j, *ctx.aux)
            return slope

    @inlined
    def place(self, i, j, ctx):
        """Which element of the array a score reads, counted from the first; -1 if it reads none."""
        return -1.0


@static
class Slope(Added):
    """How a score depends on ALiBi's slopes: one for each head, or for each head of each sequence."""

    each: bool

    @inlined
    def by(self, s, i, j, ctx):
        distance = abs(i + ctx.shift - j)
        if self.both is None:
            return -distance
        else:
            s, slope = self.both(s, ctx.batch, ctx.head, i, j, *ctx.aux)
            return -distance * slope

    @inlined
    def place(self, i, j, ctx):
        if self.each:
            return ctx.batch * ctx.params.slopes.shape[1] + ctx.head
        else:
            return ctx.head


@static
class Element(Added):
    """How a score depends on an element of an array that the function reads: see score_derivative.Read."""

    derivative: Callable
    which: Callable

    @inlined
    def by(self, s, i, j, ctx):
        return self.derivative(s, ctx.batch, ctx.head, i, j, *ctx.aux)

    @inlined
    def place(self, i, j, ctx):
        return self.which(ctx.batch, ctx.head, i, j, *ctx.aux)


@dataclass(frozen=True)
class Config(BaseConfig):
    """Of such a kernel: queries of a tile; how many queries the main kernel's tiles have, of which `prepare` left two numbers a
    row, and how many keys its blocks have, if there is a survey of these; the bytes that bases and strides are multiples of;
    what becomes of scores before a function, if there is one; what they read."""

    queries: int
    others: int
    surveyed: int | None
    vector_bytes: int
    before: Variant | None
    read: Added

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.queries

    @property
    def params(self) -> Record:
        """What the kernel is told of the variant, of sequences, and of the survey."""
        classes = {"classes": CLASSES} if self.surveyed else {}
        return record(**self.variant.params, **self.sequences.params, **classes)

    @property
    def warps(self) -> int:
        """Of a thread block."""
        return self.queries // BAND

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return LANES * self.warps

    def __str__(self):
        return f"{super().__str__()}, {type(self.read).__name__.lower()}"


def room(config: Config) -> dict[str, Any]:
    """The items of a kernel's shared memory."""
    tiles = {"q": config.query, "k": config.key, "v": config.value, "do": st(config.rows, config.value_dim, config.dtype)}
    return {name: pipeline(tile, 1, config.warps) for name, tile in tiles.items()}


@static
class Recomputed:
    """Computes the tiles of such a kernel: see Config."""

    rows: int
    kv: int
    others: int
    surveyed: int | None
    vector_bytes: int
    variant: Variant
    before: Variant | None
    read: Added
    sequences: BatchedLayout
    summed: BatchedLayout  # the same sequences, in tiles of the main kernel's

    @property
    def tile(self) -> rt:
        """A warp's scores."""
        return rt(BAND, self.kv, fp32)

    @property
    def tiling(self) -> Tiling:
        """Which keys a tile's queries see."""
        return Tiling(self.rows, self.kv, self.variant)

    @inlined
    def seen(self, tile, block, ctx):
        """May the tile's queries see keys of a block?"""
        kv_blocks = self.tiling.key_blocks(self.rows * tile, ctx)
        within = kv_blocks.first <= block < kv_blocks.first + kv_blocks.n
        if self.sequences.packed:
            return within and self.rows * tile < ctx.seqlen_q
        elif self.surveyed is None:
            return within
        else:
            row, key = self.rows * tile // self.others, self.kv * block // self.surveyed
            return within and ctx.params.classes[ctx.batch, ctx.head, row, key] > 0

    @inlined
    def weighted(self, n, tile, block, ctx, seq, group, rooms, arrays, sums, scale):
        """(dS times the derivatives of a warp's scores by what they read, for one tile and one block of keys of a sequence; i;
        j; `at` of these scores). n: how many tiles came before."""
        q, k, v, do = rooms
        gQ, gK, gV, gDO = arrays
        if not self.sequences.apart:  # behind the ends lie rows of another sequence
            gK, gV = truncate(gK, 1, seq.offset_k + seq.seqlen_k), truncate(gV, 1, seq.offset_k + seq.seqlen_k)
        if self.sequences.packed:
            gQ, gDO = truncate(gQ, 1, seq.offset_q + seq.seqlen_q), truncate(gDO, 1, seq.offset_q + seq.seqlen_q)
        variant = self.variant
        first, key, warp = int32(self.rows * tile), int32(self.kv * block), int32(cuda.threadIdx.x // LANES)
        q.fill(n, gQ, (seq.batch, seq.offset_q + first, ctx.head, 0), 1, 3, n + 1, self.vector_bytes)
        do.fill(n, gDO, (seq.batch, seq.offset_q + first, ctx.head, 0), 1, 3, n + 1, self.vector_bytes)
        k.fill(n, gK, (seq.batch, seq.offset_k + key, ctx.head // group, 0), 1, 3, n + 1, self.vector_bytes)
        v.fill(n, gV, (seq.batch, seq.offset_k + key, ctx.head // group, 0), 1, 3, n + 1, self.vector_bytes)
        row = int32(first + BAND * warp)
        here = ctx._replace(row=row)
        ctx = here._replace(precomputed=variant.precompute(here))
        queries, dout = subtile(q.wait(n, 0), BAND, warp), subtile(do.wait(n, 0), BAND, warp)
        x = mma_ABt(zeros(self.tile), queries, k.wait(n, 0))
        s = variant.score_in_edge_block(x, ctx, key)
        above = self.summed.first_tile(ctx.batch, ctx.params)
        place = int32(2 * self.others * (above + row // self.others) + row % self.others)
        lse = load(sums, self.tile.col_vec, (seq.batch, ctx.head, place))
        if variant.has_row_offset:
            lse = lse + variant.row_offset_in_edge_block(s, ctx, key) * scale
        p = exp2(self.tiling.mask(s, ctx, key) * scale - lse)
        dp = mma_ABt(zeros(self.tile), dout, v.wait(n, 0))  # now that few registers hold anything but p
        delta = load(sums, self.tile.col_vec, (seq.batch, ctx.head, int32(place + self.others)))
        ds = variant.score_grad(variant.mark_dropped(p, ctx, key), dp, delta, ctx)
        i, j = row_index(self.tile.col_vec) + row, col_index(self.tile.row_vec) + key
        if self.before is None:
            return where(p == 0.0, 0.0, ds * self.read.by(x, i, j, ctx)), i, j, ctx
        else:
            x = self.before.score(x, here._replace(precomputed=self.before.precompute(here)), key) * ctx.params.score_unit
            return where(p == 0.0, 0.0, ds * self.read.by(x, i, j, ctx)), i, j, ctx


def recomputed(config: Config) -> Recomputed:
    """The object that computes this kernel's tiles."""
    shape = config.rows, config.kv, config.others, config.surveyed, config.vector_bytes
    return Recomputed(*shape, config.variant, config.before, config.read, config.sequences, config.seq_layout(config.others))
