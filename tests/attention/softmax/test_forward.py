"""attention.forward against float64, on both backends and in both families from one body. (Which family serves a call:
test_forward_families.py. Keys and queries in parts: test_forward_in_parts.py.)"""

import itertools
import math

import numpy as np
import pytest
from forward_checks import agree, draw, inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from places import BF16, OnCard, OnInterpreter, random_on_the_card

import attention
from attention import reference
from attention.kernels.softmax import forward_ampere, forward_hopper
from attention.parts.sequences import BatchedLayout, PackedLayout
from attention.parts.visibility import CAUSAL, FULL
from tiles import bf16
from tiles.cp_async import VECTOR_SIZES
from tiles.targets import LARGE, SMALL

FP16 = np.dtype(np.float16)
pytestmark = pytest.mark.usefixtures("family")


# what is for Hopper's tiles; sm_80's are the same as elsewhere
of_hopper = pytest.mark.parametrize("family", ["sm_90", pytest.param("sm_80", marks=pytest.mark.release)], indirect=True)
PACKED = {"seq_layout": PackedLayout, "axes": (), "by_list": False}
AS_COMPILED = [  # (family, head_dim, causal, length); of D 64, test_variants_as_compiled.py has two more
    pytest.param("sm_90", 64, True, 200, marks=pytest.mark.release),
    ("sm_80", 96, True, 130),
    ("sm_90", 256, True, 130),
    pytest.param("sm_90", 128, False, 150, marks=pytest.mark.release),
    pytest.param("sm_80", 64, True, 140, marks=pytest.mark.release),
    pytest.param("sm_80", 192, False, 100, marks=pytest.mark.release),
]


EDGES = [(1, 1), (1, 128), (63, 65), (64, 64), (128, 128), (129, 127), (129, 256), (192, 300), (200, 177), (5, 400), (320, 70)]


@pytest.mark.smoke
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), EDGES)
def test_lengths_around_every_tile_edge(place, seq_q, seq_kv, causal):
    """Query tiles of 64, 128, 192 and key tiles of 64, 112 and 128 rows; more queries than keys leaves rows with no key. A
    query tile of one row, which sees all keys, needs no mask."""
    agree(place, *inputs(1, seq_q, seq_kv, 1, 1, 128), causal=causal)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128, 136, 192, 200, 256])
def test_every_head_dim(place, head_dim):
    """Padded inside to the next kernel's; never reading a neighbour head, whose values are huge here."""
    q, k, v = inputs(1, 70, 200, 2, 2, head_dim)
    for x in (q, k, v):
        x[:, :, 1] *= 100
    for causal in (False, True):
        out, _ = agree(place, q[:, :, :1], k[:, :, :1], v[:, :, :1], causal=causal)
        assert np.abs(out.astype(np.float32)).max() < 10


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fp16(place, head_dim, causal):
    agree(place, *inputs(1, 130, 260, 1, 1, head_dim, FP16), causal=causal)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 2), (3, 1), (2, 2)])
def test_shared_key_heads_and_layouts(place, heads, heads_kv, layout):
    agree(place, *inputs(2, 66, 130, heads, heads_kv, 64, layout=layout), causal=True, layout=layout)


@pytest.mark.parametrize(
    ("head_dim", "causal", "seq_kv"), [(64, False, 2100), (64, True, 2100), (64, True, 4100), (128, False, 2100)]
)
def test_more_keys_than_short_tiles_have(place, head_dim, causal, seq_kv):
    """Where other shapes serve. Tiles follow each other: what TMA stores, it stores while the next one begins."""
    agree(place, *inputs(1, 200, seq_kv, 2 if isinstance(place, OnInterpreter) else 100, 1, head_dim), causal=causal)


@of_hopper
@pytest.mark.parametrize(("head_dim", "seq_kv"), [(64, 150), (64, 4100), (96, 1100), (128, 2100)])
def test_three_consumers(place, head_dim, seq_kv):
    """As many queries, heads and multiprocessors as leave none of the three idle."""
    heads = 3 if isinstance(place, OnInterpreter) else 132
    agree(place, *inputs(1, 190, seq_kv, heads, heads, head_dim))


