"""The gradients of the delta rule's states after each chunk, and those of its values, from the last chunk to the first
(parts/delta/delta_chunks.py):

    dU = P^T dO + exp(b_last - b) K dS        Z = (I + beta N)^-T dU        dV = beta Z
    dS before = exp(b_last) dS + (scale exp(b) Q)^T dO - (exp(b) K)^T dV

A block has 64 columns of the values of a head, each of its warps 16 of them. Warps hold dS, dU and Z transposed, as those of
delta_walk_ampere.py hold S and E."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import load, mma_AB, mma_ABt, store, subtile, transpose, truncate, warp_index, warpgroup, zeros
from tiles import fp32, inlined, pipeline, rt, shared, st
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.targets import Target

from ...parts.delta.delta_channels import DeltaWalkConfig, walk_fields
from ...parts.delta.delta_chunks import WARP_COLUMNS, WARPS, TwoParts
from ...parts.recurrent.gates import ROW_VEC, TILE
from ...parts.recurrent.state_panels import PANEL, state_row
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord


@dataclass(frozen=True)
class Config(DeltaWalkConfig):
    """A kernel's configuration, whose fields are those of DeltaWalkConfig."""

    label = "gradients of states after chunks"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and 16 bytes, with all other dtypes and bytes if `everything`."""
    yield from itertools.starmap(Config, walk_fields(everything))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, STATE = config.dtype, config.vector_bytes, rt(WARP_COLUMNS, config.key_dim, fp32)
    TRANSPOSED, seq_layout = rt(WARP_COLUMNS, CHUNK, INPUT), SequenceLayout(config.varlen, reversed=True)
    VALUES, decay, two_parts = rt(CHUNK, WARP_COLUMNS, fp32), config.decay, TwoParts(INPUT)
    smem = shared(
        q=pipeline(st(CHUNK, config.key_dim, INPUT), 1, WARPS),
        k=pipeline(st(CHUNK, config.key_dim, INPUT), 2, WARPS),
        do=pipeline(st(CHUNK, COLUMNS, INPUT), 1, WARPS),
        x=pipeline(st(3 * CHUNK, CHUNK, INPUT), 1, WARPS),
    )

    @inlined
    def reverse_chunk_start(seq, j):
        """The first token of the j-th chunk in reverse order; of the last chunk in this order if there are fewer chunks."""
        return int32(max(seq.chunk_start(j), seq.start))

    @cuda.jit(launch_bounds=(config.threads, 2), fastmath=True)
    def scan(
        gDecayedQ: array(4, INPUT), gReadKeys: array(4, INPUT), gWriteKeys: array(4, INPUT), gDOut: array(4, INPUT),
        gB: array(3), gChunkBeta: array(3), gReverse: array(4, INPUT), gErrors: array(4, INPUT), gStates: array(4, INPUT),
        gDV: array(4, INPUT), gLastState: array(4), gFirstState: array(4), gDQ: array(4), gDK: array(4), gDBeta: array(3),
        gCuSeqlens: ENDS, length: INT, blocks: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Each head is `blocks` blocks of columns wide. gDecayedQ: scale exp(b) Q, gReadKeys and gWriteKeys as in
        delta_walk_ampere.py, or without decays if these are of tokens. gErrors: Z of each chunk and head, below E. gStates:
        dS^T, below state_row. gLastState, gFirstState: the gradients of the states after and before the sequence, transposed.
        gDQ, gDK, gDBeta: those of padding are set to 0."""
        q, k, do, x = smem.open()
        block, _, head, sequence = block_coord(cuda.blockIdx.x, blocks, 1, heads)
        key_head, col = int32(head // group), int32(COLUMNS * block)
        column = int32(col + WARP_COLUMNS * warp_index())  # the warp's first one
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, 0, 1)
        first, end, batch = seq
        n = seq.num_chunks()
        end_row, tiles = decay.end_row(end), decay.tiles(n)
        queries, douts = truncate(gDecayedQ, 1, end_row), truncate(gDOut, 1, end)
        read_keys, write_keys = truncate(gReadKeys, 1, end_row), truncate(gWriteKeys, 1, end_row)
        first_chunk = seq_layout.chunk_index(first, sequence, length)
        last, last_chunk = reverse_chunk_start(seq, 0), int32(first_chunk + max(n - 1, 0))
        k.fill(0, write_keys, decay.coord(batch, last, key_head, last_chunk, head), 1, 3, tiles, VECTOR_BYTES)
        do.fill(0, douts, (batch, last, head, col), 1, 3, n, VECTOR_BYTES)
        x.fill(0, gReverse, (last_chunk, head, 0, 0), end=n)
        q.fill(0, queries, decay.coord(batch, last, key_head, last_chunk, head), 1, 3, n, VECTOR_BYTES)
        tile, i = decay.second_tile(0)
        at = decay.coord(batch, reverse_chunk_start(seq, i), key_head, int32(last_chunk - i), head)
        k.fill(tile, read_keys, at, 1, 3, tiles, VECTOR_BYTES)
        ds_t = load(gLastState, STATE, (sequence, head, column, 0), aligned=False)
        for j in range(n):
            chunk = int32(last_chunk - j)
            previous_chunk = int32(max(chunk - 1, first_chunk))
            store(gStates, INPUT(ds_t), (chunk, head, int32(state_row(column) + PANEL), 0), aligned=True)
            b = decay.load_cols(gB, chunk, head)
            b_last = decay.last(b)
            key_tile = k.wait(decay.first_tile(j), 4)
            du_t = mma_ABt(zeros(TILE), INPUT(ds_t), key_tile) * decay.exp(b_last - b)
            do_tile = do.wait(j, 3)
            matrices = x.wait(j, 2)
            x_high, x_low, p_t = subtile(matrices, CHUNK, 0), subtile(matrices, CHUNK, 1), subtile(matrices, CHUNK, 2)
            du_high, du_low = two_parts.split(mma_ABt(du_t, warpgroup.load_transposed(do_tile, TRANSPOSED), p_t))
            z_t = mma_ABt(mma_ABt(mma_ABt(zeros(TILE), du_high, x_high), du_high, x_low), du_low, x_high)
            exp_b = decay.exp(decay.load_cols(gB, chunk, head))
            do_t = warpgroup.load_transposed(do_tile, TRANSPOSED)
            if not decay.queries_include_decay:
                do_t = INPUT(fp32(do_t) * (exp_b * scale))
            state_decay = decay.load_state_decay(gB, b_last, chunk, head)
            thread_block.sync()
            at = decay.coord(batch, reverse_chunk_start(seq, j + 1), key_head, previous_chunk, head)
            decay.fill_first(k, int32(j + 1), write_keys, at, tiles, VECTOR_BYTES)
            do.fill(j + 1, douts, (batch, reverse_chunk_start(seq, j + 1), head, col), 1, 3, n, VECTOR_BYTES)
            x.fill(j + 1, gReverse, (previous_chunk, head, 0, 0), end=n)
            store(gErrors, transpose(INPUT(z_t)), (chunk, head, CHUNK, column), aligned=True)
            dv_t = z_t * load(gChunkBeta, ROW_VEC, (chunk, head, 0))
            store(truncate(gDV, 1, end), transpose(INPUT(dv_t)), (batch, seq.chunk_start(j), head, column), 1, 3, VECTOR_BYTES)
            ds_t = mma_AB(ds_t * state_decay, INPUT(dv_t * (0.0 - exp_b)), decay.wait_second(k, j, key_tile, 3))
            ds_t = mma_AB(ds_t, do_t, q.wait(j, 3))
            thread_block.sync()
            q.fill(j + 1, queries, at, 1, 3, n, VECTOR_BYTES)
            tile, i = decay.second_tile(int32(j + 1))
            at = decay.coord(batch, reverse_chunk_start(seq, i), key_head, int32(last_chunk - i), head)
            k.fill(tile, read_keys, at, 1, 3, tiles, VECTOR_BYTES)
        store(gFirstState, ds_t, (sequence, head, column, 0), aligned=False)
        if seq_layout.varlen:
            padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for j in range(padding.num_chunks()):
                token = padding.chunk_start(j)
                store(gDV, zeros(VALUES), (padding.batch, token, head, column), 1, 3, VECTOR_BYTES)
                if block == 0:
                    row = int32(token + WARP_COLUMNS * warp_index())
                    store(gDQ, zeros(STATE), (padding.batch, row, head, 0), 1, 3, False)
                    store(gDK, zeros(STATE), (padding.batch, row, head, 0), 1, 3, False)
                    store(gDBeta, zeros(STATE.col_vec), (padding.batch, row, head), cols=1)

    return scan, smem
