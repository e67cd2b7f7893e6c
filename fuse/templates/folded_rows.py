"""Row maps of rows that are cut into lines, which make a block's tile: see row_map.py for the forms.

folded:  a block goes from row to row, and the next one is loaded while it works on one
slim:    the same with half as many columns for each warp
alone:   each row is a block's only one"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import along, is_tile
from ..names import array
from ..terms import Term
from .row_map_text import FOLLOW, NOTHING, RowMapWriter

FOLD = 16  # lines of a warp's tile
REGISTERS = 2048  # of a multiprocessor, for each lane of a warp


def resident(registers: int) -> int:
    """How many warps with so many registers a lane fit a multiprocessor, a quarter of them in each of its four parts."""
    return 4 * (REGISTERS // 4 // registers)


class FoldedRows(RowMapWriter):
    """A row is a tile: a block works on one row at a time, and the next one is loaded meanwhile. part: the columns of a line;
    a warp has 16 lines of a row, one behind the other in memory."""

    draw, part = ("bernoulli_of_row", "row, col, step"), 64
    columns, says = FOLD * part, "are tiles of lines; one is worked on while the next one comes"

    def store(self, x: Term, written: str, at: str, store: str) -> list[str]:
        """See Writing. A result with one number for each row and 16 bits is stored as a vector of which the first element
        counts."""
        into = array(self.parameters[x])
        if is_tile(x):
            return super().store(x, written, at, store)
        if x.stored_dtype(self.kernel.dtype) in ("fp32", "float32"):
            return ["if line == 0:", f"    {into}[row, 0] = {written}"]
        return ["if line == 0:", f"    store({into}, zeros(rt(16, 16, fp32).col_vec) + ({written}), (row, 0), cols=1)"]

    @property
    def unordered(self) -> bool:  # type: ignore[override]
        """May columns be read in an order of their own? A row's end is cut off by whole lines, so no column's number is
        needed."""
        return self.kernel.alike

    def write(self) -> None:
        kernel, text, name = self.kernel, self.text, self.parameters
        tiles = [x for x in kernel.leaves if is_tile(x)]
        vectors = [x for x in kernel.leaves if along(x) and not is_tile(x)]
        numbers = [x for x in self.leaves if not along(x)]
        self.writer.names |= dict.fromkeys(self.lengths, "columns")
        x = name[tiles[0]]
        text.globals += self.extents()
        text.globals += [f"PART = rt({FOLD}, {self.part}, {kernel.dtype})  # a warp's lines of a row"]
        if memory := self.memory():
            text.globals.append(f"smem = shared({', '.join(f'{one}={what}' for one, what in memory.items())})")
            text.kernel.append(f"{', '.join(memory) if len(memory) > 1 else f'({next(iter(memory))},)'} = smem.open()")
        text.kernel.append(f"{self.first}, line = int32(cuda.blockIdx.x), PART.rows * int32(cuda.threadIdx.x // 32)")
        for late in (False, True):
            text.kernel += [FOLLOW] * late
            those = [v for v in vectors if (v not in kernel.ahead) == late and not kernel.sums]
            text.kernel += [f"{name[v]} = {self.loaded(v, 'line, 0')}" for v in those]
        text.kernel += [self.load(n) for n in numbers if n.ndim]
        if any(map(self.kernel.filled, self.reductions)):
            text.kernel.append(f"lines = {array(x)}.shape[1]")
        text.kernel += ["col, step = PART.cols * line, PART.cols"] * bool(self.drawn)
        self.writer.names |= {v: self.widened(name[v]) for v in vectors}
        body = list[str]()
        for level in self.levels():
            body += self.reduce(level, "tile")
        body += self.stores("row, line, 0", "store_unordered" if self.unordered else "store")
        self.rows(tiles, body)
        text.before.insert(0, f"rows, lines = {x}.shape[0], {self.cut(x)}")
        text.launch += f", 32 * WARPS{', shared=smem' * bool(memory)}, early=True"
        shaped = [
            (array(name[one]), f"{name[one]}.reshape({self.lead(one)}*lines)" if along(one) else name[one])
            for one in (*tiles, *vectors, *kernel.roots)
        ]
        given = [(array(name[n]) if n.ndim else name[n], name[n]) for n in numbers]
        columns = [("columns", f"float({x}.shape[1])")] if self.lengths else []
        text.arguments = [*shaped, *self.counted, *columns, *given, *self.told]

    def folded(self, x: Term, fold: str = "tile") -> str:
        """See Writing. Beyond a row's end there are whole lines to cut off."""
        written = self.writer.expression(x.args[0])
        if self.kernel.filled(x):
            written = f"lower_fill({written}, lines - line, {NOTHING[x.operation][1]})"
        return f"{fold}_{x.operation}({written})"

    def memory(self) -> dict[str, str]:
        """{name: type} of what lies in shared memory."""
        return {"scratch": f"sv({-(-4 * self.kernel.warps // 16) * 16}, fp32)"} if self.reductions else {}

    def cut(self, x: str) -> str:
        """The expression (lines of a row, columns of a line) for an array; those of a block's tiles if no row may be
        shorter."""
        return "(WARPS * PART.rows, PART.cols)" if self.kernel.whole else f"({x}.shape[1] // {self.part}, {self.part})"

    def lead(self, x: Term) -> str:
        """The first part of the shape of an array whose rows are cut into lines."""
        return "rows, " * is_tile(x)

    def loaded(self, x: Term, at: str) -> str:
        """The expression that reads a tile or a vector."""
        return f"{'load_unordered' if self.unordered else 'load'}({array(self.parameters[x])}, PART, ({at}))"

    def widened(self, written: str) -> str:
        """The expression of what was read in the dtype that is computed with."""
        return written if self.kernel.dtype == "fp32" else f"fp32({written})"

    first = "following"  # what a block's number is called
    counted: Sequence[tuple[str, str]] = (("rows", "rows"),)  # the kernel's parameter that ends it

    def extents(self) -> list[str]:
        """The line that defines WARPS and BLOCKS; also sets the launch's bounds."""
        blocks = resident(self.kernel.registers(type(self))) // self.kernel.warps
        self.text.bounds = "32 * WARPS, BLOCKS"
        return [f"WARPS, BLOCKS = {self.kernel.warps}, {blocks}  # of a block, of a multiprocessor"]

    def rows(self, tiles: list[Term], body: list[str]) -> None:
        """Write the loop over a block's rows, and how many blocks are launched."""
        name, text = self.parameters, self.text
        x = name[tiles[0]]
        text.kernel += [f"next_{name[t]} = {self.loaded(t, 'following, line, 0')}" for t in tiles]
        lines = [f"row, {name[t]} = following, {self.widened('next_' + name[t])}" for t in tiles[:1]]
        lines += [f"{name[t]} = {self.widened('next_' + name[t])}" for t in tiles[1:]]
        lines += ["following += int32(cuda.gridDim.x)", "at = min(following, int32(rows - 1))"]
        lines += [f"next_{name[t]} = {self.loaded(t, 'at, line, 0')}" for t in tiles]
        text.kernel += ["while following < rows:", *(f"    {line}" for line in (*lines, *body))]
        text.launch = f"tiles.persistent_blocks(rows, {x}, BLOCKS)"


class NarrowFoldedRows(FoldedRows):
    """Folded rows with half as many columns for each warp, for widths at which this leaves fewer warps idle."""

    part = 32
    columns = FOLD * part


class SingleRows(FoldedRows):
    """A row is a tile, and a block has no other: while one of the many small blocks waits, others work."""

    part = 32
    columns, says = FOLD * part, "are tiles of lines, a block's only one each"
    first = "row"
    counted = ()

    def extents(self) -> list[str]:
        self.text.bounds = "32 * WARPS, 1"
        return [f"WARPS = {self.kernel.warps}  # of a block"]

    def rows(self, tiles: list[Term], body: list[str]) -> None:
        self.text.kernel += [f"{self.parameters[t]} = {self.widened(self.loaded(t, 'row, line, 0'))}" for t in tiles]
        self.text.kernel += body
        self.text.launch = "rows"
