"""attention.parallel.forward: softmax attention of a sequence that is spread over several ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ..autograd_inputs import make_tma_contiguous
from ..options import check_flag
from ..plans.requires_grad import requires_grad
from ..plans.softmax.gradient import NO_SECOND_DERIVATIVES, flatten_arrays, group_arrays
from ..plans.softmax.norm_gradients import norm_gradients, normalise_rows
from . import plans
from .agreement import agree_on_plan, cached_plan
from .gradients import GradientAccumulator
from .orders import Order
from .peers import check_torch_tensors, disable_compile, peers_of
from .plans import ParallelPlan, call_key, count_ranks, total_length
from .whole_checks import autocast, check_values

NORMS = "q_norm", "k_norm"
_NULL_CONTEXT = nullcontext()


@disable_compile
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
    """attention.forward of a sequence that is spread over several ranks. q, k and v are this rank's shards, as
    attention.parallel.shard makes them, and so is the result. Every rank of the group must call it.

    group: a process group of torch.distributed, a DeviceMesh of one or two dimensions, or a tuple of two groups (the outer
    first); by default all processes. order: which tokens a rank has, "zigzag" (the same amount of work for each rank, if
    causal) or "contiguous". length, length_k: the number of tokens of the whole sequence, and of keys if it differs; by default
    that of equal shards. Shards of different lengths need it, and it may be any number.

    scheme: how ranks work together.

    | | what is sent | |
    |---|---|---|
    | "gather" | the keys and values that queries see | the bits of one GPU, with the exceptions in docs/parallel.md |
    | "ulysses" | tokens for heads, there and back; ranks divide the heads | the bits of one GPU; all options of forward |
    | "ring" | keys and values, one rank's shard at a time; partial results are merged in float32 | least memory |
    | (outer, inner) | for a group of two dimensions: "gather" or "ring", and "ulysses"; or "ring" and "gather" | |

    "auto" takes the fastest by a model of bytes and time, among the schemes that support the call and for which the memory
    suffices (attention.parallel.choice). explain: nothing is computed, and a SchemeChoice is returned, whose str says why.
    memory: bytes that may be held beyond shards and output, by default a quarter of the GPU's memory. "ring" runs in as many
    sweeps, each for some of the key heads, as it takes to hold no more; in one if that is enough.

    options: all other arguments of attention.forward, for the whole sequence: positions in causal, window, mask and score count
    from its start, cu_seqlens is that of the whole sequence, aux are whole arrays. alibi, sink and norms are as in
    attention.forward; bias has this rank's rows, and all columns. blocks are those of the whole sequence. Dropout depends on
    the seed and the position of a rank's shard, so another number of ranks drops other weights. If a scheme does not support an
    option, NotImplementedError is raised, and "auto" takes another scheme.

    return_lse: as in attention.forward; it must be the same on all ranks. Differentiable where attention.forward is, lse too.
    The gradients of arrays that every rank has (sink, alibi, aux, norms) are this rank's part, like those of a model's weights:
    their sum over the ranks is the gradient.

    ValueError on every rank, before anything is sent: ranks disagree in shapes, dtypes or options."""
    options = {name: x for name, x in options.items() if x is not None}
    if layout == "bhsd":
        q, k, v, out = (x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.ndim == 4 else x for x in (q, k, v, out))
    elif layout != "bshd":
        options["layout"] = layout  # check_option_names raises the error, on every rank
    settings = scheme, order, length, length_k, memory, return_lse
    if stream is None or not getattr(q, "is_cuda", False):
        results = _call(group, settings, explain, q, k, v, out, options)
    else:
        with torch.cuda.stream(stream if isinstance(stream, torch.cuda.Stream) else torch.cuda.ExternalStream(int(stream))):
            results = _call(group, settings, explain, q, k, v, out, options)
    if explain:
        return results
    result = results[0].transpose(1, 2) if layout == "bhsd" else results[0]
    return (result, results[1]) if return_lse else result


def _call(group: Any, settings: tuple[Any, ...], explain: bool, q: Any, k: Any, v: Any, out: Any, options: dict) -> Any:
    """(out, lse) on the current stream, or with `explain` the SchemeChoice."""
    peers = peers_of(group)
    try:
        if torch.float32 in (q.dtype, k.dtype, v.dtype):
            q, k, v = autocast(q, k, v)
        if "bias" in options:
            options["bias"] = _expand_bias(options["bias"], q.shape[1], total_length(peers, q, settings[2]), count_ranks(peers))
        key = call_key(settings, q, k, v, options)
        plan = cached_plan(peers, key)
    except Exception:  # plan_call raises what is wrong, on all ranks
        key = plan = None
    if check_flag("explain", explain):
        return (plan or plans.plan_call(peers, settings, q, k, v, options)[1]).choice
    if plan is None:
        plan = agree_on_plan(peers, key, lambda: plans.plan_call(peers, settings, q, k, v, options), getattr(q, "device", None))
    # the common case: each further line would cost host time
    if plan.cached_call is not None and out is None and not torch.is_grad_enabled():
        return plan.scheme.attend(q, k, v, plan.cached_call)
    check_values(options, plan.length, plan.keys)
    arrays, others = ({}, options) if plan.plain else flatten_arrays(_with_aux_tuple(options))
    if requires_grad(q, k, v, *arrays.values()):
        outputs = _ShardedAttention.apply(plan, settings[-1], ("q", "k", "v", *arrays), others, q, k, v, *arrays.values())
        result, lse = outputs if settings[-1] else (outputs, None)
    else:
        result, lse = _run_forward(plan, q, k, v, options)
    return (result if out is None else _write_out(out, result)), lse


def _expand_bias(bias: Any, rows: int, length: int, world: int) -> Any:
    """A bias with a row for each of this rank's queries, if these are so few that one row may be the row of a single query."""
    return bias.expand(-1, -1, rows, -1) if length < 2 * world and bias.shape[2] == 1 else bias


