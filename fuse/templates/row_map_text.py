"""Row maps, written down: see row_map.py for their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..functions import CASTS, FP8
from ..graph import along, between, is_index, is_tile
from ..module import Text, array, one_number, unused
from ..terms import Term
from ..writing import Writer

if TYPE_CHECKING:
    from .row_map import RowMap

ROWS = 16  # of a warp's tile
FOLD = 16  # a folded row's parts
REGISTERS = 2048  # of a multiprocessor, for each lane of a warp
PLACE = "place = col_index(TILE.row_vec) + col"
FOLLOW = "grid.follow()"  # the first that a kernel does which is launched early, but for what it reads ahead
LEAST = "-3e38"  # of float32 and bfloat16, all but
NOTHING = {"sum": ("zeros", "0.0"), "max": ("neg_infty", "-math.inf")}  # a vector of nothing's sum or maximum, and one number

DROPOUT = '''
@inlined
def dropout(x, dropped, per_kept, seed, {place}):
    """x / (1 - p), but 0 where 16 bits that follow from seed and place are below 65536 p, which is `dropped`."""
    gone = {draw}(rt(x.rows, x.cols, fp32), dropped, seed, seed >> 32, 0, 0, {place}{how})
    return where(gone, 0.0, x * per_kept)
'''.strip()


def resident(registers: int) -> int:
    """How many warps with so many registers a lane fit a multiprocessor, a quarter of them in each of its four parts."""
    return 4 * (REGISTERS // 4 // registers)


def is_softmax_sum(x: Term) -> bool:
    """Is the term sum(exp(s - max(s)))?"""
    if x.operation != "sum" or x.of[0].operation != "exp" or x.of[0].of[0].operation != "sub":
        return False
    scores, greatest = x.of[0].of[0].of
    return greatest.operation == "max" and greatest.of[0] is scores


class Writing:
    """A row map as text. Each form is a subclass. columns: of a warp's tile. most_warps: of a block. says: how rows lie, in
    words. unordered: are columns read in an order of their own? draw: the op that draws for dropout, and the coordinates that
    it is given."""

    columns, most_warps, says, unordered = 128, 16, "", False
    draw = "bernoulli", "row, col"  # by what op, and at what place

    def __init__(self, kernel: RowMap, parameters: dict[Term, str], spoken: dict[Term, str]):
        self.kernel, self.parameters, self.text = kernel, parameters, Text()
        self.drawn, self.told = dict[Term, str](), list[tuple[str, str]]()
        inside = between(kernel.roots, kernel.leaves)
        self.lengths = [x for x in inside if x.operation == "length"]
        self.reductions = [x for x in inside if x.operation in NOTHING]
        self.writer = Writer({x: parameters[x] for x in kernel.leaves}, spoken)
        self.text.bounds = "32 * WARPS, 1"
        self.places = any(x.operation == "is_column" for x in inside)  # does somebody ask for a column's number?
        self.writer.forms["is_column"] = lambda x: "place == {}"
        self.drop([x for x in inside if x.operation == "dropout"], inside)
        self.write()

    def drop(self, drops: list[Term], inside: list[Term]) -> None:
        """Prepare dropout: the kernel's parameters for each probability, and the function that draws."""
        taken = set(self.parameters.values())
        for p in dict.fromkeys(x.of[1] for x in drops):
            told = unused("dropped", taken), unused("per_kept", taken)
            taken.update(told)
            self.drawn[p] = ", ".join(told)
            said = self.writer.expression(p)
            self.told += [(told[0], f"share_of({said})"), (told[1], f"1 / (1 - {said})")]
        draw, place = self.draw
        self.writer.forms["dropout"] = lambda x: f"dropout({{0}}, {self.drawn[x.of[1]]}, {{2}}, {place})"
        how = ", unordered=True" * self.unordered
        self.text.helpers = DROPOUT.format(draw=draw, place=place, how=how).splitlines() if drops else []
        used = {y for x in inside if x.operation != "dropout" for y in x.of}
        self.leaves = [x for x in self.kernel.leaves if x not in self.drawn or x in used]

    def write(self) -> None:
        """Write the whole text."""
        raise NotImplementedError

    def begin(self) -> None:
        """Write what the forms with tiles of sixteen rows have in common."""
        kernel, text, parameters = self.kernel, self.text, self.parameters
        self.writer.names |= dict.fromkeys(self.lengths, "width")
        text.globals += [f"WARPS = {kernel.warps}", f"TILE = rt({ROWS}, {self.columns}, fp32)  # of a warp"]
        if self.reductions:
            text.globals.append("smem = shared(scratch=sv(TILE.rows * WARPS, fp32))")
            text.kernel.append("(scratch,) = smem.open()")
        text.kernel += [FOLLOW, "row = TILE.rows * cuda.blockIdx.x"]
        tall = next(x for x in (*kernel.leaves, *kernel.roots) if x.ndim == 2 and x.names[0])
        blocks = f"-(-{parameters[tall]}.shape[0] // TILE.rows)"
        text.launch = f"{blocks}, 32 * WARPS{', shared=smem' * bool(self.reductions)}, early=True"
        every = [(x, parameters[x]) for x in (*self.leaves, *kernel.roots)]
        text.arguments = [*((array(name) if x.ndim else name, name) for x, name in every), *self.told]

    def width(self, needed: bool) -> None:
        """Write the line that reads how many columns there are, if something asks for it."""
        if needed or self.lengths or any(map(self.kernel.filled, self.reductions)):
            wide = next(x for x in self.kernel.leaves if along(x))
            self.text.kernel.append(f"width = {array(self.parameters[wide])}.shape[{wide.ndim - 1}]")

    def levels(self) -> list[list[Term]]:
        """The reductions, in groups that can be computed at the same time."""
        levels = self.kernel.levels
        return [[x for x in self.reductions if levels[x] == n] for n in range(1, 1 + max(levels[x] for x in self.kernel.roots))]

    def named(self, x: Term) -> str:
        """Give a reduction a name, and return it."""
        taken = {*self.writer.names.values(), *self.parameters.values()}
        self.writer.names[x] = unused(self.writer.suggested(x), taken)
        return self.writer.names[x]

    def folded(self, x: Term, fold: str = "row") -> str:
        """The expression of what a warp's tile contributes to a reduction."""
        written = self.writer.expression(x.of[0])
        if self.kernel.filled(x):
            written = f"right_fill({written}, width - col, {NOTHING[x.operation][1]})"
        return f"{fold}_{x.operation}({written})"

    def reduce(self, wanted: list[Term], fold: str) -> list[str]:
        """The lines that compute reductions of what is in registers."""
        lines = self.writer.assignments([x.of[0] for x in wanted], self.parameters.values(), self.kernel.roots)
        for x in wanted:
            folded = self.folded(x, fold)
            lines.append(f"{self.named(x)} = block.reduce_{x.operation}({folded}, scratch)")
        return lines

    def stores(self, at: str = "row, col", store: str = "store") -> list[str]:
        """The lines that compute the roots and write them."""
        lines = self.writer.assignments(self.kernel.roots, self.parameters.values())
        for x in self.kernel.roots:
            lines += self.store(x, self.rounded(x, store), at, store)
        return lines

    def store(self, x: Term, written: str, at: str, store: str) -> list[str]:
        """The lines that write a root. at: the coordinates of its tile, if it is not one number for each row. store: the op
        that writes a tile."""
        into = array(self.parameters[x])
        return [f"{store}({into}, {written}, ({at}))" if is_tile(x) else f"store({into}, {written}, (row, 0), cols=0)"]

    def rounded(self, x: Term, store: str) -> str:
        """The expression of a root as it is stored. Storing rounds by itself, but `store` writes 16 bytes at once only if what
        it is given is fp8 already."""
        if x.operation not in CASTS or x in self.writer.names:
            return self.writer.expression(x)
        inner = self.writer.expression(x.of[0])
        return f"{x.operation}({inner})" if CASTS[x.operation].itemsize == 1 and is_tile(x) and store == "store" else inner

    def load(self, x: Term) -> str:
        """The line that reads a leaf."""
        name = self.parameters[x]
        if is_tile(x):
            if x.held_as("") == FP8:  # by 16 bytes
                return f"{name} = fp32(load({array(name)}, rt(TILE.rows, TILE.cols, fp8e4m3), (row, col)))"
            return f"{name} = load({array(name)}, TILE, (row, col))"
        if along(x):
            return f"{name} = load({array(name)}, TILE.row_vec, {'(col,)' if x.ndim == 1 else '(0, col)'})"
        if is_index(x):
            return f"{name} = {array(name)}[row_index(TILE.col_vec) + row]"
        if not x.names[0]:
            return f"{name} = {one_number(array(name), ', '.join('0' * x.ndim), x.held_as(''))}"
        return f"{name} = load({array(name)}, TILE.col_vec, (row, 0), cols=0)"


