"""How V is transposed for the second product of fp8 attention, as objects with the same methods. fp8 wgmma takes only K-major
operands, so tiles of V must be transposed, with keys in the order in which consumers hold P (ops/matmul/zipped.py). Either the
producer warpgroup transposes them tile by tile, or a kernel has transposed all of V before."""

from typing import Any, NamedTuple

from numpy import int32

from ops import warpgroup
from tiles import fp8e4m3, gl, inlined, ring, st, static
from tiles.launching.arguments import tiled


class ValueRings(NamedTuple):
    """Two rings of tiles of V: as TMA loads them, and transposed, as wgmma reads them."""

    loaded: Any
    transposed: Any


@static
class TransposeInProducer:
    """The producer transposes tiles in shared memory, one tile behind its loads. V is read once, but every CTA transposes the
    tiles that it loads."""

    before = False
    lag = 1  # how many tiles the transpositions are behind the loads

    def source(self, keys: int, columns: int) -> gl:
        """The type of the kernel's parameter for V, with tiles of so many keys and columns."""
        return tiled(st(keys, columns, fp8e4m3), unit=1)

    def rings(self, keys: int, columns: int, stages: int, readers: int) -> dict[str, ring]:
        """The rings of V, for the shared storage."""
        loaded, transposed = st(keys, columns, fp8e4m3), st(columns, keys, fp8e4m3)
        return {
            "loaded": ring(loaded, stages, warpgroup.WARPGROUP),
            "transposed": ring(transposed, stages, readers, writers=warpgroup.WARPGROUP),
        }

    @inlined
    def rings_of(self, memory):
        """The ValueRings in the kernel's shared memory."""
        return ValueRings(memory.loaded, memory.transposed)

    @inlined
    def fill(self, values, j, gV, seq, key, head):
        """The producer loads tile j, from key `key` of the sequence on."""
        values.loaded.fill(j, gV, (seq.batch, seq.offset_k + key, head))

    @inlined
    def transpose(self, values, j, sequences, keys, kv_blocks):
        """The producer transposes tile j of the KeyBlocks for the consumers. keys: how many keys of the first tile belong to
        the sequence."""
        tile = values.loaded.wait(j)
        if j == 0:
            sequences.zero_foreign_rows(tile, keys, 1)
        kv_blocks.clear(tile, j, 1)
        warpgroup.transpose_zipped(values.transposed.claim(j), tile)
        values.transposed.publish(j, fenced=False)
        values.loaded.release(j)


class TransposedBefore(TransposeInProducer):
    """A kernel (transpose_values.py) has transposed V to (batch, head, column, key) before, each element once. The producer
    only loads tiles, into one ring. Each sequence must have a batch."""

    before = True
    lag = 0

    def source(self, keys: int, columns: int) -> gl:
        return tiled(st(columns, keys, fp8e4m3), 4, 2, 3)

    def rings(self, keys: int, columns: int, stages: int, readers: int) -> dict[str, ring]:
        return {"transposed": ring(st(columns, keys, fp8e4m3), stages, readers)}

    @inlined
    def rings_of(self, memory):
        return ValueRings(0, memory.transposed)

    @inlined
    def fill(self, values, j, gV, seq, key, head):
        """The producer loads tile j; `key` is a multiple of the tile's keys."""
        values.transposed.fill(j, gV, (seq.batch, head, 0, int32(key // values.transposed.tile.cols)))

    @inlined
    def transpose(self, values, j, sequences, keys, kv_blocks):
        """Another kernel has transposed the tiles already."""
