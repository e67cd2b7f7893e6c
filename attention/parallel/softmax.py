"""attention.parallel.forward: softmax attention of a sequence that is spread over several ranks."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

import attention
from tiles.frameworks import describe

from ..families import choose as family_of
from ..options import flag
from ..softmax.autograd import adjacent
from ..softmax.backward.norms import gradients as norm_gradients
from ..softmax.backward.norms import normalised
from ..softmax.call_options import differentiated
from ..softmax.forward import FORWARD
from ..softmax.gradient import ONCE, flat, grouped
from .agreement import PLAIN, agreed, form_of, remembered, words_of
from .choice import SCHEMES, SHARE, Choice, choose, least_turns, refusal, turns_of
from .gather import Gather
from .gather_in_order import InOrder
from .gradients import Gradients
from .moves import all_heads
from .orders import Order, Span, Spans, count, order_of
from .peers import Peers, of_torch, peers_of, uncompiled
from .pieces import Call
from .ring import Ring
from .ulysses import Heads, Shared, together
from .whole import PLACED, cast, check_tensors, check_values, check_whole, number_of_tokens

SHARED_OUT = {"causal", "scale", "deterministic", "family"}  # options of calls that softmax/shared_out.py may serve
NORMS, WRITTEN = ("q_norm", "k_norm"), ("lse", "accumulate")  # of attention.forward's arguments; the latter are not served
_AS_IT_IS = nullcontext()
INDICES = 2**24  # see softmax/forward.py


@uncompiled
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    scheme: str | tuple[str, str] = "auto",
    order: str | Order = "zigzag",
    length: int | None = None,
    length_k: int | None = None,
    memory: float | None = None,
    explain: bool = False,
    layout: str = "bshd",
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
    **options: Any,
) -> Any:
    """attention.forward of a sequence that is spread over several ranks. q, k and v are this rank's shares of it, as
    attention.parallel.shard cuts them, and so is the result. Every rank of the group must call it.

    group: a process group of torch.distributed, a DeviceMesh of one or two dimensions, or a tuple of two groups (the outer
    first); all processes by default. order: which tokens a rank has, "zigzag" (the same amount of work for each, if causal)
    or "contiguous". length, length_k: the number of tokens of the whole, and of keys if it differs; by default that of equal
    shares. Shares that differ need it, and it may be any number.

    scheme: how ranks work together.

    | | what travels | |
    |---|---|---|
    | "gather" | keys and values, as far as queries see them | the bits of one GPU |
    | "ulysses" | tokens for heads, there and back; ranks divide the heads | whatever forward takes |
    | "ring" | keys and values, a rank's share at a time; partial results are merged in float32 | least memory |
    | (outer, inner) | for a group of two dimensions: "gather" or "ring", and "ulysses"; or "ring" and "gather" | |

    "auto" takes the fastest by a model of bytes and time, among those that support the call and for which the memory
    suffices (attention.parallel.choice). explain: nothing is computed, and the Choice is returned, whose str says why.
    memory: bytes that may be held beyond shards and output, by default a quarter of the GPU's memory. "ring" computes in as
    many turns, each for some of the key heads, as it takes to hold no more; in one if it fits.

    options: all other arguments of attention.forward, about the whole sequence: positions in causal, window, mask and score
    count from its start, cu_seqlens is that of all of it, aux are whole arrays. alibi, sink and norms are as there; bias has
    this rank's rows, and all columns. blocks are those of the whole. Dropout depends on the seed and the place of a rank's
    part, so other numbers of ranks drop other weights. What a scheme cannot do raises NotImplementedError, and "auto" takes
    another scheme.

    Differentiable where attention.forward is. The gradients of arrays that every rank has (sink, alibi, aux, norms) are this
    rank's share, like those of a model's weights: their sum over the ranks is the whole.

    ValueError on every rank, before anything travels: ranks disagree in shapes, dtypes or options."""
    told = {name: x for name, x in options.items() if x is not None}
    if layout == "bhsd":
        q, k, v, out = (x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.ndim == 4 else x for x in (q, k, v, out))
    elif layout != "bshd":
        told["layout"] = layout  # which `refuse` does, on every rank
    asked = scheme, order, length, length_k, memory
    if stream is None or not getattr(q, "is_cuda", False):
        found = _call(group, asked, explain, q, k, v, out, told)
    else:
        with torch.cuda.stream(stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.ExternalStream(int(stream))):
            found = _call(group, asked, explain, q, k, v, out, told)
    if explain:
        return found
    result = found[0].transpose(1, 2) if layout == "bhsd" else found[0]
    return (result, found[1]) if flag("return_lse", return_lse) else result


def _call(group: Any, asked: tuple[Any, ...], explain: bool, q: Any, k: Any, v: Any, out: Any, told: dict) -> Any:
    """(out, lse) on the current stream, or with `explain` the Choice."""
    peers = peers_of(group)
    try:
        if torch.float32 in (q.dtype, k.dtype, v.dtype):
            q, k, v = cast(q, k, v)
        if "bias" in told:
            told["bias"] = _of_few(told["bias"], q.shape[1], length_of(peers, q, asked[2]), world_of(peers))
        form = _form(asked, q, k, v, told)
        known = remembered(peers, form)
    except Exception:  # what is wrong `_planned` says, so that all ranks hear of it
        form = known = None
    if flag("explain", explain):
        return (known or _planned(peers, asked, q, k, v, told)[1]).choice
    if known is None:
        known = agreed(peers, form, lambda: _planned(peers, asked, q, k, v, told), getattr(q, "device", None))
    if known.known is not None and out is None and not torch.is_grad_enabled():  # what most calls are: each line costs them
        return known.scheme.attend(q, k, v, known.known)
    check_values(told, known.length, known.keys)
    arrays, others = ({}, told) if known.plain else flat(_shaped(told))
    if differentiated(q, k, v, *arrays.values()):
        result, lse = _Attention.apply(known, ("q", "k", "v", *arrays), others, q, k, v, *arrays.values())
    else:
        result, lse = _attend(known, q, k, v, told)
    return (result if out is None else _written(out, result)), lse


def _of_few(bias: Any, rows: int, length: int, world: int) -> Any:
    """A bias with a row for each of this rank's queries, where these are so few that one row may be that of one query."""
    return bias.expand(-1, -1, rows, -1) if length < 2 * world and bias.shape[2] == 1 else bias


