"""Tests of all members of linear attention: initial states, packed sequences, gates of any size, arrays of all frameworks, the
argument `family`."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from members import BF16, F32, FP16, HEADS, MEMBERS
from poison import Packing, as_on_a_device, poisoned

from attention import delta_rule_backward, linear_backward, reference
from attention.public.linear_family import linear
from attention.public.token_steps import linear_step

STATED = {name: member for name, member in MEMBERS.items() if member.start}
WRAPPERS = "retention", "lightning"  # which have the kernels of "decays of heads": test_linear.py looks at their decays


def each(members):
    """These members, of which CI leaves wrappers out."""
    return [pytest.param(member, id=name, marks=[pytest.mark.release] * (name in WRAPPERS)) for name, member in members.items()]


over_members = pytest.mark.parametrize("member", each(MEMBERS))
stated = pytest.mark.parametrize("member", each(STATED))


def both(state):
    """A state as a tuple of arrays: (S,) or (S, z)."""
    return state if isinstance(state, tuple) else (state,)


def of_first_head(tokens, fixed):
    """Arrays of tokens and others, of the first head alone."""
    return {name: x[:, :, :1].copy() for name, x in tokens.items()}, {name: x[:1].copy() for name, x in fixed.items()}


# ---- as compiled -----------------------------------------------------------------------------------------------------
KERNELS = ["linear, divided", "based"]
# with segments: test_segments.py; machine code of Hedgehog's: test_hedgehog.py
ELSEWHERE = ["decays of heads", "simple GLA", "GLA", "KDA", "hedgehog"]


@pytest.mark.parametrize("name", KERNELS + [pytest.param(name, marks=pytest.mark.release) for name in ELSEWHERE])
def test_as_compiled_for_hopper(name, as_compiled):
    """The PTX of the kernels of these members, for three chunks of which the last is shorter, of a head."""
    member = MEMBERS[name]
    as_compiled("sm_90a")
    tokens, fixed = of_first_head(*member.inputs(140))
    member.assert_close(member.run(tokens | fixed)[0], tokens | fixed)


@pytest.mark.parametrize("name", ["Mamba-2", "gated delta rule"])
def test_strong_chunks_as_compiled(name, as_compiled):
    """The branch for chunks that decay by more than numbers can hold, of two heads that share keys; the last chunk, which is
    shorter, decays by less."""
    as_compiled("sm_90a")
    tokens, fixed = MEMBERS[name].inputs(90)
    tokens["dt" if name == "Mamba-2" else "decay"][:, :64] *= 40
    MEMBERS[name].assert_close(MEMBERS[name].run(tokens | fixed)[0], tokens | fixed)


@pytest.mark.parametrize("name", ["linear, divided", pytest.param("KDA", marks=pytest.mark.release)])
def test_as_compiled_for_all(name, as_compiled):
    """The PTX of kernels for every GPU since Ampere."""
    as_compiled("sm_80")
    member = MEMBERS[name]
    tokens, fixed = member.inputs(70)
    member.assert_close(member.run(tokens | fixed, family="sm_80")[0], tokens | fixed)


# ---- states ----------------------------------------------------------------------------------------------------------
@stated
@settings(max_examples=2, deadline=None)
@given(length=some.integers(2, 140), cuts=some.sets(some.integers(1, 139), min_size=1, max_size=2), seed=some.integers(0, 9))
def test_a_sequence_in_several_calls(member, length, cuts, seed):
    """The final state of each is the initial state of the next, wherever the sequence is cut."""
    tokens, fixed = member.inputs(length, seed=seed)
    ends, outs, state = [0, *sorted(cut for cut in cuts if cut < length), length], [], None
    for part in (slice(*pair) for pair in itertools.pairwise(ends)):
        out, state = member.run({name: x[:, part] for name, x in tokens.items()} | fixed, state)
        outs.append(out)
    member.assert_close(np.concatenate(outs, axis=1), tokens | fixed)
    _, last = member.run(tokens | fixed)
    for outputs, want in zip(both(state), both(last), strict=True):
        np.testing.assert_allclose(outputs, want, rtol=0, atol=2**-6 * np.abs(want).max())


STEPS = [name for name in STATED if name not in ("linear, divided", "based")]


@pytest.mark.parametrize("name", STEPS)
def test_linear_step_after_a_sequence(place, name):
    """linear_step from the final state of 70 tokens computes token 71."""
    member = MEMBERS[name]
    tokens, fixed = member.inputs(71)
    on = {key: place.put(x[:, :70].copy()) for key, x in tokens.items()} | {key: place.put(x) for key, x in fixed.items()}
    _, state = member.run(on)
    last = {key: x[:, 70] for key, x in tokens.items()}
    scale, after = None, lambda o: o
    if name == "Mamba-2":
        state = place.put(np.ascontiguousarray(place.get(state).swapaxes(2, 3)))
        x, z, values = last["x"], last.pop("z").astype(float), last.pop("x").astype(F32) * last["dt"][..., None]
        after = lambda o: (o + fixed["D"][:, None] * x.astype(float)) * z / (1 + np.exp(-z))
        last = dict(q=last["C"], k=last["B"], v=values.astype(BF16), decay=last["dt"] * fixed["A"])
        scale = 1
    elif name == "based, sums":
        last, scale = features_of(last), 1
    elif name in ("retention", "lightning"):
        last["decay"] = member.formula.args[0].astype(F32)
    else:
        last |= fixed
    out = place.get(linear_step(state, **{key: place.put(np.ascontiguousarray(x)) for key, x in last.items()}, scale=scale))
    ref, low = (member.formula(**tokens, **fixed, **member.options, low=low)[0][:, 70] for low in (False, True))
    reference.assert_close(after(out.astype(float)).astype(BF16), ref, low, factor=3)


def features_of(token):
    """f(x) of based for one token, as attention.based's docstring defines it."""

    def features(x, half):
        x, out = x.astype(float), np.zeros((*x.shape[:-1], 160))
        for i, d in itertools.product(range(16), range(9)):
            if d < 8 or i < 8:
                out[..., 16 * d + i] = x[..., i] * x[..., (i + d) % 16] * (half if d == 0 else 1)
        out[..., 136], out[..., 144:] = 1, x
        return out.astype(BF16)

    return dict(q=features(token["q"].astype(float) / 4, 1), k=features(token["k"], 0.5), v=token["v"])


