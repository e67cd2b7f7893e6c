"""Scores, computed once more for the gradients of what they depend on besides q and k: a bias, ALiBi's slopes, arrays that a
score in Python reads. The gradient of an element is the sum, over the scores that read it, of dS times the score's derivative
by the element. Kernels of their own compute these sums in a fixed order: bias_gradient.py, element_gradients.py. This module
has what they share: dS of a query tile and a key block at a time, 16 queries to a warp, by mma.sync, for every GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import abs, col_index, exp2, load, mma_ABt, row_index, subtile, truncate, where, zeros
from tiles import fp32, inlined, pipeline, rt, st, static
from tiles.launching.arguments import Record, record
from tiles.layout import LANES

from ..base_config import BaseConfig
from ..sequences import BatchedLayout
from ..tiling import CLASSES, Tiling
from ..variant import Variant
from .dq_parts import WARP_ROWS

SHAPES = {64: (64, 64), 128: (64, 64), 256: (32, 32)}  # padded head_dim: (queries, keys) of a tile


@static
class BiasRead:
    """How a score depends on an element of a bias, which is added before the score in Python, if there is one. score_and_grad:
    that function's (score, derivative), or None. Subclasses: how a score depends on elements of other arrays."""

    score_and_grad: Callable | None

    @inlined
    def grad(self, s, i, j, ctx):
        """The derivative of a score by the element that it reads. s: the argument of the score in Python."""
        if self.score_and_grad is None:
            return 1.0
        else:
            s, grad = self.score_and_grad(s, ctx.batch, ctx.head, i, j, *ctx.aux)
            return grad

    @inlined
    def element(self, i, j, ctx):
        """The flat index of the element that a score reads; -1 if it reads none."""
        return -1.0


@static
class SlopeRead(BiasRead):
    """How a score depends on ALiBi's slopes: one for each head, or, per_batch, for each head of each sequence."""

    per_batch: bool

    @inlined
    def grad(self, s, i, j, ctx):
        distance = abs(i + ctx.shift - j)
        if self.score_and_grad is None:
            return -distance
        else:
            s, grad = self.score_and_grad(s, ctx.batch, ctx.head, i, j, *ctx.aux)
            return -distance * grad

    @inlined
    def element(self, i, j, ctx):
        if self.per_batch:
            return ctx.batch * ctx.params.slopes.shape[1] + ctx.head
        else:
            return ctx.head


@static
class ElementRead(BiasRead):
    """How a score in Python depends on an element of an array that it reads: see score_derivative.AuxRead. derivative: of the
    score by the element. flat_index: that of the element."""

    derivative: Callable
    flat_index: Callable

    @inlined
    def grad(self, s, i, j, ctx):
        return self.derivative(s, ctx.batch, ctx.head, i, j, *ctx.aux)

    @inlined
    def element(self, i, j, ctx):
        return self.flat_index(ctx.batch, ctx.head, i, j, *ctx.aux)


@dataclass(frozen=True)
class Config(BaseConfig):
    """The configuration of such a kernel. queries: of a tile. main_rows: queries of the main kernel's tiles, in which `prepare`
    stores lse and delta. surveyed_keys: keys of the main kernel's blocks, if a survey says which of these a query tile sees.
    vector_bytes: the bytes that addresses and strides are multiples of. score_before: the variant that comes before the score
    in Python, if there is one. read: how scores depend on the array whose gradient this is."""

    queries: int
    main_rows: int
    surveyed_keys: int | None
    vector_bytes: int
    score_before: Variant | None
    read: BiasRead

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.queries

    @property
    def params(self) -> Record:
        """The kernel's parameters for the variant, for sequences, and for the survey."""
        classes = {"classes": CLASSES} if self.surveyed_keys else {}
        return record(**self.variant.params, **self.sequences.params, **classes)

    @property
    def warps(self) -> int:
        """The number of warps of a thread block."""
        return self.queries // WARP_ROWS

    @property
    def threads(self) -> int:
        """The number of threads of a thread block."""
        return LANES * self.warps

    def __str__(self):
        return f"{super().__str__()}, {type(self.read).__name__.lower()}"


def tile_buffers(config: Config) -> dict[str, Any]:
    """The shared memory of a kernel for its tiles of Q, K, V and dO."""
    tiles = {"q": config.query, "k": config.key, "v": config.value, "do": st(config.rows, config.value_dim, config.dtype)}
    return {name: pipeline(tile, 1, config.warps) for name, tile in tiles.items()}


