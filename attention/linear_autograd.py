"""attention.linear as a torch.autograd.Function, whose backward pass is attention.linear_backward, for tensors that require
grad. It is imported only when there are such tensors, so that torch is imported already."""

from collections.abc import Sequence
from typing import Any

import torch

from .autograd import autocast_inputs, copy_to_torch, is_second_derivative, make_distinct, make_tma_contiguous, unwrap
from .public.linear_family import linear
from .public.linear_gradients import NO_SECOND_DERIVATIVES, compute_gradients


class LinearAttentionFunction(torch.autograd.Function):
    """(out, state) of linear attention for torch's autograd, or out alone. names: of the tensors. options: those that both
    linear and linear_backward take. return_state: is the state a result?"""

    @staticmethod
    def forward(ctx, names, options, return_state, *tensors):
        """(out, state), or out, computed by attention.linear."""
        _save(ctx, names, options, tensors)
        return linear(**dict(zip(names, tensors)), **options, return_state=return_state)

    @staticmethod
    def backward(ctx, dout, dstate=None):
        """The gradients of the tensors that need one. NotImplementedError: second derivatives are requested."""
        if dout is dstate is None:
            return (None,) * (3 + len(ctx.names))
        tensors = saved = ctx.saved_tensors
        if not torch.compiler.is_compiling():  # graphs have no transforms
            tensors = tuple(map(unwrap, saved))
            if is_second_derivative((dout, dstate), tensors, tensors[0] is not saved[0]):
                raise NotImplementedError(f"{NO_SECOND_DERIVATIVES}; leave create_graph=True out")
        inputs = dict(zip(ctx.names, tensors))
        with torch.no_grad():
            dout = torch.zeros_like(inputs["v"]) if dout is None else make_tma_contiguous(dout)
            wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[3:]) if needs]
            grads = compute_gradients(dout, dstate, inputs, ctx.options, wanted)
        return (
            None,
            None,
            None,
            *[x if x is None else x.to(inputs[name].dtype) for name in ctx.names for x in [grads.get(name)]],
        )


class TransformedLinearFunction(torch.autograd.Function):
    """LinearAttentionFunction in the form that torch.func's transforms need."""

    generate_vmap_rule = True
    backward = staticmethod(LinearAttentionFunction.backward)

    @staticmethod
    def forward(names, options, return_state, *tensors):
        """(out, state), or out, computed by attention.linear."""
        return linear(**dict(zip(names, tensors)), **options, return_state=return_state)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save what the backward pass needs."""
        names, options, _, *tensors = inputs
        _save(ctx, names, options, tensors)

    @staticmethod
    def jvp(ctx, *tangents):
        """NotImplementedError: there are no forward-mode derivatives."""
        raise NotImplementedError("attention.linear: has no forward-mode derivatives (jvp, jacfwd, hessian); use reverse mode")


def _save(ctx: Any, names: tuple[str, ...], options: dict[str, Any], tensors: Sequence[Any]) -> None:
    ctx.names, ctx.options = names, options
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def linear_with_gradients(arrays: dict[str, Any], options: dict[str, Any], return_state: bool) -> Any:
    """out of attention.linear, or (out, state), differentiable once with respect to q, k, v, decay and initial_state. arrays,
    options: of linear, by name."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    arrays = {name: x if isinstance(x, torch.Tensor) else copy_to_torch(x) for name, x in arrays.items()}
    arrays = autocast_inputs(arrays)
    if torch.compiler.is_compiling():
        return LinearAttentionFunction.apply(tuple(arrays), options, return_state, *make_distinct(arrays.values()))
    if torch._C._functorch.peek_interpreter_stack() is None:
        return LinearAttentionFunction.apply(tuple(arrays), options, return_state, *arrays.values())
    return TransformedLinearFunction.apply(tuple(arrays), options, return_state, *arrays.values())
