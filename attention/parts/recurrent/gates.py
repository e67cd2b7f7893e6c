"""Gates of linear attention that are one number for a token and head, or for a head (chunk_hopper.py, chunk_ampere.py).

g is a token's gate: the logarithm of its decay, never positive. w is the weight of its key. b is the cumulative sum of the
gates of a chunk, in powers of 2: exp2 is one instruction, exp two. A weight is never negative, so it becomes an exponent as
well: a key counts exp2(b_query - b_key) w = exp2(b_query - a_key) for a later query, where a = b - log2(w). Without weights a
is b.

`Gate` has the methods that a kernel calls. If b is loaded from memory, Hopper's kernels pass b and a through rings of vectors,
which warps of the producer fill. Ampere's pass them through two vectors in shared memory, which one warp writes before a
barrier of the block that there is in any case."""

import math

from numpy import float32

from ops import (
    col_index,
    cumsum,
    exp,
    exp2,
    last_element,
    less,
    load,
    log2,
    minimum,
    sigmoid,
    softplus,
    store,
    subtile,
    tile_max,
    truncate,
    warpgroup,
    where,
    zeros,
)
from tiles import fp32, inlined, rt, static

from .gate_formulas import GateFormula
from .tokens import CHUNK

TILE = rt(16, CHUNK, fp32)  # a warp's 16 rows of a chunk's scores
COL_VEC, ROW_VEC = TILE.col_vec, TILE.row_vec  # a number for each of the 16 rows; for each of the 64 columns
CHUNK_COL_VEC = rt(CHUNK, 16, fp32).col_vec  # a number for each of 64 rows: a lane has half as many as of ROW_VEC
CHUNK_LINE = rt(1, CHUNK, fp32, "line")  # a number for each of 64 tokens, two in each lane and none in two lanes
LOG2_E = math.log2(math.e)
MIN_LOG2_DECAY = -90.0  # of a chunk: one that decays by less is strong, as 1 / its decay, times a value, might overflow
FLOOR = -100.0  # exp of it is 0 in fp32. Sums of lower gates would have fewer digits left for small gates beside them


@inlined
def clamp_gates(g):
    """max(g, FLOOR), where NaN stays NaN."""
    return where(less(g, FLOOR), FLOOR, g)


@inlined
def load_line(gX, end, at):
    """A number for each token of a chunk, 0 from the token `end` on, as a CHUNK_LINE. at: (batch, first token, head)."""
    return load(truncate(gX, 1, end), CHUNK_LINE, at, rows=0, cols=1)


@inlined
def load_tokens(vector, part):
    """A chunk's numbers, the part-th 64 of a shared vector, as a ROW_VEC."""
    return load(subtile(vector, CHUNK, part), ROW_VEC)


@static
class Gate:
    """No decay: all gates are 0. It has the methods that a kernel calls for gates of every kind; other kinds override them.

    remaining: the number of tokens of the sequence from the chunk's first one on."""

    kind = ""
    per_token = False  # is there a gate for each token, in memory?
    has_formula = False  # are these gates computed from what is in memory?
    weighted = False  # do keys have weights, so that a is not b?
    folds_scale = False  # is the softmax scale added to b as log2(scale)? If not, outputs are multiplied by it
    reversed = False  # does a scan begin with the last token, and is the scale a weight of the keys? (gradients.ReversedGate)
    rank = 3  # axes of the array of gates

    def __str__(self):
        return f"gates by {self.kind}" if self.kind else ""

    @inlined
    def decay(self, x, b):
        """exp2(b) x; without a gate x."""
        return x

    @inlined
    def decay_all_scores(self, s, b, a):
        """exp2(b - a^T) * s, for b of this warp's rows and a of all columns"""
        return s

    @inlined
    def decay_scores(self, s, b, a):
        """tril(exp2(b - a^T) * s)"""
        return warpgroup.causal(self.decay_all_scores(s, b, a), 0, 0.0)

    @inlined
    def scale_keys(self, x, scale):
        """x, scores or values, times the softmax scale if it is a weight of the keys."""
        return x

    @inlined
    def decay_values(self, v_t, a, b_last):
        """exp2(b_last - a) * v, for transposed values v_t"""
        return v_t

    @inlined
    def load_head_gate(self, gGates, head):
        """The gate of a head, in powers of 2, if all of its tokens have the same; 0 otherwise."""
        return float32(0)

    @inlined
    def produce_cumsum(self, b, a, j, arrays, place):
        """Hopper's producer: one warp loads the gates of the chunk at a ChunkPlace, and writes b and a to the j-th slots of the
        rings. arrays: gGates, gA and gDtBias."""

    @inlined
    def consume_cumsum(self, b, a, j, g, remaining):
        """Hopper's consumer: (b of this warp's rows, a of all tokens, b_last) of the chunk in the j-th slots of the rings. g:
        the result of load_head_gate."""
        return 0.0, 0.0, float32(0)

    @inlined
    def load_rate_and_bias(self, gA, gDtBias, head):
        """(A, dt_bias) of a head for Mamba-2's gates, dt A; (exp(A_log), dt_bias) for those of a formula; (0, 0) otherwise."""
        return 0.0, 0.0

    @inlined
    def load_gates(self, gGates, batch, token, end, head):
        """Start to load the gates (Mamba-2: dt) of the chunk that starts at `token`, and return them, a CHUNK_LINE."""
        return 0.0

    @inlined
    def store_cumsum(self, b, a, g, rate, bias, remaining):
        """Ampere: one warp writes b and a of a chunk to shared memory. g: the result of load_gates."""

    @inlined
    def load_cumsum(self, vector, vector_type, b):
        """Ampere: b or a, or a warp's part of it, from shared memory, as a register vector of this type. b: the whole vector b,
        whose last element a reversed scan subtracts from."""
        return 0.0

    @inlined
    def load_last(self, b):
        """Ampere: b_last, from shared memory."""
        return 0.0


