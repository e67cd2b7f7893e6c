"""Absorbed MLA of a few query tokens for Hopper, over a part of the keys: TMA and wgmma.

64 rows of heads and tokens see a tile of 64 keys at a time, and its first 512 columns are its values: it lies in shared memory
once, for both products. The output of 64 x 512 is more than one warpgroup can hold, so two have half of the columns each, and
share out the scores: one takes the even tiles, the other the odd ones, and hands on their weights, and the rows' maxima, by way
of shared memory. While one's softmax runs, the tensor cores have the other's products (as in FlashMLA, DeepSeek 2025).
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import cuda
from numpy import int32

from ops import divmod, finish_sum, grid, load, log2, maximum, row_index, store, subtile, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.arguments import FLOAT, INT, array, record

from ..softmax.decode.attend import either
from ..softmax.decode.reach import Reach
from ..softmax.decode.results import Either, Part, Spot, Whole
from ..softmax.decode.splits import Parted, Shares
from ..softmax.online import LOWEST, TINY, Softmax
from ..softmax.variants import At
from .boxes import Dense, Indexed, Paged
from .shape import LATENT, ROTARY

KV, STAGES, CONSUMERS = 64, 2, 2  # keys of a tile; tiles in shared memory; warpgroups that share out the output's columns
PRODUCER, KEEP, CLAIM = CONSUMERS, 56, 224  # registers a thread of producer and consumers
PIECE = 16  # bytes that all addresses are multiples of


@dataclass(frozen=True)
class Config:
    """A kernel: which caches it reads, where its output goes, and which keys a block works on."""

    dtype: dtype
    reach: Reach
    cache: Dense
    result: Whole | Either
    split: type[Parted]
    early = True  # it begins while the grid before it ends
    band, kv = warpgroup.ROWS, KV  # rows of a tile, and keys
    threads = warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def given(self):
        """What the kernel is told of all these."""
        return record(**self.reach.given, **self.cache.given, **self.result.given)

    def __str__(self):
        return f"mla {self.dtype} {self.reach} {self.cache} {self.result}, {self.band} x {self.kv}"


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What problems are served with; fp16, which takes the same registers, other caches and smaller pages with `everything`."""
    if arch == "sm_90a":
        one, several = Reach(False, False, False), Reach(False, True, False)
        kinds = [(one, Dense(), either, Shares), (several, Paged(1), either, Shares)]
        kinds += [
            (one, Indexed(), Part, Parted),
            (one, Paged(4), Whole, Parted),
            (several, Paged(8), either, Shares),
        ] * everything
        for of, (reach, cache, result, split) in itertools.product((bf16, fp16)[: 1 + everything], kinds):
            yield Config(of, reach, cache, result(of, PIECE), split)


class Pipes(NamedTuple):
    """What a block has in shared memory: its queries, the halves of the latents of tiles, their rotated columns, and the rows'
    maxima of even and odd ones."""

    q: Any
    q_rotary: Any
    left: Any
    right: Any
    rotary: Any
    even: Any
    odd: Any


