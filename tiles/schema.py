"""Declared arguments: what a function on arrays takes and gives, said once, as a table.

    FORWARD = Schema("forward", '''
        q    BSHD  tile
        k    BTGD  tile
        v    BTGD  tile
        out  BSHD  tile     made
        lse  BHS   float32  made
    ''')

A row: an argument's name; its axes, a letter each, in canonical order ("H|BSH": either); what it holds; its role. An axis has
one extent wherever its letter is found. From the table follow the checks of a call (`problem`), the results' shapes, the order
in which addresses are passed (program.py), and the schema of torch's op.

What it holds:
    tile      bfloat16 or float16, one for all: kernels move tiles of it, so its last axis is contiguous
    real      float32, bfloat16 or float16, read element by element with any strides that are not negative
    index     int32 or int64
    float32   that

Its role:
    (none)    it must be given
    optional  it may be left out
    made      a result: written, and made where the caller leaves it out
    in_place  likewise; the caller may also give the first argument itself, to be overwritten
    updated   it must be given, and is written in place

`layout="bhsd"` says that the caller's axes have sequence and head swapped where both follow the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from .arrays import ALIGNMENT, Form, Operand, c_ordered, overlap, overlaps_itself
from .tma import STRIDE_END

ORDER = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}  # where batch, sequence, head and column stand in the caller's axes
LAYOUTS = tuple(ORDER)
HOLDS = {
    "tile": ("bfloat16", "float16"),
    "real": ("float32", "bfloat16", "float16"),
    "index": ("int32", "int64"),
    "float32": ("float32",),
}
ROLES = "", "optional", "made", "in_place", "updated"
TOKENS = "S", "T"  # axes along a sequence
# An axis in messages. G are the heads of keys, which share those of values or queries; T the keys' tokens; K and V the columns
# of keys and values where they differ; F those of a feature map; N sequences have E = N + 1 ends
TITLES = dict(B="batch", S="sequence", T="sequence", H="heads", G="heads", D="head_dim", K="key_dim", V="value_dim")
TITLES |= dict(N="sequences", F="features", E="length")
SPOKEN = {"G": "Hk", "K": "Dk", "V": "Dv", "E": "N + 1", "T": "S"}


class Argument(NamedTuple):
    """A row of the table."""

    name: str
    axes: tuple[str, ...]
    holds: str
    role: str

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
        return self.role in ("made", "in_place", "updated")

    def choices(self, layout: str) -> dict[int, str]:
        """{number of axes: the axes in the caller's order}"""
        swap = layout == "bhsd"
        swapped = [f"{a[0]}{a[2]}{a[1]}{a[3:]}" if swap and a[1:2] in TOKENS and len(a) > 2 else a for a in self.axes]
        return {len(axes): axes for axes in swapped}


class Problem:
    """A call that was found valid: the forms of its arrays with axes in canonical order, and the extent of every axis.

    forms: of those that were given, by name. extents: by an axis's letter. dtype: that of its tiles. device: a CUDA ordinal;
    None is host memory."""

    def __init__(self, schema: Schema, forms: dict[str, Form], extents: dict[str, int], layout: str):
        self.schema, self.forms, self.extents, self.layout = schema, forms, extents, layout
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
        if name in self.forms:
            return Operand(name, self.forms[name])
        return Operand(name, self._made(name).permuted(self._order(name))) if self.schema.arguments[name].written else None

    def __call__(self, axes: str) -> tuple[int, ...]:
        """The extents of these axes: problem("BSH")."""
        return tuple([self.extents[axis] for axis in axes])

    def made(self, name: str) -> tuple[tuple[int, ...], str]:
        """The shape and dtype of a result, in the caller's axes."""
        form = self._made(name)
        return form.shape, form.dtype

    def _made(self, name):
        argument = self.schema.arguments[name]
        (axes,) = argument.choices(self.layout).values()
        dtype = self.dtype if argument.holds == "tile" else argument.dtypes[0]
        return c_ordered(self(axes), dtype, self.device)

    def _order(self, name):
        argument = self.schema.arguments[name]
        (axes,) = argument.choices(self.layout).values()
        return [axes.index(axis) for axis in argument.axes[0]]

    def axes(self, name: str) -> str:
        """Which of its axes an argument came with, in canonical order."""
        rank = len(self.forms[name].shape)
        return next(axes for axes in self.schema.arguments[name].axes if len(axes) == rank)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an argument, in the caller's axes: for messages."""
        form, argument = self.forms[name], self.schema.arguments[name]
        axes = argument.choices(self.layout)[len(form.shape)]
        return tuple(form.shape[self.axes(name).index(axis)] for axis in axes)

    def bytes_at_once(self, *names: str) -> int:
        """The bytes, 16 at most, that addresses and strides of these arrays are multiples of; by default of all its tiles."""
        bits = ALIGNMENT
        for name, form in self.forms.items():
            if name in names if names else self.schema.arguments[name].holds == "tile":
                bits |= form.bits
        return bits & -bits

    @property
    def by_tma(self) -> bool:
        """Can TMA address all tiles?"""
        tiles = [form for name, form in self.forms.items() if self.schema.arguments[name].holds == "tile"]
        steps = [step for form in tiles for n, step in zip(form.shape, form.strides) if n > 1]
        return self.bytes_at_once() == ALIGNMENT and all(0 <= step < STRIDE_END for step in steps)


class Schema:
    """A table of arguments: see the module. arguments: {name: Argument}, in the order of the rows."""

    def __init__(self, name: str, table: str):
        self.name = name
        rows = [Argument(*_row(line.split())) for line in table.strip().splitlines()]
        self.arguments = {row.name: row for row in rows}
        self.names = tuple(self.arguments)
        self._choices = {layout: {row.name: row.choices(layout) for row in rows} for layout in LAYOUTS}

    def problem(self, forms: Mapping[str, Form], layout: str = "bshd") -> Problem:
        """The Problem of a call, `forms` being those of the arrays that were given. All must lie on one device; tiles have a
        contiguous last axis. Raises ValueError or TypeError that names the argument and prints the values."""
        if layout not in LAYOUTS:
            raise (ValueError if isinstance(layout, str) else TypeError)(f"layout: must be one of {LAYOUTS}: {layout=}")
        every, first = self._choices[layout], next(iter(forms.items()))
        extents: dict[str, int] = {}
        holder: dict[str, str] = {}  # which argument said an axis's extent
        device, dtype = first[1].device, first[1].dtype
        canonical = {}
        for name, form in forms.items():
            argument, shape = self.arguments[name], form.shape
            axes = every[name].get(len(shape))
            if axes is None:
                _refuse_axes(argument, layout, form)
            is_tile = argument.holds == "tile"
            if form.dtype not in argument.dtypes or (is_tile and form.dtype != dtype):
                _refuse_dtype(argument, form, first)
            if form.device != device:
                elsewhere = f"{name}.device={form.device}, {first[0]}.device={device}"
                raise ValueError(f"{name}: must lie where {first[0]} does (None: host memory): {elsewhere}")
            for axis, extent in zip(axes, shape):
                title = TITLES.get(axis, axis)
                if axis == "N":  # as many as there are ends, or batches
                    axis, extent = ("E", extent + 1) if "E" in extents else ("B", extent)
                known = extents.setdefault(axis, extent)
                if known != extent:
                    other = holder[axis]
                    shapes = f"{name}.shape={shape}, {other}.shape={forms[other].shape}"
                    raise ValueError(f"{name}: {title} must equal {other}'s: {shapes}")
                holder.setdefault(axis, name)
            if is_tile and shape[-1] > 1 and form.strides[-1] != form.itemsize and form.extent:
                _refuse_strides(name, form, "last axis must be contiguous")
            steps = [step for n, step in zip(shape, form.strides) if n > 1]
            if not is_tile and min(steps, default=0) < 0:
                _refuse_strides(name, form, "strides must not be negative")
            if form.extent and any(place % form.itemsize for place in (form.past, *steps)):
                where = f"address and strides must be multiples of its elements' {form.itemsize} bytes"
                _refuse_strides(name, form, f"{where}: address {form.past} past a multiple of {ALIGNMENT}")
            if argument.written and form.readonly:
                raise ValueError(f"{name}: must be writable, and this array is read-only")
            if argument.written and overlaps_itself(form):
                _refuse_strides(name, form, "its elements must not overlap each other")
            order = _order(axes, argument.axes)
            canonical[name] = form if order is None else form.permuted(order)
        if "E" in extents:
            self._check_ends(extents, forms, holder)
            extents["N"] = extents["E"] - 1
        elif "B" in extents:
            extents["N"] = extents["B"]
        return Problem(self, canonical, extents, layout)

    def _check_ends(self, extents, forms, holder):
        ends = f"cu_seqlens.shape={forms['cu_seqlens'].shape}"
        if extents["E"] < 2:
            raise ValueError(f"cu_seqlens: must have two elements or more: {ends}")
        if extents["B"] != 1:
            shapes = f"{ends}, {holder['B']}.shape={forms[holder['B']].shape}"
            raise ValueError(f"cu_seqlens: batch must be 1, all sequences one behind the other: {shapes}")

    def apart(self, forms: Mapping[str, Form]) -> list[tuple[str, str]]:
        """The pairs of given arrays that must not share memory: one that is written, and any other."""
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


def _row(words: list[str]) -> tuple[str, tuple[str, ...], str, str]:
    name, axes, holds, role = (*words, "")[:4]
    if holds not in HOLDS or role not in ROLES:
        raise ValueError(f"{name}: must hold one of {tuple(HOLDS)} and have a role of {ROLES}, got {holds!r}, {role!r}")
    return name, tuple(axes.split("|")), holds, role


def _order(axes: str, canonical: tuple[str, ...]) -> list[int] | None:
    """Where the canonical axes stand among the caller's; None where they are the same."""
    for choice in canonical:
        if len(choice) == len(axes):
            return None if choice == axes else [axes.index(axis) for axis in choice]
    raise AssertionError(axes)


def _refuse_axes(argument: Argument, layout: str, form: Form) -> NoReturn:
    choices = "; or ".join(", ".join(SPOKEN.get(axis, axis) for axis in axes) for axes in argument.choices(layout).values())
    raise ValueError(f"{argument.name}: must have the axes {choices}: {argument.name}.shape={form.shape}")


CURE = " (tensor.bfloat16() in torch, array.astype(ml_dtypes.bfloat16) in NumPy)"


def _refuse_dtype(argument: Argument, form: Form, first: tuple[str, Form]) -> NoReturn:
    name, (other, its) = argument.name, first
    if form.dtype in argument.dtypes:
        raise TypeError(f"{name}: dtype must be {other}'s: {name}.dtype={form.dtype!r}, {other}.dtype={its.dtype!r}")
    cure = CURE if argument.holds == "tile" and form.dtype in ("float32", "float64") else ""
    raise TypeError(f"{name}: dtype must be one of {argument.dtypes}: {name}.dtype={form.dtype!r}{cure}")


def _refuse_strides(name: str, form: Form, what: str) -> NoReturn:
    raise ValueError(f"{name}: {what}: {name}.strides={form.strides} bytes, {name}.shape={form.shape}")
