"""attention/parts/recurrent/tokens.py: a chunk that overlaps the next sequence."""

import numpy as np
from numba import cuda

import tiles
from attention.parts.recurrent.tokens import SequenceLayout, TokenRange
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
