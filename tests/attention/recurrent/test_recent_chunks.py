"""Local states of segments with a decay a token, which are scanned only as far as tokens still count at the segment's end."""

import numpy as np
import pytest
from gradient_cases import f32
from test_segments import agree, case

from attention.plans import recurrent_chunks
from attention.public import linear_family

CHUNK, SEGMENTS = 64, 2
CHUNKS_OF_SEGMENT = 5
LENGTH = CHUNK * CHUNKS_OF_SEGMENT * SEGMENTS - 30


@pytest.fixture(autouse=True)
def short_segments(monkeypatch, nothing_known):
    """Segments of five chunks are long enough."""
    monkeypatch.setattr(recurrent_chunks, "MIN_RECENT_CHUNKS", 1)
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: SEGMENTS)


def gates(*rates):
    """A decay a token, of heads that decay by 2^rate a chunk."""
    return np.broadcast_to(np.asarray(rates, f32) * f32(np.log(2) / CHUNK), (1, LENGTH, len(rates))).copy()


@pytest.mark.parametrize("rates", [(-60, -0.01), (-200, -3)])
def test_heads_that_forget_and_others(place, rates):
    """Outputs are those of all tokens, whether a head forgets within some chunks, within one, or never."""
    args = case(False, "token", LENGTH, 16, 64, heads=2) | {"decay": gates(*rates)}
    agree(place, args, family="sm_90")


def test_gates_of_infinity(place):
    """What comes before a token that forgets everything does not count; what comes after it does."""
    decay = gates(-0.5, -0.5)
    decay[:, 3 * CHUNK + 7, 0] = -np.inf
    agree(place, case(False, "token", LENGTH, 16, 64, heads=2) | {"decay": decay}, family="sm_90")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("rate", "recent"), [(-49, 4), (-51, 3), (-151, 1), (-1, CHUNKS_OF_SEGMENT)])
def test_how_far_back_tokens_are_read(place, reverse, rate, recent):
    """Chunks after which less than 2^-150 is left are not read: NaN there changes nothing, and in the chunk next to them all. A
    chunk counts if those behind it decay by more than that, so three chunks of 2^-51 behind it are too many."""
    length = CHUNK * CHUNKS_OF_SEGMENT * SEGMENTS
    args = case(False, "token", length, 16, 64, heads=1)
    decay = np.full((1, length, 1), rate * np.log(2) / CHUNK, f32)

    def local_states(first, last):
        """With NaN in a range of chunks of each segment, counted from its end, or in reverse from its start."""
        v = args["v"].copy()
        for segment in range(SEGMENTS):
            for chunk in range(first, last):
                number = chunk if reverse else CHUNKS_OF_SEGMENT - 1 - chunk
                token = CHUNK * (CHUNKS_OF_SEGMENT * segment + number)
                v[:, token : token + CHUNK] = np.nan
        arrays = [place.put(x) for x in (args["q"] if reverse else args["k"], args["k"], v)]
        local, total = linear_family.segment_states(*arrays, decay=place.put(decay), reverse=reverse, family="sm_90")
        return place.get(local), place.get(total)

    want, total = local_states(0, 0)
    assert np.isfinite(want).all() and np.abs(want).max() > 0
    np.testing.assert_allclose(total, np.full_like(total, max(rate * recent, rate * CHUNKS_OF_SEGMENT)), rtol=1e-4)
    np.testing.assert_array_equal(local_states(recent, CHUNKS_OF_SEGMENT)[0], want)
    assert np.isnan(local_states(recent - 1, recent)[0]).all()
