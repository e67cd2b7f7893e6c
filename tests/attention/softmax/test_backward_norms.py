"""attention.backward through norms of queries and keys: their gradients against float64 and finite differences."""

import math

import numpy as np
import pytest
from forward_checks import draw, inputs, there, weights, weights_of
from gradient_checks import gradient_of_lse
from places import BF16, OnInterpreter
from poison import as_on_a_device, poisoned, unseen

import attention
from attention import reference
from attention.plans.softmax import norm_gradients
from attention.reference import gradients as formula
from tiles import fp16

F32, FP16 = np.dtype(np.float32), fp16.np


def flat(gradients):
    return [x for one in gradients for x in (one if isinstance(one, tuple) else (one,))]


def agree(place, q, k, v, **options):
    """Run both ways and judge every gradient by the rule. What no query sees is poison."""
    dout = draw((*q.shape[:-1], v.shape[-1]), q.dtype)
    put, args = [place.put(x) for x in unseen(q, k, v, **options)], there(place, options)
    out, lse = attention.forward(*put, return_lse=True, **args)
    options["dlse"] = dlse = gradient_of_lse(place.get(lse))
    outputs = {name: place.put(poisoned(x.shape, x.dtype)) for name, x in (("dq", q), ("dk", k))}
    actual = attention.backward(place.put(dout), *put, out, lse, dlse=place.put(dlse), **args, **outputs)
    assert actual[0] is outputs["dq"] and actual[1] is outputs["dk"]
    options.pop("family", None)
    ref, low = (flat(f(dout, q, k, v, **options)) for f in (reference.backward, reference.backward_low))
    actual = [place.get(x) for x in flat(actual)]
    for n, three in enumerate(zip(actual, ref, low, strict=True)):
        if np.abs(three[1]).max() > 1e-9:  # a bias of all keys moves all scores of a row alike: its gradient is 0
            reference.assert_close(*three, factor=3, name=f"{n}")
    return actual


def gradients_of_layer_norm(place, x, dy, norm):
    """[dx, dweights, dbias] by the kernels."""
    dx, (parts,) = norm_gradients.norm_gradients(
        "q", *map(place.put, (x, dy)), tuple(map(place.put, norm)), 1e-6, None, None, "bshd"
    )
    return [place.get(y) for y in (dx, *parts)]


def assert_is_the_formula(actual, x, dy, norm):
    """Assert that dx has the error of one rounding, and sums that of float32."""
    exact = formula.norm_backward(x.astype(float), norm, dy.astype(float), 1e-6, float)
    for mine, ref in zip(actual, exact, strict=True):
        unit = 2.0 ** (-20 if mine.dtype == F32 else -8)
        np.testing.assert_allclose(mine.astype(float), ref, rtol=unit, atol=unit * np.abs(ref).max())


@pytest.mark.smoke
@pytest.mark.parametrize(("ours", "theirs", "family"), [
    ("rms", "rms of heads", "sm_90"), ("rms of heads", "rms", "sm_80"), ("layer", "layer of heads", "sm_90"),
    ("layer of heads", None, "sm_80"), (None, "layer", "sm_90")])  # fmt: skip
def test_norms(place, ours, theirs, family):
    """Rows whose mean is not 0; heads that share keys; a last tile that is not full."""
    q, k, v = inputs(2, 40, 70, 4, 2, 64)
    some = {"q_norm": weights_of(4, 64).get(ours), "k_norm": weights_of(2, 64).get(theirs)}
    some = {name: x for name, x in some.items() if x is not None}
    agree(place, q + BF16.type(2), k - BF16.type(1), v, family=family, causal=True, norm_eps=1e-2, **some)


def test_unseen_rows_do_not_contribute_to_weights(place, monkeypatch):
    """Tokens of no sequence, keys that are not in use, and keys before all windows."""
    as_on_a_device(monkeypatch)
    ends, ends_k, lengths = (np.array(x, np.int32) for x in ([0, 10, 30], [0, 20, 40], [15, 20]))
    norms = {"q_norm": weights(64), "k_norm": (weights(64), draw((64,), F32))}
    agree(place, *inputs(1, 40, 50, 2, 1, 64), cu_seqlens=ends, cu_seqlens_k=ends_k, lengths_k=lengths, **norms)
    agree(place, *inputs(1, 10, 90, 2, 1, 64), window=(20, 0), **norms)


