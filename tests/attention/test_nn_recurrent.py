"""The recurrent layers of attention.nn, compared with the same layers in plain torch, token by token in float64; on torch's CPU
wheel through the interpreter."""

import copy
import itertools
import math
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from attention import nn  # noqa: E402

DIM, TOKENS = 32, 21
HEADS = dict(num_heads=2, head_dim=16)
# name: (class, its arguments)
CASES = {
    "gated delta": (nn.GatedDeltaNet, dict(**HEADS, num_v_heads=4, expand_v=2.0)),
    "gated delta, negative eigenvalues": (nn.GatedDeltaNet, dict(**HEADS, allow_neg_eigval=True, use_gate=False, conv_size=2)),
    "gated delta, no convolution": (nn.GatedDeltaNet, dict(**HEADS, use_short_conv=False)),
    "kimi": (nn.KimiDeltaAttention, dict(**HEADS, lower_bound=-5.0, conv_bias=True)),
    "kimi, shared keys": (nn.KimiDeltaAttention, dict(**HEADS, num_v_heads=4, allow_neg_eigval=True)),
    "gla": (nn.GatedLinearAttention, dict(num_heads=2, expand_k=1.0)),
    "gla, convolution": (nn.GatedLinearAttention, dict(num_heads=1, expand_k=0.5, use_short_conv=True, conv_size=3)),
    "mamba2": (nn.Mamba2, dict(d_state=16, headdim=16)),
    "mamba2, all": (nn.Mamba2, dict(d_state=16, headdim=32, expand=4, ngroups=2, D_has_hdim=True, norm_before_gate=True,
                                    bias=True, conv_bias=False)),
    "mamba2, no norm": (nn.Mamba2, dict(d_state=32, headdim=16, expand=1, rmsnorm=False, dt_limit=(0.3, 0.8))),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)


def layer_of(name, dtype=torch.bfloat16, device="cpu"):
    """The layer, with parameters that are all random."""
    torch.manual_seed(0)
    kind, arguments = CASES[name]
    layer = kind(DIM, **arguments, dtype=dtype, device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return layer


def inputs(batch=2, tokens=TOKENS, device="cpu"):
    return torch.randn(batch, tokens, DIM, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)


# ---- the same layers in plain torch ----------------------------------------------------------------------------------
def convolve(conv, x):
    """y_t = silu(bias + sum of weight[:, i] x_(t - W + 1 + i)), by torch's own convolution."""
    width = conv.weight.shape[1]
    y = F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), conv.weight[:, None], conv.bias, groups=x.shape[-1])
    return F.silu(y.transpose(1, 2))


