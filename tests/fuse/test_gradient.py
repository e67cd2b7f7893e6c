"""Gradients by kernels: the chain rule against finite differences, the kernels against float64, their text and proof."""

import re

import numpy as np
import pytest

import fuse
import fuse.operators as operators
from fuse import inspect
from fuse.algebra.derivative import GRADIENT_RULES, NoRule
from fuse.language import graph, term_operations, terms
from fuse.language.evaluate import NumPyArithmetic, evaluate
from fuse.language.trace import Shape, trace_definition
from fuse.planning.candidates import candidates
from fuse.planning.cost import card, card_of
from fuse.planning.generated_module import generate_module
from fuse.planning.proof import identity
from fuse.writing import module_text
from tiles import bf16, fp16, fp32
from tiles.testing import assert_close

# ---- the chain rule --------------------------------------------------------------------------------------------------
MATRIX, VECTOR, ROW = (5, 6), (6,), (5, 1)
DEFINITIONS = {  # definitions of x, of another matrix or vector, and what they are of
    "sums": (lambda x, y: x / (1.0 + fuse.sum(x * y)) - fuse.mean(y) * x, MATRIX, MATRIX),
    "differences": (lambda x, y: (x - y) * (y - 2.0 * x) + (-x) * 3.0, MATRIX, VECTOR),
    "roots": (lambda x, y: fuse.sqrt(2.0 + x * x) * fuse.rsqrt(fuse.mean(x * x) + 0.1) * y, MATRIX, VECTOR),
    "exponentials": (lambda x, y: fuse.exp(x) * fuse.exp2(y) + fuse.log(3.0 + x * x), MATRIX, VECTOR),
    "gates": (lambda x, y: fuse.silu(x) * fuse.sigmoid(y) + fuse.gelu(x) * fuse.tanh(y), MATRIX, MATRIX),
    "kinks": (lambda x, y: fuse.relu(x) + abs(y) * fuse.maximum(x, y) - fuse.minimum(x, 0.1), MATRIX, MATRIX),
    "where": (lambda x, y: fuse.where(x > y, x * y, x * x), MATRIX, VECTOR),
    "softmax": (lambda x, y: fuse.softmax(x * y), MATRIX, VECTOR),
    "log of a sum": (lambda x, y: fuse.log(fuse.sum(fuse.exp(x - fuse.max(x)))) + fuse.max(x) + y, MATRIX, ROW),
    "maxima": (lambda x, y: x * fuse.max(x * y), MATRIX, VECTOR),
    "layer norm": (lambda x, y: (x - fuse.mean(x)) * fuse.rsqrt(fuse.var(x) + 1e-3) * y, MATRIX, VECTOR),
    "a column": (lambda x, y: x * y + x / (2.0 + y * y), MATRIX, ROW),
    "products": (lambda x, y: fuse.silu(x @ y) * (x @ y * 0.5), MATRIX, (6, 4)),
    "transposes": (lambda x, y: (y.T @ x.T).T @ (x @ x.T), MATRIX, (6, 5)),
    "halves": (lambda x, y: fuse.concatenate([fuse.halves(x)[0] * y, fuse.halves(x)[1] - fuse.halves(x)[0]]), MATRIX, (3,)),
    "one half": (lambda x, y: fuse.exp(fuse.halves(x * y)[1]), MATRIX, VECTOR),
    "heads": (lambda x, y: fuse.merge_heads(fuse.split_heads(x, 2) * 2.0) * y, MATRIX, VECTOR),
    "a batch": (lambda x, y: fuse.tanh(x @ y), (2, 3, 4), (4, 2)),
    "a number of rows": (lambda x, y: (x * y) @ x.T, MATRIX, (1, 1)),
}


def values(gradient, arrays):
    """The values of terms in float64."""
    whole = gradient._trace_all(gradient._shapes(gradient._arguments(arrays)))
    return evaluate(whole.roots, dict(zip(gradient.names, arrays)), NumPyArithmetic(np.float64))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_finite_differences(name):
    definition, *shapes = DEFINITIONS[name]
    function, rng = fuse.kernel(definition), np.random.default_rng(len(name))
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)

    def value(*arrays):
        return evaluate(function.trace((x, y)).roots, dict(zip("xy", arrays)), NumPyArithmetic(np.float64))[0]

    wide = [np.asarray(a, np.float64) for a in (x, y)]
    by = rng.standard_normal(value(*wide).shape).astype(np.float32)
    for place, outputs in enumerate(values(function.gradient, (x, y, by))):
        direction = rng.standard_normal(wide[place].shape)
        ahead, back = ([a if n != place else a + step * direction for n, a in enumerate(wide)] for step in (1e-6, -1e-6))
        slope = ((value(*ahead) - value(*back)) * by).sum() / 2e-6
        assert abs((outputs.reshape(direction.shape) * direction).sum() - slope) <= 1e-6 * max(1, abs(slope))


