"""What gradients of the delta rule need of the forward pass, for Hopper (parts/recurrent/delta_chunks.py has the equations): of
each chunk the state S before it, the errors E, -L^T and the vectors of its tokens.

    Y = V - exp(b) K S        E = Y - L (beta Y)        S after = exp(b_last) S + (exp(b_last - b) K)^T (beta E)

As in delta_states_hopper.py, a solver computes L ahead, as it does not depend on the state. Of a loader's warps one starts the
TMA loads, one stores what the others have computed, as nobody else is to wait for memory, and two compute the vectors.
Consumers have 64 columns of values each and hold the state transposed, Y and E as well. Decays stand where no exponent is
positive."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, store_wait, subtile, tma_store, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLE
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import ENDS, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.delta_chunk_solver import ChunkSolver
from ..parts.recurrent.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, LEAST_BETA, ChunkVectors, TwoParts
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

CONSUMERS = 2  # warpgroups with 64 columns of values each
SOLVER, LOADER = CONSUMERS, CONSUMERS + 1
REGISTERS = 72, 88, 176  # of each thread of the loader, the solver and a consumer
STAGES = 3  # chunks in flight
WARPS = warpgroup.WARPGROUP
AHEAD = 2  # chunks by which the solver may be ahead of consumers
VECTORS = 8  # chunks whose vectors are in shared memory
VECTOR_WARPS = WARPS - 2  # of the loader, that compute vectors, of a chunk each in turn
FENCED = True  # another fence covers what a ring would fence; who stores a tile by TMA fences itself


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
        """A chunk of V or E in shared memory, 64 tokens by the columns of both consumers."""
        return st(CHUNK, CONSUMERS * COLUMNS, self.dtype)

    @property
    def state(self):
        """The state, transposed, which TMA stores."""
        return st(CONSUMERS * COLUMNS, self.key_dim, self.dtype)

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
    SOLUTION = st(2 * CHUNK, CHUNK, INPUT)
    TRANSPOSED, seq_layout, two_parts = rt(16, CHUNK, INPUT), SequenceLayout(config.varlen), TwoParts(INPUT)
    solver = ChunkSolver(chunk_vectors, two_parts, LEAST_BETA[INPUT])
    LOADER_REGISTERS, SOLVER_REGISTERS, CONSUMER_REGISTERS = REGISTERS
    readers = CONSUMERS * WARPS
    smem = shared(
        k=ring(config.key, STAGES, readers + WARPS),
        v=ring(config.values, STAGES, readers),
        x=ring(SOLUTION, AHEAD, readers + 1, writers=WARPS),
        vectors=ring(chunk_vectors.spec, VECTORS, readers + WARPS + 1, writers=1),
        states=ring(config.state, 1, 1, writers=readers),
        out=ring(config.values, 1, 1, writers=readers),
        high=TRIANGLE,
        low=TRIANGLE,
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
        gGates: array(3), gInitialState: array(4), gErrors: tiled(config.values, rows=2), gStates: tiled(config.state, rows=2),
        gSolutions: tiled(SOLUTION, rows=2), gVectors: tiled(chunk_vectors.spec, 3, None, 2), gTailK: tiled(config.key, unit=1),
        gTailV: tiled(config.values, unit=1), gCuSeqlens: ENDS, length: INT, heads: INT, group: INT,
    ):  # fmt: skip
        """A block has a head of a sequence. gInitialState: transposed. gErrors .. gVectors: of each chunk and head. gStates: S
        transposed. gSolutions: -L^T, high above low."""
        k, v, x, vectors, states, out, high, low = smem.open()
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
            elif warp == 1:
                for j in range(n):
                    chunk = int32(first_chunk + j)
                    tma_store(gStates, (chunk, head), states.wait(j))
                    store_wait()
                    states.release(j)
                    tma_store(gVectors, (chunk, head), vectors.wait(j))
                    tma_store(gSolutions, (chunk, head), x.wait(j))
                    store_wait()
                    vectors.release(j)
                    x.release(j)
                    tma_store(gErrors, (chunk, head), out.wait(j))
                    store_wait()
                    out.release(j)
            else:
                for j in range(warp - 2, n, VECTOR_WARPS):
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
                k.release(j)
                vector_tile = vectors.wait(j)
                solution = solver.solve(s, vector_tile, (high, low))
                x_high, x_low = solver.split_solution(solution, vector_tile)
                vectors.release(j)
                target = x.claim(j)
                warpgroup.store(subtile(target, CHUNK, 0), x_high)
                warpgroup.store(subtile(target, CHUNK, 1), x_low)
                x.publish(j)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            sequence, head, _, n, _ = locate_block(gCuSeqlens, length, heads)
            s_t = warpgroup.load(gInitialState, STATE, (sequence, head, COLUMNS * wg, 0), aligned=False)
            for j in range(n):
                keys, vector_tile = k.wait(j), vectors.wait(j)
                rounded = INPUT(s_t)
                u = warpgroup.mm_ABt(rounded, keys)
                warpgroup.store(subtile(states.claim(j), COLUMNS, wg), rounded)
                states.publish(j, FENCED)
                values = fp32(warpgroup.load_transposed(subtile(v.wait(j), CHUNK, 0, COLUMNS, wg), TRANSPOSED, fenced=False))
                y = values - chunk_vectors.decay_cols(warpgroup.wait(u), vector_tile, DECAY)
                beta = chunk_vectors.cols(vector_tile, BETA)
                y_high, y_low = two_parts.split(y * beta)
                x_high, x_low = subtile(x.wait(j), CHUNK, 0), subtile(x.wait(j), CHUNK, 1)
                e = warpgroup.mma_AB(warpgroup.mma_AB(warpgroup.mma_AB(y, y_high, x_high), y_high, x_low), y_low, x_high)
                s_t = chunk_vectors.decay_state(s_t, vector_tile)
                factors = chunk_vectors.decay_cols(beta, vector_tile, DECAY_TO_END)
                e = warpgroup.wait(e)
                s_t = warpgroup.mma_AB(s_t, INPUT(e * factors), keys)
                x.release(j)
                warpgroup.store_transposed(subtile(out.claim(j), CHUNK, 0, COLUMNS, wg), e)
                out.publish(j)  # its fence is that of loads of V, too
                vectors.release(j)
                v.release(j)
                s_t = warpgroup.wait(s_t)
                k.release(j)

    return scan, smem
