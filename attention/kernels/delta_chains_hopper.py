"""The two recurrences of the delta rule's gradients, for Hopper, where heads are too few for a thread block each
(parts/recurrent/delta_chunks.py has the equations): forward in time

    Y = V - exp(b) K S              E = Y - L (beta Y)      S after = exp(b_last) S + (exp(b_last - b) K)^T (beta E)

and in reverse

    dU = P^T dO + exp(b_last - b) K dS      Z = dU + R^T dU
    dS before = exp(b_last) dS + (scale exp(b) Q)^T dO - (exp(b) K)^T (beta Z)

Neither waits for the other, and their columns of values do not either: a block has 64 columns of one of them. What does not
depend on S or dS is in memory (delta_inverse_hopper.py), so a step is four products that wait for one another. S and E of every
chunk are stored, and dS where segments end: from there on delta_gradients_hopper.py walks through all segments at once."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, subtile, warpgroup
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, ChunkVectors, TwoParts
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

REVERSE, DIRECTIONS = 0, 2  # the number of the direction that takes longer, and begins first; how many there are
BLOCKS = 2  # of columns of values, in each direction
CONSUMER, PRODUCER = 0, 1  # warpgroups
STAGES = 3  # chunks in flight


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
    vectors_of, parts_of = ChunkVectors(config.gated), TwoParts(INPUT)
    forward, backward = SequenceLayout(), SequenceLayout(reversed=True)
    smem = shared(
        k=ring(config.key, STAGES),
        v=ring(config.values, STAGES),
        x=ring(SOLUTION, STAGES),
        vectors=ring(vectors_of.spec, STAGES),
        q=ring(config.key, STAGES),
        p=ring(SCORES, STAGES),
        state=config.state,
        out=config.values,
    )

    @inlined
    def times_solution(acc, x, solution):
        """acc + x solution, pending; x and the solution in two parts."""
        (high, low), x_high, x_low = parts_of.split(x), subtile(solution, CHUNK, 0), subtile(solution, CHUNK, 1)
        return warpgroup.mma_AB(warpgroup.mma_AB(warpgroup.mma_AB(acc, high, x_high), high, x_low), low, x_high)

    @inlined
    def times_transposed(acc, x, solution):
        """acc + x solution^T, pending; x and the solution in two parts."""
        (high, low), x_high, x_low = parts_of.split(x), subtile(solution, CHUNK, 0), subtile(solution, CHUNK, 1)
        return warpgroup.mma_ABt(warpgroup.mma_ABt(warpgroup.mma_ABt(acc, high, x_high), high, x_low), low, x_high)

    @inlined
    def advance_state(s_t, j, rings, tiles, gErrors, gStates, chunk, head, block):
        """The state after the j-th chunk from that before it, which is stored, as the chunk's E is."""
        (k, v, x, vectors), (state, out) = rings, tiles
        warpgroup.send(gStates, (chunk, head, block), state, s_t, 1)
        keys, chunk_vectors = k.wait(j), vectors.wait(j)
        u = warpgroup.mm_ABt(state, keys)
        values = fp32(warpgroup.load_transposed(v.wait(j), TRANSPOSED))
        v.release(j)
        y = values - vectors_of.decay_cols(warpgroup.wait(u), chunk_vectors, DECAY)
        e = warpgroup.wait(times_solution(y, y, x.wait(j)))
        x.release(j)
        u = vectors_of.decay_cols(e * vectors_of.cols(chunk_vectors, BETA), chunk_vectors, DECAY_TO_END)
        s_t = vectors_of.decay_state(s_t, chunk_vectors)
        s_t = warpgroup.mma_AB(s_t, INPUT(u), keys)
        warpgroup.store_wait(1)
        warpgroup.sync()
        warpgroup.store_transposed(out, e)
        warpgroup.tma_store(gErrors, (chunk, head, 0, block), out)
        vectors.release(j, None, True)
        s_t = warpgroup.wait(s_t)
        k.release(j)
        return s_t

    @inlined
    def advance_gradient(ds_t, j, rings, scale):
        """dS before the j-th chunk, from the end, from dS after it."""
        k, do, x, vectors, q, p = rings
        keys, chunk_vectors, douts = k.wait(j), vectors.wait(j), do.wait(j)
        du = warpgroup.mm_ABt(INPUT(ds_t), keys)
        from_outputs = warpgroup.mm_AtB(douts, p.wait(j))
        do_t = fp32(warpgroup.load_transposed(douts, TRANSPOSED)) * scale
        do_t = INPUT(vectors_of.decay_cols(do_t, chunk_vectors, DECAY))
        du = vectors_of.decay_cols(warpgroup.wait(du, newer=1), chunk_vectors, DECAY_TO_END)
        ds_t = warpgroup.mma_AB(vectors_of.decay_state(ds_t, chunk_vectors), do_t, q.wait(j))
        du = du + warpgroup.wait(from_outputs, newer=1)
        do.release(j)
        p.release(j)
        z = warpgroup.wait(times_transposed(du, du, x.wait(j)))
        ds_t = warpgroup.wait(ds_t)
        x.release(j)
        q.release(j)
        dv_t = vectors_of.decay_cols(z * vectors_of.cols(chunk_vectors, BETA) * (-1.0), chunk_vectors, DECAY)
        ds_t = warpgroup.mma_AB(ds_t, INPUT(dv_t), keys)
        vectors.release(j)
        ds_t = warpgroup.wait(ds_t)
        k.release(j)
        return ds_t

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gQ: KEYS, gK: KEYS, gV: VALUES, gDOut: VALUES, gForward: tiled(SOLUTION, rows=2), gReverse: tiled(SOLUTION, rows=2),
        gScores: tiled(SCORES, rows=2), gVectors: tiled(vectors_of.spec, 3, None, 2), gInitialState: array(4),
        gErrors: tiled(config.values, rows=2), gStates: tiled(config.state, rows=2), gLastState: array(4),
        gSegmentStates: array(4), gFirstState: array(4), length: INT, segments: INT, sequences: INT, heads: INT, group: INT,
        scale: FLOAT,
    ):  # fmt: skip
        """A block has 64 columns of S or of dS, of a head of a sequence. gForward .. gVectors: of each chunk and head, as
        delta_inverse_hopper.py stores them. gErrors, gStates: of each chunk and head, S transposed. gLastState, gFirstState:
        the gradients of the states after and before the sequence, transposed; gSegmentStates: of those after each of its
        `segments`, the last one first."""
        k, v, x, vectors, q, p, state, out = smem.open()
        index, block = divmod(cuda.blockIdx.x, BLOCKS)
        index, head = divmod(index, heads)
        direction, sequence = divmod(index, sequences)
        key_head, _ = divmod(head, group)
        first_chunk = forward.chunk_index(int32(0), sequence, length)
        wg = warpgroup.id()
        if wg == PRODUCER:
            if warpgroup.rank() == 0:
                if direction == REVERSE:
                    seq = backward.segment_tokens(0, sequence, length, 0, 1)
                    for j in range(seq.num_chunks()):
                        token, chunk = seq.chunk_start(j), int32(first_chunk + seq.chunk_number(j))
                        k.fill(j, gK, (seq.batch, token, key_head))
                        v.fill(j, gDOut, (seq.batch, token, head, block))
                        p.fill(j, gScores, (chunk, head))
                        vectors.fill(j, gVectors, (chunk, head))
                        q.fill(j, gQ, (seq.batch, token, key_head))
                        x.fill(j, gReverse, (chunk, head))
                else:
                    seq = forward.sequence_tokens(0, sequence, length)
                    for j in range(seq.num_chunks()):
                        token, chunk = seq.chunk_start(j), int32(first_chunk + j)
                        k.fill(j, gK, (seq.batch, token, key_head))
                        v.fill(j, gV, (seq.batch, token, head, block))
                        vectors.fill(j, gVectors, (chunk, head))
                        x.fill(j, gForward, (chunk, head))
        else:
            at = sequence, head, int32(COLUMNS * block), 0
            if direction == REVERSE:
                ds_t, j = warpgroup.load(gLastState, STATE, at, aligned=False), int32(0)
                for segment in range(segments):
                    slot = int32(sequence * segments + segment)
                    warpgroup.store(gSegmentStates, ds_t, (slot, head, int32(COLUMNS * block), 0), aligned=True)
                    for _ in range(backward.segment_tokens(0, sequence, length, segment, segments).num_chunks()):
                        ds_t = advance_gradient(ds_t, j, (k, v, x, vectors, q, p), scale)
                        j = int32(j + 1)
                warpgroup.store(gFirstState, ds_t, at, aligned=False)
            else:
                s_t = warpgroup.load(gInitialState, STATE, at, aligned=False)
                for j in range(forward.sequence_tokens(0, sequence, length).num_chunks()):
                    chunk = int32(first_chunk + j)
                    s_t = advance_state(s_t, j, (k, v, x, vectors), (state, out), gErrors, gStates, chunk, head, block)
                warpgroup.store_wait()

    return walk, smem
