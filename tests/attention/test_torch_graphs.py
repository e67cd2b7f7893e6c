"""Every public function in torch's graphs: torch.compile, torch.export, CUDA graphs, and the guards of graphs."""

import functools
import subprocess
import sys
import types

import pytest

import attention
import fuse.operators

torch = pytest.importorskip("torch")
from torch_calls import (  # noqa: E402
    CALLS,
    HEAD,
    TOKENS,
    Inputs,
    OpRecorder,
    assert_same,
    cloned,
    every_call,
    leaves,
    prepared,
)

from attention.nn import Attention  # noqa: E402
from attention.plans.softmax.forward_programs import VARIANTS, _variant  # noqa: E402
from attention.public import softmax_backward as backwards  # noqa: E402


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


class LazyModule(types.ModuleType):
    """A module that imports another one when an attribute is asked for, each time."""

    def __getattr__(self, name):
        if not name.startswith("_"):
            sys.modules[f"{self.__name__}.{name}{len(sys.modules)}"] = types.ModuleType(name)
        raise AttributeError(name)


@pytest.fixture
def lazy_module():
    sys.modules["lazy"] = LazyModule("lazy")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy"]:
        del sys.modules[name]


@pytest.mark.usefixtures("lazy_module")
def test_modules_that_import_others_meanwhile():
    """Dynamo does not trace sys.modules: torch 2.11 fails there if they change."""
    torch._dynamo.reset()
    q, k, v = Inputs().qkv()
    compiled = torch.compile(attention.forward, fullgraph=True, backend="aot_eager")
    assert_same(compiled(q, k, v), attention.forward(q, k, v))


def test_a_scale_that_changes():
    torch._dynamo.reset()
    compiled = torch.compile(attention.forward, fullgraph=True, backend="aot_eager")
    q, k, v = Inputs().qkv()
    for scale in 0.5, 0.25, 0.125, 1, None:
        assert_same(compiled(q, k, v, scale=scale), attention.forward(q, k, v, scale=scale))


class AttentionLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(HEAD, 3 * HEAD, dtype=torch.bfloat16)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (1, 3 * HEAD)).chunk(3, -1)
        return attention.forward(q, k, v, causal=True).flatten(-2)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    layer, x = AttentionLayer().requires_grad_(False), torch.randn(1, TOKENS, HEAD).bfloat16()
    shapes = ({1: torch.export.Dim("tokens", min=2, max=4096)},)
    exported = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "tiles.forward.default" in targets
    for tokens in TOKENS, 40:
        x = torch.randn(1, tokens, HEAD).bfloat16()
        assert_same(exported.module()(x), layer(x))


class OfFused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(HEAD, dtype=torch.bfloat16))

    def forward(self, x):
        return fuse.operators.residual_rms_norm(x, x, self.weight)[0]


EXPORTED = {
    "attention": AttentionLayer,
    "module": lambda: Attention(HEAD, 1, causal=True, dtype=torch.bfloat16),
    "projected": lambda: Attention(HEAD, 1, rotary=1e4, dtype=torch.bfloat16),
    "fused": OfFused,
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", EXPORTED)
def test_what_is_exported_loses_no_gradient(kind, strict):
    """Exported with parameters that require grad, it runs without gradients, and raises an error where they would be lost."""
    layer, x = EXPORTED[kind](), torch.randn(1, TOKENS, HEAD).bfloat16()
    module = torch.export.export(layer, (x,), strict=strict).module()
    with torch.no_grad():
        assert_same(module(x), layer(x))
    with pytest.raises(NotImplementedError, match=r"requires grad.*torch\.no_grad\(\)"):
        module(x)


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
    expected = step(*mine)
    torch._dynamo.reset()
    assert_same(torch.compile(step, fullgraph=True, backend="aot_eager")(*again), expected)
    assert_same(again, mine)
    assert state.abs().sum() > 0


def test_what_a_graph_cannot_do_is_said():
    q, k, v = Inputs().qkv()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="stream: must be None"):
        torch.compile(lambda: attention.forward(q, k, v, stream=0), fullgraph=True, backend="aot_eager")()
    with OpRecorder(), pytest.raises(TypeError, match="stream: must be None"):
        attention.forward(q, k, v, stream=0)
    with OpRecorder(), pytest.raises(ValueError, match=r"out: must have shape=\(1, 16, 1, 64\)"):
        attention.forward(q, k, v, out=torch.zeros(2, TOKENS, 1, HEAD, dtype=q.dtype))
    with pytest.raises(ValueError, match="k: head_dim must equal q's"):
        torch.compile(attention.forward, fullgraph=True, backend="aot_eager")(q, k[..., :32], v[..., :32])


