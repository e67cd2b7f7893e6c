"""Rings: pipeline stages that need no state.

    k = ring(K, STAGES, readers=8)      on the host, in shared storage (shared.py)
    k.fill(j, gK, (batch, j, head))     producer: waits until slot j % stages is free, then copies by TMA
    tile = k.wait(j)                    consumer: the j-th tile, once it has arrived
    k.release(j)                        consumer: this warp is done with the j-th tile

What warps compute for other warps goes through a ring with `writers` instead: each of them stores its part of the j-th tile.

    store(p.claim(j), x)                writer: the j-th tile, once its slot is free
    p.publish(j)                        writer: this warp's part is there

A tile whose rows lie in several places, such as pages, is filled box by box, in order; the consumer does not notice. So is one
whose columns do, such as those of two weights that one product shares.

    for i in range(4):
        k.fill(j, gK, (page[i], 0), i, 4)       part i of 4

The j-th fill goes to slot j % stages and completes phase j // stages + 1 of that slot's "full" barrier; the readers'
releases complete the same phase of its "empty" barrier. Producer and consumer compute both from j alone, so they cannot
disagree, and a kernel shows no barrier arithmetic.
"""

import contextlib
from dataclasses import dataclass, replace

from .compiling import ptx
from .compiling.builder import i32
from .compiling.numba_types import compile_time, void
from .interpreter import current_warp
from .layout import LANES, WARPGROUP
from .numba_names import types
from .op import integer, lowers, op
from .types import gl, rv, st, sv
from .values import SharedTile

BARRIER_BYTES = 8
CLUSTER_END = 8  # most blocks of a cluster


