"""A table of the members of linear attention, for tests of all of them."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import attention
from attention import reference

BF16, FP16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
HEADS, KEY_HEADS = 2, 1
NOTHING: Mapping[str, Any] = MappingProxyType({})


def draw_model_decays(shape, extremes=True, seed=0):
    """Decays as Kimi Linear's gate gives them, -5 sigmoid(x) a token and channel, and a channel that keeps all. extremes: and
    one that forgets at once, and tokens before which nothing counts."""
    rng = np.random.default_rng(seed)
    decay = (-5 / (1 + np.exp(-rng.standard_normal(shape)))).astype(F32)
    decay[..., 5] = 0
    if extremes:
        decay[..., 3], decay[:, 20], decay[:, [37, 90]] = -1e4, -1e4, -np.inf
    return decay


class Member(NamedTuple):
    """call: the function, which takes arrays by name. formula: its reference. tokens(rng, batch, length): arrays with an axis
    of tokens, (B, S, ...). fixed(): other arrays. start, keep: its names for initial_state and return_state."""

    call: Callable
    formula: Callable
    tokens: Callable
    fixed: Callable = dict
    options: Mapping[str, Any] = NOTHING
    start: str = "initial_state"
    keep: str = "return_state"

    def inputs(self, length, batch=1, seed=0):
        """(arrays of tokens, other arrays)"""
        return self.tokens(np.random.default_rng(seed), batch, length), self.fixed()

    def run(self, arrays, state=None, **more):
        """The result is (out, state), with None for members without states."""
        args = {self.start: state, self.keep: True} if self.start else {}
        actual = self.call(**arrays, **self.options, **args, **more)
        return actual if self.start else (actual, None)

    def assert_close(self, out, arrays):
        """Compare out with the reference."""
        ref, low = (self.formula(**arrays, **self.options, low=low)[0] for low in (False, True))
        reference.assert_close(out, ref, low)


def _qkv(rng, batch, length, key_dim=64, value_dim=48):
    q, k = rng.standard_normal((2, batch, length, KEY_HEADS, key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((batch, length, HEADS, value_dim))
    return {name: x.astype(BF16) for name, x in dict(q=q, k=k, v=v).items()}


def _with(decay="", beta=False, gate=0.1):
    """A function that draws queries, keys and values, and decays of tokens or channels."""

    def tokens(rng, batch, length):
        result, shape = _qkv(rng, batch, length), (batch, length, HEADS)
        if decay:
            result["decay"] = -gate * rng.standard_exponential((*shape, 64) if decay == "channel" else shape, F32)
        if beta:
            result["beta"] = rng.random(shape, F32)
        return result

    return tokens


def _positive(rng, batch, length):
    return {name: abs(x) if name in "qk" else x for name, x in _qkv(rng, batch, length).items()}


def _mamba2(rng, batch, length):
    x = rng.standard_normal((batch, length, HEADS, 48)).astype(BF16)
    B, C = (rng.standard_normal((2, batch, length, KEY_HEADS, 64)) / 4).astype(BF16)
    return dict(x=x, dt=rng.uniform(0, 0.5, (batch, length, HEADS)).astype(F32), B=B, C=C, z=(x * 2).astype(BF16))


def _decay_of_heads():
    return {"decay": np.array([-0.02, -0.5], F32)}


def _maps():
    rng = np.random.default_rng(1)
    maps = {name: (rng.standard_normal((KEY_HEADS, 64, 64)) / 8).astype(BF16) for name in ("q_map", "k_map")}
    return maps | {name: rng.random(HEADS, F32) + 0.5 for name in ("alphas", "betas")}


def _with_decay(decay, **arrays):
    return reference.linear(decay=decay, **arrays)


def _of_based(rng, batch, length):
    return _qkv(rng, batch, length, key_dim=16)


linear, delta_rule = attention.linear, attention.delta_rule
MEMBERS = {
    "linear": Member(linear, reference.linear, _with()),
    "linear, divided": Member(linear, reference.linear, _positive, options={"normalize": True}),
    "decays of heads": Member(linear, reference.linear, _with(), _decay_of_heads),
    "simple GLA": Member(linear, reference.linear, _with("token")),
    "GLA": Member(attention.gla, reference.linear, _with("channel", gate=0.02)),
    "retention": Member(
        attention.retention, functools.partial(_with_decay, np.log(1 - 2.0 ** (-5 - np.arange(HEADS)))), _with()
    ),
    "lightning": Member(
        functools.partial(attention.lightning, layer=3, layers=12),
        functools.partial(_with_decay, -8 / HEADS * (1 - 3 / 12) * np.arange(HEADS)),
        _with(),
    ),
    "Mamba-2": Member(
        attention.mamba2,
        reference.mamba2,
        _mamba2,
        lambda: {"A": np.array([-0.3, -1.5], F32), "D": np.array([1, 0.5], F32)},
        start="initial_states",
        keep="return_final_states",
    ),
    "based": Member(attention.based, reference.based, _of_based),
    "based, sums": Member(attention.based, reference.based, _of_based, options={"normalize": False}),
    "hedgehog": Member(attention.hedgehog, reference.hedgehog, _qkv, _maps, start="", keep=""),
    "delta rule": Member(delta_rule, reference.linear, _with(beta=True)),
    "delta rule, decays of heads": Member(delta_rule, reference.linear, _with(beta=True), _decay_of_heads),
    "gated delta rule": Member(delta_rule, reference.linear, _with("token", True)),
    "KDA": Member(delta_rule, reference.linear, _with("channel", True, gate=0.02)),
}
