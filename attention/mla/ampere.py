"""Absorbed MLA of a few query tokens, over a part of the keys: cp.async, ldmatrix and mma.sync, for sm_80 and later.

All heads, and all tokens, share one row of the cache for each key, and its first 512 columns are the value of them all. So the
rows of heads and tokens make tiles, as in attention.decode, but the output is too wide for one warp's registers: warps share
out a tile's keys for the scores, and the output's columns for the values. In between they meet, twice for the rows' maxima and
once for the weights.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import block, divmod, finish_sum, grid, log2, mma_AB, mma_ABt, row_index, row_max, store, subtile, zeros
from tiles import bf16, dtype, fp16, fp32, pipeline, rt, shared, st, sv
from tiles.arguments import FLOAT, INT, array, record
from tiles.cp_async import PIECES
from tiles.layout import LANES
from tiles.targets import LARGE, MEDIUM, SMALL, capability, has_early_launch, shared_bytes

from ..softmax.decode.caches import DenseLoader, IndexedLoader, PagedLoader
from ..softmax.decode.reach import KeyWindow
from ..softmax.decode.results import FinalOutput, OutputTile, PartialOutput
from ..softmax.decode.splits import FixedSplits
from ..softmax.online import LOWEST, Softmax, over_sum
from ..softmax.variants import ScoreContext
from .shape import COLUMNS, LATENT

KEYS, WARPS = 16, 4  # keys that a warp finds scores of; warps of a block, each with its share of the output's columns


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. dtype: of the cache, the queries and the output. reach: which keys a token sees. cache: where
    latents lie. result: where the output goes. overlaps_previous: may the kernel begin before
    the previous launch has ended (PDL)? band: rows
    of a tile, heads and tokens together. kv: keys of a tile. stages: of the pipeline."""

    dtype: dtype
    window: KeyWindow
    cache: DenseLoader
    result: FinalOutput
    overlaps_previous: bool
    band: int
    kv: int
    stages: int
    threads = LANES * WARPS
    resident = 1  # blocks that a multiprocessor is to work on

    @property
    def params(self):
        """The record of numbers and arrays that reach, cache and result need in the kernel."""
        return record(**self.window.params, **self.cache.params, **self.result.params)

    def __str__(self):
        return (
            f"mla {self.dtype} {self.window} {self.cache} {self.result}, {self.band} x {self.kv}"
            + " PDL" * self.overlaps_previous
        )


BAND = 16  # rows of a tile
ROOMS = {  # bytes of shared memory that a block may have: {rows: (keys, stages)}
    SMALL: {BAND: (32, 2)},
    MEDIUM: {BAND: (32, 3), 2 * BAND: (32, 3)},
    LARGE: {BAND: (64, 2), 2 * BAND: (64, 2)},
}


def config_for(
    of: dtype, window: KeyWindow, cache: DenseLoader, result: FinalOutput, pdl: bool, rows: int, room: int = LARGE
) -> Config:
    """The configuration for `rows` rows of a sequence, on a GPU whose blocks may use `room` bytes of shared memory."""
    shapes = ROOMS[max(r for r in ROOMS if r <= room)]
    band = max(shapes) if rows > BAND else BAND
    return Config(of, window, cache, result, pdl, band, *shapes[band])


