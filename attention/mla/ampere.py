"""Absorbed MLA of a few query tokens, over a part of the keys: cp.async, ldmatrix and mma.sync, for sm_80 and later.

All heads, and all tokens, share one row of the cache for each key, and its first 512 columns are the value of them all. So the
rows of heads and tokens make tiles, as in attention.decode, but the output is too wide for one warp's registers: warps share
out a tile's keys for the scores, and the output's columns for the values. In between they meet, twice for the rows' maxima and
once for the weights.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block, divmod, finish_sum, full, load, log2, maximum, mma_AB, mma_ABt, row_index, row_max, store, subtile, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.arguments import FLOAT, INT, array, record
from tiles.layout import LANES
from tiles.pipeline import PIECES

from ..softmax.decode.caches import Dense, Indexed, Paged
from ..softmax.decode.reach import Reach
from ..softmax.decode.results import Part, Spot, Whole
from ..softmax.online import LOWEST, TINY, Softmax
from ..softmax.variants import At
from .shape import COLUMNS, LATENT

KEYS, WARPS = 16, 4  # keys that a warp finds scores of; warps of a block, each with its share of the output's columns


@dataclass(frozen=True)
class Config:
    """A kernel: which caches it reads and where its output goes; and its shape: `band` rows, `kv` keys of a tile, stages of the
    pipeline."""

    dtype: dtype
    reach: Reach
    cache: Dense
    result: Whole
    band: int
    kv: int
    stages: int
    threads = LANES * WARPS

    @property
    def given(self):
        """What the kernel is told of all these."""
        return record(**self.reach.given, **self.cache.given, **self.result.given)

    def __str__(self):
        return f"mla {self.dtype} {self.reach} {self.cache} {self.result}, {self.band} x {self.kv}"


BAND = 16  # rows of a tile
ROOMS = {  # bytes of shared memory that a block may have: {rows: (keys, stages)}
    99 * 1024: {BAND: (32, 2)},
    163 * 1024: {BAND: (32, 3), 2 * BAND: (32, 3)},
    227 * 1024: {BAND: (64, 2), 2 * BAND: (64, 2)},
}
LEAST, LARGE = min(ROOMS), max(ROOMS)
ROOM = {"sm_80": 163 * 1024, "sm_90a": LARGE, "sm_100a": LARGE}  # elsewhere the least


def config_for(of: dtype, reach: Reach, cache: Dense, result: Whole, rows: int, room: int = LARGE) -> Config:
    """The configuration that serves `rows` rows of a sequence on a GPU whose blocks may have `room` bytes of shared memory."""
    shapes = ROOMS[max(r for r in ROOMS if r <= room)]
    band = max(shapes) if rows > BAND else BAND
    return Config(of, reach, cache, result, band, *shapes[band])


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What an architecture is served with: bf16, one token, whole pieces; or `everything`. fp16 takes the same registers."""
    kinds = [(Reach(False, False, False), Dense, Whole), (Reach(False, True, False), Paged, Part)]
    kinds += [(Reach(False, True, False), Indexed, Whole)] * everything
    forms = [(bf16, PIECES[0]), *((bf16, piece) for piece in PIECES[1:]), (fp16, PIECES[0])]
    found = [
        config_for(of, reach, cache(piece), result(of, piece), rows, ROOM.get(arch, LEAST))
        for (of, piece), (reach, cache, result), rows in itertools.product(forms[: None if everything else 1], kinds, (1, 128))
    ]
    yield from dict.fromkeys(found)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    BAND, KV, STAGES, INPUT, GIVEN = config.band, config.kv, config.stages, config.dtype, config.given
    PARTS, OWN = KV // KEYS, LATENT // WARPS  # of a tile's keys; columns of the output that a warp has
    AHEAD = STAGES - 1  # tiles under way
    QUERY = st(BAND, COLUMNS, INPUT)
    Q, PANELS = rt(BAND, QUERY.panel_cols, fp32), QUERY.panels
    S, O = rt(BAND, KEYS, fp32), rt(BAND, OWN, fp32)
    reach, cache, result, softmax = config.reach, config.cache, config.result, Softmax(O)
    smem = shared(
        q=QUERY,
        k=pipeline(st(KV, COLUMNS, INPUT), STAGES, WARPS),
        weights=st(WARPS * BAND, KEYS, INPUT),
        scratch=sv(WARPS * BAND, fp32),
    )

    @inlined
    def bring(queries, gQ, spot, warp):
        """The block's rows of Q, into shared memory. A token's rows lie in one place; zeros are loaded where others are."""
        for i in range(warp, PANELS, WARPS):
            x = zeros(Q)
            for token in range(spot.first, spot.last + 1):
                at = spot.sequence, token, 0, int32(spot.row - token * spot.group), int32(Q.cols * i)
                x = x + load(gQ, Q, at, 3, 4)
            store(subtile(queries, BAND, 0, Q.cols, i), INPUT(x))
        block.sync()

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gLatent: array(4, INPUT), given: GIVEN,
        bands: INT, splits: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """Of one of `bands` tiles of rows, `group` heads and `tokens` tokens of a sequence, over one of `splits` parts of the
        keys that it sees; exp2(`scale` s) is the weight of a score, `slack` how far a maximum may lag."""
        queries, k, weights, scratch = smem.open()
        rest, band = divmod(cuda.blockIdx.x, bands)  # tiles of a sequence are neighbours: they read the same keys
        sequence, split = divmod(rest, splits)
        warp, row = int32(cuda.threadIdx.x // LANES), int32(BAND * band)
        last_row = min(row + BAND, tokens * group) - 1
        spot = Spot(sequence, 0, split, row, int32(row // group), int32(last_row // group), group)
        sees = reach.keys(sequence, spot.first, spot.last, tokens, given)
        every = max(0, (sees.end - sees.first + KV - 1) // KV)
        share = (every + splits - 1) // splits
        first, n = int32(sees.first + KV * share * split), int32(max(0, min(share, every - share * split)))
        if n > 0 or split == 0:
            for i in range(AHEAD):
                cache.fill(k, i, gLatent, sequence, int32(first + KV * i), 0, sees.end, n, given)
            bring(queries, gQ, spot, warp)
            token = (row_index(O.col_vec) + row) // group
            at = At(sequence, 0, token, sees.shift, tokens, sees.end, given, 0, 0)
            own = int32(warp % PARTS)  # where there are fewer parts of keys than warps, several find the same scores
            seen = softmax.begin(LOWEST)
            for i in range(n):
                tile = k.wait(i, AHEAD - 1)
                cache.fill(k, i + AHEAD, gLatent, sequence, int32(first + KV * (i + AHEAD)), 0, sees.end, n, given)
                s = mma_ABt(zeros(S), queries, subtile(tile, KEYS, own))
                s = reach.mask(s, at, int32(first + KV * i + KEYS * own), sees.end)
                seen = seen.raised(block.reduce_max(row_max(s), scratch), scale, slack)
                p = seen.weights(s, None, scale)
                seen = seen.add(p)
                store(subtile(weights, BAND, warp), INPUT(p))
                block.sync()
                o = seen.rescaled()
                for part in range(PARTS):
                    o = mma_AB(o, subtile(weights, BAND, part), subtile(tile, KEYS, part, OWN, warp))
                seen = seen._replace(o=o)

            l = block.reduce_sum(finish_sum(seen.l) * (1.0 if warp < PARTS else 0.0), scratch)
            result.store(seen.o / maximum(l, TINY), spot, int32(OWN * warp), given)
            if warp == 0:
                result.store_sums(seen.m + log2(l) / scale, scale, spot, given)
        elif warp == 0:  # the sequence is too short for this part
            result.store_sums(full(O.col_vec, -math.inf), scale, spot, given)

    return attend, smem
