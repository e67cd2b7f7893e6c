"""attention/reference/softmax.py: properties of the formula, and that `tolerance` finds one wrong element."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.reference import assert_close, forward, forward_low, softmax, tolerance

bf16 = ml_dtypes.bfloat16


@st.composite
def problems(draw):
    """(q, k, v) in float64, (B, S, H, D), with Sk = 0 among them, and causal."""
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    seqlen_q, seqlen_kv, head_dim = draw(st.integers(1, 9)), draw(st.integers(0, 9)), draw(st.sampled_from([8, 16]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    q = rng.standard_normal((batch, seqlen_q, heads * group, head_dim))
    k, v = rng.standard_normal((2, batch, seqlen_kv, heads, head_dim))
    return q, k, v, draw(st.booleans())


def close(a, b):
    for x, y in zip(a, b):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def test_by_hand():
    """Two keys, scores 0 and log 3: weights 1/4 and 3/4."""
    q, k, v = np.zeros((1, 1, 1, 8)), np.zeros((1, 2, 1, 8)), np.zeros((1, 2, 1, 8))
    q[..., 0], k[0, 1, 0, 0], v[0, :, 0, 0] = 1, np.log(3), (4, 8)
    out, lse = forward(q, k, v, scale=1)
    assert out[0, 0, 0, 0] == pytest.approx(7) and lse[0, 0, 0] == pytest.approx(np.log(4))


@given(problems())
def test_rows_of_p_sum_to_one(problem):
    """With v = 1, out is the sum of a row of P = exp(s - lse): 1, or 0 for a row without keys."""
    q, k, v, causal = problem
    out, lse = forward(q, k, np.ones_like(v), causal=causal)
    keys = ~np.isneginf(lse).transpose(0, 2, 1)[..., None]
    np.testing.assert_allclose(out, np.broadcast_to(keys, out.shape), rtol=1e-12)
    last = np.arange(q.shape[1]) + k.shape[1] - q.shape[1] if causal else np.full(q.shape[1], k.shape[1] - 1)
    assert (keys[0, :, 0, 0] == (last >= 0)).all()


@given(problems(), st.floats(-3, 3))
def test_a_constant_added_to_the_scores_changes_only_lse(problem, shift):
    """One more column, 1 in q and the same in every key, adds a constant to a row's scores."""
    q, k, v, causal = problem
    wide_q = np.concatenate([q, np.ones_like(q)], -1)
    wide_k = np.concatenate([k, np.full_like(k, shift / k.shape[-1])], -1)
    out, lse = forward(wide_q, wide_k, np.concatenate([v, v], -1), causal=causal, scale=1)
    ref_out, ref_lse = forward(q, k, v, causal=causal, scale=1)
    close((out[..., : v.shape[-1]], lse), (ref_out, ref_lse + shift))


@given(problems())
def test_shared_heads_equal_repeated_heads(problem):
    q, k, v, causal = problem
    group = q.shape[2] // k.shape[2]
    close(forward(q, k, v, causal=causal), forward(q, *(x.repeat(group, axis=2) for x in (k, v)), causal=causal))


@given(problems())
def test_a_causal_row_is_full_attention_over_its_keys(problem):
    q, k, v, _ = problem
    out, lse = forward(q, k, v, causal=True)
    for row in range(q.shape[1]):
        keys = max(0, row + 1 + k.shape[1] - q.shape[1])
        full_attention = forward(q[:, row : row + 1], k[:, :keys], v[:, :keys])
        close((out[:, row : row + 1], lse[:, :, row : row + 1]), full_attention)


@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_the_keys_does_not_matter(problem, random):
    q, k, v, _ = problem
    order = random.sample(range(k.shape[1]), k.shape[1])
    close(forward(q, k[:, order], v[:, order]), forward(q, k, v))


