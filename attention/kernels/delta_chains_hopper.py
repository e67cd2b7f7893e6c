"""The two recurrences of the delta rule's gradients, for Hopper, where heads are too few for a thread block each
(parts/recurrent/delta_chunks.py has the equations): forward in time

    Y = V - exp(b) K S              E = Y - L (beta Y)      S after = exp(b_last) S + (exp(b_last - b) K)^T (beta E)

and in reverse

    dU = P^T dO + exp(b_last - b) K dS      Z = dU - L^T (beta dU)      dV = beta Z
    dS before = exp(b_last) dS + (scale exp(b) Q)^T dO - (exp(b) K)^T dV

The two are independent, and so are their columns of values: a block has 64 columns of one of them. L^T and P, which do not
depend on S or dS, are in memory (delta_inverse_hopper.py), so a step is three products that wait for one another, and others in
the gaps between them. S, E and dV of every chunk are stored, and dS where segments end: from there on
delta_segment_gradients_hopper.py walks through all segments at once."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, store_wait, subtile, tma_store, warpgroup
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, ChunkVectors, TwoParts
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

REVERSE, DIRECTIONS = 0, 2  # the reverse recurrence, whose blocks come first because it takes longer; number of recurrences
BLOCKS = 2  # of columns of values, in each direction
CONSUMER, PRODUCER = 0, 1  # warpgroups
STAGES = 3  # chunks in flight
FENCED = True  # no fence at a synchronisation or a release, because another one is there already


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gated: are there decays?"""

    key_dim: int
    dtype: dtype
    gated: bool
    threads = warpgroup.THREADS * 2

    @property
    def key(self):
        """The tile of Q or K for a chunk."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def values(self):
        """The tile of V, dO or E for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def state(self):
        """A chunk's S in shared memory, transposed: 64 columns of values by Dk."""
        return st(COLUMNS, self.key_dim, self.dtype)

    def __str__(self):
        return f"recurrences, Dk {self.key_dim} {self.dtype}{', gated' * self.gated}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without, in bf16; fp16 too if `everything`."""
    if target.has_wgmma:
        yield from itertools.starmap(
            Config, itertools.product(KEY_DIMS, (bf16, fp16) if everything else (bf16,), (False, True))
        )


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, STATE, TRANSPOSED = config.dtype, rt(16, config.key_dim, fp32), rt(16, CHUNK, config.dtype)
    KEYS, VALUES = tiled(config.key, unit=1), tiled(config.values, unit=1)
    SCORES, SOLUTION = st(CHUNK, CHUNK, INPUT), st(2 * CHUNK, CHUNK, INPUT)
    chunk_vectors, two_parts = ChunkVectors(config.gated), TwoParts(INPUT)
    forward, backward = SequenceLayout(), SequenceLayout(reversed=True)
    smem = shared(
        k=ring(config.key, STAGES),
        v=ring(config.values, STAGES),
        x=ring(SOLUTION, STAGES),
        vectors=ring(chunk_vectors.spec, STAGES),
        q=ring(config.key, STAGES),
        p=ring(SCORES, STAGES),
        states=ring(config.state, 1, 1, writers=warpgroup.WARPGROUP),
        out=ring(config.values, 1, 1, writers=warpgroup.WARPGROUP),
    )

    @inlined
    def times_solution(acc, x, solution):
        """acc + x solution, pending; x and the solution in two parts."""
        (high, low), x_high, x_low = two_parts.split(x), subtile(solution, CHUNK, 0), subtile(solution, CHUNK, 1)
        return warpgroup.mma_AB(warpgroup.mma_AB(warpgroup.mma_AB(acc, high, x_high), high, x_low), low, x_high)

    @inlined
    def times_transposed(acc, x, solution):
        """acc + x solution^T, pending; x and the solution in two parts."""
        (high, low), x_high, x_low = two_parts.split(x), subtile(solution, CHUNK, 0), subtile(solution, CHUNK, 1)
        return warpgroup.mma_ABt(warpgroup.mma_ABt(warpgroup.mma_ABt(acc, high, x_high), high, x_low), low, x_high)

    @inlined
    def advance_state(s_t, j, rings):
        """The state after the j-th chunk from the state before it. Passes the state before it, and the chunk's E, to the
        producer, which stores them."""
        k, v, x, vectors, states, out = rings
        keys = k.wait(j)
        rounded = INPUT(s_t)
        u = warpgroup.mm_ABt(rounded, keys)
        warpgroup.store(states.claim(j), rounded)
        states.publish(j, FENCED)
        vector_tile, values = vectors.wait(j), fp32(warpgroup.load_transposed(v.wait(j), TRANSPOSED, fenced=False))
        y = values - chunk_vectors.decay_cols(warpgroup.wait(u), vector_tile, DECAY)
        beta = chunk_vectors.cols(vector_tile, BETA)
        e = times_solution(y, y * beta, x.wait(j))
        s_t, factors = chunk_vectors.decay_state(s_t, vector_tile), chunk_vectors.decay_cols(beta, vector_tile, DECAY_TO_END)
        e = warpgroup.wait(e)
        s_t = warpgroup.mma_AB(s_t, INPUT(e * factors), keys)
        x.release(j)
        warpgroup.store_transposed(out.claim(j), e)
        out.publish(j, FENCED)
        vectors.release(j)  # its fence is that of all loads of this chunk
        v.release(j)
        s_t = warpgroup.wait(s_t)
        k.release(j)
        return s_t

    @inlined
    def advance_gradient(ds_t, from_outputs, j, last, rings, scale):
        """(dS before the j-th chunk from the end, P^T dO of the next one, or of this one if it is the `last`) from dS after the
        chunk and from its P^T dO. Passes its dV to the producer, which stores it."""
        k, do, x, vectors, q, p, out = rings
        keys = k.wait(j)
        du = warpgroup.mm_ABt(INPUT(ds_t), keys)
        vector_tile, do_t = vectors.wait(j), fp32(warpgroup.load_transposed(do.wait(j), TRANSPOSED, fenced=False))
        do_t = INPUT(do_t * chunk_vectors.decay_cols(scale, vector_tile, DECAY))
        ds_t = warpgroup.mma_AB(chunk_vectors.decay_state(ds_t, vector_tile), do_t, q.wait(j))
        du = chunk_vectors.decay_cols(warpgroup.wait(du, newer=1), vector_tile, DECAY_TO_END) + from_outputs
        beta = chunk_vectors.cols(vector_tile, BETA)
        z = times_transposed(du, du * beta, x.wait(j))
        next_chunk = int32(min(j + 1, last))
        from_outputs = warpgroup.mm_AtB(do.wait(next_chunk), p.wait(next_chunk))
        factors = chunk_vectors.decay_cols(0.0 - beta, vector_tile, DECAY)
        z = warpgroup.wait(z, newer=1)
        ds_t = warpgroup.wait(ds_t, newer=1)
        ds_t = warpgroup.mma_AB(ds_t, INPUT(z * factors), keys)
        x.release(j)
        q.release(j)
        warpgroup.store_transposed(out.claim(j), z * beta)
        out.publish(j, FENCED)
        vectors.release(j)  # its fence is that of all loads of this chunk
        from_outputs = warpgroup.wait(from_outputs, newer=1)
        do.release(j)
        p.release(j)
        ds_t = warpgroup.wait(ds_t)
        k.release(j)
        return ds_t, from_outputs

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gQ: KEYS, gK: KEYS, gV: VALUES, gDOut: VALUES, gSolutions: tiled(SOLUTION, rows=2), gScores: tiled(SCORES, rows=2),
        gVectors: tiled(chunk_vectors.spec, 3, None, 2), gInitialState: array(4), gErrors: tiled(config.values, rows=2),
        gStates: tiled(config.state, rows=2), gDV: VALUES, gLastState: array(4), gSegmentStates: array(4),
        gFirstState: array(4), length: INT, segments: INT, sequences: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """A block has 64 columns of S or of dS, of a head of a sequence. gSolutions .. gVectors: of each chunk and head,
        as delta_inverse_hopper.py stores them. gErrors, gStates: of each chunk and head, S transposed. gLastState, gFirstState:
        the gradients of the states after and before the sequence, transposed; gSegmentStates: of those after each of its
        `segments`, the last one first."""
        k, v, x, vectors, q, p, states, out = smem.open()
        do = v  # blocks of the reverse recurrence have dO in the ring of V
        index, block = divmod(cuda.blockIdx.x, BLOCKS)
        index, head = divmod(index, heads)
        direction, sequence = divmod(index, sequences)
        key_head, _ = divmod(head, group)
        first_chunk = forward.chunk_index(int32(0), sequence, length)
        wg = warpgroup.id()
        if wg == PRODUCER:
            rank, seq = warpgroup.rank(), forward.sequence_tokens(0, sequence, length)
            n = seq.num_chunks()
            for j in range(n):
                number = j
                if direction == REVERSE:
                    number = int32(n - 1 - j)
                token, chunk = seq.chunk_start(number), int32(first_chunk + number)
                if rank == 0:
                    k.fill(j, gK, (seq.batch, token, key_head))
                    if direction == REVERSE:
                        v.fill(j, gDOut, (seq.batch, token, head, block))
                        p.fill(j, gScores, (chunk, head))
                        q.fill(j, gQ, (seq.batch, token, key_head))
                    else:
                        v.fill(j, gV, (seq.batch, token, head, block))
                    vectors.fill(j, gVectors, (chunk, head))
                    x.fill(j, gSolutions, (chunk, head))
                elif rank == 1:
                    if direction == REVERSE:
                        tma_store(gDV, (seq.batch, token, head, block), out.wait(j))
                    else:
                        tma_store(gErrors, (chunk, head, 0, block), out.wait(j))
                    store_wait()
                    out.release(j)
                elif rank == 2 and direction != REVERSE:
                    tma_store(gStates, (chunk, head, block), states.wait(j))
                    store_wait()
                    states.release(j)
        else:
            coord = sequence, head, int32(COLUMNS * block), 0
            if direction == REVERSE:
                ds_t, j = warpgroup.load(gLastState, STATE, coord, aligned=False), int32(0)
                last = int32(forward.sequence_tokens(0, sequence, length).num_chunks() - 1)
                from_outputs = warpgroup.wait(warpgroup.mm_AtB(do.wait(0), p.wait(0)))
                for segment in range(segments):
                    slot = int32(sequence * segments + segment)
                    warpgroup.store(gSegmentStates, ds_t, (slot, head, int32(COLUMNS * block), 0), aligned=True)
                    for _ in range(backward.segment_tokens(0, sequence, length, segment, segments).num_chunks()):
                        ds_t, from_outputs = advance_gradient(
                            ds_t, from_outputs, j, last, (k, do, x, vectors, q, p, out), scale
                        )
                        j = int32(j + 1)
                warpgroup.store(gFirstState, ds_t, coord, aligned=False)
            else:
                s_t = warpgroup.load(gInitialState, STATE, coord, aligned=False)
                for j in range(forward.sequence_tokens(0, sequence, length).num_chunks()):
                    s_t = advance_state(s_t, j, (k, v, x, vectors, states, out))

    return walk, smem
