"""attention.delta_rule_backward against the reference's gradients, whose own derivatives
reference/test_recurrence_gradients.py checks."""

from types import SimpleNamespace

import numpy as np
import pytest
from gradient_cases import (
    bf16,
    check,
    check_heads_first,
    check_packed,
    check_record,
    check_row_strides,
    delta_case,
    f32,
    relative_rms,
    run,
    with_record,
)
from places import OnInterpreter

import attention
from attention import reference
from attention.plans.delta import delta_gradient_walk, delta_gradients, delta_records
from attention.public import delta_rules
from tiles.targets import SMALL


@pytest.fixture(params=["hopper", "chunks", "tokens"])
def kernels(request, monkeypatch, nothing_known):
    """By chunk kernels for Hopper, by those for all GPUs, or token by token."""
    name = {"chunks": "serves_hopper", "tokens": "serves_delta_gradients"}.get(request.param)
    if name:
        monkeypatch.setattr(delta_gradients, name, lambda problem: False)
    return request.param


LENGTHS = [
    (1, "token", None), (17, "head", "sm_80"), (63, "none", None), (64, "token", "sm_80"), (64, "none", None),
    (65, "none", "sm_80"), (130, "head", None), (130, "token", "sm_80"),
]  # fmt: skip


@pytest.mark.parametrize(("length", "decay", "family"), LENGTHS)
def test_lengths(place, length, decay, family):
    check(place, delta_case(length, decay, batch=1 + (length < 64), heads=1 + (length < 130)), family=family)


@pytest.mark.parametrize(("length", "decay"), [(1, "token"), (2, "none"), (17, "head"), (30, "channel")])
def test_lengths_token_by_token(place, monkeypatch, nothing_known, length, decay):
    monkeypatch.setattr(delta_gradients, "serves_delta_gradients", lambda problem: False)
    check(place, delta_case(length, decay, batch=2))


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_sequences_without_tokens(place, decay):
    """The gradient of the state is passed on."""
    args = delta_case(0, decay)
    np.testing.assert_array_equal(run(place, args)["dinitial_state"], args["dstate"])


SIZES = [(128, 128, "token", None), (128, 128, "token", "sm_80"), (80, 16, "none", None), (64, 208, "head", "sm_80")]


@pytest.mark.parametrize(("key_dim", "value_dim", "decay", "family"), SIZES)
def test_sizes(place, key_dim, value_dim, decay, family):
    """Blocks of columns that are full, and others; more columns than a block of Hopper's kernels has, by mma.sync."""
    check(place, delta_case(66, decay, key_dim=key_dim, value_dim=value_dim, heads=1), family=family)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_value_parts(place, decay):
    """Two parts of a head, of packed sequences, with beta and gates of 16 bits."""
    args = delta_case(67, decay, heads=1, value_dim=144, gates=bf16)
    args["beta"] = args["beta"].astype(bf16)
    args["initial_state"], args["dstate"] = (np.repeat(args[name], 2, axis=0) for name in ("initial_state", "dstate"))
    check(place, args | {"cu_seqlens": np.array([0, 3, 67], np.int32)})


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_value_parts_of_heads_first(place, decay):
    """Strides of heads with which parts are no views: the same kernels, and so the same bits."""
    check_heads_first(place, delta_case(20, decay, batch=1 + (decay == "token"), heads=2, key_heads=1, value_dim=144))


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_value_parts_of_any_rows(decay):
    """Rows of 144 columns in rows of 152."""
    check_row_strides(delta_case(3, decay, heads=2 if decay == "token" else 1, value_dim=144), 8)


@pytest.mark.parametrize(("key_dim", "value_dim", "decay"), [(256, 16, "token"), (144, 144, "channel")])
def test_sizes_token_by_token(place, key_dim, value_dim, decay):
    """States of which each warp has some rows only, too."""
    check(place, delta_case(5, decay, key_dim=key_dim, value_dim=value_dim, heads=1))


@pytest.mark.parametrize(("decay", "gates", "batch"), [("token", bf16, 2), ("head", f32, 1)])
def test_value_heads_that_share_keys(place, decay, gates, batch):
    """They add to the gradients of queries and keys; each has gradients of its beta and gates."""
    args = delta_case(9, decay, batch=batch, heads=2, key_heads=1, key_dim=80, gates=gates)
    args["beta"] = args["beta"].astype(bf16)
    check_heads_first(place, args)


