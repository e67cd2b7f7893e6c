"""What a tile is: frozen types, compared by value. They know sizes and layouts; none of them holds data.

`rt(16, 128, fp32)` names a register tile of one warp, `st(128, 64, bf16)` a tile in shared memory, `gl(...)` a global
array cut into tiles. A kernel closes over them; the values they describe are made by ops.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np

from . import layout
from .dtypes import OPERANDS, SUMS, bf16, dtype, fp16, fp32

REGISTER_DTYPES = (fp32, fp16, bf16)  # in which ops compute
EVERY_DTYPE = REGISTER_DTYPES + OPERANDS
LAYOUTS = ("row", "col", "line")
LINE = 64  # columns of which a line has a multiple: two elements of each lane
TILE_ALIGN = 1024  # bytes, of where a swizzled tile begins in shared memory


@dataclass(frozen=True)
class rt:
    """A register tile of one warp: rows and cols multiples of 16; cols (rows in column layout) of 32 for fp8 and int8. layout:
    "row", where a lane's pairs of elements lie side by side, "col", its transpose, where they lie one below the other, or
    "line", of one row, a multiple of 64 columns, which the lanes have run by run (see tiles/layout.py). A line goes to and from
    memory and shared vectors, and through maps and running sums; it has no vectors. dtype: fp32, fp16 or bf16; tf32, fp8 and
    int8 for operands of products, int32 for sums of products of int8.

    A warpgroup's 64 x n tile is four of them, one a warp, in the order of its warps."""

    rows: int
    cols: int
    dtype: dtype
    layout: str = "row"

    def __post_init__(self):
        if self.layout not in LAYOUTS:
            raise ValueError(f"rt: layout must be one of {LAYOUTS}, got {self.layout!r}")
        if self.layout == "line":
            if self.rows != 1 or self.cols < LINE or self.cols % LINE or self.dtype not in REGISTER_DTYPES:
                allowed = f"one row, a positive multiple of {LINE} columns, and one of {REGISTER_DTYPES}"
                raise ValueError(f"rt: a line has {allowed}, got {self.rows} x {self.cols} of {self.dtype!r}")
            return
        if self.rows < 16 or self.cols < 16 or self.rows % 16 or self.cols % 16 or float in (type(self.rows), type(self.cols)):
            raise ValueError(f"rt: rows and cols must be positive multiples of 16, got {self.rows} x {self.cols}")
        if self.dtype not in EVERY_DTYPE + SUMS:
            raise ValueError(f"rt: dtype must be one of {EVERY_DTYPE + SUMS}, got {self.dtype!r}")
        if self.shape[self.layout == "row"] % (8 * self.dtype.run):
            side = "cols" if self.layout == "row" else "rows"
            raise ValueError(f"rt: {side} of {self} must be a multiple of {8 * self.dtype.run}")

    def __str__(self):
        return f"rt({self.rows}, {self.cols}, {self.dtype}{f', {self.layout}' * (self.layout != 'row')})"

    @functools.cached_property
    def shape(self):
        """The extents as a tuple (rows, cols)."""
        return self.rows, self.cols

    @functools.cached_property
    def col_vec(self):
        """The vector with one value per row."""
        return rv(self.rows, self._vector_dtype, "col_vec", layout=self.layout)

    @functools.cached_property
    def row_vec(self):
        """The vector with one value per column."""
        return rv(self.cols, self._vector_dtype, "row_vec", layout=self.layout)

    @property
    def _vector_dtype(self):
        """The dtype of its vectors. AttributeError: there are none."""
        if self.dtype in SUMS:
            raise AttributeError(f"{self} has no vectors: convert it, fp32(x)")
        return self.dtype

    @functools.cached_property
    def elements(self):
        """The number of elements that each lane holds."""
        return self.rows * self.cols // layout.LANES

    def element(self, lane, index):
        """(row, col) of the `index`-th element that `lane` holds."""
        if self.layout == "line":
            return layout.line_element(lane, index, self.elements)
        if self.layout == "row":
            return layout.element(lane, index, self.cols, self.dtype.run)
        return layout.column_element(lane, index, self.rows, self.dtype.run)

    def lane_index(self, vector):
        """For each of a lane's elements, the index of the vector element that broadcasts to it."""
        index = layout.col_vec_index if vector.by_quad else layout.row_vec_index
        return [index(i, self.cols if self.layout == "row" else self.rows) for i in range(self.elements)]


