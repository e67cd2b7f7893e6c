"""Sequences cut into segments, by all members that do so, against the recurrence in float64; and the choice of their number."""

from types import SimpleNamespace

import numpy as np
import pytest
from delta_cases import BF16, FP16, STATE, inputs
from numba import cuda
from places import OnInterpreter
from poison import Packing, as_on_a_device, poisoned

import tiles
from attention import gates, reference
from attention.kernels.delta import delta_compose_states_hopper, delta_walk_states_hopper, kda_states_hopper
from attention.kernels.recurrent import gla_recent_states_hopper, gla_states_hopper
from attention.parts.delta.delta_recent_chunks import RecentChunks
from attention.parts.recurrent.tokens import TokenRange
from attention.plans.delta import delta_scans, delta_walk
from attention.plans.recurrent import recurrent_chunks
from attention.plans.recurrent.recurrent_chunks import Costs, choose_segments
from attention.public import delta_rules as module
from attention.public.delta_rules import delta_rule
from attention.public.linear_family import linear
from tiles import bf16, fp32
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import INT, array, signature

KINDS = "none", "head", "token", "channel"  # of decays
DELTA_KINDS = [(False, "channel"), (True, "none"), (True, "channel")]  # is it the delta rule?
NUMBERS = [
    (False, "token", 2), (False, "token", 9), (False, "channel", 4), (False, "channel", 12), (True, "none", 5),
    (True, "channel", 7),
]  # fmt: skip


def case(delta, kind, length=300, key_dim=64, value_dim=64, heads=1, dtype=BF16, gate=0.05, sequences=1, seed=0):
    """Arguments by name: q, k (of length 1), v, decays with a mean of -gate, an initial state; beta for the delta rule."""
    q, k, v, beta, decay = inputs(1, length, heads, key_dim, value_dim, dtype, gate=gate, seed=seed)
    draw = np.random.default_rng(seed + 1)
    if kind == "channel":
        decay = -gate * draw.standard_exponential((1, length, heads, key_dim), np.float32)
    elif kind == "head":
        decay = decay[0, 0]
    start = draw.standard_normal((sequences, heads, key_dim, value_dim), np.float32)
    args = {"q": q, "k": k, "v": v, "decay": None if kind == "none" else decay, "initial_state": start}
    return args | {"beta": beta} if delta else args


def agree(place, args, factor=2, **more):
    """Compare outputs and final state with the reference, within the tolerance of a call with one segment."""
    put = lambda x: place.put(x) if isinstance(x, np.ndarray) else x
    out = place.put(np.full(args["v"].shape, np.nan, args["v"].dtype))
    function = delta_rule if "beta" in args else linear
    on_device = {name: put(x) for name, x in (args | more).items()}
    _, state = function(**on_device, return_state=True, out=out)
    q, k, v, *_ = args.values()
    options = {name: x for name, x in (args | more).items() if name not in ("q", "k", "v", "family")}
    (ref, last), (low, _) = (reference.linear(q, k, v, low=low, **options) for low in (False, True))
    reference.assert_close(place.get(out), ref, low, factor=factor)
    assert np.abs(place.get(state) - last).max() <= factor * STATE * np.abs(last).max()
    return place.get(out), place.get(state)


@pytest.fixture
def cut(monkeypatch, nothing_known):
    """cut(n, consumers): calls cut every sequence into n segments from then on; walks have so many consumers in a block."""
    monkeypatch.setattr(module, "serves_walk", lambda _: True)
    monkeypatch.setattr(module, "serves_channel_walk", lambda _: False)

    def cut(n, consumers=1):
        for place in recurrent_chunks, delta_scans, delta_walk:
            monkeypatch.setattr(place, "choose_segments", lambda *_: n)
        monkeypatch.setattr(delta_walk, "choose_consumers", lambda *_: consumers)

    return cut


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delta", [False, True])
def test_three_segments(place, cut, delta, kind):
    """Of which the last has a shorter chunk at its end."""
    cut(3)
    agree(place, case(delta, kind))


@pytest.mark.parametrize(("delta", "kind"), [(False, "channel"), (True, "token"), (True, "channel"), (False, "token")])
def test_two_consumers_of_shared_keys(place, cut, delta, kind):
    cut(2, consumers=2)
    args = case(delta, kind, 190, 128, 128, heads=2)
    agree(place, args | {"q": args["q"][:, :, :1].copy(), "k": args["k"][:, :, :1].copy()})


SIZES = [
    (False, "channel", 80, 96, FP16), (False, "channel", 16, 16, BF16), (True, "none", 16, 16, BF16),
    (True, "none", 80, 96, FP16), (True, "channel", 64, 80, FP16),
]  # fmt: skip


