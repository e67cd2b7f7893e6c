"""What a chunk adds to Based's state and sum of features, and to their gradients, for the kernel that computes both
(based_states_hopper.py)."""

from numpy import float32

from ops import load, tile_sum, truncate, warpgroup
from ops.for_attention.taylor_features import BASE
from tiles import dtype, fp32, inlined, rt, static

from .tokens import CHUNK, COLUMNS, SequenceLayout

SCORES = rt(16, CHUNK, fp32)


@static
class KeySide:
    """The sums of f(k)^T v and f(k). squares: what features multiply squares by."""

    dtype: dtype
    normalize: bool
    seq_layout: SequenceLayout
    squares = 0.5

    @inlined
    def prepare(self, tiles, keys, values, gWeights, gDNormalizers, seq, j, head, scale):
        """(the rows whose features are summed, the sum of their weights)."""
        return warpgroup.load(keys, rt(16, BASE, self.dtype)), float32(min(seq.remaining(j), CHUNK))

    @inlined
    def weighted(self, tiles, keys):
        """The tile of weighted rows."""
        return keys


@static
class QuerySide:
    """The sums of f(scale q)^T w dO and -w (dO . O) f(scale q). squares: what features multiply squares by."""

    dtype: dtype
    normalize: bool
    seq_layout: SequenceLayout
    squares = 1.0

    @inlined
    def prepare(self, tiles, queries, douts, gWeights, gDNormalizers, seq, j, head, scale):
        """(the rows whose features are summed, the sum of their weights). Multiplies queries by the scale, and dO by w."""
        x, total = warpgroup.load(queries, rt(16, BASE, self.dtype)) * scale, float32(0)
        if self.normalize:
            gD, coord = truncate(gDNormalizers, 1, seq.end), (seq.batch, seq.chunk_start(j), head)
            warpgroup.store(queries, x)
            dnormalizers = warpgroup.load(gD, SCORES.col_vec, coord, cols=1)
            warpgroup.store(tiles.weighted, self.dtype(fp32(x) * dnormalizers))
            w = warpgroup.load(truncate(gWeights, 1, seq.end), SCORES.col_vec, coord, cols=1)
            warpgroup.store(douts, self.dtype(fp32(warpgroup.load(douts, rt(16, COLUMNS, self.dtype))) * w))
            total = tile_sum(load(gD, SCORES.row_vec, coord, cols=1))
        return x, total

    @inlined
    def weighted(self, tiles, queries):
        """The tile of weighted rows."""
        return tiles.weighted
