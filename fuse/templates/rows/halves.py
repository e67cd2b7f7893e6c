"""Maps of halves of rows: rotary embedding, and gates beside the columns that they gate.

    y = [f(first half of x, second half of x, cos, ...), g(...)]    or one of the two

A warp has one tile of sixteen rows of each half, so that all loads are issued at once. Where there are sums of rows, such as a
norm's before the embedding, it has all columns: in one tile, or tile by tile, once for each sum and once more. Arrays of 16
bits are read in the order of their bytes, as everything is elementwise or summed. Halves of maps are maps of halves. Rows are
those of the last axis that every tile has. Warps are numbered by bands of sixteen rows first, then by leading axes, then along
the columns: an array that lacks leading axes, such as cos of (rows, columns) or (rows, 1, columns), is read where it lies, by
warps that run side by side; and only in the last band, whose tiles know their array's end, are there warps with nothing to
do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...language import graph, term_operations, terms
from ...language.axes import Axis
from ...language.evaluate import values_past_row_end
from ...language.expression_text import ExpressionWriter
from ...language.graph import between, has_columns
from ...language.maps import MAPS
from ...language.names import array, unused
from ...language.terms import Term
from ...writing.kernel_text import KernelText
from .folded_rows import resident_warps
from .row_map import SIXTEEN
from .row_map_text import FOLLOW

if TYPE_CHECKING:
    from typing_extensions import Self

ROWS, WARPS, MAX_GRID_YZ = 16, 2, 12  # rows of a warp's tile; warps of a block; the most blocks of a multiprocessor
WORKED, MORE = 48, 32  # registers of a lane besides loaded elements; more for exchanges, and without wgmma
COLUMNS = 32, 64  # columns of a warp's tile: 32 for maps of few tiles, else as many as a half has, up to 64
MUCH = 6  # so many input tiles take wide tiles
MOST_COLUMNS = 128  # columns of a half, where there are sums
Sums = dict[Term, tuple[Term, ...]]
COUNTED = (
    "rest",
    "band",
    "col_tile",
    "col",
    "width",
    "columns",
    "batches",
    "groups",
    "heads",
    "col_tiles",
)  # the kernel's variables
PLACES = {
    "batch": "batches",
    "group": "groups",
    "head": "heads",
}  # {index along a leading axis: its extent}, names in the kernel
LEADING = (), ("head",), ("batch", "head"), tuple(PLACES)  # indices along so many leading axes


class Halves:
    """A kernel that computes a map of halves of rows: see the module.

    root: the term, with two axes or more. parts: the terms that are stored in the root's two halves, or the one that is stored
    in it whole. read_arrays: the halves of arrays, and the whole arrays, that are read. sums: {sum of a row: the terms that are
    summed, of each half}. axis: the root's axis of rows. default_dtype: the dtype of results that are no casts. wgmma: see
    Card."""

    label, operations, most_rows, has_launch, overlaps_previous = "halves", 0.0, 2**31 - 1, True, True
    early_reads: Sequence[Term] = ()

    def __init__(self, root: Term, parts: tuple[Term, ...], read: list[Term], sums: Sums, axis: int, wgmma: bool):
        self.roots, self.parts, self.read_arrays, self.sums, self.axis, self.wgmma = (root,), parts, read, sums, axis, wgmma
        self.default_dtype = terms.TABLES[-1].dtype

    @classmethod
    def kernels_for(cls, root: Term, wgmma: bool) -> Iterator[Self]:
        """The kernels that compute a term. wgmma: see Card."""
        parts = root.args if root.operation == "concat" else (root,)
        if root.operation in MAPS and any(x.operation == "concat" for x in between([root], _not_maps(root), True)):
            parts = _take_half(root, 0), _take_half(root, 1)  # halves of a concatenation, and of terms with as many columns
        if 2 <= root.ndim < 2 + len(LEADING) and has_columns(root) and all(map(_is_map_of_halves, parts)):
            for halves in dict.fromkeys([tuple(map(_push_halves_to_arrays, parts)), parts]):
                yield from cls._match_parts(root, halves, wgmma)

    @classmethod
    def _match_parts(cls, root: Term, parts: tuple[Term, ...], wgmma: bool) -> Iterator[Self]:
        """The kernel that stores these parts, if there can be one."""
        read, sums = _find_reads(parts)
        summed = [x for group in sums.values() for x in group]
        inside = between([*parts, *summed], [*read, *sums])
        if len({(x.extents, x.axes[-1] and x.axes[-1].root) for x in parts}) != 1 or len(parts) > 2:
            return
        if any(x.operation not in MAPS and x.operation not in ("number", "length") for x in inside):
            return
        if any(x.ndim < 2 or values_past_row_end(x, [*read, *sums]).any() for x in summed):  # past a row's end sums must add 0
            return
        if sums and parts[0].extents[-1] > MOST_COLUMNS:
            return
        if len({x.axes[-1] and x.axes[-1].root for x in (parts[0], *read) if x.ndim}) != 1:
            return
        tiles = [x for x in read if x.ndim > 1 and any(x.axes[:-1])]
        shared = [n for n in range(-root.ndim, -1) if all(x.ndim >= -n and x.axes[n] is not None for x in tiles)]
        if tiles and shared:
            yield cls(root, parts, read, sums, shared[-1], wgmma)

    text_key: Any = ()  # its text depends on no lengths

    @property
    def root(self) -> Term:
        """The term that it computes."""
        return self.roots[0]

    @property
    def leaves(self) -> list[Term]:
        """The arrays that it reads."""
        return list(dict.fromkeys(_array_of(x) for x in self.read_arrays))

    @property
    def inside(self) -> list[Term]:
        """The terms that the kernel computes."""
        summed = [x for group in self.sums.values() for x in group]
        return between([*self.parts, *summed], [*self.read_arrays, *self.sums])

    @property
    def width(self) -> int:
        """The columns of a half."""
        return self.parts[0].extents[-1]

    @property
    def columns(self) -> int:
        """The columns of a warp's tile."""
        much = len(self.read_arrays) >= MUCH and self.width >= COLUMNS[-1]
        return next((n for n in COLUMNS if n >= self.width), COLUMNS[-1]) if self.sums or much else COLUMNS[0]

    @property
    def blocks(self) -> int:
        """The blocks that share a multiprocessor, as many as registers allow; 1 if there are sums."""
        tiles, elements = sum(x.ndim > 0 for x in self.read_arrays), ROWS * self.columns // 32
        lane = WORKED + MORE * (not self.wgmma or not self.unordered) + tiles * (elements // 2 if self.unordered else elements)
        return 1 if self.sums else max(1, min(MAX_GRID_YZ, resident_warps(lane) // WARPS))

    @property
    def looped(self) -> bool:
        """Does a warp loop over the columns, once for each sum and once more for the result? After the first pass they come
        from L1."""
        return bool(self.sums) and self.width > self.columns

    @property
    def lead(self) -> dict[int, str]:
        """{axis of the root ahead of its rows and columns: the kernel's name for its index}."""
        lead = [n for n in range(-self.root.ndim, -1) if n != self.axis]
        return {n: name for n, name in zip(lead, LEADING[len(lead)]) if self.root.axes[n] is not None}

    @property
    def unordered(self) -> bool:
        """May columns be read in the order in which they lie, 16 bytes a lane? They may if all arrays have 16 bits."""
        dtypes = {_array_of(x).stored_dtype(self.default_dtype) for x in self.read_arrays if x.ndim} | {
            self.root.stored_dtype(self.default_dtype)
        }
        return dtypes <= {*SIXTEEN}

    @property
    def fixed_extents(self) -> dict[Axis, int]:
        """The extents of a proof's run. 2 or 3 of each leading axis are enough to see that they are not mixed up; a half that
        is one tile must be no wider."""
        lead = {axis.root: 2 + n for n, axis in enumerate(self.root.axes[at] for at in self.lead) if axis is not None}
        half = self.parts[0].axes[-1]
        return lead | ({half.root: self.width} if half is not None and self.width <= self.columns else {})

    @property
    def bytes(self) -> float:
        """The number of bytes that the kernel reads from memory and writes to it."""
        return float(sum(x.nbytes for x in (*self.leaves, self.root)))

    @property
    def maps(self) -> float:
        """The number of operations on elements, outside the tensor cores."""
        return float(sum(math.prod(x.extents) for x in self.inside))

    def __str__(self):
        return f"halves of {self.root}"

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        summed = "are read twice, for the sums first" if self.looped else "are one tile each"
        return f"a map of halves of rows, {f'which {summed}' if self.sums else 'element by element'}"

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        y, text = parameters[self.root], KernelText(bounds="32 * WARPS, BLOCKS")
        split, used_names = {x for x in self.read_arrays if x.operation == "half"}, set(parameters.values())
        names = {}
        for x in self.read_arrays:
            array_name = parameters[_array_of(x)]
            names[x] = unused(f"{array_name}_{x.attr + 1}", used_names) if x in split else array_name
        writer = ExpressionWriter(names, local_names)

        at = self.lead | {self.axis: "row"}
        text.globals = [f"WARPS, BLOCKS = {WARPS}, {self.blocks}  # of a block, of a multiprocessor"]
        text.globals += [f"TILE = rt({ROWS}, {self.columns}, fp32)  # of a warp"]
        text.kernel = [FOLLOW, *self.place(text, y)]
        used_names |= {*names.values(), *at.values(), *COUNTED}
        load_lines = {
            names[x]: f"{names[x]} = {self.load(x, array(parameters[_array_of(x)]), at)}" for x in self.read_arrays if x.ndim
        }

        def passed(lines: list[str]) -> list[str]:
            """The lines, with those that read what they need; in a loop over the tiles if a half has several."""
            read = [load for name, load in load_lines.items() if any(re.search(rf"\b{name}\b", line) for line in lines)]
            loop = ["for col in range(0, width, TILE.cols):"] * self.looped
            return [*loop, *(f"{'    ' * self.looped}{line}" for line in (*read, *lines))]

        first = next(x.args[0] for x in self.read_arrays if x in split)
        text.kernel += self.lengths(writer, f"{array(parameters[first])}.shape[{first.ndim}]")
        body = list[str]()
        for x, group in self.sums.items():
            before, sum_name = dict(writer.names), unused(writer.suggest_name(x), {*used_names, *writer.names.values()})
            lines = writer.assignments(group, used_names, [*group, *self.parts])
            added = " + ".join(f"row_sum({writer.expression(y)})" for y in group)
            if self.looped:
                text.kernel += [f"{sum_name} = zeros(TILE.col_vec)", *passed([*lines, f"{sum_name} = {sum_name} + {added}"])]
                writer.names = before  # assignments hold inside the loop only
            else:
                body += [*lines, f"{sum_name} = {added}"]
            writer.names[x] = sum_name
        body += writer.assignments(self.parts, used_names)
        two = len(self.parts) == 2
        for n, part in enumerate(self.parts):
            place, rows = self.where(self.root, at, n if two else None)
            body.append(f"store{'_unordered' * self.unordered}({array(y)}, {writer.expression(part)}, {place}{rows})")
        text.kernel += passed(body)

        split_arrays = {_array_of(x) for x in split} | ({self.root} if two else set())
        pairs = [(x, parameters[x]) for x in (*self.leaves, self.root)]
        arguments = [
            (array(name) if x.ndim else name, _split_columns(x, name) if x in split_arrays else name) for x, name in pairs
        ]
        text.arguments = [*arguments, *((name, name) for name, _ in text.counts[:-1])]
        text.launch = "-(-warps // WARPS), 32 * WARPS, overlaps_previous=True"
        return text

    def place(self, text: KernelText, y: str) -> list[str]:
        """The lines that compute a warp's tile coordinates. Warps are numbered by bands of rows, then by leading axes, then by
        tiles of columns. `text` gets the counts that the launch computes for this: of all of these but bands, and of warps."""
        extents = [f"{y}.shape[{n}]" for n in range(self.root.ndim)]
        inner = {name: (PLACES[name], extents[n]) for n, name in self.lead.items()}
        if self.width > self.columns and not self.looped:
            columns = f"({len(self.parts)} * TILE.cols)" if len(self.parts) > 1 else "TILE.cols"
            inner["col_tile"] = "col_tiles", f"-(-{extents[-1]} // {columns})"
        bands = f"-(-{extents[self.axis]} // TILE.rows)"
        text.counts = [*inner.values(), ("warps", " * ".join([bands, *(count for count, _ in inner.values())]))]
        number, lines = "int32(WARPS * cuda.blockIdx.x + cuda.threadIdx.x // 32)", list[str]()
        for left, name in zip([*["rest"] * (len(inner) - 1), "band"], [*inner][::-1]):
            lines.append(f"{left}, {name} = divmod({number}, {inner[name][0]})")
            number = left
        row = f"TILE.rows * {number}"
        return [*lines, f"row, col = {row}, TILE.cols * col_tile" if "col_tile" in inner else f"row = {row}"]

    def lengths(self, writer: ExpressionWriter, extent: str) -> list[str]:
        """The lines that compute the columns of a half and of a row, if they are used. extent: the expression of a half's
        columns."""
        half = self.parts[0].axes[-1]
        for x in self.inside:
            if x.operation == "length":
                is_row = x.attr[0] is None or half is None or x.attr[0].root is not half.root
                writer.names[x] = "columns" if is_row else "width"
        used = {*writer.names.values(), *["width"] * self.looped}
        lengths = {"width": extent, "columns": f"2 * {'width' if self.looped else extent}"}
        return [f"{name} = {expression}" for name, expression in lengths.items() if name in used]

    def load(self, x: Term, name: str, at: dict[int, str]) -> str:
        """The expression that reads a tile, or a vector along the columns."""
        place, rows = self.where(x, at, x.attr if x.operation == "half" else None)
        of_rows = x.ndim >= -self.axis and x.axes[self.axis] is not None
        return f"load{'_unordered' * self.unordered}({name}, TILE{'' if of_rows else '.row_vec'}, {place}{rows * of_rows})"

    def where(self, x: Term, at: dict[int, str], half: int | None) -> tuple[str, str]:
        """(the coordinates of a tile of an array, of one half of its columns or of all; the keyword argument that gives its
        axis of rows, "" if that is the last but one)"""
        places = [at[n] if x.axes[n] is not None else "0" for n in range(-x.ndim, -1)]
        places += [] if half is None else [str(half)]
        rows, col = x.ndim + self.axis, "col" if self.width > self.columns else "0"
        return f"({', '.join([*places, col])}{',' * (not places)})", "" if rows == len(places) - 1 else f", rows={rows}"


def _take_half(x: Term, index: int) -> Term:
    """One half of the columns of a term, with halves of its operands where the term is a map, and one of the two parts where it
    is a concatenation."""
    if not has_columns(x):
        return x
    if x.operation == "concat" and len(x.args) == 2 and x.args[0].extents == x.args[1].extents:
        return x.args[index]
    return (
        terms.apply(x.operation, *[_take_half(y, index) for y in x.args])
        if x.operation in MAPS
        else term_operations.half(x, index)
    )


def _not_maps(root: Term) -> list[Term]:
    """The terms below a map that are no maps."""
    return [x for x in graph.walk(root) if x.operation not in MAPS]


def _maps(root: Term) -> set[Term]:
    """The maps and halves from the root down."""
    maps, stack = set[Term](), [root]
    while stack:
        x = stack.pop()
        if x not in maps and (x.operation in MAPS or x.operation == "half"):
            maps.add(x)
            stack += x.args
    return maps


def _is_map_of_halves(root: Term) -> bool:
    """Is the term a map of halves?"""
    return any(x.operation == "half" for x in _maps(root))


def _push_halves_to_arrays(root: Term) -> Term:
    """An equal term that takes halves of arrays only, not of maps."""
    maps, rewritten = _maps(root), dict[Term, Term]()
    for x in graph.walk(root):
        args = [rewritten.get(y, y) for y in x.args]
        rewritten[x] = (
            x if x not in maps else _take_half(args[0], x.attr) if x.operation == "half" else terms.apply(x.operation, *args)
        )
    return rewritten[root]


def _find_reads(parts: tuple[Term, ...]) -> tuple[list[Term], Sums]:
    """(the inputs of the parts: arrays, numbers and halves of arrays; {sum of a row: the terms that are summed}, each after the
    sums that it needs)"""
    columns, sources, sums = parts[0].axes[-1], dict[Term, None](), Sums()
    stack, visited = [*parts][::-1], set[Term]()
    while stack:
        x = stack.pop()
        if x in visited:
            continue
        visited.add(x)
        if x.operation in MAPS:
            stack += x.args[::-1]
        elif x.operation == "sum":
            axis = x.args[0].axes[-1]
            of_half = axis is not None and columns is not None and axis.root is columns.root
            sums[x] = x.args if of_half else (_take_half(x.args[0], 0), _take_half(x.args[0], 1))
            stack += sums[x][::-1]
        elif x.operation not in ("number", "length"):
            sources[x] = None
    order = [x for x in graph.walk(*parts) if x in sums]
    return list(sources), {x: sums[x] for x in order}


def _array_of(x: Term) -> Term:
    """The array that is read for this term."""
    return x.args[0] if x.operation == "half" else x


def _split_columns(x: Term, name: str) -> str:
    """The expression of an array with an axis for the halves of its columns."""
    return f"{name}.reshape(*{name}.shape[:-1], 2, -1)"
