"""Row maps: the traced terms, the text, and the results."""

import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from references import compare

import fuse
from fuse.writing import module_text
from tiles import bf16, fp16, fp32


@fuse.kernel
def rms_norm(x, g):
    return x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g


@fuse.kernel
def layer_norm(x, residual, g, b):
    h = x + residual
    centred = h - fuse.mean(h)
    return centred * fuse.rsqrt(fuse.mean(centred * centred) + 1e-5) * g + b, h


@fuse.kernel
def softmax(x):
    return fuse.softmax(x)


@fuse.kernel
def statistics(x):
    return fuse.max(x), fuse.mean(x)


@fuse.kernel
def gate(x, y, alpha):
    return fuse.where(x > 0, fuse.silu(x) * y, alpha * abs(y)) - fuse.minimum(x, 1.0)


KERNELS = {rms_norm: "xg", layer_norm: "xxgg", softmax: "x", statistics: "x", gate: "xxn"}


def sample(rng, kind, rows, columns, dtype):
    """An argument: x a matrix, g a vector along its columns, n a number."""
    shape = {"x": (rows, columns), "g": (columns,), "n": ()}[kind]
    actual = rng.standard_normal(shape).astype(np.float32)
    return actual.astype(dtype.np) if shape else float(actual)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"), [(1, 8, bf16), (17, 130, fp16), (3, 2050, bf16), (16, 128, fp32), (3, 1536, bf16)]
)
def test_against_float64(kernel, rows, columns, dtype):
    rng = np.random.default_rng(rows)
    arrays = [sample(rng, kind, rows, columns, dtype) for kind in KERNELS[kernel]]
    compare(kernel, arrays, kernel.run(*arrays))


def test_a_long_softmax_begins_with_nothing():
    """Its maximum and its sum, in one pass, are right for tiles of -inf."""
    x = np.zeros((3, 4100), bf16.np)
    x[0, :4000], x[1, 200:], x[2, 7] = -np.inf, -np.inf, 9
    assert softmax.source(x).count("for col in") == 2
    compare(softmax, [x], softmax.run(x))


def test_leading_axes_are_rows():
    rng = np.random.default_rng(0)
    x, g = sample(rng, "x", 12, 40, bf16).reshape(2, 6, 40), sample(rng, "g", 0, 40, bf16)
    assert (rms_norm.run(x, g) == rms_norm.run(x.reshape(12, 40), g).reshape(2, 6, 40)).all()
    assert rms_norm(x, g).shape == (2, 6, 40)


def test_results_go_where_they_are_wanted():
    x = np.ones((4, 24), np.float32)
    y = np.full_like(x, np.nan)
    assert softmax.run(x, out=y) is y and np.allclose(y, 1 / 24)


@pytest.mark.parametrize("columns", [100, 3000])
def test_the_text_is_the_kernel(columns):
    """The module is short, has no long line, and gives the same bits as the call."""
    rng = np.random.default_rng(1)
    arrays = [sample(rng, kind, 5, columns, bf16) for kind in "xxgg"]
    text = layer_norm.source(*arrays)
    assert len(text.splitlines()) <= 80 and max(map(len, text.splitlines())) <= module_text.WIDTH
    space: dict = {}
    exec(text, space)
    results = np.empty_like(arrays[0]), np.empty_like(arrays[0])
    space["launch"](*arrays, *results)
    for mine, its in zip(results, layer_norm.run(*arrays)):
        assert (mine == its).all()


LINES = [(512, "right"), (544, "right"), (768, "lower"), (1024, ""), (1040, "right"), (1536, ""), (2880, "lower"), (4096, "")]


