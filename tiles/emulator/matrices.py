"""What the matrix instructions do (PTX ISA, "Warp Level Matrix Multiply-Accumulate", "Asynchronous Warpgroup Level Matrix").

A wgmma's accumulators are promises until a wait covers its group: they can be moved and handed to the next wgmma, and nothing
else. It reads shared memory when it must, at the wait.
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
def _matrices(w, count, at):
    """The bytes (count, 8 rows, 16) at the addresses that lanes 0..7, 8..15, ... give."""
    w.converged(at.opcode)
    mask, full = w.mask, w.full
    w.mask = 8 * count > LANE
    rows = w.read_shared(address(w, at.operands[1], np.uint32), ROW)
    w.mask, w.full = mask, full
    return rows.reshape(count, 8, ROW)


@means(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _(match, w, at):
    targets = at.operands[0] if isinstance(at.operands[0], list) else [at.operands[0]]
    for to, rows in zip(targets, _matrices(w, int(match[1]), at), strict=True):
        matrix = rows.view(np.uint16)
        if match[2]:
            matrix = np.ascontiguousarray(matrix.T)
        w.set(to, matrix.reshape(LANES, 2).view(np.uint32)[:, 0])


@means(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
def _(match, w, at):
    w.converged(at.opcode)
    where, values = at.operands
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
    """(register, lane, element in it) of fragments."""
    raw = np.array([w.get(r) for r in registers])
    if kind == "tf32" and np.count_nonzero(raw & np.uint32(0x1FFF)):
        raise w.hazard("a number is not rounded to tf32: the last bits are cut off", "language")
    return raw[..., None].view(TYPES[kind]).astype(np.float64).reshape(len(registers), LANES, -1)


def _fragment(elements, rows):
    """The matrix (8 * rows, k) of a fragment of A (rows = 2) or B (rows = 1): a register's s elements lie at k = s t .., t the
    lane in its group of four, the second register eight rows lower (if A), the next ones 4 s further along k."""
    count, _, s = elements.shape
    out = np.empty(8 * rows * (count // rows * 4 * s))
    out[_places(count, s, rows)] = elements
    return out.reshape(8 * rows, -1)


@functools.cache
def _places(count, s, rows):
    """The places of such elements in a matrix."""
    i, h = np.arange(count)[:, None, None], np.arange(s)
    return (LANE[:, None] // 4 + i % rows * 8) * (count // rows * 4 * s) + s * (LANE[:, None] % 4 + i // rows * 4) + h


def _accumulators(product):
    """The registers (register, lane) in which lanes hold a product of 16 rows: pairs of columns, two rows eight apart, and the
    next eight columns."""
    return product.ravel()[_places_of_accumulators(product.shape[1])]


@functools.cache
def _places_of_accumulators(columns):
    i = np.arange(columns // 2)[:, None]
    return (LANE // 4 + i // 2 % 2 * 8) * columns + i // 4 * 8 + LANE % 4 * 2 + i % 2


@means(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32")
def _(_, w, at):
    w.converged("mma.sync")
    out, a, b, c = at.operands
    left, right = (_fragment(_elements(w, x, "s8"), rows) for x, rows in ((a, 2), (b, 1)))
    added = np.array([w.get(x) if x.__class__ is Reg else operand(x, np.uint32)(w) for x in c], np.uint32)
    sums = _accumulators(left @ right.T).astype(np.int32).view(np.uint32) + added
    for to, value in zip(out, sums, strict=True):
        w.set(to, value)


@means(r"mma\.sync\.aligned\.m16n8k(4|8|16|32)\.row\.col\.f32\.(bf16|f16|tf32|e4m3|e5m2)\.(bf16|f16|tf32|e4m3|e5m2)\.f32")
def _(match, w, at):
    w.converged("mma.sync")
    out, a, b, c = at.operands
    left, right = (_fragment(_elements(w, x, kind), rows) for x, kind, rows in ((a, match[2], 2), (b, match[3], 1)))
    sums = _accumulators(left @ right.T) + np.array([_bits(w, x) for x in c]).view(np.float32)
    for to, value in zip(out, sums.astype(np.float32).view(np.uint32), strict=True):
        w.set(to, value)


def _bits(w, source):
    """An fp32 operand's bits: a register's, or a literal's."""
    return w.get(source) if source.__class__ is Reg else operand(source, np.float32)(w).view(np.uint32)


# ---- wgmma ---------------------------------------------------------------------------------------------------------
class WgmmaRegister:
    """One register that a wgmma is to write, or has written: `value`."""

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
        """Compute the product and write the registers of the result."""
        for result, value in zip(self.results, self.compute(), strict=True):
            result.value = value


