"""The gaps of few_rows.jinja: a kernel's arrays, vectors and products, by their names, and its lines of code."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...language.graph import has_columns, is_matrix
from ...language.names import array
from ...language.term_views import view_base
from ...language.terms import Term
from ...writing.kernel_text import DTYPES
from ...writing.lines import format_assignments
from .product_match import Weight
from .product_text import AdjacentProduct, KernelArray, ProductWriter, extent, index, lead, read_expression

NAMES = "u wg inner batch groups col first band turn tile operand".split()  # variables of the kernel
NAMES += "right low weights warp_row steps narrow product total sums selected column".split()


class ScaleStream(NamedTuple):
    """The scales of groups of a weight's rows, which come through a ring beside it, a vector for each tile along k. ring,
    array, tile: see StreamedWeight. dtype: of tiles. row: the name of a vector once it is read. part: the product of one tile.
    at: the coordinates of the i-th vector for TMA. groups: the name of the number of groups."""

    ring: str
    array: str
    tile: str
    dtype: str
    row: str
    part: str
    at: str
    groups: str

    @classmethod
    def from_weight(cls, weight: Weight, parameters: dict[Term, str], depth: int, mark: str) -> ScaleStream:
        """The ScaleStream of a weight that has such scales. mark: see StreamedWeight.from_weight."""
        assert weight.scales is not None
        name, tiles = parameters[weight.scales], weight.group // depth
        group = "first + i" if tiles == 1 else f"(first + i) // {tiles}"
        last = f"{mark}groups - 1"  # tiles beyond the weight's end are zero
        at = f"(min({group}, {last}), col)"
        dtype = DTYPES.get(weight.scales.stored_dtype(""), "fp32")
        return cls(name, array(name), name.upper(), dtype, f"{name}_row", f"{mark}part", at, f"{mark}groups")

    def read(self, i: str) -> str:
        """The expression that reads the consumer's part of the i-th vector."""
        return f"warpgroup.load(subtile({self.ring}.wait({i}), 64, wg), rt(16, ROWS, fp32).col_vec)"


class StreamedWeight(NamedTuple):
    """A weight that comes through a ring. ring, array: the names of the ring and of the kernel's parameter. tile: the name of
    its type. transposed: see Weight. acc: the accumulator of its product. parts, full: the shared memory and the barrier for
    the sums that other blocks of the cluster send. lead: see KernelArray. rows_on_left: see FewRows. scales: of its groups, if
    it has such scales."""

    ring: str
    array: str
    tile: str
    transposed: bool
    acc: str = ""
    parts: str = ""
    full: str = ""
    lead: str = ""
    rows_on_left: bool = False
    scales: ScaleStream | None = None

    @property
    def running(self) -> str:
        """The accumulator of wgmma: of the whole product, or of a tile along k, which is then multiplied by its scales."""
        return self.scales.part if self.scales else self.acc

    @property
    def form(self) -> str:
        """The letters of the product's op: y.T = w.T @ u.T, or y = u @ w."""
        return "ABt" if self.transposed else "AB" if self.rows_on_left else "AtBt"

    def factors(self, u: str, i: str) -> str:
        """The expressions of the i-th tiles of both factors, the left one first."""
        if not self.rows_on_left:
            return f"{self.consumer_part(i)}, {u}.wait({i})"
        tile = f"{self.ring}.wait({i})"  # of several panels; with (N, K) weights they do not run along k
        return f"{u}.wait({i}), {tile if self.transposed else f'cluster.unmap({tile})'}"

    def consumer_part(self, i: str) -> str:
        """The expression of the consumer's part of the i-th tile."""
        return f"subtile({self.ring}.wait({i}), {'64' if self.transposed else 'DEPTH, 0, 64'}, wg)"

    @classmethod
    def from_weight(
        cls, weight: Weight, parameters: dict[Term, str], prefixed: bool = False, rows_on_left: bool = False, depth: int = 0
    ) -> StreamedWeight:
        """The StreamedWeight of a weight. prefixed: are there several products, whose names must differ? depth: the extent of
        its tiles along k."""
        name = parameters[weight.array]
        mark = f"{name}_" if prefixed else ""
        of_product = f"acc_{name}" if prefixed else "acc", f"{mark}parts", f"{mark}full"
        scales = None if weight.scales is None else ScaleStream.from_weight(weight, parameters, depth, mark)
        return cls(name, array(name), name.upper(), weight.transposed, *of_product, lead(weight.array), rows_on_left, scales)


class ClusterRowSum(NamedTuple):
    """A sum of rows that is computed alongside the product. inner: the expression that is summed. parts, ready: the shared
    memory and the barrier for the sums that other blocks of the cluster send."""

    name: str
    inner: str
    parts: str
    ready: str


