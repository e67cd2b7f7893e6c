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

MOST = 24  # the most variables that a function is narrowed to: gradients of contiguous tensors have 13
TRIES = 4  # how often it is narrowed anew, to more of them, or written for another mode


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

    last: what was read of the last call that it served. free: the variables in which its calls were seen to differ. calls: the
    guarded functions for calls that differ in these alone (remembered_calls.py): one for tensors that require grad, say, and
    one for those that do not. tries: how many may still be written."""

    def __init__(self, trace: Trace, pattern: str, variables: Sequence[Variable], plan: PreparedCall):
        self.trace, self.plan, self.variables = trace, plan, variables
        self.function: Callable[[Any], PreparedCall | None] = trace.function(pattern, plan)
        self.last: Any = None
        self.free: list[Variable] = []
        self.calls: list[Callable[..., Any]] = []
        self.tries = TRIES

    def grow(
        self,
        names: Sequence[str],
        known: PreparedCall,
        arrays: Sequence[Any],
        lengths: Sequence[Any],
        declined: Sequence[Callable] = (),
    ) -> Callable | None:
        """The guarded function for calls that differ from this one as this one differs from those before; None if there is
        none. known: what is known of this call. declined: the functions that declined this call."""
        last, self.last = self.last, lengths
        before, calls = self.free, self.calls  # another thread may replace them meanwhile
        if last is None:
            return None
        free = [one for one in self.variables if one in before or one.of(last) != one.of(lengths)]
        others = [call for call in calls if call not in declined]  # which may serve this call, and were not expected
        if others and (self.tries == 0 or free == before):
            return others[0]
        if self.tries == 0 or not free:
            return None
        self.free, self.tries = free, self.tries - 1
        if len(free) > MOST or remembered_calls.PAST in [one.part for one in free]:
            return None
        fixed = {one.name: one.of(lengths) for one in self.variables if one not in free}
        plan = self.trace.narrowed([one.name for one in free], fixed, remembered_calls.values(self.plan))
        call = plan and remembered_calls.guarded(names, known, arrays, lengths, [one[1:] for one in free], plan)
        if call:
            self.calls = [*calls, call] if free == before else [call]
        return call
