"""The functions that definitions are written with. On the arguments of a fused function they give terms; on torch's tensors
they are torch's functions, on anything else NumPy's: a definition can be called as it is.

Reductions are along the last axis and keep it, with length 1, so that their results broadcast against what they reduced."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiles import int8
from tiles.calls.torch_op import imported_module

from . import dropout_mask, term_operations, term_views, terms
from .evaluate import pick_elements
from .maps import CASTS, MAPS, of_torch
from .terms import Term

__all__ = """abs attention cast causal concatenate dropout exp exp2 gelu halves log matmul_by max maximum mean merge_heads
    minimum pick relu repeat rsqrt sigmoid silu softmax split_heads sqrt sum tanh top transpose var
    weighted where""".split()


LEAST = -3.0e38  # below all numbers of the rows that `top` sorts


def _map(name: str):
    row = MAPS[name]

    def function(*x):
        if len(x) != row.arity:
            raise TypeError(f"{name}: takes {row.arity} argument{'s' * (row.arity > 1)}, got {len(x)}")
        if any([isinstance(one, Term) for one in x]):
            return terms.apply(name, *x)
        tensors = sorted((one for one in x if _torch(one)), key=lambda one: not one.is_floating_point())  # masks come last
        like = tensors[0] if tensors else None
        return row.numpy(*x) if like is None else of_torch(name)(*[one if _torch(one) else like.new_tensor(one) for one in x])

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name} of {'each element' if row.arity == 1 else 'elements, which broadcast'}; see ops.{name}."
    return function


def _torch(x: Any) -> bool:
    """Is it one of torch's tensors?"""
    torch = imported_module("torch")
    return torch is not None and isinstance(x, torch.Tensor)


abs = _map("abs")
"""|x|, the absolute value of x."""
exp = _map("exp")
"""e^x."""
exp2 = _map("exp2")
"""2^x."""
gelu = _map("gelu")
"""x / 2 (1 + erf(x / sqrt(2))), the exact form."""
log = _map("log")
"""The natural logarithm of x."""
maximum = _map("maximum")
"""The greater of x and y, element by element; they broadcast."""
minimum = _map("minimum")
"""The lesser of x and y, element by element; they broadcast."""
relu = _map("relu")
"""max(x, 0), the positive part of x."""
rsqrt = _map("rsqrt")
"""1 / sqrt(x)."""
sigmoid = _map("sigmoid")
"""1 / (1 + e^-x)."""
silu = _map("silu")
"""x / (1 + e^-x), also called swish."""
sqrt = _map("sqrt")
"""The square root of x."""
tanh = _map("tanh")
"""The hyperbolic tangent of x."""
where = _map("where")
"""where(mask, x, y): x where the mask, such as x < y, holds, and y elsewhere; they broadcast."""


def sum(x: Any, axis: int = -1) -> Any:
    """The sum of each row. x (..., N) gives (..., 1). axis: in a fused function the last one (TypeError)."""
    if isinstance(x, Term):
        return terms.reduce("sum", x, axis)
    return x.sum(axis, keepdim=True) if _torch(x) else np.sum(x, axis, keepdims=True)


def max(x: Any, axis: int = -1) -> Any:
    """The greatest element of each row. x (..., N) gives (..., 1). axis: as in sum."""
    if isinstance(x, Term):
        return terms.reduce("max", x, axis)
    return x.amax(axis, keepdim=True) if _torch(x) else np.max(x, axis, keepdims=True)


def mean(x: Any, axis: int = -1) -> Any:
    """The mean of each row. x (..., N) gives (..., 1). axis: as in sum."""
    if not isinstance(x, Term):
        return sum(x, axis) / x.shape[axis]
    terms.check_last_axis("mean", x, axis)
    return sum(x, axis) / terms.length(x)


def var(x: Any, axis: int = -1) -> Any:
    """The variance of each row, mean((x - mean(x))^2). x (..., N) gives (..., 1). axis: as in sum."""
    if isinstance(x, Term):
        terms.check_last_axis("var", x, axis)
    centred = x - mean(x, axis)
    return mean(centred * centred, axis)


def softmax(x: Any, axis: int = -1) -> Any:
    """exp(x - max(x)) / sum(exp(x - max(x))) of each row. x (..., N) gives (..., N). axis: as in sum."""
    if isinstance(x, Term):
        terms.check_last_axis("softmax", x, axis)
    e = exp(x - max(x, axis))
    return e / sum(e, axis)


