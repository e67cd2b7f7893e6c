"""attention.forward's arguments: what a valid call becomes, and that every invalid one says which argument and which values."""

import ml_dtypes
import numpy as np
import pytest

import attention
from attention.plans.softmax import forward_programs
from attention.plans.softmax.planning import check_extents
from tiles.launching.arrays import Form
from tiles.launching.frameworks import describe

Q, KV = (2, 5, 6, 16), (2, 7, 3, 16)  # (B, S, H, D)
bf16 = ml_dtypes.bfloat16


def call(q=None, k=None, v=None, **options):
    """attention.forward of NumPy arrays, each a plain valid one unless given."""
    made = [np.zeros(shape, bf16) if x is None else x for x, shape in ((q, Q), (k, KV), (v, KV))]
    return attention.forward(*made, **options)


def problem(q=Q, k=KV, v=None, out=None, layout="bshd"):
    """What a call becomes: of arrays, of forms, or of shapes of plain ones."""
    args = dict(q=q, k=k, v=k if v is None else v) | ({} if out is None else {"out": out})
    forms = {}
    for name, x in args.items():
        plain = type(x) is tuple
        forms[name] = x if isinstance(x, Form) else describe(np.zeros(x, bf16) if plain else x, name).form
    actual = forward_programs.FORWARD.problem(forms, layout)
    check_extents(actual)
    return actual


def strided(shape, strides, dtype=bf16):
    """A view of fresh memory with these strides in elements."""
    size = 1 + sum((n - 1) * max(stride, 0) for n, stride in zip(shape, strides))
    return np.lib.stride_tricks.as_strided(np.zeros(size, dtype), shape, [2 * s for s in strides])


# ---- valid calls -----------------------------------------------------------------------------------------------------
def test_extents_and_results():
    p = problem()
    assert (
        p("batch", "seqlen_q", "heads", "head_dim") == Q
        and p("batch", "seqlen_k", "heads_k", "head_dim") == KV
        and (p.dtype, p.device, p.member) == ("bfloat16", None, "forward")
    )
    assert p.result_form("out") == (Q, "bfloat16") and p.result_form("lse") == ((2, 6, 5), "float32")
    assert p["q"].form.strides == p["out"].form.strides == (5 * 6 * 32, 6 * 32, 32, 2)
    assert p["k"].form.strides == p["v"].form.strides == (7 * 3 * 32, 3 * 32, 32, 2) and p.by_tma


def test_layouts_differ_only_in_the_callers_axes():
    q, k = np.zeros((2, 6, 5, 16), bf16), np.zeros((2, 3, 7, 16), bf16)
    bhsd, bshd = problem(q, k, layout="bhsd"), problem(q.swapaxes(1, 2), k.swapaxes(1, 2))
    assert bhsd.extents == bshd.extents and bhsd.forms == bshd.forms
    assert bhsd.result_form("out")[0] == (2, 6, 5, 16) and bhsd["out"].form.strides == (6 * 5 * 32, 32, 5 * 32, 2)
    assert bshd.result_form("out")[0] == (2, 5, 6, 16) and bshd["out"].form.strides == (6 * 5 * 32, 6 * 32, 32, 2)
    assert bhsd.result_form("lse") == bshd.result_form("lse") == ((2, 6, 5), "float32")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_results_are_arrays_of_the_callers_kind(framework, layout):
    q, k = np.zeros((1, 3, 2, 8), np.float16), np.zeros((1, 4, 1, 8), np.float16)
    if layout == "bhsd":
        q, k = q.swapaxes(1, 2).copy(), k.swapaxes(1, 2).copy()
    if framework == "torch":
        q, k = map(pytest.importorskip("torch").from_numpy, (q, k))
    out, lse = attention.forward(q, k, k, layout=layout, return_lse=True)
    assert type(out) is type(lse) is type(q) and (out.shape, out.dtype) == (q.shape, q.dtype)
    assert tuple(lse.shape) == (1, 2, 3) and str(lse.dtype).endswith("float32")


