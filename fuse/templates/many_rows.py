"""Products of many rows, more than 64: the tensor cores are kept busy.

A persistent block computes tiles of 128 rows: two consumers of 64 rows multiply, a producer feeds them, and a tile leaves
part by part under the first products of the next one, through the epilogue. What is done to x comes before, in a kernel of
its own: inside this loop it would cost the products more (bench/notes/fuse_many_rows.md). Two products of one x share a
tile's columns; several that are results of their own lie side by side. Several maps of the same products leave together, each
by a shared tile of its own; what they want besides is read a part ahead. Two blocks one below the other read weights once,
each a half for both. A product of another left factor that is added, x @ w + t @ b, is a step more along k, or several: [x,
t] @ [w; b]. In a batch the tiles of one product follow those of another. Of scores that only a softmax wants (terms.of_parts)
no tile leaves: each 128 columns of it become three numbers a row, by an online softmax.

many_rows.jinja is the kernel. Here stands when it serves and how it is cut; many_rows_text.py fills its gaps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tiles.lengths import made

from ..axes import PART, Axis
from ..graph import is_tile
from ..module import DTYPES, KernelText, rendered
from ..terms import Term
from .few_rows import MOST_ROWS
from .found import Extension, Weight, find_extension, match_products
from .many_rows_text import STEP, gaps
from .product import MOST_PRODUCTS, Product

if TYPE_CHECKING:
    from typing_extensions import Self

ROWS = 128  # of a tile
OVERHEAD = 16  # columns' worth of time that a tile takes besides its products
MOST_RESULTS = 3  # that leave together
NARROW = 64  # columns, of the only wave: it is the intake of multiprocessors that binds, and more of them take in
WIDTHS = 256, 192, 128, NARROW  # the wider, the less is read for a product; but the last wave may be emptier
STAGES = {NARROW: 8}  # at most, by width, if not 4: of little tiles more must be on their way
SHARED = 225 * 1024
LONE = 64  # tiles of rows, from which on a block may be without a peer


class ManyRowsSchedule(NamedTuple):
    """How a kernel is cut into tiles. columns: of a tile of accumulators, of all products together. parts: in how many parts a
    tile is stored. stages: the slots of a ring. blocks: how many blocks a cluster has, one below the other, which read each
    tile of weights once."""

    columns: int
    parts: int
    stages: int
    blocks: int

    def __str__(self):
        pairs = " by pairs of blocks" if self.blocks > 1 else ""
        return f"tiles of {ROWS} x {self.columns} through {self.stages} stages{pairs}"


@functools.lru_cache(256)
def schedule(
    m: int, n: int, products: int, processors: int, batch: int = 1, step: int = 64, results: int = 1, pairs: bool = True
) -> ManyRowsSchedule:
    """The schedule for which the sum of all waves' widths is least. step: a product's columns must be a multiple of it.
    results: how many results are stored together. pairs: may two blocks work as a pair? They do if there are several waves,
    and few blocks or none without a peer."""
    tall = -(-m // ROWS)

    def waves(columns: int) -> int:
        return -(-batch * tall * -(-n * products // columns) // processors)

    widths = [c for c in WIDTHS if c % (step * products) == 0 and (c > NARROW or waves(c) == 1)]
    columns = min(widths, key=lambda c: waves(c) * (c + OVERHEAD))
    parts = columns // 64 * (1 if results == 1 else 2)  # what several are made of would not fit registers else
    room = SHARED - results * ROWS * 2 * (columns // products // parts)
    blocks = 2 if pairs and waves(columns) > 1 and (tall % 2 == 0 or tall > LONE) else 1
    return ManyRowsSchedule(columns, parts, min(STAGES.get(columns, 4), room // (2 * STEP * (ROWS + columns))), blocks)


class ManyRows(Product):
    """The kernel for products of many rows: see the module."""

    label, most_rows, early = "many", 2**31 - 1, True
    processors: int  # of the card
    scheduled: ManyRowsSchedule | None = None  # how it is cut, if other lengths decide that than those of its terms

    def __init__(
        self, results: tuple[Term, ...], x: Term, products: dict[Term, Weight], others: list[Term], extension: Extension | None
    ):
        super().__init__(results[0], x, x, products, {}, [], others, extension)
        self.roots, self.results = results, results

    @property
    def schedule(self) -> ManyRowsSchedule:
        """How the product is cut into tiles."""
        return self.scheduled or self.schedule_at({})

    def schedule_at(self, known: Mapping[Axis, Any]) -> ManyRowsSchedule:
        """How it is cut for other lengths of axes."""
        step, (batch, rows, _) = PART if self.folds else 64, self.sizes(known)
        sizes = rows, self.columns, len(self.products), self.processors, batch
        return made(schedule, *sizes, step, len(self.results), not self.folds and self.batch is None)

    @classmethod
    def kernels_for(cls, root: Term, processors: int, few: int = MOST_ROWS) -> Iterator[Self]:
        """The kernels that compute a term with more rows than `few`, on a card with so many multiprocessors."""
        yield from cls._making((root,), processors, few)

    @classmethod
    def together(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute several maps of the same products and store them together. They read at most one other
        product, from memory, and in a batch none."""
        alike = len({tuple([axis and axis.root for axis in x.axes]) for x in roots}) == 1
        if 1 < len(roots) <= MOST_RESULTS and alike and any(x.operation != "matmul" for x in roots):
            every = cls._making(roots, processors, MOST_ROWS)
            room = 1 if roots[0].ndim == 2 else 0  # of a batch registers would not do
            yield from (one for one in every if sum(y.operation == "matmul" for y in one.others) <= room)

    @classmethod
    def _making(cls, roots: tuple[Term, ...], processors: int, few: int) -> Iterator[Self]:
        """The kernels that compute these terms from complete products."""
        found, root = match_products(*roots), roots[0]
        if found is None or root.extents[-2] <= few:
            return
        every = found.products | {x: second for x, (_, second) in found.narrow.items()}
        every = {x: w for x, w in every.items() if x.operation == "matmul"}
        for x in dict.fromkeys(y.args[0] for y in every):
            products = {y: w for y, w in every.items() if y.args[0] is x}
            rest = {y: w for y, w in every.items() if y not in products}
            extension = None
            if len(products) == len(roots) == 1 and root.ndim == 2:
                (product,) = products
                extension = find_extension(root, product, products[product], rest)
            of_extension = extension.joint.args if extension else ()
            others = [*found.others, *found.reductions, *(y for y in rest if y not in of_extension)]
            kernel = cls(roots, x, products, others, extension)
            kernel.processors = processors
            alike = len({w.transposed for w in kernel.weights}) == 1 and not kernel.twice
            if (
                len(products) <= MOST_PRODUCTS
                and alike
                and kernel.of_16_bits
                and kernel.dtype in DTYPES
                and all(is_tile(w.array) for w in kernel.weights)
                and kernel.measured
            ):
                yield kernel

    @classmethod
    def softmax_kernels_for(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute what is known of the parts of rows of scores (terms.of_parts)."""
        yield from filter(None, (one.fold(roots) for one in cls.kernels_for(roots[0].args[0], processors, 0)))

    @classmethod
    def adjacent_kernels_for(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute several products with one left factor."""
        yield from filter(None, (one.sharing(roots) for one in cls.kernels_for(roots[0], processors)))

    def __str__(self):
        return f"many rows of {', '.join(map(str, self.roots))}"

    def describe(self) -> str:
        """What it does, in words."""
        s = self.schedule
        told = [f"a product of many rows in {s}"]
        told += (
            [f"{self.extension.left} @ its weights is {'one step' if self.extension.narrow else 'steps'} more along k"]
            if self.extension
            else []
        )
        return ", ".join([*told, *self.riding])

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        """See RowMap.text."""
        return rendered("many_rows.jinja", gaps(self, parameters, local_names))
