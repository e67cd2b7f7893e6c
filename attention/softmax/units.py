"""What fp8's numbers are to be multiplied by, as objects with the same methods: a number of each head, or of each block of rows
and head. eight_bits.py makes scores and outputs of them."""

from typing import Any, NamedTuple

from numpy import float32, int32

from ops import columns, exp2, hstack, lane_sum, log2, maximum, row_max
from tiles import inlined, static
from tiles.arguments import array

from ..cache.narrowing import BLOCK

LEAST = 2.0**-100  # of the unit of scores
LEAST_VALUE = 2.0**-60  # of that of a block's values


class OfTile(NamedTuple):
    """The units of a tile of keys: of the scores of its first block of rows and of its second one, and of their values."""

    first: Any
    second: Any
    value: Any
    later: Any


@static
class OfHeads:
    """Of each sequence and head of keys; q, too, has one of each head of keys. One that is absent is 1."""

    by_block = False

    def __str__(self):
        return ""

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """The kernel's parameters: of q, k and v."""
        return array(2), array(2), array(2)

    @inlined
    def of(self, gUnit, batch, head):
        """That of a sequence's head."""
        if gUnit.shape[0] > 0:
            return float32(gUnit[batch, head])
        else:
            return float32(1.0)

    @inlined
    def of_queries(self, told, row, head, unit):
        """The unit of some queries' scores, as far as it is the same for all keys. told: see eight_bits.Units."""
        scores = self.of(told.q, told.batch, told.kv_head) * self.of(told.k, told.batch, told.kv_head) * unit
        return max(scores, float32(LEAST))

    @inlined
    def of_tile(self, told, key, unit):
        """What the tile of keys from `key` on has of its own: an OfTile, or None. It is asked for a tile ahead."""
        return None

    @inlined
    def of_output(self, told, unit):
        """The unit of all values."""
        return self.of(told.v, told.batch, told.kv_head) * unit

    @inlined
    def measured(self, s, tile, unit):
        """A tile's scores, without units."""
        return s * unit

    @inlined
    def weighed(self, s, below, lifted, seen, tile, measured, scale, slack, per_scale):
        """What has been seen with a tile's scores, but for their sum, and their weights. below: what is subtracted from a row's
        scores, or None; lifted: the same for higher weights. measured: have scores no unit any more?"""
        seen = seen.moved(s, below, scale, slack)
        return seen, seen.weights(s, lifted, scale)

    @inlined
    def summed(self, seen, p, tile):
        """The same with the weights in their sum."""
        return seen.add(p)


@static
class OfBlocks(OfHeads):
    """Of each sequence, block of 128 rows, and head: of q (batch, block, head of keys, query head that shares it), of k (batch,
    block, head), and so of v, if `values` are to have them. A tile lies in one block. Maxima are in units of scores themselves:
    so a tile's unit multiplies its rows' maxima, and the scale of its exponents, but no score."""

    values: bool
    keys: bool = True
    each: int = 1
    by_block = True

    def __str__(self):
        return f" by block{' of values, too' * self.values}"

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """See OfHeads."""
        return array(4), array(3), array(3 if self.values else 2)

    @inlined
    def of_queries(self, told, row, head, unit):
        """See OfHeads."""
        if told.q.shape[0] > 0:
            block, member = int32(min(row // BLOCK, told.q.shape[1] - 1)), head - told.kv_head * told.q.shape[3]
            unit = unit * told.q[told.batch, block, told.kv_head, member]
        return float32(unit)

    @inlined
    def of_tile(self, told, key, unit):
        """See OfHeads."""
        first = int32(max(0, key // BLOCK))
        first, second = self.within(first, told), self.within(first + 1, told)
        keys = self.of_keys(told, first) * unit, self.of_keys(told, second) * unit
        return OfTile(keys[0], keys[1], self.of_values(told, first), self.of_values(told, second))

    @inlined
    def within(self, block, told):
        """A block that there is; of a tile behind the last one, which nobody sees, any will do."""
        if self.keys:
            return int32(min(block, told.k.shape[1] - 1))
        elif self.values:
            return int32(min(block, told.v.shape[1] - 1))
        else:
            return int32(0)

    @inlined
    def of_keys(self, told, block):
        """That of a block of K."""
        if self.keys:
            return float32(told.k[told.batch, block, told.kv_head])
        else:
            return float32(1.0)

    @inlined
    def of_values(self, told, block):
        """That of a block of V."""
        if self.values:
            return float32(told.v[told.batch, block, told.kv_head])
        else:
            return float32(1.0)

    @inlined
    def of_output(self, told, unit):
        """See OfHeads."""
        if self.values:
            return float32(unit)
        return self.of(told.v, told.batch, told.kv_head) * unit

    @inlined
    def measured(self, s, tile, unit):
        """See OfHeads."""
        return s * max(tile.first, float32(LEAST))

    @inlined
    def highest(self, s, unit, value, per_scale):
        """A block's greatest scores, as those of values in units."""
        if self.values:
            return row_max(s) * max(unit, float32(LEAST)) + log2(max(value, float32(LEAST_VALUE))) * per_scale
        else:
            return row_max(s) * max(unit, float32(LEAST))

    @inlined
    def exponents(self, s, m, unit, value, scale):
        """Of a block's weights."""
        if self.values:
            return s * (scale * max(unit, float32(LEAST))) - (m * scale - log2(max(value, float32(LEAST_VALUE))))
        else:
            return s * (scale * max(unit, float32(LEAST))) - m * scale

    @inlined
    def weighed(self, s, below, lifted, seen, tile, measured, scale, slack, per_scale):
        """See OfHeads."""
        first = float32(1.0) if measured else tile.first
        if self.each == 2:
            left, right = columns(s, BLOCK, 0), columns(s, BLOCK, 1)
            top = self.highest(left, first, tile.value, per_scale)
            top = maximum(top, self.highest(right, tile.second, tile.later, per_scale))
        else:
            top = self.highest(s, first, tile.value, per_scale)
        seen = seen.raised(top if below is None else top - below, scale, slack)
        m = seen.m + lifted
        if self.each == 2:
            p = exp2(self.exponents(left, m, first, tile.value, scale))
            return seen, hstack(p, exp2(self.exponents(right, m, tile.second, tile.later, scale)))
        else:
            return seen, exp2(self.exponents(s, m, first, tile.value, scale))

    @inlined
    def summed(self, seen, p, tile):
        """See OfHeads."""
        if self.values:
            per = exp2(-log2(max(tile.value, float32(LEAST_VALUE))))
            if self.each == 2:
                later = exp2(-log2(max(tile.later, float32(LEAST_VALUE))))
                return seen.plus(lane_sum(columns(p, BLOCK, 0)) * per + lane_sum(columns(p, BLOCK, 1)) * later)
            else:
                return seen.plus(lane_sum(p) * per)
        else:
            return seen.add(p)
