"""Gradients of linear attention as scans of the chunk kernels (chunk_hopper.py, chunk_ampere.py) with other operands.

With P = tril(exp(b_t - b_j) dO_t . v_j) and the states S after a chunk and dS, the gradient of S there, of

    S_t = exp(g_t) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t

these are, by the arguments q, k, v of a scan,

    dQ = scan(dO, V, K)                     from the initial state, transposed: QueryGradients
    dK = scan(V, dO, Q), reversed           from dS after the last token, transposed; its last state is dS_0: KeyGradients
    dV = scan(K, Q, dO), reversed           from dS after the last token: ScanOutputs

A reversed scan (ReversedGate, tokens.ReversedTokens) goes over the same chunks from the last one to the first. Each token sees
itself and those after it. With b the cumulative sum of a chunk's gates, as in a forward scan,

    O   = exp(b_last - b) Q S + triu(exp(b^T - b) * Q K^T) V        S^T = exp(b_last) S^T + (exp(b) V)^T K

which are the forward scan's equations with b_last - b in place of b. The scale multiplies the keys, so that the scan's states
are the gradients of states, without a further factor.

The gradient of the cumulative sum of all gates up to a token is r = q . dq - k . dk. Summed to the end of the sequence it would
be that of the token's gate, but with the rounding errors of all tokens after it. Of a chunk with the state S before it, where
dS is the gradient of the state after it,

    dg_t = sum_(i >= t) r_i + sum_i (k_i . dk_i, as far as it comes from dS) + exp(b_last) <S, dS>

over the chunk's tokens i. The terms of the second sum with i >= t are also in r, with the opposite sign, and cancel to the last
bits of float32: so the gradient of a gate of -inf has no rounding errors of what the state forgets. QueryGradients stores the
row sums q . dq and the states S; KeyGradients stores k . dk, and for each chunk the second sum (the carried dots) and <S, dS>.
All of these are sums of float32 accumulators."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from numpy import int32

from ops import col_sum, columns, cumsum, divmod, exp, less, load, minimum, row_sum, tile_sum, truncate, warpgroup, where, zeros
from tiles import fp32, inlined, rt, static
from tiles.launching.arguments import array, record

from .gates import FLOOR, DecayGate, Gate, HeadGate, clamp_gates
from .results import ScanOutputs, ScanResult, ScanStates, StatesResult
from .tokens import CHUNK

GATES = rt(CHUNK, 16, fp32, "col")  # a number for each token of a chunk and each of 16 heads
HEADS, HEAD_VEC = GATES.cols, GATES.row_vec


class WarpShare(NamedTuple):
    """What a warp has of the gates of a call: every `splits`-th chunk of a sequence, from the split-th one on, of HEADS heads.
    index: of the sequence and split. head: the first one. seq: the sequence's TokenRange."""

    index: Any
    sequence: Any
    split: Any
    head: Any
    seq: Any


@inlined
def share_of_warp(warp, splits, groups, seq_layout, gCuSeqlens, length):
    """The WarpShare of the warp with this number in the grid. groups: how many groups of HEADS heads there are."""
    index, group = divmod(warp, groups)
    sequence, split = divmod(index, splits)
    head, seq = int32(HEADS * group), seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
    return WarpShare(index, sequence, split, head, seq)


@inlined
def sum_row_dots(dots, seq, token, head):
    """The row sums of the chunk that begins at `token`, for the heads from `head` on, as GATES. dots: parts of them, (batch,
    token, head, part)."""
    dots_of_sequence, total = truncate(dots, 1, seq.end), zeros(GATES)
    for part in range(dots.shape[3]):
        total = total + load(dots_of_sequence, GATES, (seq.batch, token, head, int32(part)), 1, 2)
    return total


@inlined
def sum_chunk_dots(dots, chunk, head):
    """The sums of a chunk and the heads from `head` on, as a HEAD_VEC. dots: parts of them, (chunk, head, part)."""
    total = zeros(HEAD_VEC)
    for part in range(dots.shape[2]):
        total = total + load(dots, HEAD_VEC, (chunk, head, int32(part)), cols=1)
    return total


