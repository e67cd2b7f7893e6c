"""How warps wait for each other: mbarriers by address and parity, named barriers, the cluster's barrier, fences, setmaxnreg."""

import numpy as np

from ..interpreter.barriers import Mbarrier
from ..interpreter.shadow import Event
from ..layout import LANES
from .memory import BARRIER, WINDOW
from .moves import address, everyone
from .table import means, operand
from .text import Imm

MBARRIER_BYTES = 8


class ByParity(Mbarrier):
    """An mbarrier whose waiters name a parity. Which phase they mean follows from what they know: the last phase that they know
    to be complete, or the one after it, whichever has this parity. fences: (lane's agent, its time) of each fence.mbarrier_init
    that came after the barrier was set up."""

    def __init__(self, block, name, count):
        super().__init__(block, name, count)
        self.fences = []

    def wait(self, warp, parity, everything=True):
        """The active lanes wait until the phase of this parity is complete. They then know what those knew that arrived;
        without `everything`, except what peers wrote to this block's memory."""
        clock = warp.active_knowledge().clock
        known = max(n for n in range(int(clock[self.agent]), self.phase + 1) if self.is_known(clock, n))
        phase = known if (known - 1) & 1 == parity else known + 1
        if phase > known:
            self._check_not_missed(warp, phase, "")
            warp.wait_until(lambda: self.phase >= phase, lambda: self._describe_missing(phase))
            self._check_not_missed(warp, phase, "")
            learned = self.published[phase] if everything else _without_peer_writes(warp, self.published[phase])
            warp.clocks[warp.mask] = np.maximum(warp.clocks[warp.mask], learned)
        self.waits[warp.agent] = phase, warp.tick(), warp.place()

    def _is_ordered_after(self, index, time):
        """Is it for some lane of the warp? Its lanes have waited together."""
        return self.clock[index : index + LANES].max() >= time


def _without_peer_writes(warp, clock):
    """A clock without the times of writes to peers' memory."""
    known = clock.copy()
    known[warp.block.cluster.peer_writers] = 0
    return known


def mbarrier(w, owner, at, knowledge):
    """The mbarrier at an address of a block. A Hazard if the one who `asks` does not know that it is set up."""
    bar = owner.barriers_at.get(at)
    if bar is None:
        raise w.hazard(f"no mbarrier lies at {at} of shared memory", "plan")
    cells = slice(at, at + MBARRIER_BYTES)
    shadow = owner.shadow
    bad = knowledge.access_times(shadow.writer[cells]) < shadow.written[cells]
    if np.count_nonzero(bad):
        event = shadow.writes[shadow.write[at]]
        if (knowledge.known_times(shadow.writer[cells]) >= shadow.written[cells]).all():
            if any(knowledge.known_times(agent) >= time for agent, time in bar.fences):
                return bar
            raise w.hazard(f"uses {bar.name}, with no fence.mbarrier_init after {event}", "fence")
        raise w.hazard(f"uses {bar.name}, and nothing orders this after {event}", "race")
    return bar


def _lanes(w, operand_):
    """[(lane, its thread, block, address there)] of the active lanes."""
    at = address(w, operand_, np.uint32)
    return [(lane, w.threads[lane], *w.find_owner(int(at[lane]))) for lane in np.flatnonzero(w.mask)]


def only_lane(w, operation):
    """The number of the active lane. Hazard: several are active."""
    lanes = np.flatnonzero(w.mask)
    if len(lanes) != 1:
        raise w.hazard(f"{operation} by {len(lanes)} lanes: each would do it once", "divergence")
    return int(lanes[0])


# ---- mbarriers -----------------------------------------------------------------------------------------------------
@means(r"mbarrier\.init\.shared(?:::cta)?\.b64")
def _(_, w, at):
    count = operand(at.operands[1], np.uint32)(w)
    for lane, thread, _, bar_address in _lanes(w, at.operands[0]):
        cells = slice(bar_address, bar_address + MBARRIER_BYTES)
        w.check_range(bar_address, bar_address + MBARRIER_BYTES, MBARRIER_BYTES)
        shadow = w.block.shadow
        if np.count_nonzero(shadow.state[cells] == BARRIER):
            raise w.hazard(f"sets up an mbarrier at {bar_address}, where one lies", "plan")
        w._check_access(shadow.unwritable(w.lane_knowledge(lane), cells), "sets up an mbarrier")
        event = Event("store", f"the set-up of the mbarrier at {bar_address}", w.place())
        shadow.note_write(thread.agent, w.tick(), cells, BARRIER, event)
        w.block.barriers_at[bar_address] = ByParity(w.block, f"the mbarrier at {bar_address}", int(count[lane]))


@means(r"mbarrier\.inval\.shared(?:::cta)?\.b64")
def _(_, w, at):
    for *_, bar_address in _lanes(w, at.operands[0]):
        w.block.barriers_at.pop(bar_address, None)
        w.block.shadow.state[bar_address : bar_address + MBARRIER_BYTES] = 0


