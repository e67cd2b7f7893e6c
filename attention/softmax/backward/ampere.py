"""Gradients of softmax attention for sm_80 and later: cp.async, ldmatrix and mma.sync.

As hopper.py, a thread block has a block of keys and goes through the queries that see it, scores being computed again, keys by
queries. Every warp owns 16 or 32 keys: the more, the less its products read of shared memory. Where registers do not hold dK
and dV of so many, two warps own the same keys: one finds P and dV, the other dS and dK. dS goes through shared memory, in tiles
of a warp's keys, for dQ = dS K; a warp makes parts of it of 16 queries and 64 columns, and adds them to what other blocks of
keys have found. The next queries are on their way meanwhile.

It also takes what TMA cannot: bases and strides of 8, 4 or 2 bytes, by as many smaller copies.
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
from ops.memory.held import QUAD
from tiles import bf16, dtype, fp16, fp32, inlined, pipeline, rt, shared, st
from tiles.arguments import FLOAT, INT, array
from tiles.cp_async import PIECES
from tiles.layout import LANES, WARPGROUP
from tiles.targets import LARGE, capability, is_hopper, shared_bytes

from ..variants import At, Variant
from ..visible_keys import CAUSAL, FULL
from .base_config import BackwardConfig, padded_dim
from .dq_order import LAST_FIRST, UNORDERED, Ordered, Unordered
from .dq_parts import BAND, PANEL, Direct, Held


@dataclass(frozen=True)
class Config(BackwardConfig):
    """A kernel's shape: keys that a warp owns; queries whose scores it has at once; do two warps own the same keys? Blocks that
    a multiprocessor is to hold. together: how many of a lane's elements of dQ are added at once. piece: the bytes that bases
    and strides are multiples of. alone: does a block have all keys, and each query see one?"""

    own: int
    step: int
    apart: bool
    resident: int
    together: int = 1
    piece: int = 16
    alone: bool = field(default=False, kw_only=True)

    def __post_init__(self):
        if self.parts.count % self.warps:
            raise ValueError(f"{self.warps} warps cannot have as many of {self.parts.count} parts of dQ each: {self}")

    @property
    def in_order(self) -> Ordered:
        return Ordered(self.warps, False)

    @property
    def order(self) -> Unordered:
        if self.alone:
            return LAST_FIRST if self.ordered else UNORDERED
        return super().order

    @property
    def warps(self) -> int:
        """Of a thread block."""
        return self.kv // self.own * (2 if self.apart else 1)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return LANES * self.warps

    @property
    def learners(self) -> int:
        """How many warps of a block leave what they have learnt."""
        return self.kv // self.own

    @property
    def parts(self) -> Held:
        """How dQ is cut."""
        cut = self.rows, self.kv, self.head_dim, self.dtype, self.piece, self.together
        return Direct(*cut, self.result) if self.alone else Held(*cut)

    def __str__(self):
        return super().__str__() + " alone" * self.alone + f", by {self.piece} bytes" * (self.piece != 16)


Shape = tuple[int, int, int, int, bool, int]  # kv, queries, own, step, apart, resident
SHAPES: dict[int, Shape] = {  # of a padded head_dim
    64: (64, 64, 16, 64, False, 2),
    128: (64, 64, 16, 64, True, 1),
    256: (32, 32, 16, 32, True, 1),
}
PLAIN = SHAPES | {128: (64, 64, 32, 64, True, 2)}  # where scores take no registers of their own
ROOMY = PLAIN | {64: (128, 128, 32, 32, False, 2)}  # and a multiprocessor holds two blocks of 97 KB: sm_90
FEWER = PLAIN | {64: (128, 64, 32, 16, False, 2)}  # the same where 128 queries spill: sm_100, and sm_90 by small pieces, full
Shorts = dict[int, list[tuple[float, float, Shape]]]
SHORT: Shorts = {  # ... and sequences have up to so many queries and keys: sm_90
    64: [(64, math.inf, (64, 64, 16, 32, False, 3)), (128, 128, ROOMY[64])],
    128: [(32, 32, (32, 32, 16, 32, True, 2)), (32, math.inf, (64, 32, 32, 32, True, 2)), (64, 64, PLAIN[128])],
}
SHORT_FULL: Shorts = SHORT | {  # ... where queries see all keys: three resident blocks' 168 registers do not hold all there
    64: [(64, math.inf, (64, 64, 16, 64, False, 2)), (128, 128, ROOMY[64])]
}


def shorts(variant: Variant) -> Shorts:
    """The shapes for few queries, by padded head_dim."""
    return SHORT_FULL if variant is FULL else SHORT


def short(head_dim: int, value_dim: int, variant: Variant, queries: int, keys: int) -> Shape | None:
    """The shape for which these kernels are faster than Hopper's, if there is one. So few queries and keys leave a warpgroup's
    products half empty, and two or three blocks of four warps hide each other's waits."""
    shapes = [] if variant.scored else shorts(variant).get(padded_dim(head_dim, value_dim), [])
    return next((shape for most, most_keys, shape in shapes if queries <= most and keys <= most_keys), None)


