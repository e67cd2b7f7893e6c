"""attention.hedgehog_backward against the reference's gradients, whose own derivatives test_recurrence_gradients.py checks."""

import ml_dtypes
import numpy as np
import pytest
from places import OnInterpreter
from poison import Packing, as_on_a_device, unaligned

import attention
from attention import reference
from attention.plans.recurrent import hedgehog_gradients, recurrent_chunks

bf16, f32 = ml_dtypes.bfloat16, np.float32
INPUTS = "q", "k", "v", "q_map", "k_map", "alphas", "betas"
ROWS = "dout", "q", "k", "v"
NOISE = 0.01  # of a sum of terms of order 1, each with an error of its own, for the root of their number: alphas and betas


def case(length, heads=2, key_heads=1, key_dim=16, value_dim=16, batch=1, dtype=bf16):
    """Random arguments of hedgehog_backward, by name."""
    rng = np.random.default_rng(length)
    q, k = rng.standard_normal((2, batch, length, key_heads, key_dim))
    v, dout = rng.standard_normal((2, batch, length, heads, value_dim))
    q_map, k_map = rng.standard_normal((2, key_heads, key_dim, 64)) / key_dim**0.5
    args = dict(zip(("dout", *INPUTS[:5]), (dout, q, k, v, q_map, k_map)))
    alphas, betas = rng.random((2, heads)).astype(f32) + f32(0.5)
    return {name: x.astype(dtype) for name, x in args.items()} | {"alphas": alphas, "betas": betas}


def run(place, args, **options):
    actual = attention.hedgehog_backward(**{name: place.put(x) for name, x in args.items()}, **options)
    return dict(zip(["d" + name for name in INPUTS], map(place.get, actual), strict=True))


def check(place, args, **options):
    """Compare all gradients with the reference's, and return them."""
    outputs = run(place, args, **options)
    want, low = (reference.hedgehog_backward(**args, **options, low=low) for low in (False, True))
    for name, x in outputs.items():
        assert (x.shape, x.dtype) == (args[name[1:]].shape, args[name[1:]].dtype), name
        if x.dtype == f32:
            terms = args["v"][..., 0].size / len(x)
            assert abs(x - want[name]).max() <= 3 * abs(low[name] - want[name]).max() + NOISE * terms**0.5, name
        elif not want[name].any():  # dq and dk of one key alone: differences of equal sums in float32
            assert abs(x.astype(f32)).max() <= 1e-6, name
        else:
            reference.assert_close(x, want[name], low[name], factor=3, name=name)
    return outputs


@pytest.mark.parametrize("length", [1, 63, 64, 65, 129, 200])
def test_lengths(place, length):
    """Features count from the third block on: before, maps have gradients of 0."""
    outputs = check(place, case(length))
    assert length > 128 or not (outputs["dq_map"].any() or outputs["dk_map"].any() or outputs["dalphas"].any())


HEAD_DIMS = [(64, 48, 2, 2, bf16), (80, 128, 1, 1, bf16), (128, 16, 1, 1, np.float16)]


