"""The formulas, in NumPy, and the rule by which a kernel is judged against them.

`softmax` is attention.forward's, `gradients` attention.backward's, `linear` the recurrences of linear attention, `tolerance`
what a result may be off: the rule of tiles.testing.
"""

from tiles.testing.compare import assert_close, tolerance

from .gradients import backward, backward_low
from .linear import based, hedgehog, linear, linear_step, mamba2
from .softmax import forward, forward_low

__all__ = [
    "assert_close", "backward", "backward_low", "based", "forward", "forward_low", "hedgehog", "linear", "linear_step",
    "mamba2", "tolerance",
]  # fmt: skip
