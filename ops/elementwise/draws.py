"""Random draws that follow from the place of an element: see tiles/philox.py."""

import numpy as np

from tiles.compiling import ptx
from tiles.compiling.builder import f32, i32, i64
from tiles.dtypes import fp32
from tiles.interpreter import current_warp
from tiles.layout import QUAD
from tiles.op import integer, lowers, op
from tiles.philox import HALF, MULTIPLIERS, ROUNDS, STEPS, TILE, WORD, halves
from tiles.types import rt

from .convert import HIGH, LOW, halves_of
from .create import lane_first


@op
def bernoulli(shape, threshold, low, high, batch, head, row, col):
    """A tile of type `shape`, of either layout, of independent draws: 1 with probability threshold / 65536, else 0. A draw
    depends on its position and on a seed only. Element (0, 0) is at (batch, head, row, col), row and col multiples of 16; the
    seed has 64 bits, a low and a high half. So a draw is the same in any tile, and in NumPy (tiles.philox.halves below
    threshold). threshold: 0 to 65535."""
    if row % TILE or col % TILE:
        raise current_warp().hazard(f"bernoulli: row and col must be multiples of {TILE}: {row=}, {col=}")
    rows, cols = (np.arange(n, dtype=np.int64) for n in shape.shape)
    seed = int(low) & WORD | (int(high) & WORD) << 32
    return halves(seed, int(batch), int(head), int(row) + rows[:, None], int(col) + cols) < threshold


UNORDERED = np.arange(32).reshape(QUAD, QUAD, 2).swapaxes(0, 1).ravel()  # of 32 columns of 16 bits, by those of a tile


@op
def bernoulli_of_row(shape, threshold, low, high, batch, head, row, col, step, unordered=False):
    """The draws of `bernoulli` for one row that is cut into parts of `step` columns, one below the other: element (i, j) of the
    tile is at (batch, head, row, col + i step + j). col and step are multiples of 16.

    unordered: columns are in the order in which load_unordered gives those of arrays of 16 bits; they are a multiple of 32."""
    if col % TILE or step % TILE:
        raise current_warp().hazard(f"bernoulli_of_row: col and step must be multiples of {TILE}: {col=}, {step=}")
    parts, cols = (np.arange(n, dtype=np.int64) for n in shape.shape)
    cols = cols // 32 * 32 + UNORDERED[cols % 32] if unordered else cols
    seed = int(low) & WORD | (int(high) & WORD) << 32
    return halves(seed, int(batch), int(head), int(row), int(col) + int(step) * parts[:, None] + cols) < threshold


def _wide(b, factor, x):
    """(high, low) word of a product."""
    product = b.mul(b.zext(x, i64), i64(factor))
    return b.trunc(b.lshr(product, i64(32)), i32), b.trunc(product, i32)


def philox4x32(b, counter, keys):
    """The four words of a counter; keys: of each round."""
    x, y, z, w = counter
    for first, second in keys:
        (high, low), (its_high, its_low) = _wide(b, MULTIPLIERS[0], x), _wide(b, MULTIPLIERS[1], z)
        x, y, z, w = b.xor(b.xor(its_high, y), first), its_low, b.xor(b.xor(high, w), second), low
    return x, y, z, w


def _exchanged(b, odd, words):
    """For a lane of a column layout, which has one column of two neighbours and both of two neighbouring rows, what row layout
    gives a lane the other way round: (of even rows, of odd ones) a word for each 8 columns, the lower half of which is for the
    first 8 rows and the upper one for the next. odd: is the lane's column? If so `words` are those of the odd row, else of the
    even one; the lane of the neighbouring column has the others."""
    is_odd = b.icmp_unsigned("!=", odd, b.u32(0))
    local_half, remote_half = (b.select(is_odd, b.u32(x), b.u32(y)) for x, y in ((HIGH, LOW), (LOW, HIGH)))
    lane_words = [halves_of(b, *words[n : n + 2], local_half) for n in (0, 2)]
    remote_words = [ptx.shuffle_xor(b, halves_of(b, *words[n : n + 2], remote_half), QUAD) for n in (0, 2)]
    even = [b.select(is_odd, y, x) for x, y in zip(lane_words, remote_words)]
    return even, [b.select(is_odd, x, y) for x, y in zip(lane_words, remote_words)]


def _check(name, shape, integers, layouts, columns=1):
    if not (isinstance(shape, rt) and shape.layout in layouts and shape.dtype is fp32):
        expected = "an fp32 register tile type" + " in row layout" * (len(layouts) == 1)
        raise TypeError(f"{name}: shape must be {expected}, such as rt(16, 64, fp32), got {shape}")
    if not all(map(integer, integers)):
        raise TypeError(f"{name}: takes integers, got {', '.join(map(str, integers))}")
    if shape.cols % columns:
        raise TypeError(f"{name}: what is unordered has a multiple of {columns} columns, got {shape}")


