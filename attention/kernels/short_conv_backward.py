"""The gradients of the short convolution, with z and act as in short_conv.py:

    dz_t = act'(z_t) dy_t        dx_t = sum_i weight[:, W - 1 - i] dz_(t+i)
    dweight[:, W - 1 - i] = sum_t dz_t x_(t-i)        dbias = sum_t dz_t

z is computed again. A warp walks along its tokens, and is three tokens ahead of those whose dx it stores: dx needs dz of later
ones. Therefore it adds up dz of three tokens behind its own, and not of its own first three, which the warp before it has,
unless a sequence begins with them. The sums are stored, and sum_blocks adds those of all blocks in their order: there are no
atomic additions."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import col_sum, divmod, grid, load, store, truncate, warp_index, zeros
from tiles import fp32, inlined, rt, shared, sv
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ..parts.short_conv import (
    LINE,
    MAX_LAG,
    STEP,
    WIDTHS,
    ConvConfig,
    Convolution,
    PreviousTokens,
    TokenBlocks,
    conv_space,
    find_panel,
)

SUMS = rt(16, 64, fp32)  # blocks and channels whose sums a warp adds at once
SUM_WARPS = 8


@dataclass(frozen=True)
class Config(ConvConfig):
    """A configuration of the kernel that computes dx and the partial sums of dweight and dbias. window: is there a gradient of
    the final window, which is added to dx of a sequence's last tokens?"""

    window: bool = False
    max_tokens = 1024  # a block computes dz of three tokens that another one computes, too, and stores its sums

    @property
    def ctas_per_sm(self) -> int:
        """How many thread blocks an SM is to hold: as many as leave each thread 128 registers, 168, or 255."""
        return 2 if not self.aligned else 3 if not self.silu or (self.bias and self.varlen) else 4

    def __str__(self):
        return super().__str__() + ", window" * self.window

    def make(self):
        """(kernel of gradients, None: it uses no shared memory)."""
        return make_gradients(self)


class LagSums(NamedTuple):
    """Sums over the tokens t: of dz_t x_(t - lag), and of dz_t (bias)."""

    lag0: Any
    lag1: Any
    lag2: Any
    lag3: Any
    bias: Any


class TokenLines(NamedTuple):
    """The lines of a token, of x and of dy."""

    x: Any
    dy: Any


class WalkState(NamedTuple):
    """The three tokens before the one that a warp computes next, and their dz."""

    x: Any
    dz: Any


@dataclass(frozen=True)
class SumConfig:
    """The kernel that adds the blocks' sums. width: of the convolution."""

    width: int
    threads, overlaps_previous = LANES * SUM_WARPS, True

    def __str__(self):
        return f"sums of blocks, width {self.width}"

    def make(self):
        """(kernel that adds partial sums, its shared memory)."""
        return make_sums(self)


def space(target: Target, everything: bool) -> Iterator[ConvConfig | SumConfig]:
    """The configurations of the kernel of gradients and of the one that adds partial sums."""
    for config in conv_space(Config, everything):
        yield config
        if everything or config.varlen:
            yield replace(config, window=True)
    yield from map(SumConfig, WIDTHS if everything else WIDTHS[-1:])


@functools.cache
def make(config: Config | SumConfig):
    """(kernel, shared memory) of a configuration."""
    return config.make()


