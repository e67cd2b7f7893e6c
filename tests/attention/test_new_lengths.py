"""Calls of every program with lengths, batches and numbers of sequences that are new each time, on a simulated GPU: planned a
few times, where a planner decides otherwise, and after that served by functions of lengths, with the same launches.

A new program must join the table: a call whose host work grows from microseconds to milliseconds with each new length is a
stall in somebody's server."""

import functools
import itertools
import pkgutil
import random
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from on_no_device import MEMORY, ROOM, Lent, fresh, noting_driver

import attention
from attention.scoring.python_functions import register_function
from tiles.calls.program import Program
from tiles.calls.schema import Schema
from tiles.launching.arrays import ITEMSIZE, Form, contiguous

CALLS, MOST = 24, 8  # of each program; those that may be planned
NOTHING: Mapping[str, Any] = MappingProxyType({})
ADDRESSES = 2**20  # how many multiples of 256 an array may begin at


class NewLengths(NamedTuple):
    """How a program is called. arrays: the optional ones that are passed. options: other than the defaults of `default`.
    fixed: extents that are no lengths. drawn: extents by name, functions of a Random and the extents before. holds: dtypes by
    argument. axes: those of arrays of any shape. plans: the most calls that may be planned."""

    arrays: tuple[str, ...] = ()
    options: Mapping[str, Any] = NOTHING
    fixed: Mapping[str, int] = NOTHING
    drawn: Mapping[str, Callable] = NOTHING
    holds: Mapping[str, str] = NOTHING
    axes: Mapping[str, tuple[str, ...]] = NOTHING
    plans: int = MOST


@functools.cache
def programs() -> dict[str, Program]:
    """{name of the schema: program} of all programs in attention."""
    actual: dict[str, Program] = {}
    for module in pkgutil.walk_packages(attention.__path__, "attention."):
        if "__main__" in module.name or ".compat" in module.name:
            continue
        try:
            values = vars(import_module(module.name)).values()
        except ImportError:  # of what is not installed here
            continue
        tables = [x.values() for x in values if isinstance(x, dict)]
        for value in [*values, *itertools.chain.from_iterable(tables)]:
            if isinstance(value, Program):
                assert actual.setdefault(value.schema.name, value).schema is value.schema, value.schema.name
    return actual


HEADS = {"heads": 8, "heads_k": 2, "heads_qk": 10, "heads_qkv": 12, "alibi_heads": 8}
COLUMNS = dict.fromkeys(["head_dim", "head_dim_v", "key_dim", "value_dim", "features", "state_columns"], 128)
CHANNELS = {"channels": 512, "width": 4, "window": 3}
FIXED = {**HEADS, **CHANNELS, **COLUMNS, "rotary_dim": 64, "pairs": 64, "1": 1, "alibi_batch": 1, "positions": 10000}
DEFAULTS = {bool: False, float: 1e-6, str: "", int: 0}


