"""Attention problems off the beaten track, beside torch's own attention (cuDNN and FlashAttention-2): unusual head dims, few
heads of long sequences, many of short ones, few queries of many keys, odd lengths, windows, packed sequences, their gradients,
and caches of every form.

`python -m bench.shapes forward decode backward tiles` prints a table, sorted by our time over the better peer's. A name that
follows takes those problems whose name contains it. Each problem is replayed from CUDA graphs, providers in random order,
medians of rounds; inputs rotate past L2 where that is possible; results are compared with float32 by the rule of the tests.
Where a cache has no peer, the bound is what a copy of as many bytes takes. `--warm n/m` runs the n-th of m parts once, so that
the kernels lie on disk: several processes at once do that faster than one.
"""

import contextlib
import itertools
import os
import random
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention
from bench.shapes_problems import BF16, asked, kernel_of, label

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: a rehearsal of tiny problems, in the interpreter
ROTATED, MOST_SETS, ROUNDS, GRAPH_MS = 192 * 2**20, 12, 5, 1.5
DEADLINE = float(os.environ.get("SHAPES_SECONDS", "1000"))


COSTS = {"forward": 1, "decode": 2, "backward": 3}  # kernels of a problem, about


# ---- inputs --------------------------------------------------------------------------------------------------------------
class RandomTensors:
    """Cuts arrays out of one buffer of random numbers, one behind the other: memory that was never cached."""

    def __init__(self, elements):
        self.buffers, self.elements, self.at = {}, elements, 0

    def take(self, shape, dtype):
        if dtype not in self.buffers:
            self.buffers[dtype] = torch.randn(self.elements, device=DEVICE, dtype=dtype)
        n = 1
        for x in shape:
            n *= x
        assert n <= self.elements, f"a buffer of {self.elements} is too small for {shape}"
        step = -(-n // 64) * 64
        if self.at + step > self.elements:
            self.at = 0
        self.at += step
        return self.buffers[dtype][self.at - step : self.at - step + n].view(shape)


def made(p, inputs):
    """{name: array} of a problem."""
    keys = (p.batch, p.keys, p.kv_heads)
    tensors = {
        "q": inputs.take((p.batch, p.queries, p.heads, p.dim), p.dtype),
        "k": inputs.take((*keys, p.dim), p.dtype),
        "v": inputs.take((*keys, p.value_dim), p.dtype),
    }
    if p.lens:
        for name, lens in zip(("ends", "ends_k"), zip(*p.lens)):
            tensors[name] = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=DEVICE)
    if p.lengths:
        tensors["lengths"] = torch.tensor(p.lengths, dtype=torch.int32, device=DEVICE)
    if p.page:
        tensors["pages"] = torch.randperm(p.batch * p.keys // p.page, device=DEVICE).int().view(p.batch, -1)
    if p.kind == "backward":
        tensors["dout"] = inputs.take((p.batch, p.queries, p.heads, p.value_dim), p.dtype)
        tensors["out"], tensors["lse"] = attention.forward(
            tensors["q"], tensors["k"], tensors["v"], return_lse=True, **variant_options(p, tensors)
        )
        tensors["into"] = [torch.empty_like(tensors[x]) for x in "qkv"]
    return tensors


def variant_options(p, given):
    """The options of problem p that attention.forward and backward share."""
    more = {"causal": p.causal, "window": p.window}
    if p.lens:
        more |= {"cu_seqlens": given["ends"], "cu_seqlens_k": given["ends_k"]}
    return more


# ---- providers -----------------------------------------------------------------------------------------------------------
def ours(p, given):
    q, k, v = given["q"], given["k"], given["v"]
    if p.kind == "forward":
        return attention.forward(q, k, v, family=p.family, **variant_options(p, given))
    if p.kind == "backward":
        dq, dk, dv = given["into"]
        return attention.backward(
            given["dout"], q, k, v, given["out"], given["lse"], dq=dq, dk=dk, dv=dv, **variant_options(p, given)
        )
    if p.page:
        k, v = (x.view(-1, p.page, *x.shape[2:]) for x in (k, v))
    return attention.decode(
        q, k, v, lengths=given["lengths"], pages=given.get("pages"), window=p.window, splits=p.splits, family=p.family
    )


def _flash_options(p, given):
    left, right = p.window or (None, None)
    most = (max(x for x, _ in p.lens), max(x for _, x in p.lens)) if p.lens else (p.queries, p.keys)
    ends = (given["ends"], given["ends_k"]) if p.lens else (None, None)
    window = {} if left is None and right is None else {"window_size_left": -1 if left is None else left}
    window |= {} if right is None else {"window_size_right": right}
    return ends, most, window


def flash(p, given):
    """FlashAttention-2, as torch has it; packed sequences and caches in use, but no pages."""
    q, k, v = given["q"], given["k"], given["v"]
    ends, most, window = _flash_options(p, given)
    cut = (lambda x: x[0]) if p.lens else (lambda x: x)
    q, k, v = map(cut, (q, k, v))
    if p.kind == "backward":
        saved = given["flash"]
        return torch.ops.aten._flash_attention_backward(
            cut(given["dout"]), q, k, v, saved[0], saved[1], *ends, *most, 0.0, p.causal, saved[2], saved[3], **window
        )
    if p.lengths and len(set(p.lengths)) > 1:
        raise NotImplementedError("torch's takes no lengths of caches")
    return torch.ops.aten._flash_attention_forward(q, k, v, *ends, *most, 0.0, p.causal, False, **window)[0]


def flash_saved(p, given):
    ends, most, window = _flash_options(p, given)
    cut = (lambda x: x[0]) if p.lens else (lambda x: x)
    q, k, v = (cut(given[x]) for x in "qkv")
    return torch.ops.aten._flash_attention_forward(q, k, v, *ends, *most, 0.0, p.causal, False, **window)[:4]


def cudnn(p, given):
    """cuDNN, through torch; masks that align the last query and the last key only where queries and keys are as many."""
    if p.lens or p.window or (p.lengths and len(set(p.lengths)) > 1):
        raise NotImplementedError("not asked")
    aligned = not p.causal or p.queries == p.keys
    if not aligned and p.queries > 1:
        raise NotImplementedError("aligned otherwise")
    q, k, v = (given[x].transpose(1, 2) for x in "qkv")
    causal = p.causal and p.queries > 1
    if p.kind == "backward":
        return torch.autograd.grad(given["cudnn"][0], given["cudnn"][1:], given["dout"].transpose(1, 2), retain_graph=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=p.heads != p.kv_heads).transpose(1, 2)


def cudnn_saved(p, given):
    leaves = [given[x].transpose(1, 2).detach().requires_grad_() for x in "qkv"]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.enable_grad():
        return F.scaled_dot_product_attention(*leaves, is_causal=p.causal, enable_gqa=p.heads != p.kv_heads), *leaves


# ---- checks --------------------------------------------------------------------------------------------------------------
def _formula(p, given, b, h, rows, seq, round):
    """(out, ) of some rows of head h of a sequence, in float32."""
    g = h // (p.heads // p.kv_heads)
    if p.lens:
        (first, n), (first_k, m) = ((int(given[x][seq]), int(given[x][seq + 1] - given[x][seq])) for x in ("ends", "ends_k"))
    else:
        first, n, first_k, m = 0, p.queries, 0, p.lengths[b] if p.lengths else p.keys
    q = given["q"][b, first : first + n, h].float()
    k, v = given["k"], given["v"]
    if p.page:
        table = given["pages"][b].long()
        k, v = (x.view(-1, p.page, *x.shape[2:])[table][:, :, g].reshape(p.keys, -1) for x in (k, v))
    else:
        k, v = k[b, first_k:, g], v[b, first_k:, g]
    k, v = k[:m].float(), v[:m].float()
    i = torch.arange(n, device=DEVICE)[rows]
    s = q[rows] @ k.T * p.dim**-0.5
    j, at = torch.arange(m, device=DEVICE), (i + m - n)[:, None]
    left, right = p.window or (None, None)
    right = 0 if p.causal else right
    if right is not None:
        s.masked_fill_(j > at + right, float("-inf"))
    if left is not None:
        s.masked_fill_(j < at - left, float("-inf"))
    out = round(round(s.softmax(-1).nan_to_num(0)) @ v)
    return out, (b, slice(first, first + n), h), rows


def _excess(got, ref, low, factor):
    """How large the greatest error is, in parts of what is allowed."""
    if not torch.isfinite(got).all():
        return float("inf")
    allowed = factor * (low - ref).abs().max() + 2**-9 * ref.abs().max() + 1e-6
    return ((got - ref).abs().max() / allowed).item()


def judged(p, given, result):
    """The error of some heads and rows, in parts of what is allowed."""
    if p.kind == "backward":
        return _judged_gradients(p, given, result)
    if p.lens:
        result = result.view(1, *result.shape[-3:])
    worst = 0.0
    sequences = range(len(p.lens)) if p.lens else range(1)
    for b, h, seq in {(0, 0, sequences[0]), (p.batch - 1, p.heads - 1, sequences[-1])}:
        n = p.lens[seq][0] if p.lens else p.queries
        for rows in (slice(0, min(n, 192)), slice(max(0, n - 192), n)):
            narrow = lambda x: x.to(p.dtype).float()
            ref, where, rows = _formula(p, given, b, h, rows, seq, lambda x: x)
            low, *_ = _formula(p, given, b, h, rows, seq, narrow)
            worst = max(worst, _excess(result[where][rows].float(), ref, low, 2))
    return worst


def _judged_gradients(p, given, result):
    """The worst excess over the error rule of the gradients of the last key head and of the query heads that share it."""
    group, b = p.heads // p.kv_heads, p.batch - 1
    first = (0, 0) if not p.lens else (int(given["ends"][-2]), int(given["ends_k"][-2]))
    cut = lambda x, at: x[b, at:].float()
    n, m = p.lens[-1] if p.lens else (p.queries, p.keys)
    if group * n * m > 2**28:
        return 0.0
    errors = []
    for round in (lambda x: x, lambda x: x.to(p.dtype).float()):
        k, v = cut(given["k"], first[1])[:, -1], cut(given["v"], first[1])[:, -1]
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for h in range(p.heads - group, p.heads):
            q, dout = cut(given["q"], first[0])[:, h], cut(given["dout"], first[0])[:, h]
            s = q @ k.T * p.dim**-0.5
            i, j = torch.arange(len(q), device=DEVICE)[:, None] + len(k) - len(q), torch.arange(len(k), device=DEVICE)
            if p.causal:
                s.masked_fill_(j > i, float("-inf"))
            if p.window:
                s.masked_fill_(j < i - p.window[0], float("-inf"))
            w = s.softmax(-1)
            ds = w * (dout @ v.T - (dout * round(round(w) @ v)).sum(-1, keepdim=True))
            dq, dk, dv = round(ds) @ k * p.dim**-0.5, dk + round(ds).T @ q * p.dim**-0.5, dv + round(w).T @ dout
        errors.append([round(x) for x in (dq, dk, dv)])
    got = [x if x.ndim == 4 else x[None] for x in result]
    heads = (p.heads - 1, p.kv_heads - 1, p.kv_heads - 1)
    mine = [x[b, at:, h].float() for x, at, h in zip(got, (first[0], first[1], first[1]), heads)]
    return max(_excess(x, ref, low, 3) for x, ref, low in zip(mine, *errors))


# ---- timing --------------------------------------------------------------------------------------------------------------
def _ms(call):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def captured(call, sets):
    """(a graph of calls that takes some GRAPH_MS, how many)"""
    call(sets[0])
    torch.cuda.synchronize()
    estimate = min(_ms(lambda: call(sets[-1])) for _ in range(2))
    calls = max(1, min(64, int(GRAPH_MS / max(estimate, 0.02))))
    calls = max(len(sets), calls // len(sets) * len(sets))
    if estimate > 4:
        calls = 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _, tensors in zip(range(calls), itertools.cycle(sets)):
            call(tensors)
    graph.replay()
    return graph, calls


class Provider(NamedTuple):
    """call(problem, arrays), for problems that `serves` says yes to. around: what holds while its calls are planned, which a
    trial of other shapes changes."""

    call: Any
    serves: Any = lambda p: True
    around: Any = contextlib.nullcontext


PROVIDERS = {"ours": Provider(ours), "flash": Provider(flash), "cudnn": Provider(cudnn)}


def timed(p, inputs, providers):
    """({provider: milliseconds}, {provider: error}, {provider: why it does not run})"""
    set_bytes = 2 * (p.batch * p.queries * p.heads + p.batch * p.keys * p.kv_heads) * (p.dim + p.value_dim)
    sets = [made(p, inputs) for _ in range(max(1, min(MOST_SETS, ROTATED // set_bytes)))]
    graphs, errors, missing = {}, {}, {}
    for name, (call, serves, around) in providers.items():
        if not serves(p):
            continue
        try:
            if p.kind == "backward" and name in ("flash", "cudnn"):
                for tensors in sets:
                    tensors[name] = {"flash": flash_saved, "cudnn": cudnn_saved}[name](p, tensors)
            with around():
                result = call(p, sets[0])
                if name == "cudnn" and p.kind == "backward":
                    result = [x.transpose(1, 2) for x in result]
                if not (p.page and name in ("flash", "cudnn")):  # these read the same bytes as if they lay in order
                    errors[name] = judged(p, sets[0], result)
                del result
                if DEVICE == "cuda":
                    graphs[name] = captured(lambda tensors, call=call: call(p, tensors), sets)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}".split("\n")[0][:150]
            if name == "ours" and os.environ.get("SHAPES_RAISE"):
                raise
            if "launch failure" in str(error) or "illegal" in str(error):
                raise
    times = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name in random.sample([*graphs], len(graphs)):
            graph, calls = graphs[name]
            times[name].append(_ms(graph.replay) / calls)
    return {name: statistics.median(x) for name, x in times.items()}, errors, missing


def copy_speed(inputs):
    """Bytes a millisecond that a copy reads and writes."""
    a = inputs.take((2**27,), BF16)
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * a.nbytes / statistics.median(_ms(lambda: b.copy_(a)) for _ in range(5))


def warm(problems, n, m, providers):
    """Each kernel of the n-th of m parts once."""
    groups = {}
    for p in problems:
        for name, provider in providers.items():
            if name not in ("flash", "cudnn") and provider.serves(p):
                groups.setdefault((name, *kernel_of(p)), []).append((p, provider))
    loads = [[] for _ in range(m)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(loads, key=lambda x: sum(COSTS[p.kind] for p, _ in x)).extend(group)
    began = time.time()
    for p, provider in loads[n]:
        try:
            inputs = RandomTensors(64 + max(p.batch * p.keys * p.kv_heads, p.batch * p.queries * p.heads) * p.dim)
            inputs.buffers[p.dtype] = torch.zeros(inputs.elements, device=DEVICE, dtype=p.dtype)
            with provider.around():
                provider.call(p, made(p, inputs))
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            print("WARM", label(p), type(error).__name__, str(error)[:300].replace("\n", " "), flush=True)
            if "launch failure" in str(error) or "illegal" in str(error):
                return
    print(f"{len(loads[n])} problems, {time.time() - began:.1f} s", flush=True)


def main(words, providers=PROVIDERS):
    if "--warm" in words:
        at = words.index("--warm")
        n, m = map(int, words[at + 1].split("/"))
        return warm(asked(words[:at], DEVICE == "cpu"), n, m, providers)
    problems, began, rows, skipped = asked(words, DEVICE == "cpu"), time.time(), [], []
    random.seed(7)
    torch.manual_seed(7)
    stream = torch.cuda.Stream() if DEVICE == "cuda" else None
    inputs = RandomTensors(5 * 2**28 if DEVICE == "cuda" else 2**20)
    speed = copy_speed(inputs) if DEVICE == "cuda" else 1.0
    print(f"a copy: {speed / 1e9:.2f} TB/s; {len(problems)} problems; {time.time() - began:.1f} s", flush=True)
    for p in sorted(random.sample(problems, len(problems)), key=lambda p: p.dim > 128):
        if time.time() - began > DEADLINE:
            skipped.append(label(p))
            continue
        one = time.time()
        try:
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():  # torch's gradients run on their forward's
                times, errors, missing = timed(p, inputs, providers)
        except Exception as error:
            rows.append((99.0, f"{label(p)} FAILED {type(error).__name__}: {str(error)[:200]}"))
            if "launch failure" in str(error) or "illegal" in str(error):
                print("the context is lost at", label(p), flush=True)
                break
            continue
        rows.append(line(p, times, errors, missing, speed, time.time() - one))
        if os.environ.get("SHAPES_SHOW"):
            print(rows[-1][1], flush=True)
    for _, text in sorted(rows, key=lambda x: -x[0]):
        print(text)
    if skipped:
        print("no time for:", "; ".join(skipped))
    print(f"{time.time() - began:.0f} s")


def line(p, times, errors, missing, speed, seconds):
    """(ratio, text) of a problem."""
    bound = max(p.nbytes / speed, p.flops / 8e11)  # ms: of memory, or of tensor cores at 800 TFLOPS
    mine, peers = times.get("ours"), {name: ms for name, ms in times.items() if name in ("flash", "cudnn")}
    best = min(peers.values(), default=None)
    if mine is None:
        ratio = 98.0 if DEVICE == "cuda" else 0.0
    else:
        ratio = mine / best if best else 0.8 * mine / bound  # without a peer: of four fifths of the bound
    wrong = {name: f"{x:.2f}" for name, x in errors.items() if not x <= 1}
    text = f"{ratio:5.2f} {label(p):62}"
    text += f" ours {mine * 1e3:8.1f} us" if mine else ""
    text += "".join(f" {name} {ms * 1e3:.1f}" for name, ms in peers.items())
    text += "".join(f" | {name} {ms / mine:.3f}" for name, ms in times.items() if mine and name not in ("ours", *peers))
    text += f"; of the bound {bound / mine:.2f}, {p.flops / mine / 1e9:.0f} TFLOPS" if mine else ""
    text += f" WRONG {wrong}" if wrong else ""
    text += "".join(f" FAILED {name} {why}" for name, why in missing.items() if name not in ("flash", "cudnn"))
    if not peers:
        text += f" (no peer: {'; '.join(f'{k} {v[:60]}' for k, v in missing.items() if k in ('flash', 'cudnn'))})"
    return (90 + ratio if "ours" in wrong else ratio), text + f" [{seconds:.1f} s]"


if __name__ == "__main__":
    main(sys.argv[1:])
