"""Gradients of softmax attention for Hopper, with a folded loop: hopper.py with other products under the exponentials.

After the scores of the next tile of queries, two more products are issued: dK of this tile, and the part of dQ of the tile
before. They run while the next weights are computed, and no consumer waits for the other one's dS. dV runs while dS is
computed, and the part of dQ that TMA adds is published together with dS, under one fence. This takes some more registers, so it
serves plain scores of heads that are not wide (`serves`); narrow heads have hopper_narrow.py."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, subtile, turned, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt
from tiles.arguments import FLOAT, INT, array, tiled

from .. import variants
from ..variants import At
from ..visible_keys import CAUSAL, FULL
from . import hopper, hopper_pipeline
from .hopper_pipeline import CONSUMERS, FILLER, REGISTERS, SENDER, SENDERS

HEAD_DIM = 128  # padded


@dataclass(frozen=True)
class Config(hopper.Config):
    """A kernel's shape. Each consumer owns 64 keys, and one part of dQ."""

    def __str__(self):
        return super().__str__() + " folded"


def serves(head_dim: int, variant: variants.Variant, value_dim: int | None = None) -> bool:
    """Is this kernel for such heads?"""
    return max(head_dim, value_dim or 0) <= HEAD_DIM and variant.folds


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: variants.Variant, value_dim: int | None = None, **kind: Any) -> Config:
    """The configuration that serves a problem. kind: `ordered`, `stores`."""
    return Config(HEAD_DIM, HEAD_DIM, dtype, variant, CONSUMERS * warpgroup.ROWS, warpgroup.ROWS, **kind)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    if arch == "sm_90a":
        for of, variant in itertools.product((bf16, fp16) if everything else (bf16,), (FULL, CAUSAL)):
            yield config_for(HEAD_DIM, of, variant)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, EACH = config.kv, config.rows, warpgroup.ROWS  # keys of a block, queries of a tile, keys of a consumer
    GIVEN, AUX, INPUT, order, brought = config.given, config.aux, config.dtype, config.order, config.brought
    variant, tiling, parts, sequences, PARTS = config.variant, config.tiling, config.parts, config.sequences, config.parts.count
    DK, DV, S = rt(16, config.head_dim, fp32), rt(16, config.value_dim, fp32), rt(ROWS, 16, fp32, "col")
    keep, claim = REGISTERS
    smem = hopper_pipeline.memory(config)
    bring, send, following = hopper_pipeline.bringing(config), hopper_pipeline.sending(config), hopper_pipeline.going(config)

    @inlined
    def weighed(j, s, cut, rings, me, at, key, scale):
        """The weights of tile j, whose scores are s."""
        q, do, ds, dq, sums, bias = rings
        lse = load(subtile(sums.wait(j), ROWS, 0), S.col_vec)
        s, _ = variant.bent(turned(s), at, key)
        return tiling.weights(s, lse, cut, at, key, scale)

    @inlined
    def sloped(j, p, dv, values, rings, me):
        """(dS of tile j, whose weights are p, for dK; dV, pending). dS is also left in shared memory, for dQ."""
        q, do, ds, dq, sums, bias = rings
        own = subtile(values, EACH, warpgroup.id())  # asked anew: descriptors held over the loop spill
        dp = warpgroup.mm_ABt(own, do.wait(j))
        weights = INPUT(turned(p))
        dv = warpgroup.mma_AB(dv, weights, do.wait(j))
        dp = turned(warpgroup.wait(dp, newer=1))
        slope = INPUT(turned(p * (dp - load(subtile(sums.wait(j), ROWS, 1), S.col_vec))))
        warpgroup.store_transposed(subtile(ds.claim(j), ROWS, 0, EACH, me), slope)
        ds.publish(j)
        sums.release(j, None, True)
        return slope, dv

    @inlined
    def stored(j, part, rings, me):
        """Store this consumer's part of dQ of tile j for a sender."""
        q, do, ds, dq, sums, bias = rings
        ds.release(j)
        warpgroup.store_held(dq.claim(PARTS * j + me), part)

    def stepping(later):
        """The step from one tile of queries to the next. Every step but the first (`later`) also computes a part of dQ."""

        @inlined
        def step(j, slope, dk, dv, cut, rings, blocks, me, at, key, scale):
            q, do, ds, dq, sums, bias = rings
            keys, values, every_key = blocks
            s = warpgroup.mm_ABt(keys, q.wait(j + 1))
            dk = warpgroup.mma_AB(dk, slope, q.wait(j))
            if later:
                part = parts.product(me, ds.wait(j - 1), every_key.wait(0))
            s = warpgroup.wait(s, newer=2 if later else 1)
            mine = int32(key + EACH * me + S.cols * warpgroup.rank())  # computed anew, to save registers
            p = weighed(j + 1, s, cut, rings, me, at, mine, scale)
            if later:
                part = warpgroup.wait(part)
            dk = warpgroup.wait(dk)
            q.release(j)
            if later:
                stored(j - 1, part, rings, me)
            slope, dv = sloped(j + 1, p, dv, values, rings, me)
            if later:
                dq.publish(PARTS * (j - 1) + me, True)
            dv = warpgroup.wait(dv)
            do.release(j + 1)
            return slope, dk, dv

        return step

    first_step, step = stepping(False), stepping(True)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: tiled(config.query), gK: tiled(config.key), gV: tiled(config.value),
        gDO: tiled(config.dout), gSums: tiled(config.of_rows, 3, None, 2), gSum: tiled(parts.tile, 3, 1, 2),
        gDK: array(4, INPUT), gDV: array(4, INPUT), given: GIVEN, aux: AUX, blocks: INT, heads: INT, pairs: INT, band: INT,
        group: INT, shares: INT, spans: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """As in hopper.py."""
        k, v, q, do, ds, dq, sums, bias = brought.open(smem)
        grid.follow()
        me = warpgroup.id()
        block, pair = order.place(tiling, cuda.blockIdx.x, blocks, pairs, band)
        batch, share = divmod(pair, heads)
        subgroup, span = divmod(share, spans)
        own, key = sequences.sequence(batch, given), int32(KV * block)
        at = At(batch, group * subgroup, int32(0), own.keys - own.queries, own.queries, own.keys, given, aux, 0)
        every = tiling.span(tiling.tiles(key, at, group), span, spans)
        tiles = int32(group * every.n)
        if me == CONSUMERS:
            warpgroup.release_registers(keep)
            if warpgroup.rank() == FILLER:
                arrays, into = (gK, gV, gQ, gDO, gSums), (k, v, q, do, sums, bias)
                bring(arrays, into, own, block, divmod(share, shares)[0], every, key, at, group, 0)
            if SENDER <= warpgroup.rank() < SENDER + SENDERS:
                send(gSum, dq, block, divmod(pair, spans)[0], every, key, at, group, 0)
        else:
            warpgroup.claim_registers(claim)
            dk, dv = zeros(DK), zeros(DV)
            if tiles > 0:
                here = at._replace(row=int32(ROWS * order.start(every)))
                here = here._replace(kept=variant.keep(here))
                keys, values = k.wait(0), v.wait(0)
                every.clear(keys, CONSUMERS)
                every.clear(values, CONSUMERS)
                rings, blocks_of = (q, do, ds, dq, sums, bias), (subtile(keys, EACH, me), values, k)
                mine, i = int32(key + EACH * me + S.cols * warpgroup.rank()), int32(0)
                s = warpgroup.mm_ABt(blocks_of[0], q.wait(0))
                p = weighed(i, warpgroup.wait(s), tiling.cut(every, order.nth(every.n, i)), rings, me, here, mine, scale)
                slope, dv = sloped(i, p, dv, blocks_of[1], rings, me)
                dv = warpgroup.wait(dv)
                do.release(0)
                if tiles > 1:
                    i, here = following(i, every, here)
                    cut = tiling.cut(every, order.nth(every.n, i))
                    slope, dk, dv = first_step(int32(0), slope, dk, dv, cut, rings, blocks_of, me, here, key, scale)
                for j in range(int32(1), int32(tiles - 1)):
                    i, here = following(i, every, here)
                    cut = tiling.cut(every, order.nth(every.n, i))
                    slope, dk, dv = step(int32(j), slope, dk, dv, cut, rings, blocks_of, me, here, key, scale)
                last = int32(tiles - 1)
                dk = warpgroup.wait(warpgroup.mma_AB(dk, slope, q.wait(last)))
                q.release(last)
                for j in range(max(0, last - 1), tiles):
                    stored(j, warpgroup.wait(parts.product(me, ds.wait(j), k.wait(0))), rings, me)
                    dq.publish(PARTS * j + me)
            row = own.key + key + EACH * me
            warpgroup.store(gDK, INPUT(dk * unit), (own.batch, row, share, 0), 1, 3, True)
            warpgroup.store(gDV, INPUT(dv), (own.batch, row, share, 0), 1, 3, True)

    return attend, smem
