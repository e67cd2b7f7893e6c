"""attention/recurrent/linear.py and token_loop.py: every member beside its recurrence in float64, in chunks or not."""

import inspect

import ml_dtypes
import numpy as np
import pytest

from attention import reference
from attention.recurrent import chunks, rules
from attention.recurrent import linear as members
from attention.recurrent.kernels import decay_frame, token_loop
from attention.recurrent.linear import LINEAR, gla, lightning, linear, retention
from tiles import bf16 as tiles_bf16
from tiles import fp16 as tiles_f16
from tiles.frameworks import describe

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
HEADS = 2
DECAYS = {"none": "", "head": "h", "token": "bth", "channel": "bthk"}  # axes: batch, tokens, heads, keys' columns


def inputs(batch=2, length=70, key_dim=64, value_dim=64, decay="none", key_heads=1, dtype=bf16, gates=f32, seed=0, heads=HEADS):
    """The arguments of a call, and a state to begin with."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, batch, length, key_heads, key_dim)).astype(dtype)
    v = rng.standard_normal((batch, length, heads, value_dim)).astype(dtype)
    given = dict(q=q, k=k, v=v, initial_state=rng.standard_normal((batch, heads, key_dim, value_dim)).astype(f32))
    if axes := DECAYS[decay]:
        sizes = dict(b=batch, t=length, h=heads, k=key_dim)
        given["decay"] = -rng.exponential(0.2, [sizes[axis] for axis in axes]).astype(gates)
    return given


def check(place, given, function=linear, **options):
    """A call in this place, the state given back: both beside the reference, whose decays may be the function's own."""
    own = options.pop("own", {})
    on = {name: tuple(map(place.put, x)) if isinstance(x, tuple) else place.put(x) for name, x in given.items()}
    out, state = function(**on, **options, return_state=True)
    known = {name: x for name, x in options.items() if name not in ("layer", "layers")}
    ref, last = reference.linear(**given, **known, **own)
    low, _ = reference.linear(**given, **known, **own, low=True)
    reference.assert_close(place.get(out), ref, low)
    for got, want in zip(*((x if isinstance(x, tuple) else (x,)) for x in (state, last)), strict=True):
        np.testing.assert_allclose(place.get(got), want, rtol=0, atol=2**-7 * np.abs(want).max())


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 63, 64, 150])
def test_lengths(place, length, decay):
    check(place, inputs(1, length, decay=decay))


@pytest.mark.parametrize("key_dim, value_dim", [(16, 16), (128, 128), (80, 48), (256, 64)])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_sizes(place, key_dim, value_dim, decay):
    check(place, inputs(1, 40, key_dim, value_dim, decay))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_shared_keys(place, key_heads, decay):
    check(place, inputs(length=20, decay=decay, key_heads=key_heads, heads=4))


@pytest.mark.parametrize("dtype, gates", [(f16, f32), (bf16, bf16), (f16, f16)])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_dtypes(place, dtype, gates, decay):
    check(place, inputs(1, 70, decay=decay, dtype=dtype, gates=gates))


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_layout_and_scale(place, decay):
    given = inputs(length=20, decay=decay)
    turned = {name: x.swapaxes(1, 2).copy() if name != "initial_state" else x for name, x in given.items()}
    check(place, turned, layout="bhsd", scale=0.3)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_a_decay_that_forgets_all(place, decay):
    given = inputs(1, 70, decay=decay)
    given["decay"][0, [20, 66]] = -np.inf
    check(place, given)


@pytest.mark.parametrize("scale", [0.0, -0.3, 7.0])
@pytest.mark.parametrize("decay", DECAYS)
def test_any_scale(place, decay, scale):
    check(place, inputs(length=70, decay=decay), scale=scale)


@pytest.mark.parametrize("decay, key_dim", [*((decay, 64) for decay in DECAYS), ("channel", 144)])
def test_normalize(place, decay, key_dim):
    given = inputs(length=30, key_dim=key_dim, decay=decay)
    small = given["q"].dtype.type(2**-12)  # so that a divisor is, too, but not beside what is added to it
    given["q"], given["k"] = small * abs(given["q"]), abs(given["k"])
    given["initial_state"] = abs(given["initial_state"]), np.ones((2, HEADS, key_dim), f32)
    check(place, given, normalize=True)


