"""A definition, a Python function of arrays, and all that is known before it is called: its terms, its candidates and their
cost, the text of the kernels, their proof, their machine code. Its subclass Fused (calls/fused.py), which `fuse.kernel` makes,
can be called."""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from tiles.calls.plan import LruTable
from tiles.compiling import cache, digest
from tiles.compiling.compiler import Compiled, compile_kernel
from tiles.launching.arrays import Operand, c_ordered
from tiles.launching.frameworks import without_grad
from tiles.launching.launch import watchers
from tiles.launching.lengths import watched_call
from tiles.launching.recording import record_launches

from ..language import functions, graph
from ..language.axes import Axis
from ..language.maps import BYTES
from ..language.trace import (
    Shape,
    TracedDefinition,
    kinds_of,
    leading_axes_are_rows,
    loose_shapes,
    ordinal_of,
    shape_of,
    trace_definition,
)
from ..writing import module_text
from . import length_classes, plan_search, tune
from .candidates import Candidate, candidates
from .cost import Card, card, card_of
from .generated_module import GeneratedModule, generate_module
from .grouped_heads import LeadingAxes, group_heads
from .proof import Proof, prove

CACHE_SIZE = 1024  # classes of lengths whose best plan is cached, for each function
T = TypeVar("T")
FLOAT_LIKE = bool, np.generic  # types of numbers that become Python floats
CONVERSIONS = {"astype", "to", "type", "float", "half", "bfloat16"}  # methods of arrays for which there is fuse.cast


class NoKernel(TypeError):
    """No template computes the definition for these arrays; the message says why."""


class BestPlan:
    """The best plan to compute a definition for arrays of some classes of lengths (length_classes.py), and its modules by the
    schedules of their products."""

    def __init__(self, name: str, traced: TracedDefinition, candidate: Candidate):
        self.name, self.traced, self.candidate = name, traced, candidate
        self.modules: dict[tuple[Any, ...], GeneratedModule] = {}

    def module(self, known: Mapping[Axis, Any]) -> GeneratedModule:
        """The module for these extents of axes, which may be watched lengths of a call."""
        schedules = self.candidate.schedules(known)
        if schedules not in self.modules:
            self.modules[schedules] = generate_module(self.name, self.traced, self.candidate.with_schedules(schedules))
        return self.modules[schedules]


def refuse_mixed(name: str, traced: TracedDefinition) -> None:
    """NoKernel: a product has operands of two dtypes. name: of the function."""
    for x in graph.walk(*traced.roots):
        matrices = [y.args[0] if y.operation == "transpose" else y for y in x.args] if x.operation == "matmul" else []
        operands = [y.attr for y in matrices if y.operation == "input" and y.attr[1] not in BYTES]
        if len({dtype for _, dtype in operands}) > 1:
            dtypes = ", ".join(f"{name}.dtype={dtype!r}" for name, dtype in operands)
            raise NoKernel(f"{name}: the operands of a product must have one dtype, got {dtypes}: cast one of them")


