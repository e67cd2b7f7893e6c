"""The gradients of Hedgehog, in NumPy, from the matrix of all weights of a sequence."""

import itertools
from typing import Any

import numpy as np

from tiles.testing.compare import host

from .linear import HEDGEHOG_FLOOR, ORDER, _hedgehog_features, _rounding_to


def hedgehog_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    q_map: Any,
    k_map: Any,
    alphas: Any,
    betas: Any,
    *,
    window: int = 64,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    low: bool = False,
) -> dict[str, np.ndarray]:
    """{"dq": , "dk": , "dv": , "dq_map": , "dk_map": , "dalphas": , "dbetas": } in float64; with `low` in float32, all that is
    multiplied rounded to v's dtype. Value heads may share key heads."""
    axes, real, rounded = np.argsort(ORDER[layout]), np.float32 if low else np.float64, _rounding_to(host(v).dtype, low)
    dout, q, k, v = (host(x).transpose(axes).astype(real) for x in (dout, q, k, v))
    heads, group = v.shape[2], v.shape[2] // q.shape[2]
    maps = [host(x).astype(real).repeat(group, 0) for x in (q_map, k_map)]
    weights = [host(x).astype(real) for x in (alphas, betas)]
    q, k = q.repeat(group, 2), k.repeat(group, 2)
    rows = [np.zeros(x.shape, real) for x in (q, k, v)]
    totals = [np.zeros(x.shape, real) for x in (*maps, *weights)]
    ends = [0, v.shape[1]] if cu_seqlens is None else host(cu_seqlens)
    for start, end in itertools.pairwise(ends):
        if start == end:
            continue
        found = _of_sequence([x[:, start:end] for x in (dout, q, k, v)], maps, weights, window, rounded)
        for total, x in zip(rows, found):
            total[:, start:end] = x
        for total, x in zip(totals, found[3:]):
            total += x
    by_group = lambda x, axis: x.reshape(*x.shape[:axis], heads // group, group, *x.shape[axis + 1 :]).sum(axis + 1)
    rows[:2], totals[:2] = [by_group(x, 2) for x in rows[:2]], [by_group(x, 0) for x in totals[:2]]
    gradients = [*(rounded(x).transpose(axes) for x in rows), *map(rounded, totals[:2]), *totals[2:]]
    return dict(zip(("dq", "dk", "dv", "dq_map", "dk_map", "dalphas", "dbetas"), gradients))


def _of_sequence(rows, maps, weights, window, rounded):
    """The gradients of one sequence, of each value head. Matrices are (batch, head, query, key)."""
    (dout, q, k, v), (q_map, k_map), (alphas, betas) = rows, maps, (x[:, None, None] for x in weights)
    real = q.dtype.type
    scale, block = real(q.shape[-1] ** -0.5), np.arange(q.shape[1]) // window
    near = (block[:, None] <= block + 1) & np.tri(len(block), dtype=bool)
    far = block[:, None] > block + 1
    q_features, k_features = (_hedgehog_features(x, M, rounded) for x, M in ((q, q_map), (k, k_map)))
    scores = np.where(near, np.einsum("bihd,bjhd->bhij", q, k), -np.inf)
    top = scores.max(-1, keepdims=True)
    exps = np.exp((scores - top) * scale)
    products = np.where(far, np.einsum("bihf,bjhf->bhij", q_features, k_features), real(0))
    P = rounded(betas * exps) + alphas * rounded(products)
    n = P.sum(-1) + real(HEDGEHOG_FLOOR)
    o = np.einsum("bhij,bjhd->bihd", P, v) / n.swapaxes(1, 2)[..., None]
    dN = rounded(dout / n.swapaxes(1, 2)[..., None])
    dn = -(dout * o).sum(-1).swapaxes(1, 2) / n
    dP = np.einsum("bihd,bjhd->bhij", dN, v) + dn[..., None]
    is_top = scores == top
    of_window = betas * exps * dP
    ds = rounded((of_window - is_top * (of_window.sum(-1, keepdims=True) / is_top.sum(-1, keepdims=True))) * scale)
    dproducts = np.where(far, alphas * dP, real(0))
    dq, dq_map = _through_features(q, q_map, np.einsum("bhij,bjhf->bihf", dproducts, k_features), rounded)
    dk, dk_map = _through_features(k, k_map, np.einsum("bhij,bihf->bjhf", dproducts, q_features), rounded)
    dq, dk = dq + np.einsum("bhij,bjhd->bihd", ds, k), dk + np.einsum("bhij,bihd->bjhd", ds, q)
    dv = np.einsum("bhij,bihd->bjhd", P, dN)
    return dq, dk, dv, dq_map, dk_map, (products * dP).sum((0, 2, 3)), (exps * dP).sum((0, 2, 3))


def _through_features(x, M, df, rounded):
    """(dx, dM), from the gradient of the features of x M."""
    y, half, dy = np.einsum("bshd,hdf->bshf", x, M), M.shape[-1], 0
    for sign, part in ((1, df[..., :half]), (-1, df[..., half:])):
        p = np.exp(sign * y - (sign * y).max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        part = np.where(p > HEDGEHOG_FLOOR, part, 0)
        dy = dy + sign * p * (part - (p * part).sum(-1, keepdims=True))
    dy = rounded(dy)
    return np.einsum("bshf,hdf->bshd", dy, M), np.einsum("bshd,bshf->hdf", x, dy)
