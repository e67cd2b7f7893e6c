"""One thread block: its warps, its asynchronous work, and a scheduler that looks for trouble.

Asynchronous work (a copy, a bulk store) finishes as late as the waits allow: only when no warp can go on. With a seed,
warps give way and work finishes in random order instead. Either way hazards are found by clocks (shadow.py, barriers.py),
not by luck: a schedule decides only what a kernel does, never whether it was ordered.
"""

import random

from greenlet import getcurrent

from ..layout import LANES
from .barriers import Named
from .hazard import Hazard
from .shadow import Shadow
from .warp import WARPGROUP, Warp

REGISTERS = 65536  # of a multiprocessor
PATIENCE = 0.5  # a seed's chance that a warp gives way, or that a copy in flight lands, at each opportunity


class Work:
    """Asynchronous work that has been started: what it is, how many bytes it moves, who started it."""

    def __init__(self, land, deed, nbytes, place):
        self.land, self.deed, self.nbytes, self.place, self.done = land, deed, nbytes, place, False

    def __str__(self):
        return self.place.by(self.deed)


class Block:
    """One thread block and its shared memory. source: the functions of the kernel (see language.rebind)."""

    def __init__(self, index, grid, warps, smem, rng, source):
        self.index, self.grid, self.size, self.smem, self.rng, self.source = index, grid, warps, smem, rng, source
        self.codes, self.functions = set(), 0
        groups = -(-warps // WARPGROUP)
        self.shadow = Shadow(smem.nbytes if smem else 0, 2 * warps, 5 * warps + groups + (smem.barriers if smem else 0))
        self.mma_agents = [self.shadow.agent() for _ in range(groups)]
        self.store_agents = [self.shadow.agent() for _ in range(warps)]
        self.mmas, self.deeds = [[] for _ in range(groups)], [[] for _ in range(groups)]
        self.bulk, self.flying, self.named_barriers = {}, [], {}
        self.opened, self.mbarriers, self.slots = None, [], []
        self.entry_registers = min(256, REGISTERS // (LANES * warps) // 8 * 8)
        self.pool = 0  # registers a thread and warp that setmaxnreg has given back

    def named(self, number, threads):
        """The named barrier of that number."""
        if not 0 <= number < 16:
            raise getcurrent().hazard(f"named barriers are numbered 0 to 15, got {number}", "bounds")
        if threads % LANES or not 0 < threads <= LANES * self.size:
            text = f"named barrier {number} is to wait for {threads} threads, in a block of {LANES * self.size}"
            raise getcurrent().hazard(text, "collective")
        return self.named_barriers.setdefault(number, Named(number, threads, self))

    def take_registers(self, warp, n):
        """Give `warp` n registers a thread, once the block's pool has them."""
        more = n - warp.registers
        warp.until(
            lambda: self.pool >= more,
            lambda: f"{more} more registers a thread; the block's pool, what others have given back, holds {max(self.pool, 0)}",
        )
        self.pool, warp.registers = self.pool - more, n

    # -- asynchronous work
    def start(self, land, deed, nbytes, place):
        """Start asynchronous work; it finishes when no warp can go on (or, with a seed, whenever it likes)."""
        work = Work(land, deed, nbytes, place)
        self.flying.append(work)
        return work

    def land(self, work):
        """Finish asynchronous work."""
        self.flying.remove(work)
        work.land()
        work.done = True

    # -- the schedule
    def gives_way(self):
        """Shall a warp that need not wait let others run all the same?"""
        return self.rng is not None and self.rng.random() < PATIENCE

    def run(self, kernel, args):
        """Run the kernel to its end."""
        warps = [Warp(self, k, kernel, args) for k in range(self.size)]
        live = warps
        while live:
            moved = False
            for warp in self.rng.sample(live, len(live)) if self.rng else live:
                if self.flying and self.gives_way():
                    self.land(self.rng.choice(self.flying))
                    moved = True
                if warp.ready is None or warp.ready():
                    warp.switch()
                    moved = True
            live = [w for w in live if not w.dead]
            if not moved:
                if not self.flying:
                    raise self.deadlock(live)
                self.land(self.rng.choice(self.flying) if self.rng else self.flying[0])
        for part in (*warps, *self.mbarriers, *self.slots):
            part.close(warps)

    def is_source(self, code):
        """Is this code of the kernel or one of its helpers?"""
        if len(self.source) != self.functions:  # helpers turn up as the kernel runs
            self.codes, self.functions = {id(f.__code__) for f in self.source.values()}, len(self.source)
        return id(code) in self.codes

    def deadlock(self, live):
        """Who waits for what."""
        waiting = {}
        for warp in live:
            waiting.setdefault((warp.group, warp.at.line, warp.why()), []).append(warp)
        lines = [
            f"\n  warps {[w.index for w in warps]} of warpgroup {group} at {line} wait for {why}"
            for (group, line, why), warps in waiting.items()
        ]
        places = [warps[0].at for warps in waiting.values()]
        return Hazard("deadlock", f"nobody can go on in block {self.index}" + "".join(lines), *places)


def seeded(seed):
    """A random order, or None for the strict one."""
    return None if seed is None else random.Random(seed)
