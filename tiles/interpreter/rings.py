"""A slot of a ring: who fills it, who may read it, who has given it back."""

from dataclasses import replace

import numpy as np

from ..types import sv
from ..values import SharedTile
from .accesses import READ
from .barriers import Mbarrier
from .hazard import Hazard
from .shadow import RELEASED, Event, TileCells


class Slot:
    """One stage of a ring: its barriers, the tile it holds, how often that one was released.

    `tile` makes the shared tile number j; `readers` warps must release it before the slot is filled again. If the blocks of a
    cluster share the ring, each fills its part of the tile in all of them, once the readers of all have released it."""

    def __init__(self, block, ring, index, tile):
        self.block, self.ring, self.index, self.tile = block, ring, index, tile
        self.full = Mbarrier(block, f"'full' of slot {index} of ring {ring.name!r}", ring.writers or 1)
        arrivals = ring.readers * ring.blocks
        self.empty = Mbarrier(block, f"'empty' of slot {index} of ring {ring.name!r}", arrivals, self._on_all_released)
        self.fills, self.number, self.releases, self.place = 0, index, 0, None
        self.filling = None  # of a tile that comes in parts, until all are there: (tile, next part, parts, place of the last)
        self.last_part = 0, 1, False  # of a tile that blocks share: the part that this one brings, how many there are, columns?
        self.claims = {}  # warp -> the last tile that it claimed, and whether it has published it

    def _name(self, j):
        return f"tile {j} of ring {self.ring.name!r}"

    @property
    def _shared_slots(self):
        """The slot of this number in all blocks that share the ring."""
        if self.ring.blocks == 1:
            return [self]
        return [block.shared_members[self.ring.name][self.index] for block in self.block.cluster.blocks]

    def _part(self, slot, j, part=0, parts=1, across=False):
        """What this block fills of tile j in a slot, or part number `part` of it."""
        tile = slot.tile(j)
        if self.ring.blocks == 1 and parts == 1:
            return tile
        box, number = replace(self.ring.box(parts, across), parent_rows=tile.rows), part if parts > 1 else self.block.rank
        first, address = 0 if across else number * box.rows, tile.address + number * self.ring.offset(parts, across)
        return SharedTile(box, address, f"part {number} of {tile.name}", slot, j, first)

    def fill(self, warp, j, source, at, part=0, parts=1):
        """Copy source[at] into the slot as tile j, or a part of it, once tile j - stages has been released."""
        self._check_next_part(warp, j, part, parts)
        if part == 0:
            self.fills += 1
            self.empty.wait(warp, j // self.ring.stages, f"the slot for {self._name(j)}", self._describe_occupied)
            self.full.arrive(warp, self.ring.tile.nbytes)
        self.filling = (j, part + 1, parts, warp.place()) if part + 1 < parts else None
        across = self.ring.across(parts, source.spec.tile)
        if self.ring.blocks > 1 and parts > 1:
            if part != self.block.rank:
                return
            self.last_part = part, parts, across
        for slot in self._shared_slots:
            warp.load_async(self._part(slot, j, part, parts, across), slot.full, source, at, [self.empty])

    def fill_pages(self, warp, j, pool, pages, size, at, last, parts, begin=None):
        """Copy a tile whose rows lie in pages into its slot, as `fill` does: see ring.fill_pages."""
        warp.note_access(pages, READ)
        (sequence, first, *rest), table, rows = map(int, at), np.asarray(pages), self.ring.box(parts).rows
        for part in range(parts):
            row, page, inside = first + rows * part, 0, size
            if row < last and (begin is None or row + rows > begin):
                if not (0 <= sequence < table.shape[0] and 0 <= row // size < table.shape[1]):
                    raise warp.hazard(f"row {row} of sequence {sequence} lies in no page of a table of shape {table.shape}")
                page, inside = int(table[sequence, row // size]), row % size
                if inside + rows > size:
                    raise warp.hazard(f"rows {row} to {row + rows - 1} lie in two pages of {size} rows")
                if not 0 <= page < len(np.asarray(pool.array)):
                    where = f"row {row} of sequence {sequence} lies in page {page}"
                    raise warp.hazard(f"{where}, which is out of range for a pool of {len(np.asarray(pool.array))} pages")
            self.fill(warp, j, pool, (page, inside, *rest), part, parts)

    def _check_next_part(self, warp, j, part, parts):
        """A Hazard unless this part of tile j is the next for the slot."""
        if not 0 <= part < parts:
            raise warp.hazard(f"fills part {part} of {self._name(j)}, which comes in parts 0 to {parts - 1}", "phase")
        doing = f"fills part {part} of {self._name(j)}" if parts > 1 else f"fills {self._name(j)}"
        if self.filling is None:
            due, next_part = self.index + self.fills * self.ring.stages, 0
        else:
            due, next_part, count, place = self.filling
            if (j, part, parts) != (due, next_part, count) or (place.block, place.warp) != (self.block.index, warp.index):
                cause = (
                    f"{doing} ({parts} parts), and the next for slot {self.index} is part {next_part} of {count} of tile {due}"
                )
                raise warp.hazard(f"{cause}, by warp {place.warp}", "phase", place)
        if j != due:
            remedy = ": one warp fills a ring, each tile once" * (j < due and parts == 1)
            raise warp.hazard(f"{doing}, and the next tile for slot {self.index} is number {due}{remedy}", "phase")
        if part != next_part:
            raise warp.hazard(f"{doing}, and part 0, which waits for the slot, has not come", "phase")

    def claim(self, warp, j):
        """Tile j, for this warp to store its part, once tile j - stages has been released."""
        last, published = self.claims.get(warp.index, (self.index - self.ring.stages, True))
        if not published:
            raise warp.hazard(f"claims {self._name(j)}, and has not published {self._name(last)}", "phase")
        if self.ring.writers > 1:
            self._check_next_claim(warp, j, last)
        self.empty.wait(warp, j // self.ring.stages, f"the slot for {self._name(j)}", self._describe_occupied)
        if self.ring.writers == 1:  # any warp may be the writer of a tile, and come before that of the tile before
            self._check_next_claim(warp, j, max([self.index - self.ring.stages, *[tile for tile, _ in self.claims.values()]]))
        self.claims[warp.index] = j, False
        return self.tile(j)

    def _check_next_claim(self, warp, j, last):
        """A Hazard unless tile j comes after the last one that was claimed."""
        due = last + self.ring.stages
        if j != due:
            raise warp.hazard(f"claims {self._name(j)}, and the next tile for slot {self.index} is number {due}", "phase")

    def publish(self, warp, j, fenced=True):
        """The warp has stored its part of tile j. fenced: with a fence of its own?"""
        if self.claims.get(warp.index) != (j, False):
            raise warp.hazard(f"publishes {self._name(j)}, which it has not claimed", "phase")
        self.claims[warp.index] = j, True
        if not isinstance(self.ring.tile, sv) and fenced:
            warp.fence_async()
        self.full.arrive(warp)

    def wait(self, warp, j):
        """Tile j, once it has arrived."""
        self.full.wait(warp, j // self.ring.stages + 1, self._name(j), self._describe_unfilled)
        return self.tile(j)

    def _describe_unfilled(self, phase):
        """The reason why a tile has not arrived, for messages."""
        if self.filling:
            _, part, parts, place = self.filling
            return f"nobody fills part {part} of {parts} after {place.describe('the last')}"
        if not self.ring.writers:
            return "nobody fills it"
        return f"{self.ring.writers - self.full.due} of {self.ring.writers} writers have published it"

    def _describe_occupied(self, phase):
        """The reason why a slot is not free, for messages."""
        j = self.index + (phase - 1) * self.ring.stages
        return f"{self._name(j)} lies there and was released by {len(self.empty.arrived)} of {self.empty.count} readers"

    def release(self, warp, j, fenced=True):
        """The warp is done with tile j. fenced: with a fence of its own?"""
        name, readers = self._name(j), self.ring.readers
        if warp.released.get(self, -1) >= j:
            raise warp.hazard(f"releases {name} a second time", "released")
        if not self.full.knows(warp, j // self.ring.stages + 1):
            raise warp.hazard(f"releases {name}, for which it has not waited", "released")
        mma = self.block.mma_agents[warp.index]
        if read := self.block.shadow.unfinished_read(mma, warp.clock, TileCells(self.tile(j))):
            raise warp.hazard(f"releases {name}, and has not waited for an mma that reads it", "released", read.place)
        if j == self.number and self.releases == readers:
            cause = f"releases {name}, after as many others as the ring has readers: is readers={readers} too small?"
            raise warp.hazard(cause, "arrivals")
        if self.ring.fenced and fenced:
            warp.fence_async()
        self.number, self.releases, self.place = j, self.releases + 1 if j == self.number else 1, warp.place()
        warp.released[self] = j
        for slot in self._shared_slots:
            slot.empty.arrive(warp)

    def _on_all_released(self, warp):
        """Invalidate a tile that all readers have released. Hazard: somebody still reads it, or a fence is missing."""
        for slot in self._shared_slots:
            tile, shadow = self._part(slot, self.number, *self.last_part), slot.block.shadow
            if problem := shadow.unwritable(self.empty.clock, TileCells(tile), not self.ring.writers):
                kind, cause = problem
                raise warp.hazard(
                    f"this is the last of {self.empty.count} releases (the ring's readers) of {tile.name}, {cause}",
                    "fence" if kind == "fence" else "released",
                )
            event = Event("release", f"the last release of {tile.name}", warp.place())
            shadow.note_write(self.empty.agent, self.empty.phase, TileCells(tile), RELEASED, event)
            shadow.poison(TileCells(tile))

    def close(self, _):
        """Check at the block's end that all readers have released the last tile, or none."""
        if 0 < self.releases < self.ring.readers:
            raise Hazard(
                "unfinished",
                f"the block ends, and {self._name(self.number)} was released {self.releases} times; "
                f"the ring has readers={self.ring.readers}",
                self.place,
            )
