"""What GPU architectures have, as far as it is known without a GPU: shared memory, warps, TMA, wgmma, fp8, tensor cores. On a
card `Device` (launching/devices.py) asks the driver for its shared memory.

A new architecture gets:

- a row in MULTIPROCESSORS and in TENSOR_FLOP, and in HAS of tests/tiles/test_architectures.py;
- if its shared memory is of a new size, maybe entries in the kernels' tables of tiles (BY_SHARED_MEMORY in forward_ampere.py,
  SHAPES_BY_LIMIT in decode_ampere.py, mla_ampere.py and mla_fp8.py, TALL_SHAPES in decode_ampere.py). Without one, it takes
  the next smaller size's;
- if it has matrix instructions of its own, a property of Target, rows in SUPPORTED of ops/matmul/supported.py, and kernels,
  as a family in attention/families.py;
- a place in ARCHS of fuse/inspect.py, so that operators are compiled for it. `python -m attention inspect --arch` takes any.

Nothing else in the library compares architectures: kernels and planners ask a Target what it has, and fuse's cost model asks a
Card (fuse/planning/cost.py), which is made of the driver's numbers."""

import functools
import re
from typing import NamedTuple

SMALL, MEDIUM, LARGE = 99 * 1024, 163 * 1024, 227 * 1024  # bytes of shared memory that a block may have

# What a multiprocessor holds: (warps, blocks, KiB of shared memory). From the CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"; blocks and shared memory also stand in CUDA's cuda_occupancy.h.
MULTIPROCESSORS = {
    (8, 0): (64, 32, 164),
    (8, 6): (48, 16, 100),
    (8, 7): (48, 16, 164),
    (8, 9): (48, 24, 100),
    (9, 0): (64, 32, 228),
    (10, 0): (64, 32, 228),
    (10, 3): (64, 32, 228),
    (12, 0): (48, 24, 100),
    (12, 1): (48, 24, 100),
}
# FLOP of 16-bit products with fp32 sums, a cycle and multiprocessor (NVIDIA's white papers).
TENSOR_FLOP = {(8, 0): 2048, (8, 6): 512, (8, 7): 1024, (8, 9): 512, (9, 0): 4096, (10, 0): 8192, (12, 0): 512}
RESERVED = 1024  # bytes of shared memory that the system keeps in each block


class Target(NamedTuple):
    """An architecture that kernels are compiled for, by its compute capability. suffix: "a" for code that uses what only this
    architecture has (`sm_90a`), "f" for what its family has."""

    major: int
    minor: int
    suffix: str = ""

    def __str__(self):
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, (9, 0) for sm_90a."""
        return self.major, self.minor

    @property
    def supported(self) -> bool:
        """Do kernels run on such GPUs? Since Ampere: mma.sync of bf16, and cp.async."""
        return self.capability >= (8, 0)

    @property
    def is_hopper(self) -> bool:
        """Is this Hopper, which runs code for sm_90a: every kernel?"""
        return self.major == 9

    @property
    def has_wgmma(self) -> bool:
        """May code for it use wgmma and setmaxnreg? Hopper's own code, sm_90a, may."""
        return self.is_hopper and self.suffix == "a"

    @property
    def has_fp8(self) -> bool:
        """Are there conversions to and from fp8, and mma.sync of it? Since Ada."""
        return self.capability >= (8, 9)

    @property
    def has_early_launch(self) -> bool:
        """May a grid begin while the one before it ends (griddepcontrol)? Since Hopper."""
        return self.capability >= (9, 0)

    @property
    def has_tma(self) -> bool:
        """Is there TMA? Since Hopper."""
        return self.capability >= (9, 0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block may have; where that is not known here, what it may have since Ampere."""
        if (limits := MULTIPROCESSORS.get(self.capability)) is None:
            return SMALL
        return limits[2] * 1024 - RESERVED


@functools.cache
def parse_target(arch: str) -> Target:
    """The Target of this name, such as "sm_90a". ValueError: it is no architecture's name."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if not match:
        raise ValueError(f"arch must look like sm_80 or sm_90a, got {arch!r}")
    major, minor, suffix = match.groups()
    return Target(int(major), int(minor), suffix)


AMPERE, HOPPER = Target(8, 0), Target(9, 0, "a")
