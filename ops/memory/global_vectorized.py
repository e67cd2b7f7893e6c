"""Register tiles to and from aligned global arrays, by accesses of 16 bytes a lane, or of 4 or twice 2.

A lane of an accumulator holds pairs of neighbouring columns (runs of four if they are bytes). The lanes of a quad hold a row
between them, in sections of eight columns (of bytes sixteen), and exchange pairs so that each ends up with 16 bytes that lie
side by side:

    2 bytes an element          before: columns 2t, 2t+1 of each of four sections             lane t of the quad
                                after:  all eight columns of section t
    2 bytes, 16, 48, .. columns before: columns 2t, 2t+1 of two sections, of two rows 8 apart
                                after:  section t % 2 of the first row if t < 2, else of the second
    1 byte                      as with 2, in sections of sixteen columns
    4 bytes                     before: columns 2t, 2t+1 of each of two sections
                                after:  four columns of section t % 2, the first four if t < 2

The exchange is its own inverse: a load brings 16 bytes that lie side by side, and makes a lane's pairs of them.
"""

import itertools
from dataclasses import dataclass

from llvmlite import ir

from tiles import ptx
from tiles.builder import f32, i32, i64
from tiles.plumbing import SCALARS
from tiles.types import rt, rv

QUAD, HALF = 4, 8  # lanes; rows from one that a quad has to its next
WIDE, NARROW, ELEMENT = 16, 4, 2  # bytes of an access by a lane
PROMISED = {16: WIDE, 8: NARROW, 4: NARROW, 2: ELEMENT}  # bytes that addresses are multiples of: what a store can do


@dataclass(frozen=True)
class Exchange:
    """How lanes of a quad exchange words of 4 bytes. `sections` of `width` columns each go together, of `lines` rows 8 apart;
    each lane has 4 / sections / lines words of each. stages: a bit of the lane's number, and pairs of words, of each of which a
    lane keeps one, by that bit. column: how many columns to the right each of the two bits of the lane's number moves its
    access; row: how many rows down the second does."""

    sections: int
    stages: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    column: tuple[int, int]
    row: int = 0
    width: int = 8

    @property
    def lines(self):
        """Rows that go together."""
        return 2 if self.row else 1

    @property
    def columns(self):
        """Of a row, all sections together."""
        return self.width * self.sections

    def __call__(self, b, words):
        """The lane's words after the exchange: from pairs to words that lie side by side, or back."""
        words, lane = list(words), b.lane()
        for bit, pairs in self.stages:
            odd = b.icmp_unsigned("!=", b.and_(lane, b.u32(bit)), b.u32(0))
            for low, high in pairs:
                got = ptx.shuffle_xor(b, b.select(odd, words[low], words[high]), bit)
                words[low], words[high] = b.select(odd, got, words[low]), b.select(odd, words[high], got)
        return words

    def first_column(self, b):
        """Of this lane's access."""
        lane, (low, high) = b.lane(), self.column
        return b.add(b.mul(b.and_(lane, b.u32(1)), b.u32(low)), b.mul(b.and_(b.lshr(lane, b.u32(1)), b.u32(1)), b.u32(high)))

    def first_row(self, b):
        """Of this lane's access, counted from its quad's row."""
        return b.mul(b.and_(b.lshr(b.lane(), b.u32(1)), b.u32(1)), b.u32(self.row))


ACROSS = (1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))  # lane t gets the t-th words of all four
EXCHANGES = {  # bytes an element: exchanges, those of more columns first
    1: (Exchange(4, ACROSS, (16, 32), width=16), Exchange(2, ACROSS, (16, 0), HALF, width=16)),
    2: (Exchange(4, ACROSS, (8, 16)), Exchange(2, ACROSS, (8, 0), HALF)),
    4: (Exchange(2, ((1, ((0, 2), (1, 3))),), (8, 4)),),
}
NO_EXCHANGE = Exchange(1, (), (2, 4))  # an access of two columns, which stay in their lane


def _access(aligned):
    """The bytes of an access that `aligned`, a flag or a number of bytes, allows."""
    return PROMISED.get(aligned, WIDE)


def _exchange(spec, size, access=WIDE):
    """The exchange for tiles of type `spec` and an array of so many bytes an element."""
    if access != WIDE:
        return NO_EXCHANGE
    return next(exchange for exchange in EXCHANGES[size] if spec.cols % exchange.columns == 0)


def check(name, array, spec, aligned, loads=False):
    """TypeError if tiles of type `spec` cannot be moved to or from this array so. loads: by 16 bytes only, and vectors, too."""
    size = SCALARS[array.dtype].itemsize
    if aligned not in (False, True) and (loads or aligned not in PROMISED or size != 2):
        kinds = ", ".join(map(str, PROMISED))
        raise TypeError(f"{name}: aligned must be True, or for stores to bf16 and fp16 arrays one of {kinds}, got {aligned}")
    if loads and isinstance(spec, rv):
        return
    if not (isinstance(spec, rt) and spec.layout == "row" and (spec.dtype.itemsize == 1) == (size == 1)):
        raise TypeError(f"{name}: aligned accesses take tiles in row layout, of fp8 if the array is, got {spec}, {array}")


