"""Which candidate is fastest on a card: measured once, and remembered on disk.

    norm_linear.tune(x, g, w)           or   python -m fuse tune file.py:norm_linear --shapes 16x4096 4096 4096x6144

The roofline's best few run on the arrays that are given; each is timed with its inputs in memory, not in L2. What is remembered
belongs to these candidates, to the lengths that stand for a class (classes.py), and to the card's name: other rows of the class
find it, too. Until a function is tuned the roofline decides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiles import cache
from tiles.device import device
from tiles.frameworks import describe
from tiles.profile.card import median_together

from . import module
from .axes import Axis
from .candidates import Candidate, GeneratedModule
from .classes import extents_at
from .trace import TracedDefinition

FEW, REPEAT = 6, 11  # candidates that are measured, calls of each


def key(name: str, found: TracedDefinition, every: Sequence[Candidate], card: str) -> str:
    """The key under which a choice between these candidates on this card is remembered. name: of the function. found: its
    terms, for the lengths that stand for a class (classes.py)."""
    arrays = [(name, x.extents, x.attr) for name, x in found.inputs]
    said = [card, name, repr(arrays), *(repr(one.identity) for one in every)]
    return "fuse" + hashlib.sha256("\0".join(said).encode()).hexdigest()[:60]


def measure(
    name: str, made: Sequence[GeneratedModule], known: Mapping[Axis, int], arrays: Sequence[Any], say: Callable[[str], None]
) -> list[float]:
    """The seconds that each of these modules takes on these arrays, which lie on a card. known: the extents of their axes."""
    first = describe(next(x for x in arrays if hasattr(x, "shape")), "x")
    gpu, home, found = device(first.device), first.kind.home(first), []
    for n, one in enumerate(made):
        say(f"{name}: candidate {n + 1} of {len(made)}")
        make = [first.kind.maker(home, extents_at(x, known), x.stored_dtype(first.dtype))() for x in one.written]
        launch = module.load(one.text, name, one.code).launch
        found.append(median_together(lambda launch=launch, make=make: launch(*arrays, *make), gpu, REPEAT))
    return found


def remembered(key: str) -> list[float] | None:
    """The seconds that `remember` kept under this key; None if it kept nothing."""
    found = cache.recall(key)
    return found["seconds"] if found else None


def remember(key: str, seconds: Sequence[float]) -> None:
    """Keep the measured seconds of candidates on disk."""
    cache.remember(key, {"seconds": list(seconds)})


def ranked(candidates: Sequence[Candidate], seconds: Sequence[float]) -> list[Candidate]:
    """The candidates, the measured ones first, the fastest first, with their seconds. seconds: of the first candidates."""
    measured = [one._replace(measured=time) for one, time in zip(candidates, seconds)]
    return [*sorted(measured, key=lambda one: one.measured or 0.0), *candidates[len(measured) :]]