@pytest.mark.parametrize(("head_dim", "layout"), [(8, "bshd"), (72, "bhsd"), (256, "bshd")])
def test_padding_columns_do_not_contribute(place, head_dim, layout):
    q, k, v = inputs(1, 20, 30, 2, 2, head_dim, FP16, layout)
    layer = weights(head_dim), weights(2, head_dim)
    agree(place, q + FP16.type(1), k, v, q_norm=layer, k_norm=weights(2, head_dim), layout=layout, softcap=3.0)


def test_unaligned_arrays():
    room = inputs(1, 20, 20, 1, 1, 65)
    q, k, v = (x[..., 1:] for x in room)
    agree(OnInterpreter(), *map(np.asarray, (q, k, v)), q_norm=weights(64), k_norm=weights(64))


def test_many_rows(place):
    """Several thread blocks sum the columns, with the same bits in every call."""
    x, dy = (draw((3, 500, 2, 8), BF16, seed) for seed in (1, 2))
    norm = weights(8), draw((2, 8), F32)
    first, second = (gradients_of_layer_norm(place, x, dy, norm) for _ in range(2))
    for one, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, again)
    assert_is_the_formula(first, x, dy, norm)


def test_many_heads_share_weights(place):
    x, dy = (draw((1, 10, 20, 8), BF16, seed) for seed in (1, 2))
    norm = weights(8), draw((20, 8), F32)
    assert_is_the_formula(gradients_of_layer_norm(place, x, dy, norm), x, dy, norm)


def test_empty():
    q, k, v = inputs(1, 0, 3, 2, 2, 64)
    out, lse = attention.forward(q, k, v, return_lse=True)
    dq, dk, _, of_q, (of_k, of_bias) = attention.backward(
        out, q, k, v, out, lse, q_norm=weights(64), k_norm=(weights(2, 64), weights(64))
    )
    assert dq.shape == q.shape and (dk == 0).all() and of_q.shape == of_bias.shape == (64,) and of_k.shape == (2, 64)
    assert not any(x.any() for x in (of_q, of_k, of_bias))


def test_as_compiled(as_compiled):
    as_compiled("sm_90a")
    x, dy, norm = draw((1, 20, 1, 40), BF16, 1), draw((1, 20, 1, 40), BF16, 2), (weights(40), weights(1, 40))
    assert_is_the_formula(gradients_of_layer_norm(OnInterpreter(), x, dy, norm), x, dy, norm)


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_the_formula_agrees_with_finite_differences(name):
    x, dy, weights_, bias = (draw(shape, float, n) for n, shape in enumerate([(2, 5, 2, 8), (2, 5, 2, 8), (8,), (2, 8)]))
    layer, step = name == "layer", 1e-5
    args = [x, weights_, bias][: 2 + layer]
    normalize_rows = lambda x, *norm: reference.softmax.normalize_rows(x, norm if layer else norm[0], 1e-3, float, float)
    gradients = formula.norm_backward(x, (weights_, bias) if layer else weights_, dy, 1e-3, float)
    for n, gradient in enumerate(gradients[: len(args)]):
        along = draw(args[n].shape, float, 9)
        ends = [(normalize_rows(*[y + s * step * along * (m == n) for m, y in enumerate(args)]) * dy).sum() for s in (1, -1)]
        assert math.isclose((ends[0] - ends[1]) / (2 * step), (gradient * along).sum(), rel_tol=1e-6, abs_tol=1e-7)


@pytest.mark.parametrize(("options", "what"), [
    (dict(q_norm=weights(3, 64)), r"q_norm: heads must equal q's: q_norm.shape=\(3, 64\)"),
    (dict(k_norm=weights(32)), "k_norm: head_dim must equal k's"),
    (dict(k_norm=(weights(64),)), r"k_norm: must be weights, or a pair \(weights, bias\)"),
    (dict(q_norm=weights(64), norm_eps=0.0), "norm_eps: must be positive"),
])  # fmt: skip
def test_errors(options, what):
    q, k, v = inputs(1, 4, 4, 2, 1, 64)
    with pytest.raises((TypeError, ValueError), match=what):
        attention.backward(q, q, k, v, q, np.zeros((1, 2, 4), F32), **options)


