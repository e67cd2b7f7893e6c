"""Sums over all rows, of what blocks of a row map gathered (row_map.py): a few hundred rows of float32, of each total.

    total[col] = gathered[0, col] + gathered[1, col] + ...      in one order, so that every run gives the same bits

A block has 32 columns of every total, its warps every so many rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import terms
from ..axes import Axis
from ..module import KernelText
from ..names import array, unused
from ..terms import Term
from .row_map import shares

COLUMNS, WARPS = 32, 8


class ColumnSums:
    """The kernel that adds up what each block of a row map gathered. roots: the totals, of shape (1, c). leaves: what was
    gathered for each."""

    label, operations, most_rows, has_launch, early = "totals", 0.0, 2**31 - 1, True, True

    def __init__(self, roots: Sequence[Term], processors: int):
        self.roots, self.ahead = tuple(roots), list[Term]()
        self.fixed = dict[Axis, int]()
        self.leaves = tuple([terms.gathered(x.args[0], shares(x.args[0], processors)) for x in roots])

    @property
    def cut(self) -> Any:
        """See RowMap."""
        return [x.attr for x in self.leaves]

    @property
    def bytes(self) -> float:
        """Bytes read from memory and written to it."""
        return float(sum(x.nbytes for x in (*self.leaves, *self.roots)))

    @property
    def maps(self) -> float:
        """Operations on elements, outside the tensor cores."""
        return self.bytes / 4

    def __str__(self):
        return f"totals of {', '.join(str(x.args[0]) for x in self.roots)}"

    def describe(self) -> str:
        """What it does, in words."""
        return "sums over rows, of what each block of the kernel before added up"

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        """See RowMap.text."""
        text, taken = KernelText(bounds="32 * WARPS, 1"), {*parameters.values(), "col", "first", "row", "scratch"}
        pairs = [(parameters[one], parameters[x]) for one, x in zip(self.leaves, self.roots)]
        text.globals = [f"WARPS = {WARPS}", f"SUMS = rt(16, {COLUMNS}, fp32)"]
        text.globals.append("smem = shared(scratch=sv(SUMS.cols * WARPS, fp32))")
        text.kernel = ["(scratch,) = smem.open()", "grid.follow()"]
        text.kernel.append("col, first = SUMS.cols * int32(cuda.blockIdx.x), SUMS.rows * int32(cuda.threadIdx.x // 32)")
        for sums, total in pairs:
            into = array(sums)
            found = unused("sums", taken)
            taken.add(found)
            text.kernel += [
                f"{found} = zeros(SUMS)",
                f"for row in range(first, {into}.shape[0], SUMS.rows * WARPS):",
                f"    {found} = {found} + load_unordered({into}, SUMS, (row, col))",
                f"{total} = block.reduce_sum(col_sum({found}), scratch)",
            ]
        text.kernel.append("if first == 0:")
        text.kernel += [f"    store_unordered({array(total)}, zeros(SUMS) + {total}, (0, col))" for _, total in pairs]
        text.launch = f"-(-{pairs[0][1]}.shape[1] // SUMS.cols), 32 * WARPS, shared=smem, early=True"
        text.arguments = [(array(one), one) for pair in pairs for one in pair]
        return text
