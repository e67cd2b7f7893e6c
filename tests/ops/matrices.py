"""What the matrix instructions do, written down from the PTX ISA alone: fragments, ldmatrix, stmatrix, wgmma's descriptors."""

import numpy as np
from registers import NUMPY, Register, Struct

from tiles.builder import f32, i32

SLICE = 32  # bytes along k that an instruction takes


def _matrix_cells(m, name, address):
    """For each thread and matrix of an x4 ldmatrix or stmatrix, the index of its 32-bit word: lanes 8i..8i+7 name the rows
    of matrix i, and lane L holds of each matrix the elements 2(L%4) and 2(L%4)+1 of row L/4."""
    m.passes(name, address.array, 16)
    assert not (address.array % 16).any()
    warp, lane = m.tid // 32 * 32, m.tid % 32
    return [(address.array[warp + 8 * i + lane // 4] + lane % 4 * 4) // 4 for i in range(4)]


def _transposed_cells(m, name, address):
    """With .trans: for each matrix and each half of a register, the index of its 2-byte element: column L/4, rows 2(L%4) and
    2(L%4)+1."""
    m.passes(name, address.array, 16)
    warp, lane = m.tid // 32 * 32, m.tid % 32
    return [[(address.array[warp + 8 * i + lane % 4 * 2 + h] + lane // 4 * 2) // 2 for h in (0, 1)] for i in range(4)]


def stmatrix(m, match, address, *registers):
    if not m.active.any():
        return
    if match[1]:
        for cells, register in zip(_transposed_cells(m, "stmatrix", address), registers, strict=True):
            for h in (0, 1):
                m.shared.view(np.uint16)[cells[h]] = register.array >> 16 * h & 0xFFFF
        return
    for cell, register in zip(_matrix_cells(m, "stmatrix", address), registers, strict=True):
        m.shared.view(np.uint32)[cell] = register.array


def ldmatrix(m, match, address):
    if match[1]:
        halves = m.shared.view(np.uint16)
        cells = _transposed_cells(m, "ldmatrix", address)
        return Struct([Register(i32, halves[lo] | halves[hi].astype(np.uint32) << 16) for lo, hi in cells])
    return Struct([Register(i32, m.shared.view(np.uint32)[cell]) for cell in _matrix_cells(m, "ldmatrix", address)])


def movmatrix(m, _, x):
    """An 8x8 matrix of 2-byte elements, lane L's at row L/4, columns 2(L%4) and 2(L%4)+1, transposed."""
    lane, row = m.tid % 32, m.tid // 32 * 8
    matrices = np.zeros((m.threads // 4, 8), np.uint16)
    for h in (0, 1):
        matrices[row + lane // 4, lane % 4 * 2 + h] = x.array >> 16 * h & 0xFFFF
    low, high = (matrices[row + lane % 4 * 2 + h, lane // 4].astype(np.uint32) for h in (0, 1))
    return Register(i32, low | high << 16)


def _elements(registers, kind):
    """Those of registers as [register][place in it], an entry a thread. tf32 numbers must be rounded: the hardware cuts others
    off."""
    dtype = NUMPY[kind]
    found = [r.array[:, None].view(dtype).astype(np.float64) for r in registers]
    assert kind != "tf32" or not any((r.array.view(np.uint32) & 0x1FFF).any() for r in registers), "not rounded to tf32"
    return [[x[:, h] for h in range(x.shape[1])] for x in found]


def _fill(out, elements, row, t, threads):
    """Put a fragment of `row`s into the matrix `out`: PTX ISA, "Matrix Fragments". A register's s elements lie at k = s t ..,
    the second register eight rows lower (if A), the next ones 4 s further along k."""
    rows = len(elements) // 2
    for i, parts in enumerate(elements):
        for h, x in enumerate(parts):
            out[row + i % rows * 8, len(parts) * (t + i // rows * 4) + h] = x[threads]


def mma(m, match, *registers):
    """PTX ISA, "Matrix Fragments for mma.m16n8k8, k16, k32": groupID g = lane / 4, t = lane % 4. A's rows are g and g + 8, B's
    column is g; C: c0 c1 at (g, 2t + {0, 1}), c2 c3 at g + 8."""
    k, out = int(match[1]), [np.empty(m.threads, np.float32) for _ in range(4)]
    a, right, c = _elements(registers[:4], match[2]), _elements(registers[4:6], match[3]), registers[6:]
    assert k * NUMPY[match[2]].itemsize == SLICE
    for warp in range(0, m.threads, 32):
        lanes = slice(warp, warp + 32)
        g, t = m.tid[lanes] % 32 // 4, m.tid[lanes] % 4
        A, B = np.zeros((16, k)), np.zeros((8, k))
        _fill(A, a, g, t, lanes)
        _fill(B, right, g, t, lanes)
        D = A @ B.T
        for i in range(4):
            out[i][lanes] = D[g + i // 2 * 8, 2 * t + i % 2] + c[i].array[lanes]
    return Struct([Register(f32, x) for x in out])


def _operand(m, descriptor, mn_rows, k_major, dtype):
    """The (mn_rows, 32 bytes) slice that a wgmma matrix descriptor names (PTX ISA, asynchronous warpgroup matrix shared memory
    layout): swizzled atoms of eight rows, `stride` bytes from atom to atom, `leading` bytes from panel to panel."""
    bits, size = int(descriptor.array[0]), dtype.itemsize
    assert (descriptor.array == bits).all(), "a descriptor must be the same in the whole warpgroup"
    start, leading, stride = (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
    width = {1: 128, 2: 64, 3: 32}[bits >> 62]
    mn, k = np.arange(mn_rows)[:, None], np.arange(SLICE // size)[None, :]
    if k_major:
        address = start + mn // 8 * stride + mn % 8 * width + size * k
    else:
        assert size == 2, "only 2-byte operands are transposed"
        address = start + k // 8 * stride + k % 8 * width + 2 * mn // width * leading + 2 * mn % width
    address ^= (address >> 7 & width // 16 - 1) << 4
    return m.shared.view(dtype)[address // size].astype(np.float64)


def wgmma(m, match, *args):
    """m64 n k of 32 bytes: A from shared memory, or each warp's sixteen rows of it as fragments of mma."""
    scale, n, k, *kinds, rest_of_text = match.groups()
    (left, right), n, registers = (NUMPY[kind] for kind in kinds), int(n), int(n) // 2
    acc, rest = args[:registers], args[registers:]
    group, lane, warp = m.tid // 128, m.tid % 32, m.tid // 32 % 4
    assert (group == 0).all() and int(k) * left.itemsize == int(k) * right.itemsize == SLICE
    row, transposed = 16 * warp + lane // 4, rest_of_text.split(", ")[2:]
    assert len(transposed) == ((2 if len(rest) == 2 else 1) if right.itemsize == 2 else 0)
    if len(rest) == 5:
        a = np.zeros((64, int(k)))
        _fill(a, _elements(rest[:4], kinds[0]), row, lane % 4, slice(None))
    else:
        a = _operand(m, rest[0], 64, transposed[:1] != ["1"], left)
    b = _operand(m, rest[-1], n, transposed[-1:] != ["1"], right)
    d = a @ b.T
    out = []
    for i in range(registers):
        piece = d[row + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2]
        out.append(Register(f32, piece + acc[i].array if int(scale) else piece))
    return Struct(out)
