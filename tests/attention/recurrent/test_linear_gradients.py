"""attention.linear_backward against the reference's gradients, whose own derivatives test_recurrence_gradients.py checks."""

import functools

import numpy as np
import pytest
from gradient_cases import bf16, case, check, check_heads_first, check_packed, f32, relative_rms, run
from places import OnInterpreter
from poison import as_on_a_device, poison_new_memory

import attention
from attention import reference
from attention.plans.recurrent import recurrent_chunks, recurrent_gradients, shared_heads_gradients, token_loop_gradients
from attention.public import linear_family, linear_gradients

FAMILIES = "sm_90", "sm_80"
every_family = pytest.mark.parametrize("family", FAMILIES)


LENGTHS = [(1, "token", "sm_90"), (1, "none", "sm_80"), (63, "head", "sm_80"), (64, "token", "sm_90"), (65, "none", "sm_90")]
LENGTHS += [(65, "token", "sm_80"), (130, "head", "sm_90"), (130, "head", "sm_80")]


@pytest.mark.parametrize(("length", "decay", "family"), LENGTHS)
def test_lengths(place, length, decay, family):
    check(place, case(length, decay), family=family)


SIZES = [(128, 80, "token", "sm_90"), (128, 80, "token", "sm_80"), (48, 256, "head", "sm_90"), (256, 16, "none", "sm_90")]
SIZES += [(256, 16, "none", "sm_80")]


@pytest.mark.parametrize(("key_dim", "value_dim", "decay", "family"), SIZES)
def test_sizes(place, key_dim, value_dim, decay, family):
    """Blocks of columns that are not full; two consumers, or two warpgroups with half of the channels each."""
    check(place, case(66, decay, key_dim=key_dim, value_dim=value_dim, heads=1), family=family)


@pytest.mark.parametrize(("family", "decay", "gates"), [("sm_80", "token", bf16), ("sm_90", "head", f32)])
def test_value_heads_that_share_keys(place, family, decay, gates):
    """They add to the gradients of queries and keys; each has a gradient of its gates."""
    args = case(20, decay, batch=1 + (gates is bf16), heads=2, key_heads=1, key_dim=80, gates=gates)
    check_heads_first(place, args, family=family)


@pytest.mark.parametrize(("scale", "family"), [(0.0, "sm_90"), (-0.3, "sm_80"), (7.0, "sm_90")])
def test_any_scale(place, scale, family):
    check(place, case(65, "token", key_heads=2), scale=scale, family=family)


@every_family
def test_float16(place, family):
    check(place, case(65, "token", dtype=np.float16), family=family)


PACKED = [("sm_90", "token", 2), ("sm_80", "token", 1), ("sm_90", "head", 1), (None, "channel", 1)]


@pytest.mark.parametrize("family, decay, heads", PACKED)
def test_packed_sequences_among_poison(place, monkeypatch, family, decay, heads):
    """A sequence with a token more than a chunk, and one of a token, next to poison: each has the gradients that it has by
    itself. Padding has gradients of 0; one without tokens passes the gradient of its state on."""
    check_packed(place, monkeypatch, case, decay, heads, family=family)


def test_packed_sequences_of_wide_values_that_share_keys(place, monkeypatch):
    """Values and their gradients of more than 128 columns have tails of their own, too."""
    check_packed(place, monkeypatch, functools.partial(case, value_dim=144), "token")


@pytest.fixture
def by_chunks(monkeypatch, nothing_known):
    """The token loop is refused."""
    monkeypatch.setattr(token_loop_gradients, "plan_token_loop_gradients", lambda *_: pytest.fail("token by token"))


WIDE = [("sm_80", "token", 2, 208), ("sm_80", "head", 1, 144), ("sm_90", "token", 1, 144)]


@pytest.mark.parametrize(("family", "decay", "key_heads", "value_dim"), WIDE)
def test_gates_of_wide_values(place, by_chunks, family, decay, key_heads, value_dim):
    """Of values that are more columns than a kernel takes, packed on Hopper: the columns are those of two heads."""
    args = case(66, decay, heads=2, key_heads=key_heads, value_dim=value_dim, gates=bf16)
    if family == "sm_90":
        states = {name: np.repeat(args[name], 2, axis=0) for name in ("initial_state", "dstate")}
        args |= states | {"cu_seqlens": np.array([0, 65, 66], np.int32)}
    check(place, args, family=family)


