"""Barriers of a block, in full: the hardware keeps parities and counters, here every phase and every arrival is known.

What the hardware would let pass by luck is refused on any schedule, because it is asked of clocks:
an arrival (or a copy) must be ordered after the phase before its own, else it might have counted there;
a wait for phase n must be ordered after phase n - 1, else the parity of phase n - 2 might let it pass;
phase n + 1 must be ordered after all waits for phase n, else such a wait might miss its phase and sleep until n + 2.
"""

import numpy as np

from ..layout import LANES
from ..types import barrier
from .hazard import Hazard
from .record import ArriveStep, SignalStep, WaitStep, note
from .shadow import TIME


class Mbarrier:
    """An mbarrier: arrivals and bytes that this phase waits for, the phases that are complete, and what each of them
    publishes."""

    def __init__(self, block, name, count, on_phase=None):
        self.block, self.name, self.spec, self.count, self.on_phase = block, name, barrier(count), count, on_phase
        self.agent, self.warps = block.agents.new(), block.agents.warps
        self.due, self.bytes, self.phase = count, 0, 0
        self.clock = np.zeros(block.agents.count, TIME)
        self.published = [self.clock.copy()]
        self.arrivals = np.zeros(self.warps, TIME)
        self.arrived, self.expected, self.copies_in_flight = [], None, []  # in this phase: places, the last expectation, copies
        self.complete = [self.arrivals]  # of each phase: the warps' times at its arrivals; None of one for which bytes came
        self.waits = {}  # warp -> its last wait: (phase, time, place)
        self.last_copy = None
        block.mbarriers.append(self)

    def knows(self, warp, phase):
        """Does the warp know, on any schedule, that `phase` phases are complete?"""
        return self.is_known(warp.clock, phase)

    def is_known(self, clock, phase):
        """Does whoever has this clock know that `phase` phases are complete?"""
        if phase <= 0 or clock[self.agent] >= phase:
            return True
        arrivals = self.complete[phase] if phase <= self.phase else None
        return arrivals is not None and bool((clock[: self.warps] >= arrivals).all())

    def _check_phase_known(self, warp, description, kind):
        if not self.knows(warp, self.phase):
            raise warp.hazard(
                f"{description} {self.name}, and nothing orders this after its phase {self.phase}, "
                f"in which it might have counted; a phase takes {self.count} arrivals and the bytes expected",
                kind,
            )

    def arrive(self, warp, nbytes=0):
        """One arrival; `nbytes` more bytes are expected in this phase."""
        self.block.check_reachable(warp, f"arrives on {self.name}")
        self._check_phase_known(warp, "arrives on", "arrivals")
        if self.due == 0:
            raise warp.hazard(f"one arrival too many on {self.name}: a phase takes {self.count}", "arrivals")
        place = warp.place()
        note(ArriveStep, (self, self.phase + 1))
        self.arrivals[warp.agent] = time = warp.tick()
        self.block.note_visit(warp, time, f"arrives on {self.name}")
        self.arrived.append(place)
        if nbytes:
            self.expected = place
        self.learn(warp.clock)
        self.bytes += nbytes
        self.due -= 1
        self._complete_if_ready(warp, place)

    def begin_copy(self, warp, copy, after=()):
        """Begin a copy whose bytes count in this phase. Returns the time of the copies' clock at which it is over. after:
        mbarriers that were waited for before: who sees this phase complete also knows what they published."""
        for bar in after:
            self.clock[bar.agent] = max(self.clock[bar.agent], bar.phase)
        self._check_phase_known(warp, "starts a copy that counts on", "bytes")
        note(SignalStep, copy, (self, self.phase + 1))
        self.copies_in_flight.append(copy)
        self.last_copy = self.phase + 1, copy
        return self.phase + 1

    def learn(self, clock):
        """Publish a clock with this phase: who sees it complete knows what the clock knows."""
        np.maximum(self.clock, clock, out=self.clock)

    def end_copy(self, copy):
        """Count the bytes of a copy that is done, and complete the phase if it was the last."""
        self.copies_in_flight.remove(copy)
        self.bytes -= copy.nbytes
        self._complete_if_ready(None, copy.place)

    def _complete_if_ready(self, warp, place):
        if self.due:
            return
        if self.bytes < 0 or (self.bytes == 0 and self.copies_in_flight):
            short = -self.bytes or sum(copy.nbytes for copy in self.copies_in_flight)
            raise Hazard(
                "bytes",
                f"phase {self.phase + 1} of {self.name} expects {short} bytes less than its copies bring",
                *dict.fromkeys([self.expected, place] if self.expected else [place]),
            )
        if self.bytes == 0:
            self._complete(warp, place)

    def _is_ordered_after(self, index, time):
        """Is the phase that completes now ordered after what agent `index` did at its `time`?"""
        return self.clock[index] >= time

    def _complete(self, warp, place):
        for index, (phase, time, waiter) in self.waits.items():
            if phase <= self.phase and not self._is_ordered_after(index, time):
                raise Hazard(
                    "phase",
                    f"this completes phase {self.phase + 1} of {self.name}, and nothing orders it after "
                    f"{waiter.describe('the wait')} for phase {phase}: a little later, that wait would have missed its phase",
                    place,
                    waiter,
                )
        self.complete.append(self.arrivals if self.expected is None else None)
        self.phase, self.due, self.expected, self.arrived = self.phase + 1, self.count, None, []
        self.arrivals = np.zeros_like(self.arrivals)
        self.clock[self.agent] = self.phase
        if self.on_phase:
            self.on_phase(warp)
        self.published.append(self.clock.copy())

    def wait(self, warp, phases, description="", missing=None):
        """Wait until `phases` phases are complete. description: names what is waited for. missing: says why, if it never
        comes."""
        name, description = description or self.name, f"{description}: " * bool(description)
        if not self.knows(warp, phases - 1):
            raise warp.hazard(
                f"{description}waits for phase {phases} of {self.name}, and nothing orders this after phase {phases - 1}: "
                f"before that one is complete, the parity of phase {phases - 2} lets it pass",
                "phase",
            )
        self._check_not_missed(warp, phases, description)
        warp.wait_until(lambda: self.phase >= phases, lambda: description + (missing or self._describe_missing)(phases))
        self._check_not_missed(warp, phases, description)
        note(WaitStep, ((self, phases),), name)
        warp.learn(self.published[phases])
        self.waits[warp.agent] = phases, warp.tick(), warp.place()

    def _check_not_missed(self, warp, phases, description):
        if self.phase > phases:
            raise warp.hazard(
                f"{description}waits for phase {phases} of {self.name}, which has completed {self.phase} phases: "
                f"by its parity this would mean phase {phases + 2 * ((self.phase - phases + 1) // 2)}",
                "phase",
            )

    def _describe_missing(self, phase):
        parts = []
        if self.due:
            came = ", ".join(sorted({f"warp {p.warp} at {p.line}" for p in self.arrived}))
            parts.append(f"{self.due} of {self.count} arrivals ({f'came: {came}' if came else 'none came'})")
        if self.bytes > 0:
            parts.append(f"{self.bytes} bytes that no copy brings, expected by {self.expected}")
        return f"phase {phase} of {self.name}, which lacks {' and '.join(parts)}"

    def close(self, warps):
        """Check at the block's end that all that this barrier waits for has happened, and that somebody has waited for it."""
        if self.last_copy and max(warp.clock[self.agent] for warp in warps) < self.last_copy[0]:
            raise Hazard(
                "unfinished",
                f"the block ends, and nobody has waited for {self.last_copy[1].operation}",
                self.last_copy[1].place,
            )
        if self.bytes:
            raise Hazard("bytes", f"the block ends, and {self.name} still expects {self.bytes} bytes", self.expected)


