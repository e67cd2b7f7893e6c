"""The scores of a chunk as two_block_scores.py has them, with a reference for each 16 tokens, a step of a block, so that a
block may decay by more than the dtype holds. Sums of gates in bf16 fall by no more than 16 tokens can hold (cumsum_columns),
and no chunk is halved. RowScores serve a kernel whose warps score rows (kda_transform_hopper.py), SteppedScores one with few
registers (kda_hopper.py), QueryScores one that scores queries alone (gla_hopper.py)."""

from typing import Any, NamedTuple

from numba import cuda
from numpy import int32

from ops import (
    column,
    columns,
    exp2,
    hstack,
    less,
    load,
    minimum,
    ones,
    store,
    subtile,
    tile_any,
    warpgroup,
)
from tiles import fp16, fp32, inlined, rt, st, static, sv

from .tokens import CHUNK
from .two_block_scores import BLOCK, PANEL_CHANNELS, TwoBlockScores

STEPS = 4  # of a chunk, 16 tokens each


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
class SteppedFactors(TwoBlockScores):
    """Factors of 16 tokens, which have a reference each, between which b may fall as far as it will (`max_fall`). In a block of
    32 tokens, what the later 16 read with is decayed on to the reference of the earlier 16, where all that they read is
    written, but for what they write themselves: no factor of queries is greater than 1 there."""

    step = BLOCK // 2

    @inlined
    def reference(self, b):
        """The middle of the sums of 16 tokens, rounded down to an even integer."""
        return (column(b, 0) + column(b, self.step - 1)) * 0.25 // 1 * 2.0

    @inlined
    def root(self, difference):
        """A power of 2 for each channel, rounded, whose square is exp(difference)."""
        return self.dtype(ones(self.channel_tile) * exp2(difference * 0.5))

    @inlined
    def load_replaced_sums(self, sums, block, warp):
        """b of a block in powers of 2, whose place may then be written to."""
        b = self.load_sums(sums, block, warp)
        cuda.syncwarp()  # all lanes have read
        return b


class StepReferences(NamedTuple):
    """The references of a chunk's channels, in powers of 2: of each 16 tokens, and of k~; b of the last token; is the chunk
    halved or mild; are references those of 16 tokens, not of 32?"""

    steps: Any
    end: Any
    last: Any
    halved: Any
    mild: Any
    stepped: Any


