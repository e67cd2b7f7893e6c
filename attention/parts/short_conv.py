"""What the kernels of short convolutions share: which tokens of which sequence a warp has, and what a tile of its tokens is
multiplied by.

A warp has 32 channels, and goes through its tokens by tiles of 16. Token t of a tile needs those before it, whose rows are
taken from the tile above and from this one by shuffles: each token is loaded once. Columns of tiles are in load_unordered's
order, as nothing is computed across channels."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy import int32

from ops import divmod, fma, load_unordered, shift_rows, sigmoid, store_unordered, truncate, upper_fill, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt, static
from tiles.layout import LANES

from .sequences import sequence_of_block

ROWS, COLUMNS, WARPS = 16, 32, 4  # tokens and channels of a warp's tile; warps of a block, with neighbouring channels
THREADS = LANES * WARPS
WIDTHS = (2, 3, 4)
VECTOR = rt(ROWS, COLUMNS, fp32).row_vec


@dataclass(frozen=True)
class ConvConfig:
    """A kernel's configuration. width: of the convolution. silu: does SiLU follow? dtype: of the tokens. aligned: do addresses
    and strides allow accesses of 16 bytes? varlen: are sequences packed (cu_seqlens)?"""

    width: int
    silu: bool
    dtype: dtype
    aligned: bool = True
    varlen: bool = False
    threads = THREADS

    def __str__(self):
        kinds = {"silu": self.silu, "unaligned": not self.aligned, "varlen": self.varlen}
        return ", ".join([f"width {self.width} {self.dtype}", *[name for name, holds in kinds.items() if holds]])


def conv_space(make_config: type[ConvConfig], everything: bool) -> Iterator[ConvConfig]:
    """The configurations of the widest convolution of bf16; with `everything` all others, too."""
    widths, dtypes = (WIDTHS, (bf16, fp16)) if everything else (WIDTHS[-1:], (bf16,))
    flags = (True, False), (True, False) if everything else (True,), (False, True)
    for width, of, (silu, aligned, varlen) in itertools.product(widths, dtypes, itertools.product(*flags)):
        yield make_config(width, silu, of, aligned, varlen)


class TokenBlock(NamedTuple):
    """The tokens [start, end) of a sequence that has the tokens [first, last), and the batch that holds it."""

    sequence: Any
    batch: Any
    first: Any
    last: Any
    start: Any
    end: Any
    limit: Any  # where the block ends if its sequence does not

    @inlined
    def ends_sequence(self):
        """Does the block have the last token of its sequence, or of one without tokens the place where it would be?"""
        return (self.start < self.last or self.start == self.first) and self.limit >= self.last


@static
class TokenBlocks:
    """How tokens are divided into blocks. varlen: are sequences packed (cu_seqlens)? Then a sequence's blocks have the numbers
    from cu_seqlens[n] // tokens + n on, some of which have no tokens, and the last sequence's go on to the end of the batch."""

    varlen: bool = False

    @inlined
    def find(self, index, tokens, blocks, length, gCuSeqlens):
        """The TokenBlock with this index. tokens: of a block; blocks: of a sequence that is not packed."""
        if self.varlen:
            sequence = sequence_of_block(index, gCuSeqlens, tokens)
            batch, first, last = int32(0), int32(gCuSeqlens[sequence]), int32(gCuSeqlens[sequence + 1])
            number = int32(index - (first // tokens + sequence))
        else:
            sequence, number = divmod(index, blocks)
            batch, first, last = int32(sequence), int32(0), int32(length)
        start = int32(first + number * tokens)
        limit = int32(start + tokens)
        return TokenBlock(int32(sequence), batch, first, last, start, int32(min(limit, last)), limit)

    @inlined
    def clear_padding(self, gOut, tile, block, col, length, gCuSeqlens, aligned):
        """Store `tile`, zeros, to the tokens of the block after the last sequence."""
        if self.varlen and block.sequence + 2 == gCuSeqlens.shape[0]:
            end = int32(min(block.limit, length))
            for t in range(max(block.start, block.last), end, ROWS):
                store_unordered(truncate(gOut, 1, end), tile, (block.batch, int32(t), col), 1, 2, aligned)


class Taps(NamedTuple):
    """Vectors of a warp's channels: what a token, and those with a lag of 1, 2 and 3 tokens are multiplied by, and the bias."""

    lag0: Any
    lag1: Any
    lag2: Any
    lag3: Any
    bias: Any


@static
class ShortWindow:
    """The convolution of the last `width` tokens. silu, dtype, aligned: see ConvConfig."""

    width: int
    silu: bool
    dtype: dtype
    aligned: bool

    @property
    def tile(self):
        """The type of a tile of tokens."""
        return rt(ROWS, COLUMNS, self.dtype)

    @inlined
    def load_tap(self, gWeight, col, lag):
        return load_unordered(gWeight, VECTOR, (col, self.width - 1 - lag), cols=0, aligned=False)

    @inlined
    def load_taps(self, gWeight, gBias, col):
        """The Taps of the channels from `col` on."""
        lag0, lag1 = self.load_tap(gWeight, col, 0), self.load_tap(gWeight, col, 1)
        lag2 = self.load_tap(gWeight, col, 2) if self.width > 2 else lag0
        lag3 = self.load_tap(gWeight, col, 3) if self.width > 3 else lag0
        bias = load_unordered(gBias, VECTOR, (col,), cols=0, aligned=False)
        return Taps(lag0, lag1, lag2, lag3, bias)

    @inlined
    def load(self, gX, batch, token, col):
        """The tile of 16 tokens."""
        return load_unordered(gX, self.tile, (batch, token, col), 1, 2, self.aligned)

    @inlined
    def load_window(self, gState, spec, block, row, col):
        """Rows of the initial window, or of something like it, as a tile; row: the first, which may lie before the window."""
        return load_unordered(gState, spec, (block.sequence, col, row), 2, 1, aligned=False)

    @inlined
    def load_before(self, gX, gInitialState, block, token, col):
        """The tile of the 16 tokens before `token`: of the sequence, or of the window before it."""
        missing = int32(block.first - (token - ROWS))  # rows of the tile that come from the window
        x = self.load(truncate(gX, 1, block.last), block.batch, int32(token - ROWS), col)
        row = int32(self.width - 1 - missing)
        return upper_fill(x, missing, 0.0) + self.load_window(gInitialState, self.tile, block, row, col)

    @inlined
    def store_window(self, gState, tile, block, col):
        """Store the last rows of a tile as the window of a sequence."""
        store_unordered(gState, tile, (block.sequence, col, self.width - 1 - ROWS), 2, 1, aligned=False)

    @inlined
    def convolve(self, upper, x, taps):
        """z = bias + sum_i taps[i] x_(t-i), for the tokens of x, below those of `upper`."""
        z = fp32(x) * taps.lag0 + taps.bias
        z = fma(fp32(shift_rows(upper, x, ROWS - 1)), taps.lag1, z)
        if self.width > 2:
            z = fma(fp32(shift_rows(upper, x, ROWS - 2)), taps.lag2, z)
        if self.width > 3:
            z = fma(fp32(shift_rows(upper, x, ROWS - 3)), taps.lag3, z)
        return z

    @inlined
    def convolve_gradient(self, dz, lower, taps):
        """dx = sum_i taps[i] dz_(t+i), for the tokens of dz, above those of `lower`."""
        dx = fma(shift_rows(dz, lower, 1), taps.lag1, dz * taps.lag0)
        if self.width > 2:
            dx = fma(shift_rows(dz, lower, 2), taps.lag2, dx)
        if self.width > 3:
            dx = fma(shift_rows(dz, lower, 3), taps.lag3, dx)
        return dx

    @inlined
    def activation_gradient(self, upper, x, dy, taps):
        """dz, from the gradient dy of what follows: silu'(z) = s + z s (1 - s), where s = sigmoid(z)."""
        dz = fp32(dy)
        if self.silu:
            z = self.convolve(upper, x, taps)
            s = sigmoid(z)
            dz = dz * fma(z * s, zeros(rt(ROWS, COLUMNS, fp32)) + 1.0 - s, s)
        return dz
