"""Dropout of the weights, by draws that follow from their places."""

from typing import Any

from numpy import int64

from ops import abs, bernoulli, maximum, where
from tiles import fp32, inlined, rt
from tiles.arguments import ENDS, FLOAT, INT, LONG

from ..dropout import drop_threshold
from .variants import Variant

SEED_END = 2**63


class Dropped(Variant):
    """A weight becomes 0 with probability given.dropped / 65536; the others are multiplied by 1 / (1 - dropout). The sum of
    the weights counts all of them."""

    draws = True

    @property
    def given(self) -> dict[str, Any]:
        """See Variant. per_kept: 1 / (1 - dropout)."""
        return {"dropped": INT, "per_kept": FLOAT, "seed": LONG}

    @inlined
    def keep(self, at):
        """See Variant: the halves of the seed."""
        return at.given.seed, at.given.seed >> 32

    @inlined
    def drop(self, p, at, key):
        return where(self.drawn(p, at, key), 0.0, p)

    @inlined
    def drawn(self, p, at, key):
        """1 for the weights that are dropped, else 0."""
        low, high = at.kept
        shape = rt(p.rows, p.cols, fp32, p.layout)
        return bernoulli(shape, at.given.dropped, low, high, at.batch, at.head, at.row, key)

    @inlined
    def marked(self, p, at, key):
        return where(self.drawn(p, at, key), -p, p)

    @inlined
    def left(self, p):
        return maximum(p, 0.0)

    @inlined
    def slope(self, p, dp, delta, at):
        """See Variant. For a weight that is dropped dp is 0."""
        return abs(p) * (where(p > 0.0, dp * at.given.per_kept, 0.0) - delta)

    @inlined
    def output(self, o, at):
        return o * at.given.per_kept


class DroppedAnew(Dropped):
    """The same with a seed that lies in memory, given.seeds, an array of one element."""

    @property
    def given(self) -> dict[str, Any]:
        return {"dropped": INT, "per_kept": FLOAT, "seeds": ENDS}

    @inlined
    def keep(self, at):
        seed = int64(at.given.seeds[0])
        return seed, seed >> 32


def numbers_of(dropout: float) -> dict[str, float]:
    """{parameter of a kernel: number} for this dropout."""
    return {"dropped": drop_threshold(dropout), "per_kept": 1 / (1 - dropout)}
