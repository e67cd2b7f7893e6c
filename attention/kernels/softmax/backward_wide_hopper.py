"""Gradients of wide heads for Hopper, dK and dV: a thread block has 64 keys and goes through the queries that see them.

Sums of so many columns fill the registers, so each consumer has one of the two: the first computes P^T of a query tile and
dV = P^T dO, the second dS^T and dK = dS^T Q. They share only P, through shared memory. dQ has a kernel of its own
(backward_wide_queries_hopper.py): blocks of so few keys would add to the dQ of each query too often.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, grid, load, subtile, turned, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.backward.config import BackwardConfig
from ...parts.variant import Variant
from ...parts.visibility import CAUSAL, FULL

CONSUMERS, REGISTERS = 2, (24, 240)  # consumer warpgroups; registers of each thread of the producer, of a consumer
P_DV, DS_DK = 0, 1  # the consumer that computes P and dV, and the one that computes dS and dK
DIMS = 128, 192, 256  # head dims are padded to one of these


@dataclass(frozen=True)
class Config(BackwardConfig):
    """The kernel's configuration. stages, do_stages, p_stages: of the rings of Q, of dO and of P."""

    stages: int = 2
    do_stages: int = 2
    p_stages: int = 2
    overlaps_previous = True
    adds_dq = False

    @property
    def threads(self) -> int:
        """The number of threads of a thread block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (CONSUMERS + 1)


def serves(head_dim: int, variant: Variant, value_dim: int | None = None) -> bool:
    """Are this kernel and backward_wide_queries_hopper for such head dims and such a variant?"""
    return max(head_dim, value_dim or 0) > 128 and variant.fits_wide_backward


def padded_dims(head_dim: int, value_dim: int | None) -> tuple[int, int]:
    """(head dim of queries and keys, that of values), each padded to the next larger one of DIMS."""
    return min(d for d in DIMS if d >= head_dim), min(d for d in DIMS if d >= (value_dim or head_dim))


@functools.lru_cache(1024)
def config_for(head_dim: int, dtype: dtype, variant: Variant, value_dim: int | None = None) -> Config:
    """The configuration for a problem: head dims padded."""
    return Config(*padded_dims(head_dim, value_dim), dtype, variant, warpgroup.ROWS, warpgroup.ROWS)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture."""
    if target.has_wgmma:
        forms, dims = (bf16, fp16) if everything else (bf16,), ((192, 192), (192, 128), (256, 256))
        for input_dtype, variant, (head_dim, value_dim) in itertools.product(forms, (FULL, CAUSAL), dims):
            yield config_for(head_dim, input_dtype, variant, value_dim)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, INPUT, PARAMS, AUX = config.kv, config.rows, config.dtype, config.params, config.aux
    variant, tiling, sequences, order = config.variant, config.tiling, config.sequences, config.order
    DK, DV, S = rt(16, config.head_dim, fp32), rt(16, config.value_dim, fp32), rt(ROWS, 16, fp32, "col")
    P = rt(16, ROWS, INPUT)
    ONE, BOTH, NONLINEAR = warpgroup.WARPGROUP, CONSUMERS * warpgroup.WARPGROUP, variant.nonlinear  # warps of consumers
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = REGISTERS
    smem = shared(
        k=ring(config.key, 1, ONE),
        v=ring(config.value, 1, ONE),
        q=ring(config.query, config.stages, BOTH),
        do=ring(config.dout, config.do_stages, BOTH),
        p=ring(st(KV, ROWS, INPUT), config.p_stages, ONE, ONE),
        lse_delta=ring(config.lse_delta, config.stages, BOTH),
    )

    @inlined
    def compute_p(j, s, lse_delta, ctx, key, masked, scale):
        """(P^T of query tile j, P^T times the derivatives of the scores), where P = exp2(`scale` s - lse)."""
        lse = load(subtile(lse_delta.wait(j), ROWS, 0), S.col_vec)
        lse_delta.release(j)
        s, grad = variant.score_and_grad(turned(s), ctx, key)
        p = tiling.weights(s, lse, masked, ctx, key, scale)
        if NONLINEAR:
            return turned(p), turned(p * grad)
        else:
            return turned(p), turned(p)

    @inlined
    def compute_ds(j, dp, p_ring, lse_delta):
        """dS^T of query tile j, whose P the other consumer sends: P^T (dP^T - delta)."""
        delta = load(subtile(lse_delta.wait(j), ROWS, 1), S.col_vec)
        lse_delta.release(j)
        p = warpgroup.load(p_ring.wait(j), P)
        p_ring.release(j)
        return turned(turned(fp32(p)) * (turned(dp) - delta))

    @inlined
    def send_p(j, p_and_p_grad, p_ring):
        """P^T of query tile j in 16 bits. P^T times the derivatives of the scores is sent to the other consumer."""
        p, p_grad = p_and_p_grad
        warpgroup.store(p_ring.claim(j), INPUT(p_grad))
        p_ring.publish(j, False)
        return INPUT(p)

    @inlined
    def context_of(j, q_tiles, ctx, group, head_group):
        """(the context of query tile j, must it be masked?)"""
        h, i = divmod(j, q_tiles.n)
        tile_ctx = ctx._replace(head=int32(group * head_group + h), row=int32(ROWS * (q_tiles.first + i)))
        return tile_ctx.precompute(variant), tiling.needs_mask(q_tiles, i)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def compute_dk_dv(
        gQ: tiled(config.query), gK: tiled(config.key), gV: tiled(config.value),
        gDO: tiled(config.dout), gLseDelta: tiled(config.lse_delta, 3, None, 2), gDK: array(4, INPUT), gDV: array(4, INPUT),
        params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT, raster_group: INT, group: INT, partials: INT,
        splits: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of a key block. backward_hopper.py documents the parameters. The query heads of a group come one after the
        other."""
        k, v, q, do, p_ring, lse_delta = smem.open()
        grid.follow()
        wg = warpgroup.id()
        block, batch_head = tiling.locate_block(cuda.blockIdx.x, blocks, batch_heads, raster_group)
        batch, dkv_head = divmod(batch_head, heads)
        head_group, split = divmod(dkv_head, splits)
        seq, key = sequences.sequence(batch, params), int32(KV * block)
        ctx = seq.context(batch, group * head_group, int32(0), params, aux)
        q_tiles = tiling.take_split(tiling.query_tiles(key, ctx, group), split, splits)
        tiles = int32(group * q_tiles.n)
        if wg == CONSUMERS:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            kv_head, _ = divmod(dkv_head, partials)
            k.fill(0, gK, (seq.batch, block, kv_head))
            head, tile = int32(group * head_group), int32(q_tiles.first)
            for j in range(tiles):
                q.fill(j, gQ, (seq.batch, tile, head))
                if j == 0:
                    v.fill(0, gV, (seq.batch, block, kv_head))
                lse_delta.fill(j, gLseDelta, (seq.batch, head, tile))
                do.fill(j, gDO, (seq.batch, tile, head))
                head, tile = order.next_tile(q_tiles, head, tile)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            warp_key, row = int32(key + S.cols * warpgroup.rank()), seq.offset_k + key
            if wg == P_DV:
                dv = zeros(DV)
                if tiles > 0:
                    k_tile = k.wait(0)
                    q_tiles.clear(k_tile, 1)
                    s = warpgroup.wait(warpgroup.mm_ABt(k_tile, q.wait(0)))
                    q.release(0)
                    tile_ctx, masked = context_of(int32(0), q_tiles, ctx, group, head_group)
                    p16 = send_p(int32(0), compute_p(int32(0), s, lse_delta, tile_ctx, warp_key, masked, scale), p_ring)
                    for j in range(1, tiles):
                        s = warpgroup.mm_ABt(k_tile, q.wait(j))
                        dv = warpgroup.mma_AB(dv, p16, do.wait(j - 1))
                        s = warpgroup.wait(s, newer=1)
                        q.release(j)
                        tile_ctx, masked = context_of(int32(j), q_tiles, ctx, group, head_group)
                        p_and_p_grad = compute_p(j, s, lse_delta, tile_ctx, warp_key, masked, scale)
                        dv = warpgroup.wait(dv)
                        do.release(j - 1)
                        p16 = send_p(j, p_and_p_grad, p_ring)
                    dv = warpgroup.wait(warpgroup.mma_AB(dv, p16, do.wait(tiles - 1)))
                    do.release(tiles - 1)
                warpgroup.store(gDV, INPUT(dv), (seq.batch, row, dkv_head, 0), 1, 3, True)
            else:
                dk = zeros(DK)
                if tiles > 0:
                    v_tile = v.wait(0)
                    q_tiles.clear(v_tile, 1)
                    dp = warpgroup.wait(warpgroup.mm_ABt(v_tile, do.wait(0)))
                    do.release(0)
                    ds = INPUT(compute_ds(int32(0), dp, p_ring, lse_delta))
                    for j in range(1, tiles):
                        dk = warpgroup.mma_AB(dk, ds, q.wait(j - 1))
                        dp = warpgroup.mm_ABt(v_tile, do.wait(j))
                        dk = warpgroup.wait(dk, newer=1)
                        q.release(j - 1)
                        dp = warpgroup.wait(dp)
                        do.release(j)
                        ds = INPUT(compute_ds(j, dp, p_ring, lse_delta))
                    dk = warpgroup.wait(warpgroup.mma_AB(dk, ds, q.wait(tiles - 1)))
                    q.release(tiles - 1)
                warpgroup.store(gDK, INPUT(dk * unit), (seq.batch, row, dkv_head, 0), 1, 3, True)

    return compute_dk_dv, smem
