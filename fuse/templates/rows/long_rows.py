"""Row maps of rows too long for a block's registers, one row per block: see row_map.py for the forms.

    one after the other:   tiles of 16 consecutive lines of a row's elements

As many blocks run as there are rows, where sixteen rows per block would leave most multiprocessors idle, and the rows that are
read at a time fit L2, so that all passes but the first find them there."""

from __future__ import annotations

from ...language.graph import between, has_columns, is_index, is_matrix
from ...language.names import array
from ...language.term_views import view_base
from ...language.terms import Term
from ...writing.kernel_text import scalar_load
from .row_map_text import FOLLOW, IDENTITY_ELEMENTS
from .sixteen_rows import LEAST, LoopedRows


class LongRows(LoopedRows):
    """One row per block, read again for each level of reductions, in tiles of `rows` lines. lines: the possible columns of a
    line; a row must be whole lines."""

    rows, lines, part = 16, (64, 32), 32
    description = "are read {} times, once from memory and then from L2, one row per block"

    @classmethod
    def line(cls, width: int) -> int:
        """The columns of a line."""
        return next(n for n in cls.lines if not width % n)

    @classmethod
    def most(cls, writes: bool) -> int:
        """The most warps of a block. writes: is one tile read, and one written?"""
        return 16 if writes else 8

    @property
    def unordered(self) -> bool:  # type: ignore[override]
        """May columns be read in the order in which they lie? Not if a column's number is needed."""
        return self.kernel.allows_unordered and not self.needs_column_index

    def write_prologue(self) -> None:
        kernel, text, name = self.kernel, self.text, self.parameters
        self.writer.names |= dict.fromkeys(self.lengths, "columns")
        self.writer.forms["is_column"] = lambda x: "column == {} - before"
        tiles, line = [x for x in kernel.leaves if is_matrix(x)], self.line(kernel.width)
        inside = between(kernel.roots, kernel.leaves)
        self.picks = [x for x in self.reductions if _is_pick(x) and not any(x.args[0] in y.args for y in inside if y is not x)]
        masked = {x.args[0] for x in self.picks}
        self.needs_column_index = any(y.operation == "is_column" for x in inside if x not in masked for y in x.args)
        wide = [x for x in (*kernel.leaves, *kernel.roots) if has_columns(x)]
        numbers = [x for x in self.leaves if not has_columns(x)]
        self.blocks = kernel.blocks
        several = self.blocks > 1
        constants = f"WARPS, BLOCKS = {kernel.warps}, {self.blocks}  # of a block, of a row" if several else ""
        text.globals.append(constants or f"WARPS = {kernel.warps}  # of a block")
        text.globals.append(f"TILE = rt({self.rows}, {line}, {kernel.dtype})  # a warp's, lines of a row")
        if self.needs_column_index:
            text.globals.append(f"PLACES = rt({self.rows}, {line}, fp32)")
        if self.reductions:
            parts = ", parts=sv(16, fp32)" * several
            text.globals.append(f"smem = shared(scratch=sv({-(-4 * kernel.warps // 16) * 16}, fp32){parts})")
            text.kernel.append(f"{'scratch, parts' if several else '(scratch,)'} = smem.open()")
        text.kernel += [FOLLOW, f"row = int32(cuda.blockIdx.x{' // BLOCKS' * several})"]
        x = name[tiles[0]]
        text.before = [f"rows, lines = {x}.shape[0], ({x}.shape[1] // {line}, {line})"]
        text.launch = f"rows{' * BLOCKS' * several}, 32 * WARPS{', shared=smem' * bool(self.reductions)}"
        text.launch += f"{', cluster=BLOCKS' * several}, overlaps_previous=True"
        shaped = [(array(name[one]), f"{name[one]}.reshape({'rows, ' * is_matrix(one)}*lines)") for one in wide]
        others = [
            (array(name[one]) if one.ndim else name[one], name[one])
            for one in (*numbers, *kernel.roots)
            if not has_columns(one)
        ]
        columns = [("columns", f"float({x}.shape[1])")] if self.lengths else []
        picked_leaves = [
            x for x in between([x.args[0].args[1] for x in self.picks], kernel.leaves, with_leaves=True) if x in wide
        ]
        for one in picked_leaves:  # element by element
            view = f"{name[one]}.reshape({'rows, ' * is_matrix(one)}-1, 1)"
            shaped.append((array(self.picked_name(one)), view))
        text.arguments = [*shaped, *others, *columns]

    def picked_name(self, x: Term) -> str:
        """The name of a leaf's element in the column that is picked."""
        return f"{self.parameters[x]}_there"

    def reduce_in_a_loop(self, terms: list[Term]) -> None:
        """Write the loops for the reductions that are wanted. An element that is picked needs no loop."""
        for x in terms:
            if x in self.picks:
                self.pick(x)
        super().reduce_in_a_loop([x for x in terms if x not in self.picks])

    def reduce_as_softmax(self, greatest: Term, total: Term, rest: list[Term]) -> None:
        for x in rest:
            if x in self.picks:
                self.pick(x)
        super().reduce_as_softmax(greatest, total, [x for x in rest if x not in self.picks])

    def pick(self, x: Term) -> None:
        """Write the lines that compute the element that an index picks, 0 if there is none."""
        index, inner = self.writer.expression(x.args[0].args[0].args[0]), x.args[0].args[1]
        needed = [y for y in between([inner], [*self.kernel.leaves, *self.writer.names], with_leaves=True) if has_columns(y)]
        before, lines = dict(self.writer.names), list[str]()
        for y in (y for y in needed if y in self.kernel.leaves):
            self.writer.names[y] = self.picked_name(y)
            at, dtype = f"{'row, ' * is_matrix(y)}{index}, 0", view_base(y).stored_dtype(self.kernel.default_dtype)
            lines.append(f"    {self.picked_name(y)} = {scalar_load(array(self.picked_name(y)), at, dtype)}")
        written, self.writer.names = self.writer.expression(inner), before
        name = self.name_reduction(x)
        self.text.kernel += [f"{name} = {self.identity_element('sum')}", f"if 0 <= {index} < TILE.cols * lines:"]
        self.text.kernel += [*lines, f"    {name} = float32({written})"]

    def width(self, needed: bool) -> None:
        """Write the line that reads how many lines a row has."""
        wide = next(x for x in self.kernel.leaves if is_matrix(x))
        self.text.kernel.append(f"lines = {array(self.parameters[wide])}.shape[1]")

    def identity_element(self, kind: str) -> str:
        """The number that a reduction starts from."""
        return f"float32({LEAST if kind == LEAST else IDENTITY_ELEMENTS[kind][1]})"

    def fold_tile(self, x: Term, fold: str = "tile") -> str:
        written = self.writer.expression(x.args[0])
        if self.kernel.needs_fill(x):
            written = f"lower_fill({written}, lines - line, {IDENTITY_ELEMENTS[x.operation][1]})"
        return f"tile_{x.operation}({written})"

    def load(self, x: Term) -> str:
        name = self.parameters[x]
        if has_columns(x):
            read = "load_unordered" if self.unordered else "load"
            read = f"{read}({array(name)}, TILE, ({'row, ' * is_matrix(x)}line, 0))"
            return f"{name} = {read if self.kernel.dtype == 'fp32' else f'fp32({read})'}"
        if is_index(x):
            return f"{name} = {array(name)}[row]"
        return f"{name} = {scalar_load(array(name), 'row, 0', x.stored_dtype(''))}" if x.axes[0] else super().load(x)

    def write_stores(self, at: str = "row, line, 0", store: str = "") -> list[str]:
        return super().write_stores(at, "store_unordered" if self.unordered else "store")

    def store(self, x: Term, written: str, at: str, store: str) -> list[str]:
        """The lines that store a result. A result with one number for each row and 16 bits is stored as a vector of which one
        element counts."""
        if is_matrix(x):
            return super().store(x, written, at, store)
        if x.stored_dtype(self.kernel.default_dtype) == "float32":
            return ["if first == 0:", f"    {array(self.parameters[x])}[row, 0] = {written}"]
        vector = f"zeros(rt(16, 16, fp32).col_vec) + ({written})"
        return ["if first == 0:", f"    store({array(self.parameters[x])}, {vector}, (row, 0), cols=1)"]

    def loop(self, body: list[str]) -> None:
        step = f"TILE.rows * WARPS{' * BLOCKS' * (self.blocks > 1)}"
        self.text.kernel += [f"for line in range(first, lines, {step}):", *(f"    {one}" for one in body)]

    def reduce_across_warps(self, kind: str, x: str) -> str:
        """The expression that reduces across the warps of a block, and across the blocks of a row."""
        in_block = super().reduce_across_warps(kind, x)
        return f"{kind}_over_cluster({in_block}, parts, BLOCKS)" if self.blocks > 1 else in_block

    @property
    def loop_start(self) -> str:
        if self.blocks > 1:
            return "TILE.rows * int32(WARPS * cluster.rank() + cuda.threadIdx.x // 32)"
        return "TILE.rows * int32(cuda.threadIdx.x // 32)" if self.kernel.warps > 1 else "0"

    place = "before, column = TILE.cols * (row_index(PLACES.col_vec) + line), col_index(PLACES.row_vec)"


def _is_pick(x: Term) -> bool:
    """Is the term a sum of a row in which all elements but one column's are masked to 0?"""
    if x.operation != "sum" or x.args[0].operation != "where" or x.args[0].args[0].operation != "is_column":
        return False
    return x.args[0].args[2].operation == "number" and x.args[0].args[2].attr == 0
