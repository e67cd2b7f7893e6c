"""Between registers and shared tiles: how `load` and `store` (load_store.py) move a tile.

2-byte elements go by matrices (ldmatrix, stmatrix), which transpose them for column layout on the way; so do bytes in row
layout. 4-byte elements go two at a time, or one by one in column layout; so do bytes there.
"""

from dataclasses import replace

from tiles.compiling import ptx
from tiles.compiling.builder import f32, i32, struct
from tiles.layout import WIDTHS
from tiles.numba_names import types
from tiles.op import integer
from tiles.types import rt

from ..elementwise.convert import converted


def describe_index(at):
    """The type of an index in a user's words: (int, float32)."""
    return f"({', '.join('int' if integer(i) else str(i) for i in at)})" if isinstance(at, types.BaseTuple) else at


TOGETHER = {"hold": "take", "take": "fill"}  # what a shared tile does to a register tile, and what warps do to it then


def check(name, tile, verb, spec, at, warps):
    """A shared tile is loaded and stored whole, by one warp or by four."""
    if not isinstance(spec, rt) or tile.shape != (warps * spec.rows, spec.cols):
        advice = f": four warps {TOGETHER[verb]} it together, by warpgroup.{name}"
        if name.startswith("cluster."):
            part = f"cluster.map(subtile(tile, {getattr(spec, 'rows', 16)}, warpgroup.rank()), block)"
            advice = f": four warps {TOGETHER[verb]} it together, each its part, {part}"
        fits = warps == 1 and isinstance(spec, rt) and tile.shape == (4 * spec.rows, spec.cols)
        raise TypeError(f"{name}: {tile} does not {verb} {f'{warps} x ' * (warps > 1)}{spec}{advice * fits}")
    try:
        replace(spec, dtype=tile.dtype)
    except ValueError as error:
        raise TypeError(f"{name}: {tile} does not {verb} {spec}: {error}") from None
    if at is not None:
        raise TypeError(f"{name}: `at` is for global arrays; a shared tile is taken whole, got {describe_index(at)}")


def shifts(b, run=2):
    """The distance of this lane's elements from lane 0's: along the axis where quads differ, and along that of the runs."""
    lane = b.lane()
    return b.lshr(lane, b.u32(2)), b.mul(b.and_(lane, b.u32(3)), b.u32(run))


def bytes_of(b, registers):
    """Registers whose lowest bytes are the bytes of these registers, in order."""
    return [b.lshr(register, b.u32(8 * k)) for register in registers for k in range(4)]


def joined(b, parts):
    """Registers of four bytes, packed from registers of one byte."""
    words = []
    for k in range(0, len(parts), 4):
        low, high = (b.or_(parts[k + i], b.shl(parts[k + i + 1], b.u32(8))) for i in (0, 2))
        words.append(b.or_(low, b.shl(high, b.u32(16))))
    return words


