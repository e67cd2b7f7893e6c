"""The gradients of Hedgehog's feature maps from those of their products, on Hopper: dM = x^T dy over the tokens of a key head.
The order of sums depends on the shapes alone: each block sums over some chunks, and another kernel adds these sums."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, mma_AtB, store, subtile, warp_index, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, pipeline, rt, shared, st
from tiles.launching.arguments import INT, array
from tiles.layout import LANES, WARPGROUP
from tiles.targets import Target

from ..parts.recurrent.hedgehog_chunks import HALF, HEAD_DIMS
from ..parts.recurrent.tokens import CHUNK

HEAD = HEAD_DIMS[-1]  # columns of x, padded
MAP_ROWS = HEAD // WARPGROUP  # of a warp
STAGES = 3  # chunks in flight
NEWER = 2 * (STAGES - 2)  # copies that may be under way while one is waited for


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. dtype: of x and dy."""

    dtype: dtype
    threads = LANES * WARPGROUP

    def __str__(self):
        return f"gradients of Hedgehog's maps, {self.dtype}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations; that of fp16 with `everything` only."""
    if target.has_wgmma:
        yield from map(Config, (bf16, fp16) if everything else (bf16,))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT = config.dtype
    smem = shared(
        x=pipeline(st(CHUNK, HEAD, INPUT, width=MAP_ROWS * INPUT.itemsize), STAGES, WARPGROUP),
        dy=pipeline(st(CHUNK, HALF, INPUT), STAGES, WARPGROUP),
    )

    @inlined
    def fill(x, dy, gX, gDY, j, number, count, tiles, group, head):
        """Start to copy a block's j-th chunk, of this number, if there are so many."""
        index, member = divmod(number, group)
        batch, tile = divmod(index, tiles)
        token = int32(CHUNK * tile)
        x.fill(j, gX, (batch, token, head, 0), 1, 3, count)
        dy.fill(j, gDY, (batch, token, int32(head * group + member), 0), 1, 3, count)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def sum_chunks(
        gX: array(4, INPUT), gDY: array(4, INPUT), gDMap: array(4), chunks: INT, tiles: INT, splits: INT, group: INT,
    ):  # fmt: skip
        """A block has every `splits`-th of the `chunks` of a key head, `tiles` of each batch and of each of the `group` value
        heads that share it. gDMap (1, row, head and split, column): the sum of a block."""
        x, dy = smem.open()
        head, split = divmod(cuda.blockIdx.x, splits)
        count, total = int32((chunks - split + splits - 1) // splits), zeros(rt(MAP_ROWS, HALF, fp32))
        for j in range(STAGES - 1):
            fill(x, dy, gX, gDY, j, int32(split + splits * j), count, tiles, group, head)
        for j in range(count):
            x_tile, dy_tile = x.wait(j, NEWER), dy.wait(j, NEWER)
            last = int32(j + STAGES - 1)
            fill(x, dy, gX, gDY, last, int32(split + splits * last), count, tiles, group, head)
            total = mma_AtB(total, subtile(x_tile, CHUNK, 0, MAP_ROWS, warp_index()), dy_tile)
        store(gDMap, total, (0, int32(MAP_ROWS * warp_index()), int32(head * splits + split), 0), 1, 3)

    return sum_chunks, smem
