"""attention/public/linear_family.py: all members against their recurrence in float64, by chunk kernels and by the token
loop."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from members import draw_model_decays

from attention import reference
from attention.parts.recurrent import channel_decay
from attention.plans.recurrent import recurrent_checks, recurrent_chunks, token_loop
from attention.public import linear_family as members
from attention.public.linear_family import LINEAR, gla, lightning, linear, retention
from tiles import bf16 as tiles_bf16
from tiles import fp16 as tiles_f16
from tiles.launching.frameworks import describe
from tiles.testing import pairs

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
HEADS = 2
DECAYS = {"none": "", "head": "h", "token": "bth", "channel": "bthk"}  # axes: batch, tokens, heads, keys' columns


def inputs(batch=2, length=70, key_dim=64, value_dim=64, decay="none", key_heads=1, dtype=bf16, gates=f32, seed=0, heads=HEADS):
    """The arguments of a call, an initial state included."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, batch, length, key_heads, key_dim)).astype(dtype)
    v = rng.standard_normal((batch, length, heads, value_dim)).astype(dtype)
    args = dict(q=q, k=k, v=v, initial_state=rng.standard_normal((batch, heads, key_dim, value_dim)).astype(f32))
    if axes := DECAYS[decay]:
        sizes = dict(b=batch, t=length, h=heads, k=key_dim)
        args["decay"] = -rng.exponential(0.2, [sizes[axis] for axis in axes]).astype(gates)
    return args


def check(place, args, function=linear, **options):
    """Call the function in this place and compare outputs and final state with the reference. decays: arguments of the
    reference alone, for functions that compute their decays themselves."""
    decays = options.pop("decays", {})
    on = {name: tuple(map(place.put, x)) if isinstance(x, tuple) else place.put(x) for name, x in args.items()}
    out, state = function(**on, **options, return_state=True)
    known = {name: x for name, x in options.items() if name not in ("layer", "layers")}
    ref, last = reference.linear(**args, **known, **decays)
    low, _ = reference.linear(**args, **known, **decays, low=True)
    reference.assert_close(place.get(out), ref, low)
    for actual, want in zip(*((x if isinstance(x, tuple) else (x,)) for x in (state, last)), strict=True):
        np.testing.assert_allclose(place.get(actual), want, rtol=0, atol=2**-7 * np.abs(want).max())


@pytest.mark.parametrize(("length", "decay"), pairs([1, 63, 64, 150, 150, 1, 63, 64, 150, 150], [*DECAYS, "channel"]))
def test_lengths(place, length, decay):
    check(place, inputs(1, length, decay=decay))


@pytest.mark.parametrize("key_dim, value_dim", [(16, 16), (128, 128), (80, 48), (256, 64)])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_sizes(place, key_dim, value_dim, decay):
    check(place, inputs(1, 40, key_dim, value_dim, decay))


@pytest.mark.parametrize(("key_heads", "decay"), [(2, "head"), (4, "channel"), (2, "channel")])
def test_shared_keys(place, key_heads, decay):
    check(place, inputs(length=20, decay=decay, key_heads=key_heads, heads=4))


@pytest.mark.parametrize(
    ("dtype", "gates", "decay"), [(f16, f32, "token"), (bf16, bf16, "token"), (f16, f16, "channel"), (bf16, bf16, "channel")]
)
def test_dtypes(place, dtype, gates, decay):
    check(place, inputs(1, 70, decay=decay, dtype=dtype, gates=gates))


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_layout_and_scale(place, decay):
    args = inputs(length=20, decay=decay)
    turned = {name: x.swapaxes(1, 2).copy() if name != "initial_state" else x for name, x in args.items()}
    check(place, turned, layout="bhsd", scale=0.3)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_a_decay_of_minus_infinity(place, decay):
    args = inputs(1, 70, decay=decay)
    args["decay"][0, [20, 66]] = -np.inf
    check(place, args)


