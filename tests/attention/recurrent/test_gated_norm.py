"""attention.gated_rms_norm and its gradients against the reference in float64."""

import ml_dtypes
import numpy as np
import pytest
from places import OnCard, OnInterpreter
from poison import unaligned

import attention
from attention import reference
from attention.plans.recurrent.gated_norm import choose_strip_tokens

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32


def case(columns, heads=2, tokens=5, batch=1, dtype=bf16, params=f32, by_head=False, gated=True, **options):
    """Random arguments of gated_rms_norm_backward, by name."""
    rng = np.random.default_rng(columns + heads + tokens)
    draw = lambda: (rng.standard_normal((batch, tokens, heads, columns)) * 2.0).astype(dtype)
    weight = rng.standard_normal((heads, columns) if by_head else columns).astype(params)
    return {"dout": draw(), "x": draw(), "weight": weight} | ({"gate": draw()} if gated else {}) | options


def on(place, args):
    """The arrays of these arguments in a place."""
    return {name: place.put(x) if isinstance(x, np.ndarray) else x for name, x in args.items()}


def results(place, args):
    """{name: result or gradient} as NumPy arrays."""
    inputs = on(place, args)
    dout = inputs.pop("dout")
    actual = {"out": place.get(attention.gated_rms_norm(**inputs))}
    names = ["dx", "dweight", *["dgate"] * ("gate" in args)]
    return actual | dict(zip(names, map(place.get, attention.gated_rms_norm_backward(dout, **inputs)), strict=True))


def check(place, args):
    """Compare results and gradients with the reference's; return all of them."""
    inputs = {name: x for name, x in args.items() if name != "dout"}
    want, low = ({"out": reference.gated_rms_norm(**inputs, low=rounds)} for rounds in (False, True))
    want |= reference.gated_rms_norm_backward(**args)
    low |= reference.gated_rms_norm_backward(**args, low=True)
    outputs = results(place, args)
    for name, x in outputs.items():
        if name == "dweight":
            np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=2e-5 * np.abs(want[name]).max(initial=1))
        else:
            reference.assert_close(x, want[name], low[name], factor=2 if name == "out" else 3, name=name)
    return outputs


@pytest.mark.parametrize(
    ("columns", "heads", "dtype", "params", "options"),
    [
        (32, 3, bf16, f32, {}),
        (64, 9, f16, bf16, {"activation": "sigmoid"}),
        (128, 5, bf16, bf16, {"norm_before_gate": False}),
        (128, 4, bf16, f32, {"activation": "sigmoid", "eps": 0.5}),
        (256, 3, f16, f32, {"activation": "sigmoid", "norm_before_gate": False}),
        (96, 2, bf16, f32, {}),
        (512, 1, bf16, f16, {}),
        (1056, 2, bf16, f32, {"norm_before_gate": False}),
        (2080, 1, bf16, f32, {}),
        (8192, 1, bf16, bf16, {"norm_before_gate": False}),  # Bamba's: as many warps as a block may have
    ],
)
@pytest.mark.parametrize("by_head", [False, True])
def test_sizes(place, columns, heads, dtype, params, options, by_head):
    """Rows of which a warp has several, of which a block has one, and heads that do not fill a warp's last tile."""
    check(place, case(columns, heads, dtype=dtype, params=params, by_head=by_head, **options))


@pytest.mark.parametrize("columns", [64, 288])
def test_without_a_gate(place, columns):
    args = case(columns, gated=False)
    want, outputs = (check(place, args | more) for more in ({"norm_before_gate": True}, {"norm_before_gate": False}))
    for name, x in outputs.items():
        np.testing.assert_array_equal(x, want[name])
    assert "dgate" not in outputs


@pytest.mark.parametrize("columns", [128, 544])
def test_strips_of_several_tokens(place, columns):
    """The last strip of a sequence has fewer tokens, and batches follow each other."""
    assert (
        choose_strip_tokens(450, 1, 3) == 2
        and choose_strip_tokens(202, 2, 3) == 2
        and choose_strip_tokens(2**20, 8, 132) == 64
        and choose_strip_tokens(3, 1, 132) == 1
    )
    check(place, case(columns, 1, tokens=101, batch=2))


@pytest.mark.parametrize("columns", [64, 96])
def test_views_of_a_projection(place, columns):
    """Rows lie among other columns; x and gate are parts of one array."""
    args = case(columns, 3, tokens=4, batch=2)
    want, rows = results(place, args), 3 * columns
    both = place.put(np.concatenate([args[name].reshape(2, 4, rows) for name in ("x", "gate")] * 2, -1))
    x, gate = (both[:, :, start : start + rows].reshape(2, 4, 3, columns) for start in (0, 3 * rows))
    dout, weight = place.put(args["dout"]), place.put(args["weight"])
    outputs = [attention.gated_rms_norm(x, weight, gate), *attention.gated_rms_norm_backward(dout, x, weight, gate)]
    for name, y in zip(want, outputs, strict=True):
        np.testing.assert_array_equal(place.get(y), want[name])


