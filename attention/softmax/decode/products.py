"""The two products of attention, by what a cache holds, as objects with the same methods: as queries are, or fp8."""

from typing import Any

from numpy import float32, int32

from ops import abs, mma_AB, mma_AB_unzipped, mma_ABt, mma_ABt_unzipped, rescale, rezipped, tile_max, unzipped
from tiles import dtype, fp8e4m3, fp16, inlined, static
from tiles.arguments import array

LIFT, LEAST = 2.0**7, 2.0**-100  # of weights times descales, which then end at 2^15; of the greatest of these


@static
class Same:
    """Keys and values are of queries' dtype. wide: which that is."""

    wide: dtype

    def __str__(self):
        return str(self.wide)

    @property
    def held(self) -> dtype:
        """What the cache holds."""
        return self.wide

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {}

    @property
    def by_key(self) -> bool:
        """Has each key numbers of its own?"""
        return False

    @property
    def takes(self) -> dtype:
        """What the products take queries as."""
        return self.wide

    @inlined
    def queries(self, x):
        """What the products take of some columns of queries, in registers."""
        return self.wide(x)

    @inlined
    def units(self, sequence, head, given):
        """What numbers of keys, and of values, are multiplied by."""
        return 1.0, 1.0

    @inlined
    def numbers(self, keys, cache, sequence, head, key, end, given):
        """Likewise of each key from `key` on, where they differ: see caches.py."""
        return int32(0)

    @inlined
    def of_keys(self, unit, numbers):
        """What keys are multiplied by: their unit, or numbers."""
        return unit

    @inlined
    def unit(self):
        """The unit of a warp's O, to begin with, where it has one."""
        return int32(0)

    @inlined
    def scores(self, s, queries, keys, unit, numbers):
        """s, which is 0, + Q K^T."""
        return mma_ABt(s, queries, keys)

    @inlined
    def rescaled(self, seen, unit, numbers):
        """(what the next keys' P V is added to, and its unit from then on); `numbers` are these keys'."""
        return seen.rescaled(), unit

    @inlined
    def weigh(self, o, p, values, unit, numbers):
        """O + P V, with O's columns in an order of its own."""
        return mma_AB(o, self.wide(p), values)

    @inlined
    def weight(self, weight, unit):
        """What a warp's O is multiplied by, before it is added to others': its rows' weight, and its unit if it is its own."""
        return weight

    @inlined
    def columns(self, o, unit):
        """Some columns of O, each where it belongs."""
        return o


@static
class Narrow(Same):
    """Keys and values are of fp8, and become fp16 on the way to the products, exactly; queries are rounded to it. scaled: are
    they multiplied by given.k_descale[n, head] and given.v_descale[n, head] of sequence n?"""

    scaled: bool = False

    def __str__(self):
        return f"{self.wide} of {fp8e4m3}" + " scaled" * self.scaled

    @property
    def held(self) -> dtype:
        """See Same."""
        return fp8e4m3

    @property
    def given(self) -> dict[str, Any]:
        """See Same."""
        return {"k_descale": array(2), "v_descale": array(2)} if self.scaled else {}

    @property
    def takes(self) -> dtype:
        """See Same."""
        return fp16

    @inlined
    def queries(self, x):
        """See Same: their columns unzipped."""
        return unzipped(fp16(x))

    @inlined
    def units(self, sequence, head, given):
        """See Same."""
        if self.scaled:
            return given.k_descale[sequence, head], given.v_descale[sequence, head]
        return 1.0, 1.0

    @inlined
    def scores(self, s, queries, keys, unit, numbers):
        """See Same."""
        s = mma_ABt_unzipped(s, queries, keys)
        if self.scaled:
            s = s * unit
        return s

    @inlined
    def weigh(self, o, p, values, unit, numbers):
        """See Same."""
        return mma_AB_unzipped(o, fp16(p), values)

    @inlined
    def columns(self, o, unit):
        """See Same."""
        o = rezipped(o)
        if self.scaled:
            o = o * unit
        return o


@static
class NarrowByKey(Narrow):
    """The same where each key and head has numbers of its own: its scores are multiplied by given.k_descale, its weights by
    given.v_descale, which lie as the cache does. Weights become fp16 then, which begins at 2^-24: so O's unit is the greatest
    number of values that a warp has met, by which the others are divided, and 2^-LIFT."""

    def __str__(self):
        return f"{self.wide} of {fp8e4m3} scaled by key"

    @property
    def given(self) -> dict[str, Any]:
        """See Same."""
        return {"k_descale": array(3), "v_descale": array(3)}

    @property
    def by_key(self) -> bool:
        """See Same."""
        return True

    @inlined
    def units(self, sequence, head, given):
        """See Same."""
        return 1.0, 1.0

    @inlined
    def unit(self):
        """See Same."""
        return float32(LEAST)

    @inlined
    def numbers(self, keys, cache, sequence, head, key, end, given):
        """See Same: of keys, and of values."""
        of_keys = cache.numbers(keys, given.k_descale, (head,), sequence, key, end, given)
        return of_keys, cache.numbers(keys, given.v_descale, (head,), sequence, key, end, given)

    @inlined
    def of_keys(self, unit, numbers):
        """See Same."""
        return numbers[0]

    @inlined
    def scores(self, s, queries, keys, unit, numbers):
        """See Same."""
        return mma_ABt_unzipped(s, queries, keys) * numbers[0]

    @inlined
    def rescaled(self, seen, unit, numbers):
        """See Same."""
        greatest = max(unit, tile_max(abs(numbers[1])))
        less = unit / greatest if greatest > unit else float32(1.0)
        return rescale(seen.o, seen.lag * less), greatest

    @inlined
    def weigh(self, o, p, values, unit, numbers):
        """See Same."""
        return mma_AB_unzipped(o, fp16(p * (numbers[1] * (float32(LIFT) / unit))), values)

    @inlined
    def weight(self, weight, unit):
        """See Same."""
        return weight * (unit / float32(LIFT))

    @inlined
    def columns(self, o, unit):
        """See Same."""
        return rezipped(o)
