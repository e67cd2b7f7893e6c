"""Gradients of softmax attention for Hopper, with a software-pipelined loop: backward_hopper.py with other products during
exponentials.

After the scores of the next query tile, two more products are issued: dK of this tile, and the part of dQ of the tile before.
They run while the next P is computed, and no consumer waits for the other one's dS. dV runs while dS is computed, and the part
of dQ that TMA adds is published together with dS, under one fence. This takes some more registers, so it is for variants that
leave scores as they are, and heads of up to 128 columns (`serves`); narrow heads have backward_narrow_hopper.py."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, subtile, turned, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.backward import pipeline_hopper
from ...parts.backward.pipeline_hopper import CONSUMERS, DQ_WARPS, FIRST_DQ_WARP, LOAD_WARP, REGISTERS
from ...parts.variant import Variant
from ...parts.visibility import CAUSAL, FULL

HEAD_DIM = 128  # padded


@dataclass(frozen=True)
class Config(pipeline_hopper.Config):
    """The kernel's configuration. Each consumer has 64 keys, and one part of dQ."""

    def __str__(self):
        return super().__str__() + " folded"


def serves(head_dim: int, variant: Variant, value_dim: int | None = None) -> bool:
    """Is this kernel for such head dims and such a variant? It knows of no derivative of a score."""
    return max(head_dim, value_dim or 0) <= HEAD_DIM and variant.fits_folded_backward and not variant.nonlinear


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: Variant, value_dim: int | None = None, **fields: Any) -> Config:
    """The configuration for a problem. fields: `deterministic`, `stores_first`."""
    return Config(HEAD_DIM, HEAD_DIM, dtype, variant, CONSUMERS * warpgroup.ROWS, warpgroup.ROWS, **fields)


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
    DK, DV, S = rt(16, config.head_dim, fp32), rt(16, config.value_dim, fp32), rt(ROWS, 16, fp32, "col")
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = REGISTERS
    smem = pipeline_hopper.memory(config)
    load_tiles, add_dq = pipeline_hopper.make_load(config), pipeline_hopper.make_add_dq(config)
    next_tile = pipeline_hopper.make_next_tile(config)

    @inlined
    def compute_p(j, s, masked, rings, wg, ctx, key, scale):
        """P^T of query tile j, whose scores are s."""
        q, do, ds_ring, dq_ring, lse_delta, bias = rings
        lse = load(subtile(lse_delta.wait(j), ROWS, 0), S.col_vec)
        s, _ = variant.score_and_grad(turned(s), ctx, key)
        return tiling.weights(s, lse, masked, ctx, key, scale)

    @inlined
    def compute_ds(j, p, dv, v_tile, rings, wg):
        """(dS^T of query tile j, for dK; dV, pending), where p is P of the tile. dS is also stored in shared memory, for dQ."""
        q, do, ds_ring, dq_ring, lse_delta, bias = rings
        v_rows = subtile(v_tile, EACH, warpgroup.id())  # not `wg`: descriptors held over the loop spill registers
        dp = warpgroup.mm_ABt(v_rows, do.wait(j))
        p16 = INPUT(turned(p))
        dv = warpgroup.mma_AB(dv, p16, do.wait(j))
        dp = turned(warpgroup.wait(dp, newer=1))
        ds = INPUT(turned(p * (dp - load(subtile(lse_delta.wait(j), ROWS, 1), S.col_vec))))
        warpgroup.store_transposed(subtile(ds_ring.claim(j), ROWS, 0, EACH, wg), ds)
        ds_ring.publish(j)
        lse_delta.release(j, None, False)
        return ds, dv

    @inlined
    def store_dq(j, part, rings, wg):
        """Release dS of query tile j, and store this consumer's part of dQ of the tile for one of the DQ_WARPS."""
        q, do, ds_ring, dq_ring, lse_delta, bias = rings
        ds_ring.release(j)
        warpgroup.store_fragment(dq_ring.claim(PARTS * j + wg), part)

    def make_step(with_dq):
        """The step from one query tile to the next. Every step but the first also computes a part of dQ (`with_dq`)."""

        @inlined
        def step(j, ds, dk, dv, masked, rings, kv, wg, ctx, key, scale):
            q, do, ds_ring, dq_ring, lse_delta, bias = rings
            k_rows, v_tile, k = kv
            s = warpgroup.mm_ABt(k_rows, q.wait(j + 1))
            dk = warpgroup.mma_AB(dk, ds, q.wait(j))
            if with_dq:
                part = parts.start_dq(wg, ds_ring.wait(j - 1), k.wait(0))
            s = warpgroup.wait(s, newer=2 if with_dq else 1)
            warp_key = int32(key + EACH * wg + S.cols * warpgroup.rank())  # computed anew, to save registers
            p = compute_p(j + 1, s, masked, rings, wg, ctx, warp_key, scale)
            if with_dq:
                part = warpgroup.wait(part)
            dk = warpgroup.wait(dk)
            q.release(j)
            if with_dq:
                store_dq(j - 1, part, rings, wg)
            ds, dv = compute_ds(j + 1, p, dv, v_tile, rings, wg)
            if with_dq:
                dq_ring.publish(PARTS * (j - 1) + wg, False)
            dv = warpgroup.wait(dv)
            do.release(j + 1)
            return ds, dk, dv

        return step

    first_step, step = make_step(False), make_step(True)

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
        tiles = int32(group * q_tiles.n)
        if wg == CONSUMERS:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            if warpgroup.rank() == LOAD_WARP:
                arrays, load_rings = (gK, gV, gQ, gDO, gLseDelta), (k, v, q, do, lse_delta, bias)
                load_tiles(arrays, load_rings, seq, block, divmod(dkv_head, partials)[0], q_tiles, key, ctx, group, 0)
            if FIRST_DQ_WARP <= warpgroup.rank() < FIRST_DQ_WARP + DQ_WARPS:
                add_dq(gDQAccum, dq_ring, block, divmod(batch_head, splits)[0], q_tiles, key, ctx, group, 0)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            dk, dv = zeros(DK), zeros(DV)
            if tiles > 0:
                tile_ctx = ctx._replace(row=int32(ROWS * order.first_visited(q_tiles))).precompute(variant)
                k_tile, v_tile = k.wait(0), v.wait(0)
                q_tiles.clear(k_tile, CONSUMERS)
                q_tiles.clear(v_tile, CONSUMERS)
                rings = q, do, ds_ring, dq_ring, lse_delta, bias
                kv = subtile(k_tile, EACH, wg), v_tile, k
                warp_key, i = int32(key + EACH * wg + S.cols * warpgroup.rank()), int32(0)
                s = warpgroup.wait(warpgroup.mm_ABt(kv[0], q.wait(0)))
                masked = tiling.needs_mask(q_tiles, order.visit_index(q_tiles.n, i))
                p = compute_p(i, s, masked, rings, wg, tile_ctx, warp_key, scale)
                ds, dv = compute_ds(i, p, dv, kv[1], rings, wg)
                dv = warpgroup.wait(dv)
                do.release(0)
                if tiles > 1:
                    i, tile_ctx = next_tile(i, q_tiles, tile_ctx)
                    masked = tiling.needs_mask(q_tiles, order.visit_index(q_tiles.n, i))
                    ds, dk, dv = first_step(int32(0), ds, dk, dv, masked, rings, kv, wg, tile_ctx, key, scale)
                for j in range(int32(1), int32(tiles - 1)):
                    i, tile_ctx = next_tile(i, q_tiles, tile_ctx)
                    masked = tiling.needs_mask(q_tiles, order.visit_index(q_tiles.n, i))
                    ds, dk, dv = step(int32(j), ds, dk, dv, masked, rings, kv, wg, tile_ctx, key, scale)
                last = int32(tiles - 1)
                dk = warpgroup.wait(warpgroup.mma_AB(dk, ds, q.wait(last)))
                q.release(last)
                for j in range(max(0, last - 1), tiles):
                    store_dq(j, warpgroup.wait(parts.start_dq(wg, ds_ring.wait(j), k.wait(0))), rings, wg)
                    dq_ring.publish(PARTS * j + wg)
            row = seq.offset_k + key + EACH * wg
            warpgroup.store(gDK, INPUT(dk * unit), (seq.batch, row, dkv_head, 0), 1, 3, True)
            warpgroup.store(gDV, INPUT(dv), (seq.batch, row, dkv_head, 0), 1, 3, True)

    return compute_dq_dk_dv, smem
