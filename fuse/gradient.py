"""Gradients of fused functions for torch's autograd: by kernels where the algebra finds them (backward.py), else by the
definition's parts, torch's own ops. One argument's may come from kernels, another's from parts.

Torch is never imported before a caller has."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tiles.torch_op import compiling

if TYPE_CHECKING:
    from .fused import Fused


def wants_gradient(arrays: Sequence[Any]) -> bool:
    """Is one of them a tensor of torch's that requires grad, while grad mode is on?"""
    torch = sys.modules.get("torch")
    return torch is not None and torch.is_grad_enabled() and any([getattr(x, "requires_grad", False) for x in arrays])


def differentiable(function: Fused, arrays: Sequence[Any]) -> Any:
    """function.run(*arrays), and its gradient. Where torch.compile traces the call, it is given the parts, of which it makes
    its own kernels, forward and backward."""
    if compiling():
        return function._by_parts(*arrays)
    return _autograd().apply(function, *arrays)


def by_kernels(function: Fused, arrays: Sequence[Any], by: Sequence[Any], wanted: Sequence[str]) -> dict[str, Any]:
    """The gradients, by name, of those among the wanted arguments whose gradients kernels compute. by: the gradients by the
    results, or None."""
    from .fused import NoKernel

    names, run = function.gradients_by_kernels(arrays, by, tuple(wanted))
    try:
        return dict(zip(names, run()))
    except NoKernel as error:
        warnings.warn(f"{error}; the gradient goes by parts", RuntimeWarning, stacklevel=3)
        return {}


def by_parts(function: Fused, arrays: Sequence[Any], by: Sequence[Any], wanted: Sequence[str]) -> dict[str, Any]:
    """The gradients by these arguments, by torch's."""
    import torch

    arrays = [x.detach() if isinstance(x, torch.Tensor) else x for x in arrays]
    inputs = [arrays[function.names.index(name)].requires_grad_() for name in wanted]
    with torch.enable_grad():
        results = function._by_parts(*arrays)
    results = results if isinstance(results, tuple) else (results,)
    some = [(y, g) for y, g in zip(results, by) if g is not None and y.requires_grad]
    if not some:
        return {}
    of, given = zip(*some)
    return dict(zip(wanted, torch.autograd.grad(of, inputs, given, allow_unused=True)))


@functools.cache
def _autograd() -> Any:
    """The autograd function."""
    import torch
    from torch.autograd.function import once_differentiable

    class OfFused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, *arrays):
            ctx.set_materialize_grads(False)  # of results that nobody uses
            ctx.function, ctx.numbers = function, [None if isinstance(x, torch.Tensor) else x for x in arrays]
            ctx.save_for_backward(*[x for x in arrays if isinstance(x, torch.Tensor)])
            return function.run(*arrays)

        @staticmethod
        @once_differentiable
        def backward(ctx, *by):
            saved = iter(ctx.saved_tensors)
            arrays = [next(saved) if x is None else x for x in ctx.numbers]
            names = ctx.function.names
            wanted = [name for name, needed in zip(names, ctx.needs_input_grad[1:]) if needed]
            by = [g if g is None else g.contiguous() for g in by]
            found = by_kernels(ctx.function, arrays, by, wanted)
            rest = [name for name in wanted if name not in found]
            found |= by_parts(ctx.function, arrays, by, rest) if rest else {}
            return None, *[found.get(name) for name in names]

    return OfFused
