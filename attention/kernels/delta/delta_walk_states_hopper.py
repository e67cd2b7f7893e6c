"""How each segment of a long sequence changes a state under the delta rule, for Hopper: delta_walk_hopper.py without queries
and outputs.

The tokens of a segment take a state S to M S + N, whatever S is. So a walk that starts from [0 | I] ends with [N | M], if v is
0 in the columns of I, for which TMA writes zeros without a read. delta_compose_states_hopper.py composes the results.

With decays, the walk begins with the first chunk that still counts at the segment's end (delta_recent_chunks.py). If that is
not the segment's first one, N lacks less than 2^-126 of the state before it, and M takes less than that of a state to the next
segment: blocks that have columns of M only store 0. In others M lacks what the earlier chunks multiply by."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, subtile, warpgroup
from tiles import bf16, fp32, ring, shared
from tiles.launching.arguments import ENDS, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunks import DECAY_TO_END, KEY_DIMS, TransformVectors
from ...parts.delta.delta_config import DeltaConsumerConfig, delta_sizes
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from ...parts.recurrent.transposed_state import TransposedState

REGISTERS = {1: (40, 256), 2: (40, 216)}  # consumers -> registers of a thread of loader and consumer
STAGES = 4  # chunks in flight
WARPS = warpgroup.WARPGROUP


@dataclass(frozen=True)
class Config(DeltaConsumerConfig):
    """A kernel's configuration, whose fields are those of DeltaConsumerConfig. Columns are those of [N | M]; the helper is a
    loader."""

    label, helpers = "walk of states", 1


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without; fp16 and all packed ones if `everything`."""
    if target.has_wgmma:
        for size, consumers in itertools.product(delta_sizes(everything), REGISTERS):
            largest = size[0] == max(KEY_DIMS) and consumers == max(REGISTERS)
            for varlen in (False, True) if everything or largest else (False,):
                yield from (Config(*size, gated, varlen, consumers=consumers) for gated in (False, True))
        yield from (Config(key_dim, bf16, gated, l2norm=True) for key_dim, gated in zip(KEY_DIMS, (False, True), strict=True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, seq_layout = config.consumers, config.dtype, SequenceLayout(config.varlen)
    LOADER, readers, state = CONSUMERS, CONSUMERS * WARPS, TransposedState(config.key_dim, INPUT, seq_layout)
    chunk_vectors = TransformVectors(config.gated, config.l2norm)
    LOADER_REGISTERS, CONSUMER_REGISTERS = REGISTERS[CONSUMERS]
    recent, PARAMS, GATED, KEY_DIM = config.recent_chunks, config.recent_chunks.params(), config.gated, config.key_dim
    smem = shared(
        k=ring(config.key, STAGES, readers),
        v=ring(config.values, STAGES, readers),
        t=ring(config.square, STAGES, readers),
        vectors=ring(chunk_vectors.spec, STAGES, readers),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gK: tiled(config.key, unit=1), gV: tiled(config.values, unit=1), gTransforms: tiled(config.square, rows=2),
        gVectors: tiled(chunk_vectors.spec, 3, None, 2), gFinalState: array(4), gCuSeqlens: ENDS,
        length: INT, blocks: INT, segments: INT, scanned_segments: INT, heads: INT, group: INT, values: INT,
        params: PARAMS,
    ):  # fmt: skip
        """[N | M] of each of the first `scanned_segments` of the `segments` of a sequence. values: the number of columns of N.
        gTransforms, gVectors: of each chunk and head. params: see delta_recent_chunks.py. `group` value heads share a key head;
        each is `blocks` blocks of columns wide."""
        k, v, t, vectors = smem.open()
        wg = warpgroup.id()
        block, segment, head, sequence = block_coord(cuda.blockIdx.x, blocks, scanned_segments, heads * group)
        all_tokens = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        seq = recent.skip_forgotten(params, all_tokens, seq_layout.chunk_index(all_tokens.start, sequence, length), head)
        is_zero = GATED and seq.start > all_tokens.start and COLUMNS * CONSUMERS * block >= values
        n = int32(0) if is_zero else seq.num_chunks()
        if wg == LOADER:
            warpgroup.release_registers(LOADER_REGISTERS)
            key_head, _ = divmod(head, group)
            first = seq_layout.chunk_index(seq.start, sequence, length)
            if warpgroup.rank() == 0:
                for j in range(n):
                    token, chunk = seq.chunk_start(j), int32(first + j)
                    k.fill(j, gK, (seq.batch, token, key_head))
                    v.fill(j, gV, (seq.batch, token, head, block))
                    vectors.fill(j, gVectors, (chunk, head))
                    t.fill(j, gTransforms, (chunk, head))
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            column = COLUMNS * (CONSUMERS * block + wg)
            s_t = state.start_transition(int32(column + KEY_DIM if is_zero else column), values)
            for j in range(n):
                keys = k.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j), CONSUMERS)
                u = warpgroup.mm_ABt(INPUT(s_t), keys)
                y = fp32(warpgroup.load_transposed(subtile(v.wait(j), CHUNK, 0, COLUMNS, wg), state.values))
                v.release(j)
                y, vector_tile = seq_layout.zero_other_columns(y, seq.remaining(j)), vectors.wait(j)
                y = y - chunk_vectors.scale_reads(warpgroup.wait(u), vector_tile)
                u = warpgroup.wait(warpgroup.mm_AB(INPUT(y), t.wait(j)))
                t.release(j)
                s_t = chunk_vectors.decay_state(s_t, vector_tile)
                u = INPUT(chunk_vectors.decay_cols(u, vector_tile, DECAY_TO_END))
                vectors.release(j)
                s_t = warpgroup.wait(warpgroup.mma_AB(s_t, u, keys))
                k.release(j)
            warpgroup.store(gFinalState, s_t, (sequence * scanned_segments + segment, head, 0, column), 3, 2)

    return walk, smem
