"""The gradients of the short convolution, with z and act as in short_conv.py:

    dz_t = act'(z_t) dy_t        dx_t = sum_i weight[:, W - 1 - i] dz_(t+i)
    dweight[:, W - 1 - i] = sum_t dz_t x_(t-i)        dbias = sum_t dz_t

z is computed again. A warp walks along the tokens of a block, and is three tokens ahead of those whose dx it stores: dx needs
dz of later ones. Therefore it adds up dz of three tokens behind the block's, and not of the block's first three, which the
block before has, unless a sequence begins with them. A warp has several blocks, far from each other: blocks that run at the
same time are neighbours, and lie in few pages of memory. It stores the sums of all its blocks, and sum_warps adds those of all
warps in their order: there are no atomic additions."""

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
from tiles.launching.arrays import ALIGNMENT
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.short_conv import LINE, MAX_LAG, ROWS, WIDTHS, ConvConfig, PreviousTokens, TokenBlocks, conv_space, find_panel

SUMS = rt(16, 64, fp32)  # warps and channels whose sums a warp adds at once
SUM_WARPS = 8


@dataclass(frozen=True)
class Config(ConvConfig):
    """A configuration of the kernel that computes dx and the partial sums of dweight and dbias. window: is there a gradient of
    the final window, which is added to dx of a sequence's last tokens?"""

    window: bool = False

    @property
    def ctas_per_sm(self) -> int:
        """How many thread blocks an SM is to hold: as many as leave each thread 168 registers, or 255. 16, which leave 128, are
        slower."""
        return 8 if self.vector_bytes < ALIGNMENT and self.bias and self.varlen else 12

    def __str__(self):
        return super().__str__() + ", window" * self.window

    def make(self):
        """(kernel of gradients, its shared memory)."""
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
    """The kernel that adds the warps' sums. rows: of a warp's sums, which are the taps and, where there is one, the bias."""

    rows: int
    threads, overlaps_previous = LANES * SUM_WARPS, True

    def __str__(self):
        return f"sums of warps, {self.rows} rows"

    def make(self):
        """(kernel that adds partial sums, its shared memory)."""
        return make_sums(self)


def space(target: Target, everything: bool) -> Iterator[ConvConfig | SumConfig]:
    """The configurations of the kernel of gradients and of the one that adds partial sums."""
    for config in conv_space(Config, everything):
        yield config
        if everything or config.varlen:
            yield replace(config, window=True)
    yield from map(SumConfig, (*WIDTHS, WIDTHS[-1] + 1) if everything else WIDTHS[-1:])


@functools.cache
def make(config: Config | SumConfig):
    """(kernel, shared memory) of a configuration."""
    return config.make()


