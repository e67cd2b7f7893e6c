"""Declared arguments: a table that says once what a function on arrays takes and returns.

    FORWARD = Schema("forward", '''
        q    BSHD  tile
        k    BTGD  tile
        v    BTGD  tile
        out  BSHD  tile     made
        lse  BHS   float32  made
    ''')

A row has an argument's name; its axes, a letter each, in canonical order ("H|BSH": either), or =name of an argument with the
same shape; what it holds; and its role. A result that exists on request also has the options that ask for it, all of which
must be true (`lse  BHS  float32  made  return_lse`) or hold a word (`dbias  =bias  float32  made  also:dbias`). An axis has
one extent wherever its letter occurs. The table determines the checks of a call (`problem`), the shapes of results, the order
in which addresses are passed (program.py), and the schema and the fakes of torch's op (torch_op.py).

What it holds:
    tile      bfloat16 or float16, one for all: kernels move tiles of it, so its last axis is contiguous
    real      float32, bfloat16 or float16, read element by element with any strides that are not negative
    index     int32 or int64
    any       numbers of any kind; its axes are `*`, one to five of any extents
    float32   that
    bfloat16  that
    float16   that
    fp8       that of e4m3, float8_e4m3fn
    tile8     the same, as tiles that kernels move, like `tile`
    half      bfloat16 or float16; results are bfloat16
    cache     what a cache keeps of tiles: bfloat16, float16 or fp8

and, with values that a step of the program checks (checks.py):
    log          real, the logarithm of the part of a state that is kept: never above 0
    rate         real; multiplied by a time it is such a logarithm: never above 0
    ends         index, where packed sequences end: 0 first, ascending, S last
    key_ends     the same for keys, T last
    new_ends     the same for new keys, s last
    key_lengths  index, how many keys of a sequence are in use: from 0 to T
    key_starts   index, how many keys come before a sequence's first: from 0 to T

Its role:
    (none)    it must be given
    optional  it may be left out
    made      a result: written, and created if the caller leaves it out
    in_place  likewise; the caller may also give the first argument itself, to be overwritten
    updated   it must be given, and is written in place
    updated?  likewise, but it may be left out

With `layout="bhsd"` the caller's axes have sequence and head swapped where both follow the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ..launching.arrays import ALIGNMENT, Form, Operand, c_ordered, overlap, overlaps_itself
from ..launching.checks import ENDS, KEY_ENDS, KEY_LENGTHS, KEY_STARTS, LOG, NEW_ENDS, RATE, Check
from ..launching.tensor_maps import STRIDE_END

ORDER = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}  # where batch, sequence, head and column stand in the caller's axes
LAYOUTS = tuple(ORDER)
REAL, INDEX = ("float32", "bfloat16", "float16"), ("int32", "int64")
HOLDS = {
    "tile": ("bfloat16", "float16"),
    "real": REAL,
    "index": INDEX,
    "any": ("bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), *REAL),
    "float32": ("float32",),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "fp8": ("float8_e4m3fn",),
    "tile8": ("float8_e4m3fn",),
    "half": ("bfloat16", "float16"),
    "cache": ("bfloat16", "float16", "float8_e4m3fn"),
    "log": REAL,
    "rate": REAL,
    "ends": INDEX,
    "key_ends": INDEX,
    "new_ends": INDEX,
    "key_lengths": INDEX,
    "key_starts": INDEX,
}
VALUES = {"log": LOG, "rate": RATE, "ends": ENDS, "key_ends": KEY_ENDS, "new_ends": NEW_ENDS}
VALUES |= {"key_lengths": KEY_LENGTHS, "key_starts": KEY_STARTS}
ROLES = "", "optional", "made", "in_place", "updated", "updated?"
TOKENS = "S", "A", "T", "s", "x", "y"  # axes along a sequence
# An axis in messages. G are the heads of keys, which share those of values or queries; T the keys' tokens, s new ones; K and V
# the columns of keys and values where they differ; F those of a feature map; N sequences have E = N + 1 ends;
# C are batches of a cache, or pages, of which a sequence has M at most; x and y are blocks of S and of T;
# U, W, X and Y are batch (or sequences), heads and sequence or 1; r heads of queries and keys, p those of values, too
TITLES = dict(B="batch", S="sequence", T="sequence", H="heads", G="heads", D="head_dim", K="key_dim", V="value_dim")
TITLES |= dict(s="sequence", N="sequences", F="features", E="length", C="batches or pages", M="pages", x="blocks", y="blocks")
SPOKEN = {"G": "Hk", "K": "Dk", "V": "Dv", "E": "N + 1", "T": "S", "U": "B or 1", "W": "B or 1", "X": "H or 1", "Y": "S or 1"}
SPOKEN |= {"O": "1", "A": "Sq", "s": "S", "Z": "positions", "R": "pairs", "x": "blocks", "y": "blocks"}
SPOKEN |= {"C": "B or pages", "N": "sequences", "M": "pages of each", "I": "B or 1", "J": "H or 1", "P": "rows of blocks"}
SPOKEN |= {"Q": "blocks", "L": "blocks", "r": "H + Hk", "p": "H + 2 Hk"}
VARY = frozenset("BSTsNECMAxy")  # axes whose extents are lengths; heads and columns decide which kernel serves a call
FREE = tuple("*" * rank for rank in range(1, 6))  # axes of any extents


class Argument(NamedTuple):
    """A row of the table."""

    name: str
    axes: tuple[str, ...]
    holds: str
    role: str
    asked: tuple[str, ...] = ()
    like: str = ""  # the argument whose shape it has

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What its elements may be."""
        return HOLDS[self.holds]

    @property
    def needed(self) -> bool:
        """Must the caller give it?"""
        return self.role in ("", "updated")

    @property
    def written(self) -> bool:
        """Does a kernel write it, so that it must lie apart from all others?"""
        return self.role in ("made", "in_place", "updated", "updated?")

    @property
    def result(self) -> bool:
        """Is it given back, made where the caller leaves it out?"""
        return self.role in ("made", "in_place")

    def choices(self, layout: str) -> dict[int, str]:
        """{number of axes: the axes in the caller's order}"""
        swap = layout == "bhsd"
        swapped = [f"{a[0]}{a[2]}{a[1]}{a[3:]}" if swap and a[1:2] in TOKENS and len(a) > 2 else a for a in self.axes]
        return {len(axes): axes for axes in swapped}

    def orders(self, layout: str) -> dict[int, tuple[str, tuple[int, ...]]]:
        """{number of axes: (the axes in the caller's order, where the canonical ones stand among them; () where they do)}"""
        canonical = {len(axes): axes for axes in self.axes}
        pairs = {rank: (axes, canonical[rank]) for rank, axes in self.choices(layout).items()}
        return {
            rank: (axes, () if axes == ours else tuple(axes.index(axis) for axis in ours))
            for rank, (axes, ours) in pairs.items()
        }


