"""What a call costs on the host: thousands of single calls of small problems, with lengths and rows that were not seen; the
first call of a process; the imports. Medians, and with each the 90th percentile and the worst call.

`pytest bench/test_host.py --benchmark-json=host.json`
"""

import functools
import json
import os
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import attention  # noqa: E402
from bench.measure import report  # noqa: E402
from bench.test_linear import MEMBERS  # noqa: E402
from fuse import operators  # noqa: E402

CALLS, TURN, ROUNDS = 2000, 100, 3
LONGEST = 8192


def _tensors(*shape, n=1, dtype=torch.bfloat16):
    return [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(n)]


def _mask(b, h, i, j, documents):
    return documents[i] == documents[j]


def _score(s, b, h, i, j):
    return s - 0.1 * abs(i - j)


@functools.cache
def _nothing():
    """A function of q, k, v: an op that makes an array and does nothing else. What it takes compiled is torch's own part."""
    library = torch.library.Library("bench", "FRAGMENT")
    library.define("nothing(Tensor q, Tensor k, Tensor v) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    library.impl("nothing", lambda q, k, v: torch.empty_like(q), "CUDA")
    torch.library.register_fake("bench::nothing", lambda q, k, v: torch.empty_like(q), lib=library)
    _nothing.library = library  # the op lives as long as this
    return lambda q, k, v: torch.ops.bench.nothing(q, k, v)


class _Empty(torch.autograd.Function):
    """A Function of q, k and v that makes an array, and three in its backward pass: what autograd itself takes."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, dout):
        return tuple([torch.empty_like(x) for x in ctx.saved_tensors])


def _training():
    """{name: (a function, arguments of its n-th call)} of forward and backward passes, and what torch takes for them. The
    passes backward are those of one forward pass, again and again."""
    q, k, v = leaves = [x.requires_grad_() for x in _tensors(1, 128, 1, 128, n=3)]
    turned, (dout,) = tuple(x.transpose(1, 2) for x in leaves), _tensors(1, 128, 1, 128)
    with torch.no_grad():
        made = attention.forward(q, k, v, return_lse=True)
        plain = [x.detach() for x in leaves]

    def through(out, dout=dout):
        return (lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)), lambda n: ()

    return {
        "forward, lse": (functools.partial(attention.forward, return_lse=True), lambda n: plain),
        "forward with autograd": (attention.forward, lambda n: leaves),
        "empty Function": (_Empty.apply, lambda n: leaves),
        "SDPA with autograd": (F.scaled_dot_product_attention, lambda n: turned),
        "backward": (attention.backward, lambda n: (dout, *plain, *made)),
        "backward through autograd": through(attention.forward(q, k, v)),
        "backward, empty Function": through(_Empty.apply(q, k, v)),
        "backward, SDPA": through(F.scaled_dot_product_attention(*turned), dout.transpose(1, 2)),
    }


def _flash(q, k, v):
    """torch's flash attention on arrays (batch, seqlen, heads, head_dim)."""
    return F.scaled_dot_product_attention(*[x.transpose(1, 2) for x in (q, k, v)], is_causal=True).transpose(1, 2)


STEPS = {  # of training: functions of q, k, v, beta and decay
    "forward": (lambda q, k, v, beta, decay: attention.forward(q, k, v, causal=True), 3),
    "SDPA": (lambda q, k, v, beta, decay: _flash(q, k, v), 3),
    "linear": (lambda q, k, v, beta, decay: attention.linear(q, k, v, decay=decay), 5),
    "the gated delta rule": (lambda q, k, v, beta, decay: attention.delta_rule(q, k, v, beta, decay=decay), 5),
}


def _steps():
    """{name: (a forward and backward pass, arguments of its n-th call)}, at one length and at lengths that take as many
    launches and were not seen in hundreds of calls, so that what differs is that they are new."""
    arrays, dout = _tensors(1, LONGEST, 16, 128, n=3), *_tensors(1, LONGEST, 16, 128)
    arrays += [torch.rand(1, LONGEST, 16, device="cuda"), -torch.rand(1, LONGEST, 16, device="cuda")]

    def passes(call, needed):
        def step(dout, *leaves):
            torch.autograd.grad(call(*leaves), leaves[:needed], dout, allow_unused=True)

        return step

    def inputs(length):
        return [dout[:, :length], *[x[:, :length].detach().requires_grad_() for x in arrays]]

    steps = {}
    for name, (call, needed) in STEPS.items():
        steps[f"step of {name}"] = passes(call, needed), lambda n: inputs(1300)
        steps[f"step of {name}, new length"] = passes(call, needed), lambda n: inputs(1301 + n % 280)
    return steps


def _fused():
    """{name: (an operator of fuse, arguments of its n-th call)}, with numbers of rows or lengths that were not seen."""
    (x,), (norm, *weights) = _tensors(LONGEST, 256), (*_tensors(256), *_tensors(256, 256))
    (heads,), (scale,) = _tensors(1, LONGEST, 4, 64), _tensors(64)
    (router,), experts = _tensors(256, 8), _tensors(8, 128, 256, n=3)

    def sequence(n):
        return heads[:, : 100 + n].transpose(1, 2)

    return {
        "fused norm and product, new rows": (operators.rms_norm_linear, lambda n: (x[: 1 + n], norm, *weights)),
        "fused mixture of experts, new rows": (operators.mixture_of_experts, lambda n: (x[: 1 + n], router, *experts)),
        "fused qk_norm_attention, new length": (operators.qk_norm_attention, lambda n: (*[sequence(n)] * 3, scale, scale)),
    }


def _calls():
    """{name: (a function, arguments of its n-th call)}: of a form and addresses seen before, of three sets of inputs that take
    turns, of addresses not seen, and, as in generation, of a length not seen. Views are made beforehand."""
    q, k, v = _tensors(1, 128, 1, 128, n=3)
    out, turned = torch.empty_like(q), tuple(x.transpose(1, 2) for x in (q, k, v))
    (memory,) = _tensors(64 * CALLS + 128 * 128)
    moving = [memory[64 * n :][: 128 * 128].view(1, 128, 1, 128) for n in range(CALLS)]
    sets = [_tensors(1, 128, 1, 128, n=3) for _ in range(3)]
    one, *cache = _tensors(1, 1, 32, 128), *_tensors(1, LONGEST, 8, 128, n=2)
    few = _tensors(1, LONGEST, 2, 128, n=3)
    (decay,) = _tensors(1, LONGEST, 2, dtype=torch.float32)
    decay, (strength,) = -decay.abs(), _tensors(1, LONGEST, 2)

    def longer(x):
        return [x[:, : 100 + n] for n in range(CALLS)]

    keys, values = map(longer, cache)
    tokens, decays, strengths = [longer(x) for x in few], longer(decay), longer(strength.sigmoid())
    compiled = torch.compile(attention.forward, fullgraph=True)
    documents = torch.arange(128, device="cuda", dtype=torch.int32) // 50
    in_use = torch.full((1,), 128, device="cuda", dtype=torch.int32)
    return {
        "forward, out=": (functools.partial(attention.forward, out=out), lambda n: (q, k, v)),
        "forward": (attention.forward, lambda n: (q, k, v)),
        "forward, window": (functools.partial(attention.forward, out=out, causal=True, window=(32, None)), lambda n: (q, k, v)),
        "forward, mask": (functools.partial(attention.forward, out=out, mask=_mask, aux=(documents,)), lambda n: (q, k, v)),
        "torch SDPA": (F.scaled_dot_product_attention, lambda n: turned),
        "forward under torch.compile": (compiled, lambda n: (q, k, v)),
        "nothing under torch.compile": (torch.compile(_nothing(), fullgraph=True), lambda n: (q, k, v)),
        "SDPA under torch.compile": (torch.compile(F.scaled_dot_product_attention, fullgraph=True), lambda n: turned),
        "forward, out=, three sets": (functools.partial(attention.forward, out=out), lambda n: sets[n % 3]),
        "forward, new addresses": (attention.forward, lambda n: (moving[n], moving[n - 1], moving[n - 2])),
        "forward, new length": (attention.forward, lambda n: (*one, keys[n], values[n])),
        "decode": (functools.partial(attention.decode, lengths=in_use), lambda n: (*one, *cache)),
        "linear, new length": (attention.linear, lambda n: tuple(x[n] for x in tokens)),
        "linear with decay, new length": (
            lambda *x: attention.linear(*x[:3], decay=x[3]),
            lambda n: tuple(x[n] for x in (*tokens, decays)),
        ),
        "gated delta rule, new length": (
            lambda *x: attention.delta_rule(*x[:4], decay=x[4]),
            lambda n: tuple(x[n] for x in (*tokens, strengths, decays)),
        ),
        **_fused(),
        **_training(),
        **_steps(),
    }


NAMES = (
    "forward, out=", "forward", "forward, window", "forward, mask", "torch SDPA",
    "forward under torch.compile", "nothing under torch.compile",
    "SDPA under torch.compile", "forward, out=, three sets", "forward, new addresses", "forward, new length", "decode",
    "linear, new length", "linear with decay, new length", "gated delta rule, new length",
    "fused norm and product, new rows", "fused mixture of experts, new rows", "fused qk_norm_attention, new length",
    "forward, lse", "forward with autograd", "empty Function", "SDPA with autograd",
    "backward", "backward through autograd", "backward, empty Function", "backward, SDPA",
    *[f"step of {name}{length}" for name in STEPS for length in ("", ", new length")],
)  # fmt: skip


@functools.cache
def _times():
    """{name: milliseconds of every call itself, or the error of one}. They take turns, for processors change their speed within
    seconds; the device keeps up because the problems are small, and is waited for after each turn."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _take_turns(_calls())


def _take_turns(calls):
    times = {name: [] for name in calls}
    for first in range(0, CALLS, TURN):
        for name in [name for name, took in times.items() if isinstance(took, list)]:
            try:
                turn = _time_turn(*calls[name], range(first, first + TURN))
            except Exception as error:  # the other calls are timed all the same
                times[name] = error
            else:
                times[name] += turn if first else []  # the first turn warms up
    return times


def _time_turn(call, arguments, numbers):
    """Milliseconds of the calls with these numbers."""
    times = []
    for given in [arguments(n) for n in numbers]:
        start = time.perf_counter()
        call(*given)
        times.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return times


@pytest.mark.parametrize("name", NAMES)
def test_host_time(benchmark, name):
    times = _times()[name]
    if isinstance(times, Exception):
        raise times
    benchmark.group = "host time of one call"
    p90, worst = sorted(times)[len(times) * 9 // 10], max(times)
    benchmark.extra_info |= {"provider": name, "p90_us": round(p90 * 1e3, 1), "worst_us": round(worst * 1e3, 1)}
    report(benchmark, times)


IMPORT = """
import json, time, numpy
start = time.perf_counter()
{}
print(json.dumps(time.perf_counter() - start))
"""
IMPORTS = {
    "import attention": "import attention",
    "and its first function": "from attention import forward",
    "numba.cuda alone": "from numba import cuda",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_import(benchmark, name):
    """Imports in a process that has NumPy, from bytecode on disk: the first round writes it, and is not counted."""
    environment = {variable: value for variable, value in os.environ.items() if variable != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", IMPORT.format(IMPORTS[name])]
    times = []
    for _ in range(ROUNDS + 1):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        times.append(json.loads(done.stdout.splitlines()[-1]) * 1e3)
    benchmark.group = "imports of a process"
    benchmark.extra_info |= {"provider": name}
    report(benchmark, times[1:])


VARIANTS = {  # options of attention.forward
    "window": lambda: {"causal": True, "window": (1024, None)},
    "softcap": lambda: {"causal": True, "softcap": 30.0},
    "bias": lambda: {"bias": torch.zeros(1, 16, 4096, 4096, device="cuda")},
    "dropout": lambda: {"dropout": 0.1, "seed": 7},
    "QK-norm": lambda: {"q_norm": torch.ones(128, device="cuda"), "k_norm": torch.ones(128, device="cuda")},
    "mask": lambda: {"mask": _mask, "aux": (torch.arange(4096, device="cuda", dtype=torch.int32) // 700,)},
    "score": lambda: {"score": _score},
}


PASSES = {f"forward and backward, D {head_dim}": head_dim for head_dim in (64, 128)}
TRAINED = {
    f"forward and backward, {member}": member
    for member in ("simple GLA", "GLA, gates of models", "delta rule", "gated delta rule", "KDA, gates of models")
}


def first(name):
    """The call of this name, ready to be made; autograd itself, which begins threads, has been at work."""
    if name in PASSES | TRAINED:
        torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    if name in PASSES:
        inputs = [x.requires_grad_() for x in _tensors(1, 4096, 16, PASSES[name], n=3)]
        return lambda: attention.forward(*inputs, causal=True).sum().backward()
    if name in TRAINED:
        make, member, *_ = MEMBERS[TRAINED[name]]
        arrays = [x.requires_grad_() for x in make(1, 4096, 16)]
        return lambda: member(*arrays).sum().backward()
    make, ours, *_ = MEMBERS.get(name, (MEMBERS["linear"][0], attention.forward))
    return functools.partial(ours, *make(1, 4096, 16), **VARIANTS.get(name, dict)())


FIRST = """
import json, sys, time, torch
from bench.test_host import first
call = first(sys.argv[1])
torch.cuda.synchronize()
start = time.perf_counter()
call()
torch.cuda.synchronize()
print(json.dumps(time.perf_counter() - start))
"""


@pytest.mark.parametrize("cached", [False, True], ids=["compiled", "from disk"])
@pytest.mark.parametrize("name", ["forward", *PASSES, *TRAINED, *VARIANTS, *MEMBERS])
def test_first_call(benchmark, name, cached, tmp_path_factory):
    """The first call of a process, after imports and context: compiling, or loading from the disk cache."""
    folder = tmp_path_factory.mktemp("cache")

    def first(cache):
        environment = {**os.environ, "TILES_CACHE_DIR": str(cache)}
        command = [sys.executable, "-c", FIRST, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1]) * 1e3

    if cached:
        first(folder)
    times = [first(folder if cached else folder / str(n)) for n in range(ROUNDS)]
    benchmark.group = f"first call of a process, {name}"
    benchmark.extra_info |= {"provider": "from disk" if cached else "compiled"}
    report(benchmark, times)
