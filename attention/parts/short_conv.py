"""What the kernels of short convolutions share: which tokens of which sequence a warp computes, and what it keeps of them.

A thread block is one warp. It has 128 channels, four of each lane, and computes its tokens one after the other, so the tokens
before one are in registers: each is loaded once, by accesses to 256 adjacent bytes. Tiles of eight tokens are on their way to
shared memory while it computes (cp.async), and it reads them row by row."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from numba import cuda
from numpy import int32

from ops import divmod, fma, load, load_row, sigmoid, store, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, pipeline, rt, st, static
from tiles.launching.arrays import ALIGNMENT
from tiles.layout import LANES

from .sequences import sequence_of_block

CHANNELS, ROWS = 128, 8  # of a warp; tokens of a tile
VECTORS = 16, 8, 2  # bytes that are copied at once
WIDTHS = (2, 3, 4)
MAX_LAG = WIDTHS[-1] - 1  # tokens before one that a convolution reads at most
LINE = rt(1, CHANNELS, fp32, "line")


@dataclass(frozen=True)
class ConvConfig:
    """A kernel's configuration. width: of the convolution. has_silu: does SiLU follow? bias: is one added? dtype: of the
    tokens. vector_bytes: one of VECTORS, of which addresses and strides are multiples. varlen: are sequences packed
    (cu_seqlens)? stages: tiles of an array in shared memory. max_tokens: of a block of tokens."""

    width: int
    has_silu: bool
    bias: bool
    dtype: dtype
    vector_bytes: int = ALIGNMENT
    varlen: bool = False
    threads, stages, max_tokens = LANES, 3, 64

    @property
    def ctas_per_sm(self) -> int:
        """How many thread blocks an SM runs at a time, which bounds the registers of a thread."""
        raise NotImplementedError

    @property
    def conv(self) -> "Convolution":
        """What the kernel computes of a token."""
        return Convolution(self.width, self.has_silu, self.bias, self.dtype, self.vector_bytes)

    @property
    def tiles(self) -> pipeline:
        """The tiles of an array in shared memory."""
        return pipeline(st(ROWS, CHANNELS, self.dtype), self.stages, 1)

    def __str__(self):
        by = "" if self.vector_bytes == ALIGNMENT else f"by {self.vector_bytes} bytes"
        flags = {"silu": self.has_silu, "bias": self.bias, by: by, "varlen": self.varlen}
        return ", ".join([f"width {self.width} {self.dtype}", *[name for name, enabled in flags.items() if enabled]])


SomeConfig = TypeVar("SomeConfig", bound=ConvConfig)


def conv_space(make_config: type[SomeConfig], everything: bool) -> Iterator[SomeConfig]:
    """The configurations of the widest convolution of bf16; with `everything` all others, too."""
    widths, dtypes = (WIDTHS, (bf16, fp16)) if everything else (WIDTHS[-1:], (bf16,))
    sizes = VECTORS if everything else VECTORS[:1]
    for width, input_dtype, has_silu, bias in itertools.product(widths, dtypes, (True, False), (False, True)):
        for vector_bytes, varlen in itertools.product(sizes, (False, True)):
            yield make_config(width, has_silu, bias, input_dtype, vector_bytes, varlen)


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
    def hide_window(self, block):
        """The block of a sequence without tokens as if its window lay further back, where 0 is loaded: nothing follows the
        window. Others as they are."""
        if self.varlen:
            first = int32(block.first + MAX_LAG * (1 - min(block.last - block.first, 1)))
            return TokenBlock(block.sequence, block.batch, first, block.last, block.start, block.end, block.limit)
        return block

    @inlined
    def clear_padding(self, gOut, conv, block, col, length, gCuSeqlens):
        """Store zeros to the tokens of the block after the last sequence."""
        if self.varlen and block.sequence + 2 == gCuSeqlens.shape[0]:
            for t in range(max(block.start, block.last), min(block.limit, length)):
                conv.store(gOut, zeros(LINE), block.batch, t, col)


@inlined
def find_panel(panels):
    """(which block of tokens this warp has, its first channel)."""
    index, panel = divmod(cuda.blockIdx.x, panels)
    return index, int32(CHANNELS * panel)


class Quad(NamedTuple):
    """The lines of four tokens that follow one another."""

    a: Any
    b: Any
    c: Any
    d: Any


class Taps(NamedTuple):
    """The weights that multiply a token and those 1, 2 and 3 tokens before it, and the bias, for a warp's channels."""

    lag0: Any
    lag1: Any
    lag2: Any
    lag3: Any
    bias: Any


class PreviousTokens(NamedTuple):
    """Lines of the three tokens before a token, in fp32. x1: of the one just before it."""

    x1: Any
    x2: Any
    x3: Any

    @inlined
    def push(self, x):
        """The PreviousTokens of the next token, where x is the line of this one."""
        return PreviousTokens(x, self.x1, self.x2)


