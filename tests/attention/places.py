"""Where a test of attention runs: in the interpreter with NumPy arrays, or on the GPU with torch tensors."""

import os

import pytest
from hypothesis import Phase, settings

from tiles import bf16
from tiles.testing.backends import to_numpy, to_torch

BF16 = bf16.np
EXAMPLES = int(os.environ.get("TILES_EXAMPLES", 25))
SHARES = max(5, min(EXAMPLES // 500, os.cpu_count() or 1))


def random_on_the_card(test):
    """EXAMPLES random problems of a `@given` test, on the card.

    Most of their time goes to compiling, so SHARES tests of as many problems each are made of it, which processes divide.
    A problem that fails is shown as it was drawn: to look for a smaller one would compile for minutes.
    """
    phases = [Phase.explicit, Phase.reuse, Phase.generate]
    drawn = settings(max_examples=-(-EXAMPLES // SHARES), deadline=None, print_blob=True, phases=phases)(test)
    return pytest.mark.gpu(pytest.mark.usefixtures("share")(drawn))


class OnInterpreter:
    """The interpreter, with NumPy arrays."""

    def put(self, x):
        return x

    get = put


class OnCard:
    """The GPU, with torch tensors."""

    put, get = staticmethod(to_torch), staticmethod(to_numpy)
