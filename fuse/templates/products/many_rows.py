"""Products of many rows, more than 64: the tensor cores are kept busy.

A persistent block computes tiles of 128 rows: two consumer warpgroups of 64 rows multiply, a producer warp loads, and a tile is
stored, part by part and through the epilogue, during the first products of the next one. A prologue on x runs in a kernel of
its own: inside this loop it would slow the products more (bench/notes/fuse_many_rows.md). Two products of one x share a tile's
columns; several that are results themselves lie side by side. Several maps of the same products are stored together, each from
a shared tile of its own; their other inputs are loaded a part ahead. Two blocks, one below the other, form a cluster and read
weights once, half each for both. A product of another left factor that is added, x @ w + t @ b, is one or several further steps
along k: [x, t] @ [w; b]. In a batch the tiles of one product follow those of another. Scores that only a softmax needs are not
stored (term_operations.reduce_parts): each 128 columns become three numbers per row, by an online softmax.

many_rows.jinja is the kernel. This file decides when it serves and its schedule; many_rows_text.py fills its gaps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tiles.launching.lengths import watched_call

from ...language.axes import PART, Axis
from ...language.graph import is_matrix
from ...language.terms import Term
from ...writing.kernel_text import DTYPES, KernelText
from .few_rows import MOST_ROWS
from .jinja_template import render
from .many_rows_text import STEP, template_gaps
from .product import MOST_PRODUCTS, Product
from .product_match import Extension, Weight, find_extension, match_products

if TYPE_CHECKING:
    from typing_extensions import Self

ROWS = 128  # rows of a tile
OVERHEAD = 16  # the time of a tile besides its products, in columns
MOST_RESULTS = 3  # the most results that are stored together
NARROW = 64  # columns of tiles that are a single wave: the load rate of a multiprocessor limits it, and more of them load
WIDTHS = 256, 192, 128, NARROW  # wide tiles load less per product; narrow ones waste less of the last wave
STAGES = {NARROW: 8}  # the most stages, by width; 4 for other widths
SHARED = 225 * 1024
LONE = 64  # with more tiles of rows than this, a block may be without a peer


class ManyRowsSchedule(NamedTuple):
    """The tiles of a kernel. columns: of a tile of accumulators, of all products together. parts: in how many parts a tile is
    stored. stages: the slots of a ring. blocks: how many blocks a cluster has, one below the other, which read each tile of
    weights once."""

    columns: int
    parts: int
    stages: int
    blocks: int

    def __str__(self):
        pairs = " by pairs of blocks" if self.blocks > 1 else ""
        return f"tiles of {ROWS} x {self.columns} through {self.stages} stages{pairs}"


@functools.lru_cache(256)
def choose_schedule(
    row_tiles: int, n: int, products: int, processors: int, batch: int = 1, step: int = 64, results: int = 1, pairs: bool = True
) -> ManyRowsSchedule:
    """The schedule with the least sum of all waves' widths. row_tiles: how many tiles there are, one below the other. step: a
    product's columns must be a multiple of it. results: how many results are stored together. pairs: may two blocks work as a
    pair? They do if there are several waves, and few blocks or none without a peer."""

    def waves(columns: int) -> int:
        return -(-batch * row_tiles * -(-n * products // columns) // processors)

    widths = [c for c in WIDTHS if c % (step * products) == 0 and (c > NARROW or waves(c) == 1)]
    columns = min(widths, key=lambda c: waves(c) * (c + OVERHEAD))
    parts = columns // 64 * (1 if results == 1 else 2)  # several results need smaller parts, to fit registers
    budget = SHARED - results * ROWS * 2 * (columns // products // parts)
    blocks = 2 if pairs and waves(columns) > 1 and (row_tiles % 2 == 0 or row_tiles > LONE) else 1
    return ManyRowsSchedule(columns, parts, min(STAGES.get(columns, 4), budget // (2 * STEP * (ROWS + columns))), blocks)


class ManyRows(Product):
    """The kernel for products of many rows: see the module."""

    label, most_rows, overlaps_previous = "many", 2**31 - 1, True
    processors: int  # of the card
    schedule_override: ManyRowsSchedule | None = None  # the schedule for other lengths than those of its terms

    def __init__(
        self, results: tuple[Term, ...], x: Term, products: dict[Term, Weight], others: list[Term], extension: Extension | None
    ):
        super().__init__(results[0], x, x, products, {}, [], others, extension)
        self.roots, self.results = results, results

    @property
    def schedule(self) -> ManyRowsSchedule:
        """The tiles of the product."""
        return self.schedule_override or self.schedule_at({})

    def schedule_at(self, known: Mapping[Axis, Any]) -> ManyRowsSchedule:
        """The schedule for other extents of axes."""
        step, (batch, rows, _) = PART if self.softmax_partials else 64, self.sizes(known)
        sizes = -(-rows // ROWS), self.columns, len(self.products), self.processors, batch
        return watched_call(choose_schedule, *sizes, step, len(self.results), not self.softmax_partials and self.batch is None)

    @classmethod
    def kernels_for(cls, root: Term, processors: int, few: int = MOST_ROWS) -> Iterator[Self]:
        """The kernels that compute a term with more rows than `few`, on a card with so many multiprocessors."""
        yield from cls._kernels_for_results((root,), processors, few)

    @classmethod
    def multi_result_kernels_for(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute several maps of the same products and store them together. They read at most one other
        product, from memory, and in a batch none."""
        same_axes = len({tuple([axis and axis.root for axis in x.axes]) for x in roots}) == 1
        if 1 < len(roots) <= MOST_RESULTS and same_axes and any(x.operation != "matmul" for x in roots):
            kernels = cls._kernels_for_results(roots, processors, MOST_ROWS)
            budget = 1 if roots[0].ndim == 2 else 0  # a batch leaves no registers for it
            yield from (one for one in kernels if sum(y.operation == "matmul" for y in one.epilogue_inputs) <= budget)

    @classmethod
    def _kernels_for_results(cls, roots: tuple[Term, ...], processors: int, few: int) -> Iterator[Self]:
        """The kernels that compute these terms from complete products."""
        match, root = match_products(*roots), roots[0]
        if match is None or root.extents[-2] <= few:
            return
        all_products = match.products | {x: second for x, (_, second) in match.narrow.items()}
        all_products = {x: w for x, w in all_products.items() if x.operation == "matmul"}
        for x in dict.fromkeys(y.args[0] for y in all_products):
            products = {y: w for y, w in all_products.items() if y.args[0] is x}
            rest = {y: w for y, w in all_products.items() if y not in products}
            extension = None
            if len(products) == len(roots) == 1 and root.ndim == 2:
                (product,) = products
                extension = find_extension(root, product, products[product], rest)
            of_extension = extension.joint.args if extension else ()
            others = [*match.epilogue_inputs, *match.reductions, *(y for y in rest if y not in of_extension)]
            kernel = cls(roots, x, products, others, extension)
            kernel.processors = processors
            same_layout = len({w.transposed for w in kernel.weights}) == 1 and not kernel.reads_array_twice
            if (
                len(products) <= MOST_PRODUCTS
                and same_layout
                and kernel.of_16_bits
                and kernel.dtype in DTYPES
                and all(is_matrix(w.array) for w in kernel.weights)
                and kernel.lengths_known
            ):
                yield kernel

    @classmethod
    def softmax_kernels_for(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute statistics of blocks of scores for a softmax (term_operations.reduce_parts)."""
        yield from filter(None, (one.with_softmax_partials(roots) for one in cls.kernels_for(roots[0].args[0], processors, 0)))

    @classmethod
    def adjacent_kernels_for(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute several products with one left factor."""
        yield from filter(None, (one.with_adjacent(roots) for one in cls.kernels_for(roots[0], processors)))

    def __str__(self):
        return f"many rows of {', '.join(map(str, self.roots))}"

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        s = self.schedule
        phrases = [f"a product of many rows in {s}"]
        if self.extension:
            steps = "one further step" if self.extension.narrow else "further steps"
            phrases.append(f"adds {self.extension.left} @ its weights by {steps} along k")
        return ", ".join([*phrases, *self.stored_parts])

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        return render("many_rows.jinja", template_gaps(self, parameters, local_names))
