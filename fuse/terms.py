"""Terms: what a function of arrays says, as a graph.

    x * rsqrt(mean(x * x) + 1e-5)      on Terms is a Term: x * rsqrt(sum(x * x) / 4096 + 1e-05)

A Term has an operation, the terms that it is of, and a shape. Equal terms are one object, so that what is shared is seen. There
are few operations, so that rules and templates are few; mean, softmax and others are made of these (language.py).

    input, number, length              arguments, constants, how many columns there are
    maps                               of elements; they broadcast (functions.MAPS)
    sum, max                           along the last axis, which stays with length 1
    matmul, transpose, concat, half    concat and half along the last axis
    causal, dropout                    of scores; of anything
    pick, is_column, matmul_by, among  by an index
    weighted, spread                   weights of experts
    total, gathered                    sums over rows, which gradients need (derivative.py)
    PARTS, attended                    what is known of the parts of a row, or of the parts of keys
    split, heads, stacked, flat, rows  views
    merged                             undoes a split

The last two axes are rows and columns; what leads them, batches and heads, broadcasts as NumPy's does.

Axes have names besides their lengths: those that an operation says are one have one name. So a term knows that the columns of
x are the rows of w, whatever their numbers are (axes.py), and the axes of a call's arrays follow (graph.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from .axes import PART, Axis, half_of, unify
from .functions import CASTS, FP8, MAPS

SEED = "int64"  # the dtype of what draws follow from
SIZES = {"bfloat16": 2, "float16": 2, FP8: 1, SEED: 8}  # bytes of an element, where it is not 4
INDEX = "int32", "int64"  # dtypes of what chooses
POWERS, ROOTS = range(2, 9), {0.5: "sqrt", -0.5: "rsqrt"}  # what ** knows
PARTS = "max_of_parts", "sum_of_parts", "pick_of_parts"  # see of_parts


class Term:
    """An operation on terms: see the module. The functions below and operators make them.

    operation: a name in the module's table. args: the terms that it is of. extents: one for each axis. axes: the Axis of each,
    None for an axis of length 1. attr: what else tells it from other terms,

        input                 its name and its dtype
        number                its value
        length, is_column     an axis and its extent
        half                  0 for the first, 1 for the second
        split, merged         how many heads
        total                 the axes that are summed over
        gathered, attended    how many sums are gathered, how many parts are attended to"""

    __slots__ = ("args", "attr", "axes", "extents", "operation")
    __array_ufunc__ = None  # NumPy's arrays and scalars leave operators to us

    def __init__(
        self, operation: str, args: tuple[Term, ...], attr: Any, extents: tuple[int, ...], axes: tuple[Axis | None, ...]
    ):
        self.operation, self.args, self.attr, self.extents, self.axes = operation, args, attr, extents, axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents. A definition that reads one is traced for this length alone, and means what it says."""
        return Extents(self.extents, self.axes)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.extents)

    @property
    def nbytes(self) -> int:
        """The size of the term in memory, if it is an argument or kept between kernels; an element has 16 bits unless its
        dtype is known."""
        return math.prod(self.extents) * SIZES.get(self.stored_dtype("bfloat16"), 4)

    def stored_dtype(self, otherwise: str) -> str:
        """The name of the dtype that the term has in memory, `otherwise` if it is neither an argument nor a cast."""
        if self.operation == "input":
            return self.attr[1]
        if self.operation in PARTS or self.operation in ("gathered", "attended"):
            return "float32"
        return CASTS[self.operation].np.name if self.operation in CASTS else otherwise

    @property
    def T(self) -> Term:
        """The transpose of a matrix. TypeError: it has more than two axes."""
        if self.ndim > 2:
            raise TypeError(f".T: turns all axes round, got {self.extents}: fuse.transpose swaps the last two")
        return transpose(self)

    def __repr__(self):
        from .writing import expression

        return expression(self)

    def __iter__(self):
        raise TypeError("an array of a fused function cannot be iterated over: its rows are computed together")

    def __bool__(self):
        raise TypeError("an `if` on an array of a fused function is not known before it runs: use fuse.where")

    def __getitem__(self, index):
        raise TypeError("arrays of a fused function are not indexed: fuse.halves, reductions and concatenate are what there is")

    def __add__(self, other):
        return apply("add", self, other)

    def __radd__(self, other):
        return apply("add", other, self)

    def __sub__(self, other):
        return apply("sub", self, other)

    def __rsub__(self, other):
        return apply("sub", other, self)

    def __mul__(self, other):
        return apply("mul", self, other)

    def __rmul__(self, other):
        return apply("mul", other, self)

    def __truediv__(self, other):
        return apply("div", self, other)

    def __rtruediv__(self, other):
        return apply("div", other, self)

    def __neg__(self):
        return apply("neg", self)

    def __abs__(self):
        return apply("abs", self)

    def __pow__(self, power):
        if power in ROOTS:
            return apply(ROOTS[power], self)
        if power not in POWERS:
            advice = "sqrt and rsqrt are 0.5 and -0.5, and of what is positive exp(log(x) * p) any other"
            raise TypeError(f"**: a fused function has the powers 2 to 8, got {power!r}; {advice}")
        found = self
        for _ in range(1, int(power)):
            found = found * self
        return found

    def __and__(self, other):
        raise TypeError("& of two comparisons is where(a, where(b, x, y), y) in a fused function")

    def __or__(self, other):
        raise TypeError("| of two comparisons is where(a, x, where(b, x, y)) in a fused function")

    def __invert__(self):
        raise TypeError("~ of a comparison is where(a, y, x) in a fused function")

    def __matmul__(self, other):
        return matmul(self, other)

    def __rmatmul__(self, other):
        return matmul(other, self)

    def __lt__(self, other):
        return apply("less", self, other)

    def __le__(self, other):
        return apply("less_equal", self, other)

    def __gt__(self, other):
        return apply("greater", self, other)

    def __ge__(self, other):
        return apply("greater_equal", self, other)