@pytest.mark.parametrize(("key_dim", "value_dim", "heads", "batch", "dtype"), HEAD_DIMS)
def test_head_dims(place, key_dim, value_dim, heads, batch, dtype):
    check(place, case(150, heads, -(-heads // 2), key_dim, value_dim, batch=batch, dtype=dtype))


@pytest.mark.parametrize(("length", "segments", "heads"), [(1, 1, 1), (129, 1, 1), (250, 3, 2)])
def test_hopper(place, monkeypatch, nothing_known, length, segments, heads):
    """The kernels for Hopper, which serve heads of more than 64 columns; also of sequences that are cut into segments, one of
    which is shorter."""
    monkeypatch.setattr(recurrent_chunks, "choose_segments", lambda *_: segments)
    check(place, case(length, heads, 1, 80, 128))


@pytest.mark.parametrize(("dim", "options", "serves"), [(80, {}, True), (64, {}, False), (80, {"cu_seqlens": [0, 5]}, False)])
def test_which_kernels_are_launched(monkeypatch, nothing_known, dim, options, serves):
    plan, counts = hedgehog_gradients.plan_on_hopper, []
    monkeypatch.setattr(hedgehog_gradients, "plan_on_hopper", lambda *args: counts.append(1) or plan(*args))
    args = case(5, heads=1, key_dim=dim) | {name: np.array(x, np.int32) for name, x in options.items()}
    attention.hedgehog_backward(**args)
    assert bool(counts) == serves


@pytest.mark.parametrize(("length", "batch"), [(330, 1), (1, 33)])
def test_many_chunks(place, length, batch):
    """Sums over several of them, and more than there are blocks that sum the gradients of maps."""
    check(place, case(length, heads=1, batch=batch))


def test_features_at_the_floor():
    """Queries and keys whose features are all but two of 128 below the floor, and none in common: the normalizer is as small
    as the floor, and what a feature at the floor would get is not."""
    args = case(140, heads=1)
    for name, (up, down) in {"q_map": (0, 1), "k_map": (2, 3)}.items():
        args[name][0, 0] = 0
        args[name][0, 0, [up, down]] = [15, -15]
    for name in ROWS[1:3]:
        args[name][..., 0] = 1
        args[name][..., 1:] *= bf16(0.1)
    check(OnInterpreter(), args)


def test_layouts_and_addresses(place):
    """bhsd, and rows at odd multiples of 8 bytes."""
    args = case(140)
    expected = check(place, args)
    turned = {name: x.swapaxes(1, 2).copy() if name in ROWS else x for name, x in args.items()}
    shifted = {name: unaligned(x, 4) if x.dtype == bf16 else x for name, x in args.items()}
    for other, layout in (turned, "bhsd"), (shifted, "bshd"):
        for name, x in run(place, other, layout=layout).items():
            rows = layout == "bhsd" and name[1:] in ROWS
            np.testing.assert_array_equal(x.swapaxes(1, 2) if rows else x, expected[name])


@pytest.mark.parametrize(("alone", "dim"), [("window", 16), ("features", 16), ("window", 80), ("features", 80)])
def test_window_or_features_alone(place, alone, dim):
    """With alpha = 0 or beta = 0, which have gradients nevertheless. Without the window's, no key of the first blocks has a
    weight: there the divisor is 1e-6."""
    args = case(200, heads=1, key_dim=dim, value_dim=dim)
    args["alphas" if alone == "window" else "betas"][:] = 0
    args["dout"][:, :128] = 0
    outputs = check(place, args)
    assert outputs["dalphas"].all() and outputs["dbetas"].all()


@pytest.mark.parametrize("dim", [16, 80])
def test_equal_scores_and_least_features(place, dim):
    """Keys that share the largest score share its gradient; features that are the floor have none."""
    args = case(200, heads=1, key_dim=dim, value_dim=dim)
    args["k"][:, 1::2] = args["k"][:, ::2]
    args["q_map"] *= 40
    check(place, args)


def test_scores_that_are_nearly_equal():
    """The larger one alone has the gradient of the largest score, however close the other is."""
    args = case(130, heads=1, key_dim=80)
    args["k"][:, 1::2] = args["k"][:, ::2]
    args["q"][..., 0], args["k"][:, ::2, :, 0], args["k"][:, 1::2, :, 0] = 2**-9, 1, 1 + 2**-7
    check(OnInterpreter(), args)


@pytest.mark.parametrize("neighbour", [0, 2])
def test_packed_sequences_among_poison(place, monkeypatch, neighbour):
    """Each sequence has the gradients that it has by itself, among others that are NaN: so are the sums over all tokens then.
    Padding has gradients of 0."""
    as_on_a_device(monkeypatch)
    packing = Packing([0, 65, 1, 130], neighbour, nobodys=66)
    args = case(int(packing.cu_seqlens[-1]), heads=1 + (neighbour == 2))
    spread = {name: packing.spread(args[name]) for name in ROWS} | {"cu_seqlens": packing.ends}
    alone = check(place, args | {"cu_seqlens": packing.cu_seqlens})
    outputs = run(place, args | spread)
    for name, x in alone.items():
        if name[1:] in ROWS:
            np.testing.assert_array_equal(packing.gather(outputs[name].astype(f32)), x.astype(f32))
            assert (outputs[name][:, packing.nobodys] == 0).all(), name
        elif not neighbour:
            np.testing.assert_allclose(outputs[name].astype(f32), x.astype(f32), rtol=0.01, atol=0.01)


@pytest.mark.release
def test_as_compiled(as_compiled):
    """The PTX of all kernels, which is the same for all architectures."""
    as_compiled("sm_80")
    check(OnInterpreter(), case(130, heads=1))


@pytest.mark.release
def test_hopper_as_compiled(as_compiled):
    as_compiled("sm_90a")
    check(OnInterpreter(), case(130, heads=1, key_dim=80, value_dim=80))


def test_outputs_and_no_tokens():
    """Arrays to write to are written and returned; without tokens all gradients are 0."""
    args = case(20)
    into = {"d" + name: np.full_like(args[name], np.nan) for name in INPUTS}
    for x, y, z in zip(attention.hedgehog_backward(**args), attention.hedgehog_backward(**args, **into), into.values()):
        np.testing.assert_array_equal(x, y)
        assert y is z
    empty = attention.hedgehog_backward(**args | {name: args[name][:, :0] for name in ROWS})
    assert [x.shape for x in empty[3:]] == [args[name].shape for name in INPUTS[3:]]
    assert not any(x.any() for x in empty)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 128}, "window: must be 64: window=128"),
        ({name: np.zeros((1, 5, 2, 144), bf16) for name in ("v", "dout")}, "v: head_dim must be at most 128: 144, v.shape="),
        ({name: np.zeros((1, 16, 32), bf16) for name in ("q_map", "k_map")}, "q_map: must have 64 columns: q_map.shape="),
        ({"dbetas": np.zeros(1, f32)}, "dbetas: heads must equal dout's"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError) as raised:
        attention.hedgehog_backward(**case(5) | change)
    assert message in str(raised.value)


def loss(*arrays):
    return attention.hedgehog(*arrays).float().square().sum()


def test_torch():
    """Eager, compiled as one graph, and of torch.func: the gradients of hedgehog_backward. There are no second ones."""
    torch = pytest.importorskip("torch")
    narrow = lambda x: torch.tensor(x.astype(f32)).to(torch.float32 if x.dtype == f32 else torch.bfloat16)
    leaves = [narrow(case(130, heads=1)[name]) for name in INPUTS]
    want = attention.hedgehog_backward(2 * attention.hedgehog(*leaves), *leaves)
    mapped = torch.vmap(torch.func.grad(loss, tuple(range(7))))(*[x[None] for x in leaves])
    ways = [[x[0] for x in mapped]]
    leaves = [x.requires_grad_() for x in leaves]
    ways += [torch.autograd.grad(f(*leaves), leaves) for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager"))]
    for outputs in ways:
        for x, y in zip(outputs, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert torch.autograd.grad(loss(*[x.detach() for x in leaves[:3]], *leaves[3:]), leaves[3])[0].equal(want[3])
    with pytest.raises(NotImplementedError, match=r"attention\.hedgehog: has no second derivatives"):
        torch.autograd.grad(loss(*leaves), leaves, create_graph=True)


def test_jax():
    jax = pytest.importorskip("jax")
    args = case(130, heads=1)
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [jax.numpy.asarray(args[x].astype(f32)).astype(str(args[x].dtype)) for x in INPUTS]
        total = lambda *x: (attention.hedgehog(*x).astype("float32") ** 2).sum()
        want = attention.hedgehog_backward(2 * attention.hedgehog(*arrays), *arrays)
        for x, y in zip(jax.jit(jax.grad(total, tuple(range(7))))(*arrays), want, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(np.asarray(x, f32), np.asarray(y, f32))
