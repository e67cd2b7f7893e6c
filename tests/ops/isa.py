"""What PTX instructions do, written down from the PTX ISA alone: matrix fragments, ldmatrix, wgmma's descriptors, TMA's boxes.

`PTX` maps the text of an instruction to its effect on a machine (lanes.py) whose registers hold one entry a thread. Nothing
here looks at tiles/layout.py: what the two say must agree, and the ops' tests are where it shows.
"""

import math

import numpy as np
from llvmlite import ir

from tiles import bf16, fp16, sv
from tiles.plumbing import f32, i1, i32, i64

TYPES = {f32: np.float32, i32: np.uint32, i64: np.uint64, i1: np.bool_, ir.DoubleType(): np.float64, ir.HalfType(): np.float16}
TYPED = {"f32": f32, "b32": i32}
NUMPY = {"bf16": bf16.np, "f16": fp16.np}


class Register:
    """One LLVM value: its type, and an array with an entry a thread."""

    def __init__(self, type, array):
        self.type, self.array = type, np.asarray(array, TYPES[type])


class Struct:
    """Several registers."""

    def __init__(self, parts):
        self.parts, self.type = list(parts), ir.LiteralStructType([p.type for p in parts])


def flush(x):
    """.ftz: numbers below 2 ** -126 are 0."""
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


def _unary(function):
    return lambda m, _, x: Register(f32, flush(function(flush(x.array)).astype(np.float32)))


def _shuffle_xor(m, match, x):
    return Register(x.type, x.array[m.tid ^ int(match[1])])


