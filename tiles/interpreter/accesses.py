"""Which arrays of a launch its blocks read, and which they write.

If no block reads what any block writes, blocks may run in any order, each in a process of its own (processes.py). Accesses are
noted where they happen: at an index into an array, a copy by TMA or cp.async, an op that is given an array. An op reads an
array that is its `source` and writes one that is its `target`; with a parameter of another name it may do either. If an op
returns an array, that is a view, and its use is noted.

Arrays that share memory count as one, and an access counts for the whole array: two blocks that each read and write their own
part of an array are taken for a conflict.
"""

import bisect
import copy
import mmap

import numpy as np

from ..numba_names import types
from ..types import gl
from .stores import Claims, Clash, Stores

READ, WRITE = 0, 1
PAGE = mmap.PAGESIZE
GLOBAL_ACCESSES = {"source": (READ,), "pool": (READ,), "pages": (READ,), "target": (WRITE,)}


class Accesses:
    """The accesses of the blocks that run on these arrays, as marks in memory that forked processes share: two for each array,
    that it was read and that it was written, and a last one, that blocks in two processes stored to one element. strict: the
    block that causes a Clash ends with it."""

    def __init__(self, arrays):
        regions = []  # [start, end) of bytes
        for start, end in sorted(np.lib.array_utils.byte_bounds(array) for array in arrays if array.size):
            if regions and start < regions[-1][1]:
                regions[-1] = regions[-1][0], max(end, regions[-1][1])
            else:
                regions.append((start, end))
        self._order([(*region, 2 * k) for k, region in enumerate(regions)])  # and where its marks are
        self.marks, self.strict = mmap.mmap(-1, 2 * len(regions) + 1), False
        self.stores = Stores()

    def _order(self, regions):
        self.regions = sorted(regions)
        self.starts = [start for start, *_ in self.regions]

    def region(self, array):
        """(start, end, marks) of the region of memory in which an array and those that overlap it lie; None if it is no array
        of this launch, or has no elements."""
        at = array.__array_interface__["data"][0]
        k = bisect.bisect(self.starts, at) - 1
        return self.regions[k] if array.size and k >= 0 and at < self.regions[k][1] else None

    def note(self, array, access):
        """Note that a block reads or writes an array."""
        region = self.region(array)
        if region and not self.marks[region[2] + access]:
            self.marks[region[2] + access] = 1
            if self.strict and self.marks[region[2] + 1 - access]:
                raise Clash

    def written(self, array):
        """Has any block written it, or what shares its memory?"""
        region = self.region(array)
        return region is not None and self.marks[region[2] + WRITE] == 1

    @property
    def clash(self):
        """Is any array both read and written, or an element by two blocks that ran in processes?"""
        return self.marks[-1] == 1 or any(self.marks[at + READ] and self.marks[at + WRITE] for *_, at in self.regions)

    def _give_up(self):
        self.marks[-1] = 1

    def shared(self, arrays):
        """Copies of the arrays in memory that processes share, aligned as they are and overlapping where they do; and the
        strict accesses of blocks that run on those, which have their marks in common with these."""
        buffers, clone = {}, copy.copy(self)
        for start, end, marks in self.regions:
            buffers[marks] = np.frombuffer(mmap.mmap(-1, end - start + PAGE), np.uint8)[start % PAGE :]
        places = {marks: buffer.ctypes.data for marks, buffer in buffers.items()}
        clone._order((places[marks], places[marks] + end - start, marks) for start, end, marks in self.regions)
        sizes: dict = {}
        for array in arrays:
            if region := self.region(array):
                sizes[region[2]] = min(array.itemsize, sizes.get(region[2], array.itemsize))
        regions = [(places[marks], places[marks] + end - start, start, sizes[marks]) for start, end, marks in self.regions]
        clone.strict, clone.stores = True, Claims(self.stores, regions, self._give_up)
        copies = []
        for array in arrays:
            if region := self.region(array):
                start, _, marks = region
                offset = array.__array_interface__["data"][0] - start
                copies.append(np.ndarray(array.shape, array.dtype, buffers[marks], offset, array.strides))
                copies[-1][...] = array
                copies[-1].flags.writeable = array.flags.writeable
            else:
                copies.append(array)
        return copies, clone


def global_accesses(parameters, specs, result):
    """What an op does to the global arrays among its arguments: [(place, READ or WRITE)]."""
    if isinstance(result, types.Array):
        return ()
    array_places = [k for k, spec in enumerate(specs) if isinstance(spec, (types.Array, gl))]
    return tuple((k, access) for k in array_places for access in GLOBAL_ACCESSES.get(parameters[k], (READ, WRITE)))
