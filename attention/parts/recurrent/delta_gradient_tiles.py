"""The tiles, warpgroups and chunks of a thread block that walks along a head and computes gradients of the delta rule on Hopper
(delta_gradients_hopper.py, delta_segment_gradients_hopper.py)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from numba import cuda
from numpy import int32

from ops import warpgroup
from tiles import inlined

from .delta_tiles import DeltaTiles
from .tokens import CHUNK, COLUMNS, ChunkPlace

CONSUMERS = 2  # warpgroups with 64 columns of values each
VALUES = CONSUMERS * COLUMNS  # columns of values of a thread block
DKDQ, PRODUCER = CONSUMERS, CONSUMERS + 1  # the third warpgroup, which computes dK and dQ, and the fourth
LOADER, VALUE_SUMS, GRADIENTS, KEY_SUMS = range(4)  # warps of the producer: one loads, the others store these results
REGISTERS = 24, 160, 168  # of each thread of the producer, of a consumer, of the warpgroup for dK and dQ
WARPS = warpgroup.WARPGROUP
OUTPUTS = 2  # dQ and dK, stored one after the other


@dataclass(frozen=True)
class GradientTiles(DeltaTiles):
    """A kernel's configuration. with_gates: is what the gates' gradients are made of stored, too?"""

    with_gates: bool = False
    threads: ClassVar[int] = warpgroup.THREADS * (PRODUCER + 1)

    @property
    def columns(self):
        """The columns of values of both consumers."""
        return VALUES


class HeadWalk(NamedTuple):
    """The chunks of a head in a segment of a sequence, the last one first. sequence, slot, head, seq: as in SegmentPlace. n:
    how many chunks there are. last_chunk, last_token: the index and the first token of the chunk that comes first."""

    sequence: Any
    slot: Any
    head: Any
    seq: Any
    n: Any
    last_chunk: Any
    last_token: Any

    @inlined
    def place(self, j):
        """The ChunkPlace of the j-th chunk from the end."""
        token = int32(self.last_token - CHUNK * j)
        return ChunkPlace(int32(self.last_chunk - j), self.head, self.sequence, token, self.seq)


@inlined
def walk_of_block(seq_layout, gCuSeqlens, length, segments, heads):
    """The HeadWalk of this block. Each warpgroup asks by itself: registers before they part are scarce."""
    sequence, slot, head, seq = seq_layout.locate_segment(cuda.blockIdx.x, gCuSeqlens, length, segments, heads)
    n = seq.num_chunks()
    last_chunk = int32(seq_layout.chunk_index(seq.start, sequence, length) + n - 1)
    return HeadWalk(sequence, slot, head, seq, n, last_chunk, seq.chunk_start(0))
