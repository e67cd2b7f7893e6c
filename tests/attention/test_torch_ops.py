"""Every public function under torch: an op that compiles whole, exports, maps, casts, and says what its fakes say.

On torch's CPU wheel all of it runs through the interpreter, on tiny shapes; what needs a card is marked so."""

import contextlib
import subprocess
import sys
import timeit

import pytest

import attention

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from attention.softmax.forward import VARIANTS, _variant  # noqa: E402

TOKENS, HEAD = 16, 64


class Inputs:
    """Random arrays of one device and dtype: tile, rate (negative, float32), zeros."""

    def __init__(self, device="cpu", dtype=torch.bfloat16, batch=1, heads=1, tokens=TOKENS):
        self.device, self.dtype, self.batch, self.heads, self.tokens = device, dtype, batch, heads, tokens

    def tile(self, *shape):
        return torch.randn(shape, device=self.device).to(self.dtype)

    def qkv(self, head=HEAD):
        """Keys have length 1: the delta rule is stable then."""
        shape = self.batch, self.tokens, self.heads
        keys = torch.nn.functional.normalize(torch.randn((*shape, head), device=self.device), dim=-1).to(self.dtype)
        return self.tile(*shape, head), keys, self.tile(*shape, HEAD)

    def rate(self, *shape):
        return -0.1 - torch.rand(shape, device=self.device)

    def gates(self, *more):
        return self.rate(self.batch, self.tokens, self.heads, *more)

    def state(self, *shape):
        return torch.randn((self.batch, self.heads, *shape), device=self.device)

    def documents(self):
        """Which document each token belongs to: (batch, sequence)."""
        return (torch.arange(self.tokens, device=self.device) // 5).repeat(self.batch, 1)

    def ends(self):
        return torch.tensor([0, 3, self.tokens], dtype=torch.int32, device=self.device)


def swapped(*arrays):
    """The same, laid out as (batch, head, sequence, column)."""
    return [x.transpose(1, 2).contiguous() for x in arrays]


def near(b, h, i, j, docs):
    """A mask that reads all that it is told."""
    return (docs[b, i] == docs[b, j]) & (j <= i + h)


def warmer(s, b, h, i, j, docs):
    return s * 0.5 + docs[b, j]


# name: (function, what it is called with, made of Inputs: (arrays by position, all else))
CALLS = {
    "forward": (attention.forward, lambda x: (x.qkv(), {})),
    "forward, lse": (attention.forward, lambda x: (x.qkv(), dict(causal=True, return_lse=True, scale=0.5))),
    "forward, bhsd": (attention.forward, lambda x: (swapped(*x.qkv()), dict(layout="bhsd", return_lse=True))),
    "forward, built in": (
        attention.forward,
        lambda x: (
            x.qkv(),
            dict(window=(9, 3), softcap=2.0, alibi=-x.rate(x.heads), sink=x.rate(x.heads), bias=x.tile(1, 1, 1, x.tokens)),
        ),
    ),
    "forward, in Python": (
        attention.forward,
        lambda x: (x.qkv(), dict(mask=near, score=warmer, aux=(x.documents(),), return_lse=True)),
    ),
    "forward, sequences": (attention.forward, lambda x: (x.qkv(), dict(cu_seqlens=x.ends(), causal=True))),
    "linear": (attention.linear, lambda x: (x.qkv(), {})),
    "linear, state": (
        attention.linear,
        lambda x: (x.qkv(), dict(decay=x.gates(), initial_state=x.state(HEAD, HEAD), return_state=True)),
    ),
    "linear, sums": (
        attention.linear,
        lambda x: (
            x.qkv(),
            dict(normalize=True, initial_state=(x.state(HEAD, HEAD), x.state(HEAD).abs() + 9), return_state=True),
        ),
    ),
    "linear, sequences": (attention.linear, lambda x: (x.qkv(), dict(cu_seqlens=x.ends(), return_state=True))),
    "retention": (attention.retention, lambda x: (swapped(*x.qkv()), dict(layout="bhsd"))),
    "lightning": (attention.lightning, lambda x: ((*x.qkv(), 1, 3), dict(return_state=True))),
    "gla": (attention.gla, lambda x: ((*x.qkv(), x.gates(HEAD)), {})),
    "delta_rule": (attention.delta_rule, lambda x: ((*x.qkv(), -x.gates()), dict(decay=x.gates(), return_state=True))),
    "mamba2": (
        attention.mamba2,
        lambda x: (
            (x.qkv()[0], -x.gates(), x.rate(x.heads), *x.qkv()[1:]),
            dict(D=x.rate(x.heads), z=x.qkv()[0], return_final_states=True),
        ),
    ),
    "based": (attention.based, lambda x: (x.qkv(16), dict(return_state=True))),
    "based, plain": (attention.based, lambda x: (x.qkv(16), dict(normalize=False))),
    "hedgehog": (
        attention.hedgehog,
        lambda x: (
            (*x.qkv(), x.tile(x.heads, HEAD, 64), x.tile(x.heads, HEAD, 64), -x.rate(x.heads), -x.rate(x.heads)),
            {},
        ),
    ),
    "linear_step": (
        attention.linear_step,
        lambda x: ((x.state(HEAD, HEAD), *(a[:, 0] for a in x.qkv())), dict(beta=-x.gates()[:, 0])),
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


def prepared(name, **inputs):
    """(function, arrays by position, the rest)"""
    function, make = CALLS[name]
    args, options = make(Inputs(**{"heads": 2, **inputs}))
    return function, tuple(args), options


def cloned(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def leaves(tree):
    """Its tensors."""
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def assert_same(got, wanted):
    """The same numbers, shapes, dtypes and strides. (Decays of heads that torch computes differ by a rounding.)"""
    got, wanted = leaves(got), leaves(wanted)
    assert len(got) == len(wanted) > 0
    for x, y in zip(got, wanted):
        assert (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device)
        torch.testing.assert_close(x, y)


class Recording(TorchDispatchMode):
    """The ops of ours that are called inside, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "tiles":
            self.calls.append((op, cloned(args)))
        return op(*args, **(kwargs or {}))


# ---- the ops ---------------------------------------------------------------------------------------------------------
@every_call
def test_opcheck(name):
    """Schema, autograd registration, fakes with their strides, and dispatch with symbols for extents."""
    function, args, options = prepared(name)
    with Recording() as seen:
        function(*args, **options)
    [(op, arguments)] = seen.calls
    torch.library.opcheck(op, arguments)


@every_call
def test_compiles_whole(name):
    function, args, options = prepared(name)
    again = cloned((args, options))
    wanted = function(*args, **options)
    torch._dynamo.reset()
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*again[0], **again[1])
    assert_same(got, wanted)
    assert_same(again, (args, options))  # a state is written in place, all else as it was


@every_call
def test_fakes_are_like_the_real(name):
    function, args, options = prepared(name)
    wanted = function(*args, **options)
    mode = torch._subclasses.FakeTensorMode()
    fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, options))
    with mode:
        got = function(*fakes[0], **fakes[1])
    for x, y in zip(leaves(got), leaves(wanted), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def test_of_tensors_without_memory_only_shapes_are_asked():
    q = torch.empty(2, 1 << 20, 8, 64, dtype=torch.float16, device="meta")
    attention.forward(*(torch.zeros(1, 16, 1, 64, dtype=torch.float16) for _ in range(3)))
    out, lse = attention.forward(q, q, q, return_lse=True)
    assert out.is_meta and out.shape == q.shape and lse.shape == (2, 8, 1 << 20)
    with pytest.raises(ValueError, match="k: must have the axes"):
        attention.forward(q, q[0], q)
    with pytest.raises(TypeError, match="^q: must lie in host or CUDA memory"):
        attention.forward(q, *(torch.zeros(1, 16, 1, 64, dtype=torch.float16) for _ in range(2)))
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(1, 16, 1, 64, dtype=torch.float16)
    assert attention.forward(fake, fake, fake).shape == fake.shape


def test_an_op_is_called_by_its_name():
    attention.register_torch_ops()
    attention.register_torch_ops()  # they are there once
    names = ["based", "delta_rule", "forward", "forward_variant", "hedgehog", "linear", "linear_step", "mamba2"]
    assert all(hasattr(torch.ops.tiles, name) for name in names)
    q, k, v = Inputs().qkv()
    out, lse = attention.forward(q, k, v, causal=True, return_lse=True)
    assert_same(torch.ops.tiles.forward(q, k, v, True, None, True, None, "bshd"), [out, lse])


# ---- torch.compile and torch.export ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["forward, lse", "linear, state", "delta_rule", "retention"])
def test_lengths_are_symbols(name):
    """One compilation serves all lengths."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name][0], fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for tokens in 16, 24, 40:
        function, args, options = prepared(name, tokens=tokens)
        assert_same(compiled(*args, **options), function(*args, **options))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1  # Dynamo may start anew once, where a float is an argument


def test_a_length_that_is_said_to_be_dynamic():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: attention.forward(q, k, v) + 1, fullgraph=True, backend=counter)
    for tokens in 16, 24:
        q, k, v = Inputs(tokens=tokens).qkv()
        for x in q, k, v:
            torch._dynamo.mark_dynamic(x, 1)
        assert_same(compiled(q, k, v), attention.forward(q, k, v) + 1)
    assert counter.frame_count == 1


def test_a_scale_that_changes():
    torch._dynamo.reset()
    compiled = torch.compile(attention.forward, fullgraph=True, backend="aot_eager")
    q, k, v = Inputs().qkv()
    for scale in 0.5, 0.25, 0.125, 1, None:
        assert_same(compiled(q, k, v, scale=scale), attention.forward(q, k, v, scale=scale))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(HEAD, 3 * HEAD, dtype=torch.bfloat16)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (1, 3 * HEAD)).chunk(3, -1)
        return attention.forward(q, k, v, causal=True).flatten(-2)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    layer, x = Layer().requires_grad_(False), torch.randn(1, TOKENS, HEAD).bfloat16()
    shapes = ({1: torch.export.Dim("tokens", min=2, max=4096)},)
    exported = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "tiles.forward.default" in targets
    for tokens in TOKENS, 40:
        x = torch.randn(1, tokens, HEAD).bfloat16()
        assert_same(exported.module()(x), layer(x))


def test_an_out_and_a_state_that_are_written_are_not_forgotten():
    """Functionalization turns writes into new values, and back."""

    def step(state, q, k, v, out):
        first = attention.linear_step(state, q, k, v) * 2
        second = attention.linear_step(state, q, k, v, out=out)
        assert second is out
        return first, second + 1, state.sum()

    (q, k, v), state = (x[:, 0] for x in Inputs().qkv()), torch.zeros(1, 1, HEAD, HEAD)
    mine = [state, q, k, v, torch.zeros_like(v)]
    again = cloned(mine)
    wanted = step(*mine)
    torch._dynamo.reset()
    assert_same(torch.compile(step, fullgraph=True, backend="aot_eager")(*again), wanted)
    assert_same(again, mine)
    assert state.abs().sum() > 0


def test_what_a_graph_cannot_do_is_said():
    q, k, v = Inputs().qkv()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="stream: must be None"):
        torch.compile(lambda: attention.forward(q, k, v, stream=0), fullgraph=True, backend="aot_eager")()
    with Recording(), pytest.raises(TypeError, match="stream: must be None"):
        attention.forward(q, k, v, stream=0)
    with Recording(), pytest.raises(ValueError, match=r"out: must have shape=\(1, 16, 1, 64\)"):
        attention.forward(q, k, v, out=torch.zeros(2, TOKENS, 1, HEAD, dtype=q.dtype))
    with pytest.raises(ValueError, match="k: head_dim must equal q's"):
        torch.compile(attention.forward, fullgraph=True, backend="aot_eager")(q, k[..., :32], v[..., :32])


# ---- gradients -------------------------------------------------------------------------------------------------------
REFUSED = r"k: requires grad.*torch\.no_grad\(\)"


def test_a_tensor_that_requires_grad_is_refused_everywhere():
    """Not detached, where nobody would notice."""
    q, k, v = Inputs().qkv()
    k.requires_grad_()
    ways = {
        "eager": attention.forward,
        "op": lambda *x: torch.ops.tiles.forward(*x, False, None, False, None, "bshd"),
        "compiled": torch.compile(attention.forward, fullgraph=True, backend="aot_eager"),
        "mapped": lambda *x: torch.vmap(attention.forward)(*(y[None] for y in x)),
        "grad": lambda *x: torch.func.grad(lambda k: attention.forward(q, k, v).float().sum())(k.detach()),
    }
    with torch.no_grad():
        wanted = attention.forward(q, k, v)
    torch._dynamo.reset()
    for name, way in ways.items():
        with pytest.raises(Exception, match=REFUSED):
            way(q, k, v)
        if name != "grad":
            with torch.no_grad():
                assert_same(leaves(way(q, k, v))[0].reshape(wanted.shape), wanted)


# ---- autocast --------------------------------------------------------------------------------------------------------
def autocast(device="cpu", dtype=torch.bfloat16):
    return torch.autocast(device, dtype=dtype)


@pytest.mark.parametrize("name", ["forward, lse", "linear, state", "mamba2", "linear_step"])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(name, compiled):
    """Tiles of float32 become what autocast says; gates and states are float32 as before."""
    seeded = lambda dtype: (torch.manual_seed(0), prepared(name, dtype=dtype))[1]
    (_, low, low_options), (function, args, options) = seeded(torch.bfloat16), seeded(torch.float32)
    wanted = function(*low, **low_options)
    torch._dynamo.reset()
    with pytest.raises(TypeError, match="dtype must be one of"):
        function(*args, **options)
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    with autocast():
        assert_same(function(*args, **options), wanted)


def test_autocast_of_some():
    """What is low already is left, also where it comes first."""
    q, k, v = Inputs().qkv()
    with autocast():
        assert_same(attention.forward(q, k.float(), v), attention.forward(q, k, v))
        assert_same(attention.retention(q.float(), k, v.float()), attention.retention(q, k, v))
    with pytest.raises(TypeError, match="k: dtype must be one of"):
        attention.forward(q, k.float(), v)


# ---- vmap ------------------------------------------------------------------------------------------------------------
def mapped(function, in_dims, arrays, **options):
    """What torch.vmap should give: a call for each element, stacked."""
    count = next(x.shape[d] for x, d in zip(arrays, in_dims) if d is not None)
    each = [
        leaves(function(*(x if d is None else x.select(d, n) for x, d in zip(arrays, in_dims)), **options))
        for n in range(count)
    ]
    return [torch.stack(of) for of in zip(*each)]


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 1), (2, 1, 4), (-1, 0, None)])
def test_vmap_of_forward(in_dims):
    arrays = [x if d is None else torch.stack([x, x * 2, -x], d) for x, d in zip(Inputs(batch=2).qkv(), in_dims)]
    function = lambda q, k, v: attention.forward(q, k, v, return_lse=True)
    arrays = [x.contiguous() for x in arrays]
    with contextlib.suppress(ValueError):  # the last axis is not contiguous in the element itself
        wanted = mapped(lambda *x: function(*(y.contiguous() for y in x)), in_dims, arrays)
    assert_same(torch.vmap(function, in_dims)(*arrays), wanted)