class NarrowProductStream(NamedTuple):
    """A narrow product, `first`, that is computed alongside, and the matrix that it is multiplied by, `second`. rank: its
    columns. scaled: the expression of the narrow product as second's left factor."""

    rank: int
    first: StreamedWeight
    second: StreamedWeight
    scaled: str


class VectorStream(NamedTuple):
    """A vector along k that comes through a ring beside x. row: its name once it is read. at: the coordinates of its i-th part
    for TMA."""

    name: str
    array: str
    tile: str
    dtype: str
    row: str
    at: str

    @classmethod
    def from_term(cls, x: Term, name: str) -> VectorStream:
        dtype = DTYPES.get(view_base(x).attr[1], "fp32")
        return cls(name, array(name), name.upper(), dtype, f"{name}_row", index(x, "0", "first + i"))


def template_gaps(kernel: Any, parameters: dict[Term, str], local_names: dict[Term, str]) -> dict[str, Any]:
    """The values of the gaps of few_rows.jinja, by name."""
    dtype, words = DTYPES[kernel.dtype], ProductWriter(kernel, parameters, local_names, NAMES)
    x = KernelArray(parameters[kernel.x], array(parameters[kernel.x]), lead=lead(kernel.x))
    rows_on_left, several = kernel.rows_on_left, len(kernel.products) > 1
    depth = kernel.schedule.depth
    products = [StreamedWeight.from_weight(w, parameters, several, rows_on_left, depth) for w in kernel.products.values()]
    scales = [p.scales for p in products if p.scales]
    vectors = [VectorStream.from_term(v, parameters[v]) for v in kernel.vectors]

    # the prologue, in the preparer
    inside = {kernel.x: "tile"} | {v: one.row for v, one in zip(kernel.vectors, vectors)}
    prologue, operand, summed = words.prologue(inside)
    band_dtype = dtype if kernel.plain and not kernel.row_sums else "fp32"
    if kernel.narrow and band_dtype == "fp32":
        prologue, operand = [*prologue, f"operand = {dtype}({operand})"], "operand"
    narrowed = operand if band_dtype == dtype or kernel.narrow else f"{dtype}({operand})"
    prepared = f"unzipped({narrowed})" if kernel.unzips else operand
    sides = [ClusterRowSum(*one, f"{one[0]}_parts", f"ready_{n}" if n > 1 else "ready") for n, one in enumerate(summed, 1)]

    # products and epilogue
    narrow = None
    if kernel.narrow:
        ((first, second),) = kernel.narrow.values()
        scaled = words.narrow("product", products[0].acc)
        narrow = NarrowProductStream(
            kernel.rank, StreamedWeight.from_weight(first, parameters), StreamedWeight.from_weight(second, parameters), scaled
        )
    known = {p: s.acc for p, s in zip(kernel.products, products)}
    extension = kernel.extension
    if extension:
        known[extension.joint] = products[0].acc
    known |= {side: f"{s.name}_of_rows" for side, s in zip(kernel.row_sums, sides)}
    place = "col_index(rt(16, ROWS, fp32).row_vec)", "row_index(rt(16, ROWS, fp32).col_vec) + warp_row"
    if rows_on_left:
        place = (
            "row_index(rt(16, COLUMNS, fp32).col_vec) + warp_row",
            "col_index(rt(16, COLUMNS, fp32).row_vec) + COLUMNS * col",
        )
    epilogue, written = words.epilogue(known, _read_operand_with_rows_on_left if rows_on_left else _read_operand, *place)

    shared_names = [x.name, *(v.name for v in vectors), *(["u"] if kernel.prepares_rows else [])]
    shared_names += [part for p in products for part in (p.ring, p.parts, p.full)]
    shared_names += [one.ring for one in scales]
    shared_names += [part for s in sides for part in (s.parts, s.ready)]
    rings: list[StreamedWeight | ScaleStream] = [*products, *scales, *([narrow.first, narrow.second] if narrow else [])]
    shared_names += [narrow.first.ring, narrow.second.ring, "narrow"] if narrow else []
    arguments = [(x.array, f"tensor({x.name}, X)"), *((v.array, f"tensor({v.name}, {v.tile})") for v in vectors)]
    arguments += [(r.array, f"tensor({r.ring}, {r.tile})") for r in rings]
    if narrow and not narrow.second.transposed:
        arguments[-1] = narrow.second.array, f"tensor({narrow.second.ring}, st(RANK, COLUMNS, {dtype}))"
    if extension:
        left, right = parameters[extension.left], parameters[extension.weight.array]
        arguments += [(array(left), f"tensor({left}, X)"), (array(right), f"tensor({right}, {products[0].tile})")]
    result, wide, batch = parameters[kernel.root], extent(kernel.x, x.name, -1), kernel.batch is not None
    counted = f"-(-{extent(kernel.root, result, -1)} // COLUMNS) * BLOCKS"
    blocks = f"(blocks, {result}.shape[0])" if batch else "blocks"
    parts = AdjacentProduct.from_kernel(kernel, parameters)
    arguments += [(array(part.weight), f"tensor({part.weight}, {products[0].tile})") for part in parts[1:]]
    arguments += [(array(parameters[y]), parameters[y]) for y in (*kernel.epilogue_inputs, *kernel.roots)]
    arguments += words.selection.arguments if words.selection else []
    steps = f"-(-{wide} // (BLOCKS * DEPTH))"
    overlap = ", overlaps_previous=True" if kernel.overlaps_previous else ""
    numbers = words.lengths + [(parameters[y],) * 2 for y in kernel.numbers]
    numbers += [(part.end,) * 2 for part in parts[:-1]]
    numbers += [(one.groups, f"{one.ring}.shape[0]") for one in scales]
    numbers += [("each", f"{parameters[kernel.expert_stack]}.shape[1]")] if kernel.expert_stack is not None else []
    ends = [f"{part.end} = {part.before + ' + ' if part.before else ''}-(-{part.result}.shape[1] // COLUMNS)" for part in parts]
    counted = "cols * BLOCKS" if parts else counted
    s = kernel.schedule
    assert s
    weights = kernel.weight_dtype
    types = [("X", f"st(ROWS, DEPTH, {dtype})")]
    types += [(p.tile, f"st({'COLUMNS, DEPTH' if p.transposed else 'DEPTH, COLUMNS'}, {weights})") for p in products]
    types += [(v.tile, f"sv(DEPTH, {v.dtype})") for v in vectors]
    types += [(one.tile, f"sv(COLUMNS, {one.dtype})") for one in scales]
    types += [("BAND", f"rt(16, DEPTH, {band_dtype})")] if kernel.has_preparer else []
    if narrow:
        shape = "RANK, DEPTH" if narrow.first.transposed else "DEPTH, RANK"
        back = "COLUMNS, RANK" if narrow.second.transposed else "TURNS * RANK, COLUMNS"
        types += [("RANK", f"{narrow.rank}"), (narrow.first.tile, f"st({shape}, {dtype})")]
        types += [(narrow.second.tile, f"st({back}, {dtype})")]
        types += [("NARROW", f"st(ROWS, TURNS * RANK, {dtype}, width=2 * RANK)")]
    return {
        "schedule": s, "dtype": dtype, "prepares_rows": kernel.prepares_rows, "has_preparer": kernel.has_preparer,
        "types": format_assignments(types, 0),
        "widens": kernel.widens, "weight_dtype": weights, "rows_on_left": rows_on_left,
        "widened": f"unzipped(left, {dtype})" if kernel.unzips else f"{dtype}(left)",
        "left_factor": "u" if kernel.prepares_rows else x.name, "shared_names": shared_names, "products": products,
        "scales": scales, "narrow": narrow, "row_sums": sides,
        "vectors": vectors, "x": x, "prologue": prologue, "operand": operand, "prepared": prepared,
        "epilogue": epilogue,
        "written": written, "result": array(result), "batch": batch, "lead": lead(kernel.root),
        "arguments": [*arguments, ("steps", "steps"), *([("inner", "inner")] if extension else []), *numbers],
        "extension": extension and {"x": array(left), "w": array(right)},
        "adjacent_products": parts, "prepared_slots": kernel.prepared_slots(s.rows),
        "before": [*ends, f"blocks, steps = {counted}, {steps}"] if not extension else [
            f"inner, more = -(-{wide} // DEPTH), -(-{left}.shape[1] // DEPTH)",
            f"blocks, steps = {counted}, -(-(inner + more) // BLOCKS)",
        ],
        "launch": f"{blocks}, THREADS, shared=smem, cluster=BLOCKS{overlap}", "bounds": "THREADS, 1",
    }  # fmt: skip


def _read_operand_with_rows_on_left(y: Term, name: str) -> str:
    """The expression that reads another operand of the epilogue, for a tile whose rows are rows of x."""
    return read_expression(y, name, "rt(16, COLUMNS, fp32)", "warp_row", "COLUMNS * col")


def _read_operand(y: Term, name: str) -> str:
    """The expression that reads another operand of the epilogue, transposed as the accumulator is."""
    if y.operation == "repeat_columns":
        return f"load({name}, rt(16, ROWS, fp32).row_vec, (0, divmod(warp_row, each)[0]), cols=0)"
    if not any(y.axes[-2:]):
        return read_expression(y, name, "", "", "")
    if is_matrix(y):
        return f"transpose(load({name}, rt(ROWS, 16, fp32), {index(y, '0', 'warp_row')}))"
    if has_columns(y):
        return f"load({name}, rt(16, ROWS, fp32).col_vec, {index(y, '0', 'warp_row')})"
    return f"load({name}, rt(16, ROWS, fp32).row_vec, {index(y, '0', '0')}, cols={y.ndim - 2})"
