"""All programs on a simulated GPU: a call whose plan is a function of lengths, or whose host code was generated for earlier
calls (tiles/calls/remembered_calls.py), makes the same launches as a newly planned call, and raises the same errors."""

import itertools
import sys
import threading
from importlib import import_module

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from on_no_device import MEMORY, ROOM, Lent, fresh, lent, noting_driver

from attention.plans.decode import split_forward
from attention.plans.delta.delta_records import STORED_NAMES
from attention.plans.softmax.forward_programs import _forward, _variant
from attention.plans.softmax.norm_gradients import DIFFERENTIATE
from attention.public.cache_append import _append
from attention.public.decoding import _append as _decode_append
from attention.public.decoding import _decode
from attention.public.decoding import _variant as _decode_variant
from attention.public.mla_decoding import _mla_decode, _mla_decode_fp8
from attention.public.projected_qkv import projected, projected_backward
from attention.scoring.python_functions import register_function
from tiles.calls import program as programs
from tiles.calls.axes import VARY
from tiles.launching.arrays import ITEMSIZE, Form, contiguous

launching = sys.modules["tiles.launching.launch"]
HOMES = {"based": "based_features", "delta_rule": "delta_rules", "hedgehog": "hedgehog_features"}
HOMES |= {"linear": "linear_family", "mamba2": "mamba", "linear_step": "token_steps", "backward": "softmax_backward"}
PROGRAMS = {name: getattr(import_module(f"attention.public.{home}"), f"_{name}") for name, home in HOMES.items()}
PROGRAMS |= {"decode": _decode, "decode_append": _decode_append}
PROGRAMS |= {"mla_decode": _mla_decode, "mla_decode_fp8": _mla_decode_fp8}
PROGRAMS |= {"forward": _forward}


@pytest.fixture
def gpu(monkeypatch):
    with noting_driver(monkeypatch) as noted:
        yield noted


COLUMNS = {
    "mla_decode": {"head_dim": [576], "head_dim_v": [512]},
    "mla_decode_fp8": {"head_dim": [576], "head_dim_v": [512], "rotary_dim": [64]},
    "based": {"key_dim": [16], "features": [160]},
    "hedgehog": {"features": [64], "key_dim": [64, 128], "value_dim": [64, 128]},
}
RESULTS = "state", "z", "states", *STORED_NAMES
COLUMN_AXES = "head_dim", "head_dim_v", "key_dim", "value_dim", "rotary_dim", "features"
LENGTHS = "seqlen", "seqlen_q", "seqlen_k", "seqlen_new", "pages_per_seq", "positions", "parts"
GROWS = [None, (), ("seqlen_k",), ("seqlen", "seqlen_q"), ("seqlen", "seqlen_q", "seqlen_k"), ("batch",)]
LENGTH = st.one_of(st.integers(0, 5), st.integers(1, 300), st.integers(1, 5000), st.sampled_from([64, 1024, 2**17, 2**31]))


