"""attention.linear_backward with normalize=True against the reference's gradients, whose own derivatives
test_recurrence_gradients.py checks."""

import numpy as np
import pytest
from gradient_cases import case, f32, relative_rms
from poison import Packing, as_on_a_device

import attention
from attention import reference
from attention.kernels.recurrent import normalizer_gradients as module
from tiles.targets import parse_target

LIMIT = 0.005  # of relative errors of float32 results, if those of the reference in the inputs' dtype are not greater
every_family = pytest.mark.parametrize("family", ["sm_90", "sm_80"])


def positive(length, decay="token", **more):
    """The arguments of linear_backward, with positive q, k and z, so that no normalizer is nearly 0, and pairs of states."""
    args, rng = case(length, decay, **more), np.random.default_rng(length)
    args |= {name: abs(args[name]) for name in ("q", "k")}
    z, dz = rng.random((2, *args["initial_state"].shape[:3]), f32)
    return args | {"initial_state": (args["initial_state"], z), "dstate": (args["dstate"], dz)}


def moved(args, move):
    return {name: tuple(map(move, x)) if isinstance(x, tuple) else move(x) for name, x in args.items()}


def run(place, args, **options):
    """Gradients by name, in NumPy arrays."""
    results = attention.linear_backward(**moved(args, place.put), normalize=True, **options)
    names = [name for name in ("dq", "dk", "dv", "ddecay", "dinitial_state") if name != "ddecay" or "decay" in args]
    outputs = moved(dict(zip(names, results, strict=True)), place.get)
    return outputs | dict(zip(("dinitial_state", "dinitial_z"), outputs["dinitial_state"]))


def check(place, args, family=None):
    """Compare all gradients with the reference's, and return them."""
    outputs = run(place, args, family=family)
    want, low = (reference.linear_backward(**args, normalize=True, low=low) for low in (False, True))
    for x in want, low:
        x |= dict(zip(("dinitial_state", "dinitial_z"), x["dinitial_state"]))
    for name, x in outputs.items():
        assert x.shape == want[name].shape, name
        if x.dtype == f32:  # the gradients of N and of n cancel
            assert relative_rms(x, want[name]) <= max(LIMIT, 3 * relative_rms(low[name], want[name])), name
        else:
            reference.assert_close(x, want[name], low[name], factor=3, name=name)
    return outputs


@pytest.mark.parametrize(("length", "decay"), [(1, "token"), (64, "none"), (65, "head"), (130, "token"), (20, "channel")])
@every_family
def test_lengths(place, length, decay, family):
    if decay == "channel":
        family = None
    check(place, positive(length, decay), family=family)


@pytest.mark.parametrize(("key_dim", "value_dim", "decay"), [(128, 80, "token"), (48, 256, "head"), (256, 16, "none")])
def test_sizes(place, key_dim, value_dim, decay):
    check(place, positive(66, decay, key_dim=key_dim, value_dim=value_dim, batch=2, heads=2, key_heads=1))


def test_float16(place):
    check(place, positive(65, dtype=np.float16))


@every_family
def test_gates_that_forget_everything(place, family):
    """Some are -inf, others 0: everything is finite, and the gradient of such a gate is 0."""
    args = positive(130, key_heads=2)
    draw = np.random.default_rng(2).random(args["decay"].shape)
    args["decay"] = np.where(draw < 0.1, -np.inf, np.where(draw < 0.5, 0, -0.1)).astype(f32)
    outputs = check(place, args, family=family)
    assert (outputs["ddecay"][args["decay"] < -100] == 0).all()


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_packed_sequences_among_poison(place, monkeypatch, decay):
    """Each sequence has the gradients that it has by itself. Padding has gradients of 0; a sequence without tokens passes the
    gradient of its state on."""
    as_on_a_device(monkeypatch)
    packing = Packing([0, 65, 1], neighbour=2, nobodys=66)
    args = positive(int(packing.cu_seqlens[-1]), decay)
    of_tokens = {name: x for name, x in args.items() if name in ("dout", "q", "k", "v", "decay")}
    states = {name: tuple(np.repeat(x, 3, axis=0) for x in args[name]) for name in ("initial_state", "dstate")}
    spread = {name: packing.spread(x) for name, x in of_tokens.items()} | {"cu_seqlens": packing.ends}
    for name, pair in states.items():
        spread[name] = tuple(np.full((len(packing.ends) - 1, *x.shape[1:]), np.nan, f32) for x in pair)
        for x, own in zip(spread[name], pair):
            x[packing.which] = own
    alone = check(place, args | states | {"cu_seqlens": packing.cu_seqlens})
    outputs = run(place, spread)
    for name, x in alone.items():
        if name.startswith("dinitial"):
            np.testing.assert_array_equal(outputs[name][packing.which], x)
        else:
            np.testing.assert_array_equal(packing.gather(outputs[name].astype(f32)), x.astype(f32))
            assert (outputs[name][:, packing.nobodys] == 0).all(), name
    for name, inputs in zip(("dinitial_state", "dinitial_z"), args["dstate"]):
        np.testing.assert_array_equal(alone[name][0], inputs[0])


