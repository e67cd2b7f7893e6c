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
    """What a pass over a sequence computes. These are the defaults; `skip`, `divided` and `silu` are explained at Outputs."""

    outputs = True  # are there any? If so, queries are read
    values = True  # are values read? If not, all of them are 1
    skip = divided = silu = False

    def __str__(self):
        return type(self).__name__.lower()

    @inlined
    def fill(self, v, z, j, gV, gZ, at):
        """Have TMA bring the j-th tile of values, and of z, from the coordinates `at`."""
        v.fill(j, gV, at)

    @inlined
    def wait(self, v, ones, j):
        """The j-th tile of values."""
        return v.wait(j)

    @inlined
    def release(self, v, j):
        """Say that the j-th tile of values has been read."""
        v.release(j)

    @inlined
    def skipped(self, o, values, d, kind):
        """o + D v. d: D of the tile's columns. kind: the type of a warp's part of v and of z."""
        return o

    @inlined
    def finish(self, o, z, j, gDivisor, at, kind):
        """The outputs as they are stored. at: the coordinates of their divisors. kind: see skipped."""
        return o

    @inlined
    def store(self, sequences, gO, tile, o, span, token, head, column):
        """Write the outputs of the chunk that begins at `token`: through a shared tile, or from registers if sequences follow
        one another. The warps meet here, so that all have read the state before the next one replaces it."""
        if sequences.varlen:
            warpgroup.sync()
        sequences.store(gO, tile, o, span, token, head, column)


class States(Result):
    """Only states: what segments leave by themselves."""

    outputs = False


class Normalizer(Result):
    """The numbers that outputs are divided by: the outputs for values that are all 1, one fp32 number for each row and
    head."""

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
    def store(self, sequences, gO, tile, o, span, token, head, column):
        """Store one of the columns, which are all the same."""
        warpgroup.sync()  # no store by TMA, before which the warps would meet
        warpgroup.store(truncate(gO, 1, span.end), row_max(o), (span.batch, token, head), cols=1)


@static
class Outputs(Result):
    """(o + D v) / normalizer * silu(z). skip: is D v added? divided: is there a normalizer? silu: is there z?"""

    skip: bool = False
    divided: bool = False
    silu: bool = False

    def __str__(self):
        return ", ".join(name for name in ("skip", "divided", "silu") if getattr(self, name))

    @inlined
    def fill(self, v, z, j, gV, gZ, at):
        v.fill(j, gV, at)
        if self.silu:
            z.fill(j, gZ, at)

    @inlined
    def skipped(self, o, values, d, kind):
        if self.skip:
            o = o + fp32(warpgroup.load(values, kind)) * d
        return o

    @inlined
    def finish(self, o, z, j, gDivisor, at, kind):
        if self.divided:
            o = o / (warpgroup.load(gDivisor, ROWS, at, cols=1) + TINY)
        if self.silu:
            o = o * silu(fp32(warpgroup.load(z.wait(j), kind)))
            z.release(j)
        return o


def forms(kind: type[Gate], everything: bool) -> Iterator[tuple[Gate, Result, bool]]:
    """(gate, result, varlen) of all that is computed with gates of this kind, except for scales `apart`. The plainest comes
    first, the others with `everything` only. Mamba-2's additions come all at once."""
    yield kind(), Outputs(), False
    if everything and kind is BySteps:
        yield from ((BySteps(), States(), False), (BySteps(), Outputs(), True))
        yield from ((BySteps(softplus=True), Outputs(skip=True, silu=True), varlen) for varlen in (False, True))
    elif everything:
        yield kind(), Outputs(), True
        yield from itertools.product((kind(),), (States(), Normalizer(), Outputs(divided=True)), (False, True))
