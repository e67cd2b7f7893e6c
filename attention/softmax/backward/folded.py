"""Gradients of softmax attention for Hopper, folded: hopper.py, with other products under the exponentials.

What is left of a tile of queries, dK and its part of dQ, is issued behind the scores of the next tile, so that they run while
the next weights are found; dV runs while dS is made, and what TMA adds is published with dS, under one fence. It takes some
more registers, and so is for plain scores of one kind of heads (`serves`)."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, exp2, load, store_wait, subtile, tma_add, turned, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.arguments import FLOAT, INT, array, tiled

from ..seen import CAUSAL, FULL
from ..variants import At, Variant
from . import hopper
from .hopper import CONSUMERS, FILLER, REGISTERS, SENDER, SENDERS

HEAD_DIM = 128  # padded


@dataclass(frozen=True)
class Config(hopper.Config):
    """A kernel's shape. Each consumer owns 64 keys, and one part of dQ."""

    def __str__(self):
        return super().__str__() + " folded"


def serves(head_dim: int, variant: Variant, value_dim: int | None = None) -> bool:
    """Is this kernel for such heads?"""
    return HEAD_DIM // 2 < max(head_dim, value_dim or 0) <= HEAD_DIM and not variant.scored


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: Variant, value_dim: int | None = None) -> Config:
    """The configuration that serves a problem."""
    return Config(HEAD_DIM, HEAD_DIM, dtype, variant, CONSUMERS * warpgroup.ROWS, warpgroup.ROWS)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    if arch == "sm_90a":
        for of, variant in itertools.product((bf16, fp16) if everything else (bf16,), (FULL, CAUSAL)):
            yield config_for(HEAD_DIM, of, variant)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, EACH = config.kv, config.rows, warpgroup.ROWS  # keys of a block, queries of a tile, keys of a consumer
    GIVEN, AUX, INPUT, BY_ROWS = config.given, config.aux, config.dtype, config.variant.by_rows
    variant, tiling, parts, sequences, PARTS = config.variant, config.tiling, config.parts, config.sequences, config.parts.count
    DK, DV, S = rt(16, config.head_dim, fp32), rt(16, config.value_dim, fp32), rt(ROWS, 16, fp32, "col")
    readers = CONSUMERS * warpgroup.WARPGROUP
    keep, claim = REGISTERS
    smem = shared(
        k=ring(config.key, 1, readers),
        v=ring(config.value, 1, readers),
        q=ring(config.query, config.stages, readers),
        do=ring(config.dout, config.do_stages, readers),
        ds=ring(st(ROWS, KV, INPUT), config.ds_stages, readers, readers),
        dq=ring(parts.tile, config.dq_stages, 1, warpgroup.WARPGROUP),
        sums=ring(config.of_rows, config.stages, readers),
    )

    @inlined
    def weighed(j, s, cut, sums, at, key, scale):
        """The weights of tile j, whose scores are s."""
        lse = load(subtile(sums.wait(j), ROWS, 0), S.col_vec)
        s = variant.score(turned(s), at, key)
        if BY_ROWS:
            lse = lse + variant.below(s, at, key) * scale
        if cut:
            s = tiling.mask(s, at, key)
        return exp2(s * scale - lse)

    @inlined
    def sloped(j, p, dv, values, rings, me):
        """dS of tile j, whose weights are p, for dK and, in shared memory, for dQ; and dV."""
        q, do, ds, dq, sums = rings
        dp = warpgroup.mm_ABt(values, do.wait(j))
        dv = warpgroup.mma_AB(dv, INPUT(turned(p)), do.wait(j))
        dp = turned(warpgroup.wait(dp, newer=1))
        slope = INPUT(turned(p * (dp - load(subtile(sums.wait(j), ROWS, 1), S.col_vec))))
        warpgroup.store_transposed(subtile(ds.claim(j), ROWS, 0, EACH, me), slope)
        ds.publish(j)
        if j > 0:
            dq.publish(PARTS * (j - 1) + me, True)
        sums.release(j, None, True)
        dv = warpgroup.wait(dv)
        do.release(j)
        return slope, dv

    @inlined
    def finished(j, dk, part, rings, me):
        """dK with tile j, whose part of dQ is on its way."""
        q, do, ds, dq, sums = rings
        part = warpgroup.wait(part)
        dk = warpgroup.wait(dk)
        ds.release(j)
        q.release(j)
        warpgroup.store_held(dq.claim(PARTS * j + me), part)
        return dk

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: tiled(config.query), gK: tiled(config.key), gV: tiled(config.value),
        gDO: tiled(config.dout), gSums: tiled(config.of_rows, 3, None, 2), gSum: tiled(parts.tile, 3, 1, 2),
        gDK: array(4, INPUT), gDV: array(4, INPUT), given: GIVEN, aux: AUX, blocks: INT, heads: INT, pairs: INT, band: INT,
        group: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """As in hopper.py."""
        k, v, q, do, ds, dq, sums = smem.open()
        me = warpgroup.id()
        block, pair = tiling.place(cuda.blockIdx.x, blocks, pairs, band)
        batch, kv_head = divmod(pair, heads)
        own, key = sequences.sequence(batch, given), int32(KV * block)
        at = At(batch, group * kv_head, int32(0), own.keys - own.queries, own.queries, own.keys, given, aux, 0)
        every = tiling.tiles(key, at, group)
        tiles = int32(group * every.n)
        if me == CONSUMERS:
            warpgroup.release_registers(keep)
            if warpgroup.rank() == FILLER:
                k.fill(0, gK, (own.batch, block, kv_head))
                head, tile = int32(group * kv_head), int32(every.first)
                for j in range(tiles):
                    q.fill(j, gQ, (own.batch, tile, head))
                    if j == 0:
                        v.fill(0, gV, (own.batch, block, kv_head))
                    do.fill(j, gDO, (own.batch, tile, head))
                    sums.fill(j, gSums, (own.batch, head, tile))
                    head, tile = tiling.following(every, head, tile)
            if SENDER <= warpgroup.rank() < SENDER + SENDERS:
                mine = int32(warpgroup.rank() - SENDER)
                of, part = int32(group * pair), int32(PARTS * every.first + mine)
                for n in range(mine, int32(PARTS * tiles), SENDERS):
                    tma_add(gSum, (of, part), dq.wait(n))
                    store_wait()
                    dq.release(n)
                    part = int32(part + SENDERS)
                    if part >= PARTS * (every.first + every.n):
                        of, part = int32(of + 1), int32(PARTS * every.first + mine)
        else:
            warpgroup.claim_registers(claim)
            dk, dv = zeros(DK), zeros(DV)
            mine, rings = int32(key + EACH * me + S.cols * warpgroup.rank()), (q, do, ds, dq, sums)
            if tiles > 0:
                here = at._replace(row=int32(ROWS * every.first))
                here = here._replace(kept=variant.keep(here))
                keys, values = subtile(k.wait(0), EACH, me), subtile(v.wait(0), EACH, me)
                s = warpgroup.wait(warpgroup.mm_ABt(keys, q.wait(0)))
                p = weighed(int32(0), s, tiling.cut(every, 0), sums, here, mine, scale)
                slope, dv = sloped(int32(0), p, dv, values, rings, me)
                i = int32(0)
                for j in range(int32(tiles - 1)):
                    i = int32(i + 1)
                    if i == every.n:
                        i, here = int32(0), here._replace(head=int32(here.head + 1))
                        here = here._replace(kept=variant.keep(here))
                    here = here._replace(row=int32(ROWS * (every.first + i)))
                    s = warpgroup.mm_ABt(keys, q.wait(j + 1))
                    dk = warpgroup.mma_AB(dk, slope, q.wait(j))
                    part = parts.product(me, ds.wait(j), k.wait(0))
                    s = warpgroup.wait(s, newer=2)
                    mine = int32(key + EACH * me + S.cols * warpgroup.rank())  # anew, for registers' sake
                    p = weighed(int32(j + 1), s, tiling.cut(every, i), sums, here, mine, scale)
                    dk = finished(j, dk, part, rings, me)
                    slope, dv = sloped(int32(j + 1), p, dv, values, rings, me)
                j = int32(tiles - 1)
                dk = warpgroup.mma_AB(dk, slope, q.wait(j))
                dk = finished(j, dk, parts.product(me, ds.wait(j), k.wait(0)), rings, me)
                dq.publish(PARTS * j + me)
            row = own.key + key + EACH * me
            warpgroup.store(gDK, INPUT(dk * unit), (own.batch, row, kv_head, 0), 1, 3, True)
            warpgroup.store(gDV, INPUT(dv), (own.batch, row, kv_head, 0), 1, 3, True)

    return attend, smem
