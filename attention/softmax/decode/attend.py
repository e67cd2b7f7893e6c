"""Attention of a few query tokens, over a part of the keys: cp.async, ldmatrix and mma.sync, for sm_80 and later.

Memory sets the speed: keys and values are read once, and each serves but a few rows. So the query heads that share a key head
and all tokens are the rows of one tile, and a block's warps share the keys: each has some of every tile, which it brings, reads
and weighs by itself, so that no warp waits for another before the end. There their parts are added, and where several blocks
share a sequence's keys, those of the blocks, by combine.py.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block, divmod, exp2, finish_sum, full, load, log2, maximum, mma_AB, mma_ABt, row_index, store, subtile, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.arguments import FLOAT, INT, array, record
from tiles.layout import LANES
from tiles.pipeline import PIECES

from ..online import LOWEST, TINY, Softmax
from ..variants import At, Variant, arrays_of
from .caches import Dense, Indexed, Paged
from .reach import Reach
from .results import Part, PartOfPacked, Spot, Whole
from .tokens import Alike, OneBehindTheOther

PANEL = 32  # columns of O that a warp adds up at once: those of a panel of float32


@dataclass(frozen=True)
class Config:
    """A kernel: which caches it reads and what becomes of their scores; and its shape: `band` rows, `warps` of `keys` keys of
    every tile each, stages of the pipelines, blocks that a multiprocessor is to hold. sums: what joins the sum of weights. lie:
    how query tokens lie. axes: how many each array has that the variant's functions read."""

    head_dim: int
    value_dim: int
    dtype: dtype
    variant: Variant
    reach: Reach
    cache: Dense
    result: Whole
    sums: Variant
    band: int
    keys: int
    warps: int
    stages: int
    resident: int
    lie: type[Alike] = Alike
    axes: tuple[int, ...] = ()

    @property
    def kv(self):
        """Keys of a tile."""
        return self.keys * self.warps

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * self.warps

    @property
    def given(self):
        """What the kernel is told of all these."""
        parts = self.reach, self.cache, self.variant, self.sums, self.result, self.lie(self.band)
        return record(**{name: what for part in parts for name, what in part.given.items()})

    def __str__(self):
        dims = f"D {self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)
        scores = f" {self.variant}" * (type(self.variant) is not Variant) + f" {self.sums}" * (type(self.sums) is not Variant)
        return (
            f"{dims} {self.dtype} {self.reach} {self.cache}{scores}{self.lie(self.band)} {self.result}, {self.band} x {self.kv}"
        )


BAND = 16  # rows of a tile
SHAPES = {  # padded head_dim: (keys, warps, stages, resident)
    64: (32, 4, 2, 2),
    96: (16, 4, 3, 2),
    128: (16, 4, 2, 2),
    192: (16, 4, 2, 1),
    256: (16, 4, 2, 1),
}
ROOMS = {  # bytes of shared memory that a block may have: other shapes. A multiprocessor has little more than one such block
    99 * 1024: {64: (32, 4, 2, 1), 96: (16, 4, 3, 1), 128: (16, 4, 2, 1), 192: (16, 2, 3, 1), 256: (16, 2, 2, 1)},
    163 * 1024: {},
    227 * 1024: {64: (32, 4, 3, 2), 96: (16, 4, 4, 2), 128: (16, 4, 3, 2), 192: (16, 4, 2, 2), 256: (16, 4, 3, 1)},
}
TALL = {  # the same of tiles of twice as many rows, where they serve: all warps' parts of O must fit where values were
    99 * 1024: {64: (32, 4, 2, 1)},
    163 * 1024: {64: (32, 4, 2, 1), 96: (16, 4, 4, 1), 128: (16, 4, 4, 1)},
    227 * 1024: {64: (32, 4, 3, 2), 96: (16, 4, 4, 1), 128: (16, 4, 4, 1)},
}
LEAST, LARGE = min(ROOMS), max(ROOMS)
ROOM = {"sm_80": 163 * 1024, "sm_90a": LARGE, "sm_100a": LARGE}  # elsewhere the least


