"""The short convolution: y_t = act(bias + sum_i weight[:, W - 1 - i] x_(t-i)), i < W, each channel by itself.

The time is that of reading x and writing y once. A warp loads the next tile of tokens before it computes with the one at
hand."""

import functools
from collections.abc import Iterator

from numba import cuda
from numpy import int32

from ops import divmod, silu, store_unordered, truncate, warp_index, zeros
from tiles import fp32, rt
from tiles.launching.arguments import ENDS, INT, array
from tiles.targets import Target

from ..parts.short_conv import COLUMNS, ROWS, WARPS, ConvConfig, ShortWindow, TokenBlocks, conv_space

BLOCKS_PER_SM = 4  # which leaves a thread 128 registers


class Config(ConvConfig):
    """A configuration of the kernel of the convolution."""


def space(target: Target, everything: bool) -> Iterator[ConvConfig]:
    return conv_space(Config, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory: None) of a configuration."""
    INPUT, SILU, ALIGNED = config.dtype, config.silu, config.aligned
    window, token_blocks = ShortWindow(config.width, SILU, INPUT, ALIGNED), TokenBlocks(config.varlen)
    ZEROS = rt(ROWS, COLUMNS, fp32)

    @cuda.jit(launch_bounds=(config.threads, BLOCKS_PER_SM), fastmath=True)
    def short_conv(
        gX: array(3, INPUT), gWeight: array(2), gBias: array(1), gInitialState: array(3, INPUT), gOut: array(3, INPUT),
        gFinalState: array(3, INPUT), gCuSeqlens: ENDS, length: INT, tokens: INT, blocks: INT, panels: INT,
    ):  # fmt: skip
        """A thread block has `tokens` tokens and one of the `panels` of 128 channels. gInitialState, gFinalState: (sequence,
        channel, W - 1), the tokens before the first and the last ones, the latest of them last."""
        index, panel = divmod(cuda.blockIdx.x, panels)
        col = int32(COLUMNS * (WARPS * panel + warp_index()))
        block = token_blocks.find(index, tokens, blocks, length, gCuSeqlens)
        taps = window.load_taps(gWeight, gBias, col)
        upper = window.load_before(gX, gInitialState, block, block.start, col)
        inputs, outputs = truncate(gX, 1, block.end), truncate(gOut, 1, block.end)
        x = window.load(inputs, block.batch, block.start, col)
        for t in range(block.start, block.end, ROWS):
            following = window.load(inputs, block.batch, int32(t + ROWS), col)
            z = window.convolve(upper, x, taps)
            if SILU:
                z = silu(z)
            store_unordered(outputs, INPUT(z), (block.batch, int32(t), col), 1, 2, ALIGNED)
            upper, x = x, following
        if gFinalState.shape[0] > 0 and block.ends_sequence():
            window.store_window(gFinalState, window.load_before(gX, gInitialState, block, block.last, col), block, col)
        token_blocks.clear_padding(gOut, INPUT(zeros(ZEROS)), block, col, length, gCuSeqlens, ALIGNED)

    return short_conv, None
