"""Terms: nodes of the expression graph of a definition.

    x * rsqrt(mean(x * x) + 1e-5)      on Terms is a Term: x * rsqrt(sum(x * x) / 4096 + 1e-05)

A Term has an operation, operands (`args`) and a shape. Equal terms are one object (hash consing, in a TermTable), so common
subterms are shared. There are few operations, so that rules and templates are few; mean, softmax and others are made of these
(functions.py).

    input, number, length              arguments, constants, the number of columns of a term
    maps                               elementwise, with broadcasting (maps.MAPS)
    sum, max                           along the last axis, which stays with length 1
    matmul, transpose                  of the last two axes

and in term_operations.py

    concat, half                       along the last axis
    repeat                             of columns or rows
    causal, dropout                    masks of scores; of anything
    pick, is_column, matmul_by, select_columns    by an index
    weighted, repeat_columns           weights of experts
    total, partial_sums                sums over rows, which gradients need (algebra/derivative.py)
    PARTS                              statistics of blocks of columns, of which a softmax is made
    split_outputs                      outputs of attention over splits of the keys

and in term_views.py

    split, heads, stacked, flat, rows  views
    merge_heads                        the inverse of split

The last two axes are rows and columns; leading axes, batches and heads, broadcast as NumPy's do.

An axis has an identity besides its length: axes that an operation requires to match are unified. So a term knows that the
columns of x are the rows of w, whatever their lengths are (axes.py), and the axes of a call's arrays follow (graph.py)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from .axes import Axis, unify
from .maps import BYTES, CASTS, MAPS

SEED = "int64"  # the dtype of dropout's seed
SIZES = {"bfloat16": 2, "float16": 2, **dict.fromkeys(BYTES, 1), SEED: 8}  # bytes of an element, where it is not 4
INDEX = "int32", "int64"  # dtypes of an index
POWERS, ROOTS = range(2, 9), {0.5: "sqrt", -0.5: "rsqrt"}  # the exponents of **
PARTS = "max_of_parts", "sum_of_parts", "pick_of_parts"  # see term_operations.reduce_parts


class Term:
    """A node of the expression graph. The functions of this module and Python's operators make them.

    operation: a name in the module's table. args: the operands. extents: one for each axis. axes: the Axis of each, None for an
    axis of length 1. attr: what else distinguishes the term from others,

        input                 its name and its dtype
        number                its value
        length, is_column     an axis and its extent
        half                  0 for the first, 1 for the second
        repeat                how many times, and the axis, -1 or -2
        split, merge_heads    how many heads
        total                 the axes that are summed over
        partial_sums, split_outputs    how many of them there are"""

    __slots__ = ("args", "attr", "axes", "extents", "operation")
    __array_ufunc__ = None  # NumPy's arrays and scalars leave operators to us

    def __init__(
        self, operation: str, args: tuple[Term, ...], attr: Any, extents: tuple[int, ...], axes: tuple[Axis | None, ...]
    ):
        self.operation, self.args, self.attr, self.extents, self.axes = operation, args, attr, extents, axes

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents. Reading one is noted: the definition is then traced for this length alone, and may compute with it."""
        return Extents(self.extents, self.axes)

    @property
    def ndim(self) -> int:
        return len(self.extents)

    @property
    def nbytes(self) -> int:
        """The size of the term in memory, as an argument or as scratch; an element has 16 bits unless its dtype is known."""
        return math.prod(self.extents) * SIZES.get(self.stored_dtype("bfloat16"), 4)

    def stored_dtype(self, otherwise: str) -> str:
        """The name of the dtype that the term has in memory, `otherwise` unless it is an argument, a cast or a float32
        intermediate."""
        if self.operation == "input":
            return self.attr[1]
        if self.operation in PARTS or self.operation in ("partial_sums", "split_outputs"):
            return "float32"
        return CASTS[self.operation].np.name if self.operation in CASTS else otherwise

    @property
    def T(self) -> Term:
        """The transpose of a matrix. TypeError: it has more than two axes."""
        if self.ndim > 2:
            raise TypeError(f".T: must be of a matrix, got shape {self.extents}: fuse.transpose swaps the last two axes")
        return transpose(self)

    def __repr__(self):
        from .expression_text import expression

        return expression(self)

    def __iter__(self):
        raise TypeError("arrays of a fused function cannot be iterated over: write operations on whole arrays")

    def __bool__(self):
        raise TypeError("an `if` on an array of a fused function has no value while it is traced: use fuse.where")

    def __getitem__(self, index):
        raise TypeError("arrays of a fused function cannot be indexed: use fuse.halves, fuse.pick, reductions or concatenate")

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
            advice = "0.5 and -0.5 are sqrt and rsqrt; of positive x, exp(log(x) * p) is any other power"
            raise TypeError(f"**: a fused function has the powers 2 to 8, got {power!r}; {advice}")
        product = self
        for _ in range(1, int(power)):
            product = product * self
        return product

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
    """The extents of a term, as a definition reads them. The axes whose extents were read are noted in
    TermTable.extents_read."""

    axes: tuple[Axis | None, ...]

    def __new__(cls, extents: tuple[int, ...], axes: tuple[Axis | None, ...]) -> Extents:
        result = super().__new__(cls, extents)
        result.axes = axes
        return result

    def __getitem__(self, place: Any) -> Any:
        try:
            axis = self.axes[place]
        except IndexError:
            raise IndexError(f"shape: there is no axis {place} of an array of {len(self)}") from None
        TABLES[-1].extents_read.update(axis if isinstance(place, slice) else [axis])
        return super().__getitem__(place)

    def __iter__(self):
        TABLES[-1].extents_read.update(self.axes)
        return super().__iter__()


