"""Gradients of wide heads for Hopper, dK and dV: a thread block has 64 keys and goes through the queries that see them.

Sums of so many columns fill the registers, so each consumer holds one of the two: the first computes the weights P^T of a tile
of queries and dV = P^T dO, the second dS^T and dK = dS^T Q. They share only P, by way of shared memory. dQ has a kernel of its
own (hopper_wide_queries.py): blocks of so few keys would add to the dQ of each query too often.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, subtile, turned, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.arguments import FLOAT, INT, array, tiled

from ..variants import ScoreContext, Variant
from ..visible_keys import CAUSAL, FULL
from .base_config import BackwardConfig

CONSUMERS, REGISTERS = 2, (24, 240)  # registers a thread of producer and consumer
WEIGHTS, SLOPES = 0, 1  # the consumer that computes weights, and the one that computes dS
DIMS = 128, 192, 256  # padded


@dataclass(frozen=True)
class Config(BackwardConfig):
    """A kernel's shape: stages of the rings of Q, of dO and of P."""

    stages: int = 2
    do_stages: int = 2
    p_stages: int = 2
    overlaps_previous = True

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (CONSUMERS + 1)


def serves(head_dim: int, variant: Variant, value_dim: int | None = None) -> bool:
    """Are these kernels for such heads?"""
    return max(head_dim, value_dim or 0) > 128 and variant.fits_wide_backward


