"""The arguments of linear attention's members: the problems of valid calls, and errors with the argument's name and values."""

from inspect import signature
from typing import get_type_hints

import ml_dtypes
import numpy as np
import pytest

from attention import based, delta_rule, gla, hedgehog, lightning, linear, linear_step, mamba2, reference, retention
from attention.plans.recurrent import recurrent_checks
from attention.public.based_features import BASED
from attention.public.delta_rules import DELTA_RULE
from attention.public.hedgehog_features import HEDGEHOG
from attention.public.linear_family import LINEAR, LinearArguments
from attention.public.mamba import MAMBA2
from attention.public.token_steps import STEP
from tiles.launching.frameworks import describe

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
EXTENTS = dict(batch=2, seqlen=5, heads_k=3, heads=6, key_dim=32, value_dim=16, sequences=2, ends=2, features=160)
MEMBERS = {  # name: (function, schema, extents that differ from EXTENTS)
    "linear": (linear, LINEAR, {}),
    "delta_rule": (delta_rule, DELTA_RULE, {}),
    "mamba2": (mamba2, MAMBA2, {}),
    "linear_step": (linear_step, STEP, {}),
    "based": (based, BASED, {"key_dim": 16}),
    "hedgehog": (hedgehog, HEDGEHOG, {"features": 64}),
}
all_members = pytest.mark.parametrize("member", MEMBERS)


def zeros(*shape, dtype=bf16):
    return np.zeros(shape, dtype)


def valid(member, name, choice=0, **extents):
    """A valid argument: zeros of the shape and dtype that the schema names."""
    _, schema, extents_of_member = MEMBERS[member]
    argument = schema.arguments[name]
    dtype = bf16 if argument.holds == "tile" else np.dtype(argument.dtypes[0])
    return np.zeros([(EXTENTS | extents_of_member | extents)[axis] for axis in argument.axes[choice]], dtype)


def required_arrays(member, **extents):
    """Valid arrays for all arguments that have no default."""
    schema = MEMBERS[member][1]
    return {name: valid(member, name, **extents) for name in schema.names if schema.arguments[name].needed}


def call(member="linear", options=None, **arrays):
    """Call the function with these NumPy arrays, and valid ones for all other arguments that have no default."""
    return MEMBERS[member][0](**required_arrays(member) | arrays, **(options or {}))


def problem(member="linear", layout="bshd", **arrays):
    """The Problem of such a call, checked."""
    schema = MEMBERS[member][1]
    args = required_arrays(member) | arrays
    forms = {name: describe(args[name], name).form for name in schema.names if name in args}
    result = schema.problem(forms, layout)
    recurrent_checks.check_extents(result, *(("B", "x") if member == "mamba2" else ()))
    return result


# ---- valid calls -----------------------------------------------------------------------------------------------------
def test_extents_and_results():
    p = problem(initial_state=valid("linear", "initial_state"))
    assert p("batch", "seqlen", "heads_k", "heads", "key_dim", "value_dim", "sequences") == (2, 5, 3, 6, 32, 16, 2) and (
        p.dtype,
        p.layout,
        p.device,
    ) == ("bfloat16", "bshd", None)
    assert p.result_form("out") == ((2, 5, 6, 16), "bfloat16") and p.result_form("state") == ((2, 6, 32, 16), "float32")
    assert p.result_form("final_z") == ((2, 6, 32), "float32") and p["initial_state"].form.shape == (2, 6, 32, 16)
    assert p["q"].form.strides == (5 * 3 * 64, 3 * 64, 64, 2) and p["out"].form.strides == (5 * 6 * 32, 6 * 32, 32, 2)
    assert (
        p.by_tma
        and recurrent_checks.resolve_scale(p, None) == 32**-0.5
        and not recurrent_checks.has_channel_decay(p)
        and not recurrent_checks.is_varlen(p)
    )


@all_members
def test_the_first_argument_decides_the_framework_of_results(member):
    schema = MEMBERS[member][1]
    assert problem(member).member == schema.name == member
    first = schema.arguments[schema.names[0]]
    assert first.holds == "tile" and first.needed and "out" in schema.names


