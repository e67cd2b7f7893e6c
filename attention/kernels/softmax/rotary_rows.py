"""QK norm and rotary embedding of queries and keys in one pass, and the backward pass.

For a row x, let n = x / sqrt(mean(x^2) + eps) weights, or n = x without a norm, with the halves n1 and n2. Forward:

    y1 = n1 cos - n2 sin    y2 = n2 cos + n1 sin

Backward, for the gradient dy of y, with z = x / sqrt(mean(x^2) + eps):

    dn1 = dy1 cos + dy2 sin    dn2 = dy2 cos - dy1 sin
    dz = dn weights    dx = (dz - z mean(dz z)) / sqrt(mean(x^2) + eps)    dweights = sum dn z

A warp has 16 rows of a head at a time, and the warps of a CTA have neighbouring heads of the same rows, which are adjacent in
memory where queries, keys and values are columns of one projection, and share cos and sin."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import col_sum, divmod, load, row_sum, rsqrt, store, warp_index, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt
from tiles.launching.arguments import FLOAT, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.backward.gradient_outputs import times

WARPS, ROWS = 8, 16  # of a CTA; rows that a warp has at a time
TILES_PER_WARP = 16  # tiles of rows of a warp that sums over rows
HEAD_DIMS = (64, 128)  # supported head dims: a quarter of the columns is a tile


@inlined
def load_pair(gX, PART, batch, row, head, col):
    """(columns of the first half, the same columns of the second half) of 16 rows of a head. All columns at once would need too
    many registers."""
    other = int32(2 * PART.cols + col)
    return load(gX, PART, (batch, row, head, col), 1, 3, True), load(gX, PART, (batch, row, head, other), 1, 3, True)


@inlined
def load_cos_sin(gCos, gSin, PART, batch, row, col):
    """(cos, sin) for these pairs of columns of 16 rows."""
    return load(gCos, PART, (batch, row, col), 1, 2, True), load(gSin, PART, (batch, row, col), 1, 2, True)


@inlined
def rotate_back(gDX, gCos, gSin, PART, batch, row, head, col):
    """(dn1, dn2), the gradients before the rotation, for these pairs of columns of 16 rows of a head."""
    first, second = load_pair(gDX, PART, batch, row, head, col)
    cos, sin = load_cos_sin(gCos, gSin, PART, batch, row, col)
    return first * cos + second * sin, second * cos - first * sin


@inlined
def load_weights(gNorm, PART, col):
    """The weights of a norm for these pairs of columns."""
    other = int32(2 * PART.cols + col)
    return load(gNorm, PART.row_vec, (0, col), 0, 1, True), load(gNorm, PART.row_vec, (0, other), 0, 1, True)


@inlined
def inverse_rms(squares, PART, eps):
    """1 / sqrt(mean(x^2) + eps) of rows, from the sums of their squares."""
    return rsqrt(squares / (4.0 * PART.cols) + eps)


@dataclass(frozen=True)
class RotaryConfig:
    """The rows of queries and keys that are rotated. normed: are they normalised first?"""

    head_dim: int
    dtype: dtype
    normed: bool
    threads = LANES * WARPS

    @property
    def fields(self) -> tuple[int, dtype, bool]:
        """The fields, for making the other of the two configurations."""
        return self.head_dim, self.dtype, self.normed

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that share an SM, by their registers."""
        return 128 // self.head_dim


class RotateConfig(RotaryConfig):
    """The kernel that computes y, the normalised and rotated rows."""

    def __str__(self):
        return f"{'normed, ' * self.normed}rotated, D {self.head_dim} {self.dtype}"

    @staticmethod
    @functools.cache
    def make(config: "RotateConfig"):
        """(kernel, shared memory) of a configuration."""
        INPUT, PART, NORMED = config.dtype, rt(ROWS, config.head_dim // 4, fp32), config.normed

        @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm))
        def rotate(
            gQ: array(4, INPUT), gK: array(4, INPUT), gCos: array(3), gSin: array(3), gQNorm: array(2), gKNorm: array(2),
            gOut: array(4, INPUT), tiles: INT, head_blocks: INT, heads: INT, kv_heads: INT, eps: FLOAT,
        ):  # fmt: skip
            """Y = rotary(norm(Q)), rotary(norm(K)): (batch, row, head, column), with the heads of queries first."""
            rest, head_block = divmod(cuda.blockIdx.x, head_blocks)
            batch, tile = divmod(rest, tiles)
            row, head = int32(ROWS * tile), int32(WARPS * head_block + warp_index())
            if head < heads + kv_heads:
                gX, gNorm, x_head = gQ, gQNorm, head
                if head >= heads:
                    gX, gNorm, x_head = gK, gKNorm, int32(head - heads)
                squares = zeros(PART.col_vec)
                if NORMED:
                    for n in range(2):
                        first, second = load_pair(gX, PART, batch, row, x_head, int32(PART.cols * n))
                        squares = squares + row_sum(first * first + second * second)
                scale = inverse_rms(squares, PART, eps)
                for n in range(2):
                    col = int32(PART.cols * n)
                    first, second = load_pair(gX, PART, batch, row, x_head, col)
                    if NORMED:
                        weights_first, weights_second = load_weights(gNorm, PART, col)
                        first, second = first * scale * weights_first, second * scale * weights_second
                    cos, sin = load_cos_sin(gCos, gSin, PART, batch, row, col)
                    store(gOut, INPUT(first * cos - second * sin), (batch, row, head, col), 1, 3, True)
                    store(gOut, INPUT(second * cos + first * sin), (batch, row, head, int32(2 * PART.cols + col)), 1, 3, True)

        return rotate, None


