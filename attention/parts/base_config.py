"""The fields that configurations of all softmax attention kernels share: what a kernel computes, whatever its tile shapes and
instructions."""

from dataclasses import dataclass, field

from tiles import dtype, st
from tiles.launching.arguments import Record, record

from .bias_tiles import BiasTiles, NoTiles
from .sequences import BatchedLayout
from .tiling import ListedTiling, Tiling
from .variant import Variant, arrays_of


@dataclass(frozen=True)
class BaseConfig:
    """The configuration of a kernel of any family. head_dim, value_dim: padded. kv: keys of a block. seq_layout: how
    sequences lie in memory. axes: how many axes each array of aux has. by_list: do lists say which key blocks a query tile
    reads?"""

    head_dim: int
    value_dim: int
    dtype: dtype
    variant: Variant
    kv: int
    seq_layout: type[BatchedLayout] = field(default=BatchedLayout, kw_only=True)
    axes: tuple[int, ...] = field(default=(), kw_only=True)
    by_list: bool = field(default=False, kw_only=True)

    @property
    def rows(self) -> int:
        """Query rows of a thread block; each family defines it."""
        raise NotImplementedError

    @property
    def tiling(self) -> Tiling:
        """The Tiling, which says which key blocks a query tile reads."""
        return (ListedTiling if self.by_list else Tiling)(self.rows, self.kv, self.variant)

    @property
    def sequences(self) -> BatchedLayout:
        """The layout of sequences for this kernel's tiles."""
        return self.seq_layout(self.rows)

    @property
    def bias_tiles(self) -> NoTiles:
        """The object for bias tiles that TMA loads beside tiles of keys (bias_tiles.py)."""
        dtype = self.variant.tma_bias
        return NoTiles() if dtype is None else BiasTiles(self.rows, self.kv, dtype)

    @property
    def params(self) -> Record:
        """The record of the kernel's arguments that the variant, the sequences' layout, lists of blocks and bias tiles read."""
        parts = self.variant, self.sequences, self.tiling, self.bias_tiles
        return record(**{name: kind for part in parts for name, kind in part.params.items()})

    @property
    def aux(self) -> Record:
        """The record of the arrays of aux."""
        return arrays_of(self.axes)

    @property
    def query(self) -> st:
        """The type of a CTA's query tile in shared memory."""
        return st(self.rows, self.head_dim, self.dtype)

    @property
    def key(self) -> st:
        """The type of a key tile in shared memory."""
        return st(self.kv, self.head_dim, self.dtype)

    @property
    def value(self) -> st:
        """The type of a value tile in shared memory."""
        return st(self.kv, self.value_dim, self.dtype)

    def __str__(self):
        dims = f"D {self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)
        kind = self.seq_layout.label + " by list" * self.by_list
        return f"{dims} {self.dtype} {self.variant}{kind}, {self.rows} x {self.kv}"
