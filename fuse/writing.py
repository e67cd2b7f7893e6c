"""Terms as Python text: the expressions and assignments of a kernel, and of equations in docstrings."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping

from .functions import CASTS, MAPS
from .graph import softmax_of, walk
from .module import unused
from .terms import Term

SUM, PRODUCT, UNARY, ATOM = range(4)  # how strongly an expression binds; of products with @, which stand in parentheses, too
BINDS = {"add": SUM, "sub": SUM, "mul": PRODUCT, "div": PRODUCT, "matmul": PRODUCT, "neg": UNARY}
RIGHT = {"sub", "div", "matmul"}  # their right operand is in parentheses where it binds no more strongly
WRITTEN = {"sum": "sum({})", "max": "max({})", "matmul": "{} @ {}", "causal": "causal({})", "dropout": "dropout({}, {}, {})"}
WRITTEN |= {name: f"{name}({{}}, {{}})" for name in ("pick", "pick_of_parts")}
WRITTEN |= {"matmul_by": "matmul_by({}, {}, {})", "among": "among({}, {}, {})"}
WRITTEN |= {name: f"{name}({{}})" for name in ("max_of_parts", "sum_of_parts", "stacked", "heads", "flat", "rows")}
WRITTEN |= {"total": "total({})", "gathered": "gathered({})", "is_column": "is_column({})"}
WRITTEN |= {"merged": "merge_heads({})", "weighted": "weighted({}, {})", "spread": "spread({}, {})"}
SUMS, LONG = ("add", "sub"), 80  # what has a line of its own even if it is used once, from so many characters on
SUGGESTED = {"max": "greatest", "sub": "difference", "exp": "exponential", "rsqrt": "scale", "matmul": "product"}


class Writer:
    """Writes terms whose parts have names. names: what is known by a name, by the term. spoken: what terms are
    called where they need a name. forms: how operations are written that a kernel writes in its own way."""

    def __init__(self, names: Mapping[Term, str], spoken: Mapping[Term, str]):
        self.names, self.spoken = dict(names), spoken
        self.forms: dict[str, Callable[[Term], str]] = {}

    def expression(self, x: Term) -> str:
        """The term in one expression."""
        return self._written(x)[0]

    def _written(self, x: Term) -> tuple[str, int]:
        if x in self.names:
            return self.names[x], ATOM
        if x.operation in ("fp32", "widened") and x.operation not in self.forms:  # as all is computed
            return self._written(x.of[0])
        if x.operation == "number":
            return figure(x.what), ATOM if x.what >= 0 else UNARY
        if x.operation == "concat":
            return f"concatenate([{', '.join(map(self.expression, x.of))}])", ATOM
        binds = BINDS.get(x.operation, ATOM)
        parts = []
        for place, y in enumerate(x.of):
            text, its = self._written(y)
            apart = (place > 0 and (x.operation in RIGHT or y.operation == "div")) or "matmul" in (x.operation, y.operation)
            weaker = its < binds or (its == binds and apart)
            inside = binds == ATOM and not (x.operation == "transpose" and x.ndim == 2)
            parts.append(f"({text})" if weaker and not inside else text)
        return self._form(x).format(*parts), binds

    def _form(self, x: Term) -> str:
        """With gaps for what the term is of."""
        if x.operation in self.forms:
            return self.forms[x.operation](x)
        if x.operation in MAPS:
            return MAPS[x.operation].written
        if x.operation == "transpose":
            return "{}.T" if x.ndim == 2 else "transpose({})"
        if x.operation == "split":
            return f"split_heads({{}}, {x.what})"
        return f"halves({{}})[{x.what}]" if x.operation == "half" else WRITTEN[x.operation]

    def assignments(self, roots: Iterable[Term], taken: Iterable[str] = (), among: Iterable[Term] = ()) -> list[str]:
        """A line for each part of the roots that several use and that has no name, named from now on. taken: names that are
        not free. among: where users are counted; by default in the roots themselves."""
        roots, taken, lines = list(roots), {*taken, *self.names.values()}, list[str]()
        among = list(among) or roots
        users = collections.Counter(y for x in self._unnamed(among) for y in x.of) + collections.Counter(among)
        for x in self._unnamed(roots):
            long = x not in roots and x.operation in SUMS and len(self.expression(x)) > LONG
            if (users[x] > 1 or long) and x.of and x.names:
                name = unused(self.suggested(x), taken)
                lines.append(f"{name} = {self.expression(x)}")
                self.names[x] = name
                taken.add(name)
        return lines

    def suggested(self, x: Term) -> str:
        """What a part might be called."""
        if x in self.spoken:
            return self.spoken[x]
        if x.operation == "sum":
            inside = x.of[0]
            if inside.operation == "pick_of_parts":
                return "picked"
            return "squares" if inside.operation == "mul" and inside.of[0] is inside.of[1] else "total"
        return SUGGESTED.get(x.operation, "part")

    def _unnamed(self, roots: list[Term]) -> list[Term]:
        """What lies between the roots and what has names, each after its parts."""
        found, stack = set[Term](), list(roots)
        while stack:
            x = stack.pop()
            if x not in self.names and x not in found:
                found.add(x)
                stack.extend(x.of)
        return [x for x in walk(*roots) if x in found]


def figure(value: float) -> str:
    """A number as one writes it. Those that have no digits are math's."""
    if not math.isfinite(value):
        return f"{'-' * (value < 0)}math.{'nan' if value != value else 'inf'}"
    text = repr(value).replace("e+", "e")
    return text.removesuffix(".0") if text.endswith(".0") and abs(value) > 1 else text


