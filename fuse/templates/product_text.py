"""What fills the gaps of the templates of products: a Product's arrays, maps and folds as expressions and lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..graph import along, is_tile
from ..module import array, one_number, unused
from ..terms import PARTS, Term
from ..writing import Writer
from .product import Product, known_length


def reading(y: Term, name: str, tile: str, row: str, col: str) -> str:
    """The expression that reads what an epilogue wants besides, for a tile of accumulators that begins at (row, col)."""
    if y.operation == "spread":
        return f"load({name}, {tile}.col_vec, ({row}, divmod({col}, each)[0]), cols=0)"
    if not any(y.names[-2:]):  # one number
        return one_number(name, f"{lead(y)}{', '.join('0' * min(y.ndim, 2))}", y.held_as(""))
    if is_tile(y):
        return f"load({name}, {tile}, {index(y, row, col)})"
    if along(y):
        return f"load({name}, {tile}.row_vec, {index(y, '0', col)})"
    return f"load({name}, {tile}.col_vec, {index(y, row, '0')}, cols={y.ndim - 2})"


def index(y: Term, row: str, col: str) -> str:
    """Where an array is read at this row and column, of the batch's element that a kernel is at."""
    if y.ndim == 1:
        return f"({col},)"
    return f"({lead(y)}{row}, {col})"


def extent(y: Term, name: str, axis: int) -> str:
    """The expression of one of an array's extents, counted from the last axis, -1."""
    return f"{name}.shape[{y.ndim + axis}]"


def lead(y: Term) -> str:
    """The first part of an index, where an array has a batch."""
    return "" if y.ndim < 3 else "0, " if y.names[0] is None else "batch, "


class Part(NamedTuple):
    """One of several products whose columns lie side by side. weight, result: the parameters' names. before, end: the names of
    the counts of tiles of columns that are before it, and with it."""

    weight: str
    result: str
    before: str
    end: str

    @property
    def test(self) -> str:
        """The line that asks if a tile is of it, others having been asked for."""
        asked = "if" if not self.before else "elif"
        return f"{asked} col < {self.end}:" if self.end != "cols" else "else:"

    def col(self, col: str = "col", unit: str = "") -> str:
        """The column there; unit: what the counts are multiplied by."""
        return f"{col} - {unit}{self.before}" if self.before else col

    @classmethod
    def of(cls, kernel: Product, parameters: Mapping[Term, str]) -> list[Part]:
        """Those of a kernel, in order; none if it has one product alone."""
        every, found = {**kernel.products, **kernel.beside} if kernel.beside else {}, list[Part]()
        for n, (x, w) in enumerate(every.items(), 1):
            end = f"end_{n}" if n < len(every) else "cols"
            found.append(cls(parameters[w.array], parameters[x], found[-1].end if found else "", end))
        return found


class Folds(NamedTuple):
    """The arrays that a product's folds go to: parameters, and what is known of a row by names. by: the parameter that
    chooses, "" if none does. end: the expression of how many columns there are."""

    outs: dict[str, str]
    by: str
    end: str

    @classmethod
    def of(cls, kernel: Product, parameters: Mapping[Term, str]) -> Folds | None:
        """Those of a kernel, if it has some."""
        if not kernel.folds:
            return None
        ((weight, turned),) = kernel.products.values()
        end = extent(weight, parameters[weight], -2 if turned else -1)
        into = {x.operation: parameters[x] for x in kernel.folds}
        outs = {into[name]: known for name, known in zip(PARTS, ("greatest", "total", "picked")) if name in into}
        return cls(outs, next((parameters[y] for x in kernel.folds for y in x.of[1:]), ""), end)

    @property
    def known(self) -> str:
        """What is known of a row."""
        return ", ".join(self.outs.values())

    @property
    def arrays(self) -> dict[str, str]:
        """What is written, by the kernel's parameter."""
        return {array(name): known for name, known in self.outs.items()}

    @property
    def chosen(self) -> str:
        """The kernel's parameter that chooses, if one does."""
        return self.by and array(self.by)

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The kernel's parameters, and what each is given."""
        names = [*self.outs, *([self.by] if self.by else [])]
        return [*((array(name), name) for name in names), ("end", self.end)]


