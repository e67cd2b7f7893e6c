"""Definitions that cannot be traced, and arrays that are refused: the errors name the argument and the remedy."""

import math
import warnings

import ml_dtypes
import numpy as np
import pytest

import fuse
from tiles import int8

F16, BF16 = np.float16, ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("definition", "error", "words"),
    [
        (lambda x: np.tanh(x), TypeError, "it is written with operators and fuse's abs, .*tanh"),
        (lambda x: math.exp(x), TypeError, "not Term; it is written with operators and fuse's abs, "),
        (lambda x: x // 2, TypeError, "for //: .*; it is written with operators"),
        (lambda x: x.sum(-1), TypeError, "'Term' object has no attribute 'sum'; use fuse.sum"),
        (lambda x: fuse.sum(x, 0), TypeError, r"sum: reduces the last axis, got axis=0 .*: sum\(transpose\(x\)\)"),
        (lambda x: fuse.mean(x, axis=0), TypeError, r"mean: reduces the last axis, got axis=0 .*: mean\(transpose\(x\)\)"),
        (lambda x: fuse.var(x, axis=0), TypeError, "var: reduces the last axis, got axis=0"),
        (lambda x: fuse.softmax(x, axis=0), TypeError, "softmax: reduces the last axis, got axis=0"),
        (lambda x: x.float(), TypeError, "no attribute 'float'; use fuse.cast"),
        (lambda x: x.astype(np.float32), TypeError, "no attribute 'astype'; use fuse.cast"),
        (lambda x: x.reshape(-1), TypeError, "no attribute 'reshape'; it is written"),
        (lambda x: fuse.sin(x), TypeError, "no attribute 'sin'; a fused function is written with operators and abs"),
        (lambda x: nothing, NameError, "name 'nothing' is not defined"),  # noqa: F821
    ],
)
def test_what_is_not_in_the_language(definition, error, words):
    with pytest.raises(error, match=words):
        fuse.kernel(definition)(np.ones((2, 16), BF16))


@fuse.kernel
def product(x, w):
    """x (M, K), w (K, N)."""
    return x @ w


def test_arrays_that_do_not_fit():
    x, w = np.ones((4, 64), BF16), np.ones((64, 32), BF16)
    with pytest.raises(TypeError, match="x: dtype must be one of .*: x.dtype='int64'"):
        product(x.astype(int), w)
    with pytest.raises(ValueError, match=r"out: must have the result's shape: out.shape=\(4, 31\), \(4, 32\)"):
        product(x, w, out=np.ones((4, 31), BF16))
    with pytest.raises(ValueError, match=r"out: must have the result's shape: out.shape=\(4, 31\), \(4, 32\)"):
        product.run(x, w, out=np.ones((4, 31), BF16))
    with pytest.raises(TypeError, match=r"no template computes matmul of float32 \(4, 64\), float32 \(64, 32\).*convert what"):
        product.source(x.astype(np.float32), w.astype(np.float32))
    with pytest.warns(
        RuntimeWarning,
        match="must have one dtype, got x.dtype='float16', w.dtype='bfloat16': cast one of them; it runs by parts",
    ):
        actual = product.run(x.astype(F16), w)
    assert actual.dtype == F16 and (actual == 64).all()
    with pytest.warns(RuntimeWarning, match="w: .* float16, got bfloat16; it runs by parts"):
        actual = fuse.kernel(lambda x, w: (x * 2.0) @ w).run(x.astype(F16), w)
    assert actual.dtype == F16 and (actual == 128).all()


def test_what_is_no_function_or_shape():
    with pytest.raises(TypeError, match="fuse.kernel: must be given a Python function of arrays: 'x'"):
        fuse.kernel("x")
    for wrong in (lambda x, *, scale=1.0: x * scale, lambda *scale: scale[0], lambda x, **scale: x):
        with pytest.raises(TypeError, match=r"must have positional parameters only, no \* or \*\*, got \**scale"):
            fuse.kernel(wrong)
    with pytest.raises(TypeError, match="product: missing a required argument: 'w'"):
        product.compile((4, 64))
    with pytest.raises(TypeError, match="product: shapes must be tuples of integers, .* got '4x64'"):
        product.compile("4x64", (64, 32))


def test_what_is_said_of_an_array_has_its_own_name():
    """An error has the name of the argument, not of the generated kernel's parameter."""
    x, w = np.ones((300, 136), BF16)[:, 1:129], np.ones((128, 64), BF16)
    with pytest.warns(RuntimeWarning, match="^scaled: x_in: the address must be a multiple of 16 bytes, .*; it runs by parts"):
        fuse.kernel(scaled).run(x, w)


