"""The pipeline that Hopper's kernels for gradients share: what they have in shared memory, how the producer's warps bring tiles
of queries and send parts of dQ, which tile comes next, and in which order blocks of keys add to dQ."""

from dataclasses import dataclass

from numpy import int32

from ops import store_wait, warpgroup
from tiles import inlined, ring, shared, st

from ..sequences import Batched
from .base_config import BackwardConfig
from .dq_order import UNORDERED, AscendingAdds, LastBlockStores, SnakeAdds, UnorderedAdds
from .dq_parts import RowParts, parts_of

CONSUMERS, REGISTERS = 2, (24, 240)  # registers a thread of producer and consumer
LOAD_WARP, FIRST_DQ_WARP, DQ_WARPS = 0, 1, 2  # the producer's warp that brings tiles, the first one that sends dQ, and how many do
CONSUMER_WARPS = CONSUMERS * warpgroup.WARPGROUP  # warps of the consumers


@dataclass(frozen=True)
class Config(BackwardConfig):
    """The fields that the shapes of these kernels have in common: stages of the rings of Q, dO, dS and parts of dQ, and
    `places` of a bias' tiles. rounded: dS is computed from weights that were rounded for dV, which takes fewer registers."""

    stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    dq_stages: int = 2
    bias_stages: int = 1
    rounded_p: bool = False
    overlaps_previous = True

    @property
    def ordered_adds(self) -> AscendingAdds:
        computed = self.lie is Batched and not self.by_list
        rising = self.variant.monotonic and self.variant.starts_at_zero and self.variant.ends_at_last_key
        return (SnakeAdds if computed and rising else AscendingAdds)(1, True, DQ_WARPS, self.stores_first)

    @property
    def unordered_adds(self) -> UnorderedAdds:
        return LastBlockStores(1, True, DQ_WARPS, True) if self.stores_first else UNORDERED

    @property
    def column_splits(self) -> int:
        """How many consumers have the same keys, each some of the columns."""
        return CONSUMERS * warpgroup.ROWS // self.kv

    @property
    def slope_warps(self) -> int:
        """How many warps of a block leave sums for the gradient of slopes."""
        return CONSUMERS * warpgroup.WARPGROUP

    @property
    def parts(self) -> RowParts:
        """How dQ is cut."""
        return parts_of(self.rows, self.kv, self.head_dim, self.dtype, CONSUMERS)


def memory(config: Config):
    """The shared memory of kernels whose consumers compute everything: rings of K, V, Q, dO, dS, parts of dQ and numbers of
    rows. `config.column_splits` consumers have the same keys."""
    return shared(
        k=ring(config.key, 1, CONSUMER_WARPS),
        v=ring(config.value, 1, CONSUMER_WARPS),
        q=ring(config.query, config.stages, CONSUMER_WARPS),
        do=ring(config.dout, config.do_stages, CONSUMER_WARPS),
        ds=ring(st(config.rows, config.kv, config.dtype), config.ds_stages, CONSUMER_WARPS, CONSUMER_WARPS // config.column_splits),
        dq=ring(config.parts.part_tile, config.dq_stages, 1, warpgroup.WARPGROUP),
        lse_delta=ring(config.lse_delta, config.stages, CONSUMER_WARPS),
        **config.brought.rings(config.bias_stages, CONSUMER_WARPS),
    )


def make_load(config: Config, ahead: bool = False):
    """What the producer's first warp does. ahead: consumers wait for one tile of queries more than there are, and for keys and
    values even if no query sees them."""
    KV, ROWS, AHEAD = config.kv, config.rows, ahead
    tiling, order, sequences, brought = config.tiling, config.order, config.sequences, config.brought

    @inlined
    def load_tiles(arrays, rings, seq, block, kv_head, q_tiles, key, ctx, group, above):
        """Bring a block of keys and values, and all tiles of queries that see it. above: how many tiles of queries belong to
        sequences before. (Heads and tiles are counted: a division would take the producer's time, a nested loop its
        registers.)"""
        gK, gV, gQ, gDO, gLseDelta = arrays
        k, v, q, do, lse_delta, bias = rings
        tiles, head, place = int32(group * q_tiles.n), int32(ctx.head), order.first_visited(q_tiles)
        at_keys = seq.batch, sequences.begins(seq.key, block, KV), kv_head
        if AHEAD or tiles > 0:
            k.fill(0, gK, at_keys)
        if AHEAD:
            v.fill(0, gV, at_keys)
        for j in range(tiles):
            tile = tiling.tile_at(q_tiles, place, key, ctx, group)
            begins = sequences.begins(seq.query, tile, ROWS)
            q.fill(j, gQ, (seq.batch, begins, head))
            brought.fill(bias, j, ctx.params, (ctx.batch, head, int32(ROWS * tile), block))
            if j == 0 and not AHEAD:
                v.fill(0, gV, at_keys)
            do.fill(j, gDO, (seq.batch, begins, head))
            lse_delta.fill(j, gLseDelta, (seq.batch, head, int32(above + tile)))
            head, place = order.next_tile(q_tiles, head, place)
        if AHEAD:
            q.fill(tiles, gQ, (seq.batch, 0, ctx.head))

    return load_tiles


def make_add_dq(config: Config):
    """What the producer's other warps do."""
    PARTS, tiling, order = config.parts.count, config.tiling, config.order

    @inlined
    def add_dq(gDQAccum, dq_ring, block, pair, q_tiles, key, ctx, group, above):
        """Send a sender's parts of dQ, each in its turn."""
        mine, of, place = int32(warpgroup.rank() - FIRST_DQ_WARP), int32(group * pair), order.first_visited(q_tiles)
        for j in range(int32(group * q_tiles.n)):
            number = tiling.tile_at(q_tiles, place, key, ctx, group)
            tile, prior = int32(above + number), order.prior_adds(tiling, block, number, ctx, group)
            order.wait(ctx.params, of, tile, mine, prior)
            for turn in range(PARTS // DQ_WARPS):
                n = int32(PARTS * j + DQ_WARPS * turn + mine)
                order.add(gDQAccum, (of, int32(PARTS * tile + DQ_WARPS * turn + mine)), dq_ring.wait(n), prior)
                store_wait()
                dq_ring.release(n)
            order.arrive(ctx.params, of, tile, mine, prior)
            of, place = order.next_tile(q_tiles, of, place)

    return add_dq


def make_next_tile(config: Config):
    """How a consumer goes from one tile of queries to the next, if the tiles that see a block stand in a row."""
    ROWS, variant, order = config.rows, config.variant, config.order

    @inlined
    def next_tile(i, q_tiles, here):
        """(the number of the tile behind the i-th tile of a head, its At); behind the last tile comes the first of the next
        head."""
        i = int32(i + 1)
        if i == q_tiles.n:
            i, here = int32(0), here._replace(head=int32(here.head + 1))
            here = here._replace(precomputed=variant.precompute(here))
        return i, here._replace(row=int32(ROWS * (q_tiles.first + order.visit_index(q_tiles.n, i))))

    return next_tile
