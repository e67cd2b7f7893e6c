"""Where a consumer's weights lie for their product with values, as objects with the same methods. wgmma takes them from
registers, which hold them until the product is over, or from shared memory: that costs a store, but then the registers of three
consumers have room for the scores of 128 keys."""

from typing import Any

from ops import subtile, warpgroup
from tiles import dtype, inlined, st, static

ROWS = warpgroup.ROWS  # of a consumer


@static
class InRegisters:
    """The weights of a consumer stay in registers, rounded to the values' dtype."""

    dtype: dtype

    def memory(self, rows: int, keys: int) -> dict[str, st]:
        """The items that the weights add to the plan of shared memory, behind q, k and v: none."""
        return {}

    @inlined
    def opened(self, items: Any) -> Any:
        """The items of an opened plan, with the room for weights last."""
        return items + (0,)

    @inlined
    def handed(self, p, room, consumer):
        """The weights of a consumer, as the product takes them. It must be called after the product before has ended, which
        may still read them."""
        return self.dtype(p)


class InShared(InRegisters):
    """The weights of a consumer go to shared memory, rounded to the values' dtype, from where the product takes them."""

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
