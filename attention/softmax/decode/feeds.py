"""What brings a sequence's keys and values to the rings of Hopper's kernel, as objects with the same methods."""

from typing import Any

from numpy import int32

from ops import commit_group, copy_pages, look_up, subtile, wait_group, warpgroup
from tiles import inlined, static
from tiles.arguments import array
from tiles.layout import WARPGROUP
from tiles.types import st

from ..key_sources import TABLE, Along
from ..sequences import Sequence


@static
class ByTma:
    """TMA does, from where they are `held`. kv: keys of a tile."""

    kv: int
    held: Along
    writers = 0  # warps that store tiles

    def __str__(self):
        return f"tma{self.held}"

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return self.held.given

    def source(self, tile: st) -> Any:
        """What the kernel says of the array that such tiles come from."""
        return self.held.source(tile)

    @inlined
    def bring(self, k, v, j, n, gK, gV, sequence, first, head, end, given):
        """Bring `n` tiles of keys and of values, from tile j of both rings on: the sequence's rows from `first` on. What lies
        behind `end` may be anything. By the producer's warps."""
        own = Sequence(sequence, int32(0), int32(0), int32(0), end)
        for i in range(n):
            key = int32(first + self.kv * i)
            self.held.fill(k, int32(j + i), gK, own, sequence, key, head, given)
            self.held.fill(v, int32(j + i), gV, own, sequence, key, head, given)

    @inlined
    def end(self, k, v, j):
        """After the last one; j: how many there were."""


@static
class Gathered:
    """The producer's warps do, by cp.async, from pages of any size, whose numbers are given.pages[n]; each brings a quarter of
    a tile's rows: those are a `key` and a `value`. A tile is handed on when the `late` next ones are under way. piece: the
    bytes that addresses are multiples of."""

    key: st
    value: st
    late: int
    piece: int
    writers = WARPGROUP

    def __str__(self):
        return "gathered" + f" by {self.piece} bytes" * (self.piece != 16)

    @property
    def given(self) -> dict[str, Any]:
        """See ByTma."""
        return {"pages": TABLE}

    def source(self, tile: st) -> Any:
        """See ByTma."""
        return array(4, tile.dtype)

    @inlined
    def bring(self, k, v, j, n, gK, gV, sequence, first, head, end, given):
        """See ByTma. What lies behind `end` is 0."""
        rows, rank = self.key.rows, warpgroup.rank()
        key = int32(first + rows * rank)
        keys, values = self.look(gK, sequence, key, end, given)
        for i in range(int32(j), int32(j + n)):
            copy_pages(subtile(k.claim(i), rows, rank), gK, keys, (key, head, 0), end, self.piece)
            copy_pages(subtile(v.claim(i), rows, rank), gV, values, (key, head, 0), end, self.piece)
            commit_group()
            key = int32(key + WARPGROUP * rows)
            keys, values = self.look(gK, sequence, key, end, given)
            if i >= self.late:
                wait_group(self.late)
                self.publish(k, v, int32(i - self.late))

    @inlined
    def look(self, gK, sequence, key, end, given):
        """Where a warp's rows of keys and of values lie, from `key` on: tiles whose panels are as wide share that."""
        keys = look_up(self.key, given.pages, gK.shape[1], (sequence, key), end)
        if self.key.width == self.value.width:
            return keys, keys
        else:
            return keys, look_up(self.value, given.pages, gK.shape[1], (sequence, key), end)

    @inlined
    def publish(self, k, v, j):
        """Hand tile j of both rings on."""
        k.publish(j)
        v.publish(j, fenced=True)

    @inlined
    def end(self, k, v, j):
        """See ByTma."""
        wait_group(0)
        for i in range(int32(max(0, j - self.late)), int32(j)):
            self.publish(k, v, i)
