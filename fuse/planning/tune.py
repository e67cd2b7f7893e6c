"""Tuning: the candidates are measured on the GPU once, and their times are remembered on disk.

    norm_linear.tune(x, g, w)           or   python -m fuse tune file.py:norm_linear --shapes 16x4096 4096 4096x6144

The roofline's best few run on the arrays that are passed; each is timed with its inputs in memory, not in L2. Times are
remembered for these candidates, for the representatives of a class of lengths (length_classes.py) and for the GPU's name, so
they hold for other rows of the class, too. Until a function is tuned the roofline decides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiles.compiling import cache
from tiles.launching.devices import device
from tiles.launching.frameworks import describe
from tiles.profile.card import median_total

from ..language.axes import Axis
from ..language.graph import extents_at
from ..language.trace import TracedDefinition
from ..writing import module_text
from .candidates import Candidate
from .generated_module import GeneratedModule

MAX_MEASURED, REPEAT = 6, 11  # candidates that are measured, calls of each


def key(name: str, traced: TracedDefinition, candidates: Sequence[Candidate], card: str) -> str:
    """The key under which times of these candidates on this card are remembered. name: of the function. traced: its terms, for
    the representatives of a class of lengths."""
    arrays = [(name, x.extents, x.attr) for name, x in traced.inputs]
    parts = [card, name, repr(arrays), *(repr(one.identity) for one in candidates)]
    return "fuse" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:60]


def measure(
    name: str, modules: Sequence[GeneratedModule], known: Mapping[Axis, int], arrays: Sequence[Any], say: Callable[[str], None]
) -> list[float]:
    """The time in seconds of each of these modules on these arrays, which lie on a GPU. known: the extents of their axes. say:
    gets a text on progress."""
    first = describe(next(x for x in arrays if hasattr(x, "shape")), "x")
    gpu, placement, seconds = device(first.device), first.kind.placement(first), []
    for n, one in enumerate(modules):
        say(f"{name}: candidate {n + 1} of {len(modules)}")
        results = [first.kind.allocator(placement, extents_at(x, known), x.stored_dtype(first.dtype))() for x in one.written]
        launch = module_text.load(one.text, name, one.code).launch
        seconds.append(median_total(lambda launch=launch, results=results: launch(*arrays, *results), gpu, REPEAT))
    return seconds


def recall_seconds(key: str) -> list[float] | None:
    """The times that `remember` stored under this key; None if there are none."""
    entry = cache.recall(key)
    return entry["seconds"] if entry else None


def remember(key: str, seconds: Sequence[float]) -> None:
    """Store the measured times of candidates on disk."""
    cache.remember(key, {"seconds": list(seconds)})


def rank(candidates: Sequence[Candidate], seconds: Sequence[float]) -> list[Candidate]:
    """The candidates, measured ones first and among them the fastest first, with their times. seconds: of the first
    candidates."""
    measured = [one._replace(measured=time) for one, time in zip(candidates, seconds)]
    return [*sorted(measured, key=lambda one: one.measured or 0.0), *candidates[len(measured) :]]
