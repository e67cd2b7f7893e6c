"""Two kernels of Based's gradients, before and after those of linear attention: one writes the features of queries and keys
(ops.taylor), the other computes the gradients of queries and keys from those of their features (ops.taylor_gradients)."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, load, store, taylor, taylor_gradients, truncate, warp_index
from ops.for_attention.taylor_features import BASE, FEATURES
from tiles import bf16, dtype, fp16, rt
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.tokens import SequenceLayout

WARPS = 4  # of a block
TOKENS = WARPS * BASE  # of a block


@dataclass(frozen=True)
class BasedFeatures:
    """The configuration of the kernel that writes features."""

    dtype: dtype
    threads = LANES * WARPS

    def __str__(self):
        return f"Based's features, {self.dtype}"

    @staticmethod
    @functools.cache
    def make(config: "BasedFeatures"):
        """(kernel, shared memory) of a configuration."""
        INPUT, X = config.dtype, rt(BASE, BASE, config.dtype)

        @cuda.jit(launch_bounds=(config.threads, 1))
        def write_features(
            gX: array(4, INPUT), gFeatures: array(4, INPUT), tiles: INT, heads: INT, scale: FLOAT, squares: FLOAT
        ):
            """The features of scale x, for one of the `tiles` of a head's tokens. squares: the factor of squares."""
            batch_head, tile = divmod(cuda.blockIdx.x, tiles)
            batch, head = divmod(batch_head, heads)
            at = batch, int32(TOKENS * tile + BASE * warp_index()), head, 0
            store(gFeatures, taylor(load(gX, X, at, 1, 3) * scale, squares), at, 1, 3, True)

        return write_features, None


@dataclass(frozen=True)
class BasedFeatureGradients:
    """The configuration of the kernel that computes gradients from those of features. varlen: are sequences packed
    (cu_seqlens)?"""

    dtype: dtype
    varlen: bool
    threads = LANES * WARPS

    def __str__(self):
        return f"gradients of Based's features, {self.dtype}" + ", varlen" * self.varlen

    @staticmethod
    @functools.cache
    def make(config: "BasedFeatureGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, X, seq_layout = config.dtype, rt(BASE, BASE, config.dtype), SequenceLayout(config.varlen)

        @cuda.jit(launch_bounds=(config.threads, 1))
        def differentiate(
            gX: array(4, INPUT), gDFeatures: array(4, INPUT), gDX: array(4, INPUT), gCuSeqlens: ENDS, length: INT, tiles: INT,
            heads: INT, scale: FLOAT, squares: FLOAT,
        ):  # fmt: skip
            """dx for one of the `tiles` of a head's tokens, from the gradients of the features of scale x. Tokens after the
            last sequence are not read, and have gradients of 0, as their features have."""
            batch_head, tile = divmod(cuda.blockIdx.x, tiles)
            batch, head = divmod(batch_head, heads)
            token = int32(TOKENS * tile + BASE * warp_index())
            end = seq_layout.padding_start(gCuSeqlens, length)
            x = load(truncate(gX, 1, end), X, (batch, token, head, 0), 1, 3) * scale
            df = load(gDFeatures, rt(BASE, FEATURES, INPUT), (batch, token, head, 0), 1, 3, True)
            store(gDX, INPUT(taylor_gradients(df, x, squares) * scale), (batch, token, head, 0), 1, 3)

        return differentiate, None


def space(target: Target, everything: bool) -> Iterator[BasedFeatures | BasedFeatureGradients]:
    """The configurations; those of fp16 with `everything` only."""
    for input_dtype in (bf16, fp16) if everything else (bf16,):
        yield BasedFeatures(input_dtype)
        yield from itertools.starmap(BasedFeatureGradients, ((input_dtype, varlen) for varlen in (False, True)))


@functools.cache
def make(config: BasedFeatures | BasedFeatureGradients):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
