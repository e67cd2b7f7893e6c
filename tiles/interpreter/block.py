"""One thread block: its shared memory, barriers and registers, and who of its cluster has reached into it."""

from greenlet import getcurrent

from ..layout import LANES, WARPGROUP
from .barriers import NamedBarrier
from .hazard import Hazard
from .shadow import Event, Shadow

REGISTERS = 65536  # of a multiprocessor


class Block:
    """Block `index` of the grid, the `rank`-th of its cluster."""

    def __init__(self, cluster, rank, index, ctas_per_sm):
        self.cluster, self.rank, self.index, self.size, self.smem = cluster, rank, index, cluster.warps, cluster.smem
        self.warp_list, self.agents, self.grid = [], cluster.agents, cluster.grid
        groups = -(-self.size // WARPGROUP)
        self.shadow = Shadow(self.smem.nbytes if self.smem else 0, self.agents)
        self.mma_agents = [
            self.agents.new() for _ in range(self.size)
        ]  # one for each warp: the end of its part says nothing about those of others
        self.store_agents = [self.agents.new() for _ in range(self.size)]
        self.mmas, self.collective_operations = [[] for _ in range(groups)], [[] for _ in range(groups)]
        self.named_barriers = {}
        self.shared_members, self.mbarriers, self.slots = None, [], []
        self.ready = None  # (agent, time) of the warp that has set up the barriers
        self.visits = []  # accesses by warps of peers: (agent, time, event)
        self.entry_registers = min(256, REGISTERS // (LANES * self.size * ctas_per_sm) // 8 * 8)
        self.pool = 0  # registers a thread and warp that setmaxnreg has given back
        self.settings = [[] for _ in range(groups)]  # each setmaxnreg of a warpgroup: {warp: its time then}
        self.resets = []  # of counts that the next grid waits for: (agent, time, event)
        self.releaser = None  # the place of the first warp that has let the next grid begin

    def named(self, number, threads):
        """The named barrier of that number."""
        if not 0 <= number < 16:
            raise getcurrent().hazard(f"named barriers are numbered 0 to 15, got {number}", "bounds")
        if threads % LANES or not 0 < threads <= LANES * self.size:
            text = f"named barrier {number} is to wait for {threads} threads, in a block of {LANES * self.size}"
            raise getcurrent().hazard(text, "collective")
        return self.named_barriers.setdefault(number, NamedBarrier(number, threads, self))

    def check_registers_ordered(self, warp, nth):
        """A Hazard unless the warps of a warpgroup have met since its setmaxnreg before the `nth` (PTX ISA, "setmaxnreg")."""
        settings = self.settings[warp.group]
        if nth == len(settings):
            settings.append({})
        before = settings[nth - 1] if nth else {}
        if nth and (len(before) < WARPGROUP or any(warp.clock[agent] < time for agent, time in before.items())):
            cause = (
                "sets its registers anew, and nothing orders this after the four warps of its warpgroup have set them before"
            )
            raise warp.hazard(f"{cause}: warpgroup.sync() is missing between", "registers")
        settings[nth][warp.agent] = warp.tick()

    def take_registers(self, warp, n):
        """Give `warp` n registers a thread, once the block's pool has them."""
        increase = n - warp.registers
        warp.wait_until(
            lambda: self.pool >= increase,
            lambda: (
                f"{increase} more registers a thread; the block's pool, what others have given back, holds {max(self.pool, 0)}"
            ),
        )
        self.pool, warp.registers = self.pool - increase, n

    def check_reachable(self, warp, operation):
        """A warp of this block or of a peer accesses this block's shared memory, which must have been set up."""
        if warp.block is self:
            return
        agent, time = self.ready or (0, None)
        if time is None or warp.clock[agent] < time:
            raise warp.hazard(
                f"{operation} in block {self.index}, and nothing orders this after that block's `smem.open()`: "
                f"cluster.sync() is missing",
                "lifetime",
            )

    def note_visit(self, warp, time, operation):
        """Note that such a warp did so at its `time`: the block must not end before that."""
        if warp.block is not self:
            self.visits.append((warp.agent, time, Event("visit", operation, warp.place())))

    def note_reset(self, warp):
        """A warp has set a count to 0, which must come before the next grid may begin."""
        if self.releaser is not None:
            cause = "sets a count to 0 that the next grid may have read, as one of the block's warps has released that grid"
            raise Hazard("race", cause, warp.place(), self.releaser)
        self.resets.append((warp.agent, warp.tick(), Event("reset", "a count", warp.place())))

    def release_next(self, warp):
        """A warp lets the next grid begin. A Hazard unless all counts that the block sets to 0 are known to be."""
        for agent, time, event in self.resets:
            if warp.clock[agent] < time:
                cause = "releases the next grid, and nothing orders this after a count was set to 0: block.sync() is missing"
                raise Hazard("race", cause, warp.place(), event.place)
        self.releaser = self.releaser or warp.place()

    def close(self):
        """Check at the block's end that all that was started in it is over, and that no peer came too late."""
        if self.resets and self.releaser is None:
            cause = "the block sets a count to 0 for the next grid, and does not let that begin: grid.release() is missing"
            raise Hazard("unfinished", cause, self.resets[0][2].place)
        for part in (*self.warp_list, *self.mbarriers, *self.slots):
            part.close(self.warp_list)
        for agent, time, event in self.visits:
            if max(warp.clock[agent] for warp in self.warp_list) < time:
                raise Hazard(
                    "lifetime",
                    f"{event.operation} in block {self.index}, and nothing orders that block's end after this: its shared "
                    f"memory may be gone; cluster.sync() is missing at the end",
                    event.place,
                )
