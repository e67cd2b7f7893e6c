"""The terms of the delta rule's gradients that come from pairs of tokens of a chunk, where each channel of the keys has a
decay, by blocks of 16 tokens (delta_channels.py has the equations).

Block m has two references in each channel, r_m for those of its tokens that read and s_m for those that write:

    Q^ = exp(b - r) q        K^ = exp(b - r) k        K* = exp(s - b) k

Both are the middle of its sums b if the block is gentle, i.e. factors of its decay are in range in all channels; else r is b of
its first token and s that of its last one, so that no factor exceeds 1. With r_4 = b_last, s_(-1) = 0 and U = beta E, the
accumulators start from the terms that go through states, and add the pairs, block after block,

    X = scale dO S      n = 0 .. m - 1:  X = exp(s_n - s_(n-1)) X + dP_mn K*_n                     X = exp(r_m - s_(m-1)) X
    Y = -dV S           n = 0 .. m - 1:  Y = exp(s_n - s_(n-1)) Y + G_mn K*_n                      Y = exp(r_m - s_(m-1)) Y
    W = U dS            n = 3 .. m + 1:  W = exp(r_(n+1) - r_n) W + dP_nm^T Q^_n + G_nm^T K^_n     W = exp(r_(m+1) - s_m) W

and last the pairs within the block, if it is gentle: dP_mm K*_m and so on. Then

    dQ_m = exp(b - r_m) X        dK_m = exp(b - r_m) Y + exp(s_m - b) W

The gradient of a gate is the sum of q^ X + k^ Y - k* W over its token and all later ones. Q^, K^ and K* are rounded once, so a
pair of two such tokens cancels in this sum, to the last bits of float32. A block that is not gentle is treated by recursive
halving, as delta_channel_gradients_ampere.py treats a chunk. Each warp has a block, and all blocks are the same work."""

from typing import Any, NamedTuple

from numba import cuda
from numpy import float32, int32

