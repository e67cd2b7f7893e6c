"""What the texts of products have in common: a Product's arrays, maps and softmax partials as expressions and lines of code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ...language.expression_text import ExpressionWriter
from ...language.graph import has_columns, is_matrix
from ...language.names import array, unused
from ...language.terms import PARTS, Term
from ...writing.kernel_text import scalar_load
from .product import Product
from .product_match import known_length


def read_expression(y: Term, name: str, tile: str, row: str, col: str) -> str:
    """The expression that reads another operand of the epilogue, for a tile of accumulators that begins at (row, col)."""
    if y.operation == "repeat_columns":
        return f"load({name}, {tile}.col_vec, ({row}, divmod({col}, each)[0]), cols=0)"
    if not any(y.axes[-2:]):  # one number
        return scalar_load(name, f"{lead(y)}{', '.join('0' * min(y.ndim, 2))}", y.stored_dtype(""))
    if is_matrix(y):
        return f"load({name}, {tile}, {index(y, row, col)})"
    if has_columns(y):
        return f"load({name}, {tile}.row_vec, {index(y, '0', col)})"
    return f"load({name}, {tile}.col_vec, {index(y, row, '0')}, cols={y.ndim - 2})"


def index(y: Term, row: str, col: str) -> str:
    """The index of an array's element at this row and column, in the kernel's batch."""
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
    """An array that a kernel reads. name: the variable of its elements. array: the kernel's parameter. loaded: the expression
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
        """The line that tests whether a tile belongs to this product, after those for the products before it."""
        keyword = "if" if not self.before else "elif"
        return f"{keyword} col < {self.end}:" if self.end != "cols" else "else:"

    def col(self, col: str = "col", unit: str = "") -> str:
        """The column of this product that a tile begins at. unit: a factor of the counts."""
        return f"{col} - {unit}{self.before}" if self.before else col

    @classmethod
    def from_kernel(cls, kernel: Product, parameters: Mapping[Term, str]) -> list[AdjacentProduct]:
        """The AdjacentProducts of a kernel, in order; none if it has a single product."""
        products, parts = {**kernel.products, **kernel.adjacent} if kernel.adjacent else {}, list[AdjacentProduct]()
        for n, (x, w) in enumerate(products.items(), 1):
            end = f"end_{n}" if n < len(products) else "cols"
            parts.append(cls(parameters[w.array], parameters[x], parts[-1].end if parts else "", end))
        return parts


class SoftmaxPartials(NamedTuple):
    """The arrays of a kernel's statistics for a softmax. outs: {array: the variable that is stored in it}. index_array: the
    array that picks a column, "" if there is none. end: the expression of how many columns there are."""

    outs: dict[str, str]
    index_array: str
    end: str

    @classmethod
    def from_kernel(cls, kernel: Product, parameters: Mapping[Term, str]) -> SoftmaxPartials | None:
        """The SoftmaxPartials of a kernel, None if it has none."""
        if not kernel.softmax_partials:
            return None
        (weight,) = kernel.products.values()
        end = extent(weight.array, parameters[weight.array], -2 if weight.transposed else -1)
        outputs = {x.operation: parameters[x] for x in kernel.softmax_partials}
        outs = {outputs[name]: state for name, state in zip(PARTS, ("greatest", "total", "picked")) if name in outputs}
        return cls(outs, next((parameters[y] for x in kernel.softmax_partials for y in x.args[1:]), ""), end)

    @property
    def state(self) -> str:
        """The variables of a row's statistics, separated by commas."""
        return ", ".join(self.outs.values())

    @property
    def arrays(self) -> dict[str, str]:
        """{kernel's parameter: the variable that is stored in it}."""
        return {array(name): state for name, state in self.outs.items()}

    @property
    def index_parameter(self) -> str:
        """The kernel's parameter that picks a column, "" if there is none."""
        return self.index_array and array(self.index_array)

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """(kernel's parameter, its argument) for all of these."""
        names = [*self.outs, *([self.index_array] if self.index_array else [])]
        return [*((array(name), name) for name in names), ("end", self.end)]


