"""Norms of new rows of K, and of queries, before they are rotated and written: none, RMS or layer norm, with the same methods,

    x / sqrt(mean(x^2) + eps) * weights        or the same of x - mean(x), plus a bias

in float32, so that a row is rounded once, to the dtype of the cache. A warp's tile has the heads of one token as its rows, and
some of their columns. A row is read twice: for its mean and variance, and then, from L1 or L2, to be normalised and written."""

from typing import Any

from ops import load, right_fill, row_sum, rsqrt, zeros
from tiles import inlined, static
from tiles.launching.arguments import FLOAT, array

from .part import KernelPart


@static
class NoRowNorm(KernelPart):
    """Rows of keys or queries are written as they are."""

    is_norm = False

    @inlined
    def row_stats(self, gX, spec, at, params):
        """What rows are normalised by, of the heads from `at` (batch, token, head) on. They are read in tiles of type
        `spec`."""
        return None

    @inlined
    def apply(self, x, spec, stats, head, col, params):
        """The columns from `col` on of these rows, x, normalised."""
        return x

    @inlined
    def apply_to_half(self, x, spec, stats, head, half, pair, params):
        """The first (half 0) or second (half 1) columns of the rotary pairs from `pair` on, x, normalised."""
        return x


NO_ROW_NORM = NoRowNorm()


@static
class RowRmsNorm(NoRowNorm):
    """An RMS norm of each head's row, of queries or of keys, whose weights are different parameters of the kernel."""

    is_norm = True

    of_queries: bool

    label = "rms"

    def __str__(self):
        return f", {self.label} {'queries' if self.of_queries else 'keys'}"

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type}. The weights are (head, column), and once more as pairs (head, half, pair)."""
        name = "q_norm" if self.of_queries else "k_norm"
        return {name: array(2), f"{name}_pairs": array(3), "norm_eps": FLOAT}

    @inlined
    def weights(self, params):
        """(weights by column, weights by pair)"""
        if self.of_queries:
            return params.q_norm, params.q_norm_pairs
        else:
            return params.k_norm, params.k_norm_pairs

    @inlined
    def row_stats(self, gX, spec, at, params):
        """(0, 1 / sqrt(mean(x^2) + eps)) of each row."""
        squares = zeros(spec.col_vec)
        for col in range(0, gX.shape[3], spec.cols):
            x = load(gX, spec, (at[0], at[1], at[2], col))
            squares = squares + row_sum(x * x)
        return zeros(spec.col_vec), rsqrt(squares / gX.shape[3] + params.norm_eps)

    @inlined
    def apply(self, x, spec, stats, head, col, params):
        return x * stats[1] * load(self.weights(params)[0], spec, (head, col))

    @inlined
    def apply_to_half(self, x, spec, stats, head, half, pair, params):
        return x * stats[1] * load(self.weights(params)[1], spec, (head, half, pair), 0, 2)


class RowLayerNorm(RowRmsNorm):
    """A layer norm of each head's row, of queries or of keys."""

    label = "layer"

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type}: those of RowRmsNorm, and a bias in the same two shapes."""
        name = "q_norm" if self.of_queries else "k_norm"
        return super().params | {f"{name}_bias": array(2), f"{name}_bias_pairs": array(3)}

    @inlined
    def bias(self, params):
        """(bias by column, bias by pair)"""
        if self.of_queries:
            return params.q_norm_bias, params.q_norm_bias_pairs
        else:
            return params.k_norm_bias, params.k_norm_bias_pairs

    @inlined
    def row_stats(self, gX, spec, at, params):
        """(mean(x), 1 / sqrt(variance(x) + eps)) of each row."""
        sums, squares = zeros(spec.col_vec), zeros(spec.col_vec)
        for col in range(0, gX.shape[3], spec.cols):
            sums = sums + row_sum(load(gX, spec, (at[0], at[1], at[2], col)))
        mean = sums / gX.shape[3]
        for col in range(0, gX.shape[3], spec.cols):
            x = right_fill(load(gX, spec, (at[0], at[1], at[2], col)) - mean, gX.shape[3] - col, 0.0)
            squares = squares + row_sum(x * x)
        return mean, rsqrt(squares / gX.shape[3] + params.norm_eps)

    @inlined
    def apply(self, x, spec, stats, head, col, params):
        x = (x - stats[0]) * stats[1] * load(self.weights(params)[0], spec, (head, col))
        return x + load(self.bias(params)[0], spec, (head, col))

    @inlined
    def apply_to_half(self, x, spec, stats, head, half, pair, params):
        x = (x - stats[0]) * stats[1] * load(self.weights(params)[1], spec, (head, half, pair), 0, 2)
        return x + load(self.bias(params)[1], spec, (head, half, pair), 0, 2)
