"""Every public function under torch: an op that casts, refuses what has no gradient, and says what its fakes say.

On torch's CPU wheel all of it runs through the interpreter, on tiny shapes; what needs a card is marked so."""

import subprocess
import sys
import types

import pytest

import attention
from tiles.calls import torch_op

torch = pytest.importorskip("torch")
import torch.autograd.forward_ad as forward_ad  # noqa: E402
from torch_calls import CALLS, TOKENS, Inputs, OpRecorder, assert_same, cloned, every_call, leaves, prepared  # noqa: E402

# ---- the ops ---------------------------------------------------------------------------------------------------------
checked = pytest.mark.parametrize("name", [name for name in CALLS if "fp8" not in name])  # which opcheck would multiply


@checked
def test_opcheck(name):
    """Schema, autograd registration, fakes with their strides, and dispatch with symbols for extents."""
    function, args, options = prepared(name)
    with OpRecorder() as seen:
        function(*args, **options)
    assert seen.calls
    for op, arguments in seen.calls:
        torch.library.opcheck(op, arguments)


def test_opcheck_of_packed_records():
    """All but the comparison of results, as nobody writes the chunks of a record that are of no sequence (delta_records.py)."""
    x = Inputs(tokens=70, heads=1)
    with OpRecorder() as seen:
        attention.delta_rule(*x.qkv(16), -x.gates(), decay=x.gates(), cu_seqlens=x.ends(), return_chunk_states=True)
    ((op, arguments),) = seen.calls
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@every_call
def test_compiles_whole(name):
    function, args, options = prepared(name)
    again = cloned((args, options))
    expected = function(*args, **options)
    torch._dynamo.reset()
    actual = torch.compile(function, fullgraph=True, backend="aot_eager")(*again[0], **again[1])
    assert_same((actual, again), (expected, (args, options)))  # a state is written in place, all else as it was


