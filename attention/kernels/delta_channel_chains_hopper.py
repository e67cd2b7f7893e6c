"""The two recurrences of the delta rule's gradients, for Hopper, where each channel of the keys has a decay
(parts/recurrent/delta_channels.py has the equations): forward in time

    Y = V - K^ S        E = Y - L (beta Y)        S after = exp(b_last) S + K~^T (beta E)

and in reverse, with P without the scale,

    dU = scale P^T dO + K~ dS        Z = dU - L^T (beta dU)        dV = beta Z
    dS before = exp(b_last) dS + scale exp(b) Q^T dO - K^^T dV

The two are independent, and so are their columns of values: a block has 64 columns of one of them. All that does not depend on
S or dS is in memory (delta_channel_inverse_hopper.py), so a step is three products that wait for one another, and others in the
gaps between them. S, E, dS and dV of every chunk are stored, and delta_channel_gradients_hopper.py reads them: they go through
rings to warps of the producer, so that the consumer waits for no fence."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, load, store_wait, subtile, tma_store, warpgroup
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.delta_chunks import KEY_DIMS, PANEL, TwoParts
from ..parts.recurrent.gates import ROW_VEC
from ..parts.recurrent.tokens import CHUNK, COLUMNS, ChunkPlace, SequenceLayout, send_tile

REVERSE, DIRECTIONS = 0, 2  # the reverse recurrence, whose blocks come first because it takes longer; number of recurrences
CONSUMER, PRODUCER = 0, 1  # warpgroups
LOADER, SENDER, STATE_SENDER = range(3)  # warps of the producer
STAGES, VALUE_STAGES = 2, 3  # chunks in flight; of V, dO, P and L
FENCED = True  # no fence at a synchronisation or a release, because another one is there already
PANELS = COLUMNS // PANEL  # of a block's columns of values, as they lie in memory


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. varlen: are sequences packed (cu_seqlens)?"""

    key_dim: int
    dtype: dtype
    varlen: bool = False
    threads = warpgroup.THREADS * 2

    def __str__(self):
        return f"recurrences, by channel, Dk {self.key_dim} {self.dtype}{', varlen' * self.varlen}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims in bf16; fp16 too if `everything`."""
    if target.has_wgmma:
        yield from itertools.starmap(
            Config, itertools.product(KEY_DIMS, (bf16, fp16) if everything else (bf16,), (False, True))
        )


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, STATE, TRANSPOSED = config.dtype, rt(16, config.key_dim, fp32), rt(16, CHUNK, config.dtype)
    KEY, VALUE, SCORES = (st(CHUNK, cols, INPUT) for cols in (config.key_dim, COLUMNS, CHUNK))
    STATE_TILE, STATE_PANEL = (st(rows, config.key_dim, INPUT) for rows in (COLUMNS, PANEL))  # transposed; in memory
    KEYS, VALUES, STATES = tiled(KEY, rows=2), tiled(VALUE, unit=1), tiled(STATE_PANEL, rows=2)
    DECAY, BETA, two_parts = sv(config.key_dim, fp32), sv(CHUNK, fp32), TwoParts(INPUT)
    forward, backward = SequenceLayout(config.varlen), SequenceLayout(config.varlen, reversed=True)
    smem = shared(
        read_keys=ring(KEY, STAGES),
        write_keys=ring(KEY, STAGES),
        v=ring(VALUE, VALUE_STAGES),  # dO in blocks of the reverse recurrence
        x=ring(two_parts.square, VALUE_STAGES),
        decay=ring(DECAY, STAGES),
        beta=ring(BETA, STAGES),
        q=ring(KEY, STAGES),
        p=ring(SCORES, VALUE_STAGES),
        states=ring(STATE_TILE, 1, 1, writers=warpgroup.WARPGROUP),
        out=ring(VALUE, 1, 1, writers=warpgroup.WARPGROUP),
    )

    @inlined
    def store_state(gStates, states, j, chunk, head, block, slot):
        """One warp stores the j-th S (slot 0) or dS (slot 1)."""
        state = states.wait(j)
        for i in range(PANELS):
            tma_store(gStates, (chunk, head, int32(2 * (PANELS * block + i) + slot)), subtile(state, PANEL, i))
        store_wait()
        states.release(j)

    @inlined
    def advance_state(s_t, j, tiles):
        """The state after the j-th chunk from the state before it. Passes the state before it, and the chunk's E, to the
        producer, which stores them."""
        read_keys, write_keys, v, x, decay, beta, _, _, states, out = tiles
        rounded = INPUT(s_t)
        u = warpgroup.mm_ABt(rounded, read_keys.wait(j))
        warpgroup.store(states.claim(j), rounded)
        states.publish(j, FENCED)
        values = fp32(warpgroup.load_transposed(v.wait(j), TRANSPOSED, fenced=False))
        betas = load(beta.wait(j), ROW_VEC)
        y = values - warpgroup.wait(u)
        read_keys.release(j)
        e = two_parts.mma_AB(y, two_parts.split(y * betas), two_parts.halves(x.wait(j)))
        s_t = s_t * load(decay.wait(j), STATE.row_vec)
        e = warpgroup.wait(e)
        s_t = warpgroup.mma_AB(s_t, INPUT(e * betas), write_keys.wait(j))
        x.release(j)
        warpgroup.store_transposed(out.claim(j), e)
        out.publish(j, FENCED)
        beta.release(j)  # its fence is that of all loads of this chunk
        decay.release(j, None, FENCED)
        v.release(j)
        s_t = warpgroup.wait(s_t)
        write_keys.release(j)
        return s_t

    @inlined
    def advance_gradient(ds_t, from_outputs, j, last, tiles, scale):
        """(dS before the j-th chunk, counted from the end, P^T dO of the next one, or of this one if it is the `last`) from dS
        after the chunk and from its P^T dO. Passes dS after it, and the chunk's dV, to the producer, which stores them."""
        read_keys, write_keys, do, x, decay, beta, q, p, states, out = tiles
        rounded = INPUT(ds_t)
        du = warpgroup.mm_ABt(rounded, write_keys.wait(j))
        warpgroup.store(states.claim(j), rounded)
        states.publish(j, FENCED)
        do_t = INPUT(fp32(warpgroup.load_transposed(do.wait(j), TRANSPOSED, fenced=False)) * scale)
        ds_t = warpgroup.mma_AB(ds_t * load(decay.wait(j), STATE.row_vec), do_t, q.wait(j))
        betas = load(beta.wait(j), ROW_VEC)
        du = warpgroup.wait(du, newer=1) + from_outputs * scale
        write_keys.release(j)
        z = two_parts.mma_ABt(du, two_parts.split(du * betas), two_parts.halves(x.wait(j)))
        next_chunk = int32(min(j + 1, last))
        from_outputs = warpgroup.mm_AtB(do.wait(next_chunk), p.wait(next_chunk))
        z, ds_t = warpgroup.wait(z, newer=1), warpgroup.wait(ds_t, newer=1)
        dv_t = z * betas
        ds_t = warpgroup.mma_AB(ds_t, INPUT(0.0 - dv_t), read_keys.wait(j))
        x.release(j)
        q.release(j)
        warpgroup.store_transposed(out.claim(j), dv_t)
        out.publish(j, FENCED)
        beta.release(j)  # its fence is that of all loads of this chunk
        decay.release(j, None, FENCED)
        from_outputs = warpgroup.wait(from_outputs, newer=1)
        do.release(j)
        p.release(j)
        ds_t = warpgroup.wait(ds_t)
        read_keys.release(j)
        return ds_t, from_outputs

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gDecayedQ: KEYS, gReadKeys: KEYS, gWriteKeys: KEYS, gB: tiled(DECAY, 3, None, 2), gChunkBeta: tiled(BETA, 3, None, 2),
        gV: VALUES, gDOut: VALUES, gScores: tiled(SCORES, rows=2), gSolutions: tiled(two_parts.square, rows=2),
        gInitialState: array(4), gErrors: tiled(VALUE, rows=2), gStates: STATES, gDV: VALUES, gLastState: array(4),
        gFirstState: array(4), gTailV: VALUES, gTailDOut: VALUES, gTailDV: VALUES, gCuSeqlens: ENDS, length: INT,
        blocks: INT, sequences: INT, heads: INT, scale: FLOAT,
    ):  # fmt: skip
        """A block has 64 columns of S or of dS, of a head of a sequence, which is `blocks` blocks of columns wide. gDecayedQ ..
        gChunkBeta, gScores, gSolutions: of each chunk and head, as delta_channel_inverse_hopper.py stores them. gErrors: E.
        gStates: S and dS transposed, by panels. gLastState, gFirstState: the gradients of the states after and before the
        sequence, transposed. gTailV .. gTailDV: see packed_tails.py."""
        tiles = smem.open()
        index, block = divmod(cuda.blockIdx.x, blocks)
        index, head = divmod(index, heads)
        direction, sequence = divmod(index, sequences)
        first_token = forward.sequence_tokens(gCuSeqlens, sequence, length).start
        first_chunk = forward.chunk_index(first_token, sequence, length)
        if warpgroup.id() == PRODUCER:
            read_keys, write_keys, v, x, decay, beta, q, p, states, out = tiles
            rank = warpgroup.rank()
            if direction == REVERSE:
                seq = backward.segment_tokens(gCuSeqlens, sequence, length, 0, 1)
                for j in range(seq.num_chunks()):
                    chunk = int32(first_chunk + seq.chunk_number(j))
                    place = ChunkPlace(chunk, head, sequence, seq.chunk_start(j), seq)
                    if rank == LOADER:
                        write_keys.fill(j, gWriteKeys, (chunk, head))
                        backward.fill_chunk(v, j, gDOut, gTailDOut, place, head, block)
                        p.fill(j, gScores, (chunk, head))
                        decay.fill(j, gB, (chunk, head))
                        q.fill(j, gDecayedQ, (chunk, head))
                        beta.fill(j, gChunkBeta, (chunk, head))
                        x.fill(j, gSolutions, (chunk, head))
                        read_keys.fill(j, gReadKeys, (chunk, head))
                    elif rank == SENDER:
                        backward.send_chunk(out, j, gDV, gTailDV, place, block)
                    elif rank == STATE_SENDER:
                        store_state(gStates, states, j, chunk, head, block, 1)
            else:
                seq = forward.sequence_tokens(gCuSeqlens, sequence, length)
                for j in range(seq.num_chunks()):
                    chunk = int32(first_chunk + j)
                    if rank == LOADER:
                        read_keys.fill(j, gReadKeys, (chunk, head))
                        place = ChunkPlace(chunk, head, sequence, seq.chunk_start(j), seq)
                        forward.fill_chunk(v, j, gV, gTailV, place, head, block)
                        beta.fill(j, gChunkBeta, (chunk, head))
                        x.fill(j, gSolutions, (chunk, head))
                        decay.fill(j, gB, (chunk, head))
                        write_keys.fill(j, gWriteKeys, (chunk, head))
                    elif rank == SENDER:
                        send_tile(out, j, gErrors, (chunk, head, 0, block))
                    elif rank == STATE_SENDER:
                        store_state(gStates, states, j, chunk, head, block, 0)
        else:
            state_coord = sequence, head, int32(COLUMNS * block), 0
            if direction == REVERSE:
                ds_t = warpgroup.load(gLastState, STATE, state_coord, aligned=False)
                n = backward.segment_tokens(gCuSeqlens, sequence, length, 0, 1).num_chunks()
                if n > 0:
                    from_outputs = warpgroup.wait(warpgroup.mm_AtB(tiles.v.wait(0), tiles.p.wait(0)))
                    for j in range(n):
                        ds_t, from_outputs = advance_gradient(ds_t, from_outputs, j, int32(n - 1), tiles, scale)
                warpgroup.store(gFirstState, ds_t, state_coord, aligned=False)
            else:
                s_t = warpgroup.load(gInitialState, STATE, state_coord, aligned=False)
                for j in range(forward.sequence_tokens(gCuSeqlens, sequence, length).num_chunks()):
                    s_t = advance_state(s_t, j, tiles)

    return walk, smem
