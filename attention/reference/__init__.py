"""Reference implementations in NumPy, and the tolerance that kernels are tested with.

softmax.py has attention.forward's formula, gradients.py attention.backward's, linear.py, linear_gradients.py and
mamba2_gradients.py the recurrences of linear attention, short_conv.py the convolution before it, gated_norm.py the norm behind
it. `tolerance` is how far a result may be off (tiles.testing)."""

from tiles.testing.compare import assert_close, tolerance

from .based_gradients import based_backward
from .gated_norm import gated_rms_norm, gated_rms_norm_backward
from .gradients import backward, backward_low
from .hedgehog_gradients import hedgehog_backward
from .linear import based, hedgehog, linear, linear_step, mamba2
from .linear_gradients import linear_backward
from .mamba2_gradients import mamba2_backward
from .short_conv import short_conv, short_conv_backward
from .softmax import forward, forward_low

__all__ = [
    "assert_close", "backward", "backward_low", "based", "based_backward", "forward", "forward_low", "gated_rms_norm",
    "gated_rms_norm_backward", "hedgehog", "hedgehog_backward", "linear", "linear_backward", "linear_step", "mamba2",
    "mamba2_backward", "short_conv", "short_conv_backward", "tolerance",
]  # fmt: skip
