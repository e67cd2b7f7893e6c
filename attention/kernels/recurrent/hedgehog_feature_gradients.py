"""The features of Hedgehog's queries and keys, and the gradients of rows and feature maps from those of features. With p and r
the softmaxes of y = x M and of -y,

    f(x) = max([p, r], 1e-6)        dy = p (dp - sum p dp) - r (dr - sum r dr)        dx = dy M^T        dM = x^T dy

The order of sums over tokens depends on the shapes alone: each block sums dM over some chunks, and another kernel adds these
sums."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import (
    col_sum,
    divmod,
    exp2,
    greater,
    hstack,
    load,
    lower_fill,
    maximum,
    mma_AB,
    mma_ABt,
    mma_AtB,
    row_max,
    row_min,
    row_sum,
    store,
    subtile,
    truncate,
    warp_index,
    where,
    zeros,
)
from tiles import bf16, fp16, fp32, inlined, pipeline, rt, shared, st
from tiles.launching.arguments import ENDS, INT, array, record
from tiles.layout import WARPGROUP
from tiles.targets import Target

from ...parts.recurrent.gates import LOG2_E
from ...parts.recurrent.hedgehog_chunks import FLOOR, HALF, HEAD_DIMS, ROWS, HedgehogConfig, hedgehog_forms
from ...parts.recurrent.tokens import CHUNK, SequenceLayout

Y = rt(ROWS, HALF, fp32)


@inlined
def softmaxes(y):
    """(p, r): the softmaxes of rows y and of -y."""
    y = y * LOG2_E
    up, down = exp2(y - row_max(y)), exp2(row_min(y) - y)
    return up / row_sum(up), down / row_sum(down)


@dataclass(frozen=True)
class HedgehogFeatures(HedgehogConfig):
    """The configuration of the kernel that writes features. with_sums: and their sums over the tokens of each warp?"""

    with_sums: bool = False
    label = "Hedgehog's features"

    def __str__(self):
        return super().__str__() + ", sums" * self.with_sums

    @staticmethod
    @functools.cache
    def make(config: "HedgehogFeatures"):
        """(kernel, shared memory) of a configuration."""
        INPUT, VECTOR_BYTES, X, seq_layout = config.dtype, config.vector_bytes, config.rows, SequenceLayout(config.varlen)
        smem = shared(m=pipeline(st(config.head_dim, HALF, INPUT), 1, WARPGROUP))
        WITH_SUMS = config.with_sums
        PARAMS: Any = record(feature_sums=array(4)) if WITH_SUMS else record()

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def write_features(
            gX: array(4, INPUT), gMap: array(3, INPUT), gFeatures: array(4, INPUT), gCuSeqlens: ENDS, length: INT, tiles: INT,
            heads: INT, params: PARAMS,
        ):  # fmt: skip
            """f(x) of one of the `tiles` of a head's tokens. params: feature_sums (tile, head, warp, feature), if wanted."""
            (m,) = smem.open()
            batch_head, tile = divmod(cuda.blockIdx.x, tiles)
            batch, head = divmod(batch_head, heads)
            m.fill(0, gMap, (head, 0, 0), vector_bytes=VECTOR_BYTES)
            at = batch, int32(CHUNK * tile + ROWS * warp_index()), head, 0
            x = load(truncate(gX, 1, seq_layout.padding_start(gCuSeqlens, length)), X, at, 1, 3)
            up, down = softmaxes(mma_AB(zeros(Y), x, m.wait(0)))
            features = INPUT(hstack(maximum(up, FLOOR), maximum(down, FLOOR)))
            store(gFeatures, features, at, 1, 3, True)
            if WITH_SUMS:
                rows = lower_fill(fp32(features), int32(length - CHUNK * tile - ROWS * warp_index()), 0.0)
                store(params.feature_sums, col_sum(rows), (int32(batch * tiles + tile), head, int32(warp_index()), 0), cols=3)

        return write_features, smem


