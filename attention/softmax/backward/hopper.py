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
from ..variants import At
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

    @property
    def anew(self) -> bool:
        """Does a consumer ask for its number anew where it takes its rows of the values? Their descriptors, held over the loop,
        made registers spill under ALiBi and lists; others pay some instructions."""
        return self.head_dim == 128 and not (self.sequences.packed or self.variant.bends)


SHAPES: dict[int, dict[str, Any]] = {  # of a padded head_dim
    64: {"kv": 128, "queries": 128},
    128: {"kv": 128, "queries": 64, "rounded": True, "exact": True, "places": 2},
    256: {"kv": 64, "queries": 64, "do_stages": 1, "ds_stages": 1},
}


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: variants.Variant, value_dim: int | None = None, **kind: Any) -> Config:
    """The configuration that serves a problem: the next larger dims, both as the greater one. kind: see BaseConfig."""
    padded = padded_dim(head_dim, value_dim)
    shape = SHAPES[padded] | ({"rounded": True} if variant.scored or variant.draws else {})
    if variant.brings and padded == 64:  # there is room for no more
        shape = shape | {"ds_stages": 1}
    if kind.get("learns", UNASKED) is not UNASKED:  # sums of dS would have the rounding of weights
        shape = shape | {"rounded": False}
    return Config(padded, padded, dtype, variant, **shape, **kind)


def block_of(head_dim: int, value_dim: int) -> int:
    """Keys of a block, in all kernels that add to dQ."""
    return SHAPES[padded_dim(head_dim, value_dim)]["kv"]


