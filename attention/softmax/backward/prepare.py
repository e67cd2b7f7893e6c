"""Runs before the main kernel of the gradients. For every query it computes the sum of dO O, which the softmax subtracts from
dP, less the gradient of the log-sum-exp, if it has one; and the log-sum-exp in powers of 2. And it clears the sums of dQ,
unless the first block stores there.

A score's gradient is dS = P (dP - delta), delta = sum(dO O) - dlse, because P is also the derivative of lse by the scores. Of a
sink, a score without a value, it is P (0 - delta). So whatever reads delta takes the gradient of lse into account."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numba import cuda
from numpy import int32

from ops import divmod, finish_sum, grid, lane_sum, load, load_unordered, row_index, store, truncate, where, zeros
from tiles import dtype, fp32, inlined, rt
from tiles.arguments import INT, Record, array, record
from tiles.cp_async import PIECES
from tiles.layout import LANES

from ..sequences import BatchedLayout
from . import ampere, hopper, hopper_wide
from .dq_order import UNORDERED, Unordered
from .dq_parts import BAND, ByRows

LOG2_E = np.float32(np.log2(np.e))
NEVER = 1e30  # the log-sum-exp of a row that sees no key, or does not exist: its weights exp2(s - lse) are exact zeros


@dataclass(frozen=True)
class Config:
    """The kernel's configuration: the padded columns of O, queries of a tile, how dQ is cut (if it is summed), whether rows of
    O and dO begin at multiples of 16 bytes, how sequences lie, in which order dQ is summed, whether the kernel begins while the
    grid before it ends, and whether the log-sum-exp has a gradient."""

    value_dim: int
    rows: int
    dtype: dtype
    parts: ByRows | None
    aligned: bool = True
    seq_layout: type[BatchedLayout] = field(default=BatchedLayout, kw_only=True)
    order: Unordered = field(default=UNORDERED, kw_only=True)
    overlaps_previous: bool = field(default=False, kw_only=True)
    of_lse: bool = field(default=False, kw_only=True)

    @property
    def threads(self):
        """Threads of a block: a warp has 16 queries of a tile."""
        return LANES * self.rows // BAND

    @property
    def sequences(self) -> BatchedLayout:
        """How they lie."""
        return self.seq_layout(self.rows)

    @property
    def params(self) -> Record:
        """What the kernel is told of sequences and of the order, and the gradient of the log-sum-exp."""
        of_lse = {"dlse": array(3)} if self.of_lse else {}
        return record(**self.sequences.params, **self.order.params, **of_lse)

    def __str__(self):
        parts = type(self.parts).__name__.lower() if self.parts else "no sums"
        more = ", by elements" * (not self.aligned) + str(self.order) + " PDL" * self.overlaps_previous + ", dlse" * self.of_lse
        return f"D {self.value_dim} {self.dtype}, {self.rows} queries, {parts}{more}"


def config_of(config: hopper.Config | ampere.Config) -> Config:
    """The configuration that prepares for this kernel."""
    aligned, parts = True, config.parts
    if isinstance(config, ampere.Config):
        aligned, parts = config.vector_bytes == PIECES[0], replace(config.parts, vector_bytes=PIECES[0])
    shape = config.value_dim, config.rows, config.dtype
    return Config(
        *shape,
        None if config.alone else parts,
        aligned,
        seq_layout=config.seq_layout,
        order=config.order,
        overlaps_previous=config.overlaps_previous,
    )


def without_sums(config: hopper_wide.Config) -> Config:
    """The configuration that prepares for kernels which sum no dQ in memory."""
    return Config(config.value_dim, config.rows, config.dtype, None, overlaps_previous=config.overlaps_previous)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with: what the main kernel's are, each with a gradient of lse, too."""
    found = [config_of(config) for module in (hopper, ampere) for config in module.space(arch, everything)]
    found += [without_sums(config) for config in hopper_wide.space(arch, everything)]
    of_lse = [replace(config, of_lse=True) for config in (found if everything else found[:1])]
    yield from dict.fromkeys(found + of_lse)


@inlined
def less_dlse(delta, there, spec, at, params):
    """delta less the gradient of the log-sum-exp, vectors of type `spec`, of rows that are there and see a key. In that of
    others no score has a part, so that it may be anything."""
    return where(there, delta - load(params.dlse, spec, at), 0.0)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ALIGNED, PDL, OF_LSE = True if config.aligned else None, config.overlaps_previous, config.of_lse
    ROWS, INPUT, PART, PARAMS = config.rows, config.dtype, rt(BAND, 64, fp32), config.params
    parts, sequences, order = config.parts, config.sequences, config.order
    COLUMNS, WARPS = config.value_dim, config.rows // BAND
    X, HEIGHT = (rt(BAND, parts.width, fp32), parts.rows) if parts and order.clears else (PART, 0)
    BANDS = HEIGHT // BAND

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def prepare(
        gO: array(4, INPUT), gDO: array(4, INPUT), gLse: array(3), gSums: array(3), gSum: array(3),
        params: PARAMS, blocks: INT, heads: INT,
    ):  # fmt: skip
        """Prepares a tile of queries, one of the `blocks` of a pair. O and dO are (batch, row, head, column), all other arrays
        (batch, head, row)."""
        if PDL:
            grid.follow()
        batch_head, tile = divmod(cuda.blockIdx.x, blocks)
        block, batch, head = sequences.find(tile, batch_head, heads, params)
        seq, warp = sequences.sequence(batch, params), int32(cuda.threadIdx.x // LANES)
        row, to = int32(ROWS * block + BAND * warp), int32(2 * ROWS * tile + BAND * warp)
        if sequences.packed:
            gO, gDO = truncate(gO, 1, seq.offset_q + seq.seqlen_q), truncate(gDO, 1, seq.offset_q + seq.seqlen_q)
        lse = load(gLse, PART.col_vec, (seq.batch, head, seq.offset_q + row)) * LOG2_E
        delta = lane_sum(zeros(PART))
        for col in range(0, COLUMNS, PART.cols):
            at = seq.batch, seq.offset_q + row, head, col
            delta = delta + lane_sum(load_unordered(gO, PART, at, 1, 3, ALIGNED) * load_unordered(gDO, PART, at, 1, 3, ALIGNED))
        delta = finish_sum(delta)
        lse = where(lse <= -NEVER, NEVER, lse)  # not where it is NaN
        lse = where(row_index(PART.col_vec) + row < seq.seqlen_q, lse, NEVER)
        if OF_LSE:
            delta = less_dlse(delta, lse < NEVER, PART.col_vec, (seq.batch, head, seq.offset_q + row), params)
        store(gSums, delta, (seq.batch, head, int32(to + ROWS)))
        store(gSums, lse, (seq.batch, head, to))
        if warp == 0:
            order.begin(params, batch_head, tile)
        for band in range(warp, BANDS, WARPS):  # BANDS is 0 if nothing needs to be cleared
            store(gSum, zeros(X), (batch_head, int32(HEIGHT * tile + BAND * band), 0), 1, 2, True)

    return prepare, None
