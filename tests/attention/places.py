"""Where a test of attention runs: the interpreter with NumPy's arrays, the card with torch's."""

import os

from hypothesis import settings

from tiles import bf16
from tiles.testing.backends import to_numpy, to_torch

BF16 = bf16.np
# Random problems on the card, most of whose time goes to compiling: as many as TILES_EXAMPLES says.
RANDOMLY = settings(max_examples=int(os.environ.get("TILES_EXAMPLES", 25)), deadline=None, print_blob=True)


class OnInterpreter:
    """NumPy arrays as they are."""

    def put(self, x):
        return x

    get = put


class OnCard:
    """torch tensors."""

    put, get = staticmethod(to_torch), staticmethod(to_numpy)
