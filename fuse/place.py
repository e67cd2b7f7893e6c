"""Which kernels compute a term: templates laid over it, and what each way costs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .axes import Axis
from .cost import Card
from .functions import FP8, MAPS
from .graph import walk
from .templates.attention import AttentionCall
from .templates.attention_of_parts import SplitKVAttention
from .templates.column_sums import ColumnSums
from .templates.deep_rows import DeepRows
from .templates.few_columns import MOST_COLUMNS, FewColumns
from .templates.few_rows import FewRows
from .templates.halves import Halves
from .templates.many_rows import ManyRows
from .templates.product import Product
from .templates.row_map import RowMap
from .templates.since_ampere import SinceAmpere
from .terms import PARTS, Term, viewed

MOST = 8  # ways that are kept of each term
SEVERAL = 5  # results from which on each has one way alone
VIEWS = "stacked", "heads", "split", "flat", "rows"
# what no row map computes
APART = (
    "matmul",
    "transpose",
    "concat",
    "half",
    "causal",
    "pick",
    "total",
    "gathered",
    "matmul_by",
    "among",
    "merged",
    "weighted",
    "spread",
    *PARTS,
    *VIEWS,
)


@dataclass(frozen=True)
class FusionPlan:
    """A way to compute terms. kernels: in an order in which each finds what it reads. seconds: what they take together, by the
    roofline."""

    kernels: tuple[Any, ...]
    seconds: float

    def __str__(self):
        return ", then ".join(map(str, self.kernels))


def why(roots: Sequence[Term], card: Card) -> str:
    """Why there is no way to compute these terms, in words: which operation no template computes."""
    search = PlanSearch(card)
    if len({*roots}) < len(roots):
        return f"a result is there twice: {', '.join(map(repr, roots)):.200}"
    if not card.fp8 and any(x.stored_dtype("") == FP8 for x in walk(*roots)):
        return f"{card.name} converts nothing to or from fp8, which begins with sm_89"
    for x in walk(*roots):
        if x.ndim >= 2 and x.operation != "input" and not search.of((x,)):
            shapes = ", ".join(
                "float32 " * (y.operation == "input" and y.attr[1] == "float32") + str(y.extents) for y in x.args
            )
            return f"no template computes {x.operation} of {shapes}: {x!r:.200}"
    return f"no template computes these together: {', '.join(map(repr, roots)):.200}"


def has_columns(way: FusionPlan, axes: Iterable[Axis]) -> bool:
    """Do kernels read or write arrays with columns along one of these axes?"""
    of = [x for kernel in way.kernels for x in (*kernel.leaves, *kernel.roots) if x.ndim]
    return any(x.axes[-1] is not None and x.axes[-1].root in axes for x in of)


def has_parts(way: FusionPlan) -> bool:
    """Is there an attention whose keys are cut into equal parts?"""
    return any(isinstance(kernel, SplitKVAttention) for kernel in way.kernels)


class PlanSearch:
    """The search for ways on a card. It remembers the ways to each group of terms, because the forms of a function share most
    of their terms."""

    def __init__(self, card: Card):
        self.card, self.known = card, dict[tuple[Term, ...], list[FusionPlan]]()
        self.seconds = functools.cache(card.seconds)

    def of(self, roots: tuple[Term, ...]) -> list[FusionPlan]:
        """The ways to compute these terms together, the cheapest first."""
        if roots not in self.known:
            found: dict[tuple[str, ...], FusionPlan] = {}
            if totals := [x for x in roots if is_total_of_rows(x)]:
                last = ColumnSums(totals, self.card.processors)
                before = self.of((*(x for x in roots if x not in totals), *last.leaves))
                self.known[roots] = [FusionPlan((*way.kernels, last), way.seconds + self.seconds(last)) for way in before]
                return self.known[roots]
            kernels = self._kernels(roots)
            for way in itertools.chain.from_iterable(map(self._with, kernels)):
                found.setdefault(tuple(map(str, way.kernels)), way)
            products = any(isinstance(kernel, Product) for kernel in kernels)
            if len(roots) > 1 and roots[0].operation not in PARTS and (not found or products):
                for way in self._one_by_one(roots):
                    found.setdefault(tuple(map(str, way.kernels)), way)
            self.known[roots] = sorted(found.values(), key=lambda way: way.seconds)[:MOST]
        return self.known[roots]

    def _one_by_one(self, roots: tuple[Term, ...]) -> list[FusionPlan]:
        """The ways to compute several roots in which each root has kernels of its own; or those with one row map for all that
        are maps of the same rows."""
        found, most = [], 2 if len(roots) < SEVERAL else 1
        for groups in [tuple((x,) for x in roots), *(one for one in _of_same_rows(roots) if one != (roots,))]:
            for parts in itertools.product(*[self.of(one)[:most] for one in groups]):
                kernels = _without_parts(dict.fromkeys(itertools.chain.from_iterable(part.kernels for part in parts)))
                found.append(FusionPlan(kernels, sum(map(self.seconds, kernels))))
        return found

    def _with(self, kernel: Any) -> list[FusionPlan]:
        """The ways that end with this kernel: those to compute what it reads, followed by it."""
        wanted = [x for x in map(viewed, kernel.leaves) if x.operation != "input"]
        found = []
        for needed in dict.fromkeys([_together(wanted), *_of_same_rows(wanted)]):
            for parts in itertools.product(*[self.of(one)[:2] for one in needed]):
                before = tuple(dict.fromkeys(itertools.chain.from_iterable(part.kernels for part in parts)))
                seconds = sum(map(self.seconds, (*before, kernel)))
                found.append(FusionPlan((*before, kernel), seconds))
        return found

    def _kernels(self, roots: tuple[Term, ...]) -> list[Any]:
        """The kernels, of all templates, that compute these roots."""
        found: list[Any] = []
        if not self.card.fp8 and any(x.stored_dtype("") == FP8 for x in walk(*roots)):
            return found
        leaves = leaves_of_rows(roots)
        if not any(x.operation == "spread" for x in leaves):  # which does not lie in memory
            clusters = self.card.wgmma
            found.extend(filter(None, [template.matches(roots, leaves, clusters) for template in (RowMap, DeepRows)]))
        if roots[0].operation in PARTS:
            parts: Any = ManyRows if self.card.wgmma else SinceAmpere
            found.extend(parts.softmax_kernels_for(roots, self.card.processors))
        if _share(roots) and self.card.wgmma:
            for template in (FewRows, ManyRows):
                found.extend(template.adjacent_kernels_for(roots, self.card.processors))
        if self.card.wgmma and roots[0].operation not in PARTS:
            found.extend(ManyRows.together(roots, self.card.processors))
        if len(roots) == 1:
            parted = SplitKVAttention.of_parts(roots[0], self.card.processors)
            found.extend([*parted] or AttentionCall.kernels_for(roots[0]))
            found.extend(Halves.kernels_for(roots[0], self.card.wgmma))
        if len(roots) != 1 or roots[0].ndim not in (2, 3):
            return found
        if not self.card.wgmma:
            found.extend(SinceAmpere.kernels_for(roots[0]))
        else:
            many = FewColumns if roots[0].ndim == 2 and roots[0].extents[-1] <= MOST_COLUMNS else ManyRows
            for template in (FewRows, many):
                found.extend(template.kernels_for(roots[0], self.card.processors))
        return found


def _without_parts(kernels: Iterable[Any]) -> tuple[Any, ...]:
    """The kernels without those whose results another kernel gives as well: that one takes their place, if what it reads is
    known there."""
    found, known = list(kernels), set[Term]()
    for n, kernel in enumerate(found):
        for other in found:
            needed = [x for x in map(viewed, other.leaves) if x.operation != "input"]
            if {*kernel.roots} <= {*other.roots} and known.issuperset(needed):
                found[n] = kernel = other
        known.update(kernel.roots)
    return tuple(dict.fromkeys(found))


def _share(roots: Sequence[Term]) -> bool:
    """Are these several products, all with the same left factor?"""
    products = all(x.operation == "matmul" and x.ndim == 2 and x.args[0] is roots[0].args[0] for x in roots)
    return len(roots) > 1 and products


def _together(needed: Sequence[Term]) -> tuple[tuple[Term, ...], ...]:
    """What a kernel needs, in groups that one kernel makes together: what is known of the parts of the same rows
    (terms.PARTS), and products with the same left factor."""
    found: dict[Any, list[Term]] = {}
    for x in needed:
        shared = x.operation in PARTS or (x.operation == "matmul" and x.ndim == 2)
        found.setdefault((x.operation == "matmul", x.args[0]) if shared else x, []).append(x)
    return tuple([tuple(sorted(parts, key=lambda x: x.operation)) for parts in found.values()])


def _of_same_rows(needed: Sequence[Term]) -> list[tuple[tuple[Term, ...], ...]]:
    """Such groups once more, with maps of the same rows as one row map. An empty list if there are no such maps."""
    groups: dict[Any, list[Term]] = {}
    for x in needed:
        if x.ndim == 2 and (x.operation in MAPS or x.operation in ("sum", "max", "gathered")):
            like = x.args[0] if x.operation == "gathered" else x
            groups.setdefault(tuple([name and name.root for name in like.axes]), []).append(x)
    rows = [tuple(some) for some in groups.values() if len(some) > 1 and RowMap.matches(some, leaves_of_rows(some))]
    inside = {x for some in rows for x in some}
    rest = _together([x for x in needed if x not in inside])
    return [(*rows, *rest)] if rows else []


def is_total_of_rows(x: Term) -> bool:
    """Is the term a sum over all rows that a row map can gather as the rows go by?"""
    if x.operation != "total" or x.attr != (-2,) or x.ndim != 2:
        return False
    (inner,) = x.args
    leaves = [inner] if inner.operation in (*APART, "input") else leaves_of_rows([inner])
    rows = RowMap.matches([inner], leaves)
    return rows is not None and rows.gathers


def leaves_of_rows(roots: Sequence[Term]) -> list[Term]:
    """What a row map of these terms reads: arguments, and terms that no row map computes."""
    found, stack, seen = [], list(roots), set()
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if (x.operation in APART or x.operation == "input") and x not in roots:
            found.append(x)
        else:
            stack.extend(reversed(x.args))
    return found