def _keys(b, low, high):
    """The two Philox keys of each round."""
    return [[b.add(k, b.u32(n * step & WORD)) for k, step in zip((low, high), STEPS)] for n in range(ROUNDS)]


def _drawn(b, word, upper, bound):
    """1 or 0, by the upper half of a word or the lower one; lower bits do not count."""
    draw = word if upper else b.shl(word, b.u32(16))
    return b.select(b.icmp_unsigned("<", draw, bound), f32(1.0), f32(0.0))


@lowers(bernoulli)
def _(shape: type, threshold, low, high, batch, head, row, col):
    _check("bernoulli", shape, (threshold, low, high, batch, head, row, col), ("row", "col"))

    def lower(b, _, *values):
        is_row_layout = shape.layout == "row"
        threshold, low, high, batch, head, row, col = map(b.u32, values)
        keys = _keys(b, low, high)
        first = b.add(b.lshr(row, b.u32(1)), lane_first(b, shape, 0))  # of each 16 rows 8 counters, of 16 columns 4
        across = b.add(b.lshr(col, b.u32(2)), b.lshr(lane_first(b, shape, 1), b.u32(1)))
        odd = b.and_(lane_first(b, shape, 1), b.u32(1))
        if not is_row_layout:
            first = b.add(first, odd)
        bound = b.shl(threshold, b.u32(16))
        words: dict = {}
        out = []
        for k in range(shape.elements):
            i, j = shape.element(0, k)
            place = i // TILE, j // TILE
            if place not in words:
                counter = b.add(first, b.u32(place[0] * HALF)), b.add(across, b.u32(place[1] * HALF // 2)), head, batch
                drawn = philox4x32(b, counter, keys)
                words[place] = drawn if is_row_layout else _exchanged(b, odd, drawn)
            if is_row_layout:
                out.append(_drawn(b, words[place][i % TILE // HALF + j % TILE // HALF * 2], j % 2, bound))
            else:
                out.append(_drawn(b, words[place][i % 2][j % TILE // HALF], i % TILE // HALF, bound))
        return b.from_elements(shape, out)

    return shape, lower


@lowers(bernoulli_of_row)
def _(shape: type, threshold, low, high, batch, head, row, col, step, unordered: int):
    _check("bernoulli_of_row", shape, (threshold, low, high, batch, head, row, col, step), ("row",), 32 if unordered else 1)

    def lower(b, _, *values):
        threshold, low, high, batch, head, row, col, step = map(b.u32, values[:8])
        keys, bound = _keys(b, low, high), b.shl(threshold, b.u32(16))
        eighth = b.add(b.mul(b.lshr(row, b.u32(4)), b.u32(HALF)), b.and_(row, b.u32(HALF - 1)))
        lower_half = b.icmp_unsigned("!=", b.and_(row, b.u32(HALF)), b.u32(0))  # of 16 rows: a call serves both
        step, across = b.lshr(step, b.u32(2)), b.add(b.lshr(col, b.u32(2)), b.lshr(lane_first(b, shape, 1), b.u32(1)))
        part, words, out = lane_first(b, shape, 0), dict[tuple[int, int], list](), []
        if unordered:
            in_quad = b.and_(b.lane(), b.u32(QUAD - 1))
            odd = b.icmp_unsigned("!=", b.and_(in_quad, b.u32(1)), b.u32(0))

            def side_by_side(i, group):
                """A word for each two of eight columns side by side. Two lanes have sixteen of them: each makes two calls of
                the four, and sends the other what is the other's."""
                along = b.add(b.lshr(col, b.u32(2)), b.mul(b.add(part, b.u32(i)), step))
                along = b.add(along, b.add(b.u32(HALF * group), b.mul(in_quad, b.u32(2))))  # two calls for each lane
                lane_values, received = [], []
                for call in (0, 1):
                    four = philox4x32(b, (eighth, b.add(along, b.u32(call)), head, batch), keys)
                    left, right = (b.select(lower_half, four[n + 1], four[n]) for n in (0, 2))
                    lane_values.append(b.select(odd, right, left))
                    received.append(ptx.shuffle_xor(b, b.select(odd, left, right), 1))
                return [b.select(odd, y, x) for x, y in zip(lane_values, received)] + [
                    b.select(odd, x, y) for x, y in zip(lane_values, received)
                ]

        for k in range(shape.elements):
            i, j = shape.element(0, k)
            if unordered:
                place = i, j // 32
                if place not in words:
                    words[place] = side_by_side(*place)
                out.append(_drawn(b, words[place][j % 32 // HALF], j % 2, bound))
                continue
            place = i, j // TILE
            if place not in words:
                along = b.add(across, b.mul(b.add(part, b.u32(i)), step))
                four = philox4x32(b, (eighth, b.add(along, b.u32(place[1] * HALF // 2)), head, batch), keys)
                words[place] = [b.select(lower_half, four[n + 1], four[n]) for n in (0, 2)]
            out.append(_drawn(b, words[place][j % TILE // HALF], j % 2, bound))
        return b.from_elements(shape, out)

    return shape, lower
