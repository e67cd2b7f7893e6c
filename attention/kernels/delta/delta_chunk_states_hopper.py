"""What gradients of the delta rule need of the forward pass, for Hopper (parts/delta/delta_chunks.py has the equations): of
each chunk the state S before it, the errors E, -L^T and the vectors of its tokens. In training it is the forward pass itself,
and computes outputs, too (delta_outputs.py).

    Y = V - exp(b) K S        E = Y - L (beta Y)        S after = exp(b_last) S + (exp(b_last - b) K)^T (beta E)

As in delta_states_hopper.py, a solver computes L ahead, as it does not depend on the state. Of a loader's warps one starts the
TMA loads, one stores what the others have computed, as nobody else is to wait for memory, and two compute the vectors.
Consumers have 64 columns of values each and hold the state transposed, Y and E as well. Decays stand where no exponent is
positive."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import divmod, store_wait, subtile, tma_store, warpgroup
from tiles import dtype, fp32, inlined, ring, rt, shared
from tiles.launching.arguments import ENDS, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunk_solver import ChunkSolver
from ...parts.delta.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, LEAST_BETA, TwoParts
from ...parts.delta.delta_config import DeltaConfig, delta_sizes
from ...parts.delta.delta_outputs import STATES_ALONE, DeltaOutputs, StatesAlone
from ...parts.recurrent.tokens import CHUNK, COLUMNS, ChunkPlace, SequenceLayout, send_tile

CONSUMERS = 2  # warpgroups with 64 columns of values each
SOLVER, PRODUCER = CONSUMERS, CONSUMERS + 1
REGISTERS = 72, 88, 176  # of each thread of the producer, the solver and a consumer
STAGES = 3  # chunks in flight, of keys
WARPS = warpgroup.WARPGROUP
# Warps of the producer: one loads, one stores, and two from VECTOR_WARPS on compute vectors, a chunk each in turn
LOADER, SENDER, VECTOR_WARPS = range(3)


@dataclass(frozen=True)
class Config(DeltaConfig):
    """A kernel's configuration. varlen: are sequences packed (cu_seqlens)? outputs: are they computed, too?"""

    varlen: bool = False
    outputs: StatesAlone = STATES_ALONE
    label, threads = "states before chunks", warpgroup.THREADS * (PRODUCER + 1)

    @property
    def columns(self):
        """How many columns of values a block has, 64 for each of its consumers."""
        return CONSUMERS * COLUMNS


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without, in bf16, for gradients and, of the largest, with
    outputs. everything: fp16 too, all packed, and all with outputs."""
    if target.has_wgmma:
        for size, gated in itertools.product(delta_sizes(everything), (False, True)):
            for outputs, varlen in itertools.product((False, True), (False, True) if everything else (gated,)):
                if everything or not outputs or (gated and max(KEY_DIMS) in size):
                    yield config_for(*size, gated, varlen, outputs)


def config_for(key_dim: int, dtype: dtype, gated: bool, varlen: bool, outputs: bool) -> Config:
    """The configuration of these fields. outputs: are they computed, too?"""
    config = Config(key_dim, dtype, gated, varlen)
    return replace(config, outputs=DeltaOutputs(dtype, config.vectors)) if outputs else config


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, STATE, TRANSPOSED = config.dtype, rt(16, config.key_dim, fp32), rt(16, CHUNK, config.dtype)
    KEYS, VALUES = tiled(config.key, unit=1), tiled(config.values, unit=1)
    chunk_vectors, two_parts, seq_layout = config.vectors, TwoParts(INPUT), SequenceLayout(config.varlen)
    solver = ChunkSolver(chunk_vectors, two_parts, LEAST_BETA[INPUT])
    PRODUCER_REGISTERS, SOLVER_REGISTERS, CONSUMER_REGISTERS = REGISTERS
    readers, outputs = CONSUMERS * WARPS, config.outputs
    PARAMS, tiles_of_chunk = outputs.params(config.key, config.values), outputs.tiles_of_chunk
    smem = shared(
        k=ring(config.key, STAGES, readers + WARPS),
        v=ring(config.values, outputs.value_stages, readers),
        x=ring(two_parts.square, outputs.solutions, readers + 1, writers=WARPS),
        vectors=ring(chunk_vectors.spec, outputs.vector_stages, readers + WARPS + 1, writers=1),
        states=ring(config.state, 1, 1 + CONSUMERS * outputs.state_readers, writers=readers),
        out=ring(config.values, tiles_of_chunk, 1, writers=readers),
        high=outputs.triangle,
        low=outputs.triangle,
        **outputs.rings(config.key, config.square, CONSUMERS),
    )

    @inlined
    def locate_block(gCuSeqlens, length, heads):
        """(sequence, head, its tokens, how many chunks they are, the index of the first one) of this block."""
        sequence, head = divmod(cuda.blockIdx.x, heads)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        return sequence, head, seq, seq.num_chunks(), seq_layout.chunk_index(seq.start, sequence, length)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gK: KEYS, gV: VALUES, gBeta: array(3), gGates: array(3), gInitialState: array(4),
        gErrors: tiled(config.values, rows=2), gStates: tiled(config.state, rows=2),
        gSolutions: tiled(two_parts.square, rows=2), gVectors: tiled(chunk_vectors.spec, 3, None, 2), gTailK: KEYS,
        gTailV: VALUES, gCuSeqlens: ENDS, length: INT, heads: INT, group: INT, params: PARAMS,
    ):  # fmt: skip
        """A block has a head of a sequence. gInitialState: transposed. gErrors .. gVectors: of each chunk and head. gStates: S
        transposed. gSolutions: -L^T, high above low."""
        memory = smem.open()
        k, v, x, vectors, states, out = memory.k, memory.v, memory.x, memory.vectors, memory.states, memory.out
        wg = warpgroup.id()
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            sequence, head, seq, n, first_chunk = locate_block(gCuSeqlens, length, heads)
            warp = warpgroup.rank()
            if warp == LOADER:
                key_head, _ = divmod(head, group)
                for j in range(n):
                    place = ChunkPlace(int32(first_chunk + j), head, sequence, seq.chunk_start(j), seq)
                    seq_layout.fill_chunk(k, j, gK, gTailK, place, key_head)
                    outputs.load_queries(memory, j, params, seq_layout, place, key_head)
                    seq_layout.fill_chunk(v, j, gV, gTailV, place, head)
            elif warp == SENDER:
                for j in range(n):
                    place = ChunkPlace(int32(first_chunk + j), head, sequence, seq.chunk_start(j), seq)
                    coord = place.chunk, head
                    send_tile(states, j, gStates, coord)
                    tma_store(gVectors, coord, vectors.wait(j))
                    tma_store(gSolutions, coord, x.wait(j))
                    store_wait()
                    vectors.release(j)
                    x.release(j)
                    send_tile(out, tiles_of_chunk * j, gErrors, coord)
                    outputs.send(memory, j, params, seq_layout, place)
            else:
                for j in range(warp - VECTOR_WARPS, n, WARPS - VECTOR_WARPS):
                    target, token = vectors.claim(j), seq.chunk_start(j)
                    solver.store_beta(target, gBeta, seq, token, head)
                    solver.store_decays(target, gGates, seq, token, head)
                    vectors.publish(j)
        elif wg == SOLVER:
            warpgroup.release_registers(SOLVER_REGISTERS)
            _, _, _, n, _ = locate_block(gCuSeqlens, length, heads)
            for j in range(n):
                keys = k.wait(j)
                s = warpgroup.wait(warpgroup.mm_ABt(keys, keys))
                outputs.release_early(k, j)
                vector_tile = vectors.wait(j)
                solution = solver.solve(s, vector_tile, (memory.high, memory.low))
                parts = solver.split_solution(solution, vector_tile)
                outputs.release_early(vectors, j)
                two_parts.store(x.claim(j), parts)
                x.publish(j)
                outputs.store_scores(memory, j, keys, vector_tile, params)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            sequence, head, _, n, _ = locate_block(gCuSeqlens, length, heads)
            s_t = warpgroup.load(gInitialState, STATE, (sequence, head, COLUMNS * wg, 0), aligned=False)
            for j in range(n):
                keys, vector_tile = k.wait(j), vectors.wait(j)
                rounded = INPUT(s_t)
                u = warpgroup.mm_ABt(rounded, keys)
                warpgroup.store(subtile(states.claim(j), COLUMNS, wg), rounded)
                states.publish(j, fenced=outputs.state_readers > 0)
                values = fp32(warpgroup.load_transposed(subtile(v.wait(j), CHUNK, 0, COLUMNS, wg), TRANSPOSED, fenced=False))
                y = values - chunk_vectors.decay_cols(warpgroup.wait(u), vector_tile, DECAY)
                beta = chunk_vectors.cols(vector_tile, BETA)
                parts = two_parts.split(y * beta)
                solution = subtile(x.wait(j), CHUNK, 0), subtile(x.wait(j), CHUNK, 1)
                e = two_parts.mma_AB(y, parts, solution)
                s_t = chunk_vectors.decay_state(s_t, vector_tile)
                factors = chunk_vectors.decay_cols(beta, vector_tile, DECAY_TO_END)
                e = warpgroup.wait(e)
                s_t = warpgroup.mma_AB(s_t, INPUT(e * factors), keys)
                o = outputs.multiply(memory, j, wg, e * beta, vector_tile, params)
                x.release(j)
                warpgroup.store_transposed(subtile(out.claim(tiles_of_chunk * j), CHUNK, 0, COLUMNS, wg), e)
                out.publish(tiles_of_chunk * j)  # its fence is that of loads of V, too
                vectors.release(j)
                v.release(j)
                s_t = warpgroup.wait(s_t, newer=outputs.products)
                k.release(j)
                outputs.store(o, memory, j, wg)
            outputs.store_last_state(params, s_t, heads)

    return scan, smem
