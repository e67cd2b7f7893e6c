"""How warps wait for each other: mbarriers by address and parity, named barriers, the cluster's barrier, fences, setmaxnreg."""

import numpy as np

from ..interpreter.barriers import Mbarrier
from ..interpreter.shadow import Event
from ..layout import LANES
from .memory import BARRIER, RANK_SHIFT
from .moves import address, check_whole_warp
from .table import means, operand
from .text import Imm

MBARRIER_BYTES = 8


class ParityMbarrier(Mbarrier):
    """An mbarrier whose waits name a parity. The phase that a wait means is the last one that the waiting lanes know to be
    complete, or the one after it, whichever has this parity. fences: (lane's agent, its time) of each fence.mbarrier_init
    that came after the barrier was set up."""

    def __init__(self, block, name, count):
        super().__init__(block, name, count)
        self.fences = []

    def wait(self, warp, parity, acquires_cluster=True):
        """Block the active lanes until the phase of this parity is complete. They then know what the arriving threads knew.
        acquires_cluster: the wait acquires at cluster scope; if not, it learns nothing of what peers wrote to this block's
        memory."""
        clock = warp.active_knowledge().clock
        known = max(n for n in range(int(clock[self.agent]), self.phase + 1) if self.is_known(clock, n))
        phase = known if (known - 1) & 1 == parity else known + 1
        if phase > known:
            self._check_not_missed(warp, phase, "")
            warp.wait_until(lambda: self.phase >= phase, lambda: self._describe_missing(phase))
            self._check_not_missed(warp, phase, "")
            published = self.published[phase] if acquires_cluster else _without_peer_writes(warp, self.published[phase])
            warp.clocks[warp.mask] = np.maximum(warp.clocks[warp.mask], published)
        self.waits[warp.agent] = phase, warp.tick(), warp.place()

    def _is_ordered_after(self, index, time):
        """Is a time of one of a warp's lanes ordered before this phase? The lanes of a warp have waited together, so that one
        of them suffices."""
        return self.clock[index : index + LANES].max() >= time


def _without_peer_writes(warp, clock):
    """A clock without the times of writes to peers' memory."""
    known = clock.copy()
    known[warp.block.cluster.peer_writers] = 0
    return known


def mbarrier(w, owner, bar_address, knowledge):
    """The mbarrier at an address of a block's shared memory. Raises a Hazard if there is none, or if its initialisation is not
    ordered before an access by the accessor with this Knowledge."""
    bar = owner.barriers_at.get(bar_address)
    if bar is None:
        raise w.hazard(f"no mbarrier lies at {bar_address} of shared memory", "storage")
    cells = slice(bar_address, bar_address + MBARRIER_BYTES)
    shadow = owner.shadow
    unordered = knowledge.access_times(shadow.last_writer[cells]) < shadow.write_time[cells]
    if np.count_nonzero(unordered):
        event = shadow.events[shadow.write_event[bar_address]]
        if (knowledge.known_times(shadow.last_writer[cells]) >= shadow.write_time[cells]).all():
            if any(knowledge.known_times(agent) >= time for agent, time in bar.fences):
                return bar
            raise w.hazard(f"uses {bar.name}, with no fence.mbarrier_init after {event}", "fence")
        raise w.hazard(f"uses {bar.name}, and nothing orders this after {event}", "race")
    return bar


def _lane_addresses(w, operand_):
    """[(lane, its Thread, the block in whose memory the operand's address lies, the address there)] of the active lanes."""
    addresses = address(w, operand_, np.uint32)
    return [(lane, w.threads[lane], *w.find_owner(int(addresses[lane]))) for lane in np.flatnonzero(w.mask)]


def only_lane(w, operation):
    """The index of the one active lane. Raises a Hazard if several are active."""
    lanes = np.flatnonzero(w.mask)
    if len(lanes) != 1:
        raise w.hazard(f"{operation} by {len(lanes)} lanes: each would do it once", "divergence")
    return int(lanes[0])


