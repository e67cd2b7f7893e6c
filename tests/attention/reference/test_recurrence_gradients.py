"""The gradients of linear, mamba2, based and hedgehog in attention/reference: the derivatives of the recurrences, by finite
differences of a loss of outputs and last state, along a random direction of each input."""

import numpy as np
import pytest

from attention.reference import (
    based,
    based_backward,
    hedgehog,
    hedgehog_backward,
    linear,
    linear_backward,
    mamba2,
    mamba2_backward,
)
from attention.reference.based_gradients import based_features

BATCH, LENGTH, HEADS, KEY_HEADS, DK, DV, STEP = 2, 7, 4, 2, 5, 3, 1e-6
DECAYS = {"none": None, "head": (HEADS,), "token": (BATCH, LENGTH, HEADS), "channel": (BATCH, LENGTH, HEADS, DK)}


def inputs(decay, packed, delta=False):
    """(inputs by name, the gradients of outputs and of the last state, options)"""
    rng, batch, length = np.random.default_rng(1), 1 if packed else BATCH, BATCH * LENGTH if packed else LENGTH
    q, k = rng.standard_normal((2, batch, length, KEY_HEADS, DK))
    arrays = {"q": q, "k": k, "v": rng.standard_normal((batch, length, HEADS, DV))}
    if shape := DECAYS[decay]:
        arrays["decay"] = -rng.random(shape if len(shape) == 1 else (batch, length, *shape[2:]))
    if delta:
        arrays["beta"] = 2 * rng.random(arrays["v"].shape[:3])
        arrays["beta"][:, ::3] = 0
    arrays["initial_state"] = rng.standard_normal((BATCH, HEADS, DK, DV))
    options = {"cu_seqlens": np.array([0, 5, BATCH * LENGTH])} if packed else {}
    return arrays, rng.standard_normal(arrays["v"].shape), rng.standard_normal(arrays["initial_state"].shape), options


