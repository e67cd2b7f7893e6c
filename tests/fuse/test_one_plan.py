"""`explain`, `source`, `candidates` and `proof` agree with a call on whether kernels or parts serve the arrays."""

import re
import warnings

import numpy as np
import pytest
from operator_cases import normal
from references import compare

import fuse
from fuse.language.trace import Shape
from fuse.planning.cost import H200
from fuse.planning.definition import NoKernel
from fuse.writing import module_text
from tiles import bf16, fp16


def attend(x, wq, wk, wv):
    """Results with the axes that split_heads makes."""
    q, k, v = (fuse.split_heads(x @ w, 4) for w in (wq, wk, wv))
    return fuse.attention(q, k, v, q.shape[-1] ** -0.5)


def attention(q, k, v):
    return fuse.attention(q, k, v, 0.125)


def norm(x, g):
    return x * fuse.rsqrt(fuse.mean(x * x) + 1e-5) * g


def deep(x, g, y):
    """y lacks the batch, so leading axes are not rows."""
    return fuse.concatenate([a * b for a, b in zip(fuse.halves(x * fuse.softmax(g)), fuse.halves(y))])


HEADS = [(2, 40, 64), (2, 72, 64), (2, 72, 64)]
BATCH = [(2, *shape) for shape in HEADS]
SERVED = {  # by kernels: a definition, the shapes of its arguments
    "attention of split heads": (attend, [(128, 256)] + [(256, 256)] * 3),
    "the same merged": (lambda x, u, v, w: fuse.merge_heads(attend(x, u, v, w)), [(40, 64)] + [(64, 256)] * 3),
    "split queries": (lambda x, w, k, v: attention(fuse.split_heads(x @ w, 2), k, v), [(40, 64), (64, 128), *HEADS[1:]]),
    "attention": (attention, HEADS),
    "attention of a batch": (attention, BATCH),
    "merged heads": (lambda q, k, v: fuse.merge_heads(attention(q, k, v)), HEADS),
    "merged heads of a batch": (lambda q, k, v: fuse.merge_heads(attention(q, k, v)), BATCH),
    "causal attention": (lambda q, k, v: fuse.softmax(fuse.causal(q @ fuse.transpose(k) * 0.125)) @ v, HEADS),
    "a half": (lambda x: fuse.halves(x)[0] * 2.0, [(32, 128)]),
    "half of a half": (lambda x: fuse.halves(fuse.halves(x)[0])[1] * 2.0, [(32, 128)]),
    "a gate": (lambda x: fuse.silu(fuse.halves(x)[0]) * fuse.halves(x)[1], [(32, 128)]),
    "halves of a product": (lambda x, w: fuse.silu(fuse.halves(x @ w)[0]) * fuse.halves(x @ w)[1], [(32, 64), (64, 128)]),
    "halves swapped": (lambda x: fuse.concatenate([fuse.halves(x)[1], fuse.halves(x)[0]]), [(5, 64)]),
    "sums of rows": (lambda x: fuse.sum(x), [(5, 64)]),
    "sums of a product's rows": (lambda x, w: fuse.sum(x @ w), [(5, 64), (64, 40)]),
    "one row": (lambda x, w: x @ w, [(1, 64), (64, 40)]),
    "one row alone": (lambda x, g: x * g, [(1, 64), (64,)]),
    "a batch": (lambda x, w: x @ w, [(3, 40, 64), (3, 64, 32)]),
    "a batch of one": (lambda x, w: x @ w, [(1, 40, 64), (1, 64, 32)]),
    "a batch of weights": (lambda x, w: x @ w, [(40, 64), (3, 64, 32)]),
    "leading axes": (norm, [(2, 3, 64), (64,)]),
    "an outer product": (lambda x, y: x * y, [(5, 1), (1, 64)]),
    "two results": (lambda x, w: (x @ w, fuse.sum(x)), [(5, 64), (64, 32)]),
    "odd columns": (lambda x: fuse.softmax(x), [(5, 63)]),
    "nothing of its argument": (lambda x: x * 0.0 + 1.0, [(5, 64)]),
    "softmax of a vector": (lambda x, g: x * fuse.softmax(g), [(5, 64), (64,)]),
    "of a vector of one row": (lambda x, g: x * fuse.softmax(g), [(5, 96), (1, 96)]),
    "of a ragged vector": (lambda x, g: norm(x, g) - fuse.max(g), [(5, 136), (136,)]),
    "of a folded vector": (lambda x, g: x * fuse.softmax(g), [(3, 1024), (1024,)]),
    "of a long vector": (lambda x, g: x * fuse.softmax(g), [(3, 17440), (17440,)]),
    "of several vectors": (lambda x, g, h: x * fuse.softmax(g) * fuse.sum(x * h) + fuse.max(h), [(19, 256), (256,), (256,)]),
    "of a vector ahead of a product": (lambda x, g, w: (x * fuse.softmax(g)) @ w, [(5, 64), (64,), (64, 32)]),
    "of a vector behind a product": (lambda x, w, g: (x @ w) * fuse.softmax(g), [(5, 64), (64, 32), (32,)]),
    "of a vector of all leading axes": (lambda x, g: x * fuse.softmax(g), [(2, 3, 64), (64,)]),
    "of a vector, deep": (deep, [(2, 3, 19, 48), (48,), (19, 48)]),
}
BY_PARTS = {  # what no kernel computes, or not of arrays that lie so
    "split": (lambda x: fuse.split_heads(x, 4) * 2.0, [(32, 256)]),
    "a split product": (lambda x, w: fuse.silu(fuse.split_heads(x @ w, 4)), [(32, 64), (64, 256)]),
    "merge_heads": (lambda q, w: fuse.merge_heads(q) @ w, [(2, 40, 64), (128, 32)]),
    "side by side": (lambda x: fuse.concatenate([x, x]) * 2.0, [(5, 64)]),
    "three side by side": (lambda x, y: fuse.concatenate([x, y, x]), [(5, 64), (5, 64)]),
    "products side by side": (lambda x, w, v: fuse.concatenate([x @ w, x @ v]), [(5, 64), (64, 32), (64, 32)]),
    "a transpose": (lambda x: fuse.transpose(x) * 2.0, [(5, 64)]),
    "a product of a transpose": (lambda x, y: fuse.transpose(x) @ y, [(40, 64), (40, 32)]),
    "sums over rows": (lambda x: fuse.sum(fuse.transpose(x)), [(5, 64)]),
    "one column": (lambda x, w: x @ w, [(5, 64), (64, 1)]),
    "one term": (lambda x, w: x @ w, [(5, 1), (1, 40)]),
    "experts": (lambda p, x: fuse.weighted(p, x), [(5, 4), (4, 5, 64)]),
    "causal scores": (lambda x: fuse.causal(x), [(40, 64)]),
    "an argument": (lambda x: x, [(5, 64)]),
    "the mean of another's columns": (lambda x, g: x * fuse.rsqrt(fuse.mean(g * g) + 1.0), [(5, 64), (64,)]),
    "rows of 60 bytes": (lambda x, w: x @ w, [(5, 64), (64, 30)]),
}
WITHOUT_GRADIENT = """three side by side, sums of rows, sums of a product's rows, sums over rows, one term, experts,
    causal scores, causal attention, nothing of its argument, of a long vector"""
