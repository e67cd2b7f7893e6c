"""attention.delta_rule_backward with decays of channels (KDA) by chunks, against the reference's gradients. Token by token, and
packed sequences among poison: test_delta_gradients.py."""

from types import SimpleNamespace

import numpy as np
import pytest
from gradient_cases import (
    bf16,
    check,
    check_heads_first,
    check_record,
    check_row_strides,
    delta_case,
    f32,
    relative_rms,
    run,
    with_record,
)
from places import OnInterpreter
from poison import as_on_a_device

import attention
import tiles
from attention import reference
from attention.kernels.delta import delta_channel_cuts_hopper
from attention.parts.recurrent import channel_history
from attention.plans.delta import delta_channel_chunks, delta_channel_gradients, delta_gradients
from tiles import bf16 as tile_dtype
from tiles import fp32
from tiles.calls import program
from tiles.targets import MEDIUM, SMALL


def one_head(length, **more):
    """A case with decays of channels and one head."""
    return delta_case(length, "channel", heads=1, key_heads=1, **more)


@pytest.mark.parametrize(("length", "batch", "family"), [(1, 4, None), (64, 1, "sm_80"), (130, 2, None), (130, 1, "sm_80")])
def test_lengths(place, length, batch, family):
    check(place, one_head(length, batch=batch), family=family)


SIZES = [(66, 128, 80, "sm_80"), (66, 128, 80, None), (20, 80, 208, None), (20, 80, 48, None), (20, 48, 112, None)]


@pytest.mark.parametrize(("length", "key_dim", "value_dim", "family"), SIZES)
def test_sizes(place, length, key_dim, value_dim, family):
    """Blocks of columns that are full, and others."""
    check(place, one_head(length, key_dim=key_dim, value_dim=value_dim), family=family)


@pytest.mark.parametrize("family", [None, "sm_80"])
def test_value_heads_that_share_keys(place, family):
    """They add to the gradients of queries and keys; each has gradients of its beta and gates, which have 16 bits here."""
    args = delta_case(20, "channel", heads=2, key_heads=1, gates=bf16)
    args["beta"] = args["beta"].astype(bf16)
    check_heads_first(place, args, family=family)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_any_scale(place, scale):
    check(place, one_head(20), scale=scale)


def test_float16(place):
    check(place, one_head(70, dtype=np.float16))


@pytest.mark.parametrize("more", [4, 1])
def test_any_alignment(more):
    """Strides that are multiples of 8 and 2 bytes."""
    check_row_strides(one_head(20), more, family="sm_80")


@pytest.mark.parametrize("is_result", [False, True])
def test_gates_that_tma_does_not_reach(is_result):
    """Rows of theirs, or of their gradients, begin between multiples of 16 bytes, and all other arrays' do not."""
    args = one_head(20)
    wide = np.full((*args["decay"].shape[:-1], 17), np.nan, f32)
    wide[..., 1:] = args["decay"]
    if not is_result:
        check(OnInterpreter(), args | {"decay": wide[..., 1:]})
        with_record(OnInterpreter(), args | {"decay": wide[..., 1:]})
        return
    want = attention.delta_rule_backward(**args)
    for x, y in zip(attention.delta_rule_backward(**args, ddecay=wide[..., 1:]), want, strict=True):
        assert relative_rms(x, y) < 0.01


@pytest.mark.parametrize(("dtype", "gates"), [(np.float16, bf16), pytest.param(bf16, np.float16, marks=pytest.mark.release)])
def test_gates_of_the_other_dtype_of_16_bits(place, dtype, gates):
    args = one_head(20, dtype=dtype, gates=gates)
    check(place, args)
    check_record(place, args)


@pytest.mark.parametrize("shared_bytes", [MEDIUM, SMALL])
def test_little_shared_memory(place, monkeypatch, nothing_known, shared_bytes):
    """Panels of values are not loaded ahead there, or there is no room for a chunk's pairs, and tokens go one by one."""
    monkeypatch.setattr(delta_gradients, "machine", lambda _: SimpleNamespace(shared_bytes=shared_bytes))
    check(place, one_head(20, value_dim=80), family="sm_80")


