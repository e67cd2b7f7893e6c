"""The gradient of a bias: a thread block has a tile of it, and goes one after the other through all heads, batches and tiles of
queries that share this tile."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import block, col_sum, divmod, zeros
from tiles import bf16, fp32, shared, sv
from tiles.arguments import FLOAT, INT, array
from tiles.cp_async import PIECES
from tiles.layout import LANES

from ..scores import Biased
from ..variants import ScoreContext
from . import recomputed_scores
from .dq_parts import BAND
from .results import of_sums


@dataclass(frozen=True)
class Config(recomputed_scores.Config):
    """See recomputed_scores.Config. one_row: the bias is the same for all queries. adds: the gradient is added to what is
    there."""

    one_row: bool = field(kw_only=True)
    adds: bool = field(default=False, kw_only=True)

    def __str__(self):
        return super().__str__() + ", one row" * self.one_row + ", adds" * self.adds


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What an architecture is served with: bf16, whole pieces."""
    for padded, (queries, kv) in recomputed_scores.SHAPES.items():
        for one_row in (False, True):
            read, others = recomputed_scores.Added(None), 64
            yield Config(padded, padded, bf16, Biased(True), kv, queries, others, None, PIECES[0], None, read, one_row=one_row)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, KV, ONE_ROW, INPUT, PARAMS, AUX = config.rows, config.kv, config.one_row, config.dtype, config.params, config.aux
    scores, sequences, result = recomputed_scores.recomputed(config), config.sequences, of_sums(config.adds)
    S = scores.tile
    smem = shared(**recomputed_scores.room(config), sums=sv(KV * config.warps, fp32))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def biased(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDO: array(4, INPUT), gSums: array(3), gDBias: array(4),
        params: PARAMS, aux: AUX, own_heads: INT, own_tiles: INT, blocks: INT, batches: INT, heads: INT, tiles: INT, group: INT,
        scale: FLOAT,
    ):  # fmt: skip
        """A tile of dBias, which has `own_heads` heads and `own_tiles` tiles of queries; `batches`, `heads` and `tiles` share
        it. The weight of a score s is exp2(`scale` s - lse); `group` query heads share a key head."""
        q, k, v, do, sums = smem.open()
        rest, number = divmod(cuda.blockIdx.x, blocks)
        rest, own_tile = divmod(rest, own_tiles)
        own_batch, own_head = divmod(rest, own_heads)
        total, n = zeros(S), int32(0)
        for m in range(batches * heads * tiles):
            batch_head, tile = divmod(int32(m), tiles)
            batch, head = divmod(batch_head, heads)
            batch, head, tile = int32(own_batch + batch), int32(own_head + head), int32(own_tile + tile)
            seq = sequences.sequence(batch, params)
            ctx = ScoreContext(batch, head, int32(0), seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0)
            if scores.seen(tile, number, ctx):
                arrays, rooms = (gQ, gK, gV, gDO), (q, k, v, do)
                w, _, _, _ = scores.weighted(n, tile, number, ctx, seq, group, rooms, arrays, gSums, scale)
                total, n = total + w, int32(n + 1)
                block.sync()
        key, warp = int32(KV * number), int32(cuda.threadIdx.x // LANES)
        if ONE_ROW:
            found = block.reduce_sum(col_sum(total), sums)
            if warp == 0:
                result.store_vector(gDBias, found, S.row_vec, (own_batch, own_head, int32(0), key))
        else:
            result.store_sums(gDBias, total, (own_batch, own_head, int32(ROWS * own_tile + BAND * warp), key))

    return biased, smem