def concatenate(parts: Any, axis: int = -1) -> Any:
    """The arrays side by side: (..., N), (..., M), ... give (..., N + M + ...). In a fused function all must have the same
    rows (ValueError), and axis must be the last one (TypeError)."""
    if not any(isinstance(x, Term) for x in parts):
        return imported_module("torch").cat(parts, axis) if _torch(parts[0]) else np.concatenate(parts, axis)
    if axis not in (-1, parts[0].ndim - 1):
        raise TypeError(f"concatenate: joins the last axis, got {axis=}")
    return term_operations.concat(*parts)


def halves(x: Any) -> tuple[Any, Any]:
    """(the first half of the columns, the second half) of x (..., N). In a fused function N must be even (ValueError)."""
    if isinstance(x, Term):
        return term_operations.half(x, 0), term_operations.half(x, 1)
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]


def split_heads(x: Any, count: int) -> Any:
    """The columns cut into `count` heads: x (..., S, count * D) gives (..., count, S, D). ValueError: the columns are no
    multiple of count."""
    if isinstance(x, Term):
        return term_views.split(x, count)
    return x.reshape(*x.shape[:-1], count, -1).swapaxes(-3, -2)


def merge_heads(x: Any) -> Any:
    """The reverse of split_heads: x (..., H, S, D) gives (..., S, H * D)."""
    if isinstance(x, Term):
        return term_views.merge_heads(x)
    return x.swapaxes(-3, -2).reshape(*x.shape[:-3], x.shape[-2], -1)


def repeat(x: Any, count: int, axis: int = -1) -> Any:
    """Each column, or with axis=-2 each row, `count` times, one after the other, as by torch's repeat_interleave: x (..., M, N)
    gives (..., M, count * N) or (..., count * M, N). So scales of groups are said: x @ (w * repeat(scale, 128, -2)), with w
    (K, N) and scale (K / 128, N). ValueError, TypeError: count is no positive integer, or axis another one."""
    if isinstance(x, Term):
        return term_operations.repeat(x, count, axis)
    return x.repeat_interleave(count, axis) if _torch(x) else np.repeat(x, count, axis)


def transpose(x: Any) -> Any:
    """The transpose: the last two axes are swapped. x (..., M, N) gives (..., N, M)."""
    return terms.transpose(x) if isinstance(x, Term) else x.swapaxes(-1, -2)


def dropout(x: Any, p: Any, seed: Any) -> Any:
    """x / (1 - p), but 0 with probability p. x (..., N); p: a number, at least 0 and below 1; seed: an array of one int64,
    which may change from call to call. What is dropped depends on the seed and the position only: dropout(ones, p, seed) on
    NumPy arrays shows what a kernel drops. ValueError, TypeError: p or seed is not of this kind."""
    if any(isinstance(one, Term) for one in (x, p, seed)):
        return term_operations.dropout(x, p, seed)
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p must be at least 0 and below 1, got {p=}")
    if _torch(x):
        return x * dropout_mask.keep_mask_in_torch(x, p, seed) / (1 - p)
    return np.where(dropout_mask.keep_mask(x.shape, p, int(seed.item())), x, x.dtype.type(0)) / x.dtype.type(1 - p)


def cast(x: Any, dtype: Any) -> Any:
    """x rounded to a dtype of tiles: fp32, bf16, fp16, fp8e4m3 or int8. Numbers beyond the range of fp8e4m3 or int8 become its
    end. A result that is a cast has that dtype. TypeError: dtype is another one."""
    name = next((name for name, one in CASTS.items() if one is dtype), None)
    if name is None:
        raise TypeError(f"cast: dtype must be one of {', '.join(CASTS)} of tiles, got {dtype!r}")
    if isinstance(x, Term):
        return terms.apply(name, x)
    if _torch(x):
        rounded = x.round() if dtype is int8 else x  # torch would truncate
        bounded = rounded if dtype.itemsize > 1 else rounded.clamp(*dtype.ends)
        return bounded.to(getattr(imported_module("torch"), dtype.np.name))
    return dtype.round(x)


def pick(x: Any, index: Any) -> Any:
    """The element of each row in the column that `index` names, and 0 where index is negative. x (..., N), index (...) of
    int32 or int64; gives (..., 1). A fused function refuses an index of N or more if its arrays lie in host memory
    (ValueError); on a GPU it gives 0."""
    if isinstance(x, Term):
        return term_operations.pick(x, index)
    if _torch(x):
        at = index.long().unsqueeze(-1)
        inside = (at >= 0) & (at < x.shape[-1])
        return x.gather(-1, at.where(inside, at.new_zeros(()))).where(inside, x.new_zeros(()))
    return pick_elements(x, index, np.zeros((), x.dtype))


