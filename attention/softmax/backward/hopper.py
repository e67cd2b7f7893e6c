"""Gradients of softmax attention for Hopper: a thread block has a block of keys and goes through the queries that see it.

Scores are computed again, keys by queries, so that the weights P^T and dS^T lie in registers where the products that give dV and
dK take them from. Only dS goes through shared memory, once, for dQ = dS K needs all of the block's keys: a part of dQ goes from
each consumer to a warp that has TMA add it, in float32, to what other blocks of keys have found. The query heads that share a key
head come one after the other, so dK and dV are sums in registers.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod, exp2, load, store_wait, subtile, tma_add, turned, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.arguments import FLOAT, INT, array, tiled

from ..kind import Kind
from ..seen import CAUSAL, FULL
from ..variants import At, Variant
from .parts import ByRows, parts_of
from .tiling import Facing

CONSUMERS, REGISTERS = 2, (24, 240)  # registers a thread of the producers and of the consumers
FILLER, SENDER = 0, 1  # which of the producers' warps brings tiles, and which sends dQ


@dataclass(frozen=True)
class Config(Kind):
    """A kernel's shape: query rows of a tile, stages of the rings of Q and dO, of dS, and of the parts of dQ. Each consumer owns
    64 keys; where there are no more than 64, half of the columns of dK and dV."""

    queries: int
    stages: int = 2
    ds_stages: int = 2
    dq_stages: int = 2
    do_stages: int = 2
    ahead: bool = False
    early: bool = False
    rounded: bool = False
    dk_first: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.queries

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one warpgroup more."""
        return warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def tiling(self) -> Facing:  # type: ignore[override]
        """Which queries see a block of keys."""
        return Facing(self.rows, self.kv, self.variant)

    @property
    def share(self) -> int:
        """How many consumers share the columns of the same keys."""
        return CONSUMERS * warpgroup.ROWS // self.kv

    @property
    def parts(self) -> ByRows:
        """How dQ is cut."""
        return parts_of(self.rows, self.kv, self.head_dim, self.dtype, CONSUMERS)

    @property
    def sums(self) -> sv:
        """Two numbers of each of a tile's rows, one after the other: the log-sum-exp, and the sum of dO O."""
        return sv(2 * self.rows, fp32)


