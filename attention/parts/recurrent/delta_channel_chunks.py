"""The tiles that both kernels of KDA's gradients in chunks load of a chunk (delta_channel_block_gradients_hopper.py,
delta_channel_gradients_hopper.py)."""

from typing import Any, NamedTuple

from ops import divmod
from tiles import inlined, static

from .tokens import SequenceLayout


class ChunkRings(NamedTuple):
    """The rings of queries, keys, dO, E, dV, S, dS, beta and gates."""

    q: Any
    k: Any
    do: Any
    e: Any
    dv: Any
    s: Any
    ds: Any
    beta: Any
    g: Any


class ChunkArrays(NamedTuple):
    """Queries, keys, dO, dV and the gates, each with the copy of the tails of packed sequences (packed_tails.py). Of each chunk
    and head: E, S, dS, both transposed, and beta."""

    gQ: Any
    gTailQ: Any
    gK: Any
    gTailK: Any
    gDOut: Any
    gTailDOut: Any
    gDV: Any
    gTailDV: Any
    gGates: Any
    gTailGates: Any
    gErrors: Any
    gStates: Any
    gStateGradients: Any
    gChunkBeta: Any


@static
class ChunkLoads:
    """The loads of a kernel."""

    seq_layout: SequenceLayout

    @inlined
    def fill(self, rings, arrays, j, place, group):
        """Have TMA load the j-th chunk, which lies at a ChunkPlace. `group` heads share a key head."""
        key_head, _ = divmod(place.head, group)
        self.seq_layout.fill_chunk(rings.do, j, arrays.gDOut, arrays.gTailDOut, place, place.head)
        rings.e.fill(j, arrays.gErrors, (place.chunk, place.head, 0))
        self.seq_layout.fill_chunk(rings.dv, j, arrays.gDV, arrays.gTailDV, place, place.head)
        rings.s.fill(j, arrays.gStates, (place.chunk, place.head))
        rings.ds.fill(j, arrays.gStateGradients, (place.chunk, place.head))
        rings.beta.fill(j, arrays.gChunkBeta, (place.chunk, place.head))
        self.seq_layout.fill_chunk(rings.g, j, arrays.gGates, arrays.gTailGates, place, place.head)
        self.seq_layout.fill_chunk(rings.q, j, arrays.gQ, arrays.gTailQ, place, key_head)
        self.seq_layout.fill_chunk(rings.k, j, arrays.gK, arrays.gTailK, place, key_head)
