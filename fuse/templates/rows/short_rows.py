"""Row maps of rows that one warp holds, such as those of heads: see row_map.py for the forms.

sixteen rows per warp:   tiles as wide as a row, so that no tile reaches past it, and no warp waits for another"""

from __future__ import annotations

from ...language.graph import has_columns, is_index, is_matrix
from ...language.names import array
from ...language.terms import Term
from ...writing.kernel_text import scalar_load
from .row_map_text import FOLLOW, RowMapWriter


class ShortRows(RowMapWriter):
    """Sixteen rows per warp. step: the width must be a multiple of it. most: the most columns of all tiles together. warps: of
    a block. blocks: of a multiprocessor, at least, which bounds the registers of a lane."""

    rows, step, most, warps, blocks = 16, 32, 256, 4, 1
    description = "stay in registers, sixteen rows per warp"

    @property
    def unordered(self) -> bool:  # type: ignore[override]
        """May columns be read in any order? Not if a column's number is needed."""
        return self.kernel.allows_unordered and not self.needs_column_index

    def write(self) -> None:
        kernel, text, name = self.kernel, self.text, self.parameters
        self.writer.names |= dict.fromkeys(self.lengths, "TILE.cols")
        text.bounds = "32 * WARPS, BLOCKS"
        text.globals.append(f"WARPS, BLOCKS = {self.warps}, {self.blocks}  # of a block, of a multiprocessor at least")
        text.globals.append(f"TILE = rt({self.rows}, {kernel.width}, {kernel.dtype})  # a warp's, rows as wide as the array's")
        text.globals += [f"PLACES = rt({self.rows}, {kernel.width}, fp32)"] * (
            self.needs_column_index or any(map(is_index, kernel.leaves))
        )
        text.kernel += [FOLLOW, "row = TILE.rows * int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // 32)"]
        text.kernel += ["column = col_index(PLACES.row_vec)"] * self.needs_column_index
        text.kernel += [self.load(x) for x in kernel.leaves if x.ndim]
        for level in self.levels():
            text.kernel += self.writer.assignments([x.args[0] for x in level], self.parameters.values(), kernel.roots)
            for x in level:
                row_value = self.fold_tile(x)
                text.kernel.append(f"{self.name_reduction(x)} = {row_value}")
        text.kernel += self.write_stores("row, 0", "store_unordered" if self.unordered else "store")
        tall = next(x for x in (*kernel.leaves, *kernel.roots) if x.ndim == 2 and x.axes[0])
        text.launch = f"-(-{name[tall]}.shape[0] // (TILE.rows * WARPS)), 32 * WARPS, overlaps_previous=True"
        wide = [(x, f"{name[x]}.reshape(-1, TILE.cols)") for x in (*kernel.leaves, *kernel.roots) if is_matrix(x)]
        others = [(x, name[x]) for x in (*self.leaves, *kernel.roots) if not is_matrix(x)]
        text.arguments = [(array(name[x]) if x.ndim else name[x], expression) for x, expression in (*wide, *others)]

    def load(self, x: Term) -> str:
        name = self.parameters[x]
        if has_columns(x):
            read, kind = f"load{'_unordered' * self.unordered}", "TILE" if is_matrix(x) else "TILE.row_vec"
            at = "row, 0" if is_matrix(x) else "0," if x.ndim == 1 else "0, 0"
            read = f"{read}({array(name)}, {kind}, ({at}))"
            read = read if self.kernel.dtype == "fp32" else f"fp32({read})"
            broadcast = kind != "TILE" and self.kernel.broadcasts
            return f"{name} = {f'zeros(rt(TILE.rows, TILE.cols, fp32)) + {read}' if broadcast else read}"
        if is_index(x):
            return f"{name} = {array(name)}[row_index(PLACES.col_vec) + row]"
        if not x.axes[0]:
            return f"{name} = {scalar_load(array(name), ', '.join('0' * x.ndim), x.stored_dtype(''))}"
        return f"{name} = load({array(name)}, rt({self.rows}, 16, fp32).col_vec, (row, 0), cols=0)"
