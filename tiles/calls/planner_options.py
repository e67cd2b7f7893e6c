"""The options of a planner. A Program takes them flat, one after the other; a planner may take some of them as a group, a
NamedTuple, whose fields stand in its place:

    class Window(NamedTuple):
        left: int | None
        right: int | None

    def planner(problem, causal: bool, window: Window) -> Plan: ...

    option_types(planner)                             {"causal": bool, "left": int | None, "right": int | None}
    planner(problem, *group_options(planner)(options))   of options == (causal, left, right)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from inspect import get_annotations, signature
from typing import Any


def _parameters(planner: Callable) -> dict[str, Any]:
    """{name: annotation} of a planner's parameters besides the problem."""
    kinds = get_annotations(planner, eval_str=True)
    _, *names = signature(planner).parameters
    return {name: kinds.get(name) for name in names}


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def option_types(planner: Callable) -> dict[str, Any]:
    """{name: annotation} of a planner's options, groups flattened. TypeError: two of them have the same name."""
    types: dict[str, Any] = {}
    for name, kind in _parameters(planner).items():
        fields = get_annotations(kind, eval_str=True) if _is_group(kind) else {name: kind}
        if repeated := types.keys() & fields.keys():
            raise TypeError(f"{planner.__qualname__} has two options of the name {min(repeated)}")
        types |= fields
    return types


@functools.lru_cache(256)
def group_options(planner: Callable) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function from flat options to the planner's arguments, with its groups."""
    kinds = list(_parameters(planner).values())
    if not any(map(_is_group, kinds)):
        return lambda options: options

    def group(options: Sequence[Any]) -> list[Any]:
        rest = iter(options)
        return [kind(*itertools.islice(rest, len(kind._fields))) if _is_group(kind) else next(rest) for kind in kinds]

    return group
