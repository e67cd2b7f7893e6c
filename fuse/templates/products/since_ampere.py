"""Products on GPUs without wgmma, since Ampere: mma.sync, fed by cp.async. No TMA, no clusters; any number of rows.

A block computes a tile of y. Its warps lie side by side where rows are few and one below the other where they are many; each
has rows of x in registers, computes the prologue and the row sums on them, and multiplies, straight from shared memory, by its
part of the weights. During a step the tiles of the next ones are loaded. A narrow product is computed alongside as one more
product of x, and is multiplied by its second matrix at the end. Products of a batch lie along the grid's second axis.

since_ampere.jinja is the kernel. This file decides when it serves and its schedule, and fills its gaps."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tiles.launching.lengths import watched_call

from ...language.axes import PART, Axis
from ...language.names import array
from ...language.terms import Term
from ...writing.kernel_text import DTYPES, KernelText
from .jinja_template import render
from .product import Product
from .product_match import Weight
from .product_text import ProductWriter, SoftmaxPartials, extent, index, lead, read_expression

if TYPE_CHECKING:
    from typing_extensions import Self

GROUP = 8  # the raster group: rows of tiles that share weights in L2
PROCESSORS = 108  # an A100's multiprocessors: with fewer large tiles, smaller ones serve
ROOM = 96 * 1024  # bytes of shared memory for tiles, of the 100 KB of sm_86, sm_89 and sm_120
MIN_ROWS = 16  # the rows of tiles are multiples of it
WARP = 8 * 4  # the columns of a narrow product are a multiple: each of four warps copies a multiple of 8
NAMES = "batch operand wide part band row col rows cols steps".split()  # variables of the kernel
NAMES += "later product smem i scores greatest at chosen end selected column".split()


class AmpereSchedule(NamedTuple):
    """The tiles of a kernel. rows, columns: of y in a block's tile. depth: the extent of a tile along k. stages: of a pipeline.
    group: the raster group, rows of tiles that share weights in L2. bands, parts: the warps, one below the other and side by
    side."""

    rows: int
    columns: int
    depth: int
    stages: int
    group: int
    bands: int
    parts: int

    def __str__(self):
        return f"tiles of {self.rows} x {self.columns} through {self.stages} stages"


@functools.lru_cache(256)
def choose_schedule(batch: int, m: int, n: int, products: int, rank: int, folds: bool) -> AmpereSchedule:
    """The schedule of a batch of products of m rows and n columns. rank: see SinceAmpere. folds: are tiles as wide as a block
    of columns of softmax partials?"""
    wide = 128 // products
    if m > 64 and batch * -(-m // 128) * -(-n // wide) >= PROCESSORS:
        rows, columns, depth, bands, parts = 128, wide, 32, 4, 1
    else:
        rows = next((few for few in (16, 32) if few >= m), 64)
        columns, depth, bands, parts = PART if folds else 64, 64, rows // 16, 1 if folds or rows == 64 else 2
    blocks = batch * -(-m // rows) * -(-n // columns)
    budget = ROOM // (1 if blocks <= PROCESSORS else 2) - 2 * columns * rank
    stage = 2 * depth * (rows + columns * products + rank)
    return AmpereSchedule(rows, columns, depth, max(2, min(4, budget // stage)), GROUP, bands, parts)


class SinceAmpere(Product):
    """The kernel for products by mma.sync: see the module."""

    label, most_rows, overlaps_previous = "product", 2**31 - 1, False
    schedule_override: AmpereSchedule | None = None  # the schedule for other lengths than those of its terms

    @property
    def schedule(self) -> AmpereSchedule:
        """The tiles of the product."""
        return self.schedule_override or self.schedule_at({})

    def schedule_at(self, known: Mapping[Axis, Any]) -> AmpereSchedule:
        """The schedule for other extents of axes."""
        (batch, m, n), form = self.sizes(known), (len(self.products), self.rank, bool(self.softmax_partials))
        m = -(-m // MIN_ROWS) * MIN_ROWS  # all numbers of rows of a tile have one schedule, which is looked up
        return watched_call(choose_schedule, batch, m, n, *form)

    @property
    def rank(self) -> int:
        """The columns of the narrow product, rounded up to what warps copy together; 0 if there is no such product."""
        return max((-(-x.args[0].extents[1] // WARP) * WARP for x in self.narrow), default=0)

    @property
    def copied(self) -> list[Term]:
        """The arrays that cp.async copies, 16 bytes at once."""
        return [self.x, *(w.array for w in self.weights)]

    @classmethod
    def kernels_for(cls, root: Term) -> Iterator[Self]:
        """The kernels that compute a term."""
        for kernel in cls.matches(root):
            accumulates_narrow = not kernel.narrow or (len(kernel.products) == 1 and kernel.joint_sum)
            distinct = len({*kernel.copied}) == len(kernel.copied)  # each has a pipeline, named after the array
            if accumulates_narrow and distinct and kernel.of_16_bits and kernel.dtype in DTYPES:
                yield kernel

    @classmethod
    def softmax_kernels_for(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute statistics of blocks of scores for a softmax (term_operations.reduce_parts)."""
        yield from filter(None, (one.with_softmax_partials(roots) for one in cls.kernels_for(roots[0].args[0])))

    @property
    def maps(self) -> float:
        """Operations on elements outside the tensor cores; each warp computes the prologue for itself."""
        s, each = self.schedule, (not self.plain) + len(self.row_sums)
        return float(math.prod(self.x.extents) * each * s.parts * -(-self.columns // s.columns) + math.prod(self.root.extents))

    def __str__(self):
        return f"product since Ampere of {', '.join(map(str, self.roots))}"

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        s = self.schedule
        phrase = f"a product by mma.sync in {s}, loaded by cp.async"
        return ", ".join([phrase, *self.stored_parts])

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        return render("since_ampere.jinja", _template_gaps(self, parameters, local_names))


class PipelinedMatrix(NamedTuple):
    """A matrix that comes through a pipeline. array: the kernel's parameter. transposed: see Weight. acc: the accumulator of
    its product. part: does a warp work on a part of its columns? column: the expression of where its columns begin. lead: the
    first part of an index, in a batch."""

    name: str
    array: str
    transposed: bool
    acc: str = ""
    part: bool = False
    column: str = "col"
    lead: str = ""

    @property
    def tile(self) -> str:
        return f"{self.name.upper()}_TILE"

    @property
    def tiles(self) -> str:
        return f"{self.name}_tiles"

    @property
    def form(self) -> str:
        return "ABt" if self.transposed else "AB"

    def at(self, k: str) -> str:
        """The index at which a tile begins."""
        return f"({self.lead}{f'{self.column}, {k}' if self.transposed else f'{k}, {self.column}'})"

    def warp_part(self, arrived: str, depth: str) -> str:
        """The expression of the warp's part of a tile that has arrived."""
        return f"subtile({arrived}, {'PART, part' if self.transposed else f'{depth}, 0, PART, part'})" if self.part else arrived


class PrefetchedVector(NamedTuple):
    """A vector along k, which is read from memory one step ahead."""

    name: str
    array: str
    term: Term

    def at(self, k: str) -> str:
        """The expression that reads it."""
        return f"load({self.array}, LEFT.row_vec, {index(self.term, '0', k)})"


class WarpRowSum(NamedTuple):
    """A sum of rows that is computed alongside the product. inner: the expression that is summed."""

    name: str
    inner: str


class NarrowProductPipeline(NamedTuple):
    """A narrow product, `first`, that is computed alongside, and the matrix that it is multiplied by, `second`. rank: its
    columns. scaled: the expression of the narrow product as second's left factor."""

    rank: int
    first: PipelinedMatrix
    second: PipelinedMatrix
    scaled: str


def _template_gaps(kernel: SinceAmpere, parameters: dict[Term, str], local_names: dict[Term, str]) -> dict[str, Any]:
    """The values of the gaps of since_ampere.jinja."""
    dtype, s = DTYPES[kernel.dtype], kernel.schedule

    def pipeline_of(weight: Weight, acc: str, **options: Any) -> PipelinedMatrix:
        name = parameters[weight.array]
        return PipelinedMatrix(name, array(name), weight.transposed, acc, lead=lead(weight.array), **options)

    several = len(kernel.products) > 1
    products = [
        pipeline_of(w, f"acc_{parameters[w.array]}" if several else "acc", part=s.parts > 1) for w in kernel.products.values()
    ]
    x, vectors = PipelinedMatrix(parameters[kernel.x], array(parameters[kernel.x]), True, column="row", lead=lead(kernel.x)), []
    for v in kernel.vectors:
        vectors.append(PrefetchedVector(parameters[v], array(parameters[v]), v))

    words = ProductWriter(kernel, parameters, local_names, (*NAMES, *(p.acc for p in products)))
    warp_rows = f"subtile({x.tiles}.wait(i, NEWER), BAND, band)"
    prologue, operand, summed = words.prologue({kernel.x: "wide"} if kernel.plain else {})
    if kernel.plain:
        prologue, operand = [f"wide = load({x.name}, LEFT)", *prologue] if summed else [], x.name
    else:
        warp_rows, operand = f"load({warp_rows}, LEFT)", f"{dtype}({operand})"
        if several or kernel.narrow:
            prologue, operand = [*prologue, f"operand = {operand}"], "operand"
    narrow = None
    if kernel.narrow:
        ((first, second),) = kernel.narrow.values()
        parts = pipeline_of(first, "product", column="0"), pipeline_of(second, "", part=s.parts > 1)
        narrow = NarrowProductPipeline(kernel.rank, *parts, words.narrow("product", products[0].acc))
    known = {y: p.acc for y, p in zip(kernel.products, products)} | {y: name for y, (name, _) in zip(kernel.row_sums, summed)}
    place = "row_index(ACC.col_vec) + row", "col_index(ACC.row_vec) + col"
    epilogue, written = words.epilogue(known, lambda y, name: read_expression(y, name, "ACC", "row", "col"), *place)

    rings = [*products, *([narrow.first] if narrow else [])]
    shared_names = [one.tiles for one in (x, *rings, *([narrow.second] if narrow else []))]
    result, batch, folds = (
        parameters[kernel.roots[0]],
        kernel.batch is not None,
        SoftmaxPartials.from_kernel(kernel, parameters),
    )
    grid = f"(rows * cols, {result}.shape[0])" if batch else "rows * cols"
    tall, wide, deep = *(extent(kernel.root, result, n) for n in (-2, -1)), extent(kernel.x, x.name, -1)
    cols = f"{result}.shape[1]" if folds else f"-(-{wide} // COLUMNS)"
    read = dict.fromkeys([kernel.x, *(w.array for w in kernel.weights), *kernel.vectors, *kernel.epilogue_inputs])
    outs = [*(folds.arguments if folds else [(array(result), result)]), *(words.selection.arguments if words.selection else [])]
    arguments = [*((array(parameters[y]), parameters[y]) for y in read), *outs] + [(n, n) for n in ("rows", "cols", "steps")]
    arguments += [("each", f"{parameters[kernel.expert_stack]}.shape[1]")] if kernel.expert_stack is not None else []
    arguments += words.lengths + [(parameters[n], parameters[n]) for n in kernel.numbers]
    return {
        "schedule": s, "dtype": dtype, "x": x, "products": products, "rings": rings, "narrow": narrow, "vectors": vectors,
        "row_sums": [WarpRowSum(*one) for one in summed], "needs_left_tile": bool(vectors or summed or not kernel.plain),
        "prologue": prologue, "operand": operand, "warp_rows": warp_rows, "shared_names": shared_names,
        "epilogue": epilogue, "written": written,
        "result": array(result), "arguments": arguments, "launch": f"{grid}, 32 * WARPS, shared=smem",
        "batch": batch, "partials": folds, "at": index(kernel.root, "row", "col"),
        "before": [
            f"rows, cols = -(-{tall} // ROWS), {cols}",
            f"steps = -(-{deep} // DEPTH)",
        ],
        "bounds": "32 * WARPS, 2",
    }  # fmt: skip
