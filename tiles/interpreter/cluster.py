"""The blocks of a cluster, which run together: their clocks, their asynchronous work, and a scheduler that looks for trouble.

Asynchronous work (a copy, a bulk store) finishes as late as the waits allow: only when no warp can go on. With a seed,
warps give way and work finishes in random order instead. Either way hazards are found by clocks (shadow.py, barriers.py),
not by luck: a schedule decides only what a kernel does, never whether it was ordered.
"""

import random

import numpy as np

from .block import Block
from .hazard import Hazard
from .record import ArriveStep, WaitStep, note
from .shadow import TIME, Agents
from .warp import InterpretedWarp

YIELD_PROBABILITY = 0.5  # with a seed: the probability that a warp yields, or work in flight finishes, at each opportunity


class AsyncWork:
    """Asynchronous work that has been started. complete: a function that does it. operation: its name. nbytes: how many bytes
    it moves. place: who started it. done: is it over?"""

    def __init__(self, complete, operation, nbytes, place):
        self.complete, self.operation, self.nbytes, self.place, self.done = complete, operation, nbytes, place, False

    def __str__(self):
        return self.place.describe(self.operation)


class Cluster:
    """The blocks at `indices` of a grid, with `warps` warps and the shared memory `smem` each, in the order of their ranks.
    source: the functions of the kernel (see language.rebind). ctas_per_sm: blocks for which a multiprocessor must have
    registers.

    accesses: where accesses to global arrays are noted (accesses.py). tick: called now and then, to show progress.
    waits_for_count: has it waited for a count, and so for other clusters' stores? must_wait: may the grid before still run, for
    which no warp has waited yet? must_end_after: has it waited for counts of the grid before only, and not for its end?"""

    accesses, tick, waits_for_count, must_wait, must_end_after = None, staticmethod(lambda: None), False, False, False

    def __init__(self, indices, grid, warps, smem, rng, source, ctas_per_sm=1):
        self.grid, self.size, self.warps, self.smem, self.rng, self.source = grid, len(indices), warps, smem, rng, source
        others = 2 * warps + (smem.barriers if smem else 0)
        self.agents = Agents(len(indices) * warps, len(indices) * others)
        self.in_flight, self.codes, self.functions = [], set(), 0
        self.barrier = ClusterBarrier(self)
        self.blocks = [Block(self, rank, index, ctas_per_sm) for rank, index in enumerate(indices)]

    # -- asynchronous work
    def start(self, complete, operation, nbytes, place):
        """Start asynchronous work; it finishes when no warp can go on (or, with a seed, at a random time)."""
        work = AsyncWork(complete, operation, nbytes, place)
        self.in_flight.append(work)
        return work

    def finish(self, work):
        """Finish asynchronous work that has been started."""
        self.in_flight.remove(work)
        work.complete()
        work.done = True

    # -- the schedule
    def should_yield(self):
        """Must a warp that need not wait let others run first? Only with a seed, at random."""
        return self.rng is not None and self.rng.random() < YIELD_PROBABILITY

    def run(self, kernel, args):
        """Run the kernel to its end."""
        for block in self.blocks:
            block.warp_list = [self.warp(block, k, kernel, args) for k in range(self.warps)]
        live = [warp for block in self.blocks for warp in block.warp_list]
        while live:
            self.tick()
            progressed = False
            for warp in self.rng.sample(live, len(live)) if self.rng else live:
                if self.in_flight and self.should_yield():
                    self.finish(self.rng.choice(self.in_flight))
                    progressed = True
                if warp.ready is None or warp.ready():
                    warp.switch()
                    progressed = True
            live = [w for w in live if not w.dead]
            if not progressed:
                if not self.in_flight:
                    raise self.deadlock(live)
                self.finish(self.rng.choice(self.in_flight) if self.rng else self.in_flight[0])
        if self.must_end_after:
            cause = "ends, and has waited for counts of the grid before it, but not for that grid's end: grid.wait() comes last"
            raise Hazard("unfinished", f"block {self.blocks[0].index} {cause}")
        for block in self.blocks:
            block.close()

    def warp(self, block, index, kernel, args):
        """One of a block's warps, about to begin."""
        return InterpretedWarp(block, index, kernel, args)

    def end(self):
        """Free the memory of a cluster that has run. Its blocks, warps and lanes refer to each other, so it would otherwise
        stay until garbage is collected."""
        for block in self.blocks:
            for warp in block.warp_list:
                vars(warp).clear()
            vars(block).clear()
        vars(self).clear()

    def source_codes(self):
        """The ids of the kernel's code and of that of its helpers."""
        if len(self.source) != self.functions:  # helpers turn up as the kernel runs
            self.codes = {id(f.__code__) for f in self.source.values() if hasattr(f, "__code__")}
            self.functions = len(self.source)
        return self.codes

    def deadlock(self, live):
        """The message of a deadlock: which warp waits for what."""
        waiting = {}
        for warp in live:
            waiting.setdefault((warp.block.index, warp.group, warp.place().line, warp.why()), []).append(warp)
        lines = [
            f"\n  warps {[w.index for w in warps]} of warpgroup {group}{f' of block {block}' * (self.size > 1)} at {line} "
            f"wait for {why}"
            for (block, group, line, why), warps in waiting.items()
        ]
        places = [warps[0].place() for warps in waiting.values()]
        place_text = f"block {live[0].block.index}" if self.size == 1 else f"the cluster of block {self.blocks[0].index}"
        return Hazard("deadlock", f"nobody can go on in {place_text}" + "".join(lines), *places)


