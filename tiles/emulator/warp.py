"""A warp that executes PTX: its registers, its lanes' clocks, its branches, and its lanes' accesses to memory.

A register is an array of 32 unsigned integers, one a lane: the register's bits. When lanes diverge at a branch, one side of it
runs after the other, and both reconverge at the branch's immediate postdominator, as ptxas makes them do.
"""

import contextvars
import functools
from collections import Counter

import numpy as np
from greenlet import greenlet

from ..interpreter.hazard import Hazard, WarpPlace
from ..interpreter.shadow import POISON, TIME, VALID, Event
from ..interpreter.warp import InterpretedWarp
from ..layout import LANES, WARPGROUP
from .memory import LOCAL, RANK_SHIFT, Knowledge

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@functools.lru_cache(4096)  # loops repeat the same pattern for other tiles
def _busiest(addresses, size):
    """The number of different words that the busiest bank serves in a pass of 128 bytes. addresses: those of the lanes, as
    int64. size: the bytes that a lane accesses."""
    words, lanes = (np.frombuffer(addresses, np.int64)[:, None] + np.arange(0, size, 4)) // 4, max(1, min(LANES, 128 // size))
    passes = (set(words[first : first + lanes].ravel().tolist()) for first in range(0, len(words), lanes))
    return max(max(Counter(word % 32 for word in requested).values()) for requested in passes)


class InstructionPlace(WarpPlace):
    """A warp and the instruction that it executes. code_positions: (its program, the instruction)."""

    @property
    def _listing_entry(self):
        program, instr = self.code_positions
        return program.listing[instr.index]

    @property
    def frames(self):
        """(file, line) of the Python that the instruction comes from, alone in a tuple: inlined frames are not known."""
        return (self._listing_entry.place,)

    @property
    def code(self):
        """The instruction, and its line in the text of PTX."""
        return f"PTX line {self._listing_entry.number} `{self._listing_entry.text[:100]}`"


class Thread:
    """One lane of a warp, with what an mbarrier's arrivals and waits need of it: agent, clock, place."""

    def __init__(self, warp, lane):
        self.warp, self.lane, self.block = warp, lane, warp.block
        self.agent, self.clock = warp.first + lane, warp.clocks[lane]
        self.tick, self.place, self.hazard, self.wait_until = warp.tick, warp.place, warp.hazard, warp.wait_until
        self.index = warp.index


