"""The kernel that runs before the main kernel of the gradients. For every query it computes the log-sum-exp in powers of 2, and
delta = rowsum(dO O) - dlse, which is subtracted from dP. It also sets the sums of dQ to 0, unless a thread block stores there
before others add.

A score's gradient is dS = P (dP - delta), delta = sum(dO O) - dlse, because P is also the derivative of lse by the scores. Of a
sink, a score without a value, it is P (0 - delta). So all that reads delta takes the gradient of lse into account."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numba import cuda
from numpy import int32

from ops import divmod, finish_sum, grid, lane_sum, load, load_unordered, row_index, store, truncate, where, zeros
from tiles import dtype, fp32, inlined, rt
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import INT, Record, array, record
from tiles.layout import LANES

from ...parts.backward.config import BackwardConfig
from ...parts.backward.dq_order import UNORDERED, UnorderedAdds
from ...parts.backward.dq_parts import WARP_ROWS
from ...parts.sequences import BatchedLayout

LOG2_E = np.float32(np.log2(np.e))
MASKED_LSE = 1e30  # the log-sum-exp of a row that sees no key, or does not exist: its weights exp2(s - lse) are exact zeros


@dataclass(frozen=True)
class Config:
    """The kernel's configuration. value_dim: padded. rows: queries of a tile. sums: rows and columns of a query tile in the
    array of sums of dQ, if that must be set to 0. aligned: do rows of O and dO begin at multiples of 16 bytes? seq_layout: how
    sequences lie in memory. order: in which order dQ is summed. overlaps_previous: does the kernel begin while the grid before
    it ends (PDL)? has_dlse: has the log-sum-exp a gradient?"""

    value_dim: int
    rows: int
    dtype: dtype
    sums: tuple[int, int] | None
    aligned: bool
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
        sums = "{} x {} sums".format(*self.sums) if self.sums else "no sums"
        flags = ", by elements" * (not self.aligned) + " PDL" * self.overlaps_previous + ", dlse" * self.has_dlse
        return f"D {self.value_dim} {self.dtype}, {self.rows} queries, {sums}{self.order}{flags}"


def config_of(main: BackwardConfig) -> Config:
    """The configuration that runs before this main kernel."""
    sums = (main.parts.sum_rows, main.parts.sum_columns) if main.adds_dq and main.order.needs_zeros else None
    shape = main.value_dim, main.rows, main.dtype, sums, main.vector_bytes == VECTOR_SIZES[0]
    return Config(*shape, seq_layout=main.seq_layout, order=main.order, overlaps_previous=main.overlaps_previous)


def space_around(mains: Iterable[BackwardConfig], everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect: one for each of these of main kernels, also with dlse."""
    configs = [config_of(main) for main in mains]
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
    sequences, order, (SUM_ROWS, SUM_COLUMNS) = config.sequences, config.order, config.sums or (0, PART.cols)
    COLUMNS, WARPS, SUMS = config.value_dim, config.rows // WARP_ROWS, rt(WARP_ROWS, SUM_COLUMNS, fp32)
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
            store(gDQAccum, zeros(SUMS), (batch_head, int32(SUM_ROWS * tile + WARP_ROWS * n), 0), 1, 2, True)

    return prepare, None