from ops import (
    abs,
    col_index,
    col_sum,
    equal,
    exp2,
    less,
    load,
    load_row,
    load_row_of_group,
    minimum,
    mma_AB,
    mma_AtB,
    not_equal,
    reverse_cumsum_columns,
    row_index,
    row_sum,
    store,
    subtile,
    swap_layout,
    tile_all,
    tile_any,
    transpose,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, rt, static, sv
from tiles.layout import LANES

from .channel_chunks import ROWS, UNFENCED, ChunkChannels
from .gates import FLOOR, LOG2_E
from .tokens import CHUNK

BLOCKS = CHUNK // ROWS  # one a warp
# The index of the first vector of each kind, a number a channel: the factors between the references of a block and of the one
# before, from s to s, from r to r, and from s to r; and the references themselves. Some vectors between them are not used.
STEP, READ_STEP, LAST_STEP, REFERENCES = 0, 1, 6, 11
VECTORS = 20
# log2 of the decay of a channel by a block below which the block is not gentle. From the middle of a block to that of the next
# one lie half of each and a gate, of which exp2 must not be 0: in bf16 2 ** -26 is left for the gate.
MIN_LOG2_DECAY = {bf16: -100.0, fp16: -22.0}
SQUARE = rt(ROWS, ROWS, fp32)  # scores of a block's tokens with each other
ROW, COL = SQUARE.col_vec, SQUARE.row_vec


class BlockTiles(NamedTuple):
    """Shared tiles of a chunk: queries and keys, which Q^ and K* overwrite; K^; b; factors and references; dP above G."""

    q: Any
    k: Any
    read_keys: Any
    b: Any
    vectors: Any
    w: Any


class BlockGradients(NamedTuple):
    """X, Y and W of a warp's tokens and channels."""

    dq: Any
    dk_read: Any
    dk_write: Any


@static
class BlockPairs:
    """The pairs of a chunk's tokens, of which a warpgroup has half of the channels, its warps a block each. dtype: of queries
    and keys."""

    channels: ChunkChannels
    dtype: dtype

    @property
    def vectors(self):
        """The shared vector of the factors and references."""
        return sv(VECTORS * self.channels.key_dim, fp32)

    @property
    def operand(self):
        """A block's tokens and a warpgroup's channels, for a product."""
        return rt(ROWS, self.channels.half, self.dtype)

    @property
    def min_log2_decay(self):
        """log2 of the decay of a channel by a block below which the block is not gentle."""
        return MIN_LOG2_DECAY[self.dtype]

    @inlined
    def block(self, tile, index):
        """A block's rows of a shared tile of the chunk, in the warpgroup's channels."""
        return subtile(tile, ROWS, index, self.channels.half, warpgroup.id())

    @inlined
    def load_sum(self, b, index, row):
        """b of one of a block's tokens, in powers of 2."""
        return load_row(self.block(b, index), self.channels.rows.row_vec, row, fenced=False) * LOG2_E

    @inlined
    def is_gentle(self, first, last):
        """Is a block gentle in all channels? first, last: b of its first and of its last token."""
        return tile_all(self.min_log2_decay <= last - first)

    @inlined
    def references(self, first, last):
        """(r, s) of a block, from b of its first and of its last token."""
        half = float32(0.5 if self.is_gentle(first, last) else 0.0)
        return first + (last - first) * half, last - (last - first) * half

    @inlined
    def vector(self, vectors, index):
        """One of the shared vectors, of the warpgroup's channels."""
        return subtile(vectors, self.channels.half, int32(VECTORS * warpgroup.id() + index))

    @inlined
    def load_vector(self, vectors, index):
        """Load one of the shared vectors, of the warpgroup's channels."""
        return load(self.vector(vectors, index), self.channels.rows.row_vec)

    @inlined
    def prepare(self, tiles):
        """(Is the warp's block gentle in all channels? May one of its tokens have a gate below FLOOR?) Overwrites the tokens by
        Q^ and K*, and writes K^ and vectors. Synchronise the warpgroup before other warps read them."""
        rank, b, vectors, is_later = warpgroup.rank(), tiles.b, tiles.vectors, float32(min(warpgroup.rank(), 1))
        first, last = self.load_sum(b, rank, 0), self.load_sum(b, rank, ROWS - 1)
        (r, s), previous = self.references(first, last), max(rank - 1, 0)
        previous_first, previous_last = self.load_sum(b, previous, 0), self.load_sum(b, previous, ROWS - 1)
        is_gentle = self.is_gentle(first, last)
        has_floor_gates = tile_any(less(minimum(last - first, first - previous_last * is_later), (FLOOR + 1) * LOG2_E))
        previous_r, previous_s = self.references(previous_first, previous_last)
        store(self.vector(vectors, int32(LAST_STEP + rank)), exp2(r - previous_s * is_later))
        if rank < BLOCKS - 1:
            store(self.vector(vectors, int32(STEP + rank)), exp2(s - previous_s * is_later))
        else:
            store(self.vector(vectors, READ_STEP + BLOCKS), exp2(last - r))
            store(self.vector(vectors, LAST_STEP + BLOCKS), exp2(last - s))
        if rank > 1:
            store(self.vector(vectors, int32(READ_STEP + rank)), exp2(r - previous_r))
        store(self.vector(vectors, int32(REFERENCES + 2 * rank)), r)
        store(self.vector(vectors, int32(REFERENCES + 2 * rank + 1)), s)
        sums = load(self.channels.part(b), self.channels.rows, fenced=False) * LOG2_E
        decay, query = exp2(sums - r), self.load_rows(tiles.q)
        cuda.syncwarp()  # other lanes read what this one overwrites
        store(self.channels.part(tiles.q), self.dtype(query * decay))
        key = self.load_rows(tiles.k)  # after the queries, to save registers
        cuda.syncwarp()
        store(self.channels.part(tiles.read_keys), self.dtype(key * decay))
        store(self.channels.part(tiles.k), self.dtype(key * exp2(s - sums)))
        return is_gentle, has_floor_gates

    @inlined
    def load_rows(self, tile):
        """The warp's tokens and channels of a shared tile."""
        return fp32(load(self.channels.part(tile), self.operand, fenced=False))

    @inlined
    def sum_dk_write(self, tiles, dk_write):
        """The warp's part of the carried dots: sum k dk over its tokens, in each channel, where dk comes from dS. dk_write: U
        dS."""
        s = self.load_vector(tiles.vectors, int32(REFERENCES + 2 * warpgroup.rank() + 1))
        return col_sum(self.load_rows(tiles.k) * dk_write) * exp2(self.last_sum(tiles.b) - s)

    @inlined
    def last_sum(self, b):
        """b of the chunk's last token, in powers of 2."""
        return self.load_sum(b, BLOCKS - 1, ROWS - 1)

    @inlined
    def add_pairs(self, gradients, tiles, is_gentle):
        """X, Y and W with the pairs of tokens, but for those within a block that is not gentle."""
        dq, dk_read, dk_write = gradients
        rank, dp, g = warpgroup.rank(), subtile(tiles.w, CHUNK, 0), subtile(tiles.w, CHUNK, 1)
        KEYS = rt(ROWS, self.channels.half, self.dtype, "col")
        for n in range(rank + 1):
            factor = self.load_vector(tiles.vectors, int32(LAST_STEP + n if n == rank else STEP + n))
            dq, dk_read = dq * factor, dk_read * factor
            if is_gentle or n < rank:
                keys = load(self.block(tiles.k, n), KEYS, fenced=False)
                dq = mma_AB(dq, subtile(dp, ROWS, rank, ROWS, n), keys)
                dk_read = mma_AB(dk_read, subtile(g, ROWS, rank, ROWS, n), keys)
        for i in range(BLOCKS - rank):
            n = int32(BLOCKS - 1 - i)
            dk_write = dk_write * self.load_vector(tiles.vectors, int32((LAST_STEP if n == rank else READ_STEP) + n + 1))
            if is_gentle or n > rank:
                dk_write = mma_AtB(dk_write, subtile(dp, ROWS, n, ROWS, rank), self.block(tiles.q, n))
                dk_write = mma_AtB(dk_write, subtile(g, ROWS, n, ROWS, rank), self.block(tiles.read_keys, n))
        return BlockGradients(dq, dk_read, dk_write)

    @inlined
    def dot_tokens(self, gradients, tiles):
        """q dq + k dk_read - k dk_write of the warp's tokens, in each channel."""
        r = self.load_rows(tiles.q) * gradients.dq + self.load_rows(tiles.read_keys) * gradients.dk_read
        return r - self.load_rows(tiles.k) * gradients.dk_write

    @inlined
    def finish(self, gradients, tiles):
        """(dQ, dK) of the warp's tokens."""
        rank = warpgroup.rank()
        r = self.load_vector(tiles.vectors, int32(REFERENCES + 2 * rank))
        s = self.load_vector(tiles.vectors, int32(REFERENCES + 2 * rank + 1))
        sums = load(self.channels.part(tiles.b), self.channels.rows, fenced=False) * LOG2_E
        decay = exp2(sums - r)
        return gradients.dq * decay, gradients.dk_read * decay + gradients.dk_write * exp2(s - sums)

    @inlined
    def write_gate_gradients(self, b, r, carried, has_floor_gates, gGates, at):
        """Overwrite the warpgroup's part of b, which all its warps have read, by its gates' gradients. r: each token's gradient
        of b, see `dot_tokens`. carried: each warp's part of the gradient that all gates of the chunk share. at: the warp's
        first gate in their array."""
        b_part, rank, panels = self.channels.part(b), warpgroup.rank(), self.channels.half // LANES
        store(b_part, r)
        warpgroup.sync(UNFENCED)
        if rank < panels:
            part = rt(ROWS, LANES, fp32).row_vec
            first = int32(panels * warpgroup.WARPGROUP * warpgroup.id() + rank)
            total = load(subtile(carried, LANES, first), part)
            for i in range(1, warpgroup.WARPGROUP):
                total = total + load(subtile(carried, LANES, int32(first + panels * i)), part)
            cuda.syncwarp()  # other lanes read what this one overwrites
            store(subtile(carried, LANES, first), total)
            cuda.syncwarp()
            index = int32(panels * warpgroup.id() + rank)
            reverse_cumsum_columns(subtile(b, CHUNK, 0, LANES, index), subtile(carried, LANES, first))
        warpgroup.sync(UNFENCED)
        if has_floor_gates:
            below_floor = less(load(gGates, self.channels.rows, at, 1, 3, True), FLOOR)
            store(b_part, where(below_floor, 0.0, load(b_part, self.channels.rows, fenced=False)))

    @inlined
    def add_near_pairs(self, dq, dk, r, tiles, is_gentle, gRows, at):
        """dQ, dK and r, the tokens' terms of gate gradients, with the pairs within a warp's block if it is not gentle, by
        recursive halving. gRows: the arrays of queries and keys, in which the warp's tokens are at `at`."""
        gQ, gK = gRows
        dp, part = subtile(tiles.w, CHUNK, 0), self.channels.part(tiles.b)
        row, col, inverse, size = row_index(ROW), col_index(COL), float32(1 / ROWS), int32(1 if is_gentle else ROWS)
        while size > 1:
            row_group, row_half = row * inverse // 1, row * (2.0 * inverse) // 1
            is_pair = equal(row_group, col * inverse // 1) & not_equal(row_half, col * (2.0 * inverse) // 1)
            is_later = row_half - row_group * 2.0
            for index in range(2):  # dP, G
                b = load(part, self.channels.rows, fenced=False)
                e = exp2(abs(b - load_row_of_group(part, self.channels.rows, size, size >> 1, fenced=False)) * -LOG2_E)
                queries = is_later * float32(1 - index)
                key = fp32(load(gK, self.operand, at, 1, 3, True))
                x_rows = self.dtype(where(queries, fp32(load(gQ, self.operand, at, 1, 3, True)), key) * e)
                scores = self.level_scores(subtile(tiles.w, CHUNK, index), is_pair)
                wx = mma_AB(zeros(self.channels.rows), scores, swap_layout(x_rows))
                r = r + wx * fp32(x_rows) * (is_later * 2.0 - 1.0)
                wx = wx * e
                dq, dk = dq + wx * queries, dk + wx * (1.0 - queries)
            size, inverse = size >> 1, inverse * 2.0
        if not is_gentle:
            diagonal = row_sum(where(equal(row, col), self.load_square(dp), 0.0))
            dq = dq + fp32(load(gK, self.operand, at, 1, 3, True)) * diagonal
            dk = dk + fp32(load(gQ, self.operand, at, 1, 3, True)) * diagonal
        return dq, dk, r

    @inlined
    def load_square(self, scores):
        """dP or G of the warp's tokens with each other, 0 above the diagonal."""
        rank = warpgroup.rank()
        return fp32(load(subtile(scores, ROWS, rank, ROWS, rank), rt(ROWS, ROWS, self.dtype), fenced=False))

    @inlined
    def level_scores(self, scores, is_pair):
        """dP + dP^T or G + G^T of the warp's tokens with each other, 0 but for pairs."""
        square = self.load_square(scores)
        symmetric = where(less(row_index(ROW), col_index(COL)), fp32(transpose(self.dtype(square))), square)
        return self.dtype(where(is_pair, symmetric, 0.0))
