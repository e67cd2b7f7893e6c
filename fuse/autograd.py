"""Fused functions as a torch.autograd.Function, and their gradients as ops, which torch.compile keeps whole. Imported where
there are tensors that require grad, and so torch already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from tiles.torch_op import NAMESPACE

if TYPE_CHECKING:
    from .backward import Gradient
    from .fused import Fused

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


class FusedAutograd(torch.autograd.Function):
    """function(*arrays) for torch's autograd. Nothing but the arrays is kept for the backward pass."""

    @staticmethod
    def forward(ctx, function, *arrays):
        """The results, computed by kernels."""
        ctx.set_materialize_grads(False)  # of results that nobody uses
        ctx.function, ctx.numbers = function, [None if isinstance(x, torch.Tensor) else x for x in arrays]
        ctx.save_for_backward(*[x for x in arrays if isinstance(x, torch.Tensor)])
        return function.run(*arrays)

    @staticmethod
    @once_differentiable
    def backward(ctx, *by):
        """The gradients: by kernels where there are some, and by parts otherwise."""
        function, saved = ctx.function, iter(ctx.saved_tensors)
        arrays = [next(saved) if x is None else x for x in ctx.numbers]
        wanted = [name for name, needed in zip(function.names, ctx.needs_input_grad[1:]) if needed]
        first = next(x for x in arrays if isinstance(x, torch.Tensor))
        wide = first.dtype is torch.float32  # as results are then, but for those of parts that autocast saw
        given = [g if g is None else g.to(torch.float32 if wide else g.dtype).contiguous() for g in by]
        if torch.compiler.is_compiling():
            found = dict(zip(wanted, _by_op(function, arrays, given, tuple(wanted))))
        else:
            found = by_kernels(function, arrays, given, wanted)
            rest = [name for name in wanted if name not in found]
            found |= by_parts(function, arrays, given, rest) if rest else {}
        return None, *[found.get(name) for name in function.names]


def by_kernels(function: Fused, arrays: Sequence[Any], by: Sequence[Any], wanted: Sequence[str]) -> dict[str, Any]:
    """{name: gradient} of those wanted arguments whose gradients kernels compute. by: the gradients with respect to the
    results, None where there is none."""
    names, run = function.gradients.by_kernels(arrays, by, tuple(wanted))
    return dict(zip(names, run()))


def by_parts(function: Fused, arrays: Sequence[Any], by: Sequence[Any], wanted: Sequence[str]) -> dict[str, Any]:
    """{name: gradient} of the wanted arguments, by torch's autograd on the definition's operations."""
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


def _by_op(function: Any, arrays: list[Any], by: list[Any], wanted: tuple[str, ...]) -> list[Any]:
    """The gradients of the wanted arguments, by a torch op of their own, which torch.compile does not look into."""
    places = tuple([n for n, g in enumerate(by) if g is not None])
    name = function.gradients.op(wanted, places, len(by))
    every = [*arrays, *[by[n] for n in places]]
    tensors, numbers = (
        [x for x in every if isinstance(x, torch.Tensor)],
        [n for n, x in enumerate(every) if not hasattr(x, "shape")],
    )
    called = getattr(getattr(torch.ops, NAMESPACE), name).default
    return called(tensors, [float(every[n]) for n in numbers], numbers)


def op(made: Gradient, name: str) -> None:
    """Register an op of this name that computes a gradient. It takes tensors, numbers, and the places of these."""

    def run(tensors, numbers, places):
        given = [*tensors]
        for place, number in zip(places, numbers):
            given.insert(place, number)
        return list(made.run(*given))

    def fake(tensors, numbers, places):
        arrays = [name for place, name in enumerate(made.names) if place not in places]
        return [torch.empty_like(tensors[arrays.index(one)]) for one in made.wanted]

    LIBRARY.define(f"{name}(Tensor[] tensors, float[] numbers, int[] places) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