def matmul_by(x: Any, w: Any, index: Any) -> Any:
    """x[m] @ w[index[m]] for each row m: every row has a matrix of its own, and 0 where index is negative. x (M, K), w (E, K,
    N), index (M,) of int32 or int64; gives (M, N). An index of E or more is treated as by pick."""
    if any(isinstance(one, Term) for one in (x, w, index)):
        return term_operations.matmul_by(x, w, index)
    inside = (index >= 0) & (index < len(w))
    matrices = w[index.where(inside, index.new_zeros(())) if _torch(x) else np.where(inside, index, 0)]
    return (x[:, None] @ matrices)[:, 0] * inside[:, None]


def top(x: Any, count: int) -> Any:
    """x where it is one of the `count` greatest elements of its row, and 0 elsewhere; elements that are equal to the last of
    these are all kept. x (..., N) gives (..., N)."""
    rest = x
    for _ in range(count - 1):
        rest = where(rest < max(rest), rest, LEAST)
    return where(x >= max(rest), x, 0.0)


def weighted(p: Any, x: Any) -> Any:
    """The sum over e of p[:, e] * x[e]: the outputs of E experts, weighted for each row. p (M, E), x (E, M, N); gives (M,
    N)."""
    if any(isinstance(one, Term) for one in (p, x)):
        return term_operations.weighted(p, x)
    return (p.T[..., None] * x).sum(0)


def causal(scores: Any) -> Any:
    """The scores, and -inf where a query does not see a key: query i sees key j if j <= i + keys - queries. scores (...,
    queries, keys)."""
    if isinstance(scores, Term):
        return term_operations.causal(scores)
    queries, keys = scores.shape[-2:]
    if not _torch(scores):
        return np.where(np.tri(queries, keys, keys - queries, dtype=bool), scores, np.asarray(-np.inf, scores.dtype))
    return scores.masked_fill(scores.new_ones(queries, keys).tril(keys - queries) == 0, float("-inf"))


def attention(q: Any, k: Any, v: Any, scale: Any = 1.0, enable_gqa: bool = False, is_causal: bool = False) -> Any:
    """softmax(q @ transpose(k) * scale) @ v. q (..., S, D), k (..., T, D), v (..., T, Dv), with the same leading axes; gives
    (..., S, Dv). is_causal: query i sees key j if j <= i + T - S.

    Query heads may share key heads (GQA) if heads have an axis of their own, q (B, Hk, H / Hk, S, D), k (B, Hk, 1, T, D), or
    with enable_gqa=True, as in torch: q (B, H, S, D), k and v (B, Hk, T, D), H a multiple of Hk; query head h reads key head
    h // (H / Hk). A fused function then takes such arguments if it returns (B, H, rows, columns) and joins or cuts no heads."""
    leading: list[tuple[int, ...]] = [getattr(x, "extents", getattr(x, "shape", ()))[:-2] for x in (q, k)]
    if isinstance(q, Term):
        terms.TABLES[-1].enables_gqa |= enable_gqa
        if any(terms.extents_differ(m, n) and 1 not in (m, n) for m, n in zip(*map(reversed, leading))):
            rule = "the leading axes of q and k must be equal or 1" + ", or the heads of q a multiple of k's" * enable_gqa
            say = "say enable_gqa=True, or " * (not enable_gqa)
            raise ValueError(
                f"attention: {rule}, got {q.extents} and {k.extents}; for query heads that share key heads {say}"
                "reshape q to (B, Hk, H / Hk, S, D), and k and v to (B, Hk, 1, T, D)"
            )
    elif enable_gqa and all(leading) and 1 not in (heads := [x[-1] for x in leading]) and heads[0] != heads[1]:
        k, v = (_repeat_heads(x, heads[0] // heads[1]) for x in (k, v))
    scores = q @ transpose(k) * scale
    return softmax(causal(scores) if is_causal else scores) @ v


def _repeat_heads(x: Any, count: int) -> Any:
    """(..., Hk, T, D) as (..., count * Hk, T, D), each head `count` times."""
    return x.repeat_interleave(count, -3) if _torch(x) else np.repeat(np.asarray(x), count, -3)
