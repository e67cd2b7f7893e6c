"""FlashAttention forward for sm_80 and later: cp.async, ldmatrix and mma.sync.

Every warp has rows_per_warp query rows and reads all key blocks, from the last to the first, so that the blocks that need a
mask come first. The values of a block are copied while its scores are computed, and the next keys during the softmax
(FlashAttention-2, Dao 2023): two __syncthreads for each block, and no mbarriers.

It also serves arrays that TMA cannot address, with bases and strides of 8, 4 or 2 bytes, by more and smaller copies.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from numba import cuda
from numpy import int32

from ops import divmod, load, mma_AB, mma_ABt, store, subtile, truncate, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, pipeline, rt, shared
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import FLOAT, INT, array
from tiles.layout import LANES, WARPGROUP
from tiles.targets import LARGE, MEDIUM, SMALL, Target

from ...parts.forward_config import ForwardConfig, in_pages
from ...parts.online_softmax import Softmax, lowest_max
from ...parts.variant import ScoreContext, Variant
from ...parts.visibility import CAUSAL, FULL


@dataclass(frozen=True)
class Config(ForwardConfig):
    """A kernel's configuration. warps: of a CTA, each with rows_per_warp query rows. stages: of the pipelines. ctas_per_sm: how
    many CTAs should share an SM. vector_bytes: the number of bytes of which addresses and strides are multiples."""

    warps: int
    rows_per_warp: int
    stages: int
    ctas_per_sm: int
    vector_bytes: int = 16

    @property
    def rows(self):
        """Query rows of a CTA."""
        return self.rows_per_warp * self.warps

    @property
    def threads(self):
        """The number of threads of a CTA."""
        return LANES * self.warps

    @property
    def persistent(self):
        """Always False: each query tile has a CTA of its own."""
        return False

    def __str__(self):
        return super().__str__() + f", by {self.vector_bytes} bytes" * (self.vector_bytes != 16)


SHAPES = {  # padded head_dim: (kv, warps, rows_per_warp, stages, ctas_per_sm)
    64: (128, 4, 32, 1, 2),
    96: (64, 4, 32, 2, 2),
    128: (64, 4, 32, 1, 2),
    192: (64, 4, 16, 1, 2),
    256: (64, 4, 16, 1, 2),
}
BY_SHARED_MEMORY = {  # {shared memory of a CTA in bytes: the shapes that differ}, so that two CTAs fit an SM
    SMALL: {96: (64, 4, 32, 1, 2), 128: (32, 4, 32, 1, 2), 192: (32, 4, 16, 1, 2)},  # sm_86, sm_89, sm_120
    MEDIUM: {},  # sm_80
    LARGE: {128: (64, 4, 32, 2, 2), 192: (96, 4, 16, 1, 2)},  # sm_90, sm_100, whose code for D 128 in one stage spills
}
UNMASKED = {64: (112, 4, 32, 1, 2)}  # full attention: as fast as with 128 keys, for which sm_90 spills 40 bytes
VARIED = {64: (64, 4, 32, 2, 2)}  # all but full and causal attention; a mask function has a window's shape
BIAS_LOADED = VARIED | {128: (32, 4, 32, 1, 2)}  # a bias matrix: spills less, or not at all


@functools.lru_cache(1024)
def config_for(
    head_dim: int,
    dtype: dtype,
    variant: Variant,
    shared_limit: int = LARGE,
    vector_bytes: int = 16,
    value_dim: int | None = None,
    **fields: Any,
) -> Config:
    """The configuration for a problem, on a GPU whose CTAs may use `shared_limit` bytes of shared memory. Dims are rounded up
    to the next for which there are kernels; the greater of the two decides the shape. fields: further fields of the Config."""
    padded, padded_value = (min(d for d in SHAPES if d >= dim) for dim in (head_dim, value_dim or head_dim))
    if vector_bytes == 2:  # such loads take registers that cp.async does not
        shared_limit = SMALL
    shapes = SHAPES | BY_SHARED_MEMORY[max(r for r in BY_SHARED_MEMORY if r <= shared_limit)]
    if variant is FULL:
        shapes = shapes | UNMASKED
    elif variant is not CAUSAL:
        shapes = shapes | (BIAS_LOADED if variant.reads_score_matrix else VARIED)
    return Config(padded, padded_value, dtype, variant, *shapes[max(padded, padded_value)], vector_bytes, **fields)


def with_kv(config: Config, kv: int, shared_limit: int) -> Config:
    """The configuration with blocks of `kv` keys, in the shape that other variants have. ValueError: there is none."""
    if config.kv == kv:
        return config
    padded = max(config.head_dim, config.value_dim)
    of_limit = BY_SHARED_MEMORY[max(r for r in BY_SHARED_MEMORY if r <= shared_limit)]
    shapes = [table[padded] for table in (SHAPES | of_limit, UNMASKED, VARIED, BIAS_LOADED) if padded in table]
    shape = next((shape for shape in shapes if shape[0] == kv), None)
    if shape is None:
        raise ValueError(f"family: has no blocks of {kv} keys for head_dim={config.head_dim}, value_dim={config.value_dim}")
    kv, warps, rows_per_warp, stages, ctas_per_sm = shape
    return replace(config, kv=kv, warps=warps, rows_per_warp=rows_per_warp, stages=stages, ctas_per_sm=ctas_per_sm)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of an architecture: for bf16 and 16-byte copies, and with `everything` for fp16 and smaller copies."""
    forms = [(bf16, VECTOR_SIZES[0]), *((bf16, vector_bytes) for vector_bytes in VECTOR_SIZES[1:]), (fp16, VECTOR_SIZES[0])]
    shared_limit = target.shared_bytes
    for (input_dtype, vector_bytes), head_dim, variant in itertools.product(
        forms[: len(forms) if everything else 1], SHAPES, (FULL, CAUSAL)
    ):
        yield config_for(head_dim, input_dtype, variant, shared_limit, vector_bytes)
        if everything and variant is CAUSAL and vector_bytes == VECTOR_SIZES[0]:
            yield config_for(head_dim, input_dtype, variant, shared_limit, vector_bytes, **in_pages())


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, WARP_ROWS, BYTES = config.kv, config.rows, config.rows_per_warp, config.vector_bytes
    PARAMS, AUX = config.params, config.aux
    variant, tiling, sequences, source = config.variant, config.tiling, config.sequences, config.kv_source
    INPUT, S, O = config.dtype, rt(WARP_ROWS, KV, fp32), rt(WARP_ROWS, config.value_dim, fp32)
    Q, PANEL, PANELS = rt(WARP_ROWS, config.head_dim, fp32), rt(WARP_ROWS, config.query.panel_cols, fp32), config.query.panels
    PREPARES, LOW_SCORES, WARPGROUPS = variant.prepares_queries, variant.allows_low_scores, config.warps // WARPGROUP
    STAGES, FLOAT32_OUT, ACCUMULATES = config.stages, config.float32_out, config.accumulates
    OUTPUT = array(4, fp32 if FLOAT32_OUT else INPUT)
    # of the groups of cp.async, keys and values in turn, this many are newer than the one to wait for
    PENDING, PENDING_AFTER_Q = 2 * (STAGES - 1), 2 * (STAGES - 1) + 1
    smem = shared(
        q=pipeline(config.query, 1, config.warps),
        k=pipeline(config.key, STAGES, config.warps),
        v=pipeline(config.value, STAGES, config.warps),
    )
    softmax = Softmax(O, lowest_max(variant))

    @inlined
    def prepare_queries(queries, ctx):
        """A warp's rows of Q, changed by the variant in shared memory."""
        if PREPARES:
            stats = variant.query_stats(load(queries, Q), ctx)
            for i in range(PANELS):  # one after the other, to save registers
                panel = subtile(queries, WARP_ROWS, 0, PANEL.cols, i)
                store(panel, INPUT(variant.prepare_queries(load(panel, PANEL), stats, ctx, PANEL.cols * i)))
            cuda.syncwarp()
        return queries

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def attend(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gO: OUTPUT, gLse: array(3),
        params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT, raster_group: INT,
        group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """O = softmax(Q K^T / sqrt(D)) V and its log-sum-exp, with the variant's changes of scores, for a query tile. There are
        `blocks` tiles for each of `batch_heads` pairs of head and batch, in raster groups of `raster_group` pairs; `group`
        query heads share a key head; exp2(scale s) is the weight of a score s; the row maximum may grow by `slack` before O is
        rescaled."""
        q, k, v = smem.open()
        block, batch_head = tiling.locate_block(cuda.blockIdx.x, blocks, batch_heads, raster_group)
        (block, batch, head), warp = sequences.find_tile(block, batch_head, heads, params), int32(cuda.threadIdx.x // 32)
        sequences.clear_padding(O, gO, gLse, block, batch, head, WARP_ROWS * warp, ACCUMULATES, params)
        if sequences.has_tile(block, batch, params):
            seq, (kv_head, _) = sequences.sequence(batch, params), divmod(head, group)
            shift, first = seq.seqlen_k - seq.seqlen_q, ROWS * block + WARP_ROWS * warp
            base_ctx = ScoreContext(batch, head, first, shift, seq.seqlen_q, seq.seqlen_k, params, aux, 0)
            ctx = base_ctx.precompute(variant)
            kv_blocks = tiling.key_blocks(ROWS * block, ctx)
            n = kv_blocks.n
            if not sequences.bounded_by_array:  # rows behind its ends belong to another sequence
                if not source.paged:
                    gK, gV = truncate(gK, 1, seq.offset_k + seq.seqlen_k), truncate(gV, 1, seq.offset_k + seq.seqlen_k)
                gO, gLse = truncate(gO, 1, seq.offset_q + seq.seqlen_q), truncate(gLse, 2, seq.offset_q + seq.seqlen_q)
            q.fill(0, gQ, (seq.batch, seq.offset_q + ROWS * block, head, 0), 1, 3, 1, BYTES)
            for i in range(STAGES):
                source.copy(k, i, gK, seq, batch, seq.offset_k + tiling.key(kv_blocks, i, ctx), kv_head, n, params, BYTES)
                if i < STAGES - 1:
                    source.copy(v, i, gV, seq, batch, seq.offset_k + tiling.key(kv_blocks, i, ctx), kv_head, n, params, BYTES)
            row = seq.offset_q + ROWS * block + WARP_ROWS * warp
            queries = prepare_queries(subtile(q.wait(0, PENDING_AFTER_Q), WARP_ROWS, warp), ctx)
            if ACCUMULATES:
                o, lse = load(gO, O, (seq.batch, row, head, 0), 1, 3, False), load(gLse, O.col_vec, (seq.batch, head, row))
                state = softmax.resume(o / variant.output(1.0, ctx), lse, variant.initial_max(ctx, softmax.lowest), scale)
            else:
                state = softmax.init(variant.initial_max(ctx, softmax.lowest))
            for i in range(n):
                key, at_v, at_k = tiling.key(kv_blocks, i, ctx), i + STAGES - 1, i + STAGES
                keys = k.wait(i, PENDING)
                source.copy(v, at_v, gV, seq, batch, seq.offset_k + tiling.key(kv_blocks, at_v, ctx), kv_head, n, params, BYTES)
                s = mma_ABt(zeros(S), queries, keys)
                values = v.wait(i, PENDING)
                source.copy(k, at_k, gK, seq, batch, seq.offset_k + tiling.key(kv_blocks, at_k, ctx), kv_head, n, params, BYTES)
                if i < kv_blocks.masked:
                    s = tiling.mask(variant.score_in_edge_block(s, ctx, key), ctx, key)
                    kv_blocks.clear(values, i, WARPGROUPS)
                    row_offset = variant.row_offset_in_edge_block(s, ctx, key)
                else:
                    s = variant.score(s, ctx, key)
                    row_offset = variant.row_offset(s, ctx, key)
                state = state.update_max(s, row_offset, scale, slack)
                o = state.rescale()  # before P, so that the exponentials stay next to the products that they overlap with
                p = state.weights(s, row_offset, scale, LOW_SCORES)
                state = state._replace(o=mma_AB(o, INPUT(variant.drop(p, ctx, key)), values)).add(p)
            o, lse = state.finish(scale, variant, ctx)
            if FLOAT32_OUT:
                store(gO, o, (seq.batch, row, head, 0), 1, 3)
            else:
                store(gO, o, (seq.batch, row, head, 0), 1, 3, BYTES)
            store(gLse, lse, (seq.batch, head, row))

    return attend, smem
