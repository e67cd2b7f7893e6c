"""Traversals and patterns of term graphs: what lies between terms, which axes they have, what they match."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import term_operations, term_views, terms
from .axes import Axis, extent
from .maps import MAPS
from .terms import INDEX, PARTS, Term


def walk(*roots: Term) -> Iterator[Term]:
    """All terms that the roots depend on, themselves included, each once, after its operands (a topological order)."""
    visited: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        x, ready = stack.pop()
        if ready:
            yield x
        elif id(x) not in visited:
            visited.add(id(x))
            stack.append((x, True))
            stack.extend((y, False) for y in reversed(x.args))


def between(roots: Sequence[Term], leaves: Sequence[Term], with_leaves: bool = False) -> list[Term]:
    """The terms on the way from leaves to roots, each after its operands. The leaves themselves are left out, unless
    with_leaves."""
    ends, reached, stack = set(leaves), set(), list(roots)
    while stack:
        x = stack.pop()
        if x not in reached and (with_leaves or x not in ends):
            reached.add(x)
            if x not in ends:
                stack.extend(x.args)
    return [x for x in walk(*roots) if x in reached]


def is_matrix(x: Term) -> bool:
    """Does the term have rows and columns? It may also have a batch of them."""
    return x.ndim in (2, 3) and x.axes[-2] is not None and x.axes[-1] is not None


def has_columns(x: Term) -> bool:
    """Does the term have columns? An index has none: it has one number for each row."""
    return x.ndim > 0 and x.axes[-1] is not None and not is_index(x)


def is_index(x: Term) -> bool:
    """Is the term an argument of integers, one for each row?"""
    return x.operation == "input" and x.ndim == 1 and x.axes[0] is not None and x.attr[1] in INDEX


class GroupScaled(NamedTuple):
    """A matrix with a scale for each group of its rows (axis -2) or of its columns (-1): matrix * repeat(scales, group,
    axis)."""

    matrix: Term
    scales: Term
    group: int
    axis: int

    @property
    def transposed(self) -> GroupScaled:
        """The transpose of the matrix, with its scales."""
        return GroupScaled(terms.transpose(self.matrix), terms.transpose(self.scales), self.group, -3 - self.axis)

    @property
    def term(self) -> Term:
        return self.matrix * term_operations.repeat(self.scales, self.group, self.axis)


def group_scaled(x: Term) -> GroupScaled | None:
    """The GroupScaled that a term is, or whose transpose it is; None if it is something else."""
    inner = x.args[0] if x.operation == "transpose" else x
    if inner.operation != "mul" or inner.ndim != 2:
        return None
    for repeated, matrix in (inner.args, inner.args[::-1]):
        if repeated.operation == "repeat" and is_matrix(matrix) and repeated.ndim == 2:
            scaled = GroupScaled(matrix, repeated.args[0], *repeated.attr)
            return scaled if inner is x else scaled.transposed
    return None


def softmax_of(x: Term) -> Term | None:
    """The term s if x is its softmax, exp(s - max(s)) / sum(exp(s - max(s))); otherwise None."""
    if (
        x.operation != "div"
        or x.args[1].operation != "sum"
        or x.args[0] is not x.args[1].args[0]
        or x.args[0].operation != "exp"
    ):
        return None
    shifted = x.args[0].args[0]
    if shifted.operation != "sub" or shifted.args[1].operation != "max" or shifted.args[1].args[0] is not shifted.args[0]:
        return None
    return shifted.args[0]


def inputs(*roots: Term) -> list[Term]:
    """The arguments that these terms read."""
    return [x for x in walk(*roots) if x.operation == "input"]


def axis_names(*terms: Term) -> list[tuple[str, ...]]:
    """The names of each term's axes, such as m, k and n. The same axis has the same name everywhere; each axis of length 1 has
    a name of its own."""
    names = itertools.chain("mknabcdfghijlopqruvwxyz", map("x{}".format, itertools.count(1)))
    known: dict[Axis, str] = {}
    result = []
    for x in terms:
        roots = [Axis() if name is None else name.root for name in x.axes]
        for root in roots:
            if root not in known:
                known[root] = next(names)
        result.append(tuple([known[root] for root in roots]))
    return result


def indices(roots: Sequence[Term]) -> dict[Term, tuple[Axis | None, int]]:
    """{index argument: (the axis that it chooses along, its extent)} for all indices in these terms."""
    targets: dict[Term, tuple[Axis | None, int]] = {}
    for x in walk(*roots):
        if x.operation == "pick":
            targets[x.args[1]] = x.args[0].axes[-1], x.args[0].extents[-1]
        elif x.operation == "is_column":
            targets[x.args[0]] = x.attr
        elif x.operation == "matmul_by":
            targets[x.args[2]] = x.args[1].axes[0], x.args[1].extents[0]
        elif x.operation == "select_columns":
            targets[x.args[1]] = x.args[2].axes[0], x.args[2].extents[0]
    return targets


def rebuild(x: Term, args: Sequence[Term]) -> Term:
    """The operation of x on other operands."""
    if x.operation in MAPS:
        return terms.apply(x.operation, *args)
    if x.operation in ("sum", "max"):
        return terms.reduce(x.operation, args[0])
    if x.operation == "half":
        return term_operations.half(args[0], x.attr)
    if x.operation == "repeat":
        return term_operations.repeat(args[0], *x.attr)
    if x.operation == "split":
        return term_views.split_like(args[0], x)
    if x.operation == "total":
        return term_operations.total_along(args[0], x.attr)
    if x.operation == "partial_sums":
        return term_operations.partial_sums(args[0], x.attr)
    if x.operation == "is_column":
        return term_operations.is_column(x, args[0])
    others: dict[str, Callable] = {
        "matmul": terms.matmul,
        "transpose": terms.transpose,
        "concat": term_operations.concat,
        "causal": term_operations.causal,
        "dropout": term_operations.dropout,
        "pick": term_operations.pick,
        "matmul_by": term_operations.matmul_by,
        "select_columns": term_operations.select_columns,
        "weighted": term_operations.weighted,
        "repeat_columns": term_operations.repeat_columns,
        **{name: functools.partial(term_operations.reduce_parts, name) for name in PARTS},
    }
    others |= {
        "merge_heads": term_views.merge_heads,
        "stacked": term_views.stacked,
        "heads": term_views.heads,
        "flat": term_views.flat,
        "rows": term_views.rows,
    }
    return others[x.operation](*args) if args else x


def extents_at(x: Term, known: Mapping[Axis, Any]) -> tuple[Any, ...]:
    """The extents of a term if the arguments' axes have these extents. Those that do not follow from them stay."""

    def at(axis: Axis | None, n: int) -> Any:
        if axis is None:
            return n
        try:
            return known[axis.root] if axis.root in known else extent(axis, known)
        except KeyError:
            return n

    return tuple(map(at, x.axes, x.extents))
