"""The part of the delta rule in each chunk that does not depend on states, where each channel of the keys has a decay
(parts/delta/delta_channels.py has the equations): the queries and keys that states are multiplied by,

    scale exp(b) Q        exp(b) K        exp(b_last - b) K        exp(b_last), the decay of the state

and the inverses and P of delta_inverse_ampere.py, of scores that are computed by recursive halving (anchored_scores.py). A
block has some chunks of a head, each of its warps 16 tokens."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import divmod, exp2, load, rows, store, transpose, truncate, warpgroup, zeros
from ops.for_attention.triangular_inverse import TRIANGLE, inverse_transposed, store_block_parts, store_parts
from tiles import fp32, inlined, pipeline, shared, st
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.targets import Target

from ...parts.delta.delta_chunks import WARP_COLUMNS, WARPS, InverseConfig, TwoParts, inverse_configs
from ...parts.recurrent.anchored_scores import KdaScores
from ...parts.recurrent.channel_chunks import UNFENCED
from ...parts.recurrent.channel_decay import TOKEN_GROUP
from ...parts.recurrent.channel_gates import choose_channel_gates
from ...parts.recurrent.gates import COL_VEC, LOG2_E, ROW_VEC, TILE
from ...parts.recurrent.tokens import CHUNK, SequenceLayout


@dataclass(frozen=True)
class Config(InverseConfig):
    """A kernel's configuration: that of delta_chunks.py, with a name of its own."""

    label = "inverses of chunks, gates by channel"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims."""
    yield from (config for config in inverse_configs(Config, everything) if config.gated)


class ScaledScores(KdaScores):
    """KdaScores, with a scale for the scores of queries, which is the parameter after the triangles."""

    @inlined
    def round_scores(self, extra, scores, warp, block):
        high, low, scale = extra
        store_block_parts((high, low), rows(scores, TOKEN_GROUP, 1), warp, block)
        return self.dtype(rows(scores, TOKEN_GROUP, 0) * scale)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES = config.dtype, config.vector_bytes
    FOR_GRADIENTS, BETA = config.for_gradients, config.beta
    seq_layout, two_parts, channels = SequenceLayout(config.varlen), TwoParts(INPUT), ScaledScores(config.key_dim, INPUT)
    GROUP, channel_gates = channels.group_tile, choose_channel_gates(channels.warp_tile.cols, config.formula, None)
    PARAMS = channel_gates.params()
    KEY, SUMS = (st(CHUNK, config.key_dim, x, width=min(128, GROUP.cols * x.itemsize)) for x in (INPUT, fp32))
    smem = shared(
        q=pipeline(KEY, 1, WARPS), k=pipeline(KEY, 1, WARPS), far_keys=KEY, b=SUMS, high=TRIANGLE, low=TRIANGLE,
        biases=channel_gates.biases, rates=channel_gates.rates,
    )  # fmt: skip

    @inlined
    def store_decayed(gDecayedQ, gReadKeys, gWriteKeys, queries, keys, b, chunk, head, scale, warp):
        """Store a warp's 16 decayed queries and keys, which multiply states."""
        for i in range(WARPS):  # the channels of each warp
            sums = load(channels.group_part(b, warp, i), GROUP, fenced=False) * LOG2_E
            last = channels.load_last_sums(b, i)
            decay = exp2(sums)
            query = load(channels.group_part(queries, warp, i), GROUP, fenced=False)
            key = load(channels.group_part(keys, warp, i), GROUP, fenced=False)
            at = chunk, int32(TOKEN_GROUP * warp), head, int32(GROUP.cols * i)
            store(gDecayedQ, INPUT(query * (decay * scale)), at, 1, 3, aligned=True)
            store(gReadKeys, INPUT(key * decay), at, 1, 3, aligned=True)
            store(gWriteKeys, INPUT(key * exp2(last - sums)), at, 1, 3, aligned=True)

    @cuda.jit(launch_bounds=(config.threads, 2), fastmath=True)
    def invert(
        gQ: array(4, INPUT), gK: array(4, INPUT), gBeta: array(3), gGates: array(4), gB: array(3), gChunkBeta: array(3),
        gDecayedQ: array(4, INPUT), gReadKeys: array(4, INPUT), gWriteKeys: array(4, INPUT),
        gForward: array(4, INPUT), gReverse: array(4, INPUT), gCuSeqlens: ENDS,
        length: INT, parts: INT, heads: INT, group: INT, scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """The chunks of a sequence are divided evenly among the `parts` blocks of a head. gB, gChunkBeta: exp(b_last) and beta
        of each chunk and head. gForward, gReverse: as in delta_inverse_ampere.py."""
        q, k, far_keys, b, high, low, biases, rates = smem.open()
        index, part = divmod(cuda.blockIdx.x, parts)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n, warp, constants = seq.num_chunks(), warpgroup.rank(), (biases, rates)
        queries, keys, betas = truncate(gQ, 1, seq.end), truncate(gK, 1, seq.end), truncate(gBeta, 1, seq.end)
        store_parts(high, low, zeros(TILE))  # blocks above the diagonal are loaded, and not used
        channel_gates.load_constants(constants, params, head, warp)
        for j in seq_layout.chunks_of_block(part, n, parts):
            token = seq.chunk_start(j)
            chunk = seq_layout.chunk_index(token, sequence, length)
            k.fill(j, keys, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            q.fill(j, queries, (seq.batch, token, key_head, 0), 1, 3, n, VECTOR_BYTES)
            for i in range(CHUNK // TOKEN_GROUP):
                at = seq.batch, int32(token + TOKEN_GROUP * i), head, int32(GROUP.cols * warp)
                store(channels.group_part(b, i, warp), load(truncate(gGates, 1, seq.end), GROUP, at, 1, 3))
            cuda.syncwarp()  # other lanes read what this one wrote
            channel_gates.cumsum(b, b, constants, warp, seq.remaining(j))
            beta = BETA.compute(load(betas, ROW_VEC, (seq.batch, token, head), cols=1))
            store(gB, exp2(channels.load_last_sums(b, warp)), (chunk, head, int32(GROUP.cols * warp)))
            if warp == 0:
                store(gChunkBeta, beta, (chunk, head, 0))
            key_tile, query_tile = k.wait(j, 1), q.wait(j)  # the barrier also shows b to all warps
            p = channels.compute(query_tile, key_tile, (high, low, scale), b, far_keys, warp)
            store(gReverse, transpose(p), (chunk, head, 2 * CHUNK, int32(WARP_COLUMNS * warp)), aligned=True)
            cuda.syncwarp()  # other lanes wrote them
            s = warpgroup.load(high, TILE, fenced=False) + warpgroup.load(low, TILE, fenced=False)
            s = warpgroup.causal(s, -1, 0.0)
            two_parts.store_in_memory(gForward, inverse_transposed(s * beta, high, low), chunk, head)
            if FOR_GRADIENTS:
                beta_rows = BETA.compute(load(betas, COL_VEC, (seq.batch, int32(token + WARP_COLUMNS * warp), head), cols=1))
                two_parts.store_in_memory(gReverse, inverse_transposed(s * beta_rows, high, low), chunk, head)
            store_decayed(gDecayedQ, gReadKeys, gWriteKeys, query_tile, key_tile, b, chunk, head, scale, warp)
            thread_block.sync(UNFENCED)  # all have read b and the tiles

    return invert, smem
