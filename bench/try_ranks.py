"""Candidates for attention.parallel, in one process a GPU, in turns.

python -m bench.try_ranks PART ..          host, messages, arrival
"""

import collections
import os
import random
import statistics
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import attention
from attention import parallel
from attention.parallel import gather, others, pieces
from attention.parallel.peers import Peers, Pending, peers_of
from attention.softmax import elsewhere
from bench.ranks import CAUSAL, drawn, messages_of, milliseconds, of_the_host, say, slowest

arrivals = sys.modules["attention.parallel.arrival"]
mapped = sys.modules["attention.parallel.mapped"]


class Waited(mapped.Mapped):
    """Copies are waited for before attention begins, as they were."""

    __hash__ = Peers.__hash__


class Together(Peers):
    """Own keys are put together with those that come, as they were."""

    __hash__ = Peers.__hash__


def as_before():
    """Ranks of the default group that do so."""
    (peers,) = peers_of(None)
    real = gather.Gather._others
    if real.__name__ == "_others":
        gather.Gather._others = lambda self, k, v, call: None if isinstance(self.peers, Together) else real(self, k, v, call)
    return Together(peers.group, peers.rank, peers.world, peers.ranks)


def another(cls):
    """Ranks that map another memory."""
    (peers,) = peers_of(None)
    return cls(peers.group, peers.rank, peers.world, peers.ranks, mapped.Memory(peers))


def turns(functions, turns=7, calls=10):
    """Milliseconds of each by name, in random order; the slowest rank's, of turns the median; and ratios to "one" / 2."""
    found = collections.defaultdict(list)
    for function in functions.values():
        function()
    order, drawn_order = list(functions), random.Random(0)
    for _ in range(turns):
        drawn_order.shuffle(order)
        for name in order:
            found[name].append(slowest(milliseconds(functions[name], calls)))
    return {name: statistics.median(found[name]) for name in functions}


def shares(what, functions, **options):
    times = turns(functions, **options)
    say(what=what, ms=times_of(times), share=times_of({n: times["one"] / 2 / t for n, t in times.items() if n != "one"}))


def times_of(times):
    return {n: round(t, 4) for n, t in times.items()}


def host():
    """Where a call's time goes."""
    mine = [parallel.shard(x) for x in drawn(1024, 8, 2)]
    whole = drawn(512, 8, 2)
    call = lambda: parallel.forward(*mine, scheme="gather", **CAUSAL)
    bare = messages_of(call)
    before = as_before()
    functions = {"gather": call, "messages": bare, "attention": lambda: attention.forward(*whole, **CAUSAL)}
    apart = parts_alone(mine, 1024)["alone, apart"]
    functions |= {"apart": apart, "messages, attention": lambda: (bare(), functions["attention"]())}
    functions["messages, apart"] = lambda: (bare(), apart())
    functions["before"] = lambda: parallel.forward(*mine, group=before, scheme="gather", **CAUSAL)
    same = torch.equal(call(), functions["before"]())
    times = collections.defaultdict(list)
    for _ in range(5):
        for name, function in functions.items():
            times[name].append(of_the_host(function))
    best = {name: round(statistics.median(x), 1) for name, x in times.items()}
    for name in "gather", "before":
        best[f"beyond {name}"] = round(best[name] - best["messages"] - best["attention"], 1)
    say(what="host us", same=same, **best, least={n: round(min(x), 1) for n, x in times.items()})
    seen, real = set(), elsewhere.apart
    elsewhere.apart = lambda *given: seen.add(tuple([x.data_ptr() for x in given[:3]])) or real(*given)
    for _ in range(50):
        call()
    elsewhere.apart = real
    say(what="addresses of keys and values of others, in 50 calls", different=len(seen))
    spent = collections.Counter()
    stack = []

    def watched(owner, name):
        real = getattr(owner, name)

        def inner(*args, **kwargs):
            begun = time.perf_counter()
            stack.append(0.0)
            found = real(*args, **kwargs)
            took = time.perf_counter() - begun
            within = stack.pop()
            spent[f"{getattr(owner, '__name__', '')}.{name}".removeprefix("attention.")] += took - within
            if stack:
                stack[-1] += took
            return found

        setattr(owner, name, inner)
        return lambda: setattr(owner, name, real)

    backend = peers_of(None)[0].group._get_backend(torch.device("cuda"))
    from attention.parallel import peers as peers_module
    from attention.parallel import softmax

    undo = [
        watched(*one)
        for one in (
            (peers_module, "_at_once"), (Pending, "wait"), (Peers, "exchange"), (attention, "forward"),
            (gather, "move"), (torch, "_foreach_copy_"), (gather.Gather, "attend"), (others.Others, "attend"),
            (elsewhere, "apart"), (softmax, "_call"), (softmax, "agreed"), (softmax, "_key"), (parallel, "forward"),
            (softmax, "_attend"),
        )
    ]  # fmt: skip
    for _ in range(30):
        parallel.forward(*mine, scheme="gather", **CAUSAL)
    spent.clear()
    for _ in range(20):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        for _ in range(10):
            parallel.forward(*mine, scheme="gather", **CAUSAL)
    for one in undo:
        one()
    say(
        what="own time, us",
        **{n: round(1e6 * t / 200, 1) for n, t in spent.items()},
        all=round(1e6 * sum(spent.values()) / 200, 1),
    )
    x = mine[1]
    two, lengths = [x.clone(), x.clone()], pieces._lengths((256, 512), 1, x.device)
    small = {
        "new_empty": lambda: x.new_empty((1, 1024, 2, 128)),
        "split": lambda: x.unsafe_split_with_sizes([256, 256], 1),
        "as_strided": lambda: x.as_strided((1, 256, 2, 128), (131072, 256, 128, 1), 256),
        "foreach_copy": lambda: torch._foreach_copy_(two, [x, x]),
        "current_stream": torch.cuda.current_stream,
        "attention": lambda: attention.forward(*whole, **CAUSAL),
        "parts": lambda: attention.forward(*whole, causal=True, lengths_k=lengths, return_lse=True),
        "is_capturing": torch.cuda.is_current_stream_capturing,
    }
    try:
        from torch._C._dynamo.guards import _empty_strided_cuda, _reinterpret_tensor

        small["_empty_strided_cuda"] = lambda: _empty_strided_cuda((1, 1024, 2, 128), (262144, 256, 128, 1), torch.bfloat16)
        small["_reinterpret_tensor"] = lambda: _reinterpret_tensor(x, (1, 256, 2, 128), (131072, 256, 128, 1), 256)
    except ImportError as error:
        say(what=str(error))
    send, receive = mine[1][:, :256].contiguous(), torch.empty_like(mine[1][:, :256]).contiguous()
    other = 1 - dist.get_rank()

    def one_message(n):
        backend._start_coalescing()
        for _ in range(n):
            backend.send([send], other, 0)
            backend.recv([receive], other, 0)
        backend._end_coalescing().wait()

    small |= {"1 each way": partial(one_message, 1), "2 each way": partial(one_message, 2)}
    say(what="us", **{n: round(of_the_host(f), 1) for n, f in small.items()})