def test_wide_values_of_heads_first(place, by_chunks):
    """Strides of heads with which parts are no views: values and their gradients are copied, and have the same bits."""
    check_heads_first(place, case(20, "token", batch=2, heads=2, key_heads=1, value_dim=144), family="sm_80")


def test_accumulation_of_wide_values(place, by_chunks):
    """Gradients of value heads in float32 are summed over the parts of their columns."""
    args = case(20, "token", batch=2, heads=2, key_heads=1, value_dim=144)
    want = run(place, args, family="sm_80")
    into = {name: place.put(np.ones(x.shape, f32)) for name, x in want.items()}
    attention.linear_backward(**{n: place.put(x) for n, x in args.items()}, **into, accumulate=True, family="sm_80")
    for name, x in want.items():
        assert relative_rms(place.get(into[name]) - 1, x) < 0.004, name


@pytest.mark.parametrize(("decay", "dtype"), [("none", bf16), ("token", np.float16)])
def test_more_heads_that_share_keys_than_stages(place, monkeypatch, nothing_known, decay, dtype):
    """In one thread block, which loads tiles again: without decays no tile is handed over, whose fence would do for loads."""
    for name in "choose_shares", "choose_parts":
        monkeypatch.setattr(shared_heads_gradients, name, lambda *_: 1)
    check(place, case(66, decay, heads=4, key_heads=1, dtype=dtype), family="sm_90")


def test_float32_gradients_of_packed_sequences_and_padding(monkeypatch):
    """Gradients that are added to sums are float32, and lie in memory that was poison. Padding adds nothing, and no sequence to
    the rows of the next one."""
    as_on_a_device(monkeypatch), poison_new_memory(monkeypatch)
    args = case(100, "token", heads=1, key_heads=1)
    args |= {name: np.repeat(args[name], 2, axis=0) for name in ("initial_state", "dstate")}
    args["cu_seqlens"] = np.array([0, 30, 96])
    used = {name: x[:, :96] if x.ndim > 2 and "state" not in name else x for name, x in args.items()}
    into = {"d" + name: np.ones(args[name].shape, f32) for name in ("q", "k", "v", "decay", "initial_state")}
    attention.linear_backward(**args, **into, accumulate=True)
    want = reference.linear_backward(**used)
    for name, x in into.items():
        if name != "dinitial_state":
            assert (x[:, 96:] == 1).all(), name
            x = x[:, :96]
        assert relative_rms(x - 1, want[name]) < 0.006, name


def test_packed_heads_that_share_no_keys(place):
    """dQ and dK are rounded, but not stored by TMA, whose stores would fence what was read before."""
    args = case(70, heads=1)
    states = {name: np.repeat(args[name], 2, axis=0) for name in ("initial_state", "dstate")}
    check(place, args | states | {"cu_seqlens": np.array([0, 69, 70], np.int32)}, family="sm_90")


@pytest.mark.release  # the same kernels as in test_mamba2_gradients.py
def test_as_compiled(as_compiled):
    """The PTX of Hopper's kernels, for two chunks of which one is shorter."""
    as_compiled("sm_90a")
    check(OnInterpreter(), case(66, heads=1))


@pytest.mark.parametrize(
    ("family", "decay", "segments", "key_heads"),
    [
        ("sm_90", "token", 3, 2),
        ("sm_80", "none", 5, 1),
        ("sm_90", "head", 5, 1),
        ("sm_90", "none", 3, 2),
        ("sm_90", "none", 5, 1),
    ],
)
def test_segments(place, monkeypatch, nothing_known, family, decay, segments, key_heads):
    """Of which the last in memory, the first of reversed scans, has a shorter chunk, and states are composed by the last pass
    or before it. Each chunk has a state of its own, whose product with its gradient gates' gradients need."""
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: segments)
    check(place, case(64 * segments - 30, decay, key_dim=16, value_dim=32, key_heads=key_heads), family=family)


@pytest.mark.parametrize("segments", [3, 5])
def test_states_of_segments_are_scanned_once_for_keys_and_values(monkeypatch, nothing_known, segments):
    """Those of dK's scan are dV's, transposed."""
    launch, results = recurrent_gradients.launch_scan, []
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: segments)
    monkeypatch.setattr(
        recurrent_gradients, "launch_scan", lambda *args: results.append(type(args[1].result).__name__) or launch(*args)
    )
    attention.linear_backward(**case(64 * segments, "none", heads=1, key_heads=1), family="sm_90")
    assert results == ["GroupedStates", "QueryGradients", "ScanStates", "KeyGradients", "ScanOutputs"]