@pytest.mark.release
@pytest.mark.parametrize(("arch", "length", "family"), [("sm_80", 20, "sm_80"), ("sm_90a", 65, None)])
def test_as_compiled(as_compiled, arch, length, family):
    """The PTX of the kernels. Two chunks have, for those of mma.sync that go from one to the next, test_delta_gradients.py, for
    Hopper's `test_packed_sequences_as_compiled`."""
    as_compiled(arch)
    check(OnInterpreter(), one_head(length), family=family)


# ---- blocks of 32 tokens, for the largest tiles on Hopper --------------------------------------------------------------
def large(length, gate=-5.0, **more):
    """A case with the largest tiles, whose gates lie between 0 and `gate`, as those of models do."""
    args = one_head(length, key_dim=128, value_dim=128, **more)
    normal = np.random.default_rng(length).standard_normal(args["decay"].shape)
    return args | {"decay": (gate / (1 + np.exp(-normal))).astype(args["decay"].dtype)}


LARGE = [(130, f32), (64, bf16), (33, f32)]


@pytest.mark.parametrize(("length", "gates"), LARGE)
def test_large_tiles(place, length, gates):
    check(place, large(length, gates=gates))


@pytest.mark.parametrize(("gate", "key_dim"), [(0.0, 128), (-12.0, 80)])
def test_large_tiles_at_other_gates(place, gate, key_dim):
    """Without decay; and where no chunk has references of 32 tokens."""
    args = large(66, gate)
    check(
        place,
        args
        | {name: args[name][..., :key_dim] for name in ("q", "k", "decay")}
        | {name: args[name][:, :, :key_dim] for name in ("initial_state", "dstate")},
    )


def test_strong_chunks_among_others(place):
    """One of three has a gate of -1e4 in a single channel, one of them is -inf. Those of packed sequences, too, and in float16,
    whose chunks are strong at gates of models."""
    args = large(190)
    args["decay"][:, 70, :, 5], args["decay"][:, 100] = -1e4, -np.inf
    got = check(place, args)
    assert not got["ddecay"][:, 100].any() and got["ddecay"][:, 70, :, :5].all()


@pytest.mark.parametrize("is_packed", [pytest.param(False, marks=pytest.mark.release), True])
def test_a_thread_block_with_all_chunks(place, monkeypatch, nothing_known, is_packed):
    """As on a GPU with fewer multiprocessors than chunks: tiles are loaded again, and one of the chunks is strong."""
    for module in (delta_channel_chunks, delta_channel_gradients):
        for name in {"count_parts", "persistent", "count_packed_parts"} & {*vars(module)}:
            monkeypatch.setattr(module, name, lambda *_: 1)
    args = packed([70, 198], key_dim=128, value_dim=128) if is_packed else large(130)
    args["decay"][:, 90, :, 5] = -1e4
    check(place, args)


@pytest.mark.parametrize("dtype", [bf16, pytest.param(np.float16, marks=pytest.mark.release)])
def test_large_tiles_of_packed_sequences(place, dtype):
    """One with a tail, one without tokens, and one of whole chunks; strong chunks in one of them, a short one by a channel of
    the last warp."""
    args = packed([70, 70, 134], key_dim=128, value_dim=128, dtype=dtype)
    args["decay"] = np.maximum(-5, args["decay"] * 2)
    args["decay"][:, 20, :, 3], args["decay"][:, 66, :, 125] = -1e3, -1e3
    check(place, args)


