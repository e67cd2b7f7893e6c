"""Weights with a scale for each group of their rows and each column: x @ (w * repeat(scale, group, -2))."""

import numpy as np
import pytest
from references import compare

import fuse
from fuse import operators, repeat
from fuse.algebra import rules
from fuse.algebra.derivative import NoRule
from fuse.language import terms
from fuse.language.evaluate import NumPyArithmetic, evaluate
from fuse.language.graph import group_scaled
from fuse.planning.cost import card_of
from fuse.templates.products.group_scales import GroupScales
from tiles import bf16, fp8e4m3, fp16, int8
from tiles.testing import ptx

K, N = 384, 96


def rows_of(m, k=K, dtype=bf16):
    return (np.random.default_rng(m).standard_normal((m, k)) / (32 if dtype is fp16 else 1)).astype(dtype.np)


def weights(k=K, n=N, dtype=int8, seed=0):
    """Weights as nn.Linear stores them: (N, K) in memory."""
    return (np.random.default_rng(seed).standard_normal((n, k)) * (32 if dtype is int8 else 1)).astype(dtype.np).T


def scales(groups, n=N, dtype=np.float32):
    return np.random.default_rng(1).uniform(0.25, 2, (groups, n)).astype(dtype)


def linear(group):
    return lambda x, w, scale: x @ (w * repeat(scale, group, -2))


def of_linear(x, v, scale):  # as torch's linear has them: v (N, K), scale (N, K / 128)
    return x @ fuse.transpose(v * repeat(scale, 128))


def norm_linear(x, g, w, scale):
    return (x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g) @ (w * repeat(scale, 64, -2))


def two(x, w, s, v, t):
    return fuse.silu(x @ (w * repeat(s, 128, -2))) * (x @ (v * repeat(t, 128, -2)))


def one_of_two(x, w, s, v):
    return fuse.silu(x @ (w * repeat(s, 128, -2))) * (x @ v)


def adapted(x, w, s, a, b):
    return x @ (w * repeat(s, 128, -2)) + 0.5 * ((x @ a) @ b)


def of_columns_too(x, w, s, c):
    return x @ (w * repeat(s, 128, -2) * c)


ONE_KERNEL = {  # up to 64 rows: (definition, the arguments behind x)
    "groups of 128": (linear(128), lambda: (weights(), scales(3))),
    "groups of 64, fp8": (linear(64), lambda: (weights(dtype=fp8e4m3), scales(6))),
    "groups of 192, scales of bf16": (linear(192), lambda: (weights(), scales(2, dtype=bf16.np))),
    "groups of 256": (linear(256), lambda: (weights(768), scales(3))),
    "one group": (linear(K), lambda: (weights(), scales(1))),
    "nn.Linear's, scales turned": (of_linear, lambda: (weights().T, np.asfortranarray(scales(3).T))),
    "norm": (norm_linear, lambda: (rows_of(1)[0], weights(), scales(6))),
    "two products": (two, lambda: (weights(), scales(3) / 1024, weights(seed=1), scales(3))),
    "one of two": (one_of_two, lambda: (weights(), scales(3) / 1024, weights(seed=1))),
    "adapter": (adapted, lambda: (weights(), scales(3), rows_of(K, 16), rows_of(16, N))),
    "columns too": (of_columns_too, lambda: (weights(), scales(3), scales(1)[0])),
}


@pytest.mark.parametrize(("name", "rows"), [*zip(ONE_KERNEL, (5, 64, 1, 17, 33) * 3)])
def test_one_kernel(name, rows):
    definition, make = ONE_KERNEL[name]
    kernel, arrays = fuse.kernel(definition), (rows_of(rows, 768 if "256" in name else K), *make())
    (only,) = kernel.candidates(*arrays)[0].plan.kernels
    assert "along k are multiplied by their scales" in only.describe()
    compare(kernel, arrays, kernel.run(*arrays))


@pytest.mark.parametrize("name", ["groups of 128", "columns too", "two products"])
def test_proof(name):
    definition, make = ONE_KERNEL[name]
    prove = fuse.kernel(definition).proof(rows_of(5), *make())
    assert prove.holds, prove