def recurrence(q, k, v, decay, beta=None, scale=None, state=None):
    """(o (B, S, H, Dv), the last state), token by token, from `state` on; decay (B, S, H) or (B, S, H, Dk)."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    decay = decay if decay.ndim == 4 else decay[..., None]
    state, out = v.new_zeros(len(v), v.shape[2], k.shape[-1], v.shape[-1]) if state is None else state, []
    for t in range(v.shape[1]):
        state = decay[:, t].exp()[..., None] * state
        value = v[:, t]
        if beta is not None:
            value = beta[:, t, :, None] * (value - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, ..., None] * value[:, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * (k.shape[-1] ** -0.5 if scale is None else scale))
    return torch.stack(out, 1), state


def rms_norm(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def by_heads(x, columns):
    return x.unflatten(-1, (-1, columns))


def plain_delta(layer, x):
    """A layer of the delta rule."""
    K, V, D, Dv = layer.key_dim, layer.value_dim, layer.head_dim, layer.head_v_dim
    kimi = isinstance(layer, nn.KimiDeltaAttention)
    rows = x @ (layer.in_proj_qkv if kimi else layer.in_proj_qkvz).weight.T
    qkv = rows[..., : 2 * K + V]
    qkv = F.silu(qkv) if layer.conv1d is None else convolve(layer.conv1d, qkv)
    q, k = (by_heads(y, D) for y in qkv[..., : 2 * K].chunk(2, -1))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    if kimi:
        first, second = layer.f_proj
        f = by_heads(x @ first.weight.T @ second.weight.T + layer.dt_bias, D)
        rate = layer.A_log.exp()[:, None]
        bounded = layer.lower_bound is not None
        decay = layer.lower_bound * torch.sigmoid(rate * f) if bounded else -rate * F.softplus(f)
        beta = torch.sigmoid(x @ layer.b_proj.weight.T)
    else:
        b, a = (x @ layer.in_proj_ba.weight.T).chunk(2, -1)
        decay, beta = -layer.A_log.exp() * F.softplus(a + layer.dt_bias), torch.sigmoid(b)
    beta = beta * 2 if layer.allow_neg_eigval else beta
    out = rms_norm(recurrence(q, k, by_heads(qkv[..., 2 * K :], Dv), decay, beta)[0], layer.norm.weight, layer.norm.eps)
    if kimi:
        first, second = layer.g_proj
        out = out * torch.sigmoid(by_heads(x @ first.weight.T @ second.weight.T + second.bias, Dv))
    elif layer.use_gate:
        out = out * F.silu(by_heads(rows[..., 2 * K + V :], Dv))
    return out.flatten(-2) @ layer.out_proj.weight.T


def plain_gla(layer, x):
    K, V = layer.key_dim, layer.value_dim
    rows = x @ layer.in_proj_qkvz.weight.T
    qkv = rows[..., : 2 * K + V]
    qkv = qkv if layer.conv1d is None else convolve(layer.conv1d, qkv)
    q, k, v = (y.unflatten(-1, (layer.num_heads, -1)) for y in qkv.split([K, K, V], -1))
    first, second = layer.gk_proj
    gates = x @ first.weight.T @ second.weight.T + second.bias
    decay = (torch.sigmoid(gates).log() / layer.gate_logit_normalizer).unflatten(-1, (layer.num_heads, -1))
    out = rms_norm(recurrence(q, k, v, decay)[0], layer.norm.weight, layer.norm.eps)
    return (out * F.silu(rows[..., 2 * K + V :].unflatten(-1, (layer.num_heads, -1)))).flatten(-2) @ layer.out_proj.weight.T


def plain_mamba2(layer, x):
    inner, groups = layer.d_inner, layer.ngroups * layer.d_state
    rows = F.linear(x, layer.in_proj.weight, layer.in_proj.bias)
    z, xBC, dt = rows.split([inner, inner + 2 * groups, layer.nheads], -1)
    values, B, C = convolve(layer.conv1d, xBC).split([inner, groups, groups], -1)
    values, B, C = by_heads(values, layer.headdim), by_heads(B, layer.d_state), by_heads(C, layer.d_state)
    dt, D = F.softplus(dt + layer.dt_bias).clamp(*layer.dt_limit), layer.D.reshape(layer.nheads, -1)
    y = (recurrence(C, B, dt[..., None] * values, -layer.A_log.exp() * dt, scale=1)[0] + D * values).flatten(-2)
    if layer.norm is None:
        y = y * F.silu(z)
    else:
        y = y if layer.norm.norm_before_gate else y * F.silu(z)
        parts = y.unflatten(-1, (layer.ngroups, -1)), layer.norm.weight.unflatten(0, (layer.ngroups, -1))
        y = rms_norm(*parts, layer.norm.eps).flatten(-2)
        y = y * F.silu(z) if layer.norm.norm_before_gate else y
    return F.linear(y, layer.out_proj.weight, layer.out_proj.bias)


PLAIN = {nn.GatedDeltaNet: plain_delta, nn.KimiDeltaAttention: plain_delta, nn.GatedLinearAttention: plain_gla}
PLAIN |= {nn.Mamba2: plain_mamba2}


def plain(layer, x):
    return PLAIN[type(layer)](layer, x)


def assert_near(actual, expected, name="out", limit=0.03):
    """Close within the precision of bfloat16, by the root of the mean square."""
    error = (actual.double() - expected).square().mean().sqrt()
    assert error <= limit * expected.square().mean().sqrt() + 1e-9, f"{name}: {error / expected.square().mean().sqrt():.3g}"


# ---- forward and backward --------------------------------------------------------------------------------------------
@every_case
def test_is_what_it_says(name):
    """The layer's output, and all gradients, in float16, which has three digits more than bfloat16 in binary."""
    layer, x = layer_of(name, torch.float16), inputs(1).half().requires_grad_()
    exact_layer, exact = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    out, expected = layer(x), plain(exact_layer, exact)
    assert out.shape == x.shape and out.dtype == x.dtype
    assert_near(out, expected, limit=0.003)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).half()
    out.backward(dout)
    expected.backward(dout.double())
    assert_near(x.grad, exact.grad, "x", 0.005)
    for key, parameter in layer.named_parameters():
        assert_near(parameter.grad, exact_layer.get_parameter(key).grad, key, 0.03 if key in ("A_log", "dt_bias") else 0.01)


