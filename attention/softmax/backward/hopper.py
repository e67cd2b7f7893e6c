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
from .hopper_pipeline import CONSUMERS, FILLER, REGISTERS, SENDER, SENDERS
from .slopes import UNASKED


@dataclass(frozen=True)
class Config(hopper_pipeline.Config):
    """A kernel's shape. Each consumer owns 64 keys; where a block has no more than 64, half of the columns of dK and dV. exact:
    derivatives of scores stay in float32; else they are rounded, which takes fewer registers."""

    exact: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (CONSUMERS + 1)


SHAPES: dict[int, dict[str, Any]] = {  # of a padded head_dim
    64: {"kv": 128, "queries": 128},
    128: {"kv": 128, "queries": 64, "rounded": True, "exact": True, "places": 2},
    256: {"kv": 64, "queries": 64, "do_stages": 1, "ds_stages": 1},
}


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: variants.Variant, value_dim: int | None = None, **kind: Any) -> Config:
    """The configuration that serves a problem: the next larger dims, both as the greater one. kind: see BaseConfig."""
    padded = padded_dim(head_dim, value_dim)
    shape = SHAPES[padded] | ({"rounded": True} if variant.changes_scores or variant.uses_random else {})
    if variant.tma_bias and padded == 64:  # there is room for no more
        shape = shape | {"ds_stages": 1}
    if kind.get("learns", UNASKED) is not UNASKED:  # sums of dS would have the rounding of weights
        shape = shape | {"rounded": False}
    return Config(padded, padded, dtype, variant, **shape, **kind)


def block_of(head_dim: int, value_dim: int) -> int:
    """Keys of a block, in all kernels that add to dQ."""
    return SHAPES[padded_dim(head_dim, value_dim)]["kv"]


