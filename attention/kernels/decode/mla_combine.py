"""Merges the partial outputs of split-KV if these are few and rows many: a warp merges sixteen rows at a time, one part after
the other. decode's mla_combine.py merges many parts of one row at a time."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, exp2, full, grid, load, log2, maximum, zeros
from tiles import bf16, fp16, fp32, rt
from tiles.launching.arguments import FLOAT, INT, array, record
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.decode.latent_shape import LATENT
from ...parts.decode.outputs import FinalOutput, OutputTile
from ...parts.online_softmax import LOWEST, over_sum

ROWS, COLUMNS = 16, 64  # of a warp's tile
MAX_PARTS = 8  # more are merged by decode_combine.py (a guess)
SLABS = LATENT // COLUMNS


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. result: where the output goes. overlaps_previous: may the kernel begin before the previous
    launch has ended (PDL)? A block is one warp."""

    result: FinalOutput
    overlaps_previous: bool
    threads = LANES

    @property
    def params(self):
        """The record of parameters that `result` reads."""
        return record(**self.result.params)

    def __str__(self):
        return f"mla {self.result.dtype}" + " PDL" * self.overlaps_previous


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with."""
    yield from (Config(FinalOutput(input_dtype, 16), target.has_early_launch) for input_dtype in (bf16, fp16)[: 1 + everything])


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    result, PDL, PARAMS, O = config.result, config.overlaps_previous, config.params, rt(ROWS, COLUMNS, fp32)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def combine(
        out_partial: array(5),
        lse_partial: array(4),
        params: PARAMS,
        row_tiles: INT,
        splits: INT,
        tokens: INT,
        group: INT,
        scale: FLOAT,
    ):
        """Merge the parts of one of `row_tiles` tiles of rows, for one of the SLABS of columns. The other parameters are those
        of mla_ampere.py's kernel."""
        rest, slab = divmod(cuda.blockIdx.x, SLABS)
        sequence, tile = divmod(rest, row_tiles)
        row, col = int32(ROWS * tile), int32(COLUMNS * slab)
        last_row = min(row + ROWS, tokens * group) - 1
        out_tile = OutputTile(sequence, 0, 0, sequence, True, row, int32(row // group), int32(last_row // group), group)
        m, l, o = full(O.col_vec, LOWEST), zeros(O.col_vec), zeros(O)
        for n in range(splits):
            if PDL and n == 0:
                grid.follow()  # here, because the compiler computes addresses before the loop, which need not wait
            x, part = (
                load(lse_partial, O.col_vec, (n, sequence, 0, row)),
                load(out_partial, O, (n, sequence, 0, row, col), 3, 4, True),
            )
            new_max = maximum(m, x)
            m_scale, weight = exp2((m - new_max) * scale), exp2((x - new_max) * scale)
            m, l, o = new_max, l * m_scale + weight, o * m_scale + part * weight
        result.store(over_sum(o, l), out_tile, col, params)
        if slab == 0:
            result.store_lse(m + log2(l) / scale, scale, out_tile, params)

    return combine, None
