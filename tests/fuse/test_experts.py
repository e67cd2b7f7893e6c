"""Mixtures of experts: the weighted sum of the experts' outputs."""

import numpy as np
import pytest
from operator_cases import A100, normal
from references import compare

import fuse
from fuse import operators
from fuse.algebra import rules
from fuse.language import term_operations
from fuse.planning import proof
from fuse.planning.cost import H200

EXPERTS, ACROSS, INNER = 8, 128, 72


def sample(rows):
    """Rows with clear favourites, so that rounding does not change the best two experts."""
    rng = np.random.default_rng(rows)
    x, router = normal(rows, INNER), (8 * rng.standard_normal((INNER, EXPERTS))).astype(normal(1, 1).dtype)
    return x, router, *(normal(EXPERTS, ACROSS, INNER) for _ in range(3))


def wanted(x, router, gate, up, down):
    """The results in float64, row by row, from the row's two best experts only."""
    x, router, gate, up, down = (one.astype(np.float64) for one in (x, router, gate, up, down))
    scores, actual = x @ router, []
    for row, its in zip(x, scores):
        best = np.argsort(its)[-2:]
        share = np.exp(its[best] - its.max()) / np.exp(its[best] - its.max()).sum()
        gated = [(lambda g: g / (1 + np.exp(-g)))(gate[e] @ row) * (up[e] @ row) for e in best]
        actual.append(sum(p * (h @ down[e]) for p, h, e in zip(share, gated, best)))
    return np.stack(actual)


@pytest.mark.parametrize(("rows", "card"), [(3, H200), (70, H200), (17, A100)], ids=str)
def test_of_two_experts(rows, card, monkeypatch):
    """Each row has the weighted outputs of its own experts, as a loop over rows computes them."""
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card)
    monkeypatch.setenv("TILES_CHECK", "0")
    kernel, arrays = fuse.kernel(operators.mixture_of_experts.definition), sample(rows)
    right, outputs = wanted(*arrays), kernel.run(*arrays)
    assert np.abs(outputs - right).max() <= 2**-5 * np.abs(right).max()
    assert kernel.source(*arrays).count("@cuda.jit") == 4
    compare(kernel, arrays, outputs)


def test_top():
    x = np.array([[3.0, 1.0, 2.0, 2.0], [0.0, -1.0, -5.0, -2.0]])
    assert (fuse.top(x, 2) == [[3, 0, 2, 2], [0, -1, 0, 0]]).all() and (fuse.top(x, 1) == [[3, 0, 0, 0], [0, 0, 0, 0]]).all()


EXPERTS_RULE = next(rule for rule in rules.RULES if "experts" in rule.name)


def _spread(change):
    return lambda x: (change(*x.args) for _ in range(x.operation == "repeat_columns"))


@pytest.mark.parametrize(
    "wrong",
    [
        _spread(lambda p, w: term_operations.repeat_columns(p * p, w)),
        _spread(lambda p, w: 1.0 - term_operations.repeat_columns(p, w)),
    ],
    ids=["squares", "rest"],
)
def test_a_wrong_rule_is_caught(wrong):
    kernel = fuse.kernel(lambda p, x, g, w: fuse.weighted(p, (x @ fuse.transpose(g)) @ w))
    actual = kernel.trace((normal(5, EXPERTS), normal(5, INNER), *(normal(EXPERTS, ACROSS, INNER) for _ in range(2))))
    forms = rules.equivalent_forms(actual.roots, actual.table, [EXPERTS_RULE, rules.Rule("wrong", "", wrong)])
    right, wrong = (next(form for form in forms if len(form.rules) == n) for n in (1, 2))
    assert proof.identity(actual.roots, right.roots).equal and not proof.identity(actual.roots, wrong.roots).equal


def test_mistakes():
    x, router, gate, up, down = sample(5)
    with pytest.raises(ValueError, match=r"weighted: takes \(m, e\) and \(e, m, n\), got \(5, 8\) and \(7, 5, 72\)"):
        operators.mixture_of_experts(x, router, gate[:7], up[:7], down[:7])
    kernel = fuse.kernel(operators.mixture_of_experts.definition)
    few = [np.ascontiguousarray(w[:, :40]) for w in (gate, up, down)]  # columns of an expert, less than a tile's
    with pytest.warns(RuntimeWarning, match="no template computes"):
        assert kernel.run(x, router, *few).shape == x.shape
