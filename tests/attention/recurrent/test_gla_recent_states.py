"""attention/kernels/recurrent/gla_recent_states_hopper.py: local states from the ends of segments, as far back as anything
is left."""

import numpy as np
import pytest
from delta_cases import BF16, FP16
from places import OnInterpreter
from test_segments import agree, case

from attention.kernels.recurrent import compose_segment_states, gla_hopper, gla_recent_states_hopper, gla_states_hopper
from attention.plans.recurrent import recurrent_chunks
from attention.public.linear_family import linear


@pytest.fixture
def cut(monkeypatch, nothing_known):
    """cut(n): calls cut every sequence into n segments from then on."""
    return lambda n: monkeypatch.setattr(recurrent_chunks, "choose_segments", lambda *_: n)


def on_device(place, args):
    """The arguments, arrays in a place's memory."""
    return {name: place.put(x) if isinstance(x, np.ndarray) else x for name, x in args.items()}


GATES = {"none is left": 20.0, "some is left": 1.0, "all is left": 1e-3}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_any_decay(place, cut, gate):
    """Blocks stop after one chunk, after some, and not before the segment begins."""
    cut(2)
    agree(place, case(False, "channel", 600, gate=gate))


def test_nothing_is_read_of_what_has_decayed(place, cut):
    """Values of the first chunk have no part in what comes after a segment's end, even where they are NaN."""
    cut(2)
    args = case(False, "channel", 512, gate=3.0)
    clean = place.get(linear(**on_device(place, args)))
    args["v"][0, :64] = np.nan
    actual = place.get(linear(**on_device(place, args)))
    assert np.isnan(actual[0, :256].astype(float)).any() and (actual[0, 256:] == clean[0, 256:]).all()


SIZES = [(16, 16, {}), (80, 96, {}), (128, 128, {"heads": 2}), (256, 64, {})]


@pytest.mark.parametrize(("key_dim", "value_dim", "more"), SIZES)
def test_sizes(place, cut, key_dim, value_dim, more):
    """Also keys that heads share."""
    cut(2)
    args = case(False, "channel", 190, key_dim, value_dim, gate=0.02, **more)
    agree(place, args | {name: args[name][:, :, :1].copy() for name in "qk"})


@pytest.mark.parametrize("gate_dtype", [np.float32, BF16])
def test_strong_decays(place, cut, gate_dtype):
    """A token of -inf, after which some channels have nothing and others all."""
    cut(3)
    args = case(False, "channel", 500, gate=0.1)
    args["decay"][0, 70:100] *= 100
    args["decay"][0, 140, 0, ::2] = -np.inf
    agree(place, args | {"decay": args["decay"].astype(gate_dtype)})


def test_packed_sequences(place, cut):
    """Empty ones, ones with fewer chunks than segments, and one whose segments are whole chunks."""
    cut(3)
    ends = np.array([0, 0, 70, 262, 263, 563], np.int32)
    agree(place, case(False, "channel", 563, gate=0.5, sequences=5), cu_seqlens=ends)


@pytest.mark.parametrize(("dtype", "kernel"), [(BF16, gla_recent_states_hopper), (FP16, gla_states_hopper)])
def test_which_kernel_computes_local_states(monkeypatch, cut, dtype, kernel):
    """Keys of float16 are decayed to the ends of chunks only."""
    modules, kernel_for = [], recurrent_chunks.kernel_for
    monkeypatch.setattr(
        recurrent_chunks, "kernel_for", lambda module, *rest: modules.append(module) or kernel_for(module, *rest)
    )
    cut(2)
    agree(OnInterpreter(), case(False, "channel", 130, 16, 16, dtype=dtype))
    assert modules == [kernel, compose_segment_states, gla_hopper]


@pytest.mark.parametrize("seed", ["0", "1"])
def test_other_schedules(monkeypatch, cut, seed):
    """In any order of the warps, where blocks stop while chunks are being loaded."""
    monkeypatch.setenv("TILES_SEED", seed)
    cut(2)
    agree(OnInterpreter(), case(False, "channel", 700, 64, 128, gate=1.0))


@pytest.mark.release
def test_as_compiled(as_compiled, cut):
    as_compiled("sm_90a")
    cut(2)
    agree(OnInterpreter(), case(False, "channel", 200, 64, 64, gate=3.0))
