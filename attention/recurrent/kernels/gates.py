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
    """g with all gates below FLOOR raised to it. NaN stays NaN."""
    return where(less(g, FLOOR), FLOOR, g)


@static
class Gate:
    """No decay: all gates are 0. It says what a kernel asks of gates of every kind; other kinds override it.

    left: how many tokens of the sequence are left from the chunk's first on."""

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
        """exp2(b_last - a) v, for transposed values v."""
        return v_t

    @inlined
    def of_head(self, gGates, head):
        """If all tokens of a head have the same gate, that gate, in powers of 2."""
        return float32(0)

    @inlined
    def sum_up(self, b, a, j, gGates, gRate, gBias, batch, token, end, head):
        """Hopper: one warp loads the gates of the chunk that begins at `token`, and puts their running sums into the j-th
        slots of the rings."""

    @inlined
    def sums(self, b, a, j, g, left):
        """Hopper: (b of this warp's rows, all of a, the last b) of a chunk, whose sums are in the j-th slots of the rings. g:
        what of_head gave."""
        return 0.0, 0.0, float32(0)

    @inlined
    def rate_and_bias(self, gRate, gBias, head):
        """(A, dt_bias) of a head, for gates that Mamba-2's steps become."""
        return 0.0, 0.0

    @inlined
    def fetch(self, gGates, batch, token, end, head):
        """Ampere: begin to load what the caller gave for the gates of the chunk that begins at `token`, and return it."""
        return 0.0

    @inlined
    def share(self, b, a, g, rate, bias, left):
        """Ampere: one warp writes b and a to shared memory, for the chunk that `fetch` returned g for."""

    @inlined
    def load(self, vector, kind):
        """Ampere: b or a, or a warp's part of it, from shared memory."""
        return 0.0

    @inlined
    def last(self, b):
        """Ampere: the last element of b."""
        return 0.0


@static
class Decay(Gate):
    """What all gates have in common that decay. apart: is the scale multiplied in at the end? It is if as one more factor
    among the decays it would make scores too small or too large for fp16."""

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
    """One gate for each head, the same for all of its tokens. Used on Hopper only; elsewhere the gate is repeated for each
    token."""

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
    """One gate for each token and head."""

    kind, loaded = "token", True

    @inlined
    def summed(self, g, rate, bias, left):
        """(b, a) of a chunk. g: what the caller gave for its gates."""
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
    """Gates from Mamba-2's steps dt: g = dt A, w = max(dt, 0). softplus: is dt softplus of what the caller gave plus a
    bias?"""

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
