"""An array where a flag, a number, a word or a stream belongs: the error names the option, before any launch."""

import ml_dtypes
import numpy as np
import pytest

import attention

X, SUMS = np.zeros((1, 8, 2, 64), ml_dtypes.bfloat16), np.ones((1, 8, 2), np.float32)
CALLS = {
    "forward": ((X, X, X), {}, "causal layout family return_lse stream scale softcap dropout window blocks"),
    "backward": (
        (X, X, X, X, X, SUMS.swapaxes(1, 2).copy()),
        {},
        "causal layout family stream scale softcap dropout deterministic accumulate",
    ),
    "decode": (
        (X[:, :1], X, X),
        {"lengths": np.full(1, 8, np.int32)},
        "causal layout family return_lse stream scale softcap splits interleaved",
    ),
    "linear": ((X, X, X), {}, "layout family stream scale normalize memory return_state"),
    "delta_rule": ((X, X, X), {"beta": SUMS}, "layout family stream scale return_state qk_l2norm"),
    "short_conv": ((X[:, :, 0], np.ones((64, 4), np.float32)), {}, "stream"),
}


@pytest.mark.parametrize(("function", "option"), [(name, option) for name in CALLS for option in CALLS[name][2].split()])
def test_the_error_names_it(function, option):
    arrays, arguments, _ = CALLS[function]
    with pytest.raises((TypeError, ValueError), match=f"^{option}: "):
        getattr(attention, function)(*arrays, **arguments, **{option: np.ones(2)})
