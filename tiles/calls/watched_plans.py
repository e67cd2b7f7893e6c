"""Plans as functions of lengths (lengths.py): the functions that a program keeps, and which lengths change from call to call.

Most arguments of such a function are the same in every call: generation adds a key with each token, while the heads,
columns, strides and batch of its caches stay. So once calls were seen to differ in a few variables only, the function is
specialised to these. That leaves a fifth of its lines, and they become part of a function that has torch compare everything
else at once (remembered_calls.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..launching.lengths import Trace
from . import remembered_calls
from .plan import PreparedCall

MAX_FREE = 24  # the most variables that a function is specialised to: gradients of contiguous tensors have 13
TRIES = 4  # how often a specialised function is written: for more variables, or for another mode


class Variable(NamedTuple):
    """A variable of the function: its name, the place of its array, and the part of its form that it stands for: an extent
    (part 0) or a stride (1) of an axis, or how far the address lies past a multiple of ALIGNMENT (2)."""

    name: str
    place: int
    part: int
    axis: int = 0

    def value_in(self, lengths: Sequence[Any]) -> int:
        """The variable's value in a call. lengths: as Program._read returns them for the arrays."""
        length = lengths[self.place][self.part]
        return length if self.part == remembered_calls.MISALIGNMENT else length[self.axis]


class WatchedPlan:
    """A plan as a function of lengths. It holds for calls in which the planner would take the same branches.

    last: the lengths of the last call that it served. free: the variables in which its calls were seen to differ. calls: the
    guarded functions for calls that differ in these alone (remembered_calls.py): one for tensors that require grad, say, and
    one for those that do not. tries: how many may still be written."""

    def __init__(self, trace: Trace, pattern: str, variables: Sequence[Variable], plan: PreparedCall):
        self.trace, self.plan, self.variables = trace, plan, variables
        self.function: Callable[[Any], PreparedCall | None] = trace.function(pattern, plan)
        self.last: Any = None
        self.free: list[Variable] = []
        self.calls: list[Callable[..., Any]] = []
        self.tries = TRIES

    def write_guarded_call(
        self,
        names: Sequence[str],
        prepared: PreparedCall,
        arrays: Sequence[Any],
        lengths: Sequence[Any],
        declined: Sequence[Callable] = (),
    ) -> Callable | None:
        """The guarded function for calls that differ from this one as this one differs from those before; None if there is
        none. prepared: what is known of this call. declined: the functions that declined this call."""
        last, self.last = self.last, lengths
        free_before, calls = self.free, self.calls  # another thread may replace them meanwhile
        if last is None:
            return None
        free = [one for one in self.variables if one in free_before or one.value_in(last) != one.value_in(lengths)]
        others = [call for call in calls if call not in declined]  # which may serve this call, and were not expected
        if others and (self.tries == 0 or free == free_before):
            return others[0]
        if self.tries == 0 or not free:
            return None
        self.free, self.tries = free, self.tries - 1
        if len(free) > MAX_FREE or remembered_calls.MISALIGNMENT in [one.part for one in free]:
            return None
        fixed = {one.name: one.value_in(lengths) for one in self.variables if one not in free}
        plan = self.trace.specialize([one.name for one in free], fixed, remembered_calls.plan_values(self.plan))
        call = plan and remembered_calls.build_guarded_call(names, prepared, arrays, lengths, [one[1:] for one in free], plan)
        if call:
            self.calls = [*calls, call] if free == free_before else [call]
        return call