def _cells(w, descriptor, rows, k_major, size):
    """The cells (row, byte along k) of the rows `rows` of an operand's 32-byte slice (PTX ISA, "Matrix descriptor"): swizzled
    atoms of eight rows, `stride` bytes from atom to atom, `leading` bytes from panel to panel."""
    bits = operand(descriptor, np.uint64)(w)
    if np.count_nonzero(bits != bits[0]):
        raise w.hazard("the lanes' descriptors differ", "divergence")
    bits = int(bits[0])
    start, leading, stride = (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
    width = {0: 16, 1: 128, 2: 64, 3: 32}[bits >> 62]
    mn, k = np.asarray(rows)[:, None], np.arange(SLICE // size)[None, :]
    if k_major:
        at = start + mn // 8 * stride + mn % 8 * width + size * k
    elif size != 2:
        raise w.hazard("only operands of 2 bytes are read transposed", "language")
    else:
        at = start + k // 8 * stride + k % 8 * width + 2 * mn // width * leading + 2 * mn % width
    at = at ^ (at >> 7 & width // 16 - 1) << 4
    return at[..., None] + np.arange(size)


@means(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.[fs]32\.(bf16|f16|tf32|e4m3|e5m2|s8)\.(bf16|f16|tf32|e4m3|e5m2|s8)")
def _(match, w, at):
    n, k, left, right = int(match[1]), int(match[2]), match[3], match[4]
    acc, a, b, scale, *numbers = at.operands
    size = np.dtype(TYPES[right]).itemsize
    w.converged("wgmma")
    signs, transposed = [int(x.text) for x in numbers[:2]] or [1, 1], [int(x.text) for x in numbers[2:]]
    sums_type = np.int32 if left == "s8" else np.float32
    if k * size != SLICE or len(acc) != n // 2:
        raise w.hazard(f"{at.opcode} with {len(acc)} registers", "language")
    w.check_collective(f"wgmma {at.number}")
    accumulate = operand(scale, np.bool_)(w)
    if accumulate.any() != accumulate.all():
        raise w.hazard("the lanes disagree on whether the wgmma accumulates", "divergence")
    adds = [_accumulator(w, reg) for reg in acc] if accumulate[0] else None
    from_registers = isinstance(a, list)
    w.mmas.append(None)
    agent, time = w.block.mma_agents[w.index], len(w.mma_groups) + 1
    ask, shadow = w.knowledge(asynchronous=True), w.block.shadow
    b_cells = _cells(w, b, range(n), transposed[-1:] != [1], size)
    reads = [b_cells]
    if from_registers:
        fixed = _fragment(_elements(w, [_fenced(w, reg) for reg in a], left), 2)
    else:
        a_cells = _cells(w, a, 16 * (w.index % WARPGROUP) + np.arange(16), transposed[:1] != [1], size)
        reads.append(a_cells)
    event = Event("read", "the end of the mma", w.place())
    for cells in reads:
        w.check_range(int(cells.min()), int(cells.max()) + 1, 1)
        w._check_access(shadow.unreadable(ask, cells), "mma reads shared memory")
        shadow.note_read(agent, time, cells, event)

    def matrix(cells, kind):
        return np.ascontiguousarray(shadow.bytes[cells]).view(TYPES[kind])[..., 0].astype(np.float64)

    def compute():
        rows = fixed if from_registers else matrix(a_cells, left)
        product = signs[0] * rows @ (signs[1] * matrix(b_cells, right).T)
        sums = _accumulators(product)
        if adds:
            sums += np.stack([x.value if isinstance(x, WgmmaRegister) else x for x in adds]).view(sums_type)
        return sums.astype(sums_type).view(np.uint32)

    a_registers = {reg.slot: w.r[reg.slot] for reg in a} if from_registers else {}
    mma = w.mmas[-1] = WarpWgmma(w.place(), n // 2, compute, a_registers)
    for reg, result in zip(acc, mma.results, strict=True):
        w.r[reg.slot] = result
        w.pending.add(reg.slot)


def _accumulator(w, reg):
    """A register's promise, or its value."""
    value = w.r[reg.slot]
    return value if isinstance(value, WgmmaRegister) else w.get(_fenced(w, reg))


def _fenced(w, reg: Reg):
    """The register. A Hazard if it was written since the last wgmma.fence, and not by a wgmma."""
    if id(w.get(reg)) not in w.fenced_ids():
        raise w.hazard("wgmma reads a register that was written after the last wgmma.fence", "fence")
    return reg


@means(r"wgmma\.fence\.sync\.aligned")
def _(_, w, at):
    w.converged("wgmma.fence")
    w.fence_registers()


@means(r"wgmma\.commit_group\.sync\.aligned")
def _(_, w, at):
    w.converged("wgmma.commit_group")
    w.check_collective("wgmma.commit_group")
    w.mma_groups.append(w.mmas)
    w.mmas = []


@means(r"wgmma\.wait_group\.sync\.aligned")
def _(_, w, at):
    w.converged("wgmma.wait_group")
    newer: Imm = at.operands[0]
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
