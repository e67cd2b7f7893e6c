"""Constructors of terms beyond arithmetic, reductions and products: sums over any axes, concatenation and halves, masks,
choices by an index, experts, and statistics of blocks of columns."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from .axes import PART, Axis, half_of, unify
from .terms import INDEX, SEED, TABLES, Term, as_term, broadcast, extents_differ, make_term, product_axis


def total(x: Term, like: Term) -> Term:
    """The sum over the axes that `like` lacks, which stay with length 1."""
    needs = (None,) * (x.ndim - like.ndim) + like.axes
    return total_along(x, tuple(n for n in range(-x.ndim, 0) if x.axes[n] is not None and needs[n] is None))


def total_along(x: Term, places: tuple[int, ...]) -> Term:
    """The sum over these axes, counted from the last one, -1; they stay with length 1."""
    parts = [(1, None) if n in places else (x.extents[n], x.axes[n]) for n in range(-x.ndim, 0)]
    extents, names = zip(*parts)
    return make_term("total", (x,), places, extents, names) if places else x


def partial_sums(x: Term, shares: int) -> Term:
    """The rows of x (m, c) added up in `shares` groups, as (shares, c): row i of the result is the sum of the rows i, i +
    shares, ... Their sum is the total over all rows."""
    return make_term("partial_sums", (x,), shares, (shares, x.extents[1]), (Axis(shares), x.axes[1]))


def split_outputs(x: Term, parts: int) -> Term:
    """The outputs of attention over each of `parts` equal splits of the keys: (parts, heads, rows, columns), x being the output
    over all keys."""
    return make_term("split_outputs", (x,), parts, (parts, *x.extents), (Axis(parts), *x.axes))


def concat(*parts: Any) -> Term:
    """The arrays side by side, along the last axis. ValueError: they differ in other axes."""
    args = [as_term(x) for x in parts]
    if any(x.ndim < 2 or extents_differ(x.extents[:-1], args[0].extents[:-1]) for x in args):
        raise ValueError(f"concatenate: takes matrices of as many rows, got {[x.extents for x in args]}")
    _, leading = broadcast("concatenate", [(x.extents[:-1], x.axes[:-1]) for x in args])
    first, second = args[0].axes[-1], args[1].axes[-1] if len(args) == 2 else None
    full = first.root.doubled if first is not None and second is not None and first.root is second.root else None
    columns = full or Axis()
    return make_term("concat", args, None, (*args[0].extents[:-1], sum(x.extents[-1] for x in args)), (*leading, columns))


def half(x: Any, index: int) -> Term:
    """The first or the second half of the columns; index: 0 or 1. ValueError: the number of columns is odd."""
    x = as_term(x)
    columns = x.axes[-1] if x.ndim else None
    if columns is None or x.extents[-1] % 2:
        raise ValueError(f"halves: takes an array with an even number of columns, got {x.extents}: {x}")
    return make_term("half", (x,), index, (*x.extents[:-1], x.extents[-1] // 2), (*x.axes[:-1], half_of(columns)))


def repeat(x: Any, count: int, axis: int = -1) -> Term:
    """Each column (axis -1) or row (axis -2) `count` times, one after the other. TypeError, ValueError: see
    functions.repeat."""
    x = as_term(x)
    place = axis - x.ndim if isinstance(axis, Integral) and axis >= 0 else axis
    if place not in (-1, -2) or x.ndim < -place:
        raise TypeError(f"repeat: repeats columns, axis=-1, or rows, axis=-2, got {axis=} of an array of shape {x.extents}")
    if not isinstance(count, Integral) or count < 1:
        raise ValueError(f"repeat: count must be a positive integer that is known before the call, got {count!r:.80}")
    count, place = int(count), int(place)
    repeated = x.axes[place] and x.axes[place].root
    names, extents = [*x.axes], [*x.extents]
    names[place] = TABLES[-1].products.setdefault((repeated, count), Axis(*([repeated] if repeated else []), count))
    extents[place] *= count
    return make_term("repeat", (x,), (count, place), tuple(extents), tuple(names))


def causal(x: Any) -> Term:
    """Scores (..., s, t), -inf where query i does not see key j, j > i + t - s."""
    x = as_term(x)
    if x.ndim < 2:
        raise ValueError(f"causal: takes scores (..., queries, keys), got {x.extents}")
    return make_term("causal", (x,), None, x.extents, x.axes)


def dropout(x: Any, p: Any, seed: Any) -> Term:
    """x / (1 - p), but 0 with probability p; the mask follows from the seed and the position. ValueError, TypeError: see
    functions.dropout."""
    x, p, seed = as_term(x), as_term(p), as_term(seed)
    if x.ndim < 2 or x.axes[-1] is None:
        raise ValueError(f"dropout: takes rows and columns, got {x.extents}: {x}")
    if p.ndim or (p.operation == "number" and not 0 <= p.attr < 1):
        raise ValueError(f"dropout: p must be a number, at least 0 and below 1, got {p}")
    if any(seed.axes) or seed.operation != "input" or seed.attr[1] != SEED:
        described = f"{seed}, of {seed.attr[1]} and shape {seed.extents}" if seed.operation == "input" else seed
        raise TypeError(f"dropout: seed must be an argument, an array of one {SEED}, such as np.array([7]); got {described}")
    return make_term("dropout", (x, p, seed), None, x.extents, x.axes)


def pick(x: Any, index: Any) -> Term:
    """The element of each row in the column that `index` names, as an axis of length 1; 0 where there is no such column."""
    x, index = as_term(x), _index("pick", index)
    if x.ndim < 2 or extents_differ(x.extents[:-1], index.extents):
        raise ValueError(f"pick: takes rows and a column for each of them, got {x.extents} and {index.extents}: {x}, {index}")
    _, leading = broadcast("pick", [(x.extents[:-1], x.axes[:-1]), (index.extents, index.axes)])
    return make_term("pick", (x, index), None, (*x.extents[:-1], 1), (*leading, None))


def is_column(x: Term, index: Term) -> Term:
    """A mask of x's shape: True in the column that `index` names in each row."""
    last_axis = x.axes[-1] and x.axes[-1].root, x.extents[-1]
    return make_term("is_column", (index,), last_axis, x.extents, (*index.axes, x.axes[-1]))


