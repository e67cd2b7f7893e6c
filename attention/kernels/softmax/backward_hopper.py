"""Gradients of softmax attention for Hopper: a thread block has a block of keys and goes through the queries that see it.

Scores are computed again, keys by queries, so that P^T and dS^T are in registers as the left operands of the products for dV
and dK. Only dS goes through shared memory, once, because dQ = dS K needs all keys of the block. Consumers store parts of dQ in
shared memory, and a warp of the producer has TMA add them, in float32, to those of other key blocks. The query heads that share
a key head come one after the other, so dK and dV are summed in registers. The scores of the next tile are computed while the dQ
of this tile is on its way to the producer.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import grid, load, subtile, truncate, turned, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts import sequences
from ...parts.backward import pipeline_hopper
from ...parts.backward.config import padded_dim
from ...parts.backward.pipeline_hopper import CONSUMERS, DQ_WARPS, FIRST_DQ_WARP, LOAD_WARP, REGISTERS
from ...parts.backward.slope_gradient import NO_SLOPE_GRADIENT
from ...parts.variant import Variant
from ...parts.visibility import CAUSAL, FULL


@dataclass(frozen=True)
class Config(pipeline_hopper.Config):
    """The kernel's configuration. Each consumer has 64 keys of the block; if there are only 64, half of the columns of dK and
    dV. float32_grad: do the derivatives of scores stay in float32? Rounded, they take fewer registers."""

    float32_grad: bool = False

    @property
    def recomputes_warpgroup_id(self) -> bool:
        """Does a consumer compute its warpgroup's number again for each product with its rows of V? The descriptors of these
        rows, held over the loop, made registers spill under ALiBi and lists. Other variants would pay some instructions."""
        return self.head_dim == 128 and not (self.sequences.packed or self.variant.nonlinear)


SHAPES: dict[int, dict[str, Any]] = {  # by padded head_dim
    64: {"kv": 128, "queries": 128},
    128: {"kv": 128, "queries": 64, "rounded_p": True, "float32_grad": True, "bias_stages": 2},
    256: {"kv": 64, "queries": 64, "do_stages": 1, "ds_stages": 1},
}


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: Variant, value_dim: int | None = None, **fields: Any) -> Config:
    """The configuration for a problem: both head dims padded to the same of DIMS. fields: other fields of BackwardConfig."""
    padded = padded_dim(head_dim, value_dim)
    shape = SHAPES[padded] | ({"rounded_p": True} if variant.changes_scores or variant.uses_random else {})
    if variant.tma_bias and padded == 64:  # shared memory holds no more
        shape = shape | {"ds_stages": 1}
    if fields.get("slope_gradient", NO_SLOPE_GRADIENT) is not NO_SLOPE_GRADIENT:  # its sums of dS would keep the rounding of P
        shape = shape | {"rounded_p": False}
    return Config(padded, padded, dtype, variant, **shape, **fields)


def block_of(head_dim: int, value_dim: int) -> int:
    """The number of keys of a block, in all kernels for Hopper that add to dQ."""
    return SHAPES[padded_dim(head_dim, value_dim)]["kv"]


def computes_slopes(head_dim: int, value_dim: int, seq_layout: type[sequences.BatchedLayout]) -> bool:
    """Does this kernel also compute the gradient of slopes? It does where that was timed: elsewhere it spills more registers,
    and for wide heads two consumers have the same keys."""
    return 64 < max(head_dim, value_dim) <= 128 and seq_layout.packed


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture."""
    if target.has_wgmma:
        for input_dtype, head_dim, variant in itertools.product(
            (bf16, fp16) if everything else (bf16,), SHAPES, (FULL, CAUSAL)
        ):
            yield config_for(head_dim, input_dtype, variant)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, EACH = config.kv, config.rows, warpgroup.ROWS  # keys of a block, queries of a tile, keys of a consumer
    PARAMS, AUX, INPUT, ROUNDED = config.params, config.aux, config.dtype, config.rounded_p
    variant, tiling, parts, sequences = config.variant, config.tiling, config.parts, config.sequences
    bias_tiles, order, result, OUT = config.bias_tiles, config.order, config.result, config.result.dtype
    PARTS, NONLINEAR, UNIT = parts.count, variant.nonlinear, int(sequences.packed)
    PER_KEY = config.consumers_per_key  # consumer `wg` has keys number wg // PER_KEY and columns number wg % PER_KEY
    GRAD = fp32 if config.float32_grad else INPUT
    FENCED = PER_KEY > 1  # does a consumer need a fence of its own? Otherwise it has just published dS
    TWICE, LAST = PARTS > CONSUMERS, PARTS - CONSUMERS  # has a consumer two parts of dQ? LAST + wg is its last one
    K_COLS, V_COLS = config.head_dim // PER_KEY, config.value_dim // PER_KEY
    DK, DV, S = rt(16, K_COLS, fp32), rt(16, V_COLS, fp32), rt(ROWS, 16, fp32, "col")
    SCORES, slope_gradient, SLOPE_WARPS = rt(16, ROWS, fp32), config.slope_gradient, config.slope_warps
    RECOMPUTE_WG, (PRODUCER_REGISTERS, CONSUMER_REGISTERS) = config.recomputes_warpgroup_id, REGISTERS
    smem = pipeline_hopper.memory(config)
    load_tiles, add_dq = pipeline_hopper.make_load(config, extra_tile=True), pipeline_hopper.make_add_dq(config)

    @inlined
    def columns(tile, cols, n):
        """The n-th `cols` columns of a tile, which are a consumer's."""
        if PER_KEY > 1:
            return subtile(tile, ROWS, 0, cols, n)
        else:
            return tile

    @inlined
    def clear_tail(tile, rows):
        """A tile of Q or dO with zeros after its first `rows` rows, which are the sequence's."""
        if sequences.packed:
            sequences.zero_foreign_rows(tile, rows, CONSUMERS)
        return tile

    @inlined
    def step(j, s, dk, dv, dslope, masked, rings, k_rows, v_tile, wg, ctx, next_row, key, scale):
        """(the scores of the next query tile, whose first query is `next_row`; dK, dV and the gradient of the slope) after
        query tile j, whose scores are s."""
        k, q, do, ds_ring, dq_ring, lse_delta, bias = rings
        v_rows = subtile(v_tile, EACH, (warpgroup.id() if RECOMPUTE_WG else wg) // PER_KEY)
        dp = warpgroup.mm_ABt(v_rows, clear_tail(do.wait(j), ctx.seqlen_q - ctx.row))
        ctx = bias_tiles.load_columns(bias, j, ctx, wg // PER_KEY)
        vectors = lse_delta.wait(j)
        lse = load(subtile(vectors, ROWS, 0), S.col_vec)
        s, grad = variant.score_and_grad(s, ctx, key)
        if NONLINEAR:
            grad = GRAD(grad)
        p = tiling.weights(s, lse, masked, ctx, key, scale)
        p16 = INPUT(turned(p))
        dv = warpgroup.mma_AB(dv, variant.remove_dropped(p16), columns(do.wait(j), V_COLS, wg % PER_KEY))
        dp = turned(warpgroup.wait(dp, newer=1))
        if ROUNDED:
            p = fp32(turned(p16))
        ds = variant.score_grad(p, dp, load(subtile(vectors, ROWS, 1), S.col_vec), ctx)
        dslope = slope_gradient.add(dslope, ds, ctx, key)
        if NONLINEAR:
            ds = ds * fp32(grad)
        ds = INPUT(turned(ds))
        if wg % PER_KEY == 0:
            warpgroup.store_transposed(subtile(ds_ring.claim(j), ROWS, 0, EACH, wg // PER_KEY), ds)
            ds_ring.publish(j)
        bias_tiles.release(bias, j, FENCED)
        if j > 0:
            dq_ring.publish(PARTS * (j - 1) + LAST + wg, FENCED)  # only now: its fence waits for all stores, dS too
        lse_delta.release(j, None, FENCED)
        if TWICE:
            dk = warpgroup.mma_AB(dk, ds, columns(q.wait(j), K_COLS, wg % PER_KEY))
            dv = warpgroup.wait(dv, newer=1)
            do.release(j)
            ds_tile = ds_ring.wait(j)
            part = parts.start_dq(wg, ds_tile, k.wait(0))
            warpgroup.store_fragment(dq_ring.claim(PARTS * j + wg), warpgroup.wait(part))
            dq_ring.publish(PARTS * j + wg)
        else:
            dk = warpgroup.mma_AB(dk, ds, columns(q.wait(j), K_COLS, wg % PER_KEY))
            dv = warpgroup.wait(dv, newer=1)
            do.release(j)
            ds_tile = ds_ring.wait(j)
        part = parts.start_dq(LAST + wg, ds_tile, k.wait(0))
        s = warpgroup.mm_ABt(k_rows, clear_tail(q.wait(j + 1), ctx.seqlen_q - next_row))
        part = warpgroup.wait(part, newer=1)
        ds_ring.release(j)
        dk = warpgroup.wait(dk, newer=1)
        q.release(j)
        warpgroup.store_fragment(dq_ring.claim(PARTS * j + LAST + wg), part)
        return turned(warpgroup.wait(s)), dk, dv, dslope

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def compute_dq_dk_dv(
        gQ: tiled(config.query, unit=UNIT), gK: tiled(config.key, unit=UNIT), gV: tiled(config.value, unit=UNIT),
        gDO: tiled(config.dout, unit=UNIT), gLseDelta: tiled(config.lse_delta, 3, None, 2),
        gDQAccum: tiled(parts.part_tile, 3, 1, 2), gDK: array(4, OUT), gDV: array(4, OUT), params: PARAMS, aux: AUX,
        blocks: INT, heads: INT, batch_heads: INT, raster_group: INT, group: INT, partials: INT, splits: INT, scale: FLOAT,
        unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of one of `blocks` key blocks for one of `batch_heads` pairs of batch and head of gDK, `raster_group` of
        which are worked on at once, and what the block adds to dQ. gDK and gDV have `heads` heads, `partials` for each key head
        (backward_combine.py): one for each of `splits` parts of the query tiles of each group of `group` query heads. P =
        exp2(`scale` s
        - lse), where s is what the variant makes of `unit` Q K^T."""
        memory = smem.open()
        k, v, q, do, lse_delta = memory.k, memory.v, memory.q, memory.do, memory.lse_delta
        ds_ring, dq_ring, bias = memory.ds, memory.dq, bias_tiles.ring_of(memory)
        grid.follow()
        wg = warpgroup.id()
        block, batch_head = order.locate_block(tiling, cuda.blockIdx.x, blocks, batch_heads, raster_group)
        slope_row = int32(blocks * (batch_head // heads) + block)
        block, batch, dkv_head = sequences.find_key_block(block, batch_head, heads, KV, params)
        head_group, split = divmod(dkv_head, splits)
        seq, key = sequences.sequence(batch, params), int32(KV * block)
        if sequences.packed and wg < CONSUMERS:
            has_padding, row = sequences.padding_keys(key, batch, KV, params)
            if has_padding:
                at_keys = int32(0), int32(row + EACH * (wg // PER_KEY)), dkv_head
                result.store_warpgroup(gDK, zeros(DK), (*at_keys, K_COLS * (wg % PER_KEY)))
                result.store_warpgroup(gDV, zeros(DV), (*at_keys, V_COLS * (wg % PER_KEY)))
        if not sequences.has_key(key, batch, params):
            return
        ctx = seq.context(batch, group * head_group, int32(0), params, aux)
        q_tiles = tiling.take_split(tiling.query_tiles(key, ctx, group), split, splits)
        tiles_before = sequences.first_tile(batch, params)
        if wg == CONSUMERS:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            if warpgroup.rank() == LOAD_WARP:
                arrays, load_rings = (gK, gV, gQ, gDO, gLseDelta), (k, v, q, do, lse_delta, bias)
                load_tiles(
                    arrays, load_rings, seq, block, divmod(dkv_head, partials)[0], q_tiles, key, ctx, group, tiles_before
                )
            if FIRST_DQ_WARP <= warpgroup.rank() < FIRST_DQ_WARP + DQ_WARPS:
                add_dq(gDQAccum, dq_ring, block, divmod(batch_head, splits)[0], q_tiles, key, ctx, group, tiles_before)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            k_tile, v_tile = k.wait(0), v.wait(0)
            sequences.zero_foreign_rows(k_tile, seq.seqlen_k - key, CONSUMERS)
            sequences.zero_foreign_rows(v_tile, seq.seqlen_k - key, CONSUMERS)
            q_tiles.clear(k_tile, CONSUMERS)
            q_tiles.clear(v_tile, CONSUMERS)
            k_rows = subtile(k_tile, EACH, wg // PER_KEY)
            warp_key = int32(key + EACH * (wg // PER_KEY) + S.cols * warpgroup.rank())
            rings = k, q, do, ds_ring, dq_ring, lse_delta, bias
            q_tile = clear_tail(
                q.wait(0), seq.seqlen_q - ROWS * tiling.tile_index(q_tiles, order.visit_index(q_tiles.n, 0), key, ctx, group)
            )
            s, dk, dv = turned(warpgroup.wait(warpgroup.mm_ABt(k_rows, q_tile))), zeros(DK), zeros(DV)
            j = int32(0)
            for h in range(group):
                base_ctx = ctx._replace(head=int32(group * head_group + h))
                precomputed, dslope = variant.precompute(base_ctx), slope_gradient.init(SCORES)
                for i in range(q_tiles.n):
                    index = order.visit_index(q_tiles.n, i)
                    next_index = order.visit_index(q_tiles.n, i + 1 if i + 1 < q_tiles.n else 0)
                    tile_row = int32(ROWS * tiling.tile_index(q_tiles, index, key, ctx, group))
                    tile_ctx = base_ctx._replace(row=tile_row, precomputed=precomputed)
                    next_row = ROWS * tiling.tile_index(q_tiles, next_index, key, ctx, group)
                    masked = tiling.needs_mask(q_tiles, index)
                    s, dk, dv, dslope = step(
                        j, s, dk, dv, dslope, masked, rings, k_rows, v_tile, wg, tile_ctx, next_row, warp_key, scale
                    )
                    j = int32(j + 1)
                warp_row = SLOPE_WARPS * slope_row + warpgroup.WARPGROUP * wg + warpgroup.rank()
                slope_gradient.store(dslope, params, base_ctx, int32(warp_row))
            if j > 0:
                dq_ring.publish(PARTS * (j - 1) + LAST + wg)
            row = seq.offset_k + key + EACH * (wg // PER_KEY)
            if sequences.packed:
                end = sequences.end_of_keys(batch, params)
                gDK, gDV = truncate(gDK, 1, end), truncate(gDV, 1, end)
            result.store_warpgroup(gDK, dk * unit, (seq.batch, row, dkv_head, K_COLS * (wg % PER_KEY)))
            result.store_warpgroup(gDV, variant.output(dv, ctx), (seq.batch, row, dkv_head, V_COLS * (wg % PER_KEY)))

    return compute_dq_dk_dv, smem
