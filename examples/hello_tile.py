"""Hello, tile: load 16 x 16 numbers into the registers of one warp, double them, look at them, store them."""

import numpy as np
from machine import to_device, to_host
from numba import cuda

import tiles
from ops import load, store
from tiles import fp32, rt

TILE = rt(16, 16, fp32)


@cuda.jit
def double(source, target):
    """target = 2 source, for 16 x 16 arrays."""
    tile = load(source, TILE, (0, 0))
    tile *= 2.0
    print(tile)
    store(target, tile, (0, 0))


def main(to_device=to_device):
    """Double a matrix and compare."""
    source = np.arange(256, dtype=np.float32).reshape(16, 16)
    target = to_device(np.full_like(source, np.nan))
    tiles.launch(double, grid=1, block=32)(to_device(source), target)
    np.testing.assert_array_equal(to_host(target), 2 * source)


if __name__ == "__main__":
    main()
