"""Checks that all ranks make the same call: by one small all-gather of a digest, when a form of call comes for the first time
and before anything else is sent. The result is remembered. An error on one rank is raised on every rank."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from tiles.checks import asked

from ..softmax.block_masks import FIELDS
from ..softmax.python_functions import named
from .peers import Peers

T = TypeVar("T")
MAX_FORMS = 1024  # how many forms of calls are remembered of each group
REFUSAL_PREFIX = "refused: "  # how the words of a rank begin that does not make the call
ERRORS = {error.__name__: error for error in (TypeError, ValueError, NotImplementedError)}
PLAIN_TYPES = frozenset([bool, int, float, str])
_KNOWN: dict[Any, dict[Hashable, Any]] = {}  # by group, so that all its ranks forget at the same call


def cached_plan(peers: tuple[Peers, ...], form: Hashable) -> Any:
    """What `agreed` returned for this form, or None."""
    return _KNOWN.setdefault(peers, {}).get(form)


def agree_on_plan(peers: tuple[Peers, ...], form: Hashable, plan: Callable[[], tuple[str, T]], device: Any) -> T:
    """What `plan` makes of a call of this form, remembered; it also says what all ranks must have in common. form: None for a
    call that is so wrong that it has none. device: of the call's tensors, or None where these are none.

    ValueError on every rank: they say different things. If a rank's plan raises, it raises that, and so do the others, with
    the same words. Ranks of which some remember the form and others do not wait for each other until torch's timeout; with
    TILES_CHECK=1 nothing is remembered."""
    known = _KNOWN.setdefault(peers, {})
    if form is not None and (found := known.get(form)) is not None:
        return found
    error, made, said = None, None, ""
    try:
        said, made = plan()
    except Exception as refused:  # whatever it is: others wait
        error, said = refused, f"{REFUSAL_PREFIX}{type(refused).__name__}: {refused}"
    every = [said]
    if any([one.world > 1 for one in peers]):
        digest, same = hashlib.sha256(said.encode()).digest(), True
        for one in reversed(peers):  # along a row of a mesh, and then along its column
            found = one.all_gather_bytes(digest, one.device if device is None else device)
            same &= len(set(found)) == 1
            digest = hashlib.sha256(b"".join(found)).digest()
        if not same:
            for one in reversed(peers):
                every = [part for parts in one.all_gather_text("\0".join(every)) for part in parts.split("\0")]
    if error is not None:
        raise error
    for rank, its in enumerate(every):
        if its.startswith(REFUSAL_PREFIX):
            name, _, why = its.removeprefix(REFUSAL_PREFIX).partition(": ")
            raise ERRORS.get(name, RuntimeError)(f"group: its rank {rank} refuses this call: {why}")
    if len(set(every)) > 1:
        raise ValueError("group: its ranks ask for different things:\n" + describe_differences(every))
    if len(known) >= MAX_FORMS:
        known.clear()
    if not asked().values:
        known[form] = made
    return made  # type: ignore[return-value]


def describe_differences(said: Sequence[str]) -> str:
    """The parts of what ranks say in which they differ, a line for all that say the same."""
    parts = [{re.split("[:=]", part)[0]: part for part in one.split("; ")} for one in said]
    every = dict.fromkeys([name for one in parts for name in one])
    names = [name for name in every if len({one.get(name) for one in parts}) > 1]
    lines: dict[str, list[str]] = {}
    for rank, one in enumerate(parts):
        lines.setdefault("; ".join([one.get(name, f"no {name}") for name in names]), []).append(str(rank))
    return "\n".join([f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {line}" for line, ranks in lines.items()])


def form_key(x: Any) -> Hashable:
    """A key for an option's value, equal for values that make the same call: of an array its form, not its elements; of a
    function its code."""
    if x is None or type(x) in PLAIN_TYPES:
        return x
    if hasattr(x, "shape"):
        return x.shape, x.dtype
    if isinstance(x, (tuple, list)):
        return tuple(map(form_key, x))
    if inspect.isfunction(x):
        return named("mask", x)
    if hasattr(x, "kv_num_blocks"):
        return str(x.BLOCK_SIZE), *[form_key(getattr(x, name)) for name in FIELDS]
    return x if x.__hash__ is not None else id(x)


def describe_value(name: str, x: Any) -> str:
    """The same in words, as far as ranks must agree on it."""
    if isinstance(x, (tuple, list)):
        return f"({', '.join([describe_value('', y) for y in x])})"
    if inspect.isfunction(x):
        return f"{named('mask', x)}".partition(" of call ")[0]  # each rank counts its own calls of what may change
    if hasattr(x, "kv_num_blocks"):
        return f"{form_key(x)}"
    return f"{tuple(x.shape)} of {x.dtype}" if hasattr(x, "shape") else f"{x!r}"
