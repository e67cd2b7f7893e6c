"""attention.backward: gradients against float64 and finite differences, lengths around tile edges, errors."""

import itertools
import math

import numpy as np
import pytest
from forward_checks import draw, inputs, there
from gradient_checks import NAMES, agree, agree_among_poison
from hypothesis import given, settings
from hypothesis import strategies as st
from places import BF16, OnCard, OnInterpreter, random_on_the_card
from poison import Packing, as_on_a_device, edges, unseen

import attention
from attention import reference
from attention.kernels.softmax import backward_ampere, backward_hopper
from attention.parts.variant import CombinedVariant
from attention.parts.visibility import CAUSAL, FULL, WindowLeft, WindowRight
from tiles import bf16, fp16
from tiles.targets import LARGE, MULTIPROCESSORS, RESERVED, Target

F32, FP16 = np.float32, fp16.np
EDGES = [(1, 1), (1, 130), (63, 65), (64, 64), (128, 128), (129, 127), (130, 257), (5, 200), (200, 70)]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("lengths", "head_dim", "causal"), [*zip(EDGES, itertools.cycle([128, 64]), itertools.cycle([1, 1, 0]))]
)
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_lengths_around_every_tile_edge(place, lengths, head_dim, causal, family):
    """Query tiles and key blocks of 64 and 128. With more queries than keys some rows see no key."""
    agree(place, *inputs(1, *lengths, 1, 1, head_dim), family, causal=bool(causal), run_forward=True)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype"),
    [(8, 8, BF16), (72, 40, FP16), (64, 128, BF16), (192, 128, BF16), (256, 256, FP16), (160, 184, FP16), (64, 200, BF16)],
)
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_every_head_dim(place, head_dim, value_dim, dtype, family):
    """Head dims are padded inside the kernel, which never reads a neighbouring head: its values are large here."""
    q, k, v = inputs(1, 70, 90, 2, 2, head_dim, dtype, value_dim=value_dim)
    for x in (q, k, v):
        x[:, :, 1] *= 100
    agree(place, q[:, :, :1], k[:, :, :1], v[:, :, :1], family, causal=True)


@pytest.mark.parametrize(
    ("heads", "heads_kv", "layout", "family"),
    [
        (4, 2, "bhsd", "sm_90"),
        (3, 1, "bshd", "sm_80"),
        (3, 1, "bshd", "sm_90"),
        (2, 2, "bhsd", "sm_80"),
        (2, 2, "bshd", "sm_90"),
    ],
)
def test_shared_key_heads_and_layouts(place, heads, heads_kv, layout, family):
    agree(place, *inputs(2, 40, 130, heads, heads_kv, 64, layout=layout), family, causal=True, layout=layout, scale=0.2)


@pytest.mark.parametrize(
    ("lengths", "heads", "options"),
    [
        ((130, 129), (2, 1), dict(causal=True)),
        ((100, 200), (1, 1), dict(window=(90, 20), sink=np.array([0.5], F32))),
        ((1, 65), (1, 1), dict(alibi=np.array([0.2], F32))),
        ((200, 70), (1, 1), dict(causal=True)),
    ],
)
def test_wide_heads(place, lengths, heads, options):
    """Several query tiles and key blocks, heads that share keys, rows that see no key and keys that no row sees."""
    agree(place, *inputs(1, *lengths, *heads, 136), "sm_90", with_dlse=True, **options)


@pytest.mark.parametrize(
    ("head_dim", "lengths", "variant", "shape"),
    [
        (64, (64, 4096), FULL, (64, 64)),  # (keys of a block, queries of a tile)
        (64, (128, 128), CAUSAL, (128, 128)),
        (64, (65, 129), FULL, None),
        (64, (129, 128), FULL, None),
        (96, (32, 32), FULL, (32, 32)),
        (128, (32, 4096), FULL, (64, 32)),
        (128, (64, 64), FULL, (64, 64)),
        (128, (33, 65), FULL, None),
        (136, (16, 16), FULL, None),
    ],
)
def test_shapes_for_short_sequences(head_dim, lengths, variant, shape):
    chosen = backward_ampere.short_shape(head_dim, 8, variant, *lengths)
    assert (chosen and chosen[:2]) == shape


