"""Split-KV absorbed MLA of a few query tokens, for sm_80 and later: cp.async, ldmatrix and mma.sync.

All heads and all tokens share one row of the cache for each key, and its first 512 columns are the value of them all. So a
tile's rows are heads and tokens, as in attention.decode, but O is too wide for one warp's registers: for S = Q K^T warps share
out a tile's keys, for O += P V they share out O's columns. In between there are three barriers: two of the row maxima's
reduction, one after P is stored."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import block, divmod, finish_sum, grid, log2, mma_AB, mma_ABt, row_index, row_max, store, subtile, zeros
from tiles import bf16, dtype, fp16, fp32, pipeline, rt, shared, st, sv
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import FLOAT, INT, array, record
from tiles.layout import LANES
from tiles.targets import LARGE, MEDIUM, SMALL, Target

from ...parts.decode.cache_loaders import DenseLoader, IndexedLoader, PagedLoader
from ...parts.decode.key_window import KeyWindow
from ...parts.decode.latent_shape import COLUMNS, LATENT
from ...parts.decode.outputs import FinalOutput, OutputTile, PartialOutput
from ...parts.decode.splits import FixedSplits
from ...parts.online_softmax import LOWEST, Softmax, over_sum
from ...parts.variant import TokenHeadContext

KEYS, WARPS = 16, 4  # keys of a warp's scores; warps of a block, which share out O's columns


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. dtype: of cache, queries and output. window: which keys a token sees. cache: how latents are
    loaded. result: where O goes. overlaps_previous: may the kernel begin before the previous launch has ended (PDL)? tile_rows:
    rows of a tile, heads and tokens. kv: keys of a tile. stages: of the pipeline. ctas_per_sm: thread blocks that a
    multiprocessor is to hold."""

    dtype: dtype
    window: KeyWindow
    cache: DenseLoader
    result: FinalOutput
    overlaps_previous: bool
    tile_rows: int
    kv: int
    stages: int
    threads = LANES * WARPS
    ctas_per_sm = 1

    @property
    def params(self):
        """The record of parameters that window, cache and result read."""
        return record(**self.window.params, **self.cache.params, **self.result.params)

    def __str__(self):
        return (
            f"mla {self.dtype} {self.window} {self.cache} {self.result}, {self.tile_rows} x {self.kv}"
            + " PDL" * self.overlaps_previous
        )


TILE_ROWS = 16  # rows of a tile; twice as many of a tall one
SHAPES_BY_LIMIT = {  # {bytes of shared memory that a block may have: {rows of a tile: (keys, stages)}}
    SMALL: {TILE_ROWS: (32, 2)},
    MEDIUM: {TILE_ROWS: (32, 3), 2 * TILE_ROWS: (32, 3)},
    LARGE: {TILE_ROWS: (64, 2), 2 * TILE_ROWS: (64, 2)},
}


def config_for(
    input_dtype: dtype,
    window: KeyWindow,
    cache: DenseLoader,
    result: FinalOutput,
    pdl: bool,
    rows: int,
    shared_limit: int = LARGE,
) -> Config:
    """The configuration for `rows` rows of a sequence, on a GPU whose blocks may use `shared_limit` bytes of shared memory."""
    shapes = SHAPES_BY_LIMIT[max(limit for limit in SHAPES_BY_LIMIT if limit <= shared_limit)]
    tile_rows = max(shapes) if rows > TILE_ROWS else TILE_ROWS
    return Config(input_dtype, window, cache, result, pdl, tile_rows, *shapes[tile_rows])


