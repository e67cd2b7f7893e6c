"""The search for plans: which templates match a term, in which combinations, and what each plan costs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..language.axes import Axis
from ..language.graph import walk
from ..language.maps import BYTES, FP8, MAPS
from ..language.term_views import VIEWS, view_base
from ..language.terms import PARTS, Term
from ..templates.attention import AttentionCall
from ..templates.products.few_columns import MOST_COLUMNS, FewColumns
from ..templates.products.few_rows import FewRows
from ..templates.products.group_scales import GroupScales
from ..templates.products.many_rows import ManyRows
from ..templates.products.product import Product
from ..templates.products.since_ampere import SinceAmpere
from ..templates.rows.column_sums import ColumnSums
from ..templates.rows.deep_rows import DeepRows
from ..templates.rows.halves import Halves
from ..templates.rows.row_map import RowMap
from ..templates.split_kv_attention import SplitKVAttention
from .cost import Card

MAX_PLANS = 8  # plans at most that are kept for each group of terms
MANY_RESULTS = 5  # from so many results on, only the best plan of each is combined with others'

# operations that no row map computes
NOT_IN_ROW_MAPS = (
    "matmul",
    "transpose",
    "concat",
    "half",
    "repeat",
    "causal",
    "pick",
    "total",
    "partial_sums",
    "matmul_by",
    "select_columns",
    "merge_heads",
    "weighted",
    "repeat_columns",
    *PARTS,
    *VIEWS,
)


@dataclass(frozen=True)
class FusionPlan:
    """Kernels that compute terms. kernels: in an order in which each finds its inputs computed. seconds: their time together,
    by the roofline."""

    kernels: tuple[Any, ...]
    seconds: float

    def __str__(self):
        return ", then ".join(map(str, self.kernels))


def explain_no_plan(roots: Sequence[Term], card: Card) -> str:
    """Why there is no plan to compute these terms: which operation no template computes."""
    search = PlanSearch(card)
    if len({*roots}) < len(roots):
        return f"two results are equal: {', '.join(map(repr, roots)):.200}"
    if not card.fp8 and any(x.stored_dtype("") == FP8 for x in walk(*roots)):
        return f"{card.name} has no conversions to or from fp8, which need sm_89 or later"
    views = {y for x in walk(*roots) if x.operation == "matmul" for y in x.args[1:] if y.operation == "transpose"}
    for x in walk(*roots):
        if x.ndim >= 2 and x.operation != "input" and x not in views and not search.plans_for((x,)):
            shapes = ", ".join(
                "float32 " * (y.operation == "input" and y.attr[1] == "float32") + str(y.extents) for y in x.args
            )
            return f"no template computes {x.operation} of {shapes}: {x!r:.200}{_remedy(x)}"
    return f"no template computes these together: {', '.join(map(repr, roots)):.200}"


def _remedy(x: Term) -> str:
    """What to do where no template computes a term, for an error; "" if that is not known."""
    if x.operation == "matmul" and any(y.operation == "input" and y.attr[1] == "float32" for y in walk(x)):
        return "; products take bfloat16 and float16: convert what they multiply"
    if x.operation == "matmul" and min(y.ndim for y in x.args) > 3:
        return "; products have one leading axis: join them, x.reshape(-1, *x.shape[-2:])"
    if x.operation == "matmul" and x.args[0].operation in BYTES:
        return f"; rows are multiplied in 16 bits, by weights of any dtype: leave the cast to {x.args[0].operation} out"
    if x.operation == "split":
        return "; heads are a view: return what is split, and call a second function with its heads"
    if x.operation == "transpose" and x.args[0].operation == "input":
        return "; a transpose is a right factor: pass a copy of it as the argument"
    return ""


def has_columns_along(plan: FusionPlan, axes: Iterable[Axis]) -> bool:
    """Do kernels of the plan read or write arrays with columns along one of these axes?"""
    arrays = [x for kernel in plan.kernels for x in (*kernel.leaves, *kernel.roots) if x.ndim]
    return any(x.axes[-1] is not None and x.axes[-1].root in axes for x in arrays)


def has_split_kv(plan: FusionPlan) -> bool:
    """Does the plan have an attention whose keys are split into equal parts?"""
    return any(isinstance(kernel, SplitKVAttention) for kernel in plan.kernels)


class PlanSearch:
    """The search for plans on a card. It remembers the plans for each group of terms, because the forms of a function share
    most of their terms."""

    def __init__(self, card: Card):
        self.card, self.plans = card, dict[tuple[Term, ...], list[FusionPlan]]()
        self.seconds = functools.cache(card.seconds)

    def plans_for(self, roots: tuple[Term, ...]) -> list[FusionPlan]:
        """The plans to compute these terms together, the cheapest first."""
        if roots not in self.plans:
            plans: dict[tuple[str, ...], FusionPlan] = {}
            if totals := [x for x in roots if is_total_of_rows(x)]:
                last = ColumnSums(totals, self.card.processors)
                before = self.plans_for((*(x for x in roots if x not in totals), *last.leaves))
                self.plans[roots] = [FusionPlan((*plan.kernels, last), plan.seconds + self.seconds(last)) for plan in before]
                return self.plans[roots]
            kernels = self._kernels(roots)
            for plan in itertools.chain.from_iterable(map(self._plans_ending_with, kernels)):
                plans.setdefault(tuple(map(str, plan.kernels)), plan)
            products = any(isinstance(kernel, Product) for kernel in kernels)
            if len(roots) > 1 and roots[0].operation not in PARTS and (not plans or products):
                for plan in self._plans_one_by_one(roots):
                    plans.setdefault(tuple(map(str, plan.kernels)), plan)
            self.plans[roots] = sorted(plans.values(), key=lambda plan: plan.seconds)[:MAX_PLANS]
        return self.plans[roots]

    def _plans_one_by_one(self, roots: tuple[Term, ...]) -> list[FusionPlan]:
        """The plans to compute several roots in which each root has kernels of its own; or those with one row map for all that
        are maps of the same rows."""
        plans, max_plans = [], 2 if len(roots) < MANY_RESULTS else 1
        for groups in [tuple((x,) for x in roots), *(one for one in _group_row_maps(roots) if one != (roots,))]:
            for parts in itertools.product(*[self.plans_for(one)[:max_plans] for one in groups]):
                kernels = _drop_duplicates(dict.fromkeys(itertools.chain.from_iterable(part.kernels for part in parts)))
                plans.append(FusionPlan(kernels, sum(map(self.seconds, kernels))))
        return plans

    def _plans_ending_with(self, kernel: Any) -> list[FusionPlan]:
        """The plans that end with this kernel: those that compute its inputs, followed by it."""
        requested = [x for x in map(view_base, kernel.leaves) if x.operation != "input"]
        plans = []
        for needed in dict.fromkeys([_group_for_one_kernel(requested), *_group_row_maps(requested)]):
            for parts in itertools.product(*[self.plans_for(one)[:2] for one in needed]):
                before = tuple(dict.fromkeys(itertools.chain.from_iterable(part.kernels for part in parts)))
                seconds = sum(map(self.seconds, (*before, kernel)))
                plans.append(FusionPlan((*before, kernel), seconds))
        return plans

    def _kernels(self, roots: tuple[Term, ...]) -> list[Any]:
        """The kernels, of all templates, that compute these roots."""
        kernels: list[Any] = []
        if not self.card.fp8 and any(x.stored_dtype("") == FP8 for x in walk(*roots)):
            return kernels
        leaves = leaves_of_rows(roots)
        if not any(x.operation == "repeat_columns" for x in leaves):  # which is not in memory
            clusters = self.card.wgmma
            kernels.extend(filter(None, [template.matches(roots, leaves, clusters) for template in (RowMap, DeepRows)]))
        if roots[0].operation in PARTS:
            parts: Any = ManyRows if self.card.wgmma else SinceAmpere
            kernels.extend(parts.softmax_kernels_for(roots, self.card.processors))
        if _share_left_factor(roots) and self.card.wgmma:
            for template in (FewRows, ManyRows):
                kernels.extend(template.adjacent_kernels_for(roots, self.card.processors))
        if self.card.wgmma and roots[0].operation not in PARTS:
            kernels.extend(ManyRows.multi_result_kernels_for(roots, self.card.processors))
        if len(roots) == 1:
            split_kernels = SplitKVAttention.split_kernels_for(roots[0], self.card.processors)
            kernels.extend([*split_kernels] or AttentionCall.kernels_for(roots[0]))
            kernels.extend(Halves.kernels_for(roots[0], self.card.wgmma))
            kernels.extend(GroupScales.kernels_for(roots[0]))
        if len(roots) != 1 or roots[0].ndim not in (2, 3):
            return kernels
        if not self.card.wgmma:
            kernels.extend(SinceAmpere.kernels_for(roots[0]))
        else:
            many = FewColumns if roots[0].ndim == 2 and roots[0].extents[-1] <= MOST_COLUMNS else ManyRows
            for template in (FewRows, many):
                kernels.extend(template.kernels_for(roots[0], self.card.processors))
        return kernels


def _drop_duplicates(kernels: Iterable[Any]) -> tuple[Any, ...]:
    """The kernels without those whose results another kernel computes as well: that one takes their place, if its inputs are
    computed by then."""
    result, written = list(kernels), set[Term]()
    for n, kernel in enumerate(result):
        for other in result:
            needed = [x for x in map(view_base, other.leaves) if x.operation != "input"]
            if {*kernel.roots} <= {*other.roots} and written.issuperset(needed):
                result[n] = kernel = other
        written.update(kernel.roots)
    return tuple(dict.fromkeys(result))


def _share_left_factor(roots: Sequence[Term]) -> bool:
    """Are these several products, all with the same left factor?"""
    products = all(x.operation == "matmul" and x.ndim == 2 and x.args[0] is roots[0].args[0] for x in roots)
    return len(roots) > 1 and products


def _group_for_one_kernel(needed: Sequence[Term]) -> tuple[tuple[Term, ...], ...]:
    """The inputs of a kernel in groups that one kernel computes together: statistics of blocks of columns of the same rows
    (terms.PARTS), and products with the same left factor."""
    groups: dict[Any, list[Term]] = {}
    for x in needed:
        shared = x.operation in PARTS or (x.operation == "matmul" and x.ndim == 2)
        groups.setdefault((x.operation == "matmul", x.args[0]) if shared else x, []).append(x)
    return tuple([tuple(sorted(parts, key=lambda x: x.operation)) for parts in groups.values()])


def _group_row_maps(needed: Sequence[Term]) -> list[tuple[tuple[Term, ...], ...]]:
    """The grouping of _group_for_one_kernel with maps of the same rows as one row map. An empty list if there are no such
    maps."""
    groups: dict[Any, list[Term]] = {}
    for x in needed:
        if x.ndim == 2 and (x.operation in MAPS or x.operation in ("sum", "max", "partial_sums")):
            like = x.args[0] if x.operation == "partial_sums" else x
            groups.setdefault(tuple([name and name.root for name in like.axes]), []).append(x)
    rows = [tuple(terms) for terms in groups.values() if len(terms) > 1 and RowMap.matches(terms, leaves_of_rows(terms))]
    inside = {x for terms in rows for x in terms}
    rest = _group_for_one_kernel([x for x in needed if x not in inside])
    return [(*rows, *rest)] if rows else []


def is_total_of_rows(x: Term) -> bool:
    """Is the term a sum over all rows that a row map can accumulate while it reads the rows?"""
    if x.operation != "total" or x.attr != (-2,) or x.ndim != 2:
        return False
    (inner,) = x.args
    leaves = [inner] if inner.operation in (*NOT_IN_ROW_MAPS, "input") else leaves_of_rows([inner])
    rows = RowMap.matches([inner], leaves)
    return rows is not None and rows.can_sum_over_rows


def leaves_of_rows(roots: Sequence[Term]) -> list[Term]:
    """What a row map of these terms reads: arguments, and terms that no row map computes."""
    leaves, stack, visited = [], list(roots), set()
    while stack:
        x = stack.pop()
        if x in visited:
            continue
        visited.add(x)
        if (x.operation in NOT_IN_ROW_MAPS or x.operation == "input") and x not in roots:
            leaves.append(x)
        else:
            stack.extend(reversed(x.args))
    return leaves
