"""Products of many rows and few columns, up to 32: x is read at memory speed, and the products take no time beside that.

A block has 32 rows and eight warps. A warp has 16 rows and a part of every tile's columns, and the warps' sums are added at the
end: 4096 rows fill 128 multiprocessors. few_columns.jinja is the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...language.axes import Axis
from ...language.names import array
from ...language.terms import Term
from ...writing.kernel_text import DTYPES, KernelText
from .few_rows import MOST_ROWS
from .jinja_template import render
from .many_rows import ManyRows, ManyRowsSchedule
from .product_text import ProductWriter, read_expression

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_COLUMNS = 32


class FewColumns(ManyRows):
    """The kernel for products of many rows and few columns: see the module."""

    label = "few_columns"

    @classmethod
    def kernels_for(cls, root: Term, processors: int, few: int = MOST_ROWS) -> Iterator[Self]:
        """The kernels that compute a term, on a card with so many multiprocessors, if it has more rows than `few`."""
        if root.ndim == 2 and root.extents[1] <= MOST_COLUMNS and root.extents[0] > few:
            yield from (
                one for one in super().kernels_for(root, processors, few) if len(one.products) == 1 and not one.extension
            )

    def schedule_at(self, known: Mapping[Axis, Any]) -> ManyRowsSchedule:
        return super().schedule_at({})

    @property
    def fixed_extents(self) -> dict[Axis, int]:
        """The axes whose extents are in the kernel's text."""
        return {self.root.axes[1].root: self.columns} if self.root.axes[1] else {}

    def __str__(self):
        return f"few columns of {self.root}"

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        return ", ".join([f"a product of {self.columns} columns that reads {self.x} at memory speed", *self.stored_parts])

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        ((product, weight),) = self.products.items()
        x, w, y = parameters[self.x], parameters[weight.array], parameters[self.root]
        words = ProductWriter(
            self, parameters, local_names, ("acc", "at", "row", "wg", "warp", "band", "share", "selected", "column")
        )
        place = "row_index(ACC.col_vec) + at", "col_index(ACC.row_vec)"
        epilogue, written = words.epilogue({product: "acc"}, lambda y, name: read_expression(y, name, "ACC", "at", "0"), *place)
        arrays = [(array(x), f"tensor({x}, X)"), (array(w), f"tensor({w}, W)")]
        arrays += [(array(parameters[one]), parameters[one]) for one in (*self.epilogue_inputs, self.root)]
        arrays += words.selection.arguments if words.selection else []
        template_gaps = {
            "columns": -(-self.columns // 16) * 16, "dtype": DTYPES[self.dtype], "transposed": weight.transposed, "x": array(x),
            "w": array(w), "y": array(y), "epilogue": epilogue, "written": written, "bounds": "THREADS, 1",
            "arguments": [*arrays, ("steps", f"-(-{x}.shape[1] // X.cols)"), *words.lengths,
                          *((parameters[n],) * 2 for n in self.numbers)],
            "before": [], "launch": f"-(-{x}.shape[0] // X.rows), THREADS, shared=smem, overlaps_previous=True",
        }  # fmt: skip
        return render("few_columns.jinja", template_gaps)
