"""attention/parts/recurrent/tokens.py: which chunks sequences and their segments have, and which tokens chunks have."""

import itertools

import numpy as np
import pytest
from numba import cuda

import tiles
from attention.parts.recurrent import tokens
from attention.parts.recurrent.tokens import CHUNK, SequenceLayout, TokenRange
from ops import zeros
from tiles import bf16, fp32, rt


def test_the_next_sequence_is_not_written():
    """The kernel has one block: in a grid, another block would overwrite rows that were written by mistake."""
    seq_layout = SequenceLayout(varlen=True)

    @cuda.jit
    def body(out):
        seq_layout.store_rows(out, zeros(rt(16, 64, fp32)), TokenRange(10, 37, 0), 10, 0, 1)

    out = np.ones((1, 90, 1, 128), bf16.np)
    tiles.launch(body, grid=1, block=128)(out)
    written = np.zeros(out.shape, bool)
    written[:, 10:37, :, 64:] = True
    assert ((out == 0) == written).all()


ENDS = np.cumsum([0, 0, 1, 63, 64, 65, 128, 0, 193, 0])  # of packed sequences, at every edge of a chunk
PADDING = 70  # tokens of nobody behind them


def chunks(seq):
    """(the first token, the tokens) of each chunk, in the order of the walk."""
    starts = [seq.chunk_start(j) for j in range(seq.num_chunks())]
    return [(start, range(start, start + min(CHUNK, seq.remaining(j)))) for j, start in enumerate(starts)]


@pytest.mark.parametrize("segments", [1, 2, 3, 7])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_segments_have_each_token_once(varlen, reverse, segments):
    """In chunks that begin 0, 64, 128, ... tokens behind the sequence's begin, each with a token at least. Where something is
    stored for each chunk, no two of the batch have one place, and those of a segment lie side by side."""
    layout, places = SequenceLayout(varlen, reverse), set()
    length = int(ENDS[-1]) + PADDING if varlen else 193
    sequences = list(itertools.pairwise(ENDS.tolist())) if varlen else [(0, length)] * 3
    for n, (start, end) in enumerate(sequences):
        found = []
        for segment in range(segments):
            seq = layout.segment_tokens(ENDS, n, length, segment, segments)
            first = layout.chunk_index(seq.start, n, length)
            numbers = [seq.chunk_number(j) for j in range(seq.num_chunks())]
            assert numbers == sorted(numbers, reverse=reverse) and sorted(numbers) == list(range(len(numbers)))
            assert len(numbers) <= -(-(end - start) // (CHUNK * segments))  # none has more than others need
            for number, (token, its) in zip(numbers, chunks(seq), strict=True):
                assert len(its) and (token - start) % CHUNK == 0 and layout.chunk_index(token, n, length) == first + number
                places.add(first + number)
            found += chunks(seq)
        found = found[::-1] if reverse else found
        assert [token for _, its in found for token in its] == list(range(start, end))
        assert seq.batch == (0 if varlen else n)
    assert len(places) == sum(-(-(end - start) // CHUNK) for start, end in sequences)
    assert max(places) < (length // CHUNK + len(sequences) if varlen else 4 * 3)  # as plans count them


def test_the_last_sequence_clears_padding():
    layout, length = SequenceLayout(True), int(ENDS[-1]) + PADDING
    found = [layout.padding_tokens(ENDS, n, length) for n in range(len(ENDS) - 1)]
    assert all(seq.num_chunks() == 0 for seq in found[:-1])
    assert [t for _, its in chunks(found[-1]) for t in its] == list(range(int(ENDS[-1]), length))
    assert SequenceLayout(False).padding_tokens(None, 0, length).num_chunks() == 0


@pytest.mark.parametrize("end", [63, 64, 65])
def test_tails_are_chunks_that_are_not_whole(end, monkeypatch):
    """Whose rows behind the end are another sequence's: these are cleared, and TMA reads the tail instead."""
    cleared, seq = [], TokenRange(0, end, 0)
    monkeypatch.setattr(tokens.warpgroup, "zero_rows", lambda *args: cleared.append(args))
    for varlen in (False, True):
        layout = SequenceLayout(varlen)
        where, batch, row = layout.whole_tile("packed", "tails", seq, 0, 5)
        assert (where, batch, row) == (("tails", 5, 0) if varlen and end < CHUNK else ("packed", 0, 0))
        layout.zero_other_rows("tile", seq.remaining(0))
    assert cleared == ([("tile", 63, 1)] if end < CHUNK else [])
