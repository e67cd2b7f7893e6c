"""Register tiles to and from global arrays, by accesses of 16 bytes a lane; if a kernel promises less, of 4 or twice 2.

Unless the kernel promises it, only the run shows whether an array can be accessed 16 bytes at a time. So the warp checks, in
some ten instructions, and otherwise moves the tile word by word, in a loop of four rounds: in each round a lane moves one of
the four words of each of its accesses, element by element. So the code is short, and as many loads are in flight as there are
accesses.

No lane of an accumulator holds 16 bytes of a row side by side: the lanes of a quad exchange words first (quad_exchange.py).
"""

import itertools
from dataclasses import dataclass, replace

from tiles.compiling import ptx
from tiles.compiling.builder import BuilderValue, f32, i32, i64, struct
from tiles.compiling.numba_types import SCALARS
from tiles.dtypes import bf16
from tiles.types import rt, rv

from . import lines
from .global_elements import GUARD, LOAD, STORE, visible_range, widen_indices
from .quad_exchange import (
    ELEMENT,
    EXCHANGES,
    HALF,
    NARROW,
    PROMISED,
    QUAD,
    WIDE,
    Row,
    access_bytes,
    as_stored,
    coordinates_of,
    exchange_for,
    words_of,
)
from .shared_tiles import joined


def suits(array, spec, rows, cols):
    """Do the types allow accesses of 16 bytes between this array and tiles or vectors of type `spec`? Vectors must run along
    the array's last axis, and the rows of tiles along an earlier axis than their columns."""
    size, rows, cols = SCALARS[array.dtype].itemsize, rows % array.ndim, cols % array.ndim
    if array.layout == "F" and array.ndim > 1:
        return False
    if isinstance(spec, rv):
        along = spec.axis == "row_vec" and not spec.by_quad and cols == array.ndim - 1
        return along and size > 1 and spec.length % EXCHANGES[size][0].columns == 0
    return spec.layout == "row" and rows < cols and (spec.dtype.itemsize == 1) == (size == 1)


def check(name, array, spec, aligned, is_load=False):
    """TypeError if the kernel cannot promise `aligned` for tiles of type `spec` and this array. is_load: the access is a load,
    which takes vectors, too, and no promise of less than 16 bytes."""
    size = SCALARS[array.dtype].itemsize
    if aligned not in (False, True) and (is_load or aligned not in PROMISED or size != 2):
        kinds = ", ".join(map(str, PROMISED))
        raise TypeError(f"{name}: aligned must be True, or for stores to bf16 and fp16 arrays one of {kinds}, got {aligned}")
    if is_load and isinstance(spec, rv):
        return
    if isinstance(spec, rt) and spec.layout == "line":
        return lines.check(name, array, spec, aligned)
    if not (isinstance(spec, rt) and spec.layout == "row" and (spec.dtype.itemsize == 1) == (size == 1)):
        raise TypeError(f"{name}: aligned accesses take tiles in row layout, of fp8 if the array is, got {spec}, {array}")