def test_large_tiles_without_gates_gradients():
    """The other gradients are the same to the last bit."""
    args = large(20)
    *expected, _, first = attention.delta_rule_backward(**args)
    for x, y in zip(attention.delta_rule_backward(**args, ddecay=False), (*expected, first), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.release
def test_large_tiles_as_compiled(as_compiled):
    """The PTX of the kernel of two blocks."""
    as_compiled("sm_90a")
    check(OnInterpreter(), large(20))


# ---- segments of few long sequences ------------------------------------------------------------------------------------------
def cuttable():
    """A case of five chunks, of which the third makes all that comes before it forgotten, and no other one does."""
    args = one_head(300)
    args["decay"] *= 0.01
    args["decay"][:, 130:170] = -5
    return args


@pytest.mark.parametrize(("max_chunks", "counts"), [(4, [1, 2, 1, 2]), (1, [1, -1, 1, -1])])
def test_where_sequences_are_cut(monkeypatch, max_chunks, counts):
    """How many chunks before each segment of one chunk leave something there, in both directions: up to the chunk that forgets,
    or up to the beginning."""
    monkeypatch.setattr(channel_history, "MAX_CHUNKS", max_chunks)
    args, overlaps, segments = cuttable(), np.zeros((2, 1, 5), f32), 5
    kernel, shared = delta_channel_cuts_hopper.make(delta_channel_cuts_hopper.Config(64, 0, fp32, tile_dtype, False, 2))
    launch = tiles.launch(kernel, 2 * (segments - 1), delta_channel_cuts_hopper.Config.threads, shared=shared)
    launch(args["beta"], np.zeros(1, np.int32), 300, 1, 1, (overlaps, segments, args["decay"], args["k"]), ())
    np.testing.assert_array_equal(overlaps[:, 0, 1:], [counts, counts])


@pytest.mark.parametrize("is_stored", [pytest.param(False, marks=pytest.mark.release), True])
def test_segments(monkeypatch, nothing_known, is_stored):
    """Gradients and outputs have the same bits: what is left out is below the last one. Two of five segments have no block of
    their own, as one chunk is counted at most, and one begins with the sequence."""
    monkeypatch.setattr(channel_history, "MAX_CHUNKS", 1)
    args = cuttable()
    inputs = {name: x for name, x in args.items() if name not in ("dout", "dstate")}

    def results():
        if not is_stored:
            return attention.delta_rule_backward(**args)
        out, state, record = attention.delta_rule(**inputs, return_state=True, return_chunk_states=True)
        return out, state, *record, *attention.delta_rule_backward(**args, chunk_states=record)

    expected = results()
    for table in ("GUARDED_CALLS", "REMEMBERED"):
        monkeypatch.setattr(program, table, program.LruTable(program.ENTRIES))
    monkeypatch.setattr(delta_channel_chunks, "MIN_CUT_DIRECTIONS", 1)
    monkeypatch.setattr(delta_channel_chunks, "choose_cuts", lambda *_: 5)
    for x, y in zip(results(), expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x, y)


def test_numbers_of_segments():
    """As many as fill the GPU, unless they are too short."""
    assert delta_channel_chunks.choose_cuts(16, 512, 132) == 8
    assert delta_channel_chunks.choose_cuts(128, 512, 132) == 1
    assert delta_channel_chunks.choose_cuts(4, 100, 132) == 6
    assert delta_channel_chunks.choose_cuts(4, 63, 132) == 1


# ---- what forward stored --------------------------------------------------------------------------------------------------
RECORDS = {
    "packed": lambda: packed([66, 66, 76], key_dim=128, value_dim=128),
    "strong chunks": lambda: large(20, -12.0, gates=bf16),
    "shared keys": lambda: delta_case(66, "channel", heads=2, key_heads=1, key_dim=80, value_dim=48, dtype=np.float16),
}


@pytest.mark.parametrize("args", RECORDS.values(), ids=RECORDS)
def test_records(place, args):
    """Forward computes outputs from what the pass of gradients stores, and the recurrence of states."""
    args = args()
    record = check_record(place, args)
    *_, key_dim = args["q"].shape
    assert record.vectors is None and record.queries.shape[-2:] == (64, key_dim)


@pytest.mark.release
def test_records_as_compiled(as_compiled):
    """The PTX of the recurrence with outputs, and of the one in reverse alone."""
    as_compiled("sm_90a")
    check_record(OnInterpreter(), one_head(65))


# ---- packed sequences ---------------------------------------------------------------------------------------------------
def packed(ends, **more):
    """A case with one head and sequences that end there."""
    args = one_head(ends[-1], **more)
    states = {name: np.repeat(args[name], len(ends), axis=0) for name in ("initial_state", "dstate")}
    return args | states | {"cu_seqlens": np.array([0, *ends], np.int32)}


@pytest.mark.parametrize("gates", [f32, pytest.param(bf16, marks=pytest.mark.release)])
def test_packed_sequences(place, gates):
    """One with a tail, one without tokens, and one of whole chunks."""
    check(place, packed([70, 70, 198], key_dim=80, value_dim=80, gates=gates))


@pytest.mark.parametrize("length", [5, 17])
def test_strong_tails_before_poison(place, monkeypatch, length):
    """Blocks that are halved read rows of queries, keys and gates again: none behind the sequence's end. The last gate is -inf,
    of 17 that of a block of its own."""
    as_on_a_device(monkeypatch)
    args = packed([length])
    args["decay"][:, 1:5], args["decay"][:, -1] = -40, -np.inf
    spread = {name: np.concatenate([x, np.full_like(x[:, :3], np.nan)], 1) for name, x in args.items() if x.ndim > 2}
    states = {name: args[name] for name in ("initial_state", "dstate")}
    got, expected = run(place, args | spread | states), run(place, args)
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name] if name == "dinitial_state" else got[name][:, :length], x)
        assert np.isfinite(x.astype(f32)).all()
    assert not expected["ddecay"][:, -1].any()


