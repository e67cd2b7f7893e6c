"""Where a consumer's weights lie for their product with values, as objects with the same methods. wgmma takes them from
registers, which hold them until the product is over, or from shared memory: that costs a store, but then the registers of three
consumers have room for the scores of 128 keys."""

from typing import Any

from ops import subtile, warpgroup
from tiles import dtype, inlined, st, static

ROWS = warpgroup.ROWS  # of a consumer


@static
class InRegisters:
    """In registers, rounded to the values' dtype."""

    dtype: dtype

    def memory(self, rows: int, keys: int) -> dict[str, st]:
        """What they take of shared memory, for tiles of so many rows and keys: the items of a plan behind q, k and v."""
        return {}

    @inlined
    def opened(self, items: Any) -> Any:
        """The items of a plan, as `brought` opens them, and the room for weights last."""
        return items + (0,)

    @inlined
    def handed(self, p, room, consumer):
        """A consumer's weights, as the product takes them: not before the last product is over, which may still read."""
        return self.dtype(p)


class InShared(InRegisters):
    """The same in shared memory."""

    def memory(self, rows: int, keys: int) -> dict[str, st]:
        return {"weights": st(rows, keys, self.dtype)}

    @inlined
    def opened(self, items: Any) -> Any:
        q, k, v, room, tiles = items
        return q, k, v, tiles, room

    @inlined
    def handed(self, p, room, consumer):
        mine = subtile(room, ROWS, consumer)
        warpgroup.store(mine, self.dtype(p))
        warpgroup.sync()
        return mine
