"""The kernel that runs before the main kernel of the gradients. For every query it computes the log-sum-exp in powers of 2, and
delta = rowsum(dO O) - dlse, which is subtracted from dP. It also sets the sums of dQ to 0, unless a thread block stores there
before others add.

A score's gradient is dS = P (dP - delta), delta = sum(dO O) - dlse, because P is also the derivative of lse by the scores. Of a
sink, a score without a value, it is P (0 - delta). So all that reads delta takes the gradient of lse into account."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numba import cuda
from numpy import int32

from ops import divmod, finish_sum, grid, lane_sum, load, load_unordered, row_index, store, truncate, where, zeros
from tiles import dtype, fp32, inlined, rt
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import INT, Record, array, record
from tiles.layout import LANES
from tiles.targets import Target

from ..parts.backward.dq_order import UNORDERED, UnorderedAdds
from ..parts.backward.dq_parts import WARP_ROWS, RowParts
from ..parts.sequences import BatchedLayout
from . import backward_ampere, backward_hopper, backward_wide_hopper

LOG2_E = np.float32(np.log2(np.e))
MASKED_LSE = 1e30  # the log-sum-exp of a row that sees no key, or does not exist: its weights exp2(s - lse) are exact zeros


@dataclass(frozen=True)
class Config:
    """The kernel's configuration: the padded columns of O, queries of a tile, how dQ is cut (if it is summed), whether rows of
    O and dO begin at multiples of 16 bytes, how sequences seq_layout, in which order dQ is summed, whether the kernel begins
    while the grid before it ends, and whether the log-sum-exp has a gradient."""

    value_dim: int
    rows: int
    dtype: dtype
    parts: RowParts | None
    aligned: bool = True
    seq_layout: type[BatchedLayout] = field(default=BatchedLayout, kw_only=True)
    order: UnorderedAdds = field(default=UNORDERED, kw_only=True)
    overlaps_previous: bool = field(default=False, kw_only=True)
    has_dlse: bool = field(default=False, kw_only=True)

    @property
    def threads(self):
        """The number of threads of a thread block, each of whose warps has 16 queries of a tile."""
        return LANES * self.rows // WARP_ROWS

    @property
    def sequences(self) -> BatchedLayout:
        return self.seq_layout(self.rows)

    @property
    def params(self) -> Record:
        """The kernel's parameters for sequences, for the order of dQ's sums, and for the gradient of the log-sum-exp."""
        has_dlse = {"dlse": array(3)} if self.has_dlse else {}
        return record(**self.sequences.params, **self.order.params, **has_dlse)

    def __str__(self):
        parts = type(self.parts).__name__.lower() if self.parts else "no sums"
        suffix = (
            ", by elements" * (not self.aligned) + str(self.order) + " PDL" * self.overlaps_previous + ", dlse" * self.has_dlse
        )
        return f"D {self.value_dim} {self.dtype}, {self.rows} queries, {parts}{suffix}"


def config_of(config: backward_hopper.Config | backward_ampere.Config) -> Config:
    """The configuration that runs before this main kernel."""
    aligned, parts = True, config.parts
    if isinstance(config, backward_ampere.Config):
        aligned, parts = config.vector_bytes == VECTOR_SIZES[0], replace(config.parts, vector_bytes=VECTOR_SIZES[0])
    shape = config.value_dim, config.rows, config.dtype
    return Config(
        *shape,
        None if config.single_block else parts,
        aligned,
        seq_layout=config.seq_layout,
        order=config.order,
        overlaps_previous=config.overlaps_previous,
    )


def without_sums(config: backward_wide_hopper.Config) -> Config:
    """The configuration that runs before a main kernel that sums no dQ in global memory."""
    return Config(config.value_dim, config.rows, config.dtype, None, overlaps_previous=config.overlaps_previous)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture: one for each of the main kernel's, also with dlse."""
    kernels = backward_hopper, backward_ampere
    configs = [config_of(config) for kernel in kernels for config in kernel.space(target, everything)]
    configs += [without_sums(config) for config in backward_wide_hopper.space(target, everything)]
    with_dlse = [replace(config, has_dlse=True) for config in (configs if everything else configs[:1])]
    yield from dict.fromkeys(configs + with_dlse)


@inlined
def subtract_dlse(delta, visible, spec, at, params):
    """delta - dlse, vectors of type `spec`, where `visible`, and 0 elsewhere. dlse of a row that sees no key or does not exist
    may be anything."""
    return where(visible, delta - load(params.dlse, spec, at), 0.0)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ALIGNED, PDL, HAS_DLSE = True if config.aligned else None, config.overlaps_previous, config.has_dlse
    ROWS, INPUT, PART, PARAMS = config.rows, config.dtype, rt(WARP_ROWS, 64, fp32), config.params
    parts, sequences, order = config.parts, config.sequences, config.order
    COLUMNS, WARPS = config.value_dim, config.rows // WARP_ROWS
    X, SUM_ROWS = (rt(WARP_ROWS, parts.sum_columns, fp32), parts.sum_rows) if parts and order.needs_zeros else (PART, 0)
    ZERO_TILES = SUM_ROWS // WARP_ROWS

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def prepare(
        gO: array(4, INPUT), gDO: array(4, INPUT), gLse: array(3), gLseDelta: array(3), gDQAccum: array(3),
        params: PARAMS, blocks: INT, heads: INT,
    ):  # fmt: skip
        """lse and delta of a query tile, one of the `blocks` of a head, and zeros for its dQ. O and dO are (batch, row, head,
        column), lse is (batch, head, row)."""
        if PDL:
            grid.follow()
        batch_head, tile = divmod(cuda.blockIdx.x, blocks)
        block, batch, head = sequences.find_tile(tile, batch_head, heads, params)
        seq, warp = sequences.sequence(batch, params), int32(cuda.threadIdx.x // LANES)
        row, index = int32(ROWS * block + WARP_ROWS * warp), int32(2 * ROWS * tile + WARP_ROWS * warp)
        if sequences.packed:
            gO, gDO = truncate(gO, 1, seq.offset_q + seq.seqlen_q), truncate(gDO, 1, seq.offset_q + seq.seqlen_q)
        lse = load(gLse, PART.col_vec, (seq.batch, head, seq.offset_q + row)) * LOG2_E
        delta = lane_sum(zeros(PART))
        for col in range(0, COLUMNS, PART.cols):
            at = seq.batch, seq.offset_q + row, head, col
            delta = delta + lane_sum(load_unordered(gO, PART, at, 1, 3, ALIGNED) * load_unordered(gDO, PART, at, 1, 3, ALIGNED))
        delta = finish_sum(delta)
        lse = where(lse <= -MASKED_LSE, MASKED_LSE, lse)  # not where it is NaN
        lse = where(row_index(PART.col_vec) + row < seq.seqlen_q, lse, MASKED_LSE)
        if HAS_DLSE:
            delta = subtract_dlse(delta, lse < MASKED_LSE, PART.col_vec, (seq.batch, head, seq.offset_q + row), params)
        store(gLseDelta, delta, (seq.batch, head, int32(index + ROWS)))
        store(gLseDelta, lse, (seq.batch, head, index))
        if warp == 0:
            order.init_semaphores(params, batch_head, tile)
        for n in range(warp, ZERO_TILES, WARPS):  # 0 if nothing needs to be cleared
            store(gDQAccum, zeros(X), (batch_head, int32(SUM_ROWS * tile + WARP_ROWS * n), 0), 1, 2, True)

    return prepare, None