@inlined
def differentiate_gates(r, gates, gCarriedDots, gStateDots, chunk, head):
    """dg of a chunk's tokens for the heads from `head` on, by the equation above: 0 of a gate that forward takes for FLOOR, as
    -inf. r: q . dq - k . dk, as GATES. gCarriedDots, gStateDots: parts of the other two sums, of each chunk and head."""
    later_tokens = sum_chunk_dots(gStateDots, chunk, head) * exp(col_sum(clamp_gates(gates)))
    later_tokens = later_tokens + sum_chunk_dots(gCarriedDots, chunk, head) + col_sum(r)
    return where(less(gates, FLOOR), 0.0, r - cumsum(r) + later_tokens)


@static
class ReversedGate(Gate):
    """The gates of a scan that begins with the last chunk. gate: the gates of the same tokens in a forward scan. This object's
    b and a are b_last - b and b_last - a of that one."""

    gate: Gate
    reversed = True

    @property
    def kind(self):
        """The kind of the gates, which this object has in reverse."""
        return self.gate.kind

    @property
    def per_token(self):
        """Is there a gate for each token, in memory?"""
        return self.gate.per_token

    @property
    def rises_after_end(self):
        """Would b_last - b be positive after the last token? It would for HeadGate, whose b falls on beyond the sequence."""
        return isinstance(self.gate, HeadGate)

    @property
    def rank(self):
        """How many axes the array of gates has."""
        return self.gate.rank

    def __str__(self):
        return ", ".join(filter(None, (str(self.gate), "reversed")))

    @inlined
    def decay(self, x, b):
        return self.gate.decay(x, b)

    @inlined
    def decay_scores(self, s, b, a):
        return warpgroup.triu(self.gate.decay_all_scores(s, b, a), 0, 0.0)

    @inlined
    def decay_values(self, v_t, a, b_last):
        return self.gate.decay_values(v_t, a, b_last)

    @inlined
    def scale_keys(self, x, scale):
        return x * scale

    @inlined
    def load_head_gate(self, gGates, head):
        return self.gate.load_head_gate(gGates, head)

    @inlined
    def produce_cumsum(self, b, a, j, arrays, place):
        self.gate.produce_cumsum(b, a, j, arrays, place)

    @inlined
    def consume_cumsum(self, b, a, j, g, remaining):
        b_rows, a_cols, b_last = self.gate.consume_cumsum(b, a, j, g, remaining)
        if self.rises_after_end:
            return minimum(b_last - b_rows, 0.0), minimum(b_last - a_cols, 0.0), b_last
        else:
            return b_last - b_rows, b_last - a_cols, b_last

    @inlined
    def load_gates(self, gGates, batch, token, end, head):
        return self.gate.load_gates(gGates, batch, token, end, head)

    @inlined
    def store_cumsum(self, b, a, g, rate, bias, remaining):
        self.gate.store_cumsum(b, a, g, rate, bias, remaining)

    @inlined
    def load_cumsum(self, vector, vector_type, b):
        return self.gate.load_last(b) - self.gate.load_cumsum(vector, vector_type, b)

    @inlined
    def load_last(self, b):
        return self.gate.load_last(b)


class GroupedQueries(ScanResult):
    """The base of results where columns of keys take the place of those of values: the value heads of a group have queries and
    keys (dO, V) of their own, and share values (K or Q)."""

    groups_queries = True

    @inlined
    def query_head(self, key_head, group, first, width):
        return key_head * group + first // width

    @inlined
    def value_head(self, key_head, group, group_head):
        return key_head


class GroupedStates(GroupedQueries, StatesResult):
    """The local states of such a scan alone, without outputs."""

    from_zero, label = True, "states, grouped"


class UnroundedOutputs(ScanOutputs):
    """Outputs, dV, in float32, to be added to what an array holds."""

    unrounded = True

    def __str__(self):
        return "float32"


