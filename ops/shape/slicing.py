"""Parts of register tiles and vectors, and tiles and vectors put together from parts. It takes no instruction: the registers of
a part are some of the whole's, in another order."""

from dataclasses import replace

import numpy as np

from tiles.op import lowers, op
from tiles.types import rt, rv

ALONG = "col_vec", "row_vec"  # the vectors that lie along axis 0, along axis 1


@op(takes_operands=True)
def columns(tile, count, index):
    """tile[:, index * count : (index + 1) * count]: the `index`-th part of `count` columns of a register tile or row_vec.

    Both are known at compile time: `count`, a multiple of 16 (for fp8 in row layout 32) that divides the columns, and
    `index`, from 0."""
    return tile.array[:, index * count : (index + 1) * count]


@op(takes_operands=True)
def rows(tile, count, index):
    """tile[index * count : (index + 1) * count, :]: the `index`-th part of `count` rows of a register tile or col_vec.

    Both are known at compile time: `count`, a multiple of 16 (for fp8 in column layout 32) that divides the rows, and
    `index`, from 0."""
    return tile.array[index * count : (index + 1) * count]


@op(takes_operands=True)
def hstack(left, right):
    """[left, right]: the columns of one tile, then those of the other; as many rows, the same dtype and layout. Or row_vecs."""
    return np.concatenate([left.array, right.array], axis=1)


@op(takes_operands=True)
def vstack(upper, lower):
    """The rows of one tile above those of the other; as many columns, the same dtype and layout. Or col_vecs."""
    return np.concatenate([upper.array, lower.array], axis=0)


def register_coordinates(spec, registers):
    """Where in the tile the first element of each of lane 0's registers lies."""
    coordinates = [spec.element(0, k * spec.elements // registers) for k in range(registers)]
    return coordinates if isinstance(spec, rt) else [(x, 0) if spec.axis == "col_vec" else (0, x) for x in coordinates]


def _lies_along(spec, axis):
    return isinstance(spec, rt) or (isinstance(spec, rv) and spec.axis == ALONG[axis])


def _resized(spec, axis, extent):
    """The type of a tile or vector like this one, of another extent along the axis."""
    return replace(spec, **{"length" if isinstance(spec, rv) else ("rows", "cols")[axis]: extent})


def _shift(at, axis, offset):
    return tuple(x + offset * (k == axis) for k, x in enumerate(at))


def _part(op_function, axis):
    """The rule of a part along an axis."""
    name = op_function.__name__

    def rule(tile, count: int, index: int):
        if not _lies_along(tile, axis):
            raise TypeError(f"{name}: takes a register tile or a {ALONG[axis]}, got {tile}")
        in_runs = isinstance(tile, rt) and axis == (tile.layout == "row")
        extent, base = tile.shape[axis], 8 * tile.dtype.run if in_runs else 16
        if count < base or count % base or extent % count or not 0 <= index < extent // count:
            raise TypeError(
                f"{name}: count must be a multiple of {base} that divides {extent}, and index one of those parts, "
                f"got {count} and {index}"
            )
        out = _resized(tile, axis, count)

        def emit(b, value, *_):
            registers = b.unpack(value)
            registers_at = dict(zip(register_coordinates(tile, len(registers)), registers, strict=True))
            coordinates = register_coordinates(out, len(registers) * out.elements // tile.elements)
            return b.pack([registers_at[_shift(at, axis, index * count)] for at in coordinates])

        return out, emit

    return rule


def _stack(op_function, axis):
    """The rule of a concatenation along an axis."""

    def rule(first, second):
        extents = [spec.shape[axis] for spec in (first, second) if _lies_along(spec, axis)]
        if len(extents) < 2 or _resized(first, axis, extents[1]) != second:
            requirement = f"of as many {'rows' if axis else 'columns'}, one dtype and layout"
            takes = f"takes two register tiles {requirement}, or two such {ALONG[axis]}s"
            raise TypeError(f"{op_function.__name__}: {takes}, got {first} and {second}")
        out = _resized(first, axis, sum(extents))

        def emit(b, *values):
            registers_at = {}
            for tile, value, offset in zip((first, second), values, (0, first.shape[axis]), strict=True):
                registers = b.unpack(value)
                registers_at |= {
                    _shift(p, axis, offset): r
                    for p, r in zip(register_coordinates(tile, len(registers)), registers, strict=True)
                }
            return b.pack([registers_at[at] for at in register_coordinates(out, len(registers_at))])

        return out, emit

    return rule


for _axis, _op_functions in enumerate([(rows, vstack), (columns, hstack)]):
    lowers(_op_functions[0])(_part(_op_functions[0], _axis))
    lowers(_op_functions[1])(_stack(_op_functions[1], _axis))
