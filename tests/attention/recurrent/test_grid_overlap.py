"""The delta rule's training with few heads, as if each grid ran beside the one before it: what is not counted yet is NaN."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from gradient_cases import delta_case, with_record
from numpy import int32
from places import OnInterpreter

import attention
from attention.kernels import delta_inverse_hopper
from attention.parts.recurrent.grid_overlap import OverlappingGrids
from attention.plans import chunk_schedule, delta_gradient_walk, delta_records
from attention.public import delta_rules
from ops import grid as grid_ops
from ops.memory.counts import wait_for_count
from tiles import inlined, static
from tiles.interpreter import interpret
from tiles.launching.interpreted_launch import run_by


@static
class FirstSegmentAwaited(OverlappingGrids):
    """A walk that waits for the segment to which the recurrence comes first, whichever it has."""

    @inlined
    def wait(self, params, walk, heads, head, columns, length, segments):
        grid_ops.wait_count(params.gWalked, (int32(columns),), int32(1))


@pytest.fixture
def arriving(monkeypatch, nothing_known):
    """From then on all chunks of one head are inverted by one worker, in items of two, its gradients are walked through in two
    segments, and what both later grids read is NaN until they have waited for its count."""
    monkeypatch.setattr(delta_rules, "record_fields", lambda *_: delta_records.SEGMENTED)
    monkeypatch.setattr(delta_gradient_walk, "choose_segments_beside", lambda *_: 2)
    monkeypatch.setattr(delta_inverse_hopper, "CTAS_PER_SM", 1)
    monkeypatch.setattr(chunk_schedule, "machine", lambda _: SimpleNamespace(processors=3))
    monkeypatch.setattr(chunk_schedule, "ROUNDS", 0)
    monkeypatch.setattr(chunk_schedule, "gains_beside", lambda *_: True)
    monkeypatch.setenv("TILES_JOBS", "1")

    def run(kernel, grid, threads, args, *more):
        named = dict(zip(inspect.signature(kernel.py_func).parameters, args, strict=True))
        by_segment = "gDBeta" in named
        from_middle = by_segment and hasattr(named["grid_args"], "sequences")
        if not by_segment and not hasattr(named.get("params"), "gO"):
            return interpret(kernel, grid, threads, args, *more)
        names = ("gDV", "gSegmentStates") if by_segment else ("gSolutions", "gScores", "gVectors")
        names += ("gStates",) * from_middle
        arrays = [np.asarray(getattr(named[name], "array", named[name])) for name in names]
        copies = [x.copy() for x in arrays]
        for x in arrays:
            x[...] = np.nan

        def wait(counts, at, n):
            column, of_states = 64 * (at[0] % 2), from_middle and at[0] >= 2
            columns = slice(column, column + 64)
            for name, x, copied in zip(names, arrays, copies, strict=True):
                if by_segment and (name == "gStates") != of_states:
                    continue
                if not by_segment or of_states:
                    place = slice(0, 2 * n), slice(None), columns if of_states else slice(None)
                elif x.dtype == np.float32:  # states, the last segment's first
                    place = slice(0, n), slice(None), columns
                else:  # the last segment has one chunk, the other one two
                    place = slice(None), slice(0 if n == 2 else 128, None), slice(None), columns
                x[place] = copied[place]
            wait_for_count(counts, at, n)

        monkeypatch.setattr(grid_ops, "wait_for_count", wait)
        interpret(kernel, grid, threads, args, *more, overlaps_previous=True)

    with run_by(run):
        yield


def any_is_nan(*arrays):
    return any(np.isnan(x.astype(np.float32)).any() for x in arrays)


@pytest.mark.parametrize("fault", [False, True])
def test_nothing_is_read_before_it_is_there(arriving, monkeypatch, fault):
    """Were the waits fewer, results would be NaN."""
    if fault:
        monkeypatch.setattr(delta_gradient_walk, "OVERLAPPING_GRIDS", FirstSegmentAwaited())
    (out, *_), stored = with_record(OnInterpreter(), delta_case(130, heads=1))
    _, dk, *_ = attention.delta_rule_backward(**stored)
    assert not any_is_nan(out) and any_is_nan(dk) == fault


def test_from_the_middle_nothing_is_read_before_it_is_there(arriving, monkeypatch):
    monkeypatch.setattr(delta_gradient_walk, "FROM_MIDDLE", True)
    for name in "choose_segments", "choose_segments_from_middle":
        monkeypatch.setattr(delta_gradient_walk, name, lambda *_: 2)
    assert not any_is_nan(*attention.delta_rule_backward(**delta_case(130, heads=1)))
