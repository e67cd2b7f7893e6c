"""The descales of fp8 arrays, the numbers by which their elements are multiplied, as objects with the same methods: one for
each head, or one for each block of rows and head. forward_fp8_hopper.py computes scores and outputs with them."""

from typing import Any, NamedTuple

from numpy import float32, int32

from ops import columns, exp2, hstack, lane_sum, less, log2, maximum, row_max, where
from tiles import inlined, static
from tiles.launching.arguments import array

from .part import KernelPart

BLOCK = 128  # rows that share a descale if a head has several descales
LEAST = 2.0**-100  # the least descale of scores
LEAST_VALUE = 2.0**-60  # the least descale of a block of values; that of a block of zeros may be any number


@inlined
def at_least(descale, least):
    """A descale, raised to `least`. NaN stays NaN, so that it reaches the outputs; max would return `least`."""
    return where(less(descale, float32(least)), float32(least), descale)


@inlined
def ignore_without_keys(descale, arrays):
    """A descale of a sequence; 1 if the sequence has no keys in use, because its descales may be any numbers, or NaN. arrays:
    DescaleArrays of forward_fp8_hopper.py."""
    return where(arrays.seqlen_k > 0, descale, float32(1.0))


class TileDescales(NamedTuple):
    """The descales of scores and of values for a tile of keys. Each is a pair: for the tile's first block of rows, and for its
    second."""

    scores: Any
    values: Any


@static
class HeadDescales(KernelPart):
    """One descale for each sequence and key head, for q as well. A descale that is absent is 1."""

    by_block = False

    def for_blocks_of(self, kv: int) -> "HeadDescales":
        """These descales for a kernel whose key blocks have so many keys."""
        return self

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """The types of the kernel's parameters for the descales of q, k and v."""
        return array(2), array(2), array(2)

    @inlined
    def load(self, gDescale, arrays):
        """The descale for a head of a sequence. arrays: DescaleArrays of forward_fp8_hopper.py."""
        if gDescale.shape[0] > 0:
            return ignore_without_keys(float32(gDescale[arrays.batch, arrays.kv_head]), arrays)
        else:
            return float32(1.0)

    @inlined
    def load_queries(self, arrays, row, head, factor):
        """The descale of the scores of some queries, as far as it is the same for all keys. factor: a number for all."""
        return at_least(self.load(arrays.q, arrays) * self.load(arrays.k, arrays) * factor, LEAST)

    @inlined
    def load_tile(self, arrays, key, descale):
        """The TileDescales for the tile of keys from `key` on, with `descale` for its queries; None if there are none. Kernels
        load them a tile ahead."""
        return None

    @inlined
    def load_first_tile(self, arrays, key, descale):
        """`load_tile` for the first tile, which kernels compute even if no keys are in use."""
        return None

    @inlined
    def load_output(self, arrays, factor):
        """The number by which the output is multiplied: the descale of all values, times `factor`."""
        return self.load(arrays.v, arrays) * factor

    @inlined
    def scale_exponents(self, scale, descale, variant):
        """The scale of exponents, with the descale of all scores unless the scores themselves are multiplied by it."""
        if variant.needs_raw_scores:
            return scale
        else:
            return scale * descale

    @inlined
    def multiply(self, s, tile, descale, variant):
        """The scores of a tile, multiplied by their descales if the variant needs that."""
        if variant.needs_raw_scores:
            return s * descale
        else:
            return s

    @inlined
    def weigh(self, s, row_offset, state, tile, variant, consumer_tile):
        """(the softmax state with the maximum of a tile of scores that the variant has changed, their weights). The weights are
        not yet in the row sum: see `add`. row_offset: what is subtracted from all scores of a row, or None. If all scores of a
        row may be so low that their products with the scale are rounded to many powers of 2, differences from the row maximum
        are multiplied. consumer_tile: a forward_fp8_hopper.ConsumerTile."""
        scale, lifted_offset = consumer_tile.scale, consumer_tile.lift_offset(row_offset, variant)
        state = state.update_max(s, row_offset, scale, consumer_tile.slack)
        if variant.allows_low_scores:
            return state, exp2((s - state.raw_max(row_offset)) * scale + consumer_tile.lift * scale)
        else:
            return state, state.weights(s, lifted_offset, scale)

    @inlined
    def add(self, state, p, tile):
        """The softmax state with the tile's weights added to the row sum."""
        return state.add(p)


