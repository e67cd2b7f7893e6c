"""One call of the linear-attention family, validated: what it was asked to compute, and nothing about how.

What a member of the family takes is a table: its arguments and the axes of each. `check` goes through the table and raises
before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tiles.arrays import FORMS, Array, Form, c_ordered, form, overlaps, overlaps_itself
from tiles.device import device, hopper

from ..softmax.problem import (
    AXES,
    DTYPES,
    PIECES,
    SCALES,
    STRIDE_END,
    Rule,
    alignment_rules,
    conversion,
    memory_rules,
    options,
    piece,
    require,
)

# An axis has one letter, and one extent wherever it is found: batch, sequence (tokens), heads of values and of keys (G), which
# share the former, columns of values, of keys (K) and of a feature map (F); a state for each of N sequences, which have
# N + 1 = E ends.
SPOKEN = {"G": "Hk", "K": "Dk", "V": "Dv", "E": "N + 1"}
TITLES = dict(B="batch", S="sequence", H="heads", G="heads", K="key_dim", V="value_dim", N="sequences", F="features")
COLUMNS = 16, 256  # key_dim and value_dim are multiples of the first, up to the second


class Argument(NamedTuple):
    """What an argument must be.

    axes: the choices, a letter an axis, in canonical order. dtypes: what it may hold. tiles: kernels move tiles of it, so its
    last axis is contiguous and everything aligned, and its dtype is that of the others; other arrays have any strides that are
    not negative. written: the kernel writes it, so it must lie apart from all others."""

    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    tiles: bool = False
    written: bool = False

    def choices(self, layout: str) -> list[str]:
        """The axes in the caller's order: sequence and head change places for "bhsd"."""
        return [f"{a[0]}{a[2]}S{a[3:]}" if layout == "bhsd" and "S" in a else a for a in self.axes]


def _tiles(axes: str, written: bool = False) -> Argument:
    return Argument((axes,), DTYPES, True, written)


def _reals(*axes: str) -> Argument:
    return Argument(axes, ("float32", "bfloat16", "float16"))


def _state(axes: str, written: bool = False) -> Argument:
    return Argument((axes,), ("float32",), False, written)


_ENDS = Argument(("E",), ("int32", "int64"))
MEMBERS: dict[str, dict[str, Argument]] = {
    "linear": {
        "q": _tiles("BSGK"),
        "k": _tiles("BSGK"),
        "v": _tiles("BSHV"),
        "out": _tiles("BSHV", written=True),
        "decay": _reals("H", "BSH", "BSHK"),
        "beta": _reals("BSH"),
        "cu_seqlens": _ENDS,
        "initial_state": _state("NHKV"),
        "initial_z": _state("NHK"),
    },
    "mamba2": {
        "x": _tiles("BSHV"),
        "dt": _reals("BSH"),
        "A": _reals("H"),
        "B": _tiles("BSGK"),
        "C": _tiles("BSGK"),
        "out": _tiles("BSHV", written=True),
        "D": _reals("H", "HV"),
        "z": _tiles("BSHV"),
        "dt_bias": _reals("H"),
        "cu_seqlens": _ENDS,
        "initial_states": _state("NHVK"),
    },
    "based": {
        "q": _tiles("BSGK"),
        "k": _tiles("BSGK"),
        "v": _tiles("BSHV"),
        "out": _tiles("BSHV", written=True),
        "cu_seqlens": _ENDS,
        "initial_state": _state("NHFV"),
        "initial_z": _state("NHF"),
    },
    "hedgehog": {
        "q": _tiles("BSGK"),
        "k": _tiles("BSGK"),
        "v": _tiles("BSHV"),
        "out": _tiles("BSHV", written=True),
        "q_map": _tiles("GKF"),
        "k_map": _tiles("GKF"),
        "alphas": _state("H"),
        "betas": _state("H"),
        "cu_seqlens": _ENDS,
    },
    "step": {
        "q": _tiles("BGK"),
        "k": _tiles("BGK"),
        "v": _tiles("BHV"),
        "out": _tiles("BHV", written=True),
        "state": _state("BHKV", written=True),
        "decay": _reals("H", "BH", "BHK"),
        "beta": _reals("BH"),
    },
}


