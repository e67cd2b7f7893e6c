"""What GPUs have, by their compute capability, as far as it is known without one: a new GPU gets a row here. On a card
`Device` (launching/devices.py) asks the driver for its shared memory, and planners pass that to kernels, whose tables of tiles
(`BY_SHARED_MEMORY` in forward_ampere.py, `SHAPES_BY_LIMIT` in decode_ampere.py, ...) have an entry a size. (9, 0) is that of
"sm_90a"; a capability may have the suffix of its architecture behind it, (9, 0, "a").

Architectures are compared by capability, never as text: "sm_100a" sorts before "sm_90"."""

import re

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
RESERVED = 1024  # bytes of shared memory that the system keeps in each block


def capability(arch: str) -> tuple:
    """The compute capability of an architecture: "sm_90a" -> (9, 0, "a"). ValueError: it is no architecture's name."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    if not match:
        raise ValueError(f"arch must look like sm_80 or sm_90a, got {arch!r}")
    major, minor, suffix = match.groups()
    return (int(major), int(minor), suffix) if suffix else (int(major), int(minor))


def supported(capability: tuple) -> bool:
    """Do kernels run on such GPUs? Since Ampere: mma.sync of bf16, and cp.async."""
    return capability >= (8, 0)


def is_hopper(capability: tuple) -> bool:
    """Is this Hopper, the only one with wgmma, on which every kernel runs?"""
    return capability[0] == 9


def has_fp8(capability: tuple) -> bool:
    """Are there conversions to and from fp8, and mma.sync of it? Since Ada."""
    return capability >= (8, 9)


def has_early_launch(capability: tuple) -> bool:
    """May a grid begin while the one before it ends (griddepcontrol)? Since Hopper."""
    return capability >= (9, 0)


def has_tma(capability: tuple) -> bool:
    """Is there TMA? Since Hopper."""
    return capability >= (9, 0)


def shared_bytes(capability: tuple) -> int:
    """Bytes of shared memory that a block may have; where that is not known here, what it may have since Ampere."""
    if (codes := MULTIPROCESSORS.get(capability[:2])) is None:
        return SMALL
    return codes[2] * 1024 - RESERVED