class Extents(tuple):
    """The extents of a term, as a definition reads them. The axes whose extents were read are noted, in Space.asked."""

    axes: tuple[Axis | None, ...]

    def __new__(cls, extents: tuple[int, ...], axes: tuple[Axis | None, ...]) -> Extents:
        found = super().__new__(cls, extents)
        found.axes = axes
        return found

    def __getitem__(self, place: Any) -> Any:
        some = self.axes[place]
        TABLES[-1].asked.update(some if isinstance(place, slice) else [some])
        return super().__getitem__(place)

    def __iter__(self):
        TABLES[-1].asked.update(self.axes)
        return super().__iter__()


def _of_all(name: str) -> Any:
    """What a tuple does under this name, which reads all of it."""
    return lambda self, *given: getattr(tuple(self), name)(*given)


for _name in "__add__ __contains__ __eq__ __ge__ __gt__ __hash__ __le__ __lt__ __mul__ __ne__ __rmul__ count index".split():
    setattr(Extents, _name, _of_all(_name))


# ---- making them -----------------------------------------------------------------------------------------------------
class TermTable:
    """The terms of one definition. Equal terms are one object here. loose: the extents say nothing, and are not compared.
    dtype: that of the first array, which results have, and what is kept between kernels. asked: the axes whose extents the
    definition reads.

    While the definition runs, code is its code, and frames are those of it in which terms were made: a frame that somebody
    holds keeps its variables when it returns. Hooks of Python's (sys.setprofile) would tell as much, but a profiler or a
    debugger may have them."""

    def __init__(self, loose: bool = False, dtype: str = "bfloat16"):
        self.loose, self.dtype = loose, dtype
        self.code: CodeType | None = None
        self.frames: list[FrameType] = []
        self.asked: set[Axis | None] = set()
        self.terms: dict[tuple, Term] = {}
        self.products: dict[tuple[Axis, ...], Axis] = {}
        self.cuts: dict[Axis, Axis] = {}
        self.splits: list[tuple[Axis, Axis, Axis]] = []  # columns, as heads and columns of each
        self.chosen: dict[Term, Term] = {}  # by an index: a stack of matrices

    def term(self, operation: str, args: Sequence[Term], attr: Any, extents: tuple[int, ...], axes: tuple) -> Term:
        """The one term with this operation on these operands."""
        if self.code is not None:
            self._hold_frame()
        key = operation, tuple(map(id, args)), attr, type(attr)
        if key not in self.terms:
            self.terms[key] = Term(operation, tuple(args), attr, extents, axes)
        return self.terms[key]

    def _hold_frame(self) -> None:
        """Hold the innermost frame of the definition."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        if frame is not None and frame not in self.frames:
            self.frames.append(frame)


TABLES: list[TermTable] = [TermTable()]  # the last one is where terms are made


def differ(one: Any, other: Any) -> bool:
    """Are these extents different? In a loose space it only counts which of them are 1."""
    if not TABLES[-1].loose:
        return one != other
    one, other = (x if isinstance(x, tuple) else (x,) for x in (one, other))
    return len(one) != len(other) or any((n == 1) != (m == 1) for n, m in zip(one, other))


def _made(operation, of=(), what=None, extents=(), names=()) -> Term:
    return TABLES[-1].term(operation, of, what, extents, names)


def source(name: str, extents: Sequence[int], dtype: str) -> Term:
    """An argument of the function: an array, or a number if there are no extents."""
    return _made("input", (), (name, dtype), tuple(extents), tuple(None if n == 1 else Axis() for n in extents))


def number(value: float) -> Term:
    """A constant."""
    return _made("number", (), float(value))


def length(x: Any) -> Term:
    """The number of columns of a term, which a kernel reads from its arrays."""
    return _made("length", (), (x.axes[-1] and x.axes[-1].root, x.extents[-1]))


def lifted(x: Any) -> Term:
    """A term as it is, a number as a term. TypeError: it is something else."""
    if isinstance(x, Term):
        return x
    if isinstance(x, (int, float)) or (hasattr(x, "__float__") and getattr(x, "ndim", 1) == 0):
        return number(float(x))
    raise TypeError(f"a fused function takes arrays as its arguments, and this comes from elsewhere: {x!r:.80}")


def apply(name: str, *given: Any) -> Term:
    """A map of terms and numbers, which broadcast as in NumPy. A map of numbers alone is computed at once. ValueError: the
    shapes do not broadcast."""
    of = [lifted(x) for x in given]
    if all(x.operation == "number" for x in of):
        return number(MAPS[name].numpy(*[x.attr for x in of]))
    try:
        extents, names = _broadcast(name, [(x.extents, x.axes) for x in of])
    except ValueError as error:
        raise ValueError(f"{error}: {of}") from None
    return _made(name, of, None, extents, names)


def _broadcast(name: str, shapes: Sequence[tuple[tuple[int, ...], tuple]]) -> tuple[tuple[int, ...], tuple]:
    """(extents, names of axes) of these shapes broadcast as in NumPy. ValueError: they do not broadcast."""
    extents, names = [], []
    for place in range(-max(len(extents) for extents, _ in shapes), 0):
        extent, axis = 1, None
        for its, called in shapes:
            if len(its) < -place or called[place] is None:
                continue
            if axis is not None and differ(extent, its[place]):
                raise ValueError(f"{name}: shapes {', '.join(str(its) for its, _ in shapes if its)} do not broadcast")
            extent, axis = its[place], unify(called[place], axis)
        extents.append(extent)
        names.append(axis)
    return tuple(extents), tuple(names)


def reduce(kind: str, x: Any, axis: int = -1) -> Term:
    """The sum or max of each row: (..., n) gives (..., 1). TypeError: axis is not the last one."""
    x = lifted(x)
    if x.ndim == 0 or axis not in (-1, x.ndim - 1):
        raise TypeError(
            f"{kind}: reduces the last axis, got {axis=} of an array of shape {x.extents}; over rows: {kind}(transpose(x))"
        )
    return x if x.axes[-1] is None else _made(kind, (x,), None, (*x.extents[:-1], 1), (*x.axes[:-1], None))


def total(x: Term, like: Term) -> Term:
    """The sum over the axes that `like` lacks, which stay with length 1."""
    needs = (None,) * (x.ndim - like.ndim) + like.axes
    return total_along(x, tuple(n for n in range(-x.ndim, 0) if x.axes[n] is not None and needs[n] is None))


def total_along(x: Term, places: tuple[int, ...]) -> Term:
    """The sum over these axes, counted from the last one, -1; they stay with length 1."""
    parts = [(1, None) if n in places else (x.extents[n], x.axes[n]) for n in range(-x.ndim, 0)]
    extents, names = zip(*parts)
    return _made("total", (x,), places, extents, names) if places else x


def gathered(x: Term, shares: int) -> Term:
    """The rows of x (m, c) added up in `shares` groups, as (shares, c): row i of the result is the sum of the rows i, i +
    shares, ... Their sum is the total over all rows."""
    return _made("gathered", (x,), shares, (shares, x.extents[1]), (Axis(shares), x.axes[1]))


def attended(x: Term, parts: int) -> Term:
    """The results of attention over each of `parts` equal parts of the keys: (parts, heads, rows, columns), x being the result
    over all keys."""
    return _made("attended", (x,), parts, (parts, *x.extents), (Axis(parts), *x.axes))


def matmul(a: Any, b: Any) -> Term:
    """a @ b of two matrices; leading axes broadcast as in NumPy. ValueError: the shapes do not fit."""
    a, b = lifted(a), lifted(b)
    if a.ndim < 2 or b.ndim < 2 or differ(a.extents[-1], b.extents[-2]):
        raise ValueError(f"@: takes (..., m, k) and (..., k, n), got {a.extents} and {b.extents}: {a} @ {b}")
    try:
        lead, names = _broadcast("@", [(x.extents[:-2], x.axes[:-2]) for x in (a, b)])
    except ValueError:
        raise ValueError(f"@: leading axes of {a.extents} and {b.extents} do not broadcast: {a} @ {b}") from None
    unify(a.axes[-1], b.axes[-2])
    return _made("matmul", (a, b), None, (*lead, a.extents[-2], b.extents[-1]), (*names, a.axes[-2], b.axes[-1]))


def transpose(x: Any) -> Term:
    """x with its last two axes swapped. ValueError: it has fewer axes."""
    x = lifted(x)
    if x.ndim < 2:
        raise ValueError(f"transpose: takes a matrix, got {x.extents}")
    if x.operation == "transpose":
        return x.args[0]
    extents, names = ((*of[:-2], of[-1], of[-2]) for of in (x.extents, x.axes))
    return _made("transpose", (x,), None, extents, names)


def concat(*parts: Any) -> Term:
    """The arrays side by side, along the last axis. ValueError: they differ in other axes."""
    of = [lifted(x) for x in parts]
    if any(x.ndim < 2 or differ(x.extents[:-1], of[0].extents[:-1]) for x in of):
        raise ValueError(f"concatenate: takes matrices of as many rows, got {[x.extents for x in of]}")
    _, lead = _broadcast("concatenate", [(x.extents[:-1], x.axes[:-1]) for x in of])
    first, second = of[0].axes[-1], of[1].axes[-1] if len(of) == 2 else None
    whole = first.root.doubled if first is not None and second is not None and first.root is second.root else None
    columns = whole or Axis()
    return _made("concat", of, None, (*of[0].extents[:-1], sum(x.extents[-1] for x in of)), (*lead, columns))


def half(x: Any, which: int) -> Term:
    """The first or the second half of the columns; which: 0 or 1. ValueError: the number of columns is odd."""
    x = lifted(x)
    columns = x.axes[-1] if x.ndim else None
    if columns is None or x.extents[-1] % 2:
        raise ValueError(f"halves: takes an array with an even number of columns, got {x.extents}: {x}")
    return _made("half", (x,), which, (*x.extents[:-1], x.extents[-1] // 2), (*x.axes[:-1], half_of(columns)))


def causal(x: Any) -> Term:
    """Scores (..., s, t), of which query i sees key j where j <= i + t - s; the others are -inf."""
    x = lifted(x)
    if x.ndim < 2:
        raise ValueError(f"causal: takes scores (..., queries, keys), got {x.extents}")
    return _made("causal", (x,), None, x.extents, x.axes)


def dropout(x: Any, p: Any, seed: Any) -> Term:
    """x / (1 - p), but 0 with probability p; the draws follow from the seed and the position. ValueError, TypeError: see
    language.dropout."""
    x, p, seed = lifted(x), lifted(p), lifted(seed)
    if x.ndim < 2 or x.axes[-1] is None:
        raise ValueError(f"dropout: takes rows and columns, got {x.extents}: {x}")
    if p.ndim or (p.operation == "number" and not 0 <= p.attr < 1):
        raise ValueError(f"dropout: p must be a number, at least 0 and below 1, got {p}")
    if any(seed.axes) or seed.operation != "input" or seed.attr[1] != SEED:
        raise TypeError(f"dropout: seed must be an argument, an array of one {SEED}, got {seed}")
    return _made("dropout", (x, p, seed), None, x.extents, x.axes)


def pick(x: Any, index: Any) -> Term:
    """The element of each row in the column that `index` names, as an axis of length 1; 0 where there is no such column."""
    x, index = lifted(x), _index("pick", index)
    if x.ndim < 2 or differ(x.extents[:-1], index.extents):
        raise ValueError(f"pick: takes rows and a column for each of them, got {x.extents} and {index.extents}: {x}, {index}")
    _, lead = _broadcast("pick", [(x.extents[:-1], x.axes[:-1]), (index.extents, index.axes)])
    return _made("pick", (x, index), None, (*x.extents[:-1], 1), (*lead, None))


def is_column(x: Term, index: Term) -> Term:
    """A mask of x's shape: True in the column that `index` names in each row."""
    what = x.axes[-1] and x.axes[-1].root, x.extents[-1]
    return _made("is_column", (index,), what, x.extents, (*index.axes, x.axes[-1]))