class Problem:
    """A call that was found valid: the forms of its arrays with axes in canonical order, and the extent of every axis.

    forms: of those that were given, by name. extents: by an axis's letter. bits: those of each form (arrays.py), and under None
    of all tiles. dtype: that of its tiles. device: a CUDA ordinal; None is host memory."""

    def __init__(
        self, schema: Schema, forms: dict[str, Form], extents: dict[str, int], bits: dict[str | None, int], layout: str
    ):
        self.schema, self.forms, self.extents, self.bits, self.layout = schema, forms, extents, bits, layout
        first = next(iter(forms.values()))
        self.dtype, self.device = first.dtype, first.device

    @property
    def member(self) -> str:
        """The function that was called."""
        return self.schema.name

    def __contains__(self, name: str) -> bool:
        return name in self.forms

    def __getitem__(self, name: str) -> Any:
        """The Operand of an argument for a launch, or of a result, given or to be made; None for what was left out."""
        form = self.forms.get(name)
        if form is None:
            result = self.schema.written_rows[self.layout].get(name)
            if result is None:
                return None
            axes, order, dtype = result
            like = self.schema.arguments[name].like
            form = c_ordered(self.forms[like].shape if like else self(axes), dtype or self.dtype, self.device)
            form = form.permuted(order) if order else form
        return Operand(self.schema.places[name], form)

    def __call__(self, axes: str) -> tuple[int, ...]:
        """The extents of these axes: problem("BSH")."""
        extents = self.extents
        return tuple([extents[axis] for axis in axes])

    def made(self, name: str) -> tuple[tuple[int, ...], str]:
        """The shape and dtype of a result, in the caller's axes."""
        axes, _, dtype = self.schema.written_rows[self.layout][name]
        like = self.schema.arguments[name].like
        return self.forms[like].shape if like else self(axes), dtype or self.dtype

    def scratch(self, number: int, shape: tuple[int, ...], dtype: str) -> Operand:
        """Memory between launches, the `number`-th of a plan's."""
        return Operand(len(self.schema.places) + number, c_ordered(shape, dtype, self.device))

    def axes(self, name: str) -> str:
        """Which of its axes an argument came with, in canonical order."""
        rank = len(self.forms[name].shape)
        return next(axes for axes in self.schema.arguments[name].axes if len(axes) == rank)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an argument, in the caller's axes: for messages."""
        form = self.forms[name]
        axes, _ = self.schema.rows[self.layout][name][len(form.shape)]
        return tuple(form.shape[self.axes(name).index(axis)] for axis in axes)

    def error(self, name: str, what: str, *shown: str) -> ValueError:
        """What is wrong with an argument, with the shapes of those that are shown."""
        return ValueError(f"{name}: {what}: {', '.join(f'{one}.shape={self.shape(one)}' for one in shown)}")

    def bytes_at_once(self, *names: str) -> int:
        """The bytes, 16 at most, that addresses and strides of these arrays are multiples of; by default of all its tiles."""
        bits = ALIGNMENT | (0 if names else self.bits[None])
        for name in names:
            bits |= self.bits.get(name, 0)
        return int(bits & -bits)

    @property
    def by_tma(self) -> bool:
        """Can TMA address all tiles?"""
        bits = self.bits[None]  # of strides, one that is negative or too large makes these so
        return 0 <= bits < STRIDE_END and bits % ALIGNMENT == 0


