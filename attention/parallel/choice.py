"""Which scheme serves a call: a model of bytes and time, and what it says of each.

A rank of R has S / R queries of H heads, and keys and values of Hk, of 2 bytes an element. With `seen` keys a query on average,

    compute   2 B S H seen (D + Dv) / R operations at `flops` a second
    gather    needs Hk (D + Dv) 2 bytes of each key that its queries see, and waits for them; where they are many for those of
              the `first_heads`, and the rest is under way while these are computed; a window's are under way while that is
              computed which sees no keys but its own rank's
    ulysses   S / R (H + Hk) (D + Dv) 2 (R - 1) / R bytes there and back, all of it waited for; heads do not lie together, so
              all R / (R - 1) of it is copied on both sides
    ring      S / R Hk (D + Dv) 2 bytes a step, which find the multiprocessors taken by what is computed meanwhile, and are
              waited for; a step reads and writes the result in float32, 8 bytes of each element, and rounding it takes 6; in
              several turns, for some key heads each, where two shares and that result do not fit at once, or turns are long

The figures of a Machine are those of an H200, of two of one host: docs/parallel.md says how well the model meets what was
measured, and what it says of more GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .orders import Span, Spans, contiguous_runs, count_tokens
from .pieces import ForwardCall
from .ulysses import UlyssesAttention

ITEM_BYTES = 2  # bytes of an element
MEMORY_FRACTION = 0.25  # of a GPU's memory that a scheme may take beyond its shards
MIN_STEP_BYTES = 2**26  # bytes that come, from which on it is worth a launch that some come first
HEAD_GROUPS = 4  # a quarter of the key heads does
MIN_SWEEP_SECONDS = 4e-3  # seconds of a turn of ring, beside which its own ends and messages are nothing
FULL_GPU_TILES = 264  # tiles that keep a GPU busy until the last one


@dataclass(frozen=True)
class MachineSpeeds:
    """One machine: operations per second of attention.forward; bytes per second that arrive at a GPU, and the least time of a
    message; bytes per second of its memory, and of copies of rows with gaps between them."""

    flops: float = 650e12
    link: float = 320e9
    message: float = 42e-6
    memory: float = 4e12
    copies: float = 0.7e12


class SchemeEstimate(NamedTuple):
    """What a scheme takes: seconds, bytes that come to a rank, and bytes that it holds beyond its shards; why: if it cannot
    serve the call, why; turns: see Ring."""

    scheme: str
    seconds: float
    nbytes: float
    held: float
    why: str = ""
    sweeps: int = 1

    def __str__(self):
        if self.why:
            return f"{self.scheme:8} cannot: {self.why}"
        figures = f"{1e3 * self.seconds:9.3f} ms  {self.nbytes / 1e6:10.1f} MB come  {self.held / 1e6:10.1f} MB held"
        return f"{self.scheme:8} {figures}" + f", in {self.sweeps} turns" * (self.sweeps > 1)


class SchemeChoice(NamedTuple):
    """The result of explain=True: the scheme, or a pair on a mesh, why, and the estimate for each, on a mesh none."""

    scheme: Any
    why: str
    estimates: tuple[SchemeEstimate, ...]

    def __str__(self):
        return "\n".join([f"{self.scheme}: {self.why}", *map(str, self.estimates)])


def choose(
    call: ForwardCall,
    batch: int,
    queries: Sequence[Spans],
    keys: Sequence[Spans],
    limit: float,
    machine: MachineSpeeds | None = None,
) -> SchemeChoice:
    """Of the schemes that can serve a call the one that takes least, among those that hold no more than `limit` bytes;
    "gather", in which a query meets its keys in one call, where another is not faster by a tenth."""
    estimates = tuple([estimate(name, call, batch, queries, keys, machine or MachineSpeeds(), limit) for name in SCHEMES])
    able = [one for one in estimates if not one.why]
    if not able:
        raise NotImplementedError(f"scheme: none can serve this call: {'; '.join([f'{x.scheme}: {x.why}' for x in estimates])}")
    fits = [one for one in able if one.held <= limit]
    if not fits:
        best = min(able, key=lambda one: one.held)
        return SchemeChoice(best.scheme, "it holds least, and none fits", estimates)
    best = min(fits, key=lambda one: one.seconds)
    if any([one.scheme == "gather" and one.seconds <= 1.1 * best.seconds for one in fits]):
        return SchemeChoice("gather", "a query meets its keys in one call, and no other is a tenth faster", estimates)
    others = [one for one in able if one not in fits]
    held = f"; {', '.join([one.scheme for one in others])} would hold more than {limit / 1e9:.3g} GB" if others else ""
    return SchemeChoice(best.scheme, f"it takes least{held}", estimates)


def count_first_heads(
    call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], worth: int = MIN_STEP_BYTES
) -> int:
    """How many key heads come to gather before the others, the same on all ranks; 0: all at once. A second message finds the
    multiprocessors taken, and often begins when the first heads are nearly done: so they are not few, and none where little
    comes."""
    heads = len(call.kv_heads)
    return heads // HEAD_GROUPS if _gather_costs(call, batch, queries, keys, MachineSpeeds())[0] >= worth else 0


def is_mostly_local(call: ForwardCall, queries: Sequence[Spans], keys: Sequence[Spans]) -> bool:
    """Do most queries of each rank see, by a window, their own rank's keys alone, so that what sees these is begun at once?"""
    if call.window[0] is None or call.options.get("dropout") or queries != keys or len(queries) == 1:
        return False
    counts = [sum([run.stop - call.first_local_query(run) for _, run in contiguous_runs(spans)]) for spans in queries]
    return all([2 * n >= count_tokens(spans) for n, spans in zip(counts, queries)])


