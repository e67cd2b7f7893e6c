"""Attention of some query tokens for Hopper, over a part of the keys: TMA or cp.async, and wgmma.

For problems for which the tiles of ampere.py, of 16 and 32 rows, are too small: several tokens of many heads that share a key
head. Here, too, rows are heads and tokens, 64 to a tile. Two warpgroups both have all rows, and divide the keys: one takes the
even tiles, the other the odd ones, so that the tensor cores work for one while the softmax of the other runs. At the end of a
block's work, what both have seen is merged, half of the columns by each.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import cuda
from numpy import int32

from ops import columns, divmod, exp2, finish_sum, grid, load, log2, maximum, row_index, store, subtile, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.arguments import FLOAT, INT, array, record
from tiles.layout import WARPGROUP

from ..key_sources import IndexedCache, OneBuffer, PagedKeys
from ..online import LOWEST_FLOAT, Softmax, over_sum
from ..variants import ScoreContext, Variant, arrays_of
from .feeds import GatherFeed, TmaFeed
from .reach import KeyWindow
from .results import FinalOrPartialOutput, FinalOutput, OutputTile, PartialOutput
from .splits import FixedSplits, StreamKSplits

KV, CONSUMERS = 64, 2  # keys of a tile; warpgroups that divide the tiles of keys
PRODUCER = CONSUMERS
BY_TMA, GATHERING = (40, 232), (56, 224)  # registers a thread of producer and consumers
STAGES = {64: 6, 96: 6, 128: 5, 192: 3, 256: 2}  # padded head_dim: how many tiles of keys, and of values, shared memory holds
VECTOR_BYTES = 16  # bytes of which all addresses are multiples


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. As in ampere.py it says which keys are read, what becomes of their scores, and where the
    output goes. feed: fills the rings, which have `stages` slots."""

    head_dim: int
    value_dim: int
    dtype: dtype
    variant: Variant
    window: KeyWindow
    feed: Any
    result: FinalOutput | FinalOrPartialOutput
    sums: Variant
    split: type[FixedSplits]
    stages: int
    axes: tuple[int, ...] = ()
    overlaps_previous = True  # it begins while the grid before it ends
    band, kv, resident = warpgroup.ROWS, KV, 1  # rows of a tile, keys; blocks that a multiprocessor is to hold
    threads = warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def params(self):
        """The record of what all these need in the kernel."""
        parts = self.window, self.feed, self.variant, self.sums, self.result
        return record(**{name: what for part in parts for name, what in part.params.items()})

    def __str__(self):
        dims = f"D {self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)
        scores = f" {self.variant}" * (type(self.variant) is not Variant) + f" {self.sums}" * (type(self.sums) is not Variant)
        return f"{dims} {self.dtype} {self.window} {self.feed}{scores} {self.result}, {self.band} x {self.kv}"


