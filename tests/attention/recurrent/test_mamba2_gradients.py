"""attention.mamba2_backward against the reference's gradients, whose own derivatives test_recurrence_gradients.py checks."""

import ml_dtypes
import numpy as np
import pytest
from gradient_cases import relative_rms
from places import OnInterpreter
from poison import Packing, as_on_a_device

import attention
from attention import reference
from attention.kernels.recurrent import gate_sums
from attention.kernels.recurrent import mamba2_gradients as module
from attention.kernels.recurrent.mamba2_gradients import Mamba2GradientInputs, Mamba2GradientOutputs, Mamba2StepGradients
from attention.parts.recurrent.gates import TokenGate
from attention.plans.recurrent import mamba2_gradients as mamba2_plan
from attention.plans.recurrent import recurrent_chunks, shared_heads_gradients
from tiles.targets import parse_target

bf16, f32 = ml_dtypes.bfloat16, np.float32
ALWAYS, OPTIONAL = ("x", "dt", "A", "B", "C"), ("D", "z", "dt_bias", "initial_states")
LIMITS = {"ddt": 0.01, "dinitial_states": 0.005, "dD": 0.01}  # relative errors of float32 results
SUMS = "dA", "ddt_bias"  # of numbers such as ddt, which cancel
every_family = pytest.mark.parametrize("family", ["sm_90", "sm_80"])


def case(length, P=16, N=16, heads=2, groups=1, batch=1, D="head", dtype=bf16, everything=True):
    """The arguments of mamba2_backward; with everything those that may be left out, too."""
    rng = np.random.default_rng(length)
    x, dout, z = rng.standard_normal((3, batch, length, heads, P)).astype(dtype)
    B, C = (rng.standard_normal((2, batch, length, groups, N)) / N**0.25).astype(dtype)
    args = {"dout": dout, "x": x, "dt": rng.standard_normal((batch, length, heads)).astype(f32)}
    args |= {"A": -rng.uniform(0.2, 1, heads).astype(f32), "B": B, "C": C}
    args["dstates"] = rng.standard_normal((batch, heads, P, N)).astype(f32)
    if everything:
        args |= {"D": rng.standard_normal((heads, P) if D == "column" else heads).astype(f32), "z": z}
        args |= {"dt_bias": rng.standard_normal(heads).astype(f32)}
        args["initial_states"] = rng.standard_normal((batch, heads, P, N)).astype(f32)
    return args


def run(place, args, **options):
    """attention.mamba2_backward's gradients by name, in NumPy arrays."""
    results = attention.mamba2_backward(**{name: place.put(x) for name, x in args.items()}, **options)
    names = ["d" + name for name in (*ALWAYS, *(name for name in OPTIONAL if name in args))]
    return dict(zip(names, map(place.get, results), strict=True))


def compare(got, args, **options):
    """Compare gradients with the reference's."""
    want, low = (reference.mamba2_backward(**args, **options, low=low) for low in (False, True))
    of_sums = np.sqrt(np.square(want["ddt"]).sum((0, 1))).max()  # of terms of any sign
    for name, x in got.items():
        assert x.shape == want[name].shape and (x.dtype == f32) == (name in LIMITS or name in SUMS), name
        if name in SUMS:
            np.testing.assert_allclose(x, want[name], rtol=0.01, atol=0.02 * of_sums, err_msg=name)
        elif name not in LIMITS:
            reference.assert_close(x, want[name], low[name], factor=3, name=name)
        elif abs(want[name]).max() < 1e-30:
            assert not x.any(), name
        else:
            assert relative_rms(x, want[name]) <= LIMITS[name], name


def check(place, args, family=None, **options):
    """Compare all gradients with the reference's, and return them."""
    got = run(place, args, family=family, **options)
    compare(got, args, **options)
    return got


