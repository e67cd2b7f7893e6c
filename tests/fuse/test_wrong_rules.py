"""Wrong rules: the identity test or the float check refuses each, or reports the range it loses."""

import inspect
import itertools
import math
from fractions import Fraction
from random import Random

import numpy as np
import pytest

import fuse
from fuse.algebra import float_check, identity, prime_fields, rules
from fuse.algebra.rules import Rule
from fuse.language import graph, term_operations, terms
from fuse.language.axes import unify
from fuse.language.maps import MAPS
from fuse.language.trace import Shape, trace_definition
from fuse.planning import candidates, proof
from fuse.planning.cost import card
from tiles import bf16

MERSENNE = 2**61 - 1
X, W, SQUARE, VECTOR = (4, 8), (8, 6), (8, 8), (8,)


def trace(function, *shapes, dtype="bfloat16"):
    return trace_definition(function, tuple(inspect.signature(function).parameters), tuple(Shape(s, dtype) for s in shapes))


def answers(function, shapes, rule):
    """[(identity, floats)] of every form that the rule leads to, of which there is at least one. Arrays are float32, which has
    digits to lose."""
    actual = trace(function, *shapes, dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "MOST", 3)
        forms = rules.equivalent_forms(actual.roots, actual.table, [rule])[1:]
    assert forms, "the rule says nothing of its definition"
    declared = [rule.loses] if rule.loses else []
    return [
        (identity.identity(actual.roots, form.roots), float_check.compare_in_floats(actual.roots, form.roots, declared))
        for form in forms
    ]


def of(operation, change):
    """A rule on terms of one operation, whose operands `change` gets."""
    return lambda x: (y for y in [change(*x.args) if x.operation == operation else None] if y is not None)


def two(operation, change):
    """A change of terms that are a map of two operands."""
    return lambda x: change(*x.args) if x.operation == operation else None


def of_number(change):
    """A rule on sums and products with a number."""

    def rule(x):
        if x.operation in MAPS and len(x.args) == 2 and x.args[1].operation == "number":
            yield terms.apply(x.operation, x.args[0], change(x.args[1].attr))

    return rule


def norm(x, g):
    return x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g


def norm_linear(x, g, w):
    return (x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g) @ w


def bounded(x):
    return x / fuse.maximum(fuse.sqrt(fuse.sum(x * x)), 1e-3)


def mean(x):
    return fuse.mean(x)


def centred(x):
    return x - fuse.sum(x)


def softmax(x):
    return fuse.softmax(x)


def loss(x):
    return fuse.log(fuse.sum(fuse.exp(x - fuse.max(x)))) + fuse.max(x)


def product(x, w):
    return x @ w


def difference(x, y):
    return x - y


def layer_norm(x):
    return (x - fuse.mean(x)) * fuse.rsqrt(fuse.var(x) + 1e-5)


def _naive_softmax(x):
    if (s := graph.softmax_of(x)) is not None:
        yield fuse.exp(s) / fuse.sum(fuse.exp(s))


def _sum_without_maximum(x):
    if x.operation == "sum" and x.args[0].operation == "exp" and x.args[0].args[0].operation == "sub":
        scores, greatest = x.args[0].args[0].args
        yield fuse.sum(fuse.exp(scores)) * fuse.exp(-greatest)


def _naive_lse(x):
    if x.operation == "add" and x.args[0].operation == "log" and x.args[1].operation == "max":
        yield fuse.log(fuse.sum(fuse.exp(x.args[1].args[0])))


def _variance_of_squares(x):
    """The mean of squared differences as the mean of squares less the squared mean."""
    if x.operation == "div" and x.args[0].operation == "sum" and x.args[0].args[0].operation == "mul":
        one = x.args[0].args[0].args[0]
        if one.operation == "sub":
            yield fuse.mean(one.args[0] * one.args[0]) - fuse.mean(one.args[0]) * fuse.mean(one.args[0])


def _parts(change):
    def rule(x):
        if x.operation == "sum" and x.args[0].operation == "exp" and x.args[0].args[0].operation == "sub":
            scores, shift = x.args[0].args[0].args
            yield fuse.sum(
                change(*(term_operations.reduce_parts(name, scores) for name in ("sum_of_parts", "max_of_parts")), shift)
            )

    return rule


def _cast(x, dtype):
    return terms.apply(dtype, x)