class Run(NamedTuple):
    """n tiles of a sequence, from number j on, which are counted through all sequences, and from `key` on; `even` and `odd`
    maxima have been handed on before. All rows see the keys before `inner`."""

    n: Any
    j: Any
    even: Any
    odd: Any
    key: Any
    inner: Any


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, GIVEN, BAND, OWN = config.dtype, config.given, config.band, LATENT // CONSUMERS  # of the output's columns
    HALF, R = st(KV, OWN, INPUT), st(KV, ROTARY, INPUT)
    LATENTS, ROTARIES = config.cache.source(HALF), config.cache.source(R)
    Q, Q_ROTARY = rt(16, OWN, INPUT), rt(16, ROTARY, INPUT)
    O = rt(16, OWN, fp32)
    WARPS = warpgroup.WARPGROUP
    reach, cache, result, softmax = config.reach, config.cache, config.result, Softmax(O)
    split, IN_PARTS = config.split(reach, KV), type(result) is not Whole
    smem = shared(
        q=st(BAND, LATENT, INPUT),
        q_rotary=st(BAND, ROTARY, INPUT),
        left=ring(HALF, STAGES, WARPS),
        right=ring(HALF, STAGES, WARPS),
        rotary=ring(R, STAGES, WARPS),
        even=ring(sv(BAND, fp32), 1, WARPS, writers=WARPS),
        odd=ring(sv(BAND, fp32), 1, WARPS, writers=WARPS),
        sums=sv(CONSUMERS * BAND, fp32),
    )

    @inlined
    def rows_of(gQ, Q, spot, col):
        """A warp's rows of some columns of Q. A token's rows lie in one place; zeros are loaded where others are."""
        x = zeros(Q)
        for token in range(spot.first, spot.last + 1):
            x = x + load(gQ, Q, (spot.sequence, token, 0, int32(spot.row - token * spot.group), col), 3, 4)
        return x

    @inlined
    def bring(pipes, gQ, spot, me):
        """The block's rows of Q, into shared memory."""
        rank = warpgroup.rank()
        own, rotated = rows_of(gQ, Q, spot, int32(OWN * me)), rows_of(gQ, Q_ROTARY, spot, LATENT)
        store(subtile(pipes.q, 16, rank, OWN, me), own)
        if me == 0:
            store(subtile(pipes.q_rotary, 16, rank), rotated)
        warpgroup.sync_several(CONSUMERS)

    @inlined
    def latents(ring, j, left):
        """A half of tile j. Rows behind the sequence's `left` ones are cleared: a weight of 0 does not make up for a NaN."""
        tile = ring.wait(j)
        if left < KV:
            warpgroup.zero_rows(tile, left)
        return tile

    @inlined
    def scores(j, key, end, pipes, near, far, side):
        """Those of tile j, in flight; half number `side` of the latents comes first."""
        s = warpgroup.mm_ABt(subtile(pipes.q, BAND, 0, OWN, side), latents(near, j, int32(end - key)))
        s = warpgroup.mma_ABt(s, subtile(pipes.q, BAND, 0, OWN, 1 - side), latents(far, j, int32(end - key)))
        return warpgroup.mma_ABt(s, pipes.q_rotary, pipes.rotary.wait(j))

    @inlined
    def weighed(s, seen, key, at, inner, scale, slack):
        """(the weights of a tile of scores, what has then been seen); rows see all keys before `inner`."""
        if key + KV > inner:
            s = reach.mask(s, at, key, at.keys)
        seen = seen.moved(s, None, scale, slack)
        p = seen.weights(s, None, scale)
        return INPUT(p), seen.add(p)

    @inlined
    def hand_on(j, p, seen, rotary, tops, i):
        """To the other consumer the weights of tile j, in the place of its rotated columns, and the maxima they count from."""
        warpgroup.sync()  # all four warps have their scores: nobody reads these columns any more
        warpgroup.store(rotary.wait(j), p)
        warpgroup.sync()
        warpgroup.store(tops.claim(i), seen.m)
        tops.publish(i)

    @inlined
    def taken(j, seen, half, rotary, tops, i, scale):
        """What has been seen with tile j, whose weights are the other's; in flight: O."""
        m = warpgroup.load(tops.wait(i), O.col_vec)
        tops.release(i)
        seen = seen.follow(m, scale)
        return warpgroup.mma_AB(seen.rescaled(), rotary.wait(j), half.wait(j)), seen

    @inlined
    def done(j, o, seen, half):
        """What has been seen, once O is there. The tile's half may then be overwritten: the other consumer's scores were made
        before it handed on their weights, or mine before I did."""
        seen = seen._replace(o=warpgroup.wait(o))
        half.release(j)
        return seen

    @inlined
    def stretch(work, first_token, last_token, tokens, given):
        """Of a Work and some tokens: (its first key, how many tiles they see, where their keys end, where those end that all of
        them see)."""
        sees = reach.keys(work.sequence, first_token, last_token, tokens, given)
        first = int32(KV * work.tile)
        n = int32(max(0, min(work.end - work.tile, (sees.end - first + KV - 1) // KV)))
        return first, n, sees, int32(sees.end - (last_token - first_token))

    @inlined
    def evenly(run, seen, pipes, at, scale, slack):
        """What has been seen with a Run of tiles, by the consumer that makes the scores of the first one, the third, ..."""
        left, rotary = pipes.left, pipes.rotary
        for k in range(0, run.n, 2):
            j, key, even, odd = int32(run.j + k), int32(run.key + KV * k), int32(run.even + k // 2), int32(run.odd + k // 2)
            s = warpgroup.wait(scores(j, key, at.keys, pipes, left, pipes.right, 0))
            p, seen = weighed(s, seen, key, at, run.inner, scale, slack)
            o = warpgroup.mma_AB(seen.rescaled(), p, left.wait(j))
            hand_on(j, p, seen, rotary, pipes.even, even)
            seen = done(j, o, seen, left)
            if k + 1 < run.n:
                o, seen = taken(int32(j + 1), seen, left, rotary, pipes.odd, odd, scale)
                seen = done(int32(j + 1), o, seen, left)
                rotary.release(int32(j + 1))
        return seen

    @inlined
    def oddly(run, seen, pipes, at, scale, slack):
        """The same by the other one, whose scores are under way while it takes up the values of the tile before."""
        right, rotary = pipes.right, pipes.rotary
        for k in range(0, run.n, 2):
            j, key, even, odd = int32(run.j + k), int32(run.key + KV * k), int32(run.even + k // 2), int32(run.odd + k // 2)
            if k + 1 < run.n:
                later, key = int32(j + 1), int32(key + KV)
                s = scores(later, key, at.keys, pipes, right, pipes.left, 1)
                o, seen = taken(j, seen, right, rotary, pipes.even, even, scale)
                s = warpgroup.wait(s, newer=1)  # the scores are here, o is still in flight
                p, seen = weighed(s, seen, key, at, run.inner, scale, slack)
                seen = done(j, o, seen, right)
                rotary.release(j)
                o = warpgroup.mma_AB(seen.rescaled(), p, right.wait(later))
                hand_on(later, p, seen, rotary, pipes.odd, odd)
                seen = done(later, o, seen, right)
            else:
                o, seen = taken(j, seen, right, rotary, pipes.even, even, scale)
                seen = done(j, o, seen, right)
                rotary.release(j)
        return seen

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def attend(
        gQ: array(5, INPUT), gLatent: LATENTS, gRotary: ROTARIES, given: GIVEN,
        bands: INT, splits: INT, sequences: INT, tokens: INT, group: INT, scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """See ampere.py."""
        q, q_rotary, left, right, rotary, even, odd, sums = smem.open()
        pipes = Pipes(q, q_rotary, left, right, rotary, even, odd)
        if IN_PARTS:
            grid.release()  # the blocks that combine parts may come, and wait
        grid.wait()
        number, band = divmod(cuda.blockIdx.x, bands)  # tiles of a sequence are neighbours: they read the same keys
        me, row, rows = warpgroup.id(), int32(BAND * band), int32(tokens * group)
        first_token, last_token = int32(row // group), int32((min(row + BAND, rows) - 1) // group)
        work = split.first(number, splits, sequences, tokens, given)
        j = firsts = others = int32(0)  # tiles so far: all; of each sequence the first, the third, ...; the others
        if me == PRODUCER:
            warpgroup.release_registers(KEEP)
            while work.left > 0:
                first, n, sees, _ = stretch(work, first_token, last_token, tokens, given)
                for k in range(n):
                    here, key = int32(j + k), int32(first + KV * k)
                    if k % 2 == 0:  # first what is needed first, and given back first
                        cache.fill(left, right, 0, rotary, here, gLatent, gRotary, work.sequence, key, sees.end, given)
                    else:
                        cache.fill(right, left, 1, rotary, here, gLatent, gRotary, work.sequence, key, sees.end, given)
                j, work = int32(j + n), split.next(work, tokens, given)
        else:
            warpgroup.claim_registers(CLAIM)
            mine = int32(row + 16 * warpgroup.rank())
            first_mine, last_mine = int32(mine // group), int32((min(mine + 16, rows) - 1) // group)
            token = (row_index(O.col_vec) + mine) // group
            while work.left > 0:
                first, n, sees, inner = stretch(work, first_token, last_token, tokens, given)
                whole = work.end - work.tile == work.tiles
                spot = Spot(work.sequence, 0, work.part, work.of, whole, mine, first_mine, last_mine, group)
                at = At(work.sequence, 0, token, sees.shift, tokens, sees.end, given, 0, 0)
                bring(pipes, gQ, spot, me)
                run, seen = Run(n, j, firsts, others, first, inner), softmax.begin(LOWEST)
                if me == 0:
                    seen = evenly(run, seen, pipes, at, scale, slack)
                else:
                    seen = oddly(run, seen, pipes, at, scale, slack)
                own = finish_sum(seen.l)
                warpgroup.store(subtile(sums, BAND, me), own)
                warpgroup.sync_several(CONSUMERS)
                l = own + warpgroup.load(subtile(sums, BAND, 1 - me), O.col_vec)
                result.store(seen.o / maximum(l, TINY), spot, int32(OWN * me), given)
                if me == 0:
                    result.store_sums(seen.m + log2(l) / scale, scale, spot, given)
                firsts, others = int32(firsts + (n + 1) // 2), int32(others + n // 2)
                j, work = int32(j + n), split.next(work, tokens, given)

    return attend, smem
