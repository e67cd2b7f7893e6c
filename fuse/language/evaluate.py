"""Evaluation of terms for given arguments, in one of several arithmetics: NumPy's, or a prime field's (algebra/identity.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from . import dropout_mask
from .axes import Axis
from .graph import between, has_columns, walk
from .maps import MAPS
from .terms import PARTS, Term

DRAWS = 64  # samples of random numbers


class Arithmetic(Protocol):
    """The operations that terms are evaluated with, one method for each kind. `length` and `count` are the extent of an axis,
    as a number of this arithmetic and as an integer."""

    def number(self, value: float) -> Any: ...

    def length(self, axis: Axis | None, extent: int) -> Any: ...

    def map(self, name: str, *operands: Any) -> Any: ...

    def reduce(self, kind: str, x: Any) -> Any: ...

    def matmul(self, a: Any, b: Any) -> Any: ...

    def concat(self, parts: Sequence[Any]) -> Any: ...

    def causal(self, x: Any) -> Any: ...

    def dropout(self, x: Any, p: Any, seed: Any) -> Any: ...

    def pick(self, x: Any, index: Any) -> Any: ...

    def count(self, axis: Axis | None, extent: int) -> int: ...


class NumPyArithmetic:
    """NumPy's arithmetic, each step rounded to a dtype: float64 for references, the dtype of the inputs for the baseline of the
    error rule. Products are summed in float32 and rounded once, as the tensor cores do it."""

    def __init__(self, dtype: Any):
        self.dtype = np.dtype(dtype)
        self.wide = np.float64 if self.dtype == np.float64 else np.float32

    def _round(self, x: Any) -> Any:
        return np.asarray(x, None if np.asarray(x).dtype == bool else self.dtype)

    def number(self, value: float) -> Any:
        return self.wide(value)

    def length(self, axis: Axis | None, extent: int) -> Any:
        return self.wide(extent)

    def map(self, name: str, *operands: Any) -> Any:
        return self._round(
            MAPS[name].numpy(*[x if x.dtype == bool else np.asarray(x, self.wide) for x in map(np.asarray, operands)])
        )

    def reduce(self, kind: str, x: Any) -> Any:
        return self._round(getattr(np, kind)(np.asarray(x, self.wide), -1, keepdims=True))

    def matmul(self, a: Any, b: Any) -> Any:
        return self._round(np.asarray(a, self.wide) @ np.asarray(b, self.wide))

    def concat(self, parts: Sequence[Any]) -> Any:
        return np.concatenate(parts, -1)

    def causal(self, x: Any) -> Any:
        return mask_causal(x, np.asarray(-np.inf, x.dtype))

    def dropout(self, x: Any, p: Any, seed: Any) -> Any:
        mask = dropout_mask.keep_mask(x.shape, float(p), int(np.asarray(seed).item()))
        return self._round(np.where(mask, np.asarray(x, self.wide) / self.wide(1 - p), 0))

    def pick(self, x: Any, index: Any) -> Any:
        return pick_elements(x, index, np.zeros((), x.dtype))

    def count(self, axis: Axis | None, extent: int) -> int:
        return extent


def pick_elements(x: Any, index: Any, otherwise: Any) -> Any:
    """The element of each row at the column that `index` names; `otherwise` where there is no such column."""
    columns = np.asarray(index).astype(np.int64)[..., None]
    inside = (columns >= 0) & (columns < x.shape[-1])
    if not x.shape[-1]:
        return np.broadcast_to(otherwise, columns.shape)
    return np.where(inside, np.take_along_axis(x, np.where(inside, columns, 0), -1), otherwise)


def mask_causal(x: Any, otherwise: Any) -> Any:
    """The scores where a query sees a key under a causal mask, and `otherwise` elsewhere."""
    queries, keys = x.shape[-2:]
    return np.where(np.tri(queries, keys, keys - queries, dtype=bool), x, otherwise)


def evaluate(roots: Sequence[Term], inputs: Mapping[str, Any], arithmetic: Arithmetic) -> list[Any]:
    """The values of these terms. inputs: the values of the arguments, by name. arithmetic: the operations to compute with."""
    values: dict[int, Any] = {}
    for x in walk(*roots):
        args = [values[id(y)] for y in x.args]
        if x.operation == "input":
            value = inputs[x.attr[0]]
        elif x.operation == "number":
            value = arithmetic.number(x.attr)
        elif x.operation == "length":
            value = arithmetic.length(*x.attr)
        elif x.operation in MAPS:
            value = arithmetic.map(x.operation, *args)
        elif x.operation in ("sum", "max"):
            value = arithmetic.reduce(x.operation, *args)
        elif x.operation == "matmul":
            value = arithmetic.matmul(*args)
        elif x.operation == "transpose":
            value = args[0].swapaxes(-1, -2)
        elif x.operation == "half":
            value = np.split(args[0], 2, -1)[x.attr]
        elif x.operation == "repeat":
            value = np.repeat(args[0], *x.attr)
        elif x.operation == "causal":
            value = arithmetic.causal(*args)
        elif x.operation == "dropout":
            value = arithmetic.dropout(*args)
        elif x.operation == "pick":
            value = arithmetic.pick(*args)
        elif x.operation == "is_column":
            value = np.asarray(args[0])[..., None] == np.arange(arithmetic.count(*x.attr))
        elif x.operation == "total":
            value = _total(arithmetic, args[0], x.attr)
        elif x.operation == "partial_sums":
            value = np.concatenate([_total(arithmetic, args[0][n :: x.attr], (-2,)) for n in range(x.attr)])
        elif x.operation == "matmul_by":
            value = _matmul_by(arithmetic, *args)
        elif x.operation == "select_columns":
            value = _among(arithmetic, *args)
        elif x.operation == "weighted":
            each = arithmetic.map("mul", args[0].T[..., None], args[1])
            value = arithmetic.reduce("sum", np.moveaxis(each, 0, -1))[..., 0]
        elif x.operation == "repeat_columns":
            value = np.repeat(args[0], args[1].shape[1], -1)
        elif x.operation in PARTS:
            value = _of_parts(x.operation, arithmetic, arithmetic.count(x.axes[-1], x.extents[-1]), *args)
        elif x.operation == "split":
            value = args[0].reshape(*args[0].shape[:-1], arithmetic.count(x.axes[-3], x.attr), -1).swapaxes(-3, -2)
        elif x.operation == "merge_heads":
            value = args[0].swapaxes(-3, -2).reshape(*args[0].shape[:-3], args[0].shape[-2], -1)
        elif x.operation == "stacked":
            value = args[0].reshape(-1, args[0].shape[-1])
        elif x.operation == "flat":
            value = args[0].reshape(-1)
        elif x.operation == "heads":
            value = args[0].reshape(len(args[0]), len(args[1]), -1).swapaxes(0, 1)
        else:
            value = arithmetic.concat(args)
        values[id(x)] = value
    return [values[id(x)] for x in roots]


def _total(arithmetic: Arithmetic, x: Any, places: Sequence[int]) -> Any:
    """The sum over these axes, which stay with length 1, in one reduction."""
    ends = range(-len(places), 0)
    reordered = np.moveaxis(x, places, ends)
    rows = arithmetic.reduce("sum", reordered.reshape(*reordered.shape[: -len(places)], -1))
    return np.moveaxis(rows.reshape(*rows.shape[:-1], *[1] * len(places)), ends, places)


def _matmul_by(arithmetic: Arithmetic, x: Any, w: Any, index: Any) -> Any:
    chosen = np.asarray(index).astype(np.int64)
    inside = (chosen >= 0) & (chosen < len(w))
    product = arithmetic.matmul(x[:, None], w[np.where(inside, chosen, 0)])[:, 0]
    return np.where(inside[:, None], product, np.asarray(arithmetic.number(0), product.dtype))


def _among(arithmetic: Arithmetic, x: Any, index: Any, like: Any) -> Any:
    group = np.arange(x.shape[1]) // like.shape[1]
    return np.where(group == np.asarray(index)[:, None], x, np.asarray(arithmetic.number(0), x.dtype))


def _of_parts(operation: str, arithmetic: Arithmetic, count: int, x: Any, *index: Any) -> Any:
    """The value of term_operations.reduce_parts with `count` parts, of any lengths."""
    parts, values, offset = np.array_split(x, count, -1), [], 0
    for part in parts:
        greatest = arithmetic.reduce("max", part)
        if operation == "max_of_parts":
            values.append(greatest)
        elif operation == "sum_of_parts":
            values.append(arithmetic.reduce("sum", arithmetic.map("exp", arithmetic.map("sub", part, greatest))))
        else:
            values.append(arithmetic.pick(part, index[0] - offset))
        offset += part.shape[-1]
    return arithmetic.concat(values)


def values_past_row_end(root: Term, leaves: Sequence[Term]) -> np.ndarray:
    """What an elementwise map yields past the end of a row, where the tiles and vectors that it reads hold zeros. A sum along
    the row is right only if that is 0. Each value returned is for another sample of the numbers that have no columns; samples
    in which such a number itself becomes infinite or NaN are left out."""
    rng, known, ends = np.random.default_rng(0), dict[Term, np.ndarray](), set(leaves)
    counts = np.ones(DRAWS, bool)
    for x in between([root], leaves, with_leaves=True):
        if x in ends and has_columns(x):
            known[x] = np.zeros(DRAWS)
        elif x.operation in MAPS and x not in ends:
            with np.errstate(all="ignore"):
                known[x] = np.asarray(MAPS[x.operation].numpy(*[known[y] for y in x.args]))
        elif x.operation == "dropout":  # zero if its operand is
            known[x] = known[x.args[0]]
        else:
            large = np.where(np.arange(DRAWS) % 2, 1000, 1)  # so that an exp may overflow
            known[x] = np.full(DRAWS, x.attr) if x.operation == "number" else large * rng.standard_normal(DRAWS)
        if not has_columns(x):
            counts &= np.isfinite(known[x])
    return known[root][counts] if counts.any() else np.full(1, np.nan)
