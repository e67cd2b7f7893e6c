"""What several compat modules need: dropping options that are None, refusing arguments that are not supported, renaming
arguments in errors, and a dropout seed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

import attention

ERRORS = TypeError, ValueError, NotImplementedError  # that name an argument


def drop_none(**options: Any) -> dict[str, Any]:
    """The options that are not None: an option that is left out has forward's own default."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(name: str, unsupported: bool, advice: str) -> None:
    """NotImplementedError if `unsupported`: the argument `name` asks for something that is not supported here. advice: what to
    do instead."""
    if unsupported:
        raise NotImplementedError(f"{name}: is not supported; {advice}")


def rename_arguments(error: Exception, theirs: Mapping[str, str]) -> None:
    """Replace our argument names by the caller's, {ours: theirs}, in an error that begins `lengths: must be ..:
    lengths[0]=9`."""
    ours = "|".join(theirs)
    message = re.sub(rf"(?<![\w.])({ours})(?=[:.=\[]|'s\b)", lambda match: theirs[match[0]], str(error))
    error.args = (message,)


def array_namespace(x: Any) -> ModuleType:
    """The module whose functions make arrays like x: numpy, torch, jax.numpy, cupy."""
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else sys.modules[type(x).__module__.partition(".")[0]]


def full_int32(count: int, value: int, like: Any) -> Any:
    """An int32 array (count) that holds `value` everywhere, of the framework and on the device of `like`."""
    xp = array_namespace(like)
    device = {"device": like.device} if xp.__name__ == "torch" else {}
    return xp.full((count,), value, dtype=xp.int32, **device)


def attend_heads_first(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """attention.forward of (B, H, S, D). The output and the gradients have the memory layout of torch's own: if query's heads
    lie inside its tokens, (B, S, H, D) in memory, so do theirs. Then out.transpose(1, 2) is a view of (B, S, H D), without a
    copy."""
    if len(query.shape) != 4 or not _has_heads_inside_tokens(query):
        return attention.forward(query, key, value, layout="bhsd", **options)
    result = attention.forward(*(x.swapaxes(1, 2) for x in (query, key, value)), **options)
    return (result[0].swapaxes(1, 2), result[1]) if options.get("return_lse") else result.swapaxes(1, 2)


def _has_heads_inside_tokens(x: Any) -> bool:
    """Is this (B, H, S, D) array a view of memory in which tokens come before heads, (B, S, H, D)? JAX arrays are never
    views."""
    strides = x.stride() if hasattr(x, "stride") else getattr(x, "strides", None)
    return strides is not None and abs(strides[1]) < abs(strides[2])


def draw_dropout_options(dropout: float, x: Any) -> dict[str, Any]:
    """forward's dropout and seed, if there is any dropout. For torch tensors the seed is drawn from the generator that
    torch.manual_seed sets, otherwise from numpy.random.seed's: a run can be repeated, but does not drop the weights that the
    other library would drop. Under torch.compile and CUDA graphs the seed is an array that is drawn anew in every replay.
    NotImplementedError: under jax.jit the seed would be drawn only once."""
    if not dropout:
        return {}
    xp = array_namespace(x)
    if xp.__name__ == "torch":
        if xp.compiler.is_compiling() or (x.is_cuda and xp.cuda.is_current_stream_capturing()):
            return {"dropout": dropout, "seed": xp.randint(2**31, (1,), device=x.device)}
        return {"dropout": dropout, "seed": int(xp.randint(2**31, ()))}
    if xp.__name__ == "jax.numpy" and not sys.modules["jax"].core.is_concrete(x):
        cure = "call attention.forward with dropout=, and seed=, an array that is an argument of the traced function"
        refuse("dropout_p", True, f"what JAX traces would drop the same in every call; {cure}")
    return {"dropout": dropout, "seed": int(np.random.randint(2**31))}
