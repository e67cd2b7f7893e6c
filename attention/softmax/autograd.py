"""torch tensors that require grad: attention.forward as a torch.autograd.Function, outside the op, whose backward pass is
attention.backward. Imported where there are such tensors, and so torch already."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from tiles.arrays import Form, c_ordered
from tiles.frameworks import refuse_tangent, with_tangents
from tiles.torch_op import DEVICES

from .backward import backward
from .call_options import pad_aux, requires_grad
from .forward import forward
from .forward import plain as without_options
from .forward_programs import FORWARD
from .gradient import DIFFERENTIABLE, NO_SECOND_DERIVATIVES, OF_AUX, compute_gradients, flatten_arrays, group_arrays
from .planning import INDICES

ELEMENTS = 8  # 16 bytes of a tile's elements, which TMA moves
OVER = -2  # the level of a tensor whose transform, one of torch.func's, is over


class AttentionFunction(torch.autograd.Function):
    """(out, lse) of softmax attention for torch's autograd, or out. names: what the tensors are called (gradient.py). options:
    those that both forward and backward take. return_lse: is lse a result? Graphs of torch.compile make zeros of the gradient
    of a result that nobody uses."""

    @staticmethod
    def forward(ctx, names, options, return_lse, *tensors):
        """Computed without recording gradients."""
        made = _forward(names, options, *tensors)
        _save(ctx, names, options, tensors, made)
        return made if return_lse else made[0]

    @staticmethod
    def backward(ctx, dout, dlse=None):
        """The gradients of the tensors that have one. NotImplementedError: these gradients are to be differentiated
        themselves."""
        if dout is dlse is None:
            return (None,) * (3 + len(ctx.names))
        *tensors, out, lse = saved = ctx.saved_tensors
        if not torch.compiler.is_compiling():  # which knows no transforms
            *tensors, out, lse = map(_unwrap, saved)
            if _is_second_derivative((dout, dlse), tensors, out is not saved[-2]):
                raise NotImplementedError(f"{NO_SECOND_DERIVATIVES}; leave create_graph=True out")
        with torch.no_grad():
            options = {**ctx.options, **({"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {})}
            wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[3:]) if needs]
            made = compute_gradients(_out_gradient(dout, out), dlse, dict(zip(ctx.names, tensors)), out, lse, options, wanted)
        return None, None, None, *[made.get(name) for name in ctx.names]


class PlainAttentionFunction(torch.autograd.Function):
    """The same for q, k and v only, without options that are arrays. Most calls are like this, and the host takes a third of
    the time. told: causal, scale, deterministic, family, layout. return_lse: is lse a result? That costs torch 6 us."""

    @staticmethod
    def forward(ctx, q, k, v, told, return_lse):
        """out, or (out, lse), computed without recording gradients."""
        causal, scale, _, family, layout = ctx.told = told
        out, lse = made = without_options(q, k, v, causal, scale, family, layout)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # else lse's would be zeros, made on the device
        return made if return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        """See Attention."""
        if dout is dlse is None:
            return (None,) * 5
        saved = ctx.saved_tensors
        if torch.is_grad_enabled() and _requires_grad(dout, dlse, *saved):
            raise NotImplementedError(f"{NO_SECOND_DERIVATIVES}; leave create_graph=True out")
        causal, scale, deterministic, family, layout = ctx.told
        in_order = deterministic or torch.are_deterministic_algorithms_enabled()
        of = _out_gradient(dout, saved[3]), *saved, dlse
        return *backward.backward_without_options(of, causal, scale, in_order, family, layout), None, None


class TransformedAttentionFunction(torch.autograd.Function):
    """The same as Attention, in the form that torch.func's transforms need, which keep nothing but arguments and results: lse
    is one of them. torch takes 30 us more to call it."""

    generate_vmap_rule = True
    backward = staticmethod(AttentionFunction.backward)

    @staticmethod
    def forward(names, options, return_lse, *tensors):
        """See Attention."""
        return _forward(names, options, *tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save what the backward pass needs."""
        names, options, _, *tensors = inputs
        _save(ctx, names, options, tensors, output)

    @staticmethod
    def jvp(ctx, *tangents):
        """Forward-mode derivatives, here around reverse ones. NotImplementedError: there are none."""
        raise NotImplementedError("attention.forward: has no forward-mode derivatives (jvp, jacfwd, hessian); use reverse mode")


def _forward(names: tuple[str, ...], options: dict[str, Any], *tensors: Any) -> tuple[Any, Any]:
    return forward(**group_arrays(dict(zip(names, tensors))), return_lse=True, **options)


def _save(ctx: Any, names: tuple[str, ...], options: dict[str, Any], tensors: Sequence[Any], made: tuple[Any, Any]) -> None:
    ctx.names, ctx.options = names, options
    ctx.set_materialize_grads(False)  # see Plain
    ctx.save_for_backward(*tensors, *made)


def _unwrap(x: Any) -> Any:
    """x itself, or the tensor that it wraps if its transform of torch.func is over. That is so when the function is called
    that torch.func.vjp returned."""
    return torch._C._functorch.get_unwrapped(x) if torch._C._functorch.maybe_get_level(x) == OVER else x


def _requires_grad(*tensors: Any) -> bool:
    """Does one of these, some of which may be None, require grad?"""
    return any([x is not None and x.requires_grad for x in tensors])


