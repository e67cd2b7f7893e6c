"""Products of few rows, 1 to 64: the weights stream at memory speed.

The product is computed as its transpose, y.T = w.T @ u.T with u = prologue(x): the weights, most of what is read, stand on
the left of wgmma, which takes 64 of their columns at a time, and the few rows on its right. Weights come by TMA through a deep
ring. One warpgroup prepares u, adds up the sides, and multiplies u by a narrow matrix if there is one. The blocks of a cluster
take a part of k each, and add up what they have through distributed shared memory; then the epilogue runs on what is complete.

few_rows.jinja is the kernel; here stands when it serves, how it is cut, and what fills its gaps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..module import DTYPES, Text, array, rendered, unused
from ..terms import Term, along, between, is_tile
from ..writing import Writer
from .product import Product, Weight

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_ROWS = 64
RING_BYTES = 160 * 1024  # of shared memory, for weights on their way


class Schedule(NamedTuple):
    """rows: of u, 16, 32 or 64. columns: of y that a cluster has. depth: of k, of a tile. blocks: of a cluster. stages: of the
    ring of weights."""

    rows: int
    columns: int
    depth: int
    blocks: int
    stages: int


class FewRows(Product):
    """See the module."""

    label = "few"

    @property
    def schedule(self) -> Schedule:
        """How it is cut."""
        rows = next(n for n in (16, 32, 64) if n >= self.rows)
        columns = depth = 64
        return Schedule(rows, columns, depth, 2, min(8, RING_BYTES // (2 * columns * depth * len(self.products))))

    @property
    def most_rows(self) -> int:
        """That its kernel takes."""
        return self.schedule.rows

    @classmethod
    def serving(cls, root: Term) -> Iterator[Self]:
        """Those that compute it."""
        for kernel in cls.matches(root):
            sums = all(x.operation == "sum" for x in kernel.sides)
            joined = not kernel.narrow or (len(kernel.products) == 1 and len(kernel.narrow) == 1 and kernel.joined)
            if kernel.rows <= MOST_ROWS and sums and joined and kernel.dtype in DTYPES:
                yield kernel

    def __str__(self):
        return f"few rows of {self.root}"

    def explained(self) -> str:
        """What it does, in words."""
        s = self.schedule
        told = [f"a product of few rows: its weights stream through {s.stages} stages of {s.depth} x {s.columns}"]
        told += [f"clusters of {s.blocks} blocks share k"] * (s.blocks > 1)
        return ", ".join([*told, *self.riding])

    def text(self, name: str, parameters: dict[Term, str], spoken: dict[Term, str]) -> Text:
        """See RowMap.text."""
        return rendered("few_rows.jinja", _Gaps(self, name, parameters, spoken))


class Named(NamedTuple):
    """An array of a kernel. name: of what is read of it. array: the kernel's parameter. loaded: by what it is read."""

    name: str
    array: str
    loaded: str = ""


class Streamed(NamedTuple):
    """A weight that comes through a ring. tile: the name of its type. acc, parts, full: of its product: the accumulator, and
    where peers send theirs. turned: see Weight."""

    ring: str
    array: str
    tile: str
    turned: bool
    acc: str = ""
    parts: str = ""
    full: str = ""

    @property
    def form(self) -> str:
        """Of the product, y.T = w.T @ u.T."""
        return "ABt" if self.turned else "AtBt"

    def mine(self, i: str) -> str:
        """The consumer's part of the i-th tile."""
        return f"subtile({self.ring}.wait({i}), {'64' if self.turned else 'DEPTH, 0, 64'}, me)"

    @classmethod
    def of(cls, weight: Weight, parameters: dict[Term, str], apart: bool = False) -> Streamed:
        """apart: there are several products."""
        name = parameters[weight.array]
        mark = f"{name}_" if apart else ""
        accumulator = f"acc_{name}" if apart else "acc"
        return cls(name, array(name), name.upper(), weight.turned, accumulator, f"{mark}parts", f"{mark}full")


class Side(NamedTuple):
    """A sum of rows that rides along. inner: what is summed. parts, known: where blocks send theirs."""

    name: str
    inner: str
    parts: str
    known: str


class Narrow(NamedTuple):
    """A narrow product that rides along, and what it is multiplied by. scaled: the product as it goes on."""

    rank: int
    first: Streamed
    second: Streamed
    scaled: str


