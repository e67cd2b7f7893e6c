"""KDA on few long sequences, for Hopper: delta_walk_hopper.py's walk with decays of channels (kda_hopper.py has the equations).
U = T (V - k' S') occurs in two products, whose other factors have T in them already (kda_transform_hopper.py):

    D = V - k' S'        O = scale (q' S' + P~ D)        S = exp(b_last) S + k~^T D
    S' = exp(r) S        P~ = tril(q' k*^T) T            k~ = exp(b_last - r) T^T k*

so that a chunk is four products, and its chain two."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import load, subtile, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from ..parts.recurrent.transposed_state import TransposedState
from .kda_hopper import KEY_DIMS

CONSUMER, SENDER, LOADER = range(3)  # warpgroups
REGISTERS = 40, 40, 240  # of a thread of loader, sender and consumer
STAGES = {64: 4, 128: 3}  # padded key dim: chunks in flight
SENT = 2  # tiles of outputs on their way
WARPS = warpgroup.WARPGROUP


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. varlen: are sequences packed (cu_seqlens)?"""

    key_dim: int
    dtype: dtype
    varlen: bool = False
    threads = warpgroup.THREADS * (LOADER + 1)

    @property
    def key(self):
        """The tile of q', k' or k~ for a chunk."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def value(self):
        """The tile of V or O for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def square(self):
        """The tile of P~ for a chunk."""
        return st(CHUNK, CHUNK, self.dtype)

    @property
    def state_decays(self):
        """The vectors exp(r) and exp(b_last), a number for each channel."""
        return sv(2 * self.key_dim, fp32)

    def __str__(self):
        return f"walk of KDA, Dk {self.key_dim} {self.dtype}{', varlen' * self.varlen}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims; fp16 and all packed ones if `everything`."""
    if target.has_wgmma:
        for key_dim, input_dtype, varlen in itertools.product(KEY_DIMS, (bf16, fp16) if everything else (bf16,), (False, True)):
            if not varlen or key_dim == max(KEY_DIMS) or everything:
                yield Config(key_dim, input_dtype, varlen)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, STATE, OUTPUTS = config.dtype, rt(16, config.key_dim, fp32), rt(16, CHUNK, fp32)
    seq_layout, stages = SequenceLayout(config.varlen), STAGES[config.key_dim]
    state = TransposedState(config.key_dim, INPUT, seq_layout)
    LOADER_REGISTERS, SENDER_REGISTERS, CONSUMER_REGISTERS = REGISTERS
    CHUNK_KEYS, KEY_DIM, DECAY_TO_REFERENCE, DECAY = tiled(config.key, rows=2), config.key_dim, 0, 1
    smem = shared(
        q=ring(config.key, stages, WARPS),
        k_decayed=ring(config.key, stages, WARPS),
        k=ring(config.key, stages, WARPS),
        v=ring(config.value, stages, WARPS),
        p=ring(config.square, stages, WARPS),
        state_decays=ring(config.state_decays, stages, WARPS),
        out=ring(config.value, SENT, WARPS, writers=WARPS),
    )

    @inlined
    def load_decay(decays, index):
        """One of the vectors of `state_decays`."""
        return load(subtile(decays, KEY_DIM, index), STATE.row_vec)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gQueries: CHUNK_KEYS, gDecayedKeys: CHUNK_KEYS, gSolvedKeys: CHUNK_KEYS, gSolvedScores: tiled(config.square, rows=2),
        gStateDecays: tiled(config.state_decays, 3, None, 2), gV: tiled(config.value, unit=1),
        gO: seq_layout.output_argument(config.value), gInitialState: array(4), gFinalState: array(4), gCuSeqlens: ENDS,
        length: INT, blocks: INT, heads: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of a sequence, and the state after it. gQueries .. gStateDecays: of each chunk and head, as
        kda_transform_hopper.py stores them. Each of the value `heads` is `blocks` blocks of columns wide."""
        q, k_decayed, k, v, p, state_decays, out = smem.open()
        wg = warpgroup.id()
        block, _, head, sequence = block_coord(cuda.blockIdx.x, blocks, 1, heads)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n = seq.num_chunks()
        if wg == LOADER:
            warpgroup.release_registers(LOADER_REGISTERS)
            first = seq_layout.chunk_index(seq.start, sequence, length)
            if warpgroup.rank() == 0:
                for j in range(n):
                    at = int32(first + j), head
                    k_decayed.fill(j, gDecayedKeys, at)
                    state_decays.fill(j, gStateDecays, at)
                    q.fill(j, gQueries, at)
                    v.fill(j, gV, (seq.batch, seq.chunk_start(j), head, block))
                    k.fill(j, gSolvedKeys, at)
                    p.fill(j, gSolvedScores, at)
        elif wg == SENDER:
            warpgroup.release_registers(SENDER_REGISTERS)
            for j in range(n):
                state.send_output(gO, out, j, seq, head, block)
            seq_layout.zero_padding(gO, gCuSeqlens, sequence, length, head, block)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            column = COLUMNS * block
            s_t = warpgroup.load(gInitialState, STATE, (sequence, head, 0, column), 3, 2)
            outputs = INPUT(zeros(OUTPUTS))
            for j in range(n):
                decays = state_decays.wait(j)
                rounded = INPUT(s_t * load_decay(decays, DECAY_TO_REFERENCE))
                d = warpgroup.mm_ABt(rounded, k_decayed.wait(j))
                o = warpgroup.mm_ABt(rounded, q.wait(j))
                if j > 0:
                    warpgroup.store_transposed(out.claim(j - 1), outputs)
                    out.publish(j - 1)
                values = fp32(warpgroup.load_transposed(v.wait(j), state.values))
                v.release(j)
                values = seq_layout.zero_other_columns(values, seq.remaining(j))
                d = INPUT(values - warpgroup.wait(d, newer=1))
                k_decayed.release(j)
                o = warpgroup.wait(o)
                q.release(j)
                s_t = warpgroup.mma_AB(s_t * load_decay(decays, DECAY), d, k.wait(j))
                o = warpgroup.mma_AB(o, d, p.wait(j))
                state_decays.release(j)
                s_t = warpgroup.wait(s_t, newer=1)
                k.release(j)
                outputs = INPUT(warpgroup.wait(o) * scale)
                p.release(j)
            if n > 0:
                warpgroup.store_transposed(out.claim(n - 1), outputs)
                out.publish(n - 1)
            warpgroup.store(gFinalState, s_t, (sequence, head, 0, column), 3, 2)

    return walk, smem
