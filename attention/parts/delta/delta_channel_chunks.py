"""What both kernels of KDA's gradients in chunks load of a chunk (delta_channel_block_gradients_hopper.py,
delta_channel_gradients_hopper.py)."""

from ops import divmod
from tiles import fp32, inlined, st, static, sv
from tiles.launching.arguments import record, tiled

from ..recurrent.tokens import CHUNK, SequenceLayout


@static
class ChunkInputs:
    """The arrays that a kernel loads its chunks from. key, value, gate: the tiles of 64 tokens of q or k, of what has the
    columns of V, and of gates. state: the tile of a state, transposed."""

    seq_layout: SequenceLayout
    key: st
    value: st
    gate: st
    state: st

    def params(self):
        """The arrays as a record. gQ .. gGates: of tokens, each with the copy of the tails of packed sequences
        (packed_tails.py), gTailQ .. gTailGates. gErrors, gStates, gStateGradients, gChunkBeta: E, S, dS and beta of each chunk
        and head, S and dS transposed."""
        keys, values, gates = (tiled(tile, unit=1) for tile in (self.key, self.value, self.gate))
        tokens = {"Q": keys, "K": keys, "DOut": values, "DV": values, "Gates": gates}
        tokens = {f"g{prefix}{name}": x for prefix in ("", "Tail") for name, x in tokens.items()}
        errors, states = tiled(self.value, rows=2), tiled(self.state, rows=2)
        betas = tiled(sv(CHUNK, fp32), 3, None, 2)
        return record(**tokens, gErrors=errors, gStates=states, gStateGradients=states, gChunkBeta=betas)

    @inlined
    def fill(self, rings, arrays, j, place, group):
        """Have TMA load the j-th chunk, which lies at a ChunkPlace, to rings with the names q, k, do, e, dv, s, ds, beta and g.
        arrays: the record of `params`. `group` heads share a key head."""
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
