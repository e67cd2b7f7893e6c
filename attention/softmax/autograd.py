"""torch tensors that require grad: attention.forward as a torch.autograd.Function, outside the op, whose backward pass is
attention.backward. Imported where there are such tensors, and so torch already."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import TransformType

from tiles.arrays import Form, c_ordered
from tiles.torch_op import DEVICES

from .backward import backward
from .call_options import differentiated
from .forward import forward
from .forward import plain as without_options
from .forward_programs import FORWARD
from .gradient import DIFFERENTIABLE, ONCE, flat, gradients, grouped, unserved

ELEMENTS = 8  # 16 bytes of a tile's elements, which TMA moves
OVER = -2  # the level of a tensor whose transform, one of torch.func's, is over


class Attention(torch.autograd.Function):
    """(out, lse) of softmax attention for torch's autograd. names: what the tensors are called (gradient.py). options: those
    that both forward and backward take."""

    @staticmethod
    def forward(ctx, names, options, *tensors):
        """(out, lse), computed without recording gradients."""
        made = _forward(names, options, *tensors)
        _keep(ctx, names, options, tensors, made)
        return made

    @staticmethod
    def backward(ctx, dout, _):
        """The gradients of the tensors that have one. NotImplementedError: these gradients are to be differentiated
        themselves."""
        *tensors, out, lse = saved = ctx.saved_tensors
        if not torch.compiler.is_compiling():  # which knows no transforms
            *tensors, out, lse = map(_alive, saved)
            if _again(dout, tensors, out is not saved[-2]):
                raise NotImplementedError(f"{ONCE}; leave create_graph=True out")
        with torch.no_grad():
            options = {**ctx.options, **({"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {})}
            wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[2:]) if needs]
            made = gradients(adjacent(dout), dict(zip(ctx.names, tensors)), out, lse, options, wanted)
        return None, None, *[made.get(name) for name in ctx.names]


class Plain(torch.autograd.Function):
    """The same for q, k and v only, without options that are arrays. Most calls are like this, and the host takes a third of
    the time. told: causal, scale, deterministic, family, layout. return_lse: is lse a result? That costs torch 6 us."""

    @staticmethod
    def forward(ctx, q, k, v, told, return_lse):
        """out, or (out, lse), computed without recording gradients."""
        causal, scale, _, family, layout = ctx.told = told
        out, lse = made = without_options(q, k, v, causal, scale, family, layout)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # else lse's would be zeros, made on the device
        if not return_lse:
            return out
        ctx.mark_non_differentiable(lse)
        return made

    @staticmethod
    def backward(ctx, dout, _=None):
        """See Attention."""
        if dout is None:
            return (None,) * 5
        saved = ctx.saved_tensors
        if torch.is_grad_enabled() and any([x.requires_grad for x in (dout, *saved)]):
            raise NotImplementedError(f"{ONCE}; leave create_graph=True out")
        causal, scale, deterministic, family, layout = ctx.told
        in_order = deterministic or torch.are_deterministic_algorithms_enabled()
        return *backward.plain((adjacent(dout), *saved), causal, scale, in_order, family, layout), None, None


class Transformed(torch.autograd.Function):
    """The same as Attention, in the form that torch.func's transforms need. torch takes 30 us more to call it."""

    generate_vmap_rule = True
    backward = staticmethod(Attention.backward)

    @staticmethod
    def forward(names, options, *tensors):
        """See Attention."""
        return _forward(names, options, *tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save what the backward pass needs."""
        names, options, *tensors = inputs
        _keep(ctx, names, options, tensors, output)


def _forward(names: tuple[str, ...], options: dict[str, Any], *tensors: Any) -> tuple[Any, Any]:
    return forward(**grouped(dict(zip(names, tensors))), return_lse=True, **options)


def _keep(ctx: Any, names: tuple[str, ...], options: dict[str, Any], tensors: Sequence[Any], made: tuple[Any, Any]) -> None:
    ctx.names, ctx.options = names, options
    ctx.mark_non_differentiable(made[1])
    ctx.save_for_backward(*tensors, *made)


def _alive(x: Any) -> Any:
    """x itself, or the tensor that it wraps if its transform of torch.func is over. That is so when the function is called
    that torch.func.vjp returned."""
    return torch._C._functorch.get_unwrapped(x) if torch._C._functorch.maybe_get_level(x) == OVER else x


def _again(dout: Any, tensors: Sequence[Any], over: bool) -> bool:
    """Are the gradients that are being computed to be differentiated themselves? (torch's `once_differentiable` does not see
    this where dout is a constant, and leaves out the derivatives.) over: is the transform that computes them over? If not, it
    is one of those that enclose this."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    enclosing = sum(level.key() == TransformType.Grad for level in levels)
    if enclosing and not over:
        return enclosing > 1
    return torch.is_grad_enabled() and any([x.requires_grad for x in (dout, *tensors)])


def plain(q: Any, k: Any, v: Any, told: tuple, return_lse: bool) -> Any:
    """What forward returns for a call without further options, differentiable. None if this is not such a call: then ask
    `differentiable`. told: see Plain."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
        return None
    return Plain.apply(q, k, v, told, return_lse)


def prepare(q: Form, k: Form, v: Form, options: tuple, layout: str) -> None:
    """Compile the kernels that differentiate such calls. options: those of `_forward`. The kernels are those that sum in any
    order; if a call asks for a fixed order, the backward pass compiles its own."""
    causal, scale, _, family = options
    given = {"q": q, "k": k, "v": v}
    problem = FORWARD.problem(given, layout)
    out, lse = (c_ordered(*problem.made(name), q.device) for name in ("out", "lse"))
    given = {"dout": out, **given, "out": out, "lse": lse}
    backward._backward.prepare(given, (causal, scale, torch.are_deterministic_algorithms_enabled(), family), layout)


def differentiable(told: dict[str, Any]) -> tuple[Any, Any] | None:
    """(out, lse) of attention.forward, differentiable once with respect to the arrays of gradient.DIFFERENTIABLE; lse has no
    gradient. told: forward's arguments by name. None: with one of them there is no gradient; or an array that has no gradient
    requires one."""
    arrays, options = flat(told)  # torch keeps nothing but tensors for the backward pass
    arrays = {
        name: x if isinstance(x, torch.Tensor) or not hasattr(x, "shape") else torch.as_tensor(x) for name, x in arrays.items()
    }
    others = [x for name, x in arrays.items() if name not in DIFFERENTIABLE]
    in_parts = "lengths_k" in arrays and len(arrays["lengths_k"].shape) > 1  # of queries, which backward does not take
    if in_parts or unserved([*grouped(arrays), *options]) or differentiated(*others):
        return None
    kind = arrays["q"].device.type
    if kind in DEVICES and torch.is_autocast_enabled(kind):  # meta has none
        to = torch.get_autocast_dtype(kind)
        arrays |= {name: arrays[name].to(to) for name in "qkv" if arrays[name].dtype is torch.float32}
    way = Attention if torch._C._functorch.peek_interpreter_stack() is None else Transformed
    return way.apply(tuple(arrays), options, *arrays.values())


def adjacent(x: Any) -> Any:
    """A gradient in a form that TMA can read. That which torch passes may be a single number, expanded."""
    if x.is_contiguous():
        return x
    *strides, last = x.stride()
    return x if last == 1 and not any([stride % ELEMENTS for stride in strides]) else x.contiguous()