def test_mamba2_has_its_own_names_and_a_transposed_state():
    args = dict(initial_states=valid("mamba2", "initial_states"), D=valid("mamba2", "D", 1), z=valid("mamba2", "z"))
    p = problem("mamba2", **args)
    assert p("heads", "heads_k", "key_dim", "value_dim") == (6, 3, 32, 16) and p.result_form("states")[0] == (2, 6, 16, 32)
    assert p["C"].form.shape == (2, 5, 3, 32) and p["x"].form.shape == (2, 5, 6, 16) and p["D"].form.shape == (6, 16)


def test_a_step_has_no_sequence():
    p = problem("linear_step", decay=valid("linear_step", "decay", 1))
    assert p("batch") == (2,) and p.result_form("out")[0] == (2, 6, 16) and p["state"].form.shape == (2, 6, 32, 16)


@pytest.mark.parametrize("member", ["linear", "delta_rule"])
@pytest.mark.parametrize("choice, shape", list(enumerate([(6,), (2, 5, 6), (2, 5, 6, 32)])))
def test_shapes_of_decay(member, choice, shape):
    decay = valid(member, "decay", choice)
    p = problem(member, decay=decay)
    assert p["decay"].form.shape == shape and recurrent_checks.has_channel_decay(p) == (choice == 2)
    assert problem(member, decay=decay.astype(bf16))["decay"].form.dtype == "bfloat16"


@pytest.mark.parametrize("member", ["linear", "delta_rule"])
def test_packed_sequences(member):
    args = required_arrays(member, batch=1, seqlen=9)
    ends = zeros(4, dtype=np.int64)
    p = problem(member, **args, cu_seqlens=ends, initial_state=zeros(3, 6, 32, 16, dtype=f32))
    assert (
        p("batch", "sequences", "seqlen") == (1, 3, 9)
        and p.result_form("state")[0] == (3, 6, 32, 16)
        and recurrent_checks.is_varlen(p)
    )
    assert p["cu_seqlens"].form.dtype == "int64"


def test_layouts_differ_only_in_the_callers_axes():
    arrays = required_arrays("delta_rule") | {"decay": valid("delta_rule", "decay", 2)}
    turned = {name: x.swapaxes(1, 2) for name, x in arrays.items()}
    bshd, bhsd = problem("delta_rule", **arrays), problem("delta_rule", "bhsd", **turned)
    assert bhsd.forms == bshd.forms and bhsd.extents == bshd.extents
    assert bhsd.result_form("out")[0] == (2, 6, 5, 16) and bhsd["out"].form.shape == (2, 5, 6, 16)
    assert bhsd["out"].form.strides == (6 * 5 * 32, 32, 5 * 32, 2) and bhsd.result_form("state")[0] == (2, 6, 32, 16)


@pytest.mark.parametrize("member", ["linear", "delta_rule", "mamba2", "based", "hedgehog"])
@pytest.mark.parametrize("empty", [{"batch": 0, "sequences": 0}, {"seqlen": 0}])
def test_empty_tensors(member, empty):
    args = required_arrays(member, **empty)
    values = args["x" if member == "mamba2" else "v"]
    assert call(member, **args).shape == values.shape


def test_strides_that_do_not_matter_and_broadcast_gates():
    q = np.lib.stride_tricks.as_strided(zeros(160), (1, 5, 1, 32), (6, 64, -14, 2))
    p = problem(q=q, k=q, v=q, decay=np.broadcast_to(f32(-1), (1, 5, 1)))
    assert p.by_tma and p["decay"].form.strides == (0, 0, 0)


def test_any_strides_of_a_state():
    turned = zeros(2, 6, 16, 32, dtype=f32).swapaxes(2, 3)
    assert problem(initial_state=turned)["initial_state"].form.strides == (6 * 16 * 128, 16 * 128, 4, 128)


