"""attention.forward as a torch.autograd.Function, whose backward pass is attention.backward, for tensors that require grad. It
is imported only when there are such tensors, so that torch is imported already."""

from collections.abc import Sequence
from typing import Any

import torch

from tiles.launching.arrays import Form

from . import public
from .autograd_inputs import (
    any_requires_grad,
    autocast_inputs,
    copy_to_torch,
    is_plain,
    is_second_derivative,
    make_distinct,
    make_tma_contiguous,
    unwrap,
)
from .plans.requires_grad import requires_grad
from .plans.softmax.gradient import AUX_NAMES, DIFFERENTIABLE, NO_SECOND_DERIVATIVES, compute_gradients, group_arrays
from .plans.softmax.planning import INDICES
from .public.softmax_forward import forward, forward_without_options


def softmax_backward() -> Any:
    """The module public.softmax_backward. It is imported when gradients are prepared or computed, when Numba has compiled
    forward's kernels. See requires_grad.autograd on how."""
    module = getattr(public, "softmax_backward", None)
    if module is None:
        from .public import softmax_backward as module
    return module


class AttentionFunction(torch.autograd.Function):
    """(out, lse) of softmax attention for torch's autograd, or out alone. names: of the tensors (gradient.py). options: those
    that both forward and backward take. return_lse: is lse a result? (torch.compile passes zeros as the gradient of an unused
    result.)"""

    @staticmethod
    def forward(ctx, names, options, return_lse, *tensors):
        """(out, lse), or out, computed by attention.forward."""
        results = _forward(names, options, *tensors)
        _save(ctx, names, options, tensors, results)
        return results if return_lse else results[0]

    @staticmethod
    def backward(ctx, dout, dlse=None):
        """The gradients of the tensors that need one. NotImplementedError: second derivatives are requested."""
        if dout is dlse is None:
            return (None,) * (3 + len(ctx.names))
        *tensors, out, lse = saved = ctx.saved_tensors
        if not torch.compiler.is_compiling():  # graphs have no transforms
            *tensors, out, lse = map(unwrap, saved)
            if is_second_derivative((dout, dlse), tensors, out is not saved[-2]):
                raise NotImplementedError(f"{NO_SECOND_DERIVATIVES}; leave create_graph=True out")
        with torch.no_grad():
            options = {**ctx.options, **({"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {})}
            requested = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[3:]) if needs]
            grads = compute_gradients(
                _out_gradient(dout, out), dlse, dict(zip(ctx.names, tensors)), out, lse, options, requested
            )
        return None, None, None, *[grads.get(name) for name in ctx.names]


class PlainAttentionFunction(torch.autograd.Function):
    """AttentionFunction for q, k and v only, without options that are arrays: most calls are like this, and take a third of the
    host time. options: causal, scale, deterministic, family, layout. return_lse: is lse a result? That costs torch 6 us."""

    @staticmethod
    def forward(ctx, q, k, v, options, return_lse):
        """out, or (out, lse), computed without recording gradients."""
        causal, scale, _, family, layout = ctx.options = options
        out, lse = results = forward_without_options(q, k, v, causal, scale, family, layout)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # otherwise torch would write zeros for the gradient of lse
        return results if return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        """The gradients of q, k and v. NotImplementedError: second derivatives are requested."""
        if dout is dlse is None:
            return (None,) * 5
        saved = ctx.saved_tensors
        if torch.is_grad_enabled() and any_requires_grad(dout, dlse, *saved):
            raise NotImplementedError(f"{NO_SECOND_DERIVATIVES}; leave create_graph=True out")
        causal, scale, deterministic, family, layout = ctx.options
        in_order = deterministic or torch.are_deterministic_algorithms_enabled()
        arguments = _out_gradient(dout, saved[3]), *saved, dlse
        return *softmax_backward().backward_without_options(arguments, causal, scale, in_order, family, layout), None, None


class TransformedAttentionFunction(torch.autograd.Function):
    """AttentionFunction in the form that torch.func's transforms need: they keep nothing but arguments and results, so lse is
    always a result. A call takes 30 us longer."""

    generate_vmap_rule = True
    backward = staticmethod(AttentionFunction.backward)

    @staticmethod
    def forward(names, options, return_lse, *tensors):
        """(out, lse), computed by attention.forward."""
        return _forward(names, options, *tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save what the backward pass needs."""
        names, options, _, *tensors = inputs
        _save(ctx, names, options, tensors, output)

    @staticmethod
    def jvp(ctx, *tangents):
        """NotImplementedError: there are no forward-mode derivatives, which are requested around reverse ones."""
        raise NotImplementedError("attention.forward: has no forward-mode derivatives (jvp, jacfwd, hessian); use reverse mode")


def _forward(names: tuple[str, ...], options: dict[str, Any], *tensors: Any) -> tuple[Any, Any]:
    return forward(**group_arrays(dict(zip(names, tensors))), return_lse=True, **options)


def _save(ctx: Any, names: tuple[str, ...], options: dict[str, Any], tensors: Sequence[Any], results: tuple[Any, Any]) -> None:
    ctx.names, ctx.options = names, options
    ctx.set_materialize_grads(False)  # see PlainAttentionFunction
    ctx.save_for_backward(*tensors, *results)


def _out_gradient(dout: Any, out: Any) -> Any:
    """The gradient of out as kernels take it: zeros if the loss depends on lse alone."""
    return torch.zeros_like(out) if dout is None else make_tma_contiguous(dout)


def attend_without_options(q: Any, k: Any, v: Any, options: tuple, return_lse: bool) -> Any:
    """The differentiable result of forward for a call with these options only; None if the call needs `attend_with_gradients`.
    options: see PlainAttentionFunction."""
    return PlainAttentionFunction.apply(q, k, v, options, return_lse) if is_plain((q, k, v)) else None


def prepare_backward(forms: dict[str, Form], causal: bool, scale: float | None, family: str | None, layout: str) -> None:
    """Compile the backward kernels for such calls, those without a deterministic order. forms: of q, k, v, out and lse. If a
    call sets deterministic, its backward pass compiles other kernels."""
    in_order = torch.are_deterministic_algorithms_enabled()
    softmax_backward()._backward.prepare({"dout": forms["out"], **forms}, (causal, scale, in_order, family), layout)


def attend_with_gradients(arrays: dict[str, Any], options: dict[str, Any], return_lse: bool) -> Any:
    """out of attention.forward, or (out, lse), differentiable once with respect to the arrays of gradient.DIFFERENTIABLE.
    arrays, options: of forward, as gradient.flatten_arrays divides its arguments, because torch saves only tensors for the
    backward pass. NotImplementedError, ValueError, TypeError: an argument has no gradient and requires one, or
    there is no gradient with it; the error names it."""
    arrays = {
        name: x if isinstance(x, torch.Tensor) or not hasattr(x, "shape") else copy_to_torch(x) for name, x in arrays.items()
    }
    for name, x in arrays.items():
        if name not in DIFFERENTIABLE and requires_grad(x):
            raise NotImplementedError(f"{name}: requires grad, and has no gradient; pass {name}.detach()")
        if name in AUX_NAMES and x.numel() >= INDICES and requires_grad(x):  # otherwise the backward pass would raise it
            cure = f"pass it as bias, or pass {name}.detach(): {name}.shape={tuple(x.shape)}"
            raise ValueError(f"{name}: requires grad, and has 2**24 elements or more, which have no gradient; {cure}")
    if len(getattr(arrays.get("lengths_k"), "shape", ())) > 1:
        reason = "of shape (B, C) it has no gradient"
        raise NotImplementedError(f"lengths_k: {reason}; give each part a batch of its own, or call under torch.no_grad()")
    arrays = autocast_inputs(arrays)
    if torch.compiler.is_compiling():
        return AttentionFunction.apply(tuple(arrays), options, return_lse, *make_distinct(arrays.values()))
    if torch._C._functorch.peek_interpreter_stack() is None:
        return AttentionFunction.apply(tuple(arrays), options, return_lse, *arrays.values())
    results = TransformedAttentionFunction.apply(tuple(arrays), options, True, *arrays.values())
    return results if return_lse else results[0]
