"""Linear attention: the recurrences, in NumPy, token by token.

A head has a state S (Dk, Dv). For a token with query q, key k and value v,

    S = exp(decay) * S                decay <= 0: one number, or one per row of S; 0 if there is none
    v = beta * (v - S^T k)            the delta rule only
    S = S + k v^T
    o = scale * S^T q

Every function takes host arrays of any float dtype and any framework that `arrays.describe` knows, does not check their shapes,
and returns float64. With `low=True` it computes with the precision of the input dtype: in float32, with the operands of tensor
cores (S, the delta rule's v, feature maps, weights) and the result rounded to v's dtype, or beyond its range to as many digits.
The error of that is what `tolerance` allows a kernel.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from tiles.calls.schema import ORDER
from tiles.testing.compare import host

EPSILON = 1e-10  # added to the normalizer of `linear`, as in flash-linear-attention
HEDGEHOG_FLOOR = 1e-6  # the smallest feature, and what is added to the normalizer, as in ThunderKittens


def linear_step(
    state: Any, q: Any, k: Any, v: Any, *, decay: Any = None, beta: Any = None, scale: float | None = None, low: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(o, state after the token) of one token.

    state: (B, H, Dk, Dv); q, k: (B, Hk, Dk), Hk dividing H; v, o: (B, H, Dv); decay: None, (H,), (B, H) or (B, H, Dk);
    beta: None or (B, H).
    """
    if decay is not None and host(decay).ndim > 1:
        decay = host(decay)[:, None]
    beta = None if beta is None else host(beta)[:, None]
    q, k, v = (host(x)[:, None] for x in (q, k, v))
    out, state = linear(q, k, v, decay=decay, beta=beta, scale=scale, initial_state=state, low=low)
    return out[:, 0], state


def linear(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    beta: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    low: bool = False,
) -> tuple[np.ndarray, Any]:
    """(o, final state) of whole sequences, for all members of the family that have no feature map.

    q, k: (B, S, Hk, Dk); v, o: (B, S, H, Dv); Hk divides H, and value head h reads key head h // (H // Hk). decay: None,
    (H,), (B, S, H) or (B, S, H, Dk); beta: None or (B, S, H). S and H are swapped for layout="bhsd". State: (B, H, Dk, Dv).
    scale: Dk^-1/2 by default. cu_seqlens (N + 1,): B is 1, sequence n is the tokens cu_seqlens[n] to cu_seqlens[n + 1], and
    states are (N, H, Dk, Dv).

    normalize: o is divided by scale * z . q + 1e-10, where z is the sum of the keys, decayed as S is; both states are then
    pairs (S, z), z (B, H, Dk).
    """
    options = decay, beta, scale, initial_state, normalize, cu_seqlens, np.argsort(ORDER[layout])
    return _linear(q, k, host(v), *options, _rounding_to(host(v).dtype, low), np.float32 if low else np.float64)


