"""Terms as Python source: the expressions and assignments of a kernel, and the equations in the docstring of a module."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping

from .graph import softmax_of, walk
from .maps import CASTS, MAPS
from .names import unused
from .terms import Term

SUM, PRODUCT, UNARY, ATOM = range(4)  # precedences; a matrix product is in parentheses inside another product
PRECEDENCE = {"add": SUM, "sub": SUM, "mul": PRODUCT, "div": PRODUCT, "matmul": PRODUCT, "neg": UNARY}
RIGHT = {"sub", "div", "matmul"}  # a right operand of the same precedence is in parentheses
FORMS = {"sum": "sum({})", "max": "max({})", "matmul": "{} @ {}", "causal": "causal({})", "dropout": "dropout({}, {}, {})"}
FORMS |= {name: f"{name}({{}}, {{}})" for name in ("pick", "pick_of_parts")}
FORMS |= {"matmul_by": "matmul_by({}, {}, {})", "select_columns": "select_columns({}, {}, {})"}
FORMS |= {name: f"{name}({{}})" for name in ("max_of_parts", "sum_of_parts", "stacked", "heads", "flat", "rows")}
FORMS |= {name: f"{name}({{}})" for name in ("total", "partial_sums", "split_outputs", "is_column")}
FORMS |= {"merge_heads": "merge_heads({})", "weighted": "weighted({}, {})", "repeat_columns": "repeat_columns({}, {})"}
WIDE = 120  # characters of an expression that is written in one part
SUMS, LONG = ("add", "sub"), 80  # such a term gets an assignment even if it is used once, from so many characters on
NAME_HINTS = {"max": "greatest", "sub": "difference", "exp": "exponential", "rsqrt": "scale", "matmul": "product"}


class ExpressionWriter:
    """Writes terms as Python expressions. names: the terms that have a name. local_names: names that terms get if they need
    one. forms: {operation: a function from the term to its form}, for operations that a kernel writes in another way."""

    def __init__(self, names: Mapping[Term, str], local_names: Mapping[Term, str]):
        self.names, self.local_names = dict(names), local_names
        self.forms: dict[str, Callable[[Term], str]] = {}

    def expression(self, x: Term) -> str:
        """The term as one expression."""
        return self._write(x)[0]

    def _write(self, x: Term) -> tuple[str, int]:
        if x in self.names:
            return self.names[x], ATOM
        if x.operation in ("fp32", "widened") and x.operation not in self.forms:  # kernels compute in fp32 anyway
            return self._write(x.args[0])
        if x.operation == "number":
            return figure(x.attr), ATOM if x.attr >= 0 else UNARY
        if x.operation == "concat":
            return f"concatenate([{', '.join(map(self.expression, x.args))}])", ATOM
        binds = PRECEDENCE.get(x.operation, ATOM)
        parts = []
        for place, y in enumerate(x.args):
            text, precedence = self._write(y)
            needs_parentheses = (place > 0 and (x.operation in RIGHT or y.operation == "div")) or "matmul" in (
                x.operation,
                y.operation,
            )
            weaker = precedence < binds or (precedence == binds and needs_parentheses)
            inside = binds == ATOM and not (x.operation == "transpose" and x.ndim == 2)
            parts.append(f"({text})" if weaker and not inside else text)
        return self._form(x).format(*parts), binds

    def _form(self, x: Term) -> str:
        """The form of the term's operation, with a gap for each operand."""
        if x.operation in self.forms:
            return self.forms[x.operation](x)
        if x.operation in MAPS:
            return MAPS[x.operation].form
        if x.operation == "transpose":
            return "{}.T" if x.ndim == 2 else "transpose({})"
        if x.operation == "split":
            return f"split_heads({{}}, {x.attr})"
        if x.operation == "repeat":
            return f"repeat({{}}, {', '.join(map(str, x.attr))})"
        return f"halves({{}})[{x.attr}]" if x.operation == "half" else FORMS[x.operation]

    def assignments(
        self, roots: Iterable[Term], used_names: Iterable[str] = (), counted_roots: Iterable[Term] = ()
    ) -> list[str]:
        """An assignment for each term below the roots that is used more than once and has no name; it has one from then on.
        used_names: names that are not free. counted_roots: the roots in which uses are counted, by default these."""
        roots, used_names, lines = list(roots), {*used_names, *self.names.values()}, list[str]()
        counted_roots = list(counted_roots) or roots
        users = collections.Counter(y for x in self._unnamed(counted_roots) for y in x.args) + collections.Counter(
            counted_roots
        )
        for x in self._unnamed(roots):
            long = x not in roots and x.operation in SUMS and len(self.expression(x)) > LONG
            if (users[x] > 1 or long) and x.args and x.axes:
                name = unused(self.suggest_name(x), used_names)
                lines.append(f"{name} = {self.expression(x)}")
                self.names[x] = name
                used_names.add(name)
        return lines

    def in_parts(self, x: Term) -> list[str]:
        """[the term as one expression, an assignment for each part of it that has a name from now on]: if it is long, these are
        the terms that occur in it more than once."""
        parts = self.assignments([x]) if len(self.expression(x)) > WIDE else []
        return [self.expression(x), *parts]

    def suggest_name(self, x: Term) -> str:
        """A name for a term that needs one."""
        if x in self.local_names:
            return self.local_names[x]
        if x.operation == "sum":
            inside = x.args[0]
            if inside.operation == "pick_of_parts":
                return "picked"
            return "squares" if inside.operation == "mul" and inside.args[0] is inside.args[1] else "total"
        return NAME_HINTS.get(x.operation, "part")

    def _unnamed(self, roots: list[Term]) -> list[Term]:
        """The terms from the roots down to those that have names, each after its operands."""
        reached, stack = set[Term](), list(roots)
        while stack:
            x = stack.pop()
            if x not in self.names and x not in reached:
                reached.add(x)
                stack.extend(x.args)
        return [x for x in walk(*roots) if x in reached]


