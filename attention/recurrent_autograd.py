"""Members of linear attention, the convolution before them and the norm behind them, as torch.autograd.Functions, whose
backward passes are the programs of attention.linear_backward and its like. It is imported only when tensors require grad, so
that torch is imported already."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .autograd_inputs import (
    autocast_inputs,
    copy_to_torch,
    is_plain,
    is_second_derivative,
    make_distinct,
    make_tma_contiguous,
    unwrap,
)
from .plans.recurrent.recurrent_derivative import GradientCall, find_member, has_adjacent_rows

LEADING = 3  # arguments of the Functions before their arrays
Places = tuple[int | None, ...]


class RecurrentFunction(torch.autograd.Function):
    """The results of a member for torch's autograd. member: its name in Members. options, layout, arrays: those of its program,
    the arrays without results."""

    @staticmethod
    def forward(ctx, member, options, layout, *arrays):
        """The results of the member's program. What it stores for gradients is saved besides the arrays."""
        in_training, stored = _options_in_training(member, options)
        if not stored:
            _save(ctx, member, options, layout, arrays)
            return _call(member, options, layout, arrays)
        all_results = _call(member, in_training, layout, arrays)
        results = tuple(all_results[: -len(stored)])
        _save(ctx, member, options, layout, (*arrays, *all_results[-len(stored) :]))
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx, *result_gradients):
        """The gradients of the arrays that need one. NotImplementedError: second derivatives are requested."""
        arrays = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a graph's own derivative is refused by its ops
            _refuse_second_derivative(ctx, is_second_derivative(result_gradients, arrays, False))
        return _gradients(ctx, result_gradients, arrays)


class TransformedRecurrentFunction(torch.autograd.Function):
    """RecurrentFunction in the form that torch.func's transforms need. It saves nothing but the arrays: what is saved besides
    would have to be a result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(member, options, layout, *arrays):
        """What the member's program returns."""
        return _call(member, options, layout, arrays)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save what the backward pass needs."""
        member, options, layout, *arrays = inputs
        _save(ctx, member, options, layout, arrays)

    @staticmethod
    def backward(ctx, *result_gradients):
        """The gradients of the member's arrays, as in RecurrentFunction."""
        saved = ctx.saved_tensors
        arrays = [x if x is None else unwrap(x) for x in saved]
        finished = any([x is not y for x, y in zip(arrays, saved)])
        _refuse_second_derivative(ctx, is_second_derivative(result_gradients, arrays, finished))
        with torch.no_grad():
            return _gradients(ctx, result_gradients, arrays)

    @staticmethod
    def jvp(ctx, *tangents):
        """NotImplementedError: there are no forward-mode derivatives."""
        name = find_member(ctx.member)[1].name
        raise NotImplementedError(f"{name}: has no forward-mode derivatives (jvp, jacfwd, hessian); use reverse mode")


def _save(ctx: Any, member: str, options: tuple, layout: str, arrays: Sequence[Any]) -> None:
    ctx.member, ctx.options, ctx.layout = member, options, layout
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays)


def _call(member: str, options: tuple, layout: str, arrays: Sequence[Any]) -> Any:
    program, _ = find_member(member)
    return program(None, (*arrays, *[None] * (len(program.names) - len(arrays))), options, layout)


def _refuse_second_derivative(ctx: Any, requested: bool) -> None:
    """NotImplementedError if second derivatives are requested."""
    if requested:
        words = find_member(ctx.member)[1].no_second_derivatives
        raise NotImplementedError(f"{words}; leave create_graph=True out")


def _gradients(ctx: Any, result_gradients: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of the arguments. result_gradients: those of the results, None for a result that the loss does not depend
    on. arrays: those of the program, and what forward stored."""
    needs = ctx.needs_input_grad[LEADING:]
    if all([x is None for x in result_gradients]):
        return (None,) * (LEADING + len(needs))
    program, derivative = find_member(ctx.member)
    dout, *other_gradients = result_gradients
    dout = torch.zeros_like(arrays[program.names.index(derivative.values)]) if dout is None else make_tma_contiguous(dout)
    if derivative.of_rows and not has_adjacent_rows(dout):
        dout = dout.contiguous()
    call, places = _gradient_call(ctx.member, tuple(needs), ctx.options, len(other_gradients), len(arrays) > len(needs))
    inputs = *arrays, dout, *other_gradients, None
    gradients = derivative.program(None, tuple([inputs[place] for place in call.arrays]), call.options, ctx.layout)
    if not isinstance(gradients, tuple):  # there is but one
        gradients = (gradients,)
    gradients = [None if place is None else gradients[place] for place in places]
    return *[None] * LEADING, *[x if x is None or x.dtype is y.dtype else x.to(y.dtype) for x, y in zip(gradients, arrays)]


@functools.lru_cache(1024)
def _known_call(
    member: str, needs: tuple[bool, ...], options: tuple, other_gradients: int, stored: bool
) -> tuple[GradientCall, Places]:
    program, derivative = find_member(member)
    inputs, results = program.names[: len(needs)], program.names[len(needs) :]
    requested = [name for name, needed in zip(inputs, needs) if needed]
    stored_names = _options_in_training(member, options)[1] if stored else ()
    available = [*inputs, *stored_names, *["d" + name for name in results[: 1 + other_gradients]]]
    call = derivative.call(available, requested, dict(zip(program.options, options)))
    return call, tuple([call.results[name] if name in requested else None for name in inputs])


def _gradient_call(
    member: str, needs: tuple[bool, ...], options: tuple, other_gradients: int, stored: bool
) -> tuple[GradientCall, Places]:
    """(the call of a member's program of gradients, the index of each input's gradient among its results). needs: which inputs
    need a gradient. other_gradients: how many results besides `out` have one. stored: did forward store something?"""
    return _known_call(member, needs, options, other_gradients, stored)


@functools.lru_cache(1024)
def _known_options(member: str, options: tuple) -> tuple[tuple, tuple[str, ...]]:
    program, derivative = find_member(member)
    in_training, stored = derivative.options_in_training(program.schema, dict(zip(program.options, options)))
    return tuple(in_training.values()), tuple(stored)


def _options_in_training(member: str, options: tuple) -> tuple[tuple, tuple[str, ...]]:
    """(the options with which a member's program stores what gradients read, the names of what it stores)"""
    return _known_options(member, options)


# torch.compile does not look inside
_gradient_call._dynamo_marked_constant = True  # type: ignore[attr-defined]
_options_in_training._dynamo_marked_constant = True  # type: ignore[attr-defined]


def call_with_gradients(member: str, arrays: tuple, options: tuple, layout: str = "bshd") -> Any:
    """The results of a member of linear attention, differentiable once with respect to its arrays. member: its name in Members.
    arrays, options, layout: those of its program, the arrays without results."""
    if is_plain(arrays):
        return RecurrentFunction.apply(member, options, layout, *arrays)
    program, derivative = find_member(member)
    named = {name: x for name, x in zip(program.names, arrays) if x is not None}
    named = {  # what is no array goes on to the program, which says so
        name: copy_to_torch(x) if hasattr(x, "dtype") and not isinstance(x, torch.Tensor) else x for name, x in named.items()
    }
    named = autocast_inputs(named, derivative.tiles)
    if torch.compiler.is_compiling():
        named = dict(zip(named, make_distinct(named.values())))
    arrays = tuple([named.get(name) for name in program.names[: len(arrays)]])
    transformed = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    return (TransformedRecurrentFunction if transformed else RecurrentFunction).apply(member, options, layout, *arrays)