@compile_time
@dataclass(frozen=True)
class ring:
    """`stages` copies of one shared tile or vector. `readers`: how many warps release each before its slot is filled again.
    `writers`: how many warps store it, each its part; 0 if TMA loads it. Where readers take turns at tiles, `stages` must be a
    multiple of how many there are: who waits for every other tile of a slot takes the one for the other.

    `blocks`: so many blocks, a cluster, want the same tiles, and each tile is read from global memory once: every block
    loads its `part` of the rows for all of them (TMA multicast), as soon as `readers` warps of each have released the slot.
    All blocks fill, wait for and release the same tiles in the same order, and end with ops.cluster.sync(), because a peer
    may release a tile when a block is already done.

    `once`: nobody else reads what TMA loads, so it leaves the L2 cache before other data does."""

    tile: st | sv
    stages: int
    readers: int = 4
    writers: int = 0
    blocks: int = 1
    once: bool = False
    name: str = ""  # these are set by `shared`: what it is called, and bytes from the base of shared memory
    start: int = 0
    barriers: int = 0

    def __post_init__(self):
        if self.stages < 1 or self.readers < 1:
            raise ValueError(f"ring: stages and readers must be positive, got {self.stages} and {self.readers}")
        if self.writers < 0:
            raise ValueError(f"ring: writers must be 0 (TMA) or more, got {self.writers}")
        if self.writers and self.blocks > 1:
            raise ValueError(f"ring: what warps write stays in their block, got {self.writers=} and {self.blocks=}")
        if self.writers and self.once:
            raise ValueError(f"ring: what warps write is in no cache, got {self.writers=} and {self.once=}")
        if not 1 <= self.blocks <= CLUSTER_END or (self.blocks > 1 and self.tile.rows % (8 * self.blocks)):
            raise ValueError(
                f"ring: 1 to {CLUSTER_END} blocks share a tile, by multiples of 8 rows, got {self.blocks} for {self.tile}"
            )
        check_unsliced("ring", self.tile)

    def __str__(self):
        writers = f", {self.writers} writers" * bool(self.writers)
        blocks = f", for {self.blocks} blocks" * (self.blocks > 1)
        return f"ring({self.tile}, {self.stages} stages, {self.readers} readers{writers}{blocks}{', once' * self.once})"

    @property
    def part(self):
        """What one block fills of a tile (the blocks divide the rows in order); this is the tile of the tensors that it comes
        from."""
        return self.tile if self.blocks == 1 else replace(self.tile, rows=self.tile.rows // self.blocks, parent_rows=0)

    @property
    def fenced(self):
        """Must giving back a tile order this warp's loads before TMA's next write? Loads of tiles have done so themselves.
        Loads of vectors have not, because most vectors are written by warps and need no fence."""
        return isinstance(self.tile, sv) and not self.writers

    def box(self, parts, across=False):
        """What one `fill` loads if a tile is filled in so many parts of its rows or, `across`, of its columns; its source is a
        tensor of such tiles."""
        if parts == 1:
            return self.part
        if across:
            return replace(self.tile, cols=self.tile.cols // parts)
        return replace(self.tile, rows=self.tile.rows // parts, parent_rows=0)

    def across(self, parts, box):
        """Do the boxes, so many to a tile, divide its columns?"""
        return parts > 1 and box.cols < self.tile.cols

    def offset(self, parts, across):
        """Bytes from one of so many parts of a tile to the next."""
        box = self.box(parts, across)
        return box.panels * self.tile.panel_bytes if across else box.rows * self.tile.width

    def slot(self, j):
        """Address of the j-th tile."""
        return self.start + j % self.stages * self.tile.stage_bytes

    @op
    def fill(self, j, source, at, part=0, parts=1):
        """Copy source[at] into slot j % stages by TMA, as soon as the readers of tile j - stages have released it. Called by a
        whole warpgroup; its first warp does it. source: a `tensor` whose tile is the ring's `part`; `at` counts the ring's
        tiles all the same.

        parts: the tile comes in so many fills, one after the other, part 0 to parts - 1, each from its own place. source: a
        tensor of tiles as large as a part, which `at` counts: with fewer rows or, by whole panels, fewer columns. Blocks
        that share a ring are as many as the parts, and each loads one for all: block 0 part 0. If page numbers say which
        places these are, see `fill_pages`."""
        if current_warp().rank == 0:
            _slot(self, j).fill(
                current_warp(), j, source, _part_of_rank(self, source.spec, at, current_warp().block.rank, parts), part, parts
            )

    @op
    def fill_pages(self, j, pool, pages, size, at, last, parts=1, begin=None):
        """Fill the j-th tile, as `fill` does, with rows in pages of a pool, a tensor (page, row, ...) whose rows are counted
        one by one. pages: the page table, of int32 or int64: row n of sequence s is row n % size of page pages[s, n // size].
        at: (sequence, row, ...), as if there were no pages; the row is a multiple of a part's rows. The tile comes in so many
        parts, at most 32, each of which lies in one page. Page numbers of rows from `last` on are not read, nor those before
        row `begin`, and parts that have no other rows are 0."""
        if current_warp().rank == 0:
            _slot(self, j).fill_pages(current_warp(), j, pool, pages, size, at, last, parts, begin)

    @op
    def claim(self, j):
        """The j-th tile, to be stored, as soon as the readers of tile j - stages have released it. Called by each of the
        `writers`."""
        return _slot(self, j).claim(current_warp(), j)

    @op
    def publish(self, j, fenced=True):
        """This warp has stored its part of tile j. The readers, their mmas and TMA see it once all writers have called this.
        (Of a vector only ordinary loads see it, until a reader's warpgroup meets.) fenced=False: without a
        fence of its own, because that of a tile of another ring, which has just been published, covers this one too, or because
        readers only load it."""
        _slot(self, j).publish(current_warp(), j, fenced)

    @op
    def wait(self, j):
        """The j-th tile, once it is in shared memory."""
        return _slot(self, j).wait(current_warp(), j)

    @op
    def release(self, j, after=None, fenced=True):
        """This warp will not read tile j again. Its mmas on the tile must have been waited for. `after`, a vector: the release
        waits until it is computed, which also keeps the compiler from moving its computation behind a later wait. fenced: as
        in `publish`."""
        _slot(self, j).release(current_warp(), j, fenced)


def check_unsliced(name, tile):
    """ValueError if this tile is a part of another; TypeError if it does not lie in shared memory."""
    if not hasattr(tile, "unsliced"):
        raise TypeError(f"{name}: must be of a tile in shared memory, st or sv, got {tile}")
    if tile.parent_rows != tile.rows:
        raise ValueError(f"{name}: {tile} is a part; lay out the whole, and take subtile(...) of it in the kernel")


# ---- meanings ------------------------------------------------------------------------------------------------------
def _slot(ring, j):
    block = current_warp().block
    if j < 0:
        raise current_warp().hazard(f"ring {ring.name!r} has no tile {j}")
    if block.shared_members is None or ring.name not in block.shared_members:
        raise current_warp().hazard(f"{ring} is used, and the kernel has not opened it: `q, k = smem.open()`", "storage")
    return block.shared_members[ring.name][j % ring.stages]


def _part_of_rank(ring, source, at, rank, parts):
    """Where block `rank` of a cluster finds its part of the tile at `at`, counted in parts."""
    at, one_tile = tuple(at) + (0,) * (source.rank - len(at)), ring.blocks == 1 or parts > 1
    return at if one_tile else tuple(i * ring.blocks + rank if k == source.rows else i for k, i in enumerate(at))


def tile_of(block, ring, j):
    """The j-th tile, whatever its state."""
    slot = block.shared_members[ring.name][j % ring.stages]
    return SharedTile(ring.tile, ring.slot(j), f"tile {j} of ring {ring.name!r}", slot, j)


# ---- lowerings -----------------------------------------------------------------------------------------------------
def _modulo(b, ring, j):
    """(slot, parity) of tile j."""
    j, n = b.u32(j), b.u32(ring.stages)
    return b.urem(j, n), b.and_(b.udiv(j, n), b.u32(1))


def _address(b, ring, base, slot):
    return b.add(b.add(base, b.mul(slot, b.u32(ring.tile.stage_bytes))), b.u32(ring.start))


def full_barrier(b, ring, base, slot):
    """Address of the barrier whose phases say that the slot was filled."""
    return b.add(b.add(base, b.mul(slot, b.u32(2 * BARRIER_BYTES))), b.u32(ring.barriers))


def empty_barrier(b, ring, base, slot):
    """Address of the barrier whose phases say that the slot was released."""
    return b.add(full_barrier(b, ring, base, slot), b.u32(BARRIER_BYTES))


def elected(b, group):
    """Is this the first thread of its group of `group` threads, a power of 2?"""
    return b.icmp_unsigned("==", b.and_(b.special("tid.x"), b.u32(group - 1)), b.u32(0))


def check_tensor(name, spec):
    """TypeError if this is not the type of a `tensor`."""
    if isinstance(spec, types.Array):
        raise TypeError(
            f"{name}: TMA must be told how the array is cut: pass tiles.tensor(array, tile) to the launch, got {spec}"
        )
    if not isinstance(spec, gl):
        raise TypeError(f"{name}: takes a tiles.tensor, got {spec}")


def needs_index(name, j):
    """TypeError if this is not the type of a tile's number."""
    if not integer(j):
        raise TypeError(f"{name}: the tile's number j must be an integer, got {j}")


def _needs_writers(name, ring):
    if not ring.writers:
        raise TypeError(f"{name}: TMA writes this ring, fill(...) it: {ring}")


def _check_parts(ring, part, parts, across):
    """TypeError if the ring's tiles are not filled in so many parts of rows or, `across`, of columns."""
    if not integer(part):
        raise TypeError(f"fill: the part's number must be an integer, got {part}")
    extent, unit = (ring.tile.cols, ring.tile.panel_cols) if across else (ring.tile.rows, 8)
    split = ring.blocks > 1 and parts != ring.blocks  # of a tile that blocks share each brings one
    if parts < 1 or (parts > 1 and (split or isinstance(ring.tile, sv) or extent % (unit * parts))):
        multiple = f"{unit} columns, which a panel has" if across else "8 rows"
        raise TypeError(f"fill: {parts} parts: a tile of one block is filled in parts of a multiple of {multiple}, got {ring}")


def _begin(b, ring, base, slot, parity, full):
    """Wait until the readers of a slot have released it, and say what is to come."""
    ptx.mbarrier_wait(b, empty_barrier(b, ring, base, slot), b.xor(parity, b.u32(1)))
    ptx.mbarrier_expect(b, full, ring.tile.nbytes)


@lowers(ring.fill)
def _(ring, j, source, at, part, parts: int):
    needs_index("fill", j)
    if ring.writers:
        raise TypeError(f"fill: warps write this ring, claim(...) and publish(...) a tile: {ring}")
    check_tensor("fill", source)
    across = ring.across(parts, source.tile)
    _check_parts(ring, part, parts, across)
    box = ring.box(parts, across)
    if source.tile != box or (ring.blocks > 1 and source.unit != box.rows):
        by_parts = f" in parts of {box}" * (box != ring.tile)
        cure = f"; pass tiles.tensor(array, {box}) to the launch"
        raise TypeError(f"fill: the ring holds {ring.tile}{by_parts}, the source gives {source.tile}{cure}")
    if not isinstance(at, types.BaseTuple) or not 1 <= len(at) <= source.rank:
        raise TypeError(f"fill: `at` must be a tuple of up to {source.rank} integers, got {at}")

    def first(b, part):
        return contextlib.nullcontext() if parts == 1 else b.if_then(b.icmp_unsigned("==", b.u32(part), b.u32(0)))

    def emit(b, base, j, source_map, at, part, _):
        # a whole warp waits: what it computes is the same in all lanes, so in uniform registers, from which TMA takes it
        warp = b.and_(ptx.uniform(b, b.warp(), effect=False), b.u32(WARPGROUP - 1))
        with b.if_then(b.icmp_unsigned("==", warp, b.u32(0))):
            slot, parity = _modulo(b, ring, j)
            full, to = full_barrier(b, ring, base, slot), _address(b, ring, base, slot)
            coordinates, condition = b.unpack(at), contextlib.nullcontext()
            if parts > 1:
                to = b.add(to, b.mul(b.u32(part), b.u32(ring.offset(parts, across))))
            elif ring.blocks > 1:
                rank = b.special("cluster_ctarank")
                to = b.add(to, b.mul(rank, b.u32(ring.part.rows * ring.tile.width)))
                coordinates += [b.u32(0)] * (source.rank - len(coordinates))
                coordinates[source.rows] = b.add(b.mul(b.u32(coordinates[source.rows]), b.u32(ring.blocks)), rank)
            with first(b, part):
                ptx.mbarrier_wait(b, empty_barrier(b, ring, base, slot), b.xor(parity, b.u32(1)))
            with b.if_then(ptx.elect(b)):
                with first(b, part):
                    ptx.mbarrier_expect(b, full, ring.tile.nbytes)
                if ring.blocks > 1 and parts > 1:
                    condition = b.if_then(b.icmp_unsigned("==", b.special("cluster_ctarank"), b.u32(part)))
                with condition:
                    ptx.tma_load(b, source, to, source_map, coordinates, full, ring.tile, ring.blocks, ring.once)

    return void, emit


@lowers(ring.fill_pages)
def _(ring, j, pool, pages, size, at, last, parts: int, begin):
    needs_index("fill_pages", j)
    check_tensor("fill_pages", pool)
    _check_parts(ring, types.int32, parts, False)
    box, numbers = ring.box(parts), (types.int32, types.int64)
    if ring.writers or ring.blocks > 1 or parts > LANES:
        raise TypeError(f"fill_pages: fills tiles of one block by TMA, in up to {LANES} parts, got {ring} and {parts}")
    if pool.tile != box or pool.rows != 1 or pool.unit != 1:
        raise TypeError(f"fill_pages: takes a tensor (page, row, ...) of {box}, whose rows are counted by one, got {pool}")
    if not (isinstance(pages, types.Array) and pages.ndim == 2 and pages.dtype in numbers):
        raise TypeError(f"fill_pages: takes int32 or int64 numbers (sequence, which of its pages), got {pages}")
    if not (isinstance(at, types.BaseTuple) and 2 <= len(at) <= pool.rank and all(map(integer, (size, last, *at)))):
        raise TypeError(f"fill_pages: size and last must be integers, and `at` a tuple of them, got {size}, {last} and {at}")

    if not (begin is None or integer(begin)):
        raise TypeError(f"fill_pages: begin must be an integer or None, got {begin}")

    def emit(b, base, j, pool_map, table, size, at, last, _, first):
        in_group, lane = b.and_(b.special("tid.x"), b.u32(WARPGROUP * LANES - 1)), b.lane()
        with b.if_then(b.icmp_unsigned("<", in_group, b.u32(LANES))):  # a lane a part looks up where it lies, before the wait
            sequence, row, *rest = [b.trunc(x, i32) if x.type.width > 32 else x for x in b.unpack(at)]
            row = b.add(row, b.mul(lane, b.u32(box.rows)))
            inside = b.icmp_signed("<", lane, b.u32(parts))
            exists = b.and_(b.icmp_signed("<", row, b.u32(last)), inside)
            if begin is not None:
                exists = b.and_(exists, b.icmp_signed(">", b.add(row, b.u32(box.rows)), b.u32(first)))
            nth = b.udiv(row, b.u32(size))
            page = ptx.page_number(b, pages, table, sequence, nth, exists)
            row = b.select(exists, b.sub(row, b.mul(nth, b.u32(size))), b.u32(size))
            slot, parity = _modulo(b, ring, j)
            full, to = full_barrier(b, ring, base, slot), _address(b, ring, base, slot)
            with b.if_then(b.icmp_unsigned("==", lane, b.u32(0))):
                _begin(b, ring, base, slot, parity, full)
            for part in range(parts):
                where = [ptx.shuffle(b, x, b.u32(part)) for x in (page, row)]
                with b.if_then(b.icmp_unsigned("==", lane, b.u32(0))):
                    part_address = b.add(to, b.u32(part * ring.offset(parts, False)))
                    ptx.tma_load(b, pool, part_address, pool_map, [*where, *rest], full, ring.tile, once=ring.once)

    return void, emit


@lowers(ring.claim)
def _(ring, j):
    needs_index("claim", j)
    _needs_writers("claim", ring)

    def emit(b, base, j):
        slot, parity = _modulo(b, ring, j)
        slot = ptx.uniform(b, slot)
        ptx.mbarrier_wait(b, empty_barrier(b, ring, base, slot), b.xor(parity, b.u32(1)))
        return _address(b, ring, base, slot)

    return ring.tile, emit


@lowers(ring.publish)
def _(ring, j, fenced: int):
    needs_index("publish", j)
    _needs_writers("publish", ring)

    def emit(b, base, j, _):
        bare = not fenced or isinstance(ring.tile, sv)  # a fence would wait for loads under way, too
        (ptx.warp_sync if bare else ptx.reads_done)(b)
        with b.if_then(elected(b, LANES)):
            ptx.mbarrier_arrive(b, full_barrier(b, ring, base, _modulo(b, ring, j)[0]))

    return void, emit


@lowers(ring.wait)
def _(ring, j):
    needs_index("wait", j)

    def emit(b, base, j):
        slot, parity = _modulo(b, ring, j)
        slot = ptx.uniform(b, slot)  # so that descriptors stay in uniform registers, and wgmma needs no moves before it
        ptx.mbarrier_wait(b, full_barrier(b, ring, base, slot), parity)
        return _address(b, ring, base, slot)

    return ring.tile, emit


@lowers(ring.release)
def _(ring, j, after, fenced: int):
    needs_index("release", j)
    if not (after is None or isinstance(after, rv)):
        raise TypeError(f"release: `after` must be a vector, got {after}")

    def emit(b, base, j, vector, _):
        if ring.fenced and fenced:
            ptx.reads_done(b)
        elif isinstance(ring.tile, sv):
            ptx.warp_sync(b)
        condition = elected(b, LANES) if ring.blocks == 1 else b.icmp_unsigned("<", b.lane(), b.u32(ring.blocks))
        if after is not None:
            condition = b.and_(condition, ptx.wait_for_registers(b, b.unpack(vector)))
        with b.if_then(condition):
            empty = empty_barrier(b, ring, base, _modulo(b, ring, j)[0])
            if ring.blocks == 1:
                ptx.mbarrier_arrive(b, empty)
            else:  # a lane for each block
                ptx.mbarrier_arrive_remote(b, ptx.map_shared(b, empty, b.lane()))

    return void, emit
