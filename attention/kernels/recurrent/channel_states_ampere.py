"""The states of linear attention before each chunk, and in reverse the gradients of those after each chunk, where each channel
of the keys has a decay (parts/recurrent/channel_chunks.py):

    S after = exp(b_last) S + k~^T V        dS before = exp(b_last) dS + q~^T dO

A block has 64 columns of the values of a head in one of the directions, and each of its warps holds the state of 16 of them,
transposed. Both directions are one launch, so that half as many heads fill a GPU. If there are few heads, sequences are cut
into segments: a first pass computes each segment's local state, which follows from a state of 0, and its decay (`local`);
compose_segment_states.py computes from these the states before all segments, and the last pass begins from them."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import divmod, load, log2, mma_AB, store, truncate, warp_index, warpgroup, zeros
from tiles import fp32, inlined, pipeline, rt, shared, st, sv
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES, WARPGROUP
from tiles.targets import Target

from ...parts.recurrent.channel_chunks import ROWS, ChannelChunkConfig, chunk_fields
from ...parts.recurrent.state_panels import PANEL, state_row
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord

STAGES = 2  # chunks in flight


@dataclass(frozen=True)
class Config(ChannelChunkConfig):
    """A kernel's configuration. local: does the kernel compute only each segment's local state and its decay?"""

    local: bool = False
    label = "states of chunks, gates by channel"
    threads = LANES * WARPGROUP

    @property
    def ctas_per_sm(self):
        """How many thread blocks the registers of an SM hold."""
        return 2 if self.local else 3

    def __str__(self):
        return super().__str__() + ", local" * self.local


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and 16 bytes, with all other dtypes and bytes if `everything`."""
    for fields in chunk_fields(everything):
        yield from (replace(Config(*fields), local=local) for local in (False, True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, LOCAL, STATE = config.dtype, config.vector_bytes, config.local, rt(ROWS, config.key_dim, fp32)
    TRANSPOSED, seq_layout, CTAS_PER_SM = rt(ROWS, CHUNK, INPUT), SequenceLayout(config.varlen), config.ctas_per_sm
    smem = shared(
        k=pipeline(st(CHUNK, config.key_dim, INPUT), STAGES, WARPGROUP),
        v=pipeline(st(CHUNK, COLUMNS, INPUT), STAGES, WARPGROUP),
        decay=pipeline(sv(config.key_dim, fp32), STAGES, WARPGROUP),
    )

    @inlined
    def chunk_number(j, n, reverse):
        """The number, in the sequence's order, of the j-th of n chunks of the scan; of any chunk if j is n or more."""
        return int32(max(n - 1 - j, 0) if reverse else min(j, n))

    @inlined
    def fill(k, v, decay, gKeys, gValues, gDecays, j, n, seq, first_chunk, head, col, reverse):
        """Start to copy the j-th of n chunks, if there are so many."""
        number = chunk_number(j, n, reverse)
        chunk = int32(first_chunk + number)
        k.fill(j, gKeys, (chunk, head, 0, 0), end=n)
        v.fill(j, gValues, (seq.batch, seq.chunk_start(number), head, col), 1, 3, n, VECTOR_BYTES)
        decay.fill(j, gDecays, (chunk, head, 0), end=n)

    @cuda.jit(launch_bounds=(config.threads, CTAS_PER_SM), fastmath=True)
    def scan(
        gDecayedQ: array(4, INPUT), gDecayedK: array(4, INPUT), gV: array(4, INPUT), gDOut: array(4, INPUT), gDecays: array(3),
        gInitialState: array(4), gDState: array(4), gDInitialState: array(4), gStates: array(4, INPUT), gCuSeqlens: ENDS,
        gLocalStates: array(5), gLocalGradients: array(5), gStateDecays: array(4), gGradientDecays: array(4), length: INT,
        blocks: INT, segments: INT, scanned_segments: INT, heads: INT,
    ):  # fmt: skip
        """Each head is `blocks` blocks of columns wide, in each direction. There are thread blocks for the first
        `scanned_segments` of the `segments` of a scan. gDecayedQ, gDecayedK: q~ and k~. gInitialState, gDState: before each
        segment, transposed, as all states. gStates: S^T at state_row, dS^T below it. gLocalStates, gStateDecays: after each
        segment, and log2 of its decay; gLocalGradients, gGradientDecays: in reverse."""
        k, v, decay = smem.open()
        index, reverse = divmod(cuda.blockIdx.x, 2)
        block, segment, head, sequence = block_coord(index, blocks, scanned_segments, heads)
        col = int32(COLUMNS * block)
        column = int32(col + ROWS * warp_index())  # the warp's first one
        memory_segment = int32(segments - 1 - segment) if reverse else segment  # its number in the sequence's order
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, memory_segment, segments)
        n, row, at = seq.num_chunks(), state_row(column), (int32(sequence * segments + segment), head, column, 0)
        first_chunk = seq_layout.chunk_index(seq.start, sequence, length)
        if reverse:
            decayed_keys, values, row = gDecayedQ, truncate(gDOut, 1, seq.end), int32(row + PANEL)
            s_t = load(gDState, STATE, at, aligned=False)
        else:
            decayed_keys, values = gDecayedK, truncate(gV, 1, seq.end)
            s_t = load(gInitialState, STATE, at, aligned=False)
        for j in range(STAGES - 1):
            fill(k, v, decay, decayed_keys, values, gDecays, j, n, seq, first_chunk, head, col, reverse)
        total_decay = zeros(STATE.row_vec) + 1.0
        for j in range(n):
            if not LOCAL:
                chunk = int32(first_chunk + chunk_number(j, n, reverse))
                store(gStates, INPUT(s_t), (chunk, head, row, 0), aligned=True)
            decays, keys, chunk_values = decay.wait(j, 3 * (STAGES - 2)), k.wait(j), v.wait(j)
            fill_chunk = int32(j + STAGES - 1)
            fill(k, v, decay, decayed_keys, values, gDecays, fill_chunk, n, seq, first_chunk, head, col, reverse)
            decays_of_rows = load(decays, STATE.row_vec)
            s_t = s_t * decays_of_rows
            if LOCAL:
                total_decay = total_decay * decays_of_rows
            s_t = mma_AB(s_t, warpgroup.load_transposed(chunk_values, TRANSPOSED, fenced=False), keys)
        segment_coord, at = (sequence, head, segment, column, 0), (sequence, head, segment, 0)
        if LOCAL:
            if reverse:
                store(gLocalGradients, s_t, segment_coord, aligned=False)
                store(gGradientDecays, log2(total_decay), at)
            else:
                store(gLocalStates, s_t, segment_coord, aligned=False)
                store(gStateDecays, log2(total_decay), at)
        elif reverse and segment == segments - 1:
            store(gDInitialState, s_t, (sequence, head, column, 0), aligned=False)

    return scan, smem
