"""The two products of attention, by what a cache holds, as objects with the same methods: as queries are, or fp8."""

from typing import Any

from numpy import float32, int32

from ops import abs, load, mma_AB, mma_AB_unzipped, mma_ABt, mma_ABt_unzipped, rescale, rezipped, tile_max, unzipped
from tiles import dtype, fp8e4m3, fp16, fp32, inlined, pipeline, static, sv
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

    def pipes(self, kv: int, stages: int, warps: int) -> dict[str, pipeline]:
        """What brings these, of tiles of so many keys."""
        return {}

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
    def look(self, pipes, cache, sequence, key, end, given):
        """Where numbers of keys lie, of a tile from `key` on: see caches.py."""
        return int32(0)

    @inlined
    def fill_keys(self, pipes, j, cache, found, sequence, key, head, end, n, given):
        """Start copying the numbers of tile j's keys, which lie where they were found, one group of copies ahead of K's."""

    @inlined
    def fill_values(self, pipes, j, cache, found, sequence, key, head, end, n, given):
        """The same of its values, ahead of V's."""

    @inlined
    def of_keys(self, unit, pipes, j, newer, like):
        """What keys are multiplied by: their unit, or numbers of each, as a vector of the type `like`, once all but `newer`
        groups of copies are here."""
        return unit

    @inlined
    def of_values(self, unit, pipes, j, newer, like):
        """The same of values."""
        return unit

    @inlined
    def unit(self):
        """The unit of a warp's O, to begin with, where it has one."""
        return int32(0)

    @inlined
    def scores(self, s, queries, keys, of_keys):
        """s, which is 0, + Q K^T."""
        return mma_ABt(s, queries, keys)

    @inlined
    def rescaled(self, seen, unit, of_values):
        """(what the next keys' P V is added to, and its unit from then on)"""
        return seen.rescaled(), unit

    @inlined
    def weigh(self, o, p, values, unit, of_values):
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
        return fp8e4m3

    @property
    def given(self) -> dict[str, Any]:
        return {"k_descale": array(2), "v_descale": array(2)} if self.scaled else {}

    @property
    def takes(self) -> dtype:
        return fp16

    @inlined
    def queries(self, x):
        """See Same: their columns unzipped."""
        return unzipped(fp16(x))

    @inlined
    def units(self, sequence, head, given):
        if self.scaled:
            return given.k_descale[sequence, head], given.v_descale[sequence, head]
        return 1.0, 1.0

    @inlined
    def scores(self, s, queries, keys, of_keys):
        s = mma_ABt_unzipped(s, queries, keys)
        if self.scaled:
            s = s * of_keys
        return s

    @inlined
    def weigh(self, o, p, values, unit, of_values):
        return mma_AB_unzipped(o, fp16(p), values)

    @inlined
    def columns(self, o, unit):
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
        return {"k_descale": array(3), "v_descale": array(3)}

    @property
    def by_key(self) -> bool:
        return True

    def pipes(self, kv: int, stages: int, warps: int) -> dict[str, pipeline]:
        """See Same: of keys, and of values."""
        return {name: pipeline(sv(kv, fp32), stages, warps) for name in ("k_descale", "v_descale")}

    @inlined
    def units(self, sequence, head, given):
        return 1.0, 1.0

    @inlined
    def unit(self):
        return float32(LEAST)

    @inlined
    def look(self, pipes, cache, sequence, key, end, given):
        return cache.look(pipes[0], given.k_descale, sequence, key, end, given)

    @inlined
    def fill_keys(self, pipes, j, cache, found, sequence, key, head, end, n, given):
        cache.fill_numbers(pipes[0], j, given.k_descale, found, sequence, key, (head,), end, n, given)

    @inlined
    def fill_values(self, pipes, j, cache, found, sequence, key, head, end, n, given):
        cache.fill_numbers(pipes[1], j, given.v_descale, found, sequence, key, (head,), end, n, given)

    @inlined
    def of_keys(self, unit, pipes, j, newer, like):
        return load(pipes[0].own(j, newer), like)

    @inlined
    def of_values(self, unit, pipes, j, newer, like):
        return load(pipes[1].own(j, newer), like)

    @inlined
    def rescaled(self, seen, unit, of_values):
        greatest = max(unit, tile_max(abs(of_values)))
        less = unit / greatest if greatest > unit else float32(1.0)
        return rescale(seen.o, seen.lag * less), greatest

    @inlined
    def weigh(self, o, p, values, unit, of_values):
        return mma_AB_unzipped(o, fp16(p * (of_values * (float32(LIFT) / unit))), values)

    @inlined
    def weight(self, weight, unit):
        return weight * (unit / float32(LIFT))

    @inlined
    def columns(self, o, unit):
        return rezipped(o)
