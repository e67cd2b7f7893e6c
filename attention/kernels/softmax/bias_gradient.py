"""The gradient of a bias, on every GPU and for every bias (bias_gradient_hopper.py computes it where TMA loads the bias): a
thread block has a tile of dBias, and sums dS over all heads, batches and query tiles that share this tile, one after the other,
in registers."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import block, col_sum, divmod, zeros
from tiles import bf16, fp32, shared, sv
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import FLOAT, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.backward import recomputed_scores
from ...parts.backward.dq_parts import WARP_ROWS
from ...parts.backward.gradient_outputs import float32_output
from ...parts.scores import ScoreBias


@dataclass(frozen=True)
class Config(recomputed_scores.Config):
    """recomputed_scores.Config, and: one_row: is the bias the same for all queries? accumulate: is the gradient added to what
    the array holds?"""

    one_row: bool = field(kw_only=True)
    accumulate: bool = field(default=False, kw_only=True)

    def __str__(self):
        return super().__str__() + ", one row" * self.one_row + ", accumulates" * self.accumulate


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture: bf16, rows that begin at multiples of 16 bytes."""
    for padded, (queries, kv) in recomputed_scores.SHAPES.items():
        for one_row in (False, True):
            read, main_rows = recomputed_scores.BiasRead(None), 64
            tiles = kv, queries, main_rows, None, VECTOR_SIZES[0]
            yield Config(padded, padded, bf16, ScoreBias(True), *tiles, None, read, one_row=one_row)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, KV, ONE_ROW, INPUT, PARAMS, AUX = config.rows, config.kv, config.one_row, config.dtype, config.params, config.aux
    scores, sequences, result = recomputed_scores.recomputation(config), config.sequences, float32_output(config.accumulate)
    S = scores.tile
    smem = shared(**recomputed_scores.tile_buffers(config), scratch=sv(KV * config.warps, fp32))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def bias_gradient(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDO: array(4, INPUT), gLseDelta: array(3),
        gDBias: array(4), params: PARAMS, aux: AUX, bias_heads: INT, bias_q_tiles: INT, blocks: INT, batches: INT, heads: INT,
        tiles: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """A tile of dBias, which has `bias_heads` heads and `bias_q_tiles` query tiles; `batches`, `heads` and `tiles` share
        it. The weight of a score s is exp2(`scale` s - lse); `group` query heads share a key head."""
        q, k, v, do, scratch = smem.open()
        rest, number = divmod(cuda.blockIdx.x, blocks)
        rest, bias_tile = divmod(rest, bias_q_tiles)
        bias_batch, bias_head = divmod(rest, bias_heads)
        total, n = zeros(S), int32(0)
        for m in range(batches * heads * tiles):
            batch_head, tile = divmod(int32(m), tiles)
            batch, head = divmod(batch_head, heads)
            batch, head, tile = int32(bias_batch + batch), int32(bias_head + head), int32(bias_tile + tile)
            seq = sequences.sequence(batch, params)
            ctx = seq.context(batch, head, int32(0), params, aux)
            if scores.may_see(tile, number, ctx):
                arrays, buffers = (gQ, gK, gV, gDO), (q, k, v, do)
                w, _, _, _ = scores.weighted_ds(n, tile, number, ctx, seq, group, buffers, arrays, gLseDelta, scale)
                total, n = total + w, int32(n + 1)
                block.sync()
        key, warp = int32(KV * number), int32(cuda.threadIdx.x // LANES)
        if ONE_ROW:
            dbias = block.reduce_sum(col_sum(total), scratch)
            if warp == 0:
                result.store_vector(gDBias, dbias, S.row_vec, (bias_batch, bias_head, int32(0), key))
        else:
            result.store_tile(gDBias, total, (bias_batch, bias_head, int32(ROWS * bias_tile + WARP_ROWS * warp), key))

    return bias_gradient, smem