def test_warps_have_equal_parts_of_dq():
    with pytest.raises(ValueError, match="warps: must divide the 2 parts of dQ: self.warps=4"):
        backward_ampere.config_for(64, bf16, FULL, shape=(64, 32, 16, 32, False, 3))


SHORT = [(16, 16), (64, 64), (49, 64), (1, 1), (33, 300), (30, 20), (100, 128)]


@pytest.mark.parametrize(
    ("lengths", "head_dim", "causal"), [*zip(SHORT, itertools.cycle([64, 128, 40]), [0, 1, 1, 0, 1, 1, 0])]
)
def test_short_sequences(place, lengths, head_dim, causal):
    """A thread block that has all keys stores dQ itself, if each query sees a key."""
    agree(place, *inputs(2, *lengths, 4, 2, head_dim), with_dlse=True, causal=bool(causal))


@pytest.mark.parametrize("lengths", [(40, 64), (100, 60)])
def test_single_block_accumulates(place, lengths):
    q, k, v = inputs(1, *lengths, 2, 1, 64)
    dout, (out, lse) = draw(q.shape, q.dtype), reference.forward_low(q, k, v)
    arrays = [place.put(x) for x in (dout, q, k, v, out, lse)]
    initial = [draw(x.shape, F32, 5) for x in (q, k, v)]
    into = [place.put(x.copy()) for x in initial]
    attention.backward(*arrays, accumulate=True, family="sm_80", **dict(zip(NAMES, into)))
    for name, before, x, ref in zip(NAMES, initial, into, reference.backward(dout, q, k, v)):
        np.testing.assert_allclose(place.get(x) - before, ref, rtol=0.03, atol=0.03 * np.abs(ref).max(), err_msg=name)


VARIANTS = {
    "window": dict(window=(70, 20)),
    "window of one key": dict(window=(0, 0)),
    "window, left": dict(window=(100, None)),
    "window, right": dict(window=(None, 10)),
    "window, causal": dict(causal=True, window=(64, 9)),
    "softcap": dict(softcap=2.0, window=(None, 60)),
    "softcap of scores that count much, alibi, causal": dict(
        softcap=5.0, alibi=np.array([0.3, 0.1], F32), causal=True, scale=0.4
    ),
    "bias of each sequence": dict(bias=draw((2, 2, 90, 170), F32, 3)),
    "sink, softcap": dict(sink=np.array([1.5, -2], F32), softcap=3.0, causal=True),
    "alibi": dict(alibi=np.array([0.5, 0.01], F32), window=(None, 30)),
    "alibi of each sequence, causal": dict(alibi=np.array([[0.5, 0.1], [0.2, 3]], F32), causal=True),
    "alibi, steep, causal": dict(alibi=np.array([77, 2e4], F32), causal=True),
    "alibi, steep, window": dict(alibi=np.array([1e3, 2e4], F32), window=(70, 0)),
}


@pytest.mark.parametrize(("name", "head_dim"), [*zip(VARIANTS, itertools.cycle([64, 128]))])
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_variants(place, name, head_dim, family):
    batch = 2 if "sequence" in name else 1
    agree(place, *inputs(batch, 90, 170, 2, 1, head_dim), family, with_dlse=True, **VARIANTS[name])


