"""The scores of a chunk with references of 16 tokens (SteppedFactors in two_block_scores.py) by a warpgroup with many
registers, whose warps score rows (kda_transform_hopper.py). What is read with lies in memory at the references of 16 tokens
alone, and a warp decays its rows on to those of blocks in registers."""

from typing import Any, NamedTuple

from numpy import int32

from ops import column, columns, exp2, hstack, less, load, minimum, ones, store, subtile, tile_any, warpgroup
from tiles import fp32, inlined, rt, static, sv

from .tokens import CHUNK
from .two_block_scores import BLOCK, PANEL_CHANNELS, SteppedFactors

STEPS = 4  # of a chunk, 16 tokens each


class StepReferences(NamedTuple):
    """The references of a chunk's channels, in powers of 2. steps: of each 16 tokens. end: of k~. last: b of the last token.
    halved, mild: is the chunk halved, is it mild? stepped: has each 16 tokens a reference, or do 32 share one?"""

    steps: Any
    end: Any
    last: Any
    halved: Any
    mild: Any
    stepped: Any


@static
class RowScores(SteppedFactors):
    """The scores of a chunk by rows. Of its ScoreTiles, `writes` are K*_0  K*_1  K*_2 at the reference of the third 16 tokens
    and K*_0 at its own, `far_writes` K*_1  K*_3 at their own, K*_i being those of the i-th 16 tokens.

    Where blocks decay by no more than the dtype holds, which is the case with models' gates, 32 tokens share a reference.

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
