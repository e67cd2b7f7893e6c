"""Views: terms that name the memory of another term with other axes. Kernels read and write views without a copy."""

from __future__ import annotations

import math
from typing import Any

from .axes import Axis
from .terms import TABLES, Term, as_term, make_term, product_axis

VIEWS = "stacked", "heads", "split", "flat", "rows"  # the operations that are views


def stacked(x: Term) -> Term:
    """(h, d, r) as (h d, r), a view: the matrices of the heads stacked."""
    (h, d, r), (heads, rows, columns) = x.extents, x.axes
    return make_term("stacked", (x,), None, (h * d, r), (product_axis(heads, rows), columns))


def heads(x: Term, like: Term) -> Term:
    """(s, h d) as (h, s, d), a view. like: a term (h, d, r) whose first two axes, stacked, are x's columns."""
    (h, d, _), (of_heads, columns, _) = like.extents, like.axes
    return make_term("heads", (x, like), None, (h, x.extents[0], d), (of_heads, x.axes[0], columns))


def split_like(x: Term, like: Term) -> Term:
    """(..., s, h d) as (..., h, s, d), the shape of `like`, whose heads merged would have x's columns."""
    *leading, s, _ = x.extents
    count, per_head = like.extents[-3], like.extents[-1]
    names = (*x.axes[:-2], like.axes[-3], x.axes[-2], like.axes[-1])
    return make_term("split", (x,), count, (*leading, count, s, per_head), names)


def split(x: Any, count: int) -> Term:
    """(..., s, count * d) as (..., count, s, d), a view. ValueError: the columns are no multiple of count."""
    x = as_term(x)
    if x.ndim < 2 or x.axes[-1] is None or (x.extents[-1] % count and not TABLES[-1].loose):
        raise ValueError(f"split_heads: takes rows whose columns are a multiple of {count}, got {x.extents}: {x}")
    columns, splits = x.axes[-1].root, TABLES[-1].splits
    known = (pieces for full, *pieces in splits if full.root is columns and pieces[0].root.factors == (count,))
    of_heads, per_head = next(known, None) or (Axis(count), Axis())
    if not columns.factors:
        columns.factors = count, per_head
        splits.append((columns, of_heads, per_head))
    *leading, s, _ = x.extents
    return make_term(
        "split", (x,), count, (*leading, count, s, x.extents[-1] // count), (*x.axes[:-2], of_heads, x.axes[-2], per_head)
    )


def merge_heads(x: Any) -> Term:
    """(..., h, s, d) as (..., s, h d), the inverse of split."""
    x = as_term(x)
    if x.ndim < 3 or x.axes[-3] is None or x.axes[-1] is None:
        raise ValueError(f"merge_heads: takes (..., heads, rows, columns), got {x.extents}: {x}")
    *leading, h, s, d = x.extents
    axes_of_heads = x.axes[-3].root, x.axes[-1].root
    known = (full for full, *pieces in TABLES[-1].splits if tuple(one.root for one in pieces) == axes_of_heads)
    columns = next(known, None) or product_axis(*axes_of_heads)
    return make_term("merge_heads", (x,), h, (*leading, s, h * d), (*x.axes[:-3], x.axes[-2], columns))


def flat(x: Term) -> Term:
    """(n, 1) as (n,), a view: one number for each row, as a vector."""
    return make_term("flat", (x,), None, x.extents[:1], x.axes[:1])


def rows(x: Term) -> Term:
    """(..., c) as the matrix of all rows, a view."""
    (*leading, columns), (*names, last) = x.extents, x.axes
    return make_term("rows", (x,), None, (math.prod(leading), columns), (product_axis(*names), last))


def view_base(x: Term) -> Term:
    """The term that lies in memory: the base if this one is a view."""
    return view_base(x.args[0]) if x.operation in (*VIEWS, "repeat_columns") else x