ROWS = np.zeros((4, 8), np.float32), np.zeros((4, 8), np.float32)
MORE = {  # definitions for the operations that DEFINITIONS lacks
    "casts": (lambda x, y: fuse.cast(fuse.cast(x * y, bf16) * x, fp16) * fuse.cast(y, fp32), *ROWS),
    "dropout": (lambda x, seed: fuse.dropout(x * x, 0.5, seed), ROWS[0], np.array([3])),
    "pick": (lambda x, index: x * fuse.pick(x, index), ROWS[0], np.zeros(4, np.int64)),
}
NO_GRADIENT = "less", "less_equal", "greater", "greater_equal"


def _functions():
    """(function, arrays, gradients with respect to its results) of all definitions."""
    for definition, *shapes in DEFINITIONS.values():
        yield fuse.kernel(definition), [np.zeros(shape, np.float32) for shape in shapes]
    for definition, *arrays in MORE.values():
        yield fuse.kernel(definition), arrays


def test_each_rule_of_the_chain_rule_has_to_be_right(monkeypatch):
    """Finite differences agree with all gradients, and detect a GRADIENT_RULES row that is 0.1 % too large for one operand."""
    visited = set()
    for function, arrays in _functions():
        roots = function.trace(arrays).roots
        by = [np.zeros(x.extents, np.float32) for x in roots]
        operations = {x.operation for x in graph.walk(*roots) if x.args} - visited - {*NO_GRADIENT, "is_column"}
        assert function.gradient.differences(*arrays, *by).passed
        for operation in operations:
            right = GRADIENT_RULES[operation]

            def wrong(g, y, *of, right=right):
                parts = [*right(g, y, *of)]
                place = next(n for n, part in enumerate(parts) if part is not None and of[n].operation != "number")
                parts[place] = parts[place].scale(1.001)
                return parts

            with monkeypatch.context() as patch:
                patch.setitem(GRADIENT_RULES, operation, wrong)
                known = fuse.kernel(function.definition).gradient.differences(*arrays, *by)
            if not known.passed:  # what shifts a softmax alone is not asked for
                assert "is NOT the gradient" in str(known)
                visited.add(operation)
    assert visited == {*GRADIENT_RULES} - {*NO_GRADIENT}


def test_a_sum_is_not_dropped_for_being_0_in_one_field():
    """m a - m (a 2^-61) is 0 modulo 2^61 - 1, and the maximum still has a gradient."""
    x, a = np.array([[1.0, 2.0, 0.5, 3.0]], np.float32), np.full((1, 4), 2.0, np.float32)
    kernel = fuse.kernel(lambda x, a: fuse.max(x) * a - fuse.max(x) * (a * 2.0**-61))
    dx, _ = values(kernel.gradient, (x, a, np.ones((1, 4), np.float32)))
    assert np.allclose(dx, [[0, 0, 0, 8]])


def test_a_norm_comes_back_as_one_writes_it():
    """No sum depends on another without need; the sum of x - mean(x) is dropped; softmax's maximum has no gradient."""
    function = fuse.kernel(lambda x, g: (x - fuse.mean(x)) * fuse.rsqrt(fuse.var(x) + 1e-5) * g)
    arrays: tuple = tuple(np.zeros(s, bf16.np) for s in ((4, 8), 8, (4, 8)))
    arrays = function.gradient._arguments(arrays)
    (dx, _) = function.gradient._trace_all(function.gradient._shapes(arrays)).roots
    text = repr(dx)
    assert len(set(re.findall(r"sum\(dy \* g\)|sum\(dy \* g \* \(x - sum\(x\) / 8\)\)", text))) == 2
    (of_softmax,) = fuse.kernel(lambda x: fuse.softmax(x)).gradient._trace(function._shapes(arrays[:1]) * 2).roots
    assert "where" not in repr(of_softmax)


def test_results_with_names():
    """A dictionary of results has the gradient of their tuple."""
    x, dy, dm = (np.random.default_rng(n).standard_normal(s, np.float32) for n, s in enumerate([(4, 8), (4, 8), (4, 1)]))
    named = fuse.kernel(lambda x: {"centred": x - fuse.mean(x), "mean": fuse.mean(x)})
    plain = fuse.kernel(lambda x: (x - fuse.mean(x), fuse.mean(x)))
    assert np.allclose(named.gradient(x, dy, dm), plain.gradient(x, dy, dm)) and isinstance(named(x), tuple)


