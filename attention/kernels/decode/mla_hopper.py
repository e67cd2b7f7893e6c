"""Split-KV absorbed MLA of a few query tokens for Hopper: TMA and wgmma.

A tile has 64 rows, which are heads and tokens, and 64 keys, whose first 512 columns are the values: it is in shared memory
once, for both products. O, 64 x 512, is more than one warpgroup can hold, so two consumers have half of the columns each, and
share out the scores: one computes those of even tiles, the other those of odd ones, and sends their weights and row maxima to
the other through shared memory. While one's softmax runs, the tensor cores have the other's products (as in FlashMLA, DeepSeek
2025)."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import cuda
from numpy import int32

from ops import divmod, finish_sum, grid, load, log2, row_index, store, subtile, viewed, warpgroup, zeros
from tiles import bf16, dtype, fp8e4m3, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import FLOAT, INT, array, record
from tiles.targets import Target

from ...parts.decode.cache_loaders import DenseLoader, PagedLoader
from ...parts.decode.key_window import KeyWindow
from ...parts.decode.latent_boxes import TmaIndexedLatents, TmaLatents, TmaPagedLatents
from ...parts.decode.latent_gather import CONVERTED_ROWS, Fp8LatentGather, LatentGather
from ...parts.decode.latent_products import KV, Fp8LatentProducts, LatentProducts
from ...parts.decode.latent_shape import LATENT, ROTARY
from ...parts.decode.outputs import FinalOutput, OutputTile, PartialOutput
from ...parts.decode.splits import FixedSplits
from ...parts.online_softmax import LOWEST, Softmax, over_sum
from ...parts.variant import TokenHeadContext

STAGES, CONSUMERS = 2, 2  # tiles in shared memory; warpgroups that share out O's columns
PRODUCER = CONSUMERS
TMA_REGISTERS, GATHER_REGISTERS, FP8_REGISTERS = (56, 224), (72, 216), (104, 200)  # a thread of producer and consumers has
VECTOR_BYTES = 16  # bytes that all addresses are multiples of


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. product: the products for the cache's dtype. window: which keys a token sees. cache: how the
    producer loads latents (latent_boxes.py, latent_gather.py). result: where O goes."""

    product: LatentProducts
    window: KeyWindow
    cache: Any
    result: FinalOutput
    overlaps_previous = True
    tile_rows, kv, ctas_per_sm = warpgroup.ROWS, KV, 1
    threads = warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def params(self):
        """The record of parameters that window, cache and result read."""
        return record(**self.window.params, **self.cache.params, **self.result.params)

    def __str__(self):
        return f"mla {self.product} {self.window} {self.cache} {self.result}, {self.tile_rows} x {self.kv}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with; those of fp16, which takes as many registers as bf16, of other
    caches and of smaller pages with `everything`."""
    if target.has_wgmma:
        one_token, causal = KeyWindow(False, False, False), KeyWindow(False, True, False)
        kinds = [(one_token, TmaLatents(), FinalOutput), (causal, TmaPagedLatents(1), PartialOutput)]
        kinds += [(one_token, TmaIndexedLatents(), PartialOutput), (one_token, TmaPagedLatents(2), FinalOutput)] * everything
        by_gather = [(causal, PagedLoader, PartialOutput)] + [(one_token, DenseLoader, FinalOutput)] * everything
        for input_dtype in (bf16, fp16)[: 1 + everything]:
            for window, cache, result in kinds:
                yield Config(LatentProducts(input_dtype), window, cache, result(input_dtype, VECTOR_BYTES))
            for window, loader, result in by_gather:
                yield gather_config(input_dtype, False, window, PagedLoader(VECTOR_BYTES), result(input_dtype, VECTOR_BYTES))
                yield gather_config(input_dtype, True, window, loader(VECTOR_BYTES), result(input_dtype, VECTOR_BYTES))


def gather_config(input_dtype: dtype, fp8: bool, window: KeyWindow, cache: DenseLoader, result: FinalOutput) -> Config:
    """The configuration in which the producer's warps gather rows, of fp8 if `fp8`."""
    if fp8:
        latents, rotated = st(CONVERTED_ROWS, LATENT, fp8e4m3, ROTARY), st(CONVERTED_ROWS, ROTARY, input_dtype)
        return Config(
            Fp8LatentProducts(input_dtype), window, Fp8LatentGather(cache, latents, sv(CONVERTED_ROWS, fp32), rotated), result
        )
    return Config(LatentProducts(input_dtype), window, LatentGather(cache, st(KV // 2, LATENT, input_dtype)), result)


class LatentTiles(NamedTuple):
    """A block's shared memory: queries; rings of tiles of latents and of rotated columns; rings of the row maxima of even and
    of odd tiles; and a ring of the latents' descales, or None."""

    q: Any
    q_rotary: Any
    latent: Any
    rotary: Any
    even_max: Any
    odd_max: Any
    descales: Any


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    product, PARAMS, ROWS, HALF = config.product, config.params, config.tile_rows, LATENT // CONSUMERS  # of O's columns
    INPUT, MMA_TYPE, WRITERS = product.q_dtype, product.mma_dtype, config.cache.writers
    K, R, WEIGHTS = st(KV, LATENT, MMA_TYPE), st(KV, ROTARY, INPUT), st(ROWS, KV, MMA_TYPE)
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = (
        FP8_REGISTERS if config.cache.extra_stages else GATHER_REGISTERS if WRITERS else TMA_REGISTERS
    )
    LATENTS, ROTARIES = config.cache.source(K), config.cache.source(R)
    Q, Q_ROTARY = rt(16, HALF, INPUT), rt(16, ROTARY, INPUT)
    O = rt(16, HALF, fp32)
    WARPS = warpgroup.WARPGROUP
    window, cache, result, softmax = config.window, config.cache, config.result, Softmax(O)
    DESCALES = product.descale_rings(STAGES + cache.extra_stages, WARPS, WRITERS)
    HAS_DESCALES = len(DESCALES) > 0
    split, IS_FINAL = FixedSplits(window, KV), type(result) is FinalOutput
    smem = shared(
        q=st(ROWS, LATENT, MMA_TYPE),
        q_rotary=st(ROWS, ROTARY, INPUT),
        latent=ring(K, STAGES, CONSUMERS * WARPS, writers=WRITERS),
        rotary=ring(R, STAGES + cache.extra_stages, CONSUMERS * WARPS, writers=WRITERS),
        even_max=ring(sv(ROWS, fp32), 1, WARPS, writers=WARPS),
        odd_max=ring(sv(ROWS, fp32), 1, WARPS, writers=WARPS),
        row_sum=sv(CONSUMERS * ROWS, fp32),
        **DESCALES,
    )

    @inlined
    def load_rows(gQ, Q, out_tile, col):
        """Load a warp's rows of some columns of Q. A token's rows are contiguous; rows of other tokens load 0, so that the
        tokens' tiles can be added."""
        x = zeros(Q)
        for token in range(out_tile.first_token, out_tile.last_token + 1):
            x = x + load(gQ, Q, (out_tile.batch, token, 0, int32(out_tile.row - token * out_tile.group), col), 3, 4)
        return x

    @inlined
    def load_queries(tiles, gQ, out_tile, wg):
        """Load the block's rows of Q to shared memory, half of the columns by each consumer."""
        rank = warpgroup.rank()
        half, rotated = load_rows(gQ, Q, out_tile, int32(HALF * wg)), load_rows(gQ, Q_ROTARY, out_tile, LATENT)
        store(subtile(tiles.q, 16, rank, HALF, wg), product.convert_q(half))
        if wg == 0:
            store(subtile(tiles.q_rotary, 16, rank), rotated)
        warpgroup.sync_several(CONSUMERS)

    @inlined
    def scores(j, key, end, tiles):
        """The scores of tile j, pending. Rows beyond the end of the sequence are set to 0 first, because 0 * NaN is NaN."""
        tile = tiles.latent.wait(j)
        if WRITERS == 0 and key + KV > end:
            warpgroup.zero_rows(tile, int32(end - key))
        return product.mma_qk(tile, tiles.rotary.wait(j), tiles, j)

    @inlined
    def compute_weights(j, s, state, tiles, key, ctx, group, unmasked_end, scale, slack):
        """(the weights of tile j from its scores s, the softmax's state after it). All rows see all keys before `unmasked_end`.
        ctx.row: the tile's first row; the tokens of this warp's rows are computed here, where few tiles need them, not held in
        registers."""
        if key + KV > unmasked_end:
            token = (row_index(O.col_vec) + int32(ctx.row + 16 * warpgroup.rank())) // group
            s = window.mask(s, ctx._replace(row=token), key, ctx.seqlen_k)
        state = state.update_max(s, None, scale, slack)
        p = state.weights(s, None, scale)
        return product.convert_p(p, tiles, j), state.add(p)

    @inlined
    def send_weights(j, p, state, tiles, maxima):
        """Send the weights of tile j to the other consumer, in place of the tile's rotated columns, and the row maxima that
        they refer to."""
        warpgroup.sync()  # all four warps have their scores: no product reads the rotated columns any more
        warpgroup.store(viewed(tiles.rotary.wait(j), WEIGHTS), p)
        warpgroup.sync()
        warpgroup.store(maxima.claim(j // 2), state.m)
        maxima.publish(j // 2)

    @inlined
    def add_received(j, state, tiles, maxima, wg, scale):
        """(O with tile j, pending; the softmax's state with its row maxima). The other consumer computed the weights."""
        m = warpgroup.load(maxima.wait(j // 2), O.col_vec)
        maxima.release(j // 2)
        state = state.follow_max(m, scale)
        values = subtile(tiles.latent.wait(j), KV, 0, HALF, wg)
        return warpgroup.mma_AB(state.rescale(), viewed(tiles.rotary.wait(j), WEIGHTS), values), state

    @inlined
    def finish_tile(j, o, state, tiles):
        """Wait for O, and release tile j. Returns the softmax's state."""
        state = state._replace(o=warpgroup.wait(o))
        tiles.latent.release(j)
        tiles.rotary.release(j)
        return state

    @inlined
    def attend_even_tiles(n, first, unmasked_end, state, tiles, ctx, group, scale, slack):
        """The softmax's state after n tiles from key `first` on, in the consumer that computes the scores of even tiles."""
        for j in range(0, n, 2):
            key = int32(first + KV * j)
            s = warpgroup.wait(scores(j, key, ctx.seqlen_k, tiles))
            p, state = compute_weights(j, s, state, tiles, key, ctx, group, unmasked_end, scale, slack)
            o = warpgroup.mma_AB(state.rescale(), p, subtile(tiles.latent.wait(j), KV, 0, HALF, 0))
            send_weights(j, p, state, tiles, tiles.even_max)
            state = finish_tile(j, o, state, tiles)
            if j + 1 < n:
                o, state = add_received(j + 1, state, tiles, tiles.odd_max, 0, scale)
                state = finish_tile(j + 1, o, state, tiles)
        return state

    @inlined
    def attend_odd_tiles(n, first, unmasked_end, state, tiles, ctx, group, scale, slack):
        """The softmax's state after n tiles from key `first` on, in the consumer that computes the scores of odd tiles, while
        it adds the values of the tile before."""
        for j in range(0, n, 2):
            key = int32(first + KV * (j + 1))
            if j + 1 < n:
                s = scores(j + 1, key, ctx.seqlen_k, tiles)
                o, state = add_received(j, state, tiles, tiles.even_max, 1, scale)
                s = warpgroup.wait(s, newer=1)  # the scores have arrived, o is still pending
                p, state = compute_weights(j + 1, s, state, tiles, key, ctx, group, unmasked_end, scale, slack)
                state = finish_tile(j, o, state, tiles)
                o = warpgroup.mma_AB(state.rescale(), p, subtile(tiles.latent.wait(j + 1), KV, 0, HALF, 1))
                send_weights(j + 1, p, state, tiles, tiles.odd_max)
                state = finish_tile(j + 1, o, state, tiles)
            else:
                o, state = add_received(j, state, tiles, tiles.even_max, 1, scale)
                state = finish_tile(j, o, state, tiles)
        return state

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gLatent: LATENTS, gRotary: ROTARIES, gDescale: array(2), params: PARAMS,
        row_tiles: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """Compute what mla_ampere.py's kernel computes, with the same parameters. gRotary: rotated columns, in gLatent's
        array or in another. gDescale: (batch or page, row)."""
        memory = smem.open()
        descales = memory.descales if HAS_DESCALES else None
        tiles = LatentTiles(memory.q, memory.q_rotary, memory.latent, memory.rotary, memory.even_max, memory.odd_max, descales)
        if not IS_FINAL:
            grid.release()  # mla_combine.py's blocks may begin, and wait
        grid.wait()
        number, index = divmod(cuda.blockIdx.x, row_tiles)  # a sequence's tiles are neighbours, as they read the same keys
        wg, row, rows = warpgroup.id(), int32(ROWS * index), int32(tokens * group)
        first_token, last_token = int32(row // group), int32((min(row + ROWS, rows) - 1) // group)
        work = split.first_work(number, splits, sequences, tokens, params)
        span = window.key_span(work.sequence, first_token, last_token, tokens, params)
        first, end, unmasked_end = int32(KV * work.tile), span.end, int32(span.end - (last_token - first_token))
        n = int32(max(0, min(work.end_tile - work.tile, (end - first + KV - 1) // KV)))
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            cache.load_tiles(tiles, n, first, gLatent, gRotary, gDescale, work.sequence, end, params)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            warp_first_row = int32(row + 16 * warpgroup.rank())
            warp_first_token, warp_last_token = (
                int32(warp_first_row // group),
                int32((min(warp_first_row + 16, rows) - 1) // group),
            )
            out_tile = OutputTile(
                work.sequence, 0, work.part, work.part_batch, IS_FINAL, warp_first_row, warp_first_token, warp_last_token, group
            )
            ctx = TokenHeadContext(work.sequence, 0, row, span.shift, tokens, end, params, 0, 0)
            load_queries(tiles, gQ, out_tile, wg)
            state = softmax.init(LOWEST)
            if wg == 0:
                state = attend_even_tiles(n, first, unmasked_end, state, tiles, ctx, group, scale, slack)
            else:
                state = attend_odd_tiles(n, first, unmasked_end, state, tiles, ctx, group, scale, slack)
            consumer_sum = finish_sum(state.l)
            warpgroup.store(subtile(memory.row_sum, ROWS, wg), consumer_sum)
            warpgroup.sync_several(CONSUMERS)
            l = consumer_sum + warpgroup.load(subtile(memory.row_sum, ROWS, 1 - wg), O.col_vec)
            result.store(over_sum(state.o, l), out_tile, int32(HALF * wg), params)
            if wg == 0:
                result.store_lse(state.m + log2(l) / scale, scale, out_tile, params)

    return attend, smem
