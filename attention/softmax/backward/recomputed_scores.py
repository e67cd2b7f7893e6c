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
from ..sequences import Batched
from ..tiling import Tiling
from ..variants import Variant
from .dq_parts import BAND

SHAPES = {64: (64, 64), 128: (64, 64), 256: (32, 32)}  # padded head_dim: (queries, keys) of a tile


@static
class BiasRead:
    """How a score depends on an element of a bias, which is added before a function in Python. both: that function's (score,
    derivative), or None. The subclasses say the same for other arrays that a score reads."""

    score_and_grad: Callable | None

    @inlined
    def grad(self, s, i, j, at):
        """The derivative of a score by the element; s is what the function is given."""
        if self.score_and_grad is None:
            return 1.0
        else:
            s, slope = self.score_and_grad(s, at.batch, at.head, i, j, *at.aux)
            return slope

    @inlined
    def element(self, i, j, at):
        """Which element of the array a score reads, counted from the first; -1 if it reads none."""
        return -1.0


@static
class SlopeRead(BiasRead):
    """How a score depends on ALiBi's slopes: one for each head, or for each head of each sequence."""

    per_batch: bool

    @inlined
    def grad(self, s, i, j, at):
        distance = abs(i + at.shift - j)
        if self.score_and_grad is None:
            return -distance
        else:
            s, slope = self.score_and_grad(s, at.batch, at.head, i, j, *at.aux)
            return -distance * slope

    @inlined
    def element(self, i, j, at):
        if self.per_batch:
            return at.batch * at.given.slopes.shape[1] + at.head
        else:
            return at.head


@static
class ElementRead(BiasRead):
    """How a score depends on an element of an array that the function reads: see score_derivative.Read."""

    derivative: Callable
    which: Callable

    @inlined
    def grad(self, s, i, j, at):
        return self.derivative(s, at.batch, at.head, i, j, *at.aux)

    @inlined
    def element(self, i, j, at):
        return self.which(at.batch, at.head, i, j, *at.aux)


@dataclass(frozen=True)
class Config(BaseConfig):
    """Of such a kernel: queries of a tile; how many queries the main kernel's tiles have, of which `prepare` left two numbers a
    row, and how many keys its blocks have, if there is a survey of these; the bytes that bases and strides are multiples of;
    what becomes of scores before a function, if there is one; what they read."""

    queries: int
    main_rows: int
    surveyed_keys: int | None
    piece: int
    score_before: Variant | None
    read: BiasRead

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.queries

    @property
    def given(self) -> Record:
        """What the kernel is told of the variant, of sequences, and of the survey."""
        classes = {"classes": CLASSES} if self.surveyed_keys else {}
        return record(**self.variant.given, **self.sequences.given, **classes)

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


def tile_buffers(config: Config) -> dict[str, Any]:
    """The items of a kernel's shared memory."""
    tiles = {"q": config.query, "k": config.key, "v": config.value, "do": st(config.rows, config.value_dim, config.dtype)}
    return {name: pipeline(tile, 1, config.warps) for name, tile in tiles.items()}


@static
class ScoreRecomputation:
    """Computes the tiles of such a kernel: see Config."""

    rows: int
    kv: int
    main_rows: int
    surveyed_keys: int | None
    piece: int
    variant: Variant
    score_before: Variant | None
    read: BiasRead
    sequences: Batched
    main_sequences: Batched  # the same sequences, in tiles of the main kernel's

    @property
    def tile(self) -> rt:
        """A warp's scores."""
        return rt(BAND, self.kv, fp32)

    @property
    def tiling(self) -> Tiling:
        """Which keys a tile's queries see."""
        return Tiling(self.rows, self.kv, self.variant)

    @inlined
    def may_see(self, tile, block, at):
        """May the tile's queries see keys of a block?"""
        kv_blocks = self.tiling.key_blocks(self.rows * tile, at)
        within = kv_blocks.first <= block < kv_blocks.first + kv_blocks.n
        if self.sequences.packed:
            return within and self.rows * tile < at.queries
        elif self.surveyed_keys is None:
            return within
        else:
            row, key = self.rows * tile // self.main_rows, self.kv * block // self.surveyed_keys
            return within and at.given.classes[at.batch, at.head, row, key] > 0

    @inlined
    def weighted_ds(self, n, tile, block, at, seq, group, rooms, arrays, lse_delta, scale):
        """(dS times the derivatives of a warp's scores by what they read, for one tile and one block of keys of a sequence; i;
        j; `at` of these scores). n: how many tiles came score_before."""
        q, k, v, do = rooms
        gQ, gK, gV, gDO = arrays
        if not self.sequences.apart:  # behind the ends lie rows of another sequence
            gK, gV = truncate(gK, 1, seq.key + seq.keys), truncate(gV, 1, seq.key + seq.keys)
        if self.sequences.packed:
            gQ, gDO = truncate(gQ, 1, seq.query + seq.queries), truncate(gDO, 1, seq.query + seq.queries)
        variant = self.variant
        first, key, warp = int32(self.rows * tile), int32(self.kv * block), int32(cuda.threadIdx.x // LANES)
        q.fill(n, gQ, (seq.batch, seq.query + first, at.head, 0), 1, 3, n + 1, self.piece)
        do.fill(n, gDO, (seq.batch, seq.query + first, at.head, 0), 1, 3, n + 1, self.piece)
        k.fill(n, gK, (seq.batch, seq.key + key, at.head // group, 0), 1, 3, n + 1, self.piece)
        v.fill(n, gV, (seq.batch, seq.key + key, at.head // group, 0), 1, 3, n + 1, self.piece)
        row = int32(first + BAND * warp)
        here = at._replace(row=row)
        at = here._replace(kept=variant.keep(here))
        queries, dout = subtile(q.wait(n, 0), BAND, warp), subtile(do.wait(n, 0), BAND, warp)
        x = mma_ABt(zeros(self.tile), queries, k.wait(n, 0))
        s = variant.score_near(x, at, key)
        above = self.main_sequences.first_tile(at.batch, at.given)
        place = int32(2 * self.main_rows * (above + row // self.main_rows) + row % self.main_rows)
        lse = load(lse_delta, self.tile.col_vec, (seq.batch, at.head, place))
        if variant.by_rows:
            lse = lse + variant.below_near(s, at, key) * scale
        p = exp2(self.tiling.mask(s, at, key) * scale - lse)
        dp = mma_ABt(zeros(self.tile), dout, v.wait(n, 0))  # now that few registers hold anything but p
        delta = load(lse_delta, self.tile.col_vec, (seq.batch, at.head, int32(place + self.main_rows)))
        ds = variant.slope(variant.marked(p, at, key), dp, delta, at)
        i, j = row_index(self.tile.col_vec) + row, col_index(self.tile.row_vec) + key
        if self.score_before is None:
            return where(p == 0.0, 0.0, ds * self.read.grad(x, i, j, at)), i, j, at
        else:
            x = self.score_before.score(x, here._replace(kept=self.score_before.keep(here)), key) * at.given.score_unit
            return where(p == 0.0, 0.0, ds * self.read.grad(x, i, j, at)), i, j, at


def recomputation(config: Config) -> ScoreRecomputation:
    """The object that computes this kernel's tiles."""
    shape = config.rows, config.kv, config.main_rows, config.surveyed_keys, config.piece
    return ScoreRecomputation(*shape, config.variant, config.score_before, config.read, config.sequences, config.lie(config.main_rows))
