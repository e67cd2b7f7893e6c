"""Which tiles a block of a persistent grid works on, and where they lie.

The blocks take the tiles in turn, back and forth: of 4 blocks, block 0 takes tiles 0, 7, 8, 15, ..., block 3 takes 3, 4, 11,
12, ... So if the tiles come longest first, every block gets about the same amount of work.

    r = 0                          # the grid has one axis: tiles.launch(kernel, grid=multiprocessors, ...)
    while persistent_tile(r) < tiles:
        ...                        # tile number persistent_tile(r)
        r += 1

`divmod` takes such numbers apart, in the 32 bits that the GPU has units for (Numba's // and % work on 64, with a sign).
"""

from numba.cuda import types

from tiles.builder import i1
from tiles.interpreter import here
from tiles.op import inlined, integer, lowers, op


@op
def divmod(index, extent):
    """(index // extent, index % extent), as Python's divmod, of integers: 0 <= index < 2**31, 1 <= extent < 2**31."""
    return index // extent, index % extent


@lowers(divmod)
def _(index, extent):
    if not (integer(index) and integer(extent)):
        raise TypeError(f"divmod: takes two integers, got {index} and {extent}")

    def lower(b, index, extent):
        index, extent = b.u32(index), b.u32(extent)
        quotient = b.udiv(index, extent)
        return b.context.make_tuple(b, result, [quotient, b.sub(index, b.mul(quotient, extent))])

    result = types.UniTuple(types.int32, 2)
    return result, lower


@op
def persistent_tile(r, cluster=1):
    """The number of the r-th tile, r from 0, that this block of a grid along x takes, together with its peers of a cluster of
    that many blocks; it grows with r, and is below 2**31."""
    block, blocks = here().block.index[0] // cluster, here().block.grid[0] // cluster
    return r * blocks + (blocks - 1 - block if r % 2 else block)


@lowers(persistent_tile)
def _(r, cluster: int):
    if not integer(r) or cluster < 1:
        raise TypeError(f"persistent_tile: takes an integer, and how many blocks a cluster has, got {r} and {cluster}")

    def lower(b, r, _):
        block, blocks = (b.udiv(b.special(name), b.u32(cluster)) for name in ("ctaid.x", "nctaid.x"))
        r = b.u32(r)
        back = b.sub(b.sub(blocks, b.u32(1)), block)
        return b.add(b.mul(r, blocks), b.select(b.trunc(r, i1), back, block))

    return types.int32, lower


@inlined
def rasterize(index, rows, cols, height):
    """(row, col) of tile number `index` of a grid of rows x cols tiles, taken in groups of `height` rows (the last may have
    fewer), each group column by column. Tiles that are worked on at once then lie in few rows *and* few columns, so that what
    a product reads for them comes from the L2 cache; height 1 is row by row."""
    group, inside = divmod(index, height * cols)
    col, row = divmod(inside, min(height, rows - height * group))
    return height * group + row, col
