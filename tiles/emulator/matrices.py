"""Matrix instructions (PTX ISA, "Warp Level Matrix Multiply-Accumulate", "Asynchronous Warpgroup Level Matrix").

A wgmma's accumulators are pending until a wait covers its group: until then they can be copied to other registers and
accumulated to by the next wgmma, and nothing else. A wgmma reads shared memory as late as it may, at the wait.
"""

import functools

import numpy as np

from ..interpreter.shadow import Event
from ..layout import LANES, WARPGROUP
from .moves import address
from .table import TYPES, means, operand
from .text import Imm, Reg

SLICE = 32  # bytes along k that one instruction multiplies
ROW = 16  # bytes of a row of an 8 x 8 matrix
LANE = np.arange(LANES)


# ---- ldmatrix, stmatrix --------------------------------------------------------------------------------------------
def _matrices(w, count, instr):
    """The bytes (count, 8 rows, 16) of the matrices that ldmatrix loads: lanes 0 to 7 have the addresses of the first one's
    rows, lanes 8 to 15 those of the second, and so on."""
    w.converged(instr.opcode)
    mask, full = w.mask, w.full
    w.mask = 8 * count > LANE
    rows = w.read_shared(address(w, instr.operands[1], np.uint32), ROW)
    w.mask, w.full = mask, full
    return rows.reshape(count, 8, ROW)