def test_masks_of_a_graph():
    """A function is identified by the digest of its code: another function, or another captured number, is another graph."""
    q, k, v = Inputs().qkv()
    torch._dynamo.reset()
    compiled = torch.compile(attention.forward, fullgraph=True, backend="aot_eager")
    for reach, mask in (0, lambda b, h, i, j: j <= i), (3, lambda b, h, i, j: j <= i + 3):
        assert_same(compiled(q, k, v, mask=mask), attention.forward(q, k, v, window=(None, reach)))
    result = lambda reach: lambda b, h, i, j, more=reach: j <= i + reach - 1 + more
    for reach in 0, 1, 0, 0.5, 1.5:
        assert_same(compiled(q, k, v, mask=result(reach)), attention.forward(q, k, v, mask=result(reach)))
    inside = lambda reach: attention.forward(q, k, v, mask=lambda b, h, i, j: j <= i + reach)
    assert_same(torch.compile(inside, fullgraph=True, backend="aot_eager")(3), inside(3))
    with pytest.raises(Exception, match=r"mask: captures \('inputs',\)"):
        inputs = [q]
        compiled(q, k, v, mask=lambda b, h, i, j: j <= i + len(inputs))
    with pytest.raises(ValueError, match="^nobody: no function is registered under this name"):
        nothing = [None] * (len(VARIANTS.names) - len(("q", "k", "v", "out", "lse")))
        options = dict.fromkeys(_variant.options) | {"causal": False, "mask": "nobody", "norm_eps": 1e-6, "return_lse": False}
        torch.ops.tiles.forward_variant(q, k, v, *nothing, *options.values(), "bshd")


def test_lists_of_blocks_in_a_graph():
    """Block lists are made before the graph, and read by it."""
    x, near = Inputs(), lambda b, h, i, j, docs: docs[i] == docs[j]
    q, k, v = x.qkv()
    options = {"mask": near, "aux": (x.documents()[0],)}
    lists = attention.block_lists(q, k, v, **options)
    torch._dynamo.reset()
    compiled = torch.compile(attention.forward, fullgraph=True, backend="aot_eager")
    assert_same(compiled(q, k, v, blocks=lists, **options), attention.forward(q, k, v, **options))
    with torch._subclasses.FakeTensorMode() as fakes:
        fake = [fakes.from_tensor(y) for y in (q, k, v)]
        with pytest.raises(TypeError, match="^q: call block_lists outside of torch.compile and jax.jit"):
            attention.block_lists(*fake, **options)


def test_seeds_of_a_graph():
    """Numbers become symbols: the third value compiles nothing anew."""
    from torch._dynamo.testing import CompileCounterWithBackend

    q, k, v = Inputs().qkv()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention.forward, fullgraph=True, backend=counter)
    for seed in 2, 2**40 + 3, 4, 5:
        assert_same(compiled(q, k, v, dropout=0.5, seed=seed), attention.forward(q, k, v, dropout=0.5, seed=seed))
    assert counter.frame_count == 2


def test_the_first_call_may_be_one_that_is_compiled():
    """attention is imported first; no function is looked up, and no op registered, before Dynamo traces."""
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
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(name, mode):
    """Inductor's code, and the CUDA graphs that it captures, with new values in every replay."""
    torch._dynamo.reset()
    compiled = torch.compile(CALLS[name][0], fullgraph=True, mode=mode)
    for _ in range(4):
        function, args, options = prepared(name, device="cuda", batch=1 if "sequences" in name else 2, tokens=256)
        again = cloned((args, options))
        expected = function(*args, **options)
        torch.compiler.cudagraph_mark_step_begin()
        actual = compiled(*again[0], **again[1])
        assert_same(cloned((actual, again)), cloned((expected, args, options)))  # what is written in place, too