@pytest.mark.parametrize(("decay", "scale"), pairs([*DECAYS, "channel"], [0.0, -0.3, 7.0]))
def test_any_scale(place, decay, scale):
    check(place, inputs(1, 70, decay=decay), scale=scale)


@pytest.mark.parametrize("decay, key_dim", [*((decay, 64) for decay in DECAYS), ("channel", 144)])
def test_normalize(place, decay, key_dim):
    args = inputs(length=30, key_dim=key_dim, decay=decay)
    small = args["q"].dtype.type(2**-12)  # so that a normalizer is small, too, but not in comparison with the epsilon
    args["q"], args["k"] = small * abs(args["q"]), abs(args["k"])
    args["initial_state"] = abs(args["initial_state"]), np.ones((2, HEADS, key_dim), f32)
    check(place, args, normalize=True)


@pytest.mark.parametrize(("decay", "ends"), pairs(DECAYS, [np.int32, np.int64]))
def test_packed_sequences(place, decay, ends):
    """One of three sequences is empty. A NaN in the first one does not reach the others."""
    args = inputs(1, 150, decay=decay)
    args["initial_state"] = np.random.default_rng(1).standard_normal((3, HEADS, 64, 64)).astype(f32)
    args["cu_seqlens"] = np.array([0, 70, 70, 150], ends)
    args["v"][0, 69] = np.nan
    out, state = linear(**{name: place.put(x) for name, x in args.items()}, return_state=True)
    del args["cu_seqlens"]
    tail = {name: x[:, 70:] if x.ndim > 1 and name != "initial_state" else x for name, x in args.items()}
    tail["initial_state"] = args["initial_state"][2:]
    ref, last = reference.linear(**tail)
    low, _ = reference.linear(**tail, low=True)
    reference.assert_close(place.get(out)[:, 70:], ref, low)
    np.testing.assert_allclose(place.get(state)[2:], last, rtol=0, atol=2**-7 * np.abs(last).max())
    np.testing.assert_array_equal(place.get(state)[1], args["initial_state"][1])


@pytest.mark.parametrize(
    ("decay", "key_dim", "normalize"),
    [
        ("none", 64, False),
        ("head", 64, True),
        ("token", 64, False),
        ("token", 64, True),
        ("channel", 64, True),
        ("token", 256, True),
    ],
)
def test_packed_sequences_of_whole_chunks(place, decay, key_dim, normalize):
    """No rows need to be zeroed there, which would synchronise the warps: no warp overwrites the state that others still
    read."""
    args = inputs(1, 210, key_dim, decay=decay)
    state = abs(np.random.default_rng(1).standard_normal((2, HEADS, key_dim, 64))).astype(f32)
    args["initial_state"] = state
    if normalize:
        args["q"], args["k"] = abs(args["q"]), abs(args["k"])
        args["initial_state"] = state, np.ones((2, HEADS, key_dim), f32)
    args["cu_seqlens"] = np.array([0, 192, 210], np.int32)
    check(place, args, normalize=normalize)


@pytest.mark.parametrize(("decay", "sequences"), [("none", False), ("head", True), ("token", False), ("token", True)])
def test_key_dim_split_between_two_warpgroups(place, decay, sequences):
    """On Hopper two warpgroups have half of the channels each, for the normalizer, too."""
    args = inputs(1, 150, 256, decay=decay)
    args["q"], args["k"] = abs(args["q"]), abs(args["k"])
    count = 3 if sequences else 1
    state = abs(np.random.default_rng(1).standard_normal((count, HEADS, 256, 64))).astype(f32)
    args["initial_state"] = state, np.ones((count, HEADS, 256), f32)
    if sequences:
        args["cu_seqlens"] = np.array([0, 70, 70, 150], np.int32)
    check(place, args, normalize=True)


@pytest.mark.parametrize(("decay", "key_dim"), [("none", 64), ("head", 256), ("token", 64), ("token", 256)])
def test_segments(place, monkeypatch, nothing_known, decay, key_dim):
    """Three segments, whose last chunk is shorter: each starts from the state composed of those before it."""
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: 3)
    check(place, inputs(1, 300, key_dim, decay=decay))


