"""The blocks of a cluster, which run together: their clocks, their asynchronous work, and a scheduler that looks for trouble.

Asynchronous work (a copy, a bulk store) finishes as late as the waits allow: only when no warp can go on. With a seed,
warps give way and work finishes in random order instead. Either way hazards are found by clocks (shadow.py, barriers.py),
not by luck: a schedule decides only what a kernel does, never whether it was ordered.
"""

import random

import numpy as np

from .block import Block
from .hazard import Hazard
from .record import Arrived, Waited, note
from .shadow import Agents
from .warp import InterpretedWarp

PATIENCE = 0.5  # with a seed: the probability that a warp gives way, or a copy in flight lands, at each opportunity


class AsyncWork:
    """Asynchronous work that has been started: what it is, how many bytes it moves, who started it."""

    def __init__(self, land, operation, nbytes, place):
        self.land, self.operation, self.nbytes, self.place, self.done = land, operation, nbytes, place, False

    def __str__(self):
        return self.place.by(self.operation)


class Cluster:
    """The blocks at `indices` of a grid, with `warps` warps and the shared memory `smem` each, in the order of their ranks.
    source: the functions of the kernel (see language.rebind). ctas_per_sm: blocks for which a multiprocessor must have
    registers.

    accesses: where accesses to global arrays are noted (accesses.py). tick: called now and then, to show progress. in_turn:
    whether it has waited for a count, and so for other clusters' stores."""

    accesses, tick, in_turn = None, staticmethod(lambda: None), False

    def __init__(self, indices, grid, warps, smem, rng, source, ctas_per_sm=1):
        self.grid, self.size, self.warps, self.smem, self.rng, self.source = grid, len(indices), warps, smem, rng, source
        others = 2 * warps + (smem.barriers if smem else 0)
        self.agents = Agents(len(indices) * warps, len(indices) * others)
        self.flying, self.codes, self.functions = [], set(), 0
        self.barrier = Meeting(self)
        self.blocks = [Block(self, rank, index, ctas_per_sm) for rank, index in enumerate(indices)]

    # -- asynchronous work
    def start(self, land, operation, nbytes, place):
        """Start asynchronous work; it finishes when no warp can go on (or, with a seed, whenever it likes)."""
        work = AsyncWork(land, operation, nbytes, place)
        self.flying.append(work)
        return work

    def land(self, work):
        """Finish asynchronous work that has been started."""
        self.flying.remove(work)
        work.land()
        work.done = True

    # -- the schedule
    def gives_way(self):
        """Shall a warp that need not wait let others run first? Only with a seed, at random."""
        return self.rng is not None and self.rng.random() < PATIENCE

    def run(self, kernel, args):
        """Run the kernel to its end."""
        for block in self.blocks:
            block.crew = [self.warp(block, k, kernel, args) for k in range(self.warps)]
        live = [warp for block in self.blocks for warp in block.crew]
        while live:
            self.tick()
            progressed = False
            for warp in self.rng.sample(live, len(live)) if self.rng else live:
                if self.flying and self.gives_way():
                    self.land(self.rng.choice(self.flying))
                    progressed = True
                if warp.ready is None or warp.ready():
                    warp.switch()
                    progressed = True
            live = [w for w in live if not w.dead]
            if not progressed:
                if not self.flying:
                    raise self.deadlock(live)
                self.land(self.rng.choice(self.flying) if self.rng else self.flying[0])
        for block in self.blocks:
            block.close()

    def warp(self, block, index, kernel, args):
        """One of a block's warps, about to begin."""
        return InterpretedWarp(block, index, kernel, args)

    def end(self):
        """Free the memory of a cluster that has run. Its blocks, warps and lanes refer to each other, so it would otherwise
        stay until garbage is collected."""
        for block in self.blocks:
            for warp in block.crew:
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
            waiting.setdefault((warp.block.index, warp.group, warp.at.line, warp.why()), []).append(warp)
        lines = [
            f"\n  warps {[w.index for w in warps]} of warpgroup {group}{f' of block {block}' * (self.size > 1)} at {line} "
            f"wait for {why}"
            for (block, group, line, why), warps in waiting.items()
        ]
        places = [warps[0].at for warps in waiting.values()]
        place_text = f"block {live[0].block.index}" if self.size == 1 else f"the cluster of block {self.blocks[0].index}"
        return Hazard("deadlock", f"nobody can go on in {place_text}" + "".join(lines), *places)


class RecordingCluster(Cluster):
    """A cluster whose warps keep a record of their steps."""

    def warp(self, block, index, kernel, args):
        """One of a block's warps, about to begin."""
        warp = super().warp(block, index, kernel, args)
        warp.steps = []
        return warp


class Meeting:
    """The cluster's barrier (barrier.cluster): every warp of every block arrives, and waits, in turn."""

    def __init__(self, cluster):
        self.cluster, self.opened, self.clock = cluster, 0, np.zeros(cluster.agents.count, np.int64)
        self.arrived, self.published = {}, {}  # warp -> place, in this round; round -> what its opening lets one know

    def arrive(self, warp):
        """Announce that this warp has come."""
        if warp.met > warp.waited:
            raise warp.hazard("arrives on the cluster's barrier once more, and has not waited since", "arrivals", warp.met_at)
        warp.met, warp.met_at = warp.met + 1, warp.place()
        note(Arrived, (self, warp.met))
        self.arrived[warp.agent] = warp.met_at
        np.maximum(self.clock, warp.clock, out=self.clock)
        if len(self.arrived) == self.cluster.size * self.cluster.warps:
            self.opened, self.arrived = self.opened + 1, {}
            self.published[self.opened] = self.clock.copy()

    def wait(self, warp):
        """Wait until all blocks of the cluster have arrived."""
        if warp.met == warp.waited:
            raise warp.hazard("waits on the cluster's barrier, and has not arrived", "wait")
        warp.until(lambda: self.opened >= warp.met, self._lacks)
        note(Waited, ((self, warp.met),), "the cluster's barrier")
        warp.waited = warp.met
        warp.learn(self.published[warp.met])

    def _lacks(self):
        size = self.cluster.warps
        late = [block.index for block in self.cluster.blocks if any(w.agent not in self.arrived for w in block.crew)]
        return (
            f"the cluster's barrier, where {len(self.arrived)} of {size * self.cluster.size} warps have arrived; lacking are "
            f"some of {'block' if len(late) == 1 else 'blocks'} {', '.join(map(str, late))} (one that has ended does not count)"
        )


def seeded(seed, n=0):
    """A random order for the n-th cluster, or None for the strict one."""
    return None if seed is None else random.Random(f"{seed} {n}" if n else seed)
