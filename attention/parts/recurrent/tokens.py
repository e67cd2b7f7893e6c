"""The work of a thread block in kernels that scan sequences chunk by chunk: which tokens, head and value columns it has."""

from typing import Any, NamedTuple

from numba import cuda
from numpy import int32

from ops import divmod, load, right_fill, store, store_wait, subtile, tma_store, truncate, warpgroup, zeros
from tiles import fp32, inlined, rt, static
from tiles.launching.arguments import array, tiled

CHUNK, COLUMNS = 64, 64  # tokens of a chunk; value columns of a consumer


class TokenRange(NamedTuple):
    """The tokens [start, end) of a sequence or of a segment, and the index of the batch that holds them."""

    start: Any
    end: Any
    batch: Any

    @inlined
    def num_chunks(self):
        """The number of chunks. The last one may be shorter than the others."""
        return int32((self.end - self.start + CHUNK - 1) // CHUNK)

    @inlined
    def chunk_number(self, j):
        """How many chunks lie before the j-th one in memory."""
        return j

    @inlined
    def chunk_start(self, j):
        """The first token of the j-th chunk."""
        return int32(self.start + CHUNK * j)

    @inlined
    def remaining(self, j):
        """The number of tokens from the start of the j-th chunk to the end of the range."""
        return int32(self.end - self.start - CHUNK * j)

    @inlined
    def keep(self, count):
        """The last `count` chunks of this range."""
        return TokenRange(int32(self.start + CHUNK * (self.num_chunks() - count)), self.end, self.batch)

    @inlined
    def extend(self, later):
        """This range and what follows it up to the end of a later one."""
        return TokenRange(self.start, later.end, self.batch)

    @inlined
    def backwards(self):
        """This range with its chunks in reverse order."""
        return ReversedTokens(self.start, self.end, self.batch)


class ReversedTokens(TokenRange):
    """A TokenRange whose chunks come in reverse order: the j-th is the j-th from the end, and the first one may be shorter than
    the others. Tokens of a chunk keep their places."""

    @inlined
    def chunk_number(self, j):
        """How many chunks lie before the j-th one from the end in memory."""
        return int32(self.num_chunks() - 1 - j)

    @inlined
    def chunk_start(self, j):
        """The first token of the j-th chunk from the end."""
        return int32(self.start + CHUNK * self.chunk_number(j))

    @inlined
    def remaining(self, j):
        """The number of tokens from the start of the j-th chunk from the end to the end of the range."""
        return int32(self.end - self.chunk_start(j))

    @inlined
    def keep(self, count):
        """The last `count` chunks of this range, which are the first ones in memory."""
        return ReversedTokens(self.start, int32(min(self.end, self.start + CHUNK * count)), self.batch)

    @inlined
    def extend(self, later):
        """This range and what comes before it in memory, from the start of a later one on."""
        return ReversedTokens(later.start, self.end, self.batch)

    @inlined
    def backwards(self):
        """This range with its chunks in the order of their tokens."""
        return TokenRange(self.start, self.end, self.batch)


class ChunkPlace(NamedTuple):
    """Where a chunk of a head lies. chunk: its SequenceLayout.chunk_index. token: its first one. seq: its TokenRange."""

    chunk: Any
    head: Any
    sequence: Any
    token: Any
    seq: Any


class SegmentPlace(NamedTuple):
    """Where a segment of a head lies. slot: its number among those of all sequences. seq: its TokenRange."""

    sequence: Any
    slot: Any
    head: Any
    seq: Any


class HeadWalk(NamedTuple):
    """The chunks of a head in a segment of a sequence, the last one first. sequence, slot, head, seq: as in SegmentPlace. n:
    how many chunks there are. last_chunk, last_token: the index and the first token of the chunk that comes first."""

    sequence: Any
    slot: Any
    head: Any
    seq: Any
    n: Any
    last_chunk: Any
    last_token: Any

    @inlined
    def place(self, j):
        """The ChunkPlace of the j-th chunk from the end."""
        token = int32(self.last_token - CHUNK * j)
        return ChunkPlace(int32(self.last_chunk - j), self.head, self.sequence, token, self.seq)


@inlined
def send_tile(ring, j, gX, at):
    """One warp stores the j-th tile of a ring by TMA, and gives it back."""
    tma_store(gX, at, ring.wait(j))
    store_wait()
    ring.release(j)


@inlined
def block_coord(block_index, blocks, segments, heads):
    """(block of columns, segment, head, sequence) of the thread block with this index in the grid."""
    index, block = divmod(block_index, blocks)
    index, segment = divmod(index, segments)
    sequence, head = divmod(index, heads)
    return block, segment, head, sequence


@inlined
def walk_of_block(seq_layout, gCuSeqlens, length, segments, heads):
    """The HeadWalk of this block. Each warpgroup asks by itself: registers before they part are scarce."""
    sequence, slot, head, seq = seq_layout.locate_segment(cuda.blockIdx.x, gCuSeqlens, length, segments, heads)
    n = seq.num_chunks()
    last_chunk = int32(seq_layout.chunk_index(seq.start, sequence, length) + n - 1)
    return HeadWalk(sequence, slot, head, seq, n, last_chunk, seq.chunk_start(0))


@static
class SequenceLayout:
    """The layout of sequences in memory: each in a batch of its own, or with `varlen` packed in a single batch (cu_seqlens).
    The last chunk of a packed sequence overlaps the next sequence. Rows of the next sequence must not be read, because they may
    be NaN, nor be overwritten.

    reversed: does a scan begin with the last chunk? Then its first segment is the last one of the sequence. Chunks begin at the
    same tokens in both directions."""

    varlen: bool = False
    reversed: bool = False

    def output_argument(self, tile):
        """The type of a kernel's output argument that is written by tiles of this type."""
        return array(4, tile.dtype) if self.varlen else tiled(tile, unit=1)

    @inlined
    def sequence_tokens(self, gCuSeqlens, sequence, length):
        """The TokenRange of a sequence."""
        if self.varlen:
            return TokenRange(int32(gCuSeqlens[sequence]), int32(gCuSeqlens[sequence + 1]), int32(0))
        else:
            return TokenRange(int32(0), int32(length), int32(sequence))

    @inlined
    def segment_tokens(self, gCuSeqlens, sequence, length, segment, segments):
        """The TokenRange of one of the `segments` of a sequence: a number of whole chunks, except at the end of the
        sequence."""
        start, end, batch = self.sequence_tokens(gCuSeqlens, sequence, length)
        chunks, _ = divmod(int32((end - start + CHUNK - 1) // CHUNK) + segments - 1, segments)
        step = CHUNK * chunks
        if self.reversed:
            segment = segments - 1 - segment
            return ReversedTokens(int32(min(end, start + segment * step)), int32(min(end, start + (segment + 1) * step)), batch)
        return TokenRange(int32(min(end, start + segment * step)), int32(min(end, start + (segment + 1) * step)), batch)

    @inlined
    def tokens_before(self, gCuSeqlens, sequence, length, seq):
        """The TokenRange of what a scan of a sequence reads before the range `seq` of its segment_tokens."""
        start, end, batch = self.sequence_tokens(gCuSeqlens, sequence, length)
        if self.reversed:
            return ReversedTokens(seq.end, end, batch)
        return TokenRange(start, seq.start, batch)

    @inlined
    def locate_segment(self, block, gCuSeqlens, length, segments, heads):
        """The SegmentPlace of the thread block with this index in a grid of all `segments` of all sequences and heads."""
        slot, head = divmod(block, heads)
        sequence, segment = divmod(slot, segments)
        return SegmentPlace(sequence, slot, head, self.segment_tokens(gCuSeqlens, sequence, length, segment, segments))

    @inlined
    def chunk_index(self, token, sequence, length):
        """The index of the chunk that starts at `token` of a sequence, where something is stored for each chunk of the batch:
        no two chunks have the same, and some indices belong to none if sequences are packed. count_chunk_indices (plans)
        counts them."""
        if self.varlen:
            return int32(token // CHUNK + sequence)
        else:
            return int32(token // CHUNK + sequence * ((length + CHUNK - 1) // CHUNK))

    @inlined
    def chunks_of_block(self, part, chunks, parts):
        """The chunks of one of the `parts` blocks of a sequence, of which there are about as many as chunks: exactly as many if
        sequences are not packed, so that no loop is needed."""
        if self.varlen:
            return range(part, chunks, parts)
        else:
            return range(part, part + 1)

    @inlined
    def padding_tokens(self, gCuSeqlens, sequence, length):
        """The TokenRange of the padding, the tokens after cu_seqlens[-1], if this is the last sequence; an empty one otherwise.
        length: the number of all tokens, padding included."""
        if self.varlen:
            end = int32(gCuSeqlens[sequence + 1])
            return TokenRange(end, int32(length if sequence + 2 == gCuSeqlens.shape[0] else end), int32(0))
        else:
            return TokenRange(int32(0), int32(0), int32(0))

    @inlined
    def padding_start(self, gCuSeqlens, length):
        """The first token of the padding, the end of all sequences. length: the number of all tokens, padding included."""
        if self.varlen:
            return int32(gCuSeqlens[gCuSeqlens.shape[0] - 1])
        else:
            return length

    @inlined
    def whole_tile(self, gX, gTails, seq, token, sequence):
        """(array, batch, token) of the tile that TMA reads or writes for the chunk at `token`. gTails: the last chunks of
        packed sequences, (sequences, 64, heads, D), that are shorter than others: 0 after the sequence's end, where the next
        one lies in gX (packed_tails.py)."""
        array, batch, row = gX, seq.batch, token
        if self.varlen and seq.end - token < CHUNK:
            array, batch, row = gTails, int32(sequence), int32(0)
        return array, batch, row

    @inlined
    def fill_chunk(self, ring, j, gX, gTails, place, head, column=0):
        """Have TMA load the tokens of a ChunkPlace as the j-th tile of a ring. gTails: as in whole_tile. head, column: of gX,
        the column in tiles."""
        array, batch, row = self.whole_tile(gX, gTails, place.seq, place.token, place.sequence)
        ring.fill(j, array, (batch, row, head, column))

    @inlined
    def send_chunk(self, ring, j, gX, gTails, place, column=0):
        """One warp stores the j-th tile of a ring by TMA as the tokens of a ChunkPlace, and gives it back. gTails, column: see
        fill_chunk."""
        array, batch, row = self.whole_tile(gX, gTails, place.seq, place.token, place.sequence)
        send_tile(ring, j, array, (batch, row, place.head, column))

    @inlined
    def store_chunk(self, gX, gTails, place, tile, column=0):
        """One warp stores a tile by TMA as the tokens of a ChunkPlace. gTails, column: as in fill_chunk."""
        array, batch, row = self.whole_tile(gX, gTails, place.seq, place.token, place.sequence)
        tma_store(array, (batch, row, place.head, column), tile)

    @inlined
    def zero_other_rows(self, tile, remaining, warpgroups=1):
        """Set to zero the rows of a shared tile that belong to another sequence, those from `remaining` on. warpgroups: how
        many of them do this together."""
        if self.varlen and remaining < CHUNK:
            warpgroup.zero_rows(tile, remaining, warpgroups)

    @inlined
    def zero_other_columns(self, v_t, remaining):
        """The transposed values v_t, in registers, with zeros in the columns that belong to another sequence."""
        if self.varlen:
            return right_fill(v_t, remaining, 0.0)
        else:
            return v_t

    @inlined
    def store_rows(self, gO, o, seq, token, head, block):
        """Store o, 64 columns of the outputs of the chunk that starts at `token`: only the rows that belong to the sequence."""
        at = seq.batch, token, head, COLUMNS * block
        warpgroup.store(truncate(gO, 1, seq.end), o, at, rows=1, cols=3, aligned=True)

    @inlined
    def send_rows(self, gO, tile, seq, token, head, block):
        """store_rows by one warp, from a shared tile, by TMA if sequences are not packed. The tile is read when it returns."""
        if self.varlen:
            for row in range(CHUNK // 16):
                for panel in range(tile.cols // COLUMNS):
                    at = seq.batch, int32(token + 16 * row), head, int32(tile.cols * block + COLUMNS * panel)
                    rows = load(subtile(tile, 16, row, COLUMNS, panel), rt(16, COLUMNS, tile.dtype), fenced=False)
                    store(truncate(gO, 1, seq.end), rows, at, 1, 3, aligned=True)
            cuda.syncwarp()  # all lanes have read the tile
        else:
            tma_store(gO, (seq.batch, token, head, block), tile)
            store_wait()

    @inlined
    def zero_padding(self, gO, gCuSeqlens, sequence, length, head, block):
        """Store 0 to 64 columns of the outputs of the padding. The last segment of the last sequence does so."""
        if self.varlen:
            padding = self.padding_tokens(gCuSeqlens, sequence, length)
            for j in range(padding.num_chunks()):
                self.store_rows(gO, zeros(rt(16, COLUMNS, fp32)), padding, padding.chunk_start(j), head, block)

    @inlined
    def store(self, gO, tile, o, seq, token, head, block):
        """Store o as store_rows does, but through a shared tile by TMA if sequences are not packed, as no row that follows
        belongs to another sequence then."""
        if self.varlen:
            self.store_rows(gO, o, seq, token, head, block)
        else:
            warpgroup.store(tile, o)
            warpgroup.tma_store(gO, (seq.batch, token, head, block), tile)
