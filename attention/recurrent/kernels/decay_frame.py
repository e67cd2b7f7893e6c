"""The frame in which channels do not decay: what gla_hopper.py and kda_hopper.py (the delta rule) do to a chunk
whose channels each decay by themselves, and the shape of their kernels.

With b the running sums of a chunk's gates, and any r, one number a channel, to count them from,

    q' = q exp(b - r),  k' = k exp(b - r),  k* = k exp(r - b),  S' = exp(r) S

so that q'_i . k*_j = q_i . (exp(b_i - b_j) k_j), and q' S' is what the queries read of a state S from before the chunk. What
the keys add to S' counts from r too: exp(b_last - r) takes both to the chunk's end. r = b_last / 2 keeps all exponents small.

Where a chunk is strong, decays by more than a dtype can hold, the scores are computed one by one; then q' and k'
count from the chunk's beginning, k* from its end, and no exponent is positive.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

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
from tiles import bf16, dtype, fp16, fp32, inlined, rt, st, static, sv

from .gates import FLOOR, LOG2_E
from .tokens import CHUNK, COLUMNS

PANEL = 128  # bytes of a row that lie side by side, at most
TOKENS = 16  # that a warp brings into the frame at once: of more, the registers would overflow
FLAG = sv(16, fp32)  # is a chunk strong? 1 or 0
NUMBER = rt(16, FLAG.length, fp32).row_vec
LEAST = {bf16: -86.0, fp16: -11.0}  # what b - r may be, in powers of 2, so that q' and k* keep their precision


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. consumers: each has 64 value columns. gates: the dtype
    of the gates; dtype: of everything else. varlen: do the sequences follow one another in a single batch? makers: the
    warpgroups that prepare what consumers read."""

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

    def _by_share(self, of):
        """A shared tile with panels of columns such that each of four warps has the channels of its own panels."""
        return st(CHUNK, self.key_dim, of, width=min(PANEL, self.key_dim // warpgroup.WARPGROUP * of.itemsize))

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
        """The tile of the running sums of a chunk's gates. If the gates are fp32, the sums take their place, and this is a
        small vector that is not used."""
        return sv(16, fp32) if self.gates is fp32 else self._by_share(fp32)

    @property
    def factor(self):
        """The vector by which a state is multiplied, one number for each channel."""
        return sv(self.key_dim, fp32)

    def __str__(self):
        kinds = f", gates {self.gates}{', varlen' * self.varlen}"
        return f"Dk {self.key_dim} {self.dtype}, {COLUMNS * self.consumers} columns{kinds}"


def space(form: type[Config], sizes, arch: str, everything: bool) -> Iterator[Any]:
    """The configurations of these sizes, (padded key dim, consumers), with gates in fp32 and in the dtype of everything else.
    Without `everything`, varlen configurations come in one size only, and fp16, which takes as many registers as bf16, is left
    out."""
    if arch == "sm_90a":
        for of, (key_dim, consumers), varlen in itertools.product(
            (bf16, fp16) if everything else (bf16,), sizes, (False, True)
        ):
            if not varlen or (key_dim, consumers) == (128, 2) or (everything and of is bf16):
                yield from (form(key_dim, consumers, gates, of, varlen) for gates in (fp32, of))


@static
class Frame:
    """What is done to a chunk. A warpgroup that knows nothing of the state comes first, each of its warps with channels of its
    own: `sum_up`, `change`, `one_by_one`. The warpgroups that read what it made follow: `is_strong`, `scaled`.

    scores: the type of the tiles that `one_by_one` makes."""

    key_dim: int
    dtype: dtype
    consumers: int
    scores: rt

    @property
    def share(self):
        """A register tile of 16 tokens and as many channels as a warp has."""
        return rt(16, self.key_dim // warpgroup.WARPGROUP, fp32)

    @property
    def few(self):
        """A register tile of TOKENS tokens and as many channels as a warp has."""
        return rt(TOKENS, self.share.cols, fp32)

    @property
    def all(self):
        """A register vector of all channels."""
        return rt(16, self.key_dim, fp32).row_vec

    @property
    def least(self):
        """The sum of a chunk's gates, in powers of 2, below which the chunk is strong."""
        return 2 * LEAST[self.dtype]

    @inlined
    def fill(self, rings, arrays, j, n, span, head, key_head, block):
        """Have TMA bring the j-th of a sequence's n chunks, if there is one: its queries, keys, values and gates."""
        (q, k, v, g), (gQ, gK, gV, gGates) = rings, arrays
        self.fill_keys((k, v, g), (gK, gV, gGates), j, n, span, head, key_head, block)
        if j < n:
            q.fill(j, gQ, (span.batch, span.first + CHUNK * j, key_head))

    @inlined
    def fill_keys(self, rings, arrays, j, n, span, head, key_head, block):
        """The same without the queries."""
        (k, v, g), (gK, gV, gGates) = rings, arrays
        if j < n:
            token = span.first + CHUNK * j
            g.fill(j, gGates, (span.batch, token, head))
            k.fill(j, gK, (span.batch, token, key_head))
            for c in range(self.consumers):
                v.fill(self.consumers * j + c, gV, (span.batch, token, head, self.consumers * block + c))

    @inlined
    def channels(self, tile, warp):
        """The part of a shared tile with the channels of one warp."""
        return subtile(tile, CHUNK, 0, self.share.cols, warp)

    @inlined
    def some(self, tile, i, warp):
        """The part of a shared tile with a warp's channels of the i-th group of TOKENS tokens."""
        return subtile(tile, TOKENS, i, self.share.cols, warp)

    @inlined
    def sum_up(self, sums, gates, warp):
        """Compute the running sums of a chunk's gates. Returns (the sums over the whole chunk, in powers of 2, for the warp's
        channels; whether the chunk is strong)."""
        ends = self.sums_and_ends(sums, gates, warp)
        return ends, warpgroup.reduce_any(tile_min(ends) < self.least)

    @inlined
    def sums_and_ends(self, sums, gates, warp):
        """The same without asking whether the chunk is strong, so that the warps need not meet."""
        cumsum_columns(self.channels(sums, warp), self.channels(gates, warp), FLOOR)
        return load_row(self.channels(sums, warp), self.share.row_vec, CHUNK - 1) * LOG2_E

    @inlined
    def change(self, queries, keys, more, sums, ends, factor, flag, warp, strong):
        """Write q' over q and k* over k, and to `more` what `keep` stores. factor: becomes exp(b_last - r). flag: becomes
        `strong`, for the readers of the chunk."""
        start, finish = ends * (0.0 if strong else 0.5), ends * (1.0 if strong else 0.5)
        for i in range(CHUNK // TOKENS):
            b, key = load(self.some(sums, i, warp), self.few) * LOG2_E, load(self.some(keys, i, warp), self.few)
            since = exp2(b - start)
            query = load(self.some(queries, i, warp), self.few) * since
            store(self.some(queries, i, warp), query)
            self.keep(self.some(more, i, warp), query, key, since, strong)
            store(self.some(keys, i, warp), key * exp2(finish - b))
        store(subtile(factor, self.share.cols, warp), exp2(finish))
        if warp == 0:
            store(flag, zeros(NUMBER) + (1.0 if strong else 0.0))

    @inlined
    def keep(self, more, query, key, since, strong):
        """Store what else a kernel needs of a group of tokens. query: their q'. since: exp(b - r)."""

    @inlined
    def one_by_one(self, queries, keys, sums, n):
        """The scores q_i . (exp(b_i - b_j) k_j), where j <= i, for the n-th group of scores.cols keys j, computed key after
        key and a warp's channels at a time."""
        s = zeros(self.scores)
        for key in range(self.scores.cols):
            j = self.scores.cols * n + key
            for i in range(warpgroup.WARPGROUP):
                b, row = self.channels(sums, i), self.share.row_vec
                since = warpgroup.load(b, self.share) - load_row(b, row, j)
                k = exp2(minimum(since, 0.0) * LOG2_E) * load_row(self.channels(keys, i), row, j)
                found = row_sum(warpgroup.load(self.channels(queries, i), self.share) * k)
                s = where(equal(col_index(self.scores), key), s + found, s)
        return s

    @inlined
    def is_strong(self, flag):
        """Is the chunk strong? It reads what `change` wrote."""
        return tile_max(load(flag, NUMBER)) > 0

    @inlined
    def scaled(self, s_t, factor, when):
        """The transposed state, multiplied by the factor if `when`. A state is scaled before it is read and again after the
        chunk; in a strong chunk only in between."""
        if when:
            return s_t * load(factor, self.all)
        else:
            return s_t
