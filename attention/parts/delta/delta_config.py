"""What configurations of the delta rule's kernels for Hopper have in common, where decays are one number a token and head (or
none)."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ops import warpgroup
from tiles import bf16, dtype, fp16, st
from tiles.targets import Target

from ..recurrent.gate_formulas import PLAIN_BETA, BetaFormula, GateFormula
from ..recurrent.tokens import CHUNK, COLUMNS
from .delta_chunks import KEY_DIMS, ChunkVectors
from .delta_decay import UngatedDelta, delta_decay
from .delta_recent_chunks import EveryChunk, RecentChunks


@dataclass(frozen=True)
class DeltaConfig:
    """A kernel's configuration. key_dim: the channels of keys, padded. gated: are there decays?"""

    key_dim: int
    dtype: dtype
    gated: bool
    label: ClassVar[str] = ""

    @property
    def columns(self) -> int:
        """The columns of values that a block has."""
        return COLUMNS

    @property
    def key(self):
        """The tile of Q or K for a chunk."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def values(self):
        """The tile of what has the columns of V, for a chunk."""
        return st(CHUNK, self.columns, self.dtype)

    @property
    def state(self):
        """The tile of S or dS, transposed: the columns of values by Dk."""
        return st(self.columns, self.key_dim, self.dtype)

    @property
    def square(self):
        """The tile of T or of scores for a chunk."""
        return st(CHUNK, CHUNK, self.dtype)

    @property
    def vectors(self):
        """The vectors with a number for each token of a chunk: beta and, with decays, their sums and factors."""
        return ChunkVectors(self.gated)

    @property
    def recent_chunks(self) -> EveryChunk:
        """Which chunks leave anything in the state at the end of a segment."""
        return RecentChunks() if self.gated else EveryChunk()

    def __str__(self):
        flags = [_describe(x.name, getattr(self, x.name)) for x in fields(self)[2:]]
        return ", ".join(filter(None, (self.label, f"Dk {self.key_dim} {self.dtype}", *flags)))


@dataclass(frozen=True)
class NormedDeltaConfig(DeltaConfig):
    """A kernel's configuration. varlen: are sequences packed (cu_seqlens)? l2norm: are queries and keys divided by their L2
    norms?"""

    varlen: bool = False
    l2norm: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class DeltaConsumerConfig(NormedDeltaConfig):
    """The configuration of a kernel that goes along sequences. consumers: warpgroups that have 64 columns of values each.
    helpers: warpgroups that load and compute for them, ahead of them."""

    consumers: int = field(default=1, kw_only=True)
    helpers: ClassVar[int] = 2

    @property
    def columns(self):
        """The columns of values of all consumers."""
        return COLUMNS * self.consumers

    @property
    def threads(self):
        """The threads of a block, those of all its warpgroups."""
        return warpgroup.THREADS * (self.consumers + self.helpers)


@dataclass(frozen=True)
class RawDeltaConfig(NormedDeltaConfig):
    """The configuration of a kernel that reads gates and beta. formula, beta: compute them from the numbers in memory; None:
    these are the gates and beta."""

    formula: GateFormula | None = field(default=None, kw_only=True)
    beta: BetaFormula = field(default=PLAIN_BETA, kw_only=True)

    @property
    def decay(self) -> UngatedDelta:
        """The decays of a chunk."""
        return delta_decay(self.dtype, self.gated, self.formula)


@dataclass(frozen=True)
class DeltaScanConfig(DeltaConsumerConfig, RawDeltaConfig):
    """The configuration of a kernel that goes along sequences and solves their chunks on the way."""

    @classmethod
    def scan_space(cls, sizes: Iterable[tuple[int, int]], target: Target, everything: bool) -> Iterator[Any]:
        """The configurations of these sizes, (padded key dim, consumers), without formulas and norms. Without `everything`,
        varlen ones come in one size only, and fp16 is left out."""
        if target.has_wgmma:
            for dtype, (key_dim, n), varlen in itertools.product((bf16, fp16) if everything else (bf16,), sizes, (False, True)):
                if not varlen or (key_dim, n) == (128, 2) or (everything and dtype is bf16):
                    yield from (cls(key_dim, dtype, gated, varlen, consumers=n) for gated in (False, True))


def _describe(name: str, value: Any) -> str:
    """What a field adds to the name of a configuration."""
    if value is True:
        return name.replace("_", " ")
    return f"{name} {value}" if type(value) is int else str(value or "")


def delta_sizes(everything: bool) -> Iterator[tuple[int, dtype]]:
    """(padded key dim, dtype) of the configurations of a kernel; fp16 with `everything` only."""
    return itertools.product(KEY_DIMS, (bf16, fp16) if everything else (bf16,))
