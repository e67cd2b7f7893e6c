"""attention/reference/scores.py and the options of softmax.py, against independent loops over b, h, i and j."""

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.reference import forward, forward_low, tolerance


def naive(q, k, v, *, causal=False, window=None, softcap=None, alibi=None, sink=None, bias=None, mask=None, score=None, aux=(),
          dropout=0.0, keep=None, scale=None):  # fmt: skip
    """out (Sq, H, Dv) and lse (H, Sq) of one sequence, with lists and math only; alibi (H,), bias (H, Sq, Sk), mask and score
    are functions of (h, i, j), keep (H, Sq, Sk)."""
    (rows, heads, width), (cols, kv_heads, _) = q.shape, k.shape
    scale = 1 / math.sqrt(width) if scale is None else scale
    out, lse = np.zeros((rows, heads, v.shape[2])), np.full((heads, rows), -np.inf)
    for h in range(heads):
        g = h // (heads // kv_heads)
        for i in range(rows):
            weights = {}
            for j in range(cols):
                s = scale * sum(q[i, h, c] * k[j, g, c] for c in range(width))
                if softcap:
                    s = softcap * math.tanh(s / softcap)
                diagonal = i + cols - rows  # the key beside query i
                if alibi is not None:
                    s -= alibi[h] * abs(diagonal - j)
                if bias is not None:
                    s += bias[h, i, j]
                if score:
                    s = score(s, h, i, j, *aux)
                if causal and j > diagonal:
                    continue
                if window and window[0] is not None and diagonal - j > window[0]:
                    continue
                if window and window[1] is not None and j - diagonal > window[1]:
                    continue
                if mask and not mask(h, i, j, *aux):
                    continue
                weights[j] = math.exp(s)
            total = sum(weights.values()) + (0 if sink is None else math.exp(sink[h]))
            if total:
                lse[h, i] = math.log(total)
            for j, weight in weights.items():
                if keep is None or keep[h, i, j]:
                    out[i, h] += weight / total * v[j, g] / (1 - dropout)
    return out, lse


def close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)


def draw(seed, batch, rows, cols, heads, kv_heads, width=4, value_width=3):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((batch, rows, heads, width)), rng.standard_normal((batch, cols, kv_heads, width))
    return rng, q, k, rng.standard_normal((batch, cols, kv_heads, value_width))


ENDS = st.none() | st.integers(0, 4)


PARTS = "softcap", "alibi", "sink", "bias", "mask", "score", "drop", "scale"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 7), st.sampled_from([(2, 1), (2, 2), (3, 1)]),
    st.booleans(), st.none() | st.tuples(ENDS, ENDS), st.sets(st.sampled_from(PARTS)),
    st.sets(st.sampled_from((0, 1, 2))),
)  # fmt: skip
def test_any_combination(seed, rows, cols, heads, causal, window, on, one):
    """Two sequences, each with its own bias, ALiBi slopes and mask; a bias has an extent of 1 along the axes in `one`."""
    rng, q, k, v = draw(seed, 2, rows, cols, *heads)
    heads = heads[0]
    docs, slopes = rng.integers(0, 2, (2, rows + cols)), rng.standard_normal((2, heads))
    bias = rng.standard_normal([1 if axis in one else n for axis, n in enumerate((2, heads, rows))] + [cols])
    every_bias = np.broadcast_to(bias, (2, heads, rows, cols))
    sink, dropped = rng.standard_normal(heads), rng.random((2, heads, rows, cols)) > 0.4
    cases = {
        "softcap": ({"softcap": 0.7}, lambda b: {"softcap": 0.7}),
        "alibi": ({"alibi": slopes}, lambda b: {"alibi": slopes[b]}),
        "sink": ({"sink": sink}, lambda b: {"sink": sink}),
        "bias": ({"bias": bias}, lambda b: {"bias": every_bias[b]}),
        "mask": ({"mask": lambda b, h, i, j, d: (d[b][i] == d[b][j]) & ((i + j + h) % 3 > 0)},
                 lambda b: {"mask": lambda h, i, j, d: d[b][i] == d[b][j] and (i + j + h) % 3 > 0}),
        "score": ({"score": lambda s, b, h, i, j, d: s * (1 + b) + (j - 2 * i) / (h + 1) + d[b][i]},
                  lambda b: {"score": lambda s, h, i, j, d: s * (1 + b) + (j - 2 * i) / (h + 1) + d[b][i]}),
        "drop": ({"dropout": 0.4, "keep": dropped}, lambda b: {"dropout": 0.4, "keep": dropped[b]}),
        "scale": ({"scale": 0.3}, lambda b: {"scale": 0.3}),
    }  # fmt: skip
    whole, parts = (
        {"causal": causal, "window": window, "aux": (docs,)},
        [{"causal": causal, "window": window, "aux": (docs,)}] * 2,
    )
    for name in on:
        whole, parts = whole | cases[name][0], [part | cases[name][1](b) for b, part in enumerate(parts)]
    expected = [naive(q[b], k[b], v[b], **part) for b, part in enumerate(parts)]
    close(forward(q, k, v, **whole), map(np.stack, zip(*expected)))


