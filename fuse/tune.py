"""Which candidate is fastest on a card: measured once, and remembered on disk.

    norm_linear.tune(x, g, w)           or   python -m fuse tune file.py:norm_linear --shapes 16x4096 4096 4096x6144

The roofline's best few run on the arrays that are given; each is timed with its inputs in memory, not in L2. What is remembered
belongs to the texts of these candidates and to the card's name: other rows that give the same kernels find it, too. Until a
function is tuned the roofline decides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from tiles import cache
from tiles.device import device
from tiles.frameworks import describe
from tiles.profile.card import median_together

from . import module
from .candidates import Candidate, Chosen

FEW, REPEAT = 6, 11  # candidates that are measured, calls of each


def key(texts: Sequence[str], card: str) -> str:
    """The key under which a choice between these modules on this card is remembered."""
    return "fuse" + hashlib.sha256("\0".join([card, *texts]).encode()).hexdigest()[:60]


def measure(name: str, made: Sequence[Chosen], arrays: Sequence[Any], say: Callable[[str], None]) -> list[float]:
    """The seconds that each of these modules takes on these arrays, which lie on a card."""
    first = describe(next(x for x in arrays if hasattr(x, "shape")), "x")
    gpu, found = device(first.device), []
    for n, one in enumerate(made):
        say(f"{name}: candidate {n + 1} of {len(made)}")
        make = [first.kind.maker(first.kind.home(first), x.extents, x.held_as(first.dtype))() for x in one.written]
        launch = module.load(one.text, name).launch
        found.append(median_together(lambda launch=launch, make=make: launch(*arrays, *make), gpu, REPEAT))
    return found


def remembered(made: Sequence[Chosen], card: str) -> list[float] | None:
    """The seconds that `remember` kept for these modules on this card; None if it kept nothing."""
    found = cache.recall(key([one.text for one in made], card))
    return found["seconds"] if found else None


def remember(made: Sequence[Chosen], card: str, seconds: Sequence[float]) -> None:
    """Keep the measured seconds of these modules on disk."""
    cache.remember(key([one.text for one in made], card), {"seconds": list(seconds)})


def ranked(candidates: Sequence[Candidate], seconds: Sequence[float]) -> list[Candidate]:
    """The candidates, the measured ones first, the fastest first, with their seconds. seconds: of the first candidates."""
    measured = [one._replace(measured=time) for one, time in zip(candidates, seconds)]
    return [*sorted(measured, key=lambda one: one.measured or 0.0), *candidates[len(measured) :]]
