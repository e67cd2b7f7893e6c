"""Memory by address: global memory is the host's, shared memory is checked byte by byte.

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
RANK_SHIFT = 24  # an address in shared memory is rank << RANK_SHIFT | address in that block of the cluster, its own too
LOCAL, SHARED = 1 << 41, 1 << 42  # generic addresses at which the windows of local and of shared memory begin
GENERIC_BYTES = 1 << 32  # the size of each of the two windows; no array lies in them
BASE = 1024 + 16  # where dynamic shared memory begins: a launch promises no more than alignment to 16 bytes


class GlobalMemory:
    """The arrays of a launch. A load or store anywhere else is a Hazard. ranges: [(address of the first byte, end)]."""

    def __init__(self, ranges):
        self.writes = 0  # how many ordinary stores there were
        self.ranges = [(low, np.ctypeslib.as_array((ctypes.c_uint8 * (end - low)).from_address(low))) for low, end in ranges]

    def locate(self, warp, addresses, size):
        if np.count_nonzero(addresses % np.uint64(size)):
            raise warp.hazard(
                f"an access of {size} bytes at {int(addresses[addresses % size != 0][0]):#x}, which is no multiple of {size}"
            )
        first, last = int(addresses.min()), int(addresses.max())
        for low, memory in self.ranges:
            if low <= first and last + size <= low + len(memory):
                return memory, (addresses - np.uint64(low)).astype(np.int64)[:, None] + np.arange(size)
        raise warp.hazard(f"{size} bytes at {first:#x} to {last:#x} do not all lie in one of the launch's arrays")

    def load(self, warp, addresses, size):
        """Read `size` bytes at each of n addresses, as an array (n, size)."""
        memory, index = self.locate(warp, addresses, size)
        return memory[index]

    def store(self, warp, addresses, values):
        """Write the rows of an array (n, size) of bytes at n addresses."""
        memory, index = self.locate(warp, addresses, values.shape[1])
        memory[index] = values
        self.writes += 1

    def find_array(self, first, last):
        """(the address of the array in which the bytes from first to last lie, the array's bytes). IndexError: there is
        none."""
        for low, memory in self.ranges:
            if low <= first and last <= low + len(memory):
                return low, memory
        raise IndexError(f"bytes {first:#x} to {last:#x} do not all lie in one of the launch's arrays")


class EmulatedSharedMemory:
    """One block's shared memory. Cells are a slice, or an array of indices. `knowledge.access_times(agents)` gives the times up
    to which an accessor knows these agents' accesses, as an array of the same shape as the cells."""

    def __init__(self, nbytes, agents):
        self.end = BASE + nbytes
        self.bytes = np.full(self.end, POISON, np.uint8)
        self.state = np.full(self.end, NEVER, np.uint8)
        self.last_writer, self.write_time, self.write_event = (np.zeros(self.end, np.int32) for _ in range(3))
        self.events = []  # of the writes
        self.lane_reads = {}  # first agent of a warp -> time of the last reads of each cell, and by which lanes, as bits
        self.reads, self.read_events = {}, {}  # other agents: time of the last read of each cell; (agent, time) -> event
        self.ordinary = agents.ordinary

    # -- is an access ordered after those before it?
    def _find_unordered_write(self, knowledge, cells):
        """(kind, cause) if the last write of some cell is not known to be over, or None."""
        writers, write_times = self.last_writer[cells], self.write_time[cells]
        unordered = knowledge.access_times(writers) < write_times
        if not np.count_nonzero(unordered):  # which takes less than half as long as `any`
            return None
        k = unordered.argmax()
        event = self.events[self.write_event[cells].flat[k]]
        if knowledge.asynchronous and (knowledge.known_times(writers) >= write_times).flat[k]:
            return "fence", f"with no fence.proxy.async after {event}"
        return HAZARD_OF_WRITE[event.kind], f"and nothing orders this after {event}"

    def unreadable(self, knowledge, cells, allow_unwritten=False):
        """Why this reader may not read these cells: (kind, cause), or None. allow_unwritten: cells that nobody has written may
        be read, because the value may never be used; it is poison."""
        state = self.state[cells]
        if cause := self._find_unordered_write(knowledge, cells):
            return cause
        if np.count_nonzero(state == BARRIER):
            return "storage", "where an mbarrier lies"
        if allow_unwritten or not np.count_nonzero(state != VALID):
            return None
        return "never written", "which nobody has written"

    def unwritable(self, knowledge, cells):
        """Why this writer may not write these cells: (kind, cause), or None."""
        if np.count_nonzero(self.state[cells] == BARRIER):
            return "storage", "where an mbarrier lies"
        if cause := self._find_unordered_write(knowledge, cells):
            return cause
        for first, (times, lanes) in self.lane_reads.items():
            read_times, readers = times[cells], lanes[cells]
            if not np.count_nonzero(read_times) or knowledge.knows_lanes(first, read_times):
                continue
            unordered = (read_times[..., None] > knowledge.lane_access_times(first)) & (readers[..., None] >> LANE & 1 != 0)
            if unordered.any():
                lane = int(unordered.any(tuple(range(read_times.ndim))).argmax())
                return self._describe_read(
                    knowledge, unordered[..., lane], np.full(read_times.shape, first + lane), read_times, first
                )
        for agent, times in self.reads.items():
            read_times = times[cells]
            unordered = read_times > knowledge.access_times(np.full(read_times.shape, agent))
            if np.count_nonzero(unordered):
                return self._describe_read(knowledge, unordered, np.full(read_times.shape, agent), read_times, agent)
        return None

    def _describe_read(self, knowledge, unordered, agent, read_times, key):
        k = unordered.argmax()
        event = self.read_events[key, int(read_times.flat[k])]
        if knowledge.asynchronous and (knowledge.known_times(agent) >= read_times).flat[k]:
            return "fence", f"with no fence.proxy.async after {event}"
        return "race", f"and nothing orders this after {event}"

    # -- records of accesses
    def note_lane_reads(self, first, lanes, cells, time, synced, event):
        """Record that these lanes (n,) of the warp whose agents begin at `first` read cells (n, size). synced: the time at
        which the warp's lanes last converged."""
        if first not in self.lane_reads:
            self.lane_reads[first] = np.zeros(self.end, np.int32), np.zeros(self.end, np.uint32)
        times, readers = self.lane_reads[first]
        readers[cells[times[cells] <= synced]] = 0
        np.bitwise_or.at(readers, cells, (np.uint32(1) << lanes.astype(np.uint32))[:, None])
        times[cells] = time
        self.read_events.setdefault((first, time), event)

    def note_read(self, agent, time, cells, event):
        """Record that `agent`, which is no lane, reads these cells until its `time`."""
        if agent not in self.reads:
            self.reads[agent] = np.zeros(self.end, np.int32)
        self.reads[agent][cells] = time
        self.read_events.setdefault((agent, time), event)

    def note_write(self, agents, time, cells, state, event):
        """Record that `agents` (one, or an array like the cells') write these cells, and have finished at their `time`."""
        self.last_writer[cells], self.write_time[cells], self.state[cells] = agents, time, state
        self.write_event[cells] = len(self.events)
        self.events.append(event)

    def start_filling(self, agent, time, cells, event):
        """Record that `agent` starts a copy to these cells. Until it ends, what they hold is invalid."""
        self.note_write(agent, time, cells, FILLING, event)
        self.bytes[cells] = POISON


class Knowledge:
    """Up to which times an accessor of shared memory knows the accesses of all agents. clock: a vector clock (agents,), or the
    clocks of a warp's lanes (lanes, agents), of which `rows` (n,) are meant. asynchronous: the access goes through the async
    proxy, which knows only those ordinary accesses that a fence.proxy.async has covered."""

    def __init__(self, clock, ordinary, asynchronous=False, rows=None):
        self.clock, self.ordinary, self.asynchronous = clock, ordinary, asynchronous
        self.rows = None if rows is None else rows[:, None]

    def known_times(self, agents):
        """The times up to which the accessor knows these agents' accesses. The async proxy's view of an agent is another
        agent."""
        return self.clock[agents] if self.rows is None else self.clock[self.rows, agents]

    def access_times(self, agents):
        """The times up to which these agents' accesses are ordered before an access by this accessor."""
        if self.asynchronous:
            agents = np.where(agents < self.ordinary, agents + self.ordinary, agents)
        return self.known_times(agents)

    def lane_access_times(self, first):
        """The times that `access_times` gives for all lanes of a warp, as an axis behind those of the cells. first: the agent
        of the warp's first lane."""
        first += self.ordinary if self.asynchronous else 0
        if self.rows is None:
            return self.clock[first : first + LANES]
        return self.clock[self.rows, np.arange(first, first + LANES)][:, None]

    def knows_lanes(self, first, late):
        """Are accesses of all lanes of a warp up to these times ordered before an access by this accessor?"""
        first += self.ordinary if self.asynchronous else 0
        if self.rows is None:
            return self.clock[first : first + LANES].min() >= late.max()
        return (self.clock[self.rows[:, 0], first : first + LANES].min(1) >= late.max(1)).all()
