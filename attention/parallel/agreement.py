"""Checks that all ranks make the same call, by a small all-gather of a digest before anything else is sent. The result is
cached by the call's signature. An error on one rank is raised on every rank."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from tiles.launching.checks import check_options

from ..parts.block_masks import FIELDS
from ..scoring.python_functions import register_function
from .peers import Peers

T = TypeVar("T")
MAX_SIGNATURES = 1024  # how many call signatures are cached for each group
REFUSAL_PREFIX = "refused: "  # the first word of the description of a rank whose plan raises
ERRORS = {error.__name__: error for error in (TypeError, ValueError, NotImplementedError)}
PLAIN_TYPES = frozenset([bool, int, float, str])
_CACHED: dict[Any, dict[Hashable, Any]] = {}  # by group, so that all its ranks clear it at the same call


def cached_plan(peers: tuple[Peers, ...], key: Hashable) -> Any:
    """The plan that agree_on_plan returned for this key, or None."""
    return _CACHED.setdefault(peers, {}).get(key)


def agree_on_plan(peers: tuple[Peers, ...], key: Hashable, plan: Callable[[], tuple[str, T]], device: Any) -> T:
    """The result of `plan` for this key, from the cache or after all ranks have agreed. plan() returns a description of what
    must be equal on all ranks, and the result. key: None for a call that is too wrong to have one. device: that of the call's
    tensors, or None without tensors.

    ValueError on every rank: the descriptions differ. If plan() raises on one rank, that rank raises the error, and all others
    raise one with the same message. If some ranks have the key cached and others do not, they wait for each other until torch's
    timeout; TILES_CHECK=1 caches nothing."""
    cached = _CACHED.setdefault(peers, {})
    if key is not None and (cached_result := cached.get(key)) is not None:
        return cached_result
    error, plan_result, description = None, None, ""
    try:
        description, plan_result = plan()
    except Exception as refused:  # any error, because the other ranks are waiting
        error, description = refused, f"{REFUSAL_PREFIX}{type(refused).__name__}: {refused}"
    descriptions = [description]
    if any([one.world > 1 for one in peers]):
        digest, all_equal = hashlib.sha256(description.encode()).digest(), True
        for one in reversed(peers):  # along a row of the mesh, then along its column
            digests = one.all_gather_bytes(digest, one.device if device is None else device)
            all_equal &= len(set(digests)) == 1
            digest = hashlib.sha256(b"".join(digests)).digest()
        if not all_equal:
            for one in reversed(peers):
                descriptions = [part for parts in one.all_gather_text("\0".join(descriptions)) for part in parts.split("\0")]
    if error is not None:
        raise error
    for rank, text in enumerate(descriptions):
        if text.startswith(REFUSAL_PREFIX):
            name, _, message = text.removeprefix(REFUSAL_PREFIX).partition(": ")
            raise ERRORS.get(name, RuntimeError)(f"group: its rank {rank} refuses this call: {message}")
    if len(set(descriptions)) > 1:
        raise ValueError("group: its ranks make different calls:\n" + describe_differences(descriptions))
    if len(cached) >= MAX_SIGNATURES:
        cached.clear()
    if not check_options().values:
        cached[key] = plan_result
    return plan_result  # type: ignore[return-value]


def describe_differences(descriptions: Sequence[str]) -> str:
    """The parts of ranks' descriptions that differ, one line for all ranks that say the same."""
    parts = [{re.split("[:=]", part)[0]: part for part in one.split("; ")} for one in descriptions]
    all_names = dict.fromkeys([name for one in parts for name in one])
    names = [name for name in all_names if len({one.get(name) for one in parts}) > 1]
    lines: dict[str, list[str]] = {}
    for rank, one in enumerate(parts):
        lines.setdefault("; ".join([one.get(name, f"no {name}") for name in names]), []).append(str(rank))
    return "\n".join([f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {line}" for line, ranks in lines.items()])


def cache_key(x: Any) -> Hashable:
    """A cache key for an option's value, equal for values that make the same call: an array's shape and dtype, a function's
    code."""
    if x is None or type(x) in PLAIN_TYPES:
        return x
    if hasattr(x, "shape"):
        return x.shape, x.dtype
    if isinstance(x, (tuple, list)):
        return tuple(map(cache_key, x))
    if inspect.isfunction(x):
        return register_function("mask", x)
    if hasattr(x, "kv_num_blocks"):
        return str(x.BLOCK_SIZE), *[cache_key(getattr(x, name)) for name in FIELDS]
    return x if x.__hash__ is not None else id(x)


def describe_value(name: str, x: Any) -> str:
    """An option's value in words, as far as ranks must agree on it."""
    if isinstance(x, (tuple, list)):
        return f"({', '.join([describe_value('', y) for y in x])})"
    if inspect.isfunction(x):
        return f"{register_function('mask', x)}".partition(" of call ")[0]  # the call number, which differs between ranks
    if hasattr(x, "kv_num_blocks"):
        return f"{cache_key(x)}"
    return f"{tuple(x.shape)} of {x.dtype}" if hasattr(x, "shape") else f"{x!r}"
