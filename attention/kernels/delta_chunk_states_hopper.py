"""What gradients of the delta rule need of the forward pass, for Hopper (parts/recurrent/delta_chunks.py has the equations): of
each chunk the state S before it, the errors E, R^T and the vectors of its tokens.

    Y = V - exp(b) K S        E = Y - L (beta Y)        S after = exp(b_last) S + (exp(b_last - b) K)^T (beta E)

As in delta_states_hopper.py, a solver computes L beta and R ahead, as they do not depend on the state, and of a loader's warps
one starts the TMA loads and the others compute the vectors. Consumers have 64 columns of values each and hold the state
transposed, Y and E as well. Decays stand where no exponent is positive."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, subtile, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLE
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import ENDS, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.delta_chunk_solver import ChunkSolver
from ..parts.recurrent.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, ChunkVectors, TwoParts
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

CONSUMERS = 2  # warpgroups with 64 columns of values each
SOLVER, LOADER = CONSUMERS, CONSUMERS + 1
REGISTERS = 72, 88, 176  # of each thread of the loader, the solver and a consumer
STAGES = 3  # chunks in flight
WARPS = warpgroup.WARPGROUP
AHEAD = 2  # chunks by which the solver may be ahead of consumers
VECTORS = 8  # chunks whose vectors are in shared memory
VECTOR_WARPS = WARPS - 1  # of the loader, that compute vectors, of a chunk each in turn


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gated: are there decays? varlen: are sequences packed
    (cu_seqlens)?"""

    key_dim: int
    dtype: dtype
    gated: bool
    varlen: bool = False
    threads = warpgroup.THREADS * (LOADER + 1)

    @property
    def key(self):
        """A chunk of K in shared memory, 64 tokens by Dk."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def values(self):
        """A chunk of V in shared memory, 64 tokens by the columns of both consumers."""
        return st(CHUNK, CONSUMERS * COLUMNS, self.dtype)

    @property
    def value(self):
        """A consumer's 64 columns of a chunk of E, which TMA stores."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def state(self):
        """A consumer's 64 columns of the state, transposed, which TMA stores."""
        return st(COLUMNS, self.key_dim, self.dtype)

    def __str__(self):
        return f"states before chunks, Dk {self.key_dim} {self.dtype}{', gated' * self.gated}{', varlen' * self.varlen}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without, in bf16. everything: fp16 too, and all packed."""
    if target.has_wgmma:
        for key_dim, input_dtype, gated in itertools.product(KEY_DIMS, (bf16, fp16) if everything else (bf16,), (False, True)):
            yield from (Config(key_dim, input_dtype, gated, varlen) for varlen in ((False, True) if everything else (gated,)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, GATED, STATE = config.dtype, config.gated, rt(16, config.key_dim, fp32)
    chunk_vectors = ChunkVectors(GATED)
    TRANSPOSED, seq_layout, two_parts = rt(16, CHUNK, INPUT), SequenceLayout(config.varlen), TwoParts(INPUT)
    solver = ChunkSolver(chunk_vectors, two_parts)
    LOADER_REGISTERS, SOLVER_REGISTERS, CONSUMER_REGISTERS = REGISTERS
    readers = CONSUMERS * WARPS
    smem = shared(
        k=ring(config.key, STAGES, readers + WARPS),
        v=ring(config.values, STAGES, readers),
        x=ring(st(2 * CHUNK, CHUNK, INPUT), AHEAD, readers, writers=WARPS),
        vectors=ring(chunk_vectors.spec, VECTORS, readers + WARPS, writers=1),
        high=TRIANGLE,
        low=TRIANGLE,
        state=st(CONSUMERS * COLUMNS, config.key_dim, INPUT),
        out=st(CONSUMERS * CHUNK, COLUMNS, INPUT),
    )

    @inlined
    def locate_block(gCuSeqlens, length, heads):
        """(sequence, head, its tokens, how many chunks they are, the index of the first one) of this block."""
        sequence, head = divmod(cuda.blockIdx.x, heads)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        return sequence, head, seq, seq.num_chunks(), seq_layout.chunk_index(seq.start, sequence, length)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gK: tiled(config.key, unit=1), gV: tiled(config.values, unit=1), gBeta: array(3),
        gGates: array(3), gInitialState: array(4), gErrors: tiled(config.value, rows=2), gStates: tiled(config.state, rows=2),
        gSolutions: array(4, INPUT), gVectors: array(3), gTailK: tiled(config.key, unit=1),
        gTailV: tiled(config.values, unit=1), gCuSeqlens: ENDS, length: INT, heads: INT, group: INT,
    ):  # fmt: skip
        """A block has a head of a sequence. gInitialState: transposed. gErrors .. gVectors: of each chunk and head. gStates: S
        transposed. gSolutions: R^T, high above low."""
        k, v, x, vectors, high, low, state, out = smem.open()
        wg = warpgroup.id()
        if wg == LOADER:
            warpgroup.release_registers(LOADER_REGISTERS)
            sequence, head, seq, n, first_chunk = locate_block(gCuSeqlens, length, heads)
            warp = warpgroup.rank()
            if warp == 0:
                key_head, _ = divmod(head, group)
                for j in range(n):
                    array, batch, row = seq_layout.whole_tile(gK, gTailK, seq, seq.chunk_start(j), sequence)
                    k.fill(j, array, (batch, row, key_head))
                    array, batch, row = seq_layout.whole_tile(gV, gTailV, seq, seq.chunk_start(j), sequence)
                    v.fill(j, array, (batch, row, head))
            else:
                for j in range(warp - 1, n, VECTOR_WARPS):
                    token, chunk = seq.chunk_start(j), int32(first_chunk + j)
                    solver.store_vectors(vectors.claim(j), gVectors, gBeta, gGates, seq, token, chunk, head)
                    vectors.publish(j)
        elif wg == SOLVER:
            warpgroup.release_registers(SOLVER_REGISTERS)
            sequence, head, seq, n, first_chunk = locate_block(gCuSeqlens, length, heads)
            for j in range(n):
                keys = k.wait(j)
                s = warpgroup.wait(warpgroup.mm_ABt(keys, keys))
                k.release(j)
                vector_tile = vectors.wait(j)
                solution = solver.solve(s, vector_tile, (high, low))
                target = x.claim(j)
                x_high, x_low = two_parts.split(solution)
                warpgroup.store(subtile(target, CHUNK, 0), x_high)
                warpgroup.store(subtile(target, CHUNK, 1), x_low)
                x.publish(j)
                r_high, r_low = solver.split_reverse(solution, vector_tile)
                vectors.release(j)
                chunk = int32(first_chunk + j)
                warpgroup.store(gSolutions, r_high, (chunk, head, 0, 0), aligned=True)
                warpgroup.store(gSolutions, r_low, (chunk, head, CHUNK, 0), aligned=True)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            sequence, head, seq, n, first_chunk = locate_block(gCuSeqlens, length, heads)
            state_tile, out_tile = subtile(state, COLUMNS, wg), subtile(out, CHUNK, wg)
            s_t = warpgroup.load(gInitialState, STATE, (sequence, head, COLUMNS * wg, 0), aligned=False)
            for j in range(n):
                chunk = int32(first_chunk + j)
                warpgroup.send(gStates, (chunk, head, wg), state_tile, s_t, 1)
                keys, vector_tile = k.wait(j), vectors.wait(j)
                u = warpgroup.mm_ABt(state_tile, keys)
                values = fp32(warpgroup.load_transposed(subtile(v.wait(j), CHUNK, 0, COLUMNS, wg), TRANSPOSED))
                v.release(j)
                y = values - chunk_vectors.decay_cols(warpgroup.wait(u), vector_tile, DECAY)
                y_high, y_low = two_parts.split(y)
                x_high, x_low = subtile(x.wait(j), CHUNK, 0), subtile(x.wait(j), CHUNK, 1)
                e = warpgroup.mma_AB(warpgroup.mma_AB(warpgroup.mma_AB(y, y_high, x_high), y_high, x_low), y_low, x_high)
                e = warpgroup.wait(e)
                x.release(j)
                u = chunk_vectors.decay_cols(e * chunk_vectors.cols(vector_tile, BETA), vector_tile, DECAY_TO_END)
                s_t = chunk_vectors.decay_state(s_t, vector_tile)
                vectors.release(j)
                s_t = warpgroup.mma_AB(s_t, INPUT(u), keys)
                warpgroup.store_wait(1)
                warpgroup.sync()
                warpgroup.store_transposed(out_tile, e)
                warpgroup.tma_store(gErrors, (chunk, head, 0, wg), out_tile)
                s_t = warpgroup.wait(s_t)
                k.release(j)
            warpgroup.store_wait()

    return scan, smem
