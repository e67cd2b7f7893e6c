"""The tails of packed sequences (cu_seqlens): the last chunks that are shorter than others, in arrays of their own, (sequences,
64, heads, columns). TMA reads and writes whole tiles; in the packed array the rest of such a tile is the next sequence's.

A kernel that reads tails finds zeros after the sequence's end. Results that it writes to tails are copied to the packed array
afterwards, and tokens after cu_seqlens[-1], which belong to no sequence, become 0.

A warp has 16 tokens of a head. Two arrays of the same shape are copied at once, the heads of the second after those of the
first."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, load, store, truncate, warp_index, zeros
from tiles import bf16, dtype, fp16, fp32, rt
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.gates import COL_VEC
from ...parts.recurrent.tokens import CHUNK, SequenceLayout

WARPS, ROWS = 8, 16  # of a block; tokens that a warp has
PARTS = CHUNK // ROWS  # warps that a head's tail has
COLUMNS = 64, 128, 256  # of a row, padded


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. columns: of a row, padded. copies_back: are tails copied to the packed array, and not from
    there?"""

    columns: int
    dtype: dtype
    copies_back: bool
    threads = LANES * WARPS

    def __str__(self):
        return f"tails, {self.columns} columns {self.dtype}{', back' * self.copies_back}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and of fp32, and with `everything` of fp16."""
    dtypes = (bf16, fp32, fp16) if everything else (bf16, fp32)
    yield from itertools.starmap(Config, itertools.product(COLUMNS, dtypes, (False, True)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, COPIES_BACK, seq_layout = config.dtype, config.copies_back, SequenceLayout(True)
    X = rt(ROWS, config.columns, INPUT)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def copy_tails(
        gX: array(4, INPUT), gY: array(4, INPUT), gTailX: array(4, INPUT), gTailY: array(4, INPUT), gTokens: array(3),
        gCuSeqlens: ENDS, length: INT, head_blocks: INT, heads: INT, all_heads: INT,
    ):  # fmt: skip
        """`heads` heads of X, and of Y as many as are left of `all_heads`. A block has a part of a sequence's tail and one of
        the `head_blocks` of WARPS heads each. gTokens: a number for each token and head of X; those of tokens after the last
        sequence become 0, too."""
        rest, head_block = divmod(cuda.blockIdx.x, head_blocks)
        sequence, part = divmod(rest, PARTS)
        head, row = int32(WARPS * head_block + warp_index()), int32(ROWS * part)
        if head < all_heads:
            gPacked, gTail, x_head = gX, gTailX, head
            if head >= heads:
                gPacked, gTail, x_head = gY, gTailY, int32(head - heads)
            seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
            last = int32(max(seq.num_chunks() - 1, 0))
            at = seq.batch, int32(seq.chunk_start(last) + row), x_head, 0
            if 0 < seq.remaining(last) < CHUNK:
                if COPIES_BACK:
                    x = load(gTail, X, (sequence, row, x_head, 0), 1, 3, True)
                    store(truncate(gPacked, 1, seq.end), x, at, 1, 3, True)
                else:
                    store(gTail, load(truncate(gPacked, 1, seq.end), X, at, 1, 3, True), (sequence, row, x_head, 0), 1, 3, True)
            if COPIES_BACK:
                padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
                for j in range(padding.num_chunks()):
                    token = int32(padding.chunk_start(j) + row)
                    store(gPacked, zeros(X), (padding.batch, token, x_head, 0), 1, 3, True)
                    if head < heads:
                        store(gTokens, zeros(COL_VEC), (padding.batch, token, head), cols=1)

    return copy_tails, None
