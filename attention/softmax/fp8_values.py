"""How V gets to the second product of fp8 attention, as objects with the same methods. fp8 instructions take only operands
whose rows run along the contracted axis, so tiles of V must be transposed, with keys in the order in which consumers hold P
(ops/matmul/zipped.py). Either the producer warpgroup transposes them tile by tile, or a kernel has transposed all of V
before."""

from typing import Any, NamedTuple

from numpy import int32

from ops import warpgroup
from tiles import fp8e4m3, gl, inlined, ring, st, static
from tiles.arguments import tiled


class Values(NamedTuple):
    """Two rings of tiles of V: as they are loaded, and transposed, as they are multiplied."""

    copied: Any
    turned: Any


@static
class ByProducer:
    """The producer transposes tiles in shared memory, one tile behind its copies. V is read once, but every block transposes
    the tiles that it reads."""

    before = False
    behind = 1  # tiles that the producer still has to transpose when all are copied

    def source(self, keys: int, columns: int) -> gl:
        """The type of the kernel's parameter for V, of which a tile has so many keys and columns."""
        return tiled(st(keys, columns, fp8e4m3), unit=1)

    def rings(self, keys: int, columns: int, stages: int, readers: int) -> dict[str, ring]:
        """The last items of the kernel's plan of shared memory: the rings of V."""
        copied, turned = st(keys, columns, fp8e4m3), st(columns, keys, fp8e4m3)
        return {
            "copied": ring(copied, stages, warpgroup.WARPGROUP),
            "turned": ring(turned, stages, readers, writers=warpgroup.WARPGROUP),
        }

    @inlined
    def opened(self, items):
        """(the ring of queries, the ring of keys, Values) from a plan's items."""
        q, k, copied, turned = items
        return q, k, Values(copied, turned)

    @inlined
    def fill(self, values, j, gV, seq, key, head):
        """Done by the producer: load tile j, whose first key in the sequence is `key`."""
        values.copied.fill(j, gV, (seq.batch, seq.offset_k + key, head))

    @inlined
    def turn(self, values, j, sequences, keys, kv_blocks):
        """Done by the producer: transpose tile j of the Blocks `every` for the consumers. keys: how many of the first tile's
        keys belong to the sequence."""
        tile = values.copied.wait(j)
        if j == 0:
            sequences.clear(tile, keys, 1)
        kv_blocks.clear(tile, j, 1)
        warpgroup.transpose_zipped(values.turned.claim(j), tile)
        values.turned.publish(j, fenced=True)
        values.copied.release(j)


class Before(ByProducer):
    """A kernel of its own (transpose_values.py) has transposed V before, to (batch, head, column, key), each element once. The
    producer only loads tiles, into one ring. Each sequence must have a batch."""

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
    def fill(self, values, j, gV, seq, key, head):
        """See ByProducer. Tiles begin at multiples of their number of keys."""
        values.turned.fill(j, gV, (seq.batch, head, 0, int32(key // values.turned.tile.cols)))

    @inlined
    def turn(self, values, j, sequences, keys, kv_blocks):
        """See ByProducer. Nothing is left to do."""
