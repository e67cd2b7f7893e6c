"""Where wgmma reads the weights P of O += P V from, as objects with the same methods: from registers, which then hold them
until the product ends, or from shared memory. That costs a store, but leaves three consumers enough registers for the scores of
128 keys."""

from typing import Any

from ops import subtile, warpgroup
from tiles import dtype, inlined, st, static

ROWS = warpgroup.ROWS  # query rows of a consumer


@static
class WeightsInRegisters:
    """The weights of a consumer stay in registers, rounded to the values' dtype."""

    dtype: dtype

    def memory(self, rows: int, keys: int) -> dict[str, st]:
        """The items for weights in the shared storage: none."""
        return {}

    @inlined
    def tile_of(self, memory: Any) -> Any:
        """The tile for weights in the kernel's shared memory."""
        return 0

    @inlined
    def stage(self, p, p_smem, consumer):
        """The operand of the product for the weights p of a consumer. It must be called after the previous product has ended,
        which may still read its operand."""
        return self.dtype(p)


class WeightsInShared(WeightsInRegisters):
    """The weights of a consumer go to shared memory, rounded to the values' dtype."""

    def memory(self, rows: int, keys: int) -> dict[str, st]:
        return {"weights": st(rows, keys, self.dtype)}

    @inlined
    def tile_of(self, memory: Any) -> Any:
        return memory.weights

    @inlined
    def stage(self, p, p_smem, consumer):
        rows = subtile(p_smem, ROWS, consumer)
        warpgroup.store(rows, self.dtype(p))
        warpgroup.sync()
        return rows
