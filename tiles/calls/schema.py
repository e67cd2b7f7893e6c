"""Declared arguments: a table says once what a function on arrays takes and returns.

    FORWARD = Schema("forward", '''
        q      (batch, seqlen_q, heads, head_dim)    tile
        k      (batch, seqlen_k, heads_k, head_dim)  tile
        v      (batch, seqlen_k, heads_k, head_dim)  tile
        alibi  (heads)|(alibi_batch, heads)          float32  optional
        out    (batch, seqlen_q, heads, head_dim)    tile     output
        lse    (batch, heads, seqlen_q)              float32  output    return_lse
    ''')

    problem = FORWARD.problem(forms)                         {name: form} of the caller's arrays: checked, or refused
    batch, heads = problem("batch", "heads")                 extents; one of them is problem.extents["batch"]
    kernel.bind(grid, gQ=problem["q"], gO=problem["out"])    arrays; a result that the caller left out is allocated

A row is an argument. Its columns:

1. Its name.
2. Its axes, by the names in axes.py. A name has one extent in a call, wherever it stands: two arrays that disagree are refused.
   `(heads)|(alibi_batch, heads)` is the one or the other, which differ in the number of axes. `=alibi` is the shape of the
   argument `alibi`. `*` is any shape of one to five axes.
3. What it holds, in the list below.
4. Its role, in the list below.
5. The options that ask for a result that exists only on request: all must be true (`return_lse`), or hold a word
   (`grads:dbias`: the word dbias is in the option `grads`).

The table determines the checks of a call (`problem`), the shapes of results, the order in which addresses are passed
(program.py), and the signature and the fakes of torch's op (torch_op.py). With `layout="bhsd"` the caller's arrays have heads
before the sequence, where both follow the batch; a Problem has the axes in the order of the table.

What it holds:
    tile      bfloat16 or float16, one for all: kernels move tiles of it, so its last axis is contiguous
    real      float32, bfloat16 or float16, read element by element with any strides that are not negative
    index     int32 or int64
    any       numbers of any kind
    float32   that
    bfloat16  that
    float16   that
    fp8       that of e4m3, float8_e4m3fn
    int8      that
    byte      fp8 or int8
    tile8     the same, as tiles that kernels move, like `tile`
    half      bfloat16 or float16; results are bfloat16
    cache     what a cache keeps of tiles: bfloat16, float16, fp8 or int8

and, with values that a step of the program checks (checks.py):
    log          real, the logarithm of the part of a state that is kept: never above 0
    rate         real; multiplied by a time it is such a logarithm: never above 0
    ends         index, where packed sequences end: 0 first, ascending, seqlen last
    ends_q       the same of queries: seqlen_q last
    ends_k       the same of keys: seqlen_k last
    ends_new     the same of keys that are appended: seqlen_new last
    key_lengths  index, how many keys of a sequence are in use: from 0 to seqlen_k, times pages_per_seq if there are pages
    key_starts   index, how many keys come before a sequence's first: from 0 to as many

Its role:
    (none)    it must be given
    optional  it may be left out
    output    a result: written, and allocated if the caller leaves it out
    in_place  an output; the caller may also pass the first argument itself, to be overwritten
    updated   it must be given, and is written in place
    updated?  likewise, but it may be left out
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ..launching.arrays import ALIGNMENT, Form, Operand, c_ordered, overlap, overlaps_itself
from ..launching.checks import ENDS, ENDS_K, ENDS_NEW, ENDS_Q, KEY_LENGTHS, KEY_STARTS, LOG, RATE, Check
from ..launching.tensor_maps import STRIDE_END
from .argument import Argument, Axes, parse_row
from .axes import AXES, VARY, along_sequence, symbols, title

ORDER = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}  # where batch, sequence, head and column stand in the caller's axes
LAYOUTS = tuple(ORDER)
VALUES = {"log": LOG, "rate": RATE, "ends": ENDS, "ends_q": ENDS_Q, "ends_k": ENDS_K, "ends_new": ENDS_NEW}
VALUES |= {"key_lengths": KEY_LENGTHS, "key_starts": KEY_STARTS}
ONE = {"1": 1}  # the extent of the axis `1`
TILES = "tile", "tile8", "fp8", "byte"  # what the arrays hold that kernels compute with
WIDE_REMEDY = "convert it: x.astype(tiles.bf16.np), or torch's x.bfloat16(), or call it under torch.autocast"


class Problem:
    """A valid call: the forms of its arrays with axes in canonical order, and the extent of every axis.

    forms: of the arguments that were passed, by name. extents: by an axis's name. bits: those of each form (arrays.py), and
    under None of all tiles. dtype: that of its tiles. device: a CUDA ordinal; None is host memory."""

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
        """The Operand of an argument for a launch, or of a result, passed or to be allocated; None for an argument that was
        omitted."""
        form = self.forms.get(name)
        if form is None:
            result = self.schema.written_rows[self.layout].get(name)
            if result is None:
                return None
            axes, order, dtype = result
            like = self.schema.arguments[name].like
            if like:
                order = self.schema.rows[self.layout][like][len(self.forms[like].shape)][1]
            form = c_ordered(self._shape_like(like) if like else self(*axes), dtype or self.dtype, self.device)
            form = form.permuted(order) if order else form
        return Operand(self.schema.places[name], form)

    def __call__(self, *axes: str) -> tuple[int, ...]:
        """The extents of these axes."""
        extents = self.extents
        return tuple([extents[axis] for axis in axes])

    def result_form(self, name: str) -> tuple[tuple[int, ...], str]:
        """The shape and dtype of a result, in the caller's axes."""
        axes, _, dtype = self.schema.written_rows[self.layout][name]
        like = self.schema.arguments[name].like
        return self._shape_like(like) if like else self(*axes), dtype or self.dtype

    def _shape_like(self, name: str) -> tuple[int, ...]:
        """The shape of a result that has another argument's, in the caller's axes."""
        shape = self.forms[name].shape
        _, order = self.schema.rows[self.layout][name][len(shape)]
        return tuple([shape[order.index(axis)] for axis in range(len(shape))]) if order else shape

    def scratch(self, number: int, shape: tuple[int, ...], dtype: str) -> Operand:
        """The Operand of the `number`-th scratch array of a plan."""
        return Operand(len(self.schema.places) + number, c_ordered(shape, dtype, self.device))

    def axes(self, name: str) -> Axes:
        """The axes of an argument that was passed, in canonical order."""
        rank = len(self.forms[name].shape)
        return next(axes for axes in self.schema.arguments[name].axes if len(axes) == rank)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an argument in the caller's order of axes, for error messages."""
        form = self.forms[name]
        axes, _ = self.schema.rows[self.layout][name][len(form.shape)]
        return tuple(form.shape[self.axes(name).index(axis)] for axis in axes)

    def error(self, name: str, message: str, *names: str) -> ValueError:
        """The error that says what is wrong with an argument, with the shapes of the arguments `names`."""
        return ValueError(f"{name}: {message}: {', '.join(f'{one}.shape={self.shape(one)}' for one in names)}")

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
    """A table of arguments: see the module. arguments: {name: Argument}, in the order of the rows. extents: of axes that have
    one extent in all calls, or occur in results only; or a function from all other extents to it. vary: if axes are not those
    of axes.py, which of them have a length as their extent (lengths.py). remedies: {a dtype that tiles do not have, or the name
    of another argument: what to do with such arrays}, for errors. axis_names: {axis: (its symbol, its title)} where the
    function's own documentation has others than axes.py. ValueError: a row has a wrong syntax."""

    def __init__(
        self,
        name: str,
        table: str,
        vary: Iterable[str] | None = None,
        remedies: Mapping[str, str] | None = None,
        axis_names: Mapping[str, tuple[str, str]] | None = None,
        **extents: int | Callable[[Mapping[str, Any]], Any],
    ):
        rows = [parse_row(line) for line in table.splitlines() if line.strip()]
        for row in rows if vary is None else ():
            if unknown := [axis for axes in row.axes for axis in axes if axis not in AXES and axis != "*"]:
                raise ValueError(f"{row.name}: has the axis {unknown[0]}, which tiles/calls/axes.py does not name")
        self.name, self.vary, self.remedies = name, VARY if vary is None else frozenset(vary), remedies or {}
        self.axis_names = axis_names or {}
        self.extents = ONE | {axis: extent for axis, extent in extents.items() if isinstance(extent, int)}
        self._derived_extents = {axis: extent for axis, extent in extents.items() if not isinstance(extent, int)}
        self.arguments = {row.name: row for row in rows}
        self.names = tuple(self.arguments)
        self.tiles = frozenset(row.name for row in rows if row.holds in ("tile", "tile8"))
        self.places = {name: place for place, name in enumerate(self.names)}  # of their addresses
        self.written = frozenset(row.name for row in rows if row.written)
        self.rows = {layout: {row.name: row.orders(layout) for row in rows} for layout in LAYOUTS}
        self.written_rows = {layout: self._written(layout) for layout in LAYOUTS}
        self._dtypes = {row.name: row.dtypes for row in rows}

    def axis_title(self, axis: str) -> str:
        """The axis's name in messages about its extent."""
        return self.axis_names[axis][1] if axis in self.axis_names else title(axis)

    def symbols_of(self, axes: Axes) -> str:
        """The axes as error messages write them: "B, S, H, D"."""
        return ", ".join([self.axis_names[axis][0] if axis in self.axis_names else symbols((axis,)) for axis in axes])

    def _written(self, layout: str) -> dict[str, tuple[Axes, tuple[int, ...], str | None]]:
        """{result: (its axes in the caller's order, where the canonical ones stand, the dtype; None: the tiles')}."""
        written = {}
        for name in [name for name, row in self.arguments.items() if row.result]:
            ((axes, order),) = [((), ())] if self.arguments[name].like else self.rows[layout][name].values()
            written[name] = axes, order, None if name in self.tiles else self.arguments[name].dtypes[0]
        return written

    def problem(self, forms: Mapping[str, Form], layout: str = "bshd") -> Problem:
        """The Problem of a call, `forms` being those of the arrays that were passed. All must lie on one device; tiles have a
        contiguous last axis. Raises ValueError or TypeError that names the argument and prints the values."""
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise (ValueError if isinstance(layout, str) else TypeError)(f"layout: must be one of {LAYOUTS}: {layout=}")
        rows, first = self.rows[layout], next(iter(forms))
        _, _, dtype, device, *_ = forms[first]
        bits: dict[str | None, int] = {None: 0}
        extents = ONE.copy()
        holders: dict[str, str] = {}  # {axis: the argument that determined its extent}
        canonical = {}
        for name, form in forms.items():
            shape, strides, array_dtype, array_device, itemsize, misalignment, readonly = form
            row = rows[name].get(len(shape))
            if row is None:
                self._refuse_axes(name, layout, shape, extents)
            axes, order = row
            like = self.arguments[name].like
            if like:
                _, order = rows[like].get(len(shape), row)
            is_tile = name in self.tiles
            if array_dtype not in self._dtypes[name] or (is_tile and array_dtype != dtype):
                self._refuse_dtype(self.arguments[name], array_dtype, first, dtype)
            if array_device != device:
                where = f"{name}.device={array_device}, {first}.device={device}"
                raise ValueError(f"{name}: must lie where {first} does (None: host memory): {where}")
            for axis, extent in zip(axes, shape):
                if extents.get(axis) == extent or axis == "*":
                    continue
                axis_name = axis
                if axis == "sequences":  # as many as there are ends, or batches
                    axis, extent = ("ends", extent + 1) if "ends" in extents else ("batch", extent)
                if axis not in extents:
                    extents[axis], holders[axis] = extent, name
                elif extents[axis] != extent:
                    if axis == "1":
                        raise ValueError(f"{name}: must have one element{_where(axes)}: {name}.shape={shape}")
                    other = holders[axis]
                    shapes = f"{name}.shape={shape}, {other}.shape={forms[other].shape}"
                    known = {one: extents[one] for one in extents if holders.get(one) != name}
                    remedy = _joined_axes_remedy(name, shape, row, rows[name].get(len(shape) + 1), extents)
                    remedy = remedy or self._swap_remedy(name, axes, shape, known, is_tile)
                    raise ValueError(f"{name}: {self.axis_title(axis_name)} must equal {other}'s: {shapes}{remedy}")
            if is_tile and strides[-1] != itemsize and shape[-1] > 1 and form.extent:
                _refuse_strides(name, form, "last axis must be contiguous")
            if not is_tile and min(strides, default=0) < 0 and min(form.steps, default=0) < 0:
                _refuse_strides(name, form, "strides must not be negative")
            canonical[name] = canonical_form = form.permuted(order) if order else form
            bits[name] = array_bits = canonical_form.bits
            if is_tile:
                bits[None] |= array_bits
            if (
                array_bits | (canonical_form.strides[-1] if canonical_form.shape[-1:] > (1,) else 0)
            ) % itemsize and form.extent:
                where = f"address and strides must be multiples of its elements' {itemsize} bytes"
                _refuse_strides(name, form, f"{where}: address {misalignment} past a multiple of {ALIGNMENT}")
            if name in self.written:
                if readonly:
                    read_only = "this array is read-only: pass a copy; arrays of JAX cannot be written"
                    raise ValueError(f"{name}: must be writable, and {read_only}")
                if overlaps_itself(form):
                    _refuse_strides(name, form, "its elements must not overlap each other")
            if like and like in forms and forms[like].shape != shape:
                raise ValueError(f"{name}: must have {like}'s shape: {name}.shape={shape}, {like}.shape={forms[like].shape}")
        if "ends" in extents:
            self._check_ends(extents, forms, holders)
        derived = self._add_derived_extents(extents)
        for axis in self._derived_extents:
            if axis in extents and extents[axis] != derived[axis]:
                name, wanted = holders[axis], int(derived[axis])
                raise ValueError(f"{name}: {self.axis_title(axis)} must be {wanted}: {name}.shape={forms[name].shape}")
        return Problem(self, canonical, self.extents | derived, bits, layout)

    def with_lengths(self, name: str, form: Form, layout: str) -> Form:
        """The form of an argument, of a call whose planner is watched: an extent that is no length, such as the number of
        heads, becomes a plain int."""
        rows = self.rows.get(layout, {}).get(self.arguments[name].like or name, {})
        axes, _ = rows.get(len(form.shape), (("*",) * len(form.shape), ()))
        return form._replace(shape=tuple([n if axis in self.vary else int(n) for n, axis in zip(form.shape, axes)]))

    def number_message(self, name: str, number: float) -> str:
        """The error message for a number where an array is expected."""
        row = self.arguments[name]
        if isinstance(number, bool):
            return f"{name}: must be an array of the axes {'; or '.join(map(self.symbols_of, row.axes))}: {name}={number}"
        shape, dtype = self.symbols_of(row.axes[0]), row.dtypes[0]
        comma = "," if len(row.axes[0]) == 1 else ""
        remedy = f"; of a number make one: np.full(({shape}{comma}), {number!r}, np.{dtype})"
        return f"{name}: must be an array, got {name}={number!r}{remedy if dtype in ('float32', 'int32') else ''}"

    def results(self, options: Mapping[str, Any]) -> list[str]:
        """The names of the results that a call with these options returns."""
        return [
            name
            for name, row in self.arguments.items()
            if row.result and all(_requests_result(options, word) for word in row.flags)
        ]

    def _refuse_axes(self, name: str, layout: str, shape: Sequence[int], extents: Mapping[str, int] | None = None) -> NoReturn:
        """extents: those that are known; None if extents cannot be compared."""
        choices = self.arguments[name].choices(layout)
        remedy = "" if extents is None else _axes_remedy(name, choices, tuple(shape), extents)
        expected = "; or ".join(map(self.symbols_of, choices.values()))
        raise ValueError(f"{name}: must have the axes {expected}: {name}.shape={tuple(shape)}{remedy}")

    def _swap_remedy(self, name: str, axes: Axes, shape: tuple[int, ...], known: Mapping[str, int], is_tile: bool) -> str:
        """What the axes of an array with a wrong extent are, and the swap of two of them that makes all extents right. The last
        axis of a tile is not swapped, as it must be contiguous."""
        if len(axes) < 2:
            return ""

        def fits(first: int, second: int) -> bool:
            order = [second if place == first else first if place == second else place for place in range(len(axes))]
            return all([known.get(axis, shape[place]) == shape[place] for axis, place in zip(axes, order)])

        swaps = [pair for pair in itertools.combinations(range(len(axes) - is_tile), 2) if fits(*pair)]
        cure = f", and {name}.swapaxes{swaps[0]} has them" if swaps else ""
        return f"; its axes are {self.symbols_of(axes)}{cure}"

    def _refuse_dtype(self, argument: Argument, array_dtype: str, first: str, dtype: str) -> NoReturn:
        name = argument.name
        if array_dtype in argument.dtypes:
            dtypes = f"{name}.dtype={array_dtype!r}, {first}.dtype={dtype!r}"
            raise TypeError(f"{name}: dtype must be {first}'s: {dtypes}; convert one of them")
        remedy = self.remedies.get(array_dtype if argument.holds in TILES else name, "")
        if argument.holds == "tile" and array_dtype in ("float32", "float64"):
            remedy = WIDE_REMEDY
        if "float32" in argument.dtypes and array_dtype in ("float64", "bfloat16", "float16"):
            remedy = "convert it: x.astype(np.float32), or torch's x.float()"
        raise TypeError(
            f"{name}: dtype must be one of {argument.dtypes}: {name}.dtype={array_dtype!r}{remedy and f'; {remedy}'}"
        )

    def check_dtypes(self, dtypes: Mapping[str, str]) -> None:
        """TypeError, as `problem` raises it, if these arguments do not take these dtypes."""
        first, dtype = next(iter(dtypes.items()))
        for name, array_dtype in dtypes.items():
            if array_dtype not in self._dtypes[name] or (name in self.tiles and array_dtype != dtype):
                self._refuse_dtype(self.arguments[name], array_dtype, first, dtype)

    def shapes(self, shapes_of_inputs: Mapping[str, Sequence[int]], layout: str) -> dict[str, list[int]]:
        """The shapes of all results, in the caller's axes, by those of the arrays that were passed. Nothing is compared:
        extents may be torch's symbols, which cannot be compared yet. ValueError: no row has as many axes."""
        if layout not in LAYOUTS:
            raise ValueError(f"layout: must be one of {LAYOUTS}: {layout=}")
        rows, extents = self.rows[layout], dict(self.extents)
        for name, shape in shapes_of_inputs.items():
            if len(shape) not in rows[name]:
                self._refuse_axes(name, layout, shape)
            extents |= zip(rows[name][len(shape)][0], shape)
        extents = self._add_derived_extents(extents)
        results = {name: row for name, row in self.arguments.items() if row.result}
        shapes_of_axes = {name: axes for name, row in results.items() if not row.like for axes, _ in rows[name].values()}
        same_shapes = {name: list(shapes_of_inputs[row.like]) for name, row in results.items() if row.like in shapes_of_inputs}
        return same_shapes | {
            name: [extents[axis] for axis in axes] for name, axes in shapes_of_axes.items() if extents.keys() >= {*axes}
        }

    def _add_derived_extents(self, extents: dict[str, Any]) -> dict[str, Any]:
        """These extents, the number of sequences (one fewer than ends, or as many as batches), and the extents that are
        functions of others."""
        if "ends" in extents:
            extents["sequences"] = extents["ends"] - 1
        elif "batch" in extents:
            extents["sequences"] = extents["batch"]
        return extents | {axis: extent(extents) for axis, extent in self._derived_extents.items()}

    def _check_ends(self, extents, forms, holders):
        name = holders["ends"]
        ends = f"{name}.shape={forms[name].shape}"
        if extents["ends"] < 2:
            raise ValueError(f"{name}: must have two elements or more: {ends}")
        if extents["batch"] != 1:
            shapes = f"{ends}, {holders['batch']}.shape={forms[holders['batch']].shape}"
            raise ValueError(f"{name}: batch must be 1, all sequences one after the other: {shapes}")

    def check(self, problem: Problem, forms: Mapping[str, Form]) -> Check | None:
        """The step that checks the values of these arrays, which have their forms in the caller's axes; None: all values are
        allowed."""
        rules_of_values = {name: VALUES.get(self.arguments[name].holds) for name in forms}
        rows = [(name, self.places[name], forms[name], values) for name, values in rules_of_values.items() if values]
        return Check(rows, problem.extents) if rows else None

    def disjoint_pairs(self, forms: Mapping[str, Form]) -> list[tuple[str, str]]:
        """The pairs of passed arrays that must not share memory: one that is written, and any other."""
        if self.written.isdisjoint(forms):
            return []
        pairs = itertools.combinations(forms, 2)
        ordered_pairs = [pair if self.arguments[pair[0]].written else pair[::-1] for pair in pairs]
        return [pair for pair in ordered_pairs if self.arguments[pair[0]].written]

    def check_overlap(self, name: str, other: str, pointers: tuple[int, int], forms: tuple[Form, Form]) -> None:
        """ValueError if two such arrays, which have these addresses and forms, share memory."""
        (address, other_address), (form, other_form) = pointers, forms
        overwrites_itself = self.arguments[name].role == "in_place" and other == self.names[0] and address == other_address
        if overwrites_itself and all(s == t for n, s, t in zip(form.shape, form.strides, other_form.strides) if n > 1):
            return
        if overlap(form, other_form, other_address - address):
            shapes = f"{name}.shape={form.shape}, {other}.shape={other_form.shape}"
            raise ValueError(
                f"{name}: must not overlap {other}: {name} at {address:#x}, {other} at {other_address:#x}, {shapes}"
            )


