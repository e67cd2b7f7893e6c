"""Shared memory under supervision: its bytes, and for every cell who wrote it, who reads it and what state it is in.

**Clocks.** Whatever touches shared memory is an *agent* with a clock of its own: each warp; each warp's copies by cp.async;
both once more as the asynchronous proxy sees them; each warp's part of its warpgroup's mmas; each mbarrier's copies; each
warp's bulk stores; of all blocks of a cluster. A warp carries a vector with the time of every agent up to which it knows what
happened (Lamport, Fidge, Mattern; FastTrack's epochs, Flanagan and Freund 2009). An access is ordered after an earlier one if
the vector has reached that one's time; if not, the two race, whatever order this run happened to take. So a copy that lands
early hides nothing: until a wait has taught a warp that the copy is done, its tile may not be touched.

**Proxies.** wgmma and TMA go through the asynchronous proxy. After ordinary accesses to the same memory, writes and reads
alike, they need a `fence.proxy.async` on the way. A fence copies the warp's knowledge of the ordinary agents to their
asynchronous doubles, and an asynchronous access consults the doubles. The other way round the end of a copy, store or mma
is a fence of its own (PTX ISA, "Async proxy").

The unit is a cell of 16 bytes, the chunk that swizzles move about: ops touch whole rows of panels, multiples of 32 bytes.
"""

import functools
from typing import NamedTuple

import numpy as np

from ..types import sv
from .hazard import WarpPlace

CELL = 16
NEVER, FILLING, VALID, RELEASED = range(4)
WRITER, WRITTEN, STATE = range(3)  # columns of Shadow.last
POISON = 0xFF  # as bf16, fp16 and fp32: NaN
TIME = np.int32  # of clocks: a warp of the emulator has one a lane, of all agents


class Event(NamedTuple):
    """An access, for messages: `kind` is a key of HAZARD_OF_WRITE or "read"."""

    kind: str
    operation: str
    place: WarpPlace

    def __str__(self):
        return self.place.describe(self.operation)


HAZARD_OF_WRITE = {"store": "race", "copy": "in flight", "release": "released"}  # kind of write -> kind of hazard


