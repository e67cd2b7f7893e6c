"""The tiles that both kernels of KDA's gradients in chunks load of a chunk, queries and keys apart
(delta_channel_block_gradients_hopper.py, delta_channel_gradients_hopper.py)."""

from typing import Any, NamedTuple

from numpy import int32

from tiles import inlined, static

from .tokens import SequenceLayout


class ChunkRings(NamedTuple):
    """The rings of dO, E, dV, S, dS, beta and gates."""

    do: Any
    e: Any
    dv: Any
    s: Any
    ds: Any
    beta: Any
    g: Any


class ChunkArrays(NamedTuple):
    """dO, dV and the gates, each with the copy of the tails of packed sequences (packed_tails.py). Of each chunk and head: E;
    S and dS by panels; beta."""

    gDOut: Any
    gTailDOut: Any
    gDV: Any
    gTailDV: Any
    gGates: Any
    gTailGates: Any
    gErrors: Any
    gStates: Any
    gChunkBeta: Any


@static
class ChunkLoads:
    """The loads of a kernel. panels: of a state, as they lie in memory."""

    seq_layout: SequenceLayout
    panels: int

    @inlined
    def fill(self, rings, arrays, j, place):
        """Have TMA load the j-th chunk, which lies at a ChunkPlace."""
        chunk, head, sequence, token, seq = place
        source, batch, row = self.seq_layout.whole_tile(arrays.gDOut, arrays.gTailDOut, seq, token, sequence)
        rings.do.fill(j, source, (batch, row, head))
        rings.e.fill(j, arrays.gErrors, (chunk, head, 0))
        source, batch, row = self.seq_layout.whole_tile(arrays.gDV, arrays.gTailDV, seq, token, sequence)
        rings.dv.fill(j, source, (batch, row, head))
        for i in range(self.panels):
            rings.s.fill(j, arrays.gStates, (chunk, head, int32(2 * i)), i, self.panels)
        for i in range(self.panels):
            rings.ds.fill(j, arrays.gStates, (chunk, head, int32(2 * i + 1)), i, self.panels)
        rings.beta.fill(j, arrays.gChunkBeta, (chunk, head))
        source, batch, row = self.seq_layout.whole_tile(arrays.gGates, arrays.gTailGates, seq, token, sequence)
        rings.g.fill(j, source, (batch, row, head))