def test_outputs_and_options():
    """Pairs are written and returned; one of dstate may be None."""
    args = positive(20)
    into = {"dinitial_state": tuple(np.full_like(x, np.nan) for x in args["initial_state"])}
    wanted, outputs = (attention.linear_backward(**args, normalize=True, **more) for more in ({}, into))
    for x, y, z in zip(wanted[-1], outputs[-1], into["dinitial_state"]):
        np.testing.assert_array_equal(x, y)
        assert y is z
    assert len(attention.linear_backward(**args, normalize=True, dinitial_state=False)) == 4
    del args["initial_state"]
    assert len(attention.linear_backward(**args, normalize=True)) == 4
    plain = attention.linear_backward(**args | {"dstate": (args["dstate"][0], None)}, normalize=True)
    zeros = attention.linear_backward(**args | {"dstate": (args["dstate"][0], 0 * args["dstate"][1])}, normalize=True)
    for x, y in zip(plain, zeros, strict=True):
        np.testing.assert_array_equal(x, y)


def test_errors():
    args = positive(5)
    with pytest.raises(TypeError, match=r"^dstate: must be a pair \(state, z\) with normalize=True"):
        attention.linear_backward(**args | {"dstate": args["dstate"][0]}, normalize=True)
    with pytest.raises(TypeError, match="^initial_state: must be an array, not a pair, which is for normalize=True"):
        attention.linear_backward(**args | {"dstate": None})


def test_space():
    """All dtypes, sizes and decays are compiled by `inspect --all`, the largest with decays always."""
    few, many = (list(module.space(parse_target("sm_90a"), everything)) for everything in (False, True))
    for kind in module.NormalizerSums, module.NormalizerGradients:
        of_kind = [config for config in many if isinstance(config, kind)]
        wanted = {(config.dtype, config.key_dim, config.decay, config.varlen) for config in of_kind}
        assert len(wanted) == 2 * 3 * 3 * 2
        fields = {(config.dtype, config.key_dim, config.varlen) for config in few if isinstance(config, kind)}
        assert fields == {(module.bf16, 256, True)}
        assert {config.decay for config in few if isinstance(config, kind)} == {"token", "channel"}
    of_gates = {(config.decay, config.with_gates) for config in of_kind}
    assert of_gates == {("", False), *((decay, gates) for decay in ("token", "channel") for gates in (False, True))}
    assert set(few) < set(many)


NAMES = "q", "k", "v", "decay", "initial_state", "initial_z"


def loss(q, k, v, decay, state, z):
    """Of arrays of torch or JAX."""
    out, (state, z) = attention.linear(q, k, v, decay=decay, initial_state=(state, z), normalize=True, return_state=True)
    wide = out.float() if hasattr(out, "float") else out.astype("float32")
    return (wide * wide).sum() + state.sum() + (z * z).sum()


def wanted(leaves, ones_like):
    """The gradients of `loss` by linear_backward."""
    arrays = dict(zip(NAMES, leaves[:4])) | {"initial_state": tuple(leaves[4:])}
    out, (state, z) = attention.linear(**arrays, normalize=True, return_state=True)
    dstate = ones_like(state), 2 * z
    *actual, of_start = attention.linear_backward(out + out, **arrays, dstate=dstate, normalize=True)
    return *actual, *of_start


def test_torch():
    """Eager, and compiled as one graph; of the initial z alone."""
    torch = pytest.importorskip("torch")
    args = positive(5, "head")
    leaves = [args[name] for name in NAMES[:4]] + [*args["initial_state"]]
    leaves = [torch.tensor(x.astype(f32)).to(torch.float32 if x.dtype == f32 else torch.bfloat16) for x in leaves]
    want = wanted(leaves, torch.ones_like)
    leaves = [x.requires_grad_() for x in leaves]
    for way in loss, torch.compile(loss, fullgraph=True, backend="aot_eager"):
        for x, y in zip(torch.autograd.grad(way(*leaves), leaves), want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    (dz,) = torch.autograd.grad(loss(*[x.detach() for x in leaves[:5]], leaves[5]), leaves[5:])
    torch.testing.assert_close(dz, want[5], rtol=0, atol=0)


def test_jax():
    jax = pytest.importorskip("jax")
    args = positive(5, "head")
    leaves = [args[name] for name in NAMES[:4]] + [*args["initial_state"]]
    with jax.default_device(jax.devices("cpu")[0]):
        leaves = [jax.numpy.asarray(x.astype(f32)).astype("float32" if x.dtype == f32 else "bfloat16") for x in leaves]
        want = wanted(leaves, jax.numpy.ones_like)
        for x, y in zip(jax.jit(jax.grad(loss, tuple(range(6))))(*leaves), want, strict=True):
            np.testing.assert_array_equal(np.asarray(x, f32), np.asarray(y, f32))
