"""V of fp8 with keys as columns, in the order in which fp8 attention has weights: (batch, key, head, column) becomes (batch,
head, column, key), the keys of each sixteen as layout.zipped says, and zeros behind the last one."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, warpgroup
from tiles import fp8e4m3, ring, shared, st
from tiles.arguments import INT, tiled

KEYS = 128  # of a block; what is made has a multiple of them


@dataclass(frozen=True)
class Config:
    """The configuration of the kernel that transposes V. columns: how many V has, padded."""

    columns: int
    threads = warpgroup.THREADS

    def __str__(self):
        return f"fp8e4m3 values turned, {KEYS} x {self.columns}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations, on architectures whose kernels need this."""
    if arch == "sm_90a":
        yield from map(Config, (64, 128, 256))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    V, TURNED = st(KEYS, config.columns, fp8e4m3), st(config.columns, KEYS, fp8e4m3)
    smem = shared(v=ring(V, 1), turned=TURNED)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def turn(gV: tiled(V, unit=1), gTurned: tiled(TURNED, 4, 2, 3), blocks: INT, heads: INT):
        """Transpose 128 keys of a head. Each head has `blocks` thread blocks."""
        v, turned = smem.open()
        batch_head, block = divmod(int32(cuda.blockIdx.x), blocks)
        batch, head = divmod(batch_head, heads)
        v.fill(0, gV, (batch, KEYS * block, head))
        warpgroup.transpose_zipped(turned, v.wait(0))
        warpgroup.tma_store(gTurned, (batch, head, 0, block), turned)
        warpgroup.store_wait()

    return turn, smem
