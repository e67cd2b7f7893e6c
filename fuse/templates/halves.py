"""Maps of halves of rows: rotary embedding, and gates that come side by side.

    y = [f(first half of x, second half of x, cos, ...), g(...)]    or one of the two

A warp has tiles of sixteen rows of each half, and goes along the columns; where there are sums of rows, such as a norm's ahead
of the embedding, a half is one tile. Halves of maps are maps of halves. Leading axes stay axes of the grid, so that what lacks
some of them, cos of (rows, columns) or (rows, 1, columns), is read where it lies. Rows are those of the last axis that every
tile has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .. import graph, terms
from ..axes import Axis
from ..evaluate import beyond
from ..functions import MAPS
from ..graph import along, between
from ..module import Text, array, unused
from ..terms import Term
from ..writing import Writer
from .row_map_text import FOLLOW

if TYPE_CHECKING:
    from typing_extensions import Self

ROWS, COLUMNS, WARPS = 16, 64, 4  # of a warp's tile; of a block, one below the other
MOST_COLUMNS = 128  # of a half, where there are sums
Sums = dict[Term, tuple[Term, ...]]
AXES = "yz"  # of the grid, along which leading axes are
PLACES = "batch", "head"  # what the leading axes are called


class Halves:
    """A term that is one such kernel: see the module.

    root: of any rank. parts: what is stored in its halves, or what is stored in it whole. read: halves of arrays, and arrays
    that are read whole. sums: of rows, and what is summed of each half. axis: of the root, that rows lie along."""

    label, operations, most_rows, launched, early = "halves", 0.0, 2**31 - 1, True, True
    ahead: Sequence[Term] = ()

    def __init__(self, root: Term, parts: tuple[Term, ...], read: list[Term], sums: Sums, axis: int):
        self.roots, self.parts, self.read, self.sums, self.axis = (root,), parts, read, sums, axis

    @classmethod
    def serving(cls, root: Term) -> Iterator[Self]:
        """Those that compute it."""
        parts = root.of if root.operation == "concat" else (root,)
        if 2 <= root.ndim <= 2 + len(AXES) and along(root) and all(map(_halved, parts)):
            for each in dict.fromkeys([tuple(map(_of_halves, parts)), parts]):
                yield from cls._of(root, each)

    @classmethod
    def _of(cls, root: Term, parts: tuple[Term, ...]) -> Iterator[Self]:
        """That which stores these parts, if it can."""
        read, sums = _read(parts)
        summed = [x for some in sums.values() for x in some]
        inside = between([*parts, *summed], [*read, *sums])
        if len({(x.extents, x.names[-1] and x.names[-1].root) for x in parts}) != 1 or len(parts) > 2:
            return
        if any(x.operation not in MAPS and x.operation not in ("number", "length") for x in inside):
            return
        if any(x.ndim < 2 or beyond(x, [*read, *sums]).any() for x in summed):  # beyond a row's end nothing may count
            return
        if sums and parts[0].extents[-1] > MOST_COLUMNS:
            return
        if len({x.names[-1] and x.names[-1].root for x in (parts[0], *read) if x.ndim}) != 1:
            return
        tiles = [x for x in read if x.ndim > 1 and any(x.names[:-1])]
        shared = [n for n in range(-root.ndim, -1) if all(x.ndim >= -n and x.names[n] is not None for x in tiles)]
        if tiles and shared:
            yield cls(root, parts, read, sums, shared[-1])

    @property
    def root(self) -> Term:
        """Its only root."""
        return self.roots[0]

    @property
    def leaves(self) -> list[Term]:
        """The arrays that it reads."""
        return list(dict.fromkeys(_array(x) for x in self.read))

    @property
    def inside(self) -> list[Term]:
        """What is computed."""
        summed = [x for some in self.sums.values() for x in some]
        return between([*self.parts, *summed], [*self.read, *self.sums])

    @property
    def fixed(self) -> dict[Axis, int]:
        """Few of what leads the rows are enough to see that they are not mixed."""
        lead = [axis for n, axis in enumerate(self.root.names[:-1], -self.root.ndim) if n != self.axis]
        return {axis.root: 2 + n for n, axis in enumerate(lead) if axis is not None}

    @property
    def bytes(self) -> float:
        """Read and written."""
        return float(sum(x.nbytes for x in (*self.leaves, self.root)))

    @property
    def maps(self) -> float:
        """Operations on elements, outside the tensor cores."""
        return float(sum(math.prod(x.extents) for x in self.inside))

    def __str__(self):
        return f"halves of {self.root}"

    def explained(self) -> str:
        """What it does, in words."""
        return f"a map of halves of rows, {'which are one tile each' if self.sums else 'element by element'}"

    def text(self, name: str, parameters: dict[Term, str], spoken: dict[Term, str]) -> Text:
        """See RowMap.text."""
        y, text = parameters[self.root], Text(bounds="32 * WARPS, 1")
        split, taken = {x for x in self.read if x.operation == "half"}, set(parameters.values())
        names = {}
        for x in self.read:
            its = parameters[_array(x)]
            names[x] = unused(f"{its}_{x.what + 1}", taken) if x in split else its
        writer = Writer(names, spoken)

        lead = [n for n in range(-self.root.ndim, -1) if n != self.axis]
        at = dict(zip(lead, PLACES[-len(lead) :] if lead else ())) | {self.axis: "row"}
        columns = MOST_COLUMNS if self.sums and self.parts[0].extents[-1] > COLUMNS else COLUMNS
        text.globals = [f"WARPS = {WARPS}", f"TILE = rt({ROWS}, {columns}, fp32)  # of a warp"]
        text.kernel = [FOLLOW, "row = TILE.rows * (WARPS * cuda.blockIdx.x + int32(cuda.threadIdx.x // 32))"]
        text.kernel += [f"{at[n]} = cuda.blockIdx.{axis}" for n, axis in zip(lead, AXES) if self.root.names[n] is not None]
        first = next(x.of[0] for x in self.read if x in split)
        text.kernel.append(f"width = {array(parameters[first])}.shape[{first.ndim}]")
        body = [f"{names[x]} = {self.load(x, array(parameters[_array(x)]), at)}" for x in self.read if x.ndim]
        taken |= {*names.values(), *at.values(), "col", "width", "columns"}
        half = self.parts[0].names[-1]
        for x in self.inside:
            if x.operation == "length":
                whole = x.what[0] is None or half is None or x.what[0].root is not half.root
                writer.names[x] = "columns" if whole else "width"
        if "columns" in writer.names.values():
            text.kernel.append("columns = 2 * width")
        for x, some in self.sums.items():
            body += writer.assignments(some, taken, [*some, *self.parts])
            said = unused(writer.suggested(x), {*taken, *writer.names.values()})
            body.append(f"{said} = {' + '.join(f'row_sum({writer.expression(y)})' for y in some)}")
            writer.names[x] = said
        body += writer.assignments(self.parts, taken)
        two = len(self.parts) == 2
        for n, part in enumerate(self.parts):
            place, rows = self.where(self.root, at, n if two else None)
            body.append(f"store({array(y)}, {writer.expression(part)}, {place}{rows})")
        if self.sums:
            text.kernel += ["col = 0", *body]
        else:
            text.kernel += ["for col in range(0, width, TILE.cols):", *(f"    {line}" for line in body)]

        cut = {_array(x) for x in split} | ({self.root} if two else set())
        every = [*self.leaves, self.root]
        text.arguments = [
            (array(parameters[x]) if x.ndim else parameters[x], _cut(x, parameters[x]) if x in cut else parameters[x])
            for x in every
        ]
        grid = [f"-(-{y}.shape[{self.root.ndim + self.axis}] // (TILE.rows * WARPS))"]
        grid += [f"{y}.shape[{self.root.ndim + n}]" for n in lead]
        text.launch = f"{grid[0] if len(grid) == 1 else '(' + ', '.join(grid) + ')'}, 32 * WARPS, early=True"
        return text

    def load(self, x: Term, name: str, at: dict[int, str]) -> str:
        """The expression that reads a tile, or a vector along the columns."""
        place, rows = self.where(x, at, x.what if x.operation == "half" else None)
        of_rows = x.ndim >= -self.axis and x.names[self.axis] is not None
        return f"load({name}, TILE{'' if of_rows else '.row_vec'}, {place}{rows * of_rows})"

    def where(self, x: Term, at: dict[int, str], half: int | None) -> tuple[str, str]:
        """Where a tile of an array is, of a half of its columns or of all; and which of its axes has its rows, unless it is the
        last but one."""
        places = [at[n] if x.names[n] is not None else "0" for n in range(-x.ndim, -1)]
        places += [] if half is None else [str(half)]
        rows = x.ndim + self.axis
        return f"({', '.join([*places, 'col'])}{',' * (not places)})", "" if rows == len(places) - 1 else f", rows={rows}"


def _half(x: Term, which: int) -> Term:
    """Half of the columns, of a map as a map of halves."""
    if not along(x):
        return x
    return terms.apply(x.operation, *[_half(y, which) for y in x.of]) if x.operation in MAPS else terms.half(x, which)


def _maps(root: Term) -> set[Term]:
    """The maps and halves that lead to a term."""
    found, stack = set[Term](), [root]
    while stack:
        x = stack.pop()
        if x not in found and (x.operation in MAPS or x.operation == "half"):
            found.add(x)
            stack += x.of
    return found


def _halved(root: Term) -> bool:
    """Is it a map of halves?"""
    return any(x.operation == "half" for x in _maps(root))


def _of_halves(root: Term) -> Term:
    """With halves of nothing but arrays."""
    maps, made = _maps(root), dict[Term, Term]()
    for x in graph.walk(root):
        of = [made.get(y, y) for y in x.of]
        made[x] = x if x not in maps else _half(of[0], x.what) if x.operation == "half" else terms.apply(x.operation, *of)
    return made[root]


def _read(parts: tuple[Term, ...]) -> tuple[list[Term], Sums]:
    """What the parts are made of, down to arrays, numbers and halves of arrays; and sums of rows, each after those that it
    needs, with what is summed."""
    columns, found, sums = parts[0].names[-1], dict[Term, None](), Sums()
    stack, seen = [*parts][::-1], set[Term]()
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.operation in MAPS:
            stack += x.of[::-1]
        elif x.operation == "sum":
            axis = x.of[0].names[-1]
            of_half = axis is not None and columns is not None and axis.root is columns.root
            sums[x] = x.of if of_half else (_half(x.of[0], 0), _half(x.of[0], 1))
            stack += sums[x][::-1]
        elif x.operation not in ("number", "length"):
            found[x] = None
    order = [x for x in graph.walk(*parts) if x in sums]
    return list(found), {x: sums[x] for x in order}


def _array(x: Term) -> Term:
    """What must be in memory where this is read."""
    return x.of[0] if x.operation == "half" else x


def _cut(x: Term, name: str) -> str:
    """With an axis for the halves of its columns."""
    return f"{name}.reshape(*{name}.shape[:-1], 2, -1)"
