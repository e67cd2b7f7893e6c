"""The scores of a halved chunk (channel_decay.py), q_i . (exp(b_i - b_j) k_j) for j <= i, where no reference serves all
channels even of 16 tokens.

The chunk is halved recursively. Queries of a later half are scored with keys of the earlier one, both decayed to or from the
later half's first token, the anchor: exp(b_i - b_a) and exp(b_a - b_j), neither of which is greater than 1 for any gates. So
one factor, exp(-|b - b_a|), serves a token at each level, as a query or as a key. Each warp has 16 of the queries. Keys of
earlier warps come through shared memory."""

from numpy import float32, int32

from ops import (
    abs,
    col_index,
    columns,
    equal,
    exp2,
    hstack,
    less,
    load,
    load_row,
    load_row_of_group,
    mma_ABt,
    row_index,
    rows,
    store,
    subtile,
    vstack,
    warpgroup,
    where,
    zeros,
)
from ops.for_attention.triangular_inverse import store_block_parts
from tiles import fp32, inlined, rt, static

from .channel_decay import TOKEN_GROUP, WarpChannels
from .gates import LOG2_E

SQUARE = rt(TOKEN_GROUP, TOKEN_GROUP, fp32)  # the scores of so many queries and keys
HALVES, PAIRS = warpgroup.named_barrier(4), warpgroup.named_barrier(2, first=2)  # later warps wait for earlier ones' keys
BARRIERS = 3  # of a warpgroup: one of halves, two of pairs