@dataclass(frozen=True, eq=False)
class Problem:
    """The problem of a call. Equal calls share one object, so it is compared and hashed by identity.

    forms: of every array that was given, and of out in any case, by the argument's name, with axes in canonical order (batch,
    sequence, head, column) whatever `layout` says: what `arrays.at` makes an array of. Strides of axes of extent 1, which
    nobody uses, are those of one row. key_heads divides heads: value head h reads key head h // group.
    """

    member: str
    batch: int
    sequences: int  # batch, or as many as cu_seqlens says
    seqlen: int  # tokens of a batch: of all sequences, if there is cu_seqlens
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    scale: float
    normalize: bool
    layout: str
    device: int | None
    out_shape: tuple[int, ...]  # in the caller's axes, as are all shapes in messages
    forms: Mapping[str, Form]
    strides: int  # all bits that any stride of q, k, v and the like has, but for those of columns: see problem.piece

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.heads // self.key_heads

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """One state for each sequence and head; Mamba-2's is transposed."""
        columns = (self.value_dim, self.key_dim) if self.member == "mamba2" else (self.key_dim, self.value_dim)
        return self.sequences, self.heads, *columns

    @property
    def z_shape(self) -> tuple[int, int, int]:
        """The normalizer's state."""
        return self.sequences, self.heads, self.key_dim

    @property
    def trivial(self) -> bool:
        """No token or nothing of it: nothing to compute, and states stay as they are (0 where none was given)."""
        return 0 in self.out_shape


def check(
    member: str,
    arrays: Mapping[str, Array | None],
    *,
    scale: float | None = None,
    normalize: bool = False,
    layout: str = "bshd",
) -> Problem:
    """The Problem of a member of the family (a key of MEMBERS) and its arrays by name, None being what the caller left out.

    Of bfloat16 or float16, one for all, are those that come as tiles: queries, keys, values, out; decays, beta and the like are
    float32, bfloat16 or float16; states float32; cu_seqlens int32 or int64. All lie on one device. Head dims are multiples of
    16 up to 256; value heads a multiple of key heads. Tiles have a contiguous last axis, a base and strides that are multiples
    of 4 bytes. Inputs may overlap each other; out, and the state of a step, lie apart. With cu_seqlens the batch is 1; that
    its contents ascend from 0 to the sequence's length is not checked, for reading them would wait for the device.

    Raises ValueError or TypeError that names the argument and prints the values.
    """
    if isinstance(normalize, np.bool_):
        normalize = bool(normalize)
    if normalize is not True and normalize is not False:
        raise TypeError(f"normalize: must be a bool: {normalize=}")
    _, scale = options(False, scale)
    if not isinstance(layout, str) or layout not in AXES:
        raise (ValueError if isinstance(layout, str) else TypeError)(f"layout: must be one of {tuple(AXES)}: {layout=}")
    table = MEMBERS[member]
    given = {name: array for name in table if (array := arrays.get(name)) is not None}
    problem = _problem(member, tuple((name, array.form) for name, array in given.items()), scale, normalize, layout)
    require(alignment_rules({name: array for name, array in given.items() if table[name].tiles}))
    for name in given:
        if table[name].written:
            require(_apart(name, given))
    return problem


def needs_hopper(problem: Problem, *pointers: int) -> None:
    """ValueError if wgmma and TMA cannot solve the problem with arrays at these addresses. In the interpreter they can."""
    gpu = None if problem.device is None else device(problem.device)
    if gpu and not hopper(gpu.capability):
        raise ValueError(f"attention.{problem.member}: runs on Hopper; the arrays lie on {gpu}")
    if piece(problem, *pointers) < PIECES[0]:
        strides = {name: x.strides for name, x in problem.forms.items()}
        raise ValueError(
            f"attention.{problem.member}: takes addresses and strides that are multiples of {PIECES[0]} bytes: "
            f"addresses {[hex(pointer) for pointer in pointers]}, {strides=}"
        )


