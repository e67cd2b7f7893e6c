"""Functions that are called often: what decides a call is looked up, and only launches are left.

    SCALED = Schema("scaled", '''
        x    SD  float32
        out  SD  float32  made
    ''')

    @program(SCALED)
    def _scaled(problem, factor) -> Plan:
        ...  # further checks, and launches: ValueError, TypeError
        return Plan([kernel.bind(blocks, gX=problem["x"], gOut=problem["out"], factor=factor)], ("out",))

    def scaled(x, *, factor=1.0, out=None, stream=None):
        return _scaled(stream, (x, out), (factor,))

From the *forms* of a call's arrays (shape, strides, dtype, device, alignment) and its options follows everything but addresses:
what is computed, by which launches, what is made, and what is given back. So a call of a known form reads its arrays, looks the
form up, writes their addresses into the launches' parameter blocks and calls the driver. One of a new form is checked and
planned; what was refused is never remembered. Where a framework traces the call instead of making it
(torch.compile, jax.jit), it is given an op that stands for it (torch_op.py, jax_call.py).

A **program** is its launches, one behind the other on the caller's stream, and the scratch memory between them, which comes
from the caller's allocator. Nothing waits for the device, so that all of it may be captured in a CUDA graph.

Any number of threads may call at once: what is remembered does not change, and what two of them forget is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from . import jax_call, torch_op
from .arrays import Operand, ascending, fill
from .frameworks import Kind, describe, kind_of, stream_handle
from .schema import Schema

ENTRIES = 4096  # forms of calls that are remembered, of all programs together: some 10 KB each


class Step(Protocol):
    """A launch of a program, or what it does instead: Bound, Interpreted, Fill."""

    def run(self, stream: int, addresses: Sequence[int]) -> None: ...


class Plan(NamedTuple):
    """How calls of one form are done: steps, the names of what the caller gets back (one array by itself, several as a tuple),
    and scratch memory, uninitialised and C-ordered: the shape and dtype of each (see Problem.scratch)."""

    steps: Sequence[Step]
    give: tuple[str, ...]
    scratch: Sequence[tuple[tuple[int, ...], str]] = ()


class Fill:
    """A step that gives all elements of an array one value."""

    def __init__(self, operand: Operand, value: float):
        self.operand, self.value = operand, value

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """At this stream and these addresses."""
        fill(addresses[self.operand.source], self.operand.form, self.value, stream)


class Recent:
    """A table that forgets what was not used for longest. It has two generations: what is asked for again moves to the younger
    one, and when that is full the older one goes. A hit costs one lookup, and any number of threads may use it at once."""

    def __init__(self, entries: int):
        self.half = entries // 2
        self.young: dict[Any, Any] = {}
        self.old: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        """What was put under the key, or None."""
        found = self.young.get(key)
        if found is None and (found := self.old.pop(key, None)) is not None:
            self.put(key, found)
        return found

    def put(self, key: Any, value: Any) -> None:
        """Remember it."""
        if len(self.young) >= self.half:
            self.young, self.old = {}, self.young
        self.young[key] = value

    def __len__(self) -> int:
        return len(self.young) + len(self.old)


KNOWN = Recent(ENTRIES)


class _Known(NamedTuple):
    """What calls of a form have in common. It keeps no array alive.

    makers: (the place of an array, what makes it). apart: (places of two arrays that must not share memory, their names, their
    forms, the two distances between which they might)."""

    kind: Kind
    device: int | None
    makers: list[tuple[int, Callable[[], Any]]]
    apart: list[tuple]
    steps: Sequence[Step]
    give: Callable[[Sequence[Any]], Any]


def program(schema: Schema) -> Callable[[Callable[..., Plan]], Program]:
    """Make a planner a function of (stream, arrays, options, layout), the arrays being those of the schema.

    The planner is called with the Problem and the options; it raises ValueError or TypeError, or returns a Plan."""
    return lambda planner: Program(schema, planner)


class Program:
    """What `program` makes: `function(stream, arrays, options, layout)`.

    stream: a handle or a stream object; None is the current one of the first array's framework. What is made belongs to the
    stream as if it were the current one. arrays: one for each name of the schema, or None. options: a tuple of what else
    decides a call; those that are equal must mean the same (True, 1 and 1.0 are equal)."""

    def __init__(self, schema: Schema, planner: Callable[..., Plan]):
        self.schema, self.planner, self.names = schema, planner, schema.names
        self.needed = [(name, argument.needed) for name, argument in schema.arguments.items()]
        self.readers: dict[type, Callable] = {}
        self.op = torch_op.named(self)
        self.options = tuple(signature(planner).parameters)[1:]  # their names

    def __call__(self, stream: Any, arrays: tuple, options: tuple, layout: str = "bshd") -> Any:
        if torch_op.traced(arrays[0]):
            return torch_op.call(self, stream, arrays, options, layout)
        try:
            return self.run(stream, arrays, options, layout)
        except TypeError:  # it may be that these are no arrays yet
            ways = [way for way in (torch_op, jax_call) if way.serves(arrays, self)]
            if not ways:
                raise
        return ways[0].call(self, stream, arrays, options, layout)

    def run(self, stream: Any, arrays: tuple, options: tuple, layout: str) -> Any:
        """A call on arrays in memory."""
        read = self.readers.get(type(arrays[0])) or self._reader(arrays[0])
        try:
            forms, addresses, held = read(*arrays)
        except (AttributeError, RuntimeError, TypeError):  # not all are tensors in memory: `describe` says what is wrong
            forms, addresses, held = self._read(*arrays)
        key = self, forms, options, layout
        try:
            known = KNOWN.get(key)
        except TypeError:  # an option that cannot be looked up, such as a list
            known = None
        if known is None:
            known = self._learn(held or self._described(arrays), options, layout)
            KNOWN.put(key, known)
        current = 0 if known.device is None else known.kind.stream(arrays[0], known.device)
        handle = current if stream is None else stream_handle(stream)
        for a, b, (name, other), pair, low, high in known.apart:
            if low < addresses[b] - addresses[a] < high:
                self.schema.check_apart(name, other, (addresses[a], addresses[b]), pair)
        every: Sequence[Any] = arrays
        if known.makers:
            every, addresses = [*arrays], [*addresses]
            for place, make in known.makers:
                new = make() if handle == current else known.kind.make_on(handle, known.device, make)
                if place < len(arrays):
                    every[place], addresses[place] = new, known.kind.address(new)
                else:  # scratch: kept until all steps are on the stream
                    every.append(new)
                    addresses.append(known.kind.address(new))
        for step in known.steps:
            step.run(handle, addresses)
        if known.kind.waits and known.device is not None:
            known.kind.finish(handle)
        return known.give(every)

    def _described(self, arrays: tuple) -> list:
        """An Array for each, or None; TypeError that names one that is no array, or is missing."""
        return [
            None if x is None and not needed else describe(x, name)
            for x, (name, needed) in zip(arrays, self.needed, strict=True)
        ]

    def _read(self, *arrays: Any) -> tuple:
        """(what these arrays share with others of their forms, their addresses, what must live until the call has ended)."""
        described = self._described(arrays)
        first = described[0]
        forms = (first.kind, first.kind.home(first), *[a and a.form for a in described])
        return forms, [a.pointer if a else 0 for a in described], described

    def _reader(self, first: Any) -> Callable:
        """How calls with a first array of this type are read."""
        reader = kind_of(first, self.names[0]).reader(self.names)
        return self.readers.setdefault(type(first), reader or self._read)

    def _learn(self, described: list, options: tuple, layout: str) -> _Known:
        given = {name: array.form for name, array in zip(self.names, described) if array}
        problem = self.schema.problem(given, layout)
        steps, give, scratch = self.planner(problem, *options)
        first, order = described[0], self.schema.places
        kind, home = first.kind, first.kind.home(first)
        makers = [(order[name], kind.maker(home, *problem.made(name))) for name in give if name not in given]
        makers += [(place, kind.maker(home, *what)) for place, what in enumerate(scratch, len(order))]
        apart = []
        for pair in self.schema.apart(given):
            forms = tuple(given[name] for name in pair)
            (first_at, mine), (last_at, its) = map(ascending, forms)
            shift = first_at - last_at
            apart.append((order[pair[0]], order[pair[1]], pair, forms, shift - its.extent, shift + mine.extent))
        return _Known(kind, first.device, makers, apart, steps, itemgetter(*[order[name] for name in give]))
