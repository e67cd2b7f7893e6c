"""What PTX instructions do, written down from the PTX ISA alone: arithmetic, memory, TMA's boxes. (Matrices: matrices.py.)

`PTX` maps the text of an instruction to its effect on a machine (lanes.py) whose registers hold one entry a thread. Nothing
here looks at tiles/layout.py: what the two say must agree, and the ops' tests are where it shows.
"""

import math
import re

import ml_dtypes
import numpy as np
from matrices import ldmatrix, mma, movmatrix, stmatrix, wgmma
from registers import NUMPY, TYPES, Register, Struct

from tiles import sv
from tiles.builder import f32, i32

SIZES = {"f32": 4, "b32": 4, "b16": 2, "b8": 1}
TYPED = {"f32": f32, "b32": i32}


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


def _pack_four(m, match, *four):
    """cvt.rn.satfinite to fp8, twice two."""
    to = NUMPY[match[1]]
    end = np.float32(ml_dtypes.finfo(to).max)
    bits = [np.clip(v.array, -end, end).astype(to).view(np.uint8).astype(np.uint32) for v in four]
    return Register(i32, sum(x << 8 * k for k, x in enumerate(bits)))


def _unpack_halves(m, match, x):
    half = (x.array >> (16 if match[2] == "hi" else 0) & 0xFFFF).astype(np.uint16)
    return Register(i32, half[:, None].view(NUMPY[match[1]]).astype(np.float16).view(np.uint32)[:, 0])


def _to_tf32(m, _, x):
    """Ten bits of mantissa after the first; half a unit goes away from zero."""
    mantissa, exponent = np.frexp(x.array.astype(np.float64))
    scale = np.exp2(np.minimum(11, exponent + 136.0))
    rounded = np.copysign(np.floor(np.abs(mantissa) * scale + 0.5), mantissa) / scale
    numbers = np.where(np.isfinite(x.array), np.ldexp(rounded, exponent), x.array).astype(np.float32)
    return Register(i32, numbers.view(np.uint32))


def _permute(m, match, x, y):
    """prmt: four of eight bytes."""
    both = np.concatenate([r.array[:, None].view(np.uint8) for r in (x, y)], axis=1)
    chosen = [int(match[1]) >> 4 * k & 7 for k in range(4)]
    return Register(i32, np.ascontiguousarray(both[:, chosen]).view(np.uint32)[:, 0])


def _fma_pair(m, match, *registers):
    x, y, z = (r.array[:, None].view(NUMPY[match[1]]).astype(np.float64) for r in registers)
    return Register(i32, (x * y + z).astype(NUMPY[match[1]]).view(np.uint32)[:, 0])


def _load_global(m, match, address, guard):
    size, out = SIZES[match[1]], np.zeros(m.threads, np.uint32)
    active = m.active & (guard.array != 0)
    if active.any():
        memory, at = m.reach(address.array[active], size)
        out[active] = sum(memory[at + k].astype(np.uint32) << 8 * k for k in range(size))
    return Register(f32, out.view(np.float32)) if size == 4 else Register(i32, out | out << 16 if size == 2 else out)


def _store_global(m, match, address, value, guard):
    active = m.active & (guard.array != 0)
    if active.any():
        size, bits = SIZES[match[1]], value.array.view(np.uint32)[active]
        memory, at = m.reach(address.array[active], size)
        for k in range(size):
            memory[at + k] = bits >> 8 * k & 0xFF


def _store_chunk(m, _, address, *words_and_guard):
    *words, guard = words_and_guard
    active = m.active & (guard.array != 0)
    if active.any():
        size = 4 * len(words)
        assert not (address.array[active] % size).any(), f"a {size}-byte access needs an address that is a multiple of {size}"
        memory, at = m.reach(address.array[active], size)
        for k, word in enumerate(words):
            for byte in range(4):
                memory[at + 4 * k + byte] = word.array[active] >> 8 * byte & 0xFF


def _store_halves(m, _, address, word, guard):
    """A register's two halves, one after the other, each by an access of 2 bytes."""
    active = m.active & (guard.array != 0)
    if active.any():
        for half in (0, 1):
            memory, at = m.reach(address.array[active] + np.uint64(2 * half), 2)
            for byte in range(2):
                memory[at + byte] = word.array[active] >> 16 * half + 8 * byte & 0xFF


