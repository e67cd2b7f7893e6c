"""The frame in which channels do not decay: what gla_hopper.py and kda_hopper.py (the delta rule) do to a chunk
whose channels each decay by themselves, and the shape of their kernels.

With b the running sums of a chunk's gates, and any r, one number a channel, to count them from,

    q' = q exp(b - r),  k' = k exp(b - r),  k* = k exp(r - b),  S' = exp(r) S

so that q'_i . k*_j = q_i . (exp(b_i - b_j) k_j), and q' S' is what the queries read of a state S from before the chunk. What
the keys add to S' counts from r too: exp(b_last - r) takes both to the chunk's end. r = b_last / 2 keeps all exponents small.

Where a chunk is strong, decays by more than a dtype can hold, the weights of its pairs are computed one by one; then q' and k'
count from the chunk's beginning, k* from its end, and no exponent is positive.
"""

from dataclasses import dataclass
from typing import ClassVar

from ops import (
    col_index,
    cumsum_columns,
    equal,
    exp2,
    load,
    load_row,
    minimum,
    row_sum,
    store,
    subtile,
    tile_max,
    tile_min,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, rt, st, sv

from .gates import FLOOR, LOG2_E
from .tokens import CHUNK, COLUMNS

PANEL = 128  # bytes of a row that lie side by side, at most
TOKENS = 16  # that a warp brings into the frame at once: of more, the registers would overflow
FLAG = sv(16, fp32)  # is a chunk strong? 1 or 0
LEAST = {bf16: -86.0, fp16: -11.0}  # what b - r may be, in powers of 2, so that q' and k* keep their precision


@dataclass(frozen=True)
class Config:
    """A kernel's shape: key dim as padded, consumers of 64 value columns each, the dtype of the gates and that of all else;
    varlen: the sequences lie one behind the other in one batch. makers: the warpgroups that make what consumers need."""

    key_dim: int
    consumers: int
    gates: dtype
    dtype: dtype
    varlen: bool = False
    makers: ClassVar[int] = 1

    @property
    def threads(self):
        """Threads of a block."""
        return warpgroup.THREADS * (self.consumers + self.makers)

    @property
    def share(self):
        """The channels of a warp, of the four that bring a chunk into the frame."""
        return self.key_dim // warpgroup.WARPGROUP

    def _by_share(self, of):
        return st(CHUNK, self.key_dim, of, width=min(PANEL, self.share * of.itemsize))

    @property
    def key(self):
        """A chunk's tile of Q or K."""
        return self._by_share(self.dtype)

    @property
    def gate(self):
        """A chunk's tile of gates."""
        return self._by_share(self.gates)

    @property
    def value(self):
        """A consumer's tile of a chunk of V, or of the output."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def sums(self):
        """The running sums of a chunk's gates: in place of gates that are fp32, else a tile."""
        return sv(16, fp32) if self.gates is fp32 else self._by_share(fp32)

    @property
    def factor(self):
        """What a state is multiplied by, one number a channel."""
        return sv(self.key_dim, fp32)

    def __str__(self):
        kinds = f", gates {self.gates}{', varlen' * self.varlen}"
        return f"Dk {self.key_dim} {self.dtype}, {COLUMNS * self.consumers} columns{kinds}"


def bringing(consumers: int):
    """bring(q, k, v, g, gQ, gK, gV, gGates, j, n, batch, first, head, key_head, block): fill the rings with the j-th of a
    sequence's n chunks, if there is one; `first` is its first token."""

    @inlined
    def bring(q, k, v, g, gQ, gK, gV, gGates, j, n, batch, first, head, key_head, block):
        if j < n:
            token = first + CHUNK * j
            g.fill(j, gGates, (batch, token, head))
            k.fill(j, gK, (batch, token, key_head))
            q.fill(j, gQ, (batch, token, key_head))
            for c in range(consumers):
                v.fill(consumers * j + c, gV, (batch, token, head, consumers * block + c))

    return bring


def frame(config: Config, keep, pairs):
    """What is done to a chunk. By a warpgroup that knows nothing of the state, each warp with its own channels:

    sum_up(sums, gates, warp): the running sums; where they end, in powers of 2, of the warp's channels; is the chunk strong?
    change(queries, keys, more, sums, ends, factor, flag, warp, strong): q' and k* in place of q and k, and in `more` what
    keep(more, q', k, exp(b - r), strong) stores. factor: exp(b_last - r); flag: `strong`, for who comes later.
    one_by_one(queries, keys, sums, n): of the warpgroup, q_i . (exp(b_i - b_j) k_j) where j <= i, as tiles of type `pairs`:
    for the n-th pairs.cols keys.

    By those that read what it made: is_strong(flag). scaled(s_t, factor, when): the state, turned, times the factor: where a
    chunk is not strong, before it is read and after the chunk; where it is, between."""
    LIMIT, SHARE, WARPS = 2 * LEAST[config.dtype], config.share, warpgroup.WARPGROUP
    FEW, ALL, NUMBER = rt(TOKENS, SHARE, fp32), rt(16, config.key_dim, fp32).row_vec, rt(16, FLAG.length, fp32).row_vec
    OWN, CHANNELS = rt(16, SHARE, fp32), rt(16, SHARE, fp32).row_vec

    @inlined
    def part(tile, warp):
        """The channels of one warp."""
        return subtile(tile, CHUNK, 0, SHARE, warp)

    @inlined
    def few(tile, i, warp):
        """Of these the i-th few tokens."""
        return subtile(tile, TOKENS, i, SHARE, warp)

    @inlined
    def sum_up(sums, gates, warp):
        cumsum_columns(part(sums, warp), part(gates, warp), FLOOR)
        ends = load_row(part(sums, warp), CHANNELS, CHUNK - 1) * LOG2_E
        return ends, warpgroup.reduce_any(tile_min(ends) < LIMIT)

    @inlined
    def change(queries, keys, more, sums, ends, factor, flag, warp, strong):
        start, finish = ends * (0.0 if strong else 0.5), ends * (1.0 if strong else 0.5)
        for i in range(CHUNK // TOKENS):
            b, key = load(few(sums, i, warp), FEW) * LOG2_E, load(few(keys, i, warp), FEW)
            since = exp2(b - start)
            query = load(few(queries, i, warp), FEW) * since
            store(few(queries, i, warp), query)
            keep(few(more, i, warp), query, key, since, strong)
            store(few(keys, i, warp), key * exp2(finish - b))
        store(subtile(factor, SHARE, warp), exp2(finish))
        if warp == 0:
            store(flag, zeros(NUMBER) + (1.0 if strong else 0.0))

    @inlined
    def one_by_one(queries, keys, sums, n):
        """Key after key, and a warp's channels at a time."""
        s = zeros(pairs)
        for key in range(pairs.cols):
            j = pairs.cols * n + key
            for i in range(WARPS):
                since = warpgroup.load(part(sums, i), OWN) - load_row(part(sums, i), CHANNELS, j)
                k = exp2(minimum(since, 0.0) * LOG2_E) * load_row(part(keys, i), CHANNELS, j)
                s = where(equal(col_index(pairs), key), s + row_sum(warpgroup.load(part(queries, i), OWN) * k), s)
        return s

    @inlined
    def is_strong(flag):
        return tile_max(load(flag, NUMBER)) > 0

    @inlined
    def scaled(s_t, factor, when):
        if when:
            return s_t * load(factor, ALL)
        else:
            return s_t

    return sum_up, change, one_by_one, is_strong, scaled
