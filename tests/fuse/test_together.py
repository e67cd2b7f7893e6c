"""Several maps of the same products, stored by one kernel as several arrays."""

import numpy as np
import pytest
from operator_cases import A100, normal
from references import compare

import fuse
from fuse.inspect import Case, shapes
from fuse.language.trace import Shape
from fuse.planning.candidates import candidates
from fuse.planning.cost import H200, card
from fuse.planning.generated_module import generate_module


def gates(x, a, b, d):
    gate, up = x @ a, x @ b
    return d * up * fuse.sigmoid(gate), d * fuse.silu(gate)


FUNCTIONS = {  # of x (m, 72), a and b (72, 136), d (m, 136)
    "gates": gates,
    "a product and a map of it": lambda x, a, b, d: (fuse.exp(x @ a) + d, x @ a),
    "of numbers of rows": lambda x, a, b, d: ((x @ a) * fuse.mean(d), (x @ a - x @ b) / (1.0 + fuse.mean(x * x))),
}


@pytest.mark.parametrize(("rows", "card"), [(5, H200), (131, H200), (70, A100)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results(name, rows, card, monkeypatch):
    """No length is a multiple of a tile's; where no kernel has several results, several kernels compute them."""
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card)
    monkeypatch.setenv("TILES_CHECK", "0")
    kernel, arrays = fuse.kernel(FUNCTIONS[name]), (normal(rows, 72), normal(72, 136), normal(72, 136), normal(rows, 136))
    compare(kernel, arrays, kernel.run(*arrays))
    if rows == 131:
        best_plan = kernel.candidates(*arrays)[0].plan
        assert len(best_plan.kernels[-1].roots) == len(kernel.trace(arrays).roots) and best_plan.kernels[-1].label == "many"


def test_proof_and_compiler():
    """The proof holds; Numba types the kernels, in fp16 too."""
    kernel, arrays = (
        fuse.kernel(gates),
        [normal(s, n).astype(np.float16) for s, n in ((131, 72), (72, 40), (72, 40), (131, 40))],
    )
    compare(kernel, arrays, kernel.run(*arrays))
    proof = kernel.proof(*arrays)
    assert proof.holds, proof


def test_a_batch(monkeypatch):
    """The products are a batch."""
    monkeypatch.setenv("TILES_CHECK", "0")
    kernel = fuse.kernel(lambda x, a, b: (fuse.silu(x @ a) * (x @ b), fuse.relu(x @ a)))
    arrays = normal(2, 70, 72), normal(2, 72, 40), normal(2, 72, 40)
    compare(kernel, arrays, kernel.run(*arrays))
    assert [len(one.roots) for one in kernel.candidates(*arrays)[0].plan.kernels] == [2]


def test_the_gradient_of_a_gated_mlp():
    """The gradients of both products are stored by one kernel, and no map has its own. Of the whole MLP one kernel stores three
    arrays."""
    for name, labels in (("gated_mlp", ["many", "many"]), ("gated_mlp_down", ["many", "many", "many"])):
        case = Case(name, 4096, gradient=True)
        best_plan = candidates(case.operator._trace(shapes(case)), card(None))[0].plan
        assert [kernel.label for kernel in best_plan.kernels] == labels


def test_nothing_is_computed_twice():
    """A product that another kernel computes beside others has no kernel of its own."""
    case = Case("gated_mlp", 4096, gradient=True)
    for one in candidates(case.operator._trace(shapes(case)), card(None)):
        roots = [x for kernel in one.plan.kernels for x in kernel.roots]
        assert len(roots) == len(set(roots))


def test_other_products_do_not_leave_with_them():
    """One kernel's results have the same columns: results with others are other kernels'."""
    kernel = fuse.kernel(lambda x, a, b: (fuse.silu(x @ a), fuse.relu(x @ b)))
    actual = kernel._trace(tuple(Shape(s, "bfloat16") for s in ((128, 64), (64, 128), (64, 256))))
    assert generate_module(kernel.name, actual, candidates(actual, H200)[0]).text.count("@cuda.jit") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_the_card(name):
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    kernel = fuse.kernel(FUNCTIONS[name])
    for rows in (131, 300):
        arrays = normal(rows, 72), normal(72, 136), normal(72, 136), normal(rows, 136)
        outputs = kernel(*map(to_torch, arrays))
        torch.cuda.synchronize()
        compare(kernel, arrays, tuple(map(to_numpy, outputs)))