TWO_KERNELS = {  # the first one multiplies the weights by their scales: (definition, rows, the arguments behind x)
    "many rows": (linear(128), 70, lambda: (weights(), scales(3))),
    "groups of 32": (linear(32), 5, lambda: (weights(), scales(12))),
    "(K, N)": (linear(128), 5, lambda: (np.ascontiguousarray(weights()), scales(3))),
    "(K, N), scales turned": (linear(128), 70, lambda: (np.ascontiguousarray(weights()), np.asfortranarray(scales(3)))),
    "nn.Linear's": (of_linear, 5, lambda: (weights().T, np.ascontiguousarray(scales(3).T))),
    "weights of bf16": (linear(128), 70, lambda: (weights(dtype=bf16), scales(3))),
    "the last block has warps without rows": (linear(48), 5, lambda: (np.ascontiguousarray(weights(240)), scales(5))),
}


@pytest.mark.parametrize("name", TWO_KERNELS)
def test_two_kernels(name):
    definition, rows, make = TWO_KERNELS[name]
    kernel, arrays = fuse.kernel(definition), (rows_of(rows, 240 if "warps" in name else K), *make())
    first, _ = kernel.candidates(*arrays)[0].plan.kernels
    assert first.describe().startswith("weights times scales of groups of")
    compare(kernel, arrays, kernel.run(*arrays))
    if name == "(K, N), scales turned":
        assert kernel.proof(*arrays).holds


def test_fp16():
    arrays = rows_of(5, dtype=fp16), weights(), scales(3) / 256
    kernel = fuse.kernel(linear(128))
    assert len(kernel.candidates(*arrays)[0].plan.kernels) == 1
    compare(kernel, arrays, kernel.run(*arrays))


@pytest.mark.parametrize("name", ["int8_group_linear", "fp8_group_linear"])
def test_operators(name):
    """The extent of a group follows from the shapes: one function has groups of 64 and of 128."""
    operator, dtype = getattr(operators, name), {"int8": int8, "fp8": fp8e4m3}[name.partition("_")[0]]
    for groups in (3, 6):
        arrays = rows_of(5), weights(dtype=dtype), scales(groups)
        assert f"sums over groups of {K // groups} along k" in operator.explain(*arrays)
        compare(operator, arrays, operator.run(*arrays))
        assert np.array_equal(operator(*arrays), fuse.kernel(linear(K // groups))(*arrays))


def test_as_compiled():
    arrays = rows_of(5, 256), weights(256, 64), scales(2, 64)
    kernel = fuse.kernel(linear(128))
    compare(kernel, arrays, ptx(kernel.run, *arrays))


def test_scaled_weights_as_compiled():
    arrays = rows_of(5, 64), np.ascontiguousarray(weights(64, 64)), np.asfortranarray(scales(2, 64))
    kernel = fuse.kernel(linear(32))
    compare(kernel, arrays, ptx(kernel.run, *arrays))


def test_without_wgmma(monkeypatch):
    monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card_of("sm_80"))
    kernel, arrays = fuse.kernel(linear(128)), (rows_of(5), weights(), scales(3))
    assert len(kernel.candidates(*arrays)[0].plan.kernels) == 2
    compare(kernel, arrays, kernel.run(*arrays))


WEIGHTS = {  # of the first of two kernels: (definition, groups of scales, columns, groups in a proof); None: others compute it
    "three groups": (lambda w, s: w * repeat(s, 128, -2), 3, N, [3]),
    "scales first": (lambda w, s: repeat(s, 64, -2) * w, 6, N, [3]),
    "along columns": (lambda w, s: w * repeat(s, 48), K, 2, [2]),
    "one group": (lambda w, s: w * repeat(s, K, -2), 1, N, []),
    "computed scales": (lambda w, s: w * repeat(2 * s, 128, -2), 3, N, None),
    "computed weights": (lambda w, s: 2 * w * repeat(s, 128, -2), 3, N, None),
    "groups that no tile divides": (lambda w, s: w * repeat(s, 24, -2), 16, N, None),
    "scales that are not repeated": (lambda w, s: w * s, K, N, None),
    "a vector": (lambda w, s: w * repeat(s, 128, -2), 3, N, None),
    "a vector of scales": (lambda w, s: w * repeat(s, 48), 0, 2, None),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_the_first_kernel(name):
    definition, groups, columns, groups_of_proof = WEIGHTS[name]
    w = np.ascontiguousarray(weights(dtype=bf16))
    scale = scales(groups, columns) if groups else scales(1, columns)[0]
    traced = fuse.kernel(definition).trace((w[0] if name == "a vector" else w, scale))
    terms.TABLES.append(traced.table)
    try:
        extents = [[*kernel.fixed_extents.values()] for kernel in GroupScales.kernels_for(traced.roots[0])]
    finally:
        terms.TABLES.pop()
    assert extents == ([] if groups_of_proof is None else [groups_of_proof])


@pytest.mark.parametrize("axis", [-1, -2, 0, 1])
def test_repeat(axis):
    """The same of NumPy's arrays, of torch's tensors, and of terms."""
    torch, x = pytest.importorskip("torch"), np.arange(6.0, dtype=np.float32).reshape(2, 3)
    expected = np.repeat(x, 2, axis)
    assert np.array_equal(repeat(x, 2, axis), expected)
    assert np.array_equal(repeat(torch.from_numpy(x), 2, axis), expected)
    (term,) = fuse.kernel(lambda x: repeat(x, np.int64(2), axis)).trace((x,)).roots
    assert term.extents == expected.shape
    assert np.array_equal(evaluate([term], {"x": x}, NumPyArithmetic(np.float64))[0], expected)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda x, s: x @ repeat(s, 0, -2), ValueError, "count must be a positive integer"),
        (lambda x, s: x @ repeat(s, s, -2), ValueError, "count must be a positive integer"),
        (lambda x, s: x @ repeat(s, 2, None), TypeError, "repeats columns, axis=-1, or rows, axis=-2, got axis=None"),
        (lambda x, s: x @ repeat(s, 2, -3), TypeError, "repeats columns, axis=-1, or rows, axis=-2, got axis=-3"),
        (lambda x, s: x @ repeat(s, 100, -2), ValueError, "takes"),
    ],
)
def test_mistakes(wrong, error, message):
    with pytest.raises(error, match=message):
        fuse.kernel(wrong)(rows_of(2), scales(3))


