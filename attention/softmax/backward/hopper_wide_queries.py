"""Gradients of wide heads for Hopper, dQ: a thread block has 128 queries and goes through the keys that they see, as forward
does. Scores are computed a second time (the first is in hopper_wide.py, for dK and dV), so that nothing is summed in memory."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, subtile, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.arguments import FLOAT, INT, array, tiled

from ..base_config import BaseConfig
from ..tiling import zero_first_keys, zero_last_keys
from ..variants import ScoreContext, Variant
from ..visible_keys import CAUSAL, FULL
from .hopper_wide import padded

CONSUMERS, REGISTERS = 2, (24, 240)  # registers a thread of producer and consumer


@dataclass(frozen=True)
class Config(BaseConfig):
    """A kernel's shape: stages of the rings of K and of V. Each consumer owns 64 queries."""

    stages: int = 2
    v_stages: int = 1
    overlaps_previous = True  # it begins while hopper_wide.py's grid ends

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return warpgroup.ROWS * CONSUMERS

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def dout(self) -> st:
        """A block's tile of dO."""
        return st(self.rows, self.value_dim, self.dtype)


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: Variant, value_dim: int | None = None) -> Config:
    """The configuration that serves a problem: the next larger dims."""
    return Config(*padded(head_dim, value_dim), dtype, variant, 64)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with."""
    if arch == "sm_90a":
        forms, dims = (bf16, fp16) if everything else (bf16,), ((192, 192), (192, 128), (256, 256))
        for of, variant, (head_dim, value_dim) in itertools.product(forms, (FULL, CAUSAL), dims):
            yield config_for(head_dim, of, variant, value_dim)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, EACH, INPUT, PARAMS, AUX = config.rows, warpgroup.ROWS, config.dtype, config.params, config.aux
    variant, tiling, sequences = config.variant, config.tiling, config.sequences
    DQ, S = rt(16, config.head_dim, fp32), rt(16, config.kv, fp32)
    readers = CONSUMERS * warpgroup.WARPGROUP
    BENDS, (keep, claim) = variant.nonlinear, REGISTERS
    smem = shared(
        q=ring(config.query, 1, readers),
        do=ring(config.dout, 1, readers),
        k=ring(config.key, config.stages, readers),
        v=ring(config.value, config.v_stages, readers),
    )

    @inlined
    def rows_of(tile):
        """A consumer's rows of a tile. The consumer's number is read anew, so that no loop keeps their descriptors in
        registers."""
        return subtile(tile, EACH, warpgroup.id())

    @inlined
    def step(j, s, dq, cut, rings, here, key, lse, delta, scale):
        """(the scores of the next key block, dQ) after key block j, whose scores are s."""
        q, do, k, v = rings
        dp = warpgroup.mm_ABt(rows_of(do.wait(0)), v.wait(j))
        s, bend = variant.score_and_grad(s, here, key)
        p = tiling.weights(s, lse, cut, here, key, scale)
        if BENDS:
            p = p * bend
        dp = warpgroup.wait(dp)
        v.release(j)
        slope = INPUT(p * (dp - delta))
        dq = warpgroup.mma_AB(dq, slope, k.wait(j))
        s = warpgroup.mm_ABt(rows_of(q.wait(0)), k.wait(j + 1))
        dq = warpgroup.wait(dq, newer=1)
        k.release(j)
        return warpgroup.wait(s), dq

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: tiled(config.query), gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1), gDO: tiled(config.dout),
        gSums: array(3), gDQ: array(4, INPUT), params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT, band: INT,
        group: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dQ of a block of queries of one of `batch_heads` pairs of head and batch, `band` of which are worked on at once;
        `group` heads share a key head. Of each 64 queries gSums has the log-sum-exps, and then the sums of dO O. The weight of
        a score s is exp2(`scale` s - lse); before the variant made something of it, it was `unit` Q K^T."""
        q, do, k, v = smem.open()
        grid.wait()
        me = warpgroup.id()
        block, batch_head = tiling.place(cuda.blockIdx.x, blocks, batch_heads, band)
        batch, head = divmod(batch_head, heads)
        kv_head, _ = divmod(head, group)
        seq, row = sequences.sequence(batch, params), int32(ROWS * block)
        ctx = ScoreContext(batch, head, row, seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0)
        kv_blocks = tiling.key_blocks(row, ctx)
        if me == CONSUMERS:
            warpgroup.release_registers(keep)
            q.fill(0, gQ, (seq.batch, block, head))
            for j in range(kv_blocks.n):
                key = tiling.key(kv_blocks, j, ctx)
                k.fill(j, gK, (seq.batch, key, kv_head))
                if j == 0:
                    do.fill(0, gDO, (seq.batch, block, head))
                v.fill(j, gV, (seq.batch, key, kv_head))
            k.fill(kv_blocks.n, gK, (seq.batch, 0, kv_head))  # consumers ask for one block more than there are
        else:
            warpgroup.claim_registers(claim)
            first = int32(row + EACH * me)
            mine = int32(first + S.rows * warpgroup.rank())
            here = ctx._replace(row=mine)
            here = here._replace(precomputed=variant.precompute(here))
            lse = load(gSums, S.col_vec, (batch, head, int32(first + mine)))
            delta = load(gSums, S.col_vec, (batch, head, int32(first + mine + EACH)))
            s, dq = warpgroup.wait(warpgroup.mm_ABt(rows_of(q.wait(0)), k.wait(0))), zeros(DQ)
            for j in range(kv_blocks.n):
                cut, key = j < kv_blocks.masked, tiling.key(kv_blocks, j, ctx)
                ahead, behind = (
                    kv_blocks.unseen_ahead if j == kv_blocks.masked - 1 else int32(0),
                    kv_blocks.unseen_behind if j == 0 else int32(0),
                )
                if ahead > 0 or behind > 0:
                    warpgroup.sync_several(CONSUMERS)  # both have their scores of these keys
                    zero_first_keys(k.wait(j), ahead, CONSUMERS)
                    zero_last_keys(k.wait(j), behind, CONSUMERS)
                    zero_first_keys(v.wait(j), ahead, CONSUMERS)
                    zero_last_keys(v.wait(j), behind, CONSUMERS)
                s, dq = step(j, s, dq, cut, (q, do, k, v), here, key, lse, delta, scale)
            warpgroup.store(gDQ, INPUT(dq * unit), (seq.batch, first, head, 0), 1, 3, True)

    return attend, smem
