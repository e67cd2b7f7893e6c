"""Split-KV attention of some query tokens for Hopper: TMA or cp.async, and wgmma.

It serves several tokens of many heads that share a key head, for which the tiles of 16 and 32 rows are too small with which
decode_ampere.py serves all other decoding, on Hopper, too. Rows are heads and tokens here, too, 64 to a tile. Both consumer
warpgroups have all rows and share out the tiles of keys: one has the even tiles, the other the odd ones, so that the tensor
cores work for one while the softmax of the other runs. At the end of a block's work their partial outputs are merged, half of
the columns by each."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import cuda
from numpy import int32

from ops import columns, divmod, exp2, finish_sum, grid, load, maximum, row_index, store, subtile, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import FLOAT, INT, array, record
from tiles.layout import WARPGROUP
from tiles.targets import Target

from ...parts.decode.feeds import GatherFeed, TmaFeed
from ...parts.decode.key_window import KeyWindow
from ...parts.decode.outputs import FinalOrPartialOutput, FinalOutput, OutputTile, PartialOutput
from ...parts.decode.splits import FixedSplits, StreamKSplits
from ...parts.key_sources import IndexedCache, OneBuffer, PagedKeys
from ...parts.online_softmax import LOWEST_FLOAT, Softmax, lowest_max, over_sum
from ...parts.variant import TokenHeadContext, Variant, arrays_of

KV, CONSUMERS = 64, 2  # keys of a tile; warpgroups that share out the tiles of keys
PRODUCER = CONSUMERS
TMA_REGISTERS, GATHER_REGISTERS = (40, 232), (56, 224)  # a thread of producer and consumers has, by what the producer does
STAGES = {64: 6, 96: 6, 128: 5, 192: 3, 256: 2}  # padded head_dim: how many tiles of keys, and of values, shared memory holds
VECTOR_BYTES = 16  # bytes that all addresses are multiples of


@dataclass(frozen=True)
class Config:
    """A kernel's configuration: as in decode_ampere.py, but for dtype, of queries and cache, and feed, which loads keys and
    values to rings of `stages` stages."""

    head_dim: int
    value_dim: int
    dtype: dtype
    variant: Variant
    window: KeyWindow
    feed: Any
    result: FinalOutput | FinalOrPartialOutput
    sink: Variant
    split: type[FixedSplits]
    stages: int
    axes: tuple[int, ...] = ()
    overlaps_previous = True
    tile_rows, kv, ctas_per_sm = warpgroup.ROWS, KV, 1
    threads = warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def params(self):
        """The record of parameters that the parts of the configuration read."""
        parts = self.window, self.feed, self.variant, self.sink, self.result
        return record(**{name: kind for part in parts for name, kind in part.params.items()})

    def __str__(self):
        dims = f"D {self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)
        scores = f" {self.variant}" * (type(self.variant) is not Variant) + f" {self.sink}" * (type(self.sink) is not Variant)
        return f"{dims} {self.dtype} {self.window} {self.feed}{scores} {self.result}, {self.tile_rows} x {self.kv}"


def config_for(
    head_dim: int, value_dim: int, input_dtype: dtype, variant: Variant, window: KeyWindow, kv_source: OneBuffer | None,
    result: FinalOutput | FinalOrPartialOutput, sink: Variant, split: type[FixedSplits], axes: tuple[int, ...] = (),
) -> Config:  # fmt: skip
    """The configuration for a problem: dims are rounded up to the next one of STAGES. kv_source: where TMA finds keys, or None
    if cp.async gathers them.

    TMA's tiles may arrive in any order, so each consumer must have stages of its own: their number is even. If consumers shared
    a stage, each would wait for every other phase of its mbarrier. Those have the same parity: while the other consumer's tile
    is being loaded, the wait would return at once, and the stage would be released twice. Gathered tiles arrive in order."""
    padded, padded_value = (min(d for d in STAGES if d >= dim) for dim in (head_dim, value_dim))
    stages = STAGES[max(padded, padded_value)]
    if kv_source is None:
        rows = KV // WARPGROUP
        feed: Any = GatherFeed(st(rows, padded, input_dtype), st(rows, padded_value, input_dtype), stages - 2, VECTOR_BYTES)
    else:
        feed, stages = TmaFeed(KV, kv_source), stages // CONSUMERS * CONSUMERS
    return Config(padded, padded_value, input_dtype, variant, window, feed, result, sink, split, stages, axes)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with; those of fp16, which takes as many registers as bf16, and of
    other caches, with `everything`."""
    if target.has_wgmma:
        plain, causal = Variant(), KeyWindow(False, True, False)
        kinds: list[tuple[OneBuffer | None, bool]] = [(OneBuffer(), False), (None, False)]
        kinds += [(PagedKeys(1), False), (IndexedCache(), True), (None, True)] * everything
        for input_dtype, dim, (kv_source, fixed) in itertools.product((bf16, fp16)[: 1 + everything], STAGES, kinds):
            final, partial = FinalOutput(input_dtype, VECTOR_BYTES), PartialOutput(input_dtype, VECTOR_BYTES)
            stream_k = FinalOrPartialOutput(final, partial), StreamKSplits
            result, split = (partial, FixedSplits) if fixed else stream_k
            yield config_for(dim, dim, input_dtype, plain, causal, kv_source, result, plain, split)


