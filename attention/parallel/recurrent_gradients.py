"""Gradients of a recurrence over a sequence that is spread over several ranks, in contiguous shards.

A rank's shard maps the state S before it to M S + N (recurrent.py). So the gradient dS of the state after it becomes M^T dS + L
before it, where L is what the shard's outputs contribute. Ranks exchange M and L, as they exchange M and N in forward; each
composes those of the ranks after it,

    dS_R = the gradient of the returned state, summed over ranks        dS_r = M_r^T dS_(r+1) + L_r

and computes its gradients by the function of one GPU, from the state before its shard, which forward kept, and dS after it.
The first rank sends nothing. The others compute L first: a SegmentedRecurrence by a pass over q and dO, which computes states
alone; other recurrences by the backward function, of whose results only this gradient is used. (Their last rank, which knows
dS_R, calls it once.) The gradients of linear attention need what the pass computes in any case, so the first rank makes it,
too, instead of waiting, and there it is not computed again. Linear attention stores the states before chunks in forward where
one GPU does (plans/recurrent/chunk_states.py). All sums have a fixed order: the same bits every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..autograd_inputs import make_tma_contiguous
from ..plans.recurrent.recurrent_derivative import no_second_derivatives
from .peers import Peers
from .sequence_shard import GatheredSummaries, SequenceShard


class ShardedRecurrenceFunction(torch.autograd.Function):
    """out of a ShardedRecurrence, or (out, state), differentiable once. names: of the tensors, its arrays first and then its
    options."""

    @staticmethod
    def forward(ctx, recurrence, peers, span, names, *tensors):
        """Run the recurrence over all ranks' shards: out, or (out, state)."""
        ctx.kind, ctx.peers, ctx.span, ctx.names = type(recurrence), peers, span, names
        ctx.options = {name: x for name, x in recurrence.options.items() if name not in (*names, "memory")}
        recurrence.in_training = True
        out, final, summaries = recurrence.compute(peers, span)
        before = summaries.state_before(peers.rank) if peers.rank else None  # the first rank has it as an option
        ctx.set_materialize_grads(False)
        ctx.stored_names = tuple(recurrence.stored)
        ctx.save_for_backward(*tensors, summaries.own_map(peers.rank).clone(), before, *recurrence.stored.values())
        return out if final is None else (out, final)

    @staticmethod
    def backward(ctx, dout, dfinal=None):
        """The gradients of the tensors that need one. NotImplementedError: second derivatives are requested."""
        kind, peers = ctx.kind, ctx.peers
        if torch.is_grad_enabled():
            words = no_second_derivatives(f"attention.parallel.{kind.function.__name__}")
            raise NotImplementedError(f"{words}; leave create_graph=True out")
        tensors, (m, before, *stored) = ctx.saved_tensors[: len(ctx.names)], ctx.saved_tensors[len(ctx.names) :]
        named, arrays = dict(zip(ctx.names, tensors)), tuple(tensors[: len(kind.names)])
        options = ctx.options | {name: x for name, x in named.items() if name not in kind.names}
        shard = SequenceShard(ctx.span, arrays[0].shape[0], options.pop("cu_seqlens", None), arrays[0].device)
        initial, wants_final = options.pop(kind.initial_option, None), options.pop(kind.final_option, False)
        dout = torch.zeros_like(arrays[kind.value_index]) if dout is None else make_tma_contiguous(dout)
        recurrence = kind(arrays, options)
        recurrence.stored = dict(zip(ctx.stored_names, stored))
        passes = GradientPasses(recurrence, shard, before if peers.rank else initial, dout)
        if wants_final:  # every rank has the state, and a part of its gradient
            dfinal = sum(peers.all_gather(passes.zero_state() if dfinal is None else dfinal.contiguous()))
        requested = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[4:]) if needs]
        gradients = passes.run(peers, m, dfinal, requested)
        return *[None] * 4, *[x if x is None else x.to(named[name].dtype) for name in ctx.names for x in [gradients.get(name)]]


class GradientPasses:
    """The passes over one rank's shard. before: the state before it, or None; dout: the gradient of its outputs."""

    def __init__(self, recurrence: Any, shard: SequenceShard, before: Any, dout: Any):
        self.recurrence, self.shard, self.before, self.dout = recurrence, shard, before, dout

    def run(self, peers: Peers, m: Any, dfinal: Any, requested: Sequence[str]) -> dict[str, Any]:
        """{name: gradient} of those in `requested`; the initial state has one on the first rank alone. m: the shard's M;
        dfinal: the gradient of the state after the whole, or None."""
        recurrence, initial = self.recurrence, self.recurrence.initial_option
        first, last = peers.rank == 0, peers.rank == peers.world - 1
        rest = [name for name in requested if name != initial]
        gradients, sent = None, (torch.zeros_like(m), self.zero_state())
        if not first or recurrence.reuses_states:
            before = recurrence.gradient_before(self.shard, self.dout) if len(self.shard.span) else None
        if not first:
            if before is not None:
                carried = 0 if dfinal is None or not last else recurrence.compose(recurrence.transpose(m), dfinal)
                sent = recurrence.transpose(m), before + carried
            elif last:
                gradients = self.compute(dfinal, [*rest, initial])
                sent = torch.zeros_like(m), gradients.pop(initial)
            else:
                sent = recurrence.transpose(m), self.compute(None, [initial])[initial]
        gathered = GatheredSummaries.gather(peers, *sent, recurrence.compose)
        if gradients is not None:
            return gradients
        return self.compute(dfinal if last else gathered.gradient_after(peers.rank), requested if first else rest)

    def compute(self, after: Any, requested: Sequence[str]) -> dict[str, Any]:
        """{name: gradient} for a gradient of the state after the shard; None for 0."""
        recurrence, initial = self.recurrence, self.recurrence.initial_option
        if not len(self.shard.span):
            inputs = dict(zip(recurrence.names, recurrence.arrays)) | recurrence.options
            state_gradient = self.zero_state() if after is None else after
            return {name: state_gradient if name == initial else torch.zeros_like(inputs[name]) for name in requested}
        optional = [name for name in recurrence.optional_gradients if name in requested]
        options = recurrence.options | self.shard.varlen_options() | {initial: self.before, recurrence.final_gradient: after}
        options |= recurrence.stored | {f"d{name}": name in optional for name in recurrence.optional_gradients}
        results = type(recurrence).backward(self.dout, *recurrence.arrays, **options)
        return {name: x for name, x in zip((*recurrence.names, *optional), results, strict=True) if name in requested}

    def zero_state(self) -> Any:
        """A state of zeros, as one for each sequence."""
        return torch.zeros(self.recurrence.state_shape(self.shard), device=self.shard.device)