class Schema:
    """A table of arguments: see the module. arguments: {name: Argument}, in the order of the rows. vary: the axes whose extents
    are lengths, of which a plan may become a function (lengths.py). extents: of axes that have always the same, or none but
    results have; or what these are, a function of all others."""

    def __init__(self, name: str, table: str, vary: Iterable[str] = VARY, **extents: int | Callable[[Mapping[str, Any]], Any]):
        self.name, self.vary = name, frozenset(vary)
        self.extents = {axis: extent for axis, extent in extents.items() if isinstance(extent, int)}
        self._following = {axis: extent for axis, extent in extents.items() if not isinstance(extent, int)}
        rows = [Argument(*_row(line.split())) for line in table.strip().splitlines()]
        self.arguments = {row.name: row for row in rows}
        self.names = tuple(self.arguments)
        self.tiles = frozenset(row.name for row in rows if row.holds in ("tile", "tile8"))
        self.places = {name: place for place, name in enumerate(self.names)}  # of their addresses
        self.written = frozenset(row.name for row in rows if row.written)
        self.rows = {layout: {row.name: row.orders(layout) for row in rows} for layout in LAYOUTS}
        self.written_rows = {layout: self._written(layout) for layout in LAYOUTS}
        self._dtypes = {row.name: row.dtypes for row in rows}

    def _written(self, layout: str) -> dict[str, tuple[str, tuple[int, ...], str | None]]:
        """Of results: (the axes in the caller's order, where the canonical ones stand, the dtype; None: the tiles')."""
        written = {}
        for name in [name for name, row in self.arguments.items() if row.result]:
            ((axes, order),) = [("", ())] if self.arguments[name].like else self.rows[layout][name].values()
            written[name] = axes, order, None if name in self.tiles else self.arguments[name].dtypes[0]
        return written

    def problem(self, forms: Mapping[str, Form], layout: str = "bshd") -> Problem:
        """The Problem of a call, `forms` being those of the arrays that were given. All must lie on one device; tiles have a
        contiguous last axis. Raises ValueError or TypeError that names the argument and prints the values."""
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise (ValueError if isinstance(layout, str) else TypeError)(f"layout: must be one of {LAYOUTS}: {layout=}")
        rows, first = self.rows[layout], next(iter(forms))
        _, _, dtype, device, *_ = forms[first]
        bits: dict[str | None, int] = {None: 0}
        extents: dict[str, int] = {}
        holder: dict[str, str] = {}  # which argument said an axis's extent
        canonical = {}
        for name, form in forms.items():
            shape, strides, its_dtype, its_device, itemsize, past, readonly = form
            row = rows[name].get(len(shape))
            if row is None:
                _refuse_axes(self.arguments[name], layout, shape)
            axes, order = row
            is_tile = name in self.tiles
            if its_dtype not in self._dtypes[name] or (is_tile and its_dtype != dtype):
                _refuse_dtype(self.arguments[name], its_dtype, first, dtype)
            if its_device != device:
                where = f"{name}.device={its_device}, {first}.device={device}"
                raise ValueError(f"{name}: must lie where {first} does (None: host memory): {where}")
            for axis, extent in zip(axes, shape):
                if extents.get(axis) == extent or axis == "*":
                    continue
                said = axis
                if axis == "N":  # as many as there are ends, or batches
                    axis, extent = ("E", extent + 1) if "E" in extents else ("B", extent)
                if axis not in extents:
                    extents[axis], holder[axis] = extent, name
                elif extents[axis] != extent:
                    other = holder[axis]
                    shapes = f"{name}.shape={shape}, {other}.shape={forms[other].shape}"
                    raise ValueError(f"{name}: {TITLES.get(said, said)} must equal {other}'s: {shapes}")
            if is_tile and strides[-1] != itemsize and shape[-1] > 1 and form.extent:
                _refuse_strides(name, form, "last axis must be contiguous")
            if not is_tile and min(strides, default=0) < 0 and min(form.steps, default=0) < 0:
                _refuse_strides(name, form, "strides must not be negative")
            canonical[name] = ours = form.permuted(order) if order else form
            bits[name] = its_bits = ours.bits
            if is_tile:
                bits[None] |= its_bits
            if (its_bits | (ours.strides[-1] if ours.shape[-1:] > (1,) else 0)) % itemsize and form.extent:
                where = f"address and strides must be multiples of its elements' {itemsize} bytes"
                _refuse_strides(name, form, f"{where}: address {past} past a multiple of {ALIGNMENT}")
            if name in self.written:
                if readonly:
                    raise ValueError(f"{name}: must be writable, and this array is read-only")
                if overlaps_itself(form):
                    _refuse_strides(name, form, "its elements must not overlap each other")
            like = self.arguments[name].like
            if like and like in forms and forms[like].shape != shape:
                raise ValueError(f"{name}: must have {like}'s shape: {name}.shape={shape}, {like}.shape={forms[like].shape}")
        if "E" in extents:
            self._check_ends(extents, forms, holder)
        return Problem(self, canonical, self.extents | self._counted(extents), bits, layout)

    def with_lengths(self, name: str, form: Form, layout: str) -> Form:
        """The form of an argument, of a call that is watched: what is no length, such as the number of heads, has one value."""
        axes, _ = self.rows.get(layout, {}).get(name, {}).get(len(form.shape), ("*" * len(form.shape), ()))
        return form._replace(shape=tuple([n if axis in self.vary else int(n) for n, axis in zip(form.shape, axes)]))

    def of_a_number(self, name: str, number: float) -> str:
        """What is said where an array is expected and a number is given."""
        row = self.arguments[name]
        shape, dtype = ", ".join(SPOKEN.get(axis, axis) for axis in row.axes[0]), row.dtypes[0]
        comma = "," if len(row.axes[0]) == 1 else ""
        cure = f"; of a number make one: np.full(({shape}{comma}), {number!r}, np.{dtype})"
        return f"{name}: must be an array, got {name}={number!r}{cure if dtype in ('float32', 'int32') else ''}"

    def results(self, options: Mapping[str, Any]) -> list[str]:
        """The names of what is given back by a call with these options."""
        return [name for name, row in self.arguments.items() if row.result and all(_asks(options, word) for word in row.asked)]

    def check_dtypes(self, dtypes: Mapping[str, str]) -> None:
        """TypeError, as `problem` raises it, if arrays of these dtypes are none for these arguments."""
        first, dtype = next(iter(dtypes.items()))
        for name, its in dtypes.items():
            if its not in self._dtypes[name] or (name in self.tiles and its != dtype):
                _refuse_dtype(self.arguments[name], its, first, dtype)

    def shapes(self, shapes_of_inputs: Mapping[str, Sequence[int]], layout: str) -> dict[str, list[int]]:
        """The shapes of all results, in the caller's axes, by those of the arrays that were given. Nothing is compared: extents
        may be torch's symbols, of which nobody knows yet whether they are equal. ValueError: no row has as many axes."""
        if layout not in LAYOUTS:
            raise ValueError(f"layout: must be one of {LAYOUTS}: {layout=}")
        rows, extents = self.rows[layout], dict(self.extents)
        for name, shape in shapes_of_inputs.items():
            if len(shape) not in rows[name]:
                _refuse_axes(self.arguments[name], layout, shape)
            extents |= zip(rows[name][len(shape)][0], shape)
        extents = self._counted(extents)
        results = {name: row for name, row in self.arguments.items() if row.result}
        shapes_of_axes = {name: axes for name, row in results.items() if not row.like for axes, _ in rows[name].values()}
        alike = {name: list(shapes_of_inputs[row.like]) for name, row in results.items() if row.like in shapes_of_inputs}
        return alike | {
            name: [extents[axis] for axis in axes] for name, axes in shapes_of_axes.items() if extents.keys() >= {*axes}
        }

    def _counted(self, extents: dict[str, Any]) -> dict[str, Any]:
        """With the number of sequences, one fewer than ends, or as many as batches; and with what follows from others."""
        if "E" in extents:
            extents["N"] = extents["E"] - 1
        elif "B" in extents:
            extents["N"] = extents["B"]
        return extents | {axis: extent(extents) for axis, extent in self._following.items()}

    def _check_ends(self, extents, forms, holder):
        name = holder["E"]
        ends = f"{name}.shape={forms[name].shape}"
        if extents["E"] < 2:
            raise ValueError(f"{name}: must have two elements or more: {ends}")
        if extents["B"] != 1:
            shapes = f"{ends}, {holder['B']}.shape={forms[holder['B']].shape}"
            raise ValueError(f"{name}: batch must be 1, all sequences one after the other: {shapes}")

    def check(self, problem: Problem, forms: Mapping[str, Form]) -> Check | None:
        """The step that looks at the values of these arrays, which have their forms in the caller's axes; None: any will do."""
        rules_of_values = {name: VALUES.get(self.arguments[name].holds) for name in forms}
        rows = [(name, self.places[name], forms[name], values) for name, values in rules_of_values.items() if values]
        return Check(rows, problem.extents) if rows else None

    def apart(self, forms: Mapping[str, Form]) -> list[tuple[str, str]]:
        """The pairs of given arrays that must not share memory: one that is written, and any other."""
        if self.written.isdisjoint(forms):
            return []
        pairs = itertools.combinations(forms, 2)
        turned = [pair if self.arguments[pair[0]].written else pair[::-1] for pair in pairs]
        return [pair for pair in turned if self.arguments[pair[0]].written]

    def check_apart(self, name: str, other: str, pointers: tuple[int, int], forms: tuple[Form, Form]) -> None:
        """ValueError if two such arrays, which have these addresses and forms, share memory."""
        (at, behind), (mine, its) = pointers, forms
        itself = self.arguments[name].role == "in_place" and other == self.names[0] and at == behind
        if itself and all(s == t for n, s, t in zip(mine.shape, mine.strides, its.strides) if n > 1):
            return
        if overlap(mine, its, behind - at):
            shapes = f"{name}.shape={mine.shape}, {other}.shape={its.shape}"
            raise ValueError(f"{name}: must not overlap {other}: {name} at {at:#x}, {other} at {behind:#x}, {shapes}")