def _linear(q, k, v, decay, beta, scale, initial_state, normalize, cu_seqlens, axes, round_operand, real):
    """`linear`. axes: the axes B, S, H and D of the arrays. round_operand: a function that rounds the operands of tensor cores,
    and the result. real: the dtype of everything else."""
    q, k, values = (host(x).transpose(axes).astype(real) for x in (q, k, v))
    scale = real(k.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat(values.shape[2] // k.shape[2], axis=2) for x in (q, k))
    decay, beta = (None if x is None else _expand_to_tokens(x, axes, values.shape[:3]).astype(real) for x in (decay, beta))
    if normalize:  # z is one more column of S, for a value that is always 1
        values = np.concatenate([values, np.ones_like(values[..., :1])], -1)

    sequences = [slice(None)] if cu_seqlens is None else [slice(*ends) for ends in pairwise(host(cu_seqlens))]
    shape = len(values) if cu_seqlens is None else len(sequences), values.shape[2], k.shape[-1], values.shape[-1]
    state = np.zeros(shape, real) if initial_state is None else _append_z(initial_state).astype(real)
    out = np.zeros(values.shape, real)
    for n, tokens in enumerate(sequences):
        rows = slice(None) if cu_seqlens is None else slice(n, n + 1)
        inputs = [None if x is None else x[:, tokens] for x in (q, k, values, decay, beta)]
        out[:, tokens], state[rows] = _scan_tokens(inputs, state[rows], round_operand)
    out *= scale
    if not normalize:
        return round_operand(out).transpose(axes), state
    return round_operand(out[..., :-1] / (out[..., -1:] + EPSILON)).transpose(axes), (state[..., :-1], state[..., -1])


def _scan_tokens(inputs, S, round_operand):
    """(S^T q of each token, S after the last one). inputs: q, k (B, S, H, Dk), v (B, S, H, Dv), decay None or (B, S, H, 1 or
    Dk), and beta None or (B, S, H, 1); S (B, H, Dk, Dv)."""
    q, k, v, decay, beta = inputs
    out = np.empty_like(v)
    for t in range(v.shape[1]):
        value = v[:, t]
        if decay is not None:
            S = np.exp(decay[:, t])[..., None] * S
        if beta is not None:
            value = round_operand(beta[:, t] * (value - _multiply_state(S, k[:, t], round_operand)))
        S = S + k[:, t, :, :, None] * value[:, :, None]
        out[:, t] = _multiply_state(S, q[:, t], round_operand)
    return out, S


def mamba2(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, np.inf),
    initial_states: Any = None,
    cu_seqlens: Any = None,
    low: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """(y, final state) of Mamba-2's SSD, with mamba_ssm's names and layouts; its state is S transposed, (B, H, P, N).

        dt = clip(softplus(dt + dt_bias), dt_limit)         softplus with dt_softplus=True only
        y  = linear(q=C, k=B, v=dt * x, decay=dt * A, scale=1) + D * x
        y  = y * silu(z)                                    with z only

    x, z, y: (B, S, H, P); dt: (B, S, H); A, dt_bias: (H,); B, C: (B, S, G, N); D: (H,) or (H, P).
    """
    x, real = host(x), np.float32 if low else np.float64
    round_operand = _rounding_to(x.dtype, low)
    values, dt = x.astype(real), host(dt).astype(real)
    if dt_bias is not None:
        dt = dt + host(dt_bias).astype(real)
    if dt_softplus:
        dt = np.logaddexp(dt, real(0))
    dt = dt.clip(*map(real, dt_limit))
    decay = dt * host(A).astype(real)
    state = None if initial_states is None else host(initial_states).swapaxes(2, 3)
    scaled = round_operand(dt[..., None] * values)
    y, state = _linear(C, B, scaled, decay, None, 1, state, False, cu_seqlens, range(4), round_operand, real)
    if D is not None:
        D = host(D).astype(real)
        y = y + (D if D.ndim == 2 else D[:, None]) * values
    if z is not None:
        z = host(z).astype(real)
        y = y * z / (1 + np.exp(-z))
    return round_operand(y), state.swapaxes(2, 3)


def based(
    q: Any, k: Any, v: Any, *, scale: float | None = None, normalize: bool = True, layout: str = "bshd", low: bool = False
) -> tuple[np.ndarray, Any]:
    """(o, final state) with the weights 1 + s + s^2 / 2, the Taylor series of exp to the second order; s = scale * q . k, where
    scale is Dk^-1/2 by default.

    That is `linear` with the 1 + Dk + Dk^2 features (1, x, x x^T / sqrt(2)), in this order, of x = sqrt(scale) * q and
    sqrt(scale) * k; a negative scale changes the sign of q. normalize: o is divided by the sum of the weights, and the state is
    a pair (S, z), as in `linear`.
    """
    round_operand = _rounding_to(host(v).dtype, low)

    def features(x, sign=1):
        x = sign * host(x).astype(np.float32 if low else np.float64)
        x = x * (x.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
        squares = (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
        return round_operand(np.concatenate([np.ones_like(x[..., :1]), x, squares / 2**0.5], -1))

    sign = -1 if scale is not None and scale < 0 else 1
    return linear(features(q, sign), features(k), v, scale=1, normalize=normalize, layout=layout, low=low)


def hedgehog(
    q: Any,
    k: Any,
    v: Any,
    q_map: Any,
    k_map: Any,
    alphas: Any,
    betas: Any,
    *,
    window: int = 64,
    layout: str = "bshd",
    low: bool = False,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """(o, (S, z)): softmax attention to the newest keys, linear attention with learned features to all older ones. For head h,

        w[i, j] = betas[h] * exp((q[i] . k[j] - m[i]) / sqrt(D))    j <= i in the `window`-block of i, or the one before it
        w[i, j] = alphas[h] * f(q[i], q_map[h]) . f(k[j], k_map[h]) j in older blocks
        o[i]    = sum_j w[i, j] v[j] / (sum_j w[i, j] + 1e-6)
        f(x, M) = max((softmax(x M), softmax(-x M)), 1e-6)          2 F features

    where m[i] is the largest q[i] . k[j] of the first line. S (B, H, 2 F, Dv) and z (B, H, 2 F) are the sums of f(k) v^T and
    of f(k) over the keys in the blocks that are older ones for the next token. q, k: (B, S, H, D); v: (B, S, H, Dv);
    maps: (H, D, F); alphas, betas: (H,). Value heads may share key heads and their maps.
    """
    v, axes, real = host(v), np.argsort(ORDER[layout]), np.float32 if low else np.float64
    round_operand = _rounding_to(v.dtype, low)
    q, k, values = (host(x).transpose(axes).astype(real) for x in (q, k, v))
    alphas, betas = (host(x).astype(real)[:, None] for x in (alphas, betas))
    features = [_hedgehog_features(x, host(M).astype(real), round_operand) for x, M in ((q, q_map), (k, k_map))]
    group = values.shape[2] // q.shape[2]
    q, k, q_features, k_features = (x.repeat(group, 2) for x in (q, k, *features))
    values = np.concatenate([values, np.ones_like(values[..., :1])], -1)  # the last column of S is z
    S = np.zeros((len(values), values.shape[2], k_features.shape[-1], values.shape[-1]), real)
    out = np.empty(values.shape, real)
    for t in range(values.shape[1] + 1):
        if t % window == 0 and t >= 2 * window:
            block = slice(t - 2 * window, t - window)
            S = S + np.einsum("bshf,bshd->bhfd", k_features[:, block], values[:, block])
        if t < values.shape[1]:
            visible = slice(max(0, t // window - 1) * window, t + 1)
            s = np.einsum("bhd,bshd->bhs", q[:, t], k[:, visible])
            weights = betas * np.exp((s - s.max(-1, keepdims=True)) / real(np.sqrt(q.shape[-1])))
            window_sum = np.einsum("bhs,bshd->bhd", round_operand(weights), values[:, visible])
            out[:, t] = window_sum + alphas * _multiply_state(S, q_features[:, t], round_operand)
    o = out[..., :-1] / (out[..., -1:] + real(HEDGEHOG_FLOOR))
    return round_operand(o).transpose(axes), (S[..., :-1], S[..., -1])


def _hedgehog_features(x, M, round_operand):
    """f(x, M) of `hedgehog`: x (B, S, H, D), M (H, D, F) -> (B, S, H, 2 F)."""
    y = np.einsum("bshd,hdf->bshf", x, M)
    halves = [np.exp(s - s.max(-1, keepdims=True)) for s in (y, -y)]
    features = np.concatenate([half / half.sum(-1, keepdims=True) for half in halves], -1)
    return round_operand(features.clip(x.dtype.type(HEDGEHOG_FLOOR)))


def _multiply_state(S, x, round_operand):
    """S^T x: S (B, H, Dk, Dv), x (B, H, Dk)."""
    return (x[:, :, None] @ round_operand(S))[:, :, 0]


def _expand_to_tokens(x, axes, tokens):
    """A decay or beta as (B, S, H, 1 or Dk), from (H,), or from (B, S, H) or (B, S, H, Dk) in the caller's layout."""
    x = host(x)
    if x.ndim == 1:
        return np.broadcast_to(x[:, None], (*tokens, 1))
    return (x if x.ndim == 4 else x[..., None]).transpose(axes)


def _append_z(state):
    """A state S, or of a pair (S, z) the state S with z as one more column."""
    if not isinstance(state, tuple):
        return host(state)
    S, z = map(host, state)
    return np.concatenate([S, z[..., None]], -1)


def _rounding_to(dtype, low):
    """A function that rounds float32 numbers to dtype, if `low`, or returns them unchanged. Beyond the range of the dtype it
    rounds to as many digits."""

    def round_operand(x):
        with np.errstate(over="ignore"):
            rounded = x.astype(dtype).astype(np.float32)
        if not (overflows := np.isinf(rounded) & np.isfinite(x)).any():
            return rounded
        digits, exponent = np.frexp(x)
        return np.where(overflows, np.ldexp(digits.astype(dtype).astype(np.float32), exponent), rounded)

    return round_operand if low else lambda x: x