def asked_for(arch: str, everything: bool, pieces: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """The arguments of config_for that occur on an architecture: for bf16, one token and whole pieces, or for `everything`.
    fp16 takes as many registers as bf16."""
    one, several, target = KeyWindow(False, False, False), KeyWindow(False, True, False), capability(arch)
    kinds = [(one, DenseLoader, FinalOutput), (several, PagedLoader, PartialOutput)]
    kinds += [(one, PagedLoader, FinalOutput), (several, IndexedLoader, PartialOutput)] * everything
    forms = [*((bf16, vector_bytes) for vector_bytes in pieces), (fp16, pieces[0])]
    for (of, vector_bytes), (window, cache, result), rows in itertools.product(
        forms[: None if everything else 1], kinds, (1, 128)
    ):
        yield of, window, cache(vector_bytes), result(of, vector_bytes), has_early_launch(target), rows, shared_bytes(target)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with."""
    yield from dict.fromkeys(config_for(*asked) for asked in asked_for(arch, everything, PIECES))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    BAND, KV, STAGES, INPUT, PARAMS = config.band, config.kv, config.stages, config.dtype, config.params
    PARTS, OWN = KV // KEYS, LATENT // WARPS  # of a tile's keys; columns of the output that a warp has
    AHEAD = STAGES - 1  # tiles under way
    S, O = rt(BAND, KEYS, fp32), rt(BAND, OWN, fp32)
    window, cache, result, softmax = config.window, config.cache, config.result, Softmax(O)
    split, PDL, IS_FINAL = FixedSplits(window, KV), config.overlaps_previous, type(config.result) is FinalOutput
    smem = shared(
        q=pipeline(st(BAND, COLUMNS, INPUT), 1, WARPS),
        k=pipeline(st(KV, COLUMNS, INPUT), STAGES, WARPS),
        weights=st(WARPS * BAND, KEYS, INPUT),
        scratch=sv(WARPS * BAND, fp32),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gLatent: array(4, INPUT), params: PARAMS,
        bands: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """Attention of one of `bands` tiles of rows (a row is one of `group` heads of one of `tokens` tokens) over one of
        `splits` parts of the keys. The weight of a score s is exp2(`scale` s). slack: by how much the maximum may lag behind
        the scores."""
        q, k, weights, scratch = smem.open()
        if PDL:
            if not IS_FINAL:
                grid.release()  # the blocks that combine parts may come, and wait
            grid.wait()
        number, band = divmod(cuda.blockIdx.x, bands)  # tiles of a sequence are neighbours: they read the same keys
        warp, row, rows = int32(cuda.threadIdx.x // LANES), int32(BAND * band), int32(tokens * group)
        first_token, last_token = int32(row // group), int32((min(row + BAND, rows) - 1) // group)
        token = (row_index(O.col_vec) + row) // group
        own = int32(warp % PARTS)  # where there are fewer parts of keys than warps, several find the same scores
        work = split.first_work(number, splits, sequences, tokens, params)
        sequence = work.sequence
        out_tile = OutputTile(sequence, 0, work.part, work.part_batch, IS_FINAL, row, first_token, last_token, group)
        sees = window.key_span(sequence, first_token, last_token, tokens, params)
        first, end = int32(KV * work.tile), sees.end
        n = int32(max(0, min(work.end_tile - work.tile, (end - first + KV - 1) // KV)))
        lie = q.look_up(None, group, (0, row), rows)  # a token's rows, and only these, lie in one place
        here = cache.look_up(k, gLatent, sequence, first, end, params)
        q.fill_pages(0, gQ, lie, (row, sequence, 0, 0), rows, None, cache.vector_bytes)
        for i in range(AHEAD):
            cache.fill(k, i, gLatent, here, sequence, int32(first + KV * i), 0, end, n, params)
            here = cache.look_up(k, gLatent, sequence, int32(first + KV * (i + 1)), end, params)
        ctx = ScoreContext(sequence, 0, token, sees.shift, tokens, end, params, 0, 0)
        queries, state = q.wait(0, AHEAD), softmax.init(LOWEST)
        for i in range(n):
            key, later = int32(first + KV * i), int32(first + KV * (i + AHEAD))
            tile = k.wait(i, AHEAD - 1)
            cache.fill(k, i + AHEAD, gLatent, here, sequence, later, 0, end, n, params)
            here = cache.look_up(k, gLatent, sequence, int32(later + KV), end, params)
            s = mma_ABt(zeros(S), queries, subtile(tile, KEYS, own))
            s = window.mask(s, ctx, int32(key + KEYS * own), end)
            state = state.update_max_to(block.reduce_max(row_max(s), scratch), scale, slack)
            p = state.weights(s, None, scale)
            state = state.add(p)
            store(subtile(weights, BAND, warp), INPUT(p))
            block.sync()
            o = state.rescale()
            for part in range(PARTS):
                o = mma_AB(o, subtile(weights, BAND, part), subtile(tile, KEYS, part, OWN, warp))
            state = state._replace(o=o)

        l = block.reduce_sum(finish_sum(state.l) * (1.0 if warp < PARTS else 0.0), scratch)
        result.store(over_sum(state.o, l), out_tile, int32(OWN * warp), params)
        if warp == 0:
            result.store_lse(state.m + log2(l) / scale, scale, out_tile, params)

    return attend, smem