# ---- sequences one behind the other ----------------------------------------------------------------------------------
PACKED = Packing([0, 65, 0, 1], neighbour=2, nobodys=66)
OTHERS = (*WRAPPERS, "based, sums", "delta rule, decays of heads")
FAMILIES = [pytest.param(name, None, marks=[pytest.mark.release] * (name in OTHERS)) for name in MEMBERS] + [
    pytest.param(name, "sm_80", marks=[pytest.mark.release] * (name in ("simple GLA", "KDA")))
    for name in ("linear, divided", "Mamba-2", "simple GLA", "GLA", "gated delta rule", "KDA")
]


@pytest.mark.parametrize(("name", "family"), FAMILIES)
def test_packed_sequences_among_poison(place, monkeypatch, name, family):
    """A sequence with a token more than a chunk, and one of a token, next to poison: each has the bits that it has by itself.
    One without tokens keeps its state; padding has outputs of 0."""
    as_on_a_device(monkeypatch)
    member, more = MEMBERS[name], {} if family is None else {"family": family}
    tokens, fixed = member.inputs(PACKED.cu_seqlens[-1])
    _, one = member.run({key: x[:, :1].copy() for key, x in tokens.items()} | fixed)
    starts = [np.repeat(x, len(PACKED.cu_seqlens) - 1, axis=0) for x in both(one)] if member.start else []
    of_all = [poisoned((len(PACKED.ends) - 1, *x.shape[1:]), F32) for x in starts]
    for x, start in zip(of_all, starts, strict=True):
        x[PACKED.which] = start
    states = lambda x: (place.put(x[0]) if len(x) == 1 else tuple(map(place.put, x))) if x else None
    fixed = {key: place.put(x) for key, x in fixed.items()}
    put = {key: place.put(x) for key, x in tokens.items()} | fixed
    clean, expected = member.run(put, states(starts), cu_seqlens=place.put(PACKED.cu_seqlens), **more)
    put = {key: place.put(PACKED.spread(x)) for key, x in tokens.items()} | fixed
    out, actual = member.run(put, states(of_all), cu_seqlens=place.put(PACKED.ends), **more)
    out, clean = (place.get(x).astype(F32) for x in (out, clean))
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(PACKED.gather(out), clean)
    assert (out[:, PACKED.nobodys] == 0).all()
    for outputs, want, start in zip(both(actual), both(expected), starts, strict=True) if member.start else ():
        np.testing.assert_array_equal(place.get(outputs)[PACKED.which], place.get(want))
        np.testing.assert_array_equal(place.get(want)[[0, 2]], start[[0, 2]])


@over_members
def test_packed_sequences_are_sequences(member):
    """Each sequence is one of a batch of its own."""
    tokens, fixed = member.inputs(75)
    out, _ = member.run(tokens | fixed, cu_seqlens=np.array([0, 0, 5, 5, 75, 75], np.int32))
    for part in slice(5), slice(5, None):
        member.assert_close(out[:, part], {name: x[:, part] for name, x in tokens.items()} | fixed)


