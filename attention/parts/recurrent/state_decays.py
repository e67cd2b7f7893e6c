"""What varies in kernels that go from token to token, as objects with the same methods: how a state decays, and which warps add
up sums over its rows (kernels/recurrent/linear_token_loop.py, kernels/delta/delta_gradient_token_loop.py)."""

from ops import block, exp, load, tile_max
from tiles import inlined, rt, static
from tiles.launching.arguments import array, record

from .gate_formulas import GateFormula

PLAIN_GATE = GateFormula()  # the gate itself is in memory


@static
class StateRows:
    """The rows of a state: all of one warp, or if they are `split`, some of each warp of the block."""

    split: bool

    @inlined
    def sum(self, x, scratch):
        """The sum of x over the warps that have rows of the same state. scratch: a shared vector for it."""
        if self.split:
            return block.reduce_sum(x, scratch)
        else:
            return x


@static
class StateDecay:
    """A state that does not decay. state: the type of a warp's part of it. formula: of gates that are computed from the numbers
    in memory; None: these are the gates."""

    state: rt
    formula: GateFormula | None = None

    def params(self):
        """The further parameters of a kernel, as a record: A_log and dt_bias of a formula."""
        return record() if self.formula is None else record(gA=array(2), gDtBias=array(2))

    @inlined
    def load_rate(self, params, head):
        """exp(A_log) of a head, for gates of a formula."""
        if self.formula is None:
            return 0.0
        else:
            return self.formula.load_rate(params.gA, head)

    @inlined
    def load(self, gDecay, params, rate, batch, token, head, row, column):
        """The factor by which a token decays the state, from this row and column on. rate: what `load_rate` returned."""
        return 1.0

    @inlined
    def decay_keys(self, z, factor):
        """z, a number for each row, times this factor."""
        return z * factor

    @inlined
    def compute_factor(self, x, params, rate, vector, head, first):
        """The factor, from what is in memory: x, a vector of this type, from row or column `first` on."""
        if self.formula is None:
            return exp(PLAIN_GATE.compute(x, rate, 0.0))
        else:
            return exp(self.formula.compute(x, rate, load(params.gDtBias, vector, (head, first))))


class TokenStateDecay(StateDecay):
    """A state with one gate for each token and head. It is loaded as a vector of columns, whose elements are the same."""

    @inlined
    def load(self, gDecay, params, rate, batch, token, head, row, column):
        g = load(gDecay, self.state.row_vec, (batch, token, head, column), aligned=False)
        return self.compute_factor(g, params, rate, self.state.row_vec, head, column)

    @inlined
    def decay_keys(self, z, factor):
        return z * tile_max(factor)


class ChannelStateDecay(StateDecay):
    """A state with a gate for each token, head and channel of the keys."""

    @inlined
    def load(self, gDecay, params, rate, batch, token, head, row, column):
        g = load(gDecay, self.state.col_vec, (batch, token, head, row), aligned=True)
        return self.compute_factor(g, params, rate, self.state.col_vec, head, row)


STATE_DECAYS = {"": StateDecay, "token": TokenStateDecay, "channel": ChannelStateDecay}
