"""Each check of a proof detects the faults that it must. Wrong rules are in test_wrong_rules.py."""

import inspect

import numpy as np
import pytest
from operator_cases import SHAPES, sample

import fuse
from fuse import operators
from fuse.algebra import float_check, identity, rules
from fuse.writing import module_text
from tiles import bf16, fp8e4m3, fp16

X, G, W = (np.ones(shape, bf16.np) for shape in ((5, 64), 64, (64, 64)))


@fuse.kernel
def norm(x, g):
    return x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g


@fuse.kernel
def norm_linear(x, g, w):
    return (x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g) @ w


# ---- kernels ---------------------------------------------------------------------------------------------------------
FAULTS = {  # in the text of a kernel: (the function, what it is given, what is replaced, by what, what the proof says)
    "eps is lost": (norm, (X, G), " + 1e-05", "", "TOO MUCH"),
    "eps is 2^-61 of it": (norm, (X, G), "1e-05", "4e-24", "TOO MUCH"),
    "eps is another": (norm, (X, G), "1e-05", "1e-06", "TOO MUCH"),
    "eps is lost behind a product": (norm_linear, (X, G, W), " + 1e-05", "", "TOO MUCH"),
    "the vector is lost": (norm, (X, G), " * g,", ",", "TOO MUCH"),
    "the vector is lost before a product": (norm_linear, (X, G, W), "tile * g_row)", "tile)", "TOO MUCH"),
    "a sum of no squares": (norm, (X, G), "row_sum(x * x)", "row_sum(x)", "TOO MUCH"),
    "a result is stored a column too far": (
        norm_linear,
        (X, G, W),
        "(0, warp_row))",
        "(0, warp_row + 1))",
        "greatest error is nan",
    ),
    "a tile is not published": (norm_linear, (X, G, W), "u.publish(i)\n            ", "", "deadlock"),
    "the weights are not fetched": (norm_linear, (X, G, W), "w.fill(i, gW, (first + i, col))", "pass", "deadlock"),
    "a tile is written without a claim": (norm_linear, (X, G, W), "subtile(u.claim(i)", "subtile(u.wait(i)", "deadlock"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_kernel_is_seen(name, monkeypatch):
    function, arrays, old, new, says = FAULTS[name]
    right = module_text.load

    def load(text, name, kernels):
        assert old in text, text
        return right(text.replace(old, new), name)

    monkeypatch.setattr(module_text, "load", load)
    proof = function.proof(*arrays)
    assert proof.identity.equal and not proof.run.passed and not proof.holds
    assert says in str(proof), proof


def test_what_is_printed_is_what_runs():
    """`source` gives the same bits as `run`, and a module with another constant does not."""
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(bf16.np)
    run = norm_linear.run(x, G, W)
    for change, same in ((lambda text: text, True), (lambda text: text.replace("1e-05", "1e-01"), False)):
        actual, out = {}, np.empty_like(run)
        exec(compile(change(norm_linear.source(x, G, W)), "kept", "exec"), actual)
        actual["launch"](x, G, W, out)
        assert (out.tobytes() == run.tobytes()) is same


@pytest.mark.parametrize(
    "definition",
    [
        lambda x: fuse.log(abs(x)),
        lambda x: 1.0 / x,
        lambda x: x / fuse.max(abs(x)),
        lambda x: fuse.rsqrt(fuse.sum(x * x)) * x,
        lambda x: fuse.where(x > 0.0, x, -np.inf),
    ],
)
def test_what_zeros_or_infinities_are_right_for(definition):
    """A row of zeros is left out where the definition gives NaN for it, and the definition's infinities are expected."""
    proof = fuse.kernel(definition).proof(X)
    assert proof.holds, proof


# ---- rules -----------------------------------------------------------------------------------------------------------
MORE = {  # definitions for the rules that no operator needs: (definition, shapes)
    "a number": (lambda x, c, w: x @ (c * w), ((5, 8), (), (8, 6))),
    "a vector": (lambda x, s, w: x @ (s * w), ((5, 8), (8, 1), (8, 6))),
    "experts": (lambda p, x, g, w: fuse.weighted(p, (x @ fuse.transpose(g)) @ w), ((5, 3), (5, 8), (3, 6, 8), (3, 6, 8))),
    "a chain": (lambda x, a, b: x @ (a @ b), ((5, 8), (8, 8), (8, 6))),
    "transposes": (lambda x, w: (w.T @ x.T).T, ((5, 8), (8, 6))),
    "narrow": (lambda x, c, b: c * (x @ b), ((5, 8), (), (8, 6))),
    "one product": (lambda x, y, w: x @ w + y @ w, ((5, 8), (5, 8), (8, 6))),
    "pick": (lambda x, i: fuse.pick(x, i), ((5, 8), (5,))),
    "fp8": (lambda x, f: x @ f, ((5, 8), (8, 6))),
    "scales of groups and of columns": (
        lambda x, w, c, s: x @ (w * c * fuse.repeat(s, 4, -2)),
        ((5, 8), (8, 6), (6,), (2, 6)),
    ),
}


def _forms():
    """[(definition as terms, forms by one rule)] of all operators and of MORE."""
    for name in SHAPES:
        function = getattr(operators, name)
        yield function.trace(function._flatten_leading(function._arguments(sample(name, 5, bf16)))[0])
    for function, shapes in MORE.values():
        dtypes = {"i": np.int64, "f": fp8e4m3.np}
        named = zip(shapes, inspect.signature(function).parameters)
        arrays = [np.zeros(shape, dtypes.get(key, bf16.np)) if shape else 0.5 for shape, key in named]
        yield fuse.kernel(function).trace(arrays)


def test_all_rules_hold():
    """Each rule holds wherever it applies in an operator: by identity, and in floats, where it loses no more than it declares,
    and loses that somewhere."""
    used, lost = set[str](), set[str]()
    for actual in _forms():
        for form in rules.equivalent_forms(actual.roots, actual.table):
            if len(form.rules) != 1:
                continue
            (rule,) = form.rules
            floats = float_check.compare_in_floats(actual.roots, form.roots, [rule.loses] if rule.loses else [])
            assert identity.identity(actual.roots, form.roots).equal and floats.passed, (rule.name, str(floats))
            used.add(rule.name)
            lost |= {rule.name} if floats.lost else set()
    assert used == {rule.name for rule in rules.RULES}
    assert lost == {rule.name for rule in rules.RULES if rule.loses}


def test_a_rule_that_keeps_the_range_of_16_bits():
    """fp16 ends at 65504, so a form by a rule that moves a scale after a product is no candidate there."""
    x, g, w = (np.full(shape, value, fp16.np) for shape, value in (((5, 64), 2.0**11), (64, 2.0**6), ((64, 64), 1.0)))
    assert not any(one.rules for one in norm_linear.candidates(x, g, w))
    assert (norm_linear.run(x, g, w) == 2.0**12).all()  # where x * g would be 2^17
    assert any(one.rules for one in norm_linear.candidates(X, G, W))


def test_what_a_rule_loses_is_printed():
    proof = norm_linear.proof(X, G, W)
    assert proof.holds and "LOSES rows of 2^60 with other arrays of 2^40" in str(proof)
    assert "as declared: a row's scale moves through a product (x @ w may leave its range)" in str(proof)