def expression(x: Term) -> str:
    """The whole term in one expression, with lengths as numbers."""
    return _of_definition([x], {}).expression(x)


def _of_definition(roots: Iterable[Term], spoken: Mapping[Term, str]) -> Writer:
    """One that writes as definitions do."""
    writer = Writer(_leaves(roots), spoken)
    writer.forms |= dict.fromkeys(CASTS, lambda x: f"cast({{}}, {x.operation})") | {"widened": lambda x: "widened({})"}
    return writer


def _leaves(roots: Iterable[Term]) -> dict[Term, str]:
    """What inputs and lengths are called outside of kernels."""
    found = {x: x.what for x in walk(*roots) if x.operation in ("input", "length")}
    return {x: what[0] if x.operation == "input" else str(what[1]) for x, what in found.items()}


def equations(roots: Mapping[str, Term], spoken: Mapping[Term, str]) -> str:
    """The terms as their definition might have said them. roots: by name. spoken: see Writer."""
    every = list(walk(*roots.values()))
    writer = _of_definition(roots.values(), spoken)
    means = [x for x in every if x.operation == "div" and x.of[0].operation == "sum" and x.of[1].operation == "length"]
    lines = []
    for x in means:  # what language.py makes of several operations, in its words
        lines += writer.assignments([x.of[0].of[0]], roots, roots.values())
        writer.names[x] = f"mean({writer.expression(x.of[0].of[0])})"
    for x in every:  # what stands side by side has a line, where it has a name
        if x.operation == "concat" and x in spoken and x not in roots.values():
            lines += [*writer.assignments([x], roots, roots.values()), f"{spoken[x]} = {writer.expression(x)}"]
            writer.names[x] = spoken[x]
    for x in every:
        if (inner := softmax_of(x)) is not None:
            alone = [y for y in every if inner in y.of] == [y for y in walk(x) if inner in y.of]  # what else is it in?
            lines += writer.assignments(inner.of if alone else [inner], roots, roots.values())
            writer.names[x] = f"softmax({writer.expression(inner)})"
            if x in spoken and x not in roots.values():
                lines.append(f"{spoken[x]} = {writer.names[x]}")
                writer.names[x] = spoken[x]
    lines += writer.assignments(roots.values(), roots)
    return "\n".join([*lines, *(f"{name} = {writer.expression(x)}" for name, x in roots.items())])
