"""Attention as torch's documentation writes it, in NumPy, on (B, H, S, D), with all scores at once."""

import inspect

import numpy as np


def attend(q, k, v, *, see=True, add=0.0, change=None, scale=None):
    """(out, lse): softmax(change(scale q k^T) + add) v where `see`, which broadcasts to (B, H, Sq, Sk), as `add` does."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("bhid,bhjd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = np.where(see, (change(s) if change else s) + add, -np.inf)
    weights = np.exp(s)
    total = weights.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.nan_to_num(weights / total[..., None])
        return np.einsum("bhij,bhjd->bhid", p, v), np.log(total)


def window(rows, cols, left, right):
    """What query i sees from i - left to i + right, the last ones being aligned; negative ends are open."""
    far = np.arange(cols) - (np.arange(rows)[:, None] + cols - rows)
    return ((left < 0) | (far >= -left)) & ((right < 0) | (far <= right))


def arguments(function):
    """Its parameters and their defaults, without annotations: "q, k, causal=False"."""
    found = inspect.signature(function).parameters.values()
    return ", ".join(str(x.replace(annotation=x.empty)) for x in found if x.kind is x.POSITIONAL_OR_KEYWORD)
