"""attention.short_conv as a torch.autograd.Function, whose backward pass is attention.short_conv_backward, for tensors that
require grad. It is imported only when there are such tensors, so that torch is imported already."""

from collections.abc import Sequence
from typing import Any

import torch

from tiles.calls.torch_op import DEVICES
from tiles.launching.frameworks import refuse_tangent, with_tangents

from .autograd import copy_to_torch, is_second_derivative, make_distinct, make_tma_contiguous, unwrap
from .public.short_convolution import NO_SECOND_DERIVATIVES, compute_gradients, short_conv


class ShortConvFunction(torch.autograd.Function):
    """(out, state) of a short convolution for torch's autograd, or out alone. names: of the tensors. return_state: is the state
    a result?"""

    @staticmethod
    def forward(ctx, names, activation, return_state, *tensors):
        """(out, state), or out, computed by attention.short_conv."""
        _save(ctx, names, activation, tensors)
        return short_conv(**dict(zip(names, tensors)), activation=activation, return_state=return_state)

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
            dout = torch.zeros_like(inputs["x"]) if dout is None else make_tma_contiguous(dout)
            wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[3:]) if needs]
            found = compute_gradients(dout, dstate, inputs, ctx.activation, wanted)
        return None, None, None, *[found[name].to(inputs[name].dtype) if name in found else None for name in ctx.names]


class TransformedShortConvFunction(torch.autograd.Function):
    """ShortConvFunction in the form that torch.func's transforms need."""

    generate_vmap_rule = True
    backward = staticmethod(ShortConvFunction.backward)

    @staticmethod
    def forward(names, activation, return_state, *tensors):
        """(out, state), or out, computed by attention.short_conv."""
        return short_conv(**dict(zip(names, tensors)), activation=activation, return_state=return_state)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save what the backward pass needs."""
        names, activation, _, *tensors = inputs
        _save(ctx, names, activation, tensors)

    @staticmethod
    def jvp(ctx, *tangents):
        """NotImplementedError: there are no forward-mode derivatives."""
        raise NotImplementedError(
            "attention.short_conv: has no forward-mode derivatives (jvp, jacfwd, hessian); use reverse mode"
        )


def _save(ctx: Any, names: tuple[str, ...], activation: str | None, tensors: Sequence[Any]) -> None:
    ctx.names, ctx.activation = names, activation
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def convolve_with_gradients(arrays: dict[str, Any], activation: str | None, return_state: bool) -> Any:
    """out of attention.short_conv, or (out, state), differentiable once with respect to x, weight, bias and initial_state.
    arrays: of short_conv, by name. NotImplementedError: one of them has a tangent."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    arrays = {name: x if isinstance(x, torch.Tensor) else copy_to_torch(x) for name, x in arrays.items()}
    if with_tangents():
        for name, tensor in arrays.items():
            refuse_tangent(tensor, name)
    x = arrays["x"]
    if x.dtype is torch.float32 and x.device.type in DEVICES and torch.is_autocast_enabled(x.device.type):
        arrays["x"] = x.to(torch.get_autocast_dtype(x.device.type))
    function = ShortConvFunction
    tensors = list(arrays.values())
    if torch.compiler.is_compiling():
        tensors = make_distinct(tensors)
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        function = TransformedShortConvFunction
    return function.apply(tuple(arrays), activation, return_state, *tensors)