@dataclass(frozen=True)
class HedgehogFeatureGradients(HedgehogConfig):
    """The configuration of the kernel that computes gradients from those of features."""

    label = "gradients of Hedgehog's features"

    @staticmethod
    @functools.cache
    def make(config: "HedgehogFeatureGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, VECTOR_BYTES, DX, seq_layout = config.dtype, config.vector_bytes, config.sums, SequenceLayout(config.varlen)
        MAP_ROWS = config.head_dim // WARPGROUP  # of a warp
        DMAP = rt(MAP_ROWS, HALF, fp32)
        smem = shared(
            m=pipeline(st(config.head_dim, HALF, INPUT), 1, WARPGROUP),
            x=pipeline(st(CHUNK, config.head_dim, INPUT, width=MAP_ROWS * INPUT.itemsize), 1, WARPGROUP),
            dy=st(CHUNK, HALF, INPUT),
        )

        @inlined
        def sum_group(gX, tile_type, batch, row, head, col, group):
            """The sum of a tile over the value heads of a key head."""
            total = zeros(tile_type)
            for i in range(group):
                total = total + load(gX, tile_type, (batch, row, int32(head * group + i), col), 1, 3, True)
            return total

        @inlined
        def through_softmax(p, dp):
            """The gradient of x, where p = softmax(x). Features that are at the floor of 1e-6 have a gradient of 0."""
            dp = where(greater(p, FLOOR), dp, 0.0)
            return p * (dp - row_sum(p * dp))

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def differentiate(
            gX: array(4, INPUT), gMap: array(3, INPUT), gWindowDX: array(4), gDFeatures: array(4), gDX: array(4, INPUT),
            gDMap: array(4), gCuSeqlens: ENDS, length: INT, batches: INT, tiles: INT, splits: INT, group: INT,
        ):  # fmt: skip
            """A block has every `splits`-th of the chunks of a key head, `tiles` of each batch. gWindowDX: dx of the
            window, of each value head, as gDFeatures. gDMap (1, row, head and split, column): the sum of a block's dM."""
            m, x, dy = smem.open()
            head, split = divmod(cuda.blockIdx.x, splits)
            end, warp = seq_layout.padding_start(gCuSeqlens, length), warp_index()
            rows, window_dx, dfeatures = (
                truncate(gX, 1, end),
                truncate(gWindowDX, 1, end),
                truncate(gDFeatures, 1, end),
            )
            m.fill(0, gMap, (head, 0, 0), vector_bytes=VECTOR_BYTES)
            total = zeros(DMAP)
            for n in range(split, batches * tiles, splits):
                batch, tile = divmod(int32(n), tiles)
                row = int32(CHUNK * tile + ROWS * warp)
                x.fill(0, rows, (batch, int32(CHUNK * tile), head, 0), 1, 3, vector_bytes=VECTOR_BYTES)
                x_tile, map_tile = x.wait(0), m.wait(0)
                up, down = softmaxes(mma_AB(zeros(Y), subtile(x_tile, ROWS, warp), map_tile))
                gradient = through_softmax(up, sum_group(dfeatures, Y, batch, row, head, 0, group))
                gradient = gradient - through_softmax(down, sum_group(dfeatures, Y, batch, row, head, HALF, group))
                rounded = INPUT(gradient)
                store(subtile(dy, ROWS, warp), rounded)
                dx = mma_ABt(sum_group(window_dx, DX, batch, row, head, 0, group), rounded, map_tile)
                store(gDX, INPUT(dx), (batch, row, head, 0), 1, 3)
                thread_block.sync(False)
                total = mma_AtB(total, subtile(x_tile, CHUNK, 0, MAP_ROWS, warp), dy)
                thread_block.sync(False)
            store(gDMap, total, (0, int32(MAP_ROWS * warp), int32(head * splits + split), 0), 1, 3)

        return differentiate, smem


def space(target: Target, everything: bool) -> Iterator[HedgehogFeatures | HedgehogFeatureGradients]:
    """The configurations of bf16 and 16 bytes, with other dtypes and bytes if `everything`."""
    for kind, form in itertools.product((HedgehogFeatures, HedgehogFeatureGradients), hedgehog_forms(everything)):
        yield kind(*form)
    if target.has_wgmma:
        yield from (HedgehogFeatures(HEAD_DIMS[-1], x, with_sums=True) for x in ((bf16, fp16) if everything else (bf16,)))


@functools.cache
def make(config: HedgehogFeatures | HedgehogFeatureGradients):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