def figure(value: float) -> str:
    """A number as Python code; infinity and NaN are math.inf and math.nan."""
    if not math.isfinite(value):
        return f"{'-' * (value < 0)}math.{'nan' if value != value else 'inf'}"
    text = repr(value).replace("e+", "e")
    return text.removesuffix(".0") if text.endswith(".0") and abs(value) > 1 else text


def expression(x: Term) -> str:
    """The whole term as one expression, with lengths as numbers."""
    return writer_of_definition([x], {}).expression(x)


def writer_of_definition(roots: Iterable[Term], local_names: Mapping[Term, str]) -> ExpressionWriter:
    """An ExpressionWriter that writes terms as in a definition."""
    writer = ExpressionWriter(_leaves(roots), local_names)
    writer.forms |= dict.fromkeys(CASTS, lambda x: f"cast({{}}, {x.operation})") | {"widened": lambda x: "widened({})"}
    return writer


def _leaves(roots: Iterable[Term]) -> dict[Term, str]:
    """The names of inputs and lengths in a text that is no kernel."""
    inputs = {x: x.attr for x in walk(*roots) if x.operation in ("input", "length")}
    return {x: entry[0] if x.operation == "input" else str(entry[1]) for x, entry in inputs.items()}


def equations(roots: Mapping[str, Term], local_names: Mapping[Term, str]) -> str:
    """The terms as a definition would compute them, a line each. roots: the results by name. local_names: see
    ExpressionWriter."""
    nodes = list(walk(*roots.values()))
    writer = writer_of_definition(roots.values(), local_names)
    means = [x for x in nodes if x.operation == "div" and x.args[0].operation == "sum" and x.args[1].operation == "length"]
    lines = []
    for x in means:  # functions.mean makes two operations
        lines += writer.assignments([x.args[0].args[0]], roots, roots.values())
        writer.names[x] = f"mean({writer.expression(x.args[0].args[0])})"
    for x in nodes:  # a concatenation that has a name gets an assignment
        if x.operation == "concat" and x in local_names and x not in roots.values():
            lines += [*writer.assignments([x], roots, roots.values()), f"{local_names[x]} = {writer.expression(x)}"]
            writer.names[x] = local_names[x]
    for x in nodes:
        if (inner := softmax_of(x)) is not None:
            is_only_use = [y for y in nodes if inner in y.args] == [
                y for y in walk(x) if inner in y.args
            ]  # is the softmax its only use?
            lines += writer.assignments(inner.args if is_only_use else [inner], roots, roots.values())
            writer.names[x] = f"softmax({writer.expression(inner)})"
            if x in local_names and x not in roots.values():
                lines.append(f"{local_names[x]} = {writer.names[x]}")
                writer.names[x] = local_names[x]
    lines += writer.assignments(roots.values(), roots)
    return "\n".join([*lines, *(f"{name} = {writer.expression(x)}" for name, x in roots.items())])
