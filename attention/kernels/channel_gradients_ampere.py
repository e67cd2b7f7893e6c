"""Gradients of linear attention's queries, keys, values and gates where each channel of the keys has a decay, chunk by chunk in
any order, from the states before each chunk and the gradients of those after it (parts/recurrent/channel_chunks.py has the
equations).

A block has some chunks of a head. Its eight warps are two warpgroups of 16 tokens a warp, each with half of the channels of the
keys. First come the pairs of tokens, level by level: at the first two, other warps' tokens come through shared memory; at the
others a warp has both halves of each group itself. These four levels are one product if numbers hold the decay from the first
to the middle and from there to the last of its tokens (meet_anchored). Then they go over the columns of values in panels of 32,
whose states cp.async brings while the panel before is multiplied; of a panel's dV each warpgroup makes half. A is the sum of
two tiles, one of each warpgroup's channels, which dO is multiplied by one after the other."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import float32, int32

from ops import (
    abs,
    col_index,
    col_sum,
    divmod,
    equal,
    exp2,
    finish_sum,
    lane_col_sum,
    less,
    load,
    load_row,
    load_row_of_group,
    minimum,
    mma_AB,
    mma_ABt,
    mma_AtB,
    not_equal,
    row_index,
    row_sum,
    store,
    subtile,
    swap_layout,
    tile_min,
    truncate,
    warpgroup,
    where,
    zeros,
)
from ops import block as thread_block
from tiles import bf16, fp16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.cp_async import PIECES
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import WARPGROUP
from tiles.targets import LARGE, MEDIUM, Target

from ..parts.recurrent.channel_chunks import (
    FENCED,
    HALVES,
    KEY_DIMS,
    ROWS,
    VALUE_DIMS,
    ChannelChunkConfig,
    ChunkChannels,
    chunk_forms,
)
from ..parts.recurrent.delta_chunks import PANEL
from ..parts.recurrent.tokens import CHUNK, SequenceLayout

WARPS = WARPGROUP * HALVES  # of a block
FAR = CHUNK // 2  # tokens that a warp meets at the first level
SQUARE, PAIRS = rt(ROWS, ROWS, fp32), rt(ROWS, FAR, fp32)  # scores of a warp's tokens with so many others
ROW, COL = SQUARE.col_vec, SQUARE.row_vec
NARROW = 32  # bytes of a panel of tiles whose columns are taken 16 at a time
LEAST_DECAY = {bf16: -64.0, fp16: 0.0}  # log2 of the least decay by half of a warp's tokens that X holds in both directions


@dataclass(frozen=True)
class Config(ChannelChunkConfig):
    """A kernel's configuration. value_dim: the columns of values, padded. with_gates: are the gates' gradients wanted?
    unrounded: are dQ and dK float32, to be added over a group? unrounded_values: is dV float32? stages: panels of states in
    flight."""

    value_dim: int = 128
    with_gates: bool = True
    unrounded: bool = False
    unrounded_values: bool = False
    stages: int = 2
    label = "gradients in chunks, gates by channel"

    def __str__(self):
        flags = ", gates" * self.with_gates + ", float32" * self.unrounded + ", float32 dv" * self.unrounded_values
        return f"{super().__str__()}, Dv {self.value_dim}{flags}" + ", one stage" * (self.stages == 1)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and 16 bytes, with all other dtypes and bytes if `everything`."""
    for form in chunk_forms(everything):
        config = replace(Config(*form), stages=stages_for(target.shared_bytes))
        if not serves_shape(config.key_dim, config.value_dim, config.vector_bytes, target.shared_bytes):
            continue
        yield config
        if everything and config.dtype is bf16 and config.vector_bytes == PIECES[0] and not config.varlen:
            for value_dim in VALUE_DIMS:
                if value_dim != config.value_dim and serves_shape(config.key_dim, value_dim, PIECES[0], target.shared_bytes):
                    yield replace(config, value_dim=value_dim)
            yield replace(config, with_gates=False)
            yield replace(config, unrounded=True, unrounded_values=True)


def stages_for(shared_bytes: int) -> int:
    """How many panels of states are in flight on a GPU with so much shared memory."""
    return 2 if shared_bytes >= LARGE else 1


