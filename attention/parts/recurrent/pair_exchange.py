"""How the two thread blocks of a cluster, which have a value head each of the same key head, add up its gradients dQ and dK
(linear_gradients_hopper.py). Each block stores half of the channels of both: it sends the other half, rounded, to its
peer, whose warps that store results add what came to their own half. Nothing of this is in the way of the consumers, which go
on to the next chunk: they wait only until the peer has read what they sent of the one before."""

from numba import cuda
from numpy import int32

from ops import cluster, columns, load, load_part_of_fragment, raw, store, subtile, warpgroup, zeros
from tiles import barrier, dtype, fp32, inlined, rt, st, static, sv

from .tokens import CHUNK

DQ_CONSUMER, CONSUMERS, WARPS = 0, 2, warpgroup.WARPGROUP
BLOCKS = 2  # of a cluster
CREDIT = rt(16, 16, fp32).row_vec  # what is sent to say that the inbox has been read


@static
class PairExchange:
    """The exchange of halves of `channels` channels, for each of two consumers. dtype: of what is sent."""

    channels: int
    dtype: dtype

    @property
    def tile(self):
        """The shared tile of a half, which TMA stores."""
        return st(CHUNK, self.channels, self.dtype)

    @property
    def rows(self):
        """A warp's part of it."""
        return rt(CHUNK // WARPS, self.channels, self.dtype)

    @property
    def credit_bytes(self):
        """How many bytes the peer sends to say that it has read the inbox."""
        return CREDIT.length * fp32.itemsize

    def members(self):
        """What a kernel has in its shared storage for it: room for the peer's halves and credits, and barriers for these."""
        names = "full_dq", "full_dk", "free_dq", "free_dk"
        inbox = st(CONSUMERS * CHUNK, self.channels, self.dtype)
        return {"inbox": inbox, "credit": sv(CONSUMERS * CREDIT.length, fp32)} | {name: barrier() for name in names}

    @inlined
    def own_half(self, x, is_own):
        """The half of a warp's rows of x that this block stores or, unless `is_own`, sends. It is rounded."""
        left, right = columns(self.dtype(x), self.channels, 0), columns(self.dtype(x), self.channels, 1)
        half = right
        if (cluster.rank() == 0) == is_own:
            half = left
        return half

    @inlined
    def send(self, memory, consumer, j, x):
        """A consumer sends its half of the j-th chunk to the peer."""
        if consumer == DQ_CONSUMER:
            self.send_half(memory, memory.full_dq, memory.free_dq, consumer, j, x)
        else:
            self.send_half(memory, memory.full_dk, memory.free_dk, consumer, j, x)

    @inlined
    def send_half(self, memory, full, free, consumer, j, x):
        """A consumer waits until the peer has read what it sent before, and sends this."""
        if j > 0:
            if warpgroup.rank() == 0:
                raw.expect(free, self.credit_bytes)
            cluster.receive(free, j)
        peer, part = 1 - cluster.rank(), int32(WARPS * consumer + warpgroup.rank())
        target = cluster.map(subtile(memory.inbox, self.rows.rows, part), peer)
        cluster.store_fragment_async(target, x, cluster.map(full, peer))

    @inlined
    def add(self, memory, consumer, j, tile, is_last):
        """A warp of the producer adds what the peer has sent of the j-th chunk to the shared tile of this block's half."""
        if consumer == DQ_CONSUMER:
            self.add_half(memory, memory.full_dq, memory.free_dq, consumer, j, tile, is_last)
        else:
            self.add_half(memory, memory.full_dk, memory.free_dk, consumer, j, tile, is_last)

    @inlined
    def add_half(self, memory, full, free, consumer, j, tile, is_last):
        """A warp waits for what the peer sends, adds it, and says that it has."""
        raw.expect(full, self.tile.nbytes)
        cluster.receive(full, j + 1)
        for part in range(WARPS):
            rows = subtile(tile, self.rows.rows, part)
            other = load_part_of_fragment(subtile(memory.inbox, self.rows.rows, int32(WARPS * consumer + part)), self.rows)
            store(rows, fp32(load(rows, self.rows, fenced=False)) + fp32(other))
        cuda.syncwarp()  # all lanes have read
        if not is_last:
            credit, peer = subtile(memory.credit, CREDIT.length, consumer), 1 - cluster.rank()
            cluster.store_async(cluster.map(credit, peer), zeros(CREDIT), cluster.map(free, peer))
