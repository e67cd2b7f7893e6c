"""The candidates of a definition: plans of kernels that compute it, each with its cost."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..algebra import rules
from ..algebra.rules import Rule
from ..language import terms
from ..language.axes import Axis
from ..language.expression_text import writer_of_definition
from ..language.graph import softmax_of, walk
from ..language.names import unused
from ..language.terms import PARTS, Term
from ..language.trace import TracedDefinition
from . import plan_search
from .cost import Card
from .length_classes import fixed_value

# names of scratch buffers between kernels, by the operation that fills them; any other is called "hidden"
SCRATCH_NAMES = dict(zip(PARTS, ("maxima", "sums", "picks"))) | {name: name for name in ("partial_sums", "split_outputs")}


class Candidate(NamedTuple):
    """One plan to compute a definition. plan: the kernels and their cost. rules: the rules by which the definition was
    rewritten. roots: the rewritten terms. measured: its time in seconds on the GPU, if it was tuned."""

    plan: plan_search.FusionPlan
    rules: tuple[Rule, ...]
    roots: tuple[Term, ...]
    measured: float | None = None

    def __str__(self):
        measured = f", measured {1e6 * self.measured:.1f} us" if self.measured else ""
        return f"{self.plan}: {1e6 * self.plan.seconds:.1f} us by the roofline{measured}"

    def __repr__(self):  # in a list of them
        return f"<{self.summary}: {1e6 * self.plan.seconds:.1f} us by the roofline>"

    @property
    def summary(self) -> str:
        """A short description of each kernel."""
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
        """This candidate with other schedules, one a kernel."""
        kernels = []
        for kernel, schedule in zip(self.plan.kernels, schedules):
            if schedule is not None and schedule != kernel.schedule:
                kernel = copy.copy(kernel)
                kernel.schedule_override = schedule
            kernels.append(kernel)
        return (
            self
            if (*kernels,) == self.plan.kernels
            else self._replace(plan=plan_search.FusionPlan((*kernels,), self.plan.seconds))
        )

    def name_scratch(self, names: dict[Term, str]) -> list[Term]:
        """The terms that are kept in memory between the kernels; each gets a name in `names` that is not there."""
        scratch = [x for kernel in self.plan.kernels for x in kernel.roots if x not in names and x not in self.roots]
        for x in scratch:
            names[x] = unused(SCRATCH_NAMES.get(x.operation, "hidden"), names.values())
        return scratch

    def describe(self, local_names: Mapping[Term, str] = MappingProxyType({})) -> str:
        """Say in sentences which rules were used, what the kernels do, what the roofline estimates. local_names: names that
        terms get which make a long expression, and occur in it more than once."""
        sentences = [f"{rule.name[0].upper()}{rule.name[1:]}: {rule.equation}." for rule in self.rules] or [
            "The definition is not rewritten."
        ]
        writer = writer_of_definition(self.roots, local_names)
        scratch = self.name_scratch(writer.names)
        for x in walk(*self.roots):
            if x not in writer.names and (scores := softmax_of(x)) is not None:
                writer.names[x] = f"softmax({writer.expression(scores)})"
        for n, kernel in enumerate(self.plan.kernels, 1):
            number = "One kernel" if len(self.plan.kernels) == 1 else f"Kernel {n}"
            sentences.append(f"{number}: {kernel.describe()}.")
            work = getattr(kernel, "fused_work", [])
            work += [("result", x) for x in kernel.roots if x in scratch and ("epilogue", x) not in work]
            for place, x in work:
                name = writer.names.pop(x) if x in scratch else ""
                scores = softmax_of(x)
                form = "{}" if scores is None else "softmax({})"
                text, *parts = writer.in_parts(x if scores is None else scores)
                sentences.append(f"    {place}: {name and f'{name} = '}{form.format(text)}")
                sentences += [f"        where {line}" for line in parts]
                writer.names |= {x: name} if name else {}
        return "\n".join([*sentences, f"By the roofline it takes {1e6 * self.plan.seconds:.1f} us."])


@functools.lru_cache(1024)
def candidates(traced: TracedDefinition, card: Card) -> list[Candidate]:
    """All candidates on a card, sorted by the roofline's estimate; among equals the one with fewer kernels and then fewer
    rewritings comes first.

    fp16 ends at 65504. A scale that was moved may leave a larger intermediate behind, so for fp16 only rules that keep the
    range are used; and those that make a product larger, in plans whose kernels keep products in fp32 until they are
    results."""
    ranked: dict[tuple[str, ...], Candidate] = {}
    narrow = any(x.attr[1] == "float16" for _, x in traced.inputs)
    allowed = [rule for rule in rules.RULES if rule.keeps_range or rule.keeps_operands or not narrow]
    forms = rules.equivalent_forms(traced.roots, traced.table, allowed)
    terms.TABLES.append(traced.table)  # templates make views
    search = plan_search.PlanSearch(card)
    try:
        for form in forms:
            if len({*form.roots}) < len(form.roots):  # a kernel would write one term once, and each result needs its array
                continue
            grows = narrow and not all(rule.keeps_range for rule in form.rules)
            for plan in search.plans_for(form.roots):
                if grows and not _keeps_sums(plan, form.roots):
                    continue
                ranked.setdefault((*map(str, plan.kernels), str(form.roots)), Candidate(plan, form.rules, form.roots))
    finally:
        terms.TABLES.pop()
    return sorted(ranked.values(), key=lambda one: (one.plan.seconds, len(one.plan.kernels), len(one.rules)))


def _keeps_sums(plan: plan_search.FusionPlan, roots: Sequence[Term]) -> bool:
    """Do the plan's kernels keep products in fp32 until they are results, and write no intermediate made from one?"""
    stored = {x for kernel in plan.kernels for x in kernel.roots} - {*roots}
    keeps_sums = all(getattr(kernel, "keeps_sums", False) for kernel in plan.kernels if {*kernel.roots} & {*roots})
    return keeps_sums and not any(x.operation == "matmul" for x in walk(*stored))
