"""The states of linear attention before each chunk, or in reverse the gradients of those after each chunk, where each channel
of the keys has a decay (parts/recurrent/channel_chunks.py):

    S after = exp(b_last) S + k~^T V        dS before = exp(b_last) dS + q~^T dO

A block has 64 columns of the values of a head, its warps 16 each, for which they hold the state transposed."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import load, mma_AB, store, truncate, warp_index, warpgroup
from tiles import fp32, inlined, pipeline, rt, shared, st, sv
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES, WARPGROUP
from tiles.targets import Target

from ..parts.recurrent.channel_chunks import ROWS, ChannelChunkConfig, chunk_forms
from ..parts.recurrent.delta_chunks import PANEL, state_row
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord

STAGES = 2  # chunks in flight


@dataclass(frozen=True)
class Config(ChannelChunkConfig):
    """A kernel's configuration. reverse: are they gradients, from the last chunk to the first?"""

    reverse: bool = False
    label = "states before chunks, gates by channel"
    threads = LANES * WARPGROUP

    def __str__(self):
        return super().__str__() + ", reverse" * self.reverse


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and 16 bytes, with all other dtypes and bytes if `everything`."""
    for form in chunk_forms(everything):
        yield from (replace(Config(*form), reverse=reverse) for reverse in (False, True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, STATE = config.dtype, config.vector_bytes, rt(ROWS, config.key_dim, fp32)
    TRANSPOSED, seq_layout = rt(ROWS, CHUNK, INPUT), SequenceLayout(config.varlen, config.reverse)
    PANEL_ROWS = PANEL if config.reverse else 0  # where dS lies below S
    smem = shared(
        k=pipeline(st(CHUNK, config.key_dim, INPUT), STAGES, WARPGROUP),
        v=pipeline(st(CHUNK, COLUMNS, INPUT), STAGES, WARPGROUP),
        decay=pipeline(sv(config.key_dim, fp32), STAGES, WARPGROUP),
    )

    @inlined
    def fill(k, v, decay, gKeys, gValues, gDecays, j, n, seq, first_chunk, head, col):
        """Start to copy the j-th of n chunks, if there are so many."""
        token = int32(max(seq.chunk_start(j), seq.start))
        chunk = int32(first_chunk + max(seq.chunk_number(j), 0))
        k.fill(j, gKeys, (chunk, head, 0, 0), end=n)
        v.fill(j, gValues, (seq.batch, token, head, col), 1, 3, n, VECTOR_BYTES)
        decay.fill(j, gDecays, (chunk, head, 0), end=n)

    @cuda.jit(launch_bounds=(config.threads, 3), fastmath=True)
    def scan(
        gKeys: array(4, INPUT), gValues: array(4, INPUT), gDecays: array(3), gFirstState: array(4), gLastState: array(4),
        gStates: array(4, INPUT), gCuSeqlens: ENDS, length: INT, blocks: INT, heads: INT,
    ):  # fmt: skip
        """Each head is `blocks` blocks of columns wide. gKeys: k~, or in reverse q~. gValues: V, or in reverse dO. gFirstState,
        gLastState: what the scan begins and ends with, transposed. gStates: S^T at state_row, dS^T below it."""
        k, v, decay = smem.open()
        block, _, head, sequence = block_coord(cuda.blockIdx.x, blocks, 1, heads)
        col = int32(COLUMNS * block)
        column = int32(col + ROWS * warp_index())  # the first one of this warp
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, 0, 1)
        n, values = seq.num_chunks(), truncate(gValues, 1, seq.end)
        first_chunk = seq_layout.chunk_index(seq.start, sequence, length)
        for j in range(STAGES - 1):
            fill(k, v, decay, gKeys, values, gDecays, j, n, seq, first_chunk, head, col)
        s_t = load(gFirstState, STATE, (sequence, head, column, 0), aligned=False)
        for j in range(n):
            chunk = int32(first_chunk + seq.chunk_number(j))
            store(gStates, INPUT(s_t), (chunk, head, int32(state_row(column) + PANEL_ROWS), 0), aligned=True)
            decays, keys, chunk_values = decay.wait(j, 3 * (STAGES - 2)), k.wait(j), v.wait(j)
            later = int32(j + STAGES - 1)
            fill(k, v, decay, gKeys, values, gDecays, later, n, seq, first_chunk, head, col)
            s_t = s_t * load(decays, STATE.row_vec)
            s_t = mma_AB(s_t, warpgroup.load_transposed(chunk_values, TRANSPOSED, fenced=False), keys)
        store(gLastState, s_t, (sequence, head, column, 0), aligned=False)

    return scan, smem
