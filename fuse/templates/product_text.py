"""What fills the gaps of the templates of products: a Product's arrays, maps and folds as expressions and lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..graph import along, is_tile
from ..module import one_number
from ..names import array, unused
from ..terms import PARTS, Term
from ..writing import ExpressionWriter
from .found import known_length
from .product import Product


def reading(y: Term, name: str, tile: str, row: str, col: str) -> str:
    """The expression that reads another operand of the epilogue, for a tile of accumulators that begins at (row, col)."""
    if y.operation == "spread":
        return f"load({name}, {tile}.col_vec, ({row}, divmod({col}, each)[0]), cols=0)"
    if not any(y.axes[-2:]):  # one number
        return one_number(name, f"{lead(y)}{', '.join('0' * min(y.ndim, 2))}", y.stored_dtype(""))
    if is_tile(y):
        return f"load({name}, {tile}, {index(y, row, col)})"
    if along(y):
        return f"load({name}, {tile}.row_vec, {index(y, '0', col)})"
    return f"load({name}, {tile}.col_vec, {index(y, row, '0')}, cols={y.ndim - 2})"


def index(y: Term, row: str, col: str) -> str:
    """The index of an array's element at this row and column, in the batch that a kernel works on."""
    if y.ndim == 1:
        return f"({col},)"
    return f"({lead(y)}{row}, {col})"


def extent(y: Term, name: str, axis: int) -> str:
    """The expression of an array's extent along an axis, which is counted from the last one, -1."""
    return f"{name}.shape[{y.ndim + axis}]"


def lead(y: Term) -> str:
    """The first part of an index into an array with a batch."""
    return "" if y.ndim < 3 else "0, " if y.axes[0] is None else "batch, "


class KernelArray(NamedTuple):
    """An array that a kernel reads. name: what its elements are called. array: the kernel's parameter. loaded: the expression
    that reads them. lead: the first part of an index into it."""

    name: str
    array: str
    loaded: str = ""
    lead: str = ""


class AdjacentProduct(NamedTuple):
    """One of several products whose columns lie side by side. weight, result: the names of the arrays. before, end: the names
    of two counts, of the tiles of columns ahead of this product and of those up to its end."""

    weight: str
    result: str
    before: str
    end: str

    @property
    def test(self) -> str:
        """The line that asks whether a tile belongs to this product, after those for the products before it."""
        asked = "if" if not self.before else "elif"
        return f"{asked} col < {self.end}:" if self.end != "cols" else "else:"

    def col(self, col: str = "col", unit: str = "") -> str:
        """The column of this product that a tile begins at. unit: what the counts are multiplied by."""
        return f"{col} - {unit}{self.before}" if self.before else col

    @classmethod
    def of(cls, kernel: Product, parameters: Mapping[Term, str]) -> list[AdjacentProduct]:
        """The Parts of a kernel, in order; none if it has a single product."""
        every, found = {**kernel.products, **kernel.beside} if kernel.beside else {}, list[AdjacentProduct]()
        for n, (x, w) in enumerate(every.items(), 1):
            end = f"end_{n}" if n < len(every) else "cols"
            found.append(cls(parameters[w.array], parameters[x], found[-1].end if found else "", end))
        return found


class SoftmaxPartials(NamedTuple):
    """The arrays that a kernel's folds are stored in. outs: {array: what it holds}. by: the array that picks a column, "" if
    there is none. end: the expression of how many columns there are."""

    outs: dict[str, str]
    by: str
    end: str

    @classmethod
    def of(cls, kernel: Product, parameters: Mapping[Term, str]) -> SoftmaxPartials | None:
        """The Folds of a kernel, None if it has none."""
        if not kernel.folds:
            return None
        ((weight, transposed),) = kernel.products.values()
        end = extent(weight, parameters[weight], -2 if transposed else -1)
        into = {x.operation: parameters[x] for x in kernel.folds}
        outs = {into[name]: known for name, known in zip(PARTS, ("greatest", "total", "picked")) if name in into}
        return cls(outs, next((parameters[y] for x in kernel.folds for y in x.args[1:]), ""), end)

    @property
    def known(self) -> str:
        """The names of what is known of a row, as a list in code."""
        return ", ".join(self.outs.values())

    @property
    def arrays(self) -> dict[str, str]:
        """{kernel's parameter: what is written to it}."""
        return {array(name): known for name, known in self.outs.items()}

    @property
    def chosen(self) -> str:
        """The kernel's parameter that picks a column, "" if there is none."""
        return self.by and array(self.by)

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """(kernel's parameter, what it is given) for all of these."""
        names = [*self.outs, *([self.by] if self.by else [])]
        return [*((array(name), name) for name in names), ("end", self.end)]