# batch, head_dim, options. At 128, tiles have 128 queries and 64 keys; windows begin and end inside and at their edges
TMA_BIASES = [
    (2, 64, dict(bias=draw((2, 1, 140, 136), BF16, 3), softcap=2.0, causal=True)),
    (2, 128, dict(bias=draw((1, 2, 135, 136), FP16, 3), alibi=np.array([0.5, 0.1], F32), window=(2, 0))),
    (1, 128, dict(bias=draw((1, 1, 128, 216), BF16, 3), window=(150, 60))),
    (1, 128, dict(bias=draw((1, 1, 128, 216), BF16, 3), window=(160, 38))),
    (1, 256, dict(bias=draw((1, 1, 140, 136), BF16, 3))),
]


@pytest.mark.parametrize(("batch", "head_dim", "options"), TMA_BIASES)
def test_bias_loaded_by_tma(place, batch, head_dim, options):
    """Its gradient has a kernel of its own, except for wide heads."""
    q, k, v = inputs(batch, *options["bias"].shape[2:], 2, 1, head_dim)
    dout, args, arrays = draw(q.shape, q.dtype), there(place, options), [place.put(x) for x in unseen(q, k, v, **options)]
    out, lse = attention.forward(*arrays, return_lse=True, **args)
    dbias = place.put(np.full(options["bias"].shape, np.nan, F32))
    actual = attention.backward(place.put(dout), *arrays, out, lse, **args, dbias=dbias, family="sm_90")
    ref, low = (f(dout, q, k, v, **options, dbias=True) for f in (reference.backward, reference.backward_low))
    for name, *each in zip(("dq", "dk", "dv", "dbias"), map(place.get, actual), ref, low, strict=True):
        reference.assert_close(*each, factor=3, name=name)


def test_rows_without_keys_have_no_gradient(place):
    """With more queries than keys the first queries see no key. With a window no query sees the first keys."""
    dq, *_ = agree(place, *inputs(1, 200, 60, 1, 1, 128), with_dlse=True, causal=True)
    assert (dq[:, :140].astype(F32) == 0).all()
    _, dk, dv = agree(place, *inputs(1, 30, 300, 1, 1, 64), window=(10, 0))
    assert (dk[:, :250].astype(F32) == 0).all() and (dv[:, :250].astype(F32) == 0).all()


DROPPED = {
    "full": dict(dropout=0.3, seed=2**40 + 7),
    "causal, softcap": dict(dropout=0.5, seed=5, causal=True, softcap=3.0),
    "seed in memory": dict(dropout=0.1, seed=np.array([2**35 + 5], np.int64), window=(40, 9), alibi=np.array([0.5, 0.1], F32)),
}


@pytest.mark.parametrize(("case", "head_dim"), [*zip(DROPPED, [128, 64, 256])])
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_dropout(place, case, head_dim, family):
    """The same weights are dropped as in forward, and delta is subtracted from the gradients of all, dropped or not."""
    agree(place, *inputs(1, 90, 140, 2, 1, head_dim), family, with_dlse=True, **DROPPED[case])


def test_bias_and_slopes_under_dropout(place):
    """The gradients of a bias and of slopes are those of the scores whose weights were not dropped."""
    (q, k, v), dout = inputs(1, 40, 70, 2, 1, 64), draw((1, 40, 2, 64), BF16)
    options = dict(bias=draw((1, 2, 1, 70), F32, 3), alibi=np.array([0.5, 0.1], F32), dropout=0.4, seed=11)
    arrays, args = [place.put(x) for x in (dout, q, k, v)], there(place, options)
    out, lse = attention.forward(*arrays[1:], return_lse=True, **args)
    *_, dbias, dalibi = attention.backward(*arrays, out, lse, **args, dbias=True, dalibi=True)
    *_, bias, alibi = reference.backward(dout, q, k, v, **options, dbias=True, dalibi=True, out=place.get(out))
    for actual, want in ((dbias, bias), (dalibi, alibi)):
        assert np.abs(place.get(actual) - want).max() < 0.02 * np.abs(want).max() + 1e-3


