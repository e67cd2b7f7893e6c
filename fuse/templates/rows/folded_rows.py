"""Row maps of rows that are cut into lines, which make a block's tile: see row_map.py for the forms.

folded:        a block goes from row to row, and loads the next row while it works on one narrow folded: the same with half as
many columns per warp single:        one row per block"""

from __future__ import annotations

from collections.abc import Sequence

from ...language.graph import has_columns, is_matrix
from ...language.names import array
from ...language.terms import Term
from .row_map_text import FOLLOW, IDENTITY_ELEMENTS, RowMapWriter

FOLD = 16  # lines of a row in a warp's tile
REGISTERS = 2048  # registers of a multiprocessor, for each lane of a warp


def resident_warps(registers: int) -> int:
    """How many warps with so many registers per lane fit a multiprocessor, a quarter of them in each of its four schedulers."""
    return 4 * (REGISTERS // 4 // registers)


class FoldedRows(RowMapWriter):
    """A row is a tile: a block works on one row at a time, and the next one is loaded meanwhile. part: the columns of a line; a
    warp has 16 consecutive lines of a row."""

    draw, part = ("bernoulli_of_row", "row, col, step"), 64
    columns, description = FOLD * part, "are tiles of lines, loaded one row ahead"

    def store(self, x: Term, written: str, at: str, store: str) -> list[str]:
        """The lines that store a result. A result with one number for each row and 16 bits is stored as a vector of which the
        first element counts."""
        output = array(self.parameters[x])
        if is_matrix(x):
            return super().store(x, written, at, store)
        if x.stored_dtype(self.kernel.dtype) in ("fp32", "float32"):
            return ["if line == 0:", f"    {output}[row, 0] = {written}"]
        return ["if line == 0:", f"    store({output}, zeros(rt(16, 16, fp32).col_vec) + ({written}), (row, 0), cols=1)"]

    @property
    def unordered(self) -> bool:  # type: ignore[override]
        """May columns be read in any order? Past a row's end whole lines are masked, so no column's number is needed."""
        return self.kernel.allows_unordered

    def write(self) -> None:
        kernel, text, name = self.kernel, self.text, self.parameters
        tiles = [x for x in kernel.leaves if is_matrix(x)]
        vectors = [x for x in kernel.leaves if has_columns(x) and not is_matrix(x)]
        numbers = [x for x in self.leaves if not has_columns(x)]
        self.writer.names |= dict.fromkeys(self.lengths, "columns")
        x = name[tiles[0]]
        text.globals += self.block_constants()
        text.globals += [f"PART = rt({FOLD}, {self.part}, {kernel.dtype})  # a warp's lines of a row"]
        if shared_memory := self.shared_memory():
            text.globals.append(f"smem = shared({', '.join(f'{one}={item}' for one, item in shared_memory.items())})")
            text.kernel.append(
                f"{', '.join(shared_memory) if len(shared_memory) > 1 else f'({next(iter(shared_memory))},)'} = smem.open()"
            )
        text.kernel.append(f"{self.row_variable}, line = int32(cuda.blockIdx.x), PART.rows * int32(cuda.threadIdx.x // 32)")
        for late in (False, True):
            text.kernel += [FOLLOW] * late
            early_vectors = [v for v in vectors if (v not in kernel.early_reads) == late and not kernel.partial_sums]
            text.kernel += [f"{name[v]} = {self.load_expression(v, 'line, 0')}" for v in early_vectors]
        text.kernel += [self.load(n) for n in numbers if n.ndim]
        if any(map(self.kernel.needs_fill, self.reductions)):
            text.kernel.append(f"lines = {array(x)}.shape[1]")
        text.kernel += ["col, step = PART.cols * line, PART.cols"] * bool(self.drawn)
        self.writer.names |= {v: self.widen(name[v]) for v in vectors}
        body = list[str]()
        for level in self.levels():
            body += self.reduce(level, "tile")
        body += self.write_stores("row, line, 0", "store_unordered" if self.unordered else "store")
        self.write_loop(tiles, body)
        text.before.insert(0, f"rows, lines = {x}.shape[0], {self.shape_in_lines(x)}")
        text.launch += f", 32 * WARPS{', shared=smem' * bool(shared_memory)}, overlaps_previous=True"
        shaped = [
            (array(name[one]), f"{name[one]}.reshape({self.leading_shape(one)}*lines)" if has_columns(one) else name[one])
            for one in (*tiles, *vectors, *kernel.roots)
        ]
        scalars = [(array(name[n]) if n.ndim else name[n], name[n]) for n in numbers]
        columns = [("columns", f"float({x}.shape[1])")] if self.lengths else []
        text.arguments = [*shaped, *self.loop_bound, *columns, *scalars, *self.extra_arguments]

    def fold_tile(self, x: Term, fold: str = "tile") -> str:
        """The reduction of a warp's tile. Past a row's end there are whole lines to mask."""
        written = self.writer.expression(x.args[0])
        if self.kernel.needs_fill(x):
            written = f"lower_fill({written}, lines - line, {IDENTITY_ELEMENTS[x.operation][1]})"
        return f"{fold}_{x.operation}({written})"

    def shared_memory(self) -> dict[str, str]:
        """{name: type} of the arrays in shared memory."""
        return {"scratch": f"sv({-(-4 * self.kernel.warps // 16) * 16}, fp32)"} if self.reductions else {}

    def shape_in_lines(self, x: str) -> str:
        """The expression (lines of a row, columns of a line) for an array; those of a block's tiles if no row may be
        shorter."""
        return (
            "(WARPS * PART.rows, PART.cols)" if self.kernel.has_fixed_width else f"({x}.shape[1] // {self.part}, {self.part})"
        )

    def leading_shape(self, x: Term) -> str:
        """The first part of the shape of an array whose rows are cut into lines."""
        return "rows, " * is_matrix(x)

    def load_expression(self, x: Term, at: str) -> str:
        """The expression that reads a tile or a vector."""
        return f"{'load_unordered' if self.unordered else 'load'}({array(self.parameters[x])}, PART, ({at}))"

    def widen(self, written: str) -> str:
        """The expression of a loaded value in the dtype of the computation."""
        return written if self.kernel.dtype == "fp32" else f"fp32({written})"

    row_variable = "following"  # the kernel's variable that starts with the block's number
    loop_bound: Sequence[tuple[str, str]] = (("rows", "rows"),)  # the parameter that ends the loop over rows

    def block_constants(self) -> list[str]:
        """The line that defines WARPS and BLOCKS; also sets the launch's bounds."""
        blocks = resident_warps(self.kernel.registers(type(self))) // self.kernel.warps
        self.text.bounds = "32 * WARPS, BLOCKS"
        return [f"WARPS, BLOCKS = {self.kernel.warps}, {blocks}  # of a block, of a multiprocessor"]

    def write_loop(self, tiles: list[Term], body: list[str]) -> None:
        """Write the loop over a block's rows, and the number of blocks of the launch."""
        name, text = self.parameters, self.text
        x = name[tiles[0]]
        text.kernel += [f"next_{name[t]} = {self.load_expression(t, 'following, line, 0')}" for t in tiles]
        lines = [f"row, {name[t]} = following, {self.widen('next_' + name[t])}" for t in tiles[:1]]
        lines += [f"{name[t]} = {self.widen('next_' + name[t])}" for t in tiles[1:]]
        lines += ["following += int32(cuda.gridDim.x)", "at = min(following, int32(rows - 1))"]
        lines += [f"next_{name[t]} = {self.load_expression(t, 'at, line, 0')}" for t in tiles]
        text.kernel += ["while following < rows:", *(f"    {line}" for line in (*lines, *body))]
        text.launch = f"tiles.persistent_blocks(rows, {x}, BLOCKS)"


class NarrowFoldedRows(FoldedRows):
    """Folded rows with half as many columns per warp, for widths at which this leaves fewer warps idle."""

    part = 32
    columns = FOLD * part


class SingleRows(FoldedRows):
    """A row is a tile, and a block has no other: while one of the many small blocks waits, others work."""

    part = 32
    columns, description = FOLD * part, "are tiles of lines, one row per block"
    row_variable = "row"
    loop_bound = ()

    def block_constants(self) -> list[str]:
        self.text.bounds = "32 * WARPS, 1"
        return [f"WARPS = {self.kernel.warps}  # of a block"]

    def write_loop(self, tiles: list[Term], body: list[str]) -> None:
        self.text.kernel += [f"{self.parameters[t]} = {self.widen(self.load_expression(t, 'row, line, 0'))}" for t in tiles]
        self.text.kernel += body
        self.text.launch = "rows"
