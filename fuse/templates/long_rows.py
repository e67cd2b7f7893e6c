"""Row maps of rows too long for a block's registers, a row a block: see row_map.py for the forms.

    one after the other:   tiles of 16 lines of a row's elements, which lie one behind the other in memory

As many blocks run as there are rows, where sixteen rows of a block would leave most multiprocessors idle, and the rows that
are read at a time fit L2, so that all passes but the first find them there."""

from __future__ import annotations

from ..graph import along, is_index, is_tile
from ..module import array, one_number
from ..terms import Term
from .row_map_text import FOLLOW, LEAST, NOTHING, Looped


class Long(Looped):
    """A row of a block, read again and again, in tiles of `rows` lines of `line` columns."""

    rows, line, most_warps = 16, 32, 16
    columns, says = rows * line, "are a block's only one each, read {} times, once from memory and then from L2"

    @property
    def unordered(self) -> bool:  # type: ignore[override]
        """May columns come as they are read? Not where somebody asks for their numbers."""
        return self.kernel.alike and not self.places

    def begin(self) -> None:
        """See Writing."""
        kernel, text, name = self.kernel, self.text, self.parameters
        self.writer.names |= dict.fromkeys(self.lengths, "columns")
        self.writer.forms["is_column"] = lambda x: "place == {} - before"
        tiles = [x for x in kernel.leaves if is_tile(x)]
        wide = [x for x in (*kernel.leaves, *kernel.roots) if along(x)]
        numbers = [x for x in self.leaves if not along(x)]
        text.globals.append(f"WARPS = {kernel.warps}  # of a block")
        text.globals.append(f"TILE = rt({self.rows}, {self.line}, {kernel.dtype})  # a warp's, lines of a row")
        if self.places:
            text.globals.append(f"PLACES = rt({self.rows}, {self.line}, fp32)")
        if self.reductions:
            text.globals.append(f"smem = shared(scratch=sv({-(-4 * kernel.warps // 16) * 16}, fp32))")
            text.kernel.append("(scratch,) = smem.open()")
        text.kernel += [FOLLOW, "row = int32(cuda.blockIdx.x)"]
        x = name[tiles[0]]
        text.before = [f"rows, lines = {x}.shape[0], ({x}.shape[1] // {self.line}, {self.line})"]
        text.launch = f"rows, 32 * WARPS{', shared=smem' * bool(self.reductions)}, early=True"
        shaped = [(array(name[one]), f"{name[one]}.reshape({'rows, ' * is_tile(one)}*lines)") for one in wide]
        others = [
            (array(name[one]) if one.ndim else name[one], name[one]) for one in (*numbers, *kernel.roots) if not along(one)
        ]
        columns = [("columns", f"float({x}.shape[1])")] if self.lengths else []
        text.arguments = [*shaped, *others, *columns]

    def width(self, needed: bool) -> None:
        """The line that says how many lines there are."""
        wide = next(x for x in self.kernel.leaves if is_tile(x))
        self.text.kernel.append(f"lines = {array(self.parameters[wide])}.shape[1]")

    def nothing(self, kind: str) -> str:
        """See Looped. A number."""
        return f"float32({LEAST if kind == LEAST else NOTHING[kind][1]})"

    def folded(self, x: Term, fold: str = "tile") -> str:
        """See Writing."""
        written = self.writer.expression(x.of[0])
        if self.kernel.filled(x):
            written = f"lower_fill({written}, lines - line, {NOTHING[x.operation][1]})"
        return f"tile_{x.operation}({written})"

    def load(self, x: Term) -> str:
        """See Writing."""
        name = self.parameters[x]
        if along(x):
            read = "load_unordered" if self.unordered else "load"
            read = f"{read}({array(name)}, TILE, ({'row, ' * is_tile(x)}line, 0))"
            return f"{name} = {read if self.kernel.dtype == 'fp32' else f'fp32({read})'}"
        if is_index(x):
            return f"{name} = {array(name)}[row]"
        return f"{name} = {one_number(array(name), 'row, 0', x.held_as(''))}" if x.names[0] else super().load(x)

    def stores(self, at: str = "row, line, 0", store: str = "") -> list[str]:
        """See Writing."""
        return super().stores(at, "store_unordered" if self.unordered else "store")

    def store(self, x: Term, written: str, at: str, store: str) -> list[str]:
        """See Writing. Of one number a row: into 16 bits the first of a vector goes, of which the row has no more."""
        if is_tile(x):
            return super().store(x, written, at, store)
        if x.held_as(self.kernel.held) == "float32":
            return ["if first == 0:", f"    {array(self.parameters[x])}[row, 0] = {written}"]
        vector = f"zeros(rt(16, 16, fp32).col_vec) + ({written})"
        return ["if first == 0:", f"    store({array(self.parameters[x])}, {vector}, (row, 0), cols=1)"]

    def loop(self, body: list[str]) -> None:
        """See Looped."""
        self.text.kernel += ["for line in range(first, lines, TILE.rows * WARPS):", *(f"    {one}" for one in body)]

    first = "TILE.rows * int32(cuda.threadIdx.x // 32)"
    place = "before, place = TILE.cols * (row_index(PLACES.col_vec) + line), col_index(PLACES.row_vec)"
