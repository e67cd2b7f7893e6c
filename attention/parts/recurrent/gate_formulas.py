"""Gates and beta as functions of what a layer projects (attention.gates has the functions that people call). Kernels of the
recurrent family evaluate these where they read a gate or beta, so that no pass before them writes one. Each formula stands here
twice: for kernels, in powers of 2, and for arrays of a framework, `evaluate`, where derivatives or a reference are wanted.

x is an element in memory, rate is exp(A_log) of its head, bias is dt_bias of its head, or of its channel. A gate g is the
logarithm of a decay, never positive."""

import functools
import math
from dataclasses import fields
from typing import Any, ClassVar

from numpy import float32

from ops import abs, exp, exp2, load, log2, maximum, reciprocal, sigmoid, tile_max
from tiles import fp32, inlined, rt, static

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
HEAD_VEC = rt(16, 64, fp32).col_vec  # what holds a number of a head that strides of 0 bytes repeat


@inlined
def log2_of_sum(t):
    """log2(1 + 2^t), which is never below t or 0."""
    return maximum(t, float32(0)) + log2(exp2(-abs(t)) + float32(1))  # no overflow, and 1 + 2^-|t| is at most 2


@static
class GateFormula:
    """For kernels, g = factor value(slope (x + bias)), or factor / value(..) if `divides`; here the gate itself is in memory,
    g = x. A formula has a name, by which options of calls know it, and at most one field, a number, with the value that models
    have."""

    name: ClassVar[str] = ""
    divides: ClassVar[bool] = False
    lowest: ClassVar[float] = -math.inf  # the least gate that there is: kernels leave out what only lower ones need

    @inlined
    def slope(self, rate):
        """What x is multiplied by."""
        return float32(1)

    @inlined
    def factor(self, rate):
        """What the value is multiplied by, or divided into; never positive."""
        return float32(1)

    @inlined
    def value(self, t):
        """The function of t = slope (x + bias); at least 1 if the formula divides by it."""
        return t

    @inlined
    def value_at(self, x, slope, offset):
        """`value` of a number x, where offset is slope bias."""
        return self.value(x * slope + offset)

    @inlined
    def compute(self, x, rate, bias):
        """g of a tile, vector or number x."""
        value = self.value((x + bias) * self.slope(rate))
        return (reciprocal(value) if self.divides else value) * self.factor(rate)

    @inlined
    def derivatives(self, x, rate, bias):
        """(dg/dx, dg/dA_log) of a tile, vector or number x."""
        return float32(1), float32(0)

    @staticmethod
    def evaluate(library: Any, x: Any, rate: Any, number: float) -> Any:
        """g of x + dt_bias, an array of NumPy, torch or jax.numpy. number: the field's value."""
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

    name = "softplus"

    def __str__(self):
        return "softplus"

    @inlined
    def slope(self, rate):
        return float32(LOG2_E)

    @inlined
    def factor(self, rate):
        return rate * float32(-LN_2)

    @inlined
    def value(self, t):
        return log2_of_sum(t)

    @inlined
    def derivatives(self, x, rate, bias):
        return sigmoid(x + bias) * -rate, self.compute(x, rate, bias)

    @staticmethod
    def evaluate(library, x, rate, number):
        return -rate * softplus_of(library, x)


@static
class SigmoidFormula(GateFormula):
    """g = lower sigmoid(exp(A_log) (x + dt_bias)): gates that are bounded below."""

    name = "sigmoid"
    divides = True
    lower: float = -5.0

    def __str__(self):
        return f"{self.lower} sigmoid"

    @property
    def lowest(self):
        """The least gate that there is."""
        return self.lower

    @inlined
    def slope(self, rate):
        return rate * float32(-LOG2_E)

    @inlined
    def factor(self, rate):
        return float32(self.lower)

    @inlined
    def value(self, t):
        return exp2(t) + float32(1)

    @inlined
    def derivatives(self, x, rate, bias):
        z = (x + bias) * rate
        of_x = sigmoid(z) * sigmoid(-z) * (rate * float32(self.lower))  # 1 - sigmoid(z) would lose digits where z is large
        return of_x, of_x * (x + bias)

    @staticmethod
    def evaluate(library, x, rate, number):
        return number * sigmoid_of(library, rate * x)


@static
class LogSigmoidFormula(GateFormula):
    """g = log(sigmoid(x + dt_bias)) / divisor: gated linear attention."""

    name = "logsigmoid"
    divisor: float = 16.0

    def __str__(self):
        return f"logsigmoid / {self.divisor}"

    @inlined
    def slope(self, rate):
        return float32(-LOG2_E)

    @inlined
    def factor(self, rate):
        return float32(-LN_2 / self.divisor)

    @inlined
    def value(self, t):
        return log2_of_sum(t)

    @inlined
    def derivatives(self, x, rate, bias):
        return sigmoid(-(x + bias)) * float32(1 / self.divisor), float32(0)

    @staticmethod
    def evaluate(library, x, rate, number):
        return -softplus_of(library, -x) / number


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


def softplus_of(library: Any, x: Any) -> Any:
    """log(1 + exp(x)) of an array of this library, NumPy, torch or jax.numpy."""
    if library.__name__ == "torch":  # one kernel, and one of its gradient
        return library.nn.functional.softplus(x)
    return library.logaddexp(x, library.zeros_like(x))


def sigmoid_of(library: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)) of an array of this library."""
    if library.__name__ == "torch":
        return library.sigmoid(x)
    return library.exp(-softplus_of(library, -x))


PLAIN_BETA = BetaFormula()
GATE_FORMULAS: dict[str, type[GateFormula]] = {x.name: x for x in (SoftplusFormula, SigmoidFormula, LogSigmoidFormula)}
FORMULAS: tuple[GateFormula, ...] = tuple([formula() for formula in GATE_FORMULAS.values()])  # as models have them


def list_gates(*others: str) -> str:
    """The names of all gates, and then these, as errors list them: "softplus, sigmoid or logsigmoid"."""
    *names, last = *GATE_FORMULAS, *others
    return f"{', '.join(names)} or {last}"


@functools.lru_cache(256)
def make_gate_formula(name: str, number: float) -> GateFormula:
    """The formula of this name, with this number if it has a field: the same object for equal arguments."""
    formula = GATE_FORMULAS[name]
    return formula(*[number for _ in fields(formula)])