class RotateBackwardConfig(RotaryConfig):
    """The kernel that writes dx over dy, and sums dweights."""

    def __str__(self):
        return f"{'normed, ' * self.normed}rotated back, D {self.head_dim} {self.dtype}"

    @property
    def steps(self) -> int:
        """The number of tiles of rows of a warp."""
        return TILES_PER_WARP if self.normed else 1

    @staticmethod
    @functools.cache
    def make(config: "RotateBackwardConfig"):
        """(kernel, shared memory) of a configuration."""
        INPUT, PART, COUNT = config.dtype, rt(ROWS, config.head_dim // 4, fp32), config.steps
        NORMED, HALF = config.normed, config.head_dim // 2

        @inlined
        def store_pair(gDX, first, second, batch, row, head, col):
            store(gDX, INPUT(first), (batch, row, head, col), 1, 3, True)
            store(gDX, INPUT(second), (batch, row, head, int32(HALF + col)), 1, 3, True)

        @inlined
        def through_norm(gX, gDX, gCos, gSin, gNorm, batch, row, x_head, head, col, scale, along):
            """(column sums of dn z, of both halves) for these pairs of columns, whose dx is stored."""
            d_first, d_second = rotate_back(gDX, gCos, gSin, PART, batch, row, head, col)
            first, second = load_pair(gX, PART, batch, row, x_head, col)
            weights_first, weights_second = load_weights(gNorm, PART, col)
            first, second = first * scale, second * scale
            sums = col_sum(times(d_first, first)), col_sum(times(d_second, second))
            d_first, d_second = d_first * weights_first - times(along, first), d_second * weights_second - times(along, second)
            store_pair(gDX, times(d_first, scale), times(d_second, scale), batch, row, head, col)
            return sums

        @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm))
        def rotate_backward(
            gQ: array(4, INPUT), gK: array(4, INPUT), gCos: array(3), gSin: array(3), gQNorm: array(2), gKNorm: array(2),
            gDX: array(4, INPUT), gQParts: array(3), gKParts: array(3),
            tiles: INT, row_parts: INT, head_blocks: INT, heads: INT, kv_heads: INT, eps: FLOAT,
        ):  # fmt: skip
            """dX (batch, row, head, column) in place of dY. The rows of a batch are split into `row_parts` parts; the sums of
            dweights of each part and head go to gQParts (0, part, column) and gKParts."""
            rest, head_block = divmod(cuda.blockIdx.x, head_blocks)
            batch, row_part = divmod(rest, row_parts)
            head = int32(WARPS * head_block + warp_index())
            if head < heads + kv_heads:
                gX, gNorm, x_head = gQ, gQNorm, head
                if head >= heads:
                    gX, gNorm, x_head = gK, gKNorm, int32(head - heads)
                one, two, three, four = zeros(PART.row_vec), zeros(PART.row_vec), zeros(PART.row_vec), zeros(PART.row_vec)
                for tile in range(COUNT * row_part, min(COUNT * (row_part + 1), tiles)):
                    row = int32(ROWS * tile)
                    if NORMED:
                        squares, along = zeros(PART.col_vec), zeros(PART.col_vec)
                        for n in range(2):
                            col = int32(PART.cols * n)
                            d_first, d_second = rotate_back(gDX, gCos, gSin, PART, batch, row, head, col)
                            first, second = load_pair(gX, PART, batch, row, x_head, col)
                            weights_first, weights_second = load_weights(gNorm, PART, col)
                            squares = squares + row_sum(first * first + second * second)
                            along = along + row_sum(
                                times(d_first * weights_first, first) + times(d_second * weights_second, second)
                            )
                        scale = inverse_rms(squares, PART, eps)
                        along = times(along, scale) / (2.0 * HALF)
                        a, c = through_norm(gX, gDX, gCos, gSin, gNorm, batch, row, x_head, head, 0, scale, along)
                        b, d = through_norm(gX, gDX, gCos, gSin, gNorm, batch, row, x_head, head, PART.cols, scale, along)
                        one, two, three, four = one + a, two + b, three + c, four + d
                    else:
                        for n in range(2):
                            col = int32(PART.cols * n)
                            d_first, d_second = rotate_back(gDX, gCos, gSin, PART, batch, row, head, col)
                            store_pair(gDX, d_first, d_second, batch, row, head, col)
                if NORMED:
                    gParts, count = gQParts, heads  # chosen after the loop, to save registers in it
                    if head >= heads:
                        gParts, count = gKParts, kv_heads
                    part = int32(rest * count + x_head)
                    store(gParts, one, (0, part, 0))
                    store(gParts, two, (0, part, PART.cols))
                    store(gParts, three, (0, part, HALF))
                    store(gParts, four, (0, part, HALF + PART.cols))

        return rotate_backward, None


def space(target: Target, everything: bool) -> Iterator[RotaryConfig]:
    """The configurations, which are the same for all GPUs."""
    for input_dtype in (bf16, fp16) if everything else (bf16,):
        for kind, head_dim, normed in itertools.product((RotateConfig, RotateBackwardConfig), HEAD_DIMS, (False, True)):
            yield kind(head_dim, input_dtype, normed)


@functools.cache
def make(config: RotateConfig | RotateBackwardConfig):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