def _shuffle(m, _, x, lane):
    return Register(x.type, x.array[m.tid // 32 * 32 + lane.array % 32])


def _ballot(m, _, flag):
    bits = (flag.array.reshape(-1, 32) != 0) @ (1 << np.arange(32))
    return Register(i32, np.repeat(bits, 32))


def _barrier_vote(m, match, _, threads, flag):
    votes = (flag.array != 0).reshape(-1, threads.array[0])
    return Register(i32, np.repeat((np.any if match[1] == "or" else np.all)(votes, axis=1), threads.array[0]))


def _pack(m, match, high, low):
    to = NUMPY[match[1]]
    bits = [v.array.astype(to).view(np.uint16).astype(np.uint32) for v in (low, high)]
    return Register(i32, bits[0] | bits[1] << 16)


def _fma_pair(m, match, *registers):
    x, y, z = (r.array[:, None].view(NUMPY[match[1]]).astype(np.float64) for r in registers)
    return Register(i32, (x * y + z).astype(NUMPY[match[1]]).view(np.uint32)[:, 0])


def _load_global(m, match, address, guard):
    size, out = (4 if match[1] == "f32" else 2), np.zeros(m.threads, np.uint32)
    active = m.active & (guard.array != 0)
    if active.any():
        memory, at = m.reach(address.array[active], size)
        out[active] = sum(memory[at + k].astype(np.uint32) << 8 * k for k in range(size))
    return Register(f32, out.view(np.float32)) if size == 4 else Register(i32, out | out << 16)


def _store_global(m, match, address, value, guard):
    active = m.active & (guard.array != 0)
    if active.any():
        size, bits = (4 if match[1] == "f32" else 2), value.array.view(np.uint32)[active]
        memory, at = m.reach(address.array[active], size)
        for k in range(size):
            memory[at + k] = bits >> 8 * k & 0xFF


def _store_chunk(m, _, address, *words_and_guard):
    *words, guard = words_and_guard
    active = m.active & (guard.array != 0)
    if active.any():
        assert not (address.array[active] % 16).any(), "a 16-byte access needs an address that is a multiple of 16"
        memory, at = m.reach(address.array[active], 16)
        for k, word in enumerate(words):
            for byte in range(4):
                memory[at + 4 * k + byte] = word.array[active] >> 8 * byte & 0xFF


def _load_chunk(m, _, address, guard):
    out, active = np.zeros((4, m.threads), np.uint32), m.active & (guard.array != 0)
    if active.any():
        assert not (address.array[active] % 16).any(), "a 16-byte access needs an address that is a multiple of 16"
        memory, at = m.reach(address.array[active], 16)
        for k in range(16):
            out[k // 4, active] |= memory[at + k].astype(np.uint32) << 8 * (k % 4)
    return Struct([Register(i32, word) for word in out])


def _store_pair(m, _, address, x, y):
    m.passes("st.shared.v2", address.array[m.active], 8)
    words = m.shared.view(np.float32)
    words[address.array[m.active] // 4] = x.array[m.active]
    words[address.array[m.active] // 4 + 1] = y.array[m.active]


def _load_pair(m, _, address):
    m.passes("ld.shared.v2", address.array, 8)
    words = m.shared.view(np.float32)
    return Struct([Register(f32, words[address.array // 4 + k]) for k in (0, 1)])


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


def _stmatrix(m, match, address, *registers):
    if not m.active.any():
        return
    if match[1]:
        for cells, register in zip(_transposed_cells(m, "stmatrix", address), registers, strict=True):
            for h in (0, 1):
                m.shared.view(np.uint16)[cells[h]] = register.array >> 16 * h & 0xFFFF
        return
    for cell, register in zip(_matrix_cells(m, "stmatrix", address), registers, strict=True):
        m.shared.view(np.uint32)[cell] = register.array


def _ldmatrix(m, match, address):
    if match[1]:
        halves = m.shared.view(np.uint16)
        cells = _transposed_cells(m, "ldmatrix", address)
        return Struct([Register(i32, halves[lo] | halves[hi].astype(np.uint32) << 16) for lo, hi in cells])
    return Struct([Register(i32, m.shared.view(np.uint32)[cell]) for cell in _matrix_cells(m, "ldmatrix", address)])


def _store_four(m, _, address, x):
    """st.shared.v4 of one register four times."""
    for k in range(4):
        m.shared.view(np.uint32)[address.array[m.active] // 4 + k] = x.array.view(np.uint32)[m.active]


def _store_word(m, match, address, x):
    """st.shared of 4 bytes, or of the low or high half of a register."""
    active = m.active
    if match[1] == "b16":
        half = x.array[active] >> (16 if match[2] == "hi" else 0) & 0xFFFF
        m.shared.view(np.uint16)[address.array[active] // 2] = half
    elif active.any():
        m.passes(f"st.shared.{match[1]}", address.array[active], 4)
        m.shared.view(np.uint32)[address.array[active] // 4] = x.array.view(np.uint32)[active]


def _load_word(m, match, address):
    """ld.shared of 4 bytes, or of 2 into both halves of a register."""
    if match[1] == "b16":
        half = m.shared.view(np.uint16)[address.array // 2].astype(np.uint32)
        return Register(i32, half | half << 16)
    m.passes(f"ld.shared.{match[1]}", address.array, 4)
    return Register(TYPED[match[1]], m.shared.view(TYPES[TYPED[match[1]]])[address.array // 4])


def _mma(m, match, *registers):
    """PTX ISA, "Matrix Fragments for mma.m16n8k16": groupID g = lane / 4, t = lane % 4.
    A: a0 a1 at (g, 2t + {0, 1}), a2 a3 at g + 8, a4.. at k + 8; B: b0 b1 at k 2t + {0, 1}, n g, b2 b3 at k + 8; C: c0 c1 at
    (g, 2t + {0, 1}), c2 c3 at g + 8."""
    dtype, out = NUMPY[match[1]], [np.empty(m.threads, np.float32) for _ in range(4)]
    a, right, c = registers[:4], registers[4:6], registers[6:]
    for warp in range(0, m.threads, 32):
        lanes = slice(warp, warp + 32)
        g, t = m.tid[lanes] % 32 // 4, m.tid[lanes] % 4
        A, B = np.zeros((16, 16)), np.zeros((16, 8))
        for h in (0, 1):
            for i in range(4):
                A[g + i % 2 * 8, 2 * t + h + i // 2 * 8] = a[i].array[lanes][:, None].view(dtype)[:, h]
            for i in range(2):
                B[2 * t + h + 8 * i, g] = right[i].array[lanes][:, None].view(dtype)[:, h]
        D = A @ B
        for i in range(4):
            out[i][lanes] = D[g + i // 2 * 8, 2 * t + i % 2] + c[i].array[lanes]
    return Struct([Register(f32, x) for x in out])


def _copy_async(m, match, to, source, nbytes, guard):
    """Lands at once; what must not be read yet is the interpreter's business."""
    size = int(match[2])
    assert match[1] == ("cg" if size == 16 else "ca")
    m.passes("cp.async", to.array, size)
    for lane in np.flatnonzero(m.active & (guard.array != 0)):
        n, start = int(nbytes.array[lane]), int(to.array[lane])
        assert 0 <= n <= size and start % size == 0
        m.shared[start : start + size] = 0
        if n:
            address = source.array[lane : lane + 1]
            assert int(address[0]) % size == 0, "cp.async from an address that is not aligned"
            memory, at = m.reach(address, n)
            m.shared[start : start + n] = memory[at[0] : at[0] + n]


def _movmatrix(m, _, x):
    """An 8x8 matrix of 2-byte elements, lane L's at row L/4, columns 2(L%4) and 2(L%4)+1, transposed."""
    lane, row = m.tid % 32, m.tid // 32 * 8
    matrices = np.zeros((m.threads // 4, 8), np.uint16)
    for h in (0, 1):
        matrices[row + lane // 4, lane % 4 * 2 + h] = x.array >> 16 * h & 0xFFFF
    low, high = (matrices[row + lane % 4 * 2 + h, lane // 4].astype(np.uint32) for h in (0, 1))
    return Register(i32, low | high << 16)


def _pass_through(m, _, *registers):
    return Struct(registers) if registers else None


def _operand(m, descriptor, mn_rows, k_major, dtype):
    """The (mn_rows, 16) slice that a wgmma matrix descriptor names (PTX ISA, asynchronous warpgroup matrix shared memory
    layout): swizzled atoms of eight rows, `stride` bytes from atom to atom, `leading` bytes from panel to panel."""
    bits = int(descriptor.array[0])
    assert (descriptor.array == bits).all(), "a descriptor must be the same in the whole warpgroup"
    start, leading, stride = (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
    width = {1: 128, 2: 64, 3: 32}[bits >> 62]
    mn, k = np.arange(mn_rows)[:, None], np.arange(16)[None, :]
    if k_major:
        address = start + mn // 8 * stride + mn % 8 * width + 2 * k
    else:
        address = start + k // 8 * stride + k % 8 * width + 2 * mn // width * leading + 2 * mn % width
    address ^= (address >> 7 & width // 16 - 1) << 4
    return m.shared.view(dtype)[address // 2].astype(np.float64)


def _wgmma(m, match, *args):
    n, dtype, scale = int(match[2]), NUMPY[match[3]], int(match[1])
    registers = n // 2
    acc, rest = args[:registers], args[registers:]
    group, lane, warp = m.tid // 128, m.tid % 32, m.tid // 32 % 4
    assert (group == 0).all()
    row, transposed = 16 * warp + lane // 4, match[4].split(", ")[2:]
    if len(rest) == 5:
        a = np.zeros((64, 16))
        for i, register in enumerate(rest[:4]):
            halves = register.array[:, None].view(dtype).astype(np.float64)
            for h in (0, 1):
                a[row + i % 2 * 8, i // 2 * 8 + lane % 4 * 2 + h] = halves[:, h]
    else:
        a = _operand(m, rest[0], 64, transposed[0] == "0", dtype)
    b = _operand(m, rest[-1], n, transposed[-1] == "0", dtype)
    d = a @ b.T
    out = []
    for i in range(registers):
        piece = d[row + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2]
        out.append(Register(f32, piece + acc[i].array if scale else piece))
    return Struct(out)


def _box(m, handle, coordinates):
    """The array of a tensor map with columns last, its tile's type, and the box's coordinates, columns last."""
    source = m.tensors[int(handle.array[0])]
    spec, array = source.spec, source.array
    order = [a for a in range(array.ndim) if a != spec.cols] + [spec.cols]
    at = [int(c.array.view(np.int32)[0]) for c in coordinates][::-1]
    return array.transpose(order), spec.tile, 0 if spec.rows is None else order.index(spec.rows), at


def _panel_cells(tile, address):
    """Where each (row, column) of one panel lies in shared memory: TMA XORs address bits 4.. with bits 7.. ; not of vectors."""
    row, byte = np.arange(tile.rows)[:, None], np.arange(0, tile.width, tile.dtype.itemsize)[None, :]
    cells = address + row * tile.width + byte
    return cells if isinstance(tile, sv) else cells ^ (cells >> 7 & tile.width // 16 - 1) << 4


FOLDS = {"add": np.add, "min": np.fmin, "max": np.fmax}


def _tma(m, fold, load, handle, coordinates, address):
    if not m.active.any():
        return
    assert m.active.sum() == 1, "one thread starts a copy"
    thread = int(np.flatnonzero(m.active)[0])
    array, tile, rows_axis, at = _box(m, handle, coordinates)
    cells = _panel_cells(tile, int(address.array[thread])) // tile.dtype.itemsize
    memory = m.shared.view(tile.dtype.np)
    if load:
        memory[cells] = 0
    for r in range(tile.rows):
        for c in range(tile.panel_cols):
            index = list(at)
            index[rows_axis] += r
            index[-1] += c
            if all(0 <= i < size for i, size in zip(index, array.shape, strict=True)):
                if load:
                    memory[cells[r, c]] = array[tuple(index)]
                elif fold:
                    array[tuple(index)] = FOLDS[fold](array[tuple(index)], memory[cells[r, c]])
                else:
                    array[tuple(index)] = memory[cells[r, c]]


LLVM = {
    "llvm.nvvm.fmax.ftz.f": lambda x, y: flush(np.fmax(flush(x), flush(y))),
    "llvm.nvvm.fmin.ftz.f": lambda x, y: flush(np.fmin(flush(x), flush(y))),
    "llvm.fma.f32": lambda x, y, z: np.float64(x) * np.float64(y) + np.float64(z),
    "llvm.nvvm.fabs.f": np.abs,
    "__nv_erff": np.vectorize(math.erf),
}
PTX = {
    r"^mov.u32 \$0, %tid.x;$": lambda m, _: Register(i32, m.tid),
    r"^mov.u32 \$0, %ntid.x;$": lambda m, _: Register(i32, np.full(m.threads, m.threads)),
    r"^mov.u32 \$0, %(n?)ctaid.x;$": lambda m, match: Register(i32, np.full(m.threads, m.place[match[1] == "n"])),
    r"^ex2.approx.ftz.f32 \$0, \$1;$": _unary(np.exp2),
    r"^lg2.approx.ftz.f32 \$0, \$1;$": _unary(np.log2),
    r"^rcp.approx.ftz.f32 \$0, \$1;$": _unary(np.reciprocal),
    r"^sqrt.approx.ftz.f32 \$0, \$1;$": _unary(np.sqrt),
    r"^rsqrt.approx.ftz.f32 \$0, \$1;$": _unary(lambda x: np.reciprocal(np.sqrt(x))),
    r"^tanh.approx.f32 \$0, \$1;$": lambda m, _, x: Register(f32, np.tanh(x.array * np.float32(1 + 2**-12))),
    r"^cvt.rn.(bf16|f16)x2.f32 \$0, \$1, \$2;$": _pack,
    r"^fma.rn.(bf16|f16)x2 \$0, \$1, \$2, \$3;$": _fma_pair,
    r"^shfl.sync.bfly.b32 \$0, \$1, (\d+), 31, -1;$": _shuffle_xor,
    r"vote.sync.ballot.b32 \$0, p, -1;": _ballot,
    r"bar.red.(or|and).pred q, \$1, \$2, p;": _barrier_vote,
    r"^shfl.sync.idx.b32 \$0, \$1, \$2, 31, -1;$": _shuffle,
    r"^movmatrix.sync.aligned.m8n8.trans.b16 \$0, \$1;$": _movmatrix,
    r"^shfl.sync.idx.b32 \$0, \$1, 0, 31, -1;$": lambda m, _, x: Register(x.type, x.array[m.tid // 32 * 32]),
    r"@p ld.global.(f32|b16) \S+ \[\$1\];": _load_global,
    r"@p st.global.(f32|b16) \[\$0\], (?:\$1|lo);": _store_global,
    r"@p st.global.v4.b32 \[\$0\], \{\$1, \$2, \$3, \$4\};": _store_chunk,
    r"@p ld.global.v4.b32 \{\$0, \$1, \$2, \$3\}, \[\$4\];": _load_chunk,
    r"^st.shared.v2.f32 \[\$0\], \{\$1, \$2\};$": _store_pair,
    r"^ld.shared.v2.f32 \{\$0, \$1\}, \[\$2\];$": _load_pair,
    r"^st.shared.v4.b32 \[\$0\], \{\$1, \$1, \$1, \$1\};$": _store_four,
    r"^st.shared.(f32|b32) \[\$0\], \$1;$": _store_word,
    r"st.shared.(b16) \[\$0\], (lo|hi);": _store_word,
    r"ld.shared.(f32|b32|b16) (?:\$0|x), \[\$1\];": _load_word,
    r"^mma.sync.aligned.m16n8k16.row.col.f32.(bf16|f16)": _mma,
    r"@p cp.async.(c[ag]).shared.global \[\$0\], \[\$1\], (4|8|16), \$2;": _copy_async,
    r"^cp.async.(commit_group|wait_group \d+);$": lambda m, _: None,
    r"^stmatrix.sync.aligned.m8n8.x4(.trans)?.shared.b16 \[\$0\], \{\$1, \$2, \$3, \$4\};$": _stmatrix,
    r"^ldmatrix.sync.aligned.m8n8.x4(.trans)?.shared.b16 \{\$0, \$1, \$2, \$3\}, \[\$4\];$": _ldmatrix,
    r"^wgmma.(fence|wait_group|commit_group)": _pass_through,
    r"p, (\d), 0;\nwgmma.mma_async.sync.aligned.m64n(\d+)k16.f32.(bf16|f16).*, p, (.*);\n": _wgmma,
    r"cp.async.bulk.tensor.\dd.shared::cluster": lambda m, _, to, source, bar, *at: _tma(m, None, True, source, at, to),
    r"async.bulk.tensor.\dd.global.shared::cta(?:.(add|min|max))?.tile": lambda m, match, to, tile, *at: _tma(
        m, match[1], False, to, at, tile
    ),
    r"^cp.async.bulk.prefetch.tensor.\dd.L2.global.tile \[\$0, .*\];$": lambda m, _, source, *at: _box(m, source, at) and None,
    r"^cp.async.bulk.(commit_group|wait_group)|^bar.|^fence|mbarrier": lambda m, _, *args: None,
}  # fmt: skip
