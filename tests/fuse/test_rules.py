"""The rewrite rules: the forms that they lead to are found and are equal. Wrong rules are in test_wrong_rules.py."""

import inspect

import pytest

import fuse
from fuse.algebra import rules
from fuse.language.trace import Shape, trace_definition
from fuse.planning import proof


def trace(definition, *shapes):
    """The definition as terms, of bf16 arrays of these shapes."""
    return trace_definition(
        definition, tuple(inspect.signature(definition).parameters), tuple(Shape(s, "bfloat16") for s in shapes)
    )


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
    actual = trace(definition, *DEFINITIONS[definition])
    forms = rules.equivalent_forms(actual.roots, actual.table)
    assert len(forms) > 1
    for form in forms:
        assert proof.identity(actual.roots, form.roots).equal, form


def test_the_forms_that_count():
    """The forms that templates match are among those found."""
    actual = trace(norm_linear, (4, 8), (8,), (8, 6))
    texts = [str(form.roots[0]) for form in rules.equivalent_forms(actual.roots, actual.table)]
    assert "((x * g) @ w) * rsqrt(sum(x * x) / 8 + 1e-05)" in texts
    actual = trace(lora, (4, 8), (8, 6), (8, 2), (2, 6))
    assert len(rules.equivalent_forms(actual.roots, actual.table)) == 3


def test_a_division_by_zero():
    actual = trace(lambda x: x / (x - x), (4, 8))
    with pytest.raises(ValueError, match="has a division by 0"):
        proof.identity(actual.roots, actual.roots)


def test_exponents():
    """exp is a homomorphism, and has no other property: it is a function of its argument."""
    actual = trace(lambda x, y: fuse.exp(x + y) - fuse.exp(x) * fuse.exp(y), (4, 8), (4, 8))
    (zero,) = actual.roots
    assert proof.identity([zero], [zero * 2.0]).equal
    actual = trace(lambda x: (fuse.exp(x), fuse.exp(x * 2.0), fuse.exp(x) * fuse.exp(x)), (4, 8))
    single, twice, square = actual.roots
    assert proof.identity([twice], [square]).equal and not proof.identity([single], [twice]).equal
