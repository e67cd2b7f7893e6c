"""Gradients of the delta rule's queries, keys, betas and gates where each channel of the keys has a decay, chunk by chunk in any
order, from the states before each chunk, the gradients of those after it, E and Z (parts/recurrent/delta_channels.py has the
equations).

A block has some chunks of a head. Its eight warps are two warpgroups of 16 tokens a warp, each with half of the channels of the
keys; besides, the first makes dP, the second G. First they go over the columns of values in panels of 32, whose tiles cp.async
brings while the panel before is multiplied. Then come the pairs of tokens, level by level, as in channel_gradients_ampere.py: dP
with queries and keys, G with keys."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import float32, int32

from ops import block as thread_block
from ops import (
    abs,
    col_index,
    col_sum,
    columns,
    divmod,
    equal,
    exp2,
    finish_sum,
    lane_col_sum,
    less,
    load,
    load_row,
    load_row_of_group,
    mma_AB,
    mma_ABt,
    not_equal,
    row_index,
    row_sum,
    store,
    subtile,
    swap_layout,
    transpose,
    truncate,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.cp_async import PIECES
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import LANES, WARPGROUP
from tiles.targets import MEDIUM, Target

from ..parts.recurrent.channel_chunks import FENCED, HALVES, ROWS, ChunkChannels
from ..parts.recurrent.delta_chunks import PANEL, DeltaChunkConfig, chunk_forms
from ..parts.recurrent.gates import COL_VEC, ROW_VEC, TILE
from ..parts.recurrent.tokens import CHUNK, SequenceLayout

WARPS = WARPGROUP * HALVES  # of a block
FAR = CHUNK // 2  # tokens that a warp meets at the first level
SQUARE = rt(ROWS, ROWS, fp32)  # scores of a warp's tokens with each other
ROW, COL = SQUARE.col_vec, SQUARE.row_vec
NARROW = 32  # bytes of a panel of tiles whose columns are taken 16 at a time


@dataclass(frozen=True)
class Config(DeltaChunkConfig):
    """A kernel's configuration. unrounded: are dQ and dK float32, to be added over a group? with_gates: are the gates' gradients
    wanted? stages: panels of values in flight."""

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
    for form in chunk_forms(everything):
        config = Config(*form)
        if config.gated and target.shared_bytes >= MEDIUM:
            yield config
            if everything and config.dtype is bf16 and config.vector_bytes == PIECES[0]:
                yield from (replace(config, unrounded=True), replace(config, stages=1), replace(config, with_gates=False))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, STAGES, WITH_GATES = config.dtype, config.vector_bytes, config.stages, config.with_gates
    channels, seq_layout = ChunkChannels(config.key_dim), SequenceLayout(config.varlen)
    HALF, OUT, VARLEN = channels.half, channels.rows, config.varlen
    OPERAND, ERRORS = rt(ROWS, HALF, INPUT), rt(ROWS, PANEL, INPUT)
    OUTPUT, OUTPUT_BYTES = (fp32, True) if config.unrounded else (INPUT, VECTOR_BYTES)
    KEY, STATE = (st(rows, config.key_dim, INPUT, width=HALF * INPUT.itemsize) for rows in (CHUNK, 2 * PANEL))
    smem = shared(
        q=pipeline(KEY, 1, WARPS),
        k=pipeline(KEY, 1, WARPS),
        do=pipeline(st(CHUNK, PANEL, INPUT), STAGES, WARPS),
        e=pipeline(st(2 * CHUNK, PANEL, INPUT), STAGES, WARPS),
        s=pipeline(STATE, STAGES, WARPS),
        b=channels.sums,
        x=KEY,
        keys_x=KEY,
        w=st(HALVES * CHUNK, CHUNK, INPUT, width=NARROW),
        carried=sv(WARPS * HALF, fp32),
    )

    @inlined
    def fill(do, e, s, gDOut, gErrors, gStates, panel, panels, batch, token, head, chunk):
        """Start to copy a panel of a chunk's values, if there are so many."""
        col = int32(PANEL * panel)
        do.fill(panel, gDOut, (batch, token, head, col), 1, 3, panels, VECTOR_BYTES)
        e.fill(panel, gErrors, (chunk, head, 0, col), end=panels)
        s.fill(panel, gStates, (chunk, head, int32(2 * col), 0), end=panels)

    @inlined
    def store_pairs(w, scores, rank, other):
        """Write the scores of a warp's tokens with those of a warp before it, or with each other, to both places in W."""
        mirrored = transpose(scores)
        if other < rank:
            store(subtile(w, ROWS, rank, ROWS, other), scores)
            store(subtile(w, ROWS, other, ROWS, rank), mirrored)
        elif other == rank:
            both = where(less(row_index(ROW), col_index(COL)), fp32(mirrored), fp32(scores))
            store(subtile(w, ROWS, rank, ROWS, rank), INPUT(both))

    @inlined
    def load_rows(tile):
        """A warp's part of the queries or keys."""
        return fp32(load(channels.part(tile), OPERAND, fenced=False))

    @inlined
    def factor(sums, anchor):
        """E, a warp's tokens at a level."""
        return exp2(0.0 - abs(load(channels.part(sums), OUT, fenced=False) - anchor))

    @inlined
    def add_level(dq, dk, r, wx, keys_wx, e, x, keys_x, is_later):
        """dq, dk and r with a level's products, of dP and of G."""
        decayed_wx = wx * e
        dq = dq + where(is_later, decayed_wx, 0.0)
        dk = dk + (where(is_later, 0.0, decayed_wx) + keys_wx * e)
        if WITH_GATES:
            products = wx * fp32(x) + keys_wx * fp32(keys_x)
            r = r + where(is_later, products, 0.0 - products)
        return dq, dk, r

    @inlined
    def meet_others(count, dq, dk, r, tiles, anchor, is_later, others):
        """dq, dk and r with a level at which a warp's tokens meet those of other warps: block number `others` of `count`
        tokens."""
        queries, keys, sums, x, keys_x, w = tiles
        half, rank = warpgroup.id(), warpgroup.rank()
        e = factor(sums, anchor)
        mine_keys = INPUT(load_rows(keys) * e)
        mine = mine_keys
        if is_later:
            mine = INPUT(load_rows(queries) * e)
        store(channels.part(x), mine)
        store(channels.part(keys_x), mine_keys)
        thread_block.sync(FENCED)
        p, g = subtile(w, CHUNK, 0), subtile(w, CHUNK, 1)
        wx = mma_AB(zeros(OUT), subtile(p, ROWS, rank, count, others), subtile(x, count, others, HALF, half))
        keys_wx = mma_AB(zeros(OUT), subtile(g, ROWS, rank, count, others), subtile(keys_x, count, others, HALF, half))
        return add_level(dq, dk, r, wx, keys_wx, e, mine, mine_keys, is_later)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: array(4, INPUT), gK: array(4, INPUT), gDOut: array(4, INPUT), gGates: array(4), gChunkBeta: array(3),
        gErrors: array(4, INPUT), gStates: array(4, INPUT), gDQ: array(4, OUTPUT), gDK: array(4, OUTPUT), gDBeta: array(3),
        gDGates: array(4), gCuSeqlens: ENDS, length: INT, panels: INT, parts: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Each of the `parts` blocks of a head of a sequence has as many of its chunks. gErrors: E above Z. gStates: S^T and
        dS^T by panels. Gates' gradients of padding are set to 0."""
        q, k, do, e, s, b, x, keys_x, w, carried = smem.open()
        index, part = divmod(cuda.blockIdx.x, parts)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n, half, rank = seq.num_chunks(), warpgroup.id(), warpgroup.rank()
        warp, row, late = int32(WARPGROUP * half + rank), int32(ROWS * rank), rank // 2
        odd = rank - 2 * late
        queries, keys, douts = truncate(gQ, 1, seq.end), truncate(gK, 1, seq.end), truncate(gDOut, 1, seq.end)
        for j in seq_layout.chunks_of_block(part, n, parts):
            token = seq.chunk_start(j)
            chunk = seq_layout.chunk_index(token, sequence, length)
            k.fill(j, keys, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            q.fill(j, queries, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            for panel in range(STAGES - 1):
                fill(do, e, s, douts, gErrors, gStates, panel, panels, seq.batch, token, head, chunk)
            channels.cumsum_gates(b, channels.load_gates(gGates, seq, token, head))

            # what goes through states, and the scores of dP and G, by panels of values
            scores, dq, written, read = zeros(TILE), zeros(OUT), zeros(OUT), zeros(OUT)
            dbeta, state_dots = zeros(COL_VEC), lane_col_sum(zeros(OUT))
            for panel in range(panels):
                if STAGES == 1:
                    thread_block.sync(FENCED)
                    fill(do, e, s, douts, gErrors, gStates, panel, panels, seq.batch, token, head, chunk)
                do_rows = subtile(do.wait(panel), ROWS, rank)  # the block has met: all have read the panel before
                errors, states = e.wait(panel), s.wait(panel)
                if STAGES > 1:
                    later = int32(panel + STAGES - 1)
                    fill(do, e, s, douts, gErrors, gStates, later, panels, seq.batch, token, head, chunk)
                e_tile = subtile(errors, CHUNK, 0)
                e_rows, z_rows = subtile(e_tile, ROWS, rank), subtile(subtile(errors, CHUNK, 1), ROWS, rank)
                if half == 0:
                    scores = mma_ABt(scores, do_rows, e_tile)
                    e_values, z_values = load(e_rows, ERRORS, fenced=False), load(z_rows, ERRORS, fenced=False)
                    dbeta = dbeta + row_sum(fp32(e_values) * fp32(z_values))
                else:
                    scores = mma_ABt(scores, z_rows, e_tile)
                state, d_state = subtile(states, PANEL, 0, HALF, half), subtile(states, PANEL, 1, HALF, half)
                dq = mma_AB(dq, do_rows, state)
                read = mma_AB(read, z_rows, state)
                written = mma_AB(written, e_rows, d_state)
                if WITH_GATES and late == panel % 2:
                    products = fp32(load(subtile(state, ROWS, odd), OPERAND, fenced=False))
                    products = products * fp32(load(subtile(d_state, ROWS, odd), OPERAND, fenced=False))
                    state_dots = state_dots + lane_col_sum(products)
            beta_rows, beta = load(gChunkBeta, COL_VEC, (chunk, head, row)), load(gChunkBeta, ROW_VEC, (chunk, head, 0))
            if half == 0:
                store(truncate(gDBeta, 1, seq.end), dbeta, (seq.batch, int32(token + row), head), cols=1)
                scores = warpgroup.causal(scores * (beta * scale), 0, 0.0)
            else:
                scores = warpgroup.causal(scores * beta * (0.0 - beta_rows), -1, 0.0)
            mine_w, rounded = subtile(w, CHUNK, half), INPUT(scores)
            store_pairs(mine_w, columns(rounded, ROWS, 0), rank, 0)
            store_pairs(mine_w, columns(rounded, ROWS, 1), rank, 1)
            store_pairs(mine_w, columns(rounded, ROWS, 2), rank, 2)
            store_pairs(mine_w, columns(rounded, ROWS, 3), rank, 3)
            query_tile, key_tile = q.wait(j), k.wait(j)
            sums, last = load(channels.part(b), OUT, fenced=False), channels.load_last(b)
            decay = exp2(sums)
            dq = dq * (decay * scale)
            read = read * (decay * (0.0 - beta_rows))
            written = written * (exp2(last - sums) * beta_rows)
            r = zeros(OUT)
            if WITH_GATES:
                key = load_rows(key_tile)
                writes = key * written
                store(subtile(carried, HALF, warp), col_sum(writes) + exp2(last) * finish_sum(state_dots))
                r = load_rows(query_tile) * dq + key * read - writes
            dk = read + written

            # the first level: 32 tokens of two other warps
            tiles, b_half = (query_tile, key_tile, b, x, keys_x, w), subtile(b, CHUNK, 0, HALF, half)
            anchor = load_row(b_half, OUT.row_vec, FAR, fenced=False)
            dq, dk, r = meet_others(FAR, dq, dk, r, tiles, anchor, late, 1 - late)
            thread_block.sync(FENCED)

            # the second one: 16 tokens of another warp
            anchor = load_row(b_half, OUT.row_vec, int32(FAR * late + ROWS), fenced=False)
            dq, dk, r = meet_others(ROWS, dq, dk, r, tiles, anchor, odd, int32(rank + 1 - 2 * odd))

            # the others: within a warp's 16 tokens
            p = load(subtile(subtile(w, CHUNK, 0), ROWS, rank, ROWS, rank), rt(ROWS, ROWS, INPUT), fenced=False)
            g = load(subtile(subtile(w, CHUNK, 1), ROWS, rank, ROWS, rank), rt(ROWS, ROWS, INPUT), fenced=False)
            rows, cols, size, inverse = row_index(ROW), col_index(COL), int32(ROWS), float32(1 / ROWS)
            while size > 1:
                row_half, col_half = rows * (2.0 * inverse) // 1, cols * (2.0 * inverse) // 1
                row_group, col_group = rows * inverse // 1, cols * inverse // 1
                is_later, is_near = row_half - row_group * 2.0, equal(row_group, col_group)
                is_pair = is_near & not_equal(row_half, col_half)
                level = factor(b, load_row_of_group(channels.part(b), OUT, size, size >> 1, fenced=False))
                mine_keys = load_rows(key_tile) * level
                mine = INPUT(where(is_later, load_rows(query_tile) * level, mine_keys))
                mine_keys = INPUT(mine_keys)
                wx = mma_AB(zeros(OUT), INPUT(where(is_pair, fp32(p), 0.0)), swap_layout(mine))
                keys_wx = mma_AB(zeros(OUT), INPUT(where(is_pair, fp32(g), 0.0)), swap_layout(mine_keys))
                dq, dk, r = add_level(dq, dk, r, wx, keys_wx, level, mine, mine_keys, is_later)
                size, inverse = size >> 1, inverse * 2.0
            diagonal = row_sum(where(equal(rows, cols), fp32(p), 0.0))
            at = seq.batch, int32(token + row), head, int32(HALF * half)
            store(truncate(gDQ, 1, seq.end), OUTPUT(dq + load_rows(key_tile) * diagonal), at, 1, 3, OUTPUT_BYTES)
            store(truncate(gDK, 1, seq.end), OUTPUT(dk + load_rows(query_tile) * diagonal), at, 1, 3, OUTPUT_BYTES)
            if WITH_GATES:
                thread_block.sync(FENCED)  # all have read b
                channels.store_gate_gradients(gDGates, gGates, b, r, carried, seq, token, head)
            thread_block.sync(FENCED)
        if VARLEN and WITH_GATES:
            padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for j in range(part, padding.num_chunks(), parts):
                at = padding.batch, int32(padding.chunk_start(j) + row), head, int32(HALF * half)
                store(gDGates, zeros(OUT), at, 1, 3, False)

    return differentiate, smem