class RecordingCluster(Cluster):
    """A cluster whose warps keep a record of their steps."""

    def warp(self, block, index, kernel, args):
        """One of a block's warps, about to begin."""
        warp = super().warp(block, index, kernel, args)
        warp.steps = []
        return warp


class ClusterBarrier:
    """The cluster's barrier (barrier.cluster): every warp of every block arrives, and waits, in turn."""

    def __init__(self, cluster):
        self.cluster, self.generation, self.clock = cluster, 0, np.zeros(cluster.agents.count, TIME)
        self.arrived, self.published = {}, {}  # warp -> place, in this round; round -> what its opening lets one know

    def arrive(self, warp):
        """Announce that this warp has come."""
        if warp.cluster_arrivals > warp.cluster_waits:
            raise warp.hazard(
                "arrives on the cluster's barrier once more, and has not waited since", "arrivals", warp.cluster_arrival_place
            )
        warp.cluster_arrivals, warp.cluster_arrival_place = warp.cluster_arrivals + 1, warp.place()
        note(ArriveStep, (self, warp.cluster_arrivals))
        self.arrived[warp.agent] = warp.cluster_arrival_place
        np.maximum(self.clock, warp.clock, out=self.clock)
        if len(self.arrived) == self.cluster.size * self.cluster.warps:
            self.generation, self.arrived = self.generation + 1, {}
            self.published[self.generation] = self.clock.copy()

    def wait(self, warp):
        """Wait until all blocks of the cluster have arrived."""
        if warp.cluster_arrivals == warp.cluster_waits:
            raise warp.hazard("waits on the cluster's barrier, and has not arrived", "wait")
        warp.wait_until(lambda: self.generation >= warp.cluster_arrivals, self._describe_missing)
        note(WaitStep, ((self, warp.cluster_arrivals),), "the cluster's barrier")
        warp.cluster_waits = warp.cluster_arrivals
        warp.learn(self.published[warp.cluster_arrivals])

    def _describe_missing(self):
        size = self.cluster.warps
        late = [block.index for block in self.cluster.blocks if any(w.agent not in self.arrived for w in block.warp_list)]
        return (
            f"the cluster's barrier, where {len(self.arrived)} of {size * self.cluster.size} warps have arrived; lacking are "
            f"some of {'block' if len(late) == 1 else 'blocks'} {', '.join(map(str, late))} (one that has ended does not count)"
        )


def random_order(seed, n=0):
    """A random order for the n-th cluster, or None for the strict one."""
    return None if seed is None else random.Random(f"{seed} {n}" if n else seed)
