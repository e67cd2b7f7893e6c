"""The two recurrences of the delta rule's gradients, for Hopper, where each channel of the keys has a decay
(parts/recurrent/delta_channels.py has the equations): forward in time

    Y = V - K^ S        E = Y - L (beta Y)        S after = exp(b_last) S + K~^T (beta E)

and in reverse, with P without the scale,

    dU = scale P^T dO + K~ dS        Z = dU - L^T (beta dU)        dV = beta Z
    dS before = exp(b_last) dS + scale exp(b) Q^T dO - K^^T dV

The two are independent, and so are their columns of values: a block has 64 columns of one of them. All that does not depend on
S or dS is in memory (delta_channel_inverse_hopper.py), so a step is four products that wait for one another. S, E,
dS and Z of every chunk are stored, where delta_channel_gradients_hopper.py reads them."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, load, subtile, warpgroup
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.delta_chunks import KEY_DIMS, PANEL, TwoParts
from ..parts.recurrent.gates import ROW_VEC
from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

REVERSE, DIRECTIONS = 0, 2  # the reverse recurrence, whose blocks come first because it takes longer; number of recurrences
CONSUMER, PRODUCER = 0, 1  # warpgroups
STAGES = 2  # chunks in flight
PANELS = COLUMNS // PANEL  # of a block's columns of values, as they lie in memory


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. varlen: are sequences packed (cu_seqlens)?"""

    key_dim: int
    dtype: dtype
    varlen: bool = False
    threads = warpgroup.THREADS * 2

    @property
    def key(self):
        """The tile of decayed queries or keys for a chunk."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def values(self):
        """The tile of V, dO, E, Z or dV for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def state(self):
        """A chunk's S or dS in shared memory, transposed: 64 columns of values by Dk."""
        return st(COLUMNS, self.key_dim, self.dtype)

    @property
    def state_panel(self):
        """PANEL columns of values of S or dS, transposed, as they lie in memory."""
        return st(PANEL, self.key_dim, self.dtype)

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
    KEYS, VALUES, STATES = tiled(config.key, rows=2), tiled(config.values, unit=1), tiled(config.state_panel, rows=2)
    SCORES, SOLUTION = st(CHUNK, CHUNK, INPUT), st(2 * CHUNK, CHUNK, INPUT)
    DECAY, BETA = sv(config.key_dim, fp32), sv(CHUNK, fp32)
    two_parts, forward = TwoParts(INPUT), SequenceLayout(config.varlen)
    backward = SequenceLayout(config.varlen, reversed=True)
    smem = shared(
        read_keys=ring(config.key, STAGES),
        write_keys=ring(config.key, STAGES),
        v=ring(config.values, STAGES),
        x=ring(SOLUTION, STAGES),
        decay=ring(DECAY, STAGES),
        beta=ring(BETA, STAGES),
        q=ring(config.key, STAGES),
        p=ring(SCORES, STAGES),
        state=config.state,
        out=config.values,
        dv=config.values,
    )

    @inlined
    def send_state(gStates, chunk, head, block, slot, state, s_t, newer):
        """Store S (slot 0) or dS (slot 1) to shared memory, where products read it, and from there to memory. newer: as in
        warpgroup.send."""
        warpgroup.store_wait(newer)
        warpgroup.sync()
        warpgroup.store(state, s_t)
        for i in range(PANELS):
            row = int32(2 * (PANELS * block + i) + slot)
            warpgroup.tma_store(gStates, (chunk, head, row), subtile(state, PANEL, i))

    @inlined
    def advance_state(s_t, j, rings, tiles, gErrors, gStates, chunk, head, block):
        """The state after the j-th chunk from the state before it. Stores the state before it, and the chunk's E."""
        (read_keys, write_keys, v, x, decay, beta), (state, out) = rings, tiles
        send_state(gStates, chunk, head, block, 0, state, s_t, 1)
        u = warpgroup.mm_ABt(state, read_keys.wait(j))
        values = fp32(warpgroup.load_transposed(v.wait(j), TRANSPOSED))
        v.release(j)
        betas = load(beta.wait(j), ROW_VEC)
        y = values - warpgroup.wait(u)
        read_keys.release(j)
        (high, low), solution = two_parts.split(y * betas), x.wait(j)
        x_high, x_low = subtile(solution, CHUNK, 0), subtile(solution, CHUNK, 1)
        e = warpgroup.mma_AB(warpgroup.mma_AB(warpgroup.mma_AB(y, high, x_high), high, x_low), low, x_high)
        s_t = s_t * load(decay.wait(j), STATE.row_vec)
        e = warpgroup.wait(e)
        x.release(j)
        s_t = warpgroup.mma_AB(s_t, INPUT(e * betas), write_keys.wait(j))
        warpgroup.store_wait(PANELS)
        warpgroup.sync()
        warpgroup.store_transposed(out, e)
        warpgroup.tma_store(gErrors, (chunk, head, 0, block), out)
        decay.release(j)
        beta.release(j)
        s_t = warpgroup.wait(s_t)
        write_keys.release(j)
        return s_t

    @inlined
    def advance_gradient(ds_t, j, rings, tiles, arrays, at, scale):
        """dS before the j-th chunk, counted from the end, from dS after it. Stores dS after it, and the chunk's Z and dV."""
        (read_keys, write_keys, do, x, decay, beta, q, p), (state, out, dv) = rings, tiles
        (gErrors, gStates, gDV), (batch, row, chunk, head, block) = arrays, at
        send_state(gStates, chunk, head, block, 1, state, ds_t, 2)
        douts = do.wait(j)
        from_outputs = warpgroup.mm_AtB(douts, p.wait(j))
        du = warpgroup.mm_ABt(state, write_keys.wait(j))
        do_t = INPUT(fp32(warpgroup.load_transposed(douts, TRANSPOSED)) * scale)
        ds_t = ds_t * load(decay.wait(j), STATE.row_vec)
        betas = load(beta.wait(j), ROW_VEC)
        from_outputs = warpgroup.wait(from_outputs, newer=1) * scale
        du = warpgroup.wait(du) + from_outputs
        ds_t = warpgroup.mma_AB(ds_t, do_t, q.wait(j))
        do.release(j)
        p.release(j)
        write_keys.release(j)
        (high, low), solution = two_parts.split(du * betas), x.wait(j)
        x_high, x_low = subtile(solution, CHUNK, 0), subtile(solution, CHUNK, 1)
        z = warpgroup.mma_ABt(warpgroup.mma_ABt(warpgroup.mma_ABt(du, high, x_high), high, x_low), low, x_high)
        ds_t, z = warpgroup.wait(ds_t, newer=1), warpgroup.wait(z)
        q.release(j)
        x.release(j)
        dv_t = z * betas
        ds_t = warpgroup.mma_AB(ds_t, INPUT(0.0 - dv_t), read_keys.wait(j))
        warpgroup.store_wait(PANELS)
        warpgroup.sync()
        warpgroup.store_transposed(out, z)
        warpgroup.store_transposed(dv, dv_t)
        warpgroup.tma_store(gErrors, (chunk, head, 1, block), out)
        warpgroup.tma_store(gDV, (batch, row, head, block), dv)
        decay.release(j)
        beta.release(j)
        ds_t = warpgroup.wait(ds_t)
        read_keys.release(j)
        return ds_t

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gDecayedQ: KEYS, gReadKeys: KEYS, gWriteKeys: KEYS, gB: tiled(DECAY, 3, None, 2), gChunkBeta: tiled(BETA, 3, None, 2),
        gV: VALUES, gDOut: VALUES, gScores: tiled(SCORES, rows=2), gSolutions: tiled(SOLUTION, rows=2),
        gInitialState: array(4), gErrors: tiled(config.values, rows=2), gStates: STATES, gDV: VALUES, gLastState: array(4),
        gFirstState: array(4), gTailV: VALUES, gTailDOut: VALUES, gTailDV: VALUES, gCuSeqlens: ENDS, length: INT,
        blocks: INT, sequences: INT, heads: INT, scale: FLOAT,
    ):  # fmt: skip
        """A block has 64 columns of S or of dS, of a head of a sequence, which is `blocks` blocks of columns wide. gDecayedQ ..
        gChunkBeta, gScores, gSolutions: of each chunk and head, as delta_channel_inverse_hopper.py stores them. gErrors: E
        above Z. gStates: S and dS transposed, by panels. gLastState, gFirstState: the gradients of the states after and before
        the sequence, transposed. gTailV .. gTailDV: see packed_tails.py."""
        read_keys, write_keys, v, x, decay, beta, q, p, state, out, dv = smem.open()
        index, block = divmod(cuda.blockIdx.x, blocks)
        index, head = divmod(index, heads)
        direction, sequence = divmod(index, sequences)
        first_token = forward.sequence_tokens(gCuSeqlens, sequence, length).start
        first_chunk = forward.chunk_index(first_token, sequence, length)
        if warpgroup.id() == PRODUCER:
            if warpgroup.rank() == 0:
                if direction == REVERSE:
                    seq = backward.segment_tokens(gCuSeqlens, sequence, length, 0, 1)
                    for j in range(seq.num_chunks()):
                        token, at = seq.chunk_start(j), (int32(first_chunk + seq.chunk_number(j)), head)
                        douts, batch, row = backward.whole_tile(gDOut, gTailDOut, seq, token, sequence)
                        v.fill(j, douts, (batch, row, head, block))
                        p.fill(j, gScores, at)
                        write_keys.fill(j, gWriteKeys, at)
                        decay.fill(j, gB, at)
                        beta.fill(j, gChunkBeta, at)
                        q.fill(j, gDecayedQ, at)
                        x.fill(j, gSolutions, at)
                        read_keys.fill(j, gReadKeys, at)
                else:
                    seq = forward.sequence_tokens(gCuSeqlens, sequence, length)
                    for j in range(seq.num_chunks()):
                        at = int32(first_chunk + j), head
                        read_keys.fill(j, gReadKeys, at)
                        values, batch, row = forward.whole_tile(gV, gTailV, seq, seq.chunk_start(j), sequence)
                        v.fill(j, values, (batch, row, head, block))
                        beta.fill(j, gChunkBeta, at)
                        x.fill(j, gSolutions, at)
                        decay.fill(j, gB, at)
                        write_keys.fill(j, gWriteKeys, at)
        else:
            state_coord = sequence, head, int32(COLUMNS * block), 0
            if direction == REVERSE:
                rings, tiles = (read_keys, write_keys, v, x, decay, beta, q, p), (state, out, dv)
                ds_t = warpgroup.load(gLastState, STATE, state_coord, aligned=False)
                seq = backward.segment_tokens(gCuSeqlens, sequence, length, 0, 1)
                for j in range(seq.num_chunks()):
                    target, batch, row = backward.whole_tile(gDV, gTailDV, seq, seq.chunk_start(j), sequence)
                    coord = batch, row, int32(first_chunk + seq.chunk_number(j)), head, block
                    ds_t = advance_gradient(ds_t, j, rings, tiles, (gErrors, gStates, target), coord, scale)
                warpgroup.store(gFirstState, ds_t, state_coord, aligned=False)
            else:
                s_t = warpgroup.load(gInitialState, STATE, state_coord, aligned=False)
                for j in range(forward.sequence_tokens(gCuSeqlens, sequence, length).num_chunks()):
                    chunk = int32(first_chunk + j)
                    s_t = advance_state(
                        s_t, j, (read_keys, write_keys, v, x, decay, beta), (state, out), gErrors, gStates, chunk, head, block
                    )
            warpgroup.store_wait()

    return walk, smem
