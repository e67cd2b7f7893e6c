"""Products on GPUs without wgmma: every operator against float64, its proof, its text, PTX for sm_80, and machine code."""

import builtins
import dis

import numpy as np
import pytest
from operator_cases import A100, SHAPES, normal, sample
from references import compare

import fuse
from fuse import inspect, operators
from fuse.planning import proof
from fuse.planning.candidates import candidates
from fuse.planning.cost import H200, card_of
from fuse.planning.generated_module import generate_module
from fuse.templates.products import since_ampere
from fuse.templates.products.since_ampere import SinceAmpere
from fuse.writing import module_text
from tiles import bf16, fp16

PRODUCTS = [name for name in SHAPES if "linear" in name or "mlp" in name]


@pytest.fixture
def without_wgmma(monkeypatch):
    """Arrays in host memory are planned for an A100."""
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: A100)


def transposed(arrays):
    """Weights as torch has them: (N, K) in memory."""
    return [np.asfortranarray(x) if n and np.ndim(x) == 2 else x for n, x in enumerate(arrays)]


PROBLEMS = [(70, transposed, bf16), (17, list, bf16), (1, transposed, fp16)]
CASES = [  # two problems for each product, in turn
    pytest.param(name, *problem, marks=[pytest.mark.release] * ((n + m) % 3 == 2))
    for n, name in enumerate(PRODUCTS)
    for m, problem in enumerate(PROBLEMS)
]


@pytest.mark.parametrize(("name", "rows", "lying", "dtype"), CASES)
def test_against_float64(name, rows, lying, dtype, without_wgmma, monkeypatch):
    if lying is transposed:
        monkeypatch.setenv("TILES_CHECK", "0")  # Numba has seen the kernel of 17 rows
    kernel = fuse.kernel(getattr(operators, name).definition)
    arrays = lying(sample(name, rows, dtype))
    compare(kernel, arrays, kernel.run(*arrays))


@pytest.mark.parametrize("name", PRODUCTS)
def test_text_and_proof(name):
    """The best module has a kernel of this template, needs nothing since Hopper, is short, and its proof holds."""
    operator = getattr(operators, name)
    actual = operator.trace(operator._arguments(sample(name, 17, bf16)))
    best = candidates(actual, A100)[0]
    text = generate_module(name, actual, best).text
    assert any(isinstance(kernel, SinceAmpere) for kernel in best.plan.kernels)
    assert not any(word in text for word in ("tensor", "warpgroup", "cluster"))
    assert len(text.splitlines()) <= 80 * text.count("@cuda.jit") and max(map(len, text.splitlines())) <= module_text.WIDTH
    run = proof.check_kernels(name, actual, best)
    assert run.passed, run