@static
class BlockDescales(HeadDescales):
    """A descale for each sequence, block of 128 rows, and head: of q (batch, block, key head, query head of its group), of k
    (batch, block, head) if `keys`, and of v likewise if `values`. A tile of keys has `blocks` blocks, two or (a part of) one.

    No score, weight or sum is multiplied by them. Row maxima are in units of the descaled scores: a block's descale multiplies
    its row maxima, and the scale of its exponents. The descale u of a block of values multiplies its weights instead, as a sum
    of exponents: u 2^x = 2^(x + log2 u). Row maxima are of these sums, so that the largest number that is rounded to e4m3 stays
    the same; and a block's part of the row sum is divided by u."""

    values: bool
    keys: bool = True
    blocks: int = 1
    by_block = True

    def __str__(self):
        return " by block" + " of values, too" * self.values + " but of keys" * (not self.keys)

    def for_blocks_of(self, kv: int) -> "BlockDescales":
        return BlockDescales(self.values, self.keys, 2 if kv > BLOCK else 1)

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        return array(4), array(3), array(3 if self.values else 2)

    @inlined
    def load_queries(self, arrays, row, head, factor):
        if arrays.q.shape[0] > 0:
            block, member = int32(min(row // BLOCK, arrays.q.shape[1] - 1)), head - arrays.kv_head * arrays.q.shape[3]
            factor = factor * ignore_without_keys(arrays.q[arrays.batch, block, arrays.kv_head, member], arrays)
        return float32(factor)

    @inlined
    def load_tile(self, arrays, key, descale):
        block = int32(max(0, key // BLOCK))
        scores = self.load_keys(arrays, block) * descale, self.load_keys(arrays, block + 1) * descale
        return TileDescales(scores, (self.load_values(arrays, block), self.load_values(arrays, block + 1)))

    @inlined
    def load_first_tile(self, arrays, key, descale):
        scores, values = self.load_tile(arrays, key, descale)
        scores = ignore_without_keys(scores[0], arrays), ignore_without_keys(scores[1], arrays)
        return TileDescales(scores, (ignore_without_keys(values[0], arrays), ignore_without_keys(values[1], arrays)))

    @inlined
    def load_block(self, gDescale, arrays, block):
        """The descale of a block, or of the last block with a key in use if this one is after it: blocks without keys may have
        any descales."""
        last = max(0, arrays.seqlen_k - 1) // BLOCK
        return float32(gDescale[arrays.batch, min(block, last), arrays.kv_head])

    @inlined
    def load_keys(self, arrays, block):
        """The descale of a block of K."""
        if self.keys:
            return self.load_block(arrays.k, arrays, block)
        else:
            return float32(1.0)

    @inlined
    def load_values(self, arrays, block):
        """The descale of a block of V."""
        if self.values:
            return self.load_block(arrays.v, arrays, block)
        else:
            return float32(1.0)

    @inlined
    def load_output(self, arrays, factor):
        if self.values:
            return float32(factor)
        else:
            return self.load(arrays.v, arrays) * factor

    @inlined
    def scale_exponents(self, scale, descale, variant):
        return scale

    @inlined
    def multiply(self, s, tile, descale, variant):
        if variant.needs_raw_scores:
            return s * at_least(tile.scores[0], LEAST)
        else:
            return s

    @inlined
    def exponent(self, value):
        """log2 of the descale of a block's values, which is added to the exponents of its weights."""
        if self.values:
            return log2(at_least(value, LEAST_VALUE))
        else:
            return float32(0.0)

    @inlined
    def max_scores(self, s, score, value, per_scale):
        """The row maxima of a block, with its descales. per_scale: the difference of scores that doubles a weight."""
        return row_max(s) * at_least(score, LEAST) + self.exponent(value) * per_scale

    @inlined
    def weights(self, s, m, score, value, scale):
        """The weights of a block, whose descales are score and value."""
        return exp2(s * (scale * at_least(score, LEAST)) - (m * scale - self.exponent(value)))

    @inlined
    def weigh(self, s, row_offset, state, tile, variant, consumer_tile):
        lifted_offset = consumer_tile.lift_offset(row_offset, variant)
        score = float32(1.0) if variant.needs_raw_scores else tile.scores[0]
        scale, per_scale = consumer_tile.scale, consumer_tile.per_scale()
        if self.blocks == 2:
            left, right = columns(s, BLOCK, 0), columns(s, BLOCK, 1)
            top = maximum(
                self.max_scores(left, score, tile.values[0], per_scale),
                self.max_scores(right, tile.scores[1], tile.values[1], per_scale),
            )
        else:
            top = self.max_scores(s, score, tile.values[0], per_scale)
        state = state.update_max_to(top if row_offset is None else top - row_offset, scale, consumer_tile.slack)
        m = state.m + lifted_offset
        if variant.allows_low_scores:  # only for functions in Python, for which a tile has one block
            lift = consumer_tile.lift * scale + self.exponent(tile.values[0])
            return state, exp2((s - state.raw_max(row_offset)) * scale + lift)
        elif self.blocks == 2:
            p = self.weights(left, m, score, tile.values[0], scale)
            return state, hstack(p, self.weights(right, m, tile.scores[1], tile.values[1], scale))
        else:
            return state, self.weights(s, m, score, tile.values[0], scale)

    @inlined
    def add(self, state, p, tile):
        if not self.values:
            return state.add(p)
        elif self.blocks == 2:
            l = lane_sum(columns(p, BLOCK, 0)) * exp2(-self.exponent(tile.values[0]))
            return state.add_sums(l + lane_sum(columns(p, BLOCK, 1)) * exp2(-self.exponent(tile.values[1])))
        else:
            return state.add_sums(lane_sum(p) * exp2(-self.exponent(tile.values[0])))