@given(problems())
def test_parts_of_the_keys_combine_by_lse(problem):
    q, k, v, _ = problem
    half = k.shape[1] // 2
    parts = [forward(q, k[:, s], v[:, s]) for s in (slice(0, half), slice(half, None))]
    out, lse = forward(q, k, v)
    weights = [np.exp(part - np.where(np.isneginf(lse), 0, lse)).transpose(0, 2, 1)[..., None] for _, part in parts]
    np.testing.assert_allclose(sum(w * o for w, (o, _) in zip(weights, parts)), out, rtol=1e-10, atol=1e-12)


@given(problems())
def test_layouts(problem):
    q, k, v, causal = problem
    out, lse = forward(*(x.swapaxes(1, 2) for x in (q, k, v)), causal=causal, layout="bhsd")
    close((out.swapaxes(1, 2), lse), forward(q, k, v, causal=causal))


def test_no_keys():
    q, k = np.ones((2, 3, 4, 8)), np.ones((2, 0, 2, 8))
    for forward_ in (forward, forward_low):
        out, lse = forward_(q, k, k)
        assert (out == 0).all() and np.isneginf(lse).all() and lse.shape == (2, 4, 3)


def test_blocks_of_rows_are_seamless(monkeypatch):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 37, 2, 8))
    whole = forward(q, k, v, causal=True)
    monkeypatch.setattr(softmax, "ROWS", 16)
    close(forward(q, k, v, causal=True), whole)


def test_large_scores():
    q = np.full((1, 2, 1, 8), 1e3)
    out, lse = forward(q, q, q, scale=1.0)
    assert (out == 1e3).all() and np.isfinite(lse).all()


def test_torch_agrees():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    q, k, v = (torch.from_numpy(rng.standard_normal((2, *size, 16))) for size in ((4, 9), (2, 7), (2, 7)))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    np.testing.assert_allclose(forward(q, k, v, scale=0.3, layout="bhsd")[0], expected, rtol=1e-12)
    low = forward_low(q.bfloat16(), k.bfloat16(), v.bfloat16(), scale=0.3, layout="bhsd")[0]
    assert low.dtype == bf16 and np.abs(low.astype(float) - expected.numpy()).max() < 0.05


# forward_low and the rule ---------------------------------------------------------------------------------------------


def low_problem(dtype, seed=0):
    q, k, v = np.random.default_rng(seed).standard_normal((3, 2, 33, 2, 64)).astype(dtype)
    return q, k, v


@pytest.mark.parametrize("dtype, error", [(bf16, 2**-7), (np.float16, 2**-10)])
def test_low_is_near_and_not_equal(dtype, error):
    q, k, v = low_problem(dtype)
    (out, lse), (low, low_lse) = forward(q, k, v), forward_low(q, k, v)
    assert (out.dtype, lse.dtype, low.dtype, low_lse.dtype) == (np.float64, np.float64, dtype, np.float32)
    assert 0 < np.abs(low.astype(float) - out).max() < error
    assert np.abs(low_lse - lse).max() < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [bf16, np.float16])
def test_low_is_within_tolerance(dtype, causal):
    q, k, v = low_problem(dtype)
    (out, lse), (low, low_lse) = (f(q, k[:, :20], v[:, :20], causal=causal) for f in (forward, forward_low))
    assert_close(low, out, low)
    assert_close(low_lse, lse, low_lse)
    assert_close(out.astype(dtype), out, out)  # the floor: one rounding of the exact result


@settings(max_examples=30)
@given(st.integers(0, 2 * 33 * 2 * 64 - 1), st.sampled_from([np.nan, np.inf, -np.inf, 30.0, "double"]))
def test_one_wrong_element_is_found(index, wrong):
    q, k, v = low_problem(bf16)
    (out, _), (low, _) = forward(q, k, v), forward_low(q, k, v)
    bad = low.copy()
    bad.flat[index] = bad.flat[index] + 2 * tolerance(out, low, bf16) + 0.01 if wrong == "double" else wrong
    where = ", ".join(map(str, np.unravel_index(index, bad.shape)))
    counts = f"^out: 1 of {bad.size} elements are off, {int(wrong != wrong)} of them NaN"
    with pytest.raises(AssertionError, match=counts) as raised:
        assert_close(bad, out, low)
    assert f"out[{where}] = " in str(raised.value)
