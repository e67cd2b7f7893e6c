"""How a definition becomes a program (tiles/program.py): the schema of its arrays, and the planner that returns the launches of
the best way. One program serves all arrays of the same kinds, whatever their lengths."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiles.arrays import Operand
from tiles.checks import Check, asked
from tiles.plan import Plan
from tiles.program import Program
from tiles.recording import RecordedStep, recorded
from tiles.schema import Schema
from tiles.torch_op import token

from . import graph, module, terms
from .axes import derive_extent
from .candidates import GeneratedModule
from .classes import axis_roles, extents_at, known_extents
from .definition import Definition, NoKernel
from .early import EarlyLaunch, memory_of
from .functions import CASTS, FP8, MAPS
from .given import index_values
from .names import array, unused
from .terms import Term
from .trace import Shape, TracedDefinition

FLOATS = ("bfloat16", "float16", "float32")
HOLDS = {name: name for name in FLOATS} | {FP8: "fp8"}  # a dtype, as a schema calls it (tiles/schema.py)


class FusedProgram(Program):
    """The program of a definition. results: how many it has. single: does it return one, not a tuple of one? dtypes: those that
    results have whatever the arguments have, "" where they follow the first argument."""

    def __init__(self, schema: Schema, planner: Callable[..., Plan], found: TracedDefinition, gradient: Callable):
        super().__init__(schema, planner, gradient)
        self.results, self.single = len(found.roots), found.single
        self.dtypes = [x.stored_dtype("") for x in found.roots]


def program_of(function: Definition, shapes: tuple[Shape, ...], gradient: Callable[..., Callable]) -> FusedProgram:
    """The program for arrays of these shapes, whose extents say nothing but which are 1. gradient: gradient(outs, names,
    options, layout), what JAX asks for (see tiles.program), where the results are called `outs`. TypeError: a dtype is none
    that kernels take."""
    found = function._trace(shapes)
    arrays = {name: s for name, s in zip(function.names, shapes) if s.extents}
    numbers = [name for name, s in zip(function.names, shapes) if not s.extents]
    refuse_dtypes(found, arrays)
    name = unused(token(function.name), module.PROGRAMS)
    module.PROGRAMS.add(name)
    schema, beyond = schema_of(name, found, arrays)

    def planner(problem, *values):
        extents = iter([problem[name].form.shape for name in arrays])
        exact = tuple([s._replace(extents=next(extents)[:: -1 if s.transposed else 1]) if s.extents else s for s in shapes])
        plan = planned(function, problem, exact, dict(zip(numbers, values)))
        if beyond:
            raise NoKernel(f"{function.name}: a result must have axes of the arguments: {beyond[0]!r:.200}")
        return plan

    every = (unused("problem", numbers), *numbers)
    parameters = [inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in every]
    planner.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    planner.__annotations__ = dict.fromkeys(numbers, float)
    return FusedProgram(schema, planner, found, functools.partial(gradient, found.outs))


# ---- the schema ------------------------------------------------------------------------------------------------------
def schema_of(name: str, found: TracedDefinition, arrays: Mapping[str, Shape]) -> tuple[Schema, list[Term]]:
    """(the schema of the arguments that are arrays, and of the results; the results with an axis of which no extent is known).
    A result has axes of the arguments and of length 1, and such as follow from these: see axes.extent_from."""
    inputs = dict(found.inputs)
    letters = graph.axes(*[inputs[name] for name in arrays], *found.roots)
    given, made = letters[: len(arrays)], letters[len(arrays) :]
    known = {axis.root: one for name, its in zip(arrays, given) for axis, one in zip(inputs[name].axes, its) if axis}
    extents: dict[str, Any] = dict.fromkeys({*"".join(made)} - {*known.values()}, 1)
    beyond = dict[Term, None]()
    for x, its in zip(found.roots, made):
        for axis, one in zip(x.axes, its):
            if axis is not None and axis.root not in known:
                extent = derive_extent(axis, known, found.table.splits)
                extents |= {one: extent} if extent else {}
                beyond |= {} if extent else {x: None}
    roles = dict(zip(inputs, axis_roles(found)))
    vary = [one for name, its in zip(arrays, given) for one, role in zip(its, roles[name]) if role]
    return Schema(name, "\n".join(_schema_rows(found, arrays, given, made)), vary, **extents), [*beyond]


def _schema_rows(found: TracedDefinition, arrays: Mapping[str, Shape], given: Sequence[str], made: Sequence[str]) -> list[str]:
    """A row for each argument and each result: its name, its axes, what it holds. The first argument decides what results hold
    that are no casts."""
    first, *others = [s.dtype for s in arrays.values()]
    like_first = "float32" if first == "float32" else "tile"
    named = {**dict.fromkeys(terms.INDEX, "index"), FP8: "fp8"}
    holds = [like_first, *(named.get(dtype, "real") for dtype in others)]
    rows = [f"{name} {axes} {its}" for name, axes, its in zip(arrays, given, holds)]
    for name, axes, x in zip(found.outs, made, found.roots):
        rows.append(f"{name} {axes} {HOLDS[x.stored_dtype('')] if x.operation in CASTS else like_first} made")
    return rows


# ---- the plan --------------------------------------------------------------------------------------------------------
def planned(function: Definition, problem: Any, shapes: tuple[Shape, ...], numbers: Mapping[str, float]) -> Plan:
    """The launches of the best way, for this problem. shapes: of all arguments. numbers: those that are no arrays, by name.
    NoKernel: no kernel serves these arrays."""
    best = function.best_plan(shapes, problem.device)
    found, known = best.found, known_extents(best.found, shapes)
    made = best.module(known)
    refuse_unaligned(function, problem, made)
    operands: list[Any] = [problem[name] if s.extents else numbers[name] for name, s in zip(function.names, shapes)]
    operands += [problem[name] for name in made.outs]
    scratch = [(extents_at(x, known), x.stored_dtype(problem.dtype)) for x in made.scratch]
    operands += [problem.scratch(n, *one) for n, one in enumerate(scratch)]
    places = len(problem.schema.places) + len(scratch)
    try:
        steps, more = recorded(module.load(made.text, function.name, made.code).launch, *operands, places=places)
    except (TypeError, ValueError) as error:  # TMA cannot address them, or their dtype is not that of the kernel's tiles
        of_kernel = {array(its): name for its, name in zip(made.names, function.names)}
        said = re.sub(r"\bg[A-Z]\w*", lambda found: of_kernel.get(found[0], found[0]), str(error))
        raise NoKernel(f"{function.name}: {said}") from None
    early = iter(made.early)
    steps = [step if step.late is None else _early(step, next(early), operands) for step in steps]
    checks = index_checks(found, problem) if problem.device is None or asked().values else []
    return Plan([*checks, *steps], [*scratch, *more])


def index_checks(found: TracedDefinition, problem: Any) -> list[Check]:
    """The step that refuses an index which chooses what is not there; none if no argument is an index."""
    places = problem.schema.places
    among = index_bounds(found)
    rows = [(name, places[name], problem[name].form, index_values(name, n)) for name, n in among.items()]
    return [Check(rows, {})] if rows else []


def index_bounds(found: TracedDefinition) -> dict[str, int]:
    """The arguments that are indices, by name, and how many things each chooses among."""
    return {x.attr[0]: among for x, (_, among) in graph.indices(found.roots).items()}


def _early(step: RecordedStep, early: tuple[Sequence[int], Sequence[int]] | None, operands: Sequence[Operand]) -> Any:
    """The launch of a kernel, as a step that begins before the launch ahead of it has ended, if the kernel is one that may.
    early: see Chosen."""
    if early is None:
        return step
    return EarlyLaunch(step, *[[memory_of(operands[place]) for place in some] for some in early])


# ---- what is refused -------------------------------------------------------------------------------------------------
def refuse_dtypes(found: TracedDefinition, arrays: Mapping[str, Shape]) -> None:
    """TypeError: an argument has a dtype that kernels do not compute with. The first must be of FLOATS. Others may be of fp8,
    and of integers where they are an index or dropout's seed, and nothing else is computed from them."""
    inputs, every = dict(found.inputs), [*graph.walk(*found.roots)]
    integers = {x.args[2] for x in every if x.operation == "dropout"} | {*graph.indices(found.roots)}
    integers -= {y for x in every if x.operation in MAPS for y in x.args}
    first = next(iter(arrays))
    for name, s in arrays.items():
        if s.dtype not in FLOATS and (name == first or not (s.dtype == FP8 or inputs[name] in integers)):
            raise TypeError(f"{name}: dtype must be one of {FLOATS}: {name}.dtype={s.dtype!r}")


def refuse_unaligned(function: Definition, problem: Any, made: GeneratedModule) -> None:
    """NoKernel: cp.async would have to copy 16 bytes from an address, or with a stride, that is no multiple of 16."""
    for x in (x for kernel in made.kernels for x in getattr(kernel, "copied", ())):
        row = x.nbytes // math.prod(x.extents[:-1])
        pieces = problem.bytes_at_once(x.attr[0]) if x.operation == "input" else row & 15 or 16
        if pieces < 16:
            name = x.attr[0] if x.operation == "input" else repr(x)
            raise NoKernel(f"{function.name}: {name} must have an address and strides of multiples of 16 bytes, has {pieces}")
