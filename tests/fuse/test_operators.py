"""The operators of fuse.operators: against float64 for few rows and many, their proofs and texts, and on the GPU."""

import numpy as np
import pytest
from operator_cases import SHAPES, sample
from references import compare

import fuse
import fuse.operators as operators
from fuse import inspect
from fuse.planning import tune
from fuse.planning.candidates import candidates
from fuse.planning.cost import card
from fuse.planning.generated_module import generate_module
from fuse.writing import module_text
from tiles import bf16, fp16


def written(operator, arrays):
    """Arrays for the results and scratch of the best module."""
    actual = operator.trace(operator._flatten_leading(operator._arguments(arrays))[0])
    result = generate_module(operator.name, actual, candidates(actual, card(None))[0])
    return [np.empty(x.extents, x.stored_dtype(arrays[0].dtype.name)) for x in result.written]


def test_all_are_here():
    assert sorted(SHAPES) == operators.__all__


def alternating(*rows):
    """(operator, one of these), and the other ones before a release."""
    for n, name in enumerate(SHAPES):
        for m, row in enumerate(rows):
            yield pytest.param(name, row, marks=[] if n % len(rows) == m else [pytest.mark.release])


@pytest.mark.parametrize(("name", "problem"), [*((name, (131, bf16)) for name in SHAPES), *alternating((1, bf16), (64, fp16))])
def test_against_float64(name, problem, monkeypatch):
    """The kernels of many rows also pass Numba's typing."""
    rows, dtype = problem
    if rows in (1, 64):
        monkeypatch.setenv("TILES_CHECK", "0")
    arrays = sample(name, rows, dtype)
    compare(getattr(operators, name), arrays, getattr(operators, name).run(*arrays))


@pytest.mark.parametrize(("name", "rows"), [*alternating(150, 3)])
def test_text_and_proof(name, rows, monkeypatch):
    """The module is short, gives the same bits as the call, and the proof holds."""
    monkeypatch.setenv("TILES_CHECK", "0")  # Numba has seen such kernels above
    operator, arrays = getattr(operators, name), sample(name, rows, bf16)
    text, proof = operator.source(*arrays), operator.proof(*arrays)
    assert proof.holds, proof
    lines = text.splitlines()
    assert len(lines) <= 80 * max(1, text.count("@cuda.jit")) and max(map(len, lines)) <= module_text.WIDTH
    outputs = operator.run(*arrays)
    results, space = written(operator, arrays), {}
    exec(text, space)
    space["launch"](*operator._arguments(arrays), *results)
    for mine, its in zip(results, outputs if isinstance(outputs, tuple) else (outputs,)):
        assert mine.dtype == its.dtype and (mine == its).all()


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    "name", ["rms_norm_linear", "gated_mlp", "expert_linear", "lora_linear", "residual_layer_norm", "mla_attention"]
)
def test_text_at_real_lengths(name, gradient):
    """The text is as short at the lengths of models."""
    if gradient and name in inspect.BY_PARTS:
        pytest.skip("its gradient is that of its parts")
    case = inspect.Case(name, 4096, gradient=gradient)
    actual = case.operator._trace(inspect.shapes(case))
    lines = generate_module(name, actual, candidates(actual, card(None))[0]).text.splitlines()
    assert len(lines) <= 81 * sum("@cuda.jit" in line for line in lines) and max(map(len, lines)) <= module_text.WIDTH


def test_what_was_measured(monkeypatch, tmp_path):
    """Measured times decide, and candidates report them, on a stand-in GPU."""
    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILES_CACHE", "1")
    monkeypatch.setattr("fuse.planning.definition.ordinal_of", lambda arrays: 0)
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card(None))
    monkeypatch.setattr(tune, "measure", lambda name, result, *more: [1e-6 * (len(result) - n) for n in range(len(result))])
    operator, arrays = fuse.kernel(operators.rms_norm_linear.definition), sample("rms_norm_linear", 3, bf16)
    by_roofline = operator.candidates(*arrays)
    actual = operator.tune(*arrays)
    assert (
        str(actual[0]).endswith("measured 1.0 us") and actual[0].plan is by_roofline[len(actual[: tune.MAX_MEASURED]) - 1].plan
    )
    assert [str(one) for one in operator.candidates(*arrays)] == [str(one) for one in actual]