# ---- states that forward stored ----------------------------------------------------------------------------------------
def with_states(place, args, **options):
    """The arguments, and the states before chunks that forward returns."""
    inputs = {name: place.put(x) for name, x in args.items() if name not in ("dout", "dstate")}
    *_, states = attention.linear(**inputs, return_chunk_states=True, **options)
    return args | {"chunk_states": place.get(states)}


@pytest.mark.parametrize(
    ("decay", "family", "segments"),
    [("token", "sm_90", 1), ("token", "sm_90", 3), ("head", "sm_90", 2), ("none", "sm_90", 3), ("token", "sm_80", 1)],
)
def test_stored_states(place, monkeypatch, nothing_known, decay, family, segments):
    """Where the walk serves a call in any case, it finds the same states, and computes the same gradients. Without gates' it
    does so with stored states alone."""
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: segments)
    args = case(64 * segments + 30, decay, value_dim=80, heads=1)
    stored = with_states(place, args, family=family)
    assert stored["chunk_states"].shape == (1, segments + 1, 1, 80, 16)
    outputs, want = run(place, stored, family=family), run(place, args, family=family)
    for name, x in want.items():
        if decay != "none":
            np.testing.assert_array_equal(outputs[name], x, err_msg=name)
        assert relative_rms(outputs[name], x) < 0.005, name
    if decay != "none":  # a decay that is a constant, as retention's
        alone = attention.linear_backward(**{name: place.put(x) for name, x in stored.items()}, ddecay=False, family=family)
        for (name, x), y in zip([pair for pair in want.items() if pair[0] != "ddecay"], alone, strict=True):
            assert relative_rms(place.get(y), x) < 0.005, name


def test_stored_states_of_many_chunks(place):
    """Two warps sum up gates of one block of columns, for three chunks in flight."""
    args = case(260, "token", heads=1)
    states = with_states(place, args)["chunk_states"]
    first = {name: x[:, :256] if x.ndim > 2 and "state" not in name else x for name, x in args.items()}
    _, last = reference.linear(**{name: x for name, x in first.items() if name not in ("dout", "dstate")})
    assert relative_rms(states[:, 4], last.swapaxes(2, 3)) < 0.005


@pytest.mark.parametrize("segments", [1, 3])
def test_states_of_segments_that_are_known(place, monkeypatch, nothing_known, segments):
    """The gradients of states before segments by a pass before, as ranks have it: the same bits."""
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: segments)
    args, scale = case(64 * segments - 30, "token", heads=1), np.float32(0.25)  # a power of 2 rounds nothing
    want = check(place, args, family="sm_90", scale=float(scale))
    given = {name: place.put(x) for name, x in args.items()}
    passes = linear_family.segment_states(
        given["q"], given["q"], given["dout"], decay=given["decay"], reverse=True, family="sm_90"
    )
    local_state, total_decay = (place.get(x) for x in passes)
    known = {"local_state": place.put(local_state * scale), "total_decay": place.put(total_decay)}
    results = linear_gradients.gradients_from_segments(**given, **known, scale=float(scale), family="sm_90")
    for x, (name, expected) in zip(map(place.get, results), want.items(), strict=True):
        np.testing.assert_array_equal(x, expected, name)


