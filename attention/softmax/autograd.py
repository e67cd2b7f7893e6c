"""torch tensors that require grad: attention.forward as a torch.autograd.Function, outside the op, whose backward pass is
attention.backward. Imported where there are such tensors, and so torch already."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import TransformType

from .asked import differentiated
from .gradient import DIFFERENTIABLE, ONCE, flat, gradients, grouped, unserved

ELEMENTS = 8  # 16 bytes of a tile's elements, which TMA moves


class Attention(torch.autograd.Function):
    """Softmax attention, (out, lse). names: of the tensors (gradient.py); `options`: what forward and backward both take."""

    @staticmethod
    def forward(ctx, names, options, *tensors):
        """Without gradients."""
        made = _forward(names, options, *tensors)
        _keep(ctx, names, options, tensors, made)
        return made

    @staticmethod
    def backward(ctx, dout, _):
        """Of what is differentiable. NotImplementedError if they are to be differentiated once more."""
        if _again():
            raise NotImplementedError(f"{ONCE}; leave create_graph=True out")
        *tensors, out, lse = ctx.saved_tensors
        with torch.no_grad():
            wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[2:]) if needs]
            options = {**ctx.options, **({"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {})}
            made = gradients(_adjacent(dout), dict(zip(ctx.names, tensors)), out, lse, options, wanted)
        return None, None, *[made.get(name) for name in ctx.names]


class Transformed(Attention):
    """The same, as torch.func wants it; torch then takes 40 us more to call it."""

    generate_vmap_rule = True
    forward = staticmethod(lambda names, options, *tensors: _forward(names, options, *tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """What the backward pass needs."""
        names, options, *tensors = inputs
        _keep(ctx, names, options, tensors, output)


def _forward(names: tuple[str, ...], options: dict[str, Any], *tensors: Any) -> tuple[Any, Any]:
    from .forward import forward

    return forward(**grouped(dict(zip(names, tensors))), return_lse=True, **options)


def _keep(ctx: Any, names: tuple[str, ...], options: dict[str, Any], tensors: Sequence[Any], made: tuple[Any, Any]) -> None:
    ctx.names, ctx.options = names, options
    ctx.mark_non_differentiable(made[1])
    ctx.save_for_backward(*tensors, *made)


def _again() -> bool:
    """Are the derivatives that are being computed to be differentiated? (torch's `once_differentiable` does not see that where
    dout is a constant, and leaves the derivatives out.)"""
    if torch.compiler.is_compiling():  # which knows no such thing
        return False
    levels = torch._C._functorch.get_interpreter_stack()
    return torch.is_grad_enabled() if levels is None else sum(level.key() == TransformType.Grad for level in levels) > 1


def differentiable(told: dict[str, Any]) -> tuple[Any, Any] | None:
    """attention.forward, (out, lse), differentiable once with respect to the arrays of gradient.DIFFERENTIABLE; lse has no
    gradient. told: its arguments by name; None: with one of them there is no gradient, or it wants one and has none."""
    arrays, options = flat(told)
    others = [x for name, x in arrays.items() if name not in DIFFERENTIABLE]
    if unserved([*grouped(arrays), *options]) or differentiated(*others):
        return None
    kind = arrays["q"].device.type
    if torch.is_autocast_enabled(kind):
        to = torch.get_autocast_dtype(kind)
        arrays |= {name: arrays[name].to(to) for name in "qkv" if arrays[name].dtype is torch.float32}
    way = Attention if torch._C._functorch.peek_interpreter_stack() is None else Transformed
    return way.apply(tuple(arrays), options, *arrays.values())


def _adjacent(x: Any) -> Any:
    """A gradient as TMA can read it: torch's may be one number, expanded."""
    *strides, last = x.stride()
    return x if last == 1 and not any([stride % ELEMENTS for stride in strides]) else x.contiguous()
