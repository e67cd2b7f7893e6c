"""Runs after the main kernel of the gradients: makes dQ of its sums, which are float32 and in the order of the tensor cores."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import divmod, grid, truncate, zeros
from tiles.arguments import FLOAT, INT, Record, array, record
from tiles.layout import LANES

from ..sequences import BatchedLayout
from . import ampere, hopper
from .dq_parts import ByRows
from .results import Written

WARPS = 4  # of a thread block


@dataclass(frozen=True)
class Config:
    """The kernel's configuration: how dQ is cut, how sequences lie, how the gradient is stored, and whether the kernel begins
    while the main kernel's grid ends."""

    parts: ByRows
    result: Written
    seq_layout: type[BatchedLayout] = field(default=BatchedLayout, kw_only=True)
    overlaps_previous: bool = field(default=False, kw_only=True)
    threads = LANES * WARPS

    @property
    def sequences(self) -> BatchedLayout:
        """How they lie."""
        return self.seq_layout(self.parts.queries)

    @property
    def params(self) -> Record:
        """What the kernel is told of sequences."""
        return record(**self.sequences.params)

    def __str__(self):
        parts, result = self.parts, type(self.result).__name__.lower()
        return (
            f"D {parts.columns} {parts.dtype}, {parts.queries} queries, {type(parts).__name__.lower()}, {result}"
            + " PDL" * self.overlaps_previous
        )


def config_of(config: hopper.Config | ampere.Config) -> Config:
    """The configuration that finishes what this kernel began."""
    return Config(config.parts, config.result, seq_layout=config.seq_layout, overlaps_previous=config.overlaps_previous)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with: what the main kernel's are."""
    configs = itertools.chain.from_iterable(module.space(arch, everything) for module in (hopper, ampere))
    yield from dict.fromkeys(config_of(config) for config in configs if not config.alone)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    parts, BANDS, QUERIES, result = config.parts, config.parts.bands, config.parts.queries, config.result
    sequences, PARAMS, OUT, PDL = config.sequences, config.params, config.result.dtype, config.overlaps_previous

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def finish(gSum: array(3), gDQ: array(4, OUT), params: PARAMS, blocks: INT, heads: INT, unit: FLOAT):
        """dQ = `unit` times the sums, for a tile of queries, one of the `blocks` of a pair; 0 for what belongs to nobody."""
        if PDL:
            grid.wait()
        batch_head, tile = divmod(cuda.blockIdx.x, blocks)
        block, batch, head = sequences.find(tile, batch_head, heads, params)
        if sequences.packed:
            some, row = sequences.nobodys(block, batch, params)
            if some:
                for band in range(cuda.threadIdx.x // LANES, BANDS, WARPS):
                    parts.finish(gDQ, zeros(parts.finished), int32(0), row, head, int32(band), result)
        if sequences.has(block, batch, params):
            seq = sequences.sequence(batch, params)
            row = int32(seq.offset_q + QUERIES * block)
            if sequences.packed:
                gDQ = truncate(gDQ, 1, seq.offset_q + seq.seqlen_q)
            for band in range(cuda.threadIdx.x // LANES, BANDS, WARPS):
                x = parts.load(gSum, batch_head, tile, int32(band)) * unit
                parts.finish(gDQ, x, seq.batch, row, head, int32(band), result)

    return finish, None
