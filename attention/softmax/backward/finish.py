"""After the gradients' main kernel: dQ's sums, in float32 and as the tensor cores gave them, become dQ."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod
from tiles.arguments import FLOAT, INT, array
from tiles.layout import LANES

from . import ampere, hopper
from .parts import ByRows

WARPS = 4  # of a thread block


@dataclass(frozen=True)
class Config:
    """Of the kernel: how dQ is cut."""

    parts: ByRows
    threads = LANES * WARPS

    def __str__(self):
        parts = self.parts
        return f"D {parts.columns} {parts.dtype}, {parts.queries} queries, {type(parts).__name__.lower()}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with: what the main kernel's are."""
    yield from dict.fromkeys(Config(config.parts) for module in (hopper, ampere) for config in module.space(arch, everything))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    parts, BANDS, QUERIES, INPUT = config.parts, config.parts.bands, config.parts.queries, config.parts.dtype

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def finish(gSum: array(3), gDQ: array(4, INPUT), blocks: INT, heads: INT, unit: FLOAT):
        """`unit` times the sums of a tile of queries."""
        pair, block = divmod(cuda.blockIdx.x, blocks)
        batch, head = divmod(pair, heads)
        for band in range(cuda.threadIdx.x // LANES, BANDS, WARPS):
            parts.finish(
                gDQ, parts.load(gSum, pair, block, int32(band)) * unit, batch, int32(QUERIES * block), head, int32(band)
            )

    return finish, None
