"""Which tokens, head and columns a thread block works on: what the kernels that walk sequences in chunks have in common."""

from typing import Any, NamedTuple

from numpy import int32

from ops import divmod, right_fill, truncate, warpgroup, zeros
from tiles import fp32, inlined, rt, static
from tiles.arguments import array, tiled

CHUNK, COLUMNS = 64, 64  # tokens; value columns of a consumer


class Span(NamedTuple):
    """The tokens [first, end) of a sequence or of a segment, and the number of the batch in which they lie."""

    first: Any
    end: Any
    batch: Any

    @inlined
    def chunks(self):
        """The number of chunks. The last one may be shorter than the others."""
        return int32((self.end - self.first + CHUNK - 1) // CHUNK)

    @inlined
    def token(self, j):
        """The first token of the j-th chunk."""
        return int32(self.first + CHUNK * j)

    @inlined
    def left(self, j):
        """The number of tokens from the j-th chunk on."""
        return int32(self.end - self.first - CHUNK * j)


@inlined
def assigned(x, blocks, segments, heads):
    """(block of columns, segment, head, sequence) that thread block x works on."""
    x, block = divmod(x, blocks)
    x, segment = divmod(x, segments)
    sequence, head = divmod(x, heads)
    return block, segment, head, sequence


@static
class Sequences:
    """Where sequences lie: each in a batch of its own, or with `varlen` one after another in a single batch (cu_seqlens).
    There the last chunk of one sequence overlaps the next sequence, whose numbers must not be read, for they may be NaN, nor
    overwritten."""

    varlen: bool = False

    def output(self, tile):
        """How a kernel declares an output that is written by tiles of this type."""
        return array(4, tile.dtype) if self.varlen else tiled(tile, unit=1)

    @inlined
    def span(self, gEnds, sequence, length):
        """The Span of a sequence."""
        if self.varlen:
            return Span(int32(gEnds[sequence]), int32(gEnds[sequence + 1]), int32(0))
        else:
            return Span(int32(0), int32(length), int32(sequence))

    @inlined
    def segment(self, gEnds, sequence, length, segment, segments):
        """The Span of one of a sequence's segments. Each is a number of whole chunks, except at the end of the sequence."""
        first, end, batch = self.span(gEnds, sequence, length)
        step = CHUNK * ((end - first + CHUNK * segments - 1) // (CHUNK * segments))
        return Span(int32(min(end, first + segment * step)), int32(min(end, first + (segment + 1) * step)), batch)

    @inlined
    def nobodys(self, gEnds, sequence, length):
        """The Span of tokens behind the last sequence, which belong to nobody, if this is the last one; otherwise an empty one.
        length: of all sequences together, and of these tokens."""
        if self.varlen:
            end = int32(gEnds[sequence + 1])
            return Span(end, int32(length if sequence + 2 == gEnds.shape[0] else end), int32(0))
        else:
            return Span(int32(0), int32(0), int32(0))

    @inlined
    def clear(self, tile, left, groups=1):
        """Set to zero the rows of a shared tile that belong to another sequence, all but the first `left`. groups: how many
        warpgroups do this together."""
        if self.varlen and left < CHUNK:
            warpgroup.zero_rows(tile, left, groups)

    @inlined
    def without_others(self, v_t, left):
        """The same for transposed values in registers."""
        if self.varlen:
            return right_fill(v_t, left, 0.0)
        else:
            return v_t

    @inlined
    def store_rows(self, gO, o, span, token, head, block):
        """Write 64 columns of o, the outputs of the chunk that begins at `token`; only the rows that belong to the
        sequence."""
        at = span.batch, token, head, COLUMNS * block
        warpgroup.store(truncate(gO, 1, span.end), o, at, rows=1, cols=3, aligned=True)

    @inlined
    def store_nobodys(self, gO, gEnds, sequence, length, head, block):
        """Write 0 to 64 columns of the outputs of tokens that belong to nobody. The last segment of a sequence does it."""
        if self.varlen:
            span = self.nobodys(gEnds, sequence, length)
            for j in range(span.chunks()):
                self.store_rows(gO, zeros(rt(16, COLUMNS, fp32)), span, span.token(j), head, block)

    @inlined
    def store(self, gO, tile, o, span, token, head, block):
        """The same; from a shared tile by TMA, if no other sequence follows that it would overwrite."""
        if self.varlen:
            self.store_rows(gO, o, span, token, head, block)
        else:
            warpgroup.store(tile, o)
            warpgroup.tma_store(gO, (span.batch, token, head, block), tile)
