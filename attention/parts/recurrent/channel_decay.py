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

from numpy import float32, int32

from ops import (
    abs,
    col_index,
    columns,
    cumsum_columns,
    equal,
    exp2,
    hstack,
    less,
    load,
    load_row,
    load_row_of_group,
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

from .channel_gates import ChannelGates, choose_channel_gates
from .gate_formulas import FORMULAS, PLAIN_BETA, BetaFormula, GateFormula
from .gates import FLOOR, LOG2_E
from .tokens import CHUNK, COLUMNS

PANEL = 128  # bytes of a row of a panel, at most: the widest swizzle
TOKEN_GROUP = 16  # tokens that a warp decays at once: of more, the registers would spill
SQUARE = rt(TOKEN_GROUP, TOKEN_GROUP, fp32)  # the scores of so many queries and keys
HALVES, PAIRS = warpgroup.named_barrier(4), warpgroup.named_barrier(2, first=2)  # later warps wait for earlier ones' keys
RAW_SIZE = 128, 2  # padded key dim and consumers of configurations with a formula
FLAG = sv(16, fp32)  # is a chunk strong? 1 or 0
FLAG_VEC = rt(16, FLAG.length, fp32).row_vec
MIN_LOG2_DECAY = {bf16: -86.0, fp16: -11.0}  # what b - r may be, in powers of 2, without q' and k* losing precision


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. consumers: warpgroups that have 64 value columns each.
    gates: the dtype of the gates; dtype: of everything else. varlen: are sequences packed (cu_seqlens)? formula, beta: what
    computes gates and beta of what is in memory; None: the gates themselves are there. l2norm: are queries and keys divided by
    their lengths? preparers: the warpgroups that prepare what consumers read."""

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
        return choose_channel_gates(self.key_dim // warpgroup.WARPGROUP, self.formula)

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
        for formula in FORMULAS:  # of x in fp32, which layers seldom project, KDA spills some 100 bytes of indices
            yield config(*RAW_SIZE, bf16, bf16, formula=formula, beta=beta)
            yield config(*RAW_SIZE, bf16, bf16, formula=formula, beta=beta, l2norm=True)


@static
class ChannelDecay:
    """The decays of a chunk's channels. A preparer, whose warps each have some of the channels, calls `cumsum_gates`,
    `factor_decays` and `anchored_scores`; the warpgroups that read its results call `is_strong` and `decay_state`."""

    key_dim: int
    dtype: dtype
    consumers: int
    scored = TOKEN_GROUP  # rows of scores of TOKEN_GROUP tokens

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
        return load_row(self.warp_part(sums, warp), self.warp_tile.row_vec, CHUNK - 1, fenced=False) * LOG2_E

    @inlined
    def factor_decays(self, queries, keys, extra, sums, b_last, state_decay, flag, warp, strong):
        """Overwrite q by q' and k by k*, and write what `store_extra` stores to `extra`, exp(b_last - r) to `state_decay`, and
        `strong` to `flag`."""
        r_query, r_key = b_last * (0.0 if strong else 0.5), b_last * (1.0 if strong else 0.5)
        for i in range(CHUNK // TOKEN_GROUP):
            b = load(self.group_part(sums, i, warp), self.group_tile, fenced=False) * LOG2_E
            key = load(self.group_part(keys, i, warp), self.group_tile, fenced=False)
            decay = exp2(b - r_query)
            query = load(self.group_part(queries, i, warp), self.group_tile, fenced=False) * decay
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
    def anchored_scores(self, queries, keys, extra, sums, far_keys, warp):
        """The scores q_i . (exp(b_i - b_j) k_j) of a chunk, 16 rows i in each warp, for j <= i; 0 elsewhere. For any decays:
        the chunk is halved recursively, and queries of a later half meet keys of the earlier one, both decayed to or from the
        later half's first token, the anchor, so that no factor is greater than 1. far_keys: memory as for a chunk's keys.
        extra: what `round_scores` stores to: nothing above the diagonal."""
        self.store_far_keys(far_keys, keys, sums, warp)
        near = self.round_scores(extra, self.near_scores(queries, keys, sums, warp), warp, warp)
        nothing = self.dtype(zeros(SQUARE))
        first, second, before = nothing, nothing, nothing
        if warp >= 2:
            HALVES.sync(0)
            earlier = subtile(far_keys, 2 * TOKEN_GROUP, 0)
            scores = self.anchored_block(zeros(self.square_pair), queries, keys, sums, earlier, warp, 2)
            first = self.round_scores(extra, columns(scores, TOKEN_GROUP, 0), warp, 0)
            second = self.round_scores(extra, columns(scores, TOKEN_GROUP, 1), warp, 1)
        if warp % 2 == 1:
            PAIRS.sync(warp // 2)
            earlier = subtile(far_keys, TOKEN_GROUP, 2 + warp // 2)
            scores = self.anchored_block(zeros(self.square), queries, keys, sums, earlier, warp, warp)
            before = self.round_scores(extra, scores, warp, warp - 1)
        first = near if warp == 0 else before if warp == 1 else first
        second = near if warp == 1 else second
        third = near if warp == 2 else before if warp == 3 else nothing
        return hstack(hstack(first, second), hstack(third, near if warp == 3 else nothing))

    @inlined
    def store_far_keys(self, far_keys, keys, sums, warp):
        """Write the keys that meet queries of other warps, decayed to their anchors: of the first two warps for the last two,
        then of warps 0 and 2 for the warp after each."""
        if warp < 2:
            self.store_anchored_keys(subtile(far_keys, TOKEN_GROUP, warp), keys, sums, warp, 2)
            HALVES.arrive(0)
        if warp % 2 == 0:
            self.store_anchored_keys(subtile(far_keys, TOKEN_GROUP, 2 + warp // 2), keys, sums, warp, warp + 1)
            PAIRS.arrive(warp // 2)

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
        if self.is_mild(sums, warp):
            scores = self.centred_scores(queries, keys, sums, warp)
        else:
            scores = self.halved_scores(queries, keys, sums, warp)
        row, col = row_index(self.square.col_vec) % TOKEN_GROUP, col_index(self.square.row_vec)
        return where(less(row, col), 0.0, scores)

    @inlined
    def is_mild(self, sums, warp):
        """Do a warp's 16 tokens decay so little that one reference serves them all?"""
        least = float32(0.0)
        for i in range(warpgroup.WARPGROUP):
            first, last = self.edge_sums(sums, warp, i)
            least = min(least, tile_min(last - first))
        return least * LOG2_E > self.min_log2_decay

    @inlined
    def edge_sums(self, sums, warp, i):
        """b of the first and of the last one of a warp's 16 tokens, in the channels of warp i."""
        rows, kind = self.group_part(sums, warp, i), self.warp_tile.row_vec
        return load_row(rows, kind, 0, fenced=False), load_row(rows, kind, TOKEN_GROUP - 1, fenced=False)

    @inlined
    def centred_scores(self, queries, keys, sums, warp):
        """`near_scores` with the middle of the sums as the one reference."""
        scores = zeros(self.square)
        for i in range(warpgroup.WARPGROUP):
            first, last = self.edge_sums(sums, warp, i)
            b = load(self.group_part(sums, warp, i), self.group_tile, fenced=False)
            b = (b - (first + last) * 0.5) * LOG2_E
            decay, key = self.dtype(exp2(b)), self.load_rows(keys, warp, i)
            rows = self.stack_rows(self.load_rows(queries, warp, i) * decay, key * decay)
            scores = mma_ABt(scores, rows, key * self.dtype(exp2(-b)))
        return scores

    @inlined
    def halved_scores(self, queries, keys, sums, warp):
        """`near_scores` for any decays. Those of groups of 8, 4 and 2 tokens take the place of those that greater groups'
        anchors gave them, and last those of tokens with themselves."""
        scores, size = zeros(self.square), int32(TOKEN_GROUP)
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
            scores = where(equal(row * (1 / size) // 1, col * (1 / size) // 1), s, scores)
            size = size >> 1
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
        """What meets keys, of the queries and the keys of 16 tokens: the queries."""
        return query

    @inlined
    def round_scores(self, extra, scores, warp, block):
        """The scores of a warp's 16 queries with a block of 16 keys, rounded."""
        return self.dtype(scores)

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
