"""A function of arrays, and what is known of it before it is called: its terms, the ways to compute them and their cost, the
text of the kernels, their proof, their machine code. `fuse.kernel` makes of it a Fused (fused.py), which can be called."""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from tiles import cache, digest
from tiles.arrays import Operand, c_ordered
from tiles.compiler import Compiled, compile_kernel
from tiles.frameworks import without_grad
from tiles.launch import watchers
from tiles.lengths import made
from tiles.plan import Recent
from tiles.recording import recorded

from . import classes, graph, language, module, place, tune
from .axes import Axis
from .candidates import Candidate, GeneratedModule, candidates, chosen
from .cost import Card, card, card_of
from .functions import FP8
from .proof import Proof, proven
from .trace import Shape, TracedDefinition, kinds_of, loose, ordinal_of, rows_alone, shape_of, trace_definition

BEST = 1024  # classes of lengths of which the best way is remembered, of each function
T = TypeVar("T")
BECOME_FLOATS = bool, np.generic  # numbers that kernels take as Python's floats only


class NoKernel(TypeError):
    """No template computes what a definition says; the message says why."""


class BestPlan:
    """The best way to compute a definition for arrays of some classes of lengths (classes.py), and its modules by how products
    are cut."""

    def __init__(self, name: str, found: TracedDefinition, candidate: Candidate):
        self.name, self.found, self.candidate = name, found, candidate
        self.modules: dict[tuple[Any, ...], GeneratedModule] = {}

    def module(self, known: Mapping[Axis, Any]) -> GeneratedModule:
        """The module for these lengths of axes, which may be those of a call that is watched."""
        schedules = self.candidate.schedules(known)
        if schedules not in self.modules:
            self.modules[schedules] = chosen(self.name, self.found, self.candidate.scheduled(schedules))
        return self.modules[schedules]


def refuse_mixed(name: str, found: TracedDefinition) -> None:
    """NoKernel: a product is of arrays of two dtypes. name: of the function."""
    for x in graph.walk(*found.roots):
        of = [y.args[0] if y.operation == "transpose" else y for y in x.args] if x.operation == "matmul" else []
        held = [y.attr for y in of if y.operation == "input" and y.attr[1] != FP8]
        if len({dtype for _, dtype in held}) > 1:
            said = ", ".join(f"{name}.dtype={dtype!r}" for name, dtype in held)
            raise NoKernel(f"{name}: a product must be of arrays of one dtype, which are here: {said}")


