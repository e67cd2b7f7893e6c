"""What a kernel does, counted by its meaning as the interpreter runs it: products, special functions, bytes."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ..interpreter import AccessStep, CopyStep, OpStep, clusters, record_clusters
from .model import HALF, product, specials

SAMPLE = 4  # clusters of a launch on a card that are counted


class LaunchCounts:
    """Sums over a launch. flop: of matrix products, 2 m n k each, masked or not. halves: the same with those of 8-bit elements
    at half, of tf32 at twice their number, as the tensor cores' time goes. special: exp2, 1/x and the like, by element. read,
    written: bytes of global memory that warps and copies ask for. once: bytes that come from memory if the caches are good: of
    each array what was asked for, but no more than it has, read and written apart. counted of clusters: how many were run; if
    not all, the sums are theirs times clusters / counted."""

    def __init__(self, args: Sequence, clusters: int):
        self.sizes: dict[tuple[int, int], int] = {}
        for array in _arrays(args):
            byte_range = np.lib.array_utils.byte_bounds(array)
            self.sizes[byte_range] = max(self.sizes.get(byte_range, 0), array.nbytes)
        self.byte_ranges = sorted(self.sizes)
        self.requested_bytes = {(byte_range, written): 0 for byte_range in self.byte_ranges for written in (False, True)}
        self.sums, self.counted, self.clusters = {"flop": 0.0, "halves": 0.0, "special": 0.0}, 0, clusters

    def add(self, record: dict) -> None:
        """Add the counts of one more cluster's warps."""
        self.counted += 1
        for steps in record.values():
            for step in steps:
                if isinstance(step, OpStep):
                    self._op(step)
                elif isinstance(step, (AccessStep, CopyStep)) and step.view is not None and step.view.size:
                    start = step.view.__array_interface__["data"][0]
                    byte_range = next((s for s in reversed(self.byte_ranges) if s[0] <= start < s[1]), None)
                    if byte_range:
                        self.requested_bytes[byte_range, step.written] += step.view.nbytes

    def _op(self, step):
        if shape := product(step):
            flop, size, _ = shape
            self.sums["flop"] += flop
            self.sums["halves"] += flop * size / HALF
        self.sums["special"] += specials(step)

    @property
    def scale(self) -> float:
        """How many clusters each counted one stands for."""
        return self.clusters / self.counted if self.counted else math.nan

    flop = property(lambda self: self.sums["flop"] * self.scale)
    halves = property(lambda self: self.sums["halves"] * self.scale)
    special = property(lambda self: self.sums["special"] * self.scale)
    read = property(lambda self: self._bytes(False))
    written = property(lambda self: self._bytes(True))

    def _bytes(self, written):
        return sum(n for (_, way), n in self.requested_bytes.items() if way == written) * self.scale

    @property
    def once(self) -> float:
        """The number of bytes that must cross between memory and the chip at least once."""
        return sum(min(self.sizes[byte_range], n * self.scale) for (byte_range, _), n in self.requested_bytes.items())


def _arrays(args):
    """The NumPy arrays among arguments, those that tensors are cut from, and those of records; none without elements."""
    for value in args:
        if isinstance(value, tuple):
            yield from _arrays(value)
        elif isinstance(array := getattr(value, "array", value), np.ndarray) and array.size:
            yield array


def choose_clusters(grid, cluster, most: int | None = None) -> list:
    """The clusters of a launch, or `most` of them, each the middle one of as many equal parts."""
    cluster_indices = list(clusters(grid, cluster))
    if most is None or len(cluster_indices) <= most:
        return cluster_indices
    return [cluster_indices[(2 * k + 1) * len(cluster_indices) // (2 * most)] for k in range(most)]


def count_clusters(
    kernel, grid, threads, args, shared, cluster, selection: Iterable, keep=None
) -> tuple[LaunchCounts, dict | None]:
    """(LaunchCounts of these clusters, the record of the one that has block `keep`, by default of the first)."""
    counts, block_record = LaunchCounts(args, math.prod(grid) // math.prod(cluster)), None
    for record in record_clusters(kernel, grid, threads, args, shared, selection):
        counts.add(record)
        if any(block == keep for block, _ in record) or (keep is None and block_record is None):
            block_record = record
    return counts, block_record