class _Gaps(dict[str, Any]):
    """What fills few_rows.jinja."""

    def __init__(self, kernel: FewRows, name: str, parameters: dict[Term, str], spoken: dict[Term, str]):
        dtype = DTYPES[kernel.dtype]
        writer = Writer({x: parameters[x] for x in kernel.leaves}, spoken)
        lengths = [x for x in between([kernel.root], kernel.leaves) if x.operation == "length"]
        writer.names |= dict.fromkeys(lengths, "width")
        taken = {*parameters.values(), "u", "me", "col", "first", "band", "turn", "ahead", "mine", "steps", "narrow", "product"}

        x = Named(parameters[kernel.x], array(parameters[kernel.x]))
        vectors = []
        for v in kernel.vectors:
            its = array(parameters[v])
            vectors.append(Named(parameters[v], its, f"load({its}, X.row_vec, {'(k,)' if v.ndim == 1 else '(0, k)'})"))
        products = [Streamed.of(w, parameters, len(kernel.products) > 1) for w in kernel.products.values()]

        inner = [side.of[0] for side in kernel.sides]
        prologue = writer.assignments([kernel.operand, *inner], taken)
        operand = writer.expression(kernel.operand)
        if kernel.narrow and not (kernel.plain and not kernel.sides):
            prologue, operand = [*prologue, f"made = {dtype}({operand})"], "made"
        sides = []
        for n, side in enumerate(kernel.sides):
            called, mark = unused(writer.suggested(side), taken), f"_{n + 1}" if n else ""
            taken.add(called)
            sides.append(Side(called, writer.expression(side.of[0]), f"{called}_parts", f"known{mark}"))
        for y in between([kernel.operand, *inner], kernel.leaves):
            writer.names.pop(y, None) if y.of else None  # what was assigned there is not known to the epilogue

        writer.names |= {p: s.acc for p, s in zip(kernel.products, products)}
        writer.names |= {side: f"{s.name}_of_rows" for side, s in zip(kernel.sides, sides)}
        narrow = None
        if kernel.narrow:
            ((first, second),) = kernel.narrow.values()
            assert kernel.joined
            joint, scale = kernel.joined
            scaled = "product" if scale is None else f"product * {writer.expression(scale)}"
            rank = -(-first.array.extents[0 if first.turned else 1] // 16) * 16  # beyond it TMA brings zeros
            narrow = Narrow(rank, Streamed.of(first, parameters), Streamed.of(second, parameters), scaled)
            writer.names[joint] = products[0].acc
        epilogue = [f"{parameters[y]} = {self.read(y, array(parameters[y]))}" for y in kernel.others]
        epilogue += writer.assignments([kernel.root], taken)

        rings = [*products, *([narrow.first, narrow.second] if narrow else [])]
        opened = ["u", *(part for p in products for part in (p.ring, p.parts, p.full))]
        opened += [part for s in sides for part in (s.parts, s.known)]
        opened += [narrow.first.ring, narrow.second.ring, "narrow"] if narrow else []
        numbers = [(parameters[y], parameters[y]) for y in kernel.numbers]
        arrays = [(array(parameters[y]), parameters[y]) for y in [kernel.x, *kernel.vectors, *kernel.others]]
        told = [(r.array, f"tiles.tensor({r.ring}, {r.tile})") for r in rings]
        if narrow:
            part = narrow.second.tile if narrow.second.turned else f"st(RANK, COLUMNS, {dtype})"
            told[-1] = narrow.second.array, f"tiles.tensor({narrow.second.ring}, {part})"
        result = array(parameters[kernel.root])
        width = [("width", f"{parameters[kernel.x]}.shape[1]")] if lengths else []
        arguments = [*arrays, *told, (result, parameters[kernel.root]), ("steps", "steps"), *width, *numbers]
        fetched = f"fetch({', '.join([x.array, *(v.array for v in vectors)])}, " if vectors else f"load({x.array}, X, ("
        before = [
            f"blocks = -(-{parameters[kernel.root]}.shape[1] // COLUMNS) * BLOCKS",
            f"steps = -(-{parameters[kernel.x]}.shape[1] // (BLOCKS * DEPTH))",
        ]
        super().__init__(
            schedule=kernel.schedule, dtype=dtype, plain=kernel.plain, opened=opened, fetched=fetched,
            products=products, narrow=narrow, sides=sides, vectors=vectors, x=x, result=result,
            ahead=[f"fp32(ahead[{n}])" for n in range(1 + len(vectors))], prologue=prologue, operand=operand,
            epilogue=epilogue, written=writer.expression(kernel.root),
            arguments=arguments, before=before, launch="blocks, THREADS, shared=smem, cluster=BLOCKS", bounds="THREADS, 1",
        )  # fmt: skip

    @staticmethod
    def read(y: Term, name: str) -> str:
        """The expression that reads what the epilogue wants besides, as the transposed tile has it."""
        if is_tile(y):
            return f"transpose(load({name}, rt(ROWS, 16, fp32), (0, mine)))"
        if along(y):
            return f"load({name}, rt(16, ROWS, fp32).col_vec, {'(mine,)' if y.ndim == 1 else '(0, mine)'})"
        return f"load({name}, rt(16, ROWS, fp32).row_vec, (0, 0), cols=0)"