@pytest.mark.parametrize(("columns", "filled"), LINES)
def test_rows_of_whole_lines(columns, filled):
    """Columns may be read in any order; past a row's end lines are masked if tiles are not as wide as rows. A module without a
    mask refuses other widths."""
    rng = np.random.default_rng(0)
    arrays = [sample(rng, kind, 5, columns, bf16) for kind in "xxgg"]
    text = layer_norm.source(*arrays)
    fills = [side for side in ("lower", "right") if f"{side}_fill(" in text]
    assert "".join(fills) == filled and ("load_unordered(" in text) == (filled != "right")
    compare(layer_norm, arrays, layer_norm.run(*arrays))
    assert layer_norm.proof(*arrays).holds
    if not filled:
        space: dict = {}
        exec(text, space)
        others = [sample(rng, kind, 5, columns // 2, bf16) for kind in "xxggxx"]
        with pytest.raises(ValueError, match="reshape"):
            space["launch"](*others)


def test_names_are_those_of_the_definition():
    """The kernel's variables have the definition's names."""
    text = layer_norm.source(*[np.zeros(s, bf16.np) for s in ((5, 100), (5, 100), 100, 100)])
    assert "centred = h - total / width" in text and text.startswith('"""h = x + residual\ncentred = h - mean(h)\n')


@pytest.mark.parametrize(
    ("definition", "description"),
    [
        (lambda x: np.sin(x), "in line .*np.sin.*; it is written with operators and fuse's abs"),
        (lambda x: x**1.5, "the powers 2 to 8, got 1.5; .*; in line .*x\\*\\*1.5"),
        (lambda x: fuse.where((x > 0) & (x < 1), x, 0.0), r"& of two comparisons is where\(a, where\(b, x, y\), y\)"),
        (lambda x: fuse.where((x > 0) | (x < 1), x, 0.0), r"\| of two comparisons is where\(a, x, where\(b, x, y\)\)"),
        (lambda x: fuse.where(~(x > 0), x, 0.0), r"~ of a comparison is where\(a, y, x\)"),
        (lambda x: x.cumsum(0), "'cumsum'; in line .*x.cumsum"),
        (lambda x: x if x else -x, "use fuse.where; in line"),
        (lambda x: x[0], "not indexed.*; in line"),
    ],
)
def test_what_the_language_has_not(definition, description):
    """A TypeError with the line of the definition."""
    with pytest.raises(TypeError, match=description):
        fuse.kernel(definition)(np.ones((3, 4), np.float32))


# ---- random terms ----------------------------------------------------------------------------------------------------
EXAMPLES = int(os.environ.get("FUSE_EXAMPLES", 15))
PROFILE = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
UNARY = ["exp", "tanh", "sigmoid", "silu", "relu", "abs"]
BINARY = ["add", "sub", "mul", "maximum", "minimum"]


@st.composite
def definitions(draw):
    """A random function of x (rows, columns) and g (columns,), of maps and reductions that neither overflow nor cancel much."""
    step = st.tuples(st.sampled_from(["unary", "binary", "reduce"]), st.integers(0, 99), st.integers(0, 99))
    steps = draw(st.lists(step, max_size=6))

    def definition(x, g):
        known = [x, x * g]
        for kind, a, b in steps:
            one, other = known[a % len(known)], known[b % len(known)]
            if kind == "unary":
                result = getattr(fuse, UNARY[a % len(UNARY)])(fuse.minimum(one, 2.0))
            elif kind == "binary":
                name = BINARY[b % len(BINARY)]
                result = {"add": lambda p, q: p + q, "sub": lambda p, q: p - q, "mul": lambda p, q: p * q}.get(name)
                result = (result or getattr(fuse, name))(one, other)
                result = fuse.minimum(fuse.maximum(result, -4.0), 4.0)
            else:
                result = one - (fuse.max(one) if b % 2 else fuse.mean(one))
            known.append(result)
        return known[-1] + known[-2] * 0.5

    return definition


@PROFILE
@given(definitions(), st.integers(1, 20), st.sampled_from([7, 64, 150]))
def test_random_terms(definition, rows, columns):
    rng = np.random.default_rng(rows)
    kernel = fuse.kernel(definition)
    arrays = [sample(rng, kind, rows, columns, fp32) for kind in "xg"]
    compare(kernel, arrays, kernel.run(*arrays))
    assert kernel.proof(*arrays).holds


def test_numbers_without_digits():
    """In a kernel infinity and NaN are math.inf and math.nan."""
    x = np.random.default_rng(0).standard_normal((5, 40)).astype(bf16.np)
    outputs = fuse.kernel(lambda x: fuse.where(x > 0, x, -math.inf)).run(x)
    assert (outputs == np.where(x > 0, x, -np.inf).astype(x.dtype)).all()


@pytest.mark.parametrize("power", [2, 3.0, 4, 8, 0.5, -0.5])
def test_powers(power):
    """Powers are products and roots, which have derivatives."""
    raised = fuse.kernel(lambda x: x**power)
    x = np.random.default_rng(0).uniform(0.5, 1.5, (3, 48)).astype(np.float32)
    for actual in (raised(x), raised.run(x)):
        assert np.allclose(actual, x.astype(float) ** power, rtol=1e-5)
    (dx,) = raised.gradient(x, np.ones_like(x))
    assert np.allclose(dx, power * x.astype(float) ** (power - 1), rtol=1e-4) and raised.proof(x).holds


def test_proof_of_what_takes_no_negative_numbers():
    """Absolute values are taken; if the definition gives NaN for these as well, nothing is proven."""
    x = np.ones((3, 48), bf16.np)
    for definition in (lambda x: fuse.log(x) * 2.0, lambda x: fuse.sqrt(x) + fuse.mean(x)):
        assert fuse.kernel(definition).proof(x).holds
    never = fuse.kernel(lambda x: fuse.sqrt(-1.0 - x * x)).proof(x)
    assert not never.holds and "the definition gives NaN" in str(never)
