"""Members of linear attention's family as a torch.autograd.Function, whose backward pass computes their gradients, for tensors
that require grad. It is imported only when there are such tensors, so that torch is imported already."""

from collections.abc import Sequence
from typing import Any

import torch

from .autograd import autocast_inputs, copy_to_torch, is_second_derivative, make_distinct, make_tma_contiguous, unwrap
from .plans.differentiable_members import DifferentiableMember

ARGUMENTS = 4  # of LinearAttentionFunction before the tensors


class LinearAttentionFunction(torch.autograd.Function):
    """(out, state) of a member for torch's autograd, or out alone. names: of the tensors. options: those that both the member
    and its gradients take. return_state: is the state a result?"""

    @staticmethod
    def forward(ctx, member, names, options, return_state, *tensors):
        """(out, state), or out, computed by the member."""
        _save(ctx, member, names, options, tensors)
        return _call(member, names, options, return_state, tensors)

    @staticmethod
    def backward(ctx, dout, dstate=None):
        """The gradients of the tensors that need one. NotImplementedError: second derivatives are requested."""
        if dout is dstate is None:
            return (None,) * (ARGUMENTS + len(ctx.names))
        tensors = saved = ctx.saved_tensors
        if not torch.compiler.is_compiling():  # graphs have no transforms
            tensors = tuple(map(unwrap, saved))
            if is_second_derivative((dout, dstate), tensors, tensors[0] is not saved[0]):
                raise NotImplementedError(f"{ctx.member.no_second_derivatives}; leave create_graph=True out")
        inputs = dict(zip(ctx.names, tensors))
        with torch.no_grad():
            dout = torch.zeros_like(inputs[ctx.member.tiles[0]]) if dout is None else make_tma_contiguous(dout)
            wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[ARGUMENTS:]) if needs]
            grads = ctx.member.gradients(dout, dstate, inputs, ctx.options, wanted)
        of_tensors = [x if x is None else x.to(inputs[name].dtype) for name in ctx.names for x in [grads.get(name)]]
        return *[None] * ARGUMENTS, *of_tensors


class TransformedLinearFunction(torch.autograd.Function):
    """LinearAttentionFunction in the form that torch.func's transforms need."""

    generate_vmap_rule = True
    backward = staticmethod(LinearAttentionFunction.backward)

    @staticmethod
    def forward(member, names, options, return_state, *tensors):
        """(out, state), or out, computed by the member."""
        return _call(member, names, options, return_state, tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save what the backward pass needs."""
        member, names, options, _, *tensors = inputs
        _save(ctx, member, names, options, tensors)

    @staticmethod
    def jvp(ctx, *tangents):
        """NotImplementedError: there are no forward-mode derivatives."""
        message = f"{ctx.member.name}: has no forward-mode derivatives (jvp, jacfwd, hessian); use reverse mode"
        raise NotImplementedError(message)


def _call(
    member: DifferentiableMember, names: tuple[str, ...], options: dict[str, Any], return_state: bool, tensors: Sequence[Any]
) -> Any:
    return member.call(**dict(zip(names, tensors)), **options, **{member.return_state: return_state})


def _save(
    ctx: Any, member: DifferentiableMember, names: tuple[str, ...], options: dict[str, Any], tensors: Sequence[Any]
) -> None:
    ctx.member, ctx.names, ctx.options = member, names, options
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def call_member(member: DifferentiableMember, arrays: dict[str, Any], options: dict[str, Any], return_state: bool) -> Any:
    """call_with_gradients, for what is a torch.autograd.Function."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    arrays = {name: x if isinstance(x, torch.Tensor) else copy_to_torch(x) for name, x in arrays.items()}
    arrays = autocast_inputs(arrays, member.tiles)
    if torch.compiler.is_compiling():
        return LinearAttentionFunction.apply(member, tuple(arrays), options, return_state, *make_distinct(arrays.values()))
    if torch._C._functorch.peek_interpreter_stack() is None:
        return LinearAttentionFunction.apply(member, tuple(arrays), options, return_state, *arrays.values())
    return TransformedLinearFunction.apply(member, tuple(arrays), options, return_state, *arrays.values())