# ---- mbarriers -----------------------------------------------------------------------------------------------------
@means(r"mbarrier\.init\.shared(?:::cta)?\.b64")
def _(_, w, instr):
    count = operand(instr.operands[1], np.uint32)(w)
    for lane, thread, _, bar_address in _lane_addresses(w, instr.operands[0]):
        cells = slice(bar_address, bar_address + MBARRIER_BYTES)
        w.check_range(bar_address, bar_address + MBARRIER_BYTES, MBARRIER_BYTES)
        shadow = w.block.shadow
        if np.count_nonzero(shadow.state[cells] == BARRIER):
            raise w.hazard(f"sets up an mbarrier at {bar_address}, where one lies", "storage")
        w._check_access(shadow.unwritable(w.lane_knowledge(lane), cells), "sets up an mbarrier")
        event = Event("store", f"the set-up of the mbarrier at {bar_address}", w.place())
        shadow.note_write(thread.agent, w.tick(), cells, BARRIER, event)
        w.block.barriers_at[bar_address] = ParityMbarrier(w.block, f"the mbarrier at {bar_address}", int(count[lane]))


@means(r"mbarrier\.inval\.shared(?:::cta)?\.b64")
def _(_, w, instr):
    for *_, bar_address in _lane_addresses(w, instr.operands[0]):
        w.block.barriers_at.pop(bar_address, None)
        w.block.shadow.state[bar_address : bar_address + MBARRIER_BYTES] = 0


@means(r"fence\.mbarrier_init\.release\.cluster")
def _(_, w, instr):
    """Publishes the initialisation of mbarriers, and no other write."""
    time, shadow = w.tick(), w.block.shadow
    for lane in np.flatnonzero(w.mask):
        for bar_address, bar in w.block.barriers_at.items():
            if w.clocks[lane, shadow.last_writer[bar_address]] >= shadow.write_time[bar_address]:
                bar.fences.append((w.first + int(lane), time))


@means(r"fence\.acq_rel\.gpu")
def _(_, w, instr):
    """Does nothing: what one block writes to global memory the next ones see."""


@means(r"fence\.proxy\.async(\.shared::cta|\.global)?")
def _(match, w, instr):
    if match[1] != ".global":  # accesses to global memory are not checked
        w.fence_async()


@means(r"mbarrier\.arrive(\.expect_tx)?(?:\.(release|relaxed)\.(cta|cluster))?\.shared(?:::(cta|cluster))?\.b64")
def _(match, w, instr):
    _, dst, *nbytes = instr.operands
    expected = operand(nbytes[0], np.uint32)(w) if nbytes else None
    for lane, thread, owner, bar_address in _lane_addresses(w, dst):
        bar = mbarrier(w, owner, bar_address, w.lane_knowledge(lane))
        published = match[2] != "relaxed" and (owner is w.block or match[3] == "cluster")
        bar.arrive(thread if published else _RelaxedArrival(thread), int(expected[lane]) if nbytes and match[1] else 0)


class _RelaxedArrival:
    """A thread that arrives at a peer's barrier without a release: its writes there are not published, only its arrival."""

    def __init__(self, thread):
        self.thread, self.clock = thread, _without_peer_writes(thread, thread.clock)
        self.agent, self.block, self.place, self.hazard = thread.agent, thread.block, thread.place, thread.hazard

    def tick(self):
        """Advance the clock, and return the new time."""
        time = self.thread.tick()
        self.clock[self.agent] = time
        return time


@means(r"mbarrier\.(?:try_wait|test_wait)\.parity(?:\.acquire)?(?:\.(cta|cluster))?\.shared(?:::cta)?\.b64")
def _(match, w, instr):
    done, where, parity = instr.operands[:3]
    parities, bars = operand(parity, np.uint32)(w), set()
    for lane, *_, bar_address in _lane_addresses(w, where):
        bars.add((bar_address, int(parities[lane]) & 1))
    if len(bars) != 1:
        raise w.hazard("lanes wait for different barriers or parities", "divergence")
    ((bar_address, parity),) = bars
    mbarrier(w, w.block, bar_address, w.active_knowledge()).wait(w, parity, match[1] == "cluster")
    w.set(done, np.ones(LANES, bool))