def test_equal_options_mean_the_same(monkeypatch):
    """Numbers of any type are looked up as one: a call that differs in nothing else is planned once."""
    planned, real = [], forward_programs._forward.planner
    monkeypatch.setattr(forward_programs._forward, "planner", lambda *what: planned.append(what) or real(*what))
    q = np.zeros((1, 3, 1, 24), bf16)  # a shape that no other test has
    for scale in (1, 1.0, np.float32(1), np.int64(1)):
        for causal in (True, np.True_):
            attention.forward(q, q, q, scale=scale, causal=causal)
    assert len(planned) == 1 and type(planned[0][2]) is float and planned[0][1] is True
    attention.forward(q, q, q, scale=2, causal=True)
    attention.forward(q, q, q, scale=1, causal=False)
    assert len(planned) == 3


def test_strides_of_axes_of_extent_one_do_not_matter():
    q = strided((1, 5, 1, 16), (3, 32, -7, 1))
    assert problem(q, q).by_tma


@pytest.mark.parametrize("batch, q_len, kv_len", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_empty_tensors(batch, q_len, kv_len):
    """No query sees a key, or there is none."""
    q, k = np.zeros((batch, q_len, 4, 8), bf16), np.zeros((batch, kv_len, 2, 8), bf16)
    out, lse = call(q, k, k, out=np.full(q.shape, np.nan, bf16), return_lse=True)
    assert (out == 0).all() and lse.shape == (batch, 4, q_len) and (lse == -np.inf).all()


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("dtype", [bf16, np.float16])
def test_head_dims(head_dim, dtype):
    x = np.zeros((1, 2, 2, head_dim), dtype)
    assert problem(x, x).extents["head_dim"] == head_dim


def test_inputs_may_overlap_and_packed_inputs_may_hold_out():
    packed = np.random.default_rng(0).standard_normal((2, 5, 4, 3, 16)).astype(bf16)
    q, k, v, out = packed.transpose(2, 0, 1, 3, 4)
    ref = call(q.copy(), k.copy(), v.copy())
    assert call(q, k, v, out=out) is out and (out == ref).all()
    assert call(q, q, q, out=out) is out
    assert call(q, k, v, out=q) is q and (q == ref).all()  # in place


# ---- invalid calls ---------------------------------------------------------------------------------------------------
zeros = lambda *shape, dtype=bf16: np.zeros(shape, dtype)
T, V = TypeError, ValueError
f16, f32, f64 = np.float16, np.float32, np.float64
DTYPE = "dtype must be one of ('bfloat16', 'float16')"
HEAD_DIM = "head_dim must be a multiple of 8, from 8 to 256"
SCALE = "scale: must be positive, and finite in float32"
SHAPES = "q.shape=(2, 5, 6, 16)"
INVALID = [
    (dict(k=zeros(7, 3, 16)), V, "k: must have the axes B, S, Hk, D: k.shape=(7, 3, 16)"),
    (dict(q=zeros(2, 3), layout="bhsd"), V, "q: must have the axes B, H, S, D: q.shape=(2, 3)"),
    (dict(q=zeros(*Q, dtype=f32)), T, f"q: {DTYPE}: q.dtype='float32'"),
    (dict(v=zeros(*KV, dtype=">f2")), T, f"v: {DTYPE}: v.dtype='>f2'"),
    (dict(k=zeros(*KV, dtype=np.int8)), T, f"k: {DTYPE}: k.dtype='int8'; attention.decode reads keys and values of int8"),
    (dict(v=zeros(*KV, dtype=f16)), T, "v: dtype must be q's: v.dtype='float16', q.dtype='bfloat16'"),
    (
        dict(q=zeros(2, 5, 6, 12), k=zeros(2, 7, 3, 12), v=zeros(2, 7, 3, 12)),
        V,
        f"q: {HEAD_DIM}; pad it with columns of zeros, and pass scale: head_dim=12: q.shape=(2, 5, 6, 1",
    ),
    (
        dict(q=zeros(2, 5, 6, 264), k=zeros(2, 7, 3, 264), v=zeros(2, 7, 3, 264)),
        V,
        f"q: {HEAD_DIM}: head_dim=264: q.shape=(2, 5",
    ),
    (
        dict(q=zeros(2, 5, 6, 0), k=zeros(2, 7, 3, 0), v=zeros(2, 7, 3, 0)),
        V,
        f"q: {HEAD_DIM}: head_dim=0: q.shape=(2, 5, 6, 0)",
    ),
    (dict(k=zeros(2, 7, 3, 8)), V, f"k: head_dim must equal q's: k.shape=(2, 7, 3, 8), {SHAPES}"),
    (dict(k=zeros(3, 7, 3, 16)), V, f"k: batch must equal q's: k.shape=(3, 7, 3, 16), {SHAPES}"),
    (dict(v=zeros(2, 8, 3, 16)), V, "v: sequence must equal k's: v.shape=(2, 8, 3, 16), k.shape=(2, 7, 3, 16)"),
    (dict(v=zeros(2, 7, 2, 16)), V, "v: heads must equal k's: v.shape=(2, 7, 2, 16), k.shape=(2, 7, 3, 16)"),
    (dict(k=zeros(2, 7, 0, 16), v=zeros(2, 7, 0, 16)), V, "k: must have at least one head: k.shape=(2, 7, 0, 16)"),
    (dict(k=zeros(2, 7, 4, 16), v=zeros(2, 7, 4, 16)), V, f"q: heads must be a multiple of k's: heads=6, kv_heads=4: {SHAPES}"),
    (
        dict(q=zeros(2, 6, 5, 16), k=zeros(2, 3, 7, 16), v=zeros(2, 3, 7, 16)),
        *(V, 'q: heads must be a multiple of k\'s, or are they (B, H, S, D)? That is layout="bhsd": heads=5, kv_heads=7: '),
    ),
    (dict(layout="sbhd"), V, "layout: must be one of ('bshd', 'bhsd'): layout='sbhd'"),
    (dict(layout=["bshd"]), T, "layout: must be one of ('bshd', 'bhsd'): layout=['bshd']"),
    (dict(causal=1), T, "causal: must be a bool: causal=1"),
    (dict(causal=None), T, "causal: must be a bool: causal=None"),
    (dict(return_lse=1), T, "return_lse: must be a bool: return_lse=1"),
    (dict(scale="0.1"), T, "scale: must be a number or None: scale='0.1'"),
    (dict(scale=True), T, "scale: must be a number or None: scale=True"),
    (dict(scale=np.ones(2)), T, "scale: must be a number or None: scale=array([1., 1.])"),
    (dict(scale=float("nan")), V, f"{SCALE}: scale=nan"),
    (dict(scale=float("inf")), V, f"{SCALE}: scale=inf"),
    (dict(scale=1.01 * 2.0**120), V, f"{SCALE}: scale={1.01 * 2.0**120}"),
    (dict(scale=0), V, f"{SCALE}: scale=0.0"),
    (dict(scale=-1.0), V, f"{SCALE}: scale=-1.0"),
    (dict(scale=1e40), V, f"{SCALE}: scale=1e+40"),
    (dict(k=zeros(2, 7, 3, 32)[..., ::2]), V, "k: last axis must be contiguous: k.strides=(1344, 192, 64, 4)"),
    (dict(out=zeros(*KV)), V, "out: sequence must equal q's: out.shape=(2, 7, 3, 16), q.shape=(2, 5, 6, 16)"),
    (dict(out=zeros(2, 5)), V, "out: must have the axes B, S, H, Dv: out.shape=(2, 5)"),
    (dict(out=zeros(*Q, dtype=f16)), T, "out: dtype must be q's: out.dtype='float16', q.dtype='bfloat16'"),
    (dict(out=zeros(*Q, dtype=f64)), T, f"out: {DTYPE}: out.dtype='float64'"),
    (dict(out=zeros(2, 5, 6, 32)[..., ::2]), V, "out: last axis must be contiguous: out.strides=(1920, 384, 64, 4)"),
    (dict(out=strided(Q, (480, 8, 96, 1))), V, "out: its elements must not overlap each other: out.strides=(960,"),
    (dict(family="sm_70"), V, "family: must be None or one of ('sm_80', 'sm_90'): family='sm_70'"),
    (
        dict(q=zeros(*Q)[:, ::-1], family="sm_90"),
        V,
        "family: sm_90 takes addresses and positive strides that are multiples of 16",
    ),
]


@pytest.mark.parametrize("arguments, error, message", INVALID, ids=[message[:60] for *_, message in INVALID])
def test_invalid(arguments, error, message):
    for _ in range(2):  # a refusal is never remembered as a success
        with pytest.raises(error) as raised:
            call(**arguments)
        assert str(raised.value).startswith(message)


@pytest.mark.parametrize("name", ["k", "v", "out"])
def test_devices(name):
    forms = {n: describe(np.zeros(Q if n in ("q", "out") else KV, bf16), n).form for n in ("q", "k", "v", "out")}
    forms[name] = forms[name]._replace(device=1)
    with pytest.raises(ValueError, match=rf"^{name}: must lie where q does .*{name}\.device=1, q\.device=None"):
        problem(**forms)


def test_huge_strides_and_lengths():
    """Forms only: nobody has the memory."""
    q = Form((2, 1, 1, 8), (16, 16, 16, 2), "bfloat16", None, 2)
    assert problem(q, q._replace(strides=(2**40 - 16, 16, 16, 2))).by_tma
    assert not problem(q, q._replace(strides=(2**40, 16, 16, 2))).by_tma
    long = Form((2, 2**31, 1, 8), (2**35, 16, 16, 2), "bfloat16", None, 2)
    with pytest.raises(ValueError, match=r"^k: sequence must be shorter than 2\*\*31: .*k.shape=\(2, 2147483648, 1, 8\)"):
        problem(q, long)
    with pytest.raises(ValueError, match=r"^q: sequence must be shorter than 2\*\*31: .*q.shape=\(2, 2147483648, 1, 8\)"):
        problem(long, q)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_addresses_between_elements(name):
    shape = (1, 3, 2, 8)
    made = {n: np.ndarray(shape, bf16, np.zeros(104, np.uint8), offset=n == name) for n in ("q", "k", "v", "out")}
    with pytest.raises(
        ValueError, match=rf"^{name}: address and strides must be multiples of its elements' 2 bytes: address \d"
    ):
        call(**made)


def test_out_readonly():
    out = zeros(*Q)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="^out: must be writable, and this array is read-only"):
        call(out=out)


def test_out_as_an_immutable_jax_array():
    jax = pytest.importorskip("jax")
    with pytest.raises(ValueError, match="^out: must be writable, and this array is read-only"):
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
        call(q, k, k, out=q.swapaxes(1, 2))


def test_torch():
    torch = pytest.importorskip("torch")
    q, k = torch.zeros(2, 6, 5, 64, dtype=torch.bfloat16), torch.zeros(2, 1, 7, 64, dtype=torch.bfloat16)
    p = problem(q, k.expand(2, 3, 7, 64), layout="bhsd")
    assert (p.result_form("out")[0], type(p.result_form("out")[0]), p.dtype) == ((2, 6, 5, 64), tuple, "bfloat16")
    assert p["k"].form.strides == (896, 128, 0, 2) and p.by_tma, "keys that heads share by a stride of 0"
