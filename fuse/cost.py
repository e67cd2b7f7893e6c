"""What a kernel takes at least, by the roofline of a card: bytes, products, other arithmetic, a launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from tiles.device import device, hopper
from tiles.profile.card import peaks

REACHED = 0.87, 0.7  # of the peaks of memory and of the tensor cores, by the best kernels there are
LAUNCH = 1.5e-6  # seconds that one kernel more adds to a graph of several


@dataclass(frozen=True)
class Card:
    """What a card can do. bytes, products, maps: a second; products are of 16-bit matrices, 2 operations each. wgmma: has it
    that? fp8: and conversions to and from this?"""

    name: str
    processors: int
    bytes: float
    products: float
    maps: float
    wgmma: bool = True
    fp8: bool = True

    def seconds(self, kernel: Any) -> float:
        """Of a kernel that says its `bytes`, `operations` of the tensor cores and `maps`."""
        products, maps = kernel.operations / self.products, kernel.maps / self.maps
        busy = max(products, maps) if self.wgmma else products + maps  # mma.sync takes its turns with all else that a warp does
        return LAUNCH + max(kernel.bytes / self.bytes, busy)


H200 = Card("NVIDIA H200", 132, 4.2e12, 6.9e14, 1.6e13)


def card_of(arch: str) -> Card:
    """An H200; of other architectures what an H200 would be with no more than all cards have."""
    return H200 if arch == "sm_90a" else replace(H200, name=arch, wgmma=False, fp8=arch not in ("sm_80", "sm_86"))


@functools.cache
def card(ordinal: int | None) -> Card:
    """The card of this CUDA ordinal; None, where kernels are interpreted, is an H200."""
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
        hopper(gpu.capability),
        gpu.capability >= (8, 9),
    )