class NamedBarrier:
    """A named barrier (bar.sync, bar.arrive)."""

    def __init__(self, number, threads, block):
        self.number, self.threads, self.warps, self.generation, self.vote = number, threads, block.agents.warps, 0, False
        self.arrived = {}  # warp -> place, in this generation
        self.arrivals, self.before = np.zeros(self.warps, TIME), np.zeros(self.warps, TIME)
        self.clock, self.published = np.zeros(block.agents.count, TIME), {}

    def sync(self, warp, threads, wait=True, description="", vote=False):
        """Arrive (bar.arrive), and with `wait` wait until `threads` threads have arrived (bar.sync). vote: by bar.red, which
        all warps must use then."""
        place = warp.place()
        if self.arrived and vote != self.vote:
            cause = f"{description}named barrier {self.number}: some warps sync, others vote"
            raise warp.hazard(cause, "collective", *self.arrived.values())
        if threads != self.threads and self.arrived:
            cause = f"named barrier {self.number} is used with {threads} and {self.threads} threads at once"
            raise warp.hazard(cause, "collective")
        if warp.index in self.arrived:
            cause = f"{description}arrives on named barrier {self.number} once more before it has opened: this counts twice"
            raise warp.hazard(cause, "arrivals", self.arrived[warp.index])
        if (warp.clock[: self.warps] < self.before).any():
            cause = f"{description}arrives on named barrier {self.number}, and nothing orders this after"
            raise warp.hazard(f"{cause} its opening number {self.generation}, for which it might have counted", "arrivals")
        self.threads, self.vote, generation = threads, vote, self.generation
        note(ArriveStep, (self, generation + 1))
        self.arrived[warp.index], self.arrivals[warp.agent] = place, warp.tick()
        np.maximum(self.clock, warp.clock, out=self.clock)
        if LANES * len(self.arrived) == threads:
            self.generation, self.published[generation + 1] = generation + 1, self.clock.copy()
            self.before, self.arrivals = self.arrivals, np.zeros_like(self.arrivals)
            self.arrived = {}
        if wait:
            warp.wait_until(lambda: self.generation > generation, lambda: description + self._describe_missing())
            note(WaitStep, ((self, generation + 1),), description.removesuffix(": ") or f"named barrier {self.number}")
            warp.learn(self.published[generation + 1])

    def _describe_missing(self):
        threads = LANES * len(self.arrived)
        return f"named barrier {self.number}, where {threads} of {self.threads} threads have arrived (warps {[*self.arrived]})"
