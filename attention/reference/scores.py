"""The modifications of scaled scores before the softmax, in NumPy. For query i and key j of head h in sequence b, in this
order:

    x = softcap * tanh(x / softcap)                and the other functions in parts/score_mods.py
    x = x - alibi[b, h] * |d - j|                  d = i + Sk - Sq: the last query is aligned with the last key
    x = x + bias[b, h, i, j]
    x = score(x, b, h, i, j, *aux)                 FlexAttention's score_mod
    s = x if key j is visible to query i, otherwise -inf

Key j is visible to query i if all of these hold:

    j <= d                                         causal
    d - left <= j <= d + right                     window = (left, right); None is open
    mask(b, h, i, j, *aux)                         FlexAttention's mask_mod
    the block of (i, j) is listed                  blocks; in a block that is listed as full, mask does not count
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tiles.testing.compare import host

from ..parts.score_mods import BUILTIN_SCORE_MODS

STEP = 2.0**-8  # of finite differences; large, as the functions of ops compute in float32


class ReferenceVariant:
    """The options of a call that modify scores. score_mods: those of BUILTIN_SCORE_MODS. alibi: (H,) or (B, H); bias: (B or 1,
    H or 1, Sq or 1, Sk); blocks: an object with the fields of FlexAttention's BlockMask (kv_num_blocks, kv_indices,
    full_kv_num_blocks, full_kv_indices, BLOCK_SIZE).
    B is the number of sequences if these are packed.

    mask and score get integers b and h and index arrays i (n, 1) and j (1, m); their results are broadcast."""

    def __init__(
        self,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        *,
        alibi: Any = None,
        bias: Any = None,
        mask: Callable | None = None,
        score: Callable | None = None,
        aux: Any = (),
        blocks: Any = None,
        **score_mods: Any,
    ):
        self.causal, self.window, self.mask, self.blocks = causal, window, mask, blocks
        self.alibi, self.bias, self.score, self.aux = alibi, bias, score, tuple(aux)
        checked = [(mod, mod.check(score_mods.pop(mod.option, None))) for mod in BUILTIN_SCORE_MODS]
        self.score_mods = [(mod, value) for mod, value in checked if value is not None]
        if score_mods:
            raise TypeError(f"{min(score_mods)}: is no option of scores")

    def cast(self, real: type) -> ReferenceVariant:
        """These options with NumPy arrays, whose elements are integers or of dtype `real`."""
        other = copy.copy(self)
        other.alibi, other.bias, *aux = (_cast_array(x, real) for x in (self.alibi, self.bias, *self.aux))
        other.aux = tuple(x.view(AuxArray) for x in aux)
        return other

    def scores(self, x: np.ndarray, b: int, h: int, i: np.ndarray, j: np.ndarray, past: int) -> np.ndarray:
        """s for scaled scores x (n, m) in rows i and columns j; past is Sk - Sq."""
        real = x.dtype.type
        x = self.score_input(x, b, h, i, j, past)
        if self.score is not None:
            x = np.broadcast_to(self.score(x, b, h, i, j, *self.aux), x.shape).astype(real)
        return np.where(self.visible(b, h, i, j, past), x, real(-np.inf))

    def score_input(self, x: np.ndarray, b: int, h: int, i: np.ndarray, j: np.ndarray, past: int) -> np.ndarray:
        """x after built-in functions, alibi and bias: the first argument of `score`."""
        x, _ = self.apply_score_mods(x)
        if self.alibi is not None:
            x = x - self.alibi[..., h][b if self.alibi.ndim == 2 else ()] * np.abs(i + past - j).astype(x.dtype)
        if self.bias is not None:
            batch, heads, rows, _ = self.bias.shape
            x = x + self.bias[b if batch > 1 else 0, h if heads > 1 else 0][i if rows > 1 else 0, j]
        return x

    def apply_score_mods(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(x after the built-in functions of a score, its derivative by x)"""
        grad = np.ones_like(x)
        for mod, value in self.score_mods:
            x, mod_grad = mod.reference(x, value)
            grad = grad * mod_grad
        return x, grad

    def score_grad(self, x: np.ndarray, b: int, h: int, i: np.ndarray, j: np.ndarray, past: int) -> np.ndarray:
        """d score / d x, where x is the first argument of `score`, for scaled scores x; by finite differences."""
        x, score = self.score_input(x, b, h, i, j, past).astype(float), self.score
        return np.ones(x.shape) if score is None else self._difference(lambda step: score(x + step, b, h, i, j, *self.aux))

    def aux_grad(
        self, n: int, place: tuple[int, ...], x: np.ndarray, b: int, h: int, i: np.ndarray, j: np.ndarray, past: int
    ) -> np.ndarray:
        """d score / d aux[n][place], for scaled scores x; by finite differences."""
        x, score = self.score_input(x, b, h, i, j, past).astype(float), self.score
        assert score is not None

        def at_step(step):
            aux = [y.astype(float) if m == n else y for m, y in enumerate(self.aux)]
            aux[n][place] += step
            return np.broadcast_to(score(x, b, h, i, j, *aux), x.shape)

        return self._difference(at_step)

    @staticmethod
    def _difference(f: Callable) -> np.ndarray:
        return (np.asarray(f(STEP), float) - np.asarray(f(-STEP), float)) / (2 * STEP)

    def visible(self, b: int, h: int, i: np.ndarray, j: np.ndarray, past: int) -> np.ndarray:
        """(n, m) booleans: is key j visible to query i?"""
        visible = np.ones((i.size, j.size), bool)
        if self.causal:
            visible &= j <= i + past
        left, right = self.window or (None, None)
        if left is not None:
            visible &= j >= i + past - left
        if right is not None:
            visible &= j <= i + past + right
        masked = np.True_ if self.mask is None else np.asarray(self.mask(b, h, i, j, *self.aux))
        if masked.dtype != bool:
            raise TypeError(f"mask: must return booleans, not {masked.dtype}")
        if self.blocks is not None:
            partial, full = _listed_blocks(self.blocks, b, h, i, j)
            masked = masked & partial | full
        return visible & masked


