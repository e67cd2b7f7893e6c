"""attention/kernels/recurrent/packed_tails.py: the last chunks of packed sequences, copied to arrays of their own and back."""

import itertools

import numpy as np
import pytest
from poison import poisoned

import tiles
from attention.kernels.recurrent import packed_tails
from attention.kernels.recurrent.packed_tails import PARTS, WARPS, Config
from attention.parts.recurrent.tokens import CHUNK
from tiles import fp32

ENDS = np.cumsum([0, 0, 1, 63, 64, 65, 128, 15], dtype=np.int32)  # lengths at every edge of a chunk
PADDING, COLUMNS = 70, 64
LENGTH, SEQUENCES = int(ENDS[-1]) + PADDING, len(ENDS) - 1


def copy(back, packed, tails, tokens):
    """Launch the copy of arrays of several heads each."""
    heads = packed[0].shape[2]
    head_blocks = -(-len(packed) * heads // WARPS)
    kernel, _ = packed_tails.make(Config(COLUMNS, fp32, back))
    arrays = packed[0], packed[-1], tails[0], tails[-1], tokens, ENDS
    numbers = LENGTH, head_blocks, heads, len(packed) * heads
    tiles.launch(kernel, SEQUENCES * PARTS * head_blocks, Config.threads)(*arrays, *numbers)


@pytest.mark.parametrize(("count", "heads"), [(1, 1), (2, 2)])
def test_there_and_back(count, heads):
    """Of chunks that are not whole. The rest of a tail is 0. Besides them only tokens of nobody are written, and become 0."""
    rng = np.random.default_rng(0)
    packed = [rng.standard_normal((1, LENGTH, heads, COLUMNS), np.float32) for _ in range(count)]
    tails = [poisoned((SEQUENCES, CHUNK, heads, COLUMNS), np.float32) for _ in range(count)]
    copy(False, packed, tails, np.zeros((1, LENGTH, heads), np.float32))
    results, tokens = [poisoned(x.shape, x.dtype) for x in packed], poisoned((1, LENGTH, heads), np.float32)
    copy(True, results, tails, tokens)
    assert (tokens[:, ENDS[-1] :] == 0).all() and np.isnan(tokens[:, : ENDS[-1]]).all()
    for x, tail, result in zip(packed, tails, results, strict=True):
        wanted = poisoned(x.shape, x.dtype)
        wanted[:, ENDS[-1] :] = 0
        for n, (start, end) in enumerate(itertools.pairwise(ENDS)):
            if rest := (end - start) % CHUNK:
                wanted[0, end - rest : end] = x[0, end - rest : end]
                np.testing.assert_array_equal(tail[n], np.pad(x[0, end - rest : end], ((0, CHUNK - rest), (0, 0), (0, 0))))
            else:
                assert np.isnan(tail[n]).all()
        np.testing.assert_array_equal(result, wanted)
