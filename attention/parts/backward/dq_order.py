"""The order in which thread blocks add their parts of dQ to the sums in global memory. A thread block has a block of keys, so
several add to the dQ of one query tile. One class for each order, all with the methods of UnorderedAdds."""

from typing import Any

from numpy import int32

from ops import count_stored, count_up, stores_done, tma_add, tma_store, wait_count
from tiles import inlined, static
from tiles.launching.arguments import SEMAPHORES

from ..part import KernelPart

SMS_PER_HEAD = 6  # multiprocessors that work on one head at a time, if later queries see more keys: see choose_raster_group
SNAKE_GROUP = 3  # the same for SnakeAdds, and the number of key blocks in one of its groups


@static
class UnorderedAdds(KernelPart):
    """Thread blocks add whenever their parts are ready, so the last bits of dQ differ from call to call."""

    sms_per_head = SMS_PER_HEAD

    @property
    def needs_zeros(self) -> bool:
        """Must the sums be 0 before the first thread block adds to them?"""
        return True

    @inlined
    def locate_block(self, tiling, number, blocks, batch_heads, raster_group):
        """The (key block, batch and partial) of thread block `number`: see QueryTiling.locate_block."""
        return tiling.locate_block(number, blocks, batch_heads, raster_group)

    @inlined
    def visit_index(self, n, i):
        """Which of the n query tiles that see a key block is the i-th that its thread block works on."""
        return i

    @inlined
    def first_visited(self, q_tiles):
        """The query tile that a thread block works on first, if the tiles are contiguous."""
        return int32(q_tiles.first)

    @inlined
    def next_tile(self, q_tiles, head, tile):
        """(head, tile) to work on after this one. The first tile of the next head follows the last tile of a head. (Counters
        replace a division, which would take the producer's time, and a nested loop, which would take its registers.)"""
        tile = int32(tile + 1)
        if tile == q_tiles.first + q_tiles.n:
            head, tile = int32(head + 1), int32(q_tiles.first)
        return head, tile

    @inlined
    def prior_adds(self, tiling, block, tile, ctx, group):
        """The number of key blocks that add to a query tile before this one does."""
        return tiling.blocks_before(block, tile, ctx, group)

    @inlined
    def init_semaphores(self, params, batch_head, tile):
        """Set the semaphores of a query tile to 0, before any thread block adds to it. One warp calls this."""

    @inlined
    def wait(self, params, batch_head, tile, semaphore, prior):
        """Wait until `prior` key blocks have added to a query tile, so that this warp may add its parts."""

    @inlined
    def add(self, dq_accum, index, part, prior):
        """dq_accum[index] += part, a part of dQ in shared memory, by TMA. One warp calls this."""
        tma_add(dq_accum, index, part)

    @inlined
    def arrive(self, params, batch_head, tile, semaphore, prior):
        """Signal that this warp has added its parts to a query tile."""


@static
class OrderedAdds(UnorderedAdds):
    """The base of orders in which thread blocks wait for one another. A semaphore of each query tile counts the warps that have
    added to it, and a thread block waits until it has a certain value.

    warps: how many warps of a thread block add to a tile. by_tma: do they add by TMA? semaphores: of each tile; each orders
    some of the tile's parts, independently of the others. stores_first: the first thread block stores its parts instead of
    adding them, so that nobody has to clear the sums; for tiles that all see some key.

    params.dq_semaphores: (batch and head, `semaphores` for each tile).

    A warp counts when its bulk copies are complete, which means not only that their source has been read, but also that they
    have reached the L2, where the next ones are added. So the count after an addition need not be a release. But a *store* must
    also be ordered before the additions of other thread blocks. So its count is a release. The counts that follow are part of
    its release sequence, and whoever waits acquires one of them before its own copies begin (with a fence of TMA's proxy after
    the acquire: ops.wait_count)."""

    warps: int
    by_tma: bool
    semaphores: int = 1
    stores_first: bool = False

    @property
    def params(self) -> dict[str, Any]:
        return {"dq_semaphores": SEMAPHORES}

    @property
    def needs_zeros(self) -> bool:
        return not self.stores_first

    @inlined
    def init_semaphores(self, params, batch_head, tile):
        for semaphore in range(self.semaphores):
            params.dq_semaphores[batch_head, self.semaphores * tile + semaphore] = int32(0)

    @inlined
    def wait(self, params, batch_head, tile, semaphore, prior):
        wait_count(params.dq_semaphores, (batch_head, int32(self.semaphores * tile + semaphore)), int32(self.warps * prior))

    @inlined
    def add(self, dq_accum, index, part, prior):
        if self.stores_first:
            if prior == 0:
                tma_store(dq_accum, index, part)
            else:
                tma_add(dq_accum, index, part)
        else:
            tma_add(dq_accum, index, part)

    @inlined
    def arrive(self, params, batch_head, tile, semaphore, prior):
        index = batch_head, int32(self.semaphores * tile + semaphore)
        if self.by_tma:
            stores_done()
        if self.by_tma and not (self.stores_first and prior == 0):
            count_stored(params.dq_semaphores, index)
        else:
            count_up(params.dq_semaphores, index)