@pytest.mark.parametrize(("groups", "D"), [(1, "column"), (2, "head")])
def test_accumulation(place, groups, D):
    """Gradients are added to float32 arrays: by the kernel of shared heads, and by those around linear attention's. Of no
    tokens nothing is added."""
    args = case(20, groups=groups, D=D)
    want = {name: x.astype(f32) for name, x in run(place, args, dt_softplus=True).items()}
    into = {name: place.put(np.ones(x.shape, f32)) for name, x in want.items()}
    arrays = {name: place.put(x) for name, x in args.items()}
    actual = attention.mamba2_backward(**arrays, **into, dt_softplus=True, accumulate=True)
    for (name, x), y in zip(want.items(), actual, strict=True):
        assert y is into[name] and relative_rms(place.get(y) - 1, x) < 0.002, name
    no_tokens = {name: x[:, :0] if x.ndim > 2 and "state" not in name else x for name, x in arrays.items() if name != "dstates"}
    before = place.get(into["dA"]).copy()
    into |= {name: x[:, :0] if x.ndim > 2 and "state" not in name else x for name, x in into.items()}
    attention.mamba2_backward(**no_tokens, **into, accumulate=True)
    np.testing.assert_array_equal(place.get(into["dA"]), before)
    with pytest.raises(TypeError, match="^dD: must be a float32 array with accumulate=True"):
        attention.mamba2_backward(**arrays, **into | {"dD": None}, accumulate=True)


LENGTHS = [(1, "sm_90"), (1, "sm_80"), (63, "sm_80"), (64, "sm_90"), (65, "sm_80"), (130, "sm_90"), (130, "sm_80")]


@pytest.mark.parametrize(("length", "family"), LENGTHS)
def test_lengths(place, length, family):
    check(place, case(length), family=family, dt_softplus=True)


@pytest.mark.parametrize(
    ("P", "N", "heads", "groups", "batch", "D", "family"),
    [
        (48, 128, 2, 1, 2, "column", "sm_90"),
        (48, 128, 2, 1, 1, "column", "sm_80"),
        (128, 32, 2, 2, 1, "head", "sm_80"),
        (80, 256, 1, 1, 1, "column", "sm_90"),
    ],
)
def test_sizes(place, P, N, heads, groups, batch, D, family):
    """Blocks of columns that are not full; heads that share B and C, and heads that do not; several batches."""
    check(place, case(66, P, N, heads, groups, batch, D), family=family, dt_softplus=True)


def test_columns_of_x_beyond_chunk_kernels(place):
    """As heads of half as many, on Ampere."""
    check(place, case(20, P=144), family="sm_80")


@every_family
def test_float16(place, family):
    check(place, case(65, dtype=np.float16), family=family, dt_softplus=True)


@every_family
def test_without_what_may_be_left_out(place, family):
    """And without softplus: half of the steps are negative, and have no gradient; one is 0, and has one."""
    args = case(70, everything=False)
    args["dt"][0, 3] = 0
    got = check(place, args, family=family)
    assert (got["ddt"][args["dt"] < 0] == 0).all() and (got["ddt"][args["dt"] >= 0] != 0).all()


@pytest.mark.parametrize("softplus", [False, True])
def test_limits_of_steps(place, softplus):
    """Beyond a limit a step has no gradient."""
    args = case(70)
    got = check(place, args, dt_softplus=softplus, dt_limit=(0.4, 0.9))
    raw = args["dt"] + args["dt_bias"]
    dt = np.logaddexp(raw, 0) if softplus else raw
    assert ((got["ddt"] == 0) == ((dt < 0.4) | (dt > 0.9))).all() and (got["ddt"] != 0).any()


@pytest.mark.parametrize(
    ("rate", "family", "heads"),
    [(0.0, "sm_90", 1), (-5.0, "sm_90", 2), (-5.0, "sm_80", 1), (-1000.0, "sm_90", 2), (-1000.0, "sm_80", 1)],
)
def test_rates(place, rate, family, heads):
    """No decay; all but the nearest tokens are forgotten; everything is, with gates that count as -inf."""
    args = case(130, heads=heads)
    args["A"][:] = rate
    args["dt"] = abs(args["dt"]) + f32(0.5)
    del args["dt_bias"]
    got = check(place, args, family=family)
    assert got["dA"].any() == (rate != -1000)


