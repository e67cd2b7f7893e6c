"""How the producer warpgroup of Hopper's decoding kernel loads tiles of K and V into their rings: by TMA or by cp.async, as
classes with the same methods."""

from typing import Any

from numpy import int32

from ops import commit_group, copy_pages, look_up, subtile, wait_group, warpgroup
from tiles import inlined, static
from tiles.launching.arguments import array
from tiles.layout import WARPGROUP
from tiles.types import st

from ..key_sources import PAGE_TABLE, OneBuffer
from ..sequences import Sequence


@static
class TmaFeed:
    """TMA loads keys and values from `kv_source`. kv: keys of a tile."""

    kv: int
    kv_source: OneBuffer
    writers = 0  # warps that store to the rings; TMA is none

    def __str__(self):
        return f"tma{self.kv_source}"

    @property
    def params(self) -> dict[str, Any]:
        """{parameter: its type} of the kernel's parameters that these methods read."""
        return self.kv_source.params

    def source(self, tile: st) -> Any:
        """The declaration of the kernel's array from which tiles of this type are loaded."""
        return self.kv_source.source(tile)

    @inlined
    def load_tiles(self, k, v, j, n, gK, gV, sequence, first, head, end, params):
        """Load `n` tiles of keys and of values, from the rings' tile j on: the sequence's rows from `first` on. Rows from `end`
        on may hold anything. All warps of the producer call it."""
        seq = Sequence(sequence, int32(0), int32(0), int32(0), end)
        for i in range(n):
            key = int32(first + self.kv * i)
            self.kv_source.fill(k, int32(j + i), gK, seq, sequence, key, head, params)
            self.kv_source.fill(v, int32(j + i), gV, seq, sequence, key, head, params)

    @inlined
    def finish(self, k, v, j):
        """Publish the tiles that are still being copied, after the last load_tiles. j: how many tiles there were."""


@static
class GatherFeed:
    """cp.async gathers keys and values from pages of any size, params.pages[n] of sequence n. Each of the producer's warps
    copies a quarter of a tile's rows, of types `key` and `value`. A tile is published after the copies of the next
    `tiles_in_flight` tiles have begun. vector_bytes: the bytes that addresses are multiples of."""

    key: st
    value: st
    tiles_in_flight: int
    vector_bytes: int
    writers = WARPGROUP

    def __str__(self):
        return "gathered" + f" by {self.vector_bytes} bytes" * (self.vector_bytes != 16)

    @property
    def params(self) -> dict[str, Any]:
        return {"pages": PAGE_TABLE}

    def source(self, tile: st) -> Any:
        return array(4, tile.dtype)

    @inlined
    def load_tiles(self, k, v, j, n, gK, gV, sequence, first, head, end, params):
        """Load `n` tiles of keys and of values, from the rings' tile j on: the sequence's rows from `first` on, zeros from
        `end` on."""
        rows, rank = self.key.rows, warpgroup.rank()
        key = int32(first + rows * rank)
        keys, values = self.look_up(gK, sequence, key, end, params)
        for i in range(int32(j), int32(j + n)):
            copy_pages(subtile(k.claim(i), rows, rank), gK, keys, (key, head, 0), end, self.vector_bytes)
            copy_pages(subtile(v.claim(i), rows, rank), gV, values, (key, head, 0), end, self.vector_bytes)
            commit_group()
            key = int32(key + WARPGROUP * rows)
            keys, values = self.look_up(gK, sequence, key, end, params)
            if i >= self.tiles_in_flight:
                wait_group(self.tiles_in_flight)
                self.publish(k, v, int32(i - self.tiles_in_flight))

    @inlined
    def look_up(self, gK, sequence, key, end, params):
        """Look up where a warp's rows of keys and of values are, from `key` on. Tiles with panels of the same width share the
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
        v.publish(j, fenced=False)

    @inlined
    def finish(self, k, v, j):
        wait_group(0)
        for i in range(int32(max(0, j - self.tiles_in_flight)), int32(j)):
            self.publish(k, v, i)
