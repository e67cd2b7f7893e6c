"""Shared memory under supervision: its bytes, and for every word who wrote it, who reads it and what state it is in.

**Clocks.** Whatever touches shared memory is an *agent* with a clock of its own: each warp; each warp once more as the
asynchronous proxy sees it; each warpgroup's mmas; each mbarrier's copies; each warp's bulk stores. A warp carries a vector
with the time of every agent up to which it knows what happened (Lamport, Fidge, Mattern; FastTrack's epochs, Flanagan and
Freund 2009). An access is ordered after an earlier one if the vector has reached that one's time; if not, the two race,
whatever order this run happened to take.

**Proxies.** wgmma and TMA see shared memory through the asynchronous proxy: they see an ordinary store only if a
`fence.proxy.async` stands between. A fence copies the warp's knowledge of the ordinary agents to their asynchronous
doubles, and an asynchronous access consults the doubles.

The unit is a word of 4 bytes, the smallest thing any op stores; so every byte has its state.
"""
import numpy as np

WORD = 4
NEVER, FILLING, VALID, RELEASED = range(4)
STATES = {
    NEVER: "was never written",
    FILLING: "is still being filled by a copy in flight",
    RELEASED: "was released by all its readers",
}
POISON = 0xFF  # as bf16, fp16 and fp32: NaN


class Hazard(Exception):
    """What would be a race, a hang, a fault or a silent wrong result on the GPU."""


class Shadow:
    """Shared memory of one block. Agents: warps 0..W-1, their asynchronous doubles W..2W-1, then as `agent` hands them out."""

    def __init__(self, nbytes, warps, agents):
        words = -(-nbytes // WORD)
        self.bytes = np.full(words * WORD, POISON, np.uint8)
        self.state = np.zeros(words, np.uint8)
        self.writer, self.written = np.zeros(words, np.int16), np.zeros(words, np.int64)
        self.read = {}  # agent -> time of its last read of each word
        self.warps, self.agents, self.next_agent = warps, agents, 2 * warps
        self.events = {}  # (agent, time) -> what it did, for messages

    def agent(self):
        """A new agent's number."""
        self.next_agent += 1
        assert self.next_agent <= self.agents
        return self.next_agent - 1

    def fence(self, clock):
        """fence.proxy.async: what the warp knows of ordinary accesses, the asynchronous proxy now sees too."""
        np.maximum(clock[: self.warps], clock[self.warps : 2 * self.warps], out=clock[self.warps : 2 * self.warps])

    def _unordered(self, clock, words, asynchronous):
        """The first of `words` whose last write the clock does not cover, as (agent, time, unfenced), or None."""
        writer, written = self.writer[words], self.written[words]
        late = clock[writer] < written
        if late.any():
            k = late.argmax()
            return writer[k], written[k], False
        if asynchronous:
            ordinary = writer < self.warps
            late = ordinary & (clock[np.where(ordinary, writer + self.warps, 0)] < written)
            if late.any():
                k = late.argmax()
                return writer[k], written[k], True
        return None

    def _refuse(self, unordered, doing):
        agent, time, unfenced = unordered
        event = self.events.get((int(agent), int(time)), "an earlier access")
        if unfenced:
            return Hazard(f"{doing}, but the asynchronous proxy may not see yet what {event} wrote: fence.proxy.async is missing")
        return Hazard(f"race: {doing}, and nothing orders this after {event}")

    def check_read(self, clock, words, doing, asynchronous):
        """May these words be read by one who knows `clock`?"""
        state = self.state[words]
        if (state != VALID).any():
            raise Hazard(f"{doing}, which {STATES[int(state[state != VALID][0])]}")
        if unordered := self._unordered(clock, words, asynchronous):
            raise self._refuse(unordered, doing)

    def note_read(self, agent, time, words, event):
        """`agent` reads these words at `time`."""
        self.read.setdefault(agent, np.zeros(len(self.state), np.int64))[words] = time
        self.events[agent, time] = event

    def check_write(self, clock, words, doing, asynchronous):
        """May these words be overwritten by one who knows `clock`?"""
        if unordered := self._unordered(clock, words, asynchronous):
            raise self._refuse(unordered, doing)
        for agent, times in self.read.items():
            late = times[words] > clock[agent]
            if late.any():
                raise self._refuse((agent, times[words][late.argmax()], False), doing)

    def note_write(self, agent, time, words, state, event):
        """`agent` writes these words, finished at its `time`."""
        self.writer[words], self.written[words], self.state[words] = agent, time, state
        self.events[agent, time] = event

    def reading(self, agent, clock, words):
        """Does `agent` still read any of these words, as far as `clock` knows?"""
        return agent in self.read and bool((self.read[agent][words] > clock[agent]).any())

    def poison(self, words):
        """All readers have released these words."""
        self.state[words] = RELEASED
        self.bytes.reshape(-1, WORD)[words] = POISON

    def get(self, address, offsets, dtype):
        """The elements at byte `offsets` from `address`, as an array of their shape."""
        unsigned = np.dtype(f"u{dtype.itemsize}")
        return self.bytes.view(unsigned)[(address + offsets) // dtype.itemsize].view(dtype)

    def put(self, address, offsets, values):
        """Store values at byte `offsets` from `address`."""
        unsigned = np.dtype(f"u{values.dtype.itemsize}")
        self.bytes.view(unsigned)[(address + offsets) // values.dtype.itemsize] = np.ascontiguousarray(values).view(unsigned)
