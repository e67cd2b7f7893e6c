"""Gates and beta as functions of what a layer projects (attention.gates describes them to users). Kernels of the recurrent
family evaluate these where they read a gate or beta, so that no pass before them writes one.

x is an element in memory, rate is exp(A_log) of its head, bias is dt_bias of its head, or of its channel. A gate g is the
logarithm of a decay, never positive."""

from numpy import float32

from ops import exp, load, sigmoid, softplus, tile_max
from tiles import fp32, inlined, rt, static

HEAD_VEC = rt(16, 64, fp32).col_vec  # what holds a number of a head that strides of 0 bytes repeat


@static
class GateFormula:
    """The gate itself is in memory: g = x."""

    @inlined
    def compute(self, x, rate, bias):
        """g of a tile, vector or number x."""
        return x

    @inlined
    def load_rate(self, gA, head):
        """exp(A_log) of a head; 1 if there is no A_log."""
        return exp(tile_max(load(gA, HEAD_VEC, (head, 0))))

    @inlined
    def load_bias(self, gDtBias, head):
        """dt_bias of a head; 0 if there is none."""
        return tile_max(load(gDtBias, HEAD_VEC, (head, 0)))


class SoftplusFormula(GateFormula):
    """g = -exp(A_log) softplus(x + dt_bias): Mamba-2, gated delta networks, Kimi delta attention."""

    def __str__(self):
        return "softplus"

    @inlined
    def compute(self, x, rate, bias):
        return softplus(x + bias) * -rate


@static
class SigmoidFormula(GateFormula):
    """g = lower sigmoid(exp(A_log) (x + dt_bias)): gates that are bounded below."""

    lower: float

    def __str__(self):
        return f"{self.lower} sigmoid"

    @inlined
    def compute(self, x, rate, bias):
        return sigmoid((x + bias) * rate) * float32(self.lower)


@static
class LogSigmoidFormula(GateFormula):
    """g = log(sigmoid(x + dt_bias)) / divisor: gated linear attention."""

    divisor: float

    def __str__(self):
        return f"logsigmoid / {self.divisor}"

    @inlined
    def compute(self, x, rate, bias):
        return softplus(-(x + bias)) * float32(-1 / self.divisor)


@static
class BetaFormula:
    """beta = scale sigmoid(x); if scale is 0, beta itself is in memory."""

    scale: float = 0.0

    def __str__(self):
        return f"beta {self.scale} sigmoid" if self.scale else ""

    @inlined
    def compute(self, x):
        """beta of a vector x."""
        if self.scale > 0:
            return sigmoid(x) * self.scale
        else:
            return x


PLAIN_BETA = BetaFormula()
FORMULAS: tuple[GateFormula, ...] = SoftplusFormula(), SigmoidFormula(-5.0), LogSigmoidFormula(16.0)  # as models have them
