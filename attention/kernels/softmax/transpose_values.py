"""The kernel that transposes V of fp8 for fp8 attention: (batch, key, head, column) becomes (batch, head, column, key), with
the keys of each sixteen in the order of layout.zipped, and zeros after the last key."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, warpgroup
from tiles import fp8e4m3, ring, shared, st
from tiles.launching.arguments import INT, tiled
from tiles.targets import Target

KEYS = 128  # of a CTA; the result has a multiple of them


@dataclass(frozen=True)
class Config:
    """The configuration of the kernel that transposes V. columns: how many V has, padded."""

    columns: int
    threads = warpgroup.THREADS

    def __str__(self):
        return f"fp8e4m3 values transposed, {KEYS} x {self.columns}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations, for architectures with fp8 kernels."""
    if target.has_wgmma:
        yield from map(Config, (64, 128, 256))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    V, TRANSPOSED = st(KEYS, config.columns, fp8e4m3), st(config.columns, KEYS, fp8e4m3)
    smem = shared(v=ring(V, 1), transposed=TRANSPOSED)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def transpose(gV: tiled(V, unit=1), gTransposed: tiled(TRANSPOSED, 4, 2, 3), blocks: INT, heads: INT):
        """Transpose 128 keys of a head. Each head has `blocks` CTAs."""
        v, transposed = smem.open()
        batch_head, block = divmod(int32(cuda.blockIdx.x), blocks)
        batch, head = divmod(batch_head, heads)
        v.fill(0, gV, (batch, KEYS * block, head))
        warpgroup.transpose_zipped(transposed, v.wait(0))
        warpgroup.tma_store(gTransposed, (batch, head, 0, block), transposed)
        warpgroup.store_wait()

    return transpose, smem
