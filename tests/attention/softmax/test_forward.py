"""attention.forward against float64, on both backends and in both families from one body."""

import functools
import importlib
import itertools
import math
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import agree, draw, inputs, poisoned, there
from places import BF16, RANDOMLY, OnCard, OnInterpreter

import attention
from attention import families, reference
from attention.softmax import ampere, hopper, launches
from attention.softmax.seen import CAUSAL, FULL
from attention.softmax.sequences import Batched, Packed
from tiles import bf16, fp8e4m3
from tiles.arrays import c_ordered
from tiles.cp_async import PIECES
from tiles.device import Interpreter

FP16 = np.dtype(np.float16)
FORWARD = importlib.import_module("attention.softmax.forward")  # the module, whose name is also the function's


PACKED = {"lie": Packed, "axes": (), "by_list": False}
AS_COMPILED = [  # (family, head_dim, causal, length): each head dim, the least by both families
    ("sm_90", 64, True, 200),
    ("sm_80", 64, True, 140),
    ("sm_80", 96, True, 130),
    ("sm_90", 128, False, 150),
    ("sm_80", 192, False, 100),
    ("sm_90", 256, True, 130),
]


@pytest.fixture(params=["sm_90", "sm_80"], autouse=True)
def family(request, monkeypatch):
    """Every test runs with the kernels of each family."""
    monkeypatch.setattr(attention, "forward", functools.partial(attention.forward, family=request.param))
    return request.param


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


@pytest.mark.parametrize(("head_dim", "seq_kv"), [(64, 150), (64, 4100), (96, 1100), (128, 2100)])
def test_three_consumers(place, head_dim, seq_kv):
    """As many queries, heads and multiprocessors as leave none of the three idle."""
    heads = 3 if isinstance(place, OnInterpreter) else 132
    agree(place, *inputs(1, 190, seq_kv, heads, heads, head_dim))


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


@pytest.mark.gpu
@RANDOMLY
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
        (64, FULL, 64, 527, {}, 128),
        (64, FULL, 65, 528, {}, 128),
        (64, FULL, 190, 132, {}, 192),
        (64, FULL, 4096, 128, {}, 192),  # many rounds
        (128, CAUSAL, 64, 528, {}, 64),
        (128, CAUSAL, 67, 4096, PACKED, 64),
        (128, CAUSAL, 97, 4096, PACKED, 128),
        (256, FULL, 64, 4096, {}, 128),
        (64, CAUSAL, 64, 4096, {"lie": Batched, "axes": (), "by_list": True}, 192),
    ],
)
def test_tiles_have_as_many_rows_as_there_are_queries(head_dim, variant, queries, pairs, kind, wanted):
    config = hopper.config_for(head_dim, bf16, variant, 512, **kind)
    assert hopper.fitted(config, queries, pairs, 132).rows == wanted


def test_two_consumers_where_three_leave_multiprocessors_idle():
    """4 heads of 4096 queries: 88 tiles of 192 rows, or 128 of 128; the same blocks of keys."""
    config = hopper.config_for(128, bf16, FULL, 4096)
    less = hopper.fitted(config, 4096, 4, 132)
    assert (config.rows, less.rows) == (192, 128) and config.kv == less.kv and not less.stored


# ---- properties ----------------------------------------------------------------------------------------------------
def test_adding_a_constant_to_the_scores_changes_nothing(place):
    """q k^T grows by the same amount for every key if the keys all move by one vector."""
    q, k, v = inputs(1, 64, 200, 1, 1, 64, FP16)
    q, k = np.round(q * 4) / 4, np.round(k * 4) / 4  # exactly representable sums
    one, _ = agree(place, q, k, v)
    moved, _ = agree(place, q, (k + np.float16(2)).astype(FP16), v)
    np.testing.assert_allclose(one.astype(float), moved.astype(float), atol=2e-3)


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
    alone = attention.forward(q, k, v)
    both, _ = attention.forward(q, k, v, return_lse=True)
    assert (place.get(alone) == place.get(both)).all()


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
            for room, piece in itertools.product(ampere.ROOMS, PIECES):
                config = ampere.config_for(head_dim, bf16, CAUSAL if causal else FULL, room, piece)
                assert config.head_dim >= head_dim and ampere.make(config)[1].nbytes <= ampere.SHARED_BYTES, config
            config = hopper.config_for(head_dim, bf16, CAUSAL if causal else FULL, 1000)
            _, smem = hopper.make(config)
            assert config.head_dim >= head_dim and smem.nbytes <= hopper.SHARED_BYTES, config


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
@pytest.mark.parametrize("room", ampere.ROOMS)
def test_two_blocks_share_a_multiprocessor(head_dim, room):
    """It has a kilobyte more than a block may have, and the driver takes one a block."""
    for piece in PIECES:
        _, smem = ampere.make(ampere.config_for(head_dim, bf16, FULL, room, piece))
        assert 2 * (smem.nbytes + 1024) <= room + 1024


