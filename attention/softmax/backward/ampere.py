"""Gradients of softmax attention for sm_80 and later: cp.async, ldmatrix and mma.sync.

As hopper.py, a thread block has a block of keys and goes through the queries that see it, scores being computed again, keys by
queries. Every warp owns 16 keys, or shares them with others of which each has some columns of dK and dV. dS goes through shared
memory, in tiles of 16 keys, for dQ = dS K; a warp makes parts of it of 16 queries and 64 columns, and adds them to what other
blocks of keys have found. The next queries are on their way meanwhile.

It also takes what TMA cannot: bases and strides of 8, 4 or 2 bytes, by as many smaller copies.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import add_held, block, divmod, load, mma_AB, mma_ABt, store, subtile, truncate, turned, zeros
from tiles import bf16, dtype, fp16, fp32, pipeline, rt, shared, st
from tiles.arguments import FLOAT, INT, array
from tiles.layout import LANES
from tiles.pipeline import PIECES

from ..seen import CAUSAL, FULL
from ..variants import At, Variant
from .by_keys import ByKeys
from .order import Ordered
from .parts import BAND, PANEL, Held


@dataclass(frozen=True)
class Config(ByKeys):
    """A kernel's shape: how many warps share the columns of the same 16 keys; blocks that a multiprocessor is to hold. piece:
    the bytes that bases and strides are multiples of."""

    share: int
    resident: int
    piece: int = 16

    @property
    def in_order(self) -> Ordered:
        """See ByKeys."""
        return Ordered(self.warps, False)

    @property
    def warps(self) -> int:
        """Of a thread block."""
        return self.kv // BAND * self.share

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return LANES * self.warps

    @property
    def parts(self) -> Held:
        """How dQ is cut."""
        return Held(self.rows, self.kv, self.head_dim, self.dtype, self.piece)

    def __str__(self):
        return super().__str__() + f", by {self.piece} bytes" * (self.piece != 16)


SHAPES = {64: (64, 64, 1, 2), 128: (64, 64, 2, 1), 256: (32, 32, 2, 1)}  # padded head_dim: (kv, queries, share, resident)


@functools.lru_cache(1024)
def config_for(
    head_dim: int, dtype: dtype, variant: Variant, piece: int = 16, value_dim: int | None = None, **kind: Any
) -> Config:
    """The configuration that serves a problem: the next larger dims, both as the greater one. kind: see Kind."""
    padded = min(d for d in SHAPES if d >= max(head_dim, value_dim or head_dim))
    return Config(padded, padded, dtype, variant, *SHAPES[padded], piece, **kind)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What an architecture is served with: bf16 and whole pieces, or `everything`."""
    forms = [(bf16, PIECES[0]), *((bf16, piece) for piece in PIECES[1:]), (fp16, PIECES[0])]
    for (of, piece), head_dim, variant in itertools.product(forms[: len(forms) if everything else 1], SHAPES, (FULL, CAUSAL)):
        yield config_for(head_dim, of, variant, piece)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, SHARE, WARPS, PIECE = config.kv, config.rows, config.share, config.warps, config.piece
    GIVEN, AUX, INPUT = config.given, config.aux, config.dtype
    variant, tiling, parts, sequences = config.variant, config.tiling, config.parts, config.sequences
    order, result, OUT = config.order, config.result, config.result.dtype
    PANELS, BANDS, TILES = config.head_dim // PANEL, KV // BAND, ROWS // BAND
    K_COLS, V_COLS = config.head_dim // SHARE, config.value_dim // SHARE
    DK, DV, S, PART = rt(BAND, K_COLS, fp32), rt(BAND, V_COLS, fp32), rt(ROWS, BAND, fp32, "col"), rt(BAND, PANEL, fp32)
    SCORES = rt(BAND, ROWS, fp32)
    smem = shared(
        k=pipeline(config.key, 1, WARPS),
        v=pipeline(config.value, 1, WARPS),
        q=pipeline(config.query, 1, WARPS),
        do=pipeline(config.dout, 1, WARPS),
        ds=st(ROWS * BANDS, BAND, INPUT),
    )

    @cuda.jit(launch_bounds=(config.threads, config.resident), fastmath=True)
    def attend(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDO: array(4, INPUT), gSums: array(3), gSum: array(3),
        gDK: array(4, OUT), gDV: array(4, OUT), given: GIVEN, aux: AUX, blocks: INT, heads: INT, pairs: INT, band: INT,
        group: INT, scale: FLOAT, unit: FLOAT,
    ):  # fmt: skip
        """dK and dV of a block of keys of one of `pairs` pairs of key head and batch, `band` of which are worked on at once,
        and what it adds to dQ of the `group` query heads that share the head. The weight of a score s is exp2(`scale` s - lse);
        before the variant made something of it, it was `unit` Q K^T."""
        k, v, q, do, ds = smem.open()
        number, pair = tiling.place(cuda.blockIdx.x, blocks, pairs, band)
        number, batch, kv_head = sequences.find_keys(number, pair, heads, KV, given)
        own, key, warp = sequences.sequence(batch, given), int32(KV * number), int32(cuda.threadIdx.x // LANES)
        if not sequences.has_keys(key, batch, given):
            return
        if not sequences.apart:  # what lies behind the ends is another's
            gK, gV = truncate(gK, 1, own.key + own.keys), truncate(gV, 1, own.key + own.keys)
        if sequences.packed:
            end, end_k = own.query + own.queries, sequences.last_key(batch, given)
            gQ, gDO, gDK, gDV = truncate(gQ, 1, end), truncate(gDO, 1, end), truncate(gDK, 1, end_k), truncate(gDV, 1, end_k)
        mine, share = divmod(warp, SHARE)
        at = At(batch, group * kv_head, int32(0), own.keys - own.queries, own.queries, own.keys, given, aux, 0)
        every = tiling.tiles(key, at, group)
        first = int32(own.query + ROWS * tiling.tile(every, order.nth(every.n, 0), key, at, group))
        tiles = int32(group * every.n)
        above = sequences.first_tile(batch, given)
        k.fill(0, gK, (own.batch, own.key + key, kv_head, 0), 1, 3, 1, PIECE)
        v.fill(0, gV, (own.batch, own.key + key, kv_head, 0), 1, 3, 1, PIECE)
        q.fill(0, gQ, (own.batch, first, group * kv_head, 0), 1, 3, tiles, PIECE)
        do.fill(0, gDO, (own.batch, first, group * kv_head, 0), 1, 3, tiles, PIECE)
        every_key = k.wait(0, 3)
        keys, values, dk, dv = subtile(every_key, BAND, mine), subtile(v.wait(0, 2), BAND, mine), zeros(DK), zeros(DV)
        for j in range(tiles):
            h, i = divmod(j, every.n)
            nth = order.nth(every.n, i)
            head, tile = int32(group * kv_head + h), tiling.tile(every, nth, key, at, group)
            stands = at._replace(head=head, row=int32(ROWS * tile))
            here, to = stands._replace(kept=variant.keep(stands)), int32(above + tile)
            place = own.batch, head, int32(2 * ROWS * to)
            queries = q.wait(j, 1)
            s = turned(mma_ABt(zeros(SCORES), keys, queries))
            own_key, lse = int32(key + BAND * mine), load(gSums, S.col_vec, place, -2, -1, True)
            s, bend = variant.bent(s, here, own_key)
            p = tiling.weights(s, lse, tiling.cut(every, nth), here, own_key, scale)
            dout = do.wait(j, 0)
            dv = mma_AB(dv, INPUT(turned(variant.left(p))), subtile(dout, ROWS, 0, V_COLS, share))
            dp = turned(mma_ABt(zeros(SCORES), values, dout))
            delta = load(gSums, S.col_vec, (own.batch, head, int32(2 * ROWS * to + ROWS)), -2, -1, True)
            slope = INPUT(variant.slope(p, dp, delta, here) * bend)
            if share == 0:
                store(subtile(ds, ROWS, mine), slope)
            dk = mma_AB(dk, turned(slope), subtile(queries, ROWS, 0, K_COLS, share))
            block.sync()
            last = i + 1 == every.n  # of the head's tiles
            row = first if last else int32(own.query + ROWS * tiling.tile(every, order.nth(every.n, i + 1), key, at, group))
            later = own.batch, row, int32(head + 1) if last else head, 0
            q.fill(j + 1, gQ, later, 1, 3, tiles, PIECE)
            do.fill(j + 1, gDO, later, 1, 3, tiles, PIECE)
            of = int32(group * pair + h)
            order.take(given, of, to, 0, tiling.before(number, tile, at, group))
            for n in range(warp, parts.count, WARPS):
                down, right = divmod(int32(n), PANELS)
                part = zeros(PART)
                for m in range(BANDS):
                    part = mma_AB(part, subtile(ds, BAND, TILES * m + down), subtile(every_key, BAND, m, PANEL, right))
                add_held(gSum, part, parts.place(of, to, int32(n)))
            order.give(given, of, to, 0)
        row = own.key + key + BAND * mine
        result.store(gDK, dk * unit, (own.batch, row, kv_head, K_COLS * share), PIECE)
        result.store(gDV, variant.output(dv, at), (own.batch, row, kv_head, V_COLS * share), PIECE)

    return attend, smem
