"""Parts of register tiles, and tiles put together from them. No instruction: a part's registers are some of the whole's, in
another order."""

from dataclasses import replace

import numpy as np

from tiles.op import lowers, op
from tiles.types import rt


@op(takes_operands=True)
def columns(tile, count, index):
    """tile[:, index * count : (index + 1) * count], as a register tile: the `index`-th part of `count` columns.

    Both are known when the kernel is compiled: `count`, a multiple of 16 (of fp8 in row layout 32) that divides the columns,
    and `index`, from 0."""
    return tile.array[:, index * count : (index + 1) * count]


@op(takes_operands=True)
def rows(tile, count, index):
    """tile[index * count : (index + 1) * count, :], as a register tile: the `index`-th part of `count` rows.

    Both are known when the kernel is compiled: `count`, a multiple of 16 (of fp8 in column layout 32) that divides the rows,
    and `index`, from 0."""
    return tile.array[index * count : (index + 1) * count]


@op(takes_operands=True)
def hstack(left, right):
    """[left, right]: the columns of one tile, then those of the other. Of as many rows, one dtype and layout."""
    return np.concatenate([left.array, right.array], axis=1)


@op(takes_operands=True)
def vstack(upper, lower):
    """The rows of one tile above those of the other. Of as many columns, one dtype and layout."""
    return np.concatenate([upper.array, lower.array], axis=0)


def _places(spec, registers):
    """Where in the tile the first element of each of lane 0's registers lies."""
    return [spec.element(0, k * spec.elements // registers) for k in range(registers)]


def _moved(place, axis, by):
    return tuple(x + by * (k == axis) for k, x in enumerate(place))


def _part(face, axis):
    """The rule of a part along an axis."""
    name = face.__name__

    def rule(tile, count: int, index: int):
        if not isinstance(tile, rt):
            raise TypeError(f"{name}: takes a register tile, got {tile}")
        extent, base = tile.shape[axis], 8 * tile.dtype.run if axis == (tile.layout == "row") else 16
        if count < base or count % base or extent % count or not 0 <= index < extent // count:
            raise TypeError(
                f"{name}: count must be a multiple of {base} that divides {extent}, and index one of those parts, "
                f"got {count} and {index}"
            )
        out = replace(tile, rows=count) if axis == 0 else replace(tile, cols=count)

        def emit(b, value, *_):
            registers = b.unpack(value)
            whole = dict(zip(_places(tile, len(registers)), registers, strict=True))
            wanted = _places(out, len(registers) * out.elements // tile.elements)
            return b.pack([whole[_moved(place, axis, index * count)] for place in wanted])

        return out, emit

    return rule


def _stack(face, axis):
    """The rule of a concatenation along an axis."""

    def rule(first, second):
        alike = isinstance(first, rt) and isinstance(second, rt) and first.dtype is second.dtype
        if not (alike and first.layout == second.layout and first.shape[1 - axis] == second.shape[1 - axis]):
            same = "rows" if axis else "columns"
            raise TypeError(
                f"{face.__name__}: takes two register tiles of as many {same}, one dtype and layout, got {first} and {second}"
            )
        shape = [m + n * (k == axis) for k, (m, n) in enumerate(zip(first.shape, second.shape))]
        out = replace(first, rows=shape[0], cols=shape[1])

        def emit(b, *values):
            found = {}
            for tile, value, by in zip((first, second), values, (0, first.shape[axis]), strict=True):
                registers = b.unpack(value)
                found |= {_moved(p, axis, by): r for p, r in zip(_places(tile, len(registers)), registers, strict=True)}
            return b.pack([found[place] for place in _places(out, len(found))])

        return out, emit

    return rule


for _axis, _faces in enumerate([(rows, vstack), (columns, hstack)]):
    lowers(_faces[0])(_part(_faces[0], _axis))
    lowers(_faces[1])(_stack(_faces[1], _axis))
