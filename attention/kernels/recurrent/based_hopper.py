"""Based: linear attention whose weights are the Taylor series of exp to the second order (Arora et al. 2024), for Hopper.

    P[i, j] = 1 + s + s ** 2 / 2,  s = scale q_i . k_j,  j <= i          o_i = sum_j P[i, j] v_j / sum_j P[i, j]

The weights are products of features, P = f(q) f(k)^T (`ops.taylor`: the 136 products of two of 16 numbers, the 16 themselves
and 1), so the inter-chunk part is f(q) S, where S = sum f(k)^T v over all earlier chunks. A thread block scans the chunks of 64
tokens of one head for 64 columns of the values and keeps their part of S in registers, transposed, 64 x 160. For a chunk,

    O   = f(Q) S + tril(P) V        f(Q) is computed in registers; S is read from shared memory, rounded
    S^T = S^T + V^T f(K)            f(K) is computed in registers and read from shared memory

The normalizer's sum over earlier chunks is n + q . z + q^T Z q / 2 with n tokens, z = sum k and Z = sum k^T k, all of it in
registers.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32

from ops import (
    divmod,
    finish_sum,
    lane_sum,
    mma_AB,
    mma_ABt,
    mma_AtB,
    ones,
    row_sum,
    taylor,
    warpgroup,
    zeros,
)
from ops.for_attention.taylor_features import BASE, FEATURES
from tiles import bf16, fp16, fp32, ring, rt, shared, st
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent.based_walk import CONSUMER_REGISTERS, CTAS_PER_SM, LOADER, LOADER_REGISTERS, STATE, THREADS, BasedTiles
from ...parts.recurrent.taylor_sums import COL_VEC, load_key_sums, store_sums, taylor_weights
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

STAGES = 4  # chunks in flight


@dataclass(frozen=True)
class Config(BasedTiles):
    """A kernel's configuration. varlen: are sequences packed (cu_seqlens)?"""

    varlen: bool = False

    def __str__(self):
        return f"{self.dtype}{', normalized' * self.normalize}{', varlen' * self.varlen}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """List all configurations. Those for fp16, whose code takes as many registers as bf16's, come with `everything` only."""
    if target.has_wgmma:
        dtypes = (bf16, fp16) if everything else (bf16,)
        yield from itertools.starmap(Config, itertools.product(dtypes, (False, True), (False, True)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, NORMALIZE, seq_layout = config.dtype, config.normalize, SequenceLayout(config.varlen)
    X, ONES = rt(16, BASE, INPUT), rt(16, CHUNK, INPUT)
    KEYS = tiled(config.key, unit=1)
    smem = shared(
        q=ring(config.key, STAGES),
        k=ring(config.key, STAGES),
        v=ring(config.value, STAGES),
        state=st(COLUMNS, FEATURES, INPUT),
        features=config.features,
        out=config.value,
    )

    @cuda.jit(launch_bounds=(THREADS, CTAS_PER_SM), fastmath=True)
    def scan(
        gQ: KEYS, gK: KEYS, gV: tiled(config.value, unit=1), gO: seq_layout.output_argument(config.value),
        gInitialState: array(4), gInitialZ: array(3), gFinalState: array(4), gFinalZ: array(3), gCuSeqlens: ENDS,
        length: INT, segments: INT, heads: INT, columns: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of one of the `segments` of a sequence and of one of the `heads`, of which `group` share a key head, for
        one of `columns` blocks of 64 value columns. The last segment stores the final state. gInitialState, gInitialZ: before
        each segment."""
        q, k, v, state, features, out = smem.open()
        index, column = divmod(cuda.blockIdx.x, columns)
        sequence, slot, head, seq = seq_layout.locate_segment(index, gCuSeqlens, length, segments, heads)
        n = seq.num_chunks()
        if warpgroup.id() == LOADER:
            warpgroup.release_registers(LOADER_REGISTERS)
            key_head, _ = divmod(head, group)
            for j in range(n):
                token = seq.chunk_start(j)
                q.fill(j, gQ, (seq.batch, token, key_head))
                k.fill(j, gK, (seq.batch, token, key_head))
                v.fill(j, gV, (seq.batch, token, head, column))
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            s_t = warpgroup.load(gInitialState, STATE, (slot, head, 0, COLUMNS * column), rows=3, cols=2)
            if NORMALIZE:
                n_earlier, z, zz = load_key_sums(gInitialZ, slot, head)
            warpgroup.store(state, s_t)
            warpgroup.sync()
            for j in range(n):
                keys, values = k.wait(j), v.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j))
                seq_layout.zero_other_rows(values, seq.remaining(j))
                queries = warpgroup.load(q.wait(j), X) * scale
                q.release(j)
                s = warpgroup.mm_ABt(queries, keys)
                o = warpgroup.mm_ABt(taylor(queries, 1.0), state)
                p = warpgroup.tril(taylor_weights(warpgroup.wait(s, newer=1)), 0, 0.0)
                if NORMALIZE:
                    sums = finish_sum(lane_sum(p))
                o = warpgroup.mma_AB(o, INPUT(p), values)
                warpgroup.store(features, taylor(warpgroup.load(keys, X), 0.5))
                warpgroup.sync()
                s_t = warpgroup.mma_AtB(s_t, values, features)
                o = warpgroup.wait(o, newer=1)
                if NORMALIZE:
                    earlier_sums = row_sum(fp32(queries) * mma_ABt(z, queries, INPUT(zz * 0.5))) + n_earlier + CHUNK * j
                    z, zz = mma_AB(z, ones(ONES), keys), mma_AtB(zz, keys, keys)
                    o = o / (sums + earlier_sums)
                seq_layout.store(gO, out, o, seq, seq.chunk_start(j), head, column)
                if seq_layout.varlen:
                    warpgroup.sync()
                s_t = warpgroup.wait(s_t)
                warpgroup.store(state, s_t)
                warpgroup.store_wait()
                warpgroup.sync()
                k.release(j)
                v.release(j)
            if slot + 1 == segments * (sequence + 1):
                warpgroup.store(gFinalState, s_t, (sequence, head, 0, COLUMNS * column), rows=3, cols=2)
                seq_layout.zero_padding(gO, gCuSeqlens, sequence, length, head, column)
                if NORMALIZE and column == 0:
                    n_tokens, unused = n_earlier + float32(seq.end - seq.start), zeros(COL_VEC)
                    store_sums(gFinalZ, sequence, head, n_tokens, z, zz, 0.5, unused)  # f(k) halves squares

    return scan, smem
