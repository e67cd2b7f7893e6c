"""The algebra: rewrite rules between equal terms, and the search for all forms that they lead to.

A rule looks at one term and yields others that are equal to it. `equivalent_forms` applies the rules everywhere, until nothing
new is found or MOST forms are known. Templates and the roofline then decide which form is computed. Reductions computed
alongside a product and products that share an operand need no rule: templates match them as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..language import graph, term_operations, term_views, terms
from ..language.graph import walk
from ..language.maps import BYTES, MAPS
from ..language.terms import Term

NARROW = 64  # the most columns of a narrow (low-rank) factor
MOST = 64  # the most forms of a function


class Rule(NamedTuple):
    """A rewrite rule. name: the rule in words. equation: the rule as an equation. rewrite: yields the other forms of a term.
    keeps_range: are intermediates that are stored in 16 bits never greater after the rule than before? keeps_operands: are
    those that are greater only products, which some kernels keep in float32 until they are results? loses: what may overflow
    or vanish in float32 after the rule although nothing did before, "" if nothing may. A proof refuses a form that loses what
    none of its rules declares (float_check.py)."""

    name: str
    equation: str
    rewrite: Callable[[Term], Iterator[Term]]
    keeps_range: bool = False
    loses: str = ""
    keeps_operands: bool = False


class EquivalentForm(NamedTuple):
    """Terms that are equal to the original ones, and the rules that led to them."""

    roots: tuple[Term, ...]
    rules: tuple[Rule, ...]


# ---- rules -----------------------------------------------------------------------------------------------------------
def factors(x: Term) -> list[tuple[str, Term]]:
    """The factors of a term and its divisors: a list of ("mul" or "div", term)."""
    if x.operation == "mul":
        return [*factors(x.args[0]), *factors(x.args[1])]
    if x.operation == "div":
        return [*factors(x.args[0]), ("div", x.args[1])]
    return [("mul", x)]


def product(parts: Sequence[tuple[str, Term]]) -> Term | None:
    """The term with these factors and divisors, the inverse of `factors`; None if there is no factor."""
    first = next((n for n, (operation, _) in enumerate(parts) if operation == "mul"), None)
    if first is None:
        return None
    result = parts[first][1]
    for operation, x in (*parts[:first], *parts[first + 1 :]):  # a factor may occur twice
        result = terms.apply(operation, result, x)
    return result


def is_scale(x: Term) -> bool:
    """Is the term one number for each row, or one number for all?"""
    return not x.axes or x.axes[-1] is None


def _move_row_scales(x: Term) -> Iterator[Term]:
    if x.operation == "matmul":
        parts = factors(x.args[0])
        scales, rest = [one for one in parts if is_scale(one[1])], product([one for one in parts if not is_scale(one[1])])
        if scales and rest is not None and rest.ndim >= 2:
            result = terms.matmul(rest, x.args[1])
            for operation, scale in scales:
                result = terms.apply(operation, result, scale)
            yield result


def _move_number_of_weights(x: Term) -> Iterator[Term]:
    if x.operation == "matmul":
        parts = factors(x.args[1])
        numbers, rest = [one for one in parts if not any(one[1].axes)], product([one for one in parts if any(one[1].axes)])
        if numbers and rest is not None:
            result = terms.matmul(x.args[0], rest)
            for operation, scale in numbers:
                result = terms.apply(operation, result, scale)
            yield result


def _move_column_scales(x: Term) -> Iterator[Term]:
    """x @ (w * c) = (x @ w) * c: a scale of the weights' columns is applied after the product."""
    return iter(()) if _has_scales_of_groups(x) else _move_scales_of_weights(x, along_k=False)


def _move_column_scales_of_groups(x: Term) -> Iterator[Term]:
    """x @ (w * s * c) = (x @ (w * s)) * c, where s are scales of groups."""
    return _move_scales_of_weights(x, along_k=False) if _has_scales_of_groups(x) else iter(())


def _has_scales_of_groups(x: Term) -> bool:
    """Is the term a product whose weights have scales of groups among their factors?"""
    weights = x.args[1] if x.operation == "matmul" else x
    inner = weights.args[0] if weights.operation == "transpose" else weights
    return any(one.operation == "repeat" for _, one in factors(inner))