def _written(out: Any, result: Any) -> Any:
    """out, with the result. TypeError, ValueError."""
    of_torch(out=out)
    if (out.shape, out.dtype) != (result.shape, result.dtype):
        raise ValueError(f"out: must have {tuple(result.shape)} of {result.dtype}, and has {tuple(out.shape)} of {out.dtype}")
    return out.copy_(result)


class Plan:
    """What calls of one form have in common: the scheme, how long the whole is, and why; and of those that are told no arrays
    all that is told."""

    def __init__(self, scheme: Any, length: int, keys: int, choice: Choice | str, call: Call):
        self.scheme, self.length, self.keys, self.choice = scheme, length, keys, choice
        self.plain, self.family = call.plain, call.told["family"]
        self.known = call if call.plain and "k_norm" not in call.told else None

    def call(self, q: Any, k: Any, v: Any, told: dict[str, Any]) -> Call:
        """A call of this form."""
        return self.known or called(self.length, self.keys, q, k, v, told | {"family": self.family})


def called(length: int, keys: int, q: Any, k: Any, v: Any, told: dict[str, Any]) -> Call:
    """A call on these arrays, or ones like them."""
    heads, kv_heads = all_heads(q.shape[2]), all_heads(k.shape[2])
    plain = "seed" not in told and all([type(x) in PLAIN or inspect.isfunction(x) or _of_numbers(x) for x in told.values()])
    return Call(told, length, keys, heads, kv_heads, (q.shape[3], v.shape[3]), q.device, plain)


def _of_numbers(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and all([one is None or type(one) in PLAIN for one in x])


class _Attention(torch.autograd.Function):
    """(out, lse), differentiable once. names: of the tensors; others: the remaining options."""

    @staticmethod
    def forward(ctx, plan, names, others, *tensors):
        told = grouped(dict(zip(names[3:], tensors[3:]))) | others if names[3:] else others
        out, lse = _attend(plan, *tensors[:3], told)
        ctx.plan, ctx.names, ctx.others = plan, names, others
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        if torch.is_grad_enabled():
            raise NotImplementedError(f"{ONCE}; leave create_graph=True out")
        *tensors, out, lse = ctx.saved_tensors
        told = grouped(dict(zip(ctx.names[3:], tensors[3:]))) | ctx.others
        if torch.are_deterministic_algorithms_enabled():
            told["deterministic"] = True
        wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[3:]) if needs]
        found = _differentiate(ctx.plan, adjacent(dout), *tensors[:3], out, lse, told, wanted)
        return None, None, None, *[found.get(name) if name in wanted else None for name in ctx.names]


def _attend(plan: Plan, q: Any, k: Any, v: Any, told: dict[str, Any]) -> tuple[Any, Any]:
    """(out, lse), without gradients."""
    with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
        if "aux" in told or "k_norm" in told:
            told = dict(_shaped(told))
        if "k_norm" in told:
            k = normalised("k", k.contiguous(), told.pop("k_norm"), told.get("norm_eps", 1e-6), None, "bshd")
        return plan.scheme.attend(q, k, v, plan.call(q, k, v, told))


