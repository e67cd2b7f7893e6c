"""Memory by address: global memory as it lies in the host, shared memory byte by byte under supervision.

Everything that accesses memory by itself is an agent with a clock (interpreter/shadow.py explains clocks): each lane; its
copies by cp.async; both once more as the asynchronous proxy sees them; each warp's mmas and bulk stores; each mbarrier's
copies. Because each lane has a clock, a missing `__syncwarp` is found. A lane writes to a *peer's* memory as one more agent,
which a peer knows of only by releases and acquires at cluster scope. A cell is one byte.
"""

import ctypes

import numpy as np

from ..interpreter.shadow import FILLING, HAZARD_OF_WRITE, NEVER, POISON, VALID
from ..layout import LANES

LANE = np.arange(LANES, dtype=np.uint32)
BARRIER = 4  # the state of a cell that belongs to an mbarrier
WINDOW = 24  # an address in shared memory is rank << WINDOW | address in that block of the cluster, its own too
LOCAL, SHARED = 1 << 41, 1 << 42  # where generic addresses show each thread's own memory, and shared memory:
GENERIC_BYTES = 1 << 32  # so many bytes each, at which no array lies
BASE = 1024 + 16  # where dynamic shared memory begins: 16 bytes are all that a launch promises


class Global:
    """The arrays of a launch: loads and stores anywhere else are refused. ranges: [(first byte, end)]."""

    def __init__(self, ranges):
        self.writes = 0  # by ordinary stores
        self.ranges = [(low, np.ctypeslib.as_array((ctypes.c_uint8 * (end - low)).from_address(low))) for low, end in ranges]

    def _bytes(self, warp, addresses, size):
        if np.count_nonzero(addresses % np.uint64(size)):
            raise warp.hazard(
                f"an access of {size} bytes at {int(addresses[addresses % size != 0][0]):#x}, which is no multiple"
            )
        first, last = int(addresses.min()), int(addresses.max())
        for low, memory in self.ranges:
            if low <= first and last + size <= low + len(memory):
                return memory, (addresses - np.uint64(low)).astype(np.int64)[:, None] + np.arange(size)
        raise warp.hazard(f"{size} bytes at {first:#x} to {last:#x} are not all of one array that the launch was given")

    def load(self, warp, addresses, size):
        """Read `size` bytes at each of n addresses, as an array (n, size)."""
        memory, at = self._bytes(warp, addresses, size)
        return memory[at]

    def store(self, warp, addresses, values):
        """Write the rows of an array (n, size) of bytes at n addresses."""
        memory, at = self._bytes(warp, addresses, values.shape[1])
        memory[at] = values
        self.writes += 1

    def box(self, first, last):
        """The array in which all these bytes lie, and its first address; IndexError: there is none."""
        for low, memory in self.ranges:
            if low <= first and last <= low + len(memory):
                return low, memory
        raise IndexError(f"bytes {first:#x} to {last:#x} are not all of one array that the launch was given")


