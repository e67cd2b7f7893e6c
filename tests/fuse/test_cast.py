"""Casts: results with other dtypes than the first argument's, and quantised rows."""

import numpy as np
import pytest
from references import compare

import fuse
from fuse import inspect, operators
from tiles import bf16, fp8e4m3, fp8e5m2, fp16, fp32


def normal(*shape, dtype=bf16):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype.np)


@pytest.mark.parametrize(("rows", "columns"), [(19, 264), (3, 1088), (2, 2056)])
def test_quantised_rows(rows, columns):
    """Half a unit of three bits of mantissa is 1/16; the greatest element of a row becomes 448."""
    x, residual, g = normal(rows, columns), normal(rows, columns)[::-1].copy(), normal(columns)
    q, scale, h = operators.residual_rms_norm_quantise.run(x, residual, g)
    assert (q.dtype, scale.dtype, h.dtype) == (fp8e4m3.np, np.float32, bf16.np) and scale.shape == (rows, 1)
    wide = x.astype(np.float64) + residual.astype(np.float64)
    want = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * g.astype(np.float64)
    assert np.allclose(scale, np.abs(want).max(-1, keepdims=True) / 448, rtol=1e-5)
    assert (np.abs(q.astype(np.float64)).max(-1) == 448).all()
    actual = q.astype(np.float64) * scale
    assert (np.abs(actual - want) <= np.maximum(np.abs(want) / 16, scale * 2**-10) * 1.001).all()
    assert (h == wide.astype(bf16.np)).all()


def test_rows_of_zeros():
    x, g = np.zeros((2, 1088), bf16.np), normal(1088)
    q, scale, _ = operators.residual_rms_norm_quantise.run(x, x, g)
    assert (q.astype(np.float32) == 0).all() and (scale > 0).all()


@pytest.mark.parametrize("dtype", [fp32, bf16, fp16, fp8e4m3], ids=str)
def test_dtypes(dtype):
    """A cast of an intermediate rounds it; fp8 saturates."""
    kernel = fuse.kernel(lambda x: (fuse.cast(x * 300.0, dtype), fuse.cast(x * 0.3, dtype) * 3.0))
    x = normal(5, 72, dtype=fp16)
    actual = kernel.run(x)
    wide = x.astype(np.float32)
    want = dtype.round(wide * np.float32(300)), dtype.round(wide * np.float32(0.3)).astype(np.float32) * 3
    assert actual[0].dtype == dtype.np and actual[1].dtype == np.float16
    assert (actual[0] == want[0]).all() and (actual[1] == want[1].astype(np.float16)).all()
    assert all((a == b).all() for a, b in zip(kernel(x), actual))


KERNELS = {  # of a scale, which comes first, so that results have its dtype; each of another form of row maps
    "flat": lambda s, x, z: x * s,
    "folded": lambda s, x, z: x * fuse.rsqrt(fuse.mean(x * x)) * s,
    "alone": lambda s, x, z: (x + z, (x + z) * fuse.rsqrt(fuse.mean(x * x)) * s),
    "halves": lambda s, x, z: (x * s, fuse.concatenate([y * 3.0 for y in fuse.halves(x)[::-1]])),
    "halves of what is kept": lambda s, x, z: (x * s, fuse.concatenate([y * 3.0 for y in fuse.halves(fuse.softmax(x))])),
}


@pytest.mark.parametrize("name", KERNELS)
def test_results_of_another_dtype_than_the_arrays(name):
    """Elements read unordered as 16 bits cannot be written as 32 bits, whose order differs."""
    kernel = fuse.kernel(KERNELS[name])
    arrays = np.array([2], np.float32), normal(5, 2048), normal(5, 2048)[::-1].copy()
    actual = kernel.run(*arrays)
    assert all(y.dtype == np.float32 for y in (actual if isinstance(actual, tuple) else (actual,)))
    compare(kernel, arrays, actual)


def test_one_number_a_row():
    """One number per row is read beside folded rows."""
    kernel = fuse.kernel(lambda x: (x - fuse.mean(x), fuse.cast(fuse.mean(x), fp32)))
    x = normal(5, 2048)
    assert "PART" in kernel.source(x) and kernel.proof(x).holds
    compare(kernel, (x,), kernel.run(x))


def test_behind_a_product():
    """A cast after a product is a kernel of its own: products are stored in their operands' dtype."""
    kernel = fuse.kernel(lambda x, w: fuse.cast(x @ w, fp32))
    x, w = normal(5, 40), normal(40, 24)
    assert kernel.source(x, w).count("@cuda.jit") == 2
    compare(kernel, (x, w), kernel.run(x, w))


def test_torch():
    torch = pytest.importorskip("torch")
    x = torch.tensor([[-1000.0, 0.3, 500.0, 17.0]])
    assert fuse.cast(x, fp8e4m3).float().tolist() == [[-448.0, 0.3125, 448.0, 16.0]]
    assert fuse.cast(x, fp16).dtype == torch.float16


def test_what_is_refused():
    with pytest.raises(TypeError, match="cast: dtype must be one of fp32, bf16, fp16, fp8e4m3, int8 of tiles"):
        fuse.kernel(lambda x: fuse.cast(x, fp8e5m2)).run(normal(4, 8))
    with pytest.raises(TypeError, match="x: dtype must be one of"):
        fuse.kernel(lambda x: x + 1.0).run(normal(4, 8, dtype=fp8e4m3))


def test_cards_without_fp8():
    names = {case.name for case in inspect.cases(arch="sm_80")}
    assert "residual_rms_norm" in names and "residual_rms_norm_quantise" not in names


def test_offline():
    said, bad = inspect.report_case("sm_90a", inspect.Case("residual_rms_norm_quantise", 4096))
    assert not bad, said
