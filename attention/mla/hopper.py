"""Absorbed MLA of a few query tokens for Hopper, over a part of the keys: TMA and wgmma.

64 rows of heads and tokens see a tile of 64 keys at a time, and its first 512 columns are its values: it lies in shared memory
once, for both products. The output of 64 x 512 is more than one warpgroup can hold, so two have half of the columns each, and
share out the scores: one takes the even tiles, the other the odd ones, and hands on their weights, and the rows' maxima, by way
of shared memory. While one's softmax runs, the tensor cores have the other's products (as in FlashMLA, DeepSeek 2025).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import cuda
from numpy import int32

from ops import divmod, finish_sum, grid, load, log2, row_index, store, subtile, viewed, warpgroup, zeros
from tiles import bf16, dtype, fp8e4m3, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.arguments import FLOAT, INT, array, record

from ..softmax.decode.caches import DenseLoader, PagedLoader
from ..softmax.decode.reach import KeyWindow
from ..softmax.decode.results import FinalOutput, OutputTile, PartialOutput
from ..softmax.decode.splits import FixedSplits
from ..softmax.online import LOWEST, Softmax, over_sum
from ..softmax.variants import ScoreContext
from .boxes import TmaIndexedLatents, TmaLatents, TmaPagedLatents
from .gathered import BAND, Fp8LatentGather, LatentGather
from .products import KV, Fp8LatentProducts, LatentProducts
from .shape import LATENT, ROTARY

STAGES, CONSUMERS = 2, 2  # tiles in shared memory; warpgroups that share out the output's columns
PRODUCER = CONSUMERS
BY_TMA, GATHERING, WIDENING = (56, 224), (72, 216), (104, 200)  # registers a thread of producer and consumers
VECTOR_BYTES = 16  # bytes that all addresses are multiples of


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. product: what the cache holds, and how it is multiplied (products.py). reach: which keys a
    token sees. cache: how latents are brought (boxes.py, gathered.py). result: where the output goes."""

    product: LatentProducts
    window: KeyWindow
    cache: Any
    result: FinalOutput
    overlaps_previous = True  # it begins while the grid before it ends
    resident = 1  # blocks that a multiprocessor is to work on
    band, kv = warpgroup.ROWS, KV  # rows of a tile, and keys
    threads = warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def params(self):
        """The record of numbers and arrays that reach, cache and result need in the kernel."""
        return record(**self.window.params, **self.cache.params, **self.result.params)

    def __str__(self):
        return f"mla {self.product} {self.window} {self.cache} {self.result}, {self.band} x {self.kv}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that an architecture is served with. fp16, which takes as many registers as bf16, other caches and
    smaller pages come with `everything` only."""
    if arch == "sm_90a":
        one, several = KeyWindow(False, False, False), KeyWindow(False, True, False)
        kinds = [(one, TmaLatents(), FinalOutput), (several, TmaPagedLatents(1), PartialOutput)]
        kinds += [(one, TmaIndexedLatents(), PartialOutput), (one, TmaPagedLatents(2), FinalOutput)] * everything
        of_rows = [(several, PagedLoader, PartialOutput)] + [(one, DenseLoader, FinalOutput)] * everything
        for of in (bf16, fp16)[: 1 + everything]:
            for window, cache, result in kinds:
                yield Config(LatentProducts(of), window, cache, result(of, VECTOR_BYTES))
            for window, lies, result in of_rows:
                yield gathered(of, False, window, PagedLoader(VECTOR_BYTES), result(of, VECTOR_BYTES))
                yield gathered(of, True, window, lies(VECTOR_BYTES), result(of, VECTOR_BYTES))


def gathered(of: dtype, narrow: bool, window: KeyWindow, cache: DenseLoader, result: FinalOutput) -> Config:
    """The configuration in which the producer's warps gather rows, of fp8 if `narrow`."""
    if narrow:
        latents, rotated = st(BAND, LATENT, fp8e4m3, ROTARY), st(BAND, ROTARY, of)
        return Config(Fp8LatentProducts(of), window, Fp8LatentGather(cache, latents, sv(BAND, fp32), rotated), result)
    return Config(LatentProducts(of), window, LatentGather(cache, st(KV // 2, LATENT, of)), result)


class LatentPipes(NamedTuple):
    """What a block has in shared memory: its queries, rings of tiles of latents and of rotated columns, the rows' maxima of
    even and of odd tiles, and the numbers that latents are multiplied by, if there are any."""

    q: Any
    q_rotary: Any
    latent: Any
    rotary: Any
    even: Any
    odd: Any
    units: Any


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    product, PARAMS, BAND, OWN = config.product, config.params, config.band, LATENT // CONSUMERS  # of the output's columns
    INPUT, TAKEN, WRITERS = product.q_dtype, product.mma_dtype, config.cache.writers
    K, R, WEIGHTS = st(KV, LATENT, TAKEN), st(KV, ROTARY, INPUT), st(BAND, KV, TAKEN)
    KEEP, CLAIM = WIDENING if config.cache.ahead else GATHERING if WRITERS else BY_TMA
    LATENTS, ROTARIES = config.cache.source(K), config.cache.source(R)
    Q, Q_ROTARY = rt(16, OWN, INPUT), rt(16, ROTARY, INPUT)
    O = rt(16, OWN, fp32)
    WARPS = warpgroup.WARPGROUP
    window, cache, result, softmax = config.window, config.cache, config.result, Softmax(O)
    UNITS = product.descale_rings(STAGES + cache.ahead, WARPS, WRITERS)
    SCALED = len(UNITS) > 0
    split, IS_FINAL = FixedSplits(window, KV), type(result) is FinalOutput
    smem = shared(
        q=st(BAND, LATENT, TAKEN),
        q_rotary=st(BAND, ROTARY, INPUT),
        latent=ring(K, STAGES, CONSUMERS * WARPS, writers=WRITERS),
        rotary=ring(R, STAGES + cache.ahead, CONSUMERS * WARPS, writers=WRITERS),
        even=ring(sv(BAND, fp32), 1, WARPS, writers=WARPS),
        odd=ring(sv(BAND, fp32), 1, WARPS, writers=WARPS),
        sums=sv(CONSUMERS * BAND, fp32),
        **UNITS,
    )

    @inlined
    def rows_of(gQ, Q, out_tile, col):
        """A warp's rows of some columns of Q. The rows of a token lie together; for the rows of other tokens zeros are
        loaded."""
        x = zeros(Q)
        for token in range(out_tile.first_token, out_tile.last_token + 1):
            x = x + load(gQ, Q, (out_tile.batch, token, 0, int32(out_tile.row - token * out_tile.group), col), 3, 4)
        return x

    @inlined
    def bring(pipes, gQ, out_tile, me):
        """Load the block's rows of Q into shared memory."""
        rank = warpgroup.rank()
        own, rotated = rows_of(gQ, Q, out_tile, int32(OWN * me)), rows_of(gQ, Q_ROTARY, out_tile, LATENT)
        store(subtile(pipes.q, 16, rank, OWN, me), product.convert_q(own))
        if me == 0:
            store(subtile(pipes.q_rotary, 16, rank), rotated)
        warpgroup.sync_several(CONSUMERS)

    @inlined
    def scores(j, key, end, pipes):
        """The scores of tile j, pending. Rows beyond the end of the sequence are cleared first, because a weight of 0 times
        NaN is NaN."""
        tile = pipes.latent.wait(j)
        if WRITERS == 0 and key + KV > end:
            warpgroup.zero_rows(tile, int32(end - key))
        return product.mma_qk(tile, pipes.rotary.wait(j), pipes, j)

    @inlined
    def weighed(j, s, state, pipes, key, ctx, group, inner, scale, slack):
        """(the weights of tile j from its scores, the softmax's state after it). All rows see all keys before `inner`. ctx.row:
        the band's first row. Which tokens this warp's rows are of is found here, where few tiles ask, not held in registers."""
        if key + KV > inner:
            token = (row_index(O.col_vec) + int32(ctx.row + 16 * warpgroup.rank())) // group
            s = window.mask(s, ctx._replace(row=token), key, ctx.seqlen_k)
        state = state.update_max(s, None, scale, slack)
        p = state.weights(s, None, scale)
        return product.convert_p(p, pipes, j), state.add(p)

    @inlined
    def hand_on(j, p, state, pipes, tops):
        """Give the weights of tile j to the other consumer, in place of the tile's rotated columns, and the maxima that they
        refer to."""
        warpgroup.sync()  # all four warps have their scores: nobody reads these columns any more
        warpgroup.store(viewed(pipes.rotary.wait(j), WEIGHTS), p)
        warpgroup.sync()
        warpgroup.store(tops.claim(j // 2), state.m)
        tops.publish(j // 2)

    @inlined
    def taken(j, state, pipes, tops, me, scale):
        """(the output with tile j, pending; the softmax's state with it). The other consumer has made the weights."""
        m = warpgroup.load(tops.wait(j // 2), O.col_vec)
        tops.release(j // 2)
        state = state.follow_max(m, scale)
        values = subtile(pipes.latent.wait(j), KV, 0, OWN, me)
        return warpgroup.mma_AB(state.rescale(), viewed(pipes.rotary.wait(j), WEIGHTS), values), state

    @inlined
    def done(j, o, state, pipes):
        """The softmax's state once the output is there; from then on tile j may be overwritten."""
        state = state._replace(o=warpgroup.wait(o))
        pipes.latent.release(j)
        pipes.rotary.release(j)
        return state

    @inlined
    def evenly(n, first, inner, state, pipes, ctx, group, scale, slack):
        """The softmax's state after n tiles from key `first` on, in the consumer that makes the scores of even tiles."""
        for j in range(0, n, 2):
            key = int32(first + KV * j)
            s = warpgroup.wait(scores(j, key, ctx.seqlen_k, pipes))
            p, state = weighed(j, s, state, pipes, key, ctx, group, inner, scale, slack)
            o = warpgroup.mma_AB(state.rescale(), p, subtile(pipes.latent.wait(j), KV, 0, OWN, 0))
            hand_on(j, p, state, pipes, pipes.even)
            state = done(j, o, state, pipes)
            if j + 1 < n:
                o, state = taken(j + 1, state, pipes, pipes.odd, 0, scale)
                state = done(j + 1, o, state, pipes)
        return state

    @inlined
    def oddly(n, first, inner, state, pipes, ctx, group, scale, slack):
        """The same in the other consumer, whose scores are computed while it takes up the values of the tile before."""
        for j in range(0, n, 2):
            key = int32(first + KV * (j + 1))
            if j + 1 < n:
                s = scores(j + 1, key, ctx.seqlen_k, pipes)
                o, state = taken(j, state, pipes, pipes.even, 1, scale)
                s = warpgroup.wait(s, newer=1)  # the scores are here, o is still in flight
                p, state = weighed(j + 1, s, state, pipes, key, ctx, group, inner, scale, slack)
                state = done(j, o, state, pipes)
                o = warpgroup.mma_AB(state.rescale(), p, subtile(pipes.latent.wait(j + 1), KV, 0, OWN, 1))
                hand_on(j + 1, p, state, pipes, pipes.odd)
                state = done(j + 1, o, state, pipes)
            else:
                o, state = taken(j, state, pipes, pipes.even, 1, scale)
                state = done(j, o, state, pipes)
        return state

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gLatent: LATENTS, gRotary: ROTARIES, gDescale: array(2), params: PARAMS,
        bands: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """See ampere.py."""
        opened = smem.open()
        sums, units = opened[6], opened[7] if SCALED else None
        pipes = LatentPipes(opened[0], opened[1], opened[2], opened[3], opened[4], opened[5], units)
        if not IS_FINAL:
            grid.release()  # the blocks that combine parts may come, and wait
        grid.wait()
        number, band = divmod(cuda.blockIdx.x, bands)  # tiles of a sequence are neighbours: they read the same keys
        me, row, rows = warpgroup.id(), int32(BAND * band), int32(tokens * group)
        first_token, last_token = int32(row // group), int32((min(row + BAND, rows) - 1) // group)
        work = split.first_work(number, splits, sequences, tokens, params)
        sees = window.key_span(work.sequence, first_token, last_token, tokens, params)
        first, end, inner = int32(KV * work.tile), sees.end, int32(sees.end - (last_token - first_token))
        n = int32(max(0, min(work.end_tile - work.tile, (end - first + KV - 1) // KV)))
        if me == PRODUCER:
            warpgroup.release_registers(KEEP)
            cache.bring(pipes, n, first, gLatent, gRotary, gDescale, work.sequence, end, params)
        else:
            warpgroup.claim_registers(CLAIM)
            mine = int32(row + 16 * warpgroup.rank())
            first_mine, last_mine = int32(mine // group), int32((min(mine + 16, rows) - 1) // group)
            out_tile = OutputTile(work.sequence, 0, work.part, work.part_batch, IS_FINAL, mine, first_mine, last_mine, group)
            ctx = ScoreContext(work.sequence, 0, row, sees.shift, tokens, end, params, 0, 0)
            bring(pipes, gQ, out_tile, me)
            state = softmax.init(LOWEST)
            if me == 0:
                state = evenly(n, first, inner, state, pipes, ctx, group, scale, slack)
            else:
                state = oddly(n, first, inner, state, pipes, ctx, group, scale, slack)
            own = finish_sum(state.l)
            warpgroup.store(subtile(sums, BAND, me), own)
            warpgroup.sync_several(CONSUMERS)
            l = own + warpgroup.load(subtile(sums, BAND, 1 - me), O.col_vec)
            result.store(over_sum(state.o, l), out_tile, int32(OWN * me), params)
            if me == 0:
                result.store_lse(state.m + log2(l) / scale, scale, out_tile, params)

    return attend, smem