# ---- families ------------------------------------------------------------------------------------------------------
SKIPPED = [(4, 64), (2, 128), (6, 72), (1, 64), (3, 72)]


@pytest.mark.parametrize(("skip", "head_dim"), SKIPPED)
def test_arrays_that_tma_cannot_address(place, family, skip, head_dim):
    """Bases and strides of 8, 4 or 2 bytes: sm_80's family takes them, asked or not; Hopper's, if asked, says why not."""
    room = [place.put(x) for x in inputs(1, 130, 70, 2, 1, head_dim + skip)]
    target = place.put(poisoned((1, 130, 2, head_dim + skip), BF16))
    q, k, v, out = (x[..., skip:] for x in (*room, target))
    if family == "sm_90":
        words = r"sm_90 takes addresses and positive strides that are multiples of 16 bytes.*'sm_90'"
        with pytest.raises(ValueError, match=words):
            attention.forward(q, k, v, out=out)
    attention.forward(q, k, v, out=out, causal=True, family=None if family == "sm_90" else family)
    host = [np.ascontiguousarray(place.get(x)[..., skip:]) for x in room]
    ref, _ = reference.forward(*host, causal=True)
    low, _ = reference.forward_low(*host, causal=True)
    reference.assert_close(place.get(target)[..., skip:], ref, low)
    assert np.isnan(place.get(target)[..., :skip].astype(np.float32)).all(), "columns beside out were written"


@pytest.mark.parametrize("family", ["sm_80"], indirect=True)
@pytest.mark.parametrize(("room", "head_dim"), [(99 * 1024, 96), (99 * 1024, 128), (99 * 1024, 192), (163 * 1024, 192)])
def test_kernels_for_gpus_with_less_shared_memory(place, room, head_dim, monkeypatch, nothing_known):
    """Their shapes run everywhere."""
    taken, config_of = [], launches.config_of
    monkeypatch.setattr(launches, "machine", lambda _: Interpreter(shared_bytes=room))
    monkeypatch.setattr(launches, "config_of", lambda *args: taken.append(config_of(*args)) or taken[-1])
    for causal in (False, True):
        agree(place, *inputs(1, 147, 171, 1, 1, head_dim), causal=causal)
    assert set(taken) == {ampere.config_for(head_dim, bf16, seen, room) for seen in (FULL, CAUSAL)}
    assert ampere.config_for(head_dim, bf16, FULL) not in taken


VIEWS = {  # of arrays (1, 130, 2, 64), by sequence and head
    "sequence backwards": lambda x: x[:, ::-1],
    "heads backwards": lambda x: x[:, :, ::-1],
    "both": lambda x: x[:, ::-1, ::-1],
    "every other row, backwards": lambda x: x[:, ::-2],
    "one row for all": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one head for all": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
}


@pytest.mark.parametrize("family", ["sm_80"], indirect=True)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_at_odd_places(family, view, layout):
    """Keys and values 2 bytes past a multiple of 4, whose strides are such, too; and `out` backwards."""
    q, *keys = inputs(1, 130, 130, 2, 2, 64)
    room = np.full((2, 1, 130, 2, 67), np.nan, BF16)
    room[..., 1:65] = keys
    k, v = (VIEWS[view](x) for x in room[..., 1:65])
    out = np.full((1, 130, 2, 65), np.nan, BF16)[:, ::-1, :, 1:]
    plain = [np.ascontiguousarray(x) for x in (q, k, v)]
    given = [x.swapaxes(1, 2) if layout == "bhsd" else x for x in (q, k, v, out)]
    attention.forward(*given[:3], out=given[3], layout=layout)
    reference.assert_close(out, reference.forward(*plain)[0], reference.forward_low(*plain)[0])
    assert np.isnan(out.base[..., 0].astype(np.float32)).all(), "memory around out was written"


@pytest.mark.parametrize("family", ["sm_80"], indirect=True)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", "qkv")
def test_any_strides(family, name, view):
    """Negative ones and 0, of each argument: NumPy's, for torch has none that are negative."""
    given = dict(zip("qkv", inputs(1, 130, 130, 2, 2, 64), strict=True))
    given[name] = VIEWS[view](given[name])
    plain = [np.ascontiguousarray(x) for x in given.values()]
    lengths = {x.shape[1] for x in plain}
    if len(lengths) > 1 and name != "q":
        plain, given = [x[:, :65] for x in plain], {key: x[:, :65] for key, x in given.items()}
    for out in np.full(plain[0].shape, np.nan, BF16), np.full(plain[0].shape, np.nan, BF16)[:, ::-1, ::-1]:
        assert attention.forward(*given.values(), out=out, causal=True) is out
        ref, low = reference.forward(*plain, causal=True)[0], reference.forward_low(*plain, causal=True)[0]
        reference.assert_close(out, ref, low)