@pytest.mark.parametrize(("decay", "family"), [("none", "sm_80"), ("head", "sm_90"), ("token", "sm_80"), ("token", "sm_90")])
def test_two_passes_in_two_calls(place, monkeypatch, nothing_known, decay, family):
    """segment_states and outputs_from_segments give the outputs of one call, and compose_segment_states its final state."""
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: 3)
    args = {name: place.put(x) for name, x in inputs(1, 300, 16, 16, decay=decay).items()}
    expected, state = (place.get(x) for x in linear(**args, return_state=True, family=family))
    start = args.pop("initial_state")
    local, total = members.segment_states(**args, family=family)
    q, k, v = (args.pop(name) for name in "qkv")
    out = members.outputs_from_segments(q, k, v, local, total, **args, initial_state=start, family=family)
    np.testing.assert_array_equal(place.get(out), expected)
    start, whole_decay = place.get(start), np.exp2(place.get(total).sum(2))
    shapes = whole_decay.shape, (*whole_decay.shape[:2], 16, 16)
    decay_out, state_out = (place.put(np.full(shape, np.nan, f32)) for shape in shapes)
    for initial, missing in (place.put(start.swapaxes(2, 3)), 0), (None, start * whole_decay[..., None]):
        members.compose_segment_states(local, total, initial, decay_out, state_out)
        np.testing.assert_allclose(place.get(state_out).swapaxes(2, 3) + missing, state, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(place.get(decay_out), whole_decay, rtol=1e-5)


@pytest.mark.parametrize(("decay", "gate"), [("head", -50.0), ("token", -50.0), ("token", -1e3), ("channel", -1e3)])
def test_strong_decays(place, decay, gate):
    """No overflow and no NaN if some tokens set the state to nearly 0 and others keep it."""
    args = inputs(1, 70, decay=decay)
    args["decay"] = np.where(np.random.default_rng(2).random(args["decay"].shape) < 0.3, gate, -0.01).astype(f32)
    check(place, args)


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_an_initial_state_that_decays_to_nothing(place, decay):
    """1e6 exp(-30) is 1e-7 in the first output."""
    args = inputs(1, 3, decay=decay)
    args["initial_state"] = np.full_like(args["initial_state"], 1e6)
    args["decay"] = np.full_like(args["decay"], -30)
    check(place, args)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**14])
def test_scales_beyond_the_range_of_float16_scores(place, scale):
    """float16 could not hold scores times such a scale, but it holds the outputs."""
    args = inputs(1, 70, decay="token", dtype=f16)
    if scale > 1:
        args["v"], args["initial_state"] = args["v"] * f16(2.0**-12), args["initial_state"] * f32(2.0**-12)
    else:
        args["v"], args["initial_state"] = args["v"] * f16(2.0**10), args["initial_state"] * f32(2.0**10)
    check(place, args, scale=scale)


WEAK, STRONG = 0.99, 1.01
STRENGTHS = [(64, bf16, f32, WEAK), (128, f16, f16, WEAK), (128, f16, f16, STRONG)]
STRENGTHS += [(256, bf16, bf16, STRONG)]  # a state that is read in two halves
IN_16_TOKENS = 64 / 15  # beyond this strength, one reference does not serve a warp's tokens either
STRENGTHS += [(64, bf16, f32, IN_16_TOKENS * 0.95), (128, f16, f16, IN_16_TOKENS * 0.85), (64, bf16, f32, IN_16_TOKENS * 2)]


@pytest.mark.parametrize("key_dim, dtype, gates, strength", STRENGTHS)
def test_strong_chunks_with_decays_of_channels(place, key_dim, dtype, gates, strength):
    """Chunks on both sides of the limit, in turn, of which the last is shorter."""
    args = inputs(1, 200, key_dim, 128, "channel", dtype=dtype, gates=gates)
    limit = 2 * channel_decay.MIN_LOG2_DECAY[tiles_f16 if dtype is f16 else tiles_bf16] / channel_decay.LOG2_E / 64
    args["decay"][:] = -0.01
    args["decay"][:, 64:128, :, ::3] = strength * limit
    args["decay"][:, 192:, :, 5] = 1.1 * limit
    check(place, args)