VIEWS = {
    "sequence backwards": lambda x: x[:, ::-1],
    "heads backwards": lambda x: x[:, :, ::-1],
    "one row for all": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one head for all": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("member", ["linear", "delta_rule"])
def test_any_strides(member, name, view):
    """Negative strides and strides of 0, of each argument and of out."""
    rng = np.random.default_rng(0)
    args = {key: (rng.standard_normal((1, 70, 2, 64)) / 4).astype(bf16) for key in "qkv"}
    beta = {"beta": np.full((1, 70, 2), 0.5, f32)} if member == "delta_rule" else {}
    args[name] = VIEWS[view](args[name])
    plain = {key: np.ascontiguousarray(x) for key, x in args.items()} | beta
    out = np.full((1, 70, 2, 64), np.nan, bf16)[:, ::-1, ::-1]
    assert call(member, **args | beta, out=out) is out
    reference.assert_close(out, reference.linear(**plain)[0], reference.linear(**plain, low=True)[0])


@all_members
def test_inputs_may_overlap(member):
    """Arrays that are not written may overlap."""
    _, schema, _ = MEMBERS[member]
    args = required_arrays(member, heads_k=6, key_dim=16)
    memory = np.zeros(max(x.nbytes for x in args.values()), np.uint8)
    shared = {name: np.ndarray(x.shape, x.dtype, memory) for name, x in args.items() if not schema.arguments[name].written}
    assert call(member, **args | shared).shape == args["x" if member == "mamba2" else "v"].shape


# ---- invalid calls ---------------------------------------------------------------------------------------------------
T, V = TypeError, ValueError
REAL = "dtype must be one of ('float32', 'bfloat16', 'float16')"
INVALID = [
    (dict(q=zeros(2, 5, 32)), V, "q: must have the axes B, S, Hk, Dk: q.shape=(2, 5, 32)"),
    (dict(q=zeros(2, 5), options={"layout": "bhsd"}), V, "q: must have the axes B, Hk, S, Dk: q.shape=(2, 5)"),
    (dict(decay=zeros(2, 6, dtype=f32)), V, "decay: must have the axes H; or B, S, H; or B, S, H, Dk: decay.shape=(2, 6)"),
    (dict(q=zeros(2, 5, 3, 32, dtype=f32)), T, "q: dtype must be one of ('bfloat16', 'float16'): q.dtype='float32'"),
    (dict(v=zeros(2, 5, 6, 16, dtype=f16)), T, "v: dtype must be q's: v.dtype='float16', q.dtype='bfloat16'"),
    (dict(decay=zeros(6, dtype=float)), T, f"decay: {REAL}: decay.dtype='float64'"),
    (dict(initial_state=zeros(2, 6, 32, 16)), T, "initial_state: dtype must be one of ('float32',): initial_state.dtype='bf"),
    (
        dict(cu_seqlens=zeros(3, dtype=f32)),
        T,
        "cu_seqlens: dtype must be one of ('int32', 'int64'): cu_seqlens.dtype='float32'",
    ),
    (dict(k=zeros(3, 5, 3, 32)), V, "k: batch must equal q's: k.shape=(3, 5, 3, 32), q.shape=(2, 5, 3, 32)"),
    (dict(k=zeros(2, 5, 2, 32)), V, "k: heads must equal q's: k.shape=(2, 5, 2, 32), q.shape=(2, 5, 3, 32)"),
    (dict(v=zeros(2, 7, 6, 16)), V, "v: sequence must equal q's: v.shape=(2, 7, 6, 16), q.shape=(2, 5, 3, 32)"),
    (dict(v=zeros(2, 5, 4, 16)), V, "v: heads must be a multiple of q's: v.shape=(2, 5, 4, 16), q.shape=(2, 5, 3, 32)"),
    (dict(k=zeros(2, 5, 3, 48)), V, "k: key_dim must equal q's: k.shape=(2, 5, 3, 48), q.shape=(2, 5, 3, 32)"),
    (
        dict(v=zeros(2, 5, 6, 24)),
        V,
        "v: value_dim must be a multiple of 16, from 16 to 256; pad it with columns of zeros: value_dim=24: v.shape=(2, 5, ",
    ),
    (
        dict(q=zeros(2, 5, 3, 24), k=zeros(2, 5, 3, 24)),
        V,
        "q: key_dim must be a multiple of 16, from 16 to 256; pad it with columns of zeros, and pass scale: key_dim=24: q.",
    ),
    (dict(v=zeros(2, 5, 6, 272)), V, "v: value_dim must be a multiple of 16, from 16 to 256: value_dim=272"),
    (dict(q=zeros(2, 5, 3, 0), k=zeros(2, 5, 3, 0)), V, "q: key_dim must be a multiple of 16, from 16 to 256: key_dim=0"),
    (dict(q=zeros(2, 5, 0, 32), k=zeros(2, 5, 0, 32)), V, "q: must have at least one head: q.shape=(2, 5, 0, 32)"),
    (dict(decay=zeros(3, dtype=f32)), V, "decay: heads must equal v's: decay.shape=(3,), v.shape=(2, 5, 6, 16)"),
    (
        dict(initial_state=zeros(3, 6, 32, 16, dtype=f32)),
        V,
        "initial_state: sequences must equal q's: initial_state.shape=(3, ",
    ),
    (dict(initial_state=zeros(2, 6, 16, 32, dtype=f32)), V, "initial_state: key_dim must equal q's: initial_state.shape=(2"),
    (dict(cu_seqlens=zeros(3, dtype=np.int32)), V, "cu_seqlens: batch must be 1, all sequences one after the other: cu_"),
    (dict(cu_seqlens=zeros(1, dtype=np.int32)), V, "cu_seqlens: must have two elements or more: cu_seqlens.shape=(1,)"),
    (dict(options={"layout": "sbhd"}), V, "layout: must be one of ('bshd', 'bhsd'): layout='sbhd'"),
    (dict(options={"layout": ["bshd"]}), T, "layout: must be one of ('bshd', 'bhsd'): layout=['bshd']"),
    (dict(options={"normalize": 1}), T, "normalize: must be a bool: normalize=1"),
    (dict(options={"return_state": 1}), T, "return_state: must be a bool: return_state=1"),
    (dict(options={"scale": "1"}), T, "scale: must be a number or None: scale='1'"),
    (dict(options={"scale": float("nan")}), V, "scale: must be finite in float32: scale=nan"),
    (dict(options={"scale": 1e40}), V, "scale: must be finite in float32: scale=1e+40"),
    (dict(options={"family": "sm_70"}), V, "family: must be None or one of ('sm_80', 'sm_90'): family='sm_70'"),
    (dict(k=zeros(2, 5, 3, 64)[..., ::2]), V, "k: last axis must be contiguous: k.strides=(1920, 384, 128, 4)"),
    (dict(decay=zeros(2, 5, 6, 64, dtype=f32)[..., ::2]), V, "decay: last axis must be contiguous: decay.strides=(7680, "),
    (dict(decay=zeros(2, 5, 6, dtype=f32)[::-1]), V, "decay: strides must not be negative: decay.strides=(-120, 24, 4)"),
    (dict(out=zeros(2, 5, 6, 32)), V, "out: value_dim must equal v's: out.shape=(2, 5, 6, 32), v.shape=(2, 5, 6, 16)"),
    (
        dict(out=np.lib.stride_tricks.as_strided(zeros(960), (2, 5, 6, 16), (0, 192, 32, 2))),
        V,
        "out: its elements must not over",
    ),
    (
        dict(member="delta_rule", beta=zeros(2, 6, 5, dtype=f32)),
        V,
        "beta: sequence must equal q's: beta.shape=(2, 6, 5), q.shape=",
    ),
    (dict(member="delta_rule", beta=None), T, "beta: must be an array"),
    (dict(member="mamba2", dt=zeros(2, 5, 3, dtype=f32)), V, "dt: heads must equal x's: dt.shape=(2, 5, 3), x.shape=(2, 5, 6"),
    (dict(member="mamba2", x=zeros(2, 5, 6, 24)), V, "x: headdim must be a multiple of 16, from 16 to 256; pad it with"),
    (dict(member="mamba2", B=zeros(2, 5, 32)), V, "B: must have the axes B, S, G, N: B.shape=(2, 5, 32); B[:, :, None] has"),
    (dict(member="mamba2", C=zeros(2, 5, 3, 16)), V, "C: d_state must equal B's: C.shape=(2, 5, 3, 16), B.shape=(2, 5, 3, 32)"),
    (
        dict(member="mamba2", B=zeros(2, 5, 4, 32), C=zeros(2, 5, 4, 32)),
        V,
        "x: heads must be a multiple of B's: x.shape=(2, 5, ",
    ),
    (
        dict(member="mamba2", D=zeros(6, 32, dtype=f32)),
        V,
        "D: headdim must equal x's: D.shape=(6, 32), x.shape=(2, 5, 6, 16)",
    ),
    (dict(member="mamba2", options={"dt_softplus": 1}), T, "dt_softplus: must be a bool: dt_softplus=1"),
    (
        dict(member="linear_step", decay=zeros(2, 5, 6, 32, dtype=f32)),
        V,
        "decay: must have the axes H; or B, H; or B, H, Dk: decay.",
    ),
    (
        dict(member="based", initial_state=zeros(2, 6, 160, 16, dtype=f32)),
        T,
        "initial_state: must be a pair (state, z) with norm",
    ),
    (
        dict(member="based", initial_state=zeros(2, 6, 159, 16, dtype=f32), options={"normalize": False}),
        V,
        "initial_state: must have 160 features: initial_state.shape=(2, 6, 159, 16)",
    ),
    (
        dict(member="hedgehog", k_map=zeros(3, 32, 65)),
        V,
        "k_map: features must equal q_map's: k_map.shape=(3, 32, 65), q_map.shape",
    ),
    (
        dict(member="hedgehog", alphas=zeros(5, dtype=f32)),
        V,
        "alphas: heads must equal v's: alphas.shape=(5,), v.shape=(2, 5, 6,",
    ),
    (dict(member="hedgehog", betas=zeros(6)), T, "betas: dtype must be one of ('float32',): betas.dtype='bfloat16'"),
    (dict(member="hedgehog", options={"window": 65}), V, "window: must be 64: window=65"),
]


@pytest.mark.parametrize("arguments, error, message", INVALID, ids=[message[:60] for *_, message in INVALID])
def test_invalid(arguments, error, message):
    for _ in range(2):  # a refusal is never remembered as a success
        with pytest.raises(error) as raised:
            call(**arguments)
        assert str(raised.value).startswith(message)


@all_members
def test_a_missing_array_is_named(member):
    for name in required_arrays(member):
        with pytest.raises(TypeError, match=rf"^{name}: must be an array"):
            call(member, **{name: None})


@all_members
def test_devices(member):
    schema = MEMBERS[member][1]
    forms = {name: describe(x, name).form for name, x in required_arrays(member).items()}
    for name in schema.names[1:]:
        if name in forms:
            with pytest.raises(ValueError, match=rf"^{name}: must lie where {schema.names[0]} does .*{name}\.device=1"):
                schema.problem(forms | {name: forms[name]._replace(device=1)})


@pytest.mark.parametrize(
    "member, name", [("linear", "q"), ("linear", "out"), ("delta_rule", "k"), ("mamba2", "x"), ("based", "v")]
)
def test_addresses_between_elements(member, name):
    plain = valid(member, name)
    shifted = np.ndarray(plain.shape, bf16, np.zeros(plain.nbytes + 1, np.uint8), offset=1)
    with pytest.raises(
        ValueError, match=rf"^{name}: address and strides must be multiples of its elements' 2 bytes: address \d"
    ):
        call(member, **{name: shifted})


@pytest.mark.parametrize("member", ["based", "hedgehog"])
def test_hopper_only_members_need_multiples_of_16_bytes(member):
    plain = valid(member, "v")
    shifted = np.ndarray(plain.shape, bf16, np.zeros(plain.nbytes + 16, np.uint8), offset=8)
    for v in shifted, plain[:, ::-1]:
        words = rf"^attention.{member}: takes addresses and positive strides that are multiples of 16.*; pass a copy of v$"
        with pytest.raises(ValueError, match=words):
            call(member, v=v)


@pytest.mark.parametrize("name", ["q", "decay", "initial_state"])
def test_out_must_not_overlap(name):
    args = valid("linear", name, 1 if name == "decay" else 0)
    memory = np.zeros(2 * args.nbytes + 2 * 5 * 6 * 32, np.uint8)
    overlapping = np.ndarray(args.shape, args.dtype, memory)
    out = np.ndarray((2, 5, 6, 16), bf16, memory, offset=args.nbytes - 16)
    with pytest.raises(ValueError, match=rf"^out: must not overlap {name}: out at 0x\w+, {name} at 0x\w+, out\.shape="):
        call(**{name: overlapping}, out=out)


def test_the_state_of_a_step_must_not_overlap():
    state, q = valid("linear_step", "state"), valid("linear_step", "q")
    inside = np.ndarray(q.shape, bf16, state)
    with pytest.raises(ValueError, match=r"^state: must not overlap q: state at 0x\w+, q at 0x\w+, state\.shape="):
        call("linear_step", state=state, q=inside)
    with pytest.raises(ValueError, match=r"^(state|out): must not overlap (out|state)"):
        call("linear_step", state=state, out=np.ndarray((2, 6, 16), bf16, state))


@pytest.mark.parametrize("member, name", [("linear", "out"), ("linear_step", "state"), ("mamba2", "out"), ("hedgehog", "out")])
def test_outputs_must_be_writable(member, name):
    array = valid(member, name)
    array.flags.writeable = False
    with pytest.raises(ValueError, match=f"^{name}: must be writable, and this array is read-only"):
        call(member, **{name: array})


def test_the_state_of_a_step_must_not_have_strides_of_0():
    state = np.lib.stride_tricks.as_strided(zeros(6, 32, 16, dtype=f32), (2, 6, 32, 16), (0, 2048, 64, 4))
    with pytest.raises(ValueError, match="^state: its elements must not overlap each other: state.strides=.0, "):
        call("linear_step", state=state)


# ---- values ----------------------------------------------------------------------------------------------------------
@all_members
def test_checked_values(member):
    """Decays above 0 and an invalid cu_seqlens raise errors before any launch, in all of their shapes."""
    schema, extents = MEMBERS[member][1], {"batch": 1, "sequences": 1} if "cu_seqlens" in MEMBERS[member][1].names else {}
    for name, argument in schema.arguments.items():
        for choice in range(len(argument.axes) if not argument.result else 0):
            wrong = valid(member, name, choice, **extents)
            if argument.holds in ("log", "rate"):
                wrong.flat[-1] = 0.5
                at = ", ".join(str(n - 1) for n in wrong.shape)
                message = rf"^{name}: must not be above 0: {name}\[{at}\]=0.5, {name}.shape="
            elif argument.holds == "ends":
                message = r"^cu_seqlens: must end at 5, the length of all sequences together: cu_seqlens\[1\]=0"
            else:
                continue
            with pytest.raises(ValueError, match=message):
                call(member, **required_arrays(member, **extents) | {name: wrong})


def test_arguments_with_checked_values():
    holds = {(row.holds, name) for _, schema, _ in MEMBERS.values() for name, row in schema.arguments.items()}
    assert {("log", "decay"), ("rate", "A"), ("ends", "cu_seqlens")} <= holds
    assert not {("real", "decay"), ("real", "A"), ("index", "cu_seqlens")} & holds


@pytest.mark.parametrize("member", [retention, lightning, gla])
def test_members_take_linears_arguments(member):
    """All but the decays, with the same types and defaults; an option of linear that LinearArguments lacks would be refused."""
    all_parameters = signature(linear).parameters
    passed = {name: x for name, x in all_parameters.items() if name not in ("q", "k", "v", "decay")}
    parameters = signature(member).parameters
    assert (
        [*passed] == [*LinearArguments.__annotations__] == [name for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY]
    )
    types = get_type_hints(LinearArguments)
    assert all(types[name] == x.annotation and parameters[name].default == x.default for name, x in passed.items())
    with pytest.raises(TypeError, match=rf"^{member.__name__}\(\) got an unexpected keyword argument 'head_first'"):
        member(zeros(1, 5, 1, 16), zeros(1, 5, 1, 16), zeros(1, 5, 1, 16), 1, 1, head_first=True)
