"""The gradients of the short convolution, with z and act as in short_conv.py:

    dz_t = act'(z_t) dy_t        dx_t = sum_i weight[:, W - 1 - i] dz_(t+i)
    dweight[:, W - 1 - i] = sum_t dz_t x_(t-i)        dbias = sum_t dz_t

z is computed again. A warp goes through its tokens from the last tile to the first, so that dz of later tokens is at hand; of
the tokens behind its own it computes W - 1. The sums of its own tokens are stored, and sum_blocks adds those of all blocks in
their order: there are no atomic additions."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import (
    col_sum,
    divmod,
    finish_sum,
    lane_col_sum,
    load,
    shift_rows,
    store,
    store_unordered,
    truncate,
    warp_index,
    zeros,
)
from tiles import fp32, inlined, rt, shared, sv
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ..parts.short_conv import COLUMNS, ROWS, WARPS, WIDTHS, ConvConfig, ShortWindow, TokenBlocks, conv_space

SUMS = rt(16, 64, fp32)  # blocks and channels whose sums a warp adds at once
SUM_WARPS = 8
TILE = rt(ROWS, COLUMNS, fp32)
SUM = replace(TILE.row_vec, partial=True)  # a lane's share of the sums over the tokens of a block


class Config(ConvConfig):
    """A configuration of the kernel that computes dx and the partial sums of dweight and dbias."""

    def make(self):
        """(kernel of gradients, None: it uses no shared memory)."""
        return make_gradients(self)


@dataclass(frozen=True)
class SumConfig:
    """The kernel that adds the blocks' sums. width: of the convolution."""

    width: int
    threads = LANES * SUM_WARPS

    def __str__(self):
        return f"sums of blocks, width {self.width}"

    def make(self):
        """(kernel that adds partial sums, its shared memory)."""
        return make_sums(self)


def space(target: Target, everything: bool) -> Iterator[ConvConfig | SumConfig]:
    """The configurations of the kernel of gradients and of the one that adds partial sums."""
    yield from conv_space(Config, everything)
    yield from map(SumConfig, WIDTHS if everything else WIDTHS[-1:])


@functools.cache
def make(config: Config | SumConfig):
    """(kernel, shared memory) of a configuration."""
    return config.make()


def make_gradients(config: Config):
    """(kernel, shared memory: None) of dx, the gradient of the window before it, and the sums of each block."""
    INPUT, WIDTH, ALIGNED = config.dtype, config.width, config.aligned
    window, token_blocks = ShortWindow(WIDTH, config.silu, INPUT, ALIGNED), TokenBlocks(config.varlen)

    @inlined
    def load_state_gradient(gDState, block, token, col):
        """The part of dx, of the 16 tokens from `token` on, that comes from the sequence's final window."""
        return window.load_window(gDState, TILE, block, int32(WIDTH - 1 + token - block.last), col)

    @inlined
    def store_sum(gSums, total, index, tap, col):
        store_unordered(gSums, finish_sum(total), (index, tap, col), aligned=False)

    @inlined
    def load_upper(gX, block, token, col):
        """The tile of the 16 tokens before `token`, which begin in the block's sequence."""
        return window.load(truncate(gX, 1, block.last), block.batch, int32(token - ROWS), col)

    @cuda.jit(launch_bounds=(config.threads, 2), fastmath=True)
    def short_conv_backward(
        gDOut: array(3, INPUT), gX: array(3, INPUT), gWeight: array(2), gBias: array(1), gInitialState: array(3, INPUT),
        gDState: array(3), gDX: array(3, INPUT), gDInitialState: array(3), gSums: array(3), gCuSeqlens: ENDS,
        length: INT, tokens: INT, blocks: INT, panels: INT,
    ):  # fmt: skip
        """A thread block has `tokens` tokens and one of the `panels` of 128 channels. gSums (block of tokens, W + 1, channel):
        of the gradients of the weights and the bias."""
        index, panel = divmod(cuda.blockIdx.x, panels)
        col = int32(COLUMNS * (WARPS * panel + warp_index()))
        block = token_blocks.find(index, tokens, blocks, length, gCuSeqlens)
        taps = window.load_taps(gWeight, gBias, col)
        tiles = int32(max(0, block.end - block.start + ROWS - 1) // ROWS)
        tiles_end = int32(block.start + ROWS * tiles)
        read_end = int32(min(block.last, tiles_end + WIDTH - 1))
        edge = window.load_before(gX, gInitialState, block, block.start, col)
        x = window.load(truncate(gX, 1, read_end), block.batch, tiles_end, col)
        dy = window.load(truncate(gDOut, 1, read_end), block.batch, tiles_end, col)
        upper = load_upper(gX, block, tiles_end, col) if tiles > 0 else edge
        lower = window.activation_gradient(upper, x, dy, taps)
        lag0, lag1, lag2, lag3, bias_sum = zeros(SUM), zeros(SUM), zeros(SUM), zeros(SUM), zeros(SUM)
        gradients, results = truncate(gDOut, 1, block.end), truncate(gDX, 1, block.end)
        x, t = upper, int32(tiles_end - ROWS)
        upper = load_upper(gX, block, t, col) if tiles > 1 else edge
        dy = window.load(gradients, block.batch, t, col)
        for _ in range(tiles):  # while a tile is computed with, the next ones are on their way
            upper_t = int32(t - ROWS)
            next_upper = load_upper(gX, block, upper_t, col) if upper_t > block.start else edge
            next_dy = window.load(gradients, block.batch, upper_t, col)
            dz = window.activation_gradient(upper, x, dy, taps)
            lag0, bias_sum = lag0 + lane_col_sum(dz * fp32(x)), bias_sum + lane_col_sum(dz)
            lag1 = lag1 + lane_col_sum(dz * fp32(shift_rows(upper, x, ROWS - 1)))
            if WIDTH > 2:
                lag2 = lag2 + lane_col_sum(dz * fp32(shift_rows(upper, x, ROWS - 2)))
            if WIDTH > 3:
                lag3 = lag3 + lane_col_sum(dz * fp32(shift_rows(upper, x, ROWS - 3)))
            dx = window.convolve_gradient(dz, lower, taps)
            if gDState.shape[0] > 0 and t + ROWS > block.last - WIDTH + 1:
                dx = dx + load_state_gradient(gDState, block, t, col)
            store_unordered(results, INPUT(dx), (block.batch, t, col), 1, 2, ALIGNED)
            lower, x, upper, dy, t = dz, upper, next_upper, next_dy, upper_t
        store_sum(gSums, lag0, index, WIDTH - 1, col)
        store_sum(gSums, lag1, index, WIDTH - 2, col)
        if WIDTH > 2:
            store_sum(gSums, lag2, index, WIDTH - 3, col)
        if WIDTH > 3:
            store_sum(gSums, lag3, index, WIDTH - 4, col)
        store_sum(gSums, bias_sum, index, WIDTH, col)
        if gDInitialState.shape[0] > 0 and block.start == block.first:
            dx = window.convolve_gradient(zeros(TILE), lower, taps)
            dx = dx + load_state_gradient(gDState, block, int32(block.first - ROWS), col)
            window.store_window(gDInitialState, dx, block, col)
        token_blocks.clear_padding(gDX, INPUT(zeros(TILE)), block, col, length, gCuSeqlens, ALIGNED)

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
