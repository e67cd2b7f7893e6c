"""Absorbed MLA of a few query tokens over latents of 8 bits, for sm_89 and later: half the bytes, where memory sets the speed.

ampere.py's way, with one stage more. Each warp brings the keys that it finds scores of, makes fp16 of their latents, which is
exact, multiplies them with the queries, and leaves them in shared memory, from where all warps take values of their columns.
What a key's latent was divided by multiplies its scores, and once more its weights: no latent is rounded again.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block, divmod, finish_sum, grid, load, log2, maximum, mma_AB, mma_ABt, row_index, row_max, store, subtile, zeros
from tiles import dtype, fp8e4m3, fp16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.arguments import FLOAT, INT, array, record
from tiles.layout import LANES
from tiles.pipeline import PIECES as EVERY

from ..softmax.decode.caches import Dense
from ..softmax.decode.reach import Reach
from ..softmax.decode.results import Spot, Whole
from ..softmax.decode.splits import Parted
from ..softmax.online import LOWEST, TINY, Softmax
from ..softmax.variants import At
from .ampere import asked_for
from .shape import LATENT, ROTARY

SINCE, PIECES = (8, 9), EVERY[:-1]  # compute capability; bytes that cp.async brings at once
KEYS, COLUMNS = 16, 64  # keys that a warp finds scores of; columns of their latents that it converts at once


@dataclass(frozen=True)
class Config:
    """A kernel: see ampere.py; `band` rows, and `warps` of 16 keys of a tile each."""

    dtype: dtype
    reach: Reach
    cache: Dense
    result: Whole
    early: bool
    band: int
    warps: int
    stages: int

    @property
    def kv(self):
        """Keys of a tile."""
        return KEYS * self.warps

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * self.warps

    @property
    def given(self):
        """What the kernel is told of all these."""
        return record(**self.reach.given, **self.cache.given, **self.result.given)

    def __str__(self):
        kind = f"mla {self.dtype} of fp8 {self.reach} {self.cache} {self.result}"
        return f"{kind}, {self.band} x {self.kv}" + " early" * self.early


BAND = 16  # rows of a tile
ROOMS = {  # bytes of shared memory that a block may have: {rows: (warps, stages)}
    99 * 1024: {BAND: (2, 2)},
    227 * 1024: {BAND: (4, 3), 2 * BAND: (4, 3)},
}
LEAST, LARGE = min(ROOMS), max(ROOMS)
ROOM = {"sm_90a": LARGE, "sm_100a": LARGE}  # elsewhere the least


def config_for(of: dtype, reach: Reach, cache: Dense, result: Whole, early: bool, rows: int, room: int = LARGE) -> Config:
    """The configuration that serves `rows` rows of a sequence on a GPU whose blocks may have `room` bytes of shared memory."""
    shapes = ROOMS[max(r for r in ROOMS if r <= room)]
    band = max(shapes) if rows > BAND else BAND
    return Config(of, reach, cache, result, early, band, *shapes[band])


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What an architecture is served with, which has instructions for fp8."""
    if arch != "sm_80":
        yield from dict.fromkeys(config_for(*asked) for asked in asked_for(arch, everything, PIECES, ROOM.get(arch, LEAST)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    BAND, KV, WARPS, STAGES, INPUT, GIVEN = config.band, config.kv, config.warps, config.stages, config.dtype, config.given
    OWN, PARTS = LATENT // WARPS, LATENT // COLUMNS  # columns of the output that a warp has; parts in which it converts
    AHEAD, NEWER = STAGES - 1, 2 * STAGES - 3  # tiles under way; groups of copies that are younger than one waited for
    S, O, X = rt(BAND, KEYS, fp32), rt(BAND, OWN, fp32), rt(KEYS, COLUMNS, fp16)
    Q, PANEL = rt(BAND, ROTARY, fp32), ROTARY
    reach, cache, result, softmax = config.reach, config.cache, config.result, Softmax(O)
    split, EARLY, IS_WHOLE = Parted(reach, KV), config.early, type(config.result) is Whole
    smem = shared(
        q=st(BAND, LATENT, fp16),
        q_rotary=st(BAND, ROTARY, INPUT),
        latent=pipeline(st(KV, LATENT, fp8e4m3, 64), STAGES, WARPS),
        rotary=pipeline(st(KV, ROTARY, INPUT, 64), STAGES, WARPS),
        plain=st(KV, LATENT, fp16),
        weights=st(WARPS * BAND, KEYS, fp16),
        scratch=sv(WARPS * BAND, fp32),
    )

    @inlined
    def rows_of(gQ, spot, col):
        """The block's rows of some columns of Q. A token's rows lie in one place; zeros are loaded where others are."""
        x = zeros(Q)
        for token in range(spot.first, spot.last + 1):
            x = x + load(gQ, Q, (spot.sequence, token, 0, int32(spot.row - token * spot.group), col), 3, 4)
        return x

    @inlined
    def bring(q, q_rotary, gQ, spot, warp):
        """The block's rows of Q, into shared memory."""
        for i in range(warp, LATENT // PANEL, WARPS):
            store(subtile(q, BAND, 0, PANEL, i), fp16(rows_of(gQ, spot, int32(PANEL * i))))
        if warp == 0:
            store(q_rotary, INPUT(rows_of(gQ, spot, LATENT)))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gLatent: array(4, fp8e4m3), gRotary: array(4, INPUT), gDescale: array(2), given: GIVEN,
        bands: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """See ampere.py."""
        q, q_rotary, latent, rotary, plain, weights, scratch = smem.open()
        if EARLY:
            if not IS_WHOLE:
                grid.release()  # the blocks that combine parts may come, and wait
            grid.wait()
        number, band = divmod(cuda.blockIdx.x, bands)  # tiles of a sequence are neighbours: they read the same keys
        warp, row, rows = int32(cuda.threadIdx.x // LANES), int32(BAND * band), int32(tokens * group)
        first_token, last_token = int32(row // group), int32((min(row + BAND, rows) - 1) // group)
        token = (row_index(O.col_vec) + row) // group
        work = split.first(number, splits, sequences, tokens, given)
        sequence = work.sequence
        spot = Spot(sequence, 0, work.part, work.of, IS_WHOLE, row, first_token, last_token, group)
        sees = reach.keys(sequence, first_token, last_token, tokens, given)
        first, end = int32(KV * work.tile), sees.end
        n = int32(max(0, min(work.end - work.tile, (end - first + KV - 1) // KV)))
        own = int32(first + KEYS * warp)
        here = cache.look(latent, gLatent, sequence, first, end, given)
        for i in range(AHEAD):
            cache.fill(latent, i, gLatent, here, sequence, int32(first + KV * i), 0, end, n, given)
            cache.fill(rotary, i, gRotary, here, sequence, int32(first + KV * i), 0, end, n, given)
            here = cache.look(latent, gLatent, sequence, int32(first + KV * (i + 1)), end, given)
        later_d = cache.numbers(S.row_vec, gDescale, (), sequence, own, end, given)
        bring(q, q_rotary, gQ, spot, warp)
        at, seen = At(sequence, 0, token, sees.shift, tokens, end, given, 0, 0), softmax.begin(LOWEST)
        for i in range(n):
            key, later, d = int32(own + KV * i), int32(first + KV * (i + AHEAD)), later_d
            later_d = cache.numbers(S.row_vec, gDescale, (), sequence, int32(key + KV), end, given)
            block.sync()  # all have read the last tile's values
            s, raw = zeros(S), latent.own(i, NEWER)
            for part in range(PARTS):
                x = load(subtile(raw, KEYS, 0, COLUMNS, part), X)
                store(subtile(plain, KEYS, warp, COLUMNS, part), x)
                s = mma_ABt(s, subtile(q, BAND, 0, COLUMNS, part), x)
            cache.fill(latent, i + AHEAD, gLatent, here, sequence, later, 0, end, n, given)
            s = mma_ABt(s * d, q_rotary, rotary.own(i, NEWER))
            cache.fill(rotary, i + AHEAD, gRotary, here, sequence, later, 0, end, n, given)
            here = cache.look(latent, gLatent, sequence, int32(later + KV), end, given)
            s = reach.mask(s, at, key, end)
            seen = seen.raised(block.reduce_max(row_max(s), scratch), scale, slack)
            p = seen.weights(s, None, scale)
            seen = seen.add(p)
            store(subtile(weights, BAND, warp), fp16(p * d))
            block.sync()
            o = seen.rescaled()
            for part in range(WARPS):
                o = mma_AB(o, subtile(weights, BAND, part), subtile(plain, KEYS, part, OWN, warp))
            seen = seen._replace(o=o)

        l = block.reduce_sum(finish_sum(seen.l), scratch)
        result.store(seen.o / maximum(l, TINY), spot, int32(OWN * warp), given)
        if warp == 0:
            result.store_sums(seen.m + log2(l) / scale, scale, spot, given)

    return attend, smem
