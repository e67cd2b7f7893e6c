"""The two recurrences of the delta rule's gradients, for Hopper, where heads are too few for a thread block each
(parts/delta/delta_chunks.py has the equations): forward in time

    Y = V - exp(b) K S              E = Y - L (beta Y)      S after = exp(b_last) S + (exp(b_last - b) K)^T (beta E)

and in reverse

    dU = P^T dO + exp(b_last - b) K dS      Z = dU - L^T (beta dU)      dV = beta Z
    dS before = exp(b_last) dS + (scale exp(b) Q)^T dO - (exp(b) K)^T dV

The two are independent, and so are their columns of values: a block has 64 columns of one of them. L^T and P, which do not
depend on S or dS, are in memory (delta_inverse_hopper.py), so a step is three products that wait for one another, and others in
the gaps between them. S, E and dV of every chunk are stored, and dS where segments end: from there on
delta_segment_gradients_hopper.py walks through all segments at once. In training the forward pass runs one of them, which then
computes outputs, too, and the backward pass the other (delta_recurrences.py)."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import divmod, store_wait, tma_store, warpgroup
from tiles import fp32, inlined, ring, rt, shared
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunks import BETA, DECAY, DECAY_TO_END, KEY_DIMS, TwoParts
from ...parts.delta.delta_config import DeltaConfig, delta_sizes
from ...parts.delta.delta_recurrences import BOTH, GRADIENTS_ALONE, REVERSE, BothRecurrences, StatesWithOutputs
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, send_tile

BLOCKS = 2  # of columns of values, in each direction
CONSUMER, PRODUCER = 0, 1  # warpgroups
LOADER, SENDER, STATE_SENDER, OUTPUT_SENDER = range(4)  # warps of the producer
STAGES = 3  # chunks in flight


@dataclass(frozen=True)
class Config(DeltaConfig):
    """A kernel's configuration. recurrences: those that it runs."""

    recurrences: BothRecurrences = BOTH
    label, threads = "recurrences", 2 * warpgroup.THREADS


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with decays and without, in bf16, for both recurrences, and one for each of
    them. everything: fp16 too, and each recurrence in all sizes."""
    if target.has_wgmma:
        for size, gated in itertools.product(delta_sizes(everything), (False, True)):
            config = Config(*size, gated)
            largest = config.key_dim == max(KEY_DIMS)
            yield config
            if everything or (largest and gated):
                yield with_outputs(config)
            if everything or (largest and not gated):
                yield replace(config, recurrences=GRADIENTS_ALONE)


def with_outputs(config: Config) -> Config:
    """The configuration for the forward pass in training."""
    return replace(config, recurrences=StatesWithOutputs(config.dtype, config.vectors))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, STATE, TRANSPOSED = config.dtype, rt(16, config.key_dim, fp32), rt(16, CHUNK, config.dtype)
    KEYS, VALUES = tiled(config.key, unit=1), tiled(config.values, unit=1)
    chunk_vectors, two_parts = config.vectors, TwoParts(INPUT)
    forward, backward = SequenceLayout(), SequenceLayout(reversed=True)
    recurrences = config.recurrences
    PARAMS, query_stages = recurrences.params(config.values), recurrences.query_stages
    smem = shared(
        k=ring(config.key, STAGES),
        v=ring(config.values, STAGES),  # dO in blocks of the reverse recurrence
        x=ring(two_parts.square, STAGES),
        vectors=ring(chunk_vectors.spec, STAGES),
        q=ring(config.key, query_stages),
        p=ring(config.square, query_stages),
        states=ring(config.state, 1, 1, writers=warpgroup.WARPGROUP),
        out=ring(config.values, 1, 1, writers=warpgroup.WARPGROUP),
        **recurrences.rings(config.values),
    )

    @inlined
    def advance_state(s_t, j, tiles, scale):
        """The state after the j-th chunk from the state before it. Passes the state before it, and the chunk's E, to the
        producer, which stores them, and its outputs, if they are wanted."""
        k, v, x, vectors, states, out = tiles.k, tiles.v, tiles.x, tiles.vectors, tiles.states, tiles.out
        keys = k.wait(j)
        rounded = INPUT(s_t)
        u = warpgroup.mm_ABt(rounded, keys)
        o = recurrences.multiply_queries(tiles, j, rounded)
        warpgroup.store(states.claim(j), rounded)
        states.publish(j, fenced=False)
        vector_tile, values = vectors.wait(j), fp32(warpgroup.load_transposed(v.wait(j), TRANSPOSED, fenced=False))
        y = values - chunk_vectors.decay_cols(warpgroup.wait(u, newer=recurrences.products), vector_tile, DECAY)
        o = recurrences.finish_queries(o, tiles, j)
        beta = chunk_vectors.cols(vector_tile, BETA)
        weighted, solution = y * beta, two_parts.halves(x.wait(j))
        e = two_parts.mma_AB(y, two_parts.split(weighted), solution)
        s_t, factors = chunk_vectors.decay_state(s_t, vector_tile), chunk_vectors.decay_cols(beta, vector_tile, DECAY_TO_END)
        o = recurrences.decay(o, vector_tile, scale)
        e = warpgroup.wait(e)
        s_t = warpgroup.mma_AB(s_t, INPUT(e * factors), keys)
        o = recurrences.add_errors(o, tiles, j, e, beta)
        x.release(j)
        warpgroup.store_transposed(out.claim(j), e)
        out.publish(j, fenced=False)
        vectors.release(j)  # its fence is that of all loads of this chunk
        v.release(j)
        s_t = warpgroup.wait(s_t, newer=recurrences.products)
        k.release(j)
        recurrences.store_outputs(o, tiles, j)
        return s_t

    @inlined
    def advance_gradient(ds_t, from_outputs, j, last, tiles, scale):
        """(dS before the j-th chunk from the end, P^T dO of the next one, or of this one if it is the `last`) from dS after the
        chunk and from its P^T dO. Passes its dV to the producer, which stores it."""
        k, do, x, vectors, q, p, out = tiles.k, tiles.v, tiles.x, tiles.vectors, tiles.q, tiles.p, tiles.out
        keys = k.wait(j)
        du = warpgroup.mm_ABt(INPUT(ds_t), keys)
        vector_tile, do_t = vectors.wait(j), fp32(warpgroup.load_transposed(do.wait(j), TRANSPOSED, fenced=False))
        do_t = INPUT(do_t * chunk_vectors.decay_cols(scale, vector_tile, DECAY))
        ds_t = warpgroup.mma_AB(chunk_vectors.decay_state(ds_t, vector_tile), do_t, q.wait(j))
        du = chunk_vectors.decay_cols(warpgroup.wait(du, newer=1), vector_tile, DECAY_TO_END) + from_outputs
        beta = chunk_vectors.cols(vector_tile, BETA)
        weighted, solution = du * beta, two_parts.halves(x.wait(j))
        z = two_parts.mma_ABt(du, two_parts.split(weighted), solution)
        next_chunk = int32(min(j + 1, last))
        from_outputs = warpgroup.mm_AtB(do.wait(next_chunk), p.wait(next_chunk))
        factors = chunk_vectors.decay_cols(0.0 - beta, vector_tile, DECAY)
        z = warpgroup.wait(z, newer=1)
        ds_t = warpgroup.wait(ds_t, newer=1)
        ds_t = warpgroup.mma_AB(ds_t, INPUT(z * factors), keys)
        x.release(j)
        q.release(j)
        warpgroup.store_transposed(out.claim(j), z * beta)
        out.publish(j, fenced=False)
        vectors.release(j)  # its fence is that of all loads of this chunk
        from_outputs = warpgroup.wait(from_outputs, newer=1)
        do.release(j)
        p.release(j)
        ds_t = warpgroup.wait(ds_t)
        k.release(j)
        return ds_t, from_outputs

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gQ: KEYS, gK: KEYS, gV: VALUES, gDOut: VALUES, gSolutions: tiled(two_parts.square, rows=2),
        gScores: tiled(config.square, rows=2), gVectors: tiled(chunk_vectors.spec, 3, None, 2), gInitialState: array(4),
        gErrors: tiled(config.values, rows=2), gStates: tiled(config.state, rows=2), gDV: VALUES, gLastState: array(4),
        gSegmentStates: array(4), gFirstState: array(4), length: INT, segments: INT, sequences: INT, heads: INT, group: INT,
        scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """A block has 64 columns of S or of dS, of a head of a sequence. gSolutions .. gVectors: of each chunk and head,
        as delta_inverse_hopper.py stores them. gErrors, gStates: of each chunk and head, S transposed. gLastState, gFirstState:
        the gradients of the states after and before the sequence, transposed; gSegmentStates: of those after each of its
        `segments`, the last one first."""
        tiles = smem.open()
        index, block = divmod(cuda.blockIdx.x, BLOCKS)
        index, head = divmod(index, heads)
        direction, sequence = recurrences.locate(index, sequences)
        key_head, member = divmod(head, group)
        seq = forward.sequence_tokens(0, sequence, length)
        first_chunk = forward.chunk_index(seq.start, sequence, length)
        if warpgroup.id() == PRODUCER:
            k, v, x, vectors, q, p = tiles.k, tiles.v, tiles.x, tiles.vectors, tiles.q, tiles.p
            states, out = tiles.states, tiles.out
            rank, n = warpgroup.rank(), seq.num_chunks()
            for j in range(n):
                number = int32(n - 1 - j) if direction == REVERSE else j
                token, chunk = seq.chunk_start(number), int32(first_chunk + number)
                at = seq.batch, token, head, block
                if rank == LOADER:
                    k.fill(j, gK, (seq.batch, token, key_head))
                    if direction == REVERSE:
                        v.fill(j, gDOut, at)
                        p.fill(j, gScores, (chunk, head))
                        q.fill(j, gQ, (seq.batch, token, key_head))
                    else:
                        recurrences.load_queries(tiles, j, gQ, gScores, (seq.batch, token, key_head), chunk, head)
                        v.fill(j, gV, at)
                    vectors.fill(j, gVectors, (chunk, head))
                    x.fill(j, gSolutions, (chunk, head))
                elif rank == SENDER:
                    if direction == REVERSE:
                        tma_store(gDV, at, out.wait(j))
                    else:
                        tma_store(gErrors, (chunk, head, 0, block), out.wait(j))
                    store_wait()
                    out.release(j)
                elif rank == STATE_SENDER and direction != REVERSE:
                    send_tile(states, j, gStates, (chunk, head, block))
                elif rank == OUTPUT_SENDER:
                    recurrences.send_outputs(tiles, j, params, at)
                    recurrences.clear_counts(params, chunk, key_head, member, block)
        else:
            coord = sequence, head, int32(COLUMNS * block), 0
            if direction == REVERSE:
                ds_t, j = warpgroup.load(gLastState, STATE, coord, aligned=False), int32(0)
                last = int32(seq.num_chunks() - 1)
                from_outputs = warpgroup.wait(warpgroup.mm_AtB(tiles.v.wait(0), tiles.p.wait(0)))
                for segment in range(segments):
                    slot = int32(sequence * segments + segment)
                    warpgroup.store(gSegmentStates, ds_t, (slot, head, int32(COLUMNS * block), 0), aligned=True)
                    for _ in range(backward.segment_tokens(0, sequence, length, segment, segments).num_chunks()):
                        ds_t, from_outputs = advance_gradient(ds_t, from_outputs, j, last, tiles, scale)
                        j = int32(j + 1)
                warpgroup.store(gFirstState, ds_t, coord, aligned=False)
            else:
                s_t = warpgroup.load(gInitialState, STATE, coord, aligned=False)
                for j in range(seq.num_chunks()):
                    s_t = advance_state(s_t, j, tiles, scale)
                recurrences.store_last_state(params, s_t, coord)

    return walk, smem