def finds_slopes(head_dim: int, value_dim: int, lie: type[sequences.Batched]) -> bool:
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
    GIVEN, AUX, INPUT, ROUNDED = config.given, config.aux, config.dtype, config.rounded
    variant, tiling, parts, sequences = config.variant, config.tiling, config.parts, config.sequences
    brought, order, learns, result, OUT = config.brought, config.order, config.learns, config.result, config.result.dtype
    SHARE, PARTS, BENDS, UNIT = config.share, config.parts.count, config.variant.bends, int(config.sequences.packed)
    BEND = fp32 if config.exact else INPUT
    FENCED = SHARE == 1  # does each consumer publish dS itself?
    TWICE, LAST = PARTS > CONSUMERS, PARTS - CONSUMERS  # has a consumer two parts of dQ? its last one's number, but for `me`
    K_COLS, V_COLS = config.head_dim // SHARE, config.value_dim // SHARE
    DK, DV, S = rt(16, K_COLS, fp32), rt(16, V_COLS, fp32), rt(ROWS, 16, fp32, "col")
    SCORES = rt(16, ROWS, fp32)
    LEARNERS, ANEW, (keep, claim) = config.learners, config.anew, REGISTERS
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
    def step(j, s, dk, dv, learnt, cut, rings, keys, values, me, at, coming, key, scale):
        """(the scores of the next tile of queries, which begins with query `coming`; dK, dV and the slopes' sum) after tile j,
        whose scores are s."""
        k, q, do, ds, dq, sums, bias = rings
        values = subtile(values, EACH, (warpgroup.id() if ANEW else me) // SHARE)
        dp = warpgroup.mm_ABt(values, whole(do.wait(j), at.queries - at.row))
        at = brought.by_keys(bias, j, at, me // SHARE)
        of_rows = sums.wait(j)
        lse = load(subtile(of_rows, ROWS, 0), S.col_vec)
        s, bend = variant.bent(s, at, key)
        if BENDS:
            bend = BEND(bend)
        p = tiling.weights(s, lse, cut, at, key, scale)
        weights = INPUT(turned(p))
        dv = warpgroup.mma_AB(dv, variant.left(weights), columns(do.wait(j), V_COLS, me % SHARE))
        dp = turned(warpgroup.wait(dp, newer=1))
        if ROUNDED:
            p = fp32(turned(weights))
        slope = variant.slope(p, dp, load(subtile(of_rows, ROWS, 1), S.col_vec), at)
        learnt = learns.add(learnt, slope, at, key)
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
        s = warpgroup.mm_ABt(keys, whole(q.wait(j + 1), at.queries - coming))
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
        gDK: array(4, OUT), gDV: array(4, OUT), given: GIVEN, aux: AUX, blocks: INT, heads: INT, pairs: INT, band: INT,
        group: INT, shares: INT, spans: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of a block of keys with one of `pairs` pairs of share and batch, `band` of which are worked on at once, and
        what it adds to dQ. A batch has `heads` shares (shares.py), a key head `shares` of them: `spans` spans of the queries of
        each subgroup of `group` query heads. The weight of a score s is exp2(`scale` s - lse); before the variant made
        something of it, it was `unit` Q K^T."""
        k, v, q, do, ds, dq, sums, bias = brought.open(smem)
        grid.follow()
        me = warpgroup.id()
        block, pair = order.place(tiling, cuda.blockIdx.x, blocks, pairs, band)
        line = int32(blocks * (pair // heads) + block)  # of what is learnt
        block, batch, share = sequences.find_keys(block, pair, heads, KV, given)
        subgroup, span = divmod(share, spans)
        own, key = sequences.sequence(batch, given), int32(KV * block)
        if sequences.packed and me < CONSUMERS:
            some, row = sequences.nobodys_keys(key, batch, KV, given)
            if some:
                at_keys = int32(0), int32(row + EACH * (me // SHARE)), share
                result.store_four(gDK, zeros(DK), (*at_keys, K_COLS * (me % SHARE)))
                result.store_four(gDV, zeros(DV), (*at_keys, V_COLS * (me % SHARE)))
        if not sequences.has_keys(key, batch, given):
            return
        at = At(batch, group * subgroup, int32(0), own.keys - own.queries, own.queries, own.keys, given, aux, 0)
        every = tiling.span(tiling.tiles(key, at, group), span, spans)
        above = sequences.first_tile(batch, given)
        if me == CONSUMERS:
            warpgroup.release_registers(keep)
            if warpgroup.rank() == FILLER:
                arrays, into = (gK, gV, gQ, gDO, gSums), (k, v, q, do, sums, bias)
                bring(arrays, into, own, block, divmod(share, shares)[0], every, key, at, group, above)
            if SENDER <= warpgroup.rank() < SENDER + SENDERS:
                send(gSum, dq, block, divmod(pair, spans)[0], every, key, at, group, above)
        else:
            warpgroup.claim_registers(claim)
            keys, values = k.wait(0), v.wait(0)
            sequences.clear(keys, own.keys - key, CONSUMERS)
            sequences.clear(values, own.keys - key, CONSUMERS)
            every.clear(keys, CONSUMERS)
            every.clear(values, CONSUMERS)
            keys = subtile(keys, EACH, me // SHARE)
            mine = int32(key + EACH * (me // SHARE) + S.cols * warpgroup.rank())
            rings = k, q, do, ds, dq, sums, bias
            queries = whole(q.wait(0), own.queries - ROWS * tiling.tile(every, order.nth(every.n, 0), key, at, group))
            s, dk, dv = turned(warpgroup.wait(warpgroup.mm_ABt(keys, queries))), zeros(DK), zeros(DV)
            j = int32(0)
            for h in range(group):
                stands = at._replace(head=int32(group * subgroup + h))
                kept, learnt = variant.keep(stands), learns.begin(SCORES)
                for i in range(every.n):
                    nth, then = order.nth(every.n, i), order.nth(every.n, i + 1 if i + 1 < every.n else 0)
                    here = stands._replace(row=int32(ROWS * tiling.tile(every, nth, key, at, group)), kept=kept)
                    coming = ROWS * tiling.tile(every, then, key, at, group)
                    cut = tiling.cut(every, nth)
                    s, dk, dv, learnt = step(j, s, dk, dv, learnt, cut, rings, keys, values, me, here, coming, mine, scale)
                    j = int32(j + 1)
                learns.give(learnt, given, stands, int32(LEARNERS * line + warpgroup.WARPGROUP * me + warpgroup.rank()))
            if j > 0:
                dq.publish(PARTS * (j - 1) + LAST + me)
            row = own.key + key + EACH * (me // SHARE)
            if sequences.packed:
                end = sequences.last_key(batch, given)
                gDK, gDV = truncate(gDK, 1, end), truncate(gDV, 1, end)
            result.store_four(gDK, dk * unit, (own.batch, row, share, K_COLS * (me % SHARE)))
            result.store_four(gDV, variant.output(dv, at), (own.batch, row, share, V_COLS * (me % SHARE)))

    return attend, smem
