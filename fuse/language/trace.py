"""Tracing: a definition is called once with terms in place of arrays, which records what it computes for arrays of these
shapes."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from tiles.calls.jax_call import is_jax_tracer
from tiles.launching.frameworks import describe, without_grad

from . import terms
from .axes import Axis
from .graph import indices, walk
from .maps import MAPS
from .names import identifiers
from .terms import Term

ANY = 64 * 3 * 5 * 7 * 2**20  # the placeholder for an unknown extent, which is compared with none


class Shape(NamedTuple):
    """The shape of an argument: its extents, () for a number; its dtype; and whether it is `transposed`, the transpose of an
    array in memory."""

    extents: tuple[int, ...]
    dtype: str
    transposed: bool = False

    @property
    def ones(self) -> tuple[bool, ...]:
        """The extents that are 1, because a length of 1 broadcasts."""
        return tuple([True if n == 1 else False for n in self.extents])  # noqa: SIM210, torch's symbols are decided here

    @property
    def in_memory(self) -> tuple[int, ...]:
        """The extents of the array as it lies in memory, with its last axis contiguous: those of the transpose if
        `transposed`."""
        return self.extents[::-1] if self.transposed else self.extents


def kinds_of(shapes: Sequence[Shape]) -> tuple:
    """The kind of each argument, by which the program of a call is chosen: dtype, transposed or not, and which extents are
    1."""
    return tuple([(s.dtype, s.transposed, s.ones) for s in shapes])


def loose_shapes(kinds: tuple) -> tuple[Shape, ...]:
    """Placeholder shapes of these kinds: only which of their extents are 1 means anything."""
    return tuple([Shape(tuple([1 if one else ANY for one in ones]), *rest) for *rest, ones in kinds])


class TracedDefinition(NamedTuple):
    """A definition as terms. inputs: (name, term) of each argument. roots: the results. outs: their names, from the keys of a
    dictionary or free letters. single: does it return one array, not a tuple? local_names: (name, term) of the definition's
    local variables. table: the TermTable that the terms were made in."""

    inputs: tuple[tuple[str, Term], ...]
    roots: tuple[Term, ...]
    outs: tuple[str, ...]
    single: bool
    local_names: tuple[tuple[str, Term], ...]
    table: terms.TermTable


@functools.lru_cache(1024)
def trace_definition(definition: Callable, names: tuple[str, ...], shapes: tuple[Shape, ...]) -> TracedDefinition:
    """The definition as terms, for arguments of these shapes."""
    traced = _trace_with_rows(definition, names, shapes, None)
    if any(x.ndim in (2, 3) and x.extents[-2] == 1 for x in traced.roots):  # what has one row does not broadcast along rows
        with suppress(ValueError):  # an argument with one row broadcasts along rows
            with_rows = _trace_with_rows(definition, names, shapes, Axis())
            keeps_rows = all(x.ndim in (2, 3) and (x.axes[-2] or x.operation == "total") for x in with_rows.roots)
            traced = with_rows if keeps_rows else traced
    return traced


def leading_axes_are_rows(roots: Sequence[Term]) -> bool:
    """Are leading axes nothing but more rows? Then arrays may be passed with these axes joined into one. This is so if all
    terms that have leading axes have the same ones, none of them is transposed or the right factor of a product, and none meets
    a term that has only some of these axes."""
    nodes = list(walk(*roots))
    batched = [x for x in nodes if x.ndim > 2]
    if not batched:
        return True
    leading_axes = {tuple(name and name.root for name in x.axes[:-1]) for x in (*batched, *roots)}
    (leading, *others) = leading_axes
    have_same_rows = all(
        x.operation in MAPS or x.operation in ("input", "sum", "max", "concat", "half", "dropout", "pick")
        or (x.operation == "matmul" and x.args[1].ndim == 2)
        for x in batched
    )  # fmt: skip
    chosen = {x for x in indices(roots) if tuple(name and name.root for name in x.axes) == leading}
    has_leading_axis = any(
        name is not None and name.root in leading for x in nodes if x.ndim <= 2 and x not in chosen for name in x.axes
    )
    return have_same_rows and not others and not has_leading_axis


def _trace_with_rows(
    definition: Callable, names: tuple[str, ...], shapes: tuple[Shape, ...], rows: Axis | None
) -> TracedDefinition:
    dtype = next((s.dtype for s in shapes if s.extents), "float32")
    table = terms.TermTable(any(ANY in s.extents for s in shapes), dtype)
    terms.TABLES.append(table)
    try:
        inputs = {}
        for name, s in zip(names, shapes):
            inputs[name] = x = terms.input_term(name, s.in_memory, s.dtype)
            if rows is not None and x.ndim in (2, 3) and x.extents[-2] == 1:
                x.axes = (*x.axes[:-2], rows, x.axes[-1])
        arguments = [terms.transpose(inputs[name]) if s.transposed else inputs[name] for name, s in zip(names, shapes)]
        result, local_names = _call_definition(definition, arguments)
    finally:
        terms.TABLES.pop()
    named = result if isinstance(result, dict) else {}
    results = tuple(named.values()) if named else result if isinstance(result, tuple) else (result,)
    for x in results:
        if not isinstance(x, Term) or x.ndim < 2:
            raise TypeError(f"{definition.__name__}: must return matrices (rows, columns) made of its arguments, got {x!r:.80}")
    for x in indices(results) if rows is not None else ():
        if x.axes == (None,):  # the index of a single row
            x.axes = (rows,)
    outs = identifiers(named, names) or result_names(names, len(results))
    local_terms = tuple((name, x) for name, x in local_names.items() if x.args and name not in outs)
    single = not isinstance(result, (tuple, dict))
    return TracedDefinition(tuple(inputs.items()), tuple(results), outs, single, local_terms, table)


def result_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """The names of `count` results of a function with these parameters."""
    return tuple(([name for name in "yzuv" if name not in names] + [f"out_{n}" for n in range(count)])[:count])


def _call_definition(definition: Callable, arguments: Sequence[Term]) -> tuple[Any, dict[str, Term]]:
    """(the definition's result, {name: term} of its local variables). A definition that was made from another one, as a
    gradient is, has the variables of that one. An error gets the line of the definition where it arose."""
    code, table = getattr(definition, "named_by", definition).__code__, terms.TABLES[-1]
    table.code = code
    try:
        result = definition(*arguments)
        return result, {name: x for frame in table.frames for name, x in frame.f_locals.items() if isinstance(x, Term)}
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        line = _error_line(error, code)
        if not line:
            raise
        located: Any = (TypeError if isinstance(error, AttributeError) else type(error))(f"{error}; in {line}")
        located.name = getattr(error, "name", None)  # the attribute that does not exist
        raise located from error
    finally:
        table.code = None
        table.frames.clear()


def _error_line(error: Exception, code: Any) -> str:
    """The line of this code in which an error arose, "" if there is none."""
    at = [frame.f_lineno for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    text = linecache.getline(code.co_filename, at[-1]).strip() if at else ""
    return f"line {at[-1]} of {os.path.basename(code.co_filename)}: {text}" if at else ""


# ---- arrays ---------------------------------------------------------------------------------------------------------
def shape_of(x: Any, name: str) -> Shape:
    """The Shape of an argument. TypeError: it is an array without axes."""
    if isinstance(x, (bool, int, float)):
        return Shape((), "float32")
    if hasattr(x, "stride"):  # a torch tensor, which may have no address
        extents, strides, unit, dtype = tuple(x.shape), x.stride(), 1, str(x.dtype).removeprefix("torch.")
    elif is_jax_tracer(x):  # of JAX
        return Shape(tuple(x.shape), str(np.dtype(x.dtype)))
    else:
        form = describe(x, name).form
        extents, strides, unit, dtype = form.shape, form.strides, form.itemsize, form.dtype
    if not extents:
        raise TypeError(f"{name}: must be a number of Python's, or have axes, and is an array of shape (): pass {name}.item()")
    transposed = len(extents) == 2 and strides[1] != unit and strides[0] == unit and extents[0] != 1 and extents[1] != 1
    return Shape(extents, dtype, True if transposed else False)  # noqa: SIM210, torch's symbols are decided here


def ordinal_of(arrays: Sequence[Any]) -> int | None:
    """The ordinal of the GPU on which the arrays lie, or under jax.jit will lie; None in host memory."""
    first = next(x for x in arrays if hasattr(x, "shape"))
    if is_jax_tracer(first):
        return 0 if sys.modules["jax"].default_backend() == "gpu" else None
    return describe(without_grad(first), "x").device
