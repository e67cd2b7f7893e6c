"""The short convolution: y_t = act(bias + sum_i weight[:, W - 1 - i] x_(t-i)), i < W, each channel by itself.

The time is that of reading x and writing y once."""

import functools
from collections.abc import Iterator

from numba import cuda

from ops import silu, truncate
from tiles import fp32, inlined
from tiles.launching.arguments import ENDS, INT, array
from tiles.targets import Target

from ..parts.short_conv import STEP, ConvConfig, Convolution, TokenBlocks, conv_space, find_panel


class Config(ConvConfig):
    """A configuration of the kernel of the convolution."""

    max_tokens = 64

    @property
    def ctas_per_sm(self) -> int:
        """How many thread blocks an SM is to hold: as many as leave each thread 72 registers, 80, or 102."""
        return 7 - self.varlen - self.bias if self.aligned else 5


def space(target: Target, everything: bool) -> Iterator[ConvConfig]:
    return conv_space(Config, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory: None) of a configuration."""
    INPUT, SILU, WIDTH = config.dtype, config.silu, config.width
    conv, token_blocks = Convolution(WIDTH, SILU, config.bias, INPUT, config.aligned), TokenBlocks(config.varlen)

    @inlined
    def store_result(outputs, x, previous, taps, batch, token, col):
        """Store y of a token; returns the tokens before the next one."""
        x = fp32(x)
        z = conv.convolve(x, previous, taps)
        conv.store(outputs, silu(z) if SILU else z, batch, token, col)
        return previous.push(x)

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def short_conv(
        gX: array(3, INPUT), gWeight: array(2), gBias: array(2), gInitialState: array(3, INPUT), gOut: array(3, INPUT),
        gFinalState: array(3, INPUT), gCuSeqlens: ENDS, length: INT, tokens: INT, blocks: INT, count: INT, panels: INT,
    ):  # fmt: skip
        """A warp has one of `count` blocks of `tokens` tokens and one of the `panels` of channels. gInitialState, gFinalState:
        (sequence, channel, W - 1), the tokens before the first and the last ones, the latest of them last. gBias: (1,
        channel)."""
        index, col = find_panel(panels)
        if index >= count:
            return
        block = token_blocks.find(index, tokens, blocks, length, gCuSeqlens)
        taps = conv.load_taps(gWeight, gBias, col)
        previous = conv.load_previous(gX, gInitialState, block, col)
        inputs, outputs = truncate(gX, 1, block.end), truncate(gOut, 1, block.end)
        a = conv.load(inputs, block.batch, block.start, col)
        b = conv.load(inputs, block.batch, block.start + 1, col)
        c = conv.load(inputs, block.batch, block.start + 2, col)
        d = conv.load(inputs, block.batch, block.start + 3, col)
        for t in range(block.start, block.end, STEP):  # each line is loaded anew once it is computed with
            previous = store_result(outputs, a, previous, taps, block.batch, t, col)
            a = conv.load(inputs, block.batch, t + STEP, col)
            previous = store_result(outputs, b, previous, taps, block.batch, t + 1, col)
            b = conv.load(inputs, block.batch, t + STEP + 1, col)
            previous = store_result(outputs, c, previous, taps, block.batch, t + 2, col)
            c = conv.load(inputs, block.batch, t + STEP + 2, col)
            previous = store_result(outputs, d, previous, taps, block.batch, t + 3, col)
            d = conv.load(inputs, block.batch, t + STEP + 3, col)
        if gFinalState.shape[0] > 0 and block.ends_sequence():
            for t in range(1 - WIDTH, 0):
                x = conv.load_token(gX, gInitialState, block, block.last + t, col)
                conv.store_window(gFinalState, x, block, t, col)
        token_blocks.clear_padding(gOut, conv, block, col, length, gCuSeqlens)

    return short_conv, None