def _index(name: str, index: Any) -> Term:
    index = lifted(index)
    if index.operation != "input" or index.attr[1] not in INDEX:
        raise TypeError(f"{name}: index must be an argument of {' or '.join(INDEX)}, got {index}")
    return index


def matmul_by(x: Any, w: Any, index: Any) -> Term:
    """x[m] @ w[index[m]] for each row m, 0 where there is no such matrix: x (m, k), w (e, k, n), index (m,)."""
    x, w, index = lifted(x), lifted(w), _index("matmul_by", index)
    if x.ndim != 2 or w.ndim != 3 or differ(x.extents[-1], w.extents[-2]) or differ(x.extents[:-1], index.extents):
        shapes = f"{x.extents}, {w.extents} and {index.extents}"
        raise ValueError(f"matmul_by: takes (m, k), (e, k, n) and m indices, got {shapes}: {x}, {w}, {index}")
    other = TABLES[-1].chosen.setdefault(index, w)
    if differ(other.extents[0], w.extents[0]):
        raise ValueError(f"matmul_by: {index} chooses among {other.extents[0]} matrices {other}, and {w.extents[0]} of {w}")
    unify(other.axes[0], w.axes[0])
    unify(x.axes[-1], w.axes[-2])
    _, rows = _broadcast("matmul_by", [(x.extents[:1], x.axes[:1]), (index.extents, index.axes)])
    return _made("matmul_by", (x, w, index), None, (x.extents[0], w.extents[-1]), (*rows, w.axes[-1]))


