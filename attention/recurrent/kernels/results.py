"""What a pass over a sequence results in (chunk_hopper.py, chunk_ampere.py): outputs, their normalizer, or nothing but states.

The methods are Hopper's, where values and z come by rings, and `ones` is a shared tile full of ones.
"""

import itertools
from collections.abc import Iterator

from ops import row_max, silu, truncate, warpgroup
from tiles import fp32, inlined, static

from .gates import ROWS, BySteps, Gate

TINY = 1e-10  # added to a normalizer, as flash-linear-attention does


@static
class Result:
    """What the results have in common, and differ in: see Outputs for the last three."""

    outputs = True  # are there any? If so, queries are read
    values = True  # are values read? If not, all of them are 1
    skip = divided = gated = False

    def __str__(self):
        return type(self).__name__.lower()

    @inlined
    def fill(self, v, z, j, gV, gZ, at):
        """Have the j-th tiles of values, and of z, brought from the coordinates `at`."""
        v.fill(j, gV, at)

    @inlined
    def wait(self, v, ones, j):
        """The j-th tile of values."""
        return v.wait(j)

    @inlined
    def release(self, v, j):
        """The j-th tile of values has been read."""
        v.release(j)

    @inlined
    def skipped(self, o, values, d, kind):
        """o + D v"""
        return o

    @inlined
    def write(self, o, sequences, gO, tile, z, j, gDivisor, span, token, head, column, kind):
        """What becomes of the outputs of the chunk that begins at `token`, by way of a shared tile. kind: that of z."""


class States(Result):
    """The states that segments by themselves end with."""

    outputs = False


class Normalizer(Result):
    """What outputs are to be divided by: the outputs for values that are all 1, one fp32 number a row and head."""

    values = False

    @inlined
    def fill(self, v, z, j, gV, gZ, at):
        pass

    @inlined
    def wait(self, v, ones, j):
        return ones

    @inlined
    def release(self, v, j):
        pass

    @inlined
    def write(self, o, sequences, gO, tile, z, j, gDivisor, span, token, head, column, kind):
        """One of its columns, which are all the same."""
        warpgroup.store(truncate(gO, 1, span.end), row_max(o), (span.batch, token, head), cols=1)


@static
class Outputs(Result):
    """(o + D v) / normalizer * silu(z), of which D (`skip`), the division (`divided`) and z (`gated`) may be left out."""

    skip: bool = False
    divided: bool = False
    gated: bool = False

    def __str__(self):
        return ", ".join(name for name in ("skip", "divided", "gated") if getattr(self, name))

    @inlined
    def fill(self, v, z, j, gV, gZ, at):
        v.fill(j, gV, at)
        if self.gated:
            z.fill(j, gZ, at)

    @inlined
    def skipped(self, o, values, d, kind):
        if self.skip:
            o = o + fp32(warpgroup.load(values, kind)) * d
        return o

    @inlined
    def write(self, o, sequences, gO, tile, z, j, gDivisor, span, token, head, column, kind):
        if self.divided:
            o = o / (warpgroup.load(gDivisor, ROWS, (span.batch, token, head), cols=1) + TINY)
        if self.gated:
            o = o * silu(fp32(warpgroup.load(z.wait(j), kind)))
            z.release(j)
        sequences.store(gO, tile, o, span, token, head, column)


def forms(kind: type[Gate], everything: bool) -> Iterator[tuple[Gate, Result, bool]]:
    """(gate, result, varlen) that are computed with this kind of gates: the plainest first, and with `everything` all others;
    what Mamba-2 adds comes all at once. Only outputs know a scale, and only decays can have it among them."""
    yield kind(), Outputs(), False
    if everything and kind is BySteps:
        yield from ((BySteps(), States(), False), (BySteps(), Outputs(), True))
        yield from ((BySteps(softplus=True), Outputs(skip=True, gated=True), varlen) for varlen in (False, True))
    elif everything:
        yield kind(), Outputs(), True
        yield from itertools.product((kind(),), (States(), Normalizer(), Outputs(divided=True)), (False, True))