@of_hopper
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [40, 96, 128])
def test_many_short_sequences(place, head_dim, causal):
    """Tiles of one consumer, of which two blocks share a multiprocessor."""
    heads = 4 if isinstance(place, OnInterpreter) else 180
    agree(place, *inputs(3, 20, 140, heads, heads // 2, head_dim), causal=causal)
    agree(place, *inputs(heads, 64, 64, 3, 3, head_dim), causal=causal)


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 260), st.integers(1, 400), st.integers(1, 2), st.integers(1, 2), st.integers(1, 16),
    st.booleans(), st.sampled_from([BF16, FP16]), st.sampled_from(["bshd", "bhsd"]), st.floats(0.01, 2),
)  # fmt: skip
def test_random_problems(batch, seq_q, seq_kv, heads_kv, group, eighths, causal, dtype, layout, scale):
    q, k, v = inputs(batch, seq_q, seq_kv, heads_kv * group, heads_kv, 8 * eighths, dtype, layout)
    agree(OnInterpreter(), q, k, v, causal=causal, layout=layout, scale=scale)


@random_on_the_card
@given(
    st.integers(1, 3), st.integers(1, 1500), st.integers(1, 1500), st.integers(1, 3), st.integers(1, 4), st.integers(1, 32),
    st.booleans(), st.sampled_from([BF16, FP16]), st.sampled_from(["bshd", "bhsd"]), st.floats(0.01, 2),
)  # fmt: skip
def test_random_problems_on_the_card(batch, seq_q, seq_kv, heads_kv, group, eighths, causal, dtype, layout, scale):
    pytest.importorskip("torch")
    q, k, v = inputs(batch, seq_q, seq_kv, heads_kv * group, heads_kv, 8 * eighths, dtype, layout)
    agree(OnCard(), q, k, v, causal=causal, layout=layout, scale=scale)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_hazard_under_random_orders(head_dim, seed, monkeypatch):
    monkeypatch.setenv("TILES_SEED", str(seed))
    agree(OnInterpreter(), *inputs(1, 130, 520, 1, 1, head_dim), causal=bool(seed % 2))


# ---- shapes
@pytest.mark.parametrize(
    ("head_dim", "variant", "queries", "pairs", "kind", "wanted"),
    [
        (64, FULL, 64, 528, {}, 64),
        (64, FULL, 64, 527, {}, 64),
        (64, FULL, 65, 528, {}, 128),
        (64, FULL, 190, 132, {}, 192),
        (64, FULL, 4096, 128, {}, 192),  # many rounds
        (128, CAUSAL, 64, 528, {}, 64),
        (128, CAUSAL, 67, 4096, PACKED, 64),
        (128, CAUSAL, 97, 4096, PACKED, 128),
        (256, FULL, 64, 4096, {}, 128),
        (64, CAUSAL, 64, 4096, {"seq_layout": BatchedLayout, "axes": (), "by_list": True}, 192),
    ],
)
def test_tiles_have_as_many_rows_as_there_are_queries(head_dim, variant, queries, pairs, kind, wanted):
    config = forward_hopper.config_for(head_dim, bf16, variant, 512, **kind)
    assert forward_hopper.fit_to_load(config, queries, 512, pairs, 132).rows == wanted


def test_two_consumers_where_three_leave_multiprocessors_idle():
    """4 heads of 4096 queries: 88 tiles of 192 rows, or 128 of 128; the same blocks of keys."""
    config = forward_hopper.config_for(128, bf16, FULL, 4096)
    less = forward_hopper.fit_to_load(config, 4096, 4096, 4, 132)
    assert (config.rows, less.rows) == (192, 128) and config.kv == less.kv and not less.weights_in_shared


