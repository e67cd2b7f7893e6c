"""Gradients of the delta rule's queries, keys, betas and gates where each channel of the keys has a decay, chunk by chunk in
any order, from the states before each chunk, the gradients of those after it, E and Z (parts/recurrent/delta_channels.py has
the equations).

A block has some chunks of a head. Its eight warps are two warpgroups of 16 tokens a warp, each with half of the channels of
the keys; besides, the first makes dP, the second G. First they go over the columns of values in panels of 32, whose tiles
cp.async brings while the panel before is multiplied. Then come the pairs of tokens, level by level, as in
channel_gradients_ampere.py, one half of a warp's channels (a side) after the other: of all at once registers would spill."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import float32, int32

from ops import (
    abs,
    col_index,
    col_sum,
    columns,
    divmod,
    equal,
    exp2,
    finish_sum,
    hstack,
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
from ops import block as thread_block
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
    SIDE = rt(ROWS, HALF // 2, fp32)
    KEYS, OPERAND, ERRORS, SCORES = (rt(ROWS, cols, INPUT) for cols in (HALF, HALF // 2, PANEL, ROWS))
    OUTPUT, OUTPUT_BYTES = (fp32, True) if config.unrounded else (INPUT, VECTOR_BYTES)
    KEY, STATE = (st(rows, config.key_dim, INPUT, width=SIDE.cols * INPUT.itemsize) for rows in (CHUNK, 2 * PANEL))
    smem = shared(
        q=pipeline(KEY, 1, WARPS),
        k=pipeline(KEY, 1, WARPS),
        do=pipeline(st(CHUNK, PANEL, INPUT), STAGES, WARPS),
        errors=pipeline(st(2 * CHUNK, PANEL, INPUT), STAGES, WARPS),
        s=pipeline(STATE, STAGES, WARPS),
        b=st(CHUNK, config.key_dim, fp32, width=SIDE.cols * fp32.itemsize),
        x=KEY,
        keys_x=KEY,
        w=st(HALVES * CHUNK, CHUNK, INPUT, width=NARROW),
        carried=sv(WARPS * HALF, fp32),
    )

    @inlined
    def fill(do, errors, s, gDOut, gErrors, gStates, panel, panels, batch, token, head, chunk):
        """Start to copy a panel of a chunk's values, if there are so many."""
        col = int32(PANEL * panel)
        do.fill(panel, gDOut, (batch, token, head, col), 1, 3, panels, VECTOR_BYTES)
        errors.fill(panel, gErrors, (chunk, head, 0, col), end=panels)
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
    def part(tile, side):
        """A warp's tokens in one of the two sides of its channels."""
        return subtile(tile, ROWS, warpgroup.rank(), SIDE.cols, 2 * warpgroup.id() + side)

    @inlined
    def load_rows(tile, side):
        """A warp's tokens and one side of its channels, of the queries, keys or rows of X."""
        return fp32(load(part(tile, side), OPERAND, fenced=False))

    @inlined
    def decay_products(dq, read, written, dots, tiles, beta, scale, side):
        """dq, dk and r of one side of a warp's channels, as far as they come from states, from products with these. dots: of
        <S, dS>, the warp's part."""
        queries, keys, b, carried = tiles[0], tiles[1], tiles[2], tiles[6]
        at = int32(2 * warpgroup.id() + side)
        last = load_row(subtile(b, CHUNK, 0, SIDE.cols, at), SIDE.row_vec, CHUNK - 1, fenced=False)
        sums = load(part(b, side), SIDE, fenced=False)
        decay = exp2(sums)
        dq = columns(dq, SIDE.cols, side) * (decay * scale)
        read = columns(read, SIDE.cols, side) * (decay * (0.0 - beta))
        written = columns(written, SIDE.cols, side) * (exp2(last - sums) * beta)
        r = zeros(SIDE)
        if WITH_GATES:
            key = load_rows(keys, side)
            r = key * written
            of_side = int32(2 * (WARPGROUP * warpgroup.id() + warpgroup.rank()) + side)
            store(subtile(carried, SIDE.cols, of_side), col_sum(r) + exp2(last) * columns(dots, SIDE.cols, side))
            r = load_rows(queries, side) * dq + key * read - r
        return dq, read + written, r

    @inlined
    def add_level(sums, wx, keys_wx, e, x, keys_x, is_later):
        """dq, dk and r with a level's products, of dP and of G. is_later: 1 or 0."""
        dq, dk, r = sums
        if WITH_GATES:
            r = r + (wx * fp32(x) + keys_wx * fp32(keys_x)) * (is_later * 2.0 - 1.0)
        later = e * is_later
        return dq + wx * later, dk + wx * (e - later) + keys_wx * e, r

    @inlined
    def decayed(tiles, e, is_later, side):
        """X of dP and of G, a warp's tokens at a level. is_later: are they in the later halves of their groups?"""
        queries, keys = tiles[0], tiles[1]
        key = load_rows(keys, side) * e
        return INPUT(where(is_later, load_rows(queries, side) * e, key)), INPUT(key)

    @inlined
    def meet_others(count, sums, tiles, first, is_later, others, side):
        """dq, dk and r with a level at which a warp's tokens meet those of other warps: block number `others` of `count`
        tokens. first: the first token of the later half of their group. The block meets."""
        queries, keys, b, x, keys_x, w, _ = tiles
        at, rank = int32(2 * warpgroup.id() + side), warpgroup.rank()
        anchor = load_row(subtile(b, CHUNK, 0, SIDE.cols, at), SIDE.row_vec, first, fenced=False)
        e = exp2(0.0 - abs(load(part(b, side), SIDE, fenced=False) - anchor))
        mine, keys_mine = decayed(tiles, e, is_later, side)
        store(part(x, side), mine)
        store(part(keys_x, side), keys_mine)
        thread_block.sync(FENCED)
        p, g = subtile(w, CHUNK, 0), subtile(w, CHUNK, 1)
        wx = mma_AB(zeros(SIDE), subtile(p, ROWS, rank, count, others), subtile(x, count, others, SIDE.cols, at))
        keys_wx = mma_AB(zeros(SIDE), subtile(g, ROWS, rank, count, others), subtile(keys_x, count, others, SIDE.cols, at))
        return add_level(sums, wx, keys_wx, e, mine, keys_mine, float32(is_later))

    @inlined
    def meet_near(sums, tiles, side):
        """dq, dk and r with the levels at which a warp's 16 tokens meet each other."""
        queries, keys, b, x, keys_x, w, _ = tiles
        rank = warpgroup.rank()
        p = load(subtile(subtile(w, CHUNK, 0), ROWS, rank, ROWS, rank), SCORES, fenced=False)
        g = load(subtile(subtile(w, CHUNK, 1), ROWS, rank, ROWS, rank), SCORES, fenced=False)
        row, col, size, inverse = row_index(ROW), col_index(COL), int32(ROWS), float32(1 / ROWS)
        while size > 1:
            row_group, col_group = row * inverse // 1, col * inverse // 1
            row_half, col_half = row * (2.0 * inverse) // 1, col * (2.0 * inverse) // 1
            is_later, is_pair = row_half - row_group * 2.0, equal(row_group, col_group) & not_equal(row_half, col_half)
            rows = part(b, side)
            anchor = load_row_of_group(rows, SIDE, size, size >> 1, fenced=False)
            e = exp2(0.0 - abs(load(rows, SIDE, fenced=False) - anchor))
            mine, keys_mine = decayed(tiles, e, is_later, side)
            wx = mma_AB(zeros(SIDE), INPUT(where(is_pair, fp32(p), 0.0)), swap_layout(mine))
            keys_wx = mma_AB(zeros(SIDE), INPUT(where(is_pair, fp32(g), 0.0)), swap_layout(keys_mine))
            sums = add_level(sums, wx, keys_wx, e, mine, keys_mine, is_later)
            size, inverse = size >> 1, inverse * 2.0
        dq, dk, r = sums
        diagonal = row_sum(where(equal(row, col), fp32(p), 0.0))
        return dq + load_rows(keys, side) * diagonal, dk + load_rows(queries, side) * diagonal, r

    @inlined
    def meet(sums, tiles, side):
        """dq, dk and r of one side of a warp's channels with all pairs of tokens. The block meets."""
        rank = warpgroup.rank()
        late = rank // 2
        odd = rank - 2 * late
        sums = meet_others(FAR, sums, tiles, FAR, late, 1 - late, side)
        thread_block.sync(FENCED)
        sums = meet_others(ROWS, sums, tiles, int32(FAR * late + ROWS), odd, int32(rank + 1 - 2 * odd), side)
        return meet_near(sums, tiles, side)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: array(4, INPUT), gK: array(4, INPUT), gDOut: array(4, INPUT), gGates: array(4), gChunkBeta: array(3),
        gErrors: array(4, INPUT), gStates: array(4, INPUT), gDQ: array(4, OUTPUT), gDK: array(4, OUTPUT), gDBeta: array(3),
        gDGates: array(4), gCuSeqlens: ENDS, length: INT, panels: INT, parts: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Each of the `parts` blocks of a head of a sequence has as many of its chunks. gErrors: E above Z. gStates: S^T and
        dS^T by panels. Gates' gradients of padding are set to 0."""
        q, k, do, errors, s, b, x, keys_x, w, carried = smem.open()
        index, part = divmod(cuda.blockIdx.x, parts)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n, half, rank = seq.num_chunks(), warpgroup.id(), warpgroup.rank()
        row, late = int32(ROWS * rank), rank // 2
        odd = rank - 2 * late
        queries, keys, douts = truncate(gQ, 1, seq.end), truncate(gK, 1, seq.end), truncate(gDOut, 1, seq.end)
        for j in seq_layout.chunks_of_block(part, n, parts):
            token = seq.chunk_start(j)
            chunk = seq_layout.chunk_index(token, sequence, length)
            k.fill(j, keys, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            q.fill(j, queries, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            for panel in range(STAGES - 1):
                fill(do, errors, s, douts, gErrors, gStates, panel, panels, seq.batch, token, head, chunk)
            channels.cumsum_gates(b, channels.load_gates(gGates, seq, token, head))

            # what goes through states, and the scores of dP and G, by panels of values
            scores, dq, written, read = zeros(TILE), zeros(OUT), zeros(OUT), zeros(OUT)
            dbeta, state_dots = zeros(COL_VEC), lane_col_sum(zeros(OUT))
            for panel in range(panels):
                if STAGES == 1:
                    thread_block.sync(FENCED)
                    fill(do, errors, s, douts, gErrors, gStates, panel, panels, seq.batch, token, head, chunk)
                do_rows = subtile(do.wait(panel), ROWS, rank)  # the block has met: all have read the panel before
                error_tile, states = errors.wait(panel), s.wait(panel)
                if STAGES > 1:
                    later = int32(panel + STAGES - 1)
                    fill(do, errors, s, douts, gErrors, gStates, later, panels, seq.batch, token, head, chunk)
                e_tile = subtile(error_tile, CHUNK, 0)
                e_rows, z_rows = subtile(e_tile, ROWS, rank), subtile(subtile(error_tile, CHUNK, 1), ROWS, rank)
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
                    products = fp32(load(subtile(state, ROWS, odd), KEYS, fenced=False))
                    products = products * fp32(load(subtile(d_state, ROWS, odd), KEYS, fenced=False))
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
            tiles, dots = (query_tile, key_tile, b, x, keys_x, w, carried), finish_sum(state_dots)
            left = decay_products(dq, read, written, dots, tiles, beta_rows, scale, 0)
            right = decay_products(dq, read, written, dots, tiles, beta_rows, scale, 1)
            thread_block.sync(FENCED)
            at = seq.batch, int32(token + row), head, int32(HALF * half)
            dq, dk, left_r = meet(left, tiles, 0)
            store(truncate(gDQ, 1, seq.end), OUTPUT(dq), at, 1, 3, OUTPUT_BYTES)
            store(truncate(gDK, 1, seq.end), OUTPUT(dk), at, 1, 3, OUTPUT_BYTES)
            at = seq.batch, int32(token + row), head, int32(HALF * half + SIDE.cols)
            dq, dk, right_r = meet(right, tiles, 1)
            store(truncate(gDQ, 1, seq.end), OUTPUT(dq), at, 1, 3, OUTPUT_BYTES)
            store(truncate(gDK, 1, seq.end), OUTPUT(dk), at, 1, 3, OUTPUT_BYTES)
            if WITH_GATES:
                thread_block.sync(FENCED)  # all have read b
                channels.store_gate_gradients(gDGates, gGates, b, hstack(left_r, right_r), carried, seq, token, head)
            thread_block.sync(FENCED)
        if VARLEN and WITH_GATES:
            padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for j in range(part, padding.num_chunks(), parts):
                at = padding.batch, int32(padding.chunk_start(j) + row), head, int32(HALF * half)
                store(gDGates, zeros(OUT), at, 1, 3, False)

    return differentiate, smem
