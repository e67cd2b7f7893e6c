"""The roofline model: the least time of a kernel on a card, from its bytes, matrix products, elementwise operations and its
launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from tiles.launching.devices import device
from tiles.profile.card import peaks
from tiles.targets import parse_target

ATTAINABLE = 0.87, 0.7  # the fractions of the peak memory bandwidth and tensor core rate that good kernels reach
LAUNCH = 1.5e-6  # seconds that each kernel adds to a CUDA graph


@dataclass(frozen=True)
class Card:
    """The rates of a GPU. processors: the number of its multiprocessors. Per second: bytes from memory; products, operations of
    16-bit matrix products (a multiply-add is two); maps, elementwise operations. wgmma: does it have Hopper's wgmma, TMA and
    clusters? fp8: can it convert to and from fp8?"""

    name: str
    processors: int
    bytes: float
    products: float
    maps: float
    wgmma: bool = True
    fp8: bool = True

    def seconds(self, kernel: Any) -> float:
        """The kernel's time by the roofline. kernel: has `bytes`, `operations` of the tensor cores, and `maps`, its elementwise
        operations."""
        products, maps = kernel.operations / self.products, kernel.maps / self.maps
        busy = max(products, maps) if self.wgmma else products + maps  # mma.sync is synchronous: a warp does one or the other
        return LAUNCH + max(kernel.bytes / self.bytes, busy)


H200 = Card("NVIDIA H200", 132, 4.2e12, 6.9e14, 1.6e13)


def card_of(arch: str) -> Card:
    """The Card of an architecture: an H200 for sm_90a, and for others an H200 without wgmma, and without fp8 where they lack
    it."""
    target = parse_target(arch)
    return H200 if target.has_wgmma else replace(H200, name=arch, wgmma=False, fp8=target.has_fp8)


@functools.cache
def card(ordinal: int | None) -> Card:
    """The Card of the GPU with this CUDA ordinal. None, for the interpreter, gives an H200."""
    if ordinal is None:
        return H200
    gpu = device(ordinal)
    peak = peaks(gpu)
    products = peak.flop or 1e14
    memory, tensor = ATTAINABLE
    maps = H200.maps * gpu.processors / H200.processors
    return Card(
        gpu.name,
        gpu.processors,
        memory * peak.bandwidth,
        tensor * products,
        maps,
        gpu.target.is_hopper,
        gpu.target.has_fp8,
    )
