"""The part of a configuration that the families share for gradients: of kernels whose thread blocks have a block of keys
each."""

from dataclasses import dataclass, field

from tiles import fp32, st, sv
from tiles.arguments import Record, record

from ..base_config import BaseConfig
from .dq_order import UNORDERED, Ordered, Unordered
from .query_lists import facing
from .results import Added, Written
from .slopes import UNASKED, Unasked
from .tiling import Facing

DIMS = 64, 128, 256  # to which head dims are padded, but by hopper_wide.py


def padded_dim(head_dim: int, value_dim: int | None = None) -> int:
    """The next larger one of DIMS, which must hold both."""
    return min(d for d in DIMS if d >= max(head_dim, value_dim or head_dim))


@dataclass(frozen=True)
class BackwardConfig(BaseConfig):
    """The fields of such a configuration. queries: rows of a tile. ordered, stores: see dq_order.py. adds: see results.py.
    learns: see slopes.py. spans: do thread blocks share the queries that see their keys? See shares.py."""

    queries: int
    ordered: bool = field(default=False, kw_only=True)
    stores: bool = field(default=False, kw_only=True)
    adds: bool = field(default=False, kw_only=True)
    learns: Unasked = field(default=UNASKED, kw_only=True)
    spans: bool = field(default=False, kw_only=True)
    overlaps_previous = False  # whether it begins while the grid before it ends
    vector_bytes = 16  # the bytes that addresses and strides are multiples of
    alone = False  # whether a block has all keys, and writes dQ

    @property
    def in_order(self) -> Ordered:
        """How blocks add to dQ in a fixed order; each family defines it."""
        raise NotImplementedError

    @property
    def in_any(self) -> Unordered:
        """How blocks add to dQ if the order does not matter."""
        return UNORDERED

    @property
    def order(self) -> Unordered:
        """In which order blocks add to dQ."""
        return self.in_order if self.ordered else self.in_any

    @property
    def result(self) -> Written:
        """How gradients are stored."""
        return Added(fp32) if self.adds else Written(self.dtype)

    @property
    def params(self) -> Record:
        """The kernel's arguments for the variant, for sequences, for lists, for the order and for slopes."""
        return record(**super().params.fields, **self.order.params, **self.learns.params)

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return self.queries

    @property
    def tiling(self) -> Facing:
        """Which queries see a block of keys."""
        return facing(self.by_list, self.ordered, self.spans)(self.rows, self.kv, self.variant, self.seq_layout.apart)

    @property
    def of_rows(self) -> sv:
        """Two numbers for each row of a tile: first the log-sum-exps of all rows, then their sums of dO O."""
        return sv(2 * self.rows, fp32)

    @property
    def dout(self) -> st:
        """A tile of dO."""
        return st(self.rows, self.value_dim, self.dtype)

    def __str__(self):
        return super().__str__() + str(self.order) + " spans" * self.spans + " adds" * self.adds + str(self.learns)