SHAPES: dict[int, tuple[int, ...]] = {64: (128, 128), 128: (128, 64), 256: (64, 64, 1, 1, 2, 1)}  # padded head_dim: (kv, queries, stages)


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: Variant, value_dim: int | None = None, **kind: Any) -> Config:
    """The configuration that serves a problem: the next larger dims, both as the greater one."""
    padded = min(d for d in SHAPES if d >= max(head_dim, value_dim or head_dim))
    kv, *shape = SHAPES[padded]
    return Config(padded, padded, dtype, variant, kv, *shape, **kind)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    if arch == "sm_90a":
        for of, head_dim, variant in itertools.product((bf16, fp16) if everything else (bf16,), SHAPES, (FULL, CAUSAL)):
            yield config_for(head_dim, of, variant)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, EACH = config.kv, config.rows, warpgroup.ROWS  # keys of a block, queries of a tile, keys of a consumer
    MINE, PARTS = config.parts.count // CONSUMERS, config.parts.count
    SHARE, AHEAD, EARLY, NOT_EARLY = config.share, config.ahead, config.early, not config.early
    NOT_AHEAD = not config.ahead
    ROUNDED = config.rounded
    DK_FIRST, NOT_DK_FIRST = config.dk_first, not config.dk_first
    TWO = MINE == 2
    AFTER_DV = int(config.dk_first)
    AFTER_FIRST = 1 - config.dk_first
    AFTER_DP, AFTER_DQ, AFTER_DK = int(config.early), (0 if TWO else 1 - config.dk_first) + config.ahead, int(config.ahead)
    KEYS, SHARED = CONSUMERS // SHARE, SHARE > 1
    GIVEN, AUX, INPUT = config.given, config.aux, config.dtype
    variant, tiling, parts, sequences = config.variant, config.tiling, config.parts, config.sequences
    K_COLS, V_COLS = config.head_dim // SHARE, config.value_dim // SHARE
    DK, DV, S = rt(16, K_COLS, fp32), rt(16, V_COLS, fp32), rt(ROWS, 16, fp32, "col")
    readers = CONSUMERS * warpgroup.WARPGROUP
    keep, claim = REGISTERS
    smem = shared(
        k=ring(config.key, 1, readers),
        v=ring(config.value, 1, readers),
        q=ring(config.query, config.stages, readers),
        do=ring(st(ROWS, config.value_dim, INPUT), config.do_stages, readers),
        ds=ring(st(ROWS, KV, INPUT), config.ds_stages, readers, KEYS * warpgroup.WARPGROUP),
        dq=ring(parts.tile, config.dq_stages, 1, warpgroup.WARPGROUP),
        sums=ring(config.sums, config.stages, readers),
    )

    @inlined
    def columns(tile, cols, share):
        """A consumer's columns of a tile."""
        if SHARED:
            return subtile(tile, ROWS, 0, cols, share)
        else:
            return tile

    @inlined
    def send(dq, number, part):
        """Hand a part of dQ to the sender."""
        warpgroup.store(dq.claim(number), part)
        dq.publish(number)

    def through():
        """What becomes of dK and dV by one tile of queries; `cut` by the mask or not."""

        @inlined
        def step(j, cut, s, dk, dv, rings, keys, values, me, at, key, scale):
            k, q, do, ds, dq, sums = rings
            if AHEAD:
                x = s
                dp = warpgroup.mm_ABt(values, do.wait(j))
            else:
                scores = warpgroup.mm_ABt(keys, q.wait(j))
                dp = warpgroup.mm_ABt(values, do.wait(j))
                x = turned(warpgroup.wait(scores, newer=1))
            of_rows = sums.wait(j)
            x = variant.score(x, at, key)
            if cut:
                x = tiling.mask(x, at, key)
            p = exp2(x * scale - load(subtile(of_rows, ROWS, 0), S.col_vec))
            weights = INPUT(turned(p))
            if ROUNDED:
                p = fp32(turned(weights))
            if EARLY:
                dv_next = warpgroup.mma_AB(dv, weights, columns(do.wait(j), V_COLS, me % SHARE))
            dp = turned(warpgroup.wait(dp, newer=AFTER_DP))
            slope = INPUT(turned(p * (dp - load(subtile(of_rows, ROWS, 1), S.col_vec))))
            sums.release(j)
            if NOT_EARLY:
                dv_next = warpgroup.mma_AB(dv, weights, columns(do.wait(j), V_COLS, me % SHARE))
            if me % SHARE == 0:
                warpgroup.store_transposed(subtile(ds.claim(j), ROWS, 0, EACH, me // SHARE), slope)
                ds.publish(j)
            if DK_FIRST:
                dk_next = warpgroup.mma_AB(dk, slope, columns(q.wait(j), K_COLS, me % SHARE))
            dv_next = warpgroup.wait(dv_next, newer=AFTER_DV)
            do.release(j)
            every = ds.wait(j)
            found = parts.product(me, every, k.wait(0))
            if NOT_DK_FIRST:
                dk_next = warpgroup.mma_AB(dk, slope, columns(q.wait(j), K_COLS, me % SHARE))
            if TWO:
                send(dq, PARTS * j + me, warpgroup.wait(found, newer=AFTER_FIRST))
                found = parts.product(CONSUMERS + me, every, k.wait(0))
            if AHEAD:
                s_next = warpgroup.mm_ABt(keys, q.wait(j + 1))
            send(dq, PARTS * j + int32(PARTS - CONSUMERS + me), warpgroup.wait(found, newer=AFTER_DQ))
            ds.release(j)
            dk_next = warpgroup.wait(dk_next, newer=AFTER_DK)
            q.release(j)
            if AHEAD:
                x_next = turned(warpgroup.wait(s_next))
            else:
                x_next = s
            return x_next, dk_next, dv_next

        return step

    step = through()

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: tiled(config.query, unit=1), gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1),
        gDO: tiled(st(ROWS, config.value_dim, INPUT), unit=1), gSums: tiled(config.sums, 3, None, 2),
        gSum: tiled(parts.tile, 3, 1, 2), gDK: array(4, INPUT), gDV: array(4, INPUT),
        given: GIVEN, aux: AUX, blocks: INT, heads: INT, pairs: INT, band: INT, group: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of a block of keys of one of `pairs` pairs of key head and batch, `band` of which are worked on at once, and
        what it adds to dQ of the `group` query heads that share the head. A weight is exp2(`scale` s - lse), its score `unit` s."""
        k, v, q, do, ds, dq, sums = smem.open()
        me = warpgroup.id()
        block, pair = tiling.place(cuda.blockIdx.x, blocks, pairs, band)
        batch, kv_head = divmod(pair, heads)
        own, key = sequences.sequence(batch, given), int32(KV * block)
        at = At(batch, group * kv_head, int32(0), own.keys - own.queries, own.queries, own.keys, given, aux, 0)
        every = tiling.tiles(key, at)
        j = int32(0)
        if me == CONSUMERS:
            warpgroup.release_registers(keep)
            if warpgroup.rank() == FILLER:
                k.fill(0, gK, (own.batch, key, kv_head))
                v.fill(0, gV, (own.batch, key, kv_head))
                for h in range(group):
                    head = int32(group * kv_head + h)
                    for i in range(every.n):
                        tile = tiling.tile(every, int32(i))
                        q.fill(j, gQ, (own.batch, ROWS * tile, head))
                        sums.fill(j, gSums, (own.batch, head, tile))
                        do.fill(j, gDO, (own.batch, ROWS * tile, head))
                        j = int32(j + 1)
                if AHEAD:
                    q.fill(j, gQ, (own.batch, 0, group * kv_head))
            if warpgroup.rank() == SENDER:
                for h in range(group):
                    place = int32(group * pair + h)
                    for i in range(every.n):
                        tile = int32(PARTS * tiling.tile(every, int32(i)))
                        for n in range(PARTS):
                            tma_add(gSum, (place, tile + n), dq.wait(j))
                            store_wait()
                            dq.release(j)
                            j = int32(j + 1)
        else:
            warpgroup.claim_registers(claim)
            keys, values = subtile(k.wait(0), EACH, me // SHARE), subtile(v.wait(0), EACH, me // SHARE)
            mine = int32(key + EACH * (me // SHARE) + S.cols * warpgroup.rank())
            rings = k, q, do, ds, dq, sums
            dk, dv = zeros(DK), zeros(DV)
            if AHEAD:
                s = turned(warpgroup.wait(warpgroup.mm_ABt(keys, q.wait(0))))
            else:
                s = 0
            for head in range(group * kv_head, group * kv_head + group):
                stands = at._replace(head=head)
                kept = variant.keep(stands)
                for i in range(every.n):
                    here = stands._replace(row=int32(ROWS * tiling.tile(every, int32(i))), kept=kept)
                    s, dk, dv = step(int32(j + i), i < every.cut, s, dk, dv, rings, keys, values, me, here, mine, scale)
                j = int32(j + every.n)
            if AHEAD:
                q.release(j)
            row = own.key + key + EACH * (me // SHARE)
            warpgroup.store(gDK, INPUT(dk * unit), (own.batch, row, kv_head, K_COLS * (me % SHARE)), 1, 3, True)
            warpgroup.store(gDV, INPUT(dv), (own.batch, row, kv_head, V_COLS * (me % SHARE)), 1, 3, True)

    return attend, smem
