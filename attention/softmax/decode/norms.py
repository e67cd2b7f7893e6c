"""Norms of queries, whose rows are of several heads, and of the keys that a cache holds, on the way to their product. Of n, a
query, and k, a key as it lies in the cache,

    n . norm(k) = ((n * weights) . k - sum(n * weights) mean(k)) / sqrt(mean(k^2) - mean(k)^2 + eps) + n . bias

of a layer norm, and of an RMS norm the same without means and bias. So keys are read once, and written nowhere: a block
multiplies its queries by the weights, once, and a warp each tile of scores by what its rows of K say, which lie in shared
memory for the product. There they are read a second time, for which there is room: what comes from global memory is slower."""

from typing import Any, NamedTuple

from numpy import int32

from ops import block, col_index, finish_sum, lane_sum, load, maximum, row_sum, rsqrt, subtile, transpose
from tiles import fp32, inlined, static
from tiles.arguments import FLOAT, INT, array
from tiles.schema import Problem

from ..launches import norm_arrays, norm_of
from ..norms import Layer, Normed, Rms
from ..variants import Variant


@static
class RmsOfRows(Rms):
    """An RMS norm of rows that belong to several heads. alike: do these have the same weights and bias?"""

    alike: bool

    def __str__(self):
        return type(self).__name__.removesuffix("OfRows").lower() + " a head" * (not self.alike)

    @inlined
    def columns(self, of, x, head, col):
        """See Rms; head is a vector."""
        return of[head, col_index(x.row_vec) + int32(col)]

    @inlined
    def ahead(self, spec, col, params):
        """If all rows have the same weights, some columns of these, a vector of type `spec`."""
        return load(params.norm_weights, spec, (0, col), 0, 1, True) if self.alike else 0

    @inlined
    def part_by(self, x, of_rows, ahead, head, col, params):
        """part(x, of_rows, head, col, given), with what was loaded ahead."""
        if self.alike:
            return x * of_rows[1] * ahead
        else:
            return self.part(x, of_rows, head, col, params)


class LayerOfRows(RmsOfRows, Layer):
    """The same of a layer norm."""

    @inlined
    def ahead(self, spec, col, params):
        """See RmsOfRows: weights and bias."""
        if self.alike:
            return load(params.norm_weights, spec, (0, col), 0, 1, True), load(params.norm_bias, spec, (0, col), 0, 1, True)
        else:
            return 0

    @inlined
    def part_by(self, x, of_rows, ahead, head, col, params):
        if self.alike:
            return (x - of_rows[0]) * of_rows[1] * ahead[0] + ahead[1]
        else:
            return self.part(x, of_rows, head, col, params)


class NormedRows(Normed):
    """A variant whose queries are normalised by `norm`, and whose rows belong to several heads."""

    @inlined
    def prefetch_query_params(self, spec, col, params):
        return self.norm.ahead(spec, col, params)

    @inlined
    def prepare_queries_by(self, x, of_queries, ahead, ctx, col):
        return self.norm.part_by(x, of_queries, ahead, ctx.head, col, ctx.params)


@static
class AsTheyAre:
    """Keys without a norm."""

    prepares = False  # does something become of the queries?
    slim = True  # does it leave registers for tiles of twice as many rows?

    def __str__(self):
        return ""

    @property
    def params(self) -> dict[str, Any]:
        """{kernel's argument: its type} of what this needs in the kernel."""
        return {}

    @inlined
    def ahead(self, spec, head, col, params):
        """Load what `queries` needs for some columns, a vector of type `spec`, before the queries arrive."""
        return 0

    @inlined
    def queries(self, x, ahead):
        """Some columns of the queries as the products take them. ahead: what was loaded before."""
        return x

    @inlined
    def begin(self, zero):
        """What is known of the rows of queries before any of their columns. zero: a vector of zeros."""
        return None

    @inlined
    def more(self, known, x, made, head, col, params):
        """What is known after some more columns, x. made: what the product takes in their place."""
        return known

    @inlined
    def whole(self, known, scratch):
        """What is known of all columns, of which each warp of the block had some."""
        return known

    @inlined
    def scores(self, s, keys, part, unit, known, params):
        """The scores. s: those of the keys as they lie in shared memory, which are read in panels of type `part`. unit: what
        scores are multiplied by."""
        return s


AS_THEY_ARE = AsTheyAre()