def packed(causal):
    return dict(causal=causal, window=(3, 1), alibi=np.array([[1, 0.5], [0.2, 2], [1, 1.0]]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shorter", [False, True])
def test_packed_sequences(causal, shorter):
    """Each has the result that it has by itself; keys from lengths_k on are NaN."""
    rng, q, k, v = draw(0, 1, 9, 11, 2, 1)
    ends, ends_k, lengths = [0, 4, 4, 9], [0, 5, 7, 11], np.array([3, 2, 4] if shorter else [5, 2, 4])
    options = packed(causal) | {"mask": lambda b, h, i, j: (i + j + b) % 4 > 0}
    keep = rng.random((3, 2, 5, 5)) > 0.3
    k[0, 3:5] = v[0, 3:5] = np.nan if shorter else 1
    actual = forward(
        q, k, v, **options, cu_seqlens=np.array(ends), cu_seqlens_k=np.array(ends_k), lengths_k=lengths if shorter else None,
        dropout=0.3, keep=lambda b, h, i, j: keep[b, h][i, j],
    )  # fmt: skip
    for n in range(3):
        rows, cols = slice(ends[n], ends[n + 1]), slice(ends_k[n], ends_k[n] + lengths[n])
        sequence_options = options | {"alibi": options["alibi"][n], "mask": lambda h, i, j, n=n: (i + j + n) % 4 > 0}
        out, lse = naive(q[0, rows], k[0, cols], v[0, cols], **sequence_options, dropout=0.3, keep=keep[n])
        close((actual[0][0, rows], actual[1][0, :, rows]), (out, lse))


def test_cu_seqlens_k_is_cu_seqlens_by_default():
    _, q, k, v = draw(1, 1, 6, 6, 2, 2)
    ends = np.array([0, 2, 6])
    close(forward(q, k, v, causal=True, cu_seqlens=ends), forward(q, k, v, causal=True, cu_seqlens=ends, cu_seqlens_k=ends))


def test_lengths_k_aligns_the_last_query():
    """The last query is aligned with the last key of lengths_k, and poison after it does not matter."""
    _, q, k, v = draw(2, 2, 3, 8, 2, 1)
    k[1, 5:] = v[1, 5:] = np.nan
    actual = forward(q, k, v, causal=True, lengths_k=np.array([8, 5]))
    by_sequence = [naive(q[b], k[b, :n], v[b, :n], causal=True) for b, n in ((0, 8), (1, 5))]
    close(actual, map(np.stack, zip(*by_sequence)))


def test_a_sink_without_keys():
    """Rows without visible keys have out = 0 and lse = sink."""
    _, q, k, v = draw(3, 1, 2, 2, 2, 2)
    out, lse = forward(q, k, v, mask=lambda b, h, i, j: (i > j) & (j > i), sink=np.array([0.5, -1.0]))
    assert (out == 0).all() and (lse == np.array([0.5, -1])[:, None]).all()


def test_norms():
    """RMS norm and layer norm, against a row at a time."""
    rng, q, k, v = draw(4, 1, 3, 4, 2, 1)
    weights, wide, shift = rng.standard_normal(4), rng.standard_normal((1, 4)), rng.standard_normal(4)
    rms = np.array([[[row / math.sqrt(sum(x * x for x in row) / 4 + 1e-3) for row in token] for token in q[0]]]) * weights
    mean = (
        np.array([[[(row - sum(row) / 4) / math.sqrt(np.var(row) + 1e-3) for row in token] for token in k[0]]]) * wide + shift
    )
    actual = forward(q, k, v, q_norm=weights, k_norm=(wide, shift), norm_eps=1e-3, causal=True)
    close(actual, forward(rms, mean, v, causal=True))


def test_blocks():
    """mask counts in blocks listed as partial, not in those listed as full; others, also those after the count, are not
    visible."""
    _, q, k, v = draw(5, 2, 4, 6, 2, 2)
    blocks = SimpleNamespace(
        BLOCK_SIZE=(2, 3),
        kv_num_blocks=np.array([[[1, 0]], [[2, 1]]]),
        kv_indices=np.array([[[[1, 0], [0, 1]]], [[[0, 1], [0, 1]]]]),
        full_kv_num_blocks=np.array([[[0, 1]], [[0, 0]]]),
        full_kv_indices=np.array([[[[0, 1], [0, 1]]], [[[0, 1], [0, 1]]]]),
    )
    mask = lambda b, h, i, j: i < j
    actual = forward(q, k, v, mask=mask, blocks=blocks)
    see = np.zeros((2, 4, 6), bool)
    see[0, :2, 3:] = see[1, :2] = see[1, 2:, :3] = True
    see &= np.arange(4)[:, None] < np.arange(6)
    see[0, 2:, :3] = True
    close(actual, forward(q, k, v, mask=lambda b, h, i, j: see[b][i, j]))
    blocks.full_kv_num_blocks, blocks.BLOCK_SIZE = None, 3
    blocks.kv_num_blocks = np.array([[[1, 2]]])
    see = np.ones((4, 6), bool)
    see[:3, :3] = False
    close(forward(q, k, v, blocks=blocks), forward(q, k, v, mask=lambda b, h, i, j: see[i, j]))


def test_a_mask_that_returns_numbers():
    _, q, k, v = draw(6, 1, 2, 2, 1, 1)
    with pytest.raises(TypeError, match="mask: must return booleans, not float64"):
        forward(q, k, v, mask=lambda b, h, i, j: (j - i) * 0.5)


def test_keys_that_are_not_seen_may_be_outside_of_what_a_score_reads():
    """attention.forward allows it, so the reference does: the same numbers as from an array with all of them."""
    rng, q, k, v = draw(8, 1, 6, 6, 1, 1)
    table = rng.standard_normal((2, 4))
    longer, options = np.pad(table, ((0, 0), (8, 8))), {"window": (3, 0)}
    short, _ = forward(q, k, v, score=lambda s, b, h, i, j, w: s + w[h, i - j], aux=(table,), **options)
    long, _ = forward(q, k, v, score=lambda s, b, h, i, j, w: s + w[h, i - j + 8], aux=(longer,), **options)
    assert np.array_equal(short, long)


def test_low_is_near():
    """In bfloat16: rounding errors only, and the documented dtypes."""
    rng, *qkv = draw(7, 1, 8, 8, 2, 2, 16, 8)
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in qkv)
    options = dict(
        softcap=2.0, alibi=np.array([0.5, 1], np.float32), sink=np.zeros(2, ml_dtypes.bfloat16), q_norm=np.ones(16),
        bias=rng.standard_normal((1, 1, 1, 8)).astype(ml_dtypes.bfloat16), causal=True,
        score=lambda s, b, h, i, j, w: s * w[h], aux=(np.ones(2),),
    )  # fmt: skip
    (out, lse), (low, low_lse) = forward(q, k, v, **options), forward_low(q, k, v, **options)
    assert low.dtype == q.dtype and low_lse.dtype == np.float32 and out.dtype == lse.dtype == np.float64
    assert 0 < tolerance(out, low, q.dtype) < 0.1 and 0 < np.abs(low_lse - lse).max() < 0.02