# ---- float16 --------------------------------------------------------------------------------------------------------
NARROW = {"based": 1e3, "based, sums": 1e3}  # members whose state grows faster: what values are multiplied by there


@over_members
@pytest.mark.parametrize("great", ["values", "keys", "queries"])
def test_the_range_of_float16(member, great):
    """Intermediate results overflow no sooner than arrays and outputs: values of 30000, keys a hundred times as long as
    queries, and the other way round."""
    name = next(name for name, actual in MEMBERS.items() if actual is member)
    tokens, fixed = member.inputs(70) if name in ("retention", "lightning") else of_first_head(*member.inputs(70))
    by = {"values": {"v": NARROW.get(name, 8e3)}, "keys": {"k": 100, "q": 0.01}, "queries": {"k": 0.01, "q": 100}}[great]
    if "beta" in tokens and great == "keys":  # beta |k|^2 decides what is stable
        tokens["beta"] /= 1e3
        by = {"v": 1e3, "k": 30, "q": 1 / 30}
    by = {{"v": "x", "k": "B", "q": "C"}.get(key, key) if "x" in tokens else key: factor for key, factor in by.items()}
    arrays = tokens | fixed
    arrays = {key: (x.astype(F32) * by.get(key, 1)).astype(FP16) if x.dtype == BF16 else x for key, x in arrays.items()}
    ref, low = (member.formula(**arrays, **member.options, low=low)[0] for low in (False, True))
    within = abs(ref) < 65504
    out = member.run(arrays)[0].astype(float)
    reference.assert_close(np.where(within, out, 0).astype(FP16), np.where(within, ref, 0), np.where(within, low, 0), factor=4)
    assert np.isinf(out[abs(ref) > 65600]).all()


# ---- gates -----------------------------------------------------------------------------------------------------------
GATED = ["simple GLA", "GLA", "gated delta rule", "KDA"]


