"""The recurrent layers of attention.nn, forward and in a step of training, beside their parts, and beside
flash-linear-attention's where installed. A step is forward and the gradients of the input and of all parameters. `share` is a
time over that of the layer: convolution and norms together are to have at most 0.15 of forward, and no layer is to be slower
than its parts. `pytest bench/test_layers.py -s`. See measure.py for the protocol; tests/attention compares results."""

import functools
import statistics

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import attention  # noqa: E402
from attention import nn  # noqa: E402
from bench.measure import interleaved, report, rotated  # noqa: E402
from bench.peers import ABSENT, library  # noqa: E402

ROUNDS, HIDDEN = 5, 2048
SIZES = [(1, 32768), (8, 4096)]  # batch, tokens
QWEN = dict(num_heads=16, num_v_heads=32, head_dim=128)
LAYERS = {  # name: (the layer, flash-linear-attention's)
    "gated delta": (lambda: nn.GatedDeltaNet(HIDDEN, **QWEN), ("GatedDeltaNet", dict(expand_v=1, **QWEN))),
    "kimi": (lambda: nn.KimiDeltaAttention(HIDDEN, num_heads=32), ("KimiDeltaAttention", dict(num_heads=32, head_dim=128))),
    "gla": (lambda: nn.GatedLinearAttention(HIDDEN, num_heads=8), ("GatedLinearAttention", dict(num_heads=8))),
    "mamba2": (lambda: nn.Mamba2(HIDDEN), None),
}
FUNCTIONS = "delta_rule", "linear", "mamba2", "short_conv", "gated_rms_norm"
SMALL = "short_conv", "gated_rms_norm"


@functools.cache
def layer(name):
    return LAYERS[name][0]().to("cuda", torch.bfloat16)


def calls_of(ours, x):
    """{part: (function, arguments, options)} of a layer's call: projections, and functions of attention."""
    calls, monkeypatch, hooks = {}, pytest.MonkeyPatch(), []
    for name, module in ours.named_modules():
        if isinstance(module, torch.nn.Linear):
            keep = lambda module, arguments, name=name: calls.update({name: (module, arguments, {})})
            hooks.append(module.register_forward_pre_hook(keep))
    for name, function in [(name, getattr(attention, name)) for name in FUNCTIONS]:

        def record(*arguments, function=function, name=name, **options):
            calls[name] = function, arguments, options
            return function(*arguments, **options)

        monkeypatch.setattr(attention, name, record)
    ours(x)
    monkeypatch.undo()
    for hook in hooks:
        hook.remove()
    return calls


def apply(function, x):
    """x, a tensor or a structure of tensors, with the function applied to each tensor."""
    if isinstance(x, torch.Tensor):
        return function(x)
    if isinstance(x, dict):
        return {name: apply(function, y) for name, y in x.items()}
    if isinstance(x, tuple):
        parts = [apply(function, y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def step_of(function, arguments, options, leaves=()):
    """The function, and the gradients of the tensors among its arguments that need one, and of leaves."""
    found = list(leaves)
    apply(lambda x: found.append(x) if x.requires_grad else None, (arguments, options))
    with torch.no_grad():
        gradient = function(*arguments, **options).clone()
    return lambda _: torch.autograd.grad(function(*arguments, **options), found, gradient)


def parts(ours, x, training):
    """{part: call} of a layer, each with the arguments that it has in the layer, or a step of it."""
    result = {}
    for name, (function, *inputs) in calls_of(ours, x).items():
        arguments, options = apply(lambda y: y.detach().requires_grad_(training and y.requires_grad), tuple(inputs))
        if training:
            leaves = function.parameters() if isinstance(function, torch.nn.Module) else ()
            result[name] = step_of(function, arguments, options, leaves)
        else:
            result[name] = lambda _, function=function, arguments=arguments, options=options: function(*arguments, **options)
    return result


@functools.cache
def times(name, size, training):
    """{the layer or a part of it, or the peer: milliseconds of every round}"""
    make = lambda: (torch.randn(*size, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True),)
    sets, ours, peer = rotated(make, 2 * size[0] * size[1] * HIDDEN), layer(name), LAYERS[name][1]
    whole = {"layer": (ours, ours.parameters)}
    if peer is not None:
        kind, arguments = peer
        try:
            theirs = library("fla.layers", kind)(hidden_size=HIDDEN, **arguments).to("cuda", torch.bfloat16)
            whole["fla"] = (lambda x: theirs(x)[0]), theirs.parameters
        except ABSENT:
            pass
    calls = parts(ours, *sets[0], training)
    with torch.set_grad_enabled(training):
        for provider, (call, parameters) in whole.items():
            leaves = [*parameters()]
            step = lambda x, call=call, leaves=leaves: torch.autograd.grad(call(x), [x, *leaves], x, allow_unused=True)
            calls[provider] = step if training else call
        return interleaved(calls, sets, ROUNDS)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("name", LAYERS)
def test_layers(benchmark, name, size, training):
    medians = {part: statistics.median(rounds) for part, rounds in times(name, size, training).items()}
    benchmark.group = f"{name} B {size[0]} S {size[1]} {'step' if training else 'forward'}"
    report(benchmark, times(name, size, training)["layer"])
    shares = {part: round(ms / medians["layer"], 3) for part, ms in medians.items()}
    together = sum(share for part, share in shares.items() if part not in ("layer", "fla"))
    small = sum(shares.get(part, 0) for part in SMALL)
    benchmark.extra_info |= {"ms": medians["layer"], "shares": shares, "parts": together, "convolution and norm": small}
    print(f"{benchmark.group}: {medians['layer']:.3f} ms, parts {together:.3f}, convolution and norm {small:.3f}, {shares}")
