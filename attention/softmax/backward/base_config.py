"""The part of a configuration that the families share for gradients: of kernels whose thread blocks have a block of keys
each."""

from dataclasses import dataclass, field

from tiles import fp32, st, sv
from tiles.arguments import Record, record

from ..base_config import BaseConfig
from .dq_order import UNORDERED, AscendingAdds, UnorderedAdds
from .query_lists import query_tiling
from .results import AccumulateGradient, StoreGradient
from .slopes import NO_SLOPE_GRADIENT, NoSlopeGradient
from .tiling import QueryTiling

DIMS = 64, 128, 256  # to which head dims are padded, but by hopper_wide.py


def padded_dim(head_dim: int, value_dim: int | None = None) -> int:
    """The next larger one of DIMS, which must hold both."""
    return min(d for d in DIMS if d >= max(head_dim, value_dim or head_dim))


@dataclass(frozen=True)
class BackwardConfig(BaseConfig):
    """The fields of such a configuration. queries: rows of a tile. ordered, stores: see dq_order.py. adds: see results.py.
    learns: see slopes.py. spans: do thread blocks share the queries that see their keys? See shares.py."""

    queries: int
    deterministic: bool = field(default=False, kw_only=True)
    stores_first: bool = field(default=False, kw_only=True)
    accumulate: bool = field(default=False, kw_only=True)
    slope_gradient: NoSlopeGradient = field(default=NO_SLOPE_GRADIENT, kw_only=True)
    splits_queries: bool = field(default=False, kw_only=True)
    overlaps_previous = False  # whether it begins while the grid before it ends
    piece = 16  # the bytes that addresses and strides are multiples of
    single_block = False  # whether a block has all keys, and writes dQ

    @property
    def ordered_adds(self) -> AscendingAdds:
        """How blocks add to dQ in a fixed order; each family defines it."""
        raise NotImplementedError

    @property
    def unordered_adds(self) -> UnorderedAdds:
        """How blocks add to dQ if the order does not matter."""
        return UNORDERED

    @property
    def order(self) -> UnorderedAdds:
        """In which order blocks add to dQ."""
        return self.ordered_adds if self.deterministic else self.unordered_adds

    @property
    def result(self) -> StoreGradient:
        """How gradients are stored."""
        return AccumulateGradient(fp32) if self.accumulate else StoreGradient(self.dtype)

    @property
    def params(self) -> Record:
        """The kernel's arguments for the variant, for sequences, for lists, for the order and for slopes."""
        return record(**super().params.fields, **self.order.params, **self.slope_gradient.params)

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.queries

    @property
    def tiling(self) -> QueryTiling:
        """Which queries see a block of keys."""
        return query_tiling(self.by_list, self.deterministic, self.splits_queries)(self.rows, self.kv, self.variant, self.lie.apart)

    @property
    def lse_delta(self) -> sv:
        """Two numbers for each row of a tile: first the log-sum-exps of all rows, then their sums of dO O."""
        return sv(2 * self.rows, fp32)

    @property
    def dout(self) -> st:
        """A tile of dO."""
        return st(self.rows, self.value_dim, self.dtype)

    def __str__(self):
        return super().__str__() + str(self.order) + " spans" * self.splits_queries + " adds" * self.accumulate + str(self.slope_gradient)
