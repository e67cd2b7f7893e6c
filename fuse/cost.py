"""What a kernel takes at least, by the roofline of a card: bytes, products, other arithmetic, a launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from tiles.device import device
from tiles.profile.card import peaks
from tiles.targets import capability, has_fp8, is_hopper

REACHED = 0.87, 0.7  # of the peaks of memory and of the tensor cores, by the best kernels there are
LAUNCH = 1.5e-6  # seconds that one kernel more adds to a graph of several


@dataclass(frozen=True)
class Card:
    """What a card can do. processors: how many multiprocessors it has. bytes, products, maps: what it does in a second: bytes
    from memory, operations of 16-bit matrix products (a multiplication and an addition are two), operations on single
    elements. wgmma: has it these instructions? fp8: can it convert to and from fp8?"""

    name: str
    processors: int
    bytes: float
    products: float
    maps: float
    wgmma: bool = True
    fp8: bool = True

    def seconds(self, kernel: Any) -> float:
        """The least time that a kernel takes by the roofline. kernel: an object that says how many `bytes`, `operations` of
        the tensor cores and `maps` it needs."""
        products, maps = kernel.operations / self.products, kernel.maps / self.maps
        busy = max(products, maps) if self.wgmma else products + maps  # mma.sync takes its turns with all else that a warp does
        return LAUNCH + max(kernel.bytes / self.bytes, busy)


H200 = Card("NVIDIA H200", 132, 4.2e12, 6.9e14, 1.6e13)


def card_of(arch: str) -> Card:
    """The Card that stands for an architecture: an H200 for sm_90a, and for others an H200 without wgmma, and without fp8
    where they lack it."""
    return H200 if arch == "sm_90a" else replace(H200, name=arch, wgmma=False, fp8=has_fp8(capability(arch)))


@functools.cache
def card(ordinal: int | None) -> Card:
    """The Card of the GPU with this CUDA ordinal. None, for the interpreter, gives an H200."""
    if ordinal is None:
        return H200
    gpu = device(ordinal)
    most = peaks(gpu)
    products = most.flop or 1e14
    memory, tensor = REACHED
    maps = H200.maps * gpu.processors / H200.processors
    return Card(
        gpu.name,
        gpu.processors,
        memory * most.bandwidth,
        tensor * products,
        maps,
        is_hopper(gpu.capability),
        has_fp8(gpu.capability),
    )