OTHERS = {
    "residual": (lambda x, w, b, r: r + x @ w + b, [(20, 40), (40, 24), (24,), (20, 24)]),
    "of itself": (lambda x, w: x + fuse.relu(x @ w), [(20, 40), (40, 40)]),
    "a sum of x as it is": (lambda x, w: (x @ w) / fuse.sum(x * x), [(20, 40), (40, 24)]),
    "a product of a narrow one": (lambda x, a, b: (x @ a) @ b, [(20, 40), (40, 8), (8, 24)]),
    "two of one that is made": (lambda x, g, v, w: ((x * g) @ v) * ((x * g) @ w), [(20, 40), (40,), (40, 24), (40, 24)]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_forms(name, without_wgmma, monkeypatch):
    monkeypatch.setenv("TILES_CHECK", "0" if name == "residual" else "sm_80")
    definition, shapes = OTHERS[name]
    kernel, arrays = fuse.kernel(definition), [normal(*shape) for shape in shapes]
    compare(kernel, arrays, kernel.run(*arrays))


def test_large_tiles(without_wgmma, monkeypatch):
    """Tiles of 128 rows where there are enough of them for all multiprocessors."""
    monkeypatch.setattr(since_ampere, "PROCESSORS", 1)
    monkeypatch.setattr(since_ampere, "choose_schedule", since_ampere.choose_schedule.__wrapped__)  # which remembers
    kernel, arrays = fuse.kernel(operators.rms_norm_linear.definition), sample("rms_norm_linear", 70, bf16)
    assert "ROWS, COLUMNS, DEPTH, STAGES, GROUP = 128, 128, 32" in kernel.source(*arrays)
    compare(kernel, arrays, kernel.run(*arrays))


def test_as_ptx(without_wgmma, monkeypatch):
    """The PTX for sm_80, run on the CPU."""
    monkeypatch.setenv("TILES_INTERPRET", "sm_80")
    kernel, arrays = (
        fuse.kernel(operators.lora_linear.definition),
        [normal(5, 72), normal(72, 40), normal(72, 8), normal(8, 40)],
    )
    compare(kernel, arrays, kernel.run(*arrays))


EDGES = {
    "a sum of what is not 0 there": (lambda x, w: (x @ w) / fuse.sum(fuse.exp(x)), [(5, 40), (40, 24)]),
    "no number there": (lambda x, d, w: (x / (d * d)) @ w, [(5, 40), (40,), (40, 24)]),
    "no number in a row map": (lambda x, d: x / fuse.sum(x * x / (d * d)), [(5, 40), (40,)]),
}


@pytest.mark.parametrize("card", [H200, A100], ids=lambda card: card.name)
@pytest.mark.parametrize("name", EDGES)
def test_beyond_the_end_of_rows(name, card, monkeypatch):
    """Tiles hold zeros past the end. A prologue that makes them count is computed by a kernel before."""
    monkeypatch.setenv("TILES_CHECK", "0")
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card)
    definition, shapes = EDGES[name]
    kernel, arrays = fuse.kernel(definition), [normal(*shape) for shape in shapes]
    assert len(kernel.candidates(*arrays)[0].plan.kernels) == len(shapes[-1])  # a row map ahead of a product
    compare(kernel, arrays, kernel.run(*arrays))


def test_what_cannot_be_copied_runs_by_parts(without_wgmma):
    """cp.async copies 16 bytes from multiples of 16."""
    kernel = fuse.kernel(lambda x, w: x @ w)
    with pytest.warns(RuntimeWarning, match="w must have an address and strides of multiples of 16 bytes, has 4"):
        y = kernel.run(normal(5, 40), normal(40, 26)[:, :24])
    assert np.allclose(y.astype(float), normal(5, 40).astype(float) @ normal(40, 26)[:, :24].astype(float), atol=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 70, 300])
@pytest.mark.parametrize("name", PRODUCTS)
def test_on_the_card(name, rows, without_wgmma):
    """Any GPU since Ampere runs them; on one with wgmma they are chosen explicitly."""
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    kernel, arrays = fuse.kernel(getattr(operators, name).definition), sample(name, rows, bf16)
    outputs = kernel(*map(to_torch, arrays))
    torch.cuda.synchronize()
    compare(kernel, arrays, tuple(map(to_numpy, outputs)) if isinstance(outputs, tuple) else to_numpy(outputs))


# ---- machine code ----------------------------------------------------------------------------------------------------
def test_docstrings_say_shapes():
    """So that inspect finds all operators: each argument without a shape has a default."""
    assert all(map(inspect.has_documented_shapes, operators.__all__))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_modules_have_all_names(arch):
    """A kernel's globals are defined at lengths of models, whatever other kernels and launches define."""
    for case in inspect.cases(arch=arch):
        if case.rows in (1, 4096) and not case.transposed:
            operator = getattr(operators, case.name)
            actual = operator._trace(inspect.shapes(case))
            result = module_text.load(generate_module(case.name, actual, candidates(actual, card_of(arch))[0]).text, case.name)
            functions = [getattr(x, "py_func", x) for x in vars(result).values()]
            codes = [x.__code__ for x in functions if getattr(x, "__globals__", None) is vars(result)]
            args = {one.argval for code in codes for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
            assert codes and args <= vars(result).keys() | vars(builtins).keys(), case


def test_nothing_spills():
    """One of many cases: `python -m fuse inspect` compiles all operators on all targets, in minutes."""
    text, bad = inspect.report_case("sm_86", inspect.Case("gated_mlp", 4096, True))
    assert not bad and text.startswith("sm_86 ") and "   0 spilled" in text, text


def test_a_maximum_of_rows_comes_from_memory(without_wgmma):
    """Only sums are computed alongside a product, here and with wgmma."""
    kernel, arrays = fuse.kernel(lambda x, w: (x @ w) * fuse.max(x) + fuse.sum(x)), (normal(5, 72), normal(72, 40))
    compare(kernel, arrays, kernel.run(*arrays))
    assert "alongside: sum(x)" in kernel.explain(*arrays)