def test_one_packed_sequence(place):
    """Several blocks share its chunks."""
    check(place, packed([330]))


def test_thread_blocks_of_packed_sequences():
    """As many as run at once; more where sequences are long, as some are longer than others; never none."""
    assert delta_channel_chunks.count_packed_parts(1, 2, 20, 132) == 20
    assert delta_channel_chunks.count_packed_parts(1, 32, 33, 132) == 5
    assert delta_channel_chunks.count_packed_parts(8, 32, 256, 132) == 4
    assert delta_channel_chunks.count_packed_parts(100, 32, 100, 132) == 1


def test_packed_sequences_as_compiled(as_compiled):
    """The PTX of kernels that choose between two arrays for TMA, with gates whose blocks go by halves."""
    as_compiled("sm_90a")
    args = packed([3, 70])
    args["decay"][:, 12:20] = -30
    check(OnInterpreter(), args)


def test_gates_without_gradients():
    """The other gradients are the same to the last bit."""
    args = one_head(20)
    *expected, _, first = attention.delta_rule_backward(**args)
    for x, y in zip(attention.delta_rule_backward(**args, ddecay=False), (*expected, first), strict=True):
        np.testing.assert_array_equal(x, y)


# ---- beta, keys and gates -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_equal_betas(place, beta):
    """0 writes nothing, and has a gradient; 1 replaces what a key has. (Hopper's kernels divide by beta, and take LEAST_BETA
    for 0.)"""
    args = one_head(70)
    args["beta"][:, 1:] = beta
    got = check(place, args)
    if not beta:
        dv = np.abs(got["dv"].astype(float))
        assert dv[:, 1:].max() < 2**-36 * dv[:, 0].max() and got["dbeta"].all()


@pytest.mark.parametrize(("beta", "limit"), [(1.0, 0.01), (2.0, 0.05)])
def test_equal_keys(place, beta, limit):
    """Each token writes to what the one before it has written. Terms of dP that are rounded cancel."""
    args = one_head(70)
    args["k"][:], args["decay"][:], args["beta"][:] = args["k"][:, :1], 0, beta
    got, want = run(place, args), reference.linear_backward(**args)
    for name, x in got.items():
        assert relative_rms(x, want[name]) < limit, name