@means(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _(match, w, instr):
    targets = instr.operands[0] if isinstance(instr.operands[0], list) else [instr.operands[0]]
    for dst, rows in zip(targets, _matrices(w, int(match[1]), instr), strict=True):
        matrix = rows.view(np.uint16)
        if match[2]:
            matrix = np.ascontiguousarray(matrix.T)
        w.set(dst, matrix.reshape(LANES, 2).view(np.uint32)[:, 0])


@means(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _(match, w, instr):
    w.converged(instr.opcode)
    where, values = instr.operands
    values = values if isinstance(values, list) else [values]
    matrices = []
    for value in values:
        matrix = w.get(value)[:, None].view(np.uint16).reshape(8, 8)
        matrices.append(matrix.T if match[2] else matrix)
    mask, full = w.mask, w.full
    w.mask = 8 * len(values) > LANE
    rows = np.ascontiguousarray(np.concatenate(matrices))
    w.write_shared(address(w, where, np.uint32), rows.view(np.uint8).reshape(-1, ROW))
    w.mask, w.full = mask, full


# ---- mma -----------------------------------------------------------------------------------------------------------
def _elements(w, registers, kind):
    """The elements of fragments, as float64 (register, lane, element of the register)."""
    raw = np.array([w.get(r) for r in registers])
    if kind == "tf32" and np.count_nonzero(raw & np.uint32(0x1FFF)):
        raise w.hazard("a number is not rounded to tf32: the tensor core ignores its last 13 bits", "language")
    return raw[..., None].view(TYPES[kind]).astype(np.float64).reshape(len(registers), LANES, -1)


def _fragment(elements, rows):
    """The matrix (8 * rows, k) that a fragment of A (rows = 2) or B (rows = 1) holds. The s elements of a lane's first register
    lie at k = s t, ..., s t + s - 1, where t is the lane's index in its group of four; those of the second register eight rows
    below (only of A); those of the next ones 4 s further along k."""
    count, _, s = elements.shape
    out = np.empty(8 * rows * (count // rows * 4 * s))
    out[_fragment_indices(count, s, rows)] = elements
    return out.reshape(8 * rows, -1)


@functools.cache
def _fragment_indices(count, s, rows):
    """The flat indices, in the matrix, of a fragment's elements (register, lane, element of the register)."""
    i, h = np.arange(count)[:, None, None], np.arange(s)
    return (LANE[:, None] // 4 + i % rows * 8) * (count // rows * 4 * s) + s * (LANE[:, None] % 4 + i // rows * 4) + h


def _accumulators(product):
    """A product of 16 rows as accumulator registers (register, lane): a lane's first two hold a pair of columns of one row, the
    next two the same of the row eight below, and so on for the next eight columns."""
    return product.ravel()[_accumulator_indices(product.shape[1])]


@functools.cache
def _accumulator_indices(columns):
    """The flat indices, in such a product, of the accumulators (register, lane)."""
    i = np.arange(columns // 2)[:, None]
    return (LANE // 4 + i // 2 % 2 * 8) * columns + i // 4 * 8 + LANE % 4 * 2 + i % 2


@means(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32")
def _(_, w, instr):
    w.converged("mma.sync")
    out, a, b, c = instr.operands
    left, right = (_fragment(_elements(w, x, "s8"), rows) for x, rows in ((a, 2), (b, 1)))
    added = np.array([w.get(x) if x.__class__ is Reg else operand(x, np.uint32)(w) for x in c], np.uint32)
    sums = _accumulators(left @ right.T).astype(np.int32).view(np.uint32) + added
    for dst, value in zip(out, sums, strict=True):
        w.set(dst, value)


@means(r"mma\.sync\.aligned\.m16n8k(4|8|16|32)\.row\.col\.f32\.(bf16|f16|tf32|e4m3|e5m2)\.(bf16|f16|tf32|e4m3|e5m2)\.f32")
def _(match, w, instr):
    w.converged("mma.sync")
    out, a, b, c = instr.operands
    left, right = (_fragment(_elements(w, x, dtype), rows) for x, dtype, rows in ((a, match[2], 2), (b, match[3], 1)))
    sums = _accumulators(left @ right.T) + np.array([_bits(w, x) for x in c]).view(np.float32)
    for dst, value in zip(out, sums.astype(np.float32).view(np.uint32), strict=True):
        w.set(dst, value)


def _bits(w, source):
    """The bits of an fp32 operand, a register or a literal."""
    return w.get(source) if source.__class__ is Reg else operand(source, np.float32)(w).view(np.uint32)


# ---- wgmma ---------------------------------------------------------------------------------------------------------
class WgmmaRegister:
    """An accumulator register of a wgmma. value: None while the wgmma is pending."""

    def __init__(self, mma, index):
        self.mma, self.index, self.value = mma, index, None

    @property
    def place(self):
        """The place in the program of the wgmma that writes the register."""
        return self.mma.place


class WarpWgmma:
    """A warp's part of a wgmma, 16 rows. compute: multiplies the operands, from registers and shared memory. a_registers:
    {slot: value} of A's registers, which must not change before the wait."""

    def __init__(self, place, registers, compute, a_registers):
        self.place, self.compute, self.a_registers = place, compute, a_registers
        self.results = [WgmmaRegister(self, k) for k in range(registers)]

    def finish(self):
        """Compute the product, and give the accumulator registers their values."""
        for result, value in zip(self.results, self.compute(), strict=True):
            result.value = value


def _cells(w, descriptor, rows, k_major, size):
    """The addresses (row, element along k, byte) of these rows of an operand's slice of 32 bytes along k (PTX ISA, "Matrix
    descriptor"): swizzled atoms of eight rows, `stride` bytes from atom to atom, `leading` bytes from panel to panel. k_major:
    k is the contiguous axis. size: bytes of an element. A Hazard if some do not lie in shared memory."""
    bits = operand(descriptor, np.uint64)(w)
    if np.count_nonzero(bits != bits[0]):
        raise w.hazard("the lanes' descriptors differ", "divergence")
    if not k_major and size != 2:
        raise w.hazard("only operands of 2 bytes are read transposed", "language")
    cells, first, end = _cells_of_descriptor(int(bits[0]), rows, k_major, size)
    w.check_range(first, end, 1)
    return cells


@functools.lru_cache(512)  # loops and the warps of a warpgroup read the same tiles
def _cells_of_descriptor(bits, rows, k_major, size):
    """(those addresses, the first of them, the one behind the last)"""
    start, leading, stride = (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
    width = {0: 16, 1: 128, 2: 64, 3: 32}[bits >> 62]
    mn, k = np.arange(rows.start, rows.stop)[:, None], np.arange(SLICE // size)[None, :]
    if k_major:
        addresses = start + mn // 8 * stride + mn % 8 * width + size * k
    else:
        addresses = start + k // 8 * stride + k % 8 * width + 2 * mn // width * leading + 2 * mn % width
    addresses = addresses ^ (addresses >> 7 & width // 16 - 1) << 4
    cells = addresses[..., None] + np.arange(size)
    cells.setflags(write=False)
    return cells, int(cells.min()), int(cells.max()) + 1


@means(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.[fs]32\.(bf16|f16|tf32|e4m3|e5m2|s8)\.(bf16|f16|tf32|e4m3|e5m2|s8)")
def _(match, w, instr):
    n, k, left, right = int(match[1]), int(match[2]), match[3], match[4]
    acc, a, b, scale, *numbers = instr.operands
    size = np.dtype(TYPES[right]).itemsize
    w.converged("wgmma")
    signs, transposed = [int(x.text) for x in numbers[:2]] or [1, 1], [int(x.text) for x in numbers[2:]]
    sums_type = np.int32 if left == "s8" else np.float32
    if k * size != SLICE or len(acc) != n // 2:
        raise w.hazard(f"{instr.opcode} with {len(acc)} registers", "language")
    w.check_collective(f"wgmma {instr.number}")
    accumulate = operand(scale, np.bool_)(w)
    if accumulate.any() != accumulate.all():
        raise w.hazard("the lanes disagree on whether the wgmma accumulates", "divergence")
    adds = [_accumulator(w, reg) for reg in acc] if accumulate[0] else None
    a_in_registers = isinstance(a, list)
    w.mmas.append(None)
    agent, time = w.block.mma_agents[w.index], len(w.mma_groups) + 1
    knowledge, shadow = w.knowledge(asynchronous=True), w.block.shadow
    b_cells = _cells(w, b, range(n), transposed[-1:] != [1], size)
    reads = [b_cells]
    if a_in_registers:
        a_matrix = _fragment(_elements(w, [_check_fenced(w, reg) for reg in a], left), 2)
    else:
        row = 16 * (w.index % WARPGROUP)
        a_cells = _cells(w, a, range(row, row + 16), transposed[:1] != [1], size)
        reads.append(a_cells)
    event = Event("read", "the end of the mma", w.place())
    for cells in reads:
        w._check_access(shadow.unreadable(knowledge, cells), "mma reads shared memory")
        shadow.note_read(agent, time, cells, event)

    def matrix(cells, dtype):
        return np.ascontiguousarray(shadow.bytes[cells]).view(TYPES[dtype])[..., 0].astype(np.float64)

    def compute():
        rows = a_matrix if a_in_registers else matrix(a_cells, left)
        product = signs[0] * rows @ (signs[1] * matrix(b_cells, right).T)
        sums = _accumulators(product)
        if adds:
            sums += np.stack([x.value if isinstance(x, WgmmaRegister) else x for x in adds]).view(sums_type)
        return sums.astype(sums_type).view(np.uint32)

    a_registers = {reg.slot: w.r[reg.slot] for reg in a} if a_in_registers else {}
    mma = w.mmas[-1] = WarpWgmma(w.place(), n // 2, compute, a_registers)
    for reg, result in zip(acc, mma.results, strict=True):
        w.r[reg.slot] = result
        w.pending.add(reg.slot)


def _accumulator(w, reg):
    """An accumulator that a wgmma adds to: a pending WgmmaRegister of the one before, or a value."""
    value = w.r[reg.slot]
    return value if isinstance(value, WgmmaRegister) else w.get(_check_fenced(w, reg))


def _check_fenced(w, reg: Reg):
    """The register itself. Raises a Hazard if something other than a wgmma has written it since the last wgmma.fence."""
    if id(w.get(reg)) not in w.fenced_ids():
        raise w.hazard("wgmma reads a register that was written after the last wgmma.fence", "fence")
    return reg


@means(r"wgmma\.fence\.sync\.aligned")
def _(_, w, instr):
    w.converged("wgmma.fence")
    w.fence_registers()


@means(r"wgmma\.commit_group\.sync\.aligned")
def _(_, w, instr):
    w.converged("wgmma.commit_group")
    w.check_collective("wgmma.commit_group")
    w.mma_groups.append(w.mmas)
    w.mmas = []


@means(r"wgmma\.wait_group\.sync\.aligned")
def _(_, w, instr):
    w.converged("wgmma.wait_group")
    newer: Imm = instr.operands[0]
    done = max(0, len(w.mma_groups) - int(newer.text))
    group = w.block.warp_list[w.group * WARPGROUP : (w.group + 1) * WARPGROUP]
    w.wait_until(
        lambda: all(len(other.mma_groups) >= done for other in group),
        lambda: "the other warps of its warpgroup to issue the mma",
    )
    for mmas in w.mma_groups[w.mmas_done : done]:
        for mma in mmas:
            if any(w.r[slot] is not value for slot, value in mma.a_registers.items()):
                raise w.hazard("A's registers were written between a wgmma and this wait for it", "in flight", mma.place)
            mma.finish()
    w.mmas_done = max(w.mmas_done, done)
    agent = w.block.mma_agents[w.index]
    w.clocks[:, agent] = np.maximum(w.clocks[:, agent], done)
    w.resolve_pending()
