"""Plans of calls of attention.parallel.forward, made once for each call signature: that all ranks make the same call, the
scheme, and the lengths of the whole sequence."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

import attention
from tiles.launching.frameworks import describe

from ..families import FamilyAndBlock, choose_family, family_block_kv
from ..names import argument_hint
from ..options import check_flag
from ..plans.softmax.forward_programs import FORWARD
from .agreement import PLAIN_TYPES, cache_key, describe_value
from .choice import (
    MEMORY_FRACTION,
    PAIRS,
    SCHEMES,
    MachineSpeeds,
    SchemeChoice,
    choose,
    choose_pair,
    estimate,
    min_sweeps,
    outer_call,
    plan_sweeps,
    refusal,
)
from .gather import GatherAttention
from .gather_in_order import DeterministicGatherAttention
from .orders import Span, Spans, count_tokens, find_order
from .peers import SINGLE_RANK, Peers
from .redistribution import all_heads
from .ring import RingAttention
from .subcalls import ForwardCall, use_window
from .ulysses import MeshGatherAttention, UlyssesAttention
from .whole_checks import COUNTS, check_tensors, check_values, check_whole, find_kv_block, parse_length

SPLIT_KV_OPTIONS = {"causal", "scale", "deterministic", "family"}  # of calls that one GPU may compute by split-KV
UNSUPPORTED = "lse", "accumulate"  # arguments of attention.forward that are not supported here
MAX_POSITIONS = 2**24  # see public/softmax_forward.py
REQUESTED = "it was requested"


class ParallelPlan:
    """What calls with one signature have in common: the scheme, the lengths of the whole sequence, and why the scheme was
    chosen. cached_call: the call itself, if no option is an array."""

    def __init__(self, scheme: Any, length: int, keys: int, choice: SchemeChoice, call: ForwardCall):
        self.scheme, self.length, self.keys, self.choice = scheme, length, keys, choice
        self.plain, self.family = call.plain, call.options["family"]
        self.cached_call = call if call.plain and "k_norm" not in call.options else None

    def call(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> ForwardCall:
        """The ForwardCall for these arrays."""
        return self.cached_call or make_call(self.length, self.keys, q, k, v, options | {"family": self.family})

    def backward_call(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> ForwardCall:
        """The ForwardCall whose gradients are computed: with blocks of as many keys as `call`, and the family that the caller
        requested."""
        kv, family = family_block_kv(self.family), options.get("family")
        options = options if kv is None else options | {"family": FamilyAndBlock(family, kv)}
        return make_call(self.length, self.keys, q, k, v, options)


def make_call(length: int, keys: int, q: Any, k: Any, v: Any, options: dict[str, Any]) -> ForwardCall:
    """The ForwardCall for these arrays, or arrays like them."""
    heads, kv_heads = all_heads(q.shape[2]), all_heads(k.shape[2])
    options = use_window(options, length, keys)
    plain = "seed" not in options and all(
        [type(x) in PLAIN_TYPES or inspect.isfunction(x) or _has_plain_items(x) for x in options.values()]
    )
    return ForwardCall(options, length, keys, heads, kv_heads, (q.shape[3], v.shape[3]), q.device, plain)


def _has_plain_items(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all([one is None or type(one) in PLAIN_TYPES for one in x])


def call_key(settings: tuple[Any, ...], q: Any, k: Any, v: Any, options: dict) -> Any:
    """The key of a call's signature: everything except the values of arrays, and the seed."""
    if "seed" in options:
        options = options | {"seed": None}
    array_texts = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device
    return (*settings, *array_texts, *options, *map(cache_key, options.values()))