@pytest.mark.parametrize("name", ["gated delta", "kimi", "gla", "mamba2, all"])
def test_packed_sequences(name):
    """Each has the output that it has by itself."""
    layer, x = layer_of(name), inputs(1)
    ends = [0, 2, 2, 12, TOKENS]
    with torch.no_grad():
        packed = layer(x, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
        alone = [layer(x[:, start:end]) for start, end in itertools.pairwise(ends) if end > start]
    assert_near(packed, torch.cat(alone, 1).double(), limit=0.01)


@every_case
def test_generates_token_by_token(name):
    """A prompt and steps, from a cache, are the whole sequence; a call without tokens changes nothing."""
    layer, x = layer_of(name), inputs()
    with torch.no_grad():
        whole, cache = layer(x), layer.new_cache(2)
        parts = [layer(x[:, :12], cache=cache), layer(x[:, 12:12], cache=cache)]
        parts += [layer(x[:, t : t + 1], cache=cache) for t in range(12, TOKENS)]
        assert_near(torch.cat(parts, 1), whole.double(), limit=0.015)
        kept = [y.clone() for y in cache if y is not None]
        cache.reset()
        assert_near(layer(x, cache=cache), whole.double(), limit=0.015)
        for y, z in zip([y for y in cache if y is not None], kept, strict=True):
            assert_near(y, z.double(), "cache", 0.015)


def test_prompts_of_several_lengths():
    """Packed into a cache of as many sequences, which then go on together."""
    layer, x = layer_of("gated delta"), inputs()
    lengths = 3, 9
    with torch.no_grad():
        cache, ends = layer.new_cache(2), torch.tensor([0, 3, 12], dtype=torch.int32)
        layer(torch.cat([x[:1, :3], x[1:, :9]], 1), cu_seqlens=ends, cache=cache)
        step = layer(torch.stack([x[n, length : length + 1] for n, length in enumerate(lengths)]), cache=cache)
        for n, length in enumerate(lengths):
            assert_near(step[n], layer(x[n : n + 1, : length + 1])[0, -1:].double(), limit=0.015)


@pytest.mark.parametrize("name", ["gated delta", "kimi, shared keys", "gla, convolution", "mamba2"])
def test_compiles_whole(name):
    layer, x = layer_of(name), inputs(1, 5).requires_grad_()
    loss = lambda layer: layer(x).float().square().sum()
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(loss(layer), leaves)
    actual = torch.autograd.grad(loss(torch.compile(layer, fullgraph=True, backend="aot_eager")), leaves)
    for a, b in zip(actual, expected, strict=True):
        assert_near(a, b.double(), "gradient")


FIRST_CALL = """
import torch
from attention.nn import KimiDeltaAttention
layer = torch.compile(KimiDeltaAttention(32, num_heads=1, head_dim=32), fullgraph=True, backend="aot_eager")
with torch.autocast("cpu", torch.bfloat16):
    layer(torch.randn(1, 4, 32)).float().sum().backward()
"""


def test_a_first_call_may_be_compiled():
    """The convolution, the recurrence and the norm are imported while Dynamo traces the layer."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]


def test_generates_compiled():
    """The compiled layer updates the same cache, by the same numbers."""
    layer, x = layer_of("gated delta"), inputs(1, 5)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        caches = [layer.new_cache(1) for _ in range(2)]
        for part in x.split([4, 1], 1):
            assert torch.equal(*[call(part, cache=cache) for call, cache in zip((layer, compiled), caches)])
        for ours, theirs in zip(*caches):
            assert torch.equal(ours, theirs) and ours.any()


@pytest.mark.parametrize("name", ["kimi", "mamba2, all"])
def test_autocast(name):
    layer, x = layer_of(name, torch.float32), inputs(1).float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out, cache = layer(x), layer.new_cache(1)
        steps = [layer(x[:, t : t + 1], cache=cache) for t in range(3)]
    expected = plain(copy.deepcopy(layer).double(), x.double())
    assert_near(out, expected, limit=0.015)
    assert_near(torch.cat(steps, 1), expected[:, :3], limit=0.015)
    with pytest.raises(TypeError, match="dtype must be one of"):
        layer(x)


@pytest.mark.parametrize("name", ["gated delta", "gla"])
def test_trains_as_float64_does(name):
    """A few steps of gradient descent, and the same in plain torch."""
    layer, x = layer_of(name, torch.float32), inputs(1, 8).float()
    exact, target = copy.deepcopy(layer).double(), torch.roll(x, 1, 1)
    losses = []
    for model, call in ((layer, lambda: layer(x)), (exact, lambda: plain(exact, x.double()))):
        optimizer = torch.optim.SGD(model.parameters(), 0.03)
        losses.append([])
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=model is layer):
                loss = (call().double() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1][-1] < 0.75 * losses[1][0]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=0.02, atol=0)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
def test_a_sharded_step():
    """Under FSDP2, autocast and activation checkpointing the loss and the gradients are those of a plain step."""
    from torch.distributed.fsdp import fully_shard

    layer, x = layer_of("gated delta", torch.float32), inputs(1, 5).float()
    sharded, results = copy.deepcopy(layer), []
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        for model in layer, sharded:
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).float().square().sum()
            loss.backward()
            whole = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            results.append([loss.detach(), *(whole(parameter.grad) for parameter in model.parameters())])
    finally:
        torch.distributed.destroy_process_group()
    assert all(map(torch.equal, *results))


# ---- parts -----------------------------------------------------------------------------------------------------------
def test_short_conv():
    """ShortConv with a cache, and what it prints."""
    conv, x = nn.ShortConv(24, 3, bias=True, activation=None, dtype=torch.bfloat16), inputs(1, 9)[..., :24]
    expected = F.conv1d(F.pad(x.transpose(1, 2).float(), (2, 0)), conv.weight[:, None].float(), conv.bias.float(), groups=24)
    with torch.no_grad():
        cache = torch.zeros(1, 24, 2, dtype=torch.bfloat16)
        steps = torch.cat([conv(part, cache=cache) for part in x.split([4, 1, 4], 1)], 1)
    assert_near(conv(x), expected.transpose(1, 2).double(), limit=0.005)
    assert torch.equal(steps, conv(x)) and torch.equal(cache, x[:, -2:].transpose(1, 2))
    assert repr(conv) == "ShortConv(24, kernel_size=3, bias=True, activation=None)"


def test_initialisation():
    """As published; after to_empty from the meta device, too."""
    torch.manual_seed(0)
    for kind, arguments in CASES.values():
        layer = kind(DIM, **arguments, device="meta").to_empty(device="cpu")
        for module in layer.modules():
            module.reset_parameters() if hasattr(module, "reset_parameters") else None
        parameters = dict(layer.named_parameters())
        assert all(parameter.isfinite().all() for parameter in parameters.values())
        if "dt_bias" in parameters:
            dt, rates = F.softplus(layer.dt_bias), layer.A_log.exp()
            assert dt.min() > 0.9e-3 and dt.max() < 0.11 and layer.dt_bias._no_weight_decay
            if arguments.get("lower_bound"):  # rates of 1 to 16 would bring the sigmoid to exp(-100): no gradient
                assert (rates == 1).all() and layer.A_log._no_weight_decay
            else:
                assert (0 if kind is nn.GatedDeltaNet else 1) <= rates.min() < rates.max() <= 16
        if layer.conv1d is not None:
            assert layer.conv1d.weight.abs().max() <= layer.conv1d.weight.shape[1] ** -0.5
        assert layer.norm is None or (layer.norm.weight == 1).all()


def test_what_is_printed():
    shown = repr(layer_of("kimi"))
    assert "num_heads=2, num_v_heads=2, head_dim=16, head_v_dim=16, allow_neg_eigval=False, lower_bound=-5.0" in shown
    assert "GatedRMSNorm(16, eps=1e-05, activation='sigmoid', norm_before_gate=True)" in shown


@pytest.mark.parametrize(("shape", "groups"), [((2, 5, 3, 32), 1), ((2, 5, 96), 3), ((7, 64), 1), ((2, 2, 3, 2, 64), 2)])
@pytest.mark.parametrize("order", [True, False])
def test_gated_norm(shape, groups, order):
    """Kernels and torch's operations agree, and so do their gradients; the gate is a view, of rows that are not adjacent."""
    norm = nn.GatedRMSNorm(shape[-1], 1e-3, "sigmoid", order, groups, dtype=torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(shape).bfloat16().requires_grad_()
    gate = torch.randn(*shape[:-1], 2 * shape[-1]).bfloat16().requires_grad_()
    results = []
    for call in norm, norm.by_torch:
        y = call(x, gate[..., shape[-1] :])
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, gate, norm.weight])])
    for a, b in zip(*results, strict=True):
        assert_near(a, b.double(), limit=0.02)
    assert norm.float()(x.float()).dtype == torch.float32


