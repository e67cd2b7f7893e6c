"""When things happen: from what warps did, in any order, to times by the model, with everything as early as it can be.

    bars = schedule({(block, warp): steps}, model)

A warp does its steps one after the other; a step that needs a unit (a scheduler, a tensor core, the way to memory) takes it
when it is free, first come, first served; a wait ends when the last of what it waits for happens, and remembers which that was.
The same steps give the same bars on any machine."""

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from ..interpreter import Arrived, Did, Feeds, Issued, Started, Touched, Waited
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
    """The bars of all warps of a record (interpreter.recorded), in the order of their starts."""
    return sorted(_Run(record, model).bars(), key=lambda bar: (bar.start, bar.end))


class _Run:
    def __init__(self, record, model):
        self.model, self.found = model, []
        self.warps = [_Crew(block, warp, steps) for (block, warp), steps in record.items()]
        self.free = defaultdict(float)  # unit -> when
        self.needs, self.feeds = Counter(), defaultdict(list)  # what -> events that it lacks; work -> what it counts for
        self.happened, self.sleeping = {}, defaultdict(list)  # what -> (when, the bar that ended then); what -> warps
        self.issued = defaultdict(list)  # product -> its parts: (when, warp, step, op)
        for warp in self.warps:
            for step in warp.steps:
                if isinstance(step, (Arrived, Feeds)):
                    self.needs[step.what] += 1
                if isinstance(step, Feeds):
                    self.feeds[step.work].append(step.what)
                if isinstance(step, Started):
                    self.needs[step.work] = 1
                if isinstance(step, Issued):
                    self.needs[step.mma] += 1

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
            if self.do(warp, warp.steps[warp.at], n):
                warp.at += 1
                heapq.heappush(turns, (warp.now, n))
        return self.found

    def do(self, warp, step, n):
        """Do one step of a warp. False: it must wait, and is woken when it may try again."""
        if isinstance(step, Waited):
            return self.wait(warp, step, n)
        model = self.model
        if isinstance(step, Did):
            if cost := price(step, model):
                self.work(warp, step.name, step.place, cost)
        elif isinstance(step, Touched):
            cost = Price("memory", step.view.nbytes / model.memory, None if step.written else model.latency)
            self.work(warp, "store" if step.written else "load", step.place, cost)
        elif isinstance(step, Started):
            nbytes = 0 if step.view is None else step.view.nbytes
            since = warp.now if step.written else warp.now + model.latency  # a store is over when its tile has been read
            _, end = self.take((warp.block, "memory"), since, nbytes / model.memory)
            bar = self.bar((warp.block, COPIES), warp.now, end, "copy", step.work.operation, step.place)
            self.happens(step.work, end, bar)
        elif isinstance(step, Arrived):
            warp.now += model.barrier
            self.happens(step.what, warp.now, warp.last)
        elif isinstance(step, Issued):
            self.issue(warp, step)
        return True

    def take(self, unit, now, cycles):
        """Hold a unit for so long, once it is free: (from, to)."""
        start = max(now, self.free[unit])
        self.free[unit] = start + cycles
        return start, start + cycles

    def bar(self, lane, start, end, kind, name, place, cause=None):
        """Add a bar to the timeline."""
        bar = Bar(lane, start, end, kind, name, place, cause)
        if end > start:
            self.found.append(bar)
        return bar

    def work(self, warp, name, place, cost):
        """Add a bar of work of the warp itself, during which it does nothing else."""
        unit = (
            (warp.block, cost.unit) if cost.unit in ("memory", "shared") else (warp.block, cost.unit, warp.index % SCHEDULERS)
        )
        start, end = self.take(unit, warp.now, cost.cycles)
        until = max(end + cost.latency if cost.latency is not None else 0, warp.now + self.model.least)
        kind = KINDS.get(cost.unit, "memory")
        if cost.unit == "tensor":
            self.bar((warp.block, TENSOR), start, end, kind, name, place)
        warp.last = self.bar(warp.lane, warp.now, until, kind, name, place)
        warp.now = until

    def issue(self, warp, step):
        """The warp's part of a product; with the last of them it starts, each part on its warp's tensor core."""
        parts = self.issued[step.mma]
        parts.append((warp.now, warp, step, warp.op_of(step)))
        warp.now += self.model.least
        if len(parts) < self.needs[step.mma]:
            return
        now = max(when for when, *_ in parts)
        for _, part, issued, op in parts:
            flop, size, _ = product(op)
            start, end = self.take((part.block, "tensor", part.index % SCHEDULERS), now, flop * size / HALF / self.model.tensor)
            bar = self.bar((part.block, TENSOR), start, end, "product", op.name, issued.place)
            self.happens(step.mma, end, bar)

    def happens(self, what, when, bar):
        """One of the events that `what` takes; with the last it has happened, and who waits for it wakes."""
        last, cause = self.happened.get(what, (-1.0, None))
        self.happened[what] = (when, bar) if when >= last else (last, cause)
        self.needs[what] -= 1
        if self.needs[what]:
            return
        when, bar = self.happened[what]
        for n in self.sleeping.pop(what, ()):
            heapq.heappush(self.turns, (when, n))
        for more in self.feeds.pop(what, ()):
            self.happens(more, when, bar)

    def wait(self, warp, step, n):
        """Advance the warp to the time at which all events have happened."""
        for what in step.what:
            if self.needs[what] > 0:
                warp.slept = warp.now if warp.slept is None else warp.slept
                self.sleeping[what].append(n)
                return False
        since = warp.now if warp.slept is None else warp.slept
        when, cause = max((self.happened[w] for w in step.what if w in self.happened), key=lambda h: h[0], default=(0.0, None))
        if when > since:
            warp.last = self.bar(warp.lane, since, when, "wait", step.why, step.place, cause)
        warp.now, warp.slept = max(since, when) + self.model.barrier, None
        return True


class _Crew:
    """A warp on its way through its steps. last: the bar that it was last held up by."""

    def __init__(self, block, index, steps):
        self.block, self.index, self.steps, self.lane = block, index, steps, (block, index)
        self.at, self.now, self.slept, self.last = 0, 0.0, None, None

    def op_of(self, step):
        """The op whose step this is."""
        return next(op for op in self.steps[self.at :] if isinstance(op, Did))