@pytest.mark.parametrize(("head_dim", "family"), [(64, "sm_90"), (128, "sm_90"), (72, "sm_80")])
def test_accumulate(place, head_dim, family):
    """accumulate=True adds in float32, for any strides, and adds 0 for keys that no query sees."""
    q, k, v = inputs(1, 50, 150, 2, 1, head_dim)
    sink, dout, options = np.array([0.5, -1], F32), draw(q.shape, BF16), dict(window=(30, 0))
    arrays, args = [place.put(x) for x in (dout, q, k, v)], options | {"sink": place.put(sink)}
    out, lse = attention.forward(*arrays[1:], return_lse=True, **args)
    before = [draw((*x.shape[:-1], 2 * x.shape[-1]), F32) for x in (q, k, v, sink)]
    storage = [place.put(x.copy()) for x in before]
    outputs = dict(zip(NAMES, (x[..., ::2] for x in storage)))
    actual = attention.backward(*arrays, out, lse, accumulate=True, family=family, **args, **outputs)
    assert all(x is y for x, y in zip(actual, outputs.values(), strict=True))
    added = [place.get(x) - y for x, y in zip(storage, before)]
    assert not any(x[..., 1::2].any() for x in added) and not added[1][:, :70].any()
    expected = dict(zip(NAMES, attention.backward(*arrays, out, lse, **args, family=family)))
    np.testing.assert_allclose(added[3][::2], place.get(expected["dsink"]), rtol=1e-4, atol=1e-5)
    ref, low = (f(dout, q, k, v, sink=sink, **options) for f in (reference.backward, reference.backward_low))
    for each in zip(added[:3], ref, low):
        reference.assert_close(each[0][..., ::2], *each[1:], factor=3)


# ---- sequences -------------------------------------------------------------------------------------------------------
ENDS = np.array([0, 17, 17, 60, 130], np.int32)
ENDS_K = np.array([0, 140, 150, 150, 170], np.int64)  # none of the second has queries, the third no keys, the fourth few
IN_USE = np.array([100, 7, 0, 20], np.int32)
PACKED = {
    "full": {},
    "causal, sink": dict(causal=True, sink=np.array([1.5, -2], F32)),
    "window, alibi of each sequence, dropout": dict(window=(20, 5), alibi=draw((4, 2), F32, 1) ** 2, dropout=0.2, seed=5),
    "bias of each sequence": dict(bias=draw((4, 1, 1, 170), F32, 3), softcap=2.0),
    "mask, score": dict(mask=lambda b, h, i, j: (j <= i) | (b == 3), score=lambda s, b, h, i, j: s * 0.5 + s * s * 0.1),
}


@pytest.mark.parametrize(("case", "head_dim"), [*zip(PACKED, itertools.cycle([128, 64]))])
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_packed_sequences(place, case, head_dim, family):
    q, k, v = inputs(1, 130, 170, 2, 1, head_dim)
    agree(place, q, k, v, family, with_dlse=True, cu_seqlens=ENDS, cu_seqlens_k=ENDS_K, **PACKED[case])


PACKED_EDGES = [
    ("sm_90", 64, dict(causal=True)), ("sm_80", 128, dict(causal=True)), ("sm_90", 128, dict(causal=True)),
    ("sm_80", 64, dict(window=(20, 5))), ("sm_90", 128, dict(window=(20, 5))),
]  # fmt: skip


@pytest.mark.parametrize(("family", "head_dim", "options"), PACKED_EDGES)
def test_packed_lengths_around_every_tile_edge(place, family, head_dim, options, monkeypatch):
    """Rows before and after a sequence are not read, and gradients after the last sequence are 0."""
    as_on_a_device(monkeypatch)
    module = {"sm_90": backward_hopper, "sm_80": backward_ampere}[family]
    config = module.config_for(head_dim, bf16, CAUSAL)
    packing = Packing(edges(config.rows, config.kv, most=65 if "window" in options and config.rows < 128 else 129))
    arrays = [draw((1, int(packing.cu_seqlens[-1]), 1, head_dim), BF16) for _ in range(3)]
    agree_among_poison(place, packing, arrays, family, **options)