@pytest.mark.parametrize("ends", [np.int32, np.int64])
@pytest.mark.parametrize("decay", DECAYS)
def test_sequences_of_one_batch(place, decay, ends):
    """One is empty; a NaN in the first does not reach the others."""
    given = inputs(1, 150, decay=decay)
    given["initial_state"] = np.random.default_rng(1).standard_normal((3, HEADS, 64, 64)).astype(f32)
    given["cu_seqlens"] = np.array([0, 70, 70, 150], ends)
    given["v"][0, 69] = np.nan
    out, state = linear(**{name: place.put(x) for name, x in given.items()}, return_state=True)
    del given["cu_seqlens"]
    tail = {name: x[:, 70:] if x.ndim > 1 and name != "initial_state" else x for name, x in given.items()}
    tail["initial_state"] = given["initial_state"][2:]
    ref, last = reference.linear(**tail)
    low, _ = reference.linear(**tail, low=True)
    reference.assert_close(place.get(out)[:, 70:], ref, low)
    np.testing.assert_allclose(place.get(state)[2:], last, rtol=0, atol=2**-7 * np.abs(last).max())
    np.testing.assert_array_equal(place.get(state)[1], given["initial_state"][1])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("decay", "key_dim"), [*((decay, 64) for decay in DECAYS), ("token", 256)])
def test_sequences_of_many_chunks(place, decay, key_dim, normalize):
    """Whole ones, where nothing has to be cleared, for which the warps would meet: none replaces the state that others read."""
    given = inputs(1, 210, key_dim, decay=decay)
    state = abs(np.random.default_rng(1).standard_normal((2, HEADS, key_dim, 64))).astype(f32)
    given["initial_state"] = state
    if normalize:
        given["q"], given["k"] = abs(given["q"]), abs(given["k"])
        given["initial_state"] = state, np.ones((2, HEADS, key_dim), f32)
    given["cu_seqlens"] = np.array([0, 192, 210], np.int32)
    check(place, given, normalize=normalize)


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("decay", ["none", "head", "token"])
def test_keys_of_two_parts(place, decay, sequences):
    """On Hopper two warpgroups have half of the keys each, of the normalizer, too."""
    given = inputs(1, 150, 256, decay=decay)
    given["q"], given["k"] = abs(given["q"]), abs(given["k"])
    count = 3 if sequences else 1
    state = abs(np.random.default_rng(1).standard_normal((count, HEADS, 256, 64))).astype(f32)
    given["initial_state"] = state, np.ones((count, HEADS, 256), f32)
    if sequences:
        given["cu_seqlens"] = np.array([0, 70, 70, 150], np.int32)
    check(place, given, normalize=True)


@pytest.mark.parametrize("key_dim", [64, 256])
@pytest.mark.parametrize("decay", ["none", "head", "token"])
def test_segments(place, monkeypatch, nothing_known, decay, key_dim):
    """A sequence in three, the last chunk not whole: each starts from what those before it add up to."""
    monkeypatch.setattr(chunks, "_count_segments", lambda *_: 3)
    check(place, inputs(1, 300, key_dim, decay=decay))


@pytest.mark.parametrize(("decay", "family"), [("none", "sm_80"), ("head", "sm_90"), ("token", "sm_80"), ("token", "sm_90")])
def test_both_passes_apart_are_what_they_are_together(place, monkeypatch, nothing_known, decay, family):
    """And what segments leave makes up the state behind the last token: attention.parallel composes it."""
    monkeypatch.setattr(chunks, "_count_segments", lambda *_: 3)
    given = {name: place.put(x) for name, x in inputs(1, 300, 16, 16, decay=decay).items()}
    wanted, state = (place.get(x) for x in linear(**given, return_state=True, family=family))
    first = given.pop("initial_state")
    local, total = members.segment_states(**given, family=family)
    q, k, v = (given.pop(name) for name in "qkv")
    out = members.outputs_from_segments(q, k, v, local, total, **given, initial_state=first, family=family)
    np.testing.assert_array_equal(place.get(out), wanted)
    first, kept = place.get(first), np.exp2(place.get(total).sum(2))
    m, left = (place.put(np.full(shape, np.nan, f32)) for shape in (kept.shape, (*kept.shape[:2], 16, 16)))
    for begin, missing in (place.put(first.swapaxes(2, 3)), 0), (None, first * kept[..., None]):
        members.compose_segment_states(local, total, begin, m, left)
        np.testing.assert_allclose(place.get(left).swapaxes(2, 3) + missing, state, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(place.get(m), kept, rtol=1e-5)


@pytest.mark.parametrize(
    ("decay", "gate"), [("head", -50.0), ("head", -1e3), ("token", -50.0), ("token", -1e3), ("channel", -1e3)]
)
def test_strong_decays(place, decay, gate):
    """No overflow and no NaN, where some tokens forget all and others nothing."""
    given = inputs(1, 70, decay=decay)
    given["decay"] = np.where(np.random.default_rng(2).random(given["decay"].shape) < 0.3, gate, -0.01).astype(f32)
    check(place, given)


@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_a_state_that_is_forgotten(place, decay):
    """exp(-30) of a million is nothing."""
    given = inputs(1, 3, decay=decay)
    given["initial_state"] = np.full_like(given["initial_state"], 1e6)
    given["decay"] = np.full_like(given["decay"], -30)
    check(place, given)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**14])
