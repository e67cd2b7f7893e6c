"""Products with a matrix per row, chosen by an index: adapters."""

import numpy as np
import pytest
from operator_cases import A100, normal
from references import compare

import fuse
from fuse import operators
from fuse.algebra import rules
from fuse.language.term_operations import select_columns
from fuse.planning import proof
from fuse.planning.candidates import candidates
from fuse.planning.cost import H200

CARDS = pytest.mark.parametrize("card", [H200, A100], ids=lambda card: card.name)


def sample(rows, adapters=3, rank=16):
    """x, w, a, b, and an index in any order, by which a row has no adapter."""
    index = np.random.default_rng(rows).integers(-1, adapters, rows)
    index[rows // 2] = -1
    return normal(rows, 72), normal(72, 40), normal(adapters, rank, 72), normal(adapters, rank, 40), index


def wanted(x, w, a, b, index, scale=1.0):
    """The results in float64, row by row."""
    x, w, a, b = (y.astype(np.float64) for y in (x, w, a, b))
    lora_parts = [x[m] @ a[e].T @ b[e] if e >= 0 else 0 * w[0] for m, e in enumerate(index)]
    return x @ w + scale * np.stack(lora_parts)


@CARDS
@pytest.mark.parametrize(("rows", "adapters", "rank"), [(1, 3, 16), (17, 5, 8), (70, 2, 8), (70, 3, 24)])
def test_against_float64(rows, adapters, rank, card, monkeypatch):
    """Few rows and many; the products with all adapters are narrow, or take several steps along k."""
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card)
    monkeypatch.setenv("TILES_CHECK", "0")
    kernel, arrays = fuse.kernel(operators.lora_linear_by_index.definition), sample(rows, adapters, rank)
    outputs = kernel.run(*arrays, 0.5)
    compare(kernel, (*arrays, 0.5), outputs)
    right = wanted(*arrays, 0.5)
    assert np.abs(outputs - right).max() <= 2**-6 * np.abs(right).max()
    without = operators.lora_linear_by_index(*arrays, 0.5)[rows // 2]
    assert np.abs(without.astype(float) - right[rows // 2]).max() <= 2**-7 * np.abs(right).max()


@pytest.mark.parametrize("lying", [list, lambda arrays: [arrays[0], np.asfortranarray(arrays[1]), *arrays[2:]]])
@pytest.mark.parametrize("rows", [5, 70])
def test_weights_as_torch_has_them(rows, lying, monkeypatch):
    """Weights with another layout than the adapters' are another product; with the same, they are further steps along k."""
    monkeypatch.setenv("TILES_CHECK", "0")
    arrays = lying(sample(rows, 3, 24))
    assert operators.lora_linear_by_index.source(*arrays).count("@cuda.jit") == (2 if lying is list else 3)
    right = wanted(*arrays)
    assert np.abs(operators.lora_linear_by_index.run(*arrays) - right).max() <= 2**-6 * np.abs(right).max()


def test_a_narrow_product_of_deep_rows(monkeypatch):
    """Clusters of four split k where there are few columns."""
    monkeypatch.setenv("TILES_CHECK", "0")
    kernel, arrays = fuse.kernel(lambda x, w: x @ w), (normal(3, 1032), normal(1032, 40))
    assert (
        "DEPTH, BLOCKS" in kernel.source(*arrays)
        and ", 4, " in kernel.source(*arrays).split("BLOCKS, STAGES, AHEAD = ")[1][:20]
    )
    compare(kernel, arrays, kernel.run(*arrays))


@CARDS
def test_proof(card):
    kernel, arrays = operators.lora_linear_by_index, sample(70, 3, 24)
    actual = kernel.trace(kernel._arguments(arrays))
    known = proof.prove(kernel.name, actual, candidates(actual, card)[0])
    assert known.holds and "a (3, 24," in str(known), known


def _own(change):
    """A wrong rule on the columns that each row keeps."""
    return lambda x: (change(*x.args) for _ in range(x.operation == "select_columns"))


BY_INDEX = next(rule for rule in rules.RULES if "adapters" in rule.name)
WRONG = {
    "rows keep all": _own(lambda x, index, like: x),
    "rows keep others": _own(lambda x, index, like: x - select_columns(x, index, like)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name):
    kernel, arrays = operators.lora_linear_by_index, sample(70)
    actual = kernel.trace(kernel._arguments(arrays))
    forms = rules.equivalent_forms(actual.roots, actual.table, [BY_INDEX, rules.Rule(name, "", WRONG[name])])
    wrong = next(form for form in forms if len(form.rules) == 2)
    assert not proof.identity(actual.roots, wrong.roots).equal


@pytest.mark.parametrize("function", [operators.lora_linear_by_index, operators.lora_linear_by_index.run])
def test_mistakes(function):
    x, w, a, b, index = sample(6)
    with pytest.raises(ValueError, match=r"index: must be below 3: index\[2\]=3, index.shape=\(6,\)"):
        function(x, w, a, b, np.where(np.arange(6) == 2, 3, index))
    with pytest.raises(ValueError, match=r"got \(6, 72\), \(3, 72, 16\) and \(5,\)|index: m must"):
        function(x, w, a, b, index[:5])
    with pytest.raises(ValueError, match=r"index chooses among 3 matrices .*, and 2 of b|b: . must"):
        function(x, w, a, b[:2], index)


def test_one_product_by_itself():
    """A single product by an index has no kernel, and the error says why."""
    kernel, (x, _, a, _, index) = fuse.kernel(lambda x, w, index: fuse.matmul_by(x, w, index)), sample(6)
    w = np.ascontiguousarray(a.swapaxes(1, 2))
    with pytest.warns(RuntimeWarning, match="no template computes matmul_by"):
        outputs = kernel.run(x, w, index)
    assert np.abs((outputs - kernel(x, w, index)).astype(float)).max() <= 0.2
