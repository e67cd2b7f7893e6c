"""Calls recorded instead of made: what a function launches becomes part of a program.

    steps, scratch = record_launches(function, q, k, out, places=3)

The arguments are Operands, which stand for arrays of later calls. A launch is stored as a BoundLaunch; a call of another
program (such as attention.forward) adds all its steps. Each step gets the places of its arrays among those of the program that
it becomes part of, and its scratch memory is appended to that program's."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from .arrays import Operand, c_ordered


class RecordedStep(NamedTuple):
    """A step of a program. bound: a launch, or a step of another program. overlaps: is it a launch that overlaps the previous
    one? sources: for the 0th, 1st, ... array of the step, its place among those of the program. select: the function from the
    program's addresses to these."""

    bound: Any
    overlaps: bool
    sources: tuple[int, ...]
    select: Callable[[Sequence[int]], tuple[int, ...]]

    @classmethod
    def from_places(cls, bound: Any, sources: Sequence[int], overlaps: bool = False) -> RecordedStep:
        """The step whose arrays have these places among those of the program."""
        several = len(sources) > 1  # an itemgetter of one place gives no tuple
        select = itemgetter(*sources) if several else lambda addresses: tuple([addresses[place] for place in sources])
        return cls(bound, overlaps, tuple(sources), select)

    @property
    def of_lengths(self) -> bool:
        return getattr(self.bound, "of_lengths", False)

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        self.bound.run(stream, self.select(addresses))


class Recording:
    """The calls that were recorded so far. places: how many arrays the program has; `scratch`, (shape, dtype), follows them."""

    def __init__(self, places: int):
        self.places = places
        self.steps: list[RecordedStep] = []
        self.scratch: list[tuple[tuple[int, ...], str]] = []

    def memory(self, shape: tuple[int, ...], dtype: str, device: int | None) -> Operand:
        """Add scratch memory to the recording, and return its Operand."""
        self.scratch.append((shape, dtype))
        return Operand(self.places + len(self.scratch) - 1, c_ordered(shape, dtype, device))


_recording: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("recording", default=None)
now = _recording.get  # the current Recording, or None


def record_launches(
    function: Callable, *args: Any, places: int
) -> tuple[list[RecordedStep], list[tuple[tuple[int, ...], str]]]:
    """(the steps that function(*args) would launch, some of the arguments being Operands; the scratch memory that they need
    behind the `places` arrays of the program)"""
    recording = Recording(places)
    token = _recording.set(recording)
    try:
        function(*args)
    finally:
        _recording.reset(token)
    return recording.steps, recording.scratch


# ---- programs that are called while a Recording is current: as torch_op.py and jax_call.py
# ----------------------------------------------
def serves(arrays: tuple, program: Any) -> bool:
    """Are these Operands, of a call that is to be recorded?"""
    return now() is not None and any(isinstance(x, Operand) for x in arrays)


def call(program: Any, stream: Any, arrays: tuple, options: tuple, layout: str) -> Any:
    """Record the program's steps, and return Operands; results that the caller leaves out lie in scratch memory."""
    recording = now()
    assert recording is not None
    if stream is not None:
        raise TypeError("stream: must be None in a call that is recorded: it runs on that of the program")
    operands = {name: x for name, x in zip(program.names, arrays) if x is not None}
    forms = {name: program.schema.with_lengths(name, x.form, layout) for name, x in operands.items()}
    device = arrays[0].form.device
    problem, (steps, scratch, make_result), results = program.steps(forms, device, options, layout)
    for name in results:
        if name not in operands:
            shape, dtype = problem.result_form(name)
            operands[name] = recording.memory(shape, dtype, device)
    all_operands = [*map(operands.get, program.names), *(recording.memory(shape, dtype, device) for shape, dtype in scratch)]
    sources = [x.source if x else 0 for x in all_operands]  # what is left out no step asks for
    recording.steps += [RecordedStep.from_places(step, sources) for step in steps]
    outputs = tuple(operands[name] for name in results)
    return make_result(all_operands) if make_result else outputs[0] if len(outputs) == 1 else outputs
