"""Hedgehog's gradients for Hopper, chunk by chunk in any order, from the sums of older features and of their gradients
(hedgehog_chunks.py has the equations): what the kernels for queries and for keys (hedgehog_query_gradients_hopper.py,
hedgehog_key_gradients_hopper.py) have in common. A block has a warpgroup for the window and one for features. In both

    dy = p (df - sum p df), minus the same of the other half of the features

What keys need of queries goes through memory (QueryStats)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy import int32

from ops import exp2, greater, load, maximum, row_sum, store, subtile, warpgroup, where
from tiles import bf16, dtype, fp16, fp32, inlined, rt, st, static, sv
from tiles.launching.arguments import array, tiled
from tiles.targets import Target

from .gates import LOG2_E, load_tokens
from .hedgehog_chunks import FEATURES, FLOOR, HALF
from .tokens import CHUNK

HEAD = 128  # columns of queries, keys and values, padded
WINDOW, FEATURE_ROWS, PRODUCER = range(3)  # the indices of the warpgroups
LOAD_WARP, VALUE_WARP, INPUT_WARP, STATS_WARP = range(4)  # of the producer
REGISTERS = 40, 232  # of a thread of the producer, of the others
WARPS = warpgroup.WARPGROUP
MAXIMA, FACTORS, DOTS, TIES = range(4)  # the numbers of QueryStats
STATS = sv(4 * CHUNK, fp32)  # those of a chunk's queries
Z = sv(FEATURES, fp32)
EQUAL = 1 - 2.0**-21  # an exponential from which on a score counts as the largest one: both kernels may round scores apart
EQUAL_AGAIN = EQUAL - 2.0**-23  # where it is asked again: LLVM would keep all answers to the same question in registers
ABOVE_FLOOR = FLOOR * (1 + 1 / 16)  # no rounded feature lies between
SIGNAL = st(16, 64, bf16)  # the smallest tile, for a ring whose tiles nobody reads
SCORES, SUMS, HALF_SUMS = rt(16, CHUNK, fp32), rt(16, HEAD, fp32), rt(16, HALF, fp32)


@static
class QueryStats:
    """What the kernel for keys needs of a chunk's queries, four numbers of each, in a shared vector. With the exponentials e of
    a query's scores in the window and dP = dO V^T,

        largest score    factor = scale beta / n    dot = dO . o    tie = factor sum(e (dP - dot)) / (number of e = 1)

    dtype: of q, k, v and dO."""

    dtype: dtype

    @inlined
    def store(self, stats, maxima, factor, dot, tie):
        """A warpgroup writes the numbers of its queries."""
        warpgroup.store(subtile(stats, CHUNK, MAXIMA), maxima)
        warpgroup.store(subtile(stats, CHUNK, FACTORS), factor)
        warpgroup.store(subtile(stats, CHUNK, DOTS), dot)
        warpgroup.store(subtile(stats, CHUNK, TIES), tie)

    @inlined
    def send(self, gStats, stats, chunk, head):
        """A warp stores the numbers of a chunk's queries in memory."""
        for number in range(4):
            store(gStats, load_tokens(stats, number), (chunk, head, int32(CHUNK * number)), cols=2)

    @inlined
    def differentiate_scores(self, s_t, dp_t, stats, scale):
        """(P^T / n, ds^T) of scores of keys with queries and of V dO^T; ds = factor e (dP - dot) - [e = 1] tie."""
        e = exp2((s_t - load(subtile(stats, CHUNK, MAXIMA), SCORES.row_vec)) * (scale * LOG2_E))
        weights = e * load(subtile(stats, CHUNK, FACTORS), SCORES.row_vec)
        ds = weights * (dp_t - load(subtile(stats, CHUNK, DOTS), SCORES.row_vec))
        ds = ds - greater(e, EQUAL) * load(subtile(stats, CHUNK, TIES), SCORES.row_vec)
        return self.dtype(weights * (1.0 / scale)), self.dtype(ds)


@static
class FeatureTiles:
    """A chunk's features in shared memory, and gradients through the feature map. dtype: of the features."""

    dtype: dtype

    @inlined
    def load_half(self, tile, half):
        """A warp's rows of one half of the features, p or r."""
        return fp32(warpgroup.load(subtile(tile, CHUNK, 0, HALF, half), rt(16, HALF, self.dtype)))

    @inlined
    def load_sums(self, vector, half):
        """One half of a vector of sums of features, as a row."""
        return load(subtile(vector, HALF, half), HALF_SUMS.row_vec)

    @inlined
    def through_softmax(self, p, dp):
        """The gradient of x, where p = softmax(x). Of p as rounded: it is divided by its sum, which is 0 after the last token.
        Features at the floor have a gradient of 0."""
        p = where(greater(p, ABOVE_FLOOR), p, 0.0)
        return p * (dp - row_sum(p * dp) / maximum(row_sum(p), FLOOR))

    @inlined
    def sum_tokens(self, tile, half, weights):
        """The sum of a chunk's features, times a number for each token: each warp has those of 16 columns."""
        x = fp32(warpgroup.load_transposed(subtile(tile, CHUNK, 0, HALF, half), rt(16, CHUNK, self.dtype)))
        return row_sum(x * weights)


@dataclass(frozen=True)
class HedgehogGradientConfig:
    """The configuration of a kernel of Hedgehog's gradients. dtype: of q, k, v and dO. unrounded: are dq and dk float32, to be
    added over heads that share a key head? label: what the kernel computes."""

    dtype: dtype
    unrounded: bool = False
    label: ClassVar[str] = ""
    threads: ClassVar[int] = 3 * warpgroup.THREADS

    def __str__(self):
        return f"{self.label}, {self.dtype}{', float32' * self.unrounded}"

    @property
    def rows(self):
        """The tile of Q, K, V or dO for a chunk."""
        return st(CHUNK, HEAD, self.dtype)

    @property
    def features(self):
        """The tile of f(q) or f(k) for a chunk."""
        return st(CHUNK, FEATURES, self.dtype)

    @property
    def state(self):
        """The tile of S or dS, transposed: columns of values by features."""
        return st(HEAD, FEATURES, self.dtype)

    @property
    def map(self):
        """The tile of the matrix M of a feature map."""
        return st(HEAD, HALF, self.dtype)

    @property
    def square(self):
        """The tile of dy or of weights for a chunk: 64 tokens by 64 columns, or by 64 queries."""
        return st(CHUNK, CHUNK, self.dtype)

    @property
    def gradients(self):
        """The type of the kernel's argument gDX, which is dq or dk."""
        return array(4) if self.unrounded else tiled(self.rows, unit=1)

    @classmethod
    def space(cls, target: Target, everything: bool) -> Iterator[Any]:
        """The configurations; those of fp16 with `everything` only."""
        if target.has_wgmma:
            for input_dtype, unrounded in itertools.product((bf16, fp16) if everything else (bf16,), (False, True)):
                yield cls(input_dtype, unrounded)