@pytest.mark.parametrize(("family", "head_dim"), [("sm_90", 64), ("sm_80", 64), ("sm_90", 128), ("sm_90", 136)])
def test_keys_after_the_last_have_no_weight(place, family, head_dim):
    """The last block lacks one key. All scores are near -200, so that the weight of a score of 0 would be infinite."""
    q, k, v = inputs(1, 20, 127, 1, 1, head_dim)
    scale = 200 / (16 * head_dim)
    agree(place, (q * 0.05 + 4).astype(BF16), (k * 0.05 - 4).astype(BF16), v, family, scale=scale, by_output=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_keys_in_use(place, packed, family):
    """Keys after those in use are not read, and have no gradient. The last query is aligned with the last key in use."""
    if packed:
        (q, k, v), options = inputs(1, 130, 170, 1, 1, 64), dict(cu_seqlens=ENDS, cu_seqlens_k=ENDS_K, lengths_k=IN_USE)
        used = np.concatenate([np.arange(start, start + n) for start, n in zip(ENDS_K, IN_USE)])[None]
        unused = np.ones((1, 170), bool)
        np.put_along_axis(unused, used, False, 1)
    else:
        (q, k, v), options = inputs(3, 40, 150, 1, 1, 64), dict(lengths_k=np.array([30, 0, 133], np.int32), causal=True)
        unused = np.arange(150) >= options["lengths_k"][:, None]
    _, *actual = agree(place, q, k, v, family, with_dlse=True, **options)
    assert all((x[unused].astype(F32) == 0).all() for x in actual)


@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
def test_a_nan_stays_in_its_sequence(place, family):
    ends = place.put(np.array([0, 20, 50, 90], np.int32))
    q, k, v = inputs(1, 90, 90, 1, 1, 64)
    for x in (q, k, v):
        x[:, 20:50] = np.nan
    q, k, v = (place.put(x) for x in (q, k, v))
    out, lse = attention.forward(q, k, v, cu_seqlens=ends, return_lse=True)
    for actual in attention.backward(q, q, k, v, out, lse, cu_seqlens=ends, family=family):
        bad = np.isnan(place.get(actual).astype(F32)).any((0, 2, 3))
        assert bad[20:50].all() and not bad[:20].any() and not bad[50:].any()


@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 140)), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_random_sequences(pairs, causal, hopper_too):
    ends, ends_k = np.cumsum([(0, 0), *pairs], 0, np.int32).T
    if ends[-1] and ends_k[-1]:
        q, k, v = inputs(1, ends[-1], ends_k[-1], 1, 1, 128)
        family = "sm_90" if hopper_too else "sm_80"
        agree(OnInterpreter(), q, k, v, family, cu_seqlens=ends.copy(), cu_seqlens_k=ends_k.copy(), causal=causal)


@pytest.mark.parametrize(("seq_q", "seq_kv", "batch"), [(4, 0, 1), (0, 4, 1), (3, 3, 0)])
def test_empty(place, seq_q, seq_kv, batch):
    q, k, v = (place.put(x) for x in inputs(batch, seq_q, seq_kv, 2, 2, 64))
    out, lse = attention.forward(q, k, v, return_lse=True)
    for actual, x in zip(attention.backward(out, q, k, v, out, lse), (q, k, v), strict=True):
        assert actual.shape == x.shape and (place.get(actual).astype(F32) == 0).all()


