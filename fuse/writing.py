"""Terms as Python text: the expressions and assignments of a kernel, and of equations in docstrings."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping

from .functions import CASTS, MAPS
from .graph import softmax_of, walk
from .names import unused
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


class ExpressionWriter:
    """Writes terms as Python expressions. names: the terms that have a name. local_names: the names that terms may get.
    forms: for operations that a kernel writes in a way of its own, a function from the term to that form."""

    def __init__(self, names: Mapping[Term, str], local_names: Mapping[Term, str]):
        self.names, self.local_names = dict(names), local_names
        self.forms: dict[str, Callable[[Term], str]] = {}

    def expression(self, x: Term) -> str:
        """The term as one expression."""
        return self._written(x)[0]

    def _written(self, x: Term) -> tuple[str, int]:
        if x in self.names:
            return self.names[x], ATOM
        if x.operation in ("fp32", "widened") and x.operation not in self.forms:  # as all is computed
            return self._written(x.args[0])
        if x.operation == "number":
            return figure(x.attr), ATOM if x.attr >= 0 else UNARY
        if x.operation == "concat":
            return f"concatenate([{', '.join(map(self.expression, x.args))}])", ATOM
        binds = BINDS.get(x.operation, ATOM)
        parts = []
        for place, y in enumerate(x.args):
            text, its = self._written(y)
            apart = (place > 0 and (x.operation in RIGHT or y.operation == "div")) or "matmul" in (x.operation, y.operation)
            weaker = its < binds or (its == binds and apart)
            inside = binds == ATOM and not (x.operation == "transpose" and x.ndim == 2)
            parts.append(f"({text})" if weaker and not inside else text)
        return self._form(x).format(*parts), binds

    def _form(self, x: Term) -> str:
        """How the term's operation is written, with a gap for each operand."""
        if x.operation in self.forms:
            return self.forms[x.operation](x)
        if x.operation in MAPS:
            return MAPS[x.operation].written
        if x.operation == "transpose":
            return "{}.T" if x.ndim == 2 else "transpose({})"
        if x.operation == "split":
            return f"split_heads({{}}, {x.attr})"
        return f"halves({{}})[{x.attr}]" if x.operation == "half" else WRITTEN[x.operation]

    def assignments(self, roots: Iterable[Term], taken: Iterable[str] = (), among: Iterable[Term] = ()) -> list[str]:
        """A line for each term below the roots that is used more than once and has no name; it has one from then on. taken:
        names that are not free. among: where uses are counted, by default in the roots."""
        roots, taken, lines = list(roots), {*taken, *self.names.values()}, list[str]()
        among = list(among) or roots
        users = collections.Counter(y for x in self._unnamed(among) for y in x.args) + collections.Counter(among)
        for x in self._unnamed(roots):
            long = x not in roots and x.operation in SUMS and len(self.expression(x)) > LONG
            if (users[x] > 1 or long) and x.args and x.axes:
                name = unused(self.suggested(x), taken)
                lines.append(f"{name} = {self.expression(x)}")
                self.names[x] = name
                taken.add(name)
        return lines

    def suggested(self, x: Term) -> str:
        """A name for a term that needs one."""
        if x in self.local_names:
            return self.local_names[x]
        if x.operation == "sum":
            inside = x.args[0]
            if inside.operation == "pick_of_parts":
                return "picked"
            return "squares" if inside.operation == "mul" and inside.args[0] is inside.args[1] else "total"
        return SUGGESTED.get(x.operation, "part")

    def _unnamed(self, roots: list[Term]) -> list[Term]:
        """The terms from the roots down to those that have names, each after its operands."""
        found, stack = set[Term](), list(roots)
        while stack:
            x = stack.pop()
            if x not in self.names and x not in found:
                found.add(x)
                stack.extend(x.args)
        return [x for x in walk(*roots) if x in found]


def figure(value: float) -> str:
    """A number as Python code; infinity and NaN are math.inf and math.nan."""
    if not math.isfinite(value):
        return f"{'-' * (value < 0)}math.{'nan' if value != value else 'inf'}"
    text = repr(value).replace("e+", "e")
    return text.removesuffix(".0") if text.endswith(".0") and abs(value) > 1 else text


def expression(x: Term) -> str:
    """The whole term as one expression, with lengths as numbers."""
    return _of_definition([x], {}).expression(x)


def _of_definition(roots: Iterable[Term], local_names: Mapping[Term, str]) -> ExpressionWriter:
    """A Writer that writes terms as a definition would."""
    writer = ExpressionWriter(_leaves(roots), local_names)
    writer.forms |= dict.fromkeys(CASTS, lambda x: f"cast({{}}, {x.operation})") | {"widened": lambda x: "widened({})"}
    return writer


def _leaves(roots: Iterable[Term]) -> dict[Term, str]:
    """The names of inputs and lengths in a text that is no kernel."""
    found = {x: x.attr for x in walk(*roots) if x.operation in ("input", "length")}
    return {x: what[0] if x.operation == "input" else str(what[1]) for x, what in found.items()}


def equations(roots: Mapping[str, Term], local_names: Mapping[Term, str]) -> str:
    """The terms as a definition might have said them. roots: the results by name. local_names: see Writer."""
    every = list(walk(*roots.values()))
    writer = _of_definition(roots.values(), local_names)
    means = [x for x in every if x.operation == "div" and x.args[0].operation == "sum" and x.args[1].operation == "length"]
    lines = []
    for x in means:  # what language.py makes of several operations, in its words
        lines += writer.assignments([x.args[0].args[0]], roots, roots.values())
        writer.names[x] = f"mean({writer.expression(x.args[0].args[0])})"
    for x in every:  # what stands side by side has a line, where it has a name
        if x.operation == "concat" and x in local_names and x not in roots.values():
            lines += [*writer.assignments([x], roots, roots.values()), f"{local_names[x]} = {writer.expression(x)}"]
            writer.names[x] = local_names[x]
    for x in every:
        if (inner := softmax_of(x)) is not None:
            alone = [y for y in every if inner in y.args] == [y for y in walk(x) if inner in y.args]  # what else is it in?
            lines += writer.assignments(inner.args if alone else [inner], roots, roots.values())
            writer.names[x] = f"softmax({writer.expression(inner)})"
            if x in local_names and x not in roots.values():
                lines.append(f"{local_names[x]} = {writer.names[x]}")
                writer.names[x] = local_names[x]
    lines += writer.assignments(roots.values(), roots)
    return "\n".join([*lines, *(f"{name} = {writer.expression(x)}" for name, x in roots.items())])
