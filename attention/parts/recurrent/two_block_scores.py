"""The scores of a chunk as two blocks of 32 tokens with a reference r each, by wgmma (delta_channel_inverse_hopper.py). r is
the middle of a block's sums b, in powers of 2 an even integer. With c = b - r

    Q^ = exp(c) q        K^ = exp(c) k        K* = exp(-c) k        P_ij = Q^_i . (exp(r_i - r_j) K*_j)

and the scores of keys with keys likewise, from K^. A token and channel take two exponentials. Within a block there is no factor
between references, and the first block's K* are stored once more, decayed to the second block's reference: by a power of 2,
which rounds nothing. This factor may exceed the dtype's range, so they are multiplied by its square root twice. What goes
through states follows by a factor for each channel,

    q~ = exp(r) Q^        k^ = exp(r) K^        k~ = exp(b_last - r) K*

Q^, K^ and K* are q', k' and k* of channel_decay.py with the reference of a block; q~ and k^ are q' and k' where r is 0, and k~
is k* where r is b_last.

A chunk that is not strong is mild: the dtype holds its decay, and its references are 0, so that q~ and k^ are Q^ and K^, and
there is nothing to rescale. Where a block decays by more than the dtype holds, a chunk is halved (anchored_scores.py).

A warp has a quarter of the channels of all tokens. Its tiles are channels by tokens, so that references are numbers of a
lane."""

from typing import Any, NamedTuple

from numba import cuda

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
    turned,
    viewed,
    warpgroup,
)
from tiles import bf16, fp16, fp32, inlined, rt, st, static

from .channel_decay import WarpChannels
from .gates import LOG2_E
from .tokens import CHUNK

BLOCK = CHUNK // 2  # tokens with one reference
PANEL_CHANNELS = 64  # that lie side by side in the tile of K*, the `block_keys` of channel_decay.py; others are in rows below
MIN_LOG2_DECAY = {bf16: -104.0, fp16: -11.0}  # see TwoBlockScores.min_log2_decay


class BlockReferences(NamedTuple):
    """The references of a chunk's channels, in powers of 2: of both blocks, and of k~; b of the last token; is the chunk
    halved, and is it mild?"""

    first: Any
    second: Any
    end: Any
    last: Any
    halved: Any
    mild: Any


class ScoreTiles(NamedTuple):
    """Shared tiles of a chunk.

    queries, keys: q and k, which q~ and k~ overwrite. decayed_keys: k^.
    reads: what a token reads with: Q^ beside K^, unless the chunk is mild.
    writes: what it is read by: K*, the second PANEL_CHANNELS channels in rows below the first.
    far_writes: K* of the first block at the second one's reference."""

    queries: Any
    keys: Any
    decayed_keys: Any
    reads: Any
    writes: Any
    far_writes: Any


