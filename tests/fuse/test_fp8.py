"""Weights of fp8 and int8: read as bytes, converted in registers or before a product, their scales moved by the rules."""

import inspect as python

import numpy as np
import pytest
from references import compare

import fuse
from fuse import inspect, operators
from fuse.algebra import rules
from fuse.language.trace import Shape, trace_definition
from fuse.planning import proof
from fuse.planning.cost import card_of
from tiles import bf16, fp8e4m3, fp16, fp32, int8
from tiles.testing import ptx

K, N = 144, 96


def normal(*shape, dtype=bf16, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * (32 if dtype is int8 else 1)).astype(dtype.np)


def scales(*shape):
    return np.random.default_rng(1).uniform(0.25, 2, shape).astype(np.float32)


def weights(k=K, n=N, seed=0, dtype=fp8e4m3):
    """Weights as nn.Linear stores them: (N, K) in memory."""
    return normal(n, k, dtype=dtype, seed=seed).T


LINEAR = {fp8e4m3: operators.fp8_linear, int8: operators.int8_linear}


@pytest.mark.parametrize("lying", [np.asfortranarray, np.ascontiguousarray], ids=["turned", "as they are"])
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, fp8e4m3), (1, int8), (17, fp8e4m3), (64, int8), (70, fp8e4m3), (70, int8)], ids=str
)
def test_linear(rows, dtype, lying):
    """Few rows and (N, K) weights are one kernel, which reads bytes; otherwise a first kernel converts them."""
    operator, arrays = LINEAR[dtype], (normal(rows, K), lying(weights(dtype=dtype)), scales(N))
    text = operator.source(*arrays)
    direct = rows <= 64 and lying is np.asfortranarray
    assert text.count("@cuda.jit") == 2 - direct and ("warpgroup.load(subtile(w.wait(i)" in text) == direct
    compare(operator, arrays, operator.run(*arrays))
    prove = operator.proof(*arrays)
    assert prove.holds, prove


SCALED = {
    "of all": (lambda x, w, s: x @ (w * s), ()),
    "of all, in memory": (lambda x, w, s: x @ (w * s), (1,)),
    "of columns": (lambda x, w, s: x @ (w / s), (1, N)),
    "of columns, turned": (lambda x, v, s: x @ fuse.transpose(v * s), (N, 1)),
    "of rows": (lambda x, w, s: x @ (s * w), (K, 1)),
    "of rows, turned": (lambda x, v, s: x @ fuse.transpose(v * s), (K,)),
}


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("name", SCALED)
def test_scales(name, rows):
    """No kernel multiplies weights by their scales."""
    definition, shape = SCALED[name]
    kernel, w = fuse.kernel(definition), np.asfortranarray(weights())
    arrays = normal(rows, K), w.T if "turned" in name else w, scales(*shape) if shape else 0.5
    compare(kernel, arrays, kernel.run(*arrays))
    best = kernel.candidates(*arrays)[0]
    if rows == 5:
        assert len(best.plan.kernels) == 1
    actual = kernel.trace(arrays)
    assert proof.identity(actual.roots, best.roots).equal


