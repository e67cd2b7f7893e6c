"""attention/reference/linear.py: each recurrence against a closed form, which is quadratic in the length and has no state."""

import ml_dtypes
import numpy as np
import pytest

from attention.reference import assert_close, based, hedgehog, linear, linear_step, mamba2

bf16 = ml_dtypes.bfloat16
BATCH, LENGTH, HEADS, DK, DV = 2, 11, 4, 6, 5
DECAYS = {"none": None, "head": (HEADS,), "token": (BATCH, LENGTH, HEADS), "channel": (BATCH, LENGTH, HEADS, DK)}


def inputs(seed=0, shared=1, decay="token", batch=BATCH):
    """q, k, v, decay, beta, state: heads of q and k shared by `shared` heads of v."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, batch, LENGTH, HEADS // shared, DK))
    v = rng.standard_normal((batch, LENGTH, HEADS, DV))
    shape = DECAYS[decay]
    gates = None if shape is None else -rng.exponential(0.3, shape if len(shape) == 1 else (batch, *shape[1:]))
    return q, k, v, gates, rng.uniform(0, 1, (batch, LENGTH, HEADS)), rng.standard_normal((batch, HEADS, DK, DV))


def closed_form(q, k, v, decay, beta, state, scale):
    """(o, final state) from matrices of all pairs of tokens; with beta, from a solution for all corrected values at once."""
    q, k = (x.repeat(HEADS // x.shape[2], axis=2) for x in (q, k))
    full = (*v.shape[:3], DK)
    gates = np.zeros(full) if decay is None else np.broadcast_to(decay.reshape(decay.shape + (1,) * (decay.ndim != 4)), full)
    sums = gates.cumsum(1)  # decay from the start to after token i, per row of the state
    pairs = np.exp(np.minimum(sums[:, :, None] - sums[:, None], 0))  # (B, i, j, H, Dk): from after j to after i
    later = np.tril(np.ones((LENGTH, LENGTH)))[:, :, None]
    from_state = np.einsum("bihk,bihk,bhkv->bihv", q, np.exp(sums), state)
    if beta is not None:
        A = np.einsum("bihk,bijhk,bjhk->bijh", k, pairs, k) * np.tril(np.ones((LENGTH, LENGTH)), -1)[:, :, None]
        right = v - np.einsum("bihk,bihk,bhkv->bihv", k, np.exp(sums), state)
        system = np.eye(LENGTH) + (A * beta[:, :, None]).transpose(0, 3, 1, 2)
        v = np.linalg.solve(system, (right * beta[..., None]).swapaxes(1, 2)).swapaxes(1, 2)
    weights = np.einsum("bihk,bijhk,bjhk->bijh", q, pairs, k) * later
    out = scale * (np.einsum("bijh,bjhv->bihv", weights, v) + from_state)
    last = np.exp(sums[:, -1])[..., None] * state + np.einsum("bjhk,bjhk,bjhv->bhkv", np.exp(sums[:, -1:] - sums), k, v)
    return out, last


def close(actual, expected, rtol=1e-10):
    for a, b in zip(actual, expected, strict=True):
        if isinstance(a, tuple):
            close(a, b, rtol)
        else:
            np.testing.assert_allclose(a, b, rtol, atol=1e-11)


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta"])
@pytest.mark.parametrize("decay", DECAYS)
def test_the_closed_form(decay, delta, shared):
    q, k, v, gates, beta, state = inputs(1, shared, decay)
    beta = beta if delta else None
    actual = linear(q, k, v, decay=gates, beta=beta, scale=0.7, initial_state=state)
    close(actual, closed_form(q, k, v, gates, beta, state, 0.7))
    close(linear(q, k, v, decay=gates, beta=beta), closed_form(q, k, v, gates, beta, 0 * state, DK**-0.5))


@pytest.mark.parametrize("decay", DECAYS)
def test_linear_step_repeated(decay):
    q, k, v, gates, beta, state = inputs(2, 2, decay)
    out, last = linear(q, k, v, decay=gates, beta=beta, initial_state=state)
    for t in range(LENGTH):
        gate = gates if gates is None or gates.ndim == 1 else gates[:, t]
        o, state = linear_step(state, q[:, t], k[:, t], v[:, t], decay=gate, beta=beta[:, t])
        np.testing.assert_allclose(o, out[:, t], rtol=1e-12)
    np.testing.assert_allclose(state, last, rtol=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
def test_initial_state(normalize):
    q, k, v, gates, _, _ = inputs(3)
    q, k = abs(q), abs(k)
    whole, last = linear(q, k, v, decay=gates, normalize=normalize)
    first, state = linear(q[:, :4], k[:, :4], v[:, :4], decay=gates[:, :4], normalize=normalize)
    second, end = linear(q[:, 4:], k[:, 4:], v[:, 4:], decay=gates[:, 4:], initial_state=state, normalize=normalize)
    close((np.concatenate([first, second], 1), end), (whole, last))


def test_normalized_weights_sum_to_one():
    q, k, v, gates, _, _ = inputs(4)
    out, (state, z) = linear(abs(q), abs(k), np.ones_like(v), decay=gates, normalize=True)
    np.testing.assert_allclose(out, 1, rtol=1e-6)
    np.testing.assert_allclose(state, z[..., None].repeat(DV, -1))


@pytest.mark.parametrize("decay", DECAYS)
def test_packed_sequences(decay):
    """NaN in one sequence does not reach the others; an empty sequence keeps its state."""
    q, k, v, gates, beta, _ = inputs(5, 2, decay, batch=1)
    states = np.random.default_rng(6).standard_normal((3, HEADS, DK, DV))
    ends = np.array([0, 7, 7, LENGTH])
    v[:, 6] = np.nan
    out, last = linear(q, k, v, decay=gates, beta=beta, initial_state=states, cu_seqlens=ends)
    tail = [x if x is None or x.ndim == 1 else x[:, 7:] for x in (q, k, v, gates, beta)]
    close((out[:, 7:], last[2:]), linear(*tail[:3], decay=tail[3], beta=tail[4], initial_state=states[2:]))
    np.testing.assert_array_equal(last[1], states[1])
    assert np.isnan(last[0]).any() and not np.isnan(last[1:]).any()


@pytest.mark.parametrize("decay", DECAYS)
def test_layouts(decay):
    q, k, v, gates, beta, _ = inputs(7, 2, decay)
    turned = [x if x is None or x.ndim == 1 else x.swapaxes(1, 2) for x in (q, k, v, gates, beta)]
    out, state = linear(*turned[:3], decay=turned[3], beta=turned[4], layout="bhsd")
    close((out.swapaxes(1, 2), state), linear(q, k, v, decay=gates, beta=beta))


def test_the_delta_rule_remembers_orthonormal_keys():
    """With beta = 1 and no decay, S^T k is the last value of key k, however often k repeats."""
    k = np.eye(DK)[[0, 1, 2, 0, 1, 0]][None, :, None]
    v = np.random.default_rng(8).standard_normal((1, 6, 1, DV))
    out, state = linear(k, k, v, beta=np.ones((1, 6, 1)), scale=1)
    np.testing.assert_allclose(out, v, rtol=1e-12)
    np.testing.assert_allclose(state[0, 0, :3], v[0, [5, 4, 2], 0], rtol=1e-12)


def test_a_decay_of_minus_infinity():
    q, k, v, gates, beta, state = inputs(9)
    out, _ = linear(q, k, v, decay=0 * gates - 1e4, initial_state=state)
    np.testing.assert_allclose(out, DK**-0.5 * (q * k).sum(-1, keepdims=True) * v, rtol=1e-12)


# Members with formulas of their own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("extras", [False, True])
def test_mamba2_is_a_masked_product(extras):
    rng = np.random.default_rng(10)
    groups, P, N = 2, 3, 7
    x, z = rng.standard_normal((2, BATCH, LENGTH, HEADS, P))
    dt, A = rng.standard_normal((BATCH, LENGTH, HEADS)), -rng.exponential(1, HEADS)
    B, C = rng.standard_normal((2, BATCH, LENGTH, groups, N))
    state = rng.standard_normal((BATCH, HEADS, P, N))
    D, bias = rng.standard_normal((HEADS, P)), rng.standard_normal(HEADS)
    if extras:
        options = dict(D=D, z=z, dt_bias=bias, dt_softplus=True, dt_limit=(0.1, 1.0))
        step = np.clip(np.log1p(np.exp(dt + bias)), 0.1, 1.0)
    else:
        options, dt = {}, abs(dt)
        step = dt
    y, last = mamba2(x, dt, A, B, C, initial_states=state, **options)
    sums = (step * A).cumsum(1)
    L = np.exp(np.minimum(sums[:, :, None] - sums[:, None], 0)) * np.tril(np.ones((LENGTH, LENGTH)))[:, :, None]
    B, C = (m[:, :, np.arange(HEADS) // (HEADS // groups)] for m in (B, C))
    expected = np.einsum("bihn,bjhn,bijh,bjh,bjhp->bihp", C, B, L, step, x)
    expected += np.einsum("bihn,bih,bhpn->bihp", C, np.exp(sums), state)
    if extras:
        expected = (expected + D * x) * z / (1 + np.exp(-z))
    end = np.exp(sums[:, -1])[..., None, None] * state
    end = end + np.einsum("bjhn,bjh,bjh,bjhp->bhpn", B, np.exp(sums[:, -1:] - sums), step, x)
    close((y, last), (expected, end))


def test_mamba2_takes_one_D_per_head():
    rng = np.random.default_rng(11)
    x, dt, BC = rng.standard_normal((1, 4, 2, 3)), rng.uniform(0, 1, (1, 4, 2)), rng.standard_normal((1, 4, 1, 5))
    D = rng.standard_normal(2)
    close(mamba2(x, dt, -np.ones(2), BC, BC, D=D), mamba2(x, dt, -np.ones(2), BC, BC, D=D[:, None].repeat(3, 1)))


@pytest.mark.parametrize("scale", [None, 0.7, -0.7])
@pytest.mark.parametrize("normalize", [False, True])
def test_based_is_the_second_order_of_exp(normalize, scale):
    q, k, v, *_ = inputs(12)
    s = np.einsum("bihk,bjhk->bhij", q, k) * (scale or DK**-0.5)
    weights = (1 + s + s**2 / 2) * np.tril(np.ones((LENGTH, LENGTH)))
    if normalize:
        weights /= weights.sum(-1, keepdims=True)
    out, _ = based(q, k, v, normalize=normalize, scale=scale)
    np.testing.assert_allclose(out, np.einsum("bhij,bjhv->bihv", weights, v), rtol=1e-8)


@pytest.mark.parametrize("window", [2, 3, 16])
def test_hedgehog_is_a_matrix_of_two_kinds_of_weights(window):
    q, k, v, *_ = inputs(13)
    rng = np.random.default_rng(14)
    q_map, k_map = rng.standard_normal((2, HEADS, DK, 3))
    alphas, betas = rng.uniform(0, 2, (2, HEADS))

    def features(x, M):
        y = np.exp(np.einsum("bshd,hdf->bshf", x, M))
        return np.concatenate([y / y.sum(-1, keepdims=True), 1 / y / (1 / y).sum(-1, keepdims=True)], -1)

    i, j = np.mgrid[:LENGTH, :LENGTH]
    exact, older = (i // window - j // window <= 1) & (j <= i), i // window - j // window > 1
    s = np.where(exact, np.einsum("bihd,bjhd->bhij", q, k), -np.inf)
    linear_part = np.einsum("bihf,bjhf->bhij", features(q, q_map), features(k, k_map)) * older
    w = betas[:, None, None] * np.exp((s - s.max(-1, keepdims=True)) / DK**0.5) + alphas[:, None, None] * linear_part
    out, (state, z) = hedgehog(q, k, v, q_map, k_map, alphas, betas, window=window)
    expected = np.einsum("bhij,bjhv->bihv", w / (w.sum(-1, keepdims=True) + 1e-6), v)
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)
    old = max(0, LENGTH // window - 1) * window
    np.testing.assert_allclose(z, features(k, k_map)[:, :old].sum(1), atol=1e-12)
    np.testing.assert_allclose(state, np.einsum("bshf,bshv->bhfv", features(k, k_map)[:, :old], v[:, :old]), atol=1e-12)


# What the input dtype allows ------------------------------------------------------------------------------------------


def members(dtype):
    """(name, function of `low`) for inputs of this dtype."""
    q, k, v, gates, beta, state = inputs(15)
    q, k, v = (x.astype(dtype) for x in (q, k / np.linalg.norm(k, axis=-1, keepdims=True), v))
    maps = np.random.default_rng(16).standard_normal((2, HEADS, DK, 4)).astype(dtype)
    ones = np.ones(HEADS)
    return {
        "linear": lambda low: linear(q, k, v, decay=gates, initial_state=state, low=low),
        "delta": lambda low: linear(q, k, v, decay=gates, beta=beta, low=low),
        "normalized": lambda low: linear(abs(q), abs(k), v, normalize=True, low=low),
        "mamba2": lambda low: mamba2(v, abs(gates), -ones, k, q, D=ones, z=v, dt_softplus=True, low=low),
        "based": lambda low: based(q, k, v, low=low),
        "hedgehog": lambda low: hedgehog(q, k, v, *maps, ones, ones, window=3, low=low),
    }


@pytest.mark.parametrize("name", members(bf16))
@pytest.mark.parametrize("dtype, error", [(bf16, 2**-6), (np.float16, 2**-9)])
def test_low_is_near_and_not_equal(dtype, error, name):
    call = members(dtype)[name]
    (out, state), (low, low_state) = call(False), call(True)
    leaves = state if isinstance(state, tuple) else (state,)
    assert out.dtype == np.float64 and low.dtype == np.float32 and all(x.dtype == np.float64 for x in leaves)
    assert 0 < np.abs(low - out).max() < error * max(1, np.abs(out).max())
    assert (low == low.astype(dtype)).all()
    assert_close(low.astype(dtype), out, low)
    for x, y in zip(leaves, low_state if isinstance(low_state, tuple) else (low_state,), strict=True):
        assert y.dtype == np.float32 and np.abs(x - y).max() < error * max(1, np.abs(x).max())