class ColumnSelection(NamedTuple):
    """Which columns each row keeps, or asks for. own: the array that says it for each row. width: how many columns that is."""

    own: str
    width: int = 1

    @classmethod
    def of(cls, kernel: Product, parameters: Mapping[Term, str]) -> ColumnSelection | None:
        """The Kept of a kernel, None if no row keeps or asks for columns of its own."""
        own = [cls(parameters[x.args[1]], x.args[2].extents[1]) for x in kernel.kept]
        return next(iter([*own, *(cls(parameters[x.args[0]]) for x in kernel.masks)]), None)

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """(kernel's parameter, what it is given)."""
        return [(array(self.own), self.own)]

    def lines(self, rows: str, columns: str) -> list[str]:
        """The lines that compute, for each row, the first of its own columns, and the numbers of the tile's columns. rows,
        columns: the expressions of the numbers of the tile's rows and columns."""
        times = f"{self.width} * " if self.width > 1 else ""
        return [f"own = {times}{array(self.own)}[{rows}]", f"place = {columns}"]

    def written(self, x: Term) -> str:
        """See Writer.forms."""
        return f"where((place >= own) & (place < own + {self.width}), {{0}}, 0.0)"


class ProductWriter:
    """A product's maps as lines and expressions. `prologue` is called first, then `epilogue`. taken: names that are not free.
    lengths: (kernel's parameter, what it is given) of the lengths that it computes with."""

    def __init__(
        self, kernel: Product, parameters: Mapping[Term, str], local_names: Mapping[Term, str], taken: Iterable[str] = ()
    ):
        self.kernel, self.parameters, self.taken = kernel, parameters, {*parameters.values(), *taken}
        self.writer = ExpressionWriter({x: parameters[x] for x in kernel.leaves}, local_names)
        self.kept = keeping(self.writer, kernel, parameters)
        self.lengths = measuring(self.writer, kernel, parameters)

    def prologue(self, inside: Mapping[Term, str]) -> tuple[list[str], str, list[tuple[str, str]]]:
        """(lines, the expression of the operand, (name, what is summed) of each side). inside: what x and the vectors are
        called there."""
        kernel, writer = self.kernel, ExpressionWriter({**self.writer.names, **inside}, self.writer.local_names)
        lines = writer.assignments([kernel.operand, *(side.args[0] for side in kernel.sides)], self.taken)
        sides = []
        for side in kernel.sides:
            sides.append((unused(self.writer.suggested(side), self.taken), writer.expression(side.args[0])))
            self.taken.add(sides[-1][0])
        return lines, writer.expression(kernel.operand), sides

    def narrow(self, product: str, accumulator: str) -> str:
        """The expression of the narrow product as it goes on. accumulator: the name of the sum that it is added to."""
        assert self.kernel.joined
        joint, scale = self.kernel.joined
        self.writer.names[joint] = accumulator
        return product if scale is None else f"{product} * {self.writer.expression(scale)}"

    def epilogue(
        self, known: Mapping[Term, str], read: Callable[[Term, str], str], rows: str, columns: str
    ) -> tuple[list[str], str]:
        """(lines, the expression of what is stored). known: the names of products and sides. read: the expression that reads
        another operand from an array of this name. rows, columns: the expressions of the numbers of a tile's rows and
        columns."""
        self.writer.names |= known
        lines = self.kept.lines(rows, columns) if self.kept else []
        lines += [f"{self.parameters[y]} = {read(y, array(self.parameters[y]))}" for y in self.kernel.others]
        lines += self.writer.assignments([self.kernel.root], self.taken)
        return lines, self.writer.expression(self.kernel.root)


def measuring(writer: ExpressionWriter, kernel: Product, parameters: Mapping[Term, str]) -> list[tuple[str, str]]:
    """Give the writer names for the lengths that a kernel computes with. Returns (kernel's parameter, what it is given) of
    each."""
    found = dict[str, str]()
    for x in kernel.lengths:
        along_k = kernel.x.axes[-1] is not None and x.attr[0].root is kernel.x.axes[-1].root
        y, place = (kernel.x, kernel.x.ndim - 1) if along_k else known_length(x, parameters) or (kernel.x, 0)
        writer.names[x] = "width" if along_k else f"width_of_{parameters[y]}"
        found[writer.names[x]] = f"{parameters[y]}.shape[{place}]"
    return [*found.items()]


def keeping(writer: ExpressionWriter, kernel: Product, parameters: Mapping[Term, str]) -> ColumnSelection | None:
    """Tell the writer how to write what each row keeps or asks for, and return it."""
    kept = ColumnSelection.of(kernel, parameters)
    if kept:
        writer.names |= {x.args[2]: "" for x in kernel.kept}
        writer.forms["among"] = kept.written
        writer.forms["is_column"] = lambda x: "place == own"
    return kept
