"""What dropout drops: a function of the seed and of the place alone, the same in kernels and in NumPy."""

from typing import Any

import numpy as np

from tiles.philox import LEVELS, halves


def share_of(dropout: float) -> int:
    """How many of 65536 equally likely draws drop a weight: `dropout` to the nearest, but never all. ValueError: it is none."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: must be at least 0 and below 1, got {dropout}")
    return min(LEVELS - 1, round(dropout * LEVELS))


def dropout_mask(seed: int, dropout: float, b: Any, h: Any, i: Any, j: Any) -> np.ndarray:
    """True where attention.forward(.., dropout=dropout, seed=seed) keeps the weight of key j for query i of head h of batch (or
    sequence) b. The indices are integers or arrays, which broadcast; i and j count from the sequence's start.

    A weight is dropped if 16 bits of Philox4x32-10 (tiles/philox.py) are below 65536 dropout."""
    return halves(seed, b, h, i, j) >= share_of(dropout)
