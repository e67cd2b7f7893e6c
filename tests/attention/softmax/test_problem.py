"""attention/softmax/problem.py: what a valid call becomes, and that every invalid one says which argument and which values."""

import ml_dtypes
import numpy as np
import pytest
from attention.softmax.problem import check, piece
from hypothesis import given
from hypothesis import strategies as st

from attention.softmax import problem
from tiles.frameworks import describe

Q, KV = (2, 5, 6, 16), (2, 7, 3, 16)  # (B, S, H, D)
bf16 = ml_dtypes.bfloat16


def array(shape=Q, dtype=bf16, name="x"):
    return describe(np.zeros(shape, dtype), name)


def call(q=None, k=None, v=None, out=None, **options):
    """check() of NumPy arrays, each a plain valid one unless given."""
    made = [np.zeros(shape, bf16) if x is None else x for x, shape in ((q, Q), (k, KV), (v, KV))]
    described = [describe(x, name) for x, name in zip(made, "qkv")]
    return check(*described, None if out is None else describe(out, "out"), **options)


def strided(shape, strides, dtype=bf16):
    """A view of fresh memory with these strides in elements."""
    size = 1 + sum((n - 1) * max(stride, 0) for n, stride in zip(shape, strides))
    return np.lib.stride_tricks.as_strided(np.zeros(size, dtype), shape, [2 * s for s in strides])


# Valid calls ----------------------------------------------------------------------------------------------------------


def test_fields():
    p = call(causal=True)
    assert (p.batch, p.seqlen_q, p.heads_q, p.head_dim) == Q
    assert (p.seqlen_kv, p.heads_kv, p.group) == (7, 3, 2)
    assert (p.dtype, p.causal, p.scale, p.layout, p.device) == ("bfloat16", True, 0.25, "bshd", None)
    assert p.out_shape == Q and p.lse_shape == (2, 6, 5) and not p.trivial
    assert p.q_strides == p.out_strides == (5 * 6 * 32, 6 * 32, 32, 2)
    assert p.k_strides == p.v_strides == (7 * 3 * 32, 3 * 32, 32, 2)


def test_layouts_differ_only_in_the_callers_axes():
    q, k = np.zeros((2, 6, 5, 16), bf16), np.zeros((2, 3, 7, 16), bf16)
    bhsd = call(q, k, k, layout="bhsd")
    bshd = call(*(x.swapaxes(1, 2) for x in (q, k, k)))
    for field in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "q_strides", "k_strides"):
        assert getattr(bhsd, field) == getattr(bshd, field), field
    assert bhsd.out_shape == (2, 6, 5, 16) and bhsd.out_strides == (6 * 5 * 32, 32, 5 * 32, 2)
    assert bshd.out_shape == (2, 5, 6, 16) and bshd.out_strides == (6 * 5 * 32, 6 * 32, 32, 2)


def test_equal_calls_share_one_problem():
    assert call() is call()
    assert call(causal=True) is not call() and call(scale=0.5) is not call()
    assert call(scale=1) is call(scale=1.0) is call(scale=np.float32(1))
    assert call(causal=np.True_) is call(causal=True) is not call(causal=np.False_)


def test_a_form_that_was_valid_is_checked_for_its_address_again():
    buffer = np.zeros(2 * 7 * 3 * 16 + 8, bf16)
    plain = np.ndarray(KV, bf16, buffer)
    shifted = np.ndarray(KV, bf16, buffer, offset=2)
    assert call(k=plain)
    with pytest.raises(ValueError, match=r"^k: must start at a multiple of 4 bytes: address 0x"):
        call(k=shifted)


@pytest.mark.parametrize(("offset", "step", "bytes_at_once"), [(0, 16, 16), (4, 16, 8), (0, 20, 8), (2, 16, 4), (4, 18, 4)])
def test_the_bytes_that_all_addresses_are_multiples_of(offset, step, bytes_at_once):
    """`offset` elements past an address that is a multiple of 16, rows `step` elements apart."""
    buffer = np.zeros(4096, bf16)
    start = -buffer.ctypes.data % 16 // 2 + offset
    k = np.ndarray((1, 5, 1, 16), bf16, buffer, 2 * start, (0, 2 * step, 0, 2))
    pointers = [describe(x, "x").pointer for x in (k, k, k)]
    assert piece(call(q=k, k=k, v=k), *pointers) == bytes_at_once


