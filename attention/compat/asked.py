"""What several tables need: to pass on what was asked for, to refuse what cannot be served, and a seed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

import attention

ERRORS = TypeError, ValueError, NotImplementedError  # that name an argument


def asked(**options: Any) -> dict[str, Any]:
    """The options that are not None: what forward is not told is as plain forward has it."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(name: str, is_asked: bool, advice: str) -> None:
    """NotImplementedError if the argument `name` asks for what cannot be served; advice says what to do."""
    if is_asked:
        raise NotImplementedError(f"{name}: is not served; {advice}")


def rename(error: Exception, theirs: Mapping[str, str]) -> None:
    """Put the caller's names of arguments, {ours: theirs}, into an error that begins `lengths: must be ..: lengths[0]=9`."""
    ours = "|".join(theirs)
    said = re.sub(rf"(?<![\w.])({ours})(?=[:.=\[]|'s\b)", lambda found: theirs[found[0]], str(error))
    error.args = (said,)


def namespace(x: Any) -> ModuleType:
    """The module whose functions make arrays like x: numpy, torch, jax.numpy, cupy."""
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else sys.modules[type(x).__module__.partition(".")[0]]


def integers(count: int, value: int, like: Any) -> Any:
    """An array (count) of one number, int32, of the framework and in the place of another one."""
    xp = namespace(like)
    where = {"device": like.device} if xp.__name__ == "torch" else {}
    return xp.full((count,), value, dtype=xp.int32, **where)


def attend_heads_first(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """attention.forward of (B, H, S, D), whose out and gradients lie as torch's do: as query does, its heads inside its tokens
    where they are so in memory. Then x.transpose(1, 2) of an out is a view of (B, S, H D), without a copy."""
    if len(query.shape) != 4 or not _heads_inside(query):
        return attention.forward(query, key, value, layout="bhsd", **options)
    found = attention.forward(*(x.swapaxes(1, 2) for x in (query, key, value)), **options)
    return (found[0].swapaxes(1, 2), found[1]) if options.get("return_lse") else found.swapaxes(1, 2)


def _heads_inside(x: Any) -> bool:
    """Is (B, H, S, D) a view of memory in which tokens come before heads? JAX's arrays are no views."""
    strides = x.stride() if hasattr(x, "stride") else getattr(x, "strides", None)
    return strides is not None and abs(strides[1]) < abs(strides[2])


def seeded(dropout: float, x: Any) -> dict[str, Any]:
    """forward's dropout and seed, where any is asked. The seed comes from the generator that torch.manual_seed sets, if x is
    torch's, or else numpy.random.seed: what is dropped can be repeated, but is not what the other library drops. Graphs,
    torch.compile's and CUDA's, draw it anew, as an array. NotImplementedError: under jax.jit it would be drawn once."""
    if not dropout:
        return {}
    xp = namespace(x)
    if xp.__name__ == "torch":
        if xp.compiler.is_compiling() or (x.is_cuda and xp.cuda.is_current_stream_capturing()):
            return {"dropout": dropout, "seed": xp.randint(2**31, (1,), device=x.device)}
        return {"dropout": dropout, "seed": int(xp.randint(2**31, ()))}
    if xp.__name__ == "jax.numpy" and not sys.modules["jax"].core.is_concrete(x):
        cure = "call attention.forward with dropout=, and seed=, an array that is an argument of the traced function"
        refuse("dropout_p", True, f"what JAX traces would drop the same in every call; {cure}")
    return {"dropout": dropout, "seed": int(np.random.randint(2**31))}