STEPS = [(bf16, -0.05, [17, 34], -np.inf), (f16, -0.9, [16, 32, 48], -4)]


@pytest.mark.parametrize(("dtype", "gate", "tokens", "great"), STEPS)
def test_decays_between_blocks_of_a_strong_chunk(place, dtype, gate, tokens, great):
    """From one block's reference to the next a channel decays by more than a dtype holds, in each block by less."""
    args = inputs(1, 64, 64, 64, "channel", dtype=dtype)
    args["decay"][:] = gate
    args["decay"][:, tokens] = great
    check(place, args)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype", "extremes"),
    [(64, 64, bf16, True), (128, 128, bf16, False), (128, 64, f16, True), (256, 64, bf16, True)],
)
def test_decays_of_models(place, key_dim, value_dim, dtype, extremes):
    args = inputs(1, 130, key_dim, value_dim, "channel", dtype=dtype)
    args["decay"] = draw_model_decays(args["decay"].shape, extremes)
    check(place, args)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_retention(place, layout):
    args = inputs(length=70)
    if layout == "bhsd":
        args |= {name: args[name].swapaxes(1, 2).copy() for name in "qkv"}
    check(place, args, retention, layout=layout, decays={"decay": np.log(1 - 2.0 ** (-5 - np.arange(HEADS)))})


def test_lightning(place):
    decays = {"decay": -8 / HEADS * (1 - 3 / 12) * np.arange(HEADS)}
    check(place, inputs(length=70), lightning, layer=3, layers=12, decays=decays)


def test_gla(place):
    check(place, inputs(length=20, decay="channel"), gla)


def test_a_sequence_in_two_calls(place):
    """The final state of the first call is the initial state of the second."""
    args = {name: x for name, x in inputs(1, 100, decay="head").items() if name != "initial_state"}
    first, rest = (
        {name: place.put(x[:, part].copy() if x.ndim > 1 else x) for name, x in args.items()}
        for part in (slice(0, 70), slice(70, 100))
    )
    whole = place.get(linear(**{name: place.put(x) for name, x in args.items()}))
    out, state = linear(**first, return_state=True)
    assert (place.get(out) == whole[:, :70]).all()
    ref, low = (reference.linear(**args, low=low)[0][:, 70:] for low in (False, True))
    reference.assert_close(place.get(linear(**rest, initial_state=state)), ref, low)


@pytest.mark.parametrize("decay", DECAYS)
def test_unaligned_rows(monkeypatch, nothing_known, decay):
    """Rows 4 bytes past a multiple of 16: chunk kernels take them by cp.async (test_chunk_ampere.py), with decays of channels
    copies of them by TMA."""
    args = inputs(1, 20, decay=decay)
    monkeypatch.setattr(token_loop, "launch", lambda *_, **__: pytest.fail("the token loop was launched"))
    unaligned = {name: np.full((1, 20, x.shape[2], 66), np.nan, bf16)[..., :64] for name, x in args.items() if name in "qkv"}
    for name, x in unaligned.items():
        x[...] = args[name]
    out = np.full((1, 20, HEADS, 64), np.nan, bf16)
    ref, _ = reference.linear(**args)
    assert linear(**args | unaligned, out=out) is out
    reference.assert_close(out, ref, reference.linear(**args, low=True)[0])


@pytest.mark.parametrize(("decay", "normalize"), pairs([*DECAYS, "channel"], [False, True]))
def test_no_final_state_without_return_state(place, decay, normalize):
    """The outputs are the same, and no memory is allocated for states."""
    args = {name: place.put(abs(x) if name in "qk" else x) for name, x in inputs(1, 70, decay=decay).items()}
    state = args.pop("initial_state")
    if not normalize:
        args["initial_state"] = state
    out, _ = linear(**args, normalize=normalize, return_state=True)
    assert (place.get(linear(**args, normalize=normalize)) == place.get(out)).all()
    problem = LINEAR.problem({name: describe(args[name], name).form for name in LINEAR.names if name in args})
    plan = members._linear.planner(problem, None, normalize, False, None, False, "states")
    normalizers = [((1, 70, HEADS), "float32")] if normalize and decay != "channel" else []
    assert list(plan.scratch) == normalizers


