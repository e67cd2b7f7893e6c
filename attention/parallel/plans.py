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
from .agreement import PLAIN, form_of, words_of
from .choice import SCHEMES, SHARE, Choice, Machine, choose, estimate, least_turns, refusal, turns_of
from .gather import Gather
from .gather_in_order import InOrder
from .moves import all_heads
from .orders import Span, Spans, count, order_of
from .peers import ALONE, Peers
from .pieces import Call, windowed
from .ring import Ring
from .ulysses import Heads, Shared, together
from .whole import COUNTS, check_tensors, check_values, check_whole, keys_of_a_block, number_of_tokens

SHARED_OUT = {"causal", "scale", "deterministic", "family"}  # options of calls that softmax/shared_out.py may serve
WRITTEN = "lse", "accumulate"  # of attention.forward's arguments those that are not served
INDICES = 2**24  # see softmax/forward.py
ASKED = "it was asked for"
PRODUCTS = ("gather", "ulysses"), ("ring", "ulysses"), ("ring", "gather")


class Plan:
    """What calls of one form have in common: the scheme, how long the whole is, and why; and of those that are told no arrays
    all that is told."""

    def __init__(self, scheme: Any, length: int, keys: int, choice: Choice, call: Call):
        self.scheme, self.length, self.keys, self.choice = scheme, length, keys, choice
        self.plain, self.family = call.plain, call.told["family"]
        self.known = call if call.plain and "k_norm" not in call.told else None

    def call(self, q: Any, k: Any, v: Any, told: dict[str, Any]) -> Call:
        """A call of this form."""
        return self.known or called(self.length, self.keys, q, k, v, told | {"family": self.family})

    def call_back(self, q: Any, k: Any, v: Any, told: dict[str, Any]) -> Call:
        """The call whose gradients are computed: keys are cut as for `call`, and the family is the one that was asked for."""
        kv, family = family_block_kv(self.family), told.get("family")
        told = told if kv is None else told | {"family": FamilyAndBlock(family, kv)}
        return called(self.length, self.keys, q, k, v, told)


def called(length: int, keys: int, q: Any, k: Any, v: Any, told: dict[str, Any]) -> Call:
    """A call on these arrays, or ones like them."""
    heads, kv_heads = all_heads(q.shape[2]), all_heads(k.shape[2])
    told = windowed(told, length, keys)
    plain = "seed" not in told and all([type(x) in PLAIN or inspect.isfunction(x) or _of_numbers(x) for x in told.values()])
    return Call(told, length, keys, heads, kv_heads, (q.shape[3], v.shape[3]), q.device, plain)