def _move_scales_of_weights(x: Term, along_k: bool = True) -> Iterator[Term]:
    """x @ (s * w * c) = ((x * s) @ w) * c: a scale of the weights' columns is applied after the product, and one along k to the
    other factor. along_k: is there one?"""
    if x.operation != "matmul" or x.args[1].ndim != 2:
        return
    a, w = x.args
    transposed, after, before, rest = w.operation == "transpose", list[tuple[str, Term]](), list[tuple[str, Term]](), []
    for operation, one in factors(w.args[0] if transposed else w):
        of_rows, of_columns = one.ndim == 2 and one.axes[0] is not None, one.ndim > 0 and one.axes[-1] is not None
        if of_rows == of_columns or (of_rows and one.operation != "input"):
            rest.append((operation, one))
        else:
            (after if of_rows == transposed else before).append((operation, term_views.flat(one) if of_rows else one))
    weight = product(rest)
    if weight is None or weight.ndim != 2 or not (before if along_k else after) or bool(before) != along_k:
        return
    for operation, scale in before:
        a = terms.apply(operation, a, scale)
    result = terms.matmul(a, terms.transpose(weight) if transposed else weight)
    for operation, scale in after:
        result = terms.apply(operation, result, scale)
    yield result


def _widen_bytes(x: Term) -> Iterator[Term]:
    """x @ w = x @ widened(w): weights of fp8 or int8 converted to 16 bits, for templates that cannot multiply by them."""
    if x.operation == "matmul":
        a, w = x.args
        if w.stored_dtype("") in BYTES:
            yield terms.matmul(a, terms.apply("widened", w))
        elif w.operation == "transpose" and w.args[0].stored_dtype("") in BYTES:
            yield terms.matmul(a, terms.transpose(terms.apply("widened", w.args[0])))


def _scale_groups(x: Term) -> Iterator[Term]:
    """x @ (w * repeat(s)) = x @ widened(w * repeat(s)): a kernel ahead of the product multiplies weights by the scales of
    groups."""
    if x.operation == "matmul" and (scaled := graph.group_scaled(x.args[1])):
        lies_transposed = scaled.matrix.operation == "transpose"
        widened = terms.apply("widened", (scaled.transposed if lies_transposed else scaled).term)
        yield terms.matmul(x.args[0], terms.transpose(widened) if lies_transposed else widened)


def _reassociate(x: Term) -> Iterator[Term]:
    if x.operation == "matmul":
        a, b = x.args
        if a.operation == "matmul":
            yield terms.matmul(a.args[0], terms.matmul(a.args[1], b))
        if b.operation == "matmul":
            yield terms.matmul(terms.matmul(a, b.args[0]), b.args[1])


def _move_into_narrow(x: Term) -> Iterator[Term]:
    if x.operation == "mul":
        for scale, product in (x.args, x.args[::-1]):
            left = product.args[0] if product.operation == "matmul" and not scale.axes else None
            if left is not None and (left.extents[1] <= NARROW or left.operation == "select_columns"):
                yield terms.matmul(left * scale, product.args[1])


def _transpose_product(x: Term) -> Iterator[Term]:
    if x.operation == "transpose" and x.args[0].operation == "matmul":
        a, b = x.args[0].args
        yield terms.matmul(terms.transpose(b), terms.transpose(a))


def _merge_products(x: Term) -> Iterator[Term]:
    if x.operation in ("add", "sub") and all(y.operation == "matmul" for y in x.args):
        (a, v), (b, w) = (y.args for y in x.args)
        if v is w:
            yield terms.matmul(terms.apply(x.operation, a, b), v)
        if a is b:
            yield terms.matmul(a, terms.apply(x.operation, v, w))


def _stack_heads(x: Term) -> Iterator[Term]:
    if x.operation == "matmul" and x.args[0].ndim == 2 and x.args[1].operation == "transpose":
        a, w = x.args[0], x.args[1].args[0]
        if w.operation == "input" and w.ndim == 3 and all(w.axes):
            yield term_views.heads(terms.matmul(a, terms.transpose(term_views.stacked(w))), w)


