"""The delta rule, chunk by chunk from the first to the last (parts/delta/delta_chunks.py):

    Y = V - exp(b) K S        E = (I + N beta)^-1 Y        S after = exp(b_last) S + (exp(b_last - b) K)^T (beta E)

and, as its result says (delta_results.py), the outputs, or the arrays that the kernels of gradients read: S before each chunk
and the errors E = v - S'^T k of its tokens. A block has 64 columns of the values of a head, each of its warps 16 of them. Warps
hold the state, Y and E transposed: the product of one step, rounded, is the left operand of the next one without leaving the
registers."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import load, mma_AB, mma_ABt, subtile, truncate, warp_index, warpgroup, zeros
from tiles import fp32, pipeline, rt, shared, st
from tiles.launching.arguments import ENDS, INT, array
from tiles.targets import Target

from ...parts.delta.delta_channels import DeltaWalkConfig, walk_fields
from ...parts.delta.delta_chunks import WARP_COLUMNS, WARPS, TwoParts
from ...parts.delta.delta_results import ChunkErrors, ChunkOutputs
from ...parts.recurrent.gates import ROW_VEC, TILE
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord

WIDE = 128  # channels of keys


@dataclass(frozen=True)
class Config(DeltaWalkConfig):
    """A kernel's configuration. outputs: does the kernel store outputs, or the arrays that the kernels of gradients read?"""

    outputs: bool = False

    @property
    def result(self):
        """The object that stores outputs, or the arrays that the kernels of gradients read."""
        result_class = ChunkOutputs if self.outputs else ChunkErrors
        return result_class(self.dtype, self.decay, SequenceLayout(self.varlen), self.vector_bytes)

    @property
    def recomputes_column(self):
        """Is the number of a warp's first column computed again for each chunk? Otherwise these kernels spill on sm_120a, and
        with it the others do."""
        return not self.outputs or (self.key_dim == WIDE and not self.gated and not self.varlen)

    @property
    def label(self):
        """The name of the kernel in tables."""
        return self.result.label


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and 16 bytes, with all other dtypes and bytes if `everything`."""
    for fields in walk_fields(everything):
        yield from (replace(Config(*fields), outputs=outputs) for outputs in (False, True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, STATE = config.dtype, config.vector_bytes, rt(WARP_COLUMNS, config.key_dim, fp32)
    TRANSPOSED, seq_layout = rt(WARP_COLUMNS, CHUNK, INPUT), SequenceLayout(config.varlen)
    decay, two_parts, result = config.decay, TwoParts(INPUT), config.result
    RECOMPUTES_COLUMN = config.recomputes_column
    PARAMS, READS_QUERIES, KEY = result.params(), result.reads_queries, st(CHUNK, config.key_dim, INPUT)
    smem = shared(
        q=pipeline(KEY if READS_QUERIES else st(8 * WARPS, 16, INPUT), 1, WARPS),
        k=pipeline(KEY, 2, WARPS),
        v=pipeline(st(CHUNK, COLUMNS, INPUT), 1, WARPS),
        x=pipeline(st(result.matrices * CHUNK, CHUNK, INPUT), 1, WARPS),
    )

    @cuda.jit(launch_bounds=(config.threads, 2), fastmath=True)
    def scan(
        gDecayedQ: array(4, INPUT), gReadKeys: array(4, INPUT), gWriteKeys: array(4, INPUT), gV: array(4, INPUT),
        gB: array(3), gChunkBeta: array(3), gForward: array(4, INPUT), gInitialState: array(4), gCuSeqlens: ENDS, length: INT,
        blocks: INT, heads: INT, group: INT, params: PARAMS,
    ):  # fmt: skip
        """Each head is `blocks` blocks of columns wide. gDecayedQ: scale exp(b) Q, gReadKeys: exp(b) K, gWriteKeys:
        exp(b_last - b) K; plain Q and K where a decay is one number a token. gForward: of each chunk and head, its inverse, and
        P^T below it if outputs are computed."""
        q, k, v, x = smem.open()
        block, _, head, sequence = block_coord(cuda.blockIdx.x, blocks, 1, heads)
        key_head, col = int32(head // group), int32(COLUMNS * block)
        column = int32(col + WARP_COLUMNS * warp_index())  # the first one of this warp
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        values, n = truncate(gV, 1, seq.end), seq.num_chunks()
        end_row, tiles, query_chunks = decay.end_row(seq.end), decay.tiles(n), n if READS_QUERIES else 0
        queries = truncate(gDecayedQ, 1, end_row)
        read_keys, write_keys = truncate(gReadKeys, 1, end_row), truncate(gWriteKeys, 1, end_row)
        first_chunk = seq_layout.chunk_index(seq.start, sequence, length)
        at = decay.coord(seq.batch, seq.start, key_head, first_chunk, head)
        k.fill(0, read_keys, at, 1, 3, tiles, VECTOR_BYTES)
        q.fill(0, queries, at, 1, 3, query_chunks, VECTOR_BYTES)
        v.fill(0, values, (seq.batch, seq.start, head, col), 1, 3, n, VECTOR_BYTES)
        x.fill(0, gForward, (first_chunk, head, 0, 0), end=n)
        tile, i = decay.second_tile(0)
        at = decay.coord(seq.batch, seq.chunk_start(i), key_head, int32(first_chunk + i), head)
        k.fill(tile, write_keys, at, 1, 3, tiles, VECTOR_BYTES)
        s_t = load(gInitialState, STATE, (sequence, head, column, 0), aligned=False)
        for j in range(n):
            chunk = int32(first_chunk + j)
            if RECOMPUTES_COLUMN:
                column = int32(col + WARP_COLUMNS * warp_index())  # computed again, to save registers
            result.store_state(params, s_t, (chunk, head, column))
            key_tile = k.wait(decay.first_tile(j), 4)
            y_t = mma_ABt(zeros(TILE), INPUT(s_t), key_tile) * decay.exp(decay.load_cols(gB, chunk, head))
            y_t = fp32(warpgroup.load_transposed(v.wait(j, 2), TRANSPOSED)) - y_t
            y_high, y_low = two_parts.split(y_t)
            matrices = x.wait(j, 1)
            x_high, x_low = subtile(matrices, CHUNK, 0), subtile(matrices, CHUNK, 1)
            e_t = mma_AB(mma_AB(mma_AB(zeros(TILE), y_high, x_high), y_high, x_low), y_low, x_high)
            b, u_t = decay.load_cols(gB, chunk, head), e_t * load(gChunkBeta, ROW_VEC, (chunk, head, 0))
            b_last = decay.last(b)
            result.store_tokens(params, (s_t, e_t, u_t, b), q, matrices, seq, j, (chunk, head, column))
            update = INPUT(u_t * decay.exp(b_last - b))
            state_decay = decay.load_state_decay(gB, b_last, chunk, head)
            thread_block.sync()
            at = decay.coord(seq.batch, seq.chunk_start(j + 1), key_head, int32(chunk + 1), head)
            decay.fill_first(k, int32(j + 1), read_keys, at, tiles, VECTOR_BYTES)
            q.fill(j + 1, queries, at, 1, 3, query_chunks, VECTOR_BYTES)
            v.fill(j + 1, values, (seq.batch, seq.chunk_start(j + 1), head, col), 1, 3, n, VECTOR_BYTES)
            x.fill(j + 1, gForward, (int32(chunk + 1), head, 0, 0), end=n)
            s_t = mma_AB(s_t * state_decay, update, decay.wait_second(k, j, key_tile, 4))
            thread_block.sync()
            tile, i = decay.second_tile(int32(j + 1))
            at = decay.coord(seq.batch, seq.chunk_start(i), key_head, int32(first_chunk + i), head)
            k.fill(tile, write_keys, at, 1, 3, tiles, VECTOR_BYTES)
        result.finish(params, s_t, gCuSeqlens, sequence, length, head, column)

    return scan, smem
