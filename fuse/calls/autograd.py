"""Fused functions as a torch.autograd.Function, and their gradients as torch ops, which torch.compile keeps as single nodes.
This module is imported only where a tensor requires grad, so torch is imported already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tiles.calls.torch_op import NAMESPACE

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


class FusedAutograd(torch.autograd.Function):
    """function(*arrays) for torch's autograd. Only the arguments are saved for the backward pass."""

    @staticmethod
    def forward(ctx, function, *arrays):
        """The results, computed by kernels."""
        ctx.set_materialize_grads(False)  # a result that is not used has no gradient
        ctx.function, ctx.numbers = function, [None if isinstance(x, torch.Tensor) else x for x in arrays]
        ctx.save_for_backward(*[x for x in arrays if isinstance(x, torch.Tensor)])
        return function.run(*arrays)

    @staticmethod
    @once_differentiable
    def backward(ctx, *result_gradients):
        """The gradients with respect to the arguments: from kernels where templates compute them, from torch's own ops
        otherwise."""
        function, saved = ctx.function, iter(ctx.saved_tensors)
        arrays = [next(saved) if x is None else x for x in ctx.numbers]
        requested = [name for name, needed in zip(function.names, ctx.needs_input_grad[1:]) if needed]
        first = next(x for x in arrays if isinstance(x, torch.Tensor))
        wide = first.dtype is torch.float32  # then results are float32, unless autocast changed torch's own ops
        by_results = [g if g is None else g.to(torch.float32 if wide else g.dtype).contiguous() for g in result_gradients]
        if torch.compiler.is_compiling():
            gradients = dict(zip(requested, _by_op(function, arrays, by_results, tuple(requested))))
        else:
            gradients = by_kernels(function, arrays, by_results, requested)
            rest = [name for name in requested if name not in gradients]
            gradients |= by_parts(function, arrays, by_results, rest) if rest else {}
        return None, *[gradients.get(name) for name in function.names]


def by_kernels(
    function: Any, arrays: Sequence[Any], result_gradients: Sequence[Any], requested: Sequence[str]
) -> dict[str, Any]:
    """{name: gradient} of those `requested` arguments whose gradients kernels compute. result_gradients: the gradient with
    respect to each result, None where there is none."""
    names, run = function.gradients.by_kernels(arrays, result_gradients, tuple(requested))
    return dict(zip(names, run()))


def by_parts(function: Any, arrays: Sequence[Any], result_gradients: Sequence[Any], requested: Sequence[str]) -> dict[str, Any]:
    """{name: gradient} of the `requested` arguments, by torch's autograd on the operations of the definition. result_gradients:
    as in by_kernels."""
    arrays = [x.detach() if isinstance(x, torch.Tensor) else x for x in arrays]
    inputs = [arrays[function.names.index(name)].requires_grad_() for name in requested]
    with torch.enable_grad():
        results = function._by_parts(*arrays)
    results = results if isinstance(results, tuple) else (results,)
    pairs = [(y, g) for y, g in zip(results, result_gradients) if g is not None and y.requires_grad]
    if not pairs:
        return {}
    results_of, by_results = zip(*pairs)
    return dict(zip(requested, torch.autograd.grad(results_of, inputs, by_results, allow_unused=True)))


def _by_op(function: Any, arrays: list[Any], result_gradients: list[Any], requested: tuple[str, ...]) -> list[Any]:
    """The gradients of the `requested` arguments, by a torch op that torch.compile does not trace into."""
    places = tuple([n for n, g in enumerate(result_gradients) if g is not None])
    name = function.gradients.op(requested, places, len(result_gradients))
    operands = [*arrays, *[result_gradients[n] for n in places]]
    tensors, numbers = (
        [x for x in operands if isinstance(x, torch.Tensor)],
        [n for n, x in enumerate(operands) if not hasattr(x, "shape")],
    )
    called = getattr(getattr(torch.ops, NAMESPACE), name).default
    return called(tensors, [float(operands[n]) for n in numbers], numbers)


def op(gradient: Any, name: str) -> None:
    """Register a torch op of this name that computes `gradient`. It takes the tensors, the numbers, and the places of the
    numbers among the arguments."""

    def run(tensors, numbers, places):
        arguments = [*tensors]
        for place, number in zip(places, numbers):
            arguments.insert(place, number)
        return list(gradient.run(*arguments))

    def fake(tensors, numbers, places):
        arrays = [name for place, name in enumerate(gradient.names) if place not in places]
        return [torch.empty_like(tensors[arrays.index(one)]) for one in gradient.requested]

    LIBRARY.define(f"{name}(Tensor[] tensors, float[] numbers, int[] places) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
