"""Split-KV absorbed MLA of a few query tokens over latents of fp8, for sm_89 and later, or of int8: half the bytes, where
memory sets the speed.

The algorithm is mla_ampere.py's. Latents are in shared memory as they are, and each product converts them to fp16, exactly. A
key's descale multiplies its scores and its weights, not its latent, which so is not rounded again."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import (
    block,
    divmod,
    finish_sum,
    grid,
    load,
    log2,
    mma_AB_unzipped,
    mma_ABt,
    mma_ABt_unzipped,
    rezipped,
    row_index,
    row_max,
    store,
    subtile,
    unzipped,
    zeros,
)
from tiles import dtype, fp8e4m3, fp16, fp32, inlined, int8, pipeline, rt, shared, st, sv
from tiles.cp_async import VECTOR_SIZES as ALL_VECTOR_SIZES
from tiles.launching.arguments import FLOAT, INT, array, record
from tiles.layout import LANES
from tiles.targets import LARGE, SMALL, Target

from ...parts.decode.cache_loaders import DenseLoader, PagedLoader
from ...parts.decode.key_window import KeyWindow
from ...parts.decode.latent_shape import LATENT, ROTARY
from ...parts.decode.outputs import FinalOutput, OutputTile
from ...parts.decode.splits import FixedSplits
from ...parts.online_softmax import LOWEST, Softmax, over_sum
from ...parts.variant import TokenHeadContext
from .mla_ampere import config_arguments

VECTOR_SIZES = ALL_VECTOR_SIZES[:-1]  # bytes that cp.async copies at a time
KEYS, COMMITS = 16, 3  # keys of a warp's scores; commit groups of a tile: descales, rotated columns, latents


@dataclass(frozen=True)
class Config:
    """A kernel's configuration, as of mla_ampere.py. dtype: of the queries, the rotated columns and the output. warps: of a
    block, each with the scores of 16 keys of a tile. ctas_per_sm: blocks that a multiprocessor is to hold, so that one has
    products while the warps of another are at a barrier. latent: the dtype of latents, fp8e4m3 or int8."""

    dtype: dtype
    window: KeyWindow
    cache: DenseLoader
    result: FinalOutput
    overlaps_previous: bool
    tile_rows: int
    warps: int
    stages: int
    ctas_per_sm: int
    latent: dtype = fp8e4m3

    @property
    def kv(self):
        """The number of keys of a tile."""
        return KEYS * self.warps

    @property
    def threads(self):
        """The number of threads of a block."""
        return LANES * self.warps

    @property
    def params(self):
        """The record of parameters that window, cache and result read."""
        return record(**self.window.params, **self.cache.params, **self.result.params)

    def __str__(self):
        stored = "fp8" if self.latent is fp8e4m3 else self.latent
        kind = f"mla {self.dtype} of {stored} {self.window} {self.cache} {self.result}"
        return f"{kind}, {self.tile_rows} x {self.kv}" + " PDL" * self.overlaps_previous


TILE_ROWS = 16  # rows of a tile; twice as many of a tall one
SHAPES_BY_LIMIT = {  # {bytes of shared memory that a block may have: {rows of a tile: (warps, stages, ctas_per_sm)}}
    SMALL: {TILE_ROWS: (2, 3, 1)},
    LARGE: {TILE_ROWS: (4, 2, 2), 2 * TILE_ROWS: (8, 2, 1)},
}
PAGED_SHAPE = 8, 2, 1  # LARGE: of 16 rows over pages, where the other shape is not timed


def config_for(
    input_dtype: dtype,
    window: KeyWindow,
    cache: DenseLoader,
    result: FinalOutput,
    pdl: bool,
    rows: int,
    shared_limit: int = LARGE,
    latent: dtype = fp8e4m3,
) -> Config:
    """The configuration for `rows` rows of a sequence, on a GPU whose blocks may use `shared_limit` bytes of shared memory."""
    shapes = SHAPES_BY_LIMIT[max(limit for limit in SHAPES_BY_LIMIT if limit <= shared_limit)]
    tile_rows = max(shapes) if rows > TILE_ROWS else TILE_ROWS
    shape = (
        PAGED_SHAPE if type(cache) is PagedLoader and shared_limit >= LARGE and tile_rows == TILE_ROWS else shapes[tile_rows]
    )
    return Config(input_dtype, window, cache, result, pdl, tile_rows, *shape, latent)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with; those of fp8 where it has instructions for it."""
    configs = dict.fromkeys(config_for(*args) for args in config_arguments(target, everything, VECTOR_SIZES))
    for latent in (fp8e4m3, int8) if target.has_fp8 else (int8,):
        yield from (replace(config, latent=latent) for config in configs)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, KV, WARPS, STAGES = config.tile_rows, config.kv, config.warps, config.stages
    INPUT, STORED, PARAMS = config.dtype, config.latent, config.params
    WARP_COLUMNS, AHEAD = LATENT // WARPS, STAGES - 1  # columns of O that a warp has; tiles that are being copied
    S, O = rt(ROWS, KEYS, fp32), rt(ROWS, WARP_COLUMNS, fp32)
    Q, PANEL = rt(ROWS, ROTARY, fp32), ROTARY
    window, cache, result, softmax = config.window, config.cache, config.result, Softmax(O)
    split, PDL, IS_FINAL = FixedSplits(window, KV), config.overlaps_previous, type(config.result) is FinalOutput
    smem = shared(
        q=st(ROWS, LATENT, fp16),
        q_rotary=st(ROWS, ROTARY, INPUT),
        latent=pipeline(st(KV, LATENT, STORED, 64), STAGES, WARPS),
        rotary=pipeline(st(KV, ROTARY, INPUT, 64), STAGES, WARPS),
        descale=pipeline(sv(KV, fp32), STAGES, WARPS),
        weights=st(WARPS * ROWS, KEYS, fp16),
        scratch=sv(WARPS * ROWS, fp32),
    )

    @inlined
    def load_rows(gQ, out_tile, col):
        """Load the block's rows of some columns of Q. A token's rows are contiguous; rows of other tokens load 0, so that the
        tokens' tiles can be added."""
        x = zeros(Q)
        for token in range(out_tile.first_token, out_tile.last_token + 1):
            x = x + load(gQ, Q, (out_tile.batch, token, 0, int32(out_tile.row - token * out_tile.group), col), 3, 4)
        return x

    @inlined
    def load_queries(q, q_rotary, gQ, out_tile, warp):
        """Load the block's rows of Q to shared memory, in the dtypes of the products."""
        for i in range(warp, LATENT // PANEL, WARPS):
            store(subtile(q, ROWS, 0, PANEL, i), unzipped(fp16(load_rows(gQ, out_tile, int32(PANEL * i)))))
        if warp == 0:
            store(q_rotary, INPUT(load_rows(gQ, out_tile, LATENT)))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gLatent: array(4, STORED), gRotary: array(4, INPUT), gDescale: array(2), params: PARAMS,
        row_tiles: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """Compute what mla_ampere.py's kernel computes, with the same parameters. gDescale: (batch or page, row)."""
        q, q_rotary, latent, rotary, descale, weights, scratch = smem.open()
        if PDL:
            if not IS_FINAL:
                grid.release()  # mla_combine.py's blocks may begin, and wait
            grid.wait()
        number, index = divmod(cuda.blockIdx.x, row_tiles)  # a sequence's tiles are neighbours, as they read the same keys
        warp, row, rows = int32(cuda.threadIdx.x // LANES), int32(ROWS * index), int32(tokens * group)
        first_token, last_token = int32(row // group), int32((min(row + ROWS, rows) - 1) // group)
        token = (row_index(O.col_vec) + row) // group
        work = split.first_work(number, splits, sequences, tokens, params)
        sequence = work.sequence
        out_tile = OutputTile(sequence, 0, work.part, work.part_batch, IS_FINAL, row, first_token, last_token, group)
        span = window.key_span(sequence, first_token, last_token, tokens, params)
        first, end = int32(KV * work.tile), span.end
        n = int32(max(0, min(work.end_tile - work.tile, (end - first + KV - 1) // KV)))
        ctx, state = TokenHeadContext(sequence, 0, token, span.shift, tokens, end, params, 0, 0), softmax.init(LOWEST)
        lookup = cache.look_up(latent, gLatent, sequence, first, end, params)
        descale_lookup = cache.look_up(descale, gDescale, sequence, first, end, params)
        for i in range(AHEAD):
            cache.fill_descales(descale, i, gDescale, descale_lookup, sequence, int32(first + KV * i), (), end, n, params)
            cache.fill(rotary, i, gRotary, lookup, sequence, int32(first + KV * i), 0, end, n, params)
            cache.fill(latent, i, gLatent, lookup, sequence, int32(first + KV * i), 0, end, n, params)
            lookup = cache.look_up(latent, gLatent, sequence, int32(first + KV * (i + 1)), end, params)
            descale_lookup = cache.look_up(descale, gDescale, sequence, int32(first + KV * (i + 1)), end, params)
        load_queries(q, q_rotary, gQ, out_tile, warp)
        for i in range(n):
            key, prefetched_key = int32(first + KV * i + KEYS * warp), int32(first + KV * (i + AHEAD))
            tile = latent.wait(i, COMMITS * (AHEAD - 1))
            cache.fill_descales(descale, i + AHEAD, gDescale, descale_lookup, sequence, prefetched_key, (), end, n, params)
            cache.fill(rotary, i + AHEAD, gRotary, lookup, sequence, prefetched_key, 0, end, n, params)
            cache.fill(latent, i + AHEAD, gLatent, lookup, sequence, prefetched_key, 0, end, n, params)
            lookup = cache.look_up(latent, gLatent, sequence, int32(prefetched_key + KV), end, params)
            descale_lookup = cache.look_up(descale, gDescale, sequence, int32(prefetched_key + KV), end, params)
            descales = load(descale.wait_warp(i, COMMITS * AHEAD), S.row_vec)
            s = mma_ABt_unzipped(zeros(S), q, subtile(tile, KEYS, warp))
            s = mma_ABt(s * descales, q_rotary, rotary.wait_warp(i, COMMITS * AHEAD))
            s = window.mask(s, ctx, key, end)
            state = state.update_max_to(block.reduce_max(row_max(s), scratch), scale, slack)
            p = state.weights(s, None, scale)
            state = state.add(p)
            store(subtile(weights, ROWS, warp), fp16(p * descales))
            block.sync()
            o = state.rescale()
            for part in range(WARPS):
                o = mma_AB_unzipped(o, subtile(weights, ROWS, part), subtile(tile, KEYS, part, WARP_COLUMNS, warp))
            state = state._replace(o=o)

        l = block.reduce_sum(finish_sum(state.l), scratch)
        result.store(over_sum(rezipped(state.o), l), out_tile, int32(WARP_COLUMNS * warp), params)
        if warp == 0:
            result.store_lse(state.m + log2(l) / scale, scale, out_tile, params)

    return attend, smem
