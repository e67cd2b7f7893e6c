"""torch tensors that require grad: attention.forward as a torch.autograd.Function, outside the op, whose backward pass is
attention.backward. Imported where there are such tensors, and so torch already."""

from typing import Any

import torch
from torch._C._functorch import TransformType

ELEMENTS = 8  # 16 bytes of a tile's elements, which TMA moves


class Attention(torch.autograd.Function):
    """Softmax attention, (out, lse). `options`: what forward and backward both take, by name."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, sink, alibi, bias, options):
        """Without gradients."""
        from .forward import forward

        return forward(q, k, v, sink=sink, alibi=alibi, bias=bias, return_lse=True, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """What the backward pass needs."""
        *tensors, ctx.options = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, dout, _):
        """Of q, k, v and sink. NotImplementedError if they are to be differentiated once more."""
        from .backward.backward import backward

        if _again():
            raise NotImplementedError("attention.forward: has no second derivatives; leave create_graph=True out")
        q, k, v, sink, alibi, bias, out, lse = ctx.saved_tensors
        with torch.no_grad():
            made = backward(_adjacent(dout), q, k, v, out, lse, sink=sink, alibi=alibi, bias=bias, **ctx.options)
        return *made, *[None] * (7 - len(made))


def _again() -> bool:
    """Are the derivatives that are being computed to be differentiated? (torch's `once_differentiable` does not see that where
    dout is a constant, and leaves the derivatives out.)"""
    if torch.compiler.is_compiling():  # which knows no such thing
        return False
    levels = torch._C._functorch.get_interpreter_stack()
    return torch.is_grad_enabled() if levels is None else sum(level.key() == TransformType.Grad for level in levels) > 1


def differentiable(q: Any, k: Any, v: Any, sink: Any, alibi: Any, bias: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """attention.forward, (out, lse), differentiable once with respect to q, k, v and sink; lse has no gradient."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        to = torch.get_autocast_dtype(kind)
        q, k, v = (x.to(to) if x.dtype is torch.float32 else x for x in (q, k, v))
    return Attention.apply(q, k, v, sink, alibi, bias, options)


def _adjacent(x: Any) -> Any:
    """A gradient as TMA can read it: torch's may be one number, expanded."""
    *strides, last = x.stride()
    return x if last == 1 and not any([stride % ELEMENTS for stride in strides]) else x.contiguous()
