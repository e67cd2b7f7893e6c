"""Who stored what to global memory last: two warps that store other values to one element, and nothing orders them, race.

Within a cluster the warps' clocks tell what is ordered (shadow.py); nothing orders stores of two clusters, but a wait for a
count that others count up (ops/memory/counts.py). Equal values do no harm and are no race. What a reduction adds (tma_add,
add_fragment) is not looked at, nor what an op of someone's own writes to an array.

Clusters in several processes (processes.py) do not know each other's stores, only who stored where: `Claims`.
"""

import contextlib
import mmap
import os
from typing import NamedTuple

import numpy as np

from .hazard import Hazard, WarpPlace

with contextlib.suppress(ImportError):  # of Windows, where nothing is forked
    import fcntl

CLAIM = 4  # bytes that say whose an element is


class Clash(Exception):
    """Two clusters that run in several processes do something to one place whose outcome hangs on which comes first."""


class StoreRecord(NamedTuple):
    """A store: the first block of its cluster, which warp, at which of its times, where."""

    cluster: tuple
    agent: int
    time: int
    place: WarpPlace


class Stores:
    """The last store to each element of a launch's arrays, which lie in regions of memory (accesses.py)."""

    def __init__(self):
        self.last = {}  # start of a region -> (bytes an element, the last store to each as an index into `events`, 0 for none)
        self.events = [None]

    def _numbers(self, view, region):
        """The last stores to a view's elements, as a view; None if these are not elements as the region's others are."""
        start, end, size = region[0], region[1], view.itemsize
        if start not in self.last:
            self.last[start] = size, np.zeros((end - start) // size, np.int32)
        known, numbers = self.last[start]
        return _elements(view, start, size, numbers) if known == size else None

    def note(self, warp, clock, time, place, view, values, region):
        """A warp that knows `clock` stores values, at its `time`; what is there is not yet overwritten. Hazard: a race."""
        numbers = self._numbers(view, region)
        if numbers is None:
            return
        cluster = warp.block.cluster
        if not cluster.waits_for_count and np.count_nonzero(numbers):
            self._check(numbers, view, values, cluster.blocks[0].index, clock, place)
        self.events.append(StoreRecord(cluster.blocks[0].index, warp.agent, time, place))
        numbers[...] = len(self.events) - 1

    def _check(self, numbers, view, values, cluster, clock, place):
        conflicts = None
        for number in np.unique(numbers):
            event = self.events[number]
            if event is None or (event.cluster == cluster and clock[event.agent] >= event.time):
                continue
            if conflicts is None:
                conflicts = _bits(view) != _bits(np.broadcast_to(values, view.shape).astype(view.dtype))
            where = np.argwhere(conflicts & (numbers == number))
            if len(where):
                at = tuple(map(int, where[0]))
                ours, theirs = float(np.broadcast_to(values, view.shape)[at]), float(view[at])
                cause = (
                    f"stores {ours:.6g} where another warp stored {theirs:.6g}, and nothing orders the two; so it is with "
                    f"{len(where)} of this array's elements"
                )
                raise Hazard("race", cause, place, event.place)


class Claims(Stores):
    """The Stores of clusters in several processes: what one of them stores to belongs to it. Another's store there is a Clash,
    after which all run one after the other, and find whether it is a race and whose.

    before: what was stored until now. regions: of the arrays, (start, end, where it starts in `before`, bytes of an
    element, the least one). give_up: is called at a clash."""

    def __init__(self, before, regions, give_up):
        super().__init__()
        self.lock, self.give_up, self.owners = os.memfd_create("claims"), give_up, {}
        for start, end, once, unit in regions:
            owners = np.frombuffer(mmap.mmap(-1, (end - start) // unit * CLAIM), np.int32)
            size, numbers = before.last.get(once, (unit, np.zeros(0, np.int32)))
            owners[np.flatnonzero(numbers) * size // unit] = -1
            self.owners[start] = unit, owners

    def note(self, warp, clock, time, place, view, values, region):
        """Note a store as Stores.note does, in one of several processes. Clash: another process stores there."""
        unit, owners = self.owners[region[0]]
        owner_blocks = _elements(view, region[0], unit, owners)
        if owner_blocks is not None:
            (x, y, z), (width, height, _) = warp.block.cluster.blocks[0].index, warp.block.cluster.grid
            block_number = 1 + x + width * (y + height * z)
            fcntl.lockf(self.lock, fcntl.LOCK_EX)  # which a process that dies lets go
            other_blocks = np.count_nonzero((owner_blocks != 0) & (owner_blocks != block_number))
            owner_blocks[...] = block_number
            fcntl.lockf(self.lock, fcntl.LOCK_UN)
            if other_blocks:
                self.give_up()
                raise Clash
        super().note(warp, clock, time, place, view, values, region)

    def close(self):
        """End the claims of all processes."""
        os.close(self.lock)


def _elements(view, start, size, numbers):
    """The numbers of a view's elements, as a view of `numbers`, which has one for each `size` bytes from address `start` on;
    None if the elements lie otherwise."""
    at = view.__array_interface__["data"][0] - start
    if at % size or any(stride % size for stride in view.strides):
        return None
    strides = [stride // size * numbers.itemsize for stride in view.strides]
    return np.ndarray(view.shape, numbers.dtype, numbers, at // size * numbers.itemsize, strides)


def _bits(array):
    return np.ascontiguousarray(array).view(f"u{array.itemsize}").reshape(array.shape)
