"""Shared memory, laid out on the host.

smem = shared(q=ring(Q, 2, readers=4), k=ring(K, STAGES, readers=8), full=barrier(1))     # offsets, barriers, nbytes
q, k, full = smem.open()                                                                  # in the kernel
memory = smem.open()                                                                      # or so: memory.q, memory.k

smem.per_warpgroup(2) is the storage of a block of two warpgroups, each of which opens a copy of its own. They are as two
blocks, but sure to run on one multiprocessor, and to leave it together."""

import copy
from collections import namedtuple
from dataclasses import replace
from functools import lru_cache, partial

from .compiling import ptx
from .compiling.numba_types import compile_time, numba_type
from .interpreter import Mbarrier, Slot, current_warp
from .layout import LANES, WARPGROUP
from .op import lowers, op
from .pipeline import pipeline
from .ring import BARRIER_BYTES, check_unsliced, empty_barrier, full_barrier, ring, tile_of
from .types import TILE_ALIGN, barrier, st, sv
from .values import SharedTile

ALIGN = TILE_ALIGN  # of a block's shared memory
STAGED = (ring, pipeline)


@lru_cache(None)
def memory_class(names):
    """The class of named tuples as which storage with items of these names opens."""
    return namedtuple("SharedMemory", names)


@compile_time
class shared:
    """A block's dynamic shared memory: named rings, pipelines, shared tiles, vectors and barriers, one after the other, with
    tiles aligned for their swizzle. `nbytes` is what a launch must reserve, `blocks` the number of blocks that a cluster
    must have, `copies` how many warpgroups have a copy each (1: one for the block), `copy_bytes` from one to the next."""

    copies, copy_bytes = 1, 0

    def __init__(self, **items):
        self.items, at = {}, 0
        for name, item in items.items():
            if not isinstance(item, (*STAGED, st, sv, barrier)):
                raise TypeError(f"shared: {name} must be a ring, a pipeline, an st, an sv or a barrier, got {item!r}")
            if isinstance(item, st):
                check_unsliced("shared", item)
        self.starts = {}
        for name, item in items.items():
            if not isinstance(item, barrier):
                tile, stages = (item.tile, item.stages) if isinstance(item, STAGED) else (item, 1)
                self.starts[name] = -(-at // tile.align) * tile.align
                at = self.starts[name] + stages * tile.stage_bytes
        self.barriers = 0
        for name, item in items.items():
            if isinstance(item, ring):
                self.items[name] = replace(item, name=name, start=self.starts[name], barriers=at)
                at, self.barriers = at + 2 * BARRIER_BYTES * item.stages, self.barriers + 2 * item.stages
            elif isinstance(item, pipeline):
                self.items[name] = replace(item, name=name, start=self.starts[name])
            elif isinstance(item, barrier):
                self.items[name], self.starts[name] = item, at
                at, self.barriers = at + BARRIER_BYTES, self.barriers + 1
            else:
                self.items[name] = item
        self.nbytes = at + ALIGN  # the kernel rounds its base up
        self.copied = [[(name, item, self.starts[name]) for name, item in self.items.items()]]
        self.blocks = max((item.blocks for item in items.values() if isinstance(item, ring)), default=1)
        if any(isinstance(item, ring) and item.blocks not in (1, self.blocks) for item in items.values()):
            raise ValueError(f"shared: a ring is for all blocks of a cluster or for one, got {self}")

    def per_warpgroup(self, count):
        """The storage of a block of `count` warpgroups, each of which opens a copy of this one; of one, this one itself."""
        if count == 1:
            return self
        if self.blocks > 1 or self.copies > 1 or count < 1:
            raise ValueError(f"shared: copies of warpgroups are of one block's memory, once, 1 or more; got {count} of {self}")
        storage = copy.copy(self)
        storage.copies, storage.barriers = count, count * self.barriers
        storage.copy_bytes = -(-(self.nbytes - ALIGN) // ALIGN) * ALIGN
        storage.nbytes = self.nbytes + (count - 1) * storage.copy_bytes
        storage.copied = [list(storage._copy_items(n)) for n in range(count)]
        return storage

    def copied_items(self, n):
        """(name, item, start) of the n-th copy's items, in their order, the same objects each time, as ops look up types by
        their identity (Op.agreed). No two copies have a name in common."""
        return self.copied[n]

    def _copy_items(self, n):
        offset = n * self.copy_bytes
        for own_name, item in self.items.items():
            name, start = own_name + f" of warpgroup {n}" * (n > 0), self.starts[own_name] + offset
            if isinstance(item, ring):
                item = replace(item, name=name, start=start, barriers=item.barriers + offset)
            elif isinstance(item, pipeline):
                item = replace(item, name=name, start=start)
            yield name, item, start

    def __str__(self):
        copies = f", {self.copies} times" * (self.copies > 1)
        return f"shared({', '.join(f'{name}={item}' for name, item in self.items.items())}){copies}"

    __repr__ = __str__

    def __eq__(self, other):
        return isinstance(other, shared) and (self.items, self.copies) == (other.items, other.copies)

    def __hash__(self):
        return hash((tuple(self.items.items()), self.copies))

    @op
    def open(self):
        """The items, a named tuple in their order, with their barriers ready in all blocks of a cluster that share a ring.
        Every thread of the block calls it once, before anything else."""
        block, warp = current_warp().block, current_warp()
        if block.smem != self:
            smem = block.smem or "no shared memory: tiles.launch(.., shared=smem) does"
            raise warp.hazard(f"the kernel opens {self}; the launch reserved {smem}", "storage")
        if block.shared_members is None:
            block.shared_members = {}
            for name, item, start in (member for n in range(self.copies) for member in self.copied_items(n)):
                if isinstance(item, ring):
                    block.shared_members[name] = [
                        Slot(block, item, s, partial(tile_of, block, item)) for s in range(item.stages)
                    ]
                    block.slots += block.shared_members[name]
                elif isinstance(item, barrier):
                    block.shared_members[name] = Mbarrier(block, f"barrier {name!r}", item.count)
                elif isinstance(item, pipeline):
                    block.shared_members[name] = item
                else:
                    block.shared_members[name] = SharedTile(item, start, f"shared tile {name!r}")
        if warp.index == 0:
            block.ready = warp.agent, warp.tick()
        threads = LANES * block.size
        block.named(0, threads).sync(warp, threads, description="shared.open: ")
        if self.blocks > 1:
            if block.cluster.size != self.blocks:
                cause = f"{self} is for clusters of {self.blocks} blocks, and the launch has clusters of {block.cluster.size}"
                raise warp.hazard(cause, "storage")
            block.cluster.barrier.arrive(warp)
            block.cluster.barrier.wait(warp)
        if self.copies > 1 and block.size != WARPGROUP * self.copies:
            raise warp.hazard(f"a block of {block.size} warps opens {self}, which is for {self.copies} warpgroups", "storage")
        members = self.copied_items(warp.group if self.copies > 1 else 0)
        return self.pack(item if isinstance(item, STAGED) else block.shared_members[name] for name, item, _ in members)

    def pack(self, values):
        """The named tuple of these values, one for each item."""
        return memory_class(tuple(self.items))(*values)


@lowers(shared.open)
def _(smem):
    def emit(b, _):
        base = b.dynamic_shared(ALIGN)
        with b.if_then(b.icmp_unsigned("==", b.special("tid.x"), b.u32(0))):
            for _, item, start in (member for n in range(smem.copies) for member in smem.copied_items(n)):
                if isinstance(item, barrier):
                    ptx.mbarrier_init(b, b.add(base, b.u32(start)), item.count)
                elif isinstance(item, ring):
                    for s in range(item.stages):
                        ptx.mbarrier_init(b, full_barrier(b, item, base, b.u32(s)), item.writers or 1)
                        ptx.mbarrier_init(b, empty_barrier(b, item, base, b.u32(s)), item.readers * item.blocks)
            if smem.barriers:
                ptx.mbarrier_fence(b)
        b.do("bar.sync 0;")
        if smem.blocks > 1:
            ptx.cluster_arrive(b)
            ptx.cluster_wait(b)
        if smem.copies > 1:
            base = b.add(base, b.mul(ptx.uniform(b, b.warpgroup()), b.u32(smem.copy_bytes)))
        at = [base if isinstance(i, STAGED) else b.add(base, b.u32(smem.starts[n])) for n, i in smem.items.items()]
        return b.context.make_tuple(b, numba_type(items), at)

    items = smem.pack(smem.items.values())
    return items, emit