def _index(name: str, index: Any) -> Term:
    index = as_term(index)
    if index.operation != "input" or index.attr[1] not in INDEX:
        raise TypeError(f"{name}: index must be an argument of {' or '.join(INDEX)}, got {index}")
    return index


def matmul_by(x: Any, w: Any, index: Any) -> Term:
    """x[m] @ w[index[m]] for each row m, 0 where there is no such matrix: x (m, k), w (e, k, n), index (m,)."""
    x, w, index = as_term(x), as_term(w), _index("matmul_by", index)
    if (
        x.ndim != 2
        or w.ndim != 3
        or extents_differ(x.extents[-1], w.extents[-2])
        or extents_differ(x.extents[:-1], index.extents)
    ):
        shapes = f"{x.extents}, {w.extents} and {index.extents}"
        raise ValueError(f"matmul_by: takes (m, k), (e, k, n) and m indices, got {shapes}: {x}, {w}, {index}")
    other = TABLES[-1].indexed_stacks.setdefault(index, w)
    if extents_differ(other.extents[0], w.extents[0]):
        raise ValueError(f"matmul_by: {index} chooses among {other.extents[0]} matrices {other}, and {w.extents[0]} of {w}")
    unify(other.axes[0], w.axes[0])
    unify(x.axes[-1], w.axes[-2])
    _, rows = broadcast("matmul_by", [(x.extents[:1], x.axes[:1]), (index.extents, index.axes)])
    return make_term("matmul_by", (x, w, index), None, (x.extents[0], w.extents[-1]), (*rows, w.axes[-1]))


def select_columns(x: Term, index: Term, like: Term) -> Term:
    """x (m, e r) with all but r columns of each row set to 0: row m keeps columns r * index[m] up to r * (index[m] + 1). like:
    a term (e, r, n), which gives e and r."""
    return make_term("select_columns", (x, index, like), None, x.extents, x.axes)


def weighted(p: Any, x: Any) -> Term:
    """The sum over e of p[:, e] * x[e], of p (m, e) and x (e, m, n)."""
    p, x = as_term(p), as_term(x)
    if p.ndim != 2 or x.ndim != 3 or extents_differ(p.extents[::-1], x.extents[:2]):
        raise ValueError(f"weighted: takes (m, e) and (e, m, n), got {p.extents} and {x.extents}: {p}, {x}")
    unify(p.axes[1], x.axes[0])
    return make_term("weighted", (p, x), None, x.extents[1:], (unify(p.axes[0], x.axes[1]), x.axes[2]))


def repeat_columns(p: Term, like: Term) -> Term:
    """p (m, e) as (m, e n), each column repeated n times. like: a term (e, n, k), which gives n."""
    rows, n = p.extents[0], like.extents[0] * like.extents[1]
    return make_term("repeat_columns", (p, like), None, (rows, n), (p.axes[0], product_axis(*like.axes[:2])))


def reduce_parts(operation: str, x: Term, *index: Term) -> Term:
    """One number for each block of PART columns of a row. "max_of_parts" is the maximum of the block; "sum_of_parts" the sum of
    exp(x - that maximum); "pick_of_parts" the element in the column that index names, 0 if that is in another block."""
    columns = x.axes[-1]
    if columns is not None:
        columns = TABLES[-1].part_axes.setdefault(columns.root, Axis(tiled_axis=columns.root))
    return make_term(operation, (x, *index), None, (*x.extents[:-1], -(-x.extents[-1] // PART)), (*x.axes[:-1], columns))