def among(x: Term, index: Term, like: Term) -> Term:
    """x (m, e r) with all but r columns of each row set to 0: row m keeps columns r * index[m] up to r * (index[m] + 1). like:
    a term (e, r, n), which says what e and r are."""
    return _made("among", (x, index, like), None, x.extents, x.axes)


def weighted(p: Any, x: Any) -> Term:
    """The sum over e of p[:, e] * x[e], of p (m, e) and x (e, m, n)."""
    p, x = lifted(p), lifted(x)
    if p.ndim != 2 or x.ndim != 3 or differ(p.extents[::-1], x.extents[:2]):
        raise ValueError(f"weighted: takes (m, e) and (e, m, n), got {p.extents} and {x.extents}: {p}, {x}")
    unify(p.axes[1], x.axes[0])
    return _made("weighted", (p, x), None, x.extents[1:], (unify(p.axes[0], x.axes[1]), x.axes[2]))


def spread(p: Term, like: Term) -> Term:
    """p (m, e) as (m, e n), each number repeated n times. like: a term (e, n, k), which says what n is."""
    rows, n = p.extents[0], like.extents[0] * like.extents[1]
    return _made("spread", (p, like), None, (rows, n), (p.axes[0], product(*like.axes[:2])))


def of_parts(operation: str, x: Term, *index: Term) -> Term:
    """One number for each part of a row, a part being PART columns. "max_of_parts" is the maximum of the part; "sum_of_parts"
    the sum of exp(x - that maximum); "pick_of_parts" the element in the column that index names, 0 if that is in another
    part."""
    columns = x.axes[-1]
    if columns is not None:
        columns = TABLES[-1].cuts.setdefault(columns.root, Axis(tiled_axis=columns.root))
    return _made(operation, (x, *index), None, (*x.extents[:-1], -(-x.extents[-1] // PART)), (*x.axes[:-1], columns))


def stacked(x: Term) -> Term:
    """(h, d, r) as (h d, r): the matrices of heads one below the other. It is a view."""
    (h, d, r), (heads, rows, columns) = x.extents, x.axes
    return _made("stacked", (x,), None, (h * d, r), (product(heads, rows), columns))


def heads(x: Term, like: Term) -> Term:
    """(s, h d) as (h, s, d), a view. like: a term (h, d, r) whose first two axes, stacked, are x's columns."""
    (h, d, _), (of_heads, columns, _) = like.extents, like.axes
    return _made("heads", (x, like), None, (h, x.extents[0], d), (of_heads, x.axes[0], columns))


def split_like(x: Term, like: Term) -> Term:
    """(..., s, h d) as (..., h, s, d), the shape of `like`, whose heads merged would have x's columns."""
    *lead, s, _ = x.extents
    count, own = like.extents[-3], like.extents[-1]
    names = (*x.axes[:-2], like.axes[-3], x.axes[-2], like.axes[-1])
    return _made("split", (x,), count, (*lead, count, s, own), names)


def split(x: Any, count: int) -> Term:
    """(..., s, count * d) as (..., count, s, d), a view. ValueError: the columns are no multiple of count."""
    x = lifted(x)
    if x.ndim < 2 or x.axes[-1] is None or (x.extents[-1] % count and not TABLES[-1].loose):
        raise ValueError(f"split_heads: takes rows whose columns are a multiple of {count}, got {x.extents}: {x}")
    columns, splits = x.axes[-1].root, TABLES[-1].splits
    known = (its for whole, *its in splits if whole.root is columns and its[0].root.factors == (count,))
    of_heads, own = next(known, None) or (Axis(count), Axis())
    if not columns.factors:
        columns.factors = count, own
        splits.append((columns, of_heads, own))
    *lead, s, _ = x.extents
    return _made("split", (x,), count, (*lead, count, s, x.extents[-1] // count), (*x.axes[:-2], of_heads, x.axes[-2], own))


def merged(x: Any) -> Term:
    """(..., h, s, d) as (..., s, h d), the reverse of split."""
    x = lifted(x)
    if x.ndim < 3 or x.axes[-3] is None or x.axes[-1] is None:
        raise ValueError(f"merge_heads: takes (..., heads, rows, columns), got {x.extents}: {x}")
    *lead, h, s, d = x.extents
    own = x.axes[-3].root, x.axes[-1].root
    known = (whole for whole, *its in TABLES[-1].splits if tuple(one.root for one in its) == own)
    columns = next(known, None) or product(*own)
    return _made("merged", (x,), h, (*lead, s, h * d), (*x.axes[:-3], x.axes[-2], columns))


def flat(x: Term) -> Term:
    """(n, 1) as (n,): one number for each row, as a vector. It is a view."""
    return _made("flat", (x,), None, x.extents[:1], x.axes[:1])


def rows(x: Term) -> Term:
    """(..., c) as the matrix of all rows. It is a view."""
    (*lead, columns), (*names, last) = x.extents, x.axes
    return _made("rows", (x,), None, (math.prod(lead), columns), (product(*names), last))


def viewed(x: Term) -> Term:
    """The term that lies in memory, if this one is a view of it."""
    return viewed(x.args[0]) if x.operation in ("stacked", "heads", "split", "flat", "rows", "spread") else x


def product(*parts: Axis | None) -> Axis | None:
    """The axis that is the product of these, the first one outermost. The same axes always give the same axis."""
    roots = tuple(axis.root for axis in parts if axis is not None)
    return TABLES[-1].products.setdefault(roots, Axis(*roots)) if len(roots) > 1 else roots[0] if roots else None
