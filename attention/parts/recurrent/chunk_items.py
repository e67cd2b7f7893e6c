"""Which chunks a thread block has, of a kernel that computes all chunks of all heads in any order."""

from typing import Any, NamedTuple

from numba import cuda
from numpy import int32

from ops import divmod
from tiles import inlined, static

from .tokens import CHUNK, ChunkPlace, SequenceLayout, TokenRange


class ChunkGrid(NamedTuple):
    """The numbers of a grid. chunks: of a sequence; if sequences are packed, the thread blocks of each head of a sequence.
    items: the chunks of all heads of all sequences, if they are not packed."""

    gCuSeqlens: Any
    length: Any
    chunks: Any
    items: Any
    heads: Any


@static
class ChunkItems:
    """The chunks of a block: without packed sequences one of as many as the grid has blocks, of all heads; with them, those of
    one head of a sequence, which has some blocks. only_strong: are chunks computed that are strong, and no others?"""

    seq_layout: SequenceLayout
    only_strong: bool = False

    @inlined
    def item_index(self, j):
        """The number of the block's j-th chunk, if sequences are not packed."""
        return int32(cuda.blockIdx.x + cuda.gridDim.x * j)

    @inlined
    def has(self, grid, j):
        """Has the block a j-th chunk?"""
        if self.seq_layout.varlen:
            return self.locate(grid, j).seq.remaining(0) > CHUNK * self._chunk_in_sequence(grid, j)
        else:
            return self.item_index(j) < grid.items

    @inlined
    def next_item(self, grid, j, gStrong):
        """The first of the block's chunks from number j on that is computed. gStrong: that of each chunk and head, 1 if it is
        strong, else 0."""
        if self.only_strong:
            while self.has(grid, j) and self._is_strong(grid, j, gStrong) == 0:
                j = int32(j + 1)
        return j

    @inlined
    def locate(self, grid, j):
        """The ChunkPlace of the block's j-th chunk."""
        if self.seq_layout.varlen:
            index, _ = divmod(cuda.blockIdx.x, grid.chunks)
            sequence, head = divmod(index, grid.heads)
            seq = self.seq_layout.sequence_tokens(grid.gCuSeqlens, sequence, grid.length)
            token = seq.chunk_start(self._chunk_in_sequence(grid, j))
            return ChunkPlace(self.seq_layout.chunk_index(token, sequence, grid.length), head, sequence, token, seq)
        else:
            chunk, head = divmod(self.item_index(j), grid.heads)
            sequence, index = divmod(chunk, grid.chunks)
            seq = TokenRange(int32(0), int32(grid.length), int32(sequence))
            return ChunkPlace(chunk, head, sequence, int32(CHUNK * index), seq)

    @inlined
    def _chunk_in_sequence(self, grid, j):
        """The number of the block's j-th chunk in its packed sequence."""
        _, part = divmod(cuda.blockIdx.x, grid.chunks)
        return int32(part + grid.chunks * j)

    @inlined
    def _is_strong(self, grid, j, gStrong):
        place = self.locate(grid, j)
        return gStrong[place.chunk, place.head]