@static
class RowScores(SteppedFactors):
    """The scores of a chunk of a warpgroup with many registers (kda_transform_hopper.py): what is read with lies in memory at
    the references of 16 tokens alone (ScoreTiles.reads), and a warp decays its rows on to those of blocks in registers. Where
    blocks decay by no more than the dtype holds, which is the case with models' gates, there are references of blocks alone.
    ScoreTiles has K*_0  K*_1  K*_2 at the reference of the third 16 tokens and K*_0 at its own as `writes`, K*_1  K*_3 at their
    own as `far_writes`.

    The end of a chunk is rounded, too, so that k~ is K* times a power of 2: what becomes of k~ is still to be multiplied by
    exp(last - end).

    normed: are queries and keys multiplied by inverse norms?"""

    normed: bool = False

    @property
    def roots(self):
        """The vector of the roots of exp(r) of the later 16 tokens of both blocks, over that of the earlier ones."""
        return sv(2 * self.key_dim, fp32)

    @inlined
    def find_references(self, b_0, b_1):
        """The StepReferences of a chunk, on which the warps vote."""
        first_0, last_0, first_1, last = column(b_0, 0), column(b_0, BLOCK - 1), column(b_1, 0), column(b_1, BLOCK - 1)
        too_far = tile_any(less(minimum(last_0 - first_0, last - first_1), 2 * self.min_log2_decay))
        too_far, mild = warpgroup.reduce_any(too_far), self.is_mild(last)
        stepped, factor = too_far and self.limits_sums, 0.0 if mild else 0.25
        middle_0, middle_1 = column(b_0, self.step - 1), column(b_1, self.step - 1)
        r_0 = self.middle(first_0, middle_0 if stepped else last_0, factor)
        r_2 = self.middle(first_1, middle_1 if stepped else last, factor)
        r_1 = self.middle(column(b_0, self.step), last_0, 0.25) if stepped else r_0
        r_3 = self.middle(column(b_1, self.step), last, 0.25) if stepped else r_2
        halved = too_far and not self.limits_sums
        return StepReferences((r_0, r_1, r_2, r_3), last // 1, last, halved, mild, stepped)

    @inlined
    def middle(self, first, last, factor):
        """The reference of 16 tokens, 0 if the factor is."""
        return (first + last) * factor // 1 * 2.0

    @inlined
    def factor(self, tiles, roots, norms, sums, references, warp):
        """Write all of the ScoreTiles, and `roots`. norms: the inverse norms of queries and keys (l2norm.py). sums: b of
        both blocks."""
        (b_0, b_1), (r_0, r_1, r_2, r_3), end, mild = sums, references.steps, references.end, references.mild
        if references.stepped:
            channels, later = self.warp_tile.cols, int32(warpgroup.WARPGROUP + warp)
            store(subtile(roots, channels, warp), exp2((r_1 - r_0) * 0.5))
            store(subtile(roots, channels, later), exp2((r_3 - r_2) * 0.5))
        keys = self.factor_step(tiles, norms, columns(b_0, self.step, 0), r_0, end, mild, 0, warp)
        self.store_writes(tiles.writes, keys, 3, warp)
        self.store_writes(tiles.writes, self.decay_on(keys, r_2 - r_0, mild), 0, warp)
        keys = self.factor_step(tiles, norms, columns(b_0, self.step, 1), r_1, end, mild, 1, warp)
        self.store(tiles.far_writes, keys, 0, warp)
        self.store_writes(tiles.writes, self.decay_on(keys, r_2 - r_1, mild), 1, warp)
        self.store_writes(
            tiles.writes, self.factor_step(tiles, norms, columns(b_1, self.step, 0), r_2, end, mild, 2, warp), 2, warp
        )
        self.store(
            tiles.far_writes, self.factor_step(tiles, norms, columns(b_1, self.step, 1), r_3, end, mild, 3, warp), 1, warp
        )

    @inlined
    def decay_on(self, keys, difference, mild):
        """K* at another reference."""
        if mild:
            return keys
        else:
            root = self.root(difference)
            return keys * root * root

    @inlined
    def factor_step(self, tiles, norms, b, r, end, mild, i, warp):
        """Write 16 tokens to all tiles but those of K*. Returns their K*."""
        c, read_queries, read_keys = b - r, self.read_part(tiles.reads, 0), self.read_part(tiles.reads, 1)
        query, key = self.load_normed(tiles.queries, norms, i, warp), self.load_normed(tiles.keys, norms, STEPS + i, warp)
        decay = exp2(c)
        query, read_key, key = self.dtype(query * decay), self.dtype(key * decay), self.dtype(key * exp2(-c))
        if mild:
            self.store(tiles.queries, query, i, warp)
            self.store(tiles.decayed_keys, read_key, i, warp)
        else:
            to_start = exp2(r)
            self.store(read_queries, query, i, warp)
            self.store(read_keys, read_key, i, warp)
            self.store(tiles.queries, self.rescale(query, to_start), i, warp)
            self.store(tiles.decayed_keys, self.rescale(read_key, to_start), i, warp)
        self.store(tiles.keys, self.rescale(key, exp2(end - r)), i, warp)
        return key

    @inlined
    def load_normed(self, tile, norms, i, warp):
        """16 tokens of a shared tile, multiplied by their inverse norms, the i-th 16 in `norms`."""
        x = self.load(tile, i % STEPS, warp)
        if self.normed:
            return x * load(subtile(norms, self.step, i), self.channel_tile.row_vec)
        else:
            return x

    @inlined
    def issue(self, tiles, roots, references, warp):
        """The products of queries and of keys with keys, pending."""
        mild, stepped = references.mild, references.stepped
        queries = tiles.queries if mild else self.read_part(tiles.reads, 0)
        keys = tiles.decayed_keys if mild else self.read_part(tiles.reads, 1)
        query_rows, key_rows = self.load_rows(queries, roots, stepped, warp), self.load_rows(keys, roots, stepped, warp)
        near_p, near_n = warpgroup.mm_ABt(queries, tiles.far_writes), warpgroup.mm_ABt(keys, tiles.far_writes)
        return (near_p, self.issue_rows(query_rows, tiles)), (near_n, self.issue_rows(key_rows, tiles))

    @inlined
    def load_rows(self, reads, roots, stepped, warp):
        """A warp's rows of what is read with, decayed on to the reference of their block."""
        rows = warpgroup.load(reads, rt(self.step, self.key_dim, self.dtype))
        if stepped and warp % 2 == 1:
            root = load(subtile(roots, self.key_dim, warp // 2), rt(self.step, self.key_dim, fp32).row_vec)
            root = self.dtype(ones(rt(self.step, self.key_dim, fp32)) * root)
            rows = rows * root * root
        return rows

    @inlined
    def issue_rows(self, rows, tiles):
        """The scores at the references of blocks, pending."""
        if self.key_dim > PANEL_CHANNELS:
            scores = warpgroup.mm_ABt(columns(rows, PANEL_CHANNELS, 0), subtile(tiles.writes, CHUNK, 0))
            return warpgroup.mma_ABt(scores, columns(rows, PANEL_CHANNELS, 1), subtile(tiles.writes, CHUNK, 1))
        else:
            return warpgroup.mm_ABt(rows, subtile(tiles.writes, CHUNK, 0))

    @inlined
    def finish(self, products, warp):
        """(scores of queries, scores of keys) with keys, of a warp's rows. What stands above the diagonal is not for use."""
        (near_p, block_p), (near_n, block_n) = products
        near_p, near_n = warpgroup.wait(near_p, newer=3), warpgroup.wait(near_n, newer=2)
        block_p, block_n = warpgroup.wait(block_p, newer=1), warpgroup.wait(block_n)
        return self.join_rows(near_p, block_p, warp), self.join_rows(near_n, block_n, warp)

    @inlined
    def join_rows(self, near, block, warp):
        """The scores of a warp's rows with all keys."""
        left = hstack(columns(block, self.step, 3), columns(near, self.step, 0)) if warp < 2 else columns(block, BLOCK, 0)
        return hstack(left, hstack(columns(block, self.step, 2), columns(near, self.step, 1)))


@static
class SteppedScores(SteppedFactors):
    """The scores of a chunk by a preparer with few registers (kda_hopper.py), which decays 16 tokens at a time. Products of 64
    rows and twice 16 and 32 columns have all scores. A warp gets those scores of keys that it inverts; its scores of queries
    are of the rows from the other end.

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


class QueryScoreTiles(NamedTuple):
    """The shared tiles of a chunk's QueryScores, of a chunk's rows each, Q_i and K*_i being those of the i-th 16 tokens.

    queries: q, then Q_0  Q_1  at the reference of the first 16 tokens, Q_2  Q_3 at that of the third, then q~.
    keys: k, then k~.
    block_writes: K*_0  K*_1  K*_2 at the reference of the third 16 tokens, and K*_0 at its own.
    near: K*_1  Q_1  K*_3  Q_3, each at its own reference; their place may be that of b from the second block on.
    to_start: the shared vector exp(r) of both blocks."""

    queries: Any
    keys: Any
    block_writes: Any
    near: Any
    to_start: Any


@static
class QueryScores(SteppedFactors):
    """The scores of a chunk's queries: a preparer decays tokens, and a scorer multiplies them (gla_hopper.py). One product of
    64 rows and columns has what is read at the references of blocks, two of 16 columns what 16 tokens read of themselves. Then
    the scorer decays queries to the start of the chunk."""

    @property
    def to_start(self):
        """The vector exp(r) of both blocks."""
        return sv(2 * self.key_dim, fp32)

    @inlined
    def factor(self, tiles, sums, warp):
        """Write all of the QueryScoreTiles, but for q~. sums: the tile of b."""
        b = self.load_replaced_sums(sums, 1, warp)
        b_2, b_3, end = columns(b, self.step, 0), columns(b, self.step, 1), column(b, BLOCK - 1)
        r_2 = self.reference(b_2)
        self.store(tiles.block_writes, self.factor_earlier(tiles, b_2, r_2, end, 2, warp), 2, warp)
        self.factor_later(tiles, b_3, r_2, end, 3, warp)
        b = self.load_sums(sums, 0, warp)
        b_0, b_1 = columns(b, self.step, 0), columns(b, self.step, 1)
        r_0 = self.reference(b_0)
        self.store_to_start(tiles, r_0, 0, warp)
        self.store_to_start(tiles, r_2, 1, warp)
        key, root = self.factor_earlier(tiles, b_0, r_0, end, 0, warp), self.root(r_2 - r_0)
        self.store(tiles.block_writes, key, 3, warp)
        self.store(tiles.block_writes, key * root * root, 0, warp)
        key, r_1 = self.factor_later(tiles, b_1, r_0, end, 1, warp)
        root = self.root(r_2 - r_1)
        self.store(tiles.block_writes, key * root * root, 1, warp)

    @inlined
    def store_to_start(self, tiles, r, block, warp):
        """Write exp(r) of a block."""
        channels = self.warp_tile.cols
        store(subtile(tiles.to_start, channels, int32(block * warpgroup.WARPGROUP + warp)), exp2(r))

    @inlined
    def factor_earlier(self, tiles, b, r, end, i, warp):
        """Write Q and k~ of the earlier 16 tokens of a block. Returns their K*. Keys are loaded when queries are done with."""
        c = b - r
        self.store(tiles.queries, self.dtype(self.load(tiles.queries, i, warp) * exp2(c)), i, warp)
        return self.factor_keys(tiles, c, end - r, i, warp)

    @inlined
    def factor_later(self, tiles, b, block_r, end, i, warp):
        """Write Q, k~ and K* of the later 16 tokens of a block, and what they read with at the reference of the earlier ones.
        Returns (K*, the reference)."""
        r = self.reference(b)
        c, root = b - r, self.root(r - block_r)
        query = self.dtype(self.load(tiles.queries, i, warp) * exp2(c))
        self.store(tiles.near, query, i, warp)
        self.store(tiles.queries, query * root * root, i, warp)
        key = self.factor_keys(tiles, c, end - r, i, warp)
        self.store(tiles.near, key, i - 1, warp)
        return key, r

    @inlined
    def factor_keys(self, tiles, c, to_end, i, warp):
        """K* of 16 tokens; writes their k~."""
        key = self.load(tiles.keys, i, warp) * exp2(-c)
        self.store(tiles.keys, self.dtype(key * exp2(to_end)), i, warp)
        return self.dtype(key)

    @inlined
    def score(self, tiles, warp):
        """A warp's rows of scores; what stands above the diagonal is not for use."""
        blocks, step = warpgroup.mm_ABt(tiles.queries, tiles.block_writes), self.step
        near_1 = warpgroup.mm_ABt(tiles.near, subtile(tiles.near, step, 0))
        near_3 = warpgroup.mm_ABt(tiles.near, subtile(tiles.near, step, 2))
        blocks, near_1, near_3 = warpgroup.wait(blocks, newer=2), warpgroup.wait(near_1, newer=1), warpgroup.wait(near_3)
        first = hstack(columns(blocks, step, 3), near_1) if warp < 2 else columns(blocks, BLOCK, 0)
        return hstack(first, hstack(columns(blocks, step, 2), near_3))

    @inlined
    def decay_to_start(self, tiles, warp):
        """Decay a warp's rows of queries to the start of the chunk: q~."""
        block, operand = warp // 2, rt(self.step, self.warp_tile.cols, self.dtype)
        for i in range(warpgroup.WARPGROUP):  # the channels of each warp
            part = self.group_part(tiles.queries, warp, i)
            decay = load(self.reference_part(tiles.to_start, block, i), self.warp_tile.row_vec)
            x = load(part, operand, fenced=False)
            if self.dtype is fp16:
                store(part, self.dtype(fp32(x) * decay))
            else:
                store(part, x * self.dtype(ones(self.warp_tile) * decay))
