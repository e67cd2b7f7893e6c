"""What a kernel takes at least, by the roofline of a card: bytes, products, other arithmetic, a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Card:
    """What a card can do. bytes, products, maps: a second; products are of 16-bit matrices, 2 operations each, as they run
    hot. launch: seconds that one kernel adds to a graph of several."""

    name: str
    processors: int
    bytes: float
    products: float
    maps: float
    launch: float = 1.5e-6

    def seconds(self, kernel: Any) -> float:
        """A kernel that says its `bytes`, `operations` of the tensor cores and `maps`."""
        return self.launch + max(kernel.bytes / self.bytes, kernel.operations / self.products, kernel.maps / self.maps)


H200 = Card("H200", 132, 4.2e12, 7.0e14, 2.5e13)
