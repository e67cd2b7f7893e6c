"""What configurations of the delta rule's kernels for Hopper have in common, where decays are one number a token and head (or
none)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from tiles import bf16, dtype, fp16, st

from .delta_chunks import KEY_DIMS, ChunkVectors
from .tokens import CHUNK, COLUMNS


@dataclass(frozen=True)
class DeltaTiles:
    """A kernel's configuration. key_dim: the channels of keys, padded. gated: are there decays? Kernels add further fields:
    varlen: are sequences packed (cu_seqlens)? formula, beta: compute gates and beta from the numbers in memory; None: these are
    the gates and beta. l2norm: are keys (and queries) divided by their L2 norms?"""

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
        """The vectors of a chunk's tokens."""
        return ChunkVectors(self.gated)

    def __str__(self):
        flags = [_describe(field.name, getattr(self, field.name)) for field in fields(self)[2:]]
        return ", ".join(filter(None, (f"{self.label}, Dk {self.key_dim} {self.dtype}", *flags)))


def _describe(name: str, value: Any) -> str:
    """What a field adds to the name of a configuration."""
    if value is True:
        return name.replace("_", " ")
    return f"{value} {name}" if type(value) is int else str(value or "")


def delta_sizes(everything: bool) -> Iterator[tuple[int, dtype]]:
    """(padded key dim, dtype) of the configurations of a kernel; fp16 with `everything` only."""
    return itertools.product(KEY_DIMS, (bf16, fp16) if everything else (bf16,))
