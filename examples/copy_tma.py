"""A copy through shared memory by TMA: one warpgroup fetches tiles ahead, another stores them, and a ring lies between them.

The j-th tile goes through slot j % STAGES of the ring. `fill` waits until that slot is free, `wait` until the tile has
arrived; both compute the slot from j alone. The part of a tile outside the array is zero on load and dropped on store.
"""

import numpy as np
from machine import to_device, to_host
from numba import cuda

import tiles
from ops import warpgroup
from tiles import bf16, ring, shared, st

TILE = st(64, 64, bf16)
STAGES = 3
PRODUCER, CONSUMER = 0, 1
smem = shared(buffer=ring(TILE, STAGES))


@cuda.jit
def copy(source, target, across):
    """Copy one band of TILE.rows rows, `across` tiles wide."""
    (buffer,) = smem.open()
    band = cuda.blockIdx.x
    if warpgroup.id() == PRODUCER:
        for j in range(across):
            buffer.fill(j, source, (band, j))
    else:
        for j in range(across):
            warpgroup.tma_store(target, (band, j), buffer.wait(j))
            warpgroup.store_wait()
            buffer.release(j)


def main(to_device=to_device, rows=150, cols=584):
    """Copy a matrix whose sides are no multiples of the tile's."""
    x = np.random.default_rng(0).standard_normal((rows, cols), np.float32).astype(bf16.np)
    y = to_device(np.full_like(x, np.nan))
    grid, across = -(-rows // TILE.rows), -(-cols // TILE.cols)
    source, target = tiles.tensor(to_device(x), TILE), tiles.tensor(y, TILE)
    tiles.launch(copy, grid, block=2 * warpgroup.THREADS, shared=smem)(source, target, across)
    np.testing.assert_array_equal(to_host(y), to_host(x))
    print(f"copied {rows} x {cols} in tiles of {TILE.rows} x {TILE.cols}")


if __name__ == "__main__":
    main()
