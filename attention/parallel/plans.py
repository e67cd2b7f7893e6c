"""What calls of attention.parallel.forward of one form have in common, found out once: that all ranks ask for the same, the
scheme, and how long the whole is."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

import attention
from tiles.frameworks import describe

from ..families import FamilyAndBlock, choose_family, family_block_kv
from ..names import argument_hint
from ..options import check_flag
from ..softmax.forward_programs import FORWARD
from .agreement import PLAIN_TYPES, cache_key, describe_value
from .choice import MEMORY_FRACTION, SCHEMES, MachineSpeeds, SchemeChoice, choose, estimate, min_sweeps, plan_sweeps, refusal
from .gather import GatherAttention
from .gather_in_order import DeterministicGatherAttention
from .moves import all_heads
from .orders import Span, Spans, count_tokens, find_order
from .peers import SINGLE_RANK, Peers
from .pieces import ForwardCall, use_window
from .ring import RingAttention
from .ulysses import MeshGatherAttention, UlyssesAttention, merge_rank_spans
from .whole import COUNTS, check_tensors, check_values, check_whole, find_kv_block, parse_length

SHARED_OUT = {"causal", "scale", "deterministic", "family"}  # options of calls that softmax/shared_out.py may serve
WRITTEN = "lse", "accumulate"  # of attention.forward's arguments those that are not served
INDICES = 2**24  # see softmax/forward.py
ASKED = "it was asked for"
PRODUCTS = ("gather", "ulysses"), ("ring", "ulysses"), ("ring", "gather")


class ParallelPlan:
    """What calls of one form have in common: the scheme, how long the whole is, and why; and of those that are told no arrays
    all that is told."""

    def __init__(self, scheme: Any, length: int, keys: int, choice: SchemeChoice, call: ForwardCall):
        self.scheme, self.length, self.keys, self.choice = scheme, length, keys, choice
        self.plain, self.family = call.plain, call.options["family"]
        self.known = call if call.plain and "k_norm" not in call.options else None

    def call(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> ForwardCall:
        """A call of this form."""
        return self.known or make_call(self.length, self.keys, q, k, v, options | {"family": self.family})

    def backward_call(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> ForwardCall:
        """The call whose gradients are computed: keys are cut as for `call`, and the family is the one that was asked for."""
        kv, family = family_block_kv(self.family), options.get("family")
        options = options if kv is None else options | {"family": FamilyAndBlock(family, kv)}
        return make_call(self.length, self.keys, q, k, v, options)


def make_call(length: int, keys: int, q: Any, k: Any, v: Any, options: dict[str, Any]) -> ForwardCall:
    """A call on these arrays, or ones like them."""
    heads, kv_heads = all_heads(q.shape[2]), all_heads(k.shape[2])
    options = use_window(options, length, keys)
    plain = "seed" not in options and all(
        [type(x) in PLAIN_TYPES or inspect.isfunction(x) or _of_numbers(x) for x in options.values()]
    )
    return ForwardCall(options, length, keys, heads, kv_heads, (q.shape[3], v.shape[3]), q.device, plain)


def _of_numbers(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all([one is None or type(one) in PLAIN_TYPES for one in x])


def call_key(settings: tuple[Any, ...], q: Any, k: Any, v: Any, options: dict) -> Any:
    """What decides how a group's call is done: everything but what arrays hold, and a seed."""
    if "seed" in options:
        options = options | {"seed": None}
    forms = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device
    return (*settings, *forms, *options, *map(cache_key, options.values()))


