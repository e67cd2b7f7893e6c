"""How the consumers of a scan (chunk_hopper.py) pass their parts of a state on: to their own products, and to memory
where the states before all chunks are wanted. If there are such products, the tile that they read goes to memory, too: it lies
in a ring, and a warp of the producer stores it."""

from ops import subtile, warpgroup
from tiles import dtype, fp16, inlined, ring, st, static

from .gates import Gate
from .results import ScanOutputs, ScanResult
from .tokens import COLUMNS, send_tile


def sends_states(result: ScanResult, gate: Gate, input_dtype: dtype) -> bool:
    """Does the tile that products read go to memory? Not that of gradients' scans, nor of float16 with weights, whose states
    have an exponent."""
    return isinstance(result, ScanOutputs) and result.stores_states and not (gate.weighted and input_dtype is fp16)


@static
class StateTiles:
    """The tiles of `consumers` warpgroups, each of 64 value columns of a transposed state. sent: do they go to memory?"""

    result: ScanResult
    tile: st
    consumers: int
    sent: bool

    @property
    def spec(self):
        """What holds these tiles in the shared storage."""
        if self.sent:
            return ring(self.tile, self.consumers, 1 + warpgroup.WARPGROUP, writers=warpgroup.WARPGROUP)
        return st(self.consumers * self.tile.rows, self.tile.cols, self.tile.dtype)

    @inlined
    def own_tile(self, tiles, consumer):
        """A consumer's tile, if it is always the same."""
        return 0 if self.sent else subtile(tiles, COLUMNS, consumer)

    @inlined
    def put(self, params, tiles, slot, s_t, index, head, row, col, late):
        """A consumer passes on its part of the state before a chunk, to products or to memory. slot: the number of its tile.
        late: is this after the chunk's loads? A scan without outputs puts it then, as the loads' fence would wait for it."""
        if late != self.result.has_outputs:
            if self.sent:
                warpgroup.store(tiles.claim(slot), s_t)
                tiles.publish(slot)
            else:
                self.result.store_state(params, s_t, index, head, row, col)

    @inlined
    def write(self, own_tile, s_t):
        """A consumer writes its part of the state for `read`, unless `put` has done so."""
        if not self.sent:
            warpgroup.store(own_tile, s_t)

    @inlined
    def read(self, tiles, own_tile, slot):
        """The tile of a consumer's part of the state, after its warps have met."""
        return tiles.wait(slot) if self.sent else own_tile

    @inlined
    def release(self, tiles, slot):
        """A consumer gives the tile back, as its product with the state is done."""
        if self.sent:
            tiles.release(slot)

    @inlined
    def send(self, params, tiles, slot, index, head, column):
        """One warp stores the tile of this number, the column-th 64 columns of a head."""
        send_tile(tiles, slot, params.states, (index, head, column, 0))