def _stack_products(x: Term) -> Term | None:
    """A term (e, m, n), if it is a map of products of one left factor with stacks of matrices, as (m, e n): the products side
    by side. None if it is something else."""
    if x.operation in MAPS:
        args = [y if not y.axes else _stack_products(y) for y in x.args]
        return None if any(y is None for y in args) else terms.apply(x.operation, *args)
    if x.operation != "matmul" or x.args[0].ndim != 2 or x.args[1].operation != "transpose":
        return None
    w = x.args[1].args[0]
    stack = w.operation == "input" and w.ndim == 3 and all(w.axes)
    return terms.matmul(x.args[0], terms.transpose(term_views.stacked(w))) if stack else None


def _merge_experts(x: Term) -> Iterator[Term]:
    if x.operation == "weighted" and x.args[1].operation == "matmul":
        p, (h, w) = x.args[0], x.args[1].args
        hidden = _stack_products(h) if w.operation == "input" and w.ndim == 3 and all(w.axes) else None
        if hidden is not None:
            yield terms.matmul(hidden * term_operations.repeat_columns(p, w), term_views.stacked(w))


def _merge_adapters(x: Term) -> Iterator[Term]:
    if x.operation == "matmul_by":
        _, b, index = x.args
        parts = factors(x.args[0])
        inner = [
            one for operation, one in parts if operation == "mul" and one.operation == "matmul_by" and one.args[2] is index
        ]
        if len(inner) != 1 or not all(one is inner[0] or is_scale(one) for _, one in parts) or b.operation != "input":
            return
        y, a, _ = inner[0].args
        if a.operation == "transpose" and a.args[0].operation == "input" and b.axes[1]:
            low = terms.matmul(y, terms.transpose(term_views.stacked(a.args[0])))
            scaled = product([(operation, low if one is inner[0] else one) for operation, one in parts])
            assert scaled is not None
            yield terms.matmul(term_operations.select_columns(scaled, index, b), term_views.stacked(b))


def _is_map_of_product(x: Term) -> bool:
    """Is the term an elementwise map of a product of matrices?"""
    below = x.args if x.operation in MAPS else ()
    return graph.is_matrix(x) and x.ndim == 2 and (x.operation == "matmul" or any(map(_is_map_of_product, below)))


def _max_of_parts(x: Term) -> Iterator[Term]:
    if x.operation == "max" and _is_map_of_product(x.args[0]):
        yield terms.reduce("max", term_operations.reduce_parts("max_of_parts", x.args[0]))


def _sum_of_exponentials(x: Term) -> Iterator[Term]:
    if x.operation == "sum" and x.args[0].operation == "exp" and x.args[0].args[0].operation == "sub":
        scores, shift = x.args[0].args[0].args
        if _is_map_of_product(scores) and is_scale(shift):
            sums, maxima = (term_operations.reduce_parts(name, scores) for name in ("sum_of_parts", "max_of_parts"))
            yield terms.reduce("sum", sums * terms.apply("exp", maxima - shift))


def _pick_of_parts(x: Term) -> Iterator[Term]:
    if x.operation == "pick" and _is_map_of_product(x.args[0]):
        yield terms.reduce("sum", term_operations.reduce_parts("pick_of_parts", *x.args))


def _pick_as_sum(x: Term) -> Iterator[Term]:
    if x.operation == "pick" and x.args[0].ndim == 2 and not _is_map_of_product(x.args[0]):
        yield terms.reduce("sum", terms.apply("where", term_operations.is_column(*x.args), x.args[0], 0.0))