@pytest.mark.parametrize("skip", [1, 2, 4])
def test_arrays_that_tma_cannot_address(place, skip):
    """Addresses and strides of inputs and outputs are multiples of 2, 4 or 8 bytes only."""
    room = [place.put(x) for x in (*inputs(1, 70, 90, 2, 1, 64 + skip), *inputs(1, 70, 90, 2, 1, 64 + skip))]
    q, k, v, dq, dk, dv = (x[..., skip:] for x in room)
    out, lse = attention.forward(q, k, v, causal=True, return_lse=True)
    attention.backward(q, q, k, v, out, lse, causal=True, dq=dq, dk=dk, dv=dv)
    host = [np.ascontiguousarray(place.get(x)[..., skip:]) for x in room]
    ref, low = (f(host[0], *host[:3], causal=True) for f in (reference.backward, reference.backward_low))
    for actual, *each in zip(host[3:], ref, low, strict=True):
        reference.assert_close(actual, *each, factor=3)


@pytest.mark.parametrize("seed", range(3))
def test_no_hazard_under_random_orders(seed, monkeypatch):
    monkeypatch.setenv("TILES_SEED", str(seed))
    agree(OnInterpreter(), *inputs(1, 200, 130, 2, 1, [64, 128, 256][seed]), causal=bool(seed % 2))


@pytest.mark.release
@pytest.mark.parametrize(("arch", "family"), [("sm_90a", "sm_90"), ("sm_80", "sm_80")])
def test_as_compiled(as_compiled, arch, family):
    """Compiled kernels in the emulator."""
    with_dlse = family == "sm_80"  # for sm_90 the next test has a dlse
    agree(OnInterpreter(), *inputs(1, 20, 24, 1, 1, 64), family, lambda: as_compiled(arch), causal=True, with_dlse=with_dlse)


def test_packed_sequences_as_compiled(as_compiled):
    """Compiled kernels in the emulator: deterministic, and not all keys in use. (test_backward_functions.py has sm_80.)"""
    ends, q_k_v = np.array([0, 9, 20], np.int32), inputs(1, 20, 20, 1, 1, 64)
    options = dict(cu_seqlens=ends, lengths_k=np.array([9, 0], np.int32), deterministic=True, with_dlse=True)
    agree(OnInterpreter(), *q_k_v, "sm_90", lambda: as_compiled("sm_90a"), **options)


@random_on_the_card
@given(
    st.integers(1, 3), st.integers(1, 900), st.integers(1, 900), st.integers(1, 3), st.integers(1, 4),
    st.sampled_from([40, 128, 200]), st.booleans(), st.sampled_from(["bshd", "bhsd"]), st.floats(0.01, 1),
)  # fmt: skip
def test_random_problems_on_the_card(batch, seq_q, seq_kv, heads_kv, group, head_dim, causal, layout, scale):
    """Head dims for three kernels, because compiling takes most of the time. The interpreter tests the others."""
    pytest.importorskip("torch")
    q, k, v = inputs(batch, seq_q, seq_kv, heads_kv * group, heads_kv, head_dim, BF16, layout)
    agree(OnCard(), q, k, v, causal=causal, layout=layout, scale=scale, by_output=True)


# ---- the reference -----------------------------------------------------------------------------------------------------
REFERENCE = {
    "plain": {},
    "causal": dict(causal=True, scale=0.7),
    "dropout": dict(dropout=0.3, seed=3, causal=True),
    "packed": dict(cu_seqlens=np.array([0, 3, 7]), cu_seqlens_k=np.array([0, 5, 9]), lengths_k=np.array([5, 2])),
}


@pytest.mark.parametrize("name", [*VARIANTS, *REFERENCE])
def test_reference_agrees_with_finite_differences(name):
    options = (VARIANTS | REFERENCE)[name]
    q, k, v, dout = (draw((2, n, h, 8), np.float64, seed) for seed, (n, h) in enumerate([(7, 2), (9, 1), (9, 1), (7, 2)]))
    arrays, step = {"q": q, "k": k, "v": v} | {name: options[name].astype(float) for name in ("sink",) if name in options}, 1e-5
    dlse = draw((2, 2, 7), np.float64, 8)
    for gradient, name in zip(reference.backward(dout, q, k, v, dlse=dlse, **options), arrays, strict=True):
        along = draw(arrays[name].shape, np.float64, 9)
        ends = []
        for sign in (1, -1):
            out, lse = reference.forward(**options | arrays | {name: arrays[name] + sign * step * along})
            ends.append((out * dout).sum() + (np.where(np.isinf(lse), 0, lse) * dlse).sum())
        assert math.isclose((ends[0] - ends[1]) / (2 * step), (gradient * along).sum(), rel_tol=1e-6, abs_tol=1e-7)


