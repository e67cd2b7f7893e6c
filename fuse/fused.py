"""Functions of arrays that become kernels: what `fuse.kernel` makes from a definition.

    @fuse.kernel
    def norm_linear(x, g, w):
        return (x * rsqrt(mean(x * x) + 1e-5) * g) @ w

A call traces the definition for the lengths of its arrays, finds the ways to compute it, takes the best (definition.py) and
runs it as a program (program.py): what is known about a form of arrays is looked up. Leading axes are rows where possible, so
x may be (..., k); otherwise they are batches and heads, as in NumPy (trace.rows_alone).
"""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tiles.arrays import c_ordered
from tiles.frameworks import describe, without_grad
from tiles.jax_call import tracing

from . import gradient
from .candidates import Candidate
from .definition import Definition, NoKernel, memoize_by_kinds
from .evaluate import NumPyArithmetic, evaluate
from .given import as_rows, cast, dtype_of, in_order, refuse_index, written
from .program import FLOATS, HOLDS, FusedProgram, index_bounds, program_of
from .trace import Shape, TracedDefinition, ordinal_of

if TYPE_CHECKING:
    from .backward import Gradient

NUMPY = (np.ndarray, int, float)  # what is computed as the definition says
BY_PLACE = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


class Fused(Definition):
    """A definition, and the kernels that it became. Call it like the definition."""

    def __init__(self, definition: Callable):
        functools.update_wrapper(self, definition)
        super().__init__(definition)
        self.gradients = gradient.GradientFunctions(self)
        self.programs: dict[tuple, FusedProgram] = {}
        self.prepare = memoize_by_kinds(self.programs, lambda shapes: program_of(self, shapes, self.gradients.of_program))

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

    # ---- as functions are --------------------------------------------------------------------------------------------
    def __copy__(self) -> Fused:
        """Itself: what it knows of its calls is true of any copy, as of functions."""
        return self

    def __deepcopy__(self, memo: dict) -> Fused:
        """See __copy__."""
        return self

    def __reduce__(self) -> Any:
        """How it is pickled: by the name that its module has for it, or else for its definition. PicklingError: it has
        neither."""
        name = self.definition.__qualname__
        there = functools.reduce(lambda x, part: getattr(x, part, None), name.split("."), sys.modules.get(self.__module__))
        if there is self:
            return name
        if there is self.definition:
            return kernel, (self.definition,)
        words = f"is pickled by its name, and {self.__module__} has no {name}"
        raise pickle.PicklingError(f"{self.name}: {words}: define it with def, at the top level of a module")

    # ---- by kernels --------------------------------------------------------------------------------------------------
    def run(self, *given: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        """The same computed by the fused kernels, which run on NumPy arrays in the interpreter. Where no kernel serves these
        arrays, a warning says why, and the definition's operations run one by one."""
        arrays = self._arguments(given, named)
        flat, lead = self._flatten_leading(arrays)
        shapes, kinds = self._kinds(self.prepare, flat)
        program = self.programs[kinds]
        into = self._outs(out, program.results)
        outs = tuple([x if x is None or not lead else as_rows(x, lead) for x in into])
        held = tuple([x.T if s.transposed else x for x, s in zip(flat, shapes) if s.extents])
        numbers = tuple([x for x, s in zip(flat, shapes) if not s.extents])
        if tracing(held[0]):
            self._refuse_parts_in_jit(program, shapes, ordinal_of(held), numbers)
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

    def _outs(self, out: Any, results: int) -> tuple[Any, ...]:
        """Where each result goes, None where it is made. TypeError: these are not as many as the results."""
        outs = out if isinstance(out, tuple) else (None,) * results if out is None else (out,)
        if len(outs) != results:
            raise TypeError(f"out: must be {results} arrays, one for each result of {self.name}, got {len(outs)}")
        return outs

    def _refuse_parts_in_jit(
        self, program: FusedProgram, shapes: Sequence[Shape], ordinal: int | None, numbers: tuple[Any, ...]
    ) -> None:
        """NoKernel: no kernel serves these arrays of JAX's. Parts cannot run under jax.jit, and that is said when the call is
        traced, not when it runs. ordinal: of the GPU that it will run on."""
        forms = {name: c_ordered(s.in_memory, s.dtype, ordinal) for name, s in zip(self.names, shapes) if s.extents}
        try:
            program.steps(forms, ordinal, numbers, "bshd")
        except NoKernel as error:
            raise NoKernel(f"{error}; under jax.jit it must be one: call it outside, or say it with jax.numpy") from None

    # ---- by the definition -------------------------------------------------------------------------------------------
    def _by_definition(self, arrays: Sequence[np.ndarray], out: Any) -> Any:
        """The results as the definition says, computed by NumPy in float32; they have the first array's dtype."""
        flat, lead = self._flatten_leading(arrays)
        trace_definition, shapes = self.trace(flat), self._shapes(flat)
        given = {name: x.T if s.transposed else x for name, x, s in zip(self.names, flat, shapes)}
        for name, among in index_bounds(trace_definition).items():
            refuse_index(name, given[name], among)
        found = evaluate(trace_definition.roots, given, NumPyArithmetic(np.float32))
        first, dtype = next((name, x.dtype) for name, x in zip(self.names, arrays) if isinstance(x, np.ndarray))
        if dtype.name not in (*FLOATS, "float64"):
            raise TypeError(f"{first}: dtype must be one of {FLOATS}: {first}.dtype={dtype.name!r}")
        results = [np.asarray(x, root.stored_dtype(dtype.name)) for x, root in zip(found, trace_definition.roots)]
        results = [x.reshape(*lead, x.shape[-1]) for x in results] if lead else results
        results = written(self._outs(out, len(results)), results)
        return results[0] if trace_definition.single else tuple(results)

    def _by_parts(self, *arrays: Any) -> Any:
        """The results of the definition's operations, run one by one: torch's where the arrays are torch's and of one dtype. In
        float32 if they are of several dtypes, and by NumPy if they are NumPy's or JAX's."""
        if all([isinstance(x, NUMPY) for x in arrays]):
            return self._by_definition(arrays, None)
        if of_jax := [x for x in arrays if type(x).__module__.startswith("jax")]:
            found = self._by_definition([np.asarray(x) if hasattr(x, "shape") else x for x in arrays], None)
            put = functools.partial(sys.modules["jax"].device_put, device=of_jax[0].sharding)
            return tuple(map(put, found)) if isinstance(found, tuple) else put(found)
        floats = [x for x in arrays if dtype_of(x) in HOLDS]
        if all([x.dtype == floats[0].dtype for x in floats]):
            return in_order(self.definition(*arrays))
        _, kinds = self._kinds(self.prepare, self._flatten_leading(arrays)[0])
        results = in_order(self.definition(*[cast(x, "float32") if dtype_of(x) in HOLDS else x for x in arrays]))
        several = isinstance(results, tuple)
        wanted = [dtype or dtype_of(floats[0]) for dtype in self.programs[kinds].dtypes]
        found = [cast(x, dtype) for x, dtype in zip(results if several else (results,), wanted)]
        return tuple(found) if several else found[0]

    # ---- gradients ---------------------------------------------------------------------------------------------------
    @functools.cached_property
    def gradient(self) -> Gradient:
        """The gradient, as a fused function of the arguments and of the gradients with respect to the results (backward.py)."""
        return self.gradients.by_all()

    def _differentiable(self, arrays: Sequence[Any], out: Any, stream: Any) -> Any:
        """The results for torch's tensors that require grad, from which torch's autograd finds the way back."""
        if out is not None or stream is not None:
            raise TypeError("out, stream: must be None where a tensor requires grad")
        flat, lead = self._flatten_leading(arrays)
        results = gradient.differentiable(self, flat)
        if not lead:
            return results
        several = isinstance(results, tuple)
        shaped = tuple([x.reshape(*lead, x.shape[-1]) for x in (results if several else (results,))])
        return shaped if several else shaped[0]

    # ---- what calls do -----------------------------------------------------------------------------------------------
    def tune(self, *arrays: Any, say: Callable[[str], None] = lambda text: None) -> list[Candidate]:
        ranked = super().tune(*arrays, say=say)
        self.programs.clear()  # they have plans with what was best before
        return ranked

    def explain(self, *arrays: Any, rows: int = 0) -> str:
        """In sentences: which rules were used, what the kernels do, what the roofline estimates; and why a call with these
        arrays runs by parts, if it does.

        rows: up to how many rows a table says which kernels serve which numbers of rows; 0 for none."""
        try:
            said = self.candidates(*arrays)[0].describe()
            ranges = [
                f"{', '.join(f'{first} to {last}' for first, last in some)} rows: {what}."
                for what, some in self.table(arrays, rows).items()
            ]
            return "\n".join([said, *ranges])
        except NoKernel as error:
            return f"A call with these arrays runs by parts, and no kernel serves it. {error}."

    def _plan_call(self, arrays: Sequence[Any]) -> tuple[TracedDefinition, list[Candidate]]:
        known = super()._plan_call(arrays)
        self._plan_only(arrays)
        return known

    def _plan_only(self, given: Sequence[Any]) -> None:
        """Plan a call, and launch nothing. NoKernel: with these arrays, their strides and dtypes, it would run by parts."""
        flat, _ = self._flatten_leading(self._arguments(given))
        shapes, kinds = self._kinds(self.prepare, flat)
        every = [(name, x.T if s.transposed else x, s) for name, x, s in zip(self.names, flat, shapes)]
        forms = {name: describe(without_grad(x), name).form for name, x, s in every if s.extents}
        numbers = tuple([x for _, x, s in every if not s.extents])
        self.programs[kinds].steps(forms, next(iter(forms.values())).device, numbers, "bshd")


def kernel(definition: Callable) -> Fused:
    """Decorator: a function of arrays, written with fuse's functions, becomes fused kernels. TypeError: it is not a Python
    function, or has parameters that are not positional."""
    fused = Fused(definition)
    if wrong := [str(x) for x in fused.signature.parameters.values() if x.kind not in BY_PLACE]:
        raise TypeError(f"fuse.kernel: {fused.name} must take its arrays by place, and each has a name, got {', '.join(wrong)}")
    return fused


def compile(definition: Callable, *shapes: tuple[int, ...] | Shape, dtype: str = "bfloat16", arch: str = "sm_90a") -> Fused:
    """A function of arrays as fused kernels, whose machine code for arrays of these shapes is made now (see Fused.compile)."""
    fused = definition if isinstance(definition, Fused) else kernel(definition)
    fused.compile(*shapes, dtype=dtype, arch=arch)
    return fused
