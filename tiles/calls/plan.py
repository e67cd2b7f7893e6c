"""What a call comes to: a Plan, its steps in order, and what calls of one form have in common (PreparedCall).

A planner returns a Plan (program.py). Everything that runs, writes or remembers plans imports these names from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ..launching.arrays import Form, Operand, fill
from ..launching.frameworks import Kind
from .schema import Schema


class Step(Protocol):
    """A launch of a program, or what it does instead: Bound, Interpreted, Fill, Check.

    One that has a true attribute `of_lengths` is a tuple, or was made by lengths.made: a function of lengths may make it."""

    def run(self, stream: int, addresses: Sequence[int]) -> None: ...


class ArrayView(NamedTuple):
    """A view into an array of the call or into a result, from so many bytes on. Views stand first among a plan's scratch
    memory: they have no memory of their own, but their addresses have places there."""

    source: int
    offset: int


class Plan(NamedTuple):
    """What calls of one form do. steps: the launches, in order. scratch: ArrayViews first, then the shape and dtype of each
    scratch array (see Problem.scratch), uninitialised and C-ordered. give: makes what the caller gets back, from all arrays
    of the schema and the scratch arrays behind them; by default it is what the schema says, one array by itself, several as a
    tuple."""

    steps: Sequence[Step]
    scratch: Sequence[ArrayView | tuple[tuple[int, ...], str]] = ()
    give: Callable[[Sequence[Any]], Any] | None = None


def nothing(all_arrays: Sequence[Any]) -> None:
    """A Plan's `give` if all results are written into arrays that were given."""


class Fill(NamedTuple):
    """A step that gives all elements of an array one value."""

    operand: Operand
    value: float

    @property
    def of_lengths(self) -> bool:
        return True

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        fill(addresses[self.operand.source], self.operand.form, self.value, stream)


class Recent:
    """A table that forgets what was not used for the longest time. It has two generations: what is asked for moves to the
    younger one, and when that is full the older one goes. A hit costs one lookup. Any number of threads may use it at once."""

    def __init__(self, entries: int):
        self.half = entries // 2
        self.young: dict[Any, Any] = {}
        self.old: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        """What was put under the key, or None."""
        value = self.young.get(key)
        if value is None and self.old and (value := self.old.pop(key, None)) is not None:
            self.put(key, value)
        return value

    def put(self, key: Any, value: Any) -> None:
        """Remember the value under the key."""
        if len(self.young) >= self.half:
            self.young, self.old = {}, self.young
        self.young[key] = value

    def __len__(self) -> int:
        return len(self.young) + len(self.old)


class PreparedCall(NamedTuple):
    """What calls of one form have in common. It keeps no array alive.

    makers: (the place of an array, the function that allocates it). parts: (the place of an array, bytes) of each ArrayView.
    beyond: how far the second and further scratch arrays lie after the first, in one allocation. disjoint: (the places of
    two arrays that must not share memory, and the two distances of their addresses between which they would)."""

    kind: Kind
    device: int | None
    makers: list[tuple[int, Callable[[], Any]]]
    parts: Sequence[ArrayView]
    beyond: Sequence[int]
    disjoint: list[tuple]
    steps: Sequence[Step]
    give: Callable[[Sequence[Any]], Any]


class AnyProgram(Protocol):
    """What recording.py, torch_op.py and jax_call.py ask of a program (program.Program), which hands its calls to them."""

    schema: Schema
    names: tuple[str, ...]
    options: tuple[str, ...]
    planner: Callable[..., Plan]
    option_types: dict[str, Any]
    gradient: Callable | None
    no_gradient: str | None
    op: Callable[[], tuple[str, list[int], list[int]]]

    def run(self, stream: Any, arrays: tuple, options: tuple, layout: str, eager: bool = False) -> Any: ...

    def steps(self, forms: dict[str, Form], device: int | None, options: tuple, layout: str) -> tuple: ...
