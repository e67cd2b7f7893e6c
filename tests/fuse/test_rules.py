"""The algebra: every rule holds, and a rule that does not is caught."""

import inspect

import pytest

import fuse
from fuse import proof, rules, terms
from fuse.functions import MAPS
from fuse.rules import Rule
from fuse.trace import Shape, traced


def trace(definition, *shapes):
    """The definition as terms, of bf16 arrays of these shapes."""
    return traced(definition, tuple(inspect.signature(definition).parameters), tuple(Shape(s, "bfloat16") for s in shapes))


def norm_linear(x, g, w):
    return (x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g) @ w


def lora(x, w, a, b):
    return x @ w + (x @ a) @ b


def attend(q, k, v):
    return fuse.softmax(q @ k.T * 0.125) @ v


def scaled(x, w):
    return (x / fuse.max(x)) @ (2.0 * w)


DEFINITIONS = {
    norm_linear: ((4, 8), (8,), (8, 6)),
    lora: ((4, 8), (8, 6), (8, 2), (2, 6)),
    attend: ((4, 8), (5, 8), (5, 6)),
    scaled: ((4, 8), (8, 6)),
    (lambda x, w: (w.T @ x.T).T): ((4, 8), (8, 6)),
    (lambda x, w: (x * x / fuse.max(x)) @ w): ((4, 8), (8, 6)),
}


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_what_is_found_is_equal(definition):
    found = trace(definition, *DEFINITIONS[definition])
    forms = rules.equal(found.roots, found.space)
    assert len(forms) > 1
    for form in forms:
        assert proof.identity(found.roots, form.roots).equal, form


def test_the_forms_that_count():
    """What the templates wait for is among them."""
    found = trace(norm_linear, (4, 8), (8,), (8, 6))
    written = [str(form.roots[0]) for form in rules.equal(found.roots, found.space)]
    assert "((x * g) @ w) * rsqrt(sum(x * x) / 8 + 1e-05)" in written
    found = trace(lora, (4, 8), (8, 6), (8, 2), (2, 6))
    assert len(rules.equal(found.roots, found.space)) == 3


def test_a_division_by_zero():
    found = trace(lambda x: x / (x - x), (4, 8))
    with pytest.raises(ValueError, match="has no inverse"):
        proof.identity(found.roots, found.roots)


def test_exponents():
    """exp is a homomorphism, and no more: what its argument is decides."""
    found = trace(lambda x, y: fuse.exp(x + y) - fuse.exp(x) * fuse.exp(y), (4, 8), (4, 8))
    (zero,) = found.roots
    assert proof.identity([zero], [zero * 2.0]).equal
    found = trace(lambda x: (fuse.exp(x), fuse.exp(x * 2.0), fuse.exp(x) * fuse.exp(x)), (4, 8))
    once, twice, square = found.roots
    assert proof.identity([twice], [square]).equal and not proof.identity([once], [twice]).equal


def _of(operation, change):
    """A rule on terms of one operation."""

    def of(x):
        if x.operation == operation and (found := change(*x.of)) is not None:
            yield found

    return of


def _of_two(change):
    """The same of a map of two."""
    return lambda a: change(*a.of) if len(a.of) == 2 and a.operation in MAPS else None


def _scale_of_columns(a, w):  # of columns, not of rows
    if a.operation == "mul" and a.of[1].ndim == 1:
        return terms.matmul(a.of[0], w) * fuse.sum(a)


WRONG = {
    "a column's scale moves, too": _of("matmul", _scale_of_columns),
    "products commute": _of("matmul", lambda a, b: b @ a if a.extents[0] == b.extents[1] else None),
    "a divisor becomes a factor": _of("div", lambda a, b: a * b),
    "a difference turns round": _of("sub", lambda a, b: b - a),
    "exp of a sum is a sum": _of("exp", _of_two(lambda a, b: fuse.exp(a) + b)),
    "a factor goes missing": _of("mul", lambda a, b: a if b.ndim else None),
    "the root of a sum is that of a part": _of("rsqrt", _of_two(lambda a, b: fuse.rsqrt(a))),
    "a sum of products is the product of sums": _of("sum", _of_two(lambda a, b: fuse.sum(a) * fuse.sum(b))),
    "a maximum is a sum": _of("max", lambda a: fuse.sum(a)),
    "LoRA's second product goes by w": _of("add", lambda a, b: a + a if b.operation == "matmul" else None),
    "a number is another": _of("mul", lambda a, b: a * (b.what + 1e-9) if b.operation == "number" else None),
    "the mean is of one more": _of("div", lambda a, b: a / (b + 1) if b.operation == "length" else None),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name):
    """In one definition or more: softmax is the same with any shift, and minus a sum it is no other function."""
    wrong, caught = Rule(name, "", WRONG[name]), 0

    def exponential(x):
        return fuse.exp(x + 1.0) * 3.0 - x

    square = {(lambda x, w: x @ w): ((4, 4), (4, 4))}
    for definition, shapes in (DEFINITIONS | square | {exponential: ((4, 8),)}).items():
        found = trace(definition, *shapes)
        for form in rules.equal(found.roots, found.space, [wrong])[1:]:
            caught += not proof.identity(found.roots, form.roots).equal
    assert caught
