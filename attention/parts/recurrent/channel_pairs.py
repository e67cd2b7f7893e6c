"""The terms of gradients that come from pairs of tokens of a chunk, where each channel of the keys has a decay, level by level
(channel_chunks.py has the equations). A block's eight warps are two warpgroups of 16 tokens a warp, each with half of the
channels of the keys. At the first two levels a warp reads other warps' tokens from shared memory; at the others it has both
halves of each group itself. These four levels become one product if numbers hold the decay from the first to the middle and
from there to the last of a warp's tokens (add_anchored_pairs)."""

from typing import Any, NamedTuple

from numpy import float32, int32

from ops import (
    abs,
    col_index,
    equal,
    exp2,
    less,
    load,
    load_row,
    load_row_of_group,
    minimum,
    mma_AB,
    mma_ABt,
    row_index,
    row_sum,
    store,
    subtile,
    swap_layout,
    tile_min,
    transpose,
    warpgroup,
    where,
    zeros,
)
from ops import block as thread_block
from tiles import bf16, dtype, fp16, fp32, inlined, rt, static
from tiles.layout import WARPGROUP

from .channel_chunks import ROWS, UNFENCED, ChunkChannels, find_pairs
from .tokens import CHUNK

FAR = CHUNK // 2  # tokens with which a warp's tokens are paired at the first level
SQUARE, PAIRS = rt(ROWS, ROWS, fp32), rt(ROWS, FAR, fp32)  # scores of a warp's tokens with so many others
ROW, COL = SQUARE.col_vec, SQUARE.row_vec
# log2 of the least decay by half of a warp's tokens that X holds in both directions
MIN_LOG2_HALF_DECAY = {bf16: -64.0, fp16: 0.0}


class PairTiles(NamedTuple):
    """Shared tiles of a chunk: queries, keys, the sums of gates, X, W, and A as two tiles, of a half of the channels each."""

    q: Any
    k: Any
    b: Any
    x: Any
    w: Any
    a: Any


class PairGradients(NamedTuple):
    """A warp's part of dQ and dK, and r = q dq - k dk, to which pairs are added."""

    dq: Any
    dk: Any
    r: Any


