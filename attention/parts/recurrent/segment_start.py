"""Where the scan of a segment begins, with decays of channels: at the segment, with the state before it from memory, or at the
first of the chunks before it that still count there, without a state."""

from ops import subtile, warpgroup, zeros
from tiles import fp32, inlined, static, sv
from tiles.launching.arguments import record

from .channel_history import ChannelHistory
from .tokens import TokenRange


@static
class StoredStart:
    """The state before each segment is in memory."""

    @property
    def sums(self):
        """The vector in shared memory by which warps add up, if they do; else a small one, not used."""
        return sv(16, fp32)

    def params(self):
        """The further parameters of a kernel, as a record."""
        return record()

    @inlined
    def extend(self, rows, params, gBeta, sequence_start, seq, head, key_head, sums):
        """(the tokens with whose scan that of the segment `seq` begins, to its end; the number of chunks among them that are
        before it). sequence_start: the first token of the sequence. rows: the record of `params`; params: that of the gates'
        formula. All warpgroups call this."""
        return seq, 0

    @inlined
    def load_state(self, gInitialState, tile, sequence, slot, head, column, is_first):
        """The state, transposed, with which the scan begins. slot: the segment's number among those of all sequences.
        is_first: does the scan begin with the sequence?"""
        return warpgroup.load(gInitialState, tile, (slot, head, 0, column), 3, 2)


@static
class EarlyStart(StoredStart):
    """No state is stored but that before a sequence. warpgroups: of a block."""

    history: ChannelHistory
    warpgroups: int

    @property
    def sums(self):
        return sv(self.warpgroups * self.history.sums.length, fp32)

    def params(self):
        return self.history.params()

    @inlined
    def extend(self, rows, params, gBeta, sequence_start, seq, head, key_head, sums):
        before, own_sums = (
            TokenRange(sequence_start, seq.start, seq.batch),
            subtile(sums, self.history.sums.length, warpgroup.id()),
        )
        early = self.history.count(rows, params, gBeta, before, head, key_head, own_sums)
        return TokenRange(before.chunk_start(before.num_chunks() - early), seq.end, seq.batch), early

    @inlined
    def load_state(self, gInitialState, tile, sequence, slot, head, column, is_first):
        state = zeros(tile)
        if is_first:
            state = warpgroup.load(gInitialState, tile, (sequence, head, 0, column), 3, 2)
        return state


def choose_start(starts_early: bool, history: ChannelHistory, warpgroups: int) -> StoredStart:
    """The start of segments in a kernel whose blocks have so many warpgroups."""
    return EarlyStart(history, warpgroups) if starts_early else StoredStart()
