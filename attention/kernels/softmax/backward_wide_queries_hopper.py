"""Gradients of wide heads for Hopper, dQ: a thread block has 128 queries and goes through the keys that they see, as forward
does. Scores are computed once more than in backward_wide_hopper.py, which computes dK and dV, so that nothing is summed in
global memory."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, subtile, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.base_config import BaseConfig
from ...parts.tiling import zero_first_keys, zero_last_keys
from ...parts.variant import Variant
from ...parts.visibility import CAUSAL, FULL
from .backward_wide_hopper import padded_dims

CONSUMERS, REGISTERS = 2, (24, 240)  # consumer warpgroups; registers of each thread of the producer, of a consumer


@dataclass(frozen=True)
class Config(BaseConfig):
    """The kernel's configuration. stages, v_stages: of the rings of K and of V. Each consumer has 64 queries."""

    stages: int = 2
    v_stages: int = 1
    overlaps_previous = True  # it begins while the grid of backward_wide_hopper.py ends (PDL)

    @property
    def rows(self) -> int:
        """The number of query rows of a thread block."""
        return warpgroup.ROWS * CONSUMERS

    @property
    def threads(self) -> int:
        """The number of threads of a thread block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def dout(self) -> st:
        """The type of a thread block's tile of dO in shared memory."""
        return st(self.rows, self.value_dim, self.dtype)


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: Variant, value_dim: int | None = None) -> Config:
    """The configuration for a problem: head dims padded."""
    return Config(*padded_dims(head_dim, value_dim), dtype, variant, 64)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture."""
    if target.has_wgmma:
        forms, dims = (bf16, fp16) if everything else (bf16,), ((192, 192), (192, 128), (256, 256))
        for input_dtype, variant, (head_dim, value_dim) in itertools.product(forms, (FULL, CAUSAL), dims):
            yield config_for(head_dim, input_dtype, variant, value_dim)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, EACH, INPUT, PARAMS, AUX = config.rows, warpgroup.ROWS, config.dtype, config.params, config.aux
    variant, tiling, sequences = config.variant, config.tiling, config.sequences
    DQ, S = rt(16, config.head_dim, fp32), rt(16, config.kv, fp32)
    readers = CONSUMERS * warpgroup.WARPGROUP
    NONLINEAR, (PRODUCER_REGISTERS, CONSUMER_REGISTERS) = variant.nonlinear, REGISTERS
    smem = shared(
        q=ring(config.query, 1, readers),
        do=ring(config.dout, 1, readers),
        k=ring(config.key, config.stages, readers),
        v=ring(config.value, config.v_stages, readers),
    )

    @inlined
    def rows_of(tile):
        """The rows of a tile that are this consumer's. The warpgroup's index is read anew, so that no loop keeps the
        descriptors of the rows in registers."""
        return subtile(tile, EACH, warpgroup.id())

    @inlined
    def step(j, s, dq, masked, rings, ctx, key, lse, delta, scale):
        """(the scores of the next key block, dQ) after key block j, whose scores are s."""
        q, do, k, v = rings
        dp = warpgroup.mm_ABt(rows_of(do.wait(0)), v.wait(j))
        s, grad = variant.score_and_grad(s, ctx, key)
        p = tiling.weights(s, lse, masked, ctx, key, scale)
        if NONLINEAR:
            p = p * grad
        dp = warpgroup.wait(dp)
        v.release(j)
        ds = INPUT(p * (dp - delta))
        dq = warpgroup.mma_AB(dq, ds, k.wait(j))
        s = warpgroup.mm_ABt(rows_of(q.wait(0)), k.wait(j + 1))
        dq = warpgroup.wait(dq, newer=1)
        k.release(j)
        return warpgroup.wait(s), dq

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def compute_dq(
        gQ: tiled(config.query), gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1), gDO: tiled(config.dout),
        gLseDelta: array(3), gDQ: array(4, INPUT), params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT,
        raster_group: INT, group: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dQ of one of `blocks` query blocks of one of `batch_heads` pairs of batch and head, `raster_group` of which are
        worked on at once; `group` heads share a key head. gLseDelta is (batch, head, row): of each 64 queries first lse, then
        delta. P = exp2(`scale` s - lse), where s is what the variant makes of `unit` Q K^T."""
        q, do, k, v = smem.open()
        grid.wait()
        wg = warpgroup.id()
        block, batch_head = tiling.locate_block(cuda.blockIdx.x, blocks, batch_heads, raster_group)
        batch, head = divmod(batch_head, heads)
        kv_head, _ = divmod(head, group)
        seq, row = sequences.sequence(batch, params), int32(ROWS * block)
        ctx = seq.context(batch, head, row, params, aux)
        kv_blocks = tiling.key_blocks(row, ctx)
        if wg == CONSUMERS:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            q.fill(0, gQ, (seq.batch, block, head))
            for j in range(kv_blocks.n):
                key = tiling.key(kv_blocks, j, ctx)
                k.fill(j, gK, (seq.batch, key, kv_head))
                if j == 0:
                    do.fill(0, gDO, (seq.batch, block, head))
                v.fill(j, gV, (seq.batch, key, kv_head))
            k.fill(kv_blocks.n, gK, (seq.batch, 0, kv_head))  # consumers wait for one block more than there are
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            wg_row = int32(row + EACH * wg)
            warp_row = int32(wg_row + S.rows * warpgroup.rank())
            warp_ctx = ctx._replace(row=warp_row).precompute(variant)
            lse = load(gLseDelta, S.col_vec, (batch, head, int32(wg_row + warp_row)))
            delta = load(gLseDelta, S.col_vec, (batch, head, int32(wg_row + warp_row + EACH)))
            s, dq = warpgroup.wait(warpgroup.mm_ABt(rows_of(q.wait(0)), k.wait(0))), zeros(DQ)
            for j in range(kv_blocks.n):
                masked, key = j < kv_blocks.masked, tiling.key(kv_blocks, j, ctx)
                ahead = kv_blocks.unseen_at_start if j == kv_blocks.masked - 1 else int32(0)
                unseen_at_end = kv_blocks.unseen_at_end if j == 0 else int32(0)
                if ahead > 0 or unseen_at_end > 0:
                    warpgroup.sync_several(CONSUMERS)  # both have computed their scores of these keys
                    zero_first_keys(k.wait(j), ahead, CONSUMERS)
                    zero_last_keys(k.wait(j), unseen_at_end, CONSUMERS)
                    zero_first_keys(v.wait(j), ahead, CONSUMERS)
                    zero_last_keys(v.wait(j), unseen_at_end, CONSUMERS)
                s, dq = step(j, s, dq, masked, (q, do, k, v), warp_ctx, key, lse, delta, scale)
            warpgroup.store(gDQ, INPUT(dq * unit), (seq.batch, wg_row, head, 0), 1, 3, True)

    return compute_dq, smem
