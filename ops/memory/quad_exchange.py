"""How the lanes of a quad exchange elements of a register tile so that each accesses 16 adjacent bytes of an array.

A lane of an accumulator has pairs of neighbouring columns (runs of four if they are bytes). The lanes of a quad have a row
between them, in sections of eight columns (of bytes sixteen), and exchange pairs so that each ends up with 16 adjacent bytes:

    2 bytes an element          before: columns 2t, 2t+1 of each of four sections             lane t of the quad
                                after:  all eight columns of section t
    2 bytes, 16, 48, .. columns before: columns 2t, 2t+1 of two sections, of two rows 8 apart
                                after:  section t % 2 of the first row if t < 2, else of the second
    1 byte                      as with 2, in sections of sixteen columns
    4 bytes                     before: columns 2t, 2t+1 of each of two sections
                                after:  four columns of section t % 2, the first four if t < 2

The exchange is its own inverse: after a load it turns 16 adjacent bytes into a lane's pairs. Where the order of columns does
not matter (unordered.py), 16 bytes stay with the lane that loaded them, and only elements that are moved word by word are
exchanged."""

import itertools
from dataclasses import dataclass

import numpy as np

from tiles.compiling import ptx
from tiles.dtypes import dtype
from tiles.layout import row_vec_element
from tiles.types import rt

QUAD, HALF = 4, 8  # lanes of a quad; from one row of a quad to its next
WIDE, NARROW, ELEMENT = 16, 4, 2  # bytes of an access by a lane
PROMISED = {16: WIDE, 8: NARROW, 4: NARROW, 2: ELEMENT}  # by the bytes that addresses are multiples of: bytes of an access


@dataclass(frozen=True)
class Exchange:
    """How lanes of a quad exchange words of 4 bytes. `sections` of `width` columns each are exchanged together, of `lines` rows
    that are 8 apart; each lane has 4 / sections / lines words of each. stages: (a bit of the lane's number, pairs of words):
    that bit says which word of each pair a lane keeps, and it gives the other away. column: by how many columns each of the two
    bits of the lane's number moves its access; row: by how many rows the second one does."""

    sections: int
    stages: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    column: tuple[int, int]
    row: int = 0
    width: int = 8

    @property
    def lines(self):
        """The number of rows that are exchanged together."""
        return 2 if self.row else 1

    @property
    def columns(self):
        """Columns of a row that are exchanged together: those of all sections."""
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
        """The first column of this lane's access."""
        lane, (low, high) = b.lane(), self.column
        return b.add(b.mul(b.and_(lane, b.u32(1)), b.u32(low)), b.mul(b.and_(b.lshr(lane, b.u32(1)), b.u32(1)), b.u32(high)))

    def first_row(self, b):
        """The row of this lane's access, counted from its quad's row."""
        return b.mul(b.and_(b.lshr(b.lane(), b.u32(1)), b.u32(1)), b.u32(self.row))


ACROSS = (1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))  # lane t gets the t-th words of all four
EXCHANGES = {  # by bytes an element; exchanges of more columns first
    1: (Exchange(4, ACROSS, (16, 32), width=16), Exchange(2, ACROSS, (16, 0), HALF, width=16)),
    2: (Exchange(4, ACROSS, (8, 16)), Exchange(2, ACROSS, (8, 0), HALF)),
    4: (Exchange(2, ((1, ((0, 2), (1, 3))),), (8, 4)),),
}
NO_EXCHANGE = Exchange(1, (), (2, 4))  # each lane accesses its own two columns


def access_bytes(aligned):
    """The bytes of an access that `aligned`, a flag or a number of bytes, allows."""
    return PROMISED.get(aligned, WIDE)


def exchange_for(spec, size, access=WIDE):
    """The exchange between tiles of type `spec` and an array of `size` bytes an element, for accesses of so many bytes."""
    if access != WIDE:
        return NO_EXCHANGE
    return next(exchange for exchange in EXCHANGES[size] if spec.cols % exchange.columns == 0)


@dataclass(frozen=True)
class Row:
    """A vector along the columns of tiles, seen as a tile of one row that every quad holds."""

    cols: int
    dtype: dtype
    rows = HALF  # so that loops over the rows of a quad see one row

    @property
    def elements(self):
        """The number of elements that each lane holds."""
        return self.cols // QUAD

    def element(self, lane, index):
        """(row, col) of the `index`-th element that `lane` holds."""
        return 0, row_vec_element(lane, index)


def as_stored(spec, stored_dtype):
    """The type of the same tile or vector with the array's dtype."""
    return rt(spec.rows, spec.cols, stored_dtype) if isinstance(spec, rt) else Row(spec.length, stored_dtype)


def columns_at_once(size):
    """How many columns a quad reads together, of `size` bytes an element."""
    return EXCHANGES[size][0].columns


def order(spec, stored_dtype):
    """For each column of a tile or vector of type `spec` the column of the array, of dtype `stored_dtype`, if lanes exchange
    nothing."""
    exchange, elements, columns = EXCHANGES[stored_dtype.itemsize][0], 4 // stored_dtype.itemsize, spec.shape[1]
    lanes, (low, high), columns_of = np.arange(QUAD), exchange.column, np.empty(columns, int)
    lane_first = (lanes & 1) * low + (lanes >> 1) * high
    for first, words in zip(range(0, columns, exchange.columns), words_of(exchange, as_stored(spec, stored_dtype))):
        for k, (_, col) in enumerate(words):
            for e in range(elements):
                columns_of[col + max(elements, 2) * lanes + e] = first + lane_first + elements * k + e
    return columns_of


def words_of(exchange, spec):
    """For each access the coordinates of lane 0's words, before they are exchanged."""
    columns = range(0, 2, 4 // spec.dtype.itemsize)  # columns at which lane 0 has words of a section
    for row in range(0, spec.rows, HALF * exchange.lines):
        for col in range(0, spec.cols, exchange.columns):
            eighths = itertools.product(range(exchange.lines), range(exchange.sections), columns)
            yield [(row + HALF * e, col + exchange.width * k + word) for e, k, word in eighths]


def coordinates_of(spec):
    """The tile coordinates of lane 0's words, in the order of its registers."""
    step = 4 // spec.dtype.itemsize
    return [spec.element(0, k) for k in range(0, spec.elements, step)]
