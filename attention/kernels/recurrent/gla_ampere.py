"""Linear attention where every channel of a key decays by itself (gated linear attention, Yang et al. 2024), chunk by chunk on
any GPU since Ampere: cp.async, ldmatrix and mma.sync.

    S_t = diag(exp(g_t)) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t        g_t: Dk numbers, never positive

With b, P, q~ and k~ of channel_scores.py, a chunk is

    O = scale (q~ S + P V)        S after = exp(b_last) S + k~^T V

A block has 128 columns of the values of a head, and scans a sequence or a segment of one. Its eight warps first compute P, q~
and k~, 16 tokens and half of the channels each; q~ and k~ overwrite q and k. Then each has 16 columns of the values, for which
it holds the state in registers, transposed. The next gates are loaded before that, and the next queries and values while the
state is updated."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import divmod, exp2, load, mma_AB, mma_ABt, store, subtile, truncate, warp_index, warpgroup, zeros
from tiles import bf16, fp32, inlined, pipeline, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import WARPGROUP
from tiles.targets import MEDIUM, Target

from ...parts.recurrent.channel_chunks import HALVES, KEY_DIMS, ROWS, UNFENCED, ChannelChunkConfig, ChunkChannels, chunk_fields
from ...parts.recurrent.channel_gates import choose_tile_gates
from ...parts.recurrent.channel_scores import ChannelScores
from ...parts.recurrent.gate_formulas import FORMULAS, GateFormula
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord

WARPS = WARPGROUP * HALVES  # of a block
BLOCK_COLUMNS = HALVES * COLUMNS  # of values


@dataclass(frozen=True)
class Config(ChannelChunkConfig):
    """A kernel's configuration. local: does the kernel compute only each segment's local state, which follows from a state of 0
    before it, and its decay? ctas_per_sm: how many thread blocks an SM is to hold. formula: computes gates from the numbers in
    memory; None: these are the gates."""

    local: bool = False
    ctas_per_sm: int = 1
    formula: GateFormula | None = field(default=None, kw_only=True)

    @property
    def label(self):
        """The name of the kernel in tables."""
        return "states of segments" if self.local else "gates by channel"

    def __str__(self):
        return ", ".join(filter(None, (super().__str__(), str(self.formula or ""))))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and 16 bytes, with all other dtypes and bytes if `everything`. With a formula there is one
    size."""
    for (key_dim, *fields), local in itertools.product(chunk_fields(everything), (False, True)):
        ctas_per_sm = count_resident_blocks(key_dim, target.shared_bytes)
        yield replace(Config(key_dim, *fields), local=local, ctas_per_sm=ctas_per_sm)
    for formula in FORMULAS if everything else FORMULAS[:1]:
        yield from (Config(max(KEY_DIMS), bf16, local=local, formula=formula) for local in (False, True))


