"""The descales of fp8 arrays, called units in kernels, as objects with the same methods: one for each head, or one for each
block of rows and head. hopper_fp8.py computes scores and outputs with them."""

from typing import Any, NamedTuple

from numpy import float32, int32

from ops import columns, exp2, hstack, lane_sum, log2, maximum, row_max
from tiles import inlined, static
from tiles.arguments import array

from ..cache.quantize_kernels import BLOCK

LEAST = 2.0**-100  # the least unit of scores
LEAST_VALUE = 2.0**-60  # the least unit of a block of values; that of a block of zeros may be anything


class OfTile(NamedTuple):
    """The units of a tile's scores and values. Each is a pair: for the tile's first block of rows, and for its second."""

    scores: Any
    values: Any


@static
class OfHeads:
    """One unit for each sequence and head of keys; the unit of q is for heads of keys as well. A unit that is absent is 1. A
    *unit* is what kernels call a descale, the number by which an array is multiplied."""

    by_block = False

    def __str__(self):
        return ""

    def of_tiles(self, kv: int) -> "OfHeads":
        """These units for a kernel whose tiles have so many keys."""
        return self

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """The types of the kernel's parameters for the units of q, k and v."""
        return array(2), array(2), array(2)

    @inlined
    def of(self, gUnit, batch, head):
        """The unit for a head of a sequence."""
        if gUnit.shape[0] > 0:
            return float32(gUnit[batch, head])
        else:
            return float32(1.0)

    @inlined
    def of_queries(self, told, row, head, unit):
        """The unit of the scores of some queries, so far as it is the same for all keys. told: see hopper_fp8.Units."""
        scores = self.of(told.q, told.batch, told.kv_head) * self.of(told.k, told.batch, told.kv_head) * unit
        return max(scores, float32(LEAST))

    @inlined
    def of_tile(self, told, key, unit):
        """The units that belong to the tile of keys from `key` on only: an OfTile, or None. They are loaded a tile ahead."""
        return None

    @inlined
    def of_output(self, told, unit):
        """The unit of all values, by which the output is multiplied."""
        return self.of(told.v, told.batch, told.kv_head) * unit

    @inlined
    def measured(self, s, tile, unit):
        """The scores of a tile, multiplied by their units."""
        return s * unit

    @inlined
    def weighed(self, s, below, lifted, state, tile, measured, of):
        """(`seen` with the scores of a tile, the weights). The weights are not yet in the sum: see `summed`. below: what is
        subtracted from a row's scores, or None. lifted: the same for weights that are multiplied by a power of 2. measured:
        are the scores multiplied by their unit already? of: a hopper_fp8.Tile."""
        state = state.update_max(s, below, of.scale, of.slack)
        return state, state.weights(s, lifted, of.scale)

    @inlined
    def summed(self, state, p, tile):
        """`seen` with the tile's weights added to their sum."""
        return state.add(p)


@static
class OfBlocks(OfHeads):
    """Of each sequence, block of 128 rows, and head: of q (batch, block, head of keys, query head that shares it), of k (batch,
    block, head), if `keys` are to have them, and so of v, if `values` are. A tile has `each` blocks, two or (a part of) one.

    No score, weight or sum is multiplied for them. Maxima are in units of scores themselves: a block's unit multiplies its
    rows' maxima, and the scale of its exponents. What values are to be multiplied by, their weights are instead, which is a sum
    of exponents: u 2^x = 2^(x + log2 u). Maxima are of these sums, so the greatest of what is rounded to e4m3 is as great as
    ever; and a block's part of the sum of weights is divided by u."""

    values: bool
    keys: bool = True
    each: int = 1
    by_block = True

    def __str__(self):
        return " by block" + " of values, too" * self.values + " but of keys" * (not self.keys)

    def of_tiles(self, kv: int) -> "OfBlocks":
        return OfBlocks(self.values, self.keys, 2 if kv > BLOCK else 1)

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        return array(4), array(3), array(3 if self.values else 2)

    @inlined
    def of_queries(self, told, row, head, unit):
        if told.q.shape[0] > 0:
            block, member = int32(min(row // BLOCK, told.q.shape[1] - 1)), head - told.kv_head * told.q.shape[3]
            unit = unit * told.q[told.batch, block, told.kv_head, member]
        return float32(unit)

    @inlined
    def of_tile(self, told, key, unit):
        block = int32(max(0, key // BLOCK))
        first, second = self.within(block, told), self.within(block + 1, told)
        scores = self.of_keys(told, first) * unit, self.of_keys(told, second) * unit
        return OfTile(scores, (self.of_values(told, first), self.of_values(told, second)))

    @inlined
    def within(self, block, told):
        """The number of a block that exists. A tile behind the last block may use any: nobody sees its keys."""
        if self.keys:
            return int32(min(block, told.k.shape[1] - 1))
        elif self.values:
            return int32(min(block, told.v.shape[1] - 1))
        else:
            return int32(0)

    @inlined
    def of_keys(self, told, block):
        """The unit of a block of K."""
        if self.keys:
            return float32(told.k[told.batch, block, told.kv_head])
        else:
            return float32(1.0)

    @inlined
    def of_values(self, told, block):
        """The unit of a block of V."""
        if self.values:
            return float32(told.v[told.batch, block, told.kv_head])
        else:
            return float32(1.0)

    @inlined
    def of_output(self, told, unit):
        if self.values:
            return float32(unit)
        else:
            return self.of(told.v, told.batch, told.kv_head) * unit

    @inlined
    def measured(self, s, tile, unit):
        return s * max(tile.scores[0], float32(LEAST))

    @inlined
    def exponent(self, value):
        """What is added to the exponents of the weights for the unit of a block's values."""
        if self.values:
            return log2(max(value, float32(LEAST_VALUE)))
        else:
            return float32(0.0)

    @inlined
    def highest(self, s, score, value, per_scale):
        """The greatest score of each row of a block, with its units. per_scale: one power of 2 of the weights, in scores."""
        return row_max(s) * max(score, float32(LEAST)) + self.exponent(value) * per_scale

    @inlined
    def weights(self, s, m, score, value, scale):
        """The weights of a block. score, value: its units."""
        return exp2(s * (scale * max(score, float32(LEAST))) - (m * scale - self.exponent(value)))

    @inlined
    def weighed(self, s, below, lifted, state, tile, measured, of):
        score, scale, per_scale = float32(1.0) if measured else tile.scores[0], of.scale, of.per_scale()
        if self.each == 2:
            left, right = columns(s, BLOCK, 0), columns(s, BLOCK, 1)
            top = maximum(
                self.highest(left, score, tile.values[0], per_scale),
                self.highest(right, tile.scores[1], tile.values[1], per_scale),
            )
        else:
            top = self.highest(s, score, tile.values[0], per_scale)
        state = state.update_max_to(top if below is None else top - below, scale, of.slack)
        m = state.m + lifted
        if self.each == 2:
            p = self.weights(left, m, score, tile.values[0], scale)
            return state, hstack(p, self.weights(right, m, tile.scores[1], tile.values[1], scale))
        else:
            return state, self.weights(s, m, score, tile.values[0], scale)

    @inlined
    def summed(self, state, p, tile):
        if not self.values:
            return state.add(p)
        elif self.each == 2:
            l = lane_sum(columns(p, BLOCK, 0)) * exp2(-self.exponent(tile.values[0]))
            return state.add_sums(l + lane_sum(columns(p, BLOCK, 1)) * exp2(-self.exponent(tile.values[1])))
        else:
            return state.add_sums(lane_sum(p) * exp2(-self.exponent(tile.values[0])))
