"""What the tests of the delta rule have in common, whatever its decays."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from attention import reference
from attention.recurrent import delta_rule as module
from attention.recurrent.delta_rule import delta_rule

BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
STATE = 2.0**-8  # times the factor, of the greatest element of a state: the products' operands are bf16


def inputs(batch, length, heads, key_dim, value_dim, dtype=BF16, key_heads=None, gate=0.1, seed=0):
    """q, k (of length 1), v, beta, and decays of -gate on the mean."""
    draw = np.random.default_rng(seed)
    q, k = (draw.standard_normal((batch, length, key_heads or heads, key_dim), np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = draw.standard_normal((batch, length, heads, value_dim), np.float32)
    beta = draw.random((batch, length, heads), np.float32)
    decay = -gate * draw.standard_exponential((batch, length, heads), np.float32)
    return *(x.astype(dtype) for x in (q, k, v)), beta, decay


def agree(place, q, k, v, beta, decay, factor=2, **options):
    """Run into a poisoned output, and judge output and state."""
    put = lambda x: place.put(x) if isinstance(x, np.ndarray) else x
    given = {name: put(x) for name, x in options.items()}
    out = place.put(np.full(v.shape, np.nan, v.dtype))
    found, state = delta_rule(*map(put, (q, k, v, beta)), decay=put(decay), return_state=True, out=out, **given)
    assert found is out
    options |= {"beta": beta, "decay": decay}
    (ref, last), (low, _) = (reference.linear(q, k, v, low=low, **options) for low in (False, True))
    reference.assert_close(place.get(out), ref, low, factor=factor)
    assert np.abs(place.get(state) - last).max(initial=0) <= factor * STATE * np.abs(last).max(initial=1e-30)
    return place.get(out), place.get(state)


class Sequences:
    """Tests of sequences. inputs: makes them, as `inputs` does; BETWEEN_PARTS: how far one in parts may be from the whole."""

    BETWEEN_PARTS = 2**-7
    inputs = staticmethod(inputs)

    @pytest.mark.parametrize(
        ("key_dim", "value_dim", "dtype"),
        [
            (128, 128, BF16),
            (64, 128, FP16),
            (128, 64, BF16),
            (128, 128, FP16),
            (16, 16, BF16),
            (80, 208, FP16),
            (48, 256, BF16),
        ],
    )
    def test_sizes_of_keys_and_values(self, place, key_dim, value_dim, dtype):
        agree(place, *self.inputs(1, 150, 2, key_dim, value_dim, dtype))

    @pytest.mark.parametrize("processors", [1, 1000], ids=["two consumers", "one"])
    @pytest.mark.parametrize(("key_dim", "dtype"), [(64, FP16), (128, BF16)])
    def test_consumers_of_a_block(self, place, monkeypatch, nothing_known, processors, key_dim, dtype):
        """Whatever the card has room for."""
        monkeypatch.setattr(module, "machine", lambda _: SimpleNamespace(processors=processors))
        agree(place, *self.inputs(1, 189, 2, key_dim, 128, dtype))

    def test_values_that_share_keys(self, place):
        agree(place, *self.inputs(1, 130, 4, 64, 64, key_heads=2))

    @pytest.mark.parametrize(("batch", "length", "heads"), [(2, 64, 2), (1, 70, 2), (2, 200, 1)])
    def test_a_state_to_start_with(self, place, batch, length, heads):
        start = 0.3 * np.random.default_rng(1).standard_normal((batch, heads, 128, 128), np.float32)
        agree(place, *self.inputs(batch, length, heads, 128, 128), initial_state=start)

    def test_a_sequence_in_parts(self, place):
        """The state after one part is where the next begins."""
        q, k, v, beta, decay = self.inputs(1, 200, 2, 64, 128)
        whole, last = agree(place, q, k, v, beta, decay)
        first, state = agree(place, *(x[:, :90] for x in (q, k, v, beta, decay)))
        second, end = agree(place, *(x[:, 90:] for x in (q, k, v, beta, decay)), initial_state=state)
        both = np.concatenate([first, second], axis=1)
        np.testing.assert_allclose(
            both.astype(float), whole.astype(float), atol=self.BETWEEN_PARTS * np.abs(whole.astype(float)).max()
        )
        np.testing.assert_allclose(end, last, atol=2 * STATE * np.abs(last).max())

    def test_scale_and_layouts(self, place):
        q, k, v, beta, decay = self.inputs(2, 70, 3, 64, 64)
        out, _ = agree(place, q, k, v, beta, decay, scale=0.7)
        turned = [place.put(x.swapaxes(1, 2).copy()) for x in (q, k, v, beta, decay)]
        got = delta_rule(*turned[:4], decay=turned[4], scale=0.7, layout="bhsd")
        assert (place.get(got).swapaxes(1, 2) == out).all()