@pytest.mark.parametrize("rows", [3, 150])
def test_every_candidate(rows):
    """Every candidate that tuning may choose is right."""
    operator, arrays = operators.rms_norm_linear, sample("rms_norm_linear", rows, bf16)
    defaults = [p.default for p in operator.signature.parameters.values()][len(arrays) :]
    actual = operator.trace(operator._flatten_leading(operator._arguments(arrays))[0])
    for one in candidates(actual, card(None))[: tune.MAX_MEASURED]:
        result, space = generate_module(operator.name, actual, one), {}
        exec(result.text, space)
        written = [np.empty(x.extents, bf16.np) for x in result.written]
        space["launch"](*arrays, *defaults, *written)
        compare(operator, arrays, written[0])


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("name", ["rms_norm_linear", "lora_linear", "gated_mlp"])
def test_weights_as_torch_has_them(name, rows):
    """Weights are (N, K) in memory, the transpose of the operand."""
    arrays = sample(name, rows, bf16)
    transposed = [np.asfortranarray(x) if x.ndim == 2 and n else x for n, x in enumerate(arrays)]
    compare(getattr(operators, name), transposed, getattr(operators, name).run(*transposed))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 37, 64, 300])
@pytest.mark.parametrize("name", SHAPES)
def test_on_the_card(name, rows):
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    arrays = sample(name, rows, bf16)
    outputs = getattr(operators, name)(*map(to_torch, arrays))
    torch.cuda.synchronize()
    in_host_memory = tuple(map(to_numpy, outputs)) if isinstance(outputs, tuple) else to_numpy(outputs)
    compare(getattr(operators, name), arrays, in_host_memory)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 300])
def test_tuned_on_the_card(rows, monkeypatch, tmp_path):
    """Every candidate is measured, and the fastest is taken, remembered, and right."""
    pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    monkeypatch.setenv("TILES_CACHE_DIR", str(tmp_path))
    operator, arrays, said = fuse.kernel(operators.rms_norm_linear.definition), sample("rms_norm_linear", rows, bf16), []
    inputs = list(map(to_torch, arrays))
    actual = operator.tune(*inputs, say=said.append)
    measured = [one.measured for one in actual if one.measured]
    assert len(said) == len(measured) > 1 and measured == sorted(measured)
    assert str(operator.candidates(*inputs)[0]) == str(actual[0]) and "measured" in str(actual[0])
    compare(operator, arrays, to_numpy(operator(*inputs)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
def test_early_on_the_card(rows):
    """Overlapping launches, in a stream and in a graph, give the same as sequential ones: the previous launch writes an operand
    of the next, or its weights."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(rows)
    x, h, g, a, b, *w = (
        (torch.randn(s, device="cuda") / s[0] ** 0.5).bfloat16()
        for s in ((rows, 1024), (rows, 1024), (1024,), (1024, 16), (16, 1024), *[(1024, 1024)] * 4)
    )

    def chain(x, h, meet=lambda: None):
        for _ in range(4):
            x, h = operators.residual_rms_norm(x, h, g * 30)
            meet()
            x = operators.lora_linear(x, w[0], a, b)
            meet()
            result = operators.rms_norm_linear(w[1], g, w[2])
            meet()
            x = operators.gated_mlp_down(x, result, w[2], w[3])
            meet()
        return x, h

    expected = chain(x, h, torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(x, h)
    for run in [lambda: chain(x, h), lambda: (graph.replay(), captured)[1]] * 5:
        outputs = run()
        torch.cuda.synchronize()
        assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize(("rows", "inner", "columns"), [(3, 100, 64), (3, 104, 60), (70, 100, 64)])
def test_what_tma_cannot_take(rows, inner, columns):
    """Rows that are no multiple of 16 bytes run by parts, and the warning says why."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(bf16.np) for s in ((rows, inner), (inner,), (inner, columns))]
    with pytest.warns(RuntimeWarning, match="multiples of 16 bytes.*runs by parts"):
        y = operators.rms_norm_linear.run(*arrays)
    assert y.shape == (rows, columns)