def scaled(x_in, w):
    return (x_in * 2.0) @ w


def single_result(x, w):
    return x @ w


def in_a_tuple(x, w):
    return (x @ w,)


def in_a_dictionary(x, w):
    return {"y": x @ w}


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_kernels_and_parts_give_back_what_the_definition_does(dtype):
    """An array, a tuple of one, or the values of a dictionary; by kernels, and by parts where dtypes differ."""
    x, w = np.ones((4, 64), dtype), np.ones((64, 48), BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for definition in (single_result, in_a_tuple, in_a_dictionary):
            function = fuse.kernel(definition)
            for actual in (function(x, w), function.run(x, w)):
                assert isinstance(actual, tuple) == (definition is not single_result)
                (actual,) = actual if isinstance(actual, tuple) else (actual,)
                assert actual.shape == (4, 48) and (actual == 64).all()


def test_out_is_written_by_parts_too():
    """Where dtypes differ, and where TMA cannot address the arrays."""
    into = np.zeros((4, 32), F16)
    with pytest.warns(RuntimeWarning, match="it runs by parts"):
        assert product.run(np.ones((4, 64), F16), np.ones((64, 32), BF16), out=into) is into
    assert (into == 64).all()
    into = np.zeros((72, 56), BF16)[:, 1:49]
    with pytest.warns(RuntimeWarning, match="it runs by parts"):
        product.run(np.ones((72, 64), BF16), np.ones((64, 48), BF16), out=into)
    assert (into == 64).all()


def test_by_parts_there_is_no_other_stream():
    """Parts run on the framework's own stream, so `stream` is refused."""
    with pytest.raises(ValueError, match="^stream: must be None where a call runs by parts, .* must have one dtype"):
        product.run(np.ones((4, 64), F16), np.ones((64, 32), BF16), stream=0)


def test_out_with_leading_axes():
    x, w, into = np.ones((2, 3, 64), BF16), np.ones((64, 32), BF16), np.zeros((2, 5, 32), BF16)
    lying = np.zeros((2, 3, 40), BF16)[:, :, :32]  # as one, with something between rows
    product.run(x, w, out=lying)
    assert (lying == 64).all()
    with pytest.raises(ValueError, match=r"out: leading axes are rows and must be contiguous: .*\(2, 3, 32\)"):
        product.run(x, w, out=into[:, :3])
    with pytest.raises(ValueError, match=r"out: must have the result's leading axes, \(2, 3\): out.shape=\(6, 32\)"):
        product.run(x, w, out=np.zeros((6, 32), BF16))


def test_a_result_that_is_there_twice():
    """Two equal results run by parts; results that become equal by rewriting have another plan."""
    x, w = np.ones((4, 64), BF16), np.ones((64, 48), BF16)
    with pytest.warns(RuntimeWarning, match="two results are equal: x @ w, x @ w; it runs by parts"):
        actual = fuse.kernel(lambda x, w: (x @ w, x @ w)).run(x, w)
    assert all((y == 64).all() for y in actual)
    actual = fuse.kernel(lambda x, t, w: (x @ w + t @ w, (x + t) @ w)).run(x, x * BF16(2), w)
    assert all((y == 192).all() for y in actual)


def test_a_result_of_one_row_beside_others():
    """No kernel writes a result with one row for all, since each block has rows of its own."""
    x, g = np.ones((5, 64), BF16), np.ones((1, 64), BF16)
    with pytest.raises(TypeError, match=r"no template computes mul of \(1, 64\), \(\): g \* 2"):
        fuse.kernel(lambda x, g: (x + g, g * 2.0)).source(x, g)


@fuse.kernel
def pair(x):
    return fuse.relu(x), x * 2.0


@pytest.mark.parametrize("function", [pair, pair.run])
def test_out_of_several_results(function):
    x, into = np.ones((4, 64), BF16), np.zeros((4, 64), BF16)
    for out, count in ((into, 1), ((into,) * 3, 3)):
        with pytest.raises(TypeError, match=f"out: must be 2 arrays, one for each result of pair, got {count}"):
            function(x, out=out)
    gradient = pair.gradient if function is pair else pair.gradient.run
    with pytest.raises(TypeError, match="pair_gradient: out must be None"):
        gradient(x, x, x, out=into)
    y, z = function(x, out=(None, into))
    assert z is into and (z == 2).all() and (y == 1).all()


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_rows(shape):
    """Empty arrays give empty results without a warning."""
    x, w = np.ones(shape, BF16), np.ones((64, 48), BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for actual in (product(x, w), product.run(x, w)):
            assert actual.shape == (*shape[:-1], 48)


def test_numbers_of_other_sorts():
    """NumPy's scalars and booleans are numbers; an array without axes is refused."""
    scaled_by = fuse.kernel(lambda x, w, a: (x * a) @ w)
    x, w = np.ones((4, 64), BF16), np.ones((64, 32), BF16)
    for number, value in ((np.float32(2), 128), (np.float64(0.5), 32), (np.int64(3), 192), (True, 64)):
        for actual in (scaled_by(x, w, number), scaled_by.run(x, w, number)):
            assert (actual == value).all()
    for call in (scaled_by, scaled_by.run, scaled_by.explain):
        with pytest.raises(TypeError, match=r"^a: must be a number of Python's, .* of shape \(\): pass a.item\(\)"):
            call(x, w, np.array(2.0))


def test_what_runs_by_parts_has_the_first_arrays_dtype():
    """Also for NumPy arrays, whatever the reason; and it is rounded once."""
    gated, narrow = fuse.kernel(lambda x, w: fuse.silu(x @ w)), fuse.kernel(lambda x: fuse.transpose(x) * 2.0)
    x, w = (np.random.default_rng(n).standard_normal(shape).astype(BF16) for n, shape in enumerate([(4, 30), (30, 32)]))
    for function, arrays in ((gated, (x, w)), (narrow, (x,))):
        with pytest.warns(RuntimeWarning, match="it runs by parts"):
            actual = function.run(*arrays)
        assert actual.dtype == BF16 and (actual == function(*arrays)).all()
    assert gated.run(x[:0], w).dtype == BF16


def test_explain_says_what_runs_by_parts():
    """What no template computes, and what only these arrays' strides prevent."""
    x, w = np.ones((4, 64), BF16), np.ones((64, 32), BF16)
    assert product.explain(x, w).startswith("The definition is not rewritten.\nOne kernel")
    said = product.explain(x[:, :30], w[:30].copy())
    assert said.startswith("The definition is not rewritten"), said  # 30 columns of rows of 64: TMA addresses them
    said = product.explain(x[:, :30].copy(), w[:30].copy())
    assert said.startswith("A call with these arrays runs by parts") and "x: strides must be multiples of 16 bytes" in said
    assert "make an array with longer rows, and pass the slice" in said
    said = fuse.kernel(lambda x: fuse.transpose(x) * 2.0).explain(x)
    assert "no template computes transpose of (4, 64): x.T; a transpose is a right factor: pass a copy of it" in said
    assert "; products have one leading axis: join them" in product.explain(*[np.ones((2, 3, 64, 64), BF16)] * 2)
    said = fuse.kernel(lambda x, w: fuse.cast(x / fuse.max(x), int8) @ w).explain(x, np.ones((32, 64), np.int8).T)
    assert "matmul of (4, 64), (64, 32)" in said and "leave the cast to int8 out" in said
    said = fuse.kernel(lambda x, w: fuse.silu(fuse.split_heads(x @ w, 2))).explain(x, w)
    assert "split_heads(x @ w, 2); heads are a view: return what is split" in said


def test_arrays_of_several_frameworks():
    """NumPy's beside torch's on the host run in the interpreter."""
    torch = pytest.importorskip("torch")
    x, w = np.ones((4, 64), BF16), torch.ones(64, 32, dtype=torch.bfloat16)
    actual = product(x, w)
    assert isinstance(actual, np.ndarray) and (actual == 64).all()


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        (lambda x: fuse.sum(x, axis=0), r"sum: .* of shape \(2, 16\)"),
        (lambda x: x @ x, r"@: .* got \(2, 16\) and \(2, 16\): x and x"),
        (lambda x: x * x.shape[2], r"shape: there is no axis 2 of an array of 2; in line"),
    ],
)
def test_refused_with_the_shapes_of_the_call(definition, words):
    for function in (fuse.kernel(definition), fuse.kernel(definition).run):
        with pytest.raises((IndexError, TypeError, ValueError), match=words):
            function(np.ones((2, 16), BF16))


def test_a_gradient_that_is_not_given_what_the_result_gets():
    x, w = np.ones((4, 64), BF16), np.ones((64, 32), BF16)
    function = fuse.kernel(lambda x, w: x @ w)
    words = "gradient: takes the arguments of .*, then the gradient by each of its results"
    with pytest.raises(TypeError, match=rf"{words}; got 2"):
        function.gradient(x, w)
    assert [y.shape for y in function.gradient(x, w, np.ones((4, 32), BF16))] == [x.shape, w.shape]
    with pytest.raises(TypeError, match=rf"{words}: x, w, dy; got 2"):  # now it is known how many results there are
        function.gradient(x, w)