def test_vmap_is_one_call():
    q, k, v = (torch.stack([x, x]) for x in Inputs().qkv())
    with Recording() as seen:
        torch.vmap(attention.forward, in_dims=(0, 0, None))(q, k, v[0])
    [(_, (folded, _, shared, *_))] = seen.calls
    assert folded.shape == shared.shape == (2, TOKENS, 1, HEAD)


def test_vmap_where_a_mask_counts_batches():
    """b is the number of a sequence in each element's batch, not in all of them together."""
    x = Inputs(batch=2, heads=2)
    (q, k, v), docs = x.qkv(), x.documents()
    docs[1] += torch.arange(TOKENS) // 3
    arrays, dims = (torch.stack([q, -q, 2 * q]), k, v, torch.stack([docs, docs * 2, docs // 2])), (0, None, None, 0)
    function = lambda q, k, v, docs: attention.forward(q, k, v, mask=near, aux=(docs,), alibi=torch.ones(2, 2))
    assert_same(torch.vmap(function, dims)(*arrays), mapped(function, dims, arrays)[0])


def test_masks_of_a_graph():
    """A function goes by the digest of its code: another one is another graph, and so is one that holds another number."""
    q, k, v = Inputs().qkv()
    torch._dynamo.reset()
    compiled = torch.compile(attention.forward, fullgraph=True, backend="aot_eager")
    for reach, mask in (0, lambda b, h, i, j: j <= i), (3, lambda b, h, i, j: j <= i + 3):
        assert_same(compiled(q, k, v, mask=mask), attention.forward(q, k, v, window=(None, reach)))
    made = lambda reach: lambda b, h, i, j, more=reach: j <= i + reach - 1 + more
    for reach in 0, 1, 0:
        assert_same(compiled(q, k, v, mask=made(reach)), attention.forward(q, k, v, mask=made(reach)))
    inside = lambda reach: attention.forward(q, k, v, mask=lambda b, h, i, j: j <= i + reach)
    assert_same(torch.compile(inside, fullgraph=True, backend="aot_eager")(3), inside(3))
    with pytest.raises(Exception, match=r"mask: holds \('inputs',\)"):
        inputs = [q]
        compiled(q, k, v, mask=lambda b, h, i, j: j <= i + len(inputs))
    with pytest.raises(ValueError, match="^nobody: this process knows no function by that name"):
        nothing = [None] * (len(VARIANTS.names) - len(("q", "k", "v", "out", "lse")))
        options = dict.fromkeys(_variant.options) | {"causal": False, "mask": "nobody", "norm_eps": 1e-6, "return_lse": False}
        torch.ops.tiles.forward_variant(q, k, v, *nothing, *options.values(), "bshd")


def test_lists_of_blocks_in_a_graph():
    """They are made before, and read by it."""
    x, near = Inputs(), lambda b, h, i, j, docs: docs[i] == docs[j]
    q, k, v = x.qkv()
    options = {"mask": near, "aux": (x.documents()[0],)}
    lists = attention.block_lists(q, k, v, **options)
    torch._dynamo.reset()
    compiled = torch.compile(attention.forward, fullgraph=True, backend="aot_eager")
    assert_same(compiled(q, k, v, blocks=lists, **options), attention.forward(q, k, v, **options))
    with torch._subclasses.FakeTensorMode() as fakes:
        fake = [fakes.from_tensor(y) for y in (q, k, v)]
        with pytest.raises(TypeError, match="^q: lists are made outside of what torch.compile or jax.jit traces"):
            attention.block_lists(*fake, **options)


def test_seeds_of_a_graph():
    """Are numbers that may change: the third one compiles nothing anew."""
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v = Inputs().qkv()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention.forward, fullgraph=True, backend=counter)
    for seed in 2, 2**40 + 3, 4, 5:
        assert_same(compiled(q, k, v, dropout=0.5, seed=seed), attention.forward(q, k, v, dropout=0.5, seed=seed))
    assert counter.frame_count == 2


def test_vmap_in_vmap():
    q, k, v = Inputs().qkv()
    q, k = torch.stack([q, 2 * q]), torch.stack([k, -k, k / 2])
    got = torch.vmap(lambda q: torch.vmap(lambda k: attention.forward(q, k, v))(k))(q)
    assert_same(got, torch.stack([torch.stack([attention.forward(a, b, v) for b in k]) for a in q]))


@pytest.mark.parametrize("name", ["linear, state", "mamba2", "hedgehog", "delta_rule", "linear, sequences", "linear, sums"])
@pytest.mark.parametrize("rates", [False, True])
def test_vmap_of_the_others(name, rates):
    """All arguments are mapped over; or all but rates of heads, maps and ends, which have no batch and ask for a call each."""
    function, args, options = prepared(name)
    flat, spec = torch.utils._pytree.tree_flatten((args, options))
    tensor = lambda x: isinstance(x, torch.Tensor)
    has_batch = lambda x: tensor(x) and x.dim() >= 3 and not (name == "hedgehog" and x.dim() == 3)
    dims = [0 if has_batch(x) or (rates and tensor(x)) else None for x in flat]
    stacked = [x if d is None else torch.stack([x, x]) for x, d in zip(flat, dims)]
    places = [n for n, x in enumerate(flat) if tensor(x)]

    def call(*tensors):
        given = dict(zip(places, tensors))
        args, options = torch.utils._pytree.tree_unflatten([given.get(n, x) for n, x in enumerate(flat)], spec)
        return function(*args, **options)

    pick = lambda values: [values[n] for n in places]
    assert_same(torch.vmap(call, tuple(pick(dims)))(*pick(stacked)), mapped(call, pick(dims), pick(stacked)))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_writes_a_state_in_place(dim):
    (q, k, v), state = (x[:, 0] for x in Inputs(batch=2).qkv()), torch.randn(2, 1, HEAD, HEAD)
    states = torch.stack([state, -state], dim)
    again = states.clone()
    wanted = mapped(attention.linear_step, (dim, None, None, None), (states, q, k, v))
    got = torch.vmap(attention.linear_step, (dim, None, None, None))(again, q, k, v)
    assert_same([got, again], [*wanted, states])
    with pytest.raises(ValueError, match="state: is written in place, so it must be mapped over"):
        torch.vmap(attention.linear_step, (None, 0, None, None))(state, torch.stack([q, q]), k, v)


# ---- what it costs ---------------------------------------------------------------------------------------------------
def test_a_plain_call_pays_less_than_three_microseconds(monkeypatch):
    """The way to the op is looked for, and not taken. The planner and its launches are left out: they cost what they did."""
    from attention.softmax.forward import _forward

    monkeypatch.setattr(type(_forward), "run", lambda self, *args: None)
    arrays, options = (*Inputs().qkv(), None, None), (False, None, False, None)
    direct = min(timeit.repeat(lambda: _forward.run(None, arrays, options, "bshd"), number=10_000, repeat=5))
    whole = min(timeit.repeat(lambda: _forward(None, arrays, options, "bshd"), number=10_000, repeat=5))
    assert (whole - direct) / 10_000 < 3e-6


def test_torch_is_not_imported():
    code = "import sys, numpy as np, attention; x = np.zeros((1, 16, 1, 64), np.float16); attention.forward(x, x, x); "
    subprocess.run([sys.executable, "-c", code + "assert not {'torch', 'jax'} & {*sys.modules}"], check=True)


def test_the_first_call_may_be_one_that_is_compiled():
    """attention was imported first, and no function looked up, nor an op registered, before Dynamo traces."""
    code = """
import attention, torch
q = torch.randn(1, 16, 1, 64).half()
compiled = torch.compile(lambda q: attention.retention(q, q, q), fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(q), attention.retention(q, q, q))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- on the card -----------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@every_call
def test_opcheck_on_the_card(name):
    function, args, options = prepared(name, device="cuda")
    with Recording() as seen:
        function(*args, **options)
    [(op, arguments)] = seen.calls
    torch.library.opcheck(op, arguments)


@pytest.mark.gpu
@every_call
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(name, mode):
    """Inductor's code, and the CUDA graphs that it captures; fresh numbers at every replay."""
    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name][0], fullgraph=True, mode=mode)
    for _ in range(4):
        function, args, options = prepared(name, device="cuda", batch=1 if "sequences" in name else 2, tokens=256)
        again = cloned((args, options))
        wanted = function(*args, **options)
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(cloned(compiled(*again[0], **again[1])), wanted)
        torch.testing.assert_close(leaves(again), leaves((args, options)))  # what is written in place, too


@pytest.mark.gpu
@every_call
def test_cuda_graph(name):
    function, args, options = prepared(name, device="cuda", tokens=256)
    before = cloned((args, options))
    function(*args, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = function(*args, **options)
    for x, y in zip(leaves((args, options)), leaves(before)):
        if isinstance(x, torch.Tensor):
            x.copy_(y)
    graph.replay()
    wanted = function(*before[0], **before[1])
    assert_same(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_the_card(dtype):
    q, k, v = Inputs("cuda", torch.float32, tokens=200).qkv()
    with autocast("cuda", dtype):
        assert_same(attention.forward(q, k, v), attention.forward(q.to(dtype), k.to(dtype), v.to(dtype)))


@pytest.mark.gpu
def test_vmap_on_the_card():
    q, k, v = Inputs("cuda", batch=2, heads=4, tokens=200).qkv()
    q, v = torch.stack([q, -q, 2 * q]), torch.stack([v, -v, 2 * v], 2)
    got = torch.vmap(attention.forward, (0, None, 2))(q, k, v)
    assert_same(got, mapped(attention.forward, (0, None, 2), (q, k, v))[0])
