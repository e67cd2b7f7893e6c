"""The decayed queries and keys of each chunk that multiply and update its states, where each channel of the keys has a decay
(parts/recurrent/channel_chunks.py): scale exp(b) q, exp(b_last - b) k, and exp(b_last), the decay of the state. A block has
some chunks of a head."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import divmod, exp2, load, store, truncate, warpgroup
from tiles import fp32, rt, shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.targets import Target

from ...parts.recurrent.channel_chunks import ROWS, UNFENCED, ChannelChunkConfig, ChunkChannels, chunk_fields
from ...parts.recurrent.tokens import SequenceLayout


@dataclass(frozen=True)
class Config(ChannelChunkConfig):
    """A kernel's configuration: that of channel_chunks.py, with a name of its own."""

    label = "decayed queries and keys"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and 16 bytes, with all other dtypes and bytes if `everything`."""
    yield from itertools.starmap(Config, chunk_fields(everything))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, channels, seq_layout = config.dtype, ChunkChannels(config.key_dim), SequenceLayout(config.varlen)
    HALF = channels.half
    OPERAND = rt(ROWS, HALF, INPUT)
    smem = shared(b=channels.sums)

    @cuda.jit(launch_bounds=(config.threads, 3), fastmath=True)
    def decay_keys(
        gQ: array(4, INPUT), gK: array(4, INPUT), gGates: array(4), gDecayedQ: array(4, INPUT), gDecayedK: array(4, INPUT),
        gDecays: array(3), gCuSeqlens: ENDS, length: INT, parts: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The chunks of a sequence are divided evenly among the `parts` blocks of a head. gDecayedQ, gDecayedK, gDecays: of
        each chunk and head."""
        (b,) = smem.open()
        index, part = divmod(cuda.blockIdx.x, parts)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        rank, col = warpgroup.rank(), int32(HALF * warpgroup.id())
        for j in seq_layout.chunks_of_block(part, seq.num_chunks(), parts):
            token = seq.chunk_start(j)
            chunk = seq_layout.chunk_index(token, sequence, length)
            gates = channels.load_gates(gGates, seq, token, head)
            at = seq.batch, int32(token + ROWS * rank), key_head, col
            query = load(truncate(gQ, 1, seq.end), OPERAND, at, 1, 3)
            channels.cumsum_gates(b, gates)
            key = load(truncate(gK, 1, seq.end), OPERAND, at, 1, 3)
            chunk_coord = chunk, head, int32(ROWS * rank), col
            sums = load(channels.part(b), channels.rows, fenced=False)
            store(gDecayedQ, INPUT(fp32(query) * (exp2(sums) * scale)), chunk_coord, aligned=True)
            last = channels.load_last(b)
            store(gDecayedK, INPUT(fp32(key) * exp2(last - sums)), chunk_coord, aligned=True)
            if rank == 0:
                store(gDecays, exp2(last), (chunk, head, col))
            if seq_layout.varlen:
                thread_block.sync(UNFENCED)  # all have read b, before the block's next chunk

    return decay_keys, smem
