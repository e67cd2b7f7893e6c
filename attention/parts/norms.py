"""Norms of each head's rows, before the scores: RMS norm and layer norm, as objects that kernels are made of."""

from typing import Any

from ops import load, right_fill, row_sum, rsqrt, zeros
from tiles import inlined, static
from tiles.launching.arguments import FLOAT, INT, array

from .part import KernelPart
from .variant import Variant


@static
class RmsNorm(KernelPart):
    """x / sqrt(mean(x^2) + eps) * weights."""

    def __str__(self):
        return type(self).__name__.lower().removesuffix("norm")

    @property
    def params(self) -> dict[str, Any]:
        """{name: type} of the kernel's arguments that the norm reads. norm_weights: (head, column). columns: of a row."""
        return {"norm_weights": array(2), "norm_eps": FLOAT, "columns": INT}

    @inlined
    def of_rows(self, x, params):
        """(mean, 1 / standard deviation) of the rows of a tile; the mean is 0 for this norm. The tile's columns from
        params.columns on are 0."""
        return zeros(x.col_vec), rsqrt(row_sum(x * x) / params.columns + params.norm_eps)

    @inlined
    def part(self, x, of_rows, head, col, params):
        """The normalised columns x of these rows, from column `col` of the head on."""
        _, scale = of_rows
        return x * scale * self.load_columns(params.norm_weights, x, head, col)

    @inlined
    def load_columns(self, weights, x, head, col):
        """The elements of an array (head, column), of weights or of a bias, for the columns of x, whose first is `col`."""
        return load(weights, x.row_vec, (head, col), 0, 1, True)


class LayerNorm(RmsNorm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weights + bias."""

    @property
    def params(self) -> dict[str, Any]:
        """The arguments of RmsNorm, and norm_bias: (head, column)."""
        return {"norm_weights": array(2), "norm_bias": array(2), "norm_eps": FLOAT, "columns": INT}

    @inlined
    def of_rows(self, x, params):
        mean = row_sum(x) / params.columns
        centred = right_fill(x - mean, params.columns, 0.0)
        return mean, rsqrt(row_sum(centred * centred) / params.columns + params.norm_eps)

    @inlined
    def part(self, x, of_rows, head, col, params):
        mean, scale = of_rows
        weights = self.load_columns(params.norm_weights, x, head, col)
        return (x - mean) * scale * weights + self.load_columns(params.norm_bias, x, head, col)


@static
class QueryNorm(Variant):
    """A variant that normalises the query tile by `norm`."""

    cheap_mask = True

    norm: RmsNorm

    def __str__(self):
        return f"{self.norm} queries"

    @property
    def params(self) -> dict[str, Any]:
        return self.norm.params

    @inlined
    def query_stats(self, x, ctx):
        return self.norm.of_rows(x, ctx.params)

    @inlined
    def prepare_queries(self, x, stats, ctx, col):
        return self.norm.part(x, stats, ctx.head, col, ctx.params)