@static
class InputGradients(GroupedQueries):
    """Outputs that are gradients of q or k. with_gates: are the sums for the gates' gradients stored, too? z is then the array
    whose gradient the outputs are. unrounded: are outputs float32, to be summed over the value heads of a group?"""

    with_gates: bool = False
    unrounded: bool = False
    gradient_of = ""

    @property
    def dots_states(self):
        """Are states multiplied by their gradients?"""
        return False

    def __str__(self):
        return ", ".join([f"d{self.gradient_of}", *["gates"] * self.with_gates, *["float32"] * self.unrounded])

    @property
    def reads_z(self):
        """Is there an array z, whose gradient the outputs are? Row dots are taken with it."""
        return self.with_gates

    def params(self, dtype, state=None):
        """row_dots: a row sum for each token and (head, block of columns, part of the channels). states: before each chunk,
        transposed. carried_dots, state_dots: for each chunk, head, and (block of columns, part, warp)."""
        if not self.with_gates:
            return record()
        return record(row_dots=array(3), states=array(4, dtype), carried_dots=array(3), state_dots=array(3))

    @inlined
    def store_row_dots(self, params, o, z, j, at, tile_type):
        if self.with_gates:
            seq, token, part = at
            dots = row_sum(o * fp32(warpgroup.load(z.wait(j), tile_type)))
            warpgroup.store(truncate(params.row_dots, 1, seq.end), dots, (seq.batch, token, part), cols=1)
            z.release(j)


class QueryGradients(InputGradients):
    """dQ, and with gradients of gates q . dq and the state before each chunk. Scores are rounded as those of KeyGradients are,
    so that the terms of q . dq and k . dk that cancel are the same numbers."""

    gradient_of, scales_scores = "q", True

    @property
    def stores_states(self):
        return self.with_gates

    @inlined
    def scale_scores(self, x, scale):
        return x * scale


class KeyGradients(InputGradients):
    """dK, and with gradients of gates k . dk, and for each chunk the carried dots and <S, dS>."""

    gradient_of = "k"

    @property
    def dots_states(self):
        return self.with_gates

    @inlined
    def dot_state(self, params, s_t, half, index, head, row, col, part):
        if self.with_gates:
            dot = self.dot_half(params, s_t, half, 0, index, head, row, col)
            dot = dot + self.dot_half(params, s_t, half, 1, index, head, row, col)
            params.state_dots[index, head, warpgroup.WARPGROUP * part + warpgroup.rank()] = dot

    @inlined
    def dot_carried(self, seq_layout, params, o, z, j, index, head, part, tile_type, remaining):
        if self.with_gates:
            products = o * fp32(warpgroup.load(z.wait(j), tile_type))
            if seq_layout.varlen:
                products = warpgroup.lower_fill(products, remaining, 0.0)  # rows of the next sequence
            params.carried_dots[index, head, warpgroup.WARPGROUP * part + warpgroup.rank()] = tile_sum(products)

    @inlined
    def dot_half(self, params, s_t, half, n, index, head, row, col):
        """The scalar product of half of the columns of s_t and of the stored state. With all columns at once registers
        spill."""
        state = warpgroup.load(params.states, half, (index, head, row, col + half.cols * n), aligned=True)
        return tile_sum(columns(s_t, half.cols, n) * fp32(state))


def gradient_fields(kind: type[Gate], everything: bool) -> Iterator[tuple[Gate, ScanResult, bool]]:
    """(gate, result, varlen) of the scans of gradients with gates of this kind. everything: float32 outputs and varlen, too."""
    gate = kind(scale_at_end=True) if issubclass(kind, DecayGate) else kind()
    for unrounded, varlen in itertools.product((False, True), repeat=2) if everything else ((False, False),):
        for with_gates in (False, True) if kind is not Gate else (False,):
            yield gate, QueryGradients(with_gates, unrounded), varlen
            yield ReversedGate(gate), KeyGradients(with_gates, unrounded), varlen
        if unrounded:
            yield ReversedGate(gate), UnroundedOutputs(), varlen
        else:
            yield from ((ReversedGate(gate), result, varlen) for result in (ScanOutputs(), ScanStates(), GroupedStates()))
            yield gate, GroupedStates(), varlen