class SharedTiles(NamedTuple):
    """A block's shared memory: queries, rings of tiles of keys and values, and for the merge the half of O's columns that a
    consumer gives to the other, with the row maxima and row sums of both."""

    q: Any
    k: Any
    v: Any
    o_half: Any
    row_max: Any
    row_sum: Any


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, PARAMS, ROWS, AUX = config.dtype, config.params, config.tile_rows, arrays_of(config.axes)
    variant, window, feed, result, sink = config.variant, config.window, config.feed, config.result, config.sink
    split, IS_PARTIAL, GATHERS = config.split(window, KV), type(result) is not FinalOutput, feed.writers > 0
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = GATHER_REGISTERS if GATHERS else TMA_REGISTERS
    K, V = st(KV, config.head_dim, INPUT), st(KV, config.value_dim, INPUT)
    QUERIES = st(ROWS, config.head_dim, INPUT)
    Q = rt(16, QUERIES.panel_cols, INPUT)
    S, O, HALF = rt(16, KV, fp32), rt(16, config.value_dim, fp32), config.value_dim // 2
    O_HALF, STAGED = rt(16, HALF, fp32), config.stages
    PANELS, LEFT, ALLOWS_LOW_SCORES = QUERIES.panels, window.left, variant.allows_low_scores
    softmax = Softmax(O, lowest_max(variant))
    smem = shared(
        q=QUERIES,
        k=ring(K, STAGED, WARPGROUP, writers=feed.writers),
        v=ring(V, STAGED, WARPGROUP, writers=feed.writers),
        o_half=st(CONSUMERS * ROWS, HALF, fp32),
        row_max=sv(CONSUMERS * ROWS, fp32),
        row_sum=sv(CONSUMERS * ROWS, fp32),
    )

    @inlined
    def load_queries(tiles, gQ, out_tile, wg):
        """Load the block's rows of Q to shared memory, by both consumers. A token's rows are contiguous; rows of other tokens
        load 0, so that the tokens' tiles can be added."""
        rank = warpgroup.rank()
        for i in range(wg, PANELS, CONSUMERS):
            col = int32(Q.cols * i)
            if out_tile.group == 1:  # a row is a token: 16 loads one after the other would take microseconds
                x = load(gQ, Q, (out_tile.batch, out_tile.row, out_tile.head, 0, col), 1, 4)
            else:
                x = zeros(Q)
                for token in range(out_tile.first_token, out_tile.last_token + 1):
                    row = int32(out_tile.row - token * out_tile.group)
                    x = x + load(gQ, Q, (out_tile.batch, token, out_tile.head, row, col), 3, 4)
            store(subtile(tiles.q, 16, rank, Q.cols, i), x)
        warpgroup.sync_several(CONSUMERS)

    @inlined
    def attend_tile(state, j, key, unmasked_end, tiles, ctx, scale, slack):
        """The softmax's state after tile j of keys, from `key` on. All rows see all keys before `unmasked_end`."""
        prefetched = variant.prefetch(S, ctx, key)
        s = warpgroup.wait(warpgroup.mm_ABt(tiles.q, tiles.k.wait(j)))
        tiles.k.release(j)
        s = variant.mask(variant.score_by(s, prefetched, ctx, key), ctx, key, -math.inf)
        if LEFT or key + KV > unmasked_end:
            s = window.mask(s, ctx, key, ctx.seqlen_k)
        state = state.update_max(s, None, scale, slack)
        p = state.weights(s, None, scale, ALLOWS_LOW_SCORES)
        state, values = state.add(p), tiles.v.wait(j)
        if not GATHERS and key + KV > ctx.seqlen_k:  # 0 * NaN is NaN: rows beyond the last key must be 0
            warpgroup.zero_rows(values, int32(ctx.seqlen_k - key))
        o = warpgroup.wait(warpgroup.mma_AB(state.rescale(), INPUT(p), values))
        tiles.v.release(j)
        return state._replace(o=o)

    @inlined
    def merge_consumers(state, tiles, wg, ctx, scale, out_tile, params):
        """Merge the states of both consumers, each for half of O's columns, and store O and lse."""
        consumer_sum = finish_sum(state.l)
        warpgroup.store(subtile(tiles.row_max, ROWS, wg), state.m)
        warpgroup.store(subtile(tiles.row_sum, ROWS, wg), consumer_sum)
        other_half = columns(state.o, HALF, 1) if wg == 0 else columns(state.o, HALF, 0)
        warpgroup.store(subtile(tiles.o_half, ROWS, wg), other_half)
        warpgroup.sync_several(CONSUMERS)
        other_max = warpgroup.load(subtile(tiles.row_max, ROWS, 1 - wg), O.col_vec)
        m = maximum(state.m, other_max)
        if result.is_final(out_tile):
            m = maximum(m, sink.initial_max(ctx, LOWEST_FLOAT))
        weight, other_weight = exp2((state.m - m) * scale), exp2((other_max - m) * scale)
        l = consumer_sum * weight + warpgroup.load(subtile(tiles.row_sum, ROWS, 1 - wg), O.col_vec) * other_weight
        if result.is_final(out_tile):
            l = sink.finish_row_sum(l, m, scale, ctx)
        kept_half = columns(state.o, HALF, 0) if wg == 0 else columns(state.o, HALF, 1)
        o = kept_half * weight + warpgroup.load(subtile(tiles.o_half, ROWS, 1 - wg), O_HALF) * other_weight
        result.store(over_sum(o, l), out_tile, int32(HALF * wg), params)
        if wg == 0:
            result.store_row_sums(m, l, scale, out_tile, params)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gK: feed.source(K), gV: feed.source(V), params: PARAMS, aux: AUX,
        heads: INT, row_tiles: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """Compute the attention of one tile of rows to one split of the keys in each block. The parameters are those of
        decode_ampere.py's kernel."""
        q, k, v, o_half, row_max, row_sum = smem.open()
        if IS_PARTIAL:
            grid.release()  # decode_combine.py's blocks may begin, and wait
        grid.wait()
        rest, index = divmod(cuda.blockIdx.x, row_tiles)
        number, head = divmod(rest, heads)
        wg, row, rows = warpgroup.id(), int32(ROWS * index), int32(tokens * group)
        first_token, last_token = int32(row // group), int32((min(row + ROWS, rows) - 1) // group)
        work, j = split.first_work(number, splits, sequences, tokens, params), int32(0)
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            while work.tiles_left > 0:
                first, n, span = split.find_tiles(work, first_token, last_token, tokens, params)
                feed.load_tiles(k, v, j, n, gK, gV, work.sequence, first, head, span.end, params)
                work, j = split.next_work(work, tokens, params), int32(j + n)
            feed.finish(k, v, j)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            warp_first_row, tiles = int32(row + 16 * warpgroup.rank()), SharedTiles(q, k, v, o_half, row_max, row_sum)
            warp_first_token = int32(warp_first_row // group)
            warp_last_token = int32((min(warp_first_row + 16, rows) - 1) // group)
            warp_rows = row_index(O.col_vec) + warp_first_row
            token = warp_rows // group
            while work.tiles_left > 0:
                sequence, is_final = work.sequence, work.end_tile - work.tile == work.tiles
                out_tile = OutputTile(
                    sequence,
                    head,
                    work.part,
                    work.part_batch,
                    is_final,
                    warp_first_row,
                    warp_first_token,
                    warp_last_token,
                    group,
                )
                first, n, span = split.find_tiles(work, first_token, last_token, tokens, params)
                unmasked_end = int32(span.end - (last_token - first_token))
                row_head = warp_rows - token * group + head * group
                ctx = TokenHeadContext(sequence, row_head, token, span.shift, tokens, span.end, params, aux, 0)
                ctx = ctx.precompute(variant)
                load_queries(tiles, gQ, out_tile, wg)
                state = softmax.init(softmax.lowest)
                for i in range(int32((wg + j) % CONSUMERS), n, CONSUMERS):
                    state = attend_tile(state, int32(j + i), int32(first + KV * i), unmasked_end, tiles, ctx, scale, slack)
                merge_consumers(state, tiles, wg, ctx, scale, out_tile, params)
                work, j = split.next_work(work, tokens, params), int32(j + n)

    return attend, smem
