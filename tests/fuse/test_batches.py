"""Products of a batch of matrices, and operands that broadcast along the batch."""

import numpy as np
import pytest
from operator_cases import A100, normal
from references import compare

import fuse
from fuse import operators
from fuse.language.trace import Shape
from fuse.planning.cost import H200

FORMS = {
    "rows for all": (lambda x, w: x @ w, ["mk", "ekn"]),
    "weights for all": (lambda x, w: fuse.silu(x @ w), ["emk", "1kn"]),
    "as torch has them": (lambda x, w: x @ fuse.transpose(w), ["emk", "enk"]),
    "a norm": (lambda x, g, w: (x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g) @ w, ["emk", "k", "ekn"]),
    "biases, a residual": (lambda x, w, b, c, r: x @ w + b + c + r, ["emk", "ekn", "n", "e1n", "emn"]),
    "a scale of each": (lambda x, w, s: (x @ w) * s, ["emk", "ekn", "e11"]),
    "a scale of rows": (lambda x, w, s: (x @ w) * s, ["emk", "ekn", "em1"]),
}
LENGTHS = {"1": 1, "e": 2, "k": 72, "n": 40}


CASES = [(form, 17, card) for form in FORMS for card in (H200, A100)] + [("as torch has them", 1, H200)]
CASES += [(form, 70, H200) for form in FORMS if form != "a norm"]  # which comes ahead there, and is no map of rows


@pytest.mark.parametrize(("form", "rows", "card"), CASES, ids=lambda one: getattr(one, "name", str(one)))
def test_forms(form, rows, card, monkeypatch):
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card)
    monkeypatch.setenv("TILES_CHECK", "0")  # test_as_compiled.py has them compiled
    definition, axes = FORMS[form]
    kernel, arrays = fuse.kernel(definition), [normal(*[LENGTHS.get(one, rows) for one in its]) for its in axes]
    arrays = [x.astype(np.float32) if its == "e11" else x for x, its in zip(arrays, axes)]
    actual = kernel.run(*arrays)
    assert actual.shape == (2, rows, 40)
    compare(kernel, arrays, actual)


@pytest.mark.parametrize("rows", [3, 70])
def test_one_of_a_batch(rows):
    arrays = normal(1, rows, 72), normal(1, 72, 40)
    compare(operators.expert_linear, arrays, operators.expert_linear.run(*arrays))


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"@: leading axes of \(2, 3, 72\) and \(4, 72, 40\) do not broadcast: x and w"):
        operators.expert_linear.run(normal(2, 3, 72), normal(4, 72, 40))


@pytest.mark.parametrize("card", [H200, A100], ids=["H200", "A100"])
def test_more_products_than_a_grid_has_blocks(card):
    """The error is raised before a launch; a call then runs by parts."""
    kernel = fuse.kernel(lambda x, w: x @ w)
    with pytest.raises(ValueError, match="launch: grid must have at most 65535 blocks along its second and third axis"):
        kernel.launches([Shape((65536, 16, 64), "bfloat16"), Shape((65536, 64, 64), "bfloat16")], card)
