"""Where a test of attention runs: the interpreter with NumPy's arrays, the card with torch's."""

from tiles import bf16
from tiles.testing.backends import to_numpy, to_torch

BF16 = bf16.np


class OnInterpreter:
    """NumPy arrays as they are."""

    def put(self, x):
        return x

    get = put


class OnCard:
    """torch tensors."""

    put, get = staticmethod(to_torch), staticmethod(to_numpy)
