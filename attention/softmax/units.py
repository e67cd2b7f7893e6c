"""What fp8's numbers are to be multiplied by, as objects with the same methods: a number of each head, or of each block of rows
and head. eight_bits.py makes scores and outputs of them."""

from typing import Any

from numpy import float32, int32

from ops import exp2, row_max
from tiles import inlined, static
from tiles.arguments import array

from ..cache.narrowing import BLOCK

LEAST = 2.0**-100  # of the unit of scores


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
    def of_keys(self, told, key, unit):
        """The same with what the tile of keys from `key` on has of its own."""
        return unit

    @inlined
    def of_values(self, told, key):
        """The unit of such a tile's values, if it has one of its own."""
        return float32(1.0)

    @inlined
    def of_output(self, told, unit):
        """The unit of all values."""
        return self.of(told.v, told.batch, told.kv_head) * unit

    @inlined
    def weighed(self, s, below, lifted, seen, unit, scale, slack):
        """What has been seen with a tile's scores, but for their sum, and their weights. below: what is subtracted from a row's
        scores, or None; lifted: the same for higher weights. unit: the tile's, if it has one."""
        seen = seen.moved(s, below, scale, slack)
        return seen, seen.weights(s, lifted, scale)

    @inlined
    def summed(self, product, o, unit):
        """O and a tile's P V."""
        return product + o


@static
class OfBlocks(OfHeads):
    """Of each sequence, block of 128 rows, and head: of q (batch, block, head of keys, query head that shares it), of k (batch,
    block, head), and so of v, if `values` are to have them. A tile lies in one block. Maxima are in units of scores themselves:
    so a tile's unit multiplies its rows' maxima, and the scale of its exponents, but no score."""

    values: bool
    by_block = True

    def __str__(self):
        return f" by block{' of values, too' * self.values}"

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """See OfHeads."""
        return array(4), array(3), array(3 if self.values else 2)

    @inlined
    def block(self, row, gUnit):
        """The block of a row; of a tile behind the last one, which nobody sees, any will do."""
        return int32(min(row // BLOCK, gUnit.shape[1] - 1))

    @inlined
    def of_queries(self, told, row, head, unit):
        """See OfHeads."""
        if told.q.shape[0] > 0:
            block, member = self.block(row, told.q), head - told.kv_head * told.q.shape[3]
            unit = unit * told.q[told.batch, block, told.kv_head, member]
        return float32(unit)

    @inlined
    def of_keys(self, told, key, unit):
        """See OfHeads."""
        if told.k.shape[0] > 0:
            unit = unit * told.k[told.batch, self.block(key, told.k), told.kv_head]
        return max(float32(unit), float32(LEAST))

    @inlined
    def of_values(self, told, key):
        """See OfHeads."""
        if self.values:
            return float32(told.v[told.batch, self.block(key, told.v), told.kv_head])
        return float32(1.0)

    @inlined
    def of_output(self, told, unit):
        """See OfHeads."""
        if self.values:
            return float32(unit)
        return self.of(told.v, told.batch, told.kv_head) * unit

    @inlined
    def weighed(self, s, below, lifted, seen, unit, scale, slack):
        """See OfHeads."""
        top = row_max(s) * unit
        seen = seen.raised(top if below is None else top - below, scale, slack)
        return seen, exp2(s * (scale * unit) - (seen.m + lifted) * scale)

    @inlined
    def summed(self, product, o, unit):
        """See OfHeads."""
        if self.values:
            product = product * unit
        return product + o
