"""The gradient of a bias that has an element for each score, for Hopper: bias_gradient.py for a bias whose tiles TMA loads.

A thread block goes through several tiles of dBias. For each tile it sums dS over the heads and batches that share the tile, in
registers and in a fixed order. Scores and dP are computed once more, which is two of the five products of backward. The
producer works ahead, so that the arrays for the next tile arrive while the sum of this one is stored."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda
from numpy import int32

from ops import divmod, load, subtile, warpgroup, zeros
from tiles import bf16, fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.backward.gradient_outputs import float32_output
from ...parts.base_config import BaseConfig
from ...parts.scores import TmaBias
from ...parts.sequences import BatchedLayout
from ...parts.tiling import zero_first_keys, zero_last_keys
from ...parts.variant import CombinedVariant
from ...parts.visibility import CAUSAL

CONSUMERS, REGISTERS = 2, (40, 232)  # registers a thread of producer and consumer
KV = {64: 96, 128: 64}  # padded head_dim: keys of a tile
STAGES = 2


@dataclass(frozen=True)
class Config(BaseConfig):
    """The kernel's configuration. main_rows: queries of the main kernel's tiles, in which `prepare` stores lse and delta.
    accumulate: is the gradient added to what the array holds?"""

    main_rows: int = field(kw_only=True)
    accumulate: bool = field(default=False, kw_only=True)
    rows = CONSUMERS * warpgroup.ROWS

    @property
    def threads(self) -> int:
        """The number of threads of a thread block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (CONSUMERS + 1)

    def __str__(self):
        return super().__str__() + f", {self.main_rows} main rows" + ", accumulates" * self.accumulate


def serves(main: BaseConfig) -> bool:
    """Does this kernel serve the gradient of a bias, to which no score function is applied, if this is the main kernel's
    configuration?"""
    variant = main.variant
    plain = main.seq_layout is BatchedLayout and not (main.by_list or main.axes or variant.uses_random)
    return variant.tma_bias is not None and main.head_dim in KV and plain


