"""The dropout mask: a function of the seed and of (b, h, i, j) alone, the same in kernels and in NumPy."""

from typing import Any

import numpy as np

from tiles.philox import LEVELS, halves


def drop_threshold(dropout: float) -> int:
    """How many of the 65536 values of a 16-bit draw drop a weight: `dropout` x 65536, rounded, and at most 65535. ValueError:
    dropout is not in [0, 1)."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: must be at least 0 and below 1: {dropout=}")
    return min(LEVELS - 1, round(dropout * LEVELS))


def dropout_mask(seed: int, dropout: float, b: Any, h: Any, i: Any, j: Any) -> np.ndarray:
    """True where attention.forward(.., dropout=dropout, seed=seed) keeps the weight of key j for query i of head h of batch (or
    sequence) b. The indices are integers or arrays, which broadcast; i and j count from the sequence's start.

    A weight is dropped if 16 bits of Philox4x32-10 (tiles/philox.py) are below 65536 dropout."""
    return halves(seed, b, h, i, j) >= drop_threshold(dropout)
