"""Row maps without reductions, of rows of whole lines: see row_map.py for the forms.

element by element:   512 consecutive elements of a row are a warp's tile"""

from __future__ import annotations

from ...language.graph import has_columns, is_matrix
from ...language.names import array
from ...language.terms import Term
from ...writing.kernel_text import scalar_load
from .folded_rows import FOLD, FoldedRows
from .row_map_text import FOLLOW


class ElementwiseRows(FoldedRows):
    """Elementwise maps: a warp works on 512 elements of a row, and no warp waits for another."""

    part, warps = 32, 8
    columns, description = FOLD * part, "are read in tiles of 512 elements"

    def write(self) -> None:
        kernel, text, name = self.kernel, self.text, self.parameters
        tiles = [x for x in kernel.leaves if is_matrix(x)]
        vectors = [x for x in kernel.leaves if has_columns(x) and x not in tiles]
        numbers = [x for x in kernel.leaves if not has_columns(x)]
        text.globals += [f"WARPS = {kernel.warps}  # of a block"]
        text.globals += [f"PART = rt({FOLD}, {self.part}, {kernel.dtype})  # a warp's, lines of a row"]
        warp = "int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // 32)"
        text.kernel += [FOLLOW, f"row, part = divmod({warp}, parts)", "line = PART.rows * part"]
        text.kernel += [self.load(n) for n in numbers if n.ndim and not n.axes[0]]
        body = [f"{name[t]} = {self.widen(self.load_expression(t, 'row, line, 0'))}" for t in tiles]
        body += [f"{name[v]} = {self.widen(self.load_expression(v, 'line, 0'))}" for v in vectors]
        body += [self.load(n) for n in numbers if n.ndim and n.axes[0]]
        body += self.write_stores("row, line, 0", "store_unordered" if self.unordered else "store")
        text.kernel += ["if row < rows:", *(f"    {line}" for line in body)]
        x = name[tiles[0]]
        text.before = [f"rows, lines, parts = {x}.shape[0], {self.shape_in_lines(x)}, -(-{x}.shape[1] // {self.columns})"]
        text.launch = "-(-rows * parts // WARPS), 32 * WARPS, overlaps_previous=True"
        wide = [(one, "rows, " * (one not in vectors)) for one in (*tiles, *vectors, *kernel.roots)]
        shaped = [(array(name[one]), f"{name[one]}.reshape({lead}*lines)") for one, lead in wide]
        scalars = [(array(name[n]) if n.ndim else name[n], name[n]) for n in numbers]
        text.arguments = [*shaped, ("rows", "rows"), ("parts", "parts"), *scalars]

    def load(self, x: Term) -> str:
        """The line that reads a leaf. If it is one number for each row, the number of the warp's row."""
        if not x.axes[0]:
            return super().load(x)
        return f"{self.parameters[x]} = {scalar_load(array(self.parameters[x]), 'row, 0', x.stored_dtype(''))}"
