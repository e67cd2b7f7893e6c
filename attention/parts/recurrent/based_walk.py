"""What Based's kernels for Hopper (based_hopper.py, based_gradients_hopper.py) have in common: their tiles, and what both walks
that compute gradients do alike. A consumer warpgroup computes, and another one loads."""

from dataclasses import dataclass
from typing import ClassVar

from numpy import int32

from ops import divmod, hstack, subtile, taylor_gradients, truncate, warpgroup, zeros
from ops.for_attention.taylor_features import BASE, FEATURES
from tiles import dtype, fp32, inlined, rt, st, static

from .taylor_sums import SQUARE
from .tokens import CHUNK, COLUMNS, SequenceLayout

LOADER, THREADS, CTAS_PER_SM = 1, 2 * warpgroup.THREADS, 2  # LOADER: the index of the loading warpgroup
LOADER_REGISTERS, CONSUMER_REGISTERS = 24, 232  # of a thread
PANEL = 32  # features whose gradients are computed at a time
STATE = rt(16, FEATURES, fp32)


@dataclass(frozen=True)
class BasedTiles:
    """The configuration of a kernel of Based. dtype: of q, k, v and what has their shapes. normalize: are outputs divided by
    the sum of their weights?"""

    dtype: dtype
    normalize: bool = True
    threads: ClassVar[int] = THREADS

    @property
    def key(self):
        """The tile of Q or K for a chunk."""
        return st(CHUNK, BASE, self.dtype)

    @property
    def value(self):
        """The tile of V, the output or their gradients for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def features(self):
        """The tile of a chunk's features, or of the state, transposed."""
        return st(CHUNK, FEATURES, self.dtype)


@static
class BasedWalk:
    """What both walks do alike, with q, k, v and dO of this dtype. loads_vectors: is there a vector of each chunk, too?"""

    dtype: dtype
    seq_layout: SequenceLayout
    loads_vectors: bool

    @inlined
    def load_chunks(self, tiles, arrays, seq, n, head, group, gVectors=None, first_chunk=0):
        """The loader has TMA load the n chunks of a head. arrays: Q, K, V and dO. gVectors: of all chunks. first_chunk: the
        index of that which comes first in memory."""
        warpgroup.release_registers(LOADER_REGISTERS)
        (gQ, gK, gV, gDOut), (key_head, _) = arrays, divmod(head, group)
        for j in range(n):
            token = seq.chunk_start(j)
            tiles.q.fill(j, gQ, (seq.batch, token, key_head))
            tiles.k.fill(j, gK, (seq.batch, token, key_head))
            tiles.v.fill(j, gV, (seq.batch, token, head, 0))
            tiles.do.fill(j, gDOut, (seq.batch, token, head, 0))
            if self.loads_vectors:
                tiles.vectors.fill(j, gVectors, (int32(first_chunk + seq.chunk_number(j)), head))

    @inlined
    def multiply_panel(self, rows, state, n):
        """The n-th panel of the gradients of features, the product of `rows` and the state, rounded."""
        return self.dtype(warpgroup.wait(warpgroup.mm_AB(rows, subtile(state, CHUNK, 0, PANEL, n))))

    @inlined
    def differentiate_features(self, rows, state, x, squares):
        """The gradients of a warp's rows x from those of their features, the product of `rows` and the state. squares:
        the factor of squares in features."""
        df = hstack(self.multiply_panel(rows, state, 0), self.multiply_panel(rows, state, 1))
        df = hstack(df, hstack(self.multiply_panel(rows, state, 2), self.multiply_panel(rows, state, 3)))
        df = hstack(df, self.multiply_panel(rows, state, 4))
        return taylor_gradients(df, x, squares)

    @inlined
    def store_rows(self, gX, x, seq, token, head):
        """Store the rows of a chunk that belong to the sequence."""
        warpgroup.store(truncate(gX, 1, seq.end), x, (seq.batch, token, head, 0), rows=1, cols=3)

    @inlined
    def zero_padding(self, gDX, gCuSeqlens, sequence, length, head):
        """Store 0 to dq or dk of the padding, the tokens after the last sequence."""
        padding = self.seq_layout.padding_tokens(gCuSeqlens, sequence, length)
        for j in range(padding.num_chunks()):
            self.store_rows(gDX, zeros(SQUARE), padding, padding.chunk_start(j), head)