class Held(Writing):
    """Sixteen rows for each block, which stay in registers."""

    says = "stay in registers, sixteen of a block"

    def write(self) -> None:
        self.begin()
        mine = "TILE.cols * int32(cuda.threadIdx.x // 32)" if self.kernel.warps > 1 else "0"
        self.text.kernel += [f"col = {mine}", *[PLACE] * self.places]
        self.width(False)
        self.text.kernel += [self.load(x) for x in self.kernel.leaves if x.ndim]
        for level in self.levels():
            self.text.kernel += self.reduce(level, "row")
        self.text.kernel += self.stores()


class Looped(Writing):
    """Sixteen rows for each block, read again for each level of reductions. place: the line that computes which columns a warp
    has."""

    most_warps, says = 8, "are read {} times, once from memory and then from L2"
    place = PLACE

    def write(self) -> None:
        self.begin()
        self.text.kernel.append(f"first = {self.first}")
        self.width(True)
        self.text.kernel += [self.load(x) for x in self.kernel.leaves if x.ndim and not along(x)]
        levels = self.levels()
        sums = {x.of[0].of[0].of[1]: x for level in levels for x in level if is_softmax_sum(x)}
        for level in levels:
            rest = [x for x in level if x not in sums and x not in sums.values()]
            for x in level:
                if x in sums:
                    self.reduce_as_softmax(x, sums[x], rest)
                    rest = []
            self.reduce_in_a_loop(rest)
        if any(map(is_tile, self.kernel.roots)):
            self.loop([*self.loads(self.kernel.roots), *self.stores()])
        else:
            self.text.kernel += self.stores()

    @property
    def first(self) -> str:
        """The expression of the warp's first column."""
        return "TILE.cols * int32(cuda.threadIdx.x // 32)" if self.kernel.warps > 1 else "0"

    def reduce_in_a_loop(self, wanted: list[Term]) -> None:
        """Write the loop that computes these reductions, all of one level."""
        if not wanted:
            return
        inner = [x.of[0] for x in wanted]
        before = dict(self.writer.names)
        body = [*self.loads(inner), *self.writer.assignments(inner, self.parameters.values())]
        folds = [self.folded(x) for x in wanted]
        self.writer.names = before  # what was assigned is known in the loop alone
        self.loop([*body, *self.added(wanted, folds)])
        self.end(wanted)

    def added(self, wanted: list[Term], folds: list[str]) -> list[str]:
        """The lines in a loop that add to these reductions. The lines that begin them with nothing are written ahead of the
        loop."""
        lines = []
        for x, folded in zip(wanted, folds):
            name = self.named(x)
            self.text.kernel.append(f"{name} = {self.nothing(x.operation)}")
            lines.append(f"{name} = {name} + {folded}" if x.operation == "sum" else f"{name} = maximum({name}, {folded})")
        return lines

    def end(self, wanted: list[Term]) -> None:
        """Write the lines behind a loop that join what the warps of a block have found."""
        for x in wanted:
            name = self.writer.names[x]
            self.text.kernel.append(f"{name} = {self.together(x.operation, name)}")

    def together(self, kind: str, x: str) -> str:
        """The expression that joins what the warps of a block have found."""
        return f"block.reduce_{kind}({x}, scratch)"

    def reduce_as_softmax(self, greatest: Term, total: Term, rest: list[Term]) -> None:
        """Write the loop that computes the maximum of each row and the sum of exp(x - maximum) in one pass: the sum so far is
        rescaled when a tile has a higher maximum. The maximum begins with the least finite number, because it is subtracted
        from itself, which gives NaN for -inf. rest: other reductions that are computed in the same loop."""
        most, added = self.named(greatest), self.named(total)
        taken = {*self.writer.names.values(), *self.parameters.values()}
        higher, own = unused("higher", taken), unused("own", taken)
        before, inner = dict(self.writer.names), [greatest.of[0], *(x.of[0] for x in rest)]
        among = [*inner, total.of[0]]
        body = [*self.loads(inner), *self.writer.assignments(inner, {*taken, higher, own}, among)]
        body.append(f"{higher} = maximum({most}, {self.folded(greatest)})")
        self.writer.names[greatest] = higher
        body.append(f"{added} = {added} * exp({most} - {higher}) + {self.folded(total)}")
        folds = [self.folded(x) for x in rest]
        self.writer.names = before
        self.text.kernel.append(f"{most}, {added} = {self.nothing(LEAST)}, {self.nothing('sum')}")
        self.loop([*body, f"{most} = {higher}", *self.added(rest, folds)])
        self.text.kernel.append(f"{own}, {most} = {most}, {self.together('max', most)}")
        self.text.kernel.append(f"{added} = {self.together('sum', f'{added} * exp({own} - {most})')}")
        self.end(rest)

    def nothing(self, kind: str) -> str:
        """What a reduction begins with: its value for no elements, or for LEAST that number."""
        return f"full(TILE.col_vec, {LEAST})" if kind == LEAST else f"{NOTHING[kind][0]}(TILE.col_vec)"

    def loop(self, body: list[str]) -> None:
        """Write these lines in a loop over the warp's tiles along the columns."""
        self.text.kernel += ["for col in range(first, width, TILE.cols * WARPS):", *(f"    {line}" for line in body)]

    def loads(self, roots: Sequence[Term]) -> list[str]:
        """The lines that read what these terms need and what has columns."""
        needed = between(roots, [*self.kernel.leaves, *self.writer.names], with_leaves=True)
        place = [self.place] * any(x.operation == "is_column" for x in needed)
        return place + [self.load(x) for x in self.kernel.leaves if along(x) and x in needed]


