"""A function of arrays, and what is known of it before it is called: its terms, the ways to compute them and their cost, the
text of the kernels, their proof, their machine code. `fuse.kernel` makes of it a Fused (fused.py), which can be called."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tiles import cache, digest
from tiles.arrays import Operand, c_ordered
from tiles.compiler import Compiled, compile_kernel
from tiles.frameworks import without_grad
from tiles.launch import watchers
from tiles.recording import recorded

from . import language, module, place, tune
from .candidates import Candidate, candidates, chosen
from .cost import Card, card, card_of
from .proof import Proof, proven
from .trace import Shape, Traced, kinds_of, loose, ordinal_of, rows_alone, shape_of, traced

BECOME_FLOATS = bool, np.generic  # numbers that kernels take as Python's floats only


class NoKernel(TypeError):
    """No template computes what a definition says; the message says why."""


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
        self.leading_are_rows: dict[tuple, bool] = {}
        self.find_leading = once(self.leading_are_rows, lambda shapes: rows_alone(self._trace(shapes).roots))

    # ---- its arguments -----------------------------------------------------------------------------------------------
    def _arguments(self, arrays: Sequence[Any], named: dict[str, Any] | None = None) -> Sequence[Any]:
        """One argument for each parameter, defaults included; NumPy's numbers and truth values as Python's floats. TypeError:
        there are too few arguments, or too many."""
        if len(arrays) != len(self.names) or named:
            try:
                bound = self.signature.bind(*arrays, **named or {})
            except TypeError as error:
                raise TypeError(f"{self.name}: {error}") from None
            bound.apply_defaults()
            arrays = bound.args
        if any([isinstance(x, BECOME_FLOATS) for x in arrays]):
            arrays = [float(x) if isinstance(x, BECOME_FLOATS) else x for x in arrays]
        return arrays

    def _rows(self, arrays: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
        """(the arguments with their leading axes joined into one, the rows; the extents of these axes). Where leading axes are
        batches and heads (trace.rows_alone), or there are none, the arguments stay as they are, and the extents are ()."""
        deep = next((x for x in arrays if len(getattr(x, "shape", ())) > 2), None)
        if deep is None:
            return list(arrays), ()
        kinds = self._kinds(self.find_leading, arrays)
        if not self.leading_are_rows[kinds]:
            return list(arrays), ()
        lead = tuple(deep.shape[:-1])
        flat = [x.reshape(-1, x.shape[-1]) if tuple(getattr(x, "shape", ())[:-1]) == lead else x for x in arrays]
        return [x.reshape(-1) if tuple(getattr(x, "shape", ())) == lead and "int" in str(x.dtype) else x for x in flat], lead

    def _shapes(self, flat: Sequence[Any]) -> tuple[Shape, ...]:
        """What tracing must know of each argument, whose leading axes are rows."""
        return tuple([shape_of(x, name) for x, name in zip(flat, self.names)])

    def _kinds(self, find: Callable[[tuple], None], arrays: Sequence[Any]) -> tuple:
        """The kinds of these arguments, after `find` (see once) has found what it finds for them. If it refuses them, the error
        speaks of the shapes of these arrays, not of those that it was tried with."""
        kinds = kinds_of(self._shapes(arrays))
        try:
            find(kinds)
        except (TypeError, ValueError):
            self.trace(arrays)
            raise
        return kinds

    # ---- what is found for them --------------------------------------------------------------------------------------
    def trace(self, arrays: Sequence[Any]) -> Traced:
        """The definition as terms, for these arrays."""
        return self._trace(self._shapes(arrays))

    def _trace(self, shapes: tuple[Shape, ...]) -> Traced:
        """The definition as terms, for arrays of these shapes. An error of Python, NumPy or torch that could not do something
        with a term is raised again, with fuse's way to say it."""
        try:
            return traced(self.definition, tuple(self.names), shapes)
        except (TypeError, AttributeError) as error:
            if "Term" not in str(error):
                raise
            name, known = getattr(error, "name", None), language.__all__
            cure = f"use fuse.{name}" if name in known else f"it is written with operators and fuse's {', '.join(known)}"
            raise type(error)(f"{self.name}: {error}; {cure}") from error

    def _ranked(self, found: Traced, card: Card) -> list[Candidate]:
        """All ways to compute it on a card, the best by the roofline first. NoKernel: there is none."""
        every = candidates(found, card)
        if not every:
            raise NoKernel(f"{self.name}: {place.why(found.roots, card)}")
        return every

    def _candidates(self, found: Traced, ordinal: int | None) -> list[Candidate]:
        """All ways to compute it on a GPU, the best first: as measured there, if `tune` did, else by the roofline. ordinal: the
        GPU's number, None in the interpreter. NoKernel: there is none."""
        every = self._ranked(found, card(ordinal))
        if ordinal is None or len(every) == 1:
            return every
        seconds = tune.remembered([chosen(self.name, found, one) for one in every[: tune.FEW]], card(ordinal).name)
        return tune.ranked(every, seconds) if seconds else every

    def _ways(self, shapes: tuple[Shape, ...], ordinal: int | None) -> tuple[Traced, list[Candidate]]:
        """(the definition as terms, the ways to compute it, best first), for arrays of these shapes on this GPU. A call takes
        the first one (program.py). NoKernel: there is none."""
        found = self._trace(shapes)
        return found, self._candidates(found, ordinal)

    def _served(self, arrays: Sequence[Any]) -> tuple[Traced, list[Candidate]]:
        """The same for these arrays. NoKernel: a call with them would run by parts."""
        flat, _ = self._rows(self._arguments(arrays))
        return self._ways(self._shapes(flat), ordinal_of(flat))

    def candidates(self, *arrays: Any) -> list[Candidate]:
        """The ways to compute it that were found for these arrays, best first. NoKernel, of this as of source and proof: a call
        with these arrays would run by parts."""
        return self._served(arrays)[1]

    def source(self, *arrays: Any) -> str:
        """The module that serves these arrays, as text: run it, edit it, keep it."""
        found, every = self._served(arrays)
        return chosen(self.name, found, every[0]).text

    def proof(self, *arrays: Any, seed: int | None = None) -> Proof:
        """Whether the kernels for these arrays compute the definition, how this was found out, and what was not checked. The
        proof prints the seed that its random primes follow from; with `seed` it is repeated."""
        found, every = self._served(arrays)
        return proven(self.name, found, every[0], seed)

    def tune(self, *arrays: Any, say: Callable[[str], None] = lambda text: None) -> list[Candidate]:
        """Measure the best candidates on the GPU that these arrays are on, and remember the fastest on disk; calls find it from
        then on. say: a function that is told what is going on. ValueError: the arrays are in host memory."""
        flat, _ = self._rows(self._arguments(arrays))
        found, ordinal = self.trace(flat), ordinal_of(flat)
        if ordinal is None:
            raise ValueError(f"{self.name}: only a card can be measured, and {self.names[0]} lies in host memory")
        every = candidates(found, card(ordinal))
        made = [chosen(self.name, found, one) for one in every[: tune.FEW]]
        given = [without_grad(x.T if s.turned else x) for x, s in zip(flat, self._shapes(flat))]
        seconds = tune.measure(self.name, made, given, say)
        tune.remember(made, card(ordinal).name, seconds)
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
        found = self._trace(tuple(shapes))
        made = chosen(self.name, found, self._ranked(found, card)[0])
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


def once(known: dict[tuple, Any], make: Callable[[tuple[Shape, ...]], Any]) -> Callable[[tuple], None]:
    """A function find(kinds) that sees to it that known[kinds] is there, and makes it from arrays of these kinds (trace.loose)
    if it is not. kinds: of each argument its dtype, whether it comes as its transpose, and which of its extents are 1. The
    attribute has Dynamo call `find` while it traces, without a look inside."""

    def find(kinds: tuple) -> None:
        if kinds not in known:
            known[kinds] = make(loose(kinds))

    find._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return find
