"""attention.short_conv and its gradients against the reference in float64."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import OnCard, OnInterpreter, random_on_the_card
from poison import Packing, as_on_a_device, edges, poisoned, unaligned

import attention
from attention import reference
from attention.kernels.recurrent import short_conv_backward
from attention.plans.recurrent.short_conv import choose_block_tokens
from tiles.targets import HOPPER

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
OPTIONAL = "bias", "initial_state", "dstate"
OF_FLOAT32 = "dweight", "dbias", "dinitial_state"


def case(length, channels=32, width=4, batch=1, dtype=bf16, silu=True, sequences=None, params=f32):
    """The arguments of short_conv_backward, with all that is optional but cu_seqlens."""
    rng = np.random.default_rng(length + channels)
    draw = lambda *shape: rng.standard_normal(shape)
    windows = (batch if sequences is None else sequences, channels, width - 1)
    return {
        "dout": draw(batch, length, channels).astype(dtype),
        "x": draw(batch, length, channels).astype(dtype),
        "weight": draw(channels, width).astype(params),
        "bias": draw(channels).astype(params),
        "activation": "silu" if silu else None,
        "initial_state": draw(*windows).astype(dtype),
        "dstate": draw(*windows).astype(params),
    }


def on(place, args):
    """The arrays of these arguments in a place."""
    return {name: place.put(x) if isinstance(x, np.ndarray) else x for name, x in args.items()}


def forward(place, args):
    """(out, state) as NumPy arrays."""
    inputs = {name: x for name, x in on(place, args).items() if name not in ("dout", "dstate")}
    return [place.get(x) for x in attention.short_conv(**inputs, return_state=True)]


def backward(place, args):
    """{name: gradient} as NumPy arrays."""
    more = [f"d{name}" for name in ("bias", "initial_state") if name in args]
    actual = attention.short_conv_backward(**on(place, args))
    return {name: place.get(x) for name, x in zip(("dx", "dweight", *more), actual, strict=True)}


def check(place, args):
    """Compare results and gradients with the reference's; return all of them."""
    inputs = {name: x for name, x in args.items() if name not in ("dout", "dstate")}
    out, state = forward(place, args)
    (ref, window), (low, _) = (reference.short_conv(**inputs, low=rounds) for rounds in (False, True))
    reference.assert_close(out, ref, low, name="out")
    np.testing.assert_array_equal(state.astype(float), window.astype(state.dtype).astype(float))
    outputs = backward(place, args)
    want, low = (reference.short_conv_backward(**args, low=rounds) for rounds in (False, True))
    for name, x in outputs.items():
        if name in OF_FLOAT32:
            np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=2e-5 * max(1, np.abs(want[name]).max(initial=0)))
        else:
            reference.assert_close(x, want[name], low[name], factor=3, name=name)
    return {"out": out, "state": state, **outputs}


@pytest.mark.parametrize("length", edges(16, 32, most=33) + [2, 3])
def test_lengths(place, length):
    """Around the edges of tiles and of blocks, which have 16 tokens here; shorter than the window."""
    check(place, case(length, batch=2, silu=length % 2 == 0))


@pytest.mark.parametrize(
    ("channels", "width", "dtype", "params", "silu"),
    [(8, 2, bf16, f32, True), (136, 3, f16, f16, False), (160, 4, bf16, bf16, False), (33, 2, f16, f32, False),
     (50, 4, bf16, f16, True), (264, 3, bf16, f32, True)],
)  # fmt: skip
def test_sizes(place, channels, width, dtype, params, silu):
    """Widths, dtypes of tokens and of parameters; channels that are no multiple of a tile's, nor of 16 bytes."""
    check(place, case(19, channels, width, dtype=dtype, params=params, silu=silu))


def test_blocks_of_more_tokens(place):
    """A sequence in blocks of more than 16 tokens, the last of which is shorter; each needs dz of the next."""
    assert choose_block_tokens(1500, 1, 1, 48, 256) == 32 and choose_block_tokens(1500, 1, 1, 84, 64) == 24
    check(place, case(1500, 8))


def test_more_blocks_than_are_summed_at_once(place):
    """Each sequence has one; a warp that sums adds 16 at a time, eight warps 128."""
    check(place, case(3, 8, batch=150))


