"""The gradients of arrays whose elements scores read at indices of their own: ALiBi's slopes, and what a score in Python
indexes.

Which element a score reads is known only when the kernel runs. So every warp has a row of partial sums in global memory, one
sum for each element. The warp goes through its score tiles. In each it goes through the elements between the least index and
the greatest that occur, and adds up the contributions to each. The kernel `sum_rows` then sums the rows. Each tile has a fixed
warp, so all sums have a fixed order: the same bits every time.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block, col_sum, divmod, load, store, tile_max, tile_min, tile_sum, where, zeros
from tiles import bf16, fp32, inlined, rt, shared
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import FLOAT, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.backward import recomputed_scores
from ...parts.backward.gradient_outputs import float32_output
from ...parts.scores import Alibi

MAX_ELEMENTS = 2.0**24  # of an array: indices are float32, and this one is greater than all
COLUMNS_AT_ONCE = 64  # sums of a row that a warp clears or adds up at once
MAX_BYTES = 2**28  # of all rows of sums, unless a single thread block needs more
MAX_BLOCKS_PER_SM = 4


@functools.cache
def make(config: recomputed_scores.Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, PARAMS, AUX, WARPS, PACKED = config.dtype, config.params, config.aux, config.warps, config.sequences.packed
    scores, sequences, read = recomputed_scores.recomputation(config), config.sequences, config.read
    S = scores.tile
    smem = shared(**recomputed_scores.tile_buffers(config))

    @inlined
    def add_tile(n, tile, number, ctx, seq, group, buffers, arrays, gLseDelta, gPartials, row, scale):
        """Add the contributions of the scores of a query tile and a key block to the warp's row of sums. Returns the number of
        score tiles that the thread block has gone through."""
        w, i, j, warp_ctx = scores.weighted_ds(n, tile, number, ctx, seq, group, buffers, arrays, gLseDelta, scale)
        index = zeros(S) + read.element(i, j, warp_ctx)
        reads = (index >= 0.0) & (w != 0.0)
        lowest, highest = tile_min(where(reads, index, MAX_ELEMENTS)), tile_max(where(reads, index, -1.0))
        for element in range(int32(lowest), int32(highest) + 1):
            total = gPartials[row, element] + tile_sum(where(index == element, w, 0.0))
            cuda.syncwarp()  # all of the warp's threads have read it
            gPartials[row, element] = total
            cuda.syncwarp()
        n = int32(n + 1)
        block.sync()
        return n

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def element_gradients(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDO: array(4, INPUT), gLseDelta: array(3),
        gPartials: array(2), params: PARAMS, aux: AUX, first: INT, batches: INT, heads: INT, tiles: INT, blocks: INT,
        group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Sum the contributions of this thread block's score tiles (number blockIdx and every gridDim-th after that) in its
        warps' rows of gPartials, from row `first` on. A head has `tiles` query tiles (of all sequences, if they are packed),
        and each of these `blocks` key blocks (or, if sequences are packed, its visible key blocks are dealt to so many thread
        blocks)."""
        q, k, v, do = smem.open()
        row = int32(first + WARPS * cuda.blockIdx.x + cuda.threadIdx.x // LANES)
        for element in range(0, gPartials.shape[1], COLUMNS_AT_ONCE):
            store(gPartials, zeros(rt(16, COLUMNS_AT_ONCE, fp32).row_vec), (row, int32(element)))
        cuda.syncwarp()
        n = int32(0)
        for m in range(cuda.blockIdx.x, batches * heads * tiles * blocks, cuda.gridDim.x):
            rest, number = divmod(int32(m), blocks)
            batch_head, tile = divmod(rest, tiles)
            tile, batch, head = sequences.find_tile(tile, batch_head, heads, params)
            seq = sequences.sequence(batch, params)
            ctx = seq.context(batch, head, int32(0), params, aux)
            arrays, buffers = (gQ, gK, gV, gDO), (q, k, v, do)
            if PACKED:
                if sequences.has_tile(tile, batch, params):
                    kv_blocks = scores.tiling.key_blocks(scores.rows * tile, ctx)
                    for block_index in range(int32(kv_blocks.first + number), int32(kv_blocks.first + kv_blocks.n), blocks):
                        n = add_tile(
                            n, tile, int32(block_index), ctx, seq, group, buffers, arrays, gLseDelta, gPartials, row, scale
                        )
            elif scores.may_see(tile, number, ctx):
                n = add_tile(n, tile, number, ctx, seq, group, buffers, arrays, gLseDelta, gPartials, row, scale)

    return element_gradients, smem


@dataclass(frozen=True)
class SumElementRows:
    """The configuration of the kernel that sums rows of partial sums. accumulate: it adds the result to what the array
    holds."""

    accumulate: bool = False

    @property
    def threads(self):
        """The number of threads of a thread block: one warp."""
        return LANES

    def __str__(self):
        return "sums of element rows" + ", accumulates" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "SumElementRows"):
        """(kernel, shared memory) of a configuration."""
        X, result = rt(16, COLUMNS_AT_ONCE, fp32), float32_output(config.accumulate)

        @cuda.jit(launch_bounds=(LANES, 1), fastmath=True)
        def sum_rows(gPartials: array(2), gOut: array(2)):
            """gOut[0] = the sum of the rows of gPartials, for COLUMNS_AT_ONCE columns."""
            first, total = int32(COLUMNS_AT_ONCE * cuda.blockIdx.x), zeros(X)
            for row in range(0, gPartials.shape[0], X.rows):
                total = total + load(gPartials, X, (int32(row), first))
            result.store_vector(gOut, col_sum(total), X.row_vec, (int32(0), first))

        return sum_rows, None


def space(target: Target, everything: bool) -> Iterator[recomputed_scores.Config]:
    """Configurations to compile and inspect for an architecture: bf16, rows that begin at multiples of 16 bytes."""
    for padded, (queries, kv) in recomputed_scores.SHAPES.items():
        read, main_rows = recomputed_scores.SlopeRead(None, False), 64
        yield recomputed_scores.Config(
            padded, padded, bf16, Alibi(True, True), kv, queries, main_rows, None, VECTOR_SIZES[0], None, read
        )
