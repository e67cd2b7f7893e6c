"""Decays of channels, factored around a reference, for gla_hopper.py and kda_hopper.py (the delta rule): the equations for a
chunk in which each channel of the keys has a decay.

With b the cumulative sum of a chunk's gates, and any reference r, one number for each channel,

    q' = q exp(b - r),  k' = k exp(b - r),  k* = k exp(r - b),  S' = exp(r) S

so that q'_i . k*_j = q_i . (exp(b_i - b_j) k_j) needs one product of matrices for all i and j, and q' S' is what the queries
read of the state S from before the chunk. What the keys add to S' is decayed by exp(b_last - r) to the end of the chunk, as S'
is. r = b_last / 2 keeps all exponents small.

A chunk is strong if a channel decays by more than a dtype can hold. q' and k' are then decayed from the start of the chunk (r =
0), k* to its end (r = b_last), and no exponent is positive. Its scores are computed block by block: blocks of 16 tokens have a
reference each (block_scores.py, two_block_scores.py). In bf16 sums fall by no more than 2^-196 from the first of these tokens
to the last, and by less to those between (`max_fall`, cumsum_columns): a low gate counts 2^-28 at least if the tokens before it
have none, and 2^-12 if all are low, which is a sixteenth of what bf16 rounds off. A float16 chunk of which a channel decays too
much for that, in 16 tokens or from one reference to the next, is halved down to single tokens (anchored_scores.py)."""

from dataclasses import replace

from ops import exp2, load, load_row, minimum, store, subtile, tile_max, tile_min, viewed, warpgroup, zeros
from ops.for_attention.triangular_inverse import TRIANGLES, store_parts
from tiles import bf16, dtype, fp16, fp32, inlined, rt, static, sv

from .gates import LOG2_E, TILE
from .tokens import CHUNK

TOKEN_GROUP = 16  # tokens that a warp decays at once: with more, registers would spill
FLAG = sv(16, fp32)  # is a chunk strong? 0: no; 1: yes; 2: and halved
FLAG_VEC = rt(16, FLAG.length, fp32).row_vec
MIN_LOG2_DECAY = {bf16: -86.0, fp16: -11.0}  # what b - r may be, in powers of 2, without q' and k* losing precision
MIN_LOG2_STEP = {bf16: -126.0, fp16: -24.0}  # log2 of the least decay from one block's reference to the next that is not 0
MAX_LOG2_FALL = {bf16: 196.0}  # how far b may fall within TOKEN_GROUP tokens, for b - r within the dtype's range


def max_fall(dtype):
    """How far sums of gates may fall within TOKEN_GROUP tokens, for chunks whose blocks have references; None if no limit would
    leave the decays what they are."""
    return MAX_LOG2_FALL[dtype] / LOG2_E if dtype in MAX_LOG2_FALL else None