@every_call
def test_fakes_are_like_the_real(name):
    function, args, options = prepared(name)
    expected = function(*args, **options)
    mode = torch._subclasses.FakeTensorMode()
    fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, options))
    with mode:
        actual = function(*fakes[0], **fakes[1])
    for x, y in zip(leaves(actual), leaves(expected), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def test_of_tensors_without_memory_only_shapes_and_dtypes_are_asked():
    q = torch.empty(2, 1 << 20, 8, 64, dtype=torch.float16, device="meta")
    attention.forward(*(torch.zeros(1, 16, 1, 64, dtype=torch.float16) for _ in range(3)))
    out, lse = attention.forward(q, q, q, return_lse=True)
    assert out.is_meta and out.shape == q.shape and lse.shape == (2, 8, 1 << 20)
    learned = q.clone().requires_grad_()
    for options in {}, {"causal": True, "window": (8, 0)}:
        (dq,) = torch.autograd.grad(attention.forward(learned, q, q, **options).sum(), learned)
        assert dq.is_meta and dq.shape == q.shape
    with pytest.raises(ValueError, match="k: must have the axes"):
        attention.forward(q, q[0], q)
    with pytest.raises(TypeError, match="^q: must lie in host or CUDA memory"):
        attention.forward(q, *(torch.zeros(1, 16, 1, 64, dtype=torch.float16) for _ in range(2)))
    for dtypes, said in [
        ((torch.float32,) * 3, "q: dtype must be one of .* convert it"),
        ((torch.float16, torch.bfloat16, torch.float16), "k: dtype must be q's: k.dtype='bfloat16', q.dtype='float16'"),
    ]:
        with pytest.raises(TypeError, match=f"^{said}"):
            attention.forward(*(q.to(dtype) for dtype in dtypes))
    with pytest.raises(TypeError, match="lengths: dtype must be one of"):
        attention.decode(q, q, q, lengths=torch.zeros(2, device="meta"))
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(1, 16, 1, 64, dtype=torch.float16)
    assert attention.forward(fake, fake, fake).shape == fake.shape


def test_an_op_is_called_by_its_name():
    attention.register_torch_ops()
    attention.register_torch_ops()  # they are there once
    names = ["based", "decode", "decode_variant", "delta_rule", "forward", "forward_variant", "hedgehog", "linear"]
    names += ["linear_step", "mamba2", "mla_decode", "mla_decode_fp8"]
    assert all(hasattr(torch.ops.tiles, name) for name in names)
    q, k, v = Inputs().qkv()
    out, lse = attention.forward(q, k, v, causal=True, return_lse=True)
    assert_same(torch.ops.tiles.forward(q, k, v, True, None, True, None, "bshd"), [out, lse])


# ---- gradients -------------------------------------------------------------------------------------------------------
REFUSED = r"k: requires grad.*torch\.no_grad\(\)"


def test_a_tensor_that_requires_grad_is_refused_everywhere():
    """An error instead of a detached result: for functions without a backward pass, and for the ops of those that have one."""
    q, k, v = Inputs().qkv()
    k.requires_grad_()
    attention.register_torch_ops()
    lengths = torch.tensor([TOKENS], dtype=torch.int32)
    unsupported = lambda q, k, v: attention.decode(q, k, v, lengths=lengths)
    ways = {
        "eager": unsupported,
        "op": lambda *x: torch.ops.tiles.forward(*x, False, None, False, None, "bshd"),
        "compiled": torch.compile(lambda *x: unsupported(*x), fullgraph=True, backend="aot_eager"),
        "mapped": lambda *x: torch.vmap(unsupported)(*(y[None] for y in x)),
        "grad": lambda *x: torch.func.grad(lambda k: unsupported(q, k, v).float().sum())(k.detach()),
    }
    with torch.no_grad():
        expected = unsupported(q, k, v)
    torch._dynamo.reset()
    for name, way in ways.items():
        with pytest.raises(Exception, match=REFUSED):
            way(q, k, v)
        if name not in ("grad", "op"):
            with torch.no_grad():
                assert_same(leaves(way(q, k, v))[0].reshape(expected.shape), expected)


def test_a_tangent_is_refused_everywhere():
    """Forward-mode derivatives, of torch.func.jvp or of dual tensors: a result without one would pass for a constant."""
    q, k, v = Inputs().qkv()
    lengths = torch.tensor([TOKENS])
    ways = {
        "forward": attention.forward,
        "variant": lambda *x: attention.forward(*x, window=(3, 3)),
        "linear": attention.linear,
        "decode": lambda *x: attention.decode(*x, lengths=lengths),
    }
    refused = pytest.raises(NotImplementedError, match=r"^k: has a tangent, and there are no forward-mode derivatives")
    for way in ways.values():
        for _ in range(3):  # by the way that was found for calls of this form, too
            with torch.no_grad():
                way(q, k, v)
        with refused:
            torch.func.jvp(lambda k, way=way: way(q, k, v), (k,), (k,))
        with forward_ad.dual_level():
            assert_same(leaves(way(q, k, v)), leaves(way(q, k, v)))  # of constants
            with refused:
                way(q, forward_ad.make_dual(k, k), v)


# ---- autocast --------------------------------------------------------------------------------------------------------
def autocast(device="cpu", dtype=torch.bfloat16):
    return torch.autocast(device, dtype=dtype)


@pytest.mark.parametrize("name", ["forward, lse", "linear, state", "mamba2", "linear_step"])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(name, compiled):
    """float32 tiles are cast by autocast; gates and states stay float32."""
    seeded = lambda dtype: (torch.manual_seed(0), prepared(name, dtype=dtype))[1]
    (_, low, low_options), (function, args, options) = seeded(torch.bfloat16), seeded(torch.float32)
    expected = function(*low, **low_options)
    torch._dynamo.reset()
    with pytest.raises(TypeError, match="dtype must be one of"):
        function(*args, **options)
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    with autocast():
        assert_same(function(*args, **options), expected)


def test_autocast_of_some():
    """Arrays of low precision are left as they are, also if they come first."""
    q, k, v = Inputs().qkv()
    with autocast():
        assert_same(attention.forward(q, k.float(), v), attention.forward(q, k, v))
        assert_same(attention.retention(q.float(), k, v.float()), attention.retention(q, k, v))
    with pytest.raises(TypeError, match="k: dtype must be one of"):
        attention.forward(q, k.float(), v)


# ---- what it costs ---------------------------------------------------------------------------------------------------
def test_a_plain_call_pays_a_few_calls(monkeypatch):
    """The way to the op is looked for, and not taken: so many functions of Python's and torch's are called for it.
    The planner and its launches are left out: they cost what they did."""
    from attention.plans.softmax.forward_programs import _forward

    monkeypatch.setattr(type(_forward), "run", lambda self, *args: None)
    arrays, options, calls = (*Inputs().qkv(), None, None), (False, None, False, None), []
    _forward(None, arrays, options, "bshd")
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event in ("call", "c_call") else None)
    try:
        _forward(None, arrays, options, "bshd")
    finally:
        sys.setprofile(None)
    assert calls[0] == "__call__" and len(calls) < 20, calls


@pytest.mark.parametrize("known", [{}, {"torch": torch}], ids=["none known", "torch known"])
def test_modules_are_found_while_dynamo_traces(monkeypatch, known):
    """A second one, too, that was imported since the first was looked for."""
    monkeypatch.setattr(torch_op, "_MODULES", known)
    monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))

    def function(x):
        return x + (torch_op.imported_module("torch") is not None) + (torch_op.imported_module("jax") is not None)

    assert torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 2


def test_torch_is_not_imported():
    code = "import sys, numpy as np, attention; x = np.zeros((1, 16, 1, 64), np.float16); attention.forward(x, x, x); "
    subprocess.run([sys.executable, "-c", code + "assert not {'torch', 'jax'} & {*sys.modules}"], check=True)


# ---- on the card -----------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@checked
def test_opcheck_on_the_card(name):
    function, args, options = prepared(name, device="cuda")
    with OpRecorder() as seen:
        function(*args, **options)
    assert seen.calls
    for op, arguments in seen.calls:
        torch.library.opcheck(op, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_the_card(dtype):
    q, k, v = Inputs("cuda", torch.float32, tokens=200).qkv()
    with autocast("cuda", dtype):
        assert_same(attention.forward(q, k, v), attention.forward(q.to(dtype), k.to(dtype), v.to(dtype)))
