"""Where the second product of fp8 attention finds V, as objects with the same methods. fp8 instructions take only operands that
lie along the contracted axis: rows of a tile of V must become columns, in the order in which consumers have P
(ops/matmul/zipped.py). Either the producer warpgroup sees to that, tile by tile, or a kernel has done it with all of V."""

from typing import Any, NamedTuple

from numpy import int32

from ops import warpgroup
from tiles import fp8e4m3, gl, inlined, ring, st, static
from tiles.arguments import tiled


class Values(NamedTuple):
    """Rings of tiles of V, as they are copied and as they are multiplied."""

    copied: Any
    turned: Any


@static
class ByProducer:
    """By the producer, in shared memory, a tile behind the one that it copies: V is read once, but every block that reads a
    tile turns it."""

    before = False
    behind = 1  # tiles that the producer has still to do with when all are copied

    def source(self, keys: int, columns: int) -> gl:
        """The kernel's parameter: V, of which so many keys and columns make a tile."""
        return tiled(st(keys, columns, fp8e4m3), unit=1)

    def rings(self, keys: int, columns: int, stages: int, readers: int) -> dict[str, ring]:
        """What tiles take of shared memory: the last items of a plan."""
        copied, turned = st(keys, columns, fp8e4m3), st(columns, keys, fp8e4m3)
        return {
            "copied": ring(copied, stages, warpgroup.WARPGROUP),
            "turned": ring(turned, stages, readers, writers=warpgroup.WARPGROUP),
        }

    @inlined
    def opened(self, items):
        """The rings of queries and of keys, and Values, of a plan's items."""
        q, k, copied, turned = items
        return q, k, Values(copied, turned)

    @inlined
    def fill(self, values, j, gV, own, key, head):
        """The producer: copy tile j, whose first key of a Sequence is `key`."""
        values.copied.fill(j, gV, (own.batch, own.key + key, head))

    @inlined
    def turn(self, values, j, sequences, keys):
        """The producer: tile j for the consumers. keys: how many of the first tile's are the sequence's."""
        tile = values.copied.wait(j)
        if j == 0:
            sequences.clear(tile, keys, 1)
        warpgroup.transpose_zipped(values.turned.claim(j), tile)
        values.turned.publish(j, fenced=True)
        values.copied.release(j)


class Before(ByProducer):
    """By a kernel before (transpose_values.py), each number once: (batch, head, column, key). The producer only copies, and
    tiles take shared memory once. Of sequences that have a batch each."""

    before = True
    behind = 0

    def source(self, keys: int, columns: int) -> gl:
        return tiled(st(columns, keys, fp8e4m3), 4, 2, 3)

    def rings(self, keys: int, columns: int, stages: int, readers: int) -> dict[str, ring]:
        return {"turned": ring(st(columns, keys, fp8e4m3), stages, readers)}

    @inlined
    def opened(self, items):
        q, k, turned = items
        return q, k, Values(0, turned)

    @inlined
    def fill(self, values, j, gV, own, key, head):
        """See ByProducer. Tiles lie at multiples of their keys."""
        values.turned.fill(j, gV, (own.batch, head, 0, int32(key // values.turned.tile.cols)))

    @inlined
    def turn(self, values, j, sequences, keys):
        """See ByProducer: nothing is left to do."""
