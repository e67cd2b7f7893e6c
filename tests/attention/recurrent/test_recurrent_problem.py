"""attention/recurrent/problem.py: what a valid call becomes; every invalid one says which argument and which values."""

import ml_dtypes
import numpy as np
import pytest
from attention.recurrent.problem import MEMBERS, check

from tiles.frameworks import describe

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
EXTENTS = dict(B=2, S=5, G=3, H=6, K=32, V=16, N=2)
DTYPE = {"decay": f32, "beta": f32, "dt": f32, "A": f32, "D": f32, "dt_bias": f32, "cu_seqlens": np.int32}
STATES = "initial_state initial_z initial_states state".split()
NEEDED = {"linear": "q k v", "mamba2": "x dt A B C", "step": "q k v state"}


def zeros(*shape, dtype=bf16):
    return np.zeros(shape, dtype)


def valid(member, name, choice=0):
    """A plain valid argument."""
    shape = [EXTENTS[axis] for axis in MEMBERS[member][name].axes[choice]]
    return zeros(*shape, dtype=f32 if name in STATES else DTYPE.get(name, bf16))


def call(member="linear", options=None, **arrays):
    """check() of NumPy arrays; what a member needs is there and valid unless given."""
    made = {name: valid(member, name) for name in NEEDED[member].split()} | arrays
    return check(member, {name: None if x is None else describe(x, name) for name, x in made.items()}, **(options or {}))


# Valid calls ----------------------------------------------------------------------------------------------------------


def test_fields():
    p = call(initial_state=valid("linear", "initial_state"))
    assert (p.batch, p.sequences, p.seqlen, p.heads, p.key_heads, p.group) == (2, 2, 5, 6, 3, 2)
    assert (p.key_dim, p.value_dim, p.dtype, p.scale) == (32, 16, "bfloat16", 32**-0.5)
    assert (p.layout, p.device, p.normalize, p.member) == ("bshd", None, False, "linear")
    assert p.out_shape == (2, 5, 6, 16) and p.state_shape == (2, 6, 32, 16) and p.z_shape == (2, 6, 32)
    assert {name: x.shape for name, x in p.forms.items()} == {
        "q": (2, 5, 3, 32),
        "k": (2, 5, 3, 32),
        "v": (2, 5, 6, 16),
        "out": (2, 5, 6, 16),
        "initial_state": (2, 6, 32, 16),
    }
    assert p.forms["q"].strides == (5 * 3 * 64, 3 * 64, 64, 2) and p.forms["out"].strides == (5 * 6 * 32, 6 * 32, 32, 2)
    assert p.strides == 5 * 3 * 64 | 3 * 64 | 64 | 5 * 6 * 32 | 6 * 32 | 32 and not p.trivial


def test_mamba2_has_its_own_names_and_a_transposed_state():
    p = call("mamba2", initial_states=valid("mamba2", "initial_states"), D=valid("mamba2", "D", 1), z=valid("mamba2", "z"))
    assert (p.heads, p.key_heads, p.key_dim, p.value_dim) == (6, 3, 32, 16) and p.state_shape == (2, 6, 16, 32)
    assert p.forms["C"].shape == (2, 5, 3, 32) and p.forms["x"].shape == (2, 5, 6, 16) and p.forms["D"].shape == (6, 16)


def test_a_step_has_no_sequence():
    p = call("step", decay=valid("step", "decay", 1))
    assert (p.batch, p.seqlen, p.out_shape, p.state_shape) == (2, 1, (2, 6, 16), (2, 6, 32, 16))


@pytest.mark.parametrize("choice, shape", list(enumerate([(6,), (2, 5, 6), (2, 5, 6, 32)])))
def test_forms_of_decay(choice, shape):
    decay = valid("linear", "decay", choice)
    assert call(decay=decay).forms["decay"].shape == shape
    assert call(decay=decay.astype(bf16)).forms["decay"].dtype == "bfloat16"


def test_sequences_of_one_batch():
    one = {name: zeros(1, 9, 4, 16) for name in "qkv"}
    p = call(**one, cu_seqlens=zeros(4, dtype=np.int64), initial_state=zeros(3, 4, 16, 16, dtype=f32))
    assert (p.batch, p.sequences, p.seqlen) == (1, 3, 9) and p.state_shape == (3, 4, 16, 16)
    assert p.forms["cu_seqlens"].dtype == "int64"