@static
class AnchoredScores(WarpChannels):
    """The scores of a halved chunk, computed by a preparer. A kernel that scores keys with keys, too, overrides `stack_rows`
    and `round_scores`. workers: the warpgroups of a block that each score chunks of their own, the first ones; at most two, as
    there are no more named barriers."""

    workers: int = 1
    scored = TOKEN_GROUP  # rows of scores of TOKEN_GROUP tokens

    @property
    def operand(self):
        """A register tile of TOKEN_GROUP tokens and a warp's channels, for a product."""
        return rt(TOKEN_GROUP, self.warp_tile.cols, self.dtype)

    @property
    def square(self):
        """The scores of TOKEN_GROUP tokens with so many keys."""
        return rt(self.scored, TOKEN_GROUP, fp32)

    @property
    def square_pair(self):
        """The scores of TOKEN_GROUP tokens with twice as many keys."""
        return rt(self.scored, 2 * TOKEN_GROUP, fp32)

    @inlined
    def barrier_group(self):
        """The first group of this warpgroup's barriers."""
        if self.workers > 1:
            return BARRIERS * warpgroup.id()
        else:
            return 0

    @inlined
    def compute(self, queries, keys, extra, sums, far_keys, warp):
        """The scores of a chunk, 16 rows in each warp, 0 where j > i. far_keys: memory as for a chunk's keys. extra: what
        `round_scores` stores to: nothing above the diagonal."""
        self.store_far_keys(far_keys, keys, sums, warp)
        near = self.round_scores(extra, self.near_scores(queries, keys, sums, warp), warp, warp)
        nothing = self.dtype(zeros(SQUARE))
        first, second, before = nothing, nothing, nothing
        if warp >= 2:
            HALVES.sync(self.barrier_group())
            earlier = subtile(far_keys, 2 * TOKEN_GROUP, 0)
            scores = self.anchored_block(zeros(self.square_pair), queries, keys, sums, earlier, warp, 2)
            first = self.round_scores(extra, columns(scores, TOKEN_GROUP, 0), warp, 0)
            second = self.round_scores(extra, columns(scores, TOKEN_GROUP, 1), warp, 1)
        if warp % 2 == 1:
            PAIRS.sync(self.barrier_group() + warp // 2)
            earlier = subtile(far_keys, TOKEN_GROUP, 2 + warp // 2)
            scores = self.anchored_block(zeros(self.square), queries, keys, sums, earlier, warp, warp)
            before = self.round_scores(extra, scores, warp, warp - 1)
        first = near if warp == 0 else before if warp == 1 else first
        second = near if warp == 1 else second
        third = near if warp == 2 else before if warp == 3 else nothing
        return hstack(hstack(first, second), hstack(third, near if warp == 3 else nothing))

    @inlined
    def store_far_keys(self, far_keys, keys, sums, warp):
        """Write the keys that other warps' queries are scored with, decayed to their anchors: of the first two warps for the
        last two, then of warps 0 and 2 for the warp after each."""
        if warp < 2:
            self.store_anchored_keys(subtile(far_keys, TOKEN_GROUP, warp), keys, sums, warp, 2)
            HALVES.arrive(self.barrier_group())
        if warp % 2 == 0:
            self.store_anchored_keys(subtile(far_keys, TOKEN_GROUP, 2 + warp // 2), keys, sums, warp, warp + 1)
            PAIRS.arrive(self.barrier_group() + warp // 2)

    @inlined
    def store_anchored_keys(self, target, keys, sums, warp, later):
        """Write a warp's 16 keys, decayed to the first token of warp `later`."""
        for i in range(warpgroup.WARPGROUP):  # the channels of each warp
            key = self.load_rows(keys, warp, i) * self.anchored_decay(sums, warp, i, later)
            store(subtile(target, TOKEN_GROUP, 0, self.warp_tile.cols, i), key)

    @inlined
    def anchored_block(self, scores, queries, keys, sums, far_keys, warp, later):
        """Add the scores of a warp's 16 queries, decayed from the first token of warp `later`, with far keys."""
        for i in range(warpgroup.WARPGROUP):
            decay = self.anchored_decay(sums, warp, i, later)
            rows = self.stack_rows(self.load_rows(queries, warp, i) * decay, self.load_rows(keys, warp, i) * decay)
            scores = mma_ABt(scores, rows, subtile(far_keys, far_keys.rows, 0, self.warp_tile.cols, i))
        return scores

    @inlined
    def anchored_decay(self, sums, warp, i, later):
        """exp(-|b - b_a|) of a warp's 16 tokens in the channels of warp i, where a is the first token of warp `later`."""
        b = load(self.group_part(sums, warp, i), self.group_tile, fenced=False)
        anchor = load_row(self.warp_part(sums, i), self.warp_tile.row_vec, TOKEN_GROUP * later, fenced=False)
        return self.dtype(exp2(abs(b - anchor) * -LOG2_E))

    @inlined
    def near_scores(self, queries, keys, sums, warp):
        """The scores of a warp's 16 queries with its 16 keys."""
        scores = self.halved_scores(queries, keys, sums, warp)
        row, col = row_index(self.square.col_vec) % TOKEN_GROUP, col_index(self.square.row_vec)
        return where(less(row, col), 0.0, scores)

    @inlined
    def halved_scores(self, queries, keys, sums, warp):
        """`near_scores` and what stands above them. Those of groups of 8, 4 and 2 tokens take the place of those that greater
        groups' anchors gave them, and last those of tokens with themselves."""
        scores, size, inverse = zeros(self.square), int32(TOKEN_GROUP), float32(1 / TOKEN_GROUP)
        while size > 1:
            s = zeros(self.square)
            for i in range(warpgroup.WARPGROUP):
                rows = self.group_part(sums, warp, i)
                b = load(rows, self.group_tile, fenced=False)
                b = b - load_row_of_group(rows, self.group_tile, size, size >> 1, fenced=False)
                decay = self.dtype(exp2(abs(b) * -LOG2_E))
                key = self.load_rows(keys, warp, i) * decay
                s = mma_ABt(s, self.stack_rows(self.load_rows(queries, warp, i) * decay, key), key)
            row, col = row_index(self.square.col_vec) % TOKEN_GROUP, col_index(self.square.row_vec)
            scores = where(equal(row * inverse // 1, col * inverse // 1), s, scores)
            size, inverse = size >> 1, inverse * 2.0
        s = zeros(self.square)
        for i in range(warpgroup.WARPGROUP):
            key = self.load_rows(keys, warp, i)
            s = mma_ABt(s, self.stack_rows(self.load_rows(queries, warp, i), key), key)
        row, col = row_index(self.square.col_vec) % TOKEN_GROUP, col_index(self.square.row_vec)
        return where(equal(row, col), s, scores)

    @inlined
    def load_rows(self, tile, block, i):
        """The rows of the block of 16 tokens in the channels of warp i, for a product."""
        return load(self.group_part(tile, block, i), self.operand, fenced=False)

    @inlined
    def stack_rows(self, query, key):
        """The rows that are scored with keys, of the queries and the keys of 16 tokens: the queries."""
        return query

    @inlined
    def round_scores(self, extra, scores, warp, block):
        """The scores of a warp's 16 queries with a block of 16 keys, rounded."""
        return self.dtype(scores)


class KdaScores(AnchoredScores):
    """The scores of a halved chunk of KDA: those of keys with keys stand below those of queries."""

    scored = 2 * TOKEN_GROUP

    @inlined
    def stack_rows(self, query, key):
        """The queries above the keys: both are scored with keys."""
        return vstack(query, key)

    @inlined
    def round_scores(self, triangles, scores, warp, block):
        """The scores of queries, rounded. Those of keys are stored to two triangles."""
        store_block_parts(triangles, rows(scores, TOKEN_GROUP, 1), warp, block)
        return self.dtype(rows(scores, TOKEN_GROUP, 0))
