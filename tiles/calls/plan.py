"""The results of planning: a Plan, its steps in order, and what calls of one form have in common (PreparedCall).

A planner returns a Plan (program.py). Everything that runs, writes or remembers plans imports these names from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ..launching.arrays import Form, Operand, fill
from ..launching.frameworks import Framework
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
    """The launches of all calls of one form. steps: the launches, in order. scratch: ArrayViews first, then the shape and dtype
    of each scratch array (see Problem.scratch), uninitialised and C-ordered. make_result: a function from all arrays of the
    schema, and the scratch arrays behind them, to the value that the caller gets; by default the schema's results, one as an
    array, several as a tuple."""

    steps: Sequence[Step]
    scratch: Sequence[ArrayView | tuple[tuple[int, ...], str]] = ()
    make_result: Callable[[Sequence[Any]], Any] | None = None


def return_none(all_arrays: Sequence[Any]) -> None:
    """The `make_result` of a Plan all of whose results are written into arrays of the caller's: None."""


class Fill(NamedTuple):
    """A step that gives all elements of an array one value."""

    operand: Operand
    value: float

    @property
    def of_lengths(self) -> bool:
        return True

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        fill(addresses[self.operand.source], self.operand.form, self.value, stream)


class LruTable:
    """A table that drops the entries least recently used. It has two generations: an entry that is looked up moves to the
    younger one, and when that is full the older one is dropped. A hit costs one lookup. Any number of threads may use it at
    once."""

    def __init__(self, entries: int):
        self.half = entries // 2
        self.young: dict[Any, Any] = {}
        self.old: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        """The value stored under the key, or None."""
        value = self.young.get(key)
        if value is None and self.old and (value := self.old.pop(key, None)) is not None:
            self.put(key, value)
        return value

    def put(self, key: Any, value: Any) -> None:
        """Store the value under the key."""
        if len(self.young) >= self.half:
            self.young, self.old = {}, self.young
        self.young[key] = value

    def __len__(self) -> int:
        return len(self.young) + len(self.old)


class PreparedCall(NamedTuple):
    """What calls of one form have in common. It keeps no array alive.

    allocators: (the place of an array, the function that allocates it). parts: (the place of an array, bytes) of each
    ArrayView. scratch_offsets: how far the second and further scratch arrays lie after the first, in one allocation. disjoint:
    (the places of two arrays that must not share memory, and the two distances of their addresses between which they would)."""

    kind: Framework
    device: int | None
    allocators: list[tuple[int, Callable[[], Any]]]
    parts: Sequence[ArrayView]
    scratch_offsets: Sequence[int]
    disjoint: list[tuple]
    steps: Sequence[Step]
    make_result: Callable[[Sequence[Any]], Any]


class ProgramProtocol(Protocol):
    """The members of a program (program.Program) that recording.py, torch_op.py and jax_call.py read; it hands its calls to
    them."""

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