@pytest.mark.parametrize(
    "variant", [FULL, CAUSAL, WindowRight(), WindowLeft(), CombinedVariant(WindowRight(), WindowLeft())], ids=str
)
def test_query_range_agrees_with_key_range(variant):
    from types import SimpleNamespace

    for queries, keys in ((9, 9), (5, 12), (12, 5)):
        ctx = SimpleNamespace(shift=keys - queries, seqlen_q=queries, seqlen_k=keys, params=SimpleNamespace(left=2, right=1))
        sees = np.zeros((queries, keys), bool)
        for i in range(queries):
            one = variant.key_range(i, i, ctx)
            sees[i, max(0, one.first) : max(0, one.end)] = True
        for first, last in ((0, 0), (1, 3), (4, 4)):
            visible, some, all_ = (
                variant.query_range(first, last, ctx),
                sees[:, first : last + 1].any(1),
                sees[:, first : last + 1].all(1),
            )
            row = np.arange(queries)
            assert not some[(row < visible.first) | (row >= visible.end)].any()
            assert all_[(row >= visible.inner_first) & (row < visible.inner_end)].all()


# ---- errors -------------------------------------------------------------------------------------------------
def call(**other):
    """A valid call, except for these arguments."""
    q, k, v = inputs(1, 8, 8, 2, 1, 64)
    arrays = {"dout": q, "q": q, "k": k, "v": v, "out": q.copy(), "lse": np.zeros((1, 2, 8), F32)} | other
    return attention.backward(*[arrays.pop(name) for name in ("dout", "q", "k", "v", "out", "lse")], **arrays)


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (dict(deterministic=1), TypeError, "deterministic: must be"),
        (dict(accumulate=True), TypeError, "dq: must be a float32 array with accumulate=True, got dq=None"),
        (dict(aux=np.ones(2, F32)), TypeError, "aux: must be a tuple of arrays"),
        (dict(aux=([1.0, 2.0],), daux=True), TypeError, "aux0: must be an array"),
        (dict(dsink=True), ValueError, "dsink: must be None where there is no sink: dsink=True"),
        (dict(dbias=True), ValueError, "dbias: must be None where there is no bias: bias=None"),
        (dict(accumulate=True, **{n: np.zeros((1, 8, 2, 64), BF16) for n in NAMES[:3]}), TypeError, "dq: dtype must be one of"),
        (dict(dropout=0.1), ValueError, "seed: is required"),
        (dict(q_norm=np.ones(64, F32), dq_norm=(np.ones(64, F32),) * 2), TypeError, "dq_norm: must be an array, as q_norm is"),
        *[
            (
                dict(accumulate=True, **{n: np.zeros((1, 8, 2, 64), F32) for n in NAMES[:3]}) | other,
                TypeError,
                f"{name}: must be a float32 array",
            )
            for name, other in (
                ("dalibi", dict(alibi=np.ones(2, F32), dalibi=True)),
                ("dsink", dict(sink=np.ones(2, F32))),
                ("dq_norm", dict(q_norm=np.ones(64, F32))),
            )
        ],
        (dict(dsink=np.ones(2, F32)), ValueError, "dsink: must be None where there is no sink"),
        (dict(cu_seqlens_k=np.zeros(2, np.int32)), ValueError, "cu_seqlens_k: needs cu_seqlens"),
        (dict(family="sm_70"), ValueError, "family: must be None or one of"),
        (dict(lse=np.zeros((1, 1, 8), F32)), ValueError, "lse: heads must equal dout's"),
        (dict(lse=np.zeros((1, 2, 8), np.float64)), TypeError, "lse: "),
        (dict(dlse=np.zeros((1, 8, 2), F32)), ValueError, "dlse: heads must equal dout's"),
        (dict(dlse=np.zeros((1, 2, 8), BF16)), TypeError, "dlse: dtype must be one of"),
        (dict(dlse=1.0), TypeError, "dlse: must be an array, got dlse=1.0; of a number make one"),
        (dict(d_lse=np.zeros((1, 2, 8), F32)), TypeError, "d_lse.*; here that is dlse"),
        (dict(out=np.zeros((1, 8, 2, 32), BF16)), ValueError, "out: "),
        (dict(dk=np.zeros((1, 8, 2, 64), BF16)), ValueError, "dk: heads must equal k's"),
        (dict(window=(-1, 0)), ValueError, "window: its ends must not be negative"),
        (dict(scale=0.0), ValueError, "scale: must be positive"),
        (dict(dout=np.zeros((1, 8, 2, 65), BF16)[..., 1:], family="sm_90"), ValueError, "multiples of 16 bytes"),
    ],
)
def test_errors_before_any_launch(other, error, words):
    with pytest.raises(error, match=words):
        call(**other)


