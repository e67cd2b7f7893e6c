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
    def given(self) -> dict[str, Any]:
        """{kernel's argument: its type} of what this needs in the kernel."""
        return {}

    @inlined
    def of_rows(self, gX, part, at, given):
        """What the rows from `at` (batch, token, head) on are normalised by. They are read in tiles of type `part`."""
        return None

    @inlined
    def columns(self, x, part, of_rows, head, col, given):
        """Some columns of these rows, from `col` on, normalised."""
        return x

    @inlined
    def half(self, x, part, of_rows, head, which, pair, given):
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
    def given(self) -> dict[str, Any]:
        """See AsTheyAre. Weights: (head, column), and the same as (head, which of a pair, pair)."""
        name = "q_norm" if self.of_queries else "k_norm"
        return {name: array(2), f"{name}_pairs": array(3), "norm_eps": FLOAT}

    @inlined
    def weights(self, given):
        """Its weights."""
        if self.of_queries:
            return given.q_norm, given.q_norm_pairs
        else:
            return given.k_norm, given.k_norm_pairs

    @inlined
    def of_rows(self, gX, part, at, given):
        """See AsTheyAre: (their mean, 1 / their deviation)."""
        squares = zeros(part.col_vec)
        for col in range(0, gX.shape[3], part.cols):
            x = load(gX, part, (at[0], at[1], at[2], col))
            squares = squares + row_sum(x * x)
        return zeros(part.col_vec), rsqrt(squares / gX.shape[3] + given.norm_eps)

    @inlined
    def columns(self, x, part, of_rows, head, col, given):
        return x * of_rows[1] * load(self.weights(given)[0], part, (head, col))

    @inlined
    def half(self, x, part, of_rows, head, which, pair, given):
        return x * of_rows[1] * load(self.weights(given)[1], part, (head, which, pair), 0, 2)


class Layer(Rms):
    """A layer norm."""

    @property
    def given(self) -> dict[str, Any]:
        """See Rms; its bias likewise."""
        name = "q_norm" if self.of_queries else "k_norm"
        return super().given | {f"{name}_bias": array(2), f"{name}_bias_pairs": array(3)}

    @inlined
    def bias(self, given):
        """Its bias."""
        if self.of_queries:
            return given.q_norm_bias, given.q_norm_bias_pairs
        else:
            return given.k_norm_bias, given.k_norm_bias_pairs

    @inlined
    def of_rows(self, gX, part, at, given):
        sums, squares = zeros(part.col_vec), zeros(part.col_vec)
        for col in range(0, gX.shape[3], part.cols):
            sums = sums + row_sum(load(gX, part, (at[0], at[1], at[2], col)))
        mean = sums / gX.shape[3]
        for col in range(0, gX.shape[3], part.cols):
            x = right_fill(load(gX, part, (at[0], at[1], at[2], col)) - mean, gX.shape[3] - col, 0.0)
            squares = squares + row_sum(x * x)
        return mean, rsqrt(squares / gX.shape[3] + given.norm_eps)

    @inlined
    def columns(self, x, part, of_rows, head, col, given):
        x = (x - of_rows[0]) * of_rows[1] * load(self.weights(given)[0], part, (head, col))
        return x + load(self.bias(given)[0], part, (head, col))

    @inlined
    def half(self, x, part, of_rows, head, which, pair, given):
        x = (x - of_rows[0]) * of_rows[1] * load(self.weights(given)[1], part, (head, which, pair), 0, 2)
        return x + load(self.bias(given)[1], part, (head, which, pair), 0, 2)
