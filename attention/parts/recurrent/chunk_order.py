"""The order in which a grid computes what depends on no state, of all chunks (kda_transform_hopper.py), and how the next grid,
which walks along the sequences with the states (kda_walk_hopper.py), follows it. Both kernels have one of these objects:

HeadMajor: a block, one warpgroup, has consecutive chunks of one head. The walk is launched when all chunks are there.

ChunkMajor: the walk runs beside the end of the grid before it (programmatic dependent launch). All heads' first chunks come
first. That grid has a block on each multiprocessor. The first ones, as many as the walk has blocks, end early, so that the walk
finds room; the others go on, ahead of it. The unit of work is an item, some consecutive chunks of a head. Workers, the blocks'
warpgroups, take turns at items, all of them for some rounds, then those of the late blocks only:

    worker          0    1    2    3    4    5      0, 1: of early blocks, for two rounds
    items           0    1    2    3    4    5
                    6    7    8    9   10   11
                             12   13   14   15      of n heads: item % n says whose chunks, item // n which of them
                             16   17   18   19

Each worker counts its items in memory. The walk knows whose item it needs next, and waits until that worker has counted so
far."""

from typing import Any, NamedTuple

from numpy import int32

from ops import block, count_up, divmod, grid, reset_count, stores_done, warpgroup
from tiles import fp32, inlined, ring, static, sv
from tiles.launching.arguments import ENDS, INT, record

from .tokens import CHUNK, TokenRange, block_coord

ITEMS_AHEAD = 4  # items of which the walk knows that they are there before it loads them: to ask takes half a chunk's time


class HeadChunk(NamedTuple):
    """A chunk of a head. chunk: its SequenceLayout.chunk_index. token: its first one. remaining: the tokens from there on that
    its range `seq` has. item, step: which of the worker's items it belongs to, and which of that item's chunks it is."""

    chunk: Any
    head: Any
    key_head: Any
    token: Any
    remaining: Any
    seq: Any
    item: Any
    step: Any


class SegmentChunks(NamedTuple):
    """The n chunks of a block in HeadMajor order. first_chunk: the first one's index. seq: their tokens."""

    n: Any
    first_chunk: Any
    head: Any
    key_head: Any
    seq: Any

    @inlined
    def end(self):
        """The end of the tokens that may be read."""
        return self.seq.end

    @inlined
    def locate(self, j):
        """The HeadChunk at the j-th place of the order, counted from 0."""
        token, remaining = self.seq.chunk_start(j), self.seq.remaining(j)
        return HeadChunk(int32(self.first_chunk + j), self.head, self.key_head, token, remaining, self.seq, int32(0), int32(0))

    @inlined
    def changes_head(self, at):
        """Has this chunk, which is not the first one, another head than the one before?"""
        return False

    @inlined
    def let_next_grid_begin(self):
        """The next grid may begin, if it runs beside this one."""

    @inlined
    def count_previous(self, at, warp):
        """If this is the first chunk of its item, count the item before. All that was stored for that one is on its way, and
        nothing yet of this chunk. warp: one of the worker's four."""

    @inlined
    def finish(self, warp):
        """Wait until the last stores are done, as far as that is needed, and count the last item."""
        warpgroup.store_wait()


