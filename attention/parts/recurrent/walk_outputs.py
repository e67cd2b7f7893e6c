"""How results leave the consumers of linear attention's walk in reverse (linear_gradients_hopper.py). A consumer that
stores to memory waits for it at its next fence, which tiles of products need. So what is rounded, and sums, are left in shared
memory, and warps of the producer store them."""

from numpy import int32

from ops import cluster, columns, row_sum, store, store_wait, subtile, tile_sum, tma_store, truncate, warpgroup, zeros
from tiles import dtype, fp32, inlined, rt, st, static
from tiles.launching.arguments import array, tiled

from .gates import load_tokens
from .pair_exchange import BLOCKS, PairExchange
from .tokens import CHUNK, COLUMNS, SequenceLayout

CONSUMERS, DQ_CONSUMER = 2, 0  # the first computes dQ, the second dK, and each 64 columns of dV
PANEL = 64  # channels that are multiplied at once


@static
class WalkOutputs:
    """dQ and dK, which are float32 if `unrounded`, dV, which is if `unrounded_values`, and with `with_gates` sums for the
    gates' gradients (gradients.py). Tiles of what is rounded go through a ring that has a slot for each consumer, dV first.
    key_dim, dtype: of keys."""

    seq_layout: SequenceLayout
    key_dim: int
    dtype: dtype
    unrounded: bool
    unrounded_values: bool
    with_gates: bool

    @property
    def tile(self):
        """The ring's tile: what a block stores of dQ or dK of a chunk."""
        return st(CHUNK, self.key_dim, self.dtype)

    def members(self):
        """What outputs have in the shared storage besides the rings, by name."""
        return {}

    @inlined
    def meet(self):
        """All threads wait for those that write to each other's shared memory, at the kernel's begin and end."""

    @inlined
    def operand(self, tile):
        """A shared tile as the right operand of a product along its rows."""
        return tile

    @property
    def tiles(self):
        """How many tiles each consumer sends of a chunk."""
        return (not self.unrounded) + (not self.unrounded_values)

    @property
    def input_gradients(self):
        """The type of a kernel's arguments dQ and dK."""
        return array(4) if self.unrounded else tiled(self.tile, unit=1)

    @property
    def value_gradients(self):
        """The type of a kernel's argument dV, of a consumer's columns."""
        return array(4) if self.unrounded_values else tiled(st(CHUNK, COLUMNS, self.dtype), unit=1)

    @property
    def fenced(self):
        """Must loads fence themselves? The fences before both results leave would do it for them."""
        return self.tiles < 2

    @inlined
    def turn(self, consumer, j, number):
        """The index of the number-th tile of the j-th chunk."""
        return int32(CONSUMERS * (self.tiles * j + number) + consumer)

    @inlined
    def put_values(self, gDV, ring, consumer, j, dv, place):
        """A consumer passes on its columns of the j-th chunk's dV. place: the chunk's ChunkPlace."""
        if self.unrounded_values:
            self.store_rows(gDV, dv, place.seq, place.token, place.head, consumer)
        else:
            turn = self.turn(consumer, j, 0)
            warpgroup.store(subtile(ring.claim(turn), CHUNK, 0, COLUMNS, 0), dv)
            ring.publish(turn)  # its fence is that of loads, too

    @inlined
    def put_inputs(self, gDQ, gDK, ring, consumer, j, dx, place, memory):
        """A consumer passes on dQ or dK of the j-th chunk, dx. place: the chunk's ChunkPlace. memory: the opened
        shared storage."""
        if self.unrounded:
            self.store_inputs(gDQ, gDK, consumer, dx, place.seq, place.token, place.head)
        else:
            stored = self.share_inputs(memory, consumer, j, dx)
            turn = self.turn(consumer, j, self.tiles - 1)
            warpgroup.store(ring.claim(turn), stored)
            ring.publish(turn)

    @inlined
    def share_inputs(self, memory, consumer, j, dx):
        """What this block stores of dx."""
        return dx

    @inlined
    def store_inputs(self, gDQ, gDK, consumer, dx, seq, token, head):
        """Store dQ or dK of a chunk, dx, from registers."""
        if consumer == DQ_CONSUMER:
            self.store_rows(gDQ, dx, seq, token, head, 0)
        else:
            self.store_rows(gDK, dx, seq, token, head, 0)

    @inlined
    def store_rows(self, gOut, x, seq, token, head, block):
        """Store the block-th columns of a result from registers: only the rows that belong to the sequence."""
        at = seq.batch, token, head, int32(x.cols * block)
        warpgroup.store(truncate(gOut, 1, seq.end), x, at, 1, 3, aligned=True)

    @inlined
    def send(self, gradients, tails, ring, consumer, j, n, place, memory):
        """A warp of the producer stores what a consumer has passed on of the j-th chunk. gradients: dQ, dK and dV. tails:
        theirs, of packed sequences (packed_tails.py). n: how many chunks there are. place: the chunk's ChunkPlace. memory: as
        in put_inputs."""
        (_, _, gDV), (_, _, gTailDV) = gradients, tails
        if not self.unrounded_values:
            turn = self.turn(consumer, j, 0)
            tile = subtile(ring.wait(turn), CHUNK, 0, COLUMNS, 0)
            self.seq_layout.store_chunk(gDV, gTailDV, place, tile, consumer)
            store_wait()
            ring.release(turn)
        if not self.unrounded:
            self.send_inputs(gradients, tails, ring, consumer, j, n, place, memory)

    @inlined
    def send_inputs(self, gradients, tails, ring, consumer, j, n, place, memory):
        """A warp of the producer stores dQ or dK. The arguments are those of send."""
        (gDQ, gDK, _), (gTailDQ, gTailDK, _), turn = gradients, tails, self.turn(consumer, j, self.tiles - 1)
        if consumer == DQ_CONSUMER:
            self.seq_layout.send_chunk(ring, turn, gDQ, gTailDQ, place)
        else:
            self.seq_layout.send_chunk(ring, turn, gDK, gTailDK, place)

    @inlined
    def zero_padding(self, gradients, gCuSeqlens, walk, length, consumer):
        """A consumer stores 0 to its part of float32 gradients of the padding. Those that have tails get it with these."""
        gDQ, gDK, gDV = gradients
        if self.seq_layout.varlen and (self.unrounded or self.unrounded_values):
            padding = self.seq_layout.padding_tokens(gCuSeqlens, walk.sequence, length)
            for j in range(padding.num_chunks()):
                token = padding.chunk_start(j)
                if self.unrounded:
                    self.store_inputs(gDQ, gDK, consumer, zeros(rt(16, self.key_dim, fp32)), padding, token, walk.head)
                if self.unrounded_values:
                    self.store_rows(gDV, zeros(rt(16, COLUMNS, fp32)), padding, token, walk.head, consumer)

    @inlined
    def multiply_panel(self, x, tile, n):
        """The products of 64 channels of x and of a shared tile."""
        panel = subtile(tile, CHUNK, 0, PANEL, n)
        return columns(x, PANEL, n) * fp32(warpgroup.load(panel, rt(16, PANEL, self.dtype), fenced=self.fenced))

    @inlined
    def dot(self, x, tile):
        """rowsum(x * tile), if gates have gradients. Panels are added up first: with all columns registers would spill."""
        if not self.with_gates:
            return 0.0
        elif self.key_dim > PANEL:
            return row_sum(self.multiply_panel(x, tile, 0) + self.multiply_panel(x, tile, 1))
        else:
            return row_sum(self.multiply_panel(x, tile, 0))

    @inlined
    def put_dots(self, ring, consumer, j, dx, x, later_dots):
        """A consumer passes on x . dx of each token of the j-th chunk, and numbers whose sum is wanted."""
        if self.with_gates:
            dots = ring.claim(int32(CONSUMERS * j + consumer))
            warpgroup.store(subtile(dots, CHUNK, 0), self.dot(dx, x))
            warpgroup.store(subtile(dots, CHUNK, 1), later_dots)
            ring.publish(int32(CONSUMERS * j + consumer))

    @inlined
    def send_dots(self, gQueryDots, gKeyDots, gCarriedDots, ring, j, place):
        """A warp of the producer stores the dots that both consumers have passed on of the j-th chunk. place: its
        ChunkPlace."""
        if self.with_gates:
            seq, turn = place.seq, int32(CONSUMERS * j)
            at = seq.batch, place.token, place.head
            of_q, of_k = ring.wait(turn), ring.wait(turn + 1)
            store(truncate(gQueryDots, 1, seq.end), load_tokens(of_q, 0), at, cols=1)
            store(truncate(gKeyDots, 1, seq.end), load_tokens(of_k, 0), at, cols=1)
            gCarriedDots[place.chunk, place.head, 0] = tile_sum(load_tokens(of_q, 1) + load_tokens(of_k, 1))
            ring.release(turn)
            ring.release(turn + 1)