@static
class TwoBlockScores(WarpChannels):
    """The scores of a chunk that is not halved."""

    step = BLOCK  # tokens that a warp decays at once

    @property
    def min_log2_decay(self):
        """What b - r may be, in powers of 2."""
        return MIN_LOG2_DECAY[self.dtype]

    @property
    def channel_tile(self):
        """A register tile of a warp's channels and the tokens of a step."""
        return rt(self.warp_tile.cols, self.step, fp32)

    @property
    def reads(self):
        """The tile of Q^ beside K^, in the memory of sums."""
        return st(CHUNK, 2 * self.key_dim, self.dtype, width=self._panel)

    @property
    def far_writes(self):
        """The tile of as many rows of keys as a tile of scores has room for."""
        return st(CHUNK * CHUNK // self.key_dim, self.key_dim, self.dtype, width=self._panel)

    @property
    def _panel(self):
        return self.warp_tile.cols * self.dtype.itemsize

    @inlined
    def open_far_writes(self, square):
        """The tile of K* of the first block at the second one's reference, in the memory of a tile of scores."""
        return subtile(viewed(square, self.far_writes), BLOCK, 0)

    @inlined
    def load_sums(self, sums, block, warp):
        """b of a block in powers of 2."""
        channels = self.warp_tile.cols
        part = subtile(sums, BLOCK, block, channels, warp)
        return turned(load(part, rt(BLOCK, channels, fp32, "col"), fenced=False)) * LOG2_E

    @inlined
    def find_references(self, b_0, b_1):
        """The BlockReferences of a chunk, on which the warps vote."""
        first_0, last_0, first_1, last = column(b_0, 0), column(b_0, BLOCK - 1), column(b_1, 0), column(b_1, BLOCK - 1)
        halved = warpgroup.reduce_any(tile_any(less(minimum(last_0 - first_0, last - first_1), 2 * self.min_log2_decay)))
        mild = self.is_mild(last)
        factor = 0.0 if mild else 0.25  # r is the middle, rounded down to an even integer
        r_0, r_1 = (first_0 + last_0) * factor // 1 * 2.0, (first_1 + last) * factor // 1 * 2.0
        return BlockReferences(r_0, r_1, self.end_reference(last), last, halved, mild)

    @inlined
    def is_mild(self, last):
        """Is a chunk mild, from b of its last token? The warps vote."""
        return not warpgroup.reduce_any(tile_any(less(last, self.min_log2_decay)))

    @inlined
    def end_reference(self, last):
        """The reference of k~, from b of the last token."""
        return last

    @inlined
    def factor(self, tiles, sums, references, warp):
        """Write all of the ScoreTiles. sums: b of both blocks."""
        (b_0, b_1), (r_0, r_1, end, _, _, mild) = sums, references
        keys = self.factor_block(tiles, b_0, r_0, end, mild, 0, warp)
        if not mild:
            root = self.dtype(ones(self.channel_tile) * exp2((r_1 - r_0) * 0.5))
            keys = keys * root * root
        self.store(tiles.far_writes, keys, 0, warp)
        self.factor_block(tiles, b_1, r_1, end, mild, 1, warp)

    @inlined
    def factor_block(self, tiles, b, r, end, mild, block, warp):
        """Write a block's tokens to all tiles but the last. Returns their K*."""
        c, read_queries, read_keys = b - r, self.read_part(tiles.reads, 0), self.read_part(tiles.reads, 1)
        query, key, decay = self.load(tiles.queries, block, warp), self.load(tiles.keys, block, warp), exp2(c)
        query, read_key, key = self.dtype(query * decay), self.dtype(key * decay), key * exp2(-c)
        if mild:
            self.store(tiles.queries, query, block, warp)
            self.store(tiles.decayed_keys, read_key, block, warp)
        else:
            to_start = exp2(r)
            self.store(read_queries, query, block, warp)
            self.store(read_keys, read_key, block, warp)
            self.store(tiles.queries, self.rescale(query, to_start), block, warp)
            self.store(tiles.decayed_keys, self.rescale(read_key, to_start), block, warp)
        rounded = self.dtype(key)
        self.store_writes(tiles.writes, rounded, block, warp)
        self.store(tiles.keys, self.decay_to_end(key, rounded, exp2(end - r)), block, warp)
        return rounded

    @inlined
    def read_part(self, reads, index):
        """Q^ (index 0) or K^ (1)."""
        return subtile(reads, CHUNK, 0, self.key_dim, index)

    @inlined
    def decay_to_end(self, key, rounded, decay):
        """k~ from K*, exact and rounded."""
        return self.dtype(key * decay)

    @inlined
    def load(self, tile, i, warp):
        """The tokens of the i-th step of a shared tile, in float32."""
        channels = self.warp_tile.cols
        part = subtile(tile, self.step, i, channels, warp)
        return fp32(turned(load(part, rt(self.step, channels, self.dtype, "col"), fenced=False)))

    @inlined
    def store(self, tile, x, i, warp):
        """Write the i-th step's rows of a shared tile."""
        store(subtile(tile, self.step, i, self.warp_tile.cols, warp), turned(x))

    @inlined
    def store_writes(self, writes, x, i, warp):
        """Write a step's K*."""
        warps = PANEL_CHANNELS // self.warp_tile.cols
        self.store(writes, x, CHUNK // self.step * (warp // warps) + i, warp % warps)

    @inlined
    def rescale(self, x, factor):
        """x times a power of 2 for each channel, exactly, but for what becomes too small."""
        if self.dtype is fp16:  # which does not hold all of them
            return self.dtype(fp32(x) * factor)
        else:
            return x * self.dtype(ones(self.channel_tile) * factor)

    @inlined
    def compute(self, tiles, mild, warp):
        """(scores of queries, scores of keys) with keys, of a warp's rows. What stands above the diagonal is not for use."""
        return self.finish(self.issue(tiles, mild), warp)

    @inlined
    def issue(self, tiles, mild):
        """The products of `compute`, pending."""
        queries = tiles.queries if mild else self.read_part(tiles.reads, 0)
        keys = tiles.decayed_keys if mild else self.read_part(tiles.reads, 1)
        return self.issue_rows(queries, tiles), self.issue_rows(keys, tiles)

    @inlined
    def issue_rows(self, reads, tiles):
        """(scores within blocks, scores of the second block with the first one), of Q^ or K^, pending."""
        near = warpgroup.mm_ABt(subtile(reads, CHUNK, 0, PANEL_CHANNELS, 0), subtile(tiles.writes, CHUNK, 0))
        if self.key_dim > PANEL_CHANNELS:
            near = warpgroup.mma_ABt(near, subtile(reads, CHUNK, 0, PANEL_CHANNELS, 1), subtile(tiles.writes, CHUNK, 1))
        return near, warpgroup.mm_ABt(reads, tiles.far_writes)

    @inlined
    def finish(self, products, warp):
        """What `compute` returns, from what `issue` returns. Products are waited for in the order of their issue, which is
        another one in row_scores.py."""
        (near_p, far_p), (near_n, far_n) = products
        near_p, far_p = warpgroup.wait(near_p, newer=3), warpgroup.wait(far_p, newer=2)
        near_n, far_n = warpgroup.wait(near_n, newer=1), warpgroup.wait(far_n)
        return self.join(near_p, far_p, warp), self.join(near_n, far_n, warp)

    @inlined
    def join(self, near, far, warp):
        """The scores of a warp's rows with all keys."""
        left = columns(near, BLOCK, 0) if warp < 2 else far
        return hstack(left, columns(near, BLOCK, 1))


@static
class SteppedFactors(TwoBlockScores):
    """Factors with a reference for each 16 tokens, a step of a block, so that a block may decay by more than the dtype holds:
    row_scores.py, stepped_scores.py and query_scores.py multiply them. In bf16 sums of gates fall by no more than 16 tokens can
    hold (`max_fall`), and no chunk is halved.

    In a block of 32 tokens, what the later 16 read with is decayed on to the reference of the earlier 16, where all that they
    read is written, but for what they write themselves: no factor of queries is greater than 1 there."""

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