def padded(head_dim: int, value_dim: int | None) -> tuple[int, int]:
    """The next larger dims: of queries and keys, and of values."""
    return min(d for d in DIMS if d >= head_dim), min(d for d in DIMS if d >= (value_dim or head_dim))


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: Variant, value_dim: int | None = None) -> Config:
    """The configuration that serves a problem: the next larger dims."""
    return Config(*padded(head_dim, value_dim), dtype, variant, warpgroup.ROWS, warpgroup.ROWS)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    if arch == "sm_90a":
        forms, dims = (bf16, fp16) if everything else (bf16,), ((192, 192), (192, 128), (256, 256))
        for of, variant, (head_dim, value_dim) in itertools.product(forms, (FULL, CAUSAL), dims):
            yield config_for(head_dim, of, variant, value_dim)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, INPUT, PARAMS, AUX = config.kv, config.rows, config.dtype, config.params, config.aux
    variant, tiling, sequences, order = config.variant, config.tiling, config.sequences, config.order
    DK, DV, S = rt(16, config.head_dim, fp32), rt(16, config.value_dim, fp32), rt(ROWS, 16, fp32, "col")
    P = rt(16, ROWS, INPUT)
    each, both, BENDS = warpgroup.WARPGROUP, CONSUMERS * warpgroup.WARPGROUP, variant.nonlinear
    keep, claim = REGISTERS
    smem = shared(
        k=ring(config.key, 1, each),
        v=ring(config.value, 1, each),
        q=ring(config.query, config.stages, both),
        do=ring(config.dout, config.do_stages, both),
        p=ring(st(KV, ROWS, INPUT), config.p_stages, each, each),
        sums=ring(config.of_rows, config.stages, both),
    )

    @inlined
    def weighed(j, s, sums, here, key, cut, scale):
        """exp2(`scale` s - lse) of tile j's scores, and the same times the derivatives of these."""
        lse = load(subtile(sums.wait(j), ROWS, 0), S.col_vec)
        sums.release(j)
        s, bend = variant.score_and_grad(turned(s), here, key)
        p = tiling.weights(s, lse, cut, here, key, scale)
        if BENDS:
            return turned(p), turned(p * bend)
        else:
            return turned(p), turned(p)

    @inlined
    def sloped(j, dp, p, sums):
        """dS of tile j; waits for its weights."""
        delta = load(subtile(sums.wait(j), ROWS, 1), S.col_vec)
        sums.release(j)
        weights = warpgroup.load(p.wait(j), P)
        p.release(j)
        return turned(turned(fp32(weights)) * (turned(dp) - delta))

    @inlined
    def handed(j, found, p):
        """The weights of tile j. Times the derivatives of scores, they also go to the other consumer."""
        weights, bent = found
        warpgroup.store(p.claim(j), INPUT(bent))
        p.publish(j, True)
        return INPUT(weights)

    @inlined
    def place(j, every, ctx, group, subgroup):
        """(where tile j of queries lies, must it be masked?)"""
        h, i = divmod(j, every.n)
        here = ctx._replace(head=int32(group * subgroup + h), row=int32(ROWS * (every.first + i)))
        return here._replace(precomputed=variant.precompute(here)), tiling.cut(every, i)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: tiled(config.query), gK: tiled(config.key), gV: tiled(config.value),
        gDO: tiled(config.dout), gSums: tiled(config.of_rows, 3, None, 2), gDK: array(4, INPUT), gDV: array(4, INPUT),
        params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT, band: INT, group: INT, shares: INT, spans: INT,
        scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of a block of keys with one of `batch_heads` pairs of share and batch: see hopper.py. The query heads of a
        share come one after the other."""
        k, v, q, do, p, sums = smem.open()
        grid.follow()
        me = warpgroup.id()
        block, batch_head = tiling.place(cuda.blockIdx.x, blocks, batch_heads, band)
        batch, share = divmod(batch_head, heads)
        subgroup, span = divmod(share, spans)
        seq, key = sequences.sequence(batch, params), int32(KV * block)
        ctx = ScoreContext(
            batch, group * subgroup, int32(0), seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0
        )
        every = tiling.span(tiling.tiles(key, ctx, group), span, spans)
        tiles = int32(group * every.n)
        if me == CONSUMERS:
            warpgroup.release_registers(keep)
            kv_head, _ = divmod(share, shares)
            k.fill(0, gK, (seq.batch, block, kv_head))
            head, tile = int32(group * subgroup), int32(every.first)
            for j in range(tiles):
                q.fill(j, gQ, (seq.batch, tile, head))
                if j == 0:
                    v.fill(0, gV, (seq.batch, block, kv_head))
                sums.fill(j, gSums, (seq.batch, head, tile))
                do.fill(j, gDO, (seq.batch, tile, head))
                head, tile = order.following(every, head, tile)
        else:
            warpgroup.claim_registers(claim)
            mine, row = int32(key + S.cols * warpgroup.rank()), seq.offset_k + key
            if me == WEIGHTS:
                dv = zeros(DV)
                if tiles > 0:
                    keys = k.wait(0)
                    every.clear(keys, 1)
                    s = warpgroup.wait(warpgroup.mm_ABt(keys, q.wait(0)))
                    q.release(0)
                    here, cut = place(int32(0), every, ctx, group, subgroup)
                    weights = handed(int32(0), weighed(int32(0), s, sums, here, mine, cut, scale), p)
                    for j in range(1, tiles):
                        s = warpgroup.mm_ABt(keys, q.wait(j))
                        dv = warpgroup.mma_AB(dv, weights, do.wait(j - 1))
                        s = warpgroup.wait(s, newer=1)
                        q.release(j)
                        here, cut = place(int32(j), every, ctx, group, subgroup)
                        found = weighed(j, s, sums, here, mine, cut, scale)
                        dv = warpgroup.wait(dv)
                        do.release(j - 1)
                        weights = handed(j, found, p)
                    dv = warpgroup.wait(warpgroup.mma_AB(dv, weights, do.wait(tiles - 1)))
                    do.release(tiles - 1)
                warpgroup.store(gDV, INPUT(dv), (seq.batch, row, share, 0), 1, 3, True)
            else:
                dk = zeros(DK)
                if tiles > 0:
                    values = v.wait(0)
                    every.clear(values, 1)
                    dp = warpgroup.wait(warpgroup.mm_ABt(values, do.wait(0)))
                    do.release(0)
                    slope = INPUT(sloped(int32(0), dp, p, sums))
                    for j in range(1, tiles):
                        dk = warpgroup.mma_AB(dk, slope, q.wait(j - 1))
                        dp = warpgroup.mm_ABt(values, do.wait(j))
                        dk = warpgroup.wait(dk, newer=1)
                        q.release(j - 1)
                        dp = warpgroup.wait(dp)
                        do.release(j)
                        slope = INPUT(sloped(j, dp, p, sums))
                    dk = warpgroup.wait(warpgroup.mma_AB(dk, slope, q.wait(tiles - 1)))
                    q.release(tiles - 1)
                warpgroup.store(gDK, INPUT(dk * unit), (seq.batch, row, share, 0), 1, 3, True)

    return attend, smem