def lengths_of(schema: Schema, how: NewLengths, rng: random.Random) -> dict[str, int]:
    """Extents of all axes, those that are lengths drawn anew."""
    batch, sequences = rng.randint(2, 9), rng.randint(2, 9)
    packed = "cu_seqlens" in how.arrays
    extents = FIXED | {"batch": 1 if packed else batch, "sequences": sequences if packed else batch}
    extents |= {name: rng.randint(70, 9000) for name in ("seqlen", "seqlen_q", "seqlen_k", "seqlen_local")}
    extents |= {
        "seqlen_new": rng.randint(1, 64),
        "pages_per_seq": rng.randint(2, 60),
        "segments": rng.randint(2, 40),
        "parts": 2,
    }
    extents |= {"ends": extents["sequences"] + 1, "batch_cache": rng.randint(70, 300) if "pages" in how.arrays else batch}
    extents |= {"blocks": rng.randint(2, 80), "blocks_q": rng.randint(2, 80), "blocks_k": rng.randint(2, 80)}
    extents |= {"seqlen_q": extents["seqlen_q"] // 2 * 2, "blocks_plus_1": extents["blocks_k"] + 1}
    if packed:
        extents["seqlen_k"] = extents["seqlen_q"]  # cu_seqlens are those of keys, too
    extents |= how.fixed
    for name, draw in how.drawn.items():
        extents[name] = draw(rng, extents)
    return extents


def a_call(program: Program, how: NewLengths, rng: random.Random) -> tuple:
    """(arrays, options, layout), at new addresses."""
    extents, memory, arrays = lengths_of(program.schema, how, rng), itertools.count(MEMORY, ROOM), {}
    for name, row in program.schema.arguments.items():
        if not (row.needed or name in how.arrays):
            continue
        axes = how.axes.get(name) or row.axes[0]
        shape = arrays[row.like].form.shape if row.like else tuple(extents[axis] for axis in axes)
        dtype = how.holds.get(name) or ("bfloat16" if row.holds == "tile" else row.dtypes[0])
        size = ITEMSIZE[dtype]
        form = Form(shape, contiguous(shape, size), dtype, 0, size)
        arrays[name] = Lent(next(memory) + 256 * rng.randrange(ADDRESSES), form)
    options = {name: DEFAULTS.get(kind) for name, kind in program.option_types.items()} | how.options
    return tuple(arrays.get(name) for name in program.schema.names), tuple(options.values()), "bshd"


def score(s, b, h, i, j, table):
    """A score in Python, which reads an array."""
    return s + table[h]


def mask(b, h, i, j):
    """A mask in Python that is no window."""
    return (i // 64) >= (j // 64)


MASK, SCORE = register_function("mask", mask), register_function("score", score)
PLAIN, PACKED, PAGED = NewLengths(), NewLengths(("cu_seqlens",)), NewLengths(("pages",), fixed={"seqlen_k": 64})
BASED = {"key_dim": 16, "features": 160}
NORM = {"head_dim": 128}
BOTH = "ddecay dinitial_state dinitial_z"
MLA = {"head_dim": 576, "head_dim_v": 512}
NEW_KEYS = {"seqlen_k": lambda rng, at: 9000 + rng.randrange(64)}  # a cache with room for them
PACKED_CACHE = NewLengths(("cu_seqlens",), drawn={"batch_cache": lambda rng, at: at["sequences"]})
PAGED_PACKED = NewLengths(("cu_seqlens", "pages"), fixed={"seqlen_k": 64})
FP8_CACHE = {"k": "float8_e4m3fn", "v": "float8_e4m3fn"}
ROTATED = "cos", "sin"
TOKEN_GATES = "batch", "seqlen", "heads"
VARIANT = [
    PLAIN,
    PACKED,
    NewLengths(("alibi", "sink"), {"softcap": 30.0, "left": 500}),
    NewLengths(("bias",), fixed={"bias_batch": 1, "bias_heads": 1}, drawn={"bias_seqlen": lambda rng, at: at["seqlen_q"]}),
    NewLengths(("q_norm", "k_norm", "lengths_k")),
    NewLengths(options={"mask": MASK}),
    NewLengths(("aux0",), {"score": SCORE}, holds={"aux0": "float32"}, axes={"aux0": ("heads",)}),
    NewLengths(options={"dropout": 0.1, "seed_value": 7}),
]
RAW = NewLengths(("gate", "A_log", "dt_bias"), {"formula": "softplus"})
RAW_CHANNELS = NewLengths(
    ("gate", "A_log", "dt_bias"),
    {"formula": "sigmoid", "number": -5.0, "l2norm": True},
    holds={"gate": "bfloat16"},
    axes={"gate": (*TOKEN_GATES, "key_dim"), "dt_bias": ("heads", "key_dim")},
)
LONG_CHANNELS = NewLengths(  # gates choose between two ways of launches
    ("decay",),
    fixed={"heads": 8, "batch": 1, "sequences": 1},
    drawn={"seqlen": lambda rng, at: rng.randrange(16000, 40000)},
    axes={"decay": (*TOKEN_GATES, "key_dim")},
)
TABLE: dict[str, list[NewLengths]] = {
    "forward": [PLAIN, NewLengths(options={"causal": True, "return_lse": True})],
    "forward_variant": VARIANT,
    "forward_unrounded": [PLAIN, PACKED],
    "forward_joined": [PLAIN, PACKED],
    "forward_fp8": [PLAIN, PACKED],
    "forward_fp8_cache": [PLAIN, PACKED],
    "forward_two_buffers": [PLAIN],
    "forward_streaming": [PLAIN],
    "block_lists": [NewLengths(options={"mask": MASK}, plans=CALLS)],  # made once for many calls, whose lengths they hold
    "backward": [PLAIN, NewLengths(options={"causal": True, "deterministic": True})],
    "backward_variant": [*VARIANT[:4], *VARIANT[5:]],
    "backward_into": [PLAIN, PACKED],
    **{f"norm_{x}{of}": [PLAIN] for x in "qk" for of in ("", "_gradient", "_gradient_into")},
    **{f"zeros_{x}": [PLAIN] for x in "qk"},
    "projected": [PLAIN, NewLengths(("q_norm", "k_norm", "sink"))],
    "projected_backward": [PLAIN],
    "decode": [PLAIN, PAGED],
    "decode_variant": [PLAIN, PAGED, PACKED_CACHE, NewLengths(options={"mask": MASK})],
    "decode_append": [NewLengths(drawn=NEW_KEYS), PAGED],
    "decode_append_quantising": [NewLengths(holds=FP8_CACHE, drawn=NEW_KEYS)],
    "append": [PLAIN, PAGED, PAGED_PACKED],
    "append_with_queries": [NewLengths(ROTATED)],
    "append_quantising": [NewLengths(holds=FP8_CACHE)],
    "append_quantising_with_queries": [NewLengths(ROTATED, holds=FP8_CACHE)],
    "quantize": [PLAIN],
    "quantize_blocks": [PLAIN],
    "mla_decode": [NewLengths(fixed=MLA), PAGED._replace(fixed=MLA | PAGED.fixed)],
    "mla_decode_fp8": [NewLengths(fixed=MLA), PAGED._replace(fixed=MLA | PAGED.fixed)],
    "linear": [PLAIN, PACKED, NewLengths(("decay",)), NewLengths(options={"normalize": True})],
    "linear_backward": [
        PLAIN,
        NewLengths(("cu_seqlens", "decay", "dstate"), {"grads": "ddecay dinitial_state"}, axes={"decay": TOKEN_GATES}),
        NewLengths(("decay", "initial_state", "dstate"), {"grads": "ddecay"}, axes={"decay": (*TOKEN_GATES, "key_dim")}),
        NewLengths(("decay", "dfinal_z"), {"grads": BOTH, "normalize": True}),
    ],
    "linear_backward_into": [
        PLAIN,
        NewLengths(
            ("decay", "ddecay", "dinitial_z", "dinitial_state"),
            {"grads": BOTH, "normalize": True},
            axes={"decay": TOKEN_GATES},
        ),
    ],
    "linear_backward_from_segments": [
        NewLengths(("decay", "dstate"), {"grads": "ddecay"}, {"heads_k": 8}, axes={"decay": TOKEN_GATES}),
    ],
    "linear_step": [PLAIN],
    "linear_raw": [RAW, RAW_CHANNELS, NewLengths(("cu_seqlens",), {"l2norm": True})],
    "linear_step_raw": [RAW],
    "linear_segments": [PLAIN, PACKED],
    "linear_composed_states": [PLAIN],
    "linear_outputs_from_segments": [PLAIN, PACKED],
    "delta_rule": [
        PLAIN,
        PACKED,
        NewLengths(("decay",)),
        LONG_CHANNELS,
        LONG_CHANNELS._replace(fixed={"heads": 4, "batch": 1}),
    ],
    "delta_rule_backward": [
        PLAIN,
        NewLengths(("cu_seqlens", "decay", "dstate"), {"grads": "ddecay dinitial_state"}, axes={"decay": TOKEN_GATES}),
        NewLengths(("decay", "initial_state", "dstate"), {"grads": "ddecay"}, axes={"decay": (*TOKEN_GATES, "key_dim")}),
    ],
    "delta_rule_backward_into": [
        NewLengths(("decay", "ddecay", "dinitial_state"), {"grads": "ddecay dinitial_state"}, axes={"decay": TOKEN_GATES})
    ],
    "delta_rule_states": [PLAIN],
    "delta_rule_raw": [RAW, RAW_CHANNELS, NewLengths(("cu_seqlens",), {"beta_scale": 2.0, "l2norm": True})],
    "mamba2": [PLAIN, PACKED],
    "mamba2_backward": [
        PLAIN,
        NewLengths(("D", "z", "dt_bias", "dstates", "cu_seqlens"), {"grads": "dD dz ddt_bias dinitial_states"}),
    ],
    "mamba2_backward_into": [PLAIN],
    "mamba2_segments": [PLAIN, PACKED],
    "mamba2_outputs_from_segments": [PLAIN, PACKED],
    "short_conv": [PLAIN, NewLengths(("cu_seqlens", "bias", "initial_state"), {"activation": "silu", "return_state": True})],
    "short_conv_backward": [
        PLAIN,
        NewLengths(("cu_seqlens", "bias", "initial_state", "dstate"), {"activation": "silu", "grads": "dbias dinitial_state"}),
    ],
    "gated_rms_norm": [NewLengths(fixed=NORM), NewLengths(("gate",), {"activation": "sigmoid"}, NORM)],
    "gated_rms_norm_backward": [NewLengths(("gate",), {"norm_before_gate": False, "grads": "dgate"}, NORM)],
    "l2norm": [NewLengths(fixed=NORM)],
    "l2norm_backward": [NewLengths(fixed=NORM)],
    "channel_gates": [NewLengths(("A_log", "dt_bias"), {"formula": "softplus"})],
    "channel_gates_backward": [NewLengths(("A_log", "dt_bias"), {"formula": "softplus", "grads": "dA_log ddt_bias"})],
    "based": [NewLengths(fixed=BASED)],
    "based_backward": [
        NewLengths(fixed=BASED),
        NewLengths(("cu_seqlens", "dstate", "dz"), {"normalize": True, "grads": "dinitial_state dinitial_z"}, BASED),
    ],
    "hedgehog": [NewLengths(fixed={"features": 64})],
    "hedgehog_backward": [NewLengths(extra, fixed={"features": 64}) for extra in ((), ("cu_seqlens",))],
}


@pytest.fixture
def gpu(monkeypatch):
    with noting_driver(monkeypatch) as noted:
        yield noted


def test_all_programs_are_listed():
    assert programs().keys() == TABLE.keys()


@pytest.mark.parametrize(("name", "n"), [(name, n) for name, forms in TABLE.items() for n in range(len(forms))])
def test_new_lengths_are_planned_a_few_times(gpu, monkeypatch, name, n):
    program, how, rng, planned = programs()[name], TABLE[name][n], random.Random(n), []
    plans = program._plan_and_compile
    monkeypatch.setattr(program, "_plan_and_compile", lambda *args: planned.append(1) or plans(*args))
    for call in range(CALLS):
        arguments = a_call(program, how, rng)
        launches, result = gpu.call(program, *arguments)
        assert not isinstance(launches, type), result  # an error and its text
        if call % 8 == 7:
            count = len(planned)
            assert (launches, result) == fresh(gpu.call, program, *arguments)
            del planned[count:]
    assert 1 <= len(planned) <= how.plans