def paired(initial_state: Any, normalize: bool) -> tuple[Any, Any]:
    """(state, z) of what a caller gave to begin with; z is None without `normalize`, and both are where nothing was given."""
    if initial_state is None or (not normalize and not isinstance(initial_state, tuple)):
        return initial_state, None
    if not normalize:
        raise TypeError("initial_state: must be an array, not a pair, which is for normalize=True")
    given = tuple(type(x).__name__ for x in initial_state) if isinstance(initial_state, tuple) else type(initial_state).__name__
    if not isinstance(given, tuple) or len(given) != 2 or "NoneType" in given:
        raise TypeError(f"initial_state: must be a pair (state, z) with normalize=True, not {given}")
    return initial_state


def nothing(stream: int, *addresses: int) -> Callable[[], None]:
    """How a trivial problem is solved (see tiles.plans.Plan)."""
    return lambda: None


@lru_cache(FORMS)
def _problem(member: str, given: tuple[tuple[str, Form], ...], scale: float | None, normalize: bool, layout: str) -> Problem:
    forms, table = dict(given), MEMBERS[member]
    first = given[0][1]
    require(_array_rules(forms, table, layout))
    axes = {name: _axes(table[name], x, layout) or "" for name, x in forms.items()}
    extents: dict[str, int] = {}
    require(_shape_rules(forms, axes, extents))
    require(memory_rules({name: x for name, x in forms.items() if table[name].tiles}))
    require(_stride_rules({name: x for name, x in forms.items() if not table[name].tiles}, axes))
    scale = extents["K"] ** -0.5 if scale is None else scale
    if not abs(scale) <= SCALES[1]:
        raise ValueError(f"scale: must be finite in float32: {scale=}")

    if "out" not in forms:
        axes["out"] = table["out"].choices(layout)[0]
        forms["out"] = c_ordered(tuple(extents[axis] for axis in axes["out"]), first.dtype, first.device)
    canonical = {name: _canonical(x, table[name], axes[name]) for name, x in forms.items()}
    return Problem(
        member=member,
        batch=extents["B"],
        sequences=extents["E"] - 1 if "E" in extents else extents["B"],
        seqlen=extents.get("S", 1),
        heads=extents["H"],
        key_heads=extents["G"],
        key_dim=extents["K"],
        value_dim=extents["V"],
        dtype=first.dtype,
        scale=scale,
        normalize=normalize,
        layout=layout,
        device=first.device,
        out_shape=forms["out"].shape,
        forms=MappingProxyType(canonical),
        strides=reduce(or_, (bits for name, x in canonical.items() if table[name].tiles for bits in x.strides[:-1])),
    )


def _axes(argument: Argument, x: Form, layout: str) -> str | None:
    """The axes of an array, as its caller orders them; None if it has another number of axes than any choice."""
    return next((axes for axes in argument.choices(layout) if len(axes) == len(x.shape)), None)


def _canonical(x: Form, argument: Argument, axes: str) -> Form:
    """The form with its axes in canonical order."""
    order = next([axes.index(axis) for axis in choice] for choice in argument.axes if len(choice) == len(axes))
    row = x.shape[-1] * x.itemsize
    used = [stride if n > 1 and x.extent else row for n, stride in zip(x.shape, x.strides)]
    strides = (*used[:-1], x.strides[-1] if x.shape[-1] > 1 else x.itemsize)
    return form(tuple(x.shape[k] for k in order), tuple(strides[k] for k in order), x.dtype, x.device, x.itemsize)


def _values(forms: Mapping[str, Form], field: str, *names: str) -> str:
    return ", ".join(f"{name}.{field}={getattr(forms[name], field)!r}" for name in names)


def _array_rules(forms: dict[str, Form], table: dict[str, Argument], layout: str) -> Iterator[Rule]:
    """Each array by itself: number of axes, dtype, device."""
    first = next(iter(forms))
    for name, x in forms.items():
        choices = "; or ".join(", ".join(SPOKEN.get(axis, axis) for axis in axes) for axes in table[name].choices(layout))
        rank = f"{name}: must have the axes {choices}: {_values(forms, 'shape', name)}"
        yield _axes(table[name], x, layout) is not None, ValueError, rank
        dtypes = table[name].dtypes
        cure = conversion(x.dtype) if dtypes == DTYPES else ""
        yield x.dtype in dtypes, TypeError, f"{name}: dtype must be one of {dtypes}: {_values(forms, 'dtype', name)}{cure}"
        alike = not table[name].tiles or x.dtype == forms[first].dtype
        yield alike, TypeError, f"{name}: dtype must be {first}'s: {_values(forms, 'dtype', name, first)}"
        elsewhere = f"{name}: must lie where {first} does (None: host memory): {_values(forms, 'device', name, first)}"
        yield x.device == forms[first].device, ValueError, elsewhere