@static
class AscendingAdds(OrderedAdds):
    """Key blocks add one after the other, from the first keys to the last, so that dQ has the same bits in every call.

    A thread block waits only for those of earlier keys, which were launched before it: there is no deadlock, however few run
    at once. Each works on its query tiles from the last to the first, because the last query sees every key that any query
    sees. So thread blocks that begin at the same time wait once, each for the first tile of the one before it, and then follow
    at that distance. (If they went from the first query to the last, and later queries see more keys, each would wait until the
    one before it comes to where it begins itself.) Few thread blocks wait for one another if several heads are worked on at
    once: backward_launches.choose_raster_group. If lists say which tiles see a key block, it waits only for key blocks whose
    lists contain the tile: query_tile_lists.RankKeyBlocks."""

    def __str__(self):
        return " ordered" + " stores" * self.stores_first

    @inlined
    def visit_index(self, n, i):
        return int32(n - 1 - i)

    @inlined
    def first_visited(self, q_tiles):
        return int32(q_tiles.first + q_tiles.n - 1)

    @inlined
    def next_tile(self, q_tiles, head, tile):
        tile = int32(tile - 1)
        if tile < q_tiles.first:
            head, tile = int32(head + 1), int32(q_tiles.first + q_tiles.n - 1)
        return head, tile


@static
class SnakeAdds(AscendingAdds):
    """A fixed order for masks under which later queries see more keys, and every query sees the first: key blocks add in groups
    of SNAKE_GROUP, alternately from the group's last keys to its first and from its first to its last.

        key block       0  1  2 |  3  4  5 |  6  7 ..
        begins and adds as number
                        2  1  0 |  3  4  5 |  8  7 ..

    A group's thread blocks begin at the same time. All take their query tiles from the last to the first, so each must begin
    later than the one before it by the time that adding takes, and waits for that if they begin together. In ascending order
    each is shorter than the one before it, and all of a group end together: the next group would wait again. In descending
    order each is longer, and they end one after the other, by more than they began: so the next group's thread blocks begin as
    they must, and if each of them is shorter, also end one after the other. Only the first group waits.

    Thread blocks begin in the order in which they add, so each waits only for those that have begun before it, as in
    AscendingAdds: no deadlock. A key block's place in the order depends on its number alone: any number of heads has the same
    bits."""

    sms_per_head = SNAKE_GROUP

    def __str__(self):
        return " snake order" + " stores" * self.stores_first

    @inlined
    def locate_block(self, tiling, number, blocks, batch_heads, raster_group):
        block, batch_head = tiling.locate_block(number, blocks, batch_heads, raster_group)
        if block % (2 * SNAKE_GROUP) < SNAKE_GROUP:
            first = block - block % SNAKE_GROUP
            block = first + min(first + SNAKE_GROUP, blocks) - 1 - block
        return int32(block), batch_head

    @inlined
    def prior_adds(self, tiling, block, tile, ctx, group):
        """How many key blocks add to the query tile before this one. In a descending group these are the key blocks after it
        that the tile also sees."""
        if block % (2 * SNAKE_GROUP) < SNAKE_GROUP:
            first = block - block % SNAKE_GROUP
            return int32(first + min(first + SNAKE_GROUP, tiling.end_block(tile, ctx)) - 1 - block)
        else:
            return int32(block)


@static
class LastBlockStores(OrderedAdds):
    """Key blocks add whenever they are ready, but the one with the last keys that a query tile sees stores its parts first.

    If later queries see more keys, those are the first tiles that the last key blocks work on. Thread blocks begin from the
    last keys to the first, so each waits only for those that have begun before it, for the first thing that these do, and
    hardly ever long. The longest thread blocks come last, so this is for grids of few of them. The last bits of dQ differ from
    call to call."""

    def __str__(self):
        return " last block stores"

    @inlined
    def locate_block(self, tiling, number, blocks, batch_heads, raster_group):
        block, batch_head = tiling.locate_block(number, blocks, batch_heads, raster_group)
        return int32(blocks - 1 - block), batch_head

    @inlined
    def prior_adds(self, tiling, block, tile, ctx, group):
        """0 for the key block that stores, and 1 for all others, which wait for it alone."""
        return int32(block + 1 < tiling.end_block(tile, ctx))

    @inlined
    def arrive(self, params, batch_head, tile, semaphore, prior):
        """Signal what was stored; no thread block waits for what was added."""
        if prior == 0:
            stores_done()
            count_up(params.dq_semaphores, (batch_head, int32(self.semaphores * tile + semaphore)))


@static
class ReverseTiles(UnorderedAdds):
    """UnorderedAdds with each thread block's query tiles from the last to the first, as in AscendingAdds. For thread blocks
    that have all keys: the dK and dV of their keys are summed over queries in the same order as if many thread blocks had some
    of the keys each."""

    @inlined
    def visit_index(self, n, i):
        return int32(n - 1 - i)


UNORDERED, REVERSE_TILES = UnorderedAdds(), ReverseTiles()
