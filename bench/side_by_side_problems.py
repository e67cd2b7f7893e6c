"""The problems of side_by_side.py, and the process of a side. That runs this file with the side's environment, in which
`attention` is imported, and asks for times; see `work`.
"""

import contextlib
import functools
import gc
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

ROTATED_BYTES, GRAPH_MS, MOST_SETS = 256 * 2**20, 8.0, 8
TOKENS, WIDTH = 16384, 2048  # of forward and backward: as bench/test_forward.py
LENGTHS = (1024, 4096, 16384)


# ---- problems: {name: function that returns (call, sets of its arguments)} -----------------------------------------------
def _rotated(make: Callable[[], tuple], nbytes: int) -> list[tuple]:
    return [make() for _ in range(min(MOST_SETS, max(2, -(-ROTATED_BYTES // nbytes))))]


def _normal(*shape):
    import torch

    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _softmax_inputs(head_dim: int, length: int) -> tuple:
    return tuple(_normal(TOKENS // length, length, WIDTH // head_dim, head_dim) for _ in range(3))


def _forward(head_dim: int, length: int, fp8=False, **options):
    import torch

    import attention

    def inputs():
        return tuple(x.to(torch.float8_e4m3fn) if fp8 else x for x in _softmax_inputs(head_dim, length))

    return functools.partial(attention.forward, **options), _rotated(inputs, 3 * TOKENS * WIDTH * (1 if fp8 else 2))


def _backward(head_dim: int, length: int, causal: bool, masking: dict[str, Any] | None = None, **options):
    """(call, sets of its arguments) of a gradient. masking: options of both directions that hide keys, beside `causal`.
    options: those of backward alone."""
    import torch

    import attention

    def inputs():
        q, k, v = _softmax_inputs(head_dim, length)
        out, lse = attention.forward(q, k, v, causal=causal, return_lse=True, **(masking or {}))
        return _normal(*q.shape), q, k, v, out, lse, *(torch.empty_like(q) for _ in range(3))

    def call(dout, q, k, v, out, lse, dq, dk, dv):
        attention.backward(dout, q, k, v, out, lse, causal=causal, dq=dq, dk=dk, dv=dv, **(masking or {}), **options)

    return call, _rotated(inputs, 8 * TOKENS * WIDTH * 2)


def _same_document(b, h, i, j):
    return i // 1024 == j // 1024


def _decode(batch: int, keys: int, heads: int, kv_heads: int, page=None, tokens=1):
    import torch

    import attention

    def inputs():
        cache = [_normal(batch, keys, kv_heads, 128) for _ in "kv"]
        options = {"lengths": torch.full((batch,), keys, dtype=torch.int32, device="cuda")}
        if page:
            cache = [x.view(-1, page, *x.shape[2:]) for x in cache]
            options["pages"] = torch.randperm(batch * keys // page, device="cuda").int().view(batch, -1)
        return _normal(batch, tokens, heads, 128), *cache, options

    def call(q, k, v, given):
        attention.decode(q, k, v, **given)

    return call, _rotated(inputs, 4 * batch * keys * kv_heads * 128)


def _mla(batch: int, keys: int, heads: int):
    import torch

    import attention

    def inputs():
        lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        return _normal(batch, 1, heads, 576), _normal(batch, keys, 576), lengths

    def call(q, latent, lengths):
        attention.mla_decode(q, latent, lengths=lengths, scale=192**-0.5)

    return call, _rotated(inputs, 2 * batch * keys * 576)


def _gates(kind: str, shape: tuple) -> Any:
    """Log-decays, in nats a token. `gentle`: of -0.05 in the mean. `production`: as Kimi Linear's, -2.5 in the mean. Raw
    members' are as large."""
    import torch

    gates = torch.rand(shape, device="cuda") * -5
    if kind == "gentle":
        return gates / 50
    if kind == "production":
        return -5 * torch.randn(shape, device="cuda").sigmoid()
    if kind == "a channel of -1e4":
        gates = gates / 50
        gates[..., 7] = -1e4
    elif kind == "a token in 64 of -inf":
        gates = gates / 50
        gates[:, 5::64] = -math.inf
    return gates


def _members(batch: int, length: int, heads=32, key_heads=None, gates="gentle", value_dim=128) -> dict[str, tuple]:
    """{member: (function that makes its inputs, its call, the call of its gradients, None for raw inputs)}"""
    import torch
    import torch.nn.functional as F

    import attention

    sizes, key_sizes = (batch, length, heads), (batch, length, key_heads or heads)
    decay = functools.partial(_gates, gates)

    def tokens():
        return _normal(*key_sizes, 128), F.normalize(_normal(*key_sizes, 128), dim=-1), _normal(*sizes, value_dim)

    def with_beta():
        return *tokens(), torch.rand(sizes, device="cuda", dtype=torch.bfloat16)

    def mamba():
        steps, rates = torch.rand(batch, length, 2 * heads, device="cuda") / 8, -torch.rand(2 * heads, device="cuda") - 0.5
        return _normal(batch, length, 2 * heads, 64), steps, rates, *(_normal(batch, length, 1, 128) for _ in "BC")

    def mamba_with_z(call):
        return lambda *given, **more: call(*given[:-1], z=given[-1], **more)

    def decayed(call, decay_at=-1):
        return lambda *given, **more: call(*given[:decay_at], decay=given[decay_at], **more)

    def unprepared(by_channel):
        """q, k, v, what beta and gates are made of, A_log and dt_bias."""
        last = (128,) if by_channel else ()
        rates = torch.full((heads,), math.log(0.06) if gates == "gentle" else 0.0, device="cuda")
        arrays = (
            _normal(*key_sizes, 128),
            _normal(*key_sizes, 128),
            _normal(*sizes, 128),
            _normal(*sizes),
            _normal(*sizes, *last),
        )
        return *arrays, rates, torch.zeros(heads, *last, device="cuda")

    def raw_gate(*arrays):
        return (attention.gates.softplus if gates == "gentle" else attention.gates.sigmoid)(*arrays)

    def raw_linear(q, k, v, b, *gate):
        return attention.linear(q, k, v, decay=raw_gate(*gate))

    def raw_delta(q, k, v, b, *gate):
        return attention.delta_rule(q, k, v, attention.gates.beta(b), decay=raw_gate(*gate), qk_l2norm=True)

    linear, delta, mamba2 = (
        (attention.linear, attention.linear_backward),
        (attention.delta_rule, attention.delta_rule_backward),
        (attention.mamba2, attention.mamba2_backward),
    )
    return {
        "linear": (tokens, *linear),
        "simple GLA": (lambda: (*tokens(), decay(sizes)), *map(decayed, linear)),
        "GLA": (lambda: (*tokens(), decay((*key_sizes, 128))), *map(decayed, linear)),
        "raw simple GLA": (lambda: unprepared(False), raw_linear, None),
        "raw GLA": (lambda: unprepared(True), raw_linear, None),
        "raw gated delta rule": (lambda: unprepared(False), raw_delta, None),
        "raw KDA": (lambda: unprepared(True), raw_delta, None),
        "delta rule": (with_beta, *delta),
        "gated delta rule": (lambda: (*with_beta(), decay(sizes)), *map(decayed, delta)),
        "KDA": (lambda: (*with_beta(), decay((*sizes, 128))), *map(decayed, delta)),
        "Mamba-2": (mamba, *mamba2),
        "Mamba-2 with z": (lambda: (*mamba(), _normal(batch, length, 2 * heads, 64)), *map(mamba_with_z, mamba2)),
        "based": (
            lambda: (_normal(*sizes, 16), _normal(*sizes, 16), _normal(*sizes, 64)),
            attention.based,
            attention.based_backward,
        ),
    }


def _recurrent(member: str, batch: int, length: int, what="forward", packed: tuple[int, ...] = (), **sizes):
    """(call, sets of its arguments) of a member. what: forward; gradients, by a call of their own; or training, which is both
    passes through torch's autograd. packed: lengths of sequences, whose sum is `length`."""
    import torch

    make, forward, gradients = _members(batch, length, **sizes)[member]
    more = {}
    if packed:
        more["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(packed)], dtype=torch.int32, device="cuda")

    def with_dout():
        given = make()
        return torch.randn_like(forward(*given, **more)), *given

    def train(dout, *leaves):
        torch.autograd.grad(forward(*leaves, **more), leaves, dout)

    def training_inputs():
        dout, *given = with_dout()
        return dout, *(x.requires_grad_() for x in given)

    call, inputs = {
        "forward": (functools.partial(forward, **more), make),
        "gradients": (gradients and functools.partial(gradients, **more), with_dout),
        "training": (train, training_inputs),
    }[what]
    return call, _rotated(inputs, 6 * math.prod(make()[2].shape))


def _convolution(what: str, length: int, channels: int):
    """(call, sets of its arguments) of the convolution before a recurrent layer, or its gradients."""
    import torch

    import attention

    weight = torch.rand(channels, 4, device="cuda", dtype=torch.bfloat16) - 0.5

    call, inputs = {
        "short_conv": (
            lambda x: attention.short_conv(x, weight, activation="silu"),
            lambda: (_normal(1, length, channels),),
        ),
        "short_conv_backward": (
            lambda dout, x: attention.short_conv_backward(dout, x, weight, activation="silu"),
            lambda: (_normal(1, length, channels), _normal(1, length, channels)),
        ),
    }[what]
    return call, _rotated(inputs, 4 * length * channels)


def _copy(nbytes: int):
    """(call, sets of its arguments) of a copy that reads and writes `nbytes` in all."""
    import torch

    def inputs():
        return tuple(torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2))

    return lambda target, source: target.copy_(source), _rotated(inputs, nbytes)


def _problems() -> Iterator[tuple[str, Callable]]:
    for head_dim, causal, length in itertools.product((64, 128, 256), (False, True), LENGTHS):
        what = f"D {head_dim} {'causal' if causal else 'full'} {length}"
        yield f"forward {what}", functools.partial(_forward, head_dim, length, causal=causal)
        yield f"backward {what}", functools.partial(_backward, head_dim, length, causal)
        if length == 4096:
            yield f"forward fp8 {what}", functools.partial(_forward, head_dim, length, fp8=True, causal=causal)
            yield f"backward in order {what}", functools.partial(_backward, head_dim, length, causal, deterministic=True)
    for head_dim in (64, 128):
        for name, option in {"window": {"window": (1024, 0)}, "softcap": {"softcap": 30.0}}.items():
            yield f"forward {name} D {head_dim} causal 4096", functools.partial(_forward, head_dim, 4096, causal=True, **option)
        for name, masking in {"window": {"window": (1024, 0)}, "mask": {"mask": _same_document}}.items():
            yield f"backward {name} D {head_dim} causal 4096", functools.partial(_backward, head_dim, 4096, True, masking)
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        what = f"by sm_80's kernels D {head_dim} {'causal' if causal else 'full'} 4096"
        yield f"forward {what}", functools.partial(_forward, head_dim, 4096, causal=causal, family="sm_80")
        yield f"backward {what}", functools.partial(_backward, head_dim, 4096, causal, family="sm_80")
    for length in (64, 128):  # short sequences, which sm_80's kernels serve on Hopper, too
        yield f"backward D 64 full {length}", functools.partial(_backward, 64, length, False)
    for sizes in ((1, 32768, 32, 8), (64, 8192, 64, 8), (32, 4096, 32, 8), (256, 300, 14, 2)):
        yield "decode B {} S {} H {}/{}".format(*sizes), functools.partial(_decode, *sizes)
    yield "decode B 64 S 8192 H 32/8 pages 16", functools.partial(_decode, 64, 8192, 32, 8, page=16)
    yield "decode B 16 S 8192 H 32/8 4 tokens", functools.partial(_decode, 16, 8192, 32, 8, tokens=4)
    for heads in (16, 128):
        yield f"mla_decode B 128 S 4096 H {heads}", functools.partial(_mla, 128, 4096, heads)
    for member in ("linear", "simple GLA", "GLA", "delta rule", "gated delta rule", "KDA", "Mamba-2", "based"):
        yield f"{member} B 8 S 4096", functools.partial(_recurrent, member, 8, 4096)
    for member in ("simple GLA", "GLA", "gated delta rule", "KDA"):
        yield f"{member} B 1 S 32768", functools.partial(_recurrent, member, 1, 32768)
    for member, kind in itertools.product(
        ("GLA", "KDA"), ("production", "0 to -5", "a channel of -1e4", "a token in 64 of -inf")
    ):
        yield f"{member} B 8 S 4096 gates {kind}", functools.partial(_recurrent, member, 8, 4096, gates=kind)
    for member in ("GLA", "KDA"):
        yield f"{member} B 1 S 32768 gates production", functools.partial(_recurrent, member, 1, 32768, gates="production")
    for member, (batch, length) in itertools.product(
        ("raw simple GLA", "raw GLA", "raw gated delta rule", "raw KDA"), ((8, 4096), (1, 32768))
    ):
        yield f"{member} B {batch} S {length}", functools.partial(_recurrent, member, batch, length)
        if member in ("raw GLA", "raw KDA"):
            make = functools.partial(_recurrent, member, batch, length, gates="production")
            yield f"{member} B {batch} S {length} gates production", make
    for member, heads in itertools.product(("linear", "simple GLA", "GLA", "gated delta rule", "KDA"), (8, 16)):
        yield f"{member} B 1 S 32768 H {heads}", functools.partial(_recurrent, member, 1, 32768, heads=heads)
    yield from _gradient_problems()
    for length, what in itertools.product((8192, 32768), ("short_conv", "short_conv_backward")):
        yield f"{what} S {length} C 4096", functools.partial(_convolution, what, length, 4096)
    for tensors in (2, 3, 7):
        yield f"copy of {tensors} tensors of 8 x 2048 x 32 x 128", functools.partial(_copy, tensors * 2**27)


def _gradient_problems() -> Iterator[tuple[str, Callable]]:
    """The gradients of the recurrent family, as (name, function that prepares a call)."""
    members: dict[str, dict[str, Any]] = {
        "linear": {},
        "simple GLA": {},
        "GLA": {"gates": "production"},
        "delta rule": {},
        "gated delta rule": {},
        "KDA": {"gates": "production"},
        "Mamba-2": {},
        "Mamba-2 with z": {},
        "based": {},
    }
    ragged = (777, 3000, 64, 1, 5000, 1023, 0, 6519)
    for what, (member, gates) in itertools.product(("gradients", "training"), members.items()):
        yield f"{member} {what} B 8 S 2048", functools.partial(_recurrent, member, 8, 2048, what, **gates)
    for member, gates in members.items():
        yield f"{member} gradients B 1 S 32768", functools.partial(_recurrent, member, 1, 32768, "gradients", **gates)
    for member in ("linear", "simple GLA", "GLA", "delta rule", "gated delta rule", "KDA"):
        packed = functools.partial(_recurrent, member, 1, sum(ragged), "gradients", ragged, **members[member])
        yield f"{member} gradients packed 16384", packed
    for member, length in itertools.product(("delta rule", "gated delta rule"), (8192, 32768)):
        for what in ("gradients", "training"):
            name = f"{member} {what} B 1 S {length} H 16/32"
            yield name, functools.partial(_recurrent, member, 1, length, what, key_heads=16)
    for member in ("gated delta rule", "KDA"):
        wide = functools.partial(_recurrent, member, 8, 2048, "gradients", value_dim=256)
        yield f"{member} gradients B 8 S 2048 Dv 256", wide
    for key_heads in (2, 8, 16):
        name = f"simple GLA gradients B 8 S 2048 H {key_heads}/32"
        yield name, functools.partial(_recurrent, "simple GLA", 8, 2048, "gradients", key_heads=key_heads)
    for member in ("GLA", "KDA"):
        strong = functools.partial(_recurrent, member, 8, 2048, "gradients", gates="a channel of -1e4")
        yield f"{member} gradients B 8 S 2048 strong", strong


PROBLEMS = dict(_problems())


# ---- a side's process ----------------------------------------------------------------------------------------------------
class Replay:
    """A problem in a CUDA graph of so many calls that a replay takes some milliseconds."""

    def __init__(self, name: str):
        import torch

        torch.manual_seed(0)
        call, sets = PROBLEMS[name]()
        for inputs in sets:
            call(*inputs)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for inputs in sets:
            call(*inputs)
        end.record()
        end.synchronize()
        rounds = max(1, round(GRAPH_MS / max(start.elapsed_time(end), 1e-3)))
        self.calls = rounds * len(sets)
        gc.collect()  # see measure.replayed
        self.graph, self.sets, self.events = torch.cuda.CUDAGraph(), sets, (start, end)
        with torch.cuda.graph(self.graph):
            for inputs in sets * rounds:
                call(*inputs)

    def microseconds(self) -> float:
        """The mean of a call, in the second of two replays."""
        start, end = self.events
        self.graph.replay()
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / self.calls


def work() -> None:
    """Serve one side: a line in, `prepare NAME`, `time` or `drop`; a line of JSON out."""
    answers, sys.stdout = sys.stdout, sys.stderr
    replay = None
    for line in sys.stdin:
        order, _, name = line.rstrip("\n").partition(" ")
        answer: float | str | None = None
        try:
            if order == "prepare":
                replay = Replay(name)
            elif order == "time" and replay:
                answer = replay.microseconds()
            else:
                import torch

                replay = None
                torch.cuda.empty_cache()
        except Exception as error:
            replay, answer = None, f"{type(error).__name__}: {error}".partition("\n")[0]
        print(json.dumps(answer), file=answers, flush=True)


def compile_part(part: str) -> None:
    """Call the n-th of m parts of some problems once. part: [[n, m], names] in JSON."""
    which, names = json.loads(part)
    for name in names[which[0] :: which[1]]:
        with contextlib.suppress(Exception):
            call, sets = PROBLEMS[name]()
            call(*sets[0])


if __name__ == "__main__":
    if sys.argv[1:]:
        compile_part(sys.argv[1])
    else:
        work()
