"""Which rows of a chunk's tile are a sequence's own (attention/recurrent/kernels/tokens.py)."""

import numpy as np
from numba import cuda

import tiles
from attention.recurrent.kernels.tokens import SequenceLayout, TokenRange
from ops import zeros
from tiles import bf16, fp32, rt


def test_the_next_sequence_is_not_written():
    """Blocks of a grid run one after the other here: one that wrote too much would be overwritten by the next."""
    sequences = SequenceLayout(varlen=True)

    @cuda.jit
    def body(out):
        sequences.store_rows(out, zeros(rt(16, 64, fp32)), TokenRange(10, 37, 0), 10, 0, 1)

    out = np.ones((1, 90, 1, 128), bf16.np)
    tiles.launch(body, grid=1, block=128)(out)
    own = np.zeros(out.shape, bool)
    own[:, 10:37, :, 64:] = True
    assert ((out == 0) == own).all()
