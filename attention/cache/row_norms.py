"""Norms of new rows, before they are rotated and written, as objects with the same methods: none, or a norm of each head's row,

    x / sqrt(mean(x^2) + eps) * weights        or the same of x - mean(x), plus a bias

in float32, so that a row is rounded only once, to the dtype of the cache. A warp has the heads of a token as the rows of a
tile, some columns at a time. It reads a row once for the sums, and once more, then from a cache, for what it writes."""

from typing import Any

from ops import load, right_fill, row_sum, rsqrt, zeros
from tiles import inlined, static
from tiles.arguments import FLOAT, array


@static
class AsTheyAre:
    """Rows without a norm."""

    changes = False

    def __str__(self):
        return ""

    @property
    def params(self) -> dict[str, Any]:
        """{kernel's argument: its type} of what this needs in the kernel."""
        return {}

    @inlined
    def of_rows(self, gX, part, at, params):
        """What the rows from `at` (batch, token, head) on are normalised by. They are read in tiles of type `part`."""
        return None

    @inlined
    def columns(self, x, part, of_rows, head, col, params):
        """Some columns of these rows, from `col` on, normalised."""
        return x

    @inlined
    def half(self, x, part, of_rows, head, which, pair, params):
        """The first or the second columns of some pairs of columns, from number `pair` on, normalised."""
        return x


AS_THEY_ARE = AsTheyAre()


@static
class Rms(AsTheyAre):
    """An RMS norm, of queries or of keys. The arguments of the two have names of their own."""

    changes = True

    of_queries: bool

    def __str__(self):
        return f", {type(self).__name__.lower()} {'queries' if self.of_queries else 'keys'}"

    @property
    def params(self) -> dict[str, Any]:
        """See AsTheyAre. Weights: (head, column), and the same as (head, which of a pair, pair)."""
        name = "q_norm" if self.of_queries else "k_norm"
        return {name: array(2), f"{name}_pairs": array(3), "norm_eps": FLOAT}

    @inlined
    def weights(self, params):
        """Its weights."""
        if self.of_queries:
            return params.q_norm, params.q_norm_pairs
        else:
            return params.k_norm, params.k_norm_pairs

    @inlined
    def of_rows(self, gX, part, at, params):
        """See AsTheyAre: (their mean, 1 / their deviation)."""
        squares = zeros(part.col_vec)
        for col in range(0, gX.shape[3], part.cols):
            x = load(gX, part, (at[0], at[1], at[2], col))
            squares = squares + row_sum(x * x)
        return zeros(part.col_vec), rsqrt(squares / gX.shape[3] + params.norm_eps)

    @inlined
    def columns(self, x, part, of_rows, head, col, params):
        return x * of_rows[1] * load(self.weights(params)[0], part, (head, col))

    @inlined
    def half(self, x, part, of_rows, head, which, pair, params):
        return x * of_rows[1] * load(self.weights(params)[1], part, (head, which, pair), 0, 2)


class Layer(Rms):
    """A layer norm."""

    @property
    def params(self) -> dict[str, Any]:
        """See Rms; its bias likewise."""
        name = "q_norm" if self.of_queries else "k_norm"
        return super().params | {f"{name}_bias": array(2), f"{name}_bias_pairs": array(3)}

    @inlined
    def bias(self, params):
        """Its bias."""
        if self.of_queries:
            return params.q_norm_bias, params.q_norm_bias_pairs
        else:
            return params.k_norm_bias, params.k_norm_bias_pairs

    @inlined
    def of_rows(self, gX, part, at, params):
        sums, squares = zeros(part.col_vec), zeros(part.col_vec)
        for col in range(0, gX.shape[3], part.cols):
            sums = sums + row_sum(load(gX, part, (at[0], at[1], at[2], col)))
        mean = sums / gX.shape[3]
        for col in range(0, gX.shape[3], part.cols):
            x = right_fill(load(gX, part, (at[0], at[1], at[2], col)) - mean, gX.shape[3] - col, 0.0)
            squares = squares + row_sum(x * x)
        return mean, rsqrt(squares / gX.shape[3] + params.norm_eps)

    @inlined
    def columns(self, x, part, of_rows, head, col, params):
        x = (x - of_rows[0]) * of_rows[1] * load(self.weights(params)[0], part, (head, col))
        return x + load(self.bias(params)[0], part, (head, col))

    @inlined
    def half(self, x, part, of_rows, head, which, pair, params):
        x = (x - of_rows[0]) * of_rows[1] * load(self.weights(params)[1], part, (head, which, pair), 0, 2)
        return x + load(self.bias(params)[1], part, (head, which, pair), 0, 2)