@pytest.mark.gpu
@every_call
def test_cuda_graph(name):
    function, args, options = prepared(name, device="cuda", tokens=256)
    before = cloned((args, options))
    function(*args, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = function(*args, **options)
    for x, y in zip(leaves((args, options)), leaves(before)):
        if isinstance(x, torch.Tensor):
            x.copy_(y)
    graph.replay()
    expected = function(*before[0], **before[1])
    assert_same((actual, cloned((args, options))), (expected, before))


# ---- whole steps of training -----------------------------------------------------------------------------------------
def model(device, dtype=torch.bfloat16):
    """A layer with every feature, and its training target."""
    from attention.nn import Attention

    torch.manual_seed(0)
    layer = Attention(
        64, 4, 2, 32, causal=True, window=(99, 0), sink=True, qk_norm=True, rotary=100.0, dtype=dtype, device=device
    )
    x, expected = (torch.randn(2, 200 if device == "cuda" else 12, 64, device=device).to(dtype) for _ in range(2))
    return layer, x, expected


def step(layer, optimiser, x, expected):
    """One optimiser step; returns the loss."""
    optimiser.zero_grad(set_to_none=True)
    loss = (layer(x).float() - expected.float()).square().mean()
    loss.backward()
    optimiser.step()
    return loss.detach()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    """Gradients from recomputed activations equal those from the kept ones."""
    layer, x, _ = model("cpu")
    x.requires_grad_()
    call_inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).float().square().sum(), call_inputs)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).float().square().sum().backward()
    torch.testing.assert_close([y.grad for y in call_inputs], list(expected), rtol=2**-6, atol=2**-6)


def test_functional_transforms():
    """torch.func's vjp, jacrev and vmap of grad."""
    q, k, v = Inputs(tokens=4).qkv()
    loss = lambda q, k, v: attention.forward(q, k, v, causal=True).float().square().sum()
    expected = torch.func.grad(loss, (0, 1, 2))(q, k, v)
    out, back = torch.func.vjp(lambda *x: attention.forward(*x, causal=True), q, k, v)
    torch.testing.assert_close(back((2 * out.float()).bfloat16()), expected, rtol=2**-6, atol=2**-6)
    again = lambda x: torch.func.vjp(lambda q: attention.forward(q, k, v), x)[1](x)[0].float().sum()
    for way in lambda: torch.func.grad(again)(q), lambda: again(q.clone().requires_grad_()):
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            way()
    mapped = torch.vmap(torch.func.grad(loss), (0, None, None))(torch.stack([q, -q]), k, v)
    torch.testing.assert_close(mapped[0], expected[0], rtol=2**-6, atol=2**-6)
    rows = torch.func.jacrev(lambda q: attention.forward(q, k, v, causal=True)[..., :1].float().sum((0, 2, 3)))(q)
    assert rows.shape == (4, *q.shape) and not rows[0, :, 1:].any() and rows[3].any()


@pytest.mark.parametrize("options", [{}, {"window": (2, 0)}], ids=["plain", "window"])
def test_torchs_deterministic_mode_asks_for_deterministic_gradients(monkeypatch, options):
    """A plain call takes the short path, backward_without_options."""
    q, k, v = (x.requires_grad_() for x in Inputs().qkv())
    call_options, backward, plain = [], attention.backward, backwards.backward_without_options

    @functools.wraps(backward)  # whose arguments are asked for
    def watched(*x, deterministic=False, **more):
        call_options.append(deterministic)
        return backward(*x, deterministic=deterministic, **more)

    monkeypatch.setattr(attention, "backward", watched)
    monkeypatch.setattr(backwards, "backward_without_options", lambda *x: (call_options.append(x[3]), plain(*x))[1])
    for mode in True, False:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda mode=mode: mode)
        attention.forward(q, k, v, **options).sum().backward()
    assert call_options == [True, False]


