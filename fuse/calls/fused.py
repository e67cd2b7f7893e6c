"""Fused functions: what `fuse.kernel` makes from a definition.

    @fuse.kernel
    def norm_linear(x, g, w):
        return (x * rsqrt(mean(x * x) + 1e-5) * g) @ w

A call traces the definition for the lengths of its arrays, finds candidates, takes the best (planning/definition.py) and runs
it as a program (program.py). What is known about a form of arrays is looked up the next time. Leading axes are rows where
possible, so x may be (..., k); otherwise they are batches and heads, as in NumPy (trace.leading_axes_are_rows)."""

from __future__ import annotations

import functools
import inspect
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tiles.calls.jax_call import is_jax_tracer
from tiles.calls.remembered_calls import NOT_SERVED
from tiles.calls.torch_op import is_compiling
from tiles.launching.arrays import c_ordered
from tiles.launching.frameworks import describe, without_grad

from ..language.evaluate import NumPyArithmetic, evaluate
from ..language.trace import Shape, TracedDefinition, ordinal_of
from ..planning.candidates import Candidate
from ..planning.definition import Definition, NoKernel, memoize_by_kinds
from . import gradient_choice
from .call_arguments import as_tuple, cast, check_outs, copy_to_outs, dtype_of, flatten_out, refuse_index
from .program import FLOATS, HOLDS, FusedProgram, index_bounds, program_of

NUMPY = (np.ndarray, int, float)  # arguments for which NumPy evaluates the definition
BY_PLACE = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


class Arrangement(NamedTuple):
    """How the arguments of a call went to its program. Reading their shapes takes as long as the rest of a call, and the next
    one is often alike but for its rows: then a guarded function of the program (tiles/calls/remembered_calls.py) serves it,
    which compares dtypes, extents and strides itself.

    arguments: how many there are. defaults: of the last ones. arrays: (the place of one that is no number, is it a transpose?).
    numbers: the places of those that are."""

    program: FusedProgram
    arguments: int
    defaults: tuple
    arrays: tuple[tuple[int, bool], ...]
    numbers: tuple[int, ...]

    def call(self, stream: Any, args: tuple) -> Any:
        """The results of a call with these arguments, NOT_SERVED if no guarded function serves it."""
        program, missing = self.program, self.arguments - len(args)
        if not 0 <= missing <= len(self.defaults):
            return NOT_SERVED
        args = (*args, *self.defaults[len(self.defaults) - missing :])
        numbers = tuple([args[n] for n in self.numbers])
        if any([type(x) is not float and type(x) is not int for x in numbers]):
            return NOT_SERVED
        try:
            operands = [args[n].T if transposed else args[n] for n, transposed in self.arrays]
        except AttributeError:  # no array
            return NOT_SERVED
        returned = program.call_guarded(stream, (*operands, *program.no_outs), numbers)
        return returned if program.single or returned is NOT_SERVED or isinstance(returned, tuple) else (returned,)