@pytest.mark.parametrize(("room", "what"), [
    ((32,), r"dq_norm: must have q_norm's shape: dq_norm.shape=\(32,\)"), ((64,), "dq_norm: dtype must be float32"),
    (None, "dq_norm: must be an array, as q_norm is")], ids=["shape", "dtype", "pair"])  # fmt: skip
def test_arguments_are_checked_before_anything_is_added(room, what):
    q, k, v = inputs(1, 4, 4, 2, 1, 64)
    out, lse = attention.forward(q, k, v, q_norm=weights(64), return_lse=True)
    sums = {name: np.zeros(x.shape, F32) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    of_norm = (np.zeros(64, F32),) * 2 if room is None else np.zeros(room, BF16 if room == (64,) else F32)
    with pytest.raises((TypeError, ValueError), match=what):
        attention.backward(q, q, k, v, out, lse, q_norm=weights(64), accumulate=True, dq_norm=of_norm, **sums)
    assert not any(x.any() for x in sums.values())


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("name", ["dq_norm", "dk_norm"])
def test_gradient_of_a_norm_that_is_not_there_is_refused(name, options):
    q, k, v = inputs(1, 4, 4, 2, 1, 64)
    with pytest.raises(ValueError, match=f"{name}: must be None where there is no {name[1:]}"):
        attention.backward(q, q, k, v, q, np.zeros((1, 2, 4), F32), **{name: np.zeros(64, F32)}, **options)


def test_torch():
    """Autograd, also compiled, gives the gradients of attention.backward, in the weights' dtype."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 12, 2, 64).bfloat16().requires_grad_() for _ in range(3))
    w, b = torch.randn(64).bfloat16().requires_grad_(), torch.randn(2, 64).requires_grad_()
    args = q, k, v, w, b

    def loss(q, k, v, w, b):
        return attention.forward(q, k, v, q_norm=(w, b), k_norm=w.float(), norm_eps=1e-2).float().square().sum()

    actual = torch.autograd.grad(loss(*args), args)
    with torch.no_grad():
        options = dict(q_norm=(w, b), k_norm=w.float(), norm_eps=1e-2)
        out, lse = attention.forward(q, k, v, return_lse=True, **options)
        dq, dk, dv, (dw, db), more = attention.backward((2 * out.float()).bfloat16(), q, k, v, out, lse, **options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one in actual, torch.autograd.grad(compiled(*args), args):
        for x, y, z in zip(one, (dq, dk, dv, dw + more, db), args, strict=True):
            assert x.dtype == z.dtype
            torch.testing.assert_close(x.float(), y.float(), rtol=2**-5, atol=2**-4)


@pytest.mark.parametrize("ours", ["layer", None])
def test_accumulate_through_norms(place, ours, layout="bhsd"):
    """accumulate=True adds all gradients in float32, those of norms, too. Without it they are stored in the given arrays."""
    q_k_v = inputs(1, 10, 20, 2, 1, 64, layout=layout)
    some = {"q_norm": weights_of(2, 64).get(ours), "k_norm": weights_of(1, 64)["rms of heads"], "layout": layout}
    some = there(place, {name: x for name, x in some.items() if x is not None})
    put = [place.put(x) for x in (q_k_v[0], *q_k_v)]
    out, lse = attention.forward(*put[1:], return_lse=True, **some)
    expected = attention.backward(*put, out, lse, **some)
    host = [place.get(x).astype(F32) for x in flat(expected)]
    names = "dq", "dk", "dv", *[f"d{name}" for name in ("q_norm", "k_norm") if name in some]
    for accumulate in (False, True):
        before = [draw(x.shape, F32 if accumulate or n > 2 else BF16) for n, x in enumerate(host)]
        rooms = [place.put(x.copy()) for x in before]
        parted = [*rooms[:3], tuple(rooms[3:5]), *rooms[5:]] if ours else rooms
        outputs = dict(zip(names, parted, strict=True))
        actual = attention.backward(*put, out, lse, accumulate=accumulate, **some, **outputs)
        assert all(x is y for x, y in zip(flat(actual), rooms, strict=True))
        for n, (x, y, want) in enumerate(zip(rooms, before, host, strict=True)):
            got_x = place.get(x).astype(F32) - y * accumulate
            np.testing.assert_allclose(got_x, want, rtol=0.01, atol=0.02 * np.abs(want).max() + 1e-4, err_msg=f"{n}")