def test_scales_that_float16_does_not_hold(place, scale):
    """Scores times such a scale would be too small or too large for it, outputs are not."""
    given = inputs(1, 70, decay="token", dtype=f16)
    if scale > 1:
        given["v"], given["initial_state"] = given["v"] * f16(2.0**-12), given["initial_state"] * f32(2.0**-12)
    else:
        given["v"], given["initial_state"] = given["v"] * f16(2.0**10), given["initial_state"] * f32(2.0**10)
    check(place, given, scale=scale)


WEAK, STRONG = 0.99, 1.01
STRENGTHS = [(64, bf16, f32, WEAK), (64, bf16, f32, STRONG), (128, f16, f16, WEAK), (128, f16, f16, STRONG)]
STRENGTHS += [(256, bf16, bf16, WEAK)]


@pytest.mark.parametrize("key_dim, dtype, gates, strength", STRENGTHS)
def test_channels_as_strong_as_a_dtype_holds(place, key_dim, dtype, gates, strength):
    """On both sides of the limit, weak chunks and strong ones in turn, a last one that is not whole."""
    given = inputs(1, 200, key_dim, 128, "channel", dtype=dtype, gates=gates)
    limit = 2 * decay_frame.MIN_LOG2_DECAY[tiles_f16 if dtype is f16 else tiles_bf16] / decay_frame.LOG2_E / 64
    given["decay"][:] = -0.01
    given["decay"][:, 64:128, :, ::3] = strength * limit
    given["decay"][:, 192:, :, 5] = 1.1 * limit
    check(place, given)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_retention(place, layout):
    given = inputs(length=70)
    if layout == "bhsd":
        given |= {name: given[name].swapaxes(1, 2).copy() for name in "qkv"}
    check(place, given, retention, layout=layout, own={"decay": np.log(1 - 2.0 ** (-5 - np.arange(HEADS)))})


def test_lightning(place):
    own = {"decay": -8 / HEADS * (1 - 3 / 12) * np.arange(HEADS)}
    check(place, inputs(length=70), lightning, layer=3, layers=12, own=own)


def test_gla(place):
    check(place, inputs(length=20, decay="channel"), gla)


def test_the_parts_of_a_sequence(place):
    """A state given back begins what follows."""
    given = {name: x for name, x in inputs(1, 100, decay="head").items() if name != "initial_state"}
    first, rest = (
        {name: place.put(x[:, part].copy() if x.ndim > 1 else x) for name, x in given.items()}
        for part in (slice(0, 70), slice(70, 100))
    )
    whole = place.get(linear(**{name: place.put(x) for name, x in given.items()}))
    out, state = linear(**first, return_state=True)
    assert (place.get(out) == whole[:, :70]).all()
    ref, low = (reference.linear(**given, low=low)[0][:, 70:] for low in (False, True))
    reference.assert_close(place.get(linear(**rest, initial_state=state)), ref, low)


