"""Gradients of softmax attention for sm_80 and later: cp.async, ldmatrix and mma.sync.

As in backward_hopper.py, a thread block has a block of keys and goes through the queries that see it, and scores are computed
again, keys by queries. Every warp has 16 or 32 keys: the more, the less its products read from shared memory. Where registers
do not hold dK and dV of so many, two warps have the same keys: one computes P and dV, the other dS and dK. dS goes through
shared memory, in tiles of a warp's keys, for dQ = dS K; a warp computes parts of dQ of 16 queries and 64 columns, and adds
them to those of other key blocks. The next queries are loaded meanwhile.

It also serves arrays that TMA cannot load: those whose addresses and strides are multiples of 8, 4 or 2 bytes, by as many
smaller copies.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from numba import cuda
from numpy import int32

from ops import block, divmod, load, mma_AB, mma_ABt, store, subtile, truncate, turned, warp_index, zeros
from ops.memory.lane_order import QUAD
from tiles import bf16, dtype, fp16, fp32, inlined, pipeline, rt, shared, st
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import FLOAT, INT, array
from tiles.layout import LANES, WARPGROUP
from tiles.targets import AMPERE, LARGE, Target

from ...parts.backward.config import BackwardConfig, padded_dim
from ...parts.backward.dq_order import REVERSE_TILES, UNORDERED, AscendingAdds, UnorderedAdds
from ...parts.backward.dq_parts import PANEL, WARP_ROWS, DirectParts, WarpParts
from ...parts.variant import ScoreContext, Variant
from ...parts.visibility import CAUSAL, FULL


@dataclass(frozen=True)
class Config(BackwardConfig):
    """The kernel's configuration. keys_per_warp: keys of a warp. step: queries whose scores a warp has at once. split: do two
    warps have the same keys, one for P and dV, one for dS and dK? ctas_per_sm: thread blocks that a multiprocessor is to hold.
    elements_per_add: how many adjacent elements of dQ a lane adds at once. vector_bytes: the bytes that addresses and strides
    are multiples of. single_block: does a thread block have all keys, and each query see one?"""

    keys_per_warp: int
    step: int
    split: bool
    ctas_per_sm: int
    elements_per_add: int = 1
    vector_bytes: int = 16
    single_block: bool = field(default=False, kw_only=True)

    def __post_init__(self):
        if self.parts.count % self.warps:
            raise ValueError(f"warps: must divide the {self.parts.count} parts of dQ: {self.warps=}, {self}")

    @property
    def adds_dq(self) -> bool:  # type: ignore[override]
        """Does it add parts of dQ to sums? With a single block it stores dQ."""
        return not self.single_block

    @property
    def ordered_adds(self) -> AscendingAdds:
        return AscendingAdds(self.warps, False)

    @property
    def order(self) -> UnorderedAdds:
        if self.single_block:
            return REVERSE_TILES if self.deterministic else UNORDERED
        return super().order

    @property
    def warps(self) -> int:
        """The number of warps of a thread block."""
        return self.kv // self.keys_per_warp * (2 if self.split else 1)

    @property
    def threads(self) -> int:
        """The number of threads of a thread block."""
        return LANES * self.warps

    @property
    def slope_warps(self) -> int:
        """The number of warps of a thread block that each store a row of sums for the gradient of slopes."""
        return self.kv // self.keys_per_warp

    @property
    def parts(self) -> WarpParts:
        """The parts in which dQ is computed and added."""
        shape = self.rows, self.kv, self.head_dim, self.dtype, self.vector_bytes, self.elements_per_add
        return DirectParts(*shape, self.result) if self.single_block else WarpParts(*shape)

    def __str__(self):
        copies = f", by {self.vector_bytes} bytes" * (self.vector_bytes != 16)
        return super().__str__() + " single block" * self.single_block + copies


Shape = tuple[int, int, int, int, bool, int]  # kv, queries, keys_per_warp, step, split, ctas_per_sm
SHAPES: dict[int, Shape] = {  # by padded head_dim
    64: (64, 64, 16, 64, False, 2),
    128: (64, 64, 16, 64, True, 1),
    256: (32, 32, 16, 32, True, 1),
}
PLAIN = SHAPES | {128: (64, 64, 32, 64, True, 2)}  # where the variant takes no registers
ROOMY = PLAIN | {64: (128, 128, 32, 32, False, 2)}  # and a multiprocessor holds two blocks of 97 KB: sm_90
FEWER_QUERIES = PLAIN | {64: (128, 64, 32, 16, False, 2)}  # where 128 queries spill: sm_100; sm_90, full, by less than 16 bytes
Shorts = dict[int, list[tuple[float, float, Shape]]]
SHORT: Shorts = {  # ... and sequences have up to so many queries and keys: sm_90
    64: [(64, math.inf, (64, 64, 16, 32, False, 3)), (128, 128, ROOMY[64])],
    128: [(32, 32, (32, 32, 16, 32, True, 2)), (32, math.inf, (64, 32, 32, 32, True, 2)), (64, 64, PLAIN[128])],
}
SHORT_FULL: Shorts = SHORT | {  # ... where queries see all keys: three resident blocks' 168 registers do not hold all there
    64: [(64, math.inf, (64, 64, 16, 64, False, 2)), (128, 128, ROOMY[64])]
}


def shorts(variant: Variant) -> Shorts:
    """{padded head_dim: (queries, keys, shape)}: shapes of tiles for no more queries and keys than these."""
    return SHORT_FULL if variant is FULL else SHORT


def short_shape(head_dim: int, value_dim: int, variant: Variant, queries: int, keys: int) -> Shape | None:
    """The shape with which this kernel is faster on Hopper than those for Hopper, or None. So few queries and keys leave a
    warpgroup's products half empty, and two or three thread blocks of four warps hide each other's latency."""
    shapes = [] if variant.changes_scores else shorts(variant).get(padded_dim(head_dim, value_dim), [])
    return next((shape for max_queries, max_keys, shape in shapes if queries <= max_queries and keys <= max_keys), None)


@functools.lru_cache(1024)
def config_for(
    head_dim: int,
    dtype: dtype,
    variant: Variant,
    vector_bytes: int = 16,
    value_dim: int | None = None,
    target: Target = AMPERE,
    shape: Shape | None = None,
    **fields: Any,
) -> Config:
    """The configuration for a problem on a GPU of this architecture: both head dims padded to the same of DIMS.
    shape: see short_shape. fields: other fields of BackwardConfig."""
    hopper, padded = target.is_hopper, padded_dim(head_dim, value_dim)
    if variant.changes_scores or variant.uses_random:
        shapes = SHAPES
    elif target.shared_bytes < LARGE:
        shapes = PLAIN
    else:
        shapes = ROOMY if hopper and (variant is not FULL or vector_bytes == VECTOR_SIZES[0]) else FEWER_QUERIES
    elements_per_add = QUAD if hopper else 1  # with a quad sm_100 spills
    return Config(padded, padded, dtype, variant, *(shape or shapes[padded]), elements_per_add, vector_bytes, **fields)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """Configurations to compile and inspect for an architecture: bf16 and addresses that are multiples of 16 bytes, or all."""
    forms = [(bf16, VECTOR_SIZES[0]), *((bf16, vector_bytes) for vector_bytes in VECTOR_SIZES[1:]), (fp16, VECTOR_SIZES[0])]
    for (input_dtype, vector_bytes), head_dim, variant in itertools.product(
        forms[: len(forms) if everything else 1], SHAPES, (FULL, CAUSAL)
    ):
        config = config_for(head_dim, input_dtype, variant, vector_bytes, target=target)
        yield from (config, replace(config, single_block=True))
        if target.has_wgmma and vector_bytes == VECTOR_SIZES[0]:  # short_shape is asked only where TMA could load the arrays
            for _, _, shape in shorts(variant).get(head_dim, []):
                if shape != ROOMY[head_dim]:
                    of_short = config_for(head_dim, input_dtype, variant, vector_bytes, target=target, shape=shape)
                    yield from (of_short, replace(of_short, single_block=True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, WARP_KEYS, STEP, WARPS = config.kv, config.rows, config.keys_per_warp, config.step, config.warps
    PARAMS, AUX, INPUT, SPLIT, NONLINEAR = config.params, config.aux, config.dtype, config.split, config.variant.nonlinear
    variant, tiling, parts, sequences = config.variant, config.tiling, config.parts, config.sequences
    order, slope_gradient, result, OUT = config.order, config.slope_gradient, config.result, config.result.dtype
    KEY_TILES, STEPS, WARPGROUPS = KV // WARP_KEYS, ROWS // STEP, WARPS // WARPGROUP
    # parts of dQ side by side, one below the other, of a warp; the type of the array that they are added to
    PANELS, BANDS, PARTS_PER_WARP = config.head_dim // PANEL, ROWS // WARP_ROWS, parts.count // WARPS
    DQ_ARRAY, VECTOR_BYTES = parts.accum_array, config.vector_bytes
    DK, DV, PART = rt(WARP_KEYS, config.head_dim, fp32), rt(WARP_KEYS, config.value_dim, fp32), rt(WARP_ROWS, PANEL, fp32)
    SCORES, S, P = rt(WARP_KEYS, STEP, fp32), rt(STEP, WARP_KEYS, fp32, "col"), rt(STEP, WARP_KEYS, INPUT, "col")
    smem = shared(
        k=pipeline(config.key, 1, WARPS),
        v=pipeline(config.value, 1, WARPS),
        q=pipeline(config.query, 1, WARPS),
        do=pipeline(config.dout, 1, WARPS),
        ds=st(ROWS * KEY_TILES * (2 if SPLIT and NONLINEAR else 1), WARP_KEYS, INPUT),
    )

    @inlined
    def one_warp_step(j, dkdv, dslope, q, do, k_rows, v_rows, ds_tile, n_keys, ctx, masked, key, gLseDelta, lse_at, scale):
        """((dK, dV), dslope) of a warp after query tile j, STEP queries at a time. dS is stored in shared memory."""
        (dk, dv), (batch, head, row) = dkdv, lse_at
        q_tile, do_tile = q.wait(j, 1), do.wait(j, 0)
        for n in range(STEPS):
            step_ctx = ctx._replace(row=int32(ctx.row + STEP * n))
            q_rows, do_rows = subtile(q_tile, STEP, n), subtile(do_tile, STEP, n)
            s = turned(mma_ABt(zeros(SCORES), k_rows, q_rows))
            lse = load(gLseDelta, S.col_vec, (batch, head, int32(row + STEP * n)), -2, -1, True)
            s, grad = variant.score_and_grad(s, step_ctx, key)
            p = INPUT(tiling.weights(s, lse, masked, step_ctx, key, scale))
            dv = mma_AB(dv, turned(variant.remove_dropped(p)), do_rows)
            dp = turned(mma_ABt(zeros(SCORES), v_rows, do_rows))
            delta = load(gLseDelta, S.col_vec, (batch, head, int32(row + ROWS + STEP * n)), -2, -1, True)
            ds = variant.score_grad(fp32(p), dp, delta, step_ctx)
            dslope, ds = slope_gradient.add(dslope, ds, step_ctx, key), INPUT(ds * grad)
            store(subtile(ds_tile, STEP, STEPS * n_keys + n), ds)
            dk = mma_AB(dk, turned(ds), q_rows)
        return (dk, dv), dslope

    @inlined
    def two_warp_step(j, dkv, dslope, q, do, k_rows, v_rows, ds_tile, n_keys, ctx, masked, key, gLseDelta, lse_at, scale):
        """(dV or dK, dslope) of a warp after query tile j: dV of the first of the two warps that have the same keys, dK of the
        other. P goes from one to the other through the shared memory of dS; the derivatives of scores follow after all dS."""
        first, (batch, head, row) = warp_index() < KEY_TILES, lse_at
        lse_or_delta = load(gLseDelta, S.col_vec, (batch, head, row if first else int32(row + ROWS)), -2, -1, True)
        q_tile, do_tile = q.wait(j, 1), do.wait(j, 0)
        x = turned(mma_ABt(zeros(SCORES), k_rows if first else v_rows, q_tile if first else do_tile))
        if first:
            s, grad = variant.score_and_grad(x, ctx, key)
            p = INPUT(tiling.weights(s, lse_or_delta, masked, ctx, key, scale))
            store(subtile(ds_tile, ROWS, n_keys), p)
            if NONLINEAR:
                store(subtile(ds_tile, ROWS, KEY_TILES + n_keys), INPUT(grad))
            block.sync()
            dkv = mma_AB(dkv, turned(variant.remove_dropped(p)), do_tile)
        else:
            block.sync()
            ds = variant.score_grad(fp32(load(subtile(ds_tile, ROWS, n_keys), P)), x, lse_or_delta, ctx)
            dslope = slope_gradient.add(dslope, ds, ctx, key)
            if NONLINEAR:
                ds = ds * fp32(load(subtile(ds_tile, ROWS, KEY_TILES + n_keys), P))
            ds = INPUT(ds)
            store(subtile(ds_tile, ROWS, n_keys), ds)
            dkv = mma_AB(dkv, turned(ds), q_tile)
        return dkv, dslope

    @inlined
    def add_dq(n, k_tile, ds_tile, gDQAccum, batch_head, tile, unit):
        """Add part n of dQ = dS K of a query tile to the sums in global memory."""
        (down, right), part = divmod(n, PANELS), zeros(PART)
        for m in range(KEY_TILES):
            part = mma_AB(part, subtile(ds_tile, WARP_ROWS, BANDS * m + down), subtile(k_tile, WARP_KEYS, m, PANEL, right))
        parts.add(gDQAccum, part, batch_head, tile, n, unit)

    step = two_warp_step if SPLIT else one_warp_step

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def compute_dq_dk_dv(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDO: array(4, INPUT), gLseDelta: array(3),
        gDQAccum: DQ_ARRAY, gDK: array(4, OUT), gDV: array(4, OUT), params: PARAMS, aux: AUX, blocks: INT, heads: INT,
        batch_heads: INT, raster_group: INT, group: INT, partials: INT, splits: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of one of `blocks` key blocks for one of `batch_heads` pairs of batch and head of gDK, `raster_group` of
        which are worked on at once, and what the block adds to dQ. gDK and gDV have `heads` heads, `partials` for each key head
        (backward_combine.py): one for each of `splits` parts of the query tiles of each group of `group` query heads. P =
        exp2(`scale` s
        - lse), where s is what the variant makes of `unit` Q K^T."""
        k, v, q, do, ds_tile = smem.open()
        number, batch_head = tiling.locate_block(cuda.blockIdx.x, blocks, batch_heads, raster_group)
        slope_row = int32(blocks * (batch_head // heads) + number)
        number, batch, dkv_head = sequences.find_key_block(number, batch_head, heads, KV, params)
        head_group, split = divmod(dkv_head, splits)
        seq, key, warp = sequences.sequence(batch, params), int32(KV * number), warp_index()
        if sequences.packed and warp < KEY_TILES:
            has_padding, row = sequences.padding_keys(key, batch, KV, params)
            if has_padding:
                at_keys = int32(0), int32(row + WARP_KEYS * warp), dkv_head, 0
                result.store(gDK, zeros(DK), at_keys, VECTOR_BYTES)
                result.store(gDV, zeros(DV), at_keys, VECTOR_BYTES)
        if not sequences.has_key(key, batch, params):
            return
        if not sequences.bounded_by_array:  # rows after the ends belong to another sequence
            gK, gV = truncate(gK, 1, seq.offset_k + seq.seqlen_k), truncate(gV, 1, seq.offset_k + seq.seqlen_k)
        if sequences.packed:
            end, end_k = seq.offset_q + seq.seqlen_q, sequences.end_of_keys(batch, params)
            gQ, gDO, gDK, gDV = truncate(gQ, 1, end), truncate(gDO, 1, end), truncate(gDK, 1, end_k), truncate(gDV, 1, end_k)
        n_keys, warp_key = warp % KEY_TILES, int32(key + WARP_KEYS * (warp % KEY_TILES))
        shift = int32(seq.seqlen_k - seq.seqlen_q)
        ctx = ScoreContext(batch, group * head_group, int32(0), shift, seq.seqlen_q, seq.seqlen_k, params, aux, 0)
        q_tiles = tiling.take_split(tiling.query_tiles(key, ctx, group), split, splits)
        first = int32(seq.offset_q + ROWS * tiling.tile_index(q_tiles, order.visit_index(q_tiles.n, 0), key, ctx, group))
        tiles, tiles_before = int32(group * q_tiles.n), sequences.first_tile(batch, params)
        kv_head, _ = divmod(dkv_head, partials)
        k.fill(0, gK, (seq.batch, seq.offset_k + key, kv_head, 0), 1, 3, 1, VECTOR_BYTES)
        v.fill(0, gV, (seq.batch, seq.offset_k + key, kv_head, 0), 1, 3, 1, VECTOR_BYTES)
        q.fill(0, gQ, (seq.batch, first, group * head_group, 0), 1, 3, tiles, VECTOR_BYTES)
        do.fill(0, gDO, (seq.batch, first, group * head_group, 0), 1, 3, tiles, VECTOR_BYTES)
        k_tile = k.wait(0, 3)
        v_tile = v.wait(0, 2)
        q_tiles.clear(k_tile, WARPGROUPS)
        q_tiles.clear(v_tile, WARPGROUPS)
        k_rows, v_rows = subtile(k_tile, WARP_KEYS, n_keys), subtile(v_tile, WARP_KEYS, n_keys)
        dkdv, dslope = zeros(DK) if SPLIT else (zeros(DK), zeros(DV)), slope_gradient.init(SCORES)
        head, i, dq_head = int32(group * head_group), int32(0), int32(group * divmod(batch_head, splits)[0])
        for j in range(tiles):
            index = order.visit_index(q_tiles.n, i)
            tile = tiling.tile_index(q_tiles, index, key, ctx, group)
            tile_ctx, dq_tile = ctx._replace(head=head, row=int32(ROWS * tile)).precompute(variant), int32(tiles_before + tile)
            lse_at, masked = (seq.batch, head, int32(2 * ROWS * dq_tile)), tiling.needs_mask(q_tiles, index)
            dkdv, dslope = step(
                j, dkdv, dslope, q, do, k_rows, v_rows, ds_tile, n_keys, tile_ctx, masked, warp_key, gLseDelta, lse_at, scale
            )
            block.sync()
            last = i + 1 == q_tiles.n  # of the head's tiles
            next_row = first
            if not last:
                next_index = order.visit_index(q_tiles.n, i + 1)
                next_row = int32(seq.offset_q + ROWS * tiling.tile_index(q_tiles, next_index, key, ctx, group))
            next_rows = seq.batch, next_row, int32(head + 1) if last else head, 0
            q.fill(j + 1, gQ, next_rows, 1, 3, tiles, VECTOR_BYTES)
            do.fill(j + 1, gDO, next_rows, 1, 3, tiles, VECTOR_BYTES)
            prior = order.prior_adds(tiling, number, tile, ctx, group)
            order.wait(params, dq_head, dq_tile, 0, prior)
            if SPLIT:
                n = warp
                while n < parts.count:  # a loop that is not unrolled, because registers do not suffice
                    add_dq(n, k_tile, ds_tile, gDQAccum, dq_head, dq_tile, unit)
                    n = int32(n + WARPS)
            else:
                for n in range(PARTS_PER_WARP):
                    add_dq(int32(warp + WARPS * n), k_tile, ds_tile, gDQAccum, dq_head, dq_tile, unit)
            order.arrive(params, dq_head, dq_tile, 0, prior)
            if last:
                if not SPLIT or warp >= KEY_TILES:
                    slope_gradient.store(dslope, params, tile_ctx, int32(KEY_TILES * slope_row + n_keys))
                dslope = slope_gradient.init(SCORES)
            head, dq_head, i = int32(head + last), int32(dq_head + last), int32(0) if last else int32(i + 1)
        row = seq.offset_k + warp_key
        if not SPLIT:
            result.store(gDK, dkdv[0] * unit, (seq.batch, row, dkv_head, 0), VECTOR_BYTES)
            result.store(gDV, variant.output(dkdv[1], ctx), (seq.batch, row, dkv_head, 0), VECTOR_BYTES)
        elif warp >= KEY_TILES:
            result.store(gDK, dkdv * unit, (seq.batch, row, dkv_head, 0), VECTOR_BYTES)
        else:
            result.store(gDV, variant.output(dkdv, ctx), (seq.batch, row, dkv_head, 0), VECTOR_BYTES)

    return compute_dq_dk_dv, smem