# a rule: (definition, its shapes, the rule)
CONSTANTS = {
    "eps is 2^-61 of it, in a norm": (norm, (X, VECTOR), of_number(lambda c: c * 2.0**-61)),
    "eps is 2^-61 of it, before a product": (norm_linear, (X, VECTOR, W), of_number(lambda c: c * 2.0**-61)),
    "a bound is 2^-61 of it": (bounded, (X,), of("maximum", lambda a, b: fuse.maximum(a, b.attr * 2.0**-61))),
    "a constant is 2^61 times it": (norm, (X, VECTOR), of_number(lambda c: c * 2.0**61)),
    "a constant is 2^122 times it": (norm, (X, VECTOR), of_number(lambda c: c * 2.0**122)),
    "a constant has another last bit": (norm, (X, VECTOR), of_number(lambda c: math.nextafter(c, 1))),
    "a constant is as float32 has it": (norm, (X, VECTOR), of_number(lambda c: float(np.float32(c)))),
    "a constant's sign": (norm, (X, VECTOR), of_number(lambda c: -c)),
    "a constant is 0": (norm, (X, VECTOR), of_number(lambda c: 0.0)),
    "a product is 2^-61 of it": (product, (X, W), of("matmul", lambda a, b: (a @ b) * 2.0**-61)),
    "a product has one unit more": (product, (X, W), of("matmul", lambda a, b: (a @ b) * (1 + 2.0**-52))),
    "exp has the period of a subgroup": (lambda x: fuse.exp(x), (X,), of("exp", lambda x: fuse.exp(x + 5124095576030431.0))),
    "exp of c more": (lambda x: fuse.exp(x), (X,), of("exp", lambda x: fuse.exp(x + 1e-9))),
    "exp of a sum is a sum": (lambda x, y: fuse.exp(x + y), (X, X), of("exp", two("add", lambda a, b: fuse.exp(a) + b))),
    "exp has base 2": (lambda x: fuse.exp(x), (X,), of("exp", lambda x: fuse.exp2(x))),
}
PLACES = {
    "eps outside of the root": (norm, (X, VECTOR), of("rsqrt", two("add", lambda a, b: fuse.rsqrt(a) + b))),
    "eps inside of the mean": (
        norm,
        (X, VECTOR),
        of("add", lambda m, e: (m.args[0] + e) / m.args[1] if m.operation == "div" else None),
    ),
    "eps moves into the square": (norm, (X, VECTOR), of("mul", lambda a, b: (a + 1e-5) * b if a is b else None)),
    "the root of a sum is that of a part": (norm, (X, VECTOR), of("rsqrt", two("add", lambda a, b: fuse.rsqrt(a)))),
    "a divisor becomes a factor": (norm, (X, VECTOR), of("div", lambda a, b: a * b)),
    "a factor is lost": (norm, (X, VECTOR), of("mul", lambda a, b: a if b.ndim else None)),
    "rsqrt is sqrt": (norm, (X, VECTOR), of("rsqrt", lambda s: fuse.sqrt(s))),
    "a mean is a sum": (norm, (X, VECTOR), of("div", lambda a, b: a if b.operation == "length" else None)),
    "a mean is over eight": (lambda x: fuse.mean(x), (X,), of("div", lambda a, b: a / 8.0)),
    "the other axis's length": (mean, (SQUARE,), of("div", lambda a, b: a / terms.length(fuse.transpose(a.args[0])))),
    "a sum over the other axis": (
        centred,
        (SQUARE,),
        of("sum", lambda x: fuse.transpose(term_operations.total_along(x, (-2,)))),
    ),
    "a sum of all rows": (centred, (X,), of("sum", lambda x: term_operations.total_along(x, (-2, -1)) + fuse.max(x) * 0.0)),
    "a sum of squares is a square": (norm, (X, VECTOR), of("sum", two("mul", lambda a, b: fuse.sum(a) * fuse.sum(b)))),
    "a scale of columns leaves a product": (
        norm_linear,
        (X, VECTOR, SQUARE),
        of("matmul", lambda a, w: (a.args[0] @ w) * a.args[1] if a.args[1].ndim == 1 else None),
    ),
    "the mean is of one more": (norm, (X, VECTOR), of("div", lambda a, b: a / (b + 1.0) if b.operation == "length" else None)),
}
PRODUCTS = {
    "factors change places": (lambda x, w: x + x @ w, (SQUARE, SQUARE), of("matmul", lambda a, b: b @ a)),
    "a square factor is turned": (lambda x, w: x + x @ w, (SQUARE, SQUARE), of("matmul", lambda a, b: a @ b.T)),
    "a product is turned without its parts": (
        lambda x, w: (x @ w).T,
        (SQUARE, SQUARE),
        of("transpose", lambda y: y.args[0].T @ y.args[1].T if y.operation == "matmul" else None),
    ),
    "a difference turns round": (difference, (X, X), of("sub", lambda a, b: b - a)),
    "a quotient turns round": (lambda x, y: x / y, (X, X), of("div", lambda a, b: b / a)),
    "one of two products is lost": (lambda x, w, v: x @ w + x @ v, (X, W, W), of("add", lambda a, b: a)),
    "a difference of products is their sum": (
        lambda x, w, v: x @ w - x @ v,
        (X, W, W),
        of("sub", lambda a, b: a.args[0] @ (a.args[1] + b.args[1])),
    ),
    "halves change places": (
        lambda x: fuse.concatenate(fuse.halves(x)),
        (X,),
        of("concat", lambda a, b: fuse.concatenate([b, a])),
    ),
}
FUNCTIONS = {
    "relu is the identity": (lambda x: fuse.relu(x), (X,), of("relu", lambda x: x)),
    "relu is abs": (lambda x: fuse.relu(x), (X,), of("relu", lambda x: abs(x))),
    "tanh is scaled wrongly": (lambda x: fuse.sigmoid(x), (X,), of("sigmoid", lambda x: 0.5 + 0.5 * fuse.tanh(x))),
    "gelu by tanh": (
        lambda x: fuse.gelu(x),
        (X,),
        of("gelu", lambda x: 0.5 * x * (1.0 + fuse.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))),
    ),
    "gelu by sigmoid": (lambda x: fuse.gelu(x), (X,), of("gelu", lambda x: x * fuse.sigmoid(1.702 * x))),
    "silu without its factor": (lambda x: fuse.silu(x), (X,), of("silu", lambda x: fuse.sigmoid(x))),
    "a maximum is a sum": (lambda x: x / fuse.max(x), (X,), of("max", lambda x: fuse.sum(x))),
    "a minimum is a maximum": (lambda x, y: fuse.minimum(x, y), (X, X), of("minimum", lambda a, b: fuse.maximum(a, b))),
    "less is less or equal": (lambda x, y: fuse.where(x < y, x, 1.0), (X, X), of("less", lambda a, b: a <= b)),
    "where turns round": (lambda x, y: fuse.where(x < y, x, y), (X, X), of("where", lambda m, a, b: fuse.where(m, b, a))),
    "the root of a square is the number": (lambda x: fuse.sqrt(x * x), (X,), of("sqrt", lambda s: s.args[0])),
    "exp of a product": (lambda x, y: fuse.exp(x * y), (X, X), of("exp", two("mul", lambda a, b: fuse.exp(a) * fuse.exp(b)))),
    "a cast is lost": (lambda x: fuse.cast(x * x, bf16) * x, (X,), of("bf16", lambda x: x)),
    "a cast moves out of a sum": (
        lambda x, y: fuse.cast(x + y, bf16),
        (X, X),
        of("bf16", two("add", lambda a, b: _cast(a, "bf16") + _cast(b, "bf16"))),
    ),
    "fp16 is bf16": (lambda x: fuse.cast(x * x, bf16) * x, (X,), of("bf16", lambda x: _cast(x, "fp16"))),
    "rounded twice": (lambda x: fuse.cast(x * x, bf16) * x, (X,), of("bf16", lambda x: _cast(_cast(x, "fp16"), "bf16"))),
    "causal scores see all": (lambda x, y: fuse.causal(x @ y.T), (X, X), of("causal", lambda s: s)),
}
PARTS = {
    "a log of a sum of exponentials without its maximum": (loss, (X,), _naive_lse),
    "parts are not rescaled": (loss, (X,), _parts(lambda sums, maxima, shift: sums)),
    "parts are rescaled the other way": (loss, (X,), _parts(lambda sums, maxima, shift: sums * fuse.exp(shift - maxima))),
    "the greatest part is all": (loss, (X,), of("sum", lambda e: term_operations.reduce_parts("sum_of_parts", e.args[0]))),
}
REFUSED = CONSTANTS | PLACES | PRODUCTS | FUNCTIONS | PARTS
LOSES = {  # right in the field of numbers, and not in floats: (definition, shapes, rule, a place that is named)
    "softmax without its maximum": (softmax, (X,), _naive_softmax, "of 2^10"),
    "half of a softmax without its maximum": (softmax, (X,), _sum_without_maximum, "of 2^10"),
    "a variance by squares": (layer_norm, (X,), _variance_of_squares, "far from 0"),
    "a scale too early": (lambda x, y: x * y, (X, X), of("mul", lambda a, b: (a * 2.0**100) * b * 2.0**-100), "of 2^60"),
    "a scale too late": (lambda x, y: x * y, (X, X), of("mul", lambda a, b: (a * 2.0**-100) * b * 2.0**100), "of 2^-60"),
    "a sum by way of a great number": (
        lambda x, y: x + y,
        (X, X),
        of("add", lambda a, b: (a + 2.0**20) + (b - 2.0**20)),
        "normal",
    ),
    "a square inside of a quotient": (lambda x, y: x / y, (X, X), of("div", lambda a, b: a * b / (b * b)), "of 2^-100"),
}
DIVIDES_BY_0 = {  # (definition, shapes, rule, a kind of rows where they differ)
    "what is divided by itself is 1": (lambda x: x / x, (X,), of("div", lambda a, b: a * 0.0 + 1.0), "zero"),
    "a factor is divided away": (lambda x, y: x * y / y, (X, X), of("div", lambda a, b: a.args[0]), "zero"),
    "a factor and its divisor come": (lambda x, y: x + y, (X, X), of("add", lambda a, b: a + b * a / a), "zero"),
    "a row is divided by its sum and back": (
        lambda x: x * x,
        (X,),
        of("mul", lambda a, b: a / fuse.sum(a * a) * b * fuse.sum(a * a)),
        "zero",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_rule_is_refused(name):
    for actual, _ in answers(*REFUSED[name][:2], Rule(name, "", REFUSED[name][2])):
        assert not actual.equal and "NOT the definition" in str(actual)


@pytest.mark.parametrize("name", LOSES)
def test_a_rule_that_loses_range_is_refused_or_named(name):
    definition, shapes, rule, place = LOSES[name]
    for actual, floats in answers(definition, shapes, Rule(name, "", rule)):
        assert actual.equal and floats.lost and not floats.wrong and not floats.passed
        assert "NO rule declares" in str(floats) and any(f"rows {place}" in one for one in floats.lost), floats.lost
    for _, floats in answers(definition, shapes, Rule(name, "", rule, loses="where it is great")):
        assert floats.passed and "LOSES rows" in str(floats) and "as declared: where it is great" in str(floats)


@pytest.mark.parametrize("name", DIVIDES_BY_0)
def test_a_rule_that_divides_by_0_is_refused(name):
    definition, shapes, rule, place = DIVIDES_BY_0[name]
    for actual, floats in answers(definition, shapes, Rule(name, "", rule, loses="everything")):
        assert actual.equal and not floats.passed and any(f"rows {place}" in one for one in floats.wrong), floats


ROWS = np.full((4, 64), 1e-4, bf16.np)
KERNELS = {  # definitions, what they are given, rules, and the value that is right
    "norm": (norm, (ROWS, np.ones(64, bf16.np)), CONSTANTS["eps is 2^-61 of it, in a norm"][2]),
    "product": (
        norm_linear,
        (ROWS, np.ones(64, bf16.np), np.ones((64, 64), bf16.np)),
        CONSTANTS["eps is 2^-61 of it, in a norm"][2],
    ),
    "bound": (bounded, (ROWS,), CONSTANTS["a bound is 2^-61 of it"][2]),
    "softmax": (softmax, (ROWS,), _naive_softmax),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_proof_of_a_kernel_by_a_wrong_rule_does_not_hold(name, monkeypatch):
    """The kernel is right at the numbers of its run; the proof still reports the wrong rule."""
    monkeypatch.setattr(rules, "RULES", (Rule(name, "", KERNELS[name][2]),))
    function, arrays, _ = KERNELS[name]
    actual = fuse.kernel(function)._plan_call(arrays)[0]
    candidates.candidates.cache_clear()
    wrong = [one for one in candidates.candidates(actual, card(None)) if one.rules]
    candidates.candidates.cache_clear()
    assert wrong
    known = proof.prove(name, actual, wrong[0])
    assert not known.holds and ("NOT the definition" in str(known) or "NO rule declares" in str(known))
    assert proof.prove(name, actual, wrong[0]._replace(roots=actual.roots, rules=())).identity.equal


# ---- what the proof says of itself -----------------------------------------------------------------------------------
def test_a_proof_is_repeated_by_its_seed():
    actual = trace(norm, X, VECTOR)
    one, again, other = (identity.identity(actual.roots, actual.roots, seed) for seed in (7, 7, None))
    assert one == again and one.seed == 7 and one.fields != other.fields
    assert "seed 7" in str(one) and len({p for p, _ in one.fields}) == identity.POINTS
    for p, q in one.fields:
        assert (p - 1) % q == 0 and q.bit_length() == 61 and p != MERSENNE


def test_primes():
    """The prime test against trial division, and against numbers that pass with fewer witnesses."""
    small = [n for n in range(3000) if n > 1 and all(n % m for m in range(2, math.isqrt(n) + 1))]
    assert [n for n in range(3000) if prime_fields.is_prime(n)] == small
    assert prime_fields.is_prime(MERSENNE) and prime_fields.is_prime(2**64 - 59)
    strong = 2047, 1373653, 25326001, 3215031751, 2152302898747, 3474749660383, 341550071728321, 3825123056546413051
    carmichael, squares = (561, 1729, 252601), (1321**2, (2**31 - 1) ** 2)
    assert not any(map(prime_fields.is_prime, (*strong, *carmichael, *squares, MERSENNE - 2)))
    with pytest.raises(ValueError, match="deterministic below"):
        prime_fields.is_prime(3317044064679887385961981)
    with pytest.raises(ValueError, match="deterministic below"):
        prime_fields.is_prime(2**89 - 1)


def test_constants_are_exact_and_apart(monkeypatch):
    """A constant is m * 2^e modulo p; primes at which two constants are equal are drawn anew."""
    drawn = [prime_fields.PrimeField(MERSENNE, 1321, 3), *map(prime_fields.random_field, [Random(0)] * 2)]
    arithmetic = identity.FieldArithmetic(drawn[1], {}, b"")
    for c in (1e-5, 0.1, 2.0**-1074, 1.7e308, -3.0, 1e-5 * 2.0**-61):
        for part, n in zip(arithmetic.embed(c), drawn[1][:2]):
            assert (part * Fraction(c).denominator - Fraction(c).numerator) % n == 0
    left = iter(drawn)
    monkeypatch.setattr(identity, "random_field", lambda random: next(left))
    assert identity._field_for({Fraction(1e-5), Fraction(1e-5 * 2.0**-61)}, None) is drawn[1]
    assert identity._field_for({Fraction(1e-5)}, None) is drawn[2]


def test_infinite_constants_are_told_apart():
    actual = trace(lambda x: (fuse.where(x > 0.0, x, -math.inf), fuse.where(x > 0.0, x, math.inf)), X)
    least, greatest = actual.roots
    assert identity.identity([least], [least]).equal and not identity.identity([least], [greatest]).equal


@pytest.mark.parametrize(
    ("function", "shapes", "up", "down"),
    [
        (lambda x, y: x * y + x, (X, X), 2, 0),
        (lambda x, y: x / y + y / x, (X, X), 2, 2),
        (lambda x, w: x @ w @ w.T, (X, W), 3, 0),
        (lambda x: fuse.sum(1.0 / x), (X,), 3, 4),  # 4 columns
        (lambda x, g: x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g, (X, VECTOR), 3, 0),
    ],
)
def test_degrees_are_counted(function, shapes, up, down):
    """The degrees of numerators and denominators of the results, counted by hand."""
    actual = trace(function, *shapes)
    axes = identity.base_axes(name for x in identity.walk(*actual.roots) for name in x.axes)
    size = identity._degree_bounds(actual.roots, dict.fromkeys(axes, 4))[actual.roots[0]]
    assert (size.up, size.down) == (up, down)


def test_the_bound_is_no_lie(monkeypatch):
    """With primes of 9 bits different terms are sometimes equal, and no more often than the bound says."""
    monkeypatch.setattr(prime_fields, "BITS", 8)
    monkeypatch.setattr(identity, "BITS", 8)
    monkeypatch.setattr(identity, "TRIES", 1)
    x = terms.input_term("x", (), "float32")
    one, other = x * x, x * x + math.prod((x - float(n) for n in range(12)), start=1.0)
    tests = [identity.identity([one], [other], seed, points=1) for seed in range(600)]
    assert 0 < sum(test.equal for test in tests) / len(tests) <= tests[0].bound < 1


def test_lengths_are_no_constants():
    """A mean is over no fixed number, whichever extents the points have: of one axis and of two."""
    square = trace(mean, SQUARE).roots[0]
    unify(*square.args[0].args[0].axes)
    for x in (trace(mean, X).roots[0], square):
        for n, seed in itertools.product(range(2, 10), range(12)):
            assert not identity.identity([x], [x.args[0] / float(n)], seed).equal
