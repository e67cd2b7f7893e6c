"""How keys and values come to the rings of Hopper's decoding kernel: by TMA or by cp.async, two objects with the same
methods."""

from typing import Any

from numpy import int32

from ops import commit_group, copy_pages, look_up, subtile, wait_group, warpgroup
from tiles import inlined, static
from tiles.arguments import array
from tiles.layout import WARPGROUP
from tiles.types import st

from ..key_sources import PAGE_TABLE, OneBuffer
from ..sequences import Sequence


@static
class TmaFeed:
    """TMA brings keys and values, from where they are `held`. kv: keys of a tile."""

    kv: int
    held: OneBuffer
    writers = 0  # warps that store tiles

    def __str__(self):
        return f"tma{self.held}"

    @property
    def params(self) -> dict[str, Any]:
        """{kernel's argument: its type} of what this needs in the kernel."""
        return self.held.params

    def source(self, tile: st) -> Any:
        """How a kernel declares the array that tiles of this type are loaded from."""
        return self.held.source(tile)

    @inlined
    def bring(self, k, v, j, n, gK, gV, sequence, first, head, end, params):
        """Bring `n` tiles of keys and of values to both rings, from the rings' tile j on: the sequence's rows from `first` on.
        Rows beyond `end` may hold anything. The producer's warps call it."""
        seq = Sequence(sequence, int32(0), int32(0), int32(0), end)
        for i in range(n):
            key = int32(first + self.kv * i)
            self.held.fill(k, int32(j + i), gK, seq, sequence, key, head, params)
            self.held.fill(v, int32(j + i), gV, seq, sequence, key, head, params)

    @inlined
    def end(self, k, v, j):
        """Called after the last tile. j: how many tiles there were."""


@static
class GatherFeed:
    """cp.async brings keys and values, from pages of any size whose numbers are params.pages[n]. Each of the producer's warps
    brings a quarter of a tile's rows, of types `key` and `value`. A tile is published when the next `late` ones are on their
    way. vector_bytes: the number of bytes of which addresses are multiples."""

    key: st
    value: st
    late: int
    vector_bytes: int
    writers = WARPGROUP

    def __str__(self):
        return "gathered" + f" by {self.vector_bytes} bytes" * (self.vector_bytes != 16)

    @property
    def params(self) -> dict[str, Any]:
        """See ByTma."""
        return {"pages": PAGE_TABLE}

    def source(self, tile: st) -> Any:
        """See ByTma."""
        return array(4, tile.dtype)

    @inlined
    def bring(self, k, v, j, n, gK, gV, sequence, first, head, end, params):
        """See ByTma. Rows beyond `end` become 0."""
        rows, rank = self.key.rows, warpgroup.rank()
        key = int32(first + rows * rank)
        keys, values = self.look(gK, sequence, key, end, params)
        for i in range(int32(j), int32(j + n)):
            copy_pages(subtile(k.claim(i), rows, rank), gK, keys, (key, head, 0), end, self.vector_bytes)
            copy_pages(subtile(v.claim(i), rows, rank), gV, values, (key, head, 0), end, self.vector_bytes)
            commit_group()
            key = int32(key + WARPGROUP * rows)
            keys, values = self.look(gK, sequence, key, end, params)
            if i >= self.late:
                wait_group(self.late)
                self.publish(k, v, int32(i - self.late))

    @inlined
    def look(self, gK, sequence, key, end, params):
        """Look up where a warp's rows of keys and of values lie, from `key` on. Tiles with panels of the same width share the
        result."""
        keys = look_up(self.key, params.pages, gK.shape[1], (sequence, key), end)
        if self.key.width == self.value.width:
            return keys, keys
        else:
            return keys, look_up(self.value, params.pages, gK.shape[1], (sequence, key), end)

    @inlined
    def publish(self, k, v, j):
        """Publish tile j of both rings."""
        k.publish(j)
        v.publish(j, fenced=True)

    @inlined
    def end(self, k, v, j):
        """See ByTma."""
        wait_group(0)
        for i in range(int32(max(0, j - self.late)), int32(j)):
            self.publish(k, v, i)