class EmulatedWarp(greenlet):
    """Warp `index` of a block, a coroutine that executes a program from its beginning."""

    def __init__(self, block, index, program):
        super().__init__(self._execute)
        self.gr_context = contextvars.copy_context()  # NumPy's error state
        self.block, self.index, self.program = block, index, program
        self.group, self.rank = divmod(index, WARPGROUP)
        self.agents = block.agents
        self.agent = self.first = (block.rank * block.size + index) * LANES  # the agent of its first lane
        self.copier = self.agents.warps + self.first  # the agent of that lane's copies by cp.async
        self.clocks = np.zeros((LANES, self.agents.count), TIME)
        self.lane_agents = np.arange(LANES), self.first + np.arange(LANES)
        self.time, self.synced = 0, 0
        self.ready, self.why = None, lambda: ""
        self.registers, self.settings = block.entry_registers, 0
        self.cluster_arrivals, self.cluster_waits, self.cluster_arrival_place, self.collectives = 0, 0, None, 0
        self.instruction = program.code[0]
        self.mask, self.full = np.ones(LANES, bool), True
        self.r = [None] * len(program.widths)
        self.threads = [Thread(self, lane) for lane in range(LANES)]
        self.local = np.full((LANES, program.local_bytes), POISON, np.uint8)  # each thread's own memory
        self.copies, self.groups = [], []  # cp.async: the copies of the group that is not committed yet; groups of copies
        self.stores, self.store_groups = [], []  # TMA's stores: of the group that is not committed yet; groups of stores
        self.stores_known = 0  # how many groups of stores were waited for
        self.mmas, self.mma_groups, self.mmas_done = [], [], 0  # the same of wgmmas
        self.pending = set()  # slots of pending accumulators
        self.fenced = [], None  # values at the last wgmma.fence, their ids

    # -- clocks, hazards and collectives: as in the interpreter
    wait_until, hazard, check_collective, set_registers, close_collectives = (
        InterpretedWarp.wait_until,
        InterpretedWarp.hazard,
        InterpretedWarp.check_collective,
        InterpretedWarp.set_registers,
        InterpretedWarp.close_collectives,
    )
    _check_access, __str__ = InterpretedWarp._check_access, InterpretedWarp.__str__
    _describe_unawaited = staticmethod(lambda cause: "")  # a Hazard's place names the instruction

    def tick(self):
        """Advance the clocks of all lanes, and return the new time."""
        self.time += 1
        self.clocks[self.lane_agents] = self.time
        return self.time

    @property
    def clock(self):
        """The times of all agents that some active lane knows of."""
        return np.maximum.reduce(self.clocks)

    def learn(self, clock):
        """All lanes know what `clock` knows."""
        np.maximum(self.clocks, clock, out=self.clocks)

    def join_lanes(self):
        """The lanes converge: each knows what any of them knows."""
        self.clocks[:] = np.maximum.reduce(self.clocks)
        self.synced = self.time

    def place(self):
        """The InstructionPlace of the instruction that the warp executes."""
        return InstructionPlace(self.block.index, self.index, (self.program, self.instruction))

    def converged(self, operation):
        """Raises a Hazard unless all lanes of the warp execute this instruction together."""
        if not self.full:
            lanes = np.flatnonzero(~self.mask)
            raise self.hazard(f"{operation} takes all lanes of a warp, and lanes {lanes.min()} .. are elsewhere", "divergence")

    # -- registers
    def get(self, reg):
        """The value of a register in all lanes."""
        value = self.r[reg.slot]
        if value.__class__ is not np.ndarray:
            if value is None:
                raise self.hazard("reads a register that nobody has written", "never written")
            place = value.place
            raise self.hazard("reads a register that an mma in flight is to write", "wait", place)
        return value

    def move(self, to, source):
        """Copy a register. The pending accumulator of a wgmma is copied as such, which does not wait for it."""
        value = self.r[source.slot]
        if isinstance(value, np.ndarray) or value is None:
            self.set(to, self.get(source))
        elif not self.full:
            self.get(source)
        else:
            self.r[to.slot] = value
            self.pending.add(to.slot)

    def resolve_pending(self):
        """Replace registers of completed wgmmas by their values, which no fence needs to follow."""
        pending_values = {slot: self.r[slot].value for slot in self.pending if getattr(self.r[slot], "value", None) is not None}
        for slot, value in pending_values.items():
            self.r[slot] = value
        self.pending = {slot for slot in self.pending - pending_values.keys() if not isinstance(self.r[slot], np.ndarray)}
        values, ids = self.fenced
        values += pending_values.values()
        if ids is not None:
            ids.update(map(id, pending_values.values()))

    def fence_registers(self):
        """wgmma.fence: from here on a wgmma may read and overwrite the registers' present values."""
        self.fenced = list(self.r), None

    def fenced_ids(self):
        """The identities of the values that registers had at the last wgmma.fence, or got from wgmmas since. They stay alive in
        `fenced`."""
        values, ids = self.fenced
        if ids is None:
            self.fenced = values, (ids := set(map(id, values)))
        return ids

    def set(self, reg, value):
        """Write a register in the active lanes."""
        if not self.full:
            old = self.r[reg.slot]
            if old is not None:
                value = np.where(self.mask, value, old)
        self.r[reg.slot] = value

    # -- the program
    def _execute(self):
        code, runs, reconvergence_points, unguarded = (
            self.program.code,
            self.program.runs,
            self.program.reconvergence_points,
            self.program.unguarded,
        )
        end, executed = len(code), self.block.cluster.counts.executed
        # of each side of a branch: the next instruction, the mask of its lanes, where they reconverge, how many they are
        stack = [[0, np.ones(LANES, bool), end, LANES]]
        while stack:
            entry = stack[-1]
            pc, mask, reconvergence_point, lanes = entry
            if pc == reconvergence_point or not lanes:
                stack.pop()
                continue
            self.mask, self.full = mask, lanes == LANES
            while pc != reconvergence_point and (run := unguarded[pc]) is not None:  # neither a guard nor a branch
                self.instruction = code[pc]
                executed[code[pc].opcode] += 1
                run(self)
                pc += 1
            entry[0] = pc
            if pc == reconvergence_point:
                continue
            instr = self.instruction = code[pc]
            executed[instr.opcode] += 1
            if instr.guard is not None:
                mask_of_guard = mask & (self.get(instr.guard).astype(bool) ^ instr.negated)
                count = int(np.count_nonzero(mask_of_guard))
            else:
                mask_of_guard, count = mask, lanes
            if instr.target is not None:
                if count == lanes:
                    entry[0] = instr.target
                elif not count:
                    entry[0] = pc + 1
                else:
                    entry[0], rest = reconvergence_points[pc], mask & ~mask_of_guard
                    stack += [
                        [pc + 1, rest, reconvergence_points[pc], lanes - count],
                        [instr.target, mask_of_guard, reconvergence_points[pc], count],
                    ]
                continue
            if instr.opcode in ("ret", "exit"):
                for side in stack:
                    side[1] = side[1] & ~mask_of_guard
                    side[3] = int(np.count_nonzero(side[1]))
                if count == lanes:
                    continue
            elif count:
                self.mask, self.full = mask_of_guard, count == LANES
                runs[pc](self)
            entry[0] = pc + 1

    # -- shared memory
    def find_owner(self, address):
        """(the block of the cluster in whose memory a shared::cluster address lies, the address there)"""
        rank, blocks = address >> RANK_SHIFT, self.block.cluster.blocks
        if rank >= len(blocks):
            raise self.hazard(f"the cluster has no block {rank}", "bounds")
        if rank != self.block.rank and "::cluster" not in self.instruction.opcode:
            raise self.hazard(f"an address of block {rank} of the cluster, which takes shared::cluster", "bounds")
        return blocks[rank], address & (1 << RANK_SHIFT) - 1

    def knowledge(self, rows=None, asynchronous=False):
        """The Knowledge of each of these lanes. rows: None for what all lanes of the warp know in common."""
        if rows is None:
            return Knowledge(np.minimum.reduce(self.clocks), self.agents.ordinary, asynchronous)
        return Knowledge(self.clocks, self.agents.ordinary, asynchronous, rows)

    def active_knowledge(self):
        """The Knowledge that all active lanes have in common."""
        return Knowledge(np.minimum.reduce(self.clocks if self.full else self.clocks[self.mask]), self.agents.ordinary)

    def lane_knowledge(self, lane, asynchronous=False):
        """The Knowledge of one lane."""
        return Knowledge(self.clocks[lane], self.agents.ordinary, asynchronous)

    def check_range(self, first, last, align, owner=None):
        """Raises a Hazard unless these bytes lie in shared memory, at a multiple of `align`."""
        shadow = (owner or self.block).shadow
        if first % align:
            raise self.hazard(f"shared memory at {first}, which is no multiple of {align}")
        if not 0 <= first <= last <= shadow.end:
            raise self.hazard(f"bytes {first} to {last} of shared memory, which ends at {shadow.end}")

    def _cells(self, addresses, size, align=None):
        """(owner, lanes, cells) of an access to shared memory by the active lanes: the block in whose memory it lies, the
        lanes' indices, the addresses of each lane's bytes."""
        lanes = np.flatnonzero(self.mask)
        in_block = addresses[lanes].astype(np.int64)
        ranks = in_block >> RANK_SHIFT
        if np.count_nonzero(ranks != ranks[0]):
            raise self.hazard("one instruction reaches into several blocks of a cluster", "language")
        owner, _ = self.find_owner(int(in_block[0]))
        in_block &= (1 << RANK_SHIFT) - 1
        if np.count_nonzero(in_block % (align or size)):
            raise self.hazard(
                f"shared memory at {in_block[in_block % (align or size) != 0][0]}, which is no multiple of {align or size}"
            )
        self.check_range(int(in_block.min()), int(in_block.max()) + size, 1, owner)
        self._count_passes(in_block, size)
        return owner, lanes, in_block[:, None] + np.arange(size)

    def _count_passes(self, addresses, size):
        """Record the number of different words that the busiest bank serves in a pass of 128 bytes."""
        ways, opcode = self.block.cluster.counts.ways, self.instruction.opcode
        ways[opcode] = max(ways.get(opcode, 0), _busiest((addresses - (addresses[0] & -128)).tobytes(), size))

    def read_shared(self, addresses, size, allow_unwritten=False):
        """Load `size` bytes for each active lane, as an array (lanes, size). allow_unwritten: bytes that nobody has written may
        be among them."""
        operation = "reads shared memory"
        owner, lanes, cells = self._cells(addresses, size)
        owner.check_reachable(self.threads[lanes[0]], operation)
        self._check_access(owner.shadow.unreadable(self.knowledge(lanes), cells, allow_unwritten), operation)
        time = self.tick()
        owner.note_visit(self, time, operation)
        owner.shadow.note_lane_reads(self.first, lanes, cells, time, self.synced, Event("read", "the read", self.place()))
        return owner.shadow.bytes[cells]

    def write_shared(self, addresses, values):
        """Store the rows of an array (active lanes, size) of bytes, one for each active lane."""
        operation = "writes shared memory"
        owner, lanes, cells = self._cells(addresses, values.shape[1])
        owner.check_reachable(self.threads[lanes[0]], operation)
        self._check_access(owner.shadow.unwritable(self.knowledge(lanes), cells), operation)
        time, writers = self.tick(), self.first + lanes
        if owner is not self.block:
            writers = self.block.cluster.peer_writers.start + writers
            self.clocks[lanes, writers] = time
        owner.note_visit(self, time, operation)
        event = Event("store", "the write", self.place())
        owner.shadow.note_write(writers[:, None], time, cells, VALID, event)
        owner.shadow.bytes[cells] = values
        if np.count_nonzero(owner.shadow.bytes[cells] != values):
            raise self.hazard(f"{operation}, and lanes put different numbers in the same place", "race")

    def local_bytes_of(self, addresses, size):
        """The indices into `local`, lanes and bytes, of an access of `size` bytes by each active lane."""
        addresses = addresses[self.mask].astype(np.int64) - LOCAL
        end = self.local.shape[1]
        if np.count_nonzero(addresses % size) or addresses.min() < 0 or addresses.max() + size > end:
            raise self.hazard(f"{size} bytes at {addresses.min()} to {addresses.max()} of local memory, which ends at {end}")
        return np.flatnonzero(self.mask)[:, None], addresses[:, None] + np.arange(size)

    def fence_async(self):
        """fence.proxy.async: the async proxy now knows all ordinary accesses that the active lanes know."""
        n = self.agents.ordinary
        self.clocks[self.mask, n : 2 * n] = self.clocks[self.mask, :n]

    def close(self, _):
        """Raises a Hazard if the block ends before the warp has waited for all its copies, stores and wgmmas."""
        copies = [copy for group in self.groups for copy in group if not copy.awaited] + self.copies
        for group in [*self.store_groups[self.stores_known :], self.stores, copies]:
            for work in group if isinstance(group, list) else [group]:
                raise Hazard("unfinished", f"the block ends, and nobody has waited for {work.operation}", work.place)
        if late := [mma for group in [*self.mma_groups[self.mmas_done :], self.mmas] for mma in group]:
            raise Hazard("unfinished", "the block ends, and this mma has not been waited for", late[0].place)
        self.close_collectives()