@static
class ScoreRecomputation:
    """The device functions of such a kernel, for the fields of its Config."""

    rows: int
    kv: int
    main_rows: int
    surveyed_keys: int | None
    vector_bytes: int
    variant: Variant
    score_before: Variant | None
    read: BiasRead
    sequences: BatchedLayout
    main_sequences: BatchedLayout  # the same sequences, in tiles of main_rows

    @property
    def tile(self) -> rt:
        """The type of a warp's scores."""
        return rt(WARP_ROWS, self.kv, fp32)

    @property
    def tiling(self) -> Tiling:
        """The Tiling of such tiles and key blocks."""
        return Tiling(self.rows, self.kv, self.variant)

    @inlined
    def may_see(self, tile, block, ctx):
        """May queries of this tile see keys of this block?"""
        kv_blocks = self.tiling.key_blocks(self.rows * tile, ctx)
        in_range = kv_blocks.first <= block < kv_blocks.first + kv_blocks.n
        if self.sequences.packed:
            return in_range and self.rows * tile < ctx.seqlen_q
        elif self.surveyed_keys is None:
            return in_range
        else:
            row, key = self.rows * tile // self.main_rows, self.kv * block // self.surveyed_keys
            return in_range and ctx.params.classes[ctx.batch, ctx.head, row, key] > 0

    @inlined
    def weighted_ds(self, n, tile, block, ctx, seq, group, buffers, arrays, lse_delta, scale):
        """(dS times the derivatives of a warp's scores by the elements that they read, for a query tile and a key block of a
        sequence; i; j; the context of these scores). n: the number of tiles that were computed before."""
        q, k, v, do = buffers
        gQ, gK, gV, gDO = arrays
        if not self.sequences.bounded_by_array:  # rows after the ends belong to another sequence
            gK, gV = truncate(gK, 1, seq.offset_k + seq.seqlen_k), truncate(gV, 1, seq.offset_k + seq.seqlen_k)
        if self.sequences.packed:
            gQ, gDO = truncate(gQ, 1, seq.offset_q + seq.seqlen_q), truncate(gDO, 1, seq.offset_q + seq.seqlen_q)
        variant = self.variant
        first, key, warp = int32(self.rows * tile), int32(self.kv * block), int32(cuda.threadIdx.x // LANES)
        q.fill(n, gQ, (seq.batch, seq.offset_q + first, ctx.head, 0), 1, 3, n + 1, self.vector_bytes)
        do.fill(n, gDO, (seq.batch, seq.offset_q + first, ctx.head, 0), 1, 3, n + 1, self.vector_bytes)
        k.fill(n, gK, (seq.batch, seq.offset_k + key, ctx.head // group, 0), 1, 3, n + 1, self.vector_bytes)
        v.fill(n, gV, (seq.batch, seq.offset_k + key, ctx.head // group, 0), 1, 3, n + 1, self.vector_bytes)
        row = int32(first + WARP_ROWS * warp)
        warp_ctx = ctx._replace(row=row)
        ctx = warp_ctx.precompute(variant)
        q_rows, do_rows = subtile(q.wait(n, 0), WARP_ROWS, warp), subtile(do.wait(n, 0), WARP_ROWS, warp)
        x = mma_ABt(zeros(self.tile), q_rows, k.wait(n, 0))
        s = variant.score_in_edge_block(x, ctx, key)
        tiles_before = self.main_sequences.first_tile(ctx.batch, ctx.params)
        index = int32(2 * self.main_rows * (tiles_before + row // self.main_rows) + row % self.main_rows)
        lse = load(lse_delta, self.tile.col_vec, (seq.batch, ctx.head, index))
        if variant.has_row_offset:
            lse = lse + variant.row_offset_in_edge_block(s, ctx, key) * scale
        p = exp2(self.tiling.mask(s, ctx, key) * scale - lse)
        dp = mma_ABt(zeros(self.tile), do_rows, v.wait(n, 0))  # only now, when few registers hold anything but p
        delta = load(lse_delta, self.tile.col_vec, (seq.batch, ctx.head, int32(index + self.main_rows)))
        ds = variant.score_grad(variant.mark_dropped(p, ctx, key), dp, delta, ctx)
        i, j = row_index(self.tile.col_vec) + row, col_index(self.tile.row_vec) + key
        if self.score_before is None:
            return where(p == 0.0, 0.0, ds * self.read.grad(x, i, j, ctx)), i, j, ctx
        else:
            before_ctx = warp_ctx.precompute(self.score_before)
            x = self.score_before.score(x, before_ctx, key) * ctx.params.score_unit
            return where(p == 0.0, 0.0, ds * self.read.grad(x, i, j, ctx)), i, j, ctx


def recomputation(config: Config) -> ScoreRecomputation:
    """The ScoreRecomputation of this configuration."""
    shape = config.rows, config.kv, config.main_rows, config.surveyed_keys, config.vector_bytes
    return ScoreRecomputation(
        *shape, config.variant, config.score_before, config.read, config.sequences, config.seq_layout(config.main_rows)
    )