def test_layouts_differ_only_in_the_callers_axes():
    arrays = {
        name: valid("linear", name, choice) for name, choice in (*dict.fromkeys("qkv", 0).items(), ("beta", 0), ("decay", 2))
    }
    turned = {name: x.swapaxes(1, 2) for name, x in arrays.items()}
    bshd, bhsd = call(**arrays), call(**turned, options={"layout": "bhsd"})
    for name in arrays:
        assert bhsd.forms[name] is bshd.forms[name], name
    assert bhsd.out_shape == (2, 6, 5, 16) and bhsd.forms["out"].shape == (2, 5, 6, 16)
    assert bhsd.forms["out"].strides == (6 * 5 * 32, 32, 5 * 32, 2)


def test_equal_calls_share_one_problem():
    assert call() is call() and call(options={"scale": 1}) is call(options={"scale": 1.0}) is not call()
    assert call(options={"normalize": np.True_}) is call(options={"normalize": True})
    assert call(options={"normalize": True}) is not call() and call(beta=valid("linear", "beta")) is not call()


@pytest.mark.parametrize("batch, length, trivial", [(0, 5, True), (2, 0, True), (1, 1, False)])
def test_empty_tensors(batch, length, trivial):
    x = zeros(batch, length, 4, 16)
    assert call(q=x, k=x, v=x).trivial == trivial


def test_strides_that_do_not_matter_and_broadcast_gates():
    q = np.lib.stride_tricks.as_strided(zeros(160), (1, 5, 1, 32), (6, 64, -14, 2))
    assert call(q=q, k=q, v=q).forms["q"].strides == (64, 64, 64, 2)
    assert call(decay=np.broadcast_to(f32(-1), (2, 5, 6))).forms["decay"].strides == (0, 0, 0)


def test_a_state_may_lie_as_it_likes():
    turned = zeros(2, 6, 16, 32, dtype=f32).swapaxes(2, 3)
    assert call(initial_state=turned).forms["initial_state"].strides == (6 * 16 * 128, 16 * 128, 4, 128)


def test_inputs_may_overlap():
    x = zeros(2, 5, 6, 32)
    assert call(q=x, k=x, v=x)


# Invalid calls --------------------------------------------------------------------------------------------------------

T, V = TypeError, ValueError
REAL = "dtype must be one of ('float32', 'bfloat16', 'float16')"
INVALID = [
    (dict(q=zeros(2, 5, 32)), V, "q: must have the axes B, S, Hk, Dk: q.shape=(2, 5, 32)"),
    (dict(q=zeros(2, 5), options={"layout": "bhsd"}), V, "q: must have the axes B, Hk, S, Dk: q.shape=(2, 5)"),
    (dict(decay=zeros(2, 6, dtype=f32)), V, "decay: must have the axes H; or B, S, H; or B, S, H, Dk: decay.shape=(2, 6)"),
    (
        dict(q=zeros(2, 5, 3, 32, dtype=f32)),
        T,
        "q: dtype must be one of ('bfloat16', 'float16'): q.dtype='float32'; convert it",
    ),
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
    (dict(v=zeros(2, 5, 6, 24)), V, "v: value_dim must be a multiple of 16, from 16 to 256: 24, v.shape=(2, 5, 6, 24)"),
    (dict(v=zeros(2, 5, 6, 272)), V, "v: value_dim must be a multiple of 16, from 16 to 256: 272"),
    (dict(q=zeros(2, 5, 3, 0), k=zeros(2, 5, 3, 0)), V, "q: key_dim must be a multiple of 16, from 16 to 256: 0"),
    (dict(q=zeros(2, 5, 0, 32), k=zeros(2, 5, 0, 32)), V, "q: must have at least one head: q.shape=(2, 5, 0, 32)"),
    (dict(decay=zeros(3, dtype=f32)), V, "decay: heads must equal v's: decay.shape=(3,), v.shape=(2, 5, 6, 16)"),
    (dict(beta=zeros(2, 6, 5, dtype=f32)), V, "beta: sequence must equal q's: beta.shape=(2, 6, 5), q.shape=(2, 5, 3, 32)"),
    (dict(initial_state=zeros(3, 6, 32, 16, dtype=f32)), V, "initial_state: batch must equal q's: initial_state.shape=(3, 6"),
    (dict(initial_state=zeros(2, 6, 16, 32, dtype=f32)), V, "initial_state: key_dim must equal q's: initial_state.shape=(2"),
    (dict(cu_seqlens=zeros(3, dtype=np.int32)), V, "cu_seqlens: batch must be 1, all sequences one behind the other: cu_"),
    (dict(cu_seqlens=zeros(1, dtype=np.int32)), V, "cu_seqlens: must have two elements or more: cu_seqlens.shape=(1,)"),
    (dict(options={"layout": "sbhd"}), V, "layout: must be one of ('bshd', 'bhsd'): layout='sbhd'"),
    (dict(options={"layout": ["bshd"]}), T, "layout: must be one of ('bshd', 'bhsd'): layout=['bshd']"),
    (dict(options={"normalize": 1}), T, "normalize: must be a bool: normalize=1"),
    (dict(options={"scale": "1"}), T, "scale: must be a number or None: scale='1'"),
    (dict(options={"scale": float("nan")}), V, "scale: must be finite in float32: scale=nan"),
    (dict(options={"scale": 1e40}), V, "scale: must be finite in float32: scale=1e+40"),
    (dict(k=zeros(2, 5, 3, 64)[..., ::2]), V, "k: last axis must be contiguous: k.strides=(1920, 384, 128, 4)"),
    (dict(q=zeros(2, 5, 3, 32)[:, ::-1]), V, "q: strides must be positive and below 2**40 bytes"),
    (dict(decay=zeros(2, 5, 6, 64, dtype=f32)[..., ::2]), V, "decay: last axis must be contiguous: decay.strides=(7680, "),
    (dict(beta=zeros(2, 5, 6, dtype=f32)[::-1]), V, "beta: strides must not be negative, and below 2**40 bytes: beta.strides"),
    (dict(out=zeros(2, 5, 6, 32)), V, "out: value_dim must equal v's: out.shape=(2, 5, 6, 32), v.shape=(2, 5, 6, 16)"),
    (dict(out=np.broadcast_to(zeros(1, 5, 6, 16), (2, 5, 6, 16))), V, "out: strides must be positive and below 2**40 bytes"),
    (dict(member="mamba2", dt=zeros(2, 5, 3, dtype=f32)), V, "dt: heads must equal x's: dt.shape=(2, 5, 3), x.shape=(2, 5, 6"),
    (dict(member="mamba2", C=zeros(2, 5, 3, 16)), V, "C: key_dim must equal B's: C.shape=(2, 5, 3, 16), B.shape=(2, 5, 3, 32)"),
    (
        dict(member="mamba2", D=zeros(6, 32, dtype=f32)),
        V,
        "D: value_dim must equal x's: D.shape=(6, 32), x.shape=(2, 5, 6, 16)",
    ),
    (dict(member="step", decay=zeros(2, 5, 6, 32, dtype=f32)), V, "decay: must have the axes H; or B, H; or B, H, Dk: decay."),
]


