"""Functions of lengths (lengths.py) as programs keep them, and what of the lengths changes from call to call.

Of all that a function of lengths is given, most is the same in call after call: generation makes a key more each token, and its
caches' heads, columns, strides and batch stay. So where calls were seen to differ in a few variables the function is narrowed
to these, which is a fifth of its lines, and becomes part of a function that asks torch for the rest at once (again.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import again
from .lengths import Trace

if TYPE_CHECKING:
    from .program import Known

MOST, TRIES = 12, 4  # variables that a function is narrowed to; how often that is done, with more of them each time


class Variable(NamedTuple):
    """A number of a function: its name, the place of the array that it is of, and which of what is read of that: an extent (0),
    a stride (1), both of an axis, or what its address is past a multiple of ALIGNMENT (2)."""

    name: str
    place: int
    part: int
    axis: int = 0

    def of(self, lengths: Sequence[Any]) -> int:
        """Its value, of what was read of a call's arrays (Program._read)."""
        found = lengths[self.place][self.part]
        return found if self.part == again.PAST else found[self.axis]


class Turns:
    """A function of lengths, which holds for calls that take the turns of the one that was planned.

    last: what was read of its last call. free: the variables in which its calls were seen to differ. call: what serves calls
    that differ in these alone (again.py), None if nothing does. tries: how often that may still be made."""

    def __init__(self, trace: Trace, pattern: str, variables: Sequence[Variable], plan: Known):
        self.trace, self.plan, self.variables = trace, plan, variables
        self.function: Callable[[Any], Known | None] = trace.function(pattern, plan)
        self.last: Any = None
        self.free: list[Variable] = []
        self.call: Callable[..., Any] | None = None
        self.tries = TRIES

    def grow(self, names: Sequence[str], known: Known, arrays: Sequence[Any], lengths: Sequence[Any]) -> Callable | None:
        """What serves calls that differ from this one as it does from those before, known being what is known of it; None:
        nothing does."""
        last, self.last = self.last, lengths
        if last is None or self.tries == 0:
            return self.call
        self.tries -= 1
        self.free = [one for one in self.variables if one in self.free or one.of(last) != one.of(lengths)]
        if not self.free or len(self.free) > MOST or again.PAST in [one.part for one in self.free]:
            return self.call
        fixed = {one.name: one.of(lengths) for one in self.variables if one not in self.free}
        plan = self.trace.narrowed([one.name for one in self.free], fixed, self.plan)
        self.call = plan and again.made(names, known, arrays, lengths, [one[1:] for one in self.free], plan)
        return self.call
