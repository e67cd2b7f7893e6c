"""A row map: elementwise maps and reductions of rows, such as layer norm, softmax, a residual and its norm.

    row by row:   y = f(x[row, :], ..., g[:], ...), with sums and maxima along the row wherever f has them

Maps without reductions are computed tile by tile (elementwise_rows.py). Otherwise the rows' width decides which form serves:

- short (short_rows.py): a warp has sixteen rows, each as wide as its tile;
- folded (folded_rows.py): a row is cut into lines, sixteen of which are a warp's tile. A lane reads 16 bytes at a time, and
  keeps elements in the order in which they lie, because only whole lines are past a row's end. The next row is loaded during
  the work on one, and vectors along the columns stay in registers. If several tiles of 16 bits are written, each block has one
  row;
- in registers (sixteen_rows.py): for rows that are not whole lines. A block has sixteen, its warps share their columns, and
  everything stays in registers;
- long (long_rows.py): for rows that are too long for registers. A block has one, which is read once for each level of
  reductions and once more for the result;
- looped (sixteen_rows.py): the same with sixteen rows, for rows that are not whole lines.

If sums over rows are needed as well, as in gradients, folded rows serve (summed_rows.py): a block accumulates the sums of its
own rows, and column_sums.py adds up these partial sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...language import terms
from ...language.axes import Axis
from ...language.evaluate import values_past_row_end
from ...language.graph import between, has_columns, inputs, is_matrix
from ...language.maps import BYTES, MAPS
from ...language.term_views import view_base
from ...language.terms import Term
from ...writing.kernel_text import DTYPES, KernelText
from .elementwise_rows import ElementwiseRows
from .folded_rows import FOLD, FoldedRows, NarrowFoldedRows, SingleRows, resident_warps
from .long_rows import LongRows
from .row_map_text import RowMapWriter
from .short_rows import ShortRows
from .sixteen_rows import LoopedRows, RegisterRows
from .summed_rows import SummedRows

KNOWN = (
    "sum",
    "max",
    "number",
    "length",
    "dropout",
    "is_column",
    "partial_sums",
)  # operations of a row map besides elementwise maps
SIXTEEN = "bfloat16", "float16"
WORKED = 48  # registers of a lane besides loaded elements
MOST_WARPS = 16
MOST_TILES = 4  # input tiles where sums over rows are accumulated as well
HELD = 2  # tiles that stay in registers through all levels of reductions
MOST_HELD = 5  # the same where they are half as wide
FOLDED_FROM = 640  # the least columns of folded rows
BUSY = 128  # blocks that keep a card busy


def count_partial_sums(x: Term, processors: int) -> int:
    """How many partial sums over rows there are: one for each block that runs at once."""
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
    width: its extent. default_dtype: the dtype of results that are no casts. clusters: may several blocks share a row on this
    card?"""

    def __init__(self, roots: Sequence[Term], leaves: Sequence[Term], columns: Axis, width: int):
        self.roots, self.leaves, self.columns, self.width = tuple(roots), tuple(leaves), columns, width
        self.default_dtype, self.clusters = terms.TABLES[-1].dtype, False

    @classmethod
    def matches(cls, roots: Sequence[Term], leaves: Sequence[Term], clusters: bool = False) -> RowMap | None:
        """The kernel that computes these terms from these leaves, None if they are no maps of rows. clusters: does the card
        have thread block clusters?"""
        inside = between(roots, leaves)
        if any(x.operation not in MAPS and x.operation not in KNOWN for x in inside):
            return None
        if any(x.operation == "dropout" and not is_matrix(x) for x in inside):
            return None
        gathered = [x for x in inside if x.operation == "partial_sums"]
        tiles = [x for x in (*inside, *leaves) if has_columns(x) and x not in gathered]
        columns = {x.axes[-1].root: x.extents[-1] for x in tiles if x.axes[-1]}
        rows = {x.axes[0].root for x in tiles if x.ndim == 2 and x.axes[0]}
        if len(columns) != 1 or len(rows) > 1 or any(x.ndim != 2 for x in roots):
            return None
        if any(
            has_columns(x) and not is_matrix(x) for x in roots
        ):  # a row without an axis of rows, which every block would write
            return None
        ((axis, width),) = columns.items()
        kernel = cls(roots, leaves, axis, width)
        kernel.clusters = clusters
        return kernel if {*gathered} <= {*roots} and (not gathered or kernel.can_sum_over_rows) else None

    @property
    def levels(self) -> dict[Term, int]:
        """{term: how many reductions, one after the other, it depends on}."""
        levels: dict[Term, int] = dict.fromkeys(self.leaves, 0)
        for x in between(self.roots, self.leaves):
            levels[x] = max((levels[y] for y in x.args), default=0) + (x.operation in ("sum", "max"))
        return levels

    @property
    def broadcasts(self) -> bool:
        """Is a vector along the columns reduced, so that vectors must be tiles with equal rows?"""
        return any(x.operation in ("sum", "max") and not is_matrix(x.args[0]) for x in between(self.roots, self.leaves))

    @property
    def tiles(self) -> int:
        """How many tiles the inputs take."""
        return sum(is_matrix(x) or (self.broadcasts and has_columns(x)) for x in self.leaves)

    @property
    def dtype(self) -> str:
        """The dtype that arrays are read as: their own if all have the same, otherwise fp32."""
        dtypes = {view_base(x).stored_dtype(self.default_dtype) for x in self.leaves if has_columns(x)}
        return (
            (DTYPES | {name: str(one) for name, one in BYTES.items()}).get(dtypes.pop(), "fp32") if len(dtypes) == 1 else "fp32"
        )

    @property
    def allows_unordered(self) -> bool:
        """May columns be read in any order? They may if all arrays have 16 bits, or 8 if they are written, or all have 32."""
        if self.partial_sums:
            return self.can_sum_over_rows
        read = {view_base(x).stored_dtype(self.default_dtype) for x in self.leaves if has_columns(x)}
        written = {x.stored_dtype(self.default_dtype) for x in self.roots if has_columns(x)}
        wide = (read | written) == {
            "float32"
        } and not self.has_dropout  # dropout's draws know the order of 16-bit elements only
        return (read <= {*SIXTEEN} and written <= {*SIXTEEN, *BYTES}) or wide

    @property
    def partial_sums(self) -> list[Term]:
        """The terms that are partial sums over rows."""
        return [x for x in self.roots if x.operation == "partial_sums"]

    @property
    def can_sum_over_rows(self) -> bool:
        """Can sums over rows be accumulated while the rows are read? For this, rows are read once, in tiles that they fill,
        with their columns in any order."""
        tiles = [x for x in self.leaves if is_matrix(x)]
        fits = self.width % SummedRows.part == 0 and SummedRows.columns <= self.width <= SummedRows.columns * SummedRows.warps
        is_short = [x.stored_dtype(self.default_dtype) in (*SIXTEEN, *BYTES) for x in self.roots if x not in self.partial_sums]
        dtypes = {x.attr[1] for x in inputs(*self.roots) if x.ndim > 1}
        known = len(dtypes) == 1 and dtypes < {*SIXTEEN} and all(has_columns(x) or not any(x.axes) for x in self.leaves)
        few = len(tiles) <= MOST_TILES and len(self.partial_sums) <= HELD
        allows_unordered = self.dtype in DTYPES.values() and all(is_short) and all(map(has_columns, self.roots))
        return (fits or terms.TABLES[-1].loose) and known and few and allows_unordered and not self.has_dropout

    @property
    def is_elementwise(self) -> bool:
        """Are there only elementwise maps, of rows of whole lines?"""
        inside = between(self.roots, self.leaves)
        maps = all(x.operation in MAPS or x.operation == "number" for x in inside)
        tiles = any(map(is_matrix, self.leaves)) and all(map(is_matrix, self.roots))
        return maps and tiles and self.no_bytes_or_dropout and not self.width % ElementwiseRows.part

    @property
    def no_bytes_or_dropout(self) -> bool:
        """Has no input a dtype of one byte, and is there no dropout?"""
        return all(x.stored_dtype(self.default_dtype) not in BYTES for x in self.leaves) and not self.has_dropout

    @property
    def form(self) -> type[RowMapWriter]:
        """The form in which the kernel is written: see the module."""
        if self.partial_sums:
            return SummedRows
        if self.is_short:
            return ShortRows
        if self.is_elementwise:
            return ElementwiseRows
        tiles = self.tiles
        if folded_form := self.folded_form:
            results = [x.stored_dtype(self.default_dtype) for x in self.roots if is_matrix(x)]
            one_row_per_block = len(results) > 1 and {*results} <= {*SIXTEEN} and self.width <= SingleRows.columns * MOST_WARPS
            return SingleRows if one_row_per_block and self.divides_into_lines(SingleRows) else folded_form
        if (
            HELD < tiles <= MOST_HELD
            and SingleRows.columns <= self.width <= SingleRows.columns * MOST_WARPS
            and self.divides_into_lines(SingleRows)
        ):
            return SingleRows
        if self.width <= RegisterRows.columns * MOST_WARPS and tiles <= HELD:
            return RegisterRows
        return LongRows if self.no_bytes_or_dropout and not self.width % LongRows.part and tiles else LoopedRows

    @property
    def is_short(self) -> bool:
        """Is a row as wide as the tile of one warp?"""
        wide = self.tiles * self.width
        return (
            not self.width % ShortRows.step
            and 0 < wide <= ShortRows.most
            and self.no_bytes_or_dropout
            and not self.partial_sums
        )

    def divides_into_lines(self, form: type[FoldedRows]) -> bool:
        """Are rows whole lines of this form? Inputs must have columns, or be one number for all rows."""
        return not self.width % form.part and all(has_columns(x) or not any(x.axes) for x in self.leaves)

    @property
    def folded_form(self) -> type[FoldedRows] | None:
        """The form of folded rows if a block can hold a row and the next one: the one with the most rows in flight, and among
        equals the one with the fewest warps, which was measured to be faster. None if rows are too narrow or too wide."""
        if self.width < FOLDED_FROM or sum(map(is_matrix, self.leaves)) > HELD:
            return None
        forms = [
            one
            for one in (FoldedRows, NarrowFoldedRows)
            if self.divides_into_lines(one) and self.width <= one.columns * MOST_WARPS
        ]
        rows = {one: resident_warps(self.registers(one)) // _warps(self.width, one) for one in forms}
        return max(rows, key=lambda one: rows[one]) if any(rows.values()) else None

    @property
    def text_key(self) -> Any:
        """The part of its text, and of its results, that depends on lengths."""
        return self.blocks if self.form is LongRows else (), [x.attr for x in self.partial_sums]

    @property
    def warps(self) -> int:
        """The warps of a block."""
        if self.form is LongRows:
            few = -(-self.width // (LongRows.rows * LongRows.line(self.width)))
            read, written = (sum(map(is_matrix, terms)) for terms in (self.leaves, self.roots))
            return min(few, LongRows.most(read == written == 1))
        return _warps(self.width, self.form)

    @property
    def blocks(self) -> int:
        """The blocks that share a row, in a cluster: as many as keep the multiprocessors busy if rows are few, and as have
        columns to work on."""
        rows = next(x.extents[0] for x in (*self.leaves, *self.roots) if is_matrix(x))
        max_rows = self.width // (LongRows.rows * LongRows.line(self.width) * self.warps)
        return next((n for n in (8, 4, 2) if self.clusters and n * rows <= BUSY and n <= max_rows), 1)

    def registers(self, form: type[FoldedRows]) -> int:
        """The registers of a lane in a folded form: for the row in work and the next one, some to compute with, and more where
        elements past a row's end must be masked, as after x - mean(x), or where there is dropout."""
        tile = form.columns // 32  # elements of a lane
        ahead = tile if self.dtype == "fp32" else tile // 2
        tiles, vectors = (sum(has_columns(x) and is_matrix(x) == two for x in self.leaves) for two in (True, False))
        worked = WORKED if any(map(is_matrix, self.roots)) else WORKED - 16  # reductions alone take fewer
        return tiles * (tile + ahead) + vectors * ahead + worked + tile * (self.needs_row_end_mask + self.has_dropout)

    def needs_fill(self, x: Term) -> bool:
        """Must the operand of a reduction be masked past the row's end? It must if tiles reach past it, and their elements
        there would change the result."""
        if self.form is ShortRows or self.fills_tiles_exactly(self.form):  # no tile reaches past the end
            return False
        return self._counts_past_row_end(x)

    def _counts_past_row_end(self, x: Term) -> bool:
        least = x.operation == "sum" or x.args[0].operation == "abs"  # 0 is the identity element
        return not least or bool(values_past_row_end(x.args[0], self.leaves).any())

    @property
    def needs_row_end_mask(self) -> bool:
        """Would elements past a row's end change a reduction?"""
        return any(self._counts_past_row_end(x) for x in between(self.roots, self.leaves) if x.operation in ("sum", "max"))

    def fills_tiles_exactly(self, form: type[RowMapWriter]) -> bool:
        """Are a row's columns exactly those of a block's tiles?"""
        return issubclass(form, FoldedRows) and self.width == form.columns * _warps(self.width, form)

    @property
    def has_fixed_width(self) -> bool:
        """Must rows keep this width? They must if they fill a block's tiles exactly, and a shorter row would need a mask."""
        return not self.partial_sums and self.needs_row_end_mask and self.fills_tiles_exactly(self.form)

    @property
    def fixed_extents(self) -> dict[Axis, int]:
        """The axes whose extents are in the kernel's text, or must be multiples of something in it."""
        if self.partial_sums or self.has_fixed_width or self.form is ShortRows:
            return {self.columns: self.width}
        if self.form is LongRows:
            return {self.columns: LongRows.line(self.width) * (1 + LongRows.rows * self.warps)}
        if not issubclass(self.form, FoldedRows):
            return {}
        before = 1 if self.form is ElementwiseRows else self.warps - 1  # full tiles, and one with three lines
        return {self.columns: self.form.part * (FOLD * before + 3)}

    @property
    def early_reads(self) -> list[Term]:
        """The arrays that the kernel reads before the previous launch has ended: vectors, if they stay in registers."""
        vectors = [x for x in self.leaves if has_columns(x) and not is_matrix(x)]
        return [x for x in vectors if x.operation == "input"] if self.form in (FoldedRows, NarrowFoldedRows, SingleRows) else []

    @property
    def has_dropout(self) -> bool:
        """Is one of the operations between leaves and roots a dropout?"""
        return any(x.operation == "dropout" for x in between(self.roots, self.leaves))

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        """The kernel and its launch. parameters: the names of leaves and roots. local_names: the names that other terms may
        get."""
        return self.form(self, parameters, local_names).text

    label, operations, most_rows, has_launch, overlaps_previous = "rows", 0.0, 2**31 - 1, True, True

    @property
    def bytes(self) -> float:
        """The number of bytes that the kernel reads from memory and writes to it."""
        return float(sum(x.nbytes for x in (*self.leaves, *self.roots)))

    @property
    def maps(self) -> float:
        """The number of operations on elements, outside the tensor cores."""
        return float(
            sum(
                math.prod((x.args[0] if x.args and x.operation in ("sum", "max") else x).extents)
                for x in between(self.roots, self.leaves)
            )
        )

    def __str__(self):
        return f"rows of {', '.join(map(str, self.roots))}"

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        levels = max(self.levels[x] for x in self.roots)
        return (
            f"a row map; its rows of {self.width} {self.form.description.format(levels + 1)}"
            if levels
            else "a map, element by element"
        )