@pytest.mark.parametrize("view", ["one row for all", "one head for all"])
def test_strides_of_0_are_for_every_family(family, view):
    """TMA reads what has one, such as keys that heads share by torch's expand."""
    q, k, v = inputs(1, 70, 70, 2, 2, 64)
    k, v = VIEWS[view](k), VIEWS[view](v)
    plain = [np.ascontiguousarray(x) for x in (q, k, v)]
    out = attention.forward(q, k, v)
    reference.assert_close(out, reference.forward(*plain)[0], reference.forward_low(*plain)[0])


def problem_on(capability, monkeypatch, piece=16):
    """A problem whose arrays lie on a GPU of this capability, past a multiple of 16 by `piece` bytes; None: in host memory."""
    form = c_ordered((1, 8, 1, 64), "bfloat16", None if capability is None else 0)
    if capability is not None:
        monkeypatch.setattr(families, "machine", lambda ordinal: types.SimpleNamespace(capability=capability))
    return FORWARD.FORWARD.problem({"q": form, "k": form._replace(past=piece % 16), "v": form})


@pytest.mark.parametrize(
    ("capability", "piece", "chosen"),
    [
        ((9, 0), 16, "sm_90"), ((9, 0), 8, "sm_80"), ((9, 0), 4, "sm_80"), ((9, 0), 2, "sm_80"), ((8, 0), 16, "sm_80"),
        ((8, 9), 4, "sm_80"), ((10, 0), 16, "sm_80"), ((12, 0), 16, "sm_80"), (None, 16, "sm_90"), (None, 4, "sm_80"),
    ],
)  # fmt: skip
def test_the_family_by_default(capability, piece, chosen, monkeypatch):
    """Hopper's where it runs, sm_80's for all other GPUs and arrays."""
    assert families.choose(problem_on(capability, monkeypatch, piece), None) == chosen
    assert families.choose(problem_on(capability, monkeypatch), None, piece == 16) == chosen, "where the caller knows better"


@pytest.mark.parametrize("name", "qkv")
def test_one_array_decides_the_family(name, monkeypatch):
    """All of them must be for TMA."""
    monkeypatch.setattr(families, "machine", lambda ordinal: types.SimpleNamespace(capability=(9, 0)))
    form = c_ordered((1, 8, 1, 64), "bfloat16", 0)
    for other in form._replace(past=8), form._replace(strides=(1032, 136, 136, 2), shape=(1, 2, 1, 64)):
        forms = {one: other if one == name else form._replace(shape=other.shape) for one in "qkv"}
        assert families.choose(FORWARD.FORWARD.problem(forms), None) == "sm_80"


@pytest.mark.parametrize(
    ("capability", "family", "words"),
    [((8, 9), "sm_90", "sm_90 runs on Hopper"), ((7, 5), "sm_80", "since Ampere"), ((7, 5), None, "since Ampere")],
    indirect=["family"],
)
def test_a_family_that_does_not_run_there(capability, family, words, monkeypatch):
    with pytest.raises(ValueError, match=words):
        families.choose(problem_on(capability, monkeypatch), family)


@pytest.mark.parametrize(
    ("capability", "piece", "words"),
    [((8, 9), 16, "^attention.forward: runs on Hopper; the arrays"), ((9, 0), 8, "^attention.forward: takes addresses .* 8"),
     (None, 8, "^attention.forward: takes addresses and positive strides.*{'k': 8}"), ((9, 0), 16, None), (None, 16, None)],
)  # fmt: skip
def test_what_is_for_hopper_only(capability, piece, words, monkeypatch):
    problem = problem_on(capability, monkeypatch, piece)
    if words is None:
        families.needs_hopper(problem)
    else:
        with pytest.raises(ValueError, match=words):
            families.needs_hopper(problem)


def test_a_family_that_does_not_exist():
    with pytest.raises(ValueError, match=r"family: must be None or one of \('sm_80', 'sm_90'\): family='sm_70'"):
        attention.forward(*inputs(1, 8, 8, 1, 1, 64), family="sm_70")
    with pytest.raises(ValueError, match=r"family: must be None or one of \('sm_80', 'sm_90'\): family='sm_70'"):
        attention.forward(*inputs(1, 0, 8, 1, 1, 64), family="sm_70")  # where there is nothing to do


