"""Members of linear attention, and the convolution before them, as torch.autograd.Functions, whose backward passes are
attention.linear_backward and its like. It is imported only when tensors require grad, so that torch is imported already."""

from collections.abc import Sequence
from typing import Any

import torch

from .autograd import autocast_inputs, copy_to_torch, is_second_derivative, make_distinct, make_tma_contiguous, unwrap
from .public.based_features import based_with_parts
from .public.based_gradients import BASED_DERIVATIVE
from .public.delta_gradients import DELTA_DERIVATIVE
from .public.delta_rules import delta_rule
from .public.linear_family import linear, normalized_linear
from .public.linear_gradients import LINEAR_DERIVATIVE, NORMALIZED_DERIVATIVE
from .public.mamba import mamba2_with_steps
from .public.mamba_gradients import MAMBA2_DERIVATIVE
from .public.short_convolution import SHORT_CONV_DERIVATIVE, short_conv

MEMBERS = {  # name: (function, derivative); Dynamo takes names as constants
    "based": (based_with_parts, BASED_DERIVATIVE),
    "delta_rule": (delta_rule, DELTA_DERIVATIVE),
    "linear": (linear, LINEAR_DERIVATIVE),
    "linear, normalized": (normalized_linear, NORMALIZED_DERIVATIVE),
    "mamba2": (mamba2_with_steps, MAMBA2_DERIVATIVE),
    "short_conv": (short_conv, SHORT_CONV_DERIVATIVE),
}


class RecurrentFunction(torch.autograd.Function):
    """(out, state) of a member for torch's autograd, or out alone. member: its name in MEMBERS. names: of the tensors. options:
    those that both the function and its gradients take. of_results: the function's options that say what it returns."""

    @staticmethod
    def forward(ctx, member, names, options, of_results, *tensors):
        """(out, state), or out, computed by the member's function."""
        _save(ctx, member, names, options, tensors)
        return MEMBERS[member][0](**dict(zip(names, tensors)), **options, **of_results)

    @staticmethod
    def backward(ctx, dout, *dstates):
        """The gradients of the tensors that need one. NotImplementedError: second derivatives are requested."""
        leading = (None,) * 4  # gradients of what is no tensor
        if all(x is None for x in (dout, *dstates)):
            return (*leading, *[None] * len(ctx.names))
        _, derivative = MEMBERS[ctx.member]
        tensors = saved = ctx.saved_tensors
        if not torch.compiler.is_compiling():  # graphs have no transforms
            tensors = tuple(map(unwrap, saved))
            if is_second_derivative((dout, *dstates), tensors, tensors[0] is not saved[0]):
                raise NotImplementedError(f"{derivative.no_second_derivatives}; leave create_graph=True out")
        inputs = dict(zip(ctx.names, tensors))
        with torch.no_grad():
            dout = torch.zeros_like(inputs[derivative.values]) if dout is None else make_tma_contiguous(dout)
            wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[len(leading) :]) if needs]
            grads = derivative.compute(dout, dstates, inputs, ctx.options, wanted)
        return (*leading, *[x if x is None else x.to(inputs[name].dtype) for name in ctx.names for x in [grads.get(name)]])


class TransformedRecurrentFunction(torch.autograd.Function):
    """RecurrentFunction in the form that torch.func's transforms need."""

    generate_vmap_rule = True
    backward = staticmethod(RecurrentFunction.backward)

    @staticmethod
    def forward(member, names, options, of_results, *tensors):
        """(out, state), or out, computed by the member's function."""
        return MEMBERS[member][0](**dict(zip(names, tensors)), **options, **of_results)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save what the backward pass needs."""
        member, names, options, _, *tensors = inputs
        _save(ctx, member, names, options, tensors)

    @staticmethod
    def jvp(ctx, *tangents):
        """NotImplementedError: there are no forward-mode derivatives."""
        name = MEMBERS[ctx.member][1].name
        raise NotImplementedError(f"{name}: has no forward-mode derivatives (jvp, jacfwd, hessian); use reverse mode")


def _save(ctx: Any, member: str, names: tuple[str, ...], options: dict[str, Any], tensors: Sequence[Any]) -> None:
    ctx.member, ctx.names, ctx.options = member, names, options
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def call_with_gradients(member: str, arrays: dict[str, Any], options: dict[str, Any], of_results: dict[str, Any]) -> Any:
    """out of a member of linear attention, or (out, state), differentiable once with respect to its arrays. member: its name in
    MEMBERS. arrays, options: of its function and of its gradients, by name. of_results: more options of the function alone,
    which say what it returns."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    arrays = {  # what is no array goes on to the function, which says so
        name: copy_to_torch(x) if hasattr(x, "dtype") and not isinstance(x, torch.Tensor) else x for name, x in arrays.items()
    }
    arrays = autocast_inputs(arrays, MEMBERS[member][1].tiles)
    form = member, tuple(arrays), options, of_results
    if torch.compiler.is_compiling():
        return RecurrentFunction.apply(*form, *make_distinct(arrays.values()))
    if torch._C._functorch.peek_interpreter_stack() is None:
        return RecurrentFunction.apply(*form, *arrays.values())
    return TransformedRecurrentFunction.apply(*form, *arrays.values())
