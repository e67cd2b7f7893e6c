"""Absorbed MLA of a few query tokens over latents of 8 bits, for sm_89 and later: half the bytes, where memory sets the speed.

ampere.py's way, by groups of warps, each of which has keys and an output of its own, so that one's products fill the time in
which another's warps wait for each other; at the end their outputs are added up. Latents lie in shared memory as they came, and
become fp16 where a product takes them, which is exact: once for the scores, once for the values. What a key's latent was
divided by multiplies its scores, and once more its weights: no latent is rounded again.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import (
    block,
    commit_group,
    divmod,
    exp2,
    finish_sum,
    grid,
    load,
    log2,
    maximum,
    mma_AB_unzipped,
    mma_ABt,
    mma_ABt_unzipped,
    rezipped,
    row_index,
    row_max,
    store,
    subtile,
    unzipped,
    viewed,
    wait_group,
    warpgroup,
    zeros,
)
from tiles import dtype, fp8e4m3, fp16, fp32, inlined, rt, shared, st, sv
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
KEYS, PANEL = 16, 64  # keys that a warp finds scores of; bytes of a panel of what is copied


@dataclass(frozen=True)
class Config:
    """A kernel: see ampere.py; `band` rows, and `groups` of `warps` of 16 keys of a tile each."""

    dtype: dtype
    reach: Reach
    cache: Dense
    result: Whole
    early: bool
    band: int
    warps: int
    groups: int
    stages: int

    @property
    def kv(self):
        """Keys of a tile, of all groups."""
        return KEYS * self.warps * self.groups

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * self.warps * self.groups

    @property
    def given(self):
        """What the kernel is told of all these."""
        return record(**self.reach.given, **self.cache.given, **self.result.given)

    def __str__(self):
        kind = f"mla {self.dtype} of fp8 {self.reach} {self.cache} {self.result}"
        return f"{kind}, {self.band} x {self.kv}" + " early" * self.early


BAND = 16  # rows of a tile
ROOMS = {  # bytes of shared memory that a block may have: {rows: (warps, groups, stages)}
    99 * 1024: {BAND: (2, 1, 3)},
    227 * 1024: {BAND: (4, 2, 2), 2 * BAND: (8, 1, 2)},
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
    BAND, KV, INPUT, GIVEN = config.band, config.kv, config.dtype, config.given
    WARPS, GROUPS, STAGES, ALL = config.warps, config.groups, config.stages, config.warps * config.groups
    OWN, AHEAD, SLAB = (
        LATENT // WARPS,
        STAGES - 1,
        LATENT // ALL,
    )  # columns of O that a warp adds up; tiles under way; and stores
    S, O, PART = rt(BAND, KEYS, fp32), rt(BAND, OWN, fp32), rt(BAND, SLAB, fp32)
    Q, ROWS = rt(BAND, ROTARY, fp32), ALL * KEYS * STAGES  # rows of all groups' stages
    LATENTS, NUMBERS = st(KEYS, LATENT, fp8e4m3, PANEL), sv(KEYS, fp32)  # a warp's
    reach, cache, result, softmax = config.reach, config.cache, config.result, Softmax(O)
    split, EARLY, IS_WHOLE = Parted(reach, KV), config.early, type(config.result) is Whole
    scope = warpgroup if GROUPS > 1 else block  # of a group
    smem = shared(
        q=st(BAND, LATENT, fp16),
        q_rotary=st(BAND, ROTARY, INPUT),
        latent=st(ROWS, LATENT, fp8e4m3, PANEL),
        rotary=st(ROWS, ROTARY, INPUT, PANEL),
        descale=sv(ROWS, fp32),
        weights=st(ALL * BAND, KEYS, fp16),
        scratch=sv(ALL * BAND, fp32),
    )
    ADDENDS = st(ROWS, LATENT // fp32.itemsize, fp32, PANEL)  # what lies where latents do, when all is read

    @inlined
    def rows_of(gQ, spot, col):
        """The block's rows of some columns of Q. A token's rows lie in one place; zeros are loaded where others are."""
        x = zeros(Q)
        for token in range(spot.first, spot.last + 1):
            x = x + load(gQ, Q, (spot.sequence, token, 0, int32(spot.row - token * spot.group), col), 3, 4)
        return x

    @inlined
    def bring(q, q_rotary, gQ, spot, warp):
        """The block's rows of Q, into shared memory, as the products take them."""
        for i in range(warp, LATENT // ROTARY, ALL):
            store(subtile(q, BAND, 0, ROTARY, i), unzipped(fp16(rows_of(gQ, spot, int32(ROTARY * i)))))
        if warp == 0:
            store(q_rotary, INPUT(rows_of(gQ, spot, LATENT)))
        block.sync(fenced=True)

    @inlined
    def placed(warp):
        """(the warp's group, its number there)"""
        if GROUPS > 1:
            return warpgroup.id(), warpgroup.rank()
        else:
            return int32(0), warp

    @inlined
    def look(arrays, sequence, key, end, given):
        """Where a warp's rows from `key` on lie, and their numbers."""
        latents = cache.find(LATENTS, arrays[0], sequence, key, end, given)
        return latents, cache.find(NUMBERS, arrays[2], sequence, key, end, given)

    @inlined
    def start(pipes, place, arrays, found, sequence, key, end, given):
        """Start copying them to a place of 16 rows."""
        cache.copy_numbers(subtile(pipes[2], KEYS, place), arrays[2], found[1], sequence, key, end, given)
        cache.copy(subtile(pipes[1], KEYS, place), arrays[1], found[0], sequence, key, 0, end, given)
        cache.copy(subtile(pipes[0], KEYS, place), arrays[0], found[0], sequence, key, 0, end, given)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gLatent: array(4, fp8e4m3), gRotary: array(4, INPUT), gDescale: array(2), given: GIVEN,
        bands: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """See ampere.py."""
        q, q_rotary, latent, rotary, descale, weights, scratch = smem.open()
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
        at, seen = At(sequence, 0, token, sees.shift, tokens, end, given, 0, 0), softmax.begin(LOWEST)
        pipes, arrays = (latent, rotary, descale), (gLatent, gRotary, gDescale)
        mine, (team, rank) = int32(first + KEYS * warp), placed(warp)
        here, own = look(arrays, sequence, mine, end, given), subtile(scratch, WARPS * BAND, team)
        for i in range(AHEAD):
            if i < n:
                start(pipes, ALL * i + warp, arrays, here, sequence, int32(mine + KV * i), end, given)
            commit_group()
            here = look(arrays, sequence, int32(mine + KV * (i + 1)), end, given)
        bring(q, q_rotary, gQ, spot, warp)
        for i in range(n):
            later, place = int32(i + AHEAD), int32(ALL * (i % STAGES) + WARPS * team)
            wait_group(AHEAD - 1)
            scope.sync(fenced=True)
            if later < n:
                start(pipes, ALL * (later % STAGES) + warp, arrays, here, sequence, int32(mine + KV * later), end, given)
            commit_group()
            here = look(arrays, sequence, int32(mine + KV * (later + 1)), end, given)
            d = load(subtile(descale, KEYS, place + rank), S.row_vec)
            s = mma_ABt_unzipped(zeros(S), q, subtile(latent, KEYS, place + rank))
            s = mma_ABt(s * d, q_rotary, subtile(rotary, KEYS, place + rank))
            s = reach.mask(s, at, int32(mine + KV * i), end)
            seen = seen.raised(scope.reduce_max(row_max(s), own), scale, slack)
            p = seen.weights(s, None, scale)
            seen = seen.add(p)
            store(subtile(weights, BAND, warp), fp16(p * d))
            scope.sync(fenced=True)
            o = seen.rescaled()
            for part in range(WARPS):
                values = subtile(latent, KEYS, place + part, OWN, rank)
                o = mma_AB_unzipped(o, subtile(weights, BAND, WARPS * team + part), values)
            seen = seen._replace(o=o)

        m = block.reduce_max(seen.m, scratch)
        weight = exp2((seen.m - m) * scale)
        l = block.reduce_sum(finish_sum(seen.l) * weight, scratch)
        o, col = seen.o * weight, int32(OWN * rank + SLAB * team)
        if GROUPS > 1:
            addends = viewed(latent, ADDENDS)  # all warps have met: nobody reads latents any more
            store(subtile(addends, BAND, warp), o)
            block.sync()
            o = zeros(PART)
            for other in range(rank, ALL, WARPS):
                o = o + load(subtile(addends, BAND, other, SLAB, team), PART)
        result.store(rezipped(o) / maximum(l, TINY), spot, col, given)
        if warp == 0:
            result.store_sums(m + log2(l) / scale, scale, spot, given)

    return attend, smem