RULES = (
    Rule("a row's scale moves through a product", "(x * r) @ w = (x @ w) * r", _move_row_scales, loses="x @ w"),
    Rule(
        "a number moves out of a product's weights",
        "x @ (c * w) = c * (x @ w)",
        _move_number_of_weights,
        loses="x @ w",
        keeps_operands=True,
    ),
    Rule(
        "a scale of weights' columns moves to results",
        "x @ (w * c) = (x @ w) * c",
        _move_column_scales,
        keeps_operands=True,
    ),
    Rule(
        "a scale of columns moves to results, scales of groups stay",
        "x @ (w * s * c) = (x @ (w * s)) * c",
        _move_column_scales_of_groups,
        loses="x @ (w * s)",
        keeps_operands=True,
    ),
    Rule(
        "a scale of weights moves to rows or results",
        "x @ (s * w * c) = ((x * s) @ w) * c",
        _move_scales_of_weights,
        loses="x * s",
    ),
    Rule("weights of fp8 or int8 are converted to 16 bits before the product", "x @ w = x @ widened(w)", _widen_bytes, True),
    Rule(
        "weights are multiplied by scales of groups before the product", "x @ (w * s) = x @ widened(w * s)", _scale_groups, True
    ),
    Rule("a number moves into a narrow factor", "c * (t @ b) = (c * t) @ b", _move_into_narrow, loses="c * t"),
    Rule("products are associative", "(x @ a) @ b = x @ (a @ b)", _reassociate, loses="x @ a or a @ b"),
    Rule(
        "the transpose of a product is the reversed product of the transposes",
        "(a @ b).T = b.T @ a.T",
        _transpose_product,
        True,
    ),
    Rule("the weights of all heads, stacked, are one matrix", "x @ w[h].T = (x @ stacked(w).T)[h]", _stack_heads, True),
    Rule(
        "all experts are one MLP with weighted hidden columns",
        "sum(p[e] * (h[e] @ w[e])) = ([h] * repeat_columns(p)) @ stacked(w)",
        _merge_experts,
        loses="h * p",
    ),
    Rule(
        "all adapters' products are computed, and each row keeps one",
        "(x @ a[i]) @ b[i] = own(x @ [a]) @ [b]",
        _merge_adapters,
        True,
    ),
    Rule("products that share a factor are one product", "x @ w + y @ w = (x + y) @ w", _merge_products),
    Rule("a row's maximum is the maximum of its blocks' maxima", "max(s) = max(max(part))", _max_of_parts, True),
    Rule(
        "a sum of exponentials is the rescaled sum over blocks",
        "sum(exp(s)) = sum(sum(exp(p - m)) * exp(m))",
        _sum_of_exponentials,
        True,
    ),
    Rule("a picked element is a masked sum", "pick(x, i) = sum(where(is_column(i), x, 0))", _pick_as_sum, True),
    Rule(
        "a picked element is the sum of the elements picked in blocks", "pick(s, i) = sum(pick(part, i))", _pick_of_parts, True
    ),
)


# ---- the search ------------------------------------------------------------------------------------------------------
def equivalent_forms(roots: Sequence[Term], table: terms.TermTable, rules: Sequence[Rule] = RULES) -> list[EquivalentForm]:
    """The forms of these terms that the rules lead to, the terms themselves first, MOST at most. table: the TermTable of the
    terms."""
    terms.TABLES.append(table)
    try:
        first = EquivalentForm(tuple(roots), ())
        known = {first.roots: first}
        waiting = [first]
        while waiting and len(known) < MOST:
            form = waiting.pop(0)
            for rule, old, new in _rewrites(form.roots, rules):
                rewritten = tuple(_replace(x, old, new) for x in form.roots)
                if rewritten not in known and len(known) < MOST:
                    known[rewritten] = EquivalentForm(rewritten, (*form.rules, *([] if rule in form.rules else [rule])))
                    waiting.append(known[rewritten])
        return list(known.values())
    finally:
        terms.TABLES.pop()


def _rewrites(roots: Sequence[Term], rules: Sequence[Rule]) -> Iterator[tuple[Rule, Term, Term]]:
    for x in list(walk(*roots)):
        for rule in rules:
            for other in rule.rewrite(x):
                if other is not x and other.extents == x.extents:
                    yield rule, x, other


def _replace(root: Term, old: Term, new: Term) -> Term:
    """The root with every occurrence of one term replaced by another."""
    replaced = {old: new}
    for x in walk(root):
        if x not in replaced:
            args = [replaced[y] for y in x.args]
            replaced[x] = x if all(a is b for a, b in zip(args, x.args)) else graph.rebuild(x, args)
    return replaced[root]