def test_without_memory():
    """Forward and backward on the meta device."""
    for kind, arguments in CASES.values():
        layer = kind(DIM, **arguments, device="meta", dtype=torch.bfloat16)
        x = torch.empty(2, 9, DIM, device="meta", dtype=torch.bfloat16)
        layer(x).sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.GatedDeltaNet(32, num_heads=4, num_v_heads=6), "num_v_heads: must be a multiple of num_heads: num_heads=4"),
        (
            lambda: nn.GatedDeltaNet(32, num_heads=1, head_dim=24),
            "head_dim: heads of keys must have a multiple of 16, .* not 24",
        ),
        (lambda: nn.GatedLinearAttention(64, num_heads=4), "expand_k: heads of keys must have .* not 8"),
        (lambda: nn.Mamba2(32, headdim=16, d_state=24), "d_state: heads of keys must have .* not 24"),
        (lambda: nn.GatedDeltaNet(32, num_heads=1, head_dim=16, expand_v=1.3), "expand_v: must make a whole number of columns"),
        (lambda: nn.GatedDeltaNet(32, num_heads=1, head_dim=16, conv_size=5), "conv_size: must be from 2 to 4: conv_size=5"),
        (lambda: nn.Mamba2(32, headdim=16, d_conv=5), "d_conv: must be from 2 to 4: d_conv=5"),
        (lambda: nn.ShortConv(32, 1), "kernel_size: must be from 2 to 4: kernel_size=1"),
        (lambda: nn.GatedDeltaNet(32, num_heads=0), "num_heads: must be a positive integer: num_heads=0"),
        (lambda: nn.GatedDeltaNet(32, num_heads=2.0, head_dim=16), "num_heads: must be a positive integer: num_heads=2.0"),
        (lambda: nn.GatedDeltaNet(0, num_heads=1, head_dim=16), "hidden_size: must be a positive integer: hidden_size=0"),
        (lambda: nn.GatedLinearAttention(64, num_heads=2, gate_low_rank_dim=0), "gate_low_rank_dim: must be a positive"),
        (lambda: nn.Mamba2(32, headdim=16, d_state=16.0), "d_state: must be a positive integer: d_state=16.0"),
        (
            lambda: nn.KimiDeltaAttention(32, num_heads=1, head_dim=16, lower_bound=5.0),
            "lower_bound: must be negative",
        ),
        (
            lambda: nn.KimiDeltaAttention(32, num_heads=1, head_dim=16, lower_bound=-math.inf),
            "lower_bound: must be negative and",
        ),
        (lambda: nn.GatedLinearAttention(32, num_heads=3), "num_heads: must divide hidden_size expand_k"),
        (lambda: nn.Mamba2(32, headdim=48), "headdim: must divide expand d_model, 64: headdim=48"),
        (lambda: nn.Mamba2(32, headdim=16, d_state=16, ngroups=3), "ngroups: must divide the number of heads, 4: ngroups=3"),
        (lambda: nn.GatedRMSNorm(16, activation="gelu"), 'activation: must be "silu" .* or "sigmoid"'),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_calls_that_are_refused():
    layer, x = layer_of("gated delta"), inputs(2, 4)
    with pytest.raises(ValueError, match=rf"^x: must be \(B, S, {DIM}\): x.shape=\(2, 4, 16\)"):
        layer(x[..., :16])
    with pytest.raises(RuntimeError, match=r"^cache: .* call the layer under torch.no_grad\(\)"):
        layer(x, cache=layer.new_cache(2))
    window = torch.zeros(2, DIM, 3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"^cache: .* call the layer under torch.no_grad\(\)"):
        nn.ShortConv(DIM, dtype=torch.bfloat16)(x, cache=window)
    assert not window.requires_grad
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"^cache: state must be \(2, 4, 16, 32\), as new_cache\(2\)"),
    ):
        layer(x, cache=layer.new_cache(3))
    with torch.no_grad(), pytest.raises(ValueError, match=r"^cache: window must be \(2, 192, 3\), .*: cache.window=None"):
        layer(x, cache=layer.new_cache(2)._replace(window=None))
    with torch.no_grad(), pytest.raises(TypeError, match="^cache: must be what .* of the class RecurrentCache, not dict"):
        layer(x, cache={})
    halves = layer.new_cache(2)._replace(state=torch.zeros(2, 4, 16, 32, dtype=torch.bfloat16))
    with (
        torch.no_grad(),
        pytest.raises(TypeError, match=r"^cache: state must be float32, .*: cache.state.dtype=torch.bfloat16"),
    ):
        layer(x, cache=halves)
    for count in -1, 2.0, True:
        with pytest.raises(ValueError, match="^batch_size: must be a positive integer: batch_size="):
            layer.new_cache(count)
    for tokens in x.float(), x.half():
        with pytest.raises(TypeError, match="^x: dtype must be that of the layer's parameters, torch.bfloat16, outside of"):
            layer(tokens)
        with pytest.raises(TypeError, match="^x: dtype must be that of the layer's parameters, torch.bfloat16, outside of"):
            nn.Attention(DIM, heads=2, dtype=torch.bfloat16)(tokens)
    with pytest.raises(TypeError, match="^x: must be a torch tensor, not ndarray"):
        layer(x.float().numpy())


