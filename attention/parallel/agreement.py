"""Do all ranks ask for the same? One small all-gather of a digest says so, when a form of call comes for the first time, before
anything else travels; then it is remembered. What one rank may not ask for is an error on every rank."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from tiles.checks import ENDS, Check, asked
from tiles.frameworks import describe

from ..softmax.block_masks import FIELDS
from ..softmax.python_functions import named
from .peers import Peers, of_torch

T = TypeVar("T")
FORMS = 1024  # that are remembered
REFUSED = TypeError, ValueError, NotImplementedError
PLAIN = frozenset([bool, int, float, str])
_KNOWN: dict[Hashable, Any] = {}


def remembered(key: Hashable) -> Any:
    """What `agreed` gave for this form, or None."""
    return _KNOWN.get(key)


def agreed(peers: Sequence[Peers], key: Hashable, plan: Callable[[], tuple[str, T]], device: Any) -> T:
    """What `plan` makes of a call of this form, remembered; it also says what all ranks must have in common.

    ValueError on every rank: they say different things. If a rank's plan raises, it raises that, and so do the others, who then
    know why. Ranks of which some remember the form and others do not wait for each other until torch's timeout; with
    TILES_CHECK=1 nothing is remembered."""
    found = _KNOWN.get(key)
    if found is not None:
        return found
    error, made, said = None, None, ""
    try:
        said, made = plan()
    except REFUSED as refused:
        error, said = refused, f"{type(refused).__name__}: {refused}"
    every = [said]
    if any([one.world > 1 for one in peers]):
        digest, same = hashlib.sha256(said.encode()).digest(), True
        for one in reversed(peers):  # along a row of a mesh, and then along its column
            found = one.gathered(digest, device)
            same &= len(set(found)) == 1
            digest = hashlib.sha256(b"".join(found)).digest()
        if not same:
            for one in reversed(peers):
                every = [part for parts in one.told("\0".join(every)) for part in parts.split("\0")]
    if error is not None:
        raise error
    if len(set(every)) > 1:
        raise ValueError("group: its ranks ask for different things:\n" + differences(every))
    if len(_KNOWN) >= FORMS:
        _KNOWN.clear()
    if not asked().values:
        _KNOWN[key] = made
    return made  # type: ignore[return-value]


def differences(said: Sequence[str]) -> str:
    """What each rank says, as far as it is not what all say."""
    parts = [one.split("; ") for one in said]
    shared = set(parts[0]).intersection(*parts[1:])
    return "\n".join([f"rank {rank}: {'; '.join([x for x in one if x not in shared])}" for rank, one in enumerate(parts)])


def form_of(x: Any) -> Hashable:
    """What decides a call of an option: of arrays what they are, not what they hold; of functions what they do."""
    if x is None or type(x) in PLAIN:
        return x
    if hasattr(x, "shape"):
        return x.shape, x.dtype
    if isinstance(x, (tuple, list)):
        return tuple(map(form_of, x))
    if inspect.isfunction(x):
        return named("mask", x)
    if hasattr(x, "kv_num_blocks"):
        return str(x.BLOCK_SIZE), *[form_of(getattr(x, name)) for name in FIELDS]
    return x if x.__hash__ is not None else id(x)


def words_of(name: str, x: Any) -> str:
    """The same in words, as far as ranks must have it in common."""
    if name == "bias":
        return f"{(*x.shape[:2], x.shape[2] > 1, x.shape[3])}"
    if isinstance(x, (tuple, list)):
        return f"({', '.join([words_of('', y) for y in x])})"
    if inspect.isfunction(x) or hasattr(x, "kv_num_blocks"):
        return f"{form_of(x)}"
    return f"{tuple(x.shape)} of {x.dtype}" if hasattr(x, "shape") else f"{x!r}"


def check_ends(ends: Any, total: int, planning: bool = False) -> None:
    """TypeError, ValueError: cu_seqlens is not what one GPU would take of the whole. Parts are clamped: no kernel would see it.
    In every call, as others may come than were planned with; those of a GPU are read when planning, where TILES_CHECK asks."""
    if ends is not None:
        of_torch(cu_seqlens=ends)
    if ends is None or (ends.is_cuda and not (planning and asked().values)):
        return
    array = describe(ends, "cu_seqlens")
    stream = 0 if array.device is None else array.kind.stream(ends, array.device)
    Check([("cu_seqlens", 0, array.form, ENDS)], {"S": total}).run(stream, [array.pointer])