@pytest.mark.parametrize(("delta", "kind", "key_dim", "value_dim", "dtype"), SIZES)
def test_sizes_of_keys_and_values(place, cut, delta, kind, key_dim, value_dim, dtype):
    """Smaller than the tiles of the kernels."""
    cut(2)
    agree(place, case(delta, kind, 130, key_dim, value_dim, dtype=dtype, gate=0.02))


def test_wide_keys_of_channels(place, cut):
    cut(2)
    agree(place, case(False, "channel", 130, 256, 64))


@pytest.mark.parametrize(("delta", "kind", "segments"), NUMBERS)
def test_any_number_of_segments(place, cut, delta, kind, segments):
    """Also more than there are chunks, so that some have no tokens."""
    cut(segments)
    agree(place, case(delta, kind, 64 * min(segments, 5) - 3, 16, 16))


PAIRS = [(False, "channel"), (True, "token")]  # of a member and its gates: each in CI, all before a release
PAIRS += [pytest.param(*case, marks=pytest.mark.release) for case in ((False, "token"), (True, "channel"))]


@pytest.mark.parametrize(("delta", "kind"), PAIRS)
def test_packed_sequences(place, cut, monkeypatch, delta, kind):
    """Empty ones, ones with fewer chunks than segments, and one whose segments are whole chunks, with poison around them."""
    cut(3, consumers=2)
    packing = Packing([0, 70, 192, 1], neighbour=2, nobodys=5)
    args = case(delta, kind, 263, 64, 128 if kind == "token" else 64, sequences=4)
    out, state = agree(place, args, cu_seqlens=packing.cu_seqlens)
    as_on_a_device(monkeypatch)
    start = poisoned((len(packing.ends) - 1, *args["initial_state"].shape[1:]), np.float32)
    start[packing.which] = args["initial_state"]
    on_device = {name: place.put(start if name == "initial_state" else packing.spread(x)) for name, x in args.items()}
    actual, last = (delta_rule if delta else linear)(**on_device, cu_seqlens=place.put(packing.ends), return_state=True)
    assert (packing.gather(place.get(actual)) == out).all() and (place.get(actual)[:, packing.nobodys].astype(float) == 0).all()
    assert (place.get(last)[packing.which] == state).all()


@pytest.mark.parametrize("kind", ["token", "channel"])
@pytest.mark.parametrize("delta", [False, True])
def test_strong_decays(place, cut, delta, kind):
    """A strong chunk, and a token with a decay of -inf."""
    cut(3)
    args = case(delta, kind, 250, gate=0.1)
    args["decay"][0, 70:100] *= 100
    args["decay"][0, 140] = -np.inf
    agree(place, args)


