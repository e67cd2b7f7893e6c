"""Sums across a cluster whose blocks take a part of K each: of tiles, which one block finishes, and of vectors and numbers,
which all get.

    total = ClusterSum(BLOCKS, warps=4, tile=rt(16, 16, fp32))
    smem = shared(..., parts=total.parts, full=barrier(total.finishers))
    ...
    total.send(acc, parts, full)                      # by each of the warps: to the block that finishes its tile
    if total.is_finisher():
        acc = total.receive(acc, parts, full)         # plus the peers' parts of it

Warp w of all blocks works on the same tile of the result, and block w // finishers finishes it: all blocks get as much of that
work. What is sent goes from registers to the peer's shared memory (st.async) and counts on a barrier there.

    sums = RowSums(BLOCKS, rows=16)
    smem = shared(..., squares=sums.parts, known=barrier(4))
    ...
    sums.send(row_sum(x * x), squares, known)         # by the four warps of a warpgroup
    vector = sums.receive(squares, known)             # by any warp: the sum of all blocks'

    total = sum_over_cluster(x, parts, BLOCKS)        # of a number that all threads of a block have; parts: sv(16, fp32)

The first two once in a kernel. Before a `send` the cluster has met (barriers are ready then). Every block receives, so none is
gone while a peer still sends to it, and the cluster need not meet at the end.
"""

from numba import cuda

from tiles import fp32, inlined, rt, st, static, sv
from tiles.layout import LANES

from . import cluster, raw, warpgroup
from .elementwise.arithmetic import maximum
from .elementwise.create import zeros
from .memory.load_store import load, store
from .reductions.reduce import tile_max, tile_sum
from .shape.subtile import subtile

BAND = 16  # rows of a warp's tile
COPIES = 16  # of a number in shared memory, the elements of a vector
NUMBER = rt(BAND, COPIES, fp32).row_vec


@static
class ClusterSum:
    """The sum over the `blocks` of a cluster (1, 2, 4, 8) of the tiles that the first `warps` warps of each have: fp32 tiles of
    16 rows. `blocks` divides `warps`."""

    blocks: int
    warps: int
    tile: rt

    def __post_init__(self):
        if self.blocks < 1 or self.warps % self.blocks:
            raise ValueError(f"ClusterSum: blocks must divide the warps, got {self.blocks} and {self.warps}")
        if self.tile.rows != BAND or self.tile.dtype is not fp32:
            raise ValueError(f"ClusterSum: a warp's tile has 16 rows of fp32, got {self.tile}")

    @property
    def parts(self):
        """The shared memory for the tiles that a block receives from its peers, the next one's first; of one block, next to
        none."""
        return st(BAND * max(1, self.warps - self.finishers), self.tile.cols, fp32)

    @property
    def finishers(self):
        """Warps of a block that finish a tile: how many arrive on `full`."""
        return self.warps // self.blocks

    @property
    def nbytes(self):
        """The number of bytes that a finisher receives."""
        return (self.blocks - 1) * BAND * self.tile.cols * fp32.itemsize

    @inlined
    def warp(self):
        """Which of the block's warps this is."""
        return warpgroup.WARPGROUP * warpgroup.id() + warpgroup.rank()

    @inlined
    def is_finisher(self):
        """Does this block finish this warp's tile?"""
        return self.warp() // self.finishers == cluster.rank()

    @inlined
    def send(self, tile, parts, full):
        """Send this warp's tile to the block that finishes it, if that is another. full: barrier(finishers)."""
        finisher = self.warp() // self.finishers
        if finisher != cluster.rank():
            after = (cluster.rank() - finisher + self.blocks) % self.blocks
            place = subtile(parts, BAND, (after - 1) * self.finishers + self.warp() % self.finishers)
            cluster.store_async(cluster.map(place, finisher), tile, cluster.map(full, finisher))

    @inlined
    def receive(self, tile, parts, full):
        """tile plus the peers' tiles. By a warp whose tile this block finishes (`is_finisher`)."""
        if self.blocks > 1:
            raw.expect(full, self.nbytes)
            cluster.receive(full, 1)
        for peer in range(self.blocks - 1):
            tile = tile + load(subtile(parts, BAND, peer * self.finishers + self.warp() % self.finishers), self.tile)
        return tile


@static
class RowSums:
    """The sums along `rows` rows (16, 32, 64) whose columns are spread over the blocks of a cluster, and in each over a
    warpgroup: warp w has summed up the 16 rows of band w % bands, where warps of one band take other columns. Every block gets
    the sums, as the row_vec of products whose columns are those rows."""

    blocks: int
    rows: int

    @property
    def bands(self):
        """The number of groups of 16 rows; it divides a warpgroup's four warps."""
        return self.rows // BAND

    @property
    def parts(self):
        """The shared memory for the sums that a block receives: 16 from each warp of the cluster."""
        return sv(self.blocks * warpgroup.WARPGROUP * BAND, fp32)

    @property
    def nbytes(self):
        """Bytes that come from one of four warps of each block."""
        return self.parts.nbytes // warpgroup.WARPGROUP

    @property
    def vector(self):
        """The type of the vector that `receive` returns."""
        return rt(BAND, self.rows, fp32).row_vec

    @inlined
    def send(self, sums, parts, full):
        """Send a warp's 16 sums, a vector of either axis, to every block. full: barrier(4), one arrival for each warp."""
        raw.expect(full, self.nbytes)
        place = subtile(parts, BAND, warpgroup.WARPGROUP * cluster.rank() + warpgroup.rank())
        for peer in range(self.blocks):
            cluster.store_async(cluster.map(place, peer), sums, cluster.map(full, peer))

    @inlined
    def receive_band(self, band, parts, full):
        """The sums of a band's 16 rows alone, as the col_vec of products whose rows those are."""
        cluster.receive(full, 1)
        total = load(subtile(parts, BAND, band), rt(BAND, BAND, fp32).col_vec)
        for k in range(1, self.blocks * warpgroup.WARPGROUP // self.bands):
            total = total + load(subtile(parts, BAND, k * self.bands + band), rt(BAND, BAND, fp32).col_vec)
        return total

    @inlined
    def receive(self, parts, full):
        """The sums, as soon as all have sent theirs."""
        cluster.receive(full, 1)
        total = load(subtile(parts, self.rows, 0), self.vector)
        for k in range(1, self.blocks * warpgroup.WARPGROUP // self.bands):
            total = total + load(subtile(parts, self.rows, k), self.vector)
        return total


# ---- numbers -------------------------------------------------------------------------------------------------------
@inlined
def sum_over_cluster(x, parts, blocks):
    """The sum over the `blocks` of a cluster of a number that all threads of a block have. parts: sv(16, fp32)."""
    _bring(x, parts)
    total = x
    for distance in range(1, blocks):
        total = total + tile_sum(_load_from_peer(parts, distance, blocks)) / COPIES
    cluster.sync()
    return total


@inlined
def max_over_cluster(x, parts, blocks):
    """The greatest of the same."""
    _bring(x, parts)
    total = x
    for distance in range(1, blocks):
        total = maximum(total, tile_max(_load_from_peer(parts, distance, blocks)))
    cluster.sync()
    return total


@inlined
def _bring(x, parts):
    """Have the cluster see this block's number, as all elements of a vector."""
    if cuda.threadIdx.x < LANES:
        store(parts, zeros(NUMBER) + x)
    cluster.sync()


@inlined
def _load_from_peer(parts, distance, blocks):
    """The parts that the block so many ranks behind this one has stored."""
    return cluster.load(cluster.map(parts, (cluster.rank() + distance) % blocks), NUMBER)
