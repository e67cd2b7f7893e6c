"""Products of few rows, 1 to 64: the weights stream at memory speed.

The product is computed as its transpose, y.T = w.T @ u.T with u = prologue(x): the weights, most of what is read, stand on
the left of wgmma, which takes 64 of their columns at a time, and the few rows on its right. Up to 64 rows may as well stand
upright on its left; tiles then have 96 columns, so that 6144 of them keep almost all multiprocessors busy. Weights come by TMA
through a deep ring, x and vectors along k through another. If there is something to do with x, one warpgroup prepares u, adds
up the sides, and multiplies x by a narrow matrix. The blocks of a cluster take a part of k each, and add up what they have
through distributed shared memory; then the epilogue runs on what is complete. Products of a batch lie along the grid's second
axis.

A launch may be early: its weights are on their way before the launch before is done, which must not write them (ops/grid.py).

few_rows.jinja is the kernel; here stands when it serves, how it is cut, and what fills its gaps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..functions import FP8
from ..graph import along, is_tile
from ..lines import assigned
from ..module import DTYPES, Text, array, rendered
from ..terms import Term, viewed
from .product import Product, Weight, extended
from .product_text import Part, Words, extent, index, lead, reading

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_ROWS = 64
NAMES = (
    "u me inner batch col first band turn tile made right low weights mine steps narrow product total sums own place".split()
)  # ours
MEMORY = 4.1e6  # bytes a microsecond: what tiles of 64 to 256 columns stream at
INTAKE = 51e3  # the same of one multiprocessor
UPRIGHT = 96  # columns of a tile whose rows stand on wgmma's left
DEEP = 1024  # of k, from which on a cluster of four may share it
EXCHANGE = 0.5  # microseconds that a sum over a cluster takes
ROOM = 222 * 2**10  # bytes of shared memory for rings and what else there is
ITEM, MOST_SLOTS = 2, 12  # bytes of an operand's element; slots of a ring


class Schedule(NamedTuple):
    """How a kernel is cut into tiles. rows: rows of x in a tile, 16, 32 or 64. columns: columns of weights in a block's tile,
    64 for each of its consumers. depth: the extent of a ring's slot along k. blocks: how many blocks a cluster has, each with
    a part of k. stages, ahead: the slots of a ring of weights, and of the ring of x."""

    rows: int
    columns: int
    depth: int
    blocks: int
    stages: int
    ahead: int


class FewRows(Product):
    """The kernel for products of few rows: see the module."""

    label = "few"
    processors: int  # of the card

    @functools.cached_property
    def widens(self) -> bool:
        """Are the weights of all products fp8, with (n, k) in memory, and nothing else fp8? The kernel then widens them to 16
        bits in registers."""
        others = [self.x, *self.vectors, *(w.array for pair in self.narrow.values() for w in pair)]
        wide = not any(viewed(x).held_as("") == FP8 for x in others)
        return wide and not self.extension and all(w.turned and w.array.held_as("") == FP8 for w in self.products.values())

    @property
    def prepared(self) -> bool:
        """Does one warpgroup have to prepare x, or to compute sums or a narrow product from it?"""
        return not self.plain or bool(self.sides or self.narrow)

    @property
    def early(self) -> bool:
        """May the kernel begin to load its weights before the launch ahead of it has ended? Not if that launch may write
        them."""
        return all(viewed(w.array).operation == "input" for w in self.weights)

    @property
    def ahead(self) -> Sequence[Term]:
        """See Product."""
        return [viewed(w.array) for w in self.weights]

    @property
    def item(self) -> int:
        """Bytes of an element of the weights."""
        return 1 if self.widens else ITEM

    @property
    def upright(self) -> bool:
        """Do the rows of x stand on wgmma's left? It takes 64 of them there."""
        return self.schedule is not None and self.schedule.columns == UPRIGHT

    @property
    def rank(self) -> int:
        """The columns of the narrow product, rounded up to 16, beyond which TMA loads zeros; 0 if there is no such product."""
        return max((-(-x.of[0].extents[1] // 16) * 16 for x in self.narrow), default=0)

    @functools.cached_property
    def schedule(self) -> Schedule | None:
        """How the product is cut into tiles, None if it does not fit. Two rates limit it: the bandwidth of memory, and how
        much one multiprocessor takes in, weights and rows of x together. Wide tiles read x less often; narrow tiles, and parts
        of k, keep more multiprocessors busy. A block has all shared memory of its multiprocessor."""
        rows = next(n for n in (16, 32, 64) if n >= self.rows)
        # of clusters of 4 no more than 30 run at once on 132 multiprocessors, of 2 all 66
        ways = [(b, c) for c in (64, 128) for b in (1, 2)]
        if self.inner >= DEEP and -(-self.columns // 64) * (self.batch or 1) <= self.processors // 8:
            ways.append((4, 64))
        alone = len(self.products) == 1 and not (self.narrow or self.beside or self.extension or self.widens or self.batch)
        first = self.early and viewed(self.x).operation == "input"  # a kernel ahead wants multiprocessors, too
        if rows == MOST_ROWS and alone and first:
            ways.append((2, UPRIGHT))
        wide = -1 if self.batch else 1  # of a batch several blocks follow each other on a multiprocessor: wide ones are fewer
        _, blocks, columns = min(((self._microseconds(rows, c, b), b, wide * c) for b, c in ways))
        columns *= wide
        wider, finer = (self._rings(rows, columns, depth, blocks) for depth in (128, 64))
        deep = min(3, -(-self.inner // (128 * blocks)))
        if not self.plain or self.sides or (rows == MOST_ROWS and columns > 64):
            return finer  # in fp32 128 columns of rows are more than the preparer's registers hold; and x comes sooner
        return wider if wider and min(wider.stages, wider.ahead + 2 * (not self.plain)) >= deep else finer or wider

    def _microseconds(self, rows: int, columns: int, blocks: int) -> float:
        """An estimate of the time, from these two rates and the time that it takes to sum over a cluster."""
        count, batch = len(self.products), self.batch or 1
        tiles = -(-self.columns // columns) * batch
        turns = -(-tiles * blocks // self.processors)  # blocks that a multiprocessor works on
        taken = turns * -(-self.inner // blocks) * (count * columns * self.item + (rows + self.rank) * ITEM)
        memory = batch * count * self.inner * self.columns * self.item / MEMORY
        return round(max(memory, taken / INTAKE) + EXCHANGE * (blocks > 1), 1)

    def made(self, rows: int) -> int:
        """The slots for prepared rows of x: one for each warp that takes its turn, and some to work ahead if a tile has one
        warp for each band of rows."""
        return max(2, 64 // rows) if rows < MOST_ROWS else 4

    def _rings(self, rows: int, columns: int, depth: int, blocks: int) -> Schedule | None:
        """The schedule with as many slots as there is room for, None if there is no room. The rings of x and of prepared rows
        get as many slots as the weights' where possible, because a weight waits in its slot for its part of x."""
        count, turns = len(self.products), 64 // rows if self.prepared else 1  # warps take turns with slots of x
        x, slot = rows * depth * ITEM, count * columns * depth * self.item
        second = self.made(rows) * (not self.plain)
        sent = count * rows * 4 * max(16, columns - columns // blocks)  # what peers send of their sums
        room = ROOM - second * x - sent - max(turns, 4) * self.rank * (columns + rows) * ITEM
        beside = x + (self.rank + 2 * len(self.vectors)) * depth * ITEM  # what comes with a slot of x
        more = self.extension.left.extents[1] if self.extension else 0
        steps = -(-(-(-self.inner // depth) - (-more // depth)) // blocks)
        tall = 2 if columns == UPRIGHT else 1.5 if rows == MOST_ROWS else 1  # much of x, which all blocks ask for at once
        fitting = [
            (min(tall * stages, ahead + (rows < MOST_ROWS) * second), stages, -ahead)
            for ahead in range(turns, MOST_SLOTS + 1, turns)
            for stages in range(1, min(steps, MOST_SLOTS) + 1)
            if stages * slot + ahead * beside <= room
        ]
        return Schedule(rows, columns, depth, blocks, max(fitting)[1], -max(fitting)[2]) if fitting else None

    @property
    def most_rows(self) -> int:
        """The most rows that the kernel takes."""
        return self.schedule.rows if self.schedule else 0

    @classmethod
    def serving(cls, root: Term, processors: int) -> Iterator[Self]:
        """The kernels that compute a term, on a card with so many multiprocessors."""
        for kernel in (more for one in cls.matches(root) for more in one.with_extension()):
            kernel.processors = processors
            joined = not kernel.narrow or (len(kernel.products) == 1 and len(kernel.narrow) == 1 and kernel.joined)
            fitting = (kernel.of_16_bits or kernel.widens) and kernel.dtype in DTYPES and not kernel.twice
            if kernel.rows <= MOST_ROWS and fitting and joined and kernel.schedule:
                yield kernel

    def with_extension(self) -> Iterator[Self]:
        """The kernel itself; and if it adds a product that comes from memory to its only product, the kernel that computes
        that one, too, in further steps along k."""
        yield self
        if not self.prepared and len(self.products) == 1 and self.root.ndim == 2:
            ((product, weight),) = self.products.items()
            rest = {y: Weight.of(y.of[1]) for y in self.others if y.operation == "matmul"}
            found = extended(self.root, product, weight, rest)
            if found and is_tile(found.weight.array):
                others = [y for y in self.others if y not in found.joint.of]
                yield type(self)(self.root, self.x, self.operand, self.products, {}, [], others, found)

    @classmethod
    def beside_each_other(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute several products with one left factor."""
        yield from filter(None, (one.sharing(roots) for one in cls.serving(roots[0], processors) if not one.extension))

    def sharing(self, roots: tuple[Term, ...]) -> Self | None:
        """See Product. The schedule was made for the first product alone; if its rows stand upright, which only a single
        product may have, another one is made."""
        found = super().sharing(roots)
        if found and found.upright:
            del found.schedule
        return found if found and found.schedule else None

    def __str__(self):
        return f"few rows of {', '.join(map(str, self.roots))}"

    def explained(self) -> str:
        """What it does, in words."""
        s = self.schedule
        assert s
        told = [f"a product of few rows: its weights stream through {s.stages} stages of {s.depth} x {s.columns}"]
        told += [f"{self.extension.left} @ its weights is more steps along k"] if self.extension else []
        told += [f"clusters of {s.blocks} blocks share k"] * (s.blocks > 1)
        told += ["fp8 becomes 16 bits in registers"] * self.widens
        return ", ".join([*told, *self.riding])

    def text(self, name: str, parameters: dict[Term, str], spoken: dict[Term, str]) -> Text:
        """See RowMap.text."""
        return rendered("few_rows.jinja", _gaps(self, parameters, spoken))


class Named(NamedTuple):
    """An array that a kernel reads. name: what its elements are called. array: the kernel's parameter. loaded: the expression
    that reads them. lead: the first part of an index into it."""

    name: str
    array: str
    loaded: str = ""
    lead: str = ""


class Streamed(NamedTuple):
    """A weight that comes through a ring. ring, array: the names of the ring and of the kernel's parameter. tile: the name of
    its type. turned: see Weight. acc: the accumulator of its product. parts, full: the shared memory and the barrier for what
    other blocks of the cluster send of that product. lead: see Named. upright: see FewRows."""

    ring: str
    array: str
    tile: str
    turned: bool
    acc: str = ""
    parts: str = ""
    full: str = ""
    lead: str = ""
    upright: bool = False

    @property
    def form(self) -> str:
        """The letters of the product's op: y.T = w.T @ u.T, or y = u @ w."""
        return "ABt" if self.turned else "AB" if self.upright else "AtBt"

    def factors(self, u: str, i: str) -> str:
        """The expressions of the i-th tiles of both factors, the left one first."""
        if not self.upright:
            return f"{self.mine(i)}, {u}.wait({i})"
        tile = f"{self.ring}.wait({i})"  # of several panels; with (N, K) weights they do not run along k
        return f"{u}.wait({i}), {tile if self.turned else f'cluster.own({tile})'}"

    def mine(self, i: str) -> str:
        """The expression of the consumer's part of the i-th tile."""
        return f"subtile({self.ring}.wait({i}), {'64' if self.turned else 'DEPTH, 0, 64'}, me)"

    @classmethod
    def of(cls, weight: Weight, parameters: dict[Term, str], apart: bool = False, upright: bool = False) -> Streamed:
        """The Streamed of a weight. apart: are there several products, whose names must differ?"""
        name = parameters[weight.array]
        mark = f"{name}_" if apart else ""
        of_product = f"acc_{name}" if apart else "acc", f"{mark}parts", f"{mark}full"
        return cls(name, array(name), name.upper(), weight.turned, *of_product, lead(weight.array), upright)


class Side(NamedTuple):
    """A sum of rows that is computed alongside the product. inner: the expression of what is summed. parts, known: the shared
    memory and the barrier for what other blocks of the cluster send of it."""

    name: str
    inner: str
    parts: str
    known: str


class Narrow(NamedTuple):
    """A narrow product that is computed alongside, `first`, and the matrix that it is multiplied by, `second`. rank: its
    columns. scaled: the expression of the narrow product as it goes on."""

    rank: int
    first: Streamed
    second: Streamed
    scaled: str


class Vector(NamedTuple):
    """A vector along k that comes through a ring beside x. row: what it is called once it is read. at: the coordinates of its
    i-th part for TMA."""

    name: str
    array: str
    tile: str
    dtype: str
    row: str
    at: str

    @classmethod
    def of(cls, x: Term, name: str) -> Vector:
        dtype = DTYPES.get(viewed(x).what[1], "fp32")
        return cls(name, array(name), name.upper(), dtype, f"{name}_row", index(x, "0", "first + i"))


def _gaps(kernel: FewRows, parameters: dict[Term, str], spoken: dict[Term, str]) -> dict[str, Any]:
    """What fills the gaps of few_rows.jinja."""
    dtype, words = DTYPES[kernel.dtype], Words(kernel, parameters, spoken, NAMES)
    x = Named(parameters[kernel.x], array(parameters[kernel.x]), lead=lead(kernel.x))
    upright, several = kernel.upright, len(kernel.products) > 1
    products = [Streamed.of(w, parameters, several, upright) for w in kernel.products.values()]
    vectors = [Vector.of(v, parameters[v]) for v in kernel.vectors]

    # what the preparer does
    inside = {kernel.x: "tile"} | {v: one.row for v, one in zip(kernel.vectors, vectors)}
    prologue, operand, summed = words.prologue(inside)
    band = dtype if kernel.plain and not kernel.sides else "fp32"
    if kernel.narrow and band == "fp32":
        prologue, operand = [*prologue, f"made = {dtype}({operand})"], "made"
    sides = [Side(*one, f"{one[0]}_parts", f"known_{n}" if n > 1 else "known") for n, one in enumerate(summed, 1)]

    # what is made of it
    narrow = None
    if kernel.narrow:
        ((first, second),) = kernel.narrow.values()
        scaled = words.narrow("product", products[0].acc)
        narrow = Narrow(kernel.rank, Streamed.of(first, parameters), Streamed.of(second, parameters), scaled)
    known = {p: s.acc for p, s in zip(kernel.products, products)}
    extension = kernel.extension
    if extension:
        known[extension.joint] = products[0].acc
    known |= {side: f"{s.name}_of_rows" for side, s in zip(kernel.sides, sides)}
    place = "col_index(rt(16, ROWS, fp32).row_vec)", "row_index(rt(16, ROWS, fp32).col_vec) + mine"
    if upright:
        place = "row_index(rt(16, COLUMNS, fp32).col_vec) + mine", "col_index(rt(16, COLUMNS, fp32).row_vec) + COLUMNS * col"
    epilogue, written = words.epilogue(known, _read_upright if upright else _read, *place)

    opened = [x.name, *(v.name for v in vectors), *(["u"] if not kernel.plain else [])]
    opened += [part for p in products for part in (p.ring, p.parts, p.full)]
    opened += [part for s in sides for part in (s.parts, s.known)]
    rings = [*products, *([narrow.first, narrow.second] if narrow else [])]
    opened += [narrow.first.ring, narrow.second.ring, "narrow"] if narrow else []
    told = [(x.array, f"tensor({x.name}, X)"), *((v.array, f"tensor({v.name}, {v.tile})") for v in vectors)]
    told += [(r.array, f"tensor({r.ring}, {r.tile})") for r in rings]
    if narrow and not narrow.second.turned:
        told[-1] = narrow.second.array, f"tensor({narrow.second.ring}, st(RANK, COLUMNS, {dtype}))"
    if extension:
        left, right = parameters[extension.left], parameters[extension.weight.array]
        told += [(array(left), f"tensor({left}, X)"), (array(right), f"tensor({right}, {products[0].tile})")]
    result, wide, batch = parameters[kernel.root], extent(kernel.x, x.name, -1), kernel.batch is not None
    counted = f"-(-{extent(kernel.root, result, -1)} // COLUMNS) * BLOCKS"
    blocks = f"(blocks, {result}.shape[0])" if batch else "blocks"
    parts = Part.of(kernel, parameters)
    told += [(array(part.weight), f"tensor({part.weight}, {products[0].tile})") for part in parts[1:]]
    told += [(array(parameters[y]), parameters[y]) for y in (*kernel.others, *kernel.roots)]
    told += words.kept.arguments if words.kept else []
    steps = f"-(-{wide} // (BLOCKS * DEPTH))"
    early = ", early=True" if kernel.early else ""
    numbers = words.lengths + [(parameters[y],) * 2 for y in kernel.numbers]
    numbers += [(part.end,) * 2 for part in parts[:-1]]
    numbers += [("each", f"{parameters[kernel.each]}.shape[1]")] if kernel.each is not None else []
    ends = [f"{part.end} = {part.before + ' + ' if part.before else ''}-(-{part.result}.shape[1] // COLUMNS)" for part in parts]
    counted = "cols * BLOCKS" if parts else counted
    s = kernel.schedule
    assert s
    weights = "fp8e4m3" if kernel.widens else dtype
    types = [("X", f"st(ROWS, DEPTH, {dtype})")]
    types += [(p.tile, f"st({'COLUMNS, DEPTH' if p.turned else 'DEPTH, COLUMNS'}, {weights})") for p in products]
    types += [(v.tile, f"sv(DEPTH, {v.dtype})") for v in vectors]
    types += [("BAND", f"rt(16, DEPTH, {band})")] if kernel.prepared else []
    if narrow:
        thin = "RANK, DEPTH" if narrow.first.turned else "DEPTH, RANK"
        back = "COLUMNS, RANK" if narrow.second.turned else "TURNS * RANK, COLUMNS"
        types += [("RANK", f"{narrow.rank}"), (narrow.first.tile, f"st({thin}, {dtype})")]
        types += [(narrow.second.tile, f"st({back}, {dtype})")]
        types += [("NARROW", f"st(ROWS, TURNS * RANK, {dtype}, width=2 * RANK)")]
    return {
        "schedule": s, "dtype": dtype, "plain": kernel.plain, "prepared": kernel.prepared, "types": assigned(types, 0),
        "widens": kernel.widens, "upright": upright,
        "u": x.name if kernel.plain else "u", "opened": opened, "products": products, "narrow": narrow, "sides": sides,
        "vectors": vectors, "x": x, "prologue": prologue, "operand": operand, "epilogue": epilogue,
        "written": written, "result": array(result), "batch": batch, "lead": lead(kernel.root),
        "arguments": [*told, ("steps", "steps"), *([("inner", "inner")] if extension else []), *numbers],
        "extension": extension and {"x": array(left), "w": array(right)},
        "beside": parts, "made": kernel.made(s.rows),
        "before": [*ends, f"blocks, steps = {counted}, {steps}"] if not extension else [
            f"inner, more = -(-{wide} // DEPTH), -(-{left}.shape[1] // DEPTH)",
            f"blocks, steps = {counted}, -(-(inner + more) // BLOCKS)",
        ],
        "launch": f"{blocks}, THREADS, shared=smem, cluster=BLOCKS{early}", "bounds": "THREADS, 1",
    }  # fmt: skip


def _read_upright(y: Term, name: str) -> str:
    """The expression that reads another operand of the epilogue, for a tile whose rows stand upright."""
    return reading(y, name, "rt(16, COLUMNS, fp32)", "mine", "COLUMNS * col")


def _read(y: Term, name: str) -> str:
    """The expression that reads another operand of the epilogue, transposed as the accumulator is."""
    if y.operation == "spread":
        return f"load({name}, rt(16, ROWS, fp32).row_vec, (0, divmod(mine, each)[0]), cols=0)"
    if not any(y.names[-2:]):
        return reading(y, name, "", "", "")
    if is_tile(y):
        return f"transpose(load({name}, rt(ROWS, 16, fp32), {index(y, '0', 'mine')}))"
    if along(y):
        return f"load({name}, rt(16, ROWS, fp32).col_vec, {index(y, '0', 'mine')})"
    return f"load({name}, rt(16, ROWS, fp32).row_vec, {index(y, '0', '0')}, cols={y.ndim - 2})"