def misaligned(array, spec, at, cols, aligned=True):
    """What keeps a NumPy array from keeping the promise `aligned`, for a tile or a vector at this index, or None."""
    access = _access(aligned)
    if isinstance(spec, rv):
        adjacent = array.strides[cols] == array.itemsize
        return None if adjacent else f"the elements of the array (strides {array.strides}) are not adjacent along axis {cols}"
    steps = [stride for axis, stride in enumerate(array.strides) if axis != cols % array.ndim and array.shape[axis] > 1]
    if array.strides[cols] != array.itemsize or any(stride % access for stride in steps) or array.ctypes.data % access:
        return f"the array (strides {array.strides}, address {array.ctypes.data:#x}) is not aligned to {access} bytes"
    columns = max(access // array.itemsize, 2)
    if at[cols] % columns or array.shape[cols] % columns:
        return f"columns from {at[cols]} of {array.shape[cols]} are not multiples of {columns}"
    return None


def _anew(b, address):
    """The address, shuffled from this lane to itself: the compiler takes it for another one, and keeps nothing in
    registers that it computed from the first."""
    low = ptx.shuffle(b, b.trunc(address, i32), b.lane())
    return b.or_(b.shl(b.lshr(address, ir.Constant(i64, 32)), ir.Constant(i64, 32)), b.zext(low, i64))


def _accesses(b, ty, exchange, array, spec, at, rows, cols, first_row, anew=False):
    """For each of this lane's accesses: (the coordinates of its words in lane 0, is it inside the array, its address)."""
    data, extents, strides = b.array(ty, array)
    at = [b.sext(x, i64) if x.type.width < 64 else x for x in b.unpack(at)]
    size, r, c = SCALARS[ty.dtype].itemsize, rows % ty.ndim, cols % ty.ndim
    own_row = b.add(b.lshr(b.lane(), b.u32(2)), exchange.first_row(b))
    at[r] = b.add(at[r], b.zext(b.add(own_row, first_row), i64))
    at[c] = b.add(at[c], b.zext(exchange.first_column(b), i64))
    start = data
    for index, stride in zip(at, strides):
        start = b.add(start, b.mul(index, stride))
    line, step = _anew(b, start) if anew else start, b.mul(ir.Constant(i64, HALF * exchange.lines), strides[r])
    down, across, height, width = (b.trunc(x, i32) for x in (at[r], at[c], extents[r], extents[c]))  # all below 2**31
    words = range(0, 2, 4 // size)  # columns at which lane 0 has words of a section
    for row in range(0, spec.rows, HALF * exchange.lines):
        inside = b.icmp_unsigned("<", b.add(down, b.u32(row)), height)
        for col in range(0, spec.cols, exchange.columns):
            fits = b.and_(inside, b.icmp_unsigned("<", b.add(across, b.u32(col)), width))
            eighths = itertools.product(range(exchange.lines), range(exchange.sections), words)
            coordinates = [(row + HALF * e, col + exchange.width * k + word) for e, k, word in eighths]
            yield coordinates, b.zext(fits, i32), b.add(line, ir.Constant(i64, size * col))
        line = b.add(line, step)


def _coordinates(spec):
    """Where in the tile lane 0's words lie, in the order of its registers."""
    step = 4 // spec.dtype.itemsize
    return [spec.element(0, k) for k in range(0, spec.elements, step)]


STORES = {  # bytes of an access: a lane's
    WIDE: "{.reg .pred p;\nsetp.ne.u32 p, $5, 0;\n@p st.global.v4.b32 [$0], {$1, $2, $3, $4};}",
    NARROW: "{.reg .pred p;\nsetp.ne.u32 p, $2, 0;\n@p st.global.b32 [$0], $1;}",
    ELEMENT: "{.reg .pred p;\n.reg .b16 lo, hi;\nsetp.ne.u32 p, $2, 0;\nmov.b32 {lo, hi}, $1;\n"
    "@p st.global.b16 [$0], lo;\n@p st.global.b16 [$0+2], hi;}",
}


def lower_store(ty, spec, rows, cols, first_row, aligned):
    """The lowering of an aligned store by a warp whose first row is `first_row(b)` of the tile."""
    stored = rt(spec.rows, spec.cols, SCALARS[ty.dtype])
    access = _access(aligned)
    exchange, text = _exchange(stored, stored.dtype.itemsize, access), STORES[access]

    def lower(b, array, value, at, *_):
        registers = b.unpack(value) if stored == spec else b.unpack(b.from_elements(stored, b.elements(spec, value)))
        held = dict(zip(_coordinates(stored), registers, strict=True))
        for coordinates, fits, address in _accesses(b, ty, exchange, array, spec, at, rows, cols, first_row(b)):
            b.do(text, address, *(b.bitcast(x, i32) for x in exchange(b, [held[at] for at in coordinates])), fits)

    return lower


def lower_load(ty, spec, rows, cols, first_row):
    """The lowering of an aligned load, likewise."""
    loaded = rt(spec.rows, spec.cols, SCALARS[ty.dtype])
    size = loaded.dtype.itemsize
    exchange, register = _exchange(loaded, size), f32 if size == 4 else i32
    zeros = "".join(f"mov.b32 ${k}, 0;\n" for k in range(4))
    text = f"{{.reg .pred p;\nsetp.ne.u32 p, $5, 0;\n{zeros}@p ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4];}}"

    def lower(b, array, _, at, *__):
        accesses = list(_accesses(b, ty, exchange, array, spec, at, rows, cols, first_row(b), True))
        four = ir.LiteralStructType([i32] * 4)
        brought = [b.unpack(b.asm(four, text, "=&r,=&r,=&r,=&r,l,r", address, fits)) for _, fits, address in accesses]
        held = {}
        for (coordinates, *_), words in zip(accesses, brought, strict=True):
            held |= zip(coordinates, exchange(b, [b.bitcast(x, register) for x in words]), strict=True)
        value = b.pack([held[at] for at in _coordinates(loaded)])
        return value if loaded == spec else b.from_elements(spec, b.elements(loaded, value))

    return lower