@functools.lru_cache(1024)
def config_for(
    head_dim: int,
    dtype: dtype,
    variant: Variant,
    piece: int = 16,
    value_dim: int | None = None,
    capability: tuple = (8, 0),
    shape: Shape | None = None,
    **kind: Any,
) -> Config:
    """The configuration that serves a problem on a GPU of such a compute capability: the next larger dims, both as the greater
    one. shape: see `short`. kind: see BaseConfig."""
    hopper, padded = is_hopper(capability), padded_dim(head_dim, value_dim)
    if variant.scored or variant.draws:
        shapes = SHAPES
    elif shared_bytes(capability) < LARGE:
        shapes = PLAIN
    else:
        shapes = ROOMY if hopper and (variant is not FULL or piece == PIECES[0]) else FEWER
    together = QUAD if hopper else 1  # sm_100 spills with a quad
    return Config(padded, padded, dtype, variant, *(shape or shapes[padded]), together, piece, **kind)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What an architecture is served with: bf16 and whole pieces, or `everything`."""
    forms = [(bf16, PIECES[0]), *((bf16, piece) for piece in PIECES[1:]), (fp16, PIECES[0])]
    gpu = capability(arch)
    for (of, piece), head_dim, variant in itertools.product(forms[: len(forms) if everything else 1], SHAPES, (FULL, CAUSAL)):
        config = config_for(head_dim, of, variant, piece, capability=gpu)
        yield from (config, replace(config, alone=True))
        if arch == "sm_90a" and piece == PIECES[0]:  # else TMA does not serve, either, and nothing is short
            for _, _, shape in shorts(variant).get(head_dim, []):
                if shape != ROOMY[head_dim]:
                    of_short = config_for(head_dim, of, variant, piece, capability=gpu, shape=shape)
                    yield from (of_short, replace(of_short, alone=True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, OWN, STEP, WARPS, PIECE = config.kv, config.rows, config.own, config.step, config.warps, config.piece
    GIVEN, AUX, INPUT, APART, BENDS = config.given, config.aux, config.dtype, config.apart, config.variant.bends
    variant, tiling, parts, sequences = config.variant, config.tiling, config.parts, config.sequences
    order, learns, result, OUT = config.order, config.learns, config.result, config.result.dtype
    PANELS, OWNERS, STEPS, BANDS = config.head_dim // PANEL, KV // OWN, ROWS // STEP, ROWS // BAND
    GROUPS = WARPS // WARPGROUP
    EACH, SUMS = parts.count // WARPS, parts.array  # how many parts of dQ a warp has; where they go
    DK, DV, PART = rt(OWN, config.head_dim, fp32), rt(OWN, config.value_dim, fp32), rt(BAND, PANEL, fp32)
    SCORES, S, P = rt(OWN, STEP, fp32), rt(STEP, OWN, fp32, "col"), rt(STEP, OWN, INPUT, "col")
    smem = shared(
        k=pipeline(config.key, 1, WARPS),
        v=pipeline(config.value, 1, WARPS),
        q=pipeline(config.query, 1, WARPS),
        do=pipeline(config.dout, 1, WARPS),
        ds=st(ROWS * OWNERS * (2 if APART and BENDS else 1), OWN, INPUT),
    )

    @inlined
    def alone(j, sums, learnt, q, do, keys, values, ds, mine, at, cut, key, gSums, place, scale):
        """A warp's dK and dV with tile j of queries, what it has learnt, and dS for all, some queries after the other."""
        (dk, dv), (batch, head, row) = sums, place
        queries, dout = q.wait(j, 1), do.wait(j, 0)
        for n in range(STEPS):
            here, its_q, its_do = at._replace(row=int32(at.row + STEP * n)), subtile(queries, STEP, n), subtile(dout, STEP, n)
            s = turned(mma_ABt(zeros(SCORES), keys, its_q))
            lse = load(gSums, S.col_vec, (batch, head, int32(row + STEP * n)), -2, -1, True)
            s, bend = variant.bent(s, here, key)
            p = INPUT(tiling.weights(s, lse, cut, here, key, scale))
            dv = mma_AB(dv, turned(variant.left(p)), its_do)
            dp = turned(mma_ABt(zeros(SCORES), values, its_do))
            delta = load(gSums, S.col_vec, (batch, head, int32(row + ROWS + STEP * n)), -2, -1, True)
            slope = variant.slope(fp32(p), dp, delta, here)
            learnt, slope = learns.add(learnt, slope, here, key), INPUT(slope * bend)
            store(subtile(ds, STEP, STEPS * mine + n), slope)
            dk = mma_AB(dk, turned(slope), its_q)
        return (dk, dv), learnt

    @inlined
    def apart(j, sum, learnt, q, do, keys, values, ds, mine, at, cut, key, gSums, place, scale):
        """The same of two warps, the first of which has dV and the other dK. P goes from one to the other where dS will lie,
        and behind all dS what scores are bent by."""
        first, (batch, head, row) = warp_index() < OWNERS, place
        of_rows = load(gSums, S.col_vec, (batch, head, row if first else int32(row + ROWS)), -2, -1, True)
        queries, dout = q.wait(j, 1), do.wait(j, 0)
        x = turned(mma_ABt(zeros(SCORES), keys if first else values, queries if first else dout))
        if first:
            s, bend = variant.bent(x, at, key)
            p = INPUT(tiling.weights(s, of_rows, cut, at, key, scale))
            store(subtile(ds, ROWS, mine), p)
            if BENDS:
                store(subtile(ds, ROWS, OWNERS + mine), INPUT(bend))
            block.sync()
            sum = mma_AB(sum, turned(variant.left(p)), dout)
        else:
            block.sync()
            slope = variant.slope(fp32(load(subtile(ds, ROWS, mine), P)), x, of_rows, at)
            learnt = learns.add(learnt, slope, at, key)
            if BENDS:
                slope = slope * fp32(load(subtile(ds, ROWS, OWNERS + mine), P))
            slope = INPUT(slope)
            store(subtile(ds, ROWS, mine), slope)
            sum = mma_AB(sum, turned(slope), queries)
        return sum, learnt

    @inlined
    def add(n, keys, ds, gSum, pair, tile, unit):
        """Part n of what a block adds to a tile of dQ."""
        (down, right), part = divmod(n, PANELS), zeros(PART)
        for m in range(OWNERS):
            part = mma_AB(part, subtile(ds, BAND, BANDS * m + down), subtile(keys, OWN, m, PANEL, right))
        parts.add(gSum, part, pair, tile, n, unit)

    step = apart if APART else alone

    @cuda.jit(launch_bounds=(config.threads, config.resident), fastmath=True)
    def attend(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDO: array(4, INPUT), gSums: array(3), gSum: SUMS,
        gDK: array(4, OUT), gDV: array(4, OUT), given: GIVEN, aux: AUX, blocks: INT, heads: INT, pairs: INT, band: INT,
        group: INT, shares: INT, spans: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of a block of keys with one of `pairs` pairs of share and batch, `band` of which are worked on at once, and
        what it adds to dQ. A batch has `heads` shares (shares.py), a key head `shares` of them: `spans` spans of the queries of
        each subgroup of `group` query heads. The weight of a score s is exp2(`scale` s - lse); before the variant made
        something of it, it was `unit` Q K^T."""
        k, v, q, do, ds = smem.open()
        number, pair = tiling.place(cuda.blockIdx.x, blocks, pairs, band)
        line = int32(blocks * (pair // heads) + number)  # of what is learnt
        number, batch, share = sequences.find_keys(number, pair, heads, KV, given)
        subgroup, span = divmod(share, spans)
        own, key, warp = sequences.sequence(batch, given), int32(KV * number), warp_index()
        if sequences.packed and warp < OWNERS:
            some, row = sequences.nobodys_keys(key, batch, KV, given)
            if some:
                at_keys = int32(0), int32(row + OWN * warp), share, 0
                result.store(gDK, zeros(DK), at_keys, PIECE)
                result.store(gDV, zeros(DV), at_keys, PIECE)
        if not sequences.has_keys(key, batch, given):
            return
        if not sequences.apart:  # what lies behind the ends is another's
            gK, gV = truncate(gK, 1, own.key + own.keys), truncate(gV, 1, own.key + own.keys)
        if sequences.packed:
            end, end_k = own.query + own.queries, sequences.last_key(batch, given)
            gQ, gDO, gDK, gDV = truncate(gQ, 1, end), truncate(gDO, 1, end), truncate(gDK, 1, end_k), truncate(gDV, 1, end_k)
        mine, own_key = warp % OWNERS, int32(key + OWN * (warp % OWNERS))
        at = At(batch, group * subgroup, int32(0), int32(own.keys - own.queries), own.queries, own.keys, given, aux, 0)
        every = tiling.span(tiling.tiles(key, at, group), span, spans)
        first = int32(own.query + ROWS * tiling.tile(every, order.nth(every.n, 0), key, at, group))
        tiles, above = int32(group * every.n), sequences.first_tile(batch, given)
        kv_head, _ = divmod(share, shares)
        k.fill(0, gK, (own.batch, own.key + key, kv_head, 0), 1, 3, 1, PIECE)
        v.fill(0, gV, (own.batch, own.key + key, kv_head, 0), 1, 3, 1, PIECE)
        q.fill(0, gQ, (own.batch, first, group * subgroup, 0), 1, 3, tiles, PIECE)
        do.fill(0, gDO, (own.batch, first, group * subgroup, 0), 1, 3, tiles, PIECE)
        every_key = k.wait(0, 3)
        every_value = v.wait(0, 2)
        every.clear(every_key, GROUPS)
        every.clear(every_value, GROUPS)
        keys, values = subtile(every_key, OWN, mine), subtile(every_value, OWN, mine)
        sums, learnt = zeros(DK) if APART else (zeros(DK), zeros(DV)), learns.begin(SCORES)
        head, i, of = int32(group * subgroup), int32(0), int32(group * divmod(pair, spans)[0])
        for j in range(tiles):
            nth = order.nth(every.n, i)
            tile = tiling.tile(every, nth, key, at, group)
            stands = at._replace(head=head, row=int32(ROWS * tile))
            here, to = stands._replace(kept=variant.keep(stands)), int32(above + tile)
            place, cut = (own.batch, head, int32(2 * ROWS * to)), tiling.cut(every, nth)
            sums, learnt = step(j, sums, learnt, q, do, keys, values, ds, mine, here, cut, own_key, gSums, place, scale)
            block.sync()
            last = i + 1 == every.n  # of the head's tiles
            row = first if last else int32(own.query + ROWS * tiling.tile(every, order.nth(every.n, i + 1), key, at, group))
            later = own.batch, row, int32(head + 1) if last else head, 0
            q.fill(j + 1, gQ, later, 1, 3, tiles, PIECE)
            do.fill(j + 1, gDO, later, 1, 3, tiles, PIECE)
            behind = order.behind(tiling, number, tile, at, group)
            order.take(given, of, to, 0, behind)
            if APART:
                n = warp
                while n < parts.count:  # which nobody unrolls: there are no registers for it
                    add(n, every_key, ds, gSum, of, to, unit)
                    n = int32(n + WARPS)
            else:
                for n in range(EACH):
                    add(int32(warp + WARPS * n), every_key, ds, gSum, of, to, unit)
            order.give(given, of, to, 0, behind)
            if last:
                if not APART or warp >= OWNERS:
                    learns.give(learnt, given, here, int32(OWNERS * line + mine))
                learnt = learns.begin(SCORES)
            head, of, i = int32(head + last), int32(of + last), int32(0) if last else int32(i + 1)
        row = own.key + own_key
        if not APART:
            result.store(gDK, sums[0] * unit, (own.batch, row, share, 0), PIECE)
            result.store(gDV, variant.output(sums[1], at), (own.batch, row, share, 0), PIECE)
        elif warp >= OWNERS:
            result.store(gDK, sums * unit, (own.batch, row, share, 0), PIECE)
        else:
            result.store(gDV, variant.output(sums, at), (own.batch, row, share, 0), PIECE)

    return attend, smem