def finds_slopes(head_dim: int, value_dim: int, seq_layout: type[sequences.BatchedLayout]) -> bool:
    """Does the kernel find the gradient of slopes, too? Where that was timed; elsewhere it spills more registers, and
    of wide heads two consumers have the same keys."""
    return 64 < max(head_dim, value_dim) <= 128 and seq_layout.packed


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    if arch == "sm_90a":
        for of, head_dim, variant in itertools.product((bf16, fp16) if everything else (bf16,), SHAPES, (FULL, CAUSAL)):
            yield config_for(head_dim, of, variant)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, EACH = config.kv, config.rows, warpgroup.ROWS  # keys of a block, queries of a tile, keys of a consumer
    PARAMS, AUX, INPUT, ROUNDED = config.params, config.aux, config.dtype, config.rounded
    variant, tiling, parts, sequences = config.variant, config.tiling, config.parts, config.sequences
    brought, order, learns, result, OUT = config.brought, config.order, config.learns, config.result, config.result.dtype
    SHARE, PARTS, BENDS, UNIT = config.share, config.parts.count, config.variant.nonlinear, int(config.sequences.packed)
    BEND = fp32 if config.exact else INPUT
    FENCED = SHARE == 1  # does each consumer publish dS itself?
    TWICE, LAST = PARTS > CONSUMERS, PARTS - CONSUMERS  # has a consumer two parts of dQ? its last one's number, but for `me`
    K_COLS, V_COLS = config.head_dim // SHARE, config.value_dim // SHARE
    DK, DV, S = rt(16, K_COLS, fp32), rt(16, V_COLS, fp32), rt(ROWS, 16, fp32, "col")
    SCORES = rt(16, ROWS, fp32)
    LEARNERS, (keep, claim) = config.learners, REGISTERS
    smem = hopper_pipeline.memory(config)
    bring, send = hopper_pipeline.bringing(config, ahead=True), hopper_pipeline.sending(config)

    @inlined
    def columns(tile, cols, share):
        """A consumer's columns of a tile."""
        if SHARE > 1:
            return subtile(tile, ROWS, 0, cols, share)
        else:
            return tile

    @inlined
    def whole(queries, left):
        """A tile of queries with zeros behind the `left` first rows, which are the sequence's."""
        if sequences.packed:
            sequences.clear(queries, left, CONSUMERS)
        return queries

    @inlined
    def step(j, s, dk, dv, learnt, cut, rings, keys, values, me, ctx, coming, key, scale):
        """(the scores of the next tile of queries, which begins with query `coming`; dK, dV and the slopes' sum) after tile j,
        whose scores are s."""
        k, q, do, ds, dq, sums, bias = rings
        dp = warpgroup.mm_ABt(values, whole(do.wait(j), ctx.seqlen_q - ctx.row))
        ctx = brought.by_keys(bias, j, ctx, me // SHARE)
        of_rows = sums.wait(j)
        lse = load(subtile(of_rows, ROWS, 0), S.col_vec)
        s, bend = variant.score_and_grad(s, ctx, key)
        if BENDS:
            bend = BEND(bend)
        p = tiling.weights(s, lse, cut, ctx, key, scale)
        weights = INPUT(turned(p))
        dv = warpgroup.mma_AB(dv, variant.remove_dropped(weights), columns(do.wait(j), V_COLS, me % SHARE))
        dp = turned(warpgroup.wait(dp, newer=1))
        if ROUNDED:
            p = fp32(turned(weights))
        slope = variant.score_grad(p, dp, load(subtile(of_rows, ROWS, 1), S.col_vec), ctx)
        learnt = learns.add(learnt, slope, ctx, key)
        if BENDS:
            slope = slope * fp32(bend)
        slope = INPUT(turned(slope))
        if me % SHARE == 0:
            warpgroup.store_transposed(subtile(ds.claim(j), ROWS, 0, EACH, me // SHARE), slope)
            ds.publish(j)
        brought.give_back(bias, j, FENCED)
        if j > 0:
            dq.publish(PARTS * (j - 1) + LAST + me, FENCED)  # only now: its fence waits for all stores, and so does dS
        sums.release(j, None, FENCED)
        if TWICE:
            dk = warpgroup.mma_AB(dk, slope, columns(q.wait(j), K_COLS, me % SHARE))
            dv = warpgroup.wait(dv, newer=1)
            do.release(j)
            every = ds.wait(j)
            part = parts.product(me, every, k.wait(0))
            warpgroup.store_held(dq.claim(PARTS * j + me), warpgroup.wait(part))
            dq.publish(PARTS * j + me)
        else:
            dk = warpgroup.mma_AB(dk, slope, columns(q.wait(j), K_COLS, me % SHARE))
            dv = warpgroup.wait(dv, newer=1)
            do.release(j)
            every = ds.wait(j)
        part = parts.product(LAST + me, every, k.wait(0))
        s = warpgroup.mm_ABt(keys, whole(q.wait(j + 1), ctx.seqlen_q - coming))
        part = warpgroup.wait(part, newer=1)
        ds.release(j)
        dk = warpgroup.wait(dk, newer=1)
        q.release(j)
        warpgroup.store_held(dq.claim(PARTS * j + LAST + me), part)
        return turned(warpgroup.wait(s)), dk, dv, learnt

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: tiled(config.query, unit=UNIT), gK: tiled(config.key, unit=UNIT), gV: tiled(config.value, unit=UNIT),
        gDO: tiled(config.dout, unit=UNIT), gSums: tiled(config.of_rows, 3, None, 2), gSum: tiled(parts.tile, 3, 1, 2),
        gDK: array(4, OUT), gDV: array(4, OUT), params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT, band: INT,
        group: INT, shares: INT, spans: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of a block of keys with one of `batch_heads` pairs of share and batch, `band` of which are worked on at
        once, and what it adds to dQ. A batch has `heads` shares (shares.py), a key head `shares` of them: `spans` spans of the
        queries of each subgroup of `group` query heads. The weight of a score s is exp2(`scale` s - lse); before the variant
        made something of it, it was `unit` Q K^T."""
        k, v, q, do, ds, dq, sums, bias = brought.open(smem)
        grid.follow()
        me = warpgroup.id()
        block, batch_head = order.place(tiling, cuda.blockIdx.x, blocks, batch_heads, band)
        line = int32(blocks * (batch_head // heads) + block)  # of what is learnt
        block, batch, share = sequences.find_keys(block, batch_head, heads, KV, params)
        subgroup, span = divmod(share, spans)
        seq, key = sequences.sequence(batch, params), int32(KV * block)
        if sequences.packed and me < CONSUMERS:
            some, row = sequences.nobodys_keys(key, batch, KV, params)
            if some:
                at_keys = int32(0), int32(row + EACH * (me // SHARE)), share
                result.store_four(gDK, zeros(DK), (*at_keys, K_COLS * (me % SHARE)))
                result.store_four(gDV, zeros(DV), (*at_keys, V_COLS * (me % SHARE)))
        if not sequences.has_keys(key, batch, params):
            return
        ctx = ScoreContext(
            batch, group * subgroup, int32(0), seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0
        )
        every = tiling.span(tiling.tiles(key, ctx, group), span, spans)
        above = sequences.first_tile(batch, params)
        if me == CONSUMERS:
            warpgroup.release_registers(keep)
            if warpgroup.rank() == FILLER:
                arrays, into = (gK, gV, gQ, gDO, gSums), (k, v, q, do, sums, bias)
                bring(arrays, into, seq, block, divmod(share, shares)[0], every, key, ctx, group, above)
            if SENDER <= warpgroup.rank() < SENDER + SENDERS:
                send(gSum, dq, block, divmod(batch_head, spans)[0], every, key, ctx, group, above)
        else:
            warpgroup.claim_registers(claim)
            keys, values = k.wait(0), v.wait(0)
            sequences.clear(keys, seq.seqlen_k - key, CONSUMERS)
            sequences.clear(values, seq.seqlen_k - key, CONSUMERS)
            every.clear(keys, CONSUMERS)
            every.clear(values, CONSUMERS)
            keys, values = subtile(keys, EACH, me // SHARE), subtile(values, EACH, me // SHARE)
            mine = int32(key + EACH * (me // SHARE) + S.cols * warpgroup.rank())
            rings = k, q, do, ds, dq, sums, bias
            queries = whole(q.wait(0), seq.seqlen_q - ROWS * tiling.tile(every, order.nth(every.n, 0), key, ctx, group))
            s, dk, dv = turned(warpgroup.wait(warpgroup.mm_ABt(keys, queries))), zeros(DK), zeros(DV)
            j = int32(0)
            for h in range(group):
                base_ctx = ctx._replace(head=int32(group * subgroup + h))
                precomputed, learnt = variant.precompute(base_ctx), learns.begin(SCORES)
                for i in range(every.n):
                    nth, then = order.nth(every.n, i), order.nth(every.n, i + 1 if i + 1 < every.n else 0)
                    here = base_ctx._replace(
                        row=int32(ROWS * tiling.tile(every, nth, key, ctx, group)), precomputed=precomputed
                    )
                    coming = ROWS * tiling.tile(every, then, key, ctx, group)
                    cut = tiling.cut(every, nth)
                    s, dk, dv, learnt = step(j, s, dk, dv, learnt, cut, rings, keys, values, me, here, coming, mine, scale)
                    j = int32(j + 1)
                learns.give(learnt, params, base_ctx, int32(LEARNERS * line + warpgroup.WARPGROUP * me + warpgroup.rank()))
            if j > 0:
                dq.publish(PARTS * (j - 1) + LAST + me)
            row = seq.offset_k + key + EACH * (me // SHARE)
            if sequences.packed:
                end = sequences.last_key(batch, params)
                gDK, gDV = truncate(gDK, 1, end), truncate(gDV, 1, end)
            result.store_four(gDK, dk * unit, (seq.batch, row, share, K_COLS * (me % SHARE)))
            result.store_four(gDV, variant.output(dv, ctx), (seq.batch, row, share, V_COLS * (me % SHARE)))

    return attend, smem
