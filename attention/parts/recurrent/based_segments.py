"""What a chunk adds to Based's state and sum of features, and to their gradients, for the kernel that computes both
(based_states_hopper.py) and the walk that does so on its way (based_gradients_hopper.py)."""

from numpy import float32

from ops import load, subtile, tile_sum, warpgroup
from ops.for_attention.taylor_features import BASE
from tiles import dtype, fp32, inlined, rt, static, sv

from .tokens import CHUNK, COLUMNS

SCORES = rt(16, CHUNK, fp32)
VECTORS = sv(2 * CHUNK, fp32)  # w of a chunk's tokens, and -w dO . O


@static
class KeySide:
    """The sums of f(k)^T v and f(k). squares: what features multiply squares by."""

    dtype: dtype
    normalize: bool
    squares = 0.5

    @inlined
    def prepare(self, tiles, j, keys, values, remaining, scale):
        """(the rows whose features are summed, the sum of their weights). remaining: the tokens from the chunk's first on."""
        return warpgroup.load(keys, rt(16, BASE, self.dtype)), float32(min(remaining, CHUNK))

    @inlined
    def weighted(self, tiles, keys):
        """The tile of w k, of which z and Z are sums (taylor_sums.py); w is 1."""
        return keys


@static
class QuerySide:
    """The sums of f(scale q)^T w dO and -w (dO . O) f(scale q). squares: what features multiply squares by."""

    dtype: dtype
    normalize: bool
    squares = 1.0

    @inlined
    def weigh(self, tiles, j, x, douts):
        """Multiply the j-th chunk's dO by w, and its scaled queries x by -w dO . O, another tile. The result is the vector."""
        weights = tiles.vectors.wait(j)
        warpgroup.store(tiles.weighted, self.dtype(fp32(x) * warpgroup.load(subtile(weights, CHUNK, 1), SCORES.col_vec)))
        w = warpgroup.load(subtile(weights, CHUNK, 0), SCORES.col_vec)
        warpgroup.store(douts, self.dtype(fp32(warpgroup.load(douts, rt(16, COLUMNS, self.dtype))) * w))
        return weights

    @inlined
    def prepare(self, tiles, j, queries, douts, remaining, scale):
        """(the rows whose features are summed, the sum of their weights). Multiplies queries by the scale, and dO by w."""
        x, total = warpgroup.load(queries, rt(16, BASE, self.dtype)) * scale, float32(0)
        if self.normalize:
            warpgroup.store(queries, x)
            total = tile_sum(load(subtile(self.weigh(tiles, j, x, douts), CHUNK, 1), SCORES.row_vec))
            tiles.vectors.release(j)
        return x, total

    @inlined
    def weighted(self, tiles, queries):
        """The tile of -w (dO . O) scale q, of which z and Z are sums (taylor_sums.py)."""
        return tiles.weighted
