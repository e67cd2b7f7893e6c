"""Decays of channels, factored around a reference: what gla_hopper.py and kda_hopper.py (the delta rule) do to a chunk whose
channels each decay by themselves, and the configuration of their kernels.

With b the cumulative sum of a chunk's gates, and any reference r, one number for each channel,

    q' = q exp(b - r),  k' = k exp(b - r),  k* = k exp(r - b),  S' = exp(r) S

so that q'_i . k*_j = q_i . (exp(b_i - b_j) k_j) needs one product of matrices for all i and j, and q' S' is what the queries
read of the state S from before the chunk. What the keys add to S' is decayed by exp(b_last - r) to the end of the chunk, as S'
is. r = b_last / 2 keeps all exponents small.

A chunk is strong if a channel decays by more than a dtype can hold. Its scores are computed block by block, each with a
reference of its own (`anchored_scores`); q' and k' are then decayed from the start of the chunk (r = 0), k* to its end
(r = b_last), and no exponent is positive."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from numpy import int32

from ops import (
    col_index,
    cumsum_columns,
    equal,
    exp2,
    hstack,
    load,
    load_row,
    load_row_of_group,
    minimum,
    mma_ABt,
    row_index,
    store,
    subtile,
    tile_max,
    tile_min,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, rt, st, static, sv
from tiles.targets import Target

from .channel_gates import ChannelGates, channel_gates
from .gate_formulas import FORMULAS, PLAIN_BETA, BetaFormula, GateFormula
from .gates import FLOOR, LOG2_E
from .tokens import CHUNK, COLUMNS

PANEL = 128  # bytes of a row of a panel, at most: the widest swizzle
TOKEN_GROUP = 16  # tokens that a warp decays at once: of more, the registers would spill
SQUARE = rt(TOKEN_GROUP, TOKEN_GROUP, fp32)  # the scores of so many queries and keys
RAW_SIZE = 128, 2  # padded key dim and consumers of configurations with a formula
LEVELS = 4  # how often a square is halved: to single tokens
FLAG = sv(16, fp32)  # is a chunk strong? 1 or 0
FLAG_VEC = rt(16, FLAG.length, fp32).row_vec
MIN_LOG2_DECAY = {bf16: -86.0, fp16: -11.0}  # what b - r may be, in powers of 2, without q' and k* losing precision


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. consumers: warpgroups that have 64 value columns each.
    gates: the dtype of the gates; dtype: of everything else. varlen: are sequences packed (cu_seqlens)? formula, beta: what
    computes gates and beta of what is in memory; None: the gates themselves are there. l2norm: are queries and keys divided by
    their lengths? preparers: the
    warpgroups that prepare what consumers read."""

    key_dim: int
    consumers: int
    gates: dtype
    dtype: dtype
    varlen: bool = False
    formula: GateFormula | None = field(default=None, kw_only=True)
    beta: BetaFormula = field(default=PLAIN_BETA, kw_only=True)
    l2norm: bool = field(default=False, kw_only=True)
    preparers: ClassVar[int] = 1

    @property
    def channel_gates(self) -> ChannelGates:
        """The gates of a warp's channels."""
        return channel_gates(self.key_dim // warpgroup.WARPGROUP, self.formula)

    @property
    def threads(self):
        """Threads of a block: those of all consumers and preparers."""
        return warpgroup.THREADS * (self.consumers + self.preparers)

    def _panels_of_warps(self, of):
        """A shared tile with elements of this dtype, whose panels of columns each belong to one of four warps."""
        return st(CHUNK, self.key_dim, of, width=min(PANEL, self.key_dim // warpgroup.WARPGROUP * of.itemsize))

    @property
    def key(self):
        """The tile of Q or K for a chunk."""
        return self._panels_of_warps(self.dtype)

    @property
    def gate(self):
        """The tile of gates for a chunk."""
        return self._panels_of_warps(self.gates)

    @property
    def value(self):
        """A consumer's tile of V or the output for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def gate_sums(self):
        """The tile of b, the cumulative sum of a chunk's gates. If the gates are fp32, b overwrites them, and this is a small
        vector that is not used."""
        return sv(16, fp32) if self.gates is fp32 else self._panels_of_warps(fp32)

    @property
    def state_decay(self):
        """The vector exp(b_last - r), one number for each channel."""
        return sv(self.key_dim, fp32)

    def __str__(self):
        size = f"Dk {self.key_dim} {self.dtype}, {COLUMNS * self.consumers} columns, gates {self.gates}"
        return ", ".join(
            filter(None, (size, str(self.formula or ""), str(self.beta), "l2norm" * self.l2norm, "varlen" * self.varlen))
        )


def channel_space(
    config: type[Config], sizes, target: Target, everything: bool, beta: BetaFormula = PLAIN_BETA
) -> Iterator[Any]:
    """The configurations of these sizes, (padded key dim, consumers), with gates in fp32 and in the dtype of everything else.
    Without `everything`, varlen configurations come in one size only, and fp16, which takes as many registers as bf16, is left
    out. Those with a formula of gates, and this one of beta, come in one size."""
    if target.has_wgmma:
        for of, (key_dim, consumers), varlen in itertools.product(
            (bf16, fp16) if everything else (bf16,), sizes, (False, True)
        ):
            if not varlen or (key_dim, consumers) == (128, 2) or (everything and of is bf16):
                yield from (config(key_dim, consumers, gates, of, varlen) for gates in (fp32, of))
        for formula in FORMULAS:  # of x in fp32 and packed sequences, which models do not have together, up to 48 bytes spill
            yield config(*RAW_SIZE, bf16, bf16, formula=formula, beta=beta)
            yield config(*RAW_SIZE, bf16, bf16, formula=formula, beta=beta, l2norm=True)


@static
class ChannelDecay:
    """The decays of a chunk's channels. A preparer, whose warps each have some of the channels, calls `cumsum_gates`,
    `factor_decays` and `anchored_scores`; the warpgroups that read its results call `is_strong` and `decay_state`."""

    key_dim: int
    dtype: dtype
    consumers: int

    @property
    def warp_tile(self):
        """A register tile of 16 tokens and a warp's channels."""
        return rt(16, self.key_dim // warpgroup.WARPGROUP, fp32)

    @property
    def group_tile(self):
        """A register tile of TOKEN_GROUP tokens and a warp's channels."""
        return rt(TOKEN_GROUP, self.warp_tile.cols, fp32)

    @property
    def channel_vec(self):
        """A register vector of all channels."""
        return rt(16, self.key_dim, fp32).row_vec

    @property
    def min_log2_decay(self):
        """The sum of a chunk's gates, in powers of 2, below which the chunk is strong."""
        return 2 * MIN_LOG2_DECAY[self.dtype]

    @inlined
    def fill(self, rings, arrays, j, n, seq, head, key_head, block):
        """Have TMA load the queries, keys, values and gates of the j-th of a sequence's n chunks, if there is one."""
        (q, k, v, g), (gQ, gK, gV, gGates) = rings, arrays
        self.fill_keys((k, v, g), (gK, gV, gGates), j, n, seq, head, key_head, block)
        if j < n:
            q.fill(j, gQ, (seq.batch, seq.start + CHUNK * j, key_head))

    @inlined
    def fill_keys(self, rings, arrays, j, n, seq, head, key_head, block):
        """Have TMA load the keys, values and gates of the j-th of a sequence's n chunks, if there is one."""
        (k, v, g), (gK, gV, gGates) = rings, arrays
        if j < n:
            token = seq.start + CHUNK * j
            g.fill(j, gGates, (seq.batch, token, head))
            k.fill(j, gK, (seq.batch, token, key_head))
            for c in range(self.consumers):
                v.fill(self.consumers * j + c, gV, (seq.batch, token, head, self.consumers * block + c))

    @inlined
    def warp_part(self, tile, warp):
        """The part of a chunk's shared tile with the channels of one warp."""
        return subtile(tile, CHUNK, 0, self.warp_tile.cols, warp)

    @inlined
    def group_part(self, tile, i, warp):
        """The part of a chunk's shared tile with the channels of one warp and the i-th TOKEN_GROUP tokens."""
        return subtile(tile, TOKEN_GROUP, i, self.warp_tile.cols, warp)

    @inlined
    def cumsum_gates(self, sums, gates, warp):
        """Write b, the cumulative sum of a chunk's gates, to `sums`. Returns (b_last of the warp's channels, in powers of 2;
        whether the chunk is strong, on which the warps vote)."""
        b_last = self.cumsum_without_vote(sums, gates, warp)
        return b_last, warpgroup.reduce_any(tile_min(b_last) < self.min_log2_decay)

    @inlined
    def cumsum_without_vote(self, sums, gates, warp):
        """Write b to `sums`, and return b_last of the warp's channels, in powers of 2. The warps do not synchronise."""
        cumsum_columns(self.warp_part(sums, warp), self.warp_part(gates, warp), FLOOR)
        return self.load_last_sums(sums, warp)

    @inlined
    def load_last_sums(self, sums, warp):
        """b_last of the warp's channels, in powers of 2."""
        return load_row(self.warp_part(sums, warp), self.warp_tile.row_vec, CHUNK - 1) * LOG2_E

    @inlined
    def factor_decays(self, queries, keys, extra, sums, b_last, state_decay, flag, warp, strong):
        """Overwrite q by q' and k by k*, and write what `store_extra` stores to `extra`, exp(b_last - r) to `state_decay`, and
        `strong` to `flag`."""
        r_query, r_key = b_last * (0.0 if strong else 0.5), b_last * (1.0 if strong else 0.5)
        for i in range(CHUNK // TOKEN_GROUP):
            b = load(self.group_part(sums, i, warp), self.group_tile) * LOG2_E
            key = load(self.group_part(keys, i, warp), self.group_tile)
            decay = exp2(b - r_query)
            query = load(self.group_part(queries, i, warp), self.group_tile) * decay
            store(self.group_part(queries, i, warp), query)
            self.store_extra(self.group_part(extra, i, warp), query, key, decay, strong)
            store(self.group_part(keys, i, warp), key * exp2(r_key - b))
        store(subtile(state_decay, self.warp_tile.cols, warp), exp2(r_key))
        if warp == 0:
            store(flag, zeros(FLAG_VEC) + (1.0 if strong else 0.0))

    @inlined
    def store_extra(self, extra, query, key, decay, strong):
        """Store what else a kernel needs of a group of tokens. query: their q'. decay: exp(b - r)."""

    @inlined
    def anchored_scores(self, queries, keys, sums, warp, of):
        """The scores q_i . (exp(b_i - b_j) k_j) of a chunk, 16 rows i in each warp, for j <= i; 0 elsewhere. For any decays:
        each block of scores is a product whose factors, exp(b_i - b_a) and exp(b_a - b_j), have an anchor a between its keys
        and its queries, so that both are at most 1. of: the dtype of the result."""
        diagonal_square, nothing = of(self.anchored_square(queries, keys, sums, warp)), zeros(SQUARE)
        first, second, third = nothing, nothing, nothing
        if warp > 0:
            first = self.anchored_block(queries, keys, sums, warp, 0)
        first = of(first)
        if warp > 1:
            second = self.anchored_block(queries, keys, sums, warp, 1)
        second = of(second)
        if warp > 2:
            third = self.anchored_block(queries, keys, sums, warp, 2)
        left = hstack(diagonal_square if warp == 0 else first, diagonal_square if warp == 1 else second)
        return hstack(left, hstack(diagonal_square if warp == 2 else of(third), diagonal_square if warp == 3 else of(nothing)))

    @inlined
    def anchored_block(self, queries, keys, sums, warp, block):
        """The scores of a warp's 16 queries with an earlier block of 16 keys, anchored at the first query."""
        s = zeros(SQUARE)
        for i in range(warpgroup.WARPGROUP):  # the channels of each warp
            anchor = load_row(self.warp_part(sums, i), self.warp_tile.row_vec, TOKEN_GROUP * warp)
            query = self.anchor_rows(queries, sums, warp, i, anchor, 1.0)
            s = mma_ABt(s, query, self.anchor_rows(keys, sums, block, i, anchor, -1.0))
        return s

    @inlined
    def anchored_square(self, queries, keys, sums, warp):
        """The scores of a warp's 16 queries with its 16 keys, halved recursively: queries of the later half of 16, 8, 4 and 2
        tokens with keys of the earlier half, anchored at the later half's first token. And those of tokens with themselves."""
        row, col = row_index(SQUARE.col_vec), col_index(SQUARE.row_vec)
        scores = zeros(SQUARE)
        for i in range(warpgroup.WARPGROUP):
            query = self.dtype(load(self.group_part(queries, warp, i), self.group_tile))
            scores = mma_ABt(scores, query, self.dtype(load(self.group_part(keys, warp, i), self.group_tile)))
        scores = where(equal(row, col), scores, 0.0)
        for level in range(LEVELS):
            size = int32(TOKEN_GROUP >> level)
            half = int32(size // 2)
            s = zeros(SQUARE)
            for i in range(warpgroup.WARPGROUP):
                b = self.group_part(sums, warp, i)  # anchors are loaded twice: held over the queries, they would spill in KDA
                query = self.anchor_rows(queries, sums, warp, i, load_row_of_group(b, self.group_tile, size, half), 1.0)
                key = self.anchor_rows(keys, sums, warp, i, load_row_of_group(b, self.group_tile, size, half), -1.0)
                s = mma_ABt(s, query, key)
            scores = where(equal(row // size, col // size) & (row // half > col // half), s, scores)
        return scores

    @inlined
    def anchor_rows(self, rows, sums, block, i, anchor, sign):
        """Queries (sign 1) or keys (sign -1) of the block of 16 tokens, in warp i's channels, decayed from or to
        their anchors. Rows on the wrong side of an anchor, which take no part in a product, stay as they are."""
        log_decay = minimum((load(self.group_part(sums, block, i), self.group_tile) - anchor) * (sign * LOG2_E), 0.0)
        return self.dtype(load(self.group_part(rows, block, i), self.group_tile) * exp2(log_decay))

    @inlined
    def is_strong(self, flag):
        """Is the chunk strong? Reads what `factor_decays` wrote."""
        return tile_max(load(flag, FLAG_VEC)) > 0

    @inlined
    def decay_state(self, s_t, state_decay, when):
        """The transposed state, multiplied by exp(b_last - r) if `when`. A state is multiplied before it is read, which makes
        it S', and again after the chunk; in a strong chunk only in between."""
        if when:
            return s_t * load(state_decay, self.channel_vec)
        else:
            return s_t
