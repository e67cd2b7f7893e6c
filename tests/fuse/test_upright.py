"""Products of up to 64 rows whose rows are wgmma's left operand: tiles of 96 columns."""

import numpy as np
import pytest
from operator_cases import normal
from references import compare

import fuse
import fuse.operators as operators
from fuse.inspect import Case, shapes
from fuse.planning.candidates import candidates
from fuse.planning.cost import H200, card
from fuse.planning.proof import prove
from fuse.templates.products.few_rows import UPRIGHT, FewRows

FUNCTIONS = {  # of x (m, 200), w (200, 136), g (200,), t (m, 136), b (136,)
    "a product": lambda x, w, g, t, b: x @ w,
    "a norm": lambda x, w, g, t, b: (x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g) @ w,
    "an epilogue": lambda x, w, g, t, b: fuse.silu(x @ w + b) * t + fuse.mean(t) * 0.5,
}


@pytest.fixture
def rows_on_left(monkeypatch):
    """The schedule is taken wherever it can be, not only where it is fastest."""
    monkeypatch.setattr(FewRows, "_estimate_microseconds", lambda self, rows, columns, blocks: float(columns != UPRIGHT))
    candidates.cache_clear()
    yield
    candidates.cache_clear()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [37, 64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results(name, rows, transposed, rows_on_left, monkeypatch):
    """No length is a multiple of a tile's; weights are (K, N) and (N, K)."""
    if rows == 37:
        monkeypatch.setenv("TILES_CHECK", "0")
    kernel = fuse.kernel(FUNCTIONS[name])
    arrays = [normal(rows, 200), normal(200, 136), normal(200), normal(rows, 136), normal(136)]
    arrays[1] = np.asfortranarray(arrays[1]) if transposed else arrays[1]
    assert f"= 64, {UPRIGHT}, " in kernel.source(*arrays)
    compare(kernel, arrays, kernel.run(*arrays))


def test_products_side_by_side_do_not(rows_on_left, monkeypatch):
    """Adjacent products use tiles with weights on the left, whatever is fastest for the first of them alone."""
    monkeypatch.setenv("TILES_CHECK", "0")
    kernel = fuse.kernel(lambda x, k, v: (x @ k, x @ v))
    arrays = [normal(37, 200), normal(200, 136), normal(200, 40)]
    source = kernel.source(*arrays)
    assert source.count("@cuda.jit") == 1 and f"= 64, {UPRIGHT}, " not in source
    compare(kernel, arrays, kernel.run(*arrays))


def test_proof(rows_on_left):
    kernel, arrays = operators.rms_norm_linear, (normal(64, 200), normal(200), normal(200, 136))
    actual = kernel.trace(kernel._arguments(arrays))
    proof = prove(kernel.name, actual, candidates(actual, H200)[0])
    assert proof.holds, proof


@pytest.mark.parametrize(("rows", "columns"), [(16, 128), (64, UPRIGHT)])
def test_where_it_serves(rows, columns):
    """At 6144 columns, tiles of 96 leave fewer multiprocessors idle than 128 do, and load less of x than 64."""
    case = Case("rms_norm_linear", rows)
    (kernel,) = candidates(case.operator._trace(shapes(case)), card(None))[0].plan.kernels
    assert kernel.schedule.columns == columns


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [37, 64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_the_card(name, rows, transposed):
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    kernel = fuse.kernel(FUNCTIONS[name])
    sizes = (rows, 1000), (1000, 6136), (1000,), (rows, 6136), (6136,)
    arrays = [normal(*s) for s in sizes]
    inputs = [*map(to_torch, arrays)]
    inputs[1] = inputs[1].t().contiguous().t() if transposed else inputs[1]
    assert f"= 64, {UPRIGHT}, " in kernel.source(*inputs)
    outputs = kernel(*inputs)
    torch.cuda.synchronize()
    compare(kernel, arrays, to_numpy(outputs))