def config_for(main: BaseConfig, accumulate: bool) -> Config:
    """The configuration that goes with this main kernel."""
    shape = main.head_dim, main.value_dim, main.dtype, main.variant, KV[main.head_dim]
    return Config(*shape, axes=main.axes, main_rows=main.rows, accumulate=accumulate)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture."""
    if target.has_wgmma:
        for head_dim, main_rows in ((64, 128), (128, 64)):
            variant = CombinedVariant(CAUSAL, TmaBias(True, False, bf16))
            yield Config(head_dim, head_dim, bf16, variant, KV[head_dim], main_rows=main_rows)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, COLS, EACH, MAIN_ROWS = config.rows, config.kv, warpgroup.ROWS, config.main_rows
    PARAMS, AUX, variant, tiling, bias_tiles = config.params, config.aux, config.variant, config.tiling, config.bias_tiles
    sequences, result = config.sequences, float32_output(config.accumulate)
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = REGISTERS
    S, readers = rt(16, COLS, fp32), CONSUMERS * warpgroup.WARPGROUP
    DOUT = st(ROWS, config.value_dim, config.dtype)
    smem = shared(
        q=ring(config.query, STAGES, readers),
        k=ring(config.key, STAGES, readers),
        v=ring(config.value, STAGES, readers),
        do=ring(DOUT, STAGES, readers),
        **bias_tiles.rings(STAGES, readers),
    )

    @inlined
    def tile_of(m, bias_heads, bias_q_tiles, blocks, params, aux):
        """(the context of the m-th tile's first query and head, its first key, do its queries see any of its keys, must its
        scores be masked?)"""
        rest, number = divmod(int32(m), blocks)
        rest, tile = divmod(rest, bias_q_tiles)
        batch, head = divmod(rest, bias_heads)
        seq, row, key = sequences.sequence(batch, params), int32(ROWS * tile), int32(COLS * number)
        ctx = seq.context(batch, head, row, params, aux)
        keys = variant.key_range(row, row + ROWS - 1, ctx)
        masked = key < keys.inner_first or key + COLS > keys.inner_end
        return ctx, key, keys.first < key + COLS and key < keys.end, masked

    @inlined
    def compute_ds(n, tile, rings, gLseDelta, ctx, key, masked, wg, scale):
        """dS of a consumer's rows, for the n-th tiles of Q, dO, K and V that the producer loaded."""
        q, k, v, do = rings
        s = warpgroup.mm_ABt(subtile(q.wait(n), EACH, wg), k.wait(n))
        values = v.wait(n)
        zero_first_keys(values, tiling.unseen_at_start(key, ctx), CONSUMERS)
        zero_last_keys(values, tiling.unseen_at_end(key + COLS, ctx), CONSUMERS)
        dp = warpgroup.mm_ABt(subtile(do.wait(n), EACH, wg), values)
        index = int32(2 * MAIN_ROWS * (ctx.row // MAIN_ROWS) + ctx.row % MAIN_ROWS)
        lse = load(gLseDelta, S.col_vec, (ctx.batch, ctx.head, index))
        delta = load(gLseDelta, S.col_vec, (ctx.batch, ctx.head, int32(index + MAIN_ROWS)))
        ctx = bias_tiles.load_rows_of_tile(tile, ctx.precompute(variant), wg)
        s = warpgroup.wait(s, newer=1)
        q.release(n)
        k.release(n)
        s, _ = variant.score_and_grad(s, ctx, key)
        p = tiling.weights(s, lse, masked, ctx, key, scale)
        dp = warpgroup.wait(dp)
        do.release(n)
        v.release(n)
        return p * (dp - delta)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def bias_gradient(
        gQ: tiled(config.query), gK: tiled(config.key), gV: tiled(config.value), gDO: tiled(DOUT), gLseDelta: array(3),
        gDBias: array(4), params: PARAMS, aux: AUX, dbias_tiles: INT, bias_heads: INT, bias_q_tiles: INT, blocks: INT,
        batches: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Tile number blockIdx, and every gridDim-th after it, of the `dbias_tiles` tiles of dBias, which has `bias_heads`
        heads, `bias_q_tiles` query tiles and `blocks` key blocks; `batches` and `heads` share each. The weight of a score s is
        exp2(`scale` s - lse); `group` query heads share a key head."""
        memory = smem.open()
        q, k, v, do, tiles = memory.q, memory.k, memory.v, memory.do, bias_tiles.ring_of(memory)
        wg = warpgroup.id()
        t = n = int32(0)  # dBias tiles, and tiles of Q and K, so far
        if wg == CONSUMERS:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            for m in range(cuda.blockIdx.x, dbias_tiles, cuda.gridDim.x):
                ctx, key, visible, _ = tile_of(m, bias_heads, bias_q_tiles, blocks, params, aux)
                if visible:
                    bias_tiles.fill(tiles, t, params, (ctx.batch, ctx.head, ctx.row, key // COLS))
                    for i in range(batches * heads):
                        batch, head = divmod(int32(i), heads)
                        batch, head = int32(ctx.batch + batch), int32(ctx.head + head)
                        q.fill(n, gQ, (batch, ctx.row // ROWS, head))
                        k.fill(n, gK, (batch, key // COLS, head // group))
                        do.fill(n, gDO, (batch, ctx.row // ROWS, head))
                        v.fill(n, gV, (batch, key // COLS, head // group))
                        n = int32(n + 1)
                    t = int32(t + 1)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            rings = q, k, v, do
            for m in range(cuda.blockIdx.x, dbias_tiles, cuda.gridDim.x):
                ctx, key, visible, masked = tile_of(m, bias_heads, bias_q_tiles, blocks, params, aux)
                row, total = int32(ctx.row + EACH * wg + S.rows * warpgroup.rank()), zeros(S)
                if visible:
                    tile = tiles.wait(t)
                    for i in range(batches * heads):
                        batch, head = divmod(int32(i), heads)
                        head_ctx = ctx._replace(batch=int32(ctx.batch + batch), head=int32(ctx.head + head), row=row)
                        total = total + compute_ds(n, tile, rings, gLseDelta, head_ctx, key, masked, wg, scale)
                        n = int32(n + 1)
                    bias_tiles.release(tiles, t)
                    t = int32(t + 1)
                result.store_tile(gDBias, total, (ctx.batch, ctx.head, row, key))

    return bias_gradient, smem