OTHERS = {
    "a norm ahead": (operators.rms_norm_linear, lambda: (normal(5, K), normal(K), weights())),
    "two products": (operators.gated_mlp, lambda: (normal(5, K), weights(), weights(seed=1))),
    "an adapter of 16 bits": (operators.lora_linear, lambda: (normal(17, K), weights(), normal(K, 16), normal(16, N))),
    "fp16": (operators.gated_mlp, lambda: (normal(3, K, dtype=fp16), weights(), weights(seed=1))),
    "two products of int8": (
        operators.gated_mlp,
        lambda: ((normal(5, K) / 64).astype(bf16.np), weights(dtype=int8), weights(seed=1, dtype=int8)),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators(name):
    operator, make = OTHERS[name]
    arrays = make()
    assert operator.source(*arrays).count("@cuda.jit") == 1
    compare(operator, arrays, operator.run(*arrays))


@pytest.mark.parametrize("dtype", LINEAR, ids=str)
def test_scales_of_columns_with_fp16(dtype):
    """The product without its scale is no fp16 number: kernels that keep it in float32 serve, others do not."""
    x, w, scale = normal(5, K, dtype=fp16), weights(dtype=dtype), scales(N) / 256
    x *= fp16.np.type(16 if dtype is int8 else 512)
    assert np.abs(x.astype(np.float64) @ w.astype(np.float64)).max() > 65504
    assert LINEAR[dtype].source(x, w, scale).count("@cuda.jit") == 1
    compare(LINEAR[dtype], (x, w, scale), LINEAR[dtype].run(x, w, scale))
    many = np.resize(x, (70, K))
    with pytest.warns(RuntimeWarning, match="no template computes"):
        assert np.isfinite(LINEAR[dtype].run(many, w, scale)).all()


def test_mixed_bytes():
    """Two products with weights of both dtypes: a first kernel converts them."""
    arrays = normal(5, K), weights(), weights(seed=1, dtype=int8)
    assert "warpgroup.load(subtile" not in operators.gated_mlp.source(*arrays)
    compare(operators.gated_mlp, arrays, operators.gated_mlp.run(*arrays))


def test_quantise():
    """A cast to int8 rounds to the nearest, also in torch, and its scale is a result."""

    @fuse.kernel
    def quantise(x):
        scale = fuse.max(abs(x)) / 127.0
        return fuse.cast(x / scale, int8), fuse.cast(scale, fp32)

    x = normal(5, K)
    q, scale = quantise.run(x)
    wide = x.astype(np.float64)
    assert q.dtype == np.int8 and np.allclose(scale, np.abs(wide).max(1, keepdims=True) / 127)
    assert (np.abs(q - wide / scale) < 0.51).all() and (np.abs(q).max(1) == 127).all()
    torch = pytest.importorskip("torch")
    actual, _ = quantise(torch.from_numpy(x.astype(np.float32)).bfloat16())
    assert actual.dtype == torch.int8 and (np.abs(actual.numpy() - wide / scale) < 0.7).all()


@pytest.mark.parametrize("dtype", LINEAR, ids=str)
def test_as_compiled(dtype):
    """Bytes are converted on their way into wgmma's left operand."""
    arrays = normal(5, 48), weights(48, 64, dtype=dtype), scales(64)
    compare(LINEAR[dtype], arrays, ptx(LINEAR[dtype].run, *arrays))


@pytest.mark.parametrize(("arch", "dtype", "kernels"), [("sm_89", fp8e4m3, 2), ("sm_80", int8, 2), ("sm_80", fp8e4m3, 0)])
def test_other_cards(arch, dtype, kernels, monkeypatch):
    """Without wgmma a first kernel converts; without fp8 conversions no kernel serves."""
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card_of(arch))
    monkeypatch.setenv("TILES_CHECK", "0")
    kernel, arrays = fuse.kernel(LINEAR[dtype].definition), (normal(5, K), weights(dtype=dtype), scales(N))
    if kernels:
        assert len(kernel.candidates(*arrays)[0].plan.kernels) == kernels
        compare(kernel, arrays, kernel.run(*arrays))
    else:
        with pytest.warns(RuntimeWarning, match="sm_80 has no conversions to or from fp8"):
            kernel.run(*arrays)


OFFLINE = [("int8_linear", 16), ("fp8_linear", 64), pytest.param("int8_linear", 64, marks=pytest.mark.release)]


@pytest.mark.parametrize(("name", "rows"), OFFLINE)
def test_offline(name, rows):
    said, bad = inspect.report_case("sm_90a", inspect.Case(name, rows, transposed=True))
    assert not bad, said


def test_a_wrong_scale_is_caught():
    """A scale of columns is taken for one of rows."""

    def wrong(x):
        if x.operation == "matmul" and x.args[1].operation == "mul":
            yield (x.args[0] * x.args[1].args[1]) @ x.args[1].args[0]

    definition = SCALED["of all"][0]
    shapes = Shape((4, 8), "bfloat16"), Shape((8, 8), "float8_e4m3fn"), Shape((8,), "float32")
    actual = trace_definition(definition, tuple(python.signature(definition).parameters), shapes)
    forms = rules.equivalent_forms(actual.roots, actual.table, [rules.Rule("wrong", "", wrong)])[1:]
    assert forms and not any(proof.identity(actual.roots, form.roots).equal for form in forms)
