"""From the options of a call to the variant that kernels are compiled for."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiles.launching.arrays import Number, Operand

from ...options import ScoreOptions
from ...parts.score_mods import BUILTIN_SCORE_MODS
from ...parts.scores import Alibi, ScoreBias, ScoreMod, ScoreModAlibi, Sink
from ...parts.variant import CombinedVariant, Variant
from ...parts.visibility import CAUSAL, FULL, MaskMod, WindowLeft, WindowRight
from .prepared_lists import BlockListPlan

NO_OPTIONS = ScoreOptions()


class VariantSpec(NamedTuple):
    """A variant of attention with its numbers. numbers: {argument of the kernel: number}. unit: of its scores: weights are
    exp(unit s). reach: the most keys that a query sees, infinite without a window. before: the part of the variant that
    changes scores before a score function does. aux: the arrays that its functions in Python read. listing: how lists of key
    blocks are written, None if none are needed."""

    variant: Variant
    numbers: dict[str, float | Number]
    unit: float
    reach: float
    before: Variant = FULL
    aux: Sequence[Operand] = ()
    listing: BlockListPlan | None = None

    @property
    def axes(self) -> tuple[int, ...]:
        """How many axes each array of aux has."""
        return tuple([len(x.form.shape) for x in self.aux])

    @property
    def lists_vary(self) -> tuple[bool, bool]:
        """(do lists of key blocks differ by batch? by head?)"""
        return self.listing.varies if self.listing else (False, False)

    @property
    def aux_args(self) -> dict[str, Operand]:
        """{argument of the kernel: array} of aux."""
        return {f"aux{n}": x for n, x in enumerate(self.aux)}


def build_variant(
    scale: float,
    options: ScoreOptions = NO_OPTIONS,
    *,
    alibi: bool = False,
    bias: ScoreBias | None = None,
    sink: bool = False,
    mask: Callable | None = None,
    score: ScoreMod | ScoreModAlibi | None = None,
    extra_parts: Sequence[tuple[Variant, dict[str, float | Number]]] = (),
) -> VariantSpec:
    """The variant for these options and for `extra_parts`, with their numbers. alibi, sink: are there any? bias: the variant
    that reads it. mask, score: the functions that options names, and the variant of the latter. Built-in functions of a score
    come first, then ALiBi, bias, and the score function; masked scores stay masked."""
    left, right, unit = options.left, options.right, scale
    parts = [part for part, _ in extra_parts]
    numbers = {name: x for _, part_numbers in extra_parts for name, x in part_numbers.items()}
    signed_distance = options.causal or right == 0
    if signed_distance:
        parts.append(CAUSAL)
    elif right is not None:
        parts.append(WindowRight())
        numbers["right"] = right
    if left is not None:
        parts.append(WindowLeft())
        numbers["left"] = left
    if mask is not None:
        parts.append(MaskMod(mask))
    for mod in BUILTIN_SCORE_MODS:
        if (value := getattr(options, mod.option)) is not None:
            parts.append(mod)
            added, unit = mod.bind_unit(unit, value)
            numbers = _merge(numbers, added)
    if alibi:
        parts.append(Alibi(signed_distance, is_last=signed_distance and score is None and not (bias and bias.in_units_of_one)))
        numbers["per_slope"] = 1 / unit
    if bias is not None:
        parts.append(bias)
        added, unit = bias.bind_unit(unit)
        numbers = _merge(numbers, added)
    before = _chain(parts)
    if score is not None:
        parts.append(score)
        added, unit = score.bind_unit(unit)
        numbers = _merge(numbers, added)
    if sink:
        parts.append(Sink())
        numbers["per_sink"] = 1 / unit
    end = 0 if signed_distance else right
    return VariantSpec(_chain(parts), numbers, unit, math.inf if left is None or end is None else left + end + 1, before)


def _merge(numbers: dict[str, float | Number], added: dict[str, float]) -> dict[str, float | Number]:
    """The numbers of several parts of a variant. Their names must differ, because each part has a unit of its own."""
    assert numbers.keys().isdisjoint(added), f"two parts of a variant read {sorted(numbers.keys() & added.keys())}"
    return numbers | added


def _chain(parts: Sequence[Variant]) -> Variant:
    """The variant that applies these parts one after the other."""
    return functools.reduce(CombinedVariant, parts) if parts else FULL
