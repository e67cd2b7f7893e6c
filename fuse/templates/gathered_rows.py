"""Row maps with sums over rows, which column_sums.py adds up: see row_map.py for the forms.

row by row:   y = f(x[row, :], ...)  and  total[:] += g(x[row, :], ...), of all rows that a block does"""

from __future__ import annotations

from ..graph import along
from ..names import array
from ..terms import Term
from .folded_rows import FOLD, FoldedRows


class SummedRows(FoldedRows):
    """Rows one after the other, and sums over all rows that a block works on. The sums stay in registers until they are
    written, or in shared memory if the map takes all registers. They are written in the order in which their columns were
    read, unordered, and column_sums.py reads them in that order. Vectors are read anew for each row, from L1, because no
    registers are left for them, nor for a row ahead.

    warps: of a multiprocessor. most: how many levels of reductions and results there may be beside sums in registers."""

    part, warps, most = 32, 16, 5
    columns, says = FOLD * part, "are tiles of lines, several of a block, which adds up their sums over rows"
    first = "row"

    @property
    def apart(self) -> bool:
        """Do the sums lie in shared memory?"""
        return len(self.levels()) + len(self.kernel.roots) > self.most

    def extents(self) -> list[str]:
        self.text.bounds = "32 * WARPS, BLOCKS"
        warps = self.kernel.warps
        return [f"WARPS, BLOCKS = {warps}, {self.warps // warps}  # of a block, of a multiprocessor"]

    def memory(self) -> dict[str, str]:
        sums = [self.parameters[x] for x in self.kernel.sums if self.apart]
        return super().memory() | dict.fromkeys(sums, f"st({FOLD} * WARPS, {self.part}, fp32)")

    def lead(self, x: Term) -> str:
        return f"{self.parameters[x]}.shape[0], " if x in self.kernel.sums else super().lead(x)

    def held(self, x: Term) -> str:
        """The expression of a sum so far, as a tile in registers."""
        return f"load({self.parameters[x]}, SUMS)" if self.apart else self.parameters[x]

    def store(self, x: Term, written: str, at: str, store: str) -> list[str]:
        """The lines that store a result. Sums over rows are not stored for each row: they stay where they are added up."""
        if x not in self.kernel.sums:
            return super().store(x, written, at, store)
        name, found = self.parameters[x], f"{self.held(x)} + {self.writer.expression(x.args[0])}"
        return [f"store({name}, {found})" if self.apart else f"{name} = {found}"]

    def rounded(self, x: Term, store: str) -> str:
        return "" if x in self.kernel.sums else super().rounded(x, store)

    def rows(self, tiles: list[Term], body: list[str]) -> None:
        text, name, sums = self.text, self.parameters, self.kernel.sums
        text.globals.append(f"SUMS = rt({FOLD}, {self.part}, fp32)")
        if self.apart:
            for x in sums:
                text.kernel.append(f"{name[x]} = subtile({name[x]}, SUMS.rows, int32(cuda.threadIdx.x // 32))")
                text.kernel.append(f"store({name[x]}, zeros(SUMS))")
        else:
            text.kernel.append(f"{', '.join(name[x] for x in sums)} = {', '.join(['zeros(SUMS)'] * len(sums))}")
        vectors = [x for x in self.kernel.leaves if along(x) and x not in tiles]
        lines = [f"{name[t]} = {self.widened(self.loaded(t, 'row, line, 0'))}" for t in tiles]
        lines += [f"{name[v]} = {self.loaded(v, 'line, 0')}" for v in vectors]
        text.kernel += ["while row < rows:", *(f"    {line}" for line in (*lines, *body, "row += int32(cuda.gridDim.x)"))]
        text.kernel += [f"store_unordered({array(name[x])}, {self.held(x)}, (int32(cuda.blockIdx.x), line, 0))" for x in sums]
        text.launch = f"{name[sums[0]]}.shape[0]"