extents = st.tuples(*[st.integers(1, 3)] * 3)


@given(st.permutations(range(3)), st.sampled_from(["bshd", "bhsd"]), extents, st.integers(1, 3))
def test_any_strides_with_a_contiguous_last_axis(order, layout, extents, gap):
    memory = np.zeros([gap * n for n in extents] + [8 * gap], bf16)
    q = memory[::gap, ::gap, ::gap, :8].transpose(*order, 3)
    p = call(q, q, q, np.ndarray(q.shape, bf16, memory.copy(), strides=q.strides), layout=layout)
    axes = problem.AXES[layout]
    expected = [q.strides[axis] if q.shape[axis] > 1 else 16 for axis in axes[:3]] + [2]
    assert list(p.q_strides) == list(p.k_strides) == list(p.out_strides) == expected
    assert (p.batch, p.seqlen_q, p.heads_q, p.head_dim) == tuple(q.shape[axis] for axis in axes)


def test_strides_of_axes_of_extent_one_do_not_matter():
    q = strided((1, 5, 1, 16), (3, 32, -7, 1))
    assert call(q, q, q).q_strides == (32, 64, 32, 2)


@pytest.mark.parametrize("batch, seqlen_q, seqlen_kv", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (1, 1, 1)])
def test_empty_tensors(batch, seqlen_q, seqlen_kv):
    q, k = np.zeros((batch, seqlen_q, 4, 8), bf16), np.zeros((batch, seqlen_kv, 2, 8), bf16)
    p = call(q, k, k, q.copy())
    assert p.trivial == (0 in (batch, seqlen_q, seqlen_kv)) and p.lse_shape == (batch, 4, seqlen_q)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("dtype", [bf16, np.float16])
def test_head_dims(head_dim, dtype):
    x = np.zeros((1, 2, 2, head_dim), dtype)
    assert call(x, x, x).scale == head_dim**-0.5


def test_inputs_may_overlap_and_packed_inputs_may_hold_out():
    packed = np.zeros((2, 5, 4, 3, 16), bf16)
    q, k, v, out = packed.transpose(2, 0, 1, 3, 4)
    assert call(q, k, v, out) and call(q, q, q, out)
    assert call(q, k, v, q)  # in place


# Invalid calls --------------------------------------------------------------------------------------------------------

