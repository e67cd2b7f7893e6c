"""Hedgehog's gradients for Hopper, chunk by chunk in any order, from the sums of older features and of their gradients
(hedgehog_chunks.py has the equations): what the kernels for queries and for keys (hedgehog_query_gradients_hopper.py,
hedgehog_key_gradients_hopper.py) have in common. A block has a warpgroup for the window and one for features. In both

    dy = p (df - sum p df), minus the same of the other half of the features

What keys need of a query goes through memory: the largest score, scale beta / n, dO . o, and what the largest score's keys
share."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ops import (
    greater,
    load,
    maximum,
    row_sum,
    subtile,
    warpgroup,
    where,
)
from tiles import bf16, dtype, fp16, fp32, inlined, rt, st, static, sv
from tiles.launching.arguments import array, tiled
from tiles.targets import Target

from .hedgehog_chunks import FEATURES, FLOOR, HALF
from .tokens import CHUNK

HEAD = 128  # columns of queries, keys and values, padded
WINDOW, FEATURE_ROWS, PRODUCER = range(3)  # the indices of the warpgroups
LOAD_WARP, VALUE_WARP, INPUT_WARP, STATS_WARP = range(4)  # of the producer
REGISTERS = 40, 232  # of a thread of the producer, of the others
WARPS = warpgroup.WARPGROUP
MAXIMA, FACTORS, DOTS, TIES = range(4)  # what the second kernel needs of queries
STATS = 4 * CHUNK
Z = sv(FEATURES, fp32)
EQUAL = 1 - 2.0**-21  # an exponential from which on a score counts as the largest one: both kernels may round scores apart
EQUAL_AGAIN = EQUAL - 2.0**-23  # where it is asked again: LLVM would keep all answers to the same question in registers
ABOVE_FLOOR = FLOOR * (1 + 1 / 16)  # no rounded feature lies between
SIGNAL = st(16, 64, bf16)  # the smallest tile, for a ring whose tiles nobody reads
SCORES, SUMS, HALF_SUMS = rt(16, CHUNK, fp32), rt(16, HEAD, fp32), rt(16, HALF, fp32)


@static
class FeatureTiles:
    """A chunk's features in shared memory, in this dtype, and the way back from their gradients."""

    dtype: dtype

    @inlined
    def load_half(self, tile, half):
        """A warp's rows of one half of the features."""
        return fp32(warpgroup.load(subtile(tile, CHUNK, 0, HALF, half), rt(16, HALF, self.dtype)))

    @inlined
    def load_sums(self, vector, half):
        """The sums of one half of the features, as a row."""
        return load(subtile(vector, HALF, half), HALF_SUMS.row_vec)

    @inlined
    def through_softmax(self, p, dp):
        """The gradient of x, where p = softmax(x), rounded: so p is divided by its sum, which is 0 after the last token.
        Features at the floor have none."""
        p = where(greater(p, ABOVE_FLOOR), p, 0.0)
        return p * (dp - row_sum(p * dp) / maximum(row_sum(p), FLOOR))

    @inlined
    def sum_tokens(self, tile, half, weights):
        """The sum of a chunk's features, times a number for each token: each warp has those of 16 columns."""
        x = fp32(warpgroup.load_transposed(subtile(tile, CHUNK, 0, HALF, half), rt(16, CHUNK, self.dtype)))
        return row_sum(x * weights)


@dataclass(frozen=True)
class HedgehogGradientConfig:
    """The configuration of a kernel. dtype: of q, k, v and dO. unrounded: are dq and dk float32, to be added over heads that
    share a key head?"""

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
        """The tile of a chunk's features."""
        return st(CHUNK, FEATURES, self.dtype)

    @property
    def state(self):
        """The tile of a state, transposed."""
        return st(HEAD, FEATURES, self.dtype)

    @property
    def map(self):
        """The tile of a feature map."""
        return st(HEAD, HALF, self.dtype)

    @property
    def square(self):
        """The tile of a chunk's dy, or of weights."""
        return st(CHUNK, CHUNK, self.dtype)

    @property
    def gradients(self):
        """The type of the kernel's argument dq or dk."""
        return array(4) if self.unrounded else tiled(self.rows, unit=1)

    @classmethod
    def space(cls, target: Target, everything: bool) -> Iterator[Any]:
        """The configurations; those of fp16 with `everything` only."""
        if target.has_wgmma:
            for input_dtype, unrounded in itertools.product((bf16, fp16) if everything else (bf16,), (False, True)):
                yield cls(input_dtype, unrounded)
