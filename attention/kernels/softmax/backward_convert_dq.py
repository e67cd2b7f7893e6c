"""The kernel that runs after the main kernel of the gradients: it converts the sums of dQ, which are in float32 and in the
order in which the tensor cores leave them, to the array dQ."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import divmod, grid, truncate, zeros
from tiles.launching.arguments import FLOAT, INT, Record, array, record
from tiles.layout import LANES

from ...parts.backward.config import BackwardConfig
from ...parts.backward.dq_parts import RowParts
from ...parts.backward.gradient_outputs import StoreGradient
from ...parts.sequences import BatchedLayout

WARPS = 4  # warps of a thread block


@dataclass(frozen=True)
class Config:
    """The kernel's configuration: the parts that dQ is summed in, the layout of sequences, how the gradient is stored, and
    whether the kernel begins while the main kernel's grid ends."""

    parts: RowParts
    result: StoreGradient
    seq_layout: type[BatchedLayout] = field(default=BatchedLayout, kw_only=True)
    overlaps_previous: bool = field(default=False, kw_only=True)
    threads = LANES * WARPS

    @property
    def sequences(self) -> BatchedLayout:
        return self.seq_layout(self.parts.queries)

    @property
    def params(self) -> Record:
        return record(**self.sequences.params)

    def __str__(self):
        parts, kinds = self.parts, ", ".join(type(x).__name__.lower() for x in (self.parts, self.result))
        return f"D {parts.columns} {parts.dtype}, {parts.queries} queries, {kinds}" + " PDL" * self.overlaps_previous


def config_of(main: BackwardConfig) -> Config:
    """The configuration that converts the sums of dQ of this main kernel."""
    return Config(main.parts, main.result, seq_layout=main.seq_layout, overlaps_previous=main.overlaps_previous)


def space_around(mains: Iterable[BackwardConfig], everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect: one for each of these of main kernels, if it adds to dQ."""
    yield from dict.fromkeys(config_of(main) for main in mains if main.adds_dq)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    parts, WARP_TILES, QUERIES, result = config.parts, config.parts.warp_tiles, config.parts.queries, config.result
    sequences, PARAMS, OUT, PDL = config.sequences, config.params, config.result.dtype, config.overlaps_previous

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def finish(gDQAccum: array(3), gDQ: array(4, OUT), params: PARAMS, blocks: INT, heads: INT, unit: FLOAT):
        """dQ = `unit` times its sums for a query tile, one of the `blocks` of a head; 0 for rows of no sequence."""
        if PDL:
            grid.wait()
        batch_head, tile = divmod(cuda.blockIdx.x, blocks)
        block, batch, head = sequences.find_tile(tile, batch_head, heads, params)
        if sequences.packed:
            has_padding, row = sequences.padding_rows(block, batch, params)
            if has_padding:
                for n in range(cuda.threadIdx.x // LANES, WARP_TILES, WARPS):
                    parts.store_dq(gDQ, zeros(parts.warp_tile), int32(0), row, head, int32(n), result)
        if sequences.has_tile(block, batch, params):
            seq = sequences.sequence(batch, params)
            row = int32(seq.offset_q + QUERIES * block)
            if sequences.packed:
                gDQ = truncate(gDQ, 1, seq.offset_q + seq.seqlen_q)
            for n in range(cuda.threadIdx.x // LANES, WARP_TILES, WARPS):
                x = parts.load_sums(gDQAccum, batch_head, tile, int32(n)) * unit
                parts.store_dq(gDQ, x, seq.batch, row, head, int32(n), result)

    return finish, None
