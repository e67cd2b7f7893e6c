"""Gradients: of the definition by its parts, torch's own ops, where the kernels computed it forward.

Torch is never imported before a caller has."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tiles.torch_op import compiling


def wants_gradient(arrays: Sequence[Any]) -> bool:
    """Is one of them a tensor of torch's that requires grad, while grad mode is on?"""
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled() and any([getattr(x, "requires_grad", False) for x in arrays])


def differentiable(fused: Callable, by_parts: Callable, arrays: Sequence[Any]) -> Any:
    """fused(*arrays), of which torch takes the gradient of by_parts(*arrays). Where torch.compile traces the call,
    it is given the parts, of which it makes its own kernels, forward and backward."""
    if compiling():
        return by_parts(*arrays)
    return _function().apply(fused, by_parts, *arrays)


@functools.cache
def _function() -> Any:
    """The autograd function."""
    import torch
    from torch.autograd.function import once_differentiable

    class ByParts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, fused, by_parts, *arrays):
            ctx.by_parts, ctx.numbers = by_parts, [None if isinstance(x, torch.Tensor) else x for x in arrays]
            ctx.save_for_backward(*[x for x in arrays if isinstance(x, torch.Tensor)])
            return fused(*arrays)

        @staticmethod
        @once_differentiable
        def backward(ctx, *gradients):
            saved = iter(ctx.saved_tensors)
            arrays = [next(saved).detach() if x is None else x for x in ctx.numbers]
            wanted = [n for n, x in enumerate(arrays) if ctx.needs_input_grad[2 + n]]
            for n in wanted:
                arrays[n].requires_grad_()
            with torch.enable_grad():
                results = ctx.by_parts(*arrays)
            results = results if isinstance(results, tuple) else (results,)
            found = iter(torch.autograd.grad(results, [arrays[n] for n in wanted], gradients, allow_unused=True))
            return None, None, *[next(found) if n in wanted else None for n in range(len(arrays))]

    return ByParts