@pytest.mark.parametrize(
    ("cache", "error", "words"),
    [
        (torch.zeros(1, DIM, 4), ValueError, r"^cache: must be \(2, 32, 3\): cache.shape=\(1, 32, 4\), x.shape=\(2, 4, 32\)"),
        (torch.zeros(1, DIM, 3), ValueError, r"^cache: must be \(2, 32, 3\): cache.shape=\(1, 32, 3\)"),
        (
            torch.zeros(2, DIM, 3, dtype=torch.int32),
            TypeError,
            "^cache: must be a tensor of .* not cache.dtype=torch.int32",
        ),
        (True, TypeError, "^cache: must be a tensor of float32, bfloat16 or float16, not bool"),
    ],
)
def test_caches_that_a_convolution_refuses(cache, error, words):
    with torch.no_grad(), pytest.raises(error, match=words):
        nn.ShortConv(DIM, dtype=torch.bfloat16)(inputs(2, 4), cache=cache)


def test_rows_that_a_norm_refuses():
    norm, x = nn.GatedRMSNorm(DIM), inputs(2, 4)
    for dtype in torch.bfloat16, torch.float32:
        with pytest.raises(ValueError, match=r"^x: rows must have 32 columns: x.shape=\(2, 4, 16\)"):
            norm(x[..., :16].to(dtype))
        with pytest.raises(ValueError, match=r"^gate: must be shaped as x is: gate.shape=\(1, 4, 32\), x.shape=\(2, 4, 32\)"):
            norm(x.to(dtype), x[:1].to(dtype))


@pytest.mark.gpu
@every_case
def test_on_the_card(name):
    """The GPU's results and gradients are close to plain torch's in float64, and so is generation."""
    layer, x = layer_of(name, device="cuda"), inputs(2, 300, "cuda").requires_grad_()
    exact_layer, exact = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    out, expected = layer(x), plain(exact_layer, exact)
    assert_near(out, expected, limit=0.02)
    out.float().square().sum().backward()
    expected.square().sum().backward()
    assert_near(x.grad, exact.grad, "x", 0.06)
    with torch.no_grad():
        cache = layer.new_cache(2)
        parts = [layer(x[:, :290], cache=cache), *[layer(x[:, t : t + 1], cache=cache) for t in range(290, 300)]]
    assert_near(torch.cat(parts, 1), expected, limit=0.02)
