"""Where the elements of a tile lie: integer functions, shared by the lowerings, the interpreter, the tests and the pictures.

Every function takes Python integers or integer arrays and returns the like. Neither Numba nor CUDA is imported here.

**Registers.** A register tile belongs to one warp and is made of 16x16 base tiles. Lane L holds eight elements of each
base tile, two by two in neighbouring columns:

                columns 2(L%4) + {0,1}      2(L%4) + 8 + {0,1}
    row L/4             e0 e1                    e4 e5
    row L/4 + 8         e2 e3                    e6 e7

This is mma's accumulator and, with two 2-byte elements to a register, its A operand; a warpgroup's 64 x n accumulator is
the same four times, warp w on rows 16w..16w+15 (PTX ISA, "Matrix Fragments"). So an accumulator turns into the next
operand inside each lane.

The **column layout** is its transpose: lane L holds pairs of neighbouring *rows*,

                  column L/4        column L/4 + 8
    rows 2(L%4) + {0,1}          e0             e2
                                 e1             e3
    rows 2(L%4) + 8 + {0,1}      e4             e6
                                 e5             e7

which is mma.sync's B operand (k x n): e0 e1 e4 e5 are the fragment of its left eight columns, e2 e3 e6 e7 of the right ones.

A **line** is one row, spread over the warp run by run: lane L of a line of 32 n elements holds elements n L to n L + n - 1. So
a row of an array comes by one access of each lane, which a warp makes as one, and lanes can walk along the rows by themselves.

Tiles of 1-byte elements are made of 16x32 base tiles (32x16 in column layout). Where the others have a pair, a lane has a *run*
of four: columns 4(L%4) + {0,1,2,3}, and 16 further on.

**Shared memory.** A tile is stored as panels `width` bytes wide (128, 64 or 32). Inside a panel rows are `width` bytes
apart, and the index of a 16-byte chunk is XORed with the low bits of its row, so that eight rows of one chunk column fall
into different banks. The same pattern is TMA's swizzle and what wgmma's descriptors name.
"""

LANES = 32  # of a warp
QUAD = 4  # lanes, which hold a row between them
WARPGROUP = 4  # warps
BANKS = 32
WIDTHS = (128, 64, 32)


# ---- registers -----------------------------------------------------------------------------------------------------
def element(lane, index, cols, run=2):
    """(row, col) of the `index`-th element that `lane` holds of a register tile `cols` columns wide."""
    band, index = index // (cols // 2), index % (cols // 2)
    row = 16 * band + lane // 4 + 8 * (index // run % 2)
    return row, index // (2 * run) * 4 * run + lane % 4 * run + index % run


def column_element(lane, index, rows, run=2):
    """(row, col) of the `index`-th element that `lane` holds of a column-layout tile `rows` rows high."""
    col, row = element(lane, index, rows, run)
    return row, col


def line_element(lane, index, elements):
    """(row, col) of the `index`-th of so many elements that `lane` holds of a line."""
    return 0 * (lane + index), lane * elements + index


def zipped(index):
    """Which column becomes column `index` where, in each sixteen, pairs of the first eight and of the last eight take turns:
    0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15. An accumulator's two pairs of a lane are then a run of four."""
    return index // 16 * 16 + index % 4 // 2 * 8 + index % 16 // 4 * 2 + index % 2


def col_vec_index(index, cols):
    """Which of a lane's col_vec elements (one value per row) goes with its `index`-th element of a row-layout tile."""
    return index // (cols // 2) * 2 + index // 2 % 2


def row_vec_index(index, cols):
    """Which of a lane's row_vec elements (one value per column) goes with its `index`-th element of a row-layout tile."""
    index = index % (cols // 2)
    return index // 4 * 2 + index % 2


def col_vec_element(lane, index):
    """The row whose value is the `index`-th element that `lane` holds of a col_vec; the four lanes of a quad agree."""
    return index // 2 * 16 + lane // 4 + index % 2 * 8


def row_vec_element(lane, index):
    """The column whose value is the `index`-th element that `lane` holds of a row_vec; eight lanes agree."""
    return index // 2 * 8 + lane % 4 * 2 + index % 2


# ---- shared memory -------------------------------------------------------------------------------------------------
def swizzle_width(row_bytes):
    """The widest panel that divides a row of `row_bytes`."""
    for width in WIDTHS:
        if row_bytes % width == 0:
            return width
    raise ValueError(f"a shared tile's row must be a multiple of 32 bytes, got {row_bytes}")


def swizzle(offset, width):
    """XOR the 16-byte chunk index of a byte offset with the row bits above it (3, 2 or 1 bits for 128, 64 or 32)."""
    return offset ^ (offset >> 3 & width - 16)


def shared_offset(row, col, rows, itemsize, width):
    """Byte offset of element (row, col) in a shared tile of `rows` rows."""
    panel, byte = col * itemsize // width, col * itemsize % width
    return swizzle((panel * rows + row) * width + byte, width)


def bank(offset):
    """The bank that serves the 4-byte word at a byte offset."""
    return offset // 4 % BANKS


# ---- wgmma's view of shared memory ---------------------------------------------------------------------------------
def descriptor(rows, width, rows_are_k):
    """The constant part of wgmma's 64-bit matrix descriptor (PTX ISA, "Matrix Descriptor"); the address goes below it.

    Bits 16.. hold the stride between panels (only an operand whose rows run along k uses it), bits 32.. that between
    groups of eight rows, bits 62.. the swizzle mode; strides in units of 16 bytes."""
    leading = rows * width if rows_are_k else 16
    return WIDTHS.index(width) + 1 << 62 | 8 * width >> 4 << 32 | leading >> 4 << 16


def k_step(k, rows, itemsize, width, rows_are_k):
    """Bytes from the start of a shared tile to its slice that begins at index `k` of the contracted axis."""
    if rows_are_k:
        return k * width
    panel, byte = k * itemsize // width, k * itemsize % width
    return panel * rows * width + byte
