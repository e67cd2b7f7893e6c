"""Terms as a graph: what leads from some to others, which axes they have, what they look like."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from . import terms
from .axes import Axis
from .functions import MAPS
from .terms import INDEX, PARTS, Term


def walk(*roots: Term) -> Iterator[Term]:
    """All terms that the roots are made of, themselves included, each once, and after its operands."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        x, ready = stack.pop()
        if ready:
            yield x
        elif id(x) not in seen:
            seen.add(id(x))
            stack.append((x, True))
            stack.extend((y, False) for y in reversed(x.args))


def between(roots: Sequence[Term], leaves: Sequence[Term], with_leaves: bool = False) -> list[Term]:
    """The terms on the way from leaves to roots, each after its operands. The leaves themselves are left out, unless
    with_leaves."""
    ends, found, stack = set(leaves), set(), list(roots)
    while stack:
        x = stack.pop()
        if x not in found and (with_leaves or x not in ends):
            found.add(x)
            if x not in ends:
                stack.extend(x.args)
    return [x for x in walk(*roots) if x in found]


def is_tile(x: Term) -> bool:
    """Has the term rows and columns? It may also have a batch of them."""
    return x.ndim in (2, 3) and x.axes[-2] is not None and x.axes[-1] is not None


def along(x: Term) -> bool:
    """Has the term columns? An index has none: it has one number for each row."""
    return x.ndim > 0 and x.axes[-1] is not None and not is_index(x)


def is_index(x: Term) -> bool:
    """Is the term an argument of integers, one for each row?"""
    return x.operation == "input" and x.ndim == 1 and x.axes[0] is not None and x.attr[1] in INDEX


def softmax_of(x: Term) -> Term | None:
    """The term s, if x is exp(s - max(s)) / sum(exp(s - max(s))), its softmax; otherwise None."""
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


def axes(*terms: Term) -> list[str]:
    """The axes of each term as a string, a letter for each axis. The same axis has the same letter everywhere; each axis of
    length 1 has a letter of its own."""
    letters = itertools.chain("mknabcdfghijlopqruvwxyz", map(chr, itertools.count(0x100)))
    known: dict[Axis, str] = {}
    found = []
    for x in terms:
        roots = [Axis() if name is None else name.root for name in x.axes]
        for root in roots:
            if root not in known:
                known[root] = next(letters)
        found.append("".join(known[root] for root in roots))
    return found


def indices(roots: Sequence[Term]) -> dict[Term, tuple[Axis | None, int]]:
    """{index argument: (the axis that it chooses along, its extent)} of all indices in these terms."""
    found: dict[Term, tuple[Axis | None, int]] = {}
    for x in walk(*roots):
        if x.operation == "pick":
            found[x.args[1]] = x.args[0].axes[-1], x.args[0].extents[-1]
        elif x.operation == "is_column":
            found[x.args[0]] = x.attr
        elif x.operation == "matmul_by":
            found[x.args[2]] = x.args[1].axes[0], x.args[1].extents[0]
        elif x.operation == "among":
            found[x.args[1]] = x.args[2].axes[0], x.args[2].extents[0]
    return found


def rebuilt(x: Term, of: Sequence[Term]) -> Term:
    """The operation of x on other operands."""
    if x.operation in MAPS:
        return terms.apply(x.operation, *of)
    if x.operation in ("sum", "max"):
        return terms.reduce(x.operation, of[0])
    if x.operation == "half":
        return terms.half(of[0], x.attr)
    if x.operation == "split":
        return terms.split_like(of[0], x)
    if x.operation == "total":
        return terms.total_along(of[0], x.attr)
    if x.operation == "gathered":
        return terms.gathered(of[0], x.attr)
    if x.operation == "is_column":
        return terms.is_column(x, of[0])
    others: dict[str, Callable] = {
        "matmul": terms.matmul,
        "transpose": terms.transpose,
        "concat": terms.concat,
        "causal": terms.causal,
        "dropout": terms.dropout,
        "pick": terms.pick,
        "matmul_by": terms.matmul_by,
        "among": terms.among,
        "weighted": terms.weighted,
        "spread": terms.spread,
        **{name: functools.partial(terms.of_parts, name) for name in PARTS},
    }
    others |= {"merged": terms.merged, "stacked": terms.stacked, "heads": terms.heads, "flat": terms.flat, "rows": terms.rows}
    return others[x.operation](*of) if of else x
