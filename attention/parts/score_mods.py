"""Built-in functions of a score, each with all that there is of it: the option that asks for it, the equation and its
derivative for the reference, and what kernels do."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from ops import tanh
from tiles import inlined
from tiles.launching.arguments import FLOAT

from ..options import check_positive
from .variant import Variant


class BuiltinScoreMod(Variant, ABC):
    """A function of each score alone, s = f(s; value), where `value` is what a call passes as the argument `option`. That is a
    field of ScoreArguments and ScoreOptions (options.py), too; but softcap is a field of AttentionArguments, and decode names
    it, for decode's speed."""

    option: ClassVar[str]

    def check(self, value: Any) -> Any:
        """The value as ScoreOptions has it: a positive number, or None. TypeError, ValueError: it is wrong."""
        return check_positive(self.option, value)

    @abstractmethod
    def bind_unit(self, unit: float, value: Any) -> tuple[dict[str, float], float]:
        """({argument of the kernel: number}, the unit of the changed scores), for scores that come in this unit."""

    @abstractmethod
    def reference(self, x: np.ndarray, value: Any) -> tuple[np.ndarray, np.ndarray]:
        """(f(x), f'(x)) of scores in units of 1, in x's dtype."""

    @abstractmethod
    def score(self, s, ctx, key):
        """The changed scores, for kernels."""

    @abstractmethod
    def score_and_grad(self, s, ctx, key):
        """(the changed scores, their derivative by s), for kernels."""


class Softcap(BuiltinScoreMod):
    """cap tanh(s / cap), in units of the cap."""

    option = "softcap"

    def bind_unit(self, unit: float, value: float) -> tuple[dict[str, float], float]:
        return {"per_cap": unit / value}, value

    def reference(self, x: np.ndarray, value: float) -> tuple[np.ndarray, np.ndarray]:
        cap = x.dtype.type(value)
        y = np.tanh(x / cap)
        return cap * y, 1 - y * y

    @property
    def params(self) -> dict[str, Any]:
        """per_cap: the unit of the scores that come in, divided by the cap."""
        return {"per_cap": FLOAT}

    @inlined
    def score(self, s, ctx, key):
        return tanh(s * ctx.params.per_cap)

    @inlined
    def score_and_grad(self, s, ctx, key):
        """cap tanh(x / cap) has the derivative 1 - tanh(x / cap)^2."""
        s = self.score(s, ctx, key)
        return s, 1.0 - s * s


BUILTIN_SCORE_MODS = (Softcap(),)  # in the order in which they are applied
