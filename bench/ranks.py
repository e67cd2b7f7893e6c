"""attention.parallel on the GPUs of one machine, one process a GPU: is it right, and how does it scale?

    python -m bench.ranks PART ..      host, forward, check, backward, linear, linear_backward, copies; all of them by default

Share of perfect scaling: what the whole takes on one GPU, by as many GPUs as there are and what it takes on them together. Both
are timed in turns, by CUDA events, on every GPU at once, several calls in a row, of which the first one waits for the host; the
slowest rank counts, and of turns the median. The peer: torch's context_parallel (all-gather, head-tail balance), with key heads
repeated, as it takes no shared ones."""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from functools import cache, partial
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import attention
from attention import parallel
from attention.parallel.peers import Peers, peers_of
from attention.public.delta_rules import final_states

TURNS, CALLS = 5, 3


def drawn(length, heads, kv_heads, dim=128):
    """q, k and v of the whole sequence, the same on every rank."""
    torch.manual_seed(0)
    shapes = [(1, length, n, dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def milliseconds(function, calls):
    """Milliseconds of a call on this GPU."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    begun.record()
    for _ in range(calls):
        function()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / calls


def slowest(x):
    """The largest value of all ranks."""
    times = torch.tensor([x], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.item()


def timed(functions, turns=TURNS, calls=CALLS):
    """Milliseconds of each function, by name, measured alternately."""
    seconds = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(turns):
        for name, function in functions.items():
            seconds[name].append(slowest(milliseconds(function, calls)))
    return {name: statistics.median(times) for name, times in seconds.items()}


def say(**figures):
    """Print a line of results as JSON, on the first rank."""
    if dist.get_rank() == 0:
        print(json.dumps({n: round(x, 4) if isinstance(x, float) else x for n, x in figures.items()}), flush=True)


def scaling(what, functions, **options):
    """Time the functions, of which "one" runs on one GPU, and print the shares of perfect scaling."""
    times, world = timed(functions, **options), dist.get_world_size()
    shares = {f"share {n}": times["one"] / world / t for n, t in times.items() if n != "one"}
    say(what=what, **{f"ms {n}": t for n, t in times.items()}, **shares)


# ---- parts -----------------------------------------------------------------------------------------------------------
CAUSAL = dict(causal=True)
DOCUMENTS = dict(mask=lambda b, h, i, j, docs: docs[i] == docs[j], causal=True)
CASES = (  # head_dim, tokens, options, schemes; gradients, too?
    (128, 8192, CAUSAL, ("gather", "ring"), True),
    (128, 5000, CAUSAL, ("gather",), True),
    (128, 8192, dict(window=(1000, 0)), ("gather",), False),
    (128, 8192, DOCUMENTS, ("gather",), False),
)


def check():
    """Gather has the bits of one GPU, gradients too with deterministic=True, repeatedly while the GPU is busy."""
    for dim, length, options, schemes, gradients in CASES:
        q, k, v = drawn(length, 4, 2, dim)
        dout = torch.randn_like(q)
        if "mask" in options:
            options = options | {"aux": (torch.arange(length, device="cuda", dtype=torch.int32) // 777,)}
        inputs, mine = [x.clone() for x in (q, k, v)], [parallel.shard(x) for x in (q, k, v)]
        for x in (*inputs, *mine):
            x.requires_grad_(gradients)

        def results(function, arrays, dout):
            out = function(*arrays)
            return [out.detach(), *(torch.autograd.grad(out, arrays, dout) if gradients else ())]

        one = partial(attention.forward, **options, deterministic=True)
        wanted = [parallel.shard(x) for x in results(one, inputs, dout)]
        said = {}
        for scheme in schemes:
            ranks = partial(parallel.forward, scheme=scheme, length=length, **options, deterministic=True)
            pairs = list(zip(results(ranks, mine, parallel.shard(dout)), wanted))
            same = [slowest(float(not torch.equal(x, y))) == 0 for x, y in pairs]
            off = [slowest(((x - y).abs().max() / y.abs().max()).item()) for x, y in pairs]
            said[scheme] = "bitwise" if all(same) else f"off by {[f'{x:.2g}' for x in off]}"
        say(what=f"check {[*options.items()][:2]} D {dim} S {length}, gradients {gradients}", **said)
    q, k, v = drawn(8192, 8, 2)
    wanted, mine = parallel.shard(attention.forward(q, k, v, **CAUSAL)), [parallel.shard(x) for x in (q, k, v)]
    busy, other = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros((), device="cuda")
    for _ in range(500):
        with torch.cuda.stream(busy):
            other @ other
        wrong += (parallel.forward(*mine, scheme="gather", **CAUSAL) != wanted).any()
    say(what="500 repetitions under load", wrong=slowest(wrong.item()))


def forward():
    """The forward pass, beside torch's."""
    shapes = [(16384, 32, 8, CAUSAL), (65536, 32, 8, CAUSAL), (65536, 16, 16, CAUSAL), (131072, 32, 8, dict(window=(4096, 0)))]
    if dist.get_world_size() > 2:
        shapes += [(262144, 32, 8, CAUSAL), (524288, 16, 16, CAUSAL)]
    for length, heads, kv_heads, options in shapes:
        q, k, v = drawn(length, heads, kv_heads)
        mine = [parallel.shard(x) for x in (q, k, v)]
        functions = {"one": lambda q=q, k=k, v=v, o=options: attention.forward(q, k, v, **o)}
        for scheme in ("gather", "ulysses", "ring") if "causal" in options else ("gather",):
            functions[scheme] = lambda m=mine, s=scheme, o=options: parallel.forward(*m, scheme=s, **o)
        if (mesh := two_dimensions()) and "causal" in options:
            by_rows = [parallel.shard(x, group=mesh) for x in (q, k, v)]
            for pair in ("ring", "ulysses"), ("gather", "ulysses"):
                functions[" ".join(pair)] = lambda m=by_rows, s=pair: parallel.forward(*m, group=mesh, scheme=s, **CAUSAL)
        often = dict(turns=1, calls=1) if length > 131072 else dict(turns=3) if length > 16384 else dict(turns=7, calls=10)
        scaling(f"forward S {length} {heads}/{kv_heads} {options}", functions, **often)
        estimates = parallel.forward(*mine, explain=True, **options).estimates
        say(what="the model's milliseconds", **{x.scheme: 1e3 * x.seconds for x in estimates if not x.why})
        torch.cuda.reset_peak_memory_stats()
        before, out = torch.cuda.memory_allocated(), None
        for scheme in "gather", "ring":
            torch.cuda.reset_peak_memory_stats()
            out = parallel.forward(*mine, scheme=scheme, **options)
            more = torch.cuda.max_memory_allocated() - before - out.nbytes
            say(what=f"memory {scheme}", beyond=more / 1e6, keys_of_all=2 * k.nbytes / 1e6, out=out.nbytes / 1e6)
            del out
        if ("causal" in options and length < 65536) or kv_heads == heads:
            theirs(q, k, v, functions["gather"])


@cache
def two_dimensions():
    """A mesh whose rows are pairs of ranks, if there are four or more."""
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    return init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("rows", "pairs")) if world > 2 else None


def theirs(q, k, v, ours):
    """torch's context_parallel on these arrays. It replaces torch.nn.functional's function, so that is called by this name; its
    result must equal that of `ours`. (Its balanced order is zigzag, too.)"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    try:
        from torch.distributed.tensor.experimental import context_parallel

        mesh, group = init_device_mesh("cuda", (dist.get_world_size(),)), q.shape[2] // k.shape[2]
        heads_first = [x.repeat_interleave(n, 2).transpose(1, 2).contiguous() for x, n in ((q, 1), (k, group), (v, group))]
        whole = context_parallel(mesh, buffers=heads_first, buffer_seq_dims=[2, 2, 2])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), whole:
            call = lambda: functional.scaled_dot_product_attention(*heads_first, is_causal=True)
            off = slowest((call().transpose(1, 2).float() - ours().float()).abs().max().item())
            times = timed({"torch": call, "gather": ours}, turns=3)
        ratio = times["torch"] / times["gather"] if off < 0.05 else "it computes something else"
        say(what=f"torch's context_parallel S {q.shape[1]} {q.shape[2]}/{k.shape[2]}", **times, off=off, ratio=ratio)
    except Exception as error:  # it moves from version to version
        say(what="torch's context_parallel", error=f"{type(error).__name__}: {error}"[:200])


def backward():
    """The backward pass is timed without the forward pass, which has run before."""
    shapes = [(16384, 32, 8), (65536, 32, 8)] + [(262144, 32, 8)] * (dist.get_world_size() > 2)
    for length, heads, kv_heads in shapes:
        q, k, v = drawn(length, heads, kv_heads)
        dout = torch.randn_like(q)
        whole = [x.requires_grad_() for x in (q, k, v)]
        out = attention.forward(*whole, **CAUSAL)
        functions = {"one": lambda o=out, w=whole, d=dout: torch.autograd.grad(o, w, d, retain_graph=True)}
        mine, its = [parallel.shard(x.detach()).requires_grad_() for x in whole], parallel.shard(dout)
        for scheme in "gather", "ring":
            o = parallel.forward(*mine, scheme=scheme, **CAUSAL)
            functions[scheme] = lambda o=o: torch.autograd.grad(o, mine, its, retain_graph=True)
        scaling(
            f"backward S {length} {heads}/{kv_heads}",
            functions,
            **dict(turns=1, calls=1) if length > 65536 else dict(turns=3, calls=2),
        )


def linear():
    """Simple GLA, the gated delta rule and Mamba-2: with so few heads that most of a GPU idles unless sequences are split, and
    with as many as fill it; and the delta rule's pass for states beside the one with outputs."""
    for length, heads in (131072, 32), (262144, 16), (65536, 64), (1048576, 16):
        q, k, v = drawn(length, heads, heads)
        k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
        decay = -torch.rand(1, length, heads, device="cuda") * 0.1
        beta, rate = torch.rand(1, length, heads, device="cuda"), -torch.rand(heads, device="cuda")
        part = lambda x: parallel.shard(x, order="contiguous")
        members = {
            "linear": ((q, k, v), (), dict(decay=decay)),
            "delta_rule": ((q, k, v, beta), (), dict(decay=decay)),
            "mamba2": ((v, beta, rate, k, q), (2,), {}),
        }
        for name, (whole, fixed, options) in members.items():
            mine = [x if n in fixed else part(x) for n, x in enumerate(whole)]
            its = {n: part(x) for n, x in options.items()}
            one, ranks = partial(getattr(attention, name), *whole, **options), partial(getattr(parallel, name), *mine, **its)
            wanted = part(one())
            off = slowest(((ranks() - wanted).abs().max() / wanted.abs().max()).item())
            del wanted
            say(what=f"{name} S {length}, {heads} heads, off by", off=off)
            scaling(f"{name} S {length}, {heads} heads", {"one": one, "ranks": ranks}, calls=10)
        if length > 262144:
            continue
        k, v, beta, decay = (part(x) for x in (k, v, beta, decay))
        begin = {columns: torch.zeros(1, heads, 128, columns, device="cuda") for columns in (128, 256)}
        passes = {"outputs": lambda: attention.delta_rule(k, k, v, beta, decay=decay)}
        passes |= {f"states of {n} columns": partial(final_states, k, v, beta, x, decay=decay) for n, x in begin.items()}
        say(what=f"passes of the delta rule over a part, {heads} heads", **timed(passes))


def linear_backward():
    """Gradients of the same recurrences. They are timed without the forward pass, which has run before."""
    for length, heads in (131072, 32), (262144, 16):
        q, k, v = drawn(length, heads, heads)
        k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
        decay, beta = -torch.rand(1, length, heads, device="cuda") * 0.1, torch.rand(1, length, heads, device="cuda")
        dout = torch.randn_like(v)
        part = lambda x: parallel.shard(x, order="contiguous")
        for name, arrays in ("linear", (q, k, v, decay)), ("delta_rule", (q, k, v, decay, beta)):
            functions, gradients = {}, {}
            for where, members, share in ("one", attention, lambda x: x), ("ranks", parallel, part):
                own = [share(x).detach().requires_grad_() for x in arrays]
                out = getattr(members, name)(*own[:3], *own[4:], decay=own[3])
                functions[where] = partial(torch.autograd.grad, out, own, share(dout), retain_graph=True)
                gradients[where] = functions[where]()
            pairs = zip(gradients["ranks"], map(part, gradients["one"]))
            off = [slowest(((x - y).abs().max() / y.abs().max()).item()) for x, y in pairs]
            say(what=f"{name} backward S {length}, {heads} heads, off by", off=max(off))
            del gradients
            scaling(f"{name} backward S {length}, {heads} heads", functions, turns=3, calls=3)


def of_the_host(function):
    """Microseconds of host time of a call, with several calls in a row."""
    for _ in range(20):
        function()
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(10):
            function()
        times.append((time.perf_counter() - begun) / 10)
    return 1e6 * statistics.median(times)


def copies():
    """Keys and values that copy engines copy while attention reads them, beside messages."""
    group = parallel.mapped()
    for length, heads, kv_heads in (1024, 32, 8), (8192, 32, 8), (16384, 32, 8), (65536, 32, 8), (65536, 16, 16):
        whole = drawn(length, heads, kv_heads)
        mine = [parallel.shard(x) for x in whole]
        functions = {"one": lambda whole=whole: attention.forward(*whole, **CAUSAL)}
        for name, one in ("messages", None), ("copies", group):
            functions[name] = lambda mine=mine, one=one: parallel.forward(*mine, group=one, scheme="gather", **CAUSAL)
        wrong = slowest(float((functions["copies"]() != functions["messages"]()).sum()))
        if length < 65536:
            say(what=f"copies S {length}", **{f"host us {n}": of_the_host(f) for n, f in functions.items()})
        often = dict(turns=3) if length > 16384 else dict(turns=7, calls=10)
        scaling(f"copies S {length} {heads}/{kv_heads}, {wrong} wrong", functions, **often)


def messages_of(call):
    """A function that repeats the exchange of a call of parallel.forward, and nothing else."""
    caught, real = [], Peers.exchange

    def exchange(peers, sends, receives):
        caught.append((peers, sends, receives))
        return real(peers, sends, receives)

    with patch.object(Peers, "exchange", exchange):
        call()
    ((peers, sends, receives),) = caught
    return lambda: peers.exchange(sends, receives).wait()


def host():
    """The host time of a call beyond its collectives and attention.forward; and the speed of the link."""
    mine = [parallel.shard(x) for x in drawn(1024, 8, 2)]
    whole = drawn(512, 8, 2)
    gather = lambda: parallel.forward(*mine, scheme="gather", **CAUSAL)
    bare, attend = messages_of(gather), lambda: attention.forward(*whole, **CAUSAL)
    functions = {"gather": gather, "messages": bare, "attention": attend, "messages and attention": lambda: (bare(), attend())}
    times = {name: of_the_host(function) for name, function in functions.items()}
    parts_total = times["messages"] + times["attention"]
    say(what="host us a call", **times, beyond=times["gather"] - parts_total)
    (peers,) = peers_of(None)
    other = peers.rank ^ 1
    for size in 2**23, 2**25, 2**27:
        a, b = (torch.empty(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))

        def both(a=a, b=b):
            peers.exchange([(other, a)], [(other, b)]).wait()

        time_of = timed({"exchange": both})["exchange"]
        say(what="link", MB=2 * size / 1e6, ms=time_of, GBs=2 * size / time_of / 1e6)


PARTS = {"host": host, "forward": forward, "check": check, "backward": backward, "linear": linear}
PARTS |= {"linear_backward": linear_backward, "copies": copies}


def rank(number, world, names, port):
    """The measurements of one process."""
    torch.cuda.set_device(number)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=number, world_size=world, device_id=torch.device("cuda", number))
    for name in names:
        begun = time.perf_counter()
        with torch.no_grad() if name in ("forward", "host", "linear", "copies") else nullcontext():
            PARTS[name]()
        torch.cuda.empty_cache()
        say(part=name, seconds=time.perf_counter() - begun)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    names = parser.parse_args().parts or list(PARTS)
    if unknown := set(names) - set(PARTS):
        parser.error(f"there are the parts {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    world = torch.cuda.device_count()
    if world < 2:
        sys.exit("there are fewer than two GPUs")
    print(torch.cuda.get_device_name(), "x", world, "torch", torch.__version__, flush=True)
    mp.spawn(rank, (world, names, 29400 + os.getpid() % 500), nprocs=world)


if __name__ == "__main__":
    main()