def _load_chunk(m, _, address, guard):
    out, active = np.zeros((4, m.threads), np.uint32), m.active & (guard.array != 0)
    if active.any():
        assert not (address.array[active] % 16).any(), "a 16-byte access needs an address that is a multiple of 16"
        memory, at = m.reach(address.array[active], 16)
        for k in range(16):
            out[k // 4, active] |= memory[at + k].astype(np.uint32) << 8 * (k % 4)
    return Struct([Register(i32, word) for word in out])


def _store_pair(m, _, address, x, y):
    m.passes("st.shared.v2", address.array, 8)
    words = m.shared.view(np.float32)
    words[address.array[m.active] // 4] = x.array[m.active]
    words[address.array[m.active] // 4 + 1] = y.array[m.active]


def _load_pair(m, _, address):
    m.passes("ld.shared.v2", address.array, 8)
    words = m.shared.view(np.float32)
    return Struct([Register(f32, words[address.array // 4 + k]) for k in (0, 1)])


def _store_four(m, _, address, x):
    """st.shared.v4 of one register four times."""
    for k in range(4):
        m.shared.view(np.uint32)[address.array[m.active] // 4 + k] = x.array.view(np.uint32)[m.active]


def _store_word(m, match, address, x):
    """st.shared of 4 bytes, of the low or high half of a register, or of its lowest byte."""
    active = m.active
    m.passes(f"st.shared.{match[1]}", address.array, SIZES[match[1]])
    if match[1] == "b8":
        m.shared[address.array[active]] = x.array[active] & 0xFF
        return
    if match[1] == "b16":
        half = x.array[active] >> (16 if match[2] == "hi" else 0) & 0xFFFF
        m.shared.view(np.uint16)[address.array[active] // 2] = half
    else:
        m.shared.view(np.uint32)[address.array[active] // 4] = x.array.view(np.uint32)[active]


def _load_word(m, match, address):
    """ld.shared of 4 bytes, of 2 into both halves of a register, or of one."""
    m.passes(f"ld.shared.{match[1]}", address.array, SIZES[match[1]])
    if match[1] == "b8":
        return Register(i32, m.shared[address.array].astype(np.uint32))
    if match[1] == "b16":
        half = m.shared.view(np.uint16)[address.array // 2].astype(np.uint32)
        return Register(i32, half | half << 16)
    return Register(TYPED[match[1]], m.shared.view(TYPES[TYPED[match[1]]])[address.array // 4])


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


def _copy_elements(m, match, to, source, begin, end, guard):
    """Loads of 2 bytes, each where both its comparisons hold, packed and stored 16 bytes at a time."""
    halves, words = np.zeros((8, m.threads), np.uint32), np.zeros((4, m.threads), np.uint32)
    active = m.active & (guard.array != 0)
    begin, end = begin.array.view(np.int32), end.array.view(np.int32)
    for low, high, into, away in re.findall(r"2, (\d+), p;.*\n.*3, (\d+), q;\n.*\n.* e(\d), \[\$1\+(\d+)\]", match[1]):
        inside = active & (begin <= int(low)) & (end > int(high))
        if inside.any():
            address = source.array[inside] + np.uint64(away)
            assert not (address % 2).any(), "an element whose address is odd"
            memory, at = m.reach(address, 2)
            halves[int(into), inside] = memory[at] | memory[at + 1].astype(np.uint32) << 8
    for word, one, other in re.findall(r"w(\d), \{e(\d), e(\d)\}", match[2]):
        words[int(word)] = halves[int(one)] | halves[int(other)] << 16
    m.passes("st.shared.v4", to.array, 16)
    assert not (to.array[active] % 16).any(), "a 16-byte store to an address that is not aligned"
    for k, word in enumerate(words):
        m.shared.view(np.uint32)[to.array[active] // 4 + k] = word[active]


def _pass_through(m, _, *registers):
    return Struct(registers) if registers else None


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
                    memory[cells[r, c]] = tile.dtype.copied(array[tuple(index)])
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
    r"cvt.rn.satfinite.(e4m3|e5m2)x2.f32 lo, \$2, \$1;\ncvt.rn.satfinite.\1x2.f32 hi, \$4, \$3;\nmov.b32 \$0": _pack_four,
    r"cvt.rn.f16x2.(e4m3|e5m2)x2 \$0, (lo|hi);": _unpack_halves,
    r"^cvt.rna.tf32.f32 \$0, \$1;$": _to_tf32,
    r"^prmt.b32 \$0, \$1, \$2, (\d+);$": _permute,
    r"^fma.rn.(bf16|f16)x2 \$0, \$1, \$2, \$3;$": _fma_pair,
    r"^shfl.sync.bfly.b32 \$0, \$1, (\d+), 31, -1;$": _shuffle_xor,
    r"vote.sync.ballot.b32 \$0, p, -1;": _ballot,
    r"bar.red.(or|and).pred q, \$1, \$2, p;": _barrier_vote,
    r"^shfl.sync.idx.b32 \$0, \$1, \$2, 31, -1;$": _shuffle,
    r"^movmatrix.sync.aligned.m8n8.trans.b16 \$0, \$1;$": movmatrix,
    r"^mov.b32 \$0, \$1;$": lambda m, _, x: x,
    r"^shfl.sync.idx.b32 \$0, \$1, 0, 31, -1;$": lambda m, _, x: Register(x.type, x.array[m.tid // 32 * 32]),
    r"@p ld.global.(f32|b16|b8) \S+ \[\$1\];": _load_global,
    r"@p st.global.b16 \[\$0\], lo;\n@p st.global.b16 \[\$0\+2\], hi;\}$": _store_halves,
    r"@p st.global.(f32|b16|b8) \[\$0\], (?:\$1|lo);": _store_global,
    r"@p st.global.(?:v4.b32 \[\$0\], \{\$1, \$2, \$3, \$4\}|b32 \[\$0\], \$1);": _store_chunk,
    r"@p ld.global.v4.b32 \{\$0, \$1, \$2, \$3\}, \[\$4\];": _load_chunk,
    r"^st.shared.v2.f32 \[\$0\], \{\$1, \$2\};$": _store_pair,
    r"^ld.shared.v2.f32 \{\$0, \$1\}, \[\$2\];$": _load_pair,
    r"^st.shared.v4.b32 \[\$0\], \{\$1, \$1, \$1, \$1\};$": _store_four,
    r"^st.shared.(f32|b32|b8) \[\$0\], \$1;$": _store_word,
    r"st.shared.(b16) \[\$0\], (lo|hi);": _store_word,
    r"ld.shared.(f32|b32|b16|b8) (?:\$0|x), \[\$1\];": _load_word,
    r"^mma.sync.aligned.m16n8k(8|16|32).row.col.f32.(bf16|f16|tf32|e4m3|e5m2).(\w+).f32 ": mma,
    r"@p cp.async.(c[ag]).shared.global \[\$0\], \[\$1\], (4|8|16), \$2;": _copy_async,
    r"^\{.reg .pred p, q;\n.reg .b16 e<8>;\n.reg .b32 w<4>;\nsetp.ne.u32 p, \$4, 0;\n"
    r"((?:setp.le.and.s32 q, \$2, \d+, p;\nsetp.gt.and.s32 q, \$3, \d+, q;\n"
    r"mov.b16 e\d, 0;\n@q ld.global.b16 e\d, \[\$1\+\d+\];\n){8})((?:mov.b32 w\d, \{e\d, e\d\};\n){4})"
    r"@p st.shared.v4.b32 \[\$0\], \{w0, w1, w2, w3\};\}$": _copy_elements,
    r"^cp.async.(commit_group|wait_group \d+);$": lambda m, _: None,
    r"^stmatrix.sync.aligned.m8n8.x4(.trans)?.shared.b16 \[\$0\], \{\$1, \$2, \$3, \$4\};$": stmatrix,
    r"^ldmatrix.sync.aligned.m8n8.x4(.trans)?.shared.b16 \{\$0, \$1, \$2, \$3\}, \[\$4\];$": ldmatrix,
    r"^wgmma.(fence|wait_group|commit_group)": _pass_through,
    r"p, (\d), 0;\nwgmma.mma_async.sync.aligned.m64n(\d+)k(\d+).f32.(bf16|f16|tf32|e4m3|e5m2).(\w+) .*, p, (.*);\n": wgmma,
    r"cp.async.bulk.tensor.\dd.shared::(?:cta|cluster)": lambda m, _, to, source, bar, *at: _tma(m, None, True, source, at, to),
    r"async.bulk.tensor.\dd.global.shared::cta(?:.(add|min|max))?.tile": lambda m, match, to, tile, *at: _tma(
        m, match[1], False, to, at, tile
    ),
    r"^cp.async.bulk.prefetch.tensor.\dd.L2.global.tile \[\$0, .*\];$": lambda m, _, source, *at: _box(m, source, at) and None,
    r"^cp.async.bulk.(commit_group|wait_group)|^bar.|^fence|mbarrier": lambda m, _, *args: None,
}  # fmt: skip