@pytest.mark.parametrize("decay", DECAYS)
def test_arrays_that_tma_cannot_read(monkeypatch, nothing_known, decay):
    """Rows 4 bytes past a multiple of 16: in chunks by cp.async (test_chunk_ampere.py), with decays of channels token by token.
    Without return_state there is nothing but `out`."""
    given = inputs(1, 20, decay=decay)
    calls, launch = [], token_loop.launch
    monkeypatch.setattr(token_loop, "launch", lambda *args: calls.append(args) or launch(*args))
    apart = {name: np.full((1, 20, x.shape[2], 66), np.nan, bf16)[..., :64] for name, x in given.items() if name in "qkv"}
    for name, x in apart.items():
        x[...] = given[name]
    out = np.full((1, 20, HEADS, 64), np.nan, bf16)
    ref, _ = reference.linear(**given)
    assert linear(**given | apart, out=out) is out and len(calls) == (decay == "channel")
    reference.assert_close(out, ref, reference.linear(**given, low=True)[0])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_a_state_nobody_wants_is_not_stored(place, decay, normalize):
    """The same outputs, and no memory for states."""
    given = {name: place.put(abs(x) if name in "qk" else x) for name, x in inputs(1, 70, decay=decay).items()}
    state = given.pop("initial_state")
    if not normalize:
        given["initial_state"] = state
    out, _ = linear(**given, normalize=normalize, return_state=True)
    assert (place.get(linear(**given, normalize=normalize)) == place.get(out)).all()
    problem = LINEAR.problem({name: describe(given[name], name).form for name in LINEAR.names if name in given})
    plan = members._linear.planner(problem, None, normalize, False, None)
    divisors = [((1, 70, HEADS), "float32")] if normalize and decay != "channel" else []
    assert list(plan.scratch) == divisors


@pytest.mark.parametrize("length", [0, 5])
def test_no_token_or_no_sequence(length):
    given = inputs(2 if length == 0 else 0, length, decay="token")
    out, state = linear(**given, return_state=True)
    assert out.shape == given["v"].shape and (state == given["initial_state"]).all()
    assert linear(**given).shape == out.shape


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


def test_named_members_have_their_own_decays():
    given = inputs()
    for call in (lambda: retention(**given, decay=None), lambda: lightning(**given, layer=1, layers=2, decay=None)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'decay'"):
            call()


@pytest.mark.parametrize(("function", "more"), [(retention, []), (lightning, ["layer", "layers"]), (gla, ["decay"])])
def test_named_members_take_what_linear_takes(function, more):
    """By the same names, with the same defaults; and an unknown name is refused by the function that was called."""
    whole, mine = (inspect.signature(f).parameters for f in (linear, function))
    assert list(mine) == ["q", "k", "v", *more, *(name for name in list(whole)[3:] if name != "decay")]
    assert all(mine[name] == whole[name] for name in mine if name not in more)
    message = rf"^{function.__name__}\(\) got an unexpected keyword argument 'output_final_state'; here that is return_state$"
    with pytest.raises(TypeError, match=message):
        function(**inputs(), **dict.fromkeys(more, 1), output_final_state=True)


def test_names_that_are_nowhere():
    """As Python says it: of a function that has no such thing, and of errors that come from further inside."""
    with pytest.raises(TypeError, match="argument 'layer_idx'$"):
        retention(**inputs(), layer_idx=1)
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'k' and 'v'$"):
        linear(1)


def test_each_option_reaches_linear(monkeypatch):
    """Under its own name."""
    monkeypatch.setattr(members, "linear", lambda *arrays, decay, **options: options)
    given = {name: name for name in list(inspect.signature(linear).parameters)[4:]}
    arrays = [inputs(decay="channel")[name] for name in ("q", "k", "v", "decay")]
    assert retention(*arrays[:3], **given) == lightning(*arrays[:3], 1, 2, **given) == gla(*arrays, **given) == given


@pytest.mark.parametrize("decay", DECAYS)
def test_the_walk_on_its_own(place, monkeypatch, nothing_known, decay):
    """Token by token everything is right to one rounding, states to a few of float32."""
    given = inputs(1, 40, 32, 48, decay)
    given["initial_state"] = np.random.default_rng(3).standard_normal((1, HEADS, 32, 48)).astype(f32)
    monkeypatch.setattr(rules, "has_channel_decay", lambda _: True)  # which no chunk kernel of sm_80 serves
    monkeypatch.setattr(chunks, "plan_token_decay", lambda *_, **__: pytest.fail("in chunks"))
    out, state = linear(**{name: place.put(x) for name, x in given.items()}, return_state=True, family="sm_80")
    ref, last = reference.linear(**given)
    reference.assert_close(place.get(out), ref, ref.astype(bf16))
    np.testing.assert_allclose(place.get(state), last, rtol=1e-5, atol=1e-4)
