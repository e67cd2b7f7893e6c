"""Products of few rows, 1 to 64: the weights stream at memory speed.

The product is computed as its transpose, y.T = w.T @ u.T with u = prologue(x): the weights, most of what is read, stand on
the left of wgmma, which takes 64 of their columns at a time, and the few rows on its right. Up to 64 rows may as well stand
upright on its left; tiles then have 96 columns, so that 6144 of them keep almost all multiprocessors busy. Weights come by TMA
through a deep ring, x and vectors along k through another. If there is something to do with x, one warpgroup prepares u, adds
up the sides, and multiplies x by a narrow matrix. The blocks of a cluster take a part of k each, and add up what they have
through distributed shared memory; then the epilogue runs on what is complete. Products of a batch lie along the grid's second
axis.

A launch may be early: its weights are on their way before the launch before is done, which must not write them (ops/grid.py).

few_rows.jinja is the kernel. Here stands when it serves and how it is cut; few_rows_text.py fills its gaps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..functions import FP8
from ..graph import is_tile
from ..module import DTYPES, KernelText, rendered
from ..terms import Term, viewed
from .few_rows_text import gaps
from .found import Weight, find_extension
from .product import Product

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_ROWS = 64
MEMORY = 4.1e6  # bytes a microsecond: what tiles of 64 to 256 columns stream at
INTAKE = 51e3  # the same of one multiprocessor
UPRIGHT = 96  # columns of a tile whose rows stand on wgmma's left
DEEP = 1024  # of k, from which on a cluster of four may share it
EXCHANGE = 0.5  # microseconds that a sum over a cluster takes
ROOM = 222 * 2**10  # bytes of shared memory for rings and what else there is
ITEM, MOST_SLOTS = 2, 12  # bytes of an operand's element; slots of a ring


class FewRowsSchedule(NamedTuple):
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
        wide = not any(viewed(x).stored_dtype("") == FP8 for x in others)
        return (
            wide
            and not self.extension
            and all(w.transposed and w.array.stored_dtype("") == FP8 for w in self.products.values())
        )

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
        return max((-(-x.args[0].extents[1] // 16) * 16 for x in self.narrow), default=0)

    @functools.cached_property
    def schedule(self) -> FewRowsSchedule | None:
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

    def _rings(self, rows: int, columns: int, depth: int, blocks: int) -> FewRowsSchedule | None:
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
        return FewRowsSchedule(rows, columns, depth, blocks, max(fitting)[1], -max(fitting)[2]) if fitting else None

    @property
    def cut(self) -> Any:
        return self.schedule

    @property
    def most_rows(self) -> int:
        """The most rows that the kernel takes."""
        return self.schedule.rows if self.schedule else 0

    @classmethod
    def kernels_for(cls, root: Term, processors: int) -> Iterator[Self]:
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
            rest = {y: Weight.of(y.args[1]) for y in self.others if y.operation == "matmul"}
            found = find_extension(self.root, product, weight, rest)
            if found and is_tile(found.weight.array):
                others = [y for y in self.others if y not in found.joint.args]
                yield type(self)(self.root, self.x, self.operand, self.products, {}, [], others, found)

    @classmethod
    def adjacent_kernels_for(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute several products with one left factor."""
        yield from filter(None, (one.sharing(roots) for one in cls.kernels_for(roots[0], processors) if not one.extension))

    def sharing(self, roots: tuple[Term, ...]) -> Self | None:
        """See Product. The schedule was made for the first product alone; if its rows stand upright, which only a single
        product may have, another one is made."""
        found = super().sharing(roots)
        if found and found.upright:
            del found.schedule
        return found if found and found.schedule else None

    def __str__(self):
        return f"few rows of {', '.join(map(str, self.roots))}"

    def describe(self) -> str:
        """What it does, in words."""
        s = self.schedule
        assert s
        told = [f"a product of few rows: its weights stream through {s.stages} stages of {s.depth} x {s.columns}"]
        told += [f"{self.extension.left} @ its weights is more steps along k"] if self.extension else []
        told += [f"clusters of {s.blocks} blocks share k"] * (s.blocks > 1)
        told += ["fp8 becomes 16 bits in registers"] * self.widens
        return ", ".join([*told, *self.riding])

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        """See RowMap.text."""
        return rendered("few_rows.jinja", gaps(self, parameters, local_names))