zeros = lambda *shape, dtype=bf16: np.zeros(shape, dtype)
T, V = TypeError, ValueError
f16, f32 = np.float16, np.float32
POSITIVE = (
    "strides must be positive and below 2**40 bytes (pass shared heads once (GQA), and copy other broadcast or flipped axes)"
)
DTYPE = "dtype must be one of ('bfloat16', 'float16')"
HEAD_DIM = "head_dim must be a multiple of 8, from 8 to 256"
SCALE = "scale: must be positive, and finite in float32"
INVALID = [
    (dict(k=zeros(7, 3, 16)), V, "k: must have 4 axes, B, S, H, D: k.shape=(7, 3, 16)"),
    (dict(q=zeros(2, 3), layout="bhsd"), V, "q: must have 4 axes, B, H, S, D: q.shape=(2, 3)"),
    (dict(q=zeros(*Q, dtype=f32)), T, f"q: {DTYPE}: q.dtype='float32'; convert it: x.astype(tiles.bf16.np), or torch's x.bf"),
    (dict(v=zeros(*KV, dtype=">f2")), T, f"v: {DTYPE}: v.dtype='>f2'"),
    (dict(v=zeros(*KV, dtype=f16)), T, "v: dtype must be q's: v.dtype='float16', q.dtype='bfloat16'"),
    (dict(q=zeros(2, 5, 6, 12)), V, f"q: {HEAD_DIM}: head_dim=12, q.shape=(2, 5, 6, 12)"),
    (dict(q=zeros(2, 5, 6, 264)), V, f"q: {HEAD_DIM}: head_dim=264, q.shape=(2, 5, 6, 264)"),
    (dict(q=zeros(2, 5, 6, 0)), V, f"q: {HEAD_DIM}: head_dim=0, q.shape=(2, 5, 6, 0)"),
    (dict(k=zeros(2, 7, 3, 8)), V, "k: head_dim must equal q's: k.shape=(2, 7, 3, 8), q.shape=(2, 5, 6, 16)"),
    (dict(k=zeros(3, 7, 3, 16)), V, "k: batch must equal q's: k.shape=(3, 7, 3, 16), q.shape=(2, 5, 6, 16)"),
    (dict(v=zeros(2, 8, 3, 16)), V, "v: shape must equal k's: v.shape=(2, 8, 3, 16), k.shape=(2, 7, 3, 16)"),
    (dict(k=zeros(2, 7, 0, 16), v=zeros(2, 7, 0, 16)), V, "k: must have at least one head: k.shape=(2, 7, 0, 16)"),
    (dict(k=zeros(2, 7, 4, 16), v=zeros(2, 7, 4, 16)), V, "q: heads must be a multiple of k's: heads_q=6, heads_kv=4"),
    (dict(layout="sbhd"), V, "layout: must be one of ('bshd', 'bhsd'): layout='sbhd'"),
    (dict(layout=["bshd"]), T, "layout: must be one of ('bshd', 'bhsd'): layout=['bshd']"),
    (dict(causal=1), T, "causal: must be a bool: causal=1"),
    (dict(causal=None), T, "causal: must be a bool: causal=None"),
    (dict(scale="0.1"), T, "scale: must be a number or None: scale='0.1'"),
    (dict(scale=True), T, "scale: must be a number or None: scale=True"),
    (dict(scale=np.ones(2)), T, "scale: must be a number or None: scale=array([1., 1.])"),
    (dict(scale=float("nan")), V, f"{SCALE}: scale=nan"),
    (dict(scale=float("inf")), V, f"{SCALE}: scale=inf"),
    (dict(scale=0), V, f"{SCALE}: scale=0.0"),
    (dict(scale=-1.0), V, f"{SCALE}: scale=-1.0"),
    (dict(scale=1e40), V, f"{SCALE}: scale=1e+40"),
    (dict(k=zeros(2, 7, 3, 32)[..., ::2]), V, "k: last axis must be contiguous: k.strides=(1344, 192, 64, 4)"),
    (dict(v=strided(KV, (399, 57, 19, 1))), V, "v: strides must be multiples of 4 bytes: v.strides=(798, 114, 38, 2)"),
    (dict(k=np.broadcast_to(zeros(2, 7, 1, 16), KV)), V, f"k: {POSITIVE}: k.strides=(224, 32, 0, 2)"),
    (dict(q=zeros(*Q)[:, ::-1]), V, f"q: {POSITIVE}: q.strides=(960, -192, 32, 2) bytes, q.shape=(2,"),
    (dict(q=zeros(2, 2, 1, 16)[:, ::-1], k=zeros(2, 2, 1, 16), v=zeros(2, 2, 1, 16)), V, f"q: {POSITIVE}"),
    (dict(out=zeros(*KV)), V, "out: shape must equal q's: out.shape=(2, 7, 3, 16), q.shape=(2, 5, 6, 16)"),
    (dict(out=zeros(2, 5)), V, "out: must have 4 axes, B, S, H, D: out.shape=(2, 5)"),
    (dict(out=zeros(*Q, dtype=f16)), T, "out: dtype must be q's: out.dtype='float16', q.dtype='bfloat16'"),
    (dict(out=zeros(*Q, dtype=f32)), T, f"out: {DTYPE}: out.dtype='float32'"),
    (dict(out=zeros(2, 5, 6, 32)[..., ::2]), V, "out: last axis must be contiguous: out.strides=(1920, 384, 64, 4)"),
    (dict(out=strided(Q, (480, 8, 96, 1))), V, "out: its elements must not overlap each other: out.strides=(960,"),
]