class Kept(NamedTuple):
    """What rows keep of their columns alone, or ask for. own: the kernel's parameter that says which. width: how many."""

    own: str
    width: int = 1

    @classmethod
    def of(cls, kernel: Product, parameters: Mapping[Term, str]) -> Kept | None:
        """That of a kernel, if it has such rows."""
        own = [cls(parameters[x.of[1]], x.of[2].extents[1]) for x in kernel.kept]
        return next(iter([*own, *(cls(parameters[x.of[0]]) for x in kernel.masks)]), None)

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """The kernel's parameter, and what it is given."""
        return [(array(self.own), self.own)]

    def lines(self, rows: str, columns: str) -> list[str]:
        """What is known ahead: the column that a row's own begin at, and the tile's. rows, columns: their numbers."""
        times = f"{self.width} * " if self.width > 1 else ""
        return [f"own = {times}{array(self.own)}[{rows}]", f"place = {columns}"]

    def written(self, x: Term) -> str:
        """See Writer.forms."""
        return f"where((place >= own) & (place < own + {self.width}), {{0}}, 0.0)"


class Words:
    """A product's maps as lines and expressions: first the prologue's, then the epilogue's. taken: names that are not free.
    lengths: that it asks for, the kernel's parameters and what these are given."""

    def __init__(self, kernel: Product, parameters: Mapping[Term, str], spoken: Mapping[Term, str], taken: Iterable[str] = ()):
        self.kernel, self.parameters, self.taken = kernel, parameters, {*parameters.values(), *taken}
        self.writer = Writer({x: parameters[x] for x in kernel.leaves}, spoken)
        self.kept = keeping(self.writer, kernel, parameters)
        self.lengths = measuring(self.writer, kernel, parameters)

    def prologue(self, inside: Mapping[Term, str]) -> tuple[list[str], str, list[tuple[str, str]]]:
        """Lines, the expression of the operand, and of each side its name and what is summed. inside: by what names x and
        vectors are known there."""
        kernel, writer = self.kernel, Writer({**self.writer.names, **inside}, self.writer.spoken)
        lines = writer.assignments([kernel.operand, *(side.of[0] for side in kernel.sides)], self.taken)
        sides = []
        for side in kernel.sides:
            sides.append((unused(self.writer.suggested(side), self.taken), writer.expression(side.of[0])))
            self.taken.add(sides[-1][0])
        return lines, writer.expression(kernel.operand), sides

    def narrow(self, product: str, accumulator: str) -> str:
        """The narrow product as it goes on. accumulator: of the sum that it is a part of."""
        assert self.kernel.joined
        joint, scale = self.kernel.joined
        self.writer.names[joint] = accumulator
        return product if scale is None else f"{product} * {self.writer.expression(scale)}"

    def epilogue(
        self, known: Mapping[Term, str], read: Callable[[Term, str], str], rows: str, columns: str
    ) -> tuple[list[str], str]:
        """Lines, and the expression of what is stored. known: products and sides by their names. read: the expression that
        reads what is wanted besides from an array of this name. rows, columns: expressions of the numbers of a tile's."""
        self.writer.names |= known
        lines = self.kept.lines(rows, columns) if self.kept else []
        lines += [f"{self.parameters[y]} = {read(y, array(self.parameters[y]))}" for y in self.kernel.others]
        lines += self.writer.assignments([self.kernel.root], self.taken)
        return lines, self.writer.expression(self.kernel.root)


def measuring(writer: Writer, kernel: Product, parameters: Mapping[Term, str]) -> list[tuple[str, str]]:
    """Let it be written how long rows are; the kernel's parameters, and what they are given."""
    found = dict[str, str]()
    for x in kernel.lengths:
        along_k = kernel.x.names[-1] is not None and x.what[0].root is kernel.x.names[-1].root
        y, place = (kernel.x, kernel.x.ndim - 1) if along_k else known_length(x, parameters) or (kernel.x, 0)
        writer.names[x] = "width" if along_k else f"width_of_{parameters[y]}"
        found[writer.names[x]] = f"{parameters[y]}.shape[{place}]"
    return [*found.items()]


def keeping(writer: Writer, kernel: Product, parameters: Mapping[Term, str]) -> Kept | None:
    """Let it be written what rows keep."""
    kept = Kept.of(kernel, parameters)
    if kept:
        writer.names |= {x.of[2]: "" for x in kernel.kept}
        writer.forms["among"] = kept.written
        writer.forms["is_column"] = lambda x: "place == own"
    return kept
