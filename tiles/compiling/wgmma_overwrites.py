"""Registers that are written while a wgmma may still be reading them.

wgmma reads A's registers at any time up to the wait for it (PTX ISA, wgmma.wait_group). ptxas keeps to that, with one hole:
a loop that makes the next A before its wait, and multiplies by it after,

    for j in range(1, steps):
        left = warpgroup.load(a.wait(j), T)         # the registers that the product of round j - 1 reads
        acc = warpgroup.mma_AB(warpgroup.wait(acc), left, b.wait(j))

writes the same registers of PTX in each round, which are in flight from the second one on, and ptxas neither takes others nor
complains (C7513 is what it says where the mma stands above the new A in the loop). So the machine code is followed from each
wgmma that has A in registers, along all branches, to the wait that covers it.

Most kernels are done with after a look at the bits, a millisecond or two; the disassembler is asked about those that are not.
"""

import re
import struct

from . import sass
from .line_table import SourcePlace
from .sass import SassInstruction

ADVICE = "load or compute A after the wait for that mma, or write two rounds of the loop, each with an A of its own"
EXECUTABLE = 4  # a flag of ELF's sections
# opcodes, an instruction's low 12 bits; of HGMMA and its kin the last four tell the type of A
GMMA, GMMA_OF_REGISTERS, WARPGROUP, BRA, BRX, EXIT, RET = 0x9F0, 0xDF0, 0x9C5, 0x947, 0x949, 0x94D, 0x950
DEPBAR = 1 << 47  # what is WARPGROUP.DEPBAR among WARPGROUP's
ALWAYS = 7  # the predicate that holds; and no group is closed
GROUPS = 8  # that may be in flight and are told apart
NO_REGISTER = ("SETP", "SETP2", "R2P", "BRX", "RET", "BAR", "WARPSYNC")  # how those end that write none, but name one first


def overwritten(cubin: bytes) -> list[tuple[SassInstruction, SassInstruction]]:
    """(a wgmma with A in registers, an instruction that writes some of these before a wait for it), all there are."""
    pairs = [(start + mma, start + other) for start, code in _code(cubin) for mma, other in _suspects(code)]
    if not pairs:
        return []
    listing = sass.listing(cubin)
    return [(listing[mma], listing[other]) for mma, other in pairs if _destination(listing[other]) is not None]


def complaints(cubin: bytes) -> list[str]:
    """Warnings about what `overwritten` finds, one for each line of Python whose instructions overwrite something."""
    causes: dict[SourcePlace, str] = {}
    for mma, other in sorted(overwritten(cubin), key=lambda pair: not pair[0].place.op):
        message = (
            f"tiles: {other} ({other.place}) may overwrite R{_destination(other)} while {mma} ({mma.place}) still reads it: "
            f"{ADVICE}"
        )
        causes.setdefault(other.place, message)
    return list(causes.values())


def _destination(instruction):
    """The first register that an instruction writes; None if it writes none."""
    if instruction.mnemonic.endswith(NO_REGISTER):
        return None
    match = re.match(r"(?:!?U?P[T0-9], )*R(\d+)\b", instruction.operands)
    return int(match[1]) if match else None


def _code(cubin):
    """(the number of its first instruction, its instructions, as pairs of 64 bits) of each section of code, in order."""
    (at,), (size, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    start = 0
    for header in range(at, at + size * count, size):
        flags, _, offset, length = struct.unpack_from("<4Q", cubin, header + 8)
        if flags & EXECUTABLE:
            yield start, list(struct.iter_unpack("<QQ", cubin[offset : offset + length]))
            start += length // 16


def _suspects(code):
    """Pairs of numbers of instructions: a wgmma, and what seems to write a register of its A before a wait for it."""
    for at, (low, _) in enumerate(code):
        if low & 0xFF0 == GMMA_OF_REGISTERS:
            # A begins at a multiple of four registers, and a result of two or four at one of as many
            for other in sorted(set(_in_flight(code, at))):
                if code[other][0] >> 18 & 0x3F == low >> 26 & 0x3F:
                    yield at, other


def _in_flight(code, at):
    """The numbers of the instructions that may run while the wgmma at `at` is in flight."""
    visited, ways = set(), [(at, -1)]  # the instruction, and how many groups were closed after that of the wgmma
    while ways:
        position, newer = ways.pop()
        while position < len(code) and (position, newer) not in visited:
            visited.add((position, newer))
            low, high = code[position]
            opcode, always = low & 0xFFF, low >> 12 & 0xF == ALWAYS
            position += 1
            if opcode & 0xFF0 in (GMMA, GMMA_OF_REGISTERS):
                newer = min(newer + (high >> 20 & 7 != ALWAYS), GROUPS)
            elif opcode == WARPGROUP and low & DEPBAR and always:
                if newer >= high >> 8 & 7:
                    break
            elif opcode == BRA:
                ahead = (low >> 34) - (low >> 63 << 30)  # signed
                ways.append((position + 64 * ahead + (low >> 18 & 0x3F), newer))
                if always and not low >> 24 & 0xFF and high >> 23 & 0x1F == ALWAYS:  # not BRA.DIV, and no other condition
                    break
            elif opcode in (BRX, EXIT, RET) and always:
                break
            else:
                yield position - 1
