"""The short convolution: y_t = act(bias + sum_i weight[:, W - 1 - i] x_(t-i)), i < W, each channel by itself.

The time is that of reading x and writing y once."""

import functools
from collections.abc import Iterator

from numba import cuda
from numpy import int32

from ops import silu, truncate
from tiles import fp32, inlined, shared
from tiles.launching.arguments import ENDS, INT, array
from tiles.launching.arrays import ALIGNMENT
from tiles.targets import Target

from ...parts.short_conv import ROWS, ConvConfig, TokenBlocks, conv_space, find_panel


class Config(ConvConfig):
    """A configuration of the kernel of the convolution."""

    @property
    def ctas_per_sm(self) -> int:
        """How many thread blocks an SM is to hold: as many as leave each thread 72 registers, 80, or 128."""
        return 16 if self.varlen or self.vector_bytes < ALIGNMENT else 24 if self.bias else 28


def space(target: Target, everything: bool) -> Iterator[ConvConfig]:
    return conv_space(Config, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, WIDTH, SILU, STAGES, conv = config.dtype, config.width, config.has_silu, config.stages, config.conv
    token_blocks, smem = TokenBlocks(config.varlen), shared(tiles=config.tiles)

    @inlined
    def store_result(outputs, x, previous, taps, batch, token, col):
        """Store y of a token; returns the tokens before the next one."""
        x = fp32(x)
        z = conv.convolve(x, previous, taps)
        conv.store(outputs, silu(z) if SILU else z, batch, token, col)
        return previous.push(x)

    @inlined
    def store_quad(outputs, quad, previous, taps, batch, token, col):
        """Store y of four tokens, the first of which is `token`; returns the tokens before the next one."""
        previous = store_result(outputs, quad.a, previous, taps, batch, token, col)
        previous = store_result(outputs, quad.b, previous, taps, batch, token + 1, col)
        previous = store_result(outputs, quad.c, previous, taps, batch, token + 2, col)
        return store_result(outputs, quad.d, previous, taps, batch, token + 3, col)

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def short_conv(
        gX: array(3, INPUT), gWeight: array(2), gBias: array(2), gInitialState: array(3, INPUT), gOut: array(3, INPUT),
        gFinalState: array(3, INPUT), gCuSeqlens: ENDS, length: INT, tokens: INT, blocks: INT, panels: INT,
    ):  # fmt: skip
        """A warp has one block of `tokens` tokens and one of the `panels` of channels. gInitialState, gFinalState: (sequence,
        channel, W - 1), the tokens before the first and the last ones, the latest of them last. gBias: (1, channel)."""
        (tiles,) = smem.open()
        index, col = find_panel(panels)
        block = token_blocks.find(index, tokens, blocks, length, gCuSeqlens)
        end = conv.count_tiles(block)
        inputs, outputs = truncate(gX, 1, block.end), truncate(gOut, 1, block.end)
        for j in range(STAGES - 1):
            conv.fill(tiles, int32(j), end, inputs, block, block.start, col)
        if gFinalState.shape[0] > 0 and block.ends_sequence():
            for t in range(1 - WIDTH, 0):
                x = conv.load_token(gX, gInitialState, block, block.last + t, col)
                conv.store_window(gFinalState, x, block, t, col)
        token_blocks.clear_padding(gOut, conv, block, col, length, gCuSeqlens)
        taps = conv.load_taps(gWeight, gBias, col)
        previous = conv.load_previous(gX, gInitialState, block, col)
        for j in range(end):
            tile, t = tiles.wait_warp(int32(j), STAGES - 2), int32(block.start + ROWS * j)
            conv.fill(tiles, int32(j + STAGES - 1), end, inputs, block, block.start, col)
            previous = store_quad(outputs, conv.load_quad(tile, 0), previous, taps, block.batch, t, col)
            previous = store_quad(outputs, conv.load_quad(tile, 4), previous, taps, block.batch, t + 4, col)

    return short_conv, smem