@pytest.mark.parametrize("arguments, error, message", INVALID, ids=[message[:60] for *_, message in INVALID])
def test_invalid(arguments, error, message):
    for _ in range(2):  # a refusal is never remembered as a success
        with pytest.raises(error) as raised:
            call(**arguments)
        assert message in str(raised.value)


@pytest.mark.parametrize("name", ["k", "v", "out"])
def test_devices(name):
    made = {"q": array(), "k": array(KV), "v": array(KV), "out": array()}
    old = made[name]
    made[name] = old._replace(form=form(old.shape, old.strides, old.dtype, 1, 2))
    with pytest.raises(ValueError, match=rf"^{name}: must lie where q does .*{name}\.device=1, q\.device=None"):
        check(**made)


def test_huge_strides_and_lengths():
    """Forms only: nobody has the memory."""
    q, k = array((2, 1, 1, 8)), array((2, 1, 1, 8))
    far = k._replace(form=form(k.shape, (2**40, 16, 16, 2), k.dtype, None, 2))
    with pytest.raises(ValueError, match=r"^k: strides must be positive and below 2\*\*40 bytes .*1099511627776"):
        check(q, far, far)
    near = k._replace(form=form(k.shape, (2**40 - 16, 16, 16, 2), k.dtype, None, 2))
    assert check(q, near, near).k_strides[0] == 2**40 - 16
    long = k._replace(form=form((2, 2**31, 1, 8), (2**35, 16, 16, 2), k.dtype, None, 2))
    with pytest.raises(ValueError, match=r"^k: sequence must be shorter than 2\*\*31: k.shape=\(2, 2147483648, 1, 8\)"):
        check(q, long, long)


@pytest.mark.parametrize("name", "qkvo")
def test_alignment(name):
    shape = (1, 3, 2, 8)
    made = {n: np.ndarray(shape, bf16, np.zeros(64, bf16), offset=2 if n == name else 0) for n in "qkvo"}
    name = name.replace("o", "out")
    with pytest.raises(ValueError, match=rf"^{name}: must start at a multiple of 4 bytes: address 0x"):
        call(*made.values())


def test_out_readonly():
    out = zeros(*Q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="^out: must be writable, and this ndarray is read-only"):
        call(out=out)


def test_out_as_an_immutable_jax_array():
    jax = pytest.importorskip("jax")
    with pytest.raises(ValueError, match="^out: must be writable, and this ArrayImpl is read-only"):
        call(out=jax.numpy.zeros(Q, jax.numpy.bfloat16))


@pytest.mark.parametrize("name", "qkv")
def test_out_overlaps(name):
    memory = np.zeros((3, 5, 6, 16), bf16)
    inputs = {n: memory[:2] if n == name else np.zeros((2, 5, 6, 16), bf16) for n in "qkv"}
    with pytest.raises(ValueError, match=rf"^out: must not overlap {name}: out at 0x\w+, {name} at 0x\w+, out\.shape="):
        call(**inputs, out=memory[1:])


def test_out_of_the_same_memory_in_another_order_is_not_in_place():
    q = np.zeros((2, 6, 6, 16), bf16)
    k = np.zeros((2, 6, 6, 16), bf16)
    with pytest.raises(ValueError, match="^out: must not overlap q"):
        call(q, k, k, q.swapaxes(1, 2))


def test_torch():
    torch = pytest.importorskip("torch")
    q, k = torch.zeros(2, 6, 5, 64, dtype=torch.bfloat16), torch.zeros(2, 3, 7, 64, dtype=torch.bfloat16)
    p = check(describe(q, "q"), describe(k, "k"), describe(k, "v"), layout="bhsd")
    assert (p.out_shape, type(p.out_shape), p.dtype) == ((2, 6, 5, 64), tuple, "bfloat16")
    expanded = torch.zeros(2, 1, 7, 64, dtype=torch.bfloat16).expand(2, 3, 7, 64)
    with pytest.raises(ValueError, match=r"^v: strides must be positive .*v\.strides=\(896, 0, 128, 2\)"):
        check(describe(q, "q"), describe(k, "k"), describe(expanded, "v"), layout="bhsd")