@pytest.mark.parametrize(("family", "heads", "neighbour"), [("sm_90", 1, 0), ("sm_90", 2, 2), ("sm_80", 1, 2)])
def test_packed_sequences_among_poison(place, monkeypatch, family, heads, neighbour):
    """A sequence with a token more than a chunk, and one of a token, next to poison: each has the gradients that it has by
    itself. Padding has gradients of 0, and adds nothing to sums; a sequence without tokens passes the gradient of its state
    on."""
    as_on_a_device(monkeypatch)
    packing = Packing([0, 65, 1], neighbour=neighbour, nobodys=66)
    args = case(int(packing.cu_seqlens[-1]), heads=heads)
    of_tokens = {name: x for name, x in args.items() if name in ("dout", "x", "dt", "B", "C", "z")}
    states = {name: np.repeat(args[name], len(packing.cu_seqlens) - 1, axis=0) for name in ("initial_states", "dstates")}
    spread = {name: packing.spread(x) for name, x in of_tokens.items()} | {"cu_seqlens": packing.ends}
    for name, x in states.items():
        spread[name] = np.full((len(packing.ends) - 1, *x.shape[1:]), np.nan if neighbour else 1, f32)
        spread[name][packing.which] = x
    alone = check(place, args | states | {"cu_seqlens": packing.cu_seqlens}, family=family, dt_softplus=True)
    got = run(place, args | spread, family=family, dt_softplus=True)
    np.testing.assert_array_equal(alone["dinitial_states"][0], args["dstates"][0])
    for name, x in alone.items():
        if name[1:] in of_tokens:
            np.testing.assert_array_equal(packing.gather(got[name].astype(f32)), x.astype(f32), name)
            assert (got[name][:, packing.nobodys] == 0).all(), name
        elif name == "dinitial_states":
            np.testing.assert_array_equal(got[name][packing.which], x)
        elif not neighbour:  # chunks are added in another order
            np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.release
@pytest.mark.parametrize(("length", "heads", "D"), [(66, 1, "column"), (20, 2, "head")])
def test_as_compiled(as_compiled, length, heads, D):
    """The PTX of Hopper's kernels: for two chunks of which one is shorter; for heads that share B and C."""
    as_compiled("sm_90a")
    check(OnInterpreter(), case(length, heads=heads, D=D), dt_softplus=True)


@pytest.mark.parametrize("heads", [pytest.param(1, marks=pytest.mark.release), 2])
def test_packed_sequences_as_compiled(as_compiled, heads):
    """Results that a warp of the producer stores row by row: no lane may still read a tile that another one releases."""
    as_compiled("sm_90a")
    args = case(68, heads=heads, D="head")
    for name in ("initial_states", "dstates"):
        args[name] = np.repeat(args[name], 2, axis=0)
    check(OnInterpreter(), args | {"cu_seqlens": np.array([0, 3, 68], np.int32)}, dt_softplus=True)


# ---- heads that share B and C, on Hopper ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("length", "sizes", "shares"),
    [
        (66, {"heads": 3, "P": 80, "D": "column"}, 2),
        (63, {"heads": 8, "groups": 2, "batch": 2, "dtype": np.float16}, 4),
        (20, {"heads": 4, "dtype": np.float16}, 1),
    ],
)
def test_heads_that_share(place, monkeypatch, nothing_known, length, sizes, shares):
    """Two chunks one after the other in a thread block, of heads with two blocks of columns, of which a share has one less;
    shares of a head each; more heads in a thread block than stages, whose tiles are loaded over those that were read."""
    monkeypatch.setattr(shared_heads_gradients, "choose_shares", lambda *_: shares)
    monkeypatch.setattr(shared_heads_gradients, "choose_parts", lambda *_: 1)
    check(place, case(length, **sizes), dt_softplus=True)


@pytest.mark.parametrize("work", [(1, 1, 1, 3), (8, 32, 64, 132), (64, 32, 8, 132), (1, 512, 64, 132), (1, 3, 5, 132)])
def test_shares_of_thread_blocks(work):
    """No share of the heads is empty, and no GPU waits for a block that has more than its part of the work."""
    shares = shared_heads_gradients.choose_shares(*work)
    parts = shared_heads_gradients.choose_parts(shares, *work)
    total = shared_heads_gradients.BlockWork(*work)
    assert (shares - 1) * -(-total.blocks // shares) < total.blocks and 1 <= parts <= total.chunks
    assert total.time(parts, shares) <= total.time(1, 1)


@pytest.mark.parametrize(
    ("work", "ahead"), [((128, 32, 4, 132), True), ((8, 32, 64, 132), False), ((128, 32, 4, 132, False), False)]
)
def test_blocks_of_several_chunks(work, ahead):
    """Thread blocks go through several chunks where few heads share keys, whose Q and K they load ahead, but not if sequences
    are packed."""
    parts = shared_heads_gradients.choose_parts(1, *work)
    assert shared_heads_gradients.loads_keys_ahead(parts, *work) == ahead == (parts < work[1])


@pytest.mark.parametrize(("dtype", "again"), [(bf16, False), (np.float16, True)])
def test_dz_needs_no_forward(monkeypatch, nothing_known, dtype, again):
    """The kernel of shared heads has y where it computes q . dq. In float16 all of its chunks are strong, and it reads dy."""
    calls = []
    launches = mamba2_plan._plan_outputs
    monkeypatch.setattr(mamba2_plan, "_plan_outputs", lambda *args: calls.append(args) or launches(*args))
    attention.mamba2_backward(**case(5, dtype=dtype))
    assert bool(calls) == again


@pytest.mark.parametrize(("segments", "groups"), [(3, 2), (5, 1)])
def test_segments(place, monkeypatch, nothing_known, segments, groups):
    """Of which the last has a shorter chunk; states are composed by the last pass or before it."""
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: segments)
    check(place, case(64 * segments - 30, P=32, groups=groups), dt_softplus=True)


