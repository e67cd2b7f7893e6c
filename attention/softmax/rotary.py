"""Rows of queries and keys, normalised and turned by their positions in one pass, and the same backwards.

With n = x / sqrt(mean(x^2) + eps) weights of a row x, or x itself, whose halves are n1 and n2, and its position's cos and sin:

    y1 = n1 cos - n2 sin    y2 = n2 cos + n1 sin

and of the gradient dy of y, with z = x / sqrt(mean(x^2) + eps):

    dn1 = dy1 cos + dy2 sin    dn2 = dy2 cos - dy1 sin
    dz = dn weights    dx = (dz - z mean(dz z)) / sqrt(mean(x^2) + eps)    dweights = sum dn z

A warp has 16 rows of a head at a time, and the warps of a block neighbouring heads of the same rows: these lie side by side in
memory where queries, keys and values are columns of one projection, and share their positions."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import col_sum, divmod, load, row_sum, rsqrt, store, warp_index, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt
from tiles.arguments import FLOAT, INT, array
from tiles.layout import LANES

from .backward.results import times

WARPS, ROWS = 8, 16  # of a thread block; rows that a warp has at a time
TILES_PER_WARP = 16  # how often, where it sums over rows
HEAD_DIMS = (64, 128)  # columns: quarters are tiles, and a warp has registers for them


@inlined
def load_pair(gX, PART, batch, row, head, col):
    """(some columns of the first half, the same of the second half) of 16 rows of a head. All columns at once would take too
    many registers."""
    other = int32(2 * PART.cols + col)
    return load(gX, PART, (batch, row, head, col), 1, 3, True), load(gX, PART, (batch, row, head, other), 1, 3, True)


@inlined
def load_cos_sin(gCos, gSin, PART, batch, row, col):
    """(cos, sin) for some pairs of columns of 16 rows."""
    return load(gCos, PART, (batch, row, col), 1, 2, True), load(gSin, PART, (batch, row, col), 1, 2, True)


@inlined
def rotate_back(gDX, gCos, gSin, PART, batch, row, head, col):
    """(dn1, dn2), the gradients before the rotation, for some pairs of columns of 16 rows of a head."""
    first, second = load_pair(gDX, PART, batch, row, head, col)
    cos, sin = load_cos_sin(gCos, gSin, PART, batch, row, col)
    return first * cos + second * sin, second * cos - first * sin


@inlined
def load_weights(gNorm, PART, col):
    """The weights of a norm for some pairs of columns."""
    other = int32(2 * PART.cols + col)
    return load(gNorm, PART.row_vec, (0, col), 0, 1, True), load(gNorm, PART.row_vec, (0, other), 0, 1, True)


@inlined
def inverse_rms(squares, PART, eps):
    """1 / sqrt(mean(x^2) + eps) of rows, from the sums of their squares."""
    return rsqrt(squares / (4.0 * PART.cols) + eps)


@dataclass(frozen=True)
class RotaryConfig:
    """What is rotated: rows of queries and keys. normed: are they normalised before?"""

    head_dim: int
    dtype: dtype
    normed: bool
    threads = LANES * WARPS

    @property
    def of(self) -> tuple[int, dtype, bool]:
        """The fields, by which the helpers of both kernels are made."""
        return self.head_dim, self.dtype, self.normed

    @property
    def at_once(self) -> int:
        """Blocks that share a multiprocessor, by the registers that they take."""
        return 128 // self.head_dim


class RotateConfig(RotaryConfig):
    """The kernel that computes y, the normalised and rotated rows."""

    def __str__(self):
        return f"{'normed, ' * self.normed}turned, D {self.head_dim} {self.dtype}"

    @staticmethod
    @functools.cache
    def make(config: "RotateConfig"):
        """(kernel, shared memory) of a configuration."""
        INPUT, PART, NORMED = config.dtype, rt(ROWS, config.head_dim // 4, fp32), config.normed

        @cuda.jit(launch_bounds=(config.threads, config.at_once))
        def turn(
            gQ: array(4, INPUT), gK: array(4, INPUT), gCos: array(3), gSin: array(3), gQNorm: array(2), gKNorm: array(2),
            gOut: array(4, INPUT), tiles: INT, cuts: INT, heads: INT, kv_heads: INT, eps: FLOAT,
        ):  # fmt: skip
            """Y (batch, row, head, column), heads of queries first, of Q and K."""
            rest, cut = divmod(cuda.blockIdx.x, cuts)
            batch, tile = divmod(rest, tiles)
            row, head = int32(ROWS * tile), int32(WARPS * cut + warp_index())
            if head < heads + kv_heads:
                gX, gNorm, own = gQ, gQNorm, head
                if head >= heads:
                    gX, gNorm, own = gK, gKNorm, int32(head - heads)
                squares = zeros(PART.col_vec)
                if NORMED:
                    for n in range(2):
                        first, second = load_pair(gX, PART, batch, row, own, int32(PART.cols * n))
                        squares = squares + row_sum(first * first + second * second)
                scale = inverse_rms(squares, PART, eps)
                for n in range(2):
                    col = int32(PART.cols * n)
                    first, second = load_pair(gX, PART, batch, row, own, col)
                    if NORMED:
                        of_first, of_second = load_weights(gNorm, PART, col)
                        first, second = first * scale * of_first, second * scale * of_second
                    cos, sin = load_cos_sin(gCos, gSin, PART, batch, row, col)
                    store(gOut, INPUT(first * cos - second * sin), (batch, row, head, col), 1, 3, True)
                    store(gOut, INPUT(second * cos + first * sin), (batch, row, head, int32(2 * PART.cols + col)), 1, 3, True)

        return turn, None


class RotateBackwardConfig(RotaryConfig):
    """The kernel that writes dx over dy, and sums dweights."""

    def __str__(self):
        return f"{'normed, ' * self.normed}turned back, D {self.head_dim} {self.dtype}"

    @property
    def steps(self) -> int:
        """The number of tiles of rows that a warp works on."""
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
        def through_norm(gX, gDX, gCos, gSin, gNorm, batch, row, own, head, col, scale, along):
            """(sums over rows of dn z, of both halves) of some pairs, of which dx goes to memory."""
            d_first, d_second = rotate_back(gDX, gCos, gSin, PART, batch, row, head, col)
            first, second = load_pair(gX, PART, batch, row, own, col)
            of_first, of_second = load_weights(gNorm, PART, col)
            first, second = first * scale, second * scale
            sums = col_sum(times(d_first, first)), col_sum(times(d_second, second))
            d_first, d_second = d_first * of_first - times(along, first), d_second * of_second - times(along, second)
            store_pair(gDX, times(d_first, scale), times(d_second, scale), batch, row, head, col)
            return sums

        @cuda.jit(launch_bounds=(config.threads, config.at_once))
        def turn_back(
            gQ: array(4, INPUT), gK: array(4, INPUT), gCos: array(3), gSin: array(3), gQNorm: array(2), gKNorm: array(2),
            gDX: array(4, INPUT), gQParts: array(3), gKParts: array(3),
            tiles: INT, shares: INT, cuts: INT, heads: INT, kv_heads: INT, eps: FLOAT,
        ):  # fmt: skip
            """dX (batch, row, head, column), where dY was; of `shares` shares of a batch's rows, and of every head, the sums
            of dweights go to gQParts (0, part, column) and gKParts."""
            rest, cut = divmod(cuda.blockIdx.x, cuts)
            batch, share = divmod(rest, shares)
            head = int32(WARPS * cut + warp_index())
            if head < heads + kv_heads:
                gX, gNorm, own = gQ, gQNorm, head
                if head >= heads:
                    gX, gNorm, own = gK, gKNorm, int32(head - heads)
                one, two, three, four = zeros(PART.row_vec), zeros(PART.row_vec), zeros(PART.row_vec), zeros(PART.row_vec)
                for tile in range(COUNT * share, min(COUNT * (share + 1), tiles)):
                    row = int32(ROWS * tile)
                    if NORMED:
                        squares, along = zeros(PART.col_vec), zeros(PART.col_vec)
                        for n in range(2):
                            col = int32(PART.cols * n)
                            d_first, d_second = rotate_back(gDX, gCos, gSin, PART, batch, row, head, col)
                            first, second = load_pair(gX, PART, batch, row, own, col)
                            of_first, of_second = load_weights(gNorm, PART, col)
                            squares = squares + row_sum(first * first + second * second)
                            along = along + row_sum(times(d_first * of_first, first) + times(d_second * of_second, second))
                        scale = inverse_rms(squares, PART, eps)
                        along = times(along, scale) / (2.0 * HALF)
                        a, c = through_norm(gX, gDX, gCos, gSin, gNorm, batch, row, own, head, 0, scale, along)
                        b, d = through_norm(gX, gDX, gCos, gSin, gNorm, batch, row, own, head, PART.cols, scale, along)
                        one, two, three, four = one + a, two + b, three + c, four + d
                    else:
                        for n in range(2):
                            col = int32(PART.cols * n)
                            d_first, d_second = rotate_back(gDX, gCos, gSin, PART, batch, row, head, col)
                            store_pair(gDX, d_first, d_second, batch, row, head, col)
                if NORMED:
                    gParts, count = gQParts, heads  # only now: over the rows they would take registers
                    if head >= heads:
                        gParts, count = gKParts, kv_heads
                    part = int32(rest * count + own)
                    store(gParts, one, (0, part, 0))
                    store(gParts, two, (0, part, PART.cols))
                    store(gParts, three, (0, part, HALF))
                    store(gParts, four, (0, part, HALF + PART.cols))

        return turn_back, None


def space(arch: str, everything: bool) -> Iterator[RotaryConfig]:
    """The configurations, the same for all GPUs."""
    for of in (bf16, fp16) if everything else (bf16,):
        for kind, head_dim, normed in itertools.product((RotateConfig, RotateBackwardConfig), HEAD_DIMS, (False, True)):
            yield kind(head_dim, of, normed)


@functools.cache
def make(config: RotateConfig | RotateBackwardConfig):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
