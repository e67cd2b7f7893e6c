"""Gradients of softmax attention for Hopper, for narrow heads. Two warpgroups, the consumers, compute P, dS and dV of 64 keys
each. They store dS in shared memory, and a third warpgroup computes dK and dQ from dS of all keys of the block.

So a warpgroup that computes exponentials never waits for a product of dQ, stores one, or holds dK. The dS of a query tile is
published while the scores of the next tile are computed. The third warpgroup computes dK^T = Q^T dS, with dS of all keys as the
right operand, because that reads less shared memory than dK = dS^T Q. dQ is summed as in backward_hopper.py. 512 threads have
registers for this if heads have up to 64 columns and the variant needs few (`serves`).

If the variant changes scores, the consumers compute P in turns (ping-pong), so that the exponentials of one run during the
products of the other, and not at the same time as its exponentials."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, store, subtile, transpose, turned, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.backward import pipeline_hopper
from ...parts.backward.pipeline_hopper import CONSUMER_WARPS, CONSUMERS, DQ_WARPS, FIRST_DQ_WARP, LOAD_WARP
from ...parts.variant import Variant
from ...parts.visibility import CAUSAL, FULL

DKDQ, PRODUCER = CONSUMERS, CONSUMERS + 1  # the third warpgroup, which computes dK and dQ, and the fourth
REGISTERS = (24, 136, 176)  # of each thread of the producer, of the warpgroup for dK and dQ, of a consumer
HEAD_DIM, QUERIES = 64, 128  # columns of a head, padded; queries of a tile


@dataclass(frozen=True)
class Config(pipeline_hopper.Config):
    """The kernel's configuration. Each consumer has 64 keys."""

    @property
    def threads(self) -> int:
        """The number of threads of a thread block: the consumers, the warpgroup for dK and dQ, and the producer."""
        return warpgroup.THREADS * (PRODUCER + 1)

    def __str__(self):
        return super().__str__() + " narrow"


