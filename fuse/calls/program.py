"""The tiles.calls.program.Program of a definition: the schema of its arrays, and the planner that returns the launches of the
best plan. One program serves all arrays of the same kinds, whatever their lengths."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiles.calls.plan import Plan
from tiles.calls.program import Program
from tiles.calls.schema import Schema
from tiles.calls.torch_op import ascii_name
from tiles.launching.arrays import Operand
from tiles.launching.checks import Check, check_options
from tiles.launching.recording import RecordedStep, record_launches

from ..language import graph, terms
from ..language.axes import derive_extent
from ..language.graph import extents_at
from ..language.maps import BYTES, CASTS, FP8, MAPS
from ..language.names import array, unused
from ..language.terms import Term
from ..language.trace import Shape, TracedDefinition
from ..planning.definition import Definition, NoKernel
from ..planning.generated_module import GeneratedModule
from ..planning.length_classes import axis_roles, known_extents
from ..writing import module_text
from .call_arguments import index_value_check
from .early_launch import EarlyLaunch, memory_of

FLOATS = ("bfloat16", "float16", "float32")
PROGRAMS: set[str] = set()  # the names of all programs; torch's ops have these, too
HOLDS = {name: name for name in FLOATS} | {FP8: "fp8", "int8": "int8"}  # {dtype: its name in a schema (tiles/calls/schema.py)}


class FusedProgram(Program):
    """The program of a definition. results: how many it has. single: does it return one array, not a tuple? dtypes: those of
    results that do not depend on the arguments' dtype, "" where they have the first argument's."""

    def __init__(self, schema: Schema, planner: Callable[..., Plan], traced: TracedDefinition, gradient: Callable):
        super().__init__(schema, planner, gradient)
        self.results, self.single = len(traced.roots), traced.single
        self.no_outs = (None,) * self.results
        self.dtypes = [x.stored_dtype("") for x in traced.roots]


def program_of(function: Definition, shapes: tuple[Shape, ...], gradient: Callable[..., Callable]) -> FusedProgram:
    """The program for arrays of these shapes, in which only extents of 1 mean anything. gradient: gradient(outs, names,
    options, layout), which JAX calls (see tiles.calls.program), `outs` being the names of the results. TypeError: kernels do
    not take one of the dtypes."""
    traced = function._trace(shapes)
    arrays = {name: s for name, s in zip(function.names, shapes) if s.extents}
    numbers = [name for name, s in zip(function.names, shapes) if not s.extents]
    refuse_dtypes(traced, arrays)
    name = unused(ascii_name(function.name), PROGRAMS)
    PROGRAMS.add(name)
    schema, undetermined = schema_of(name, traced, arrays)

    def planner(problem, *values):
        extents = iter([problem[name].form.shape for name in arrays])
        exact = tuple([s._replace(extents=next(extents)[:: -1 if s.transposed else 1]) if s.extents else s for s in shapes])
        plan = plan_launches(function, problem, exact, dict(zip(numbers, values)))
        if undetermined:
            raise NoKernel(f"{function.name}: the extents of a result must follow from the arguments: {undetermined[0]!r:.200}")
        return plan

    names = (unused("problem", numbers), *numbers)
    parameters = [inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in names]
    planner.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    planner.__annotations__ = dict.fromkeys(numbers, float)
    return FusedProgram(schema, planner, traced, functools.partial(gradient, traced.outs))


# ---- the schema ------------------------------------------------------------------------------------------------------
def schema_of(name: str, traced: TracedDefinition, arrays: Mapping[str, Shape]) -> tuple[Schema, list[Term]]:
    """(the schema of the arguments that are arrays, and of the results; the results with an axis whose extent is unknown). A
    result has axes of the arguments, of length 1, and such as follow from these: see axes.derive_extent."""
    inputs = dict(traced.inputs)
    names = graph.axis_names(*[inputs[name] for name in arrays], *traced.roots)
    argument_axes, result_axes = names[: len(arrays)], names[len(arrays) :]
    known = {
        axis.root: axis_name
        for name, axes in zip(arrays, argument_axes)
        for axis, axis_name in zip(inputs[name].axes, axes)
        if axis
    }
    extents: dict[str, Any] = dict.fromkeys({axis_name for axes in result_axes for axis_name in axes} - {*known.values()}, 1)
    undetermined = dict[Term, None]()
    for x, axes in zip(traced.roots, result_axes):
        for axis, axis_name in zip(x.axes, axes):
            if axis is not None and axis.root not in known:
                extent = derive_extent(axis, known, traced.table.splits)
                extents |= {axis_name: extent} if extent else {}
                undetermined |= {} if extent else {x: None}
    roles = dict(zip(inputs, axis_roles(traced)))
    vary = [axis for name, axes in zip(arrays, argument_axes) for axis, role in zip(axes, roles[name]) if role]
    return Schema(name, "\n".join(_schema_rows(traced, arrays, argument_axes, result_axes)), vary, **extents), [*undetermined]


def _schema_rows(
    traced: TracedDefinition,
    arrays: Mapping[str, Shape],
    argument_axes: Sequence[tuple[str, ...]],
    result_axes: Sequence[tuple[str, ...]],
) -> list[str]:
    """A row of the schema for each argument and each result: its name, its axes, its dtype. Results that are no casts have the
    dtype of the first argument."""
    first, *others = [s.dtype for s in arrays.values()]
    like_first = "float32" if first == "float32" else "tile"
    named = {**dict.fromkeys(terms.INDEX, "index"), FP8: "fp8", "int8": "int8"}
    holds = [like_first, *(named.get(dtype, "real") for dtype in others)]
    rows = [f"{name} ({', '.join(axes)}) {dtype_word}" for name, axes, dtype_word in zip(arrays, argument_axes, holds)]
    for name, axes, x in zip(traced.outs, result_axes, traced.roots):
        dtype_word = HOLDS[x.stored_dtype("")] if x.operation in CASTS else like_first
        rows.append(f"{name} ({', '.join(axes)}) {dtype_word} output")
    return rows


# ---- the plan --------------------------------------------------------------------------------------------------------
def plan_launches(function: Definition, problem: Any, shapes: tuple[Shape, ...], numbers: Mapping[str, float]) -> Plan:
    """The launches of the best plan for this problem. shapes: of all arguments. numbers: the arguments that are numbers, by
    name. NoKernel: no kernel serves these arrays."""
    best = function.best_plan(shapes, problem.device)
    traced, known = best.traced, known_extents(best.traced, shapes)
    generated = best.module(known)
    refuse_unaligned(function, problem, generated)
    operands: list[Any] = [problem[name] if s.extents else numbers[name] for name, s in zip(function.names, shapes)]
    operands += [problem[name] for name in generated.outs]
    scratch = [(extents_at(x, known), x.stored_dtype(problem.dtype)) for x in generated.scratch]
    operands += [problem.scratch(n, *one) for n, one in enumerate(scratch)]
    places = len(problem.schema.places) + len(scratch)
    try:
        steps, recorded_scratch = record_launches(
            module_text.load(generated.text, function.name, generated.code).launch, *operands, places=places
        )
    except (TypeError, ValueError) as error:  # TMA cannot address an array, or its dtype is not that of the kernel's tiles
        of_kernel = {array(parameter): name for parameter, name in zip(generated.names, function.names)}
        message = re.sub(r"\bg[A-Z]\w*", lambda traced: of_kernel.get(traced[0], traced[0]), str(error))
        raise NoKernel(f"{function.name}: {message}") from None
    overlaps = iter(generated.overlaps_previous)
    steps = [_bind_overlap(step, next(overlaps), operands) if step.overlaps else step for step in steps]
    checks = index_checks(traced, problem) if problem.device is None or check_options().values else []
    return Plan([*checks, *steps], [*scratch, *recorded_scratch])


def index_checks(traced: TracedDefinition, problem: Any) -> list[Check]:
    """The step that refuses indices out of range; none if no argument is an index."""
    places = problem.schema.places
    counts = index_bounds(traced)
    rows = [(name, places[name], problem[name].form, index_value_check(name, n)) for name, n in counts.items()]
    return [Check(rows, {})] if rows else []


def index_bounds(traced: TracedDefinition) -> dict[str, int]:
    """{argument that is an index: how many things it chooses among}."""
    return {x.attr[0]: among for x, (_, among) in graph.indices(traced.roots).items()}


def _bind_overlap(step: RecordedStep, places: tuple[Sequence[int], Sequence[int]] | None, operands: Sequence[Operand]) -> Any:
    """The launch of a kernel, as a step that overlaps the previous launch if the kernel may. places: what it reads before it
    waits and what it writes, one of GeneratedModule.overlaps_previous."""
    if places is None:
        return step
    return EarlyLaunch(step, *[[memory_of(operands[place]) for place in operand_places] for operand_places in places])


# ---- checks ----------------------------------------------------------------------------------------------------------
def refuse_dtypes(traced: TracedDefinition, arrays: Mapping[str, Shape]) -> None:
    """TypeError: an argument has a dtype that kernels do not compute with. The first must be one of FLOATS. Others may also be
    fp8 or int8, and other integers where they are only an index or dropout's seed."""
    inputs, nodes = dict(traced.inputs), [*graph.walk(*traced.roots)]
    integers = {x.args[2] for x in nodes if x.operation == "dropout"} | {*graph.indices(traced.roots)}
    integers -= {y for x in nodes if x.operation in MAPS for y in x.args}
    first = next(iter(arrays))
    for name, s in arrays.items():
        if s.dtype not in FLOATS and (name == first or not (s.dtype in BYTES or inputs[name] in integers)):
            raise TypeError(f"{name}: dtype must be one of {FLOATS}: {name}.dtype={s.dtype!r}")


def refuse_unaligned(function: Definition, problem: Any, generated: GeneratedModule) -> None:
    """NoKernel: cp.async would copy 16 bytes from an address, or with a stride, that is no multiple of 16."""
    for x in (x for kernel in generated.kernels for x in getattr(kernel, "copied", ())):
        row = x.nbytes // math.prod(x.extents[:-1])
        vector_bytes = problem.bytes_at_once(x.attr[0]) if x.operation == "input" else row & 15 or 16
        if vector_bytes < 16:
            name = x.attr[0] if x.operation == "input" else repr(x)
            raise NoKernel(
                f"{function.name}: {name} must have an address and strides of multiples of 16 bytes, has {vector_bytes}"
            )