def groups():
    """Groups with other numbers of NCCL's blocks, by name."""
    found = {"messages": None}
    for most in 2, 4, 8, 32:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = most
        options.config.min_ctas = min(most, 32 if most == 32 else 1)
        found[f"{most} ctas"] = dist.new_group(backend="nccl", pg_options=options)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    found["priority"] = dist.new_group(backend="nccl", pg_options=options)
    return found


def parts_alone(mine, length, dim=128):
    """Attention of a rank's queries with all keys there: as parallel makes it, and as the kernel that could wait for them."""
    q, k, v = drawn(length, *[x.shape[2] for x in mine[:2]])
    length = q.shape[1]
    rank = dist.get_rank()
    spans = parallel.Zigzag().spans(length, 2)[rank]
    end = spans[-1].stop
    ends = tuple([span.stop for span in spans])
    lengths = pieces._lengths(ends, 1, q.device)
    own = parallel.Zigzag().spans(length, 2)[rank]
    rest = [span for span in ((0, own[0].start), (own[0].stop, own[-1].start), (own[-1].stop, end)) if span[0] < span[1]]
    theirs = [torch.cat([x[:, a:b] for a, b in rest], 1) for x in (k, v)]
    seen = elsewhere.Seen(end, *own[0], *(own[1] if len(own) > 1 else (end, end)), True)
    awaits = torch.zeros(end // 128 + 1, dtype=torch.int32, device="cuda")
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    keys, values = k[:, :end].contiguous(), v[:, :end].contiguous()
    if len(spans) > 1:
        forward = lambda: attention.forward(mine[0], keys, values, causal=True, lengths_k=lengths, return_lse=True)
    else:
        forward = lambda: attention.forward(mine[0], keys, values, causal=True, return_lse=True)
    return {
        "attention alone": forward,
        "alone, arriving": lambda: elsewhere.arriving(mine[0], *theirs, lengths, *mine[1:], arrived, awaits, seen),
        "alone, apart": lambda: elsewhere.apart(mine[0], *theirs, lengths, *mine[1:], seen),
    }


def first(x):
    """A result, or the first of them."""
    return x[0] if isinstance(x, tuple) else x


def messages():
    """Numbers of NCCL's blocks; attention alone; messages alone; calls one by one."""
    every, before = groups(), as_before()
    for length, often in (16384, dict(turns=9, calls=10)), (65536, dict(turns=3, calls=2)):
        whole = drawn(length, 32, 8)
        mine = [parallel.shard(x) for x in whole]
        functions = {"one": lambda whole=whole: attention.forward(*whole, **CAUSAL)}
        for name, group in every.items():
            functions[name] = lambda mine=mine, group=group: parallel.forward(*mine, group=group, scheme="gather", **CAUSAL)
        functions["before"] = lambda mine=mine: parallel.forward(*mine, group=before, scheme="gather", **CAUSAL)
        functions |= parts_alone(mine, length)
        wanted = parallel.shard(functions["one"]())
        same = {n: -slowest(-float(torch.equal(first(f()), wanted))) for n, f in functions.items() if n != "one"}
        say(what="bits of one GPU", **same)
        if length == 16384:
            functions |= {f"{n} alone": messages_of(f) for n, f in functions.items() if "ctas" in n or n == "messages"}
        shares(f"messages S {length}", functions, **often)
        if length == 16384:
            some = {n: functions[n] for n in ("one", "messages", "before", "attention alone")}
            shares("one call at a time", some, turns=21, calls=1)
            shares("30 in a row", some, turns=5, calls=30)


def arrival():
    """Copies that are waited for, and copies that come while attention reads, beside messages."""
    coming, waited, finer = parallel.mapped(), another(Waited), {n: another(mapped.Mapped) for n in (1, 8)}
    most = arrivals.MOST, arrivals.LEAST
    real = gather.Gather._arrival
    gather.Gather._arrival = lambda self, q, call: None if isinstance(self.peers, Waited) else real(self, q, call)
    for length in 1024, 4096, 16384:
        torch.manual_seed(length)
        wrong, n = torch.zeros((), device="cuda"), 20
        for _ in range(n):
            whole = [torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)]
            for x in whole:
                dist.broadcast(x, 0)
            wanted = parallel.shard(attention.forward(*whole, **CAUSAL))
            mine = [parallel.shard(x) for x in whole]
            out = parallel.forward(*mine, group=coming, scheme="gather", **CAUSAL)
            wrong += (out != wanted).any()
        say(what=f"{n} calls of other arrays, S {length}", wrong=slowest(wrong.item()))
    busy, other = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros((), device="cuda")
    for _ in range(300):
        with torch.cuda.stream(busy):
            other @ other
        wrong += (parallel.forward(*mine, group=coming, scheme="gather", **CAUSAL) != wanted).any()
    say(what="300 repetitions under load", wrong=slowest(wrong.item()))
    cases = (
        (1024, 8, 2, dict(turns=5, calls=10)),
        (8192, 32, 8, dict(turns=9, calls=10)),
        (16384, 32, 8, dict(turns=11, calls=10)),
        (65536, 32, 8, dict(turns=3, calls=2)),
        (65536, 16, 16, dict(turns=3, calls=2)),
    )
    for length, heads, kv_heads, often in cases:
        whole = drawn(length, heads, kv_heads)
        mine = [parallel.shard(x) for x in whole]
        functions = {"one": lambda whole=whole: attention.forward(*whole, **CAUSAL)}
        for name, group in ("messages", None), ("copies", waited), ("arriving", coming):
            functions[name] = lambda mine=mine, group=group: parallel.forward(*mine, group=group, scheme="gather", **CAUSAL)
        for n in (1, 8) if length > 1024 else ():
            name = f"arriving in {n}"
            functions[name] = lambda mine=mine, group=finer[n]: parallel.forward(*mine, group=group, scheme="gather", **CAUSAL)
            arrivals.MOST, arrivals.LEAST = n, 2**20
            functions[name]()
            arrivals.MOST, arrivals.LEAST = most
        outs = [f() for n, f in functions.items() if n != "one"]
        same = [bool(torch.equal(outs[0], x)) for x in outs[1:]]
        del outs
        functions |= parts_alone(mine, length)
        times = {n: round(of_the_host(functions[n]), 1) for n in ("messages", "copies", "arriving")} if length <= 16384 else {}
        shares(f"arrival S {length} {heads}/{kv_heads}, same {same}, host us {times}", functions, **often)
        if length == 16384:
            some = {n: functions[n] for n in ("one", "messages", "arriving")}
            shares("one call at a time", some, turns=15, calls=1)
        del whole, mine, functions
        torch.cuda.empty_cache()


PARTS = {"host": host, "messages": messages, "arrival": arrival}


def rank(number, world, names, port):
    """What a process does."""
    torch.cuda.set_device(number)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=number, world_size=world, device_id=torch.device("cuda", number))
    for name in names:
        begun = time.perf_counter()
        with torch.no_grad():
            PARTS[name]()
        torch.cuda.empty_cache()
        say(part=name, seconds=time.perf_counter() - begun)
    os._exit(0)


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    mp.spawn(rank, (2, sys.argv[1:], 29400 + os.getpid() % 500), nprocs=2)