@pytest.mark.gpu
def test_cuda_graph_of_whole_steps():
    """Forward, backward and the optimiser in one graph, replayed on fresh inputs, beside the same steps without one."""
    runs = []
    for captured in False, True:
        layer, x, expected = model("cuda")
        optimiser = torch.optim.AdamW(layer.parameters(), 1e-2, capturable=True)
        with torch.no_grad():  # a clone with a gradient would hold on to the parameter's accumulation, on the first stream
            begun = cloned([x, expected, *layer.parameters()])
        if captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step(layer, optimiser, x, expected)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            optimiser.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                loss = step(layer, optimiser, x, expected)
            with torch.no_grad():  # as it was
                for y, before in zip(layer.parameters(), begun[2:]):
                    y.copy_(before)
                for state in optimiser.state.values():
                    for value in state.values():
                        value.zero_()
        losses = []
        for n in range(5):
            x.copy_(begun[0] * (n + 1))
            if captured:
                graph.replay()
            else:
                loss = step(layer, optimiser, x, expected)
            losses.append(loss.item())
        runs.append(losses)
    torch.testing.assert_close(*map(torch.tensor, runs), rtol=2e-2, atol=2e-3)
    assert runs[0][-1] != runs[0][0]


@pytest.mark.gpu
def test_inductor_trains():
    """A compiled layer's gradients are the layer's."""
    torch._dynamo.reset()
    layer, x, expected = model("cuda")
    loss = lambda f: (f(x).float() - expected.float()).square().sum()
    plain = torch.autograd.grad(loss(layer), list(layer.parameters()))
    compiled = torch.autograd.grad(loss(torch.compile(layer, fullgraph=True)), list(layer.parameters()))
    for mine, theirs in zip(compiled, plain, strict=True):
        assert (mine.float() - theirs.float()).abs().max() <= 0.03 * theirs.float().abs().max()


def of_torch(q, k, v):
    """The same layer in torch, in float32."""
    turned = [x.transpose(1, 2).float() for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*turned, enable_gqa=True).transpose(1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(2))
def test_forms_that_came_before(number):
    """Generated host code (tiles/calls/remembered_calls.py) handles new arrays, lengths, streams and modes on each GPU,
    whichever is current, and may be captured."""
    if number >= torch.cuda.device_count():
        pytest.skip("there is one GPU")
    device = torch.device("cuda", number)
    (q, new), (k, v) = (
        torch.randn(2, 2, 1, 8, 128, device=device).bfloat16(),
        torch.randn(2, 2, 300, 2, 128, device=device).bfloat16(),
    )
    lengths = torch.full((2,), 300, device=device, dtype=torch.int32)
    calls = [
        lambda q, n: attention.forward(q, k[:, :n], v[:, :n]),
        lambda q, n: attention.decode(q, k[:, :n], v[:, :n], lengths=lengths.clamp(max=n)),
        lambda q, n: attention.decode(q, k, v, lengths=lengths - (300 - n)),
    ]

    def check(out, q, n):
        assert out.device == device
        torch.testing.assert_close(out.float(), of_torch(q, k[:, :n], v[:, :n]), rtol=2e-2, atol=2e-2)

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    for call in calls:
        for n in (*[300] * 5, *range(200, 212), 300, 300):
            call_inputs = torch.randn_like(q)
            check(call(call_inputs, n), call_inputs, n)
        with torch.inference_mode():
            for _ in range(3):
                out = call(q, 300)
                assert out.is_inference()
                check(out, q, 300)
        with torch.cuda.device(device), torch.cuda.stream(side):
            for _ in range(3):
                check(call(q, 300), q, 300)
    with torch.cuda.device(device):
        graph, call_inputs = torch.cuda.CUDAGraph(), q.clone()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outs = [call(call_inputs, 300) for call in calls]
        call_inputs.copy_(new)
        graph.replay()
        for out in outs:
            check(out, new, 300)
    for call in calls:
        check(call(q, 300), q, 300)