def _out_gradient(dout: Any, out: Any) -> Any:
    """The gradient of out, for kernels: zeros where a loss depends on lse alone."""
    return torch.zeros_like(out) if dout is None else make_tma_contiguous(dout)


def _is_second_derivative(of_results: Sequence[Any], tensors: Sequence[Any], over: bool) -> bool:
    """Are the gradients that are being computed to be differentiated themselves? (torch's `once_differentiable` does not see
    this where these of the results are constants, and leaves out the derivatives.) over: is the transform that computes them
    over? If not, it is one of those that enclose this."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    enclosing = sum(level.key() == TransformType.Grad for level in levels)
    if enclosing and not over:
        return enclosing > 1
    return torch.is_grad_enabled() and _requires_grad(*of_results, *tensors)


def plain(q: Any, k: Any, v: Any, told: tuple, return_lse: bool) -> Any:
    """What forward returns for a call without further options, differentiable. None if this is not such a call: then ask
    `differentiable`. told: see Plain."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    if forward_ad._current_level >= 0 or torch._C._is_any_autocast_enabled():
        return None
    try:
        return PlainAttentionFunction.apply(q, k, v, told, return_lse)
    except TypeError:
        if not any([not isinstance(x, torch.Tensor) and hasattr(x, "shape") for x in (q, k, v)]):
            raise
        return None  # one of them is NumPy's, say


def prepare_backward(q: Form, k: Form, v: Form, options: tuple, layout: str) -> None:
    """Compile the kernels that differentiate such calls. options: those of `_forward`. The kernels are those that sum in any
    order; if a call asks for a fixed order, the backward pass compiles its own."""
    causal, scale, _, family = options
    given = {"q": q, "k": k, "v": v}
    problem = FORWARD.problem(given, layout)
    out, lse = (c_ordered(*problem.made(name), q.device) for name in ("out", "lse"))
    given = {"dout": out, **given, "out": out, "lse": lse}
    backward._backward.prepare(given, (causal, scale, torch.are_deterministic_algorithms_enabled(), family), layout)


def differentiable(told: dict[str, Any], return_lse: bool) -> Any:
    """out of attention.forward, or (out, lse), differentiable once with respect to the arrays of gradient.DIFFERENTIABLE. told:
    forward's arguments by name. NotImplementedError, ValueError, TypeError name one with which there is no gradient, or that
    has none and requires one."""
    pad_aux(told["aux"])  # which refuses what is none of these
    arrays, options = flatten_arrays(told)  # torch keeps nothing but tensors for the backward pass
    arrays = {name: told[name] for name in "qkv"} | arrays
    arrays = {
        name: x if isinstance(x, torch.Tensor) or not hasattr(x, "shape") else copy_to_torch(x) for name, x in arrays.items()
    }
    for name, x in arrays.items():
        if name not in DIFFERENTIABLE and requires_grad(x):
            raise NotImplementedError(f"{name}: requires grad, and has no gradient; pass {name}.detach()")
        if name in OF_AUX and x.numel() >= INDICES and requires_grad(x):  # else the backward pass would say so
            cure = f"pass it as bias, or pass {name}.detach(): {name}.shape={tuple(x.shape)}"
            raise ValueError(f"{name}: requires grad, and has 2**24 elements or more, which get no gradient; {cure}")
    if len(getattr(arrays.get("lengths_k"), "shape", ())) > 1:
        said = "there is no gradient where it has a number for each part of a batch's queries"
        raise NotImplementedError(f"lengths_k: {said}; give each part a batch of its own, or call under torch.no_grad()")
    if with_tangents():
        for name, x in arrays.items():
            refuse_tangent(x, name)
    kind = arrays["q"].device.type if isinstance(arrays["q"], torch.Tensor) else None
    if kind in DEVICES and torch.is_autocast_enabled(kind):  # meta has none
        to = torch.get_autocast_dtype(kind)
        arrays |= {name: arrays[name].to(to) for name in "qkv" if getattr(arrays[name], "dtype", None) is torch.float32}
    if torch.compiler.is_compiling():
        return AttentionFunction.apply(tuple(arrays), options, return_lse, *make_distinct(arrays.values()))
    if torch._C._functorch.peek_interpreter_stack() is None:
        return AttentionFunction.apply(tuple(arrays), options, return_lse, *arrays.values())
    made = TransformedAttentionFunction.apply(tuple(arrays), options, True, *arrays.values())
    return made if return_lse else made[0]


def make_distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The same, none of them twice, which Dynamo does not serve: a view instead."""
    found: list[torch.Tensor] = []
    for x in tensors:
        found.append(x.view_as(x) if any([x is other for other in found]) else x)
    return found


def copy_to_torch(x: Any) -> torch.Tensor:
    """A tensor of another framework's array, whose memory may be written to before the backward pass, and torch not know."""
    if str(x.dtype) == "bfloat16":  # which torch does not read of NumPy
        return torch.tensor(np.asarray(x).view(np.int16)).view(torch.bfloat16)
    return torch.tensor(x, device="cuda" if hasattr(x, "__cuda_array_interface__") else "cpu")


def make_tma_contiguous(x: Any) -> Any:
    """A gradient in a form that TMA can read. That which torch passes may be a single number, expanded."""
    if x.is_contiguous():
        return x
    *strides, last = x.stride()
    return x if last == 1 and not any([stride % ELEMENTS for stride in strides]) else x.contiguous()
