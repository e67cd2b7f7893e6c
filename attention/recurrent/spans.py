"""Where a sequence lies: in a batch of its own, or behind others in one batch (cu_seqlens)."""

from numpy import int32

from tiles import inlined


def span(varlen: bool):
    """tokens(gEnds, sequence, length): [first, end) of a sequence and the batch that it lies in."""

    @inlined
    def tokens(gEnds, sequence, length):
        if varlen:
            return int32(gEnds[sequence]), int32(gEnds[sequence + 1]), int32(0)
        else:
            return int32(0), int32(length), int32(sequence)

    return tokens