def plan_call(
    peers: Sequence[Peers], settings: tuple[Any, ...], q: Any, k: Any, v: Any, options: dict[str, Any]
) -> tuple[str, ParallelPlan]:
    """(a description of what must be equal on all ranks, the ParallelPlan). TypeError, ValueError, NotImplementedError."""
    check_option_names(options)
    check_tensors(q=q, k=k, v=v)
    scheme, order, *lengths, memory, return_lse = settings
    length, length_k = map(parse_length, ("length", "length_k"), lengths)
    order = find_order(order)
    check_flag("return_lse", return_lse)
    world = count_ranks(peers)
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"v: must have k's tokens: {tuple(k.shape)=}, {tuple(v.shape)=}")
    total = total_length(peers, q, length)
    if length_k is None:
        length_k = total if k.shape[1] == q.shape[1] else k.shape[1] * world
    queries, keys = order.spans(total, world), order.spans(length_k, world)
    rank = functools.reduce(lambda at, one: at * one.world + one.rank, peers, 0)
    for name, x, spans, expected in ("length", q, queries, total), ("length_k", k, keys, length_k):
        if count_tokens(spans[rank]) != x.shape[1]:
            had = f"rank {rank} of {world} has {x.shape[1]} tokens, and would have {count_tokens(spans[rank])} of {expected}"
            raise ValueError(
                f"{name}: {had} by {order}: give {name}, the number of all tokens, because shards may differ in length"
            )
    empty_call_options = {name: x for name, x in options.items() if name not in ("blocks", "sink", "bias", *COUNTS)}
    with torch.no_grad():
        attention.forward(*[x.detach()[:, :0] for x in (q, k, v)], **empty_call_options)  # checks all, launches nothing
        check_whole(q, k, v, total, length_k, options)
    if ("mask" in options or "score" in options) and max(total, length_k) >= MAX_POSITIONS:
        raise ValueError(
            f"mask: its positions are float32, so there must be fewer than 2**24 queries and keys: {total}, {length_k}"
        )
    check_values(options, total, length_k, planning=True)
    call = make_call(total, length_k, q, k, v, options | {"family": _select_family(q, k, v, options)})
    limit = _memory_limit(memory, q)
    choice = _choose_scheme(peers, scheme, call, q.shape[0], queries, keys, limit)
    chosen = choice.scheme
    if "ring" not in chosen:  # then the bits are those of one GPU
        with torch.no_grad():
            kv = find_kv_block(q, k, v, total, length_k, options)
        call = call._replace(
            options=call.options | {"family": FamilyAndBlock(call.options["family"], kv) if kv else call.options["family"]}
        )
    attention_scheme, sweeps = _build_scheme(chosen, peers, call, q.shape[0], queries, keys, limit)
    array_texts = [f"{n}: {x.shape[0]} x {x.shape[2]} x {x.shape[3]} of {x.dtype}" for n, x in (("q", q), ("k", k), ("v", v))]
    option_texts = [f"{name}={describe_value(name, x)}" for name, x in sorted(options.items()) if name not in ("seed", "bias")]
    option_texts += [f"bias={_describe_bias(options['bias'], total < 2 * world)}"] if "bias" in options else []
    shard_text = [f"length=None of shards of {q.shape[1]}: give length where these differ"] if lengths[0] is None else []
    settings_texts = shard_text or [f"length={total}"]
    settings_texts += [
        f"length_k={length_k}",
        f"{scheme=}",
        f"{chosen=!s}",
        f"{memory=}",
        f"{sweeps=}",
        f"{order=}",
        f"{return_lse=}",
    ]
    return "; ".join([*array_texts, *settings_texts, *option_texts]), ParallelPlan(
        attention_scheme, total, length_k, choice, call
    )


def count_ranks(peers: Sequence[Peers]) -> int:
    """How many ranks all dimensions of the group have together."""
    return math.prod([one.world for one in peers])


def total_length(peers: Sequence[Peers], x: Any, length: int | None) -> int:
    """The number of all tokens, of which this rank has those of x."""
    return x.shape[1] * count_ranks(peers) if length is None else length


def _describe_bias(bias: Any, few: bool) -> str:
    """A bias's shape and dtype, without the number of rows, which differs between ranks. few: see softmax._expand_bias."""
    batch, heads, rows, keys = bias.shape
    return f"{batch} x {heads} x {'1 row' if rows == 1 and not few else 'rows of queries'} x {keys} of {bias.dtype}"


def _select_family(q: Any, k: Any, v: Any, options: dict[str, Any]) -> str | None:
    """The family of kernels. A plain call gets the name that one GPU would select: without a name, forward computes few queries
    with many keys, as a rank has them, by split-KV, whose last bits differ from one GPU's."""
    if options.get("family") or not options.keys() <= SPLIT_KV_OPTIONS:
        return options.get("family")
    forms = {name: describe(x.detach(), name).form for name, x in zip("qkv", (q, k, v))}
    return choose_family(FORWARD.problem(forms, "bshd"), None)


