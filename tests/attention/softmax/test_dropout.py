"""Dropout of attention.forward's weights: the mask in NumPy is that of the kernels, whatever they are."""

import functools
import itertools

import numpy as np
import pytest
from forward_checks import agree, inputs
from poison import poisoned

import attention
from attention.parts.weight_dropout import Dropout, dropout_numbers
from attention.plans.softmax.forward_programs import _variant
from attention.plans.softmax.variant_spec import build_variant
from tiles.dtypes import bf16, fp16
from tiles.launching.arrays import Number

F32 = np.dtype(np.float32)


@pytest.fixture(params=["sm_90", "sm_80"])
def family(request):
    return request.param


@pytest.mark.parametrize(("head_dim", "dropout", "seed"), [(64, 0.1, 0), (128, 0.5, 2**63 - 1), (256, 0.75, 2**40 + 7)])
def test_dropout(place, family, head_dim, dropout, seed):
    """Key blocks of 128, 64, 80 and 32 keys; heads that share keys, batches."""
    agree(place, *inputs(2, 70, 210, 2, 1, head_dim), family=family, dropout=dropout, seed=seed, causal=head_dim == 64)


def test_with_other_variants(place, family):
    """Sequences count from their own start; a sink's weight cannot be dropped."""
    ends, ends_k = np.array([0, 5, 20, 90], np.int32), np.array([0, 7, 7, 120], np.int32)
    options = dict(family=family, dropout=0.4, seed=3, sink=np.array([0.5, -1], F32))
    agree(place, *inputs(1, 90, 120, 2, 1, 64), cu_seqlens=ends, cu_seqlens_k=ends_k, window=(40, 20), **options)
    agree(place, *inputs(2, 40, 200, 2, 2, 64, layout="bhsd"), layout="bhsd", softcap=2.0, q_norm=np.ones(64, F32),
          mask=lambda b, h, i, j: (j < 20) | (j > 190), **options)  # fmt: skip


def test_a_seed_in_memory(place, family):
    """The same as the number; another value is another mask, and no other plan."""
    q, k, v = (place.put(x) for x in inputs(1, 20, 40, 1, 1, 64))
    number = attention.forward(q, k, v, dropout=0.5, seed=2**35 + 5, family=family)
    actual = []
    for value in (2**35 + 5, 5):
        seed = place.put(np.array([value], np.int64))
        actual.append(place.get(attention.forward(q, k, v, dropout=0.5, seed=seed, family=family)))
    assert (actual[0] == place.get(number)).all() and (actual[1] != actual[0]).any()


def test_another_seed_is_no_other_plan(monkeypatch):
    """It goes to the kernel with the addresses; 0 is one, and not none."""
    q, k, v = inputs(1, 20, 40, 1, 1, 64)
    plans, real = [], _variant.planner
    monkeypatch.setattr(_variant, "planner", functools.wraps(real)(lambda *args: plans.append(args) or real(*args)))
    actual = [attention.forward(q, k, v, dropout=0.25, seed=seed, family="sm_80") for seed in (1, 0, 2**62, 1)]
    assert len(plans) == 1 and (actual[0] == actual[3]).all()
    assert all((one != other).any() for one, other in itertools.combinations(actual[:3], 2))


def test_nothing_overflows(place, family):
    """In float16, where few weights are left that count much."""
    q, k, v = inputs(1, 16, 300, 1, 1, 64, fp16.np)
    agree(place, q * 8, k, v, family=family, dropout=0.999, seed=1)


def test_the_mask():
    """As often as it should be, and as broadcast as its places are; nothing that is kept at 0.1 is dropped at less."""
    i, j = np.arange(300)[:, None], np.arange(500)
    few, many = (attention.dropout_mask(9, share, 1, 2, i, j) for share in (0.1, 0.6))
    assert few.shape == (300, 500) and abs(few.mean() - 0.9) < 0.005 and abs(many.mean() - 0.4) < 0.005
    assert (few >= many).all() and few[17, 33] == attention.dropout_mask(9, 0.1, 1, 2, 17, 33)
    heads = attention.dropout_mask(9, 0.1, np.arange(3)[:, None, None, None], np.arange(4)[:, None, None], i, j)
    assert heads.shape == (3, 4, 300, 500) and (heads[1, 2] == few).all() and (heads[1, 3] != few).any()


def test_no_dropout_is_plain():
    q, k, v = inputs(1, 20, 40, 1, 1, 64)
    plain = attention.forward(q, k, v, family="sm_80")
    for dropout in (0, 0.0, 1e-9):
        assert (attention.forward(q, k, v, dropout=dropout, seed=5, family="sm_80") == plain).all()


def test_what_kernels_are_told():
    assert dropout_numbers(0.5) == {"dropped": 32768, "per_kept": 2} and dropout_numbers(1 - 2**-20)["dropped"] == 65535
    assert set(build_variant(1.0, extra_parts=[(Dropout(), dropout_numbers(0.5) | {"seed": Number(-1)})]).numbers) == set(
        Dropout().params
    )


@pytest.mark.parametrize(("options", "what"), [
    (dict(dropout=1.0, seed=1), "dropout: must be from 0 to below 1: dropout=1.0"),
    (dict(dropout=-0.1, seed=1), "dropout: must be from 0"),
    (dict(dropout="0.1", seed=1), "dropout: must be a number"),
    (dict(dropout=0.1), "seed: is required with dropout > 0"),
    (dict(dropout=0.1, seed=-1), r"seed: must be from 0 to below 2\*\*63"),
    (dict(dropout=0.1, seed=1.5), "seed: must be an integer, or an array of one: seed=1.5"),
    (dict(dropout=0.1, seed=True), "seed: must be an integer"),
    (dict(dropout=0.1, seed=np.zeros(2, np.int64)), "seed: must have one element"),
])  # fmt: skip
def test_what_is_refused(options, what):
    q, k, v = inputs(1, 4, 4, 2, 1, 64, bf16.np)
    out = poisoned(q.shape, q.dtype)
    with pytest.raises((TypeError, ValueError), match=what):
        attention.forward(q, k, v, out=out, **options)
    assert np.isnan(out.astype(F32)).all()
