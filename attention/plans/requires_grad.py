"""Calls with torch tensors that require grad: which do, what serves them, and what refuses them."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import attention
from tiles.calls.torch_op import imported_module, is_exporting, is_transformed
from tiles.launching.arrays import Array

F = TypeVar("F", bound=Callable)


def requires_grad(*arrays: Any) -> bool:
    """Is one of these a torch tensor that requires grad, in grad mode?"""
    torch = imported_module("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    for x in arrays:  # a loop takes half the time of `any`
        if getattr(x, "requires_grad", False):
            return not is_exporting()  # when exporting, the op itself refuses it
    return False


def needs_gradient(*arrays: Array) -> bool:
    """Does one of these Arrays belong to a torch tensor that requires grad? (Where a call is planned, grad mode is off.)"""
    return any([getattr(x.owner, "requires_grad", False) for x in arrays])


# The modules for tensors that require grad, which import torch; it must be imported already. Each is an attribute of the
# package once it is there: an import statement would cost every call two microseconds, and ten between other work. While
# another thread imports one, the package does not have it yet, and the import statement waits for that thread.
def autograd() -> Any:
    """The module attention.autograd; the first call imports it, and torch with it."""
    module = getattr(attention, "autograd", None)
    if module is None:
        from .. import autograd as module
    return module


def recurrent_autograd() -> Any:
    """The module attention.recurrent_autograd; the first call imports it."""
    module = getattr(attention, "recurrent_autograd", None)
    if module is None:
        from .. import recurrent_autograd as module
    return module


def refuse_with_gradients(**arguments: Any) -> None:
    """NotImplementedError: one of these is passed in a call whose tensors require grad."""
    for name, x in arguments.items():
        if x is not None:
            raise NotImplementedError(
                f"{name}: is not supported for tensors that require grad; omit it, or call under torch.no_grad()"
            )


def without_gradients(function: F) -> F:
    """Decorator: the function runs under torch.no_grad() if a tensor requires grad. Under torch.func's transforms such tensors
    are refused, because their derivatives would be zeros."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        torch = imported_module("torch")
        if torch is None or not torch.is_grad_enabled():  # as in most calls
            return function(*args, **kwargs)
        as_tuple = [x for parts in kwargs.values() if isinstance(parts, (tuple, list)) for x in parts]
        with torch.no_grad() if requires_grad(*args, *kwargs.values(), *as_tuple) and not is_transformed() else nullcontext():
            return function(*args, **kwargs)

    return cast(F, call)
