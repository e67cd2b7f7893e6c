"""A warp: a coroutine with a clock, and what it does to shared memory."""

import contextvars
import sys

import numpy as np
from greenlet import getcurrent, greenlet

from ..layout import WARPGROUP
from ..types import sv
from .accesses import READ, WRITE
from .copies import copy_box, inside, misaligned, remedy
from .hazard import Hazard, WarpPlace
from .record import CopyStep, MmaStep, WaitStep, note
from .shadow import FILLING, TIME, VALID, Event, TileCells


class InterpretedWarp(greenlet):
    """One warp: a coroutine that gives way when it waits."""

    def __init__(self, block, index, kernel, args):
        super().__init__(lambda: self._run(kernel, args))
        self.gr_context = contextvars.copy_context()  # NumPy's error state
        self.block, self.index, self.kernel = block, index, kernel.__code__
        self.group, self.rank = divmod(index, WARPGROUP)
        self.agent = block.rank * block.size + index
        self.copier = block.agents.warps + self.agent  # the agent of its copies by cp.async
        self.clock, self.time = np.zeros(block.agents.count, TIME), 0
        self.ready, self.why = None, lambda: ""
        self.registers, self.settings = block.entry_registers, 0
        self.mmas, self.stores, self.sent, self.released, self.collectives = 0, 0, [], {}, 0
        self.cluster_arrivals, self.cluster_waits, self.cluster_arrival_place = (
            0,
            0,
            None,
        )  # arrivals on the cluster's barrier, waits, where it last arrived
        self.overwritten = (
            None  # by a bulk store that adds nothing, since it counted (ops/memory/counts.py): that store's operation
        )
        self.stored = 0  # bulk stores that are known to be done, not only to have read
        self.steps, self.in_op = None, False  # what it has done, if it keeps a record: see record.py
        self.copies, self.groups, self.filled = [], [], {}  # copies of the open group, groups, tile of a pipeline -> its group

    def _run(self, kernel, args):
        try:
            kernel(*args)
        except UnboundLocalError as error:  # which Numba compiles: Python's own words tell neither the line nor that
            frames, at, source = [], error.__traceback__, self.block.cluster.source_codes()
            while at:
                frames += [(at.tb_frame.f_code, at.tb_lasti)] * (id(at.tb_frame.f_code) in source)
                at = at.tb_next
            where = WarpPlace(self.block.index, self.index, tuple(frames[::-1]))
            why = "compiled, this kernel would go on with whatever lies there"
            raise UnboundLocalError(f"{error} on this way through the kernel; {why}\n  at {where}") from error

    # -- time
    def wait_until(self, ready, why):
        """Let others run until `ready()`; `why()` says what for, should it never come."""
        if self.block.cluster.should_yield() or not ready():
            self.ready, self.why = ready, why
            self.parent.switch()
            self.ready = None

    def tick(self):
        """A new time of this warp's clock."""
        self.time += 1
        self.clock[self.agent] = self.time
        return self.time

    def learn(self, clock):
        """Let the warp know all that `clock` knows."""
        np.maximum(self.clock, clock, out=self.clock)

    # -- messages
    def place(self):
        """The statement the warp is at, and those that called its function."""
        frame = self.gr_frame if getcurrent() is not self else sys._getframe(1)
        frames, source, kernel = [], self.block.cluster.source_codes(), self.kernel
        while frame is not None:
            code = frame.f_code
            if id(code) in source:
                frames.append((code, frame.f_lasti))
                if code is kernel:
                    break
            frame = frame.f_back
        return WarpPlace(self.block.index, self.index, tuple(frames))

    def __str__(self):
        return str(self.place())

    def hazard(self, cause, kind="bounds", *others):
        """A Hazard of this warp at its statement."""
        return Hazard(kind, cause, self.place(), *others)

    def _check_access(self, problem, doing):
        if problem:
            kind, cause = problem
            raise self.hazard(f"{doing}, {cause}{self._describe_unawaited(cause) if kind == 'in flight' else ''}", kind)

    def _describe_unawaited(self, cause):
        """What is missing, if it is a copy of this warp's own by cp.async that is in flight."""
        if any(copy.place.describe(copy.operation) in cause for copy in self.copies):
            return ": commit_group is missing"
        late = [copy for group in self.groups[self.clock[self.copier] :] for copy in group]
        return ": wait_group is missing" if any(copy.place.describe(copy.operation) in cause for copy in late) else ""

    def _check_not_released(self, tile, doing):
        if tile.slot is not None and self.released.get(tile.slot, -1) >= tile.number:
            raise self.hazard(f"{doing}, which this warp has released", "released")

    # -- global memory
    def note_access(self, array, access):
        """This warp reads or writes a global array, or one that is cut into tiles: accesses.READ or WRITE."""
        accesses = self.block.cluster.accesses
        if accesses:
            accesses.note(getattr(array, "array", array), access)

    def put(self, view, values):
        """This warp stores values to a view of a global array. Hazard: another one has stored others there, and nothing orders
        the two."""
        if not view.flags.writeable:
            raise ValueError(f"an array that is read-only is stored to: launch with x.copy()\n  at {self}")
        self._check_waited()
        accesses = self.block.cluster.accesses
        if accesses and (region := accesses.region(view)):
            accesses.stores.note(self, self.clock, self.tick(), self.place(), view, values, region)
        view[...] = values

    def _check_waited(self):
        """A Hazard if the grid before may still read what this warp stores, or store there."""
        if self.block.cluster.must_wait:
            raise self.hazard("stores to an array while the grid before it may still run: grid.wait() comes first", "race")

    # -- ordinary accesses to shared memory
    def read(self, tile, rows=None, fence=True, owner=None, cols=None):
        """The elements of a shared tile (some of its rows or columns), read with ordinary loads; `fence`: a fence follows the
        loads. owner: the block in whose memory it lies, this one by default."""
        owner = owner or self.block
        cells, shadow = TileCells(tile, rows, cols), owner.shadow
        self._check_not_released(tile, f"reads {tile.name}")
        owner.check_reachable(self, f"reads {tile.name}")
        self._check_access(shadow.unreadable(self.clock, cells, False), f"reads {tile.name}")
        time = self.tick()
        owner.note_visit(self, time, f"reads {tile.name}")
        shadow.note_read(self.agent, time, cells, Event("read", f"the read of {tile.name}", self.place()))
        if fence:
            self.fence_async()
        values = shadow.get(tile, rows)
        return values if cols is None else values[:, cols.start : cols.stop]

    def write(self, tile, values, rows=None, owner=None, cols=None):
        """Store values to (some rows or columns of) a shared tile of block `owner`, with ordinary stores."""
        owner = owner or self.block
        cells, shadow = TileCells(tile, rows, cols), owner.shadow
        self._check_not_released(tile, f"writes {tile.name}")
        owner.check_reachable(self, f"writes {tile.name}")
        self._check_access(shadow.unwritable(self.clock, cells, False), f"writes {tile.name}")
        event = Event("store", f"the write of {tile.name}", self.place())
        time = self.tick()
        owner.note_visit(self, time, f"writes {tile.name}")
        shadow.note_write(self.agent, time, cells, VALID, event)
        shadow.put(tile, tile.spec.dtype.round(values), rows, cols)

    def write_async(self, tile, values, barrier):
        """Start storing values to a shared tile (st.async), completing on an mbarrier, both of one block."""
        barrier.block.check_reachable(self, f"writes {tile.name}")
        shadow, cells = barrier.block.shadow, TileCells(tile)
        self._check_access(shadow.unwritable(self.clock, cells, False), f"writes {tile.name}")
        self._start_copy(tile, barrier, lambda: tile.spec.dtype.round(values), "the store to")
        barrier.learn(self.clock)  # what completes it is a release (PTX ISA, "st.async")

    def fence_async(self):
        """Order ordinary accesses before asynchronous ones: fence.proxy.async."""
        self.block.agents.fence(self.clock)

    def _record_copy(self, work, kind, view, written):
        """Record asynchronous work, between shared memory and `view()` of global memory."""
        if self.steps is not None:
            note(CopyStep, work, kind, view(), written)

    # -- copies by TMA
    def load_async(self, tile, barrier, source, at, after=()):
        """Start a copy of source[at] into a shared tile, completing on an mbarrier, both of one block; `after` barriers that
        were waited for."""
        self.inside(source, at)
        self.note_access(source, READ)
        self._check_not_released(tile, f"fills {tile.name}")
        barrier.block.check_reachable(self, f"fills {tile.name}")
        shadow, cells = barrier.block.shadow, TileCells(tile)
        self._check_access(shadow.unwritable(self.clock, cells, True), f"fills {tile.name}")
        self._start_copy(tile, barrier, lambda: source.load(at), "the copy into", after, lambda: source.view_at(at)[0])

    def _start_copy(self, tile, barrier, values, operation, after=(), view=lambda: None):
        """Start an asynchronous copy of `values()` to a shared tile, from `view()` of global memory."""
        shadow, cells = barrier.block.shadow, TileCells(tile)
        shadow.poison(cells)

        def complete():
            shadow.put(tile, values())
            shadow.mark_valid(cells)
            barrier.end_copy(copy)

        copy = self.block.cluster.start(complete, f"{operation} {tile.name}", tile.spec.nbytes, self.place())
        time = barrier.begin_copy(self, copy, after)
        self._record_copy(copy, "TMA", view, False)
        shadow.note_write(barrier.agent, time, cells, FILLING, Event("copy", f"the end of {copy.operation}", copy.place))

    def store_async(self, target, at, tile, fold=None):
        """Start a copy of a shared tile to target[at]; `fold`, a function of two, says what becomes of what is there."""
        self.inside(target, at)
        self._check_waited()
        self.note_access(target, WRITE)
        if fold:
            self.note_access(target, READ)
        if not target.spec.storable:
            raise self.hazard(f"TMA writes 16 bytes at a time, and would write past the columns of {target.spec}")
        self._check_not_released(tile, f"stores {tile.name} by TMA")
        shadow, cells, agent = self.block.shadow, TileCells(tile), self.block.store_agents[self.index]
        self._check_access(shadow.unreadable(self.clock, cells, True), f"stores {tile.name} by TMA")
        self.stores += 1
        clock, time, place = self.clock.copy(), self.tick(), self.place()

        def complete():
            view, inside = target.view_at(at)
            accesses = self.block.cluster.accesses
            if accesses and not fold and (written := accesses.region(view)):
                accesses.stores.note(self, clock, time, place, view, shadow.get(tile)[inside], written)
            target.store(at, shadow.get(tile), fold)

        store = self.block.cluster.start(complete, f"the TMA store of {tile.name}", tile.spec.nbytes, place)
        self._record_copy(store, "TMA", lambda: target.view_at(at)[0], True)
        shadow.note_read(agent, self.stores, cells, Event("read", store.operation, store.place))
        self.sent.append(store)
        self.overwritten = self.overwritten if fold else store.operation

    def inside(self, tensor, at):
        """A Hazard if the tile at `at` does not exist."""
        try:
            tensor.view_at(at)
        except IndexError as error:
            raise self.hazard(str(error), "bounds") from None

    def wait_stores(self, newer=0):
        """Until this warp's bulk stores, all but the `newer` youngest, have read their shared tiles."""
        agent, done = self.block.store_agents[self.index], max(0, self.stores - newer)
        known = int(self.clock[agent])
        self.wait_until(lambda: all(store.done for store in self.sent[known:done]), lambda: "its TMA stores")
        note(WaitStep, tuple(self.sent[known:done]), "its TMA stores")
        self.clock[agent] = max(known, done)

    # -- copies by cp.async
    def copy_async(self, tile, source, at, rows, cols, vector_bytes, rows_of_tile):
        """Start copying rows `rows_of_tile` of the tile at `at` of a global array to a shared tile, `vector_bytes` bytes at a
        time."""
        if isinstance(tile.spec, sv):
            return self._copy_numbers(tile, source, at, cols % source.ndim, rows_of_tile)
        rows, cols = rows % source.ndim, cols % source.ndim
        self.note_access(source, READ)
        if why := misaligned(source, at, cols, vector_bytes):
            raise self.hazard(f"copy in pieces of {vector_bytes} bytes: {why}; {remedy(source, at, cols)}")
        for axis, (index, size) in enumerate(zip(at, source.shape)):
            if axis not in (rows, cols) and not 0 <= index < size:
                raise self.hazard(f"index {index} is out of range for axis {axis} of an array of shape {source.shape}")
        at = tuple(int(index) + (rows_of_tile.start if axis == rows else 0) for axis, index in enumerate(at))
        array, shape = np.asarray(source), (len(rows_of_tile), tile.spec.cols)
        view = lambda: inside(array, at, shape, rows, cols)[0]
        self._start_cp_async(tile, rows_of_tile, lambda: copy_box(array, at, shape, rows, cols), view)

    def _copy_numbers(self, tile, source, at, axis, rows_of_tile):
        """Start copying numbers of a vector that lies along one axis, as copy_async does."""
        self.note_access(source, READ)
        for k, (index, size) in enumerate(zip(at, source.shape)):
            if k != axis and not 0 <= index < size:
                raise self.hazard(f"index {index} is out of range for axis {k} of an array of shape {source.shape}")
        line = np.moveaxis(np.asarray(source), axis, -1)[tuple(int(i) for k, i in enumerate(at) if k != axis)]
        at = 0, int(at[axis]) + rows_of_tile.start
        view = lambda: inside(line[None], at, (1, len(rows_of_tile)), 0, 1)[0]
        self._start_cp_async(tile, rows_of_tile, lambda: copy_box(line[None], at, (1, len(rows_of_tile)), 0, 1)[0], view)

    def look_up(self, pages, size, at, last, rows_of_tile, begin=None):
        """(page, row in the page, ...) of these rows of a tile, by the page table `pages`: see pipeline.look_up."""
        sequence, first = map(int, at)
        rows = range(first + rows_of_tile.start, first + rows_of_tile.stop)
        if pages is None:
            return tuple([x for row in rows for x in divmod(row, size)])
        self.note_access(pages, READ)
        table, page_rows = np.asarray(pages), []
        for row in rows:
            exists = (begin is None or row >= begin) and row < last
            if exists and not (0 <= sequence < table.shape[0] and 0 <= row // size < table.shape[1]):
                raise self.hazard(f"row {row} of sequence {sequence} lies in no page of a table of shape {table.shape}")
            page_rows += int(table[sequence, row // size]) if exists else 0, row % size
        return tuple(page_rows)

    def copy_pages(self, tile, pool, page_rows, at, last, vector_bytes, rows_of_tile):
        """Start copying these rows of a tile from the pages that they lie in: see pipeline.fill_pages."""
        self.note_access(pool, READ)
        if isinstance(tile.spec, sv):  # as tiles of one column
            values, view = self.from_pages(np.asarray(pool)[..., None], page_rows, (*at, 0), last, rows_of_tile, 1)
            return self._start_cp_async(tile, rows_of_tile, lambda: values()[:, 0], view)
        if why := misaligned(pool, where := (0, 0, *at[1:]), pool.ndim - 1, vector_bytes):
            raise self.hazard(f"copy in pieces of {vector_bytes} bytes: {why}; {remedy(pool, where, pool.ndim - 1)}")
        self._start_cp_async(
            tile, rows_of_tile, *self.from_pages(np.asarray(pool), page_rows, at, last, rows_of_tile, tile.spec.cols)
        )

    def from_pages(self, array, page_rows, at, last, rows_of_tile, cols):
        """(what gives the values of these rows, of so many columns; what gives a view of where they lie)"""
        first, *rest, col = map(int, at)
        lines = []
        for row, page, page_row in zip(
            range(first + rows_of_tile.start, first + rows_of_tile.stop), page_rows[::2], page_rows[1::2], strict=True
        ):
            line = np.zeros((1, cols), array.dtype)
            if row < last:
                if not 0 <= page < len(array):
                    raise self.hazard(f"row {row} lies in page {page}, which is out of range for a pool of {len(array)} pages")
                at_page = page, slice(None), *rest
                line = copy_box(array[at_page], (page_row, col), line.shape, 0, 1)
            lines.append(line)
        return lambda: np.concatenate(lines), lambda: None

    def _start_cp_async(self, tile, rows_of_tile, values, view):
        """Start a copy of `values()` by cp.async to the rows `rows_of_tile` of a shared tile, from `view()` of global
        memory."""
        shadow, cells, agent = self.block.shadow, TileCells(tile, rows_of_tile), self.copier
        self._check_access(shadow.unwritable(self.clock, cells, False), f"copies into {tile.name}")
        shadow.poison(cells)

        def complete():
            shadow.put(tile, values(), rows_of_tile)
            shadow.mark_valid(cells)

        nbytes = len(rows_of_tile) * (1 if isinstance(tile.spec, sv) else tile.spec.cols) * tile.spec.dtype.itemsize
        copy = self.block.cluster.start(complete, f"the copy into {tile.name}", nbytes, self.place())
        self._record_copy(copy, "cp.async", view, False)
        self.copies.append(copy)
        event = Event("copy", f"the end of {copy.operation}", copy.place)
        shadow.note_write(agent, len(self.groups) + 1, cells, FILLING, event)

    def commit_group(self, tile_key=None):
        """Close the group of copies started since the last; `what` tile of a pipeline it brings."""
        self.groups.append(self.copies)
        self.copies, self.filled[tile_key] = [], len(self.groups)

    def wait_group(self, newer, tile_key=None):
        """Until all groups but the `newer` youngest are here, tile `what` of a pipeline among them."""
        done = max(0, len(self.groups) - newer)
        if tile_key is not None and self.filled.get(tile_key, done + 1) > done:
            name = f"tile {tile_key[1]} of pipeline {tile_key[0]!r}"
            if tile_key not in self.filled:
                raise self.hazard(f"waits for {name}, which this warp has not filled", "wait")
            younger = len(self.groups) - self.filled[tile_key]
            cause = f"newer={newer} lets the youngest {newer} groups of copies stay in flight, and only {younger} are younger"
            raise self.hazard(f"{cause} than {name}: at most newer={younger}", "wait")
        known = int(self.clock[self.copier])
        self.wait_until(lambda: all(copy.done for group in self.groups[known:done] for copy in group), lambda: "its copies")
        note(WaitStep, tuple(copy for group in self.groups[known:done] for copy in group), "its copies")
        self.clock[self.copier] = max(known, done)

    # -- what the four warps of a warpgroup do together
    def check_collective(self, operation):
        """The warps of a warpgroup must do `operation` as their next common one."""
        block = self.block
        if self.group >= block.size // WARPGROUP:
            raise self.hazard(
                f"{operation} takes a warpgroup of {WARPGROUP} warps; this block has {block.size} warps", "collective"
            )
        collective_operations = block.collective_operations[self.group]
        if self.collectives == len(collective_operations):
            collective_operations.append((operation, self.place()))
        first, place = collective_operations[self.collectives]
        if first != operation:
            raise self.hazard(f"{operation}, where another warp of its warpgroup did: {first}", "collective", place)
        self.collectives += 1

    def set_registers(self, n, increases):
        """Take registers from the block's pool, or give some back (setmaxnreg). n: the registers of a thread after it."""
        if n < self.registers if increases else n > self.registers:
            verb = "claims" if increases else "keeps"
            raise self.hazard(f"{verb} {n} registers a thread, and it has {self.registers}", "registers")
        self.check_collective(f"setmaxnreg {n}")
        self.block.check_registers_ordered(self, self.settings)
        self.settings += 1
        self.block.take_registers(self, n)

    def issue(self, compute, slab, *operands):
        """This warp's part of its warpgroup's next mma on `operands`, shared tiles and the TileCells that it reads of them.
        `compute` gets the four slabs when it is done. It starts when all four warps have issued it; each one's part ends by
        itself."""
        block = self.block
        self.check_collective("mma on " + " and ".join(f"{tile.name}, {tile.spec}" for tile, _ in operands))
        mmas, agent = block.mmas[self.group], block.mma_agents[self.index]
        if self.mmas == len(mmas):
            mmas.append(AsyncMma(compute))
        mma = mmas[self.mmas]
        self.mmas += 1
        place = self.place()
        for tile, cells in operands:
            self._check_not_released(tile, f"mma reads {tile.name}")
            self._check_access(block.shadow.unreadable(self.clock, cells, True), f"mma reads {tile.name}")
            block.shadow.note_read(agent, self.mmas, cells, Event("read", "the end of the mma", place))
        mma.slabs[self.rank], mma.places[self.rank] = slab, place
        note(MmaStep, mma)
        return mma, self.mmas

    def chain(self, pending):
        """`pending` becomes the accumulator of the next mma, and is no more."""
        self._check_not_chained(pending)
        pending.next = self.place()

    def _check_not_chained(self, pending):
        if pending.next:
            raise self.hazard("this tile in flight was handed on to a later mma, which adds to it", "wait", pending.next)

    def complete(self, pending, newer):
        """The tile that `pending` promises, if one is given, once all but the newest `newer` mmas are done."""
        done, mmas = max(0, self.mmas - newer), self.block.mmas[self.group]
        if pending is not None:
            self._check_covered(pending, newer, done)
        agent = self.block.mma_agents[self.index]
        self.wait_until(
            lambda: not done or len(mmas[done - 1].slabs) == WARPGROUP,
            lambda: "the other warps of its warpgroup to issue the mma",
        )
        for mma in mmas[self.clock[agent] : done]:
            mma.finish()
        note(WaitStep, tuple(mmas[self.clock[agent] : done]), "the product")
        self.clock[agent] = max(self.clock[agent], done)
        return None if pending is None else pending.part(self.rank)

    def _check_covered(self, pending, newer, done):
        self._check_not_chained(pending)
        if pending.group > done:
            raise self.hazard(
                f"newer={newer} lets the youngest {newer} mmas of this warpgroup stay in flight, and only "
                f"{self.mmas - pending.group} are younger than the one asked for: at most newer={self.mmas - pending.group}",
                "wait",
            )

    def close(self, _):
        """At the block's end: has it waited for what it started?"""
        block = self.block
        if (known := self.clock[block.store_agents[self.index]]) < self.stores:
            store = self.sent[known]
            cause = f"the block ends, and nobody has waited for {store.operation}: store_wait is missing"
            raise Hazard("unfinished", cause, store.place)
        pending = [copy for group in self.groups[self.clock[self.copier] :] for copy in group] + self.copies
        if pending:
            remedy = (
                "wait for it, or fill with end= the number of tiles"
                if " of pipeline " in pending[0].operation
                else "wait_group is missing"
            )
            raise Hazard(
                "unfinished", f"the block ends, and nobody has waited for {pending[0].operation}: {remedy}", pending[0].place
            )
        known = self.clock[block.mma_agents[self.index]] if self.mmas else 0
        if known < self.mmas:
            place = block.mmas[self.group][known].places[self.rank]
            raise Hazard("unfinished", "the block ends, and this mma has not been waited for: warpgroup.wait is missing", place)
        self.close_collectives()

    def close_collectives(self):
        """At the block's end: has it done what its warpgroup's other warps did together?"""
        collective_operations = self.block.collective_operations[self.group]
        if self.collectives < len(collective_operations):
            operation, place = collective_operations[self.collectives]
            raise Hazard(
                "collective",
                f"the block ends, and warp {self.index} has not come to an operation of its warpgroup: {operation}",
                place,
            )


class AsyncMma:
    """One asynchronous mma of a warpgroup."""

    def __init__(self, compute):
        self.compute, self.slabs, self.places, self.value = compute, {}, {}, None

    def finish(self):
        """Compute its 64 rows: when first waited for, as late as the waits allow."""
        if self.value is None:
            self.value = self.compute([self.slabs[rank] for rank in range(WARPGROUP)])