def test_strong_chunks_beside_others(place):
    """In one thread block: heads whose decays are factors of dO and V, and a head whose decays no number holds."""
    args = case(70, heads=4, N=64)
    args["A"][:] = -0.01, -30, -1, 0
    check(place, args, dt_softplus=True)


# ---- states that forward stored ------------------------------------------------------------------------------------------
def with_states(place, args, **options):
    """The arguments, and the states before chunks that forward returns."""
    inputs = {name: place.put(x) for name, x in args.items() if name not in ("dout", "dstates")}
    *_, states = attention.mamba2(**inputs, return_chunk_states=True, **options)
    return args | {"chunk_states": place.get(states)}


@pytest.mark.parametrize(("groups", "family", "segments"), [(1, "sm_90", 1), (1, "sm_90", 2), (2, "sm_90", 1), (1, "sm_80", 1)])
def test_stored_states(place, monkeypatch, nothing_known, groups, family, segments):
    """Of heads that share B and C, and of others. Where no kernel reads them they change nothing."""
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: segments)
    args = case(100, P=48, groups=groups)
    stored = with_states(place, args, family=family, dt_softplus=True)
    assert stored["chunk_states"].shape == (1, 2, 2, 48, 16)
    got, want = (run(place, x, family=family, dt_softplus=True) for x in (stored, args))
    compare(got, args, dt_softplus=True)
    for name, x in want.items():
        if family == "sm_80":
            np.testing.assert_array_equal(got[name], x, err_msg=name)
    if family == "sm_90":
        stored["chunk_states"] *= 0
        assert abs(run(place, stored, family=family, dt_softplus=True)["dC"] - got["dC"].astype(f32)).max() > 0.1


def test_stored_states_of_packed_sequences(place):
    """Chunks of sequence n that begin at token t have the index t // 64 + n."""
    args = case(100) | {"cu_seqlens": np.array([0, 1, 1, 70, 100])}
    for name in ("initial_states", "dstates"):
        args[name] = np.repeat(args[name], 4, axis=0)
    stored = with_states(place, args, dt_softplus=True)
    assert stored["chunk_states"].shape == (1, 5, 2, 16, 16)
    for index, sequence in ((0, 0), (2, 2), (4, 3)):
        assert relative_rms(stored["chunk_states"][0, index], args["initial_states"][sequence]) < 0.005
    compare(run(place, stored, dt_softplus=True), args, dt_softplus=True)


def test_space():
    """All dtypes, gates and results are compiled by `inspect --all`, the largest always."""
    few, many = (list(module.space(parse_target("sm_90a"), everything)) for everything in (False, True))
    before, after = ([x for x in many if isinstance(x, kind)] for kind in (Mamba2GradientInputs, Mamba2GradientOutputs))
    of_z = lambda config: config.has_dz if config in after else config.has_z
    limits = {(0.0, np.inf, False), (0.0, np.inf, True), (0.001, 0.1, True)}
    for configs in after, before:
        gates = {(config.dtype, config.gate.low, config.gate.high, config.gate.softplus, of_z(config)) for config in configs}
        assert gates == {(of, *gate, z) for of in (module.bf16, module.fp16) for gate in limits for z in (False, True)}
    assert {(config.skip, config.varlen) for config in after} == {(s, v) for s in module.SKIPS for v in (False, True)}
    assert set(few) < set(many) and len(few) == 7
    large = [config for config in few if config in after or config in before]
    assert all(config.dtype is module.bf16 and config.gate.has_limits and of_z(config) for config in large)
    assert {(config.skip, config.varlen) for config in large if config in after} == {("head", True), ("column", True)}


