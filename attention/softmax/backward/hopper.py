"""Gradients of softmax attention for Hopper: a thread block has a block of keys and goes through the queries that see it.

Scores are computed again, keys by queries, so that P^T and dS^T lie in registers as the left operands of the products for dV
and dK. Only dS goes through shared memory, once, because dQ = dS K needs all keys of the block. Parts of dQ go to a warp that
has TMA add them, in float32, to those of other blocks of keys. The query heads that share a key head come one after the other,
so dK and dV are summed in registers. The scores of the next tile are computed while the dQ of this tile is handed on.
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
from tiles.arguments import FLOAT, INT, array, tiled

from .. import sequences, variants
from ..variants import ScoreContext
from ..visible_keys import CAUSAL, FULL
from . import hopper_pipeline
from .base_config import padded_dim
from .hopper_pipeline import CONSUMERS, DQ_WARPS, FIRST_DQ_WARP, LOAD_WARP, REGISTERS
from .slopes import NO_SLOPE_GRADIENT


@dataclass(frozen=True)
class Config(hopper_pipeline.Config):
    """A kernel's shape. Each consumer owns 64 keys; where a block has no more than 64, half of the columns of dK and dV. exact:
    derivatives of scores stay in float32; else they are rounded, which takes fewer registers."""

    float32_grad: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (CONSUMERS + 1)


SHAPES: dict[int, dict[str, Any]] = {  # of a padded head_dim
    64: {"kv": 128, "queries": 128},
    128: {"kv": 128, "queries": 64, "rounded_p": True, "float32_grad": True, "bias_stages": 2},
    256: {"kv": 64, "queries": 64, "do_stages": 1, "ds_stages": 1},
}


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: variants.Variant, value_dim: int | None = None, **kind: Any) -> Config:
    """The configuration that serves a problem: the next larger dims, both as the greater one. kind: see BaseConfig."""
    padded = padded_dim(head_dim, value_dim)
    shape = SHAPES[padded] | ({"rounded_p": True} if variant.changes_scores or variant.uses_random else {})
    if variant.tma_bias and padded == 64:  # there is room for no more
        shape = shape | {"ds_stages": 1}
    if kind.get("learns", NO_SLOPE_GRADIENT) is not NO_SLOPE_GRADIENT:  # sums of dS would have the rounding of weights
        shape = shape | {"rounded_p": False}
    return Config(padded, padded, dtype, variant, **shape, **kind)


def block_of(head_dim: int, value_dim: int) -> int:
    """Keys of a block, in all kernels that add to dQ."""
    return SHAPES[padded_dim(head_dim, value_dim)]["kv"]


def computes_slopes(head_dim: int, value_dim: int, lie: type[sequences.Batched]) -> bool:
    """Does the kernel find the gradient of slopes, too? Where that was timed; elsewhere it spills more registers, and
    of wide heads two consumers have the same keys."""
    return 64 < max(head_dim, value_dim) <= 128 and lie.packed


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    if arch == "sm_90a":
        for of, head_dim, variant in itertools.product((bf16, fp16) if everything else (bf16,), SHAPES, (FULL, CAUSAL)):
            yield config_for(head_dim, of, variant)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, EACH = config.kv, config.rows, warpgroup.ROWS  # keys of a block, queries of a tile, keys of a consumer
    PARAMS, AUX, INPUT, ROUNDED = config.params, config.aux, config.dtype, config.rounded_p
    variant, tiling, parts, sequences = config.variant, config.tiling, config.parts, config.sequences
    brought, order, slope_gradient, result, OUT = config.brought, config.order, config.slope_gradient, config.result, config.result.dtype
    COLUMN_SPLITS, PARTS, NONLINEAR, UNIT = config.column_splits, config.parts.count, config.variant.nonlinear, int(config.sequences.packed)
    GRAD = fp32 if config.float32_grad else INPUT
    FENCED = COLUMN_SPLITS == 1  # does each consumer publish dS itself?
    TWICE, LAST = PARTS > CONSUMERS, PARTS - CONSUMERS  # has a consumer two parts of dQ? its last one's number, but for `me`
    K_COLS, V_COLS = config.head_dim // COLUMN_SPLITS, config.value_dim // COLUMN_SPLITS
    DK, DV, S = rt(16, K_COLS, fp32), rt(16, V_COLS, fp32), rt(ROWS, 16, fp32, "col")
    SCORES = rt(16, ROWS, fp32)
    LEARNERS, (keep, claim) = config.slope_warps, REGISTERS
    smem = hopper_pipeline.memory(config)
    load_tiles, add_dq = hopper_pipeline.make_load(config, ahead=True), hopper_pipeline.make_add_dq(config)

    @inlined
    def columns(tile, cols, dkv_head):
        """A consumer's columns of a tile."""
        if COLUMN_SPLITS > 1:
            return subtile(tile, ROWS, 0, cols, dkv_head)
        else:
            return tile

    @inlined
    def whole(queries, left):
        """A tile of queries with zeros behind the `left` first rows, which are the sequence's."""
        if sequences.packed:
            sequences.clear(queries, left, CONSUMERS)
        return queries

    @inlined
    def step(j, s, dk, dv, dslope, masked, rings, keys, values, wg, ctx, coming, key, scale):
        """(the scores of the next tile of queries, which begins with query `coming`; dK, dV and the slopes' sum) after tile j,
        whose scores are s."""
        k, q, do, ds_ring, dq_ring, lse_delta, bias = rings
        dp = warpgroup.mm_ABt(values, whole(do.wait(j), ctx.queries - ctx.row))
        ctx = brought.by_keys(bias, j, ctx, wg // COLUMN_SPLITS)
        vectors = lse_delta.wait(j)
        lse = load(subtile(vectors, ROWS, 0), S.col_vec)
        s, grad = variant.score_and_grad(s, ctx, key)
        if NONLINEAR:
            grad = GRAD(grad)
        p = tiling.weights(s, lse, masked, ctx, key, scale)
        p16 = INPUT(turned(p))
        dv = warpgroup.mma_AB(dv, variant.remove_dropped(p16), columns(do.wait(j), V_COLS, wg % COLUMN_SPLITS))
        dp = turned(warpgroup.wait(dp, newer=1))
        if ROUNDED:
            p = fp32(turned(p16))
        ds = variant.score_grad(p, dp, load(subtile(vectors, ROWS, 1), S.col_vec), ctx)
        dslope = slope_gradient.add(dslope, ds, ctx, key)
        if NONLINEAR:
            ds = ds * fp32(grad)
        ds = INPUT(turned(ds))
        if wg % COLUMN_SPLITS == 0:
            warpgroup.store_transposed(subtile(ds_ring.claim(j), ROWS, 0, EACH, wg // COLUMN_SPLITS), ds)
            ds_ring.publish(j)
        brought.give_back(bias, j, FENCED)
        if j > 0:
            dq_ring.publish(PARTS * (j - 1) + LAST + wg, FENCED)  # only now: its fence waits for all stores, and so does dS
        lse_delta.release(j, None, FENCED)
        if TWICE:
            dk = warpgroup.mma_AB(dk, ds, columns(q.wait(j), K_COLS, wg % COLUMN_SPLITS))
            dv = warpgroup.wait(dv, newer=1)
            do.release(j)
            ds_tile = ds_ring.wait(j)
            part = parts.issue(wg, ds_tile, k.wait(0))
            warpgroup.store_held(dq_ring.claim(PARTS * j + wg), warpgroup.wait(part))
            dq_ring.publish(PARTS * j + wg)
        else:
            dk = warpgroup.mma_AB(dk, ds, columns(q.wait(j), K_COLS, wg % COLUMN_SPLITS))
            dv = warpgroup.wait(dv, newer=1)
            do.release(j)
            ds_tile = ds_ring.wait(j)
        part = parts.issue(LAST + wg, ds_tile, k.wait(0))
        s = warpgroup.mm_ABt(keys, whole(q.wait(j + 1), ctx.queries - coming))
        part = warpgroup.wait(part, newer=1)
        ds_ring.release(j)
        dk = warpgroup.wait(dk, newer=1)
        q.release(j)
        warpgroup.store_held(dq_ring.claim(PARTS * j + LAST + wg), part)
        return turned(warpgroup.wait(s)), dk, dv, dslope

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: tiled(config.query, unit=UNIT), gK: tiled(config.key, unit=UNIT), gV: tiled(config.value, unit=UNIT),
        gDO: tiled(config.dout, unit=UNIT), gLseDelta: tiled(config.lse_delta, 3, None, 2), gDQAccum: tiled(parts.part_tile, 3, 1, 2),
        gDK: array(4, OUT), gDV: array(4, OUT), params: PARAMS, aux: AUX, blocks: INT, heads: INT, pairs: INT, raster_group: INT,
        group: INT, partials: INT, splits: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of a block of keys with one of `pairs` pairs of share and batch, `band` of which are worked on at once, and
        what it adds to dQ. A batch has `heads` shares (shares.py), a key head `shares` of them: `spans` spans of the queries of
        each subgroup of `group` query heads. The weight of a score s is exp2(`scale` s - lse); before the variant made
        something of it, it was `unit` Q K^T."""
        k, v, q, do, ds_ring, dq_ring, lse_delta, bias = brought.open(smem)
        grid.follow()
        wg = warpgroup.id()
        block, pair = order.place(tiling, cuda.blockIdx.x, blocks, pairs, raster_group)
        line = int32(blocks * (pair // heads) + block)  # of what is learnt
        block, batch, dkv_head = sequences.find_keys(block, pair, heads, KV, params)
        head_group, split = divmod(dkv_head, splits)
        seq, key = sequences.sequence(batch, params), int32(KV * block)
        if sequences.packed and wg < CONSUMERS:
            some, row = sequences.nobodys_keys(key, batch, KV, params)
            if some:
                at_keys = int32(0), int32(row + EACH * (wg // COLUMN_SPLITS)), dkv_head
                result.store_warpgroup(gDK, zeros(DK), (*at_keys, K_COLS * (wg % COLUMN_SPLITS)))
                result.store_warpgroup(gDV, zeros(DV), (*at_keys, V_COLS * (wg % COLUMN_SPLITS)))
        if not sequences.has_keys(key, batch, params):
            return
        ctx = ScoreContext(batch, group * head_group, int32(0), seq.keys - seq.queries, seq.queries, seq.keys, params, aux, 0)
        q_tiles = tiling.take_split(tiling.query_tiles(key, ctx, group), split, splits)
        above = sequences.first_tile(batch, params)
        if wg == CONSUMERS:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            if warpgroup.rank() == LOAD_WARP:
                arrays, into = (gK, gV, gQ, gDO, gLseDelta), (k, v, q, do, lse_delta, bias)
                load_tiles(arrays, into, seq, block, divmod(dkv_head, partials)[0], q_tiles, key, ctx, group, above)
            if FIRST_DQ_WARP <= warpgroup.rank() < FIRST_DQ_WARP + DQ_WARPS:
                add_dq(gDQAccum, dq_ring, block, divmod(pair, splits)[0], q_tiles, key, ctx, group, above)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            keys, values = k.wait(0), v.wait(0)
            sequences.clear(keys, seq.keys - key, CONSUMERS)
            sequences.clear(values, seq.keys - key, CONSUMERS)
            q_tiles.clear(keys, CONSUMERS)
            q_tiles.clear(values, CONSUMERS)
            keys, values = subtile(keys, EACH, wg // COLUMN_SPLITS), subtile(values, EACH, wg // COLUMN_SPLITS)
            mine = int32(key + EACH * (wg // COLUMN_SPLITS) + S.cols * warpgroup.rank())
            rings = k, q, do, ds_ring, dq_ring, lse_delta, bias
            queries = whole(q.wait(0), seq.queries - ROWS * tiling.tile_index(q_tiles, order.visit_index(q_tiles.n, 0), key, ctx, group))
            s, dk, dv = turned(warpgroup.wait(warpgroup.mm_ABt(keys, queries))), zeros(DK), zeros(DV)
            j = int32(0)
            for h in range(group):
                base_ctx = ctx._replace(head=int32(group * head_group + h))
                precomputed, dslope = variant.precompute(base_ctx), slope_gradient.init(SCORES)
                for i in range(q_tiles.n):
                    index, next_index = order.visit_index(q_tiles.n, i), order.visit_index(q_tiles.n, i + 1 if i + 1 < q_tiles.n else 0)
                    here = base_ctx._replace(
                        row=int32(ROWS * tiling.tile_index(q_tiles, index, key, ctx, group)), precomputed=precomputed
                    )
                    coming = ROWS * tiling.tile_index(q_tiles, next_index, key, ctx, group)
                    masked = tiling.needs_mask(q_tiles, index)
                    s, dk, dv, dslope = step(j, s, dk, dv, dslope, masked, rings, keys, values, wg, here, coming, mine, scale)
                    j = int32(j + 1)
                slope_gradient.store(dslope, params, base_ctx, int32(LEARNERS * line + warpgroup.WARPGROUP * wg + warpgroup.rank()))
            if j > 0:
                dq_ring.publish(PARTS * (j - 1) + LAST + wg)
            row = seq.key + key + EACH * (wg // COLUMN_SPLITS)
            if sequences.packed:
                end = sequences.last_key(batch, params)
                gDK, gDV = truncate(gDK, 1, end), truncate(gDV, 1, end)
            result.store_warpgroup(gDK, dk * unit, (seq.batch, row, dkv_head, K_COLS * (wg % COLUMN_SPLITS)))
            result.store_warpgroup(gDV, variant.output(dv, ctx), (seq.batch, row, dkv_head, V_COLS * (wg % COLUMN_SPLITS)))

    return attend, smem
