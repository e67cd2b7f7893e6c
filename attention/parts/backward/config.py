"""What the configurations of the main kernels of backward have in common: a thread block has a block of keys."""

from dataclasses import dataclass, field

from tiles import fp32, st, sv
from tiles.launching.arguments import Record, record

from ..base_config import BaseConfig
from .dq_order import UNORDERED, AscendingAdds, UnorderedAdds
from .dq_parts import RowParts
from .gradient_outputs import AccumulateGradient, StoreGradient
from .query_tiling import QueryTiling, query_tiling
from .slope_gradient import NO_SLOPE_GRADIENT, NoSlopeGradient

DIMS = 64, 128, 256  # head dims are padded to one of these; backward_wide_hopper.py has DIMS of its own


def padded_dim(head_dim: int, value_dim: int | None = None) -> int:
    """The least of DIMS that holds both head dims."""
    return min(d for d in DIMS if d >= max(head_dim, value_dim or head_dim))


@dataclass(frozen=True)
class BackwardConfig(BaseConfig):
    """The configuration of a main kernel of backward. queries: of a tile. deterministic: is dQ summed in a fixed order?
    stores_first: see dq_order.py. accumulate: are gradients added to what their arrays hold? slope_gradient: see
    slope_gradient.py. splits_queries: do several thread blocks have the same keys, each some of the query tiles? See
    backward_combine.py."""

    queries: int
    deterministic: bool = field(default=False, kw_only=True)
    stores_first: bool = field(default=False, kw_only=True)
    accumulate: bool = field(default=False, kw_only=True)
    slope_gradient: NoSlopeGradient = field(default=NO_SLOPE_GRADIENT, kw_only=True)
    splits_queries: bool = field(default=False, kw_only=True)
    overlaps_previous = False  # does it begin while the grid before it ends (PDL)?
    vector_bytes = 16  # the bytes that addresses and strides are multiples of
    adds_dq = True  # does it add parts of dQ to sums in global memory?

    @property
    def parts(self) -> RowParts:
        """The parts in which dQ is computed; each family that computes it defines them."""
        raise NotImplementedError

    @property
    def ordered_adds(self) -> AscendingAdds:
        """The order of dQ's sums with `deterministic`; each family defines it."""
        raise NotImplementedError

    @property
    def unordered_adds(self) -> UnorderedAdds:
        """The order of dQ's sums without `deterministic`."""
        return UNORDERED

    @property
    def order(self) -> UnorderedAdds:
        """The order of dQ's sums."""
        return self.ordered_adds if self.deterministic else self.unordered_adds

    @property
    def result(self) -> StoreGradient:
        """How dQ, dK and dV reach their arrays."""
        return AccumulateGradient(fp32) if self.accumulate else StoreGradient(self.dtype)

    @property
    def params(self) -> Record:
        """The kernel's parameters for the variant, sequences, lists, the order of dQ's sums and slopes."""
        return record(**super().params.fields, **self.order.params, **self.slope_gradient.params)

    @property
    def rows(self) -> int:
        """The number of query rows of a tile."""
        return self.queries

    @property
    def tiling(self) -> QueryTiling:
        """The object that says which query tiles see a key block."""
        tiling = query_tiling(self.by_list, self.deterministic, self.splits_queries)
        return tiling(self.rows, self.kv, self.variant, self.seq_layout.bounded_by_array)

    @property
    def lse_delta(self) -> sv:
        """The type of lse and delta in shared memory: of all rows of a query tile first lse, then delta."""
        return sv(2 * self.rows, fp32)

    @property
    def dout(self) -> st:
        """The type of a tile of dO in shared memory."""
        return st(self.rows, self.value_dim, self.dtype)

    def __str__(self):
        flags = " splits" * self.splits_queries + " accumulates" * self.accumulate
        return super().__str__() + str(self.order) + flags + str(self.slope_gradient)