@pytest.mark.parametrize("no", [None, False])
def test_unwanted_gradients_are_not_computed(place, no):
    """None and False mean that a gradient is not wanted; for a sink, whose gradient is computed by default, only False does."""
    (q, k, v), (sink, slopes) = inputs(1, 20, 30, 2, 1, 64), (np.array([0.5, -1], F32), np.array([0.5, 0.1], F32))
    read = dict(bias=draw((1, 2, 20, 30), F32), alibi=slopes, sink=sink, score=lambda s, b, h, i, j, t: s * t[h], aux=(slopes,))
    arrays, args = [place.put(x) for x in (q, q, k, v)], there(place, read)
    out, lse = attention.forward(*arrays[1:], return_lse=True, **args)
    unwanted = {"dbias": no, "dalibi": no, "daux": no, "dsink": False}
    assert len(attention.backward(*arrays, out, lse, **args, **unwanted)) == 3
    assert len(attention.backward(*arrays, out, lse, **args, **unwanted | {"daux": [no], "dsink": None})) == 4
    sums = {name: place.put(np.zeros(x.shape, F32)) for name, x in zip(NAMES, (q, k, v))}
    assert len(attention.backward(*arrays, out, lse, accumulate=True, **args, **unwanted, **sums)) == 3
    assert all(place.get(x).any() for x in sums.values())


def test_outputs_must_not_overlap():
    q, k, v = inputs(1, 8, 8, 1, 1, 64)
    shared, out = np.zeros(q.shape, BF16), np.zeros(q.shape, BF16)
    with pytest.raises(ValueError, match="d[kv]: .*d[kv]|share memory|overlap"):
        attention.backward(q, q, k, v, out, np.zeros((1, 1, 8), F32), dk=shared, dv=shared)


def test_every_head_dim_has_a_configuration_that_fits():
    for head_dim, (module, room) in itertools.product(range(8, 257, 8), ((backward_hopper, 227), (backward_ampere, 99))):
        config = module.config_for(head_dim, bf16, CAUSAL)
        assert config.head_dim >= head_dim and module.make(config)[1].nbytes <= room * 1024, config
    for capability, dim, variant, vector_bytes in itertools.product(
        MULTIPROCESSORS, backward_ampere.SHAPES, (FULL, CAUSAL), (16, 8)
    ):
        config = backward_ampere.config_for(dim, bf16, variant, vector_bytes, target=Target(*capability))
        block_bytes, available = backward_ampere.make(config)[1].nbytes + RESERVED, MULTIPROCESSORS[capability][2] * 1024
        assert block_bytes * (config.ctas_per_sm if available > LARGE else 1) <= available, (capability, config)
