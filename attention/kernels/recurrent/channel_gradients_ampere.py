"""Gradients of linear attention's queries, keys, values and gates where each channel of the keys has a decay, chunk by chunk in
any order, from the states before each chunk and the gradients of those after it (parts/recurrent/channel_chunks.py has the
equations).

A block has some chunks of a head. Its eight warps are two warpgroups of 16 tokens a warp, each with half of the channels of the
keys. First come the pairs of tokens (channel_pairs.py). Then they go over the columns of values in panels of 32, whose states
cp.async loads while the previous panel is multiplied; each warpgroup computes half of a panel's dV. A is the sum of two tiles,
one from each warpgroup's channels, and each of them is multiplied by dO."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import (
    col_sum,
    divmod,
    exp2,
    finish_sum,
    lane_col_sum,
    load,
    mma_AB,
    mma_ABt,
    mma_AtB,
    store,
    subtile,
    truncate,
    warpgroup,
    zeros,
)
from tiles import bf16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import WARPGROUP
from tiles.targets import LARGE, MEDIUM, Target

from ...parts.recurrent.channel_chunks import (
    HALVES,
    KEY_DIMS,
    ROWS,
    UNFENCED,
    VALUE_DIMS,
    ChannelChunkConfig,
    ChunkChannels,
    chunk_fields,
)
from ...parts.recurrent.channel_pairs import SQUARE, ChannelPairs, PairGradients, PairTiles
from ...parts.recurrent.state_panels import PANEL
from ...parts.recurrent.tokens import CHUNK, SequenceLayout

WARPS = WARPGROUP * HALVES  # of a block
NARROW = 32  # bytes of a row in a panel of tiles that are read 16 columns at a time


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
    for fields in chunk_fields(everything):
        config = replace(Config(*fields), stages=stages_for(target.shared_bytes))
        if not serves_shape(config.key_dim, config.value_dim, config.vector_bytes, target.shared_bytes):
            continue
        yield config
        if everything and config.dtype is bf16 and config.vector_bytes == VECTOR_SIZES[0] and not config.varlen:
            for value_dim in VALUE_DIMS:
                if value_dim != config.value_dim and serves_shape(
                    config.key_dim, value_dim, VECTOR_SIZES[0], target.shared_bytes
                ):
                    yield replace(config, value_dim=value_dim)
            yield replace(config, with_gates=False)
        if everything and config.dtype is bf16 and config.vector_bytes == VECTOR_SIZES[0]:
            yield replace(config, unrounded=True)
            yield replace(config, unrounded=True, unrounded_values=True)


def stages_for(shared_bytes: int) -> int:
    """How many panels of states are in flight on a GPU whose blocks may have `shared_bytes` of shared memory."""
    return 2 if shared_bytes >= LARGE else 1


def serves_shape(key_dim: int, value_dim: int, vector_bytes: int, shared_bytes: int) -> bool:
    """Is there a kernel for key_dim channels and value_dim columns, padded? With the most channels, and arrays that are not
    aligned to 16 bytes, registers would spill."""
    fits = shared_bytes >= (LARGE if value_dim == VALUE_DIMS[-1] else MEDIUM)
    return fits and (vector_bytes == VECTOR_SIZES[0] or key_dim < KEY_DIMS[-1])


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, STAGES, WITH_GATES = config.dtype, config.vector_bytes, config.stages, config.with_gates
    channels, seq_layout = ChunkChannels(config.key_dim), SequenceLayout(config.varlen)
    HALF, OUT = channels.half, channels.rows
    OPERAND = rt(ROWS, HALF, INPUT)
    VARLEN, pairs = config.varlen, ChannelPairs(channels, INPUT, WITH_GATES)
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

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDOut: array(4, INPUT), gGates: array(4),
        gStates: array(4, INPUT), gDQ: array(4, OUTPUT), gDK: array(4, OUTPUT), gDV: array(4, VALUE), gDGates: array(4),
        gCuSeqlens: ENDS, length: INT, panels: INT, parts: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The chunks of a sequence are divided evenly among the `parts` blocks of a head. gStates: S^T and dS^T by panels.
        Gradients of padding are set to 0."""
        q, k, v, do, s, b, x, w, a, carried = smem.open()
        index, part = divmod(cuda.blockIdx.x, parts)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n, half, rank = seq.num_chunks(), warpgroup.id(), warpgroup.rank()
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
            pairs.score_tokens(w, value_tile, dout_tile, scale)
            query_tile, key_tile = q.wait(j, STAGES - 1), k.wait(j, STAGES - 1)  # the barrier also shows w to all warps
            gradients = PairGradients(zeros(OUT), zeros(OUT), zeros(OUT))
            gradients = pairs.add_pairs(gradients, PairTiles(query_tile, key_tile, b, x, w, a), scale)
            dq, dk, r, key = gradients.dq, gradients.dk, gradients.r, pairs.load_rows(key_tile)

            # the parts of gradients that come from states, by panels of values; k~ overwrites X
            last = channels.load_last(b)
            thread_block.sync(UNFENCED)
            store(channels.part(x), INPUT(key * exp2(last - load(channels.part(b), OUT, fenced=False))))
            dq_state, dk_state, state_dots = zeros(OUT), zeros(OUT), lane_col_sum(zeros(OUT))
            for panel in range(panels):
                if STAGES == 1:
                    thread_block.sync(UNFENCED)
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
                if WITH_GATES and rank // 2 == panel % 2:
                    products = fp32(load(subtile(state, ROWS, rank % 2), OPERAND, fenced=False))
                    products = products * fp32(load(subtile(d_state, ROWS, rank % 2), OPERAND, fenced=False))
                    state_dots = state_dots + lane_col_sum(products)
            at = seq.batch, int32(token + ROWS * rank), head, int32(HALF * half)
            dq_state = dq_state * (exp2(load(channels.part(b), OUT, fenced=False)) * scale)
            store(truncate(gDQ, 1, seq.end), OUTPUT(dq + dq_state), at, 1, 3, OUTPUT_BYTES)
            if WITH_GATES:
                r = r + pairs.load_rows(query_tile) * dq_state
            last = channels.load_last(b)
            dk_state = dk_state * exp2(last - load(channels.part(b), OUT, fenced=False))
            store(truncate(gDK, 1, seq.end), OUTPUT(dk + dk_state), at, 1, 3, OUTPUT_BYTES)
            if WITH_GATES:
                written = pairs.load_rows(key_tile) * dk_state
                pairs.store_chunk_gate_gradient(carried, col_sum(written) + exp2(last) * finish_sum(state_dots))
                thread_block.sync(UNFENCED)  # all have read b
                channels.store_gate_gradients(gDGates, gGates, b, r - written, carried, seq, token, head)
            thread_block.sync(UNFENCED)
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
