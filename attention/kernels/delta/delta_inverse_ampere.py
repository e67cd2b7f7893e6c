"""The part of the delta rule in each chunk that does not depend on states (parts/delta/delta_chunks.py has the equations):
the cumulative sums of gates, betas, and with N = stril(M * K K^T)

    (I + N beta)^-T        (I + beta N)^-T        P^T = scale (M * Q K^T)^T

The second inverse is for gradients. Inverses are stored as a sum of two numbers of the input's dtype, high and low. A block has
some chunks of a head, each of its warps 16 tokens."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, exp2, load, mma_ABt, store, subtile, truncate, warpgroup, zeros
from ops.for_attention.triangular_inverse import TRIANGLE, inverse_transposed
from tiles import fp32, pipeline, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.targets import Target

from ...parts.delta.delta_chunks import WARP_COLUMNS, WARPS, InverseConfig, TwoParts, inverse_configs
from ...parts.delta.delta_decay import delta_decay
from ...parts.recurrent.gates import COL_VEC, ROW_VEC, TILE
from ...parts.recurrent.tokens import CHUNK, SequenceLayout


@dataclass(frozen=True)
class Config(InverseConfig):
    """A kernel's configuration: that of delta_chunks.py, with a name of its own."""

    label = "inverses of chunks"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with and without gates."""
    yield from inverse_configs(Config, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, GATED, VECTOR_BYTES = config.dtype, config.gated, config.vector_bytes
    FOR_GRADIENTS, BETA = config.for_gradients, config.beta
    seq_layout, two_parts = SequenceLayout(config.varlen), TwoParts(INPUT)
    decay = delta_decay(INPUT, GATED, config.formula)
    PARAMS = decay.params()
    KEY = st(CHUNK, config.key_dim, INPUT)
    smem = shared(q=pipeline(KEY, 1, WARPS), k=pipeline(KEY, 1, WARPS), high=TRIANGLE, low=TRIANGLE, b=sv(CHUNK, fp32))

    @cuda.jit(launch_bounds=(config.threads, 2), fastmath=True)
    def invert(
        gQ: array(4, INPUT), gK: array(4, INPUT), gBeta: array(3), gGates: array(3), gB: array(3), gChunkBeta: array(3),
        gForward: array(4, INPUT), gReverse: array(4, INPUT), gCuSeqlens: ENDS,
        length: INT, parts: INT, heads: INT, group: INT, scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """The chunks of a sequence are divided evenly among the `parts` blocks of a head. gB, gChunkBeta: b and beta of each
        chunk and head. gForward: the inverse for E, high above low; gReverse: that for Z, and below it P^T. Without the second
        inverse they may be the same array."""
        q, k, high, low, b = smem.open()
        index, part = divmod(cuda.blockIdx.x, parts)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n, rank = seq.num_chunks(), warpgroup.rank()
        queries, keys, betas = truncate(gQ, 1, seq.end), truncate(gK, 1, seq.end), truncate(gBeta, 1, seq.end)
        rate_and_bias = decay.load_rate_and_bias(params, head)
        for j in seq_layout.chunks_of_block(part, n, parts):
            token = seq.chunk_start(j)
            chunk = seq_layout.chunk_index(token, sequence, length)
            k.fill(j, keys, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            q.fill(j, queries, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            beta = BETA.compute(load(betas, ROW_VEC, (seq.batch, token, head), cols=1))
            gates = decay.load_gates(gGates, seq, (seq.batch, token, head))
            sums = decay.cumsum(gates, rate_and_bias, seq.remaining(j))
            if rank == 0:
                store(gChunkBeta, beta, (chunk, head, 0))
                if GATED:
                    store(gB, sums, (chunk, head, 0), aligned=True)
                    store(b, sums)
            key_tile = k.wait(j, 1)  # its barrier also shows b to all warps
            key_rows = subtile(key_tile, WARP_COLUMNS, rank)
            s = mma_ABt(zeros(TILE), key_rows, key_tile)
            p_t = mma_ABt(zeros(TILE), key_rows, q.wait(j)) * scale
            if GATED:
                b_rows, b_cols = load(subtile(b, WARP_COLUMNS, rank), COL_VEC), load(b, ROW_VEC)
                s = s * exp2(zeros(TILE) + b_rows - b_cols)
                p_t = p_t * exp2(zeros(TILE) + b_cols - b_rows)
            s = warpgroup.causal(s, -1, 0.0)
            warpgroup.store(gReverse, INPUT(warpgroup.triu(p_t, 0, 0.0)), (chunk, head, 2 * CHUNK, 0), aligned=True)
            two_parts.store_in_memory(gForward, inverse_transposed(s * beta, high, low), chunk, head)
            if FOR_GRADIENTS:
                beta_rows = BETA.compute(load(betas, COL_VEC, (seq.batch, int32(token + WARP_COLUMNS * rank), head), cols=1))
                two_parts.store_in_memory(gReverse, inverse_transposed(s * beta_rows, high, low), chunk, head)

    return invert, smem