class Definition:
    """A Python function of arrays, and the plans that are found to compute it."""

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
        self.best, self.known_plans = functools.lru_cache(CACHE_SIZE)(self._best), LruTable(CACHE_SIZE)
        self.roles: dict[tuple, tuple[tuple[str, ...], ...]] = {}
        self.find_roles = memoize_by_kinds(self.roles, lambda shapes: length_classes.axis_roles(self._trace_all(shapes)))
        self.shares_heads: dict[tuple, bool] = {}
        self.find_shares_heads = memoize_by_kinds(self.shares_heads, self._find_shares_heads)
        self.leading_are_rows: dict[tuple, bool] = {}
        self.find_leading = memoize_by_kinds(
            self.leading_are_rows, lambda shapes: leading_axes_are_rows(self._trace(shapes).roots)
        )

    # ---- its arguments -----------------------------------------------------------------------------------------------
    def _arguments(self, arrays: Sequence[Any], named: dict[str, Any] | None = None) -> Sequence[Any]:
        """One argument for each parameter, defaults included; NumPy's scalars and booleans become Python floats. TypeError:
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
        if any([isinstance(x, FLOAT_LIKE) for x in arrays]):
            arrays = [float(x) if isinstance(x, FLOAT_LIKE) else x for x in arrays]
        return arrays

    def _flatten_leading(self, arrays: Sequence[Any]) -> tuple[list[Any], LeadingAxes | None]:
        """(the arguments with their leading axes as kernels see them, how these differ from those of the results). Leading axes
        are joined into one, the rows; those that are batches and heads stay (trace.leading_axes_are_rows), but heads that share
        those of other arguments become two axes (grouped_heads.py). None: nothing differs."""
        batched = next((x for x in arrays if len(_shape(x)) > 2), None)
        if batched is None:
            return list(arrays), None
        if grouped := group_heads(arrays):
            _, kinds = self._kinds(self.find_shares_heads, grouped.arrays)
            if self.shares_heads[kinds]:
                return grouped.arrays, grouped.leading
        _, kinds = self._kinds(self.find_leading, arrays)
        if not self.leading_are_rows[kinds]:
            return list(arrays), None
        leading = tuple(batched.shape[:-1])
        flat = [x.reshape(-1, x.shape[-1]) if _shape(x)[:-1] == leading else x for x in arrays]
        return [x.reshape(-1) if _shape(x) == leading and "int" in str(x.dtype) else x for x in flat], LeadingAxes(leading)

    def _find_shares_heads(self, shapes: tuple[Shape, ...]) -> bool:
        """Does the definition say enable_gqa=True of attention, for arrays of these shapes, and leave heads where they are?"""
        try:
            traced = self._trace(shapes)
        except (TypeError, ValueError):  # the error of the call shows its arrays
            return False
        stays = all(x.operation not in ("merge_heads", "split") for x in graph.walk(*traced.roots))
        return traced.table.enables_gqa and stays and len({x.ndim for x in traced.roots}) == 1

    def _shapes(self, flat: Sequence[Any]) -> tuple[Shape, ...]:
        """The Shape of each argument, whose leading axes have been joined into rows: what a trace depends on."""
        return tuple([shape_of(x, name) for x, name in zip(flat, self.names)])

    def _kinds(self, find: Callable[[tuple], None], arrays: Sequence[Any]) -> tuple[tuple[Shape, ...], tuple]:
        """(the shapes of these arguments, their kinds), after `find` (see memoize_by_kinds) has stored what it computes for
        these kinds. If the definition refuses them, the error shows the shapes of these arrays, not the placeholders it was
        traced with."""
        shapes = self._shapes(arrays)
        kinds = kinds_of(shapes)
        try:
            find(kinds)
        except (TypeError, ValueError):
            self.trace(arrays)
            raise
        return shapes, kinds

    # ---- terms and candidates ----------------------------------------------------------------------------------------
    def trace(self, arrays: Sequence[Any]) -> TracedDefinition:
        """The definition as terms, for these arrays."""
        return self._trace(self._shapes(arrays))

    def _trace(self, shapes: tuple[Shape, ...]) -> TracedDefinition:
        """The definition as terms, for arrays of these shapes. An error of Python, NumPy or torch about an operation that a
        Term lacks is raised again with the fuse function to use."""
        try:
            return trace_definition(self.definition, tuple(self.names), shapes)
        except (TypeError, AttributeError) as error:
            if "Term" not in str(error):
                raise
            name, known = getattr(error, "name", None), functions.__all__
            name = "cast" if name in CONVERSIONS else name
            cure = f"use fuse.{name}" if name in known else f"it is written with operators and fuse's {', '.join(known)}"
            raise type(error)(f"{self.name}: {error}; {cure}") from error

    def _trace_all(self, shapes: tuple[Shape, ...]) -> TracedDefinition:
        """The terms of all results; in a Gradient also of those that the framework computes."""
        return self._trace(shapes)

    def _find_candidates(self, traced: TracedDefinition, card: Card) -> list[Candidate]:
        """All candidates on a card, the best by the roofline first. NoKernel: there is none."""
        ranked = candidates(traced, card)
        if not ranked:
            raise NoKernel(f"{self.name}: {plan_search.explain_no_plan(traced.roots, card)}")
        return ranked

    def _candidates(
        self, shapes: tuple[Shape, ...], ordinal: int | None, on_card: Card
    ) -> tuple[TracedDefinition, list[Candidate]]:
        """(the definition as terms, its candidates on a card, the best first), for arrays of these shapes, the representatives
        of their class: as `tune` measured them on this GPU, else by the roofline. NoKernel: there is none."""
        traced = self._trace(shapes)
        ranked = self._find_candidates(traced, on_card)
        if ordinal is None or len(ranked) == 1:
            return traced, ranked
        seconds = tune.recall_seconds(tune.key(self.name, traced, ranked[: tune.MAX_MEASURED], on_card.name))
        return traced, tune.rank(ranked, seconds) if seconds else ranked

    # ---- classes of lengths (length_classes.py) -----------------------------------------------------------------------------
    def _axis_roles(self, shapes: tuple[Shape, ...]) -> list[tuple[tuple[str, ...], ...]]:
        """The choices of roles for the axes of these arguments, the one to try first first, and all exact at last. Keys have a
        class only where attention's own kernels serve; where these split the keys, it is a class of lengths that can be split
        so."""
        kinds = kinds_of(shapes)
        self.find_roles(kinds)
        roles = self.roles[kinds]
        choices = [roles]
        if any(length_classes.KEY_AXIS in axis_roles for axis_roles in roles):
            for role in (length_classes.SPLIT_KEY_AXIS, length_classes.EXACT):
                choices.append(
                    tuple([tuple([role if x == length_classes.KEY_AXIS else x for x in axis_roles]) for axis_roles in roles])
                )
        return [*choices, tuple([(length_classes.EXACT,) * len(axis_roles) for axis_roles in roles])]

    def of_class(self, trace: Callable[[tuple[Shape, ...]], T], shapes: tuple[Shape, ...]) -> T:
        """trace(representatives of the class of these shapes). An error shows these shapes instead."""
        roles, *_, exact = self._axis_roles(shapes)
        rounded_shapes, representatives = length_classes.round_lengths(shapes, roles)
        class_shapes = length_classes.fill_lengths(rounded_shapes, roles, representatives)
        with self._reraise_for(shapes, trace):
            return trace(
                shapes
                if roles != exact and length_classes.reads_rounded_length(self._trace_all(class_shapes), roles)
                else class_shapes
            )

    @contextmanager
    def _reraise_for(self, shapes: tuple[Shape, ...], check: Callable[[tuple[Shape, ...]], Any]) -> Iterator[None]:
        """A context in which an error is raised as `check` raises it for these shapes, if it does."""
        try:
            yield
        except (TypeError, ValueError):
            if all(isinstance(n, int) for s in shapes for n in s.extents):  # no length is watched
                check(shapes)
            raise

    def _of_class(
        self, shapes: tuple[Shape, ...], roles: Sequence[Sequence[str]], ordinal: int | None, on_card: Card
    ) -> tuple[TracedDefinition, list[Candidate]] | None:
        """The result of `_candidates` for the class of these shapes; None if some of these roles cannot be used."""
        rounded_shapes, representatives = length_classes.round_lengths(shapes, roles)
        traced, ranked = self._candidates(length_classes.fill_lengths(rounded_shapes, roles, representatives), ordinal, on_card)
        inputs = zip((x for _, x in traced.inputs), roles)
        keys = {
            axis.root: one for x, role in inputs for axis, one in zip(x.axes, role) if axis and one in length_classes.KEY_AXES
        }
        parts = length_classes.KEY_AXIS in keys.values() and plan_search.has_split_kv(ranked[0].plan)
        other = (
            parts or plan_search.has_columns_along(ranked[0].plan, keys) or length_classes.reads_rounded_length(traced, roles)
        )
        return None if other else (traced, ranked)

    def _rank_plans(
        self, shapes: tuple[Shape, ...], ordinal: int | None, on_card: Card | None = None
    ) -> tuple[TracedDefinition, list[Candidate]]:
        """(the definition as terms, for the representatives of these shapes; the candidates for arrays of these shapes, best
        first), on this GPU or on a card. A call takes the first one (calls/program.py). NoKernel: there is none."""
        on_card = on_card or card(ordinal)
        with self._reraise_for(shapes, lambda shapes: self._find_candidates(self._trace(shapes), on_card)):
            of_classes = (self._of_class(shapes, roles, ordinal, on_card) for roles in self._axis_roles(shapes))
            traced, ranked = next(filter(None, of_classes))
        known = length_classes.known_extents(traced, shapes)
        return traced, [one.with_schedules(one.schedules(known)) for one in ranked]

    def best_plan(self, shapes: tuple[Shape, ...], ordinal: int | None) -> BestPlan:
        """The best plan for arrays of these shapes, which may be watched lengths of a call: it is looked up by the
        representatives of their class."""
        with self._reraise_for(shapes, lambda shapes: self._rank_plans(shapes, ordinal)):
            for roles in self._axis_roles(shapes):
                rounded_shapes, representatives = length_classes.round_lengths(shapes, roles)
                best = length_classes.fixed_value(watched_call(self.best, rounded_shapes, ordinal, roles, *representatives))
                if best is not None:
                    return best
        raise AssertionError("the roles that are all EXACT always serve")

    def _best(
        self, rounded_shapes: tuple[Shape, ...], ordinal: int | None, roles: tuple[tuple[str, ...], ...], *representatives: int
    ) -> BestPlan | None:
        """The best plan for representatives of a class, None if these roles cannot be used. Classes that have the same modules
        share one object."""
        shapes = length_classes.fill_lengths(rounded_shapes, roles, representatives)
        refuse_mixed(self.name, self._trace(shapes))
        if self._of_class(shapes, roles, ordinal, card(ordinal)) is None:
            return None
        traced, ranked = self._rank_plans(shapes, ordinal)
        key = rounded_shapes, ordinal, ranked[0].identity
        if (best := self.known_plans.get(key)) is None:
            best = BestPlan(self.name, traced, ranked[0])
            self.known_plans.put(key, best)
        return best

    def _plan_call(self, arrays: Sequence[Any]) -> tuple[TracedDefinition, list[Candidate]]:
        """The terms and candidates of a call with these arrays. NoKernel: the call would run by parts."""
        flat, _ = self._flatten_leading(self._arguments(arrays))
        return self._rank_plans(self._shapes(flat), ordinal_of(flat))

    def candidates(self, *arrays: Any) -> list[Candidate]:
        """The candidates for these arrays, best first. NoKernel, raised by source and proof as well: a call with these arrays
        would run by parts."""
        return self._plan_call(arrays)[1]

    def source(self, *arrays: Any) -> str:
        """The module that a call with these arrays runs, as Python source. It can be saved, edited and imported."""
        traced, ranked = self._plan_call(arrays)
        return generate_module(self.name, traced, ranked[0]).text

    def table(self, arrays: Sequence[Any], max_rows: int) -> dict[str, list[tuple[int, int]]]:
        """{what the kernels do, in words: [(first, last) number of rows of each range that they serve]}, for 1 to `max_rows`
        rows and the other lengths of these arrays. Empty if the number of rows is exact. NoKernel: as for candidates."""
        flat, _ = self._flatten_leading(self._arguments(arrays))
        shapes, ordinal = self._shapes(flat), ordinal_of(flat)
        traced, roles = self._trace_all(shapes), self._axis_roles(shapes)[0]
        rows = next((x.axes[-2].root for x in traced.roots if x.axes[-2] is not None), None)
        inputs = [x for _, x in traced.inputs]
        if not any(one and axis and axis.root is rows for x, role in zip(inputs, roles) for axis, one in zip(x.axes, role)):
            return {}
        table, first = dict[str, list[tuple[int, int]]](), 1
        while first <= max_rows:
            last = min(length_classes.last_alike_rows(first), max_rows)
            present = []
            for x, s in zip(inputs, shapes):
                extents = tuple([last if axis and axis.root is rows else n for axis, n in zip(x.axes, s.in_memory)])
                present.append(s._replace(extents=extents[::-1] if s.transposed else extents))
            best = self._rank_plans(tuple(present), ordinal)[1][0]
            ranges = table.setdefault(best.summary, [])
            if ranges and ranges[-1][1] == first - 1:
                ranges[-1] = ranges[-1][0], last
            else:
                ranges.append((first, last))
            first = last + 1
        return table

    def proof(self, *arrays: Any, seed: int | None = None) -> Proof:
        """Whether the kernels for these arrays compute the definition, how that was established, and what was not checked. The
        random primes follow from `seed`, which the proof prints; it is random by default."""
        traced, ranked = self._plan_call(arrays)
        return prove(self.name, traced, ranked[0], seed)

    def tune(self, *arrays: Any, say: Callable[[str], None] = lambda text: None) -> list[Candidate]:
        """Measure the best candidates on the GPU that holds these arrays, and remember the fastest on disk, where calls find it
        from then on. say: gets a text on progress. Returns the candidates, the fastest first. ValueError: the arrays are in
        host memory."""
        flat, _ = self._flatten_leading(self._arguments(arrays))
        ordinal, shapes = ordinal_of(flat), self._shapes(flat)
        if ordinal is None:
            raise ValueError(f"{self.name}: tune measures on a GPU, and {self.names[0]} is in host memory: move it to a GPU")
        traced, ranked = self._rank_plans(shapes, None, card(ordinal))  # by the roofline
        modules = [generate_module(self.name, traced, one) for one in ranked[: tune.MAX_MEASURED]]
        known = length_classes.known_extents(traced, shapes)
        arguments = [without_grad(x.T if s.transposed else x) for x, s in zip(flat, self._shapes(flat))]
        seconds = tune.measure(self.name, modules, known, arguments, say)
        tune.remember(tune.key(self.name, traced, ranked[: tune.MAX_MEASURED], card(ordinal).name), seconds)
        self.best.cache_clear()
        return tune.rank(ranked, seconds)

    # ---- machine code ahead of time ----------------------------------------------------------------------------------
    def compile(self, *shapes: tuple[int, ...] | Shape, dtype: str = "bfloat16", arch: str = "sm_90a") -> list[Compiled]:
        """Compile the kernels for C-ordered arrays of these shapes ahead of time, without a GPU, and keep their machine code on
        disk, where the first call on such a GPU finds it. The shape of a number is (); a Shape has a dtype of its own. The best
        plan by the roofline is taken. TypeError: a shape is not a tuple, or there are too few or too many."""
        shapes_of_arguments = [
            () if isinstance(s, (int, float)) else s for s in self._arguments(shapes)
        ]  # defaults are numbers
        for s in shapes_of_arguments:
            if not isinstance(s, tuple):
                raise TypeError(f"{self.name}: shapes must be tuples of integers, () of a number, got {s!r}")
        launches = self.launches([s if isinstance(s, Shape) else Shape(s, dtype) for s in shapes_of_arguments], card_of(arch))
        results = []
        for kernel, types in dict.fromkeys((kernel, types) for kernel, types, *_ in launches):
            name = digest.key(kernel, types, arch)
            compiled = cache.load(name) or compile_kernel(kernel, types, arch)
            cache.store(name, compiled)
            results.append(compiled)
        return results

    def launches(self, shapes: Sequence[Shape], card: Card) -> list[tuple[Any, ...]]:
        """What a call with arrays of these shapes would launch on a card, planned by the roofline: (kernel, Numba's types of
        the arguments, threads, bytes of shared memory) of each launch."""
        traced, ranked = self._rank_plans(tuple(shapes), None, card)
        module_of, known = generate_module(self.name, traced, ranked[0]), length_classes.known_extents(traced, shapes)
        forms = [c_ordered(s.in_memory, s.dtype, None) for s in shapes if s.extents]
        dtype = next(s.dtype for s in shapes if s.extents)
        forms += [c_ordered(graph.extents_at(x, known), x.stored_dtype(dtype), None) for x in module_of.written]
        operands = iter([Operand(n, form) for n, form in enumerate(forms)])
        arguments = [next(operands) if s.extents else 0.5 for s in shapes]
        launches: list[tuple[Any, ...]] = []
        watchers.append(lambda *launch: launches.append(launch))
        try:
            record_launches(
                module_text.load(module_of.text, self.name, module_of.code).launch, *arguments, *operands, places=len(forms)
            )
        finally:
            watchers.pop()
        return launches


def _shape(x: Any) -> tuple[int, ...]:
    """The shape of an argument, () of a number. Dynamo also passes numbers as symbols, which have no attributes."""
    return () if isinstance(x, (bool, int, float)) else tuple(getattr(x, "shape", ()))


def memoize_by_kinds(known: dict[tuple, Any], make: Callable[[tuple[Shape, ...]], Any]) -> Callable[[tuple], None]:
    """A function find(kinds) that stores make(shapes) as known[kinds] if it is not there yet, for placeholder shapes of these
    kinds (trace.loose_shapes). Kinds are, of each argument, its dtype, whether it is a transpose, and which of its extents are
    1. Marked so that Dynamo calls `find` while it traces, without tracing into it."""

    def find(kinds: tuple) -> None:
        if kinds not in known:
            known[kinds] = make(loose_shapes(kinds))

    find._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return find