def plan_call(
    peers: Sequence[Peers], settings: tuple[Any, ...], q: Any, k: Any, v: Any, options: dict[str, Any]
) -> tuple[str, ParallelPlan]:
    """What all ranks must have in common, in words, and the Plan. TypeError, ValueError, NotImplementedError."""
    refuse(options)
    check_tensors(q=q, k=k, v=v)
    scheme, order, *lengths, memory, return_lse = settings
    length, length_k = map(parse_length, ("length", "length_k"), lengths)
    order = find_order(order)
    check_flag("return_lse", return_lse)
    world = world_of(peers)
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"v: must have k's tokens: {tuple(k.shape)=}, {tuple(v.shape)=}")
    total = length_of(peers, q, length)
    if length_k is None:
        length_k = total if k.shape[1] == q.shape[1] else k.shape[1] * world
    queries, keys = order.spans(total, world), order.spans(length_k, world)
    rank = functools.reduce(lambda at, one: at * one.world + one.rank, peers, 0)
    for name, x, spans, whole in ("length", q, queries, total), ("length_k", k, keys, length_k):
        if count_tokens(spans[rank]) != x.shape[1]:
            had = f"rank {rank} of {world} has {x.shape[1]} tokens, and would have {count_tokens(spans[rank])} of {whole}"
            raise ValueError(f"{name}: {had} by {order}: give {name}, the number of all tokens, as shards may differ")
    plain = {name: x for name, x in options.items() if name not in ("blocks", "sink", "bias", *COUNTS)}
    with torch.no_grad():
        attention.forward(*[x.detach()[:, :0] for x in (q, k, v)], **plain)  # no query, no key: checked, but nothing launched
        check_whole(q, k, v, total, length_k, options)
    if ("mask" in options or "score" in options) and max(total, length_k) >= INDICES:
        raise ValueError(
            f"mask: counts queries and keys in float32, so there must be fewer than 2**24 of each: {total}, {length_k}"
        )
    check_values(options, total, length_k, planning=True)
    call = make_call(total, length_k, q, k, v, options | {"family": _family(q, k, v, options)})
    limit = _limit(memory, q)
    choice = _choice(peers, scheme, call, q.shape[0], queries, keys, limit)
    name = choice.scheme
    if "ring" not in name:  # the bits are those of one GPU
        with torch.no_grad():
            kv = find_kv_block(q, k, v, total, length_k, options)
        call = call._replace(
            options=call.options | {"family": FamilyAndBlock(call.options["family"], kv) if kv else call.options["family"]}
        )
    found, sweeps = _scheme(name, peers, call, q.shape[0], queries, keys, limit)
    forms = [f"{n}: {x.shape[0]} x {x.shape[2]} x {x.shape[3]} of {x.dtype}" for n, x in (("q", q), ("k", k), ("v", v))]
    named = [f"{name}={describe_value(name, x)}" for name, x in sorted(options.items()) if name not in ("seed", "bias")]
    named += [f"bias={_words_of_bias(options['bias'], total < 2 * world)}"] if "bias" in options else []
    of_shares = [f"length=None of shares of {q.shape[1]}: give length where these differ"] if lengths[0] is None else []
    plan = of_shares or [f"length={total}"]
    plan += [f"length_k={length_k}", f"{scheme=}", f"chosen={name}", f"{memory=}", f"{sweeps=}", f"{order=}", f"{return_lse=}"]
    return "; ".join([*forms, *plan, *named]), ParallelPlan(found, total, length_k, choice, call)


def world_of(peers: Sequence[Peers]) -> int:
    """How many ranks all dimensions have."""
    return math.prod([one.world for one in peers])


def length_of(peers: Sequence[Peers], x: Any, length: int | None) -> int:
    """The number of all tokens, this rank having those of x."""
    return x.shape[1] * world_of(peers) if length is None else length


def _words_of_bias(bias: Any, few: bool) -> str:
    """Its form, less how many rows this rank has; few: see `_of_few`."""
    batch, heads, rows, keys = bias.shape
    return f"{batch} x {heads} x {'1 row' if rows == 1 and not few else 'rows of queries'} x {keys} of {bias.dtype}"


def _family(q: Any, k: Any, v: Any, options: dict[str, Any]) -> str | None:
    """The family of kernels. A plain call names the one that it would get: if none is named, forward serves few queries of many
    keys, as a rank has them, by decode's kernels, and the last bits would be others than one GPU's."""
    if options.get("family") or not options.keys() <= SHARED_OUT:
        return options.get("family")
    forms = {name: describe(x.detach(), name).form for name, x in zip("qkv", (q, k, v))}
    return choose_family(FORWARD.problem(forms, "bshd"), None)


def _limit(memory: Any, q: Any) -> float:
    """Bytes that a scheme should hold."""
    if memory is not None:
        if not isinstance(memory, (int, float)) or not memory > 0:
            raise ValueError(f"memory: must be a number of bytes, more than 0: {memory=}")
        return float(memory)
    return MEMORY_FRACTION * torch.cuda.get_device_properties(q.device).total_memory if q.is_cuda else math.inf


def refuse(options: dict[str, Any]) -> None:
    """TypeError, ValueError: what attention.forward does not take."""
    if "layout" in options:
        raise ValueError(f'layout: must be "bshd" or "bhsd": layout={options["layout"]!r}')
    unknown = [name for name in options if name not in inspect.signature(attention.forward).parameters or name in WRITTEN]
    if unknown:
        known = [name for name in inspect.signature(attention.forward).parameters if name not in WRITTEN]
        hint = argument_hint(unknown[0], known)
        raise TypeError(f"attention.parallel.forward: takes no {unknown[0]}{f'; {hint}' if hint else ''}")