@pytest.mark.parametrize("name", GATED)
def test_a_long_sequence_of_any_gates(name):
    """1k tokens with gates from 0 to -50: no overflow, no NaN, and the last outputs are right. The reference starts after a
    gate of -50, which has multiplied the state by 1e-22."""
    member, length, known = MEMBERS[name], 2**10, 200
    tokens, _ = member.inputs(length, seed=3)
    tokens = {key: x[:, :, :1].copy() for key, x in tokens.items()}
    decay = tokens["decay"]
    decay *= 0.1
    decay[:, 250:300] = -50 * np.random.default_rng(4).random(decay[:, 250:300].shape)
    decay[:, 500:750] = 0
    decay[:, 850:875] = decay[:, -known] = -50
    out, state = member.run(tokens)
    assert np.isfinite(out.astype(F32)).all() and np.isfinite(state).all()
    member.assert_close(out[:, -known:], {key: x[:, -known:] for key, x in tokens.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("name", GATED)
def test_a_million_tokens(card, name):
    """One head, with gates from 0 to -50. Those of the last 2^13 tokens multiply the state by 1e-14: there the reference
    starts, and its last 2^10 outputs and its final state are compared."""
    member, length, since, judged = MEMBERS[name], 2**20, 2**13, 2**10
    tokens, _ = member.inputs(length, seed=5)
    tokens = {key: x[:, :, :1].copy() for key, x in tokens.items()}
    decay = tokens["decay"]
    decay *= 0.004 / -decay[:, -since:].mean()
    decay[:, 5000:6000] = -50 * np.random.default_rng(6).random(decay[:, 5000:6000].shape)
    decay[:, 10**5 : 2 * 10**5] = 0
    out, state = member.run({key: card.put(x) for key, x in tokens.items()})
    assert np.isfinite(card.get(out).astype(F32)).all()
    tail = {key: x[:, -since:] for key, x in tokens.items()}
    (ref, last), (low, _) = (member.formula(**tail, low=low) for low in (False, True))
    reference.assert_close(card.get(out)[:, -judged:], ref[:, -judged:], low[:, -judged:])
    np.testing.assert_allclose(card.get(state), last, rtol=0, atol=2**-6 * np.abs(last).max())


# ---- decays ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("layout", "dtype"), [("bshd", F32), ("bhsd", BF16), ("bshd", np.dtype(np.float16))], ids=str)
@pytest.mark.parametrize("name", ["decays of heads", *GATED, "delta rule, decays of heads"])
def test_shapes_and_layouts_of_decays(name, dtype, layout):
    member = MEMBERS[name]
    tokens, fixed = member.inputs(70, batch=2)
    arrays = {key: x.astype(dtype) if key in ("decay", "beta") else x for key, x in (tokens | fixed).items()}
    if layout == "bhsd":
        arrays = {key: x.swapaxes(1, 2) if x.ndim > 1 else x for key, x in arrays.items()}
    out, _ = member.run(arrays, layout=layout)
    ref, low = (member.formula(**arrays, layout=layout, low=low)[0] for low in (False, True))
    reference.assert_close(out, ref, low)


# ---- a family by hand --------------------------------------------------------------------------------------------------
CHOOSES = [name for name in MEMBERS if name not in ("based", "based, sums", "hedgehog")]


@pytest.mark.parametrize("family", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", CHOOSES)
def test_family(place, name, family):
    member = MEMBERS[name]
    tokens, fixed = member.inputs(80)
    out, _ = member.run({key: place.put(x) for key, x in (tokens | fixed).items()}, family=family)
    member.assert_close(place.get(out), tokens | fixed)


@pytest.mark.parametrize("name", CHOOSES)
def test_unknown_family(name):
    tokens, fixed = MEMBERS[name].inputs(10)
    with pytest.raises(ValueError, match=r"^family: must be None or one of \('sm_80', 'sm_90'\): family='sm_70'"):
        MEMBERS[name].run(tokens | fixed, family="sm_70")


@pytest.mark.parametrize("name", CHOOSES)
def test_unknown_family_without_tokens(name):
    """attention.parallel makes such a call for its errors, before ranks wait for each other."""
    tokens, fixed = MEMBERS[name].inputs(0)
    with pytest.raises(ValueError, match=r"^family: must be None or one of \('sm_80', 'sm_90'\): family='sm_70'"):
        MEMBERS[name].call(**tokens, **fixed, family="sm_70")


@pytest.mark.parametrize("name", ["GLA", "KDA"])
def test_sm_90_copies_decays_that_tma_cannot_read(name):
    """The results have the bits of those of aligned arrays."""
    tokens, _ = MEMBERS[name].inputs(10)
    shifted = np.zeros((1, 10, HEADS, 66), F32)[..., 2:]
    shifted[...] = tokens["decay"]
    expected = MEMBERS[name].run(tokens, family="sm_90")
    for x, y in zip(MEMBERS[name].run(tokens | {"decay": shifted}, family="sm_90"), expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("name", "backward"),
    [("GLA", linear_backward), ("gated delta rule", delta_rule_backward), ("KDA", delta_rule_backward)],
)
@pytest.mark.parametrize("family", [None, "sm_90"])
def test_gradients_copy_arrays_that_tma_cannot_read(name, backward, family):
    """As forward does: kernels for Hopper serve them, and the results have the bits of those of aligned arrays."""
    tokens, _ = MEMBERS[name].inputs(10)
    tokens["dout"] = tokens["v"][..., ::-1].copy()
    shifted = {name: x if x.ndim < 4 else np.concatenate([x[..., :2], x], -1)[..., 2:] for name, x in tokens.items()}
    expected = backward(**tokens, family="sm_90")
    for x, y in zip(backward(**shifted, family=family), expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["simple GLA", "gated delta rule"])
def test_gradients_that_tma_cannot_write(name):
    """Hopper's kernels, if asked for, say which array it is, and what to do."""
    tokens, _ = MEMBERS[name].inputs(10)
    backward = delta_rule_backward if "beta" in tokens else linear_backward
    tokens |= {"dout": tokens["v"], "dv": np.empty((*tokens["v"].shape[:-1], 50), BF16)[..., 2:]}
    words = r"^family: sm_90 takes addresses .*past a multiple of 16: {'dv': 4}.*\(the default, None"
    with pytest.raises(ValueError, match=words):
        backward(**tokens, family="sm_90")


def test_sm_90_has_no_normalizer_with_decays_of_channels():
    tokens, _ = MEMBERS["GLA"].inputs(10)
    with pytest.raises(ValueError, match="^family: sm_90 takes decays of channels without normalize=True: family='sm_90'"):
        linear(**tokens, normalize=True, family="sm_90")
    with pytest.raises(ValueError, match="^family: sm_90 takes decays of channels without normalize=True: family='sm_90'"):
        linear_backward(tokens["v"], **tokens, normalize=True, family="sm_90")


def test_sm_90_has_no_wide_keys_with_decays_of_channels():
    for length in 5, 0:
        x, beta = np.zeros((1, length, 1, 256), BF16), np.zeros((1, length, 1), F32)
        with pytest.raises(ValueError, match="^family: sm_90 takes keys of at most 128 columns: family='sm_90', q has 256"):
            MEMBERS["KDA"].call(x, x, x, beta, decay=np.zeros(x.shape, F32), family="sm_90")


# ---- everybody's arrays ------------------------------------------------------------------------------------------------
def as_torch(x, device):
    torch = pytest.importorskip("torch")
    return (
        torch.from_numpy(x.view(np.int16)).to(device).view(torch.bfloat16)
        if x.dtype == BF16
        else torch.from_numpy(x).to(device)
    )


def as_jax(x, device):
    jax = pytest.importorskip("jax")
    if device == "cuda" and jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    return jax.device_put(x, jax.devices("cpu" if device == "cpu" else "gpu")[0])


def as_cupy(x, device):
    return pytest.importorskip("cupy").asarray(x)


def as_numba(x, device):
    from numba import cuda

    return cuda.to_device(x)


def on_host(x):
    if hasattr(x, "copy_to_host"):
        return x.copy_to_host()
    if hasattr(x, "get"):
        return x.get()
    if hasattr(x, "cpu"):
        return x.cpu().float().numpy()
    return np.asarray(x)


gpu = pytest.mark.gpu
PLACES = [
    pytest.param(as_torch, "cpu", id="torch"),
    pytest.param(as_jax, "cpu", id="jax"),
    pytest.param(as_torch, "cuda", id="torch on the card", marks=gpu),
    pytest.param(as_jax, "cuda", id="jax on the card", marks=gpu),
    pytest.param(as_cupy, "cuda", id="cupy", marks=gpu),
    pytest.param(as_numba, "cuda", id="numba", marks=gpu),
]


@over_members
@pytest.mark.parametrize(("put", "device"), PLACES)
def test_arrays_of_every_framework(member, put, device):
    """Outputs and states are arrays of the caller's framework. float16, as CuPy and Numba have no bf16."""
    tokens, fixed = member.inputs(70)
    dtype = np.float16 if put in (as_cupy, as_numba) else BF16
    arrays = {key: x.astype(dtype) if x.dtype == BF16 else x for key, x in (tokens | fixed).items()}
    args = {key: put(x, device) for key, x in arrays.items()}
    out, state = member.run(args)
    for x in (out, *both(state)) if member.start else (out,):
        assert type(x) is type(next(iter(args.values())))
    member.assert_close(on_host(out).astype(dtype), arrays)


def odd(x):
    """A copy with an address 2 bytes past a multiple of 4, strides that are odd multiples of 2 bytes, and NaN between rows."""
    room = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, x.dtype)
    room[..., 1:-2] = x
    return room[..., 1:-2]


ANYHOW = {  # views of tokens, (B, S, heads, columns)
    "odd": odd,
    "backwards": lambda x: odd(x[:, ::-1])[:, ::-1],
    "heads share": lambda x: np.broadcast_to(odd(x[:, :, :1]), x.shape),
}
ANYWHERE = [name for name in MEMBERS if not name.startswith(("based", "hedgehog"))]  # which TMA alone reads


VIEWS = [  # two of them for each member, in turn
    pytest.param(name, view, marks=[pytest.mark.release] * ((n + m) % 3 == 2 or name in WRAPPERS))
    for n, name in enumerate(ANYWHERE)
    for m, view in enumerate(ANYHOW)
]


@pytest.mark.parametrize(("name", "view"), VIEWS)
def test_arrays_at_any_even_address(name, view):
    """Arrays are not copied, whatever their strides, and memory around `out` is not written."""
    member = MEMBERS[name]
    tokens, fixed = member.inputs(70)
    args = {key: ANYHOW[view](x) if x.dtype == BF16 else x for key, x in tokens.items()}
    plain = {key: np.ascontiguousarray(x) for key, x in args.items()}
    out = ANYHOW["odd" if view == "heads share" else view](np.zeros_like(tokens["x" if "x" in tokens else "v"]))
    member.run(args | fixed, out=out)
    member.assert_close(out, plain | fixed)
    assert np.isnan(out.base.astype(F32)).sum() == 3 * out.size // out.shape[-1], "memory around out was written"


@over_members
def test_out_and_stream(member):
    """`out` is written and returned; an invalid stream is an error."""
    tokens, fixed = member.inputs(20)
    values = tokens["x" if "x" in tokens else "v"]
    out = np.full_like(values, np.nan)
    assert member.run(tokens | fixed, out=out)[0] is out
    member.assert_close(out, tokens | fixed)
    with pytest.raises(TypeError, match="^stream: must be a handle"):
        member.run(tokens | fixed, stream="x")
