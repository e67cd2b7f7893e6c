"""Classes of lengths: definitions are planned once for a class of numbers of rows, of batches and of keys, not for each number.

    rows              1    2..16   17..32   33..64   65..128   129..256   ...
    representative    1    16      32       64       128       256        ...

Plans are searched, compared and generated for the representative of a class. A launch reads a call's lengths from its arrays,
and the tiles of a product of many rows are chosen for the length itself (`schedule_at` of a kernel). So a plan is found once
for each class, and calls of most classes share their kernels.

`axis_roles` decides which axes have classes of lengths; the length of any other axis is exact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tiles.launching.lengths import Length, watched_call

from ..language import graph
from ..language.axes import Axis, base_axes
from ..language.graph import is_index, softmax_of
from ..language.terms import Term
from ..language.trace import Shape, TracedDefinition

MAX_TILE_ROWS = 128  # rows of the largest tile
MIN_TILE_ROWS = 16  # rows of the smallest tile, so all numbers of rows up to it are one class
ROWS, BATCH, KEY_AXIS, SPLIT_KEY_AXIS, EXACT = "rows", "batch", "keys", "parts", ""  # roles of axes: kinds of classes
KEY_AXES = KEY_AXIS, SPLIT_KEY_AXIS
MAX_KEY_SPLITS, MIN_SPLIT_KEYS = (
    128,
    512,
)  # the most splits of the keys, and the fewest keys of one (templates/split_kv_attention.py)


def representative(n: int, role: str) -> int:
    """The length that stands for the class of a length n of an axis with this role. A length of SPLIT_KEY_AXIS can be cut into
    as many equal parts as n can."""
    if n < 2 or role == EXACT:
        return n
    largest = max(1 << (n - 1).bit_length(), MIN_TILE_ROWS if role != BATCH else 1)
    lowest_bit = n & -n
    return largest - lowest_bit if role == SPLIT_KEY_AXIS and n > MIN_SPLIT_KEYS and lowest_bit < MAX_KEY_SPLITS else largest


def reads_rounded_length(traced: TracedDefinition, roles: Sequence[Sequence[str]]) -> bool:
    """Does the definition, traced for representatives, read the extent of an axis with a role? Then what it computes may differ
    within the class."""
    read = {axis.root for axis in traced.table.extents_read if axis is not None}
    inputs = zip((x for _, x in traced.inputs), roles)
    return any(one and axis is not None and axis.root in read for x, role in inputs for axis, one in zip(x.axes, role))


def last_alike_rows(rows: int) -> int:
    """The greatest number of rows that has the same tiles as this one: the last of its tile, or of its class if that is
    less."""
    return min(representative(rows, ROWS), -(-rows // MAX_TILE_ROWS) * MAX_TILE_ROWS)


def axis_roles(traced: TracedDefinition) -> tuple[tuple[str, ...], ...]:
    """The role of each axis of each argument, as it lies in memory: the kind of its class of lengths, or EXACT.

    The extent of an axis is exact if it is the columns of an argument, of a result or of an intermediate; if the axis is made
    of others; if an index chooses from it; or if the definition reads its extent. The keys of an attention are columns of its
    scores only."""
    nodes = list(graph.walk(*traced.roots))
    scores = dict[Axis, set[Term]]()
    for x in nodes:
        if x.operation == "matmul" and softmax_of(x.args[0]) is not None and (keys := x.args[0].axes[-1]) is not None:
            scores.setdefault(keys.root, set()).update(graph.walk(x.args[0]))
    exact: set[Axis | None] = {axis for axis, _ in graph.indices(traced.roots).values()} | traced.table.extents_read
    exact |= {x.attr[0] for x in nodes if x.operation == "length"}
    for x in dict.fromkeys([*nodes, *(x for _, x in traced.inputs)]):
        if not x.ndim or is_index(x) or x.axes[-1] is None or (x.operation == "transpose" and x not in traced.roots):
            continue
        axis = x.axes[-1].root
        if x.operation == "input" or x in traced.roots or x not in scores.get(axis, ()):
            exact.add(axis)
    exact_axes = {axis.root for axis in exact if axis is not None}
    derived = {axis.root for x in nodes for axis in x.axes if axis is not None and _is_derived(axis.root)}
    exact_axes |= derived | {*base_axes(derived)}

    roles = dict[Axis, str]()
    for _, x in traced.inputs:
        for place, one in enumerate(x.axes):
            if one is not None and one.root not in exact_axes:
                role = KEY_AXIS if one.root in scores else BATCH if place < x.ndim - 2 else ROWS
                roles[one.root] = role if role != BATCH else roles.get(one.root, role)
    return tuple([tuple([EXACT if axis is None else roles.get(axis.root, EXACT) for axis in x.axes]) for _, x in traced.inputs])


def _is_derived(axis: Axis) -> bool:
    """Is the axis a product of others, or has it a half or a double?"""
    return bool(axis.factors) or axis.half is not None or axis.doubled is not None


def round_lengths(shapes: Sequence[Shape], roles: Sequence[Sequence[str]]) -> tuple[tuple[Shape, ...], list[Any]]:
    """(the shapes with 0 in place of each length that has a class, the representatives of these lengths in order). Watched
    lengths of a call stay watched among the latter."""
    known, representatives = [], []
    for s, role in zip(shapes, roles):
        inside = []
        for n, one in zip(s.in_memory, role):
            if one:
                representatives.append(watched_call(representative, n, one))
            inside.append(0 if one else int(n))
        extents = tuple(inside)
        known.append(s._replace(extents=extents[::-1] if s.transposed else extents))
    return tuple(known), representatives


def fill_lengths(shapes: Sequence[Shape], roles: Sequence[Sequence[str]], representatives: Iterable[int]) -> tuple[Shape, ...]:
    """The shapes with these representatives in the places that `round_lengths` set to 0."""
    remaining, result = iter(representatives), []
    for s, role in zip(shapes, roles):
        extents = tuple([next(remaining) if one else n for n, one in zip(s.in_memory, role)])
        result.append(s._replace(extents=extents[::-1] if s.transposed else extents))
    return tuple(result)


def known_extents(traced: TracedDefinition, shapes: Sequence[Shape]) -> dict[Axis, Any]:
    """{axis: extent} of the arguments' axes. shapes: those of the arguments; their lengths may be watched."""
    inputs = zip((x for _, x in traced.inputs), shapes)
    return {axis.root: n for x, s in inputs for axis, n in zip(x.axes, s.in_memory) if axis is not None}


def fixed_value(x: Any) -> Any:
    """The value that was computed from watched lengths, fixed for this call and all others that get the same."""
    return x.fix() if isinstance(x, Length) else x
