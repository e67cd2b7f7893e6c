"""The short convolution and its gradients, in NumPy. Of a sequence with its initial window before it,

    z_t = bias + sum_i weight[:, W - 1 - i] x_(t-i)        y_t = act(z_t)

The gradients are those of a sum over shifted rows: see short_conv_backward."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from tiles.testing.compare import host

from .linear import _rounding_to


def short_conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    low: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """(y, final window) of attention.short_conv, in float64; with `low` weights, z and y are rounded to x's dtype, and sums are
    float32."""
    real, round_operand = np.float32 if low else np.float64, _rounding_to(host(x).dtype, low)
    weight, bias = round_operand(host(weight).astype(real)), 0 if bias is None else host(bias).astype(real)
    width, rows = weight.shape[1], host(x).astype(real)
    state, out = _initial_windows(rows, width, initial_state, cu_seqlens), np.zeros(rows.shape, real)
    for n, batch, tokens in _sequences(rows, cu_seqlens):
        padded = np.concatenate([state[n].T, rows[batch, tokens]])
        z = round_operand(_convolve(padded, weight) + bias)
        out[batch, tokens] = z if activation is None else round_operand(z / (1 + np.exp(-z)))
        state[n] = padded[len(padded) - width + 1 :].T
    return out, state


def short_conv_backward(
    dout: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    initial_state: Any = None,
    dstate: Any = None,
    cu_seqlens: Any = None,
    low: bool = False,
) -> dict[str, np.ndarray]:
    """{"dx": , "dweight": , "dbias": , "dinitial_state": } of attention.short_conv, in float64; with `low` weights, z, dz and
    dx are rounded to x's dtype, and sums are float32."""
    real, round_operand = np.float32 if low else np.float64, _rounding_to(host(x).dtype, low)
    weight, bias = round_operand(host(weight).astype(real)), 0 if bias is None else host(bias).astype(real)
    width, (rows, dy) = weight.shape[1], (host(a).astype(real) for a in (x, dout))
    state = _initial_windows(rows, width, initial_state, cu_seqlens)
    gradients = {"dx": np.zeros_like(rows), "dweight": np.zeros_like(weight), "dbias": np.zeros(len(weight), real)}
    gradients["dinitial_state"] = np.zeros_like(state)
    for n, batch, tokens in _sequences(rows, cu_seqlens):
        padded, dz = np.concatenate([state[n].T, rows[batch, tokens]]), dy[batch, tokens]
        if activation is not None:
            z = round_operand(_convolve(padded, weight) + bias)
            s = 1 / (1 + np.exp(-z))
            dz = round_operand(dz * (s + z * s * (1 - s)))
        dpadded = np.zeros_like(padded)
        for i in range(width):
            dpadded[i : i + len(dz)] += dz * weight[:, i]
            gradients["dweight"][:, i] += (dz * padded[i : i + len(dz)]).sum(0)
        if dstate is not None:
            dpadded[len(padded) - width + 1 :] += host(dstate)[n].T
        gradients["dbias"] += dz.sum(0)
        gradients["dx"][batch, tokens], gradients["dinitial_state"][n] = (
            round_operand(dpadded[width - 1 :]),
            dpadded[: width - 1].T,
        )
    return gradients


def _convolve(padded: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Sums of shifted rows, of tokens behind a window."""
    width = weight.shape[1]
    return sum((padded[i : len(padded) - width + 1 + i] * weight[:, i] for i in range(width)), np.zeros((), padded.dtype))


def _initial_windows(rows: np.ndarray, width: int, initial_state: Any, cu_seqlens: Any) -> np.ndarray:
    """The windows before the sequences: copies, zeros if there are none."""
    count = len(rows) if cu_seqlens is None else len(host(cu_seqlens)) - 1
    start = np.zeros((count, rows.shape[2], width - 1), rows.dtype)
    return start if initial_state is None else host(initial_state).astype(rows.dtype)


def _sequences(rows: np.ndarray, cu_seqlens: Any) -> Iterator[tuple[int, int, slice]]:
    """(number, batch, tokens) of each sequence."""
    if cu_seqlens is None:
        yield from ((n, n, slice(None)) for n in range(len(rows)))
    else:
        yield from ((n, 0, slice(*ends)) for n, ends in enumerate(pairwise(host(cu_seqlens))))