def config_for(
    head_dim: int, value_dim: int, of: dtype, variant: Variant, reach: Reach, cache: Dense, result: Whole, sums: Variant,
    tall: bool = False, room: int = LARGE, lie: type[Alike] = Alike, axes: tuple[int, ...] = (),
) -> Config:  # fmt: skip
    """The configuration that serves a problem on a GPU whose blocks may have `room` bytes of shared memory: the next larger
    dims, in the shape of the greater one. tall: there are rows for more than one tile."""
    padded, wide = (min(d for d in SHAPES if d >= dim) for dim in (head_dim, value_dim))
    room = max(r for r in ROOMS if r <= room)
    short, high, dim = SHAPES | ROOMS[room], TALL[room], max(padded, wide)
    band, shape = (2 * BAND, high[dim]) if tall and dim in high else (BAND, short[dim])
    return Config(padded, wide, of, variant, reach, cache, result, sums, band, *shape, lie, axes)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What an architecture is served with: bf16, one token, whole pieces; or `everything`. fp16 takes the same registers."""
    plain, room = Variant(), ROOM.get(arch, LEAST)
    kinds = [(Reach(False, False, False), Dense, Whole), (Reach(False, True, False), Paged, Part)]
    if everything:
        kinds += [(Reach(True, True, False), Indexed, Part), (Reach(False, True, True), Paged, Whole)]
    forms = [(bf16, PIECES[0]), *((bf16, piece) for piece in PIECES[1:]), (fp16, PIECES[0])]
    forms = forms if everything else forms[:1]
    found = [
        config_for(dim, dim, of, plain, reach, cache(piece), result(of, piece), plain, tall, room)
        for (of, piece), dim, (reach, cache, result), tall in itertools.product(forms, SHAPES, kinds, (False, True))
    ]
    if everything:  # queries one behind the other
        kind = plain, Reach(False, True, False), Paged(PIECES[0]), PartOfPacked(bf16, PIECES[0]), plain
        found += [config_for(dim, dim, bf16, *kind, tall, room, OneBehindTheOther) for dim in SHAPES for tall in (False, True)]
    yield from dict.fromkeys(found)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    BAND, KEYS, WARPS, KV, STAGES = config.band, config.keys, config.warps, config.kv, config.stages
    INPUT, GIVEN, AUX = config.dtype, config.given, arrays_of(config.axes)
    variant, reach, cache, result, sums = config.variant, config.reach, config.cache, config.result, config.sums
    lie = config.lie(BAND)
    QUERY = st(BAND, config.head_dim, INPUT)
    Q, PANELS = rt(BAND, QUERY.panel_cols, fp32), QUERY.panels
    S, O = rt(BAND, KEYS, fp32), rt(BAND, config.value_dim, fp32)
    ADDENDS, SLAB, SLABS = st(WARPS * BAND, config.value_dim, fp32), rt(BAND, PANEL, fp32), config.value_dim // PANEL
    AHEAD, NEWER = STAGES - 1, 2 * STAGES - 3  # tiles under way; groups of keys and values that are younger than one waited for
    smem = shared(
        q=QUERY,
        k=pipeline(st(KV, config.head_dim, INPUT), STAGES, WARPS),
        v=pipeline(st(KV, config.value_dim, INPUT), STAGES, WARPS),
        scratch=sv(WARPS * BAND, fp32),
    )
    softmax = Softmax(O)

    @inlined
    def bring(queries, gQ, spot, warp):
        """The block's rows of Q, into shared memory. A token's rows lie in one place; zeros are loaded where others are."""
        for i in range(warp, PANELS, WARPS):
            x = zeros(Q)
            for token in range(spot.first, spot.last + 1):
                at = spot.batch, spot.start + token, spot.head, int32(spot.row - token * spot.group), int32(Q.cols * i)
                x = x + load(gQ, Q, at, 3, 4)
            store(subtile(queries, BAND, 0, Q.cols, i), INPUT(x))
        block.sync()

    @cuda.jit(launch_bounds=(config.threads, config.resident), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), given: GIVEN, aux: AUX,
        heads: INT, bands: INT, splits: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """Of one of `bands` tiles of rows, `group` query heads and `tokens` tokens of a key head, over one of `splits` parts of
        the keys that it sees; exp2(`scale` s) is the weight of a score, `slack` how far a maximum may lag."""
        queries, k, v, scratch = smem.open()
        rest, band = divmod(cuda.blockIdx.x, bands)
        rest, head = divmod(rest, heads)  # heads' rows are neighbours in memory: they are read at the same time
        batch, split = divmod(rest, splits)
        warp = int32(cuda.threadIdx.x // LANES)
        rows = lie.find(batch, band, tokens, group, given)
        sequence, batch, start, tokens, row = rows
        end = int32(tokens * group)
        last_row = min(row + BAND, end) - 1
        spot = Spot(batch, head, split, row, int32(row // group), int32(last_row // group), group, start, end)
        sees = reach.keys(sequence, spot.first, spot.last, tokens, given)
        every = max(0, (sees.end - sees.first + KV - 1) // KV)
        share = (every + splits - 1) // splits
        first, n = int32(sees.first + KV * share * split), int32(max(0, min(share, every - share * split)))
        if lie.has(rows, group) and (n > 0 or split == 0):
            for i in range(AHEAD):
                cache.fill(k, i, gK, sequence, int32(first + KV * i), head, sees.end, n, given)
                cache.fill(v, i, gV, sequence, int32(first + KV * i), head, sees.end, n, given)
            bring(queries, gQ, spot, warp)
            of_rows = row_index(O.col_vec) + row
            token = of_rows // group
            at = At(sequence, of_rows - token * group + head * group, token, sees.shift, tokens, sees.end, given, aux, 0)
            at = at._replace(kept=variant.keep(at))
            seen = softmax.begin(LOWEST)
            for i in range(n):
                key, later = int32(first + KV * i + KEYS * warp), int32(first + KV * (i + AHEAD))
                keys = k.own(i, NEWER)
                cache.fill(k, i + AHEAD, gK, sequence, later, head, sees.end, n, given)
                s = mma_ABt(zeros(S), queries, keys)
                values = v.own(i, NEWER)
                cache.fill(v, i + AHEAD, gV, sequence, later, head, sees.end, n, given)
                s = reach.mask(variant.mask(variant.score(s, at, key), at, key, -math.inf), at, key, sees.end)
                seen = seen.moved(s, None, scale, slack)
                o = seen.rescaled()
                p = seen.weights(s, None, scale)
                seen = seen._replace(o=mma_AB(o, INPUT(p), values)).add(p)

            m = maximum(block.reduce_max(seen.m, scratch), sums.lowest(at))
            weight = exp2((seen.m - m) * scale)
            l = sums.total(block.reduce_sum(finish_sum(seen.l) * weight, scratch), m, scale, at)
            addends = v.reuse(ADDENDS)  # the warps have met: nobody reads values any more
            store(subtile(addends, BAND, warp), seen.o * weight)
            block.sync()
            for slab in range(warp, SLABS, WARPS):
                o = zeros(SLAB)
                for other in range(WARPS):
                    o = o + load(subtile(addends, BAND, other, PANEL, slab), SLAB)
                result.store(o / maximum(l, TINY), spot, int32(PANEL * slab), given)
            if warp == 0:
                result.store_sums(m + log2(l) / scale, scale, spot, given)
        elif warp == 0:  # the sequence is too short for this part, or for this tile
            result.store_sums(full(O.col_vec, -math.inf), scale, spot, given)

    return attend, smem