@pytest.fixture
def starts(monkeypatch):
    """Where walks of states begin: {(head, a segment's first chunk): the first chunk that is walked}."""
    found, skip = {}, RecentChunks.skip_forgotten

    @tiles.inlined
    def noted(self, params, seq, chunk, head):
        kept = skip(self, params, seq, chunk, head)
        first = int(chunk + (kept.start - seq.start) // 64)
        assert found.setdefault((int(head), int(chunk)), first) == first  # all warps agree
        return kept

    monkeypatch.setattr(RecentChunks, "skip_forgotten", noted)
    return found


@pytest.mark.parametrize("start", [True, pytest.param(False, marks=pytest.mark.release)])
def test_forgotten_chunks_of_a_head(cut, starts, start):
    """Of one head only the last chunk of a segment matters, of the other one all do."""
    cut(3)
    args = case(True, "token", 64 * 9 - 5, heads=2, gate=0.002)
    args["decay"][..., 1] *= 2000
    agree(OnInterpreter(), args if start else args | {"initial_state": None})
    assert starts == {(0, 0): 0, (0, 3): 3, (1, 0): 2, (1, 3): 5}


@pytest.mark.parametrize("initial", [pytest.param(True, marks=pytest.mark.release), False])
def test_blocks_of_what_is_forgotten(place, cut, initial):
    """A block of columns of M alone stores 0 where the segment forgets its beginning."""
    cut(3, consumers=2)
    args = case(True, "token", 64 * 9 - 5, 64, 128, heads=2, gate=0.002)
    args["decay"][..., 1] *= 2000
    agree(place, args if initial else args | {"initial_state": None})


def test_chunks_before_a_decay_of_minus_infinity(cut, starts):
    """Also in a segment that has fewer tokens than others, the last of those that are scanned."""
    cut(5)
    args = case(True, "token", 64 * 6 + 30, gate=0.002)
    args["decay"][0, [70, 64 * 6 + 5]] = -np.inf
    agree(OnInterpreter(), args)
    assert starts == {(0, 0): 1, (0, 2): 2, (0, 4): 4, (0, 6): 6}


def test_long_keys_keep_what_decays_forget(cut, starts):
    """Each token about halves the state, and multiplies it by 1 - beta |k|^2 = -2 along its key."""
    cut(2)
    args = case(True, "token", 64 * 8)
    args["k"][:], args["k"][..., :3], args["beta"][:], args["decay"][:] = 0, 1, 1, -0.7
    agree(OnInterpreter(), args)
    assert starts == {(0, 0): 0}


@pytest.mark.parametrize("consumers", [1, 2])
def test_forgotten_chunks_of_raw_inputs(cut, starts, consumers):
    """Long keys are divided by their norms before a token can multiply a state by more than 1."""
    cut(2, consumers)
    args, beta = (
        case(True, "token", 64 * 6 - 9, value_dim=64 * consumers),
        np.random.default_rng(2).standard_normal((1, 64 * 6 - 9, 1), np.float32),
    )
    args["k"] = (args["k"].astype(np.float32) * 4).astype(BF16)
    raw = args | {"decay": gates.softplus(np.full_like(beta, 2)), "beta": gates.beta(beta)}
    out, state = delta_rule(**raw, qk_l2norm=True, return_state=True)
    q, k, v, _, start = (x.astype(float) for x in args.values() if x is not args["beta"])
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    options = {"decay": np.full_like(beta, -np.log1p(np.exp(2))), "beta": 1 / (1 + np.exp(-beta)), "initial_state": start}
    ref, last = reference.linear(q, k, v, **options)
    low, _ = reference.linear(q.astype(BF16), k.astype(BF16), args["v"], low=True, **options)
    reference.assert_close(out, ref, low)
    assert np.abs(state - last).max() <= 2 * STATE * np.abs(last).max()
    assert starts == {(0, 0): 2}


@pytest.mark.parametrize("n", [0, 1, 64, 65, 150])
def test_first_chunk_that_is_walked(place, n):
    """The last one from which on exponents sum up to less than -126, or if chunks grow, one before it; behind the segment lie
    those of another one."""
    recent, chunk = RecentChunks(), 5

    @cuda.jit
    def body(params: recent.params(), gStarts: array(1), n: INT):
        for head in range(4):
            seq = recent.skip_forgotten(params, TokenRange(np.int32(10), np.int32(10 + 64 * n), 0), chunk, np.int32(head))
            gStarts[head] = np.float32(seq.start)

    x = np.array([[-0.1], [-2], [-200], [1]]) * np.random.default_rng(0).uniform(0.5, 1.5, (4, chunk + n + 20))
    x[3, chunk + n // 3] = -1e4  # those after it grow
    x[:, chunk + n :] = -1e3
    starts = place.put(np.zeros(4, np.float32))
    tiles.launch(body, grid=1, block=32)((place.put(x.astype(np.float32)),), starts, n)
    sums = x[:, chunk : chunk + n][:, ::-1].cumsum(1)[:, ::-1]
    expected = [max(np.flatnonzero(row < -126), default=0) for row in sums]
    first = (place.get(starts) - 10) / 64
    assert first[:3].tolist() == expected[:3] and first[3] <= expected[3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_only_decays(place, cut, kind):
    """Splitting states and matrices into high and low bf16 parts costs no more than 2^-14."""
    cut(4)
    args = case(True, kind, 256, 128, 64)
    args["beta"][:] = 0
    if kind != "none":
        args["decay"] = np.full_like(args["decay"], -1e-3)
    on_device = {name: x if x is None else place.put(x) for name, x in args.items()}
    _, state = delta_rule(**on_device, return_state=True)
    expected = args["initial_state"] * (1 if kind == "none" else np.exp(-0.256))
    assert np.abs(place.get(state) - expected).max() <= 2.0**-14 * np.abs(expected).max()


@pytest.mark.parametrize(("delta", "kind"), [(False, "channel"), (True, "token")])
def test_without_an_initial_state(place, cut, delta, kind):
    """Of sequences in two segments the delta rule's walk then needs no transitions."""
    cut(2)
    args = case(delta, kind, 130)
    tokens = {name: np.concatenate([args[name], args[name][:, ::-1]]) for name in ("q", "k", "v", "decay", "beta")[: 4 + delta]}
    agree(place, args | tokens | {"initial_state": None})


@pytest.mark.parametrize(("delta", "kind"), PAIRS)
def test_calls_use_the_chosen_number(monkeypatch, nothing_known, delta, kind):
    """Also when only the length of a repeated call is new."""
    numbers, plans = [], (delta_walk if kind == "token" else delta_scans) if delta else recurrent_chunks
    choose = plans.choose_segments
    monkeypatch.setattr(plans, "choose_segments", lambda *args: numbers.append(choose(*args)) or numbers[-1])
    for place in recurrent_chunks, delta_walk, delta_scans:
        monkeypatch.setattr(place, "machine", lambda _: SimpleNamespace(processors=9))
    monkeypatch.setattr(module, "serves_channel_walk", lambda _: False)
    monkeypatch.setattr(module, "serves_walk", lambda _: True)
    monkeypatch.setattr(delta_walk, "COMPOSE", 0.5)
    for length in 1300, 200:
        agree(OnInterpreter(), case(delta, kind, length, 16, 16))
    assert numbers[0] > 1 and int(numbers[-1]) == 1


@pytest.mark.parametrize(("delta", "kind"), [*DELTA_KINDS, (True, "token")])
def test_other_schedules(monkeypatch, cut, delta, kind):
    """In any order of the warps, with segments of three chunks."""
    monkeypatch.setenv("TILES_SEED", "0")
    cut(2)
    agree(OnInterpreter(), case(delta, kind, 330, 64, 128))


COMPILED = [(True, "channel")]  # gradients of GLA, with its forward pass: test_channel_walk.py
OTHERS = (False, "channel"), (True, "none"), (False, "token"), (True, "token")
COMPILED += [pytest.param(*case, marks=pytest.mark.release) for case in OTHERS]


@pytest.mark.parametrize(("delta", "kind"), COMPILED)
def test_as_compiled_for_hopper(as_compiled, cut, delta, kind):
    """With a strong chunk, of decays of channels: all lanes have read a tile before one of them gives it back."""
    as_compiled("sm_90a")
    cut(2)
    args = case(delta, kind, 70)
    if kind == "channel":
        args["decay"][:, :40] *= 100
    agree(OnInterpreter(), args)


COSTS = Costs(two_consumers=1.5, first_pass=0.8, compose=0.5, extra_launches=3)


def test_choose_segments_fills_the_gpu():
    """Few sequences are cut until they fill it; not if heads fill it already, nor if sequences are short."""
    assert choose_segments(4, 1, 1, 512, 132, COSTS) == 32
    assert choose_segments(132, 1, 1, 512, 132, COSTS) == 1
    assert choose_segments(100, 1, 1, 512, 132, COSTS) == 1  # second segments of all would take a second wave
    assert choose_segments(8, 1, 1, 7, 132, COSTS) == 1
    assert choose_segments(0, 1, 1, 512, 132, COSTS) >= 1


def test_choose_segments_counts_all_costs():
    """A higher cost gives fewer segments."""
    assert choose_segments(2, 1, 1, 256, 132, COSTS) == 32
    assert choose_segments(2, 1, 1, 256, 132, COSTS._replace(compose=4)) == 10
    assert choose_segments(2, 1, 1, 256, 132, COSTS._replace(compose=0)) == 64
    assert choose_segments(8, 2, 4, 16, 132, COSTS) == 4
    assert choose_segments(8, 2, 4, 16, 132, COSTS._replace(extra_launches=20)) == 1
    assert choose_segments(30, 2, 2, 128, 132, COSTS) == 4
    assert choose_segments(30, 2, 8, 128, 132, COSTS) == 1  # wider first pass
    assert choose_segments(30, 2, 4, 128, 132, COSTS) == 1
    assert choose_segments(30, 2, 4, 128, 132, COSTS._replace(first_pass=0.5)) == 4
    assert choose_segments(16, 2, 2, 128, 132, COSTS) == 8
    assert choose_segments(16, 2, 2, 128, 132, COSTS._replace(two_consumers=2)) == 4
    assert choose_segments(20, 2, 2, 128, 132, COSTS) == 6  # 13 if prologue and epilogue took no time


SHIPPED = [
    (gla_states_hopper, gla_states_hopper.Config(128, 2, fp32, bf16, True)),
    (gla_recent_states_hopper, gla_recent_states_hopper.Config(128, 2, fp32, bf16, True)),
    (kda_states_hopper, kda_states_hopper.Config(128, 2, fp32, bf16, True)),
    (delta_compose_states_hopper, delta_compose_states_hopper.Config(128)),
]
SHIPPED = [pytest.param(*kernel, marks=pytest.mark.release) for kernel in SHIPPED]
SHIPPED += [(delta_walk_states_hopper, delta_walk_states_hopper.Config(128, bf16, True, True, consumers=2))]


@pytest.mark.parametrize(("kernels", "config"), SHIPPED, ids=lambda x: str(x) if hasattr(x, "threads") else "")
def test_machine_code(kernels, config):
    """No spills, no wgmma serialised by ptxas, and shared memory for one block."""
    kernel, smem = kernels.make(config)
    compiled = compile_kernel(kernel, signature(kernel), "sm_90a")
    assert (compiled.spill_bytes, compiled.local_bytes, compiled.warnings) == (0, 0, [])
    assert smem is None or smem.nbytes <= 227 * 1024
