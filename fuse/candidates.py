"""The candidates of a definition: plans of kernels that compute it, each with its cost, and the module that is generated for
one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import module, names, rules, terms
from . import plan_search as place
from .axes import Axis
from .cost import Card
from .expression_text import equations
from .length_classes import fixed_value
from .rules import Rule
from .term_views import view_base
from .terms import PARTS, Term
from .trace import TracedDefinition

# names of scratch buffers between kernels, by the operation that fills them; any other is called "hidden"
SCRATCH_NAMES = dict(zip(PARTS, ("maxima", "sums", "picks"))) | {name: name for name in ("partial_sums", "split_outputs")}


class Candidate(NamedTuple):
    """One plan to compute a definition. plan: the kernels and their cost. rules: the rules by which the definition was
    rewritten. roots: the rewritten terms. measured: its time in seconds on the GPU, if it was tuned."""

    plan: place.FusionPlan
    rules: tuple[Rule, ...]
    roots: tuple[Term, ...]
    measured: float | None = None

    def __str__(self):
        measured = f", measured {1e6 * self.measured:.1f} us" if self.measured else ""
        return f"{self.plan}: {1e6 * self.plan.seconds:.1f} us by the roofline{measured}"

    @property
    def summary(self) -> str:
        """What each kernel does, in a few words."""
        return ", then ".join([kernel.describe().partition(", ")[0] for kernel in self.plan.kernels])

    @property
    def identity(self) -> tuple[Any, ...]:
        """A key that two candidates for arrays of the same kinds share if their modules have the same text, up to the tiles of
        their products."""
        return tuple([(str(kernel), repr(kernel.text_key)) for kernel in self.plan.kernels]), str(self.roots)

    def schedules(self, known: Mapping[Axis, Any]) -> tuple[Any, ...]:
        """The schedule of each kernel for these extents of axes, None where the kernel has none to choose. The extents may be
        watched lengths of a call."""
        schedules = [kernel.schedule_at(known) if hasattr(kernel, "schedule_at") else None for kernel in self.plan.kernels]
        return tuple(map(fixed_value, schedules))

    def with_schedules(self, schedules: Sequence[Any]) -> Candidate:
        """The same candidate with these schedules."""
        kernels = []
        for kernel, schedule in zip(self.plan.kernels, schedules):
            if schedule is not None and schedule != kernel.schedule:
                kernel = copy.copy(kernel)
                kernel.schedule_override = schedule
            kernels.append(kernel)
        return (
            self if (*kernels,) == self.plan.kernels else self._replace(plan=place.FusionPlan((*kernels,), self.plan.seconds))
        )

    def describe(self) -> str:
        """In sentences: which rules were used, what the kernels do, what the roofline estimates."""
        sentences = [f"{rule.name[0].upper()}{rule.name[1:]}: {rule.equation}." for rule in self.rules] or [
            "The definition is not rewritten."
        ]
        sentences += [
            f"{'One kernel' if len(self.plan.kernels) == 1 else f'Kernel {n}'}: {kernel.describe()}."
            for n, kernel in enumerate(self.plan.kernels, 1)
        ]
        return "\n".join([*sentences, f"By the roofline it takes {1e6 * self.plan.seconds:.1f} us."])


@functools.lru_cache(1024)
def candidates(traced: TracedDefinition, card: Card) -> list[Candidate]:
    """All candidates on a card, sorted by the roofline's estimate; among equals the one with fewer kernels and then fewer
    rewritings comes first.

    fp16 ends at 65504. A scale that was moved may leave a larger intermediate behind, so for fp16 only rules that keep the
    range are used."""
    ranked: dict[tuple[str, ...], Candidate] = {}
    narrow = any(x.attr[1] == "float16" for _, x in traced.inputs)
    forms = rules.equivalent_forms(traced.roots, traced.table, [rule for rule in rules.RULES if rule.keeps_range or not narrow])
    terms.TABLES.append(traced.table)  # templates make views
    search = place.PlanSearch(card)
    try:
        for form in forms:
            if len({*form.roots}) < len(form.roots):  # a kernel would write one term once, and each result needs its array
                continue
            for plan in search.plans_for(form.roots):
                ranked.setdefault((*map(str, plan.kernels), str(form.roots)), Candidate(plan, form.rules, form.roots))
    finally:
        terms.TABLES.pop()
    return sorted(ranked.values(), key=lambda one: (one.plan.seconds, len(one.plan.kernels), len(one.rules)))


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
    parameters[x] = names.unused(name, parameters.values())
    return f"{parameters[x]} = {view}"


class GeneratedModule(NamedTuple):
    """A candidate as Python source. text: the module. names: the names of the arguments there. outs: the names of the results.
    scratch: the terms that are kept in memory between kernels. written: the results and the scratch. kernels: in the order of
    their launches. terms: the term of each parameter of the module's `launch`. early: for each launch that may
    begin early, the places among these parameters of what it reads then and of what it writes; None for other launches. code:
    for each kernel its name and all that decides its machine code."""

    text: str
    names: tuple[str, ...]
    outs: tuple[str, ...]
    scratch: tuple[Term, ...]
    written: tuple[Term, ...]
    kernels: tuple[Any, ...]
    terms: tuple[Term, ...]
    early: tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, ...]
    code: tuple[tuple[str, str], ...]


@functools.lru_cache(1024)
def generate_module(name: str, traced: TracedDefinition, candidate: Candidate) -> GeneratedModule:
    """Generate the module of a candidate. The arguments, the results, the function and its variables keep their names, except
    where the module itself, or one of those that come before it in this order, already uses a name."""
    plan, wanted = (
        candidate.plan,
        [*(key for key, _ in traced.inputs), *traced.outs, name, *(key for key, _ in traced.local_names)],
    )
    marks = names.make_marks(wanted)
    each = iter(marks)
    argument_names, outs, function = [next(each) for _ in traced.inputs], [next(each) for _ in traced.outs], next(each)
    local_names = {x: mark for (_, x), mark in zip(traced.local_names, each)}
    parameters = {x: mark for (_, x), mark in zip(traced.inputs, argument_names)} | dict(zip(candidate.roots, outs))
    scratch = [x for kernel in plan.kernels for x in kernel.roots if x not in parameters]
    for x in scratch:
        parameters[x] = names.unused(SCRATCH_NAMES.get(x.operation, "hidden"), parameters.values())
    views = []
    for x in dict.fromkeys(x for kernel in plan.kernels for x in kernel.leaves if view_base(x) is not x):
        if x.operation == "repeat_columns":  # a kernel reads its operand
            parameters[x] = parameters[x.args[0]]
        else:
            views.append(_write_view(x, parameters))
    labels = list[str]()
    for kernel in plan.kernels:
        labels.append(names.unused(function if kernel is plan.kernels[-1] else f"{function}_{kernel.label}", labels))
    kernel_texts = [(label, kernel.text(label, parameters, local_names)) for label, kernel in zip(labels, plan.kernels)]
    kernel_texts = module.rename_globals(function, kernel_texts)
    used_names = [*argument_names, *outs, *(parameters[x] for x in scratch)]
    rename = names.settle_names(wanted, marks, module.outline(kernel_texts, used_names, views))
    title = equations(dict(zip(traced.outs, traced.roots)), {x: key for key, x in traced.local_names})
    kernel_texts = [(rename(label), text.with_names(rename)) for label, text in kernel_texts]
    text = module.assemble(title, rename(function), kernel_texts, [*map(rename, used_names)], [*map(rename, views)])
    written = (*candidate.roots, *scratch)
    all_terms = (*(x for _, x in traced.inputs), *written)
    code = tuple([(kernel, text.code) for kernel, text in kernel_texts if text.kernel])
    at = {x: n for n, x in enumerate(all_terms)}
    early = [
        (tuple(map(at.__getitem__, kernel.early_reads)), tuple(map(at.__getitem__, kernel.roots))) if kernel.early else None
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
        tuple(early),
        code,
    )