def _requests_result(options: Mapping[str, Any], word: str) -> bool:
    """Does an option request a result: is it true, or does it hold the word behind the colon?"""
    option, _, requested = word.partition(":")
    return requested in options[option].split() if requested else options[option]


def _where(axes: Axes) -> str:
    return " along its last axis" if len(axes) > 1 else ""


def _axes_remedy(name: str, choices: Mapping[int, Axes], shape: tuple[int, ...], extents: Mapping[str, int]) -> str:
    """The index that gives an array of this shape the axes of one of the choices, where axes are missing or one of extent 1 is
    too many: "; q[:, 0] has them"; "" if there is none that the extents which are known allow."""
    rank = len(shape)

    def matches(axes: Axes, shape: tuple[int, ...]) -> int:
        """How many of these extents are known; -1 if one of them is another."""
        known = [extents[axis] == extent for axis, extent in zip(axes, shape) if axis in extents]
        return len(known) if all(known) else -1

    longer = choices.get(rank + 1, ())
    if longer:
        scores = {place: matches(longer[:place] + longer[place + 1 :], shape) for place in range(rank)}
        best = max(scores, key=lambda place: (scores[place], not place, not along_sequence(longer[place])), default=0)
        if not scores.get(best):  # nothing is known, as of a first argument
            one_head = f", or with a single head {name}[:, :, None]" if longer[2:3] == ("heads",) else ""
            return f"; if the batch is missing, pass {name}[None]{one_head}" if best in scores and longer[0] == "batch" else ""
        return f"; {name}[{':, ' * best}None] has them" if scores[best] > 0 else ""
    if axes := choices.get(rank - 1):
        for place in (*range(1, rank), 0):
            sure = 0 if place else len(axes)  # the first axis is the batch, unless all others say that it is too many
            if shape[place] == 1 and matches(axes, shape[:place] + shape[place + 1 :]) >= sure:
                return f"; {name}[{':, ' * place}0] has them"
    if (axes := choices.get(rank + 2)) and all([symbols((axis,)).endswith(" or 1") for axis in axes[:2]]):
        return f"; {name}[None, None] has them" if matches(axes[2:], shape) >= 0 else ""
    return ""


def _joined_axes_remedy(
    name: str, shape: tuple[int, ...], row: tuple[Axes, Any], longer: tuple[Axes, Any] | None, extents: Mapping[str, int]
) -> str:
    """How to take the last axis of an array apart, where it holds the last two of a longer choice, as projections have it."""
    last_two = longer[0][-2:] if longer else ()
    if last_two[:1] != row[0][-1:] or not extents.keys() >= {*last_two}:
        return ""
    inner = [extents[axis] for axis in last_two]
    if inner[0] * inner[1] != shape[-1]:
        return ""
    return f"; {name}.reshape{(*shape[:-1], *inner)} has {', '.join(map(title, last_two))}"


def _refuse_strides(name: str, form: Form, message: str) -> NoReturn:
    raise ValueError(f"{name}: {message}: {name}.strides={form.strides} bytes, {name}.shape={form.shape}")
