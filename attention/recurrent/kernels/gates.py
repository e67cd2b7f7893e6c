"""The kinds of gates that are one number for a token and head, or for a head (chunk_hopper.py, chunk_ampere.py).

g is a token's gate, the logarithm of its decay and never positive, w the weight of its key, and b the running sum of a chunk's
gates, in powers of 2: exp2 is an instruction, exp two. A weight is never negative, so that it is an exponent, too: what a key
counts for a later query, exp2(b_query - b_key) w, takes the vector a = b - log2(w) and no other; without weights a is b.

`Gate` says what a kernel asks of every kind. Where b is loaded, Hopper's kernels have it from rings of vectors, which warps
of the producer fill; Ampere's from two vectors in shared memory, which one warp writes before the block meets anyway.
"""

import math

from numpy import float32

from ops import (
    col_index,
    cumsum,
    exp2,
    last_element,
    less,
    load,
    log2,
    minimum,
    softplus,
    store,
    tile_max,
    transpose,
    truncate,
    warpgroup,
    where,
    zeros,
)
from tiles import fp32, inlined, rt, static

from .tokens import CHUNK

TILE = rt(16, CHUNK, fp32)
ROWS, ALONG = TILE.col_vec, TILE.row_vec
DOWN = rt(CHUNK, 16, fp32).col_vec  # a chunk's tokens, of which a lane holds half as many as of ALONG
LOG2_E = math.log2(math.e)
FLOOR = -100.0  # exp of it is 0 in fp32; sums of greater numbers would say less of small gates beside them


@inlined
def floored(g):
    """g, no gate below FLOOR; NaN stays NaN."""
    return where(less(g, FLOOR), FLOOR, g)


@static
class Gate:
    """Nothing decays: all gates are 0. The other kinds override what they do otherwise."""

    kind = ""
    loaded = False  # is there a gate for each token?
    weighted = False  # do keys have weights, so that a is not b?
    scales = False  # is the scale one more factor among the decays, and not multiplied in at the end?
    rank = 3  # of the array that they come in

    def __str__(self):
        return f"gates by {self.kind}" if self.kind else ""

    @inlined
    def decayed(self, x, b):
        """exp2(b) x"""
        return x

    @inlined
    def scores(self, s, rows, along):
        """tril(exp2(b - a^T) * s)"""
        return warpgroup.causal(s, 0, 0.0)

    @inlined
    def remaining(self, v_t, along, end):
        """exp2(b_last - a) v, of v transposed."""
        return v_t

    @inlined
    def of_head(self, gGates, head):
        """The gate, if all tokens of a head have the same, in powers of 2."""
        return float32(0)

    @inlined
    def sum_up(self, b, a, j, gGates, gRate, gBias, batch, token, end, head):
        """Hopper: a warp loads and sums up the gates of the chunk that begins at `token`, the j-th of the rings."""

    @inlined
    def sums(self, b, a, j, g, left):
        """Hopper: of a chunk, the j-th of the rings, b of this warp's rows, all of a, and the last of b. g is of_head's; the
        sequence ends after `left` tokens."""
        return 0.0, 0.0, float32(0)

    @inlined
    def rate_and_bias(self, gRate, gBias, head):
        """What a head's steps become gates by."""
        return 0.0, 0.0

    @inlined
    def fetch(self, gGates, batch, token, end, head):
        """Ampere: what the caller gave for the gates of the chunk that begins at `token`, while it is on its way."""
        return 0.0

    @inlined
    def share(self, b, a, g, rate, bias, left):
        """Ampere: a warp writes b and a of the chunk that g was fetched for; the sequence ends after `left` tokens."""

    @inlined
    def load(self, vector, kind):
        """Ampere: b or a, or a warp's part of it."""
        return 0.0

    @inlined
    def last(self, b):
        """Ampere: the last of b."""
        return 0.0


@static
class Decay(Gate):
    """What all have in common that do decay. apart: the scale is multiplied in at the end, because the scores would be too
    small or too large for fp16 if it were one more factor among the decays."""

    apart: bool = False

    @property
    def scales(self):
        """See Gate."""
        return not self.apart

    def __str__(self):
        return super().__str__() + ", apart" * self.apart

    @inlined
    def decayed(self, x, b):
        return x * exp2(b)

    @inlined
    def scores(self, s, rows, along):
        return warpgroup.causal(s * exp2(zeros(TILE) + rows - along), 0, 0.0)


class ByHead(Decay):
    """One gate a head, the same for all its tokens. Hopper's only: elsewhere it is spread over the tokens."""

    kind, rank = "head", 2

    @inlined
    def of_head(self, gGates, head):
        return float32(tile_max(floored(load(gGates, ROWS, (head, 0)))) * LOG2_E)

    @inlined
    def sums(self, b, a, j, g, left):
        rows, along = g * (warpgroup.row_index(ROWS) + 1.0), g * (col_index(ALONG) + 1.0)
        return rows, along, g * float32(min(CHUNK, left))

    @inlined
    def remaining(self, v_t, along, end):
        return v_t * exp2(minimum(end - along, 0.0))  # the same gate goes on beyond the last token


class ByToken(Decay):
    """One gate a token and head."""

    kind, loaded = "token", True

    @inlined
    def summed(self, g, rate, bias, left):
        """b and a of a chunk. g: what the caller gave for its gates; the sequence ends after `left` tokens."""
        b = cumsum(floored(g) * LOG2_E)
        return b, b

    @inlined
    def remaining(self, v_t, along, end):
        return v_t * exp2(end - along)

    @inlined
    def sum_up(self, b, a, j, gGates, gRate, gBias, batch, token, end, head):
        rate, bias = self.rate_and_bias(gRate, gBias, head)
        g = load(truncate(gGates, 1, end), ALONG, (batch, token, head), cols=1)
        down, along = self.summed(g, rate, bias, end - token)
        if self.weighted:
            store(a.claim(j), along)
            a.publish(j)
        store(b.claim(j), down)
        b.publish(j)

    @inlined
    def sums(self, b, a, j, g, left):
        down = b.wait(j)
        rows, end = warpgroup.load(down, ROWS), last_element(down)
        along = load(a.wait(j) if self.weighted else down, ALONG)
        b.release(j)
        if self.weighted:
            a.release(j)
        return rows, along, end

    @inlined
    def fetch(self, gGates, batch, token, end, head):
        return load(truncate(gGates, 1, end), DOWN, (batch, token, head), cols=1)

    @inlined
    def share(self, b, a, g, rate, bias, left):
        down, along = self.summed(transpose(g), rate, bias, left)
        store(b, down)
        if self.weighted:
            store(a, along)

    @inlined
    def load(self, vector, kind):
        return load(vector, kind)

    @inlined
    def last(self, b):
        return last_element(b)


@static
class BySteps(ByToken):
    """Mamba-2's steps dt: g = dt A, w = max(dt, 0). softplus: dt is that of what the caller gave and a bias."""

    kind, weighted = "step", True
    softplus: bool = False

    def __str__(self):
        return super().__str__() + ", softplus" * self.softplus

    @inlined
    def rate_and_bias(self, gRate, gBias, head):
        return tile_max(load(gRate, ROWS, (head, 0))), tile_max(load(gBias, ROWS, (head, 0)))

    @inlined
    def summed(self, g, rate, bias, left):
        dt = g + bias
        if self.softplus:
            dt = softplus(dt)
        dt = where(less(dt, 0.0), 0.0, where(less(col_index(ALONG), float32(left)), dt, 0.0))
        b = cumsum(floored(dt * rate) * LOG2_E)
        return b, b - log2(dt)