@means(r"fence\.mbarrier_init\.release\.cluster")
def _(_, w, at):
    """Publishes mbarriers that were set up, and no other write."""
    time, shadow = w.tick(), w.block.shadow
    for lane in np.flatnonzero(w.mask):
        for bar_address, bar in w.block.barriers_at.items():
            if w.clocks[lane, shadow.writer[bar_address]] >= shadow.written[bar_address]:
                bar.fences.append((w.first + int(lane), time))


@means(r"fence\.proxy\.async(\.shared::cta|\.global)?")
def _(match, w, at):
    if match[1] != ".global":  # whose memory nobody watches here
        w.fence_async()


@means(r"mbarrier\.arrive(\.expect_tx)?(?:\.(release|relaxed)\.(cta|cluster))?\.shared(?:::(cta|cluster))?\.b64")
def _(match, w, at):
    _, to, *nbytes = at.operands
    expected = operand(nbytes[0], np.uint32)(w) if nbytes else None
    for lane, thread, owner, bar_address in _lanes(w, to):
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
def _(match, w, at):
    done, where, parity = at.operands[:3]
    parities, bars = operand(parity, np.uint32)(w), set()
    for lane, *_, place in _lanes(w, where):
        bars.add((place, int(parities[lane]) & 1))
    if len(bars) != 1:
        raise w.hazard("lanes wait for different barriers or parities", "divergence")
    ((place, parity),) = bars
    mbarrier(w, w.block, place, w.active_knowledge()).wait(w, parity, match[1] == "cluster")
    w.set(done, np.ones(LANES, bool))


# ---- named barriers ------------------------------------------------------------------------------------------------
class _ConvergedWarp:
    """A warp whose lanes have converged, and arrive at a barrier as one."""

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
    values = operand(operand_, np.uint32)(w)
    if (values != values[0]).any():
        raise w.hazard(f"{operation}: the lanes name different barriers or numbers of threads", "divergence")
    return int(values[0])


def _named(w, at, wait):
    w.converged(at.opcode)
    number = _uniform(w, at.operands[0], at.opcode)
    threads = _uniform(w, at.operands[1], at.opcode) if len(at.operands) > 1 else LANES * w.block.size
    w.block.named(number, threads).sync(_ConvergedWarp(w), threads, wait)


@means(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?")
def _(match, w, at):
    _named(w, at, match[1] == "sync")


@means(r"bar\.red\.(and|or)\.pred")
def _(match, w, at):
    into, number, threads, flag = at.operands
    w.converged("bar.red")
    number, threads = _uniform(w, number, "bar.red"), _uniform(w, threads, "bar.red")
    bar = w.block.named(number, threads)
    votes = w.block.votes.setdefault((number, bar.generation), [])
    votes.append(operand(flag, np.bool_)(w))
    bar.sync(_ConvergedWarp(w), threads, vote=True)
    w.set(into, np.full(LANES, (np.any if match[1] == "or" else np.all)(votes)))


@means(r"bar\.warp\.sync")
def _(_, w, at):
    everyone(w, "bar.warp.sync", operand(at.operands[0], np.uint32)(w))
    w.join_lanes()


# ---- clusters ------------------------------------------------------------------------------------------------------
@means(r"barrier\.cluster\.arrive(\.relaxed|\.release)?(?:\.aligned)?")
def _(match, w, at):
    w.converged("barrier.cluster.arrive")
    together = _ConvergedWarp(w)
    if match[1] == ".relaxed":
        together.clock[:] = 0
    w.block.cluster.barrier.arrive(together)
    w.cluster_arrivals, w.cluster_arrival_place = together.cluster_arrivals, together.cluster_arrival_place


@means(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?")
def _(_, w, at):
    w.converged("barrier.cluster.wait")
    together = _ConvergedWarp(w)
    w.block.cluster.barrier.wait(together)
    w.cluster_waits = together.cluster_waits


@means(r"mapa\.shared::cluster\.u32")
def _(_, w, at):
    to, source, rank = at.operands
    w.set(to, operand(source, np.uint32)(w) & np.uint32((1 << WINDOW) - 1) | operand(rank, np.uint32)(w) << np.uint32(WINDOW))


# ---- the rest ------------------------------------------------------------------------------------------------------
@means(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def _(match, w, at):
    w.converged("setmaxnreg")
    count: Imm = at.operands[0]
    w.set_registers(int(count.text), match[1] == "inc")


@means(r"griddepcontrol\.(wait|launch_dependents)")
def _(match, w, at):
    """Grids run one after the other here."""


@means(r"nanosleep\.u32")
def _(_, w, at):
    """A warp that sleeps polls global memory: it would find the same value until somebody writes there."""
    memory = w.block.cluster.memory
    before = memory.writes
    w.wait_until(
        lambda: memory.writes > before, lambda: "something to be written to global memory, by blocks before this one or its own"
    )


@means(r"prefetch\.tensormap|prefetch\..*|cp\.async\.bulk\.prefetch\.tensor\..*|pragma")
def _(_, w, at):
    """Changes nothing that a kernel could see."""
