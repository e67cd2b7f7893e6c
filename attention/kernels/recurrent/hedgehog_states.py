"""The sums of features over older chunks for Hedgehog's gradients, and in reverse their gradients, as
parts/recurrent/hedgehog_chunks.py defines them:

    S and z before chunk c, over the chunks before c - 1        dS and dz after it, over those after c + 1

A block has 64 columns of the values of a head, and each of its eight warps 16 features."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import col_sum, load, mma_AtB, store, subtile, truncate, warp_index, zeros
from tiles import fp32, pipeline, rt, shared, st
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.hedgehog_chunks import FEATURES, HEAD_DIMS, NARROW, ROWS, HedgehogConfig, hedgehog_forms
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord

WARPS = FEATURES // ROWS


@dataclass(frozen=True)
class Config(HedgehogConfig):
    """A kernel's configuration. reverse: are the sums gradients, from the last chunk to the first? head_dim is not used."""

    reverse: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return super().__str__() + ", reverse" * self.reverse

    label = "sums of features"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and 16 bytes, with other dtypes and bytes if `everything`."""
    for form in hedgehog_forms(everything):
        if form[0] == HEAD_DIMS[0]:
            yield from (replace(Config(*form), reverse=reverse) for reverse in (False, True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VECTOR_BYTES, REVERSE = config.dtype, config.vector_bytes, config.reverse
    STATE, TOKENS, seq_layout = rt(ROWS, COLUMNS, fp32), rt(CHUNK, ROWS, fp32), SequenceLayout(config.varlen, REVERSE)
    smem = shared(
        f=pipeline(st(CHUNK, FEATURES, INPUT, width=NARROW), 2, WARPS),
        v=pipeline(st(CHUNK, COLUMNS, INPUT), 2, WARPS),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gFeatures: array(4, INPUT), gValues: array(4, INPUT), gWeights: array(3), gStates: array(4, INPUT), gZ: array(3),
        gCuSeqlens: ENDS, length: INT, blocks: INT, heads: INT, group: INT,
    ):  # fmt: skip
        """Each head is `blocks` blocks of columns wide. gFeatures: f(k), or f(q). gValues, gWeights: v and 1, or dN and dn."""
        f, v = smem.open()
        block, _, head, sequence = block_coord(cuda.blockIdx.x, blocks, 1, heads)
        key_head, col, feature = int32(head // group), int32(COLUMNS * block), int32(ROWS * warp_index())
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, int32(0), int32(1))
        features, values, n = truncate(gFeatures, 1, seq.end), truncate(gValues, 1, seq.end), seq.num_chunks()
        summed_chunks = int32(n - 1)  # no stored sum includes the last chunk
        first_chunk = seq_layout.chunk_index(seq.start, sequence, length)
        state, z = zeros(STATE), zeros(TOKENS.row_vec)
        f.fill(0, features, (seq.batch, seq.chunk_start(0), key_head, 0), 1, 3, summed_chunks)
        v.fill(0, values, (seq.batch, seq.chunk_start(0), head, col), 1, 3, summed_chunks, VECTOR_BYTES)
        for j in range(n):
            chunk = int32(first_chunk + seq.chunk_number(j))
            store(gStates, INPUT(state), (chunk, head, feature, col), aligned=True)
            if block == 0:
                store(gZ, z, (chunk, head, feature))
            if j > 0:  # chunk j - 1 is added here, so that chunk j + 1 is the first whose sum includes it
                f_tile, v_tile = f.wait(j - 1), v.wait(j - 1)
                f.fill(j, features, (seq.batch, seq.chunk_start(j), key_head, 0), 1, 3, summed_chunks)
                v.fill(j, values, (seq.batch, seq.chunk_start(j), head, col), 1, 3, summed_chunks, VECTOR_BYTES)
                warp_features = subtile(f_tile, CHUNK, 0, ROWS, warp_index())
                state = mma_AtB(state, warp_features, v_tile)
                tokens = fp32(load(warp_features, rt(CHUNK, ROWS, INPUT), fenced=False))
                if REVERSE:
                    at = seq.batch, seq.chunk_start(j - 1), head
                    tokens = tokens * load(truncate(gWeights, 1, seq.end), TOKENS.col_vec, at, cols=1)
                z = z + col_sum(tokens)

    return scan, smem
