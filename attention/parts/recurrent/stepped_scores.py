"""The scores of a chunk with references of 16 tokens (SteppedFactors in two_block_scores.py) by a preparer with few registers,
which decays 16 tokens at a time (kda_hopper.py)."""

from typing import Any, NamedTuple

from ops import column, columns, exp2, hstack, subtile, warpgroup
from tiles import inlined, st, static

from .tokens import CHUNK
from .two_block_scores import BLOCK, PANEL_CHANNELS, SteppedFactors


class SteppedTiles(NamedTuple):
    """The shared tiles of a chunk's SteppedScores, Q_i, K_i and K*_i being those of the i-th 16 tokens. keys: k, then k~.

    queries: q, then q~.
    decayed_keys: of k^.
    block_reads: K_0  K_1  Q_1  Q_0, all at the reference of the first 16 tokens, and Q_3  Q_2  K_2  K_3 at that of the third.
    reads: Q_3  K_1  Q_1  K_3, each at its own reference.
    block_writes: K*_0  K*_1  K*_2 at the reference of the third 16 tokens, and K*_0 at its own.
    writes: K*_1  K*_3, each at its own reference."""

    queries: Any
    keys: Any
    decayed_keys: Any
    block_reads: Any
    reads: Any
    block_writes: Any
    writes: Any


@static
class SteppedScores(SteppedFactors):
    """The scores of a chunk. Products of 64 rows with twice 16 columns and twice 32 have all of them. A warp gets those scores
    of keys that it inverts; its scores of queries are of the rows from the other end.

    In float16 a chunk is halved where a block decays by more than it holds."""

    @property
    def block_reads(self):
        """The tile of what is read with at the references of blocks, in the memory of sums. Those of a block of 32 tokens
        take the place of its b."""
        return st(2 * CHUNK, self.key_dim, self.dtype, width=self._panel)

    @inlined
    def is_halved(self, sums, warp):
        """Must the chunk be halved? The warps vote."""
        if self.limits_sums:
            return False
        else:
            b_0, b_1 = self.load_sums(sums, 0, warp), self.load_sums(sums, 1, warp)
            return self.find_references(b_0, b_1).halved

    @inlined
    def factor(self, tiles, sums, warp):
        """Write all of the SteppedTiles. sums: the tile of b."""
        b = self.load_replaced_sums(sums, 1, warp)
        b_2, b_3, end = columns(b, self.step, 0), columns(b, self.step, 1), column(b, BLOCK - 1)
        r_2, r_3 = self.reference(b_2), self.reference(b_3)
        self.store_writes(tiles.block_writes, self.factor_earlier(tiles, b_2, r_2, end, 2, warp), 2, warp)
        self.store(tiles.writes, self.factor_later(tiles, b_3, r_3, r_2, end, 3, warp), 1, warp)
        b = self.load_replaced_sums(sums, 0, warp)
        b_0, b_1 = columns(b, self.step, 0), columns(b, self.step, 1)
        r_0, r_1 = self.reference(b_0), self.reference(b_1)
        keys, root = self.factor_earlier(tiles, b_0, r_0, end, 0, warp), self.root(r_2 - r_0)
        self.store_writes(tiles.block_writes, keys, 3, warp)
        self.store_writes(tiles.block_writes, keys * root * root, 0, warp)
        keys, root = self.factor_later(tiles, b_1, r_1, r_0, end, 1, warp), self.root(r_2 - r_1)
        self.store(tiles.writes, keys, 0, warp)
        self.store_writes(tiles.block_writes, keys * root * root, 1, warp)

    @inlined
    def factor_earlier(self, tiles, b, r, end, i, warp):
        """Write q~, k^, k~ and what is read with of the earlier 16 tokens of a block. Returns their K*. Keys are loaded when
        queries are done with."""
        c, to_start = b - r, exp2(r)
        query, decay = self.load(tiles.queries, i, warp), exp2(c)
        query = self.dtype(query * decay)
        self.store(tiles.block_reads, query, 3 + i, warp)
        self.store(tiles.queries, self.rescale(query, to_start), i, warp)
        key = self.load(tiles.keys, i, warp)
        read_key, key = self.dtype(key * decay), key * exp2(-c)
        self.store(tiles.block_reads, read_key, 3 * i, warp)
        self.store(tiles.decayed_keys, self.rescale(read_key, to_start), i, warp)
        self.store(tiles.keys, self.decay_to_end(key, self.dtype(key), exp2(end - r)), i, warp)
        return self.dtype(key)

    @inlined
    def factor_later(self, tiles, b, r, block_r, end, i, warp):
        """`factor_earlier` of the later 16 tokens of a block, which are read with at the reference of the earlier ones, too."""
        c, to_start, root = b - r, exp2(block_r), self.root(r - block_r)
        query, decay = self.load(tiles.queries, i, warp), exp2(c)
        query = self.dtype(query * decay)
        self.store(tiles.reads, query, 3 - i, warp)
        query = query * root * root
        self.store(tiles.block_reads, query, 1 + i, warp)
        self.store(tiles.queries, self.rescale(query, to_start), i, warp)
        key = self.load(tiles.keys, i, warp)
        read_key, key = self.dtype(key * decay), key * exp2(-c)
        self.store(tiles.reads, read_key, i, warp)
        read_key = read_key * root * root
        self.store(tiles.block_reads, read_key, 3 * i - 2, warp)
        self.store(tiles.decayed_keys, self.rescale(read_key, to_start), i, warp)
        self.store(tiles.keys, self.decay_to_end(key, self.dtype(key), exp2(end - r)), i, warp)
        return self.dtype(key)

    @inlined
    def score(self, tiles, warp):
        """(scores of queries, scores of keys) with keys. Those of queries are the warp's rows of `query_rows`, 0 where j > i;
        what stands above the diagonal of those of keys is not for use."""
        first, far = self.issue_block(tiles, 0, self.step, 3), self.issue_block(tiles, 1, BLOCK, 0)
        second, near = self.issue_block(tiles, 1, self.step, 2), warpgroup.mm_ABt(tiles.reads, tiles.writes)
        first, far = warpgroup.wait(first, newer=3), warpgroup.wait(far, newer=2)
        second, near = warpgroup.wait(second, newer=1), warpgroup.wait(near)
        near_1, near_3 = columns(near, self.step, 0), columns(near, self.step, 1)
        earlier, last = hstack(first, near_1), hstack(second, near_3)
        query_scores = hstack(far if warp < 2 else earlier, last)
        query_scores = warpgroup.causal(query_scores, CHUNK - self.step - BLOCK * warp, 0.0)
        return query_scores, hstack(earlier if warp < 2 else far, last)

    @inlined
    def issue_block(self, tiles, block, rows, i):
        """The scores of what a block reads with, with so many rows of `block_writes` from the i-th such rows on, pending."""
        writes = subtile(subtile(tiles.block_writes, CHUNK, 0), rows, i)
        scores = warpgroup.mm_ABt(subtile(tiles.block_reads, CHUNK, block, PANEL_CHANNELS, 0), writes)
        if self.key_dim > PANEL_CHANNELS:
            writes = subtile(subtile(tiles.block_writes, CHUNK, 1), rows, i)
            scores = warpgroup.mma_ABt(scores, subtile(tiles.block_reads, CHUNK, block, PANEL_CHANNELS, 1), writes)
        return scores

    @inlined
    def query_rows(self, square, warp):
        """The rows of a tile of scores that a warp has scores of queries of."""
        return subtile(square, self.step, 3 - warp)
