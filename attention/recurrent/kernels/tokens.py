"""Which tokens, head and columns a block works on: what the kernels that go through sequences have in common."""

from numpy import int32

from ops import divmod
from tiles import inlined

CHUNK, COLUMNS = 64, 64  # tokens; value columns of a consumer


def span(varlen: bool):
    """tokens(gEnds, sequence, length): [first, end) of a sequence and the batch that it lies in, which is its own, or one in
    which sequences lie one behind the other (cu_seqlens)."""

    @inlined
    def tokens(gEnds, sequence, length):
        if varlen:
            return int32(gEnds[sequence]), int32(gEnds[sequence + 1]), int32(0)
        else:
            return int32(0), int32(length), int32(sequence)

    return tokens


def places(varlen: bool):
    """(place, tokens), for sequences that are cut into segments."""
    whole = span(varlen)

    @inlined
    def place(x, blocks, segments, heads):
        """The block of columns, the segment, the head and the sequence that are the x-th block's."""
        x, block = divmod(x, blocks)
        x, segment = divmod(x, segments)
        sequence, head = divmod(x, heads)
        return block, segment, head, sequence

    @inlined
    def tokens(gEnds, sequence, length, segment, segments):
        """[first, end) of a segment and the batch that it lies in: whole chunks, but for the end of the sequence."""
        start, end, batch = whole(gEnds, sequence, length)
        step = CHUNK * ((end - start + CHUNK * segments - 1) // (CHUNK * segments))
        return int32(min(end, start + segment * step)), int32(min(end, start + (segment + 1) * step)), batch

    return place, tokens
