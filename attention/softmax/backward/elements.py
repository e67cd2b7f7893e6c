"""The gradients of the elements of arrays that scores read: ALiBi's slopes, and what a score in Python indexes.

Which element a score reads is known only when the kernel runs. So every warp has a row of sums in global memory, one sum for
each element. The warp goes through its share of the tiles of scores. In each tile it looks up which elements occur, from the
least index to the greatest, and adds up what each of them gets. The kernel `total` then adds the rows. It is fixed which warp
has which tile, and so are all orders: the same bits every time.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block, col_sum, divmod, load, store, tile_max, tile_min, tile_sum, where, zeros
from tiles import bf16, fp32, inlined, rt, shared
from tiles.arguments import FLOAT, INT, array
from tiles.cp_async import PIECES
from tiles.layout import LANES

from ..scores import Sloped
from ..variants import ScoreContext
from . import recomputed_scores
from .results import of_sums

NOWHERE = 2.0**24  # an index greater than all others: indices are float32
AT_ONCE = 64  # sums that a warp clears or adds at once
BYTES = 2**28  # the most memory for all rows of sums, unless a single thread block needs more
SHARED_BY = 4  # the most thread blocks that share a multiprocessor


@functools.cache
def make(config: recomputed_scores.Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, PARAMS, AUX, WARPS, PACKED = config.dtype, config.params, config.aux, config.warps, config.sequences.packed
    scores, sequences, read = recomputed_scores.recomputed(config), config.sequences, config.read
    S = scores.tile
    smem = shared(**recomputed_scores.room(config))

    @inlined
    def added(n, tile, number, ctx, seq, group, rooms, arrays, gSums, gFound, mine, scale):
        """Add up a tile of scores, of a tile of queries and a block of keys. Returns how many tiles the block has gone
        through."""
        w, i, j, here = scores.weighted(n, tile, number, ctx, seq, group, rooms, arrays, gSums, scale)
        place = zeros(S) + read.place(i, j, here)
        counts = (place >= 0.0) & (w != 0.0)
        least, most = tile_min(where(counts, place, NOWHERE)), tile_max(where(counts, place, -1.0))
        for element in range(int32(least), int32(most) + 1):
            found = gFound[mine, element] + tile_sum(where(place == element, w, 0.0))
            cuda.syncwarp()  # all of the warp's threads have read it
            gFound[mine, element] = found
            cuda.syncwarp()
        n = int32(n + 1)
        block.sync()
        return n

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def elements(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDO: array(4, INPUT), gSums: array(3), gFound: array(2),
        params: PARAMS, aux: AUX, first: INT, batches: INT, heads: INT, tiles: INT, blocks: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Add up the tiles of this thread block (its number, and every gridDim-th after that) in its warps' rows of sums, from
        row `first` on. A pair of head and batch has `tiles` tiles of queries (of packed sequences a head has those of all), and
        `blocks` blocks of keys (of packed sequences as many shares of the blocks that a tile sees)."""
        q, k, v, do = smem.open()
        mine = int32(first + WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES)
        for element in range(0, gFound.shape[1], AT_ONCE):
            store(gFound, zeros(rt(16, AT_ONCE, fp32).row_vec), (mine, int32(element)))
        cuda.syncwarp()
        n = int32(0)
        for m in range(cuda.blockIdx.x, batches * heads * tiles * blocks, cuda.gridDim.x):
            rest, number = divmod(int32(m), blocks)
            batch_head, tile = divmod(rest, tiles)
            tile, batch, head = sequences.find(tile, batch_head, heads, params)
            seq = sequences.sequence(batch, params)
            ctx = ScoreContext(batch, head, int32(0), seq.seqlen_k - seq.seqlen_q, seq.seqlen_q, seq.seqlen_k, params, aux, 0)
            arrays, rooms = (gQ, gK, gV, gDO), (q, k, v, do)
            if PACKED:
                if sequences.has(tile, batch, params):
                    kv_blocks = scores.tiling.key_blocks(scores.rows * tile, ctx)
                    for seen in range(int32(kv_blocks.first + number), int32(kv_blocks.first + kv_blocks.n), blocks):
                        n = added(n, tile, int32(seen), ctx, seq, group, rooms, arrays, gSums, gFound, mine, scale)
            elif scores.seen(tile, number, ctx):
                n = added(n, tile, number, ctx, seq, group, rooms, arrays, gSums, gFound, mine, scale)

    return elements, smem


@dataclass(frozen=True)
class Total:
    """The configuration of the kernel that adds rows of sums. adds: to what the array holds."""

    adds: bool = False

    @property
    def threads(self):
        """Threads of a block."""
        return LANES

    def __str__(self):
        return "rows of sums" + ", adds" * self.adds

    @staticmethod
    @functools.cache
    def make(config: "Total"):
        """(kernel, shared memory)."""
        X, result = rt(16, AT_ONCE, fp32), of_sums(config.adds)

        @cuda.jit(launch_bounds=(LANES, 1), fastmath=True)
        def total(gFound: array(2), gOut: array(2)):
            """The sums of some columns, in a row."""
            first, found = int32(AT_ONCE * cuda.blockIdx.x), zeros(X)
            for row in range(0, gFound.shape[0], X.rows):
                found = found + load(gFound, X, (int32(row), first))
            result.store_vector(gOut, col_sum(found), X.row_vec, (int32(0), first))

        return total, None


def space(arch: str, everything: bool) -> Iterator[recomputed_scores.Config]:
    """What an architecture is served with: bf16, whole pieces."""
    for padded, (queries, kv) in recomputed_scores.SHAPES.items():
        read, others = recomputed_scores.Slope(None, False), 64
        yield recomputed_scores.Config(
            padded, padded, bf16, Sloped(True, True), kv, queries, others, None, PIECES[0], None, read
        )
