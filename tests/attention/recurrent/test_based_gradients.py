"""attention.based_backward against the reference's gradients, whose own derivatives test_recurrence_gradients.py checks."""

import ml_dtypes
import numpy as np
import pytest
from gradient_cases import relative_rms
from places import OnInterpreter
from poison import Packing, as_on_a_device

import attention
import tiles
from attention import reference
from attention.kernels.recurrent.based_gradients_hopper import BasedKeyGradients, BasedQueryGradients
from attention.parts.recurrent.tokens import COLUMNS
from attention.plans.recurrent import based_gradients, recurrent_chunks
from attention.reference.based_gradients import based_features
from tiles.launching.arguments import array, declared

bf16, f32 = ml_dtypes.bfloat16, np.float32
LIMIT = 0.005  # of relative errors of float32 results, if those of the reference in the inputs' dtype are not greater
NAMES = "dq", "dk", "dv", "dinitial_state", "dinitial_z"
divided = pytest.mark.parametrize("normalize", [True, False], ids=["divided", "sums"])


def case(length, normalize, heads=2, key_heads=1, value_dim=16, batch=1, dtype=bf16, states=True):
    """The arguments of based_backward. The initial state is that of some tokens."""
    rng = np.random.default_rng(length)
    q, k = rng.standard_normal((2, batch, length, key_heads, 16))
    v, dout = rng.standard_normal((2, batch, length, heads, value_dim))
    args = {name: x.astype(dtype) for name, x in {"dout": dout, "q": q, "k": k, "v": v}.items()} | {"normalize": normalize}
    if states:
        f = based_features(rng.standard_normal((batch, heads, 20, 16)), 0.5)
        start = (f.swapaxes(2, 3) @ rng.standard_normal((batch, heads, 20, value_dim))).astype(f32), f.sum(2).astype(f32)
        end = tuple(rng.standard_normal(x.shape).astype(f32) / 8 for x in start)
        args |= {"initial_state": start if normalize else start[0], "dstate": end if normalize else end[0]}
    return args


def moved(args, move):
    """The arguments, those that are arrays elsewhere."""
    there = lambda x: tuple(map(move, x)) if isinstance(x, tuple) else move(x)
    return {name: x if isinstance(x, bool) else there(x) for name, x in args.items()}


def flat(results):
    """Gradients by name, the parts of a pair by themselves."""
    *rows, state = results if len(results) > 3 else (*results, ())
    return dict(zip(NAMES, (*rows, *(state if isinstance(state, tuple) else (state,)))))


def run(place, args, **options):
    return {name: place.get(x) for name, x in flat(attention.based_backward(**moved(args, place.put), **options)).items()}


def check(place, args, **options):
    """Compare all gradients with the reference's, and return them."""
    outputs = run(place, args, **options)
    both = [reference.based_backward(**args, **options, low=low) for low in (False, True)]
    want, low = (flat([x[name] for name in NAMES[:4]]) for x in both)
    for name, x in outputs.items():
        assert x.shape == want[name].shape, name
        if x.dtype == f32:
            assert relative_rms(x, want[name]) <= max(LIMIT, 3 * relative_rms(low[name], want[name])), name
        else:
            reference.assert_close(x, want[name], low[name], factor=3, name=name)
    return outputs


@pytest.mark.parametrize("length", [1, 64, 65, 130])
@divided
def test_lengths(place, length, normalize):
    check(place, case(length, normalize))


@pytest.mark.parametrize(("value_dim", "dtype"), [(80, bf16), (64, np.float16), (256, bf16)])
def test_value_dims(place, value_dim, dtype):
    check(place, case(20, True, value_dim=value_dim, dtype=dtype, batch=2, heads=1, states=dtype is bf16))


@pytest.mark.parametrize(
    ("length", "value_dim", "walks"), [(1, COLUMNS - 16, True), (1, COLUMNS, True), (1, COLUMNS + 16, False), (0, 16, False)]
)
def test_which_kernels_are_launched(monkeypatch, nothing_known, length, value_dim, walks):
    """The walks hold a state of COLUMNS value dims, features in memory have any. Without tokens the initial state has a
    gradient of 0, which no kernel writes."""
    plan_walks, counts = based_gradients._plan_walks, []
    monkeypatch.setattr(based_gradients, "_plan_walks", lambda *given: counts.append(1) or plan_walks(*given))
    args = case(length, True, value_dim=value_dim, heads=1)
    got = run(OnInterpreter(), {name: x for name, x in args.items() if length or name != "dstate"})
    assert bool(counts) == walks
    if not length:
        assert (got["dinitial_state"] == 0).all() and (got["dinitial_z"] == 0).all()


@pytest.mark.parametrize(("kind", "name"), [(BasedQueryGradients, "gDQ"), (BasedKeyGradients, "gDK")])
def test_gradients_that_are_added_over_heads_are_float32(kind, name):
    for unrounded, dtype in ((False, tiles.bf16), (True, tiles.fp32)):
        kernel, _ = kind.make(kind(tiles.bf16, unrounded=unrounded))
        assert declared(kernel.py_func)[name] == array(4, dtype)


@pytest.mark.parametrize("scale", [-0.3, 1.0])
def test_scales_and_layouts(place, scale):
    args = case(40, True, heads=4, key_heads=2)
    turned = {name: x.swapaxes(1, 2).copy() if name in ("dout", "q", "k", "v") else x for name, x in args.items()}
    outputs = check(place, args, scale=scale)
    for name, x in run(place, turned, scale=scale, layout="bhsd").items():
        np.testing.assert_array_equal(x if x.dtype == f32 else x.swapaxes(1, 2), outputs[name])


