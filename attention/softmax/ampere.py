"""FlashAttention forward for sm_80 and later: cp.async, ldmatrix and mma.sync.

Every warp owns `band` query rows and goes through all key blocks, from the last to the first, so that the ones a mask cuts
come first. While a block's scores are computed its values are on their way, and the next keys under the softmax
(FlashAttention-2, Dao 2023): two meetings of the block a round, and no barriers in memory.

It also takes what TMA cannot: bases and strides of 8, 4 or 2 bytes, by as many smaller copies.
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
from tiles.arguments import FLOAT, INT, array
from tiles.cp_async import PIECES
from tiles.layout import LANES, WARPGROUP
from tiles.targets import LARGE, MEDIUM, SMALL, capability, shared_bytes

from .base_config import BaseConfig, in_pages
from .online import Softmax
from .variants import ScoreContext, Variant
from .visible_keys import CAUSAL, FULL


@dataclass(frozen=True)
class Config(BaseConfig):
    """A kernel's configuration. warps: each has `band` query rows. stages: of the pipelines. resident: how many blocks should
    share a multiprocessor. vector_bytes: the number of bytes of which addresses and strides are multiples."""

    warps: int
    band: int
    stages: int
    ctas_per_sm: int
    vector_bytes: int = 16

    @property
    def rows(self):
        """Query rows of a thread block."""
        return self.band * self.warps

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * self.warps

    @property
    def persistent(self):
        """Always False: blocks are short, and a multiprocessor holds several."""
        return False

    def __str__(self):
        return super().__str__() + f", by {self.vector_bytes} bytes" * (self.vector_bytes != 16)


SHAPES = {  # padded head_dim: (kv, warps, band, stages, resident)
    64: (128, 4, 32, 1, 2),
    96: (64, 4, 32, 2, 2),
    128: (64, 4, 32, 1, 2),
    192: (64, 4, 16, 1, 2),
    256: (64, 4, 16, 1, 2),
}
ROOMS = {  # bytes of shared memory that a block may have: other shapes, of which two blocks share a multiprocessor there
    SMALL: {96: (64, 4, 32, 1, 2), 128: (32, 4, 32, 1, 2), 192: (32, 4, 16, 1, 2)},  # sm_86, sm_89, sm_120
    MEDIUM: {},  # sm_80
    LARGE: {128: (64, 4, 32, 2, 2), 192: (96, 4, 16, 1, 2)},  # sm_90, sm_100, whose code for D 128 in one stage spills
}
UNMASKED = {64: (112, 4, 32, 1, 2)}  # on any GPU for full attention: as fast as with 128 keys, where sm_90 spills 40 bytes
BUSY = {64: (64, 4, 32, 2, 2)}  # on any GPU for all but full and causal attention: a mask has a window's tiles
LOADED = BUSY | {128: (32, 4, 32, 1, 2)}  # and where a bias is read: all spill less, or not at all


@functools.lru_cache(1024)
def config_for(
    head_dim: int,
    dtype: dtype,
    variant: Variant,
    room: int = LARGE,
    vector_bytes: int = 16,
    value_dim: int | None = None,
    **kind: Any,
) -> Config:
    """The configuration for a problem, on a GPU whose blocks may use `room` bytes of shared memory. Dims are rounded up to the
    next for which there are kernels; the greater of the two decides the shape. kind: further fields of the Config."""
    padded, wide = (min(d for d in SHAPES if d >= dim) for dim in (head_dim, value_dim or head_dim))
    least = SMALL if vector_bytes == 2 else max(r for r in ROOMS if r <= room)  # loads take registers that cp.async does not
    shapes = SHAPES | ROOMS[least]
    if variant is FULL:
        shapes = shapes | UNMASKED
    elif variant is not CAUSAL:
        shapes = shapes | (LOADED if variant.reads_score_matrix else BUSY)
    return Config(padded, wide, dtype, variant, *shapes[max(padded, wide)], vector_bytes, **kind)


def of_blocks(config: Config, kv: int, room: int) -> Config:
    """The same configuration with blocks of `kv` keys, in the shape that other variants have. ValueError: there is none."""
    if config.kv == kv:
        return config
    padded = max(config.head_dim, config.value_dim)
    of_room = ROOMS[max(r for r in ROOMS if r <= room)]
    shape = next(
        (of[padded] for of in (SHAPES | of_room, UNMASKED, BUSY, LOADED) if padded in of and of[padded][0] == kv), None
    )
    if shape is None:
        raise ValueError(f"family: has no blocks of {kv} keys for head_dim={config.head_dim}, value_dim={config.value_dim}")
    kv, warps, band, stages, ctas_per_sm = shape
    return replace(config, kv=kv, warps=warps, band=band, stages=stages, ctas_per_sm=ctas_per_sm)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with: for bf16 and whole pieces, or for `everything`. fp16 takes as
    many registers as bf16."""
    forms = [(bf16, PIECES[0]), *((bf16, vector_bytes) for vector_bytes in PIECES[1:]), (fp16, PIECES[0])]
    room = shared_bytes(capability(arch))
    for (of, vector_bytes), head_dim, variant in itertools.product(
        forms[: len(forms) if everything else 1], SHAPES, (FULL, CAUSAL)
    ):
        yield config_for(head_dim, of, variant, room, vector_bytes)
        if everything and variant is CAUSAL and vector_bytes == PIECES[0]:
            yield config_for(head_dim, of, variant, room, vector_bytes, **in_pages())


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, BAND, VECTOR_BYTES = config.kv, config.rows, config.band, config.vector_bytes
    PARAMS, AUX = config.params, config.aux
    variant, tiling, sequences, kv_source = config.variant, config.tiling, config.sequences, config.kv_source
    INPUT, S, O = config.dtype, rt(BAND, KV, fp32), rt(BAND, config.value_dim, fp32)
    Q, PANEL, PANELS = rt(BAND, config.head_dim, fp32), rt(BAND, config.query.panel_cols, fp32), config.query.panels
    PREPARES, DEEP = variant.prepares_queries, variant.allows_low_scores
    STAGES, FLOAT32_OUT, ACCUMULATES, GROUPS = config.stages, config.float32_out, config.accumulates, config.warps // WARPGROUP
    OUTPUT = array(4, fp32 if FLOAT32_OUT else INPUT)
    NEWER = 2 * (STAGES - 1)  # groups of keys and values in turn: so many are younger than the one waited for
    KEYS_ALONE = NEWER + 1  # groups after that of Q, when it is waited for
    smem = shared(
        q=pipeline(config.query, 1, config.warps),
        k=pipeline(config.key, STAGES, config.warps),
        v=pipeline(config.value, STAGES, config.warps),
    )
    softmax = Softmax(O)

    @inlined
    def prepared(queries, ctx):
        """A warp's rows of Q, as the variant changes them."""
        if PREPARES:
            of_queries = variant.query_stats(load(queries, Q), ctx)
            for i in range(PANELS):  # one after the other, for registers' sake
                panel = subtile(queries, BAND, 0, PANEL.cols, i)
                store(panel, INPUT(variant.prepare_queries(load(panel, PANEL), of_queries, ctx, PANEL.cols * i)))
            cuda.syncwarp()
        return queries

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def attend(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gO: OUTPUT, gLse: array(3),
        params: PARAMS, aux: AUX, blocks: INT, heads: INT, batch_heads: INT, band: INT,
        group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """O = softmax(Q K^T / sqrt(D)) V and its log-sum-exp, of what the variant makes of the scores, for a block of query
        rows of one of `batch_heads` pairs of head and batch, `band` of which are worked on at once; `group` query heads share a
        key head; exp2(`scale` s) is the weight of a score, `slack` how far a maximum may lag."""
        q, k, v = smem.open()
        block, batch_head = tiling.place(cuda.blockIdx.x, blocks, batch_heads, band)
        (block, batch, head), warp = sequences.find_tile(block, batch_head, heads, params), int32(cuda.threadIdx.x // 32)
        sequences.clear_padding(O, gO, gLse, block, batch, head, BAND * warp, ACCUMULATES, params)
        if sequences.has_tile(block, batch, params):
            seq, (kv_head, _) = sequences.sequence(batch, params), divmod(head, group)
            shift, first = seq.seqlen_k - seq.seqlen_q, ROWS * block + BAND * warp
            base_ctx = ScoreContext(batch, head, first, shift, seq.seqlen_q, seq.seqlen_k, params, aux, 0)
            ctx = base_ctx._replace(precomputed=variant.precompute(base_ctx))
            kv_blocks = tiling.key_blocks(ROWS * block, ctx)
            n = kv_blocks.n
            if not sequences.bounded_by_array:  # what lies behind the ends is another's
                if not kv_source.paged:
                    gK, gV = truncate(gK, 1, seq.offset_k + seq.seqlen_k), truncate(gV, 1, seq.offset_k + seq.seqlen_k)
                gO, gLse = truncate(gO, 1, seq.offset_q + seq.seqlen_q), truncate(gLse, 2, seq.offset_q + seq.seqlen_q)
            q.fill(0, gQ, (seq.batch, seq.offset_q + ROWS * block, head, 0), 1, 3, 1, VECTOR_BYTES)
            for i in range(STAGES):
                first_key = seq.offset_k + tiling.key(kv_blocks, i, ctx)
                kv_source.copy(k, i, gK, seq, batch, first_key, kv_head, n, params, VECTOR_BYTES)
                if i < STAGES - 1:
                    kv_source.copy(v, i, gV, seq, batch, first_key, kv_head, n, params, VECTOR_BYTES)
            row, queries = seq.offset_q + ROWS * block + BAND * warp, prepared(subtile(q.wait(0, KEYS_ALONE), BAND, warp), ctx)
            if ACCUMULATES:
                o, lse = load(gO, O, (seq.batch, row, head, 0), 1, 3, False), load(gLse, O.col_vec, (seq.batch, head, row))
                state = softmax.resume(o / variant.output(1.0, ctx), lse, variant.initial_max(ctx, variant.max_floor), scale)
            else:
                state = softmax.init(variant.initial_max(ctx, variant.max_floor))
            for i in range(n):
                key, later = tiling.key(kv_blocks, i, ctx), i + STAGES
                keys = k.wait(i, NEWER)
                first_key = seq.offset_k + tiling.key(kv_blocks, later - 1, ctx)
                kv_source.copy(v, later - 1, gV, seq, batch, first_key, kv_head, n, params, VECTOR_BYTES)
                s = mma_ABt(zeros(S), queries, keys)
                values = v.wait(i, NEWER)
                first_key = seq.offset_k + tiling.key(kv_blocks, later, ctx)
                kv_source.copy(k, later, gK, seq, batch, first_key, kv_head, n, params, VECTOR_BYTES)
                if i < kv_blocks.masked:
                    s = tiling.mask(variant.score_in_edge_block(s, ctx, key), ctx, key)
                    kv_blocks.clear(values, i, GROUPS)
                    below = variant.row_offset_in_edge_block(s, ctx, key)
                else:
                    s = variant.score(s, ctx, key)
                    below = variant.row_offset(s, ctx, key)
                state = state.update_max(s, below, scale, slack)
                o = state.rescale()  # before P, so that nothing parts the exponentials from the products that they run under
                p = state.weights(s, below, scale, DEEP)
                state = state._replace(o=mma_AB(o, INPUT(variant.drop(p, ctx, key)), values)).add(p)
            o, lse = state.finish(scale, variant, ctx)
            if FLOAT32_OUT:
                store(gO, o, (seq.batch, row, head, 0), 1, 3)
            else:
                store(gO, o, (seq.batch, row, head, 0), 1, 3, VECTOR_BYTES)
            store(gLse, lse, (seq.batch, head, row))

    return attend, smem