def _choice(
    peers: Sequence[Peers],
    scheme: Any,
    call: ForwardCall,
    batch: int,
    queries: tuple[Spans, ...],
    keys: tuple[Spans, ...],
    limit: float,
) -> SchemeChoice:
    """What is asked for, or by "auto" what is best; of two dimensions the first of PRODUCTS that serves the call."""
    if len(peers) > 2:
        raise ValueError(f"group: must have one or two dimensions, not {len(peers)}")
    if len(peers) == 2:
        if scheme not in ("auto", *PRODUCTS):
            raise ValueError(f'scheme: of a group of two dimensions must be "auto" or one of {PRODUCTS}: {scheme=}')
        refused = []
        for pair in PRODUCTS if scheme == "auto" else (scheme,):
            try:
                _scheme(pair, peers, call, batch, queries, keys, limit)
            except NotImplementedError as error:
                refused.append(f"{pair}: {error}")
            else:
                why = "; ".join(["the first that serves the call" if scheme == "auto" else ASKED, *refused])
                return SchemeChoice(pair, why, ())
        raise NotImplementedError(f"scheme: none can serve this call: {'; '.join(refused)}")
    if scheme == "auto":
        return choose(call, batch, queries, keys, limit)
    if scheme not in SCHEMES:
        raise ValueError(f'scheme: must be "auto" or one of {SCHEMES}: {scheme=}')
    if why := refusal(scheme, call, queries, keys):
        raise NotImplementedError(why)
    estimates = [estimate(one, call, batch, queries, keys, MachineSpeeds(), limit) for one in SCHEMES]
    return SchemeChoice(scheme, ASKED, tuple(estimates))


def _scheme(
    name: Any,
    peers: Sequence[Peers],
    call: ForwardCall,
    batch: int,
    queries: tuple[Spans, ...],
    keys: tuple[Spans, ...],
    limit: float,
) -> tuple[Any, int]:
    """The scheme of this name, or of a pair of names: the outer one of what the ranks of the inner dimension have together. And
    how often it goes round."""

    def by(name: str, peers: Peers, call: ForwardCall, queries: tuple[Spans, ...], keys: tuple[Spans, ...]) -> tuple[Any, int]:
        """The scheme of this name, of ranks that share a sequence."""
        if why := refusal(name, call, queries, keys):
            raise NotImplementedError(why)
        if name == "ring":
            sweeps = plan_sweeps(call, batch, queries, keys, limit)
            return RingAttention(peers, queries, keys, sweeps, min_sweeps(call, batch, queries, keys, limit)), sweeps
        in_order = call.options.get("deterministic") and DeterministicGatherAttention.serves(call)
        return (DeterministicGatherAttention if in_order else GatherAttention)(peers, queries, keys), 1

    if isinstance(name, str):
        if name == "ulysses":
            return UlyssesAttention(peers[0], queries, keys, _alone(call)), 1
        return by(name, peers[0], call, queries, keys)
    outer, inner = peers
    mine = slice(outer.rank * inner.world, (outer.rank + 1) * inner.world)
    rows = [slice(at * inner.world, (at + 1) * inner.world) for at in range(outer.world)]
    if name[1] == "gather":  # a rank keeps its queries, and has the keys of its row
        own = [queries[at.start + inner.rank] for at in rows]
        then, sweeps = by(name[0], outer, call, tuple(own), tuple([merge_rank_spans(keys[at]) for at in rows]))
        return MeshGatherAttention(inner, queries[mine], keys[mine], then), sweeps
    shares = UlyssesAttention.split_heads(len(call.heads), len(call.kv_heads), inner.world)
    if shares is None:
        raise NotImplementedError(
            f"scheme: {len(call.heads)} heads of {len(call.kv_heads)} key heads are not for {inner.world} ranks"
        )
    of_rows = [tuple([merge_rank_spans(spans[at]) for at in rows]) for spans in (queries, keys)]
    then, sweeps = by(name[0], outer, call.select_heads(*shares[inner.rank]), *of_rows)
    return UlyssesAttention(inner, queries[mine], keys[mine], then), sweeps


def _alone(call: ForwardCall) -> GatherAttention:
    """The scheme of one rank that has everything."""
    return GatherAttention(SINGLE_RANK, ((Span(0, call.length),),), ((Span(0, call.keys),),))
