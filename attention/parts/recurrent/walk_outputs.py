"""How results leave the consumers of linear attention's walk in reverse (kernels/linear_gradients_hopper.py). A consumer that
stores to memory waits for it at its next fence, which tiles of products need. So what is rounded, and sums, are left in shared
memory, and warps of the producer store them."""

from numpy import int32

from ops import columns, row_sum, store, subtile, tile_sum, truncate, warpgroup
from tiles import dtype, fp32, inlined, rt, static

from .gates import load_tokens
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
    def tiles(self):
        """How many tiles each consumer sends of a chunk."""
        return (not self.unrounded) + (not self.unrounded_values)

    @property
    def fenced(self):
        """Must loads fence themselves? The fences before both results leave would do it for them."""
        return self.tiles < 2

    @inlined
    def turn(self, consumer, j, number):
        """The index of the number-th tile of the j-th chunk."""
        return int32(CONSUMERS * (self.tiles * j + number) + consumer)

    @inlined
    def put_values(self, gDV, ring, consumer, j, dv, seq, head):
        """Consumer: its columns of the j-th chunk's dV."""
        if self.unrounded_values:
            self.store_rows(gDV, dv, seq, seq.chunk_start(j), head, consumer)
        else:
            turn = self.turn(consumer, j, 0)
            warpgroup.store(subtile(ring.claim(turn), CHUNK, 0, COLUMNS, 0), dv)
            ring.publish(turn)  # its fence is that of loads, too

    @inlined
    def put_inputs(self, gDQ, gDK, ring, consumer, j, dx, seq, head):
        """Consumer: dQ or dK of the j-th chunk."""
        if self.unrounded:
            self.store_inputs(gDQ, gDK, consumer, dx, seq, seq.chunk_start(j), head)
        else:
            turn = self.turn(consumer, j, self.tiles - 1)
            warpgroup.store(ring.claim(turn), dx)
            ring.publish(turn)

    @inlined
    def store_inputs(self, gDQ, gDK, consumer, dx, seq, token, head):
        """Store dQ or dK from registers."""
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
    def send(self, gDQ, gDK, gDV, ring, consumer, j, seq, head):
        """A warp of the producer: store what a consumer put into the ring."""
        if not self.unrounded_values:
            turn = self.turn(consumer, j, 0)
            tile = subtile(ring.wait(turn), CHUNK, 0, COLUMNS, 0)
            self.seq_layout.send_rows(gDV, tile, seq, seq.chunk_start(j), head, consumer)
            ring.release(turn)
        if not self.unrounded:
            turn = self.turn(consumer, j, self.tiles - 1)
            tile = ring.wait(turn)
            if consumer == DQ_CONSUMER:
                self.seq_layout.send_rows(gDQ, tile, seq, seq.chunk_start(j), head, 0)
            else:
                self.seq_layout.send_rows(gDK, tile, seq, seq.chunk_start(j), head, 0)
            ring.release(turn)

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
        """Consumer: x . dx of each token of the j-th chunk, and numbers whose sum is wanted."""
        if self.with_gates:
            dots = ring.claim(int32(CONSUMERS * j + consumer))
            warpgroup.store(subtile(dots, CHUNK, 0), self.dot(dx, x))
            warpgroup.store(subtile(dots, CHUNK, 1), later_dots)
            ring.publish(int32(CONSUMERS * j + consumer))

    @inlined
    def send_dots(self, gQueryDots, gKeyDots, gCarriedDots, ring, j, seq, head, chunk):
        """A warp of the producer: store what both consumers put into the ring. chunk: the index of the j-th one."""
        if self.with_gates:
            at, turn = (seq.batch, seq.chunk_start(j), head), int32(CONSUMERS * j)
            of_q, of_k = ring.wait(turn), ring.wait(turn + 1)
            store(truncate(gQueryDots, 1, seq.end), load_tokens(of_q, 0), at, cols=1)
            store(truncate(gKeyDots, 1, seq.end), load_tokens(of_k, 0), at, cols=1)
            gCarriedDots[chunk, head, 0] = tile_sum(load_tokens(of_q, 1) + load_tokens(of_k, 1))
            ring.release(turn)
            ring.release(turn + 1)
