"""Scores that only a softmax reads are never stored."""

import numpy as np
import pytest
from operator_cases import A100, normal
from references import compare

import fuse
from fuse import operators
from fuse.algebra import rules
from fuse.language import term_operations
from fuse.planning import proof
from fuse.planning.candidates import candidates
from fuse.planning.cost import H200
from tiles import bf16


@fuse.kernel
def softened(x, w, b, index, heat=2.0):
    """The log-softmax at an index, of scores with a bias and a temperature."""
    scores = 4.0 * fuse.tanh((x @ w + b) / heat)
    return fuse.pick(scores, index) - fuse.log(fuse.sum(fuse.exp(scores - fuse.max(scores)))) - fuse.max(scores)


@fuse.kernel
def log_sum(x, w):
    greatest = fuse.max(x @ w)
    return fuse.log(fuse.sum(fuse.exp(x @ w - greatest))) + greatest


def sample(rows, columns, inner=72):
    """x, w, and targets, the first of which is ignored."""
    targets = np.random.default_rng(rows).integers(0, columns, rows)
    targets[0] = -100
    return normal(rows, inner), normal(inner, columns), targets


CASES = [(1, 40), (17, 264), (150, 520)]
CARDS = pytest.mark.parametrize("card", [H200, A100], ids=lambda card: card.name)


@CARDS
@pytest.mark.parametrize(("rows", "columns"), CASES)
def test_against_float64(rows, columns, card, monkeypatch):
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card)
    monkeypatch.setenv("TILES_CHECK", "0")  # test_operators.py has Numba see the kernels
    kernel, arrays = fuse.kernel(operators.linear_cross_entropy.definition), sample(rows, columns)
    loss, lse = outputs = kernel.run(*arrays)
    assert loss.dtype == np.float32 and loss.shape == lse.shape == (rows, 1) and loss[0] == lse[0]
    compare(kernel, arrays, outputs)
    scores = arrays[0].astype(np.float64) @ arrays[1].astype(np.float64)
    picked = scores[np.arange(rows), np.maximum(arrays[2], 0)] * (arrays[2] >= 0)
    expected = np.log(np.exp(scores).sum(-1)) - picked
    assert np.abs(loss[:, 0] - expected).max() <= 2**-7 * np.abs(scores).max()
    assert (loss[1:] >= 0).all()


@CARDS
@pytest.mark.parametrize("kernel", [softened, log_sum], ids=lambda kernel: kernel.name)
def test_forms(kernel, card, monkeypatch):
    """Weights as (N, K), an epilogue, and no index."""
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card)
    monkeypatch.setenv("TILES_CHECK", "0")
    x, w, index = sample(70, 264)
    kernel, w = fuse.kernel(kernel.definition), np.asfortranarray(w)
    arrays = (x, w, normal(264), index) if "b" in kernel.names else (x, w)
    assert "@ w" not in kernel.source(*arrays).split("def launch")[1]
    compare(kernel, arrays, kernel.run(*arrays))


@CARDS
def test_text_and_proof(card):
    """There are several blocks of columns, and the proof holds."""
    kernel, arrays = operators.linear_cross_entropy, sample(70, 264)
    actual = kernel.trace(arrays)
    best = candidates(actual, card)[0]
    assert len(best.plan.kernels) == 2 and len(best.rules) == 3
    known = proof.prove(kernel.name, actual, best)
    assert known.holds and "w (24, 264)" in str(known), known


def _sums(x, change):
    """A wrong rule on sums of exponentials: change(sums of blocks, maxima of blocks, shift)."""
    if x.operation == "sum" and x.args[0].operation == "exp":
        scores, shift = x.args[0].args[0].args
        yield fuse.sum(
            change(*(term_operations.reduce_parts(name, scores) for name in ("sum_of_parts", "max_of_parts")), shift)
        )


WRONG = {
    "not rescaled": lambda x: _sums(x, lambda sums, maxima, shift: sums),
    "rescaled the other way": lambda x: _sums(x, lambda sums, maxima, shift: sums * fuse.exp(shift - maxima)),
    "rescaled by a part's own": lambda x: _sums(x, lambda sums, maxima, shift: sums * fuse.exp(maxima - maxima)),
    "maxima add up": lambda x: (
        fuse.sum(term_operations.reduce_parts("max_of_parts", y)) for y in x.args if x.operation == "max"
    ),
    "the greatest of what is picked": lambda x: (
        fuse.max(term_operations.reduce_parts("pick_of_parts", *x.args)) for _ in range(x.operation == "pick")
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name):
    actual = operators.linear_cross_entropy.trace(sample(70, 264))
    forms = rules.equivalent_forms(actual.roots, actual.table, [rules.Rule(name, "", WRONG[name])])
    assert len(forms) > 1 and not any(proof.identity(actual.roots, form.roots).equal for form in forms[1:])


def test_far_below_0():
    """If all scores are so low that exp(-maximum) overflows, elements past the end of the row must not count."""
    x = np.full((3, 64), -8, bf16.np)
    w, targets = np.full((64, 40), 1, bf16.np), np.arange(3)
    loss, lse = operators.linear_cross_entropy.run(x, w, targets)
    assert np.allclose(loss, np.log(40), atol=1e-4) and np.allclose(lse, np.log(40) - 512)


def test_leading_axes_are_rows():
    x, w, targets = sample(6, 40)
    loss, _ = operators.linear_cross_entropy.run(x, w, targets)
    for function in (operators.linear_cross_entropy.run, operators.linear_cross_entropy):
        apart, _ = function(x.reshape(2, 3, 72), w, targets.reshape(2, 3))
        assert apart.shape == (2, 3, 1) and np.abs(apart.ravel() - loss.ravel()).max() < 0.25


@pytest.mark.parametrize("function", [operators.linear_cross_entropy, operators.linear_cross_entropy.run])
def test_mistakes(function):
    x, w, targets = sample(5, 40)
    with pytest.raises(ValueError, match=r"target: must be below 40: target\[3\]=40, target.shape=\(5,\)"):
        function(x, w, np.where(np.arange(5) == 3, 40, targets))
    with pytest.raises(
        ValueError, match=r"pick: takes rows and a column for each of them, got \(5, 40\) and \(4,\)|target: m must"
    ):
        function(x, w, targets[:4])
    with pytest.raises(TypeError, match="index: dtype must be one of"):
        fuse.kernel(lambda x, index: fuse.pick(x, index) * index).run(x, targets)
    with pytest.raises(TypeError, match="index must be an argument of int32 or int64"):
        function(x, w, targets.astype(np.float32))


def test_what_is_picked_without_a_product():
    """Picking is then a masked sum of rows."""
    picked = fuse.kernel(lambda x, index: fuse.pick(x, index) * 2.0)
    inputs = normal(3, 40), np.array([1, -1, 5])
    outputs = picked.run(*inputs)
    assert "a picked element is a masked sum" in picked.explain(*inputs).lower()
    assert np.allclose(outputs[:, 0].astype(float), normal(3, 40)[[0, 1, 2], [1, 0, 5]].astype(float) * [2, 0, 2])
