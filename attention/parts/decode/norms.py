"""Norms of queries, in tiles whose rows belong to several heads, and of the keys in the cache, on the way to their product. Of
n, a normalised query, and k, a key as it is in the cache,

    n . norm(k) = ((n * weights) . k - sum(n * weights) mean(k)) / sqrt(mean(k^2) - mean(k)^2 + eps) + n . bias

for a layer norm, and for an RMS norm the same without means and bias. So keys are read once, and written nowhere: a block
multiplies its queries by the weights, once, and a warp corrects each tile of scores by the mean and variance of its rows of K.
It reads these rows a second time from shared memory, where they are for the product; that is hidden behind the loads from
global memory."""

from typing import Any

from numpy import int32

from ops import block, col_index, finish_sum, lane_sum, load, maximum, row_sum, rsqrt, subtile, transpose
from tiles import fp32, inlined, static
from tiles.launching.arguments import FLOAT, INT, array

from ..norms import LayerNorm, QueryNorm, RmsNorm
from ..part import KernelPart


@static
class MultiHeadRmsNorm(RmsNorm):
    """An RMS norm of rows that belong to several heads. same_weights: do these heads have the same weights and bias?"""

    same_weights: bool

    label = "rms"

    def __str__(self):
        return self.label + " a head" * (not self.same_weights)

    @inlined
    def load_columns(self, weights, x, head, col):
        """The elements of an array (head, column) for the columns of x, whose first is `col`; head is a vector, of the rows."""
        return weights[head, col_index(x.row_vec) + int32(col)]

    @inlined
    def prefetch(self, spec, col, params):
        """If all rows have the same weights, load some columns of these, as a vector of type `spec`; else 0."""
        return load(params.norm_weights, spec, (0, col), 0, 1, True) if self.same_weights else 0

    @inlined
    def part_by(self, x, of_rows, prefetched, head, col, params):
        """part(x, of_rows, head, col, params), with what `prefetch` returned."""
        if self.same_weights:
            return x * of_rows[1] * prefetched
        else:
            return self.part(x, of_rows, head, col, params)


class MultiHeadLayerNorm(MultiHeadRmsNorm, LayerNorm):
    """A layer norm of rows that belong to several heads."""

    label = "layer"

    @inlined
    def prefetch(self, spec, col, params):
        """If all rows have the same weights and bias, load some columns of both, as vectors of type `spec`; else 0."""
        if self.same_weights:
            return load(params.norm_weights, spec, (0, col), 0, 1, True), load(params.norm_bias, spec, (0, col), 0, 1, True)
        else:
            return 0

    @inlined
    def part_by(self, x, of_rows, prefetched, head, col, params):
        if self.same_weights:
            return (x - of_rows[0]) * of_rows[1] * prefetched[0] + prefetched[1]
        else:
            return self.part(x, of_rows, head, col, params)


class MultiHeadQueryNorm(QueryNorm):
    """A variant whose queries are normalised by `norm`, in tiles whose rows belong to several heads."""

    @inlined
    def prefetch_query_params(self, spec, col, params):
        return self.norm.prefetch(spec, col, params)

    @inlined
    def prepare_queries_by(self, x, of_queries, ahead, ctx, col):
        return self.norm.part_by(x, of_queries, ahead, ctx.head, col, ctx.params)


@static
class PlainKeys(KernelPart):
    """The cache's keys are multiplied as they are."""

    prepares_queries = False  # are queries changed before the product?
    allows_tall_tiles = True  # are there registers for tiles of twice as many rows?

    @inlined
    def prefetch(self, spec, head, col, params):
        """Load what `weight_queries` needs for some columns, as a vector of type `spec`, before the queries arrive."""
        return 0

    @inlined
    def weight_queries(self, x, prefetched):
        """Some columns of the queries as the product takes them: n * weights."""
        return x

    @inlined
    def init_query_sums(self, zero):
        """The sums over a query's columns that scores need, before any column. zero: a vector of zeros."""
        return None

    @inlined
    def add_query_sums(self, sums, x, weighted, head, col, params):
        """The sums with some more columns, x. weighted: what the product takes in their place."""
        return sums

    @inlined
    def reduce_query_sums(self, sums, scratch):
        """The sums over all columns, of which each warp of the block had some."""
        return sums

    @inlined
    def normalise_scores(self, s, keys, part, unit, sums, params):
        """The scores of normalised keys. s: unit (n * weights) . k of the keys in shared memory, whose columns are read in
        panels of type `part`. sums: of the queries."""
        return s


PLAIN_KEYS = PlainKeys()


class RmsNormedKeys(PlainKeys):
    """The cache's keys are normalised by an RMS norm."""

    prepares_queries = True
    label = "rms"

    def __str__(self):
        return f" {self.label} keys"

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type}. k_weights: (key head, column). columns: of a row."""
        return {"k_weights": array(2), "norm_eps": FLOAT, "columns": INT}

    @inlined
    def prefetch(self, spec, head, col, params):
        return load(params.k_weights, spec, (head, col), 0, 1, True)

    @inlined
    def weight_queries(self, x, prefetched):
        return x * prefetched

    @inlined
    def normalise_scores(self, s, keys, part, unit, sums, params):
        x = load(subtile(keys, keys.rows, 0, keys.panel_cols, 0), part)
        squares = lane_sum(x * x)
        for i in range(1, keys.panels):
            x = load(subtile(keys, keys.rows, 0, keys.panel_cols, i), part)
            squares = squares + lane_sum(x * x)
        mean = transpose(finish_sum(squares)) / params.columns
        return s * rsqrt(mean * (unit * unit) + params.norm_eps)


class LayerNormedKeys(RmsNormedKeys):
    """The cache's keys are normalised by a layer norm."""

    allows_tall_tiles = False
    label = "layer"

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type}. k_weights, k_bias: (key head, column). columns: of a row."""
        return {"k_weights": array(2), "k_bias": array(2), "norm_eps": FLOAT, "columns": INT}

    @inlined
    def init_query_sums(self, zero):
        """Two vectors: sum(n * weights), and n . bias."""
        return zero, zero

    @inlined
    def add_query_sums(self, sums, x, weighted, head, col, params):
        total, product = sums
        total = total + row_sum(fp32(weighted))
        return total, product + row_sum(x * load(params.k_bias, x.row_vec, (head, col), 0, 1, True))

    @inlined
    def reduce_query_sums(self, sums, scratch):
        return block.reduce_sum(sums[0], scratch), block.reduce_sum(sums[1], scratch)

    @inlined
    def normalise_scores(self, s, keys, part, unit, sums, params):
        x = load(subtile(keys, keys.rows, 0, keys.panel_cols, 0), part)
        totals, squares = lane_sum(x), lane_sum(x * x)
        for i in range(1, keys.panels):
            x = load(subtile(keys, keys.rows, 0, keys.panel_cols, i), part)
            totals, squares = totals + lane_sum(x), squares + lane_sum(x * x)
        mean = transpose(finish_sum(totals)) / params.columns * unit
        square = transpose(finish_sum(squares)) / params.columns * (unit * unit)
        total, product = sums
        return (s - total * mean) * rsqrt(maximum(square - mean * mean, 0.0) + params.norm_eps) + product
