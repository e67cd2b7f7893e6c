"""Functions of arrays that become kernels: what `fuse.kernel` makes from a definition.

    @fuse.kernel
    def norm_linear(x, g, w):
        return (x * rsqrt(mean(x * x) + 1e-5) * g) @ w

A call traces the definition for the lengths of its arrays, finds the ways to compute it, takes the best and runs it as a
program (tiles/program.py): what is known about a form of arrays is looked up. Leading axes are rows where possible, so x may
be (..., k); otherwise they are batches and heads, as in NumPy (trace.rows_alone).
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tiles import cache, digest
from tiles.arrays import Operand, c_ordered
from tiles.checks import Check, asked
from tiles.compiler import Compiled, compile_kernel
from tiles.frameworks import describe
from tiles.jax_call import tracing
from tiles.launch import watchers
from tiles.program import Plan, Program
from tiles.recording import Recorded, recorded
from tiles.schema import Schema

from . import gradient, graph, language, module, place, terms, tune
from .candidates import Candidate, Chosen, candidates, chosen
from .cost import Card, card, card_of
from .early import Early
from .evaluate import InNumPy, evaluate
from .functions import CASTS, FP8, MAPS
from .given import as_rows, cast, dtype_of, in_order, index_values, refuse_index, written
from .proof import Proof, proven
from .terms import Term
from .trace import Shape, Traced, kinds_of, loose, ordinal_of, rows_alone, shape_of, traced

if TYPE_CHECKING:
    from .backward import Gradient

FLOATS = ("bfloat16", "float16", "float32")
NUMBERS = (bool, np.generic)  # which are numbers, but none that a kernel takes
NUMPY = (np.ndarray, int, float)
NAMED = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
HOLDS = {name: name for name in FLOATS} | {FP8: "fp8"}  # what a schema says of a dtype (tiles/schema.py)


class NoKernel(TypeError):
    """No template computes what a definition says; the message says why."""


class Fused:
    """A definition, and the kernels that it became. Call it like the definition."""

    def __init__(self, definition: Callable):
        functools.update_wrapper(self, definition)
        if not hasattr(definition, "__code__"):
            raise TypeError(f"fuse.kernel: must be given a Python function of arrays: {definition!r:.60}")
        name = definition.__name__
        self.definition, self.name = definition, name if name.isidentifier() else "fused"  # a lambda
        self.signature = inspect.signature(definition)
        self.names = list(self.signature.parameters)
        self.programs: dict[tuple, _Program] = {}
        self.prepare = _once(self.programs, self._made)
        self.gradients = gradient.Gradients(self)
        self.of_rows: dict[tuple, bool] = {}
        self.look = _once(self.of_rows, lambda shapes: rows_alone(self._trace(shapes).roots))

    # ---- calls -------------------------------------------------------------------------------------------------------
    def __call__(self, *given: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        """What the definition says of these arrays: NumPy's by the definition, in float32; a GPU's by the fused kernels.

        out: where the result goes, an array or, of several results, a tuple of them. stream: a handle or a stream object.
        TypeError, ValueError: the definition refuses these arrays, or a kernel does; each names the argument."""
        arrays = self._arguments(given, named)
        if all([isinstance(x, NUMPY) for x in arrays]):
            return self._by_definition(arrays, out)
        if gradient.wants_gradient(arrays):
            return self._differentiable(arrays, out, stream)
        return self.run(*arrays, out=out, stream=stream)

    def _arguments(self, arrays: Sequence[Any], named: dict[str, Any] | None = None) -> Sequence[Any]:
        """One for each of the definition's parameters; NumPy's numbers, and truth values, as Python's floats. TypeError: they
        are too few, or too many."""
        if len(arrays) != len(self.names) or named:
            try:
                bound = self.signature.bind(*arrays, **named or {})
            except TypeError as error:
                raise TypeError(f"{self.name}: {error}") from None
            bound.apply_defaults()
            arrays = bound.args
        if any([isinstance(x, NUMBERS) for x in arrays]):
            arrays = [float(x) if isinstance(x, NUMBERS) else x for x in arrays]
        return arrays

    def _differentiable(self, arrays: Sequence[Any], out: Any, stream: Any) -> Any:
        """Of torch's tensors that require grad."""
        if out is not None or stream is not None:
            raise TypeError("out, stream: must be None where a tensor requires grad")
        flat, lead = self._rows(arrays)
        results = gradient.differentiable(self, flat)
        if not lead:
            return results
        several = isinstance(results, tuple)
        shaped = tuple([x.reshape(*lead, x.shape[-1]) for x in (results if several else (results,))])
        return shaped if several else shaped[0]

    # ---- gradients ---------------------------------------------------------------------------------------------------
    @functools.cached_property
    def gradient(self) -> Gradient:
        """The gradient, as a fused function of the arguments and of the gradients with respect to the results (backward.py)."""
        return self.gradients.by_all()

    def _rows(self, arrays: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
        """Arrays whose leading axes are one, the rows, where they are no more than that; and the leading axes that there were,
        () if they stay."""
        deep = next((x for x in arrays if len(getattr(x, "shape", ())) > 2), None)
        if deep is None:
            return list(arrays), ()
        kinds = self._known(self.look, arrays)
        if not self.of_rows[kinds]:
            return list(arrays), ()
        lead = tuple(deep.shape[:-1])
        flat = [x.reshape(-1, x.shape[-1]) if tuple(getattr(x, "shape", ())[:-1]) == lead else x for x in arrays]
        return [x.reshape(-1) if tuple(getattr(x, "shape", ())) == lead and "int" in str(x.dtype) else x for x in flat], lead

    def _shapes(self, flat: Sequence[Any]) -> tuple[Shape, ...]:
        return tuple([shape_of(x, name) for x, name in zip(flat, self.names)])

    def _known(self, once: Callable[[tuple], None], arrays: Sequence[Any]) -> tuple:
        """The kinds of these arrays; `once` has seen to it that what follows from them is known. What it refuses is refused
        with the shapes of these arrays."""
        kinds = kinds_of(self._shapes(arrays))
        try:
            once(kinds)
        except (TypeError, ValueError):
            self.trace(arrays)
            raise
        return kinds

    def _by_definition(self, arrays: Sequence[np.ndarray], out: Any) -> Any:
        """In NumPy, as the definition says, in float32; results have the first array's dtype."""
        flat, lead = self._rows(arrays)
        traced, shapes = self.trace(flat), self._shapes(flat)
        given = {name: x.T if s.turned else x for name, x, s in zip(self.names, flat, shapes)}
        for name, among in self._choices(traced).items():
            refuse_index(name, given[name], among)
        found = evaluate(traced.roots, given, InNumPy(np.float32))
        first, dtype = next((name, x.dtype) for name, x in zip(self.names, arrays) if isinstance(x, np.ndarray))
        if dtype.name not in (*FLOATS, "float64"):
            raise TypeError(f"{first}: dtype must be one of {FLOATS}: {first}.dtype={dtype.name!r}")
        results = [np.asarray(x, root.held_as(dtype.name)) for x, root in zip(found, traced.roots)]
        results = [x.reshape(*lead, x.shape[-1]) for x in results] if lead else results
        results = written(self._outs(out, len(results)), results)
        return results[0] if traced.single else tuple(results)

    def _outs(self, out: Any, results: int) -> tuple[Any, ...]:
        """Where each result goes, None where it is made. TypeError: these are not as many as the results."""
        outs = out if isinstance(out, tuple) else (None,) * results if out is None else (out,)
        if len(outs) != results:
            raise TypeError(f"out: must be {results} arrays, one for each result of {self.name}, got {len(outs)}")
        return outs

    def run(self, *given: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        """The same computed by the fused kernels; on NumPy arrays in the interpreter."""
        arrays = self._arguments(given, named)
        flat, lead = self._rows(arrays)
        shapes, kinds = self._shapes(flat), self._known(self.prepare, flat)
        program = self.programs[kinds]
        into = self._outs(out, program.results)
        outs = tuple([x if x is None or not lead else as_rows(x, lead) for x in into])
        held = tuple([x.T if s.turned else x for x, s in zip(flat, shapes) if s.extents])
        numbers = tuple([x for x, s in zip(flat, shapes) if not s.extents])
        if tracing(held[0]):  # by parts there is nothing of JAX's: said when it is traced, not when it runs
            device = ordinal_of(held)
            forms = {name: c_ordered(s.in_memory, s.dtype, device) for name, s in zip(self.names, shapes) if s.extents}
            try:
                program.steps(forms, device, numbers, "bshd")
            except NoKernel as error:
                raise NoKernel(f"{error}; under jax.jit it must be one: call it outside, or say it with jax.numpy") from None
        try:
            found = program(stream, (*held, *outs), numbers)
        except NoKernel as error:
            if stream is not None:
                words = f"stream: must be None for what runs by parts, on its arrays' own stream: {error}"
                raise ValueError(words) from None
            if all([math.prod(x.shape) for x in held]):
                warnings.warn(f"{error}; it runs by parts", RuntimeWarning, stacklevel=3)
            made = self._by_parts(*arrays)
            if all([x is None for x in into]):
                return made
            results = tuple(written(into, made if isinstance(made, tuple) else (made,)))
            return results[0] if program.single else results
        except ValueError:
            self.trace(flat)  # says in the definition's words what does not fit, if that is it
            raise
        results = found if isinstance(found, tuple) else (found,)
        results = tuple([x.reshape(*lead, x.shape[-1]) for x in results]) if lead else results
        return results[0] if program.single else results

    def _by_parts(self, *arrays: Any) -> Any:
        """What the definition's ops give, one by one; in float32, if they are NumPy's, JAX's or of several dtypes."""
        if all([isinstance(x, NUMPY) for x in arrays]):
            return self._by_definition(arrays, None)
        if of_jax := [x for x in arrays if type(x).__module__.startswith("jax")]:  # in host memory
            found = self._by_definition([np.asarray(x) if hasattr(x, "shape") else x for x in arrays], None)
            put = functools.partial(sys.modules["jax"].device_put, device=of_jax[0].sharding)
            return tuple(map(put, found)) if isinstance(found, tuple) else put(found)
        numbers = [x for x in arrays if dtype_of(x) in HOLDS]
        if all([x.dtype == numbers[0].dtype for x in numbers]):
            return in_order(self.definition(*arrays))
        kinds = self._known(self.prepare, self._rows(arrays)[0])
        results = in_order(self.definition(*[cast(x, "float32") if dtype_of(x) in HOLDS else x for x in arrays]))
        several = isinstance(results, tuple)
        wanted = [dtype or dtype_of(numbers[0]) for dtype in self.programs[kinds].dtypes]
        found = [cast(x, dtype) for x, dtype in zip(results if several else (results,), wanted)]
        return tuple(found) if several else found[0]

    def _made(self, shapes: tuple[Shape, ...]) -> _Program:
        found = self._trace(shapes)
        held = [(name, s) for name, s in zip(self.names, shapes) if s.extents]
        inputs = dict(found.inputs)
        letters = graph.axes(*[inputs[name] for name, _ in held], *found.roots)
        letter = {axis.root: one for (name, _), its in zip(held, letters) for axis, one in zip(inputs[name].names, its) if axis}
        of_halves = {
            one: _half_of(letter[axis.root.whole.root])
            for x, its in zip(found.roots, letters[len(held) :])
            for axis, one in zip(x.names, its)
            if axis is not None and axis.root not in letter and axis.root.whole and axis.root.whole.root in letter
        }
        known = {*"".join(letters[: len(held)]), *of_halves}
        strange = [
            x
            for x, its in zip(found.roots, letters[len(held) :])
            if any(axis is not None and one not in known for axis, one in zip(x.names, its))
        ]
        seeds = {x.of[2] for x in graph.walk(*found.roots) if x.operation == "dropout"} | {*graph.indices(found.roots)}
        seeds -= {y for x in graph.walk(*found.roots) if x.operation in MAPS for y in x.of}
        for name, s in held:
            if s.dtype not in FLOATS and (name == held[0][0] or not (s.dtype == FP8 or inputs[name] in seeds)):
                raise TypeError(f"{name}: dtype must be one of {FLOATS}: {name}.dtype={s.dtype!r}")
        holds = "tile" if held[0][1].dtype != "float32" else "float32"
        others = {**dict.fromkeys(terms.INDEX, "index"), FP8: "fp8"}
        kept = [holds, *(others.get(s.dtype, "real") for _, s in held[1:])]
        rows = [f"{name} {axes} {its}" for (name, _), axes, its in zip(held, letters, kept)]
        for name, axes, x in zip(found.outs, letters[len(held) :], found.roots):
            rows.append(f"{name} {axes} {HOLDS[x.held_as('')] if x.operation in CASTS else holds} made")
        numbers = [name for name, s in zip(self.names, shapes) if not s.extents]

        def planner(problem, *values):
            extents = iter([problem[name].form.shape for name, _ in held])
            exact = tuple([s._replace(extents=next(extents)[:: -1 if s.turned else 1]) if s.extents else s for s in shapes])
            plan = self._plan(problem, exact, dict(zip(numbers, values)))
            if strange:
                raise NoKernel(f"{self.name}: a result must have axes of the arguments: {strange[0]!r:.200}")
            return plan

        parameters = [inspect.Parameter(one, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in ("problem", *numbers)]
        planner.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        planner.__annotations__ = dict.fromkeys(numbers, float)
        name = module.unused(self.name, module.PROGRAMS)
        module.PROGRAMS.add(name)
        extents: dict[str, Any] = {axis: 1 for axis in set("".join(letters[len(held) :])) - known} | of_halves
        schema, dtypes = Schema(name, "\n".join(rows), **extents), [x.held_as("") for x in found.roots]
        of_gradient = functools.partial(_gradient_of_program, self, found.outs)
        return _Program(schema, planner, dtypes, found.single, of_gradient)

    def _plan(self, problem: Any, shapes: tuple[Shape, ...], numbers: dict[str, float]) -> Plan:
        """The launches of the best way, for this problem."""
        self._refuse_mixed(shapes)
        made = self._chosen(shapes, problem.device)
        self._refuse_pieces(problem, made)
        operands: list[Any] = [problem[name] if s.extents else numbers[name] for name, s in zip(self.names, shapes)]
        operands += [problem[name] for name in made.outs]
        scratch = [(x.extents, x.held_as(problem.dtype)) for x in made.scratch]
        operands += [problem.scratch(n, *one) for n, one in enumerate(scratch)]
        places = len(problem.schema.places) + len(scratch)
        try:
            steps, more = recorded(module.load(made.text, self.name).launch, *operands, places=places)
        except (TypeError, ValueError) as error:  # TMA cannot address them, or their dtype is not that of the kernel's tiles
            theirs = {module.array(name): name for name in self.names}
            said = re.sub(r"\bg[A-Z]\w*", lambda found: theirs.get(found[0], found[0]), str(error))
            raise NoKernel(f"{self.name}: {said}") from None
        lies, own = dict(zip(made.terms, operands)), (kernel for kernel in made.kernels if kernel.launched)
        steps = [step if step.late is None else _early(step, next(own), lies) for step in steps]
        if choices := self._choices(self._trace(shapes)) if problem.device is None or asked().values else {}:
            places = problem.schema.places
            rows = [(name, places[name], problem[name].form, index_values(name, n)) for name, n in choices.items()]
            return Plan([Check(rows, {}), *steps], [*scratch, *more])
        return Plan(steps, [*scratch, *more])

    def _choices(self, found: Traced) -> dict[str, int]:
        """The arguments that choose, by name, and among how many."""
        return {x.what[0]: among for x, (_, among) in graph.indices(found.roots).items()}

    def _refuse_mixed(self, shapes: tuple[Shape, ...]) -> None:
        """NoKernel: a product is of arrays of two dtypes."""
        for x in graph.walk(*self._trace(shapes).roots):
            of = [y.of[0] if y.operation == "transpose" else y for y in x.of] if x.operation == "matmul" else []
            held = [y.what for y in of if y.operation == "input" and y.what[1] != FP8]
            if len({dtype for _, dtype in held}) > 1:
                said = ", ".join(f"{name}.dtype={dtype!r}" for name, dtype in held)
                raise NoKernel(f"{self.name}: a product must be of arrays of one dtype, which are here: {said}")

    def _refuse_pieces(self, problem: Any, made: Chosen) -> None:
        """NoKernel: cp.async would copy 16 bytes from where it cannot."""
        for x in (x for kernel in made.kernels for x in getattr(kernel, "copied", ())):
            row = x.nbytes // math.prod(x.extents[:-1])
            pieces = problem.bytes_at_once(x.what[0]) if x.operation == "input" else row & 15 or 16
            if pieces < 16:
                name = x.what[0] if x.operation == "input" else repr(x)
                raise NoKernel(f"{self.name}: {name} must have an address and strides of multiples of 16 bytes, has {pieces}")

    # ---- what was found ----------------------------------------------------------------------------------------------
    def trace(self, arrays: Sequence[Any]) -> Traced:
        """The definition as terms, for these arrays."""
        return self._trace(self._shapes(arrays))

    def _trace(self, shapes: tuple[Shape, ...]) -> Traced:
        try:
            return traced(self.definition, tuple(self.names), shapes)
        except (TypeError, AttributeError) as error:  # of Python, NumPy or torch, which know no terms
            if "Term" not in str(error):
                raise
            name, known = getattr(error, "name", None), language.__all__
            cure = f"use fuse.{name}" if name in known else f"it is written with operators and fuse's {', '.join(known)}"
            raise type(error)(f"{self.name}: {error}; {cure}") from error

    def _chosen(self, shapes: tuple[Shape, ...], ordinal: int | None) -> Chosen:
        """The module for arrays of these shapes."""
        found = self._trace(shapes)
        return chosen(self.name, found, self._candidates(found, ordinal)[0])

    def _candidates(self, found: Traced, ordinal: int | None) -> list[Candidate]:
        """What was found, the best first: as measured on this card, else by the roofline."""
        every = candidates(found, card(ordinal))
        if not every:
            raise NoKernel(f"{self.name}: {place.why(found.roots, card(ordinal))}")
        if ordinal is None or len(every) == 1:
            return every
        seconds = tune.remembered([chosen(self.name, found, one) for one in every[: tune.FEW]], card(ordinal).name)
        return tune.ranked(every, seconds) if seconds else every

    def _found(self, arrays: Sequence[Any]) -> tuple[Traced, list[Candidate]]:
        """The definition as terms, and what was found, for these arrays."""
        flat, _ = self._rows(self._arguments(arrays))
        found = self.trace(flat)
        return found, self._candidates(found, ordinal_of(flat))

    def tune(self, *arrays: Any, say: Callable[[str], None] = lambda text: None) -> list[Candidate]:
        """Measure the best candidates on the GPU that these arrays are on, and remember the fastest; calls find it from then
        on. say: a function that is told what is going on."""
        flat, _ = self._rows(self._arguments(arrays))
        found, ordinal = self.trace(flat), ordinal_of(flat)
        if ordinal is None:
            raise ValueError(f"{self.name}: only a card can be measured, and {self.names[0]} lies in host memory")
        every = candidates(found, card(ordinal))
        made = [chosen(self.name, found, one) for one in every[: tune.FEW]]
        given = [x.T if s.turned else x for x, s in zip(flat, self._shapes(flat))]
        seconds = tune.measure(self.name, made, given, say)
        tune.remember(made, card(ordinal).name, seconds)
        self.programs.clear()
        return tune.ranked(every, seconds)

    def candidates(self, *arrays: Any) -> list[Candidate]:
        """The ways to compute it that were found for these arrays, best first."""
        return self._found(arrays)[1]

    def compile(self, *shapes: tuple[int, ...] | Shape, dtype: str = "bfloat16", arch: str = "sm_90a") -> list[Compiled]:
        """Compile the kernels for C-ordered arrays of these shapes ahead of time, without a GPU, and keep their machine code on
        disk: the first call on such a GPU finds it. () is a number; a Shape has a dtype of its own. The best way by the
        roofline is taken."""
        every = [() if isinstance(s, (int, float)) else s for s in self._arguments(shapes)]  # of a number, as defaults are
        for s in every:
            if not isinstance(s, tuple):
                raise TypeError(f"{self.name}: shapes must be tuples of integers, () of a number, got {s!r}")
        seen = self.launches([s if isinstance(s, Shape) else Shape(s, dtype) for s in every], card_of(arch))
        found = []
        for kernel, types in dict.fromkeys((kernel, types) for kernel, types, *_ in seen):
            name = digest.key(kernel, types, arch)
            compiled = cache.load(name) or compile_kernel(kernel, types, arch)
            cache.store(name, compiled)
            found.append(compiled)
        return found

    def launches(self, shapes: Sequence[Shape], card: Card) -> list[tuple[Any, ...]]:
        """What a call with such arrays launches on a card, by the roofline: of each launch its kernel, Numba's types of the
        arguments, threads and shared memory. There are no arrays."""
        traced = self._trace(tuple(shapes))
        if not (every := candidates(traced, card)):
            raise NoKernel(f"{self.name}: {place.why(traced.roots, card)}")
        made = chosen(self.name, traced, every[0])
        forms = [c_ordered(s.in_memory, s.dtype, None) for s in shapes if s.extents]
        dtype = next(s.dtype for s in shapes if s.extents)
        forms += [c_ordered(x.extents, x.held_as(dtype), None) for x in made.written]
        operands = iter([Operand(n, form) for n, form in enumerate(forms)])
        given = [next(operands) if s.extents else 0.5 for s in shapes]
        seen: list[tuple[Any, ...]] = []
        watchers.append(lambda *launch: seen.append(launch))
        try:
            recorded(module.load(made.text, self.name).launch, *given, *operands, places=len(forms))
        finally:
            watchers.pop()
        return seen

    def explain(self, *arrays: Any) -> str:
        """In sentences: which rules were used, what the kernels do, what the roofline estimates; and why a call with these
        arrays runs by parts, if it does."""
        try:
            said = self.candidates(*arrays)[0].explained()
            self._planned(arrays)
        except NoKernel as error:
            return f"A call with these arrays runs by parts, and no kernel serves it. {error}."
        return said

    def _planned(self, given: Sequence[Any]) -> None:
        """Plan a call, and launch nothing. NoKernel: with these arrays, their strides and dtypes, it would run by parts."""
        flat, _ = self._rows(self._arguments(given))
        shapes, kinds = self._shapes(flat), self._known(self.prepare, flat)
        every = [(name, x.T if s.turned else x, s) for name, x, s in zip(self.names, flat, shapes)]
        forms = {name: describe(x, name).form for name, x, s in every if s.extents}
        numbers = tuple([x for _, x, s in every if not s.extents])
        self.programs[kinds].steps(forms, next(iter(forms.values())).device, numbers, "bshd")

    def source(self, *arrays: Any) -> str:
        """The module that serves these arrays, as text: run it, edit it, keep it."""
        found, every = self._found(arrays)
        return chosen(self.name, found, every[0]).text

    def proof(self, *arrays: Any) -> Proof:
        """Whether the kernels for these arrays compute the definition, how this was found out, and what was not checked."""
        found, every = self._found(arrays)
        return proven(self.name, found, every[0])


def kernel(definition: Callable) -> Fused:
    """Decorator: a function of arrays, written with fuse's functions, becomes fused kernels. TypeError: it is not a Python
    function, or has parameters that are not positional."""
    fused = Fused(definition)
    if wrong := [str(x) for x in fused.signature.parameters.values() if x.kind not in NAMED]:
        raise TypeError(f"fuse.kernel: {fused.name} must take its arrays by place, and each has a name, got {', '.join(wrong)}")
    return fused


def compile(definition: Callable, *shapes: tuple[int, ...] | Shape, dtype: str = "bfloat16", arch: str = "sm_90a") -> Fused:
    """A function of arrays as fused kernels, whose machine code for arrays of these shapes is made now (see Fused.compile)."""
    fused = definition if isinstance(definition, Fused) else kernel(definition)
    fused.compile(*shapes, dtype=dtype, arch=arch)
    return fused


def _once(known: dict[tuple, Any], make: Callable) -> Callable[[tuple], None]:
    """A function that sees that it is known what follows from arrays of these kinds: of each its dtype, whether it comes as its
    transpose, which extents are 1. Dynamo calls it, without a look inside: that says the attribute."""

    def prepare(kinds: tuple) -> None:
        if kinds not in known:
            known[kinds] = make(loose(kinds))

    prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return prepare


def _half_of(axis: str) -> Callable[[Mapping[str, Any]], Any]:
    """The extent of a result's axis that is half of this one, as a schema asks for it."""
    return lambda extents: extents[axis] // 2


def _gradient_of_program(
    function: Fused, outs: tuple[str, ...], names: tuple[str, ...], options: dict[str, Any], layout: str
) -> Callable[..., dict[str, Any]]:
    """See tiles.program: JAX asks for it."""
    return functools.partial(function.gradients.of_program, outs, names, options)


class _Program(Program):
    """A program, how many results it has, is it one by itself, and the dtypes that they have by themselves, or ""."""

    def __init__(self, schema: Schema, planner: Callable[..., Plan], dtypes: list[str], single: bool, gradient: Callable):
        super().__init__(schema, planner, gradient)
        self.results, self.dtypes, self.single = len(dtypes), dtypes, single


def _early(step: Recorded, kernel: Any, lies: dict[Term, Operand]) -> Any:
    """The launch of a kernel, as a step that is early where it may be."""
    if not kernel.early:
        return step
    return Early(step, [lies[x] for x in kernel.ahead], [lies[x] for x in kernel.roots])
