"""Products of few rows, 1 to 64: the weights stream at memory speed.

The product is computed as its transpose, y.T = w.T @ u.T with u = prologue(x): the weights, most of the bytes, are wgmma's left
operand, which takes 64 of their columns at a time, and the few rows its right one. 33 to 64 rows may also be the left operand;
tiles then have 96 columns, so that 6144 columns keep almost all multiprocessors busy. Weights come by TMA through a deep ring,
x and vectors along k through another. If there is a prologue, one warpgroup, the preparer, computes u, accumulates row sums,
and multiplies x by a narrow matrix. The blocks of a cluster split k (split-K) and add their sums up through distributed shared
memory; then the epilogue runs on the complete sums. Products of a batch lie along the grid's second axis.

A launch may overlap the previous one (PDL): it loads weights before that has ended, which must not write them (ops/grid.py).

few_rows.jinja is the kernel. This file decides when it serves and its schedule; few_rows_text.py fills its gaps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...language.axes import Axis
from ...language.graph import is_matrix
from ...language.maps import BYTES
from ...language.term_views import view_base
from ...language.terms import Term
from ...writing.kernel_text import DTYPES, KernelText
from .few_rows_text import template_gaps
from .jinja_template import render
from .product import Product
from .product_match import Weight, find_extension

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_ROWS = 64
MEMORY = 4.1e6  # bytes per microsecond that tiles of 64 to 256 columns stream at
INTAKE = 51e3  # bytes per microsecond that one multiprocessor takes in
UPRIGHT = 96  # columns of a tile where rows of x are wgmma's left operand
MIN_DEPTH = 64  # the extent of a tile along k, or twice that
DEEP = 1024  # the least k that a cluster of four blocks may split
EXCHANGE = 0.5  # microseconds of a sum over a cluster
ROOM = 222 * 2**10  # bytes of shared memory
SCALES = "float32", *DTYPES  # dtypes of the scales of groups
ITEM, MOST_SLOTS = 2, 12  # bytes of an operand's element; the most slots of a ring


class FewRowsSchedule(NamedTuple):
    """The tiles of a kernel. rows: rows of x in a tile, 16, 32 or 64. columns: columns of weights in a block's tile, 64 for
    each of its consumers. depth: the extent of a ring's slot along k. blocks: how many blocks a cluster has, each with a part
    of k. stages, ahead: the slots of a ring of weights, and of the ring of x."""

    rows: int
    columns: int
    depth: int
    blocks: int
    stages: int
    ahead: int


class FewRows(Product):
    """The kernel for products of few rows: see the module."""

    label = "few"
    keeps_sums = scales_groups = True
    processors: int  # of the card

    @functools.cached_property
    def widens(self) -> bool:
        """Are the weights of all products fp8, or all int8, with (n, k) in memory, and is nothing else of one byte an element?
        The kernel then converts them to 16 bits in registers."""
        others = [self.x, *self.vectors, *(w.array for pair in self.narrow.values() for w in pair)]
        dtypes = {w.array.stored_dtype("") for w in self.products.values()}
        return (
            len(dtypes) == 1
            and dtypes <= {*BYTES}
            and not any(view_base(x).stored_dtype("") in BYTES for x in others)
            and not self.extension
            and all(w.transposed for w in self.products.values())
        )

    @property
    def groups(self) -> list[int]:
        """How many rows of each weight have one scale, where scales are of groups of rows."""
        return [w.group for w in self.weights if w.scales is not None]

    @property
    def scales_fit(self) -> bool:
        """Can the kernel multiply by the scales of groups? A product's part for each tile along k is multiplied by one scale a
        column, so tiles are of one group; only products that convert their weights do this."""
        scaled = [w for w in self.products.values() if w.scales is not None]
        within_tiles = all(w.group % MIN_DEPTH == 0 for w in scaled)
        within_tiles &= all(w.scales is None or w.scales.stored_dtype("") in SCALES for w in scaled)
        return not self.groups or (self.widens and within_tiles and len(scaled) == len(self.groups) and self.batch is None)

    @property
    def unzips(self) -> bool:
        """Are the columns of x brought into the order in which weights of one byte are converted without an exchange
        (ops.unzipped)? For 64 rows without a prologue that takes longer than the exchange."""
        return self.widens and (not self.plain or self.rows <= MOST_ROWS // 2)

    @property
    def prepares_rows(self) -> bool:
        """Does one warpgroup prepare the rows of x for the products, by a prologue or by another order of columns?"""
        return not self.plain or self.unzips

    @property
    def has_preparer(self) -> bool:
        """Does one warpgroup prepare x, or compute sums or a narrow product from it?"""
        return self.prepares_rows or bool(self.row_sums or self.narrow)

    @property
    def overlaps_previous(self) -> bool:
        """May the kernel load its weights before the previous launch has ended? Not if that launch may write them."""
        return all(view_base(y).operation == "input" for w in self.weights for y in w.arrays)

    @property
    def early_reads(self) -> Sequence[Term]:
        return [view_base(y) for w in self.weights for y in w.arrays]

    @property
    def weight_dtype(self) -> str:
        """The name of the weights' dtype, of tiles."""
        one = next(iter(self.products.values())).array.stored_dtype("")
        return str(BYTES[one]) if self.widens else DTYPES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """The number of bytes of an element of the weights."""
        return 1 if self.widens else ITEM

    @property
    def rows_on_left(self) -> bool:
        """Are the rows of x wgmma's left operand? It takes 64 of them there."""
        return self.schedule is not None and self.schedule.columns == UPRIGHT

    @property
    def rank(self) -> int:
        """The columns of the narrow product, rounded up to 16, beyond which TMA loads zeros; 0 if there is no such product."""
        return max((-(-x.args[0].extents[1] // 16) * 16 for x in self.narrow), default=0)

    @functools.cached_property
    def schedule(self) -> FewRowsSchedule | None:
        """The schedule with the least estimated time, None if none fits. Two rates limit it: the bandwidth of memory, and how
        much one multiprocessor takes in, weights and rows of x together. Wide tiles read x less often; narrow tiles, and splits
        of k, keep more multiprocessors busy. A block has all shared memory of its multiprocessor."""
        rows = next(n for n in (16, 32, 64) if n >= self.rows)
        # of clusters of 4 no more than 30 run at once on 132 multiprocessors, of 2 all 66
        tilings = [(b, c) for c in (64, 128) for b in (1, 2)]
        if self.inner >= DEEP and -(-self.columns // 64) * (self.batch or 1) <= self.processors // 8:
            tilings.append((4, 64))
        is_single = len(self.products) == 1 and not (
            self.narrow or self.adjacent or self.extension or self.widens or self.batch
        )
        # A previous kernel would need multiprocessors, too.
        first = self.overlaps_previous and view_base(self.x).operation == "input"
        if rows == MOST_ROWS and is_single and first:
            tilings.append((2, UPRIGHT))
        wide = -1 if self.batch else 1  # in a batch a multiprocessor runs several blocks in turn: prefer fewer, wide ones
        _, blocks, columns = min(((self._estimate_microseconds(rows, c, b), b, wide * c) for b, c in tilings))
        columns *= wide
        wider, finer = (self._fit_rings(rows, columns, depth, blocks) for depth in (2 * MIN_DEPTH, MIN_DEPTH))
        deep = min(3, -(-self.inner // (128 * blocks)))
        cuts_group = any(group % (2 * MIN_DEPTH) for group in self.groups)
        if cuts_group or not self.plain or self.row_sums or (rows == MOST_ROWS and columns > 64):
            return finer  # 128 columns of rows in fp32 exceed the preparer's registers; and x arrives sooner
        return wider if wider and min(wider.stages, wider.ahead + 2 * self.prepares_rows) >= deep else finer or wider

    def _estimate_microseconds(self, rows: int, columns: int, blocks: int) -> float:
        """An estimate of the time, from these two rates and the time of a sum over a cluster."""
        count, batch = len(self.products), self.batch or 1
        tiles = -(-self.columns // columns) * batch
        turns = -(-tiles * blocks // self.processors)  # blocks that a multiprocessor works on
        bytes_read = turns * -(-self.inner // blocks) * (count * columns * self.weight_bytes + (rows + self.rank) * ITEM)
        memory = batch * count * self.inner * self.columns * self.weight_bytes / MEMORY
        return round(max(memory, bytes_read / INTAKE) + EXCHANGE * (blocks > 1), 1)

    def prepared_slots(self, rows: int) -> int:
        """The slots for prepared rows of x: one for each warp that takes turns, and some to work ahead if a tile has one warp
        for each 16 rows."""
        return max(2, 64 // rows) if rows < MOST_ROWS else 4

    def _fit_rings(self, rows: int, columns: int, depth: int, blocks: int) -> FewRowsSchedule | None:
        """The schedule with as many slots as fit shared memory, None if nothing fits. The rings of x and of prepared rows get
        as many slots as the weights' where possible, because a weight waits in its slot for its part of x."""
        count, turns = len(self.products), 64 // rows if self.has_preparer else 1  # warps take turns with slots of x
        x, slot = rows * depth * ITEM, count * columns * depth * self.weight_bytes + len(self.groups) * columns * 4
        second = self.prepared_slots(rows) * self.prepares_rows
        sent = count * rows * 4 * max(16, columns - columns // blocks)  # what peers send of their sums
        budget = ROOM - second * x - sent - max(turns, 4) * self.rank * (columns + rows) * ITEM
        beside = x + (self.rank + 2 * len(self.vectors)) * depth * ITEM  # what comes with a slot of x
        extension_columns = self.extension.left.extents[1] if self.extension else 0
        steps = -(-(-(-self.inner // depth) - (-extension_columns // depth)) // blocks)
        tall = 2 if columns == UPRIGHT else 1.5 if rows == MOST_ROWS else 1  # tiles of x are large, and all blocks load them
        fitting = [
            (min(tall * stages, ahead + (rows < MOST_ROWS) * second), stages, -ahead)
            for ahead in range(turns, MOST_SLOTS + 1, turns)
            for stages in range(1, min(steps, MOST_SLOTS) + 1)
            if stages * slot + ahead * beside <= budget
        ]
        return FewRowsSchedule(rows, columns, depth, blocks, max(fitting)[1], -max(fitting)[2]) if fitting else None

    @property
    def fixed_extents(self) -> dict[Axis, int]:
        """The extents that are in the kernel's text; and three groups, which show in a proof whether one is taken for another,
        or as many as there are: rings have no more stages than a call has steps along k."""
        groups = [(w.scales.axes[0], w.scales.extents[0]) for w in self.weights if w.scales is not None]
        return super().fixed_extents | {axis.root: min(3, n) for axis, n in groups if axis is not None}

    @property
    def text_key(self) -> Any:
        return self.schedule

    @property
    def most_rows(self) -> int:
        """The most rows that the kernel takes."""
        return self.schedule.rows if self.schedule else 0

    @classmethod
    def kernels_for(cls, root: Term, processors: int) -> Iterator[Self]:
        """The kernels that compute a term, on a card with so many multiprocessors."""
        for kernel in (kernel_variant for one in cls.matches(root) for kernel_variant in one.with_extension()):
            kernel.processors = processors
            joined = not kernel.narrow or (len(kernel.products) == 1 and len(kernel.narrow) == 1 and kernel.joint_sum)
            fitting = (kernel.of_16_bits or kernel.widens) and kernel.dtype in DTYPES and not kernel.reads_array_twice
            if kernel.rows <= MOST_ROWS and fitting and joined and kernel.scales_fit and kernel.schedule:
                yield kernel

    def with_extension(self) -> Iterator[Self]:
        """The kernel itself; and if it adds a product that is read from memory to its only product, the kernel that computes
        that one, too, in further steps along k."""
        yield self
        if not self.has_preparer and len(self.products) == 1 and self.root.ndim == 2:
            ((product, weight),) = self.products.items()
            rest = {y: Weight.from_term(y.args[1]) for y in self.epilogue_inputs if y.operation == "matmul"}
            extension = find_extension(self.root, product, weight, rest)
            if extension and is_matrix(extension.weight.array):
                others = [y for y in self.epilogue_inputs if y not in extension.joint.args]
                yield type(self)(self.root, self.x, self.operand, self.products, {}, [], others, extension)

    @classmethod
    def adjacent_kernels_for(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute several products with one left factor."""
        yield from filter(
            None, (one.with_adjacent(roots) for one in cls.kernels_for(roots[0], processors) if not one.extension)
        )

    def with_adjacent(self, roots: tuple[Term, ...]) -> Self | None:
        """This kernel with further products beside its own, or None: Product.with_adjacent. The schedule was chosen for the
        first product alone; if its rows are the left operand, which only a single product may have, another one is chosen."""
        kernel = super().with_adjacent(roots)
        if kernel and kernel.rows_on_left:
            del kernel.schedule
        return kernel if kernel and kernel.schedule else None

    def __str__(self):
        return f"few rows of {', '.join(map(str, self.roots))}"

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        s = self.schedule
        assert s
        count = len(self.products) + len(self.adjacent)
        subject = "a product of few rows: its" if count == 1 else f"{count} products of few rows: their"
        phrases = [f"{subject} weights stream through {s.stages} stage{'s' * (s.stages > 1)} of {s.depth} x {s.columns}"]
        phrases += [f"adds {self.extension.left} @ its weights by further steps along k"] if self.extension else []
        phrases += [f"clusters of {s.blocks} blocks split k"] * (s.blocks > 1)
        phrases += [f"{self.weight_dtype} is converted to 16 bits in registers"] * self.widens
        if self.groups:
            groups = " and ".join(map(str, dict.fromkeys(self.groups)))
            phrases.append(f"sums over groups of {groups} along k are multiplied by their scales")
        return ", ".join([*phrases, *self.stored_parts])

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        return render("few_rows.jinja", template_gaps(self, parameters, local_names))