def misaligned(array, spec, at, cols, aligned=True):
    """How a NumPy array breaks the promise `aligned`, for a tile or a vector at this index; None if it keeps it."""
    access = lines.BYTES[-1] if spec.layout == "line" else access_bytes(aligned)
    if isinstance(spec, rv):
        adjacent = array.strides[cols] == array.itemsize
        return None if adjacent else f"the elements of the array (strides {array.strides}) are not adjacent along axis {cols}"
    steps = [stride for axis, stride in enumerate(array.strides) if axis != cols % array.ndim and array.shape[axis] > 1]
    if array.strides[cols] != array.itemsize or any(stride % access for stride in steps) or array.ctypes.data % access:
        return f"the array (strides {array.strides}, address {array.ctypes.data:#x}) is not aligned to {access} bytes"
    if spec.layout == "line" and min(steps, default=0) < 0:
        return f"rows of the array (strides {array.strides}) do not lie each behind the one before"
    columns = max(access // array.itemsize, 2)
    if at[cols] % columns or array.shape[cols] % columns:
        return f"columns from {at[cols]} of {array.shape[cols]} are not multiples of {columns}"
    return None


def _recomputed_address(b, address):
    """An address, shuffled from this lane to itself. The compiler takes it for a new one, and so does not keep in registers
    what it computed from the old one."""
    low = ptx.shuffle(b, b.trunc(address, i32), b.lane())
    return b.or_(b.shl(b.lshr(address, i64(32)), i64(32)), b.zext(low, i64))


@dataclass(frozen=True)
class _LanePosition:
    """The position of a lane's part of a tile. `start`: the address of its first access; `line`, `column`: the strides of rows
    and columns; `down`, `across`: its first row and column, inside the array if below `height` and `width`, unsigned, of 32
    bits; `is_wide`: a bit, whether the warp can move 16 bytes at a time; None if the kernel promises that it can."""

    start: BuilderValue
    line: BuilderValue
    column: BuilderValue
    down: BuilderValue
    across: BuilderValue
    height: BuilderValue
    width: BuilderValue
    is_wide: BuilderValue | None = None

    def shifted_by(self, b, down, across):
        """The position this many rows further down and columns further right."""
        start = _address(b, self.start, [b.zext(down, i64), b.zext(across, i64)], [self.line, self.column])
        return replace(self, start=start, down=b.add(self.down, down), across=b.add(self.across, across))


def _address(b, data, at, strides):
    """The address of the element at this index, `data` being that of the first element."""
    for index, stride in zip(at, strides):
        data = b.add(data, b.mul(index, stride))
    return data


def _aligned_position(b, ty, exchange, array, spec, at, rows, cols, first_row):
    """The position in an aligned tile: its indices and extents are below 2**31."""
    data, extents, strides = b.array(ty, array)
    at, r, c = widen_indices(b, at), rows % ty.ndim, cols % ty.ndim
    own_row = b.add(b.lshr(b.lane(), b.u32(2)), exchange.first_row(b))
    at[r] = b.add(at[r], b.zext(b.add(own_row, first_row), i64))
    at[c] = b.add(at[c], b.zext(exchange.first_column(b), i64))
    start = _address(b, data, at, strides)
    return _LanePosition(start, strides[r], strides[c], *(b.trunc(x, i32) for x in (at[r], at[c], extents[r], extents[c])))


def _check_at_run_time(b, ty, exchange, array, spec, at, rows, cols, first_row, stores=False):
    """The position in any tile or vector, of a lane that begins where its quad does. 16 bytes can be moved at a time if the
    address and the stride of rows are multiples of 16 bytes, columns are adjacent, and the array begins and ends between two
    accesses."""
    data, extents, strides = b.array(ty, array)
    at, r, c, size = widen_indices(b, at), rows % ty.ndim, cols % ty.ndim, spec.dtype.itemsize
    start = _address(b, data, at, strides)
    if isinstance(spec, Row):  # stored by the first quad
        row, line, top, bottom = b.u32(0), i64(0), b.u32(0), b.u32(1)
        if stores:
            bottom = b.zext(b.icmp_unsigned("<", b.lane(), b.u32(QUAD)), i32)
    else:
        row, line = b.add(b.lshr(b.lane(), b.u32(2)), first_row), strides[r]
        top, bottom = visible_range(b, at[r], extents[r], 1 << 30)
    left, right = visible_range(b, at[c], extents[c], spec.cols)
    bits = b.or_(b.trunc(b.or_(start, line), i32), b.mul(b.or_(left, right), b.u32(size)))
    is_wide = b.icmp_unsigned("==", b.and_(bits, b.u32(WIDE - 1)), b.u32(0))
    if ty.layout != "C" or c != ty.ndim - 1:
        is_wide = b.and_(is_wide, b.icmp_unsigned("==", strides[c], i64(size)))
    zero = b.u32(0)
    inside = b.sub(zero, top), b.sub(zero, left), b.sub(bottom, top), b.sub(right, left)
    return _LanePosition(start, line, strides[c], *inside, ptx.vote_all(b, is_wide)).shifted_by(b, row, zero)


def _accesses(b, exchange, spec, place, recompute=False, column=None):
    """(is it inside the array, its address) of each of this lane's accesses. column: the stride of columns; None: adjacent."""
    line = _recomputed_address(b, place.start) if recompute else place.start
    step = b.mul(i64(HALF * exchange.lines), place.line)
    for row in range(0, spec.rows, HALF * exchange.lines):
        inside = b.icmp_unsigned("<", b.add(place.down, b.u32(row)), place.height)
        for col in range(0, spec.cols, exchange.columns):
            fits = b.and_(inside, b.icmp_unsigned("<", b.add(place.across, b.u32(col)), place.width))
            along = i64(spec.dtype.itemsize * col) if column is None else b.mul(i64(col), column)
            yield b.zext(fits, i32), b.add(line, along)
        line = b.add(line, step)


STORES = {  # bytes of an access: a lane's
    WIDE: "{.reg .pred p;\nsetp.ne.u32 p, $5, 0;\n@p st.global.v4.b32 [$0], {$1, $2, $3, $4};}",
    NARROW: "{.reg .pred p;\nsetp.ne.u32 p, $2, 0;\n@p st.global.b32 [$0], $1;}",
    ELEMENT: "{.reg .pred p;\n.reg .b16 lo, hi;\nsetp.ne.u32 p, $2, 0;\nmov.b32 {lo, hi}, $1;\n"
    "@p st.global.b16 [$0], lo;\n@p st.global.b16 [$0+2], hi;}",
}


HALF_STORE = "{.reg .pred p;\nsetp.ne.u32 p, $3, 0;\n@p st.global.v2.b32 [$0], {$1, $2};}"  # 16 bytes of 16 bits, as fp8


LOADS = "{.reg .pred p;\nsetp.ne.u32 p, $5, 0;\n" + "".join(f"mov.b32 ${k}, 0;\n" for k in range(4))
LOADS += "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4];}"


def _no_exchange(_, words):
    """The exchange in which every lane keeps its words."""
    return words


def lower_store(ty, spec, rows, cols, first_row, aligned, ordered=True):
    """The lowering of a store by a warp whose first row is `first_row(b)` of the tile. aligned: the kernel's promise. ordered:
    whether the tile's columns are in the array's order; otherwise each lane holds the 16 bytes that it accesses."""
    stored = as_stored(spec, SCALARS[ty.dtype])
    access = access_bytes(aligned)
    exchange, text = exchange_for(stored, stored.dtype.itemsize, access), STORES[access]
    side_by_side, in_pairs = (exchange, _no_exchange) if ordered else (_no_exchange, exchange)

    def lower(b, array, value, at, *_):
        value = value if stored == spec else b.from_elements(rt(32, 32, stored.dtype), b.elements(spec, value))
        words_at = dict(zip(coordinates_of(stored), b.unpack(value), strict=True))
        position = b, ty, exchange, array, stored, at, rows, cols, first_row(b)
        place = _aligned_position(*position) if aligned else _check_at_run_time(*position, stores=True)

        def store(place):
            for (fits, address), four in zip(_accesses(b, exchange, stored, place), words_of(exchange, stored), strict=True):
                b.do(text, address, *(b.bitcast(x, i32) for x in side_by_side(b, [words_at[at] for at in four])), fits)

        if aligned:
            return store(place)
        with b.if_else(place.is_wide) as (at_once, by_words):
            with at_once:
                store(place.shifted_by(b, exchange.first_row(b), exchange.first_column(b)))
            with by_words:
                words = [in_pairs(b, [words_at[at] for at in four]) for four in words_of(exchange, stored)]
                values = [[b.bitcast(x, i32) for x in four] for four in words]
                _four_rounds(b, exchange, stored, place, values, _store_word)

    return lower


def lower_store_bytes(ty, spec, rows, cols, first_row):
    """The lowering of a store to an fp8 array, of a tile in which each lane holds 16 bytes of a 2-byte array, so eight adjacent
    columns at a time. They are stored together, or one by one where the array does not allow it."""
    half_spec, stored_dtype = rt(spec.rows, spec.cols, bf16), SCALARS[ty.dtype]
    exchange, stored = EXCHANGES[2][0], rt(spec.rows, spec.cols, stored_dtype)

    def lower(b, array, value, at, *_):
        elements = {spec.element(0, k): x for k, x in enumerate(b.elements(spec, value))}
        runs = [[elements[row, col + k] for row, col in four for k in (0, 1)] for four in words_of(exchange, half_spec)]
        words = [[b.quad(stored_dtype, *run[k : k + 4]) for k in (0, 4)] for run in runs]
        place = _check_at_run_time(b, ty, exchange, array, stored, at, rows, cols, first_row(b), stores=True)
        lane_place = place.shifted_by(b, exchange.first_row(b), exchange.first_column(b))
        with b.if_else(place.is_wide) as (at_once, by_bytes):
            with at_once:
                for (fits, address), pair in zip(_accesses(b, exchange, stored, lane_place), words, strict=True):
                    b.do(HALF_STORE, address, *pair, fits)
            with by_bytes:
                for k in range(8):
                    shifted = lane_place.shifted_by(b, b.u32(0), b.u32(k))
                    strided = _accesses(b, exchange, stored, shifted, column=shifted.column)
                    for (fits, address), pair in zip(strided, words, strict=True):
                        b.do(f"{{{GUARD}{STORE[1]}}}", address, b.lshr(pair[k // 4], b.u32(8 * (k % 4))), fits)

    return lower


def lower_load(ty, spec, rows, cols, first_row, aligned, ordered=True):
    """The lowering of a load; arguments as for `lower_store`."""
    loaded = as_stored(spec, SCALARS[ty.dtype])
    exchange, register = exchange_for(loaded, loaded.dtype.itemsize), f32 if loaded.dtype.itemsize == 4 else i32
    side_by_side, in_pairs = (exchange, _no_exchange) if ordered else (_no_exchange, exchange)

    def lower(b, array, _, at, *__):
        find = _aligned_position if aligned else _check_at_run_time
        place = find(b, ty, exchange, array, loaded, at, rows, cols, first_row(b))

        def load(place):
            accesses = list(_accesses(b, exchange, loaded, place, True))
            loaded_words = [load_four(b, address, fits) for fits, address in accesses]
            return [side_by_side(b, [b.bitcast(x, register) for x in words]) for words in loaded_words]

        if aligned:
            accesses = load(place)
        else:

            def at_once():
                lane_place = place.shifted_by(b, exchange.first_row(b), exchange.first_column(b))
                return [*itertools.chain(*load(lane_place))]

            def word_by_word():
                zeros = [[b.u32(0)] * 4 for _ in words_of(exchange, loaded)]
                accesses = _four_rounds(b, exchange, loaded, place, zeros, _load_word)
                return [x for words in accesses for x in in_pairs(b, [b.bitcast(x, register) for x in words])]

            words = b.choose(place.is_wide, at_once, word_by_word)
            accesses = [words[k : k + 4] for k in range(0, len(words), 4)]
        value = packed(b, loaded, accesses)
        return value if loaded == spec else b.from_elements(spec, b.elements(rt(32, 32, loaded.dtype), value))

    return lower


def load_four(b, address, inside):
    """The four words of an access, as integers; 0 if it is not inside the array."""
    return b.unpack(b.asm(struct([i32] * 4), LOADS, "=&r,=&r,=&r,=&r,l,r", address, inside))


def packed(b, spec, accesses):
    """The tile of type `spec` made of these words, four for each of a lane's accesses."""
    words_at = {}
    for coordinates, words in zip(words_of(exchange_for(spec, spec.dtype.itemsize), spec), accesses, strict=True):
        words_at |= zip(coordinates, words, strict=True)
    return b.pack([words_at[at] for at in coordinates_of(spec)])


def accesses_of(b, spec, value):
    """The inverse of `packed`: (tile coordinates of lane 0's first word, the words) of each of a lane's accesses."""
    words_at = dict(zip(coordinates_of(spec), b.unpack(value), strict=True))
    for coordinates in words_of(exchange_for(spec, spec.dtype.itemsize), spec):
        yield coordinates[0], [words_at[at] for at in coordinates]


# ---- word by word --------------------------------------------------------------------------------------------------
def _four_rounds(b, exchange, spec, place, accesses, move):
    """Move a tile word by word. accesses: the four words of each of a lane's accesses, before an exchange. Returns the words
    after `word = move(b, bytes an element, word, where)`, where being (is it inside the array, its address) of each element of
    the word. Each round moves one word of every access; the words of a quad are adjacent."""
    size = spec.dtype.itemsize
    elements = 4 // size
    step, section = b.mul(i64(HALF * exchange.lines), place.line), b.mul(i64(exchange.columns), place.column)
    _, low, high, _ = next(words_of(exchange, spec))  # by how many (rows, columns) each bit of the round's number moves it
    first = b.mul(b.and_(b.lane(), b.u32(QUAD - 1)), b.u32(max(elements, 2)))

    def move_one_word(number, words):
        bits = b.and_(number, b.u32(1)), b.lshr(number, b.u32(1))
        rows, cols = (b.add(*(b.mul(bit, b.u32(steps[axis])) for bit, steps in zip(bits, (low, high)))) for axis in (0, 1))
        position = place.shifted_by(b, rows, b.add(first, cols))
        line = ptx.opaque(
            b, position.start
        )  # each address is made of the one before: none is kept in a register over the rounds
        for row in range(0, spec.rows, HALF * exchange.lines):
            inside, along = b.icmp_unsigned("<", b.add(position.down, b.u32(row)), position.height), line
            for col in range(0, spec.cols, exchange.columns):
                elements_at = []
                for k in range(elements):
                    fits = b.and_(inside, b.icmp_unsigned("<", b.add(position.across, b.u32(col + k)), position.width))
                    elements_at.append((b.zext(fits, i32), b.add(along, b.mul(i64(k), position.column))))
                words = [*words[1:4], move(b, size, words[0], elements_at), *words[4:]]
                words = words[4:] + words[:4]
                along = ptx.opaque(b, b.add(along, section))
            line = ptx.opaque(b, b.add(line, step))
        return words

    words = b.repeat(4, [*itertools.chain(*accesses)], move_one_word)
    return [words[k : k + 4] for k in range(0, len(words), 4)]


def _load_word(b, size, _, elements_at):
    """Load the elements of a word; returns the word, as an integer."""
    word, letter = (f32, "f") if size == 4 else (i32, "r")
    text = f"{{{GUARD}{LOAD[size]}}}"
    elements = [b.asm(word, text, f"={letter},l,r", address, inside) for inside, address in elements_at]
    if size == 2:
        return b.or_(b.and_(elements[0], b.u32(0xFFFF)), b.shl(elements[1], b.u32(16)))
    return b.bitcast(elements[0], i32) if size == 4 else joined(b, elements)[0]


def _store_word(b, size, word, elements_at):
    """Store the elements of a word; returns the word."""
    for k, (inside, address) in enumerate(elements_at):
        element = b.bitcast(word, f32) if size == 4 else b.lshr(word, b.u32(8 * size * k))
        b.do(f"{{{GUARD}{STORE[size]}}}", address, element, inside)
    return word
