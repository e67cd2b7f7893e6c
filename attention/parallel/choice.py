"""Which scheme to use for a call, by a model of bytes and time.

A rank of R has S / R queries of H heads, and keys and values of Hk heads, of 2 bytes an element. A query sees `visible` keys on
average.

    compute   2 B S H visible (D + Dv) / R operations, at `attention_flops` a second
    gather    receives Hk (D + Dv) 2 bytes of each remote key that its queries see, and waits for them; if they are many, only
              for those of the first heads (count_first_heads), and the rest arrive while these are computed; those of a window
              arrive while the queries that see only local keys are computed
    ulysses   sends S / R (H + Hk) (D + Dv) 2 (R - 1) / R bytes there and back, and waits for all of them; heads are not
              contiguous, so R / (R - 1) times as much is copied on both sides
    ring      receives S / R Hk (D + Dv) 2 bytes a step, and waits for them, because messages find all multiprocessors occupied
              by attention; a step reads and writes the result in float32, 8 bytes an element, and rounding it takes 6; in
              several sweeps, each for some key heads, if two shards and that result exceed the limit, or if sweeps are long
    pairs     on a mesh: the outer scheme, on what the ranks of the inner dimension have together, after the inner one's
              exchange: ulysses', or of all keys and values of these ranks

The defaults of MachineSpeeds were measured on two and four H200s of one host: docs/parallel.md compares the model with
measurements, and has its predictions for more GPUs (`python -m bench.ranks_model`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .orders import Span, Spans, contiguous_runs, count_tokens
from .subcalls import ForwardCall
from .ulysses import UlyssesAttention, merge_rank_spans

ITEM_BYTES = 2  # bytes of an element
MEMORY_FRACTION = 0.25  # of the GPU's memory, which a scheme may hold beyond its shards by default
MIN_STEP_BYTES = 2**26  # the fewest received bytes for which two steps, with two launches, are faster
HEAD_GROUPS = 4  # the first step has a quarter of the key heads
MIN_SWEEP_SECONDS = 4e-3  # the shortest ring sweep in which the ends of launches and the latency of messages are negligible
Pair = tuple[str, str]  # on a mesh: the scheme along the outer dimension and along the inner one
STEP_END = 50e-6  # seconds in which the last tiles of a step leave the other multiprocessors idle
FULL_GPU_TILES = 264  # the fewest tiles that keep a GPU busy until the last one


@dataclass(frozen=True)
class MachineSpeeds:
    """The speeds of a machine. attention_flops: operations per second of attention.forward. link_bandwidth: bytes per second
    that a GPU receives. message_latency: the seconds of empty messages, for each other rank. memory_bandwidth: bytes per second
    of GPU memory. copy_bandwidth: bytes per second of copies of rows with gaps between them."""

    attention_flops: float = 650e12
    link_bandwidth: float = 320e9
    message_latency: float = 35e-6
    memory_bandwidth: float = 4e12
    copy_bandwidth: float = 0.7e12


class SchemeEstimate(NamedTuple):
    """What a scheme takes: seconds, bytes that a rank receives (nbytes), and bytes that it holds beyond its shards
    (extra_bytes). why: the reason why it cannot serve the call, or "". sweeps: of RingAttention."""

    scheme: str | Pair
    seconds: float
    nbytes: float
    extra_bytes: float
    why: str = ""
    sweeps: int = 1

    def __str__(self):
        name = f"{self.name:8}"
        if self.why:
            return f"{name} unsupported: {self.why}"
        figures = f"{1e3 * self.seconds:9.3f} ms  {self.nbytes / 1e6:10.1f} MB received  {self.extra_bytes / 1e6:10.1f} MB held"
        return f"{name} {figures}" + f", in {self.sweeps} sweeps" * (self.sweeps > 1)

    @property
    def name(self) -> str:
        """The scheme, or the two of a pair."""
        return self.scheme if isinstance(self.scheme, str) else ", ".join(self.scheme)


class SchemeChoice(NamedTuple):
    """The result of explain=True: the scheme, or a pair on a mesh, why, and the estimate of each."""

    scheme: str | Pair
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
    """The fastest scheme among those that can serve the call and hold at most `limit` bytes; "gather", which has the bits of
    one GPU, unless another scheme is at least a tenth faster. If none is within the limit, the one that holds least."""
    machine = machine or MachineSpeeds()
    return _choose_among([estimate(name, call, batch, queries, keys, machine, limit) for name in SCHEMES], limit)


def choose_pair(
    call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], inner: int, limit: float
) -> SchemeChoice:
    """`choose` on a mesh whose inner dimension has so many ranks; ("gather", "ulysses") has the bits of one GPU."""
    speeds = MachineSpeeds(), MachineSpeeds()
    return _choose_among([estimate_pair(pair, call, batch, queries, keys, inner, speeds, limit) for pair in PAIRS], limit)


def _choose_among(estimates: Sequence[SchemeEstimate], limit: float) -> SchemeChoice:
    """The choice among estimates of which the first has the bits of one GPU."""
    usable = [one for one in estimates if not one.why]
    if not usable:
        raise NotImplementedError(f"scheme: none supports this call: {'; '.join([f'{x.name}: {x.why}' for x in estimates])}")
    fits = [one for one in usable if one.extra_bytes <= limit]
    if not fits:
        best = min(usable, key=lambda one: one.extra_bytes)
        return SchemeChoice(best.scheme, "none holds as little as memory=, and it holds least", tuple(estimates))
    exact, best = estimates[0], min(fits, key=lambda one: one.seconds)
    if exact in fits and exact.seconds <= 1.1 * best.seconds:
        return SchemeChoice(exact.scheme, "it has the bits of one GPU, and no other scheme is a tenth faster", tuple(estimates))
    others = [one for one in usable if one not in fits]
    excluded = f"; {' and '.join([one.name for one in others])} would hold more than {limit / 1e9:.3g} GB" if others else ""
    return SchemeChoice(best.scheme, f"it is the fastest{excluded}", tuple(estimates))


def count_first_heads(
    call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], min_bytes: int = MIN_STEP_BYTES
) -> int:
    """How many key heads gather receives before the others, the same on all ranks; 0: all at once. The second message finds all
    multiprocessors occupied, and often begins only when the first heads are nearly done: so the first heads are not few, and
    there are none if few bytes are received."""
    heads = len(call.kv_heads)
    return heads // HEAD_GROUPS if _gather_costs(call, batch, queries, keys, MachineSpeeds())[0] >= min_bytes else 0


def is_mostly_local(call: ForwardCall, queries: Sequence[Spans], keys: Sequence[Spans]) -> bool:
    """Do most queries of each rank see only keys of their own rank, because of a window? Then these are computed while keys
    arrive."""
    if call.window[0] is None or call.options.get("dropout") or queries != keys or len(queries) == 1:
        return False
    counts = [sum([run.stop - call.first_local_query(run) for _, run in contiguous_runs(spans)]) for spans in queries]
    return all([2 * n >= count_tokens(spans) for n, spans in zip(counts, queries)])


def _gather_costs(
    call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], machine: MachineSpeeds
) -> tuple[float, float, float]:
    """(bytes received, seconds of compute, bytes of all keys seen) of the rank with the most of each."""
    columns = sum(call.head_dims)
    work = max([sum([len(q) * mean_visible_keys(call, q) for q in spans]) for spans in queries], default=0)
    visible = [count_tokens(call.key_ranges(spans)) for spans in queries]
    bytes_per_key = batch * len(call.kv_heads) * columns * ITEM_BYTES
    received_keys = max([n - count_tokens(local) for n, local in zip(visible, keys)], default=0)
    seconds = 2 * batch * len(call.heads) * columns * work / machine.attention_flops
    return bytes_per_key * received_keys, seconds, bytes_per_key * max(visible, default=0)


def min_sweeps(call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], limit: float) -> int:
    """How often keys must go around the ring: the fewest sweeps for which it holds at most `limit` bytes, or one for each key
    head."""
    heads = len(call.kv_heads)
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return next((n for n in divisors if _ring_bytes(call, batch, queries, keys, n) <= limit), heads)


def plan_sweeps(call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], limit: float) -> int:
    """How often keys go around the ring in the forward pass: in more sweeps than needed if these are long, so that it holds at
    most two shards."""
    two_shards = 2 * batch * len(call.kv_heads) * sum(call.head_dims) * ITEM_BYTES * max(map(count_tokens, keys), default=0)
    fewest, for_two_shards = (min_sweeps(call, batch, queries, keys, one) for one in (limit, two_shards))
    _, seconds, _ = _gather_costs(call, batch, queries, keys, MachineSpeeds())
    return max(fewest, for_two_shards) if seconds >= for_two_shards * MIN_SWEEP_SECONDS else fewest


def _ring_bytes(call: ForwardCall, batch: int, queries: Sequence[Spans], keys: Sequence[Spans], sweeps: int) -> float:
    """Bytes that ring holds at most: the shard that it works on and the one that it receives, a copy of its own shard if it
    sends some heads at a time, and the result in float32 with its lse."""
    shard_bytes = batch * len(call.kv_heads) * sum(call.head_dims) * ITEM_BYTES * max(map(count_tokens, keys), default=0)
    result_bytes = 4 * batch * max(map(count_tokens, queries), default=0) * len(call.heads) * (call.head_dims[1] + 1)
    return (shard_bytes * (min(2, len(queries) - 1) + (sweeps > 1)) + result_bytes) / sweeps


def estimate(
    scheme: str,
    call: ForwardCall,
    batch: int,
    queries: Sequence[Spans],
    keys: Sequence[Spans],
    machine: MachineSpeeds,
    limit: float = math.inf,
) -> SchemeEstimate:
    """What a scheme takes for a call. queries, keys: the spans of each rank; limit: bytes that it may hold."""
    world, heads, kv_heads = len(queries), len(call.heads), len(call.kv_heads)
    columns = sum(call.head_dims)
    why = refusal(scheme, call, queries, keys)
    if why:
        return SchemeEstimate(scheme, math.inf, math.inf, math.inf, why)
    bytes_per_key, max_queries = batch * kv_heads * columns * ITEM_BYTES, max(map(count_tokens, queries), default=0)
    nbytes, compute, gathered_bytes = _gather_costs(call, batch, queries, keys, machine)
    if scheme == "gather":
        first_bytes = nbytes * (count_first_heads(call, batch, queries, keys) or kv_heads) / kv_heads
        wait_seconds = first_bytes / machine.link_bandwidth + (machine.message_latency * (world - 1) if nbytes else 0)
        if is_mostly_local(call, queries, keys):
            first_bytes = wait_seconds = 0
        return SchemeEstimate(
            scheme, wait_seconds + max(compute, (nbytes - first_bytes) / machine.link_bandwidth), nbytes, gathered_bytes
        )
    if scheme == "ulysses":
        exchange_seconds, sent_bytes, copied_bytes = _ulysses_exchange(call, batch, max_queries, world, machine)
        return SchemeEstimate(scheme, compute + exchange_seconds, sent_bytes, copied_bytes)
    shard_bytes, sweeps = (
        bytes_per_key * max(map(count_tokens, keys), default=0),
        plan_sweeps(call, batch, queries, keys, limit),
    )
    result_seconds = batch * max_queries * heads * call.head_dims[1] / machine.memory_bandwidth  # for one byte of each element
    wait_seconds = (world - 1) * (shard_bytes / machine.link_bandwidth + sweeps * (machine.message_latency + STEP_END))
    seconds = compute + wait_seconds + (8 * (world - 1) + 4 + 6) * result_seconds
    seconds += 2 * shard_bytes / machine.copy_bandwidth if sweeps > 1 else 0
    extra_bytes = _ring_bytes(call, batch, queries, keys, sweeps)
    return SchemeEstimate(scheme, seconds, (world - 1) * shard_bytes, extra_bytes, sweeps=sweeps)


SCHEMES = "gather", "ulysses", "ring"
PAIRS = ("gather", "ulysses"), ("ring", "ulysses"), ("ring", "gather")


def _ulysses_exchange(
    call: ForwardCall, batch: int, max_queries: int, world: int, machine: MachineSpeeds
) -> tuple[float, float, float]:
    """(seconds, bytes received, bytes copied) of ulysses' exchange there and back, of so many queries a rank."""
    heads = len(call.heads) + len(call.kv_heads)
    copied_bytes = batch * sum(call.head_dims) * ITEM_BYTES * max_queries * heads
    sent_bytes = copied_bytes * (world - 1) / world
    seconds = sent_bytes / machine.link_bandwidth + 2 * (world - 1) * machine.message_latency
    return seconds + (2 * copied_bytes / machine.copy_bandwidth if sent_bytes else 0), sent_bytes, copied_bytes


