"""Row maps, written down: what all forms have in common. See row_map.py for the forms; each is in a file of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..functions import CASTS, FP8
from ..graph import along, between, is_index, is_tile
from ..module import KernelText, one_number
from ..names import array, unused
from ..terms import Term
from ..writing import ExpressionWriter

if TYPE_CHECKING:
    from .row_map import RowMap

ROWS = 16  # of a warp's tile
FOLLOW = "grid.follow()"  # the first that a kernel does which is launched early, but for what it reads ahead
NOTHING = {"sum": ("zeros", "0.0"), "max": ("neg_infty", "-math.inf")}  # a vector of nothing's sum or maximum, and one number

DROPOUT = '''
@inlined
def dropout(x, dropped, per_kept, seed, {place}):
    """x / (1 - p), but 0 where 16 bits that follow from seed and place are below 65536 p, which is `dropped`."""
    gone = {draw}(rt(x.rows, x.cols, fp32), dropped, seed, seed >> 32, 0, 0, {place}{how})
    return where(gone, 0.0, x * per_kept)
'''.strip()


class RowMapWriter:
    """A row map as text. Each form is a subclass. columns: of a warp's tile. most_warps: of a block. says: how rows lie, in
    words. unordered: are columns read in an order of their own? draw: the op that draws for dropout, and the coordinates that
    it is given."""

    columns, most_warps, says, unordered = 128, 16, "", False
    draw = "bernoulli", "row, col"  # by what op, and at what place

    def __init__(self, kernel: RowMap, parameters: dict[Term, str], local_names: dict[Term, str]):
        self.kernel, self.parameters, self.text = kernel, parameters, KernelText()
        self.drawn, self.told = dict[Term, str](), list[tuple[str, str]]()
        inside = between(kernel.roots, kernel.leaves)
        self.lengths = [x for x in inside if x.operation == "length"]
        self.reductions = [x for x in inside if x.operation in NOTHING]
        self.writer = ExpressionWriter({x: parameters[x] for x in kernel.leaves}, local_names)
        self.text.bounds = "32 * WARPS, 1"
        self.places = any(x.operation == "is_column" for x in inside)  # does somebody ask for a column's number?
        self.writer.forms["is_column"] = lambda x: "place == {}"
        self.drop([x for x in inside if x.operation == "dropout"], inside)
        self.write()

    def drop(self, drops: list[Term], inside: list[Term]) -> None:
        """Prepare dropout: the kernel's parameters for each probability, and the function that draws."""
        taken = set(self.parameters.values())
        for p in dict.fromkeys(x.args[1] for x in drops):
            told = unused("dropped", taken), unused("per_kept", taken)
            taken.update(told)
            self.drawn[p] = ", ".join(told)
            said = self.writer.expression(p)
            self.told += [(told[0], f"drop_threshold({said})"), (told[1], f"1 / (1 - {said})")]
        draw, place = self.draw
        self.writer.forms["dropout"] = lambda x: f"dropout({{0}}, {self.drawn[x.args[1]]}, {{2}}, {place})"
        how = ", unordered=True" * self.unordered
        self.text.helpers = DROPOUT.format(draw=draw, place=place, how=how).splitlines() if drops else []
        used = {y for x in inside if x.operation != "dropout" for y in x.args}
        self.leaves = [x for x in self.kernel.leaves if x not in self.drawn or x in used]

    def write(self) -> None:
        """Write the whole text."""
        raise NotImplementedError

    def begin(self) -> None:
        """Write what the forms with tiles of sixteen rows have in common."""
        kernel, text, parameters = self.kernel, self.text, self.parameters
        self.writer.names |= dict.fromkeys(self.lengths, "width")
        text.globals += [f"WARPS = {kernel.warps}", f"TILE = rt({ROWS}, {self.columns}, fp32)  # of a warp"]
        if self.reductions:
            text.globals.append("smem = shared(scratch=sv(TILE.rows * WARPS, fp32))")
            text.kernel.append("(scratch,) = smem.open()")
        text.kernel += [FOLLOW, "row = TILE.rows * cuda.blockIdx.x"]
        tall = next(x for x in (*kernel.leaves, *kernel.roots) if x.ndim == 2 and x.axes[0])
        blocks = f"-(-{parameters[tall]}.shape[0] // TILE.rows)"
        text.launch = f"{blocks}, 32 * WARPS{', shared=smem' * bool(self.reductions)}, early=True"
        every = [(x, parameters[x]) for x in (*self.leaves, *kernel.roots)]
        text.arguments = [*((array(name) if x.ndim else name, name) for x, name in every), *self.told]

    def width(self, needed: bool) -> None:
        """Write the line that reads how many columns there are, if something asks for it."""
        if needed or self.lengths or any(map(self.kernel.filled, self.reductions)):
            wide = next(x for x in self.kernel.leaves if along(x))
            self.text.kernel.append(f"width = {array(self.parameters[wide])}.shape[{wide.ndim - 1}]")

    def levels(self) -> list[list[Term]]:
        """The reductions, in groups that can be computed at the same time."""
        levels = self.kernel.levels
        return [[x for x in self.reductions if levels[x] == n] for n in range(1, 1 + max(levels[x] for x in self.kernel.roots))]

    def named(self, x: Term) -> str:
        """Give a reduction a name, and return it."""
        taken = {*self.writer.names.values(), *self.parameters.values()}
        self.writer.names[x] = unused(self.writer.suggested(x), taken)
        return self.writer.names[x]

    def folded(self, x: Term, fold: str = "row") -> str:
        """The expression of what a warp's tile contributes to a reduction."""
        written = self.writer.expression(x.args[0])
        if self.kernel.filled(x):
            written = f"right_fill({written}, width - col, {NOTHING[x.operation][1]})"
        return f"{fold}_{x.operation}({written})"

    def reduce(self, wanted: list[Term], fold: str) -> list[str]:
        """The lines that compute reductions of what is in registers."""
        lines = self.writer.assignments([x.args[0] for x in wanted], self.parameters.values(), self.kernel.roots)
        for x in wanted:
            folded = self.folded(x, fold)
            lines.append(f"{self.named(x)} = block.reduce_{x.operation}({folded}, scratch)")
        return lines

    def stores(self, at: str = "row, col", store: str = "store") -> list[str]:
        """The lines that compute the roots and write them."""
        lines = self.writer.assignments(self.kernel.roots, self.parameters.values())
        for x in self.kernel.roots:
            lines += self.store(x, self.rounded(x, store), at, store)
        return lines

    def store(self, x: Term, written: str, at: str, store: str) -> list[str]:
        """The lines that write a root. at: the coordinates of its tile, if it is not one number for each row. store: the op
        that writes a tile."""
        into = array(self.parameters[x])
        return [f"{store}({into}, {written}, ({at}))" if is_tile(x) else f"store({into}, {written}, (row, 0), cols=0)"]

    def rounded(self, x: Term, store: str) -> str:
        """The expression of a root as it is stored. Storing rounds by itself, but `store` writes 16 bytes at once only if what
        it is given is fp8 already."""
        if x.operation not in CASTS or x in self.writer.names:
            return self.writer.expression(x)
        inner = self.writer.expression(x.args[0])
        return f"{x.operation}({inner})" if CASTS[x.operation].itemsize == 1 and is_tile(x) and store == "store" else inner

    def load(self, x: Term) -> str:
        """The line that reads a leaf."""
        name = self.parameters[x]
        if is_tile(x):
            if x.stored_dtype("") == FP8:  # by 16 bytes
                return f"{name} = fp32(load({array(name)}, rt(TILE.rows, TILE.cols, fp8e4m3), (row, col)))"
            return f"{name} = load({array(name)}, TILE, (row, col))"
        if along(x):
            read = f"load({array(name)}, TILE.row_vec, {'(col,)' if x.ndim == 1 else '(0, col)'})"
            return f"{name} = {'zeros(TILE) + ' * self.kernel.broadcasts}{read}"
        if is_index(x):
            return f"{name} = {array(name)}[row_index(TILE.col_vec) + row]"
        if not x.axes[0]:
            return f"{name} = {one_number(array(name), ', '.join('0' * x.ndim), x.stored_dtype(''))}"
        return f"{name} = load({array(name)}, TILE.col_vec, (row, 0), cols=0)"