def _memory_limit(memory: Any, q: Any) -> float:
    """How many bytes a scheme may hold beyond its shards."""
    if memory is not None:
        if not isinstance(memory, (int, float)) or not memory > 0:
            raise ValueError(f"memory: must be a positive number of bytes: {memory=}")
        return float(memory)
    return MEMORY_FRACTION * torch.cuda.get_device_properties(q.device).total_memory if q.is_cuda else math.inf


def check_option_names(options: dict[str, Any]) -> None:
    """TypeError, ValueError: attention.parallel.forward does not take an option of this name."""
    if "layout" in options:
        raise ValueError(f'layout: must be "bshd" or "bhsd": layout={options["layout"]!r}')
    unsupported = [
        name for name in options if name not in inspect.signature(attention.forward).parameters or name in UNSUPPORTED
    ]
    if unsupported:
        known = [name for name in inspect.signature(attention.forward).parameters if name not in UNSUPPORTED]
        hint = argument_hint(unsupported[0], known)
        raise TypeError(f"attention.parallel.forward: takes no argument {unsupported[0]}{f'; {hint}' if hint else ''}")


def _choose_scheme(
    peers: Sequence[Peers],
    scheme: Any,
    call: ForwardCall,
    batch: int,
    queries: tuple[Spans, ...],
    keys: tuple[Spans, ...],
    limit: float,
) -> SchemeChoice:
    """The requested scheme or pair, or with "auto" the best one."""
    if len(peers) > 2:
        raise ValueError(f"group: must have one or two dimensions, not {len(peers)}")
    if len(peers) == 2:
        if scheme not in ("auto", *PAIRS):
            raise ValueError(f'scheme: for a group of two dimensions it must be "auto" or one of {PAIRS}: {scheme=}')
        best = choose_pair(call, batch, queries, keys, peers[1].world, limit)
        if scheme == "auto":
            return best
        if why := next((one.why for one in best.estimates if one.scheme == scheme), ""):
            raise NotImplementedError(why)
        return SchemeChoice(scheme, REQUESTED, best.estimates)
    if scheme == "auto":
        return choose(call, batch, queries, keys, limit)
    if scheme not in SCHEMES:
        raise ValueError(f'scheme: must be "auto" or one of {SCHEMES}: {scheme=}')
    if why := refusal(scheme, call, queries, keys):
        raise NotImplementedError(why)
    estimates = [estimate(one, call, batch, queries, keys, MachineSpeeds(), limit) for one in SCHEMES]
    return SchemeChoice(scheme, REQUESTED, tuple(estimates))


def _build_scheme(
    name: Any,
    peers: Sequence[Peers],
    call: ForwardCall,
    batch: int,
    queries: tuple[Spans, ...],
    keys: tuple[Spans, ...],
    limit: float,
) -> tuple[Any, int]:
    """(the object for the scheme of this name, or for a mesh's pair of names, sweeps). Of a pair, the first scheme works along
    the outer dimension, on what the ranks of the inner dimension have together."""

    def build(
        name: str, peers: Peers, call: ForwardCall, queries: tuple[Spans, ...], keys: tuple[Spans, ...]
    ) -> tuple[Any, int]:
        """(the scheme of this name along one dimension, sweeps)"""
        if why := refusal(name, call, queries, keys):
            raise NotImplementedError(why)
        if name == "ring":
            sweeps = plan_sweeps(call, batch, queries, keys, limit)
            return RingAttention(peers, queries, keys, sweeps, min_sweeps(call, batch, queries, keys, limit)), sweeps
        in_order = call.options.get("deterministic") and DeterministicGatherAttention.supports(call)
        return (DeterministicGatherAttention if in_order else GatherAttention)(peers, queries, keys), 1

    if isinstance(name, str):
        if name == "ulysses":
            return UlyssesAttention(peers[0], queries, keys, _single_rank_attention(call)), 1
        return build(name, peers[0], call, queries, keys)
    outer, inner = peers
    row = slice(outer.rank * inner.world, (outer.rank + 1) * inner.world)
    outer_scheme, sweeps = build(name[0], outer, *outer_call(name, call, queries, keys, inner.world, inner.rank))
    scheme = MeshGatherAttention if name[1] == "gather" else UlyssesAttention
    return scheme(inner, queries[row], keys[row], outer_scheme), sweeps


def _single_rank_attention(call: ForwardCall) -> GatherAttention:
    """The scheme of one rank that has all tokens."""
    return GatherAttention(SINGLE_RANK, ((Span(0, call.length),),), ((Span(0, call.keys),),))
