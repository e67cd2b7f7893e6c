"""The decays of the delta rule that are one number for each token and head, as objects with the same methods (delta_hopper.py,
delta_states_hopper.py). A chunk is `strong` if it decays by more than numbers can hold: see delta_hopper.py."""

from numpy import float32

from ops import col_index, cumsum, exp2, last_element, less, load, store, tile_min, warpgroup, where, zeros
from tiles import dtype, fp16, fp32, inlined, rt, static
from tiles.launching.arguments import array, record

from ..recurrent.gate_formulas import GateFormula
from ..recurrent.gates import CHUNK_LINE, LOG2_E, MIN_LOG2_DECAY, clamp_gates, load_line
from ..recurrent.tokens import CHUNK

SCORES = rt(16, CHUNK, fp32)
COL_VEC, ROW_VEC = SCORES.col_vec, SCORES.row_vec


@static
class UngatedDelta:
    """The delta rule without decays: no chunk is strong, and the vectors b, exp_b and edge_decay are neither written nor read.
    GatedDelta says what the methods do with gates."""

    dtype: dtype

    def params(self):
        """The further parameters of a kernel, as a record."""
        return record()

    @inlined
    def load_rate_and_bias(self, params, head):
        """(exp(A_log), dt_bias) of a head, if gates are computed by a formula."""
        return 0.0, 0.0

    @inlined
    def load_gates(self, gGates, seq, at):
        """Start to load the gates of the chunk whose first token is at `at`, and return them, a CHUNK_LINE."""
        return 0.0

    @inlined
    def compute_gates(self, g, rate, bias, remaining):
        """The gates of a chunk from what load_gates has loaded. remaining: the number of tokens of the sequence from the
        chunk's first one on."""
        return g

    @inlined
    def cumsum(self, g, rate_and_bias, remaining):
        """b, the cumulative sum of a chunk's gates g in powers of 2, by one warp."""
        return 0.0

    @inlined
    def publish_sums(self, tiles, j, sums):
        """One warp writes b to the j-th slot of the ring tiles.b, exp2(b) to that of tiles.exp_b, and to that of
        tiles.edge_decay exp2(-b), which scales the values, or in a strong chunk exp2(b_last - b), which scales what the chunk
        adds to the state."""

    @inlined
    def wait(self, vectors, j):
        """The vector of the j-th chunk in a ring of b, exp_b or edge_decay."""
        return 0

    @inlined
    def release(self, vectors, j):
        """Release the vector of the j-th chunk."""

    @inlined
    def is_strong(self, exp_b):
        """Does the chunk decay by more than numbers can hold?"""
        return False

    @inlined
    def decay_scores(self, s, exp_b, b):
        """The scores s of a chunk's tokens with each other; in a strong chunk exp2(b - b^T) * s. Elements above the diagonal do
        not matter."""
        return s

    @inlined
    def decay_inputs(self, values, s_k, o, exp_b, edge_decay, strong):
        """(the error that T multiplies, the part of the outputs that comes from the state). values: V^T. s_k: S^T K^T. o:
        S^T Q^T."""
        return values - s_k, o

    @inlined
    def decay_state(self, s_t, exp_b, condition):
        """exp2(b_last) S^T if `condition`, S^T otherwise. A strong chunk decays the state before it adds to it, another one
        afterwards."""
        return s_t

    @inlined
    def decay_update(self, u, edge_decay, strong):
        """U^T as it is added to the state: in a strong chunk decayed to the chunk's end."""
        return u

    @inlined
    def decay_outputs(self, o, exp_b, strong):
        """The outputs, decayed since the start of the chunk if decay_inputs has not done so."""
        return o


class GatedDelta(UngatedDelta):
    """The gated delta rule: a gate for each token and head."""

    @property
    def min_decay(self):
        """The decay of a whole chunk below which it is strong: in fp16, whose range is small, 1 / 2."""
        return 0.5 if self.dtype is fp16 else 2.0**MIN_LOG2_DECAY

    @inlined
    def load_gates(self, gGates, seq, at):
        return load_line(gGates, seq.end, at)

    @inlined
    def cumsum(self, g, rate_and_bias, remaining):
        rate, bias = rate_and_bias
        return cumsum(clamp_gates(self.compute_gates(g, rate, bias, remaining)) * LOG2_E)

    @inlined
    def publish_sums(self, tiles, j, sums):
        b, exp_b, edge_decay = tiles.b, tiles.exp_b, tiles.edge_decay
        store(b.claim(j), sums)
        b.publish(j)
        store(exp_b.claim(j), exp2(sums))
        exp_b.publish(j)
        b_last = tile_min(sums)
        store(edge_decay.claim(j), exp2((b_last if exp2(b_last) < self.min_decay else 0.0) - sums))
        edge_decay.publish(j)

    @inlined
    def wait(self, vectors, j):
        return vectors.wait(j)

    @inlined
    def release(self, vectors, j):
        vectors.release(j)

    @inlined
    def is_strong(self, exp_b):
        return last_element(exp_b) < self.min_decay

    @inlined
    def decay_scores(self, s, exp_b, b):
        if self.is_strong(exp_b):
            return s * exp2(zeros(SCORES) + warpgroup.load(b, COL_VEC) - load(b, ROW_VEC))
        else:
            return s

    @inlined
    def decay_inputs(self, values, s_k, o, exp_b, edge_decay, strong):
        if strong:
            decay = load(exp_b, ROW_VEC)
            return values - s_k * decay, o * decay
        else:
            return values * load(edge_decay, ROW_VEC) - s_k, o

    @inlined
    def decay_state(self, s_t, exp_b, condition):
        if condition:
            return s_t * last_element(exp_b)
        else:
            return s_t

    @inlined
    def decay_update(self, u, edge_decay, strong):
        if strong:
            return u * load(edge_decay, ROW_VEC)
        else:
            return u

    @inlined
    def decay_outputs(self, o, exp_b, strong):
        if strong:
            return o
        else:
            return o * load(exp_b, ROW_VEC)


@static
class FormulaDelta(GatedDelta):
    """The gated delta rule with gates that a formula computes."""

    formula: GateFormula = GateFormula()

    def params(self):
        return record(gA=array(2), gDtBias=array(2))

    @inlined
    def load_rate_and_bias(self, params, head):
        return self.formula.load_rate(params.gA, head), self.formula.load_bias(params.gDtBias, head)

    @inlined
    def compute_gates(self, g, rate, bias, remaining):
        return where(less(col_index(CHUNK_LINE), float32(remaining)), self.formula.compute(g, rate, bias), 0.0)


def delta_decay(input_dtype: dtype, gated: bool, formula: GateFormula | None) -> UngatedDelta:
    """The decays of a kernel: computed by the formula if there is one, and otherwise in memory if `gated`."""
    if formula is not None:
        return FormulaDelta(input_dtype, formula)
    return GatedDelta(input_dtype) if gated else UngatedDelta(input_dtype)
