"""Products of many rows, more than 64: the tensor cores are kept busy.

A persistent block computes tiles of 128 rows: two consumers of 64 rows multiply, a producer feeds them, and a tile leaves
part by part under the first products of the next one, through the epilogue. What is done to x comes before, in a kernel of
its own: inside this loop it would cost the products more (bench/notes/fuse_many_rows.md). Two products of one x share a
tile's columns; several that are results of their own lie side by side. Several maps of the same products leave together, each
by a shared tile of its own; what they want besides is read a part ahead. Two blocks one below the other read weights once,
each a half for both. A product of another left factor that is added, x @ w + t @ b, is a step more along k, or several: [x,
t] @ [w; b]. In a batch the tiles of one product follow those of another. Of scores that only a softmax wants (terms.of_parts)
no tile leaves: each 128 columns of it become three numbers a row, by an online softmax.

many_rows.jinja is the kernel; here stands when it serves, how it is cut, and what fills its gaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..axes import PART
from ..graph import along, is_tile
from ..module import DTYPES, Text, array, rendered
from ..terms import Term, viewed
from ..writing import Writer
from .few_rows import MOST_ROWS, Named
from .product import MOST_PRODUCTS, Extension, Product, Weight, extended, found_in
from .product_text import Folds, Part, extent, index, keeping, lead, measuring, reading

if TYPE_CHECKING:
    from typing_extensions import Self

ROWS, STEP = 128, 64  # of a tile; along k
OVERHEAD = 16  # columns' worth of time that a tile takes besides its products
MOST_RESULTS = 3  # that leave together
NARROW = 64  # columns, of the only wave: it is the intake of multiprocessors that binds, and more of them take in
WIDTHS = 256, 192, 128, NARROW  # the wider, the less is read for a product; but the last wave may be emptier
STAGES = {NARROW: 8}  # at most, by width, if not 4: of little tiles more must be on their way
SHARED = 225 * 1024
LONE = 64  # tiles of rows, from which on a block may be without a peer


NAMES = "batch tall more last rank row col part n m me y width own place".split()  # of the kernel
NAMES += "following known nothing greatest higher total picked scores here chosen end".split()


class Schedule(NamedTuple):
    """How a kernel is cut into tiles. columns: of a tile of accumulators, of all products together. parts: in how many parts a
    tile is stored. stages: the slots of a ring. group: how many rows of tiles, or of clusters, make a band that is worked on
    together and shares what is read of the weights. blocks: how many blocks a cluster has, one below the other, which read
    each tile of weights once."""

    columns: int
    parts: int
    stages: int
    group: int
    blocks: int


def schedule(
    m: int, n: int, products: int, processors: int, batch: int = 1, step: int = 64, results: int = 1, pairs: bool = True
) -> Schedule:
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
    return Schedule(
        columns, parts, min(STAGES.get(columns, 4), room // (2 * STEP * (ROWS + columns))), -(-min(16, tall) // blocks), blocks
    )


class Sent(NamedTuple):
    """A result on its way to memory. slot: the shared tile that it is stored from. array: the parameter that it goes to. made:
    the expression of it."""

    slot: str
    array: str
    made: str


class Coming(NamedTuple):
    """A tile that the epilogue reads besides. One part of it is worked with while the next one is loaded. spec: the type of a
    part in registers. first, following: the expressions that load a tile's first part, and the part after the n-th."""

    name: str
    spec: str
    first: str
    following: str

    @classmethod
    def of(cls, y: Term, name: str, dtype: str) -> Coming:
        spec = f"rt(16, PART, {DTYPES.get(viewed(y).held_as(dtype), 'fp32')})"
        first, following = (
            f"warpgroup.load({array(name)}, {spec}, {index(y, 'ROWS * row', f'PART * {col}')})"
            for col in ("col", "(col + following)")
        )
        return cls(name, spec, first, following)


