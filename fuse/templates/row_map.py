"""A row map: maps and reductions of rows, whole rows in one thread block. Layer norm, softmax, a residual and its norm.

    row by row:   y = f(x[row, :], ..., g[:], ...), with sums and maxima along the row wherever f has them

A block has sixteen rows; its warps stand side by side along the columns. Rows that fit are read once and stay in registers; of
longer ones a warp takes every so many columns, once for each level of reductions and once more for the result (they come from
L2 then, where sixteen rows of every multiprocessor fit)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from ..functions import MAPS
from ..module import Text, unused
from ..terms import Axis, Term, walk
from ..writing import Writer

ROWS = 16
AT_ONCE = 128  # columns of a warp
MOST_WARPS = 16
IN_REGISTERS = 2  # tiles that a warp holds through all levels of reductions


class RowMap:
    """The terms that one such kernel computes.

    roots: of shape (m, c) or (m, 1). leaves: what it reads. columns: the axis c; every tile that it has runs along it."""

    def __init__(self, roots: Sequence[Term], leaves: Sequence[Term], columns: Axis, width: int):
        self.roots, self.leaves, self.columns, self.width = tuple(roots), tuple(leaves), columns, width

    @classmethod
    def matches(cls, roots: Sequence[Term], leaves: Sequence[Term]) -> RowMap | None:
        """The kernel that computes these of those, if there is one."""
        inside = [x for x in between(roots, leaves)]
        if any(x.operation not in MAPS and x.operation not in ("sum", "max", "number", "length") for x in inside):
            return None
        tiles = [x for x in (*inside, *leaves) if along(x)]
        columns = {x.names[-1].root: x.extents[-1] for x in tiles if x.names[-1]}
        rows = {x.names[0].root for x in tiles if x.ndim == 2 and x.names[0]}
        if len(columns) != 1 or len(rows) > 1 or any(x.ndim != 2 for x in roots):
            return None
        ((axis, width),) = columns.items()
        return cls(roots, leaves, axis, width)

    @property
    def levels(self) -> dict[Term, int]:
        """How many reductions must be done before a term is known."""
        found: dict[Term, int] = dict.fromkeys(self.leaves, 0)
        for x in between(self.roots, self.leaves):
            found[x] = max((found[y] for y in x.of), default=0) + (x.operation in ("sum", "max"))
        return found

    @property
    def held(self) -> int:
        """Tiles that are read."""
        return sum(is_tile(x) for x in self.leaves)

    @property
    def at_once(self) -> bool:
        """Do rows stay in registers?"""
        return self.width <= AT_ONCE * MOST_WARPS and self.held <= IN_REGISTERS

    @property
    def warps(self) -> int:
        """Of a block."""
        wanted = -(-self.width // AT_ONCE)
        return next(n for n in (1, 2, 4, 8, 16) if n >= min(wanted, MOST_WARPS if self.at_once else 8))

    def text(self, name: str, parameters: dict[Term, str], spoken: dict[Term, str]) -> Text:
        """The kernel and its launch. parameters: the names of leaves and roots. spoken: what other terms may be called."""
        return _Writing(self, parameters, spoken).text

    label, operations, most_rows = "rows", 0.0, 2**31 - 1
    fixed: ClassVar[dict[Axis, int]] = {}

    @property
    def bytes(self) -> float:
        """Read and written."""
        return float(sum(x.nbytes for x in (*self.leaves, *self.roots)))

    @property
    def maps(self) -> float:
        """Operations on elements, outside the tensor cores."""
        return float(
            sum(
                math.prod((x.of[0] if x.of and x.operation in ("sum", "max") else x).extents)
                for x in between(self.roots, self.leaves)
            )
        )

    def __str__(self):
        return f"rows of {', '.join(map(str, self.roots))}"

    def explained(self) -> str:
        """What it does, in words."""
        levels = max(self.levels[x] for x in self.roots)
        kept = "stay in registers" if self.at_once else f"are read {levels + 1} times, once from memory and then from L2"
        return f"a row map; its rows of {self.width} {kept}" if levels else "a map, element by element"


def array(name: str) -> str:
    """The parameter that a kernel reads a variable from."""
    return f"g{name[0].upper()}{name[1:]}"


def is_tile(x: Term) -> bool:
    """Has it rows and columns?"""
    return x.ndim == 2 and x.names[0] is not None and x.names[1] is not None


def along(x: Term) -> bool:
    """Has it columns?"""
    return x.ndim > 0 and x.names[-1] is not None


def between(roots: Sequence[Term], leaves: Sequence[Term], with_leaves: bool = False) -> list[Term]:
    """The terms that lead from leaves to roots, each after its parts."""
    ends, found, stack = set(leaves), set(), list(roots)
    while stack:
        x = stack.pop()
        if x not in found and (with_leaves or x not in ends):
            found.add(x)
            if x not in ends:
                stack.extend(x.of)
    return [x for x in walk(*roots) if x in found]


def vanishes(x: Term, leaves: Sequence[Term]) -> bool:
    """Is it 0 wherever the leaves that have columns are 0?"""
    if x in leaves:
        return along(x)
    parts = [vanishes(y, leaves) for y in x.of]
    if x.operation == "mul":
        return any(parts)
    if x.operation == "div":
        return parts[0]
    if x.operation in ("add", "sub", "neg", "abs", "relu", "silu", "gelu", "tanh", "sqrt"):
        return all(parts)
    return x.operation == "number" and x.what == 0


# ---- writing it down -------------------------------------------------------------------------------------------------
EMPTY = {"sum": ("zeros", "0.0"), "max": ("neg_infty", "-math.inf")}  # a vector of nothing's sum or maximum, and one number


class _Writing:
    """The text of a row map, as it is written."""

    def __init__(self, kernel: RowMap, parameters: dict[Term, str], spoken: dict[Term, str]):
        self.kernel, self.parameters, self.text = kernel, parameters, Text()
        lengths = [x for x in between(kernel.roots, kernel.leaves) if x.operation == "length"]
        known = {x: parameters[x] for x in kernel.leaves} | dict.fromkeys(lengths, "width")
        self.writer, text = Writer(known, spoken), self.text
        reductions = [x for x in between(kernel.roots, kernel.leaves) if x.operation in EMPTY]
        text.globals += [f"WARPS = {kernel.warps}", f"TILE = rt({ROWS}, {AT_ONCE}, fp32)  # of a warp"]
        if reductions:
            text.globals.append("smem = shared(scratch=sv(TILE.rows * WARPS, fp32))")
            text.kernel.append("(scratch,) = smem.open()")
        text.kernel.append("row = TILE.rows * cuda.blockIdx.x")
        mine = "0"
        if kernel.warps > 1:
            mine = "TILE.cols * int32(cuda.threadIdx.x // 32)"
        text.kernel.append(f"{'col' if kernel.at_once else 'first'} = {mine}")
        if lengths or not kernel.at_once or any(map(self.filled, reductions)):
            wide = next(x for x in kernel.leaves if along(x))
            text.kernel.append(f"width = {array(parameters[wide])}.shape[{wide.ndim - 1}]")
        text.kernel += [self.load(x) for x in kernel.leaves if x.ndim and (kernel.at_once or not along(x))]
        levels = kernel.levels
        for level in range(1, 1 + max(levels[x] for x in kernel.roots)):
            (self.reduce if kernel.at_once else self.reduce_in_a_loop)([x for x in reductions if levels[x] == level])
        (self.results if kernel.at_once else self.results_in_a_loop)()
        tall = next(x for x in (*kernel.leaves, *kernel.roots) if x.ndim == 2 and x.names[0])
        text.threads = "32 * WARPS"
        text.launch = f"-(-{parameters[tall]}.shape[0] // TILE.rows), {text.threads}{', shared=smem' * bool(reductions)}"
        every = [(x, parameters[x]) for x in (*kernel.leaves, *kernel.roots)]
        text.arguments = [(array(name) if x.ndim else name, name) for x, name in every]

    # ---- rows that stay in registers
    def reduce(self, wanted: list[Term]) -> None:
        """These reductions, of one level."""
        self.text.kernel += self.writer.assignments([x.of[0] for x in wanted], self.parameters.values(), self.kernel.roots)
        for x in wanted:
            folded = self.folded(x)
            self.text.kernel.append(f"{self.named(x)} = block.reduce_{x.operation}({folded}, scratch)")

    def results(self) -> None:
        """The roots."""
        self.text.kernel += self.stores()

    # ---- rows that are read again and again
    def reduce_in_a_loop(self, wanted: list[Term]) -> None:
        """These reductions, of one level."""
        inner = [x.of[0] for x in wanted]
        before = dict(self.writer.names)
        body = [*self.loads(inner), *self.writer.assignments(inner, self.parameters.values())]
        folds = [self.folded(x) for x in wanted]
        self.writer.names = before  # what was assigned is known in the loop alone
        for x, folded in zip(wanted, folds):
            name, (empty, _) = self.named(x), EMPTY[x.operation]
            self.text.kernel.append(f"{name} = {empty}(TILE.col_vec)")
            body.append(f"{name} = {name} + {folded}" if x.operation == "sum" else f"{name} = maximum({name}, {folded})")
        self.loop(body)
        for x in wanted:
            name = self.writer.names[x]
            self.text.kernel.append(f"{name} = block.reduce_{x.operation}({name}, scratch)")

    def results_in_a_loop(self) -> None:
        """The roots."""
        self.loop([*self.loads(self.kernel.roots), *self.stores()])

    def loop(self, body: list[str]) -> None:
        """These lines, for each of the warp's tiles along the columns."""
        self.text.kernel += ["for col in range(first, width, TILE.cols * WARPS):", *(f"    {line}" for line in body)]

    def loads(self, roots: Sequence[Term]) -> list[str]:
        """What must be read for these, of what has columns."""
        needed = between(roots, self.kernel.leaves, with_leaves=True)
        return [self.load(x) for x in self.kernel.leaves if along(x) and x in needed]

    # ---- both
    def named(self, x: Term) -> str:
        """The name of a reduction, from now on."""
        taken = {*self.writer.names.values(), *self.parameters.values()}
        self.writer.names[x] = unused(self.writer.suggested(x), taken)
        return self.writer.names[x]

    def folded(self, x: Term) -> str:
        """What a warp's tile contributes to a reduction."""
        written = self.writer.expression(x.of[0])
        if self.filled(x):
            written = f"right_fill({written}, width - col, {EMPTY[x.operation][1]})"
        return f"row_{x.operation}({written})"

    def filled(self, x: Term) -> bool:
        """Is what it reduces anything else than nothing where a tile goes beyond the columns?"""
        return x.operation == "max" or not vanishes(x.of[0], self.kernel.leaves)

    def stores(self) -> list[str]:
        """The lines that compute the roots and write them."""
        lines = self.writer.assignments(self.kernel.roots, self.parameters.values())
        for x in self.kernel.roots:
            at = "(row, col)" if is_tile(x) else "(row, 0), cols=0"
            lines.append(f"store({array(self.parameters[x])}, {self.writer.expression(x)}, {at})")
        return lines

    def load(self, x: Term) -> str:
        """The line that reads a leaf."""
        name = self.parameters[x]
        if is_tile(x):
            return f"{name} = load({array(name)}, TILE, (row, col))"
        if along(x):
            return f"{name} = load({array(name)}, TILE.row_vec, {'(col,)' if x.ndim == 1 else '(0, col)'})"
        if not x.names[0]:
            return f"{name} = {array(name)}[{', '.join('0' * x.ndim)}]"
        return f"{name} = load({array(name)}, TILE.col_vec, (row, 0), cols=0)"