@pytest.mark.parametrize("length", [0, 5])
def test_no_token_or_no_sequence(length):
    args = inputs(2 if length == 0 else 0, length, decay="token")
    out, state = linear(**args, return_state=True)
    assert out.shape == args["v"].shape and (state == args["initial_state"]).all()
    assert linear(**args).shape == out.shape


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(normalize=True), "initial_state: must be a pair (state, z) with normalize=True, not ndarray"),
        (dict(initial_state=(1, 2)), "initial_state: must be an array, not a pair"),
        (dict(decay=np.zeros(3, f32)), "decay: heads must equal v's: "),
        (dict(k=None), "k: must be an array"),
    ],
)
def test_errors(change, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        linear(**inputs() | change)
    assert str(raised.value).startswith(message)


def test_named_members_take_no_decay():
    args = inputs()
    for call in (lambda: retention(**args, decay=None), lambda: lightning(**args, layer=1, layers=2, decay=None)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'decay'"):
            call()


@pytest.mark.parametrize(("function", "more"), [(retention, []), (lightning, ["layer", "layers"]), (gla, ["decay"])])
def test_named_members_have_the_parameters_of_linear(function, more):
    """With the same names and defaults; the error about an unknown name speaks of the function that was called."""
    of_linear, parameters = (inspect.signature(f).parameters for f in (linear, function))
    assert list(parameters) == ["q", "k", "v", *more, *(name for name in list(of_linear)[3:] if name != "decay")]
    assert all(parameters[name] == of_linear[name] for name in parameters if name not in more)
    message = rf"^{function.__name__}\(\) got an unexpected keyword argument 'output_final_state'; here that is return_state$"
    with pytest.raises(TypeError, match=message):
        function(**inputs(), **dict.fromkeys(more, 1), output_final_state=True)


def test_unknown_arguments_without_a_hint():
    """Python's own message; what is missing is explained after it."""
    with pytest.raises(TypeError, match="argument 'tiles'$"):
        retention(**inputs(), tiles=1)
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'k' and 'v'; q, k: "):
        linear(1)


def test_each_option_reaches_linear(monkeypatch):
    """retention, lightning and gla pass all options on by their names."""
    monkeypatch.setattr(members, "linear", lambda *arrays, decay, **options: options)
    args = {name: name for name in list(inspect.signature(linear).parameters)[4:]}
    arrays = [inputs(decay="channel")[name] for name in ("q", "k", "v", "decay")]
    assert retention(*arrays[:3], **args) == lightning(*arrays[:3], 1, 2, **args) == gla(*arrays, **args) == args


@pytest.mark.parametrize("decay", DECAYS)
def test_the_token_loop(place, monkeypatch, nothing_known, decay):
    """Outputs have one rounding error, states a few of float32."""
    args = inputs(1, 40, 32, 48, decay)
    args["initial_state"] = np.random.default_rng(3).standard_normal((1, HEADS, 32, 48)).astype(f32)
    monkeypatch.setattr(recurrent_checks, "has_channel_decay", lambda _: True)
    monkeypatch.setattr(members, "serves_gla_chunks", lambda _: False)
    monkeypatch.setattr(recurrent_chunks, "plan_token_decay", lambda *_, **__: pytest.fail("a chunk kernel was launched"))
    out, state = linear(**{name: place.put(x) for name, x in args.items()}, return_state=True, family="sm_80")
    ref, last = reference.linear(**args)
    reference.assert_close(place.get(out), ref, ref.astype(bf16))
    np.testing.assert_allclose(place.get(state), last, rtol=1e-5, atol=1e-4)
