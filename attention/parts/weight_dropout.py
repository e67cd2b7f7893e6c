"""Dropout of weights, with random numbers that depend on a weight's batch, head, query and key."""

from typing import Any

from numpy import int64

from ops import abs, bernoulli, maximum, where
from tiles import fp32, inlined, rt
from tiles.launching.arguments import ENDS, FLOAT, INT, LONG

from ..dropout import drop_threshold
from .variant import Variant

SEED_END = 2**63


class Dropout(Variant):
    """Dropout: a weight becomes 0 with probability params.dropped / 65536; the others are multiplied by 1 / (1 - dropout). The
    row sum counts all weights."""

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type}. per_kept: 1 / (1 - dropout), by which kept weights are multiplied."""
        return {"dropped": INT, "per_kept": FLOAT, "seed": LONG}

    @inlined
    def precompute(self, ctx):
        """(the low half of the seed, the high half)"""
        return ctx.params.seed, ctx.params.seed >> 32

    @inlined
    def drop(self, p, ctx, key):
        return where(self.draw(p, ctx, key), 0.0, p)

    @inlined
    def draw(self, p, ctx, key):
        """1 for the weights that dropout drops, else 0."""
        low, high = ctx.precomputed
        shape = rt(p.rows, p.cols, fp32, p.layout)
        return bernoulli(shape, ctx.params.dropped, low, high, ctx.batch, ctx.head, ctx.row, key)

    @inlined
    def mark_dropped(self, p, ctx, key):
        return where(self.draw(p, ctx, key), -p, p)

    @inlined
    def remove_dropped(self, p):
        return maximum(p, 0.0)

    @inlined
    def score_grad(self, p, dp, delta, ctx):
        """dS = P (dP - delta), with dP = 0 for a dropped weight."""
        return abs(p) * (where(p > 0.0, dp * ctx.params.per_kept, 0.0) - delta)

    @inlined
    def output(self, o, ctx):
        return o * ctx.params.per_kept


class DropoutWithDeviceSeed(Dropout):
    """Dropout with a seed in device memory: params.seeds, an array of one element."""

    @property
    def params(self) -> dict[str, Any]:
        return {"dropped": INT, "per_kept": FLOAT, "seeds": ENDS}

    @inlined
    def precompute(self, ctx):
        seed = int64(ctx.params.seeds[0])
        return seed, seed >> 32


def dropout_numbers(dropout: float) -> dict[str, float]:
    """{argument of a kernel: number} for this dropout."""
    return {"dropped": drop_threshold(dropout), "per_kept": 1 / (1 - dropout)}