@static
class Convolution:
    """The convolution of the last `width` tokens. has_silu, bias, dtype, vector_bytes: see ConvConfig."""

    width: int
    has_silu: bool
    bias: bool
    dtype: dtype
    vector_bytes: int

    @property
    def aligned(self):
        """Does a lane load and store its part of a line by one access?"""
        return self.vector_bytes == ALIGNMENT

    @property
    def line(self):
        """The type of a token's channels."""
        return rt(1, CHANNELS, self.dtype, "line")

    @inlined
    def load_tap(self, gWeight, col, lag):
        return load(gWeight, LINE, (col, self.width - 1 - lag), 1, 0, False)

    @inlined
    def load_taps(self, gWeight, gBias, col):
        """The Taps of the channels from `col` on. Weights beyond the width, and the bias if there is none, are not used."""
        lag0, lag1 = self.load_tap(gWeight, col, 0), self.load_tap(gWeight, col, 1)
        lag2 = self.load_tap(gWeight, col, 2) if self.width > 2 else lag0
        lag3 = self.load_tap(gWeight, col, 3) if self.width > 3 else lag0
        bias = load(gBias, LINE, (0, col), 0, 1, False) if self.bias else lag0
        return Taps(lag0, lag1, lag2, lag3, bias)

    @inlined
    def load(self, gX, batch, token, col):
        """Load the warp's channels of a token, in the dtype of the tokens."""
        return load(gX, self.line, (batch, int32(token), col), 1, 2, self.aligned)

    @inlined
    def count_tiles(self, block):
        """How many tiles the block's tokens are."""
        return int32(max(0, block.end - block.start + ROWS - 1) // ROWS)

    @inlined
    def fill(self, tiles, j, end, gX, block, first, col):
        """Start copying tile j of `end`, the first of which begins with token `first`. gX: the array up to the block's last
        token; what lies beyond is 0."""
        tiles.fill(j, gX, (block.batch, int32(first + ROWS * j), col), 1, 2, end, self.vector_bytes)

    @inlined
    def load_quad(self, tile, row):
        """The Quad of a tile from this row on."""
        a, b = load_row(tile, self.line, row, False), load_row(tile, self.line, row + 1, False)
        return Quad(a, b, load_row(tile, self.line, row + 2, False), load_row(tile, self.line, row + 3, False))

    @inlined
    def store(self, gX, value, batch, token, col):
        """Store the warp's channels of a token, rounded to the dtype of the tokens."""
        store(gX, self.dtype(value), (batch, int32(token), col), 1, 2, self.aligned)

    @inlined
    def load_window(self, gState, block, token, col):
        """Load a token's channels from a window (sequence, channel, W - 1). token: -1 for the last one of the window, -2 for
        the one before it; 0 is loaded for a token outside of the window."""
        return load(gState, LINE, (block.sequence, col, int32(self.width - 1 + token)), 2, 1, False)

    @inlined
    def store_window(self, gState, value, block, token, col):
        """Store a token's channels to a window, where load_window reads them; nothing for a token outside of the window."""
        store(gState, value, (block.sequence, col, int32(self.width - 1 + token)), 2, 1, False)

    @inlined
    def load_token(self, gX, gInitialState, block, token, col):
        """A token of the sequence, in fp32, or of the window before it."""
        window_value = self.load_window(gInitialState, block, token - block.first, col)
        return fp32(self.load(gX, block.batch, token, col)) if token >= block.first else window_value

    @inlined
    def load_previous(self, gX, gInitialState, block, col):
        """The PreviousTokens of the block's first token."""
        x1 = self.load_token(gX, gInitialState, block, block.start - 1, col)
        x2 = self.load_token(gX, gInitialState, block, block.start - 2, col)
        return PreviousTokens(x1, x2, self.load_token(gX, gInitialState, block, block.start - 3, col))

    @inlined
    def convolve(self, x, previous, taps):
        """z = bias + sum_i taps[i] x_(t-i)."""
        z = fma(x, taps.lag0, taps.bias) if self.bias else x * taps.lag0
        z = fma(previous.x1, taps.lag1, z)
        if self.width > 2:
            z = fma(previous.x2, taps.lag2, z)
        if self.width > 3:
            z = fma(previous.x3, taps.lag3, z)
        return z

    @inlined
    def convolve_gradient(self, previous, dz, taps):
        """dx = sum_i taps[i] dz_(t+i) of the token t three tokens before that of dz. previous: the lines of dz before dz."""
        dx = fma(previous.x2, taps.lag1, previous.x3 * taps.lag0)
        if self.width > 2:
            dx = fma(previous.x1, taps.lag2, dx)
        if self.width > 3:
            dx = fma(dz, taps.lag3, dx)
        return dx

    @inlined
    def activation_gradient(self, z, dy):
        """dz = silu'(z) dy, and silu'(z) = s (1 + z (1 - s)), where s = sigmoid(z); without SiLU dz = dy."""
        if not self.has_silu:
            return dy
        s = sigmoid(z)
        return dy * s * (z * (1.0 - s) + 1.0)