class PairedOutputs(WalkOutputs):
    """How results leave a block whose cluster has both value heads of a key head: its blocks add up dQ and dK, rounded, and
    each stores half of the channels (pair_exchange.py)."""

    @property
    def exchange(self):
        """How the blocks add them up."""
        return PairExchange(self.key_dim // BLOCKS, self.dtype)

    @property
    def tile(self):
        return self.exchange.tile

    def members(self):
        return self.exchange.members()

    @inlined
    def meet(self):
        cluster.sync()

    @inlined
    def operand(self, tile):
        return cluster.unmap(tile)

    @inlined
    def share_inputs(self, memory, consumer, j, dx):
        self.exchange.send(memory, consumer, j, self.exchange.own_half(dx, False))
        return self.exchange.own_half(dx, True)

    @inlined
    def send_inputs(self, gradients, tails, ring, consumer, j, n, place, memory):
        (gDQ, gDK, _), turn, pair = gradients, self.turn(consumer, j, self.tiles - 1), int32(place.head // BLOCKS)
        tile, at = ring.wait(turn), (place.seq.batch, place.token, pair, cluster.rank())
        self.exchange.add(memory, consumer, j, tile, j + 1 == n)
        if consumer == DQ_CONSUMER:
            tma_store(gDQ, at, tile)
        else:
            tma_store(gDK, at, tile)
        store_wait()
        ring.release(turn)