DIFFERENTIABLE = [one for one in (*SERVED, *BY_PARTS) if one not in re.split(r",\s+", WITHOUT_GRADIENT)]


def verdict(call):
    """ "kernels", or "parts" if the call raises NoKernel."""
    try:
        actual = call()
    except NoKernel:
        return "parts"
    return "parts" if isinstance(actual, str) and actual.startswith("A call with these arrays runs by parts") else "kernels"


def ran(call):
    """(the result of a call, "kernels" or "parts" by its warnings)"""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        actual = call()
    return actual, "parts" if any("it runs by parts" in str(one.message) for one in said) else "kernels"


@pytest.mark.parametrize("case", [*SERVED, *BY_PARTS])
def test_all_say_the_same(case, monkeypatch):
    monkeypatch.setenv("TILES_CHECK", "0")
    definition, shapes = (SERVED | BY_PARTS)[case]
    kernel, arrays = fuse.kernel(definition), [normal(*shape) for shape in shapes]
    results, how = ran(lambda: kernel.run(*arrays))
    compare(kernel, arrays, results)
    assert how == ("kernels" if case in SERVED else "parts")
    for said in (kernel.explain, kernel.source, kernel.candidates):
        assert verdict(lambda: said(*arrays)) == how, said
    if how == "parts":
        assert verdict(lambda: kernel.proof(*arrays)) == "parts"
    elif sum(x.size for x in arrays) < 10**5:
        assert kernel.proof(*arrays).holds
        printed = {}
        exec(kernel.source(*arrays), printed)


@pytest.mark.parametrize("case", DIFFERENTIABLE)
def test_all_say_the_same_of_gradients(case, monkeypatch):
    """By kernels or by parts; a gradient that the framework computes alone has no text."""
    monkeypatch.setenv("TILES_CHECK", "0")
    definition, shapes = (SERVED | BY_PARTS)[case]
    kernel, arrays = fuse.kernel(definition), [normal(*shape) for shape in shapes]
    result = kernel(*arrays)
    arrays += [normal(*y.shape) for y in (result if isinstance(result, tuple) else (result,))]
    gradient = kernel.gradient
    outputs, how = ran(lambda: gradient.run(*arrays))
    for mine, want in zip(outputs, gradient(*arrays), strict=True):
        want = want.astype(float)
        assert np.abs(mine.astype(float) - want).max() <= 0.04 * np.abs(want).max() + 1e-6
    assert gradient.differences(*arrays).passed
    said = gradient.explain(*arrays)
    nothing = said.startswith("There is no kernel.")
    assert nothing or verdict(lambda: said) == how
    assert verdict(lambda: gradient.source(*arrays)) == ("parts" if nothing else how)
    if "vector" in case and how == "kernels":
        assert gradient.proof(*arrays).holds


