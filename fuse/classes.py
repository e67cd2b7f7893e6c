"""Classes of lengths: what a definition is planned for, in place of the numbers of rows, of batches and of keys of a call.

    rows       1    2..16   17..32   33..64   65..128   129..256   ...
    stands as  1    16      32       64       128       256        ...

Ways are searched, compared and written down for the length that stands for a class. A launch reads the lengths of a call from
its arrays, and how a product is cut into tiles follows from these, too (see `fitted` in candidates.py). So a way is
found once for each class, and calls of most classes share their kernels.

The length of an axis stands for others only where nothing else is known of it: see `lengths`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiles.lengths import Length, made

from . import graph
from .axes import Axis, base_axes, extent
from .graph import is_index, softmax_of
from .terms import Term
from .trace import Shape, TracedDefinition

TALL = 128  # rows of the tallest tile
FEWEST = 16  # rows, from which on their number counts: no tile has fewer
ROWS, BATCH, KEY_AXIS, SPLIT_KEY_AXIS, EXACT = "rows", "batch", "keys", "parts", ""  # how the length of an axis is taken
KEY_AXES = KEY_AXIS, SPLIT_KEY_AXIS
PARTS_OF_KEYS, KEYS = 128, 512  # the most equal parts that keys are cut into, and the fewest of one (attention_of_parts.py)


def representative(n: int, role: str) -> int:
    """The length that stands for a length n. Of keys in parts it can be cut into as many equal parts as n can."""
    if n < 2 or role == EXACT:
        return n
    most = max(1 << (n - 1).bit_length(), FEWEST if role != BATCH else 1)
    least = n & -n
    return most - least if role == SPLIT_KEY_AXIS and n > KEYS and least < PARTS_OF_KEYS else most


def reads_rounded_length(found: TracedDefinition, roles: Sequence[Sequence[str]]) -> bool:
    """Does the definition, run for lengths that stand for others, read one of these? What it reads may depend on others."""
    asked = {axis.root for axis in found.table.asked if axis is not None}
    inputs = zip((x for _, x in found.inputs), roles)
    return any(one and axis is not None and axis.root in asked for x, role in inputs for axis, one in zip(x.axes, role))


def last_alike_rows(rows: int) -> int:
    """The greatest number of rows that is cut as this one: the last of its tile, or of its class if that is less."""
    return min(representative(rows, ROWS), -(-rows // TALL) * TALL)


def axis_roles(found: TracedDefinition) -> tuple[tuple[str, ...], ...]:
    """How the lengths of each argument's axes are taken, as it lies in memory: for how many others they stand.

    An axis along which arguments or results have their columns, or what is computed on the way, is taken exactly, and so are
    one that is made of others, one that an index chooses from, and one whose length the definition asks for. The keys of an
    attention are columns of its scores alone."""
    every = list(graph.walk(*found.roots))
    scores = dict[Axis, set[Term]]()
    for x in every:
        if x.operation == "matmul" and softmax_of(x.args[0]) is not None and (keys := x.args[0].axes[-1]) is not None:
            scores.setdefault(keys.root, set()).update(graph.walk(x.args[0]))
    exact: set[Axis | None] = {axis for axis, _ in graph.indices(found.roots).values()} | found.table.asked
    exact |= {x.attr[0] for x in every if x.operation == "length"}
    for x in dict.fromkeys([*every, *(x for _, x in found.inputs)]):
        if not x.ndim or is_index(x) or x.axes[-1] is None or (x.operation == "transpose" and x not in found.roots):
            continue
        axis = x.axes[-1].root
        if x.operation == "input" or x in found.roots or x not in scores.get(axis, ()):
            exact.add(axis)
    taken = {axis.root for axis in exact if axis is not None}
    made_of_others = {axis.root for x in every for axis in x.axes if axis is not None and _is_derived(axis.root)}
    taken |= made_of_others | {*base_axes(made_of_others)}

    roles = dict[Axis, str]()
    for _, x in found.inputs:
        for place, one in enumerate(x.axes):
            if one is not None and one.root not in taken:
                role = KEY_AXIS if one.root in scores else BATCH if place < x.ndim - 2 else ROWS
                roles[one.root] = role if role != BATCH else roles.get(one.root, role)
    return tuple([tuple([EXACT if axis is None else roles.get(axis.root, EXACT) for axis in x.axes]) for _, x in found.inputs])


def _is_derived(axis: Axis) -> bool:
    """Is the axis made of others, or another of it?"""
    return bool(axis.factors) or axis.half is not None or axis.doubled is not None


def round_lengths(shapes: Sequence[Shape], roles: Sequence[Sequence[str]]) -> tuple[tuple[Shape, ...], list[Any]]:
    """(the shapes with 0 for each length that stands for others, what stands for these, one after the other). Lengths of a
    call that is watched stay such in the latter."""
    known, stand = [], []
    for s, role in zip(shapes, roles):
        inside = []
        for n, one in zip(s.in_memory, role):
            if one:
                stand.append(made(representative, n, one))
            inside.append(0 if one else int(n))
        extents = tuple(inside)
        known.append(s._replace(extents=extents[::-1] if s.transposed else extents))
    return tuple(known), stand


def fill_lengths(shapes: Sequence[Shape], roles: Sequence[Sequence[str]], stand: Iterable[int]) -> tuple[Shape, ...]:
    """The shapes with these lengths in the places of those that `rounded` took out."""
    left, found = iter(stand), []
    for s, role in zip(shapes, roles):
        extents = tuple([next(left) if one else n for n, one in zip(s.in_memory, role)])
        found.append(s._replace(extents=extents[::-1] if s.transposed else extents))
    return tuple(found)


def known_extents(found: TracedDefinition, shapes: Sequence[Shape]) -> dict[Axis, Any]:
    """The extents of the arguments' axes. shapes: of the arguments, of lengths of a call that is watched or not."""
    inputs = zip((x for _, x in found.inputs), shapes)
    return {axis.root: n for x, s in inputs for axis, n in zip(x.axes, s.in_memory) if axis is not None}


def extents_at(x: Term, known: Mapping[Axis, Any]) -> tuple[Any, ...]:
    """The extents of a term for arguments of these lengths. Those that do not follow from lengths stay."""

    def at(axis: Axis | None, n: int) -> Any:
        if axis is None:
            return n
        try:
            return known[axis.root] if axis.root in known else extent(axis, known)
        except KeyError:
            return n

    return tuple(map(at, x.axes, x.extents))


def fixed_value(x: Any) -> Any:
    """What was made from lengths, for this call and all that have the same."""
    return x.fixed() if isinstance(x, Length) else x
