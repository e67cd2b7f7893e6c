"""One thread block: a coroutine a warp, barriers, asynchronous work, and a scheduler that looks for trouble.

Asynchronous work (a copy, a bulk store) finishes as late as the waits allow: only when no warp can go on. With a seed,
warps run and work finishes in random order instead. Either way races are found by clocks (shadow.py), not by luck.
"""
import linecache
import random
import sys

import numpy as np
from greenlet import getcurrent, greenlet

from ..layout import LANES
from .shadow import FILLING, VALID, WORD, Hazard, Shadow

REGISTERS = 65536  # per block's multiprocessor
WARPGROUP = 4  # warps


class Warp(greenlet):
    """One warp: a coroutine that gives way when it waits."""

    def __init__(self, block, index, kernel, args):
        super().__init__(lambda: kernel(*args))
        self.block, self.index, self.code = block, index, kernel.__code__
        self.group, self.rank = divmod(index, WARPGROUP)
        self.clock = np.zeros(block.shadow.agents, np.int64)
        self.ready, self.why = None, lambda: ""
        self.mmas, self.stores, self.releases, self.turn = 0, 0, {}, 0

    def until(self, ready, why):
        """Let others run until `ready()`; `why()` says what for, should it never come."""
        self.ready, self.why = ready, why
        if not ready():
            self.parent.switch()
        self.ready = None

    def tick(self):
        """A new time of this warp's clock."""
        self.clock[self.index] += 1
        return int(self.clock[self.index])

    def learn(self, clock):
        """Know what `clock` knows."""
        np.maximum(self.clock, clock, out=self.clock)

    def line(self):
        """Where in the kernel the warp is, as file:line and text."""
        frame = self.gr_frame or (getcurrent() is self and sys._getframe())
        while frame and frame.f_code is not self.code:
            frame = frame.f_back
        if not frame:
            return "?"
        name, line = self.code.co_filename, frame.f_lineno
        return f"{name.rsplit('/')[-1]}:{line} `{linecache.getline(name, line).split('#')[0].strip()}`"

    def __str__(self):
        return f"warp {self.index} (warpgroup {self.group}), {self.line()}"

    def hazard(self, text):
        """A Hazard that says who, where and what."""
        return Hazard(f"{self}: {text}")

    # -- shared memory
    def read(self, tile, rows=None, name=None):
        """The elements of a shared tile (some of its rows), read by this warp with ordinary loads."""
        offsets = tile.spec.offsets(rows)
        words = np.unique((tile.address + offsets) // WORD)
        self._checked(self.block.shadow.check_read, words, f"reads {tile.name}", False)
        self.block.shadow.note_read(self.index, self.tick(), words, f"{self} read {tile.name}")
        return self.block.shadow.get(tile.address, offsets, tile.spec.dtype.np)

    def write(self, tile, values, rows=None):
        """Store values to (some rows of) a shared tile with ordinary stores."""
        offsets = tile.spec.offsets(rows)
        words = np.unique((tile.address + offsets) // WORD)
        self._checked(self.block.shadow.check_write, words, f"writes {tile.name}", False)
        self.block.shadow.note_write(self.index, self.tick(), words, VALID, f"{self} wrote {tile.name}")
        self.block.shadow.put(tile.address, offsets, values.astype(tile.spec.dtype.np))

    def _checked(self, check, words, doing, asynchronous):
        try:
            check(self.clock, words, doing, asynchronous)
        except Hazard as error:
            raise self.hazard(error) from None

    def fence_async(self):
        """fence.proxy.async"""
        self.block.shadow.fence(self.clock)

    # -- copies by TMA
    def load_async(self, tile, barrier, source, at):
        """Start a copy of source[at] into a shared tile, completing on an mbarrier."""
        block, words = self.block, span(tile)
        self._checked(block.shadow.check_write, words, f"fills {tile.name}", True)
        block.shadow.note_write(barrier.agent, barrier.phase + 1, words, FILLING, f"{self} filled {tile.name}")
        try:
            source.window(at)
        except IndexError as error:
            raise self.hazard(error) from None

        def land():
            block.shadow.put(tile.address, tile.spec.offsets(), source.load(at))
            block.shadow.state[words] = VALID
            barrier.complete(tile.spec.nbytes)

        block.start(land, f"the copy into {tile.name} that {self} started")

    def store_async(self, target, at, tile):
        """Start a copy of a shared tile to target[at]."""
        block, words, agent = self.block, span(tile), self.block.store_agents[self.index]
        self._checked(block.shadow.check_read, words, f"stores {tile.name} by TMA", True)
        self.stores += 1
        block.shadow.note_read(agent, self.stores, words, f"the store of {tile.name} that {self} started")
        try:
            target.window(at)
        except IndexError as error:
            raise self.hazard(error) from None
        done = block.start(
            lambda: target.store(at, block.shadow.get(tile.address, tile.spec.offsets(), tile.spec.dtype.np)),
            f"the store of {tile.name} that {self} started",
        )
        block.bulk.setdefault(self.index, []).append(done)

    def wait_stores(self):
        """Until this warp's bulk stores have read their shared tiles."""
        pending = self.block.bulk.pop(self.index, [])
        self.until(lambda: all(d.done for d in pending), lambda: "its bulk stores")
        self.clock[self.block.store_agents[self.index]] = self.stores

    # -- mma: collective over a warpgroup; it starts when all four warps have issued it and ends for all at once
    def issue(self, tile, compute, slab, *operands):
        """This warp's part of its warpgroup's next mma; `compute` gets the four slabs once somebody waits for it."""
        mmas, agent = self.block.mmas[self.group], self.block.mma_agents[self.group]
        if self.mmas == len(mmas):
            mmas.append(Mma(compute, operands))
        mma = mmas[self.mmas]
        if [(o.address, o.spec) for o in mma.operands] != [(o.address, o.spec) for o in operands]:
            raise self.hazard("the warps of a warpgroup must issue the same mma")
        self.mmas += 1
        for operand in operands:
            self._checked(self.block.shadow.check_read, span(operand), f"mma reads {operand.name}", True)
            if not mma.slabs:
                self.block.shadow.note_read(agent, self.mmas, span(operand), f"the mma that {self} issued on {operand.name}")
        mma.slabs[self.rank] = slab
        return mma, self.mmas

    def complete(self, pending, newer):
        """The tile that `pending` promises, once all but the newest `newer` mmas are done."""
        done = self.mmas - newer
        if pending.group > done:
            raise self.hazard(
                f"wait(..., newer={newer}) leaves mma {pending.group} of {self.mmas} in flight, and that is the one asked for"
            )
        agent = self.block.mma_agents[self.group]
        self.clock[agent] = max(self.clock[agent], done)
        self.until(lambda: len(pending.mma.slabs) == WARPGROUP, lambda: "the other warps of its warpgroup to issue the mma")
        rows = pending.spec.tile.rows
        return pending.mma.result()[rows * self.rank : rows * (self.rank + 1)]


class Mma:
    """One asynchronous mma of a warpgroup."""

    def __init__(self, compute, operands):
        self.compute, self.operands, self.slabs, self.value = compute, operands, {}, None

    def result(self):
        """Its 64 rows; computed when first asked for, as late as the waits allow."""
        if self.value is None:
            self.value = self.compute([self.slabs[rank] for rank in range(WARPGROUP)])
        return self.value


class Mbarrier:
    """An mbarrier: arrivals and bytes due in this phase, phases completed, and what their completion lets one know."""

    def __init__(self, block, name, count, on_phase=None):
        self.block, self.name, self.count, self.on_phase = block, name, count, on_phase
        self.agent = block.shadow.agent()
        self.due, self.bytes, self.phase = count, 0, 0
        self.clock = np.zeros(block.shadow.agents, np.int64)
        self.published = [self.clock.copy()]

    def arrive(self, warp, nbytes=0):
        """One arrival; `nbytes` more bytes are expected in this phase."""
        np.maximum(self.clock, warp.clock, out=self.clock)
        self.bytes += nbytes
        self.due -= 1
        if self.due < 0:
            raise warp.hazard(f"one arrival too many on {self.name}: a phase takes {self.count}")
        self.settle()

    def complete(self, nbytes):
        """A copy of `nbytes` has landed."""
        self.bytes -= nbytes
        self.settle()

    def settle(self):
        """Complete the phase if nothing is due any more."""
        if self.due == 0 and self.bytes < 0:
            raise Hazard(f"{-self.bytes} bytes more than expected arrived on {self.name}")
        if self.due == 0 and self.bytes == 0:
            self.phase, self.due = self.phase + 1, self.count
            self.clock[self.agent] = self.phase
            self.published.append(self.clock.copy())
            if self.on_phase:
                self.on_phase()

    def wait(self, warp, phases, what=""):
        """Until `phases` phases are complete. The hardware compares parities only, so does this; a phase that has the right
        parity and is the wrong one is a hazard."""
        warp.until(
            lambda: self.phase % 2 == phases % 2,
            lambda: f"{what or self.name}: phase {phases} of {self.name} lacks {self.due} of {self.count} arrivals and {self.bytes} bytes",
        )
        if self.phase != phases:
            raise warp.hazard(
                f"waited for phase {phases} of {self.name}, and its parity let phase {self.phase} pass: "
                + ("what was waited for has been overwritten" if self.phase > phases else "this is two phases early")
            )
        warp.learn(self.published[phases])


class Named:
    """A named barrier (bar.sync, bar.arrive)."""

    def __init__(self, number, threads, agents):
        self.number, self.threads, self.arrived, self.opened = number, threads, 0, 0
        self.clock, self.published = np.zeros(agents, np.int64), {}

    def meet(self, warp, threads, sync=True):
        """Arrive, and unless `sync` is false wait until `threads` threads have."""
        if threads != self.threads and self.arrived:
            raise warp.hazard(f"named barrier {self.number} is used with {threads} and {self.threads} threads at once")
        self.threads, generation = threads, self.opened
        np.maximum(self.clock, warp.clock, out=self.clock)
        self.arrived += LANES
        if self.arrived == threads:
            self.arrived, self.opened = 0, generation + 1
            self.published[self.opened] = self.clock.copy()
        if sync:
            warp.until(
                lambda: self.opened > generation,
                lambda: f"named barrier {self.number}: {self.arrived} of {threads} threads have arrived",
            )
            warp.learn(self.published[generation + 1])


class Work:
    """Asynchronous work that has been started."""

    def __init__(self, land, name):
        self.land, self.name, self.done = land, name, False


class Block:
    """One thread block and its shared memory."""

    def __init__(self, index, grid, warps, smem, rng):
        self.index, self.grid, self.size, self.smem, self.rng = index, grid, warps, smem, rng
        groups = -(-warps // WARPGROUP)
        self.shadow = Shadow(smem.nbytes if smem else 0, warps, 3 * warps + groups + (smem.barriers if smem else 0))
        self.mma_agents = [self.shadow.agent() for _ in range(groups)]
        self.store_agents = [self.shadow.agent() for _ in range(warps)]
        self.mmas, self.bulk, self.flying = [[] for _ in range(groups)], {}, []
        self.named_barriers, self.opened = {}, None
        self.entry_registers = min(255, REGISTERS // (LANES * warps)) // 8 * 8
        self.spare = REGISTERS - self.entry_registers * LANES * warps

    def named(self, number, threads):
        """The named barrier of that number."""
        if not 0 <= number < 16:
            raise getcurrent().hazard(f"named barriers are numbered 0 to 15, got {number}")
        if threads % LANES or not 0 < threads <= LANES * self.size:
            raise getcurrent().hazard(f"named barrier {number}: {threads} threads, in a block of {LANES * self.size}")
        return self.named_barriers.setdefault(number, Named(number, threads, self.shadow.agents))

    def start(self, land, name):
        """Start asynchronous work; it finishes when no warp can go on (or, with a seed, whenever it likes)."""
        work = Work(land, name)
        self.flying.append(work)
        return work

    def land(self, work):
        """Finish asynchronous work."""
        self.flying.remove(work)
        work.land()
        work.done = True

    def run(self, kernel, args):
        """Run the kernel to its end."""
        live = self.warps = [Warp(self, k, kernel, args) for k in range(self.size)]
        while live:
            moved = False
            for warp in self.rng.sample(live, len(live)) if self.rng else live:
                if self.rng and self.flying and self.rng.random() < 0.2:
                    self.land(self.rng.choice(self.flying))
                    moved = True
                if warp.ready is None or warp.ready():
                    warp.switch()
                    moved = True
            live = [w for w in live if not w.dead]
            if not moved:
                if not self.flying:
                    raise Hazard(self.deadlock(live))
                self.land(self.rng.choice(self.flying) if self.rng else self.flying[0])
        if self.flying:
            raise Hazard(f"block {self.index} ends while {self.flying[0].name} is in flight")

    def deadlock(self, live):
        """Who waits for what."""
        lines = {}
        for w in live:
            lines.setdefault((w.group, w.line(), w.why()), []).append(w.index)
        return f"deadlock in block {self.index}: nobody can go on" + "".join(
            f"\n  warps {warps} of warpgroup {group}, {line}, wait for {why}" for (group, line, why), warps in lines.items()
        )


def span(tile):
    """The words of a whole shared tile."""
    return slice(tile.address // WORD, (tile.address + tile.spec.nbytes) // WORD)


def seeded(seed):
    """A random order, or None for the strict one."""
    return None if seed is None else random.Random(seed)