class AuxArray(np.ndarray):
    """An array that mask and score read. Elements outside it are 0, as in kernels: functions are called for all pairs of query
    and key, and those that are not visible may read there."""

    def __getitem__(self, index):
        array, places = np.asarray(self), index if isinstance(index, tuple) else (index,)
        if not all(isinstance(place, (int, np.integer, np.ndarray)) for place in places):
            return array[index]
        ends = [max(extent - 1, 0) for extent in self.shape]
        inside = [(place >= 0) & (place < extent) for place, extent in zip(places, self.shape)]
        elements = array[tuple(np.clip(place, 0, end) for place, end in zip(places, ends))]
        axes = (..., *[None] * (self.ndim - len(places)))
        return np.where(np.asarray(functools.reduce(np.logical_and, inside))[axes], elements, array.dtype.type(0))[()]


def _cast_array(x, real):
    """x as a NumPy array, of integers or of dtype `real`; None for None."""
    if x is None:
        return None
    x = host(x)
    return x if x.dtype.kind in "biu" else x.astype(real)


def _listed_blocks(blocks, b, h, i, j):
    """(is the block of (i, j) listed as partial?, is it listed as full?), as booleans (n, m)."""
    size = blocks.BLOCK_SIZE
    rows, cols = (size, size) if isinstance(size, int) else size
    results = []
    for counts, indices in (blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices):
        if counts is None:
            results.append(np.False_)
            continue
        counts, indices = host(counts), host(indices)
        batch_head = b if len(counts) > 1 else 0, h if counts.shape[1] > 1 else 0
        listed = np.zeros((counts.shape[2], indices.shape[3] + 1 + int(j.max(initial=0)) // cols), bool)
        for row, count in enumerate(counts[batch_head]):
            listed[row, indices[batch_head][row, :count]] = True
        results.append(listed[i // rows, j // cols])
    return results
