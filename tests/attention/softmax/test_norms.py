"""Norms of queries and keys before attention.forward's scores, against float64."""

import numpy as np
import pytest
from forward_checks import agree, inputs, weights, weights_of
from places import OnInterpreter
from poison import poisoned

import attention
from attention.kernels.softmax import forward_ampere, forward_hopper
from attention.options import ScoreOptions
from attention.parts.norms import LayerNorm, QueryNorm, RmsNorm
from attention.plans.softmax.variant_spec import build_variant
from tiles import bf16
from tiles.dtypes import fp16
from tiles.targets import LARGE

BF16, FP16, F32 = bf16.np, fp16.np, np.dtype(np.float32)


@pytest.fixture(params=["sm_90", "sm_80"])
def family(request):
    return request.param


@pytest.mark.parametrize(("ours", "theirs"), [("rms", "rms of heads"), ("rms of heads", "rms"), ("layer", "layer of heads"),
                                              ("layer of heads", "rms"), ("layer", None), (None, "layer")])  # fmt: skip
def test_norms(place, family, ours, theirs):
    """Rows whose mean is not 0; heads that share keys; a last tile that is not full."""
    q, k, v = inputs(1, 70, 150, 4, 2, 64)
    norms = {"q_norm": weights_of(4, 64).get(ours), "k_norm": weights_of(2, 64).get(theirs)}
    norms = {name: x for name, x in norms.items() if x is not None}
    agree(place, q + BF16.type(2), k - BF16.type(1), v, family=family, causal=True, norm_eps=1e-2, **norms)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (72, 72), (136, 64), (256, 256)])
def test_columns_that_are_padding_do_not_count(place, family, head_dim, value_dim):
    q, k, v = inputs(1, 40, 50, 2, 2, head_dim, FP16, value_dim=value_dim)
    for norm in weights(head_dim), (weights(head_dim), weights(head_dim)):
        agree(place, q + FP16.type(1), k + FP16.type(1), v, family=family, q_norm=norm, k_norm=norm)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_with_other_variants(place, family, layout):
    """Packed sequences, of which one has no key, and lengths; a mask that lists blocks."""
    q, k, v = inputs(1, 90, 120, 2, 1, 64, layout=layout)
    norms = {"q_norm": weights(64), "k_norm": weights(1, 64)}
    ends, ends_k = np.array([0, 5, 20, 90], np.int32), np.array([0, 7, 7, 120], np.int32)
    agree(place, q, k, v, family=family, layout=layout, **norms, cu_seqlens=ends, cu_seqlens_k=ends_k, window=(30, 10))
    q, k, v = inputs(2, 40, 200, 2, 2, 64, layout=layout)
    slopes = np.array([0.1, 0.2], F32)
    agree(place, q, k, v, family=family, layout=layout, **norms | {"k_norm": weights(2, 64)}, alibi=slopes, softcap=3.0,
          mask=lambda b, h, i, j: (j < 20) | (j > 190), scale=0.2)  # fmt: skip


def test_rows_that_are_not_in_use_do_no_harm(place, family):
    norms = dict(q_norm=weights(64), k_norm=weights(64))
    agree(place, *inputs(1, 30, 140, 1, 1, 64), family=family, lengths_k=np.array([100], np.int32), **norms)


def test_many_tiles_one_behind_the_other(place, family):
    """A tile of queries is normalised once: its place is another's before."""
    agree(place, *inputs(1, 400, 64, 4, 1, 64), family=family, q_norm=weights(64), causal=True)


def test_elements_that_are_not_aligned():
    """Rows of k that begin at any multiple of 2 bytes."""
    q, k, v = inputs(1, 20, 40, 1, 1, 64)
    room = poisoned((1, 40, 1, 66), BF16)
    room[..., 1:65] = k
    expected = attention.forward(q, k, v, k_norm=weights(64, dtype=F32) * 0 + 2, family="sm_80")
    actual = attention.forward(q, room[..., 1:65], v, k_norm=weights(64, dtype=F32) * 0 + 2)
    assert (actual == expected).all()


def test_as_compiled(as_compiled):
    """With dropout, whose draws are made of the machine's integers, too."""
    as_compiled("sm_90a")
    norm = weights(40, dtype=BF16), weights(40)
    agree(OnInterpreter(), *inputs(1, 5, 20, 1, 1, 40), q_norm=weights(40), k_norm=norm, dropout=0.5, seed=2**40 + 3)


def test_a_plain_kernels_shape_serves_norms():
    """Norms leave a kernel's tiles as long as they were, so tiles follow each other where plain attention's do."""
    for norm in RmsNorm(), LayerNorm():
        variant = build_variant(1.0, ScoreOptions(True), extra_parts=[(QueryNorm(norm), {})]).variant
        config = forward_hopper.config_for(128, bf16, variant, 1000)
        assert config.persistent and config.q_stages == 2 and forward_hopper.make(config)[1].nbytes <= LARGE
        assert forward_ampere.config_for(128, bf16, variant).variant is variant


@pytest.mark.parametrize(("options", "what"), [
    (dict(q_norm=weights(3, 64)), r"q_norm: heads must equal q's: q_norm.shape=\(3, 64\)"),
    (dict(k_norm=weights(2, 64)), "k_norm: heads must equal k's"),
    (dict(q_norm=weights(32)), "q_norm: head_dim must equal q's"),
    (dict(q_norm=np.ones(128, F32)[::2]), "q_norm: last axis must be contiguous: q_norm.strides"),
    (dict(k_norm=(weights(64),)), r"k_norm: must be weights, or a pair \(weights, bias\)"),
    (dict(k_norm=(weights(64), weights(2, 1, 64))), "k_norm_bias: must have the axes D; or Hk, D"),
    (dict(q_norm=weights(64), norm_eps=0.0), "norm_eps: must be positive"),
    (dict(q_norm=weights(64).astype(float)), "q_norm: dtype must be one of"),
])  # fmt: skip
def test_what_is_refused(options, what):
    q, k, v = inputs(1, 4, 4, 2, 1, 64)
    out = poisoned(q.shape, q.dtype)
    with pytest.raises((TypeError, ValueError), match=what):
        attention.forward(q, k, v, out=out, **options)
    assert np.isnan(out.astype(F32)).all()