def _shape_rules(forms: dict[str, Form], axes: dict[str, str], extents: dict[str, int]) -> Iterator[Rule]:
    """The arrays together. Fills `extents`: of every axis, as the first array says that has it."""
    holder: dict[str, str] = {}
    for name, x in forms.items():
        for axis, extent in zip(axes[name], x.shape):
            if axis == "N" and axis not in extents:
                axis, extent = ("E", extent + 1) if "E" in extents else ("B", extent)
            other = holder.setdefault(axis, name)
            same = f"{name}: {TITLES.get(axis, 'length')} must equal {other}'s: {_values(forms, 'shape', *{name: 0, other: 0})}"
            yield extents.setdefault(axis, extent) == extent, ValueError, same
    for axis in "KV":
        low, high = COLUMNS
        extent, seen = extents[axis], _values(forms, "shape", holder[axis])
        valid = extent % low == 0 and low <= extent <= high
        limits = f"{holder[axis]}: {TITLES[axis]} must be a multiple of {low}, from {low} to {high}: {extent}, {seen}"
        yield valid, ValueError, limits
    both = _values(forms, "shape", holder["H"], holder["G"])
    yield extents["G"] > 0, ValueError, f"{holder['G']}: must have at least one head: {_values(forms, 'shape', holder['G'])}"
    divides = extents["H"] % extents["G"] == 0
    yield divides, ValueError, f"{holder['H']}: heads must be a multiple of {holder['G']}'s: {both}"
    if "S" in extents:
        long = f"{holder['S']}: sequence must be shorter than 2**31: {_values(forms, 'shape', holder['S'])}"
        yield extents["S"] < 2**31, ValueError, long
    if "E" in extents:
        ends = _values(forms, "shape", "cu_seqlens", holder["B"])
        yield (
            extents["E"] > 1,
            ValueError,
            f"cu_seqlens: must have two elements or more: {_values(forms, 'shape', 'cu_seqlens')}",
        )
        yield extents["B"] == 1, ValueError, f"cu_seqlens: batch must be 1, all sequences one behind the other: {ends}"


def _stride_rules(forms: dict[str, Form], axes: dict[str, str]) -> Iterator[Rule]:
    """Arrays that are read element by element. A decay per channel is as large as the keys."""
    for name, x in forms.items():
        seen = f"{name}.strides={x.strides} bytes, {name}.shape={x.shape}"
        adjacent = not (name == "decay" and "K" in axes[name] and x.extent) or x.strides[-1] == x.itemsize
        yield adjacent, ValueError, f"{name}: last axis must be contiguous: {seen}"
        forward = all(0 <= stride < STRIDE_END for stride, n in zip(x.strides, x.shape) if n > 1)
        yield forward, ValueError, f"{name}: strides must not be negative, and below 2**40 bytes: {seen}"


def _apart(name: str, given: Mapping[str, Array]) -> Iterator[Rule]:
    """What is written lies apart from all else."""
    written = given[name]
    yield not written.readonly, ValueError, f"{name}: must be writable, and this {type(written.owner).__name__} is read-only"
    seen = f"{name}.strides={written.strides} bytes, {name}.shape={written.shape}"
    yield not overlaps_itself(written.form), ValueError, f"{name}: its elements must not overlap each other: {seen}"
    for other, array in given.items():
        if other != name:
            shapes = f"{name}.shape={written.shape}, {other}.shape={array.shape}"
            where = f"{name} at {written.pointer:#x}, {other} at {array.pointer:#x}, {shapes}"
            yield not overlaps(written, array), ValueError, f"{name}: must not overlap {other}: {where}"
