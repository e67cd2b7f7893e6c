"""Gradients of the delta rule's queries, keys and betas, chunk by chunk in any order, from the states before each chunk, the
gradients of those after it, E and Z (parts/delta/delta_chunks.py):

    dP = scale M * dO U^T        G = -beta stril(M * Z U^T)        dbeta = rowsum(Z * E)
    dQ = scale exp(b) dO S^T + dP K
    dK = [exp(b_last - b) U dS^T + dP^T Q + G^T K]  +  [G K - exp(b) dV S^T]

A block has some chunks of a head. Its eight warps are two warpgroups of 16 tokens a warp, each with half of the channels of the
keys; besides, the first computes dP, the second G. They go over the columns of values in panels of 32, whose tiles cp.async
loads while the previous panel is multiplied. Beta and decays are factors of rows and columns of products, so that no tile is
stored twice, with and without them. (With 16 warps addresses do not fit in the 128 registers of a thread.)"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import float32, int32

from ops import block as thread_block
from ops import divmod, exp2, load, mma_AB, mma_ABt, row_sum, store, subtile, tile_sum, truncate, warpgroup, zeros
from tiles import bf16, fp32, inlined, pipeline, rt, shared, st
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import LANES, WARPGROUP
from tiles.targets import Target

from ...parts.delta.delta_chunks import WARP_COLUMNS, ChunkDecay, DeltaChunkConfig, ValuePanels, chunk_fields
from ...parts.recurrent.gates import COL_VEC, ROW_VEC, TILE
from ...parts.recurrent.state_panels import PANEL
from ...parts.recurrent.tokens import CHUNK, ChunkPlace, SequenceLayout

HALVES = 2  # of the channels of the keys: one for each warpgroup
WARPS = WARPGROUP * HALVES  # of a block


@dataclass(frozen=True)
class Config(DeltaChunkConfig):
    """A kernel's configuration. unrounded: are dQ and dK float32, to be added over a group? with_gates: are the sums for the
    gates' gradients stored, too? stages: panels of values in flight."""

    unrounded: bool = False
    with_gates: bool = False
    stages: int = 2
    label = "gradients in chunks"
    threads = LANES * WARPS

    def __str__(self):
        flags = ", float32" * self.unrounded + ", gates" * self.with_gates
        return super().__str__() + flags + (", one stage" if self.stages == 1 else "")


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and 16 bytes, with all other dtypes and bytes if `everything`."""
    for fields in chunk_fields(everything):
        config = Config(*fields)
        yield replace(config, with_gates=config.gated)
        if everything and config.dtype is bf16 and config.vector_bytes == VECTOR_SIZES[0]:
            yield replace(config, with_gates=config.gated, unrounded=True)
            yield replace(config, with_gates=config.gated, stages=1)
            if config.gated:
                yield config


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, STAGES = config.dtype, config.vector_bytes, config.stages
    GATED, WITH_GATES = config.gated, config.with_gates
    HALF = config.key_dim // HALVES
    seq_layout, decay = SequenceLayout(config.varlen), ChunkDecay(config.gated)
    OUT, OUTPUT = rt(WARP_COLUMNS, HALF, fp32), array(4, fp32 if config.unrounded else INPUT)
    OUT_BYTES = True if config.unrounded else VECTOR_BYTES
    ROWS, KEY_ROWS, value_panels = rt(WARP_COLUMNS, PANEL, INPUT), rt(WARP_COLUMNS, HALF, INPUT), ValuePanels(VECTOR_BYTES)
    TRANSPOSED = rt(WARP_COLUMNS, CHUNK, INPUT)
    KEY, STATE = (st(rows, config.key_dim, INPUT, width=HALF * INPUT.itemsize) for rows in (CHUNK, 2 * PANEL))
    smem = shared(
        q=pipeline(KEY, 1, WARPS),
        k=pipeline(KEY, 1, WARPS),
        do=pipeline(st(CHUNK, PANEL, INPUT), STAGES, WARPS),
        e=pipeline(st(2 * CHUNK, PANEL, INPUT), STAGES, WARPS),
        s=pipeline(STATE, STAGES, WARPS),
        p=st(CHUNK, CHUNK, INPUT),
        g=st(CHUNK, CHUNK, INPUT),
    )

    @inlined
    def load_rows(tile, index):
        """16 rows of a shared tile with half of the channels."""
        return fp32(load(subtile(tile, WARP_COLUMNS, index), KEY_ROWS))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: array(4, INPUT), gK: array(4, INPUT), gDOut: array(4, INPUT), gB: array(3), gChunkBeta: array(3),
        gErrors: array(4, INPUT), gStates: array(4, INPUT), gDQ: OUTPUT, gDK: OUTPUT,
        gDBeta: array(3), gQueryDots: array(3), gKeyDots: array(3), gCarriedDots: array(3), gStateDots: array(3),
        gCuSeqlens: ENDS, length: INT, panels: INT, parts: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The chunks of a sequence are divided evenly among the `parts` blocks of a head. gErrors: E above Z. gStates: S^T and
        dS^T by panels. gQueryDots .. gStateDots: see gate_gradient.py."""
        q, k, do, e, s, p, g = smem.open()
        index, part = divmod(cuda.blockIdx.x, parts)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n, half, rank = seq.num_chunks(), warpgroup.id(), warpgroup.rank()
        warp, row = int32(WARPGROUP * half + rank), int32(WARP_COLUMNS * rank)
        queries, keys, douts = truncate(gQ, 1, seq.end), truncate(gK, 1, seq.end), truncate(gDOut, 1, seq.end)
        pipelines, arrays = (do, e, s), (douts, gErrors, gStates)
        for j in seq_layout.chunks_of_block(part, n, parts):
            token = seq.chunk_start(j)
            chunk = seq_layout.chunk_index(token, sequence, length)
            place = ChunkPlace(chunk, head, sequence, token, seq)
            at = seq.batch, token, key_head, 0
            k.fill(j, keys, at, 1, 3, n, VECTOR_BYTES)
            q.fill(j, queries, at, 1, 3, n, VECTOR_BYTES)
            for panel in range(STAGES - 1):
                value_panels.fill(pipelines, arrays, panel, panels, place)
            scores, dq, dk_write, dk_read = zeros(TILE), zeros(OUT), zeros(OUT), zeros(OUT)
            dbeta, state_dot = zeros(COL_VEC), float32(0)
            for panel in range(panels):
                if STAGES == 1:
                    thread_block.sync()
                    value_panels.fill(pipelines, arrays, panel, panels, place)
                do_rows = subtile(do.wait(panel), WARP_COLUMNS, rank)  # its barrier: all warps have read the previous panel
                errors, states = e.wait(panel), s.wait(panel)
                if STAGES > 1:
                    fill_panel = int32(panel + STAGES - 1)
                    value_panels.fill(pipelines, arrays, fill_panel, panels, place)
                e_tile = subtile(errors, CHUNK, 0)
                e_rows = subtile(e_tile, WARP_COLUMNS, rank)
                z_rows = subtile(subtile(errors, CHUNK, 1), WARP_COLUMNS, rank)
                if half == 0:
                    scores = mma_ABt(scores, do_rows, e_tile)
                    dbeta = dbeta + row_sum(fp32(load(e_rows, ROWS)) * fp32(load(z_rows, ROWS)))
                else:
                    scores = mma_ABt(scores, z_rows, e_tile)
                state, d_state = (subtile(states, PANEL, 0, HALF, half), subtile(states, PANEL, 1, HALF, half))
                dq = mma_AB(dq, do_rows, state)
                dk_read = mma_AB(dk_read, z_rows, state)
                dk_write = mma_AB(dk_write, e_rows, d_state)
                if WITH_GATES and rank < PANEL // WARP_COLUMNS:
                    state_dot += tile_sum(load_rows(state, rank) * load_rows(d_state, rank))
            b_rows, beta = decay.load_rows(gB, chunk, head, row), load(gChunkBeta, ROW_VEC, (chunk, head, 0))
            beta_rows = load(gChunkBeta, COL_VEC, (chunk, head, row))
            if GATED:
                scores = scores * exp2(zeros(TILE) + b_rows - decay.load_cols(gB, chunk, head))
            if half == 0:
                store(truncate(gDBeta, 1, seq.end), dbeta, (seq.batch, int32(token + row), head), cols=1)
                warpgroup.store(p, INPUT(warpgroup.causal(scores * (beta * scale), 0, 0.0)))
            else:
                warpgroup.store(g, INPUT(warpgroup.causal(scores * beta * (0.0 - beta_rows), -1, 0.0)))
            exp_b = decay.exp(b_rows)
            dq = dq * (exp_b * scale)
            dk_write = dk_write * (beta_rows * decay.exp(decay.load_last(gB, chunk, head) - b_rows))
            dk_read = dk_read * (0.0 - beta_rows * exp_b)
            key_tile, query_tile = k.wait(j), q.wait(j)  # the barrier also shows p and g to all warps
            key_part = subtile(key_tile, CHUNK, 0, HALF, half)
            query_part = subtile(query_tile, CHUNK, 0, HALF, half)
            if WITH_GATES:
                gCarriedDots[chunk, head, warp] = tile_sum(dk_write * load_rows(key_part, rank))
                gStateDots[chunk, head, warp] = state_dot
            dq = mma_AB(dq, subtile(p, WARP_COLUMNS, rank), key_part)
            dk_read = mma_AB(dk_read, subtile(g, WARP_COLUMNS, rank), key_part)
            dk_write = mma_AB(dk_write, warpgroup.load_transposed(p, TRANSPOSED), query_part)
            dk_write = mma_AB(dk_write, warpgroup.load_transposed(g, TRANSPOSED), key_part)
            at = seq.batch, int32(token + row), head, int32(HALF * half)
            if WITH_GATES:
                dots_at = seq.batch, int32(token + row), int32(HALVES * head + half)
                query_dots = row_sum(dq * load_rows(query_part, rank)) + row_sum(dk_read * load_rows(key_part, rank))
                store(truncate(gQueryDots, 1, seq.end), query_dots, dots_at, cols=1)
                store(truncate(gKeyDots, 1, seq.end), row_sum(dk_write * load_rows(key_part, rank)), dots_at, cols=1)
            store(truncate(gDQ, 1, seq.end), dq, at, 1, 3, OUT_BYTES)
            store(truncate(gDK, 1, seq.end), dk_write + dk_read, at, 1, 3, OUT_BYTES)
            thread_block.sync()

    return differentiate, smem