def matrix_addresses(b, tile, spec, address, first_row, swapped=False, first_col=None, recompute=False):
    """For each base tile of `spec` (16x16, of bytes 16x32), in the order of its registers, the address that this lane gives
    ldmatrix or stmatrix. Matrices 0 and 1 are the base tile's left half, 2 and 3 its right one; for column layout, with .trans,
    its upper and its lower half. `swapped`: matrices 1 and 2 are swapped. first_col: of a base tile, in the first panel.
    `anew`: computed where they are used, so that no loop keeps
    them in registers."""
    lane, by_row = b.lane(recompute), spec.layout == "row"
    down_first = by_row != swapped  # matrix 1 lies below matrix 0, not to its right
    lower, right = (15, 16) if down_first else (7, 8)
    row = b.and_(lane, b.u32(lower))
    if not down_first:
        row = b.or_(row, b.lshr(b.and_(lane, b.u32(16)), b.u32(1)))
    start, swizzle = b.row_address(tile, address, b.add(row, first_row))
    half = b.and_(lane, b.u32(right))
    half = b.xor(half if down_first else b.shl(half, b.u32(1)), swizzle)
    if first_col is not None:
        half = b.xor(half, b.mul(first_col, b.u32(tile.dtype.itemsize)))
    bands, across = range(0, spec.rows, 16), range(0, spec.cols, 32 // tile.dtype.itemsize)
    for row, col in ((r, c) for r in bands for c in across) if by_row else ((r, c) for c in across for r in bands):
        panel, byte = divmod(col * tile.dtype.itemsize, tile.width)  # the swizzle repeats after 8 rows
        yield b.add(b.add(start, b.xor(half, b.u32(byte))), b.u32(panel * tile.panel_bytes + row * tile.width))


# Accesses to single elements and fp32 pairs without bank conflicts. The banks serve 16 lanes at once if each takes a pair, else
# 32, and these reach half of the banks twice: four rows of a pair's two chunks, or rows of which every other (every fourth) is
# touched, for the swizzle looks at some of a row's bits only. So in instruction k lanes L with L & mask take the
# elements that the others take in instruction k ^ partner: further along the row, or one row below.
# (itemsize, layout, width): mask, partner, bytes from one to the other along the row.
LANE_SWAPS = {
    (4, "row", 128): (4, 4, 64),
    (4, "row", 64): (8, 2, 32),
    (4, "col", 64): (1, 1, 0),
    (4, "col", 32): (2, 1, 0),
    **{(1, "col", width): (2, 1, 0) for width in WIDTHS},
}


def _turn(b, tile, spec):
    """(does this lane take turns with a partner, instructions to the partner, rows and bytes to it, as registers)."""
    mask, partner, across = LANE_SWAPS.get((tile.dtype.itemsize, spec.layout, tile.width), (0, 0, 0))
    swaps = b.icmp_unsigned("!=", b.and_(b.lane(), b.u32(mask)), b.u32(0))
    return swaps, partner, b.select(swaps, b.u32(int(across == 0)), b.u32(0)), b.select(swaps, b.u32(across), b.u32(0))


def _take_turns(b, swaps, partner, parts):
    """The registers of each instruction, those of lanes that take turns exchanged with the partner's."""
    if not partner:
        return parts
    return [[b.select(swaps, y, x) for x, y in zip(part, parts[k ^ partner])] for k, part in enumerate(parts)]


def lane_addresses(b, tile, spec, address, first_row, step, turn=None):
    """The address of every `step`-th element of this lane; `turn`: of its partner, see LANE_SWAPS."""
    quad, pair = shifts(b, spec.dtype.run)
    down, across = (quad, pair) if spec.layout == "row" else (pair, quad)
    inside = b.mul(across, b.u32(tile.dtype.itemsize))
    if (tile.dtype.itemsize, spec.layout, turn and turn[1]) == (4, "col", 0):
        yield from _column_addresses(b, tile, spec, address, b.add(down, first_row), inside)
        return
    for i in range(0, spec.elements, step):
        row, col = spec.element(0, i)
        row = b.add(b.add(down, first_row), b.u32(int(row)))
        start, swizzle = b.row_address(tile, address, b.xor(row, turn[2]) if turn else row)
        panel, byte = divmod(int(col) * tile.dtype.itemsize, tile.width)
        inner = b.xor(b.add(inside, b.u32(byte)), b.xor(swizzle, turn[3]) if turn else swizzle)
        yield b.add(b.add(start, b.u32(panel * tile.panel_bytes)), inner)


def _column_addresses(b, tile, spec, address, row, inside):
    """The addresses of a lane's 4-byte elements in column layout. The swizzle repeats every 8 rows, so a few addresses serve
    all of them, with offsets that instructions hold. row: the lane's first one. inside: bytes of its first column."""
    starts = {}
    for down, col in (tuple(map(int, spec.element(0, i))) for i in range(spec.elements)):
        bands, place = divmod(down, 8)
        if (place, col) not in starts:
            start, swizzle = b.row_address(tile, address, b.add(row, b.u32(place)))
            panel, byte = divmod(col * tile.dtype.itemsize, tile.width)
            at = b.add(b.add(start, b.u32(panel * tile.panel_bytes)), b.xor(b.add(inside, b.u32(byte)), swizzle))
            starts[place, col] = ptx.opaque(b, at)
        yield b.add(starts[place, col], b.u32(8 * bands * tile.width))


def _store_words(b, tile, spec, address, registers, first_row):
    """2-byte and 1-byte elements by plain stores: runs of a row at once, those of a column one by one."""
    if spec.layout == "row":
        for at, register in zip(lane_addresses(b, tile, spec, address, first_row, tile.dtype.run), registers, strict=True):
            b.do("st.shared.b32 [$0], $1;", at, register)
    elif tile.dtype.itemsize == 1:
        turn = _turn(b, tile, spec)
        parts = _take_turns(b, *turn[:2], [[byte] for byte in bytes_of(b, registers)])
        for at, (byte,) in zip(lane_addresses(b, tile, spec, address, first_row, 1, turn), parts, strict=True):
            b.do("st.shared.b8 [$0], $1;", at, byte)
    else:
        for i, at in enumerate(lane_addresses(b, tile, spec, address, first_row, 1)):
            half = "lo" if i % 2 == 0 else "hi"
            b.do(f"{{.reg .b16 lo, hi;\nmov.b32 {{lo, hi}}, $1;\nst.shared.b16 [$0], {half};}}", at, registers[i // 2])


def _by_matrices(tile, spec):
    """Do ldmatrix and stmatrix know these elements in this layout? They transpose by two bytes."""
    return tile.dtype.itemsize == 2 or (tile.dtype.itemsize == 1 and spec.layout == "row")


def lower_store(tile, spec, first_row):
    """The lowering of a store to rows first_row(b).. of a shared tile."""
    stored, by_row = replace(spec, dtype=tile.dtype), spec.layout == "row"

    def lower(b, address, value, *_):
        row = first_row(b)
        registers = converted(b, spec, stored, value)
        if tile.dtype.itemsize == 4:
            step = 2 if by_row else 1
            text = "st.shared.v2.f32 [$0], {$1, $2};" if by_row else "st.shared.f32 [$0], $1;"
            turn = _turn(b, tile, stored)
            parts = _take_turns(b, *turn[:2], [registers[k : k + step] for k in range(0, len(registers), step)])
            for at, part in zip(lane_addresses(b, tile, stored, address, row, step, turn), parts, strict=True):
                b.do(text, at, *part)
            return
        matrices = b.since(90)
        if _by_matrices(tile, stored):
            with b.if_then(matrices):
                for k, at in enumerate(matrix_addresses(b, tile, stored, address, row)):
                    ptx.stmatrix(b, at, registers[4 * k : 4 * k + 4], transposed=not by_row)
            with b.if_then(b.not_(matrices)):
                _store_words(b, tile, stored, address, registers, row)
        else:
            _store_words(b, tile, stored, address, registers, row)

    return lower


def lower_load(tile, spec, first_row, fenced=True):
    """The lowering of a load from rows first_row(b).. of a shared tile. fenced: may TMA write there then?"""
    stored, by_row = replace(spec, dtype=tile.dtype), spec.layout == "row"

    def read(b, address, row):
        if _by_matrices(tile, stored):
            addresses = matrix_addresses(b, tile, stored, address, row)
            return [register for at in addresses for register in ptx.ldmatrix(b, at, transposed=not by_row)]
        turn = _turn(b, tile, stored)
        addresses = lane_addresses(b, tile, stored, address, row, 2 if by_row else 1, turn)
        if tile.dtype.itemsize == 1:
            parts = [[b.asm(i32, "ld.shared.b8 $0, [$1];", "=r,r", at)] for at in addresses]
            return joined(b, [byte for (byte,) in _take_turns(b, *turn[:2], parts)])
        if by_row:
            pair, text = struct([f32] * 2), "ld.shared.v2.f32 {$0, $1}, [$2];"
            parts = [b.unpack(b.asm(pair, text, "=f,=f,r", at)) for at in addresses]
        else:
            parts = [[b.asm(f32, "ld.shared.f32 $0, [$1];", "=f,r", at)] for at in addresses]
        return [x for part in _take_turns(b, *turn[:2], parts) for x in part]

    def lower(b, address, *_):
        registers = read(b, address, first_row(b))
        if fenced:
            ptx.reads_done(b)
        return b.pack(converted(b, stored, spec, b.pack(registers)))

    return lower
