"""Gradients of linear attention as scans of the chunk kernels (chunk_hopper.py, chunk_ampere.py) with other operands.

With P = tril(exp(b_t - b_j) dO_t . v_j) and the states S after a chunk and dS, the gradient of S there, of

    S_t = exp(g_t) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t

these are, by the arguments q, k, v of a scan,

    dQ = scan(dO, V, K)                     from the initial state, transposed: QueryGradients
    dK = scan(V, dO, Q), reversed           from dS after the last token, transposed; its last state is dS_0: KeyGradients
    dV = scan(K, Q, dO), reversed           from dS after the last token: ScanOutputs

A reversed scan (ReversedGate, tokens.ReversedTokens) walks over the same chunks from the last one to the first. Each token sees
itself and those after it. With b the cumulative sum of a chunk's gates as ever,

    O   = exp(b_last - b) Q S + triu(exp(b^T - b) * Q K^T) V        S^T = exp(b_last) S^T + (exp(b) V)^T K

which are the forward scan's equations with b_last - b in place of b. The scale multiplies the keys there, so that states are
gradients as they are.

The gradient of a gate is a sum over the later tokens of its chunk, and one number for all tokens after them:

    dg_t = sum_(i >= t) (q_i . dq_i - k_i . dk_i) + <S, dS>

QueryGradients stores the row sums q . dq and the states S; KeyGradients k . dk, and <S, dS> for each chunk. All of these are sums of
float32 accumulators."""

from ops import columns, row_sum, tile_sum, truncate, warpgroup
from tiles import fp32, inlined, static
from tiles.launching.arguments import array, record

from .gates import Gate
from .results import ScanResult


@static
class ReversedGate(Gate):
    """The gates of a scan that begins with the last chunk. gate: of the same tokens in their order. What are b and a there are
    b_last - b and b_last - a here."""

    gate: Gate
    reversed = True

    @property
    def kind(self):
        """The name of the gates."""
        return self.gate.kind

    @property
    def per_token(self):
        """Is there a gate for each token, in memory?"""
        return self.gate.per_token

    @property
    def rank(self):
        """Axes of the array of gates."""
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
    def produce_cumsum(self, b, a, j, gGates, gA, gDtBias, batch, token, end, head):
        self.gate.produce_cumsum(b, a, j, gGates, gA, gDtBias, batch, token, end, head)

    @inlined
    def consume_cumsum(self, b, a, j, g, remaining):
        b_rows, a_cols, b_last = self.gate.consume_cumsum(b, a, j, g, remaining)
        return b_last - b_rows, b_last - a_cols, b_last

    @inlined
    def load_gates(self, gGates, batch, token, end, head):
        return self.gate.load_gates(gGates, batch, token, end, head)

    @inlined
    def store_cumsum(self, b, a, g, rate, bias, remaining):
        self.gate.store_cumsum(b, a, g, rate, bias, remaining)

    @inlined
    def load_cumsum(self, vector, kind, whole):
        return self.gate.load_last(whole) - self.gate.load_cumsum(vector, kind, whole)

    @inlined
    def load_last(self, b):
        return self.gate.load_last(b)


@static
class InputGradients(ScanResult):
    """Outputs that are gradients of q or k: columns of keys take the place of those of values, so that the value heads of a group
    have queries and keys (dO, V) of their own, and share values. with_gates: is what the gates' gradients are made of stored, too? z is
    then the array whose gradient the outputs are. unrounded: are outputs float32, to be added over a group?"""

    with_gates: bool = False
    unrounded: bool = False
    groups_queries = True
    gradient_of = ""

    def __str__(self):
        return ", ".join([f"d{self.gradient_of}", *["gates"] * self.with_gates, *["float32"] * self.unrounded])

    @property
    def reads_z(self):
        """Is there an array z?"""
        return self.with_gates

    def params(self, dtype):
        """row_dots: a row sum for each token and (head, block of columns). states: after each chunk, transposed. state_dots: for
        each chunk, head, and (block of columns, part of the channels, warp)."""
        if not self.with_gates:
            return record()
        return record(row_dots=array(3), states=array(4, dtype), state_dots=array(3))

    @inlined
    def query_head(self, key_head, group, first, width):
        return key_head * group + first // width

    @inlined
    def value_head(self, key_head, group, group_head):
        return key_head

    @inlined
    def fill_values(self, v, z, j, gV, gZ, at):
        v.fill(j, gV, at)
        if self.with_gates:
            z.fill(j, gZ, at)

    @inlined
    def store_row_dots(self, params, o, z, j, at, column, width, kind):
        if self.with_gates:
            seq, token, head = at
            dots = row_sum(o * fp32(warpgroup.load(z.wait(j), kind)))
            warpgroup.store(truncate(params.row_dots, 1, seq.end), dots, (seq.batch, token, head * width + column), cols=1)
            z.release(j)

    @inlined
    def store_output(self, seq_layout, gO, tile, o, seq, token, head, column):
        if self.unrounded:
            warpgroup.sync()
            seq_layout.store_rows(gO, o, seq, token, head, column)
        else:
            if seq_layout.varlen:
                warpgroup.sync()
            seq_layout.store(gO, tile, o, seq, token, head, column)


class QueryGradients(InputGradients):
    """dQ, and with the gates' gradients q . dq and the state after each chunk. Scores are rounded as those of KeyGradients are, so
    that the part of q . dq that k . dk takes away again is the same."""

    gradient_of, scales_scores = "q", True

    @inlined
    def scale_scores(self, x, scale):
        return x * scale

    @inlined
    def store_state(self, params, s_t, index, head, row, col):
        if self.with_gates:
            warpgroup.store(params.states, s_t, (index, head, row, col), aligned=True)


class KeyGradients(InputGradients):
    """dK, and with the gates' gradients k . dk and the product of each chunk's last state and its gradient."""

    gradient_of = "k"

    @inlined
    def dot_state(self, params, s_t, half, index, head, row, col, part):
        if self.with_gates:
            dot = self.dot_half(params, s_t, half, 0, index, head, row, col)
            dot = dot + self.dot_half(params, s_t, half, 1, index, head, row, col)
            params.state_dots[index, head, warpgroup.WARPGROUP * part + warpgroup.rank()] = dot

    @inlined
    def dot_half(self, params, s_t, half, n, index, head, row, col):
        """The product of half of the columns of s_t and of the stored state: of all at once, registers would spill."""
        state = warpgroup.load(params.states, half, (index, head, row, col + half.cols * n), aligned=True)
        return tile_sum(columns(s_t, half.cols, n) * fp32(state))
