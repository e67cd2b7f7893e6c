"""Inputs, comparisons and tests of the delta rule that its test files share."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from attention import reference
from attention.plans.delta import delta_scans
from attention.public import delta_rules as module
from attention.public.delta_rules import delta_rule

BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
STATE = 2.0**-8  # tolerance of a state, relative to its largest element and times `factor`: operands of products are bf16


def inputs(batch, length, heads, key_dim, value_dim, dtype=BF16, key_heads=None, gate=0.1, seed=0):
    """q, k (of length 1), v, beta, and decays with a mean of -gate."""
    draw = np.random.default_rng(seed)
    q, k = (draw.standard_normal((batch, length, key_heads or heads, key_dim), np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = draw.standard_normal((batch, length, heads, value_dim), np.float32)
    beta = draw.random((batch, length, heads), np.float32)
    decay = -gate * draw.standard_exponential((batch, length, heads), np.float32)
    return *(x.astype(dtype) for x in (q, k, v)), beta, decay


def agree(place, q, k, v, beta, decay, factor=2, **options):
    """Call delta_rule with a poisoned out, and compare outputs and final state with the reference."""
    put = lambda x: place.put(x) if isinstance(x, np.ndarray) else x
    args = {name: put(x) for name, x in options.items()}
    out = place.put(np.full(v.shape, np.nan, v.dtype))
    actual, state = delta_rule(*map(put, (q, k, v, beta)), decay=put(decay), return_state=True, out=out, **args)
    assert actual is out
    options = {name: x for name, x in options.items() if name != "family"} | {"beta": beta, "decay": decay}
    (ref, last), (low, _) = (reference.linear(q, k, v, low=low, **options) for low in (False, True))
    reference.assert_close(place.get(out), ref, low, factor=factor)
    assert np.abs(place.get(state) - last).max(initial=0) <= factor * STATE * np.abs(last).max(initial=1e-30)
    return place.get(out), place.get(state)


class DeltaRuleTests:
    """Tests for decays of tokens and for decays of channels. inputs: a function like `inputs` above. BETWEEN_PARTS: how far the
    outputs of a sequence in two calls may be from those of one call."""

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
        agree(place, *self.inputs(1, 130, 1, key_dim, value_dim, dtype))

    @pytest.mark.parametrize("processors", [1, 1000], ids=["two consumers", "one"])
    @pytest.mark.parametrize(("key_dim", "dtype"), [(64, FP16), (128, BF16)])
    def test_consumers_of_a_block(self, place, monkeypatch, nothing_known, processors, key_dim, dtype):
        """One if there are SMs enough for each 64 columns, two otherwise."""
        monkeypatch.setattr(delta_scans, "machine", lambda _: SimpleNamespace(processors=processors))
        for serves in "serves_walk", "serves_channel_walk":
            monkeypatch.setattr(module, serves, lambda _: False)
        agree(place, *self.inputs(1, 189, 1, key_dim, 128, dtype))

    @pytest.mark.parametrize(("key_dim", "value_dim", "dtype"), [(128, 192, BF16), (80, 64, FP16)])
    def test_a_walk(self, place, monkeypatch, nothing_known, key_dim, value_dim, dtype):
        """All that does not depend on the state by a launch before, and a block for each 64 columns; twice the same bits."""
        for serves in "serves_walk", "serves_channel_walk":
            monkeypatch.setattr(module, serves, lambda _: True)
        inputs = self.inputs(1, 130, 2, key_dim, value_dim, dtype, key_heads=1)
        start = 0.3 * np.random.default_rng(1).standard_normal((1, 2, key_dim, value_dim), np.float32)
        once, twice = (agree(place, *inputs, initial_state=start) for _ in range(2))
        assert all((a == b).all() for a, b in zip(once, twice, strict=True))

    def test_shared_keys(self, place):
        agree(place, *self.inputs(1, 70, 4, 64, 64, key_heads=2))

    @pytest.mark.parametrize(("batch", "length", "heads"), [(2, 64, 2), (1, 130, 1)])
    def test_an_initial_state(self, place, batch, length, heads):
        start = 0.3 * np.random.default_rng(1).standard_normal((batch, heads, 128, 128), np.float32)
        agree(place, *self.inputs(batch, length, heads, 128, 128), initial_state=start)

    def test_a_sequence_in_two_calls(self, place):
        """The final state of the first is the initial state of the second."""
        q, k, v, beta, decay = self.inputs(1, 150, 1, 64, 128)
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
        outputs = delta_rule(*turned[:4], decay=turned[4], scale=0.7, layout="bhsd")
        assert (place.get(outputs).swapaxes(1, 2) == out).all()