class OuterCall(NamedTuple):
    """What the outer scheme of a pair computes: its call, and the spans of each rank of the outer dimension."""

    call: ForwardCall
    queries: tuple[Spans, ...]
    keys: tuple[Spans, ...]


def outer_call(
    pair: Pair, call: ForwardCall, queries: Sequence[Spans], keys: Sequence[Spans], inner: int, rank: int
) -> OuterCall:
    """The OuterCall of the ranks that are `rank` of so many in the inner dimension. NotImplementedError."""
    rows = [slice(at, at + inner) for at in range(0, len(queries), inner)]
    merged_keys = tuple([merge_rank_spans(tuple(keys[at])) for at in rows])
    if pair[1] == "gather":  # a rank keeps its queries, and gathers the keys of its row of the mesh
        return OuterCall(call, tuple(queries[rank::inner]), merged_keys)
    shares = UlyssesAttention.split_heads(len(call.heads), len(call.kv_heads), inner)
    if shares is None:
        heads = f"{len(call.heads)} heads and {len(call.kv_heads)} key heads"
        raise NotImplementedError(f"scheme: {heads} cannot be divided evenly among {inner} ranks")
    return OuterCall(
        call.select_heads(*shares[rank]), tuple([merge_rank_spans(tuple(queries[at])) for at in rows]), merged_keys
    )


