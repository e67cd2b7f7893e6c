"""The scores of a chunk whose channels have decays, by mma.sync, and its decayed queries and keys, which are multiplied with
the state (gla_ampere.py).

With b the cumulative sum of the chunk's gates in each channel,

    P_ij = sum_c q_ic k_jc exp(b_ic - b_jc) for j <= i        q~ = exp(b) q        k~ = exp(b_last - b) k

A block of 16 tokens has a reference r in each channel, the middle of its b, in powers of 2 an integer. A query i of block m
meets a key j of block n <= m by

    q_i . (exp(b_i - b_j) k_j) = (q_i exp(b_i - r_m) exp(r_m - r_n)) . (k_j exp(r_n - b_j))

so that a token has two exponentials. A warp has the queries of one block, which take one more factor, exp(r_m - r_(m-1)), from
each block of keys to the one before. If a channel decays in a block by more than a dtype can hold in both directions, or from
one reference to the next by more than it can hold at all, the chunk is halved: keys of earlier blocks and queries meet at the
first token of the queries' block, and within a block tokens meet at the first one of the later half of 16, 8, 4 and 2 tokens.
No factor is above 1 there, for any gates.

Each of the two warpgroups has half of the channels, its warps 16 tokens each, so that P is the sum of two tiles. Each of them
is rounded, and both are multiplied with the values."""

from numba import cuda
from numpy import float32, int32

