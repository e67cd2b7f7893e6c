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
    axes, real, round_operand = np.argsort(ORDER[layout]), np.float32 if low else np.float64, _rounding_to(host(v).dtype, low)
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
        gradients = _sequence_gradients([x[:, start:end] for x in (dout, q, k, v)], maps, weights, window, round_operand)
        for total, x in zip(rows, gradients):
            total[:, start:end] = x
        for total, x in zip(totals, gradients[3:]):
            total += x
    by_group = lambda x, axis: x.reshape(*x.shape[:axis], heads // group, group, *x.shape[axis + 1 :]).sum(axis + 1)
    rows[:2], totals[:2] = [by_group(x, 2) for x in rows[:2]], [by_group(x, 0) for x in totals[:2]]
    results = [*(round_operand(x).transpose(axes) for x in rows), *map(round_operand, totals[:2]), *totals[2:]]
    return dict(zip(("dq", "dk", "dv", "dq_map", "dk_map", "dalphas", "dbetas"), results))


def _sequence_gradients(rows, maps, weights, window, round_operand):
    """The gradients of one sequence, of each value head. Matrices are (batch, head, query, key)."""
    (dout, q, k, v), (q_map, k_map), (alphas, betas) = rows, maps, (x[:, None, None] for x in weights)
    real = q.dtype.type
    scale, block = real(q.shape[-1] ** -0.5), np.arange(q.shape[1]) // window
    in_window = (block[:, None] <= block + 1) & np.tri(len(block), dtype=bool)
    is_older = block[:, None] > block + 1
    q_features, k_features = (_hedgehog_features(x, M, round_operand) for x, M in ((q, q_map), (k, k_map)))
    scores = np.where(in_window, np.einsum("bihd,bjhd->bhij", q, k), -np.inf)
    row_maxima = scores.max(-1, keepdims=True)
    exps = np.exp((scores - row_maxima) * scale)
    products = np.where(is_older, np.einsum("bihf,bjhf->bhij", q_features, k_features), real(0))
    P = round_operand(betas * exps) + alphas * round_operand(products)
    n = P.sum(-1) + real(HEDGEHOG_FLOOR)
    o = np.einsum("bhij,bjhd->bihd", P, v) / n.swapaxes(1, 2)[..., None]
    dN = round_operand(dout / n.swapaxes(1, 2)[..., None])
    dn = -(dout * o).sum(-1).swapaxes(1, 2) / n
    dP = np.einsum("bihd,bjhd->bhij", dN, v) + dn[..., None]
    is_maximum = scores == row_maxima
    window_products = betas * exps * dP
    ds = round_operand(
        (window_products - is_maximum * (window_products.sum(-1, keepdims=True) / is_maximum.sum(-1, keepdims=True))) * scale
    )
    dproducts = np.where(is_older, alphas * dP, real(0))
    dq, dq_map = _differentiate_features(q, q_map, np.einsum("bhij,bjhf->bihf", dproducts, k_features), round_operand)
    dk, dk_map = _differentiate_features(k, k_map, np.einsum("bhij,bihf->bjhf", dproducts, q_features), round_operand)
    dq, dk = dq + np.einsum("bhij,bjhd->bihd", ds, k), dk + np.einsum("bhij,bihd->bjhd", ds, q)
    dv = np.einsum("bhij,bihd->bjhd", P, dN)
    return dq, dk, dv, dq_map, dk_map, (products * dP).sum((0, 2, 3)), (exps * dP).sum((0, 2, 3))


def _differentiate_features(x, M, df, round_operand):
    """(dx, dM), from the gradient of the features of x M."""
    y, half, dy = np.einsum("bshd,hdf->bshf", x, M), M.shape[-1], 0
    for sign, part in ((1, df[..., :half]), (-1, df[..., half:])):
        p = np.exp(sign * y - (sign * y).max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        part = np.where(p > HEDGEHOG_FLOOR, part, 0)
        dy = dy + sign * p * (part - (p * part).sum(-1, keepdims=True))
    dy = round_operand(dy)
    return np.einsum("bshf,hdf->bshd", dy, M), np.einsum("bshd,bshf->hdf", x, dy)