def test_stored_states_of_packed_sequences(place):
    """Chunks of sequence n that begin at token t have the index t // 64 + n."""
    args = case(150, "token")
    args["cu_seqlens"] = np.array([0, 1, 1, 130, 150])
    for name in ("initial_state", "dstate"):
        args[name] = np.repeat(args[name], 4, axis=0)
    stored = with_states(place, args)
    assert stored["chunk_states"].shape == (1, 6, 2, 16, 16)
    states = args["initial_state"].swapaxes(2, 3)
    for index, sequence in ((0, 0), (2, 2), (5, 3)):
        assert relative_rms(stored["chunk_states"][0, index], states[sequence]) < 0.005
    for (name, x), y in zip(run(place, stored).items(), run(place, args).values(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


def test_stored_states_of_a_part_of_longer_sequences(place):
    """Chunks of batches follow each other in memory: those of the first token alone, of two, do not."""
    args = case(66, "token", batch=2, heads=1)
    states = with_states(place, args)["chunk_states"]
    first = {name: place.put(x[:, :1] if x.ndim > 2 and "state" not in name else x) for name, x in args.items()}
    with pytest.raises(ValueError, match="^chunk_states: batches must follow each other: strides="):
        attention.linear_backward(**first, chunk_states=place.put(states)[:, :1])


def test_what_stores_no_states():
    args = {name: x for name, x in case(5, "channel").items() if name not in ("dout", "dstate")}
    with pytest.raises(ValueError, match="^return_chunk_states: with decays of channels takes Dk above 64: q.shape="):
        attention.linear(**args, return_chunk_states=True)
    args = {name: x for name, x in case(5, "channel", key_dim=80).items() if name not in ("dout", "dstate")}
    with pytest.raises(
        ValueError, match="^return_chunk_states: with decays of channels takes float32 ones: decay.dtype=bfloat16"
    ):
        attention.linear(**args | {"decay": args["decay"].astype(bf16)}, return_chunk_states=True)
    with pytest.raises(ValueError, match="^return_chunk_states: with decays of channels takes arrays that TMA reads"):
        attention.linear(**args, return_chunk_states=True, family="sm_80")
    wide = {name: x for name, x in case(5, "token", key_dim=144).items() if name not in ("dout", "dstate")}
    with pytest.raises(ValueError, match="^return_chunk_states: takes Dk up to 128 and Dv up to 128: q.shape="):
        attention.linear(**wide, return_chunk_states=True)
    with pytest.raises(ValueError, match="^memory: must be one of"):
        attention.linear(**args, memory="none")


# ---- gates -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gate", [0.0, -5.0])
@every_family
def test_equal_gates(place, gate, family):
    """Without decay, and where all but the nearest tokens are forgotten."""
    args = case(130, "token", heads=1)
    args["decay"][:] = gate
    check(place, args, family=family)


@every_family
def test_gates_that_forget_everything(place, family):
    """Some are -inf or -1e4, others 0: everything is finite, and the gradient of such a gate is 0."""
    args = case(130, "token", heads=1)
    draw = np.random.default_rng(2).random(args["decay"].shape)
    args["decay"] = np.where(draw < 0.1, -np.inf, np.where(draw < 0.2, -1e4, np.where(draw < 0.5, 0, -0.1))).astype(f32)
    outputs = check(place, args, family=family)
    assert (outputs["ddecay"][args["decay"] < -100] == 0).all()


@every_family
def test_errors_of_later_chunks_stay_there(place, family):
    """A gate of -inf between two chunks, the second of which has gradients a thousand times as large."""
    args = case(128, "token", heads=1)
    args["decay"][:, 64], args["dout"][:, 64:] = -np.inf, args["dout"][:, 64:] * bf16(1024)
    outputs, want = run(place, args, family=family)["ddecay"], reference.linear_backward(**args)["ddecay"]
    assert relative_rms(outputs[:, :64], want[:, :64]) < 0.02 and relative_rms(outputs[:, 64:], want[:, 64:]) < 0.02


def test_what_gates_of_zero_change(place):
    """The gradients of a call with gates of 0 are those of a call without, and the decay's is the reverse cumulative sum of
    q . dq - v . dv, as it is of q . dq - k . dk."""
    args = case(70, "token", heads=1)
    args["decay"][:] = 0
    args["dstate"][:] = 0
    outputs = run(place, args)
    plain = run(place, {name: x for name, x in args.items() if name != "decay"})
    for name, x in plain.items():
        assert relative_rms(outputs[name], x) < 0.005, name
    dot = lambda x, dx: (args[x].astype(float) * outputs[dx].astype(float)).sum(-1)
    for products in dot("q", "dq") - dot("v", "dv"), dot("q", "dq") - dot("k", "dk"):
        assert relative_rms(products[:, ::-1].cumsum(1)[:, ::-1], outputs["ddecay"]) < 0.03


# ---- arguments -------------------------------------------------------------------------------------------------------
def test_outputs_and_options():
    """Arrays to write to are written and returned; what is not wanted, or there is nothing for, is left out."""
    args = case(20, "token")
    into = {"d" + name: np.full_like(args[name], np.nan) for name in ("q", "k", "v", "decay", "initial_state")}
    expected, outputs = attention.linear_backward(**args), attention.linear_backward(**args, **into)
    for x, y, z in zip(expected, outputs, into.values(), strict=True):
        np.testing.assert_array_equal(x, y)
        assert y is z
    assert len(attention.linear_backward(**args, ddecay=False, dinitial_state=False)) == 3
    start = args.pop("initial_state")
    assert len(attention.linear_backward(**args)) == 4
    *_, first = attention.linear_backward(**args, dinitial_state=True)
    np.testing.assert_array_equal(first, expected[-1])
    del args["dstate"]
    plain, zeros = (attention.linear_backward(**args | more) for more in ({}, {"dstate": 0 * start}))
    for x, y in zip(plain, zeros, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("family", "decay"), [("sm_90", "token"), ("sm_80", "head"), ("sm_90", "none"), (None, "channel")])
def test_accumulation(place, family, decay):
    """Gradients are added to what float32 arrays of any strides hold: those of a call without, unrounded."""
    args = case(20, decay, batch=2, heads=2, key_heads=1, value_dim=32)
    want, rng = run(place, args, family=family), np.random.default_rng(0)
    shapes = {name: x.shape for name, x in want.items()}
    before = {name: rng.standard_normal((*shape[:-1], shape[-1] + 3)).astype(f32) for name, shape in shapes.items()}
    into = {name: place.put(x.copy())[..., 3:] for name, x in before.items()}
    actual = attention.linear_backward(
        **{name: place.put(x) for name, x in args.items()}, **into, accumulate=True, family=family
    )
    for (name, x), y in zip(want.items(), actual, strict=True):
        assert y is into[name]
        outputs = place.get(y) - before[name][..., 3:]
        if name != "dinitial_state":  # on Hopper by another kernel, as heads are not added up before they are rounded
            assert relative_rms(outputs, x) < 0.004, name
        else:
            np.testing.assert_allclose(outputs, x, rtol=1e-5, atol=1e-5 * abs(x).max(), err_msg=name)


def test_what_accumulates():
    """Only what is wanted, with or without tokens; all of that must be arrays."""
    args, rng = case(20, "none"), np.random.default_rng(0)
    into = {"d" + name: rng.standard_normal(args[name].shape).astype(f32) for name in ("q", "k", "v")}
    plain = attention.linear_backward(**args, dinitial_state=False)
    before = {name: x.copy() for name, x in into.items()}
    assert len(attention.linear_backward(**args, **into, dinitial_state=False, accumulate=True)) == 3
    for x, (name, y) in zip(plain, into.items()):
        assert relative_rms(y - before[name], x) < 0.004
    with pytest.raises(TypeError, match="^dinitial_state: must be a float32 array with accumulate=True"):
        attention.linear_backward(**args, **into, accumulate=True)
    with pytest.raises(TypeError, match="^dq: dtype must be one of .'float32',.*"):
        attention.linear_backward(**args, **into | {"dq": plain[0]}, dinitial_state=False, accumulate=True)
    args = case(0, "none")
    into = {"d" + name: np.ones(args[name].shape, f32) for name in ("q", "k", "v", "initial_state")}
    attention.linear_backward(**args, **into, accumulate=True)
    np.testing.assert_array_equal(into["dinitial_state"], args["dstate"] + f32(1))


@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
def test_no_sequences(decay):
    """No gradient has elements but that of gates of heads, a sum of nothing, to which nothing is added."""
    args = {name: x if name == "decay" and decay == "head" else x[:0].copy() for name, x in case(3, decay).items()}
    for name, x in run(OnInterpreter(), args).items():
        assert x.shape == args[name[1:]].shape and not x.any()
    normalized = args | {name: (args[name], args[name][..., 0]) for name in ("initial_state", "dstate")}
    for name, x in zip(
        filter(args.__contains__, ("q", "k", "v", "decay")), attention.linear_backward(**normalized, normalize=True)
    ):
        assert x.shape == args[name].shape and not x.any()
    into = {"d" + name: np.ones(x.shape, f32) for name, x in args.items() if not name.startswith("d")}
    if decay == "head":
        into["ddecay"] = np.ones(2, f32)
        attention.linear_backward(**args, **into, accumulate=True)
        assert (into["ddecay"] == 1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay": None, "ddecay": True}, "ddecay: must be None where there is no decay"),
        ({"dstate": np.zeros((1, 2, 16, 17), f32)}, "dstate: value_dim must equal"),
        ({"dout": None}, "dout: must be an array"),
        ({"dq": np.zeros((1, 5, 1, 16), f32)}, "dq: dtype must be"),
    ],
)
def test_errors(change, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        attention.linear_backward(**case(5) | change)
    assert message in str(raised.value)