def test_without_what_is_optional(place):
    args = case(20)
    plain = {name: args[name] for name in ("dout", "x", "weight", "activation")}
    zeros = {name: 0 * args[name] for name in ("bias", "initial_state", "dstate")}
    want, outputs = (check(place, plain | more) for more in (zeros, {}))
    for name, x in outputs.items():
        np.testing.assert_array_equal(x, want[name])
    assert "dbias" not in outputs and "dinitial_state" not in outputs


def test_packed_sequences_among_poison(place, monkeypatch):
    """Each sequence has the results that it has by itself. Padding is 0; a sequence without tokens passes its window on."""
    as_on_a_device(monkeypatch)
    packing = Packing([0, 15, 3, 17, 0, 1, 40], neighbour=2, nobodys=25)
    count = len(packing.cu_seqlens) - 1
    args = case(int(packing.cu_seqlens[-1]), sequences=count)
    alone = check(place, args | {"cu_seqlens": packing.cu_seqlens})
    spread = {name: packing.spread(args[name]) for name in ("x", "dout")}
    for name in "initial_state", "dstate":
        spread[name] = poisoned((len(packing.ends) - 1, *args[name].shape[1:]), args[name].dtype)
        spread[name][packing.which] = args[name]
    among = args | spread | {"cu_seqlens": packing.ends}
    out, state = forward(place, among)
    outputs = {"out": out, "state": state, **backward(place, among)}
    for name in "out", "dx":
        np.testing.assert_array_equal(packing.gather(outputs[name]).view("u2"), alone[name].view("u2"))
        assert (outputs[name][:, packing.nobodys] == 0).all()
    for name in "state", "dinitial_state":
        np.testing.assert_array_equal(outputs[name][packing.which].astype(f32), alone[name].astype(f32))
    np.testing.assert_array_equal(alone["state"][0], args["initial_state"][0])
    np.testing.assert_array_equal(alone["dinitial_state"][0], args["dstate"][0])


def test_windows_without_tokens(place):
    """NaN in the window of a sequence without tokens reaches no other one's gradients, nor sums."""
    args = case(20, sequences=3) | {"cu_seqlens": np.array([0, 5, 5, 20], np.int32)}
    want = backward(place, args)
    args["initial_state"][1] = np.nan
    for name, x in backward(place, args).items():
        np.testing.assert_array_equal(
            x[[0, 2]] if name == "dinitial_state" else x, want[name][[0, 2]] if name == "dinitial_state" else want[name]
        )


@pytest.mark.parametrize("cut", [1, 2, 16, 21])
def test_continues_from_its_state(place, cut):
    """Two calls, of which the second begins with what the first returned, are one; token by token, too."""
    args = case(37 if cut > 1 else 5)
    whole, state = forward(place, args)
    parts, ends = [], range(0, whole.shape[1], cut)
    for start in ends:
        part, args["initial_state"] = forward(place, args | {"x": args["x"][:, start : start + cut].copy()})
        parts.append(part)
    np.testing.assert_array_equal(np.concatenate(parts, 1), whole)
    np.testing.assert_array_equal(args["initial_state"], state)


def test_views():
    """Of a projection, of unaligned rows, of states with the channels last, and into part of a larger array."""
    args, place = case(35, 48, batch=2), OnInterpreter()
    want = check(place, args)
    wide = {name: poisoned((2, 35, 160), bf16) for name in ("x", "dout")}
    for name, room in wide.items():
        room[..., 64:112] = args[name]
    views = {name: room[..., 64:112] for name, room in wide.items()}
    states = {name: np.ascontiguousarray(args[name].swapaxes(1, 2)).swapaxes(1, 2) for name in ("initial_state", "dstate")}
    unaligned_rows = {name: unaligned(args[name], 1) for name in ("x", "dout")}
    for change in (views, states, unaligned_rows, {"weight": np.asfortranarray(args["weight"])}):
        for name, x in check(place, args | change).items():
            np.testing.assert_array_equal(x, want[name])
    outs, dxs = poisoned((2, 2, 36, 64), bf16)
    inputs = {name: x for name, x in args.items() if name not in ("dout", "dstate")}
    for target, write in (
        (outs, lambda into: attention.short_conv(**inputs, out=into)),
        (dxs, lambda into: attention.short_conv_backward(**args, dx=into)[0]),
    ):
        assert write(target[:, 1:, 16:]).base is not None
        assert np.isnan(target[:, 0].astype(f32)).all() and np.isnan(target[..., :16].astype(f32)).all()
    np.testing.assert_array_equal(outs[:, 1:, 16:], want["out"])
    np.testing.assert_array_equal(dxs[:, 1:, 16:], want["dx"])