@pytest.mark.parametrize("family", ["sm_90"], indirect=True)
@pytest.mark.parametrize("keys", [512, 2048, 4096, math.inf])
@pytest.mark.parametrize("variant", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_fewer_consumers_have_the_same_blocks_of_keys(head_dim, variant, keys):
    """All that bits follow from; those of many short sequences, too, where blocks are asked for."""
    config = forward_hopper.config_for(head_dim, bf16, variant, keys)
    for queries, pairs in itertools.product((1, 64, 65, 190, 4096), (1, 4, 16, 100, 132, 528)):
        less = forward_hopper.fit_to_load(config, queries, 512, pairs, 132, config.kv)
        for name in ("kv", "head_dim", "value_dim", "dtype", "variant", "seq_layout"):
            assert getattr(less, name) == getattr(config, name)


@pytest.mark.parametrize("family", ["sm_90"], indirect=True)
@pytest.mark.parametrize(("head_dim", "causal", "seq_kv"), [(64, False, 270), (64, True, 330), (96, True, 1100)])
def test_fewer_consumers_give_the_same_bits(place, head_dim, causal, seq_kv, monkeypatch, nothing_known):
    """A head alone, and among as many as leave no multiprocessor idle; a tile of all consumers has rows of each."""
    shapes, real = set(), forward_hopper.fit_to_load

    def fitted(config, *load):
        actual = real(config, *load)
        shapes.add((config.consumers, actual.consumers))
        return actual

    monkeypatch.setattr(forward_hopper, "fit_to_load", fitted)
    heads = 3 if isinstance(place, OnInterpreter) else 132
    q, k, v = inputs(1, 190, seq_kv, heads, heads, head_dim)
    call_options = {"causal": causal, "return_lse": True}
    several = [place.get(x) for x in attention.forward(*map(place.put, (q, k, v)), **call_options)]
    one = [np.ascontiguousarray(x[:, :, 1:2]) for x in (q, k, v)]
    single_head = [
        attention.forward(*map(place.put, (one[0][:, :n], *one[1:])), **call_options) for n in (190, 70)[: 2 - causal]
    ]
    assert len({few for _, few in shapes}) > 1 and any(few == most for most, few in shapes), shapes
    for out, lse in single_head:
        tokens = out.shape[1]
        np.testing.assert_array_equal(place.get(out)[:, :, 0], several[0][:, :tokens, 1])
        np.testing.assert_array_equal(place.get(lse)[:, 0], several[1][:, 1, :tokens])


# ---- properties ----------------------------------------------------------------------------------------------------
def test_adding_a_constant_to_the_scores_changes_nothing(place):
    """q k^T grows by the same amount for every key if the keys all move by one vector."""
    q, k, v = inputs(1, 64, 200, 1, 1, 64, FP16)
    q, k = np.round(q * 4) / 4, np.round(k * 4) / 4  # exactly representable sums
    one, _ = agree(place, q, k, v)
    with_constant, _ = agree(place, q, (k + np.float16(2)).astype(FP16), v)
    np.testing.assert_allclose(one.astype(float), with_constant.astype(float), atol=2e-3)


def test_equal_scores_average_the_values(place):
    q, k, v = inputs(1, 64, 300, 1, 1, 128)
    k[:] = k[:, :1]
    out, lse = agree(place, q, k, v)
    np.testing.assert_allclose(out.astype(float), np.broadcast_to(v.astype(float).mean(1, keepdims=True), out.shape), atol=1e-2)


@pytest.mark.parametrize("size", [1e-3, 30.0, 300.0])
def test_extreme_scores(place, size):
    """Tiny scores give an average, huge ones pick the greatest key; neither overflows."""
    q, k, v = inputs(1, 64, 260, 1, 1, 64)
    agree(place, (q * size).astype(BF16), k, v, causal=True)


def test_scores_that_grow_in_fp16(place):
    """By more than a weight in fp16 can hold, if the maximum lagged behind them: the last keys are seen first."""
    q, k, v = inputs(1, 64, 260, 1, 1, 64, FP16)
    k[:] = np.abs(k) * np.linspace(1, 0.01, 260)[None, :, None, None].astype(FP16)
    agree(place, np.abs(q) * FP16.type(2), k, v)


def test_a_nan_stays_in_its_row_and_head(place):
    q, k, v = inputs(1, 128, 128, 2, 2, 64)
    q[0, 5, 0, 0] = np.nan
    out = place.get(attention.forward(place.put(q), place.put(k), place.put(v)))
    assert np.isnan(out[0, 5, 0].astype(float)).all()
    assert np.isnan(out.astype(float)).sum() == 64


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_strided_views_are_read_and_written_in_place(place, layout):
    """q, k, v as slices of one packed array, out as a slice of another; what lies around them stays."""
    packed = place.put(draw((2, 70, 2, 3, 64), BF16))
    q, k, v = (packed[:, :, :, i] for i in range(3))
    room = place.put(np.full((2, 70, 2, 80), 7, BF16))
    if layout == "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        target = room.swapaxes(1, 2)[..., :64]
    else:
        target = room[..., :64]
    attention.forward(q, k, v, layout=layout, out=target)
    host = [np.ascontiguousarray(place.get(x)) for x in (q, k, v)]
    ref, _ = reference.forward(*host, layout=layout)
    low, _ = reference.forward_low(*host, layout=layout)
    reference.assert_close(place.get(target), ref, low)
    assert (place.get(room)[..., 64:].astype(np.float32) == 7).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_tile_that_sees_no_key_after_one_that_does(place, head_dim):
    """Tiles of a consumer follow each other, the longest first: nothing of one may reach the next."""
    heads = 4 if isinstance(place, OnInterpreter) else 400  # more tiles than there are multiprocessors
    q, k, v = (place.put(x) for x in inputs(1, 200, 70, heads, 1, head_dim))
    out, lse = attention.forward(q, k, v, causal=True, return_lse=True)
    assert (place.get(out)[:, :130].astype(np.float32) == 0).all() and (place.get(lse)[..., :130] == -math.inf).all()
    assert np.isfinite(place.get(lse)[..., 130:]).all()


@pytest.mark.parametrize(("seq_q", "seq_kv", "batch"), [(4, 0, 1), (0, 4, 1), (3, 3, 0)])
def test_empty(place, seq_q, seq_kv, batch):
    q, k, v = inputs(batch, seq_q, seq_kv, 2, 2, 64)
    out, lse = attention.forward(place.put(q), place.put(k), place.put(v), return_lse=True)
    assert out.shape == q.shape and (place.get(out).astype(np.float32) == 0).all()
    assert tuple(lse.shape) == (batch, 2, seq_q) and (place.get(lse) == -math.inf).all()


def test_without_lse_only_the_output_is_returned(place):
    q, k, v = (place.put(x) for x in inputs(1, 64, 64, 1, 1, 64))
    without_lse = attention.forward(q, k, v)
    both, _ = attention.forward(q, k, v, return_lse=True)
    assert (place.get(without_lse) == place.get(both)).all()


def test_bad_input_is_refused_before_any_launch():
    q, k, v = inputs(1, 8, 8, 1, 1, 64)
    with pytest.raises(ValueError, match=r"k: head_dim must equal q's"):
        attention.forward(q, k[..., :32], v)
    with pytest.raises(TypeError, match="dtype"):
        attention.forward(q, k, v.astype(np.float32))


# ---- the kernel's shapes -------------------------------------------------------------------------------------------
def test_every_head_dim_has_a_configuration_that_fits():
    for head_dim in range(8, 257, 8):
        for causal in (False, True):
            for room, vector_bytes in itertools.product(forward_ampere.BY_SHARED_MEMORY, VECTOR_SIZES):
                config = forward_ampere.config_for(head_dim, bf16, CAUSAL if causal else FULL, room, vector_bytes)
                assert config.head_dim >= head_dim and forward_ampere.make(config)[1].nbytes <= SMALL, config
            config = forward_hopper.config_for(head_dim, bf16, CAUSAL if causal else FULL, 1000)
            _, smem = forward_hopper.make(config)
            assert config.head_dim >= head_dim and smem.nbytes <= LARGE, config


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("room", forward_ampere.BY_SHARED_MEMORY)
def test_two_blocks_share_a_multiprocessor(head_dim, room):
    """It has a kilobyte more than a block may have, and the driver takes one a block."""
    for vector_bytes in VECTOR_SIZES:
        _, smem = forward_ampere.make(forward_ampere.config_for(head_dim, bf16, FULL, room, vector_bytes))
        assert 2 * (smem.nbytes + 1024) <= room + 1024


@pytest.mark.parametrize(("family", "head_dim", "causal", "length"), AS_COMPILED, indirect=["family"])
def test_as_compiled(family, head_dim, causal, length, as_compiled):
    """What the kernels' PTX computes, and a tile that ends early; at D 64 and 128 of two heads that share keys."""
    as_compiled({"sm_90": "sm_90a", "sm_80": "sm_80"}[family])
    agree(OnInterpreter(), *inputs(1, length, length, 2 if head_dim in (64, 128) else 1, 1, head_dim), causal=causal)
