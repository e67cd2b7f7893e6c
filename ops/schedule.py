"""Which tiles a block of a persistent grid works on, and where they lie.

The blocks take the tiles in turn, back and forth: of 4 blocks, block 0 takes tiles 0, 7, 8, 15, ..., block 3 takes 3, 4, 11,
12, ... So if the tiles come longest first, every block gets about the same amount of work.

    r = 0                          # the grid has one axis: tiles.launch(kernel, grid=multiprocessors, ...)
    while snake(r) < tiles:
        ...                        # tile number snake(r)
        r += 1
"""

from numba.cuda import types

from tiles.builder import i1
from tiles.interpreter import here
from tiles.op import inlined, integer, lowers, op

from .index import split


@op
def snake(r, cluster=1):
    """The number of the r-th tile, r from 0, that this block of a grid along x takes, together with its peers of a cluster of
    that many blocks; it grows with r, and is below 2**31."""
    block, blocks = here().block.index[0] // cluster, here().block.grid[0] // cluster
    return r * blocks + (blocks - 1 - block if r % 2 else block)


@lowers(snake)
def _(r, cluster: int):
    if not integer(r) or cluster < 1:
        raise TypeError(f"snake: takes an integer, and how many blocks a cluster has, got {r} and {cluster}")

    def lower(b, r, _):
        block, blocks = (b.udiv(b.special(name), b.u32(cluster)) for name in ("ctaid.x", "nctaid.x"))
        r = b.u32(r)
        back = b.sub(b.sub(blocks, b.u32(1)), block)
        return b.add(b.mul(r, blocks), b.select(b.trunc(r, i1), back, block))

    return types.int32, lower


@inlined
def grouped(index, rows, cols, height):
    """(row, col) of tile number `index` of a grid of rows x cols tiles, taken in bands of `height` rows (the last may be
    lower), each band column by column. Tiles that are worked on at once then lie in few rows *and* few columns, so that what
    a product reads for them comes from the L2 cache; height 1 is row by row."""
    inside, band = split(index, height * cols)
    row, col = split(inside, min(height, rows - height * band))
    return height * band + row, col