def config_for(
    head_dim: int, value_dim: int, of: dtype, variant: Variant, window: KeyWindow, held: OneBuffer | None,
    result: FinalOutput | FinalOrPartialOutput, sums: Variant, split: type[FixedSplits], axes: tuple[int, ...] = (),
) -> Config:  # fmt: skip
    """The configuration that serves a problem: the next larger dims. held: where TMA finds keys; None: they are gathered.

    TMA's tiles may arrive in any order, so each consumer must have stages of its own: their number is even. If consumers took
    turns at a stage, each would wait for every other phase of its barrier. Those have the same parity: while the other
    consumer's tile is under way, the wait would end at once, and the stage be given back twice. Gathered tiles arrive in
    order."""
    padded, wide = (min(d for d in STAGES if d >= dim) for dim in (head_dim, value_dim))
    stages = STAGES[max(padded, wide)]
    if held is None:
        rows = KV // WARPGROUP
        feed: Any = GatherFeed(st(rows, padded, of), st(rows, wide, of), stages - 2, VECTOR_BYTES)
    else:
        feed, stages = TmaFeed(KV, held), stages // CONSUMERS * CONSUMERS
    return Config(padded, wide, of, variant, window, feed, result, sums, split, stages, axes)


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with. fp16, which takes as many registers as bf16, and other caches
    come with `everything`."""
    if arch == "sm_90a":
        plain, causal = Variant(), KeyWindow(False, True, False)
        kinds: list[tuple[OneBuffer | None, bool]] = [(OneBuffer(), False), (None, False)]
        kinds += [(PagedKeys(1), False), (IndexedCache(), True), (None, True)] * everything
        for of, dim, (held, fixed) in itertools.product((bf16, fp16)[: 1 + everything], STAGES, kinds):
            final, partial = FinalOutput(of, VECTOR_BYTES), PartialOutput(of, VECTOR_BYTES)
            stream_k = FinalOrPartialOutput(final, partial), StreamKSplits
            result, split = (partial, FixedSplits) if fixed else stream_k
            yield config_for(dim, dim, of, plain, causal, held, result, plain, split)


class HopperPipes(NamedTuple):
    """What a block has in shared memory: its queries, tiles of keys and values, and for each consumer the half of O's columns
    that it gets from the other, with the maxima and sums of both."""

    q: Any
    k: Any
    v: Any
    other: Any
    tops: Any
    sums: Any


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, PARAMS, BAND, AUX = config.dtype, config.params, config.band, arrays_of(config.axes)
    variant, window, feed, result, sums = config.variant, config.window, config.feed, config.result, config.sums
    split, IS_PARTIAL, GATHERS = config.split(window, KV), type(result) is not FinalOutput, feed.writers > 0
    KEEP, CLAIM = GATHERING if GATHERS else BY_TMA
    K, V = st(KV, config.head_dim, INPUT), st(KV, config.value_dim, INPUT)
    QUERIES = st(BAND, config.head_dim, INPUT)
    Q = rt(16, QUERIES.panel_cols, INPUT)
    O, HALF = rt(16, config.value_dim, fp32), config.value_dim // 2
    H, STAGED = rt(16, HALF, fp32), config.stages
    PANELS, LEFT, DEEP = QUERIES.panels, window.left, variant.allows_low_scores
    softmax = Softmax(O)
    smem = shared(
        q=QUERIES,
        k=ring(K, STAGED, WARPGROUP, writers=feed.writers),
        v=ring(V, STAGED, WARPGROUP, writers=feed.writers),
        other=st(CONSUMERS * BAND, HALF, fp32),
        tops=sv(CONSUMERS * BAND, fp32),
        sums=sv(CONSUMERS * BAND, fp32),
    )

    @inlined
    def stretch(work, first_token, last_token, tokens, params):
        """(the first key of a block's tiles, the number of tiles, the Stretch that its rows see)"""
        every = window.key_span(work.sequence, 0, tokens - 1, tokens, params)
        sees = window.key_span(work.sequence, first_token, last_token, tokens, params)
        tile = int32(max(work.tile, (sees.first - every.first) // KV))
        first = int32(every.first + KV * tile)
        return first, int32(max(0, min(work.end_tile - tile, (sees.end - first + KV - 1) // KV))), sees

    @inlined
    def bring(pipes, gQ, out_tile, me):
        """Load the block's rows of Q into shared memory, done by both consumers. The rows of a token lie together; for the
        rows of other tokens zeros are loaded."""
        rank = warpgroup.rank()
        for i in range(me, PANELS, CONSUMERS):
            col = int32(Q.cols * i)
            if out_tile.group == 1:  # a row is a token: one after the other they would take microseconds
                x = load(gQ, Q, (out_tile.batch, out_tile.row, out_tile.head, 0, col), 1, 4)
            else:
                x = zeros(Q)
                for token in range(out_tile.first_token, out_tile.last_token + 1):
                    row = int32(out_tile.row - token * out_tile.group)
                    x = x + load(gQ, Q, (out_tile.batch, token, out_tile.head, row, col), 3, 4)
            store(subtile(pipes.q, 16, rank, Q.cols, i), x)
        warpgroup.sync_several(CONSUMERS)

    @inlined
    def absorbed(state, j, key, inner, pipes, ctx, scale, slack):
        """`seen` with tile j of keys, from `key` on. Rows see all keys before `inner`, so no mask is needed there."""
        s = warpgroup.wait(warpgroup.mm_ABt(pipes.q, pipes.k.wait(j)))
        pipes.k.release(j)
        s = variant.mask(variant.score(s, ctx, key), ctx, key, -math.inf)
        if LEFT or key + KV > inner:
            s = window.mask(s, ctx, key, ctx.seqlen_k)
        state = state.update_max(s, None, scale, slack)
        p = state.weights(s, None, scale, DEEP)
        state, values = state.add(p), pipes.v.wait(j)
        if not GATHERS and key + KV > ctx.seqlen_k:  # a weight of 0 does not make up for a NaN
            warpgroup.zero_rows(values, int32(ctx.seqlen_k - key))
        o = warpgroup.wait(warpgroup.mma_AB(state.rescale(), INPUT(p), values))
        pipes.v.release(j)
        return state._replace(o=o)

    @inlined
    def finish(state, pipes, me, ctx, scale, out_tile, params):
        """Merge what both consumers have seen, and store it."""
        own = finish_sum(state.l)
        warpgroup.store(subtile(pipes.tops, BAND, me), state.m)
        warpgroup.store(subtile(pipes.sums, BAND, me), own)
        given_away = columns(state.o, HALF, 1) if me == 0 else columns(state.o, HALF, 0)
        warpgroup.store(subtile(pipes.other, BAND, me), given_away)
        warpgroup.sync_several(CONSUMERS)
        its_m = warpgroup.load(subtile(pipes.tops, BAND, 1 - me), O.col_vec)
        m = maximum(state.m, its_m)
        if result.is_final(out_tile):
            m = maximum(m, sums.initial_max(ctx, LOWEST_FLOAT))
        mine, its = exp2((state.m - m) * scale), exp2((its_m - m) * scale)
        l = own * mine + warpgroup.load(subtile(pipes.sums, BAND, 1 - me), O.col_vec) * its
        if result.is_final(out_tile):
            l = sums.finish_row_sum(l, m, scale, ctx)
        kept = columns(state.o, HALF, 0) if me == 0 else columns(state.o, HALF, 1)
        o = kept * mine + warpgroup.load(subtile(pipes.other, BAND, 1 - me), H) * its
        result.store(over_sum(o, l), out_tile, int32(HALF * me), params)
        if me == 0:
            result.store_lse(m + log2(l) / scale, scale, out_tile, params)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gK: feed.source(K), gV: feed.source(V), params: PARAMS, aux: AUX,
        heads: INT, bands: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """See ampere.py."""
        q, k, v, other, tops, totals = smem.open()
        if IS_PARTIAL:
            grid.release()  # the blocks that combine parts may begin, and wait
        grid.wait()
        rest, band = divmod(cuda.blockIdx.x, bands)
        number, head = divmod(rest, heads)
        me, row, rows = warpgroup.id(), int32(BAND * band), int32(tokens * group)
        first_token, last_token = int32(row // group), int32((min(row + BAND, rows) - 1) // group)
        work, j = split.first_work(number, splits, sequences, tokens, params), int32(0)
        if me == PRODUCER:
            warpgroup.release_registers(KEEP)
            while work.tiles_left > 0:
                first, n, sees = stretch(work, first_token, last_token, tokens, params)
                feed.bring(k, v, j, n, gK, gV, work.sequence, first, head, sees.end, params)
                work, j = split.next_work(work, tokens, params), int32(j + n)
            feed.end(k, v, j)
        else:
            warpgroup.claim_registers(CLAIM)
            mine, pipes = int32(row + 16 * warpgroup.rank()), HopperPipes(q, k, v, other, tops, totals)
            first_mine, last_mine = int32(mine // group), int32((min(mine + 16, rows) - 1) // group)
            of_rows = row_index(O.col_vec) + mine
            token = of_rows // group
            while work.tiles_left > 0:
                sequence, whole = work.sequence, work.end_tile - work.tile == work.tiles
                out_tile = OutputTile(sequence, head, work.part, work.part_batch, whole, mine, first_mine, last_mine, group)
                first, n, sees = stretch(work, first_token, last_token, tokens, params)
                inner = int32(sees.end - (last_token - first_token))
                ctx = ScoreContext(
                    sequence, of_rows - token * group + head * group, token, sees.shift, tokens, sees.end, params, aux, 0
                )
                ctx = ctx._replace(precomputed=variant.precompute(ctx))
                bring(pipes, gQ, out_tile, me)
                state = softmax.init(variant.max_floor)
                for i in range(int32((me + j) % CONSUMERS), n, CONSUMERS):
                    state = absorbed(state, int32(j + i), int32(first + KV * i), inner, pipes, ctx, scale, slack)
                finish(state, pipes, me, ctx, scale, out_tile, params)
                work, j = split.next_work(work, tokens, params), int32(j + n)

    return attend, smem
