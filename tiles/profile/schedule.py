"""List scheduling: from the recorded steps of warps, in any order, to times by the model, each step as early as possible.

    bars = schedule({(block, warp): steps}, model)

A warp does its steps one after the other; a step that needs a unit (a scheduler, a tensor core, the way to memory) takes it
when it is free, first come, first served; a wait ends when the last of what it waits for happens, and remembers which that was.
The same steps give the same bars on any machine."""

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from ..interpreter import AccessStep, ArriveStep, CopyStep, MmaStep, OpStep, SignalStep, WaitStep
from ..interpreter.hazard import WarpPlace
from .model import HALF, SCHEDULERS, Model, Price, price, product

COPIES, TENSOR = "copies in flight", "tensor cores"  # lanes of what goes on by itself


@dataclass(eq=False)
class Bar:
    """Something that takes time. lane: (block, a warp's number or COPIES or TENSOR). kind: "compute", "special" functions,
    "product", "copy", "memory" or "wait". place: the warp that did or started it, and its line. cause: of a wait, the bar whose
    end ended it, if there is one."""

    lane: tuple[tuple, Any]
    start: float
    end: float
    kind: str
    name: str
    place: WarpPlace
    cause: "Bar | None" = None

    @property
    def cycles(self) -> float:
        """How many cycles it takes."""
        return self.end - self.start


KINDS = {"issue": "compute", "shared": "memory", "special": "special", "tensor": "product"}


def schedule(record: dict, model: Model) -> list[Bar]:
    """The bars of all warps of a record (interpreter.record_clusters), in the order of their starts."""
    return sorted(_Schedule(record, model).bars(), key=lambda bar: (bar.start, bar.end))