class ColumnSelection(NamedTuple):
    """The columns that each row keeps or compares with. index_array: the array of each row's index. width: how many columns an
    index selects."""

    index_array: str
    width: int = 1

    @classmethod
    def from_kernel(cls, kernel: Product, parameters: Mapping[Term, str]) -> ColumnSelection | None:
        """The ColumnSelection of a kernel, None if it selects no columns by an index."""
        selections = [cls(parameters[x.args[1]], x.args[2].extents[1]) for x in kernel.selections]
        return next(iter([*selections, *(cls(parameters[x.args[0]]) for x in kernel.column_masks)]), None)

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The kernel's parameter for the index, and its argument."""
        return [(array(self.index_array), self.index_array)]

    def lines(self, rows: str, columns: str) -> list[str]:
        """The lines that compute, for each row, its first selected column, and the numbers of the tile's columns. rows,
        columns: the expressions of the numbers of the tile's rows and columns."""
        times = f"{self.width} * " if self.width > 1 else ""
        return [f"selected = {times}{array(self.index_array)}[{rows}]", f"column = {columns}"]

    def form(self, x: Term) -> str:
        """The form of a selection: see ExpressionWriter.forms."""
        return f"where((column >= selected) & (column < selected + {self.width}), {{0}}, 0.0)"


class ProductWriter:
    """A product's maps as lines and expressions. `prologue` is called first, then `epilogue`. taken: names that are not free.
    lengths: (kernel's parameter, its argument) of the lengths that it computes with."""

    def __init__(
        self, kernel: Product, parameters: Mapping[Term, str], local_names: Mapping[Term, str], used_names: Iterable[str] = ()
    ):
        self.kernel, self.parameters, self.used_names = kernel, parameters, {*parameters.values(), *used_names}
        self.writer = ExpressionWriter({x: parameters[x] for x in kernel.leaves}, local_names)
        self.selection = write_selection(self.writer, kernel, parameters)
        self.lengths = name_lengths(self.writer, kernel, parameters)

    def prologue(self, inside: Mapping[Term, str]) -> tuple[list[str], str, list[tuple[str, str]]]:
        """(lines, the expression of the operand, (name, the expression that is summed) of each row sum). inside: the names of x
        and the vectors there."""
        kernel, writer = self.kernel, ExpressionWriter({**self.writer.names, **inside}, self.writer.local_names)
        lines = writer.assignments([kernel.operand, *(side.args[0] for side in kernel.row_sums)], self.used_names)
        sides = []
        for side in kernel.row_sums:
            sides.append((unused(self.writer.suggest_name(side), self.used_names), writer.expression(side.args[0])))
            self.used_names.add(sides[-1][0])
        return lines, writer.expression(kernel.operand), sides

    def narrow(self, product: str, accumulator: str) -> str:
        """The expression of the narrow product as the left factor of the second product. accumulator: the name of the sum that
        it is added to."""
        assert self.kernel.joint_sum
        joint, scale = self.kernel.joint_sum
        self.writer.names[joint] = accumulator
        return product if scale is None else f"{product} * {self.writer.expression(scale)}"

    def epilogue(
        self, state: Mapping[Term, str], read: Callable[[Term, str], str], rows: str, columns: str
    ) -> tuple[list[str], str]:
        """(lines, the expression of what is stored). state: the names of products and row sums. read: the expression that reads
        another operand from an array of this name. rows, columns: the expressions of the numbers of a tile's rows and
        columns."""
        self.writer.names |= state
        lines = self.selection.lines(rows, columns) if self.selection else []
        lines += [f"{self.parameters[y]} = {read(y, array(self.parameters[y]))}" for y in self.kernel.epilogue_inputs]
        lines += self.writer.assignments([self.kernel.root], self.used_names)
        return lines, self.writer.expression(self.kernel.root)


def name_lengths(writer: ExpressionWriter, kernel: Product, parameters: Mapping[Term, str]) -> list[tuple[str, str]]:
    """Name the lengths that a kernel computes with, in the writer. Returns (kernel's parameter, its argument) of each."""
    arguments = dict[str, str]()
    for x in kernel.lengths:
        along_k = kernel.x.axes[-1] is not None and x.attr[0].root is kernel.x.axes[-1].root
        y, place = (kernel.x, kernel.x.ndim - 1) if along_k else known_length(x, parameters) or (kernel.x, 0)
        writer.names[x] = "width" if along_k else f"width_of_{parameters[y]}"
        arguments[writer.names[x]] = f"{parameters[y]}.shape[{place}]"
    return [*arguments.items()]


def write_selection(writer: ExpressionWriter, kernel: Product, parameters: Mapping[Term, str]) -> ColumnSelection | None:
    """Give the writer the forms of a kernel's column selections, and return them."""
    selection = ColumnSelection.from_kernel(kernel, parameters)
    if selection:
        writer.names |= {x.args[2]: "" for x in kernel.selections}
        writer.forms["select_columns"] = selection.form
        writer.forms["is_column"] = lambda x: "column == selected"
    return selection
