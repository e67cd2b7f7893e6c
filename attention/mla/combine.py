"""After attention, where several blocks share a sequence's keys: a few parts of many rows become their output. decode's
combine.py takes many parts of one row at once; here a warp takes sixteen rows at once, a part after the other."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, exp2, full, grid, load, log2, maximum, zeros
from tiles import bf16, fp16, fp32, rt
from tiles.arguments import FLOAT, INT, array, record
from tiles.layout import LANES
from tiles.targets import capability, has_early_launch

from ..softmax.decode.results import FinalOutput, OutputTile
from ..softmax.online import LOWEST, over_sum
from .shape import LATENT

ROWS, COLUMNS = 16, 64  # of a warp's tile
FEW = 8  # parts, beyond which decode's does it (a guess)
SLABS = LATENT // COLUMNS


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. result: where the output goes. overlaps_previous: may the kernel begin before
    the previous launch has ended (PDL)? A block is one warp."""

    result: FinalOutput
    overlaps_previous: bool
    threads = LANES

    @property
    def params(self):
        """The record of what `result` needs in the kernel."""
        return record(**self.result.params)

    def __str__(self):
        return f"mla {self.result.dtype}" + " PDL" * self.overlaps_previous


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with."""
    yield from (Config(FinalOutput(of, 16), has_early_launch(capability(arch))) for of in (bf16, fp16)[: 1 + everything])


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    result, PDL, PARAMS, O = config.result, config.overlaps_previous, config.params, rt(ROWS, COLUMNS, fp32)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def combine(
        out_partial: array(5),
        lse_partial: array(4),
        params: PARAMS,
        bands: INT,
        splits: INT,
        tokens: INT,
        group: INT,
        scale: FLOAT,
    ):
        """Join the parts of one of `bands` tiles of rows, for one of the SLABS of columns. See ampere.py."""
        every, slab = divmod(cuda.blockIdx.x, SLABS)
        sequence, band = divmod(every, bands)
        row, col = int32(ROWS * band), int32(COLUMNS * slab)
        last_row = min(row + ROWS, tokens * group) - 1
        out_tile = OutputTile(sequence, 0, 0, sequence, True, row, int32(row // group), int32(last_row // group), group)
        m, l, o = full(O.col_vec, LOWEST), zeros(O.col_vec), zeros(O)
        for n in range(splits):
            if PDL and n == 0:
                grid.follow()  # in the loop, before which the compiler puts all that computes addresses
            x, part = (
                load(lse_partial, O.col_vec, (n, sequence, 0, row)),
                load(out_partial, O, (n, sequence, 0, row, col), 3, 4, True),
            )
            most = maximum(m, x)
            lag, weight = exp2((m - most) * scale), exp2((x - most) * scale)
            m, l, o = most, l * lag + weight, o * lag + part * weight
        result.store(over_sum(o, l), out_tile, col, params)
        if slab == 0:
            result.store_lse(m + log2(l) / scale, scale, out_tile, params)

    return combine, None