class Definition:
    """A Python function of arrays, and what the algebra finds for it."""

    def __init__(self, definition: Callable):
        if not hasattr(definition, "__code__"):
            raise TypeError(f"fuse.kernel: must be given a Python function of arrays: {definition!r:.60}")
        name = definition.__name__
        named = name.isidentifier() and not keyword.iskeyword(name)  # a lambda is not
        self.definition, self.name = definition, name if named else "fused"
        self.signature = inspect.signature(definition)
        self.names = list(self.signature.parameters)
        parameters = self.signature.parameters.values()
        self.defaults = tuple([p.default for p in parameters if p.default is not p.empty])  # of the last ones
        self.best, self.known_plans = functools.lru_cache(BEST)(self._best), Recent(BEST)
        self.roles: dict[tuple, tuple[tuple[str, ...], ...]] = {}
        self.find_roles = memoize_by_kinds(self.roles, lambda shapes: classes.axis_roles(self._trace_all(shapes)))
        self.leading_are_rows: dict[tuple, bool] = {}
        self.find_leading = memoize_by_kinds(self.leading_are_rows, lambda shapes: rows_alone(self._trace(shapes).roots))

    # ---- its arguments -----------------------------------------------------------------------------------------------
    def _arguments(self, arrays: Sequence[Any], named: dict[str, Any] | None = None) -> Sequence[Any]:
        """One argument for each parameter, defaults included; NumPy's numbers and truth values as Python's floats. TypeError:
        there are too few arguments, or too many."""
        missing = len(self.names) - len(arrays)
        if missing and not named and 0 <= missing <= len(self.defaults):
            arrays = (*arrays, *self.defaults[-missing:])
        elif missing or named:
            try:
                bound = self.signature.bind(*arrays, **named or {})
            except TypeError as error:
                raise TypeError(f"{self.name}: {error}") from None
            bound.apply_defaults()
            arrays = bound.args
        if any([isinstance(x, BECOME_FLOATS) for x in arrays]):
            arrays = [float(x) if isinstance(x, BECOME_FLOATS) else x for x in arrays]
        return arrays

    def _flatten_leading(self, arrays: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
        """(the arguments with their leading axes joined into one, the rows; the extents of these axes). Where leading axes are
        batches and heads (trace.rows_alone), or there are none, the arguments stay as they are, and the extents are ()."""
        deep = next((x for x in arrays if len(_shape(x)) > 2), None)
        if deep is None:
            return list(arrays), ()
        _, kinds = self._kinds(self.find_leading, arrays)
        if not self.leading_are_rows[kinds]:
            return list(arrays), ()
        lead = tuple(deep.shape[:-1])
        flat = [x.reshape(-1, x.shape[-1]) if _shape(x)[:-1] == lead else x for x in arrays]
        return [x.reshape(-1) if _shape(x) == lead and "int" in str(x.dtype) else x for x in flat], lead

    def _shapes(self, flat: Sequence[Any]) -> tuple[Shape, ...]:
        """What tracing must know of each argument, whose leading axes are rows."""
        return tuple([shape_of(x, name) for x, name in zip(flat, self.names)])

    def _kinds(self, find: Callable[[tuple], None], arrays: Sequence[Any]) -> tuple[tuple[Shape, ...], tuple]:
        """(the shapes of these arguments, their kinds), after `find` (see once) has found what it finds for them. If it refuses
        them, the error speaks of the shapes of these arrays, not of those that it was tried with."""
        shapes = self._shapes(arrays)
        kinds = kinds_of(shapes)
        try:
            find(kinds)
        except (TypeError, ValueError):
            self.trace(arrays)
            raise
        return shapes, kinds

    # ---- what is found for them --------------------------------------------------------------------------------------
    def trace(self, arrays: Sequence[Any]) -> TracedDefinition:
        """The definition as terms, for these arrays."""
        return self._trace(self._shapes(arrays))

    def _trace(self, shapes: tuple[Shape, ...]) -> TracedDefinition:
        """The definition as terms, for arrays of these shapes. An error of Python, NumPy or torch that could not do something
        with a term is raised again, with fuse's way to say it."""
        try:
            return trace_definition(self.definition, tuple(self.names), shapes)
        except (TypeError, AttributeError) as error:
            if "Term" not in str(error):
                raise
            name, known = getattr(error, "name", None), language.__all__
            cure = f"use fuse.{name}" if name in known else f"it is written with operators and fuse's {', '.join(known)}"
            raise type(error)(f"{self.name}: {error}; {cure}") from error

    def _trace_all(self, shapes: tuple[Shape, ...]) -> TracedDefinition:
        """All that the definition says, by kernels or not."""
        return self._trace(shapes)

    def _find_candidates(self, found: TracedDefinition, card: Card) -> list[Candidate]:
        """All ways to compute it on a card, the best by the roofline first. NoKernel: there is none."""
        every = candidates(found, card)
        if not every:
            raise NoKernel(f"{self.name}: {place.why(found.roots, card)}")
        return every

    def _candidates(self, shapes: tuple[Shape, ...], ordinal: int | None, at: Card) -> tuple[TracedDefinition, list[Candidate]]:
        """(the definition as terms, all ways to compute it on a card, the best first), for arrays of these shapes, which stand
        for their class: as measured on this GPU, if `tune` did, else by the roofline. NoKernel: there is none."""
        found = self._trace(shapes)
        every = self._find_candidates(found, at)
        if ordinal is None or len(every) == 1:
            return found, every
        seconds = tune.remembered(tune.key(self.name, found, every[: tune.FEW], at.name))
        return found, tune.ranked(every, seconds) if seconds else every

    # ---- classes of lengths (classes.py) -----------------------------------------------------------------------------
    def _axis_roles(self, shapes: tuple[Shape, ...]) -> list[tuple[tuple[str, ...], ...]]:
        """How the lengths of these arguments may be taken, the one to try first first, and exactly at last: keys stand for
        others only where attention's own kernels serve, and where these cut them into parts, for others that can be cut so."""
        kinds = kinds_of(shapes)
        self.find_roles(kinds)
        roles = self.roles[kinds]
        found = [roles]
        if any(classes.KEY_AXIS in some for some in roles):
            for by in (classes.SPLIT_KEY_AXIS, classes.EXACT):
                found.append(tuple([tuple([by if x == classes.KEY_AXIS else x for x in some]) for some in roles]))
        return [*found, tuple([(classes.EXACT,) * len(some) for some in roles])]

    def of_class(self, trace: Callable[[tuple[Shape, ...]], T], shapes: tuple[Shape, ...]) -> T:
        """What `trace` finds for the shapes that stand for the class of these, of which an error speaks."""
        roles, *_, exact = self._axis_roles(shapes)
        known, axis_roles = classes.round_lengths(shapes, roles)
        stand = classes.fill_lengths(known, roles, axis_roles)
        with self._reraise_for(shapes, trace):
            return trace(shapes if roles != exact and classes.reads_rounded_length(self._trace_all(stand), roles) else stand)

    @contextmanager
    def _reraise_for(self, shapes: tuple[Shape, ...], check: Callable[[tuple[Shape, ...]], Any]) -> Iterator[None]:
        """An error inside is raised as `check` raises it for these shapes, if it does."""
        try:
            yield
        except (TypeError, ValueError):
            if all(isinstance(n, int) for s in shapes for n in s.extents):  # nobody watches
                check(shapes)
            raise

    def _of_class(
        self, shapes: tuple[Shape, ...], roles: Sequence[Sequence[str]], ordinal: int | None, at: Card
    ) -> tuple[TracedDefinition, list[Candidate]] | None:
        """The same as `_candidates` for the class of these shapes; None if lengths must be taken in another way there."""
        known, axis_roles = classes.round_lengths(shapes, roles)
        found, every = self._candidates(classes.fill_lengths(known, roles, axis_roles), ordinal, at)
        inputs = zip((x for _, x in found.inputs), roles)
        keys = {axis.root: one for x, role in inputs for axis, one in zip(x.axes, role) if axis and one in classes.KEY_AXES}
        parts = classes.KEY_AXIS in keys.values() and place.has_parts(every[0].plan)
        other = parts or place.has_columns(every[0].plan, keys) or classes.reads_rounded_length(found, roles)
        return None if other else (found, every)

    def _rank_plans(
        self, shapes: tuple[Shape, ...], ordinal: int | None, at: Card | None = None
    ) -> tuple[TracedDefinition, list[Candidate]]:
        """(the definition as terms, for shapes that stand for the class of these, the ways to compute it for arrays of these
        shapes, best first), on this GPU, or on a card. A call takes the first one (program.py). NoKernel: there is none."""
        at = at or card(ordinal)
        with self._reraise_for(shapes, lambda shapes: self._find_candidates(self._trace(shapes), at)):
            served = (self._of_class(shapes, roles, ordinal, at) for roles in self._axis_roles(shapes))
            found, every = next(filter(None, served))
        known = classes.known_extents(found, shapes)
        return found, [one.scheduled(one.schedules(known)) for one in every]

    def best_plan(self, shapes: tuple[Shape, ...], ordinal: int | None) -> BestPlan:
        """The best way to compute it for arrays of these shapes, whose lengths may be those of a call that is watched: it is
        looked up by what stands for their class."""
        with self._reraise_for(shapes, lambda shapes: self._rank_plans(shapes, ordinal)):
            for roles in self._axis_roles(shapes):
                known, axis_roles = classes.round_lengths(shapes, roles)
                found = classes.fixed_value(made(self.best, known, ordinal, roles, *axis_roles))
                if found is not None:
                    return found
        raise AssertionError("lengths that are taken exactly are always served")

    def _best(
        self, known: tuple[Shape, ...], ordinal: int | None, roles: tuple[tuple[str, ...], ...], *axis_roles: int
    ) -> BestPlan | None:
        """See `way`. It is one object for all classes that have the same modules."""
        shapes = classes.fill_lengths(known, roles, axis_roles)
        refuse_mixed(self.name, self._trace(shapes))
        if self._of_class(shapes, roles, ordinal, card(ordinal)) is None:
            return None
        found, every = self._rank_plans(shapes, ordinal)
        key = known, ordinal, every[0].identity
        if (best := self.known_plans.get(key)) is None:
            best = BestPlan(self.name, found, every[0])
            self.known_plans.put(key, best)
        return best

    def _plan_call(self, arrays: Sequence[Any]) -> tuple[TracedDefinition, list[Candidate]]:
        """The same for these arrays. NoKernel: a call with them would run by parts."""
        flat, _ = self._flatten_leading(self._arguments(arrays))
        return self._rank_plans(self._shapes(flat), ordinal_of(flat))

    def candidates(self, *arrays: Any) -> list[Candidate]:
        """The ways to compute it that were found for these arrays, best first. NoKernel, of this as of source and proof: a call
        with these arrays would run by parts."""
        return self._plan_call(arrays)[1]

    def source(self, *arrays: Any) -> str:
        """The module that serves these arrays, as text: run it, edit it, keep it."""
        found, every = self._plan_call(arrays)
        return chosen(self.name, found, every[0]).text

    def table(self, arrays: Sequence[Any], most: int) -> dict[str, list[tuple[int, int]]]:
        """{what the kernels do, in words: for which numbers of rows, (first, last) of each range}, of 1 to `most` rows, the
        other lengths being those of these arrays. Empty if the number of rows is taken exactly. NoKernel: see `candidates`."""
        flat, _ = self._flatten_leading(self._arguments(arrays))
        shapes, ordinal = self._shapes(flat), ordinal_of(flat)
        found, roles = self._trace_all(shapes), self._axis_roles(shapes)[0]
        rows = next((x.axes[-2].root for x in found.roots if x.axes[-2] is not None), None)
        inputs = [x for _, x in found.inputs]
        if not any(one and axis and axis.root is rows for x, role in zip(inputs, roles) for axis, one in zip(x.axes, role)):
            return {}
        table, first = dict[str, list[tuple[int, int]]](), 1
        while first <= most:
            last = min(classes.last_alike_rows(first), most)
            there = []
            for x, s in zip(inputs, shapes):
                extents = tuple([last if axis and axis.root is rows else n for axis, n in zip(x.axes, s.in_memory)])
                there.append(s._replace(extents=extents[::-1] if s.transposed else extents))
            best = self._rank_plans(tuple(there), ordinal)[1][0]
            ranges = table.setdefault(best.summary, [])
            if ranges and ranges[-1][1] == first - 1:
                ranges[-1] = ranges[-1][0], last
            else:
                ranges.append((first, last))
            first = last + 1
        return table

    def proof(self, *arrays: Any, seed: int | None = None) -> Proof:
        """Whether the kernels for these arrays compute the definition, how this was found out, and what was not checked. The
        proof prints the seed that its random primes follow from; with `seed` it is repeated."""
        found, every = self._plan_call(arrays)
        return proven(self.name, found, every[0], seed)

    def tune(self, *arrays: Any, say: Callable[[str], None] = lambda text: None) -> list[Candidate]:
        """Measure the best candidates on the GPU that these arrays are on, and remember the fastest on disk; calls find it from
        then on. say: a function that is told what is going on. ValueError: the arrays are in host memory."""
        flat, _ = self._flatten_leading(self._arguments(arrays))
        ordinal, shapes = ordinal_of(flat), self._shapes(flat)
        if ordinal is None:
            raise ValueError(f"{self.name}: only a card can be measured, and {self.names[0]} lies in host memory")
        found, every = self._rank_plans(shapes, None, card(ordinal))  # by the roofline
        modules = [chosen(self.name, found, one) for one in every[: tune.FEW]]
        known = classes.known_extents(found, shapes)
        given = [without_grad(x.T if s.transposed else x) for x, s in zip(flat, self._shapes(flat))]
        seconds = tune.measure(self.name, modules, known, given, say)
        tune.remember(tune.key(self.name, found, every[: tune.FEW], card(ordinal).name), seconds)
        self.best.cache_clear()
        return tune.ranked(every, seconds)

    # ---- machine code ahead of time ----------------------------------------------------------------------------------
    def compile(self, *shapes: tuple[int, ...] | Shape, dtype: str = "bfloat16", arch: str = "sm_90a") -> list[Compiled]:
        """Compile the kernels for C-ordered arrays of these shapes ahead of time, without a GPU, and keep their machine code on
        disk: the first call on such a GPU finds it. () is a number; a Shape has a dtype of its own. The best way by the
        roofline is taken. TypeError: a shape is no tuple, or they are too few or too many."""
        every = [() if isinstance(s, (int, float)) else s for s in self._arguments(shapes)]  # defaults are numbers
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
        """What a call with arrays of these shapes launches on a card, by the roofline, though there are no arrays: for each
        launch (kernel, Numba's types of the arguments, threads, bytes of shared memory)."""
        found, every = self._rank_plans(tuple(shapes), None, card)
        module_of, known = chosen(self.name, found, every[0]), classes.known_extents(found, shapes)
        forms = [c_ordered(s.in_memory, s.dtype, None) for s in shapes if s.extents]
        dtype = next(s.dtype for s in shapes if s.extents)
        forms += [c_ordered(classes.extents_at(x, known), x.stored_dtype(dtype), None) for x in module_of.written]
        operands = iter([Operand(n, form) for n, form in enumerate(forms)])
        given = [next(operands) if s.extents else 0.5 for s in shapes]
        seen: list[tuple[Any, ...]] = []
        watchers.append(lambda *launch: seen.append(launch))
        try:
            recorded(module.load(module_of.text, self.name, module_of.code).launch, *given, *operands, places=len(forms))
        finally:
            watchers.pop()
        return seen


def _shape(x: Any) -> tuple[int, ...]:
    """The shape of an argument, () of a number. Dynamo, where lengths are symbols, makes one of a number, too, which it lets
    nobody ask for attributes."""
    return () if isinstance(x, (bool, int, float)) else tuple(getattr(x, "shape", ()))


def memoize_by_kinds(known: dict[tuple, Any], make: Callable[[tuple[Shape, ...]], Any]) -> Callable[[tuple], None]:
    """A function find(kinds) that sees to it that known[kinds] is there, and makes it from arrays of these kinds (trace.loose)
    if it is not. kinds: of each argument its dtype, whether it comes as its transpose, and which of its extents are 1. The
    attribute has Dynamo call `find` while it traces, without a look inside."""

    def find(kinds: tuple) -> None:
        if kinds not in known:
            known[kinds] = make(loose(kinds))

    find._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return find