@pytest.mark.release
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_gates_and_beta_of_16_bits_as_compiled(as_compiled, nothing_known, monkeypatch, decay):
    """Kernels read single numbers of any dtype."""
    monkeypatch.setattr(delta_gradients, "serves_delta_gradients", lambda problem: False)
    args = delta_case(3, decay, heads=1, key_dim=16, value_dim=16, gates=bf16)
    args["beta"] = args["beta"].astype(bf16)
    as_compiled("sm_80")
    check(OnInterpreter(), args)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_any_scale(place, kernels, scale):
    check(place, delta_case(20, "token", heads=1), scale=scale)


def test_float16(place):
    check(place, delta_case(70, "token", dtype=np.float16))


@pytest.mark.parametrize("more", [4, pytest.param(2, marks=pytest.mark.release), 1])
def test_any_alignment(more):
    """Strides that are multiples of 8, 4 and 2 bytes. (Kernels for Hopper read copies: test_members.py.)"""
    args = delta_case(66, "token", heads=1)

    def widened(x):
        wide = np.full((*x.shape[:-1], x.shape[-1] + more), np.nan, x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    actual = run(OnInterpreter(), args | {name: widened(args[name]) for name in ("q", "k", "v", "dout")}, family="sm_80")
    for name, x in run(OnInterpreter(), args, family="sm_80").items():
        np.testing.assert_array_equal(actual[name], x)


def test_little_shared_memory(place, monkeypatch, nothing_known):
    """Panels of values are not loaded ahead there."""
    monkeypatch.setattr(delta_gradients, "machine", lambda _: SimpleNamespace(shared_bytes=SMALL))
    check(place, delta_case(70, "token", value_dim=80), family="sm_80")


PACKED = [("token", None, 2), ("head", "sm_80", 2), ("channel", "sm_80", 1)]
PACKED += [pytest.param("channel", None, 1, marks=pytest.mark.release)]  # test_delta_channel_gradients.py has some


@pytest.mark.parametrize(("decay", "family", "heads"), PACKED)
def test_packed_sequences_among_poison(place, monkeypatch, decay, family, heads):
    """Each sequence has the gradients that it has by itself. Padding has gradients of 0; one without tokens passes the gradient
    of its state on."""
    check_packed(place, monkeypatch, delta_case, decay, heads, family=family)


def test_packed_sequences_of_whole_chunks(place):
    """The last of them is whole, too; keys have heads of their own."""
    args = delta_case(192, "none", heads=2, key_dim=80, value_dim=80)
    args["initial_state"], args["dstate"] = (np.repeat(args[name], 2, axis=0) for name in ("initial_state", "dstate"))
    check(place, args | {"cu_seqlens": np.array([0, 64, 192], np.int32)})


@pytest.mark.release
def test_packed_sequences_as_compiled(as_compiled):
    """The PTX of kernels that choose between two arrays for TMA, and of the copies of tails."""
    as_compiled("sm_90a")
    args = delta_case(20, "token", heads=1)
    args["initial_state"], args["dstate"] = (np.repeat(args[name], 2, axis=0) for name in ("initial_state", "dstate"))
    check(OnInterpreter(), args | {"cu_seqlens": np.array([0, 3, 20], np.int32)})


def set_segments(monkeypatch, segments):
    """Cut sequences into so many segments; a thread block of inverses has as many value heads as it may."""
    monkeypatch.setattr(delta_gradient_walk, "choose_segments", lambda *_: segments)
    value_heads = delta_gradient_walk.delta_inverse_hopper.possible_value_heads
    monkeypatch.setattr(delta_gradient_walk, "choose_value_heads", lambda _, *sizes: max(value_heads(*sizes[:2])))


@pytest.mark.parametrize(
    ("arch", "length", "decay", "segments"),
    [pytest.param("sm_80", 65, "token", 1, marks=pytest.mark.release), ("sm_90a", 65, "token", 2)],
)
def test_as_compiled(as_compiled, monkeypatch, nothing_known, arch, length, decay, segments):
    """The PTX of all kinds of kernels of chunks, with two value heads a key head. (Hopper's walk in one segment:
    `test_packed_sequences_as_compiled`.)"""
    as_compiled(arch)
    set_segments(monkeypatch, segments)
    case, family = ({"heads": 2, "key_heads": 1, "key_dim": 80}, None) if arch == "sm_90a" else ({"heads": 1}, "sm_80")
    check(OnInterpreter(), delta_case(length, decay, **case), family=family)


# ---- segments -----------------------------------------------------------------------------------------------------------
SEGMENTS = [(2, 129, "token", bf16), (3, 65, "head", np.float16)]


@pytest.mark.parametrize(("segments", "length", "decay", "dtype"), SEGMENTS)
def test_segments(place, monkeypatch, nothing_known, segments, length, decay, dtype):
    """Of unequal lengths, and more than there are chunks: dS goes from one to the next as if there were none. A beta of 0 has a
    gradient there, too."""
    set_segments(monkeypatch, segments)
    args = delta_case(length, decay, key_dim=80, value_dim=80, key_heads=1, dtype=dtype)
    args["beta"][:, 5] = 0
    check(place, args)


def test_segments_change_nothing(monkeypatch, nothing_known):
    """Segments begin with what the recurrences have there, so in the interpreter their number changes no bit. They have three
    chunks, one more than are loaded ahead, and two."""
    args, actual = delta_case(322, "none", heads=1), []
    for segments, family in ((2, None), (3, "sm_90")):  # another option, or the plan would be remembered
        monkeypatch.setattr(delta_gradient_walk, "choose_segments", lambda *_, segments=segments: segments)
        actual.append(run(OnInterpreter(), args, family=family))
    for name, x in actual[0].items():
        np.testing.assert_array_equal(x, actual[1][name])


def test_how_many_segments():
    """As many as fill the GPU's multiprocessors once, where one for each head would leave most of them idle."""
    assert delta_gradient_walk.choose_segments(32, 128, 132) == 4
    assert delta_gradient_walk.choose_segments(32, 512, 132) == 4
    assert delta_gradient_walk.choose_segments(256, 32, 132) == 1
    assert delta_gradient_walk.choose_segments(2, 3, 132) == 1


def test_how_many_value_heads():
    """Two of a key head in a thread block of inverses where there are more of these than run at once."""
    choose = delta_gradient_walk.choose_value_heads
    assert choose(32 * 128, 128, 2, 132) == 2
    assert choose(8 * 64, 128, 2, 132) == 1
    assert choose(32 * 128, 128, 3, 132) == choose(32 * 128, 64, 2, 132) == 1


# ---- what forward stored --------------------------------------------------------------------------------------------------
RECORDS = [(130, "token", bf16, 128, None), (65, "none", np.float16, 64, -0.3)]
RECORDS += [pytest.param(70, "head", bf16, 80, None, marks=pytest.mark.release)]


@pytest.mark.parametrize(("length", "decay", "dtype", "dim", "scale"), RECORDS)
def test_records(place, length, decay, dtype, dim, scale):
    """A pass that computes outputs stores what the pass of gradients stores."""
    args = delta_case(length, decay, heads=2, key_heads=1, key_dim=dim, value_dim=dim, dtype=dtype)
    record = check_record(place, args, **({} if scale is None else {"scale": scale}))
    assert record.states.shape == (1, -(-length // 64), 2, dim, dim) and record.scores is None


def test_records_of_packed_sequences(place):
    args = delta_case(150, "token", heads=1)
    args["cu_seqlens"] = np.array([0, 1, 1, 130, 150])
    for name in ("initial_state", "dstate"):
        args[name] = np.repeat(args[name], 4, axis=0)
    record = check_record(place, args)
    assert record.errors.shape == (1, 6, 1, 64, 16)


FEW_HEADS = [(130, "head", bf16, 80, 3), pytest.param(129, "none", np.float16, 128, 2, marks=pytest.mark.release)]


@pytest.mark.parametrize(("length", "decay", "dtype", "dim", "segments"), FEW_HEADS)
def test_records_for_few_heads(place, monkeypatch, nothing_known, length, decay, dtype, dim, segments):
    """Forward runs the recurrence of the states, gradients the other one, and the walk through all segments."""
    monkeypatch.setattr(delta_rules, "record_fields", lambda *_: delta_records.SEGMENTED)
    for name in "choose_segments", "choose_walked_segments":
        monkeypatch.setattr(delta_gradient_walk, name, lambda *_: segments)
    args = delta_case(length, decay, heads=2, key_heads=1, key_dim=dim, value_dim=dim, dtype=dtype)
    assert check_record(place, args).scores.shape == (1, -(-length // 64), 2, 64, 64)


def test_records_for_few_heads_as_compiled(as_compiled, monkeypatch, nothing_known):
    """The PTX of the recurrence of states alone. (That of gradients is the code that test_as_compiled runs for both.)"""
    monkeypatch.setattr(delta_rules, "record_fields", lambda *_: delta_records.SEGMENTED)
    as_compiled("sm_90a")
    args = delta_case(65, "token", heads=1)
    (out, state, _), _ = with_record(OnInterpreter(), args)
    want, last = reference.linear(**{name: x for name, x in args.items() if name not in ("dout", "dstate")})
    assert relative_rms(out, want) < 0.01 and relative_rms(state, last) < 0.005


def test_which_records(monkeypatch):
    """None where both recurrences run side by side as fast as one; that of few heads where a walk in one segment would leave
    multiprocessors idle."""
    fields = lambda batch, length, heads, cu_seqlens=None: delta_records.choose_fields(
        batch * heads, length, cu_seqlens is not None, 132
    )
    assert fields(8, 2048, 32) == fields(1, 32768, 128) == fields(1, 32768, 32, 0) == delta_records.ONE_WALK
    assert fields(1, 32768, 32) == fields(2, 512, 32) == delta_records.SEGMENTED
    assert fields(1, 256, 32) == delta_records.ONE_WALK and fields(1, 32768, 16) == delta_records.SEGMENTED
    assert delta_records.gains_record(32, 132) and not delta_records.gains_record(16, 132)
    monkeypatch.setattr(delta_records, "_processors", lambda _: 4)
    v = np.zeros((1, 512, 2, 16), bf16)
    assert delta_records.choose_record("states", v, v, None, None, "bshd", None) == ""
    assert delta_records.choose_record("states", v, v, None, np.zeros(3), "bshd", None) == delta_records.ONE_WALK


@pytest.mark.release
def test_records_as_compiled(as_compiled):
    """The PTX of the pass with outputs stores what its meaning does."""
    args = delta_case(65, "token", heads=1)
    (*want, record), _ = with_record(OnInterpreter(), args)
    as_compiled("sm_90a")
    (*actual, compiled), _ = with_record(OnInterpreter(), args)
    for x, y in zip((*actual, *compiled[:4]), (*want, *record[:4]), strict=True):
        assert relative_rms(x, y) < 0.004


def test_records_of_arrays_that_are_not_aligned():
    """Forward copies them; gradients compute what they need by kernels that take them."""
    args = delta_case(66, "token", heads=1)
    wide = np.zeros((1, 66, 1, 20), bf16)
    wide[..., :16] = args["v"]
    args["v"] = wide[..., :16]
    (out, _, record), stored = with_record(OnInterpreter(), args)
    (want, _, _), _ = with_record(OnInterpreter(), args | {"v": args["v"].copy()})
    np.testing.assert_array_equal(out, want)
    for x, y in zip(attention.delta_rule_backward(**stored), attention.delta_rule_backward(**args), strict=True):
        np.testing.assert_array_equal(x, y)


def test_where_there_are_no_records():
    def forward(args, **options):
        inputs = {name: x for name, x in args.items() if name not in ("dout", "dstate")}
        return attention.delta_rule(**inputs, return_chunk_states=True, **options)

    with pytest.raises(ValueError, match="^return_chunk_states: takes Dk up to 128 and Dv up to 128: q.shape="):
        forward(delta_case(5, value_dim=144))
    with pytest.raises(ValueError, match="^return_chunk_states: needs a Hopper GPU"):
        forward(delta_case(5), family="sm_80")
    with pytest.raises(NotImplementedError, match="^return_chunk_states: takes decays and beta, not what a layer projects"):
        forward(delta_case(5), qk_l2norm=True)
    with pytest.raises(ValueError, match="^memory: must be one of"):
        forward(delta_case(5), memory="none")
    with pytest.raises(TypeError, match="^cu_seqlens: must be an array"):
        forward(delta_case(5), cu_seqlens=[0, 5])
    with pytest.raises(TypeError, match="^chunk_states: must be what delta_rule"):
        attention.delta_rule_backward(**delta_case(5), chunk_states=np.zeros(3))
    (*_, record), stored = with_record(OnInterpreter(), delta_case(5))
    with pytest.raises(ValueError, match="^chunk_solutions: chunk must be 128"):
        attention.delta_rule_backward(**stored | {"chunk_states": record._replace(solutions=record.solutions[..., :64, :])})
    with pytest.raises(ValueError, match="^chunk_states: lacks scores, queries, read_keys, .*: decay must have as many axes"):
        attention.delta_rule_backward(**delta_case(5, "channel") | {"chunk_states": stored["chunk_states"]})


# ---- beta, keys and gates -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("beta", "decay"), [(0.0, "token"), (1.0, "none"), (2.0, "token")])
def test_equal_betas(place, kernels, beta, decay):
    """0 writes nothing, and has a gradient; 1 replaces what a key has; 2 reflects. (Hopper's kernels divide by beta, and take
    LEAST_BETA for 0.)"""
    args = delta_case(70, decay, heads=1)
    args["beta"][:, 1:] = beta
    actual = check(place, args)
    if not beta:
        dv = np.abs(actual["dv"].astype(float))
        assert dv[:, 1:].max() < 2**-36 * dv[:, 0].max() and actual["dbeta"].all()


@pytest.mark.parametrize(("beta", "limit"), [(1.0, 0.01), (2.0, 0.05)])
def test_equal_keys(place, kernels, beta, limit):
    """Each token writes to what the one before it has written. In chunks, terms of dP that are rounded cancel."""
    args = delta_case(70, "none", heads=1)
    args["k"][:] = args["k"][:, :1]
    args["beta"][:] = beta
    actual, want = run(place, args), reference.linear_backward(**args)
    for name, x in actual.items():
        assert relative_rms(x, want[name]) < (0.005 if kernels == "tokens" else limit), name


@pytest.mark.parametrize("gate", [0.0, -5.0, -np.inf])
def test_equal_gates(place, kernels, gate):
    """Without decay; where all but the nearest tokens are forgotten; and where all are, so that keys have no gradient from what
    they read."""
    args = delta_case(70, "token", heads=1)
    args["decay"][:] = gate
    actual = check(place, args)
    if gate < -100:
        assert not actual["ddecay"].any() and not actual["dinitial_state"].any()


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_gates_that_forget_everything(place, decay):
    """Some are -inf or -1e4, others 0: everything is finite, and the gradient of such a gate is 0."""
    args = delta_case(70, decay, heads=1)
    draw = np.random.default_rng(2).random(args["decay"].shape)
    args["decay"] = np.where(draw < 0.1, -np.inf, np.where(draw < 0.2, -1e4, np.where(draw < 0.5, 0, -0.1))).astype(f32)
    actual = check(place, args)
    assert (actual["ddecay"][args["decay"] < -100] == 0).all()


def test_errors_of_later_chunks_stay_there(place):
    """A gate of -inf inside a chunk, behind which gradients are a thousand times as large."""
    args = delta_case(128, "token", heads=1)
    args["decay"][:, 40], args["dout"][:, 40:] = -np.inf, args["dout"][:, 40:] * bf16(1024)
    actual, want = run(place, args)["ddecay"], reference.linear_backward(**args)["ddecay"]
    assert relative_rms(actual[:, :40], want[:, :40]) < 0.02 and relative_rms(actual[:, 40:], want[:, 40:]) < 0.02


def test_what_gates_of_zero_change(place):
    """The gradients of a call with gates of 0 are those of a call without, and the decay's is the reverse cumulative sum of
    q . dq - v . dv. Gates of channels that are alike have gradients whose sum is that of the gate of a token."""
    args = delta_case(40, "token", heads=1)
    args["decay"][:] = 0
    args["dstate"][:] = 0
    actual = run(place, args)
    plain = run(place, {name: x for name, x in args.items() if name != "decay"})
    for name, x in plain.items():
        assert relative_rms(actual[name], x) < 0.005, name
    dot = lambda x, dx: (args[x].astype(float) * actual[dx].astype(float)).sum(-1)
    assert relative_rms((dot("q", "dq") - dot("v", "dv"))[:, ::-1].cumsum(1)[:, ::-1], actual["ddecay"]) < 0.03
    by_channel = run(place, args | {"decay": np.zeros((*args["decay"].shape, 16), f32)})
    assert relative_rms(by_channel["ddecay"].sum(-1), actual["ddecay"]) < 0.01


# ---- arguments -------------------------------------------------------------------------------------------------------
def test_outputs_and_options():
    """Arrays to write to are written and returned; what is not wanted, or there is nothing for, is left out."""
    args = delta_case(20, "token")
    into = {"d" + name: np.full_like(args[name], np.nan) for name in ("q", "k", "v", "beta", "decay", "initial_state")}
    expected, actual = attention.delta_rule_backward(**args), attention.delta_rule_backward(**args, **into)
    for x, y, z in zip(expected, actual, into.values(), strict=True):
        np.testing.assert_array_equal(x, y)
        assert y is z
    assert len(attention.delta_rule_backward(**args, ddecay=False, dinitial_state=False)) == 4
    start = args.pop("initial_state")
    *_, first = attention.delta_rule_backward(**args, dinitial_state=True)
    from_zero = attention.delta_rule_backward(**args, initial_state=0 * start)
    np.testing.assert_array_equal(first, from_zero[-1])
    del args["dstate"]
    plain, zeros = (attention.delta_rule_backward(**args | more) for more in ({}, {"dstate": 0 * start}))
    for x, y in zip(plain, zeros, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("decay", "layout", "gap"), [("head", "bhsd", 0), ("channel", "bshd", 3)])
def test_accumulation(place, decay, layout, gap):
    """Gradients are added to float32 arrays of any strides, which may be those of a larger one."""
    args = delta_case(20, decay, key_heads=1)
    want = {name: x.astype(f32) for name, x in run(place, args).items()}
    if layout == "bhsd":
        args, want = (
            {name: x.swapaxes(1, 2).copy() if x.ndim > 2 and "state" not in name else x for name, x in table.items()}
            for table in (args, want)
        )
    into = {name: place.put(np.ones((*x.shape[:-1], x.shape[-1] + gap), f32))[..., gap:] for name, x in want.items()}
    arrays = {name: place.put(x) for name, x in args.items()}
    actual = attention.delta_rule_backward(**arrays, **into, layout=layout, accumulate=True)
    for (name, x), y in zip(want.items(), actual, strict=True):
        assert y is into[name] and relative_rms(place.get(y) - 1, x) < 0.002, name


def test_what_accumulates():
    """Only what is wanted, with or without tokens; all of that must be arrays."""
    args = delta_case(20, "none")
    into = {"d" + name: np.ones(args[name].shape, f32) for name in ("q", "k", "v", "beta")}
    assert len(attention.delta_rule_backward(**args, **into, dinitial_state=False, accumulate=True)) == 4
    with pytest.raises(TypeError, match="^dinitial_state: must be a float32 array with accumulate=True"):
        attention.delta_rule_backward(**args, **into, accumulate=True)
    with pytest.raises(TypeError, match="^dq: dtype must be one of .'float32',.*"):
        attention.delta_rule_backward(**args, **into | {"dq": args["q"]}, dinitial_state=False, accumulate=True)
    args = delta_case(0, "none")
    into = {"d" + name: np.ones(args[name].shape, f32) for name in ("q", "k", "v", "beta", "initial_state")}
    attention.delta_rule_backward(**args, **into, accumulate=True)
    np.testing.assert_array_equal(into["dinitial_state"], args["dstate"] + f32(1))


@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
def test_no_sequences(decay):
    """No gradient has elements but that of gates of heads, a sum of nothing."""
    args = {name: x if name == "decay" and decay == "head" else x[:0].copy() for name, x in delta_case(3, decay).items()}
    for name, x in run(OnInterpreter(), args).items():
        assert x.shape == args[name[1:]].shape and not x.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay": None, "ddecay": True}, "ddecay: must be None where there is no decay: ddecay=True"),
        ({"decay": None, "ddecay": np.zeros((2, 3), f32)}, "where there is no decay: ddecay.shape=(2, 3)"),
        ({"dstate": np.zeros((1, 2, 16, 17), f32)}, "dstate: value_dim must equal"),
        ({"dout": None}, "dout: must be an array"),
        ({"beta": None}, "beta: must be an array"),
        ({"dbeta": np.zeros((1, 5, 2), np.float16)}, "dbeta: dtype must be"),
        ({"family": "sm_70"}, "family: must be None or one of"),
    ],
)
def test_errors(change, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        attention.delta_rule_backward(**delta_case(5) | change)
    assert message in str(raised.value)