def config_arguments(target: Target, everything: bool, sizes: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """The arguments of config_for that occur on an architecture: for bf16, one token and vectors of 16 bytes, or for
    `everything`. fp16 takes as many registers as bf16."""
    one_token, causal = KeyWindow(False, False, False), KeyWindow(False, True, False)
    kinds = [(one_token, DenseLoader, FinalOutput), (causal, PagedLoader, PartialOutput)]
    kinds += [(one_token, PagedLoader, FinalOutput), (causal, IndexedLoader, PartialOutput)] * everything
    forms = [*((bf16, vector_bytes) for vector_bytes in sizes), (fp16, sizes[0])]
    for (input_dtype, vector_bytes), (window, cache, result), rows in itertools.product(
        forms[: None if everything else 1], kinds, (1, 128)
    ):
        yield (
            input_dtype,
            window,
            cache(vector_bytes),
            result(input_dtype, vector_bytes),
            target.has_early_launch,
            rows,
            target.shared_bytes,
        )


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with."""
    yield from dict.fromkeys(config_for(*args) for args in config_arguments(target, everything, VECTOR_SIZES))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    ROWS, KV, STAGES, INPUT, PARAMS = config.tile_rows, config.kv, config.stages, config.dtype, config.params
    KEY_PARTS, WARP_COLUMNS = KV // KEYS, LATENT // WARPS  # parts of a tile's keys; columns of O that a warp has
    AHEAD = STAGES - 1  # tiles that are being copied
    S, O = rt(ROWS, KEYS, fp32), rt(ROWS, WARP_COLUMNS, fp32)
    window, cache, result, softmax = config.window, config.cache, config.result, Softmax(O)
    split, PDL, IS_FINAL = FixedSplits(window, KV), config.overlaps_previous, type(config.result) is FinalOutput
    smem = shared(
        q=pipeline(st(ROWS, COLUMNS, INPUT), 1, WARPS),
        k=pipeline(st(KV, COLUMNS, INPUT), STAGES, WARPS),
        weights=st(WARPS * ROWS, KEYS, INPUT),
        scratch=sv(WARPS * ROWS, fp32),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gLatent: array(4, INPUT), params: PARAMS,
        row_tiles: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """Attention of one of `row_tiles` tiles of rows over one of `splits` splits of the keys. A row is one of `group` heads
        of one of `tokens` tokens. The weight of a score s is exp2(`scale` s). slack: by how much the row maximum may lag behind
        the scores."""
        q, k, weights, scratch = smem.open()
        if PDL:
            if not IS_FINAL:
                grid.release()  # mla_combine.py's blocks may begin, and wait
            grid.wait()
        number, index = divmod(cuda.blockIdx.x, row_tiles)  # a sequence's tiles are neighbours, as they read the same keys
        warp, row, rows = int32(cuda.threadIdx.x // LANES), int32(ROWS * index), int32(tokens * group)
        first_token, last_token = int32(row // group), int32((min(row + ROWS, rows) - 1) // group)
        token = (row_index(O.col_vec) + row) // group
        key_part = int32(warp % KEY_PARTS)  # with fewer parts than warps, several warps compute the same scores
        work = split.first_work(number, splits, sequences, tokens, params)
        sequence = work.sequence
        out_tile = OutputTile(sequence, 0, work.part, work.part_batch, IS_FINAL, row, first_token, last_token, group)
        span = window.key_span(sequence, first_token, last_token, tokens, params)
        first, end = int32(KV * work.tile), span.end
        n = int32(max(0, min(work.end_tile - work.tile, (end - first + KV - 1) // KV)))
        q_lookup = q.look_up(None, group, (0, row), rows)  # only a token's rows are contiguous
        lookup = cache.look_up(k, gLatent, sequence, first, end, params)
        q.fill_pages(0, gQ, q_lookup, (row, sequence, 0, 0), rows, None, cache.vector_bytes)
        for i in range(AHEAD):
            cache.fill(k, i, gLatent, lookup, sequence, int32(first + KV * i), 0, end, n, params)
            lookup = cache.look_up(k, gLatent, sequence, int32(first + KV * (i + 1)), end, params)
        ctx = TokenHeadContext(sequence, 0, token, span.shift, tokens, end, params, 0, 0)
        queries, state = q.wait(0, AHEAD), softmax.init(LOWEST)
        for i in range(n):
            key, prefetched_key = int32(first + KV * i), int32(first + KV * (i + AHEAD))
            tile = k.wait(i, AHEAD - 1)
            cache.fill(k, i + AHEAD, gLatent, lookup, sequence, prefetched_key, 0, end, n, params)
            lookup = cache.look_up(k, gLatent, sequence, int32(prefetched_key + KV), end, params)
            s = mma_ABt(zeros(S), queries, subtile(tile, KEYS, key_part))
            s = window.mask(s, ctx, int32(key + KEYS * key_part), end)
            state = state.update_max_to(block.reduce_max(row_max(s), scratch), scale, slack)
            p = state.weights(s, None, scale)
            state = state.add(p)
            store(subtile(weights, ROWS, warp), INPUT(p))
            block.sync()
            o = state.rescale()
            for part in range(KEY_PARTS):
                o = mma_AB(o, subtile(weights, ROWS, part), subtile(tile, KEYS, part, WARP_COLUMNS, warp))
            state = state._replace(o=o)

        l = block.reduce_sum(finish_sum(state.l) * (1.0 if warp < KEY_PARTS else 0.0), scratch)
        result.store(over_sum(state.o, l), out_tile, int32(WARP_COLUMNS * warp), params)
        if warp == 0:
            result.store_lse(state.m + log2(l) / scale, scale, out_tile, params)

    return attend, smem