@pytest.mark.parametrize(("family", "head_dim", "causal", "length"), AS_COMPILED, indirect=["family"])
def test_as_compiled(family, head_dim, causal, length, as_compiled):
    """What the kernels' PTX computes, and a tile that ends early; at D 64 and 128 of two heads that share keys."""
    as_compiled({"sm_90": "sm_90a", "sm_80": "sm_80"}[family])
    agree(OnInterpreter(), *inputs(1, length, length, 2 if head_dim in (64, 128) else 1, 1, head_dim), causal=causal)


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(30, 0), softcap=9.0)], ids=["causal", "window"])
def test_parts_of_a_sequence_are_what_they_are_in_the_whole(place, options):
    """Bit by bit, with lengths_k of parts: attention.parallel's ranks have two parts each, of which this is one launch."""
    q, k, v = inputs(2, 140, 150, 2, 1, 96)
    whole, sums = (place.get(x) for x in attention.forward(*map(place.put, (q, k, v)), return_lse=True, **options))
    rows = np.r_[10:60, 85:135]
    ends = place.put(np.array([[70, 145]] * 2, np.int32))
    given = [place.put(x) for x in (np.ascontiguousarray(q[:, rows]), k, v)]
    out, lse = attention.forward(*given, lengths_k=ends, return_lse=True, **options)
    np.testing.assert_array_equal(place.get(out), whole[:, rows])
    np.testing.assert_array_equal(place.get(lse), sums[:, :, rows])


@pytest.mark.parametrize("options", [{}, dict(causal=True, lengths_k=True)], ids=["full", "keys in use"])
def test_an_output_that_is_not_rounded(place, options):
    """out of float32 is what is rounded elsewhere."""
    q, k, v = map(place.put, inputs(1, 100, 150, 2, 1, 64))
    if "lengths_k" in options:
        options = options | {"lengths_k": place.put(np.array([140], np.int32))}
    out = place.put(np.full((1, 100, 2, 64), np.nan, np.float32))
    assert attention.forward(q, k, v, out=out, **options) is out
    rounded = place.get(attention.forward(q, k, v, **options))
    np.testing.assert_array_equal(place.get(out).astype(rounded.dtype), rounded)
    assert (place.get(out) != rounded.astype(np.float32)).mean() > 0.5


def in_parts(place, q, k, v, cut, **options):
    """Queries go on from keys before `cut` to those behind it: out and lse against float64, where each part's are merged."""
    parts = [(k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:])]
    out, lse = place.put(poisoned(q.shape, np.float32)), place.put(poisoned((q.shape[0], q.shape[2], q.shape[1]), np.float32))
    told = there(place, options) | dict(out=out, lse=lse, return_lse=True)
    for n, part in enumerate(parts):
        got = attention.forward(*map(place.put, (q, *part)), accumulate=n > 0, **told)
        assert got[0] is out and got[1] is lse

    def both(function):
        found = [function(q, *part, **options) for part in parts]
        sums = np.array([sums for _, sums in found], np.float64)
        with np.errstate(invalid="ignore"):
            total = np.logaddexp(*sums)
            weights = np.nan_to_num(np.exp(sums - total)).swapaxes(2, 3)[..., None]
        return sum(w * o.astype(np.float64) for w, (o, _) in zip(weights, found)), total

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
        with pytest.raises(TypeError, match="accumulate: takes out and lse of float32"):
            attention.forward(**(dict(q=q, k=k, v=v, accumulate=True) | wrong))
    with pytest.raises(TypeError, match="out: dtype must be"):
        attention.forward(q, k, v, out=np.zeros_like(q), lse=lse, accumulate=True)
    with pytest.raises(TypeError, match="lse: is written with return_lse=True"):
        attention.forward(q, k, v, lse=lse)
    assert attention.forward(q, k[:, :0], v[:, :0], out=out, lse=lse, accumulate=True) is out


def test_parts_are_refused_with_what_counts_queries(family):
    q, k, v = inputs(1, 40, 40, 2, 1, 64)
    ends = np.array([[20, 40]], np.int32)
    with pytest.raises(NotImplementedError, match="lengths_k: of parts of queries it is not served with mask or score"):
        attention.forward(q, k, v, lengths_k=ends, mask=lambda b, h, i, j: j < i)
    with pytest.raises(NotImplementedError, match="not served with bias"):
        attention.forward(q, k, v, lengths_k=ends, bias=np.zeros((1, 1, 40, 40), np.float32))
    with pytest.raises(ValueError, match="so many parts as queries are divided into"):
        attention.forward(q, k, v, lengths_k=np.array([[20, 40, 40]], np.int32))
    twice, both = (np.concatenate([x, x]) for x in (q, k)), np.concatenate([ends, ends])
    with pytest.raises(NotImplementedError, match="not served with slopes of each batch in alibi"):
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