class TileCells:
    """The cells of a shared tile, or of a range of its rows or (whole cells) columns; of a vector, or of a range of its
    elements."""

    __slots__ = ("cells", "rows", "shape")

    def __init__(self, tile, rows=None, cols=None):
        spec = tile.spec
        if cols is not None:  # the swizzle has strewn them
            self.cells, self.rows = tile.address // CELL + _column_cells(spec, cols.start, cols.stop), None
            return
        if isinstance(spec, sv):
            rows, size = rows or range(spec.length), spec.dtype.itemsize
            self.cells = slice(*((tile.address + at * size) // CELL for at in (rows.start, rows.stop)))
            self.rows = None
            return
        rows = rows or range(spec.rows)
        start = tile.address - tile.first * spec.width
        self.cells = slice(start // CELL, (start + spec.panels * spec.panel_bytes) // CELL)
        self.rows, self.shape = (
            slice(tile.first + rows.start, tile.first + rows.stop),
            (spec.panels, spec.parent_rows, spec.width // CELL),
        )
        if len(rows) == spec.parent_rows:
            self.rows = None

    def select(self, array):
        """The elements of these cells in an array with one element a cell; a view unless they are columns."""
        part = array[self.cells]
        return part if self.rows is None else part.reshape(*self.shape, *array.shape[1:])[:, self.rows]

    def set(self, array, value):
        """Give all of them a value there."""
        if self.rows is None:
            array[self.cells] = value
        else:
            self.select(array)[...] = value


class Agents:
    """Who has a clock, in all blocks of a cluster: the `ordinary` ones (warps 0..W-1, their copies by cp.async W..2W-1), as
    many asynchronous doubles, then as `new` hands them out; `count` in all."""

    def __init__(self, warps, others):
        self.warps, self.ordinary = warps, 2 * warps
        self.next, self.count = 4 * warps, 4 * warps + others

    def new(self):
        """Add an agent, and return its number."""
        self.next += 1
        assert self.next <= self.count
        return self.next - 1

    def fence(self, clock):
        """fence.proxy.async: what the warp knows of ordinary accesses, the asynchronous proxy now sees too."""
        clock[self.ordinary : 2 * self.ordinary] = clock[: self.ordinary]


class Shadow:
    """The state of one block's shared memory, cell by cell."""

    def __init__(self, nbytes, agents):
        cells = -(-nbytes // CELL)
        self.bytes = np.full((cells, CELL), POISON, np.uint8)
        self.last = np.zeros((cells, 4), np.int32)  # a cell's last writer, its time when that is done, state, which of `writes`
        self.writes = []  # events
        self.read, self.reads = {}, {}  # agent -> time of its last read of each cell; (agent, time) -> event
        self.latest = {}  # agent -> time of its last read of any cell
        self.ordinary = agents.ordinary

    def _known_times(self, clock, asynchronous):
        """The clock that an access goes by: the asynchronous proxy knows of ordinary accesses what fences have ordered before
        it."""
        if not asynchronous:
            return clock
        return np.concatenate([clock[self.ordinary : 2 * self.ordinary], clock[self.ordinary :]])

    def _describe_conflict(self, clock, cells, bad):
        """(kind, cause) for the first bad cell, by who wrote it."""
        writer, written, _, event_number = cells.select(self.last).reshape(-1, 4)[bad.argmax()]
        event = self.writes[event_number]
        if writer < self.ordinary and clock[writer] >= written:
            return "fence", f"with no fence.proxy.async (warpgroup.sync) after {event}"
        return HAZARD_OF_WRITE[event.kind], f"and nothing orders this after {event}"

    def unreadable(self, clock, cells, asynchronous):
        """What forbids one who knows `clock` to read these cells: (kind, cause), or None."""
        last = cells.select(self.last)
        bad = self._known_times(clock, asynchronous)[last[..., WRITER]] < last[..., WRITTEN]
        bad |= last[..., STATE] != VALID
        if not np.count_nonzero(bad):  # which takes half as long as `any`
            return None
        if last[..., STATE].flat[bad.argmax()] == NEVER:
            return "never written", "which nobody has written"
        return self._describe_conflict(clock, cells, bad)

    def unwritable(self, clock, cells, asynchronous):
        """What forbids one who knows `clock` to overwrite these cells: (kind, cause), or None."""
        known, last = self._known_times(clock, asynchronous), cells.select(self.last)
        bad = known[last[..., WRITER]] < last[..., WRITTEN]
        if np.count_nonzero(bad):
            return self._describe_conflict(clock, cells, bad)
        for agent, time in self.latest.items():
            if time <= known[agent]:
                continue
            times = cells.select(self.read[agent])
            unseen = times > known[agent]
            if np.count_nonzero(unseen):
                late = int(times[unseen].min())
                if late > clock[agent]:
                    return "race", f"and nothing orders this after {self.reads[agent, late]}"
                return "fence", f"with no fence.proxy.async after {self.reads[agent, late]}"
        return None

    def note_read(self, agent, time, cells, event):
        """`agent` reads these cells at `time`."""
        if agent not in self.read:
            self.read[agent] = np.zeros(len(self.last), np.int32)
        cells.set(self.read[agent], time)
        self.latest[agent] = time
        self.reads.setdefault((agent, time), event)

    def note_write(self, agent, time, cells, state, event):
        """`agent` writes these cells, finished at its `time`."""
        cells.set(self.last, (agent, time, state, len(self.writes)))
        self.writes.append(event)

    def mark_valid(self, cells):
        """A copy into these cells is done: they may be read."""
        cells.select(self.last)[..., STATE] = VALID

    def unfinished_read(self, agent, clock, cells):
        """The first read of these cells by `agent` that `clock` does not know to be over, or None."""
        if agent not in self.read:
            return None
        times = cells.select(self.read[agent])
        late = times[times > clock[agent]]
        return self.reads[agent, int(late.min())] if late.size else None

    def poison(self, cells):
        """Mark these cells invalid: reading them is a hazard."""
        cells.select(self.bytes)[...] = POISON

    def get(self, tile, rows=None):
        """The elements of a shared tile or vector, or of a range of its rows or elements."""
        return self._elements(tile)[_places(tile.spec, rows)].view(tile.spec.dtype.np)

    def put(self, tile, values, rows=None, cols=None):
        """Store `values`, of the tile's dtype, to a shared tile or a range of its rows or columns."""
        places = _places(tile.spec, rows)
        places = places if cols is None else places[:, cols.start : cols.stop]
        self._elements(tile)[places] = np.ascontiguousarray(values).view(f"u{tile.spec.dtype.itemsize}")

    def _elements(self, tile):
        spec = tile.spec
        end = tile.address + (spec.panels - 1) * spec.panel_bytes + spec.rows * spec.width
        unsigned = self.bytes.reshape(-1)[tile.address : end]
        return unsigned.view(f"u{tile.spec.dtype.itemsize}")


@functools.cache
def _column_cells(spec, start, stop):
    """The cells of some columns, counted from the tile's first."""
    return np.unique(spec.offsets()[:, start:stop] // CELL)


@functools.cache
def _places(spec, rows):
    """For each element, its index among the tile's or vector's elements in memory."""
    return spec.offsets(rows) // spec.dtype.itemsize