def _gather_costs(
    call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], machine: MachineSpeeds
) -> tuple[float, float, float]:
    """(bytes that come to a rank, seconds that it computes, bytes of all keys that it sees), where these are most."""
    columns = sum(call.head_dims)
    work = max([sum([len(q) * seen(call, q) for q in spans]) for spans in queries], default=0)
    every = [count_tokens(call.key_ranges(spans)) for spans in queries]
    of_key = batch * len(call.kv_heads) * columns * ITEM_BYTES
    comes = max([n - count_tokens(own) for n, own in zip(every, keys)], default=0)
    return of_key * comes, 2 * batch * len(call.heads) * columns * work / machine.flops, of_key * max(every, default=0)


def min_sweeps(call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], limit: float) -> int:
    """How often ring must go round: as seldom as what it holds fits, or with a key head each time."""
    heads = len(call.kv_heads)
    able = [n for n in range(1, heads + 1) if heads % n == 0]
    return next((n for n in able if _ring_bytes(call, batch, queries, keys, n) <= limit), heads)


def plan_sweeps(call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], limit: float) -> int:
    """How often it does, forward: in more turns, so that it holds no more than two shares, where each of them takes long."""
    two = 2 * batch * len(call.kv_heads) * sum(call.head_dims) * ITEM_BYTES * max(map(count_tokens, keys), default=0)
    least, more = (min_sweeps(call, batch, queries, keys, most) for most in (limit, two))
    _, seconds, _ = _gather_costs(call, batch, queries, keys, MachineSpeeds())
    return max(least, more) if seconds >= more * MIN_SWEEP_SECONDS else least


def _ring_bytes(call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], sweeps: int) -> float:
    """Bytes that ring holds at most: the share that it works on and the one that is on its way, a copy of its own where not all
    heads travel at once, and the result in float32 with its sums."""
    share = batch * len(call.kv_heads) * sum(call.head_dims) * ITEM_BYTES * max(map(count_tokens, keys), default=0)
    result = 4 * batch * max(map(count_tokens, queries), default=0) * len(call.heads) * (call.head_dims[1] + 1)
    return (share * (min(2, len(queries) - 1) + (sweeps > 1)) + result) / sweeps


def estimate(
    scheme: str,
    call: ForwardCall,
    batch: int,
    queries: Sequence[Spans],
    keys: Sequence[Spans],
    machine: MachineSpeeds,
    limit: float = math.inf,
) -> SchemeEstimate:
    """What a scheme takes for a call. queries, keys: what each rank has; limit: bytes that it should hold."""
    world, heads, kv_heads = len(queries), len(call.heads), len(call.kv_heads)
    columns = sum(call.head_dims)
    why = refusal(scheme, call, queries, keys)
    if why:
        return SchemeEstimate(scheme, math.inf, math.inf, math.inf, why)
    of_key, most = batch * kv_heads * columns * ITEM_BYTES, max(map(count_tokens, queries), default=0)
    nbytes, compute, needed = _gather_costs(call, batch, queries, keys, machine)
    if scheme == "gather":
        early = nbytes * (count_first_heads(call, batch, queries, keys) or kv_heads) / kv_heads
        waits = early / machine.link + (machine.message if nbytes else 0)
        if is_mostly_local(call, queries, keys):
            early = waits = 0
        return SchemeEstimate(scheme, waits + max(compute, (nbytes - early) / machine.link), nbytes, needed)
    if scheme == "ulysses":
        each = batch * columns * ITEM_BYTES * most * (heads + kv_heads) * (world - 1) / world
        every = each * world / max(1, world - 1)
        moving = each / machine.link + 2 * machine.message + (2 * every / machine.copies if each else 0)
        return SchemeEstimate(scheme, compute + moving, each, every)
    share, sweeps = of_key * max(map(count_tokens, keys), default=0), plan_sweeps(call, batch, queries, keys, limit)
    element = batch * most * heads * call.head_dims[1] / machine.memory  # a byte of each of the result
    waits = (world - 1) * (share / machine.link + sweeps * machine.message)
    seconds = compute + waits + (8 * (world - 1) + 4 + 6) * element
    seconds += 2 * share / machine.copies if sweeps > 1 else 0
    held = _ring_bytes(call, batch, queries, keys, sweeps)
    return SchemeEstimate(scheme, seconds, (world - 1) * share, held, sweeps=sweeps)


SCHEMES = "gather", "ulysses", "ring"


def refusal(scheme: str, call: ForwardCall, queries: Sequence[Spans], keys: Sequence[Spans]) -> str:
    """Why a scheme cannot serve a call; "" if it can."""
    if scheme == "ulysses":
        shared = UlyssesAttention.split_heads(len(call.heads), len(call.kv_heads), len(queries))
        return "" if shared else f"{len(call.heads)} heads of {len(call.kv_heads)} key heads are not for {len(queries)} ranks"
    pairs = [(q, call.key_range(q)) for spans in queries for q in spans]
    if scheme == "ring":
        pairs = [(q, k) for spans in queries for q in spans for share in keys for k in share]
    try:
        for q, k in pairs:
            call.piece(q, k)
    except NotImplementedError as error:
        return str(error)
    return ""


def seen(call: ForwardCall, q: Span) -> float:
    """Keys that a query of a span sees, on average, by causal and window."""
    (left, right), middle = call.window, (q.start + q.stop) / 2 + call.key_offset
    end = call.keys if right is None else min(call.keys, middle + right)
    return max(0.0, end - (0 if left is None else max(0.0, middle - left)))