def test_gradients_that_come_transposed():
    """A model may put heads first before it goes on: torch's gradient of the result is then no array of adjacent heads."""
    torch = pytest.importorskip("torch")
    x, dout = torch.randn(2, 1, 5, 3, 64).bfloat16().unbind()
    leaves, weight = [x.clone().requires_grad_() for _ in range(2)], torch.ones(64)
    for leaf, swapped in zip(leaves, (False, True)):
        y = attention.gated_rms_norm(leaf, weight)
        y, dy = (y.transpose(1, 2), dout.transpose(1, 2).contiguous()) if swapped else (y, dout)
        y.backward(dy)
    assert torch.equal(*[leaf.grad for leaf in leaves])


@pytest.mark.parametrize("columns", [128, 96])
def test_unaligned_arrays(place, columns):
    if isinstance(place, OnCard):
        pytest.skip("arrays that begin anywhere are NumPy's")
    args = case(columns, 3)
    want = results(place, args)
    by_token = {name: unaligned(args[name].reshape(1, 5, -1), 1) for name in ("dout", "x", "gate")}
    outputs = results(place, args | {name: x.reshape(args[name].shape) for name, x in by_token.items()})
    for name, x in outputs.items():
        np.testing.assert_array_equal(x, want[name])


@pytest.mark.parametrize("shape", [(0, 3, 2, 64), (2, 0, 2, 64), (2, 3, 0, 64)])
def test_nothing(place, shape):
    x, weight = place.put(np.zeros(shape, bf16)), place.put(np.ones(64, f32))
    assert place.get(attention.gated_rms_norm(x, weight, x)).shape == shape
    dx, dweight, dgate = map(place.get, attention.gated_rms_norm_backward(x, x, weight, x))
    assert dx.shape == dgate.shape == shape and not dweight.any()


def test_gradients_that_are_asked_for(place):
    args = on(place, case(64, 3))
    every = [place.get(x) for x in attention.gated_rms_norm_backward(**args)]
    two = attention.gated_rms_norm_backward(**args, dgate=False)
    assert len(two) == 2
    into = place.put(np.zeros_like(every[2]))
    *_, dgate = attention.gated_rms_norm_backward(**args, dgate=into)
    assert dgate is into
    for x, y in zip(every, (*two, dgate)):
        np.testing.assert_array_equal(x, place.get(y))


def test_swish_is_silu():
    args = {name: x for name, x in case(64).items() if name != "dout"}
    swish, silu = (attention.gated_rms_norm(**args | {"activation": name}) for name in ("swish", "silu"))
    np.testing.assert_array_equal(swish, silu)


@pytest.mark.parametrize(("change", "error", "words"), [
    (dict(x=np.zeros((1, 5, 64), bf16)), ValueError, r"pass x\[None\], or with a single head x\[:, :, None\]$"),
    (dict(activation="gelu"), ValueError, "^activation: must be .* or \"sigmoid\": activation='gelu'"),
    (dict(eps=0.0), ValueError, "^eps: must be positive"),
    (dict(norm_before_gate=1), TypeError, "^norm_before_gate: must be a bool"),
    (dict(x=np.zeros((1, 5, 2, 48), bf16), gate=None), ValueError, "^(weight|x): "),
    (dict(x=np.zeros((1, 5, 2, 48), bf16), weight=np.ones(48, f32), gate=None), ValueError,
     r"^x: head_dim must be a multiple of 32 up to 8192: head_dim=48: x.shape=\(1, 5, 2, 48\)"),
    (dict(gate=np.zeros((1, 2, 5, 64), bf16).swapaxes(1, 2)), ValueError, "^gate: heads and columns must be contiguous"),
    (dict(gate=np.zeros((1, 5, 2, 64), f32)), TypeError, "^gate: dtype"),
])  # fmt: skip
def test_what_is_refused(change, error, words):
    args = {name: x for name, x in case(64).items() if name != "dout"}
    with pytest.raises(error, match=words):
        attention.gated_rms_norm(**args | change)
    for dgate in True, args["x"]:
        with pytest.raises(ValueError, match="^dgate: must be None where there is no gate: dgate"):
            attention.gated_rms_norm_backward(args["x"], args["x"], args["weight"], dgate=dgate)


@pytest.mark.parametrize(("columns", "heads", "options"), [
    (96, 1, {"norm_before_gate": False, "activation": "sigmoid"}), (32, 3, {"by_head": True}),
    *(pytest.param(*case, marks=pytest.mark.release) for case in ((576, 1, {}), (128, 5, {}))),
])  # fmt: skip
def test_as_compiled(as_compiled, columns, heads, options):
    as_compiled("sm_90a")
    check(OnInterpreter(), case(columns, heads, tokens=2, **options))