def test_two_extents_of_groups():
    """Weights of one x may have groups of 64 and of 128: the first are twice as many."""
    kernel = fuse.kernel(lambda x, w, s, v, t: x @ (w * repeat(s, 64, -2)) + x @ (v * repeat(t, 128, -2)))
    arrays = rows_of(5), weights(), scales(6), weights(seed=1), scales(3)
    compare(kernel, arrays, kernel.run(*arrays))
    assert kernel.proof(*arrays).holds


@pytest.mark.parametrize("lying", [np.asfortranarray, np.ascontiguousarray], ids=["turned", "as they are"])
def test_gradient(lying):
    """That of rows, dy @ (w * s).T, is a product with the scaled weights; there is none of scales."""
    kernel, arrays = fuse.kernel(linear(128)), (rows_of(5), lying(weights()), scales(3))
    gradient, dy = kernel.gradients.choose(("x",), (0,), 1), rows_of(5, N)
    compare(gradient, (*arrays, dy), gradient.run(*arrays, dy), factor=3)
    assert len(gradient.candidates(*arrays, dy)[0].plan.kernels) == 2 and gradient.proof(*arrays, dy).holds
    with pytest.raises(NoRule, match="repeat: has no gradient yet"):
        kernel.gradient.source(*arrays, dy)


def test_autograd():
    torch = pytest.importorskip("torch")
    x, w, s = torch.from_numpy(rows_of(5).astype(np.float32)).bfloat16(), *map(torch.from_numpy, (weights(), scales(3)))
    x.requires_grad_()
    fuse.kernel(linear(128))(x, w, s).sum().backward()
    expected = (w.double() * s.double().repeat_interleave(128, 0)).sum(1).expand(5, K)
    assert torch.linalg.norm(x.grad.double() - expected) < 0.01 * torch.linalg.norm(expected)


def test_group_scaled():
    """Both ways of writing it are one."""
    traced = fuse.kernel(of_linear).trace((rows_of(5), weights().T, scales(3).T.copy()))
    (root,) = traced.roots
    scaled = group_scaled(root.args[1])
    assert (scaled.group, scaled.matrix.extents, scaled.scales.extents) == (128, (K, N), (3, N))
    assert group_scaled(scaled.matrix) is None


def test_rules_leave_scales_of_groups():
    """A scale of groups is neither one of rows nor one of columns."""
    traced = fuse.kernel(linear(128)).trace((rows_of(5), weights(), scales(3)))
    forms = rules.equivalent_forms(traced.roots, traced.table)
    (only,) = [rule for form in forms for rule in form.rules]
    assert only.name == "weights are multiplied by scales of groups before the product"