def _write_out(out: Any, result: Any) -> Any:
    """out, after the result was copied to it. TypeError, ValueError: it is not like the result."""
    check_torch_tensors(out=out)
    if (out.shape, out.dtype) != (result.shape, result.dtype):
        raise ValueError(f"out: must have {tuple(result.shape)} of {result.dtype}, and has {tuple(out.shape)} of {out.dtype}")
    return out.copy_(result)


class _ShardedAttention(torch.autograd.Function):
    """(out, lse), or out, differentiable once. return_lse: is lse a result? It is the same on all ranks, so each knows whether
    the others' lse may have a gradient. names: of the tensors; others: the remaining options."""

    @staticmethod
    def forward(ctx, plan, return_lse, names, others, *tensors):
        options = group_arrays(dict(zip(names[3:], tensors[3:]))) | others if names[3:] else others
        out, lse = _run_forward(plan, *tensors[:3], options)
        ctx.plan, ctx.return_lse, ctx.names, ctx.others = plan, return_lse, names, others
        ctx.set_materialize_grads(False)  # gradients of unused results stay None
        ctx.save_for_backward(*tensors, out, lse)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        if torch.is_grad_enabled():
            raise NotImplementedError(f"{NO_SECOND_DERIVATIVES}; leave create_graph=True out")
        *tensors, out, lse = ctx.saved_tensors
        options = group_arrays(dict(zip(ctx.names[3:], tensors[3:]))) | ctx.others
        if torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = True
        requested = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[4:]) if needs]
        dout = torch.zeros_like(out) if dout is None else make_tma_contiguous(dout)
        if dlse is not None:
            dlse = dlse.contiguous()
        elif ctx.return_lse and ctx.plan.scheme.moves_queries:  # other ranks may have one, and it is sent with the queries
            dlse = torch.zeros_like(lse)
        gradients = _run_backward(ctx.plan, dout, dlse, *tensors[:3], out, lse, options, requested)
        return None, None, None, None, *[gradients.get(name) if name in requested else None for name in ctx.names]


def _run_forward(plan: ParallelPlan, q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """(out, lse), without recording gradients."""
    with torch.no_grad() if torch.is_grad_enabled() else _NULL_CONTEXT:
        if "aux" in options or "k_norm" in options:
            options = dict(_with_aux_tuple(options))
        if "k_norm" in options:
            k = normalise_rows("k", k.contiguous(), options.pop("k_norm"), options.get("norm_eps", 1e-6), None, "bshd")
        return plan.scheme.attend(q, k, v, plan.call(q, k, v, options))


def _run_backward(plan, dout, dlse, q, k, v, out, lse, options, requested) -> dict[str, Any]:
    """The gradients of _run_forward, by name."""
    options = dict(_with_aux_tuple(options))
    norms, eps = [options.pop(name, None) for name in NORMS], options.pop("norm_eps", 1e-6)
    rows = [normalise_rows(name, x, norm, eps, None, "bshd") for name, x, norm in zip("qk", (q, k), norms)]
    call = plan.backward_call(rows[0], rows[1], v, options)
    sums = GradientAccumulator.zeros(rows[0], rows[1], v, call, requested)
    plan.scheme.differentiate(dout, dlse, *rows, v, out, lse, call, sums)
    results = dict(zip("qkv", sums.results(q, k, v))) | sums.others
    for name, x, norm in zip("qk", (q, k), norms):
        if norm is not None:
            results[name], parts = norm_gradients(name, x, results[name], norm, eps, None, None, "bshd")
            names = [f"{name}_norm", f"{name}_norm_bias"]
            flat_parts = [y for part in parts for y in (part if isinstance(part, tuple) else (part,))]
            results |= dict(zip(names, flat_parts))
    arrays = dict(flatten_arrays(options)[0])
    return {name: x if name in "qkv" or name not in arrays else x.to(arrays[name].dtype) for name, x in results.items()}


def _with_aux_tuple(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with aux as a tuple, as schemes require."""
    return options | {"aux": tuple(options["aux"])} if "aux" in options else options
