"""attention.forward of parts of a sequence: queries of some parts (lengths_k), keys that come in parts (accumulate), and the
outputs of float32 from which these go on."""

import numpy as np
import pytest
from forward_checks import draw, inputs, there
from places import OnInterpreter
from poison import poisoned

import attention
from attention import reference
from tiles import fp8e4m3

pytestmark = pytest.mark.usefixtures("family")


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(30, 0), softcap=9.0)], ids=["causal", "window"])
def test_parts_of_a_sequence_are_what_they_are_in_the_whole(place, options):
    """Bit by bit, with lengths_k of parts: attention.parallel's ranks have two parts each, of which this is one launch."""
    q, k, v = inputs(2, 140, 150, 2, 1, 96)
    whole, sums = (place.get(x) for x in attention.forward(*map(place.put, (q, k, v)), return_lse=True, **options))
    rows = np.r_[10:60, 85:135]
    ends = place.put(np.array([[70, 145]] * 2, np.int32))
    args = [place.put(x) for x in (np.ascontiguousarray(q[:, rows]), k, v)]
    out, lse = attention.forward(*args, lengths_k=ends, return_lse=True, **options)
    np.testing.assert_array_equal(place.get(out), whole[:, rows])
    np.testing.assert_array_equal(place.get(lse), sums[:, :, rows])


@pytest.mark.parametrize("options", [{}, dict(causal=True, lengths_k=True)], ids=["full", "keys in use"])
def test_an_output_that_is_not_rounded(place, options):
    """out of float32 is what is rounded elsewhere."""
    q, k, v = map(place.put, inputs(1, 100, 150, 2, 1, 64))
    if "lengths_k" in options:
        options = options | {"lengths_k": place.put(np.array([140], np.int32))}
    out = place.put(poisoned((1, 100, 2, 64), np.float32))
    assert attention.forward(q, k, v, out=out, **options) is out
    rounded = place.get(attention.forward(q, k, v, **options))
    np.testing.assert_array_equal(place.get(out).astype(rounded.dtype), rounded)
    assert (place.get(out) != rounded.astype(np.float32)).mean() > 0.5


def in_parts(place, q, k, v, cut, **options):
    """Queries go on from keys before `cut` to those behind it: out and lse against float64, where each part's are merged."""
    parts = [(k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:])]
    out, lse = place.put(poisoned(q.shape, np.float32)), place.put(poisoned((q.shape[0], q.shape[2], q.shape[1]), np.float32))
    call_options = there(place, options) | dict(out=out, lse=lse, return_lse=True)
    for n, part in enumerate(parts):
        outputs = attention.forward(*map(place.put, (q, *part)), accumulate=n > 0, **call_options)
        assert outputs[0] is out and outputs[1] is lse

    def both(function):
        actual = [function(q, *part, **options) for part in parts]
        sums = np.array([sums for _, sums in actual], np.float64)
        with np.errstate(invalid="ignore"):
            total = np.logaddexp(*sums)
            weights = np.nan_to_num(np.exp(sums - total)).swapaxes(2, 3)[..., None]
        return sum(w * o.astype(np.float64) for w, (o, _) in zip(weights, actual)), total

    (ref, ref_lse), (low, low_lse) = both(reference.forward), both(reference.forward_low)
    reference.assert_close(place.get(out), ref, low)
    with np.errstate(invalid="ignore"):
        lost = np.nanmax(np.abs(low_lse - ref_lse), initial=0)
    np.testing.assert_allclose(place.get(lse), ref_lse, rtol=2e-6, atol=2 * lost + 2e-6)
    return place.get(lse)


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(dropout=0.3, seed=5)], ids=["full", "causal", "dropped"])
def test_keys_in_parts(place, options):
    """Causal, some queries see keys of the later part alone, and some see none."""
    lse = in_parts(place, *inputs(2, 140, 150, 2, 1, 64), 70, **options)
    assert np.isneginf(lse).any() == ("causal" in options)


def test_keys_in_parts_of_sequences_that_end(place):
    sink = np.array([0.5, -2.0], np.float32)
    in_parts(place, *inputs(2, 70, 90, 2, 1, 128), 40, lengths_k=np.array([40, 13], np.int32), sink=sink)


@pytest.mark.release
@pytest.mark.parametrize("family", ["sm_90", "sm_80"], indirect=True)
def test_keys_in_parts_as_compiled(family, as_compiled):
    as_compiled({"sm_90": "sm_90a", "sm_80": "sm_80"}[family])
    in_parts(OnInterpreter(), *inputs(1, 40, 70, 1, 1, 64), 30)


def test_keys_in_parts_are_refused():
    q, k, v = inputs(1, 40, 40, 2, 1, 64)
    out, lse = np.zeros(q.shape, np.float32), np.zeros((1, 2, 40), np.float32)
    for wrong in (
        dict(out=out),
        dict(lse=lse),
        dict(out=out, lse=lse, q=q.astype(fp8e4m3.np), k=k.astype(fp8e4m3.np), v=v.astype(fp8e4m3.np)),
    ):
        with pytest.raises(TypeError, match="accumulate: needs out and lse of float32"):
            attention.forward(**(dict(q=q, k=k, v=v, accumulate=True) | wrong))
    with pytest.raises(TypeError, match="out: dtype must be"):
        attention.forward(q, k, v, out=np.zeros_like(q), lse=lse, accumulate=True)
    with pytest.raises(TypeError, match="lse: needs return_lse=True"):
        attention.forward(q, k, v, lse=lse)
    assert attention.forward(q, k[:, :0], v[:, :0], out=out, lse=lse, accumulate=True) is out


def test_parts_are_refused_with_what_counts_queries(family):
    q, k, v = inputs(1, 40, 40, 2, 1, 64)
    ends = np.array([[20, 40]], np.int32)
    with pytest.raises(NotImplementedError, match=r"lengths_k: of shape \(B, C\) is not supported with mask or score"):
        attention.forward(q, k, v, lengths_k=ends, mask=lambda b, h, i, j: j < i)
    with pytest.raises(NotImplementedError, match="not supported with bias"):
        attention.forward(q, k, v, lengths_k=ends, bias=np.zeros((1, 1, 40, 40), np.float32))
    with pytest.raises(ValueError, match="must have a number of parts that divides the queries"):
        attention.forward(q, k, v, lengths_k=np.array([[20, 40, 40]], np.int32))
    twice, both = (np.concatenate([x, x]) for x in (q, k)), np.concatenate([ends, ends])
    with pytest.raises(NotImplementedError, match="not supported with slopes of each batch in alibi"):
        attention.forward(*twice, np.concatenate([v, v]), lengths_k=both, alibi=np.zeros((2, 2), np.float32))


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_parts_have_the_slopes_of_their_heads(shape, family):
    """No part reads behind them: the second one of a batch has none of its own."""
    q, k, v = inputs(2, 20, 24, 2, 1, 64)
    lengths, slopes = np.array([[3, 24], [0, 11]], np.int32), draw(shape, np.float32)
    out = attention.forward(q, k, v, lengths_k=lengths, alibi=slopes, family=family)
    for b, c in np.ndindex(2, 2):
        rows = slice(b, b + 1), slice(10 * c, 10 * c + 10)
        exact, _ = reference.forward(q[rows], k[rows[0]], v[rows[0]], lengths_k=lengths[b, c : c + 1], alibi=slopes)
        np.testing.assert_allclose(out[rows].astype(float), exact, atol=0.02)
