"""Two ways of launches of which the gates choose one (launch_conditions.py), in the interpreter and on the card."""

from types import SimpleNamespace

import numpy as np
import pytest
from delta_cases import agree
from numba import cuda
from test_kda_hopper import inputs
from test_raw_gates import agree as agree_raw
from test_walk_segments import model_inputs

from attention.parts.recurrent.launch_conditions import HistoryCondition, NoCondition
from attention.plans.delta import delta_channel_walk
from attention.plans.recurrent import chunk_schedule
from attention.public import delta_rules
from attention.public.delta_rules import delta_rule
from tiles import launch
from tiles.launching.arguments import array

BESIDE, SCANS = True, False  # the way of sequences that keep what is before their segments: see delta_channel_walk.py


@pytest.fixture
def choose(monkeypatch, nothing_known):
    """choose(segments, fills): calls are served by a walk in so many segments, or by one beside the grid before it if `fills`,
    or else by the launches of delta_scans.py."""

    def choose(segments, fills):
        monkeypatch.setattr(delta_rules, "serves_channel_walk", lambda _: True)
        monkeypatch.setattr(chunk_schedule, "machine", lambda _: SimpleNamespace(processors=2))
        monkeypatch.setattr(chunk_schedule, "LEAD", 1000)
        monkeypatch.setattr(chunk_schedule, "ITEM_CHUNKS", 1)
        monkeypatch.setattr(chunk_schedule, "gains_beside", lambda *_: fills)
        monkeypatch.setattr(delta_channel_walk, "count_walk_segments", lambda *_: segments)
        monkeypatch.setattr(delta_channel_walk, "prefers_walk", lambda *_: fills)
        monkeypatch.setattr(delta_channel_walk, "gains_segments", lambda *_: True)

    return choose


@pytest.mark.parametrize("fills", [BESIDE, SCANS])
@pytest.mark.parametrize("draw", [model_inputs, lambda length: inputs(1, length, 1, 64, 64)], ids=["forget", "keep"])
def test_either_way(place, choose, draw, fills):
    choose(3, fills)
    agree(place, *draw(280))


def test_packed_sequences(place, choose):
    """One without tokens, and one that keeps what another one forgets."""
    choose(2, SCANS)
    ends = np.array([0, 70, 70, 200], np.int32)
    start = np.random.default_rng(1).standard_normal((3, 1, 64, 64), np.float32)
    q, k, v, beta, decay = model_inputs(200)
    agree(place, q, k, v, beta, decay, cu_seqlens=ends, initial_state=start)
    decay[:, 70:] *= 1e-3
    agree(place, q, k, v, beta, decay, cu_seqlens=ends, initial_state=start)


def test_raw_inputs(place, choose):
    choose(2, SCANS)
    agree_raw(place, "sigmoid", 2 * 64 + 9, delta_rule, True)


def test_sequences_that_forget_are_walked_in_segments(place, choose):
    """NaN in the first chunk does not reach the second segment; it would by the other way."""
    choose(2, SCANS)
    q, k, v, beta, decay = model_inputs(384)
    v[:, :64] = np.nan
    out = place.get(delta_rule(*map(place.put, (q, k, v, beta)), decay=place.put(decay)))
    assert np.isnan(out[:, :64]).all()
    assert np.isfinite(out[:, 192:].astype(float)).all()


def test_counts_ahead_of_a_walk_in_segments(place, choose, monkeypatch):
    """A plan that has one way of launches counts, too."""
    choose(3, BESIDE)
    monkeypatch.setattr(delta_channel_walk, "counts_ahead", lambda _: True)
    monkeypatch.setattr(chunk_schedule, "gains_beside", lambda *_: False)
    agree(place, *model_inputs(280))


def write_decision(condition):
    """A kernel whose blocks write whether they are skipped."""
    ARGS = condition.params()

    @cuda.jit
    def write(gOut: array(1), args: ARGS):
        gOut[cuda.blockIdx.x] = 1.0 if condition.is_skipped(args) else 0.0

    return write


@pytest.mark.parametrize(
    ("shape", "kept", "forgets"), [((16, 4), 0, True), ((16, 4), 2, True), ((16, 4), 3, False), ((3, 40), 3, False)]
)
def test_all_blocks_decide_alike(place, shape, kept, forgets):
    """By the number of segments that keep what is before them."""
    counts = np.random.default_rng(1).integers(0, 4, shape).astype(np.float32)
    counts.ravel()[np.random.default_rng(2).permutation(counts.size)[:kept]] = -1
    counts = np.pad(counts, [(0, 0), (1, 0)], constant_values=-1)[None]  # first segments have none
    conditions = HistoryCondition(True), HistoryCondition(False), HistoryCondition(False, True)
    for condition, skipped in zip(conditions, (not forgets, forgets, forgets), strict=True):
        out = place.put(np.full(2, np.nan, np.float32))
        launch(write_decision(condition), 2, 32)(out, (place.put(counts), 2))
        assert (place.get(out) == skipped).all()


@pytest.mark.parametrize(
    ("heads", "length", "chosen"),
    [
        (24, 32768, False), (16, 32768, False), (8, 32768, True), (8, 16384, True), (16, 8192, False),
    ],
)  # fmt: skip
def test_when_segments_gain_over_a_walk_beside(heads, length, chosen):
    """On an H200: 9 % with 16 heads of 32768 tokens are not enough."""
    segments = delta_channel_walk.count_walk_segments(2 * heads, length // 64, 132)
    assert delta_channel_walk.gains_segments(heads, 2, length // 64, segments, 1, 132) == chosen


@pytest.mark.parametrize(("heads", "length", "fills"), [(8, 32768, True), (4, 32768, False), (4, 8192, True), (1, 8256, False)])
def test_of_which_problems_a_walk_of_whole_sequences_is_fast(heads, length, fills):
    assert delta_channel_walk.prefers_walk(2 * heads, length // 64, 132) == fills


def test_a_grid_without_a_condition(place):
    assert str(NoCondition()) == "" and not NoCondition.overlaps