def make_gradients(config: Config):
    """(kernel, shared memory: None) of dx, the gradient of the window before it, and the sums of each block."""
    INPUT, WIDTH, BIAS, WINDOW = config.dtype, config.width, config.bias, config.window
    conv, token_blocks = Convolution(WIDTH, config.silu, BIAS, INPUT, config.aligned), TokenBlocks(config.varlen)

    @inlined
    def add(sums, x, previous, dz):
        """The LagSums with a token added. x, dz: of the token; previous: the tokens before it."""
        lag2 = sums.lag2 + dz * previous.x2 if WIDTH > 2 else sums.lag2
        lag3 = sums.lag3 + dz * previous.x3 if WIDTH > 3 else sums.lag3
        bias = sums.bias + dz if BIAS else sums.bias
        return LagSums(sums.lag0 + dz * x, sums.lag1 + dz * previous.x1, lag2, lag3, bias)

    @inlined
    def load_token(x_rows, dy_rows, block, token, col):
        """Load the TokenLines of a token. token: its number, counted from the block's first."""
        token = int32(block.start + token)
        return TokenLines(conv.load(x_rows, block.batch, token, col), conv.load(dy_rows, block.batch, token, col))

    @inlined
    def advance(state, sums, token, taps):
        """(the WalkState after a token, the LagSums with it, dx of the token three before it)."""
        x = fp32(token.x)
        dz = conv.activation_gradient(conv.convolve(x, state.x, taps), fp32(token.dy))
        dx = conv.convolve_gradient(state.dz, dz, taps)
        return WalkState(state.x.push(x), state.dz.push(dz)), add(sums, x, state.x, dz), dx

    @inlined
    def store_dx(dx_rows, dx, gDState, block, window_start, token, col):
        """Store dx of a token. To dx of the tokens from `window_start` on, the gradient of the final window is added."""
        if WINDOW and token >= window_start:
            dx = dx + conv.load_window(gDState, block, token - block.last, col)
        conv.store(dx_rows, dx, block.batch, token, col)

    @inlined
    def store_window_gradient(gDInitialState, dx, gDState, block, token, col):
        """Store dx of a token of the window before the sequence. token: -1 for the last one of the window."""
        if WINDOW:
            dx = dx + conv.load_window(gDState, block, block.first + token - block.last, col)
        conv.store_window(gDInitialState, dx, block, token, col)

    @inlined
    def store_sum(gSums, total, index, tap, col):
        store(gSums, total, (index, tap, col), 1, 2, False)

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def short_conv_backward(
        gDOut: array(3, INPUT), gX: array(3, INPUT), gWeight: array(2), gBias: array(2), gInitialState: array(3, INPUT),
        gDState: array(3), gDX: array(3, INPUT), gDInitialState: array(3), gSums: array(3), gCuSeqlens: ENDS,
        length: INT, tokens: INT, blocks: INT, count: INT, panels: INT,
    ):  # fmt: skip
        """A warp has one of `count` blocks of `tokens` tokens and one of the `panels` of channels. gSums (block of tokens,
        W + 1, channel): of the gradients of the weights and the bias."""
        index, col = find_panel(panels)
        if index >= count:
            return
        block = token_blocks.find(index, tokens, blocks, length, gCuSeqlens)
        taps, zero_line = conv.load_taps(gWeight, gBias, col), zeros(LINE)
        sums = zero_sums = LagSums(zero_line, zero_line, zero_line, zero_line, zero_line)
        read_end = int32(min(block.last, block.end + MAX_LAG))
        x_rows, dy_rows, dx_rows = truncate(gX, 1, read_end), truncate(gDOut, 1, read_end), truncate(gDX, 1, block.end)
        state = WalkState(conv.load_previous(gX, gInitialState, block, col), PreviousTokens(zero_line, zero_line, zero_line))
        a = load_token(x_rows, dy_rows, block, 0, col)
        b = load_token(x_rows, dy_rows, block, 1, col)
        c = load_token(x_rows, dy_rows, block, 2, col)
        d = load_token(x_rows, dy_rows, block, 3, col)
        state, sums, dx3 = advance(state, sums, a, taps)
        a = load_token(x_rows, dy_rows, block, 4, col)
        state, sums, dx2 = advance(state, sums, b, taps)
        b = load_token(x_rows, dy_rows, block, 5, col)
        state, sums, dx1 = advance(state, sums, c, taps)
        c = load_token(x_rows, dy_rows, block, 6, col)
        if block.start > block.first:
            sums = zero_sums
        elif gDInitialState.shape[0] > 0:
            store_window_gradient(gDInitialState, dx3, gDState, block, -3, col)
            store_window_gradient(gDInitialState, dx2, gDState, block, -2, col)
            store_window_gradient(gDInitialState, dx1, gDState, block, -1, col)
        window_start = int32(block.last - WIDTH + 1)
        for t in range(block.start, block.end, STEP):
            ahead = int32(t + MAX_LAG + STEP - block.start)
            state, sums, dx = advance(state, sums, d, taps)
            d = load_token(x_rows, dy_rows, block, ahead, col)
            store_dx(dx_rows, dx, gDState, block, window_start, int32(t), col)
            state, sums, dx = advance(state, sums, a, taps)
            a = load_token(x_rows, dy_rows, block, ahead + 1, col)
            store_dx(dx_rows, dx, gDState, block, window_start, int32(t + 1), col)
            state, sums, dx = advance(state, sums, b, taps)
            b = load_token(x_rows, dy_rows, block, ahead + 2, col)
            store_dx(dx_rows, dx, gDState, block, window_start, int32(t + 2), col)
            state, sums, dx = advance(state, sums, c, taps)
            c = load_token(x_rows, dy_rows, block, ahead + 3, col)
            store_dx(dx_rows, dx, gDState, block, window_start, int32(t + 3), col)
        store_sum(gSums, sums.lag0, index, WIDTH - 1, col)
        store_sum(gSums, sums.lag1, index, WIDTH - 2, col)
        if WIDTH > 2:
            store_sum(gSums, sums.lag2, index, WIDTH - 3, col)
        if WIDTH > 3:
            store_sum(gSums, sums.lag3, index, WIDTH - 4, col)
        if BIAS:
            store_sum(gSums, sums.bias, index, WIDTH, col)
        token_blocks.clear_padding(gDX, conv, block, col, length, gCuSeqlens)

    return short_conv_backward, None


def make_sums(config: SumConfig):
    """(kernel, shared memory) of the sums over all blocks of tokens."""
    WIDTH = config.width
    smem = shared(parts=sv(SUMS.cols * SUM_WARPS, fp32))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def sum_blocks(gSums: array(3), gDWeight: array(2), gDBias: array(1), count: INT):
        """gDWeight (channel, W) and gDBias (channel). A thread block has 64 channels of a row of the sums; a warp adds those of
        every 8th 16 blocks of tokens."""
        (parts,) = smem.open()
        grid.wait()
        panel, tap = divmod(cuda.blockIdx.x, WIDTH + 1)
        col, warp, total = int32(SUMS.cols * panel), warp_index(), zeros(SUMS)
        for first in range(SUMS.rows * warp, count, SUMS.rows * SUM_WARPS):
            total = total + load(gSums, SUMS, (int32(first), tap, col), 0, 2)
        total = thread_block.reduce_sum(col_sum(total), parts)
        if warp == 0:
            if tap < WIDTH:
                store(gDWeight, total, (col, tap), cols=0)
            elif gDBias.shape[0] > 0:
                store(gDBias, total, (col,), cols=0)

    return sum_blocks, smem