class ByRms(AsTheyAre):
    """Keys with an RMS norm."""

    prepares = True

    def __str__(self):
        return f" {type(self).__name__.removeprefix('By').lower()} keys"

    @property
    def params(self) -> dict[str, Any]:
        """See AsTheyAre. k_weights: (head of keys, column). columns: of a row."""
        return {"k_weights": array(2), "norm_eps": FLOAT, "columns": INT}

    @inlined
    def ahead(self, spec, head, col, params):
        return load(params.k_weights, spec, (head, col), 0, 1, True)

    @inlined
    def queries(self, x, ahead):
        return x * ahead

    @inlined
    def scores(self, s, keys, part, unit, known, params):
        x = load(subtile(keys, keys.rows, 0, keys.panel_cols, 0), part)
        squares = lane_sum(x * x)
        for i in range(1, keys.panels):
            x = load(subtile(keys, keys.rows, 0, keys.panel_cols, i), part)
            squares = squares + lane_sum(x * x)
        mean = transpose(finish_sum(squares)) / params.columns
        return s * rsqrt(mean * (unit * unit) + params.norm_eps)


class ByLayer(ByRms):
    """Keys with a layer norm."""

    slim = False

    @property
    def params(self) -> dict[str, Any]:
        """See ByRms. k_bias: (head of keys, column)."""
        return {"k_weights": array(2), "k_bias": array(2), "norm_eps": FLOAT, "columns": INT}

    @inlined
    def begin(self, zero):
        """See AsTheyAre. Two vectors: the sum of what the product takes, and the product with the bias."""
        return zero, zero

    @inlined
    def more(self, known, x, made, head, col, params):
        total, product = known
        return total + row_sum(fp32(made)), product + row_sum(x * load(params.k_bias, x.row_vec, (head, col), 0, 1, True))

    @inlined
    def whole(self, known, scratch):
        return block.reduce_sum(known[0], scratch), block.reduce_sum(known[1], scratch)

    @inlined
    def scores(self, s, keys, part, unit, known, params):
        x = load(subtile(keys, keys.rows, 0, keys.panel_cols, 0), part)
        sums, squares = lane_sum(x), lane_sum(x * x)
        for i in range(1, keys.panels):
            x = load(subtile(keys, keys.rows, 0, keys.panel_cols, i), part)
            sums, squares = sums + lane_sum(x), squares + lane_sum(x * x)
        mean = transpose(finish_sum(sums)) / params.columns * unit
        square = transpose(finish_sum(squares)) / params.columns * (unit * unit)
        total, product = known
        return (s - total * mean) * rsqrt(maximum(square - mean * mean, 0.0) + params.norm_eps) + product


class Norms(NamedTuple):
    """The norms that attention's kernels apply. queries: (variant, numbers) if the rows of a tile belong to one head. rows:
    the variant if they belong to several. Both are empty without a norm. keys: what is done with keys. of_queries, of_keys:
    the kernel's arguments."""

    queries: list[tuple[Variant, dict[str, Any]]]
    rows: list[Variant]
    keys: AsTheyAre
    of_queries: dict[str, Any]
    of_keys: dict[str, Any]


def norms_of(problem: Problem, norm_eps: float) -> Norms:
    """The Norms of a call: of queries, if these were not normalised before they were rotated, and of the cache's keys.
    ValueError: the arrays do not fit."""
    numbers: dict[str, Any] = {"norm_eps": norm_eps, "columns": problem("D")[0]}
    found = Norms([], [], AS_THEY_ARE, {}, {})
    q_norm, k_norm = (norm_of(problem, name) for name in ("q_norm", "k_norm"))
    if q_norm is not None and "cos" not in problem:
        alike = all(problem.axes(name) == "D" for name in ("q_norm", "q_norm_bias") if name in problem)
        rows = (LayerOfRows if isinstance(q_norm, Layer) else RmsOfRows)(alike)
        told = norm_arrays(problem, "q_norm", "HD") | numbers
        found = found._replace(queries=[(Normed(q_norm), numbers)], rows=[NormedRows(rows)], of_queries=told)
    if k_norm is not None:
        told = {name.replace("norm", "k"): x for name, x in norm_arrays(problem, "k_norm", "GD").items()}
        found = found._replace(keys=ByLayer() if isinstance(k_norm, Layer) else ByRms(), of_keys=told | numbers)
    return found