@static
class ChannelPairs:
    """The pairs of a chunk's tokens. dtype: of queries and keys. with_gates: is r computed?"""

    channels: ChunkChannels
    dtype: dtype
    with_gates: bool

    @property
    def min_log2_half_decay(self):
        """log2 of the decay by half of a warp's tokens below which its pairs go level by level."""
        return MIN_LOG2_HALF_DECAY[self.dtype]

    @property
    def operand(self):
        """The type of a warp's part of queries, keys or X."""
        return rt(ROWS, self.channels.half, self.dtype)

    @inlined
    def score_tokens(self, w, values, douts, scale):
        """Write W, of which a warp has 16 rows and a warpgroup half of the columns."""
        half, rank = warpgroup.id(), warpgroup.rank()
        p = mma_ABt(zeros(PAIRS), subtile(douts, ROWS, rank), subtile(values, FAR, half))
        p_t = mma_ABt(zeros(PAIRS), subtile(values, ROWS, rank), subtile(douts, FAR, half))
        row, col = warpgroup.row_index(PAIRS.col_vec), col_index(PAIRS.row_vec) + float32(FAR * half)
        store(subtile(w, ROWS, rank, FAR, half), self.dtype(where(less(row, col), p_t, p) * scale))

    @inlined
    def load_rows(self, tile):
        """A warp's part of the queries or keys."""
        return fp32(load(self.channels.part(tile), self.operand, fenced=False))

    @inlined
    def load_sums(self, tile):
        """A warp's part of the sums of gates."""
        return load(self.channels.part(tile), self.channels.rows, fenced=False)

    @inlined
    def load_sum(self, tile, row):
        """The sums of gates up to one of a warp's tokens."""
        return load_row(self.channels.part(tile), self.channels.rows.row_vec, row, fenced=False)

    @inlined
    def decay_rows(self, tiles, e, is_later):
        """X, a warp's tokens at a level. is_later: are they in the later halves of their groups?"""
        return self.dtype(where(is_later, self.load_rows(tiles.q), self.load_rows(tiles.k)) * e)

    @inlined
    def add_level(self, gradients, wx, e, x, is_later):
        """The PairGradients with a level's W X."""
        dq, dk, r = gradients
        decayed_wx = wx * e
        dq = dq + where(is_later, decayed_wx, 0.0)
        dk = dk + where(is_later, 0.0, decayed_wx)
        if self.with_gates:
            products = wx * fp32(x)
            r = r + where(is_later, products, 0.0 - products)
        return PairGradients(dq, dk, r)

    @inlined
    def add_pairs_across_warps(self, scores_type, gradients, tiles, anchor, is_later, other_block, scale):
        """The PairGradients with the pairs of a warp's tokens and those of other warps at one level. other_block: the number of
        these, as a block of as many tokens as scores_type has columns. is_later: are the warp's tokens in the later half of
        their group? Writes A."""
        (dq, dk, r), half, rank, source = gradients, warpgroup.id(), warpgroup.rank(), tiles.k
        if is_later:
            source = tiles.q
        e = exp2(0.0 - abs(self.load_sums(tiles.b) - anchor))
        x_rows = self.dtype(self.load_rows(source) * e)
        store(self.channels.part(tiles.x), x_rows)
        thread_block.sync(UNFENCED)
        other_x = subtile(tiles.x, scores_type.cols, other_block, self.channels.half, half)
        scores = mma_ABt(zeros(scores_type), x_rows, other_x) * scale
        a_part = subtile(tiles.a, ROWS, int32(WARPGROUP * half + rank), scores_type.cols, other_block)
        store(a_part, self.dtype(where(is_later, scores, 0.0)))
        wx = mma_AB(zeros(self.channels.rows), subtile(tiles.w, ROWS, rank, scores_type.cols, other_block), other_x)
        if is_later:
            dq = dq + wx * e
        else:
            dk = dk + wx * e
        if self.with_gates:
            r = r + wx * fp32(x_rows) * float32(2 * is_later - 1)
        return PairGradients(dq, dk, r)

    @inlined
    def add_anchored_pairs(self, gradients, tiles, scores):
        """(the PairGradients, A) with all pairs within a warp's tokens at once. Queries and keys are decayed from and to the
        first token of the later half, so that factors may be above 1: e for a query and 1 / e for a key. A holds numbers that
        mean nothing where the key comes later."""
        (dq, dk, r), middle = gradients, self.load_sum(tiles.b, ROWS // 2)
        e = exp2(self.load_sums(tiles.b) - middle)
        x_q = self.dtype(self.load_rows(tiles.q) * e)
        earlier_scores = where(less(col_index(COL), row_index(ROW)), scores, 0.0)
        x_k = self.dtype(self.load_rows(tiles.k) / e)
        near = mma_ABt(zeros(SQUARE), x_q, x_k)
        wx = mma_AB(zeros(self.channels.rows), self.dtype(earlier_scores), swap_layout(x_k))
        dq = dq + wx * e
        if self.with_gates:
            r = r + wx * fp32(x_q)
        later_scores = where(less(row_index(ROW), col_index(COL)), scores, 0.0)
        wx = mma_AB(zeros(self.channels.rows), self.dtype(later_scores), swap_layout(x_q))
        dk = dk + wx / e
        if self.with_gates:
            r = r - wx * fp32(x_k)
        return PairGradients(dq, dk, r), near

    @inlined
    def is_gentle(self, sums):
        """Do numbers hold the decay by each half of a warp's tokens, in all channels?"""
        middle = self.load_sum(sums, ROWS // 2)
        least = tile_min(minimum(middle - self.load_sum(sums, 0), self.load_sum(sums, ROWS - 1) - middle))
        return least >= self.min_log2_half_decay

    @inlined
    def add_pairs_within_warp(self, gradients, tiles, is_gentle, scale):
        """The PairGradients with all pairs within a warp's tokens, and those of a token with itself. Writes A. is_gentle: the
        method's result."""
        half, rank = warpgroup.id(), warpgroup.rank()
        scores = fp32(load(subtile(tiles.w, ROWS, rank, ROWS, rank), rt(ROWS, ROWS, self.dtype), fenced=False))
        row, col, size, inverse, near = row_index(ROW), col_index(COL), int32(ROWS), float32(1 / ROWS), zeros(SQUARE)
        if is_gentle:
            gradients, near = self.add_anchored_pairs(gradients, tiles, scores)
            size = int32(1)
        while size > 1:
            is_later, is_pair = find_pairs(row, col, inverse)
            anchors = load_row_of_group(self.channels.part(tiles.b), self.channels.rows, size, size >> 1, fenced=False)
            e = exp2(0.0 - abs(self.load_sums(tiles.b) - anchors))
            x_rows = self.decay_rows(tiles, e, is_later)
            near = where(is_pair, mma_ABt(zeros(SQUARE), x_rows, x_rows), near)
            wx = mma_AB(zeros(self.channels.rows), self.dtype(where(is_pair, scores, 0.0)), swap_layout(x_rows))
            gradients = self.add_level(gradients, wx, e, x_rows, is_later)
            size, inverse = size >> 1, inverse * 2.0
        query, key = self.load_rows(tiles.q), self.load_rows(tiles.k)
        diagonal = row_sum(where(equal(row, col), scores, 0.0))
        near = where(equal(row, col), row_sum(query * key), where(less(row, col), 0.0, near))
        store(subtile(tiles.a, ROWS, int32(WARPGROUP * half + rank), ROWS, rank), self.dtype(near * scale))
        return PairGradients(gradients.dq + key * diagonal, gradients.dk + query * diagonal, gradients.r)

    @inlined
    def store_chunk_gate_gradient(self, carried, gradient):
        """Store what a warp adds to the gradients of all gates of the chunk, for each channel."""
        warp = int32(WARPGROUP * warpgroup.id() + warpgroup.rank())
        store(subtile(carried, self.channels.half, warp), gradient)

    @inlined
    def add_pairs(self, gradients, tiles, scale):
        """The PairGradients with all pairs of a warp's tokens. Writes X and A, which other warps read until the block
        synchronises."""
        rank, out, is_gentle = warpgroup.rank(), self.channels.rows, self.is_gentle(tiles.b)
        half_number = rank // 2  # the first level: 32 tokens of two other warps
        sums = subtile(tiles.b, CHUNK, 0, self.channels.half, warpgroup.id())
        anchor = load_row(sums, out.row_vec, FAR, fenced=False)
        gradients = self.add_pairs_across_warps(PAIRS, gradients, tiles, anchor, half_number, 1 - half_number, scale)
        thread_block.sync(UNFENCED)
        parity = rank - 2 * half_number  # the second one: 16 tokens of another warp
        anchor = load_row(sums, out.row_vec, int32(FAR * half_number + ROWS), fenced=False)
        gradients = self.add_pairs_across_warps(SQUARE, gradients, tiles, anchor, parity, int32(rank + 1 - 2 * parity), scale)
        return self.add_pairs_within_warp(gradients, tiles, is_gentle, scale)


class DeltaPairTiles(NamedTuple):
    """Shared tiles of a chunk: queries, keys, the sums of gates, X for dP and for G, and dP above G, as symmetric matrices."""

    q: Any
    k: Any
    b: Any
    x: Any
    keys_x: Any
    w: Any


class DeltaPairs(ChannelPairs):
    """The pairs of a chunk's tokens under the delta rule (delta_channels.py has the equations). A block's sixteen warps are
    four warpgroups, each with a quarter of the channels of the keys. At each level a warp reads X of half of the chunk's tokens
    from shared memory. r: each token's gradient of b."""

    @inlined
    def store_scores(self, w, scores, rank, other):
        """Write the scores of a warp's tokens with those of an earlier warp, or with each other, to both triangles of W."""
        transposed = transpose(scores)
        if other < rank:
            store(subtile(w, ROWS, rank, ROWS, other), scores)
            store(subtile(w, ROWS, other, ROWS, rank), transposed)
        elif other == rank:
            symmetric = where(less(row_index(ROW), col_index(COL)), fp32(transposed), fp32(scores))
            store(subtile(w, ROWS, rank, ROWS, rank), self.dtype(symmetric))

    @inlined
    def add_level(self, sums, tiles, size, inverse):
        """(dq, dk, r) with the pairs of tokens that are in different halves of groups of `size`. inverse: 1 / size. All warps
        of the block synchronise."""
        quarter, rank, rank_half = warpgroup.id(), warpgroup.rank(), warpgroup.rank() // 2
        first = int32(ROWS * rank)
        pair_side = 1 - rank_half if size == CHUNK else rank_half  # the half of the chunk with which pairs are formed
        row, col = row_index(ROW) + float32(first), col_index(PAIRS.row_vec) + float32(FAR * pair_side)
        is_later, is_pair = find_pairs(row, col, inverse)
        if size > ROWS:
            at = (first & (0 - size)) + (size >> 1)  # the first token of the later half of the warp's group
            anchor = load_row(
                subtile(tiles.b, CHUNK, 0, self.channels.half, quarter), self.channels.rows.row_vec, int32(at), fenced=False
            )
            anchors = zeros(self.channels.rows) + anchor
        else:
            part = self.channels.part(tiles.b)
            anchors = load_row_of_group(part, self.channels.rows, size, size >> 1, fenced=False)
        e = exp2(0.0 - abs(load(self.channels.part(tiles.b), self.channels.rows, fenced=False) - anchors))
        key = self.load_rows(tiles.k) * e
        x_rows = self.dtype(where(is_later, self.load_rows(tiles.q) * e, key))
        thread_block.sync(UNFENCED)  # all have read x
        store(self.channels.part(tiles.x), x_rows)
        store(self.channels.part(tiles.keys_x), self.dtype(key))
        thread_block.sync(UNFENCED)
        scores = self._load_scores(tiles.w, 0, pair_side, is_pair)
        others = subtile(tiles.x, FAR, pair_side, self.channels.half, quarter)
        sums = self._add_products(sums, mma_AB(zeros(self.channels.rows), scores, others), e, tiles.x, is_later)
        scores = self._load_scores(tiles.w, 1, pair_side, is_pair)
        others = subtile(tiles.keys_x, FAR, pair_side, self.channels.half, quarter)
        return self._add_keys_products(sums, mma_AB(zeros(self.channels.rows), scores, others), e, tiles.keys_x, is_later)

    @inlined
    def _load_scores(self, w, index, pair_side, is_pair):
        """A warp's rows of W, of dP or of G, with half of the chunk's tokens; 0 where is_pair is False."""
        rows = subtile(subtile(w, CHUNK, index), ROWS, warpgroup.rank(), FAR, pair_side)
        return self.dtype(where(is_pair, fp32(load(rows, rt(ROWS, FAR, self.dtype), fenced=False)), 0.0))

    @inlined
    def _add_products(self, sums, wx, e, x, is_later):
        """dq, dk and r with a level's products of dP. is_later: 1 or 0."""
        dq, dk, r = sums
        if self.with_gates:
            r = r + wx * self.load_rows(x) * (is_later * 2.0 - 1.0)
        later_factor = e * is_later
        return dq + wx * later_factor, dk + wx * (e - later_factor), r

    @inlined
    def _add_keys_products(self, sums, wx, e, x, is_later):
        """dk and r with a level's products of G."""
        dq, dk, r = sums
        if self.with_gates:
            r = r + wx * self.load_rows(x) * (is_later * 2.0 - 1.0)
        return dq, dk + wx * e, r

    @inlined
    def load_diagonal(self, w, rank):
        """dP of each of a warp's tokens with itself."""
        p = load(subtile(subtile(w, CHUNK, 0), ROWS, rank, ROWS, rank), rt(ROWS, ROWS, self.dtype), fenced=False)
        return row_sum(where(equal(row_index(ROW), col_index(COL)), fp32(p), 0.0))