class WorkerChunks(NamedTuple):
    """The n chunks of a worker in ChunkMajor order. heads: of values, `group` of which share a key head. length: of each
    sequence. args: ChunkMajor.params."""

    n: Any
    worker: Any
    heads: Any
    group: Any
    length: Any
    args: Any

    @inlined
    def end(self):
        """The end of the tokens that may be read."""
        return self.length

    @inlined
    def locate(self, j):
        """The HeadChunk at the j-th place of the worker's order. One that the head does not have is of zeros, and stored behind
        those of all sequences."""
        args = self.args
        item, step = divmod(j, args.item_chunks)
        index = int32(args.workers * item + self.worker)
        if item >= args.rounds:
            late = int32(args.workers - args.early_workers)
            index = int32(args.workers * args.rounds + late * (item - args.rounds) + self.worker - args.early_workers)
        head_item, head_sequence = divmod(index, args.head_sequences)
        sequence, head = divmod(head_sequence, self.heads)
        key_head, _ = divmod(head, self.group)
        head_chunk = int32(args.item_chunks * head_item + step)
        token, seq = int32(CHUNK * head_chunk), TokenRange(int32(0), int32(self.length), sequence)
        per_sequence = int32((self.length + CHUNK - 1) // CHUNK)
        chunk = int32(head_chunk + sequence * per_sequence)
        if token >= self.length:
            sequences, _ = divmod(args.head_sequences, self.heads)
            chunk = int32(sequences * per_sequence)
        remaining = int32(max(1, self.length - token))  # at least 1, as sums of gates look for their last row with a token
        return HeadChunk(chunk, head, key_head, token, remaining, seq, item, step)

    @inlined
    def changes_head(self, at):
        """Has this chunk, which is not the first one, another head than the one before?"""
        return at.step == 0

    @inlined
    def let_next_grid_begin(self):
        """The next grid may begin, once all blocks of this one have set their counts to 0."""
        if warpgroup.rank() == 0:
            reset_count(self.args.gCounts, (self.worker,))
        block.sync()
        grid.release()

    @inlined
    def count_previous(self, at, warp):
        """If this is the first chunk of its item, count the item before. All that was stored for that one is on its way, and
        nothing yet of this chunk. warp: one of the worker's four."""
        if at.step == 0 and at.item > 0:
            self.finish(warp)

    @inlined
    def finish(self, warp):
        """Wait until all that is on its way is stored, and count an item."""
        if warp == 0:
            stores_done()
            count_up(self.args.gCounts, (self.worker,))


@static
class HeadMajor:
    """The order in which a block, one warpgroup, has consecutive chunks of one head. The walk begins when all is done."""

    overlaps = False
    block_workers: int = 1  # warpgroups of a block, each with shared memory of its own

    def params(self):
        """The parameters of the kernel that computes the chunks, as a record. parts: the blocks of a head."""
        return record(parts=INT)

    def walk_params(self):
        """The parameters of the kernel that walks, as a record."""
        return record()

    def __str__(self):
        return ""

    @inlined
    def begin(self, block_index, seq_layout, gCuSeqlens, length, heads, group, args):
        """The chunks of this block. block_index: among those that have chunks. heads: of keys. args: `params`."""
        _, part, head, sequence = block_coord(block_index, 1, args.parts, heads * group)
        key_head, _ = divmod(head, group)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, part, args.parts)
        return SegmentChunks(seq.num_chunks(), seq_layout.chunk_index(seq.start, sequence, length), head, key_head, seq)

    def rings(self):
        """What the walk has in shared memory, by name: a ring by which one warp tells the loader which items are there."""
        return {}

    @inlined
    def watch_items(self, rings, args, head_sequence, n):
        """One warp waits for the items of a sequence's n chunks, as far ahead as the ring has room, and then for the end of the
        grid before. head_sequence: sequence * heads + head. args: `walk_params`."""

    @inlined
    def take_item(self, rings, args, j):
        """The loader's warp waits until the j-th chunk may be read, if it is the first of its item."""


@static
class ChunkMajor(HeadMajor):
    """The order of all heads' first chunks first, beside whose end the walk runs. Sequences are not packed."""

    overlaps = True
    block_workers: int = 2

    def params(self):
        """The parameters of the kernel that computes the chunks, as a record. gCounts: how many items each worker has counted.
        workers: how many there are. early_workers: how many of them end early, after `rounds` items each. head_sequences:
        sequences times heads. item_chunks: the chunks of an item, of which the last one of a head may lack some. items: how
        many there are."""
        return record(**self.walk_params().fields, items=INT)

    def walk_params(self):
        return record(gCounts=ENDS, workers=INT, early_workers=INT, rounds=INT, head_sequences=INT, item_chunks=INT)

    def __str__(self):
        return "chunk-major"

    @inlined
    def begin(self, block_index, seq_layout, gCuSeqlens, length, heads, group, args):
        worker, items = int32(self.block_workers * block_index + warpgroup.id()), args.rounds
        if worker >= args.early_workers:
            late = int32(args.workers - args.early_workers)
            left, _ = divmod(int32(args.items - args.workers * args.rounds + args.workers - 1 - worker), late)
            items = int32(args.rounds + left)
        return WorkerChunks(int32(items * args.item_chunks), worker, int32(heads * group), group, length, args)

    def rings(self):
        return {"ready": ring(sv(16, fp32), ITEMS_AHEAD, 1, writers=1)}

    @inlined
    def watch_items(self, rings, args, head_sequence, n):
        (ready,), (items, _) = rings, divmod(int32(n + args.item_chunks - 1), args.item_chunks)
        for index in range(items):
            self.wait_for_item(args, head_sequence, index)
            ready.claim(index)
            ready.publish(index, fenced=False)
        grid.wait()

    @inlined
    def wait_for_item(self, args, head_sequence, index):
        """Wait until the item with this index, of a sequence and head, may be read."""
        item, worker = divmod(int32(index * args.head_sequences + head_sequence), args.workers)
        if item >= args.rounds:
            late = int32(args.workers - args.early_workers)
            item, worker = divmod(int32((item - args.rounds) * args.workers + worker), late)
            item, worker = int32(item + args.rounds), int32(worker + args.early_workers)
        grid.wait_count(args.gCounts, (worker,), int32(item + 1))

    @inlined
    def take_item(self, rings, args, j):
        (ready,), (index, step) = rings, divmod(j, args.item_chunks)
        if step == 0:
            ready.wait(index)
            ready.release(index)
