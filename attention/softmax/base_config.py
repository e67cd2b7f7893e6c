"""The part of a configuration that all kernels of softmax attention have in common: what a kernel computes, whatever its shape
and its instructions."""

from dataclasses import dataclass, field
from typing import Any

from tiles import dtype, st
from tiles.arguments import Record, record

from .bias_tiles import BiasTiles, NoTiles
from .key_block_lists import Listed
from .key_sources import OneBuffer, PagedKeys
from .sequences import BatchedLayout, KvCacheLayout
from .tiling import Tiling
from .variants import Variant, arrays_of


def in_pages(parts: int = 1) -> dict[str, Any]:
    """The fields of a BaseConfig for keys and values that are cached in pages."""
    return {"seq_layout": KvCacheLayout, "kv_source": PagedKeys(parts)}


@dataclass(frozen=True)
class BaseConfig:
    """What kernels of all families are configured by. head_dim, value_dim: padded. kv: keys of a block. seq_layout: how
    sequences lie in memory. kv_source: where keys and values come from. axes: how many axes each array of aux has. by_list: do
    lists say which key blocks a query tile reads? float32_out: is the output float32? accumulates: is the output combined with
    the one for other keys that is already there?"""

    head_dim: int
    value_dim: int
    dtype: dtype
    variant: Variant
    kv: int
    seq_layout: type[BatchedLayout] = field(default=BatchedLayout, kw_only=True)
    kv_source: OneBuffer = field(default=OneBuffer(), kw_only=True)
    axes: tuple[int, ...] = field(default=(), kw_only=True)
    by_list: bool = field(default=False, kw_only=True)
    float32_out: bool = field(default=False, kw_only=True)
    accumulates: bool = field(default=False, kw_only=True)

    @property
    def rows(self) -> int:
        """Query rows of a thread block; each family defines it."""
        raise NotImplementedError

    @property
    def tiling(self) -> Tiling:
        """The Tiling, which says what keys a tile's queries see."""
        return (Listed if self.by_list else Tiling)(self.rows, self.kv, self.variant)

    @property
    def sequences(self) -> BatchedLayout:
        """The object that says how sequences lie."""
        return self.seq_layout(self.rows)

    @property
    def brought(self) -> NoTiles:
        """What TMA loads next to a tile of keys (bias_tiles.py)."""
        brings = self.variant.tma_bias
        return NoTiles() if brings is None else BiasTiles(self.rows, self.kv, brings)

    @property
    def params(self) -> Record:
        """The record of the kernel's arguments for the variant, the sequences, the source of keys, lists, and tiles of a
        bias."""
        parts = self.variant, self.sequences, self.kv_source, self.tiling, self.brought
        return record(**{name: what for part in parts for name, what in part.params.items()})

    @property
    def aux(self) -> Record:
        """The record of the arrays of aux."""
        return arrays_of(self.axes)

    @property
    def query(self) -> st:
        """A block's tile of Q."""
        return st(self.rows, self.head_dim, self.dtype)

    @property
    def key(self) -> st:
        """A tile of K."""
        return st(self.kv, self.head_dim, self.dtype)

    @property
    def value(self) -> st:
        """A tile of V."""
        return st(self.kv, self.value_dim, self.dtype)

    def __str__(self):
        dims = f"D {self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)
        kind = self.seq_layout.label + f"{self.kv_source}" + " by list" * self.by_list
        kind += " joined" if self.accumulates else " unrounded" * self.float32_out
        return f"{dims} {self.dtype} {self.variant}{kind}, {self.rows} x {self.kv}"
