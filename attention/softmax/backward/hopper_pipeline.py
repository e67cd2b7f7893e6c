"""The pipeline that Hopper's kernels for gradients share: what they have in shared memory, how the producer's warps bring tiles
of queries and send parts of dQ, which tile comes next, and in which order blocks of keys add to dQ."""

from dataclasses import dataclass

from numpy import int32

from ops import store_wait, warpgroup
from tiles import inlined, ring, shared, st

from ..sequences import BatchedLayout
from .base_config import BackwardConfig
from .dq_order import UNORDERED, Heading, Ordered, Snaking, Unordered
from .dq_parts import ByRows, parts_of

CONSUMERS, REGISTERS = 2, (24, 240)  # registers a thread of producer and consumer
FILLER, SENDER, SENDERS = 0, 1, 2  # the producer's warp that brings tiles, the first one that sends dQ, and how many do
READERS = CONSUMERS * warpgroup.WARPGROUP  # warps of the consumers


@dataclass(frozen=True)
class Config(BackwardConfig):
    """The fields that the shapes of these kernels have in common: stages of the rings of Q, dO, dS and parts of dQ, and
    `places` of a bias' tiles. rounded: dS is computed from weights that were rounded for dV, which takes fewer registers."""

    stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    dq_stages: int = 2
    places: int = 1
    rounded: bool = False
    overlaps_previous = True

    @property
    def in_order(self) -> Ordered:
        computed = self.seq_layout is BatchedLayout and not self.by_list
        rising = self.variant.monotonic and self.variant.starts_at_zero and self.variant.ends_at_last_key
        return (Snaking if computed and rising else Ordered)(1, True, SENDERS, self.stores)

    @property
    def in_any(self) -> Unordered:
        return Heading(1, True, SENDERS, True) if self.stores else UNORDERED

    @property
    def share(self) -> int:
        """How many consumers have the same keys, each some of the columns."""
        return CONSUMERS * warpgroup.ROWS // self.kv

    @property
    def learners(self) -> int:
        """How many warps of a block leave sums for the gradient of slopes."""
        return CONSUMERS * warpgroup.WARPGROUP

    @property
    def parts(self) -> ByRows:
        """How dQ is cut."""
        return parts_of(self.rows, self.kv, self.head_dim, self.dtype, CONSUMERS)


def memory(config: Config):
    """The shared memory of kernels whose consumers compute everything: rings of K, V, Q, dO, dS, parts of dQ and numbers of
    rows. `config.share` consumers have the same keys."""
    return shared(
        k=ring(config.key, 1, READERS),
        v=ring(config.value, 1, READERS),
        q=ring(config.query, config.stages, READERS),
        do=ring(config.dout, config.do_stages, READERS),
        ds=ring(st(config.rows, config.kv, config.dtype), config.ds_stages, READERS, READERS // config.share),
        dq=ring(config.parts.tile, config.dq_stages, 1, warpgroup.WARPGROUP),
        sums=ring(config.of_rows, config.stages, READERS),
        **config.brought.rings(config.places, READERS),
    )


def bringing(config: Config, ahead: bool = False):
    """What the producer's first warp does. ahead: consumers wait for one tile of queries more than there are, and for keys and
    values even if no query sees them."""
    KV, ROWS, AHEAD = config.kv, config.rows, ahead
    tiling, order, sequences, brought = config.tiling, config.order, config.sequences, config.brought

    @inlined
    def bring(arrays, rings, seq, block, kv_head, every, key, ctx, group, above):
        """Bring a block of keys and values, and all tiles of queries that see it. above: how many tiles of queries belong to
        sequences before. (Heads and tiles are counted: a division would take the producer's time, a nested loop its
        registers.)"""
        gK, gV, gQ, gDO, gSums = arrays
        k, v, q, do, sums, bias = rings
        tiles, head, place = int32(group * every.n), int32(ctx.head), order.start(every)
        at_keys = seq.batch, sequences.begins(seq.offset_k, block, KV), kv_head
        if AHEAD or tiles > 0:
            k.fill(0, gK, at_keys)
        if AHEAD:
            v.fill(0, gV, at_keys)
        for j in range(tiles):
            tile = tiling.number(every, place, key, ctx, group)
            begins = sequences.begins(seq.offset_q, tile, ROWS)
            q.fill(j, gQ, (seq.batch, begins, head))
            brought.fill(bias, j, ctx.params, (ctx.batch, head, int32(ROWS * tile), block))
            if j == 0 and not AHEAD:
                v.fill(0, gV, at_keys)
            do.fill(j, gDO, (seq.batch, begins, head))
            sums.fill(j, gSums, (seq.batch, head, int32(above + tile)))
            head, place = order.following(every, head, place)
        if AHEAD:
            q.fill(tiles, gQ, (seq.batch, 0, ctx.head))

    return bring


def sending(config: Config):
    """What the producer's other warps do."""
    PARTS, tiling, order = config.parts.count, config.tiling, config.order

    @inlined
    def send(gSum, dq, block, batch_head, every, key, ctx, group, above):
        """Send a sender's parts of dQ, each in its turn."""
        mine, of, place = int32(warpgroup.rank() - SENDER), int32(group * batch_head), order.start(every)
        for j in range(int32(group * every.n)):
            number = tiling.number(every, place, key, ctx, group)
            tile, behind = int32(above + number), order.behind(tiling, block, number, ctx, group)
            order.take(ctx.params, of, tile, mine, behind)
            for turn in range(PARTS // SENDERS):
                n = int32(PARTS * j + SENDERS * turn + mine)
                order.add(gSum, (of, int32(PARTS * tile + SENDERS * turn + mine)), dq.wait(n), behind)
                store_wait()
                dq.release(n)
            order.give(ctx.params, of, tile, mine, behind)
            of, place = order.following(every, of, place)

    return send


def going(config: Config):
    """How a consumer goes from one tile of queries to the next, if the tiles that see a block stand in a row."""
    ROWS, variant, order = config.rows, config.variant, config.order

    @inlined
    def following(i, every, here):
        """(the number of the tile behind the i-th tile of a head, its At); behind the last tile comes the first of the next
        head."""
        i = int32(i + 1)
        if i == every.n:
            i, here = int32(0), here._replace(head=int32(here.head + 1))
            here = here._replace(precomputed=variant.precompute(here))
        return i, here._replace(row=int32(ROWS * (every.first + order.nth(every.n, i))))

    return following