class Folded(Writing):
    """A row is a tile: a block works on one row at a time, and the next one is loaded meanwhile. part: the columns of a line;
    a warp has 16 lines of a row, one behind the other in memory."""

    draw, part = ("bernoulli_of_row", "row, col, step"), 64
    columns, says = FOLD * part, "are tiles of lines; one is worked on while the next one comes"

    def store(self, x: Term, written: str, at: str, store: str) -> list[str]:
        """See Writing. A result with one number for each row and 16 bits is stored as a vector of which the first element
        counts."""
        into = array(self.parameters[x])
        if is_tile(x):
            return super().store(x, written, at, store)
        if x.held_as(self.kernel.dtype) in ("fp32", "float32"):
            return ["if line == 0:", f"    {into}[row, 0] = {written}"]
        return ["if line == 0:", f"    store({into}, zeros(rt(16, 16, fp32).col_vec) + ({written}), (row, 0), cols=1)"]

    @property
    def unordered(self) -> bool:  # type: ignore[override]
        """May columns be read in an order of their own? A row's end is cut off by whole lines, so no column's number is
        needed."""
        return self.kernel.alike

    def write(self) -> None:
        kernel, text, name = self.kernel, self.text, self.parameters
        tiles = [x for x in kernel.leaves if is_tile(x)]
        vectors = [x for x in kernel.leaves if along(x) and not is_tile(x)]
        numbers = [x for x in self.leaves if not along(x)]
        self.writer.names |= dict.fromkeys(self.lengths, "columns")
        x = name[tiles[0]]
        text.globals += self.extents()
        text.globals += [f"PART = rt({FOLD}, {self.part}, {kernel.dtype})  # a warp's lines of a row"]
        if memory := self.memory():
            text.globals.append(f"smem = shared({', '.join(f'{one}={what}' for one, what in memory.items())})")
            text.kernel.append(f"{', '.join(memory) if len(memory) > 1 else f'({next(iter(memory))},)'} = smem.open()")
        text.kernel.append(f"{self.first}, line = int32(cuda.blockIdx.x), PART.rows * int32(cuda.threadIdx.x // 32)")
        for late in (False, True):
            text.kernel += [FOLLOW] * late
            those = [v for v in vectors if (v not in kernel.ahead) == late and not kernel.sums]
            text.kernel += [f"{name[v]} = {self.loaded(v, 'line, 0')}" for v in those]
        text.kernel += [self.load(n) for n in numbers if n.ndim]
        if any(map(self.kernel.filled, self.reductions)):
            text.kernel.append(f"lines = {array(x)}.shape[1]")
        text.kernel += ["col, step = PART.cols * line, PART.cols"] * bool(self.drawn)
        self.writer.names |= {v: self.widened(name[v]) for v in vectors}
        body = list[str]()
        for level in self.levels():
            body += self.reduce(level, "tile")
        body += self.stores("row, line, 0", "store_unordered" if self.unordered else "store")
        self.rows(tiles, body)
        text.before.insert(0, f"rows, lines = {x}.shape[0], {self.cut(x)}")
        text.launch += f", 32 * WARPS{', shared=smem' * bool(memory)}, early=True"
        shaped = [
            (array(name[one]), f"{name[one]}.reshape({self.lead(one)}*lines)" if along(one) else name[one])
            for one in (*tiles, *vectors, *kernel.roots)
        ]
        given = [(array(name[n]) if n.ndim else name[n], name[n]) for n in numbers]
        columns = [("columns", f"float({x}.shape[1])")] if self.lengths else []
        text.arguments = [*shaped, *self.counted, *columns, *given, *self.told]

    def folded(self, x: Term, fold: str = "tile") -> str:
        """See Writing. Beyond a row's end there are whole lines to cut off."""
        written = self.writer.expression(x.of[0])
        if self.kernel.filled(x):
            written = f"lower_fill({written}, lines - line, {NOTHING[x.operation][1]})"
        return f"{fold}_{x.operation}({written})"

    def memory(self) -> dict[str, str]:
        """{name: type} of what lies in shared memory."""
        return {"scratch": f"sv({-(-4 * self.kernel.warps // 16) * 16}, fp32)"} if self.reductions else {}

    def cut(self, x: str) -> str:
        """The expression (lines of a row, columns of a line) for an array; those of a block's tiles if no row may be
        shorter."""
        return "(WARPS * PART.rows, PART.cols)" if self.kernel.whole else f"({x}.shape[1] // {self.part}, {self.part})"

    def lead(self, x: Term) -> str:
        """The first part of the shape of an array whose rows are cut into lines."""
        return "rows, " * is_tile(x)

    def loaded(self, x: Term, at: str) -> str:
        """The expression that reads a tile or a vector."""
        return f"{'load_unordered' if self.unordered else 'load'}({array(self.parameters[x])}, PART, ({at}))"

    def widened(self, written: str) -> str:
        """The expression of what was read in the dtype that is computed with."""
        return written if self.kernel.dtype == "fp32" else f"fp32({written})"

    first = "following"  # what a block's number is called
    counted: Sequence[tuple[str, str]] = (("rows", "rows"),)  # the kernel's parameter that ends it

    def extents(self) -> list[str]:
        """The line that defines WARPS and BLOCKS; also sets the launch's bounds."""
        blocks = resident(self.kernel.registers(type(self))) // self.kernel.warps
        self.text.bounds = "32 * WARPS, BLOCKS"
        return [f"WARPS, BLOCKS = {self.kernel.warps}, {blocks}  # of a block, of a multiprocessor"]

    def rows(self, tiles: list[Term], body: list[str]) -> None:
        """Write the loop over a block's rows, and how many blocks are launched."""
        name, text = self.parameters, self.text
        x = name[tiles[0]]
        text.kernel += [f"next_{name[t]} = {self.loaded(t, 'following, line, 0')}" for t in tiles]
        lines = [f"row, {name[t]} = following, {self.widened('next_' + name[t])}" for t in tiles[:1]]
        lines += [f"{name[t]} = {self.widened('next_' + name[t])}" for t in tiles[1:]]
        lines += ["following += int32(cuda.gridDim.x)", "at = min(following, int32(rows - 1))"]
        lines += [f"next_{name[t]} = {self.loaded(t, 'at, line, 0')}" for t in tiles]
        text.kernel += ["while following < rows:", *(f"    {line}" for line in (*lines, *body))]
        text.launch = f"min(rows, BLOCKS * tiles.processors({x}))"


class Slim(Folded):
    """Folded rows with half as many columns for each warp, for widths at which this leaves fewer warps idle."""

    part = 32
    columns = FOLD * part


class Alone(Folded):
    """A row is a tile, and a block has no other: while one of the many small blocks waits, others work."""

    part = 32
    columns, says = FOLD * part, "are tiles of lines, a block's only one each"
    first = "row"
    counted = ()

    def extents(self) -> list[str]:
        self.text.bounds = "32 * WARPS, 1"
        return [f"WARPS = {self.kernel.warps}  # of a block"]

    def rows(self, tiles: list[Term], body: list[str]) -> None:
        self.text.kernel += [f"{self.parameters[t]} = {self.widened(self.loaded(t, 'row, line, 0'))}" for t in tiles]
        self.text.kernel += body
        self.text.launch = "rows"