@static
class WarpChannels:
    """A warp's parts of a chunk's tiles: each warp of a preparer has the channels of one panel."""

    key_dim: int
    dtype: dtype

    @property
    def warp_tile(self):
        """A register tile of 16 tokens and a warp's channels."""
        return rt(16, self.key_dim // warpgroup.WARPGROUP, fp32)

    @property
    def group_tile(self):
        """A register tile of TOKEN_GROUP tokens and a warp's channels."""
        return rt(TOKEN_GROUP, self.warp_tile.cols, fp32)

    @property
    def min_log2_decay(self):
        """The sum of a chunk's gates, in powers of 2, below which the chunk is strong."""
        return 2 * MIN_LOG2_DECAY[self.dtype]

    @property
    def per_block(self):
        """1 / the greatest decay within a block, as a sum of gates, of a chunk that is not halved. A reference is rounded."""
        return LOG2_E / -(self.min_log2_decay + 4)

    @property
    def per_step(self):
        """1 / twice the greatest decay from one block's reference to the next, as a sum of gates, of a chunk that is not
        halved."""
        return LOG2_E / (-2 * (MIN_LOG2_STEP[self.dtype] + 2))

    @property
    def limits_sums(self):
        """Do sums of gates fall no further within a block than the dtype holds (`max_fall`), so that no chunk is halved?"""
        return max_fall(self.dtype) is not None

    @inlined
    def warp_part(self, tile, warp):
        """The part of a chunk's shared tile with the channels of one warp."""
        return subtile(tile, CHUNK, 0, self.warp_tile.cols, warp)

    @inlined
    def group_part(self, tile, i, warp):
        """The part of a chunk's shared tile with the channels of one warp and the i-th TOKEN_GROUP tokens."""
        return subtile(tile, TOKEN_GROUP, i, self.warp_tile.cols, warp)

    @inlined
    def block_part(self, tile, i, warp):
        """The part of the keys that are decayed to their blocks' references, with the channels of one warp and the i-th
        TOKEN_GROUP tokens. tile: of a chunk's rows and all channels, or of twice the rows and half the channels."""
        warps_per_row = tile.cols // self.warp_tile.cols
        rows = warp // warps_per_row * (CHUNK // TOKEN_GROUP) + i
        return subtile(tile, TOKEN_GROUP, rows, self.warp_tile.cols, warp % warps_per_row)

    @inlined
    def reference_part(self, block_decays, i, warp):
        """The part of a vector of `block_decays` with the channels of one warp and the i-th block."""
        return subtile(block_decays, self.warp_tile.cols, i * warpgroup.WARPGROUP + warp)

    @inlined
    def edge_sums(self, sums, i, warp):
        """b of the first and of the last one of the i-th TOKEN_GROUP tokens, in the channels of one warp."""
        rows, row_type = self.group_part(sums, i, warp), self.warp_tile.row_vec
        return load_row(rows, row_type, 0, fenced=False), load_row(rows, row_type, TOKEN_GROUP - 1, fenced=False)

    @inlined
    def load_last_sums(self, sums, warp):
        """b_last of the warp's channels, in powers of 2."""
        return load_row(self.warp_part(sums, warp), self.warp_tile.row_vec, CHUNK - 1, fenced=False) * LOG2_E


@static
class ChannelDecay(WarpChannels):
    """The decays of a chunk's channels. A preparer calls all but the last two methods; the warpgroups that read its
    results call `is_strong` and `decay_state`."""

    consumers: int
    has_references: bool = True  # is there shared memory for references of blocks? If not, strong chunks are all halved

    @property
    def halves(self):
        """May a chunk be halved?"""
        return not (self.has_references and self.limits_sums)

    @property
    def channel_vec(self):
        """A register vector of all channels."""
        return rt(16, self.key_dim, fp32).row_vec

    @property
    def block_decays(self):
        """The vector of the roots of exp(r) of each block of TOKEN_GROUP tokens over that of the block before, or over 1."""
        return sv(CHUNK // TOKEN_GROUP * self.key_dim if self.has_references else 16, fp32)

    @inlined
    def fill(self, rings, arrays, j, n, seq, head, key_head, block):
        """Have TMA load the queries, keys, values and gates of the j-th of a sequence's n chunks, if there is one."""
        (q, k, v, g), (gQ, gK, gV, gGates) = rings, arrays
        self.fill_keys((k, v, g), (gK, gV, gGates), j, n, seq, head, key_head, block)
        if j < n:
            q.fill(j, gQ, (seq.batch, seq.chunk_start(j), key_head))

    @inlined
    def fill_scored(self, rings, arrays, j, n, seq, head, key_head):
        """Have TMA load the queries, keys and gates of the j-th of a sequence's n chunks, if there is one."""
        (q, k, _, g), (gQ, gK, _, gGates) = rings, arrays
        if j < n:
            token = seq.chunk_start(j)
            g.fill(j, gGates, (seq.batch, token, head))
            k.fill(j, gK, (seq.batch, token, key_head))
            q.fill(j, gQ, (seq.batch, token, key_head))

    @inlined
    def fill_values(self, v, gV, j, n, seq, head, block, c):
        """Have TMA load a consumer's values of the j-th of a sequence's n chunks, if there is one."""
        if j < n:
            v.fill(self.consumers * j + c, gV, (seq.batch, seq.chunk_start(j), head, self.consumers * block + c))

    @inlined
    def fill_keys(self, rings, arrays, j, n, seq, head, key_head, block):
        """Have TMA load the keys, values and gates of the j-th of a sequence's n chunks, if there is one."""
        (k, v, g), (gK, gV, gGates) = rings, arrays
        if j < n:
            token = seq.chunk_start(j)
            g.fill(j, gGates, (seq.batch, token, head))
            k.fill(j, gK, (seq.batch, token, key_head))
            for c in range(self.consumers):
                v.fill(self.consumers * j + c, gV, (seq.batch, token, head, self.consumers * block + c))

    @inlined
    def vote(self, sums, b_last, warp):
        """(Is the chunk strong? Is it halved?), on which the warps vote."""
        strong = warpgroup.reduce_any(tile_min(b_last) < self.min_log2_decay)
        halved = strong and not self.has_references
        if strong and self.has_references and not self.limits_sums:
            least = b_last * 0.0  # in units of the limits
            for i in range(CHUNK // TOKEN_GROUP):
                first, last = self.edge_sums(sums, i, warp)
                first_before, last_before = self.edge_sums(sums, max(i - 1, 0), warp)
                step = (first - first_before + last - last_before) * self.per_step
                least = minimum(minimum(least, (last - first) * self.per_block), step)
            halved = warpgroup.reduce_any(tile_min(least) < -1.0)
        return strong, halved

    @inlined
    def factor_decays(self, queries, keys, extra, blocks, sums, b_last, warp, strong, halved):
        """Overwrite q by q' and k by k*, and call `store_extra`, which may write to `extra`; in a chunk whose blocks have
        references, as `factor_block_decays` does."""
        if self.has_references:
            if strong and not halved:
                self.factor_block_decays(queries, keys, extra, blocks, sums, b_last, warp)
            else:
                self.factor_chunk_decays(queries, keys, extra, sums, b_last, warp, strong)
        else:
            self.factor_chunk_decays(queries, keys, extra, sums, b_last, warp, strong)

    @inlined
    def factor_chunk_decays(self, queries, keys, extra, sums, b_last, warp, strong):
        """`factor_decays` with one reference for all tokens. In straight code, not a loop: b of the next tokens is on its way
        from shared memory while these are decayed."""
        r_query, r_key = b_last * (0.0 if strong else 0.5), b_last * (1.0 if strong else 0.5)
        tiles, references = (queries, keys, extra), (r_query, r_key)
        b_0 = self.load_group_sums(sums, 0, warp)
        b_1 = self.load_group_sums(sums, 1, warp)
        self.factor_group(tiles, b_0, references, 0, warp, strong)
        b_2 = self.load_group_sums(sums, 2, warp)
        self.factor_group(tiles, b_1, references, 1, warp, strong)
        b_3 = self.load_group_sums(sums, 3, warp)
        self.factor_group(tiles, b_2, references, 2, warp, strong)
        self.factor_group(tiles, b_3, references, 3, warp, strong)

    @inlined
    def load_group_sums(self, sums, i, warp):
        """b of the i-th TOKEN_GROUP tokens, in powers of 2."""
        return load(self.group_part(sums, i, warp), self.group_tile, fenced=False) * LOG2_E

    @inlined
    def factor_group(self, tiles, b, references, i, warp, strong):
        """`factor_chunk_decays` of the i-th TOKEN_GROUP tokens. tiles: (queries, keys, extra). references: those of queries and
        of keys."""
        (queries, keys, extra), (r_query, r_key) = tiles, references
        key = load(self.group_part(keys, i, warp), self.group_tile, fenced=False)
        decay = exp2(b - r_query)
        query = self.store_query(self.group_part(queries, i, warp), decay)
        self.store_extra(self.group_part(extra, i, warp), query, key, decay, strong)
        store(self.group_part(keys, i, warp), key * exp2(r_key - b))

    @inlined
    def factor_block_decays(self, queries, keys, extra, blocks, sums, b_last, warp):
        """Overwrite k by k*, and q by q decayed from its block's reference r, from which BlockScores computes q'; the tile that
        `store_extra` stores is decayed in the same way. Writes to `blocks` the keys decayed to their blocks' references, and
        the root of exp(r) of each block over that of the block before.

        r is the middle of a block's sums, in powers of 2 an even integer, so that no product with the latter is rounded."""
        (block_keys, block_decays), before = blocks, b_last * 0.0
        for i in range(CHUNK // TOKEN_GROUP):
            first, last = self.edge_sums(sums, i, warp)
            r = (first + last) * (0.25 * LOG2_E) // 1 * 2.0
            store(self.reference_part(block_decays, i, warp), exp2((r - before) * 0.5))
            before = r
            b = self.load_group_sums(sums, i, warp)
            key = load(self.group_part(keys, i, warp), self.group_tile, fenced=False)
            decay = exp2(b - r)
            query = self.store_query(self.group_part(queries, i, warp), decay)
            self.store_extra(self.group_part(extra, i, warp), query, key, decay, True)
            key = key * exp2(r - b)
            store(self.block_part(block_keys, i, warp), key)
            store(self.group_part(keys, i, warp), key * exp2(b_last - r))

    @inlined
    def store_state_decay(self, state_decay, flag, b_last, warp, strong, halved):
        """Write exp(b_last - r) of a state, and `strong` and `halved`."""
        store(subtile(state_decay, self.warp_tile.cols, warp), exp2(b_last * (1.0 if strong else 0.5)))
        if warp == 0:
            store(flag, zeros(FLAG_VEC) + (2.0 if halved else 1.0 if strong else 0.0))

    @inlined
    def store_query(self, queries, decay):
        """Overwrite a group of queries by q', and return them. decay: exp(b - r)."""
        query = load(queries, self.group_tile, fenced=False) * decay
        store(queries, query)
        return query

    @inlined
    def store_extra(self, extra, query, key, decay, strong):
        """Store a further tile that a kernel needs of a group of tokens; here none. query: their q'. decay: exp(b - r)."""

    @inlined
    def is_strong(self, flag):
        """Is the chunk strong? Reads what `store_state_decay` wrote."""
        return self.load_flag(flag) > 0

    @inlined
    def load_flag(self, flag):
        """What `store_state_decay` wrote: 0; 1 if the chunk is strong; 2 if it is halved."""
        return tile_max(load(flag, FLAG_VEC))

    @inlined
    def decay_state(self, s_t, state_decay, condition):
        """The transposed state, multiplied by exp(b_last - r) if `condition`. A state is multiplied before it is read, which
        makes it S', and again after the chunk; in a strong chunk only in between."""
        if condition:
            return s_t * load(state_decay, self.channel_vec)
        else:
            return s_t


class KdaDecay(ChannelDecay):
    """The decays of KDA's chunks, of which k' is stored, too."""

    @property
    def block_keys(self):
        """The tile of keys that are decayed to their blocks' references, in the memory of two triangles."""
        return replace(TRIANGLES, dtype=self.dtype)

    @inlined
    def open_triangles(self, triangles, block_decays):
        """((high, low), blocks): the two shared triangles of a chunk's scores, and what `factor_block_decays` writes. Triangles
        are cleared, as their parts above the diagonal are loaded, if not used."""
        high, low = subtile(triangles, CHUNK, 0), subtile(triangles, CHUNK, 1)
        blocks = viewed(triangles, self.block_keys), block_decays
        store_parts(high, low, zeros(TILE))
        return (high, low), blocks

    @inlined
    def store_extra(self, decayed_keys, query, key, decay, strong):
        """Store k' = k exp(b - r)."""
        store(decayed_keys, key * decay)
