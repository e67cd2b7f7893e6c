"""How channel_gradients_hopper.py stores what it computes. Gradients of queries and keys are rounded and leave by TMA, or they
are float32 and leave registers at once. Each of two consumers has 64 channels."""

from numpy import int32

from ops import exp2, load, store, subtile, truncate, turned, warpgroup, zeros
from tiles import fp32, inlined, rt, st, static
from tiles.launching.arguments import array, tiled

from .token_channels import BLOCK, SUMS, TokenChannels
from .tokens import CHUNK, COLUMNS, SequenceLayout

GROUPS = 2 * COLUMNS // 16  # of the channels of both consumers, one a warp


@static
class ChannelGradientOutputs:
    """The outputs of a kernel. unrounded: are dQ and dK float32? Then no TMA store fences the last loads of queries and keys.
    unrounded_values: is dV float32?"""

    seq_layout: SequenceLayout
    token_channels: TokenChannels
    unrounded: bool
    unrounded_values: bool

    @property
    def arguments(self):
        """The types of a kernel's arguments dQ or dK, dV, and the gates' gradients."""
        keys, gates = st(CHUNK, COLUMNS, self.token_channels.dtype), st(CHUNK, COLUMNS, fp32)
        key_argument = array(4) if self.unrounded else tiled(keys, unit=1)
        value_argument = array(4, fp32 if self.unrounded_values else self.token_channels.dtype)
        return key_argument, value_argument, tiled(gates, unit=1)

    @inlined
    def store_block(self, arrays, gradients, tiles, vectors, block, place, scale):
        """Write dQ and dK of a block over its queries and keys, for `store_keys`, or store them; write q dq - k dk. gradients:
        dq and dk, transposed, without the factors exp(c) and exp(-c). place: the ChunkPlace."""
        (gDQ, gDK), (dq, dk), (queries, keys, sums, dot_tile), (references, ends) = arrays, gradients, tiles, vectors
        query, key = self.token_channels.load_block(queries, block), self.token_channels.load_block(keys, block)
        warpgroup.store_transposed(subtile(dot_tile, BLOCK, block), dq * fp32(query) - dk * fp32(key))
        channel = int32(4 * warpgroup.id() + warpgroup.rank())  # the warp's group of channels
        b = warpgroup.load_transposed(subtile(sums, BLOCK, block), SUMS, fenced=False)
        r = load(subtile(references, 16, int32(GROUPS * block + channel)), SUMS.col_vec)
        self._store_gradient(gDQ, queries, dq * (exp2(b - r) * scale), block, place)
        self._store_gradient(gDK, keys, dk * exp2(load(subtile(ends, 16, channel), SUMS.col_vec) + r - b), block, place)

    @inlined
    def _store_gradient(self, gOut, tile, x, block, place):
        if self.unrounded:
            seq, channel = place.seq, int32(COLUMNS * warpgroup.id() + 16 * warpgroup.rank())
            at = seq.batch, int32(place.token + BLOCK * block), place.head, channel
            store(truncate(gOut, 1, seq.end), turned(x), at, 1, 3)
        else:
            warpgroup.store_transposed(subtile(tile, BLOCK, block), self.token_channels.dtype(x), True)

    @inlined
    def store_keys(self, gOut, gTails, tile, place, wg):
        """Store a consumer's channels of dQ or dK. gTails: those of packed sequences (packed_tails.py)."""
        if self.unrounded:
            warpgroup.sync()
        else:
            array, batch, row = self.seq_layout.whole_tile(gOut, gTails, place.seq, place.token, place.sequence)
            warpgroup.tma_store(array, (batch, row, place.head, wg), tile)

    @inlined
    def store_gates(self, gDGates, gTails, gradients, place):
        """Store the gradients of a chunk's gates, half of the channels above the other. Returns when they have left shared
        memory. gTails: as of store_keys."""
        array, batch, row = self.seq_layout.whole_tile(gDGates, gTails, place.seq, place.token, place.sequence)
        for half in range(2):
            warpgroup.tma_store(array, (batch, row, place.head, half), subtile(gradients, CHUNK, half))
        warpgroup.store_wait()

    @inlined
    def zero_padding(self, arrays, gCuSeqlens, sequence, length, head, wg):
        """Store 0 to a consumer's part of the padding's gradients. Those that have tails get it with these."""
        gDQ, gDK, gDV = arrays
        if self.seq_layout.varlen:
            padding, nothing = self.seq_layout.padding_tokens(gCuSeqlens, sequence, length), zeros(rt(16, COLUMNS, fp32))
            for j in range(padding.num_chunks()):
                at = padding.batch, padding.chunk_start(j), head, int32(COLUMNS * wg)
                if self.unrounded:
                    warpgroup.store(gDQ, nothing, at, 1, 3, aligned=True)
                    warpgroup.store(gDK, nothing, at, 1, 3, aligned=True)
                warpgroup.store(gDV, nothing, at, 1, 3, aligned=True)