@st.composite
def calls(draw, name):
    """(arrays, options, layout) of several calls that differ in lengths alone."""
    program = PROGRAMS[name]
    schema, layout = program.schema, draw(st.sampled_from(["bshd", "bshd", "bhsd"]))
    columns = {axis: draw(st.sampled_from(COLUMNS.get(name, {}).get(axis, [64, 64, 128, 80, 24]))) for axis in COLUMN_AXES}
    heads = draw(st.sampled_from([1, 2, 4]))
    fixed = columns | {"heads_k": heads, "heads": heads * draw(st.sampled_from([1, 1, 2, 4]))}
    dtype = draw(st.sampled_from(["bfloat16", "float16"]))
    given = {
        row.name: row.needed or ("*" not in row.axes[0] and draw(st.integers(0, 3)) == 0) for row in schema.arguments.values()
    }
    given["cu_seqlens"] = "cu_seqlens" in given and draw(st.booleans())
    given["cu_seqlens_new"] = given.get("cu_seqlens_new", False) and given["cu_seqlens"]
    given["sin"] = given.get("cos", False)
    rows = {
        row.name: row
        for row in schema.arguments.values()
        if given[row.name] and not (row.name == "lse" and row.result) and row.name not in RESULTS
    }
    if name == "linear_step":
        rows["state"] = schema.arguments["state"]
    axes_of = {row: draw(st.sampled_from(argument.axes)) for row, argument in rows.items()}
    kinds = {
        row: dtype if argument.holds == "tile" else draw(st.sampled_from(argument.dtypes)) for row, argument in rows.items()
    }
    options = tuple(draw(OPTIONS[option, kind]) for option, kind in program.option_types.items())
    result, before, gaps, grows = [], {}, {}, draw(st.sampled_from(GROWS))
    for n in range(draw(st.integers(2, 5) if grows is None else st.integers(4, 6))):
        extents = fixed | {"batch": draw(st.integers(1, 3)), "sequences": draw(st.integers(1, 5)), "1": 1}
        extents |= {axis: draw(LENGTH) for axis in LENGTHS} | {
            "alibi_batch": extents["batch"],
            "pairs": columns["head_dim"] // 4,
        }
        extents["batch_cache"] = draw(st.integers(0, 300)) if "pages" in axes_of else extents["batch"]
        if given["cu_seqlens"]:
            extents |= {"batch": 1, "ends": extents["sequences"] + 1}
        else:
            extents["sequences"] = extents["batch"]
        if before and grows is not None:  # all else stays, and what grows does so by a little, but for once
            longer_extents = {axis: before[axis] + draw(st.sampled_from([0, 1, 1, 2, 64])) for axis in grows if axis != "batch"}
            batch = (extents if "batch" in grows else before)["batch"]
            extents = before | (longer_extents if draw(st.integers(0, 4)) else {}) | {"batch": batch}
            of_batch = "sequences", "batch_cache", "alibi_batch"
            extents |= {axis: batch for axis in of_batch if before[axis] == before["batch"]}
        before = extents
        keys = extents["seqlen_k"] * (extents["pages_per_seq"] if "pages" in axes_of else 1)
        extents |= {"bias_batch": 1, "bias_heads": fixed["heads"], "bias_seqlen": 1, "bias_keys": keys + draw(LENGTH) // 64}
        memory, arrays = itertools.count(MEMORY, ROOM), {}
        for row, axes in axes_of.items():
            shape = [extents[axis] for axis in axes]
            if draw(st.integers(0, 40)) == 0:
                wrong = draw(st.integers(0, len(shape) - 1))
                if axes[wrong] in VARY:
                    shape[wrong] += 1
            gap = gaps.setdefault((row, n if grows is None else 0), [draw(st.sampled_from([0, 0, 0, 1, 8])) for _ in shape])
            past = 0 if grows is not None else draw(st.sampled_from([0, 0, 0, 0, 8, None]))
            arrays[row] = lent(draw, schema.arguments[row], shape, kinds[row], layout, next(memory), gap, past)
        if "out" in arrays and draw(st.integers(0, 5)) == 0:
            arrays["out"].pointer = arrays[draw(st.sampled_from(list(arrays)))].pointer
        result.append((tuple(arrays.get(row) for row in schema.names), options, layout))
    return program, result


OPTIONS = {
    (name, bool): st.booleans()
    for name in (
        *"causal deterministic return_lse interleaved normalize return_state".split(),
        *"dt_softplus return_final_states return_chunk_states".split(),
    )
}
OPTIONS |= {
    ("memory", str): st.sampled_from(["states", "recompute"]),
    ("scale", float | None): st.sampled_from([None, None, 0.3]),
    ("scale", float): st.sampled_from([0.1]),
    ("family", str | None): st.sampled_from([None, None, "sm_80", "sm_90"]),
    ("dt_min", float): st.sampled_from([0.0, 0.1]),
    ("dt_max", float | None): st.sampled_from([None, None, 2.0]),
    ("left", int | None): st.sampled_from([None, 0, 200]),
    ("right", int | None): st.sampled_from([None, None, 3]),
    ("softcap", float | None): st.sampled_from([None, None, 5.0]),
    ("splits", int | None): st.sampled_from([None, None, 1, 3]),
    ("norm_eps", float): st.sampled_from([1e-6]),
    ("mask", str | None): st.none(),
    ("score", str | None): st.none(),
}


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_the_same_as_planned_anew(gpu, name, data):
    program, given = data.draw(calls(name))
    plans, run = program._plan_and_compile, program.run
    for arrays, options, layout in given:
        planned, ran = [], []
        program._plan_and_compile = lambda *args: planned.append(1) or plans(*args)
        program.run = lambda *args: ran.append(1) or run(*args)
        try:
            actual = gpu.call(program, arrays, options, layout)
        finally:
            del program._plan_and_compile, program.run
        event("planned" if planned else "by a function" if ran else "by what was written for its form")
        event("refused" if isinstance(actual[0], type) else "launched")
        assert actual == fresh(gpu.call, program, arrays, options, layout)


def tokens(batch, length, heads, columns, pointer=MEMORY, capacity=None, dtype="bfloat16"):
    """An array (B, S, H, D) inside one with room for `capacity` tokens."""
    size = ITEMSIZE[dtype]
    strides = contiguous((batch, capacity or length, heads, columns), size)
    return Lent(pointer, Form((batch, length, heads, columns), strides, dtype, 0, size))


def planned(monkeypatch, program):
    """A list to which every planned call is appended."""
    actual, plans = [], program._plan_and_compile
    monkeypatch.setattr(program, "_plan_and_compile", lambda *args: actual.append(1) or plans(*args))
    return actual


@pytest.mark.parametrize("paged", [False, True])
def test_appends_are_planned_a_few_times(gpu, monkeypatch, paged):
    """Calls with any number of sequences and tokens."""
    plans, names = planned(monkeypatch, _append), _append.names
    for batch, new in (2, 1), (2, 700), (64, 1), (3, 5), (1, 9000):
        arrays = dict.fromkeys(names)
        arrays |= {name: tokens(batch, new, 8, 128, MEMORY + n * ROOM) for n, name in enumerate(("k_new", "v_new"), 1)}
        arrays |= {name: tokens(99 if paged else batch, 16, 8, 128, MEMORY + n * ROOM) for n, name in enumerate("kv", 3)}
        integers = {"lengths": (batch,)} | ({"pages": (batch, 7)} if paged else {})
        for n, (name, shape) in enumerate(integers.items(), 5):
            arrays[name] = Lent(MEMORY + n * ROOM, Form(shape, contiguous(shape, 4), "int32", 0, 4))
        given = tuple(arrays.values()), (False, True, 1e-6), "bshd"
        actual, count = gpu.call(_append, *given), len(plans)
        ((launch, *_),), result = actual
        assert launch == -(-batch * new // 4) and result == [] and actual == fresh(gpu.call, _append, *given)
        del plans[count:]
    assert len(plans) <= 3  # of one token, of one sequence, and of more of both


@pytest.mark.parametrize("causal", [False, True])
def test_generation_is_planned_a_few_times(gpu, monkeypatch, causal):
    """One more key in each call: planned anew when the kernel or an answer to the planner's questions changes. Long contexts
    are split and combined."""
    plans = planned(monkeypatch, _forward)
    for length in range(1, 5000, 7):
        q, k, v = tokens(2, 1, 8, 128), *(tokens(2, length, 2, 128, MEMORY + n * ROOM, 8192) for n in (1, 2))
        launches, result = gpu.call(_forward, (q, k, v, None, None), (causal, None, False, None), "bshd")
        assert result[0] == ((2, 1, 8, 128), "bfloat16")
        assert len(result) == len(launches) == (1 if length < split_forward.LEAST else 2)
    assert len(plans) <= 4


def test_steps_with_a_bias_are_planned_a_few_times(gpu, monkeypatch):
    """Caches and the bias grow by a key in each call, as transformers' dynamic caches do."""
    plans = planned(monkeypatch, _decode_variant)
    options = dict.fromkeys(_decode_variant.options) | {
        "causal": True,
        "norm_eps": 0.0,
        "return_lse": False,
        "interleaved": False,
    }
    for length in range(1, 3000, 7):
        arrays = dict.fromkeys(_decode_variant.names)
        arrays |= {"q": tokens(2, 1, 8, 128)} | {
            name: tokens(2, length, 2, 128, MEMORY + n * ROOM) for n, name in enumerate("kv", 1)
        }
        for n, (name, shape, dtype) in enumerate((("lengths", (2,), "int32"), ("bias", (1, 8, 1, length), "float32")), 3):
            arrays[name] = Lent(MEMORY + n * ROOM, Form(shape, contiguous(shape, 4), dtype, 0, 4))
        given = tuple(arrays.values()), tuple(options.values()), "bshd"
        actual, count = gpu.call(_decode_variant, *given), len(plans)
        assert not isinstance(actual[0], type), actual
        assert length % 10 or actual == fresh(gpu.call, _decode_variant, *given)
        del plans[count:]
    assert len(plans) <= 4


def test_prompts_are_planned_a_few_times(gpu, monkeypatch):
    """linear with any length and new arrays: with several segments and with one."""
    linear = PROGRAMS["linear"]
    plans = planned(monkeypatch, linear)
    for length in range(1, 9000, 13):
        q, k, v = (tokens(1, length, 2, 64, MEMORY + n * ROOM) for n in range(3))
        launches, result = gpu.call(linear, (q, k, v, *[None] * 8), (None, False, False, None, False, "states"), "bshd")
        assert len(result) == (1 if len(launches) == 1 else 2)  # all scratch memory is one array
    assert len(plans) <= 5


def test_gradients_of_norms_are_planned_a_few_times(gpu, monkeypatch):
    """A layer norm whose weights are shared by all heads, and whose bias differs."""
    program, dim = DIFFERENTIATE["k"], 64
    norm = [
        Lent(MEMORY + n * ROOM, Form(shape, contiguous(shape, 4), "float32", 0, 4)) for n, shape in ((2, (dim,)), (3, (2, dim)))
    ]
    result, count = planned(monkeypatch, program), 0
    for length in 1, 40, 700, 1024, 5000, 0, 41:
        rows = (tokens(3, length, 2, dim, MEMORY + n * ROOM) for n in range(2))
        given = (*rows, *norm, None, None, None), (1e-6, True), "bshd"
        actual, before = gpu.call(program, *given), len(result)
        count += before
        assert actual == fresh(gpu.call, program, *given) and len(actual[0]) == (2 if length == 0 else 5)
        result.clear()
    assert count <= 3


def test_projections_are_planned_a_few_times(gpu, monkeypatch):
    """Queries, keys and values are columns of one array; parts of results lie in the same way, before all scratch memory."""
    heads, kv_heads, dim = 4, 2, 64
    both = projected, projected_backward
    result, count = [planned(monkeypatch, program) for program in both], 0
    for length in 40, 700, 4096, 41:
        whole, starts = tokens(2, length, heads + 2 * kv_heads, dim).form, (0, heads, heads + kv_heads)
        x = [
            Lent(MEMORY + 2 * dim * first, whole._replace(shape=(2, length, n, dim)))
            for first, n in zip(starts, (heads, kv_heads, kv_heads))
        ]
        tables = [Lent(MEMORY + n * ROOM, Form((length, 32), (128, 4), "float32", 0, 4)) for n in (1, 2)]
        vectors = [
            Lent(MEMORY + n * ROOM, Form((size,), (4,), "float32", 0, 4)) for n, size in ((3, dim), (4, dim), (5, heads))
        ]
        lse = Lent(MEMORY + 6 * ROOM, Form((2, heads, length), contiguous((2, heads, length), 4), "float32", 0, 4))
        out, dout, rows = (tokens(2, length, n, dim, MEMORY + at * ROOM) for n, at in ((heads, 7), (heads, 8), (6, 9)))
        given = *x, *tables, *vectors
        options = 1e-6, True, 9, None, None, None
        calls = [
            (projected, (*given, None, None, None), (*options, None), "bshd"),
            (projected_backward, (dout, *given, out, lse, rows, *[None] * 4), (*options, False, True, True, None), "bshd"),
        ]
        for call, launches in zip(calls, (2, 8)):
            before = [*map(len, result)]
            actual = gpu.call(*call)
            count += sum(map(len, result)) - sum(before)
            assert actual == fresh(gpu.call, *call) and len(actual[0]) == launches
    assert count <= 5


def test_a_seed_is_no_length_and_no_option(gpu, monkeypatch):
    """A seed is written into one slot of the arguments, like addresses: a new seed is not planned, nor is a new length with
    it."""
    plans, actual = planned(monkeypatch, _variant), {}
    options = dict.fromkeys(_variant.options) | {"causal": False, "norm_eps": 1e-6, "dropout": 0.5, "return_lse": False}
    for length, seed in (4000, 2**62 + 5), (4000, 0), (4000, 7), (3999, 7):
        arrays = tokens(2, 1, 8, 128), *(tokens(2, length, 2, 128, MEMORY + n * ROOM, 8192) for n in (1, 2))
        given = *arrays, *[None] * (len(_variant.names) - len(arrays)), tuple((options | {"seed_value": seed}).values())
        ((launch,), _) = gpu.call(_variant, given[:-1], given[-1], "bshd")
        actual[length, seed] = launch[-1]
    differ = [(x, y, z) for x, y, z in zip(*list(actual.values())[:3]) if not x == y == z]
    assert differ == [tuple(seed.to_bytes(8, "little") for seed in (2**62 + 5, 0, 7))]
    assert actual[3999, 7] != actual[4000, 7] and len(plans) == 1


def test_what_a_score_indexes_is_asked_of_every_length(gpu, monkeypatch):
    """One plan serves all lengths for which an array of aux has enough elements; a longer one is refused, as in the first
    call."""
    plans, score = planned(monkeypatch, _variant), register_function("score", lambda s, b, h, i, j, table: s + table[j])
    options = dict.fromkeys(_variant.options) | {"causal": True, "score": score, "norm_eps": 1e-6, "return_lse": False}
    table = Lent(MEMORY + 4 * ROOM, Form((4000,), (4,), "float32", 0, 4))

    def call(length):
        arrays = [tokens(2, length, 8, 128, MEMORY + n * ROOM) for n in range(3)]
        given = dict.fromkeys(_variant.names) | dict(zip("qkv", arrays)) | {"aux0": table}
        return gpu.call(_variant, tuple(given.values()), tuple(options.values()), "bshd")

    assert [len(call(length)[0]) for length in (4000, 3999, 3000)] == [1, 1, 1] and len(plans) == 1
    assert call(4001)[1].startswith("aux0: must have 4001 elements or more along axis 0, which score indexes by j: ")


def test_threads(gpu):
    """Eight threads with their own lengths and addresses: every launch is one that was expected."""

    def arrays(thread, length):
        q, out = (tokens(1, 1, 8, 64, MEMORY + (4 * thread + n) * ROOM) for n in (0, 1))
        k, v = (tokens(1, length, 8, 64, MEMORY + (4 * thread + n) * ROOM + 16 * length) for n in (2, 3))
        return (q, k, v, out, None), (thread % 2 == 0, None, False, "sm_90"), "bshd"  # one launch

    calls = [(thread, length) for thread in range(8) for length in range(1, 4000, 97)]
    expected = {each: fresh(gpu.call, _forward, *arrays(*each))[0] for each in calls}
    gpu.launches.clear()
    start, failed = threading.Barrier(8), []

    def work(number):
        start.wait()
        try:
            for thread, length in calls:
                if thread == number:
                    _forward(None, *arrays(thread, length))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and sorted(map(repr, gpu.launches)) == sorted(repr(one) for (one,) in expected.values())


def test_functions_are_limited(gpu, monkeypatch):
    """A planner that depends on the exact length plans each call, and is watched only a few times."""
    watched, real = [], _forward._trace_plan
    monkeypatch.setattr(_forward, "_trace_plan", lambda *args: watched.append(1) or real(*args))
    monkeypatch.setattr(_forward, "planner", lambda problem, *_: int(problem.extents["seqlen_k"]) and programs.Plan([]))
    for length in range(1, 60):
        arrays = tokens(1, 1, 8, 64), *(tokens(1, length, 8, 64, MEMORY + n * ROOM) for n in (1, 2)), None, None
        gpu.call(_forward, arrays, (False, None, False, None), "bshd")
    assert len(watched) == programs.PLANS_PER_KIND


def insists(problem, *_):
    """A planner that requires an int."""
    if type(problem.extents["seqlen_k"]) is not int:
        raise ValueError("T: must be an int")
    return programs.Plan([])


@pytest.mark.parametrize("planner", [lambda problem, *_: {problem.extents["seqlen_k"]} and programs.Plan([]), insists])
def test_who_cannot_be_watched_plans_each_call(gpu, monkeypatch, planner):
    """A planner that looks a length up in a table, or requires an int."""
    monkeypatch.setattr(_forward, "planner", planner)
    for length in range(1, 9):
        arrays = tokens(1, 1, 8, 64), *(tokens(1, length, 8, 64, MEMORY + n * ROOM) for n in (1, 2)), None, None
        assert gpu.call(_forward, arrays, (False, None, False, None), "bshd") == ([], [((1, 1, 8, 64), "bfloat16")])
    assert not len(programs.WATCHED_PLANS)
