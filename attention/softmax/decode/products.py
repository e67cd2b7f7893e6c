"""The two products of attention, by what a cache holds, as objects with the same methods: as queries are, or fp8."""

from typing import Any

from ops import mma_AB, mma_AB_unzipped, mma_ABt, mma_ABt_unzipped, rezipped, unzipped
from tiles import dtype, fp8e4m3, fp16, inlined, static
from tiles.arguments import array


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
    def scores(self, s, queries, keys, unit):
        """s, which is 0, + Q K^T."""
        return mma_ABt(s, queries, keys)

    @inlined
    def weigh(self, o, p, values):
        """O + P V, with O's columns in an order of its own."""
        return mma_AB(o, self.wide(p), values)

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
    def scores(self, s, queries, keys, unit):
        """See Same."""
        s = mma_ABt_unzipped(s, queries, keys)
        if self.scaled:
            s = s * unit
        return s

    @inlined
    def weigh(self, o, p, values):
        """See Same."""
        return mma_AB_unzipped(o, fp16(p), values)

    @inlined
    def columns(self, o, unit):
        """See Same."""
        o = rezipped(o)
        if self.scaled:
            o = o * unit
        return o