def estimate_pair(
    pair: Pair,
    call: ForwardCall,
    batch: int,
    queries: Sequence[Spans],
    keys: Sequence[Spans],
    inner: int,
    machines: tuple[MachineSpeeds, MachineSpeeds],
    limit: float = math.inf,
) -> SchemeEstimate:
    """What a pair takes on a mesh whose inner dimension has so many ranks. machines: the speeds along the outer dimension, and
    along the inner one. Ranks along the outer dimension need the inner scheme's arrays first."""
    try:
        parts = [outer_call(pair, call, queries, keys, inner, rank) for rank in range(inner)]
    except NotImplementedError as error:
        return SchemeEstimate(pair, math.inf, math.inf, math.inf, str(error))
    outer = max([estimate(pair[0], *part[:1], batch, *part[1:], machines[0], limit) for part in parts], key=lambda x: x.seconds)
    max_queries, max_keys = (max(map(count_tokens, spans), default=0) for spans in (queries, keys))
    if pair[1] == "ulysses":
        seconds, nbytes, held_bytes = _ulysses_exchange(call, batch, max_queries, inner, machines[1])
    else:
        nbytes = batch * len(call.kv_heads) * sum(call.head_dims) * ITEM_BYTES * max_keys * (inner - 1)
        seconds = nbytes / machines[1].link_bandwidth + (inner - 1) * machines[1].message_latency
        held_bytes = nbytes * inner / max(1, inner - 1)
    return outer._replace(
        scheme=pair,
        seconds=outer.seconds + seconds,
        nbytes=outer.nbytes + nbytes,
        extra_bytes=outer.extra_bytes + held_bytes,
    )


def refusal(scheme: str, call: ForwardCall, queries: Sequence[Spans], keys: Sequence[Spans]) -> str:
    """Why a scheme does not support a call; "" if it does."""
    if scheme == "ulysses":
        head_shares = UlyssesAttention.split_heads(len(call.heads), len(call.kv_heads), len(queries))
        heads = f"{len(call.heads)} heads and {len(call.kv_heads)} key heads"
        return "" if head_shares else f"{heads} cannot be divided evenly among {len(queries)} ranks"
    pairs = [(q, call.key_range(q)) for spans in queries for q in spans]
    if scheme == "ring":
        pairs = [(q, k) for spans in queries for q in spans for shard in keys for k in shard]
    try:
        for q, k in pairs:
            call.subcall(q, k)
    except NotImplementedError as error:
        return str(error)
    return ""


def mean_visible_keys(call: ForwardCall, q: Span) -> float:
    """How many keys a query of a span sees on average, by causal and window."""
    (left, right), middle = call.window, (q.start + q.stop) / 2 + call.key_offset
    end = call.keys if right is None else min(call.keys, middle + right)
    return max(0.0, end - (0 if left is None else max(0.0, middle - left)))
