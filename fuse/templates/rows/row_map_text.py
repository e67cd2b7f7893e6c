"""The text of row maps: what all forms have in common. See row_map.py for the forms; each is in a file of its own."""

from __future__ import annotations

from typing import Any

from ...language.expression_text import ExpressionWriter
from ...language.graph import between, has_columns, is_index, is_matrix
from ...language.maps import BYTES, CASTS
from ...language.names import array, unused
from ...language.terms import Term
from ...writing.kernel_text import KernelText, scalar_load

ROWS = 16  # rows of a warp's tile
FOLLOW = "grid.follow()"  # waits for the previous launch: the first line of an early kernel, after its early reads
IDENTITY_ELEMENTS = {
    "sum": ("zeros", "0.0"),
    "max": ("neg_infty", "-math.inf"),
}  # of a vector, and of one number

DROPOUT = '''
@inlined
def dropout(x, dropped, per_kept, seed, {place}):
    """x / (1 - p), but 0 where 16 bits that follow from seed and place are below 65536 p, which is `dropped`."""
    gone = {draw}(rt(x.rows, x.cols, fp32), dropped, seed, seed >> 32, 0, 0, {place}{how})
    return where(gone, 0.0, x * per_kept)
'''.strip()


class RowMapWriter:
    """A row map as text. Each form is a subclass. columns: of a warp's tile. most_warps: of a block. description: how rows are
    read, in words. unordered: are columns read in any order? draw: the op that draws for dropout, and the coordinates that it
    gets."""

    columns, most_warps, description, unordered = 128, 16, "", False
    draw = "bernoulli", "row, col"

    def __init__(self, kernel: Any, parameters: dict[Term, str], local_names: dict[Term, str]):
        self.kernel, self.parameters, self.text = kernel, parameters, KernelText()
        self.drawn, self.extra_arguments = dict[Term, str](), list[tuple[str, str]]()
        inside = between(kernel.roots, kernel.leaves)
        self.lengths = [x for x in inside if x.operation == "length"]
        self.reductions = [x for x in inside if x.operation in IDENTITY_ELEMENTS]
        self.writer = ExpressionWriter({x: parameters[x] for x in kernel.leaves}, local_names)
        self.text.bounds = "32 * WARPS, 1"
        self.needs_column_index = any(x.operation == "is_column" for x in inside)  # is a column's number used?
        self.writer.forms["is_column"] = lambda x: "column == {}"
        self.prepare_dropout([x for x in inside if x.operation == "dropout"], inside)
        self.write()

    def prepare_dropout(self, drops: list[Term], inside: list[Term]) -> None:
        """Write the kernel's parameters for each probability of dropout, and the function that draws."""
        used_names = set(self.parameters.values())
        for p in dict.fromkeys(x.args[1] for x in drops):
            names = unused("dropped", used_names), unused("per_kept", used_names)
            used_names.update(names)
            self.drawn[p] = ", ".join(names)
            p_expression = self.writer.expression(p)
            self.extra_arguments += [(names[0], f"drop_threshold({p_expression})"), (names[1], f"1 / (1 - {p_expression})")]
        draw, place = self.draw
        self.writer.forms["dropout"] = lambda x: f"dropout({{0}}, {self.drawn[x.args[1]]}, {{2}}, {place})"
        flags = ", unordered=True" * self.unordered
        self.text.helpers = DROPOUT.format(draw=draw, place=place, how=flags).splitlines() if drops else []
        used = {y for x in inside if x.operation != "dropout" for y in x.args}
        self.leaves = [x for x in self.kernel.leaves if x not in self.drawn or x in used]

    def write(self) -> None:
        """Write the lines of the kernel and of its launch into `text`."""
        raise NotImplementedError

    def write_prologue(self) -> None:
        """Write the lines that the forms with tiles of sixteen rows have in common."""
        kernel, text, parameters = self.kernel, self.text, self.parameters
        self.writer.names |= dict.fromkeys(self.lengths, "width")
        text.globals += [f"WARPS = {kernel.warps}", f"TILE = rt({ROWS}, {self.columns}, fp32)  # of a warp"]
        if self.reductions:
            text.globals.append("smem = shared(scratch=sv(TILE.rows * WARPS, fp32))")
            text.kernel.append("(scratch,) = smem.open()")
        text.kernel += [FOLLOW, "row = TILE.rows * cuda.blockIdx.x"]
        tall = next(x for x in (*kernel.leaves, *kernel.roots) if x.ndim == 2 and x.axes[0])
        blocks = f"-(-{parameters[tall]}.shape[0] // TILE.rows)"
        text.launch = f"{blocks}, 32 * WARPS{', shared=smem' * bool(self.reductions)}, overlaps_previous=True"
        pairs = [(x, parameters[x]) for x in (*self.leaves, *kernel.roots)]
        text.arguments = [*((array(name) if x.ndim else name, name) for x, name in pairs), *self.extra_arguments]

    def width(self, needed: bool) -> None:
        """Write the line that reads how many columns there are, if it is used."""
        if needed or self.lengths or any(map(self.kernel.needs_fill, self.reductions)):
            wide = next(x for x in self.kernel.leaves if has_columns(x))
            self.text.kernel.append(f"width = {array(self.parameters[wide])}.shape[{wide.ndim - 1}]")

    def levels(self) -> list[list[Term]]:
        """The reductions, in groups that can be computed at the same time."""
        levels = self.kernel.levels
        return [[x for x in self.reductions if levels[x] == n] for n in range(1, 1 + max(levels[x] for x in self.kernel.roots))]

    def name_reduction(self, x: Term) -> str:
        """Give a reduction a name, and return it."""
        used_names = {*self.writer.names.values(), *self.parameters.values()}
        self.writer.names[x] = unused(self.writer.suggest_name(x), used_names)
        return self.writer.names[x]

    def fold_tile(self, x: Term, fold: str = "row") -> str:
        """The expression of what a warp's tile contributes to a reduction."""
        written = self.writer.expression(x.args[0])
        if self.kernel.needs_fill(x):
            written = f"right_fill({written}, width - col, {IDENTITY_ELEMENTS[x.operation][1]})"
        return f"{fold}_{x.operation}({written})"

    def reduce(self, terms: list[Term], fold: str) -> list[str]:
        """The lines that compute reductions of values in registers."""
        lines = self.writer.assignments([x.args[0] for x in terms], self.parameters.values(), self.kernel.roots)
        for x in terms:
            fold_tile = self.fold_tile(x, fold)
            lines.append(f"{self.name_reduction(x)} = block.reduce_{x.operation}({fold_tile}, scratch)")
        return lines

    def write_stores(self, at: str = "row, col", store: str = "store") -> list[str]:
        """The lines that compute the roots and write them."""
        lines = self.writer.assignments(self.kernel.roots, self.parameters.values())
        for x in self.kernel.roots:
            lines += self.store(x, self.stored_expression(x, store), at, store)
        return lines

    def store(self, x: Term, written: str, at: str, store: str) -> list[str]:
        """The lines that write a root. at: the coordinates of its tile, if it is not one number for each row. store: the op
        that writes a tile."""
        output = array(self.parameters[x])
        return [f"{store}({output}, {written}, ({at}))" if is_matrix(x) else f"store({output}, {written}, (row, 0), cols=0)"]

    def stored_expression(self, x: Term, store: str) -> str:
        """The expression of a root as it is stored. Storing rounds by itself, but `store` writes 16 bytes at once only if its
        operand has bytes already."""
        if x.operation not in CASTS or x in self.writer.names:
            return self.writer.expression(x)
        inner = self.writer.expression(x.args[0])
        return f"{x.operation}({inner})" if CASTS[x.operation].itemsize == 1 and is_matrix(x) and store == "store" else inner

    def load(self, x: Term) -> str:
        """The line that reads a leaf."""
        name = self.parameters[x]
        if is_matrix(x):
            if one := BYTES.get(x.stored_dtype("")):  # by 16 bytes
                return f"{name} = fp32(load({array(name)}, rt(TILE.rows, TILE.cols, {one}), (row, col)))"
            return f"{name} = load({array(name)}, TILE, (row, col))"
        if has_columns(x):
            read = f"load({array(name)}, TILE.row_vec, {'(col,)' if x.ndim == 1 else '(0, col)'})"
            return f"{name} = {'zeros(TILE) + ' * self.kernel.broadcasts}{read}"
        if is_index(x):
            return f"{name} = {array(name)}[row_index(TILE.col_vec) + row]"
        if not x.axes[0]:
            return f"{name} = {scalar_load(array(name), ', '.join('0' * x.ndim), x.stored_dtype(''))}"
        return f"{name} = load({array(name)}, TILE.col_vec, (row, 0), cols=0)"