@dataclass(frozen=True)
class rv:
    """A vector in registers, an fp32 register an element, whatever the dtype. Its axis is part of its type: a `col_vec` has one
    value per row of a tile, a `row_vec` one per column, so `tile - vector` broadcasts without being told how. `partial`: each
    lane holds only its share of a row's sum; partial sums may be scaled and added, and `finish_sum` makes them whole.
    `layout`: that of the tiles it goes with."""

    length: int
    dtype: dtype
    axis: str
    partial: bool = False
    layout: str = "row"

    def __post_init__(self):
        if self.dtype not in EVERY_DTYPE:
            raise ValueError(f"rv: dtype must be one of {EVERY_DTYPE}, got {self.dtype!r}")

    def __str__(self):
        return f"{'partial ' * self.partial}{self.axis}({self.length}, {self.dtype}{', col' * (self.layout == 'col')})"

    @functools.cached_property
    def shape(self):
        """The shape with which it broadcasts against its tile: (length, 1) or (1, length)."""
        return (self.length, 1) if self.axis == "col_vec" else (1, self.length)

    @functools.cached_property
    def by_quad(self):
        """Do the four lanes of a quad hold the same elements, or else the eight lanes with one number in their quads? The
        former for one value a row of a tile in row layout, or a column of one in column layout."""
        return (self.axis == "col_vec") == (self.layout == "row")

    @functools.cached_property
    def holders(self):
        """The bits of a lane's number in which lanes that hold the same elements differ; the one with zeros there writes."""
        return 3 if self.by_quad else 28

    @functools.cached_property
    def elements(self):
        """Elements that each lane holds: of a base tile's sixteen two if quads agree, else four."""
        return self.length // (8 if self.by_quad else 4)

    def element(self, lane, index):
        """Which element of the vector is the `index`-th that `lane` holds."""
        return (layout.col_vec_element if self.by_quad else layout.row_vec_element)(lane, index)


@dataclass(frozen=True)
class pending:
    """What an asynchronous mma returns: a tile that must not be used before `warpgroup.wait`."""

    tile: rt

    def __str__(self):
        return f"pending {self.tile}"


@dataclass(frozen=True)
class st:
    """A tile in shared memory, stored in swizzled panels `width` bytes wide: 128, 64 or 32, by default the widest that
    divides a row. rows: a multiple of 8; a row: a multiple of 32 bytes. parent_rows: the rows of the tile that this
    one is a part of (see ops.subtile): its panels are that many rows apart. By default `rows`: it is no part of another
    tile."""

    rows: int
    cols: int
    dtype: dtype
    width: int = 0
    parent_rows: int = 0

    def __post_init__(self):
        if self.rows < 8 or self.rows % 8:
            raise ValueError(f"st: rows must be a positive multiple of 8, got {self.rows}")
        if self.parent_rows and (self.parent_rows < self.rows or self.parent_rows % 8):
            raise ValueError(
                f"st: parent_rows must be a multiple of 8 and at least the {self.rows} rows, got {self.parent_rows}"
            )
        row = self.cols * self.dtype.itemsize
        object.__setattr__(self, "width", self.width or layout.swizzle_width(row))
        object.__setattr__(self, "parent_rows", self.parent_rows or self.rows)
        if self.width not in layout.WIDTHS or row % self.width:
            raise ValueError(f"st: width must be one of {layout.WIDTHS} and divide a row of {row} bytes, got {self.width}")

    def __str__(self):
        return f"st({self.rows}, {self.cols}, {self.dtype})" + f" of {self.parent_rows} rows" * (self.parent_rows != self.rows)

    @functools.cached_property
    def shape(self):
        """The extents as a tuple (rows, cols)."""
        return self.rows, self.cols

    @functools.cached_property
    def nbytes(self):
        """The number of bytes of all elements together."""
        return self.rows * self.cols * self.dtype.itemsize

    @functools.cached_property
    def unsliced(self):
        """The type of a tile like this one that is no part of another."""
        return replace(self, parent_rows=0)

    @functools.cached_property
    def panel_cols(self):
        """Columns of one panel: the inner extent of a TMA box."""
        return self.width // self.dtype.itemsize

    @functools.cached_property
    def panels(self):
        """How many panels it is divided into."""
        return self.cols // self.panel_cols

    @functools.cached_property
    def panel_bytes(self):
        """The distance of panels in bytes."""
        return self.parent_rows * self.width

    def offset(self, row, col):
        """The offset of an element in bytes."""
        return layout.shared_offset(row, col, self.parent_rows, self.dtype.itemsize, self.width)

    def offsets(self, rows=None):
        """Byte offsets of all elements of `rows` (a range; all by default), as an array (rows, cols)."""
        rows = np.arange(self.rows) if rows is None else np.asarray(rows)
        return self.offset(rows[:, None], np.arange(self.cols)[None, :])

    @functools.cached_property
    def swizzle(self):
        """The end of the driver's name for its swizzle."""
        return f"{self.width}B"

    align = TILE_ALIGN

    @functools.cached_property
    def stage_bytes(self):
        """The distance of adjacent stages of a ring in bytes."""
        return self.nbytes


VECTOR_BOX, VECTOR_ALIGN = 256, 128  # elements that TMA copies at once; bytes, of where it begins in shared memory