COMPILED = [
    (dict(length=19, channels=136), None, True),  # blocks of 16 tokens and of 128 channels, the last of them not full
    (dict(length=24, channels=128, sequences=4), [0, 2, 2, 19, 24], False),
]
OTHERS = [
    (dict(length=6, channels=33, width=2, dtype=f16, silu=False), None, True),  # element by element
    (dict(length=7, channels=40, width=3, silu=False), None, False),
    (dict(length=4, channels=8, sequences=2), [0, 1, 4], True),
]


@pytest.mark.parametrize(
    ("problem", "ends", "optional"), COMPILED + [pytest.param(*problem, marks=pytest.mark.release) for problem in OTHERS]
)
def test_as_compiled(as_compiled, problem, ends, optional):
    """The PTX of both kernels and of their sums."""
    as_compiled("sm_90a")
    args = case(**problem) | ({} if ends is None else {"cu_seqlens": np.array(ends, np.int32)})
    check(OnInterpreter(), {name: x for name, x in args.items() if optional or name not in OPTIONAL})


def test_reference_by_finite_differences():
    """In float64, by central differences along a random direction."""
    args = {name: x.astype(float) if isinstance(x, np.ndarray) else x for name, x in case(7, 3).items()}
    dout, dstate = args.pop("dout"), args.pop("dstate")

    def loss(**inputs):
        out, state = reference.short_conv(**inputs)
        return (out * dout).sum() + (state * dstate).sum()

    actual, rng = reference.short_conv_backward(dout, **args, dstate=dstate), np.random.default_rng(0)
    for name in "x", "weight", "bias", "initial_state":
        way = rng.standard_normal(args[name].shape)
        slope = (loss(**args | {name: args[name] + 1e-5 * way}) - loss(**args | {name: args[name] - 1e-5 * way})) / 2e-5
        np.testing.assert_allclose(slope, (actual[f"d{name}"] * way).sum(), rtol=1e-7)


problems = st.fixed_dictionaries({
    "length": st.integers(0, 90), "channels": st.integers(1, 150), "width": st.integers(2, 4), "batch": st.integers(1, 3),
    "dtype": st.sampled_from([bf16, f16]), "silu": st.booleans(), "params": st.sampled_from([f32, bf16]),
})  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(problem=problems)
def test_random_problems(problem):
    check(OnInterpreter(), case(**problem))


@random_on_the_card
@given(problem=problems)
def test_random_problems_on_the_card(problem):
    check(OnCard(), case(**problem | {"length": 40 * problem["length"]}))


# ---- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros((32, 5), f32), "initial_state": None}, "weight: width must be from 2 to 4: width=5: weight.sh"),
        ({"weight": np.zeros((31, 4), f32)}, "weight: channels must equal x's"),
        ({"bias": np.zeros(31, f32)}, "bias: channels must equal x's"),
        ({"initial_state": np.zeros((1, 32, 4), f32)}, r"initial_state: window must be 3: initial_state.shape=\(1, 32, 4\)"),
        ({"initial_state": np.zeros((2, 32, 3), f32)}, "initial_state: sequences must equal x's"),
        ({"activation": "relu"}, "activation: must be None or"),
        ({"x": np.zeros((1, 5, 32), f32)}, "x: dtype must be one of"),
        ({"x": np.zeros((1, 32, 5), bf16).swapaxes(1, 2)}, "x: last axis must be contiguous"),
        ({"conv_state": None}, "here that is initial_state=, the last W - 1 tokens"),
    ],
)
def test_errors(change, message):
    args = {name: x for name, x in case(5).items() if name not in ("dout", "dstate")}
    with pytest.raises((TypeError, ValueError), match=message):
        attention.short_conv(**args | change)


def test_swish_is_silu():
    args = {name: x for name, x in case(5).items() if name not in ("dout", "dstate")}
    swish, silu = (attention.short_conv(**args | {"activation": name}) for name in ("swish", "silu"))
    np.testing.assert_array_equal(np.asarray(swish[0]), np.asarray(silu[0]))