@static
class DecayGate(Gate):
    """Gates that are not all 0. scale_at_end: are outputs multiplied by the scale, instead of log2(scale) being added to b?
    They are if the scale would make scores too small or too large for fp16."""

    scale_at_end: bool = False

    @property
    def folds_scale(self):
        """Is log2(scale) added to b?"""
        return not self.scale_at_end

    def __str__(self):
        return super().__str__() + ", scale at the end" * self.scale_at_end

    @inlined
    def decay(self, x, b):
        return x * exp2(b)

    @inlined
    def decay_all_scores(self, s, b, a):
        return s * exp2(zeros(TILE) + b - a)


class HeadGate(DecayGate):
    """One gate for each head, the same for all of its tokens: b = g (1, 2, .., 64), without a load. Only Hopper's kernels have
    it; Ampere's get the gate repeated for each token."""

    kind, rank = "head", 2

    @inlined
    def load_head_gate(self, gGates, head):
        return float32(tile_max(clamp_gates(load(gGates, COL_VEC, (head, 0)))) * LOG2_E)

    @inlined
    def consume_cumsum(self, b, a, j, g, remaining):
        b_rows, b_cols = g * (warpgroup.row_index(COL_VEC) + 1.0), g * (col_index(ROW_VEC) + 1.0)
        return b_rows, b_cols, g * float32(min(CHUNK, remaining))

    @inlined
    def decay_values(self, v_t, a, b_last):
        return v_t * exp2(minimum(b_last - a, 0.0))  # a goes on falling after the last token of the sequence


class TokenGate(DecayGate):
    """One gate for each token and head."""

    kind, per_token = "token", True

    @inlined
    def compute_gates(self, g, rates, biases):
        """The gates of tokens, the rows, and heads, from what is in memory. rates, biases: gA and gDtBias of the heads. Rows
        beyond the last token do not matter."""
        return g

    @inlined
    def compute_cumsum(self, g, rate, bias, remaining):
        """(b, a) of a chunk, from its gates in memory (Mamba-2: dt), as CHUNK_LINEs."""
        b = cumsum(clamp_gates(g) * LOG2_E)
        return b, b

    @inlined
    def decay_values(self, v_t, a, b_last):
        return v_t * exp2(b_last - a)

    @inlined
    def produce_cumsum(self, b, a, j, arrays, place):
        (gGates, gA, gDtBias), seq = arrays, place.seq
        rate, bias = self.load_rate_and_bias(gA, gDtBias, place.head)
        g = load_line(gGates, seq.end, (seq.batch, place.token, place.head))
        b_chunk, a_chunk = self.compute_cumsum(g, rate, bias, seq.end - place.token)
        if self.weighted:
            store(a.claim(j), a_chunk)
            a.publish(j)
        store(b.claim(j), b_chunk)
        b.publish(j)

    @inlined
    def consume_cumsum(self, b, a, j, g, remaining):
        b_chunk = b.wait(j)
        b_rows, b_last = warpgroup.load(b_chunk, COL_VEC), last_element(b_chunk)
        a_cols = load(a.wait(j) if self.weighted else b_chunk, ROW_VEC)
        b.release(j)
        if self.weighted:
            a.release(j)
        return b_rows, a_cols, b_last

    @inlined
    def load_gates(self, gGates, batch, token, end, head):
        return load_line(gGates, end, (batch, token, head))

    @inlined
    def store_cumsum(self, b, a, g, rate, bias, remaining):
        b_chunk, a_chunk = self.compute_cumsum(g, rate, bias, remaining)
        store(b, b_chunk)
        if self.weighted:
            store(a, a_chunk)

    @inlined
    def load_cumsum(self, vector, vector_type, b):
        return load(vector, vector_type)

    @inlined
    def load_last(self, b):
        return last_element(b)