@dataclass(frozen=True)
class sv:
    """A vector in shared memory, its elements side by side. length: a multiple of 16, as of vectors in registers, up to 256;
    or a multiple of 128, which TMA copies in parts. To TMA it is a tile of one row."""

    length: int
    dtype: dtype

    def __post_init__(self):
        if self.length < 16 or self.length % (16 if self.length <= VECTOR_BOX else VECTOR_BOX // 2):
            raise ValueError(f"sv: length must be a positive multiple of 16 up to 256, or one of 128, got {self.length}")
        if self.dtype not in EVERY_DTYPE:
            raise ValueError(f"sv: dtype must be one of {EVERY_DTYPE}, got {self.dtype!r}")

    def __str__(self):
        return f"sv({self.length}, {self.dtype})"

    rows, parent_rows, align, swizzle = 1, 1, VECTOR_ALIGN, "NONE"
    cols = property(lambda self: self.length, doc="Its elements: to TMA it is one row.")
    shape = property(lambda self: (self.length,), doc="(length,)")
    unsliced = property(lambda self: self, doc="Itself: no vector is a part of another.")

    @functools.cached_property
    def nbytes(self):
        """The number of bytes of all elements together."""
        return self.length * self.dtype.itemsize

    @functools.cached_property
    def stage_bytes(self):
        """The distance of adjacent stages of a ring in bytes."""
        return -(-self.nbytes // VECTOR_ALIGN) * VECTOR_ALIGN

    @functools.cached_property
    def panel_cols(self):
        """Elements of one part: the extent of a TMA box."""
        return self.length if self.length <= VECTOR_BOX else VECTOR_BOX if self.length % VECTOR_BOX == 0 else VECTOR_BOX // 2

    @functools.cached_property
    def panels(self):
        """How many panels it is divided into."""
        return self.length // self.panel_cols

    @functools.cached_property
    def panel_bytes(self):
        """The distance of parts in bytes."""
        return self.panel_cols * self.dtype.itemsize

    width = property(lambda self: self.panel_bytes)

    def offsets(self, part=None):
        """Byte offsets of the elements of `part` (a range; all by default)."""
        return (np.arange(self.length) if part is None else np.asarray(part)) * self.dtype.itemsize


@dataclass(frozen=True)
class barrier:
    """An mbarrier in shared memory: a phase completes after `count` arrivals and all expected bytes."""

    count: int = 1

    def __str__(self):
        return f"barrier({self.count})"


@dataclass(frozen=True)
class remote:
    """A shared tile, vector or barrier of another block of the cluster: what `ops.cluster.map` gives."""

    item: "st | sv | barrier"

    def __str__(self):
        return f"remote {self.item}"


@dataclass(frozen=True)
class gl:
    """A global array of `rank` axes as TMA sees it, cut into tiles along the axes `rows` and `cols`.

    In a kernel it is indexed by one number per axis: the tile axes count tiles, the others elements; trailing indices that
    are left out are 0. `storable`: the array has whole chunks of 16 bytes along `cols`. TMA writes whole chunks, so it would
    write past the end of other arrays. A tile may be a shared vector: it lies along `cols`, and `rows` is None. `unit`: what
    the index along `rows` counts, the tile's rows by default; 1 lets tiles begin at any row. On the host,
    `tiles.tensor(array, tile, rows=, cols=)` makes one."""

    tile: "st | sv"
    rank: int
    rows: int | None
    cols: int
    storable: bool = True
    unit: int = 0

    def __post_init__(self):
        object.__setattr__(self, "unit", self.unit or self.tile.rows)

    def __str__(self):
        axes = f"axis {self.cols}" if self.rows is None else f"axes {self.rows}, {self.cols}"
        steps = f", by {self.unit} rows" * (self.unit != self.tile.rows)
        return f"gl({self.tile} over {axes} of {self.rank}{steps}{', not storable' * (not self.storable)})"

    @functools.cached_property
    def extents(self):
        """{axis: extent of a tile along it}"""
        return {axis: n for axis, n in ((self.rows, self.tile.rows), (self.cols, self.tile.cols)) if axis is not None}

    @functools.cached_property
    def steps(self):
        """{axis: elements that one index counts there, if not one}"""
        return {axis: self.unit if axis == self.rows else n for axis, n in self.extents.items()}

    def origin(self, at):
        """The index, along each axis, of the first element of the tile at `at`."""
        at, steps = tuple(at) + (0,) * (self.rank - len(at)), self.steps
        return tuple(i * steps.get(axis, 1) for axis, i in enumerate(at))


def finished_type(vector):
    """The type of a partial sum once it is finished."""
    return replace(vector, partial=False)


def is_static(value) -> bool:
    """Is this a static object (static.py)?"""
    return hasattr(type(value), "__static__")