@pytest.mark.parametrize("arguments, error, message", INVALID, ids=[message[:60] for *_, message in INVALID])
def test_invalid(arguments, error, message):
    for _ in range(2):  # a refusal is never remembered as a success
        with pytest.raises(error) as raised:
            call(**arguments)
        assert message in str(raised.value)


def test_devices():
    arrays = {name: describe(valid("linear", name), name) for name in "qkv"}
    old = arrays["k"].form
    arrays["k"] = arrays["k"]._replace(form=form(old.shape, old.strides, old.dtype, 1, 2))
    with pytest.raises(ValueError, match=r"^k: must lie where q does .*k\.device=1, q\.device=None"):
        check("linear", arrays)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_alignment(name):
    shifted = np.ndarray((2, 5, 6, 16), bf16, np.zeros(961, bf16), offset=2)
    arrays = {n: zeros(2, 5, 6, 16) for n in "qkv"} | {name: shifted}
    with pytest.raises(ValueError, match=rf"^{name}: must start at a multiple of 4 bytes: address 0x"):
        call(**arrays)


@pytest.mark.parametrize("name", ["q", "decay", "initial_state"])
def test_out_lies_apart(name):
    given = valid("linear", name, 1 if name == "decay" else 0)
    memory = np.zeros(2 * given.nbytes + 2 * 5 * 6 * 32, np.uint8)
    overlapping = np.ndarray(given.shape, given.dtype, memory)
    out = np.ndarray((2, 5, 6, 16), bf16, memory, offset=given.nbytes - 16)
    with pytest.raises(ValueError, match=rf"^out: must not overlap {name}: out at 0x\w+, {name} at 0x\w+, out\.shape="):
        call(**{name: overlapping}, out=out)


@pytest.mark.parametrize("member, name", [("linear", "out"), ("step", "state")])
def test_what_is_written_must_be_writable(member, name):
    given = valid(member, name)
    given.flags.writeable = False
    with pytest.raises(ValueError, match=f"^{name}: must be writable, and this ndarray is read-only"):
        call(member, **{name: given})


def test_the_state_of_a_step_must_be_one_piece_of_memory_each():
    state = np.broadcast_to(zeros(1, 6, 32, 16, dtype=f32), (2, 6, 32, 16))
    state.flags.writeable = True
    with pytest.raises(ValueError, match="^state: its elements must not overlap each other: state.strides=.0, "):
        call("step", state=state)