@divided
def test_packed_sequences_among_poison(place, monkeypatch, normalize):
    """Each sequence has the gradients that it has by itself. Padding has gradients of 0; a sequence without tokens passes the
    gradient of its state on."""
    as_on_a_device(monkeypatch)
    packing = Packing([0, 65, 1], neighbour=2, nobodys=66)
    args = case(int(packing.cu_seqlens[-1]), normalize)
    repeat = lambda x: np.repeat(x, len(packing.cu_seqlens) - 1, axis=0)
    states = moved({name: args[name] for name in ("initial_state", "dstate")}, repeat)

    def among(x):
        actual = np.full((len(packing.ends) - 1, *x.shape[1:]), np.nan, f32)
        actual[packing.which] = x
        return actual

    spread = {name: packing.spread(args[name]) for name in ("dout", "q", "k", "v")} | {"cu_seqlens": packing.ends}
    alone = check(place, args | states | {"cu_seqlens": packing.cu_seqlens})
    outputs = run(place, args | spread | moved(states, among))
    for name, x in alone.items():
        if name.startswith("dinitial"):
            np.testing.assert_array_equal(outputs[name][packing.which], x)
        else:
            np.testing.assert_array_equal(packing.gather(outputs[name].astype(f32)), x.astype(f32))
            assert (outputs[name][:, packing.nobodys] == 0).all(), name


@pytest.mark.parametrize(("length", "normalize", "segments"), [(150, True, 4), (130, False, 2)])
def test_segments(place, monkeypatch, nothing_known, length, normalize, segments):
    """Walks of sequences that are cut into segments, some of which have no tokens if there are more than chunks."""
    monkeypatch.setattr(recurrent_chunks, "choose_segments", lambda *_: segments)
    check(place, case(length, normalize, heads=1))


def test_packed_sequences_in_segments(place, monkeypatch, nothing_known):
    monkeypatch.setattr(recurrent_chunks, "choose_segments", lambda *_: 2)
    test_packed_sequences_among_poison(place, monkeypatch, True)


@pytest.mark.parametrize("segments", [pytest.param(1, marks=pytest.mark.release), 2])
def test_as_compiled(as_compiled, monkeypatch, segments):
    """The PTX of Hopper's kernels."""
    as_compiled("sm_90a")
    monkeypatch.setattr(recurrent_chunks, "choose_segments", lambda *_: segments)
    check(OnInterpreter(), case(20 if segments == 1 else 70, True, heads=1))


def test_outputs_and_options():
    """Arrays to write to are written and returned; what is not wanted, or there is nothing for, is left out."""
    args = case(20, False)
    into = {"d" + name: np.full_like(args[name], np.nan) for name in ("q", "k", "v", "initial_state")}
    expected, outputs = attention.based_backward(**args), attention.based_backward(**args, **into)
    for x, y, z in zip(expected, outputs, into.values(), strict=True):
        np.testing.assert_array_equal(x, y)
        assert y is z
    assert len(attention.based_backward(**args, dinitial_state=False)) == 3
    del args["initial_state"]
    assert len(attention.based_backward(**args)) == 3
    assert attention.based_backward(**args, dinitial_state=True)[3].shape == args["dstate"].shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((1, 5, 1, 32), bf16), "k": np.zeros((1, 5, 1, 32), bf16)}, "q: key_dim must be 16: key_dim=32, q."),
        ({"dstate": np.zeros((1, 2, 160, 16), f32)}, "dstate: must be a pair (state, z) with normalize=True"),
        ({"initial_state": None, "dstate": (np.zeros((1, 2, 144, 16), f32), None)}, "dstate: must have 160 features"),
        ({name: np.zeros((1, 0, 1 + (name in ("v", "dout")), 16), bf16) for name in ("q", "k", "v", "dout")}, "q: must have a"),
    ],
)
def test_errors(change, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        attention.based_backward(**case(5, True) | change)
    assert message in str(raised.value)


@divided
def test_torch(normalize):
    """Eager, and compiled as one graph: the gradients of based_backward."""
    torch = pytest.importorskip("torch")
    narrow = lambda x: torch.tensor(x.astype(f32)).to(torch.float32 if x.dtype == f32 else torch.bfloat16)
    args = moved(case(5, normalize, value_dim=16), narrow)
    start = args["initial_state"] if normalize else (args["initial_state"],)

    def loss(q, k, v, *parts):
        state = parts if normalize else parts[0]
        out, state = attention.based(q, k, v, normalize=normalize, initial_state=state, return_state=True)
        return out.float().square().sum() + sum(x.sum() for x in (state if normalize else (state,)))

    leaves = [args["q"], args["k"], args["v"], *start]
    inputs = {name: args[name] for name in ("q", "k", "v", "initial_state", "normalize")}
    out, state = attention.based(**inputs, return_state=True)
    ends = tuple(map(torch.ones_like, state)) if normalize else torch.ones_like(state)
    want = flat(attention.based_backward(out + out, **inputs, dstate=ends)).values()
    leaves = [x.requires_grad_() for x in leaves]
    for way in loss, torch.compile(loss, fullgraph=True, backend="aot_eager"):
        for x, y in zip(torch.autograd.grad(way(*leaves), leaves), want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@divided
def test_jax(normalize):
    jax = pytest.importorskip("jax")
    args = case(5, normalize, states=False)
    with jax.default_device(jax.devices("cpu")[0]):
        q, k, v = (jax.numpy.asarray(args[x].astype(f32)).astype("bfloat16") for x in "qkv")
        total = lambda *x: (attention.based(*x, normalize=normalize).astype("float32") ** 2).sum()
        out = attention.based(q, k, v, normalize=normalize)
        want = attention.based_backward(out + out, q, k, v, normalize=normalize)
        for x, y in zip(jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v), want, strict=True):
            np.testing.assert_array_equal(np.asarray(x, f32), np.asarray(y, f32))