def _of_numbers(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all([one is None or type(one) in PLAIN for one in x])


def form(asked: tuple[Any, ...], q: Any, k: Any, v: Any, told: dict) -> Any:
    """What decides how a group's call is done: everything but what arrays hold, and a seed."""
    if "seed" in told:
        told = told | {"seed": None}
    forms = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device
    return (*asked, *forms, *told, *map(form_of, told.values()))


def planned(peers: Sequence[Peers], asked: tuple[Any, ...], q: Any, k: Any, v: Any, told: dict[str, Any]) -> tuple[str, Plan]:
    """What all ranks must have in common, in words, and the Plan. TypeError, ValueError, NotImplementedError."""
    refuse(told)
    check_tensors(q=q, k=k, v=v)
    scheme, order, *lengths, memory, return_lse = asked
    length, length_k = map(number_of_tokens, ("length", "length_k"), lengths)
    order = order_of(order)
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
        if count(spans[rank]) != x.shape[1]:
            had = f"rank {rank} of {world} has {x.shape[1]} tokens, and would have {count(spans[rank])} of {whole}"
            raise ValueError(f"{name}: {had} by {order}: give {name}, the number of all tokens, as shards may differ")
    plain = {name: x for name, x in told.items() if name not in ("blocks", "sink", "bias", *COUNTS)}
    with torch.no_grad():
        attention.forward(*[x.detach()[:, :0] for x in (q, k, v)], **plain)  # no query, no key: checked, but nothing launched
        check_whole(q, k, v, total, length_k, told)
    if ("mask" in told or "score" in told) and max(total, length_k) >= INDICES:
        raise ValueError(
            f"mask: counts queries and keys in float32, so there must be fewer than 2**24 of each: {total}, {length_k}"
        )
    check_values(told, total, length_k, planning=True)
    call = called(total, length_k, q, k, v, told | {"family": _family(q, k, v, told)})
    limit = _limit(memory, q)
    choice = _choice(peers, scheme, call, q.shape[0], queries, keys, limit)
    name = choice.scheme
    if "ring" not in name:  # the bits are those of one GPU
        with torch.no_grad():
            kv = keys_of_a_block(q, k, v, total, length_k, told)
        call = call._replace(
            told=call.told | {"family": FamilyAndBlock(call.told["family"], kv) if kv else call.told["family"]}
        )
    found, turns = _scheme(name, peers, call, q.shape[0], queries, keys, limit)
    forms = [f"{n}: {x.shape[0]} x {x.shape[2]} x {x.shape[3]} of {x.dtype}" for n, x in (("q", q), ("k", k), ("v", v))]
    named = [f"{name}={words_of(name, x)}" for name, x in sorted(told.items()) if name not in ("seed", "bias")]
    named += [f"bias={_words_of_bias(told['bias'], total < 2 * world)}"] if "bias" in told else []
    of_shares = [f"length=None of shares of {q.shape[1]}: give length where these differ"] if lengths[0] is None else []
    plan = of_shares or [f"length={total}"]
    plan += [f"length_k={length_k}", f"{scheme=}", f"chosen={name}", f"{memory=}", f"{turns=}", f"{order=}", f"{return_lse=}"]
    return "; ".join([*forms, *plan, *named]), Plan(found, total, length_k, choice, call)


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


def _family(q: Any, k: Any, v: Any, told: dict[str, Any]) -> str | None:
    """The family of kernels. A plain call names the one that it would get: if none is named, forward serves few queries of many
    keys, as a rank has them, by decode's kernels, and the last bits would be others than one GPU's."""
    if told.get("family") or not told.keys() <= SHARED_OUT:
        return told.get("family")
    forms = {name: describe(x.detach(), name).form for name, x in zip("qkv", (q, k, v))}
    return choose_family(FORWARD.problem(forms, "bshd"), None)


def _limit(memory: Any, q: Any) -> float:
    """Bytes that a scheme should hold."""
    if memory is not None:
        if not isinstance(memory, (int, float)) or not memory > 0:
            raise ValueError(f"memory: must be a number of bytes, more than 0: {memory=}")
        return float(memory)
    return SHARE * torch.cuda.get_device_properties(q.device).total_memory if q.is_cuda else math.inf


def refuse(told: dict[str, Any]) -> None:
    """TypeError, ValueError: what attention.forward does not take."""
    if "layout" in told:
        raise ValueError(f'layout: must be "bshd" or "bhsd": layout={told["layout"]!r}')
    unknown = [name for name in told if name not in inspect.signature(attention.forward).parameters or name in WRITTEN]
    if unknown:
        known = [name for name in inspect.signature(attention.forward).parameters if name not in WRITTEN]
        hint = argument_hint(unknown[0], known)
        raise TypeError(f"attention.parallel.forward: takes no {unknown[0]}{f'; {hint}' if hint else ''}")


def _choice(
    peers: Sequence[Peers],
    scheme: Any,
    call: Call,
    batch: int,
    queries: tuple[Spans, ...],
    keys: tuple[Spans, ...],
    limit: float,
) -> Choice:
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
                return Choice(pair, why, ())
        raise NotImplementedError(f"scheme: none can serve this call: {'; '.join(refused)}")
    if scheme == "auto":
        return choose(call, batch, queries, keys, limit)
    if scheme not in SCHEMES:
        raise ValueError(f'scheme: must be "auto" or one of {SCHEMES}: {scheme=}')
    if why := refusal(scheme, call, queries, keys):
        raise NotImplementedError(why)
    estimates = [estimate(one, call, batch, queries, keys, Machine(), limit) for one in SCHEMES]
    return Choice(scheme, ASKED, tuple(estimates))


def _scheme(
    name: Any,
    peers: Sequence[Peers],
    call: Call,
    batch: int,
    queries: tuple[Spans, ...],
    keys: tuple[Spans, ...],
    limit: float,
) -> tuple[Any, int]:
    """The scheme of this name, or of a pair of names: the outer one of what the ranks of the inner dimension have together. And
    how often it goes round."""

    def by(name: str, peers: Peers, call: Call, queries: tuple[Spans, ...], keys: tuple[Spans, ...]) -> tuple[Any, int]:
        """The scheme of this name, of ranks that share a sequence."""
        if why := refusal(name, call, queries, keys):
            raise NotImplementedError(why)
        if name == "ring":
            turns = turns_of(call, batch, queries, keys, limit)
            return Ring(peers, queries, keys, turns, least_turns(call, batch, queries, keys, limit)), turns
        in_order = call.told.get("deterministic") and InOrder.serves(call)
        return (InOrder if in_order else Gather)(peers, queries, keys), 1

    if isinstance(name, str):
        if name == "ulysses":
            return Heads(peers[0], queries, keys, _alone(call)), 1
        return by(name, peers[0], call, queries, keys)
    outer, inner = peers
    mine = slice(outer.rank * inner.world, (outer.rank + 1) * inner.world)
    rows = [slice(at * inner.world, (at + 1) * inner.world) for at in range(outer.world)]
    if name[1] == "gather":  # a rank keeps its queries, and has the keys of its row
        own = [queries[at.start + inner.rank] for at in rows]
        then, turns = by(name[0], outer, call, tuple(own), tuple([together(keys[at]) for at in rows]))
        return Shared(inner, queries[mine], keys[mine], then), turns
    shares = Heads.shares(len(call.heads), len(call.kv_heads), inner.world)
    if shares is None:
        raise NotImplementedError(
            f"scheme: {len(call.heads)} heads of {len(call.kv_heads)} key heads are not for {inner.world} ranks"
        )
    of_rows = [tuple([together(spans[at]) for at in rows]) for spans in (queries, keys)]
    then, turns = by(name[0], outer, call.of_heads(*shares[inner.rank]), *of_rows)
    return Heads(inner, queries[mine], keys[mine], then), turns


def _alone(call: Call) -> Gather:
    """The scheme of one rank that has everything."""
    return Gather(ALONE, ((Span(0, call.length),),), ((Span(0, call.keys),),))
