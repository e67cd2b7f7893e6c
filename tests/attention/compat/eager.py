"""Attention as torch's documentation writes it, in NumPy, on (B, H, S, D), with all scores in memory."""

import inspect

import numpy as np


def attend(q, k, v, *, see=True, add=0.0, change=None, scale=None):
    """(out, lse): softmax(change(scale q k^T) + add) v where `see` is true; `see` and `add` broadcast to (B, H, Sq, Sk)."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = np.where(see, (change(s) if change else s) + add, -np.inf)
    weights = np.exp(s)
    total = weights.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.nan_to_num(weights / total[..., None])
        return np.einsum("bhij,bhjd->bhid", p, v), np.log(total)


def window(rows, cols, left, right):
    """The mask of a window: query i sees keys i - left to i + right, with the last query and key aligned; negative ends are
    open."""
    far = np.arange(cols) - (np.arange(rows)[:, None] + cols - rows)
    return ((left < 0) | (far >= -left)) & ((right < 0) | (far <= right))


def arguments(function):
    """A function's parameters and their defaults, without annotations: "q, k, causal=False"."""
    actual = inspect.signature(function).parameters.values()
    return ", ".join(str(x.replace(annotation=x.empty)) for x in actual if x.kind is x.POSITIONAL_OR_KEYWORD)