def serves(head_dim: int, variant: Variant, value_dim: int | None = None) -> bool:
    """Is this kernel for such head dims and such a variant?"""
    return max(head_dim, value_dim or 0) <= HEAD_DIM and variant.fits_narrow_backward


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: Variant, value_dim: int | None = None, **fields: Any) -> Config:
    """The configuration for a problem. fields: `deterministic`, `stores_first`."""
    shape = CONSUMERS * warpgroup.ROWS, QUERIES
    ds_stages = 1 if variant.tma_bias else 2  # shared memory holds no more
    return Config(HEAD_DIM, HEAD_DIM, dtype, variant, *shape, stages=3, ds_stages=ds_stages, rounded_p=True, **fields)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture."""
    if target.has_wgmma:
        for input_dtype, variant in itertools.product((bf16, fp16) if everything else (bf16,), (FULL, CAUSAL)):
            yield config_for(HEAD_DIM, input_dtype, variant)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, EACH = config.kv, config.rows, warpgroup.ROWS  # keys of a block, queries of a tile, keys of a consumer
    PARAMS, AUX, INPUT, order, bias_tiles = config.params, config.aux, config.dtype, config.order, config.bias_tiles
    variant, tiling, parts, sequences, PARTS = config.variant, config.tiling, config.parts, config.sequences, config.parts.count
    DK, DV, S = rt(16, KV, fp32), rt(16, config.value_dim, fp32), rt(ROWS, 16, fp32, "col")  # of dK^T a warp has 16 columns
    DKDQ_WARPS, NONLINEAR, PING_PONG = warpgroup.WARPGROUP, variant.nonlinear, variant.changes_scores
    PRODUCER_REGISTERS, DKDQ_REGISTERS, CONSUMER_REGISTERS = REGISTERS
    smem = shared(
        k=ring(config.key, 1, CONSUMER_WARPS),
        v=ring(config.value, 1, CONSUMER_WARPS),
        q=ring(config.query, config.stages, CONSUMER_WARPS + DKDQ_WARPS),
        do=ring(config.dout, config.do_stages, CONSUMER_WARPS),
        ds=ring(st(ROWS, KV, INPUT), config.ds_stages, DKDQ_WARPS, CONSUMER_WARPS),
        dq=ring(parts.part_tile, config.dq_stages, 1, DKDQ_WARPS),
        lse_delta=ring(config.lse_delta, config.stages, CONSUMER_WARPS),
        **bias_tiles.rings(1, CONSUMER_WARPS),
    )
    ping_pong = warpgroup.ping_pong(CONSUMERS)

    @inlined
    def publish_ds(j, rings):
        """Publish dS of query tile j, and release its lse and delta."""
        q, do, ds_ring, dq_ring, lse_delta, bias = rings
        ds_ring.publish(j)
        lse_delta.release(j, None, False)

    @inlined
    def step(j, dv, masked, rings, k_rows, v_rows, ctx, key, scale):
        """dV with the contribution of query tile j, whose P and dS this computes. dS is stored in shared memory."""
        q, do, ds_ring, dq_ring, lse_delta, bias = rings
        s = warpgroup.mm_ABt(k_rows, q.wait(j))
        if j > 0:
            publish_ds(j - 1, rings)  # only now: the fence waits for the stores of dS, while the scores are computed
        vectors = lse_delta.wait(j)
        s = turned(warpgroup.wait(s))
        if PING_PONG:
            ping_pong.take(warpgroup.id())
        q.release(j)
        warp_key = int32(key + EACH * warpgroup.id() + S.cols * warpgroup.rank())  # computed anew, to save registers
        ctx = bias_tiles.load_columns(bias, j, ctx, warpgroup.id())
        bias_tiles.release(bias, j)
        s, grad = variant.score_and_grad(s, ctx, warp_key)
        if NONLINEAR:
            grad = INPUT(grad)  # to save registers
        p = tiling.weights(s, load(subtile(vectors, ROWS, 0), S.col_vec), masked, ctx, warp_key, scale)
        if PING_PONG:
            ping_pong.give(warpgroup.id())
        do_tile = do.wait(j)
        dp = warpgroup.mm_ABt(v_rows, do_tile)
        p16 = INPUT(turned(p))
        dv = warpgroup.mma_AB(dv, p16, do_tile)
        dp = turned(warpgroup.wait(dp, newer=1))
        delta = load(subtile(vectors, ROWS, 1), S.col_vec)
        ds = fp32(turned(p16)) * (dp - delta)  # from the rounded P, which takes fewer registers
        if NONLINEAR:
            ds = ds * fp32(grad)
        warpgroup.store_transposed(subtile(ds_ring.claim(j), ROWS, 0, EACH, warpgroup.id()), INPUT(turned(ds)))
        dv = warpgroup.wait(dv)
        do.release(j)
        return dv

    @inlined
    def store_dq(n, part, dq_ring):
        """Store part n of dQ in shared memory for one of the DQ_WARPS."""
        warpgroup.store_fragment(dq_ring.claim(n), part)
        dq_ring.publish(n)

    @inlined
    def accumulate_dk(j, dk, rings, k_tile):
        """dK^T with the contribution of query tile j. This also computes the two parts of dQ of the tile, and stores the first
        of them while the other products run."""
        q, do, ds_ring, dq_ring, lse_delta, bias = rings
        ds_tile, q_tile = ds_ring.wait(j), q.wait(j)
        part = parts.start_dq(0, ds_tile, k_tile)
        dk = warpgroup.mma_AtB(dk, q_tile, ds_tile)
        store_dq(PARTS * j, warpgroup.wait(part, newer=1), dq_ring)
        part = parts.start_dq(1, ds_tile, k_tile)
        dk = warpgroup.wait(dk, newer=1)
        q.release(j)
        part = warpgroup.wait(part)
        ds_ring.release(j)
        store_dq(PARTS * j + 1, part, dq_ring)
        return dk

    load_tiles, add_dq = pipeline_hopper.make_load(config), pipeline_hopper.make_add_dq(config)
    next_tile = pipeline_hopper.make_next_tile(config)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def compute_dq_dk_dv(
        gQ: tiled(config.query), gK: tiled(config.key), gV: tiled(config.value),
        gDO: tiled(config.dout), gLseDelta: tiled(config.lse_delta, 3, None, 2), gDQAccum: tiled(parts.part_tile, 3, 1, 2),
        gDK: array(4, INPUT), gDV: array(4, INPUT), params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT,
        raster_group: INT, group: INT, partials: INT, splits: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of a key block, and what it adds to dQ. backward_hopper.py documents the parameters."""
        memory = smem.open()
        k, v, q, do, lse_delta = memory.k, memory.v, memory.q, memory.do, memory.lse_delta
        ds_ring, dq_ring, bias = memory.ds, memory.dq, bias_tiles.ring_of(memory)
        grid.follow()
        wg = warpgroup.id()
        block, batch_head = order.locate_block(tiling, cuda.blockIdx.x, blocks, batch_heads, raster_group)
        batch, dkv_head = divmod(batch_head, heads)
        head_group, split = divmod(dkv_head, splits)
        seq, key = sequences.sequence(batch, params), int32(KV * block)
        ctx = seq.context(batch, group * head_group, int32(0), params, aux)
        q_tiles = tiling.take_split(tiling.query_tiles(key, ctx, group), split, splits)
        tiles, row = int32(group * q_tiles.n), seq.offset_k + key
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            if warpgroup.rank() == LOAD_WARP:
                arrays, load_rings = (gK, gV, gQ, gDO, gLseDelta), (k, v, q, do, lse_delta, bias)
                load_tiles(arrays, load_rings, seq, block, divmod(dkv_head, partials)[0], q_tiles, key, ctx, group, 0)
            if FIRST_DQ_WARP <= warpgroup.rank() < FIRST_DQ_WARP + DQ_WARPS:
                add_dq(gDQAccum, dq_ring, block, divmod(batch_head, splits)[0], q_tiles, key, ctx, group, 0)
        elif wg == DKDQ:
            warpgroup.claim_registers(DKDQ_REGISTERS)
            dk, rings = zeros(DK), (q, do, ds_ring, dq_ring, lse_delta, bias)
            if tiles > 0:
                k_tile = k.wait(0)
                for j in range(tiles):
                    dk = accumulate_dk(int32(j), dk, rings, k_tile)
            store(gDK, transpose(INPUT(dk * unit)), (seq.batch, row, dkv_head, 16 * warpgroup.rank()), 1, 3, True)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            if PING_PONG:
                ping_pong.begin(wg)
            dv, rings = zeros(DV), (q, do, ds_ring, dq_ring, lse_delta, bias)
            if tiles > 0:
                tile_ctx = ctx._replace(row=int32(ROWS * order.first_visited(q_tiles)))
                tile_ctx, i = tile_ctx._replace(precomputed=variant.precompute(tile_ctx)), int32(0)
                k_tile, v_tile = k.wait(0), v.wait(0)
                q_tiles.clear(k_tile, CONSUMERS)
                q_tiles.clear(v_tile, CONSUMERS)
                k_rows, v_rows = subtile(k_tile, EACH, wg), subtile(v_tile, EACH, wg)
                last = int32(0)
                for j in range(tiles):
                    if j > 0:
                        i, tile_ctx = next_tile(i, q_tiles, tile_ctx)
                    last = int32(j)
                    masked = tiling.needs_mask(q_tiles, order.visit_index(q_tiles.n, i))
                    dv = step(int32(j), dv, masked, rings, k_rows, v_rows, tile_ctx, key, scale)
                publish_ds(last, rings)
            warpgroup.store(gDV, INPUT(dv), (seq.batch, row + EACH * wg, dkv_head, 0), 1, 3, True)

    return compute_dq_dk_dv, smem