class _Schedule:
    def __init__(self, record, model):
        self.model, self.finished_bars = model, []
        self.warps = [_ScheduledWarp(block, warp, steps) for (block, warp), steps in record.items()]
        self.unit_free_at = defaultdict(float)  # unit -> when
        self.pending_arrivals, self.feeds = (
            Counter(),
            defaultdict(list),
        )  # event -> arrivals that it lacks; work -> the events for which it arrives
        self.events, self.waiting_warps = (
            {},
            defaultdict(list),
        )  # event -> (time, the bar that ended then); event -> warps that wait for it
        self.mma_parts = defaultdict(list)  # product -> its parts: (when, warp, step, op)
        for warp in self.warps:
            for step in warp.steps:
                if isinstance(step, (ArriveStep, SignalStep)):
                    self.pending_arrivals[step.event] += 1
                if isinstance(step, SignalStep):
                    self.feeds[step.work].append(step.event)
                if isinstance(step, CopyStep):
                    self.pending_arrivals[step.work] = 1
                if isinstance(step, MmaStep):
                    self.pending_arrivals[step.mma] += 1

    def bars(self):
        """Let the warp whose turn is first do its next step, until all have done theirs."""
        turns = [(0.0, n) for n in range(len(self.warps))]
        self.turns = turns
        while turns:
            now, n = heapq.heappop(turns)
            warp = self.warps[n]
            if warp.at == len(warp.steps):
                continue
            warp.now = max(warp.now, now)
            if self.advance(warp, warp.steps[warp.at], n):
                warp.at += 1
                heapq.heappush(turns, (warp.now, n))
        return self.finished_bars

    def advance(self, warp, step, n):
        """Do one step of a warp. False: it must wait, and is woken when it may try again."""
        if isinstance(step, WaitStep):
            return self.wait(warp, step, n)
        model = self.model
        if isinstance(step, OpStep):
            if cost := price(step, model):
                self.work(warp, step.name, step.place, cost)
        elif isinstance(step, AccessStep):
            cost = Price("memory", step.view.nbytes / model.memory, None if step.written else model.latency)
            self.work(warp, "store" if step.written else "load", step.place, cost)
        elif isinstance(step, CopyStep):
            nbytes = 0 if step.view is None else step.view.nbytes
            since = warp.now if step.written else warp.now + model.latency  # a store is over when its tile has been read
            _, end = self.occupy((warp.block, "memory"), since, nbytes / model.memory)
            bar = self.bar((warp.block, COPIES), warp.now, end, "copy", step.work.operation, step.place)
            self.arrive(step.work, end, bar)
        elif isinstance(step, ArriveStep):
            warp.now += model.barrier
            self.arrive(step.event, warp.now, warp.last)
        elif isinstance(step, MmaStep):
            self.issue(warp, step)
        return True

    def occupy(self, unit, now, cycles):
        """Occupy a unit for so many cycles, once it is free: (start, end)."""
        start = max(now, self.unit_free_at[unit])
        self.unit_free_at[unit] = start + cycles
        return start, start + cycles

    def bar(self, lane, start, end, kind, name, place, cause=None):
        """Add a bar to the timeline."""
        bar = Bar(lane, start, end, kind, name, place, cause)
        if end > start:
            self.finished_bars.append(bar)
        return bar

    def work(self, warp, name, place, cost):
        """Add a bar of work of the warp itself, during which it does nothing else."""
        unit = (
            (warp.block, cost.unit) if cost.unit in ("memory", "shared") else (warp.block, cost.unit, warp.index % SCHEDULERS)
        )
        start, end = self.occupy(unit, warp.now, cost.cycles)
        until = max(end + cost.latency if cost.latency is not None else 0, warp.now + self.model.least)
        kind = KINDS.get(cost.unit, "memory")
        if cost.unit == "tensor":
            self.bar((warp.block, TENSOR), start, end, kind, name, place)
        warp.last = self.bar(warp.lane, warp.now, until, kind, name, place)
        warp.now = until

    def issue(self, warp, step):
        """The warp's part of a product; with the last of them it starts, each part on its warp's tensor core."""
        parts = self.mma_parts[step.mma]
        parts.append((warp.now, warp, step, warp.op_of(step)))
        warp.now += self.model.least
        if len(parts) < self.pending_arrivals[step.mma]:
            return
        now = max(time for time, *_ in parts)
        for _, part, issued, op in parts:
            flop, size, _ = product(op)
            start, end = self.occupy(
                (part.block, "tensor", part.index % SCHEDULERS), now, flop * size / HALF / self.model.tensor
            )
            bar = self.bar((part.block, TENSOR), start, end, "product", op.name, issued.place)
            self.arrive(step.mma, end, bar)

    def arrive(self, event, time, bar):
        """One arrival for an event. With the last one the event has happened, and warps that wait for it wake."""
        last, cause = self.events.get(event, (-1.0, None))
        self.events[event] = (time, bar) if time >= last else (last, cause)
        self.pending_arrivals[event] -= 1
        if self.pending_arrivals[event]:
            return
        time, bar = self.events[event]
        for n in self.waiting_warps.pop(event, ()):
            heapq.heappush(self.turns, (time, n))
        for fed_event in self.feeds.pop(event, ()):
            self.arrive(fed_event, time, bar)

    def wait(self, warp, step, n):
        """Advance the warp to the time at which all events have happened."""
        for event in step.events:
            if self.pending_arrivals[event] > 0:
                warp.wait_start = warp.now if warp.wait_start is None else warp.wait_start
                self.waiting_warps[event].append(n)
                return False
        since = warp.now if warp.wait_start is None else warp.wait_start
        time, cause = max((self.events[w] for w in step.events if w in self.events), key=lambda h: h[0], default=(0.0, None))
        if time > since:
            warp.last = self.bar(warp.lane, since, time, "wait", step.why, step.place, cause)
        warp.now, warp.wait_start = max(since, time) + self.model.barrier, None
        return True


class _ScheduledWarp:
    """A warp that goes through its steps. at: the index of the next step. now: its time. wait_start: since when it waits, None
    if it does not. last: its last bar."""

    def __init__(self, block, index, steps):
        self.block, self.index, self.steps, self.lane = block, index, steps, (block, index)
        self.at, self.now, self.wait_start, self.last = 0, 0.0, None, None

    def op_of(self, step):
        """The op whose step this is."""
        return next(op for op in self.steps[self.at :] if isinstance(op, OpStep))
