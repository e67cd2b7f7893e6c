"""The mask of dropout: a function of the seed and the position alone, the same in kernels, in NumPy and in torch.

Element (i, j) of rows and columns is dropped where 16 bits of Philox4x32-10 are below 65536 p, as attention drops weight (i, j)
of its first head (attention/dropout.py, tiles/philox.py). Leading axes are rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from attention.dropout import drop_threshold
from tiles.philox import HALF, MULTIPLIERS, ROUNDS, STEPS, TILE, WORD, halves


def keep_mask(shape: Sequence[int], p: float, seed: int) -> np.ndarray:
    """True where dropout with probability p keeps an element, for an array of this shape."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return (halves(seed, 0, 0, np.arange(rows)[:, None], np.arange(columns)) >= drop_threshold(p)).reshape(shape)


def keep_mask_in_torch(x: Any, p: float, seed: Any) -> Any:
    """The mask of keep_mask by torch's ops, for a tensor x and a tensor of one seed. 32-bit words are in int64, where a product
    of two wraps to the right 64 bits."""
    torch = sys.modules["torch"]
    i, j = (torch.arange(n, device=x.device) for n in (math.prod(x.shape[:-1]), x.shape[-1]))
    i = i[:, None]
    a, b = i // TILE * HALF + i % HALF, j // TILE * (HALF // 2) + j % HALF // 2
    a, b = torch.broadcast_tensors(a, b)
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    low, high = seed.reshape(()) & WORD, seed.reshape(()) >> 32 & WORD
    for n in range(ROUNDS):
        first, second = ((k + n * step) & WORD for k, step in zip((low, high), STEPS))
        y, z = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (z >> 32 & WORD) ^ b ^ first, z & WORD, (y >> 32 & WORD) ^ d ^ second, y & WORD
    below = torch.where(j % TILE < HALF, a, c), torch.where(j % TILE < HALF, b, d)
    word = torch.where(i % TILE < HALF, *below)
    return ((word >> 16 * (j % 2) & 0xFFFF) >= drop_threshold(p)).reshape(x.shape)