def test_space_of_sums():
    """Of the gates of tokens, and of all steps for which gradients are compiled."""
    target = parse_target("sm_90a")
    gates = {(config.gate, config.varlen) for config in gate_sums.space(target, True)}
    steps = {config.gate for config in module.space(target, True) if isinstance(config, Mamba2StepGradients)}
    assert gates == {(gate, varlen) for gate in (TokenGate(scale_at_end=True), *steps) for varlen in (False, True)}


# ---- arguments -------------------------------------------------------------------------------------------------------
def test_outputs_and_options():
    """Arrays to write to are written and returned; what is not wanted, or there is nothing for, is left out."""
    args = case(20, D="column")
    into = {"d" + name: np.full_like(args[name], np.nan) for name in (*ALWAYS, *OPTIONAL)}
    expected, got = attention.mamba2_backward(**args), attention.mamba2_backward(**args, **into)
    for x, y, z in zip(expected, got, into.values(), strict=True):
        np.testing.assert_array_equal(x, y)
        assert y is z
    unwanted = attention.mamba2_backward(**args, **{"d" + name: False for name in OPTIONAL})
    for x, y in zip(unwanted, expected[: len(ALWAYS)], strict=True):
        np.testing.assert_array_equal(x, y)
    start = args.pop("initial_states")
    assert len(attention.mamba2_backward(**args)) == 8
    *_, first = attention.mamba2_backward(**args, dinitial_states=True)
    assert first.shape == start.shape and np.isfinite(first).all()
    del args["dstates"]
    plain, zeros = (attention.mamba2_backward(**args | more) for more in ({}, {"dstates": 0 * start}))
    for x, y in zip(plain, zeros, strict=True):
        np.testing.assert_array_equal(x, y)


def test_no_token():
    """Sums over tokens are 0 where there are none."""
    args = case(0)
    with pytest.raises(ValueError, match=r"^x: must have a token, for dstates: x.shape=\(1, 0, 2, 16\)"):
        attention.mamba2_backward(**args)
    del args["dstates"]
    results = attention.mamba2_backward(**args)
    assert [x.shape for x in results[2:6]] == [(2,), (1, 0, 1, 16), (1, 0, 1, 16), (2,)]
    assert not any(x.any() for x in results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": None, "dz": True}, "dz: must be None where there is no z"),
        ({"D": None, "dD": np.zeros(2, f32)}, "dD: must be None where there is no D"),
        ({"dstates": np.zeros((1, 2, 16, 17), f32)}, "dstates: d_state must equal"),
        ({"dout": None}, "dout: must be an array"),
        ({"dA": np.zeros(2, bf16)}, "dA: dtype must be"),
        ({"dt_softplus": 1}, "dt_softplus: must be a bool"),
        ({"chunk_states": np.zeros((1, 2, 2, 16, 16), bf16)}, "chunk_states: chunks must be 1: chunk_states.shape="),
    ],
)
def test_errors(change, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        attention.mamba2_backward(**case(5) | change)
    assert message in str(raised.value)


def test_errors_of_stored_states():
    """Of mamba2, where nothing reads them, and of values that mean nothing."""
    args = {name: x for name, x in case(5, everything=False).items() if name not in ("dout", "dstates")}
    with pytest.raises(ValueError, match=r"^memory: must be one of \('states', 'recompute'\): memory='none'"):
        attention.mamba2(**args, memory="none")
    with pytest.raises(ValueError, match="^return_chunk_states: is not returned with seq_idx"):
        attention.mamba2(**args, return_chunk_states=True, seq_idx=np.zeros((1, 5), np.int32))
    wide = {name: x for name, x in case(5, P=144, everything=False).items() if name not in ("dout", "dstates")}
    with pytest.raises(ValueError, match=r"^return_chunk_states: takes Dk up to 128 and Dv up to 128: B.shape=\(1, 5, 1, 16\)"):
        attention.mamba2(**wide, return_chunk_states=True)


def test_one_share_needs_no_sums_over_shares():
    """Shares of a key head's value heads write partial results, which are added; one alone has the results."""
    work = shared_heads_gradients.BlockWork(key_heads=1, chunks=1, blocks=2, resident_ctas=2)
    assert work.time(1, 1) == 2 + shared_heads_gradients.CHUNK_COST
    assert work.time(1, 2) == 1 + shared_heads_gradients.CHUNK_COST + shared_heads_gradients.PARTIAL_COST
