"""Gradients of the delta rule's queries, keys, betas and gates where each channel of the keys has a decay, chunk by chunk in
any order, from the states before each chunk, the gradients of those after it, E and Z (parts/delta/delta_channels.py has
the equations).

A block has some chunks of a head. Its sixteen warps are four warpgroups of 16 tokens a warp, each with a quarter of the
channels of the keys; besides, two of them compute dP, half of the columns each, and two G. First they go over the columns of
values in panels of 32, whose tiles cp.async loads while the previous panel is multiplied. Then come the pairs of tokens, level
by level (channel_pairs.py)."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import float32, int32

from ops import block as thread_block
from ops import (
    col_index,
    col_sum,
    columns,
    divmod,
    exp2,
    finish_sum,
    lane_col_sum,
    less,
    load,
    mma_AB,
    mma_ABt,
    row_sum,
    store,
    subtile,
    truncate,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import LANES, WARPGROUP
from tiles.targets import MEDIUM, Target

from ...parts.delta.delta_chunks import DeltaChunkConfig, ValuePanels, chunk_fields
from ...parts.recurrent.channel_chunks import ROWS, UNFENCED, ChunkChannels
from ...parts.recurrent.channel_pairs import FAR, PAIRS, DeltaPairs, DeltaPairTiles
from ...parts.recurrent.gates import COL_VEC
from ...parts.recurrent.state_panels import PANEL
from ...parts.recurrent.tokens import CHUNK, ChunkPlace, SequenceLayout

GROUPS = 4  # warpgroups, each with a quarter of the channels
WARPS = WARPGROUP * GROUPS  # of a block
NARROW = 32  # bytes of a row in a panel of tiles that are read 16 columns at a time


@dataclass(frozen=True)
class Config(DeltaChunkConfig):
    """A kernel's configuration. unrounded: are dQ and dK float32, to be added over a group? with_gates: are the gates'
    gradients wanted? stages: panels of values in flight."""

    unrounded: bool = False
    with_gates: bool = True
    stages: int = 2
    label = "gradients in chunks, gates by channel"
    threads = LANES * WARPS

    def __str__(self):
        flags = ", float32" * self.unrounded + ", without gates" * (not self.with_gates)
        return super().__str__() + flags + (", one stage" if self.stages == 1 else "")


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and 16 bytes, with all other dtypes and bytes if `everything`."""
    for fields in chunk_fields(everything):
        config = Config(*fields)
        if config.gated and target.shared_bytes >= MEDIUM:
            yield config
            if everything and config.dtype is bf16 and config.vector_bytes == VECTOR_SIZES[0]:
                yield from (replace(config, unrounded=unrounded, stages=1) for unrounded in (False, True))
                yield from (replace(config, unrounded=True), replace(config, with_gates=False))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, STAGES, WITH_GATES = config.dtype, config.vector_bytes, config.stages, config.with_gates
    channels, seq_layout = ChunkChannels(config.key_dim, GROUPS), SequenceLayout(config.varlen)
    PART, OUT, VARLEN, value_panels = channels.half, channels.rows, config.varlen, ValuePanels(VECTOR_BYTES)
    pairs, ERRORS = DeltaPairs(channels, INPUT, WITH_GATES), rt(ROWS, PANEL, INPUT)
    OUTPUT, OUTPUT_BYTES = (fp32, True) if config.unrounded else (INPUT, VECTOR_BYTES)
    KEY, STATE = (st(rows, config.key_dim, INPUT, width=PART * INPUT.itemsize) for rows in (CHUNK, 2 * PANEL))
    smem = shared(
        q=pipeline(KEY, 1, WARPS),
        k=pipeline(KEY, 1, WARPS),
        do=pipeline(st(CHUNK, PANEL, INPUT), STAGES, WARPS),
        errors=pipeline(st(2 * CHUNK, PANEL, INPUT), STAGES, WARPS),
        s=pipeline(STATE, STAGES, WARPS),
        b=channels.sums,
        x=KEY,
        keys_x=KEY,
        w=st(2 * CHUNK, CHUNK, INPUT, width=NARROW),
        carried=sv(WARPS * PART, fp32),
    )

    @inlined
    def decay_products(dq, dk_read, dk_write, dots, tiles, carried, beta, scale):
        """The parts of dq, dk and r that come from states, where dq, dk_read and dk_write are products with states. r: q dq +
        k dk_read - k dk_write. dots: the warp's part of <S, dS>."""
        sums = load(channels.part(tiles.b), OUT, fenced=False)
        decay = exp2(sums)
        dq = dq * (decay * scale)
        dk_read = dk_read * (decay * (0.0 - beta))
        last = channels.load_last(tiles.b)
        dk_write = dk_write * (exp2(last - sums) * beta)
        r = zeros(OUT)
        if WITH_GATES:
            key = pairs.load_rows(tiles.k)
            r = key * dk_write
            warp = int32(WARPGROUP * warpgroup.id() + warpgroup.rank())
            store(subtile(carried, PART, warp), col_sum(r) + exp2(last) * dots)
            r = pairs.load_rows(tiles.q) * dq + key * dk_read - r
        return dq, dk_read + dk_write, r

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: array(4, INPUT), gK: array(4, INPUT), gDOut: array(4, INPUT), gGates: array(4), gChunkBeta: array(3),
        gErrors: array(4, INPUT), gStates: array(4, INPUT), gDQ: array(4, OUTPUT), gDK: array(4, OUTPUT), gDBeta: array(3),
        gDGates: array(4), gCuSeqlens: ENDS, length: INT, panels: INT, parts: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The chunks of a sequence are divided evenly among the `parts` blocks of a head. gErrors: E above Z. gStates: S^T and
        dS^T by panels. Gates' gradients of padding are set to 0."""
        q, k, do, errors, s, b, x, keys_x, w, carried = smem.open()
        index, part = divmod(cuda.blockIdx.x, parts)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n, quarter, rank = seq.num_chunks(), warpgroup.id(), warpgroup.rank()
        row, rank_half = int32(ROWS * rank), rank // 2
        rank_parity, computes_g = rank - 2 * rank_half, quarter // 2
        pair_half = quarter - 2 * computes_g
        padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
        queries, keys, douts = truncate(gQ, 1, seq.end), truncate(gK, 1, seq.end), truncate(gDOut, 1, seq.end)
        pipelines, arrays = (do, errors, s), (douts, gErrors, gStates)
        for j in seq_layout.chunks_of_block(part, n, parts):
            token = seq.chunk_start(j)
            chunk = seq_layout.chunk_index(token, sequence, length)
            place = ChunkPlace(chunk, head, sequence, token, seq)
            k.fill(j, keys, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            q.fill(j, queries, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            for panel in range(STAGES - 1):
                value_panels.fill(pipelines, arrays, panel, panels, place)
            channels.cumsum_gates(b, channels.load_gates(gGates, seq, token, head))

            # the parts of gradients that come from states, and the scores dP and G, by panels of values
            scores, dq, dk_write, dk_read = zeros(PAIRS), zeros(OUT), zeros(OUT), zeros(OUT)
            dbeta, state_dots = zeros(COL_VEC), lane_col_sum(zeros(OUT))
            for panel in range(panels):
                if STAGES == 1:
                    thread_block.sync(UNFENCED)
                    value_panels.fill(pipelines, arrays, panel, panels, place)
                do_rows = subtile(do.wait(panel), ROWS, rank)  # its barrier: all warps have read the previous panel
                error_tile, states = errors.wait(panel), s.wait(panel)
                if STAGES > 1:
                    fill_panel = int32(panel + STAGES - 1)
                    value_panels.fill(pipelines, arrays, fill_panel, panels, place)
                e_tile = subtile(error_tile, CHUNK, 0)
                e_rows, z_rows = subtile(e_tile, ROWS, rank), subtile(subtile(error_tile, CHUNK, 1), ROWS, rank)
                pair_tile = subtile(e_tile, FAR, pair_half)
                if computes_g:
                    scores = mma_ABt(scores, z_rows, pair_tile)
                else:
                    scores = mma_ABt(scores, do_rows, pair_tile)
                    e_values, z_values = load(e_rows, ERRORS, fenced=False), load(z_rows, ERRORS, fenced=False)
                    dbeta = dbeta + row_sum(fp32(e_values) * fp32(z_values))
                state, d_state = subtile(states, PANEL, 0, PART, quarter), subtile(states, PANEL, 1, PART, quarter)
                dq = mma_AB(dq, do_rows, state)
                dk_read = mma_AB(dk_read, z_rows, state)
                dk_write = mma_AB(dk_write, e_rows, d_state)
                if WITH_GATES and rank_half == panel % 2:
                    products = fp32(load(subtile(state, ROWS, rank_parity), pairs.operand, fenced=False))
                    products = products * fp32(load(subtile(d_state, ROWS, rank_parity), pairs.operand, fenced=False))
                    state_dots = state_dots + lane_col_sum(products)
            beta_rows = load(gChunkBeta, COL_VEC, (chunk, head, row))
            beta = load(gChunkBeta, PAIRS.row_vec, (chunk, head, int32(FAR * pair_half)))
            rows, cols = warpgroup.row_index(COL_VEC), col_index(PAIRS.row_vec) + float32(FAR * pair_half)
            if computes_g:
                scores = scores * beta * (0.0 - beta_rows)
                rows = rows - 1.0
            else:
                scores = scores * (beta * scale)
                if pair_half == 0:
                    store(truncate(gDBeta, 1, seq.end), dbeta, (seq.batch, int32(token + row), head), cols=1)
            w_tile, rounded = subtile(w, CHUNK, computes_g), INPUT(where(less(rows, cols), 0.0, scores))
            pairs.store_scores(w_tile, columns(rounded, ROWS, 0), rank, 2 * pair_half)
            pairs.store_scores(w_tile, columns(rounded, ROWS, 1), rank, 2 * pair_half + 1)
            tiles, dots = DeltaPairTiles(q.wait(j), k.wait(j), b, x, keys_x, w), finish_sum(state_dots)
            sums = decay_products(dq, dk_read, dk_write, dots, tiles, carried, beta_rows, scale)
            size, inverse = int32(CHUNK), float32(1 / CHUNK)
            while size > 1:
                sums = pairs.add_level(sums, tiles, size, inverse)
                size, inverse = size >> 1, inverse * 2.0
            (dq, dk, r), diagonal = sums, pairs.load_diagonal(w, rank)
            dq, dk = dq + pairs.load_rows(tiles.k) * diagonal, dk + pairs.load_rows(tiles.q) * diagonal
            at = seq.batch, int32(token + row), head, int32(PART * quarter)
            store(truncate(gDQ, 1, seq.end), OUTPUT(dq), at, 1, 3, OUTPUT_BYTES)
            store(truncate(gDK, 1, seq.end), OUTPUT(dk), at, 1, 3, OUTPUT_BYTES)
            if WITH_GATES:
                thread_block.sync(UNFENCED)  # all have read b
                channels.store_gate_gradients(gDGates, gGates, b, r, carried, seq, token, head)
            thread_block.sync(UNFENCED)
        if VARLEN and WITH_GATES:
            for j in range(part, padding.num_chunks(), parts):
                at = padding.batch, int32(padding.chunk_start(j) + row), head, int32(PART * quarter)
                store(gDGates, zeros(OUT), at, 1, 3, False)

    return differentiate, smem