class EmulatedSharedMemory:
    """One block's shared memory. Cells are a slice, or an array of indices. `knowledge.access_times(agents)` gives the times up
    to which an accessor knows these agents' accesses, as an array of the same shape as the cells."""

    def __init__(self, nbytes, agents):
        self.end = BASE + nbytes
        self.bytes = np.full(self.end, POISON, np.uint8)
        self.state = np.full(self.end, NEVER, np.uint8)
        self.writer, self.written, self.write = (np.zeros(self.end, np.int32) for _ in range(3))
        self.writes = []  # events
        self.lane_reads = {}  # first agent of a warp -> time of the last reads of each cell, and by which lanes, as bits
        self.reads, self.read_events = {}, {}  # other agents: time of the last read of each cell; (agent, time) -> event
        self.ordinary = agents.ordinary

    # -- who may
    def _order(self, ask, cells):
        """(kind, cause) if the last write of some cell is not known to be over, or None."""
        writer, written = self.writer[cells], self.written[cells]
        bad = ask.access_times(writer) < written
        if not np.count_nonzero(bad):  # which takes less than half as long as `any`
            return None
        k = bad.argmax()
        event = self.writes[self.write[cells].flat[k]]
        if ask.asynchronous and (ask.known_times(writer) >= written).flat[k]:
            return "fence", f"with no fence.proxy.async after {event}"
        return HAZARD_OF_WRITE[event.kind], f"and nothing orders this after {event}"

    def unreadable(self, ask, cells, plain=False):
        """Why this reader may not read these cells: (kind, cause), or None. plain: cells that nobody has written may be loaded,
        because the value may never be used; it is poison."""
        state = self.state[cells]
        if cause := self._order(ask, cells):
            return cause
        if np.count_nonzero(state == BARRIER):
            return "plan", "where an mbarrier lies"
        if plain or not np.count_nonzero(state != VALID):
            return None
        return "never written", "which nobody has written"

    def unwritable(self, ask, cells):
        """Why this writer may not write these cells: (kind, cause), or None."""
        if np.count_nonzero(self.state[cells] == BARRIER):
            return "plan", "where an mbarrier lies"
        if cause := self._order(ask, cells):
            return cause
        for first, (times, lanes) in self.lane_reads.items():
            late, readers = times[cells], lanes[cells]
            if not np.count_nonzero(late) or ask.knows_lanes(first, late):
                continue
            bad = (late[..., None] > ask.lane_access_times(first)) & (readers[..., None] >> LANE & 1 != 0)
            if bad.any():
                lane = int(bad.any(tuple(range(late.ndim))).argmax())
                return self._read(ask, bad[..., lane], np.full(late.shape, first + lane), late, first)
        for agent, times in self.reads.items():
            late = times[cells]
            bad = late > ask.access_times(np.full(late.shape, agent))
            if np.count_nonzero(bad):
                return self._read(ask, bad, np.full(late.shape, agent), late, agent)
        return None

    def _read(self, ask, bad, agent, late, key):
        k = bad.argmax()
        event = self.read_events[key, int(late.flat[k])]
        if ask.asynchronous and (ask.known_times(agent) >= late).flat[k]:
            return "fence", f"with no fence.proxy.async after {event}"
        return "race", f"and nothing orders this after {event}"

    # -- what was done
    def note_lanes(self, first, lanes, cells, time, synced, event):
        """These lanes (n,) of the warp whose agents begin at `first` read cells (n, size); `synced`: when the warp last met."""
        if first not in self.lane_reads:
            self.lane_reads[first] = np.zeros(self.end, np.int32), np.zeros(self.end, np.uint32)
        times, readers = self.lane_reads[first]
        readers[cells[times[cells] <= synced]] = 0
        np.bitwise_or.at(readers, cells, (np.uint32(1) << lanes.astype(np.uint32))[:, None])
        times[cells] = time
        self.read_events.setdefault((first, time), event)

    def note_read(self, agent, time, cells, event):
        """`agent`, no lane, reads these cells until its `time`."""
        if agent not in self.reads:
            self.reads[agent] = np.zeros(self.end, np.int32)
        self.reads[agent][cells] = time
        self.read_events.setdefault((agent, time), event)

    def note_write(self, agents, time, cells, state, event):
        """`agents` (one, or an array like the cells') write these cells, finished at their `time`."""
        self.writer[cells], self.written[cells], self.state[cells] = agents, time, state
        self.write[cells] = len(self.writes)
        self.writes.append(event)

    def start_filling(self, agent, time, cells, event):
        """`agent` starts a copy to these cells: what they hold is invalid from now on."""
        self.note_write(agent, time, cells, FILLING, event)
        self.bytes[cells] = POISON


class Knowledge:
    """What an accessor of shared memory knows: a clock (agents,), or one for each of the `rows` (n,) of clocks
    (lanes, agents). asynchronous: through the asynchronous proxy, which knows only those ordinary accesses that a fence has
    covered."""

    def __init__(self, clock, ordinary, asynchronous=False, rows=None):
        self.clock, self.ordinary, self.asynchronous = clock, ordinary, asynchronous
        self.rows = None if rows is None else rows[:, None]

    def known_times(self, agents):
        """The times up to which it knows these agents; those of the asynchronous proxy are agents of their own."""
        return self.clock[agents] if self.rows is None else self.clock[self.rows, agents]

    def access_times(self, agents):
        """The times that decide what it may access."""
        if self.asynchronous:
            agents = np.where(agents < self.ordinary, agents + self.ordinary, agents)
        return self.known_times(agents)

    def lane_access_times(self, first):
        """The times that `access_times` gives, for all lanes of a warp, in an axis behind those of the cells."""
        first += self.ordinary if self.asynchronous else 0
        if self.rows is None:
            return self.clock[first : first + LANES]
        return self.clock[self.rows, np.arange(first, first + LANES)][:, None]

    def knows_lanes(self, first, late):
        """Does it know all of a warp's lanes up to these times?"""
        first += self.ordinary if self.asynchronous else 0
        if self.rows is None:
            return self.clock[first : first + LANES].min() >= late.max()
        return (self.clock[self.rows[:, 0], first : first + LANES].min(1) >= late.max(1)).all()