def serves_shape(key_dim: int, value_dim: int, vector_bytes: int, shared_bytes: int) -> bool:
    """Does the kernel hold so many channels and columns, padded? With the most channels and arrays that are not aligned to 16
    bytes registers would spill."""
    fits = shared_bytes >= (LARGE if value_dim == VALUE_DIMS[-1] else MEDIUM)
    return fits and (vector_bytes == PIECES[0] or key_dim < KEY_DIMS[-1])


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, STAGES, WITH_GATES = config.dtype, config.vector_bytes, config.stages, config.with_gates
    channels, seq_layout = ChunkChannels(config.key_dim), SequenceLayout(config.varlen)
    HALF, OUT = channels.half, channels.rows
    OPERAND = rt(ROWS, HALF, INPUT)
    VARLEN, LEAST = config.varlen, LEAST_DECAY[config.dtype]
    OUTPUT, OUTPUT_BYTES = (fp32, True) if config.unrounded else (INPUT, VECTOR_BYTES)
    VALUE, VALUE_STORE_BYTES = (fp32, True) if config.unrounded_values else (INPUT, VECTOR_BYTES)
    KEY, STATE = (st(rows, config.key_dim, INPUT, width=HALF * INPUT.itemsize) for rows in (CHUNK, 2 * PANEL))
    VALUES = st(CHUNK, config.value_dim, INPUT, width=NARROW)
    smem = shared(
        q=pipeline(KEY, 1, WARPS),
        k=pipeline(KEY, 1, WARPS),
        v=pipeline(VALUES, 1, WARPS),
        do=pipeline(VALUES, 1, WARPS),
        s=pipeline(STATE, STAGES, WARPS),
        b=channels.sums,
        x=KEY,
        w=st(CHUNK, CHUNK, INPUT, width=NARROW),
        a=st(HALVES * CHUNK, CHUNK, INPUT, width=NARROW),
        carried=sv(WARPS * HALF, fp32),
    )

    @inlined
    def fill_states(s, gStates, panel, panels, chunk, head):
        """Start to copy a panel of a chunk's states, if there are so many."""
        s.fill(panel, gStates, (chunk, head, int32(2 * PANEL * panel), 0), end=panels)

    @inlined
    def score_tokens(w, values, douts, rank, half, scale):
        """Write W, of which a warp has 16 rows and a warpgroup half of the columns."""
        p = mma_ABt(zeros(PAIRS), subtile(douts, ROWS, rank), subtile(values, FAR, half))
        p_t = mma_ABt(zeros(PAIRS), subtile(values, ROWS, rank), subtile(douts, FAR, half))
        row, col = warpgroup.row_index(PAIRS.col_vec), col_index(PAIRS.row_vec) + float32(FAR * half)
        store(subtile(w, ROWS, rank, FAR, half), INPUT(where(less(row, col), p_t, p) * scale))

    @inlined
    def load_rows(tile):
        """A warp's part of the queries or keys."""
        return fp32(load(channels.part(tile), OPERAND, fenced=False))

    @inlined
    def factor(sums, anchor):
        """E, a warp's tokens at a level."""
        return exp2(0.0 - abs(load(channels.part(sums), OUT, fenced=False) - anchor))

    @inlined
    def decayed(queries, keys, e, is_later):
        """X, a warp's tokens at a level. is_later: are they in the later halves of their groups?"""
        return INPUT(where(is_later, load_rows(queries), load_rows(keys)) * e)

    @inlined
    def add_level(dq, dk, r, wx, e, x, is_later):
        """dq, dk and r = q dq - k dk with a level's W X."""
        decayed_wx = wx * e
        dq = dq + where(is_later, decayed_wx, 0.0)
        dk = dk + where(is_later, 0.0, decayed_wx)
        if WITH_GATES:
            products = wx * fp32(x)
            r = r + where(is_later, products, 0.0 - products)
        return dq, dk, r

    @inlined
    def meet_others(SCORES, dq, dk, r, tiles, anchor, is_later, others, scale):
        """dq, dk and r with a level at which a warp's tokens meet those of other warps: block number `others` of so many tokens
        as SCORES, the type of their scores, has columns. Writes A."""
        queries, keys, sums, x, w, a = tiles
        half, rank = warpgroup.id(), warpgroup.rank()
        e = factor(sums, anchor)
        mine = decayed(queries, keys, e, is_later)
        store(channels.part(x), mine)
        thread_block.sync(FENCED)
        their_x = subtile(x, SCORES.cols, others, HALF, half)
        scores = mma_ABt(zeros(SCORES), mine, their_x) * scale
        scored = subtile(a, ROWS, int32(WARPGROUP * half + rank), SCORES.cols, others)
        store(scored, INPUT(where(is_later, scores, 0.0)))
        wx = mma_AB(zeros(OUT), subtile(w, ROWS, rank, SCORES.cols, others), their_x)
        return add_level(dq, dk, r, wx, e, mine, is_later)

    @inlined
    def meet_anchored(dq, dk, r, queries, keys, sums, middle, scores):
        """(dq, dk, r, A) with all pairs within a warp's tokens at once. Queries and keys are decayed from and to `middle`, the
        sums of the first token of the later half, so that factors may be above 1: e for a query and 1 / e for a key. A holds
        numbers that mean nothing where the key comes later."""
        e = exp2(load(channels.part(sums), OUT, fenced=False) - middle)
        x_q = INPUT(load_rows(queries) * e)
        wanted = where(less(col_index(COL), row_index(ROW)), scores, 0.0)
        of_keys = exp2(middle - load(channels.part(sums), OUT, fenced=False))
        x_k = INPUT(load_rows(keys) * of_keys)
        near = mma_ABt(zeros(SQUARE), x_q, x_k)
        wx = mma_AB(zeros(OUT), INPUT(wanted), swap_layout(x_k))
        dq = dq + wx * e
        if WITH_GATES:
            r = r + wx * fp32(x_q)
        wanted = where(less(row_index(ROW), col_index(COL)), scores, 0.0)
        wx = mma_AB(zeros(OUT), INPUT(wanted), swap_layout(x_q))
        dk = dk + wx * of_keys
        if WITH_GATES:
            r = r - wx * fp32(x_k)
        return dq, dk, r, near

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDOut: array(4, INPUT), gGates: array(4),
        gStates: array(4, INPUT), gDQ: array(4, OUTPUT), gDK: array(4, OUTPUT), gDV: array(4, VALUE), gDGates: array(4),
        gCuSeqlens: ENDS, length: INT, panels: INT, parts: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """Each of the `parts` blocks of a head of a sequence has as many of its chunks. gStates: S^T and dS^T by panels.
        Gradients of padding are set to 0."""
        q, k, v, do, s, b, x, w, a, carried = smem.open()
        index, part = divmod(cuda.blockIdx.x, parts)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n, half, rank = seq.num_chunks(), warpgroup.id(), warpgroup.rank()
        of_warp = int32(WARPGROUP * half + rank)
        queries, keys, values, douts = (
            truncate(gQ, 1, seq.end), truncate(gK, 1, seq.end), truncate(gV, 1, seq.end), truncate(gDOut, 1, seq.end),
        )  # fmt: skip
        for j in seq_layout.chunks_of_block(part, n, parts):
            token = seq.chunk_start(j)
            chunk = seq_layout.chunk_index(token, sequence, length)
            v.fill(j, values, (seq.batch, token, head, 0), 1, 3, n, VECTOR_BYTES)
            do.fill(j, douts, (seq.batch, token, head, 0), 1, 3, n, VECTOR_BYTES)
            q.fill(j, queries, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            k.fill(j, keys, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            for panel in range(STAGES - 1):
                fill_states(s, gStates, panel, panels, chunk, head)
            channels.cumsum_gates(b, channels.load_gates(gGates, seq, token, head))
            dout_tile, value_tile = do.wait(j, STAGES + 1), v.wait(j, STAGES + 1)
            score_tokens(w, value_tile, dout_tile, rank, half, scale)
            query_tile, key_tile = q.wait(j, STAGES - 1), k.wait(j, STAGES - 1)  # the barrier also shows w to all warps
            dq, dk, r = zeros(OUT), zeros(OUT), zeros(OUT)
            sums = subtile(b, CHUNK, 0, HALF, half)

            # the first level: 32 tokens of two other warps
            late, tiles = rank // 2, (query_tile, key_tile, b, x, w, a)
            anchor = load_row(sums, OUT.row_vec, FAR, fenced=False)
            dq, dk, r = meet_others(PAIRS, dq, dk, r, tiles, anchor, late, 1 - late, scale)
            thread_block.sync(FENCED)

            # the second one: 16 tokens of another warp
            odd = rank - 2 * late
            anchor = load_row(sums, OUT.row_vec, int32(FAR * late + ROWS), fenced=False)
            dq, dk, r = meet_others(SQUARE, dq, dk, r, tiles, anchor, odd, int32(rank + 1 - 2 * odd), scale)

            # the others: within a warp's 16 tokens
            near, scores = zeros(SQUARE), load(subtile(w, ROWS, rank, ROWS, rank), rt(ROWS, ROWS, INPUT), fenced=False)
            row, col, size, inverse = row_index(ROW), col_index(COL), int32(ROWS), float32(1 / ROWS)
            middle = load_row(channels.part(b), OUT.row_vec, ROWS // 2, fenced=False)
            first = load_row(channels.part(b), OUT.row_vec, 0, fenced=False)
            final = load_row(channels.part(b), OUT.row_vec, ROWS - 1, fenced=False)
            if tile_min(minimum(middle - first, final - middle)) >= LEAST:
                dq, dk, r, near = meet_anchored(dq, dk, r, query_tile, key_tile, b, middle, fp32(scores))
                size = int32(1)
            while size > 1:
                row_group, col_group = row * inverse // 1, col * inverse // 1
                row_half, col_half = row * (2.0 * inverse) // 1, col * (2.0 * inverse) // 1
                is_later, is_pair = row_half - row_group * 2.0, equal(row_group, col_group) & not_equal(row_half, col_half)
                e = factor(b, load_row_of_group(channels.part(b), OUT, size, size >> 1, fenced=False))
                mine = decayed(query_tile, key_tile, e, is_later)
                near = where(is_pair, mma_ABt(zeros(SQUARE), mine, mine), near)
                wx = mma_AB(zeros(OUT), INPUT(where(is_pair, fp32(scores), 0.0)), swap_layout(mine))
                dq, dk, r = add_level(dq, dk, r, wx, e, mine, is_later)
                size, inverse = size >> 1, inverse * 2.0
            query, key = load_rows(query_tile), load_rows(key_tile)
            diagonal = row_sum(where(equal(row, col), fp32(scores), 0.0))
            dq, dk = dq + key * diagonal, dk + query * diagonal
            near = where(equal(row, col), row_sum(query * key), where(less(row, col), 0.0, near))

            store(subtile(a, ROWS, of_warp, ROWS, rank), INPUT(near * scale))

            # what goes through states, by panels of values, with k~ in the place of X
            last = channels.load_last(b)
            thread_block.sync(FENCED)
            store(channels.part(x), INPUT(key * exp2(last - load(channels.part(b), OUT, fenced=False))))
            dq_state, dk_state, state_dots = zeros(OUT), zeros(OUT), lane_col_sum(zeros(OUT))
            for panel in range(panels):
                if STAGES == 1:
                    thread_block.sync(FENCED)
                    fill_states(s, gStates, panel, panels, chunk, head)
                states = s.wait(panel)  # the barrier also shows x and a to all warps
                if STAGES > 1:
                    fill_states(s, gStates, int32(panel + STAGES - 1), panels, chunk, head)
                state, d_state = subtile(states, PANEL, 0, HALF, half), subtile(states, PANEL, 1, HALF, half)
                dq_state = mma_AB(dq_state, subtile(dout_tile, ROWS, rank, PANEL, panel), state)
                dk_state = mma_AB(dk_state, subtile(value_tile, ROWS, rank, PANEL, panel), d_state)
                block = int32(HALVES * panel + half)  # of 16 columns
                d_values = mma_ABt(zeros(SQUARE), subtile(x, ROWS, rank), subtile(states, ROWS, HALVES + half))
                for part_of_a in range(HALVES):
                    scores_of_rows = subtile(subtile(a, CHUNK, part_of_a), CHUNK, 0, ROWS, rank)
                    d_values = mma_AtB(d_values, scores_of_rows, subtile(dout_tile, CHUNK, 0, ROWS, block))
                at = seq.batch, int32(token + ROWS * rank), head, int32(ROWS * block)
                store(truncate(gDV, 1, seq.end), VALUE(d_values), at, 1, 3, VALUE_STORE_BYTES)
                if WITH_GATES and late == panel % 2:
                    products = fp32(load(subtile(state, ROWS, odd), OPERAND, fenced=False))
                    products = products * fp32(load(subtile(d_state, ROWS, odd), OPERAND, fenced=False))
                    state_dots = state_dots + lane_col_sum(products)
            at = seq.batch, int32(token + ROWS * rank), head, int32(HALF * half)
            dq_state = dq_state * (exp2(load(channels.part(b), OUT, fenced=False)) * scale)
            store(truncate(gDQ, 1, seq.end), OUTPUT(dq + dq_state), at, 1, 3, OUTPUT_BYTES)
            if WITH_GATES:
                r = r + load_rows(query_tile) * dq_state
            last = channels.load_last(b)
            dk_state = dk_state * exp2(last - load(channels.part(b), OUT, fenced=False))
            store(truncate(gDK, 1, seq.end), OUTPUT(dk + dk_state), at, 1, 3, OUTPUT_BYTES)
            if WITH_GATES:
                written = load_rows(key_tile) * dk_state
                r = r - written
                store(subtile(carried, HALF, of_warp), col_sum(written) + exp2(last) * finish_sum(state_dots))
                thread_block.sync(FENCED)  # all have read b
                channels.store_gate_gradients(gDGates, gGates, b, r, carried, seq, token, head)
            thread_block.sync(FENCED)
        if VARLEN:
            padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for j in range(part, padding.num_chunks(), parts):
                token = int32(padding.chunk_start(j) + ROWS * rank)
                at = padding.batch, token, head, int32(HALF * half)
                store(gDQ, OUTPUT(zeros(OUT)), at, 1, 3, False)
                store(gDK, OUTPUT(zeros(OUT)), at, 1, 3, False)
                if WITH_GATES:
                    store(gDGates, zeros(OUT), at, 1, 3, False)
                for panel in range(panels):
                    at = padding.batch, token, head, int32(ROWS * (HALVES * panel + half))
                    store(gDV, VALUE(zeros(SQUARE)), at, 1, 3, False)

    return differentiate, smem
