"""Where a chunk's decays come from, if there is one number for a token and head (chunk_hopper.py, delta_hopper.py).

g is a token's gate, the logarithm of its decay and never positive, w the weight of its key, and b the running sum of a chunk's
gates, in powers of 2: exp2 is an instruction, exp two. A weight is never negative, so that it is an exponent, too: what a key
counts for a later query, exp2(b_query - b_key) w, takes the vector a = b - log2(w) and no other; without weights a is b.
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
    subtile,
    tile_max,
    transpose,
    truncate,
    warpgroup,
    where,
    zeros,
)
from tiles import fp32, inlined, rt

from .tokens import CHUNK

TILE = rt(16, CHUNK, fp32)
ROWS, ALONG = TILE.col_vec, TILE.row_vec
DOWN = rt(CHUNK, 16, fp32).col_vec  # a chunk's tokens, of which a lane holds half as many as of ALONG
LOG2_E = math.log2(math.e)
FLOOR = -100.0  # exp of it is 0 in fp32; sums of greater numbers would say less of small gates beside them
KINDS = (None, "head", "token", "step")
"""None: no decay. "head": one gate a head. "token": one a token and head. "step": Mamba-2's, w = max(dt, 0) and g = w A."""


@inlined
def floored(g):
    """g, no gate below FLOOR; NaN stays NaN."""
    return where(less(g, FLOOR), FLOOR, g)


def _summing(kind: str | None, softpluses: bool):
    """summed(g, rate, bias, left): vectors b and a of a chunk. g: what the caller gave for its gates, of which `left` or more
    are left."""

    @inlined
    def summed(g, rate, bias, left):
        if kind == "step":
            dt = g + bias
            if softpluses:
                dt = softplus(dt)
            dt = where(less(dt, 0.0), 0.0, where(less(col_index(ALONG), float32(left)), dt, 0.0))
            b = cumsum(floored(dt * rate) * LOG2_E)
            return b, b - log2(dt)
        else:
            b = cumsum(floored(g) * LOG2_E)
            return b, b

    return summed


def gates(kind: str | None, softpluses: bool = False):
    """What a kernel needs of a kind of gate.

    sum_up(b, a, mine, gGates, gRate, gBias, batch, token, end, head): a warp's work, for kinds that are loaded: b of the chunk
    that begins at `token` goes to ring b as its `mine`-th, and where there are weights a to ring a.
    steady(gGates, head): the gate, if all of a head are the same, in powers of 2.
    sums(b, a, mine, same, left): of a chunk, the `mine`-th of the rings, of which `left` tokens or more are left: b of this
    warp's rows, all of a, and the last of b.
    decayed(x, b): exp2(b) x.
    pairs(s, rows, along): tril(exp2(b - a^T) * s).
    remaining(v_t, along, end): exp2(b_last - a) v, v being turned."""
    BY_STEP, LOADED, summed = kind == "step", kind in ("token", "step"), _summing(kind, softpluses)

    @inlined
    def sum_up(b, a, mine, gGates, gRate, gBias, batch, token, end, head):
        rate, bias = 0.0, 0.0
        if BY_STEP:
            rate, bias = tile_max(load(gRate, ROWS, (head, 0))), tile_max(load(gBias, ROWS, (head, 0)))
        totals, along = summed(load(gGates, ALONG, (batch, token, head), cols=1), rate, bias, end - token)
        if BY_STEP:
            store(a.claim(mine), along)
            a.publish(mine)
        store(b.claim(mine), totals)
        b.publish(mine)

    @inlined
    def steady(gGates, head):
        if kind == "head":
            return tile_max(floored(load(gGates, ROWS, (head, 0)))) * LOG2_E
        else:
            return float32(0)

    @inlined
    def sums(b, a, mine, same, left):
        if LOADED:
            total = b.wait(mine)
            rows, end = warpgroup.load(total, ROWS), last_element(total)
            along = load(a.wait(mine) if BY_STEP else total, ALONG)
            b.release(mine)
            if BY_STEP:
                a.release(mine)
        else:
            rows, along = same * (warpgroup.row_index(ROWS) + 1.0), same * (col_index(ALONG) + 1.0)
            end = same * float32(min(CHUNK, left))
        return rows, along, end

    @inlined
    def decayed(x, b):
        return x if kind is None else x * exp2(b)

    @inlined
    def pairs(s, rows, along):
        return warpgroup.causal(s if kind is None else s * exp2(zeros(TILE) + rows - along), 0, 0.0)

    @inlined
    def remaining(v_t, along, end):
        if kind is None:
            return v_t
        else:
            left = end - along
            return v_t * exp2(left if LOADED else minimum(left, 0.0))  # the same gate goes on beyond the last token

    return sum_up, steady, sums, decayed, pairs, remaining


def shared_gates(kind: str | None, softpluses: bool = False):
    """The same where warps meet anyway, b and a being vectors in shared memory. kind: None, "token" or "step"; there a head's
    gate is that of each of its tokens.

    given(gGates, batch, token, end, head): what the caller gave for a chunk's tokens before `end`.
    put(b, a, g, rate, bias, left): a warp's work: b and a of the chunk that g was given for, before a meeting.
    of_pairs(b, a, me): b of warp me's rows, and a. of_rows(b): b of all rows. of_end(b, a): a, and the last of b."""
    BY_STEP, summed = kind == "step", _summing(kind, softpluses)

    @inlined
    def given(gGates, batch, token, end, head):
        if kind is None:
            return 0.0
        else:
            return load(truncate(gGates, 1, end), DOWN, (batch, token, head), cols=1)

    @inlined
    def put(b, a, g, rate, bias, left):
        if kind is not None:
            totals, along = summed(transpose(g), rate, bias, left)
            store(b, totals)
            if BY_STEP:
                store(a, along)

    @inlined
    def of_pairs(b, a, me):
        if kind is None:
            return 0.0, 0.0
        else:
            return load(subtile(b, 16, me), ROWS), load(a if BY_STEP else b, ALONG)

    @inlined
    def of_rows(b):
        return 0.0 if kind is None else load(b, DOWN)

    @inlined
    def of_end(b, a):
        if kind is None:
            return 0.0, 0.0
        else:
            return load(a if BY_STEP else b, ALONG), last_element(b)

    return given, put, of_pairs, of_rows, of_end
