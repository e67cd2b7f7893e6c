"""Row maps of sixteen rows per block, which its warps share along the columns: see row_map.py for the forms.

in registers:   all of the rows stays in the registers of the block looped:         the rows are read again for each level of
reductions"""

from __future__ import annotations

from collections.abc import Sequence

from ...language.graph import between, has_columns, is_matrix
from ...language.names import unused
from ...language.terms import Term
from .row_map_text import IDENTITY_ELEMENTS, RowMapWriter

PLACE = "column = col_index(TILE.row_vec) + col"
LEAST = "-3e38"  # close to the least finite number of float32 and bfloat16


def is_softmax_sum(x: Term) -> bool:
    """Is the term sum(exp(s - max(s)))?"""
    if x.operation != "sum" or x.args[0].operation != "exp" or x.args[0].args[0].operation != "sub":
        return False
    scores, greatest = x.args[0].args[0].args
    return greatest.operation == "max" and greatest.args[0] is scores


class RegisterRows(RowMapWriter):
    """Sixteen rows per block, which stay in registers."""

    description = "stay in registers, sixteen rows per block"

    def write(self) -> None:
        self.write_prologue()
        first_column = "TILE.cols * int32(cuda.threadIdx.x // 32)" if self.kernel.warps > 1 else "0"
        self.text.kernel += [f"col = {first_column}", *[PLACE] * self.needs_column_index]
        self.width(False)
        self.text.kernel += [self.load(x) for x in self.kernel.leaves if x.ndim]
        for level in self.levels():
            self.text.kernel += self.reduce(level, "row")
        self.text.kernel += self.write_stores()


class LoopedRows(RowMapWriter):
    """Sixteen rows per block, read again for each level of reductions. place: the line that computes the numbers of a warp's
    columns."""

    most_warps, description = 8, "are read {} times, once from memory and then from L2"
    place = PLACE

    def write(self) -> None:
        self.write_prologue()
        self.text.kernel.append(f"first = {self.loop_start}")
        self.width(True)
        self.text.kernel += [self.load(x) for x in self.kernel.leaves if x.ndim and not has_columns(x)]
        levels = self.levels()
        sums = {x.args[0].args[0].args[1]: x for level in levels for x in level if is_softmax_sum(x)}
        for level in levels:
            rest = [x for x in level if x not in sums and x not in sums.values()]
            for x in level:
                if x in sums:
                    self.reduce_as_softmax(x, sums[x], rest)
                    rest = []
            self.reduce_in_a_loop(rest)
        if any(map(is_matrix, self.kernel.roots)):
            self.loop([*self.load_lines(self.kernel.roots), *self.write_stores()])
        else:
            self.text.kernel += self.write_stores()

    @property
    def loop_start(self) -> str:
        """The expression of the warp's first column."""
        return "TILE.cols * int32(cuda.threadIdx.x // 32)" if self.kernel.warps > 1 else "0"

    def reduce_in_a_loop(self, terms: list[Term]) -> None:
        """Write the loop that computes these reductions, all of one level."""
        if not terms:
            return
        inner = [x.args[0] for x in terms]
        before = dict(self.writer.names)
        body = [*self.load_lines(inner), *self.writer.assignments(inner, self.parameters.values())]
        folds = [self.fold_tile(x) for x in terms]
        self.writer.names = before  # assignments hold inside the loop only
        self.loop([*body, *self.accumulate(terms, folds)])
        self.write_final_reductions(terms)

    def accumulate(self, terms: list[Term], folds: list[str]) -> list[str]:
        """The lines in a loop that accumulate these reductions. The lines that initialize them are written ahead of the
        loop."""
        lines = []
        for x, fold_tile in zip(terms, folds):
            name = self.name_reduction(x)
            self.text.kernel.append(f"{name} = {self.identity_element(x.operation)}")
            lines.append(f"{name} = {name} + {fold_tile}" if x.operation == "sum" else f"{name} = maximum({name}, {fold_tile})")
        return lines

    def write_final_reductions(self, terms: list[Term]) -> None:
        """Write the lines after a loop that reduce across the warps of a block."""
        for x in terms:
            name = self.writer.names[x]
            self.text.kernel.append(f"{name} = {self.reduce_across_warps(x.operation, name)}")

    def reduce_across_warps(self, kind: str, x: str) -> str:
        """The expression that reduces across the warps of a block."""
        return f"block.reduce_{kind}({x}, scratch)"

    def reduce_as_softmax(self, greatest: Term, total: Term, rest: list[Term]) -> None:
        """Write the loop that computes the maximum of each row and the sum of exp(x - maximum) in one pass (online softmax):
        the sum so far is rescaled when a tile has a higher maximum. The maximum begins with the least finite number, because it
        is subtracted from itself, which gives NaN for -inf. rest: other reductions that are computed in the same loop."""
        maximum, accumulate = self.name_reduction(greatest), self.name_reduction(total)
        used_names = {*self.writer.names.values(), *self.parameters.values()}
        higher, warp_max = unused("higher", used_names), unused("warp_max", used_names)
        before, inner = dict(self.writer.names), [greatest.args[0], *(x.args[0] for x in rest)]
        terms = [*inner, total.args[0]]
        body = [*self.load_lines(inner), *self.writer.assignments(inner, {*used_names, higher, warp_max}, terms)]
        body.append(f"{higher} = maximum({maximum}, {self.fold_tile(greatest)})")
        self.writer.names[greatest] = higher
        body.append(f"{accumulate} = {accumulate} * exp({maximum} - {higher}) + {self.fold_tile(total)}")
        folds = [self.fold_tile(x) for x in rest]
        self.writer.names = before
        self.text.kernel.append(f"{maximum}, {accumulate} = {self.identity_element(LEAST)}, {self.identity_element('sum')}")
        self.loop([*body, f"{maximum} = {higher}", *self.accumulate(rest, folds)])
        self.text.kernel.append(f"{warp_max}, {maximum} = {maximum}, {self.reduce_across_warps('max', maximum)}")
        self.text.kernel.append(
            f"{accumulate} = {self.reduce_across_warps('sum', f'{accumulate} * exp({warp_max} - {maximum})')}"
        )
        self.write_final_reductions(rest)

    def identity_element(self, kind: str) -> str:
        """The initial value of a reduction: its identity element, or LEAST."""
        return f"full(TILE.col_vec, {LEAST})" if kind == LEAST else f"{IDENTITY_ELEMENTS[kind][0]}(TILE.col_vec)"

    def loop(self, body: list[str]) -> None:
        """Write these lines in a loop over the warp's tiles along the columns."""
        self.text.kernel += ["for col in range(first, width, TILE.cols * WARPS):", *(f"    {line}" for line in body)]

    def load_lines(self, roots: Sequence[Term]) -> list[str]:
        """The lines that read the inputs of these terms that have columns."""
        needed = between(roots, [*self.kernel.leaves, *self.writer.names], with_leaves=True)
        place = [self.place] * any(x.operation == "is_column" for x in needed)
        return place + [self.load(x) for x in self.kernel.leaves if has_columns(x) and x in needed]
