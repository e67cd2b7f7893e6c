"""A row map: maps and reductions of rows, whole rows in one thread block. Layer norm, softmax, a residual and its norm.

    row by row:   y = f(x[row, :], ..., g[:], ...), with sums and maxima along the row wherever f has them

Maps alone are computed piece by piece (flat_rows.py). Otherwise the rows' width decides which form serves:

- short (short_rows.py): a warp has sixteen rows, each as wide as its tile;
- folded (folded_rows.py): a row is cut into lines, sixteen of which are a warp's tile. A lane reads 16 bytes at a time, and
  keeps them in the order in which they came, because what lies beyond a row's end is whole lines. One row is worked on while
  the next one comes, and vectors along the columns stay in registers. If several tiles of 16 bits are written, each row is a
  block's only one;
- held (sixteen_rows.py): for rows that are not whole lines. A block has sixteen, its warps share their columns, and everything
  stays in registers;
- long (long_rows.py): for rows that are too long for registers. A block has one, which is read once for each level of
  reductions and once more for the result;
- looped (sixteen_rows.py): the same with sixteen rows, for rows that are not whole lines.

If sums over rows are asked for as well, as gradients need them, folded rows serve (gathered_rows.py): a block adds up its own
rows as they go by, and column_sums.py adds up what the blocks found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import terms
from ..axes import Axis
from ..evaluate import beyond
from ..functions import FP8, MAPS
from ..graph import along, between, inputs, is_tile
from ..module import DTYPES, KernelText
from ..terms import Term, viewed
from .flat_rows import ElementwiseRows
from .folded_rows import FOLD, FoldedRows, NarrowFoldedRows, SingleRows, resident
from .gathered_rows import SummedRows
from .long_rows import LongRows
from .row_map_text import RowMapWriter
from .short_rows import ShortRows
from .sixteen_rows import LoopedRows, RegisterRows

KNOWN = "sum", "max", "number", "length", "dropout", "is_column", "gathered"  # that are no maps of elements alone
SIXTEEN = "bfloat16", "float16"
WORKED = 48  # registers of a lane besides those that hold what is read
MOST_WARPS = 16
MOST_TILES = 4  # where sums over rows are kept beside them
HELD = 2  # tiles that a warp holds through all levels of reductions
MOST_HELD = 5  # where they are half as wide
FOLDED_FROM = 640  # columns
BUSY = 128  # blocks that a card runs at once


def shares(x: Term, processors: int) -> int:
    """How many sums of rows are gathered: one for each block that runs at once."""
    rows, width = x.extents
    return max(1, min(rows, max(1, SummedRows.warps // _warps(width, SummedRows)) * processors))


def _warps(width: int, form: type[RowMapWriter]) -> int:
    """The warps of a block, for rows of this width."""
    if form in (ElementwiseRows, ShortRows):
        return form.warps
    if issubclass(form, FoldedRows):
        return -(-width // form.columns)
    return next(n for n in (1, 2, 4, 8, 16) if n >= min(-(-width // form.columns), form.most_warps))


class RowMap:
    """A kernel that computes maps and reductions of rows: see the module.

    roots: the terms, of shape (m, c) or (m, 1). leaves: what it reads. columns: the axis c, along which all of its tiles run.
    width: its extent. held: the dtype of results that are no casts. clusters: may several blocks share a row, on this card?"""

    def __init__(self, roots: Sequence[Term], leaves: Sequence[Term], columns: Axis, width: int):
        self.roots, self.leaves, self.columns, self.width = tuple(roots), tuple(leaves), columns, width
        self.held, self.clusters = terms.TABLES[-1].dtype, False

    @classmethod
    def matches(cls, roots: Sequence[Term], leaves: Sequence[Term], clusters: bool = False) -> RowMap | None:
        """The kernel that computes these terms from these leaves, None if they are no maps of rows. clusters: does the card
        have thread block clusters?"""
        inside = between(roots, leaves)
        if any(x.operation not in MAPS and x.operation not in KNOWN for x in inside):
            return None
        if any(x.operation == "dropout" and not is_tile(x) for x in inside):
            return None
        gathered = [x for x in inside if x.operation == "gathered"]
        tiles = [x for x in (*inside, *leaves) if along(x) and x not in gathered]
        columns = {x.axes[-1].root: x.extents[-1] for x in tiles if x.axes[-1]}
        rows = {x.axes[0].root for x in tiles if x.ndim == 2 and x.axes[0]}
        if len(columns) != 1 or len(rows) > 1 or any(x.ndim != 2 for x in roots):
            return None
        if any(along(x) and not is_tile(x) for x in roots):  # one row for all, which each block would write
            return None
        ((axis, width),) = columns.items()
        found = cls(roots, leaves, axis, width)
        found.clusters = clusters
        return found if {*gathered} <= {*roots} and (not gathered or found.gathers) else None

    @property
    def levels(self) -> dict[Term, int]:
        """{term: how many reductions one after the other must be complete before it is known}."""
        found: dict[Term, int] = dict.fromkeys(self.leaves, 0)
        for x in between(self.roots, self.leaves):
            found[x] = max((found[y] for y in x.args), default=0) + (x.operation in ("sum", "max"))
        return found

    @property
    def broadcasts(self) -> bool:
        """Is a vector along the columns reduced, so that vectors must stand in tiles, the same in all rows?"""
        return any(x.operation in ("sum", "max") and not is_tile(x.args[0]) for x in between(self.roots, self.leaves))

    @property
    def tiles(self) -> int:
        """How many tiles hold what is read."""
        return sum(is_tile(x) or (self.broadcasts and along(x)) for x in self.leaves)

    @property
    def dtype(self) -> str:
        """The dtype that arrays are read as: their own if all have the same, otherwise fp32."""
        found = {viewed(x).stored_dtype(self.held) for x in self.leaves if along(x)}
        return (DTYPES | {FP8: "fp8e4m3"}).get(found.pop(), "fp32") if len(found) == 1 else "fp32"

    @property
    def alike(self) -> bool:
        """Have all arrays 16 bits, or 8 if they are written, or all 32? Then columns may be read in an order of their own."""
        if self.sums:
            return self.gathers
        read = {viewed(x).stored_dtype(self.held) for x in self.leaves if along(x)}
        made = {x.stored_dtype(self.held) for x in self.roots if along(x)}
        wide = (read | made) == {"float32"} and not self.draws  # which know the order of 16 bits alone
        return (read <= {*SIXTEEN} and made <= {*SIXTEEN, FP8}) or wide

    @property
    def sums(self) -> list[Term]:
        """The terms that are gathered."""
        return [x for x in self.roots if x.operation == "gathered"]

    @property
    def gathers(self) -> bool:
        """Can sums over rows be kept as the rows go by? For this, rows are read once, in tiles that they fill, with their
        columns in any order."""
        tiles = [x for x in self.leaves if is_tile(x)]
        fits = self.width % SummedRows.part == 0 and SummedRows.columns <= self.width <= SummedRows.columns * SummedRows.warps
        short = [x.stored_dtype(self.held) in (*SIXTEEN, FP8) for x in self.roots if x not in self.sums]
        held = {x.attr[1] for x in inputs(*self.roots) if x.ndim > 1}
        known = len(held) == 1 and held < {*SIXTEEN} and all(along(x) or not any(x.axes) for x in self.leaves)
        few = len(tiles) <= MOST_TILES and len(self.sums) <= HELD
        alike = self.dtype in DTYPES.values() and all(short) and all(map(along, self.roots))
        return (fits or terms.TABLES[-1].loose) and known and few and alike and not self.draws

    @property
    def flat(self) -> bool:
        """Are there only maps, of rows of whole lines?"""
        inside = between(self.roots, self.leaves)
        maps = all(x.operation in MAPS or x.operation == "number" for x in inside)
        tiles = any(map(is_tile, self.leaves)) and all(map(is_tile, self.roots))
        return maps and tiles and self.plain and not self.width % ElementwiseRows.part

    @property
    def plain(self) -> bool:
        """Is nothing read that is fp8, and nothing dropped?"""
        return all(x.stored_dtype(self.held) != FP8 for x in self.leaves) and not self.draws

    @property
    def form(self) -> type[RowMapWriter]:
        """The form in which the kernel is written: see the module."""
        if self.sums:
            return SummedRows
        if self.short:
            return ShortRows
        if self.flat:
            return ElementwiseRows
        tiles = self.tiles
        if folded := self.folded:
            results = [x.stored_dtype(self.held) for x in self.roots if is_tile(x)]
            alone = len(results) > 1 and {*results} <= {*SIXTEEN} and self.width <= SingleRows.columns * MOST_WARPS
            return SingleRows if alone and self.lined(SingleRows) else folded
        if (
            HELD < tiles <= MOST_HELD
            and SingleRows.columns <= self.width <= SingleRows.columns * MOST_WARPS
            and self.lined(SingleRows)
        ):
            return SingleRows
        if self.width <= RegisterRows.columns * MOST_WARPS and tiles <= HELD:
            return RegisterRows
        return LongRows if self.plain and not self.width % LongRows.part and tiles else LoopedRows

    @property
    def short(self) -> bool:
        """Is a row as wide as the tile of one warp?"""
        wide = self.tiles * self.width
        return not self.width % ShortRows.step and 0 < wide <= ShortRows.most and self.plain and not self.sums

    def lined(self, form: type[FoldedRows]) -> bool:
        """Are rows whole lines of this form? What is read must have columns, or be one number for all rows."""
        return not self.width % form.part and all(along(x) or not any(x.axes) for x in self.leaves)

    @property
    def folded(self) -> type[FoldedRows] | None:
        """The form in which rows are folded, if a block can hold a row and the next one: the one with the most rows under way,
        and among equals the one with the fewest warps, which was measured to be faster. None if rows are too narrow or too
        wide for it."""
        if self.width < FOLDED_FROM or sum(map(is_tile, self.leaves)) > HELD:
            return None
        forms = [one for one in (FoldedRows, NarrowFoldedRows) if self.lined(one) and self.width <= one.columns * MOST_WARPS]
        rows = {one: resident(self.registers(one)) // _warps(self.width, one) for one in forms}
        return max(rows, key=lambda one: rows[one]) if any(rows.values()) else None

    @property
    def cut(self) -> Any:
        """What of its text, and of what it writes, follows from lengths."""
        return self.blocks if self.form is LongRows else (), [x.attr for x in self.sums]

    @property
    def warps(self) -> int:
        """The warps of a block."""
        if self.form is LongRows:
            few = -(-self.width // (LongRows.rows * LongRows.line(self.width)))
            read, made = (sum(map(is_tile, some)) for some in (self.leaves, self.roots))
            return min(few, LongRows.most(read == made == 1))
        return _warps(self.width, self.form)

    @property
    def blocks(self) -> int:
        """The blocks that share a row, in a cluster: as many as keep the multiprocessors busy if rows are few, and as have
        columns to work on."""
        rows = next(x.extents[0] for x in (*self.leaves, *self.roots) if is_tile(x))
        most = self.width // (LongRows.rows * LongRows.line(self.width) * self.warps)
        return next((n for n in (8, 4, 2) if self.clusters and n * rows <= BUSY and n <= most), 1)

    def registers(self, form: type[FoldedRows]) -> int:
        """The registers of a lane, if rows are folded: for what is read now and for the next row, some to compute with, and
        more where something beyond a row's end must be cut off, as after x - mean(x), or where something is dropped."""
        tile = form.columns // 32  # elements of a lane
        ahead = tile if self.dtype == "fp32" else tile // 2
        tiles, vectors = (sum(along(x) and is_tile(x) == two for x in self.leaves) for two in (True, False))
        worked = WORKED if any(map(is_tile, self.roots)) else WORKED - 16  # to compute nothing but numbers takes less
        return tiles * (tile + ahead) + vectors * ahead + worked + tile * (self.cuts + self.draws)

    def filled(self, x: Term) -> bool:
        """Must what a reduction reads be filled beyond the row's end? It must if tiles reach beyond it, and what is there
        would count."""
        if self.form is ShortRows or self.filling(self.form):  # nothing goes beyond
            return False
        return self._is_something(x)

    def _is_something(self, x: Term) -> bool:
        least = x.operation == "sum" or x.args[0].operation == "abs"  # 0 is nothing's
        return not least or bool(beyond(x.args[0], self.leaves).any())

    @property
    def cuts(self) -> bool:
        """Would something beyond a row's end count in a reduction?"""
        return any(self._is_something(x) for x in between(self.roots, self.leaves) if x.operation in ("sum", "max"))

    def filling(self, form: type[RowMapWriter]) -> bool:
        """Are a row's columns exactly those of a block's tiles?"""
        return issubclass(form, FoldedRows) and self.width == form.columns * _warps(self.width, form)

    @property
    def whole(self) -> bool:
        """Must rows keep this width? They must if they fill a block's tiles exactly, and in a shorter row something would have
        to be cut off."""
        return not self.sums and self.cuts and self.filling(self.form)

    @property
    def fixed(self) -> dict[Axis, int]:
        """The axes whose extents are in the kernel's text, or must be multiples of something in it."""
        if self.sums or self.whole or self.form is ShortRows:
            return {self.columns: self.width}
        if self.form is LongRows:
            return {self.columns: LongRows.line(self.width) * (1 + LongRows.rows * self.warps)}
        if not issubclass(self.form, FoldedRows):
            return {}
        before = 1 if self.form is ElementwiseRows else self.warps - 1  # what is full, and three lines of one that is not
        return {self.columns: self.form.part * (FOLD * before + 3)}

    @property
    def ahead(self) -> list[Term]:
        """What the kernel reads before the launch ahead of it has ended: vectors, if they stay in registers."""
        vectors = [x for x in self.leaves if along(x) and not is_tile(x)]
        return [x for x in vectors if x.operation == "input"] if self.form in (FoldedRows, NarrowFoldedRows, SingleRows) else []

    @property
    def draws(self) -> bool:
        """Is something dropped?"""
        return any(x.operation == "dropout" for x in between(self.roots, self.leaves))

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        """The kernel and its launch. parameters: the names of leaves and roots. local_names: what other terms may be called."""
        return self.form(self, parameters, local_names).text

    label, operations, most_rows, has_launch, early = "rows", 0.0, 2**31 - 1, True, True

    @property
    def bytes(self) -> float:
        """Bytes read from memory and written to it."""
        return float(sum(x.nbytes for x in (*self.leaves, *self.roots)))

    @property
    def maps(self) -> float:
        """Operations on elements, outside the tensor cores."""
        return float(
            sum(
                math.prod((x.args[0] if x.args and x.operation in ("sum", "max") else x).extents)
                for x in between(self.roots, self.leaves)
            )
        )

    def __str__(self):
        return f"rows of {', '.join(map(str, self.roots))}"

    def describe(self) -> str:
        """What it does, in words."""
        levels = max(self.levels[x] for x in self.roots)
        return (
            f"a row map; its rows of {self.width} {self.form.says.format(levels + 1)}"
            if levels
            else "a map, element by element"
        )
