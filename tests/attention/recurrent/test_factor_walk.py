"""The delta rule by one walk that reads the factors of chunks (delta_factors_hopper.py, kda_walk_hopper.py), with decays of
tokens or none, against its recurrence in float64."""

from types import SimpleNamespace

import numpy as np
import pytest
from delta_cases import BF16, FP16, agree, inputs
from places import OnInterpreter
from poison import Packing, as_on_a_device, poisoned
from test_raw_gates import agree as agree_raw

from attention.kernels import delta_factors_hopper, kda_walk_hopper
from attention.parts.recurrent.chunk_order import ChunkMajor
from attention.plans import chunk_schedule, delta_walk
from attention.public import delta_rules as module
from attention.public.delta_rules import delta_rule
from tiles import bf16, fp16
from tiles.calls import program
from tiles.calls.program import LruTable
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import signature


@pytest.fixture(autouse=True)
def always_over_factors(monkeypatch, nothing_known):
    """All calls take this walk, and no other."""
    for serves in "serves_walk", "serves_channel_walk":
        monkeypatch.setattr(module, serves, lambda _: True)
    monkeypatch.setattr(delta_walk, "serves_factor_walk", lambda _: True)
    monkeypatch.setattr(delta_walk, "choose_segments", lambda *_: pytest.fail("another walk was planned"))


def start_for(heads, key_dim, value_dim, sequences=1):
    """A state before the first token."""
    return 0.3 * np.random.default_rng(1).standard_normal((sequences, heads, key_dim, value_dim), np.float32)