def test_what_has_no_rule():
    x = np.ones((3, 8), np.float32)
    with pytest.raises(NoRule, match="concatenate: has a gradient only for two equal halves"):
        fuse.kernel(lambda x: fuse.concatenate([x, x, x])).gradient(x, np.ones((3, 24), np.float32))
    with pytest.raises(NoRule, match="w: no result depends on it"):
        fuse.kernel(lambda x, w: x + 1.0).gradient(x, x, x)
    with pytest.raises(ValueError, match=r"dy: must have the shape of the result, \(3, 8\), has \(3, 4\)"):
        fuse.kernel(lambda x: x * x).gradient(x, x[:, :4])
    with pytest.raises(TypeError, match="the gradient by each of its results"):
        fuse.kernel(lambda x: x * x).gradient(x)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        fuse.kernel(lambda x: x * x).gradient.gradient(x)
    assert "fp8e4m3" not in GRADIENT_RULES  # what rounds so much has no slope
    product = fuse.kernel(lambda x, w: x @ w).gradients.choose(("w",), (0,), 1)
    assert (product(x, x.T, np.ones((3, 3), np.float32))[0] == x.T.sum(1, keepdims=True) * 0 + 3).all()
    assert "There is no kernel" in product.explain(x, x.T, np.ones((3, 3), np.float32))


