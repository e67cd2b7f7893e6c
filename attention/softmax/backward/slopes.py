"""The gradient of ALiBi's slopes, computed where dS is: asked for or not, two objects with the same methods.

A slope's gradient is the sum of dS times -|i + shift - j| over all scores of a head. Here that costs two instructions a score;
a kernel of its own, which computes scores once more, would take two fifths of the time of backward. A warp leaves one number
for each head that it has gone through, and elements.Total adds these rows of numbers, in a fixed order."""

from typing import Any

from numpy import int32

from ops import finish_sum, lane_moment, lane_sum, row_index, tile_sum, turned, zeros
from tiles import inlined, static
from tiles.arguments import array

from ..scores import Sloped, Sunk
from ..variants import Both, Variant
from ..visible_keys import Causal, Left
from .recomputed_scores import BiasRead, SlopeRead


@static
class NoSlopeGradient:
    """The gradient is not asked for."""

    def __str__(self):
        return ""

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    @inlined
    def begin(self, scores):
        """A warp's sum before the first tile of a head. scores: the type of its tiles, keys by queries."""
        return 0

    @inlined
    def add(self, sum, ds, at, key):
        """The sum, with dS of one more tile, queries by keys, added to it."""
        return sum

    @inlined
    def give(self, sum, given, at, row):
        """Store a warp's sum for a head that it has gone through, as the slope's element of this row."""


@static
class SlopeGradient(NoSlopeGradient):
    """The gradient is asked for. Sequences share their slopes, and no key is seen that comes after the query.

    given.found: (a warp of a block of keys of a batch, slope), zeros at first."""

    def __str__(self):
        return " dalibi"

    @property
    def given(self) -> dict[str, Any]:
        return {"found": array(2)}

    @inlined
    def begin(self, scores):
        return lane_sum(zeros(scores))

    @inlined
    def add(self, sum, ds, at, key):
        ds = turned(ds)
        distances = int32(at.row + at.shift - key) - row_index(ds.col_vec)  # of the first query from each key
        return sum + lane_moment(ds) + lane_sum(ds) * distances

    @inlined
    def give(self, sum, given, at, row):
        given.found[row, at.head] = -tile_sum(finish_sum(sum))


NO_SLOPE_GRADIENT = NoSlopeGradient()
SLOPE_GRADIENT = SlopeGradient()


SERVED = Causal, Left, Sloped, Sunk  # other parts of a variant need registers, and this would spill more


def choose_slope_gradient(variant: Variant, read: BiasRead) -> NoSlopeGradient:
    """Asked, if the main kernel can compute the gradient of this variant's slopes, which `read` reads; else Unasked."""
    parts = _parts(variant)
    positive = any(isinstance(x, Sloped) and x.by_rows for x in parts) and all(type(x) in SERVED for x in parts)
    return SLOPE_GRADIENT if positive and isinstance(read, SlopeRead) and not read.per_batch else NO_SLOPE_GRADIENT


def _parts(of: Variant) -> list[Variant]:
    """What a variant is made of."""
    return [*_parts(of.one), *_parts(of.other)] if isinstance(of, Both) else [of]