@pytest.mark.parametrize(("key_dim", "value_dim", "dtype"), [(128, 192, BF16), (80, 64, FP16), (16, 16, BF16)])
def test_sizes_of_keys_and_values(place, key_dim, value_dim, dtype):
    """With keys that heads share; twice the same bits."""
    args, start = inputs(1, 130, 2, key_dim, value_dim, dtype, key_heads=1), start_for(2, key_dim, value_dim)
    once, twice = (agree(place, *args, initial_state=start, scale=0.7) for _ in range(2))
    assert all((a == b).all() for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("channels", [False, True])
def test_blocks_that_share(place, monkeypatch, channels):
    """Two blocks of a cluster load together what both read of a chunk."""
    monkeypatch.setattr(delta_walk, "count_sharers", lambda width: width)
    *args, decay = inputs(1, 330, 2, 64, 128)
    agree(place, *args, np.repeat(decay[..., None], 64, axis=-1) if channels else decay, initial_state=start_for(2, 64, 128))


@pytest.fixture
def beside(monkeypatch):
    """beside(rounds): from then on the walk runs beside the grid before, which has so many workers a processor, after so many
    rounds; 0: after its end."""
    monkeypatch.setattr(delta_walk, "TOKEN_BESIDE", True)
    monkeypatch.setattr(delta_walk, "CLUSTER_ROOM", 0)

    def beside(rounds, processors, copies=1, item_chunks=4):
        monkeypatch.setattr(chunk_schedule, "ITEM_CHUNKS", item_chunks)
        monkeypatch.setattr(delta_factors_hopper, "CTAS_PER_SM", copies)
        monkeypatch.setattr(chunk_schedule, "machine", lambda _: SimpleNamespace(processors=processors))
        monkeypatch.setattr(chunk_schedule, "choose_rounds", lambda *_: rounds)
        for table in ("GUARDED_CALLS", "REMEMBERED"):
            monkeypatch.setattr(program, table, LruTable(program.ENTRIES))
        monkeypatch.setattr(program, "WATCHED_PLANS", LruTable(program.PLAN_KINDS))

    return beside


@pytest.mark.parametrize(
    ("chunks", "heads", "sharers", "processors", "copies", "item_chunks"),
    [(8, 1, 1, 2, 1, 4), (5, 1, 2, 3, 1, 2), (5, 2, 1, 3, 3, 1)],
)
def test_a_walk_beside_the_grid_before(place, beside, monkeypatch, chunks, heads, sharers, processors, copies, item_chunks):
    """Items of 4, 2 and 1 chunks, the last one of which may lack one: no bit is another than after the end of that grid."""
    monkeypatch.setattr(delta_walk, "count_sharers", lambda _: sharers)
    *args, decay = inputs(1, 64 * chunks - 9, heads, 64, 64 * sharers, key_heads=1)
    results = []
    for rounds in (0, 1):
        beside(rounds, processors, copies, item_chunks)
        results.append(agree(place, *args, decay))
    assert all((x == y).all() for x, y in zip(*results, strict=True))


def test_raw_gates_of_heads_in_turn(place, beside):
    """A worker's next item is of another head, with another A_log and dt_bias."""
    beside(1, 3)
    agree_raw(place, "softplus", 8 * 64, delta_rule)


@pytest.mark.smoke
@pytest.mark.parametrize(("length", "gated"), [(1, True), (64, False), (65, True), (300, True), (129, False)])
def test_lengths(place, length, gated):
    *arguments, decay = inputs(2, length, 1, 64, 64)
    agree(place, *arguments, decay if gated else None)


@pytest.mark.parametrize(("gate", "dtype"), [(5, BF16), (50, FP16), (1e-4, BF16)])
def test_gates_of_any_size(place, gate, dtype):
    """Single tokens that decay much, or all, and a strong chunk. No exponent that could overflow is positive."""
    q, k, v, beta, decay = inputs(1, 250, 1, 64, 64, dtype, gate=gate)
    decay[0, [5, 70, 140], 0] = -5, -1e4, -np.inf
    decay[0, 192:220] = -50
    agree(place, q, k, v, beta, decay)


@pytest.mark.parametrize("gated", [True, False])
def test_repeated_keys(place, gated):
    """A and its powers are as large as they can be; see test_delta_rule.py."""
    q, k, v, beta, decay = inputs(1, 200, 1, 64, 64, gate=1e-3)
    k[:] = k[:, :1]
    beta[:] = 1
    agree(place, q, k, v, beta, decay if gated else None, factor=4)


@pytest.mark.parametrize("gated", [True, False])
def test_packed_sequences(place, monkeypatch, gated):
    """Also an empty one, each with what it has by itself, next to poison."""
    packing = Packing([0, 70, 64, 1, 129], neighbour=2, nobodys=5)
    *arrays, decay = inputs(1, 264, 1, 64, 64)
    arrays, start = [*arrays, decay if gated else None], start_for(1, 64, 64, 5)
    out, state = agree(place, *arrays, cu_seqlens=packing.cu_seqlens, initial_state=start)
    as_on_a_device(monkeypatch)
    states = poisoned((len(packing.ends) - 1, *start.shape[1:]), np.float32)
    states[packing.which] = start
    q, k, v, beta, decay = (x if x is None else place.put(packing.spread(x)) for x in arrays)
    options = {"cu_seqlens": place.put(packing.ends), "initial_state": place.put(states), "return_state": True}
    actual, last = delta_rule(q, k, v, beta, decay=decay, **options)
    assert (packing.gather(place.get(actual)) == out).all() and (place.get(actual)[:, packing.nobodys].astype(float) == 0).all()
    assert (place.get(last)[packing.which] == state).all()


@pytest.mark.parametrize(("name", "doubled", "l2norm"), [("softplus", False, True), ("sigmoid, -2", True, False)])
def test_raw_inputs(place, name, doubled, l2norm):
    agree_raw(place, name, 70, delta_rule, False, doubled, l2norm=l2norm)


def test_normed_keys_without_gates(place):
    q, k, v, beta, _ = inputs(1, 70, 1, 128, 64)
    out, _ = agree(place, q, k, v, beta, None)
    normed = place.get(delta_rule(*(place.put(x) for x in ((3 * q.astype(float)).astype(BF16), k, v, beta)), qk_l2norm=True))
    assert np.abs(normed.astype(float) - out.astype(float)).max() <= 2.0**-6 * np.abs(out.astype(float)).max()


def test_another_schedule(monkeypatch):
    """In any order of the warps."""
    monkeypatch.setenv("TILES_SEED", "0")
    agree(OnInterpreter(), *inputs(1, 330, 1, 64, 128))


def test_as_compiled_for_hopper(as_compiled):
    """A chunk is strong, and branches twice."""
    as_compiled("sm_90a")
    *arguments, decay = inputs(1, 70, 1, 64, 64)
    decay[:, :40] *= 100
    agree(OnInterpreter(), *arguments, decay)


SHIPPED = [
    (delta_factors_hopper, delta_factors_hopper.Config(128, bf16, True, l2norm=True)),
    pytest.param(delta_factors_hopper, delta_factors_hopper.Config(128, fp16, True, True), marks=pytest.mark.release),
    pytest.param(
        delta_factors_hopper,
        delta_factors_hopper.Config(128, bf16, True, l2norm=True, order=ChunkMajor(3)),
        marks=pytest.mark.release,
    ),
    pytest.param(kda_walk_hopper, kda_walk_hopper.Config(128, bf16, True, True), marks=pytest.mark.release),
    (kda_walk_hopper, kda_walk_hopper.Config(128, bf16, False, True, 2)),
]


@pytest.mark.parametrize(("kernels", "config"), SHIPPED, ids=lambda x: str(x) if hasattr(x, "threads") else "")
def test_machine_code(kernels, config):
    """No spills, no wgmma serialised by ptxas, and shared memory for as many blocks as an SM is to have."""
    kernel, smem = kernels.make(config)
    compiled = compile_kernel(kernel, signature(kernel), "sm_90a")
    assert (compiled.spill_bytes, compiled.local_bytes, compiled.warnings) == (0, 0, [])
    assert (smem.nbytes + 1024) * getattr(config, "ctas_per_sm", 1) <= 228 * 1024