def _read_all_extents(name: str) -> Any:
    """The method of tuple with this name, which reads all extents."""
    return lambda self, *args: getattr(tuple(self), name)(*args)


for _name in "__add__ __contains__ __eq__ __ge__ __gt__ __hash__ __le__ __lt__ __mul__ __ne__ __rmul__ count index".split():
    setattr(Extents, _name, _read_all_extents(_name))


# ---- constructors ----------------------------------------------------------------------------------------------------
class TermTable:
    """The terms of one definition, each of which exists once. loose: extents are placeholders, and are not compared. dtype:
    that of the first array, of results and of scratch. extents_read: the axes whose extents the definition reads. enables_gqa:
    does it say of attention that query heads may share key heads?

    While the definition runs, `code` is its code, and `frames` are its frames in which terms were made: a frame that is
    referenced keeps its local variables when it returns. Python's hooks (sys.setprofile) would give them as well, but a
    profiler or a debugger may use those."""

    def __init__(self, loose: bool = False, dtype: str = "bfloat16"):
        self.loose, self.dtype = loose, dtype
        self.code: CodeType | None = None
        self.frames: list[FrameType] = []
        self.extents_read: set[Axis | None] = set()
        self.enables_gqa = False
        self.terms: dict[tuple, Term] = {}
        self.products: dict[tuple[Axis | int | None, ...], Axis] = {}
        self.part_axes: dict[Axis, Axis] = {}
        self.splits: list[tuple[Axis, Axis, Axis]] = []  # columns, as heads and columns of each
        self.indexed_stacks: dict[Term, Term] = {}  # by an index: a stack of matrices

    def term(self, operation: str, args: Sequence[Term], attr: Any, extents: tuple[int, ...], axes: tuple) -> Term:
        """The one term with this operation, operands and attribute."""
        if self.code is not None:
            self._keep_frame()
        key = operation, tuple(map(id, args)), attr, type(attr)
        if key not in self.terms:
            self.terms[key] = Term(operation, tuple(args), attr, extents, axes)
        return self.terms[key]

    def _keep_frame(self) -> None:
        """Keep the innermost frame of the definition."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        if frame is not None and frame not in self.frames:
            self.frames.append(frame)


TABLES: list[TermTable] = [TermTable()]  # the last one is where terms are made


def extents_differ(one: Any, other: Any) -> bool:
    """Do these extents differ? In a loose table only extents of 1 are compared."""
    if not TABLES[-1].loose:
        return one != other
    one, other = (x if isinstance(x, tuple) else (x,) for x in (one, other))
    return len(one) != len(other) or any((n == 1) != (m == 1) for n, m in zip(one, other))


def make_term(operation, args=(), attr=None, extents=(), axes=()) -> Term:
    return TABLES[-1].term(operation, args, attr, extents, axes)


def input_term(name: str, extents: Sequence[int], dtype: str) -> Term:
    """An argument of the function: an array, or a number if there are no extents."""
    return make_term("input", (), (name, dtype), tuple(extents), tuple(None if n == 1 else Axis() for n in extents))


def number(value: float) -> Term:
    """A constant, as a term without axes."""
    return make_term("number", (), float(value))


def length(x: Any) -> Term:
    """The number of columns of a term, which a kernel reads from its arrays."""
    return make_term("length", (), (x.axes[-1] and x.axes[-1].root, x.extents[-1]))


def as_term(x: Any) -> Term:
    """A term itself, a number as a term. TypeError: it is something else."""
    if isinstance(x, Term):
        return x
    if isinstance(x, (int, float)) or (hasattr(x, "__float__") and getattr(x, "ndim", 1) == 0):
        return number(float(x))
    raise TypeError(f"a fused function computes with its arguments and numbers only, got {x!r:.80}: pass it as an argument")


def apply(name: str, *operands: Any) -> Term:
    """A map of terms and numbers, which broadcast as in NumPy. A map of numbers alone is computed at once. ValueError: the
    shapes do not broadcast."""
    args = [as_term(x) for x in operands]
    if all(x.operation == "number" for x in args):
        return number(MAPS[name].numpy(*[x.attr for x in args]))
    try:
        extents, names = broadcast(name, [(x.extents, x.axes) for x in args])
    except ValueError as error:
        raise ValueError(f"{error}: {args}") from None
    return make_term(name, args, None, extents, names)


def broadcast(name: str, shapes: Sequence[tuple[tuple[int, ...], tuple]]) -> tuple[tuple[int, ...], tuple]:
    """(extents, axes) of these shapes broadcast as in NumPy; axes that meet are unified. ValueError: they do not broadcast.
    name: the operation, for the error."""
    extents, names = [], []
    for place in range(-max(len(extents) for extents, _ in shapes), 0):
        extent, axis = 1, None
        for shape, called in shapes:
            if len(shape) < -place or called[place] is None:
                continue
            if axis is not None and extents_differ(extent, shape[place]):
                raise ValueError(f"{name}: shapes {', '.join(str(shape) for shape, _ in shapes if shape)} do not broadcast")
            extent, axis = shape[place], unify(called[place], axis)
        extents.append(extent)
        names.append(axis)
    return tuple(extents), tuple(names)


def check_last_axis(name: str, x: Term, axis: int) -> None:
    """TypeError: axis is not the last one of x. name: the function that was called."""
    if x.ndim == 0 or axis not in (-1, x.ndim - 1):
        raise TypeError(
            f"{name}: reduces the last axis, got {axis=} of an array of shape {x.extents}; over rows: {name}(transpose(x))"
        )


def reduce(kind: str, x: Any, axis: int = -1) -> Term:
    """The sum or max of each row: (..., n) gives (..., 1). TypeError: axis is not the last one."""
    x = as_term(x)
    check_last_axis(kind, x, axis)
    return x if x.axes[-1] is None else make_term(kind, (x,), None, (*x.extents[:-1], 1), (*x.axes[:-1], None))


def matmul(a: Any, b: Any) -> Term:
    """a @ b of two matrices; leading axes broadcast as in NumPy. ValueError: the shapes do not fit."""
    a, b = as_term(a), as_term(b)
    if a.ndim < 2 or b.ndim < 2 or extents_differ(a.extents[-1], b.extents[-2]):
        raise ValueError(f"@: takes (..., m, k) and (..., k, n), got {a.extents} and {b.extents}: {a} and {b}")
    try:
        leading, names = broadcast("@", [(x.extents[:-2], x.axes[:-2]) for x in (a, b)])
    except ValueError:
        raise ValueError(f"@: leading axes of {a.extents} and {b.extents} do not broadcast: {a} and {b}") from None
    unify(a.axes[-1], b.axes[-2])
    return make_term("matmul", (a, b), None, (*leading, a.extents[-2], b.extents[-1]), (*names, a.axes[-2], b.axes[-1]))


def transpose(x: Any) -> Term:
    """x with its last two axes swapped. ValueError: it has fewer axes."""
    x = as_term(x)
    if x.ndim < 2:
        raise ValueError(f"transpose: takes a matrix, got {x.extents}")
    if x.operation == "transpose":
        return x.args[0]
    extents, names = ((*pair[:-2], pair[-1], pair[-2]) for pair in (x.extents, x.axes))
    return make_term("transpose", (x,), None, extents, names)


def product_axis(*parts: Axis | None) -> Axis | None:
    """The axis that is the product of these, the first one outermost. The same axes always give the same axis."""
    roots = tuple(axis.root for axis in parts if axis is not None)
    return TABLES[-1].products.setdefault(roots, Axis(*roots)) if len(roots) > 1 else roots[0] if roots else None