@static
class SummedGate(TokenGate):
    """Gates whose sums are in memory (gate_sums.py): b of each chunk, head and token of the chunk, and with weights a behind
    it."""

    kind = "sums"
    weighted: bool = False

    def __str__(self):
        return super().__str__() + ", weights" * self.weighted

    @inlined
    def produce_cumsum(self, b, a, j, arrays, place):
        gGates, _, _ = arrays
        b_chunk = load(gGates, CHUNK_LINE, (place.chunk, place.head, 0), rows=0, cols=2)
        if self.weighted:
            a_chunk = load(gGates, CHUNK_LINE, (place.chunk, place.head, CHUNK), rows=0, cols=2)
            store(a.claim(j), a_chunk)
            a.publish(j)
        store(b.claim(j), b_chunk)
        b.publish(j)


@static
class FormulaGate(TokenGate):
    """Gates that a formula computes from the numbers in memory (gate_formulas.py)."""

    kind, has_formula = "formula", True
    formula: GateFormula = GateFormula()

    def __str__(self):
        return f"{super().__str__()} {self.formula}"

    @inlined
    def compute_gates(self, g, rates, biases):
        return self.formula.compute(g, exp(rates), biases)

    @inlined
    def load_rate_and_bias(self, gA, gDtBias, head):
        return self.formula.load_rate(gA, head), self.formula.load_bias(gDtBias, head)

    @inlined
    def compute_cumsum(self, g, rate, bias, remaining):
        g = where(less(col_index(CHUNK_LINE), float32(remaining)), self.formula.compute(g, rate, bias), 0.0)
        b = cumsum(clamp_gates(g) * LOG2_E)
        return b, b


@static
class Mamba2Gate(TokenGate):
    """Gates and weights from Mamba-2's dt: g = dt A, w = max(dt, 0). softplus: is dt = softplus(x + dt_bias) for the x in
    memory, instead of x + dt_bias? low, high: the limits of dt."""

    kind, weighted, has_formula = "step", True, True
    softplus: bool = False
    low: float = 0.0
    high: float = math.inf

    @property
    def has_limits(self):
        """Has dt other limits than 0 and infinity?"""
        return (self.low, self.high) != (0.0, math.inf)

    def __str__(self):
        limits = f", from {self.low} to {self.high}" * self.has_limits
        return super().__str__() + ", softplus" * self.softplus + limits

    @inlined
    def load_rate_and_bias(self, gA, gDtBias, head):
        return tile_max(load(gA, COL_VEC, (head, 0))), tile_max(load(gDtBias, COL_VEC, (head, 0)))

    @inlined
    def compute_gates(self, g, rates, biases):
        return self.step_size(g + biases) * rates

    @inlined
    def step_size(self, x):
        """dt of x, to which dt_bias has been added."""
        dt = softplus(x) if self.softplus else x
        dt = where(less(dt, self.low), self.low, dt)
        if self.high < math.inf:
            dt = where(less(self.high, dt), self.high, dt)
        return dt

    @inlined
    def differentiate_step(self, x, ddt):
        """The gradient of x, from that of dt; 0 where dt is beyond a limit."""
        if self.softplus:
            if self.has_limits:
                ddt = where(less(softplus(x), self.low), 0.0, where(less(self.high, softplus(x)), 0.0, ddt))
            return ddt * sigmoid(x)
        else:
            return where(less(x, self.low), 0.0, where(less(self.high, x), 0.0, ddt))

    @inlined
    def compute_cumsum(self, g, rate, bias, remaining):
        dt = g + bias
        if self.has_limits:
            dt = where(less(col_index(CHUNK_LINE), float32(remaining)), self.step_size(dt), 0.0)
        else:
            if self.softplus:
                dt = softplus(dt)
            dt = where(less(dt, 0.0), 0.0, where(less(col_index(CHUNK_LINE), float32(remaining)), dt, 0.0))
        b = cumsum(clamp_gates(dt * rate) * LOG2_E)
        return b, b - log2(dt)
