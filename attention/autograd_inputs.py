"""What the Functions of autograd.py and recurrent_autograd.py share: which calls are plain, autocast, copies of other
frameworks' arrays, second derivatives. It is imported only when tensors require grad, so that torch is imported already."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from tiles.calls.torch_op import DEVICES
from tiles.launching.frameworks import computes_tangents, refuse_tangent

TMA_ELEMENTS = 8  # 16-bit elements in 16 bytes, of which TMA needs strides to be multiples
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))  # tensors without subclasses' own rules
FINISHED = -2  # the level of a tensor whose torch.func transform has ended


def unwrap(x: Any) -> Any:
    """x, or the tensor that it wraps if its torch.func transform has ended, as in calls of the function that torch.func.vjp
    returned."""
    return torch._C._functorch.get_unwrapped(x) if torch._C._functorch.maybe_get_level(x) == FINISHED else x


def any_requires_grad(*tensors: Any) -> bool:
    """Does one of these tensors require grad? Some may be None."""
    return any([x is not None and x.requires_grad for x in tensors])


def is_second_derivative(of_results: Sequence[Any], tensors: Sequence[Any], finished: bool) -> bool:
    """Are second derivatives requested? (torch's `once_differentiable` does not notice it if the gradients of results are
    constants, and then omits the derivatives.) finished: has the transform that computes these gradients ended? If not, it
    encloses this call."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    enclosing = sum(level.key() == TransformType.Grad for level in levels)
    if enclosing and not finished:
        return enclosing > 1
    return torch.is_grad_enabled() and any_requires_grad(*of_results, *tensors)


def is_plain(arrays: Iterable[Any]) -> bool:
    """Do these tensors, or None, go to autograd as they are: does nothing trace, transform or cast them?"""
    return (
        PLAIN.issuperset(map(type, arrays))
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch._C._is_any_autocast_enabled()
        and not torch.compiler.is_compiling()
    )


def autocast_inputs(arrays: dict[str, Any], tiles: Sequence[str] = "qkv") -> dict[str, Any]:
    """The arrays with tiles of float32 in the dtype that torch.autocast asks for. tiles: names of arrays, of which the first is
    there. NotImplementedError: one of the arrays has a tangent."""
    if computes_tangents():
        for name, x in arrays.items():
            refuse_tangent(x, name)
    first = arrays[tiles[0]]
    kind = first.device.type if isinstance(first, torch.Tensor) else None
    if kind not in DEVICES or not torch.is_autocast_enabled(kind):  # the meta device has no autocast
        return arrays
    to = torch.get_autocast_dtype(kind)
    return arrays | {name: x.to(to) for name, x in arrays.items() if name in tiles and getattr(x, "dtype", 0) is torch.float32}


def make_distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with a view in place of each repetition, because Dynamo does not support repeated arguments."""
    distinct: list[torch.Tensor] = []
    for x in tensors:
        distinct.append(x.view_as(x) if any([x is other for other in distinct]) else x)
    return distinct


def copy_to_torch(x: Any) -> torch.Tensor:
    """A copy of another framework's array as a tensor: torch would not notice a write to its memory before the backward
    pass."""
    if str(x.dtype) == "bfloat16":  # torch cannot read it from NumPy
        return torch.tensor(np.asarray(x).view(np.int16)).view(torch.bfloat16)
    return torch.tensor(x, device="cuda" if hasattr(x, "__cuda_array_interface__") else "cpu")


def make_tma_contiguous(x: Any) -> Any:
    """A gradient with strides that TMA supports. torch may pass a single number, expanded."""
    if x.is_contiguous():
        return x
    *strides, last = x.stride()
    return x if last == 1 and not any([stride % TMA_ELEMENTS for stride in strides]) else x.contiguous()
