"""Row maps that also sum over rows, whose partial sums column_sums.py adds up: see row_map.py for the forms.

row by row:   y = f(x[row, :], ...)  and  partial_sums[:] += g(x[row, :], ...), over the rows of a block"""

from __future__ import annotations

from ...language.graph import has_columns
from ...language.names import array
from ...language.terms import Term
from .folded_rows import FOLD, FoldedRows


class SummedRows(FoldedRows):
    """A block goes from row to row and accumulates sums over its rows. The sums stay in registers, or in shared memory if the
    map takes all registers. They are written in the order in which their columns were read, unordered, and column_sums.py reads
    them in that order. Vectors are read anew for each row, from L1, because no registers are left for them, nor for a
    prefetched row.

    warps: of a multiprocessor. most: how many levels of reductions and results there may be beside sums in registers."""

    part, warps, most = 32, 16, 5
    columns, description = FOLD * part, "are tiles of lines, several rows per block, which accumulates their sums over rows"
    row_variable = "row"

    @property
    def sums_in_shared(self) -> bool:
        """Do the sums lie in shared memory?"""
        return len(self.levels()) + len(self.kernel.roots) > self.most

    def block_constants(self) -> list[str]:
        self.text.bounds = "32 * WARPS, BLOCKS"
        warps = self.kernel.warps
        return [f"WARPS, BLOCKS = {warps}, {self.warps // warps}  # of a block, of a multiprocessor"]

    def shared_memory(self) -> dict[str, str]:
        sums = [self.parameters[x] for x in self.kernel.partial_sums if self.sums_in_shared]
        return super().shared_memory() | dict.fromkeys(sums, f"st({FOLD} * WARPS, {self.part}, fp32)")

    def leading_shape(self, x: Term) -> str:
        return f"{self.parameters[x]}.shape[0], " if x in self.kernel.partial_sums else super().leading_shape(x)

    def sum_expression(self, x: Term) -> str:
        """The expression of a sum so far, as a tile in registers."""
        return f"load({self.parameters[x]}, SUMS)" if self.sums_in_shared else self.parameters[x]

    def store(self, x: Term, written: str, at: str, store: str) -> list[str]:
        """The lines that store a result. Sums over rows are not stored for each row but accumulated."""
        if x not in self.kernel.partial_sums:
            return super().store(x, written, at, store)
        name, total = self.parameters[x], f"{self.sum_expression(x)} + {self.writer.expression(x.args[0])}"
        return [f"store({name}, {total})" if self.sums_in_shared else f"{name} = {total}"]

    def stored_expression(self, x: Term, store: str) -> str:
        return "" if x in self.kernel.partial_sums else super().stored_expression(x, store)

    def write_loop(self, tiles: list[Term], body: list[str]) -> None:
        text, name, sums = self.text, self.parameters, self.kernel.partial_sums
        text.globals.append(f"SUMS = rt({FOLD}, {self.part}, fp32)")
        if self.sums_in_shared:
            for x in sums:
                text.kernel.append(f"{name[x]} = subtile({name[x]}, SUMS.rows, int32(cuda.threadIdx.x // 32))")
                text.kernel.append(f"store({name[x]}, zeros(SUMS))")
        else:
            text.kernel.append(f"{', '.join(name[x] for x in sums)} = {', '.join(['zeros(SUMS)'] * len(sums))}")
        vectors = [x for x in self.kernel.leaves if has_columns(x) and x not in tiles]
        lines = [f"{name[t]} = {self.widen(self.load_expression(t, 'row, line, 0'))}" for t in tiles]
        lines += [f"{name[v]} = {self.load_expression(v, 'line, 0')}" for v in vectors]
        text.kernel += ["while row < rows:", *(f"    {line}" for line in (*lines, *body, "row += int32(cuda.gridDim.x)"))]
        text.kernel += [
            f"store_unordered({array(name[x])}, {self.sum_expression(x)}, (int32(cuda.blockIdx.x), line, 0))" for x in sums
        ]
        text.launch = f"{name[sums[0]]}.shape[0]"