# ---- kernels ---------------------------------------------------------------------------------------------------------
K, N = 72, 40
SHAPES = {  # of the arguments and of the gradients by the results, but for rows, "m"; and how many kernels there are
    "residual_rms_norm": ([("m", K), ("m", K), (K,), ("m", K), ("m", K)], 1),
    "residual_layer_norm": ([("m", K), ("m", K), (K,), (K,), ("m", K), ("m", K)], 1),
    "normalised_step": ([("m", K), ("m", K), (K,), ("m", K)], 1),
    "rms_norm_linear": ([("m", K), (K,), (K, N), ("m", N)], 2),
    "gated_mlp": ([("m", K), (K, N), (K, N), ("m", N)], 3),
    "rotary": ([("m", K), ("m", K // 2), ("m", K // 2), ("m", K)], 3),
    "softmax": ([("m", K), ("m", K)], 1),
}
EXTRA = {"softmax": fuse.kernel(lambda x: fuse.softmax(x))}


def sample(name, rows):
    """The gradient of an operator, and its arguments."""
    rng = np.random.default_rng(rows)
    function = EXTRA[name] if name in EXTRA else getattr(operators, name)
    shapes = [tuple(rows if n == "m" else n for n in shape) for shape in SHAPES[name][0]]
    return function.gradient, [(rng.standard_normal(s) / s[0] ** 0.25).astype(bf16.np) for s in shapes]


def compare(gradient, arrays, outputs):
    """The error rule with three times the definition's error in the arrays' dtype."""
    inputs = gradient._arguments(arrays)
    whole = gradient._trace_all(gradient._shapes(inputs))
    named = {name: x.T if s.transposed else x for name, x, s in zip(gradient.names, inputs, gradient._shapes(inputs))}
    ref = evaluate(whole.roots, {name: np.asarray(x, np.float64) for name, x in named.items()}, NumPyArithmetic(np.float64))
    low = evaluate(whole.roots, named, NumPyArithmetic(bf16.np))
    for x, r, d in zip(outputs, ref, low, strict=True):
        x = x.T if x.ndim == r.ndim == 2 and x.shape != r.shape and x.T.shape == r.shape else x
        assert_close(x.reshape(r.shape), r, d, factor=3)


@pytest.mark.parametrize(("name", "rows"), [("residual_rms_norm", 1), ("rotary", 1), ("softmax", 70)])
def test_against_float64(name, rows):
    gradient, arrays = sample(name, rows)
    compare(gradient, arrays, gradient.run(*arrays))
    compare(gradient, arrays, gradient(*arrays))


@pytest.mark.parametrize("name", SHAPES)
def test_text_and_proof(name):
    """A gradient's kernels are few and short, and the proof holds."""
    gradient, arrays = sample(name, 19)
    text, proof = gradient.source(*arrays), gradient.proof(*arrays)
    lines, kernels = text.splitlines(), text.count("@cuda.jit")
    assert proof.holds, proof
    assert kernels <= SHAPES[name][1] and len(lines) <= 80 * kernels and max(map(len, lines)) <= module_text.WIDTH
    assert "dx" in text and ("From these the framework computes" in gradient.explain(*arrays)) == (
        name not in ("softmax", "rotary")
    )


@pytest.mark.parametrize("columns", [72, 2056])
def test_cross_entropy(columns):
    """Forward and backward are one kernel each, with ignored targets."""

    @fuse.kernel
    def cross_entropy(x, target):
        greatest = fuse.max(x)
        return fuse.log(fuse.sum(fuse.exp(x - greatest))) + greatest - fuse.pick(x, target)

    x = np.random.default_rng(0).standard_normal((5, columns)).astype(bf16.np)
    target, dy = np.array([3, -1, 0, columns - 1, 70]), np.linspace(1, 2, 5).astype(bf16.np)[:, None]
    wide = x.astype(float)
    e = np.exp(wide - wide.max(-1, keepdims=True))
    total = e.sum(-1, keepdims=True)
    picked = np.where(target[:, None] >= 0, np.take_along_axis(wide, target[:, None] % columns, -1), 0)
    assert cross_entropy.source(x, target).count("@cuda.jit") == 1
    want = np.log(total) + wide.max(-1, keepdims=True) - picked
    assert np.abs(cross_entropy.run(x, target).astype(float) - want).max() <= 2**-7 * want.max()
    assert cross_entropy.gradient.source(x, target, dy).count("@cuda.jit") == 1
    want = (e / total - (np.arange(columns) == target[:, None])) * dy.astype(float)
    (dx,) = cross_entropy.gradient.run(x, target, dy)
    assert np.abs(dx.astype(float) - want).max() <= 2**-8 * np.abs(want).max()
    if columns == 72:
        assert cross_entropy.proof(x, target).holds and cross_entropy.gradient.proof(x, target, dy).holds


def test_cross_entropy_of_a_product():
    """The scores, their gradient and that of x are three kernels."""
    rng, rows = np.random.default_rng(0), 5
    x, w = (rng.standard_normal(s).astype(bf16.np) for s in ((rows, K), (K, N)))
    inputs = x, w, np.array([3, -1, 0, N - 1, 7]), np.ones((rows, 1), np.float32)
    gradient = operators.linear_cross_entropy.gradients.choose(("x", "w"), (0,), 2)
    assert gradient.source(*inputs).count("@cuda.jit") == 3
    compare(gradient, inputs, gradient.run(*inputs))


def test_leading_axes_and_weights_as_torch_has_them():
    gradient, (x, g, w, dy) = sample("rms_norm_linear", 12)
    w = np.asfortranarray(w)
    dx, dg, dw = gradient.run(x.reshape(3, 4, K), g, w, dy.reshape(3, 4, N))
    assert dx.shape == (3, 4, K) and dw.strides == w.strides  # as the weights lie
    compare(gradient, (x, g, w, dy), (dx.reshape(12, K), dg, dw))


def test_of_wide_rows():
    """Rows of many tiles have one block each, and no tile is read twice."""
    function = fuse.kernel(lambda x, r: ((x + r) * fuse.rsqrt(fuse.mean((x + r) * (x + r)) + 1e-5), x + r))
    gradient, arrays = function.gradient, [np.full((3, 1056), n, bf16.np) for n in (1, 1, 1, 2)]
    assert "one row per block" in gradient.explain(*arrays)
    compare(gradient, arrays, gradient.run(*arrays))


def rows_and_vectors(kinds, rows, columns):
    """An array for each letter: x of rows and columns, g along the columns."""
    rng = np.random.default_rng(rows)
    return [rng.standard_normal((rows, columns) if kind == "x" else columns).astype(bf16.np) for kind in kinds]


@pytest.mark.parametrize(
    ("name", "kinds", "rows", "columns"),
    [
        ("residual_layer_norm", "xxggxx", 37, 512),
        ("normalised_step", "xxgx", 3, 512),
        ("residual_layer_norm", "xxggxx", 5, 736),
    ],
)
def test_sums_over_rows(name, kinds, rows, columns):
    """Sums over rows are accumulated in registers or shared memory while rows are read, if rows fill their tiles; the summands
    are not stored."""
    gradient, arrays = getattr(operators, name).gradient, rows_and_vectors(kinds, rows, columns)
    text, explanation = gradient.source(*arrays), gradient.explain(*arrays)
    assert text.count("@cuda.jit") == 2 and len(text.splitlines()) <= 2 * 80 and "for_d" not in text
    assert "The framework" not in explanation and "accumulates their sums over rows" in explanation
    compare(gradient, arrays, gradient.run(*arrays))
    assert gradient.proof(*arrays).holds


def test_no_rows_to_sum():
    gradient, arrays = operators.residual_rms_norm.gradient, rows_and_vectors("xxgxx", 0, 512)
    dx, dresidual, dg = gradient.run(*arrays)
    assert dx.shape == dresidual.shape == (0, 512) and dg.shape == (512,) and not dg.any()


def test_sums_of_some_rows_add_up():
    """Partial sums add up to the total, for any number of them."""
    actual = trace_definition(lambda x: x, ("x",), (Shape((5, 6), "bfloat16"),))
    (x,) = actual.roots
    terms.TABLES.append(actual.table)
    try:
        whole = term_operations.total_along(x, (-2,))
        parts = [term_operations.total_along(term_operations.partial_sums(x, n), (-2,)) for n in (1, 3, 7)]
    finally:
        terms.TABLES.pop()
    assert all(identity([whole], [one]).equal for one in parts)
    assert not identity([whole], [term_operations.total_along(x, (-1,))]).equal


def test_lengths_of_other_axes():
    """An epilogue reads the length of rows other than the product's."""
    rng = np.random.default_rng(0)
    function = fuse.kernel(lambda a, b, q: (a @ b) * fuse.rsqrt(fuse.mean(q * q)))
    a, b, q = (rng.standard_normal(s).astype(bf16.np) for s in ((8, 40), (40, 16), (8, 24)))
    want = (a.astype(float) @ b.astype(float)) / np.sqrt((q.astype(float) ** 2).mean(-1, keepdims=True))
    assert np.abs(function.run(a, b, q).astype(float) - want).max() <= 2**-6 * np.abs(want).max()
    assert "gQ.shape" not in function.source(a, b, q) and "width_of_q" in function.source(
        np.tile(a, (9, 1)), b, np.tile(q, (9, 1))
    )


OF_AMPERE = pytest.param("normalised_step", "sm_80", marks=pytest.mark.release)


@pytest.mark.parametrize(("name", "arch"), [("residual_layer_norm", "sm_90a"), OF_AMPERE])
def test_no_spills(name, arch):
    """No spills and no atomic adds: sums over rows have the same bits each time."""
    actual = inspect.compile_case(inspect.Case(name, 4096, gradient=True), arch)
    assert not any(map(inspect.is_bad, actual))
    assert not {"RED", "REDG", "ATOM", "ATOMG"} & {name for one in actual for name in one.instructions}


def test_kernels_are_found_for_all_shapes():
    """The inspected shapes have kernels on cards with wgmma and without; the gradients of a gated MLP's products are stored
    together."""
    for case in (one for one in inspect.cases() if one.gradient and one.rows > 64):
        for arch in ("sm_90a", "sm_80"):
            assert candidates(case.operator._trace(inspect.shapes(case)), card_of(arch)), (arch, case)
    case = inspect.Case("gated_mlp", 4096, gradient=True)
    actual = case.operator._trace(inspect.shapes(case))
    text = generate_module("gradient", actual, candidates(actual, card(None))[0]).text
    assert text.count("@cuda.jit") == 2 and "send(gFor_dgate" in text and "send(gFor_dup" in text


def test_arrays_of_several_dtypes():
    """A float32 argument gets its gradient in float32."""
    gradient = operators.residual_rms_norm.gradient
    x = np.ones((3, 8), bf16.np)
    dx, dr, dg = gradient(x, x, np.ones(8, fp32.np), x, x)
    assert (dx.dtype, dr.dtype, dg.dtype) == (bf16.np, bf16.np, fp32.np)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 19, 300])
@pytest.mark.parametrize("name", SHAPES)
def test_on_the_card(name, rows):
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    gradient, arrays = sample(name, rows)
    outputs = gradient(*map(to_torch, arrays))
    torch.cuda.synchronize()
    compare(gradient, arrays, [to_numpy(x) for x in outputs])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize(("name", "kinds"), [("residual_layer_norm", "xxggxx"), ("normalised_step", "xxgx")])
def test_sums_over_rows_on_the_card(name, kinds, rows):
    """The sums have the same bits each time."""
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    gradient, arrays = getattr(operators, name).gradient, rows_and_vectors(kinds, rows, 1536)
    inputs = list(map(to_torch, arrays))
    outputs, again = gradient(*inputs), gradient(*inputs)
    torch.cuda.synchronize()
    compare(gradient, arrays, [to_numpy(x) for x in outputs])
    assert all(torch.equal(x, y) for x, y in zip(outputs, again))
