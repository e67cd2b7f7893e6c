"""What was found for a definition: the ways to compute it, what they cost, and the module of each."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import module, names, place, rules, terms
from .axes import Axis
from .classes import fixed_value
from .cost import Card
from .rules import Rule
from .terms import PARTS, Term, viewed
from .trace import TracedDefinition
from .writing import equations

# what is kept between kernels is called so, or "hidden"
HIDDEN = dict(zip(PARTS, ("maxima", "sums", "picks"))) | {name: name for name in ("gathered", "attended")}


class Candidate(NamedTuple):
    """A way to compute a definition. plan: the kernels. rules: those by which the definition was rewritten. roots: the terms
    that it was rewritten to. measured: seconds on the card, if it was tuned."""

    plan: place.FusionPlan
    rules: tuple[Rule, ...]
    roots: tuple[Term, ...]
    measured: float | None = None

    def __str__(self):
        measured = f", measured {1e6 * self.measured:.1f} us" if self.measured else ""
        return f"{self.plan}: {1e6 * self.plan.seconds:.1f} us by the roofline{measured}"

    @property
    def summary(self) -> str:
        """In a few words: what each kernel does."""
        return ", then ".join([kernel.describe().partition(", ")[0] for kernel in self.plan.kernels])

    @property
    def identity(self) -> tuple[Any, ...]:
        """What two candidates for arrays of the same kinds have in common whose modules have the same text, but for how their
        products are cut."""
        return tuple([(str(kernel), repr(kernel.cut)) for kernel in self.plan.kernels]), str(self.roots)

    def schedules(self, known: Mapping[Axis, Any]) -> tuple[Any, ...]:
        """How each kernel's product is cut for these lengths of axes, None where there is nothing to cut. The lengths may be
        those of a call that is watched."""
        made = [kernel.schedule_at(known) if hasattr(kernel, "schedule_at") else None for kernel in self.plan.kernels]
        return tuple(map(fixed_value, made))

    def scheduled(self, schedules: Sequence[Any]) -> Candidate:
        """The same with products that are cut like that."""
        kernels = []
        for kernel, schedule in zip(self.plan.kernels, schedules):
            if schedule is not None and schedule != kernel.schedule:
                kernel = copy.copy(kernel)
                kernel.scheduled = schedule
            kernels.append(kernel)
        return (
            self if (*kernels,) == self.plan.kernels else self._replace(plan=place.FusionPlan((*kernels,), self.plan.seconds))
        )

    def describe(self) -> str:
        """In sentences: which rules were used, what the kernels do, what the roofline estimates."""
        said = [f"{rule.name[0].upper()}{rule.name[1:]}: {rule.equation}." for rule in self.rules] or [
            "The definition is taken as it stands."
        ]
        said += [
            f"{'One kernel' if len(self.plan.kernels) == 1 else f'Kernel {n}'}: {kernel.describe()}."
            for n, kernel in enumerate(self.plan.kernels, 1)
        ]
        return "\n".join([*said, f"By the roofline it takes {1e6 * self.plan.seconds:.1f} us."])


@functools.lru_cache(1024)
def candidates(found: TracedDefinition, card: Card) -> list[Candidate]:
    """All ways that were found, sorted by the roofline's estimate; among equals the one with fewer kernels and fewer
    rewritings comes first.

    fp16 ends at 65504. A scale that was moved may leave something behind that is too large for it, so for fp16 only those
    rules are used that keep the range."""
    every: dict[tuple[str, ...], Candidate] = {}
    narrow = any(x.attr[1] == "float16" for _, x in found.inputs)
    forms = rules.equal(found.roots, found.table, [rule for rule in rules.RULES if rule.keeps_range or not narrow])
    terms.TABLES.append(found.table)  # templates make views
    search = place.PlanSearch(card)
    try:
        for form in forms:
            if len({*form.roots}) < len(form.roots):  # each result has memory of its own, which a kernel would write once
                continue
            for plan in search.of(form.roots):
                every.setdefault((*map(str, plan.kernels), str(form.roots)), Candidate(plan, form.rules, form.roots))
    finally:
        terms.TABLES.pop()
    return sorted(every.values(), key=lambda one: (one.plan.seconds, len(one.plan.kernels), len(one.rules)))


def _view(x: Term, parameters: dict[Term, str]) -> str:
    """The line that makes a view of an array, which it adds to the names in `parameters`."""
    base = parameters[x.args[0]]
    if x.operation == "flat":
        called, made = f"{base}_flat", f"{base}.reshape(-1)"
    elif x.operation == "rows":
        called, made = f"{base}_rows", f"{base}.reshape(-1, {base}.shape[{x.args[0].ndim - 1}])"
    elif x.operation == "split":
        place = x.args[0].ndim - 1
        lead = ", ".join(f"{base}.shape[{n}]" for n in range(place))
        called, made = f"{base}_of_heads", f"{base}.reshape({lead}, {x.attr}, -1).swapaxes({place - 1}, {place})"
    elif x.operation == "stacked":
        called, made = f"{base}_stacked", f"{base}.reshape(-1, {base}.shape[2])"
    else:
        called, heads = f"{base}_of_heads", f"{parameters[x.args[1]]}.shape[0]"
        made = f"{base}.reshape({base}.shape[0], {heads}, -1).swapaxes(0, 1)"
    parameters[x] = names.unused(called, parameters.values())
    return f"{parameters[x]} = {made}"


class GeneratedModule(NamedTuple):
    """A way to compute a definition, as a module. text: the module. names: what the arguments are called there. outs: the
    names of the results. scratch: the terms that are kept in memory between kernels. written: the results and those. kernels:
    in the order of their launches. terms: the term that each parameter of the module's `launch` stands for. early: of each
    launch that may begin early, the places among these of what it reads then, and of what it writes; None of others. code: of
    each kernel its name and what decides its machine code."""

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
def chosen(name: str, found: TracedDefinition, candidate: Candidate) -> GeneratedModule:
    """The module of a candidate. The arguments, the results, the function and its variables keep their names, except where the
    module uses a name for something else, or one of those that come before it here has it."""
    plan, own = candidate.plan, [*(key for key, _ in found.inputs), *found.outs, name, *(key for key, _ in found.local_names)]
    marks = names.marks(own)
    each = iter(marks)
    given, outs, function = [next(each) for _ in found.inputs], [next(each) for _ in found.outs], next(each)
    local_names = {x: mark for (_, x), mark in zip(found.local_names, each)}
    parameters = {x: mark for (_, x), mark in zip(found.inputs, given)} | dict(zip(candidate.roots, outs))
    scratch = [x for kernel in plan.kernels for x in kernel.roots if x not in parameters]
    for x in scratch:
        parameters[x] = names.unused(HIDDEN.get(x.operation, "hidden"), parameters.values())
    views = []
    for x in dict.fromkeys(x for kernel in plan.kernels for x in kernel.leaves if viewed(x) is not x):
        if x.operation == "spread":  # of which a kernel reads what it is of
            parameters[x] = parameters[x.args[0]]
        else:
            views.append(_view(x, parameters))
    labels = list[str]()
    for kernel in plan.kernels:
        labels.append(names.unused(function if kernel is plan.kernels[-1] else f"{function}_{kernel.label}", labels))
    texts = [(label, kernel.text(label, parameters, local_names)) for label, kernel in zip(labels, plan.kernels)]
    texts = module.rename_globals(function, texts)
    taken = [*given, *outs, *(parameters[x] for x in scratch)]
    put = names.settle_names(own, marks, module.outline(texts, taken, views))
    title = equations(dict(zip(found.outs, found.roots)), {x: key for key, x in found.local_names})
    texts = [(put(label), text.with_names(put)) for label, text in texts]
    text = module.assemble(title, put(function), texts, [*map(put, taken)], [*map(put, views)])
    written = (*candidate.roots, *scratch)
    every = (*(x for _, x in found.inputs), *written)
    code = tuple([(kernel, text.code) for kernel, text in texts if text.kernel])
    at = {x: n for n, x in enumerate(every)}
    early = [
        (tuple(map(at.__getitem__, kernel.ahead)), tuple(map(at.__getitem__, kernel.roots))) if kernel.early else None
        for kernel in plan.kernels
        if kernel.has_launch
    ]
    return GeneratedModule(
        text, tuple(map(put, given)), found.outs, tuple(scratch), written, plan.kernels, every, tuple(early), code
    )