def test_arrays_that_a_kernel_cannot_read():
    """Two dtypes, and addresses that TMA does not take: source and proof raise the call's error."""
    product, x, w = fuse.kernel(lambda x, w: (x * 2.0) @ w), normal(300, 136), normal(128, 64)
    for arrays, words in (((x[:, 1:129], w), "x: the address"), ((x[:, :128].astype(fp16.np), w.astype(bf16.np)), "w: ")):
        assert ran(lambda: product.run(*arrays))[1] == "parts"
        assert words in product.explain(*arrays)
        for said in (product.source, product.proof, product.candidates):
            with pytest.raises(NoKernel, match=words):
                said(*arrays)


def test_explain_names_what_kernels_hand_on():
    """What a kernel stores for the next is named as in the text, and not written out again."""
    kernel = fuse.kernel(lambda x, gate, up, down: x + (fuse.silu(x @ gate) * (x @ up)) @ down)
    arrays = normal(5, 64), normal(64, 96), normal(64, 96), normal(96, 64)
    said, text = kernel.explain(*arrays), kernel.source(*arrays)
    assert "    epilogue: hidden = silu(x @ gate) * (x @ up)\n" in said and "    epilogue: x + hidden @ down\n" in said
    assert "hidden" in text and "object at" not in repr(kernel.candidates(*arrays))


def test_what_a_call_takes_is_what_is_printed(monkeypatch):
    """Whichever candidate is first, as after tuning."""
    kernel, arrays = fuse.kernel(lambda x, g, w: norm(x, g) @ w), (normal(5, 64), normal(64), normal(64, 32))
    first, second, *_ = kernel.candidates(*arrays)
    ways = kernel._rank_plans
    kernel.best.cache_clear()
    monkeypatch.setattr(kernel, "_rank_plans", lambda *inputs: (ways(*inputs)[0], [second, first]))
    text, said = kernel.source(*arrays), kernel.explain(*arrays)
    assert text != fuse.kernel(kernel.definition).source(*arrays) and said == second.describe()
    planned = []
    monkeypatch.setattr(
        module_text, "load", lambda text, *more, load=module_text.load: planned.append(text) or load(text, *more)
    )
    kernel.run(*arrays)
    assert planned == [text]


def test_axes_of_results_offline():
    """Kernels of results with the axes of split heads compile without a GPU."""
    shapes = [Shape(one, "bfloat16") for one in SERVED["attention of split heads"][1]]
    launches = fuse.kernel(attend).launches(shapes, H200)
    assert len(launches) == 2 and launches[0][0].py_func.__name__.startswith("attend")


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVED)
def test_served_on_the_card(case):
    """Kernels agree with the interpreter by the error rule, and gradients with torch's autograd."""
    pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    definition, shapes = SERVED[case]
    kernel, arrays = fuse.kernel(definition), [normal(*shape) for shape in shapes]
    there = [*map(to_torch, arrays)]
    assert verdict(lambda: kernel.source(*there)) == "kernels"
    actual, how = ran(lambda: kernel(*there))
    assert how == "kernels"
    compare(kernel, arrays, tuple(map(to_numpy, actual)) if isinstance(actual, tuple) else to_numpy(actual))
    if case in DIFFERENTIABLE:
        results = actual if isinstance(actual, tuple) else (actual,)
        inputs = [*arrays, *(normal(*y.shape) for y in results)]
        for mine, want in zip(kernel.gradient(*map(to_torch, inputs)), kernel.gradient(*inputs), strict=True):
            want = want.astype(float)
            assert np.abs(to_numpy(mine).astype(float) - want).max() <= 0.04 * np.abs(want).max() + 1e-6


def test_explain_writes_long_terms_in_parts():
    """What occurs more than once has a name, that of the definition where there is one; and each part is written once."""

    @fuse.kernel
    def mlp(x, g, gate, up):
        n = x * fuse.rsqrt(fuse.mean(x * x) + 1e-6) * g
        return fuse.silu(n @ gate) * (n @ up)

    said = mlp.gradient.explain(normal(8, 128), normal(128), normal(128, 192), normal(128, 192), normal(8, 192)).splitlines()
    assert (
        "        where part = x * g" in said and "    where n = part * g" in said and "dup = n.T @ (dy * silu(product))" in said
    )
    parts = [line for line in said if "where" in line]
    assert max(map(len, said)) < 140 and len({*parts}) == len(parts)


def test_explain_says_softmax():
    """And not the exponentials, the maximum and the sum that it consists of."""
    kernel = fuse.kernel(lambda x, w, v: fuse.softmax(x @ w) @ v)
    said = kernel.explain(normal(5, 64), normal(64, 96), normal(96, 64))
    assert "softmax(hidden)" in said and "exp(" not in said
