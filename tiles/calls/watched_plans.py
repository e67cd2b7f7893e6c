"""Plans as functions of lengths (lengths.py): what a program keeps of them, and which lengths change from call to call.

Most of what such a function is given is the same in every call: generation adds a key with each token, while the heads,
columns, strides and batch of its caches stay. So once calls were seen to differ in a few variables only, the function is
narrowed to these. That leaves a fifth of its lines, and they become part of a function that has torch compare everything else
at once (remembered_calls.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..launching.lengths import Trace
from . import remembered_calls
from .plan import PreparedCall

MOST, TRIES = 12, 4  # the most variables that a function is narrowed to; how often it is narrowed anew, to more of them


class Variable(NamedTuple):
    """A variable of the function: its name, the place of its array, and what it says of that array: an extent (part 0) or a
    stride (1) of an axis, or how far the address lies past a multiple of ALIGNMENT (2)."""

    name: str
    place: int
    part: int
    axis: int = 0

    def of(self, lengths: Sequence[Any]) -> int:
        """Its value in a call, from what Program._read read of the arrays."""
        length = lengths[self.place][self.part]
        return length if self.part == remembered_calls.PAST else length[self.axis]


class TracedPlan:
    """A plan as a function of lengths. It holds for calls in which the planner would take the same turns.

    last: what was read of the last call that it served. free: the variables in which its calls were seen to differ. call: the
    guarded function for calls that differ in these alone (remembered_calls.py), or None. tries: how often `call` may still be
    replaced by a function of more variables."""

    def __init__(self, trace: Trace, pattern: str, variables: Sequence[Variable], plan: PreparedCall):
        self.trace, self.plan, self.variables = trace, plan, variables
        self.function: Callable[[Any], PreparedCall | None] = trace.function(pattern, plan)
        self.last: Any = None
        self.free: list[Variable] = []
        self.call: Callable[..., Any] | None = None
        self.tries = TRIES

    def grow(self, names: Sequence[str], known: PreparedCall, arrays: Sequence[Any], lengths: Sequence[Any]) -> Callable | None:
        """The guarded function for calls that differ from this one as this one differs from those before; None if there is
        none. known: what is known of this call."""
        last, self.last = self.last, lengths
        if last is None or self.tries == 0:
            return self.call
        before, call = self.free, self.call  # another thread may replace them meanwhile
        free = [one for one in self.variables if one in before or one.of(last) != one.of(lengths)]
        if call is not None and free == before:  # it serves this call, too, but was not expected
            return call
        self.free, self.tries = free, self.tries - 1
        if not free or len(free) > MOST or remembered_calls.PAST in [one.part for one in free]:
            return self.call
        fixed = {one.name: one.of(lengths) for one in self.variables if one not in free}
        plan = self.trace.narrowed([one.name for one in free], fixed, self.plan)
        self.call = plan and remembered_calls.guarded(names, known, arrays, lengths, [one[1:] for one in free], plan)
        return self.call
