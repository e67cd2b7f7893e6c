"""The module that is generated for a candidate."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..language.expression_text import equations
from ..language.names import unused
from ..language.term_views import view_base
from ..language.terms import Term
from ..language.trace import TracedDefinition
from ..writing import module_names, module_text
from .candidates import Candidate


def _write_view(x: Term, parameters: dict[Term, str]) -> str:
    """The line that makes a view of an array. The view's name is added to `parameters`."""
    base = parameters[x.args[0]]
    if x.operation == "flat":
        name, view = f"{base}_flat", f"{base}.reshape(-1)"
    elif x.operation == "rows":
        name, view = f"{base}_rows", f"{base}.reshape(-1, {base}.shape[{x.args[0].ndim - 1}])"
    elif x.operation == "split":
        place = x.args[0].ndim - 1
        lead = ", ".join(f"{base}.shape[{n}]" for n in range(place))
        name, view = f"{base}_of_heads", f"{base}.reshape({lead}, {x.attr}, -1).swapaxes({place - 1}, {place})"
    elif x.operation == "stacked":
        name, view = f"{base}_stacked", f"{base}.reshape(-1, {base}.shape[2])"
    else:
        name, heads = f"{base}_of_heads", f"{parameters[x.args[1]]}.shape[0]"
        view = f"{base}.reshape({base}.shape[0], {heads}, -1).swapaxes(0, 1)"
    parameters[x] = unused(name, parameters.values())
    return f"{parameters[x]} = {view}"


class GeneratedModule(NamedTuple):
    """A candidate as Python source. text: the module. names: the names of the arguments there. outs: the names of the results.
    scratch: the terms that are kept in memory between kernels. written: the results and the scratch. kernels: in the order of
    their launches. terms: the term of each parameter of the module's `launch`. overlaps_previous: for each launch
    that may begin before the previous one has ended, the places among these parameters of what it reads then and of what it
    writes; None for other launches. code: for each kernel its name and all that decides its machine code."""

    text: str
    names: tuple[str, ...]
    outs: tuple[str, ...]
    scratch: tuple[Term, ...]
    written: tuple[Term, ...]
    kernels: tuple[Any, ...]
    terms: tuple[Term, ...]
    overlaps_previous: tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...]
    code: tuple[tuple[str, str], ...]


@functools.lru_cache(1024)
def generate_module(name: str, traced: TracedDefinition, candidate: Candidate) -> GeneratedModule:
    """Generate the module of a candidate. The arguments, the results, the function and its variables keep their names, except
    where the module itself, or one of those that come before it in this order, already uses a name."""
    plan, requested = (
        candidate.plan,
        [*(key for key, _ in traced.inputs), *traced.outs, name, *(key for key, _ in traced.local_names)],
    )
    marks = module_names.make_marks(requested)
    remaining_marks = iter(marks)
    argument_names, outs, function = (
        [next(remaining_marks) for _ in traced.inputs],
        [next(remaining_marks) for _ in traced.outs],
        next(remaining_marks),
    )
    local_names = {x: mark for (_, x), mark in zip(traced.local_names, remaining_marks)}
    parameters = {x: mark for (_, x), mark in zip(traced.inputs, argument_names)} | dict(zip(candidate.roots, outs))
    scratch = candidate.name_scratch(parameters)
    views = []
    for x in dict.fromkeys(x for kernel in plan.kernels for x in kernel.leaves if view_base(x) is not x):
        if x.operation == "repeat_columns":  # a kernel reads its operand
            parameters[x] = parameters[x.args[0]]
        else:
            views.append(_write_view(x, parameters))
    labels = list[str]()
    for kernel in plan.kernels:
        labels.append(unused(function if kernel is plan.kernels[-1] else f"{function}_{kernel.label}", labels))
    kernel_texts = [(label, kernel.text(label, parameters, local_names)) for label, kernel in zip(labels, plan.kernels)]
    kernel_texts = module_text.rename_globals(function, kernel_texts)
    used_names = [*argument_names, *outs, *(parameters[x] for x in scratch)]
    rename = module_names.settle_names(requested, marks, module_text.outline(kernel_texts, used_names, views))
    title = equations(dict(zip(traced.outs, traced.roots)), {x: key for key, x in traced.local_names})
    kernel_texts = [(rename(label), text.with_names(rename)) for label, text in kernel_texts]
    text = module_text.assemble(title, rename(function), kernel_texts, [*map(rename, used_names)], [*map(rename, views)])
    written = (*candidate.roots, *scratch)
    all_terms = (*(x for _, x in traced.inputs), *written)
    code = tuple([(kernel, text.code) for kernel, text in kernel_texts if text.kernel])
    at = {x: n for n, x in enumerate(all_terms)}
    overlaps_previous = [
        (tuple(map(at.__getitem__, kernel.early_reads)), tuple(map(at.__getitem__, kernel.roots)))
        if kernel.overlaps_previous
        else None
        for kernel in plan.kernels
        if kernel.has_launch
    ]
    return GeneratedModule(
        text,
        tuple(map(rename, argument_names)),
        traced.outs,
        tuple(scratch),
        written,
        plan.kernels,
        all_terms,
        tuple(overlaps_previous),
        code,
    )
