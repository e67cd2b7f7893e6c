"""attention.forward's variants against float64, on both backends and in both families from one body."""

import math

import numpy as np
import pytest
from forward_checks import agree, agree_among_poison, draw, inputs, there
from hypothesis import given, settings
from hypothesis import strategies as st
from places import BF16, OnCard, OnInterpreter, random_on_the_card
from poison import Packing, as_on_a_device, edges

import attention
from attention import reference
from attention.families import FAMILIES
from attention.kernels.softmax import forward_ampere, forward_hopper
from attention.parts.visibility import CAUSAL
from ops import tanh, where
from ops.memory import load_store
from tiles import bf16
from tiles.types import rt, rv

pytestmark = pytest.mark.parametrize("family", FAMILIES)

ROWS, COLS, HEADS = 140, 200, 2  # of most problems: two tiles of queries in sm_80's family, and of keys
F32, F16 = np.float32, np.float16


def numbers(*shape, dtype=F32):
    return draw(shape, dtype, 7)


def before(b, h, i, j):
    """A causal mask, aligned at the top left."""
    return j <= i


def strange(b, h, i, j):
    """Some queries see no key."""
    return (i % 3 == 0) & (j // 7 % 2 == 1) | (h == 1) & (j != 5) & (b == 0)


def documents(b, h, i, j, docs):
    return docs[i] == docs[j]


def twisted(s, b, h, i, j, table):
    """A number of each distance, for some; and another formula for the others."""
    return where(j > i, s * 0.5 - b, s + table[h, i - j + 400] * 0.25)


CASES = {
    "window": dict(window=(70, 20)),
    "window of one key": dict(window=(0, 0)),
    "window, left": dict(window=(100, None)),
    "window, right": dict(window=(None, 10)),
    "window, causal": dict(causal=True, window=(64, 9)),
    "window as wide as can be": dict(window=(2**30 - 1, 2**30 - 1)),
    "softcap": dict(softcap=0.7),
    "softcap, causal, of keys that count much": dict(softcap=30.0, causal=True, scale=1.5),
    "alibi": dict(alibi=np.array([0.5, 0.01], F32)),
    "alibi of each sequence, causal": dict(alibi=np.array([[0.5, 0.1], [0.2, 3]], F32), causal=True),
    "alibi, capped": dict(alibi=np.array([0.3, 0.1], F32), softcap=2.0),
    "alibi, steep, causal": dict(alibi=np.array([77, 2e4], F32), causal=True),
    "alibi, steep, window": dict(alibi=np.array([1e3, 2e4], F32), window=(70, 0)),
    "sink": dict(sink=np.array([1.5, -2], F32), causal=True),
    "sinks far above and below all scores": dict(sink=np.array([40, -200], F32)),
    "sink, capped": dict(sink=np.array([1.5, -2], F32), softcap=3.0, scale=0.5),
    "bias of each sequence": dict(bias=numbers(2, HEADS, ROWS, COLS)),
    "bias of keys": dict(bias=numbers(1, 1, 1, COLS, dtype=BF16), causal=True),
    "bias of heads, capped": dict(bias=numbers(1, HEADS, ROWS, COLS, dtype=F16), softcap=2.0),
    "mask": dict(mask=before),
    "mask with holes": dict(mask=lambda b, h, i, j: (j <= i) & (j % 9 != 4)),
    "mask of each sequence": dict(mask=strange),
    "mask of documents": dict(mask=documents, aux=(np.arange(COLS) // 50,)),
    "mask of other blocks of each sequence": dict(mask=lambda b, h, i, j: j // 100 == h + b),
    "mask, and a window": dict(mask=strange, window=(60, 30)),
    "mask, and a window without a key in common": dict(mask=lambda b, h, i, j: j > i + 90, window=(70, 20)),
    "mask of what is not causal, causal": dict(mask=lambda b, h, i, j: j > i + COLS - ROWS, causal=True),
    "mask that holds nowhere": dict(mask=lambda b, h, i, j: j < 0),
    "mask that holds nowhere, sink": dict(mask=lambda b, h, i, j: j < 0, sink=np.array([1.5, -2], F32)),
    "mask of bools of each sequence": dict(mask=lambda b, h, i, j, on: on[b, j] & ~on[b, i], aux=(numbers(2, COLS) > 0,)),
    "score": dict(score=twisted, aux=(numbers(HEADS, 800),)),
    "score, capped": dict(score=lambda s, b, h, i, j, of: s * of[h], aux=(np.array([2, 1], F32),), softcap=2.0, causal=True),
    "score, sink": dict(score=lambda s, b, h, i, j: abs(s) * 2.0 - s, sink=np.array([1.5, 2], F32)),
    "slopes built in and in Python, a bias, of each sequence": dict(
        alibi=np.array([0.05, 0.1], F32), bias=numbers(2, HEADS, 1, COLS),
        score=lambda s, b, h, i, j: s + 0.1 * (j - i) * (h + b),
    ),
    "everything": dict(
        window=(80, 20), softcap=3.0, alibi=np.array([0.05, 0.1], F32), bias=numbers(1, HEADS, 1, COLS), sink=numbers(HEADS),
        mask=lambda b, h, i, j, docs, w: docs[i] <= docs[j], score=lambda s, b, h, i, j, docs, w: s + w[docs[j]] - 0.2 * b,
        aux=(np.arange(COLS) // 50, numbers(8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_variant(place, family, case):
    batch = 2 if "each sequence" in case else 1
    agree(place, *inputs(batch, ROWS, COLS, HEADS, 1, 64), family=family, **CASES[case])


EDGES = {  # (queries, keys): on both sides of every edge of tiles of 64, 128 and 192 rows; more queries than keys
    (1, 1): "window of one key",
    (1, 128): "mask",
    (2, 1): "bias of keys",
    (65, 64): "window",
    (129, 127): "everything",
    (128, 256): "window, left",
    (192, 384): "mask of documents",
    (193, 257): "window, causal",
    (320, 70): "mask, and a window",
    (5, 400): "alibi, capped",
}


@pytest.mark.parametrize("lengths", EDGES, ids=str)
def test_lengths_around_every_tile_edge(place, family, lengths):
    rows, cols = lengths
    options = CASES[EDGES[lengths]]
    if "aux" in options:
        options = options | {"aux": (np.arange(max(lengths)) // 50, *options["aux"][1:])}
    if "bias" in options:
        options = options | {"bias": options["bias"][..., :cols]}
    agree(place, *inputs(1, rows, cols, HEADS, 2, 64), family=family, **options)


@pytest.mark.parametrize(("rows", "cols"), [(1, 128), (70, 133), (130, 257)])
def test_steep_slopes_where_no_mask_cuts(place, family, rows, cols):
    """The first query of a tile stands at the last key of a block, and sees all of it."""
    agree(place, *inputs(1, rows, cols, HEADS, 1, 64), family=family, alibi=np.array([3e3, 2e4], F32), causal=True)


def test_steep_slopes_of_a_score_that_counts_queries_from_0(place, family):
    """All of a row is slope (Sk - Sq) greater: in units of that, digits would be lost."""
    options = dict(score=lambda s, b, h, i, j, slopes: s - slopes[h] * (i - j), aux=(np.array([9.1, 30], F32),), window=(99, 0))
    agree(place, *inputs(1, 70, 2000, HEADS, 1, 64), family=family, **options)


@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 2), (3, 1)])
def test_shared_key_heads_and_layouts(place, family, heads, heads_kv):
    """Slopes, sinks and what functions are told are the query heads'."""
    options = dict(alibi=numbers(2, heads) ** 2, sink=numbers(heads), bias=numbers(2, 1, 70, 130))
    options |= dict(mask=lambda b, h, i, j: (j % 3 > 0) | (h % 2 == b), window=(None, 30))
    q, k, v = inputs(2, 70, 130, heads, heads_kv, 64)
    if heads == 3:
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    agree(place, q, k, v, family=family, layout="bhsd" if heads == 3 else "bshd", **options)


@pytest.mark.parametrize(
    ("dims", "case"),
    [((192, 128), "window, causal"), ((128, 8), "mask"), ((64, 256), "softcap"), ((40, 72), "sink"), ((256, 96), "alibi")],
    ids=str,
)
def test_values_of_other_columns(place, family, dims, case):
    agree(place, *inputs(1, 70, 140, HEADS, 1, dims[0], value_dim=dims[1]), family=family, **CASES[case])


def test_fp16_and_wide_heads(place, family):
    options = CASES["everything"] | {"bias": numbers(1, HEADS, 1, 200)}
    agree(place, *inputs(1, 130, 200, HEADS, 1, 128, F16), family=family, **options)


def test_strided_views_are_read_and_written_in_place(place, family):
    """q, k, v as slices of one array, out of another; a bias that is broadcast and sinks that are every other one."""
    packed, room = place.put(draw((1, 70, 2, 3, 64), BF16)), place.put(np.full((1, 70, 2, 80), 7, BF16))
    q, k, v = (packed[:, :, :, i] for i in range(3))
    bias, sink = place.put(numbers(1, 1, 70, 140)), place.put(numbers(4))
    options = dict(bias=bias[..., ::2], sink=sink[::2])
    attention.forward(q, k, v, out=room[..., :64], family=family, mask=before, **options)
    host = [np.ascontiguousarray(place.get(x)) for x in (q, k, v)]
    options = dict(bias=numbers(1, 1, 70, 140)[..., ::2], sink=numbers(4)[::2], mask=before)
    ref, low = reference.forward(*host, **options)[0], reference.forward_low(*host, **options)[0]
    reference.assert_close(place.get(room)[..., :64], ref, low)
    assert (place.get(room)[..., 64:].astype(F32) == 7).all()


@pytest.mark.parametrize(
    "bias",
    [numbers(1, HEADS, 1, COLS), np.broadcast_to(numbers(HEADS, 1, COLS), (1, HEADS, ROWS, COLS))],
    ids=["of one row", "of one row by its strides"],
)
def test_a_row_of_bias_is_read_once_a_key(family, bias, monkeypatch):
    """As a vector, by forward and backward; and it counts as the same numbers do that every query has for itself."""
    (q, k, v), actual, load_rows = inputs(1, ROWS, COLS, HEADS, 1, 64), [], load_store.load_rows
    for kind, each in (rv, bias), (rt, np.ascontiguousarray(np.broadcast_to(bias, (1, HEADS, ROWS, COLS)))):
        read = []

        def noted(source, spec, *args, read=read):
            if np.ndim(source) == 4 and source.dtype == F32:  # the bias: other arrays of four axes have 16 bits
                read.append(type(spec))
            return load_rows(source, spec, *args)

        monkeypatch.setattr(load_store, "load_rows", noted)
        out, lse = attention.forward(q, k, v, return_lse=True, bias=each, family=family)
        of_forward = len(read)
        actual.append((out, lse, *attention.backward(q, q, k, v, out, lse, bias=each, family=family)))
        assert set(read) == {kind} and 0 < of_forward < len(read)
    for one, other in zip(*actual, strict=True):  # in other orders of sums, where tiles are of another size
        np.testing.assert_allclose(one.astype(F32), other.astype(F32), rtol=2**-7, atol=2**-7)


# ---- lengths -------------------------------------------------------------------------------------------------------
ENDS = np.array([0, 17, 17, 130, 200], np.int32)
ENDS_K = np.array([0, 40, 55, 60, 330], np.int64)  # one with more queries than keys; one without queries
IN_USE = np.array([40, 7, 0, 200], np.int32)
PACKED = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(20, 5)),
    "mask": dict(mask=lambda b, h, i, j: (j <= i) | (b == 3) & (h == 1)),
    "alibi, sink": dict(alibi=numbers(4, HEADS) ** 2, sink=numbers(HEADS)),
    "bias": dict(bias=numbers(4, 1, 1, 330), softcap=2.0),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences(place, family, case):
    q, k, v = inputs(1, 200, 330, HEADS, 1, 64)
    agree(place, q, k, v, family=family, cu_seqlens=ENDS, cu_seqlens_k=ENDS_K, **PACKED[case])


@pytest.mark.parametrize("options", [dict(causal=True, sink=numbers(1)), dict(window=(70, 0))], ids=["causal", "window"])
def test_packed_lengths_around_every_tile_edge(place, family, options, monkeypatch):
    """Whatever lies before and behind a sequence; 0 and -inf after the last one."""
    as_on_a_device(monkeypatch)
    config = {"sm_90": forward_hopper, "sm_80": forward_ampere}[family].config_for(
        64, bf16, CAUSAL, *[1024] * (family == "sm_90")
    )
    packing = Packing(edges(config.rows, config.kv))
    arrays = [draw((1, int(packing.cu_seqlens[-1]), 1, 64), BF16) for _ in range(3)]
    agree_among_poison(place, packing, arrays, **options)


def test_packed_sequences_of_which_keys_are_in_use(place, family):
    """What lies after those is not read."""
    options = dict(cu_seqlens=ENDS, cu_seqlens_k=ENDS_K, lengths_k=IN_USE, window=(50, 0))
    agree(place, *inputs(1, 200, 330, HEADS, 1, 64), family=family, **options)


@pytest.mark.parametrize("nth", [0, 2, 3])
def test_a_nan_stays_in_its_sequence(place, family, nth):
    q, k, v = inputs(1, 200, 330, 1, 1, 64)
    for x in (k, v):
        x[:, ENDS_K[nth] : ENDS_K[nth + 1]] = np.nan
    ends = {"cu_seqlens": place.put(ENDS), "cu_seqlens_k": place.put(ENDS_K)}
    out = attention.forward(place.put(q), place.put(k), place.put(v), family=family, **ends)
    bad = np.isnan(place.get(out).astype(F32)).any((0, 2, 3))
    assert (np.flatnonzero(bad) == np.arange(ENDS[nth], ENDS[nth + 1])).all()


@pytest.mark.parametrize("case", ["plain", "causal", "window", "mask"])
def test_keys_in_use(place, family, case):
    """What lies after them is not read, and the last query belongs to the last of them."""
    lengths = np.array([100, 0, 257], np.int32)
    agree(place, *inputs(3, 140, 300, HEADS, 1, 64), family=family, lengths_k=lengths, **PACKED[case])


# ---- what is not read ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", ["mask", "mask in a window", "left", "right"])
def test_blocks_that_no_query_sees_are_not_read(place, family, case):
    """Blocks of keys have 128 here, and most of 640 are of no use."""
    options = {
        "mask": dict(mask=lambda b, h, i, j: (j // 128 == 0) | (j // 128 == 3)),
        "mask in a window": dict(mask=lambda b, h, i, j: j < 256, window=(400, None)),
        "left": dict(window=(58, None)),
        "right": dict(window=(None, 0), lengths_k=np.array([128], np.int32)),
    }[case]
    agree(place, *inputs(1, 70, 640, 1, 1, 64), family=family, block=128, **options)


def test_what_nobody_sees_is_not_read(place, family):
    out, lse = agree(place, *inputs(1, 70, 200, 1, 1, 64), family=family, mask=lambda b, h, i, j: j < 0)
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("mask", [None, lambda b, h, i, j: (i + j) % 3 > 0], ids=["window", "mask"])
def test_a_key_that_some_query_sees_is_multiplied_for_others(place, family, mask):
    """docs/variants.md: NaN in a key reaches the queries that see it, and may reach others whose tile sees keys of its block,
    but none that are 512 places away from those."""
    q, k, v = inputs(1, 900, 900, 1, 1, 64)
    v[0, 150, 0, 3] = np.nan
    out = attention.forward(*map(place.put, (q, k, v)), window=(20, 0), mask=mask, family=family)
    bad = np.isnan(place.get(out).astype(F32))
    sees = np.arange(150, 171)
    sees = sees if mask is None else sees[(sees + 150) % 3 > 0]
    assert bad[0, sees, 0, 3].all() and not bad[:, 170 + 512 :].any() and not np.delete(bad, 3, -1).any()


# ---- what is low, and what is NaN --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("low", "dtype", "rows"), [(-3.3895e38, BF16, 8), (-1e30, F32, 8), (-3.4028e38, F32, 1), (-1e9, F32, 8), (-65504.0, F16, 1)]
)
def test_a_bias_is_a_number_however_low(place, family, low, dtype, rows):
    """If it is the same for all keys, the output is the mean of values. Keys with more get all, and -inf alone hides."""
    bias = np.full((1, 3, rows, 64), low, dtype)
    bias[:, 1, :, 40:], bias[:, 2] = 0, -np.inf
    out, _ = agree(place, *inputs(1, 8, 64, 3, 1, 64), family=family, bias=bias)
    assert (out[:, :, 2] == 0).all()


def test_a_score_is_a_number_however_low(place, family):
    agree(place, *inputs(1, 8, 60, 1, 1, 64), family=family, score=lambda s, b, h, i, j: s * 0.0 - 1e30)


@pytest.mark.parametrize("where", ["sink", "query", "key", "value"])
def test_nan_reaches_the_output_and_gradients(place, family, where):
    q, k, v = inputs(1, 8, 60, 1, 1, 64)
    sink = np.zeros(1, F32)
    {"sink": sink, "query": q[:, 3], "key": k[:, 7], "value": v[:, 7]}[where][..., 0] = np.nan
    q, k, v, sink = map(place.put, (q, k, v, sink))
    out, lse = attention.forward(q, k, v, sink=sink, return_lse=True, family=family)
    dq, dk, dv, dsink = attention.backward(q, q, k, v, out, lse, sink=sink, family=family)
    rows = slice(3, 4) if where == "query" else slice(None)
    assert np.isnan(place.get(out)[:, rows].astype(F32)).any(-1).all() and np.isnan(place.get(dsink)).all()
    assert np.isnan(place.get(dq)[:, rows].astype(F32)).all() and np.isnan(place.get(dk).astype(F32)).all()
    assert where == "value" or np.isnan(place.get(dv).astype(F32)).any(-1).all()


# ---- one thing said twice ------------------------------------------------------------------------------------------
def both(place, q, k, v, one, other):
    """The result is (out, lse) with the options `one`, and with `other`."""
    q, k, v = map(place.put, (q, k, v))
    actual = (attention.forward(q, k, v, return_lse=True, **there(place, x)) for x in (one, other))
    return [tuple(place.get(x) for x in both) for both in actual]


@pytest.mark.parametrize(
    ("built_in", "rows", "cols"),
    [((90, 0), 140, 400), ((300, 0), 200, 512), ((200, 100), 330, 330), ((300, None), 140, 512), ((None, 9), 330, 330),
     ((10**6, None), 70, 384), (None, 140, 400), (None, 330, 330)],
    ids=str,
)  # fmt: skip
def test_a_mask_in_python_gives_the_bits_of_a_built_in_one(place, family, built_in, rows, cols):
    """Where they use the same tiles, and Hopper's family has others for D 64, causal and no more, up to 4096 keys."""
    left, right = built_in or (None, 0)
    left, right = 10**6 if left is None else left, 10**6 if right is None else right
    past, options = cols - rows, dict(causal=True) if built_in is None else dict(window=built_in)
    mask = lambda b, h, i, j: (j >= i + past - left) & (j <= i + past + right)
    problem = inputs(1, rows, cols, 1, 1, 64 if built_in else 128)
    one, other = both(place, *problem, options | {"family": family}, {"mask": mask, "family": family})
    assert (one[0] == other[0]).all() and (one[1] == other[1]).all()


def test_a_score_in_python_agrees_with_a_built_in_one(place, family):
    slopes = np.array([0.5, 0.1], F32)
    problem = inputs(1, 70, 200, HEADS, 1, 64)
    for built_in, score, aux in (
        (dict(alibi=slopes), lambda s, b, h, i, j, slopes: s - slopes[h] * abs(i + 130 - j), (slopes,)),
        (dict(softcap=2.0), lambda s, b, h, i, j: tanh(s * 0.5) * 2.0, ()),
    ):
        one, other = both(place, *problem, built_in | {"family": family}, dict(score=score, aux=aux, family=family))
        np.testing.assert_allclose(one[0].astype(F32), other[0].astype(F32), atol=2**-7)
        np.testing.assert_allclose(one[1], other[1], rtol=2**-18, atol=2**-10 if "softcap" in built_in else 2**-18)


def test_a_sink_is_a_key_of_no_value(place, family):
    """And of nothing else: it changes no weight's share among the others."""
    sink = np.array([0.3, -1], F32)
    plain, sunk = both(place, *inputs(1, 70, 200, HEADS, 1, 64), dict(family=family), dict(family=family, sink=sink))
    np.testing.assert_allclose(sunk[1], np.logaddexp(plain[1], sink[:, None]), rtol=2**-18)
    share = np.exp(plain[1] - sunk[1]).swapaxes(1, 2)[..., None]
    np.testing.assert_allclose(sunk[0].astype(F32), plain[0].astype(F32) * share, atol=2**-7)


def test_rows_without_keys(place, family):
    """0 and -inf, or what a sink leaves: the sink."""
    q, k, v = inputs(1, 200, 70, HEADS, 1, 64)
    out, lse = agree(place, q, k, v, family=family, window=(20, 0))
    assert (out[:, :130].astype(F32) == 0).all() and (lse[..., :130] == -math.inf).all() and np.isfinite(lse[..., 130:]).all()
    out, lse = agree(place, q, k, v, family=family, window=(20, 0), sink=np.array([1.5, -9], F32))
    assert (out[:, :130].astype(F32) == 0).all()
    np.testing.assert_allclose(lse[0, :, :130], np.broadcast_to([[1.5], [-9]], (2, 130)), rtol=2**-20)


# ---- combinations --------------------------------------------------------------------------------------------------
def nearly(b, h, i, j, docs):
    return (docs[i] == docs[j]) | (j % 5 == h)


PARTS = {  # by an option: what it may be, of a problem's (sequences, queries, keys, heads)
    "causal": lambda n, s, t, h: st.booleans(),
    "window": lambda n, s, t, h: st.tuples(*[st.none() | st.integers(0, t)] * 2),
    "softcap": lambda n, s, t, h: st.floats(0.5, 50),
    "alibi": lambda n, s, t, h: st.sampled_from([numbers(h) ** 2, numbers(n, h) ** 2]),
    "sink": lambda n, s, t, h: st.sampled_from([numbers(h), 10 * numbers(h)]),
    "bias": lambda n, s, t, h: st.sampled_from([numbers(1, h, s, t), numbers(n, 1, 1, t, dtype=BF16)]),
    "mask": lambda n, s, t, h: st.sampled_from([nearly, lambda b, h, i, j, x: j > i]),
    "score": lambda n, s, t, h: st.sampled_from([lambda s, b, h, i, j, x: where(x[j] > 1, s, s * 0.5) + b]),
    "scale": lambda n, s, t, h: st.floats(0.01, 1),
    "lengths_k": lambda n, s, t, h: st.lists(st.integers(0, t), min_size=n, max_size=n).map(lambda x: np.array(x, np.int32)),
}  # fmt: skip


@st.composite
def combinations(draw, longest):
    """(batch, queries, keys, heads, key heads, head_dim, value_dim), options."""
    batch, rows, cols = draw(st.integers(1, 2)), draw(st.integers(1, longest)), draw(st.integers(1, 2 * longest))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    names = draw(st.sets(st.sampled_from([*PARTS]), min_size=2, max_size=5))
    sizes = batch, rows, cols, kv_heads * group
    options = {name: draw(PARTS[name](*sizes)) for name in sorted(names)}
    if names & {"mask", "score"}:
        options["aux"] = (np.arange(max(rows, cols)) // 37,)
    dims = [8 * draw(st.integers(1, 16)) for _ in range(2)]
    return (*sizes, kv_heads, *dims), options


def combined(place, family, problem):
    (batch, rows, cols, heads, kv_heads, head_dim, value_dim), options = problem
    q, k, v = inputs(batch, rows, cols, heads, kv_heads, head_dim, value_dim=value_dim)
    agree(place, q, k, v, family=family, **options)


@settings(max_examples=6, deadline=None)
@given(combinations(100))
def test_random_combinations(family, problem):
    combined(OnInterpreter(), family, problem)


@random_on_the_card
@given(combinations(700))
def test_random_combinations_on_the_card(family, problem):
    pytest.importorskip("torch")
    combined(OnCard(), family, problem)