def _asks(options: Mapping[str, Any], word: str) -> bool:
    """Does an option ask for a result: is it true, or does it hold the word behind the colon?"""
    option, _, what = word.partition(":")
    return what in options[option].split() if what else options[option]


def _row(words: list[str]) -> tuple[str, tuple[str, ...], str, str, tuple[str, ...], str]:
    name, axes, holds, role, *options = (*words, "") if len(words) < 4 else words
    if axes.startswith("="):
        return name, FREE, holds, role, tuple(options), axes[1:]
    if holds not in HOLDS or role not in ROLES:
        raise ValueError(f"{name}: must hold one of {tuple(HOLDS)} and have a role of {ROLES}, got {holds!r}, {role!r}")
    return name, FREE if axes == "*" else tuple(axes.split("|")), holds, role, tuple(options), ""


def _refuse_axes(argument: Argument, layout: str, shape: Sequence[int]) -> NoReturn:
    choices = "; or ".join(", ".join(SPOKEN.get(axis, axis) for axis in axes) for axes in argument.choices(layout).values())
    raise ValueError(f"{argument.name}: must have the axes {choices}: {argument.name}.shape={tuple(shape)}")


CURE = "; convert it: x.astype(tiles.bf16.np), or torch's x.bfloat16(), or call it under torch.autocast"


def _refuse_dtype(argument: Argument, its_dtype: str, first: str, dtype: str) -> NoReturn:
    name = argument.name
    if its_dtype in argument.dtypes:
        raise TypeError(f"{name}: dtype must be {first}'s: {name}.dtype={its_dtype!r}, {first}.dtype={dtype!r}")
    cure = CURE if argument.holds == "tile" and its_dtype in ("float32", "float64") else ""
    raise TypeError(f"{name}: dtype must be one of {argument.dtypes}: {name}.dtype={its_dtype!r}{cure}")


def _refuse_strides(name: str, form: Form, what: str) -> NoReturn:
    raise ValueError(f"{name}: {what}: {name}.strides={form.strides} bytes, {name}.shape={form.shape}")