class Fused(Definition):
    """A definition that can be called: on NumPy arrays it is evaluated, on a GPU's arrays its kernels run."""

    def __init__(self, definition: Callable):
        functools.update_wrapper(self, definition)
        super().__init__(definition)
        self.gradients = gradient_choice.GradientFunctions(self)
        self.programs: dict[tuple, FusedProgram] = {}
        self.last: Arrangement | None = None
        self.compiling = is_compiling  # and once there is an arrangement, its program's, which takes a fifth of the time
        self.prepare = memoize_by_kinds(self.programs, lambda shapes: program_of(self, shapes, self.gradients.make_vjp))

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **options: Any) -> Any:
        """The results of the definition: for NumPy arrays evaluated in float32, for arrays on a GPU by the fused kernels.

        out: where the result goes, an array, or a tuple of them for several results. stream: a handle or a stream object.
        TypeError, ValueError: the definition or a kernel refuses these arrays; the message names the argument."""
        if out is None and not options and not self.compiling() and self.last is not None:  # as in most calls
            results = self.last.call(stream, args)
            if results is not NOT_SERVED:
                return results
        arrays = self._arguments(args, options)
        if all([isinstance(x, NUMPY) for x in arrays]):
            return self._by_definition(arrays, out)
        if gradient_choice.wants_gradient(arrays):
            return self._differentiable(arrays, out, stream)
        return self.run(*arrays, out=out, stream=stream)

    def __repr__(self) -> str:
        return f"<fused function {self.name}({', '.join(self.names)})>"

    # ---- copies and pickles, as of functions -------------------------------------------------------------------------
    def __copy__(self) -> Fused:
        """The function itself: what it remembers of calls holds for every copy."""
        return self

    def __deepcopy__(self, memo: dict) -> Fused:
        return self

    def __reduce__(self) -> Any:
        """Pickled by the name under which its module has it or its definition. PicklingError: the module has neither."""
        name = self.definition.__qualname__
        module_attribute = functools.reduce(
            lambda x, part: getattr(x, part, None), name.split("."), sys.modules.get(self.__module__)
        )
        if module_attribute is self:
            return name
        if module_attribute is self.definition:
            return kernel, (self.definition,)
        words = f"is pickled by its name, and {self.__module__} has no {name}"
        raise pickle.PicklingError(f"{self.name}: {words}: define it with def, at the top level of a module")

    # ---- by kernels --------------------------------------------------------------------------------------------------
    def run(self, *args: Any, out: Any = None, stream: Any = None, **options: Any) -> Any:
        """Compute the results by the fused kernels, which run on NumPy arrays in the interpreter. Where no kernel serves these
        arrays, a warning says why, and the definition's operations run one by one."""
        arrays = self._arguments(args, options)
        flat, leading = self._flatten_leading(arrays)
        shapes, kinds = self._kinds(self.prepare, flat)
        program = self.programs[kinds]
        results_out = self._outs(out, program.results)
        outs = tuple([x if x is None or not leading else flatten_out(x, leading) for x in results_out])
        operands = tuple([x.T if s.transposed else x for x, s in zip(flat, shapes) if s.extents])
        numbers = tuple([x for x, s in zip(flat, shapes) if not s.extents])
        if is_jax_tracer(operands[0]):
            self._refuse_parts_in_jit(program, shapes, ordinal_of(operands), numbers)
        try:
            result = program(stream, (*operands, *outs), numbers)
        except NoKernel as error:
            if stream is not None:
                words = f"stream: must be None where a call runs by parts, on the arrays' own stream: {error}"
                raise ValueError(words) from None
            if all([math.prod(x.shape) for x in operands]):
                warnings.warn(f"{error}; it runs by parts", RuntimeWarning, stacklevel=3)
            by_parts = self._by_parts(*arrays)
            if all([x is None for x in results_out]):
                return by_parts
            results = tuple(copy_to_outs(results_out, by_parts if isinstance(by_parts, tuple) else (by_parts,)))
            return results[0] if program.single else results
        except ValueError:
            traced = self.trace(flat)  # if shapes do not fit, its error shows the operation of the definition
            check_outs(outs, [x.extents for x in traced.roots])
            raise
        if out is None and not options and not leading and not is_compiling():
            places = [n for n, s in enumerate(shapes) if not s.extents]
            transposes = tuple([(n, s.transposed) for n, s in enumerate(shapes) if s.extents])
            self.last = Arrangement(program, len(shapes), self.defaults, transposes, tuple(places))
            self.compiling = program.compiling
        results = result if isinstance(result, tuple) else (result,)
        results = tuple([x.reshape(*leading.extents, x.shape[-1]) for x in results]) if leading else results
        return results[0] if program.single else results

    def _outs(self, out: Any, results: int) -> tuple[Any, ...]:
        """The array for each result, None where a new one is returned. TypeError: there are not as many as results."""
        outs = out if isinstance(out, tuple) else (None,) * results if out is None else (out,)
        if len(outs) != results:
            raise TypeError(f"out: must be {results} arrays, one for each result of {self.name}, got {len(outs)}")
        return outs

    def _refuse_parts_in_jit(
        self, program: FusedProgram, shapes: Sequence[Shape], ordinal: int | None, numbers: tuple[Any, ...]
    ) -> None:
        """NoKernel: no kernel serves these arrays of JAX's. Parts cannot run under jax.jit, so the error is raised when the
        call is traced. ordinal: of the GPU that it will run on."""
        forms = {name: c_ordered(s.in_memory, s.dtype, ordinal) for name, s in zip(self.names, shapes) if s.extents}
        try:
            program.steps(forms, ordinal, numbers, "bshd")
        except NoKernel as error:
            raise NoKernel(f"{error}; under jax.jit it must be one: call it outside, or write it with jax.numpy") from None

    # ---- by the definition -------------------------------------------------------------------------------------------
    def _by_definition(self, arrays: Sequence[np.ndarray], out: Any) -> Any:
        """The results of the definition evaluated by NumPy in float32, in the first array's dtype."""
        flat, leading = self._flatten_leading(arrays)
        traced, shapes = self.trace(flat), self._shapes(flat)
        inputs = {name: x.T if s.transposed else x for name, x, s in zip(self.names, flat, shapes)}
        for name, count in index_bounds(traced).items():
            refuse_index(name, inputs[name], count)
        values = evaluate(traced.roots, inputs, NumPyArithmetic(np.float32))
        first, dtype = next((name, x.dtype) for name, x in zip(self.names, arrays) if isinstance(x, np.ndarray))
        if dtype.name not in (*FLOATS, "float64"):
            raise TypeError(f"{first}: dtype must be one of {FLOATS}: {first}.dtype={dtype.name!r}")
        results = [np.asarray(x, root.stored_dtype(dtype.name)) for x, root in zip(values, traced.roots)]
        results = [x.reshape(*leading.extents, x.shape[-1]) for x in results] if leading else results
        results = copy_to_outs(self._outs(out, len(results)), results)
        return results[0] if traced.single else tuple(results)

    def _by_parts(self, *arrays: Any) -> Any:
        """The results of the definition's operations, run one by one: torch's where the arrays are torch's and of one dtype; in
        float32 if they are of several dtypes; by NumPy if they are NumPy's or JAX's."""
        if all([isinstance(x, NUMPY) for x in arrays]):
            return self._by_definition(arrays, None)
        if jax_arrays := [x for x in arrays if type(x).__module__.startswith("jax")]:
            values = self._by_definition([np.asarray(x) if hasattr(x, "shape") else x for x in arrays], None)
            to_device = functools.partial(sys.modules["jax"].device_put, device=jax_arrays[0].sharding)
            return tuple(map(to_device, values)) if isinstance(values, tuple) else to_device(values)
        floats = [x for x in arrays if dtype_of(x) in HOLDS]
        if all([x.dtype == floats[0].dtype for x in floats]):
            return as_tuple(self.definition(*arrays))
        _, kinds = self._kinds(self.prepare, self._flatten_leading(arrays)[0])
        results = as_tuple(self.definition(*[cast(x, "float32") if dtype_of(x) in HOLDS else x for x in arrays]))
        several = isinstance(results, tuple)
        dtypes = [dtype or dtype_of(floats[0]) for dtype in self.programs[kinds].dtypes]
        values = [cast(x, dtype) for x, dtype in zip(results if several else (results,), dtypes)]
        return tuple(values) if several else values[0]

    # ---- gradients ---------------------------------------------------------------------------------------------------
    @functools.cached_property
    def gradient(self) -> Any:
        """The gradient, as a fused function of the arguments and of the gradients with respect to the results
        (gradient_function.py)."""
        return self.gradients.by_all()

    def _differentiable(self, arrays: Sequence[Any], out: Any, stream: Any) -> Any:
        """The results for torch's tensors that require grad, connected to torch's autograd graph."""
        if out is not None or stream is not None:
            raise TypeError("out, stream: must be None where a tensor requires grad")
        flat, leading = self._flatten_leading(arrays)
        results = gradient_choice.differentiable(self, flat)
        if not leading:
            return results
        several = isinstance(results, tuple)
        shaped = tuple([x.reshape(*leading.extents, x.shape[-1]) for x in (results if several else (results,))])
        return shaped if several else shaped[0]

    # ---- plans of calls ----------------------------------------------------------------------------------------------
    def tune(self, *arrays: Any, say: Callable[[str], None] = lambda text: None) -> list[Candidate]:
        """Measure the best candidates on the GPU that holds these arrays, and remember the fastest on disk, where calls find it
        from then on. say: gets a text on progress. Returns the candidates, the fastest first. ValueError: the arrays are in
        host memory."""
        ranked = super().tune(*arrays, say=say)
        self.programs.clear()  # their plans have the kernels that were best before
        return ranked

    def explain(self, *arrays: Any, rows: int = 0) -> str:
        """Say in sentences which rules were used, what the kernels do, what the roofline estimates; or why a call with these
        arrays runs by parts.

        rows: up to how many rows a table says which kernels serve which numbers of rows; 0 for none."""
        try:
            traced, ranked = self._plan_call(arrays)
            text = ranked[0].describe({x: name for name, x in traced.local_names})
            ranges = [
                f"{', '.join(f'{first} to {last}' for first, last in row_ranges)} rows: {kernels}."
                for kernels, row_ranges in self.table(arrays, rows).items()
            ]
            return "\n".join([text, *ranges])
        except NoKernel as error:
            return f"A call with these arrays runs by parts, and no kernel serves it. {error}."

    def _plan_call(self, arrays: Sequence[Any]) -> tuple[TracedDefinition, list[Candidate]]:
        known = super()._plan_call(arrays)
        self._plan_only(arrays)
        return known

    def _plan_only(self, args: Sequence[Any]) -> None:
        """Plan a call without a launch. NoKernel: with these arrays, their strides and dtypes, it would run by parts."""
        flat, _ = self._flatten_leading(self._arguments(args))
        shapes, kinds = self._kinds(self.prepare, flat)
        operands = [(name, x.T if s.transposed else x, s) for name, x, s in zip(self.names, flat, shapes)]
        forms = {name: describe(without_grad(x), name).form for name, x, s in operands if s.extents}
        numbers = tuple([x for _, x, s in operands if not s.extents])
        self.programs[kinds].steps(forms, next(iter(forms.values())).device, numbers, "bshd")


def kernel(definition: Callable) -> Fused:
    """Decorator: turn a Python function of arrays, written with fuse's functions, into fused kernels. TypeError: it is not a
    Python function, or has parameters that are not positional."""
    fused = Fused(definition)
    if wrong := [str(x) for x in fused.signature.parameters.values() if x.kind not in BY_PLACE]:
        raise TypeError(f"fuse.kernel: {fused.name} must have positional parameters only, no * or **, got {', '.join(wrong)}")
    return fused


def compile(definition: Callable, *shapes: tuple[int, ...] | Shape, dtype: str = "bfloat16", arch: str = "sm_90a") -> Fused:
    """Compile a function of arrays for arrays of these shapes ahead of time (see Fused.compile), and return it as a fused
    function."""
    fused = definition if isinstance(definition, Fused) else kernel(definition)
    fused.compile(*shapes, dtype=dtype, arch=arch)
    return fused