def test_errors_of_gradients():
    args = case(5)
    with pytest.raises(ValueError, match=r"dstate: window must be 3: dstate.shape=\(1, 32, 2\)"):
        attention.short_conv_backward(**args | {"dstate": args["dstate"][..., :2], "initial_state": None})
    with pytest.raises(TypeError, match="dweight: dtype must be one of"):
        attention.short_conv_backward(**args, dweight=np.zeros((32, 4), bf16))
    assert len(attention.short_conv_backward(**args, dbias=False, dinitial_state=False)) == 2
    with pytest.raises(ValueError, match="^dbias: must be None where there is no bias: dbias=True"):
        attention.short_conv_backward(**args | {"bias": None}, dbias=True)


# ---- torch and JAX ---------------------------------------------------------------------------------------------------
LEARNED = "x", "weight", "bias", "initial_state"


def test_torch():
    """Eager, compiled as one graph, with checkpoints, in torch.func.grad, and under autocast."""
    torch = pytest.importorskip("torch")
    args = case(9)
    leaves = [torch.tensor(args[name].astype(f32)).to(torch.bfloat16 if args[name].dtype == bf16 else torch.float32)
              .requires_grad_() for name in LEARNED]  # fmt: skip

    def loss(x, weight, bias, initial_state):
        out, state = attention.short_conv(x, weight, bias, activation="silu", initial_state=initial_state, return_state=True)
        return out.float().square().sum() + state.float().square().sum()

    x, weight, bias, start = (leaf.detach() for leaf in leaves)
    out, state = attention.short_conv(x, weight, bias, activation="silu", initial_state=start, return_state=True)
    actual = attention.short_conv_backward(
        2 * out, x, weight, bias, activation="silu", initial_state=start, dstate=2 * state.float()
    )
    want = [gradient.to(leaf.dtype) for gradient, leaf in zip(actual, leaves, strict=True)]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ways = [torch.autograd.grad(way(*leaves), leaves) for way in (loss, compiled)]
    ways.append(torch.autograd.grad(torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False), leaves))
    ways.append(torch.func.grad(loss, (0, 1, 2, 3))(x, weight, bias, start))
    for outputs in ways:
        for gradient, expected in zip(outputs, want, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        wide = x.float().requires_grad_()
        out = attention.short_conv(wide, weight.requires_grad_())
        assert out.dtype == torch.bfloat16 and torch.autograd.grad(out.sum(), wide)[0].dtype == torch.float32
    out = attention.short_conv(leaves[0], weight)
    with pytest.raises(NotImplementedError, match=r"^attention\.short_conv: has no second derivatives"):
        torch.autograd.grad(out.float().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="^out: is not supported for tensors that require grad"):
        attention.short_conv(leaves[0], weight, out=torch.empty_like(x))


def test_space_of_gradients():
    """Packed sequences with a final window's gradient are inspected, the others with everything; so are sums of each width."""
    few, many = (list(short_conv_backward.space(HOPPER, everything)) for everything in (False, True))
    kinds = [{(x.varlen, x.window) for x in some if isinstance(x, short_conv_backward.Config)} for some in (few, many)]
    assert kinds == [{(False, False), (True, False), (True, True)}, {*itertools.product((False, True), repeat=2)}]
    sums = [[x.rows for x in some if isinstance(x, short_conv_backward.SumConfig)] for some in (few, many)]
    assert sums == [[4], [2, 3, 4, 5]] and len(many) == len(set(many))


def test_jax():
    jax = pytest.importorskip("jax")
    args = case(9)

    def total(x, weight, bias, initial_state):
        out, state = attention.short_conv(x, weight, bias, activation="silu", initial_state=initial_state, return_state=True)
        return (out.astype("float32") ** 2).sum() + (state.astype("float32") ** 2).sum()

    with jax.default_device(jax.devices("cpu")[0]):
        leaves = [jax.numpy.asarray(args[name]) for name in LEARNED]
        x, weight, bias, start = leaves
        out, state = attention.short_conv(x, weight, bias, activation="silu", initial_state=start, return_state=True)
        want = attention.short_conv_backward(
            2 * out, x, weight, bias, activation="silu", initial_state=start, dstate=2 * state.astype("float32")
        )
        for outputs in (jax.grad(total, (0, 1, 2, 3))(*leaves), jax.jit(jax.grad(total, (0, 1, 2, 3)))(*leaves)):
            for gradient, expected, leaf in zip(outputs, want, leaves, strict=True):
                assert gradient.dtype == leaf.dtype
                np.testing.assert_array_equal(np.asarray(gradient, f32), np.asarray(expected.astype(leaf.dtype), f32))