def count_resident_blocks(key_dim: int, shared_bytes: int) -> int:
    """How many thread blocks an SM is to hold, for keys of key_dim channels, padded, on a GPU whose blocks may have
    `shared_bytes` of shared memory: two for 64 channels, whose state leaves registers for two. (One block with half as many
    warps took 1.4 times as long.)"""
    return 2 if key_dim <= min(KEY_DIMS) and shared_bytes >= MEDIUM else 1


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, LOCAL, STATE = config.dtype, config.vector_bytes, config.local, rt(ROWS, config.key_dim, fp32)
    TRANSPOSED, OUT, seq_layout = rt(ROWS, CHUNK, INPUT), rt(CHUNK, ROWS, fp32), SequenceLayout(config.varlen)
    channels = ChunkChannels(config.key_dim)
    channel_scores, tile_gates = ChannelScores(channels, INPUT), choose_tile_gates(channels.rows, config.formula, HALVES)
    PARAMS, HALF, SMALL = tile_gates.params(), channels.half, st(8 * WARPS, 16, INPUT)
    smem = shared(
        q=pipeline(SMALL if LOCAL else channel_scores.key, 1, WARPS),
        k=pipeline(channel_scores.key, 1, WARPS),
        v=pipeline(st(CHUNK, BLOCK_COLUMNS, INPUT), 1, WARPS),
        b=channels.sums,
        near=pipeline(SMALL if LOCAL else channel_scores.scores, 1, WARPS),  # near keys, then P
        reference_decays=sv(16, bf16) if LOCAL else channel_scores.reference_decays,
        state_decay=sv(config.key_dim, fp32),
        biases=tile_gates.biases,
    )

    @inlined
    def score_tokens(queries, keys, near, b, reference_decays):
        """P of a chunk. Overwrites q by q~ and k by k~, and synchronises the block's warps."""
        halved = thread_block.reduce_any(channel_scores.is_strong(b))
        near_keys = near.reuse(channel_scores.key)
        p = near.reuse(channel_scores.scores)
        if halved:
            channel_scores.store_halved(p, queries, keys, b)
            thread_block.sync(UNFENCED)
        query = channel_scores.decay_tokens(queries, keys, near_keys, b, reference_decays, halved)
        thread_block.sync(UNFENCED)
        if not halved:
            s = channel_scores.compute(query, near_keys, reference_decays)
            thread_block.sync(UNFENCED)  # P overwrites the near keys, which all warps have read
            channel_scores.store(p, s)
        return p

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def scan(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gGates: array(4), gO: array(4, INPUT),
        gInitialState: array(4), gFinalState: array(4), gLocalStates: array(5), gTotalDecays: array(4), gCuSeqlens: ENDS,
        length: INT, blocks: INT, segments: INT, scanned_segments: INT, heads: INT, group: INT, scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """The outputs of a segment, and after the last one the state; or the local state of a segment, and log2 of its decay.
        Each head is `blocks` blocks of columns wide. There are thread blocks for the first `scanned_segments` of the `segments`
        of a sequence. gInitialState: the state before each segment, transposed, as all states."""
        q, k, v, b, near, reference_decays, state_decay, biases = smem.open()
        block, segment, head, sequence = block_coord(cuda.blockIdx.x, blocks, scanned_segments, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        n, half, col = seq.num_chunks(), warpgroup.id(), int32(BLOCK_COLUMNS * block)
        column = int32(col + ROWS * warp_index())  # the warp's first one
        queries, keys, values = truncate(gQ, 1, seq.end), truncate(gK, 1, seq.end), truncate(gV, 1, seq.end)
        query_chunks, at = 0 if LOCAL else n, (seq.batch, seq.start, key_head, 0)
        q.fill(0, queries, at, 1, 3, query_chunks, VECTOR_BYTES)
        v.fill(0, values, (seq.batch, seq.start, head, col), 1, 3, n, VECTOR_BYTES)
        k.fill(0, keys, at, 1, 3, n, VECTOR_BYTES)
        rate, total = tile_gates.load_constants(biases, params, head), zeros(channels.rows.row_vec)
        gates = channels.load_gates(gGates, seq, seq.start, head)
        s_t = load(gInitialState, STATE, (int32(sequence * segments + segment), head, column, 0), aligned=False)
        if tile_gates.from_formula:
            thread_block.sync(UNFENCED)  # all see the constants
        for j in range(n):
            token, next_token = seq.chunk_start(j), seq.chunk_start(j + 1)
            channels.store_gates(b, tile_gates.compute(gates, rate, biases, seq.remaining(j)))
            query_tile = q.wait(j, 1)  # its barrier also shows the gates to all warps
            channels.cumsum_stored_gates(b)
            key_tile = k.wait(j)  # this barrier shows b
            last = channels.load_last(b)
            if warpgroup.rank() == 0:
                store(subtile(state_decay, HALF, half), exp2(last))
            if LOCAL:
                channel_scores.decay_keys(key_tile, b)
                total = total + last
            else:
                p = score_tokens(query_tile, key_tile, near, b, reference_decays)
            gates = channels.load_gates(gGates, seq, next_token, head)
            columns = subtile(v.wait(j), CHUNK, 0, COLUMNS, half)  # this barrier shows P, q~ and k~
            v_t = warpgroup.load_transposed(columns, TRANSPOSED, fenced=False)
            if not LOCAL:
                o = mma_ABt(zeros(OUT), query_tile, INPUT(s_t))
                o = mma_ABt(mma_ABt(o, subtile(p, CHUNK, 0), v_t), subtile(p, CHUNK, 1), v_t) * scale
                store(truncate(gO, 1, seq.end), o, (seq.batch, token, head, column), 1, 3, VECTOR_BYTES)
            thread_block.sync(UNFENCED)
            at = seq.batch, next_token, key_head, 0
            q.fill(j + 1, queries, at, 1, 3, query_chunks, VECTOR_BYTES)
            v.fill(j + 1, values, (seq.batch, next_token, head, col), 1, 3, n, VECTOR_BYTES)
            s_t = mma_AB(s_t * load(state_decay, STATE.row_vec), v_t, key_tile)
            thread_block.sync(UNFENCED)
            k.fill(j + 1, keys, at, 1, 3, n, VECTOR_BYTES)
        if LOCAL:
            store(gLocalStates, s_t, (sequence, head, segment, column, 0), aligned=False)
            if block == 0 and warpgroup.rank() == 0:
                store(gTotalDecays, total, (sequence, head, segment, int32(HALF * half)))
        else:
            if segment == segments - 1:
                store(gFinalState, s_t, (sequence, head, column, 0), aligned=False)
                if seq_layout.varlen:
                    padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
                    for j in range(padding.num_chunks()):
                        at = padding.batch, padding.chunk_start(j), head, column
                        store(gO, zeros(OUT), at, 1, 3, VECTOR_BYTES)

    return scan, smem
