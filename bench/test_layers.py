"""The recurrent layers of attention.nn, forward, beside their parts, and beside flash-linear-attention's where installed.
`share` is a time over that of the layer: convolution and norms together are to have at most 0.15, and no layer is to be slower
than its parts. `pytest bench/test_layers.py -s`. See measure.py for the protocol; tests/attention compares results."""

import functools
import statistics

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

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


@functools.cache
def layer(name):
    return LAYERS[name][0]().to("cuda", torch.bfloat16)


def parts(ours, x):
    """{part: call} of a layer's modules, each with the inputs that it has in the layer."""
    inputs, hooks = {}, []
    for name, module in ours.named_children():
        if not isinstance(module, torch.nn.Sequential):
            keep = lambda *called, name=name: inputs.update({name: called})
            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        ours(x)
    for hook in hooks:
        hook.remove()
    return {name: lambda _, call=call: call[0](*call[1], **call[2]) for name, call in inputs.items()}


@functools.cache
def times(name, size):
    """{the layer or a part of it, or the peer: milliseconds of every round}"""
    sets = rotated(lambda: (torch.randn(*size, HIDDEN, device="cuda", dtype=torch.bfloat16),), 2 * size[0] * size[1] * HIDDEN)
    calls, peer = {"layer": layer(name)} | parts(layer(name), *sets[0]), LAYERS[name][1]
    if peer is not None:
        kind, arguments = peer
        try:
            theirs = library("fla.layers", kind)(hidden_size=HIDDEN, **arguments).to("cuda", torch.bfloat16).eval()
            calls["fla"] = lambda x: theirs(x)[0]
        except ABSENT:
            pass
    with torch.no_grad():
        return interleaved(calls, sets, ROUNDS)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("name", LAYERS)
def test_layers(benchmark, name, size):
    medians = {part: statistics.median(rounds) for part, rounds in times(name, size).items()}
    benchmark.group = f"{name} B {size[0]} S {size[1]}"
    report(benchmark, times(name, size)["layer"])
    shares = {part: round(ms / medians["layer"], 3) for part, ms in medians.items()}
    benchmark.extra_info |= {"ms": medians["layer"], "shares": shares}
    print(f"{benchmark.group}: {medians['layer']:.3f} ms, shares {shares}")
