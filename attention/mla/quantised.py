"""Absorbed MLA of a few query tokens over latents of 8 bits, for sm_89 and later: half the bytes, where memory sets the speed.

ampere.py's way. Latents lie in shared memory as they came, and become fp16 where a product takes them, which is exact: once for
the scores, once for the values. What a key's latent was divided by multiplies its scores, and once more its weights: no latent
is rounded again.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

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
from tiles import dtype, fp8e4m3, fp16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.arguments import FLOAT, INT, array, record
from tiles.cp_async import PIECES as EVERY
from tiles.layout import LANES
from tiles.targets import LARGE, SMALL, capability, has_fp8

from ..softmax.decode.caches import DenseLoader, PagedLoader
from ..softmax.decode.reach import KeyWindow
from ..softmax.decode.results import FinalOutput, OutputTile
from ..softmax.decode.splits import FixedSplits
from ..softmax.online import LOWEST, Softmax, over_sum
from ..softmax.variants import ScoreContext
from .ampere import asked_for
from .shape import LATENT, ROTARY

PIECES = EVERY[:-1]  # bytes that cp.async brings at once
KEYS, GROUPS = 16, 3  # keys that a warp finds scores of; groups of copies that bring a tile


@dataclass(frozen=True)
class Config:
    """A kernel's configuration: see ampere.py. band: rows of a tile. warps: of a block, each of which finds the scores of 16
    keys of a tile. resident: how many blocks should share a multiprocessor, so that one multiplies while the warps of another
    wait for each other."""

    dtype: dtype
    window: KeyWindow
    cache: DenseLoader
    result: FinalOutput
    overlaps_previous: bool
    band: int
    warps: int
    stages: int
    resident: int

    @property
    def kv(self):
        """Keys of a tile."""
        return KEYS * self.warps

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * self.warps

    @property
    def params(self):
        """The record of numbers and arrays that reach, cache and result need in the kernel."""
        return record(**self.window.params, **self.cache.params, **self.result.params)

    def __str__(self):
        kind = f"mla {self.dtype} of fp8 {self.window} {self.cache} {self.result}"
        return f"{kind}, {self.band} x {self.kv}" + " PDL" * self.overlaps_previous


BAND = 16  # rows of a tile
ROOMS = {  # bytes of shared memory that a block may have: {rows: (warps, stages, resident)}
    SMALL: {BAND: (2, 3, 1)},
    LARGE: {BAND: (4, 2, 2), 2 * BAND: (8, 2, 1)},
}
PAGED = 8, 2, 1  # the same of 16 rows over pages, where the other is not timed


def config_for(
    of: dtype, window: KeyWindow, cache: DenseLoader, result: FinalOutput, pdl: bool, rows: int, room: int = LARGE
) -> Config:
    """The configuration for `rows` rows of a sequence, on a GPU whose blocks may use `room` bytes of shared memory."""
    shapes = ROOMS[max(r for r in ROOMS if r <= room)]
    band = max(shapes) if rows > BAND else BAND
    shape = PAGED if type(cache) is PagedLoader and room >= LARGE and band == BAND else shapes[band]
    return Config(of, window, cache, result, pdl, band, *shape)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture with instructions for fp8 is served with."""
    if has_fp8(capability(arch)):
        yield from dict.fromkeys(config_for(*asked) for asked in asked_for(arch, everything, PIECES))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    BAND, KV, WARPS, STAGES, INPUT, PARAMS = config.band, config.kv, config.warps, config.stages, config.dtype, config.params
    OWN, AHEAD = LATENT // WARPS, STAGES - 1  # columns of the output that a warp has; tiles under way
    S, O = rt(BAND, KEYS, fp32), rt(BAND, OWN, fp32)
    Q, PANEL = rt(BAND, ROTARY, fp32), ROTARY
    window, cache, result, softmax = config.window, config.cache, config.result, Softmax(O)
    split, PDL, IS_FINAL = FixedSplits(window, KV), config.overlaps_previous, type(config.result) is FinalOutput
    smem = shared(
        q=st(BAND, LATENT, fp16),
        q_rotary=st(BAND, ROTARY, INPUT),
        latent=pipeline(st(KV, LATENT, fp8e4m3, 64), STAGES, WARPS),
        rotary=pipeline(st(KV, ROTARY, INPUT, 64), STAGES, WARPS),
        descale=pipeline(sv(KV, fp32), STAGES, WARPS),
        weights=st(WARPS * BAND, KEYS, fp16),
        scratch=sv(WARPS * BAND, fp32),
    )

    @inlined
    def rows_of(gQ, out_tile, col):
        """The block's rows of some columns of Q. The rows of a token lie together; for the rows of other tokens zeros are
        loaded."""
        x = zeros(Q)
        for token in range(out_tile.first_token, out_tile.last_token + 1):
            x = x + load(gQ, Q, (out_tile.batch, token, 0, int32(out_tile.row - token * out_tile.group), col), 3, 4)
        return x

    @inlined
    def bring(q, q_rotary, gQ, out_tile, warp):
        """Load the block's rows of Q into shared memory, in the dtype that the products take."""
        for i in range(warp, LATENT // PANEL, WARPS):
            store(subtile(q, BAND, 0, PANEL, i), unzipped(fp16(rows_of(gQ, out_tile, int32(PANEL * i)))))
        if warp == 0:
            store(q_rotary, INPUT(rows_of(gQ, out_tile, LATENT)))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gLatent: array(4, fp8e4m3), gRotary: array(4, INPUT), gDescale: array(2), params: PARAMS,
        bands: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """See ampere.py."""
        q, q_rotary, latent, rotary, descale, weights, scratch = smem.open()
        if PDL:
            if not IS_FINAL:
                grid.release()  # the blocks that combine parts may come, and wait
            grid.wait()
        number, band = divmod(cuda.blockIdx.x, bands)  # tiles of a sequence are neighbours: they read the same keys
        warp, row, rows = int32(cuda.threadIdx.x // LANES), int32(BAND * band), int32(tokens * group)
        first_token, last_token = int32(row // group), int32((min(row + BAND, rows) - 1) // group)
        token = (row_index(O.col_vec) + row) // group
        work = split.first_work(number, splits, sequences, tokens, params)
        sequence = work.sequence
        out_tile = OutputTile(sequence, 0, work.part, work.part_batch, IS_FINAL, row, first_token, last_token, group)
        sees = window.key_span(sequence, first_token, last_token, tokens, params)
        first, end = int32(KV * work.tile), sees.end
        n = int32(max(0, min(work.end_tile - work.tile, (end - first + KV - 1) // KV)))
        ctx, state = ScoreContext(sequence, 0, token, sees.shift, tokens, end, params, 0, 0), softmax.init(LOWEST)
        here = cache.look_up(latent, gLatent, sequence, first, end, params)
        numbers = cache.look_up(descale, gDescale, sequence, first, end, params)
        for i in range(AHEAD):
            cache.fill_descales(descale, i, gDescale, numbers, sequence, int32(first + KV * i), (), end, n, params)
            cache.fill(rotary, i, gRotary, here, sequence, int32(first + KV * i), 0, end, n, params)
            cache.fill(latent, i, gLatent, here, sequence, int32(first + KV * i), 0, end, n, params)
            here = cache.look_up(latent, gLatent, sequence, int32(first + KV * (i + 1)), end, params)
            numbers = cache.look_up(descale, gDescale, sequence, int32(first + KV * (i + 1)), end, params)
        bring(q, q_rotary, gQ, out_tile, warp)
        for i in range(n):
            key, later = int32(first + KV * i + KEYS * warp), int32(first + KV * (i + AHEAD))
            tile = latent.wait(i, GROUPS * (AHEAD - 1))
            cache.fill_descales(descale, i + AHEAD, gDescale, numbers, sequence, later, (), end, n, params)
            cache.fill(rotary, i + AHEAD, gRotary, here, sequence, later, 0, end, n, params)
            cache.fill(latent, i + AHEAD, gLatent, here, sequence, later, 0, end, n, params)
            here = cache.look_up(latent, gLatent, sequence, int32(later + KV), end, params)
            numbers = cache.look_up(descale, gDescale, sequence, int32(later + KV), end, params)
            d = load(descale.own(i, GROUPS * AHEAD), S.row_vec)
            s = mma_ABt_unzipped(zeros(S), q, subtile(tile, KEYS, warp))
            s = mma_ABt(s * d, q_rotary, rotary.own(i, GROUPS * AHEAD))
            s = window.mask(s, ctx, key, end)
            state = state.update_max_to(block.reduce_max(row_max(s), scratch), scale, slack)
            p = state.weights(s, None, scale)
            state = state.add(p)
            store(subtile(weights, BAND, warp), fp16(p * d))
            block.sync()
            o = state.rescale()
            for part in range(WARPS):
                o = mma_AB_unzipped(o, subtile(weights, BAND, part), subtile(tile, KEYS, part, OWN, warp))
            state = state._replace(o=o)

        l = block.reduce_sum(finish_sum(state.l), scratch)
        result.store(over_sum(rezipped(state.o), l), out_tile, int32(OWN * warp), params)
        if warp == 0:
            result.store_lse(state.m + log2(l) / scale, scale, out_tile, params)

    return attend, smem