# ---- named barriers ------------------------------------------------------------------------------------------------
class _ConvergedWarp:
    """A warp whose lanes have converged and arrive at a barrier together: one clock for all of them."""

    def __init__(self, warp):
        warp.join_lanes()
        self.warp, self.clock = warp, warp.clocks[0].copy()
        self.agent, self.index, self.group, self.block = warp.agent, warp.index, warp.group, warp.block
        self.place, self.hazard, self.wait_until = warp.place, warp.hazard, warp.wait_until
        self.cluster_arrivals, self.cluster_waits, self.cluster_arrival_place = (
            warp.cluster_arrivals,
            warp.cluster_waits,
            warp.cluster_arrival_place,
        )

    def tick(self):
        """Advance the clock, and return the new time."""
        self.clock[self.agent : self.agent + LANES] = time = self.warp.tick()
        return time

    def learn(self, clock):
        """All lanes know what `clock` knows."""
        self.warp.learn(clock)


def _uniform(w, operand_, operation):
    """An operand that must be the same number in all lanes."""
    values = operand(operand_, np.uint32)(w)
    if (values != values[0]).any():
        raise w.hazard(f"{operation}: the lanes name different barriers or numbers of threads", "divergence")
    return int(values[0])


def _sync_named_barrier(w, instr, wait):
    w.converged(instr.opcode)
    number = _uniform(w, instr.operands[0], instr.opcode)
    threads = _uniform(w, instr.operands[1], instr.opcode) if len(instr.operands) > 1 else LANES * w.block.size
    w.block.named(number, threads).sync(_ConvergedWarp(w), threads, wait)


@means(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?")
def _(match, w, instr):
    _sync_named_barrier(w, instr, match[1] == "sync")


@means(r"bar\.red\.(and|or)\.pred")
def _(match, w, instr):
    dst, number, threads, flag = instr.operands
    w.converged("bar.red")
    number, threads = _uniform(w, number, "bar.red"), _uniform(w, threads, "bar.red")
    bar = w.block.named(number, threads)
    votes = w.block.votes.setdefault((number, bar.generation), [])
    votes.append(operand(flag, np.bool_)(w))
    bar.sync(_ConvergedWarp(w), threads, vote=True)
    w.set(dst, np.full(LANES, (np.any if match[1] == "or" else np.all)(votes)))


@means(r"bar\.warp\.sync")
def _(_, w, instr):
    check_whole_warp(w, "bar.warp.sync", operand(instr.operands[0], np.uint32)(w))
    w.join_lanes()


# ---- clusters ------------------------------------------------------------------------------------------------------
@means(r"barrier\.cluster\.arrive(\.relaxed|\.release)?(?:\.aligned)?")
def _(match, w, instr):
    w.converged("barrier.cluster.arrive")
    converged = _ConvergedWarp(w)
    if match[1] == ".relaxed":
        converged.clock[:] = 0
    w.block.cluster.barrier.arrive(converged)
    w.cluster_arrivals, w.cluster_arrival_place = converged.cluster_arrivals, converged.cluster_arrival_place


@means(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?")
def _(_, w, instr):
    w.converged("barrier.cluster.wait")
    converged = _ConvergedWarp(w)
    w.block.cluster.barrier.wait(converged)
    w.cluster_waits = converged.cluster_waits


@means(r"mapa\.shared::cluster\.u32")
def _(_, w, instr):
    dst, source, rank = instr.operands
    w.set(
        dst,
        operand(source, np.uint32)(w) & np.uint32((1 << RANK_SHIFT) - 1) | operand(rank, np.uint32)(w) << np.uint32(RANK_SHIFT),
    )


# ---- the rest ------------------------------------------------------------------------------------------------------
@means(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def _(match, w, instr):
    w.converged("setmaxnreg")
    count: Imm = instr.operands[0]
    w.set_registers(int(count.text), match[1] == "inc")


@means(r"griddepcontrol\.(wait|launch_dependents)")
def _(match, w, instr):
    """Does nothing: the emulator runs grids one after the other."""


@means(r"nanosleep\.u32")
def _(_, w, instr):
    """Block until global memory is written: a warp that sleeps polls it, and would read the same value until then."""
    memory = w.block.cluster.memory
    before = memory.writes
    w.wait_until(
        lambda: memory.writes > before, lambda: "something to be written to global memory, by blocks before this one or its own"
    )


@means(r"prefetch\.tensormap|prefetch\..*|cp\.async\.bulk\.prefetch\.tensor\..*|pragma")
def _(_, w, instr):
    """Does nothing: these instructions change nothing that a kernel could see."""
