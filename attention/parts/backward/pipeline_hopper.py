"""The pipeline that the main kernels of backward for Hopper share: their shared memory, the producer's warps that load tiles
and that add parts of dQ, the next query tile of a consumer, and the order of dQ's sums."""

from dataclasses import dataclass

from numpy import int32

from ops import store_wait, warpgroup
from tiles import inlined, ring, shared, st

from ..sequences import BatchedLayout
from .config import BackwardConfig
from .dq_order import UNORDERED, AscendingAdds, LastBlockStores, SnakeAdds, UnorderedAdds
from .dq_parts import RowParts, parts_of

CONSUMERS, REGISTERS = 2, (24, 240)  # consumer warpgroups; registers of each thread of the producer, of a consumer
LOAD_WARP = 0  # the producer's warp that loads tiles
FIRST_DQ_WARP, DQ_WARPS = 1, 2  # the first of the producer's warps that add parts of dQ, and how many there are
CONSUMER_WARPS = CONSUMERS * warpgroup.WARPGROUP


@dataclass(frozen=True)
class Config(BackwardConfig):
    """The fields that the configurations of these kernels have in common: the stages of the rings of Q, dO, dS, parts of dQ and
    bias tiles. rounded_p: is dS computed from P as rounded for dV, which takes fewer registers?"""

    stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    dq_stages: int = 2
    bias_stages: int = 1
    rounded_p: bool = False
    overlaps_previous = True

    @property
    def threads(self) -> int:
        """The number of threads of a thread block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def ordered_adds(self) -> AscendingAdds:
        fixed_lengths = self.seq_layout is BatchedLayout and not self.by_list
        causal = self.variant.monotonic and self.variant.starts_at_zero and self.variant.ends_at_last_key
        return (SnakeAdds if fixed_lengths and causal else AscendingAdds)(1, True, DQ_WARPS, self.stores_first)

    @property
    def unordered_adds(self) -> UnorderedAdds:
        return LastBlockStores(1, True, DQ_WARPS, True) if self.stores_first else UNORDERED

    @property
    def consumers_per_key(self) -> int:
        """The number of consumers that have the same keys, each some of the columns of dK and dV."""
        return CONSUMERS * warpgroup.ROWS // self.kv

    @property
    def slope_warps(self) -> int:
        """The number of warps of a thread block that each store a row of sums for the gradient of slopes."""
        return CONSUMERS * warpgroup.WARPGROUP

    @property
    def parts(self) -> RowParts:
        """The parts in which dQ is computed and added."""
        return parts_of(self.rows, self.kv, self.head_dim, self.dtype, CONSUMERS)


def memory(config: Config):
    """The shared memory of kernels whose consumers compute everything: rings of K, V, Q, dO, dS, parts of dQ, and lse and
    delta."""
    ds_writers = CONSUMER_WARPS // config.consumers_per_key
    return shared(
        k=ring(config.key, 1, CONSUMER_WARPS),
        v=ring(config.value, 1, CONSUMER_WARPS),
        q=ring(config.query, config.stages, CONSUMER_WARPS),
        do=ring(config.dout, config.do_stages, CONSUMER_WARPS),
        ds=ring(st(config.rows, config.kv, config.dtype), config.ds_stages, CONSUMER_WARPS, ds_writers),
        dq=ring(config.parts.part_tile, config.dq_stages, 1, warpgroup.WARPGROUP),
        lse_delta=ring(config.lse_delta, config.stages, CONSUMER_WARPS),
        **config.bias_tiles.rings(config.bias_stages, CONSUMER_WARPS),
    )


def make_load(config: Config, extra_tile: bool = False):
    """The device function of the producer's LOAD_WARP. extra_tile: do consumers wait for one query tile more than there are,
    and for keys and values that no query sees?"""
    KV, ROWS, EXTRA_TILE = config.kv, config.rows, extra_tile
    tiling, order, sequences, bias_tiles = config.tiling, config.order, config.sequences, config.bias_tiles

    @inlined
    def load_tiles(arrays, rings, seq, block, kv_head, q_tiles, key, ctx, group, tiles_before):
        """Load a block of K and V, and the tiles of Q, dO, lse, delta and bias that see it, for `group` query heads.
        tiles_before: the number of query tiles of earlier sequences. (Counters of heads and tiles replace a division, which
        would take the producer's time, and a nested loop, which would take its registers.)"""
        gK, gV, gQ, gDO, gLseDelta = arrays
        k, v, q, do, lse_delta, bias = rings
        tiles, head, place = int32(group * q_tiles.n), int32(ctx.head), order.first_visited(q_tiles)
        at_keys = seq.batch, sequences.tma_offset(seq.offset_k, block, KV), kv_head
        if EXTRA_TILE or tiles > 0:
            k.fill(0, gK, at_keys)
        if EXTRA_TILE:
            v.fill(0, gV, at_keys)
        for j in range(tiles):
            tile = tiling.tile_at(q_tiles, place, key, ctx, group)
            begins = sequences.tma_offset(seq.offset_q, tile, ROWS)
            q.fill(j, gQ, (seq.batch, begins, head))
            bias_tiles.fill(bias, j, ctx.params, (ctx.batch, head, int32(ROWS * tile), block))
            if j == 0 and not EXTRA_TILE:
                v.fill(0, gV, at_keys)
            do.fill(j, gDO, (seq.batch, begins, head))
            lse_delta.fill(j, gLseDelta, (seq.batch, head, int32(tiles_before + tile)))
            head, place = order.next_tile(q_tiles, head, place)
        if EXTRA_TILE:
            q.fill(tiles, gQ, (seq.batch, 0, ctx.head))

    return load_tiles


def make_add_dq(config: Config):
    """The device function of the producer's DQ_WARPS."""
    PARTS, tiling, order = config.parts.count, config.tiling, config.order

    @inlined
    def add_dq(gDQAccum, dq_ring, block, batch_group, q_tiles, key, ctx, group, tiles_before):
        """Add this warp's parts of dQ of all query tiles to the sums in global memory, in the order of dq_order.py.
        batch_group: the index of the batch and head group."""
        warp, batch_head = int32(warpgroup.rank() - FIRST_DQ_WARP), int32(group * batch_group)
        place = order.first_visited(q_tiles)
        for j in range(int32(group * q_tiles.n)):
            index = tiling.tile_at(q_tiles, place, key, ctx, group)
            tile, prior = int32(tiles_before + index), order.prior_adds(tiling, block, index, ctx, group)
            order.wait(ctx.params, batch_head, tile, warp, prior)
            for i in range(PARTS // DQ_WARPS):
                n = int32(PARTS * j + DQ_WARPS * i + warp)
                order.add(gDQAccum, (batch_head, int32(PARTS * tile + DQ_WARPS * i + warp)), dq_ring.wait(n), prior)
                store_wait()
                dq_ring.release(n)
            order.arrive(ctx.params, batch_head, tile, warp, prior)
            batch_head, place = order.next_tile(q_tiles, batch_head, place)

    return add_dq


def make_next_tile(config: Config):
    """The device function with which a consumer goes to the next query tile, if the tiles that see a key block are
    contiguous."""
    ROWS, variant, order = config.rows, config.variant, config.order

    @inlined
    def next_tile(i, q_tiles, ctx):
        """(i, ctx) of the query tile after the i-th tile of a head, whose context is ctx. The first tile of the next head
        follows the last tile of a head."""
        i = int32(i + 1)
        if i == q_tiles.n:
            i, ctx = int32(0), ctx._replace(head=int32(ctx.head + 1)).precompute(variant)
        return i, ctx._replace(row=int32(ROWS * (q_tiles.first + order.visit_index(q_tiles.n, i))))

    return next_tile
