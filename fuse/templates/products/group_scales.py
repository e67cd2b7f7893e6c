"""Weights times the scales of groups, in 16 bits: what a product multiplies by that cannot scale them itself.

    y = widened(w * repeat(scales, group, axis))

A warp has a tile of 16 rows, within one group along `axis`; scales lie along either axis. group_scales.jinja is the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...language import terms
from ...language.axes import Axis
from ...language.names import array
from ...language.terms import Term
from ...writing.kernel_text import DTYPES, KernelText
from .jinja_template import render

if TYPE_CHECKING:
    from typing_extensions import Self

WARPS = 4  # of a block
COLUMNS = 64, 32, 16  # of a warp's tile


class GroupScales:
    """The kernel: see the module. root: what it computes. weights: the array that it reads. repeated: the scales, repeated."""

    label, operations, most_rows, has_launch, overlaps_previous = "scale", 0.0, 2**31 - 1, True, True
    early_reads: Sequence[Term] = ()
    text_key: Any = ()

    def __init__(self, root: Term, weights: Term, repeated: Term):
        self.root, self.weights, self.repeated = root, weights, repeated
        self.roots = (root,)
        scales = repeated.args[0]
        self.scales_transposed = scales.operation == "transpose"
        self.scales = scales.args[0] if self.scales_transposed else scales
        self.default_dtype = terms.TABLES[-1].dtype

    @classmethod
    def kernels_for(cls, root: Term) -> Iterator[Self]:
        """The kernels that compute a term."""
        product = root.args[0] if root.operation == "widened" else root
        if product.operation != "mul" or root.ndim != 2 or terms.TABLES[-1].dtype not in DTYPES:
            return
        for weights, repeated in (product.args, product.args[::-1]):
            if weights.operation == "input" and weights.ndim == 2 and repeated.operation == "repeat" and repeated.ndim == 2:
                kernel = cls(root, weights, repeated)
                if kernel.scales.operation == "input" and kernel.group % COLUMNS[-1] == 0:
                    yield kernel

    @property
    def group(self) -> int:
        """How many columns or rows of the weights have one scale."""
        return self.repeated.attr[0]

    @property
    def leaves(self) -> list[Term]:
        return [self.weights, self.scales]

    @property
    def bytes(self) -> float:
        """Bytes read from memory and written to it, each once."""
        return float(sum(x.nbytes for x in (*self.leaves, self.root)))

    @property
    def maps(self) -> float:
        """The number of operations on elements."""
        return float(math.prod(self.root.extents))

    @property
    def fixed_extents(self) -> dict[Axis, int]:
        """Three groups, if there are so many, show in a proof whether one is taken for another."""
        scales, place = self.repeated.args[0], self.repeated.attr[1]
        groups = scales.axes[place]
        return {groups.root: min(3, scales.extents[place])} if groups else {}

    def __str__(self):
        return f"scales of {self.root}"

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        return f"weights times scales of groups of {self.group}, in 16 bits"

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        along_columns = self.repeated.attr[1] == -1
        columns = next(n for n in COLUMNS if not along_columns or self.group % n == 0)
        place = ["row", "col // GROUP"] if along_columns else ["row // GROUP", "col"]
        if self.scales_transposed:
            place.reverse()
        down = along_columns != self.scales_transposed  # do the scales of a tile lie along the array's first axis?
        result, weights, scales = (parameters[x] for x in (self.root, self.weights, self.scales))
        rows, width = f"{result}.shape[0]", f"{result}.shape[1]"
        template_gaps = {
            "group": self.group, "warps": WARPS, "columns": columns, "vector": "col_vec" if along_columns else "row_vec",
            "at": f"({', '.join(place)})", "axis": ", cols=0" if down else "",
            "weights": array(weights), "scales": array(scales), "result": array(result), "bounds": "32 * WARPS, 1",
            "arguments": [(array(one), one) for one in (weights, scales, result)], "before": [],
            "launch": f"(-(-{width} // TILE.cols), -(-{rows} // (16 * WARPS))), 32 * WARPS, overlaps_previous=True",
        }  # fmt: skip
        return render("group_scales.jinja", template_gaps)