@pytest.mark.parametrize("gate", [0.0, -1.12, -1.14, -4.6, -4.7, -1e4, -np.inf])
def test_equal_gates(place, gate):
    """Without decay; on both sides of what a chunk and a block may decay by (two_block_scores.py), where all but the nearest
    tokens are forgotten; and where all are."""
    args = one_head(70)
    args["decay"][:] = gate
    got = check(place, args)
    if gate < -100:
        assert not got["ddecay"].any() and not got["dinitial_state"].any()


def test_channels_that_differ(place):
    """Half of the channels forget everything at each token, the others nothing."""
    args = one_head(70)
    args["decay"][..., ::2], args["decay"][..., 1::2] = -np.inf, 0
    check(place, args)


def test_blocks_that_differ(place):
    """Some of 16 tokens have decays that no number holds, in one channel or in all, and between some there is such a decay."""
    args = one_head(130)
    args["decay"][:, 20:24, :, 3], args["decay"][:, 36:44], args["decay"][:, 64] = -40, -20, -1e3
    got = check(place, args)
    assert not got["ddecay"][:, 64].any()


def test_errors_of_later_tokens_stay_there(place):
    """A gate of -inf inside a chunk, behind which gradients are a thousand times as large."""
    args = one_head(128)
    args["decay"][:, 40], args["dout"][:, 40:] = -np.inf, args["dout"][:, 40:] * bf16(1024)
    got, want = run(place, args)["ddecay"], reference.linear_backward(**args)["ddecay"]
    for part in slice(40), slice(40, None):
        assert relative_rms(got[:, part], want[:, part]) < 0.02


def test_gradients_of_gates_by_others(place):
    """Summed over channels, those without states are the reverse cumulative sum of q . dq - v . dv."""
    args = one_head(100)
    args["dstate"][:] = 0
    got = {name: x.astype(float) for name, x in run(place, args).items()}
    r = (args["q"].astype(float) * got["dq"]).sum(-1) - (args["v"].astype(float) * got["dv"]).sum(-1)
    assert relative_rms(r[:, ::-1].cumsum(1)[:, ::-1], got["ddecay"].sum(-1)) < 0.03


def test_gradients_of_each_channels_gates(place):
    """They are the reverse cumulative sum of q dq + k dk_read - k dk_write, and of what the last state adds. dk_read = -S' dv
    is the gradient of the k that reads a state, dk_write the rest."""
    args = one_head(100)
    q, k, v, beta, decay, state, dstate = (args[x].astype(float) for x in ("q k v beta decay initial_state dstate").split())
    got = {name: x.astype(float) for name, x in run(place, args).items()}
    S, dk_read = state[0, 0], np.zeros_like(k)
    for t in range(100):
        decayed = np.exp(decay[0, t, 0])[:, None] * S
        dk_read[0, t, 0] = -decayed @ got["dv"][0, t, 0]
        S = decayed + np.outer(k[0, t, 0], beta[0, t, 0] * (v[0, t, 0] - decayed.T @ k[0, t, 0]))
    terms = q * got["dq"] + k * dk_read - k * (got["dk"] - dk_read)
    terms[0, -1, 0] += (S * dstate[0, 0]).sum(-1)
    assert relative_rms(terms[:, ::-1].cumsum(1)[:, ::-1], got["ddecay"]) < 0.03


def test_gates_of_zero(place):
    """Gates of channels that are alike have gradients whose sum is that of the gate of a token."""
    args = one_head(100)
    args["decay"][:] = 0
    by_channel, by_token = run(place, args), run(place, args | {"decay": np.zeros(args["decay"].shape[:3], f32)})
    assert relative_rms(by_channel["ddecay"].sum(-1), by_token["ddecay"]) < 0.01