def make_gradients(config: Config):
    """(kernel, shared memory) of dx, the gradient of the window before it, and the sums of each warp."""
    INPUT, WIDTH, BIAS, WINDOW, STAGES = config.dtype, config.width, config.bias, config.window, config.stages
    conv = config.conv
    token_blocks, smem = TokenBlocks(config.varlen), shared(x=config.tiles, dy=config.tiles)
    NEWER = 2 * (STAGES - 2)  # groups of copies: of x and of dy

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
    def store_quad(dx_rows, x, dy, gDState, block, t, col, state, sums, taps):
        """Store dx of four tokens from t on. x, dy: Quads of the four tokens that are three behind them."""
        window_start = int32(block.last - WIDTH + 1)
        state, sums, dx = advance(state, sums, TokenLines(x.a, dy.a), taps)
        store_dx(dx_rows, dx, gDState, block, window_start, int32(t), col)
        state, sums, dx = advance(state, sums, TokenLines(x.b, dy.b), taps)
        store_dx(dx_rows, dx, gDState, block, window_start, int32(t + 1), col)
        state, sums, dx = advance(state, sums, TokenLines(x.c, dy.c), taps)
        store_dx(dx_rows, dx, gDState, block, window_start, int32(t + 2), col)
        state, sums, dx = advance(state, sums, TokenLines(x.d, dy.d), taps)
        store_dx(dx_rows, dx, gDState, block, window_start, int32(t + 3), col)
        return state, sums

    @inlined
    def store_sum(gSums, total, index, tap, col):
        store(gSums, total, (index, tap, col), 1, 2, False)

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def short_conv_backward(
        gDOut: array(3, INPUT), gX: array(3, INPUT), gWeight: array(2), gBias: array(2), gInitialState: array(3, INPUT),
        gDState: array(3), gDX: array(3, INPUT), gDInitialState: array(3), gSums: array(3), gCuSeqlens: ENDS,
        length: INT, tokens: INT, blocks: INT, panels: INT, count: INT,
    ):  # fmt: skip
        """A warp has every so many-th of `count` blocks of `tokens` tokens, and one of the `panels` of channels. gSums (warp of
        a panel, W + 1, channel): of the gradients of the weights and the bias."""
        x_tiles, dy_tiles = smem.open()
        grid.release()  # sum_warps waits beside the last blocks, and need not be launched behind them
        warp, col = find_panel(panels)
        taps, zero_line = conv.load_taps(gWeight, gBias, col), zeros(LINE)
        sums = LagSums(zero_line, zero_line, zero_line, zero_line, zero_line)
        for index in range(warp, count, gSums.shape[0]):
            block = token_blocks.find(int32(index), tokens, blocks, length, gCuSeqlens)
            end, behind = conv.count_tiles(block), int32(block.start + MAX_LAG)
            read_end = int32(min(block.last, block.end + MAX_LAG))
            x_rows, dy_rows, dx_rows = truncate(gX, 1, read_end), truncate(gDOut, 1, read_end), truncate(gDX, 1, block.end)
            for j in range(STAGES - 1):
                conv.fill(x_tiles, int32(j), end, x_rows, block, behind, col)
                conv.fill(dy_tiles, int32(j), end, dy_rows, block, behind, col)
            token_blocks.clear_padding(gDX, conv, block, col, length, gCuSeqlens)
            a, b = load_token(x_rows, dy_rows, block, 0, col), load_token(x_rows, dy_rows, block, 1, col)
            c, sums_before = load_token(x_rows, dy_rows, block, 2, col), sums
            previous = conv.load_previous(gX, gInitialState, token_blocks.hide_window(block), col)
            state = WalkState(previous, PreviousTokens(zero_line, zero_line, zero_line))
            state, sums, dx3 = advance(state, sums, a, taps)
            state, sums, dx2 = advance(state, sums, b, taps)
            state, sums, dx1 = advance(state, sums, c, taps)
            if block.start > block.first:
                sums = sums_before
            elif gDInitialState.shape[0] > 0:
                store_window_gradient(gDInitialState, dx3, gDState, block, -3, col)
                store_window_gradient(gDInitialState, dx2, gDState, block, -2, col)
                store_window_gradient(gDInitialState, dx1, gDState, block, -1, col)
            for j in range(end):
                x, dy = x_tiles.wait_warp(int32(j), NEWER), dy_tiles.wait_warp(int32(j), NEWER)
                conv.fill(x_tiles, int32(j + STAGES - 1), end, x_rows, block, behind, col)
                conv.fill(dy_tiles, int32(j + STAGES - 1), end, dy_rows, block, behind, col)
                t = int32(block.start + ROWS * j)
                state, sums = store_quad(
                    dx_rows, conv.load_quad(x, 0), conv.load_quad(dy, 0), gDState, block, t, col, state, sums, taps
                )
                state, sums = store_quad(
                    dx_rows, conv.load_quad(x, 4), conv.load_quad(dy, 4), gDState, block, t + 4, col, state, sums, taps
                )
            cuda.syncwarp()  # all lanes have read the tiles that the next block overwrites
        store_sum(gSums, sums.lag0, warp, WIDTH - 1, col)
        store_sum(gSums, sums.lag1, warp, WIDTH - 2, col)
        if WIDTH > 2:
            store_sum(gSums, sums.lag2, warp, WIDTH - 3, col)
        if WIDTH > 3:
            store_sum(gSums, sums.lag3, warp, WIDTH - 4, col)
        if BIAS:
            store_sum(gSums, sums.bias, warp, WIDTH, col)

    return short_conv_backward, smem


def make_sums(config: SumConfig):
    """(kernel, shared memory) of the sums over all warps of a panel."""
    ROW_COUNT, smem = config.rows, shared(parts=sv(SUMS.cols * SUM_WARPS, fp32))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def sum_warps(gSums: array(3), gDWeight: array(2), gDBias: array(1), count: INT):
        """gDWeight (channel, W) and gDBias (channel). A thread block has 64 channels of a row of the sums; a warp adds those of
        every 8th 16 warps."""
        (parts,) = smem.open()
        grid.wait()
        panel, tap = divmod(cuda.blockIdx.x, ROW_COUNT)
        col, warp, total = int32(SUMS.cols * panel), warp_index(), zeros(SUMS)
        for first in range(SUMS.rows * warp, count, SUMS.rows * SUM_WARPS):
            total = total + load(gSums, SUMS, (int32(first), tap, col), 0, 2)
        total = thread_block.reduce_sum(col_sum(total), parts)
        if warp == 0:
            if tap < gDWeight.shape[1]:
                store(gDWeight, total, (col, tap), cols=0)
            else:
                store(gDBias, total, (col,), cols=0)

    return sum_warps, smem