class ManyRows(Product):
    """The kernel for products of many rows: see the module."""

    label, most_rows, early = "many", 2**31 - 1, True
    processors: int  # of the card

    def __init__(
        self, results: tuple[Term, ...], x: Term, products: dict[Term, Weight], others: list[Term], extension: Extension | None
    ):
        super().__init__(results[0], x, x, products, {}, [], others, extension)
        self.roots, self.results = results, results

    @property
    def schedule(self) -> Schedule:
        """How the product is cut into tiles."""
        step = PART if self.folds else 64
        sizes = self.rows, self.columns, len(self.products), self.processors, self.batch or 1
        return schedule(*sizes, step, len(self.results), not self.folds and self.batch is None)

    @classmethod
    def serving(cls, root: Term, processors: int, few: int = MOST_ROWS) -> Iterator[Self]:
        """The kernels that compute a term with more rows than `few`, on a card with so many multiprocessors."""
        yield from cls._making((root,), processors, few)

    @classmethod
    def together(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute several maps of the same products and store them together. They read at most one other
        product, from memory, and in a batch none."""
        alike = len({tuple([axis and axis.root for axis in x.names]) for x in roots}) == 1
        if 1 < len(roots) <= MOST_RESULTS and alike and any(x.operation != "matmul" for x in roots):
            every = cls._making(roots, processors, MOST_ROWS)
            room = 1 if roots[0].ndim == 2 else 0  # of a batch registers would not do
            yield from (one for one in every if sum(y.operation == "matmul" for y in one.others) <= room)

    @classmethod
    def _making(cls, roots: tuple[Term, ...], processors: int, few: int) -> Iterator[Self]:
        """The kernels that compute these terms from complete products."""
        found, root = found_in(*roots), roots[0]
        if found is None or root.extents[-2] <= few:
            return
        every = found.products | {x: second for x, (_, second) in found.narrow.items()}
        every = {x: w for x, w in every.items() if x.operation == "matmul"}
        for x in dict.fromkeys(y.of[0] for y in every):
            products = {y: w for y, w in every.items() if y.of[0] is x}
            rest = {y: w for y, w in every.items() if y not in products}
            extension = None
            if len(products) == len(roots) == 1 and root.ndim == 2:
                (product,) = products
                extension = extended(root, product, products[product], rest)
            of_extension = extension.joint.of if extension else ()
            others = [*found.others, *found.reductions, *(y for y in rest if y not in of_extension)]
            kernel = cls(roots, x, products, others, extension)
            kernel.processors = processors
            alike = len({w.turned for w in kernel.weights}) == 1 and not kernel.twice
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
    def folding(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute what is known of the parts of rows of scores (terms.of_parts)."""
        yield from filter(None, (one.fold(roots) for one in cls.serving(roots[0].of[0], processors, 0)))

    @classmethod
    def beside_each_other(cls, roots: tuple[Term, ...], processors: int) -> Iterator[Self]:
        """The kernels that compute several products with one left factor."""
        yield from filter(None, (one.sharing(roots) for one in cls.serving(roots[0], processors)))

    def __str__(self):
        return f"many rows of {', '.join(map(str, self.roots))}"

    def explained(self) -> str:
        """What it does, in words."""
        s = self.schedule
        told = [f"a product of many rows in tiles of {ROWS} x {s.columns}, through {s.stages} stages"]
        told += (
            [f"{self.extension.left} @ its weights is {'one step' if self.extension.narrow else 'steps'} more along k"]
            if self.extension
            else []
        )
        return ", ".join([*told, *self.riding])

    def text(self, name: str, parameters: dict[Term, str], spoken: dict[Term, str]) -> Text:
        """See RowMap.text."""
        return rendered("many_rows.jinja", _gaps(self, parameters, spoken))


def _gaps(kernel: ManyRows, parameters: dict[Term, str], spoken: dict[Term, str]) -> dict[str, Any]:
    """What fills the gaps of many_rows.jinja."""
    dtype, s = DTYPES[kernel.dtype], kernel.schedule
    several = len(kernel.products) > 1
    products = []
    for w in kernel.products.values():
        its = parameters[w.array]
        products.append(Named(f"acc_{its}" if several else "acc", array(its), its, lead(w.array)))
    writer = Writer({x: parameters[x] for x in kernel.leaves}, spoken)
    writer.names |= {x: p.name for x, p in zip(kernel.products, products)}
    kept = keeping(writer, kernel, parameters)
    tile_rows = "warpgroup.row_index(rt(16, PART, fp32).col_vec) + ROWS * row"
    tile_columns = "col_index(rt(16, PART, fp32).row_vec) + PART * (col + n)"
    lengths = measuring(writer, kernel, parameters)
    if kernel.extension:
        writer.names[kernel.extension.joint] = products[0].name
    computes = any(x not in writer.names for x in kernel.results)
    alone = not kernel.folds and kernel.batch is None  # in a batch registers would not do for what is read ahead
    ahead = [y for y in kernel.others if alone and y.operation != "spread" and is_tile(y)]
    coming = [Coming.of(y, parameters[y], kernel.dtype) for y in ahead]
    others = [Named(parameters[y], array(parameters[y]), _read(y, array(parameters[y]))) for y in kernel.others]
    taken = {*parameters.values(), *NAMES}
    epilogue = kept.lines(tile_rows, tile_columns) if kept else []
    epilogue += [
        f"{one.name} = fp32({one.name})" if one.name in [c.name for c in coming] else f"{one.name} = {one.loaded}"
        for one in others
    ]
    epilogue += writer.assignments(kernel.results, taken)
    x = Named(parameters[kernel.x], array(parameters[kernel.x]), lead=lead(kernel.x))
    numbers = dict(lengths)
    numbers |= {"each": f"{parameters[kernel.each]}.shape[1]"} if kernel.each is not None else {}
    numbers |= {parameters[y]: parameters[y] for y in kernel.numbers}
    turned = kernel.weights[0].turned
    axis = "rows" if turned else "cols"
    tile = "W_PART" if several else "W"
    extension = kernel.extension
    more = bool(extension and not extension.narrow)
    names = [parameters[kernel.x], *([parameters[extension.left]] if extension else [])]
    operands = [(array(name), f"tensor({name}, X)") for name in names]
    parts = Part.of(kernel, parameters)
    weights = [p.loaded for p in products] + [part.weight for part in parts[1:]]
    weights += [parameters[extension.weight.array]] if extension else []
    brings, deep = s.columns // len(products), STEP  # columns, and rows along k, of what one fill brings
    if not several:
        brings, deep = (brings // s.blocks, STEP) if turned else (brings, STEP // s.blocks)
    cut = [(s.columns, STEP), *[(brings, deep)] * (several or s.blocks > 1)]
    made = [f"st({', '.join(map(str, one if turned else one[::-1]))}, {dtype})" for one in cut]
    operand_tiles = f"X, W{', W_PART' * (len(cut) > 1)} = st(CONSUMERS * ROWS, {STEP}, {dtype}), {', '.join(made)}"
    brought = "W_PART" if s.blocks > 1 else tile
    operands += [(array(name), f"tensor({name}, {brought})") for name in weights]
    result, inner = parameters[kernel.roots[0]], f"-(-{extent(kernel.x, x.name, -1)} // X.cols)"
    folds = Folds.of(kernel, parameters)
    high, wide = extent(kernel.root, result, -2), folds.end if folds else extent(kernel.root, result, -1)
    batch = kernel.batch is not None
    tall = "(BLOCKS * X.rows)" if s.blocks > 1 else "X.rows"
    counted = [("tall" if batch else "rows", f"-(-{high} // {tall})")]
    counted += [(part.end, f"{part.before and part.before + ' + '}-(-{part.result}.shape[1] // W.{axis})") for part in parts]
    counted += [("cols", f"-(-{wide} // {tile}.{axis})")] if not parts else []
    counted += [("rows", f"tall * {result}.shape[0]")] if batch else []
    counted += [("more", f"-(-{names[1]}.shape[1] // X.cols)")] if more else []
    counted += [("steps", f"max({2 * s.parts - (not coming)}, {inner}{' + more' if more else ' + 1' if extension else ''})")]
    arrays = {o.array: o.name for o in others} | dict(kept.arguments if kept else [])
    ends = [part.end for part in parts[:-1]]
    told = "".join(f", {one}" for one in (*arrays, *numbers, *ends, *(one.name for one in coming)))
    counts = ["rows", *["tall"] * batch, *ends, "cols", "steps", *["more"] * more]
    outs = folds.arguments if folds else [(array(parameters[y]), f"tensor({parameters[y]}, Y_PART)") for y in kernel.roots]
    results = [Sent("" if folds else f"y_{n}" if n > 1 else "y", into, writer.expression(y))
               for n, ((into, _), y) in enumerate(zip(outs, kernel.results), 1)]  # fmt: skip
    plain = not (folds or computes or parts)
    slots = [] if folds else [one.slot for one in results]
    into = ", ".join([*(name for name, _ in outs), *slots])
    blocks = f"min(rows * cols, tiles.processors({result}))"
    blocks = f"BLOCKS * min(rows * cols, tiles.processors({result}) // BLOCKS)" if s.blocks > 1 else blocks
    leaves = _folded(folds, s.parts, told) if folds else _sent(s.parts, several, told, "batch, " * batch, into, plain, coming)
    arguments = [*operands, *outs, *arrays.items()]
    return {
        "schedule": s, "operands": operand_tiles, "dtype": dtype, "y": result, "products": products, "turned": turned,
        "form": "ABt" if turned else "AB",
        "x": x, "arrays": list(arrays), "numbers": list(numbers), "batch": batch, "lead": lead(kernel.root), "folds": folds,
        "plain": plain, "leaves": leaves, "beside": parts, "into": into, "ends": ends,
        "slots": slots, "results": results,
        "extension": extension and {"x": operands[1][0], "w": operands[-1][0], "narrow": extension.narrow},
        "computes": computes, "epilogue": epilogue, "coming": coming,
        "arguments": [*arguments, *((n, n) for n in counts), *numbers.items()],
        "counts": counted,
        "clusters": s.blocks > 1, "row": "BLOCKS * row + rank" if s.blocks > 1 else "row",
        "turn": "persistent_tile(r, BLOCKS)" if s.blocks > 1 else "persistent_tile(r)",
        "launch": f"{blocks}, THREADS, shared=smem, {'cluster=BLOCKS, ' * (s.blocks > 1)}early=True", "bounds": "THREADS, 1",
    }  # fmt: skip


def _sent(parts: int, several: bool, told: str, lead: str, into: str, plain: bool, coming: Sequence[Coming]) -> list[list[str]]:
    """For each part of a tile, the lines that store it. several: is a part of each product needed? plain: is the product
    stored as it is? coming: the tiles that the epilogue loads ahead."""
    if plain:
        y, slot = into.split(", ")
        at = [f"({lead}row, {_nth('col', n)})" for n in range(parts)]
        return [[f"warpgroup.send({y}, {one}, {slot}, columns(last, PART, {n}))"] for n, one in enumerate(at)]
    kept = "".join(f"{one.name}, " for one in coming)[:-2]
    of = [f"{n}, {parts + n}" if several else f"{n}" for n in range(parts)]
    return [[f"{kept}{' = ' * bool(kept)}send({into}, {lead}row, col, last, {one}{told})"] for one in of]


def _folded(folds: Folds, parts: int, told: str) -> list[list[str]]:
    """For each part of a tile, the lines that fold it into what is known of its rows, which is written after every two
    parts."""
    lines, asked = list[list[str]](), f"{'chosen, ' * bool(folds.chosen)}end{told}"
    for n in range(parts):
        lines.append([f"known = fold({'known' if n % 2 else 'nothing'}, row, col, last, {n}, {asked})"])
        if n % 2:
            lines[-1].append(f"keep({', '.join(folds.arrays)}, known, row, {_nth('col // 2', n // 2)})")
    return lines


def _nth(first: str, n: int) -> str:
    return f"{first} + {n}" if n else first


def _read(y: Term, name: str) -> str:
    """The expression that reads another operand of the epilogue, for the part of a tile that is being stored."""
    row, col = "ROWS * row", "PART * (col + n)"
    if y.operation == "spread":
        return f"warpgroup.load({name}, rt(16, PART, fp32).col_vec, ({row}, divmod({col}, each)[0]), cols=0)"
    if not any(y.names[-2:]):
        return reading(y, name, "", row, col)
    if is_tile(y):
        return f"warpgroup.load({name}, rt(16, PART, fp32), {index(y, row, col)})"
    if along(y):
        return f"load({name}, rt(16, PART, fp32).row_vec, {index(y, '0', col)})"
    return f"warpgroup.load({name}, rt(16, PART, fp32).col_vec, {index(y, row, '0')}, cols={y.ndim - 2})"
