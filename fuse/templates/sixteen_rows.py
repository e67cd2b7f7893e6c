"""Row maps of sixteen rows for each block, which its warps share along the columns: see row_map.py for the forms.

held:    all of the rows stays in the registers of the block
looped:  the rows are read again for each level of reductions"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import along, between, is_tile
from ..names import unused
from ..terms import Term
from .row_map_text import NOTHING, RowMapWriter

PLACE = "place = col_index(TILE.row_vec) + col"
LEAST = "-3e38"  # close to the least number of float32 and bfloat16


def is_softmax_sum(x: Term) -> bool:
    """Is the term sum(exp(s - max(s)))?"""
    if x.operation != "sum" or x.args[0].operation != "exp" or x.args[0].args[0].operation != "sub":
        return False
    scores, greatest = x.args[0].args[0].args
    return greatest.operation == "max" and greatest.args[0] is scores


class RegisterRows(RowMapWriter):
    """Sixteen rows for each block, which stay in registers."""

    says = "stay in registers, sixteen of a block"

    def write(self) -> None:
        self.begin()
        mine = "TILE.cols * int32(cuda.threadIdx.x // 32)" if self.kernel.warps > 1 else "0"
        self.text.kernel += [f"col = {mine}", *[PLACE] * self.places]
        self.width(False)
        self.text.kernel += [self.load(x) for x in self.kernel.leaves if x.ndim]
        for level in self.levels():
            self.text.kernel += self.reduce(level, "row")
        self.text.kernel += self.stores()


class LoopedRows(RowMapWriter):
    """Sixteen rows for each block, read again for each level of reductions. place: the line that computes which columns a warp
    has."""

    most_warps, says = 8, "are read {} times, once from memory and then from L2"
    place = PLACE

    def write(self) -> None:
        self.begin()
        self.text.kernel.append(f"first = {self.first}")
        self.width(True)
        self.text.kernel += [self.load(x) for x in self.kernel.leaves if x.ndim and not along(x)]
        levels = self.levels()
        sums = {x.args[0].args[0].args[1]: x for level in levels for x in level if is_softmax_sum(x)}
        for level in levels:
            rest = [x for x in level if x not in sums and x not in sums.values()]
            for x in level:
                if x in sums:
                    self.reduce_as_softmax(x, sums[x], rest)
                    rest = []
            self.reduce_in_a_loop(rest)
        if any(map(is_tile, self.kernel.roots)):
            self.loop([*self.loads(self.kernel.roots), *self.stores()])
        else:
            self.text.kernel += self.stores()

    @property
    def first(self) -> str:
        """The expression of the warp's first column."""
        return "TILE.cols * int32(cuda.threadIdx.x // 32)" if self.kernel.warps > 1 else "0"

    def reduce_in_a_loop(self, wanted: list[Term]) -> None:
        """Write the loop that computes these reductions, all of one level."""
        if not wanted:
            return
        inner = [x.args[0] for x in wanted]
        before = dict(self.writer.names)
        body = [*self.loads(inner), *self.writer.assignments(inner, self.parameters.values())]
        folds = [self.folded(x) for x in wanted]
        self.writer.names = before  # what was assigned is known in the loop alone
        self.loop([*body, *self.added(wanted, folds)])
        self.end(wanted)

    def added(self, wanted: list[Term], folds: list[str]) -> list[str]:
        """The lines in a loop that add to these reductions. The lines that begin them with nothing are written ahead of the
        loop."""
        lines = []
        for x, folded in zip(wanted, folds):
            name = self.named(x)
            self.text.kernel.append(f"{name} = {self.nothing(x.operation)}")
            lines.append(f"{name} = {name} + {folded}" if x.operation == "sum" else f"{name} = maximum({name}, {folded})")
        return lines

    def end(self, wanted: list[Term]) -> None:
        """Write the lines behind a loop that join what the warps of a block have found."""
        for x in wanted:
            name = self.writer.names[x]
            self.text.kernel.append(f"{name} = {self.together(x.operation, name)}")

    def together(self, kind: str, x: str) -> str:
        """The expression that joins what the warps of a block have found."""
        return f"block.reduce_{kind}({x}, scratch)"

    def reduce_as_softmax(self, greatest: Term, total: Term, rest: list[Term]) -> None:
        """Write the loop that computes the maximum of each row and the sum of exp(x - maximum) in one pass: the sum so far is
        rescaled when a tile has a higher maximum. The maximum begins with the least finite number, because it is subtracted
        from itself, which gives NaN for -inf. rest: other reductions that are computed in the same loop."""
        most, added = self.named(greatest), self.named(total)
        taken = {*self.writer.names.values(), *self.parameters.values()}
        higher, own = unused("higher", taken), unused("own", taken)
        before, inner = dict(self.writer.names), [greatest.args[0], *(x.args[0] for x in rest)]
        among = [*inner, total.args[0]]
        body = [*self.loads(inner), *self.writer.assignments(inner, {*taken, higher, own}, among)]
        body.append(f"{higher} = maximum({most}, {self.folded(greatest)})")
        self.writer.names[greatest] = higher
        body.append(f"{added} = {added} * exp({most} - {higher}) + {self.folded(total)}")
        folds = [self.folded(x) for x in rest]
        self.writer.names = before
        self.text.kernel.append(f"{most}, {added} = {self.nothing(LEAST)}, {self.nothing('sum')}")
        self.loop([*body, f"{most} = {higher}", *self.added(rest, folds)])
        self.text.kernel.append(f"{own}, {most} = {most}, {self.together('max', most)}")
        self.text.kernel.append(f"{added} = {self.together('sum', f'{added} * exp({own} - {most})')}")
        self.end(rest)

    def nothing(self, kind: str) -> str:
        """What a reduction begins with: its value for no elements, or for LEAST that number."""
        return f"full(TILE.col_vec, {LEAST})" if kind == LEAST else f"{NOTHING[kind][0]}(TILE.col_vec)"

    def loop(self, body: list[str]) -> None:
        """Write these lines in a loop over the warp's tiles along the columns."""
        self.text.kernel += ["for col in range(first, width, TILE.cols * WARPS):", *(f"    {line}" for line in body)]

    def loads(self, roots: Sequence[Term]) -> list[str]:
        """The lines that read what these terms need and what has columns."""
        needed = between(roots, [*self.kernel.leaves, *self.writer.names], with_leaves=True)
        place = [self.place] * any(x.operation == "is_column" for x in needed)
        return place + [self.load(x) for x in self.kernel.leaves if along(x) and x in needed]
