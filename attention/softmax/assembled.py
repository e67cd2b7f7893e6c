"""From a call's options to the variant that they ask for."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiles.arrays import Number

from .scores import Biased, Capped, Scored, Sloped, SlopedBy, Sunk
from .variants import Both, Variant
from .visible_keys import CAUSAL, FULL, Left, Masked, Right


class VariantSpec(NamedTuple):
    """A variant of attention, ready for a kernel. numbers: {parameter of the kernel: number}. unit: of its scores, so that
    weights are exp(unit s). reach: the most keys that a query sees, infinite if no window limits them. before: the part of the
    variant that changes scores before a function in Python does."""

    variant: Variant
    numbers: dict[str, float | Number]
    unit: float
    reach: float
    before: Variant = FULL


def build_variant(
    scale: float,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float | None = None,
    alibi: bool = False,
    bias: Biased | None = None,
    sink: bool = False,
    mask: Callable | None = None,
    score: Scored | SlopedBy | None = None,
    more: Sequence[tuple[Variant, dict[str, float | Number]]] = (),
) -> VariantSpec:
    """The variant for these options and for `more`, with their numbers. alibi and sink: whether there is one. bias: how it is
    read. Scores are capped, then get slopes and bias, then go through a function; what is masked stays masked."""
    (left, right), unit = window, scale
    parts = [part for part, _ in more]
    numbers = {name: x for _, its in more for name, x in its.items()}
    ordered = causal or right == 0
    if ordered:
        parts.append(CAUSAL)
    elif right is not None:
        parts.append(Right())
        numbers["right"] = right
    if left is not None:
        parts.append(Left())
        numbers["left"] = left
    if mask is not None:
        parts.append(Masked(mask))
    if softcap is not None:
        parts.append(Capped())
        numbers["per_cap"], unit = unit / softcap, softcap
    if alibi:
        parts.append(Sloped(ordered, last=score is None and not (bias and bias.in_units_of_one)))
        numbers["per_slope"] = 1 / unit
    if bias is not None:
        parts.append(bias)
        its, unit = bias.bind_unit(unit)
        numbers = _and(numbers, its)
    before = _all_of(parts)
    if score is not None:
        parts.append(score)
        its, unit = score.bind_unit(unit)
        numbers = _and(numbers, its)
    if sink:
        parts.append(Sunk())
        numbers["per_sink"] = 1 / unit
    end = 0 if ordered else right
    return VariantSpec(_all_of(parts), numbers, unit, math.inf if left is None or end is None else left + end + 1, before)


def _and(numbers: dict[str, float | Number], its: dict[str, float]) -> dict[str, float | Number]:
    """The numbers of two parts of a variant, whose parameters have different names: each counts in a unit of its own."""
    assert numbers.keys().isdisjoint(its), f"two parts of a variant read {sorted(numbers.keys() & its.keys())}"
    return numbers | its


def _all_of(parts: Sequence[Variant]) -> Variant:
    """The variant that applies these one after the other."""
    return functools.reduce(Both, parts) if parts else FULL
