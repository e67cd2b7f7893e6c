"""Sums over all rows, from the partial sums that the blocks of a row map wrote (row_map.py): a few hundred rows of float32 for
each.

    total[col] = partial_sums[0, col] + partial_sums[1, col] + ...      in a fixed order, so that every run gives the same bits

A block has 32 columns of every total, each of its warps one row in WARPS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...language import term_operations
from ...language.axes import Axis
from ...language.names import array, unused
from ...language.terms import Term
from ...writing.kernel_text import KernelText
from .row_map import count_partial_sums

COLUMNS, WARPS = 32, 8


class ColumnSums:
    """The kernel that adds up the partial sums of a row map. roots: the totals, of shape (1, c). leaves: the partial sums of
    each."""

    label, operations, most_rows, has_launch, overlaps_previous = "totals", 0.0, 2**31 - 1, True, True

    def __init__(self, roots: Sequence[Term], processors: int):
        self.roots, self.early_reads = tuple(roots), list[Term]()
        self.fixed_extents = dict[Axis, int]()
        self.leaves = tuple([term_operations.partial_sums(x.args[0], count_partial_sums(x.args[0], processors)) for x in roots])

    @property
    def text_key(self) -> Any:
        return [x.attr for x in self.leaves]

    @property
    def bytes(self) -> float:
        """The number of bytes that the kernel reads from memory and writes to it."""
        return float(sum(x.nbytes for x in (*self.leaves, *self.roots)))

    @property
    def maps(self) -> float:
        """The number of operations on elements, outside the tensor cores."""
        return self.bytes / 4

    def __str__(self):
        return f"totals of {', '.join(str(x.args[0]) for x in self.roots)}"

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        return "sums over rows, from the partial sums of the kernel before"

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        text, used_names = KernelText(bounds="32 * WARPS, 1"), {*parameters.values(), "col", "first", "row", "scratch"}
        pairs = [(parameters[one], parameters[x]) for one, x in zip(self.leaves, self.roots)]
        text.globals = [f"WARPS = {WARPS}", f"SUMS = rt(16, {COLUMNS}, fp32)"]
        text.globals.append("smem = shared(scratch=sv(SUMS.cols * WARPS, fp32))")
        text.kernel = ["(scratch,) = smem.open()", "grid.follow()"]
        text.kernel.append("col, first = SUMS.cols * int32(cuda.blockIdx.x), SUMS.rows * int32(cuda.threadIdx.x // 32)")
        for sums, total in pairs:
            output = array(sums)
            partial = unused("sums", used_names)
            used_names.add(partial)
            text.kernel += [
                f"{partial} = zeros(SUMS)",
                f"for row in range(first, {output}.shape[0], SUMS.rows * WARPS):",
                f"    {partial} = {partial} + load_unordered({output}, SUMS, (row, col))",
                f"{total} = block.reduce_sum(col_sum({partial}), scratch)",
            ]
        text.kernel.append("if first == 0:")
        text.kernel += [f"    store_unordered({array(total)}, zeros(SUMS) + {total}, (0, col))" for _, total in pairs]
        text.launch = f"-(-{pairs[0][1]}.shape[1] // SUMS.cols), 32 * WARPS, shared=smem, overlaps_previous=True"
        text.arguments = [(array(one), one) for pair in pairs for one in pair]
        return text