from ops import (
    abs,
    col_index,
    equal,
    exp2,
    hstack,
    less,
    load,
    load_row,
    load_row_of_group,
    mma_ABt,
    ones,
    row_index,
    store,
    subtile,
    tile_min,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, rt, st, static, sv
from tiles.layout import WARPGROUP

from .channel_chunks import HALVES, ROWS, ChunkChannels
from .channel_decay import MIN_LOG2_DECAY, MIN_LOG2_STEP
from .tokens import CHUNK

SQUARE, SCORES = rt(ROWS, ROWS, fp32), rt(ROWS, CHUNK, fp32)  # of a warp's tokens with so many others
NARROW = 32  # bytes of a panel of a tile whose columns are taken 16 at a time


@static
class ChannelScores:
    """The queries, keys and scores of a chunk, of which each warp has 16 tokens and half of the channels."""

    channels: ChunkChannels
    dtype: dtype

    @property
    def key(self):
        """The shared tile of a chunk's queries or keys."""
        return st(CHUNK, self.channels.key_dim, self.dtype, width=min(128, self.channels.half * self.dtype.itemsize))

    @property
    def scores(self):
        """The shared tile of P: that of each half of the channels, one below the other."""
        return st(HALVES * CHUNK, CHUNK, self.dtype, width=NARROW)

    @property
    def reference_decays(self):
        """The shared vector of exp(r_m - r_(m-1)) for each block of tokens: powers of 2, which bf16 holds."""
        return sv(CHUNK // ROWS * self.channels.key_dim, bf16)

    @property
    def operand(self):
        """A warp's tokens and channels, for a product."""
        return rt(ROWS, self.channels.half, self.dtype)

    @property
    def least_decay(self):
        """log2 of the decay over a block below which its chunk is halved. A reference is rounded: hence the 2."""
        return 2 * MIN_LOG2_DECAY[self.dtype] + 2

    @property
    def least_step(self):
        """log2 of the least decay from one reference to the next."""
        return MIN_LOG2_STEP[bf16]

    @inlined
    def block_part(self, tile, block):
        """The part of a shared tile of a chunk with a block's tokens and the warp's channels."""
        return subtile(tile, ROWS, block, self.channels.half, warpgroup.id())

    @inlined
    def decays_part(self, reference_decays, block):
        """The part of that vector with a block's decays in the warp's channels."""
        return subtile(reference_decays, self.channels.half, int32(HALVES * block + warpgroup.id()))

    @inlined
    def score_part(self, scores, block):
        """The part of the shared scores with the warp's queries and a block of keys."""
        return subtile(scores, ROWS, int32(WARPGROUP * warpgroup.id() + warpgroup.rank()), ROWS, block)

    @inlined
    def load_block(self, tile, block):
        """A block of the queries or keys, in the warp's channels."""
        return fp32(load(self.block_part(tile, block), self.operand, fenced=False))

    @inlined
    def load_sums(self, sums):
        """b of the warp's tokens and channels."""
        return load(self.channels.part(sums), self.channels.rows, fenced=False)

    @inlined
    def edge_sums(self, sums, block):
        """b of the first and of the last token of a block."""
        part, row_type = self.block_part(sums, block), self.channels.rows.row_vec
        return load_row(part, row_type, 0, fenced=False), load_row(part, row_type, ROWS - 1, fenced=False)

    @inlined
    def reference(self, sums, block):
        """The reference of a block, a number for each of the warp's channels."""
        first, last = self.edge_sums(sums, block)
        return (first + last) * 0.5 // 1

    @inlined
    def is_strong(self, sums):
        """Does a channel decay in the warp's block, or from the reference before to the block's, by more than a dtype can
        hold?"""
        rank = warpgroup.rank()
        first, last = self.edge_sums(sums, rank)
        if self.dtype is fp16:  # `advance` has float32's range
            return tile_min(last - first) < self.least_decay
        else:
            step = self.reference(sums, rank) - self.reference(sums, max(rank - 1, 0))
            return tile_min(last - first) < self.least_decay or tile_min(step) < self.least_step

    @inlined
    def decay_tokens(self, queries, keys, near_keys, sums, reference_decays, halved):
        """Overwrite the warp's part of q by q~ and of k by k~. Returns its queries, decayed from their reference. near_keys:
        gets its keys, decayed to it, and reference_decays the decay from the reference before, both unless the chunk is
        halved."""
        rank, b, last = warpgroup.rank(), self.load_sums(sums), self.channels.load_last(sums)
        query, key = self.load_block(queries, rank), self.load_block(keys, rank)
        cuda.syncwarp()  # all lanes have read what they overwrite
        if halved:
            r_query, r_key = last * 0.0, last
        else:
            r_query = self.reference(sums, rank)
            r_key, before = r_query, self.reference(sums, max(rank - 1, 0))
            store(self.decays_part(reference_decays, rank), exp2(r_query - before))
        query = query * exp2(b - r_query)
        store(self.channels.part(queries), query * exp2(r_query))
        key = key * exp2(r_key - b)
        if not halved:
            store(self.channels.part(near_keys), key)
        store(self.channels.part(keys), key * exp2(last - r_key))
        return self.dtype(query)

    @inlined
    def decay_keys(self, keys, sums):
        """Overwrite the warp's part of k by k~."""
        key, b, last = self.load_block(keys, warpgroup.rank()), self.load_sums(sums), self.channels.load_last(sums)
        cuda.syncwarp()
        store(self.channels.part(keys), key * exp2(last - b))

    @inlined
    def advance(self, query, reference_decays, block):
        """Queries decayed from the reference of a block, decayed from that of the block before: by a power of 2, which rounds
        nothing."""
        decay = load(
            subtile(reference_decays, self.channels.half, int32(HALVES * block + warpgroup.id())), self.channels.rows.row_vec
        )
        if self.dtype is fp16:  # which does not hold all of them
            return self.dtype(fp32(query) * decay)
        else:
            return query * self.dtype(ones(self.channels.rows) * decay)

    @inlined
    def compute(self, query, near_keys, reference_decays):
        """The scores of a warp's queries with all keys, in the warp's channels; 0 above the diagonal. query: by
        `decay_tokens`."""
        rank, zero = warpgroup.rank(), zeros(SQUARE)
        s0, s1, s2, s3 = zero, zero, zero, zero
        if rank == 3:
            s3 = mma_ABt(s3, query, self.block_part(near_keys, 3))
            query = self.advance(query, reference_decays, 3)
        if rank >= 2:
            s2 = mma_ABt(s2, query, self.block_part(near_keys, 2))
            query = self.advance(query, reference_decays, 2)
        if rank >= 1:
            s1 = mma_ABt(s1, query, self.block_part(near_keys, 1))
            query = self.advance(query, reference_decays, 1)
        s0 = mma_ABt(s0, query, self.block_part(near_keys, 0))
        return warpgroup.causal(hstack(hstack(s0, s1), hstack(s2, s3)), 0, 0.0)

    @inlined
    def store(self, scores, s):
        """Write the warp's scores to the shared tile."""
        rows = int32(WARPGROUP * warpgroup.id() + warpgroup.rank())
        store(subtile(scores, ROWS, rows), self.dtype(s))

    @inlined
    def store_halved(self, scores, queries, keys, sums):
        """Compute and write the scores of the warp's queries in a halved chunk."""
        rank = warpgroup.rank()
        b, (anchor, _) = self.load_sums(sums), self.edge_sums(sums, rank)
        query = self.dtype(self.load_block(queries, rank) * exp2(b - anchor))
        for block in range(WARPGROUP):
            s = zeros(SQUARE)
            if block < rank:
                decay = exp2(anchor - load(self.block_part(sums, block), self.channels.rows, fenced=False))
                s = mma_ABt(s, query, self.dtype(self.load_block(keys, block) * decay))
            if block != rank:
                store(self.score_part(scores, block), self.dtype(s))
        store(self.score_part(scores, rank), self.dtype(self.near_scores(queries, keys, sums)))

    @inlined
    def near_scores(self, queries, keys, sums):
        """The scores of the warp's queries with its keys, level by level: those of groups of 8, 4 and 2 tokens take the place
        of what greater groups' anchors gave them, and last those of tokens with themselves."""
        row, col = row_index(SQUARE.col_vec), col_index(SQUARE.row_vec)
        rank, scores, size, inverse = warpgroup.rank(), zeros(SQUARE), int32(ROWS), float32(1 / ROWS)
        while size > 1:
            b, part = self.load_sums(sums), self.channels.part(sums)
            decay = exp2(0.0 - abs(b - load_row_of_group(part, self.channels.rows, size, size >> 1, fenced=False)))
            query, key = self.dtype(self.load_block(queries, rank) * decay), self.dtype(self.load_block(keys, rank) * decay)
            is_group = equal(row * inverse // 1, col * inverse // 1)
            scores = where(is_group, mma_ABt(zeros(SQUARE), query, key), scores)
            size, inverse = size >> 1, inverse * 2.0
        query, key = self.dtype(self.load_block(queries, rank)), self.dtype(self.load_block(keys, rank))
        scores = where(equal(row, col), mma_ABt(zeros(SQUARE), query, key), scores)
        return where(less(row, col), 0.0, scores)