def _differentiate(plan, dout, q, k, v, out, lse, told, wanted) -> dict[str, Any]:
    """The gradients of `_attend`, by name."""
    told = dict(_shaped(told))
    norms, eps = [told.pop(name, None) for name in NORMS], told.pop("norm_eps", 1e-6)
    rows = [normalised(name, x, norm, eps, None, "bshd") for name, x, norm in zip("qk", (q, k), norms)]
    call = called(plan.length, plan.keys, rows[0], rows[1], v, told)
    found = Gradients.begin(rows[0], rows[1], v, call, wanted)
    plan.scheme.differentiate(dout, *rows, v, out, lse, call, found)
    results = dict(zip("qkv", found.results(q, k, v))) | found.others
    for name, x, norm in zip("qk", (q, k), norms):
        if norm is not None:
            results[name], parts = norm_gradients(name, x, results[name], norm, eps, None, None, "bshd")
            names = [f"{name}_norm", f"{name}_norm_bias"]
            flat_parts = [y for part in parts for y in (part if isinstance(part, tuple) else (part,))]
            results |= dict(zip(names, flat_parts))
    given = dict(flat(told)[0])
    return {name: x if name in "qkv" or name not in given else x.to(given[name].dtype) for name, x in results.items()}


def _shaped(told: dict[str, Any]) -> dict[str, Any]:
    """Options as schemes expect them: a list of aux is a tuple."""
    return told | {"aux": tuple(told["aux"])} if "aux" in told else told


# ---- once for each form of call --------------------------------------------------------------------------------------
def _form(asked: tuple[Any, ...], q: Any, k: Any, v: Any, told: dict) -> Any:
    """What decides how a group's call is done: everything but what arrays hold, and a seed."""
    if "seed" in told:
        told = told | {"seed": None}
    forms = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device
    return (*asked, *forms, *told, *map(form_of, told.values()))


def _planned(peers: Sequence[Peers], asked: tuple[Any, ...], q: Any, k: Any, v: Any, told: dict[str, Any]) -> tuple[str, Plan]:
    """What all ranks must have in common, in words, and the Plan. TypeError, ValueError, NotImplementedError."""
    refuse(told)
    check_tensors(q=q, k=k, v=v)
    scheme, order, *lengths, memory = asked
    length, length_k = map(number_of_tokens, ("length", "length_k"), lengths)
    order = order_of(order)
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
    plain = {name: x for name, x in told.items() if name not in ("blocks", "sink", "bias", *PLACED)}
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
    name = choice.scheme if isinstance(choice, Choice) else choice
    found, turns = _scheme(name, peers, call, q.shape[0], queries, keys, limit)
    forms = [f"{n}: {x.shape[0]} x {x.shape[2]} x {x.shape[3]} of {x.dtype}" for n, x in (("q", q), ("k", k), ("v", v))]
    named = [f"{name}={words_of(name, x)}" for name, x in sorted(told.items()) if name not in ("seed", "bias")]
    named += [f"bias={_words_of_bias(told['bias'], total < 2 * world)}"] if "bias" in told else []
    of_shares = [f"length=None of shares of {q.shape[1]}: give length where these differ"] if lengths[0] is None else []
    plan = of_shares or [f"length={total}"]
    plan += [f"length_k={length_k}", f"{scheme=}", f"chosen={name}", f"{memory=}", f"{turns=}", f"{order=}"]
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
    return family_of(FORWARD.problem(forms, "bshd"), None)


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
        raise TypeError(f"attention.parallel.forward: takes no {unknown[0]}")


def _choice(
    peers: Sequence[Peers],
    scheme: Any,
    call: Call,
    batch: int,
    queries: tuple[Spans, ...],
    keys: tuple[Spans, ...],
    limit: float,
) -> Any:
    """The Choice, or the scheme that was asked for."""
    if len(peers) == 2:
        pair = ("gather", "ulysses") if scheme == "auto" else scheme
        if pair not in PRODUCTS:
            raise ValueError(f"scheme: of a group of two dimensions must be one of {PRODUCTS}: {scheme=}")
        return pair
    if len(peers) > 2:
        raise ValueError(f"group: must have one or two dimensions, not {len(peers)}")
    if scheme == "auto":
        return choose(call, batch, queries, keys, limit)
    if scheme not in SCHEMES:
        raise ValueError(f'scheme: must be "auto" or one of {SCHEMES}: {scheme=}')
    if why := refusal(scheme, call, queries, keys):
        raise NotImplementedError(why)
    return scheme


PRODUCTS = ("gather", "ulysses"), ("ring", "ulysses"), ("ring", "gather")


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
    from .peers import ALONE

    return Gather(ALONE, ((Span(0, call.length),),), ((Span(0, call.keys),),))