@pytest.mark.parametrize("delta", [False, True], ids=["linear", "delta rule"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_finite_differences(decay, packed, delta):
    arrays, dout, dstate, options = inputs(decay, packed, delta)

    def loss(**changed):
        out, state = linear(**arrays | changed, scale=0.7, **options)
        return (out * dout).sum() + (state * dstate).sum()

    compare(linear_backward(dout, **arrays, dstate=dstate, scale=0.7, **options), arrays, loss)


def compare(gradients, arrays, loss):
    """Each gradient is the derivative of the loss by this array, along a random direction."""
    assert gradients.keys() == {"d" + name for name in arrays}
    for name, x in arrays.items():
        assert gradients["d" + name].shape == x.shape
        direction = np.random.default_rng(2).standard_normal(x.shape)
        ends = [loss(**{name: x + step * direction}) for step in (STEP, -STEP)]
        actual = (gradients["d" + name] * direction).sum()
        np.testing.assert_allclose(actual, (ends[0] - ends[1]) / (2 * STEP), rtol=1e-6, atol=1e-7, err_msg=name)


def test_the_other_layout():
    arrays, dout, dstate, _ = inputs("token", False)
    turn = lambda x: x.swapaxes(1, 2)
    turned = {name: turn(x) if name != "initial_state" else x for name, x in arrays.items()}
    expected = linear_backward(dout, **arrays, dstate=dstate)
    for name, x in linear_backward(turn(dout), **turned, dstate=dstate, layout="bhsd").items():
        np.testing.assert_allclose(x if name == "dinitial_state" else turn(x), expected[name], rtol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_finite_differences_with_a_normalizer(decay, packed):
    arrays, dout, dstate, options = inputs(decay, packed)
    arrays |= {name: abs(arrays[name]) for name in ("q", "k")}
    arrays["initial_z"], dz = np.random.default_rng(3).random((2, *dstate.shape[:3]))

    def loss(**changed):
        now = arrays | changed
        start = now.pop("initial_state"), now.pop("initial_z")
        out, (state, z) = linear(**now, initial_state=start, normalize=True, scale=0.7, **options)
        return (out * dout).sum() + (state * dstate).sum() + (z * dz).sum()

    args = {name: x for name, x in arrays.items() if not name.startswith("initial")}
    args |= {"initial_state": (arrays["initial_state"], arrays["initial_z"]), "dstate": (dstate, dz), "normalize": True}
    gradients = linear_backward(dout, **args, scale=0.7, **options)
    gradients["dinitial_state"], gradients["dinitial_z"] = gradients["dinitial_state"]
    compare(gradients, arrays, loss)


@pytest.mark.parametrize(
    ("columns", "packed", "options"),
    [(None, False, {}), (1, True, {"dt_softplus": True}), (DV, False, {"dt_softplus": True, "dt_limit": (0.6, 0.9)})],
)
def test_finite_differences_of_mamba2(columns, packed, options):
    """With negative steps, which are clipped; with D of heads and columns and z; and with both limits of steps reached."""
    rng, batch, length = np.random.default_rng(1), 1 if packed else BATCH, BATCH * LENGTH if packed else LENGTH
    B, C = rng.standard_normal((2, batch, length, KEY_HEADS, DK))
    x, z, dout = rng.standard_normal((3, batch, length, HEADS, DV))
    arrays = {"x": x, "dt": rng.standard_normal((batch, length, HEADS)), "A": -rng.random(HEADS), "B": B, "C": C}
    arrays["initial_states"], dstates = rng.standard_normal((2, BATCH, HEADS, DV, DK))
    if columns:
        D = rng.standard_normal((HEADS, columns))
        arrays |= {"D": D[:, 0] if columns == 1 else D, "z": z, "dt_bias": rng.standard_normal(HEADS)}
    if packed:
        options = options | {"cu_seqlens": np.array([0, 5, BATCH * LENGTH])}

    def loss(**changed):
        out, states = mamba2(**arrays | changed, **options)
        return (out * dout).sum() + (states * dstates).sum()

    compare(mamba2_backward(dout, **arrays, dstates=dstates, **options), arrays, loss)


@pytest.mark.parametrize("normalize", [False, True])
def test_finite_differences_of_based(normalize):
    """Its states are those of linear attention, which has been differentiated."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, BATCH, LENGTH, HEADS, 16))
    v, dout = rng.standard_normal((2, BATCH, LENGTH, HEADS, DV))
    arrays = {"q": q, "k": k, "v": v}
    gradients = based_backward(dout, **arrays, normalize=normalize, scale=-0.3)
    del gradients["dinitial_state"]
    compare(gradients, arrays, lambda **changed: (based(**arrays | changed, normalize=normalize, scale=-0.3)[0] * dout).sum())


@pytest.mark.parametrize(("normalize", "packed"), [(False, False), (True, True)])
def test_finite_differences_of_based_between_states(normalize, packed):
    """From initial states, with a loss of last states, as linear attention with features has them."""
    rng, batch, length = np.random.default_rng(1), 1 if packed else BATCH, BATCH * LENGTH if packed else LENGTH
    q, k = rng.standard_normal((2, batch, length, KEY_HEADS, 16))
    v, dout = rng.standard_normal((2, batch, length, HEADS, DV))
    features = based_features(q, 1).shape[-1]
    state, dstate = rng.standard_normal((2, BATCH, HEADS, features, DV))
    arrays, ends = {"q": q, "k": k, "v": v, "initial_state": state}, (dstate, 0 * dstate[..., 0])
    if normalize:  # the sum of weights that a sequence begins with is that of keys before it
        before = based_features(rng.standard_normal((BATCH, HEADS, 9, 16)), 0.5)
        arrays["initial_z"], ends = before.sum(2), (dstate, rng.standard_normal((BATCH, HEADS, features)))
    options = {"cu_seqlens": np.array([0, 5, BATCH * LENGTH])} if packed else {}

    def states(arrays):
        start, z = arrays.pop("initial_state"), arrays.pop("initial_z", None)
        return arrays | {"initial_state": (start, z) if normalize else start, "normalize": normalize}

    def loss(**changed):
        now = states(arrays | changed)
        now |= {"q": based_features(-0.3 * now["q"], 1), "k": based_features(now["k"], 0.5)}
        out, last = linear(**now, scale=1, **options)
        return (out * dout).sum() + sum((x * dx).sum() for x, dx in zip(last if normalize else (last,), ends))

    inputs = states(dict(arrays)) | {"dstate": ends if normalize else dstate}
    gradients = based_backward(dout, **inputs, scale=-0.3, **options)
    if normalize:
        gradients["dinitial_state"], gradients["dinitial_z"] = gradients["dinitial_state"]
    compare(gradients, arrays, loss)


def test_finite_differences_of_hedgehog():
    """Of windows of two tokens, so that three blocks are older ones; and value heads that share keys have the sum."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, BATCH, LENGTH, HEADS, DK))
    v, dout = rng.standard_normal((2, BATCH, LENGTH, HEADS, DV))
    q_map, k_map = rng.standard_normal((2, HEADS, DK, 6))
    alphas, betas = rng.random((2, HEADS)) + 0.5
    arrays = {"q": q, "k": k, "v": v, "q_map": q_map, "k_map": k_map, "alphas": alphas, "betas": betas}
    compare(
        hedgehog_backward(dout, **arrays, window=2),
        arrays,
        lambda **changed: (hedgehog(**arrays | changed, window=2)[0] * dout).sum(),
    )
    of_keys = {"q": 2, "k": 2, "q_map": 0, "k_map": 0}  # the axis of heads
    shared = {name: x.take(range(0, HEADS, 2), of_keys[name]) if name in of_keys else x for name, x in arrays.items()}
    repeated = {name: x.repeat(2, of_keys[name]) if name in of_keys else x for name, x in shared.items()}
    outputs, each = (hedgehog_backward(dout, **x, window=2) for x in (shared, repeated))
    for name, axis in of_keys.items():
        halves = [each["d" + name].take(range(i, HEADS, 2), axis) for i in range(2)]
        np.testing.assert_allclose(outputs["d" + name], sum(halves), atol=1e-12)
