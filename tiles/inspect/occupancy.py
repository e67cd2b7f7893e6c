"""How many blocks of a kernel a multiprocessor holds at once, and what does not let it hold more."""

from typing import NamedTuple

from ..layout import LANES
from ..targets import MULTIPROCESSORS, RESERVED, parse_target

REGISTERS = 64 * 1024  # of a multiprocessor, 32 bits each; in four quarters, of which a warp lies in one
QUARTERS = 4
UNIT = 256  # registers that a warp takes are a multiple of this many,
SHARED_UNIT = 128  # and bytes of shared memory that a block takes, the reserved ones included, of this many


class Occupancy(NamedTuple):
    """Blocks and warps that a multiprocessor holds at once; `most` warps fit at best. limiters: the resources that are used up
    first."""

    blocks: int
    warps: int
    most: int
    limiters: tuple[str, ...]

    def __str__(self):
        if not self.blocks:
            return f"no block fits, for its {' and '.join(self.limiters)}"
        blocks, fraction = f"{self.blocks} block{'s' * (self.blocks != 1)}", self.warps / self.most
        return f"{blocks} at once, {self.warps} of {self.most} warps ({fraction:.0%}), limited by {' and '.join(self.limiters)}"


def occupancy(arch: str, threads: int, registers: int, shared_bytes: int) -> Occupancy | None:
    """The Occupancy of blocks of so many threads, of so many registers each, with so much shared memory; None for an
    architecture whose limits are not known here."""
    limits = MULTIPROCESSORS.get(parse_target(arch).capability)
    if limits is None:
        return None
    most, blocks, kilobytes = limits
    warps = _up(threads, LANES) // LANES
    a_warp = _up(registers * LANES, UNIT)
    a_block = _up(shared_bytes + RESERVED, SHARED_UNIT)
    allowed = {
        "registers": REGISTERS // QUARTERS // a_warp * QUARTERS // warps,
        "shared memory": kilobytes * 1024 // a_block,
        "warps": most // warps,
        "blocks": blocks,
    }
    fit = min(allowed.values())
    return Occupancy(fit, fit * warps, most, tuple(name for name, count in allowed.items() if count == fit))


def _up(value, unit):
    return -(-value // unit) * unit
